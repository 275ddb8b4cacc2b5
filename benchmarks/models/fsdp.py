"""A training step of four layers on several GPUs of one host, sharded by FSDP2; prints a table.

    torchrun --nproc-per-node 2 -m benchmarks.models.fsdp [--steps 12] [--seconds 300] [--out FILE]

Four layers of Llama-3-8B's width and vocabulary in bfloat16 on random weights, 2 x 2048 tokens a
GPU: forward, loss, backward, AdamW. `blocks` compiles layer by layer, as FSDP2's users do, `whole`
the model. Losses are of the same data from the same weights in every way; a step is the median of
the second half of the steps, on the slowest GPU; graphs and breaks are Dynamo's counters.
"""
# transformers and torch.distributed are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from fusion_advisor.dynamo.backend import fusion_advisor

from ..gpu import heading

WAYS = ("eager", "blocks: compile", "blocks: backend", "whole: compile", "whole: backend")
SIZES: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TOKENS = 2, 2048


def run(way: str, steps: int) -> str:
    """Row of a way: milliseconds of a step, memory, losses, graphs and breaks."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, use_cache=False)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
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
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
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
    said = f"{losses[0]:.4f}, {losses[steps // 2]:.4f}, {losses[-1]:.4f}"
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return (
        f"| {way} | {float(step):.1f} | {memory:.1f} | {spent[0] / 1e3:.1f} | {said} |"
        f" {graphs} | {breaks} |"
    )


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
    lines = [*heading("A step under FSDP2"), "", f"{dist.get_world_size()} GPUs.", ""]
    lines += ["| way | step ms | peak GB | first s | losses | graphs | breaks |", "|---" * 7 + "|"]
    for way in WAYS:
        late = torch.tensor(time.monotonic() - began > options.seconds, device="cuda").int()
        dist.all_reduce(late, dist.ReduceOp.MAX)
        try:
            lines.append(
                f"| {way} | no time was left | | | | | |" if late else run(way, options.steps)
            )
        except Exception as error:  # noqa: BLE001 a way that fails is a row
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            lines.append(f"| {way} | {why} | | | | | |")
        if dist.get_rank() == 0:
            print(lines[-1], flush=True)
            if options.out:
                options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
