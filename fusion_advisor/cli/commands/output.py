"""Destinations of reports, and messages for the person at the terminal: standard error, so that
standard output can carry a report alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import require_file, write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from fusion_advisor.report.schema import Report


@dataclass(frozen=True)
class OutputFile:
    """A format and its file; None is standard output."""

    name: str
    file: Path | None

    def of(self, scenario: str) -> OutputFile:
        """The same destination for one scenario of several: `report.decode.json` for
        `report.json`."""
        assert self.file is not None
        return OutputFile(self.name, self.file.with_suffix(f".{scenario}{self.file.suffix}"))


def asked_outputs(formats: list[str], json: str | None) -> list[OutputFile]:
    """The outputs of `--format` and `--json`. Raises UsageError for an unknown format, and for a
    file that cannot be written."""
    from fusion_advisor.report.formats import FORMATS

    if json is not None:
        formats = [*formats, "json" if json == "-" else f"json={json}"]
    outputs: list[OutputFile] = []
    for text in formats:
        name, _, file = text.partition("=")
        if name not in FORMATS:
            raise UsageError(f"--format {text!r}: expected {', '.join(FORMATS)}, with =FILE or not")
        place = Path(file) if file and file != "-" else None
        if place is not None:
            require_file(place)
        outputs.append(OutputFile(name, place))
    if sum(output.file is None for output in outputs) > 1:
        raise UsageError("only one format can go to standard output: give the others =FILE")
    return outputs


def deliver(report: Report, outputs: list[OutputFile], *, verbose: bool = False) -> None:
    """Writes the report in each format to its place; the text under `verbose` whole."""
    from fusion_advisor.report.formats import render
    from fusion_advisor.report.formats import text as summary

    for output in outputs:
        whole = verbose and output.name == "text"
        text = summary.render(report, verbose=True) if whole else render(report, output.name)
        if output.file is None:
            _print(text)
        else:
            write(output.file, text)


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # else Python tries again as it ends
        raise UsageError(f"standard output cannot be written: {error.strerror}") from error


def show(report: Report, top: int, *, verbose: bool = False) -> None:
    """The text on standard error, in colour on a terminal, without what was assumed, which was told
    before; under `verbose` whole."""
    from fusion_advisor.report.formats.text import document

    _console().print(document(report, top, verbose=verbose, assumed=False))


def show_several(
    weights: Mapping[str, float], reports: Mapping[str, Report], said: Sequence[str], top: int
) -> None:
    """The summary of several scenarios on standard error, as `show` has it of one."""
    from fusion_advisor.report.formats.text import several

    _console().print(several(weights, reports, said, top))


def _console() -> Console:
    from rich.console import Console

    from fusion_advisor.report.formats.text import MIN_WIDTH

    console = Console(stderr=True)
    console.width = max(MIN_WIDTH, console.width if console.is_terminal else 100)
    return console


class Terminal:
    """Prints what was assumed, and shows the progress of the stages where standard error is a
    terminal; under `verbose` the time of each."""

    def __init__(self, shown: Progress, stages: int, *, verbose: bool, assumed: bool) -> None:
        self._assumed = assumed
        self._shown = shown
        self._task = shown.add_task("starting", total=stages)
        self._verbose = verbose
        self._running = ""
        self._since = time.perf_counter()

    def assumed(self, facts: Sequence[str]) -> None:
        if self._assumed:
            tell(f"assumed: {'; '.join(facts)}")

    def stage(self, name: str) -> None:
        """One stage has ended and the next begins."""
        now = time.perf_counter()
        if self._verbose and self._running:
            tell(f"{self._running}: {now - self._since:.2f} s")
        ended = 1 if self._running else 0
        self._shown.update(self._task, description=name, advance=ended, refresh=True)
        self._running, self._since = name, now


@contextmanager
def following(stages: Sequence[str], *, verbose: bool, assumed: bool = True) -> Generator[Terminal]:
    """A listener to these stages; what it shows of them is gone at the end. It says what was
    `assumed`, or nothing of that."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as shown:  # fmt: skip
        yield Terminal(shown, len(stages), verbose=verbose, assumed=assumed)


def tell(line: str) -> None:
    """A line for people."""
    print(line, file=sys.stderr)
