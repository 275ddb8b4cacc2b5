"""Stage: an accepted group as a file of Triton that stands alone, with the cases to check it on.

The file holds the kernel, a launcher that checks what it is given, the eager reference it falls
back to, and above them what it replaces and how it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusion_advisor.dataflow import Dataflow
from fusion_advisor.decide import Decision
from fusion_advisor.express import Expressed
from fusion_advisor.kernels import Case, Kernel, Launch
from fusion_advisor.primitives import HELPERS
from fusion_advisor.records import Ref, Tensor
from fusion_advisor.reference import reference_lines
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.schedules.base import Plan
from fusion_advisor.schedules.layout import Access, Group, gaps
from fusion_advisor.schedules.layout import access as laid_over
from fusion_advisor.schedules.text import TRITON_DTYPES, Body, Names, fitted

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class _File:
    """What the parts of one file share."""

    name: str
    plan: Plan
    expressed: Expressed
    body: Body
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    sizes: Mapping[int, str]
    """Every axis by its name in the launcher, or by its literal size."""
    origins: Mapping[int, tuple[str, int]]
    """Axes that are whole dimensions of an input: the input's name and the dimension."""

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*self.plan.outer, *self.plan.inner)

    @property
    def unread(self) -> dict[str, Access | Tensor]:
        """Inputs of which the kernel needs no element, by name: their size or layout may matter.
        A Tensor when it lies over axes that the kernel does not have."""
        region = self.plan.region
        read = {access.name for access in self.plan.loads}
        return {
            name: laid_over(f"in{i}", tensor, dims, region.sizes)
            if {axis for dim in dims for axis in dim} <= region.sizes.keys()
            else tensor
            for i, (name, tensor, dims) in enumerate(
                zip(self.input_names, region.inputs, region.input_dims, strict=True)
            )
            if f"in{i}" not in read
        }

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (*self.plan.loads, *self.plan.stores)

    def named(self, access: Access) -> str:
        return self.body.tensors[access.name]


def emit(
    flow: Dataflow,
    decision: Decision,
    name: str,
    rulebook: Rulebook,
    *,
    regenerate: str = "",
    full_size: bool = False,
) -> Kernel:
    """Write the kernel of an accepted group.

    `name` is a Python identifier, `regenerate` the command that makes the file again. With
    `full_size` the graph's own sizes are among the cases: for a GPU.
    """
    subject = decision.subject
    plan, expressed = subject.plan, subject.expressed
    if plan is None or expressed is None:
        raise ValueError(f"{name}: a group without a plan cannot be emitted")
    file = _prepare(name, plan, expressed)
    lines = file.body.render()
    code = "\n\n\n".join(
        (
            *(HELPERS[helper].rstrip() for helper in file.body.helpers),
            _kernel(file, lines),
            _launcher(file),
            _reference(file, flow),
            *(() if _wide(file) else (_REACH.strip(),)),
            _SUPPORT.format(name=name).strip(),
        )
    )
    header = _header(file, flow, decision, regenerate)
    text = "\n".join(
        [header, "", "", *(part for line in code.splitlines() for part in fitted(line))]
    )
    return Kernel(
        name=name,
        entry=name,
        text=text + "\n",
        inputs=file.input_names,
        outputs=tuple(output.tensor.dtype for output in plan.region.outputs),
        cases=_cases(file, rulebook, full_size),
        launches=(_launch(file),),
        rows=tuple(_row_dims(plan, access) for access in plan.stores),
    )


