"""The time model: what makes a launch slower or faster, and what its figures say of themselves."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from fusion_advisor import perfmodel
from fusion_advisor.perfmodel.model import (
    Work,
    between_us,
    call_us,
    kept,
    launch_us,
    memory_us,
    speedup_interval,
)
from fusion_advisor.rulebook.load import load_rulebook

RULES = load_rulebook()
H200 = RULES.device("h200")
MEBI = 1 << 20
STREAM = Work("stream", 256 * MEBI, 256 * MEBI, elements=64 * MEBI)
ROW = Work("kernel", 256 * MEBI, 256 * MEBI, programs=65536, warps=4, at_once=2112)


def test_a_large_stream_runs_near_the_copy_bandwidth() -> None:
    assert launch_us(STREAM, H200) == pytest.approx(STREAM.bytes / H200.bandwidth * 1e6, rel=0.1)


def test_a_short_kernel_takes_its_launch() -> None:
    short = replace(STREAM, bytes_read=4096, bytes_written=4096, elements=1024)
    assert launch_us(short, H200) == pytest.approx(
        H200.times.launch.value + H200.times.latency.value, rel=0.1
    )


@pytest.mark.parametrize(
    "slower",
    [
        replace(ROW, bytes_read=512 * MEBI),
        replace(ROW, torn=256 * MEBI),
        replace(ROW, halved=256.0 * MEBI),
        replace(ROW, scattered=1 << 28),
        replace(ROW, elements=1 << 40, kind="stream"),
        replace(ROW, primitives=1e9),
        replace(ROW, steps=1e9),
        replace(ROW, requests=1e9),
        replace(ROW, arithmetic_us=10_000.0),
        replace(ROW, programs=16, at_once=1),
        replace(ROW, programs=1 << 24),
        replace(ROW, depth=1000),
        replace(ROW, chained=1e6),
        replace(ROW, launches=2),
    ],
    ids=[
        "bytes",
        "torn sectors",
        "parts of lines",
        "sectors apart",
        "elements that eager walks",
        "instructions",
        "steps of reductions",
        "loads and stores",
        "products",
        "waves",
        "many programs",
        "waits for loads",
        "combinations of a scan",
        "several launches",
    ],
)
def test_what_makes_a_kernel_slower(slower: Work) -> None:
    assert launch_us(slower, H200) > launch_us(ROW, H200)


def test_what_lies_in_the_l2_is_read_faster() -> None:
    small = replace(STREAM, bytes_read=8 * MEBI, bytes_written=8 * MEBI, elements=4 * MEBI)
    assert launch_us(replace(small, resident=8 * MEBI), H200) < launch_us(small, H200)


def test_the_l2_keeps_what_is_smaller_than_its_share_of_it_and_nothing_much_larger() -> None:
    room = int(H200.times.l2_kept.value * H200.memory.l2.base)
    assert kept(MEBI, MEBI, H200) == MEBI
    assert 0 < kept(MEBI, room * 3 // 2, H200) < MEBI
    assert kept(room, 2 * room, H200) == 0


def test_a_call_is_its_start_and_its_launches() -> None:
    times = H200.times
    both = call_us([STREAM, STREAM], H200)
    assert both == pytest.approx(times.call.value + 2 * launch_us(STREAM, H200))


def test_an_interval_holds_its_speed_up() -> None:
    fused_us = call_us([STREAM], H200) / 2
    low, high = speedup_interval([STREAM], fused_us, H200)
    assert low < 2 < high
    assert low * high == pytest.approx(4.0)
    sums = replace(STREAM, kind="scan")
    lowest, highest = speedup_interval([STREAM, sums], fused_us, H200)
    assert highest / lowest > high / low


def test_nothing_is_faster_than_the_datasheet() -> None:
    assert H200.times.fastest <= H200.datasheet_bandwidth / H200.bandwidth + 1e-9


def test_a_kind_that_nobody_named_has_the_figures_of_others() -> None:
    times = H200.times
    assert times.speed("row") is times.kinds["row"]
    assert times.speed("no-such-kind") is times.kinds["other"]


def test_the_time_model_is_small() -> None:
    """More figures were more of the list that they were fitted to: 780 predicted drawn modules no
    better than these."""
    times = H200.times.model_dump()

    def numbers(table: object) -> int:
        if not isinstance(table, dict):
            return 0
        mine = cast("dict[str, object]", table)
        return 1 if "value" in mine else sum(map(numbers, mine.values()))

    assert 50 < numbers(times) <= 120
    modules = [ast.parse(file.read_text()) for file in Path(perfmodel.__file__).parent.glob("*.py")]
    spelled = [ast.unparse(each) for module in modules for each in without_docstrings(module).body]
    assert 300 < sum(len(text.splitlines()) for text in spelled) <= 500


def without_docstrings(module: ast.Module) -> ast.Module:
    """Statements that are run, so that words cost nothing."""

    class Silent(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
            return None if isinstance(node.value, ast.Constant) else node

    return Silent().visit(module)


@pytest.mark.parametrize("device", RULES.devices.values(), ids=lambda device: device.name)
def test_every_device_says_whose_kernels_its_times_follow(device: object) -> None:
    times = getattr(device, "times")  # noqa: B009
    assert times.fitted_on == "h200"
    assert "benchmarks/predictions" in times.call.source


def test_times_of_a_device_of_its_own_are_laid_over_the_shared_ones(tmp_path: object) -> None:
    from pathlib import Path

    overlay = Path(str(tmp_path)) / "own.toml"
    overlay.write_text(
        '[devices.l4.times]\nfitted_on = "l4"\n'
        'call = { value = 9, unit = "us", source = "a measurement of my own" }\n'
    )
    rules = load_rulebook([overlay])
    assert rules.device("l4").times.fitted_on == "l4"
    assert rules.device("l4").times.call.value == 9
    assert rules.device("l4").times.kinds == H200.times.kinds
    assert rules.device("h200").times == H200.times


def test_waves_wait_for_each_other_most_where_a_multiprocessor_holds_one_program() -> None:
    one = replace(ROW, programs=136, warps=32, at_once=H200.sm_count)
    assert between_us(replace(one, programs=H200.sm_count), H200) == 0.0
    assert between_us(one, H200) == between_us(replace(one, programs=264), H200)
    assert between_us(replace(one, at_once=H200.sm_count // 2), H200) < H200.times.wave.value
    two = replace(one, programs=2 * 136, at_once=2 * H200.sm_count)
    assert between_us(two, H200) == pytest.approx(between_us(one, H200) / 2)
    assert between_us(STREAM, H200) == 0.0  # of which nobody knows how many programs it has


def test_the_l2_takes_in_what_a_short_kernel_writes() -> None:
    reads = replace(STREAM, bytes_read=16 * MEBI, bytes_written=0, elements=4 * MEBI)
    writes = replace(reads, bytes_read=0, bytes_written=16 * MEBI)
    assert memory_us(writes, H200) < memory_us(reads, H200)
    # Beyond what the L2 holds the difference does not grow.
    more = [replace(w, bytes_read=64 * w.bytes_read, bytes_written=64 * w.bytes_written)
            for w in (reads, writes)]  # fmt: skip
    most = [replace(w, bytes_read=2 * w.bytes_read, bytes_written=2 * w.bytes_written)
            for w in more]  # fmt: skip
    apart = [memory_us(read, H200) - memory_us(write, H200) for read, write in (more, most)]
    assert apart[1] == pytest.approx(apart[0], abs=0.01)
