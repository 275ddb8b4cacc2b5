"""Criterion of correctness: how far a result may be from float64; one rule for every check.

A floating result holds where

    max |ours - float64|  <=  factor x max |eager - float64|  +  ulps of its dtype at max |float64|

with eager's error taken over at least `eager_elements` elements: where one draw has fewer, eager
alone is drawn again, until the result holds or there are enough. Shape and dtype are the
reference's, NaN and infinities are where float64 (rounded to the dtype) or eager has them.

A result of integers or bools equals float64's, except where eager's own error of the argument of a
step (a rounding, a comparison, a cast to an integer) tips it: there it may be what that error makes
of it. Floating results behind a step are given what the step moves there, too. How many elements
use that is counted.

`explain criterion` prints the rule with its numbers, `[criterion]` in rules/model.toml, and why.
"""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fusion_advisor.ir.kernel import Criterion
from fusion_advisor.support.kernel_fault import KernelFault

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Truth:
    """Reference that results are compared with: eager's results, float64's, and how far eager's own
    errors at discontinuous ops move each element; None where there is no such op."""

    eager: Tensors
    exact: Tensors
    moved: Tensors | None = None


class TooFew(KernelFault):
    """Raised where a result is too far off by one draw, which has too few elements to decide."""


@dataclass(frozen=True)
class Error:
    """Largest absolute errors of one result, the tolerance, and the share of its elements that only
    discontinuous ops excuse."""

    ours: float = 0.0
    eager: float = 0.0
    tolerance: float = 0.0
    stepped: float = 0.0


def ulps_of(dtype: torch.dtype, summed: int, criterion: Criterion) -> float:
    """Units in the last place that a result may be off beside eager's error; `summed` is the number
    of elements of the largest sum behind the result."""
    if dtype == torch.float64:
        return criterion.float64_ulps
    if dtype == torch.float32 and summed > criterion.long_sum:
        return criterion.summed_ulps
    return criterion.ulps


def compare(
    ours: Tensors,
    truth: Truth,
    criterion: Criterion,
    summed: int = 0,
    further: Iterable[Truth] = (),
) -> Error:
    """Compare results with the truth, and return the error of the result that is furthest off.
    Raises KernelFault for the first result that does not hold. `further` yields other draws of the
    same distribution; raises TooFew where they end before eager's error is taken over enough
    elements."""
    if len(ours) != len(truth.eager):
        raise KernelFault(f"{len(ours)} outputs, the reference has {len(truth.eager)}")
    found: list[Error] = []
    for index, (mine, theirs, exact) in enumerate(zip(ours, truth.eager, truth.exact, strict=True)):
        for what, got, expected in (
            ("shape", tuple(mine.shape), tuple(theirs.shape)),
            ("dtype", mine.dtype, theirs.dtype),
        ):
            if got != expected:
                raise KernelFault(f"output {index} has {what} {got}, the reference has {expected}")
        moved = None if truth.moved is None else truth.moved[index]
        if mine.is_floating_point():
            found.append(_floats(index, mine, theirs, exact, moved, criterion, summed))
        else:
            found.append(_whole(index, mine, theirs, exact, moved) if mine.numel() else Error())
    over = {index for index, error in enumerate(found) if error.ours > error.tolerance}
    seen = {index: truth.eager[index].numel() for index in over}
    draws = iter(further)
    while few := {index for index in over if seen[index] < criterion.eager_elements}:
        draw = next(draws, None)
        if draw is None:
            break
        for index in few:
            found[index] = _beside(found[index], draw, index, criterion)
            seen[index] += draw.eager[index].numel()
        over = {index for index in over if found[index].ours > found[index].tolerance}
    for index in sorted(over, key=lambda index: (index in few, index)):
        error, exact = found[index], truth.exact[index]
        off = _gap(ours[index], exact)
        raise (TooFew if index in few else KernelFault)(
            f"{_at(index, off == off.max(), ours[index], exact)} (error {error.ours:.3g}, "
            f"eager's {error.eager:.3g}, allowed {error.tolerance:.3g})"
        )
    worst = max(found, key=lambda error: error.ours, default=Error())
    return Error(
        worst.ours, worst.eager, worst.tolerance, max((e.stepped for e in found), default=0.0)
    )


