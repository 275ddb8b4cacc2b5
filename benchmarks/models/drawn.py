"""Whole models that nobody has picked: a step in every way of running each; writes a table.

    python -m benchmarks.models.drawn --seed HEX [--prefill 8] [--decode 4] [--seconds 540]
    python -m benchmarks.models.drawn --seed HEX --again moshi:prefill:hole,hrm_text:decode

Model types are drawn by the seed, the first eight digits of the commit that is measured, as
`benchmarks.models.dry` draws them, and built with four layers at their real width in bfloat16 on
random weights. Text is called as a tokenizer gives it: token ids and a padding mask of ones, which
half of them have a hole in one row of; the cache is the model's own. Causal models are drawn once
more for one token against a static cache, beside `reduce-overhead`, which is torch.compile under
CUDA graphs, as ours is there. Each way of each model has a process and empty caches of compilers of
its own; the ways of a model prepare together, a model on each GPU, and measure in turn. `first` is
the first call's seconds. A step is the wall time of steps that follow each other, the median of
seven batches, each on the same core, on which nothing else runs: launches took 1.8 times as long
on the first core of one host as on another. `GPU` is what the GPU works in a step, and `beside
products` what of it is no matrix product, convolution or attention: all that fused kernels could
save, so that `at most` is what they could come to. What a way computes is held to eager's first
result.
"""
# transformers and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from ..gpu import heading, json_lines
from .step import leading
from .ways import Way, measured, serve

if TYPE_CHECKING:
    from fusion_advisor.dynamo.backend import Outcome

GRAPHS = "reduce-overhead"
WAYS = {
    "prefill": ("eager", "compile", "backend"),
    "decode": ("eager", GRAPHS, f"backend+{GRAPHS}"),
}
"""Ways of running a model, ours last."""
SIZES = {"text": (4, 1024), "images": (16, 0), "other": (4, 0)}
"""Batch and tokens of a call by what goes in; 0 for what the model's configuration says."""
CACHED = 8, 2048
"""Sequences of one token, and the tokens that the cache has room for."""
COMMAND = ("benchmarks.models.drawn",)


@dataclass
class Row(Way):
    """One way of one model type, whose name is the type's."""

    task: str = ""
    phase: str = ""
    seed: str = ""
    padded: bool = False

    @property
    def beside(self) -> float:
        """Milliseconds of the GPU that are no product and no attention."""
        return self.worked - self.gpu.get("products", 0.0) - self.gpu.get("attention", 0.0)

    @property
    def compiled(self) -> bool:
        """Whether a way is torch.compile's own."""
        return self.way in ("compile", GRAPHS)


# -- one way of one model, in a process of its own -------------------------------------------------


