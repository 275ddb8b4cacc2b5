"""Small functions through the real stages: capture, annotate, decide, emit; for the tests here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.annotate import Cost
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.frontend.expansions import describe
from fusion_advisor.fusion.decide import Decision, decide
from fusion_advisor.ir.graph import Arg, Graph, Node, Ref, Symbol, Tensor
from fusion_advisor.ir.kernel import Kernel, Launch
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped.files import write_kernel

from .spawned import run, run_script

RULES = load_rulebook()
H200 = RULES.device("h200")


def _turned(rules: Rulebook, **schedules: dict[str, float]) -> Rulebook:
    """Rules with other numbers for some schedules."""
    tables = dict(rules.schedules)
    for name, numbers in schedules.items():
        table = tables[name]
        changed = {
            each: getattr(table, each).model_copy(update={"value": value})
            for each, value in numbers.items()
        }
        tables[name] = table.model_copy(update=changed)
    return rules.model_copy(update={"schedules": rules.schedules.model_copy(update=tables)})


FEW = {"programs_per_multiprocessor": 0.0, "busy_multiprocessors": 0.0}
PACKED = _turned(RULES, row=FEW, blocked={"programs_per_multiprocessor": 0.0})
"""A few rows share a program as many do: small inputs show what large ones get."""
BESIDE = _turned(PACKED, row={"across_elements_per_thread": 16.0, "line_bytes": 65536.0})
"""So do they, and many warps share the channels of many rows that lie across memory."""
APART = _turned(RULES, row={"first_piece": 8.0})
"""Short rows are held in two pieces as long ones are."""
SHARING = _turned(
    PACKED,
    cooperative={"least_row_elements": 100.0, "part_bytes": 256.0, "least_elements": 64.0},
    row={"longest_row": 100.0},
)
"""Short rows are shared as long ones are, so that the interpreter is done with them soon."""


class Of(torch.nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


def flow_of(model: Callable[..., object], *inputs: torch.Tensor, mode: str = "eval") -> Dataflow:
    """A function or a module as an annotated graph."""
    module = model if isinstance(model, torch.nn.Module) else Of(model)
    with torch.no_grad():
        graph = capture_module(module, inputs, {}, Scenario(mode=mode))
    return dataflow(graph, H200)


class Tape:
    """A graph written node by node: each call is one launch or view as it stands, no tracer."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._fake = FakeTensorMode()
        self._refs: dict[int, Ref] = {}
        self._alive: list[torch.Tensor] = []
        self._storages: dict[int, int] = {}

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is there before the graph runs, as a fake one on CUDA."""
        with self._fake:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
            )
        name = f"x{len(self.nodes)}"
        self.nodes.append(Node(name, "input", "input", outputs=(self._seen(fake, Ref(name)),)))
        return fake

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds one node; what it returns can be given to the next."""
        with self._fake, torch.no_grad():
            result = target(*args, **kwargs)
        name = f"v{len(self.nodes)}"
        found = result if isinstance(result, (tuple, list)) else (result,)
        named = tuple((key, self._arg(value)) for key, value in kwargs.items())
        ready = tuple(self._arg(arg) for arg in args)
        outputs = tuple(
            self._seen(t, Ref(name, i)) if isinstance(t, torch.Tensor) else None
            for i, t in enumerate(found)
        )
        written = tuple(
            self._storages[arg.untyped_storage()._cdata]
            for arg, formal in zip(args, target._schema.arguments, strict=False)
            if isinstance(arg, torch.Tensor) and formal.is_write
        )
        node = Node(name, str(target), args=ready, kwargs=named, outputs=outputs, mutates=written)
        self.nodes.append(node)
        return result

    def made(self, tensor: torch.Tensor) -> bool:
        """Is it what a node returned, not an input?"""
        return self._refs[id(tensor)].node.startswith("v")

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Which output of which node a fake tensor is."""
        return self._refs[id(tensor)]

    def flow(self, *results: torch.Tensor) -> Dataflow:
        outputs = tuple(self._refs[id(result)] for result in results)
        return dataflow(Graph(tuple(self.nodes), outputs), H200)

    def _seen(self, tensor: torch.Tensor, ref: Ref) -> Tensor:
        self._alive.append(tensor)
        self._refs[id(tensor)] = ref
        key = tensor.untyped_storage()._cdata
        return replace(
            describe(tensor), storage=self._storages.setdefault(key, len(self._storages))
        )

    def _arg(self, value: Any) -> Arg:
        if isinstance(value, torch.Tensor):
            return self._refs[id(value)]
        if isinstance(value, (list, tuple)):
            return tuple(self._arg(item) for item in value)
        if isinstance(value, (torch.dtype, torch.memory_format, torch.device, torch.layout)):
            return Symbol(str(value))
        return value


def launches(flow: Dataflow) -> list[int]:
    return [i for i in range(len(flow.nodes)) if flow.launches(i)]


def costs(flow: Dataflow) -> list[Cost]:
    """What each launch costs, in order."""
    return [flow.annotated.costs[flow.nodes[i].name] for i in launches(flow)]


def decided(flow: Dataflow, rules: Rulebook = PACKED) -> Decision:
    """All launches as one group, accepted or not."""
    return decide(flow, launches(flow), rules)


Group = tuple[Dataflow, Decision, str, Rulebook]
"""What `emit` takes."""


def group_of(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    name: str = "k",
    rules: Rulebook = PACKED,
) -> Group:
    """All launches of a function as one group; it must have a plan."""
    flow = flow_of(function, *inputs)
    decision = decided(flow, rules)
    assert decision.subject.plan is not None, why_not(decision)
    return flow, decision, name, rules


def kernel_of(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    name: str = "k",
    rules: Rulebook = PACKED,
) -> Kernel:
    """All launches of a function as one emitted kernel; it must have a plan."""
    return emit(*group_of(function, *inputs, name=name, rules=rules))


def why_not(decision: Decision) -> str:
    """Why there is no plan."""
    subject = decision.subject
    if subject.problem is not None:
        return str(subject.problem)
    refusals = subject.planned.refusals if subject.planned else ()
    return "; ".join(refusal.why for refusal in refusals)


LOADED = """
import json, os, sys
from pathlib import Path
import torch
from fusion_advisor.shipped.load import load_module
from fusion_advisor.verify.interpreter import install

