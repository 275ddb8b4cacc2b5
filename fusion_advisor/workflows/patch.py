"""Workflow of `patch`: from the captures of a model to edits of its source that hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fusion_advisor.codegen.header import Stamp, does, stamped
from fusion_advisor.codegen.kernel_package import (
    ASKING,
    Home,
    home_of,
    kernels_of,
    package_name,
    read_package,
)
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.frontend.child import capture, prepared
from fusion_advisor.fusion.components import group
from fusion_advisor.fusion.decide import Decision, deciding
from fusion_advisor.fusion.findings import Finding, Identified, claimed, fuse, identify, step_us
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.fusion.lower import boundary, lower_region
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.graph import Graph, Rewrite, Source
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.ir.scenario import Moved, Request, Scenario, Sizes
from fusion_advisor.ir.source_trace import Trail
from fusion_advisor.measure.search import Searcher, SearchResult, tuning_file
from fusion_advisor.report.assemble import Proof
from fusion_advisor.report.formats import wording
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.sourcepatch.editing.inline import inline, require_model
from fusion_advisor.sourcepatch.editing.outline import always_eager
from fusion_advisor.sourcepatch.editing.sequential import spelled_out
from fusion_advisor.sourcepatch.editing.sources import Sources
from fusion_advisor.sourcepatch.equivalence import difference, missing_launch
from fusion_advisor.sourcepatch.given import GivenNumbers, asked_of_modules, given_numbers
from fusion_advisor.sourcepatch.guards import Other
from fusion_advisor.sourcepatch.library_call import in_dtypes, operator
from fusion_advisor.sourcepatch.other_sizes import (
    ResizedModel,
    Serving,
    alike,
    capture_resized,
    variations,
    widened,
)
from fusion_advisor.sourcepatch.placement import (
    Patch,
    Placement,
    launched,
    patch,
    replaced_nodes,
    together,
)
from fusion_advisor.sourcepatch.trial import Runs, Trial, run_trial, run_trial_of_file
from fusion_advisor.support.errors import CaptureError, UsageError
from fusion_advisor.support.files import tree_of
from fusion_advisor.verify.driver import Provers, criterion_of, holds, provers, verify
from fusion_advisor.workflows.analyze import (
    Listener,
    Silent,
    emit_group,
    emit_groups,
    search_kernel,
    stamp_of,
)
from fusion_advisor.workflows.rewrites import finding_rewrites

Tried = tuple[dict[str, str], str]
"""Errors of a patched model by scenario, and how it was run on numbers."""
Captured = Callable[[str, Scenario, str | None, Moved | None], Graph]


@dataclass(frozen=True)
class Unplaced:
    """Accepted launches that a patch leaves as they are: what they compute, the line of the first,
    what their kernels would save beyond what is placed of them, us, and why."""

    computes: str
    place: Source | None
    saved_us: float
    why: str


@dataclass(frozen=True)
class Patched:
    """Patch that held in every scenario that it was tried in, or why it did not.

    `diff` and `model_new` (the text of a file with a class `ModelNew`) are empty where they were
    not asked for, or where no group could be put into the source. `unplaced` says of accepted sets,
    by their launches, why the source cannot express them. `free_us` is the saving of the groups if
    the source could express every cut, `saved_us` the saving of the patch, `step_us` the time of a
    step in eager mode. `package` names the
    kernels that existed before; empty where there were none. `ran` says how the model of the diff
    was run on numbers beside the original, or why not, `new_ran` that of `model_new`.
    """

    patch: Patch
    diff: str
    model_new: str
    root: Path
    tried: tuple[str, ...]
    wrong: Mapping[str, str]
    unplaced: Mapping[str, str]
    free_us: float
    saved_us: float
    package: str = ""
    ran: str = ""
    new_ran: str = ""
    searches: Mapping[str, SearchResult] = field(default_factory=dict[str, SearchResult])
    """Results of searches, by the kernel's name."""
    backward: Mapping[str, str] = field(default_factory=dict[str, str])
    """Cost of the backward of a kernel, in words, by the kernel's name; none of a kernel without
    one."""
    rewrites: tuple[Rewrite, ...] = ()
    """Places of the source that mean the same written otherwise, which no patch does: its proof
    holds a model to the launches that it had."""
    left: tuple[Unplaced, ...] = ()
    """Groups that are not placed, or in parts alone, those that save most first."""
    step_us: float = 0.0


STAGES = ("capture", "group", "emit", "verify", "try", "report")
"""Stages of `patch_model`, in order; a search follows `verify` where one is asked for."""


