"""What the L1 serves a request of a warp in, beside the model of bank conflicts; writes a table.

    ncu --profile-from-start off --clock-control none --csv --page raw \\
        --metrics l1tex__data_pipe_lsu_wavefronts.sum --log-file counters.csv \\
        python benchmarks/l1.py launch                        # on the GPU
    python benchmarks/l1.py table counters.csv [--out FILE]

Each launch has one request of 32 lanes in each of its warps, beside one of neighbours.
"""

# Triton is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from predictions.counters import number, rows

from fusion_advisor.perfmodel.bank_conflicts import wavefronts_of

METRIC = "l1tex__data_pipe_lsu_wavefronts.sum"
LANES = 32
WARPS = 64
APART = 1 << 18
"""Bytes between what warps ask for."""
BESIDE = 1
"""Wavefronts of a warp that are no request's."""
STEPS = (
    *range(37), 40, 44, 48, 49, 50, 56, 60, 62, 63, 64, 65, 66, 68, 72, 80, 96, 97, 100, 112, 120,
    127, 128, 129, 130, 136, 160, 192, 196, 224, 256, 257, 260,
)  # fmt: skip
ROWS = (2, 4, 5, 7, 8, 12, 13, 14, 16, 24, 28, 31)
PITCHES = (32, 56, 113, 128, 224, 260, 1027)


@dataclass(frozen=True)
class Request:
    """Of lanes in rows of `row`, `pitch` units apart, whose units are `step` apart: of `vector`
    elements of `size` bytes each."""

    size: int
    vector: int
    stored: bool
    row: int
    pitch: int
    step: int

    @property
    def what(self) -> tuple[int, int, bool]:
        """Requests that differ in nothing else are made by one compiled kernel."""
        return self.size, self.vector, self.stored

    @property
    def kind(self) -> str:
        what = "rows of lanes" if self.row < LANES else "lanes evenly apart"
        width = f"{self.size} bytes" if self.vector == 1 else f"{self.vector} of {self.size} bytes"
        return f"{what}, {width}, {'stored' if self.stored else 'loaded'}"

    @property
    def predicted(self) -> int:
        unit = self.size * self.vector
        places = (
            lane // self.row * self.pitch + lane % self.row * self.step for lane in range(LANES)
        )
        return wavefronts_of([unit * place for place in places], unit)


def requests() -> Iterator[Request]:
    for size, vector, stored in (
        (4, 1, False), (2, 1, False), (4, 4, False), (4, 1, True), (2, 8, True)
    ):  # fmt: skip
        for step in STEPS:
            if step or not stored:
                yield Request(size, vector, stored, LANES, 0, step)
        for row in ROWS:
            for step in (1, 2, 3):
                for pitch in PITCHES:
                    if pitch >= row * step and (vector == 1 or step == 1):
                        yield Request(size, vector, stored, row, pitch, step)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verbs.add_parser("launch").set_defaults(run=_run_launch)
    verb = verbs.add_parser("table")
    verb.set_defaults(run=_run_table)
    verb.add_argument("counters", type=Path)
    verb.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    return arguments.run(arguments)


def _run_launch(_: argparse.Namespace) -> int:
    """Every request once, in their order."""
    import torch  # the table is made without a GPU
    from l1_kernels import ask

    runtime: Any = torch.cuda.cudart()
    for (size, vector, stored), alike in groupby(requests(), lambda one: one.what):
        dtype = torch.float32 if size == 4 else torch.float16
        far = torch.zeros(WARPS * APART // size, dtype=dtype, device="cuda")
        near = torch.zeros(WARPS * LANES * vector, dtype=dtype, device="cuda")
        launch = partial(
            ask[(WARPS,)], far, near, apart=APART // size, vector=vector, stored=stored, num_warps=1
        )
        launch(row=LANES, pitch=0, step=1)  # compiled before anything counts
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        for one in alike:
            launch(row=one.row, pitch=one.pitch, step=one.step)
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()
    return 0


def _run_table(arguments: argparse.Namespace) -> int:
    text = _table([number(row, METRIC) for row in rows(arguments.counters)])
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")
    return 0


def _table(counts: Sequence[float]) -> str:
    """A row for each kind of request, of what was counted in their order."""
    kinds: dict[str, list[tuple[float, Request]]] = {}
    for request, count in zip(requests(), counts, strict=True):
        neighbours = max(1, request.size * request.vector // 4)
        got = count / WARPS - neighbours - BESIDE
        kinds.setdefault(request.kind, []).append((got, request))
    lines = ["| requests | patterns | as predicted | furthest off |", "|---" * 4 + "|"]
    for kind, every in kinds.items():
        same = sum(1 for got, one in every if round(got) == one.predicted)
        got, worst = max(every, key=lambda each: abs(each[0] / each[1].predicted - 1))
        lines.append(
            f"| {kind} | {len(every)} | {100 * same / len(every):.0f} % | {worst.predicted} for"
            f" {got:.0f}: {worst.row} lanes {worst.step} apart, {worst.pitch} to the next |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
