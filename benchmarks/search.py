"""What a search over configurations gains beside the rules' own choice; writes a table.

    python benchmarks/search.py --out DIR [--only REGEX]     # on a GPU
    python benchmarks/search.py --out DIR --tiny             # on a CPU, to see that it runs

The patterns are those of the speed table (patterns.py); a pattern of several groups has a row for
each. Shares are of the copy bandwidth measured in the same run, over the bytes that the kernel has
to move at least. The table is rewritten after every row: a run that is cut short keeps what it has.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from patterns import Pattern, patterns

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.frontend.user_model import HostFakeMode
from fusion_advisor.fusion.decide import Decision, decide
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.measure.config_space import configuration
from fusion_advisor.measure.driver import ceilings, timing_rules
from fusion_advisor.measure.search import Searched, searcher
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import provers, verify

RULES = load_rulebook()
DEVICE = RULES.device("h200")
SECONDS = 120.0


@dataclass(frozen=True)
class Row:
    """A group of a pattern, with what it moves at least and what was found."""

    name: str
    bytes: int
    own: str
    found: Searched


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--only", default="", help="a regular expression over the names")
    parser.add_argument("--tiny", action="store_true", help="few rows, on the CPU")
    asked = parser.parse_args()
    chosen = [p for p in patterns(tiny=asked.tiny) if re.search(asked.only, p.name, re.IGNORECASE)]
    rules = timing_rules(RULES.measure, DEVICE)
    rows: list[Row] = []
    with (
        Worker("fusion_advisor.measure.child", "rehearse" if asked.tiny else "gpu") as worker,
        provers(
            DEVICE.capability, RULES.verify, check=True, compile=False, where="auto"
        ) as children,
    ):
        top = ceilings(worker, rules, SECONDS)
        search = searcher(worker, DEVICE, RULES)
        for pattern in chosen:
            for name, decision in _groups(pattern):

                def emitted(each: Decision) -> Kernel | str:
                    return attempt(each.subject.flow, each, "kernel", RULES, full_size=True)

                kernel, plan = emitted(decision), decision.subject.plan
                if plan is None or isinstance(kernel, str):
                    print(f"{name}: {kernel}", flush=True)
                    continue
                found = search(decision, kernel, emitted, lambda each: verify([each], children)[0])
                rows.append(Row(name, decision.fused_bytes, configuration(plan), found))
                print(f"{name}: {found.failure or found.said}", flush=True)
                asked.out.mkdir(parents=True, exist_ok=True)
                text = "\n".join(_table(rows, top.copy, dict(top.machine)))
                (asked.out / "table.md").write_text(text + "\n")
    return 0


def _groups(pattern: Pattern) -> Iterator[tuple[str, Decision]]:
    """The accepted groups of a pattern."""
    module = torch.nn.Module()
    module.forward = pattern.function
    with HostFakeMode():
        inputs = pattern.build("cpu")
    with torch.no_grad():
        flow = dataflow(capture_module(module, inputs), DEVICE)
    grouping = fuse(flow, RULES).grouping
    places = [place for found in grouping.groups for place in found.instances]
    for number, place in enumerate(places, 1):
        name = pattern.name if len(places) == 1 else f"{pattern.name} ({number})"
        yield name, decide(flow, place, RULES)


def _table(rows: list[Row], copy: float, machine: dict[str, str]) -> Iterator[str]:
    """Markdown; `copy` is in bytes a second."""
    names = ("gpu", "torch", "triton", "driver_version")
    said = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    yield f"{datetime.now(UTC):%Y-%m-%d}, {said}; copy {copy / 1e9:.0f} GB/s."
    yield ""
    yield "| pattern | the rules' own | us | of copy | found | us | of copy |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        found = row.found
        if found.failure:
            yield f"| {row.name} | {row.own} | {found.failure} | | | | |"
            continue

        def share(us: float, moved: int = row.bytes) -> str:
            return f"{100 * moved / (us * 1e-6) / copy:.1f} %"

        own = f"| {row.name} | {row.own} | {found.own_us:.2f} | {share(found.own_us)} |"
        won = f" {found.configuration} | {found.us:.2f} | {share(found.us)} |"
        yield own + (won if found.proof else " stays | | |")


if __name__ == "__main__":
    raise SystemExit(main())
