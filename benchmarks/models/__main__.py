"""Whole models on a GPU: a step in every way of running it; writes a table.

    python -m benchmarks.models --out DIR [--families Llama,BERT] [--ways eager,compile]

Four layers of each model at its real width, in bfloat16, on random weights: the model without its
head over 512 to 8192 tokens, and one token of a causal language model with its head against a
static cache filled to 4096. Each way of each job has a process of its own, which compiles its sizes
beside the others; then one process at a time measures. A step is the wall time of steps that
follow each other, the device waited for at the end: the median of several batches of steps. What a
way computes is held to eager's results: the distance of both as a share of eager's length.
"""
# transformers and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..gpu import ROOT, heading
from .step import batches, leading, on_gpu, warmed

WAYS = (
    "eager",
    "compile",
    "reduce-overhead",
    "backend",
    "backend+reduce-overhead",
    "graph",
)
"""Ways of running a model. `backend` is torch.compile with this package's backend, as `apply` has
it; `graph` is what eager launches, captured once in a CUDA graph and replayed."""


@dataclass(frozen=True)
class Size:
    """What one step gets: so many sequences of so many tokens, or images."""

    phase: Literal["forward", "decode"]
    batch: int
    tokens: int

    def __str__(self) -> str:
        if self.phase == "decode":
            return f"decode, batch {self.batch}, cache {self.tokens}"
        return f"{self.batch} x {self.tokens}"

    @property
    def made(self) -> int:
        """Tokens that a step is for."""
        return self.batch * (1 if self.phase == "decode" else self.tokens)


@dataclass(frozen=True)
class Family:
    """A configuration of `transformers`, and the sizes that it is run at."""

    config: dict[str, Any]
    sizes: tuple[Size, ...]
    weights_gb: float
    """With embeddings and head, four layers."""
    cached_gb: float = 0.0
    """The cache of one sequence of 4096 tokens, four layers."""

    def jobs(self) -> dict[str, tuple[Size, ...]]:
        """What one process runs: all lengths without a cache, or one batch with its cache."""
        forward = tuple(size for size in self.sizes if size.phase == "forward")
        decode = [size for size in self.sizes if size.phase == "decode"]
        return {"forward": forward, **{f"decode-{size.batch}": (size,) for size in decode}}

    def gigabytes(self, job: str) -> float:
        """Memory of the GPU that a process may need, roughly: for packing them."""
        if job == "forward":
            return self.weights_gb + 5.0
        batch = int(job.removeprefix("decode-"))
        return self.weights_gb + 2.5 + 1.2 * batch * self.cached_gb


_PREFILL = tuple(Size("forward", 1, tokens) for tokens in (512, 2048, 8192))
_DECODE = tuple(Size("decode", batch, 4096) for batch in (1, 64))

FAMILIES = {
    "Llama": Family(
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
        (*_PREFILL, *_DECODE), 3.9, 0.067,
    ),
    "BERT": Family(
        {
            "model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096,
            "num_attention_heads": 16,
        },
        tuple(Size("forward", batch, 512) for batch in (4, 1, 16)), 0.2,
    ),
    "ViT": Family(
        {
            "model_type": "vit", "hidden_size": 1024, "intermediate_size": 4096,
            "num_attention_heads": 16,
        },
        tuple(Size("forward", batch, 197) for batch in (10, 3, 42)), 0.2,
    ),
    "GPT-NeoX": Family(
        {
            "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
            "num_attention_heads": 64, "vocab_size": 50432, "max_position_embeddings": 8192,
        },
        (*_PREFILL, *_DECODE), 4.9, 0.403,
    ),
    "Mixtral": Family(
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
            "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
        },
        (*_PREFILL, *_DECODE), 12.0, 0.067,
    ),
}  # fmt: skip
_TOGETHER = 16
_TOGETHER_SHARE = 0.88
"""How many processes prepare at a time, and what they may take of the GPU's memory."""


@dataclass
class Row:
    """One way at one size. Times are milliseconds of a step, memory is the peak's bytes."""

    family: str
    way: str
    size: str
    tokens: int
    ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0
    apart: float = 0.0
    memory: int = 0
    launches: int = 0
    gpu_ms: dict[str, float] = field(default_factory=dict[str, float])
    said: str = ""
    failure: str = ""


# -- one way of one family, in a process of its own ------------------------------------------------


