"""Architectures of transformers that nobody has picked: what `apply` would place in each, without
a GPU; writes a table.

    python -m benchmarks.models.dry --seed HEX [--count 60] [--seconds 240] [--out DIR]

Model types are drawn by the seed, the first eight digits of the commit that is measured, from
transformers' mappings of causal and masked language models, sequence to sequence, speech, image
and audio classification. Each is its default configuration at its real width in bfloat16, built
with four layers where its constructor takes a number of layers, else whole. Where four layers
cannot be called (a hybrid may have no attention among its first four) it is built with the fewest
that have every kind of layer, and else whole. It is called as anyone calls it: a causal model with
the cache that it makes itself, and once more with one token against a static cache. What fails is
called once more in eager: a type whose defaults eager refuses, too, says nothing of the capture.
Each type has a process of its own under a limit of time. A row goes to DIR/architectures.jsonl, so
that a run goes on where the last of its seed ended.
"""
# transformers is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers.models.auto import modeling_auto

from fusion_advisor.dynamo.backend import Outcome, fusion_advisor
from fusion_advisor.frontend.hf import built
from fusion_advisor.frontend.session import undisturbed
from fusion_advisor.frontend.user_model import HostFakeMode, building
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.workflows.apply import Gathered
from fusion_advisor.workflows.dry_run import call_on_fakes
from fusion_advisor.workflows.placed import Placed

from ..gpu import heading, json_lines

MAPPINGS = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
LAYERS, WHOLE = 4, 0
COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers"),
)
"""Names by which configurations count layers."""
GOOD = 0.95

Phase = Literal["prefill", "decode"]


@dataclass
class Row:
    """One model type in one phase. Times are microseconds, `seconds` is what the dry run took;
    `memory_us` is what eager's memory-bound launches take, and `unmodelled` what those of it take
    that are of ops that the registry lacks, by the op."""

    kind: str
    task: str
    phase: Phase
    seed: str
    layers: int = LAYERS
    share: float = 0.0
    inductor: float = 0.0
    places: int = 0
    graphs: int = 0
    saved_us: float = 0.0
    accepted_us: float = 0.0
    seconds: float = 0.0
    memory_us: float = 0.0
    unmodelled: dict[str, float] = field(default_factory=dict[str, float])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    failure: str = ""
    eager: str = ""
    """Why the model cannot be built or called in eager, either."""


def drawn(seed: str) -> list[tuple[str, str]]:
    """Every model type with a task of it, in the order of the seed."""
    every = [
        (kind, task) for task, name in MAPPINGS.items() for kind in getattr(modeling_auto, name)
    ]
    random.Random(seed).shuffle(every)
    return list({kind: (kind, task) for kind, task in reversed(every)}.values())[::-1]


# -- one model type, in a process of its own ------------------------------------------------------


def placed_in(kind: str, task: str, seed: str) -> Iterator[Row]:
    """Rows of a model type: its default call, and one token of a causal model."""
    phases: tuple[Phase, ...] = ("prefill", "decode") if task == "CausalLM" else ("prefill",)
    depths = _depths(kind)
    for phase in phases:
        row = Row(kind, task, phase, seed)
        for row.layers in depths:
            began = time.perf_counter()
            try:
                _place(row)
                row.failure = row.eager = ""
            except Exception as error:  # noqa: BLE001 a type that fails is a row
                row.failure, row.eager = _said(error), _refused_in_eager(row)
            row.seconds = time.perf_counter() - began
            if not row.failure:
                break
        depths = depths[depths.index(row.layers) :]  # what prefill could not do decode cannot
        yield row


def _said(error: Exception) -> str:
    """An exception in one line, without the folders of this machine."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"[^\s\"]*site-packages/", "", said)[:200]


def _built(row: Row, fake: HostFakeMode) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model on fake tensors, with its inputs."""
    config = config_of(row.kind, row.layers)
    config.dtype = torch.bfloat16
    scenario = Scenario(phase=row.phase, dtype="bfloat16")
    with building(scenario, fake):
        return built(getattr(transformers, f"AutoModelFor{row.task}"), config, scenario, [])


def _refused_in_eager(row: Row) -> str:
    """Why a model cannot be built from its type's defaults, or not called as eager calls it; empty
    where it can, or where it asks for data that no fake tensor has."""
    fake = HostFakeMode()
    try:
        module, given = _built(row, fake)
        with torch.no_grad(), fake:
            module.eval()(**given)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return ""
    except Exception as error:  # noqa: BLE001 a type that fails is a row
        return _said(error)
    return ""


