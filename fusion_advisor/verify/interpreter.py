"""Watch on the memory of kernels that Triton's interpreter runs.

Import this in a process that has `TRITON_INTERPRET=1` set before Triton is imported, then call
`install()`: it repairs the interpreter as `shipped.fused_interpreter` does for users, and besides,
while a kernel runs, every address that it touches must lie inside the storage of a tensor that the
launch was given; programs may not depend on each other's order; and the distinct bytes loaded and
stored are counted, and the elements asked for (`WatchedTraffic`).
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
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from fusion_advisor.shipped import fused_interpreter


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
            return original(self, *args, **kwargs)
        finally:
            _memory.add_to(_traffic)
            _memory = None

    return launch


# --- installation --------------------------------------------------------------------------------


@cache
def install() -> None:
    """Repair the interpreter for this process, under `TRITON_INTERPRET=1`, and watch what kernels
    do in it."""
    fused_interpreter.install()
    builder: Any = InterpreterBuilder
    builder.create_masked_load = _load
    builder.create_masked_store = _store
    builder.create_atomic_rmw = _atomic(builder.create_atomic_rmw)
    executor: Any = GridExecutor
    executor.__call__ = _launch(executor.__call__)
