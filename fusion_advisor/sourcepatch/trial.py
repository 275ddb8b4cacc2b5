"""Stage: the trial of a patch before it is written.

`git apply` puts the patch on a copy of the tree, the model is captured from there with the kernels'
references in place of their launches, and its graph has to be the original's, in each scenario.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.kernel import Criterion
from fusion_advisor.ir.scenario import Moved, Scenario, Sizes
from fusion_advisor.measure.protocol import RunJob, RunResult
from fusion_advisor.support.errors import CaptureError, UsageError
from fusion_advisor.support.worker import Worker, WorkerError

Capture = Callable[[str, Scenario, Moved | None], Dataflow]
"""The dataflow of the model in a file, in a scenario. Raises CaptureError."""

_Sizes = tuple[tuple[int, int], ...]
_AS_ASKED = Sizes()
_DRAWS = (0, 64, 4096)
"""Further draws of eager alone where one draw has too few elements."""


@dataclass(frozen=True)
class Trial:
    """A scenario, what to call it, and what a patched model's graph there has wrong: empty where it
    is as it should be."""

    said: str
    scenario: Scenario
    wrong: Callable[[Dataflow], str]


@dataclass(frozen=True)
class Runs:
    """How a patched model is run beside the original: at which sizes of the first and the second
    dimension (0: as they are), the first ones that both serve, and there with its floats cast to
    other `dtypes`, too, for how many seconds in all. `too_large` says why it is not; `package` is
    the folder that a diff puts its kernels in, as the tree has it, and empty where there are no
    kernels."""

    sizes: tuple[_Sizes, ...]
    scenario: Scenario
    package: str
    seeds: int
    seconds: float
    criterion: Criterion
    dtypes: tuple[str, ...] = ()
    too_large: str = ""
    others: tuple[tuple[str, Sizes], ...] = ()
    """Other sizes of the inputs and of what the model is built with, in words, too."""
    summed: int = 0
    """Elements of the largest sum in a kernel."""
    taken: bool = True
    """Whether the model takes any of the other sizes, those of rows alone included."""
    gradients: bool = False
    """Whether each run is made again with a backward pass behind it, for as many seconds more."""

    def job(
        self,
        model: str,
        folder: str,
        sizes: _Sizes,
        moved: Moved | None = None,
        kernels: str = "",
        cast: str = "",
        at: Sizes = _AS_ASKED,
        further: int = 0,
        gradients: bool = False,
    ) -> RunJob:
        """For the original, or with a copy of the tree and where the kernels are in it for the
        model that was edited there."""
        return RunJob(
            model, folder, sizes, self.seeds, self.criterion, replace(self.scenario, sizes=at),
            moved, kernels, cast, self.summed, further, gradients,
        )  # fmt: skip


def run_trial(
    diff: str,
    touched: Iterable[Path],
    root: Path,
    model: str,
    trials: Sequence[Trial],
    capture: Capture,
    pool: ThreadPoolExecutor,
    runs: Runs | None = None,
) -> tuple[dict[str, str], str]:
    """Errors of the patched model by scenario, empty where it is right in all; and a description of
    the runs on numbers, or why there were none: empty where a scenario is wrong or no `runs` are
    asked for.

    Raises UsageError where there is no `git`.
    """
    with patched_copy(diff, touched, root) as copy:
        file, _, name = model.partition(":")
        place = str(copy / Path(file).resolve().relative_to(root))
        patched = f"{place}:{name}" if name else place
        moved = str(root), str(copy)
        wrong = _compared(patched, moved, trials, capture, pool)
        if wrong or runs is None:
            return wrong, ""
        return _run(runs, model, patched, moved, copy / runs.package)


def _run(
    runs: Runs, model: str, patched: str, moved: Moved, kernels: Path
) -> tuple[dict[str, str], str]:
    """The patched model beside the original on numbers, at the first sizes that both serve."""
    if runs.too_large:
        return {}, f"not run: {runs.too_large}"
    deadline = time.monotonic() + runs.seconds * (1 + runs.gradients)
    why = ""
    with (
        Worker("fusion_advisor.sourcepatch.trial_child") as original,
        Worker("fusion_advisor.sourcepatch.trial_child") as edited,
        tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder,
    ):

        def passed(sizes: _Sizes, cast: str, at: Sizes, gradients: bool) -> RunResult:
            """The patched model, or the original where that does not run; with further draws where
            one has too few elements. Raises WorkerError."""
            found = RunResult("")
            for further in _DRAWS:
                rest = cast, at, further, gradients
                jobs = (
                    (original, runs.job(model, folder, sizes, None, "", *rest)),
                    (edited, runs.job(patched, folder, sizes, moved, str(kernels), *rest)),
                )
                for worker, job in jobs:
                    left = max(deadline - time.monotonic(), 1.0)
                    found = worker.submit(job, RunResult, left).result()
                    if found.unfit or found.wrong:
                        break
                if not found.few:
                    break
            unfit, wrong = (s.replace(f"{moved[1]}/", "") for s in (found.unfit, found.wrong))
            return replace(found, unfit=unfit, wrong=wrong)

        def ran(sizes: _Sizes, cast: str = "", at: Sizes = _AS_ASKED) -> RunResult:
            """Both passes, if gradients are asked for; else the forward pass alone."""
            forward = passed(sizes, cast, at, False)
            if not runs.gradients or forward.unfit or forward.wrong:
                return forward
            both = passed(sizes, cast, at, True)
            unfit, wrong = (s and f"with gradients: {s}" for s in (both.unfit, both.wrong))
            launches = forward.launches + both.launches
            return replace(both, unfit=unfit, wrong=wrong, launches=launches)

        for sizes in runs.sizes:
            try:
                first = ran(sizes)
            except WorkerError as error:
                return {}, f"not run: {error}"
            at, why = _at(sizes), first.unfit
            if first.wrong:
                return {f"run at {at}": first.wrong}, ""
            if not why and runs.package and not first.launches:
                why = "none of its kernels is launched"
                if sizes == runs.sizes[-1]:  # as asked: that is what the kernels are for
                    return {f"run at {at}": why}, ""
                continue  # the statements that a guard keeps for other sizes
            if not why:
                wrong, also = _cast(runs, sizes, ran)
                elsewhere, at_others = _elsewhere(runs, sizes, ran)
                wrong, also = {**wrong, **elsewhere}, also + at_others
                by = f", {first.launches} launches of kernels on Triton's interpreter"
                launches = by if runs.package else ""
                passes = ", without and with a backward pass" if runs.gradients else ""
                said = f"run at {at} with {runs.seeds} seeds{passes}{launches}{also}"
                return wrong, "" if wrong else said
    return {}, f"not run: {why}"


def _cast(
    runs: Runs, sizes: _Sizes, ran: Callable[[_Sizes, str], RunResult]
) -> tuple[dict[str, str], str]:
    """Errors of the patched model where both models are cast to other dtypes; and the dtypes in
    which they ran, in words."""
    wrong: dict[str, str] = {}
    served: list[str] = []
    left = ""
    for dtype in runs.dtypes:
        try:
            found = ran(sizes, dtype)
        except WorkerError as error:
            found = RunResult("", unfit=str(error))
        if found.wrong:
            wrong[f"run in {dtype} at {_at(sizes)}"] = found.wrong
        elif found.unfit:
            left += f"; not in {dtype}: {found.unfit}"
        else:
            served.append(dtype)
    return wrong, (f"; in {' and '.join(served)}, too" if served else "") + left


def _elsewhere(
    runs: Runs, sizes: _Sizes, ran: Callable[[_Sizes, str, Sizes], RunResult]
) -> tuple[dict[str, str], str]:
    """Errors of the patched model where both models have other sizes, with as few rows as they were
    run with; and the number of these sizes at which they ran, in words."""
    wrong: dict[str, str] = {}
    served, left = 0, ""
    rows = ((sizes[-1][0], 0),)
    for said, at in runs.others:
        try:
            found = ran(rows, "", at)
        except WorkerError as error:
            left = f"; not {said} and what follows: {error}"
            break
        if found.wrong:
            wrong[f"run {said}"] = found.wrong
        elif found.unfit:
            left += f"; not {said}: {found.unfit}"
        else:
            served += 1
    if not runs.taken:
        left = "; at no other sizes, for it takes none of those that were tried"
    return wrong, (f"; at {served} other sizes" if served else "") + left


def _at(sizes: Sequence[tuple[int, int]]) -> str:
    """Lengths of the first dimensions in words."""
    said = (" x ".join(str(size) for size in each if size) for each in sizes)
    return " and ".join(each or "the sizes of its inputs" for each in said)


def run_trial_of_file(
    text: str,
    model: Path,
    trials: Sequence[Trial],
    capture: Capture,
    pool: ThreadPoolExecutor,
    runs: Runs | None = None,
) -> tuple[dict[str, str], str]:
    """As `run_trial`, of a file with a class `ModelNew` that stands alone: it is loaded from a
    folder of its own and gets the inputs of `model`."""
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as name:
        folder = Path(name).resolve()
        alone, problem = folder / "model_new.py", folder / "problem.py"
        alone.write_text(text, encoding="utf-8")
        problem.write_text(_PROBLEM.format(str(model)), encoding="utf-8")
        moved = str(folder), str(folder)
        wrong = _compared(str(problem), moved, trials, capture, pool)
        if wrong or runs is None:
            return wrong, ""
        return _run(runs, str(model), str(problem), moved, alone)


_PROBLEM = """
import importlib.util
import sys
from pathlib import Path


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(Path({0!r}).parent))
Model = load("model_new", Path(__file__).with_name("model_new.py")).ModelNew
original = load("fusion_advisor_original", {0!r})
get_inputs = original.get_inputs
get_init_inputs = getattr(original, "get_init_inputs", list)
"""
"""A class `ModelNew` is loaded as KernelBench loads it: from a file, and nowhere registered. What
the model's file imports from beside it, that file imports, too."""


def _compared(
    model: str,
    moved: Moved,
    trials: Sequence[Trial],
    capture: Capture,
    pool: ThreadPoolExecutor,
) -> dict[str, str]:
    """Errors of the model in a file of a copied folder, by scenario."""
    asked = [pool.submit(capture, model, trial.scenario, moved) for trial in trials]
    wrong: dict[str, str] = {}
    for trial, answer in zip(trials, asked, strict=True):
        try:
            found = trial.wrong(answer.result())
        except CaptureError as error:
            found = str(error)
        if found:
            wrong[trial.said] = found.replace(f"{moved[1]}/", "")
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
        elif entry.name in files or entry.suffix == ".py":  # a link would lead back to the tree
            shutil.copyfile(entry, target / entry.name)
        elif entry.name not in (".git", "__pycache__"):
            (target / entry.name).symlink_to(entry)
