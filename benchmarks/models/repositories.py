"""Public repositories, called as their users call them, in every way of running; writes a table.

    python -m benchmarks.models.repositories FOLDER [--only nanoGPT,whisper] [--out DIR]

FOLDER has a checkout of each repository under its name here, at the commit that the first table of
`results/repositories.md` has; no line of them is changed. A module in FOLDER/stubs is imported
before any other of its name: one that raises when it is used stands for a package that a repository
imports and its model does not call, as whisper does `numba`. Each class is built on random weights
by its own entry point, and called without gradients as that file says; of gpt-fast it is the
prefill, which makes its mask in each call, without the token that is drawn at its end.

Each way has a process and empty caches of compilers of its own; the four of a repository prepare
together and measure in turn, on one core. `backend` is `fusion_advisor.apply`, `tuned` that with
`tune="now"`. A step is the wall time of steps that follow each other in milliseconds, the median of
seven batches; `GPU` is what the GPU works in one; `first` the first call's seconds; `apart` the
distance to eager's result. On `--device cpu` models are narrow, and no kernel of ours runs.
"""
# transformers, torch.compile and the repositories are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..gpu import heading, json_lines
from .ways import Way, measured, serve

WAYS = ("eager", "compile", "backend", "tuned")
"""Ways of running a call: `backend` is `fusion_advisor.apply`, `tuned` that with `tune="now"`."""
OURS = WAYS[2:]
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What is called, and what it gets."""


# -- the repositories: each builds on the device that is torch's default ---------------------------


def nano_gpt(small: bool) -> Call:
    from model import GPT, GPTConfig

    sizes = {"block_size": 64, "vocab_size": 256, "n_head": 2, "n_embd": 64} if small else {}
    config = GPTConfig(n_layer=4, **sizes)
    batch = 2 if small else 8
    ids = torch.randint(0, config.vocab_size, (batch, config.block_size))
    return GPT(config).to(torch.bfloat16).eval(), (ids, ids.roll(-1, 1)), {}


def gpt_fast(small: bool) -> Call:
    from model import ModelArgs, Transformer
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = 128 if small else 2048
    llama = {
        "block_size": 8192, "n_head": 32, "n_local_heads": 8, "dim": 4096,
        "intermediate_size": 14336, "vocab_size": 128256, "rope_base": 500000,
    }  # fmt: skip
    narrow = {"block_size": 128, "n_head": 4, "n_local_heads": 2, "dim": 64, "vocab_size": 256}
    model = Transformer(ModelArgs(n_layer=4, **(narrow if small else llama)))
    model = model.to(torch.bfloat16).eval()
    model.setup_caches(max_batch_size=1, max_seq_length=tokens)

    def causal(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return query >= key

    def prefill(ids: Any, places: Any) -> Any:
        length = places.shape[0], model.max_seq_length
        return model(create_block_mask(causal, 1, 1, *length, device=ids.device), ids, places)

    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    return prefill, (ids, torch.arange(tokens)), {}


def whisper(small: bool) -> Call:
    from whisper.model import ModelDimensions, Whisper

    audio = (64, 2, 1) if small else (384, 6, 4)
    dims = ModelDimensions(80, 1500, *audio, 51865, 448, *audio)
    batch = 1 if small else 8
    tokens = torch.randint(0, dims.n_vocab, (batch, 224))
    model = Whisper(dims).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)  # empty until it is loaded
    return model, (torch.randn(batch, dims.n_mels, 3000), tokens), {}


def x_transformers(small: bool) -> Call:
    from x_transformers import Decoder, TransformerWrapper

    dim, depth, tokens, batch = (64, 2, 64, 2) if small else (1024, 6, 1024, 8)
    layers = Decoder(
        dim=dim, depth=depth, heads=dim // 64, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True
    )
    model = TransformerWrapper(num_tokens=20000, max_seq_len=1024, attn_layers=layers)
    return model.to(torch.bfloat16).eval(), (torch.randint(0, 20000, (batch, tokens)),), {}


def vit_pytorch(small: bool) -> Call:
    from vit_pytorch import ViT

    model = ViT(
        image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=1 if small else 6,
        heads=16, mlp_dim=2048, dropout=0.1, emb_dropout=0.1,
    )  # fmt: skip
    return model.eval(), (torch.randn(1 if small else 64, 3, 256, 256),), {}


def dinov2(small: bool) -> Call:
    from dinov2.models.vision_transformer import vit_base

    batch, size = (1, 56) if small else (8, 518)
    model = vit_base(patch_size=14, img_size=518, init_values=1.0, block_chunks=0)
    images = torch.randn(batch, 3, size, size, dtype=torch.bfloat16)
    return model.to(torch.bfloat16).eval(), (images,), {}


def peft(small: bool) -> Call:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    from .training import JOBS, narrow

    job = narrow(JOBS["llama"]) if small else JOBS["llama"]
    config = LlamaConfig(**job.fields, num_hidden_layers=4)
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(model, adapters)
    ids = torch.randint(0, config.vocab_size, (2, job.tokens))
    return model.eval(), (), {"input_ids": ids, "labels": ids}


def diffusers(small: bool) -> Call:
    from diffusers import UNet2DConditionModel

    size = 16 if small else 64
    sizes = {"block_out_channels": (32, 64, 64, 64)} if small else {}
    model = UNet2DConditionModel(sample_size=size, cross_attention_dim=768, **sizes)
    dtype = torch.float32 if small else torch.float16
    latents = torch.randn(2, 4, size, size, dtype=dtype)
    text = torch.randn(2, 77, 768, dtype=dtype)
    given = {"encoder_hidden_states": text, "return_dict": False}
    return model.to(dtype).eval(), (latents, torch.tensor(500)), given


def timm(small: bool) -> Call:
    from timm import create_model

    batch, size = (1, 64) if small else (16, 224)
    images = torch.randn(batch, 3, size, size, dtype=torch.bfloat16)
    return create_model("convnext_base").to(torch.bfloat16).eval(), (images,), {}


REPOSITORIES: dict[str, Callable[[bool], Call]] = {
    "nanoGPT": nano_gpt, "gpt-fast": gpt_fast, "whisper": whisper,
    "x-transformers": x_transformers, "vit-pytorch": vit_pytorch, "dinov2": dinov2, "peft": peft,
    "diffusers": diffusers, "timm": timm,
}  # fmt: skip
"""By the name of the checkout."""


# -- one way of one repository ---------------------------------------------------------------------


def tried(row: Way, call: Call, device: str) -> Callable[[], Any]:
    """A step of a way, after its first call, which is held to eager's."""
    import torch

    import fusion_advisor as fa

    run, args, kwargs = call
    wanted = _compared(run(*args, **kwargs), device)
    done = None
    if row.way == "compile":
        run = torch.compile(run)
    elif row.way in OURS:
        done = fa.apply(run, tune="now" if row.way == "tuned" else None)
        run = done.run
    began = time.perf_counter()
    found = _compared(run(*args, **kwargs), device)
    row.first = time.perf_counter() - began
    row.apart = float((found - wanted).norm() / wanted.norm())
    if done is not None:
        rewrites = ", ".join(f"{name} x{count}" for name, count in done.rewrites.items())
        why = f" ({next(iter(done.refused.values()))})" if done.refused and not done.kernels else ""
        row.said = f"{sum(done.kernels.values())}{why}; {rewrites or 'none'}"
    return lambda: run(*args, **kwargs)


