"""Stage: an accepted group as a file of Triton that stands alone, with the cases to check it on.

The file holds the kernel, a launcher that checks what it is given, the eager reference it falls
back to, and above them what it replaces and how it was made.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusion_advisor.axes import Dims
from fusion_advisor.dataflow import Dataflow
from fusion_advisor.decide import Decision
from fusion_advisor.express import Expressed
from fusion_advisor.kernels import Case, Kernel, Launch
from fusion_advisor.philox import SHARES, STATE, reference_helpers
from fusion_advisor.primitives import HELPERS
from fusion_advisor.records import Ref, Tensor
from fusion_advisor.reference import reference_lines
from fusion_advisor.region import Region
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.schedules.base import Plan, Step, by_tensor, loaded_bytes
from fusion_advisor.schedules.layout import Access, Group, accesses, gaps
from fusion_advisor.schedules.layout import access as laid_over
from fusion_advisor.schedules.text import TRITON_DTYPES, Body, Names, fitted

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class _Kernel:
    """One jit function of the file."""

    name: str
    step: Step
    body: Body
    lines: tuple[str, ...]

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

    @property
    def constants(self) -> dict[str, tuple[str, int]]:
        """Each constant of the tile: how the launcher writes it, and its value for the graph."""
        step = self.step
        if step.schedule == "flat":
            return {"BLOCK": (str(step.block), step.block)}
        found: dict[str, tuple[str, int]] = {}
        if step.rows > 1:
            found["ROWS"] = (str(step.rows), step.rows)
        if step.part and step.schedule == "blocked":
            found["PART"] = (str(step.part), step.part)
        whole = step.schedule in ("row", "persistent") and not step.part
        text = "triton.next_power_of_2({cols})" if whole else str(step.block)
        found["COLS"] = (text, step.block)
        if self.body.shares:
            least = max(SHARES.values())
            length = prod(group.size for group in step.inner)
            found["SHARED"] = (f"{{cols}} % {least} == 0", int(length % least == 0))
        return found


@dataclass(frozen=True)
class _File:
    """What the parts of one file share."""

    name: str
    plan: Plan
    expressed: Expressed
    kernels: tuple[_Kernel, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    sizes: Mapping[int, str]
    """Every axis by its name in the launcher, or by its literal size."""
    origins: Mapping[int, tuple[str, int]]
    """Axes that are whole dimensions of an input: the input's name and the dimension."""

    @property
    def region(self) -> Region:
        return self.plan.region

    @property
    def wide(self) -> bool:
        return _wide(self.plan, self.expressed)

    @property
    def random(self) -> bool:
        """Does it draw random numbers? Its last two inputs are then seed and offset."""
        return bool(self.expressed.draws)

    @property
    def hints(self) -> dict[int, int]:
        """Every axis at the graph's size, those along which kernels share work too."""
        return {a: n for kernel in self.kernels for a, n in kernel.step.region.sizes.items()}

    def inputs_of(self, kernel: _Kernel) -> Iterator[Access]:
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

    @property
    def stores(self) -> list[tuple[str, Access]]:
        """Every tensor that a kernel writes, by its name, in the order of the launches."""
        return [(k.named(access), access) for k in self.kernels for access in k.step.stores]


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
    helpers = dict.fromkeys(h for kernel in file.kernels for h in kernel.body.helpers)
    code = "\n\n\n".join(
        (
            *(HELPERS[helper].rstrip() for helper in helpers),
            *(_kernel(kernel) for kernel in file.kernels),
            _launcher(file),
            _reference(file, flow),
            *(() if file.wide else (_REACH.strip(),)),
            _SUPPORT.format(name=name).strip(),
        )
    )
    header = _header(file, flow, decision, regenerate)
    text = "\n".join(
        [header, "", "", *(part for line in code.splitlines() for part in fitted(line))]
    )
    _, stores = accesses(plan.region)
    return Kernel(
        name=name,
        entry=name,
        text=text + "\n",
        inputs=file.input_names,
        outputs=tuple(output.tensor.dtype for output in plan.region.outputs),
        cases=_cases(file, rulebook, full_size),
        launches=tuple(_launch(kernel) for kernel in file.kernels),
        rows=tuple(_row_dims(plan, access) for access in stores),
        partial=any(
            s.serial
            or s.parts
            or s.schedule in ("blocked", "persistent")
            or any(s.region.all("scan"))
            for s in plan.steps
        ),
    )


