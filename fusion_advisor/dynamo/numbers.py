"""Numbers that change from call to call, as the length of a cache does, under CUDA graphs.

torch records a CUDA graph for each value of a number that a graph is given, and replays it from the
third call with that value on: where a number counts the calls, nothing is ever replayed. Here such
a number stays outside. The host works out what is made of numbers alone, and a number that a tensor
is computed with goes into a tensor of one element, at an address that stays. A number that decides
a size or what is read or written, or that is computed with floats, stays the graph's.
"""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg

from fusion_advisor.dynamo.rewrites.base import Taken
from fusion_advisor.dynamo.rewrites.nodes import called, copied, from_where, value_of
from fusion_advisor.dynamo.two_graphs import Run
from fusion_advisor.frontend.aot import fake_mode

_log = logging.getLogger("fusion_advisor")

_BY_THE_HOST = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
    *(torch.sym_max, torch.sym_min),
)
"""Functions of numbers alone."""

_WITH_A_TENSOR = (
    *("add", "sub", "mul", "iadd", "isub", "imul", "add_", "sub_", "mul_"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
"""Functions of a tensor and a number that take a tensor of one element as well."""


@dataclass(frozen=True)
class NumbersOutside:
    """Graph of which some numbers stay outside: `module` takes the `inputs` that are no such
    numbers, then a tensor for each value that `host` works out, and gives those results that are no
    such numbers; `host` takes what the whole takes and gives the values and the other results."""

    module: torch.fx.GraphModule
    inputs: list[Any]
    taken: tuple[Taken, ...]
    host: Callable[..., tuple[list[int], list[int]]]
    graph_reads: tuple[int, ...]
    """Places, among the inputs of the whole, of what `module` takes."""
    devices: tuple[torch.device, ...]
    """Device of each value's tensor."""
    of_host: tuple[bool, ...]
    """Whether `host` gives a result of the whole, for each."""

    def around(self, compiled: Run) -> Run:
        """Callable that does what the whole does, with `module` as it was compiled."""
        held = _Held(self.devices)

        def run(*given: Any) -> tuple[Any, ...]:
            values, others = map(iter, self.host(*given))
            tensors = held.hold(list(values))
            results = iter(compiled(*(given[place] for place in self.graph_reads), *tensors))
            return tuple(next(others if by_host else results) for by_host in self.of_host)

        return run


@dataclass
class _Held:
    """Tensors of one element, at addresses that stay, and their values."""

    devices: tuple[torch.device, ...]
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    values: list[int] = field(default_factory=list[int])

    def hold(self, values: list[int]) -> list[torch.Tensor]:
        """Tensors with these values, in the order of what runs on their devices."""
        if len(self.tensors) < len(values):
            pairs = zip(values, self.devices, strict=True)
            with torch.inference_mode(mode=False):  # what is made there is written nowhere else
                self.tensors = [torch.full((), v, dtype=torch.int64, device=d) for v, d in pairs]
            for tensor in self.tensors:  # a graph that Dynamo captures again asks the tensor
                torch._dynamo.mark_static_address(tensor, guard=False)
        else:
            for tensor, before, value in zip(self.tensors, self.values, values, strict=True):
                if before != value:
                    tensor.fill_(value)
        self.values = values
        return self.tensors


def numbers_outside(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> NumbersOutside | None:
    """Leave numbers out of a graph as Dynamo hands it to a backend; the graph that is given stays.
    None where no number can be left out."""
    if not any(isinstance(each, torch.SymInt) for each in inputs):
        return None
    changed = copied(module)
    graph = changed.graph
    _put_known_numbers(graph)
    made_of = _made_of_numbers(graph)
    changing = _changing(graph, made_of)
    if not changing:
        return None
    out = {node for node, numbers in made_of.items() if numbers.intersection(changing)}
    placeholders = list(graph.find_nodes(op="placeholder"))
    held: dict[tuple[torch.fx.Node, torch.device], torch.fx.Node] = {}
    for node in list(graph.nodes):
        number = next((each for each in node.all_input_nodes if each in out), None)
        if number is None or (value := value_of(node)) is None:
            continue
        place = number, value.device
        if place not in held:
            with graph.inserting_after([placeholders[-1], *held.values()][-1]):
                held[place] = _placeholder(graph, place, fake_mode(inputs))
        _read_tensor(node, number, held[place], value)
    results: list[Any] = list(cast(Any, graph.output_node().args[0]))
    values = [number for number, _ in held]
    host = _host(placeholders, made_of, values, [each for each in results if each in out])
    graph.output_node().args = (tuple(each for each in results if each not in out),)
    for node in reversed(list(graph.nodes)):
        if node in out:
            graph.erase_node(node)
    changed.recompile()
    left = [place for place, node in enumerate(placeholders) if node not in out]
    fakes = [node.meta["example_value"] for node in held.values()]
    why = "a CUDA graph serves all its values"
    return NumbersOutside(
        changed,
        [*(inputs[place] for place in left), *fakes],
        tuple(Taken("changing-number", node, f"{node.name}: {why}") for node in changing),
        host,
        tuple(left),
        tuple(device for _, device in held),
        tuple(each in out for each in results),
    )


def _put_known_numbers(graph: torch.fx.Graph) -> None:
    """Put in the numbers of which the guards of a graph leave one value, as of what a window that
    is not yet full has lost."""
    known = dict[torch.fx.Node, int]()
    for node in graph.nodes:
        if node.op == "output":
            continue
        node.args = map_arg(node.args, lambda each: known.get(each, each))
        node.kwargs = map_arg(node.kwargs, lambda each: known.get(each, each))
        number = node.meta.get("example_value")
        if node.op == "placeholder" or not isinstance(number, torch.SymInt):
            continue
        if (value := _known(number)) is not None:
            known[node] = value


def _known(size: int | torch.SymInt) -> int | None:
    """Value of a size or a number that has one under the guards; None where it has several."""
    if not isinstance(size, torch.SymInt):
        return size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower) if bounds.is_singleton() else None


def _made_of_numbers(graph: torch.fx.Graph) -> dict[torch.fx.Node, frozenset[torch.fx.Node]]:
    """Numbers of a graph that are made of those among its inputs alone, each with these."""
    found: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}
    for node in graph.nodes:
        if not isinstance(node.meta.get("example_value"), torch.SymInt):
            continue
        if node.op == "placeholder":
            found[node] = frozenset([node])
        elif node.target in _BY_THE_HOST and all(each in found for each in node.all_input_nodes):
            found[node] = frozenset[torch.fx.Node]().union(
                *map(found.__getitem__, node.all_input_nodes)
            )
    return found


def _changing(
    graph: torch.fx.Graph, made_of: Mapping[torch.fx.Node, frozenset[torch.fx.Node]]
) -> list[torch.fx.Node]:
    """Numbers among the inputs of a graph that it does not have to know: no tensor has them in its
    layout, and whatever reads them, or what is made of them, takes a tensor as well."""
    sizes = set[Any]()
    for node in graph.nodes:
        if (value := value_of(node)) is not None:
            layout = (*value.shape, *value.stride(), value.storage_offset())
            sizes |= free_symbols([each for each in layout if _known(each) is None])
    numbers = [node for node in made_of if node.op == "placeholder"]
    stay = {node for node in numbers if free_symbols(node.meta["example_value"]) & sizes}
    for number, of in made_of.items():
        for user in number.users:
            if user not in made_of and user.op != "output" and not _takes_tensor(user, made_of):
                for each in of - stay:
                    _log.info("a CUDA graph has one value of %s: %s reads it", each, user)
                stay |= of
    return [node for node in numbers if node not in stay]


def _takes_tensor(
    node: torch.fx.Node, made_of: Mapping[torch.fx.Node, frozenset[torch.fx.Node]]
) -> bool:
    """Whether a node that reads a number gives the same for a tensor of one integer: it computes
    integers, of one dtype with either. Beside floats, a tensor would be rounded before."""
    value = value_of(node)
    if value is None or node.kwargs.keys() & {"out", "alpha"}:
        return False
    if called(node, "arange"):
        of = [made_of.get(cast(torch.fx.Node, each)) for each in node.args]
        return len(of) == 2 and of[0] is not None and of[0] == of[1] and _whole(value)
    if not called(node, *_WITH_A_TENSOR) or len(node.args) != 2:
        return False
    other = next((each for each in map(value_of, node.args) if each is not None), None)
    if other is None or not _whole(other):
        return False
    one, like = (
        torch.empty((), dtype=dtype, device="meta") for dtype in (torch.int64, other.dtype)
    )
    return bool(other.dim()) or torch.result_type(like, one) == torch.result_type(like, 1)


def _whole(value: torch.Tensor) -> bool:
    """Whether a tensor has integers that hold any such number, or booleans."""
    return value.dtype in (torch.bool, torch.int32, torch.int64)


def _placeholder(
    graph: torch.fx.Graph, place: tuple[torch.fx.Node, torch.device], fake: FakeTensorMode
) -> torch.fx.Node:
    """Input of a graph for the tensor that holds a number on a device."""
    number, device = place
    made = graph.placeholder(f"{number.name}_on_{device.type}")
    with fake:
        made.meta["example_value"] = torch.empty((), dtype=torch.int64, device=device)
    # AOTAutograd reads this: a CUDA graph does not copy what stays at its address.
    made.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    from_where(made, None)
    return made


def _read_tensor(
    node: torch.fx.Node, number: torch.fx.Node, tensor: torch.fx.Node, value: torch.Tensor
) -> None:
    """Let a node of a graph read a number from its tensor."""
    if not called(node, "arange"):
        node.replace_input_with(number, tensor)
        return
    node.args = (0, value.shape[0])
    with node.graph.inserting_after(node):
        moved = node.graph.call_function(operator.add, (node, tensor))
    moved.meta = dict(node.meta)
    node.replace_all_uses_with(moved, lambda user: user is not moved)


def _host(
    placeholders: Sequence[torch.fx.Node],
    numbers: Iterable[torch.fx.Node],
    values: Sequence[torch.fx.Node],
    results: Sequence[torch.fx.Node],
) -> Callable[..., tuple[list[int], list[int]]]:
    """Function of the inputs of a graph that gives the values of some of its `numbers`, and of
    others."""
    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in dict.fromkeys((*placeholders, *numbers)):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(([copies[each] for each in values], [copies[each] for each in results]))
    graph.eliminate_dead_code()
    return torch.fx.GraphModule({}, graph).forward
