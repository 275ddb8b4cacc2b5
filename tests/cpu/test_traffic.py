"""HBM bytes by CONTRACT.md's rules: the elements that eager addresses, each once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_advisor.fusion.lower import boundary, fused_traffic

from .regions import costs, flow_of

Launch = tuple[int, int]
"""Bytes read and bytes written."""
M, N = 8, 64
FULL, HALF, VECTOR, COLUMN = 4 * M * N, 2 * M * N, 4 * N, 4 * M
"""Of a float32 matrix, of a 2-byte one (or half a float32 one), of a row and of a column."""


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape or (M, N), dtype=dtype)


def v() -> torch.Tensor:
    return torch.empty(N)


def places(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def chunked(both: torch.Tensor) -> torch.Tensor:
    a, b = both.chunk(2, dim=-1)
    return F.silu(a) * b


def written_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    return c.add_(b)


def filled(a: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c.fill_(1.0)
    return c


def copied_into(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c.copy_(b)
    return c


def column_set(a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c[:, 2] = k
    return c


def half_updated(a: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c[:, : N // 2].mul_(2.0)
    return c


def half_scaled(a: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c[:, ::2].mul_(c[:, 1::2])
    return c


IMAGE = 2 * 4 * 9 * 9 * 4
POOLED = 2 * 4 * 4 * 4 * 4

CASES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...], list[Launch]]] = {
    "both halves of a chunk": (chunked, (x(),), [(HALF, HALF), (2 * HALF, HALF)]),
    "row broadcast": (torch.add, (x(), v()), [(FULL + VECTOR, FULL)]),
    "column broadcast": (torch.add, (x(), x(M, 1)), [(FULL + COLUMN, FULL)]),
    "outer sum": (torch.add, (x(M, 1), v()), [(COLUMN + VECTOR, FULL)]),
    "expanded": (lambda a, b: a.expand(M, N) * b, (x(M, 1), x()), [(COLUMN + FULL, FULL)]),
    "scalar tensor": (torch.mul, (x(), torch.empty(())), [(FULL + 4, FULL)]),
    "one tensor twice": (lambda a: a * a, (x(),), [(FULL, FULL)]),
    "a square and its transpose": (lambda a: a + a.t(), (x(M, M),), [(4 * M * M, 4 * M * M)]),
    "two slices that overlap": (
        lambda a: a[:, 1:] + a[:, :-1], (x(),), [(FULL, 4 * M * (N - 1))],
    ),
    "a chosen neighbour": (
        lambda a: torch.where(a[:, :-2] > 0, a[:, 2:], a[:, 1:-1]), (x(),),
        [(4 * M * (N - 2), M * (N - 2)), (M * (N - 2) + 4 * M * (N - 1), 4 * M * (N - 2))],
    ),
    "both of every two columns": (
        lambda a: a[:, ::2] + a[:, 1::2], (x(),), [(FULL, HALF)],
    ),
    "a tensor and a part of it": (
        lambda a: a[:, : N // 2] + a.sum(1, keepdim=True), (x(),),
        [(FULL, COLUMN), (HALF + COLUMN, HALF)],
    ),
    "slices in one loss": (
        lambda a: F.mse_loss(a[:, 1:], a[:, :-1], reduction="none"), (x(),),
        [(FULL, 4 * M * (N - 1))],
    ),
    "a softmax's gradient multiplies first": (
        lambda a, b: torch.ops.aten._softmax_backward_data(a, b, 1, torch.float32),
        (x(), x()), [(4 * FULL, 2 * FULL)],
    ),
    "views are free": (
        lambda a: F.relu(a.view(2, 4, N).permute(2, 0, 1).unsqueeze(0).squeeze(0)),
        (x(),), [(FULL, FULL)],
    ),
    "every second column": (lambda a: a[:, ::2].relu(), (x(),), [(HALF, HALF)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), (x(), x(M, 2)), [(FULL + 64, FULL + 64)]),
    "stack": (lambda a, b: torch.stack([a, b]), (x(), x()), [(2 * FULL, 2 * FULL)]),
    "repeat": (lambda a: a.repeat(3, 1), (x(),), [(FULL, 3 * FULL)]),
    "pad": (lambda a: F.pad(a, (1, 1)), (x(),), [(FULL, FULL + 4 * 2 * M)]),
    "embedding": (
        F.embedding, (places(5), x(1000, 16)), [(5 * 8 + 5 * 64, 5 * 64)],
    ),
    "small embedding": (  # more places than rows: the table at most once
        F.embedding, (places(50), x(3, 16)), [(50 * 8 + 3 * 64, 50 * 64)],
    ),
    "gather": (
        lambda a, i: a.gather(1, i), (x(), places(M, 3)), [(M * 3 * 8 + M * 3 * 4, M * 3 * 4)],
    ),
    "index_select": (
        lambda a, i: a.index_select(0, i), (x(), places(3)), [(3 * 8 + 3 * VECTOR, 3 * VECTOR)],
    ),
    "index": (lambda a, i: a[i], (x(), places(3)), [(3 * 8 + 3 * VECTOR, 3 * VECTOR)]),
    "comparison": (lambda a: a > 0, (x(),), [(FULL, M * N)]),
    "select by a mask": (torch.where, (x() > 0, x(), v()), [(M * N + FULL + VECTOR, FULL)]),
    "sum": (lambda a: a.sum(1), (x(),), [(FULL, COLUMN)]),
    "sum of all": (torch.sum, (x(),), [(FULL, 4)]),
    "max with its place": (lambda a: a.max(1), (x(),), [(FULL, COLUMN + 8 * M)]),
    "argmax": (lambda a: a.argmax(1), (x(),), [(FULL, 8 * M)]),
    "topk": (lambda a: a.topk(3), (x(),), [(FULL, M * 3 * 12)]),
    "cumsum": (lambda a: a.cumsum(1), (x(),), [(FULL, FULL)]),
    "a cast that copies": (lambda a: a.to(torch.bfloat16), (x(),), [(FULL, HALF)]),
    "a cast that does not": (lambda a: a.to(torch.float32) + 1, (x(),), [(FULL, FULL)]),
    "mixed dtypes": (torch.add, (x(), x(dtype=torch.bfloat16)), [(FULL + HALF, FULL)]),
    "contiguous that copies": (lambda a: a.t().contiguous(), (x(),), [(FULL, FULL)]),
    "contiguous that does not": (lambda a: a.contiguous() + 1, (x(),), [(FULL, FULL)]),
    "expanded, then contiguous": (
        lambda a: a.expand(M, N).contiguous(), (x(M, 1),), [(COLUMN, FULL)],
    ),
    "reshape that copies": (lambda a: a.t().reshape(-1), (x(),), [(FULL, FULL)]),
    "in place": (written_in_place, (x(), v()), [(FULL, FULL), (FULL + VECTOR, FULL)]),
    "fill reads nothing": (filled, (x(),), [(FULL, FULL), (0, FULL)]),
    "copy_ does not read its target": (
        copied_into, (x(), v()), [(FULL, FULL), (VECTOR, FULL)],
    ),
    "one column set": (column_set, (x(), x(M)), [(FULL, FULL), (COLUMN, COLUMN)]),
    "half in place": (half_updated, (x(),), [(FULL, FULL), (HALF, HALF)]),
    "one half by the other": (  # 3/2 of what the tensor has: both halves read, one written
        half_scaled, (x(),), [(FULL, FULL), (FULL, HALF)],
    ),
    "made from nothing": (
        lambda a: a + torch.arange(N, dtype=torch.float32), (x(),),
        [(0, VECTOR), (FULL + VECTOR, FULL)],
    ),
    "zeros_like": (lambda a: torch.zeros_like(a), (x(),), [(0, FULL)]),
    "empty launches nothing": (
        lambda a: torch.empty_like(a).copy_(a), (x(),), [(FULL, FULL)],
    ),
    "matmul": (
        torch.mm, (x(), x(N, 16)), [(FULL + 4 * N * 16, 4 * M * 16)],
    ),
    "linear": (
        F.linear, (x(), x(16, N), x(16)), [(FULL + 4 * N * 16 + 64, 4 * M * 16)],
    ),
    "softmax": (lambda a: a.softmax(1), (x(),), [(FULL, FULL)]),
    "layer norm": (
        lambda a, g, b: F.layer_norm(a, (N,), g, b), (x(), v(), v()),
        [(FULL + 2 * VECTOR, FULL + 2 * COLUMN)],
    ),
    "layer norm in half precision": (
        lambda a, g, b: F.layer_norm(a, (N,), g, b),
        (x(dtype=torch.float16), v().half(), v().half()),
        [(HALF + VECTOR, HALF + 2 * COLUMN)],
    ),
    "batch norm": (
        lambda a, m, s, g, b: F.batch_norm(a, m, s, g, b),
        (x(2, 4, 9, 9), *(x(4) for _ in range(4))),
        [(IMAGE + 64, IMAGE)],
    ),
    "cross entropy": (
        F.cross_entropy, (x(), places(M)), [(FULL, FULL), (M * (8 + 4), 8)],
    ),
    "convolution": (
        F.conv2d, (x(2, 4, 9, 9), x(6, 4, 3, 3)), [(IMAGE + 4 * 6 * 4 * 9, 4 * 2 * 6 * 7 * 7)],
    ),
    "convolution that skips": (
        lambda a, w: F.conv2d(a, w, stride=3), (x(2, 4, 9, 9), x(6, 4, 1, 1)),
        [(4 * 2 * 4 * 3 * 3 + 4 * 6 * 4, 4 * 2 * 6 * 3 * 3)],
    ),
    "convolution with a bias": (
        F.conv2d, (x(2, 4, 9, 9), x(6, 4, 3, 3), x(6)),
        [(IMAGE + 4 * 6 * 4 * 9 + 24, 4 * 2 * 6 * 7 * 7)],
    ),
    "dilated convolution": (  # 3 rows, of which every second is touched, and 9 columns
        lambda a, w: F.conv2d(a, w, stride=(9, 1), dilation=(2, 1)),
        (x(2, 4, 9, 9), x(6, 4, 3, 3)), [(4 * 2 * 4 * 3 * 9 + 4 * 6 * 4 * 9, 4 * 2 * 6 * 1 * 7)],
    ),
    "convolution with taps in the padding alone": (
        lambda a, w: F.conv1d(a, w, padding=8), (x(1, 1, 4), x(1, 1, 16)), [(16 + 64, 20)],
    ),
    "pooling": (
        lambda a: F.avg_pool2d(a, 2), (x(2, 4, 9, 9),), [(4 * 2 * 4 * 8 * 8, POOLED)],
    ),
    "pooling that skips": (
        lambda a: F.avg_pool2d(a, 1, stride=3), (x(2, 4, 9, 9),), [(4 * 2 * 4 * 9, 4 * 2 * 4 * 9)],
    ),
    "max pooling writes its places": (
        lambda a: F.max_pool2d(a, 2), (x(2, 4, 9, 9),), [(4 * 2 * 4 * 8 * 8, POOLED + 2 * POOLED)],
    ),
    "adaptive pooling": (
        lambda a: F.adaptive_avg_pool2d(a, 3), (x(2, 4, 9, 9),), [(IMAGE, 4 * 2 * 4 * 9)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bytes(name: str) -> None:
    function, inputs, expected = CASES[name]
    found = [(cost.bytes_read, cost.bytes_written) for cost in costs(flow_of(function, *inputs))]
    assert found == expected


def test_dropout_in_training_writes_its_mask() -> None:
    flow = flow_of(nn.Dropout(0.5), x(), mode="train")
    assert [(c.bytes_read, c.bytes_written) for c in costs(flow)] == [(FULL, FULL + M * N)]
    with pytest.raises(Exception, match="launches no kernel"):
        flow_of(nn.Dropout(0.5), x())


def test_lstm_cell() -> None:
    """Two products, and one fused cell that also writes its gates for the backward pass."""
    batch, size = 3, 16
    state, gates, weight = batch * size * 4, 4 * batch * size * 4, 4 * size * size * 4
    bias = 4 * size * 4
    cell = nn.LSTMCell(size, size)
    flow = flow_of(lambda a, h, c: cell(a, (h, c)), *(x(batch, size) for _ in range(3)))
    products = (state + weight, gates)
    found = [(c.bytes_read, c.bytes_written) for c in costs(flow)]
    assert found == [products, products, (2 * gates + state + 2 * bias, 2 * state + gates)]


def test_a_cache_that_is_written_in_part_is_still_read() -> None:
    """Of 64 rows one is written and all are read: fusing both saves that one row, no more."""

    def appended(cache: torch.Tensor, place: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return cache.index_copy_(0, place, row).sum(0)

    flow = flow_of(appended, x(64, N), places(1), x(1, N))
    launches = [number for number in range(len(flow.nodes)) if flow.launches(number)]
    moved = sum(flow.annotated.costs[flow.nodes[number].name].bytes for number in launches)
    fused = fused_traffic(flow, boundary(flow, launches))
    assert moved - 2 * VECTOR <= fused < moved


def test_a_tensor_and_its_halves_are_read_once() -> None:
    """Rotary embedding: the fused kernel reads what it turns, and the two tables."""

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        front, back = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-back, front], dim=-1) * sin

    flow = flow_of(turned, x(), x(), x())
    launches = [number for number in range(len(flow.nodes)) if flow.launches(number)]
    assert fused_traffic(flow, boundary(flow, launches)) == 4 * FULL
