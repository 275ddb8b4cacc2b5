"""The first configuration: the models of a tree, read but not run, and the texts that make one of
them a MODEL."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fusion_advisor.support.errors import UsageError

_PASSED_OVER = frozenset(
    ["tests", "test", "build", "dist", "node_modules", "site-packages", "venv"]
)
ADAPTER = "fusion_model.py"
"""The file that makes a class a MODEL."""

_MOST_NAMED = 8
_INPUTS = frozenset({"get_inputs", "example_inputs"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class of modules in a file, whose path is seen from the tree's root. `parameters` are
    those of its `__init__` and `forward` as they are written; `complete` where the file says with
    which inputs it is called, so that no adapter is needed."""

    file: PurePosixPath
    name: str
    init: str
    forward: str
    complete: bool

    @property
    def model(self) -> str:
        """The class as MODEL names it."""
        return f"{self.file}:{self.name}"


def chosen(root: Path, given: str = "") -> Candidate:
    """The only model of a tree, or the one that `FILE.py[:CLASS]` names. Where several classes have
    a forward, a `Model` with inputs in its file is chosen. Raises UsageError with the candidates.
    """
    path, _, name = given.partition(":")
    file = (root / path).resolve() if path else None
    if file is not None and not file.is_file():
        raise UsageError(f"{path}: no such file")
    if file is not None and not file.is_relative_to(root):
        raise UsageError(f"{path}: is not below {root}; run init where its pyproject.toml is")
    found = [one for one in candidates(root, file) if name in ("", one.name)]
    ready = [one for one in found if one.complete and one.name == "Model"]
    if len(ready or found) != 1:
        names = ", ".join(one.model for one in (ready or found)[:_MOST_NAMED]) or "none"
        raise UsageError(f"which model? init takes FILE.py:CLASS; found {names}")
    return (ready or found)[0]


def candidates(root: Path, file: Path | None = None) -> list[Candidate]:
    """Classes below a folder, or in one file, with a `forward` and a base called `Module`. Hidden
    folders, tests and builds are left out."""
    files = [file] if file else _sources(root)
    return [found for path in files for found in _classes(path, root)]


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not any(part.startswith(".") or part in _PASSED_OVER for part in folders):
            yield path


def _classes(path: Path, root: Path) -> Iterator[Candidate]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return  # no Python of this version: nothing of it could be analysed
    complete = not _INPUTS.isdisjoint(_names(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(map(_is_module, node.bases)):
            methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
            if "forward" in methods:
                yield Candidate(
                    PurePosixPath(path.relative_to(root).as_posix()),
                    node.name,
                    _parameters(methods.get("__init__")),
                    _parameters(methods["forward"]),
                    complete,
                )


def _names(tree: ast.Module) -> set[str]:
    """The names that the top level of a module defines."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assigned = (t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets)
    return defined | {target.id for target in assigned if isinstance(target, ast.Name)}


def _is_module(base: ast.expr) -> bool:
    return (isinstance(base, ast.Name) and base.id == "Module") or (
        isinstance(base, ast.Attribute) and base.attr == "Module"
    )


def _parameters(method: ast.FunctionDef | None) -> str:
    """All parameters but the first, which is `self`."""
    if method is None:
        return ""
    given = method.args
    first = given.posonlyargs or given.args
    del first[:1]
    return ast.unparse(given)


def block(model: str) -> str:
    """The table for pyproject.toml."""
    return f"""\
[tool.fusion-advisor]
model = {json.dumps(model)}
# device = "h100"    # to judge for; the GPU of the machine if left out, else an H200
fail-on = ["fault"]    # a part that was not analysed; "accepted", "new" and others: see the docs

[tool.fusion-advisor.thresholds]
share = 0.001        # of the step: what saves less is no finding
"""


def adapter(candidate: Candidate) -> str:
    """A file that makes a class a MODEL, once its user has said with which arguments."""
    module = ".".join(candidate.file.with_suffix("").parts).removeprefix("src.")
    return f'''\
"""{candidate.name} of {candidate.file} as fusion-advisor analyses it: complete what raises.

No weights are loaded and nothing is computed: shapes and dtypes alone matter.
"""

from {module} import {candidate.name} as Model

__all__ = ["Model", "get_init_inputs", "get_inputs"]


def get_init_inputs():
    """The arguments that it is built with: a list, or a dict of keywords."""
    {_init(candidate)}


def get_inputs():
    """The arguments of one call: a list, or a dict of keywords."""
    # return [torch.randn(8, 1024)]
    raise NotImplementedError("return the inputs of forward({_quoted(candidate.forward)})")
'''


def _init(candidate: Candidate) -> str:
    if not candidate.init:
        return "return []"
    said = f"return the arguments of __init__({_quoted(candidate.init)})"
    return f'raise NotImplementedError("{said}")'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
