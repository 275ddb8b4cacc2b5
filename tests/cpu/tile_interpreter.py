"""NumPy meaning of tile programs: what a kernel does, told without Triton.

`interpret` puts tile functions in the place of the jit functions of an emitted module, so that its
own launcher calls them. Values that are floats are held in float64, and a cast rounds to its dtype;
integers have the width that they have on a GPU, and wrap there. Statements of resident programs
run in an order that is drawn, so a kernel whose result hangs on which program comes first is seen:

- an address must lie in the storage of a tensor of the launch, and an element that one program
  stores is neither loaded nor stored by another one; words that are published are waited for;
- lanes that are masked, and memory that nothing has been stored to, hold NaN or an odd integer;
- programs that wait for words that no resident program will leave are a deadlock.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fusion_advisor.support.kernel_fault import KernelFault
from fusion_advisor.tile import program as ir

from .tile_memory import FREE, Counts, Memory, Pointer, Value
from .tile_values import (
    DEVICE,
    MONOIDS,
    OPS,
    PLACES,
    SIGNED,
    rounded,
)

_RESIDENT = 4
"""Programs that are resident at once, where no more than that share a row."""


# --- programs ------------------------------------------------------------------------------------


@dataclass
class _Launch:
    """One launch: its grid, its memory, and the tickets that its programs took."""

    functions: Mapping[str, ir.TileFunction]
    grid: tuple[int, int, int]
    memory: Memory
    tickets: int = 0


class _Program:
    """One program: evaluates values, runs statements."""

    def __init__(self, launch: _Launch, number: int) -> None:
        self.launch, self.memory, self.number = launch, launch.memory, number
        x, y, _ = launch.grid
        self.place = number % x, number // x % y, number // x // y
        self.names: dict[str, Value] = {}
        self.waiting = False

    def run(self, function: ir.TileFunction, given: Iterable[Value]) -> Generator[None]:
        """Statements of a function with its arguments; yields where others may go on."""
        outside, self.names = self.names, dict(zip(function.names, given, strict=True))
        yield from self.block(function.body)
        self.names = outside

    def block(self, block: ir.Block) -> Generator[None]:
        for statement in block:
            yield from self.statement(statement)

    def statement(self, statement: ir.Statement) -> Generator[None]:
        match statement:
            case ir.Let((name,), value) | ir.Begin(name, value) | ir.Update(name, value):
                self.names[name] = self.value(value)
            case ir.Let(names, ir.DeviceCall("published", (words, mask, waits))):
                found = yield from self.published(words, mask, waits)
                self.names.update(zip(names, found, strict=True))
            case ir.Let(names, value):
                self.names.update(zip(names, self.value(value), strict=True))
            case ir.Multiple(name, divisor):
                if self.names[name] % self.names[divisor]:
                    raise KernelFault(f"{name} is no multiple of {divisor}")
            case ir.Settled(name, constant):
                if self.names[constant] not in (0, self.names[name]):
                    raise KernelFault(f"{name} is not {constant}")
            case ir.Store(address, value, mask):
                held = None if mask is None else self.value(mask)
                self.memory.store(self.value(address), self.value(value), held, self.number)
                yield
            case ir.Do(ir.DeviceCall(function, args)) if function in self.launch.functions:
                yield from self.run(self.launch.functions[function], map(self.value, args))
            case ir.Do(call):
                self.value(call)
                yield
            case ir.Barrier():
                pass  # lanes of a program run as one here
            case ir.For(name, start, stop, step, body):
                for place in range(*(int(self.value(bound)) for bound in (start, stop, step))):
                    self.names[name] = np.int32(place)
                    yield from self.block(body)
            case ir.If(condition, body, otherwise):
                yield from self.block(body if self.value(condition) else otherwise)
            case _:
                raise TypeError(f"{type(statement).__name__} has no meaning here")

    def published(
        self, words: ir.Tile, mask: ir.Tile, waits: ir.Tile
    ) -> Generator[None, None, Any]:
        """Pairs of numbers that other programs leave, once all are there."""
        pointer, held = self.value(words), self.value(mask)
        if not self.value(waits):
            found = self.memory.load(pointer, held, 0, self.number)
            if not found[held].all():
                raise KernelFault("a word is read that no earlier launch has left")
            return _halves(found)
        place = np.broadcast_to(pointer.place, held.shape)
        if (pointer.buffer.writer[place[held]] != FREE).any():
            raise KernelFault("race: a word is stored, and not exchanged")
        while True:
            found = np.where(held, pointer.buffer.load(np.where(held, place, 0)), 0)
            if found[held].all():
                return _halves(found)
            self.waiting = True
            yield
            self.waiting = False

    # -- values ----------------------------------------------------------------------------------

    def value(self, value: ir.Tile) -> Value:
        match value:
            case ir.Name(name):
                return self.names[name]
            case ir.Literal(text):
                return _number(text)
            case ir.Binary(sign, left, right):
                return SIGNED[sign](self.value(left), self.value(right))
            case ir.Unary(sign, operand):
                return (np.negative if sign == "-" else np.invert)(self.value(operand))
            case ir.Elementwise(op, args):
                return OPS[op](*map(self.value, args))
            case ir.Cast(value, dtype):
                return rounded(self.value(value), dtype)
            case ir.Lanes(count):
                return np.arange(int(self.value(count)), dtype=np.int32)
            case ir.ProgramId(axis, every):
                return np.int32((self.launch.grid if every else self.place)[axis])
            case ir.Across(value, axis):
                return np.expand_dims(self.value(value), axis)
            case ir.Full(shape, value, dtype):
                return np.full(self.shape(shape), rounded(self.value(value), dtype))
            case ir.Broadcast(value, shape):
                return np.broadcast_to(self.value(value), self.shape(shape))
            case ir.Load(address, mask, other):
                held, filled = (each and self.value(each) for each in (mask, other))
                return self.memory.load(self.value(address), held, filled, self.number)
            case ir.Address(base, terms, shape):
                found = self.names[base]
                for term in terms:
                    found += self.value(term)
                spread = np.broadcast_to(found.place, self.shape(shape)) if shape else found.place
                return Pointer(found.buffer, spread)
            case ir.Reduce() | ir.Scan():
                return self.combined(value)
            case ir.Combine(monoid, left, right):
                return MONOIDS[monoid](self.value(left), self.value(right))
            case ir.DeviceCall(function, args):
                return self.called(function, [self.value(arg) for arg in args])
            case _:
                raise TypeError(f"{type(value).__name__} has no meaning here")

    def shape(self, shape: Iterable[ir.Tile]) -> tuple[int, ...]:
        return tuple(int(self.value(each)) for each in shape)

    def combined(self, tile: ir.Reduce | ir.Scan) -> Value:
        """A reduction, or a scan, along an axis."""
        value = self.value(tile.value)
        match tile:
            case ir.Reduce(monoid, _, axis, kept, place) if place is not None:
                axis = 0 if axis is None else axis
                at = np.expand_dims(PLACES[monoid](value, axis=axis), axis)
                found = np.take_along_axis(self.value(place), at, axis)
                return found if kept else np.squeeze(found, axis)
            case ir.Reduce(monoid, _, axis, kept):
                return MONOIDS[monoid].reduce(value, axis=axis, keepdims=kept)
            case ir.Scan(monoid, _, axis, reverse):
                value = np.flip(value, axis) if reverse else value
                found = MONOIDS[monoid].accumulate(value, axis=axis)
                return np.flip(found, axis) if reverse else found

    def called(self, function: str, given: list[Value]) -> Value:
        """Results of a device function."""
        if function in DEVICE:
            return DEVICE[function](*given)
        match function, given:
            case "ticket", (counter, waits):
                if not waits:
                    return np.int32(self.place[0])
                self.launch.tickets += 1
                counter.buffer.store(np.asarray(counter.place), np.int64(self.launch.tickets))
                return np.int32(self.launch.tickets - 1)
            case "publish", (pointer, lower, upper, waits):
                word = _word(lower, upper)
                if waits:  # one word, taken as a whole by whoever waits for it
                    pointer.buffer.store(np.asarray(pointer.place), word)
                else:
                    self.memory.store(pointer, word, None, self.number)
                return None
            case _ if function.startswith("widened_"):
                return given[0]
            case _:
                raise TypeError(f"{function} has no meaning here")


def _number(text: str) -> Value:
    """A literal: a bool, an integer of any width, or a float."""
    if text in ("True", "False"):
        return np.bool_(text == "True")
    try:
        return int(text)
    except ValueError:
        return float(text)


def _word(lower: Value, upper: Value) -> np.int64:
    """Two float32 as a word that is never 0: inverted, and NaN is spelled in one way."""
    low, high = (
        int(np.float32(np.nan if np.isnan(half) else half).view(np.uint32))
        for half in (lower, upper)
    )
    return np.array([~(high << 32 | low) % 2**64], np.uint64).view(np.int64)[0]


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both float32 of some words."""
    halves = (~words).view(np.uint32).reshape(*words.shape, 2).view(np.float32)
    return halves[..., 0].astype(np.float64), halves[..., 1].astype(np.float64)


