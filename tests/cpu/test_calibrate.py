"""A calibration is rules with their provenance: laid over the shipped ones, a report states it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusion_advisor.cli.commands import measure
from fusion_advisor.measure import calibrate
from fusion_advisor.measure.calibrate import overlay
from fusion_advisor.measure.protocol import Ceilings
from fusion_advisor.rulebook import local_gpu as machine
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError

from . import spawned

RULES = load_rulebook()
FOUND = Ceilings(
    copy=2.34e11,
    matmul=(("bfloat16", 5e13), ("float16", 4e13), ("tf32", 2e13), ("float32", 1e13)),
    launch_us=3.21,
    host_launch_us=5.0,
    machine=(("torch", "2.11.0"), ("gpu", 'Some "GPU"'), ("driver_version", "580.1")),
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU measures as `FOUND` says."""
    monkeypatch.setattr(machine, "gpu_names", lambda: ("NVIDIA L4",))
    monkeypatch.setattr(calibrate, "calibrated", lambda device, rulebook: FOUND)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RULES.devices)
def test_every_device_takes_a_calibration_over(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(overlay(RULES.device(name), FOUND))
    calibrated = load_rulebook([file])
    device = calibrated.device(name)
    assert device.bandwidth == pytest.approx(234e9, rel=1e-3)
    assert device.launch_us == 3.21
    peak = device.peak_flops("tensor", "bfloat16")
    assert device.achieved.matmul_share.value * peak == pytest.approx(5e13, rel=1e-2)
    assert device.datasheet_bandwidth == RULES.device(name).datasheet_bandwidth
    for number in (device.achieved.copied, device.achieved.launch, device.achieved.matmul_share):
        assert "fusion-advisor calibrate, 20" in number.source
        assert 'Some "GPU", torch 2.11.0, driver 580.1' in number.source
    others = [other for other in RULES.devices if other != name]
    assert all(calibrated.device(other) == RULES.device(other) for other in others)


def test_a_report_states_the_calibration(here: None, tmp_path: Path) -> None:
    """From the command that measures to the report of another that analyses."""
    file = tmp_path / "mine.toml"
    measure.calibrate(out=file)
    (tmp_path / "model.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.softmax(x.sin() * 2, -1)\n\n\n"
        "def get_inputs():\n    return [torch.randn(4096, 4096)]\n"
    )
    words = ("analyze", "model.py", "--device", "l4", "--no-verify", "--no-compile", "--out")
    for more in (("plain",), ("measured", "--rules", file)):
        done = spawned.command(*words, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    plain, measured = (
        json.loads((tmp_path / out / "report.json").read_text()) for out in ("plain", "measured")
    )
    device = measured["device"]
    assert device["bandwidth"] == pytest.approx(234e9, rel=1e-3)
    for source in device["sources"].values():
        assert "fusion-advisor calibrate, 20" in source
        assert "torch 2.11.0" in source
    assert "calibrate" not in str(plain["device"]["sources"])
    slower = plain["device"]["bandwidth"] / device["bandwidth"]
    before, after = (r["groups"][0]["predicted"]["unfused_us"] for r in (plain, measured))
    assert after / before == pytest.approx(slower, rel=0.05)
    said = (tmp_path / "measured" / "report.md").read_text()
    assert "copy 234 GB/s (a copy of 2 GiB, read and written; fusion-advisor calibrate, 20" in said
    assert "a launch 3.21 µs" in said


def test_a_gpu_without_rules_calibrates_no_other(
    here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ("NVIDIA T1000",))
    with pytest.raises(UsageError, match="unknown device"):
        measure.calibrate(out=tmp_path / "mine.toml")
    assert not (tmp_path / "mine.toml").exists()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ())
    with pytest.raises(UsageError, match="there is none here"):
        measure.calibrate(out=tmp_path / "mine.toml")
