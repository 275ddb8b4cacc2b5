"""Runs the fast tests against each torch that is supported, each with the Triton that it brings.

    python tests/torch_versions.py                          # all of them
    python tests/torch_versions.py 2.11 -- tests/cpu        # one, and other tests

Each has an environment of its own in `build/torch`, kept between runs, with the Triton that torch's
CUDA build asks for. That build is some GB; `--cpu-index URL` names an index with those for the CPU.
Prints a line a version and exits with 1 where a test fails. CI runs the versions of
`constraints.txt`, with a newer Triton than any torch asks for.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from fusion_advisor.rulebook.local_gpu import TORCH_VERSIONS

ROOT = Path(__file__).resolve().parent.parent
TRITON = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1"}
"""What the CUDA builds ask for; those for the CPU ask for none."""
FAST = (
    "tests/pure", "tests/cpu/test_capture.py", "tests/cpu/test_capture_hf.py",
    "tests/cpu/test_golden_kernels.py", "tests/cpu/test_golden_report.py",
    "tests/cpu/test_verify.py", "tests/cpu/test_compile.py", "tests/cpu/test_launcher.py",
    "tests/cpu/test_record.py", "tests/cpu/test_backend.py", "tests/cpu/test_without_triton.py",
)  # fmt: skip
"""What touches torch's and Triton's own interfaces, and takes minutes."""


def environment(version: str, cpu_index: str | None) -> Path:
    """An environment's Python with this package, its tests' needs, and that torch."""
    folder = ROOT / "build" / "torch" / version
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, symlinks=True)
        pinned = (ROOT / "constraints.txt").read_text().splitlines()
        others = [line for line in pinned if not line.startswith(("torch=", "triton="))]
        (folder / "constraints.txt").write_text("\n".join(others) + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}.*"]
        subprocess.run([*install, *(["--index-url", cpu_index] if cpu_index else [])], check=True)
        beside = ["--constraint", str(folder / "constraints.txt"), "--editable", f"{ROOT}[hf,dev]"]
        subprocess.run([*install, f"triton=={TRITON[version]}", *beside], check=True)
        (folder / ".ready").touch()
    return python


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=list(TORCH_VERSIONS))
    parser.add_argument("--cpu-index", metavar="URL", help="where CPU builds of torch are")
    asked = parser.parse_args(words[:at])
    failed = False
    for version in asked.versions:
        python = environment(version, asked.cpu_index)
        said = (
            "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"
        )
        found = subprocess.run([python, "-c", said], capture_output=True, text=True, check=True)
        chosen = words[at + 1 :] or [*FAST, "-m", "not deep and not gpu"]
        done = subprocess.run([python, "-m", "pytest", "-q", *chosen], cwd=ROOT)
        failed = failed or done.returncode != 0
        print(f"{found.stdout.strip()}: {'FAILED' if done.returncode else 'passed'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
