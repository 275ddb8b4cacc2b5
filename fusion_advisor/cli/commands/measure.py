"""`bench` and `calibrate`: what runs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.commands.options import (
    FAILED,
    Debug,
    Options,
    Rules,
    Search,
    rulebook_of,
    takes_options,
)
from fusion_advisor.cli.commands.outcome import (
    outcome_of,
    require_room,
    searched_lines,
    write_folder,
)
from fusion_advisor.cli.commands.output import show, tell
from fusion_advisor.shipped.files import write_kernel
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import require_file, write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fusion_advisor.ci.configuration import Settings
    from fusion_advisor.report.schema import WayRow
    from fusion_advisor.workflows.bench import BenchRun


@takes_options
def bench(
    options: Options,
    *,
    out: Annotated[
        Path | None, typer.Option(help="folder for report and rows (default: the report's own)")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="a group or candidate by its id; all groups if none")
    ] = None,
    candidates: Annotated[
        bool,
        typer.Option("--candidates", help="emit and time rejected candidates that have a plan"),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="leave out what stands in bench.jsonl from this GPU"),
    ] = False,
    torch_compile: Annotated[
        bool, typer.Option(help="measure torch.compile in its modes, too")
    ] = True,
    whole: Annotated[bool, typer.Option(help="measure the whole model, too")] = True,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="without a GPU: run each way once, give no times")
    ] = False,
    search: Search = False,
) -> int:
    """Check and time eager, its rivals and the emitted kernels of MODEL or a REPORT.json."""
    from fusion_advisor.ir.recording_file import names_json
    from fusion_advisor.rulebook.local_gpu import gpu_names, require_triton

    require_triton("bench")
    if not rehearse and not gpu_names():
        raise UsageError(
            "bench times on a GPU and there is none here; take the report's folder to one, "
            "or give --rehearse to see that every way runs"
        )
    if rehearse and search:
        raise UsageError("--rehearse: gives no times that --search could choose by")
    settings = options.settings()
    if names_json(settings.model) and not settings.recorded:
        file = Path(settings.model)
    else:
        folder = out or Path("bench")
        file = folder / "report.json"
        require_room(folder)
        request = options.request(settings, "kernels", measured=not rehearse)
        write_folder(folder, outcome_of(request, options.verbose, cached=False))
    return _bench(
        file, out or file.parent, settings, only or [], candidates=candidates, resume=resume,
        compiled=torch_compile, whole=whole, rehearse=rehearse, search=search,
    )  # fmt: skip


def _bench(
    file: Path,
    out: Path,
    settings: Settings,
    only: list[str],
    *,
    candidates: bool,
    resume: bool,
    compiled: bool,
    whole: bool,
    rehearse: bool,
    search: bool,
) -> int:
    """Measures what a report and the files beside it say; rows and reports go to `out`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from fusion_advisor.report.formats import EXTENSIONS, render
    from fusion_advisor.workflows.bench import BenchRun, bench, read
    from fusion_advisor.workflows.results_db import Ledger

    report, graph, texts = read(file)
    require_room(out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=None)

        def progress(what: str, done: int, total: int) -> None:
            shown.update(task, description=what, completed=done, total=total)

        rulebook = rulebook_of(settings.rules)
        ledger = Ledger(out / "bench.jsonl", report, rulebook.hash, resume=resume)
        run = BenchRun(
            report, graph, rulebook, texts, tuple(only), candidates, compiled,
            whole=whole and not rehearse, rehearse=rehearse, progress=progress,
            ledger=None if rehearse else ledger,
        )  # fmt: skip
        if search:
            texts |= _search(run, out)
        found = bench(run)
    if rehearse:
        tell("rehearsed on the CPU: nothing was measured, no report is written")
        return _told(run.failures())
    for name, extension in EXTENSIONS.items():
        write(out / f"report.{extension}", render(found, name))
    show(found, len(found.groups))
    return _told(run.faults())


def _told(failures: Iterable[tuple[str, WayRow]]) -> int:
    """Says what went wrong; the exit code."""
    broken = [f"{who}: {row.way}: {row.failure}" for who, row in failures]
    for line in broken:
        tell(line)
    return FAILED if broken else 0


def _search(run: BenchRun, out: Path) -> dict[str, str]:
    """Writes each group's kernel in its fastest configuration as soon as that is found; the texts
    by the groups."""
    from fusion_advisor.measure.search import local_searcher
    from fusion_advisor.report.formats import wording
    from fusion_advisor.verify.driver import provers
    from fusion_advisor.workflows.bench import search_kernels

    device, rules = run.rulebook.device(run.report.device.name), run.rulebook.verify
    texts: dict[str, str] = {}
    with (
        local_searcher(device.name, run.rulebook) as searcher,
        provers(device.capability, rules, check=True, compile=True, where="gpu") as children,
    ):
        for group, found, text in search_kernels(run, searcher, children):
            if not found.failure:
                write_kernel(out / str(group.kernel.file), text)
                texts[group.id] = group.kernel.text = text
            tell(f"{group.kernel.file}: {wording.named(group)}")
            for line in searched_lines(found):
                tell(line)
    return texts


def calibrate(
    out: Annotated[Path, typer.Option(help="TOML file, to be laid over the rules")],
    device: Annotated[str | None, typer.Option(help="whose rules (default: the GPU here)")] = None,
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Measure what the GPU here reaches, as rules: copy bandwidth, matrix products, a launch."""
    from fusion_advisor.measure.calibrate import calibrated, overlay
    from fusion_advisor.rulebook.local_gpu import gpu_names

    gpus = gpu_names()
    if not gpus:
        raise UsageError("calibrate measures a GPU and there is none here")
    rulebook = rulebook_of(rules)
    require_file(out)
    part = rulebook.device(device or gpus[0])
    write(out, overlay(part, calibrated(part, rulebook)))
    tell(f"{out}: lay it over the rules with --rules {out}")
