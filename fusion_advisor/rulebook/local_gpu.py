"""GPUs and versions of this machine, found without importing torch or Triton."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import UsageError

DEFAULT_DEVICE = "h200"

TORCH_VERSIONS = ("2.11", "2.12", "2.13")
"""Supported versions: `tests/torch_versions.py` runs the tests against each, with its Triton."""

LEAST_CAPABILITY = 80
"""Least compute capability that kernels run on: bfloat16 and `cp.async` begin with sm_80."""


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs here, as their driver gives them; the driver is asked once."""
    return _asked_driver("name")


def choose_device(
    name: str | None, rulebook: Rulebook, gpus: tuple[str, ...] = ()
) -> tuple[Device, str]:
    """The device asked for, else that of the first of `gpus`, else the default; and how it was
    chosen. Callers whose result must be the same on every machine give no `gpus`."""
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


@cache
def gpu_capabilities() -> tuple[int, ...]:
    """Compute capabilities of the GPUs here, in the order of `gpu_names`: 90 for 9.0."""
    found = _asked_driver("compute_cap")
    return tuple(int(line.replace(".", "")) for line in found if line.replace(".", "").isdigit())


def _asked_driver(field: str) -> tuple[str, ...]:
    """One field of the driver's tool for each GPU; () without the tool or a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()  # a tool without a working driver: no GPU
    return tuple(line.strip() for line in found.stdout.splitlines() if line.strip())


def has_triton() -> bool:
    """Whether kernels can be checked and compiled here. Triton is for Linux, and is not
    imported to see."""
    try:
        return find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


def without_triton() -> str:
    """The reason that kernels cannot be checked, where Triton is missing."""
    install = "pip install triton" if sys.platform == "linux" else "it is for Linux alone"
    return f"Triton is not installed ({install})"


def require_triton(what: str) -> None:
    """Raise UsageError where Triton is missing; `what` needs it."""
    if not has_triton():
        raise UsageError(f"{what}: runs kernels, and {without_triton()}")


def torch_fault(installed: str | None) -> str:
    """The fault of a version of torch, in one line; "" for a supported one."""
    known = f"{', '.join(TORCH_VERSIONS[:-1])} and {TORCH_VERSIONS[-1]}"
    if installed is None:
        return f"torch is not installed; fusion-advisor works with torch {known}"
    if ".".join(installed.split(".")[:2]) in TORCH_VERSIONS:
        return ""
    return f"torch {installed}: fusion-advisor works with torch {known}"


def require_torch() -> str:
    """Raise UsageError where torch is missing or older than the supported versions; return a
    warning for a newer one."""
    installed = version("torch")
    fault = torch_fault(installed)
    numbers = [int(n) for n in re.findall(r"\d+", installed or "")[:2]]
    if fault and numbers < [int(n) for n in TORCH_VERSIONS[-1].split(".")]:
        raise UsageError(fault)
    return fault


def ptxas() -> Path | None:
    """The assembler of Triton's wheel, which compiles without a GPU; None without it."""
    spec = find_spec("triton") if has_triton() else None
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


def versions() -> dict[str, str | None]:
    """Versions of this package and its dependencies, found without importing them; None where one
    is not installed."""
    return {
        "name": "fusion-advisor",
        "version": version("fusion-advisor") or "unknown",
        "torch": (version("torch") or "").partition("+")[0] or None,  # whatever it is built for
        "triton": version("triton"),
    }
