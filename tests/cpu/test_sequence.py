"""A whole graph with kernels in place of its groups computes what the model does, and nothing that
the kernels compute is run beside them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.frontend.replay import ReplayedKernel, replayed
from fusion_advisor.fusion.decide import decide
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.graph import Graph
from fusion_advisor.measure.child import answers
from fusion_advisor.measure.clocks import HostClock
from fusion_advisor.measure.driver import BenchSubject, in_place, measure_model, timing_rules
from fusion_advisor.measure.protocol import (
    KERNEL,
    Measurement,
    ModelJob,
    Replacement,
    Way,
)
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.worker import replied, request

from .regions import H200, RULES, flow_of

TIMING = timing_rules(RULES, H200)


def filled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a kernel reads is filled behind it, and read again."""
    t = torch.logaddexp(torch.remainder(a, b), a)
    first = torch.arange(a.shape[-1], device=a.device) < 3
    e = torch.where(first, t, -float("inf")).softmax(-1)
    t.fill_(0.3)
    return torch.sin(t) + e


class Residual(torch.nn.Module):
    """A convolution, its norm, a sum and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.relu = torch.nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += r
        return self.relu(y)


def stepped(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A product between two kernels is written in place through a view, and its input by neither
    of them."""
    h = torch.sigmoid(x) * y
    z = h @ y.t()
    z[:, :16].mul_(2.0)
    w = torch.tanh(z) * 3.0
    z.add_(1.0)
    return w, torch.exp(z) + 1.0


def rows(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.5


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], set[str]]] = {
    "filled": (
        filled, (rows(512, 512), rows(512, 512)), {"where_where", "softmax", "fill_", "sin"},
    ),
    "residual": (
        Residual().eval(), (rows(8, 16, 32, 32), rows(8, 16, 32, 32)),
        {"batch_norm", "add_", "relu_"},
    ),
    "residual in training": (
        Residual().train(), (rows(8, 16, 32, 32), rows(8, 16, 32, 32)), {"add__1", "relu_"},
    ),
    "stepped": (
        stepped, (rows(256, 512), rows(256, 512)), {"sigmoid", "mul", "tanh", "add_", "exp"},
    ),
}  # fmt: skip


class Asked:
    """In place of the child: keeps the job."""

    def submit(self, job: ModelJob, kind: type[Measurement], timeout_s: float) -> Any:
        del timeout_s
        self.job = job
        found: Future[Measurement] = Future()
        found.set_result(kind("model", "kernel"))
        return found


def replacements(flow: Dataflow) -> list[Replacement]:
    grouping = fuse(flow, RULES).grouping
    subjects = [
        BenchSubject(f"g{n}", "", found.decision, emit(flow, found.decision, f"g{n}", RULES),
                tuple(found.instances))
        for n, found in enumerate(grouping.groups)
    ]  # fmt: skip
    return list(in_place(flow, subjects, RULES))


def replacement_of(flow: Dataflow, *names: str) -> Replacement:
    decision = decide(flow, [flow.position[name] for name in names], RULES)
    kernel = emit(flow, decision, "some", RULES)
    subject = BenchSubject("g1", "", decision, kernel, (decision.subject.launches,))
    (found,) = in_place(flow, [subject], RULES)
    return found


def job_of(flow: Dataflow, replaced: list[Replacement], way: Way = KERNEL) -> ModelJob:
    asked: Any = Asked()
    measure_model(flow, replaced, way, asked, TIMING, 1.0)
    return from_json(ModelJob, to_json(asked.job))


def run(graph: Graph, launchers: tuple[ReplayedKernel, ...], inputs: Any) -> tuple[set[str], Any]:
    """What is called, by the names of the records, and what comes of it."""
    module, _ = replayed(graph, launchers, "cpu", inputs)
    made = {node.name for node in module.graph.nodes if node.op == "call_function"}
    called = made & {node.name for node in graph.nodes}
    return called, module(*(tensor.clone() for tensor in inputs))