def source_of(model: str) -> Path:
    """File of MODEL that is edited. Raises UsageError where there is none."""
    if model.startswith("hf:"):
        raise UsageError(
            f"patch {model}: the source of transformers is not yours; fusion_advisor.apply(model) "
            "runs the kernels in it, fusion_advisor.export(model, folder, inputs) writes them down"
        )
    file = Path(model.partition(":")[0])
    if file.suffix != ".py":
        raise UsageError(f"patch {model}: only a model in a .py file has a source")
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    return file


def tree_for(model: str, root: str | Path | None) -> Path:
    """Tree that may be edited: the one asked for, else MODEL's git tree. Raises UsageError where
    MODEL is not in it."""
    file = source_of(model)
    tree = Path(root or tree_of(file)).resolve()
    if not file.resolve().is_relative_to(tree):
        raise UsageError(f"--root {tree}: {file} is not in it")
    return tree


def capturer(request: Request) -> Captured:
    """Function that captures models for a patch, in children under the limits of a request. The
    model as asked is looked at for rewrites, too."""

    def captured(
        model: str, scenario: Scenario, references: str | None, moved: Moved | None
    ) -> Graph:
        as_asked = (model, scenario, references, moved) == (
            request.model, request.scenario, None, None,
        )  # fmt: skip
        return capture(
            model, scenario, request.limits, request.debug,
            trail=True, references=references, moved=moved,
            then=finding_rewrites(request.rules) if as_asked else None,
        )  # fmt: skip

    return captured


