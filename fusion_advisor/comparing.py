"""Compare what a kernel gave with eager and with fp64, output by output.

What is held:

- an integer or bool output equals eager's or the fp64 reference's, element by element;
- NaN and infinities are where the reference (rounded to the output's type) or eager has them;
- max|ours − ref| ≤ max|eager − ref| + 1 ulp of the output type at max|ref|, over the elements
  that are finite in all three. With further draws, eager's error is at least `drawn_slack` times
  its largest of them, in ulps, and what moves by itself when the inputs change by half an ulp of
  float32 is not counted (`roundings` times that);
- for each row of the last dimension (or of the dimensions that the kernel names)
  max|ours − ref| ≤ row_slack · (max|eager − ref| + 1 ulp at the row's max|ref|), so that a row of
  small numbers is not hidden by a row of large ones;
- where eager alone overflowed, ours is as eager's or within `lost_ulps` of the reference;
- shape and dtype are the reference's. Strides are not compared: a CPU's eager has others.

The margins are those of `[verify]` in rules/model.toml; float64 and partial results have their own.
"""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_advisor.emitted import Fault
from fusion_advisor.kernels import Margins

Tensors = tuple[torch.Tensor, ...]


class TooFar(Fault):
    """The error is beyond eager's error of this one draw."""


@dataclass(frozen=True)
class Further:
    """Of one output: eager's largest error over other draws, in ulps, and how far each element
    moves when the inputs change by half an ulp."""

    ulps: float
    moved: torch.Tensor


@dataclass(frozen=True)
class Error:
    """Absolute errors of one output, and what was allowed."""

    ours: float = 0.0
    eager: float = 0.0
    tolerance: float = 0.0

    @property
    def tightness(self) -> float:
        return self.ours / self.tolerance if self.tolerance else 0.0


def _ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at a float64 magnitude. Units: those of the values."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def _where(index: int, mask: torch.Tensor, ours: torch.Tensor, expected: torch.Tensor) -> str:
    spot = tuple(int(i) for i in mask.nonzero()[0])
    return f"output {index}{list(spot)}: ours {ours[spot].item()}, expected {expected[spot].item()}"


def _worst(index: int, error: torch.Tensor, ours: torch.Tensor, expected: torch.Tensor) -> str:
    return _where(index, error == error.max(), ours, expected)