def _prepare(name: str, plan: Plan, expressed: Expressed) -> _File:
    """Choose every name of the file."""
    names = Names()
    names.claim(name)
    inputs = tuple(names.claim(_wish(ref)) for ref in expressed.inputs)
    outputs = tuple(names.claim(f"{_wish(ref)}_out") for ref in expressed.outputs)
    tensors = {f"in{i}": text for i, text in enumerate(inputs)}
    tensors |= {f"out{i}": text for i, text in enumerate(outputs)}
    origins = _origins(plan, inputs)
    sizes: dict[int, str] = {}
    for axis in sorted(plan.region.sizes):
        literal = str(plan.region.sizes[axis])
        sizes[axis] = names.claim(f"n{len(sizes)}") if axis in origins else literal
    precise = any(output.tensor.dtype == "float32" for output in plan.region.outputs)
    body = Body(plan, tensors, precise)
    return _File(name, plan, expressed, body, inputs, outputs, sizes, origins)


def _wish(ref: Ref) -> str:
    return f"{ref.node}_{ref.output}" if ref.output else ref.node


def _origins(plan: Plan, inputs: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Axes that always are a whole dimension: a launcher can read their size off an input."""
    parts = {
        axis for dims in plan.region.input_dims for dim in dims if len(dim) > 1 for axis in dim
    }
    found: dict[int, tuple[str, int]] = {}
    for access in plan.loads:
        name = inputs[int(access.name.removeprefix("in"))]
        for d, dim in enumerate(access.dims):
            if len(dim) == 1 and dim[0] not in parts:
                found.setdefault(dim[0], (name, d))
    return found


# -- the parts of the file -------------------------------------------------------------------------


def _header(file: _File, flow: Dataflow, decision: Decision, regenerate: str) -> str:
    subject, plan = decision.subject, file.plan
    launches = [flow.nodes[i] for i in subject.launches]
    places = dict.fromkeys(
        f"{node.source.file.rsplit('/', 1)[-1]}:{node.source.line}"
        for node in launches
        if node.source
    )
    rounded = [
        file.plan.region.results.get(i, "a value")
        for i in plan.order
        if plan.region.exprs[i].op == "round"
    ]
    doc = [
        f'"""{len(launches)} eager launches as one {plan.schedule} kernel.',
        "",
        "Replaces: " + ", ".join(node.op.removeprefix("aten.") for node in launches) + ".",
        *(["Source: " + ", ".join(places) + "."] if places else []),
        f"HBM: {decision.unfused_bytes} B unfused, {decision.fused_bytes} B here"
        f" ({decision.unfused_bytes / max(decision.fused_bytes, 1):.2f} times fewer) at the sizes"
        " it was made for.",
        "Computes in float32 for narrower floats; rounds at the stores"
        + (f" and, as the source does, at {', '.join(rounded)}." if rounded else "."),
        "Deterministic: bitwise the same from run to run.",
        *([f"Made by: {regenerate}"] if regenerate else []),
        '"""',
    ]
    imports = [
        "import os",
        "import warnings",
        "",
        "import torch",
        "import triton",
        "import triton.language as tl",
    ]
    if any("libdevice." in line for line in file.body.lines):
        imports.append("from triton.language.extra import libdevice")
    return "\n".join(_wrapped(doc)) + "\n\n" + "\n".join(imports)


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Docstring lines of at most 100 columns."""
    import textwrap

    return [
        part for line in lines for part in (textwrap.wrap(line, 98, break_long_words=False) or [""])
    ]


def _arguments(file: _File) -> list[str]:
    """The kernel's arguments after its pointers, constants last."""
    constants = {"flat": ["BLOCK"], "row": ["ROWS", "COLS"]}[file.plan.schedule]
    if file.plan.schedule == "row" and file.plan.rows == 1:
        constants = ["COLS"]
    return [*file.body.sizes, *file.body.strides, *(f"{c}: tl.constexpr" for c in constants)]


