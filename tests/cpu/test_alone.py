"""Emitted files with the runtime beside them and nothing else: their check, their command line,
and their stamp."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.codegen.header import (
    Stamp,
    body,
    checked,
    edited,
    read_stamp,
    restamped,
    stamped,
    unstamped,
)
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.shipped.files import write_kernel

from . import spawned
from .generated import kernel


def run(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command line of the runtime beside a file, in a folder where nothing else is."""
    write_kernel(folder / "kernel.py", text)
    return started(folder / "fused_runtime.py", *options)


def forked(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As `run`, in a process that has torch imported already."""
    write_kernel(folder / "kernel.py", text)
    script = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", script, str(folder / "fused_runtime.py"), *options]
    interpreted = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return spawned.run(words, cwd=folder, env=interpreted)


def started(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-I", "-W", "error::UserWarning", str(file), *options],
        capture_output=True, text=True, check=False, env=environment, cwd=file.parent,
    )  # fmt: skip


def named(name: str) -> Kernel:
    """A kernel whose launcher is called as its file."""
    made = kernel(name)
    return replace(made, text=re.sub(rf"\b{name}\b(?!\.)", "kernel", made.text))


ALONE = ("softmax", "masked_count", "residual_rms_norm", "dropped_attention", "shared_layer_norm")
"""A function of the math library, integers, 16 bits, random numbers, and programs that share."""


@pytest.mark.parametrize(
    "name", [ALONE[0], *(pytest.param(name, marks=pytest.mark.deep) for name in ALONE[1:])]
)
def test_without_a_gpu_a_file_is_checked_on_the_interpreter(name: str, tmp_path: Path) -> None:
    made = named(name)
    done = run(made.text, tmp_path, "kernel", "--check")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(made.outputs)
    assert all(line.startswith("kernel: [") for line in lines)
    assert all("eager's" in line and line.endswith("near enough") for line in lines)


@pytest.mark.deep
def test_all_kernels_of_a_folder_are_checked(tmp_path: Path) -> None:
    for name in ("softmax", "swiglu"):
        write_kernel(tmp_path / "fused_model" / f"{name}.py", kernel(name).text)
    done = started(tmp_path / "fused_model" / "fused_runtime.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["softmax", "swiglu"]
    assert all(line.endswith("near enough") for line in lines)


@pytest.mark.deep
def test_a_wrong_kernel_is_too_far(tmp_path: Path) -> None:
    text = named("softmax").text
    wrong = text.replace("share_of(e, sum_1)", "share_of(e, sum_1 + 1e-3)")
    assert wrong != text
    done = forked(wrong, tmp_path, "--check")
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith("TOO FAR")


def test_times_need_a_gpu(tmp_path: Path) -> None:
    done = forked(named("softmax").text, tmp_path, "--bench")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "kernel: --bench times on a GPU, and there is none here\n"


def test_a_kernel_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = forked(named("softmax").text, tmp_path, "gelu", "--check")
    assert done.returncode == 1
    assert done.stderr == "gelu: is no kernel of this folder, which has kernel\n"


def test_beside_eager_stands_pytorchs_own_op() -> None:
    from fusion_advisor.codegen.emit import emit
    from fusion_advisor.fusion.library_match import exact

    from .generated import FUNCTIONS
    from .regions import RULES, decided, flow_of

    function, inputs = FUNCTIONS["softmax"]
    flow = flow_of(function, *inputs)
    decision = decided(flow)
    made = emit(flow, decision, "softmax", RULES, framework=exact(decision.subject, "softmax"))
    line = '"framework": lambda args_0: torch.nn.functional.softmax(args_0, dim=-1),'
    assert line in made.text


# -- stamps ----------------------------------------------------------------------------------------

SOURCES = (('a"""; import os\n\\.py', "0123456789ab"), ("layers/é.py", "ba9876543210"))
STAMP = Stamp("0.1.0", "f" * 64, SOURCES, "on Triton's interpreter", 'emit \'"""\' --out k')


def test_a_stamp_is_read_back_and_taken_off() -> None:
    text = kernel("softmax").text
    made = stamped(text, STAMP)
    found = read_stamp(made)
    assert found is not None
    assert (found.tool, found.rules) == ("0.1.0", "f" * 12)
    assert found.sources == SOURCES
    assert unstamped(made) == text
    assert body(made) == body(text)
    assert stamped(made, STAMP) == made, "in place of the one that it has"
    compile(made, "kernel.py", "exec")


def test_what_is_edited_shows() -> None:
    made = stamped(kernel("softmax").text, STAMP)
    assert not edited(made)
    assert edited(made.replace("share_of(e, sum_1)", "e / sum_1"))
    assert edited(made.replace("0.1.0", "0.2.0")), "the stamp itself, too"
    assert edited(kernel("softmax").text), "nothing says what was written"


def test_a_stamp_can_name_its_sources_anew() -> None:
    made = stamped(kernel("softmax").text, STAMP)
    again = restamped(made, (("model.py", "0" * 12),))
    assert not edited(again)
    found = read_stamp(again)
    assert found is not None
    assert found.sources == (("model.py", "0" * 12),)
    assert body(again) == body(made)


def test_how_far_a_kernel_is_proven_stands_in_its_file() -> None:
    passed = Check("k", "cuda:NVIDIA H200", True, ("a", "b"), 5)
    assert checked(passed) == "on NVIDIA H200, 2 shapes, 5 seeds"
    assert checked(Check("k", "interpreter", False, failure="off")) == (
        "failed on Triton's interpreter: off"
    )
    assert checked(None) == "no"