def _same_class(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """NaN with NaN, an infinity with the same infinity, finite with finite."""
    nan, inf = left.isnan() & right.isnan(), left.isinf() & (left == right)
    return nan | inf | (left.isfinite() & right.isfinite())


def _compare_floats(
    index: int,
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    further: Further | None,
    row: tuple[int, ...],
    partial: bool,
    margins: Margins,
) -> Error:
    dtype = ours.dtype
    rounded = exact.to(dtype).double()
    ours, eager = ours.double(), eager.double()
    wrong = ~(_same_class(ours, rounded) | _same_class(ours, eager))
    if partial:  # the running mean of an infinite row is lost to NaN, as Welford's is on CUDA
        wrong &= ~(ours.isnan() & rounded.isinf())
    if wrong.any():
        raise Fault(_where(index, wrong, ours, rounded) + " (NaN or infinity)")

    finite = ours.isfinite() & exact.isfinite() & rounded.isfinite()
    lost = finite & ~eager.isfinite()
    finite &= ~lost
    zero = torch.zeros_like(exact)
    gap = torch.where(finite | lost, (ours - exact).abs(), zero)
    far = lost & (gap > margins.lost_ulps * _ulp(exact.abs().nan_to_num(0.0), dtype))
    if far.any():
        raise Fault(
            _where(index, far, ours, exact) + f" (over {margins.lost_ulps:g} ulp; eager overflowed)"
        )

    if further is not None:
        gap = (gap - margins.roundings * further.moved.nan_to_num(0.0, 0.0)).clamp_min(0.0)
    our_error = torch.where(finite, gap, zero)
    eager_error = torch.where(finite, (eager - exact).abs(), zero)
    size = torch.where(finite, exact.abs(), zero)
    ulp = _ulp(size.max(), dtype).item()
    drawn = further.ulps * margins.drawn_slack if further else 0.0
    eager_most = max(eager_error.max().item(), drawn * ulp)
    spacing = margins.float64_ulps if dtype == torch.float64 else margins.margin_ulps
    if partial and dtype == torch.float32 and ours.device.type == "cpu":
        spacing = margins.partial_ulps
    error = Error(our_error.max().item(), eager_most, eager_most + spacing * ulp)
    if error.ours > error.tolerance:
        raise TooFar(
            _worst(index, our_error, ours, exact)
            + f" (error {error.ours:.3g}, eager's {error.eager:.3g}, allowed {error.tolerance:.3g})"
        )
    length = math.prod(ours.shape[d] for d in row)
    if row and length >= margins.least_row and ours.numel() // length <= margins.most_rows:
        largest = size.amax(row, keepdim=True)
        usual = _usual(eager_error.amax(row, keepdim=True), largest, margins)
        allowed = margins.row_slack * (usual + spacing * _ulp(largest, dtype))
        over = our_error.amax(row, keepdim=True) > allowed
        if over.any():
            excess = torch.where(over, our_error / allowed, zero)
            raise TooFar(_worst(index, excess, ours, exact) + " (beyond its row's tolerance)")
    return error


def _usual(errors: torch.Tensor, sizes: torch.Tensor, margins: Margins) -> torch.Tensor:
    """Eager's error for each row: its own, or what one row in ten reaches for its size. Where one
    number a row (its mean, say) makes up most of the error, eager is exact in some rows by luck."""
    if errors.numel() < margins.judged_rows:
        return errors
    share = torch.where(sizes > 0, errors / sizes, 0.0)
    return torch.maximum(errors, torch.quantile(share.flatten(), 0.9) * sizes)


def eager_ulps(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """Eager's largest error in ulps of the largest magnitude, over what is finite in both."""
    if not (eager.is_floating_point() and eager.numel()):
        return 0.0
    finite = eager.isfinite() & exact.to(eager.dtype).isfinite()
    zero = torch.zeros_like(exact)
    error = torch.where(finite, (eager.double() - exact).abs(), zero).max()
    return (error / _ulp(torch.where(finite, exact.abs(), zero).max(), eager.dtype)).item()


def _compare_exactly(
    index: int, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor
) -> Error:
    if ours.dtype == torch.bool:  # a poisoned byte must not pass for True
        ours, eager, exact = (t.contiguous().view(torch.uint8) for t in (ours, eager, exact))
    wrong = (ours != eager) & (ours != exact.to(ours.dtype))
    if wrong.any():
        raise Fault(_where(index, wrong, ours, eager))
    return Error()


def compare(
    ours: Tensors,
    eager: Tensors,
    exact: Tensors,
    margins: Margins,
    further: Sequence[Further] = (),
    rows: Sequence[tuple[int, ...]] = (),
    partial: bool = False,
) -> Error:
    """The tightest of the outputs' errors; Fault for the first output that is wrong.

    `rows`: the dimensions along which each output's rows lie; the last one where it says nothing.

    `further`: what other draws say of each output; TooFar asks for it.
    """
    if len(ours) != len(eager):
        raise Fault(f"{len(ours)} outputs, the reference has {len(eager)}")
    tightest = Error()
    for index, (mine, theirs, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        for what, got, expected in (
            ("shape", tuple(mine.shape), tuple(theirs.shape)),
            ("dtype", mine.dtype, theirs.dtype),
        ):
            if got != expected:
                raise Fault(f"output {index} has {what} {got}, the reference has {expected}")
        if not mine.numel():
            continue
        if mine.is_floating_point():
            known = further[index] if further else None
            row = rows[index] if rows else ()
            if not row and mine.dim():
                row = (mine.dim() - 1,)
            error = _compare_floats(index, mine, theirs, truth, known, row, partial, margins)
        else:
            error = _compare_exactly(index, mine, theirs, truth)
        tightest = max(tightest, error, key=lambda e: (e.tightness, e.tolerance))
    return tightest
