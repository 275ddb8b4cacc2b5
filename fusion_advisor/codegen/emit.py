"""Stage: an accepted group as a file of Triton, with the cases to check it on.

The file holds the kernel, a launcher that checks what it is given, the eager reference it falls
back to, and above them what it replaces and how it was made. What all such files share stands
beside it (`shipped`), and is imported.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fusion_advisor.codegen.eager_reference import reference_lines
from fusion_advisor.codegen.held import held
from fusion_advisor.codegen.host_launcher import launcher
from fusion_advisor.codegen.kernel_file import (
    JitFunction,
    KernelFile,
    far,
    fixed_axes,
    origins,
)
from fusion_advisor.codegen.selftest import selftest
from fusion_advisor.codegen.spelling import AS_IT_IS, Parts, fitted, quoted
from fusion_advisor.codegen.test_inputs import at_odd_sizes, cases, launches
from fusion_advisor.codegen.titles import titled, titles, wish, wished
from fusion_advisor.codegen.triton import Triton
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.library_match import Spelling
from fusion_advisor.fusion.lower import Expressed
from fusion_advisor.ir.kernel import LICENSE, Kernel
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.region.random import REFERENCE_RANDOM, STATE
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Step
from fusion_advisor.schedules.bodies import body_of
from fusion_advisor.schedules.names import Names
from fusion_advisor.shipped.files import DEVICE, HOST, IMPORT, RUNTIME
from fusion_advisor.tile.verify import verify


def emit(
    flow: Dataflow,
    decision: Decision,
    name: str,
    rulebook: Rulebook,
    *,
    framework: Spelling | None = None,
    full_size: bool = False,
) -> Kernel:
    """Write the kernel of an accepted group.

    `name` is a Python identifier, `framework` PyTorch's own op for the same where there is one.
    With `full_size` the graph's own sizes are among the cases: for a GPU.

    Raises ValueError for a group without a plan, and for a name that its file has another use for.
    """
    file = written(flow, decision, name, rulebook)
    reference = reference_of(file, flow)
    made = cases(file, rulebook, full_size)
    trial = selftest(file, at_odd_sizes(made), framework, rulebook)
    content = "\n\n\n".join((jits_of(file), in_lines(reference, launcher(file), trial)))
    shared = shared_by([file], content)
    own = {HOST, "reference", *(kernel.name for kernel in file.kernels)}
    if name in own.union(*shared.values()) or f"{HOST}.{name}(" in content:
        raise ValueError(f"{name}: means something else in its file; choose another name")
    imports = imports_of(shared, content)
    text = "\n".join([*_header(file, flow, decision), "", *imports, "", "", content])
    return Kernel(
        name=name,
        entry=name,
        text=text + "\n",
        inputs=file.input_names,
        outputs=tuple(output.tensor.dtype for output in file.region.outputs),
        cases=made,
        launches=launches(file),
        yardstick=reference,
        numbers=file.numbers,
    )


def jits_of(file: KernelFile) -> str:
    """Text of the kernels of a file."""
    return in_lines(*map(Triton().function, file.functions))


def in_lines(*parts: str) -> str:
    """Parts of a file, in as few lines as hold them."""
    lines = "\n\n\n".join(parts).splitlines()
    ways: list[tuple[str, Parts]] = [
        (line, "filled" if line.endswith(AS_IT_IS) else "together") for line in lines
    ]
    return "\n".join(part for line, way in ways for part in fitted(line, parts=way))


def written(flow: Dataflow, decision: Decision, name: str, rulebook: Rulebook) -> KernelFile:
    """Tile programs of an accepted group, with every name of their file.

    Raises ValueError for a group without a plan.
    """
    subject = decision.subject
    plan, expressed = subject.plan, subject.expressed
    if plan is None or expressed is None:
        raise ValueError(f"{name}: a group without a plan cannot be emitted")
    unrolled = [_unrolled(step, subject.device, rulebook) for step in plan.steps]
    file = _prepare(name, plan, expressed, unrolled, flow)
    graded = _passes_gradients(flow, expressed)
    return replace(file, held=_held(file, flow, rulebook), graded=graded)


def _passes_gradients(flow: Dataflow, expressed: Expressed) -> bool:
    """Whether autograd may follow a result to an input: not through integers, nor truths."""
    waiting, seen = [*expressed.outputs], {*expressed.outputs}
    while waiting:
        ref = waiting.pop()
        if flow.annotated.tensors[ref].dtype.startswith(("int", "uint", "bool")):
            continue
        if ref in expressed.inputs:
            return True
        found = {*flow.operands[flow.position[ref.node]]} - seen
        waiting, seen = [*waiting, *found], seen | found
    return False


def attempt(
    flow: Dataflow,
    decision: Decision,
    name: str,
    rulebook: Rulebook,
    *,
    framework: Spelling | None = None,
    full_size: bool = False,
) -> Kernel | str:
    """`emit`, of an accepted group or a rejected candidate alike; why there is no kernel where
    none can be written."""
    try:
        return emit(flow, decision, name, rulebook, framework=framework, full_size=full_size)
    except (NotExpressible, ValueError) as error:
        return f"not emitted: {error}"


def _unrolled(step: Step, device: Device, rulebook: Rulebook) -> int:
    """Elements that a warp may have on the way at once where a walk is written out: fewer where
    each lane has one element."""
    one = step.rows * step.block == step.warps * device.warp_size
    numbers = rulebook.schedules.flat if not step.inner or one else rulebook.schedules.row
    return numbers.unrolled_elements.count * device.warp_size


def _prepare(
    name: str, plan: Plan, expressed: Expressed, unrolled: Sequence[int], flow: Dataflow
) -> KernelFile:
    """Choose every name of the file, and write the kernels' bodies."""
    names = Names()
    names.claim(name)
    state = STATE if expressed.draws else ()
    state = tuple(names.claim(name) for name in state)
    inputs = (*(names.claim(wish(flow, ref)) for ref in expressed.inputs), *state)
    numbers = tuple(names.claim(wished(number.name)) for number in expressed.numbers)
    outputs = tuple(names.claim(f"{wish(flow, ref)}_out") for ref in expressed.outputs)
    named = titles(flow, expressed, names)
    plan = titled(plan, named)
    tensors = {f"in{i}": text for i, text in enumerate(inputs)}
    tensors |= {f"out{i}": text for i, text in enumerate(outputs)}
    for i, text in enumerate(numbers):
        tensors |= {f"number{i}": text, f"inverse{i}": names.claim(f"inverse_{text}")}
    for step in plan.steps:
        for access in (*step.stores, *(a for phase in step.phases for a in phase.stores)):
            if access.name not in tensors:
                tensors[access.name] = names.claim(_space_name(plan, access.name))
    whole = _origins(plan, inputs, fixed_axes(plan))
    sizes: dict[int, str] = {}
    for axis in sorted(plan.region.sizes):
        literal = str(plan.region.sizes[axis])
        sizes[axis] = names.claim(f"n{len(sizes)}") if axis in whole else literal
    for number, step in enumerate(plan.steps):
        if step.parts:
            (axis,) = step.parts.axes
            sizes[axis] = f"parts_{number}" if number else "parts"
    strides = {text: names.claim(f"{text}_strides") for text in inputs}
    precise = any(output.tensor.dtype == "float32" for output in plan.region.outputs)
    reaches_far = far(plan.steps, expressed)
    kernels: list[JitFunction] = []
    fixed = frozenset(plan.region.sizes) - whole.keys()
    for step, kind, most in zip(plan.steps, _kinds(plan), unrolled, strict=True):
        body = body_of(step)(
            step=step,
            far=reaches_far,
            fixed=fixed,
            tensors=tensors,
            precise=precise,
            unrolled=most,
        )
        kernel = JitFunction(f"{name}{kind}_kernel", step, body, body.program())
        verify(kernel.function, kernel.filled)
        kernels.append(kernel)
    return KernelFile(
        name, plan, expressed, tuple(kernels), inputs, outputs, numbers, sizes, strides, whole,
        named,
    )  # fmt: skip


