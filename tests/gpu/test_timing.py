"""The clock on a GPU: what tries to look faster than it is gets found out."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import pytest
import torch

from fusion_advisor.measure.clocks import DeviceClock
from fusion_advisor.measure.driver import timing_rules
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.kernel_fault import KernelFault

pytestmark = pytest.mark.gpu
MEBI = 1 << 20
RULES = load_rulebook()
DEVICE = RULES.device("h200")


@pytest.fixture(scope="module")
def clock() -> DeviceClock:
    if not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name(0):
        pytest.skip("needs an H200: the bounds are those of its memory")
    return DeviceClock(timing_rules(RULES, DEVICE))


def test_a_large_copy_takes_what_the_memory_allows(clock: DeviceClock) -> None:
    source = torch.randn(256 * MEBI, device="cuda")
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    share = moved / (clock.time(lambda: target.copy_(source), moved).us * 1e-6) / DEVICE.bandwidth
    assert 0.9 < share < 1.1


def test_work_on_another_stream_is_no_time(clock: DeviceClock) -> None:
    source = torch.randn(64 * MEBI, device="cuda")
    target = torch.empty_like(source)
    side = torch.cuda.Stream()

    def call() -> None:
        with torch.cuda.stream(side):
            target.copy_(source)

    with pytest.raises(KernelFault, match="not timed"):
        clock.time(call, 2 * source.nbytes)


def test_what_fits_into_the_l2_is_read_from_memory(clock: DeviceClock) -> None:
    """Runs one after the other would find it there."""
    source = torch.randn(8 * MEBI, device="cuda")
    found = clock.time(source.sum, source.nbytes)
    assert found.us * 1e-6 > source.nbytes / DEVICE.datasheet_bandwidth


def test_a_call_that_reads_its_input_first_pays_for_that(clock: DeviceClock) -> None:
    source = torch.randn(8 * MEBI, device="cuda")
    plain = clock.time(source.sum, source.nbytes)

    def warmed() -> None:
        source.amax()
        source.sum()

    assert clock.time(warmed, source.nbytes).us > plain.us


def test_short_launches_are_not_timed_by_the_host(clock: DeviceClock) -> None:
    small = torch.randn(1024, device="cuda")

    def call() -> None:
        for _ in range(20):
            small.add_(1)

    found = clock.time(call, 0)
    assert found.host_ahead
    assert found.us / 20 < 5
