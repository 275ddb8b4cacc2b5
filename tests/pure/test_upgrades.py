"""What users rely on outlives our versions: reports and patches that were made once are read for
good, and public names keep their meaning.

Each folder of tests/fixtures was made on the day that it is called by, and stays as it is:

    fusion-advisor analyze model.py --device h200 --out .     (report.json and graph.json)
    fusion-advisor patch model.py --device h200 --out kernels.patch

tests/fixtures/names.json is the ledger of public names. A new one is entered with --regen; none is
ever taken out, one that has gone is `retired`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

import fusion_advisor
from fusion_advisor.ci.baseline import judge_again
from fusion_advisor.ci.conditions import NAMES
from fusion_advisor.ci.configuration import Configuration, ScenarioTable, Thresholds
from fusion_advisor.cli.app import app
from fusion_advisor.codegen.kernel_package import older, stale
from fusion_advisor.report.formats import FORMATS, render
from fusion_advisor.report.schema import Report, json_schema, load_report
from fusion_advisor.rulebook.load import load_rulebook

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NAMED = FIXTURES / "names.json"
MADE = sorted(folder for folder in FIXTURES.iterdir() if folder.is_dir())
RULES = load_rulebook()

each_version = pytest.mark.parametrize("made", MADE, ids=lambda folder: folder.name)


def fields(content: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields of a report but those below `graph`; rows of a list as one."""
    if isinstance(content, list):
        for row in content:
            yield from fields(row, path)
    elif isinstance(content, dict):
        for name, value in content.items():
            yield f"{path}.{name}"
            if name != "graph":
                yield from fields(value, f"{path}.{name}")


@each_version
@pytest.mark.parametrize("name", FORMATS)
def test_a_report_of_then_is_shown_in_every_format(made: Path, name: str) -> None:
    text = render(load_report(made / "report.json"), name)
    assert "pointwise_chain" in text or "pointwise-chain" in text


@each_version
def test_every_field_of_then_is_a_field_now(made: Path) -> None:
    content = json.loads((made / "report.json").read_text(encoding="utf-8"))
    known = set(_schema_fields(json_schema()))
    assert {path for path in fields(content) if path not in known and not _free(path)} == set()


def _schema_fields(schema: dict[str, Any]) -> Iterator[str]:
    """The paths of the fields that the published schema knows."""
    rows = schema["$defs"]

    def below(part: Any, path: str, within: tuple[str, ...]) -> Iterator[str]:
        if isinstance(part, list):
            for each in part:
                yield from below(each, path, within)
        if not isinstance(part, dict):
            return
        if "$ref" in part:
            name = part["$ref"].rpartition("/")[2]
            if name not in within:
                yield from below(rows[name], path, (*within, name))
        for key in ("anyOf", "items"):
            yield from below(part.get(key), path, within)
        for name, value in part.get("properties", {}).items():
            yield f"{path}.{name}"
            yield from below(value, f"{path}.{name}", within)

    yield from below(schema, "", ())


def _free(path: str) -> bool:
    """Below a field whose keys are names: of rules, units, inputs."""
    tables = (
        ".rules.explained.",
        ".device.peaks.",
        ".device.sources.",
        ".scenario.shapes.",
        ".totals.time_by_bound.",
    )
    return path.startswith(tables)


@each_version
def test_a_report_of_then_is_judged_again_from_its_graph(made: Path) -> None:
    report = load_report(made / "report.json")
    again = judge_again(report, made / "report.json", RULES)
    assert isinstance(again, Report)
    assert {row.name for row in again.nodes} == {row.name for row in report.nodes}


@each_version
def test_diff_takes_a_report_of_then(made: Path, tmp_path: Path) -> None:
    report = load_report(made / "report.json")
    report.tool.version = "99.0"
    (tmp_path / "report.json").write_text(render(report, "json"), encoding="utf-8")
    shutil.copy(made / "graph.json", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fusion_advisor", "diff", made / "report.json", "report.json",
         "--fail-on", "new", "--fail-on", "regression", "--fail-on", "regression-time"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "no difference in traffic or verdicts\n")
    assert done.stderr.count("judged again from its graph\n") == 2


@pytest.fixture
def tree(made: Path, tmp_path: Path) -> Path:
    """A model to which the patch of then was applied."""
    shutil.copy(made / "model.py", tmp_path)
    patch = (made / "kernels.patch").read_bytes()
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True)
    return tmp_path


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusion_advisor", "patch", "model.py", "--check"],
        cwd=tree, capture_output=True, text=True,
    )  # fmt: skip