def _space_name(plan: Plan, name: str) -> str:
    """A readable name for what one kernel leaves for the next: what it is, and of which node."""
    _, kind, number = name.split("_")
    label = plan.region.labels.get(int(number), "value")
    return f"{label}_{kind.rstrip('0123456789')}s"


def _kinds(plan: Plan) -> list[str]:
    """What the kernels of a plan are called behind the file's name."""
    if len(plan.steps) == 1:
        return ["" for _ in plan.steps]
    kinds: list[str] = []
    for step in plan.steps:
        partial = step.parts is not None
        last = all(store.name.startswith("out") for store in step.stores)
        kinds.append("_parts" if partial else "_results" if last else "_rows")
    repeated = [kind for kind in kinds if kinds.count(kind) > 1]
    return [f"{kind}{n}" if kind in repeated else kind for n, kind in enumerate(kinds)]


def _held(file: KernelFile, flow: Dataflow, rulebook: Rulebook) -> tuple[tuple[str, int, int], ...]:
    """The dimensions of inputs that the file is held to, with their sizes."""
    inputs, telling = file.expressed.inputs, rulebook.held.telling.count
    return tuple(
        (file.input_names[number], d, flow.annotated.tensors[inputs[number]].shape[d])
        for number, d in held(flow, file.expressed, file.origins, file.indexed, telling)
    )


