"""Backend for `torch.compile(model, backend="fusion_advisor")`: our kernels where they win,
Inductor elsewhere.

Each graph that Dynamo hands over is lowered to ATen, analysed and divided (`partition.divide`).
What is ours becomes calls of opaque operators (`custom_ops`), and Inductor gets the graph with them
in it; a graph without any goes to Inductor untouched. Graphs break where they break under Inductor,
and symbolic sizes stay symbolic: one operator serves them all.

Options (`torch.compile(..., options={...})`; all others are Inductor's, and `mode` is too):

- `inner`: who compiles the graph: "inductor", "eager" (nobody, the graph is run as it is), or a
  function that takes a graph and its inputs as a backend does.
- `take_all`: every accepted group, also where its kernel is not expected to win over Inductor's;
  as it is with `inner="eager"`, where there is none to win over.
- `rewrites`: what is worth more than a kernel (`dynamo/rewrites`), before anything is divided; on
  by default. `read_inputs`: also where an input has to be read once a call, as a padding mask is.
- `tune`: configurations of kernels that a stopwatch chooses on this GPU, once for a class of
  sizes: "now", "cached" (those that an earlier run has found), or "off"; "now" where `mode` lets
  Inductor measure its own, else "cached".
- `training`: kernels in both passes of a training step; on by default. `chunked_loss`: its last
  product and loss in chunks of rows, which takes less memory where they are large.
- `device`, `rules`: as on the command line; without `device` the rules of the inputs' GPU.

Where gradients are required, AOTAutograd traces the backward pass after the rewrites and chooses
what is saved for it, as under torch.compile, and kernels go into its two graphs (`training.py`);
not with an `inner` function of the caller's, nor with `training=False`.

What was done is logged at INFO by the logger "fusion_advisor", and kept in `last()`. A fault of
ours costs the kernels, not the model: one warning names it and Inductor compiles the graph alone;
`FUSION_ADVISOR_STRICT=1` raises it.
"""
# torch.compile and Inductor's internals are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, TypeVar

import torch

from fusion_advisor.dynamo.custom_ops import interpreted, loosen_views, substitute
from fusion_advisor.dynamo.cut import TwoParts, compiled_before, cut
from fusion_advisor.dynamo.inductor_attention import inductor_fuses
from fusion_advisor.dynamo.measured import Stopwatch, on_gpu
from fusion_advisor.dynamo.numbers import NumbersOutside, numbers_outside
from fusion_advisor.dynamo.options import (
    BackendOptions,
    Inner,
    channels_last,
    inner_compiler,
    options_of,
)
from fusion_advisor.dynamo.partition import Occurrence, divide
from fusion_advisor.dynamo.rewrites import Rewritten, Taken, rewrite
from fusion_advisor.dynamo.rewrites.base import Reading
from fusion_advisor.dynamo.rewrites.conditions import hold
from fusion_advisor.dynamo.rewrites.nodes import copied
from fusion_advisor.dynamo.target import Target, target_of
from fusion_advisor.dynamo.training import Phase, through_eager
from fusion_advisor.dynamo.two_graphs import Run, Which, choosing
from fusion_advisor.dynamo.whole_graph import (
    GraphTimes,
    graph_times,
    said,
    timed_graph,
    why_untimed,
)
from fusion_advisor.frontend.aot import Lowered, lower, record
from fusion_advisor.ir.graph import Ref
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.kernel_fault import cause

_log = logging.getLogger("fusion_advisor")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Outcome:
    """Result for one of Dynamo's graphs, or for its forward or backward graph where gradients are
    required (`phase`). `why` says why the whole graph is Inductor's; `report` is None where the
    graph was not analysed."""

    places: tuple[Occurrence, ...] = ()
    report: Report | None = None
    why: str = ""
    rewrites: tuple[Taken, ...] = ()
    phase: Phase | None = None
    part: int = 0
    """1 for what stands before the cut of a graph in two parts."""

    @property
    def taken(self) -> tuple[Occurrence, ...]:
        return tuple(place for place in self.places if place.kernel is not None)

    @property
    def saved_us(self) -> float:
        """Predicted saving of our kernels, us of one run: against eager, and of a training step
        against Inductor, which launches other kernels than eager there."""
        return sum(place.saved_us for place in self.taken)

    @property
    def accepted_us(self) -> float:
        """Predicted saving of all accepted groups, us of one run."""
        return sum(place.saved_us for place in self.places)

    @property
    def left(self) -> tuple[Occurrence, ...]:
        return tuple(place for place in self.places if place.kernel is None)

    def __str__(self) -> str:
        head = f"{len(self.taken)} of {len(self.places)} fusions are ours"
        lines = [f"{self.phase}: " * bool(self.phase) + (self.why or head)]
        rewritten = Counter(f"{each.name}: {each.why}" for each in self.rewrites)
        lines += [f"  rewritten x{count}: {what}" for what, count in rewritten.items()]
        for what, places in (("ours", self.taken), ("left to Inductor", self.left)):
            counted = Counter((place.group, place.name, place.why) for place in places)
            lines += [
                f"  {what}: {group} {name} x{count}: {why}"
                for (group, name, why), count in counted.items()
            ]
        return "\n".join(lines)


