"""The launcher of an emitted file: its checks, its allocations and its launches, as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import get_args

from fusion_advisor.codegen.kernel_file import (
    MOST_LANES,
    JitFunction,
    KernelFile,
    dense,
    extent,
    factors,
    memory_order,
    product,
)
from fusion_advisor.codegen.spelling import AS_IT_IS
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import PROGRAMS
from fusion_advisor.region.axes import Dims
from fusion_advisor.region.random import SHARES
from fusion_advisor.schedules.base import Step, words
from fusion_advisor.schedules.cooperative_body import HEAD
from fusion_advisor.schedules.launch import Extent, Rule
from fusion_advisor.schedules.layout import Access, Group, gaps, spanned
from fusion_advisor.shipped.files import HOST, RUNTIME, functions


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _shape(file: KernelFile, access: Access) -> str:
    return _tuple(
        [
            product([file.sizes[a] for a in dim]) if dim else str(size)
            for dim, size in zip(access.dims, access.tensor.shape, strict=True)
        ]
    )


def _strides(file: KernelFile, kernel: JitFunction, access: Access) -> str:
    """The strides that a kernel relies on; a free one is whatever the tensor has."""
    steps = gaps(access, kernel.step.groups)
    owner = {axis: group for group in kernel.step.groups for axis in group.axes}
    texts: list[str] = []
    for d, dim in enumerate(access.dims):
        free = _stride(file, kernel, access, d)
        if not dim or dim[-1] not in owner:
            literal = (d in access.pulled or dim) and access.tensor.stride[d] <= 1
            texts.append(str(access.tensor.stride[d]) if literal else free)
            continue
        axis = dim[-1]
        group = owner[axis]
        later = group.axes[group.axes.index(axis) + 1 :]
        within = [file.sizes[a] for a in later]
        if not access.step(axis):
            texts.append("0")
        elif steps[group.name] is None:
            free = _free_stride(file, kernel, access, group)
            texts.append(f"{free} * {product(within)}" if within else free)
        else:
            after = [file.sizes[a] for g in steps[group.name] or () for a in g.axes]
            texts.append(product([*within, *after]))
    return _tuple(texts)


def _stride(file: KernelFile, kernel: JitFunction, access: Access, d: int) -> str:
    """A tensor's stride along one dimension, as the launcher reads it."""
    name = kernel.named(access)
    return f"{file.strides[name]}[{d}]" if name in file.strides else f"{name}.stride({d})"


def _free_stride(file: KernelFile, kernel: JitFunction, access: Access, along: Group | int) -> str:
    """A run-time stride as the launcher reads it off the tensor."""
    if isinstance(along, int):
        return _stride(file, kernel, access, along)
    axis = along.axes[-1]
    d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
    later = [file.sizes[a] for a in dim[dim.index(axis) + 1 :]]
    text = _stride(file, kernel, access, d)
    return f"{text} * {product(later)}" if later else text


def _output_strides(file: KernelFile, access: Access) -> str:
    """Dense in the order of dimensions that eager gives the result."""
    order = memory_order(access.tensor)
    texts = [""] * len(order)
    for place, d in enumerate(order):
        inside = [file.sizes[a] for e in order[place + 1 :] for a in access.dims[e]]
        texts[d] = product(inside)
    return _tuple(texts)


def _takes(file: KernelFile, kernel: JitFunction, load: Access) -> str:
    """The check of one input that a kernel reads."""
    name, dtype = kernel.named(load), load.tensor.dtype
    shape, strides = _input_shape(file, load), _strides(file, kernel, load)
    return f'takes("{name}", {name}, torch.{dtype}, {shape}, {strides})'


def _input_shape(file: KernelFile, load: Access) -> str:
    """The shape of an input: run-time sizes where its dimensions are axes that the file knows."""
    return _tuple(_sizes(file, load.name, file.region.dims_of(load.name), load.tensor))


def _sizes(file: KernelFile, name: str, dims: Dims, tensor: Tensor) -> list[str]:
    """The size of each dimension: a run-time size where it is known, or where only data indexes."""
    given = dict(zip(file.region.input_names, file.input_names, strict=True)).get(name, name)
    texts: list[str] = []
    for d, (dim, size) in enumerate(zip(dims, tensor.shape, strict=True)):
        known, rest = factors(dim, size, file.extents)
        if not known and (name, d) in file.indexed:
            texts.append(f"ranked({given}.shape, {len(tensor.shape)})[{d}]")
        else:
            texts.append(product([*(file.sizes[axis] for axis in known), str(rest)]))
    return texts


def _takes_unread(file: KernelFile, name: str, given: Access) -> str:
    """The check of an input of which no element is read: its order of dimensions at most."""
    tensor, strides = given.tensor, f"{name}.stride()"
    whole = all(dim or n == 1 for dim, n in zip(given.dims, tensor.shape, strict=True))
    if whole and all(tensor.stride) and tensor == dense(tensor, tensor.shape):
        strides = _output_strides(file, given)
    return f'takes("{name}", {name}, torch.{tensor.dtype}, {_shape(file, given)}, {strides})'


