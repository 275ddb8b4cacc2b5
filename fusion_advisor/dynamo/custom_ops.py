"""Calls of kernels in the backend's graphs: places of an ATen graph become calls of the operator
that each emitted file registers for its launcher (`shipped/fused_runtime.py`).
"""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, cast
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._library.utils import get_layout_constraint_tag
from torch.fx.experimental.symbolic_shapes import guard_scalar, statically_known_true
from torch.fx.node import map_arg

from fusion_advisor.codegen.kernel_file import fixed_axes, origins
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.dynamo.partition import Occurrence
from fusion_advisor.dynamo.rewrites.nodes import alike, kept_by_a_module
from fusion_advisor.frontend.aot import Lowered, take_apart
from fusion_advisor.frontend.expansions import describe, symbolic
from fusion_advisor.fusion.lower import Expressed
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.ops import REGISTRY
from fusion_advisor.shipped.load import load_module, process_folder

_SIZES_ALONE = ("view", "creation", "allocation")
"""Patterns of ops that take sizes for nothing but the shape of their result."""


class NotReplaceable(Exception):
    """Raised where a place cannot be replaced: one line says why."""


def substitute(
    lowered: Lowered,
    flow: Dataflow,
    places: Sequence[Occurrence],
    *,
    anywhere: bool,
    package: str = "",
) -> list[Occurrence]:
    """Replace the places that have a kernel by calls of the kernel, in the graph itself; returns
    the places as they are then. A place whose kernel cannot be called there stays as it is, and
    says why. `anywhere`: tensors may be on another device than a GPU. `package`: the package that
    the operators are named after; without one, that of all kernels of this process."""
    done: list[Occurrence] = []
    for place in places:
        if place.kernel is None:
            done.append(place)
            continue
        try:
            _replace(lowered, flow, place, place.kernel, anywhere=anywhere, package=package)
        except NotReplaceable as why:
            place = replace(place, kernel=None, why=str(why))
        done.append(place)
    stable_topological_sort(lowered.module.graph)  # nothing moves behind a write, which are last
    lowered.module.graph.eliminate_dead_code()
    lowered.module.recompile()
    return done


def introduce(graph: torch.fx.Graph) -> None:
    """Tell Inductor that this package's operators in a graph are called as they are. It would find
    out: but up to PyTorch 2.11 it then spells out all that makes the operands, for a message that
    nobody reads, which takes minutes where one call's results reach the next."""
    for node in graph.nodes:
        called = node.target
        ours = isinstance(called, torch._ops.OpOverload) and called.namespace == "fusion_advisor"
        if ours and called not in lowerings:
            tag = get_layout_constraint_tag(called, with_default=True)
            make_fallback(called, tag_to_layout_constraint(tag), warn=False)


