"""The outcome of a request, from the cache or anew, and the folder that `--out` names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_advisor.cli.commands.options import rulebook_of
from fusion_advisor.cli.commands.output import following, tell
from fusion_advisor.shipped.files import write_kernel
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import require_file, require_folder, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fusion_advisor.ir.graph import Graph
    from fusion_advisor.ir.scenario import Request
    from fusion_advisor.measure.search import Searcher, SearchResult
    from fusion_advisor.report.schema import Report
    from fusion_advisor.workflows.analyze import Analysis


@dataclass(frozen=True)
class AnalysisOutcome:
    """A report, the kernels' texts by their names, and the captured graph as JSON."""

    report: Report
    kernels: Mapping[str, str]
    graph: Mapping[str, Any]


def outcome_of(
    request: Request, verbose: bool, *, cached: bool, assumed: bool = True
) -> AnalysisOutcome:
    """Report, kernels and graph of a request, of a graph and proofs from the cache where it has
    them. Prints what was `assumed`; an empty `assumed` prints nothing."""
    from fusion_advisor.ci.cache import find_graph, keep_graph
    from fusion_advisor.frontend.child import dismiss
    from fusion_advisor.ir.frames import portable_path
    from fusion_advisor.support.codec import to_data
    from fusion_advisor.support.kept import cache_folder

    rulebook, folder = rulebook_of(request.rules), cache_folder()
    started = time.time()
    known = find_graph(folder, request, rulebook) if cached else None
    if known is not None:
        dismiss()
        tell(f"the model is as it was captured before: taken from {folder}; --no-cache runs again")
    if cached:
        request = replace(request, proofs=folder / "proofs")
    analysis = run_analysis(request, verbose, known=known, assumed=assumed, rewrites=True)
    graph = analysis.flow.annotated.graph
    texts = {kernel.name: kernel.text for kernel in analysis.kernels}
    alike = graph.naming(lambda file: portable_path(file, os.getcwd()))
    if cached and known is None:
        keep_graph(folder, request, rulebook, to_data(graph), graph.files, started)
    return AnalysisOutcome(analysis.report, texts, to_data(alike))


def run_analysis(
    request: Request,
    verbose: bool,
    searcher: Searcher | None = None,
    known: Graph | None = None,
    *,
    assumed: bool = True,
    rewrites: bool = False,
) -> Analysis:
    """Run the pipeline on a model that a child captures, or whose graph is known; with `rewrites`
    the child looks for those, too."""
    from fusion_advisor.frontend.child import capturing
    from fusion_advisor.workflows.rewrites import finding_rewrites

    capture = capturing(
        request.model, request.scenario, request.limits, request.debug,
        mask_elements=rulebook_of(request.rules).capture.mask_elements.count,
        then=finding_rewrites(request.rules) if rewrites else None,
    )  # fmt: skip
    with nullcontext(lambda: known) if known else capture as captured:
        from fusion_advisor.workflows.analyze import (  # while the child imports torch
            STAGES,
            analyze,
        )

        stages = (*STAGES, "search") if searcher else STAGES
        with following(stages, verbose=verbose, assumed=assumed) as listener:
            return analyze(request, captured, listener, searcher)


def prepare(request: Request, *, checks: bool) -> None:
    """Says once what this machine has to do with it: of a torch that nobody has tried, that kernels
    are not checked, and how to judge for the GPU here. UsageError for a torch that is too old."""
    from fusion_advisor.rulebook.local_gpu import (
        DEFAULT_DEVICE,
        choose_device,
        gpu_names,
        has_triton,
        require_torch,
        without_triton,
    )

    if newer := require_torch():
        tell(f"not tried with {newer}")
    if checks and not has_triton():
        tell(f"emitted, not checked: {without_triton()}")
    if request.device is None and not request.gpus and gpu_names():
        device, _ = choose_device(None, rulebook_of(request.rules), gpu_names())
        if device.name != DEFAULT_DEVICE:
            tell(f"the GPU here is an {device.title}: --device {device.name} judges for it")


def searcher_of(request: Request, *, search: bool) -> AbstractContextManager[Searcher | None]:
    """The search that `--search` asks for, on the GPU that is here; None without it."""
    if not search:
        return nullcontext()
    from fusion_advisor.measure.search import local_searcher

    return local_searcher(request.device, rulebook_of(request.rules))


def searched_lines(found: SearchResult | None) -> Iterator[str]:
    """Lines for the terminal on the outcome of a search."""
    if found is not None:
        said = f"not searched: {found.failure}" if found.failure else f"searched {found.summary}"
        yield f"    {said}"


def require_room(out: Path) -> None:
    """Raise UsageError, before any work is done, where `write_folder` could not write."""
    from fusion_advisor.report.formats import EXTENSIONS

    require_folder(out)
    require_folder(out / "kernels")
    for name in ("graph.json", *(f"report.{extension}" for extension in EXTENSIONS.values())):
        require_file(out / name)


def write_folder(out: Path, outcome: AnalysisOutcome) -> None:
    """Write the kernels and every format of the report, in place of an earlier run's."""
    from fusion_advisor.report.formats import EXTENSIONS, render

    write(out / "graph.json", dumps(outcome.graph))
    stale = _kernel_files(out)
    for name, text in outcome.kernels.items():
        write_kernel(out / "kernels" / f"{name}.py", text)
    for file in stale - {f"{name}.py" for name in outcome.kernels}:
        (out / "kernels" / file).unlink(missing_ok=True)
    for name, extension in EXTENSIONS.items():
        write(out / f"report.{extension}", render(outcome.report, name))


def _kernel_files(out: Path) -> set[str]:
    """The kernels that the report in a folder names: files of this tool, unlike others
    beside them."""
    from fusion_advisor.report.schema import load_report

    try:
        groups = load_report(out / "report.json").groups
    except UsageError:
        return set()  # no report, or none of this version: whose the files are is not known
    return {Path(group.kernel.file).name for group in groups if group.kernel.file}
