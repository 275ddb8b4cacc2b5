"""Captures a folder of KernelBench problems and transformers families; prints a table.

    python -m benchmarks.kernelbench.capture FOLDER [--levels 1,2,3,4] [--families]
        [--json F] [--markdown F] [--graphs DIR]

FOLDER is a checkout's `KernelBench` folder (level1 ... level4). Level 4 names pretrained models;
they are built here from their architectures' geometry, without weights and without a network.
`--graphs` keeps every captured graph, `level1_19_ReLU.json`: what `benchmarks.predictions` reads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusion_advisor.frontend.child import Scenario, capture_here
from fusion_advisor.support.codec import to_json
from fusion_advisor.support.errors import AdvisorError
from fusion_advisor.support.files import write

SECONDS = 300
"""Wall limit of one problem."""

PRETRAINED: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "facebook/opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2048,
    },
    "EleutherAI/gpt-neo-2.7B": {
        "model_type": "gpt_neo",
        "hidden_size": 2560,
        "num_layers": 32,
        "num_heads": 20,
        "attention_types": [[["global", "local"], 16]],
    },
    "facebook/bart-large": {"model_type": "bart"},
    "google/bigbird-roberta-base": {"model_type": "big_bird"},
    "google/reformer-enwik8": {
        "model_type": "reformer",
        "is_decoder": True,
        "vocab_size": 258,
        "hidden_size": 1024,
        "feed_forward_size": 4096,
        "num_attention_heads": 8,
        "attention_head_size": 128,
        "attn_layers": ["local", "local", "lsh", "local"] * 3,
        "axial_pos_embds_dim": [256, 768],
        "axial_pos_shape": [128, 512],
        "max_position_embeddings": 65536,
        "hash_seed": None,
        "num_buckets": 512,
        "num_hashes": 4,
        "local_attn_chunk_length": 128,
        "lsh_attn_chunk_length": 256,
    },
    "google/electra-small-discriminator": {
        "model_type": "electra",
        "embedding_size": 128,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 128256,
        "dtype": "bfloat16",
    },
    "Qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    },
    "Gemma": {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    },
    "Mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    },
    "Mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "dtype": "bfloat16",
    },
    "GPT-NeoX": {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    },
    "BERT": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
    },
    "T5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 1024,
        "d_ff": 4096,
        "num_heads": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
    },
    "ViT": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
    },
    "Whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 1024,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
    },
    "Mamba": {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 2,
    },
}


@dataclass
class Row:
    """What became of one problem."""

    level: str
    problem: str
    captured_by: str = ""
    nodes: int = 0
    kernels: int = 0
    seconds: float = 0.0
    differs: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Job:
    """One MODEL; `pretrained` problems need transformers' downloads replaced."""

    level: str
    problem: str
    model: str
    scenario: Scenario = field(default_factory=Scenario)
    pretrained: bool = False
    keep: Path | None = None
    """The folder that gets the captured graph."""

    @property
    def file(self) -> str:
        return f"{self.level.replace(' ', '')}_{self.problem}.json"


