"""What `emit` hands to `verify`, and what comes back: frozen records, free of torch.

They cross a pipe to the child processes (`support.worker`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.ir.graph import Tensor

LICENSE = "# SPDX-License-Identifier: 0BSD"
"""The first line of what is written for a user: it is the user's own, under no condition."""

Constant = bool | int | float
"""The value of a `tl.constexpr` argument."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs to check a kernel with.

    `loaded_bytes` and `stored_bytes` are what the plan predicts: for each launch, distinct
    addresses × itemsize, summed over the storages of the arguments. None: not to be compared.
    `ranges` bounds the values of integer inputs, half open (indices into a table); empty or
    None: the checker chooses small ones.
    """

    name: str
    inputs: tuple[Tensor, ...]
    loaded_bytes: int | None = None
    stored_bytes: int | None = None
    ranges: tuple[tuple[int, int] | None, ...] = ()
    costly: bool = False
    """Takes the interpreter long: it is checked with the first two seeds alone."""
    summed: int = 0
    """Elements of the largest sum behind a result."""
    loads: int | None = None
    """Elements that the kernels ask for at the most, as often as they do. None: not to be held."""
    stores: int | None = None
    """Elements that they store, likewise."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One jit function as it is launched on the device: what to compile offline.

    `signature` names every argument in order with Triton's type (`*bf16`, `i32`, `constexpr`);
    `constants` gives the constexpr values; `divisible` names the arguments known to be a
    multiple of 16 (for pointers: bytes), which the runtime finds out at launch.
    """

    jit_name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    fp_fusion: bool = True
    """May the compiler contract a multiplication and an addition into one rounding?"""
    most_registers: int = 0
    """That a thread may have; 0: as many as the compiler wants."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An emitted file: its text, its launcher's name, and how to check and compile it."""

    name: str
    entry: str
    text: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """The dtype of each output."""
    cases: tuple[Case, ...] = ()
    launches: tuple[Launch, ...] = ()
    yardstick: str = ""
    """`reference` as the model's graph says it, which the file's own has to be; empty: that of the
    file."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one launch costs on the chip. Registers are per thread; spills and shared are bytes.

    `spill_bytes` is spill stores plus spill loads per thread, as `ptxas -v` counts them; `stack`
    bytes are not spills.
    """

    jit_name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    triton: str
    ptxas: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """The offline compile of one kernel: its launches' resources, or why there are none."""

    kernel: str
    resources: tuple[Resources, ...] = ()
    failure: str | None = None

    @property
    def registers(self) -> tuple[int, ...]:
        """Of a thread of each launch."""
        return tuple(each.registers for each in self.resources)


@dataclass(frozen=True, slots=True)
class Check:
    """What the checker saw: on `where` (`interpreter`, `cuda:NAME`) and on which shapes.

    `max_error` is the largest absolute error of all cases, `eager_error` and `tolerance` are of the
    same output in the same `case`. `stepped` is the largest share of an output's elements that only
    eager's own error at a step excuses. `failure` is one line, None when the kernel passed.
    """

    kernel: str
    where: str
    passed: bool
    shapes: tuple[str, ...] = ()
    seeds: int = 0
    max_error: float = 0.0
    eager_error: float = 0.0
    tolerance: float = 0.0
    failure: str | None = None
    case: str = ""
    stepped: float = 0.0


@dataclass(frozen=True, slots=True)
class Criterion:
    """How far off a result may be, from `[criterion]` in `rules/model.toml`: a factor of eager's
    error, ulps of the result's dtype, and the elements that eager's error is taken over."""

    factor: float
    ulps: float
    summed_ulps: float
    long_sum: int
    float64_ulps: float
    eager_elements: int


@dataclass(frozen=True, slots=True)
class CheckJob:
    """What the checking child is asked."""

    kernel: Kernel
    seeds: int
    criterion: Criterion


@dataclass(frozen=True, slots=True)
class CompileJob:
    """What the compiling child is asked. `capability` is 90 for compute capability 9.0."""

    kernel: Kernel
    capability: int
