"""What following the advice that is no fusion is worth on a GPU: the figures in `rules/advice/`.

python -m benchmarks.rules.advice --out advice.md      # on a GPU; a minute
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from triton.testing import do_bench

from ..gpu import heading

ATTENTIONS = {
    "BERT base, 16 x 512": (16, 12, 12, 512, 512, 64),
    "ViT base, 64 x 197": (64, 12, 12, 197, 197, 64),
    "32 heads of 128, 1 x 2048": (1, 32, 32, 2048, 2048, 128),
    "32 heads of 128, 1 x 8192": (1, 32, 32, 8192, 8192, 128),
    "32 heads of 128, 8 x 1024": (8, 32, 32, 1024, 1024, 128),
}
"""Batch, heads, heads of keys, queries, keys, width."""

GROUPED = {
    "Llama 3 8B, 1 x 4096": (1, 32, 8, 4096, 4096, 128),
    "Llama 3 8B, 16 x 1 of 4096": (16, 32, 8, 1, 4096, 128),
    "Llama 3 8B, 64 x 1 of 2048": (64, 32, 8, 1, 2048, 128),
}
NOTE = "Microseconds are medians with a cold L2; bfloat16."
TINY = 4096
"""Elements of kernels that are shorter than their launch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    lines = [
        *heading("What following the advice is worth"),
        NOTE,
        "",
        *masks(),
        "",
        *grouped(),
        "",
        *launches(),
        "",
    ]
    out.write_text("\n".join(lines))


def us(call: Callable[[], object]) -> float:
    return float(do_bench(call, warmup=30, rep=150, return_mode="median")) * 1e3


def operands(sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, kept, queries, keys, width = sizes

    def made(h: int, length: int) -> torch.Tensor:
        return torch.randn(batch, h, length, width, device="cuda", dtype=torch.bfloat16)

    return made(heads, queries), made(kept, keys), made(kept, keys)


def masks() -> list[str]:
    """Attention with a mask that says nothing, or that is causal, beside the same without it."""
    rows = [
        "## Masks that keep attention off the flash kernel",
        "",
        "| attention | mask of ones | no mask | x | causal mask | is_causal | x |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sizes in ATTENTIONS.items():
        attend = partial(attention, *operands(sizes))
        ones = torch.ones(sizes[0], 1, sizes[3], sizes[4], device="cuda", dtype=torch.bool)
        lower = torch.ones(sizes[3], sizes[4], device="cuda", dtype=torch.bool).tril()[None, None]
        full = us(partial(attend, attn_mask=ones))
        none = us(attend)
        masked = us(partial(attend, attn_mask=lower))
        causal = us(partial(attend, is_causal=True))
        rows.append(
            f"| {name} | {full:.1f} | {none:.1f} | {full / none:.2f}"
            f" | {masked:.1f} | {causal:.1f} | {masked / causal:.2f} |"
        )
    return rows


def grouped() -> list[str]:
    """Keys and values repeated in memory for each head, beside enable_gqa=True; each without a mask
    (causal where there are several queries) and with one."""
    rows = [
        "## Keys and values repeated for the heads that share them",
        "",
        "| attention | repeated, copies included | the copies | enable_gqa | x"
        " | repeated, with a mask | enable_gqa with a mask |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sizes in GROUPED.items():
        q, k, v = operands(sizes)
        times, causal = sizes[1] // sizes[2], sizes[3] > 1
        mask = torch.ones(sizes[0], 1, sizes[3], sizes[4], device="cuda", dtype=torch.bool).tril(
            sizes[4] - sizes[3]
        )
        both = us(partial(repeated, q, k, v, times, is_causal=causal))
        copies = us(partial(map_repeat, k, v, times))
        shared = us(partial(attention, q, k, v, is_causal=causal, enable_gqa=True))
        masked = us(partial(repeated, q, k, v, times, attn_mask=mask))
        shared_masked = us(partial(attention, q, k, v, attn_mask=mask, enable_gqa=True))
        rows.append(
            f"| {name} | {both:.1f} | {copies:.1f} | {shared:.1f} | {both / shared:.2f}"
            f" | {masked:.1f} | {shared_masked:.1f} |"
        )
    return rows


def repeated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, times: int, **options: Any
) -> torch.Tensor:
    return attention(q, *map_repeat(k, v, times), **options)


def map_repeat(k: torch.Tensor, v: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor]:
    return repeat(k, times), repeat(v, times)


def repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    many = x[:, :, None].expand(batch, heads, times, length, width)
    return many.reshape(batch, heads * times, length, width)


def launches() -> list[str]:
    """What a launch from Python costs, one replayed from a graph, and waiting for the GPU."""
    x = torch.randn(TINY, device="cuda")
    count = 500

    def run() -> None:
        for _ in range(count):
            x.add(1)

    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    eager, replayed = wall(run) / count, wall(graph.replay) / count
    steps = 200

    def ahead() -> None:
        for _ in range(steps):
            x.add(1).sum()

    def waiting() -> None:
        for _ in range(steps):
            x.add(1).sum().item()

    sync = (wall(waiting) - wall(ahead)) / steps
    return [
        "## Launches and waits",
        "",
        f"A kernel of {TINY} elements takes {eager:.2f} us of wall time launched by eager,"
        f" {replayed:.2f} us replayed from a CUDA graph ({count} in a row).",
        f"`.item()` after two such kernels adds {sync:.2f} us a step to the wall time,"
        f" {steps} steps.",
    ]


def wall(call: Callable[[], object]) -> float:
    """Microseconds from a quiet GPU to a quiet GPU, the median of eleven."""
    found: list[float] = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1e6)
    return statistics.median(found[1:])


if __name__ == "__main__":
    main()
