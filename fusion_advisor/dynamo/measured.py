"""Stage: run the backend's kernels on the GPU before they go into a graph: choose configurations
and time Inductor's kernel for the region where that is asked for (`tune`), and leave what does not
win.

Kernels run on operands of their own, outside of any call, capture or fake mode. What was chosen is
kept in the user's cache: by the kernel that the rules choose, classes of its operands, and the GPU.
"""
# torch carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.codegen.header import does
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.dynamo.custom_ops import loaded
from fusion_advisor.dynamo.partition import Occurrence
from fusion_advisor.dynamo.processes import Ranks, grouped
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.measure.clocks import DeviceClock
from fusion_advisor.measure.config_space import configuration, offered
from fusion_advisor.measure.driver import timing_rules
from fusion_advisor.measure.protocol import Series, Turns
from fusion_advisor.measure.search import Proven, contenders, search, spread_of
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.local_gpu import version
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.kept import cache_folder, entry, put, read
from fusion_advisor.support.kernel_fault import cause
from fusion_advisor.verify.driver import criterion_of
from fusion_advisor.verify.references import truth
from fusion_advisor.verify.tolerance import Truth, compare

Tune = Literal["off", "cached", "now"]
"""Whether configurations are those of the rules, also those that an earlier run found, or also
found now."""


