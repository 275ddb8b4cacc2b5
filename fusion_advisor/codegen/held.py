"""Sizes that an emitted file is restricted to, because numbers in it may follow from them.

A graph that was captured once does not say which of its numbers follow from sizes. A file is right
at other sizes of a dimension where the model was seen at others, with the same numbers
(`Dataflow.varied`). Elsewhere it serves the captured size of dimensions that its views cut at
numbers, and of an axis whose size a number in it equals, or that of an axis which no input has: its
size is a number there; and where none of these had another size as its numbers were others, of what
had. The reference has the same numbers, and is no way out. A number that is asked for where the
kernel is called (`Dataflow.asked`) follows from nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from math import isclose, prod, sqrt

from fusion_advisor.codegen.eager_reference import RESHAPES, numbers_of, reference_order
from fusion_advisor.cost.dataflow import Dataflow, Variation
from fusion_advisor.fusion.lower import Expressed
from fusion_advisor.ir.graph import Node
from fusion_advisor.ops import REGISTRY

_NAMED = frozenset(
    f"aten.{name}"
    for name in (
        *("permute.default", "transpose.int", "t.default", "cat.default", "stack.default"),
        *("unsqueeze.default", "unsqueeze_.default", "squeeze_.dim", "flip.default"),
        *("alias.default", "detach.default", "lift_fresh.default", "expand.default"),
    )
)
"""Ops whose numbers name dimensions or positions, and ops that are given sizes."""
_TOGETHER = 3
"""Axes of which a number may be the product of sizes, at most."""


def held(
    flow: Dataflow,
    expressed: Expressed,
    free: Collection[int],
    indexed: Collection[tuple[str, int]],
    telling: int,
) -> list[tuple[int, int]]:
    """Dimensions of inputs, by the input's number, in which a file serves the captured size alone,
    and so does its reference. `free` are the axes whose sizes the file reads off its inputs,
    `indexed` the dimensions of the region's inputs that only data indexes; a size below `telling`
    is too common a number to be told by one."""
    nodes = [flow.nodes[number] for number in reference_order(flow, expressed)]
    varied = {
        axis
        for each in flow.varied
        if not _renumbered(each, expressed, free)
        for axis in _axes(each, expressed)
    }
    cuts = any(_cuts(node, expressed, free) for node in nodes)
    spelled = ((node.name, n) for node in nodes if not _places(node) for n in _numbers(node))
    numbers = {abs(n) for name, n in spelled if (name, n) not in flow.asked}
    numbers |= _made(expressed)
    told = _told(numbers, expressed.region.sizes, telling)

    def found() -> list[tuple[int, int]]:
        return [
            (number, d)
            for number, ref in enumerate(expressed.inputs)
            for d, dim in enumerate(expressed.dims[ref])
            if dim and (f"in{number}", d) not in indexed and not varied & {*dim}
            if (cuts and not free_of(dim, free)) or told & {*dim}
        ]

    for each in flow.varied:
        known = any(d in each.dims.get(expressed.inputs[number], ()) for number, d in found())
        if not known and _has_numbers(each, expressed):
            told |= _axes(each, expressed)
    return found()


def _axes(variation: Variation, expressed: Expressed) -> set[int]:
    """The axes that had other sizes: every input that lies along one had another size there. Where
    one alone had, that was broadcast."""
    dims = [(ref, d, dim) for ref in expressed.inputs for d, dim in enumerate(expressed.dims[ref])]
    apart = {ref: variation.dims.get(ref, frozenset[int]()) for ref in expressed.inputs}
    some = {axis for ref, d, dim in dims if d in apart[ref] for axis in dim}
    return some - {axis for ref, d, dim in dims if d not in apart[ref] for axis in dim}


def _renumbered(variation: Variation, expressed: Expressed, free: Collection[int]) -> bool:
    """Whether a set of launches had other numbers at other sizes, or results of sizes that a file
    does not read off its inputs."""
    inside = {ref: dims for ref, dims in expressed.dims.items() if ref not in expressed.inputs}
    return _has_numbers(variation, expressed) or any(
        not free_of(dims[d], free)
        for ref, dims in inside.items()
        for d in variation.given.get(ref, ())
    )


def _has_numbers(variation: Variation, expressed: Expressed) -> bool:
    """Whether a set of launches had other numbers at other sizes."""
    inside = (ref for ref in expressed.dims if ref not in expressed.inputs)
    return any(ref.node in variation.numbers for ref in inside)


def _made(expressed: Expressed) -> set[float]:
    """The sizes of axes that no input has, as those of a tensor that is made like an input."""
    read = {axis for ref in expressed.inputs for dim in expressed.dims[ref] for axis in dim}
    return {float(n) for axis, n in expressed.region.sizes.items() if axis not in read}


def free_of(dim: tuple[int, ...], free: Collection[int]) -> bool:
    """Whether a file reads the size of a dimension off its inputs."""
    return all(axis in free for axis in dim)


def _places(node: Node) -> bool:
    op = REGISTRY.get(node.op)
    return op is None or op.pattern in ("view", "copy", "window")


def _cuts(node: Node, expressed: Expressed, free: Collection[int]) -> bool:
    """Whether a node is given the number at which to cut, or how much to add."""
    if node.op in RESHAPES:
        return any(
            dim and not free_of(dim, free)
            for ref, dims in expressed.dims.items()
            for dim in dims
            if ref.node == node.name
        )
    return _places(node) and node.op not in _NAMED and any(True for _ in _numbers(node))


def _numbers(node: Node) -> Iterator[float]:
    return (n for n in numbers_of(node) if n is not None and not isinstance(n, bool))


def _told(numbers: Collection[float], sizes: Mapping[int, int], telling: int) -> set[int]:
    """The axes whose number of positions a number equals, or one less, its root, or its inverse."""
    found: set[int] = set()
    for count in range(1, min(len(sizes), _TOGETHER) + 1):
        for axes in combinations(sizes, count):
            places = prod(sizes[axis] for axis in axes)
            if places < telling or min(sizes[axis] for axis in axes) < 2:
                continue
            whole = (places, places - 1, sqrt(places))
            forms = [*whole, *(1 / each for each in whole)]
            if any(isclose(form, number, rel_tol=1e-9) for form in forms for number in numbers):
                found |= {*axes}
    return found