def patch_model(
    request: Request,
    root: Path,
    listener: Listener | None = None,
    captured: Captured | None = None,
    *,
    diff: bool = True,
    model_new: bool = False,
    operators: bool = False,
    searcher: Searcher | None = None,
) -> Patched:
    """Patch a model's file: make a diff that puts the kernels of its groups into it, a file with a
    class `ModelNew` that has them in it, or both.

    With `operators` PyTorch's own ops are put where one computes the same, and no kernels. `root`
    is the tree that a diff may edit. `captured` gives the graph of a model with its trail, with the
    kernels of a package as their references, and with imports from one folder redirected to another
    (default: `capturer`).

    The partition is solved for the cuts that the source can express: the tree's, or without a diff
    the model's own file. A package of kernels that exists keeps them; for new kernels a `searcher`
    finds the fastest configuration. Raises UsageError and CaptureError as `analyze` does.
    """
    listener, asks = listener or Silent(), captured is None
    captured = captured or capturer(request)
    model = Path(request.model.partition(":")[0]).resolve()
    if model_new:
        require_model(model.read_text(encoding="utf-8"))
    rulebook = load_rulebook(request.rules)
    device, chosen = choose_device(request.device, rulebook, request.gpus)

    def flow_of(
        model: str,
        scenario: Scenario,
        moved: Moved | None = None,
        references: str | None = None,
    ) -> Dataflow:
        return dataflow(captured(model, scenario, references, moved), device)

    with (
        prepared() if asks else nullcontext(),
        provers(
            device.capability, rulebook.verify,
            check=request.verify, compile=request.compile and not operators,
            where="auto" if searcher else "interpreter",
        ) as children,
        ThreadPoolExecutor(2) as pool,
    ):  # fmt: skip
        listener.stage("capture")
        seen = capture_everywhere(
            request.scenario, lambda scenario: captured(request.model, scenario, None, None),
            device, pool, rows_of_one=not operators,
        )  # fmt: skip
        originals, originals_at_sizes = [*seen.originals], seen.at_sizes
        packages = _trail(seen.originals[0][2]).packages
        home = home_of(model, packages if diff else {}, root)
        folder = home.folder
        standing = read_package(folder)
        within = _within(root if diff else model, folder)
        placement = _placement(originals, within, seen.resized, operators=operators)
        if not (operators or request.pairs):
            others = [each.flow for each in seen.resized if alike(seen.flow, each.flow)]
            seen = seen.given(given_numbers(placement.sources, seen.flow, others))
        flow, at_sizes, batch = seen.flow, seen.resized, seen.batch
        flow = replace(flow, returned=flow.returned | flow.unread())
        if not operators:
            flow = replace(
                flow,
                standing=placement.sources.spans(flow.nodes),
                asked=asked_of_modules(placement.sources, flow),
            )
        listener.assumed((chosen, *flow.annotated.graph.assumed))
        listener.stage("group")
        decided = deciding(flow, rulebook, Faults(strict=request.strict))
        everything = fuse(flow, rulebook, decided=decided).groups
        if not (operators or request.pairs):  # no backward is that of several results
            every = (each for finding in everything for each in finding.instances)
            flow.called_together = replace(placement, flow=flow).called_together(every)
        at = widened(flow, None if operators or batch is None else batch.flow, rulebook)
        placement = replace(
            placement,
            flow=flow,
            resized=at_sizes,
            batch=batch,
            general=at,
            given=seen.numbers,
            decided=decided,
            serving=None if operators else Serving(at, rulebook),
        )
        all_found = _agreed(placement, decided, rulebook, folder.name)
        share = rulebook.patch.share.value if request.least.share is None else request.least.share
        found, small = _worthwhile(placement, all_found, request.least.saved_us, share)
        found = _named_apart(
            found, kernels_of(standing), lambda finding: _written(request, at, finding, rulebook)
        )
        general = tuple(replace(each, decision=at(each.decision)) for each in found.groups)
        listener.stage("emit")
        full_size = searcher is not None and bool(request.gpus)
        each = emit_groups(request, replace(found, groups=general), rulebook, full_size=full_size)
        kernels = {proof.kernel.name: proof.kernel for proof in each.values() if proof.kernel}
        listener.stage("verify")
        only_dtype: frozenset[str] = frozenset()
        stamps: dict[str, Stamp] = {}
        searches: dict[str, SearchResult] = {}
        idle: dict[str, str] = {}
        trained: dict[str, str] = {}
        if operators:
            proven, only_dtype = _proven_operators(found, kernels, children)
        else:
            checks = passing_kernels(kernels, children)
            proofs = {name: Proof(kernels[name], check=check) for name, check in checks.items()}
            if request.pairs:
                from fusion_advisor.workflows.pairs import Occurrences, for_training  # torch, too

                groups = {f.name: Occurrences(f.decision, f.instances) for f in general}
                groups = {name: group for name, group in groups.items() if name in proofs}
                proofs, idle = for_training(groups, proofs, children, rulebook)
                trained = {n: p.why for n, p in proofs.items() if p.kernel and p.kernel.gradients}
            if searcher:
                listener.stage("search")
                new = [f for f in general if f.name in proofs.keys() - kernels_of(standing).keys()]
                proofs |= {
                    f.name: search_kernel(f, proofs[f.name], searcher, children, rulebook)
                    for f in new
                }
            proven = {name: proof.kernel for name, proof in proofs.items() if proof.kernel}
            placement = replace(placement, backward_held=_backward_held(found, proven))
            stamps = {
                name: stamp_of(request, proof.check, rulebook) for name, proof in proofs.items()
            }
            searches = {name: proof.searched for name, proof in proofs.items() if proof.searched}
        signed = proven | {
            name: replace(proven[name], text=stamped(proven[name].text, stamp))
            for name, stamp in stamps.items()
        }
        listener.stage("try")
        unfused = partial(flow_of, references=folder.name)
        originals += originals_at_sizes
        if standing and found.groups:
            # operators so far, they are their references in what is compared
            asked = [pool.submit(unfused, request.model, each) for _, each, _ in originals]
            originals = [
                (said, scenario, answer.result())
                for (said, scenario, _), answer in zip(originals, asked, strict=True)
            ]
        package = "" if operators else folder.relative_to(root).as_posix()
        runs = runs_of(request, flow, package, rulebook, at_sizes, proven.values())
        in_file = Home(model.parent / package_name(model))
        within = replace(placement, editable=_within(model, folder))

        def put(groups: Sequence[Finding]) -> Patch:
            return patch(placement, groups, proven, home, only_dtype, standing, stamps)

        def put_alone(groups: Sequence[Finding]) -> Patch:
            return patch(within, groups, proven, in_file, only_dtype)

        def in_tree(edited: Patch, trials: list[Trial], numbers: Runs | None) -> Tried:
            return run_trial(
                edited.diff(root), edited.after, root, request.model, trials, unfused, pool, numbers
            )

        def by_itself(edited: Patch, trials: list[Trial], numbers: Runs | None) -> Tried:
            file = _model_new(edited, signed, model)
            return run_trial_of_file(file, model, trials, flow_of, pool, numbers)

        trials = partial(_trials, placement, originals, proven, home, runs)
        made, wrong, ran = (
            _holding(found.groups, put, trials, in_tree) if diff else (put(found.groups), {}, "")
        )
        written = {file.stem: text for file, text in made.after.items() if file.parent == folder}
        made.after |= tuning_file(folder, searches, written)
        made.refused |= small | {f.id: idle[f.name] for f in found.groups if f.name in idle}
        new_ran, own = "", Patch()
        if model_new:
            own, wrong_alone, new_ran = _holding(found.groups, put_alone, trials, by_itself)
            wrong |= {f"ModelNew {said}": what for said, what in wrong_alone.items()}
            left = {k: why for k, why in own.refused.items() if k not in made.refused}
            made.refused |= {f"{name} of ModelNew": why for name, why in left.items()}
        text, alone = made.diff(root) if diff else "", _model_new(own, signed, model)
    listener.stage("report")
    saved = sum(put.finding.saved_us_total for put in made.puts)
    return Patched(
        made, text, alone, root, tuple(said for said, _, _ in originals), wrong,
        _unplaced(flow, found),
        max(saved, sum(finding.saved_us_total for finding in everything)), saved,
        folder.name if standing else "", ran, new_ran, searches, trained,
        flow.annotated.graph.rewrites, tuple(_left_out(placement, everything, all_found, made)),
        sum(step_us(flow, everything).values()),
    )  # fmt: skip


