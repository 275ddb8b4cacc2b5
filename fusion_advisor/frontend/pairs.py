"""Forward and backward graphs of a group alone: what the forward pass leaves for the backward pass
is chosen for the group, not what eager happens to keep.

The eager statements of a group run under autograd on meta tensors, traced as one graph; torch's
min-cut partitioner parts the graph. Norms, softmax and losses are taken apart first, so that their
statistics can be kept and their results made again. Inputs and results of the group are alive
anyway; beside them the cut prefers the fewest bytes, and makes reductions twice only where keeping
what they give is more than eager keeps, or has no kernels.
"""
# torch.fx and autograd carry Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose, prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion_advisor.frontend.aot import composites, functional, record
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.graph import Tensor as Layout
from fusion_advisor.support.errors import CaptureError

aten = torch.ops.aten

Origin = tuple[Literal["input", "result", "kept", "gradient"], int]
"""Source of an input of the backward graph: an input or a result of the group, a tensor that the
forward graph makes for it, or the gradient of a result; with its number among those."""


@dataclass(frozen=True)
class Parted:
    """Forward and backward graphs of a group.

    The forward graph returns the group's results, then what it keeps. `origins` has the source of
    each input of the backward graph, which returns the gradients of the inputs in `gradients`.
    `kept_bytes` and `eager_bytes` are alive between the passes: here, and in eager.
    """

    forward: Graph
    backward: Graph
    origins: tuple[Origin, ...]
    gradients: tuple[int, ...]
    kept_bytes: int
    eager_bytes: int


def parts(
    reference: Callable[..., Any],
    inputs: Sequence[tuple[str, Layout]],
    wanted: Sequence[int],
    more_kept: float = 0.0,
) -> Iterator[Parted]:
    """Forward and backward graphs of a group's eager statements, with respect to the `wanted`
    inputs: those that keep no more bytes than eager, of which the first makes no reduction twice,
    then those that keep at most the share `more_kept` beyond. Raises CaptureError, which says why
    there are none."""
    layouts = [layout for _, layout in inputs]
    with FakeTensorMode():
        given = [_made(each).requires_grad_(n in wanted) for n, each in enumerate(layouts)]
        results, eager_bytes = _run_eagerly(reference, given)
        roots = [n for n, each in enumerate(results) if each.requires_grad]
        if not roots:
            raise CaptureError("no result of it depends on a tensor that requires a gradient")
        reached: list[int] = []

        def joint(primals: Any, tangents: Any) -> Any:
            with torch.enable_grad():
                made = _as_tuple(reference(*primals))
                leaves, ends = [primals[n] for n in wanted], [made[n] for n in roots]
                found: Any = torch.autograd.grad(ends, leaves, tangents, allow_unused=True)
            pairs = zip(wanted, found, strict=True)
            gradients = {n: each for n, each in pairs if each is not None}
            reached[:] = gradients
            return *made, *gradients.values()

        def step(primals: Any, tangents: Any) -> Any:  # whose names the partitioner goes by
            return functional(joint)(primals, tangents)

        tangents = [torch.empty_like(results[n]).detach() for n in roots]
        traced = make_fx(step, decomposition_table=_table())(given, tangents)
        _leave_out_detached(traced)
        _fill_at_once(traced)
        _count_elements(traced)
    names = [name for name, _ in inputs]
    whole = [n for n, each in enumerate(layouts) if "float" not in each.dtype]
    _make_again(traced, whole)
    made: list[Parted] = []
    for again in (False, True):
        with functorch.patch(
            ban_recompute_used_far_apart=False,
            ban_recompute_long_fusible_chains=False,
            ban_recompute_materialized_backward=False,
            ban_recompute_reductions=not again,
        ):
            graphs = min_cut_rematerialization_partition(
                traced,
                None,
                num_fwd_outputs=len(results),
                static_lifetime_input_indices=whole,
            )
        found = _recorded(*graphs, names, len(results), roots, tuple(reached), eager_bytes)
        if found.kept_bytes <= eager_bytes:
            yield found
        made.append(found)
    least = min(each.kept_bytes for each in made)
    most = eager_bytes * (1 + more_kept)
    if least > most:
        raise CaptureError(f"it would keep {least} B for backward, and eager {eager_bytes} B")
    yield from (each for each in made if eager_bytes < each.kept_bytes <= most)