def launcher(file: KernelFile, *, refuses: bool = False) -> str:
    """The function that the file is for: it checks its inputs, allocates the results and launches
    the kernels; what they do not serve goes to the eager reference, or is refused."""
    checks = [
        *(_takes(file, k, load) for k in file.kernels for load in file.inputs_of(k)),
        *(_takes_unread(file, name, given) for name, given in file.unread.items()),
    ]
    checks += [f'holds("{name}", {name}, {d}, {count})' for name, d, count in file.reaches]
    lines = [*dict.fromkeys(checks), f"not_empty({extent(file, sorted(file.plan.region.space))})"]
    for kernel in file.kernels:
        if kernel.step.parts:
            lines.append(_count_parts(file, kernel.step))
    for name, access in file.stores:
        shape, strides = _shape(file, access), _output_strides(file, access)
        dtype, beside = access.tensor.dtype, file.input_names[0]
        lines.append(f"{name} = empty({shape}, {strides}, torch.{dtype}, {beside})")
    lines.append(_far(file))
    for kernel in file.kernels:
        if kernel.step.phases:
            lines += _exchanged(file, kernel)
    lines.append(_launches(file))
    lines.append(f"return {', '.join(_done(file))}")
    lines = [
        *_read(file, "\n".join(lines)),
        *(f'held_to("{name}", {name}, {d}, {size})' for name, d, size in file.held),
        *lines,
    ]
    content = _RUNTIME_CALL.sub(rf"{HOST}.\1", "\n".join(f"    {line}" for line in lines))
    numbers = [f"{name}: float" for name in file.numbers]
    parameters = [*file.input_names, *numbers]
    if file.random:
        parameters = [*file.input_names[:-2], *(f"{name}=None" for name in file.input_names[-2:])]
    constants = "".join(
        f"{name} = {limit}  # at the most: each walks rows\n\n\n"
        for limit, name in limits(file).items()
    )
    decorator = f"@{HOST}.seeded\n" if file.random else ""
    decorator += "" if file.graded else f"@{HOST}.ungraded\n"
    instead = None if refuses else "reference"
    decorator += f"@{HOST}.launcher({instead}, results={len(file.output_names)})"
    return f"{constants}{decorator}\ndef {file.name}({', '.join(parameters)}):\n{content}"


_RUNTIME_CALL = re.compile(rf"(?<![\w.])({'|'.join(sorted(functions(RUNTIME)))})(?=\()")
"""Call of a function of the runtime: no name of a file is that of such a function."""


def _read(file: KernelFile, used: str) -> list[str]:
    """The sizes and strides of inputs that the launcher's text asks for, each tensor asked once."""
    lines: list[str] = []
    for name, tensor in zip(file.input_names, file.region.inputs, strict=False):
        rank = len(tensor.shape)
        sizes = {d: file.sizes[axis] for axis, (of, d) in file.origins.items() if of == name}
        if sizes:
            spelled = [sizes.get(d, "_") for d in range(rank)]
            lines.append(f"{', '.join(spelled)}{',' * (rank == 1)} = ranked({name}.shape, {rank})")
        if f"{file.strides[name]}[" in used:
            lines.append(f"{file.strides[name]} = ranked({name}.stride(), {rank})")
    return lines


def _far(file: KernelFile) -> str:
    """The line that asks how wide offsets have to be, of every tensor that a kernel takes. The
    results stand first: an operator's fake results are taken from there."""
    taken = (pointer.removesuffix("_ptr") for k in file.kernels for pointer in k.pointers)
    tensors = dict.fromkeys([*file.output_names, *taken])
    behind = [f"behind={file.behind}"] if file.behind != MOST_LANES else []
    return f"far = beyond_int32({', '.join([_tuple([*tensors]), *file.counted, *behind])})"


def _count_parts(file: KernelFile, step: Step) -> str:
    """How many programs share a row, or the rows."""
    counted = product([_counted(file, programs) for programs in step.numbered])
    return f"{_parts(file, step)} = {counted}"


def _counted(file: KernelFile, programs: Extent, named: Collection[str] = ()) -> str:
    """How many programs there are along some axes; `named`: constants that are asked by name."""
    text = extent(file, programs.axes)
    per = f'at["{programs.by}"]' if programs.by in named else str(programs.per)
    text = text if programs.per == 1 else f"cdiv({text}, {per})"
    return f"torch.sym_min({text}, {limits(file)[programs.most]})" if programs.most else text


def _grid(file: KernelFile, kernel: JitFunction) -> str:
    """Programs along each dimension: a function of the constants that they are counted by, which
    may be other ones at launch (`tuned_numbers.py`)."""
    step = kernel.step
    parts = {step.numbered: _parts(file, step)} if step.parts else {}
    named = {constant.name for constant in kernel.body.constants if not constant.rule}

    def text(dimension: tuple[Extent, ...]) -> str:
        each = (parts.get((one,)) or _counted(file, one, named) for one in dimension)
        return parts.get(dimension) or product([*each])

    found = _tuple([text(dimension) for dimension in step.grid])
    return f"lambda at: {found}" if "at[" in found else found


