"""The cases: parts of captured graphs that stand alone, and the kernels that replace them."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import pickle
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
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

from . import series

DEVICE = "h200"
GOAL = re.compile(r"level[12]_|transformers_(Llama|BERT|GPT-NeoX|ViT|Mixtral)$")
"""The problems that the predictions are judged on."""

SERIES = "series_"
"""What the names of the series' problems begin with."""

ALIKE = 2
"""Cases of one problem with the same operators that the fit sees: a network repeats its blocks."""
SECONDS = 120
"""Of analysis for one graph."""


@dataclass(frozen=True)
class Case:
    """A part of a graph that stands alone, and the kernel that replaces it.

    `name` is the problem and a number; `graph` has the inputs as its first nodes; `ranges` bounds
    the values of integer inputs, by their node. `text` is empty where no kernel is emitted.
    `accepted` and `gate` are the chapter's verdict and the gate that decides; `weight` counts the
    places at which the goal set has this very case.
    """

    name: str
    graph: str
    launches: int
    bytes: int
    weight: int = 1
    accepted: bool = False
    gate: str = ""
    schedule: str = ""
    entry: str = ""
    text: str = ""
    inputs: tuple[tuple[str, int], ...] = ()
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def problem(self) -> str:
        return self.name.split("/", maxsplit=1)[0]

    @property
    def goal(self) -> bool:
        return bool(GOAL.match(self.problem))

    @property
    def of_series(self) -> bool:
        """Is it a pattern of the series?"""
        return self.problem.startswith(SERIES)

    @property
    def reported(self) -> bool:
        """Is it of the half of the goal set that no fit ever sees? By a hash of the problem's name:
        the parts of one problem are alike."""
        return self.goal and hashlib.sha256(self.problem.encode()).digest()[0] % 2 == 0


def run(arguments: argparse.Namespace) -> int:
    """Every distinct case of every graph, weighted; launches of kept cases are cases themselves. Of
    graphs that are neither in the goal set nor of the series the kernels, a few of each kind."""
    files = sorted(arguments.graphs.glob("*.pkl")) or sorted(arguments.graphs.glob("*.json"))
    files = [f for f in files if re.search(arguments.only, f.stem)]
    # The goal set names a case that others have, too.
    files.sort(key=lambda f: not GOAL.match(f.stem))
    kept: dict[str, Case] = {}
    weights: dict[str, int] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, maxtasksperchild=20) as pool:
        uses = [(p.name, use) for p in series.patterns() for use in range(len(p.shapes))]
        sources: list[Source] = [*files, *uses]
        alike: dict[tuple[str, ...], int] = {}
        done = pool.imap(_cases_of, sources)
        for source, (problem, found, failure) in zip(sources, done, strict=True):
            if failure:
                print(f"{problem}: {failure}", flush=True)
            for case, key in found:
                if key not in kept:
                    if isinstance(source, Path) and not case.goal and not _further(case, alike):
                        continue
                    kept[key] = case
                    weights[key] = 0
                if GOAL.match(problem) or not kept[key].goal:
                    weights[key] += case.weight
    with arguments.out.open("w") as out:
        for key, case in kept.items():
            content = {**asdict(case), "weight": weights[key]}
            out.write(json.dumps(content) + "\n")
    kernels = [case for case in kept.values() if case.text]
    accepted = sum(case.accepted for case in kernels)
    print(f"{len(kept)} cases, {len(kernels)} with a kernel, {accepted} of them accepted")
    return 0


def _further(case: Case, alike: dict[tuple[str, ...], int]) -> bool:
    """Is it a kernel, and one of the first few of its problem with the same operators?"""
    nodes = from_json(Graph, case.graph).nodes
    key = (case.problem, case.schedule, *(node.op for node in nodes if node.kind == "call"))
    alike[key] = alike.get(key, 0) + 1
    return bool(case.text) and alike[key] <= ALIKE


Source = Path | tuple[str, int]
"""A file with a graph, or a pattern of the series and the number of its use."""


def _cases_of(source: Source) -> tuple[str, list[tuple[Case, str]], str]:
    """The cases of one graph, each with what makes it the same as another."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    sys.setrecursionlimit(10_000)
    problem = source.stem if isinstance(source, Path) else f"{SERIES}{source[0]}_{source[1]}"
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return problem, _analysed(problem, _graph_of(source)), ""
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        return problem, [], f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)


def _graph_of(source: Source) -> Graph:
    if isinstance(source, Path):
        content = source.read_bytes()
        return pickle.loads(content) if source.suffix == ".pkl" else from_json(Graph, content)
    import torch

    from fusion_advisor.frontend.child import capture_module
    from fusion_advisor.frontend.user_model import HostFakeMode

    name, use = source
    pattern = next(p for p in series.patterns() if p.name == name)
    dtype = torch.bfloat16 if use % 2 else torch.float32
    module = torch.nn.Module()
    module.forward = pattern.function
    with HostFakeMode():
        inputs = tuple(
            torch.empty(shape, dtype=torch.int64 if n in pattern.integers else dtype)
            for n, shape in enumerate(pattern.shapes[use])
        )
    return capture_module(module, inputs)


def _analysed(problem: str, graph: Graph) -> list[tuple[Case, str]]:
    rules = load_rulebook()
    flow = dataflow(graph, rules.device(DEVICE))
    grouping = fuse(flow, rules).grouping
    found: list[tuple[Case, str]] = []
    alone: dict[int, None] = {}
    for one in (*grouping.groups, *grouping.candidates):
        if one.decision.subject.plan is None:
            continue
        name = f"{problem}/{len(found)}"
        found.append(_case(flow, one.decision, name, len(one.instances), rules))
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
            name = f"{problem}/{flow.nodes[number].name}"
            found.append(_case(flow, decide(flow, [number], rules), name, 1, rules))
    return found


def _case(
    flow: Dataflow, decision: Decision, name: str, weight: int, rules: Rulebook
) -> tuple[Case, str]:
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
        weight=weight,
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
    cases = [from_json(Case, line) for line in file.read_text().splitlines()]
    return [case for case in cases if re.search(only, case.name)]


def decided(case: Case, device: Device, rules: Rulebook) -> Decision:
    """Of all launches of a case, as the rules are now."""
    flow = dataflow(from_json(Graph, case.graph), device)
    return decide(flow, [i for i in range(len(flow.nodes)) if flow.launches(i)], rules)
