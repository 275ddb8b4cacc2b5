"""The cases: parts of drawn modules that stand alone, and the kernels that replace them."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.codegen.test_inputs import at_full_size
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.fusion.decide import Decision, decide
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.fusion.lower import boundary
from fusion_advisor.ir.graph import Arg, Graph, Node, Ref, Tensor
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_json, to_json

from ..drawn.__main__ import drawn_module
from ..gpu import json_lines
from .operators import drawn

DEVICE = "h200"
SECONDS = 120
"""Of analysis for one module."""


@dataclass(frozen=True)
class Case:
    """A part of a module that stands alone, and the kernel that replaces it.

    `name` is the module and a number or a launch; `graph` has the inputs as its first nodes;
    `ranges` bounds the values of integer inputs, by their node. `text` is empty where no kernel is
    emitted. `accepted` and `gate` are the chapter's verdict and the gate that decides.
    """

    name: str
    graph: str
    launches: int
    bytes: int
    accepted: bool = False
    gate: str = ""
    schedule: str = ""
    entry: str = ""
    text: str = ""
    inputs: tuple[tuple[str, int], ...] = ()
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


def run(arguments: argparse.Namespace) -> int:
    """Every distinct case of the modules of some seeds."""
    jobs = [
        (seed, number, operators)
        for seed in arguments.seeds
        for operators, count in ((False, arguments.count), (True, arguments.operators))
        for number in range(count)
    ]
    kept: dict[str, Case] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, maxtasksperchild=20) as pool:
        for job, (found, failure) in zip(jobs, pool.imap(_cases_of, jobs), strict=True):
            if failure:
                print(f"{job}: {failure}", flush=True)
            for case, key in found:
                kept.setdefault(key, case)
    arguments.out.write_text(json_lines(kept.values()))
    kernels = [case for case in kept.values() if case.text]
    accepted = sum(case.accepted for case in kernels)
    print(f"{len(kept)} cases, {len(kernels)} with a kernel, {accepted} of them accepted")
    return 0


def _cases_of(job: tuple[str, int, bool]) -> tuple[list[tuple[Case, str]], str]:
    """The cases of one module, or of an operator alone, each with what makes it the same as
    another."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    sys.setrecursionlimit(10_000)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return _analysed(*_graph_of(*job)), ""
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        return [], f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)


def _graph_of(seed: str, number: int, operators: bool) -> tuple[str, Graph]:
    import torch

    from fusion_advisor.frontend.child import capture_module
    from fusion_advisor.frontend.user_model import HostFakeMode

    if operators:
        with HostFakeMode(), torch.no_grad():
            name, module, given = drawn(seed, number)
            return name, capture_module(module, (given,))
    name, source = drawn_module(seed, number)
    with HostFakeMode():
        return name, capture_module(source.Model().eval(), tuple(source.get_inputs()))


def _analysed(module: str, graph: Graph) -> list[tuple[Case, str]]:
    rules = load_rulebook()
    flow = dataflow(graph, rules.device(DEVICE))
    grouping = fuse(flow, rules).grouping
    found: list[tuple[Case, str]] = []
    alone: dict[int, None] = {}
    for one in (*grouping.groups, *grouping.candidates):
        if one.decision.subject.plan is None:
            continue
        found.append(_case(flow, one.decision, f"{module}/{len(found)}", rules))
        alone |= dict.fromkeys(one.decision.subject.launches)
    for number, node in enumerate(flow.nodes):
        cost = flow.annotated.costs[node.name]
        if cost.modelled and cost.memory_bound and flow.launches(number) and cost.unit == "cuda":
            alone[number] = None
    seen: set[int] = set()
    for number in alone:
        kind = flow.annotated.classes[flow.nodes[number].name]
        if kind not in seen:
            seen.add(kind)
            name = f"{module}/{flow.nodes[number].name}"
            found.append(_case(flow, decide(flow, [number], rules), name, rules))
    return found


