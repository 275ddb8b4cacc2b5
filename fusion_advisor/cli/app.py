"""The command line: the commands, errors as one line and an exit code.

Everything for people goes to standard error while a model is analysed; a format asked for without
`=FILE` goes to standard output, which then carries it alone. torch, Triton, pydantic and networkx
are imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, NoReturn

import typer

from fusion_advisor.cli.commands import analyze, apply, known, measure, patch, reports, settings
from fusion_advisor.ir.faults import described
from fusion_advisor.support.errors import AdvisorError

app = typer.Typer(
    name="fusion-advisor",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for _command in (
    analyze.analyze, settings.config, settings.init, analyze.emit, apply.apply, patch.patch,
    measure.bench, measure.calibrate, reports.report, reports.diff,
    known.explain, known.devices, known.rules, known.ops, known.doctor,
):  # fmt: skip
    app.command()(_command)


def _version(asked: bool) -> None:
    """One line with the version of the tool and of what it stands on, as far as installed."""
    if asked:
        from fusion_advisor.rulebook.local_gpu import version

        packages = ("fusion-advisor", "torch", "triton")
        print(", ".join(f"{package} {version(package) or 'unknown'}" for package in packages))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the versions and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Find the operators of a PyTorch model to fuse: why, what it saves, and a checked kernel."""


def main() -> None:
    """Run, and end with CONTRACT's exit code: 1 --fail-on, 2 usage, 3 capture, 4 our fault."""
    debug, words = "--debug" in sys.argv, sys.argv[1:]
    try:
        signal.signal(signal.SIGTERM, _terminated)
        with _prepared(words):
            code: Any = app(words or ["--help"], standalone_mode=False)
        code = code if words else 2
    except AdvisorError as error:
        code = _complain(str(error), error.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("interrupted", 130, debug)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone
        code = 0
    except Exception as error:  # noqa: BLE001 the last resort: one line, never silent
        code = _unexpected(error, debug)
    sys.exit(code if isinstance(code, int) else 0)


def _prepared(words: list[str]) -> AbstractContextManager[None]:
    """While options are read, a child already imports torch for the commands that capture."""
    captures = bool(words) and words[0] in ("analyze", "emit", "apply", "patch")
    if not captures or not {"--check", "--help"}.isdisjoint(words):
        return nullcontext()
    from fusion_advisor.frontend.child import prepared
    from fusion_advisor.ir.recording_file import names_json

    return nullcontext() if any(map(names_json, words[1:2])) else prepared()  # that has its graphs


def _terminated(number: int, frame: object) -> NoReturn:
    """Asked to end: leave every block that holds children and folders."""
    raise SystemExit(128 + number)


def _complain(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"fusion-advisor: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _unexpected(error: Exception, debug: bool) -> int:
    """A usage error of the command line, or a fault of ours."""
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        return _complain(f"{format_message()} (see --help)", 2, debug)
    return _complain(f"{described(error)}; run again with --debug and report it", 4, debug)


if __name__ == "__main__":
    main()