def _prepare(name: str, plan: Plan, expressed: Expressed) -> _File:
    """Choose every name of the file, and write the kernels' bodies."""
    names = Names()
    names.claim(name)
    state = STATE if expressed.draws else ()
    state = tuple(names.claim(name) for name in state)
    inputs = (*(names.claim(_wish(ref)) for ref in expressed.inputs), *state)
    outputs = tuple(names.claim(f"{_wish(ref)}_out") for ref in expressed.outputs)
    tensors = {f"in{i}": text for i, text in enumerate(inputs)}
    tensors |= {f"out{i}": text for i, text in enumerate(outputs)}
    for step in plan.steps:
        for access in step.stores:
            if access.name not in tensors:
                tensors[access.name] = names.claim(_space_name(plan, access.name))
    origins = _origins(plan, inputs)
    sizes: dict[int, str] = {}
    for axis in sorted(plan.region.sizes):
        literal = str(plan.region.sizes[axis])
        sizes[axis] = names.claim(f"n{len(sizes)}") if axis in origins else literal
    for number, step in enumerate(plan.steps):
        if step.parts:
            (axis,) = step.parts.axes
            sizes[axis] = f"parts_{number}" if number else "parts"
    precise = any(output.tensor.dtype == "float32" for output in plan.region.outputs)
    kernels: list[_Kernel] = []
    for step, kind in zip(plan.steps, _kinds(plan), strict=True):
        body = Body(step, tensors, precise, _wide(plan, expressed), _wide_rows(step))
        kernels.append(_Kernel(f"{name}{kind}_kernel", step, body, tuple(body.render())))
    return _File(name, plan, expressed, tuple(kernels), inputs, outputs, sizes, origins)


def _space_name(plan: Plan, name: str) -> str:
    """A readable name for what one kernel leaves for the next: what it is, and of which node."""
    _, kind, number = name.split("_")
    label = plan.region.labels.get(int(number), "value")
    return f"{label}_{kind.rstrip('0123456789')}s"


def _kinds(plan: Plan) -> list[str]:
    """What the kernels of a plan are called behind the file's name."""
    if len(plan.steps) == 1:
        return [""]
    kinds: list[str] = []
    for step in plan.steps:
        partial = step.parts is not None
        last = all(store.name.startswith("out") for store in step.stores)
        kinds.append("_parts" if partial else "_results" if last else "_rows")
    repeated = [kind for kind in kinds if kinds.count(kind) > 1]
    return [f"{kind}{n}" if kind in repeated else kind for n, kind in enumerate(kinds)]


def _wish(ref: Ref) -> str:
    return f"{ref.node}_{ref.output}" if ref.output else ref.node