def _kernel(file: _File, lines: Sequence[str]) -> str:
    plan, body = file.plan, file.body
    start = _program(file)
    pointers = [f"{file.named(a)}_ptr" for a in file.accesses]
    arguments = [*dict.fromkeys(pointers), *_arguments(file)]
    signature = "\n".join(f"    {argument}," for argument in arguments)
    where = [line for line in lines if line.split(" = ")[0] in body.coordinates]
    rest = [line for line in lines if line not in where]
    content = "\n".join(f"    {line}" for line in [*start, *where, *rest])
    note = {
        "flat": "One program, one block of consecutive elements of the result.",
        "row": "One program holds one whole row on chip."
        if plan.rows == 1
        else "One program holds several whole rows on chip.",
    }[plan.schedule]
    return f"@triton.jit\ndef {file.name}_kernel(\n{signature}\n):\n    # {note}\n{content}"


def _program(file: _File) -> list[str]:
    """Which elements this program has."""
    plan, body = file.plan, file.body
    wide = ".to(tl.int64)" if _wide(file) else ""
    if plan.schedule == "flat":
        return [
            f"index = tl.program_id(0){wide} * BLOCK + tl.arange(0, BLOCK)",
            f"mask = index < {body.size(plan.outer, 'count')}",
        ]
    cols = body.size(plan.inner, "cols")
    far = ".to(tl.int64)" if _wide_rows(file) else ""
    if plan.rows == 1:
        return [
            f"row = tl.program_id(0){wide}",
            f"col = tl.arange(0, COLS){far}",
            f"col_mask = col < {cols}",
        ]
    return [
        f"row = tl.program_id(0){wide} * ROWS + tl.arange(0, ROWS)[:, None]",
        f"col = tl.arange(0, COLS)[None, :]{far}",
        f"row_mask = row < {body.size(plan.outer, 'rows')}",
        f"col_mask = col < {cols}",
        "mask = row_mask & col_mask",
    ]


def _wide(file: _File) -> bool:
    """Does any tensor reach beyond 32-bit offsets?"""
    return any(_reach(access.tensor) > _INT32_MAX for access in file.accesses)


def _wide_rows(file: _File) -> bool:
    """Does any tensor reach beyond 32-bit offsets within one row?"""
    inner = {axis for group in file.plan.inner for axis in group.axes}
    sizes = file.plan.region.sizes
    return any(
        sum((sizes[axis] - 1) * step for axis, step in access.strides.items() if axis in inner)
        > _INT32_MAX
        for access in file.accesses
    )


def _reach(tensor: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True)) + 1


def _product(texts: Sequence[str]) -> str:
    """A product, literals folded."""
    literal = prod(int(t) for t in texts if t.isdigit())
    named = [t for t in texts if not t.isdigit()]
    return " * ".join(named + ([str(literal)] if literal != 1 or not named else []))


def _extent(file: _File, groups: Sequence[Group]) -> str:
    return _product([file.sizes[axis] for group in groups for axis in group.axes])


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _shape(file: _File, access: Access) -> str:
    return _tuple([_product([file.sizes[a] for a in dim]) for dim in access.dims])


def _strides(file: _File, access: Access) -> str:
    """The strides that the kernel relies on; a free one is whatever the tensor has."""
    steps = gaps(access, file.groups)
    owner = {axis: group for group in file.groups for axis in group.axes}
    texts: list[str] = []
    for d, dim in enumerate(access.dims):
        if not dim:
            texts.append(f"{file.named(access)}.stride({d})")
            continue
        axis = dim[-1]
        group = owner[axis]
        later = group.axes[group.axes.index(axis) + 1 :]
        within = [file.sizes[a] for a in later]
        if not access.step(axis):
            texts.append("0")
        elif steps[group.name] is None:
            free = _free_stride(file, access, group)
            texts.append(f"{free} * {_product(within)}" if within else free)
        else:
            after = [file.sizes[a] for g in steps[group.name] or () for a in g.axes]
            texts.append(_product([*within, *after]))
    return _tuple(texts)


def _free_stride(file: _File, access: Access, group: Group) -> str:
    """A run-time stride as the launcher reads it off the tensor."""
    axis = group.axes[-1]
    d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
    later = [file.sizes[a] for a in dim[dim.index(axis) + 1 :]]
    text = f"{file.named(access)}.stride({d})"
    return f"{text} * {_product(later)}" if later else text


