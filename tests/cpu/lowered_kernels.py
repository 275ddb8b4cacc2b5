"""Emitted kernels in graphs that Inductor lowers for a GPU that is made up: run as a program, in a
folder with a package `mine`. Prints what each scenario saw of the code, as JSON."""

# torch and Triton are partly untyped, emitted files are so altogether.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false, reportMissingTypeStubs=false

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, os.getcwd())

import torch
from scenarios import Facts, report
from torch._dynamo.source import ConstantSource
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

H200 = {
    "major": 9, "multi_processor_count": 132, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
}  # fmt: skip


@contextmanager
def made_up_gpu() -> Iterator[None]:
    """A GPU for what asks for its properties; nothing can run on it."""
    own = SimpleNamespace(**H200, minor=0, name="H200", total_memory=2**37)
    told = DeviceProperties(type="cuda", index=0, cc=90, **H200)
    answers: dict[str, Callable[..., Any]] = {
        "torch.cuda.get_device_properties": lambda *_: own,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_name": lambda *_: "H200",
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
    }
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=told))
        yield


def sizes(env: ShapeEnv | None, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A shape whose first size is a symbol, where there is something that keeps symbols."""
    if env is None:
        return shape
    symbol = env.create_symbol(shape[0], ConstantSource("rows"))
    return (env.create_symintnode(symbol, hint=shape[0]), *shape[1:])


def code_of(name: str, *shapes: tuple[int, ...], symbolic: bool = False, more: Any = ()) -> Facts:
    """What Inductor's code for relu, a kernel and a sum has: kernels that it launches, with the
    constants of each, whether it calls the operator, and the signatures."""
    launcher = getattr(importlib.import_module(f"mine.{name}"), name)

    def function(first: torch.Tensor, *others: Any) -> Any:
        made = launcher.operator(torch.relu(first), *others, *more)
        return [each + 1 for each in made] if isinstance(made, tuple) else made + 1

    env = ShapeEnv() if symbolic else None
    with made_up_gpu(), FakeTensorMode(shape_env=env) as mode:
        given = [torch.empty(sizes(env, shape), device="cuda") for shape in shapes]
        module = make_fx(function)(*given)
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        graph = GraphLowering(module, inputs, shape_env=inputs[0].fake_mode.shape_env)
        with (
            V.set_graph_handler(graph),
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
        ):
            graph.run(*inputs)
            text = graph.codegen()[0].value
    call = text[text.index("def call(") :]
    ours = launcher.operator.name().partition("::")[2]
    return {
        "launched": re.findall(rf"\b({name}\w*)\.run\(", call),
        "called": f"fusion_advisor.{ours}" in call,
        "signatures": re.findall(r"'signature': (\{.*?\})", text),
    }


def one_launch() -> Facts:
    return code_of("softmax", (64, 300))


def two_launches() -> Facts:
    return code_of("split", (80, 200_000))


def results_of_rows() -> Facts:
    return code_of("row_row", (3000, 1300))


def several_results() -> Facts:
    return code_of("carried", (600, 96), (600, 96), (96,))


def free_sizes() -> Facts:
    return code_of("softmax", (64, 300), symbolic=True)


def rounds_twice() -> Facts:
    return code_of("scaled", (64, 300))


def with_assembly() -> Facts:
    return code_of("blocked", (4096, 100_000))


def a_number() -> Facts:
    return code_of("numbered", (8, 100), more=(0.1,))


def beyond_32_bits() -> Facts:
    return code_of("numbered", (70_000, 40_000), more=(0.1,))


def unknown_torch() -> Facts:
    with mock.patch.object(importlib.import_module("mine.fused_runtime"), "KNOWN", False):
        return code_of("another", (64, 300))


if __name__ == "__main__":
    report(
        (
            unknown_torch, one_launch, two_launches, results_of_rows, several_results, free_sizes,
            rounds_twice, with_assembly, beyond_32_bits, a_number,
        ),
        sys.argv[1:],
    )  # fmt: skip
