"""Names of tensors in an emitted file: the source's own where it has one, else short op names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fusion_advisor.codegen.eager_reference import reference_order
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.lower import Expressed
from fusion_advisor.ir.graph import Ref
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.base import Plan, Step
from fusion_advisor.schedules.names import Names

_LAYER = re.compile(r"^.*_\d+_(?=[A-Za-z])")
_MADE = re.compile(
    r"\w+_(ptr|size|strides?(_\w+)?)|SHARED|chunks"
    r"|(n|rows?|cols?|rest|index|count|elements|parts?|together)(_?\d+)?"
)
"""Names that files make for places and arguments, which a tensor of the source must not have."""
_SHORT = {"_to_copy": "to", "_fused_rms_norm": "rms_norm", "clone": "copy"}


def wish(flow: Dataflow, ref: Ref) -> str:
    """Name that a tensor would have in a file where nothing else has names."""
    return wished(_name(flow, ref))


def wished(name: str) -> str:
    """Name of the source, or one like it where files have another use for that."""
    return f"{name}_value" if _MADE.fullmatch(name) else name


def titles(flow: Dataflow, expressed: Expressed, names: Names) -> Mapping[str, str]:
    """Name of what each node of a group returns, unique in its file. What a view returns that
    returns several tensors has its op's name."""
    found: dict[str, str] = {}
    for number in reference_order(flow, expressed):
        node = flow.nodes[number]
        several = flow.is_view(number) and len(node.outputs) > 1
        named = _op_name if several else wish
        found[node.name] = names.claim(named(flow, Ref(node.name)))
    return found


def titled(plan: Plan, found: Mapping[str, str]) -> Plan:
    """Copy of a plan whose values are results of nodes under their titles."""
    steps = tuple(_step(step, found) for step in plan.steps)
    return replace(plan, region=_region(plan.region, found), steps=steps)


def _step(step: Step, found: Mapping[str, str]) -> Step:
    phases = tuple(_step(phase, found) for phase in step.phases)
    return replace(step, region=_region(step.region, found), phases=phases)


def _region(region: Region, found: Mapping[str, str]) -> Region:
    labels = {number: found.get(node, node) for number, node in region.labels.items()}
    results = {number: found.get(node, node) for number, node in region.results.items()}
    return replace(region, labels=labels, results=results)


def _name(flow: Dataflow, ref: Ref) -> str:
    """Name in the source; of a view that has none, that of the tensor behind it."""
    number = flow.position[ref.node]
    node = flow.nodes[number]
    if name := flow.source_names.get(ref):
        return name
    if node.kind != "call":
        return node.name if node.kind == "input" else _LAYER.sub("", node.name)
    if flow.is_view(number) and flow.operands[number]:
        return _name(flow, flow.operands[number][0])
    return _op_name(flow, ref)


def _op_name(flow: Dataflow, ref: Ref) -> str:
    """Short name of an op, or of the call of the exported program that is this launch alone."""
    node = flow.nodes[flow.position[ref.node]]
    base = node.op.split(".")[1] if node.op.count(".") > 1 else node.op
    alone = flow.launches_of[node.fx] == 1
    short = re.sub(r"_\d+$", "", node.fx) if alone else _SHORT.get(base, base).strip("_")
    short = re.sub(r"^(native|linalg)_|_forward$", "", short)
    return f"{short}_{ref.output}" if ref.output else short
