"""Modules that nobody has seen, through `analyze`, `verify` and `patch`: nothing wrong gets out.

    python -m benchmarks.drawn [--seed HEX] [--first 0] [--count 120] [--jobs 2] [--keep DIR]

`draw.py` composes the modules from a seed, which is the first eight digits of the commit: no
code can have been fitted to them. Each module lies in a git repository of its own, is analysed with
its kernels checked and compiled, and patched; the patched module then runs beside the original on
Triton's interpreter, as drawn and with every size changed, one after the other. A failure is

- a command that ends with a fault, a hang, or a region that was not analysed for a fault of ours;
- a kernel that its check or the compiler refuses: it was emitted wrong;
- a patched module that differs from the original, at any size at which the original runs.

Every seed leaves one line in results/drawn.jsonl, failures included; the exit code is 1 where there
are any. Sizes at which the original itself does not run say nothing and are counted apart.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..gpu import ROOT, commit

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "drawn.jsonl"
LIMIT_S = 600
"""Wall time of one command: a hang."""

AS_DRAWN = "as drawn"

Row = dict[str, Any]
"""What is seen of one module, or of a seed, in JSON's terms."""
Call = Callable[..., tuple[Any, ...]]


# --- one module ----------------------------------------------------------------------------------


def seen(file: Path) -> Row:
    """What the commands make of one module in its repository."""
    row: Row = {"module": file.parent.name, "failures": []}
    began = time.monotonic()
    repository(file)
    analyzed = _run(["analyze", file.name, "--device", "h200", "--json", "report.json"], file)
    row["failures"] += analyzed
    if not analyzed:
        row |= _read(json.loads((file.parent / "report.json").read_text()), row["failures"])
    # its kernels are those that `analyze` has compiled
    row["failures"] += patch(file, "--no-compile")
    edited = file.parent / "x.patch"
    row["patched"] = edited.is_file() and edited.stat().st_size > 0
    if row["patched"]:
        row |= _beside(file, row["failures"])
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def patch(file: Path, *options: str) -> list[str]:
    """Write x.patch beside a module's file; why that failed, as `_run` says it."""
    return _run(["patch", file.name, "--device", "h200", "--out", "x.patch", *options], file)


