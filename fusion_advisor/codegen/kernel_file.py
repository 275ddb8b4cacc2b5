"""What the parts of one emitted file share: its kernels, its names, its sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fusion_advisor.codegen.triton import called
from fusion_advisor.fusion.lower import Expressed
from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.region.axes import AxisList, Dims
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.base import Plan, Step
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.layout import Access, accesses
from fusion_advisor.schedules.layout import access as laid_over
from fusion_advisor.shipped.files import DEVICE, functions
from fusion_advisor.tile.program import Block, TileFunction

INT32_MAX = 2**31 - 1
MOST_LANES = 2**20
"""Elements of a block, in Triton."""


@dataclass(frozen=True)
class JitFunction:
    """One jit function of the file."""

    name: str
    step: Step
    body: Body
    program: Block
    """What it does."""

    @cached_property
    def function(self) -> TileFunction:
        """Function that it is written as."""
        workspace = ("workspace_ptr",) if self.step.phases else ()
        numbers = (*self.body.sizes, *self.body.strides, *self.body.numbers)
        arguments = (*self.pointers, *workspace, *numbers)
        constants = tuple(constant.name for constant in self.body.constants)
        return TileFunction(self.name, arguments, constants, self.program, self.body.note)

    @property
    def helpers(self) -> frozenset[str]:
        """Shared device functions that it calls."""
        return functions(DEVICE) & {*called(self.program)}

    @property
    def filled(self) -> tuple[str, ...]:
        """Constants of which each lane has an element."""
        return ("COLS", "REST") if self.step.rest else ()

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (*self.step.loads, *self.step.stores)

    def named(self, access: Access) -> str:
        return self.body.tensors[access.name]

    @property
    def pointers(self) -> dict[str, Access]:
        """Each tensor argument once."""
        found: dict[str, Access] = {}
        for access in self.accesses:
            found.setdefault(f"{self.named(access)}_ptr", access)
        return found


@dataclass(frozen=True)
class KernelFile:
    """What the parts of one file share."""

    name: str
    plan: Plan
    expressed: Expressed
    kernels: tuple[JitFunction, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    numbers: tuple[str, ...]
    """Numbers that the file is given behind its tensors, as `expressed.numbers`."""
    sizes: Mapping[int, str]
    """Every axis by its name in the launcher, or by its literal size."""
    strides: Mapping[str, str]
    """What the launcher calls the strides of each input, by its name."""
    origins: Mapping[int, tuple[str, int]]
    """Axes that are whole dimensions of an input: the input's name and the dimension."""
    titles: Mapping[str, str]
    """Names of the results of the group's nodes."""
    held: tuple[tuple[str, int, int], ...] = ()
    """Dimensions of inputs that have to be as captured: the input's name, the dimension, its
    size."""
    graded: bool = True
    """Whether a gradient may pass through it."""

    @property
    def free(self) -> frozenset[int]:
        """Axes of which the file serves other sizes."""
        names, dims = self.input_names, self.region.input_dims
        held = {axis for name, d, _ in self.held for axis in dims[names.index(name)][d]}
        return frozenset(self.origins.keys() - held)

    @property
    def walked(self) -> tuple[tuple[str, int, int], ...]:
        """Dimensions of inputs along which each lane walks a number of places that is the graph's:
        the input's name, the dimension, its size."""
        return tuple(
            (name, d, tensor.shape[d])
            for name, dims, tensor in zip(
                self.input_names, self.region.input_dims, self.region.inputs, strict=False
            )
            for d, axes in enumerate(dims)
            if self.plan.serial & {*axes}
        )

    @property
    def region(self) -> Region:
        return self.plan.region

    @property
    def functions(self) -> tuple[TileFunction, ...]:
        """Tile function of each kernel."""
        return tuple(kernel.function for kernel in self.kernels)

    @property
    def behind(self) -> int:
        """How far lanes and programs may be counted on behind the last element."""
        return behind(self.plan.steps)

    @property
    def counted(self) -> list[str]:
        """To what is counted that no tensor reaches, where it hangs on sizes."""
        texts: dict[str, None] = {}
        for dims, places in counted(self.plan.steps, self.expressed):
            known, rest = factors(tuple(axis for dim in dims for axis in dim), places, self.extents)
            texts[product([*(self.sizes[axis] for axis in known), str(rest)])] = None
        return [text for text in texts if not text.isdigit()]

    @property
    def given(self) -> tuple[str, ...]:
        """Everything that the file is given, by name."""
        return (*self.input_names, *self.numbers)

    @property
    def random(self) -> bool:
        """Does it draw random numbers? Its last two inputs are then seed and offset."""
        return bool(self.expressed.draws)

    @property
    def hints(self) -> dict[int, int]:
        """Every axis at the graph's size, those along which kernels share work too."""
        return {a: n for kernel in self.kernels for a, n in kernel.step.sizes.items()}

    @property
    def extents(self) -> dict[int, int]:
        """Every axis that has a name or a number in the launcher, at the graph's size."""
        return {a: n for a, n in (self.region.sizes | self.hints).items() if a in self.sizes}

    def inputs_of(self, kernel: JitFunction) -> Iterator[Access]:
        """The loads that read an input of the file, not what another kernel left."""
        return (load for load in kernel.step.loads if load.name.startswith("in"))

    @property
    def unread(self) -> dict[str, Access]:
        """Inputs of which the kernels need no element, by name: their size or layout may matter.
        Dimensions over axes that the kernels do not have keep their sizes."""
        region = self.region
        read = {load.name for kernel in self.kernels for load in kernel.step.loads}

        def known(dims: Dims) -> Dims:
            return tuple(dim if set(dim) <= region.sizes.keys() else () for dim in dims)

        return {
            name: laid_over(f"in{i}", tensor, known(dims), region.sizes)
            for i, (name, tensor, dims) in enumerate(
                zip(self.input_names, region.inputs, region.input_dims, strict=True)
            )
            if f"in{i}" not in read
        }

    @cached_property
    def indexed(self) -> frozenset[tuple[str, int]]:
        """Dimensions of inputs that only data indexes; none in a file that draws random numbers."""
        return frozenset() if self.random else only_indexed(self.region)

    @property
    def reaches(self) -> list[tuple[str, int, str]]:
        """Dimensions of inputs that are indexed by places along other axes (`table[arange(n)]`), by
        the input's name, with how many places are read as the launcher writes it: where there are
        fewer, eager raises. None where both are numbers."""
        region, found = self.region, dict[tuple[str, int, str], None]()
        for expr in (region.exprs[number] for number in region.all("load")):
            if expr.guarded:  # read where the place is there
                continue
            name = self.input_names[expr.input]
            for d, (index, dim) in enumerate(
                zip(expr.indices, region.input_dims[expr.input], strict=True)
            ):
                axes, behind = _places(region, index)
                if axes and axes != dim and all(axis in self.sizes for axis in axes):
                    texts = [product([self.sizes[axis] for axis in axes]), str(behind)]
                    count = " + ".join(texts[: 1 + bool(behind)])
                    free = (region.input_names[expr.input], d) in self.indexed
                    if free or not texts[0].isdigit():
                        found[name, d, count] = None
        return [*found]

    @property
    def stores(self) -> list[tuple[str, Access]]:
        """Every tensor that a kernel writes, by its name, in the order of the launches."""
        return [(k.named(access), access) for k in self.kernels for access in k.step.stores]