def _output_strides(file: _File, access: Access) -> str:
    """Dense in the order of dimensions that eager gives the result."""
    order = _order(access.tensor)
    texts = [""] * len(order)
    for place, d in enumerate(order):
        inside = [file.sizes[a] for e in order[place + 1 :] for a in access.dims[e]]
        texts[d] = _product(inside)
    return _tuple(texts)


def _order(tensor: Tensor) -> list[int]:
    """Dimensions from the largest step to the smallest."""
    return sorted(range(len(tensor.shape)), key=lambda d: (-tensor.stride[d], d))


def _serves(file: _File, name: str, given: Access | Tensor) -> str:
    """The check of one input; of an unread one the order of its dimensions matters at most."""
    if isinstance(given, Tensor):
        dtype, shape, strides = given.dtype, str(given.shape), str(given.stride)
    else:
        dtype, shape, strides = given.tensor.dtype, _shape(file, given), f"{name}.stride()"
        if name not in file.unread:
            strides = _strides(file, given)
        elif all(given.tensor.stride) and given.tensor == _dense(given.tensor, given.tensor.shape):
            strides = _output_strides(file, given)
    return f'serves("{name}", {name}, torch.{dtype}, {shape}, {strides})'


def _launcher(file: _File) -> str:
    plan = file.plan
    lines = [f"{file.sizes[axis]} = {name}.shape[{d}]" for axis, (name, d) in file.origins.items()]
    inputs = {file.named(load): load for load in plan.loads} | file.unread
    checks = [_serves(file, name, tensor) for name, tensor in inputs.items()]
    everything = _extent(file, (*plan.outer, *plan.inner))
    if not _wide(file):
        checks.append(f"within_reach({everything})")
    in_one = f"problem = {' or '.join(checks)}"
    in_many = ["problem = (", f"    {checks[0]}", *(f"    or {c}" for c in checks[1:]), ")"]
    lines += [in_one] if len(in_one) <= 96 else in_many
    given = ", ".join(file.input_names)
    lines += [
        "if problem:",
        f"    return fall_back(problem, {given})",
        f"if not {everything}:",
        f"    return reference({given})",
    ]
    device = file.input_names[0]
    for access in plan.stores:
        lines.append(
            f"{file.named(access)} = torch.empty_strided({_shape(file, access)},"
            f" {_output_strides(file, access)}, dtype=torch.{access.tensor.dtype},"
            f" device={device}.device)"
        )
    pointers = list(dict.fromkeys(file.named(a) for a in file.accesses))
    arguments = [*pointers, *(_extent(file, groups) for groups in file.body.sizes.values())]
    arguments += [_free_stride(file, a, g) for a, g in file.body.strides.values()]
    rows = _extent(file, plan.outer)
    if plan.schedule == "flat":
        grid = f"triton.cdiv({rows}, {plan.block})"
        constants = [f"BLOCK={plan.block}"]
    else:
        cols = _extent(file, plan.inner)
        grid = rows if plan.rows == 1 else f"triton.cdiv({rows}, {plan.rows})"
        constants = [f"COLS=triton.next_power_of_2({cols})"]
        if plan.rows > 1:
            constants.insert(0, f"ROWS={plan.rows}")
    constants += [f"num_warps={plan.warps}", "enable_fp_fusion=True"]
    lines += [
        f"with torch.cuda.device_of({device}):",
        f"    {file.name}_kernel[({grid},)](",
        *(f"        {argument}," for argument in [*arguments, *constants]),
        "    )",
        f"return {', '.join(file.output_names)}",
    ]
    content = "\n".join(f"    {line}" for line in lines)
    parameters = ", ".join(file.input_names)
    return f"def {file.name}({parameters}):\n{content}"


