"""A recording of a program that runs its own model, analysed as a user does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fusion_advisor.shipped.files import SHIPPED

from . import spawned

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--no-verify", "--no-compile")

PROGRAM = '''
import torch
import torch.nn.functional as F
from torch import nn

import fusion_advisor


class Encoder(nn.Module):
    """Fourteen tensors in a nested dict, Nones among them, and a flag."""

    def __init__(self, d=64):
        super().__init__()
        self.mix, self.out = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, batch, *, normalize=False):
        x = batch["tokens"]["left"] + batch["tokens"]["right"]
        for name, value in batch["features"].items():
            if value is not None:
                x = x + value * batch["weights"][name]
        x = self.mix(x) * batch["scale"]
        if batch["mask"] is not None:
            x = x.masked_fill(batch["mask"], -1e4)
        y = torch.softmax(x, -1) if normalize else F.gelu(x)
        return {"out": self.out(y), "bias": y + batch["bias"]}


def batch(rows, d=64):
    features = {f"f{i}": torch.randn(rows, d) for i in range(4)} | {"f4": None}
    return {
        "tokens": {"left": torch.randn(rows, d), "right": torch.randn(rows, d)},
        "features": features,
        "weights": {f"f{i}": torch.randn(d) for i in range(5)},
        "scale": torch.randn(rows, 1),
        "mask": torch.rand(rows, d) > 0.5,
        "bias": torch.randn(d),
        "missing": None,
    }


torch.manual_seed(0)
model = Encoder().eval()
first, second = batch(24), batch(7)
assert sum(map(torch.is_tensor, torch.utils._pytree.tree_leaves(first))) == 14
plain = model(first, normalize=True)["out"]
with fusion_advisor.record(model):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for one in (first, second, first, first):
            model(one, normalize=True)
assert torch.equal(model(first, normalize=True)["out"], plain)
'''


def python(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "FUSION_ADVISOR_CACHE": str(cwd / "cache")}
    command = [sys.executable, *map(str, words)]
    return spawned.run(command, cwd=cwd, env={**os.environ, **own})


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "fusion_advisor", *words, cwd=cwd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program ran."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = python("program.py", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


RECORDING = "fusion-advisor.recording.json"

BOTH = """
import torch
from torch import nn

import fusion_advisor


class Gated(nn.Module):
    def forward(self, x, gate):
        return torch.softmax(torch.sigmoid(gate) * x * 0.5, -1)


model, x, gate = Gated().eval(), torch.randn(4096, 256), torch.randn(4096, 256)
with fusion_advisor.record(model):
    with torch.no_grad():
        model(x, gate)
    for _ in range(3):
        model(x, gate.clone().requires_grad_())
