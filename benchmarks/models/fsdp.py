"""A training step of four layers on several GPUs of one host, sharded by FSDP2; prints a table.

    torchrun --nproc-per-node 2 -m benchmarks.models.fsdp [--steps 12] [--seconds 300] [--out FILE]

Four layers of Llama-3-8B's width and vocabulary in bfloat16 on random weights, 2 x 2048 tokens a
GPU: forward, loss, backward, AdamW. `blocks` compiles layer by layer, as FSDP2's users do, `whole`
the model. Losses are of the same data from the same weights in every way, but for two more runs of
eager, where a thousandth of the weights begins one bfloat16 further from zero; `apart` is the
largest distance of a step's loss from the mean of eager's three. A step is the median of the second
half of the steps, on the slowest GPU, the peak that of all but the first two, after Python's
collector ran; graphs and breaks are Dynamo's counters.
"""
# transformers and torch.distributed are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from fusion_advisor.dynamo.backend import fusion_advisor

from ..gpu import heading
from .adamw import furthest, nudged

EAGER = ("eager", "eager, 2", "eager, 3")
WAYS = (*EAGER, "blocks: compile", "blocks: backend", "whole: compile", "whole: backend")
SIZES: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TOKENS = 2, 2048


@dataclass(frozen=True)
class Row:
    """A way: milliseconds of a step, gigabytes at its peak, seconds of the first step, losses of
    all steps, graphs and breaks; or why there is nothing."""

    way: str
    failure: str = ""
    step_ms: float = 0.0
    peak: float = 0.0
    first: float = 0.0
    losses: tuple[float, ...] = ()
    graphs: int = 0
    breaks: int = 0

    def cells(self, eager: Sequence[Sequence[float]]) -> list[str]:
        """Cells of the table; `eager` are the losses of eager's runs."""
        if self.failure:
            return [self.way, self.failure, *[""] * 6]
        told = (self.losses[0], self.losses[len(self.losses) // 2], self.losses[-1])
        return [
            self.way, f"{self.step_ms:.1f}", f"{self.peak:.1f}", f"{self.first:.1f}",
            ", ".join(f"{each:.4f}" for each in told), f"{furthest(self.losses, eager):.4f}",
            str(self.graphs), str(self.breaks),
        ]  # fmt: skip


def run(way: str, steps: int) -> Row:
    """Row of a way."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, use_cache=False)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if way in EAGER[1:]:
        nudged(model, EAGER.index(way))
    layers = model.model.layers
    part, _, compiler = way.partition(": ")
    backend: Any = fusion_advisor if compiler == "backend" else "inductor"
    if part == "blocks":
        for layer in layers:
            layer.compile(backend=backend)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    if part == "whole":
        model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(0, SIZES["vocab_size"], TOKENS, device="cuda")
    losses, spent = list[float](), list[float]()
    for number in range(steps):
        if number == 2:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - began) * 1e3)
        losses.append(float(loss.detach()))
    step = torch.tensor(statistics.median(spent[steps // 2 :]), device="cuda")
    dist.all_reduce(step, dist.ReduceOp.MAX)
    memory = torch.cuda.max_memory_allocated() / 1e9
    return Row(
        way, "", float(step), memory, spent[0] / 1e3, tuple(losses),
        counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()),
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Table of the ways so far."""
    eager = [row.losses for row in rows if row.way in EAGER and row.losses]
    lines = [*heading("A step under FSDP2"), "", f"{dist.get_world_size()} GPUs.", ""]
    lines += ["| way | step ms | peak GB | first s | losses | apart | graphs | breaks |"]
    lines += ["|---" * 8 + "|", *(f"| {' | '.join(row.cells(eager))} |" for row in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every way, and print the table on one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows: list[Row] = []
    for way in WAYS:
        late = torch.tensor(time.monotonic() - began > options.seconds, device="cuda").int()
        dist.all_reduce(late, dist.ReduceOp.MAX)
        try:
            rows.append(Row(way, "no time was left") if late else run(way, options.steps))
        except Exception as error:  # noqa: BLE001 a way that fails is a row
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            rows.append(Row(way, why))
        if dist.get_rank() == 0:
            print(table(rows), flush=True)
            if options.out:
                options.out.write_text(table(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