@dataclass
class _LastOutcome:
    outcome: Outcome | None = None


_last = _LastOutcome()
_numbers = count()


def last() -> Outcome | None:
    """Outcome of the graph that was compiled last in this process; None where none was."""
    return _last.outcome


def fusion_advisor(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    dry: bool = False,
) -> Callable[..., Any]:
    """Compile a graph, as Dynamo calls a backend: a graph and example inputs in, a callable out. A
    caller that binds `on_outcome` receives the outcome of each graph. With `dry` the graph is
    divided as on a GPU, wherever its inputs are, and then runs as it was: nothing is compiled."""

    def tell(outcome: Outcome) -> None:
        _tell(outcome)
        on_outcome(outcome)

    chosen = options_of(mode, dict(options or {}))
    if dry:
        chosen = replace(chosen, inner=inner_compiler("eager", {}), trained=through_eager)
    elif (outside := _numbers_outside(module, inputs, chosen)) is not None:
        told = partial(_told_with, tell, outside.taken)
        return outside.around(_graph(outside.module, outside.inputs, chosen, told))
    return _graph(module, inputs, chosen, tell, dry=dry)


def _numbers_outside(
    module: torch.fx.GraphModule, inputs: Sequence[Any], options: BackendOptions
) -> NumbersOutside | None:
    """Graph without the numbers that change, where a CUDA graph would be recorded for each; None
    where it needs no change."""
    graphed = options.patches is not None and options.compiler.graphed
    if not (options.rewrites and graphed):
        return None
    return _unless_at_fault(
        lambda: numbers_outside(module, inputs), None, "numbers stay in the graph: {}"
    )


def _told_with(tell: Callable[[Outcome], None], taken: tuple[Taken, ...], outcome: Outcome) -> None:
    """Tell an outcome with rewrites that were made before the others."""
    tell(replace(outcome, rewrites=(*taken, *outcome.rewrites)))


