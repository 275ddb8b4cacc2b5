"""Files that stand beside emitted kernels: their names, their texts, the functions in them.

Each is a module of this package, copied word for word: it needs torch and Triton alone, and is read
here without being imported.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from fusion_advisor.support.files import write

RUNTIME, DEVICE, INTERPRETER = "fused_runtime", "fused_device", "fused_interpreter"
"""Modules: host code of every kernel, device functions, repairs of Triton's interpreter."""
SHIPPED = tuple(f"{module}.py" for module in (RUNTIME, DEVICE, INTERPRETER))
HOST = "host"
"""Name of the runtime in a kernel's file."""
IMPORT = f"from . import {RUNTIME} as {HOST}"
"""Line of a kernel's file that tells it from one of an earlier version, which stood alone."""


@cache
def texts() -> dict[str, str]:
    """Text of each shipped file, by its name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_text(encoding="utf-8") for name in SHIPPED}


@cache
def functions(module: str) -> frozenset[str]:
    """Functions that a shipped module defines."""
    tree = ast.parse(texts()[f"{module}.py"])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@cache
def version() -> int:
    """Version of the runtime: the latest that a kernel's file may ask for."""
    found = re.search(r"^VERSION = (\d+)$", texts()[f"{RUNTIME}.py"], re.MULTILINE)
    assert found is not None  # a unit test holds it
    return int(found[1])


def needed(text: str) -> int:
    """Version of the runtime that a kernel's file asks for: the least that has all it calls."""
    return max([1, *(since for name, since in _SINCE.items() if f"{HOST}.{name}(" in text)])


_SINCE = {"registered": 2, "trained": 3}
"""Functions of the runtime that its first version lacks, by the version that brought them."""


def write_beside(folder: Path) -> None:
    """Write the shipped files into a folder of kernels, where they do not lie there already."""
    for name, text in texts().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write(path, text)


def write_kernel(file: Path, text: str) -> None:
    """Write a kernel's file, and the shipped files beside it."""
    write(file, text)
    write_beside(file.parent)
