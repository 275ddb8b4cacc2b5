"""Wrong kernels that a person would write, each of a class that some check once let pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.sourcepatch.editing.inline import in_one
from fusion_advisor.support.worker import Worker

from .checks import checked
from .generated import kernel
from .regions import PACKED, kernel_of


def changed(made: Kernel, *edits: tuple[str, str]) -> Kernel:
    """A kernel with its text changed, wherever the old text stands."""
    text = made.text
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return replace(made, text=text)


@cache
def whole(name: str) -> Kernel:
    """With the runtime in its file, which an edit may be of."""
    made = kernel(name)
    return replace(made, text=in_one(made.text))


def edited(name: str, *edits: tuple[str, str]) -> Kernel:
    return changed(whole(name), *edits)


def strided() -> Kernel:
    """The sum of parts of the rows of two tensors."""
    left, right = torch.empty(64, 512)[:, :300], torch.empty(64, 512)[:, 100:400]
    return kernel_of(lambda a, b: torch.relu(a + b), left, right, name="strided", rules=PACKED)


_STORE = "tl.store(softmax_out_ptr + row * cols + col, softmax_1, mask=mask)"


def stored(wrong: str) -> tuple[str, str]:
    """The softmax's result off by half where `wrong` holds."""
    return _STORE, f"softmax_1 = tl.where({wrong}, softmax_1 * 1.5, softmax_1)\n    {_STORE}"


CAUGHT: dict[str, Callable[[], Kernel]] = {
    # The file's own reference was the yardstick: a mistake in both went unseen.
    "wrong eps in kernel and reference": partial(edited, "layer_norm", ("1e-05", "1e-03")),
    "another op in kernel and reference": partial(
        edited, "below_peak", ("- mul", "+ mul"), ("aten.sub.Tensor", "aten.add.Tensor")
    ),
    "a reference that is given the kernel's results": partial(
        edited, "layer_norm", ("aten.add.Tensor(mul_2, args_2)", "aten.add.Tensor(mul_1, args_2)")
    ),
    "no reference": partial(edited, "softmax", ("def reference(", "def another(")),
    # Small numbers hid behind the error of large ones in the same draw.
    "wrong eps where numbers are small": partial(edited, "layer_norm", ("v + 1e-05", "v + 2e-05")),
    "eps left out": partial(edited, "layer_norm", ("v + 1e-05", "v")),
    "a rounding to 16 bits on the way": partial(
        edited, "layer_norm", ("rsqrt = tl.rsqrt(add)", "rsqrt = tl.rsqrt(add).to(tl.float16)")
    ),
    "exponentials of 10 bits": partial(
        edited, "softmax",
        ("libdevice.exp(sub)", "libdevice.exp(sub).to(tl.float16).to(tl.float32)"),
    ),
    # Of the largest errors only that of the output nearest to its tolerance was looked at.
    "one output of two": partial(
        edited, "residual_rms_norm", ("tl.store(h_out_ptr + row * cols + col, h",
                              "tl.store(h_out_ptr + row * cols + col, h * 1.02"),
    ),
    "a biased mean": partial(
        edited, "layer_norm", ("tl.div_rn(1.0, cols * 1.0)", "tl.div_rn(1.0, cols - 1.0)")
    ),
    # Too few sizes were checked, and none on either side of what tiles divide.
    "a tail that is wrong at 64 columns and one": partial(
        edited, "softmax", stored("(cols % 64 == 1) & (col == cols - 1)")
    ),
    "rows from the sixth on": partial(edited, "softmax", stored("row >= 5")),
    "squares": partial(edited, "softmax", stored("rows == cols")),
    "the strides of another input": lambda: changed(
        strided(), ("n1, args_0_strides[0], args_1_strides[0]", "n1, *2 * args_0_strides[:1]")
    ),
    # No launcher was asked what it refuses.
    "a guard dropped": partial(
        edited, "softmax",
        ('takes("args_0", args_0, torch.float32, (n0, n1), (n1, 1))', "pass"),
    ),
    "a reach that is not asked": partial(
        edited, "softmax", ("far = beyond_int32((softmax_out, args_0))", "far = False")
    ),
    "a dtype that nobody asks for": partial(
        edited, "softmax", ("tensor.dtype != dtype", "False")
    ),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CAUGHT)
def test_a_wrong_kernel_is_caught(name: str, worker: Worker) -> None:
    (check,) = checked(worker, CAUGHT[name](), seeds=6)
    assert not check.passed


def test_the_largest_error_of_all_cases_is_reported_with_its_case(worker: Worker) -> None:
    """A kernel is off by little in some draws and by more in others: the most of all counts."""
    so_far = [checked(worker, kernel("layer_norm"), seeds=n)[0] for n in range(1, 7)]
    errors = [check.max_error for check in so_far]
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]  # of normal numbers and of large ones
    worst = so_far[-1]
    first = next(check for check in so_far if check.max_error == worst.max_error)
    assert f"seed {first.seeds - 1} " in worst.case
    assert (worst.eager_error, worst.tolerance) == (first.eager_error, first.tolerance)
    assert 0 < worst.eager_error <= worst.tolerance


def test_the_share_that_steps_excuse_is_reported(worker: Worker) -> None:
    (check,) = checked(worker, kernel("masked_count"), seeds=6)
    assert check.passed
    assert check.stepped == 0.0  # integers as they were given: no step is near
