"""Stage: a patch tried before it is written.

`git apply` puts it on a copy of the tree, the model is captured from there with the kernels'
references in place of their launches, and its graph has to be the original's, in each scenario.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.dataflow import Dataflow
from fusion_advisor.errors import CaptureError, UsageError
from fusion_advisor.scenario import Scenario

Capture = Callable[[str, Scenario], Dataflow]
"""The dataflow of the model in a file, in a scenario. Raises CaptureError."""


@dataclass(frozen=True)
class Trial:
    """A scenario, what to call it, and what a patched model's graph there has wrong: empty where it
    is as it should be."""

    said: str
    scenario: Scenario
    wrong: Callable[[Dataflow], str]


def tried(
    diff: str,
    touched: Iterable[Path],
    root: Path,
    model: str,
    trials: Sequence[Trial],
    capture: Capture,
    pool: ThreadPoolExecutor,
) -> dict[str, str]:
    """What went wrong in which scenario; empty where the patched model is right in all.

    Raises UsageError where there is no `git`.
    """
    with patched_copy(diff, touched, root) as copy:
        file, _, name = model.partition(":")
        place = str(copy / Path(file).resolve().relative_to(root))
        patched = f"{place}:{name}" if name else place
        return _compared(patched, copy, trials, capture, pool)


def tried_alone(
    text: str,
    model: Path,
    trials: Sequence[Trial],
    capture: Capture,
    pool: ThreadPoolExecutor,
) -> dict[str, str]:
    """As `tried`, of a file with a class `ModelNew` that stands alone: it is loaded from a folder
    of its own and gets the inputs of `model`."""
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as name:
        folder = Path(name).resolve()
        (folder / "model_new.py").write_text(text, encoding="utf-8")
        (folder / "problem.py").write_text(_PROBLEM.format(str(model)), encoding="utf-8")
        return _compared(str(folder / "problem.py"), folder, trials, capture, pool)


_PROBLEM = """
import importlib.util
import sys
from pathlib import Path


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Model = load("model_new", Path(__file__).with_name("model_new.py")).ModelNew
sys.path.append(str(Path({0!r}).parent))
original = load("fusion_advisor_original", {0!r})
get_inputs = original.get_inputs
get_init_inputs = getattr(original, "get_init_inputs", list)
"""
"""A class `ModelNew` is loaded as KernelBench loads it: from a file, and nowhere registered."""


def _compared(
    model: str,
    folder: Path,
    trials: Sequence[Trial],
    capture: Capture,
    pool: ThreadPoolExecutor,
) -> dict[str, str]:
    """What is wrong with the model in a file of `folder`, by scenario."""
    asked = [pool.submit(capture, model, trial.scenario) for trial in trials]
    wrong: dict[str, str] = {}
    for trial, answer in zip(trials, asked, strict=True):
        try:
            found = trial.wrong(answer.result())
        except CaptureError as error:
            found = str(error)
        if found:
            wrong[trial.said] = found.replace(f"{folder}/", "")
    return wrong


@contextmanager
def patched_copy(diff: str, touched: Iterable[Path], root: Path) -> Generator[Path, None, None]:
    """A copy of the tree with a diff applied: folders in which something changes are copied, all
    else is linked."""
    git = shutil.which("git")
    if git is None:
        raise UsageError("a patch is tried with git apply before it is written: install git")
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        copy = Path(folder).resolve()
        _mirror(root, copy, {path.relative_to(root) for path in touched})
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
        applied = subprocess.run(
            [git, "apply", "--whitespace=nowarn", "-"], input=diff.encode(), cwd=copy,
            capture_output=True, check=False, env=environment,
        )  # fmt: skip
        if applied.returncode:
            raise UsageError(f"git apply refused the patch: {applied.stderr.decode().strip()}")
        yield copy


def _mirror(source: Path, target: Path, touched: set[Path]) -> None:
    files: set[str] = set()
    nested: dict[str, set[Path]] = {}
    for path in touched:
        first, *rest = path.parts
        if rest:
            nested.setdefault(first, set()).add(Path(*rest))
        else:
            files.add(first)
    target.mkdir(exist_ok=True)
    for entry in source.iterdir() if source.is_dir() else ():
        if entry.name in nested and entry.is_dir():
            _mirror(entry, target / entry.name, nested[entry.name])
        elif entry.name in files:
            shutil.copyfile(entry, target / entry.name)
        elif entry.name not in (".git", "__pycache__"):
            (target / entry.name).symlink_to(entry)
