"""Random inputs of a case, in the memory and of the kinds of numbers that show mistakes."""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case
from fusion_advisor.verify.tolerance import Tensors

DISTRIBUTIONS = ("normal", "special", "tiny", "large", "across", "faint")
"""Distributions of random inputs; seed s draws from entry s, cyclically. Every draw has one scale,
so that no small number hides behind a large one's error. In `large` each row of the last dimension
that has several elements is on one side of zero, in `across` each column."""

OVERFLOWING = ("large", "across")
"""Distributions whose numbers are large, all of them."""

_GUARD = 64
"""Poisoned elements around each input on a GPU, where addresses cannot be checked."""
_RARE = 8
"""Integers of which one, on average, is a number that the kernel compares them with."""
_ALIGNMENT = 64
"""Alignment of inputs in elements: a multiple of the alignment of every load."""


_SCALES = {"large": (1e3, 200.0), "across": (1e3, 200.0), "tiny": (1e-3, 1e-3)} | {
    "faint": (1e-13, 1e-2)
}
"""Factors on the numbers of a draw; the second is for float16, whose squares overflow sooner."""


def _floats(spec: Tensor, distribution: str, scale: float, gen: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    values = torch.randn(spec.shape, generator=gen, dtype=torch.float64, device=gen.device)
    if distribution in OVERFLOWING:  # far from zero: no element saves a wrong maximum
        last = max((dim for dim, size in enumerate(spec.shape) if size > 1), default=-1)
        own = distribution == "across"
        sided = [size if (dim == last) == own else 1 for dim, size in enumerate(spec.shape)]
        side = torch.randint(0, 2, sided, generator=gen, device=gen.device)
        values += 5.0 * (side * 2 - 1)
    values *= scale * _SCALES.get(distribution, (1.0, 1.0))[dtype == torch.float16]
    if distribution == "special" and values.numel():
        _sprinkle(values, gen)
    top = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-top, top), values).to(dtype)


def _sprinkle(values: torch.Tensor, gen: torch.Generator) -> None:
    """Put NaN and ±inf into a third of the rows, one each, so that the other rows stay finite."""
    flat = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    odd = torch.tensor([math.nan, math.inf, -math.inf], dtype=values.dtype, device=gen.device)
    if flat.shape[0] == 1 and flat.shape[1] > 8:
        spots = torch.randperm(flat.shape[1], generator=gen, device=gen.device)[:3]
        flat[0, spots] = odd
        return
    rows = torch.arange(0, flat.shape[0], 2, device=gen.device)
    columns = torch.randint(flat.shape[1], rows.shape, generator=gen, device=gen.device)
    flat[rows, columns] = odd[rows // 2 % 3]


def _integers(
    spec: Tensor, bounds: tuple[int, int] | None, rare: Sequence[int], gen: torch.Generator
) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        return _flags(spec.shape, gen)
    low, high = bounds or ((0, 8) if spec.dtype.startswith("u") else (-8, 8))
    values = torch.randint(low, high, spec.shape, generator=gen, device=gen.device)
    if rare and values.numel():
        drawn = torch.tensor(rare, device=gen.device)
        which = torch.randint(0, len(rare), spec.shape, generator=gen, device=gen.device)
        some = torch.randint(0, _RARE, spec.shape, generator=gen, device=gen.device) == 0
        values = torch.where(some, drawn[which], values)
    return values.to(dtype)


def _flags(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """Random bools, with a quarter of the rows all false and a quarter all true."""
    of_rows = (*shape[:-1], 1) if shape else ()
    rows = torch.randint(0, 4, of_rows, generator=gen, device=gen.device)
    mixed = torch.randint(0, 2, shape, generator=gen, device=gen.device).bool()
    return torch.where(rows == 0, False, torch.where(rows == 1, True, mixed))


def poison(storage: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with an odd byte pattern for a dtype without NaN."""
    if storage.is_floating_point():
        return storage.fill_(math.nan)
    storage.view(torch.uint8).fill_(0xA5)
    return storage


def _lay_out(
    spec: Tensor, others: Sequence[Tensor], values: torch.Tensor, held: dict[object, torch.Tensor]
) -> torch.Tensor:
    """Lay `values` out at the spec's strides and alignment, with poison in every gap: in memory of
    their own, or in the memory `held` for all `others` of the spec's storage. A broadcast dimension
    (stride 0) takes the values of its first index. A large offset is cut to the same alignment, so
    that a slice of a huge tensor stays small."""
    guard = _GUARD if values.device.type != "cpu" else 0
    first = min(other.offset for other in others)
    moved = _ALIGNMENT + first % _ALIGNMENT - first if first >= 2 * _ALIGNMENT else 0
    key = spec.storage, spec.dtype
    storage = held.get(key)
    if storage is None:
        extent = max(other.offset + other.extent for other in others) + moved
        storage = torch.empty(guard + extent + guard, dtype=values.dtype, device=values.device)
        poison(storage)
        if len(others) > 1:
            held[key] = storage
    view = storage.as_strided(spec.shape, spec.stride, guard + spec.offset + moved)
    narrow = tuple(slice(None) if stride else slice(0, 1) for stride in spec.stride)
    view[narrow].copy_(values[narrow])
    return view


def build_inputs(
    case: Case, distribution: str, seed: int, device: str = "cpu", scale: float = 1.0
) -> Tensors:
    """Build the case's tensors with random data, floating numbers times `scale`; the same arguments
    give the same data."""
    gen = torch.Generator(device).manual_seed(seed)
    bounds = case.ranges or (None,) * len(case.inputs)
    held: dict[object, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    rare = case.rare or ((),) * len(case.inputs)
    for spec, limit, few in zip(case.inputs, bounds, rare, strict=True):
        floats = getattr(torch, spec.dtype).is_floating_point
        values = (
            _floats(spec, distribution, scale, gen) if floats else _integers(spec, limit, few, gen)
        )
        alike = (spec.storage, spec.dtype)
        others = [x for x in case.inputs if x.storage >= 0 and (x.storage, x.dtype) == alike]
        made.append(_lay_out(spec, others or [spec], values, held))
    return tuple(made)
