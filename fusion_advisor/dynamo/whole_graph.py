"""Stage: time a whole graph on the GPU with its kernels and without, and leave the kernels where
they do not make it faster: what wins alone may cost the graph what Inductor would have fused
around it.

Both are timed on operands drawn for this, as kernels are; not a graph that may refuse these, or of
which it is not known what else it does. The times are kept in the user's cache.
"""
# torch carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import operator
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch._guards import tracing
from torch.fx.node import map_arg

from fusion_advisor.dynamo.measured import Tune, apart, drawn_operands, kept_choices
from fusion_advisor.dynamo.processes import Ranks
from fusion_advisor.dynamo.two_graphs import Run
from fusion_advisor.frontend.expansions import describe, hint
from fusion_advisor.measure.clocks import DeviceClock
from fusion_advisor.measure.driver import timing_rules
from fusion_advisor.measure.protocol import Series
from fusion_advisor.measure.search import spread_of
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.kept import entry, put, read
from fusion_advisor.support.kernel_fault import cause


@dataclass(frozen=True)
class GraphTimes:
    """Microseconds of a graph with kernels of ours and as Inductor's alone; `spread_us`: by how
    much rounds differ."""

    ours_us: float
    alone_us: float
    spread_us: float

    def loses(self, rulebook: Rulebook) -> bool:
        """Whether the kernels are left: the graph is not faster with them by as much as it has to
        be, and rounds differ by less than what is missing."""
        missing_us = self.ours_us - rulebook.inductor.whole.value * self.alone_us
        return missing_us > self.spread_us

    def __str__(self) -> str:
        return (
            f"the graph takes {self.ours_us:.1f} us with kernels of ours and"
            f" {self.alone_us:.1f} us without (timed here)"
        )


def graph_times(
    asked: Mapping[str, Any],
    tune: Tune,
    group: Ranks | None,
    rulebook: Rulebook,
    timed: Callable[[], GraphTimes | None],
) -> GraphTimes | None:
    """Times of what is asked: those that an earlier run has kept, or `timed` now, by rank 0 of a
    group for all; None where neither may be, or they could not be timed."""

    def decided() -> dict[str, float] | None:
        file = entry(kept_choices(), asked)
        try:
            kept = read(file)
            return asdict(GraphTimes(**kept))
        except (OSError, ValueError, TypeError):
            found = timed() if tune == "now" else None
        if found is None:
            return None
        put(file, asdict(found), rulebook.cache.tuned.count)
        return asdict(found)

    told = decided() if group is None else group.decided(asked, decided)
    return GraphTimes(**told) if told else None


def said(value: Any) -> str:
    """Input of a graph, as far as its time depends on the input."""
    return str(describe(value) if isinstance(value, torch.Tensor) else value)


def timed_graph(
    compiled: Callable[[], tuple[Run, Run]],
    inputs: Sequence[Any],
    rulebook: Rulebook,
    device: Device,
    gpu: torch.device,
) -> GraphTimes | None:
    """Times, in turn, of a graph that is `compiled` with kernels of ours and without; None where
    the operands would take too much memory, and, with a warning, where it does not compile or
    run."""
    try:
        pair = compiled()
        with apart(gpu), tracing(None), torch.random.fork_rng([gpu]):
            operands = _operands(inputs, rulebook, gpu)
            if operands is None:
                return None
            clock = DeviceClock(timing_rules(rulebook, device))
            runs = [partial(run, *operands) for run in pair]
            turns = clock.turns(runs, rulebook.tuning.screened.count)
            found = [Series(tuple(each)) for each in turns]
            clock.release()
    except Exception as error:  # noqa: BLE001 whatever it is, the prediction stays
        warnings.warn(f"fusion_advisor: the graph is not timed: {cause(error)}", stacklevel=2)
        return None
    ours_us, alone_us = (statistics.median(each.us) for each in found)
    return GraphTimes(ours_us, alone_us, max(map(spread_of, found)))


def _operands(
    inputs: Sequence[Any], rulebook: Rulebook, gpu: torch.device
) -> tuple[Any, ...] | None:
    """Operands for the inputs of a graph, at the sizes of this call."""
    tensors = [v for v in inputs if isinstance(v, torch.Tensor) and v.is_cuda]
    drawn = drawn_operands([describe(each) for each in tensors], rulebook, gpu)
    if drawn is None:
        return None
    left = iter(drawn)

    def operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return hint(value)
        if value.is_cuda:
            return next(left)
        like = describe(value)
        return torch.zeros(like.extent, dtype=value.dtype).as_strided(like.shape, like.stride)

    return tuple(map(operand, inputs))


# -- graphs that run on any operands ---------------------------------------------------------------

_KNOWN = "aten", "prims", "prim", "fusion_advisor"
"""Namespaces of operators that do nothing but compute: no collective calls, which wait for other
processes."""

_REFUSING = ("multinomial", "bernoulli", "poisson", "_assert_async")
"""Operators that stop the GPU where an operand is no probability, no rate, not true."""

_INDICES = "index", "indices", "target"
"""Names of the operands by which operators index; the GPU stops at one that is out of range."""

_PLACES = ("argmax", "argmin", "topk", "sort", "max", "min")
"""Operators whose integers are places of their operand."""

_SAME_ELEMENTS = ("clone", "_to_copy", "reshape", "_unsafe_view", "repeat", "cat", "stack")
"""Operators that give elements of their operands, beside those that give views of them."""


def why_untimed(graph: torch.fx.Graph) -> str:
    """Why a graph is not run on operands that were drawn for it; empty where it may be. Integers
    that it is given are zeros, which index anything; what it computes from them, or from floats,
    may not."""
    for node in graph.nodes:
        called = node.target
        if not isinstance(called, torch._ops.OpOverload):
            continue
        if called.namespace not in _KNOWN:
            return f"it is not known what {called} does"
        if _name(called) in _REFUSING:
            return f"{called} refuses what it is not meant for"
        given = zip(called._schema.arguments, node.args, strict=False)
        named = {argument.name: value for argument, value in given} | dict(node.kwargs)
        for name in named.keys() & {*_INDICES}:
            if not all(map(_indexes, _nodes(named[name]))):
                return f"{node.name} is indexed by what the graph computes"
    return ""


def _indexes(node: torch.fx.Node) -> bool:
    """Whether a tensor of a graph indexes what it is meant for, whatever the graph is given."""
    value, called = node.meta.get("val"), node.target
    if node.op == "placeholder" or not isinstance(value, torch.Tensor):
        return True
    if value.dtype == torch.bool or not _is_given(node):
        return True
    if called is operator.getitem:
        return _name(node.all_input_nodes[0].target) in _PLACES
    if not isinstance(called, torch._ops.OpOverload) or value.dtype.is_floating_point:
        return False
    moved = called._schema._is_view_op() or _name(called) in _SAME_ELEMENTS
    return _name(called) in _PLACES or (moved and all(map(_indexes, node.all_input_nodes)))


def _is_given(node: torch.fx.Node) -> bool:
    """Whether a value hangs on tensors that the graph is given."""
    found, left = set[torch.fx.Node](), [node]
    while left:
        one = left.pop()
        if one not in found and isinstance(one.meta.get("val"), torch.Tensor | tuple | list):
            found.add(one)
            left += one.all_input_nodes
    return any(one.op == "placeholder" for one in found)


def _nodes(value: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    map_arg(value, found.append)
    return found


def _name(called: Any) -> str:
    """Name of an operator without its namespace and overload."""
    packet = called.overloadpacket if isinstance(called, torch._ops.OpOverload) else called
    return getattr(packet, "__name__", "").removesuffix("_")
