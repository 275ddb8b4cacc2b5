"""The habits of a CI job, as it runs them: a table, scenarios, a baseline, comments, conditions."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fusion_advisor.shipped.files import SHIPPED

from .test_cli import QUICK, ROOT, one_line, run

TABLE = """
[tool.fusion-advisor]
model = "norm_silu.py"
device = "h200"

[tool.fusion-advisor.scenarios.small]
batch = 64

[tool.fusion-advisor.scenarios.large]
weight = 3
"""
COMMENT = "  # fusion-advisor: ignore[FA401] fused by hand elsewhere"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git working tree with a model and its table."""
    (tmp_path / ".git").mkdir()
    shutil.copy(ROOT / "examples" / "norm_silu.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(TABLE)
    return tmp_path


def analyze(repository: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("analyze", *options, *QUICK, cwd=repository)


def test_all_scenarios_of_the_table_in_one_run(repository: Path) -> None:
    done = analyze(repository, "--out", "out", "--format", "md=comment.md")
    assert done.returncode == 0, done.stderr
    out = repository / "out"
    reports = {n: json.loads((out / n / "report.json").read_text()) for n in ("small", "large")}
    assert [report["scenario"]["batch"] for report in reports.values()] == [64, None]
    times = {name: report["totals"]["time_us"] for name, report in reports.items()}
    summary = json.loads((out / "scenarios.json").read_text())
    assert [(row["name"], row["weight"]) for row in summary["scenarios"]] == [
        ("small", 1), ("large", 3),
    ]  # fmt: skip
    assert summary["total"]["time_us"] == pytest.approx(times["small"] + 3 * times["large"])
    assert "all, by weight: " in done.stderr
    kernels = {file.name: file for file in (out / "small" / "kernels").glob("*.py")}
    (kernel,) = (file for name, file in kernels.items() if name not in SHIPPED)
    assert "fusion-advisor emit --scenario small --out kernels" in kernel.read_text()
    for name in reports:
        assert (repository / f"comment.{name}.md").read_text().startswith("# `norm_silu.py`")
        assert list((out / name / "kernels").glob("*.py"))
    again = analyze(repository, "--baseline", "out", "--fail-on", "new", "--fail-on", "regression")
    assert again.returncode == 0, again.stderr


def test_one_scenario_of_the_table(repository: Path) -> None:
    done = analyze(repository, "--scenario", "small", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scenario"]["batch"] == 64
    assert "by weight" not in done.stderr
    assert "several scenarios" in one_line(analyze(repository, "--json", "-"))
    assert "--scenario is missing" in one_line(run("emit", "--out", "k", cwd=repository))


def test_only_what_is_new_fails_and_a_comment_sets_it_aside(repository: Path) -> None:
    model = repository / "norm_silu.py"
    source = model.read_text()
    model.write_text(source.replace("        h = x", "        return x.relu()\n        h = x"))
    options = ("--scenario", "large", "--baseline", "base.json", "--fail-on", "new")
    assert analyze(repository, *options[:2], "--json", "base.json").returncode == 0
    assert analyze(repository, *options).returncode == 0

    model.write_text(source)
    done = analyze(repository, *options, "--format", "sarif=new.sarif")
    assert done.returncode == 1, done.stderr
    assert (
        "--fail-on new: not in the baseline: g1 residual + RMSNorm + SiLU at norm_silu.py:"
        in done.stderr
    )
    (result,) = json.loads((repository / "new.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "norm_silu.py", "uriBaseId": "SRCROOT"}

    lines = source.splitlines()
    at = place["region"]["startLine"] - 1
    lines[at] += COMMENT
    lines[0] += COMMENT
    model.write_text("\n".join(lines) + "\n")
    done = analyze(repository, *options, "--format", "sarif=new.sarif")
    assert done.returncode == 0, done.stderr
    assert "norm_silu.py:1: ignore[FA401] holds for no finding" in done.stderr
    (result,) = json.loads((repository / "new.sarif").read_text())["runs"][0]["results"]
    assert result["suppressions"][0]["justification"] == "fused by hand elsewhere"


def test_config_prints_each_value_with_its_origin(repository: Path) -> None:
    done = run("config", "--batch", "8", cwd=repository)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert rows["device"] == ['"h200"', "pyproject.toml [tool.fusion-advisor]"]
    assert rows["scenarios.small.batch"] == ["8", "--batch"]
    assert rows["timeout"] == ["180.0", "default"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fail-on", "new"), "--fail-on new compares: give --baseline FILE"),
        (("--baseline", "none.json", "--scenario", "small"), "none.json: No such file"),
        (("--scenario", "rain"), "--scenario 'rain': known: small, large"),
    ],
)
def test_what_cannot_be_asked_is_told_before_any_work(
    repository: Path, options: tuple[str, ...], message: str
) -> None:
    done = analyze(repository, *options)
    assert done.returncode == 2
    assert message in one_line(done)


def test_an_unknown_code_in_the_table_is_told_before_any_work(repository: Path) -> None:
    file = repository / "pyproject.toml"
    file.write_text(TABLE.replace('device = "h200"', 'ignore = ["FA9"]'))
    done = analyze(repository)
    assert done.returncode == 2
    assert "pyproject.toml [tool.fusion-advisor] ignore: unknown rule 'FA9'" in one_line(done)


def test_diff_fails_on_what_it_is_told_to(repository: Path) -> None:
    for name in ("small", "large"):
        done = analyze(repository, "--scenario", name, "--json", f"{name}.json")
        assert done.returncode == 0, done.stderr
    same = run("diff", "small.json", "small.json", "--fail-on", "regression", cwd=repository)
    assert (same.returncode, same.stderr) == (0, "")
    grown = run("diff", "small.json", "large.json", "--fail-on", "regression=0.1", cwd=repository)
    assert grown.returncode == 2
    assert "its batch is 64" in grown.stderr


def test_a_second_run_of_an_unchanged_model_is_the_first_ones(repository: Path) -> None:
    (repository / "pyproject.toml").unlink()
    cached = {"FUSION_ADVISOR_CACHE": str(repository / "cache")}
    options = ("norm_silu.py", "--fail-on", "accepted", *QUICK)
    first = run("analyze", *options, "--out", "a", cwd=repository, environment=cached)
    assert first.returncode == 1, first.stderr
    model = repository / "norm_silu.py"
    second = run("analyze", *options, "--out", "b", cwd=repository, environment=cached)
    assert (second.returncode, "captured before" in second.stderr) == (1, True)
    texts = [
        {file.relative_to(folder): file.read_text() for file in folder.rglob("*.*")}
        for folder in (repository / "a", repository / "b")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 7 + len(SHIPPED)
    again = run("analyze", *options, "--no-cache", cwd=repository, environment=cached)
    assert "captured before" not in again.stderr
    model.write_text(model.read_text().replace("y * torch", "2 * y * torch"))
    changed = run("analyze", *options, cwd=repository, environment=cached)
    assert "captured before" not in changed.stderr
    assert "5 kernels in one" in changed.stderr


@pytest.mark.deep
def test_another_device_takes_the_graph_and_the_proofs(repository: Path) -> None:
    (repository / "pyproject.toml").unlink()
    cached = {"FUSION_ADVISOR_CACHE": str(repository / "cache")}

    def report(device: str, *options: str) -> tuple[str, dict[str, object]]:
        done = run(
            "analyze", "norm_silu.py", "--device", device, "--json", "-", *options,
            cwd=repository, environment=cached,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        content = json.loads(done.stdout)
        content["model"].pop("capture_seconds", None)
        return done.stderr, content

    first, _ = report("h200")
    assert "captured before" not in first
    proofs = sorted((repository / "cache" / "proofs").iterdir())
    assert len(proofs) == 2, "a check and a compile"
    told, content = report("h100")
    assert "the model is as it was captured before: taken from " in told
    assert sorted((repository / "cache" / "proofs").iterdir()) == proofs, "the kernel is the same"
    assert report("h100", "--no-cache") == (told.split("\n", 1)[1], content)
    model = repository / "norm_silu.py"
    model.write_text(f"# more\n{model.read_text()}")
    moved, _ = report("h200")
    assert "captured before" not in moved
    assert sorted((repository / "cache" / "proofs").iterdir()) == proofs, "its lines moved alone"


def test_init_writes_what_analyze_takes(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    net = "class Net(nn.Module):\n    def forward(self, x):\n        return x.relu() + 1\n"
    (tmp_path / "net.py").write_text(f"from torch import nn\n{net}")
    done = run("init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'name = "mine"\n\n[tool.fusion-advisor]\n' in (tmp_path / "pyproject.toml").read_text()
    done = run("analyze", *QUICK, cwd=tmp_path)
    assert done.returncode == 3
    assert "return the inputs of forward(x)" in one_line(done)

    made = tmp_path / "fusion_model.py"
    text = made.read_text().replace("# return", "import torch; return")
    made.write_text(text)
    done = run("analyze", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "net.py:4" in done.stderr
    again = run("init", cwd=tmp_path)
    assert (again.returncode, "already" in one_line(again)) == (2, True)


def test_init_takes_a_model_that_has_its_inputs(repository: Path) -> None:
    (repository / "pyproject.toml").unlink()
    done = run("init", cwd=repository)
    assert done.returncode == 0, done.stderr
    assert sorted(f.name for f in repository.iterdir()) == [
        ".git", "norm_silu.py", "pyproject.toml",
    ]  # fmt: skip
    assert "norm_silu.py:Model" in run("config", cwd=repository).stdout
