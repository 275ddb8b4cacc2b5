"""Loader of an emitted file as a module of its own, for the child processes that check and
compile it."""

from __future__ import annotations

import ast
import atexit
import importlib.util
import shutil
import sys
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType


class KernelFault(Exception):
    """Fault of a kernel in one line: what is wrong, and where."""


OUT_OF_MEMORY = "out of memory"
"""Text of `cause` for every way in which a device, its libraries or the host run out of memory."""


def cause(error: BaseException) -> str:
    """Innermost cause of an error in one line: the interpreter wraps exceptions by their repr."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or "no message"
    short = isinstance(error, MemoryError) or "out of memory" in text or "ALLOC_FAILED" in text
    return OUT_OF_MEMORY if short else f"{type(error).__name__}: {text[:300]}"


def spoiled(failure: str) -> bool:
    """Whether a failure leaves a process that should start anew: a CUDA context does not survive a
    bad address, and the data that filled the memory may still be held."""
    return any(sign in failure for sign in ("CUDA error", "illegal memory", OUT_OF_MEMORY))


_modules = count()


@cache
def lasting_folder() -> Path:
    """Folder for emitted files as long as this process lives: Triton reads a kernel's source."""
    folder = tempfile.mkdtemp(prefix="fusion-advisor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def load_module(text: str, folder: Path, name: str = "") -> ModuleType:
    """Load the emitted file as a module; jit functions need their source on disk. With `name` the
    module is registered as imported under that name."""
    known, name = bool(name), name or f"emitted_{next(_modules)}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise KernelFault(f"the file does not import: {cause(error)}") from error
    if known:
        sys.modules[name] = module
    return module


def kernels_alone(text: str) -> str:
    """Text of the file without the parts that need torch: its jit functions and the imports that
    they use. Line numbers stay, so that a compiler's message points into the file."""
    lines = text.splitlines()
    kept = [""] * len(lines)
    for node in ast.parse(text).body:
        jit = isinstance(node, ast.FunctionDef) and bool(node.decorator_list)
        if jit or (isinstance(node, ast.Import | ast.ImportFrom) and "triton" in ast.unparse(node)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            last = node.end_lineno or node.lineno
            kept[first - 1 : last] = lines[first - 1 : last]
    return "\n".join(kept) + "\n"