@dataclass(frozen=True)
class CapturedModel:
    """Model as it ran: as asked, in the other scenarios that a patch must leave as they are, and at
    other sizes; `batch` is the one of these at a larger batch. The first of `originals`, each with
    its name in words, is as asked."""

    originals: tuple[tuple[str, Scenario, Dataflow], ...]
    resized: tuple[ResizedModel, ...]
    batch: ResizedModel | None
    numbers: GivenNumbers | None = None
    """The numbers that kernels are given; None where all are constants."""

    def given(self, numbers: GivenNumbers) -> CapturedModel:
        """The model with numbers as arguments of its kernels, in each graph that launches the
        same."""
        (said, asked, flow), *others = self.originals
        at_sizes = {
            id(each): replace(each, flow=numbers.put_into(each.flow))
            if alike(flow, each.flow)
            else each
            for each in self.resized
        }
        resized = tuple(at_sizes[id(each)] for each in self.resized)
        flow = numbers.put_into(flow)
        flow = replace(flow, varied=variations(flow, resized))
        batch = at_sizes[id(self.batch)] if self.batch else None
        return CapturedModel(((said, asked, flow), *others), resized, batch, numbers)

    @property
    def flow(self) -> Dataflow:
        """Data flow as asked, with the dimensions that were seen to vary."""
        return self.originals[0][2]

    @property
    def at_sizes(self) -> list[tuple[str, Scenario, Dataflow]]:
        """Scenario as asked at each of the other sizes."""
        asked = self.originals[0][1]
        return [(each.said, replace(asked, sizes=each.sizes), each.flow) for each in self.resized]


def capture_everywhere(
    asked: Scenario,
    captured: Callable[[Scenario], Graph],
    device: Device,
    pool: ThreadPoolExecutor,
    *,
    rows_of_one: bool = True,
) -> CapturedModel:
    """Capture a model in all scenarios and at all sizes that it takes. Without `rows_of_one`, sizes
    at which a dimension shrinks to one element are left out. Raises CaptureError where the model
    cannot be captured as asked."""

    def flow_of(scenario: Scenario) -> Dataflow:
        return dataflow(captured(scenario), device)

    def resized(sizes: Sizes) -> Graph | None:
        with suppress(CaptureError):  # the model does not take that
            return captured(replace(asked, sizes=sizes))
        return None

    flow = flow_of(asked)
    others = [
        (said, scenario, pool.submit(flow_of, scenario))
        for said, scenario in _other_scenarios(asked, _other_dtype(flow))
    ]
    at_sizes, batch = capture_resized(flow, lambda wanted: [*pool.map(resized, wanted)])
    if not rows_of_one:  # PyTorch's own refuse to broadcast a weight along a row of one element
        at_sizes = [each for each in at_sizes if not each.has_one]
    flow = replace(flow, varied=variations(flow, at_sizes))
    originals = [("as asked", asked, flow)]
    for said, scenario, answer in others:
        with suppress(CaptureError):  # the model does not run so: there is nothing to keep
            originals.append((said, scenario, answer.result()))
            if scenario.dtype != asked.dtype and _keeps(originals[-1][2], scenario):
                cast = replace(scenario, cast=True)
                originals.append((f"cast to {scenario.dtype}", cast, flow_of(cast)))
    return CapturedModel(tuple(originals), tuple(at_sizes), batch)