install()
file = Path(sys.argv[1])
module = load_module(file.read_text(), file.parent)
"""
"""Beginning of scripts for `interpreted` that call a kernel under the interpreter."""


def interpreted(kernel: Kernel, script: str, folder: Path) -> Any:
    """What a script prints as JSON, in a process under the interpreter: its argument is the path
    of the kernel's file."""
    file = folder / f"{kernel.name}.py"
    write_kernel(file, kernel.text)
    return json.loads(run_script(script, str(file)))


_PTX = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

path, name, signature, constants, divisible, warps = {given!r}
sys.path.insert(0, path)
function = getattr(importlib.import_module("emitted.kernel"), name)
multiples = {{(function.arg_names.index(one),): [["tt.divisibility", 16]] for one in divisible}}
source = ASTSource(function, signature, constexprs=constants, attrs=multiples)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": warps}})
print(made.asm["ptx"])
"""


def ptx_of(kernel: Kernel, launch: Launch, folder: Path, **constants: object) -> str:
    """What one launch of a kernel compiles to for Hopper, with other constants where given."""
    write_kernel(folder / "emitted" / "kernel.py", kernel.text)
    given = (
        str(folder), launch.jit_name, dict(launch.signature),
        {**dict(launch.constants), **constants}, launch.divisible, launch.num_warps,
    )  # fmt: skip
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    done = run(
        [sys.executable, "-c", _PTX.format(given=given)],
        cwd=folder,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