# --- launches ------------------------------------------------------------------------------------

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Launched:
    """Arguments of a launch, by name."""

    grid: tuple[int, int, int]
    named: dict[str, Any]


Change = Callable[[str, Launched], Launched]
"""Another launch for that of a function, by its name."""


class Interpreted:
    """Tile function in the place of a jit function: `kernel[grid](...)`."""

    def __init__(
        self,
        function: ir.TileFunction,
        functions: Mapping[str, ir.TileFunction],
        counts: Counts,
        order: random.Random,
        change: Change | None,
    ) -> None:
        self.function, self.functions = function, functions
        self.counts, self.order, self.change = counts, order, change
        self.arg_names = list(function.names)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        x, y, z = (*grid, 1, 1)[:3]
        return lambda *given, **more: self._launch((x, y, z), given, more)

    def _launch(self, grid: tuple[int, int, int], given: Any, more: dict[str, Any]) -> None:
        named = dict(zip(self.function.names, given, strict=False))
        named |= {name: value for name, value in more.items() if name not in _OPTIONS}
        if named.keys() != {*self.function.names}:
            odd = sorted(named.keys() ^ {*self.function.names})
            raise KernelFault(f"{self.function.name}: arguments {', '.join(odd)}")
        if self.change:
            changed = self.change(self.function.name, Launched(grid, named))
            grid, named = changed.grid, changed.named
        memory = Memory(self.counts)
        launch = _Launch(self.functions, grid, memory)
        values = [_argument(named[name], memory) for name in self.function.names]
        programs = [_Program(launch, number) for number in range(grid[0] * grid[1] * grid[2])]
        self.order.shuffle(programs)
        with np.errstate(all="ignore"):
            self._run(programs, values, int(named.get("PEERS", 1)))
        memory.close()

    def _run(self, programs: list[_Program], values: list[Value], sharing: int) -> None:
        """Run all programs, as many at once as are resident, a statement of one or another."""
        resident: list[tuple[_Program, Generator[None]]] = []
        while programs or resident:
            while programs and len(resident) < max(sharing, _RESIDENT):
                program = programs.pop()
                resident.append((program, program.run(self.function, values)))
            if all(program.waiting for program, _ in resident):
                self._go_on(resident)
                continue
            at = self.order.randrange(len(resident))
            if next(resident[at][1], _DONE) is _DONE:
                resident.pop(at)

    @staticmethod
    def _go_on(resident: list[tuple[_Program, Generator[None]]]) -> None:
        """Ask each waiting program once. Raises KernelFault where none goes on."""
        over = [each for each in resident if next(each[1], _DONE) is _DONE]
        if not over and all(program.waiting for program, _ in resident):
            raise KernelFault("deadlock: every resident program waits")
        resident[:] = [each for each in resident if each not in over]


_DONE = object()


def _argument(value: Any, memory: Memory) -> Value:
    """An argument of a launch as a program has it: an integer of 32 bits where it fits."""
    if isinstance(value, torch.Tensor):
        return memory.pointer(value)
    if isinstance(value, bool):
        return np.bool_(value)
    return np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)


def interpret(
    module: ModuleType,
    functions: Iterable[ir.TileFunction],
    seed: int,
    *,
    together: bool = False,
    change: Change | None = None,
) -> Counts:
    """Put tile functions in the place of a module's jit functions; `seed` draws the order in which
    programs run. With `together`, programs that share a row are launched at once and wait for each
    other. Returns the counts of traffic, which each launch adds to."""
    counts, order = Counts(), random.Random(seed)
    known = {function.name: function for function in functions}
    for name, function in known.items():
        if hasattr(module, name):
            setattr(module, name, Interpreted(function, known, counts, order, change))
    module.host.resident = lambda device, warps: 2**20 * together
    return counts
