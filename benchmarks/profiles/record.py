"""Traces of torch's profiler, made on a GPU, and what is true of them by other means.

    python -m benchmarks.profiles.record OUT

Six traces of two models, `OUT/NAME.json.gz`: prefill, training and decode, in eager mode, compiled
and by CUDA graphs; each has five steps. `OUT/spans.json` holds the median time of a step in
microseconds, without the profiler. Of an eager step `OUT/NAME.ops.json` has every op as torch
dispatches it, with its time between two CUDA events, the median of five steps; and
`OUT/NAME.ranges.json.gz` is a trace in which each op's kernels lie in a range of its own, `op#N`.
`benchmarks.profiles.links` compares them.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

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
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import ROOT

STEPS, TIMED = 5, 10
AHEAD = 400_000_000
"""Cycles that the GPU sleeps for while the host gets ahead of it: 0.2 s."""


def main(out: Path) -> None:
    """Record the six traces."""
    out.mkdir(parents=True, exist_ok=True)
    llama, gpt = ROOT / "examples/llama_block.py", ROOT / "benchmarks/profiles/gpt.py"
    loss = ROOT / "benchmarks/profiles/llama.py"
    spans: dict[str, float] = {}
    for name, path, train, mode, stack in (
        ("llama_prefill_eager", llama, False, None, True),
        ("llama_prefill_compile", llama, False, "default", False),
        ("llama_train_eager", loss, True, None, False),
        ("llama_train_compile", loss, True, "default", False),
        ("gpt_decode_eager", gpt, False, None, True),
        ("gpt_decode_graphs", gpt, False, "reduce-overhead", False),
    ):
        torch.compiler.reset()
        torch.cuda.empty_cache()
        step = step_of(path, train, mode)
        spans[name] = record(out / f"{name}.json.gz", step, stack=stack)
        print(name, f"{spans[name]:.0f} us a step", flush=True)
        if mode is None:
            ops = timed(step, out / f"{name}.ranges.json.gz")
            (out / f"{name}.ops.json").write_text(json.dumps(ops) + "\n", "utf-8")
    (out / "spans.json").write_text(json.dumps(spans, indent=1) + "\n", "utf-8")


def step_of(path: Path, train: bool, mode: str | None) -> Callable[[], None]:
    """Step of a model file, on the GPU: a call without gradients, or one of training by AdamW, of a
    model that returns its loss."""
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
        call(*inputs).backward()
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
    pack(plain, path)
    return statistics.median(times)


# -- truth by other means --------------------------------------------------------------------------


class _Ops(TorchDispatchMode):
    """Notes each op, between two CUDA events, and runs it in a range of its own."""

    def __init__(self, by_events: bool) -> None:
        super().__init__()
        self.by_events = by_events
        self.ops: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.by_events:
            self.ops.append((str(func), None, None))
            with record_function(f"op#{len(self.ops) - 1}"):
                return func(*args, **(kwargs or {}))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = func(*args, **(kwargs or {}))
        end.record()
        self.ops.append((str(func), begin, end))
        return made


def dispatched(step: Callable[[], None], *, by_events: bool) -> list[tuple[str, float]]:
    """Ops of a step in their order, with the microseconds of each between two events, else 0."""
    with _Ops(by_events) as seen:
        if by_events:
            torch.cuda._sleep(AHEAD)
        step()
    if not by_events:
        return [(name, 0.0) for name, _, _ in seen.ops]
    torch.cuda.synchronize()
    return [(name, begin.elapsed_time(end) * 1e3) for name, begin, end in seen.ops]


def timed(step: Callable[[], None], ranges: Path) -> list[tuple[str, float]]:
    """Ops of a step with their median times of five; writes the trace with a range for each."""
    runs = [dispatched(step, by_events=True) for _ in range(STEPS)]
    plain = ranges.with_suffix("")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        dispatched(step, by_events=False)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(plain))
    pack(plain, ranges)
    names = [name for name, _ in runs[0]]
    assert all([name for name, _ in run] == names for run in runs), "steps differ"
    return [(name, statistics.median(run[i][1] for run in runs)) for i, name in enumerate(names)]


def pack(plain: Path, packed: Path) -> None:
    """Put a file's packed copy in its place."""
    with plain.open("rb") as text, gzip.open(packed, "wb") as written:
        shutil.copyfileobj(text, written)
    plain.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