def _prepared(row: Row) -> Any:
    """A step of a way, after its first call."""
    import torch
    import transformers

    from benchmarks.models.dry import LAYERS, config_of, size_of
    from fusion_advisor.frontend.hf import built
    from fusion_advisor.ir.scenario import Scenario

    torch.set_grad_enabled(False)
    config = config_of(row.name, LAYERS)
    config.dtype = torch.bfloat16
    cls = getattr(transformers, f"AutoModelFor{row.task}")
    if row.phase == "decode":
        scenario = Scenario(phase="decode", batch=CACHED[0], kv_len=CACHED[1])
    else:
        batch, tokens = size_of(config, row.task, SIZES)
        scenario = Scenario(phase="prefill", batch=batch, seq=tokens)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model, given = built(cls, config, scenario, [])
        ids = given.get("input_ids")
        if row.phase == "decode":
            # The model is called many times, and a cache that is full has room for one token.
            given["past_key_values"].reset()
        elif ids is not None:
            given["attention_mask"] = torch.ones_like(ids)
            if row.padded:
                given["attention_mask"][0, : ids.shape[1] // 8] = 0
    model = model.eval()
    wanted = leading(model(**given)).float()
    if row.phase == "decode":
        given["past_key_values"].reset()
    seen: list[Outcome] = []
    step = _way(model, row.way, seen)
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = leading(step(**given)).float()
    torch.cuda.synchronize()
    row.first = time.perf_counter() - began
    if row.padded:  # what is computed at padding is nobody's
        found, wanted = found[1:], wanted[1:]
    row.apart = float((found - wanted).norm() / wanted.norm())
    row.said = _said(seen)
    return lambda: step(**given)


def _way(model: Any, way: str, seen: list[Outcome]) -> Any:
    """A model to call in a way; the backend adds the outcome of each graph to `seen`."""
    import torch

    from fusion_advisor.dynamo.backend import fusion_advisor

    if way == "eager":
        return model
    mode = GRAPHS if way.endswith(GRAPHS) else None
    if way.startswith("backend"):
        backend = partial(fusion_advisor, on_outcome=seen.append)
        return torch.compile(model, backend=backend, mode=mode)
    return torch.compile(model, mode=mode)


def _said(seen: Sequence[Outcome]) -> str:
    """What was placed in all graphs of a model together, or why nothing was."""
    made = Counter(each.name for outcome in seen for each in outcome.rewrites)
    rewrites = ", ".join(f"{name} x{count}" for name, count in made.items())
    places = sum(len(outcome.places) for outcome in seen)
    taken = sum(len(outcome.taken) for outcome in seen)
    why = next((outcome.why for outcome in seen if outcome.why), "")
    if not seen or (why and not places):
        return why
    return f"{taken} of {places}; {rewrites or 'none'}"


# -- all of them -----------------------------------------------------------------------------------


@dataclass
class Draw:
    """Model types of a seed, one after the other in the phase that lacks more of those wanted;
    `measured` counts the types of a phase of which every way ran."""

    seed: str
    wanted: dict[str, int]
    named: list[tuple[str, str, bool]] = field(default_factory=list[tuple[str, str, bool]])
    """Types that are measured before any is drawn: type, phase, and whether the mask has a hole."""
    taken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    measured: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    begun: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))

    def next(self) -> list[Row]:
        """Rows of the next type, a way each; none when all are measured or under way."""
        from benchmarks.models.dry import drawn

        if self.named:
            kind, phase, padded = self.named.pop(0)
            self.begun[phase] += 1
            return self._rows(kind, dict(drawn(self.seed))[kind], phase, padded=padded)
        lacking = {
            phase: 1 - (self.measured[phase] + self.begun[phase]) / wanted
            for phase, wanted in self.wanted.items()
            if wanted
        }
        phase = max(lacking, key=lambda each: lacking[each], default="")
        if not phase or lacking[phase] <= 0:
            return []
        every = [each for each in drawn(self.seed) if phase == "prefill" or each[1] == "CausalLM"]
        number = self.taken[phase]
        kind, task = every[number]
        self.taken[phase] += 1
        self.begun[phase] += 1
        padded = phase == "prefill" and number % 2 == 1 and "LM" in task
        return self._rows(kind, task, phase, padded=padded)

    def _rows(self, kind: str, task: str, phase: str, *, padded: bool) -> list[Row]:
        return [
            Row(kind, way, task=task, phase=phase, seed=self.seed, padded=padded)
            for way in WAYS[phase]
        ]

    def ended(self, rows: Sequence[Row]) -> None:
        """Count a type whose ways have ended."""
        phase = rows[0].phase
        self.begun[phase] -= 1
        self.measured[phase] += not any(row.failure for row in rows)


def run(draw: Draw, gpus: int, each: float, seconds: float, logs: Path) -> Iterator[list[Row]]:
    """Yield the rows of a model type at a time, a type on each GPU, which has `each` seconds to
    prepare."""
    deadline = time.monotonic() + seconds
    found: Queue[list[Row]] = Queue()
    taking = Lock()

    def serve(gpu: int) -> None:
        try:
            while time.monotonic() < deadline - each / 2:
                with taking:
                    rows = draw.next()
                if not rows:
                    break
                rows = measured(rows, COMMAND, each, deadline, logs, gpu)
                with taking:
                    draw.ended(rows)
                found.put(rows)
        finally:
            found.put([])

    serving = [Thread(target=serve, args=(gpu,), daemon=True) for gpu in range(gpus)]
    for thread in serving:
        thread.start()
    while serving:
        rows = found.get()
        if rows:
            yield rows
        else:
            serving.pop()