def missing_draws(result: torch.Tensor, criterion: Criterion) -> int:
    """Number of further draws until eager's error is taken over enough elements; 0 for an empty
    result, which cannot be off."""
    return -(-criterion.eager_elements // result.numel()) - 1 if result.numel() else 0


def _beside(error: Error, draw: Truth, index: int, criterion: Criterion) -> Error:
    """Error with eager's error of another draw, where that is larger."""
    eager, exact = draw.eager[index], draw.exact[index]
    moved = None if draw.moved is None else draw.moved[index]
    own = _largest(_excused(eager, exact, moved), eager, exact)
    if own <= error.eager:
        return error
    allowed = error.tolerance + criterion.factor * (own - error.eager)
    return Error(error.ours, own, allowed, error.stepped)


def _floats(
    index: int,
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    moved: torch.Tensor | None,
    criterion: Criterion,
    summed: int,
) -> Error:
    dtype = ours.dtype
    rounded = exact.to(dtype).double()
    wrong = ~(_same_class(ours.double(), rounded) | _same_class(ours.double(), eager.double()))
    if wrong.any():
        raise KernelFault(f"{_at(index, wrong, ours, rounded)} (NaN or infinity)")
    off = (_excused(ours, exact, moved) - criterion.factor * _lost(eager, rounded)).clamp_min(0.0)
    error, own = _largest(off, ours, exact), _largest(_excused(eager, exact, moved), eager, exact)
    size = torch.where(exact.isfinite(), exact.abs(), 0.0).amax() if exact.numel() else exact.sum()
    allowed = criterion.factor * own + ulps_of(dtype, summed, criterion) * ulp(size, dtype)
    stepped = _gap(ours, exact) > allowed
    return Error(error, own, allowed, float(stepped.double().mean()) if exact.numel() else 0.0)


def _whole(
    index: int,
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    moved: torch.Tensor | None,
) -> Error:
    """Error of a result of integers or bools."""
    if ours.dtype == torch.bool:  # a poisoned byte must not pass for True
        ours, eager, exact = (t.contiguous().view(torch.uint8) for t in (ours, eager, exact))
    exact = exact.to(ours.dtype)
    differs = ours != exact
    wrong = differs & (ours != eager)
    if moved is not None:
        wrong &= (ours.double() - exact.double()).abs() > moved
    if wrong.any():
        raise KernelFault(_at(index, wrong, ours, exact))
    return Error(stepped=float(differs.double().mean()))


def ulp(size: torch.Tensor, dtype: torch.dtype) -> float:
    """Spacing of a dtype at a magnitude in float64, in the units of the values."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.double().clamp(info.tiny, info.max))
    return float(torch.ldexp(torch.full_like(size, info.eps, dtype=torch.float64), exponent - 1))


def _gap(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Elementwise distance, where both are finite."""
    found, exact = found.double(), exact.double()
    return torch.where(found.isfinite() & exact.isfinite(), (found - exact).abs(), 0.0)


def _excused(found: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor | None) -> torch.Tensor:
    """Elementwise distance beyond what discontinuous ops explain."""
    gap = _gap(found, exact)
    return gap if moved is None else (gap - moved.nan_to_num(0.0, 0.0)).clamp_min(0.0)


def _lost(eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Half a unit of float16 for each element beyond its range that eager alone has as infinite or
    NaN, by float64's results in the range of eager's dtype; 0 elsewhere."""
    half, size = torch.finfo(torch.float16), exact.abs()
    missing = ~eager.double().isfinite() & exact.isfinite() & (size > half.max)
    return torch.where(missing, size * (half.eps / 2), 0.0)


def _largest(gap: torch.Tensor, found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error among the elements that the dtype can hold."""
    gap = torch.where(exact.to(found.dtype).double().isfinite(), gap, 0.0)
    return gap.max().item() if gap.numel() else 0.0


def _same_class(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Whether each pair has one class: NaN with NaN, an infinity with the same infinity, finite
    with finite."""
    nan, inf = left.isnan() & right.isnan(), left.isinf() & (left == right)
    return nan | inf | (left.isfinite() & right.isfinite())


def _at(index: int, mask: torch.Tensor, ours: torch.Tensor, expected: torch.Tensor) -> str:
    spot = tuple(int(i) for i in mask.nonzero()[0])
    return f"output {index}{list(spot)}: ours {ours[spot].item()}, expected {expected[spot].item()}"
