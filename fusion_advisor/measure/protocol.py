"""What `measure` asks of the child on the GPU, and `trial` of those that run models, and what comes
back: frozen records, free of torch.

They cross a pipe (`support.worker`). Times are microseconds unless a name says `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Criterion, Kernel
from fusion_advisor.ir.scenario import Moved, Sizes


@dataclass(frozen=True, slots=True)
class TimingRules:
    """The numbers of `[measure]` in rules/model.toml, and those of the device."""

    flush_bytes: int
    batch: int
    least_runs: int
    most_runs: int
    spent_s: float
    ahead: float
    slack: float
    criterion: Criterion
    datasheet_bandwidth: float
    """Bytes a second."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One call: the median of the GPU's times with its quartiles, and the median of what a caller
    that waits for it sees. `host_ahead`: the launches were queued before the GPU came to them;
    where not, the times hold what the host took."""

    us: float
    low_us: float
    high_us: float
    runs: int
    wall_us: float
    host_ahead: bool


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute something: `eager`; `compiled` by torch.compile in a `mode`; `line`,
    PyTorch code over named inputs; `kernel`, the emitted ones. Of a whole model `line` and
    `kernel` stand in the places of their groups, and `compiled` may be given such, too."""

    name: str
    kind: Literal["eager", "compiled", "line", "kernel"]
    mode: str = ""
    line: str = ""
    names: tuple[tuple[str, int], ...] = ()
    """Each name in `line` with the number of the input that it stands for."""
    imports: tuple[str, ...] = ()
    """Statements that `line` needs, and the packages that they need; without these the way is
    absent."""
    needs: tuple[str, ...] = ()
    backend: str = "inductor"
    """Of `compiled`: as torch.compile takes it."""


EAGER = Way("eager", "eager")
KERNEL = Way("kernel", "kernel")
COMPILED = tuple(
    Way(name, "compiled", mode)
    for name, mode in (
        ("compile", ""),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("reduce-overhead", "reduce-overhead"),
    )
)
"""torch.compile in each of its modes, sizes static."""

OWN_OPS = Way("framework", "line")
"""Of a whole model: the framework's own ops in place of the groups where they are as good."""
KERNEL_COMPILED = Way("kernel+compile", "compiled")
KERNEL_GRAPHED = Way("kernel+reduce-overhead", "compiled", "reduce-overhead")
"""Of a whole model: the emitted kernels in their places, the rest by torch.compile."""
BACKEND = Way("backend", "compiled", backend="fusion_advisor")
BACKEND_GRAPHED = Way(
    "backend+reduce-overhead", "compiled", "reduce-overhead", backend="fusion_advisor"
)
"""Of a whole model: torch.compile with our backend, which takes kernels where they win."""


@dataclass(frozen=True, slots=True)
class GroupJob:
    """A group to compute in one way, to check and to time.

    `kernel` is the emitted file, whose `reference` is what eager launches; its one case has the
    sizes to measure at. `least_bytes` is what every way must move, once.
    """

    subject: str
    way: Way
    kernel: Kernel
    least_bytes: int
    rules: TimingRules
    random: bool = False
    """Random numbers are drawn: eager's are others."""
    nodes: tuple[str, ...] = ()
    """The graph's nodes in the order of the reference's lines."""


@dataclass(frozen=True, slots=True)
class TurnsJob:
    """Kernels of the same computation to time in turn, `rounds` times.

    The first one's `reference` is what eager launches; its one case has the sizes to measure at.
    """

    subject: str
    kernels: tuple[Kernel, ...]
    least_bytes: int
    rules: TimingRules
    rounds: int
    random: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """A kernel's microseconds, the median of each round; none where it failed, which is one
    line."""

    us: tuple[float, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """Kernels that were timed in turn, in the order of the job. `failure` is of all of them: the
    child's own, or one that leaves a GPU's context unusable."""

    series: tuple[Series, ...] = ()
    machine: tuple[tuple[str, str], ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function in place of some launches of a graph: the text of its file and its name, the
    tensors that it takes and makes as (node, output), and the nodes that it computes, views between
    them included."""

    text: str
    entry: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A whole captured graph to run in one way, on random weights and inputs, and to time. With
    `kernels` in place of their groups it is held to eager."""

    way: Way
    graph: Graph
    kernels: tuple[Replacement, ...]
    rules: TimingRules
    rest: Graph | None = None
    """The graph of what runs beside the kernels; None where there are none."""
    after: tuple[int, ...] = ()
    """Of each kernel how many nodes of `rest` stand before it."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Two sets of nodes that Inductor left in different kernels, and why by its own account."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Inductor:
    """What torch.compile made: each kernel that it launches with the graph's nodes that it covers,
    in order, and where it did not fuse. A node may be in several kernels: what is cheap is computed
    anew in each. One in none is nothing to run, a view say. `unknown` says why this is not known.
    """

    kernels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    apart: tuple[Apart, ...] = ()
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way, measured. `failure` is one line, None where all went well; `absent` says why a way
    is not there at all. Errors are the largest against float64, of the model against eager, in the
    values' own unit."""

    subject: str
    way: str
    timing: Timing | None = None
    error: float | None = None
    eager_error: float | None = None
    failure: str | None = None
    absent: str | None = None
    seconds: float = 0.0
    """Wall seconds that preparing it took, compilation included."""
    inductor: Inductor | None = None


@dataclass(frozen=True, slots=True)
class CeilingsJob:
    """To find out what the device itself reaches."""

    rules: TimingRules
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`copy` in bytes a second, read and written; `matmul` in FLOP/s by dtype; what one small
    launch takes of the GPU's time and of the host's. `machine` names what measured what."""

    copy: float
    matmul: tuple[tuple[str, float], ...]
    launch_us: float
    host_launch_us: float
    machine: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RunJob:
    """A model to run at some sizes of the first and the second dimension, 0 as its inputs have it,
    with some seeds: the original, or the patched one in a copy of its tree."""

    model: str
    folder: str
    sizes: tuple[tuple[int, int], ...]
    seeds: int
    criterion: Criterion
    mode: str = "eval"
    dtype: str | None = None
    autocast: str | None = None
    moved: Moved | None = None
    """Of the patched one: the tree and its copy."""
    kernels: str = ""
    """Of the patched one: the folder or the file that its kernels are in."""
    cast: str = ""
    """The dtype that its floats are cast to, in which kernels may fall back; empty where none."""
    at: Sizes = field(default_factory=Sizes)
    """Other sizes of its inputs and of what it is built with, at which kernels may fall back."""
    summed: int = 0
    """Elements of the largest sum behind a result."""
    further: int = 0
    """How often eager alone draws again at most, where one draw has too few elements."""


@dataclass(frozen=True)
class Ran:
    """What came of it: `unfit` where the model or a kernel does not serve these sizes, or the model
    the dtype or float64; `wrong` where results differ or the patched model fails."""

    place: str
    launches: int = 0
    unfit: str = ""
    wrong: str = ""
    few: bool = False
    """Of `wrong`: whether eager has to draw further before that can be said."""
