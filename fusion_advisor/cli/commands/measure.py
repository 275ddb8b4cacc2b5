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
    rulebook_of,
    takes_options,
)
from fusion_advisor.cli.commands.outcome import (
    outcome_of,
    require_room,
    write_folder,
)
from fusion_advisor.cli.commands.output import show, tell
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import require_file, write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fusion_advisor.ci.configuration import Settings
    from fusion_advisor.report.schema import WayRow


@takes_options
def bench(
    options: Options,
    *,
    out: Annotated[
        Path | None, typer.Option(help="folder for the reports (default: the report's own)")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="a group or candidate by its id; all groups if none")
    ] = None,
    candidates: Annotated[
        bool,
        typer.Option("--candidates", help="emit and time rejected candidates that have a plan"),
    ] = False,
    torch_compile: Annotated[
        bool, typer.Option(help="measure torch.compile in its modes, too")
    ] = True,
    whole: Annotated[bool, typer.Option(help="measure the whole model, too")] = True,
    tune: Annotated[
        bool, typer.Option(help="find faster numbers for the kernels' launches, too")
    ] = True,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="without a GPU: run each way once, give no times")
    ] = False,
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
        file, out or file.parent, settings, only or [], candidates=candidates,
        compiled=torch_compile, whole=whole, rehearse=rehearse, tune=tune,
    )  # fmt: skip


def _bench(
    file: Path,
    out: Path,
    settings: Settings,
    only: list[str],
    *,
    candidates: bool,
    compiled: bool,
    whole: bool,
    rehearse: bool,
    tune: bool,
) -> int:
    """Measures what a report and the files beside it say; reports go to `out`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from fusion_advisor.report.formats import EXTENSIONS, render
    from fusion_advisor.workflows.bench import BenchRun, bench, read, tuning_of

    report, graph, texts = read(file)
    require_room(out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=None)

        def progress(what: str, done: int, total: int) -> None:
            shown.update(task, description=what, completed=done, total=total)

        rulebook = rulebook_of(settings.rules)
        run = BenchRun(
            report, graph, rulebook, texts, tuple(only), candidates, compiled,
            whole=whole and not rehearse, rehearse=rehearse, tune=tune, progress=progress,
        )  # fmt: skip
        found = bench(run)
    if rehearse:
        tell("rehearsed on the CPU: nothing was measured, no report is written")
        return _told(run.failures())
    for path, text in tuning_of(run, out).items():
        write(path, text)
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