def runs_of(
    request: Request,
    flow: Dataflow,
    package: str,
    rulebook: Rulebook,
    resized: Sequence[ResizedModel],
    kernels: Iterable[Kernel],
) -> Runs | None:
    """Runs of a patch's model on numbers: at small sizes first, since the interpreter takes its
    time for each program. None where nothing is to be checked."""
    if not request.verify:
        return None
    numbers, limit = rulebook.run, request.limits.memory_bytes
    held, given = _given_bytes(flow), _given_dtypes(flow)
    too_large = ""
    if held > numbers.memory.value * limit:
        too_large = (
            f"weights and inputs take {wording.size(held)}, more than {numbers.memory.value:g} of "
            "--memory"
        )
    rows, length = numbers.rows.count, numbers.length.count
    own, short = ((1, 0), (rows, 0)), ((1, length), (rows, length))
    sizes = (short, own, ((0, 0),))
    return Runs(
        sizes, request.scenario, package, numbers.seeds.count,
        numbers.timeout.value, criterion_of(rulebook.verify),
        tuple(dtype for dtype in numbers.dtypes if given and dtype != given[0]), too_large,
        tuple(
            (each.said, each.sizes)
            for each in resized
            if each.beyond_rows and not _has_more(each.flow, flow)
        ),
        max((case.summed for kernel in kernels for case in kernel.cases), default=0), bool(resized),
        request.pairs,
    )  # fmt: skip


_FAULTS = 4
"""Groups that are looked for, at most, without which a patch holds."""


def _holding(
    groups: Sequence[Finding],
    put: Callable[[Sequence[Finding]], Patch],
    trials: Callable[[Patch, Collection[str]], Iterable[tuple[Patch, list[Trial], Runs | None]]],
    run: Callable[[Patch, list[Trial], Runs | None], Tried],
) -> tuple[Patch, dict[str, str], str]:
    """Put groups into the source, but for those with which a trial finds something wrong; what is
    wrong still, and how it ran. One at fault is the last of the fewest first groups of which what
    was found to be wrong is wrong."""

    def tried(made: Patch, only: Collection[str] = ()) -> Tried:
        wrong, ran = dict[str, str](), ""
        for each in trials(made, only) if made.puts else ():
            found, ran = run(*each)
            wrong |= found
        return wrong, ran

    left = dict[str, str]()
    while True:
        made = put(groups)
        made.refused |= left
        wrong, ran = tried(made)
        if not wrong or len(left) == _FAULTS:
            return made, wrong, ran
        holds, fails = 0, len(groups)
        while fails - holds > 1:
            half = (holds + fails) // 2
            found, _ = tried(put(groups[:half]), wrong.keys())
            holds, fails, wrong = (holds, half, found) if found else (half, fails, wrong)
        said, what = next(iter(wrong.items()))
        left[groups[fails - 1].id] = f"with it the patched model is wrong {said}: {what}"
        groups = [*groups[: fails - 1], *groups[fails:]]


_KEPT = "with the statements that guards keep"


def _trials(
    placement: Placement,
    originals: Sequence[tuple[str, Scenario, Dataflow]],
    kernels: Mapping[str, Kernel],
    home: Home,
    runs: Runs | None,
    made: Patch,
    only: Collection[str],
) -> Iterator[tuple[Patch, list[Trial], Runs | None]]:
    """Yield the patches with the trials that must hold, and with the runs that must: all, or `only`
    some by name. With the references of its kernels a patch is the original, and so it is with the
    statements that its guards keep, whatever they ask. A patch with PyTorch's ops is made of the
    same edits as a patch with kernels that held, and launches all that it does not replace as
    before; the ops themselves were compared with the references."""
    equal = [Trial(said, at, partial(difference, flow)) for said, at, flow in originals]
    rows = list[tuple[Patch, list[Trial]]]()
    if placement.operators:
        findings = [put.finding for put in made.puts]
        edits = [edit for put in made.puts for edit in put.edits]
        rows.append((patch(replace(placement, operators=False), findings, kernels, home), equal))
        seen = [placement.sources, *(other.sources for other in placement.others), *placement.seen]
        launched = [
            Trial(said, at, partial(missing_launch, flow, gone=replaced_nodes(sources, edits)))
            for (said, at, flow), sources in zip(originals, seen, strict=True)
        ]
        rows.append((made, launched))
    else:
        asking = {p: always_eager(t) for p, t in made.after.items() if p.name == ASKING}
        if asking:
            keeping = replace(equal[0], said=_KEPT)
            rows.append((replace(made, after=made.after | asking), [keeping]))
        rows.append((made, equal))
    known = {trial.said for _, trials in rows for trial in trials}
    for edited, trials in rows:
        some = [trial for trial in trials if not only or trial.said in only]
        numbers = runs if edited is made and (not only or not known.issuperset(only)) else None
        if some or numbers:
            yield edited, some, numbers


