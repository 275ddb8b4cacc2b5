"""Results of a call in eager and in float64, and how far eager's own errors change the results of
discontinuous ops: rounding to whole numbers, comparisons, casts to integers."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.ir.steps import steps
from fusion_advisor.verify.tolerance import Tensors, Truth


def truth_of(eagerly: Callable[[], Tensors], exactly: Callable[[], Tensors]) -> Truth:
    """Results of a computation in eager and in float64; where eager's arguments of discontinuous
    ops are off, also how far that moves each result."""
    seen, own = _Arguments(), _Arguments()
    with seen:
        eager = eagerly()
    with own:
        exact = exactly()
    errors = _errors(seen.arguments, own.arguments, exactly)
    if not any(errors):
        return Truth(eager, exact)
    moved = [torch.zeros_like(each, dtype=torch.float64) for each in exact]
    for tipped, _ in _tipped(errors, exactly):
        moved = _furthest(moved, tipped, exact)
    return Truth(eager, exact, tuple(moved))


def as_tuple(result: Any) -> Tensors:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _errors(
    eager: list[torch.Tensor], exact: list[torch.Tensor], exactly: Callable[[], Tensors]
) -> list[float]:
    """Largest error in eager of the argument of each discontinuous op, beyond the effect of errors
    at earlier ones: a value that is rounded twice counts once. 0 where the two runs have different
    ops."""
    errors = [0.0] * len(exact)
    if [each.shape for each in eager] != [each.shape for each in exact]:
        return errors
    for number, (one, other) in enumerate(zip(eager, exact, strict=True)):
        error = _apart(one, other)
        if any(errors) and error.any():
            moved = [torch.zeros_like(error)]
            for _, arguments in _tipped(errors, exactly):
                moved = _furthest(moved, [arguments[number]], [other])
            error = (error - moved[0]).clamp_min(0.0)
        errors[number] = float(error.max()) if error.numel() else 0.0
    return errors


def _tipped(
    errors: list[float], exactly: Callable[[], Tensors]
) -> Iterator[tuple[Tensors, list[torch.Tensor]]]:
    """Yield the results, and the arguments of the discontinuous ops, of a float64 run with every
    argument moved up by its error, and of a run with every argument moved down."""
    for sign in (1.0, -1.0):
        arguments = _Arguments()
        with _Shifted([sign * error for error in errors]), arguments:
            found = exactly()
        yield found, arguments.arguments


def _furthest(
    held: list[torch.Tensor], found: Sequence[torch.Tensor], known: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Elementwise maximum of `held` and the distance of `found` from `known`."""
    return [
        torch.maximum(most, _apart(one, other))
        for most, one, other in zip(held, found, known, strict=True)
    ]


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Elementwise distance of two tensors, 0 where one of them is not finite."""
    one, other = one.double(), other.double()
    return torch.where(one.isfinite() & other.isfinite(), (one - other).abs(), 0.0)


def _steps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op of a floating tensor jumps."""
    if not (args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()):
        return False
    dtype = kwargs.get("dtype")
    whole = dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    return steps(str(func), whole=whole or kwargs.get("rounding_mode") is not None)


class LaunchMode(TorchDispatchMode):
    """Mode that sees each operator that a call runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to import all of Dynamo only to keep it out of this mode: 2 s of a child's
        life."""
        return False


class _Arguments(LaunchMode):
    """Mode that keeps the arguments of discontinuous ops: for a comparison of two tensors their
    difference."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _steps(func, args, kwargs):
            first, *others = args
            both = bool(others) and isinstance(others[0], torch.Tensor)
            self.arguments.append(first - others[0] if both else first.clone())
        return func(*args, **kwargs)


class _Shifted(LaunchMode):
    """Mode that moves the first operand of each discontinuous op by a number of its own."""

    def __init__(self, by: list[float]) -> None:
        super().__init__()
        self._by = iter(by)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _steps(func, args, kwargs):
            shift = next(self._by, 0.0)
            args = (args[0] + shift, *args[1:]) if shift else args
        return func(*args, **kwargs)
