"""Repairs of Triton's interpreter that make it faithful enough to judge kernels by.

Import this in a process that has `TRITON_INTERPRET=1` set before Triton is imported, then call
`install()`. What is repaired, for Triton 3.6 to 3.9:

- fp32 → bf16 and fp8 round to nearest even instead of truncating; bf16 arithmetic is done in
  fp32 and rounded, instead of on the bit patterns;
- `tl.maximum` and `tl.clamp` without `propagate_nan` drop NaN as the hardware does (3.6 propagates
  it);
- a tensor of one element is a number wherever Python asks for one (3.6 refuses with numpy 2.4);
- `tl.reduce` and `tl.associative_scan` run the real combine function on whole halves of the
  array, O(log n) calls, instead of once an element;
- `libdevice` exists: computed in float64 by torch, rounded to the operand's type;
- a scalar comparison that is spread over a block stays boolean;
- the language is patched once for the process, not at every call of a device function.

And what is added: while a kernel runs, every address it touches must lie inside the storage of a
tensor that the launch was given; programs may not depend on each other's order; and the
distinct bytes loaded and stored are counted, and the elements asked for (`WatchedTraffic`).
"""

# The interpreter is untyped and private: its types are unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    InterpreterOptions,
    ReduceOps,
    ScanOps,
    TensorHandle,
    interpreter_builder,
)

_SEMANTIC: Any = TritonSemantic(interpreter_builder)


class Violation(Exception):
    """Raised where a kernel touches memory that it must not, or its programs depend on
    their order."""


# --- memory: bounds, races, traffic --------------------------------------------------------------

_NOBODY, _SEVERAL = -1, -2


@dataclass
class WatchedTraffic:
    """Traffic summed over the launches seen: distinct bytes, and the elements that lanes asked for,
    repeats counted. Masked lanes ask for nothing."""

    loaded: int = 0
    stored: int = 0
    loads: int = 0
    stores: int = 0
    launches: int = 0


@dataclass
class _Region:
    """One storage, in grains of its tensor's itemsize: who read and who wrote each grain."""

    base: int
    nbytes: int
    grain: int
    reader: np.ndarray = field(init=False)
    writer: np.ndarray = field(init=False)
    order: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        grains = self.nbytes // self.grain
        self.reader = np.full(grains, _NOBODY, np.int32)
        self.writer = np.full(grains, _NOBODY, np.int32)
        self.order = np.zeros(grains, np.int32)


class WatchedMemory:
    """Memory that one launch may touch, with the accesses so far."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        regions: dict[int, _Region] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            if base and base not in regions:
                regions[base] = _Region(base, storage.nbytes(), tensor.element_size())
        self.regions = sorted(regions.values(), key=lambda region: region.base)
        self.loads = self.stores = 0

    def _locate(self, addresses: np.ndarray, itemsize: int, what: str) -> tuple[_Region, Any]:
        low, high = int(addresses.min()), int(addresses.max()) + itemsize
        for region in self.regions:
            if region.base <= low and high <= region.base + region.nbytes:
                offsets = addresses.astype(np.int64) - region.base
                if region.grain != itemsize or (offsets % itemsize).any():
                    raise Violation(
                        f"{what} of {itemsize} bytes in a tensor of {region.grain}-byte elements"
                    )
                return region, offsets // itemsize
        raise Violation(f"{what} out of bounds: {self._nearest(low, high)}")

    def _nearest(self, low: int, high: int) -> str:
        def distance(region: _Region) -> int:
            return max(region.base - low, high - region.base - region.nbytes)

        region = min(self.regions, key=distance, default=None)
        if region is None:
            return "the launch has no tensors"
        return (
            f"bytes {low - region.base} to {high - region.base} "
            f"of a storage of {region.nbytes} bytes"
        )

    def load(self, addresses: np.ndarray, itemsize: int, program: int) -> None:
        """Record a load. Raises Violation when it is out of bounds or reads another
        program's store."""
        if not addresses.size:
            return
        self.loads += addresses.size
        region, index = self._locate(addresses, itemsize, "load")
        writer = region.writer[index]
        if ((writer != _NOBODY) & (writer != program)).any():
            raise Violation("race: a program loads what another program stored")
        reader = region.reader[index]
        region.reader[index] = np.where(
            (reader == _NOBODY) | (reader == program), program, _SEVERAL
        )

    def store(
        self, addresses: np.ndarray, values: np.ndarray, old: Callable[[], Any], program: int
    ) -> None:
        """Record a store. Raises Violation when it is out of bounds or clashes with another
        access."""
        if not addresses.size:
            return
        self.stores += addresses.size
        region, index = self._locate(addresses, values.itemsize, "store")
        reader = region.reader[index]
        if ((reader != _NOBODY) & (reader != program)).any():
            raise Violation("race: a program stores to what another program loads")
        bits = _bits(values)
        count = np.arange(index.size, dtype=np.int32)
        region.order[index] = count
        if (bits[region.order[index]] != bits).any():
            raise Violation("race: one store writes two values to one address")
        written = region.writer[index] != _NOBODY
        if written.any() and (_bits(old())[written] != bits[written]).any():
            raise Violation("race: an address is stored to twice with different values")
        region.writer[index] = program

    def atomic(self, addresses: np.ndarray, itemsize: int) -> None:
        """Record a read-modify-write, which may come from any program. Raises Violation out
        of bounds."""
        if addresses.size:
            region, index = self._locate(addresses, itemsize, "atomic")
            region.reader[index] = region.writer[index] = _SEVERAL

    def add_to(self, traffic: WatchedTraffic) -> None:
        """Add this launch's distinct bytes and requested elements."""
        traffic.launches += 1
        traffic.loads += self.loads
        traffic.stores += self.stores
        for region in self.regions:
            traffic.loaded += int(np.count_nonzero(region.reader != _NOBODY)) * region.grain
            traffic.stored += int(np.count_nonzero(region.writer != _NOBODY)) * region.grain