@each_version
def test_a_patch_of_then_passes_the_check(made: Path, tree: Path) -> None:
    done = check(tree)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("so is what it was made from\n")
    assert [*older(tree / "fused_model", "99.0", "0" * 64)], "an older tool is told"
    assert [*stale(tree / "fused_model")] == []


@each_version
def test_what_is_edited_in_a_patch_of_then_is_found(made: Path, tree: Path) -> None:
    kernel = tree / "fused_model" / "swiglu.py"
    kernel.write_text(kernel.read_text().replace("num_warps=", "num_warps=2 * "))
    assert check(tree).returncode == 1
    (tree / "model.py").write_text((tree / "model.py").read_text() + "# more\n")
    assert "layer_norm.py: stale: model.py changed since\n" in check(tree).stderr


# -- public names ----------------------------------------------------------------------------------


def codes_now() -> dict[str, str]:
    """The gates' codes with what they ask."""
    return {gate.code: name for name, gate in RULES.gates.items()}


def names_now() -> set[str]:
    """The other public names of this version, each with what it is a name of."""
    commands = vars(typer.main.get_command(app))["commands"]
    tables = {"": Configuration, "scenarios.": ScenarioTable, "thresholds.": Thresholds}
    return {
        *(f"idiom {name}" for name in RULES.patterns),
        *(f"advice {name}" for name in RULES.advice),
        *(f"device {name}" for name in RULES.devices),
        *(f"condition {name}" for name in NAMES),
        *(f"format {name}" for name in FORMATS),
        *(f"python {name}" for name in fusion_advisor.__all__),
        *(f"command {name}" for name in commands),
        *(
            f"option {name} {text}"
            for name, command in commands.items()
            for each in command.params
            for text in (*each.opts, *each.secondary_opts)
            if text.startswith("-")
        ),
        *(
            f"configuration {above}{name.replace('_', '-')}"
            for above, table in tables.items()
            for name in table.model_fields
        ),
    }


@dataclass(frozen=True)
class Ledger:
    """Names that there ever were. `retired` have gone, each after its time in the CHANGELOG."""

    codes: dict[str, str]
    names: list[str]
    retired: list[str]

    def with_new(self, codes: dict[str, str], names: set[str]) -> Ledger:
        """What is entered of this version; a code that is there keeps its meaning."""
        known = dict(sorted({**codes, **self.codes}.items()))
        return Ledger(known, sorted({*self.names, *names}), self.retired)

    def broken(self, codes: dict[str, str], names: set[str]) -> list[str]:
        """What this version must not do."""
        known = {*self.codes, *self.names}
        there = {*codes, *names}
        twice = [code for code, name in codes.items() if self.codes.get(code, name) != name]
        again = [name for name in self.retired if name in there]
        return [
            *(f"{code} was the code of {self.codes[code]}" for code in twice),
            *(f"{name} was retired and is used again" for name in again),
            *(f"{name} is gone" for name in sorted(known - there - {*self.retired})),
            *(f"{name} is new: enter it with --regen" for name in sorted(there - known)),
        ]


def test_public_names_stay_and_codes_are_never_used_twice(request: pytest.FixtureRequest) -> None:
    ledger = Ledger(**json.loads(NAMED.read_text(encoding="utf-8")))
    if request.config.getoption("--regen"):
        ledger = ledger.with_new(codes_now(), names_now())
        NAMED.write_text(json.dumps(asdict(ledger), indent=1) + "\n", encoding="utf-8")
    assert ledger.broken(codes_now(), names_now()) == []


def test_what_breaks_a_name_is_seen() -> None:
    ledger = Ledger({"FA401": "traffic-saving", "FA1": "old"}, ["idiom softmax"], ["FA1"])
    assert ledger.broken({"FA401": "traffic-saving"}, {"idiom softmax"}) == []
    turned = {"FA401": "another", "FA1": "old", "FA2": "new"}
    assert ledger.broken(turned, set()) == [
        "FA401 was the code of traffic-saving",
        "FA1 was retired and is used again",
        "idiom softmax is gone",
        "FA2 is new: enter it with --regen",
    ]
    assert ledger.with_new(turned, set()).codes["FA401"] == "traffic-saving", "regen hides nothing"