# -- the table -------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The table: a part for each phase, and what failed."""
    lines = [*heading("Whole models that a seed drew"), "", *(__doc__ or "").split("\n\n")[2:3]]
    for phase in WAYS:
        kinds = dict.fromkeys(row.name for row in rows if row.phase == phase)
        of = [[row for row in rows if (row.phase, row.name) == (phase, kind)] for kind in kinds]
        lines += ["", f"### {phase}", "", *_part(phase, [g for g in of if _whole(g)])]
    lines += ["", "What failed:", ""]
    for row in rows:
        if row.failure:
            lines.append(f"- {row.name}, {row.phase}, {row.way}: {row.failure}")
    return "\n".join(lines) + "\n"


def _whole(rows: Sequence[Row]) -> bool:
    return not any(row.failure for row in rows)


def _part(phase: str, models: Sequence[Sequence[Row]]) -> list[str]:
    """A line for each model: steps, the GPU's part, and the best rival over ours in both."""
    ways = WAYS[phase]
    lines = [
        "| type | task | padding | " + " | ".join(ways)
        + " | best rival / ours | GPU: compiled, ours | best rival / ours | beside products:"
        " compiled, ours | at most | first: " + ", ".join(ways[1:]) + " | apart | ours |",
        "|---" * (len(ways) + 11) + "|",
    ]  # fmt: skip
    walls, works, mosts = list[float](), list[float](), list[float]()
    same: list[float] = []
    for rows in models:
        *rivals, ours = rows
        compiled = next(row for row in rows if row.compiled)
        wall = min(row.ms for row in rivals) / ours.ms
        work = min(row.worked for row in rivals) / ours.worked
        most = compiled.worked / (compiled.worked - compiled.beside)
        if ours.said.startswith("0 of ") and ours.said.endswith("none"):
            same.append(compiled.ms / ours.ms)
        else:
            walls.append(wall)
            works.append(work)
            mosts.append(most)
        lines.append(
            f"| {ours.name} | {ours.task} | {'a hole' if ours.padded else 'none'} | "
            + " | ".join(f"{row.ms:.3f}" for row in rows)
            + f" | {wall:.3f} | {compiled.worked:.3f}, {ours.worked:.3f} | {work:.3f}"
            f" | {compiled.beside:.3f}, {ours.beside:.3f} | {most:.2f} | "
            + ", ".join(f"{row.first:.1f}" for row in rows[1:]) + " | "
            + ", ".join(f"{row.apart:.4f}" for row in rows[1:]) + f" | {ours.said} |"
        )  # fmt: skip
    if walls:
        lines += [
            "",
            f"{len(walls)} models with something of ours: {_mean(walls):.3f} in the geometric mean,"
            f" {sum(each < 0.98 for each in walls)} below 0.98; of the GPU's time"
            f" {_mean(works):.3f} and {sum(each < 0.98 for each in works)}; if all beside products"
            f" took no time {_mean(mosts):.2f}.",
        ]
    if same:
        lines += [
            "",
            f"Compile beside the same program, {len(same)} times: {min(same):.3f} to"
            f" {max(same):.3f} of it.",
        ]
    return lines


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _named(text: str) -> list[tuple[str, str, bool]]:
    """Types to measure again, of `TYPE:PHASE[:hole],...`."""
    parts = [each.split(":") for each in text.split(",")]
    return [(kind, phase, hole == ["hole"]) for kind, phase, *hole in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", default="")
    parser.add_argument("--prefill", type=int, default=8, help="types that read a text or image")
    parser.add_argument("--decode", type=int, default=4, help="types that write one token")
    parser.add_argument("--again", type=_named, default=[], help="TYPE:PHASE[:hole], with commas")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--each", type=float, default=75.0, help="seconds to prepare, at most")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    if options.child:
        serve(Row(**json.loads(options.child)), _prepared)
        return
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    wanted = {"prefill": options.prefill, "decode": options.decode}
    draw = Draw(options.seed, {} if options.again else wanted, options.again)
    for found in run(draw, options.gpus, options.each, options.seconds, logs):
        for row in found:
            said = row.failure or f"{row.ms:.3f} ms, first {row.first:.1f} s, {row.said}"
            print(f"{row.name}, {row.phase}, {row.way}: {said}", flush=True)
        rows += found
        (options.out / "models.jsonl").write_text(json_lines(rows))
        (options.out / "drawn_models.md").write_text(table(rows))


if __name__ == "__main__":
    main()