def _bits(values: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"u{flat.itemsize}")


_memory: WatchedMemory | None = None
_traffic = WatchedTraffic()


@contextmanager
def counting() -> Generator[WatchedTraffic, None, None]:
    """Count the traffic of every launch in the block."""
    global _traffic
    outer, _traffic = _traffic, WatchedTraffic()
    try:
        yield _traffic
    finally:
        _traffic = outer


def _program(builder: InterpreterBuilder) -> int:
    x, y, z = builder.grid_idx
    _, height, depth = builder.grid_dim
    return (x * height + y) * depth + z


def _load(self: Any, ptrs: Any, mask: Any, other: Any, *_rest: Any, **_named: Any) -> Any:
    kind = ptrs.get_element_ty()
    dtype = interpreter._get_np_dtype(kind)
    if _memory is not None:
        touched = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data]
        _memory.load(touched, dtype.itemsize, _program(self))
    if other is None:
        other = TensorHandle(np.zeros_like(ptrs.data, dtype=dtype), kind)
    return TensorHandle(
        interpreter._interpreter.load(ptrs.data, mask.data, other.data, dtype), kind
    )


def _store(self: Any, ptrs: Any, value: Any, mask: Any, *_rest: Any, **_named: Any) -> Any:
    if _memory is not None:
        chosen = mask.data

        def old() -> np.ndarray:
            nothing = np.zeros_like(value.data)
            return interpreter._interpreter.load(ptrs.data, chosen, nothing, value.data.dtype)[
                chosen
            ]

        _memory.store(ptrs.data[chosen], value.data[chosen], old, _program(self))
    return interpreter._interpreter.store(ptrs.data, value.data, mask.data)


def _atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    def atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        if _memory is not None:
            _memory.atomic(ptr.data[mask.data], val.data.itemsize)
        return original(self, operation, ptr, val, mask, *rest)

    return atomic_rmw


def _launch(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _memory
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        _memory = WatchedMemory(tensors)
        try:
            with np.errstate(all="ignore"):
                return original(self, *args, **kwargs)
        finally:
            _memory.add_to(_traffic)
            _memory = None

    return launch


# --- low precision: every conversion goes through here -------------------------------------------

_FP8 = {
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}


def _is_packed(kind: Any) -> bool:
    """Whether the interpreter stores the type as a bit pattern, not as numbers."""
    return kind == tl.bfloat16 or kind in _FP8


def _decode(data: np.ndarray, kind: Any) -> np.ndarray:
    """Decode bit patterns to numbers: exact, as fp32."""
    if kind == tl.bfloat16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind in _FP8:
        packed = torch.from_numpy(np.ascontiguousarray(data, dtype=np.uint8))
        return packed.view(_FP8[kind]).to(torch.float32).numpy().reshape(data.shape)
    return data


def _encode(data: np.ndarray, kind: Any) -> np.ndarray:
    """Round numbers to nearest even; fp8 saturates, as `cvt.rn.satfinite` does."""
    if kind == tl.bfloat16:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet, rounded).astype(np.uint16).reshape(data.shape)
    if kind in _FP8:
        top = torch.finfo(_FP8[kind]).max
        wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).clamp(-top, top)
        return wide.to(_FP8[kind]).view(torch.uint8).numpy().reshape(data.shape)
    return data.astype(interpreter._get_np_dtype(kind))


def _cast(_self: Any, src: Any, dst_type: Any) -> Any:
    kind = dst_type.scalar
    return TensorHandle(_encode(_decode(src.data, src.dtype.scalar), kind), kind)


