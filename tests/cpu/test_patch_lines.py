"""Lines that a patch adds to a small package: what somebody has to read before it is taken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fusion_advisor.codegen.kernel_package import kernels_of, read_package
from fusion_advisor.shipped.files import RUNTIME

from .spawned import command

MODULES = Path(__file__).with_name("five_modules")
"""Embeddings, norm, attention with rotary embedding, gated MLP, and the model with its loss."""
MOST, MOST_OF_THE_RUNTIME = 1424, 768
"""Lines that the patch adds, and those of them that all kernels share as host code. 110 of these
give Inductor the launches: without them a compiled model took twice as long on the host."""


@pytest.mark.deep
def test_a_patch_of_five_modules_can_be_read(tmp_path: Path) -> None:
    shutil.copytree(MODULES, tmp_path, dirs_exist_ok=True)
    words = ("--device", "h200", "--no-verify", "--no-compile", "--out", "made.patch")
    made = command("patch", "model.py", "--root", ".", *words, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    apply = ["git", "apply", "--apply", "--numstat", "made.patch"]
    done = subprocess.run(apply, cwd=tmp_path, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    added = {Path(name).name: int(count) for count, _, name in rows}
    kernels = kernels_of(read_package(tmp_path / "fused_model"))
    assert len(kernels) == 6
    assert added.keys() == {
        *("attention.py", "embeddings.py", "mlp.py", "model.py", "norm.py"),
        *("__init__.py", "or_eager.py", "fused_runtime.py", "fused_device.py"),
        *("test_fused_model.py", *(f"{name}.py" for name in kernels)),
    }
    assert sum(added.values()) <= MOST, added
    assert added[f"{RUNTIME}.py"] <= MOST_OF_THE_RUNTIME
