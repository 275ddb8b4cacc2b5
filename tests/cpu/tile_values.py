"""Values of the NumPy meaning of tile programs: primitives, monoids, functions of numbers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusion_advisor.tile.text import SIGNS

from .tile_memory import Value


def rounded(value: Value, dtype: str) -> Value:
    """A value in a dtype: floats rounded to the nearest, integers wrapped."""
    array = np.array(value)
    if dtype == "bool":
        return array != 0
    if not getattr(torch, dtype).is_floating_point:
        if array.dtype.kind == "f":
            array = np.trunc(np.nan_to_num(array, posinf=0, neginf=0))
        return array.astype(dtype)
    wide = torch.from_numpy(array.astype(np.float64))
    return wide.to(getattr(torch, dtype)).double().numpy()


def truncating(left: Value, right: Value) -> Value:
    """Quotient of integers, rounded towards zero; 0 over 0, of lanes that hold nothing."""
    right = np.where(np.asarray(right) == 0, 1, right).astype(np.asarray(right).dtype)
    found = np.floor_divide(left, right)
    return found + ((found < 0) & (found * right != left))


def _by_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Value], Value]:
    return lambda x: function(torch.from_numpy(np.array(x, np.float64))).numpy()


def _logistic(x: Value) -> Value:
    return 1.0 / (1.0 + np.exp(-x))


def _ceiling(left: Value, right: Value) -> Value:
    return truncating(left + right - 1, right)


_SAME = """abs exp exp2 log log2 sqrt sin cos floor ceil rint trunc maximum minimum where expm1
log1p log10 tan tanh sinh cosh hypot copysign fmod"""
OPS: dict[str, Callable[..., Value]] = {
    **{name: getattr(np, name) for name in _SAME.split()},
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide,
    "neg": np.negative, "floordiv": truncating, "cdiv": _ceiling, "mod": np.fmod, "pow": np.power,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift,
    "not": np.invert, "rsqrt": lambda x: 1.0 / np.sqrt(x), "sigmoid": _logistic,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    **{name: _by_torch(getattr(torch, name)) for name in ("erf", "erfc", "erfinv", "lgamma")},
}  # fmt: skip
"""Primitives of `region/primitives`, whichever way they are computed on a GPU."""
SIGNED = {sign: OPS[op] for op, sign in SIGNS.items()}
MONOIDS: dict[str, Any] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "logsum": np.logaddexp,
}  # fmt: skip
PLACES: dict[str, Callable[..., Value]] = {"argmax": np.argmax, "argmin": np.argmin}
"""Both count NaN as the extreme, and take the first of equal elements."""


def _words(seed: int, offset: int, stream: int, number: Value) -> list[np.ndarray]:
    """Four words of each block of Philox-4x32 with seven rounds."""
    low = np.uint64(2**32 - 1)
    number = np.asarray(number).astype(np.uint64)
    a = number & low
    b = ((number >> np.uint64(32)) + np.uint64(stream << 16)) & low
    c, d = (np.full_like(a, half) for half in (offset % 2**32, offset // 2**32 % 2**32))
    left, right = seed % 2**32, seed // 2**32 % 2**32
    for _ in range(7):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> np.uint64(32)) ^ b ^ np.uint64(left), second & low
        c, d = (first >> np.uint64(32)) ^ d ^ np.uint64(right), first & low
        left, right = (left + 0x9E3779B9) % 2**32, (right + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def _random(share: int, seed: Value, offset: Value, stream: Value, element: Value) -> np.ndarray:
    """Bits of each element, `share` of which have one block, as int32."""
    element = np.asarray(element).astype(np.int64)
    words = _words(int(seed), int(offset), int(stream), element // share)
    halved = share == 8
    found = np.choose(element % share // (1 + halved), words)
    turned = (found << np.uint64(16) | found >> np.uint64(16)) & np.uint64(2**32 - 1)
    found = np.where(halved & (element % 2 == 1), turned, found)
    return found.astype(np.uint32).view(np.int32)


def _run(share: int, *given: Value) -> np.ndarray:
    """Bits of some elements from `first` on, whose blocks are shared where they begin with one."""
    seed, offset, stream, first, count, shared = given
    first = np.asarray(first) // share * share if shared else np.asarray(first)
    return _random(share, seed, offset, stream, first + np.arange(int(count)))


DEVICE: dict[str, Callable[..., Value]] = {
    "wide": lambda place, far: np.asarray(place).astype(np.int64)[()] if far else place,
    "as_float8_e5m2": lambda x: rounded(x, "float8_e5m2"),
    "share_of": np.true_divide,
    "divided": np.true_divide,
    "one_plus_erf": lambda x: 1.0 + OPS["erf"](x),
    "one_plus_tanh": lambda x: 1.0 + np.tanh(x),
    "random16": lambda *given: _random(8, *given),
    "random32": lambda *given: _random(4, *given),
    "random16_run": lambda *given: _run(8, *given),
    "random32_run": lambda *given: _run(4, *given),
}
"""Device functions of numbers alone."""
