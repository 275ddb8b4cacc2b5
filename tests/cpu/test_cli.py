"""The command line as a user runs it: in a process of its own (`spawned`), with its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fusion_advisor.shipped.files import SHIPPED

from . import spawned

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = str(ROOT / "examples" / "softmax.py")
QUICK = ("--no-verify", "--no-compile")


def run(
    *arguments: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with an empty cache unless `environment` has one."""
    command = [sys.executable, "-m", "fusion_advisor", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as cache:
        own = {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "FUSION_ADVISOR_CACHE": cache}
        env = {**os.environ, **own, **(environment or {})}
        return spawned.run(command, cwd=cwd, env=env)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of an error."""
    (line,) = done.stderr.splitlines()
    assert not done.stdout
    return line


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What `analyze --out` of the softmax example leaves, and what it says."""
    folder = tmp_path_factory.mktemp("softmax")
    done = run("analyze", SOFTMAX, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    return folder, done.stderr


def test_the_versions_are_one_line() -> None:
    done = run("--version")
    assert re.fullmatch(r"fusion-advisor \S+, torch \S+, triton \S+\n", done.stdout)
    assert done.returncode == 0


def test_no_command_shows_the_commands() -> None:
    done, asked = run(), run("--help")
    assert (done.returncode, asked.returncode) == (2, 0)
    assert done.stdout == asked.stdout
    assert not done.stderr


def test_analyze_leaves_a_report_and_proven_kernels(softmax: tuple[Path, str]) -> None:
    folder, _ = softmax
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    reports = {"report.json", "report.md", "report.html", "report.sarif", "report.explorer.json"}
    kernels = {f"kernels/{name}" for name in ("softmax.py", *SHIPPED)}
    assert files == {*reports, "graph.json", *kernels}
    report = json.loads((folder / "report.json").read_text())
    (group,) = report["groups"]
    assert (group["pattern"], group["route"]) == ("softmax", "framework")
    assert group["kernel"]["status"] in ("interpreted", "gpu-checked")
    assert group["kernel"]["check"]["passed"]
    assert group["kernel"]["resources"]["spill_bytes"] == 0
    assert (folder / group["kernel"]["file"]).is_file()
    assert [row["file"] for row in group["sources"]] == ["examples/softmax.py"] * 4


def test_what_was_assumed_comes_first(softmax: tuple[Path, str]) -> None:
    folder, said = softmax
    first = said.splitlines()[0]
    assert first.startswith("assumed: device=")
    for fact in json.loads((folder / "report.json").read_text())["scenario"]["defaults"]:
        assert fact in first


def test_the_kernel_says_how_to_make_it_again(softmax: tuple[Path, str]) -> None:
    text = (softmax[0] / "kernels" / "softmax.py").read_text()
    assert f"fusion-advisor emit {SOFTMAX} --out kernels" in " ".join(text.split())


@pytest.mark.parametrize("name", ["text", "json", "md", "sarif", "model-explorer"])
def test_a_report_is_shown_again(softmax: tuple[Path, str], name: str) -> None:
    done = run("report", softmax[0] / "report.json", "--format", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "softmax" in done.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("option", [("--batch", "3"), ("--input", "x=3x4"), ("--dynamic",)])
def test_an_exported_program_is_as_it_was_exported(tmp_path: Path, option: tuple[str, ...]) -> None:
    program = torch.export.export(torch.nn.Softmax(-1), (torch.zeros(8, 64),))
    torch.export.save(program, tmp_path / "softmax.pt2")
    done = run("analyze", "softmax.pt2", *option, *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "softmax.pt2 is as it was exported" in one_line(done)


def test_kernels_of_an_earlier_run_go_and_other_files_stay(
    softmax: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(softmax[0], folder)
    (folder / "kernels" / "mine.py").write_text("")
    done = run("analyze", str(ROOT / "examples" / "norm_silu.py"), "--out", folder, *QUICK)
    assert done.returncode == 0, done.stderr
    groups = json.loads((folder / "report.json").read_text())["groups"]
    expected = {Path(group["kernel"]["file"]).name for group in groups}
    expected |= {"mine.py", *SHIPPED}
    assert {file.name for file in (folder / "kernels").iterdir()} == expected
    assert "softmax.py" not in expected


def test_json_on_standard_output_is_alone(tmp_path: Path) -> None:
    done = run("analyze", SOFTMAX, "--json", "-", f"--format=md={tmp_path / 'r.md'}", *QUICK)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups"][0]["kernel"]["status"] == "emitted"
    assert done.stderr.startswith("assumed: ")
    assert (tmp_path / "r.md").read_text().startswith("# ")


def test_fail_on_accepted(tmp_path: Path) -> None:
    done = run("analyze", SOFTMAX, "--fail-on", "accepted", *QUICK, cwd=tmp_path)
    assert done.returncode == 1
    assert "--fail-on accepted" in done.stderr
    assert not list(tmp_path.iterdir())


def test_emit_writes_the_kernels(tmp_path: Path) -> None:
    done = run("emit", SOFTMAX, "--out", tmp_path / "mine", *QUICK)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "mine").iterdir()} == {"softmax.py", *SHIPPED}


def test_analyze_and_emit_take_the_same_scenario() -> None:
    options = ("--device", "--dtype", "--input", "--dynamic", "--kv-len", "--rules", "--no-verify")
    for command in ("analyze", "emit"):
        said = run(command, "--help").stdout
        assert all(option in said for option in options), command


WRONG = [
    (2, "unknown device 'h9000'", ("analyze", SOFTMAX, "--device", "h9000")),
    (2, "unknown dtype 'f7'", ("analyze", SOFTMAX, "--dtype", "f7")),
    (2, "--mode: 'both'", ("analyze", SOFTMAX, "--mode", "both")),
    (2, "--format 'pdf'", ("analyze", SOFTMAX, "--format", "pdf")),
    (2, "--fail-on: 'rain'", ("analyze", SOFTMAX, "--fail-on", "rain")),
    (2, "--input: 'x'", ("analyze", SOFTMAX, "--input", "x")),
    (2, "no such rules", ("analyze", SOFTMAX, "--rules", "none.toml")),
    (2, "only one format", ("analyze", SOFTMAX, "--json", "-", "--format", "md")),
    (2, "kv-len 9: only for phase decode", ("analyze", SOFTMAX, "--kv-len", "9")),
    (2, "MODEL", ("analyze",)),
    (2, "--bogus", ("analyze", SOFTMAX, "--bogus")),
    (2, "none.json", ("report", "none.json")),
    (2, "not JSON", ("report", "pyproject.toml")),
    (2, "unknown rule 'rain'", ("explain", "rain")),
    (2, "unknown rule 'softmx': did you mean softmax?", ("explain", "softmx")),
    (2, "none.py: no such file; give FILE.py", ("analyze", "none.py")),
    (2, "--format 'md'", ("explain", "FA401", "--format", "md")),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("code", "message", "arguments"), WRONG, ids=[w[1] for w in WRONG])
def test_what_is_wrong_is_one_line_with_its_code(
    code: int, message: str, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments)
    assert (done.returncode, message in one_line(done)) == (code, True), done.stderr


def test_a_model_that_raises_names_its_line(tmp_path: Path) -> None:
    model = tmp_path / "broken.py"
    model.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + undefined\n"
        "def get_inputs():\n"
        "    return [torch.ones(2)]\n"
    )
    done = run("analyze", model, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert f"{model}:4" in one_line(done)
    assert not (tmp_path / "out").exists()


def test_a_wrong_rule_names_file_and_field(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.toml"
    overlay.write_text("[gates.on-chip]\ncomparison = '!='\n")
    done = run("analyze", SOFTMAX, "--rules", overlay)
    assert done.returncode == 2
    assert f"{overlay}: gates.on-chip.comparison" in one_line(done)


def test_rules_say_how_large_a_mask_may_be_that_is_looked_at(tmp_path: Path) -> None:
    model, overlay = tmp_path / "model.py", tmp_path / "mine.toml"
    model.write_text(
        "import torch\n\n\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, q):\n"
        "        mask = torch.ones(64, 64, dtype=torch.bool)\n"
        "        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)\n"
        "\n\n"
        "def get_inputs():\n"
        "    return [torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)]\n"
    )
    overlay.write_text(
        '[capture]\nmask_elements = { value = 4095, unit = "elements", source = "a test" }\n'
    )
    done = run("analyze", model, "--json", "-", *QUICK, "--rules", overlay)
    assert "it is made of 4096 elements, more than are looked at (4095)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("explain", "FA401"), "traffic-saving"),
        (("explain", "softmax"), "exp of a row"),
        (("explain", "--all"), "FA901"),
        (("explain", "--all", "--format", "md"), "### FA901 no-schedule"),
        (("devices",), "h200"),
        (("rules",), "FA101"),
        (("rules",), "launch-bound"),
        (("ops",), "aten.silu.default"),
        (("doctor",), "interpreter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_what_is_known(arguments: tuple[str, ...], expected: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


@pytest.mark.parametrize("command", ["analyze", "emit"])
def test_a_folder_that_is_a_file_is_refused_before_any_work(tmp_path: Path, command: str) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    done = run(command, SOFTMAX, "--out", file)
    assert done.returncode == 2
    assert one_line(done) == f"fusion-advisor: error: {file}: {file} is a file; give a folder"
    assert file.read_text() == "mine"


def test_a_standard_output_that_is_full(softmax: tuple[Path, str]) -> None:
    command = [sys.executable, "-m", "fusion_advisor", "report", str(softmax[0] / "report.json")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "fusion-advisor: error: standard output cannot be written: No space left on device"
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("blocking", "option"),
    [
        ("out", ("--out", "out")),
        ("out/kernels", ("--out", "out")),
        ("out/report.json/", ("--out", "out")),
        ("out", ("--format", "html=out/report.html")),
        ("page.html/", ("--format", "html=page.html")),
        ("report.json/", ("--json", "report.json")),
        ("", ("--out", "/proc/nowhere")),
    ],
    ids=" ".join,
)
def test_where_nothing_can_be_written_the_model_is_not_run(
    tmp_path: Path, blocking: str, option: tuple[str, ...]
) -> None:
    """`blocking` is a file where a folder should be, or a folder, with a slash, for a file."""
    (tmp_path / "model.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    place = tmp_path / blocking
    (place if blocking.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
    if blocking and not blocking.endswith("/"):
        place.touch()
    before = {*tmp_path.rglob("*")}
    done = run("analyze", "model.py", *option, *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "give " in one_line(done)
    assert {*tmp_path.rglob("*")} == before


def test_what_was_assumed_is_said_once_and_the_summary_fits_a_screen(
    softmax: tuple[Path, str],
) -> None:
    _, said = softmax
    assert said.count("assumed: ") == 1
    assert len(said.splitlines()) <= 41
    shown = run("report", softmax[0] / "report.json").stdout
    assert shown.count("assumed: ") == 1
    whole = run("report", softmax[0] / "report.json", "--verbose").stdout
    assert "holds: " in whole
    assert "holds: " not in shown
