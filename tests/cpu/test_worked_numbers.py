"""CHAPTER.md's worked numbers, from their source through the real pipeline, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.cost.annotate import Annotated
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.fusion.components import DecidedSet, Grouping
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook

from .regions import Of

M, N = 1024, 4096
RULES = load_rulebook()


def analysed(
    function: Callable[..., object], *inputs: torch.Tensor, device: str = "h200"
) -> tuple[Annotated, Dataflow, Grouping[DecidedSet]]:
    with torch.no_grad():
        graph = capture_module(Of(function), inputs, {}, Scenario())
    flow = dataflow(graph, RULES.device(device))
    return flow.annotated, flow, fuse(flow, RULES).grouping


def full() -> torch.Tensor:
    return torch.empty(M, N)


def vector() -> torch.Tensor:
    return torch.empty(N)


def softmax(x):
    m = x.max(dim=1)[0]
    z = x - m[:, None]
    e = torch.exp(z)
    return e / e.sum(dim=1)[:, None]


def exp_share(x):
    z = torch.exp(x) + 1.0
    return z / z.sum(-1, keepdim=True)


def layer_norm(x, g, b):
    mu = x.mean(-1, keepdim=True)
    c = x - mu
    v = (c * c).mean(-1, keepdim=True)
    return c * torch.rsqrt(v + 1e-5) * g + b


def rms_norm(h, g):
    v = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(v + 1e-6) * g


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


@dataclass(frozen=True)
class Row:
    name: str
    function: Callable[..., object]
    inputs: tuple[Callable[[], torch.Tensor], ...]
    kernels: int
    read: int
    written: int
    fused: int
    ratio: float


ROWS = [
    Row("softmax", softmax, (full,), 5, 83_894_272, 50_348_032, 33_554_432, 4.0007),
    Row("exp share", exp_share, (full,), 4, 67_112_960, 50_335_744, 33_554_432, 3.5002),
    Row("layer norm", layer_norm, (full, vector, vector), 9, 117_489_664, 83_902_464, 33_587_200,
        5.9961),
    Row("residual layer norm", lambda x, r, g, b: layer_norm(x + r, g, b),
        (full, full, vector, vector), 10, 151_044_096, 100_679_680, 50_364_416, 4.9980),
    Row("rms norm", rms_norm, (full, vector), 6, 67_137_536, 50_343_936, 33_570_816, 3.4995),
    Row("residual rms norm", lambda x, r, g: rms_norm(x + r, g), (full, full, vector), 7,
        100_691_968, 67_121_152, 50_348_032, 3.3331),
    Row("gelu of a full sum", lambda x, b: F.gelu(x + b), (full, full), 2, 50_331_648, 33_554_432,
        50_331_648, 1.6667),
    Row("relu of a bias", lambda x, b: F.relu(x + b), (full, vector), 2, 33_570_816, 33_554_432,
        33_570_816, 1.9995),
    Row("tanh gelu", tanh_gelu, (full,), 9, 218_103_808, 150_994_944, 33_554_432, 11.0),
    Row("swiglu", lambda a, b: F.silu(a) * b, (full, full), 2, 50_331_648, 33_554_432, 50_331_648,
        1.6667),
    Row("cos cos", lambda x: x.cos().cos(), (full,), 2, 33_554_432, 33_554_432, 33_554_432, 2.0),
    Row("at the limit", lambda a, b, c: (a + b) * c, (full, full, full), 2, 67_108_864, 33_554_432,
        67_108_864, 1.5),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_worked_number(row: Row) -> None:
    annotated, _, grouping = analysed(row.function, *(make() for make in row.inputs))
    costs = [annotated.costs[node.name] for node in annotated.graph.nodes]
    assert sum(cost.launches for cost in costs) == row.kernels
    assert sum(cost.bytes_read for cost in costs) == row.read
    assert sum(cost.bytes_written for cost in costs) == row.written
    (found,) = grouping.groups
    assert found.decision.accepted
    assert found.decision.fused_bytes == row.fused
    assert found.decision.unfused_bytes / found.decision.fused_bytes == pytest.approx(
        row.ratio, abs=5e-5
    )


def _only_candidate(grouping: Grouping[DecidedSet]) -> Decision:
    assert not grouping.groups
    (found,) = grouping.candidates
    return found.decision


def test_native_norm_with_both_outputs_fails_on_traffic() -> None:
    def both(x, r, g):
        h = x + r
        return h, F.rms_norm(h, (N,), g)

    annotated, _, grouping = analysed(both, full(), full(), vector())
    assert sum(cost.launches for cost in annotated.costs.values()) == 2
    decision = _only_candidate(grouping)
    assert decision.deciding is not None
    assert decision.deciding.name == "traffic-saving"
    assert decision.deciding.measured == pytest.approx(1.25, abs=1e-3)


def test_residual_norm_silu_in_half_precision() -> None:
    shape = (4, 2048, 4096)

    def block(x, r, g):
        y = F.rms_norm(x + r, (4096,), g)
        return y * torch.sigmoid(y)

    x, r = torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.float16)
    gamma = torch.empty(4096, dtype=torch.float16)
    annotated, _, grouping = analysed(block, x, r, gamma)
    assert sum(cost.launches for cost in annotated.costs.values()) == 4
    (found,) = grouping.groups
    assert found.decision.fused_bytes == 201_326_592 + 4096 * 2
    assert found.decision.unfused_bytes / found.decision.fused_bytes == pytest.approx(10 / 3, 1e-3)


def test_residual_norm_with_native_silu_is_seven_passes() -> None:
    shape = (4, 2048, 4096)
    x, r = torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.float16)
    gamma = torch.empty(4096, dtype=torch.float16)
    _, _, grouping = analysed(lambda x, r, g: F.silu(F.rms_norm(x + r, (4096,), g)), x, r, gamma)
    (found,) = grouping.groups
    small = 4096 * 2 + 4 * 2048 * 4  # gamma read by eager, and eager's float32 rstd
    assert found.decision.unfused_bytes == 469_762_048 + small
    assert found.decision.unfused_bytes / found.decision.fused_bytes == pytest.approx(7 / 3, 1e-3)


def test_softmax_as_one_op_has_intensity_five_eighths() -> None:
    annotated, _, _ = analysed(lambda x: torch.softmax(x, -1), full())
    (cost,) = [cost for cost in annotated.costs.values() if cost.launches]
    assert cost.intensity == 0.625


def test_square_matmul_in_two_bytes_is_compute_bound() -> None:
    square = [torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2)]
    annotated, _, _ = analysed(torch.matmul, *square)
    (cost,) = [cost for cost in annotated.costs.values() if cost.launches]
    assert cost.intensity == pytest.approx(1365.33, abs=0.01)
    assert cost.bound == "compute"


def test_row_of_32768_fits_on_an_h200_and_65536_does_not() -> None:
    _, _, grouping = analysed(softmax, torch.empty(64, 32768))
    (found,) = grouping.groups
    on_chip = next(gate for gate in found.decision.gates if gate.name == "on-chip")
    assert (on_chip.measured, on_chip.limit) == (131_072, 139_468)
    _, _, grouping = analysed(softmax, torch.empty(640, 65536))
    (found,) = grouping.groups
    planned = found.decision.subject.planned
    assert planned is not None
    assert [refusal.gate for refusal in planned.refusals if refusal.gate == "on-chip"]
    assert [plan.schedule for plan in planned.plans] == ["cooperative", "blocked"]


def test_what_saves_few_bytes_is_held_to_the_time_that_it_saves() -> None:
    """Both ways read the images twice, but eager's norm of one group has a program for each."""
    x = torch.empty(25, 512, 94, 64)
    _, _, grouping = analysed(lambda x: F.elu(F.group_norm(x, 1)), x)
    (found,) = grouping.groups
    decision = found.decision
    (gate,) = [gate for gate in decision.gates if gate.name == "traffic-saving"]
    assert decision.unfused_bytes / decision.fused_bytes < gate.limit
    assert gate.measured is not None
    assert gate.limit < gate.measured < decision.unfused_us / decision.fused_us
    assert "predicted" in gate.why