def _reference(file: _File, flow: Dataflow) -> str:
    inputs = dict(zip(file.expressed.inputs, file.input_names, strict=True))
    lines = reference_lines(flow, file.expressed, inputs, file.sizes)
    used = "\n".join(lines)
    sizes = [
        f"{file.sizes[axis]} = {name}.shape[{d}]"
        for axis, (name, d) in file.origins.items()
        if file.sizes[axis] in used
    ]
    content = "\n".join(f"    {line}" for line in [*sizes, *lines])
    head = f"def reference({', '.join(file.input_names)}):"
    return f'{head}\n    """What eager launches."""\n{content}'


_REACH = """
def within_reach(elements):
    \"""Why 32-bit offsets do not reach every element; None when they do.\"""
    return None if elements < 2**31 else f"{elements} elements are beyond 32-bit offsets"
"""

_SUPPORT = '''
fallbacks = 0


def serves(name, tensor, dtype, shape, stride):
    """Why the kernel cannot take this tensor; None when it can."""
    if not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"{{name}} is on {{tensor.device}}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return f"{{name}} requires a gradient"
    if tensor.dtype != dtype:
        return f"{{name}} has dtype {{tensor.dtype}}, not {{dtype}}"
    if tuple(tensor.shape) != tuple(shape):
        return f"{{name}} has shape {{tuple(tensor.shape)}}, not {{tuple(shape)}}"
    steps = zip(shape, tensor.stride(), stride, strict=True)
    if tensor.numel() and any(n > 1 and have != want for n, have, want in steps):
        return f"{{name}} has strides {{tensor.stride()}}, not {{tuple(stride)}}"
    return None


def fall_back(problem, *tensors):
    """Run the reference instead, once with a warning; an error in strict mode."""
    global fallbacks
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError(f"{name}: {{problem}}")
    if not fallbacks:
        warnings.warn(f"{name}: {{problem}}; running eager instead", stacklevel=3)
    fallbacks += 1
    return reference(*tensors)
'''


# -- what to check and compile ---------------------------------------------------------------------


def _row_dims(plan: Plan, access: Access) -> tuple[int, ...]:
    """The dimensions of a result that hold elements of one row."""
    inner = {axis for group in plan.inner for axis in group.axes}
    return tuple(d for d, dim in enumerate(access.dims) if inner & set(dim))


def _launch(file: _File) -> Launch:
    """The kernel as the device will compile it for the graph's sizes."""
    plan = file.plan
    signature = [
        (f"{file.named(a)}_ptr", f"*{TRITON_DTYPES[a.tensor.dtype]}") for a in file.accesses
    ]
    values: dict[str, int] = {
        name: prod(g.size for g in groups) for name, groups in file.body.sizes.items()
    }
    values |= {name: group.step(a) for name, (a, group) in file.body.strides.items()}
    signature += [(name, "i32" if v <= _INT32_MAX else "i64") for name, v in values.items()]
    if plan.schedule == "flat":
        constants: list[tuple[str, int | bool | float]] = [("BLOCK", plan.block)]
    else:
        constants = [("ROWS", plan.rows)] if plan.rows > 1 else []
        constants.append(("COLS", plan.block))
    signature += [(name, "constexpr") for name, _ in constants]
    pointers = [name for name, kind in signature if kind.startswith("*")]
    return Launch(
        jit_name=f"{file.name}_kernel",
        signature=tuple(dict(signature).items()),
        constants=tuple(constants),
        num_warps=plan.warps,
        num_stages=plan.stages,
        fp_fusion=True,
        divisible=(*dict.fromkeys(pointers), *(n for n, v in values.items() if v % 16 == 0)),
    )