class KernelRuns(Protocol):
    """Operands of a kernel on a GPU, and what is done with them."""

    def timed(self, kernels: Sequence[Kernel], rounds: int) -> Turns:
        """Times of kernels in turn."""
        ...

    def proven(self, kernel: Kernel, own: Kernel) -> Check:
        """Check of a kernel against float64, by the reference of the rules' own."""
        ...

    def beside(self, kernel: Kernel, own: Kernel, rounds: int) -> Turns:
        """Times of a kernel and of what the graph's compiler makes of the reference of the rules'
        own, in turn."""
        ...


Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Function that compiles a graph for example inputs."""

Prepare = Callable[[Sequence[Tensor]], KernelRuns | None]
"""Function that allocates operands; None where they would take too much memory."""


@dataclass(frozen=True)
class _Chosen:
    """Kernel that was chosen for a kind of places, its decision, its time and that of the graph's
    compiler, us; None where it was not timed. `spread_us`: by how much rounds differ; `said`: what
    the choice was made by; `failure`: why it does not run here."""

    decision: Decision
    kernel: Kernel
    us: float | None = None
    inductor_us: float | None = None
    spread_us: float = 0.0
    said: str = ""
    failure: str = ""


_KEPT = "us", "inductor_us", "spread_us"
"""Times that are kept of a choice beside its configuration."""

_TOLD = *_KEPT, "said", "failure"
"""Fields of a choice that rank 0 tells the others, beside its configuration."""


@dataclass
class Stopwatch:
    """Choice of kernels by their times on one GPU, `gpu` by its name."""

    rulebook: Rulebook
    tune: Tune
    gpu: str
    prepare: Prepare
    beside: str = ""
    """Digest of the settings of the graph's compiler, by which its times are kept; empty where it
    is not timed."""
    group: Ranks | None = None
    """Processes that choose alike; None where this process is alone."""
    until: float = field(init=False)
    """Time of the monotonic clock at which configurations are no longer searched for."""

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.rulebook.tuning.spent.base

    def places(self, flow: Dataflow, places: Sequence[Occurrence]) -> list[Occurrence]:
        """Places with the kernels that were found to be fastest; without one where that takes
        longer than it may. The most valuable kernels come first: time is limited."""
        kinds = [_kind(flow, place) for place in places]
        worth: Counter[object] = Counter()
        for kind, place in zip(kinds, places, strict=True):
            worth[kind] += place.saved_us  # pyright: ignore[reportArgumentType] any number
        chosen: dict[object, _Chosen] = {}
        for kind, _ in worth.most_common():
            if kind is not None:
                chosen[kind] = self._chosen(flow, places[kinds.index(kind)])
        return [
            place
            if place.kernel is None
            else self._judged(place, chosen.get(kind) or _Chosen(place.decision, place.kernel))
            for kind, place in zip(kinds, places, strict=True)
        ]

    def _judged(self, place: Occurrence, chosen: _Chosen) -> Occurrence:
        """Place with the chosen kernel, or without one."""
        us, weighed = chosen.us, place.weighed
        if chosen.failure:
            return replace(place, kernel=None, why=f"does not run on this GPU: {chosen.failure}")
        if weighed is not None and us is not None and chosen.inductor_us is not None:
            seen = weighed.timed(us, chosen.inductor_us)
            least_us = min(seen.ours_us, seen.inductor_us)
            doubt_us = max(chosen.spread_us, (self.rulebook.measure.tie.value - 1) * least_us)
            if abs(seen.ours_us - seen.inductor_us) > doubt_us:  # else as predicted
                weighed = seen
                place = replace(place, weighed=seen, why=str(seen))
        elif (
            weighed is not None
            and us is not None
            and us > self.rulebook.inductor.tolerated.value * weighed.worth_us
        ):
            why = f"takes {us:.0f} us on this GPU, where it was worth {weighed.worth_us:.0f} us"
            return replace(place, kernel=None, why=why, as_fast=True)
        if weighed is not None and not weighed.wins:
            return replace(place, kernel=None, as_fast=True)
        if not chosen.said:
            return place
        planned = chosen.decision.subject.planned
        subject = replace(place.decision.subject, planned=planned)
        decision = replace(place.decision, subject=subject)
        why = f"{place.why}; {chosen.said}"
        return replace(place, kernel=chosen.kernel, decision=decision, why=why)

    def _chosen(self, flow: Dataflow, place: Occurrence) -> _Chosen:
        own = place.kernel
        assert own is not None
        if self.group is None:
            return self._chosen_here(flow, place, own)

        def decide() -> dict[str, Any]:
            chosen = self._chosen_here(flow, place, own)
            plan = chosen.decision.subject.plan
            assert plan is not None
            told = {each: getattr(chosen, each) for each in _TOLD}
            return {"configuration": configuration(plan), **told}

        told = self.group.decided(self._asked(flow, place, own), decide)
        found = told and self._configured(flow, place, own, told["configuration"], told["said"])
        if not found:
            return _Chosen(place.decision, own)
        return replace(found, **{each: told[each] for each in _TOLD})

    def _chosen_here(self, flow: Dataflow, place: Occurrence, own: Kernel) -> _Chosen:
        """Choice of this process."""
        tuning = self.rulebook.tuning
        tuned = self.tune != "off" and place.decision.fused_us >= tuning.least.value
        known = self._known(flow, place, own) if tuned else None
        first = known or _Chosen(place.decision, own)
        weighed = place.weighed
        worth_us = weighed.worth_us if weighed is not None and weighed.wins else 0.0
        doubtful = worth_us >= self.rulebook.inductor.timed.value
        late = self.tune != "now" or time.monotonic() > self.until
        searched = tuned and known is None and not late
        settled = known is not None and known.inductor_us is not None
        if settled or not (doubtful or searched):
            return first
        runs = self.prepare(_operands(flow, place))
        if runs is None:
            return first
        if searched:
            found = self._searched(flow, place, own, runs)
            if found is not None:
                return found
        (series,) = runs.timed([first.kernel], 1).series
        us = statistics.median(series.us) if series.us else None
        return replace(first, us=us, failure=series.failure or "")

    def _known(self, flow: Dataflow, place: Occurrence, own: Kernel) -> _Chosen | None:
        """Choice of an earlier run; None where there is none."""
        try:
            kept = read(self._entry(flow, place, own))
            wanted, *times = (kept[each] for each in ("configuration", *_KEPT))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        said = f"tuned by an earlier run: {wanted}"
        found = self._configured(flow, place, own, str(wanted), said)
        return found and replace(found, **dict(zip(_KEPT, times, strict=True)))

    def _searched(
        self, flow: Dataflow, place: Occurrence, own: Kernel, runs: KernelRuns
    ) -> _Chosen | None:
        """Fastest of the configurations that are offered; None where none could be timed."""

        def emitted(decision: Decision) -> Kernel | str:
            return attempt(flow, decision, place.name, self.rulebook)

        def proven(kernel: Kernel) -> Proven:
            return runs.proven(kernel, own), None

        tried = offered(place.decision, self.rulebook)
        first, *others = contenders(place.decision, own, emitted, tried)
        result = search(first, others, runs.timed, proven, self.rulebook)
        if result.failure:
            return None
        times = f"{result.us:.1f} us for {result.own_us:.1f} by rule"
        said = f"tuned: {result.configuration}, {times}"
        found = self._configured(flow, place, own, result.configuration, said)
        if found is None:
            return None
        found = replace(found, us=result.us)
        if place.weighed is not None and self.beside:
            found = self._beside_the_compiler(found, own, runs)
        times = {each: getattr(found, each) for each in _KEPT}
        kept = {"configuration": result.configuration, **times}
        put(self._entry(flow, place, own), kept, self.rulebook.cache.tuned.count)
        return found

    def _beside_the_compiler(self, chosen: _Chosen, own: Kernel, runs: KernelRuns) -> _Chosen:
        """Choice with its time and that of the graph's compiler; as it is where that has none."""
        ours, inductor = runs.beside(chosen.kernel, own, self.rulebook.tuning.rounds.count).series
        if not ours.us or not inductor.us:
            return chosen
        us, inductor_us = statistics.median(ours.us), statistics.median(inductor.us)
        spread_us = max(spread_of(ours), spread_of(inductor))
        return replace(chosen, us=us, inductor_us=inductor_us, spread_us=spread_us)

    def _configured(
        self, flow: Dataflow, place: Occurrence, own: Kernel, wanted: str, said: str
    ) -> _Chosen | None:
        """Choice of a configuration by its words; None where it is not offered."""
        for decision in (place.decision, *offered(place.decision, self.rulebook)):
            plan = decision.subject.plan
            if plan is not None and configuration(plan) == wanted:
                if decision is place.decision:
                    return _Chosen(decision, own)
                kernel = attempt(flow, decision, place.name, self.rulebook)
                return None if isinstance(kernel, str) else _Chosen(decision, kernel, said=said)
        return None

    def _entry(self, flow: Dataflow, place: Occurrence, own: Kernel) -> Path:
        """File of the user's cache for a kernel on this GPU, with operands like these."""
        return entry(kept_choices(), self._asked(flow, place, own))

    def _asked(self, flow: Dataflow, place: Occurrence, own: Kernel) -> dict[str, Any]:
        """Question that a choice answers, but for the versions of what is installed."""
        operands = [
            (t.dtype, [(n.bit_length(), n % 16 == 0) for n in t.shape])
            for t in _operands(flow, place)
        ]
        asked = {"kernel": does(own.text), "operands": operands, "gpu": self.gpu}
        asked |= {"beside": self.beside * (place.weighed is not None)}
        return {**asked, "rules": self.rulebook.hash}