def loosen_views(module: torch.fx.GraphModule) -> None:
    """Let views of a graph without writes be copies where their operands lie otherwise than in
    eager: Inductor's decompositions decide that, as of a `cat` with an empty part."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    module.recompile()


def _replace(
    lowered: Lowered,
    flow: Dataflow,
    place: Occurrence,
    kernel: Kernel,
    *,
    anywhere: bool,
    package: str,
) -> None:
    """Replace one place by a call of its kernel. Raises NotReplaceable before anything is
    changed."""
    expressed = place.decision.subject.expressed
    assert expressed is not None
    if expressed.draws:
        raise NotReplaceable(
            "draws random numbers, which torch.compile takes from torch's own generator"
        )
    taken = [_node_of(lowered, flow, ref) for ref in expressed.inputs]
    made = [_node_of(lowered, flow, ref) for ref in expressed.outputs]
    _check_device([*taken, *made], anywhere=anywhere)
    _check_layouts(flow, expressed, taken)
    _check_sizes(lowered, place, expressed)
    kept = _kept_numbers(lowered, flow, expressed)
    module = loaded(kernel.text, f"{package}.{kernel.entry}" if package else "")
    called = getattr(module, kernel.entry).operator
    values = _fake_results(called, taken, made, anywhere=anywhere)
    for number in kept:
        guard_scalar(number)  # as torch itself fixes them where an operator asks for a number
    graph = lowered.module.graph
    # Put in order later, since what it takes may stand behind; but before what is written in place.
    with graph.inserting_before(made[0]):
        call = graph.call_function(called, tuple(taken))
        call.meta = {**made[0].meta, "val": values[0] if len(values) == 1 else values}
        for number, (ref, old) in enumerate(zip(expressed.outputs, made, strict=True)):
            new = call
            if len(made) > 1:
                new = graph.call_function(operator.getitem, (call, number))
                new.meta = {**old.meta, "val": values[number]}
            old.replace_all_uses_with(new)
            lowered.origins[ref] = new


def _node_of(lowered: Lowered, flow: Dataflow, ref: Ref) -> torch.fx.Node:
    launch = flow.nodes[flow.position[ref.node]]
    if ref not in lowered.origins:
        take_apart(lowered, launch.fx)
    if ref not in lowered.origins:
        raise NotReplaceable(
            f"{launch.op} is a part of one call in the graph, which cannot be cut there"
        )
    return lowered.origins[ref]


def _check_device(nodes: Sequence[torch.fx.Node], *, anywhere: bool) -> None:
    devices = {node.meta["val"].device for node in nodes}
    if len(devices) > 1:
        raise NotReplaceable(f"its tensors are on {' and '.join(sorted(map(str, devices)))}")
    if {device.type for device in devices} != {"cuda"} and not anywhere:
        raise NotReplaceable(f"its tensors are on {devices.pop()}")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_layouts(flow: Dataflow, expressed: Expressed, taken: Sequence[torch.fx.Node]) -> None:
    """Raise NotReplaceable unless the graph's tensors lie as the records have them: a kernel
    serves one pattern of strides."""
    for ref, node in zip(expressed.inputs, taken, strict=True):
        recorded, found = flow.annotated.tensors[ref], describe(node.meta["val"])
        steps = zip(recorded.shape, recorded.stride, found.stride, strict=True)
        if recorded.shape != found.shape or any(n > 1 and a != b for n, a, b in steps):
            raise NotReplaceable(f"{ref.node} has strides {found.stride}, not {recorded.stride}")


def _kept_numbers(lowered: Lowered, flow: Dataflow, expressed: Expressed) -> list[torch.SymFloat]:
    """Symbolic numbers that the kernel has as constants: the numbers that the model keeps (an eps,
    a scale). Raises NotReplaceable for a number that follows from a size or that the caller
    gives."""
    kept: list[torch.SymFloat] = []
    for name in dict.fromkeys(ref.node for ref in expressed.dims if ref not in expressed.inputs):
        node = lowered.origins.get(Ref(name))
        op = REGISTRY.get(flow.nodes[flow.position[name]].op)
        shapes = op is not None and op.pattern in _SIZES_ALONE
        for argument in node.all_input_nodes if node is not None else ():
            value = argument.meta.get("val")
            if isinstance(value, torch.SymFloat) and _is_kept_by_the_model(argument):
                kept.append(value)
            elif isinstance(value, torch.SymInt) and shapes:
                continue  # `_check_sizes` has seen to it
            elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise NotReplaceable(
                    f"{name} computes with {value}, which changes from call to call"
                )
    return kept


def _is_kept_by_the_model(number: torch.fx.Node) -> bool:
    """Whether the number is an attribute of a module, which Dynamo passes as a tensor of
    float64."""
    given = number.all_input_nodes
    read = number.target is torch.ops.aten._local_scalar_dense.default
    return read and len(given) == 1 and kept_by_a_module(given[0])


def _check_sizes(lowered: Lowered, place: Occurrence, expressed: Expressed) -> None:
    """Raise NotReplaceable unless every symbolic size inside is the kernel's function of its
    inputs' sizes, for all sizes; not merely equal to it at the sizes of this call."""
    plan, region = place.decision.subject.plan, expressed.region
    assert plan is not None
    nodes = {ref: lowered.origins[ref] for ref in expressed.dims if ref in lowered.origins}
    values = {ref: node.meta["val"] for ref, node in nodes.items()}
    if not any(symbolic(value.shape) for value in values.values()):
        return
    sizes: dict[int, Any] = dict(region.sizes)
    for axis, (number, d) in origins(region, fixed_axes(plan)).items():
        sizes[axis] = values[expressed.inputs[number]].shape[d]
    crossing = {*expressed.inputs, *expressed.outputs}
    for ref, value in values.items():
        for dim, size in zip(expressed.dims[ref], value.shape, strict=True):
            if not isinstance(size, torch.SymInt) or not (dim or ref in crossing):
                continue
            known = all(axis in sizes for axis in dim)
            if not (known or ref in crossing):
                continue  # nothing walks there
            here = prod(sizes[axis] for axis in dim) if dim and known else None
            if here is None or not statically_known_true(here == size):
                raise NotReplaceable(
                    f"serves one size of {ref.node} alone, where the graph has {size}"
                )