def _proven_operators(
    found: Identified, kernels: Mapping[str, Kernel], children: Provers
) -> tuple[dict[str, Kernel], frozenset[str]]:
    """Kernels in whose place a PyTorch op is as exact, and the names of those for which that holds,
    or is known to hold, in the captured dtypes alone."""
    proven: dict[str, Kernel] = {}
    narrow: set[str] = set()
    for finding in found.groups:
        spelling = exact(finding.decision.subject, finding.pattern)
        kernel = kernels.get(finding.name)
        if spelling is None or kernel is None:
            continue
        called = operator(kernel, spelling)
        checks = [check for check, _ in verify([called, *in_dtypes(called)], children)]
        first, *others = (check is None or check.passed for check in checks)
        if first:
            proven[finding.name] = kernel
        if not children.check or not all(others):
            narrow.add(finding.name)
    return proven, frozenset(narrow)


def _backward_held(
    found: Identified, kernels: Mapping[str, Kernel]
) -> dict[object, tuple[tuple[int, int], ...]]:
    """Dimensions in which kernels' backward serves one size, by the forms of their groups."""
    groups = [(f.decision.subject.expressed, kernels.get(f.name)) for f in found.groups]
    return {group.form: kernel.held for group, kernel in groups if group and kernel and kernel.held}


def _model_new(made: Patch, kernels: Mapping[str, Kernel], model: Path) -> str:
    """Patch of the model's own file as a file with a class `ModelNew`; empty without a group."""
    texts = {put.kernel: kernels[put.kernel].text for put in made.puts}
    package = package_name(model)
    asking = made.after.get(model.parent / package / ASKING, "")
    return inline(made.after[model], package, texts, asking) if texts else ""


def _has_more(there: Dataflow, here: Dataflow) -> bool:
    """Whether a model's inputs and weights are larger: then its graph is compared, and it
    is not run."""
    return _given_bytes(there) > _given_bytes(here)


def _given_bytes(flow: Dataflow) -> int:
    """Bytes of a model's weights and inputs."""
    tensors = (t for node in flow.nodes if node.kind != "call" for t in node.outputs if t)
    return sum(tensor.bytes for tensor in tensors)


def _other_dtype(flow: Dataflow) -> str:
    """Dtype that a model may be asked in, and that none of its weights and inputs has."""
    known = ("bfloat16", "float32", "float16", "float64")
    return next(dtype for dtype in known if dtype not in _given_dtypes(flow)[:3])


def _keeps(flow: Dataflow, scenario: Scenario) -> bool:
    """Whether a model that is built for a dtype has weights of floats in another one."""
    return any(dtype != scenario.dtype for dtype in _given_dtypes(flow))


def _given_dtypes(flow: Dataflow) -> list[str]:
    """Distinct float dtypes of a model's weights and inputs, in their order."""
    tensors = (node.out.dtype for node in flow.nodes if node.kind != "call" and node.outputs)
    return [*dict.fromkeys(dtype for dtype in tensors if "float" in dtype)]


def _other_scenarios(asked: Scenario, dtype: str) -> list[tuple[str, Scenario]]:
    """Scenarios that a patch must leave as they are beside the scenario asked for; `dtype` is
    another one that the model can be built in."""
    mode = "train" if asked.mode == "eval" else "eval"
    found = [
        (f"in {mode} mode", replace(asked, mode=mode)),
        (f"in {dtype}", replace(asked, dtype=dtype)),
    ]
    if asked.autocast is None:
        found.append(("under autocast", replace(asked, autocast="bfloat16")))
    return found


def passing_kernels(kernels: Mapping[str, Kernel], children: Provers) -> dict[str, Check | None]:
    """Kernels that passed each check and compile that was asked for, with their checks."""
    answers = verify([*kernels.values()], children)
    return {
        name: check
        for name, (check, compiled) in zip(kernels, answers, strict=True)
        if holds(check, compiled)
    }


def _named_apart(
    found: Identified,
    standing: Mapping[str, str],
    written: Callable[[Finding], Kernel | None],
) -> Identified:
    """Groups under the names of existing kernels that compute the same as the ones that are
    `written` for them; the others under names that no existing kernel has."""
    unused, taken = {*standing}, {*standing}

    def serves(finding: Finding, name: str) -> bool:
        kernel = written(replace(finding, name=name))
        return kernel is not None and does(kernel.text) == does(standing[name])

    def named(finding: Finding) -> Finding:
        own = rf"{finding.computation}(_[0-9a-f]+)?"  # earlier versions ended names otherwise
        alike = sorted(name for name in unused if re.fullmatch(own, name))
        name = next((name for name in alike if serves(finding, name)), "")
        unused.discard(name)
        return replace(finding, name=name or claimed(finding.computation, taken))

    return replace(found, groups=[*map(named, found.groups)])


