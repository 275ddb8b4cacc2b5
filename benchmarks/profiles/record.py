"""Traces of torch's profiler, made on a GPU, and the times of their kernels by CUDA events.

    python -m benchmarks.profiles.record OUT

Six traces of two models, `OUT/NAME.json.gz`: prefill, training and decode, in eager mode, compiled
and by CUDA graphs; each has five steps. `OUT/spans.json` holds the median time of a step in
microseconds, without the profiler.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.gpu import ROOT

STEPS, TIMED = 5, 10


def main(out: Path) -> None:
    """Record the six traces."""
    out.mkdir(parents=True, exist_ok=True)
    llama, gpt = ROOT / "examples/llama_block.py", ROOT / "benchmarks/profiles/gpt.py"
    spans: dict[str, float] = {}
    for name, path, train, mode, stack in (
        ("llama_prefill_eager", llama, False, None, True),
        ("llama_prefill_compile", llama, False, "default", False),
        ("llama_train_eager", llama, True, None, False),
        ("llama_train_compile", llama, True, "default", False),
        ("gpt_decode_eager", gpt, False, None, True),
        ("gpt_decode_graphs", gpt, False, "reduce-overhead", False),
    ):
        torch.compiler.reset()
        torch.cuda.empty_cache()
        spans[name] = record(out / f"{name}.json.gz", step_of(path, train, mode), stack=stack)
        print(name, f"{spans[name]:.0f} us a step", flush=True)
    (out / "spans.json").write_text(json.dumps(spans, indent=1) + "\n", "utf-8")


def step_of(path: Path, train: bool, mode: str | None) -> Callable[[], None]:
    """Step of a model file, on the GPU: a call without gradients, or one of training by AdamW."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    file: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    torch.manual_seed(0)
    model = file.Model(*file.get_init_inputs()).cuda()
    inputs: list[Tensor] = [each.cuda() for each in file.get_inputs()]
    call = model if mode is None else torch.compile(model, mode=mode)
    if not train:
        model.eval()

        def infer() -> None:
            with torch.no_grad():
                call(*inputs)

        return infer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def learn() -> None:
        logits = call(*inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[0].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return learn


def record(path: Path, step: Callable[[], None], stack: bool) -> float:
    """Write one trace; returns the median time of a step in microseconds, without the profiler."""
    for _ in range(3):
        step()
    times: list[float] = []
    for _ in range(TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    plain = path.with_suffix("")

    def export(made: Any) -> None:
        made.export_chrome_trace(str(plain))

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=2, active=STEPS),
        on_trace_ready=export,
        record_shapes=True,
        with_stack=stack,
    ) as profiler:
        for _ in range(2 + STEPS):
            step()
            torch.cuda.synchronize()
            profiler.step()
    with plain.open("rb") as text, gzip.open(path, "wb") as packed:
        shutil.copyfileobj(text, packed)
    plain.unlink()
    return statistics.median(times)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