# -- operators -------------------------------------------------------------------------------------


def _fake_results(
    called: Any,
    taken: Sequence[torch.fx.Node],
    made: Sequence[torch.fx.Node],
    *,
    anywhere: bool,
) -> tuple[torch.Tensor, ...]:
    """Results of the kernel on fake tensors. Raises NotReplaceable where they differ from
    the graph's in their place, unless they lie otherwise and nobody sees it."""
    given = [node.meta["val"] for node in taken]
    # A launcher takes tensors of any device where kernels are interpreted; here it launches none.
    served = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if anywhere else {})
    with given[0].fake_mode, enable_python_dispatcher(), served:
        results = called(*given)
    results = results if isinstance(results, tuple) else (results,)
    for found, node in zip(results, made, strict=True):
        wanted = node.meta["val"]
        same = found.dtype == wanted.dtype and alike(found.shape, wanted.shape)
        if not same or not (_lies_as(found, wanted) or _unseen(node, found)):
            raise NotReplaceable(f"{node.name} would be {_said(found)}, not {_said(wanted)}")
    return results


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(
        statically_known_true(n == 1) or statically_known_true(a == b)
        for n, a, b in zip(other.shape, one.stride(), other.stride(), strict=True)
    )


def _unseen(node: torch.fx.Node, found: torch.Tensor) -> bool:
    """Whether every reader of a node gives what it gave where the node is `found`, which lies
    otherwise in memory. A part of a tensor that is written in place has the steps of the whole in a
    functional graph, and is then put into the whole, whatever its steps."""
    for user in node.users:
        reader: Any = user.target
        if getattr(reader, "namespace", "") != "aten":
            return False  # the graph's caller, or a kernel for the strides that it was made for

        def given(argument: torch.fx.Node) -> Any:
            return found if argument is node else argument.meta["val"]

        wanted: Any = user.meta["val"]
        if not isinstance(wanted, torch.Tensor):
            return False
        with cast(Any, wanted).fake_mode, enable_python_dispatcher():
            read = reader(*map_arg(user.args, given), **map_arg(user.kwargs, given))
        if not _lies_as(read, wanted):
            return False
    return True


def _said(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} of strides {tuple(tensor.stride())}"


@cache
def loaded(text: str, name: str = "") -> Any:
    """Module of an emitted file. The name of its operator holds a hash of the text, so that
    Inductor's cache on disk never meets another kernel; with `name`, such as `package.kernel`, the
    package's, too."""
    if interpreted():
        from fusion_advisor.verify.interpreter import install  # needs Triton

        install()
    return load_module(text, process_folder(), name)