def _written(
    request: Request, at: Callable[[Decision], Decision], finding: Finding, rulebook: Rulebook
) -> Kernel | None:
    """Kernel of a group, written for the sizes of `at`, with its backward where that is asked for;
    None where there is none."""
    general = replace(finding, decision=at(finding.decision))
    kernel = emit_group(general, rulebook, full_size=False)
    if isinstance(kernel, str):
        return None
    if not request.pairs:
        return kernel
    from fusion_advisor.workflows.pairs import Occurrences, training_kernel  # torch, too

    group = Occurrences(general.decision, general.instances)
    return training_kernel(group, kernel, rulebook)


def _worthwhile(
    placement: Placement, found: Identified, saved_us: float, share: float
) -> tuple[Identified, dict[str, str]]:
    """Groups that save enough to be put into the source, all together that the same lines make;
    and of the others, by id, what they save."""
    total = sum(step_us(placement.flow, found.groups).values())
    families = list[tuple[set[object], list[Finding]]]()
    for each in found.groups:
        lines, together = placement.lines_of(each), [each]
        for family in [family for family in families if family[0] & lines]:
            families.remove(family)
            lines, together = lines | family[0], [*family[1], *together]
        families.append((lines, together))
    small: dict[str, str] = {}
    for _, together in families:
        saved = sum(each.saved_us_total for each in together)
        said = ""
        if saved < saved_us:
            said = f"it saves {wording.time(saved)}, the threshold is {wording.time(saved_us)}"
        elif saved < share * total:
            said = f"it saves {saved / total:.2%} of the step, the threshold is {share:.2%}"
        small |= {each.id: said for each in together if said}
    return replace(found, groups=[each for each in found.groups if each.id not in small]), small


def _left_out(
    placement: Placement, everything: Sequence[Finding], found: Identified, made: Patch
) -> list[Unplaced]:
    """Remainder of all groups that would be fused, each without what the kernels that are placed
    save of it: together what is accepted and not placed. A kernel that spans
    several counts for each by the time that eager takes for what it has of that."""
    flow = placement.flow
    rows = [(finding, instance) for finding in everything for instance in finding.instances]
    owner = {launch: n for n, (_, instance) in enumerate(rows) for launch in instance}
    lost = [finding.saved_us for finding, _ in rows]
    for put in made.puts:
        for instance in put.finding.instances:
            spanned = Counter(owner[launch] for launch in instance if launch in owner)
            us = {of: rows[of][0].unfused_us * n / len(rows[of][1]) for of, n in spanned.items()}
            for of, own in us.items():
                lost[of] -= put.finding.saved_us * own / sum(us.values())
    refused = {
        launch: why
        for finding in found.groups
        if (why := made.refused.get(finding.id))
        for instance in finding.instances
        for launch in instance
    }
    left: dict[tuple[str, str], Unplaced] = {}
    for (finding, instance), us in zip(rows, lost, strict=True):
        if round(us, 3) <= 0:  # sums leave what is less than a nanosecond
            continue
        border = boundary(flow, instance)
        why = placement.unexpressed(finding.decision, border, lower_region(flow, border))
        why = why or next((refused[n] for n in instance if n in refused), "another cut is placed")
        place = next((at for n in instance if (at := flow.nodes[n].source)), None)
        known = left.setdefault((finding.id, why), Unplaced(finding.computes, place, 0.0, why))
        left[finding.id, why] = replace(known, saved_us=known.saved_us + us)
    return sorted(left.values(), key=lambda row: -row.saved_us)


def _unplaced(flow: Dataflow, found: Identified) -> dict[str, str]:
    """Reasons why the source cannot express accepted sets, by their launches; for sets that could
    not be judged, the fault of the tool."""
    return {
        ", ".join(flow.nodes[number].name for number in each.decision.subject.launches): (
            each.decision.unplaced or each.decision.fault
        )
        for each in found.candidates
        if each.decision.unplaced or each.decision.fault
    }


_ROUNDS = 4
"""Partitions that are tried, each without what the last one could not put."""