def _place(row: Row) -> None:
    """Build and call one model; its graphs are divided twice, for either inner compiler."""
    found, fake = {"eager": Placed(), "inductor": Placed()}, HostFakeMode()
    module, given = _built(row, fake)
    outcomes: list[Outcome] = []

    def gathering(inner: str, placed: Placed) -> Callable[[Outcome], None]:
        gathered = Gathered(placed)

        def add(outcome: Outcome) -> None:
            gathered.add(outcome)
            if inner == "eager" and outcome.report is not None:
                row.memory_us += outcome.report.totals.time_by_bound.get("memory", 0.0)
                for cause in outcome.report.unmodelled:
                    known = row.unmodelled.get(cause.cause, 0.0)
                    row.unmodelled[cause.cause] = known + cause.time_us

        return add

    row.memory_us, row.unmodelled = 0.0, {}
    backends = [
        partial(
            fusion_advisor, dry=True, options={"inner": inner, "device": "h200"},
            on_outcome=gathering(inner, placed),
        )
        for inner, placed in found.items()
    ]  # fmt: skip

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        outcomes.append(Outcome())
        return [each(graph, inputs, **how) for each in backends][-1]

    torch._dynamo.reset()
    with undisturbed():
        call_on_fakes(module.eval(), (), given, fake, backend, dynamic=None)
    eager = found["eager"]
    row.share, row.inductor = eager.share, found["inductor"].share
    row.places, row.graphs = sum(eager.kernels.values()), len(outcomes)
    row.saved_us, row.accepted_us = eager.saved_us, eager.accepted_us
    row.refused = dict(eager.refused)


def config_of(kind: str, layers: int) -> Any:
    """The default configuration of a type, built with so many layers where its constructor counts
    them; the same of the configurations within it. 0: with all."""
    config = _cut(_class_of(kind), layers) if layers else _class_of(kind)()
    config.architectures = config.architectures or []  # a type with several asks which
    return config


def size_of(config: Any, task: str, sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int | None]:
    """Batch and tokens of a call of a task, from sizes by what goes in (`text`, `images`, `other`):
    no more tokens than half the positions of a configuration, since some count them from an offset;
    None where a size says 0."""
    kind = "images" if task.startswith("Image") else "text" if "LM" in task else "other"
    batch, tokens = sizes[kind]
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return batch, min(tokens, longest // 2 if longest else tokens) or None


def _class_of(kind: str) -> Any:
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]


def _depths(kind: str) -> list[int]:
    """The numbers of layers that a type is built with, the next where one fails: four, the fewest
    among which each kind of layer is that its default configuration has, and all."""
    try:
        kinds = getattr(config_of(kind, WHOLE).get_text_config(), "layer_types", None) or []
    except Exception:  # noqa: BLE001 a row says why it cannot be built
        kinds = []
    every = max([LAYERS, *(kinds.index(each) + 1 for each in {*kinds})])
    return [*dict.fromkeys((LAYERS, every, WHOLE))]


def _cut(cls: Any, layers: int) -> Any:
    whole = cls()
    named: dict[str, str] = getattr(cls, "attribute_map", {})
    fields: dict[str, Any] = {
        name: layers
        for name in sorted({named.get(name, name) for name in COUNTS})
        if isinstance(value := vars(whole).get(name), int) and value > layers
    }
    kinds = named.get("layer_types", "layer_types")
    if fields and layers > LAYERS and kinds in vars(whole):
        fields[kinds] = vars(whole)[kinds][:layers]
    for name, inner in getattr(cls, "sub_configs", {}).items():
        held = getattr(whole, name, None)
        if held is not None and hasattr(inner, "from_dict"):
            fields[name] = _cut(type(held), layers)
    return cls(**fields) if fields else whole


def _child(kind: str, task: str, seed: str, answer: Any) -> None:
    os.environ["FUSION_ADVISOR_STRICT"] = "1"  # a fault of ours is a row that failed
    for row in placed_in(kind, task, seed):
        answer.send(asdict(row))
    answer.close()


# -- all of them ----------------------------------------------------------------------------------