def _places(region: Region, number: int) -> tuple[AxisList, int]:
    """Axes along which an index counts places, with the number that it begins at; no axes where it
    is made otherwise."""
    expr = region.exprs[number]
    match expr.op, [region.exprs[arg] for arg in expr.args]:
        case "place", _:
            return expr.axes, 0
        case "cast", _:
            return _places(region, expr.args[0])
        case "add", [_, const] if const.op == "const" and const.literal.isdigit():
            axes, behind = _places(region, expr.args[0])
            return axes, behind + int(const.literal)
        case _:
            return (), 0


def fixed_axes(plan: Plan) -> frozenset[int]:
    """Axes of which the kernels serve the graph's size alone."""
    return plan.region.pinned | plan.serial


def origins(region: Region, fixed: Collection[int]) -> dict[int, tuple[int, int]]:
    """Axes that are a whole dimension of some input, where their size can be read off, but for the
    fixed ones: the input's number and the dimension."""
    used = {int(load.name.removeprefix("in")) for load in accesses(region)[0]}
    found: dict[int, tuple[int, int]] = {}
    for number in sorted(used):
        for d, dim in enumerate(region.input_dims[number]):
            if len(dim) == 1 and dim[0] not in fixed and dim[0] in region.sizes:
                found.setdefault(dim[0], (number, d))
    return found


