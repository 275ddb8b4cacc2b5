"""`analyze` and `emit`: MODEL in, a report and kernels out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.commands.options import (
    FAILED,
    FORMAT_NAMES,
    Baseline,
    FailOn,
    Ignore,
    Options,
    Redact,
    Search,
    Select,
    reviewing_options,
    rulebook_of,
    takes_options,
)
from fusion_advisor.cli.commands.outcome import (
    outcome_of,
    prepare,
    require_room,
    run_analysis,
    searched_lines,
    searcher_of,
    write_folder,
)
from fusion_advisor.cli.commands.output import asked_outputs, deliver, show, show_several, tell
from fusion_advisor.shipped.files import write_kernel
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import require_folder, tree_of, write

if TYPE_CHECKING:
    from fusion_advisor.ci.configuration import Settings
    from fusion_advisor.report.schema import Report


@takes_options
def analyze(
    options: Options,
    *,
    out: Annotated[Path | None, typer.Option(help="folder for kernels and all formats")] = None,
    format: Annotated[
        list[str] | None, typer.Option(help=f"{FORMAT_NAMES}, with =FILE into a file")
    ] = None,
    json: Annotated[str | None, typer.Option(help="the JSON report's file; - is stdout")] = None,
    baseline: Baseline = None,
    fail_on: FailOn = None,
    select: Select = None,
    ignore: Ignore = None,
    top: Annotated[int, typer.Option(help="rows of each list in the text", min=0)] = 10,
    with_graph: Annotated[
        bool, typer.Option("--with-graph", help="put the captured graph into the report")
    ] = False,
    redact: Redact = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="trace of the model (torch.profiler's .json or .json.gz): measured"
            " times beside predicted, and ranks by them"
        ),
    ] = None,
    cache: Annotated[
        bool, typer.Option(help="take graph and proofs of an earlier run of the unchanged model")
    ] = True,
) -> int:
    """Report what to fuse in MODEL, why, and what it saves; in each of its scenarios."""
    from fusion_advisor.ci.policy import Reviewing, unused_comments
    from fusion_advisor.report.redact import redacted

    if redact and (out is not None or with_graph):
        raise UsageError(
            "--redact: kernels and graphs have the model's names in them: leave out --out and "
            "--with-graph, or give report OUT/report.json --redact --format html"
        )
    outputs = asked_outputs(format or [], json)
    settings = options.settings(**reviewing_options(baseline, fail_on, select, ignore))
    several = len(settings.scenarios) > 1
    if several and any(output.file is None for output in outputs):
        raise UsageError("several scenarios: give each format =FILE, or choose one: --scenario")
    if several and profile is not None:
        raise UsageError("several scenarios: a profile is of one; choose it: --scenario")
    if out is not None:
        for name in settings.scenarios:
            require_room(out / name if several else out)
    tree = tree_of(Path.cwd() / "any")
    reviewing = Reviewing(settings, rulebook_of(settings.rules), tree)
    kernels = "kernels" if out else None
    requests = {
        name: replace(options.request(settings, kernels, name, step=True), profile=profile)
        for name in settings.scenarios
    }
    shown = not any(output.name == "text" for output in outputs)
    prepare(next(iter(requests.values())), checks=options.verify or options.compile)
    reports: dict[str, Report] = {}
    for name, request in requests.items():
        if several:
            tell(f"scenario {name}")
        outcome = outcome_of(
            request, options.verbose, cached=cache and not options.debug, assumed=not reports
        )
        report = reports[name] = outcome.report
        if with_graph:
            report.graph = dict(outcome.graph)
        if note := reviewing.review(name, report):
            tell(note)
        if out is not None:
            write_folder(out / name if several else out, outcome)
        shared = redacted(report) if redact else report
        asked = [output.of(name) for output in outputs] if several else outputs
        deliver(shared, asked, verbose=options.verbose)
        if shown and not several:
            show(shared, top, verbose=options.verbose)
    if several:
        _weigh(settings, reports, out, top)
        for name in reports if shown and options.verbose else ():
            tell(f"\nscenario {name}")
            show(reports[name], top, verbose=True)
    for line in unused_comments(reports):
        tell(line)
    failures = [*reviewing.failures(reports)]
    for line in failures:
        tell(f"fusion-advisor: {line}")
    return FAILED if failures else 0


def _weigh(settings: Settings, reports: Mapping[str, Report], out: Path | None, top: int) -> None:
    """Says what all scenarios come to, and leaves it beside their folders."""
    from fusion_advisor.ci.scenarios import as_data, scenario_lines, weighted_scenario

    rows = [
        weighted_scenario(name, settings.scenarios[name].weight, reports[name]) for name in reports
    ]
    weights = {name: settings.scenarios[name].weight for name in reports}
    show_several(weights, reports, scenario_lines(rows), top)
    if out is not None:
        write(out / "scenarios.json", dumps(as_data(rows), indent=1) + "\n")


@takes_options
def emit(
    options: Options,
    *,
    out: Annotated[Path, typer.Option(help="folder for the kernels")],
    search: Search = False,
) -> int:
    """Write a checked Triton kernel for each accepted group of MODEL; in train mode, for each of
    the forward pass, with its backward where that can be written."""
    require_folder(out)
    request = options.request(options.settings(), str(out), measured=search)
    request = replace(request, pairs=request.scenario.mode == "train")
    if request.pairs and search:
        raise UsageError("--search: of kernels without backward alone; leave out --mode train")
    prepare(request, checks=options.verify or options.compile)
    with searcher_of(request, search=search) as searcher:
        analysis = run_analysis(request, options.verbose, searcher)
    from fusion_advisor.measure.search import tuning_file
    from fusion_advisor.report.formats import wording

    texts = {group.id: group.kernel.text or "" for group in analysis.report.groups}
    tuned = tuning_file(out, analysis.searches, texts)
    for kernel in analysis.kernels:
        write_kernel(out / f"{kernel.name}.py", kernel.text)
    for path, text in tuned.items():
        write(path, text)
    for group in analysis.report.groups:
        tell(f"{group.kernel.file or group.id}: {wording.named(group)}: {wording.kernel(group)}")
        for line in searched_lines(analysis.searches.get(group.id)):
            tell(line)
    return 0