def _compared(result: Any, device: str) -> Any:
    """The first tensor of a result that is no single number, once it is there."""
    import torch

    every = [result] if hasattr(result, "shape") else result
    every = every.values() if hasattr(every, "values") else every
    found = next(each for each in every if hasattr(each, "shape") and each.dim()).float()
    if device == "cuda":
        torch.cuda.synchronize()
    return found


def prepared(row: Way, folder: Path, device: str) -> Callable[[], Any]:
    """A step of a way of a repository, after its first call."""
    checkout = folder / row.name
    if not checkout.is_dir():
        raise FileNotFoundError(f"no checkout {row.name}")
    source = checkout / "src"
    sys.path[:0] = [str(folder / "stubs"), str(source if source.is_dir() else checkout)]
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    with torch.device(device):
        call = REPOSITORIES[row.name](device == "cpu")
    return tried(row, call, device)


# -- all of them -----------------------------------------------------------------------------------


def table(rows: Sequence[Way]) -> str:
    """The table: a line for each repository, and what failed."""
    lines = [
        *heading("Public repositories on a GPU"), "", *(__doc__ or "").split("\n\n", 2)[2:],
        "| repository | " + " | ".join(WAYS) + " | "
        + " | ".join(f"best of eager and compile / {way}" for way in OURS)
        + " | GPU: " + ", ".join(WAYS) + " | " + " | ".join(
            f"{what}: " + ", ".join(WAYS[1:]) for what in ("first", "apart")
        ) + " | placed; rewrites | failed |",
        "|---" * (len(WAYS) + len(OURS) + 6) + "|",
    ]  # fmt: skip
    for name in dict.fromkeys(row.name for row in rows):
        of = {row.way: row for row in rows if row.name == name}
        ran = {way: row for way, row in of.items() if not row.failure}
        best = min((ran[way].ms for way in WAYS[:2] if way in ran), default=0.0)

        causes: dict[str, list[str]] = {}
        for row in of.values():
            causes.setdefault(row.failure.replace("|", "/"), []).append(row.way)

        def each(ways: Sequence[str], of: Callable[[Way], str], ran: dict[str, Way] = ran) -> str:
            return ", ".join(of(ran[way]) if way in ran else "-" for way in ways)

        steps = [each([way], lambda row: f"{row.ms:.3f}") for way in WAYS]
        ratios = [f"{best / ran[way].ms:.3f}" if best and way in ran else "-" for way in OURS]
        lines.append("| " + " | ".join([
            name, *steps, *ratios, each(WAYS, lambda row: f"{row.worked:.3f}"),
            each(WAYS[1:], lambda row: f"{row.first:.1f}"),
            each(WAYS[1:], lambda row: f"{row.apart:.4f}"),
            " / ".join(dict.fromkeys(ran[way].said for way in OURS if way in ran)),
            ". ".join(f"{', '.join(ways)}: {cause}" for cause, ways in causes.items() if cause),
        ]) + " |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--only", default=",".join(REPOSITORIES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--each", type=float, default=90.0, help="seconds to prepare, at most")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    folder, device = options.folder.resolve(), options.device
    if options.child:
        row = Way(**json.loads(options.child))
        serve(row, lambda row: prepared(row, folder, device), device)
        return
    names = options.only.split(",")
    if not set(names) <= set(REPOSITORIES):
        parser.error(f"--only: known are {', '.join(REPOSITORIES)}")
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = ["benchmarks.models.repositories", str(folder), "--device", device]
    deadline, rows = time.monotonic() + options.seconds, list[Way]()
    for name in names:
        rows += measured([Way(name, way) for way in WAYS], command, options.each, deadline, logs)
        for row in rows[-len(WAYS) :]:
            said = row.failure or f"{row.ms:.3f} ms, first {row.first:.1f} s, {row.said}"
            print(f"{row.name}, {row.way}: {said}", flush=True)
        (options.out / "repositories_gpu.jsonl").write_text(json_lines(rows))
        (options.out / "repositories_gpu.md").write_text(table(rows))


if __name__ == "__main__":
    main()
