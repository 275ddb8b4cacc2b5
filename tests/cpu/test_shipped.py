"""The runtime beside emitted kernels as a user's process has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.shipped import fused_runtime
from fusion_advisor.shipped.files import write_kernel

from .generated import kernel
from .spawned import run, run_script


def test_a_kernel_that_is_copied_in_is_one_line_when_it_is_imported(tmp_path: Path) -> None:
    """Where the folder's runtime, or its device functions, lack what it calls."""
    for name in ("shared_softmax", "dropped_attention", "softmax"):
        write_kernel(tmp_path / name / f"{name}.py", kernel(name).text)
    runtime = tmp_path / "softmax" / "fused_runtime.py"
    for name, said in (
        ("shared_softmax", "cannot import name 'publish' from 'softmax.fused_device'"),
        ("dropped_attention", "cannot import name 'random16_run' from 'softmax.fused_device'"),
    ):
        text = (tmp_path / name / f"{name}.py").read_text()
        (runtime.parent / f"{name}.py").write_text(text)
        assert said in imported(f"softmax.{name}", tmp_path)
    device = (tmp_path / "shared_softmax" / "fused_device.py").read_text()
    (runtime.parent / "fused_device.py").write_text(device)
    assert imported("softmax.shared_softmax", tmp_path) == (
        f"ImportError: {runtime} has no resident, which softmax.shared_softmax calls: have it "
        "written for all kernels of its folder (fusion-advisor patch MODEL --update)"
    )


def imported(module: str, folder: Path) -> str:
    """The last line that Python says where a module cannot be imported."""
    done = run([sys.executable, "-c", f"import {module}"], cwd=folder, env=os.environ)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


class Jit:
    """Stands for a jit function: notes its launches."""

    arg_names = ("COLS",)

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __getitem__(self, grid: object) -> object:
        def launch(*arguments: object, **constants: object) -> object:
            self.calls.append((grid, arguments, constants))
            return SimpleNamespace()  # what was compiled: nothing of it may be touched

        return launch


def test_an_unknown_triton_is_launched_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_runtime, "DIRECT", False)
    monkeypatch.setattr(fused_runtime, "launched", {})
    jit, given = Jit(), torch.zeros(4)
    for _ in range(2):
        assert fused_runtime.launch(jit, (1,), (given,), (4,), COLS=4, num_warps=1) is None
    options = {"enable_fp_fusion": True, "COLS": 4, "num_warps": 1}
    assert jit.calls == [((1,), (given, 4), options)] * 2
    assert fused_runtime.launched == {}


def test_this_triton_is_known() -> None:
    assert fused_runtime.DIRECT


INTERPRETED = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent.parent))
import torch
from mine import softmax
x = torch.randn(9, 300)
print(json.dumps(torch.allclose(softmax.softmax(x), torch.softmax(x, -1))))
"""


def test_the_interpreter_runs_an_emitted_file_as_any(tmp_path: Path) -> None:
    """Of Triton alone, `libdevice` gives None there."""
    file = tmp_path / "mine" / "softmax.py"
    write_kernel(file, kernel("softmax").text)
    assert run_script(INTERPRETED, str(file)).strip() == "true"


UNREPAIRED = """
import sys, warnings
sys.modules["fusion_advisor"] = None  # an import of it fails
import torch
from mine.below_peak import below_peak
x = torch.randn(9, 130)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        below_peak(x)
print(*[each.message for each in told], sep="\\n")
"""


def test_an_interpreter_that_nobody_repairs_is_told_of_once(tmp_path: Path) -> None:
    write_kernel(tmp_path / "mine" / "below_peak.py", kernel("below_peak").text)
    done = subprocess.run(
        [sys.executable, "-c", UNREPAIRED],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout == (
        "Triton's interpreter cuts bfloat16 off where a GPU rounds, and has no libdevice: "
        "pip install fusion-advisor repairs it\n"
    ), done.stderr


# --- plans: which calls take what was done for one before -----------------------------------------


class Launches:
    """A kernel, and what its launches were given."""

    def __init__(self) -> None:
        self.given: list[tuple[object, ...]] = []

    def start(self, *arguments: object) -> None:
        self.given.append(arguments)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """One whose launcher has been called with a tensor of 4 x 8, on the device that is current."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(fused_runtime, "plans", {})
    made, x, out = Launches(), torch.zeros(4, 8), torch.empty(4, 8)
    layout, plan = fused_runtime.plan_of(made, x)
    assert plan is None
    fused_runtime.remember(layout, (x,), (out,), [(made.start, (x, out), (4, 8))])
    return made