def _origins(plan: Plan, inputs: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Axes that always are a whole dimension: a launcher can read their size off an input."""
    region = plan.region
    parts = {axis for dims in region.input_dims for dim in dims if len(dim) > 1 for axis in dim}
    fixed = parts | region.pinned | plan.serial
    used = {int(load.name.removeprefix("in")) for load in accesses(region)[0]}
    found: dict[int, tuple[str, int]] = {}
    for number in sorted(used):
        for d, dim in enumerate(region.input_dims[number]):
            if len(dim) == 1 and not set(dim) & fixed and dim[0] in region.sizes:
                found.setdefault(dim[0], (inputs[number], d))
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
    rounded = [file.plan.region.results.get(i, "a value") for i in plan.region.all("round")]
    doc = [
        f'"""{len(launches)} eager launches as {_made_as(plan)}.',
        "",
        "Replaces: " + ", ".join(node.op.removeprefix("aten.") for node in launches) + ".",
        *(["Source: " + ", ".join(places) + "."] if places else []),
        f"HBM: {decision.unfused_bytes} B unfused, {decision.fused_bytes} B here"
        f" ({decision.unfused_bytes / max(decision.fused_bytes, 1):.2f} times fewer) at the sizes"
        " it was made for.",
        "Computes in float32 for narrower floats; rounds at the stores"
        + (f" and, as the source does, at {', '.join(rounded)}." if rounded else "."),
        *(_RANDOM if file.random else ["Deterministic: bitwise the same from run to run."]),
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
    written = [line for kernel in file.kernels for line in kernel.lines]
    written += [HELPERS[helper] for kernel in file.kernels for helper in kernel.body.helpers]
    if any("libdevice." in line for line in written):
        imports.append("from triton.language.extra import libdevice")
    return "\n".join(_wrapped(doc)) + "\n\n" + "\n".join(imports)


_RANDOM = (
    "Deterministic: bitwise the same for the same seed and offset, on any device.",
    "Random: Philox-4x32-7 of seed, offset and the number of the element. Both are one int64 each"
    " in a tensor on the device, so that replays of a CUDA graph may change them; an int is filled"
    " into such a tensor. Without a seed they are drawn from torch's generator of the device, by"
    " one launch more; with one, that generator is left alone.",
)


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Docstring lines of at most 100 columns."""
    return [
        part for line in lines for part in (textwrap.wrap(line, 98, break_long_words=False) or [""])
    ]


def _made_as(plan: Plan) -> str:
    if len(plan.steps) == 1:
        return f"one {plan.schedule} kernel"
    return f"{len(plan.steps)} kernels ({plan.schedule})"


_NOTES = {
    "flat": "One program, one block of consecutive elements of the result.",
    "row": "One program holds {rows} on chip.",
    "blocked": "One program walks {rows} in chunks.",
    "tiled": "One program has one part of {rows}.",
    "persistent": "One program walks its share of the rows.",
}


def _note(step: Step) -> str:
    rows = "several rows" if step.rows > 1 else "a row"
    if step.part and step.schedule in ("blocked", "row"):
        rows = f"a part of {rows}"
    elif step.schedule == "row":
        rows = "several whole rows" if step.rows > 1 else "one whole row"
    return _NOTES[step.schedule].format(rows=rows)


def _kernel(kernel: _Kernel) -> str:
    body = kernel.body
    arguments = [*kernel.pointers, *body.sizes, *body.strides]
    arguments += [f"{name}: tl.constexpr" for name in kernel.constants]
    signature = "\n".join(f"    {argument}," for argument in arguments)
    content = "\n".join(f"    {line}" for line in kernel.lines)
    note = _note(kernel.step)
    return f"@triton.jit\ndef {kernel.name}(\n{signature}\n):\n    # {note}\n{content}"


def _wide(plan: Plan, expressed: Expressed) -> bool:
    """Does any tensor reach beyond 32-bit offsets, or the number of a random element?"""
    tensors = [a.tensor for step in plan.steps for a in (*step.loads, *step.stores)]
    tensors += [tensor for _, tensor in expressed.draws.values()]
    return any(_reach(tensor) > _INT32_MAX for tensor in tensors)


def _wide_rows(step: Step) -> bool:
    """Does any tensor reach beyond 32-bit offsets within one row?"""
    inner = {axis for group in step.inner for axis in group.axes}
    sizes = step.region.sizes
    return any(
        sum((sizes[axis] - 1) * abs(n) for axis, n in access.strides.items() if axis in inner)
        > _INT32_MAX
        for access in (*step.loads, *step.stores)
    )


def _reach(tensor: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True)) + 1


def _product(texts: Sequence[str]) -> str:
    """A product, literals folded."""
    literal = prod(int(t) for t in texts if t.isdigit())
    named = [t for t in texts if not t.isdigit()]
    return " * ".join(named + ([str(literal)] if literal != 1 or not named else []))


def _extent(file: _File, axes: Iterable[int]) -> str:
    return _product([file.sizes[axis] for axis in axes])


def _spanned(groups: Sequence[Group]) -> list[int]:
    return [axis for group in groups for axis in group.axes]


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _shape(file: _File, access: Access) -> str:
    return _tuple(
        [
            _product([file.sizes[a] for a in dim]) if dim else str(size)
            for dim, size in zip(access.dims, access.tensor.shape, strict=True)
        ]
    )


def _strides(file: _File, kernel: _Kernel, access: Access) -> str:
    """The strides that a kernel relies on; a free one is whatever the tensor has."""
    steps = gaps(access, kernel.step.groups)
    owner = {axis: group for group in kernel.step.groups for axis in group.axes}
    texts: list[str] = []
    for d, dim in enumerate(access.dims):
        free = f"{kernel.named(access)}.stride({d})"
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
            texts.append(f"{free} * {_product(within)}" if within else free)
        else:
            after = [file.sizes[a] for g in steps[group.name] or () for a in g.axes]
            texts.append(_product([*within, *after]))
    return _tuple(texts)


def _free_stride(file: _File, kernel: _Kernel, access: Access, along: Group | int) -> str:
    """A run-time stride as the launcher reads it off the tensor."""
    if isinstance(along, int):
        return f"{kernel.named(access)}.stride({along})"
    axis = along.axes[-1]
    d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
    later = [file.sizes[a] for a in dim[dim.index(axis) + 1 :]]
    text = f"{kernel.named(access)}.stride({d})"
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


def _serves(file: _File, kernel: _Kernel, load: Access) -> str:
    """The check of one input that a kernel reads."""
    name, dtype = kernel.named(load), load.tensor.dtype
    shape, strides = _input_shape(file, load), _strides(file, kernel, load)
    return f'serves("{name}", {name}, torch.{dtype}, {shape}, {strides})'


def _input_shape(file: _File, load: Access) -> str:
    """The shape of an input: run-time sizes where its dimensions are axes that the file knows."""
    region = file.region
    dims = region.input_dims[region.input_names.index(load.name)]
    return _tuple(
        [
            _product([file.sizes[a] for a in dim])
            if dim and set(dim) <= file.sizes.keys()
            else str(size)
            for dim, size in zip(dims, load.tensor.shape, strict=True)
        ]
    )


def _serves_unread(file: _File, name: str, given: Access) -> str:
    """The check of an input of which no element is read: its order of dimensions at most."""
    tensor, strides = given.tensor, f"{name}.stride()"
    whole = all(dim or n == 1 for dim, n in zip(given.dims, tensor.shape, strict=True))
    if whole and all(tensor.stride) and tensor == _dense(tensor, tensor.shape):
        strides = _output_strides(file, given)
    return f'serves("{name}", {name}, torch.{tensor.dtype}, {_shape(file, given)}, {strides})'


def _launcher(file: _File) -> str:
    plan = file.plan
    lines = [f"{file.sizes[axis]} = {name}.shape[{d}]" for axis, (name, d) in file.origins.items()]
    checks = [
        *(_serves(file, k, load) for k in file.kernels for load in file.inputs_of(k)),
        *(_serves_unread(file, name, given) for name, given in file.unread.items()),
    ]
    everything = _extent(file, sorted(plan.region.space))
    if not file.wide:
        checks.append(f"within_reach({_largest(file)})")
    checks = list(dict.fromkeys(checks))
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
    for kernel in file.kernels:
        if kernel.step.parts:
            lines.append(_count_parts(file, kernel.step))
    device = file.input_names[0]
    for name, access in file.stores:
        lines.append(
            f"{name} = torch.empty_strided({_shape(file, access)},"
            f" {_output_strides(file, access)}, dtype=torch.{access.tensor.dtype},"
            f" device={device}.device)"
        )
    lines.append(f"with torch.cuda.device_of({device}):")
    for kernel in file.kernels:
        lines += [f"    {line}" for line in _call(file, kernel)]
    lines.append(f"return {', '.join(file.output_names)}")
    content = "\n".join(f"    {line}" for line in lines)
    if file.random:
        tensors, state = file.input_names[:-2], ", ".join(file.input_names[-2:])
        content = f"    {state} = random_state({state}, {device}.device)\n{content}"
        parameters = ", ".join([*tensors, *(f"{name}=None" for name in file.input_names[-2:])])
    else:
        parameters = ", ".join(file.input_names)
    return f"def {file.name}({parameters}):\n{content}"


def _largest(file: _File) -> str:
    """The elements of the largest tensor that a kernel walks or draws."""
    texts: dict[str, None] = {}
    for kernel in file.kernels:
        for load in file.inputs_of(kernel):
            dims = file.region.input_dims[file.region.input_names.index(load.name)]
            texts[_elements(file, dims, load.tensor)] = None
    for _, store in file.stores:
        if store.name.startswith("out"):
            texts[_elements(file, store.dims, store.tensor)] = None
    for node, (_, tensor) in file.expressed.draws.items():
        texts[_elements(file, file.expressed.dims[Ref(node)], tensor)] = None
    found = [text for text in texts if not text.isdigit()] or ["1"]
    return found[0] if len(found) == 1 else f"max({', '.join(found)})"


def _elements(file: _File, dims: Dims, tensor: Tensor) -> str:
    """How many elements a tensor has, in terms of the launcher's sizes."""
    known = [
        _product([file.sizes[a] for a in dim]) if dim and set(dim) <= file.sizes.keys() else str(n)
        for dim, n in zip(dims, tensor.shape, strict=True)
    ]
    return _product([factor for text in known for factor in text.split(" * ")])


def _count_parts(file: _File, step: Step) -> str:
    """How many programs share a row, or the rows."""
    assert step.parts is not None
    name = file.sizes[step.parts.axes[0]]
    if step.schedule == "persistent":
        return f"{name} = {_programs(file, step)}"
    return f"{name} = triton.cdiv({_extent(file, _spanned(step.inner))}, {step.part})"


def _programs(file: _File, step: Step) -> str:
    """How many programs walk the rows."""
    rows = _extent(file, _spanned(step.outer))
    tiles = f"triton.cdiv({rows}, {step.rows})" if step.rows > 1 else rows
    return f"min({tiles}, {step.most})"


def _call(file: _File, kernel: _Kernel) -> list[str]:
    """One launch."""
    step, body = kernel.step, kernel.body
    arguments = [pointer.removesuffix("_ptr") for pointer in kernel.pointers]
    arguments += [_extent(file, axes) for axes in body.sizes.values()]
    arguments += [_free_stride(file, kernel, a, along) for a, along in body.strides.values()]
    rows = _extent(file, _spanned(step.outer))
    cols = _extent(file, _spanned(step.inner))
    if step.schedule == "flat":
        grid = f"triton.cdiv({rows}, {step.block}),"
    elif step.schedule == "persistent":
        grid = f"{file.sizes[step.parts.axes[0]] if step.parts else _programs(file, step)},"
    else:
        grid = rows if step.rows == 1 else f"triton.cdiv({rows}, {step.rows})"
        if step.parts:
            grid = f"{grid}, {file.sizes[step.parts.axes[0]]}"
        elif step.part:
            grid = f"{grid}, triton.cdiv({cols}, {step.part})"
        else:
            grid = f"{grid},"
    constants = [f"{name}={text.format(cols=cols)}" for name, (text, _) in kernel.constants.items()]
    constants += [f"num_warps={step.warps}", "enable_fp_fusion=True"]
    return [
        f"{kernel.name}[({grid})](",
        *(f"    {argument}," for argument in [*arguments, *constants]),
        ")",
    ]


def _reference(file: _File, flow: Dataflow) -> str:
    inputs = dict(zip(file.expressed.inputs, file.input_names, strict=False))
    lines = reference_lines(flow, file.expressed, inputs, file.sizes)
    used = "\n".join(lines)
    sizes = [
        f"{file.sizes[axis]} = {name}.shape[{d}]"
        for axis, (name, d) in file.origins.items()
        if file.sizes[axis] in used
    ]
    content = "\n".join(f"    {line}" for line in [*sizes, *lines])
    head = f"def reference({', '.join(file.input_names)}):"
    what = "What eager launches" + (", on the kernels' random bits." if file.random else ".")
    helpers = reference_helpers(["random_state()", *lines] if file.random else [])
    texts = [text.rstrip() for text in helpers.values()]
    return "\n\n\n".join([*texts, f'{head}\n    """{what}"""\n{content}'])


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
    inner = {axis for step in plan.steps for group in step.inner for axis in group.axes}
    return tuple(d for d, dim in enumerate(access.dims) if inner & set(dim))


def _launch(kernel: _Kernel) -> Launch:
    """The kernel as the device will compile it for the graph's sizes."""
    step, body = kernel.step, kernel.body
    signature = [
        (name, f"*{TRITON_DTYPES[access.tensor.dtype]}") for name, access in kernel.pointers.items()
    ]
    sizes = step.region.sizes
    values: dict[str, int] = {n: prod(sizes[a] for a in axes) for n, axes in body.sizes.items()}
    values |= {
        name: access.tensor.stride[along] if isinstance(along, int) else along.step(access)
        for name, (access, along) in body.strides.items()
    }
    signature += [(name, "i32" if v <= _INT32_MAX else "i64") for name, v in values.items()]
    signature += [(name, "constexpr") for name in kernel.constants]
    pointers = [name for name, kind in signature if kind.startswith("*")]
    return Launch(
        jit_name=kernel.name,
        signature=tuple(signature),
        constants=tuple((name, value) for name, (_, value) in kernel.constants.items()),
        num_warps=step.warps,
        num_stages=step.stages,
        fp_fusion=True,
        divisible=(*pointers, *(n for n, v in values.items() if v % 16 == 0)),
    )


def _cases(file: _File, rulebook: Rulebook, full_size: bool) -> tuple[Case, ...]:
    """Sizes to check: rows as long as the graph's with few of them, odd sizes throughout, and one
    row; the graph's own on request."""
    numbers = rulebook.verify
    hints = file.region.sizes
    free = set(file.origins)
    first = file.plan.steps[0]
    inner = set(_spanned(first.inner))
    outer_free = [a for g in reversed(first.outer) for a in reversed(g.axes) if a in free]
    fixed_row = prod(hints[a] for a in inner)
    affordable = numbers.interpreted_elements.count // max(fixed_row, 1)
    several_programs = 2 * first.rows + 1
    rows = max(several_programs, min(numbers.interpreted_rows.count, affordable))
    if first.schedule == "flat":
        rows = 2 * first.block + 77
    row_free = [a for a in _spanned(first.inner) if a in free]
    unit = first.part or first.block
    fixed = fixed_row // prod(hints[a] for a in row_free)
    most = 4 * numbers.interpreted_elements.count
    divided = first.schedule == "blocked" or first.part > 0
    long = divided and fixed_row * rows > most
    row = _shortened(row_free, hints, (2 * unit + 77) // fixed) if long else {}
    odd = _shortened(row_free, hints, (unit + 77) // fixed) if divided else {}
    chosen = {
        "graph's rows": {**hints, **_shrunk(outer_free, hints, rows), **row},
        "odd sizes": {
            **hints,
            **_shrunk(outer_free, hints, max(rows - 1, 3)),
            **(odd or {a: _odd(hints[a]) for a in row_free}),
        },
        "one row": {**hints, **dict.fromkeys(outer_free, 1), **row},
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


def _shortened(axes: Sequence[int], hints: Mapping[int, int], wanted: int) -> dict[int, int]:
    """Sizes of a row's axes with about `wanted` elements, the outermost cut first."""
    found = {axis: hints[axis] for axis in axes}
    for axis in axes:
        others = prod(found.values()) // max(found[axis], 1)
        found[axis] = min(found[axis], max(1, -(-wanted // max(others, 1))))
    return found


def _odd(size: int) -> int:
    """A smaller size that is no power of two and leaves a tail."""
    return 77 if size > 128 else max(1, size - 1 if size % 2 == 0 else size - 2)


def _case(file: _File, name: str, sizes: Mapping[int, int]) -> Case:
    sizes = {**sizes, **_parts(file, sizes)}
    tensors: dict[str, Tensor] = {}
    loaded: int | None = 0
    for kernel in file.kernels:
        for loads in by_tensor(kernel.step.loads).values():
            tensor = _resized(kernel, loads, sizes)
            tensors.setdefault(kernel.named(loads[0]), tensor)
            touched = loaded_bytes(kernel.step.region, loads, tensor, sizes)
            loaded = None if loaded is None or touched is None else loaded + touched
    for name, given in file.unread.items():
        pairs = zip(given.dims, given.tensor.shape, strict=True)
        shape = tuple(prod(sizes[axis] for axis in dim) if dim else n for dim, n in pairs)
        tensors[name] = _dense(given.tensor, shape)
    stored = sum(
        prod(sizes[a] for dim in access.dims for a in dim) * access.tensor.itemsize
        for _, access in file.stores
    )
    return Case(
        name=name,
        inputs=tuple(tensors[given] for given in file.input_names),
        loaded_bytes=loaded,
        stored_bytes=stored,
        ranges=tuple(_range(file, number) for number in range(len(file.input_names))),
    )


def _parts(file: _File, sizes: Mapping[int, int]) -> dict[int, int]:
    """The number of parts that rows of these sizes have."""
    found: dict[int, int] = {}
    for step in (kernel.step for kernel in file.kernels):
        if step.parts:
            (axis,) = step.parts.axes
            walked, share = (step.inner, step.part)
            if step.schedule == "persistent":
                walked, share = step.outer, step.rows
            found[axis] = -(-prod(sizes[a] for a in _spanned(walked)) // share)
            if step.schedule == "persistent":
                found[axis] = min(found[axis], file.hints[axis])
    return found


def _range(file: _File, number: int) -> tuple[int, int] | None:
    """The values of an integer input: any of a seed, places of what it indexes of an index."""
    if file.random and number >= len(file.input_names) - len(STATE):
        return -(2**63), 2**63 - 1
    bound = file.region.bounds.get(number)
    return None if bound is None else (0, bound)


def _dense(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape without gaps, its dimensions in the order of another's."""
    stride, step = [0] * len(shape), 1
    for d in reversed(_order(tensor)):
        stride[d] = step if tensor.stride[d] else 0
        step *= shape[d]
    return replace(tensor, shape=shape, stride=tuple(stride))


def _resized(kernel: _Kernel, loads: Sequence[Access], sizes: Mapping[int, int]) -> Tensor:
    """A tensor at other sizes, laid out as the launcher expects: free strides stay."""
    access = min(loads, key=lambda load: len(load.pulled))
    region = kernel.step.region
    dims = region.input_dims[region.input_names.index(access.name)]
    steps = gaps(access, kernel.step.groups)
    stride_of: dict[int, int] = {}
    for group in kernel.step.groups:
        if group.name not in steps:
            continue
        later = steps[group.name]
        step = (
            group.step(access) if later is None else prod(sizes[a] for g in later for a in g.axes)
        )
        for axis in reversed(group.axes):
            stride_of[axis] = step
            step *= sizes[axis]
    shape = tuple(
        prod(sizes[a] for a in dim) if dim and set(dim) <= sizes.keys() else size
        for dim, size in zip(dims, access.tensor.shape, strict=True)
    )
    stride = tuple(
        stride_of.get(dim[-1], step) if dim and step else step
        for dim, step in zip(access.dims, access.tensor.stride, strict=True)
    )
    return Tensor(shape, stride, access.tensor.dtype)
