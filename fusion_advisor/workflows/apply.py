"""Workflow of `fusion_advisor.apply(model)`: a model's groups run as kernels, in this process.

`torch.compile` does the work, with the backend of this package: Dynamo captures what is called,
guards it and captures it again where that does not hold; the backend puts the kernels in
(`dynamo/backend.py`). Here is what makes that one call, and gathers what became of one model's
graphs.
"""
# The model, its inputs and what torch.compile gives are whatever the user has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import CompileContext
from torch.utils import _pytree as pytree

from fusion_advisor.dynamo.backend import Outcome, fusion_advisor
from fusion_advisor.dynamo.measured import Tune
from fusion_advisor.dynamo.options import Inner, options_of
from fusion_advisor.frontend.user_model import given_inputs
from fusion_advisor.report.formats import wording
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError
from fusion_advisor.workflows.dry_run import dry_run
from fusion_advisor.workflows.generate import GENERATES_BY, GenerateCall
from fusion_advisor.workflows.placed import Placed


@dataclass
class Applied(Placed):
    """Result of `apply` for a model's groups. Calling the record calls the model, or the function
    that was given."""

    run: Callable[..., Any] = field(repr=False, kw_only=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@dataclass
class Gathered:
    """Outcomes of one model's graphs, by the piece of Python code that each is captured from, its
    phase and part. For a piece that was captured again (for other sizes), the graph that saves most
    counts. `warn_below`: share of what could run as kernels of ours below which a graph is warned
    of, once."""

    placed: Placed
    warn_below: float = 0.0
    pieces: dict[Hashable, list[Outcome]] = field(default_factory=dict[Hashable, list[Outcome]])

    def add(self, outcome: Outcome) -> None:
        compiling = CompileContext.current_compile_id()
        piece = compiling.frame_id if compiling is not None else None, outcome.phase, outcome.part
        self.pieces.setdefault(piece, []).append(outcome)
        best = [max(outcomes, key=lambda each: each.saved_us) for outcomes in self.pieces.values()]
        done = self.placed
        done.kernels = dict(Counter(place.name for each in best for place in each.taken))
        done.refused = dict(_reasons(best))
        done.rewrites = dict(Counter(taken.name for each in best for taken in each.rewrites))
        done.rewritten_at = _lines(best)
        done.saved_us = sum((each.saved_us for each in best), 0.0)
        done.accepted_us = sum((each.accepted_us for each in best), 0.0)
        if why := _too_little(outcome, self.warn_below):
            self.warn_below = 0.0
            warnings.warn(f"fusion_advisor: {why}", stacklevel=2)


def _lines(outcomes: list[Outcome]) -> dict[str, tuple[str, ...]]:
    """Lines of the user that are rewritten, each as `file:line`, by the rewrite."""
    found: dict[str, dict[str, None]] = {}
    for each in (taken for outcome in outcomes for taken in outcome.rewrites):
        if each.source:
            place = f"{Path(each.source.file).name}:{each.source.line}"
            found.setdefault(each.name, {})[place] = None
    return {name: tuple(places) for name, places in found.items()}


def _too_little(outcome: Outcome, share: float) -> str:
    """Warning in one line where less than a share of a graph's gain is had, and the reason that
    most groups have; "" elsewhere. Groups that Inductor is expected to run as fast do not count."""
    if not share:
        return ""
    if outcome.why:
        return f"no kernels run in a graph: {outcome.why}"
    missing = [place for place in outcome.left if not place.as_fast]
    lost = sum(place.saved_us for place in missing)
    if lost <= (1 - share) * (outcome.saved_us + lost):
        return ""
    ((reason, count),) = Counter(place.why for place in missing).most_common(1)
    return (
        f"kernels in {len(outcome.taken)} places save {wording.time(outcome.saved_us)} of "
        f"{wording.time(outcome.saved_us + lost)} that analysis accepts: {reason} "
        f"({count} of {len(missing)} groups)"
    )


def _reasons(outcomes: list[Outcome]) -> Iterator[tuple[str, str]]:
    """Yield the reasons why groups do not run as kernels, by the group; by the number of the graph
    where the whole graph is Inductor's."""
    for number, outcome in enumerate(outcomes, 1):
        if outcome.why:
            yield f"graph {number}", outcome.why
        yield from ((place.name, place.why) for place in outcome.left)


def apply(
    model: torch.nn.Module | Callable[..., Any],
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    inner: str | Inner | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    device: str | None = None,
    rules: tuple[str | Path, ...] = (),
    how: str = "dynamo",
    verify: bool | None = None,
    dry: bool = False,
    training: bool = True,
    chunked_loss: bool = False,
    tune: Tune | None = None,
) -> Applied:
    """Let kernels run the groups of a model or a function.

    A module is changed in place, as by `model.compile`; for a function, the result of `apply` runs
    the kernels. Without example inputs the result fills as calls are captured. With example inputs
    (a tensor, a list or tuple, a dict of keywords, or `(args, kwargs)`) the model is called once,
    without gradients; its buffers and the generators of random numbers are then as they were.

    `inner` compiles the rest of the graph: "inductor", "eager" (no compiler; kernels run every
    accepted group then) or a backend function. `mode` and `dynamic` are torch.compile's, `device`
    and `rules` as on the command line. With `dry` the result says what would become of such a call:
    a copy without weights is called on fake tensors, no GPU is needed, the model stays as it is.
    Kernels run in both passes of a training step, too; without `training` such a step is the inner
    compiler's. With `chunked_loss` the last product and cross-entropy of a training step
    go in chunks of rows, where the logits are large and the compiled function returns the loss.
    `tune`: "now" lets this GPU choose the configurations of kernels, which takes up to ten seconds
    a graph and is kept; "cached" takes what was kept, "off" the rules' own. None: "now" with
    mode="max-autotune", else "cached".
    `how` and `verify` were of the way that edited a model's statements, and are not used.
    Raises UsageError for wrong arguments, and any exception of the model when it is called.
    """
    if not callable(model):
        raise UsageError(f"apply: {type(model).__name__} is neither a module nor a function")
    if example_kwargs is not None and not hasattr(example_kwargs, "keys"):
        given = type(example_kwargs).__name__
        raise UsageError(f"apply: example_kwargs is a {given}; several inputs are a tuple, (x, y)")
    args, kwargs = given_inputs(example_inputs)
    kwargs |= example_kwargs or {}
    if how != "dynamo" or verify is not None:
        warnings.warn(
            "fusion_advisor.apply: how= and verify= were of edited statements, which are gone; "
            "torch.compile places the kernels now", DeprecationWarning, stacklevel=2,
        )  # fmt: skip
    options = {
        "inner": inner or "inductor", "device": device, "rules": rules, "training": training,
        "chunked_loss": chunked_loss, "tune": tune,
    }  # fmt: skip
    try:
        options_of(mode, dict(options))
    except (ValueError, RuntimeError) as error:  # else the first call would raise, wrapped twice
        raise UsageError(f"apply: {error}") from error
    done = Applied(run=model)
    least = 0.0 if dry else load_rulebook(tuple(map(Path, rules))).apply.told.value
    told = Gathered(done, least).add
    backend = partial(fusion_advisor, mode=mode, options=options, on_outcome=told, dry=dry)
    if dry:
        dry_run(model, args, kwargs, backend, dynamic=dynamic)
        return done
    if isinstance(model, torch.nn.Module):
        unapply(model)
        model.compile(backend=backend, dynamic=dynamic)
        if hasattr(model, GENERATES_BY):
            setattr(model, GENERATES_BY, GenerateCall(model, backend))
    else:
        done.run = torch.compile(model, backend=backend, dynamic=dynamic)
    if example_inputs is not None or example_kwargs is not None:
        try:
            with torch.no_grad(), _as_it_was(model, (args, kwargs)):
                done(*args, **kwargs)
        except BaseException:
            if isinstance(model, torch.nn.Module):
                unapply(model)
            raise
    return done


def unapply(model: torch.nn.Module | Callable[..., Any]) -> None:
    """Take kernels out of a model again: the effect of `model.compile` on it is undone. Raises
    UsageError for a function, which `apply` leaves as it is."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"unapply: {type(model).__name__} is no module; apply changed none")
    model._compiled_call_impl = None
    vars(model).pop(GENERATES_BY, None)


@contextmanager
def _as_it_was(model: Any, given: Any) -> Generator[None]:
    """Restore the generators of random numbers, and a model's buffers, after the block."""
    module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    values = [*module.parameters(), *module.buffers(), *pytree.tree_leaves(given)]
    devices = {each.device for each in values if isinstance(each, torch.Tensor)}
    gpus = sorted(each.index for each in devices if each.type == "cuda")
    kept, drawn = [(each, each.clone()) for each in module.buffers()], random.getstate()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(drawn)
        for buffer, value in kept:
            buffer.copy_(value)
