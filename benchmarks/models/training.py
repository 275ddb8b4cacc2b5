"""Training steps of whole models: forward, loss and backward under the backend, beside eager and
torch.compile; writes a table.

    python -m benchmarks.models.training [--jobs llama,bert] [--ways eager,liger] [--out DIR]

Four layers of each model at its real width in bfloat16 on random weights, without dropout and
without an optimizer; the function that returns the loss is what is compiled. One process measures
one way after the other: the wall time of steps that follow each other, the median of seven batches;
`peak` is the most memory that a step holds, weights included; `first` the seconds of the first
step. `apart` is the distance to eager's gradients of all parameters as a share of their length,
`eager again` that of a second eager step. With `--rehearse` the models are narrow and run on the
CPU.
"""
# transformers and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..gpu import heading
from .step import batches, warmed


@dataclass(frozen=True)
class Job:
    """A model class of transformers with what its configuration has, and the sizes of a call."""

    kind: str
    auto: str
    fields: dict[str, Any]
    batch: int
    tokens: int


_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
_QWEN3 = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
_VIT = {**_BERT, "image_size": 224, "patch_size": 16, "num_labels": 1000}

JOBS = {
    "llama": Job("llama", "AutoModelForCausalLM", _LLAMA, 4, 2048),
    "qwen3": Job("qwen3", "AutoModelForCausalLM", _QWEN3, 4, 2048),
    "bert": Job("bert", "AutoModelForMaskedLM", _BERT, 32, 512),
    "vit": Job("vit", "AutoModelForImageClassification", _VIT, 64, 0),
}
WAYS = (
    "eager", "compile", "backend:training=False", "backend",
    "backend:chunked_loss=True",
)  # fmt: skip


def way_of(name: str, model: Any, outcomes: list[Any]) -> Callable[..., Any]:
    """The loss of a model as one way runs it: `backend` takes options after colons, as
    `backend:rewrites=False`, and adds its outcomes."""
    import torch

    from fusion_advisor.dynamo.backend import fusion_advisor

    def loss(**given: Any) -> Any:
        return model(**given).loss

    if name == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as liger

        liger(model=model)  # in place: the last way of a process
    if name in ("eager", "liger"):
        return loss
    if name == "compile":
        return torch.compile(loss)
    options = [each.partition("=") for each in name.split(":")[1:]]
    chosen = {key: {"True": True, "False": False}.get(value, value) for key, _, value in options}
    return torch.compile(loss, backend=partial(
        fusion_advisor, options=chosen, on_outcome=outcomes.append,
    ))  # fmt: skip


def built(job: Job, device: str) -> tuple[Any, dict[str, Any]]:
    """The model and its inputs with labels."""
    import torch
    import transformers

    config: Any = transformers.AutoConfig.for_model(job.kind, **job.fields)
    config.num_hidden_layers = 4
    for name in ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    with torch.device(device):
        auto = getattr(transformers, job.auto)
        model = auto.from_config(config, dtype=torch.bfloat16)
    return model, given_of(job, config, device)


def given_of(job: Job, config: Any, device: str) -> dict[str, Any]:
    """Random inputs with labels of a model with a configuration."""
    import torch

    with torch.device(device):
        if not job.tokens:
            size = config.image_size
            pixels = torch.randn(job.batch, 3, size, size, dtype=torch.bfloat16)
            labels = torch.randint(0, config.num_labels, (job.batch,))
            return {"pixel_values": pixels, "labels": labels}
        ids = torch.randint(0, config.vocab_size, (job.batch, job.tokens))
        return {"input_ids": ids, "labels": ids}


def narrow(job: Job) -> Job:
    """The job at a width that a CPU runs."""
    small = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    }  # fmt: skip
    fields = {name: small.get(name, value) for name, value in job.fields.items()}
    return Job(job.kind, job.auto, fields, 2, min(job.tokens, 64))


def _step(call: Callable[..., Any], model: Any, given: dict[str, Any]) -> Any:
    model.zero_grad(set_to_none=True)
    loss = call(**given)
    loss.backward()
    return loss.detach()


def _gradients(model: Any) -> dict[str, Any]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Distance of all gradients as a share of their length; infinite where one is missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    off = sum(float((found[n] - wanted[n]).float().norm()) ** 2 for n in wanted)
    return (off / sum(float(g.float().norm()) ** 2 for g in wanted.values())) ** 0.5


def _said(outcomes: Sequence[Any]) -> str:
    """Rewrites and kernels of a step, with how often each is in it."""
    made = Counter(each.name for outcome in outcomes for each in outcome.rewrites)
    made += Counter(
        f"{outcome.phase} {place.name}" for outcome in outcomes for place in outcome.taken
    )
    return ", ".join(f"{each} x{count}" for each, count in made.items())


def rows(name: str, ways: Sequence[str], *, rehearse: bool) -> list[str]:
    """Rows of the table for one job."""
    import torch

    device = "cpu" if rehearse else "cuda"
    job = narrow(JOBS[name]) if rehearse else JOBS[name]
    model, given = built(job, device)
    model.train()
    eager = way_of("eager", model, [])
    _step(eager, model, given)
    wanted = _gradients(model)
    _step(eager, model, given)
    again = _apart(_gradients(model), wanted)
    found: list[str] = []
    for way in ways:
        torch.compiler.reset()
        gc.collect()
        if not rehearse:
            torch.cuda.empty_cache()
        outcomes: list[Any] = []
        call = way_of(way, model, outcomes)
        step = partial(_step, call, model, given)
        began = time.perf_counter()
        step()
        apart = _apart(_gradients(model), wanted)
        first = time.perf_counter() - began
        warmed(step, device)
        peak = 0.0
        if not rehearse:
            gc.collect()  # what the first step left in cycles is no part of a step
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            # What the measurement itself keeps, eager's gradients, is no part of the step.
            kept = sum(g.numel() * g.element_size() for g in wanted.values())
            peak = (torch.cuda.max_memory_allocated() - kept) / 1e9
        spent = statistics.median(batches(step, device))
        found.append(
            f"| {name} | {job.batch} x {job.tokens} | {way} | {spent:.2f} | {peak:.2f} |"
            f" {first:.0f} | {apart:.4f} | {again:.4f} |"
            f" {_said(outcomes)} |"
        )
        print(found[-1], flush=True)
    return found


def table(lines: Sequence[str]) -> str:
    """The table; times are milliseconds of a step, memory is in GB."""
    head = "| model | size | way | ms | peak GB | first s | apart | eager again | what is ours |"
    top = [*heading("Training steps of whole models"), "", head, "|---" * 9 + "|"]
    return "\n".join([*top, *lines]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--rehearse", action="store_true", help="narrow models, on the CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for name in options.jobs.split(","):
        lines += rows(name, options.ways.split(","), rehearse=options.rehearse)
        (options.out / "training.md").write_text(table(lines))


if __name__ == "__main__":
    main()
