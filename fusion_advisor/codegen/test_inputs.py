"""Inputs of several sizes that an emitted file is checked with, and signatures that it is
compiled with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from math import prod

from fusion_advisor.codegen.element_requests import ElementRequests
from fusion_advisor.codegen.kernel_file import (
    INT32_MAX,
    JitFunction,
    KernelFile,
    dense,
    factors,
    memory_order,
)
from fusion_advisor.codegen.spelling import TRITON_DTYPES
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case, Kernel, Launch
from fusion_advisor.region.index_range import data_below, never
from fusion_advisor.region.random import STATE
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Rulebook, Verify
from fusion_advisor.schedules.base import (
    WORD_BYTES,
    Step,
    by_storage,
    by_tensor,
    loaded_bytes,
    words,
)
from fusion_advisor.schedules.layout import Access, gaps, reach, spanned

FULL_SIZE = "the graph's sizes"
"""Name of the case that is as large as the graph."""
ODD_SIZES = "odd sizes"
"""Name of the case with no size that fits a kernel's tiles."""
SQUARE = "a square"
"""Name of the case with as many rows as there are elements in each."""


_ROWS, _SIDE, _WALKING = 7, 4, 2
"""Rows that an odd case has at least, the side of a square one, and the programs where each is to
walk to a second tile of rows, of which one has a third. An interpreter takes as long for a program
of few elements as for one of many."""


_COSTLY_S = 10.0
"""Seconds that one draw of `costly_elements` takes the interpreter, as the rule's source says."""


_HELD_ELEMENTS = 1 << 27
"""Elements between the first and the last of all inputs that a check may hold: a GiB in float64, of
which it has several copies."""


def at_full_size(kernel: Kernel) -> Case:
    """The inputs at the graph's own sizes, under whatever name those are checked."""
    return next((c for c in kernel.cases if c.name == FULL_SIZE), kernel.cases[0])


def at_graph_size(file: KernelFile) -> Case:
    """The graph's own inputs, without what the plan moves for them."""
    sizes, most = file.region.sizes, _largest(file)
    sizes = {**sizes, **_parts(file, sizes)}
    return _inputs(file, FULL_SIZE, sizes, _laid_out(file, sizes, most, apart=False))


def _largest(file: KernelFile) -> int:
    """The size of the longest axis."""
    return max(file.hints.values(), default=1)


def at_odd_sizes(made: Sequence[Case]) -> Case:
    """Of the cases that an interpreter can run, the one that shows most."""
    return next((case for case in made if case.name == ODD_SIZES), made[0])


def launches(file: KernelFile) -> tuple[Launch, ...]:
    """Every kernel as a device compiles it for the graph's sizes."""
    return tuple(map(_launch, file.kernels))


def _launch(kernel: JitFunction) -> Launch:
    """The kernel as the device will compile it for the graph's sizes."""
    step, values = kernel.step, _values(kernel)
    signature = [
        (name, f"*{TRITON_DTYPES[access.tensor.dtype]}") for name, access in kernel.pointers.items()
    ]
    if step.phases:
        signature.append(("workspace_ptr", "*i64"))
    signature += [(name, "i32" if v <= INT32_MAX else "i64") for name, v in values.items()]
    signature += [(name, "fp32") for name in kernel.body.numbers]
    signature += [(constant.name, "constexpr") for constant in kernel.body.constants]
    pointers = [name for name, kind in signature if kind.startswith("*")]
    return Launch(
        jit_name=kernel.name,
        signature=tuple(signature),
        constants=tuple((constant.name, constant.value) for constant in kernel.body.constants),
        num_warps=step.warps,
        num_stages=step.stages,
        divisible=(*pointers, *(n for n, v in values.items() if v % 16 == 0)),
    )