def _graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    chosen: BackendOptions,
    tell: Callable[[Outcome], None],
    *,
    dry: bool = False,
) -> Callable[..., Any]:
    """Compile a graph of tensors: rewritten, or in the two forms that conditions choose between."""
    anywhere = dry or interpreted()
    rewritten, parts = _chosen(module, inputs, chosen, anywhere=anywhere)
    parts = None if dry else parts
    make = partial(_compiled, anywhere=anywhere, dry=dry)
    conditions = rewritten.conditions

    def backend(graph: Rewritten) -> Inner:
        def told(outcome: Outcome) -> None:  # what is rewritten is told of once
            backward = outcome.phase == "backward"
            tell(outcome if backward else replace(outcome, rewrites=graph.taken))

        return partial(make, options=chosen, tell=told)

    def for_all(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        other = _rewritten(graph, given, chosen, conditions=False, anywhere=anywhere)
        return backend(other)(other.module, given)

    def before(graph: torch.fx.GraphModule, given: Sequence[Any], **how: Any) -> Run:
        def told(outcome: Outcome) -> None:
            tell(replace(outcome, part=1))

        return make(graph, given, replace(chosen, **how), told)

    def later(which: Which) -> Callable[..., Any]:
        if which == "for all":
            return _captured_again(module, for_all)
        if which == "before" and parts is not None:
            return _captured_again(parts.before, before)
        graph = rewritten.module if parts is None else parts.behind
        return _captured_again(graph, backend(rewritten))

    compiled: dict[Which, Run] = {}
    if conditions and not hold(conditions, inputs):
        compiled["for all"] = for_all(module, inputs)
    elif parts is None or (begun := _begun(parts.before, inputs, chosen, before)) is None:
        parts = None
        compiled["rewritten"] = backend(rewritten)(rewritten.module, inputs)
    else:
        compiled["before"], values = begun
        compiled["rewritten"] = backend(rewritten)(parts.behind, [*inputs, *values])
    if not conditions:
        return compiled["rewritten"]
    return choosing(conditions, inputs, compiled, later, parted=parts is not None)


def _chosen(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    *,
    anywhere: bool,
) -> tuple[Rewritten, TwoParts | None]:
    """Graph after the rewrites; and its parts where an input is read to know whether they hold. A
    graph stays whole where gradients are required, since what is kept for the backward pass is
    chosen for all of it, and under a compiler of the caller's."""
    rewrites = partial(_rewritten, module, inputs, options, anywhere=anywhere)
    if options.trained is not None and not _recorded(module, inputs):
        rewritten = rewrites(read="within")
        if not rewritten.reads:
            return rewritten, None
        if (parts := cut(rewritten)) is not None:
            return rewritten, parts
    return rewrites(), None


def _begun(
    part: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    make: Callable[..., Run],
) -> tuple[Run, list[Any]] | None:
    """Compile the part before a cut; None where a fault of ours leaves the graph whole."""
    # What a stopwatch ran has told already how it lays out its results.
    tune = "cached" if options.tune == "now" else options.tune
    return _unless_at_fault(
        lambda: compiled_before(
            inputs, options.inner, lambda inner: make(part, inputs, inner=inner, tune=tune)
        ),
        None, "{}; an input is read before the graph, not within",
    )  # fmt: skip


def _captured_again(
    graph: torch.fx.GraphModule, backend: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """Callable that lets Dynamo capture a graph as it is called, for a backend."""

    def run(*given: Any) -> Any:  # Dynamo passes by a GraphModule that ran before
        return graph(*given)

    # Dynamo counts compilations by the code object: a graph has its own.
    code = run.__code__.replace(co_name=f"run_{next(_numbers)}")
    own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    return torch.compile(own, backend=backend)


def _rewritten(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    *,
    anywhere: bool,
    conditions: bool = True,
    read: Reading = "before",
) -> Rewritten:
    """Graph after the rewrites, with those that mean the same under conditions or without."""
    if not options.rewrites or _elsewhere(inputs, anywhere=anywhere):
        return Rewritten(module)
    read = read if options.read_inputs else "never"
    return _unless_at_fault(
        lambda: rewrite(
            module, inputs, load_rulebook(options.rules), conditions=conditions, read=read,
            chunked_loss=options.chunked_loss,
        ),
        Rewritten(module), "no rewrites here: {}",
    )  # fmt: skip


def _compiled(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    tell: Callable[[Outcome], None],
    *,
    anywhere: bool,
    dry: bool,
) -> Callable[..., Any]:
    """Divide a graph and compile it."""
    if _elsewhere(inputs, anywhere=anywhere):
        tell(Outcome(why="no input is on a CUDA device: the graph is Inductor's alone"))
        return options.inner(module, inputs)
    if _recorded(module, inputs):
        return _compiled_to_train(module, inputs, options, tell, anywhere=anywhere, dry=dry)
    try:
        lowered = lower(module, inputs)
        target = target_of(inputs, options, anywhere=anywhere)
        outcome = _divided(lowered, target, options, anywhere=anywhere)
        ours, compiled = module, None
        if outcome.taken and not dry:
            ours = lowered.module
            loosen_views(ours)
            slow, compiled = _slower(ours, module, inputs, options, target)
            if slow:
                outcome = replace(outcome, places=tuple(_left(outcome.places, slow)))
                ours = module
        compiled = compiled or options.inner(ours, inputs)
        tell(outcome)
        return compiled
    except Exception as error:
        if _strict():
            raise
        tell(_fault(error))
    return options.inner(module, inputs)


def _compiled_to_train(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    tell: Callable[[Outcome], None],
    *,
    anywhere: bool,
    dry: bool,
) -> Callable[..., Any]:
    """Divide the forward and the backward graph of a graph under gradients, and compile both."""
    compile_both = options.trained
    if not options.training or compile_both is None:
        why = (
            "gradients are required, and what `inner` does with a backward pass is not known"
            if options.training
            else "gradients are required, and training=False leaves such a step as it is"
        )
        tell(Outcome(why=why))
        return options.inner(module, inputs)
    # These graphs are in Inductor's decompositions, of which eager launches other kernels.
    compiler = replace(options.compiler, baseline=compile_both is not through_eager)
    options = replace(options, compiler=compiler)

    def put(graph: torch.fx.GraphModule, phase: Phase) -> torch.fx.GraphModule:
        try:
            lowered = record(copied(graph))
            target = target_of(inputs, options, anywhere=anywhere)
            outcome = _divided(lowered, target, options, anywhere=anywhere, training=True)
        except Exception as error:
            if _strict():
                raise
            tell(replace(_fault(error), phase=phase))
            return graph
        tell(replace(outcome, phase=phase))
        return lowered.module if outcome.taken and not dry else graph

    return compile_both(module, inputs, put)


def _strict() -> bool:
    """Whether a fault of ours is raised."""
    return os.environ.get("FUSION_ADVISOR_STRICT") == "1"


def _unless_at_fault(make: Callable[[], _T], otherwise: _T, says: str) -> _T:
    """Result of a step that a graph can do without; `otherwise` where a fault of ours costs it,
    after a warning, which `says` that with its cause."""
    try:
        return make()
    except Exception as error:
        if _strict():
            raise
        warnings.warn(f"fusion_advisor: {says.format(cause(error))}", stacklevel=4)
        return otherwise


def _fault(error: Exception) -> Outcome:
    """Outcome of a graph that a fault of ours costs its kernels, after a warning."""
    why = f"no kernels of ours here: {cause(error)}; Inductor compiles the graph alone"
    warnings.warn(f"fusion_advisor: {why}", stacklevel=3)
    return Outcome(why=why)


def _tell(outcome: Outcome) -> None:
    _last.outcome = outcome
    _log.info("%s", outcome, extra={"outcome": outcome})


def _recorded(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph is run for gradients: some may be required of what an input gives."""
    recording = torch.is_grad_enabled() or _enables_gradients(module)
    return recording and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)


def _elsewhere(inputs: Sequence[Any], *, anywhere: bool) -> bool:
    """Whether no input is on a GPU, where that matters."""
    return not anywhere and not any(isinstance(v, torch.Tensor) and v.is_cuda for v in inputs)


def _enables_gradients(module: torch.fx.GraphModule) -> bool:
    """Whether a graph switches gradients on by itself, as `torch.enable_grad` in a model does."""
    switch = torch._C._set_grad_enabled
    return any(node.target is switch and node.args == (True,) for node in module.graph.nodes)


def _divided(
    lowered: Lowered,
    target: Target,
    options: BackendOptions,
    *,
    anywhere: bool,
    training: bool = False,
) -> Outcome:
    """Put calls of our kernels into a lowered graph."""
    rulebook, device = target.rulebook, target.device
    laid_out = channels_last(lowered.module, options.patches, training=training)

    def fuses_attention(softmax: Ref) -> bool:
        says = "attention that is written out stays Inductor's: {}"
        return _unless_at_fault(lambda: inductor_fuses(lowered.origins[softmax]), True, says)

    compiler = replace(
        options.compiler, timed=target.compiler is not None, channels_last=laid_out,
        fuses_attention=fuses_attention,
    )  # fmt: skip
    division = divide(lowered.graph, device, rulebook, compiler, (target.chosen,))
    places: Sequence[Occurrence] = division.places
    if target.gpu is not None:
        prepare = partial(
            on_gpu, rulebook=rulebook, device=device, gpu=target.gpu, compiler=target.compiler
        )
        watch = Stopwatch(rulebook, options.tune, target.name, prepare, target.beside, target.group)
        places = watch.places(division.flow, places)
    places = substitute(lowered, division.flow, places, anywhere=anywhere)
    return Outcome(tuple(places), division.report)


def _slower(
    ours: torch.fx.GraphModule,
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    target: Target,
) -> tuple[str, Run | None]:
    """Why a graph is left to Inductor although kernels won each for itself; empty where they stay:
    the graph is faster with them, or its times are not known. And the faster one as it was compiled
    to be timed; None where neither was, or where CUDA graphs make another one of it."""
    compiler, gpu, rulebook = target.compiler, target.gpu, target.rulebook
    if compiler is None or gpu is None or options.compiler.take_all:
        return "", None
    if untimed := why_untimed(ours.graph):
        _log.info("the graph is not timed: %s", untimed)
        return "", None
    made: list[Run] = []

    def both() -> tuple[Run, Run]:
        made.extend(compiler(copied(graph), inputs) for graph in (ours, module))
        return made[0], made[1]

    def timed() -> GraphTimes | None:
        return timed_graph(both, inputs, rulebook, target.device, gpu)

    asked = {"graph": ours.code, "inputs": [*map(said, inputs)], "gpu": target.name}
    asked |= {"beside": target.beside, "rules": rulebook.hash}
    times = graph_times(asked, options.tune, target.group, rulebook, timed)
    loses = times is not None and times.loses(rulebook)
    faster = made[loses] if times is not None and made and not options.compiler.graphed else None
    return str(times) if loses else "", faster


def _left(places: Sequence[Occurrence], why: str) -> Iterator[Occurrence]:
    """Places without kernels, for a reason."""
    for place in places:
        yield place if place.kernel is None else replace(place, kernel=None, as_fast=True, why=why)
