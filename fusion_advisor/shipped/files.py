"""Files that stand beside emitted kernels: their names, their texts, the functions in them.

Each is a module of this package, which needs torch and Triton alone and is read here without being
imported. A folder of kernels gets the parts of them that its kernels call.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import write

RUNTIME, DEVICE = "fused_runtime", "fused_device"
"""Modules: host code of every kernel, device functions."""
SHIPPED = tuple(f"{module}.py" for module in (RUNTIME, DEVICE))
HOST = "host"
"""Name of the runtime in a kernel's file."""
IMPORT = f"from . import {RUNTIME} as {HOST}"
"""Line by which a kernel's file is known."""


@cache
def texts() -> dict[str, str]:
    """Text of each shipped file, whole, by its name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_text(encoding="utf-8") for name in SHIPPED}


@cache
def functions(module: str) -> frozenset[str]:
    """Functions that a shipped module defines."""
    tree = ast.parse(texts()[f"{module}.py"])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def beside(kernels: Iterable[str]) -> dict[str, str]:
    """Text of each file that stands beside the kernels with these texts, by its name: what they
    ask of it and what that needs, and the runtime's command line.

    Raises UsageError for a kernel that asks for what this version has not.
    """
    asked: dict[str, set[str]] = {RUNTIME: set(), DEVICE: set()}
    for text in kernels:
        for module, names in _asked(text).items():
            asked[module] |= names
    if asked[RUNTIME]:
        asked[RUNTIME].add("main")
    return {f"{m}.py": _parts(m, frozenset(names)) for m, names in asked.items() if names}


@cache
def _asked(kernel: str) -> dict[str, frozenset[str]]:
    """Names that a file takes of each shipped module; none where it is no kernel's, or does not
    parse: nobody can import it then."""
    found: dict[str, set[str]] = {RUNTIME: set(), DEVICE: set()}
    try:
        tree = ast.parse(kernel if f"{IMPORT}\n" in kernel else "")
    except SyntaxError:
        tree = ast.parse("")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == HOST:
                found[RUNTIME].add(attribute)
            case ast.ImportFrom(module=str(module), names=names, level=1) if module in found:
                found[module] |= {each.name for each in names}
            case _:
                pass
    return {module: frozenset(names) for module, names in found.items()}


@cache
def _parts(module: str, asked: frozenset[str]) -> str:
    """Text of a shipped module without what these names do not need."""
    text = texts()[f"{module}.py"]
    if missing := sorted(asked.difference(*map(_bound, ast.parse(text).body))):
        raise UsageError(
            f"{module}.py has no {', '.join(missing)}, which a kernel of the folder calls that "
            "another version wrote: delete that kernel's file and have it written anew"
        )
    return shaken(text, asked)


def shaken(text: str, wanted: Collection[str]) -> str:
    """Text of a module without what the wanted names do not need.

    Statements that bind no name stay, with what they need. With a statement go the comments right
    above it and the string right below it; comments that stand apart are of the whole module.
    """
    body, lines = ast.parse(text).body, text.splitlines()
    bound = [_bound(node) for node in body]
    needed, reached = {*wanted}, set[int]()
    while more := {n for n in range(len(body)) if not bound[n] or bound[n] & needed} - reached:
        reached |= more
        needed = needed.union(*(_named(body[n]) for n in more))
    kept: list[str] = []
    stays = True
    for number, node in enumerate(body):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        stays = stays if is_text else number in reached
        if stays:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            while first and not lines[first - 1]:
                first -= 1
            kept += lines[first : node.end_lineno]
    return "\n".join(kept) + "\n"


def _named(node: ast.AST) -> set[str]:
    """Names that a statement reads or binds."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement of a module binds in it."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {name for target in targets for name in _named(target)}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(each.asname or each.name).partition(".")[0] for each in names}
        case _:
            return set()


def write_whole(folder: Path) -> None:
    """Write the whole shipped files into a folder of kernels that are not written yet."""
    for name, text in texts().items():
        write(folder / name, text)


def write_kernel(file: Path, text: str) -> None:
    """Write a kernel's file, and beside it what all kernels of its folder need."""
    write(file, text)
    every = [each.read_text("utf-8", errors="replace") for each in file.parent.glob("*.py")]
    for name, needed in beside(every).items():
        path = file.parent / name
        if not path.is_file() or path.read_text(encoding="utf-8") != needed:
            write(path, needed)