def child(name: str, job: str, way: str, layers: int, rehearse: bool) -> None:
    """Prepares every size, says "ready", and measures when it is told to."""
    import torch

    device = "cpu" if rehearse else "cuda"
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch._inductor.config.compile_threads = 1  # pyright: ignore[reportPrivateUsage]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    sizes = FAMILIES[name].jobs()[job]
    if rehearse:
        sizes = [replace(s, batch=min(s.batch, 2), tokens=s.tokens // 64) for s in sizes]
    runs = [*_prepared(name, way, sizes, layers, device)]
    print("ready", file=out)
    sys.stdin.readline()
    for row, call in runs:
        if call is not None:
            try:
                _measure(row, call, device)
            except Exception as error:  # noqa: BLE001 a way that fails is a row
                row.failure = _cause(error)
        print(json.dumps(asdict(row)), file=out)


_Run = tuple[Row, Callable[[], Any] | None]


def _prepared(
    name: str, way: str, sizes: Sequence[Size], layers: int, device: str
) -> Iterator[_Run]:
    """Each size with its step, compiled and held to eager."""
    import torch

    model, given = _built(name, sizes[0], layers, device)
    inputs = [given, *(_given(name, size, device) for size in sizes[1:])]
    eager = [leading(model(**given)).clone() for given in inputs]
    rows = [Row(name, way, str(size), size.made) for size in sizes]
    try:
        steps = _way(model, way)
    except Exception as error:  # noqa: BLE001 a way that fails is a row
        for row in rows:
            row.failure = _cause(error)
            yield row, None
        return
    for row, given, wanted in zip(rows, inputs, eager, strict=True):
        try:
            if way.endswith("graph"):
                steps = _graphed(model, given)
            found = leading(steps(**given)).clone()
            row.apart = float((found.double() - wanted.double()).norm() / wanted.double().norm())
            del found
            row.said = _taken(way)
            if device == "cuda":
                torch.cuda.empty_cache()
            yield row, partial(steps, **given)
        except Exception as error:  # noqa: BLE001 a way that fails is a row
            row.failure = _cause(error)
            yield row, None


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _built(name: str, size: Size, layers: int, device: str) -> tuple[Any, dict[str, Any]]:
    """The model of a phase on the device, with inputs."""
    import torch
    import transformers

    from fusion_advisor.frontend.hf import built
    from fusion_advisor.ir.scenario import Scenario

    fields = {**FAMILIES[name].config, "num_hidden_layers": layers}
    if device == "cpu":
        fields |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        fields |= {"vocab_size": 500, "num_key_value_heads": 4} if "vocab_size" in fields else {}
    config: Any = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.bfloat16
    decode = size.phase == "decode"
    cls = transformers.AutoModelForCausalLM if decode else transformers.AutoModel
    scenario = Scenario(
        phase=size.phase, batch=size.batch, seq=None if decode else size.tokens,
        kv_len=size.tokens if decode else None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model, given = built(cls, config, scenario, [])
    if decode:  # it is called many times, and a cache that is full has room for one token
        given["past_key_values"].reset()
    return model.eval(), given


def _given(name: str, size: Size, device: str) -> dict[str, Any]:
    """Inputs of another size for a model that is there."""
    import torch

    vocabulary = FAMILIES[name].config.get("vocab_size", 30522) if device == "cuda" else 500
    with torch.device(device):
        if name == "ViT":
            return {"pixel_values": torch.randn(size.batch, 3, 224, 224)}  # 197 tokens each
        given = {"input_ids": torch.randint(0, vocabulary, (size.batch, size.tokens))}
    return given if name == "BERT" else {**given, "use_cache": False}


def _taken(way: str) -> str:
    """What the backend has taken of the graph that was compiled last."""
    if not way.startswith("backend"):
        return ""
    from fusion_advisor.dynamo.backend import last

    outcome = last()
    if outcome is None:
        return "nothing was compiled"
    return outcome.why or ", ".join(p.name for p in outcome.taken) or "nothing is ours"


def _graphed(model: Any, given: dict[str, Any]) -> Callable[..., Any]:
    """Replays of one call, captured."""
    import torch

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        model(**given)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(**given)

    def replay(**_: Any) -> Any:
        graph.replay()
        return found

    return replay


def _way(model: Any, way: str) -> Callable[..., Any]:
    import torch

    if way in ("eager", "graph"):
        return model
    mode = "reduce-overhead" if way.endswith("reduce-overhead") else None
    if way.startswith("backend"):
        from fusion_advisor.dynamo.backend import fusion_advisor

        # By the function: the name is known where the package is installed.
        return torch.compile(model, backend=fusion_advisor, mode=mode, dynamic=False)
    return torch.compile(model, mode=mode, dynamic=False)


def _measure(row: Row, step: Callable[[], Any], device: str) -> None:
    import torch

    warmed(step, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    spent = batches(step, device)
    row.low_ms, row.ms, row.high_ms = statistics.quantiles(spent, n=4)
    if device == "cuda":
        row.memory = torch.cuda.max_memory_allocated()
        row.gpu_ms, row.launches = on_gpu(step)


# -- all of them -----------------------------------------------------------------------------------


Job = tuple[str, str, str]
"""Family, what of it, and the way."""


def _start(job: Job, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    log = (arguments.out / "logs" / f"{'_'.join(job)}.log").open("w")
    given = ["--child", *job, "--layers", str(arguments.layers)]
    given += ["--rehearse"] if arguments.rehearse else []
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.models", *given], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip


def _waves(arguments: argparse.Namespace) -> list[list[Job]]:
    """Processes that prepare together: all ways of a job where there is room."""
    import torch

    waves: list[list[Job]] = [[]]
    used, room = 0.0, math.inf
    if not arguments.rehearse:
        room = torch.cuda.get_device_properties(0).total_memory / 1e9 * _TOGETHER_SHARE
    for name in arguments.families:
        family = FAMILIES[name]
        for what in (job for job in family.jobs() if job in arguments.jobs):
            for way in arguments.ways:
                needs = family.gigabytes(what)
                if waves[-1] and (used + needs > room or len(waves[-1]) == _TOGETHER):
                    waves.append([])
                    used = 0.0
                waves[-1].append((name, what, way))
                used += needs
    return waves


def run(arguments: argparse.Namespace) -> list[Row]:
    """A wave of processes after the other; rows are kept as they come."""
    deadline = time.monotonic() + arguments.seconds
    rows: list[Row] = []
    for wave in _waves(arguments):
        running = [(job, _start(job, arguments)) for job in wave]
        for job, process in running:
            ready = _within(process, deadline - time.monotonic())
            left = deadline - time.monotonic()
            print(f"{' '.join(job)}: {ready}, {left:.0f} s left", flush=True)
        for (name, what, way), process in running:
            answers = ""
            with suppress(subprocess.TimeoutExpired, BrokenPipeError):
                answers, _ = process.communicate("go\n", max(1.0, deadline - time.monotonic()))
            process.kill()
            found = [Row(**json.loads(line)) for line in answers.splitlines() if line[:1] == "{"]
            rows += found or [Row(name, way, what, 0, failure="did not answer")]
            (arguments.out / "whole_models.json").write_text(
                json.dumps([asdict(row) for row in rows], indent=1)
            )
    return rows


def _within(process: subprocess.Popen[str], seconds: float) -> str:
    """The process's first line, if it comes in time."""
    import select

    assert process.stdout is not None
    seen, _, _ = select.select([process.stdout], [], [], max(0.0, seconds))
    return process.stdout.readline().strip() or "ended" if seen else "late"


def table(rows: Sequence[Row]) -> str:
    """A table for each family: step times, and the best way beside eager and torch.compile."""
    lines = [*heading("Whole models"), ""]
    for name in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == name]
        ways = list(dict.fromkeys(row.way for row in own))
        lines += [f"## {name}", "", "| size | " + " | ".join(ways) + " | best | tokens/s |"]
        lines.append("|---" * (len(ways) + 3) + "|")
        for size in dict.fromkeys(row.size for row in own if row.size):
            at = {row.way: row for row in own if row.size == size}
            times = {way: row.ms for way, row in at.items() if row.ms}
            best = min(times, key=lambda way: times[way], default="")
            shown = [f"{times[way]:.3f}" if way in times else "—" for way in ways]
            speed = f"{at[best].tokens / times[best] * 1e3:,.0f}" if best else ""
            lines.append(f"| {size} | {' | '.join(shown)} | {best} | {speed} |")
        lines += ["", *_means(own, ways), *_details(own), ""]
    failed = [row for row in rows if row.failure]
    lines += [
        "## What failed",
        "",
        *(f"- {r.family} {r.way} {r.size}: {r.failure}" for r in failed),
    ]
    return "\n".join(lines) + "\n"


def _means(rows: Sequence[Row], ways: Sequence[str]) -> list[str]:
    """Geometric means of eager over each way, over the sizes that both have."""
    eager = {row.size: row.ms for row in rows if row.way == "eager" and row.ms}
    said: list[str] = []
    for way in ways[1:]:
        ratios = [eager[r.size] / r.ms for r in rows if r.way == way and r.ms and r.size in eager]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            said.append(f"{way} {mean:.2f}")
    return [f"Eager over each way, geometric mean: {', '.join(said)}.", ""] if said else []


def _details(rows: Sequence[Row]) -> list[str]:
    lines = ["| size | way | GPU ms by kind of kernel | kernels | from eager | kernels of ours |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        if row.ms:
            kinds = ", ".join(f"{k} {ms:.3f}" for k, ms in sorted(row.gpu_ms.items()))
            lines.append(
                f"| {row.size} | {row.way} | {kinds} | {row.launches} | {row.apart:.2g}"
                f" | {row.said} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--families", type=lambda t: t.split(","), default=list(FAMILIES))
    parser.add_argument("--ways", type=lambda t: t.split(","), default=list(WAYS))
    jobs = "forward,decode-1,decode-64"
    parser.add_argument("--jobs", type=lambda t: t.split(","), default=jobs.split(","))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--rehearse", action="store_true", help="narrow models, on the CPU")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.layers, arguments.rehearse)
        return
    (arguments.out / "logs").mkdir(parents=True, exist_ok=True)
    rows = run(arguments)
    (arguments.out / "whole_models.md").write_text(table(rows))


if __name__ == "__main__":
    main()
