"""Stage: measure the speed that the local GPU reaches, as rules with their provenance."""

from __future__ import annotations

import json
import time

from fusion_advisor.measure.driver import ceilings, timing_rules
from fusion_advisor.measure.protocol import Ceilings
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.worker import Worker, WorkerError


def calibrated(device: Device, rulebook: Rulebook) -> Ceilings:
    """Measure copy bandwidth, matrix products and a launch now. Raises UsageError when the GPU does
    not answer."""
    rules, timeout_s = timing_rules(rulebook, device), rulebook.measure.timeout.base
    with Worker("fusion_advisor.measure.child", "gpu") as worker:
        try:
            return ceilings(worker, rules, timeout_s)
        except WorkerError as error:
            raise UsageError(f"the GPU cannot be measured: {error}") from error


def overlay(device: Device, found: Ceilings) -> str:
    """Format the measured figures as TOML that overrides a device's rules."""
    machine = dict(found.machine)
    versions = f"{machine['gpu']}, torch {machine['torch']}, driver {machine.get('driver_version')}"
    source = f"fusion-advisor calibrate, {time.strftime('%Y-%m-%d', time.gmtime())}: {versions}"
    share = dict(found.matmul)["bfloat16"] / device.peak_flops("tensor", "bfloat16")
    products = ", ".join(f"{dtype} {rate / 1e12:.0f}" for dtype, rate in found.matmul)
    rows = (
        ("bandwidth", f"{found.copy / 1e9:.0f}", "GB/s", "a copy of 2 GiB, read and written"),
        ("matmul_share", f"{share:.3f}", "share", f"8192^3, TFLOP/s by dtype: {products}"),
        ("launch", f"{found.launch_us:.2f}", "us", "an addition of 32 elements, queued, cold L2"),
    )
    lines = [f"[devices.{device.name}.achieved]"]
    for name, value, unit, what in rows:
        source_text = json.dumps(f"{what}; {source}")
        lines.append(f'{name} = {{ value = {value}, unit = "{unit}", source = {source_text} }}')
    return "\n".join(lines) + "\n"
