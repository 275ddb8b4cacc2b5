"""Workflow of `fusion_advisor.apply(model, inputs, how="source")`: a model's statements edited, in
memory.

What `patch` would write is compiled instead: a module whose forward changes gets a class of its
own, derived from the one that it has, with that method edited. Decorators around it are copied, and
so are functions that it calls by their names: only this model sees the copies. Parameters, buffers,
hooks and the rest of the model stay as they are, and so does the source file. A pickled model is
the model as it was; a deep copy keeps its kernels.

Where a tensor has another dtype or requires a gradient, under autocast, in the other mode, or with
hooks on a module whose call became part of a kernel, the original statements run.
"""
# Frames, code objects and the model are whatever the user has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import copy
import linecache
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.frontend.user_model import resized
from fusion_advisor.fusion.decide import Decision, deciding
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.ir.scenario import Least, Scenario, Sizes
from fusion_advisor.report.formats import wording
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device, gpu_names
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.shipped.load import load_module, process_folder
from fusion_advisor.sourcepatch.editing.renames import renamed
from fusion_advisor.sourcepatch.function_copies import (
    Copies,
    Functions,
    Key,
    Unannounced,
    compiled,
    derived,
    key,
)
from fusion_advisor.sourcepatch.other_sizes import ResizedModel, capture_resized
from fusion_advisor.sourcepatch.placement import Patch
from fusion_advisor.support.errors import CaptureError
from fusion_advisor.verify.driver import Provers, provers
from fusion_advisor.workflows.apply import Applied
from fusion_advisor.workflows.patch import other_scenarios, put

_numbers = count(1)
_Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class AppliedToSource(Applied):
    """Result of `apply` with `how="source"`; `unplaced` says of larger groups, by their nodes, why
    the source cannot express them. `kernels` has how often each occurs."""

    unplaced: Mapping[str, str] = field(default_factory=dict[str, str])


def apply_source(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: str | None,
    rules: tuple[Path, ...],
    verify: bool,
) -> AppliedToSource:
    """Let kernels run a model's groups, in place, for the mode that the model is in.

    The inputs are for one forward pass; the kernels serve other sizes, too. `device` and `rules`
    are as on the command line; with `verify` every kernel is checked against float64 first, on the
    GPU or through Triton's interpreter. Warns, with the reason, where the kernels save less than
    half of the saving of all accepted groups. Raises CaptureError and UsageError as `analyze` does.
    """
    rulebook = load_rulebook(rules)
    part, _ = choose_device(device, rulebook, gpu_names())
    asked = Scenario(mode="train" if model.training else "eval")
    name = f"kernels_{next(_numbers)}"
    with provers(
        part.capability, rulebook.verify, check=verify, compile=False, where="auto"
    ) as children:
        found = placed(model, args, kwargs, asked, part, rulebook, name, children)
    _put_in(model, found, name)
    puts = found.made.puts
    counted = {each.finding.name: each.occurrences for each in puts}
    saved_us = sum(each.finding.saved_us_total for each in puts)
    free_us = _accepted_us(found, rulebook)
    done = AppliedToSource(
        counted, found.made.refused, saved_us, free_us, run=model, unplaced=found.unplaced
    )
    if done.share < rulebook.apply.told.value:
        warnings.warn(f"fusion_advisor: {_too_little(done)}", stacklevel=3)
    return done


def _accepted_us(found: PlacedKernels, rulebook: Rulebook) -> float:
    """Predicted saving of all accepted groups, us, wherever they are in the source."""
    flow = found.originals[0][2]
    free = fuse(flow, rulebook, decided=found.decided)
    return sum(each.saved_us_total for each in free.groups)


def _too_little(done: AppliedToSource) -> str:
    """Warning in one line: how little the kernels save, and the reason that most of the other
    groups have."""
    said = [re.sub(r"^line \d+: ", "", why) for why in done.unplaced.values()]
    said = said or [*done.refused.values()]
    reasons = Counter(said).most_common(1)
    why = "".join(f": {reason} ({count} of {len(said)} sets)" for reason, count in reasons)
    return (
        f"kernels are in {sum(done.kernels.values())} places and save "
        f"{wording.time(done.saved_us)} of {wording.time(done.accepted_us)} that analysis accepts; "
        f"the source cannot express the rest{why}"
    )


@dataclass(frozen=True)
class PlacedKernels:
    """Groups of a model put into the text of its functions: the changed functions, the new texts of
    their files, and the kernels with their checks; `originals` is the model as it ran, the scenario
    asked for first."""

    functions: Functions
    changed: set[Key]
    texts: dict[str, str]
    made: Patch
    kernels: Mapping[Kernel, Check | None]
    unplaced: Mapping[str, str]
    originals: Sequence[tuple[str, Scenario, Dataflow]]
    decided: Callable[[Iterable[int]], Decision]
    """Decisions on the first of `originals`."""
    resized: Sequence[ResizedModel] = ()
    """First of `originals` at other sizes of its inputs."""

    @property
    def callers(self) -> dict[Key, dict[str, Any]]:
        """Changed functions, and the functions that lead to them by names."""
        return self.functions.naming(self.changed)


