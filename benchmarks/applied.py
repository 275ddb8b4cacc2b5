"""What `fusion_advisor.apply` reaches in models of transformers: how much of the predicted gain.

    python benchmarks/applied.py --out DIR [FAMILY ...]

Four layers of each family at real width, in bfloat16, under fake tensors: no weights, no GPU. A
line of JSON for each goes to DIR/applied.jsonl as it is done, a table to DIR/applied.md. `free` is
what the groups would save if every cut could be put into the source, `saved` what those that are
put do; kernels are not checked here.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 32000},
    "gpt_neox": {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32},
    "bert": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    "vit": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    "mixtral": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8},
}  # fmt: skip
BATCHES = {"bert": 32, "vit": 64}
"""Sequences of 512 tokens (images for vit); 4 where nothing is said."""
LAYERS = 4


def tried(family: str) -> dict[str, Any]:
    """One family: what is put, what it saves, and why the rest is not."""
    from fusion_advisor import apply
    from fusion_advisor.cost.dataflow import dataflow
    from fusion_advisor.frontend.child import capture_module
    from fusion_advisor.frontend.loading import load
    from fusion_advisor.fusion.findings import fuse
    from fusion_advisor.ir.scenario import Scenario
    from fusion_advisor.rulebook.load import load_rulebook

    rulebook = load_rulebook()
    scenario = Scenario(dtype="bfloat16", batch=BATCHES.get(family, 4))
    config = {"model_type": family, "num_hidden_layers": LAYERS, **FAMILIES[family]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        loaded = load(f"hf:{file}", scenario)
    graph = capture_module(loaded.module, loaded.args, loaded.kwargs)
    flow = dataflow(graph, rulebook.device("h200"))
    found = fuse(flow, rulebook).groups
    began = time.perf_counter()
    done = apply(
        loaded.module, loaded.args, loaded.kwargs, device="h200", verify=False, how="source"
    )
    return {
        "family": family,
        "seconds": time.perf_counter() - began,
        "put": dict(done.kernels),
        "refused": dict(done.refused),
        "unplaced": dict(done.unplaced),
        "saved_us": done.saved_us,
        "free_us": sum(each.saved_us_total for each in found),
        "free": {each.pattern: each.saved_us_total for each in found},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each family, and every reason by which something was left."""
    lines = [
        "| family | kernels put, with their occurrences | saved | free | share |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        put = ", ".join(f"{name} {count}" for name, count in row["put"].items())
        saved, free = row["saved_us"], row["free_us"]
        lines.append(
            f"| {row['family']} | {put} | {saved:.0f} µs | {free:.0f} µs "
            f"| {100 * saved / (free or 1):.0f} % |"
        )
    lines += ["", "## Left, and why", ""]
    for row in rows:
        lines += [f"- {row['family']}: {why}" for why in dict.fromkeys(row["refused"].values())]
        for nodes, why in row["unplaced"].items():
            beneath = re.sub(r"\S*/site-packages/", "", why)
            lines.append(f"- {row['family']}, {nodes}: {beneath}")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[*FAMILIES], metavar="FAMILY")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (given.out / "applied.jsonl").open("w") as lines:
        for family in given.families:
            rows.append(tried(family))
            lines.write(json.dumps(rows[-1]) + "\n")
            lines.flush()
            print(f"{family}: {rows[-1]['saved_us']:.0f} of {rows[-1]['free_us']:.0f} µs")
    (given.out / "applied.md").write_text(table(rows))


if __name__ == "__main__":
    main()
