"""Stage: search for the fastest configuration of a kernel on the local GPU.

All configurations are timed in turn, so that what changes with time changes all of them alike. The
quickest of them then stand alone beside the rules' own. One wins that is faster by more than their
rounds spread, and by more than medians differ from run to run, and that passes every check that a
kernel has to pass; else the rules' own stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fusion_advisor.codegen.tuned_numbers import Numbers, launched, tuning_path, tuning_text
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.ir.kernel import Check, Compiled, Kernel
from fusion_advisor.measure.config_space import configuration, neighbours
from fusion_advisor.measure.driver import measure_turns, timing_rules
from fusion_advisor.measure.protocol import Series, Turns
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.local_gpu import gpu_names
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import holds

Proven = tuple[Check | None, Compiled | None]
"""Result of `verify` for a kernel; None for a check or compile that was not asked for."""


@dataclass(frozen=True)
class Contender:
    """Kernel in one configuration, and that configuration in words."""

    configuration: str
    kernel: Kernel


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: the fastest kernel. `summary` is the result in words; `us` and `own_us`
    are its time and that of the rules' own. `numbers` are those of the launches of the rules' own
    kernel that make it the fastest one on `gpu`; none where they are already. `failure` says why
    the search has no result."""

    kernel: Kernel
    summary: str = ""
    configuration: str = ""
    us: float = 0.0
    own_us: float = 0.0
    gpu: str = ""
    numbers: Numbers = field(default_factory=dict[str, dict[str, int]])
    failure: str = ""


class Timer(Protocol):
    """Function that times kernels in turn, for so many rounds."""

    def __call__(self, kernels: Sequence[Kernel], rounds: int) -> Turns: ...


class Searcher(Protocol):
    """Function that finds the fastest numbers for a kernel's launches. `emitted` writes the
    kernel of another plan, or says why there is none; `proven` checks and compiles it."""

    def __call__(
        self,
        decision: Decision,
        kernel: Kernel,
        emitted: Callable[[Decision], Kernel | str],
        proven: Callable[[Kernel], Proven],
    ) -> SearchResult: ...


@contextmanager
def local_searcher(wanted: str | None, rulebook: Rulebook) -> Generator[Searcher]:
    """Start a searcher with a child process of its own on the local GPU. `wanted` is the device
    that kernels are judged for. Raises UsageError where there is no GPU, or another GPU than
    `wanted`."""
    gpus = gpu_names()
    if not gpus:
        raise UsageError(
            "--search times kernels on a GPU and there is none here; leave it out, or run it on one"
        )
    device = rulebook.device(gpus[0])
    if wanted is not None and rulebook.device(wanted).name != device.name:
        raise UsageError(
            f"--search times kernels on the {gpus[0]} here, and these are for {wanted}; "
            "leave it out, or analyze for this GPU"
        )
    with Worker("fusion_advisor.measure.child", "gpu") as worker:
        yield searcher(worker, device, rulebook)


def searcher(
    worker: Worker, device: Device, rulebook: Rulebook, most: int | None = None
) -> Searcher:
    """Searcher whose kernels are timed by the child `worker`, of `most` other configurations."""
    rules, timeout_s = timing_rules(rulebook, device), rulebook.tuning.timeout.base

    def searched(
        decision: Decision,
        kernel: Kernel,
        emitted: Callable[[Decision], Kernel | str],
        proven: Callable[[Kernel], Proven],
    ) -> SearchResult:
        def timed(kernels: Sequence[Kernel], rounds: int) -> Turns:
            return measure_turns(decision, kernels, rounds, worker, rules, timeout_s)

        tried = neighbours(decision, rulebook)[:most]
        return of_launches(contenders(decision, kernel, emitted, tried), timed, proven, rulebook)

    return searched


def contenders(
    decision: Decision,
    kernel: Kernel,
    emitted: Callable[[Decision], Kernel | str],
    tried: Sequence[Decision],
) -> list[Contender]:
    """Kernel of a group under the rules, and of each other decision on it that can be written."""
    found: list[Contender] = []
    for each in (decision, *tried):
        plan = each.subject.plan
        made = kernel if each is decision else emitted(each)
        if plan is not None and isinstance(made, Kernel):
            found.append(Contender(configuration(plan), made))
    return found


