"""Loader of an emitted file as a module of its own, with the runtime beside it, for the processes
that check, compile, time and call it."""

from __future__ import annotations

import ast
import atexit
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType

from fusion_advisor.shipped.files import DEVICE, write_whole
from fusion_advisor.support.kernel_fault import KernelFault, cause

_modules, _packages = count(), count()


def load_module(text: str, folder: Path, name: str = "") -> ModuleType:
    """Load an emitted file as a module of a package of kernels; jit functions need their source on
    disk. With `name`, such as `package.kernel`, the module has that name, after which its operators
    are called, and an import of the package still finds what it would find without; else the
    package is that of all kernels of the folder."""
    package, _, stem = name.rpartition(".")
    if not package:
        return _loaded(text, _nameless(folder), f"emitted_{next(_modules)}")
    with _passing(folder / package, package):
        return _loaded(text, package, stem)


def _loaded(text: str, package: str, stem: str) -> ModuleType:
    path = Path(sys.modules[package].__path__[0], f"{stem}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{package}.{stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise KernelFault(f"the file does not import: {cause(error)}") from error
    return module


@contextmanager
def _passing(folder: Path, name: str) -> Generator[None]:
    """Put a package in place of what is imported under its name, while the block runs."""
    before = {each: sys.modules.pop(each) for each in _imported(name)}
    try:
        _package(folder, name)
        yield
    finally:
        for each in _imported(name):
            del sys.modules[each]
        sys.modules.update(before)


def _imported(package: str) -> list[str]:
    return [each for each in sys.modules if each.partition(".")[0] == package]


@cache
def _nameless(folder: Path) -> str:
    """Package of the kernels of a folder that have no names."""
    return _package(folder, f"emitted_kernels_{next(_packages)}")


def _package(folder: Path, name: str) -> str:
    """Package in a folder, with the whole runtime in it: its kernels are yet to come; its name."""
    if name not in sys.modules:
        write_whole(folder)
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    return name


@cache
def process_folder() -> Path:
    """Folder for emitted files as long as this process lives: Triton reads a kernel's source."""
    folder = tempfile.mkdtemp(prefix="fusion-advisor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def kernels_alone(text: str) -> str:
    """Text of the file without the parts that need torch: its jit functions, and the imports that
    they use. Line numbers stay, so that a compiler's message points into the file."""
    lines = text.splitlines()
    kept = [""] * len(lines)
    for node in ast.parse(text).body:
        if _of_the_device(node):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            last = node.end_lineno or node.lineno
            kept[first - 1 : last] = lines[first - 1 : last]
    return "\n".join(kept) + "\n"


def _of_the_device(node: ast.stmt) -> bool:
    """Whether a statement defines a jit function, or imports what such a function uses."""
    match node:
        case ast.FunctionDef(decorator_list=decorators):
            return "triton.jit" in map(ast.unparse, decorators)
        case ast.ImportFrom(module=module, level=1):
            return module == DEVICE
        case ast.Import() | ast.ImportFrom():
            return "triton" in ast.unparse(node)
        case _:
            return False