def _fp_to_fp(self: Any, src: Any, dst_type: Any, _rounding: Any) -> Any:
    return _cast(self, src, dst_type)


def _splat(_self: Any, block: Any, scalar: Any) -> Any:
    """Broadcast a scalar to a block; the result of a comparison is boolean, which its own handle
    does not say."""
    kind = block.scalar
    data = np.full(block.shape, scalar.data, dtype=interpreter._get_np_dtype(kind))
    return TensorHandle(data, kind)


def _wide(original: Callable[..., Any]) -> Callable[..., Any]:
    """Operator that computes packed types in fp32 and rounds the result back."""

    def operator(self: Any, *arguments: Any) -> Any:
        *handles, function = arguments
        kind = handles[-1].dtype.scalar
        if not _is_packed(kind):
            return original(self, *arguments)
        result = function(*(_decode(handle.data, handle.dtype.scalar) for handle in handles))
        if result.dtype != np.bool_:
            result = _encode(result, kind)
        return TensorHandle(result, kind)

    return operator


def _select(_self: Any, condition: Any, left: Any, right: Any) -> Any:
    return TensorHandle(np.where(condition.data, left.data, right.data), right.dtype.scalar)


def _clamp(self: Any, value: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
    """Clamp a number between two; NaN becomes the lower bound, unless NaN is to be propagated."""
    if propagate_nan == tl.PropagateNan.NONE:
        return self.binary_op(self.binary_op(value, low, np.fmax), high, np.fmin)
    return self.ternary_op(value, low, high, np.clip)


# --- reductions and scans by their real combine functions ----------------------------------------


def _tensor(data: np.ndarray, kind: Any) -> Any:
    shape = list(data.shape)
    return tl.core.tensor(TensorHandle(data, kind), tl.block_type(kind, shape) if shape else kind)


def _combine(function: Any, left: list[Any], right: list[Any]) -> list[Any]:
    result = function.fn(*left, *right)
    return list(result) if isinstance(result, tuple) else [result]


def _slice(values: list[Any], axis: int, part: slice) -> list[Any]:
    cut = (slice(None),) * axis + (part,)
    return [_tensor(value.handle.data[cut], value.dtype) for value in values]


def _tree_reduce(self: Any, inputs: Any) -> list[Any]:
    """Fold the halves of the array onto each other until one element is left."""
    axis = self.axis
    values = list(inputs)
    rank = values[0].handle.data.ndim
    if axis is None:
        values = [_tensor(value.handle.data.reshape(-1), value.dtype) for value in values]
        axis = 0
    size = values[0].handle.data.shape[axis]
    while size > 1:
        half = size // 2
        low, high = slice(0, half), slice(half, 2 * half)
        folded = _combine(self.combine_fn, _slice(values, axis, low), _slice(values, axis, high))
        if size % 2:
            last = _slice(values, axis, slice(size - 1, size))
            folded = _combine(self.combine_fn, folded, last) if half == 1 else folded
        values, size = folded, half
    return [self._finish(value, axis, rank) for value in values]


def _finish(self: Any, value: Any, axis: int, rank: int) -> Any:
    data = np.squeeze(value.handle.data, axis)
    if self.keep_dims:
        data = data.reshape((1,) * rank) if self.axis is None else np.expand_dims(data, axis)
    return self.to_tensor(data if data.shape else data[()], value.dtype)


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    plain = (tl.standard._sum_combine, tl.standard._elementwise_max, tl.standard._elementwise_min)

    def apply_impl(self: Any, inputs: Any) -> Any:
        known = any(self.combine_fn is function for function in plain)
        if known and not _is_packed(inputs[0].dtype.scalar):
            return original(self, inputs)
        return _tree_reduce(self, inputs)

    return apply_impl


def _tree_scan(self: Any, inputs: Any) -> list[Any]:
    """Inclusive scan by doubling: each element takes in the one `step` before it."""
    values = list(inputs)
    axis, size, step = self.axis, values[0].handle.data.shape[self.axis], 1
    places = np.arange(size).reshape([-1 if d == axis else 1 for d in range(len(values[0].shape))])
    while step < size:
        early = [_tensor(np.roll(v.handle.data, step, axis), v.dtype) for v in values]
        joined = _combine(self.combine_fn, early, values)
        values = [
            _tensor(np.where(places >= step, new.handle.data, old.handle.data), old.dtype)
            for new, old in zip(joined, values, strict=True)
        ]
        step *= 2
    return values


def _sum_scan(self: Any, value: Any) -> list[Any]:
    """Running sum, added up by doubling as the GPU does."""
    data, size, step = value.handle.data, value.handle.data.shape[self.axis], 1
    places = np.arange(size).reshape([-1 if d == self.axis else 1 for d in range(data.ndim)])
    while step < size:
        data = np.where(places >= step, data + np.roll(data, step, self.axis), data)
        step *= 2
    return [_tensor(data, value.dtype)]


# --- libdevice -----------------------------------------------------------------------------------


def _wide_tensor(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data, dtype=np.float64))