def of_launches(
    found: Sequence[Contender],
    timed: Timer,
    proven: Callable[[Kernel], Proven],
    rulebook: Rulebook,
) -> SearchResult:
    """Find the fastest numbers for the launches of a kernel, the first of those found: only the
    others are tried that differ from it in these numbers alone, which its runtime can take."""
    own, *others = found
    computes, numbers = launched(own.kernel.text)
    alike = [each for each in others if launched(each.kernel.text)[0] == computes]
    result = search(own, alike, timed, proven, rulebook)
    wanted = launched(result.kernel.text)[1]
    return replace(result, numbers=wanted if wanted != numbers else {})


def tuning_file(
    folder: Path, searches: Mapping[str, SearchResult], texts: Mapping[str, str]
) -> dict[Path, str]:
    """File with what searches found for kernels in a folder, by its path: none where the rules' own
    numbers are the fastest everywhere. `texts` are those of the kernels' files, by the names of the
    searches. Raises UsageError for a file that is there and cannot be read."""
    found = {name: each for name, each in searches.items() if each.numbers and name in texts}
    if not found:
        return {}
    gpu = next(iter(found.values())).gpu  # a search is on one
    path = folder / tuning_path(gpu)
    rows = {texts[name]: (each.numbers, each.summary) for name, each in found.items()}
    try:
        return {path: tuning_text(rows, path.read_text("utf-8") if path.exists() else "")}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}; delete it, and search again") from error


def search(
    own: Contender,
    others: Sequence[Contender],
    timed: Timer,
    proven: Callable[[Kernel], Proven],
    rulebook: Rulebook,
) -> SearchResult:
    """Find the fastest of a kernel's configurations; `own` is the one that the rules choose."""
    numbers = rulebook.tuning
    all_in_turn = timed([each.kernel for each in (own, *others)], numbers.screened.count)
    failure = _failure(all_in_turn)
    if failure:
        return SearchResult(own.kernel, failure=failure)
    first, *rows = all_in_turn.series
    own_us = statistics.median(first.us)
    ranked = sorted((statistics.median(row.us), n) for n, row in enumerate(rows) if row.us)
    quicker = [others[n] for us, n in ranked if us < own_us]
    gpu = dict(all_in_turn.machine)["gpu"]
    head = f"{_place(all_in_turn)}, of {len(others) + 1} configurations"
    for one in quicker[: numbers.finalists.count]:
        alone = timed([own.kernel, one.kernel], numbers.rounds.count)
        if _failure(alone) or not alone.series[1].us:
            continue
        mine, its = alone.series
        own_us = statistics.median(mine.us)
        if not faster(its, mine, rulebook.measure.tie.value):
            continue
        if not holds(*proven(one.kernel)):
            continue
        us = statistics.median(its.us)
        summary = (
            f"{head}: {one.configuration}, {us:.2f} us; "
            f"the rules' own, {own.configuration}, {own_us:.2f} us"
        )
        return SearchResult(one.kernel, summary, one.configuration, us, own_us, gpu)
    summary = (
        f"{head}: the rules' own, {own.configuration}, {own_us:.2f} us; "
        "no other that is right is faster by more than times differ"
    )
    return SearchResult(own.kernel, summary, own.configuration, own_us, own_us, gpu)


def faster(one: Series, other: Series, tie: float) -> bool:
    """Whether one kernel is faster than another, by more than the quartile spread of either's
    rounds and by more than medians differ between runs."""
    gain = statistics.median(other.us) - statistics.median(one.us)
    spread = max(spread_of(one), spread_of(other))
    return gain > spread and statistics.median(other.us) > tie * statistics.median(one.us)


def spread_of(series: Series) -> float:
    """Distance between the quartiles, us; 0 for one round."""
    if len(series.us) == 1:
        return 0.0
    low, _, high = statistics.quantiles(series.us, n=4)
    return high - low


def _failure(turns: Turns) -> str:
    """Reason why the rules' own configuration was not timed; empty where it was."""
    if turns.failure:
        return turns.failure
    return turns.series[0].failure or ""


def _place(turns: Turns) -> str:
    machine = dict(turns.machine)
    versions = (f"{name} {machine[name]}" for name in ("torch", "triton"))
    return f"on {machine['gpu']}, {', '.join(versions)}"