@pytest.mark.parametrize("name", CASES)
def test_what_kernels_compute_is_not_run_beside_them(name: str, tmp_path: Path) -> None:
    model, inputs, within = CASES[name]
    flow = flow_of(model, *inputs, mode="train" if "training" in name else "eval")
    replaced = replacements(flow)
    assert replaced
    job = job_of(flow, replaced)
    launchers = tuple(
        ReplayedKernel(load_module(one.text, tmp_path).reference, one.inputs, one.outputs, after)
        for one, after in zip(job.kernels, job.after, strict=True)
    )
    members = {name for one in replaced for name in one.members}
    assert within <= members
    graph = job.graph
    names = [node.name for node in graph.nodes if node.kind != "call" and node.outputs]
    kept: list[tuple[str, torch.Tensor]] = []
    if isinstance(model, torch.nn.Module):
        kept = [*model.named_parameters(), *model.named_buffers()]
    parameters = {key.replace(".", "_"): value for key, value in kept}
    drawn = iter(inputs)
    given = tuple(
        parameters[name].detach() if name in parameters else next(drawn) for name in names
    )
    with torch.no_grad():
        everything, eager = run(graph, (), given)
        assert job.rest
        beside, found = run(job.rest, launchers, given)
        expected = model(*(tensor.clone() for tensor in inputs))
    assert within <= everything
    assert not beside & members
    assert beside | members >= everything
    expected = expected if isinstance(expected, tuple) else (expected,)
    for theirs, plain, ours in zip(expected, eager, found, strict=True):
        assert torch.allclose(plain, theirs, atol=1e-5)
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_kernel_reads_what_is_written_in_place_before_the_write(tmp_path: Path) -> None:
    flow = flow_of(filled, *CASES["filled"][1])
    softmax = replacement_of(flow, "arange", "lt", "where_scalar_tensor", "where_where", "softmax")
    job = job_of(flow, [softmax])
    assert job.rest
    rest = [node.name for node in job.rest.nodes]
    assert job.after[0] <= rest.index("fill_")
    launcher = ReplayedKernel(
        load_module(softmax.text, tmp_path).reference, softmax.inputs, softmax.outputs, job.after[0]
    )
    a, b = CASES["filled"][1]
    beside, found = run(job.rest, (launcher,), (a, b))
    assert beside == {"remainder", "logaddexp", "fill_", "sin", "add"}
    assert torch.allclose(found[0], filled(a, b), atol=1e-6)


# -- the child that times it -----------------------------------------------------------------------


def measured(job: ModelJob, folder: Path) -> Measurement:
    with torch.no_grad():
        reply, failure = replied(request(job), answers(folder, lambda _: HostClock()))
    if failure:
        return Measurement("model", "kernel", failure=failure)
    return from_json(Measurement, reply)


@pytest.mark.parametrize("name", ["filled", "residual", "residual in training"])
def test_a_right_model_has_a_time_and_how_far_it_is_from_eager(name: str, tmp_path: Path) -> None:
    model, inputs, _ = CASES[name]
    flow = flow_of(model, *inputs, mode="train" if "training" in name else "eval")
    replaced = [replace(one, entry="reference") for one in replacements(flow)]
    job = job_of(flow, replaced)
    found = measured(job, tmp_path)
    assert found.failure is None
    assert found.timing is not None
    assert found.error is not None
    assert found.eager_error
    assert found.error <= 2 * found.eager_error + 1e-6


def test_a_model_that_is_too_far_off_says_which_result_and_by_how_much(tmp_path: Path) -> None:
    flow = flow_of(stepped, *CASES["stepped"][1])
    first, second = (replace(one, entry="reference") for one in replacements(flow))
    wrong = second.text.replace("return ", "return 1.001 * ")
    assert wrong != second.text
    job = job_of(flow, [first, replace(second, text=wrong)])
    found = measured(job, tmp_path)
    assert found.timing is None
    assert found.failure
    assert found.failure.startswith("not what eager gives: output 0[")
    assert "error" in found.failure
    assert "allowed" in found.failure


def test_what_is_drawn_at_random_is_not_compared(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.softmax(x.sin() * 2.0, -1)

    flow = flow_of(model, rows(256, 512), mode="train")
    softmax = replacement_of(flow, "sin", "mul", "softmax")
    wrong = softmax.text.replace("return ", "return 2.0 * ")
    found = measured(job_of(flow, [replace(softmax, text=wrong, entry="reference")]), tmp_path)
    assert found.failure is None
    assert found.error is None


def test_a_run_again_reads_the_same_numbers(tmp_path: Path) -> None:
    """What a model writes into its inputs, its statistics say, is not there in the next run."""

    def model(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        held.mul_(3.0).add_(x)
        return torch.softmax(held.sin() * 2.0, -1)

    flow = flow_of(model, rows(256, 512), rows(256, 512))
    replaced = [replace(one, entry="reference") for one in replacements(flow)]
    assert replaced
    found = measured(job_of(flow, replaced), tmp_path)
    assert found.failure is None