"""


def test_each_distinct_call_is_a_scenario_weighted_by_its_count(folder: Path) -> None:
    done = run("analyze", RECORDING, "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "out" / "scenarios.json").read_text())
    weights = {row["name"]: row["weight"] for row in content["scenarios"]}
    assert weights == {"call-1": 3, "call-2": 1}
    for name, rows in (("call-1", 24), ("call-2", 7)):
        report = json.loads((folder / "out" / name / "report.json").read_text())
        scenario = report["scenario"]
        assert (scenario["mode"], scenario["autocast"]) == ("eval", "bfloat16")
        assert sum(shape == f"{rows}x64:float32" for shape in scenario["shapes"].values()) == 6
        assert report["model"]["source"] == f"{RECORDING}:{name}"
        assert report["groups"]
        for group in report["groups"]:
            assert group["kernel"]["check"]["passed"]
            assert group["sources"][0]["file"] == "program.py"
    assert "assumed: device=h200" in done.stderr
    assert "3 of 4 recorded calls of Encoder; mode=eval; gradients off" in done.stderr
    assert "call-1, weight 3:" in done.stderr


def test_a_second_run_takes_the_graph_until_the_file_changes(folder: Path) -> None:
    command = ("analyze", RECORDING, "--scenario", "call-2", *QUICK)
    taken = "the model is as it was captured before"
    assert taken in [run(*command, cwd=folder) for _ in range(2)][1].stderr
    content = json.loads((folder / RECORDING).read_text())
    (folder / "other.json").write_text(json.dumps({**content, "model": "Other"}))
    first = run("analyze", "other.json:call-2", *QUICK, cwd=folder)
    assert "1 of 4 recorded calls of Other" in first.stderr
    (folder / "other.json").write_text(json.dumps({**content, "model": "Third"}))
    changed = run("analyze", "other.json:call-2", *QUICK, cwd=folder)
    assert taken not in changed.stderr
    assert "recorded calls of Third" in changed.stderr


def test_calls_in_which_no_kernel_runs_add_nothing_to_what_is_promised(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BOTH)
    done = python("program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = run("analyze", RECORDING, *QUICK, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out" / "scenarios.json").read_text())
    with_none, with_gradients = content["scenarios"]
    assert [with_none["weight"], with_gradients["weight"]] == [1, 3]
    assert with_none["total"]["fused_us"] < with_none["total"]["time_us"]
    assert not with_none["condition"]
    promised = with_gradients["total"]
    assert promised["fused_us"] == promised["time_us"] > 0
    assert promised["fused_bytes"] == promised["hbm_bytes"]
    assert promised["fused_kernels"] == promised["kernels"]
    saved = content["total"]["time_us"] - content["total"]["fused_us"]
    assert saved == pytest.approx(with_none["total"]["time_us"] - with_none["total"]["fused_us"])
    said = " ".join(done.stderr.split())
    assert "call-2, weight 3: " in said
    assert "nothing is saved, for kernels run under torch.no_grad() alone: with grad" in said


def test_the_table_names_a_recording_and_may_weigh_its_calls(folder: Path) -> None:
    nested = folder / "nested"
    nested.mkdir()
    (nested / "pyproject.toml").write_text(
        f'[tool.fusion-advisor]\nmodel = "../{RECORDING}"\n'
        "[tool.fusion-advisor.scenarios.call-2]\nweight = 9\n"
    )
    done = run("analyze", *QUICK, "--out", "out", cwd=nested)
    assert done.returncode == 0, done.stderr
    content = json.loads((nested / "out" / "scenarios.json").read_text())
    assert [row["weight"] for row in content["scenarios"]] == [3, 9]


def test_kernels_are_emitted_and_measured_of_a_call(folder: Path) -> None:
    emitted = run("emit", f"{RECORDING}:call-1", "--out", "kernels", *QUICK, cwd=folder)
    assert emitted.returncode == 0, emitted.stderr
    written = (folder / "kernels").glob("*.py")
    text = next(file for file in written if file.name not in SHIPPED).read_text()
    assert f"fusion-advisor emit {RECORDING}:call-1 --out kernels" in " ".join(text.split())
    words = ("bench", RECORDING, "--scenario", "call-1", "--rehearse", "--no-torch-compile")
    measured = run(*words, *QUICK, "--out", "bench", cwd=folder)
    assert measured.returncode == 0, measured.stderr
    assert "rehearsed on the CPU" in measured.stderr


@pytest.mark.deep
def test_reports_of_two_calls_are_compared(folder: Path) -> None:
    for name in ("call-1", "call-2"):
        run("analyze", f"{RECORDING}:{name}", *QUICK, "--json", f"{name}.json", cwd=folder)
    done = run("diff", "call-1.json", "call-2.json", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("analyze", RECORDING, "--batch", "4"), 2, "--batch: the calls in"),
        (("analyze", RECORDING, "--dtype", "bf16"), 2, "--dtype: the calls in"),
        (("analyze", RECORDING, "--scenario", "call-7"), 2, "known: call-1, call-2"),
        (("analyze", f"{RECORDING}:call-7"), 2, "no such call; known: call-1, call-2"),
        (("emit", RECORDING, "--out", "k"), 2, "--scenario is missing: one of call-1, call-2"),
        (("patch", RECORDING, "--out", "p"), 2, "only a model in a .py file has"),
        (("analyze", "none.json"), 2, "none.json: no such file; give FILE.py"),
        (("analyze", "report.json"), 2, "is a report, not a model; fusion-advisor report"),
        (("analyze", "config.json"), 2, "is a configuration of transformers; give hf:config.json"),
        (("analyze", "other.json"), 2, "is no recording; give a file that fusion_advisor.record"),
        (("analyze", "next.json"), 2, "is of version 2 and this tool reads 1; record again"),
        (("analyze", "damaged.json"), 2, "a damaged recording; record again"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: Path, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / RECORDING).write_bytes((folder / RECORDING).read_bytes())
    for name, content in {
        "report": {"schema_version": 1, "groups": []},
        "config": {"model_type": "llama"},
        "other": [1, 2],
        "next": {"recording_version": 2},
        "damaged": {"recording_version": 1, "calls": [{}]},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    done = run(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not done.stdout
