"""The report as a document: what its readers rely on, and every format of it."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from fusion_advisor.ci.findings import Policy, review
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.cost.lifetimes import peak_activation_bytes
from fusion_advisor.fusion.components import DecidedSet, Grouping
from fusion_advisor.fusion.findings import Identified, fuse, with_registers
from fusion_advisor.ir.graph import Arg, Graph, Node, Ref, Source, Tensor
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.report.assemble import assemble, layers
from fusion_advisor.report.diff import compare, cost_us
from fusion_advisor.report.formats import FORMATS, render, wording
from fusion_advisor.report.schema import LineRow, Report, TrafficRow, load_report
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError

ROWS, COLUMNS = 1024, 4096
FULL_BYTES = ROWS * COLUMNS * 4

TOP_LEVEL = (
    "schema_version tool rules device scenario model nodes groups candidates ungrouped advice"
    " totals"
)
GROUP = (
    "id fingerprint nodes instances pattern verdict gates traffic on_chip predicted impact route"
    " action fixable kernel measured sources parent"
)
FIELDS = {
    "tool": "name version torch triton",
    "rules": "version hash",
    "device": "name peaks",
    "scenario": "mode phase dtype shapes defaults",
    "model": "source captured_by nodes graph_breaks differs_from_eager",
    "totals": "flops hbm_bytes_unfused hbm_bytes_fused kernels_unfused kernels_fused time_us"
    " predicted_speedup coverage saveable_bytes ceiling_speedup peak_activation_bytes",
    "nodes.0": "name op shape dtype flops bytes_read bytes_written arithmetic_intensity bound"
    " parallelism modelled module source inputs unit",
    "nodes.0.source": "file line",
    "groups.0": GROUP,
    "candidates.0": GROUP,
    "groups.0.gates.0": "code name measured limit unit outcome why",
    "groups.0.traffic": "unfused_bytes fused_bytes ratio saved_bytes",
    "groups.0.on_chip": "bytes budget_bytes",
    "groups.0.predicted": "unfused_us fused_us speedup interval worthwhile",
    "groups.0.impact": "saved_us instances saved_us_total share launches_saved"
    " activation_bytes_saved rank basis",
    "groups.0.action": "text code",
    "groups.0.sources.0": "file line text",
    "groups.0.kernel": "status file entry schedule resources check",
    "ungrouped.0": "node reason",
    "advice.0": "code message saved_us sources",
}


def tensor(number: int, dtype: str = "float32") -> Tensor:
    return Tensor((ROWS, COLUMNS), (COLUMNS, 1), dtype, storage=number)


def chain(*ops: str, dtype: str = "float32") -> tuple[Node, ...]:
    """Launches that each take the one before; `given` is the input."""
    nodes = [Node("given", "input", "input", outputs=(tensor(0, dtype),))]
    for number, op in enumerate(ops, 1):
        args: tuple[Arg, ...] = (Ref(nodes[-1].name),)
        if op.startswith("aten.add."):
            args = (Ref(nodes[-1].name), Ref("given"))
        nodes.append(
            Node(
                f"n{number}", op, args=args, outputs=(tensor(number, dtype),),
                source=Source("/elsewhere/model.py", number),
            )
        )  # fmt: skip
    return tuple(nodes)


def report_of(*ops: str, dtype: str = "float32") -> Report:
    nodes = chain(*ops, dtype=dtype)
    return report_of_graph(Graph(nodes, (Ref(nodes[-1].name),), source="model.py"))


def report_of_graph(graph: Graph) -> Report:
    flow, _, found = identified(graph)
    return assemble(flow, found, {}, Scenario(), ("device=h200",), load_rulebook())


def identified(graph: Graph) -> tuple[Dataflow, Grouping[DecidedSet], Identified]:
    rulebook = load_rulebook()
    flow = dataflow(graph, rulebook.device("h200"))
    found = fuse(flow, rulebook)
    return flow, found.grouping, found


def mixed() -> Report:
    """A group, a candidate that one gate rejects, advice, and launches that stand alone."""
    return report_of(
        "aten.cos.default", "aten.cos.default", "aten.add.Tensor", "aten.unknown.default",
        "aten.clone.default", "aten.unknown.default",
    )  # fmt: skip


def at(content: object, path: str) -> object:
    for step in path.split("."):
        content = content[int(step) if step.isdigit() else step]  # type: ignore[index]
    return content


def test_two_launches_become_one() -> None:
    report = report_of("aten.cos.default", "aten.cos.default")
    (row,) = report.groups
    assert (row.verdict, row.pattern, row.route) == ("fuse", "pointwise-chain", "inductor")
    assert row.traffic.unfused_bytes == 4 * FULL_BYTES
    assert (row.traffic.fused_bytes, row.traffic.ratio) == (2 * FULL_BYTES, 2.0)
    assert row.impact.launches_saved == 1
    assert row.impact.activation_bytes_saved == FULL_BYTES
    low, high = row.predicted.interval
    assert low < row.predicted.speedup < high
    assert all(gate.outcome == "holds" for gate in row.gates)
    totals = report.totals
    assert (totals.hbm_bytes_unfused, totals.hbm_bytes_fused) == (4 * FULL_BYTES, 2 * FULL_BYTES)
    assert (totals.kernels_unfused, totals.kernels_fused) == (2, 1)
    assert totals.coverage == 1.0
    assert totals.predicted_speedup == pytest.approx(row.predicted.speedup)
    assert totals.predicted_speedup <= totals.ceiling_speedup
    assert totals.peak_activation_bytes == 2 * FULL_BYTES


def test_the_time_model_speaks_up_where_it_disagrees_with_the_gates() -> None:
    (row,) = report_of("aten.cos.default", "aten.cos.default").groups
    assert row.predicted.worthwhile
    assert wording.disagreement(row) == ""
    slower = row.predicted.model_copy(update={"worthwhile": False})
    accepted = row.model_copy(update={"predicted": slower})
    assert wording.disagreement(accepted).startswith("the time model expects no gain")
    rejected = row.model_copy(update={"verdict": "reject"})
    assert wording.disagreement(rejected).startswith("the time model expects a gain all the same")
    assert "gain" in wording.decided(rejected)


def test_times_are_said_in_their_unit() -> None:
    said = [wording.time(us) for us in (0.0, 12.34, 999.4, 1234.0, 35_260_000.0)]
    assert said == ["0 µs", "12.3 µs", "999 µs", "1.23 ms", "35.3 s"]


def test_a_number_just_beyond_its_limit_is_told_from_it() -> None:
    (row,) = report_of("aten.cos.default", "aten.cos.default").groups
    gate = next(gate for gate in row.gates if gate.name == "traffic-saving")

    def said(measured: float) -> str:
        return wording.gate(replace(gate, measured=measured))

    assert said(1.25) == "traffic-saving 1.25 x, needs >= 1.5"
    assert said(1.4999981) == "traffic-saving 1.499998 x, needs >= 1.5"
    assert said(1.5) == "traffic-saving 1.5 x, needs >= 1.5"


def test_every_field_of_the_contract_is_there() -> None:
    report = mixed()
    rows = [*report.groups, *report.candidates]
    report.groups, report.candidates = rows, rows
    content = json.loads(report.model_dump_json())
    assert set(TOP_LEVEL.split()) <= set(content)
    for path, names in FIELDS.items():
        row = at(content, path)
        assert isinstance(row, dict)
        assert set(names.split()) <= set(row), path


def test_every_node_is_in_a_group_or_has_a_reason() -> None:
    report = mixed()
    members = [name for row in report.groups for place in row.instances for name in place]
    assert len(members) == len(set(members))
    alone = {row.node for row in report.ungrouped}
    assert alone.isdisjoint(members)
    assert alone | set(members) == {row.name for row in report.nodes}
    assert all(row.reason for row in report.ungrouped)


def test_a_node_names_what_it_reads_and_the_unit_that_it_runs_on() -> None:
    report = report_of("aten.cos.default", "aten.add.Tensor")
    cos, add = report.nodes
    assert (cos.inputs, add.inputs) == (["given"], ["n1", "given"])
    assert {cos.unit, add.unit} == {"cuda float32"}
    device = load_rulebook().device("h200")
    assert report.device.peaks == {"cuda float32": device.peak_flops("cuda", "float32")}


def test_a_source_line_is_quoted_where_its_file_is_there(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("first\n    x = x.cos()\n")
    nodes = chain("aten.cos.default", "aten.cos.default")
    here = Source(str(model), 2)
    graph = Graph((*nodes[:2], replace(nodes[2], source=here)), (Ref("n2"),), source="model.py")
    (group,) = report_of_graph(graph).groups
    assert [line.text for line in group.sources] == ["", "x = x.cos()"]


def test_an_unknown_op_is_counted_and_named() -> None:
    report = mixed()
    assert [row.cause for row in report.unmodelled] == ["aten.unknown.default"]
    assert 0 < report.totals.coverage < 1
    reasons = {row.node: row.reason for row in report.ungrouped}
    assert reasons["n4"].startswith("not modelled")


def test_compiled_kernels_are_predicted_by_their_registers_and_ranked_again() -> None:
    ops = ["aten.cos.default"] * 2 + ["aten.unknown.default"] + ["aten.exp.default"] * 3
    nodes = chain(*ops)
    _, _, found = identified(Graph(nodes, (Ref(nodes[-1].name),), source="model.py"))
    first, second = found.groups
    compiled = with_registers(found, {first.id: (255,), second.id: (16,)})
    slower = {group.id: group for group in compiled.groups}[first.id]
    assert slower.decision.fused_us > first.decision.fused_us
    assert slower.decision.unfused_us == first.decision.unfused_us
    saved = [group.saved_us_total for group in compiled.groups]
    assert saved == sorted(saved, reverse=True)
    assert [group.rank for group in compiled.groups] == [1, 2]
    assert {group.id for group in compiled.groups} == {first.id, second.id}


def test_groups_are_ranked_by_the_time_they_save() -> None:
    report = mixed()
    saved = [row.impact.saved_us_total for row in report.groups]
    assert saved == sorted(saved, reverse=True)
    assert [row.impact.rank for row in report.groups] == list(range(1, len(saved) + 1))


def test_a_copy_that_stands_alone_is_advised_against() -> None:
    assert [(row.code, row.sources[0].line) for row in mixed().advice] == [("hidden-copy", 5)]


def test_a_rejection_says_what_would_flip_it() -> None:
    """Two readers of one tensor: 4 tensors moved, 3 when fused."""
    given, first, _ = chain("aten.cos.default", "aten.cos.default")
    second = replace(first, name="n2", op="aten.sin.default", outputs=(tensor(2),))
    report = report_of_graph(Graph((given, first, second), (Ref("n1"), Ref("n2"))))
    (row,) = report.candidates
    assert not report.groups
    assert row.deciding
    assert row.deciding.name == "traffic-saving"
    assert row.fixable
    assert (row.fixable.gate, row.fixable.needed) == ("traffic-saving", 1.5)
    assert str(3 * FULL_BYTES - int(4 * FULL_BYTES / 1.5)) in row.fixable.change
    assert {u.reason for u in report.ungrouped} == {
        "traffic-saving: 1.333 x, needs >= 1.5 (candidate c1)"
    }


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (["", "norm", "head.proj"], ""),
        (["layers.0.norm", "layers.0"], "layers.0"),
        ([f"layers.{i}.mlp.act" for i in range(32)], "layers 0–31"),
        (["h.3", "h.1.mlp", "norm", "h.2", "h.11"], "h 1–3, 11"),
        (["model.layers.0.experts.7.act", "model.layers.1.experts.3"], "layers 0–1"),
        (["encoder.block.0", "decoder.block.0", "decoder.block.1"],
         "encoder.block.0, decoder.block 0–1"),
        (["0.conv", "1.conv"], ""),
    ],
)  # fmt: skip
def test_a_group_says_in_which_layers_it_is(modules: list[str], said: str) -> None:
    assert layers(modules) == said


def test_a_name_says_what_and_where() -> None:
    (group,) = mixed().groups
    group.layers = "layers 0–31"
    assert wording.named(group) == "cos + add at model.py:1 (layers 0–31)"
    earlier = group.model_copy(update={"computes": "", "layers": "", "sources": []})
    assert wording.named(earlier) == "pointwise-chain"


def test_float64_is_advised_against() -> None:
    codes = [row.code for row in report_of("aten.cos.default", dtype="float64").advice]
    assert codes == ["float64"]


def test_a_chain_holds_two_tensors_at_once() -> None:
    nodes = chain("aten.cos.default", "aten.cos.default", "aten.cos.default")
    assert peak_activation_bytes(Graph(nodes, (Ref("n3"),))) == 2 * FULL_BYTES
    assert peak_activation_bytes(Graph(nodes, (Ref("n1"), Ref("n3")))) == 3 * FULL_BYTES


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_what_was_found(name: str) -> None:
    text = render(mixed(), name)
    assert text.endswith("\n")
    assert "cos + add" in text
    assert "model.py" in text or name == "model-explorer"


def test_text_fits_sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = render(mixed(), "text").splitlines()
    assert max(map(len, lines)) <= 60
    assert "\x1b" not in "".join(lines)


def test_no_share_of_the_saveable_is_told_where_faster_kernels_move_more() -> None:
    report = mixed()
    assert "of the saveable" in render(report, "text")
    totals = report.totals
    more = totals.model_copy(update={"hbm_bytes_fused": 2 * totals.hbm_bytes_unfused})
    assert "of the saveable" not in render(report.model_copy(update={"totals": more}), "text")


def test_an_unknown_format_names_the_known() -> None:
    with pytest.raises(UsageError, match="text, json, md"):
        render(mixed(), "pdf")


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = mixed()
    file = tmp_path / "report.json"
    file.write_text(render(report, "json"), encoding="utf-8")
    assert load_report(file) == report


@pytest.mark.parametrize("name", FORMATS)
def test_an_older_report_is_read(name: str) -> None:
    """The first report that there was, by its own layout: what came later is left out."""
    report = load_report(Path(__file__).parent / "reports" / "2026-11-first.json")
    assert report.totals.saveable_bytes
    assert "residual-norm" in render(report, name)


def test_readers_accept_what_they_do_not_know(tmp_path: Path) -> None:
    content = json.loads(render(mixed(), "json"))
    content["later"] = 1
    content["groups"][0]["verdict"] = "perhaps"
    content["groups"][0]["later"] = {"more": 2}
    file = tmp_path / "report.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    assert load_report(file).groups[0].verdict == "perhaps"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no schema_version"),
        ('{"schema_version": 99}', "schema_version 99"),
        ('{"schema_version": 1}', "tool"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load_report(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_report(tmp_path / "none.json")


def test_equal_reports_do_not_differ() -> None:
    assert list(compare(mixed(), mixed())) == ["no difference in traffic or verdicts"]


def test_a_new_group_is_a_difference() -> None:
    before = report_of("aten.cos.default")
    lines = list(compare(before, report_of("aten.cos.default", "aten.cos.default")))
    assert any(line.startswith("new      fuse cos at model.py:1") for line in lines)
    assert any(line.startswith("kernels: ") for line in lines)


def rejecting(fingerprint: str, *texts: str, code: str = "traffic-saving") -> Report:
    """A report whose one candidate has these lines, and is rejected by a gate."""
    report = mixed()
    (group,) = report.groups
    gates = [
        replace(gate, outcome="fails" if gate.name == code else "holds") for gate in group.gates
    ]
    sources = [LineRow(file="model.py", line=n, text=text) for n, text in enumerate(texts, 1)]
    report.candidates = [
        group.model_copy(
            update={
                "id": "c1", "fingerprint": fingerprint, "verdict": "reject", "gates": gates,
                "sources": sources,
            }
        )
    ]  # fmt: skip
    return report


def test_a_region_that_is_rejected_as_before_is_no_difference() -> None:
    before = rejecting("one", "x = x.cos()", "x = x + y")
    grown = rejecting("other", "z = 1", "x = x.cos()", "x = x + y")
    assert list(compare(before, grown)) == ["no difference in traffic or verdicts"]
    elsewhere = list(compare(before, rejecting("other", "q = k @ v")))
    assert [line.split()[:2] for line in elsewhere] == [["new", "reject"], ["gone", "reject"]]
    otherwise = rejecting("other", "x = x.cos()", code="on-chip")
    assert len(list(compare(before, otherwise))) == 2


def test_what_a_change_costs_is_counted_in_the_modules_that_it_is_in() -> None:
    old, new = report_of("aten.cos.default"), report_of(*["aten.cos.default"] * 3)
    for report in (old, new):
        for node in report.nodes:
            node.module = "mlp"
    elsewhere = new.nodes[0].model_copy(update={"name": "far", "module": "far", "time_us": 1e6})
    new.nodes.append(elsewhere)
    (group,) = new.groups
    grown = sum(node.time_us for node in new.nodes[:3]) - old.nodes[0].time_us
    assert cost_us(old, new, group) == pytest.approx(grown)
    whole = new.totals.time_us - old.totals.time_us
    old.nodes[0].module = "renamed"
    assert cost_us(old, new, group) == pytest.approx(whole)
    review_of_new = review(new, Policy(), Path("/"), ("base.json", old))
    (finding,) = review_of_new.findings
    assert (finding.state, finding.cost_us) == ("new", pytest.approx(whole))
    known = review(new, Policy(), Path("/"), ("base.json", new))
    assert [row.cost_us for row in known.findings] == [None]


def test_what_the_gates_said_is_what_the_report_says() -> None:
    """The readings themselves, and every other row by the names of its fields."""
    nodes = chain("aten.cos.default", "aten.cos.default", "aten.add.Tensor")
    flow, _, found = identified(Graph(nodes, (Ref("n3"),)))
    report = assemble(flow, found, {}, Scenario(), (), load_rulebook())
    assert report.groups
    for row, finding in zip(report.groups, found.groups, strict=True):
        assert all(map(operator.is_, row.gates, finding.decision.gates))
        assert row.impact.saved_us_total == finding.saved_us_total
        assert row.predicted.worthwhile == finding.decision.worthwhile


def test_a_row_without_one_of_its_fields_is_refused() -> None:
    with pytest.raises(ValidationError, match="saved_bytes"):
        TrafficRow.of(Source("f.py", 1), unfused_bytes=2, fused_bytes=1, ratio=2.0)


def test_predicted_times_have_no_digits_that_a_math_library_decides() -> None:
    report = mixed()
    times = [node.time_us for node in report.nodes]
    times += [
        us for row in report.groups for us in (row.predicted.unfused_us, row.predicted.fused_us)
    ]
    assert any(times)
    assert [us for us in times if us != float(f"{us:.9g}")] == []
