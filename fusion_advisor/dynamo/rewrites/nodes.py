"""Queries of nodes in Dynamo's graph, whichever way a call is spelled, and copies of the graph."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def called(node: Any, *names: str) -> bool:
    """Whether a node calls a function of torch or Python, or a method, of one of these names."""
    if not isinstance(node, torch.fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    return _name(node) in names and (node.op == "call_method" or _is_torchs(node.target))


def _name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_torchs(target: Any) -> bool:
    """Whether a function is torch's or Python's own, and no operator that somebody registered."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).startswith("aten.")
    module = getattr(target, "__module__", None) or ""
    return module.partition(".")[0] in ("", "torch", "_operator", "operator", "builtins", "math")


def value_of(node: Any) -> torch.Tensor | None:
    """Fake tensor of a node; None for what is no plain tensor, as within `torch.vmap`."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


def kept_by_a_module(placeholder: torch.fx.Node) -> bool:
    """Whether an input of Dynamo's graph is a parameter, a buffer or an attribute of a module."""
    source: Any = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return False
    kind = source.guard_source  # a method in older releases
    return cast(Any, kind() if callable(kind) else kind).is_unspecialized_nn_module()


def argument(node: torch.fx.Node, place: int, name: str) -> Any:
    """Argument of a call by its place or name; None where it is not given."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def number_of(node: torch.fx.Node) -> Any:
    """The number that a call of two operands has beside its tensor, or the node of one that is
    known at run time alone; None where both are tensors."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for place, each in enumerate(node.args):
        if value_of(each) is None:
            divided_by = place == 1 or called(node, "mul", "imul", "multiply")
            return each if divided_by else None
    return None


_WRITING = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
"""Functions of `operator` that write into their first operand."""
_COUNTING = ("batch_norm", "instance_norm")
"""Functions that keep running statistics."""


def written(node: torch.fx.Node) -> list[Any]:
    """Nodes whose tensors a node may write into, known by its name, its arguments or its schema;
    every operand of a function that is not torch's. Empty where it writes nothing."""
    if node.op not in ("call_function", "call_method"):
        return []
    name, target = _name(node), node.target
    if "out" in node.kwargs:
        given = node.kwargs["out"]
        return list(given) if isinstance(given, tuple | list) else [given]
    flagged = node.kwargs.get("inplace") or any(each is True for each in node.args[1:])
    if (name.endswith("_") and not name.endswith("__")) or flagged or name in _WRITING:
        first = argument(node, 0, "input")
        return node.all_input_nodes if isinstance(first, tuple | list) else [first]
    known = isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    if name in _COUNTING or (known and _is_mutable(target)):
        return node.all_input_nodes
    foreign = node.op == "call_function" and not known and not _is_torchs(target)
    return node.all_input_nodes if foreign else []


def _is_mutable(target: Any) -> bool:
    """Whether an operator, or an overload of it, writes into an operand."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return any(getattr(target, each)._schema.is_mutable for each in target.overloads())


def writes_into(node: torch.fx.Node, memory: Collection[int | None]) -> bool:
    """Whether a node may write into memory of these storages, or into an unknown one."""
    return any((into := storage(each)) is None or into in memory for each in written(node))


_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
          "_exit_inference_mode", "enter_autocast", "exit_autocast")  # fmt: skip


def switches(node: torch.fx.Node) -> bool:
    """Whether a node switches gradients or autocast."""
    return _name(node) in _MODES


def undisturbed(first: torch.fx.Node, last: torch.fx.Node, read: Sequence[Any]) -> bool:
    """Whether nothing between two nodes writes into the tensors of some nodes, or switches
    gradients or autocast: what is read at the first may as well be read at the last."""
    memory = {storage(each) for each in read}
    node = first.next
    while node is not last:
        if node.op == "root":
            return False  # the last one stands before the first
        if switches(node) or writes_into(node, memory):
            return False
        node = node.next
    return True


def storage(node: Any) -> int | None:
    """The memory of a node's tensor, the same for its views; None for what is no tensor."""
    value = value_of(node)
    return None if value is None else value.untyped_storage()._cdata


def take_out_dead(graph: torch.fx.Graph, unread: Collection[torch.fx.Node]) -> None:
    """Take out what nothing reads any more; what was `unread` before the rewrites stays. What
    writes in place stays where its memory is read later, or is an input's."""
    read = {storage(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in reversed(list(graph.nodes)):
        kept = node.users or node in unread or node.op in ("placeholder", "output")
        if kept or writes_into(node, read):
            read.update(map(storage, node.all_input_nodes))
        else:
            graph.erase_node(node)


def copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy of a graph that is to be changed."""
    made = made_of(module, graph := copy.deepcopy(module.graph))
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        from_where(new, old)
    return made


def made_of(module: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Module of a graph that is made of another one's, with what Dynamo and AOTAutograd say of its
    inputs: which are parameters, above all, since a CUDA graph copies every other one at each
    call."""
    made = torch.fx.GraphModule(module, graph)
    for name, value in vars(module).items():
        vars(made).setdefault(name, value)
    made.meta = module.meta
    return made


def from_where(input_: Any, old: Any) -> None:
    """Say of an input of such a graph where Dynamo has it from: where it has `old` from, None for
    what another part of the graph gives. Read by AOTAutograd, and by this backend."""
    if old is None:
        input_._dynamo_source = None
    elif hasattr(old, "_dynamo_source"):
        input_._dynamo_source = old._dynamo_source


def alike(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether sizes are the same, whatever the symbols among them stand for."""
    return len(these) == len(those) and all(
        statically_known_true(a == b) for a, b in zip(these, those, strict=True)
    )