def _origins(
    plan: Plan, inputs: Sequence[str], fixed: Collection[int]
) -> dict[int, tuple[str, int]]:
    """Axes whose size can be read off an input, by its name."""
    return {axis: (inputs[n], d) for axis, (n, d) in origins(plan.region, fixed).items()}


def _header(file: KernelFile, flow: Dataflow, decision: Decision) -> list[str]:
    """Licence and docstring of a file."""
    subject, plan = decision.subject, file.plan
    launches = [flow.nodes[i] for i in subject.launches]
    places = dict.fromkeys(
        quoted(f"{node.source.file.rsplit('/', 1)[-1]}:{node.source.line}")
        for node in launches
        if node.source
    )
    names = plan.region.results
    rounds = ", ".join(names[i] for i in plan.region.all("round") if i in names)
    doc = [
        f'"""{len(launches)} eager launches as {_made_as(plan)}.',
        "",
        "Replaces: " + ", ".join(node.op.removeprefix("aten.") for node in launches) + ".",
        *(["Source: " + ", ".join(places) + "."] if places else []),
        f"HBM: {decision.unfused_bytes} B unfused, {decision.fused_bytes} B here"
        f" ({decision.unfused_bytes / max(decision.fused_bytes, 1):.2f} times fewer) at the sizes"
        " it was made for.",
        *([f"Rounds, as the source does, at {rounds}, too."] if rounds else []),
        *(_RANDOM if file.random else ()),
        '"""',
    ]
    return [LICENSE, *wrapped(doc)]


def shared_by(files: Sequence[KernelFile], content: str) -> dict[str, list[str]]:
    """Functions that a text names of the modules beside it, by the module; it has the kernels of
    some files."""
    device = frozenset[str]().union(*(kernel.helpers for file in files for kernel in file.kernels))
    drawn = {n for n in REFERENCE_RANDOM if re.search(rf"(?<!def )(?<![\w.]){n}\(", content)}
    return {DEVICE: sorted(device), RUNTIME: sorted(drawn)}


def imports_of(shared: Mapping[str, Sequence[str]], content: str) -> list[str]:
    """Imports of a file: torch, Triton, and what it takes of the modules beside it."""
    library = "libdevice." in content
    return [
        *("import torch", "import triton", "import triton.language as tl"),
        *(["from triton.language.extra import libdevice"] if library else []),
        "",
        IMPORT,
        *(line for module, names in shared.items() for line in _import_from(module, names)),
    ]


def _import_from(module: str, names: Sequence[str]) -> list[str]:
    """Import of some names of a shipped module, of a line each where one line is too short."""
    line = f"from .{module} import {', '.join(names)}"
    if not names or len(line) <= 100:
        return [line] if names else []
    return [f"from .{module} import (", *(f"    {name}," for name in names), ")"]


_RANDOM = (
    "Deterministic: bitwise the same for the same seed and offset, on any device.",
    "Random: Philox-4x32-7 of seed, offset and the number of the element. Both are one int64 each"
    " in a tensor on the device, so that replays of a CUDA graph may change them; an int is filled"
    " into such a tensor. Without a seed they are drawn from torch's generator of the device, by"
    " one launch more; with one, that generator is left alone.",
)


def wrapped(lines: Sequence[str]) -> list[str]:
    """Docstring lines of at most 100 columns."""
    return [
        part for line in lines for part in (textwrap.wrap(line, 98, break_long_words=False) or [""])
    ]


def _made_as(plan: Plan) -> str:
    if plan.launches == 1:
        return f"one {plan.schedule} kernel"
    return f"{len(plan.steps)} kernels ({plan.schedule})"


def reference_of(file: KernelFile, flow: Dataflow) -> str:
    inputs = dict(zip(file.expressed.inputs, file.input_names, strict=False))
    whole = _origins(file.plan, file.input_names, file.origins)
    captured = {axis: f"{name}.shape[{d}]" for axis, (name, d) in whole.items()}
    numbers = {n.key: t for n, t in zip(file.expressed.numbers, file.numbers, strict=True)}
    sized = {**file.sizes, **captured}
    lines = reference_lines(flow, file.expressed, inputs, sized, file.titles, numbers)
    used = {*re.findall(r"\w+", "\n".join(lines))}
    sizes = [
        f"{file.sizes[axis]} = {name}.shape[{d}]"
        for axis, (name, d) in file.origins.items()
        if file.sizes[axis] in used
    ]
    content = "\n".join(f"    {line}" for line in [*sizes, *lines])
    head = f"def reference({', '.join(file.given)}):"
    what = "What eager launches" + (", on the kernels' random bits." if file.random else ".")
    return f'{head}\n    """{what}"""\n{content}'
