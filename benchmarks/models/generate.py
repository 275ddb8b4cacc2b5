"""Tokens that a model of a billion parameters writes by `generate()`; writes a table.

    python -m benchmarks.models.generate [--model llama|gemma3_text] [--batches 1,8,64]
        [--tokens 128] [--seconds 300] [--out D]

The model has the sizes of Llama 3.2 1B or of Gemma 3 1B, most of whose layers see a window of 512
tokens, in bfloat16 on random weights; the prompt has 128 tokens and no padding. `eager` has a cache
that grows; `transformers` a static one, for which `generate()` calls torch.compile for one token by
itself (reduce-overhead); `apply` is that with `fusion_advisor.apply` before. Each way has a process
of its own. A token's time is what lies between two calls of a stopping criterion, which waits for
the GPU; the first two runs of each batch are not counted.
"""
# transformers is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..gpu import ROOT, heading

WAYS = ("eager", "transformers", "apply")
PROMPT = 128
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512, "max_position_embeddings": 32768,
    },
}  # fmt: skip

Row = dict[str, Any]


def child(kind: str, way: str, batches: list[int], tokens: int) -> None:
    """Measure a way; print a row for each batch."""
    import torch
    import transformers

    import fusion_advisor as fa

    torch.manual_seed(0)
    with torch.device("cuda"):
        config = transformers.AutoConfig.for_model(kind, **SIZES[kind], dtype=torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for batch in batches:
        torch.compiler.reset()
        vars(model).pop("_compiled_call", None)
        row: Row = {"way": way, "batch": batch}
        try:
            done = fa.apply(model) if way == "apply" else None
            ids = torch.randint(0, 128000, (batch, PROMPT), device="cuda")
            row |= _measured(model, ids, "dynamic" if way == "eager" else "static", tokens)
            if done is not None:
                row["placed"] = sum(done.kernels.values())
                row["rewrites"] = done.rewrites
        except Exception as error:  # noqa: BLE001 a way that fails is a row
            row["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(json.dumps(row), flush=True)


def _measured(model: Any, ids: Any, cache: str, tokens: int) -> Row:
    import torch

    moments: list[float] = []

    def noted(given: Any, scores: Any, **_: Any) -> Any:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        return torch.zeros(given.shape[0], dtype=torch.bool, device=given.device)

    def run(count: int) -> Any:
        moments.clear()
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
            min_new_tokens=count, do_sample=False, pad_token_id=0, cache_implementation=cache,
            stopping_criteria=[noted],
        )  # fmt: skip

    began = time.perf_counter()
    run(tokens)
    first = time.perf_counter() - began
    run(tokens)
    spent, whole = list[float](), list[float]()
    found: Any = None
    for _ in range(3):
        began = time.perf_counter()
        found = run(tokens)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
        spent += [1e3 * (b - a) for a, b in pairwise(moments)]
    cuts = statistics.quantiles(spent, n=100)
    return {
        "per_s": ids.shape[0] * tokens / statistics.median(whole), "p50": cuts[49], "p99": cuts[98],
        "first": first, "mark": found[:, PROMPT:].sum().item(),
    }  # fmt: skip


def table(rows: list[Row]) -> list[str]:
    """A line for each way of each batch."""
    lines = [
        "| batch | way | tokens/s | a token: p50 ms | p99 ms | first call s | apply |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda each: each["batch"]):
        if "failure" in row:
            lines.append(f"| {row['batch']} | {row['way']} | {row['failure']} | | | | |")
            continue
        placed = f"{row['placed']} kernels, {row['rewrites']}" if "placed" in row else ""
        lines.append(
            f"| {row['batch']} | {row['way']} | {row['per_s']:.0f} | {row['p50']:.3f} |"
            f" {row['p99']:.3f} | {row['first']:.1f} | {placed} |"
        )
    return lines


def main() -> int:
    """Measure every way, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="llama")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "build")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches = [int(each) for each in options.batches.split(",")]
    if options.way:
        child(options.model, options.way, batches, options.tokens)
        return 0
    until, rows = time.monotonic() + options.seconds, list[Row]()
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.models.generate", "--way", way]
        command += ["--model", options.model, "--batches", options.batches]
        command += ["--tokens", str(options.tokens)]
        try:
            left = max(1.0, until - time.monotonic())
            ran = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=left, check=False
            )
            said = ran.stdout
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode()
        lines = [line for line in said.splitlines() if line.startswith("{")]
        rows += [json.loads(line) for line in lines]
        print("\n".join(lines), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*heading("Tokens by generate()"), "", *table(rows), ""])
    (options.out / "generate.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