def _made(layout: Layout) -> Tensor:
    """Meta tensor of a layout: on a CPU autograd would take other ways than on CUDA."""
    dtype = getattr(torch, layout.dtype)
    return torch.empty_strided(layout.shape, layout.stride, dtype=dtype, device="meta")


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _run_eagerly(
    reference: Callable[..., Any], given: list[Tensor]
) -> tuple[tuple[Tensor, ...], int]:
    """Results of the statements, and the bytes that autograd keeps for their backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        return _as_tuple(reference(*given)), sum(kept.values())


# -- operators taken apart -------------------------------------------------------------------------


def _table() -> dict[Any, Callable[..., Any]]:
    """Decompositions of what is one operator to autograd and whose insides the cut may go
    through."""
    whole = (
        *(aten.native_layer_norm, aten.native_layer_norm_backward),
        *(aten.native_group_norm, aten.native_group_norm_backward),
        *(aten._softmax, aten._softmax_backward_data),
        *(aten._log_softmax, aten._log_softmax_backward_data),
        *(aten.nll_loss_forward, aten.nll_loss_backward),
    )
    own = {
        aten.scatter_add.default: partial(_scattered, torch.add),
        aten.scatter.value: partial(_scattered, lambda _, value: value),
        aten.scatter.src: partial(_scattered, lambda _, value: value),
        aten.select_backward.default: _select_backward,
        aten.slice_backward.default: _slice_backward,
        aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    }
    return composites() | get_decompositions(whole) | own


def _scattered(
    put: Callable[[Any, Any], Any], x: Tensor, dim: int, index: Tensor, value: Any
) -> Tensor:
    """A write at one place of each row, by comparison: every element asks whether it is meant."""
    here = _here(x, dim, index)
    return NotImplemented if here is None else torch.where(here, put(x, value), x)


def _here(x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """Whether an element is at the place of its row that the index names; None where the index
    names several places of a row, or is smaller than the tensor otherwise."""
    if not x.dim():
        return None
    dim %= x.dim()
    if index.shape != (*x.shape[:dim], 1, *x.shape[dim + 1 :]):
        return None
    return _positions(x, dim) == index


def _positions(x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return torch.arange(x.shape[dim], device=x.device).reshape(shape)


def _select_backward(gradient: Tensor, sizes: list[int], dim: int, index: int) -> Tensor:
    dim %= len(sizes)
    whole = gradient.unsqueeze(dim).expand(sizes)
    if sizes[dim] == 1:
        return whole
    return torch.where(_positions(whole, dim) == index % sizes[dim], whole, 0)


def _slice_backward(
    gradient: Tensor, sizes: list[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """The gradient with zeros around it and between its elements, where eager copies it into
    zeros."""
    dim, size = dim % len(sizes), sizes[dim]
    start, end, _ = slice(start, end).indices(size)
    later = [0, 0] * (len(sizes) - 1 - dim)
    if step != 1:
        apart = aten.constant_pad_nd.default(gradient.unsqueeze(dim + 1), [*later, 0, step - 1], 0)
        gradient = apart.flatten(dim, dim + 1)
        end = start + gradient.shape[dim]
    return aten.constant_pad_nd.default(gradient, [*later, start, size - end], 0)


def _log_sigmoid_backward(gradient: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """The gradient from the operand alone, as CUDA's kernel makes it: only a CPU's has a buffer."""
    return gradient * torch.sigmoid(-x)


def _leave_out_detached(traced: torch.fx.GraphModule) -> None:
    """Remove `detach`, which the partitioner takes for a value that cannot be made again."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        traced.graph.erase_node(node)


def _fill_at_once(traced: torch.fx.GraphModule) -> None:
    """Make a constant tensor by one call, where autograd fills memory that it has allocated."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.fill.Scalar):
        memory, number = node.args
        if memory.target is aten.empty_like.default:
            node.target = aten.full_like.default
            node.args, node.kwargs = (memory.args[0], number), memory.kwargs


def _count_elements(traced: torch.fx.GraphModule) -> None:
    """Divide the gradients of means and of variances by the number of elements, counted, not by a
    number that is one size's alone."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.div.Scalar):
        spread, number = node.args
        if spread.target is not aten.expand.default:
            continue
        shape, before = spread.meta["val"].shape, spread.args[0].meta["val"].shape
        before = (1,) * (len(shape) - len(before)) + tuple(before)
        dims = [dim for dim, size in enumerate(before) if size == 1 and shape[dim] > 1]
        if number == prod(shape[dim] for dim in dims):
            _divide(node, spread, spread, dims, 0)
    variances = [
        (each.args[0], each.kwargs.get("correction"))
        for target in (aten.var.correction, aten.std.correction, aten.var_mean.correction)
        for each in traced.graph.find_nodes(op="call_function", target=target)
    ]
    for node in traced.graph.find_nodes(op="call_function", target=aten.mul.Scalar):
        spread, number = node.args
        mean = _mean_beside(node)
        for x, correction in variances if mean else ():
            fewer = 1 if correction is None else correction
            dims = mean.args[1]
            counted = prod(x.meta["val"].shape[dim] for dim in dims) - fewer
            if x is mean.args[0] and counted > 0 and isclose(number, 2 / counted):
                with traced.graph.inserting_before(node):
                    twice = _put("twice", aten.mul.Scalar, spread, 2)
                _divide(node, twice, x, dims, fewer)
                break


def _mean_beside(node: torch.fx.Node) -> Any:
    """The mean whose difference from a tensor is multiplied with what a node gives, as in the
    gradient of a variance; None where none is."""
    for user in node.users:
        if user.target is aten.mul.Tensor and user.args[0] is node:
            apart: Any = user.args[1]
            if isinstance(apart, torch.fx.Node) and apart.target is aten.sub.Tensor:
                mean = apart.args[1]
                if isinstance(mean, torch.fx.Node) and mean.target is aten.mean.dim:
                    return mean
    return None


