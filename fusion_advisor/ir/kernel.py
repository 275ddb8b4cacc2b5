"""Records of a kernel that `emit` hands to `verify`, and records of the results; frozen, free of
torch.

The records cross a pipe to the child processes (`support.worker`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.ir.graph import Tensor

LICENSE = "# SPDX-License-Identifier: 0BSD"
"""First line of every file written for a user: the file is the user's own, under no condition."""

PROGRAMS = "PROGRAMS"
"""Constant of an emitted file, and the beginning of the names of others: the most programs of a
kernel whose programs walk the rows."""

Constant = bool | int | float
"""Value of a `tl.constexpr` argument."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs to check a kernel with.

    `loaded_bytes` and `stored_bytes` are the plan's prediction: for each launch, distinct addresses
    × itemsize, summed over the storages of the arguments; None: no comparison. `ranges` bounds the
    values of integer inputs, half open (indices into a table); empty or None: the checker chooses
    small values. `rare` are integers that the kernel compares those of an input with, of which a
    few elements have one each.
    """

    name: str
    inputs: tuple[Tensor, ...]
    loaded_bytes: int | None = None
    stored_bytes: int | None = None
    ranges: tuple[tuple[int, int] | None, ...] = ()
    rare: tuple[tuple[int, ...], ...] = ()
    costly: bool = False
    """Whether the interpreter takes long for the case: then only the first two seeds are
    checked."""
    endless: bool = False
    """Whether one draw of the case would take the interpreter longer than a check may, or more
    memory: it is left to a GPU."""
    summed: int = 0
    """Elements of the largest sum behind a result."""
    loads: int | None = None
    """Upper limit on the elements that the kernels load, repeats counted. None: no limit is
    checked."""
    programs: int = 0
    """The most programs that walk the rows here; 0: as many as the file says."""
    numbers: tuple[float, ...] = ()
    """Numbers behind the inputs, as in the graph."""
    stores: int | None = None
    """Upper limit on the elements that the kernels store, repeats counted. None: no limit
    is checked."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One jit function as it is launched on the device, for the offline compile.

    `signature` names every argument in order with Triton's type (`*bf16`, `i32`, `constexpr`);
    `constants` gives the constexpr values; `divisible` names the arguments known to be a multiple
    of 16 (for pointers: bytes), which the runtime finds out at launch.
    """

    jit_name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """Emitted file: text, name of the launcher, and how to check and compile the file."""

    name: str
    entry: str
    text: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """Dtype of each output."""
    cases: tuple[Case, ...] = ()
    launches: tuple[Launch, ...] = ()
    yardstick: str = ""
    """Text of `reference` as the model's graph states it, which the file's own `reference` must
    equal; empty: the file's own is used."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers that the launcher is given behind its tensors."""
    gradients: tuple[int, ...] = ()
    """Inputs of which the file makes the gradient, too."""
    held: tuple[tuple[int, int], ...] = ()
    """Dimensions of inputs, by the input's number, in which its backward serves one size."""


@dataclass(frozen=True, slots=True)
class Resources:
    """On-chip resources of one launch. Registers are per thread; spills and shared memory are
    bytes. `spill_bytes` is spill stores plus spill loads per thread, as `ptxas -v` counts them;
    `stack` bytes are not spills."""

    jit_name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    triton: str
    ptxas: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """Offline compile of one kernel: the resources of its launches, or why there are none."""

    kernel: str
    resources: tuple[Resources, ...] = ()
    failure: str | None = None

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers per thread of each launch."""
        return tuple(each.registers for each in self.resources)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of checking a kernel: on `where` (`interpreter`, `cuda:NAME`) and on which shapes.

    `max_error` is the largest absolute error of all cases; `eager_error` and `tolerance` are of the
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
    """Limit on the error of a result, from `[criterion]` in `rules/model.toml`: a factor of eager's
    error, ulps of the result's dtype, and the number of elements that eager's error is taken over.
    """

    factor: float
    ulps: float
    summed_ulps: float
    long_sum: int
    float64_ulps: float
    eager_elements: int


@dataclass(frozen=True, slots=True)
class CheckJob:
    """Request to the child process that checks a kernel."""

    kernel: Kernel
    seeds: int
    criterion: Criterion


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Request to the child process that compiles a kernel. `capability` is 90 for compute
    capability 9.0."""

    kernel: Kernel
    capability: int
