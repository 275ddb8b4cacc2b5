"""Kernels in a program of `torch.export`: places of its graph become calls of the operators that a
package of kernels registers. What is left runs as eager launches it, or as whoever loads the
program compiles it.
"""
# torch.export and torch.fx carry Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from fusion_advisor.dynamo.backend import Outcome
from fusion_advisor.dynamo.custom_ops import substitute
from fusion_advisor.dynamo.partition import InnerCompiler, divide
from fusion_advisor.dynamo.rewrites import Rewritten, rewrite
from fusion_advisor.frontend.aot import composites, record
from fusion_advisor.frontend.decompositions import eager_dropout
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.rulebook.schema import Device, Rulebook

Proven = Callable[[Sequence[Kernel]], Sequence[str]]
"""Function that says of each kernel why it may not run; "" of one that may."""


def with_kernels(
    program: ExportedProgram, device: Device, rulebook: Rulebook, package: str, proven: Proven
) -> tuple[ExportedProgram, Outcome]:
    """Put the kernels of all accepted groups into a program, whose operators are named after a
    package; returns the new program and what was done. The program that is given is used up.
    Raises CaptureError where its graph cannot be replaced part by part."""
    rewritten = _rewritten(program, rulebook)
    with eager_dropout():
        program = program.run_decompositions(composites())  # what CUDA runs as several kernels
    lowered = record(program.graph_module)
    before = _results(program)
    division = divide(lowered.graph, device, rulebook, InnerCompiler(take_all=True), ())
    kernels = list(dict.fromkeys(p.kernel for p in division.places if p.kernel))
    why = dict(zip(kernels, proven(kernels), strict=True))
    files = {kernel.entry: kernel for kernel in reversed(kernels)}
    why |= {k: "a kernel for other strides has its name" for k in kernels if files[k.entry] != k}
    places = [
        replace(place, kernel=None, why=why[place.kernel])
        if place.kernel and why[place.kernel]
        else place
        for place in division.places
    ]
    done = substitute(lowered, division.flow, places, anywhere=True, package=package)
    names = dict(zip(before, _results(program), strict=True))
    outcome = Outcome(tuple(done), division.report, rewrites=rewritten.taken)
    return _again(program, names), outcome


def _rewritten(program: ExportedProgram, rulebook: Rulebook) -> Rewritten:
    """Rewrite a program's graph, where the meaning is the same for all inputs; its operators stay
    such as a program may have."""
    module = program.graph_module
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    rewritten = rewrite(module, inputs, rulebook, conditions=False, read="never")
    graph = rewritten.module.graph
    if not all(_may_be_exported(node) for node in graph.nodes):
        return Rewritten(module)
    module.graph = graph
    return rewritten


def _may_be_exported(node: torch.fx.Node) -> bool:
    if node.op == "call_function" and node.target is operator.getitem:
        return isinstance(node.args[1], int)
    return node.op != "call_method"


def _results(program: ExportedProgram) -> list[str]:
    """Names of the nodes that a program returns."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    return [getattr(node, "name", "") for node in output.args[0]]


def _again(program: ExportedProgram, names: dict[str, str]) -> ExportedProgram:
    """The program as its graph is now, where results have other names."""
    signature = program.graph_signature
    results = [
        replace(each, arg=replace(each.arg, name=names.get(each.arg.name, each.arg.name)))
        for each in signature.output_specs
    ]
    made: Any = ExportedProgram(
        program.graph_module,
        program.graph_module.graph,
        ExportGraphSignature(signature.input_specs, results),
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        constants=program.constants,
    )
    return made