def run(seed: str, count: int, seconds: float, file: Path) -> list[Row]:
    """Rows of the first model types of a seed, those that are in the file already among them."""
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [row for row in (Row(**json.loads(line)) for line in lines) if row.seed == seed]
    have = {row.kind for row in rows}
    forking = multiprocessing.get_context("fork")  # transformers is imported once
    for kind, task in drawn(seed)[:count]:
        if kind in have:
            continue
        answers, answer = forking.Pipe(duplex=False)
        process = forking.Process(target=_child, args=(kind, task, seed, answer))
        process.start()
        answer.close()
        own, deadline = [], time.monotonic() + seconds
        try:
            while answers.poll(max(0.0, deadline - time.monotonic())):
                own.append(Row(**answers.recv()))
            why = f"no answer within {seconds:g} s"
        except EOFError:
            process.join(1.0)
            why = "" if own else f"the process ended with {process.exitcode}"
        if process.is_alive():
            process.kill()
        process.join()
        if why:
            own.append(Row(kind, task, "decode" if own else "prefill", seed, failure=why))
        rows += own
        with file.open("a") as kept:
            kept.write(json_lines(own))
        for row in own:
            print(f"{row.kind} {row.phase} {row.share:.3f} {row.seconds:.1f} s {row.failure}")
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """The table, below what came of each phase."""
    lines = [*heading("Architectures of transformers"), f"transformers {transformers.__version__}."]
    lines += ["", __doc__.split("\n\n")[2].strip() if __doc__ else "", ""]
    for phase in ("prefill", "decode"):
        lines += [f"- {phase}: {_summary([row for row in rows if row.phase == phase])}"]
    lines += [
        "",
        "`share` is what the kernels save of what analysis accepts, predicted for an H200, with"
        ' `inner="eager"`; beside it with `inner="inductor"`, where a group is taken only if its'
        " kernel is expected to win over Inductor's.",
        "",
        "| type | task | phase | layers | share | inductor | places | graphs | µs | s | left |",
        "|---" * 11 + "|",
    ]
    for row in sorted(
        (row for row in rows if not row.failure), key=lambda row: (row.share, row.kind)
    ):
        left = "" if row.share >= GOOD else _most(row.refused)
        lines.append(
            f"| {row.kind} | {row.task} | {row.phase} | {_layers(row)}"
            f" | {row.share:.3f} | {row.inductor:.3f} | {row.places} | {row.graphs}"
            f" | {row.saved_us:.0f} of {row.accepted_us:.0f} | {row.seconds:.1f} | {left} |"
        )
    lines += ["", "## What failed", ""]
    for row in rows:
        if row.failure:
            too = f"in eager, too: {row.eager}" if row.eager else row.failure
            lines.append(f"- {row.kind} ({row.task}, {row.phase}): {too}")
    return lines


def _layers(row: Row) -> str:
    """Layers that a model was built with: as many as it has where its constructor counts none."""
    known = _class_of(row.kind)()
    same = not row.layers or config_of(row.kind, row.layers).to_dict() == known.to_dict()
    return "all" if same else str(row.layers)


def _summary(rows: Sequence[Row]) -> str:
    done = [row for row in rows if not row.failure]
    if not done:
        return f"{len(rows)} types, none ran"
    good, none = sum(row.share >= GOOD for row in done), sum(not row.share for row in done)
    middle = statistics.median(row.share for row in done)
    beside = statistics.median(row.inductor for row in done)
    memory, lacking = sum(row.memory_us for row in done), Counter[str]()
    for row in done:
        lacking.update(row.unmodelled)
    most = ", ".join(f"{op} {us:.0f} us" for op, us in lacking.most_common(5))
    too = sum(bool(row.eager) for row in rows)
    unknown = sum(lacking.values()) / max(memory, 1.0)
    return (
        f"{len(rows)} types, {len(rows) - len(done)} failed, {too} of these in eager, too; "
        f"share {middle:.3f} in the median, at least {GOOD} in {good}, 0 in {none}; "
        f"beside Inductor {beside:.3f}; of "
        f"{memory / 1e3:.0f} ms of memory-bound time {1 - unknown:.2%} is modelled"
        f"{f' (not: {most})' if most else ''}"
    )


def _most(refused: dict[str, str]) -> str:
    """The reason that most groups have."""
    counted = Counter(refused.values()).most_common(1)
    return "".join(f"{reason} ({count} of {len(refused)})" for reason, count in counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=240.0, help="for one type")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = run(options.seed, options.count, options.seconds, options.out / "architectures.jsonl")
    (options.out / "architectures.md").write_text("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
