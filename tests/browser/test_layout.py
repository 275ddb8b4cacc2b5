"""The graph's layout, asked of the page's own function: every launch once, nothing on another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fusion_advisor.report.schema import NodeRow, Report, UngroupedRow

from ..sample_reports import LAYER, layered

Open = Callable[..., Any]

WIDTH, HEIGHT = 168, 38
"""Of a box: layout.js has the same."""

LAY_OUT = """({views, unfolded, aspect}) => {
  const model = readModel();
  const open = new Set(unfolded ? model.repeats.keys() : []);
  const { boxes, frames } = layOut(model, { views, unfolded: open, aspect });
  return {
    boxes: boxes.map((box) => ({
      node: box.node.index, x: box.px, y: box.py, column: box.column, row: box.row,
      reads: box.ins.map((one) => one.node.index),
    })),
    frames,
    repeats: model.repeats,
  };
}"""


def node(number: int, shape: int, reads: list[int], *, view: bool) -> NodeRow:
    return NodeRow(
        name=f"n{number}", op=f"aten.{'view' if view else 'cos'}.default", dtype="float32",
        shape=[shape], flops=0, bytes_read=8, bytes_written=8, arithmetic_intensity=0.0,
        bound="free" if view else "memory", parallelism="", modelled=True, module="", source=None,
        time_us=0.0 if view else 1.0, inputs=[f"n{i}" for i in reads],
    )  # fmt: skip


def scattered(seed: int, count: int = 90, layers: int = 4, length: int = 9) -> Report:
    """Nodes that read some before them, a third of them views, among them equal layers."""
    chosen = random.Random(seed)
    begin = chosen.randrange(count - layers * length)
    rows: list[NodeRow] = []
    for i in range(count):
        inside = 0 <= i - begin < layers * length
        near = [k for k in (i - 1, i - 2, i - chosen.randrange(1, 30)) if k >= 0]
        reads = sorted(set(chosen.sample(near, chosen.randrange(len(near) + 1))))
        place = (i - begin) % length if inside else i
        rows.append(node(i, place if inside else 1000 + i, reads, view=place % 3 == 2))
    report = layered(1)
    report.groups, report.candidates, report.nodes = [], [], rows
    report.ungrouped = [UngroupedRow(node=row.name, reason="alone") for row in rows]
    return report


def ancestors(report: Report, views: bool) -> dict[int, set[int]]:
    """For each node what is drawn of what it reads, views looked through."""
    place = {row.name: i for i, row in enumerate(report.nodes)}
    found: dict[int, set[int]] = {}
    for i, row in enumerate(report.nodes):
        found[i] = set()
        for name in row.inputs:
            k = place[name]
            hidden = report.nodes[k].bound == "free" and not views
            found[i] |= found[k] if hidden else {k}
    return found


def overlapping(boxes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [
        (one["node"], other["node"])
        for i, one in enumerate(boxes)
        for other in boxes[:i]
        if abs(one["x"] - other["x"]) < WIDTH - 1e-6 and abs(one["y"] - other["y"]) < HEIGHT - 1e-6
    ]


def well_placed(laid: dict[str, Any]) -> None:
    """No box lies on another, and what reads stands below or in a later column."""
    boxes = {box["node"]: box for box in laid["boxes"]}
    assert overlapping(laid["boxes"]) == []
    for box in laid["boxes"]:
        for i in box["reads"]:
            assert boxes[i]["row"] < box["row"]
            assert (boxes[i]["column"], boxes[i]["y"]) < (box["column"], box["y"])


def stretch(laid: dict[str, Any], number: int) -> tuple[int, int] | None:
    """The repeat and turn that a node is in."""
    for k, repeat in enumerate(laid["repeats"]):
        turn, _ = divmod(number - repeat["start"], repeat["length"])
        if 0 <= turn < repeat["count"]:
            return k, turn
    return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_every_launch_is_drawn_once_with_its_edges(opened: Open, seed: int) -> None:
    report = scattered(seed)
    page = opened(report)
    for views in (False, True):
        laid = page.evaluate(LAY_OUT, {"views": views, "unfolded": True, "aspect": 1.5})
        shown = {i for i, row in enumerate(report.nodes) if views or row.bound != "free"}
        assert sorted(box["node"] for box in laid["boxes"]) == sorted(shown)
        reads = ancestors(report, views)
        assert {box["node"]: set(box["reads"]) for box in laid["boxes"]} == {
            i: reads[i] for i in shown
        }
        well_placed(laid)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_frames_hold_their_stretch_and_nothing_else(opened: Open, seed: int) -> None:
    page = opened(scattered(seed))
    for unfolded in (False, True):
        laid = page.evaluate(LAY_OUT, {"views": True, "unfolded": unfolded, "aspect": 1.0})
        assert laid["repeats"]
        well_placed(laid)
        for box in laid["boxes"]:
            inside = [
                (frame["number"], frame["turn"])
                for frame in laid["frames"]
                if frame["x0"] <= box["x"] <= frame["x1"] and frame["y0"] <= box["y"] <= frame["y1"]
            ]
            there = stretch(laid, box["node"])
            expected = [there] if there and unfolded else [(there[0], 0)] if there else []
            assert inside == expected, box


def test_a_folded_stretch_is_drawn_once(opened: Open) -> None:
    report = layered(9)
    page = opened(report)
    laid = page.evaluate(LAY_OUT, {"views": True, "unfolded": False, "aspect": 2.0})
    assert len(laid["boxes"]) == len(LAYER)
    assert {stretch(laid, box["node"]) for box in laid["boxes"]} == {(0, 1)}  # a typical turn
    reads = [box["reads"] for box in laid["boxes"]]
    assert reads == [[], *([i] for i in range(len(LAYER), 2 * len(LAYER) - 1))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("aspect", [0.5, 1.0, 3.0])
def test_a_long_chain_is_set_in_columns(opened: Open, aspect: float) -> None:
    laid = opened(layered(40)).evaluate(
        LAY_OUT, {"views": True, "unfolded": True, "aspect": aspect}
    )
    well_placed(laid)
    width = max(box["x"] for box in laid["boxes"]) + WIDTH
    height = max(box["y"] for box in laid["boxes"]) + HEIGHT
    assert aspect / 2 < width / height < aspect * 2


def test_many_nodes_beside_each_other_take_several_rows(opened: Open) -> None:
    report = layered(1)
    report.groups, report.candidates = [], []
    report.nodes = [node(i, i, [], view=False) for i in range(300)]
    report.ungrouped = [UngroupedRow(node=row.name, reason="alone") for row in report.nodes]
    laid = opened(report).evaluate(LAY_OUT, {"views": True, "unfolded": True, "aspect": 2.0})
    assert len(laid["boxes"]) == 300
    well_placed(laid)
    assert max(box["x"] for box in laid["boxes"]) < 15 * WIDTH
