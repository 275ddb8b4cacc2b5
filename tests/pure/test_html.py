"""The HTML report as a document: one file, nothing from the network, no string that is markup."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.report.formats import html, render
from fusion_advisor.report.formats.page_data import page_data
from fusion_advisor.report.formats.repeats import Repeat, label, repeats
from fusion_advisor.report.schema import (
    GroupRow,
    LineRow,
    MeasuredRow,
    NodeRow,
    Report,
    WayRow,
    load_report,
)

from ..sample_reports import LAYER, layered

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>\u2028&amp;'


@pytest.fixture(scope="module")
def report() -> Report:
    return layered(3)


def data_of(page: str) -> dict[str, Any]:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(block)


def test_the_page_holds_what_it_needs(report: Report) -> None:
    page = render(report, "html")
    assert data_of(page) == json.loads(json.dumps(page_data(report)))
    assert not re.search(r'(src|href)\s*=\s*"(?!#)', page)
    assert "https://" not in page
    assert "http://" not in page
    assert not re.search(r"^(import|export) ", page, re.M)


def test_the_policy_lets_the_page_s_own_script_and_style_run_alone(report: Report) -> None:
    page = render(report, "html")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    assert policy.startswith("default-src 'none';")
    for text in (script, style):
        assert b64encode(sha256(text.encode()).digest()).decode() in policy
    assert "unsafe" not in policy


def test_every_module_of_the_page_comes_after_those_that_it_imports() -> None:
    folder = Path(html.__file__).parent / "page"
    assert {file.stem for file in folder.glob("*.js")} == set(html.SCRIPTS)
    for place, name in enumerate(html.SCRIPTS):
        used = re.findall(r'from "\./(\w+)\.js"', (folder / f"{name}.js").read_text())
        assert set(used) <= set(html.SCRIPTS[:place]), name


def test_strings_of_a_model_are_never_markup(report: Report) -> None:
    hostile = report.model_copy(deep=True)
    hostile.model.source = HOSTILE
    hostile.device.title = HOSTILE
    hostile.nodes[0].module = hostile.nodes[0].op = HOSTILE
    hostile.groups[0].kernel.text = HOSTILE
    hostile.groups[0].sources = [LineRow(file=HOSTILE, line=1, text=HOSTILE)]
    page, plain = render(hostile, "html"), render(report, "html")
    assert page.count("<script") == plain.count("<script")
    assert page.count("</script") == plain.count("</script")
    assert "<img" not in page
    assert "\u2028" not in page.partition('id="data">')[2]
    assert data_of(page)["groups"][0]["kernel"]["text"] == HOSTILE


def test_what_is_not_finite_is_left_out(report: Report) -> None:
    odd = report.model_copy(deep=True)
    odd.groups[0].traffic.ratio = float("inf")
    assert data_of(render(odd, "html"))["groups"][0]["ratio"] is None


def test_the_steps_lead_from_the_bytes_before_to_those_after(report: Report) -> None:
    traffic = page_data(report)["traffic"]
    assert [step["bytes"] for step in traffic["steps"]] == sorted(
        (step["bytes"] for step in traffic["steps"]), reverse=True
    )
    saved = sum(step["bytes"] for step in traffic["steps"])
    assert traffic["before"] - saved == traffic["after"] == report.totals.hbm_bytes_fused


def test_every_node_names_its_group_or_its_reason(report: Report) -> None:
    data = page_data(report)
    nodes, groups = data["nodes"], data["groups"]
    for i, name in enumerate(nodes["name"]):
        reason = nodes["reason"]["values"][nodes["reason"]["codes"][i]]
        group = nodes["group"][i]
        assert bool(reason) == (group < 0), name
        if group >= 0:
            assert any(i in instance for instance in groups[group]["instances"])


def test_edges_lead_to_what_a_node_reads(report: Report) -> None:
    nodes = page_data(report)["nodes"]
    names = nodes["name"]
    read = {name: [names[i] for i in nodes["inputs"][k]] for k, name in enumerate(names)}
    assert read["mm_0"] == []  # of the model's own inputs there are no rows
    assert read["cos_0"] == ["mm_0"]
    assert read["mm_1"] == ["clone_0"]


def test_a_measurement_stands_beside_the_prediction(report: Report) -> None:
    timed = report.model_copy(deep=True)
    timed.groups[0].measured = MeasuredRow(
        ways=[WayRow(way="eager", us=50.0, runs=9), WayRow(way="kernel", us=20.0, runs=9)],
        best="kernel", speedup=2.5, fused_error=0.1, speedup_error=-0.1,
    )  # fmt: skip
    first, second = page_data(timed)["groups"][:2]
    assert (first["measured"]["us"], first["measured"]["speedup"]) == (20.0, 2.5)
    assert first["measured"]["said"].startswith("measured: 2.50x,"), "no verdict, as before"
    assert [way[0] for way in first["measured"]["ways"]] == ["eager", "kernel"]
    assert first["speedup"] == timed.groups[0].predicted.speedup
    assert second["measured"] is None


# -- kernels beside a report -----------------------------------------------------------------------


def reloaded(folder: Path, report: Report, file: str) -> GroupRow:
    copy = report.model_copy(deep=True)
    copy.groups[0].kernel.file = file
    (folder / "report.json").write_text(render(copy, "json"))
    return load_report(folder / "report.json").groups[0]


def test_a_kernel_is_read_from_beside_the_report(report: Report, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.py").write_text("SOURCE\n")
    found = reloaded(tmp_path, report, "kernels/k.py")
    assert found.kernel.text == "SOURCE\n"
    assert "SOURCE" not in found.model_dump_json()
    assert reloaded(tmp_path, report, "kernels/gone.py").kernel.text is None


def test_a_report_cannot_have_other_files_read(report: Report, tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("SECRET")
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "note.txt").write_text("SECRET")
    for name in ("../secret.py", str(tmp_path / "secret.py"), "note.txt"):
        assert reloaded(folder, report, name).kernel.text is None, name


# -- repeated layers -------------------------------------------------------------------------------


def row(op: str, module: str = "") -> NodeRow:
    return NodeRow(
        name=op, op=op, shape=[2], dtype="float32", flops=0, bytes_read=0, bytes_written=0,
        arithmetic_intensity=0.0, bound="free", parallelism="", modelled=True, module=module,
        source=None,
    )  # fmt: skip


def test_layers_are_one_repeat(report: Report) -> None:
    (found,) = repeats(report.nodes)
    assert found == Repeat(0, len(LAYER), 3)
    assert label(report.nodes, found) == "layers.0 … layers.2"


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ("", []),
        ("abcdefgh", []),
        ("x" + 3 * "abcde" + "y", [Repeat(1, 5, 3)]),
        (2 * "abcd" + "x" + 3 * "efgh", [Repeat(0, 4, 2), Repeat(9, 4, 3)]),
        (2 * "abcabcd", [Repeat(0, 7, 2)]),
        ("abcdabc", []),
    ],
)
def test_repeats_follow_each_other_whole(series: str, expected: list[Repeat]) -> None:
    assert repeats([row(op) for op in series]) == expected


def test_the_repeat_that_hides_most_is_taken() -> None:
    nodes = [row(op) for op in 4 * ("abcdef" + 2 * "ghij")]
    assert repeats(nodes) == [Repeat(0, 14, 4)]


def test_the_same_ops_of_other_modules_are_no_repeat() -> None:
    nodes = [row(op, "encoder") for op in "abcde"] + [row(op, "decoder") for op in "abcde"]
    assert repeats(nodes) == []