def main() -> int:
    arguments = _arguments()
    jobs = [*problems(arguments.folder, arguments.levels, arguments.match)]
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.families:
            jobs += families(Path(scratch))
        jobs = [replace(job, keep=arguments.graphs) for job in jobs]
        rows = _run(jobs, arguments.processes)
    _print(rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if arguments.markdown:
        Path(arguments.markdown).write_text(_markdown(rows))
    return int(any(row.error for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--levels", default="1,2,3,4")
    parser.add_argument("--match", default="", help="only problems whose name contains this")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.add_argument("--graphs", type=Path)
    return parser.parse_args()


def problems(folder: Path, levels: str, match: str) -> list[Job]:
    jobs: list[Job] = []
    for level in filter(None, levels.split(",")):
        files = sorted(
            (folder / f"level{level}").glob("*.py"), key=lambda f: int(f.name.split("_")[0])
        )
        jobs += [
            Job(f"level {level}", file.stem, str(file), pretrained=level == "4")
            for file in files
            if match in file.name
        ]
    return jobs


def families(scratch: Path) -> list[Job]:
    jobs: list[Job] = []
    for name, content in FAMILIES.items():
        file = scratch / f"{name}.json"
        file.write_text(json.dumps(content))
        scenario = Scenario(batch=1, seq=128 if name in ("Mamba", "Whisper") else 512)
        jobs.append(Job("transformers", name, f"hf:{file}", scenario))
    return jobs


def _run(jobs: list[Job], processes: int) -> list[Row]:
    """Every job in a process of its own, forked from one that has torch imported."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.export._trace")
    importlib.import_module("torch").set_num_threads(1)
    rows: list[Row] = []
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(_capture, jobs):
            rows.append(row)
            print(
                f"{row.level} {row.problem}: {row.error or f'{row.kernels} kernels'} "
                f"({row.captured_by}, {row.seconds:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
    order = {(job.level, job.problem): index for index, job in enumerate(jobs)}
    return sorted(rows, key=lambda row: order[row.level, row.problem])


def _capture(job: Job) -> Row:
    row = Row(job.level, job.problem)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 for the life of this process
    started = time.perf_counter()
    try:
        if job.pretrained:
            build_from_geometry()
        graph = capture_here(job.model, job.scenario)
    except AdvisorError as error:
        row.error = str(error)
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        row.error = f"fault: {type(error).__name__}: {str(error)[:200]}"
    else:
        row.captured_by = graph.captured_by
        row.differs = graph.differs_from_eager
        row.nodes = sum(node.kind == "call" for node in graph.nodes)
        inputs = {t.storage for n in graph.nodes if n.kind != "call" for t in n.outputs if t}
        row.kernels = _kernels(graph.nodes, inputs)
        if job.keep is not None:
            write(job.keep / job.file, to_json(graph))
    row.seconds = time.perf_counter() - started
    return row


def _kernels(nodes: Any, known: set[int]) -> int:
    """Nodes that write something: a new storage, or an old one in place."""
    count = 0
    for node in nodes:
        if node.kind != "call" or ".empty" in node.op or ".new_empty" in node.op:
            continue
        fresh = {tensor.storage for tensor in node.outputs if tensor} - known
        count += bool(fresh or node.mutates)
        known |= fresh
    return count


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def build_from_geometry() -> None:
    """Lets `from_pretrained` build from a known geometry instead of a download."""
    transformers: Any = importlib.import_module("transformers")

    def config(name: str, **_: Any) -> Any:
        content = dict(PRETRAINED[name])
        return transformers.AutoConfig.for_model(content.pop("model_type"), **content)

    def model(name: str, config: Any = None, **_: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_config(config)

    transformers.AutoConfig.from_pretrained = config
    transformers.AutoModelForCausalLM.from_pretrained = model


def _summary(rows: list[Row]) -> list[tuple[str, int, int, str]]:
    levels = dict.fromkeys(row.level for row in rows)
    result: list[tuple[str, int, int, str]] = []
    for level in levels:
        of_level = [row for row in rows if row.level == level]
        ways = Counter(row.captured_by for row in of_level if not row.error)
        text = ", ".join(f"{way} {count}" for way, count in ways.most_common())
        result.append((level, sum(not row.error for row in of_level), len(of_level), text))
    return result


def _print(rows: list[Row]) -> None:
    table = Table("level", "problem", "captured by", "nodes", "kernels", "seconds", "error")
    for row in rows:
        table.add_row(
            row.level, row.problem, row.captured_by, str(row.nodes), str(row.kernels),
            f"{row.seconds:.1f}", row.error,
        )  # fmt: skip
    console = Console()
    console.print(table)
    for level, captured, total, ways in _summary(rows):
        console.print(f"{level}: {captured}/{total} captured ({ways})")


def _markdown(rows: list[Row]) -> str:
    lines = ["# Capture sweep", "", "| level | captured | by |", "|---|---|---|"]
    lines += [f"| {level} | {got}/{total} | {ways} |" for level, got, total, ways in _summary(rows)]
    lines += ["", "| level | problem | captured by | nodes | kernels | seconds | error |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {r.level} | {r.problem} | {r.captured_by} | {r.nodes} | {r.kernels} "
        f"| {r.seconds:.1f} | {r.error} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
