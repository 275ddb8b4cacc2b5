"""The package of a model's kernels: its name, where it lies, its files, and which of them are
stale."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.codegen.header import edited, fingerprint, read_stamp, same_rules
from fusion_advisor.ir.kernel import LICENSE
from fusion_advisor.shipped.files import RUNTIME, SHIPPED, beside
from fusion_advisor.support.errors import UsageError

_BEGINS = '"""Kernels written by fusion-advisor.'
_SAYS = f'{_BEGINS} What they share is in fused_*.py."""'

ASKING = "or_eager.py"
"""File with functions that ask before they launch a kernel, and run the model's statements else."""

_TEST = f'''{LICENSE}
"""The kernels here against float64: on the GPU, else on Triton's interpreter."""

import subprocess
import sys
from pathlib import Path


def test_kernels():
    command = [sys.executable, Path(__file__).with_name("{RUNTIME}.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
'''


def package_name(model: Path) -> str:
    """The package that the kernels of a model's file are in."""
    return f"fused_{re.sub(r'[^0-9a-zA-Z_]', '_', model.stem)}"


@dataclass(frozen=True)
class Home:
    """Place of a model's kernels: their folder, and the package that it lies in, with the files
    that ran as modules of none; "" beside a model's file that is in no package."""

    folder: Path
    package: str = ""
    alone: frozenset[Path] = frozenset()

    def imported(self, file: Path) -> str:
        """How a file imports the package of kernels: by dots within the package that both lie in,
        which works wherever that is installed, else by its name."""
        name, outer = self.folder.name, self.folder.parent
        if not self.package:
            return f"import {name}"
        if file in self.alone or not file.is_relative_to(outer):
            return f"from {self.package} import {name}"
        return f"from {'.' * len(file.relative_to(outer).parts)} import {name}"


def home_of(model: Path, packages: Mapping[str, str], tree: Path) -> Home:
    """Where the kernels of a model's file lie: in the package that the files that ran are modules
    of, at its top, so that no import of them runs a part of it that is not there yet; beside the
    model's file where there is no such package in the tree, or more than one. `packages` has that
    of each file, with dots, "" for none."""
    name, tops = package_name(model), dict[Path, str]()
    for file, package in packages.items():
        first, *rest = package.split(".")
        top = Path(file).resolve().parents[len(rest)]
        users = tree in top.parents and "site-packages" not in top.parts
        if first not in ("", name) and top.name == first and users:
            tops[top] = first
    beside = model.parent / name
    if len(tops) != 1 or (beside.is_dir() and beside.parent not in tops):
        return Home(beside)
    (top, package), *_ = tops.items()
    alone = frozenset(Path(file).resolve() for file, of in packages.items() if not of)
    return Home(top / name, package, alone)


def written_for(model: Path, tree: Path) -> Path | None:
    """The folder of the kernels that an earlier patch wrote for a model's file: beside it, else in
    a package below it, else in one of the tree; None where there is none. Raises UsageError where
    several packages have one."""
    name = package_name(model)
    for start in dict.fromkeys((model.parent, tree)):
        for depth in range(_DEEPEST + 1):
            found = [f for f in sorted(start.glob("*/" * depth + name)) if _is_ours(f)]
            if len(found) > 1:
                places = ", ".join(str(folder.relative_to(start)) for folder in found)
                raise UsageError(f"{model}: several packages are called {name}: {places}")
            if found:
                return found[0]
    return None


_DEEPEST = 3
"""How many folders lie around a package of kernels at most: `python/src/vlm/fused_entry`."""


def asks(file: str) -> bool:
    """Whether a file is that of a package with the functions that ask."""
    return Path(file).name == ASKING and Path(file).parent.name.startswith("fused_")


def read_package(folder: Path) -> dict[Path, str]:
    """The files of an existing package; {} without the folder. Raises UsageError for a folder that
    this tool did not write."""
    if not folder.exists():
        return {}
    if not _is_ours(folder):
        raise UsageError(f"{folder}: is there and not a package of fusion-advisor's; rename it")
    return {file: _text(file) for file in sorted(folder.glob("*.py"))}