def _case(flow: Dataflow, decision: Decision, name: str, rules: Rulebook) -> tuple[Case, str]:
    subject = decision.subject
    part, renamed = _cut(flow, subject.launches)
    graph = to_json(part)
    made: dict[str, Any] = {}
    inputs: tuple[Ref, ...] = ()
    several = len(subject.launches) > 1
    indexed = any(
        "int" in tensor.dtype
        for node in part.nodes[: len(subject.border.inputs)]
        for tensor in node.outputs
        if tensor
    )
    # A single launch is emitted only to learn how large its indices may be.
    if subject.plan is not None and subject.expressed is not None and (several or indexed):
        kernel = attempt(flow, decision, "fused", rules, full_size=True)
        if isinstance(kernel, str):
            if several:
                print(f"{name}: {kernel}", flush=True)
        else:
            inputs = tuple(renamed[ref] for ref in subject.expressed.inputs if ref in renamed)
            full = at_full_size(kernel)
            pairs = zip(inputs, full.ranges, strict=False)
            made["ranges"] = {ref.node: pair for ref, pair in pairs if pair is not None}
            whole = len(inputs) == len(subject.expressed.inputs)
            if several and not whole:
                print(f"{name}: not emitted: it reads what is cut out as a view alone", flush=True)
            elif several:
                made |= {
                    "entry": kernel.entry,
                    "text": kernel.text,
                    "schedule": subject.plan.schedule,
                    "inputs": tuple((ref.node, ref.output) for ref in inputs),
                }
    deciding = decision.deciding
    case = Case(
        name=name,
        graph=graph,
        launches=len(subject.launches),
        bytes=decision.unfused_bytes,
        accepted=decision.accepted,
        gate=deciding.name if deciding else "",
        **made,
    )
    return case, hashlib.sha256((graph + case.text).encode()).hexdigest()


def _cut(flow: Dataflow, launches: Iterable[int]) -> tuple[Graph, dict[Ref, Ref]]:
    """A set of launches, and the views between them, as a graph of its own; and what each tensor
    that it reads or makes is called there."""
    border = boundary(flow, launches)
    tensors = flow.annotated.tensors
    renamed: dict[Ref, Ref] = {}
    storages: dict[int, int] = {}
    nodes: list[Node] = []

    def lay(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        number = storages.setdefault(tensor.storage, len(storages))
        return Tensor(tensor.shape, tensor.stride, tensor.dtype, number, tensor.offset)

    for ref in border.inputs:
        renamed[ref] = Ref(f"in{len(nodes)}")
        nodes.append(Node(f"in{len(nodes)}", "input", "input", outputs=(lay(tensors[ref]),)))
    for place, number in enumerate(border.members):
        node = flow.nodes[number]
        operands = iter(flow.operands[number])

        def named(arg: Arg, operands: Iterator[Ref] = operands) -> Arg:
            if isinstance(arg, Ref):
                return renamed[next(operands)] if arg in tensors else arg
            if isinstance(arg, tuple):
                return tuple(named(item, operands) for item in arg)
            return arg

        args = tuple(named(arg) for arg in node.args)
        kwargs = tuple((key, named(arg)) for key, arg in node.kwargs)
        outputs = tuple(lay(tensor) for tensor in node.outputs)
        mutates = tuple(storages[s] for s in node.mutates if s in storages)
        nodes.append(Node(f"n{place}", node.op, "call", args, kwargs, outputs, mutates))
        for i in range(len(outputs)):
            renamed[Ref(node.name, i)] = Ref(f"n{place}", i)
    return Graph(tuple(nodes), tuple(renamed[ref] for ref in border.outputs)), renamed


def read(file: Path, only: str = "") -> list[Case]:
    """The cases of a file whose names the pattern `only` is found in."""
    cases = [from_json(Case, line) for line in file.read_text().splitlines()]
    return [case for case in cases if re.search(only, case.name)]


def decided(case: Case, device: Device, rules: Rulebook) -> Decision:
    """Of all launches of a case, as the rules are now."""
    flow = dataflow(from_json(Graph, case.graph), device)
    return decide(flow, [i for i in range(len(flow.nodes)) if flow.launches(i)], rules)
