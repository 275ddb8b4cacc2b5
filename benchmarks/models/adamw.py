"""Training with AdamW: tokens a second, the longest sequence that fits, and losses of many steps.

    python -m benchmarks.models.adamw [--job llama] [--ways eager,liger] [--longest 80] [--out DIR]
    python -m benchmarks.models.adamw --job qwen3 --losses 200 [--ways compile,backend] [--out DIR]

Models and ways are those of `benchmarks.models.training`, with `memory=SHARE` behind a way as the
`activation_memory_budget` of PyTorch's partitioner; AdamW is fused. The first form prints a row a
way: tokens a second at the job's size, and with `--longest` how many tokens of one sequence a
second step holds in so many GB of the allocator's, by the peaks of two lengths and then by trying:
the longest that was seen to fit, and the shortest seen not to. The second form trains from the same
weights on the same four batches in turn: three times in eager mode, where a thousandth of the
weights begins one bfloat16 further from zero each time but the first, and then by each way. There
`apart` is the largest distance of a step's loss from the mean of the three. With `--rehearse` the
models are narrow and run on the CPU.
"""
# transformers and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as partitioner

from ..gpu import heading
from .step import batches, warmed
from .training import JOBS, Job, built, given_of, narrow, way_of

WAYS = "eager,compile,backend,backend:chunked_loss=True,backend:chunked_loss=True:memory=0.8,liger"
_STEP = 1024
"""Tokens between two lengths that are tried."""
_TRIES = 4


def begun(way: str, model: Any) -> tuple[Callable[..., Any], Any]:
    """The loss of a model as a way runs it, and the model's optimizer."""
    torch.compiler.reset()
    name, _, share = way.partition(":memory=")
    partitioner.activation_memory_budget = float(share or 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return way_of(name, model, []), optimizer


def step(loss: Callable[..., Any], optimizer: Any, given: dict[str, Any]) -> Any:
    """One training step; its loss."""
    found = loss(**given)
    found.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return found.detach()


def peak(way: str, job: Job, model: Any, tokens: int) -> float:
    """Bytes that a second step of one sequence takes at most; infinite where it does not fit."""
    loss, optimizer = begun(way, model)
    given = given_of(replace(job, batch=1, tokens=tokens), model.config, "cuda")
    try:
        step(loss, optimizer, given)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(loss, optimizer, given)
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())
    except torch.OutOfMemoryError:
        return float("inf")
    finally:
        model.zero_grad(set_to_none=True)
        del loss, optimizer, given
        gc.collect()
        torch.cuda.empty_cache()


def longest(way: str, job: Job, gigabytes: float) -> tuple[int, int]:
    """Most tokens of a sequence that were seen to fit, and fewest that were seen not to."""
    model, _ = built(replace(job, batch=1, tokens=_STEP), "cuda")
    model.train()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)
    one, other = 8 * _STEP, 24 * _STEP
    low, high = (peak(way, job, model, tokens) for tokens in (one, other))
    if high == float("inf"):
        return one, other
    each = (high - low) / (other - one)
    tokens, fits, fails = int((gigabytes * 1e9 - low) / each) + one, other, 0
    apart = tokens // 32
    for _ in range(_TRIES):
        tokens -= tokens % _STEP
        if peak(way, job, model, tokens) < float("inf"):
            fits = tokens
        else:
            fails = tokens
        if fits > other and fails:
            break
        tokens += -apart if fails else apart
    return fits, fails