def only_indexed(region: Region) -> frozenset[tuple[str, int]]:
    """Dimensions of inputs, by name, that only data indexes: the kernels do not need their sizes.
    None that lines up with a dimension of an input that is read otherwise."""
    known: dict[tuple[str, int], bool] = {}
    for number in region.all("load"):
        expr = region.exprs[number]
        for d, index in enumerate(expr.indices):
            key = (region.input_names[expr.input], d)
            known[key] = known.get(key, True) and region.exprs[index].op in ("load", "cast")
    dims = {
        (name, d): frozenset(axes)
        for name, tensor_dims in zip(region.input_names, region.input_dims, strict=True)
        for d, axes in enumerate(tensor_dims)
    }
    others = [axes for key, axes in dims.items() if not known.get(key)]
    needed = frozenset[int]().union(*others)
    return frozenset(
        key for key, only_data in known.items() if only_data and not dims[key] & needed
    )


def factors(dim: AxisList, size: int, extents: Mapping[int, int]) -> tuple[AxisList, int]:
    """A dimension as the axes of it that are known, by their extents, and the places of the rest,
    which are always as many."""
    known = tuple(axis for axis in dim if axis in extents)
    places = prod(extents[axis] for axis in known)
    return known, size // places if places else 1


def product(texts: Sequence[str]) -> str:
    """A product, literals folded."""
    literal = prod(int(t) for t in texts if t.isdigit())
    named = [t for t in texts if not t.isdigit()]
    return " * ".join(named + ([str(literal)] if literal != 1 or not named else []))


def extent(file: KernelFile, axes: Iterable[int]) -> str:
    """The places along some axes, as the launcher writes it."""
    return product([file.sizes[axis] for axis in axes])


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions from the largest step to the smallest."""
    return sorted(range(len(tensor.shape)), key=lambda d: (-tensor.stride[d], d))


def dense(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape without gaps, its dimensions in the order of another's."""
    stride, step = [0] * len(shape), 1
    for d in reversed(memory_order(tensor)):
        stride[d] = step if tensor.stride[d] else 0
        step *= shape[d]
    return replace(tensor, shape=shape, stride=tuple(stride))


def behind(steps: Sequence[Step]) -> int:
    """Elements that a block, or a part of a row, may have behind the last one."""
    return max(MOST_LANES, *(step.part for step in steps))


def counted(steps: Sequence[Step], expressed: Expressed) -> list[tuple[Dims, int]]:
    """What programs, lanes and random numbers are counted along, where no tensor of the kernels
    lies over all of that without a gap and so reaches as far: dimensions, and their places at the
    graph's sizes."""
    everything = [access for step in steps for access in (*step.loads, *step.stores)]
    dense = [a for a in everything if a.tensor.extent == a.tensor.numel and not a.pulled]
    found: list[tuple[Dims, int]] = []
    for step in steps:
        for groups in (step.outer, step.inner):
            found.append((tuple(group.axes for group in groups), prod(g.size for g in groups)))
    found += [(expressed.dims[Ref(n)], tensor.numel) for n, (_, tensor) in expressed.draws.items()]
    return [
        (dims, places)
        for dims, places in dict.fromkeys(found)
        if not any(a.strides.keys() >= {axis for dim in dims for axis in dim} for a in dense)
    ]


def far(steps: Sequence[Step], expressed: Expressed) -> bool:
    """At the graph's sizes, is any offset beyond 32 bits, or anything that is counted?"""
    tensors = [access.tensor for step in steps for access in (*step.loads, *step.stores)]
    reached = [tensor.extent - 1 for tensor in tensors]
    reached += [places for _, places in counted(steps, expressed)]
    return max(reached) > INT32_MAX - behind(steps)
