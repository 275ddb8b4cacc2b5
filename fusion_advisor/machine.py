"""What this machine can run, found out without importing torch or Triton."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from fusion_advisor.device import Device
from fusion_advisor.errors import UsageError
from fusion_advisor.rulebook import Rulebook

DEFAULT_DEVICE = "h200"


@cache
def gpu_names() -> tuple[str, ...]:
    """The GPUs here as their driver names them; it is asked once."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()  # a tool without a working driver: no GPU
    return tuple(line.strip() for line in found.stdout.splitlines() if line.strip())


def choose_device(
    name: str | None, rulebook: Rulebook, gpus: tuple[str, ...] = ()
) -> tuple[Device, str]:
    """The device asked for, else that of the first of `gpus`, else the default; and how it was
    chosen. What has to be the same on every machine gives no `gpus`."""
    if name is not None:
        return rulebook.device(name), f"device={rulebook.device(name).name}"
    default = rulebook.device(DEFAULT_DEVICE)
    if not gpus:
        return default, f"device={default.name} (the default)"
    try:
        local = rulebook.device(gpus[0])
    except UsageError:
        return default, f"device={default.name} (no rules for the {gpus[0]} here)"
    return local, f"device={local.name} (the GPU here)"


def ptxas() -> Path | None:
    """The assembler that Triton's wheel brings, for compiling without a GPU."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("backends/nvidia/bin/ptxas*"))
    return found[0] if found else None


def version(package: str) -> str | None:
    """The installed version of a package; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