def _values(kernel: JitFunction) -> dict[str, int]:
    """The run-time numbers of a function at the graph's sizes."""
    sizes, body = kernel.step.sizes, kernel.body
    values = {name: prod(sizes[a] for a in axes) for name, axes in body.sizes.items()}
    strides = {
        name: access.tensor.stride[along] if isinstance(along, int) else along.step(access)
        for name, (access, along) in body.strides.items()
    }
    return values | strides


def cases(file: KernelFile, rulebook: Rulebook, full_size: bool) -> tuple[Case, ...]:
    """Sizes to check, on both sides of what a kernel's tiles divide: rows as long as the graph's
    with few of them; one row and one element more than tiles and parts hold; one row alone; as many
    rows as elements in each, a power of two; and what takes the other way of a kernel that has two.
    The graph's own on request."""
    numbers = rulebook.verify
    hints = file.region.sizes
    free = set(file.free)
    first = file.plan.steps[0]
    inner = set(spanned(first.inner))
    outer_free = [a for g in reversed(first.outer) for a in reversed(g.axes) if a in free]
    fixed_row = prod(hints[a] for a in inner)
    fixed_rows = prod(hints[a] for g in first.outer for a in g.axes if a not in free)
    affordable = numbers.interpreted_elements.count // max(fixed_row * fixed_rows, 1)
    several_programs = -(-(2 * first.rows + 1) // fixed_rows)
    rows = max(several_programs, min(numbers.interpreted_rows.count, affordable))
    if not first.inner:
        rows = 2 * first.block + 77
    row_free = [a for a in spanned(first.inner) if a in free]
    unit = first.part or first.block
    fixed = fixed_row // prod(hints[a] for a in row_free)
    most = 4 * numbers.interpreted_elements.count
    divided = first.chunked or first.part > 0
    long = divided and fixed_row * rows > most
    row = _shortened(row_free, hints, (2 * unit + 77) // fixed) if long else {}
    odd = _one_more(row_free, hints, unit // fixed) if divided else {}
    chosen = {
        "graph's rows": {**hints, **_shrunk(outer_free, hints, rows), **row},
        ODD_SIZES: {
            **hints,
            **_shrunk(outer_free, hints, max(rows - 1, _ROWS)),
            **(odd or {a: _odd(hints[a]) for a in row_free}),
        },
        "one row": {**hints, **dict.fromkeys(outer_free, 1), **row},
    }
    if alike := _alike(outer_free, row_free):
        chosen[SQUARE] = {**chosen[ODD_SIZES], **dict.fromkeys(outer_free, 2), **alike}
    for step in file.plan.steps[1:]:  # a walk over the parts, of which few rows have so many
        if step.chunked and first.parts and set(spanned(step.inner)) == set(first.parts.axes):
            many = _one_more(row_free, hints, step.block * unit // fixed)
            chosen["chunks of parts"] = {**hints, **dict.fromkeys(outer_free, 1), **many}
    if single := _single(file, free, chosen.values()):
        short = {axis: _odd(hints[axis]) for axis in row_free}
        chosen["two programs"] = {**chosen[ODD_SIZES], **short, **single}
    if full_size:
        chosen[FULL_SIZE] = dict(hints)
    seen: dict[tuple[tuple[int, int], ...], str] = {}
    for name, sizes in chosen.items():
        seen.setdefault(tuple(sorted(sizes.items())), name)
    found = [_case(file, name, dict(sizes), numbers) for sizes, name in seen.items()]
    two_tiles_each = 2 * _WALKING * first.rows // fixed_rows
    if first.most and (walked := _one_more(outer_free, hints, two_tiles_each)):
        narrow = _fewer(file)
        case = _case(narrow, "programs that walk", {**chosen[ODD_SIZES], **walked}, numbers)
        found.insert(len(found) - full_size, replace(case, programs=_WALKING))
    return tuple(found)


def _fewer(file: KernelFile) -> KernelFile:
    """The file with so few programs that each walks to a second tile of rows."""

    def limited(step: Step) -> Step:
        return replace(step, most=min(step.most, _WALKING))

    kernels = tuple(replace(kernel, step=limited(kernel.step)) for kernel in file.kernels)
    plan = replace(file.plan, steps=tuple(map(limited, file.plan.steps)))
    return replace(file, kernels=kernels, plan=plan)


def _single(file: KernelFile, free: Set[int], made: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sizes at which each of the later launches has two programs where it has one in every case
    that there is; none where each has several."""
    found: dict[int, int] = {}
    cases = [*made]
    for step in file.plan.steps[1:]:
        outer = [axis for axis in spanned(step.outer) if axis in file.region.sizes]
        most = max(prod(sizes[axis] for axis in outer) for sizes in cases)
        height = step.tiles.per
        if most <= height < prod(file.hints[axis] for axis in outer):
            found |= _shrunk(
                [axis for axis in reversed(outer) if axis in free], file.hints, height + 1
            )
    return found


def _shrunk(axes: Sequence[int], hints: Mapping[int, int], budget: int) -> dict[int, int]:
    """Sizes whose product stays near the budget, the inner axes served first; odd where cut.

    No axis is cut below two: an axis of one hides where its elements are.
    """
    found: dict[int, int] = {}
    left = budget
    for place, axis in enumerate(axes):
        share = left if place == len(axes) - 1 else round(left**0.5)
        size = min(hints[axis], max(2, share))
        if 2 < size < hints[axis] and size % 2 == 0:
            size -= 1
        found[axis] = size
        left = max(1, left // size)
    for axis in axes:  # what outer axes had no use for
        found[axis] = min(hints[axis], found[axis] * max(1, budget // prod(found.values())))
    return found


def _shortened(axes: Sequence[int], hints: Mapping[int, int], wanted: int) -> dict[int, int]:
    """Sizes of a row's axes with about `wanted` elements, the outermost cut first."""
    found = {axis: hints[axis] for axis in axes}
    for axis in axes:
        others = prod(found.values()) // max(found[axis], 1)
        found[axis] = min(found[axis], max(1, -(-wanted // max(others, 1))))
    return found


def _one_more(axes: Sequence[int], hints: Mapping[int, int], wanted: int) -> dict[int, int]:
    """Sizes of a row's axes with one element more than is wanted, or as few more as there can be,
    whether or not the graph's rows are as long: the last part then has one element."""
    found = _shortened(axes, hints, wanted + 1)
    if axes and prod(found.values()) <= wanted:
        first, *rest = axes
        found[first] = wanted // prod(found[axis] for axis in rest) + 1
    return found


def _odd(size: int) -> int:
    """A smaller size that leaves a tail of one in lanes that are a power of two."""
    return 1 + 2 ** min((size - 2).bit_length() - 1, 6) if size > 2 else 1


def _alike(outer: Sequence[int], inner: Sequence[int]) -> dict[int, int]:
    """Sizes at which two axes are as long, one of the rows and one along them; where only one kind
    is free, the last two of it. None where there is only one."""
    both = (outer[0], inner[-1]) if outer and inner else (outer or inner)[:2]
    return dict.fromkeys(both, _SIDE) if len(both) == 2 else {}


def _case(file: KernelFile, name: str, sizes: Mapping[int, int], numbers: Verify) -> Case:
    most = _largest(file) if name == FULL_SIZE else numbers.indexed_places.count
    sizes = {**sizes, **_parts(file, sizes)}
    elements = prod(sizes.values())
    loaded: int | None = 0
    stored = loads_asked = stores_asked = 0
    tensors = _laid_out(file, sizes, most, apart=name in (ODD_SIZES, SQUARE))
    for kernel in file.kernels:
        step = kernel.step
        asked = ElementRequests(step, sizes)
        back = asked.read_back()
        again = sum(
            prod(sizes[a] for a in output.axes) * output.tensor.itemsize
            for output in step.region.outputs
            if output.value in back
        )
        for number, (read, written, word_bytes) in enumerate(_launched(kernel, sizes)):
            loads_asked += asked.about(number) + sum(back.values())
            loads_asked += asked.by(read) + asked.parts * word_bytes[0] // WORD_BYTES
            stores_asked += asked.left(written) + word_bytes[1] // WORD_BYTES
            for loads in by_storage(read):
                own = {load.name: tensors[load.name] for load in loads}
                touched = loaded_bytes(step.region, loads, own, sizes)
                loaded = None if loaded is None or touched is None else loaded + touched
            loaded = None if loaded is None else loaded + word_bytes[0] + again
            stored += word_bytes[1] + sum(
                prod(sizes[a] for dim in access.dims for a in dim) * access.tensor.itemsize
                for access in written
            )
    inputs = _inputs(file, name, sizes, tensors)
    held = sum(tensor.extent for tensor in inputs.inputs)
    longest = numbers.costly_elements.count * numbers.timeout.base / _COSTLY_S
    return replace(
        inputs,
        loaded_bytes=loaded,
        stored_bytes=stored,
        loads=loads_asked,
        stores=stores_asked,
        costly=elements > numbers.costly_elements.count,
        endless=elements > longest or held > _HELD_ELEMENTS,
        summed=_summed(file.region, sizes),
    )


def _summed(region: Region, sizes: Mapping[int, int]) -> int:
    """The elements of the largest sum, of sums of sums together."""
    behind: dict[int, int] = {}
    for number in region.live:
        expr = region.exprs[number]
        most = max((behind.get(arg, 1) for arg in expr.args), default=1)
        if expr.op in ("reduce", "scan") and expr.monoid == "sum":
            most *= prod(sizes[axis] for axis in expr.axes)
        behind[number] = most
    return max(behind.values(), default=1)


def _inputs(
    file: KernelFile, name: str, sizes: Mapping[int, int], read: Mapping[str, Tensor]
) -> Case:
    """The inputs at some sizes, of which the kernels `read` some, and the values that integers
    among them may have."""
    tensors: dict[str, Tensor] = {}
    for number, given in enumerate(file.input_names):
        if f"in{number}" in read:
            tensors[given] = read[f"in{number}"]
        else:
            access = file.unread[given]
            pairs = zip(access.dims, access.tensor.shape, strict=True)
            shape = tuple(prod(sizes[axis] for axis in dim) if dim else n for dim, n in pairs)
            tensors[given] = dense(access.tensor, shape)
    inputs = tuple(tensors[given] for given in file.input_names)
    ranges = [_range(file, number, tensors, sizes) for number in range(len(inputs))]
    rare = tuple(_compared(file, number, sizes, ranges[number]) for number in range(len(inputs)))
    numbers = tuple(number.given for number in file.expressed.numbers)
    limits = tuple(_in_common(inputs, ranges))
    return Case(name=name, inputs=inputs, ranges=limits, rare=rare, numbers=numbers)


def _in_common(
    inputs: Sequence[Tensor], ranges: Sequence[tuple[int, int] | None]
) -> Iterator[tuple[int, int] | None]:
    """The values of each tensor, that may have elements in common with others of its storage."""
    for tensor, own in zip(inputs, ranges, strict=True):
        alike = [
            values
            for other, values in zip(inputs, ranges, strict=True)
            if values and tensor.storage >= 0
            if (other.storage, other.dtype) == (tensor.storage, tensor.dtype)
        ]
        yield (max(v[0] for v in alike), min(v[1] for v in alike)) if alike else own


def _laid_out(
    file: KernelFile, sizes: Mapping[int, int], most: int, *, apart: bool
) -> dict[str, Tensor]:
    """Every tensor that a kernel reads at some sizes, by the name of its accesses: those of one
    storage where they lie in it; `apart`, rows of no two others are as far from each other."""
    tensors: dict[str, Tensor] = {}
    every = [load for kernel in file.kernels for load in kernel.step.loads]
    shared = [{load.name for load in views} for views in by_storage(every)]
    shared = [names for names in shared if len(names) > 1]
    for kernel in file.kernels:
        for place, (name, loads) in enumerate(by_tensor(kernel.step.loads).items()):
            alone = apart and not any(name in names for names in shared)
            tensor = _resized(file, kernel, loads, sizes, most, place if alone else 0)
            if tensors.setdefault(name, tensor) != tensor:  # kernels that ask for different
                tensors[name] = _following(loads[0].tensor, tensor.shape)
    of_graph = {f"in{n}": tensor for n, tensor in enumerate(file.region.inputs)}
    for names in shared:
        first = min(of_graph[name].offset for name in names)
        for name in names:
            offset = _moved(of_graph[name], tensors[name], of_graph[name].offset - first)
            storage = of_graph[name].storage
            tensors[name] = replace(tensors[name], storage=storage, offset=offset)
    return tensors


def _moved(graph: Tensor, tensor: Tensor, offset: int) -> int:
    """An offset of the graph's as so many steps along each dimension, of a tensor at other sizes.
    What begins behind a dimension's end does so where that is shorter, too."""
    found = 0
    for d in memory_order(graph):
        if graph.stride[d] and graph.shape[d] > 1:
            steps, offset = divmod(offset, graph.stride[d])
            if tensor.shape[d] < graph.shape[d]:
                steps = min(steps, tensor.shape[d])
            found += steps * tensor.stride[d]
    return found + offset


def _launched(
    kernel: JitFunction, sizes: Mapping[int, int]
) -> Iterator[tuple[list[Access], list[Access], tuple[int, int]]]:
    """What each launch of a kernel reads, what it writes, and the bytes of words that it takes and
    leaves. Programs of the interpreter cannot wait: there a cooperative kernel is launched once for
    each exchange and once more."""
    step = kernel.step
    if not step.phases:
        yield list(step.loads), list(step.stores), (0, 0)
        return
    base = dict(zip(step.region.all("load"), step.loads, strict=True))
    shared = (*step.outer, step.parts) if step.parts else step.outer
    unit = WORD_BYTES * prod(sizes[a] for a in spanned(shared))
    results = {store.name for store in step.stores}
    for last, exchange in enumerate((*step.exchanges, None)):
        end = len(step.phases) if exchange is None else step.phases.index(exchange) + 1
        run = step.phases[:end]
        asked = {number for phase in run for number in phase.region.all("load")} | step.ahead
        taken = sum(words(each) for each in step.exchanges[:last])
        left = words(exchange) if exchange else 0
        yield (
            [load for number, load in base.items() if number in asked],
            [store for phase in run for store in phase.stores if store.name in results],
            (unit * taken, unit * left),
        )


def _parts(file: KernelFile, sizes: Mapping[int, int]) -> dict[int, int]:
    """The number of parts that rows of these sizes have."""
    found: dict[int, int] = {}
    for step in (kernel.step for kernel in file.kernels):
        if step.parts:
            (axis,) = step.parts.axes
            found[axis] = prod(programs.at(sizes) for programs in step.numbered)
    return found


def _range(
    file: KernelFile, number: int, tensors: Mapping[str, Tensor], sizes: Mapping[int, int]
) -> tuple[int, int] | None:
    """The values of an integer input: any of a seed; of one that stands in an index such that the
    index is a place of what it indexes."""
    region = file.region
    if file.random and number >= len(file.input_names) - len(STATE):
        return -(2**63), 2**63 - 1
    found: list[int] = []
    for load in region.all("load"):
        expr = region.exprs[load]
        shape = tensors[file.input_names[expr.input]].shape
        for d, index in enumerate(expr.indices):
            if number in _data_behind(region, index):
                # Places of several dimensions may be one number, of which each takes a part.
                tried = (shape[d], prod(shape))
                below = (data_below(region.exprs, index, shape[d], sizes, n) for n in tried)
                found.append(max(n or 1 for n in below))
    if not found and number in region.bounds:  # what it indexes is not needed by the kernels
        axes, size = region.bounds[number]
        known = all(axis in sizes for axis in axes)
        found.append(prod(sizes[axis] for axis in axes) if known else size)
    return (0, min(found)) if found else None


def _compared(
    file: KernelFile, number: int, sizes: Mapping[int, int], bounds: tuple[int, int] | None
) -> tuple[int, ...]:
    """Constants that the integers of an input are compared with. One that is no index of what they
    index is left out, unless nothing is loaded by it: the class that a loss ignores, say."""
    region = file.region
    exprs = region.exprs

    def never_holds(guard: int | None, constant: int) -> bool:
        if guard is None or not _data_behind(region, guard) <= {number}:
            return False
        return never(exprs, guard, constant, sizes)

    found: dict[int, None] = {}
    for at in region.live:
        if exprs[at].op in ("eq", "ne"):
            for value, other in (exprs[at].args, exprs[at].args[::-1]):
                constant = exprs[other].number
                if constant is not None and _data_behind(region, value) == {number}:
                    found[constant] = None
    guards = [
        exprs[load].guard
        for load in region.all("load")
        if any(number in _data_behind(region, index) for index in exprs[load].indices)
    ]
    return tuple(
        constant
        for constant in found
        if bounds is None
        or bounds[0] <= constant < bounds[1]
        or all(never_holds(guard, constant) for guard in guards)
    )


def _data_behind(region: Region, value: int) -> set[int]:
    """Numbers of the inputs of which a value needs elements."""
    behind = (region.exprs[number] for number in reach(region, value))
    return {expr.input for expr in behind if expr.op == "load"}


def _resized(
    file: KernelFile,
    kernel: JitFunction,
    loads: Sequence[Access],
    sizes: Mapping[int, int],
    most: int,
    further: int,
) -> Tensor:
    """A tensor at other sizes, laid out as the launcher expects: free strides stay, unless rows
    would lie in each other, but the longest is so many elements further. A dimension that only data
    indexes is cut short unless the sizes are the graph's."""
    access = min(loads, key=lambda load: len(load.pulled))
    region = kernel.step.region
    dims = region.dims_of(access.name)
    steps = gaps(access, kernel.step.groups)
    stride_of: dict[int, int] = {}
    free = [g.step(access) for g in kernel.step.groups if steps.get(g.name, ()) is None]
    longest = max(free, default=0)
    taken, graph = 1, 1  # elements that what is nearer in memory spans, here and in the graph
    present = [group for group in kernel.step.groups if group.name in steps]
    for group in sorted(present, key=lambda group: group.step(access)):
        later, step = steps[group.name], group.step(access)
        alone = step >= graph
        graph += (group.size - 1) * step
        if later is not None:
            step = prod(sizes[a] for g in later for a in g.axes)
        else:
            step = max(step, taken) if alone else step
            step += further if group.step(access) == longest else 0
        taken += (prod(sizes[axis] for axis in group.axes) - 1) * step
        for axis in reversed(group.axes):
            stride_of[axis] = step
            step *= sizes[axis]
    shape: list[int] = []
    for d, (dim, size) in enumerate(zip(dims, access.tensor.shape, strict=True)):
        known, rest = factors(dim, size, file.extents)
        if not known and (access.name, d) in file.indexed:
            rest = min(size, most)
        shape.append(prod(sizes[axis] for axis in known) * rest)
    stride = tuple(
        stride_of.get(dim[-1], step) if dim and step else step
        for dim, step in zip(access.dims, access.tensor.stride, strict=True)
    )
    return Tensor(tuple(shape), stride, access.tensor.dtype)


def _following(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor at other sizes, whose dimensions follow each other in memory where they did."""
    stride = list(tensor.stride)
    order = [d for d in memory_order(tensor)[::-1] if tensor.shape[d] != 1]
    for inner, d in pairwise(order):
        if tensor.stride[d] == tensor.stride[inner] * tensor.shape[inner]:
            stride[d] = stride[inner] * shape[inner]
    return Tensor(shape, tuple(stride), tensor.dtype)
