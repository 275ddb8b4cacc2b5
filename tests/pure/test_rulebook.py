"""Loading, overlaying and looking up rules, and the one line that a mistake gives."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fusion_advisor.rulebook import load as rulefiles
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.quantities import UNITS, Number, Tree
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import UsageError

RULES = Path(__file__).resolve().parents[2] / "rules"
GATES = {
    "compute-bound": ("FA101", "<"),
    "on-chip": ("FA201", "<"),
    "parallel-pattern": ("FA301", "<="),
    "traffic-saving": ("FA401", ">="),
    "register-spill": ("FA501", "<="),
    "shared-intermediate": ("FA601", ">="),
    "feeds-matmul": ("FA701", "<="),
    "discontinuous": ("FA801", "<="),
    "no-schedule": ("FA901", ">="),
}


def numbers(model: object, path: str = "") -> Iterator[tuple[str, Number]]:
    """Every number below `model` with its path."""
    if isinstance(model, Number):
        yield path, model
    elif isinstance(model, BaseModel):
        for name in type(model).model_fields:
            yield from numbers(getattr(model, name), f"{path}.{name}")
    elif isinstance(model, dict):
        for name, value in model.items():
            yield from numbers(value, f"{path}.{name}")


@pytest.fixture
def overlay(tmp_path: Path):
    def load(text: str) -> Rulebook:
        file = tmp_path / "mine.toml"
        file.write_text(text, encoding="utf-8")
        return load_rulebook([file])

    return load


def test_every_number_has_a_unit_and_a_source() -> None:
    found = list(numbers(load_rulebook()))
    assert len(found) > 250
    for path, number in found:
        assert number.unit in UNITS, path
        assert len(number.source) > 5, path


def test_gates_stand_in_the_order_of_the_flow() -> None:
    gates = load_rulebook().gates
    assert {name: (g.code, g.comparison) for name, g in gates.items()} == GATES
    assert list(gates) == list(GATES)
    assert [g.order for g in gates.values()] == sorted(g.order for g in gates.values())


def test_limits_of_the_chapter() -> None:
    rules = load_rulebook()
    assert rules.gate("FA201").number("smem_fraction").value == 0.6
    assert rules.gate("fa301").number("finish_share").value == 0.01
    assert rules.gate("traffic-saving").number("ratio").value == 1.5
    assert rules.gate("register-spill").number("max_warps").count == 32
    assert rules.search.exact_nodes.count == 20
    assert rules.route.inductor_max_ops.count == 3


def test_schedules_are_consistent() -> None:
    row = load_rulebook().schedules.row
    for count in (row.tile_bytes, load_rulebook().schedules.flat.block):
        assert count.count & (count.count - 1) == 0


def test_each_gate_and_pattern_is_documented() -> None:
    rules = load_rulebook()
    for gate in rules.gates.values():
        assert gate.question.endswith("?")
        assert 2 <= gate.why.count(". ") + 1 <= 5, gate.name
        assert "\n" not in gate.why
    for pattern in rules.patterns.values():
        assert "no-schedule" in pattern.gates
    with_line = {name for name, p in rules.patterns.items() if p.framework}
    assert {"softmax", "rms-norm", "layer-norm", "gelu-tanh", "attention"} == with_line


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("a100", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("RTX 4090", "rtx4090"),
    ],
)
def test_device_names(spelled: str, name: str) -> None:
    assert load_rulebook().device(spelled).name == name


@pytest.mark.parametrize(
    ("look_up", "message"),
    [
        (
            lambda r: r.device("h20"),
            r"unknown device 'h20': did you mean h200.*\? known: a100-40gb,",
        ),
        (lambda r: r.device("zzz"), r"unknown device 'zzz': known: "),
        (lambda r: r.gate("FA102"), r"unknown gate 'fa102': did you mean fa101"),
        (lambda r: r.gate("on-chip").number("ratio"), r"unknown limit of gate on-chip 'ratio'"),
        (lambda r: r.pattern("gelu"), r"unknown pattern 'gelu': did you mean gelu-tanh"),
    ],
)
def test_an_unknown_name_is_one_line(look_up, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        look_up(load_rulebook())
    assert "\n" not in str(error.value)


def test_an_overlaid_number_replaces_the_shipped_one_whole(overlay) -> None:
    rules = overlay(
        '[gates.traffic-saving.limits]\nratio = { value = 2, unit = "x", source = "ours" }'
    )
    assert rules.gate("FA401").number("ratio") == Number(value=2, unit="x", source="ours")
    assert rules.gate("FA401").question == load_rulebook().gate("FA401").question
    assert rules.hash != load_rulebook().hash


def test_a_new_device_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    text = (RULES / "devices" / "h200.toml").read_text().replace("value = 4800", "value = 4900")
    text = text.replace('aliases = ["h200-sxm", "h200-141gb"]', "")
    (tmp_path / "devices" / "lab-card.toml").write_text(text)
    device = load_rulebook([tmp_path]).device("Lab Card")
    assert (device.name, device.datasheet_bandwidth) == ("lab-card", 4900e9)
    assert "lab-card" not in load_rulebook().devices


def test_later_overlays_win(tmp_path: Path) -> None:
    files = [tmp_path / "1.toml", tmp_path / "2.toml"]
    for seeds, file in enumerate(files, start=1):
        file.write_text(
            f'[verify]\nseeds = {{ value = {seeds}, unit = "seeds", source = "{file.name}" }}'
        )
    assert load_rulebook(files).verify.seeds.count == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", "mine.toml: expected TOML: "),
        (
            "[devices.h100.memory]\nbandwith = 3",
            "memory: unknown field 'bandwith'; expected size, ",
        ),
        ("[nonsense]\nx = 1", "mine.toml: rules: unknown field 'nonsense'; expected version, "),
        ("devices = 3", "mine.toml: devices: 3; expected a valid "),
        (
            "[times]\ncall = { value = -1, unit = 'us', source = 'x' }",
            "mine.toml: times.call.value: -1; expected greater than or equal to 0",
        ),
        (
            "[devices.h100.times]\ncall = { value = 1, unit = 'GB/s', source = 'x' }",
            "mine.toml: devices.h100.times.call: unit 'GB/s'; expected us",
        ),
        ("[devices]\nh100 = 3", "mine.toml: devices.h100: 3; expected a table with name, "),
        ('[devices.my]\ntitle = "x"', "mine.toml: devices.my: 'compute_capability' is missing"),
        (
            '[devices.h100.memory]\nbandwidth = { value = 3, unit = "KiB", source = "x" }',
            "mine.toml: devices.h100.memory.bandwidth: unit 'KiB'; expected GB/s or TB/s",
        ),
        (
            '[devices.h100.memory]\nbandwidth = { value = 3, unit = "GB/s" }',
            "mine.toml: devices.h100.memory.bandwidth: 'source' is missing; expected a value",
        ),
        (
            '[devices.h100.memory]\nbandwidth = { value = -3, unit = "GB/s", source = "x" }',
            "devices.h100.memory.bandwidth.value: -3; expected greater than or equal to 0",
        ),
        (
            '[schedules.row]\nmax_warps = { value = 2.5, unit = "warps", source = "x" }',
            "mine.toml: schedules.row.max_warps: 2.5 warps; expected a whole number of warps",
        ),
        (
            '[devices.h100.memory]\nbandwidth = { value = 0, unit = "GB/s", source = "x" }',
            "mine.toml: devices.h100.memory.bandwidth: 0 GB/s; expected more than 0",
        ),
        (
            '[devices.h100.peaks.tensor]\nfp16 = { value = 1, unit = "TFLOP/s", source = "x" }',
            "mine.toml: devices.h100.peaks.tensor.fp16: 'fp16'; expected a dtype: float64, ",
        ),
        (
            '[gates.on-chip]\ncomparison = "=="',
            "mine.toml: gates.on-chip.comparison: '=='; expected '<', '<=', '>' or '>='",
        ),
        ('[gates.on-chip]\ncode = "FA101"', "mine.toml: gates.on-chip.code: FA101 is taken by "),
        (
            '[patterns.softmax]\ngates = ["a"]',
            "mine.toml: patterns.softmax.gates: unknown gate 'a'",
        ),
        (
            '[devices.l4]\naliases = ["a100"]',
            "mine.toml: devices.l4.aliases: 'a100' is taken by a1",
        ),
        (
            '[tuning.knobs.flat_warps]\nnumbers = ["wraps"]',
            "mine.toml: tuning.knobs.flat_warps.numbers: unknown number 'wraps'; expected block, ",
        ),
    ],
)
def test_a_wrong_field_names_file_field_and_expectation(overlay, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        overlay(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_overlay_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: no such rules file or folder$"):
        load_rulebook([tmp_path / "none.toml"])


def test_a_folder_without_rules_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r": no rules; expected TOML files in it or in advice, "):
        load_rulebook([tmp_path])


KEYS = st.sampled_from(
    (
        *("devices", "h200", "aliases", "memory", "bandwidth", "value", "unit", "source"),
        *("gates", "on-chip", "order", "limits", "patterns", "softmax"),
        *("schedules", "row", "version", "name", "hash"),
    )
)
LEAVES = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.booleans(), st.just([]))
TREES = st.dictionaries(
    KEYS,
    st.recursive(LEAVES, lambda below: st.dictionaries(KEYS, below, max_size=3), max_leaves=6),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_whatever_an_overlay_says_is_taken_or_one_line(tree: Tree) -> None:
    message = "mine.toml: "
    try:
        rulefiles._build([*rulefiles._shipped_layers(), (Path("mine.toml"), tree)])
    except UsageError as error:
        message = str(error)
    assert "mine.toml: " in message
    assert "\n" not in message


def test_the_hash_is_of_the_rules_and_not_of_their_spelling(tmp_path: Path) -> None:
    copy = tmp_path / "rules"
    shutil.copytree(RULES, copy)
    for file in copy.rglob("*.toml"):
        file.write_text("# a comment\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_rulebook([copy]).hash == load_rulebook().hash


def test_examples_are_no_rules(tmp_path: Path) -> None:
    gate = next(iter(load_rulebook().gates.values()))
    overlay = tmp_path / "mine.toml"
    overlay.write_text(f'[gates.{gate.name}.holds]\nwhy = "another reason"\n')
    assert load_rulebook([overlay]).hash == load_rulebook().hash
    overlay.write_text(f'[gates.{gate.name}]\nquestion = "Another?"\n')
    assert load_rulebook([overlay]).hash != load_rulebook().hash


def test_loading_happens_once() -> None:
    assert load_rulebook() is load_rulebook()


def test_tuned_numbers_are_listed_by_their_path() -> None:
    tuned = dict(load_rulebook().tuned())
    assert tuned["verify.criterion.ulps"].value == 2
    assert tuned["verify.timeout"].base == 180
    assert tuned["search.exact_nodes"].count == 20
    assert tuned["schedules.flat.block"].unit == "elements"
    assert tuned["instructions.other.fast"].unit == "instructions"
