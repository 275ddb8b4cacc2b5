"""The eager reference of a group as Python: the same aten calls that eager launches, in order.

Sizes that a call repeats (the shape given to a view) are written in terms of the inputs' sizes, so
that the reference serves every size that the kernel serves; where several inputs have a size, in
terms of what was made of them, so that it serves those that are broadcast, too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from fusion_advisor.codegen.kernel_file import factors, product
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.lower import Expressed
from fusion_advisor.ir.graph import Arg, GivenNumber, Node, Ref, Symbol
from fusion_advisor.ops import REGISTRY
from fusion_advisor.ops.registry import Op
from fusion_advisor.region.builder import NARROW_FLOATS
from fusion_advisor.region.random import reference_text

_DROPPED = ("layout", "pin_memory", "non_blocking")
"""Keywords for where a tensor lives; they do not change its numbers."""
_LISTS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int")
"""Ops that return a list, however short."""
RESHAPES = (
    *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"),
    *("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
)
"""Views that need the dimensions of the captured layout, or drop what depends on the sizes; the
reference spells them so that it serves tensors of other layouts, for which a launcher calls it."""


Numbers = tuple[int | float | None, ...]


def numbers_of(node: Node) -> Numbers:
    """Numbers in the reference of a node, beside tensors and the sizes that it reads off them; None
    for what is no number, or is given."""
    op = REGISTRY.get(node.op)
    if op is None or node.op in RESHAPES:
        return ()
    given = tuple(arg for place, arg in enumerate(node.args) if place not in op.sizes)
    return tuple(_plain((*given, *(value for _, value in node.kwargs))))


def _plain(arg: Arg) -> Iterator[int | float | None]:
    if isinstance(arg, tuple):
        for each in arg:
            yield from _plain(each)
    elif isinstance(arg, GivenNumber):
        yield None
    else:
        yield arg if isinstance(arg, int | float) else None


def reference_lines(
    flow: Dataflow,
    expressed: Expressed,
    inputs: Mapping[Ref, str],
    sizes: Mapping[int, str],
    titles: Mapping[str, str],
    numbers: Mapping[Hashable, str],
) -> list[str]:
    """The body of `reference`: one line a node, and the return. `sizes` names every axis, `titles`
    every node, `numbers` what is given beside tensors."""
    texts: dict[Ref, str] = dict(inputs)
    lines: list[str] = []
    device = next(iter(inputs.values()))

    extents = {axis: n for axis, n in expressed.region.sizes.items() if axis in sizes}

    given = {
        dim: f"{inputs[ref]}.shape[{d}]"
        for ref in expressed.inputs
        for d, dim in enumerate(expressed.dims.get(ref, ()))
    }

    def length(axis: int, near: Sequence[Ref]) -> str:
        """The size along an axis. An input that has the axis may be broadcast along it: what was
        made of it has the size."""
        for ref in near:
            if ref not in flow.annotated.tensors:  # a gradient that nobody asked for
                continue
            shape = flow.annotated.tensors[ref].shape
            for d, dim in enumerate(expressed.dims.get(ref, ())):
                if factors(dim, shape[d], extents) == ((axis,), 1):
                    return f"{texts[ref]}.shape[{d}]"
        return sizes[axis]

    def shape_of(ref: Ref, near: Sequence[Ref]) -> list[str]:
        """The sizes of a result, where they can be read off what is `near`, the nearest first."""
        shape = flow.annotated.tensors[ref].shape
        dims = expressed.dims.get(ref) or ((),) * len(shape)
        texts: list[str] = []
        for size, dim in zip(shape, dims, strict=True):
            known, rest = factors(dim, size, extents)
            if dim and not known and dim in given:  # only data indexes it
                texts.append(given[dim])
            else:
                texts.append(product([*(length(axis, near) for axis in known), str(rest)]))
        return texts

    def state(number: int) -> None:
        node = flow.nodes[number]
        taken = flow.operands[number]
        operands = [texts[ref] for ref in taken]
        near = taken  # a view has the places of its operand; so have numbers drawn for it
        if node.op not in RESHAPES and not (taken and REGISTRY[node.op].reference):
            near = [ref for ref in reversed(texts) if ref not in inputs and ref not in taken]
        made = next(i for i, tensor in enumerate(node.outputs) if tensor is not None)
        shape = shape_of(Ref(node.name, made), near)
        stream, _ = expressed.draws.get(node.name, (0, None))
        call = _call(node, operands, shape, device, stream, numbers)
        name = titles[node.name]
        lines.append(f"{name} = {call}")
        single = len(node.outputs) == 1 and node.op not in _LISTS
        for i in range(len(node.outputs)):
            texts[Ref(node.name, i)] = name if single else f"{name}[{i}]{_widened(node, i)}"

    for number in reference_order(flow, expressed):
        state(number)
    results = [texts[ref] for ref in expressed.outputs]
    lines.append(f"return {results[0]}" if len(results) == 1 else f"return {', '.join(results)}")
    return lines


def reference_order(flow: Dataflow, expressed: Expressed) -> list[int]:
    """The node of each line but the return, after those that it reads."""
    given = set(expressed.inputs)
    order: dict[int, None] = {}

    def state(number: int) -> None:
        for ref in flow.operands[number]:
            if ref not in given and flow.position[ref.node] not in order:
                state(flow.position[ref.node])
        order[number] = None

    for number in _needed(flow, expressed):
        if number not in order and Ref(flow.nodes[number].name) not in given:
            state(number)
    return list(order)


def _needed(flow: Dataflow, expressed: Expressed) -> list[int]:
    """The members that a result depends on, in order."""
    needed = {flow.position[ref.node] for ref in expressed.outputs}
    for number in reversed(expressed.members):
        if number in needed:
            needed.update(flow.position[ref.node] for ref in flow.operands[number])
    return [number for number in expressed.members if number in needed]


def _call(
    node: Node,
    operands: list[str],
    shape: list[str],
    device: str,
    stream: int,
    numbers: Mapping[Hashable, str],
) -> str:
    """One aten call; an in-place op by its functional overload."""
    if node.op in RESHAPES:
        return f"{operands[0]}.reshape({_tuple(shape)})"
    op = REGISTRY[node.op]
    namespace, base, overload = node.op.split(".", 2)
    functional = base[:-1] if node.mutates and base.endswith("_") else base
    remaining = iter(operands)
    raw = [_argument(arg, remaining, numbers) for arg in node.args]
    keywords = [(name, _argument(value, remaining, numbers)) for name, value in node.kwargs]
    if op.reference:
        return _drawn(op, node, raw, stream, _tuple(shape), device)
    written = [_sized(op, arg, place, raw, shape) for place, arg in enumerate(node.args)]
    for name, text in keywords:
        if name == "device":
            written.append(f"device={device}.device")
        elif name not in _DROPPED:
            written.append(f"{name}={text}")
    return f"torch.ops.{namespace}.{functional}.{overload}({', '.join(written)})"


def _drawn(op: Op, node: Node, raw: list[str], stream: int, shape: str, device: str) -> str:
    """A random op with the bits that the kernel draws."""
    written = op.reference.format(*_with_defaults(op, raw), dtype=f"torch.{node.out.dtype}")
    return reference_text(written, node.out.dtype, stream, shape, device)


def _with_defaults(op: Op, raw: list[str]) -> list[str]:
    """Arguments of a call; those that it leaves out have the meaning's defaults."""
    assert op.meaning is not None
    _, *parameters = inspect.signature(op.meaning).parameters.values()
    return [*raw, *(repr(parameter.default) for parameter in parameters[len(raw) :])]


def _sized(op: Op, arg: Arg, place: int, raw: list[str], shape: list[str]) -> str:
    template = op.sizes.get(place)
    if not template or arg is None:
        return raw[place]
    size = " * ".join(shape)
    rank = len(arg) if isinstance(arg, tuple) else 1
    return template.format(*_with_defaults(op, raw), shape=_tuple(shape), size=size, rank=rank)


def _widened(node: Node, number: int) -> str:
    """The call with the statistics of a narrow norm in float32, as on CUDA; a CPU makes
    them narrow."""
    first, tensor = node.outputs[0], node.outputs[number]
    if first is None or tensor is None or first.dtype not in NARROW_FLOATS:
        return ""
    return ".float()" if tensor.dtype == "float32" else ""


def _argument(arg: Arg, operands: Iterator[str], numbers: Mapping[Hashable, str]) -> str:
    if isinstance(arg, Ref):
        return next(operands)
    if isinstance(arg, Symbol):
        return arg.text
    if isinstance(arg, tuple):
        return f"[{', '.join(_argument(item, operands, numbers) for item in arg)}]"
    if isinstance(arg, GivenNumber):
        return numbers[arg.key]
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    return repr(arg)


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
