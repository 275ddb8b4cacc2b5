"""Rows that begin anywhere: each column has one lane, whole vectors lie where a thread takes them
at once, and every schedule gives what eager gives, by the bytes that the plan names."""

# Triton is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import collect_check, submit_check

from .regions import PACKED, RULES, SHARING, decided, flow_of, kernel_of, ptx_of
from .spawned import run_script

LANES = 64
CHILD = """
import json, sys
import torch, triton
import triton.language as tl
from fusion_advisor.shipped.fused_device import around_vectors, in_vectors

@triton.jit
def around(out_ptr, cols, LANES: tl.constexpr, ENDS: tl.constexpr):
    first, part = tl.program_id(0), tl.program_id(1)
    col, vectors, whole, end, is_end = around_vectors(first, cols, part * LANES, LANES, ENDS, False)
    at = out_ptr + (first * tl.num_programs(1) + part) * (LANES + ENDS) * 4
    lane, other = tl.arange(0, LANES) * 4, (LANES + tl.arange(0, ENDS)) * 4
    tl.store(at + lane, col)
    tl.store(at + lane + 1, vectors)
    tl.store(at + lane + 2, whole.to(tl.int32))
    tl.store(at + lane + 3, 0)
    tl.store(at + other, end)
    tl.store(at + other + 1, first + end)
    tl.store(at + other + 2, 0)
    tl.store(at + other + 3, is_end.to(tl.int32))

@triton.jit
def probe(out_ptr, cols, LANES: tl.constexpr, VECTOR: tl.constexpr):
    first, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    col, offset, whole, end = in_vectors(first, cols, lane, part * LANES, VECTOR)
    at = out_ptr + (first * tl.num_programs(1) + part) * LANES * 4 + lane * 4
    tl.store(at, col)
    tl.store(at + 1, offset)
    tl.store(at + 2, whole.to(tl.int32))
    tl.store(at + 3, end.to(tl.int32))

vector, lanes, found, apart = int(sys.argv[1]), {lanes}, {{}}, sys.argv[2] == "apart"
ends = 2 * vector if apart else 0
for cols in (1, 2, vector - 1, vector, vector + 1, lanes - 1, lanes, lanes + 1, 2 * lanes - 3):
    parts = triton.cdiv(cols, lanes)
    out = torch.full((2 * vector + 1, parts * (lanes + ends), 4), -1, dtype=torch.int32)
    given = (around, ends) if apart else (probe, vector)
    given[0][(2 * vector + 1, parts)](out, cols, lanes, given[1])
    found[cols] = out.tolist()
print(json.dumps(found))
"""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("vector", [2, 4, 8, 16])
@pytest.mark.parametrize("ends", ["apart", "first"])
def test_each_column_has_one_lane(vector: int, ends: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.py"
    path.write_text(CHILD.format(lanes=LANES))
    script = f"import runpy; runpy.run_path({str(path)!r})"
    for cols, by_first in json.loads(run_script(script, str(vector), ends)).items():
        for first, lanes in enumerate(by_first):
            _check_lanes(int(cols), first, vector, lanes)
            if ends == "first":
                assert not any(end for _, _, _, end in lanes[2 * vector :])
                for col, _, whole, end in lanes[: LANES if int(cols) > LANES else None]:
                    assert whole or end or col >= 0


def _check_lanes(cols: int, first: int, vector: int, lanes: list[list[int]]) -> None:
    """`lanes` has column, offset, whether it is in a whole vector, whether it is in none."""
    assert sorted(col for col, _, whole, end in lanes if whole or end) == list(range(cols))
    assert not any(whole and end for _, _, whole, end in lanes)
    for start in range(0, len(lanes), vector):
        together = lanes[start : start + vector]
        assert len({whole for _, _, whole, _ in together}) == 1
        if together[0][2]:
            offsets = [offset for _, offset, _, _ in together]
            assert offsets[0] % vector == 0
            assert offsets == [first + col for col, _, _, _ in together]
            assert offsets == list(range(offsets[0], offsets[0] + vector))


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def causal(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(x.masked_fill(hidden, float("-inf")), -1)


WIDE, F64 = torch.float32, torch.float64
ROWS: dict[str, tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "row": ("row", lambda x: torch.softmax(x, -1), (x(9, 1031),)),
    "sums, float32": ("row", lambda x: x.sum(-1), (x(9, 1030, dtype=WIDE),)),
    "sums, float64": ("row", lambda x: x.sum(-1), (x(9, 1031, dtype=F64),)),
    "two widths": ("row", lambda x: torch.softmax(x.float(), -1), (x(9, 1034),)),
    "a weight": ("row", rms_norm, (x(9, 1027), x(1027))),
    "rows of a larger tensor": (
        "row", lambda x: torch.softmax(x, -1), (x(9, 1200)[:, :1031],),
    ),
    "places count": ("row", causal, (x(2, 9, 1033),)),
    "the first of equals": ("row", lambda x: (x.argmax(-1), x.amax(-1)), (x(9, 1031),)),
    "float32, written": ("row", lambda x: torch.softmax(x, -1), (x(9, 1031, dtype=WIDE),)),
    "float32, a weight": ("row", rms_norm, (x(9, 1027, dtype=WIDE), x(1027, dtype=WIDE))),
    "places along two axes": (
        "row", lambda x, w: x * w / (1 + (x * w).abs().sum((-2, -1), keepdim=True)),
        (x(9, 47, 31), x(47, 1)),
    ),
    "all of it hidden": (
        "row", lambda x: torch.softmax(x.masked_fill(x < 9, float("-inf")), -1), (x(9, 1031),),
    ),
    "persistent": ("persistent", lambda x: torch.softmax(x, -1), (x(2048, 20_001),)),
    "cooperative": ("cooperative", rms_norm, (x(40, 701), x(701))),
    "cooperative, exponentials": (
        "cooperative", lambda x: torch.softmax(x.float(), -1), (x(40, 701),),
    ),
    "cooperative, two exchanges": (
        "cooperative",
        lambda x: torch.softmax(x * torch.rsqrt((x * x).mean(-1, keepdim=True)), -1),
        (x(40, 701),),
    ),
    "cooperative, a variance": (
        "cooperative", lambda x: F.layer_norm(x, x.shape[-1:]), (x(40, 701),),
    ),
    "cooperative, a variance, float32": (
        "cooperative", lambda x: F.layer_norm(x, x.shape[-1:]), (x(40, 703, dtype=WIDE),),
    ),
    "cooperative, a part of nothing": (
        "cooperative", lambda x: F.layer_norm(x, x.shape[-1:]), (x(40, 577),),
    ),
    "cooperative, finished by a later kernel": (
        "cooperative",
        lambda x, t: (torch.sigmoid(x) - x.sum(-1, keepdim=True), (x.sum(-1) / t.sum(-1)).mean()),
        (x(600, 701), x(600, 701)),
    ),
    "split": (
        "split", lambda x, t: F.cross_entropy(x, t), (x(8192, 50_257), x(8192, dtype=torch.int64)),
    ),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_begin_anywhere(name: str, worker: Worker) -> None:
    schedule, function, inputs = ROWS[name]
    rules = SHARING if schedule == "cooperative" else PACKED
    plan = decided(flow_of(function, *inputs), rules).subject.plan
    assert plan is not None
    assert plan.schedule.split(" ")[0] == schedule
    kernel = kernel_of(function, *inputs, name="odd", rules=rules)
    if plan.steps[0].ends:
        assert re.search(r"= around_vectors\(\s*row \* ", kernel.text)
        assert re.search(r"\btl\.(load|store)\(\s*\w+_ptr \+ vectors,", kernel.text)
    else:
        assert name in ("the first of equals", "persistent")
        assert "= in_vectors(row * " in kernel.text
        assert re.search(r"\bload_row\(\w+_ptr, vectors", kernel.text)
    check = collect_check(kernel, submit_check(worker, kernel))
    assert check.failure is None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def copying(rules: Rulebook) -> Rulebook:
    """What all rows share is copied for the least of them."""
    row = rules.schedules.row
    numbers = ("copied_bytes", "single_registers")
    none = {name: getattr(row, name).model_copy(update={"value": 0}) for name in numbers}
    schedules = rules.schedules.model_copy(update={"row": row.model_copy(update=none)})
    return rules.model_copy(update={"schedules": schedules})


F16, BOOL = torch.float16, torch.bool
SHARED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = {
    "a weight, bfloat16": (rms_norm, (x(999, 1029), x(1029)), 1),
    "a weight, float16": (rms_norm, (x(999, 1027, dtype=F16), x(1027, dtype=F16)), 1),
    "a weight, float32": (rms_norm, (x(999, 1029, dtype=WIDE), x(1029, dtype=WIDE)), 1),
    "a weight, float64": (rms_norm, (x(999, 1029, dtype=F64), x(1029, dtype=F64)), 1),
    "a wider weight": (rms_norm, (x(999, 1029), x(1029, dtype=WIDE)), 1),
    "a narrower weight": (rms_norm, (x(999, 1029, dtype=WIDE), x(1029)), 1),
    "a weight and a bias": (layer_norm, (x(999, 1031), x(1031), x(1031)), 2),
    "in two pieces": (layer_norm, (x(999, 6001), x(6001), x(6001)), 2),
    "a mask": (
        lambda x, m: torch.softmax(x.masked_fill(m, -1.0), -1),
        (x(999, 1029), x(1029, dtype=BOOL)),
        1,
    ),
    "along two axes": (
        lambda x, w: x * w / (1 + (x * w).abs().sum((-2, -1), keepdim=True)),
        (x(999, 47, 31), x(47, 31)),
        1,
    ),
    "along one of two axes": (
        lambda x, w: x * w / (1 + (x * w).abs().sum((-2, -1), keepdim=True)),
        (x(999, 47, 31), x(31)),
        0,
    ),
    "parts of rows": (rms_norm, (x(999, 701), x(701)), 1),
    "parts of rows, float32": (rms_norm, (x(999, 701, dtype=WIDE), x(701, dtype=WIDE)), 1),
    "parts of rows, a variance": (layer_norm, (x(999, 701), x(701), x(701)), 2),
    "parts of rows, a variance, float32": (
        layer_norm, (x(999, 703, dtype=WIDE), x(703, dtype=WIDE), x(703, dtype=WIDE)), 2,
    ),
    "parts of rows, one of nothing": (layer_norm, (x(999, 577), x(577), x(577)), 2),
    "parts of rows, asked for again": (
        lambda x, m: torch.softmax(x.float() + m, -1) * m, (x(999, 701), x(701)), 1,
    ),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SHARED)
def test_what_all_rows_share_is_read_in_vectors(name: str, worker: Worker) -> None:
    function, inputs, copied = SHARED[name]
    schedule = "cooperative" if name.startswith("parts of rows") else "row"
    rules = copying(SHARING if schedule == "cooperative" else PACKED)
    kernel = kernel_of(function, *inputs, name="odd", rules=rules)
    plan = decided(flow_of(function, *inputs), rules).subject.plan
    assert plan is not None
    assert plan.schedule == schedule
    assert plan.launches == 1 + copied
    assert len(re.findall(r"_copies_made = host\.copies\(", kernel.text)) == copied
    assert bool(re.search(r"_copies_ptr \+ shared\b", kernel.text)) == bool(copied)
    body = kernel.text[kernel.text.index("def odd_kernel(") : kernel.text.index("def odd(")]
    waits = [line.strip() for line in body.splitlines() if "copies_made(" in line]
    assert waits == ["copies_made(EARLY)"] * bool(copied)
    assert "_copies_ptr +" not in body.partition("copies_made(EARLY)")[0]
    assert kernel.text.count(", early, **early)") == max(copied - 1, 0)  # the first waits for all
    check = collect_check(kernel, submit_check(worker, kernel))
    assert check.failure is None


def test_little_is_not_copied() -> None:
    def copied(rows: int, cols: int, rules: Rulebook = PACKED) -> bool:
        return "copies(" in kernel_of(layer_norm, x(rows, cols), x(cols), x(cols), rules=rules).text

    assert copied(1 << 13, 2003)
    assert not copied(1 << 12, 2003)
    assert not copied(1 << 13, 2000)
    assert copied(1 << 10, 2003, copying(PACKED))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WIDE])
def test_one_by_one_only_what_lies_around_the_vectors(dtype: torch.dtype, tmp_path: Path) -> None:
    cols = 50_257
    kernel = kernel_of(rms_norm, x(2432, cols, dtype=dtype), x(cols, dtype=dtype), rules=RULES)
    *_, launch = kernel.launches
    text = ptx_of(kernel, launch, tmp_path, EARLY=True)
    loads = re.findall(r"ld\.global\.((?:v4\.)?b\d+)", text)
    single = f"b{8 * dtype.itemsize}"
    assert loads.count(single) == 2  # the ends of x and of the weight
    assert loads.count("v4.b32") == 16
    assert {*loads} == {single, "v4.b32"}
    assert text.count("griddepcontrol.wait") == 1
    late = text.partition("griddepcontrol.wait")[2]
    assert late.count("ld.global.v4.b32") == 8  # of the copies


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: torch.softmax(x, -1), (x(9, 1032),)),  # whole vectors anyway
        (lambda x: torch.cumsum(x, -1), (x(9, 1031),)),
        (lambda x: torch.softmax(x, 0), (x(1031, 9),)),
    ],
)
def test_rows_in_the_order_of_memory(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> None:
    text = kernel_of(function, *inputs, name="plain").text
    assert re.search(r"\bin_vectors\(", text) is None