def placed(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    asked: Scenario,
    device: Device,
    rulebook: Rulebook,
    name: str,
    children: Provers,
    accepted: Callable[[FunctionType], bool] = lambda function: True,
    *,
    objects: bool = True,
    least: Least | None = None,
) -> PlacedKernels:
    """Put a model's groups into the functions that it runs, as far as these functions are accepted.

    Without `objects` no function is changed that is only found in a table or by a call of an
    object. Nothing is changed yet; groups that save less than `least` are left. The kernels are
    those of a package called `fused_<name>`. Raises CaptureError, and UsageError where a file is
    not what was imported.
    """

    def graph(scenario: Scenario, given: _Given = (args, kwargs or {})) -> Graph:
        return capture_module(model, *given, scenario, trail=True, breaks=False)

    def flow(scenario: Scenario) -> Dataflow:
        return dataflow(graph(scenario), device)

    def editable(file: str, line: int) -> bool:
        return functions.holding(file, line) in reached

    originals = [("as asked", asked, flow(asked))]
    trail = originals[0][2].annotated.graph.trail
    assert trail is not None  # asked for
    ran = {key(call.file, call.function) for call in trail.activations}
    functions = Functions.of(_classes(model), ran, accepted, objects=objects)
    texts, reached = functions.texts(), functions.reached(trail)
    for said, scenario in other_scenarios(asked):
        with suppress(CaptureError):  # the model does not run so: there is nothing to keep
            originals.append((said, scenario, flow(scenario)))

    def at(sizes: Sizes) -> Graph | None:
        with suppress(CaptureError):  # the model does not take that
            return graph(asked, resized((args, kwargs or {}), sizes))
        return None

    at_sizes, batch = capture_resized(originals[0][2], lambda wanted: [*map(at, wanted)])
    decided = deciding(originals[0][2], rulebook, Faults())
    made, kernels, unplaced = put(
        originals, decided, rulebook, editable, name, children, at_sizes, batch, least
    )
    holding = (functions.holding(e.file, e.lines[0]) for each in made.puts for e in each.edits)
    changed = {this for this in holding if this is not None}
    texts |= {str(path): text for path, text in made.after.items() if path in made.before}
    return PlacedKernels(
        functions, changed, texts, made, kernels, unplaced, originals, decided, at_sizes
    )


def _classes(model: torch.nn.Module) -> list[type]:
    """Classes of the model's modules, but for torch's."""
    every = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    return [cls for cls in every if not cls.__module__.startswith("torch.")]


def _put_in(model: torch.nn.Module, found: PlacedKernels, name: str) -> None:
    """Give every module whose class leads to an edited function a class with copies of the
    functions on the way.

    The copies have their originals' globals, in which two names are new: that of the kernels, and
    one for the edited functions that others name; and torch's, where a file does not import it.
    """
    functions, changed, callers = found.functions, found.changed, found.callers
    copies = Copies(dict(_codes(found.texts, callers, changed, name)))
    loaded = {
        k.entry: vars(load_module(k.text, process_folder(), f"fused_{name}.{k.entry}"))[k.entry]
        for k in found.kernels
    }
    for this in changed | callers.keys():
        names = functions.found[this].__globals__
        names[f"fused_{name}"] = SimpleNamespace(**loaded)
        names.setdefault("torch", torch)  # guards name it
        renamed_to = names.setdefault(f"edited_{name}", SimpleNamespace())
        vars(renamed_to).update({n: copies.of(v) for n, v in callers.get(this, {}).items()})
    edited: dict[type, dict[str, Any]] = {}
    for (cls, attribute), value in functions.attributes.items():
        copied = copies.of(value)
        if copied is not value:
            edited.setdefault(cls, {})[attribute] = copied
    classes: dict[type, type] = {}
    for module in model.modules():
        cls = type(module)
        if cls not in classes:
            attributes: dict[str, Any] = {}
            for base in reversed(cls.__mro__):
                attributes |= edited.get(base, {})
                plain = vars(base).keys() - edited.get(base, {}).keys()
                attributes = {each: a for each, a in attributes.items() if each not in plain}
            classes[cls] = _derived(cls, attributes) if attributes else cls
        module.__class__ = classes[cls]


def _codes(
    texts: Mapping[str, str],
    callers: Mapping[Key, Mapping[str, Any]],
    changed: set[Key],
    name: str,
) -> Iterator[tuple[Key, CodeType]]:
    """Yield the functions that change, as edited; tracebacks show the text."""
    for file in dict.fromkeys(file for file, _ in (*changed, *callers)):
        names = {
            qualname: {each: f"edited_{name}.{each}" for each in named}
            for (at, qualname), named in callers.items()
            if at == file
        }
        text = renamed(texts[file], names)
        shown = f"<{file} with {name}>"
        linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
        for code in compiled(text, shown):
            if (file, code.co_qualname) in changed | callers.keys():
                yield (file, code.co_qualname), code


def plain_class(cls: type) -> type:
    """Class that a class with edited methods was derived from; any other class is returned
    as it is."""
    return next(each for each in cls.__mro__ if not issubclass(each, Unannounced))


def _derived(cls: type, attributes: Mapping[str, Any]) -> type:
    """Class that runs edited methods, and looks and pickles as the class that it is derived
    from."""
    plain: Any = plain_class(cls)

    def reduce(self: Any, protocol: Any) -> Any:
        """Pickle as an instance of the class that can be imported."""
        _, _, *state = plain.__reduce_ex__(self, max(protocol, 2))
        return (object.__new__, (plain,), *state)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        made = plain.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    own: dict[str, Any] = {"__reduce_ex__": reduce}
    if not hasattr(cls, "__deepcopy__"):
        own["__deepcopy__"] = deepcopy
    return derived(cls, {**own, **attributes})
