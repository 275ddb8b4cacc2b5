"""The HTML report, clicked and typed through in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import (
    AdviceRow,
    BenchRow,
    LineRow,
    MeasuredRow,
    Report,
    WayRow,
)

from ..cpu import spawned
from ..sample_reports import LAYER, layered

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'
LAYERS = 12
MEASURED = 12
"""The column of what was measured."""

KERNEL = 'def kernel():\n    """A <b>kernel</b>."""\n    return None  # nothing\n'

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def plain() -> Report:
    report = layered(LAYERS)
    for row in report.groups:
        row.kernel.status, row.kernel.file, row.kernel.text = "interpreted", "kernels/k.py", KERNEL
        row.sources = [LineRow(file="model.py", line=7, text="y = x.cos().exp()")]
    return report


@pytest.fixture(scope="module")
def timed(plain: Report) -> Report:
    report = plain.model_copy(deep=True)
    ways = [
        WayRow(way="eager", us=50.0, low_us=49.0, high_us=51.0, runs=9),
        WayRow(way="kernel", us=20.0, low_us=19.0, high_us=21.0, runs=9),
        WayRow(way="liger", absent="Liger has none"),
    ]
    report.groups[0].measured = MeasuredRow(
        ways=ways, best="kernel", speedup=2.5, fused_error=0.1, speedup_error=-0.1
    )
    report.bench = BenchRow(
        machine={"gpu": "H200"}, copy_bandwidth=4.2e12, matmul={}, launch_us=2.0,
        host_launch_us=4.0, model=ways, recommended="kernels", why="they are the fastest",
    )  # fmt: skip
    return report


@pytest.fixture(scope="module")
def advised(plain: Report) -> Report:
    """With advice that saves more than any group."""
    report = plain.model_copy(deep=True)
    report.advice = [
        AdviceRow(
            id="a1", code="launch-bound", message="capture a graph", evidence=["40 kernels wait"],
            saved_us=report.totals.time_us,
            sources=[LineRow(file="model.py", line=9, text="y = f(x)")],
        )
    ]  # fmt: skip
    return report


def rows(page: Any, table: str, column: int = 1) -> list[str]:
    """A column of the rows that a table shows."""
    cells = f"#{table} tbody tr:not(.space) td:nth-child({column})"
    return page.locator(cells).all_text_contents()


def text(page: Any, selector: str) -> str:
    return " ".join(page.locator(selector).inner_text().split())


def at_rest(page: Any, selector: str) -> dict[str, float]:
    """Where something is once the page no longer scrolls to it."""
    before, now = None, page.locator(selector).bounding_box()
    while now != before:
        page.wait_for_timeout(100)
        before, now = now, page.locator(selector).bounding_box()
    return now


# -- the first screen ------------------------------------------------------------------------------


def test_the_first_screen_says_what_to_fuse_and_what_it_saves(opened: Open, plain: Report) -> None:
    page = opened(plain)
    headline = page.locator("h1")
    assert headline.inner_text().startswith(f"Fuse {len(plain.groups)} groups: ")
    for selector in ("h1", "#setting", "#totals", "#todo", "#times", "#waterfall", "#places"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= page.viewport_size["height"], selector
    for name, value in wording.totals(plain):
        assert f"{name} {value}" in text(page, "#totals")


def test_the_waterfall_leads_from_before_to_after(opened: Open, plain: Report) -> None:
    page = opened(plain)
    steps = page.locator("#waterfall > li").all_inner_texts()
    assert wording.size(plain.totals.hbm_bytes_unfused) in steps[0]
    after = next(step for step in steps if step.startswith("after fusing"))
    assert wording.size(plain.totals.hbm_bytes_fused) in after
    bars = [bar.bounding_box() for bar in page.locator("#waterfall .step .track i").all()]
    assert len(bars) == len(plain.groups)
    for above, below in pairwise(bars):  # each step begins where the last one ended
        assert below["x"] + below["width"] == pytest.approx(above["x"], abs=2.5)
    page.locator("#waterfall .step").first.click()
    assert wording.computes(plain.groups[0]) in text(page, "#details h2")


def test_bytes_are_ranked_by_operator_module_and_line(opened: Open, plain: Report) -> None:
    page = opened(plain)
    operators = page.locator("#places .name").all_inner_texts()
    assert set(operators) == set(LAYER)
    page.select_option("#places-by", "module")
    assert f"layers.*.{LAYER[0]}" in page.locator("#places .name").all_inner_texts()
    page.select_option("#places-by", "line")
    page.locator("#places .step").first.click()
    assert page.input_value("#search").startswith("/elsewhere/model.py:")
    assert text(page, "#found").startswith(f"{LAYERS} nodes")


# -- what to do ------------------------------------------------------------------------------------


def test_the_header_says_what_all_figures_are_for(opened: Open, plain: Report) -> None:
    said = text(opened(plain), "#setting")
    for fact in (plain.device.title, "eval mode, forward", "float32", "x 2048x2048:float32"):
        assert fact in said
    assert f"assumed {'; '.join(plain.scenario.defaults)}" in said


def test_the_time_before_and_after_is_one_scale(opened: Open, plain: Report) -> None:
    page = opened(plain)
    before, after = page.locator("#times li").all_inner_texts()
    totals = plain.totals
    assert wording.time(totals.time_us) in before
    assert wording.time(totals.time_us / totals.predicted_speedup) in after
    key = text(page, "#times-key")
    beyond = dict(wording.unfusable_launches(plain))
    assert f"matrix products {wording.time(beyond['matrix products'])}, beyond fusion" in key

    def width(row: int) -> float:
        spans = page.locator("#times li").nth(row).locator(".parts span").all()
        return sum(span.bounding_box()["width"] for span in spans)

    assert width(1) / width(0) == pytest.approx(1 / totals.predicted_speedup, abs=0.02)


def test_fusions_and_advice_are_one_list_and_rejections_another(
    opened: Open, advised: Report
) -> None:
    page = opened(advised)
    assert rows(page, "todo") == [todo.row.id for todo in wording.todo(advised)]
    assert rows(page, "todo")[0] == "a1"
    page.get_by_role("button", name=re.compile("^saves")).click()
    head = page.locator("#todo th", has_text="saves")
    assert head.get_attribute("aria-sort") == "descending"
    assert rows(page, "rejected") == [row.id for row in wording.independent_candidates(advised)]
    assert page.locator("#rejected th", has_text=re.compile("save|predicted")).count() == 0
    page.fill("#search", "cos_3")
    page.locator("#found", has_text="group").wait_for()
    found = [row for row in advised.groups if "cos_0" in row.nodes]
    assert rows(page, "todo") == [row.id for row in found]


def test_advice_shows_what_it_stands_on(opened: Open, advised: Report) -> None:
    page = opened(advised)
    page.locator("#todo tbody tr", has_text="launch-bound").click()
    said = text(page, "#details")
    assert "capture a graph" in said
    assert "40 kernels wait" in said
    assert "model.py:9 y = f(x)" in said


def test_an_address_opens_a_group_and_what_is_open_stands_in_it(
    opened: Open, advised: Report
) -> None:
    page = opened(advised)
    page.locator("#todo tbody tr", has_text="g1").click()
    assert page.url.endswith("#g1")
    page.evaluate("location.hash = '#a1'")
    page.locator("#details h2", has_text="launch-bound").wait_for()
    page.evaluate("location.hash = '#c1'")
    page.locator("#details h2", has_text="rejected").wait_for()
    assert text(opened(advised, at="#g1"), "#details h2").startswith("g1 ")


def test_a_line_is_named_without_its_folders_which_its_title_has(
    opened: Open, plain: Report
) -> None:
    report = plain.model_copy(deep=True)
    whole = "/site-packages/deep/down/modeling.py"
    report.groups[0].sources = [LineRow(file=whole, line=62, text="y = x")]
    page = opened(report)
    cell = page.locator("#todo tbody tr", has_text="g1").locator("span[title]", has_text="62")
    assert cell.inner_text() == "modeling.py:62"
    assert cell.get_attribute("title") == f"{whole}:62"


def test_a_group_shows_its_evidence(opened: Open, plain: Report) -> None:
    page = opened(plain)
    group = plain.groups[0]
    page.locator("#todo tbody tr", has_text=group.id).click()
    said = text(page, "#details")
    for gate in group.gates:
        assert f"{gate.code} {gate.name}" in said
    assert "model.py:7 y = x.cos().exp()" in said
    assert page.locator("#details pre", has_text="def kernel").inner_text() == KERNEL
    assert "Not measured" in said
    assert wording.gate(group.deciding) in said
    page.locator("#details summary", has_text="instances").click()
    assert page.locator("#details .instances li").count() == LAYERS
    page.locator("#details .instances button").first.click()
    assert text(page, "#details h2") == group.nodes[0]


def test_a_rejected_candidate_says_why(opened: Open, plain: Report) -> None:
    page = opened(plain)
    candidate = wording.independent_candidates(plain)[0]
    page.locator("#rejected tbody tr", has_text=candidate.id).first.click()
    assert "rejected" in text(page, "#details h2")
    assert wording.gate(candidate.deciding) in text(page, "#details")
    assert page.locator("#details tr.fails").count() == sum(
        gate.outcome == "fails" for gate in candidate.gates
    )


def test_what_was_measured_stands_beside_what_was_predicted(opened: Open, timed: Report) -> None:
    page = opened(timed)
    assert rows(page, "todo", MEASURED)[0] == "2.50x"
    assert "kernels; they are the fastest" in text(page, "#bench")
    page.locator("#todo tbody tr").nth(1).click()
    said = text(page, "#details")
    assert "kernel, predicted" in said
    assert "kernel, measured 20 µs" in said
    assert "eager, measured 50 µs" in said
    assert wording.measured(timed.groups[0]) in said
    assert "Liger has none" in said


# -- roofline and graph ----------------------------------------------------------------------------


def test_the_roofline_names_launches_and_groups(opened: Open, plain: Report) -> None:
    page = opened(plain)
    canvas = page.locator("#roofline")
    canvas.focus()
    seen = set()
    for _ in range(len(LAYER) + len(plain.groups)):
        page.keyboard.press("ArrowRight")
        seen.add(text(page, "#roofline-tip b"))
    names = {f"{op}_0 ({op}) and {LAYERS - 1} more like it" for op in LAYER}
    fused = {f"{row.id} {row.computes}, fused: {LAYERS} instances" for row in plain.groups}
    assert seen == names | fused
    box = page.locator("#roofline-tip").bounding_box()
    assert box["width"] > 100
    page.keyboard.press("Enter")
    assert page.locator("#details").is_visible()


def test_the_pointer_finds_a_point_of_the_roofline(opened: Open, plain: Report) -> None:
    page = opened(plain)
    canvas = page.locator("#roofline")
    canvas.focus()
    for _ in plain.nodes:
        page.keyboard.press("ArrowRight")
        tip, place = at_rest(page, "#roofline-tip"), at_rest(page, "#roofline")
        if tip["y"] + tip["height"] < place["y"] + place["height"] - 1:  # else it is not beside
            break
    named = text(page, "#roofline-tip b")
    page.mouse.move(place["x"] + 5, place["y"] + 5)
    assert page.locator("#roofline-tip").is_hidden()
    page.mouse.move(tip["x"] - 14, tip["y"] + 10)
    assert page.locator("#roofline-tip").is_visible()
    assert text(page, "#roofline-tip b") == named


def test_repeated_layers_are_folded(opened: Open, plain: Report) -> None:
    page = opened(plain)
    nodes = LAYERS * len(LAYER)
    assert text(page, "#graph-size") == f"{len(LAYER)} boxes for {nodes} nodes"
    page.click("#graph-fold")
    assert text(page, "#graph-size") == f"{nodes} boxes for {nodes} nodes"
    page.locator("#graph").focus()
    page.keyboard.press("f")
    assert text(page, "#graph-size") == f"{len(LAYER)} boxes for {nodes} nodes"


def test_the_graph_is_walked_with_keys(opened: Open, plain: Report) -> None:
    page = opened(plain)
    page.locator("#graph").focus()
    walked = []
    for _ in LAYER:
        page.keyboard.press("ArrowDown")
        walked.append(text(page, "#graph-said").split(":")[0])
    assert walked == [f"{op}_1" for op in LAYER]  # a layer with others on both sides
    page.keyboard.press("ArrowUp")
    assert text(page, "#graph-said").startswith(f"{LAYER[-2]}_1: ")
    page.keyboard.press("Enter")
    assert text(page, "#details h2") == f"{LAYER[-2]}_1"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "graph"


def test_search_goes_to_what_it_finds_and_a_click_opens_it(opened: Open, plain: Report) -> None:
    page = opened(plain)
    page.keyboard.press("/")
    page.keyboard.type("exp layers.0")
    page.keyboard.press("Enter")
    assert text(page, "#graph-said").startswith("exp_1: aten.exp.default")
    assert text(page, "#launches-count").startswith("1 row,")
    box = page.locator("#graph").bounding_box()
    page.locator("#graph").scroll_into_view_if_needed()
    box = page.locator("#graph").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert text(page, "#details h2") == "exp_1"
    page.keyboard.press("Escape")
    page.locator("#search").focus()
    page.keyboard.press("Escape")
    assert text(page, "#found") == ""
    assert text(page, "#launches-count").startswith(f"{LAYERS * len(LAYER)} rows,")


def test_the_graph_zooms_and_moves(opened: Open, plain: Report) -> None:
    page = opened(plain)
    canvas = page.locator("#graph")
    canvas.scroll_into_view_if_needed()
    seen = [canvas.screenshot()]
    page.click("#graph-in")
    seen.append(canvas.screenshot())
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 300)
    page.mouse.down()
    page.mouse.move(box["x"] + 380, box["y"] + 340, steps=4)
    page.mouse.up()
    seen.append(canvas.screenshot())
    assert len(set(seen)) == len(seen)
    assert page.locator("#details").is_hidden()  # dragging opens nothing


# -- keyboard, themes, sizes -----------------------------------------------------------------------


def test_the_table_of_groups_needs_no_pointer(opened: Open, plain: Report) -> None:
    page = opened(plain)
    grid = page.get_by_role("grid", name="What to do")
    grid.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    active = page.evaluate("document.activeElement.getAttribute('aria-activedescendant')")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    page.keyboard.press("Enter")
    assert plain.groups[1].id in text(page, "#details h2")
    assert page.evaluate("document.activeElement.tagName") == "H2"
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    assert page.evaluate("document.activeElement.getAttribute('role')") == "grid"


def test_tab_reaches_every_part(opened: Open, plain: Report) -> None:
    page = opened(plain)
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("(document.activeElement.closest('[id]') ?? document.activeElement).id")
        )
    parts = {"search", "theme", "waterfall", "places-by", "places", "todo", "roofline"}
    assert parts | {"graph", "graph-fold", "graph-fit", "launches"} <= reached


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_can_be_changed(
    opened: Open, plain: Report, scheme: str
) -> None:
    page = opened(plain, color_scheme=scheme)

    def lightness() -> float:
        colour = page.evaluate(
            "getComputedStyle(document.querySelector('section')).backgroundColor"
        )
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    assert (lightness() > 128) == (scheme == "light")
    graph = page.locator("#graph")
    graph.scroll_into_view_if_needed()
    before = graph.screenshot()
    other = {"light": "Dark theme", "dark": "Light theme"}
    assert text(page, "#theme") == other[scheme]
    page.click("#theme")
    assert (lightness() > 128) == (scheme == "dark")
    assert text(page, "#theme") == next(name for name in other.values() if name != other[scheme])
    assert graph.screenshot() != before


def test_a_phone_scrolls_in_one_direction_alone(opened: Open, plain: Report) -> None:
    page = opened(plain, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#todo tbody tr").nth(1).click()
    assert page.locator("#details").bounding_box()["width"] <= 390


def test_800_pixels_have_navigation_and_every_column_in_sight(
    opened: Open, advised: Report
) -> None:
    page = opened(advised, viewport={"width": 800, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    assert page.locator("nav a").first.is_visible()
    for table in ("todo", "rejected"):
        box = page.locator(f"#{table} .scroller").bounding_box()
        heads = [head for head in page.locator(f"#{table} th").all() if head.is_visible()]
        last = heads[-1].bounding_box()
        assert len(heads) >= 4
        assert last["x"] + last["width"] <= box["x"] + box["width"] + 1


# -- any model -------------------------------------------------------------------------------------


def test_ten_thousand_nodes_stay_within_reach(opened: Open) -> None:
    layers = -(-10_000 // len(LAYER))
    page = opened(layered(layers))
    nodes = layers * len(LAYER)
    assert page.evaluate("document.querySelectorAll('*').length") < 2500
    page.click("#graph-fold")
    assert text(page, "#graph-size") == f"{nodes:,} boxes for {nodes:,} nodes"
    grid = page.get_by_role("grid", name="Launches and views")
    grid.focus()
    page.keyboard.press("End")
    assert grid.locator("tr[aria-selected=true]").get_attribute("aria-rowindex") == str(nodes + 1)
    assert page.locator("#launches tbody tr").count() < 60
    page.fill("#search", f"cos_{layers - 1}")
    page.locator("#found", has_text="1 node,").wait_for()
    page.locator("#search").press("Enter")
    assert text(page, "#graph-said").startswith(f"cos_{layers - 1}: ")


def test_a_model_without_groups_says_so(opened: Open) -> None:
    report = layered(1)
    report.groups, report.candidates, report.nodes, report.ungrouped = [], [], [], []
    report.device.peaks = {}
    page = opened(report)
    assert page.locator("h1").inner_text() == "Nothing here is worth fusing."
    assert rows(page, "todo") == []


def test_strings_of_a_model_are_shown_and_not_run(opened: Open, plain: Report) -> None:
    report = plain.model_copy(deep=True)
    report.model.source = report.device.title = HOSTILE
    for node in report.nodes:
        node.module = f"{HOSTILE}.{node.module}"
        node.op = HOSTILE
    group = report.groups[0]
    group.computes = group.layers = group.kernel.text = HOSTILE
    group.action.text = group.action.code = HOSTILE
    group.gates[0] = replace(group.gates[0], why=HOSTILE)
    group.sources = [LineRow(file=HOSTILE, line=1, text=HOSTILE)]
    page = opened(report)
    assert page.locator("#model").inner_text() == HOSTILE
    page.locator("#todo tbody tr").nth(1).click()
    assert page.locator("#details pre", has_text="alert").last.inner_text() == HOSTILE
    page.locator("#graph").focus()
    page.keyboard.press("ArrowDown")
    assert HOSTILE in text(page, "#graph-said")
    page.keyboard.press("Enter")
    assert HOSTILE in text(page, "#details")
    page.locator("#roofline").focus()
    page.keyboard.press("ArrowRight")
    assert HOSTILE in text(page, "#roofline-tip")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("<script>alert(1)</script>", torch.nn.Softplus())

    def forward(self, x):
        return getattr(self, "<script>alert(1)</script>")(x).cos().exp()


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(512, 1024)]
"""


def test_a_module_named_script_is_a_name(opened: Open, tmp_path: Path) -> None:
    model, out = tmp_path / "model.py", tmp_path / "out"
    model.write_text(MODEL)
    quick = ("--device", "h200", "--no-verify", "--no-compile")
    done = spawned.command("analyze", model, *quick, "--out", out, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = opened(out / "report.html")
    page.select_option("#places-by", "module")
    assert "<script>alert(1)</script>" in page.locator("#places .name").all_inner_texts()
    page.locator("#todo tbody tr", has_text="g1").click()
    assert "import triton" in page.locator("#details pre").last.inner_text()
    assert "alert" not in {page.title(), text(page, "h1")}
