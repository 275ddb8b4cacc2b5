"""Memory of the NumPy meaning of tile programs: bounds, races and traffic of one launch."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_advisor.support.kernel_fault import KernelFault

Value = Any
"""A NumPy array or scalar, or a `Pointer`."""
_ODD = 0x5A5A5A5A5A5A5A5A
"""Integer in lanes that hold nothing, cut to their width."""
FREE, _SHARED = -1, -2


@dataclass
class Counts:
    """Traffic of the launches seen: distinct bytes, and the elements that lanes asked for."""

    loaded: int = 0
    stored: int = 0
    loads: int = 0
    stores: int = 0


class Buffer:
    """Storage of a tensor, as elements of its dtype, with who loaded and who stored each."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.elements = tensor.detach().as_strided((size,), (1,), 0)
        self.floats = tensor.dtype.is_floating_point
        self.itemsize = tensor.element_size()
        self.reader = np.full(size, FREE, np.int64)
        self.writer = np.full(size, FREE, np.int64)

    def load(self, places: np.ndarray) -> np.ndarray:
        """Elements at some places; floats in float64."""
        found = self.elements[torch.from_numpy(places)]
        return (found.double() if self.floats else found).numpy()

    def store(self, places: np.ndarray, values: np.ndarray) -> None:
        """Write elements, rounded to the dtype."""
        found = torch.from_numpy(np.array(values)).to(self.elements.dtype)
        self.elements[torch.from_numpy(places)] = found

    @property
    def poison(self) -> Value:
        """Value of a lane that loads nothing."""
        if self.floats:
            return np.float64(np.nan)
        dtype = torch.empty((), dtype=self.elements.dtype).numpy().dtype
        return np.array(_ODD).astype(dtype)[()]


@dataclass(frozen=True, slots=True)
class Pointer:
    """Addresses in a buffer, in elements from the start of its storage."""

    buffer: Buffer
    place: Value

    def __add__(self, offset: Value) -> Pointer:
        return Pointer(self.buffer, self.place + offset)


class Memory:
    """Accesses of one launch: bounds, races, traffic."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.buffers: dict[tuple[int, torch.dtype], Buffer] = {}

    def pointer(self, tensor: torch.Tensor) -> Pointer:
        """Address of a tensor's first element."""
        key = tensor.untyped_storage().data_ptr(), tensor.dtype
        if key not in self.buffers:
            self.buffers[key] = Buffer(tensor)
        return Pointer(self.buffers[key], np.int64(tensor.storage_offset()))

    def load(self, pointer: Pointer, mask: Value, other: Value, program: int) -> np.ndarray:
        """Elements where the mask holds, `other` elsewhere; None: what nobody may use."""
        buffer = pointer.buffer
        place, held = self._asked("load", pointer, mask)
        other = buffer.poison if other is None else other
        kind = np.float64 if buffer.floats else np.asarray(buffer.poison).dtype
        found = np.array(np.broadcast_to(np.asarray(other).astype(kind), place.shape))
        chosen = place[held]
        writers = buffer.writer[chosen]
        if ((writers != FREE) & (writers != program)).any():
            raise KernelFault("race: a program loads what another program stored")
        readers = buffer.reader[chosen]
        alone = (readers == FREE) | (readers == program)
        buffer.reader[chosen] = np.where(alone, program, _SHARED)
        self.counts.loads += chosen.size
        found[held] = buffer.load(chosen)
        return found

    def store(self, pointer: Pointer, values: Value, mask: Value, program: int) -> None:
        """Write elements where the mask holds. Lanes of one address must agree."""
        buffer = pointer.buffer
        place, held = self._asked("store", pointer, mask)
        chosen = place[held]
        given = np.broadcast_to(np.asarray(values), place.shape)[held]
        for others, what in ((buffer.writer[chosen], "stored"), (buffer.reader[chosen], "loaded")):
            if ((others != FREE) & (others != program)).any():
                raise KernelFault(f"race: a program stores what another program {what}")
        buffer.writer[chosen] = program
        self.counts.stores += chosen.size
        buffer.store(chosen, given)

    def _asked(self, what: str, pointer: Pointer, mask: Value) -> tuple[np.ndarray, np.ndarray]:
        """Place of each lane, and which lanes take part; in bounds."""
        place = np.asarray(pointer.place).astype(np.int64)
        held = np.asarray(True if mask is None else mask).astype(bool)
        if held.ndim and not place.ndim:
            raise KernelFault(f"{what}: a mask of lanes for one address")
        held = np.broadcast_to(held, place.shape)
        chosen, size = place[held], len(pointer.buffer.reader)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < size):
            raise KernelFault(
                f"{what} out of bounds: elements {chosen.min()} to {chosen.max()} of {size}"
            )
        return place, held

    def close(self) -> None:
        """Add what the launch touched to the counts."""
        for buffer in self.buffers.values():
            self.counts.loaded += int((buffer.reader != FREE).sum()) * buffer.itemsize
            self.counts.stored += int((buffer.writer != FREE).sum()) * buffer.itemsize