def row(way: str, job: Job, gigabytes: float, device: str) -> str:
    """Row of a way, for a process of its own: what another way leaves would count, and Liger
    changes classes."""
    model, given = built(job, device)
    model.train()
    loss, optimizer = begun(way, model)
    again = partial(step, loss, optimizer, given)
    began = time.perf_counter()
    again()
    first = time.perf_counter() - began
    warmed(again, device)
    held = 0.0
    if device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        again()
        held = torch.cuda.max_memory_allocated() / 1e9
    ms = statistics.median(batches(again, device))
    rate = job.batch * job.tokens / ms * 1e3
    said = f"| {way} | {ms:.1f} | {rate:.0f} | {held:.1f} | {first:.0f} |"
    if gigabytes and device == "cuda":
        del model, given, loss, optimizer, again
        torch.compiler.reset()
        gc.collect()
        print(said, flush=True)  # the rest takes minutes
        torch.cuda.empty_cache()
        fits, fails = longest(way, job, gigabytes)
        said += f" {fits} | {fails or ''} |"
    return said


def course(way: str, job: Job, steps: int, device: str, nudge: int) -> list[float]:
    """Losses of the steps from the same weights, of which some are one bfloat16 further
    from zero where `nudge` is not 0."""
    model, _ = built(job, device)
    model.train()
    if nudge:
        nudged(model, nudge)
    loss, optimizer = begun(way, model)
    torch.manual_seed(1)
    rows = [given_of(job, model.config, device) for _ in range(4)]
    return torch.stack([step(loss, optimizer, rows[n % 4]) for n in range(steps)]).tolist()


def nudged(model: torch.nn.Module, seed: int) -> None:
    """Put a thousandth of the weights, drawn by a seed, one bfloat16 further from zero."""
    device = next(model.parameters()).device
    draws = torch.Generator(device).manual_seed(seed)
    for weight in model.parameters():
        chosen = torch.rand(weight.shape, device=device, generator=draws) < 1e-3
        weight.data.view(torch.int16).add_(chosen.to(torch.int16))


def furthest(found: Sequence[float], eager: Sequence[Sequence[float]]) -> float:
    """Largest distance of a step's loss from the mean of eager's runs."""
    mean = [statistics.fmean(each) for each in zip(*eager, strict=True)]
    return max(abs(a - b) for a, b in zip(found, mean, strict=True))


def courses(ways: Sequence[str], job: Job, steps: int, device: str) -> Iterator[str]:
    """Rows of losses: eager's spread, then each way's distance from eager's mean."""
    eager = [course("eager", job, steps, device, nudge) for nudge in range(3)]

    def told(name: str, found: Sequence[float]) -> str:
        places = ", ".join(f"{found[n]:.4f}" for n in (0, steps // 4, steps // 2, steps - 1))
        return f"| {name} | {places} | {furthest(found, eager):.4f} |"

    for number, found in enumerate(eager):
        yield told(f"eager, {number + 1}", found)
    for way in ways:
        gc.collect()
        yield told(way, course(way, job, steps, device, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", default="llama", choices=[*JOBS])
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--longest", type=float, default=0.0, help="GB that a step may take")
    parser.add_argument("--losses", type=int, default=0, help="steps to train")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--rehearse", action="store_true", help="narrow models, on the CPU")
    options = parser.parse_args()
    job, device = JOBS[options.job], "cpu" if options.rehearse else "cuda"
    job = narrow(job) if options.rehearse else job
    ways = options.ways.split(",")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as apart:
        if options.losses:
            quarters = (0, options.losses // 4, options.losses // 2, options.losses - 1)
            head = f"| way | losses of steps {', '.join(map(str, quarters))} | apart |"
            found = courses(ways, job, options.losses, device)
        else:
            head = "| way | ms | tokens/s | peak GB | first s |"
            head += " longest | does not fit |" if options.longest else ""
            found = apart.map(partial(row, job=job, gigabytes=options.longest, device=device), ways)
        top = [*heading("Training with AdamW"), "", f"{options.job}, {job.batch} x {job.tokens}"]
        lines = [*top, "", head, "|---" * (head.count("|") - 1) + "|"]
        options.out.mkdir(parents=True, exist_ok=True)
        for each in found:
            print(each, flush=True)
            lines.append(each)
            (options.out / f"adamw-{options.job}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