def repository(file: Path) -> None:
    """Make a module's folder a repository, as drawn."""
    who = ("-c", "user.name=drawn", "-c", "user.email=drawn@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "As drawn")):
        subprocess.run(["git", *command], cwd=file.parent, check=True, capture_output=True)


def _run(command: list[str], file: Path) -> list[str]:
    """Why a command of the tool failed, as a list of one line; empty where it did not. It may end
    with 1: there is nothing to patch."""
    tool = [sys.executable, "-m", "fusion_advisor", *command]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            tool, cwd=file.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return [f"{command[0]}: no answer within {LIMIT_S} s"]
    if done.returncode in (0, 1):
        return []
    said = done.stderr.strip().splitlines() or ["nothing said"]
    return [f"{command[0]}: exit {done.returncode}: {said[-1]}"]


def _read(report: Row, failures: list[str]) -> Row:
    """What a report says of its groups; faults and kernels that were refused are failures."""
    for fault in report.get("faults") or []:
        failures.append(f"analyze: a fault of ours: {fault}")
    checked = 0
    for group in report["groups"]:
        kernel = group["kernel"]
        check = kernel.get("check")
        if check and not check["passed"]:
            failures.append(f"verify: {group['id']} {group['pattern']}: {check['failure']}")
        elif kernel.get("failure"):
            failures.append(f"compile: {group['id']} {group['pattern']}: {kernel['failure']}")
        checked += bool(check and check["passed"])
    return {"accepted": len(report["groups"]), "checked": checked}


def _beside(file: Path, failures: list[str]) -> Row:
    """The patched module beside the original, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.drawn", "--beside", str(file.parent)]
    try:
        done = subprocess.run(
            command,
            cwd=file.parent,
            env={
                **os.environ,
                "TRITON_INTERPRET": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        failures.append(f"patched: no answer within {LIMIT_S} s")
        return {}
    if done.returncode:
        failures.append(f"patched: {(done.stderr.strip().splitlines() or ['ended'])[-1]}")
        return {}
    told: Row = json.loads(done.stdout.splitlines()[-1])
    failures += told.pop("failures")
    return told


# --- the patched module beside the original, in a child process -----------------------------------


def beside(home: Path) -> Row:
    """Sizes at which both ran, and where the patched module differs from the original."""
    from fusion_advisor.verify.check_child import prepare

    prepare("interpreter")
    os.environ["FUSION_ADVISOR_STRICT"] = "0"  # a launcher may refuse a size, and say so
    original = loaded(home / "model.py", "original")
    subprocess.run(["git", "apply", "x.patch"], cwd=home, check=True, capture_output=True)
    edited = loaded(home / "model.py", "edited")
    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model, fused = original.Model().eval(), edited.Model().eval()
    fused.load_state_dict(model.state_dict())
    return held(called(model), called(fused), original.get_inputs(), "patched")


def held(call: Call, ours: Call, drawn: list[Any], what: str, seconds: float = math.inf) -> Row:
    """Sizes at which a module ran, and where `ours`, which is `what` became of it, differs; `late`
    where some sizes were left after so many seconds."""
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.verify.driver import criterion_of
    from fusion_advisor.verify.references import truth
    from fusion_advisor.verify.tolerance import compare

    criterion = criterion_of(load_rulebook().verify)
    ran, unfit, late, failures = 0, 0, False, []
    until = time.monotonic() + seconds
    for said, inputs in _sizes(drawn):
        if late := time.monotonic() > until:
            break
        try:
            known = truth(call, inputs)
        except Exception as error:  # noqa: BLE001 the original, at sizes that it need not know
            unfit += 1
            if said == AS_DRAWN:
                failures.append(f"the original, as drawn: {type(error).__name__}: {error}")
            continue
        further = (truth(call, _drawn_again(inputs, seed)) for seed in range(1, 1000))
        try:
            compare(ours(*inputs), known, criterion, 1 << 20, further)
            ran += 1
        except Exception as error:  # noqa: BLE001 whatever it is: reported as a failure
            why = " ".join(str(error).split())[:240]
            failures.append(f"{what}: {said}: {type(error).__name__}: {why}")
    return {"sizes": ran, "unfit": unfit, "late": late, "failures": failures}


def called(model: Any) -> Call:
    """A model whose results are a tuple; float64 inputs meet float64 weights."""
    import copy

    import torch

    wide = copy.deepcopy(model).double()

    def call(*inputs: Any) -> tuple[Any, ...]:
        return as_tuple((wide if any(x.dtype == torch.float64 for x in inputs) else model)(*inputs))

    return call


def as_tuple(found: Any) -> tuple[Any, ...]:
    """Results of a model, of which one may stand alone."""
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def loaded(path: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


def drawn_module(seed: str, number: int, *, small: bool = False) -> tuple[str, ModuleType]:
    """The name of a module, at its full sizes or at small ones, and what its file defines."""
    name, text = loaded(HERE / "draw.py", "draw").drawn(seed, number, small)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.py").write_text(text)
        return name, loaded(Path(folder) / "model.py", f"model_{number}")


def _sizes(inputs: list[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The inputs as drawn; then with each size that occurs in them changed wherever it occurs, and
    with each dimension of each input changed alone."""
    yield AS_DRAWN, tuple(inputs)
    found = sorted({size for each in inputs for size in each.shape if size > 1})
    for size in found:
        for other in (1, size + 1, 2 * size):
            changed = [_sized(each, dict.fromkeys(_dims(each, size), other)) for each in inputs]
            yield f"{other} for {size}", tuple(changed)
    for number, each in enumerate(inputs):
        for dim, size in enumerate(each.shape):
            for other in {1, size + 1} - {size}:
                changed = [*inputs]
                changed[number] = _sized(each, {dim: other})
                yield f"{other} for {size} in dimension {dim} of input {number}", tuple(changed)


def _dims(tensor: Any, size: int) -> list[int]:
    return [d for d, have in enumerate(tensor.shape) if have == size]


def _sized(tensor: Any, sizes: dict[int, int]) -> Any:
    """The tensor with other sizes: its own elements, again from the start; its order of strides is
    kept."""
    import torch

    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    laid = tensor.permute(order)
    for dim, size in sizes.items():
        place = order.index(dim)
        laid = laid.index_select(place, torch.arange(size) % tensor.shape[dim])
    back = [order.index(d) for d in range(tensor.dim())]
    return laid.contiguous().permute(back)


def _drawn_again(inputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Other numbers like those: each tensor's own, in another order."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    again: list[Any] = []
    for each in inputs:
        made = torch.empty_like(each)
        order = torch.randperm(each.numel(), generator=generator)
        again.append(made.copy_(each.flatten()[order].reshape(each.shape)))
    return tuple(again)


def written(seed: str, modules: range, folder: Path) -> list[Path]:
    """Files of small modules of a seed, by their numbers, each in a folder of its own."""
    draw, files = loaded(HERE / "draw.py", "draw"), list[Path]()
    for number in modules:
        name, text = draw.drawn(seed, number, True)
        files.append(folder / name / "model.py")
        files[-1].parent.mkdir(parents=True)
        files[-1].write_text(text)
    return files


# --- a seed --------------------------------------------------------------------------------------


def drawn(seed: str, modules: range, jobs: int, folder: Path) -> Row:
    """What came of some modules of a seed, by their numbers."""
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(partial(told, seen), written(seed, modules, folder)))
    failures = [f"{row['module']}: {line}" for row in rows for line in row["failures"]]
    summed = ("accepted", "checked", "patched", "sizes", "unfit")
    packages = ("torch", "triton")
    return {
        "seed": seed,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "modules": len(modules) if modules.start == 0 else f"{modules.start} to {modules.stop - 1}",
        **{name: sum(row.get(name, 0) for row in rows) for name in summed},
        "failures": failures,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def logged(row: Row, log: Path) -> None:
    """Add what came of a seed to a log, and print it."""
    with log.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


def told(call: Callable[[Path], Row], file: Path) -> Row:
    """A row, printed as soon as it is there."""
    row = call(file)
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Draw, look, log; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--first", type=int, default=0, help="the number of the first module")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder for the modules, else a temporary one")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beside:
        print(json.dumps(beside(options.beside)))
        return 0
    began, seed = time.monotonic(), options.seed or commit()
    if not seed:
        parser.error("--seed is missing: this is no checkout whose commit could be the seed")
    with tempfile.TemporaryDirectory() as folder:
        modules = range(options.first, options.first + options.count)
        row = drawn(seed, modules, options.jobs, options.keep or Path(folder))
    row["minutes"] = round((time.monotonic() - began) / 60, 1)
    logged(row, RESULTS)
    return 1 if row["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