def kept_choices() -> Path:
    """Folder of the user's cache with what earlier runs chose."""
    return cache_folder() / "tuned"


def are_kept() -> bool:
    """Whether an earlier run has kept a choice: without one, kernels that are not predicted to win
    need not be written."""
    return any(kept_choices().glob("*"))


def _operands(flow: Dataflow, place: Occurrence) -> list[Tensor]:
    """Operands of a place's kernel, as the graph has them."""
    expressed = place.decision.subject.expressed
    assert expressed is not None
    return [flow.annotated.tensors[ref] for ref in expressed.inputs]


def _kind(flow: Dataflow, place: Occurrence) -> object:
    """Kernel of a place and its operands, by which places are alike; None for one without a
    kernel, and for one that draws random numbers, which the backend leaves to Inductor."""
    expressed = place.decision.subject.expressed
    if place.kernel is None or expressed is None or expressed.draws:
        return None
    operands = _operands(flow, place)
    return place.kernel.text, tuple((t.shape, t.stride, t.dtype) for t in operands)


# -- on the GPU ------------------------------------------------------------------------------------


def may_measure(tune: Tune) -> bool:
    """Whether kernels may be chosen by their times now: of several processes each would choose
    otherwise, unless rank 0 chooses for all, and a capture would take the launches in."""
    return (tune == "now" or not grouped()) and not torch.cuda.is_current_stream_capturing()


