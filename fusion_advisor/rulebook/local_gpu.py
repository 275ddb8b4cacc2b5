"""What this machine can run, found out without importing torch or Triton."""

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
"""Those that `tests/torch_versions.py` runs the tests against, each with its Triton."""

LEAST_CAPABILITY = 80
"""Of the NVIDIA GPUs that kernels run on: bfloat16 and `cp.async` begin with sm_80."""


@cache
def gpu_names() -> tuple[str, ...]:
    """The GPUs here as their driver names them; it is asked once."""
    return _asked_driver("name")


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


@cache
def gpu_capabilities() -> tuple[int, ...]:
    """Of the GPUs here, as `gpu_names` has them: 90 for compute capability 9.0."""
    found = _asked_driver("compute_cap")
    return tuple(int(line.replace(".", "")) for line in found if line.replace(".", "").isdigit())


def _asked_driver(field: str) -> tuple[str, ...]:
    """What the driver's tool says of each GPU; nothing where there is no tool or no driver."""
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
    """Can kernels be checked and compiled here? Triton is for Linux, and is not imported to see."""
    try:
        return find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


def without_triton() -> str:
    """Why kernels cannot be checked where Triton is missing."""
    install = "pip install triton" if sys.platform == "linux" else "it is for Linux alone"
    return f"Triton is not installed ({install})"


def require_triton(what: str) -> None:
    """UsageError for what runs kernels, where Triton is missing."""
    if not has_triton():
        raise UsageError(f"{what}: runs kernels, and {without_triton()}")


def torch_fault(installed: str | None) -> str:
    """What is wrong with a version of torch, in one line; empty for those that are supported."""
    known = f"{', '.join(TORCH_VERSIONS[:-1])} and {TORCH_VERSIONS[-1]}"
    if installed is None:
        return f"torch is not installed; fusion-advisor works with torch {known}"
    if ".".join(installed.split(".")[:2]) in TORCH_VERSIONS:
        return ""
    return f"torch {installed}: fusion-advisor works with torch {known}"


def require_torch() -> str:
    """UsageError where torch is missing or older than those that are supported; what to tell of a
    newer one."""
    installed = version("torch")
    fault = torch_fault(installed)
    numbers = [int(n) for n in re.findall(r"\d+", installed or "")[:2]]
    if fault and numbers < [int(n) for n in TORCH_VERSIONS[-1].split(".")]:
        raise UsageError(fault)
    return fault


def ptxas() -> Path | None:
    """The assembler that Triton's wheel brings, for compiling without a GPU."""
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
    """This package and what it stands on, without importing it; None where it is not installed."""
    return {
        "name": "fusion-advisor",
        "version": version("fusion-advisor") or "unknown",
        "torch": (version("torch") or "").partition("+")[0] or None,  # whatever it is built for
        "triton": version("triton"),
    }