def limits(file: KernelFile) -> dict[int, str]:
    """Names of the constants that limit how many programs walk the rows, by the limit."""
    most = dict.fromkeys(kernel.step.most for kernel in file.kernels if kernel.step.most)
    return {limit: f"{PROGRAMS}{f'_{n}' if n else ''}" for n, limit in enumerate(most)}


def _launches(file: KernelFile) -> str:
    """The line with every launch, in order; what each did is kept."""
    calls: list[str] = []
    for kernel in file.kernels:
        call = _call(file, kernel)
        if kernel.step.phases:
            apart = ", ".join(str(n) for n in range(len(kernel.step.exchanges) + 1))
            call += f" for step in ((-1,) if together{_number(file, kernel)} else ({apart}))"
            call = f"*({call})" if len(file.kernels) > 1 else call
        calls.append(call)
    return f"steps = [{', '.join(calls)}]{AS_IT_IS}"


def _call(file: KernelFile, kernel: JitFunction) -> str:
    """One launch."""
    step = kernel.step
    constants = [f"{name}={text}" for name, text in _constants(file, kernel).items()]
    constants += [f"num_warps={step.warps}"]
    given, numbers = _tuple(_given(file, kernel)), _tuple(_numbers(file, kernel))
    return f"launch({', '.join([kernel.name, _grid(file, kernel), given, numbers, *constants])})"


def _numbers(file: KernelFile, kernel: JitFunction) -> list[str]:
    """The sizes, strides and given numbers that a kernel takes."""
    sizes = [extent(file, axes) for axes in kernel.body.sizes.values()]
    strides = kernel.body.strides.values()
    numbers = kernel.body.numbers.values()
    given = [_GIVEN[each.to].format(file.numbers[int(each.literal)]) for each in numbers]
    free = [_free_stride(file, kernel, access, along) for access, along in strides]
    return [*sizes, *free, *given]


_GIVEN = {"": "float({0})", "inverse": "inverse({0})"}
"""Given numbers as a launcher hands them on: an int would be another argument to the compiler."""


def _constants(file: KernelFile, kernel: JitFunction) -> dict[str, str]:
    """The constants of its tile, from the sizes at hand."""
    return {
        constant.name: _RULES[constant.rule].format(
            extent(file, constant.axes), constant.value, kernel.name, constant.name
        )
        for constant in kernel.body.constants
    }


_RULES: dict[Rule, str] = {
    "": "{1}",
    **{name: f"{name}({{0}})" for name in get_args(Rule) if name in functions(RUNTIME)},
    "settled": 'settled({2}, "{3}", {0})',
    "in_runs": f"{{0}} % {max(SHARES.values())} == 0",
    "far": "far",
    "step": "step",
}
"""Constants as the launcher writes them, of the places along their axes and of their value."""


def _given(file: KernelFile, kernel: JitFunction) -> list[str]:
    """The tensors that a kernel takes."""
    workspace = [f"workspace{_number(file, kernel)}"] if kernel.step.phases else []
    return [*(pointer.removesuffix("_ptr") for pointer in kernel.pointers), *workspace]


def _number(file: KernelFile, kernel: JitFunction) -> str:
    """What tells the workspace of one kernel from another's, where there are two."""
    waiting = [other.name for other in file.kernels if other.step.phases]
    return f"_{waiting.index(kernel.name)}" if len(waiting) > 1 else ""


def _done(file: KernelFile) -> list[str]:
    """What a launcher returns: the results, the launches, and where there are any, what kernels
    leave for each other and what is zeroed for them."""
    scratch = [name for name, _ in file.stores if name not in file.output_names]
    zeroed = [f"workspace{_number(file, k)}" for k in file.kernels if k.step.phases]
    more = [scratch, zeroed] if zeroed else [scratch] if scratch else []
    return [_tuple(file.output_names), "steps", *map(_tuple, more)]


def _parts(file: KernelFile, step: Step) -> str:
    """How many programs share a row, or the rows, by its name; "" where none do."""
    return file.sizes[step.parts.axes[0]] if step.parts else ""


def _exchanged(file: KernelFile, kernel: JitFunction) -> list[str]:
    """What programs that wait for each other leave for each other, and whether they may: in one
    launch, or in one for each exchange and one more.

    The words of the exchange are new and zero for each call: two streams share none, and a graph
    that is replayed zeroes them again, since the fill is captured with the launch.
    """
    step, device = kernel.step, f"{file.input_names[0]}.device"
    parts = _parts(file, step)
    count = sum(words(phase) for phase in step.exchanges)
    exchanged = product([extent(file, spanned(step.outer)), parts, str(count)])
    number = _number(file, kernel)
    return [
        "# Words of this call alone, 0 until they are left; a captured graph zeroes them anew.",
        f"workspace{number} = torch.zeros({HEAD} + {exchanged}, dtype=torch.int64,"
        f" device={device})",
        "# Programs wait where there surely is room for all of a row, and for other such kernels;",
        "# elsewhere one launch leaves the words for the next.",
        f"together{number} = {step.waiting} * {parts} <= resident({device}, {step.warps})",
    ]