@dataclass
class DeviceKernelRuns:
    """Operands on a GPU. Whatever a kernel raises is its row."""

    operands: tuple[torch.Tensor, ...]
    clock: DeviceClock
    rulebook: Rulebook
    gpu: torch.device
    compiler: Compiler | None
    known: Truth | None = None

    def timed(self, kernels: Sequence[Kernel], rounds: int) -> Turns:
        with ThreadPoolExecutor(self.rulebook.tuning.compiled.count) as pool, apart(self.gpu):
            failures = list(pool.map(self._failure, kernels))
            calls = [
                partial(self._operator(kernel), *self.operands)
                for kernel, why in zip(kernels, failures, strict=True)
                if not why
            ]
            times = iter(self.clock.turns(calls, rounds))
        return Turns(tuple(Series(failure=why) if why else Series(tuple(next(times)))
                           for why in failures), _machine(self.gpu))  # fmt: skip

    def proven(self, kernel: Kernel, own: Kernel) -> Check:
        try:
            with apart(self.gpu):
                if self.known is None:
                    self.known = truth(loaded(own.text).reference, self.operands)
                found = self._operator(kernel)(*self.operands)
                results = found if isinstance(found, tuple) else (found,)
                criterion = criterion_of(self.rulebook.verify)
                compare(results, self.known, criterion, criterion.long_sum)
        except Exception as error:  # noqa: BLE001 whatever it is, the kernel is not used
            return Check(kernel.name, "cuda", passed=False, failure=cause(error))
        return Check(kernel.name, "cuda", passed=True)

    def beside(self, kernel: Kernel, own: Kernel, rounds: int) -> Turns:
        assert self.compiler is not None
        reference, ours = (
            loaded(own.text).reference,
            partial(self._operator(kernel), *self.operands),
        )
        with apart(self.gpu), tracing(None):
            try:
                graph = make_fx(reference)(*self.operands)
                compiled = partial(self.compiler(graph, self.operands), *self.operands)
                times = self.clock.turns([ours, compiled], rounds)
            except Exception as error:  # noqa: BLE001 it has no time then
                return Turns((Series(), Series(failure=cause(error))), _machine(self.gpu))
        return Turns(tuple(Series(tuple(each)) for each in times), _machine(self.gpu))

    def _operator(self, kernel: Kernel) -> Any:
        return getattr(loaded(kernel.text), kernel.entry).operator

    def _failure(self, kernel: Kernel) -> str:
        """Compile a kernel by one run; the reason where that fails. In a thread of the pool."""
        try:
            with torch.no_grad(), torch.cuda.device(self.gpu):
                self._operator(kernel)(*self.operands)
        except Exception as error:  # noqa: BLE001 one that does not compile is left
            return cause(error)
        return ""


@contextmanager
def apart(gpu: torch.device) -> Generator[None]:
    """Leave the modes of the graph that is being compiled, on its GPU."""
    with unset_fake_temporarily(), torch.no_grad(), torch.cuda.device(gpu):
        yield


def _machine(gpu: torch.device) -> tuple[tuple[str, str], ...]:
    name = torch.cuda.get_device_name(gpu)
    return ("gpu", name), *((each, str(version(each))) for each in ("torch", "triton"))


def on_gpu(
    tensors: Sequence[Tensor],
    rulebook: Rulebook,
    device: Device,
    gpu: torch.device,
    compiler: Compiler | None,
) -> KernelRuns | None:
    """Operands like the given records at the sizes of this call."""
    with apart(gpu):
        operands = drawn_operands(tensors, rulebook, gpu)
        if operands is None:
            return None
        watch = DeviceClock(timing_rules(rulebook, device))
        return DeviceKernelRuns(operands, watch, rulebook, gpu, compiler)


def drawn_operands(
    tensors: Sequence[Tensor], rulebook: Rulebook, gpu: torch.device
) -> tuple[torch.Tensor, ...] | None:
    """Tensors like the given records: floats drawn from a normal distribution by a generator of
    its own, integers zero, which index anything. None where they would take too much of the free
    memory."""
    most = rulebook.tuning.memory.value * torch.cuda.mem_get_info(gpu)[0]
    if sum(t.extent * getattr(torch, t.dtype).itemsize for t in tensors) > most:
        return None
    drawn = torch.Generator(gpu).manual_seed(0)

    def operand(like: Tensor) -> torch.Tensor:
        dtype = getattr(torch, like.dtype)
        if dtype.is_floating_point:
            flat = torch.randn(like.extent, generator=drawn, device=gpu).to(dtype)
        else:
            flat = torch.zeros(like.extent, dtype=dtype, device=gpu)
        return flat.as_strided(like.shape, like.stride)

    return tuple(map(operand, tensors))