def _is_ours(folder: Path) -> bool:
    opening = folder / "__init__.py"
    return opening.is_file() and _text(opening).removeprefix(f"{LICENSE}\n").startswith(_BEGINS)


def kernels_of(files: Mapping[Path, str]) -> dict[str, str]:
    """The kernels among the files of a package, by their names."""
    return {
        file.stem: text
        for file, text in files.items()
        if file.name not in ("__init__.py", _test_name(file.parent), ASKING, *SHIPPED)
    }


def package_files(folder: Path, kernels: Mapping[str, str], asking: str = "") -> dict[Path, str]:
    """The files of a package: one for each kernel, by its name, the functions that ask before they
    launch one, what all share, what the package offers, and the test of the kernels."""
    names = sorted(kernels)
    functions = [each.name for each in ast.parse(asking).body if isinstance(each, ast.FunctionDef)]
    homes = {**{name: name for name in names}, **dict.fromkeys(functions, Path(ASKING).stem)}
    lines = [LICENSE, _SAYS, "", *(f"from .{home} import {name}" for name, home in homes.items())]
    listed = ", ".join(f'"{name}"' for name in homes)
    return {
        **({folder / ASKING: asking} if functions else {}),
        **{folder / f"{name}.py": kernels[name] for name in names},
        folder / "__init__.py": "\n".join([*lines, "", f"__all__ = [{listed}]", ""]),
        folder / _test_name(folder): _TEST,
        **_shared(folder, kernels),
    }


def stale(folder: Path) -> Iterator[tuple[Path, str]]:
    """Kernels of a package that differ from what a patch left, or whose sources do, with
    each reason; and what they share where it is gone."""
    standing = read_package(folder)
    for name, text in kernels_of(standing).items():
        stamp = read_stamp(text)
        if stamp is None:
            yield folder / f"{name}.py", "does not say what wrote it"
            continue
        reasons = ["it was edited since it was written"] if edited(text) else []
        reasons += [
            f"{place} changed since" if (folder.parent / place).is_file() else f"{place} is gone"
            for place, mark in stamp.sources
            if mark_of(folder.parent / place) != mark
        ]
        if reasons:
            yield folder / f"{name}.py", "; ".join(reasons)
    for path in _shared(folder, kernels_of(standing)):
        if path not in standing:
            yield path, "is gone, and kernels import it"


def older(folder: Path, tool: str, rules: str) -> Iterator[tuple[Path, str]]:
    """Kernels of a package that another version of this tool or other rules wrote, with that
    version; they are still valid. And what they share where it is not as this version writes it."""
    standing = read_package(folder)
    for name, text in kernels_of(standing).items():
        stamp = read_stamp(text)
        if stamp is None:
            continue
        by: list[str] = []
        if stamp.tool != tool:
            by.append(f"fusion-advisor {stamp.tool}, this is {tool}")
        if not same_rules(stamp, rules):
            by.append(f"rules {stamp.rules}, these are {rules[:12]}")
        if by:
            yield folder / f"{name}.py", f"written by {'; by '.join(by)}"
    for path, text in _shared(folder, kernels_of(standing)).items():
        if standing.get(path, text) != text:
            yield path, "is not as this version of fusion-advisor writes it"


def _shared(folder: Path, kernels: Mapping[str, str]) -> dict[Path, str]:
    """Files that the kernels of a package share, as this version writes them."""
    return {folder / name: text for name, text in beside(kernels.values()).items()}


def mark_of(file: Path) -> str:
    """Fingerprint of a file; "" where it cannot be read."""
    try:
        return fingerprint(file.read_bytes())
    except OSError:
        return ""


def place_of(file: Path, folder: Path) -> str:
    """A source file as the kernels of a package name it: from the folder that the package is in."""
    return Path(os.path.relpath(file, folder.parent)).as_posix()


def _test_name(folder: Path) -> str:
    return f"test_{folder.name}.py"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read as UTF-8") from error
