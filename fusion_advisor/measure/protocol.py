"""Messages between `measure` or `trial` and their child processes: frozen records, free of torch.

They cross a pipe (`support.worker`). Times are microseconds unless a name says `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Criterion, Kernel
from fusion_advisor.ir.scenario import Moved, Scenario


@dataclass(frozen=True, slots=True)
class TimingRules:
    """Numbers of `[measure]` in rules/model.toml, and those of the device."""

    flush_bytes: int
    batch: int
    least_runs: int
    most_runs: int
    spent_s: float
    ahead: float
    slack: float
    criterion: Criterion
    datasheet_bandwidth: float
    """Bandwidth of the datasheet, bytes a second."""
    compiled: int
    """Kernels that are compiled at a time."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call: the median of the GPU's times with its quartiles, and the median that a
    waiting caller sees. `host_ahead`: the launches were queued before the GPU reached them;
    otherwise the times include host time."""

    us: float
    low_us: float
    high_us: float
    runs: int
    wall_us: float
    host_ahead: bool


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute something: `eager`; `compiled` by torch.compile in a `mode`; `line`,
    PyTorch code over named inputs; `kernel`, the emitted kernels. For a whole model `line` and
    `kernel` run in the places of their groups, and `compiled` may have such replacements, too."""

    name: str
    kind: Literal["eager", "compiled", "line", "kernel"]
    mode: str = ""
    line: str = ""
    names: tuple[tuple[str, int], ...] = ()
    """Names in `line`, each with the number of its input."""
    imports: tuple[str, ...] = ()
    """Statements that `line` needs, and the packages that they need; without the packages the way
    is absent."""
    needs: tuple[str, ...] = ()
    backend: str = "inductor"
    """Backend of torch.compile for `compiled`."""


EAGER = Way("eager", "eager")
KERNEL = Way("kernel", "kernel")
KERNEL_TUNED = Way("kernel tuned", "kernel")
"""Way of a group: the emitted kernel with the numbers of launches that a search found."""
COMPILED = tuple(
    Way(name, "compiled", mode)
    for name, mode in (
        ("compile", ""),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("reduce-overhead", "reduce-overhead"),
    )
)
"""Ways of torch.compile, one per mode, sizes static."""

OWN_OPS = Way("framework", "line")
"""Way of a whole model: the framework's own ops in place of the groups where they are as good."""
KERNEL_COMPILED = Way("kernel+compile", "compiled")
KERNEL_GRAPHED = Way("kernel+reduce-overhead", "compiled", "reduce-overhead")
"""Way of a whole model: the emitted kernels in their places, the rest by torch.compile."""
BACKEND = Way("backend", "compiled", backend="fusion_advisor")
BACKEND_GRAPHED = Way(
    "backend+reduce-overhead", "compiled", "reduce-overhead", backend="fusion_advisor"
)
"""Way of a whole model: torch.compile with our backend, which takes kernels where they win."""


@dataclass(frozen=True, slots=True)
class GroupJob:
    """Job to check and time a group in one way. `kernel` is the emitted file, whose `reference` is
    eager's computation; its one case has the sizes to measure at. `least_bytes` are the bytes that
    every way must move."""

    subject: str
    way: Way
    kernel: Kernel
    least_bytes: int
    rules: TimingRules
    random: bool = False
    """Whether the group draws random numbers, which differ from eager's."""


@dataclass(frozen=True, slots=True)
class TurnsJob:
    """Job to time kernels of the same computation in turn, `rounds` times. The first kernel's
    `reference` is eager's computation; its one case has the sizes to measure at."""

    subject: str
    kernels: tuple[Kernel, ...]
    least_bytes: int
    rules: TimingRules
    rounds: int
    random: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Microseconds of a kernel, the median of each round; none where the kernel failed, with
    `failure` as one line."""

    us: tuple[float, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """Series of kernels that were timed in turn, in the order of the job. `failure` concerns all of
    them: the child's own, or one that leaves a GPU's context unusable."""

    series: tuple[Series, ...] = ()
    machine: tuple[tuple[str, str], ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """Function in place of some launches of a graph: the text of its file and its name, the tensors
    that it takes and makes as (node, output), and the nodes that it computes, views between them
    included."""

    text: str
    entry: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelJob:
    """Job to run and time a whole captured graph in one way, on random weights and inputs. With
    `kernels` in place of their groups, the results are compared with eager's."""

    way: Way
    graph: Graph
    kernels: tuple[Replacement, ...]
    rules: TimingRules
    rest: Graph | None = None
    """Graph of the nodes that run beside the kernels; None where there are none."""
    after: tuple[int, ...] = ()
    """Number of nodes of `rest` before each kernel."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one way. `failure` is one line, None on success; `absent` says why a way does
    not exist here. Errors are the largest against float64, for the model against eager, in the
    values' own unit."""

    subject: str
    way: str
    timing: Timing | None = None
    error: float | None = None
    eager_error: float | None = None
    failure: str | None = None
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class CeilingsJob:
    """Job to measure the speed that the device itself reaches."""

    rules: TimingRules
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Speed that the device reaches: `copy` in bytes a second, read and written; `matmul` in FLOP/s
    by dtype; GPU and host time of one small launch. `machine` names the machine that measured."""

    copy: float
    matmul: tuple[tuple[str, float], ...]
    launch_us: float
    host_launch_us: float
    machine: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RunJob:
    """Job to run a model, the original or the patched one in a copy of its tree, with some seeds,
    at some sizes of the first and the second dimension; 0 keeps the size of the model's inputs."""

    model: str
    folder: str
    sizes: tuple[tuple[int, int], ...]
    seeds: int
    criterion: Criterion
    scenario: Scenario
    """Scenario of the run; its `sizes` are those of the model's inputs and of its factory's
    arguments, and where there are others than the file's, kernels may fall back."""
    moved: Moved | None = None
    """Tree and copy of the patched model."""
    kernels: str = ""
    """Folder or file of the patched model's kernels."""
    cast: str = ""
    """Dtype that the model's floats are cast to, in which kernels may fall back; empty where there
    is none."""
    summed: int = 0
    """Elements of the largest sum behind a result."""
    further: int = 0
    """Limit on further draws of eager alone, where one draw has too few elements."""
    gradients: bool = False
    """Whether a backward pass follows, whose gradients are held as results are."""


@dataclass(frozen=True)
class RunResult:
    """Result of a `RunJob`: `unfit` where the model or a kernel does not serve these sizes, or the
    model the dtype or float64; `wrong` where results differ or the patched model fails."""

    place: str
    launches: int = 0
    unfit: str = ""
    wrong: str = ""
    few: bool = False
    """Whether `wrong` is provisional, since eager has to draw further first."""