def _divide(
    node: torch.fx.Node, above: torch.fx.Node, x: torch.fx.Node, dims: list[int], fewer: float
) -> None:
    """Put a quotient in a node's place: of a tensor and the number of elements of `x` along `dims`,
    `fewer` less."""
    dtype = node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    with node.graph.inserting_before(node):
        ones = _put("ones", aten.ones_like.default, x, dtype=wide)
        numel = _put("numel", aten.sum.dim_IntList, ones, dims, True)
        if fewer:
            numel = _put("numel", aten.sub.Tensor, numel, fewer)
        share = _put("share", aten.div.Tensor, above, numel)
        if share.meta["val"].dtype is not dtype:
            share = _put("share", aten._to_copy.default, share, dtype=dtype)
    node.replace_all_uses_with(share)
    node.graph.erase_node(node)


def _put(
    name: str, operator: Any, first: torch.fx.Node, *args: Any, **kwargs: Any
) -> torch.fx.Node:
    """A call where its first operand's graph inserts, with its result's layout."""
    given = (first, *args)
    made = first.graph.create_node("call_function", operator, given, kwargs, name)
    values = (arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in given)
    made.meta["val"] = operator(*values, **kwargs)
    return made


def _make_again(traced: torch.fx.GraphModule, whole: Sequence[int]) -> None:
    """Mark to be made again what follows from labels and indices alone, which live for the step,
    and from no tensor at all, such as counts: the partitioner takes a comparison of labels, which
    is smaller than these, for a reduction, and no kernel makes it beside results of other shapes.
    A sum that is one number is kept: no kernel makes it beside sums along rows."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    again = {placeholders[n] for n in whole}
    counts: set[torch.fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        alike = node.target in (aten.ones_like.default, aten.zeros_like.default)
        operands = [] if alike else node.all_input_nodes
        whole_sum = _places(node) == 1 < max(map(_places, operands), default=1)
        if counts.issuperset(operands):
            counts.add(node)
        elif not whole_sum and (not again.issuperset(operands) or node.target in _SUMS):
            continue
        way = CheckpointPolicy.MUST_SAVE
        if node in counts or not whole_sum:
            again.add(node)
            way = CheckpointPolicy.PREFER_RECOMPUTE
        node.meta |= {"recompute": way, "ac_graph_id": 0}


_SUMS = aten.sum.default, aten.sum.dim_IntList


def _places(node: torch.fx.Node) -> int:
    """Elements of a node's result; 0 where it has several results."""
    made = node.meta["val"]
    return made.numel() if isinstance(made, Tensor) else 0


# -- the two graphs as records ---------------------------------------------------------------------


def _recorded(
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    names: Sequence[str],
    results: int,
    roots: Sequence[int],
    gradients: tuple[int, ...],
    eager_bytes: int,
) -> Parted:
    """Both graphs under the names of the group's inputs, with the source of what backward reads."""
    inputs = forward.graph.find_nodes(op="placeholder")
    (output,) = forward.graph.find_nodes(op="output")
    made, saved = output.args[0][:results], output.args[0][results:]
    kept = [each for each in saved if each not in (*inputs, *made)]
    if not all(isinstance(each, torch.fx.Node) for each in (*made, *kept)):
        raise CaptureError("it returns a number")
    if {*made} & {*inputs} or len({*made}) < len(made):
        raise CaptureError("one of its results is an input, or two of them are one tensor")
    known: dict[str, Origin] = {}
    for number, node in enumerate(inputs):
        known[node.name] = "input", number
    for number, node in enumerate(made):
        known[node.name] = "result", number
    for number, node in enumerate(kept):
        known[node.name] = "kept", number
    for number, root in enumerate(roots, 1):
        known[f"tangents_{number}"] = "gradient", root
    read = backward.graph.find_nodes(op="placeholder")
    read_names = [node.name for node in read]
    output.args = ((*made, *kept),)
    for module in (forward, backward):
        for node in module.graph.find_nodes(op="placeholder"):
            kind, number = known[node.name]
            if kind == "input":
                _rename(node, names[number])
            elif kind == "gradient":
                _rename(node, "gradient" if len(roots) == 1 else f"gradient_{number}")
        module.recompile()
    alive: dict[int, int] = {}
    for tensor in (node.meta["val"] for node in saved):
        storage = tensor.untyped_storage()
        elements = min(tensor.numel() * tensor.itemsize, storage.nbytes())  # a view may skip some
        alive[storage._cdata] = max(elements, alive.get(storage._cdata, 0))
    return Parted(
        record(forward).graph,
        record(backward).graph,
        tuple(known[name] for name in read_names),
        gradients,
        sum(alive.values()),
        eager_bytes,
    )


def _rename(node: torch.fx.Node, name: str) -> None:
    """Name a placeholder, whose name is its argument's."""
    node._rename(name)
    node.target = node.name