def test_a_call_of_the_same_layout_launches_with_its_own_pointers(planned: Launches) -> None:
    for _ in range(2):
        x = torch.ones(4, 8)
        _, plan = fused_runtime.plan_of(planned, x)
        assert plan is not None
        result = fused_runtime.do_again(plan, x)
        assert (result.shape, result.stride(), result.dtype) == ((4, 8), (8, 1), torch.float32)
        assert planned.given.pop() == (x.data_ptr(), result.data_ptr(), 4, 8)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.zeros(8, 4),
        lambda: torch.zeros(8, 4).t(),
        lambda: torch.zeros(4, 8, dtype=torch.float16),
        lambda: torch.zeros(4, 8, dtype=torch.int32),
        lambda: torch.zeros(33)[1:].view(4, 8),
        lambda: torch.zeros(4, 8, requires_grad=True),
    ],
    ids=["shape", "strides", "dtype", "integers", "alignment", "gradient"],
)
def test_a_call_of_another_layout_has_no_plan(
    planned: Launches, other: Callable[[], torch.Tensor]
) -> None:
    assert fused_runtime.plan_of(planned, other())[1] is None


def test_tensors_of_two_devices_are_not_launched_on() -> None:
    given = torch.zeros(4), torch.zeros(4, device="meta")
    with pytest.raises(fused_runtime.Unserved, match="its tensors lie on cpu and meta"):
        fused_runtime.beyond_int32(given)


def test_a_table_that_is_too_short_is_not_read() -> None:
    fused_runtime.holds("table", torch.zeros(8, 4), 0, 8)
    with pytest.raises(fused_runtime.Unserved, match="table has 8 in dimension 0, and 9 are read"):
        fused_runtime.holds("table", torch.zeros(8, 4), 0, 9)


def test_a_fallback_runs_on_a_device_that_has_no_autocast() -> None:
    x = torch.zeros(4, device="meta")
    with pytest.warns(UserWarning, match="running eager instead"):
        assert fused_runtime.fall_back("it is on meta", torch.sin, torch.cos, x).is_meta


def test_another_kernel_has_no_plan(planned: Launches) -> None:
    assert fused_runtime.plan_of(Launches(), torch.zeros(4, 8))[1] is None


def test_one_tensor_for_two_is_no_plan(planned: Launches) -> None:
    x, out = torch.zeros(4, 8), torch.empty(4, 8)
    layout, _ = fused_runtime.plan_of(planned, x, x)
    fused_runtime.remember(layout, (x, x), (out,), [(planned.start, (x, x, out), ())])
    assert fused_runtime.plan_of(planned, x, torch.zeros(4, 8))[1] is None


def test_scratch_is_made_anew_and_what_was_zero_is_zero(planned: Launches) -> None:
    x, out = torch.zeros(16), torch.empty(16)
    scratch, words = torch.empty(3), torch.zeros(5, dtype=torch.int64)
    seen: list[tuple[int, ...]] = []
    layout, _ = fused_runtime.plan_of(planned, x)
    fused_runtime.remember(
        layout, (x,), (out,), [(lambda *given: seen.append(given), (x, scratch, words, out), (7,))],
        scratch=(scratch,), zeroed=(words,),
    )  # fmt: skip
    _, plan = fused_runtime.plan_of(planned, x)
    result = fused_runtime.do_again(plan, x)
    (given,) = seen
    assert (given[0], given[3], given[4]) == (x.data_ptr(), result.data_ptr(), 7)
    assert len({*given}) == len(given)
    assert not {given[1], given[2]} & {scratch.data_ptr(), words.data_ptr()}


QUOTIENTS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
import triton.language as tl
from fusion_advisor.shipped import fused_interpreter
fused_interpreter.install()
from fusion_advisor.shipped.fused_device import divided


@triton.jit
def quotients(x_ptr, y_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, divided(tl.load(x_ptr + place), tl.load(y_ptr)))


torch.manual_seed(0)
corners = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1.0, 1e-30])
wrong = 0
for round in range(300):
    power = torch.randint(-126, 127, (1,))
    y = torch.randn(1) * torch.exp2(power) if round >= len(corners) else corners[round : round + 1]
    x = torch.randn(1024) * torch.exp2(torch.randint(-30, 30, (1024,)) + power * (round % 2))
    x[: len(corners)] = corners
    found, exact = torch.empty_like(x), x / y
    quotients[(1,)](x, y, found, 1024)
    same = (found == exact) | (found.isnan() & exact.isnan())
    normal = (exact.abs() >= 2.0**-126) & (x.abs() >= 1e-31) | ~exact.isfinite()
    wrong += int((~same & normal).sum())
print(wrong)
"""


def test_quotients_by_one_number_are_rounded_as_a_division_rounds_them(tmp_path: Path) -> None:
    """Bit by bit, infinities, zeros and NaN too; but where float32 has no more digits."""
    script = tmp_path / "quotients.py"
    script.write_text(QUOTIENTS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"], done.stderr


def test_a_kernel_is_compiled_for_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then for all others at once; each kernel and each of its sizes by itself."""
    monkeypatch.setattr(fused_runtime, "settled_sizes", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one, other = object(), object()
    sizes = [640, 72, 640, 119, 4096, 5, 640, 6, 4096]
    asked = [fused_runtime.settled(one, "N_1", size) for size in sizes]
    assert asked == [640, 72, 640, 119, 4096, 0, 640, 0, 4096]
    assert fused_runtime.settled(one, "N_2", 5) == fused_runtime.settled(other, "N_1", 5) == 5

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checked = object()
    assert [fused_runtime.settled(checked, "N_1", size) for size in (7, 8, 7)] == [7, 0, 7]
