"""Rewrites of attention in whole models: a step with them and without, beside eager and
torch.compile; writes a table.

    python -m benchmarks.models.rewrites [--jobs llama,bert] [--out DIR]

Four layers of each model at its real width in bfloat16 on random weights, without the head, and
with a padding mask of ones where `padding` says so, as a tokenizer gives it. One process measures
one way after the other: the wall time of steps that follow each other, the median of seven
batches. `apart` is the distance to eager's result as a share of its length.
"""
# transformers and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..gpu import heading
from .step import batches, warmed

_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 16384,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A model type with what its configuration has, and the sizes of a call."""

    kind: str
    fields: dict[str, Any]
    batch: int
    tokens: int
    padding: bool


JOBS = {
    "llama-8192": Job("llama", _LLAMA, 1, 8192, padding=False),
    "llama-8192-padding": Job("llama", _LLAMA, 1, 8192, padding=True),
    "llama-2048-padding": Job("llama", _LLAMA, 4, 2048, padding=True),
    "qwen3-padding": Job(
        "qwen3",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
        },
        4, 2048, padding=True,
    ),
    "bert-padding": Job("bert", {}, 32, 512, padding=True),
    "gpt2-padding": Job("gpt2", {"n_embd": 1600, "n_head": 25}, 4, 1024, padding=True),
    "mistral-window": Job(
        "mistral", {**_LLAMA, "sliding_window": 1024}, 1, 4096, padding=False
    ),
}  # fmt: skip


def _ways(model: Any) -> dict[str, Callable[..., Any]]:
    import torch

    from fusion_advisor.dynamo.backend import fusion_advisor

    without = partial(fusion_advisor, options={"rewrites": False})
    return {
        "eager": model,
        "compile": torch.compile(model),
        "backend": torch.compile(model, backend=fusion_advisor),
        "backend, no rewrites": torch.compile(model, backend=without),
    }


def row(name: str) -> str:
    """Row of the table for one job."""
    import torch
    import transformers

    from fusion_advisor.dynamo.backend import last

    job = JOBS[name]
    config: Any = transformers.AutoConfig.for_model(job.kind, **job.fields)
    setattr(config, "n_layer" if job.kind == "gpt2" else "num_hidden_layers", 4)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).eval()
        given = {"input_ids": torch.randint(0, 30000, (job.batch, job.tokens))}
        if job.padding:
            given["attention_mask"] = torch.ones(job.batch, job.tokens, dtype=torch.int64)
    cells, apart, said = list[str](), list[str](), ""
    wanted: Any = None
    with torch.no_grad():
        for way, step in _ways(model).items():
            torch.compiler.reset()
            found = step(**given)[0].float()
            wanted = found if wanted is None else wanted
            apart.append(f"{float((found - wanted).norm() / wanted.norm()):.4f}")
            call = partial(step, **given)
            warmed(call)
            cells.append(f"{statistics.median(batches(call)):.2f}")
            if way == "backend" and (outcome := last()) is not None:
                made = Counter(each.name for each in outcome.rewrites)
                said = ", ".join(f"{each} x{count}" for each, count in made.items()) or "none"
    size = f"{job.batch} x {job.tokens}"
    return f"| {name} | {size} | {' | '.join(cells)} | {', '.join(apart[1:])} | {said} |"


def table(rows: Sequence[str]) -> str:
    """The table; times are milliseconds of a step."""
    ways = "eager | compile | backend | backend, no rewrites"
    lines = [*heading("Rewrites of attention in whole models"), ""]
    lines += [f"| model | size | {ways} | apart | rewrites |", "|---" * 8 + "|", *rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    for name in options.jobs.split(","):
        rows.append(row(name))
        print(rows[-1], flush=True)
        (options.out / "rewrites.md").write_text(table(rows))


if __name__ == "__main__":
    main()