def _cases(file: _File, rulebook: Rulebook, full_size: bool) -> tuple[Case, ...]:
    """Sizes to check: rows as long as the graph's with few of them, odd sizes throughout, and one
    row; the graph's own on request."""
    numbers = rulebook.verify
    hints = file.plan.region.sizes
    free = set(file.origins)
    inner = {axis for group in file.plan.inner for axis in group.axes}
    outer_free = [a for g in reversed(file.plan.outer) for a in reversed(g.axes) if a in free]
    fixed_row = prod(hints[a] for a in inner)
    affordable = numbers.interpreted_elements.count // max(fixed_row, 1)
    several_programs = 2 * file.plan.rows + 1
    rows = max(several_programs, min(numbers.interpreted_rows.count, affordable))
    if file.plan.schedule == "flat":
        rows = 2 * file.plan.block + 77
    chosen = {
        "graph's rows": {**hints, **_shrunk(outer_free, hints, rows)},
        "odd sizes": {
            **hints,
            **_shrunk(outer_free, hints, max(rows - 1, 3)),
            **{a: _odd(hints[a]) for a in inner & free},
        },
        "one row": {**hints, **dict.fromkeys(outer_free, 1)},
    }
    if full_size:
        chosen["the graph's sizes"] = dict(hints)
    seen: dict[tuple[tuple[int, int], ...], str] = {}
    for name, sizes in chosen.items():
        seen.setdefault(tuple(sorted(sizes.items())), name)
    return tuple(_case(file, name, dict(sizes)) for sizes, name in seen.items())


def _shrunk(axes: Sequence[int], hints: Mapping[int, int], budget: int) -> dict[int, int]:
    """Sizes whose product stays near the budget, the inner axes served first; odd where cut.

    No axis is cut below two: an axis of one hides where its elements are.
    """
    found: dict[int, int] = {}
    for place, axis in enumerate(axes):
        share = budget if place == len(axes) - 1 else round(budget**0.5)
        size = min(hints[axis], max(2, share))
        if 2 < size < hints[axis] and size % 2 == 0:
            size -= 1
        found[axis] = size
        budget = max(1, budget // size)
    return found


def _odd(size: int) -> int:
    """A smaller size that is no power of two and leaves a tail."""
    return 77 if size > 128 else max(1, size - 1 if size % 2 == 0 else size - 2)


def _case(file: _File, name: str, sizes: Mapping[int, int]) -> Case:
    loads = {file.named(a): _resized(file, a, sizes) for a in file.plan.loads}
    unread = {
        name: _dense(a.tensor, tuple(prod(sizes[axis] for axis in dim) for dim in a.dims))
        if isinstance(a, Access)
        else a
        for name, a in file.unread.items()
    }
    stored = sum(
        prod(sizes[a] for dim in access.dims for a in dim) * access.tensor.itemsize
        for access in file.plan.stores
    )
    return Case(
        name=name,
        inputs=tuple({**loads, **unread}[given] for given in file.input_names),
        loaded_bytes=sum(tensor.bytes for tensor in loads.values()),
        stored_bytes=stored,
    )


def _dense(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape without gaps, its dimensions in the order of another's."""
    stride, step = [0] * len(shape), 1
    for d in reversed(_order(tensor)):
        stride[d] = step if tensor.stride[d] else 0
        step *= shape[d]
    return replace(tensor, shape=shape, stride=tuple(stride))


def _resized(file: _File, access: Access, sizes: Mapping[int, int]) -> Tensor:
    """The tensor at other sizes, laid out as the launcher expects: free strides stay."""
    steps = gaps(access, file.groups)
    stride_of: dict[int, int] = {}
    for group in file.groups:
        if group.name not in steps:
            continue
        later = steps[group.name]
        step = (
            group.step(access) if later is None else prod(sizes[a] for g in later for a in g.axes)
        )
        for axis in reversed(group.axes):
            stride_of[axis] = step
            step *= sizes[axis]
    shape = tuple(prod(sizes[a] for a in dim) for dim in access.dims)
    stride = tuple(
        stride_of.get(dim[-1], 0) if dim else step
        for dim, step in zip(access.dims, access.tensor.stride, strict=True)
    )
    return Tensor(shape, stride, access.tensor.dtype)
