"""The devices against arithmetic that does not come from the same tables."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError

NAMES = ("a100-40gb", "a100-80gb", "h100", "h200", "l4", "l40s", "rtx4090", "rtx5090", "b200")
DEVICES = load_rulebook().devices

GEFORCE = {"tf32": 256, "float16": 512, "bfloat16": 512, "float8": 1024, "int8": 2048}
"""FLOP a clock and multiprocessor, FP32 accumulate: half of what the same cores do elsewhere."""

TENSOR = {
    "8.0": {"float64": 128, "tf32": 1024, "float16": 2048, "bfloat16": 2048, "int8": 4096},
    "8.9": {"tf32": 512, "float16": 1024, "bfloat16": 1024, "float8": 2048, "int8": 2048},
    "9.0": {
        "float64": 256,
        "tf32": 2048,
        "float16": 4096,
        "bfloat16": 4096,
        "float8": 8192,
        "int8": 8192,
    },
    "10.0": {
        "float64": 128,
        "tf32": 4096,
        "float16": 8192,
        "bfloat16": 8192,
        "float8": 16384,
        "int8": 16384,
    },
}
CUDA = {
    "8.0": {"float64": 64, "float32": 128, "float16": 512, "bfloat16": 256, "int32": 64},
    "8.9": {"float64": 4, "float32": 256, "float16": 256, "bfloat16": 256, "int32": 64},
    "9.0": {"float64": 128, "float32": 256, "float16": 512, "bfloat16": 512, "int32": 64},
    "10.0": {"float64": 128, "float32": 256, "float16": 512, "bfloat16": 512, "int32": 64},
    "12.0": {"float64": 4, "float32": 256, "float16": 256, "bfloat16": 256, "int32": 128},
}
BANDWIDTH_ORDER = (
    "l4",
    "l40s",
    "rtx4090",
    "a100-40gb",
    "rtx5090",
    "a100-80gb",
    "h100",
    "h200",
    "b200",
)
BF16_ORDER = ("l4", "rtx4090", "rtx5090", "a100-80gb", "l40s", "h100", "b200")

each_device = pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)


def test_the_parts_are_these() -> None:
    assert sorted(DEVICES) == sorted(NAMES)


@each_device
def test_tensor_peaks_are_rate_times_clock_times_multiprocessors(device: Device) -> None:
    rates = GEFORCE if device.name.startswith("rtx") else TENSOR[device.compute_capability]
    assert device.peaks.tensor.keys() == rates.keys()
    for dtype, rate in rates.items():
        clock = device.clock.boost if dtype == "float64" else device.clock.tensor
        expected = rate * clock.base * device.sm_count
        assert device.peak_flops("tensor", dtype) == pytest.approx(expected, rel=0.02), dtype


@each_device
def test_cuda_core_peaks_are_rate_times_clock_times_multiprocessors(device: Device) -> None:
    rates = CUDA[device.compute_capability]
    assert device.peaks.cuda.keys() == rates.keys()
    for dtype, rate in rates.items():
        expected = rate * device.clock.boost.base * device.sm_count
        assert device.peak_flops("cuda", dtype) == pytest.approx(expected, rel=0.02), dtype


@each_device
def test_special_function_units_give_16_results_a_clock(device: Device) -> None:
    expected = 16 * device.clock.boost.base * device.sm_count
    assert device.special_rate == pytest.approx(expected, rel=0.001)


@each_device
def test_bandwidth_is_bus_width_times_data_rate(device: Device) -> None:
    memory = device.memory
    expected = memory.bus_width.base * memory.data_rate.base / 8
    assert memory.bandwidth.base == pytest.approx(expected, rel=0.03)


@each_device
def test_a_copy_stays_below_the_datasheet(device: Device) -> None:
    assert 0.8 * device.datasheet_bandwidth < device.bandwidth < device.datasheet_bandwidth


@each_device
def test_what_was_not_measured_on_the_part_says_so(device: Device) -> None:
    achieved = device.achieved
    if device.name == "h200":
        assert achieved.bandwidth is not None
        assert device.bandwidth == 4268e9
        return
    assert achieved.bandwidth_share is not None
    for number in (achieved.bandwidth_share, achieved.matmul_share, achieved.launch):
        assert number.source.startswith("assumed as on H200")


@each_device
def test_multiprocessor_is_consistent(device: Device) -> None:
    sm = device.multiprocessor
    assert sm.warps.count * device.warp_size == sm.threads.count
    assert sm.shared_memory.count - sm.shared_memory_per_block.count == 1024
    assert sm.threads_per_block.count <= sm.threads.count


@pytest.mark.parametrize(("less", "more"), list(pairwise(BANDWIDTH_ORDER)))
def test_bandwidth_order(less: str, more: str) -> None:
    assert DEVICES[less].datasheet_bandwidth < DEVICES[more].datasheet_bandwidth


@pytest.mark.parametrize(("less", "more"), list(pairwise(BF16_ORDER)))
def test_bf16_tensor_order(less: str, more: str) -> None:
    assert DEVICES[less].peak_flops("tensor", "bfloat16") < DEVICES[more].peak_flops(
        "tensor", "bfloat16"
    )


def test_hopper_parts_share_their_die() -> None:
    assert {k: n.value for k, n in DEVICES["h100"].peaks.tensor.items()} == {
        k: n.value for k, n in DEVICES["h200"].peaks.tensor.items()
    }


@each_device
def test_narrower_dtypes_are_not_slower_on_tensor_cores(device: Device) -> None:
    order = ("float32", "tf32", "float16", "float8", "int8")
    peaks = [device.peak_flops("tensor", dtype) for dtype in order]
    assert peaks == sorted(peaks)


def test_ridges_of_the_chapter() -> None:
    h200 = DEVICES["h200"]
    softmax, matmul = 5 / 8, 2 * 4096**3 / (3 * 4096**2 * 2)
    assert h200.ridge("tensor", "bfloat16") == pytest.approx(989.4e12 / 4.8e12)
    assert softmax < h200.ridge("cuda", "float32") < matmul
    assert matmul == pytest.approx(1365.33, rel=1e-5)
    assert h200.ridge("tensor", "bfloat16") < matmul


def test_shared_memory_budgets_of_the_chapter() -> None:
    assert DEVICES["h200"].smem_budget_bytes(0.6) == 139_468
    assert DEVICES["a100-80gb"].smem_budget_bytes(0.6) == int(0.6 * 164 * 1024)
    assert 32_768 * 4 < DEVICES["h200"].smem_budget_bytes(0.6) < 65_536 * 4
    assert DEVICES["a100-40gb"].smem_budget_bytes(0.6) < 4 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("device", "unit", "dtype", "as_unit", "as_dtype"),
    [
        ("h200", "tensor", "float32", "cuda", "float32"),
        ("l4", "tensor", "float64", "cuda", "float64"),
        ("a100", "tensor", "float8_e4m3fn", "tensor", "float16"),
        ("h200", "tensor", "float8_e5m2", "tensor", "float8"),
        ("h200", "tensor", "complex128", "tensor", "float64"),
        ("h200", "tensor", "int64", "cuda", "int32"),
        ("h200", "cuda", "float8_e4m3fn", "cuda", "float32"),
        ("h200", "cuda", "complex64", "cuda", "float32"),
        ("h200", "cuda", "bool", "cuda", "int32"),
        ("h200", "special", "bfloat16", "special", "float32"),
        ("h200", "special", "float64", "cuda", "float64"),
    ],
)
def test_a_missing_dtype_runs_elsewhere(
    device: str, unit: str, dtype: str, as_unit: str, as_dtype: str
) -> None:
    part = load_rulebook().device(device)
    assert part.peak(unit, dtype) == getattr(part.peaks, as_unit)[as_dtype]  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["tensor", "cuda", "special"])
def test_an_unknown_dtype_is_one_line(unit: str) -> None:
    with pytest.raises(UsageError, match=rf"^device h200 has no {unit} peak for dtype 'float4'$"):
        DEVICES["h200"].peak(unit, "float4")  # type: ignore[arg-type]