def _extern(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Device function over fp32 or fp64 operands. Raises TypeError for others, as when compiled."""

    def call(*args: Any, **_named: Any) -> Any:
        operands = [_SEMANTIC.to_tensor(arg) for arg in args]
        kinds = {operand.dtype.scalar for operand in operands}
        if len(kinds) != 1 or not kinds <= {tl.float32, tl.float64}:
            raise TypeError(f"libdevice.{name} takes fp32 or fp64, got {sorted(map(str, kinds))}")
        kind = kinds.pop()
        arrays = np.broadcast_arrays(*(operand.handle.data for operand in operands))
        result = function(*map(_wide_tensor, arrays)).numpy()
        if result.dtype == np.bool_:
            kind = tl.int1
        block = any(operand.type.is_block() for operand in operands)
        handle = TensorHandle(result.astype(interpreter._get_np_dtype(kind)), kind)
        return tl.core.tensor(handle, tl.block_type(kind, list(result.shape)) if block else kind)

    return call


def _cuda_round(x: torch.Tensor) -> torch.Tensor:
    """Round half away from zero, unlike `torch.round`."""
    return torch.copysign(torch.floor(x.abs() + 0.5), x)


_SAME_NAME = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "ceil", "copysign"),
    *("cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod"),
    *("hypot", "isinf", "isnan", "lgamma", "log", "log10", "log1p", "log2", "nextafter", "pow"),
    *("rsqrt", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
"""Functions that torch calls by the same name."""

_LIBDEVICE: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "cbrt": lambda x: torch.copysign(x.abs().pow(1.0 / 3.0), x),
    "div_rn": torch.div,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp10": lambda x: torch.pow(10.0, x),
    "fast_dividef": torch.div,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_tanhf": torch.tanh,
    "fma": lambda x, y, z: x * y + z,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "nearbyint": torch.round,
    "norm_cdf": torch.special.ndtr,
    "normcdf": torch.special.ndtr,
    "rint": torch.round,
    "round": _cuda_round,
    "sqrt_rn": torch.sqrt,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)),
}


def _install_libdevice() -> None:
    """Replace the stubs; the others keep failing by name instead of returning None."""
    from triton.language.extra import libdevice

    for name, stub in list(vars(libdevice).items()):
        if callable(stub) and getattr(stub, "__module__", "") == libdevice.__name__:
            function = _LIBDEVICE.get(name)
            setattr(libdevice, name, _extern(name, function) if function else _missing(name))


def _missing(name: str) -> Callable[..., Any]:
    def call(*_args: Any, **_named: Any) -> Any:
        raise NotImplementedError(
            f"libdevice.{name} is not in the interpreter; add it to _LIBDEVICE"
        )

    return call


# --- installation --------------------------------------------------------------------------------


class _Forever:
    """Patch scope of a launch, when the language stays patched for the whole process."""

    def restore(self) -> None:
        """Keep the language patched: there is nothing to restore."""


def _patch_language_once() -> None:
    """Patch `tl` once: the interpreter does it at each call of a device function, which costs
    milliseconds each."""

    def example() -> object:
        """Function whose globals hold the language modules to patch: `tl` and this one."""
        return core

    interpreter._patch_lang(example)
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    interpreter._patch_lang = lambda _fn: _Forever()


def _np_dtype(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache the dtype conversion: the interpreter builds its table of types anew at each call."""
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return original(scalar)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    return np_dtype


@cache
def install() -> None:
    """Repair the interpreter for this process, under `TRITON_INTERPRET=1`."""
    interpreter._get_np_dtype = _np_dtype(interpreter._get_np_dtype)
    builder: Any = InterpreterBuilder
    builder.create_masked_load = _load
    builder.create_masked_store = _store
    builder.create_atomic_rmw = _atomic(builder.create_atomic_rmw)
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _fp_to_fp
    builder.get_bf16 = lambda self, value: _cast(self, self.get_fp32(value), tl.bfloat16)
    builder.binary_op = _wide(builder.binary_op)
    builder.unary_op = _wide(builder.unary_op)
    builder.create_select = _select
    builder.create_splat = _splat
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_clampf = _clamp
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    reduce: Any = ReduceOps
    reduce.apply_impl = _reduce(reduce.apply_impl)
    reduce._finish = _finish
    scan: Any = ScanOps
    scan.generic_scan = _tree_scan
    scan.cumsum = _sum_scan
    executor: Any = GridExecutor
    executor.__call__ = _launch(executor.__call__)
    # Sums that overflow would only be reported with `debug`; to look for them is half the time.
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    _install_libdevice()
    _patch_language_once()
