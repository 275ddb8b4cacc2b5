"""What is written hangs on the model, the rules and the versions alone: not on where and how."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width)

    def forward(self, x, residual):
        y = x + residual
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        gate, value = self.up(y).chunk(2, -1)
        return torch.sigmoid(gate) * gate * value, torch.softmax(y * 0.5, -1)


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(8192, 256), torch.randn(8192, 256)]
"""

WAYS: dict[str, Mapping[str, str]] = {
    "plain": {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
    "other": {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "default"},
}


def run(folder: Path, way: str, *words: str, cores: int | None = None) -> str:
    """What a command tells, in another folder, with the environment of a way. On the other way a
    GPU is there, as far as its driver's tool says."""
    tools = folder / "tools"
    if way == "other" and not tools.exists():
        tools.mkdir()
        tool = tools / "nvidia-smi"
        tool.write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3\n")
        tool.chmod(0o755)
    environment = {
        **os.environ, **WAYS[way], "PYTHONPATH": str(ROOT), "NO_COLOR": "1",
        "FUSION_ADVISOR_CACHE": str(folder / "cache"),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    command = [sys.executable, "-m", "fusion_advisor", *words]
    if cores is not None and shutil.which("taskset"):
        command = ["taskset", "--cpu-list", f"0-{cores - 1}", *command]
    done = subprocess.run(
        command, cwd=folder / "project", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def files(folder: Path) -> dict[str, bytes]:
    every = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in every}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A folder for each way, of another depth, with the model in `project`."""
    found = {"plain": tmp_path / "plain", "other": tmp_path / "some" / "where" / "else"}
    for folder in found.values():
        (folder / "project").mkdir(parents=True)
        (folder / "project" / "model.py").write_text(MODEL)
    return found


@pytest.mark.deep
def test_an_analysis_has_the_same_bytes_everywhere(places: dict[str, Path]) -> None:
    first = run(places["plain"], "plain", "analyze", "model.py", "--out", "out", cores=1)
    made = files(places["plain"] / "project" / "out")
    assert len([name for name in made if name.startswith("kernels/")]) > 1
    assert "the GPU here" not in first
    words = ("analyze", "model.py", "--out", "out")
    anew = run(places["other"], "other", *words, "--no-cache")
    assert files(places["other"] / "project" / "out") == made
    assert "the GPU here is an NVIDIA H100 SXM5 80 GB: --device h100 judges for it" in anew
    for taken in (False, True):
        said = run(places["other"], "other", *words)
        assert ("the model is as it was captured before" in said) == taken
        assert files(places["other"] / "project" / "out") == made
    report = json.loads(made["report.json"])
    assert report["device"]["name"] == "h200"
    assert report["model"]["capture_seconds"] is None
    assert {row["kernel"]["check"]["where"] for row in report["groups"]} == {"interpreter"}


def test_kernels_have_the_same_bytes_elsewhere(places: dict[str, Path]) -> None:
    made: list[dict[str, bytes]] = []
    for way in places:
        words = ("analyze", "model.py", "--out", "out", "--no-verify", "--no-compile")
        run(places[way], way, *words, cores=1 if way == "plain" else None)
        made.append(files(places[way] / "project" / "out"))
    assert made[0] == made[1]
    assert len([name for name in made[0] if name.startswith("kernels/")]) > 1


@pytest.mark.deep
def test_what_a_capture_took_is_told_under_verbose(places: dict[str, Path]) -> None:
    words = ("analyze", "model.py", "--no-verify", "--no-compile", "--verbose")
    said = run(places["plain"], "plain", *words)
    assert any(line.startswith("capture: ") and line.endswith(" s") for line in said.splitlines())


@pytest.mark.deep
def test_a_patch_has_the_same_bytes_everywhere(places: dict[str, Path]) -> None:
    made: list[dict[str, bytes]] = []
    for way, cores in (("plain", 1), ("other", None)):
        said = run(
            places[way], way, "patch", "model.py", "--out", "a.patch", "--model-new", "new.py",
            cores=cores,
        )  # fmt: skip
        assert "launches of kernels on Triton's interpreter" in said
        project = places[way] / "project"
        made.append({name: (project / name).read_bytes() for name in ("a.patch", "new.py")})
    assert made[0] == made[1]
    assert b"@triton.jit" in made[0]["a.patch"]


@pytest.mark.deep
def test_sources_of_installed_packages_are_named_from_where_packages_lie(
    places: dict[str, Path],
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
        "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1,
        "vocab_size": 512,
    }  # fmt: skip
    project = places["plain"] / "project"
    (project / "config.json").write_text(json.dumps(config))
    words = ("hf:config.json", "--seq", "64", "--no-verify", "--no-compile")
    run(places["plain"], "plain", "analyze", *words, "--out", "out")
    text = (project / "out" / "report.json").read_text()
    assert '"file": "transformers/models/llama/modeling_llama.py"' in text
    assert "-packages/" not in "".join(map(bytes.decode, files(project / "out").values()))