def test_matmul_matmul_softmax_fails_the_first_step() -> None:
    square = [torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(3)]
    _, _, grouping = analysed(lambda a, b, c: torch.softmax(a @ b @ c, -1), *square)
    alone = [group.decision.subject.launches for group in grouping.groups]
    assert all(len(launches) == 1 for launches in alone), "eager's softmax at most"
    ends = [f.decision for f in grouping.candidates]
    (decision,) = [d for d in ends if len(d.subject.launches) > 1]
    assert (decision.gates[0].name, decision.gates[0].outcome) == ("compute-bound", "fails")


def test_softmax_that_feeds_a_matmul_stays_a_tensor() -> None:
    x, w = torch.empty(4096, 4096), torch.empty(4096, 4096)
    _, flow, grouping = analysed(lambda x, w: softmax(x) @ w, x, w)
    (found,) = grouping.groups
    outputs = found.decision.subject.border.outputs
    assert [flow.nodes[flow.position[ref.node]].op for ref in outputs] == ["aten.div.Tensor"]
    rejected = [f.decision for f in grouping.candidates]
    feeds = [g for d in rejected for g in d.gates if g.name == "feeds-matmul"]
    assert any(gate.outcome == "fails" for gate in feeds)


def test_column_reduction_after_a_row_reduction_has_two_patterns() -> None:
    def both(x):
        return x.sum(0), (x - x.sum(1, keepdim=True)).exp()

    _, _, grouping = analysed(both, full())
    failed = {
        found.decision.deciding.name
        for found in grouping.candidates
        if found.decision.deciding is not None
    }
    assert "parallel-pattern" in failed