def _agreed(
    placement: Placement,
    decided: Callable[[Iterable[int]], Decision],
    rulebook: Rulebook,
    package: str,
) -> Identified:
    """Partition, solved for the cuts that the source can express beside each other: a line serves
    all of its runs, so that a group may be refused which each run could have alone. It is solved
    again without those, or, where they save more together than the group that keeps them out, with
    nothing but their like in its place. The solution of which most is placed counts."""
    flow = placement.flow
    known = dict[tuple[int, ...], Decision]()
    refused = dict[tuple[int, ...], str]()
    alone = dict[int, list[str]]()
    """Ops of the one group that a launch may be in."""

    def ops(launches: Iterable[int]) -> list[str]:
        return sorted(flow.nodes[number].op for number in launches)

    def judged(launches: Iterable[int]) -> Decision:
        launches = tuple(launches)
        key = launched(flow, launches)
        if key not in known:
            known[key] = placement.judged(decided(launches))
        why, own = refused.get(key, ""), ops(key)
        if any(alone.get(number, own) != own for number in key):
            why = "other calls of its lines save more with another group"
        return replace(known[key], unplaced=why) if why else known[key]

    found = list[tuple[float, Identified]]()
    for _ in range(_ROUNDS):
        cut = _cut(placement, judged, rulebook)
        made = together(placement, cut.groups, package)
        found.append((sum(put.finding.saved_us_total for put in made.puts), cut))
        lost = sum(each.saved_us_total for each in cut.groups if each.id in made.refused)
        if lost <= rulebook.patch.share.value * sum(step_us(flow, cut.groups).values()):
            break  # as much as lines that stay may save
        out = dict[str, list[Finding]]()
        for each in cut.groups:
            if each.id in made.refused:
                out.setdefault(made.kept.get(each.id, ""), []).append(each)
        for each in cut.groups:
            kept = out.get(each.name, [])
            if sum(other.saved_us_total for other in kept) > each.saved_us_total:
                most = max(kept, key=lambda other: other.saved_us_total)
                own = ops(launched(flow, most.instances[0]))
                alone |= {number: own for one in each.instances for number in launched(flow, one)}
                del out[each.name]
        refused |= {
            launched(flow, instance): made.refused[each.id]
            for several in out.values()
            for each in several
            for instance in each.instances
        }
    return max(found, key=lambda each: each[0])[1]


def _cut(
    placement: Placement, judged: Callable[[Iterable[int]], Decision], rulebook: Rulebook
) -> Identified:
    """Partition, solved for the cuts that the source can express: none within what one expression
    launches, and what one call makes offered whole. What it makes together is cut together where
    the source can express that alone."""
    flow = placement.barred()
    flow.called_together = {
        launches: parts
        for launches, parts in flow.called_together.items()
        if judged(launches).accepted and not all(judged(part).accepted for part in parts)
    }
    grouping = group(
        flow,
        judged,
        rulebook,
        placement.kind,
        lambda launch: flow.nodes[launch].step,
        placement.around,
    )
    return identify(flow, grouping, rulebook)


def _within(root: Path, package: Path) -> Callable[[str, int], bool]:
    """Predicate: whether a file is the user's, in a tree, and none of the kernels."""

    def editable(file: str, line: int) -> bool:
        del line
        path = Path(file).resolve()
        ours = path.is_relative_to(package) or "site-packages" in path.parts
        return path.is_relative_to(root) and not ours

    return editable


def _placement(
    originals: Sequence[tuple[str, Scenario, Dataflow]],
    editable: Callable[[str, int], bool],
    resized: Sequence[ResizedModel],
    *,
    operators: bool,
) -> Placement:
    """Placement over the source as it ran in every scenario, the one asked for first, and at other
    sizes."""
    (_, asked, flow), *others = originals
    flows = [*(each for _, _, each in originals), *(each.flow for each in resized)]
    trails = [_trail(each) for each in flows]
    spelled = spelled_out(trails, editable)
    seen = [
        Sources(each.annotated.graph, spelled.trail(trail), spelled.files)
        for each, trail in zip(flows, trails, strict=True)
    ]
    sources, at_sizes = seen[: len(originals)], seen[len(originals) :]

    def differs(scenario: Scenario) -> Literal["mode", "dtype", "autocast"]:
        if scenario.mode != asked.mode:
            return "mode"
        return "autocast" if scenario.autocast != asked.autocast else "dtype"

    return Placement(
        sources[0],
        flow,
        editable,
        tuple(
            Other(seen, differs(scenario), scenario.mode == "train")
            for seen, (_, scenario, _) in zip(sources[1:], others, strict=True)
        ),
        operators=operators,
        resized=tuple(resized),
        seen=tuple(at_sizes),
    )


def _trail(flow: Dataflow) -> Trail:
    trail = flow.annotated.graph.trail
    assert trail is not None  # asked for
    return trail
