"""The command line: options to requests, errors to one line and an exit code.

Everything for people goes to standard error while a model is analysed; a format asked for without
`=FILE` goes to standard output, which then carries it alone. torch, Triton, pydantic and networkx
are imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from fusion_advisor.errors import AdvisorError, PatchError, UsageError
from fusion_advisor.files import require_folder, write

if TYPE_CHECKING:
    from rich.status import Status

    from fusion_advisor.patching import Patched
    from fusion_advisor.pipeline import Analysis
    from fusion_advisor.records import Graph
    from fusion_advisor.report import Report
    from fusion_advisor.rulebook import Gate, Pattern, Rulebook
    from fusion_advisor.scenario import Request, Scenario

GIB = 1 << 30
FAILED = 1
"""Exit code of a `--fail-on` condition."""

app = typer.Typer(
    name="fusion-advisor",
    help="Which operators of a PyTorch model to fuse, why, what it saves, and a checked kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Rules = Annotated[
    list[Path] | None, typer.Option("--rules", help="TOML file or folder laid over the rules")
]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks and the model's output")]


def main() -> None:
    """Run, and end with CONTRACT's exit code: 1 --fail-on, 2 usage, 3 capture, 4 our fault."""
    debug = "--debug" in sys.argv
    try:
        signal.signal(signal.SIGTERM, _terminated)
        with _prepared(sys.argv[1:]):
            code: Any = app(standalone_mode=False)
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
    if not words or words[0] not in ("analyze", "emit") or "--help" in words:
        return nullcontext()
    from fusion_advisor.capture import prepared

    return prepared()


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
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return _complain(
        f"a fault of fusion-advisor at {where}: {type(error).__name__}: {error};"
        " run again with --debug and report it",
        4,
        debug,
    )


# -- analyze and emit ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What every command takes that captures a model."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="file.py, file.py:name, package.module:name, hf:config.json[#AutoClass], a .pt2",
        ),
    ]
    device: Annotated[
        str | None, typer.Option(help="GPU to judge for (default: the one here, else h200)")
    ] = None
    mode: Annotated[str, typer.Option(help="eval or train")] = "eval"
    dtype: Annotated[str | None, typer.Option(help="dtype that the model is built in")] = None
    autocast: Annotated[
        str | None, typer.Option(help="dtype of torch.autocast around the model")
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="size of the inputs' first dimension", min=1)
    ] = None
    seq: Annotated[int | None, typer.Option(help="size of the inputs' second dimension", min=1)] = (
        None
    )
    input: Annotated[
        list[str] | None,
        typer.Option("--input", help="an input as NAME=SHAPE:DTYPE, x=4x128:int64"),
    ] = None
    dynamic: Annotated[bool, typer.Option("--dynamic", help="keep sizes symbolic")] = False
    phase: Annotated[str, typer.Option(help="forward, prefill or decode")] = "forward"
    kv_len: Annotated[
        int | None, typer.Option(help="filled length of the cache in decode", min=1)
    ] = None
    rules: Rules = None
    timeout: Annotated[float, typer.Option(help="seconds that the model's code may run")] = 180.0
    memory: Annotated[float, typer.Option(help="GiB that the model's code may use")] = 8.0
    verify: Annotated[bool, typer.Option(help="check every kernel against fp64")] = True
    compile: Annotated[bool, typer.Option(help="compile every kernel for the device")] = True
    verbose: Annotated[bool, typer.Option("--verbose", help="show the time of each stage")] = False
    debug: Debug = False

    def request(self, folder: str | None) -> Request:
        """The options as a request, kernels going to `folder`. UsageError for a wrong value."""
        from fusion_advisor.scenario import Limits, Request, Scenario, parse_input

        if self.timeout <= 0 or self.memory <= 0:
            raise UsageError("--timeout and --memory must be more than 0")
        if self.phase != "forward" and not self.model.startswith("hf:"):
            raise UsageError(f"--phase {self.phase}: only for hf: models, which have a cache")
        return Request(
            model=self.model,
            scenario=Scenario(
                mode=_one_of("--mode", self.mode, "eval", "train"),
                dtype=_floating("--dtype", self.dtype),
                autocast=_floating("--autocast", self.autocast, "bfloat16", "float16"),
                batch=self.batch,
                seq=self.seq,
                inputs=tuple(map(parse_input, self.input or [])),
                dynamic=self.dynamic,
                phase=_one_of("--phase", self.phase, "forward", "prefill", "decode"),
                kv_len=self.kv_len,
            ),
            limits=Limits(self.timeout, int(self.memory * GIB)),
            device=self.device,
            rules=tuple(self.rules or ()),
            verify=self.verify,
            compile=self.compile,
            folder=folder,
            command=_regenerate(),
            debug=self.debug,
        )


def _takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose first parameter is `_Options`, as typer sees it: each field a parameter."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    types = get_type_hints(_Options, include_extras=True)
    shared = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[option.name],
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
        )
        for option in fields(_Options)
    ]  # fmt: skip

    @functools.wraps(command)
    def run(**given: Any) -> int:
        options = _Options(**{option.name: given.pop(option.name) for option in shared})
        return command(options, **given)

    vars(run)["__signature__"] = inspect.Signature([*own, *shared])
    return run


@app.command()
@_takes_options
def analyze(
    options: _Options,
    *,
    out: Annotated[Path | None, typer.Option(help="folder for kernels and all formats")] = None,
    format: Annotated[
        list[str] | None, typer.Option(help="text, json, md or html, with =FILE into a file")
    ] = None,
    json: Annotated[str | None, typer.Option(help="the JSON report's file; - is stdout")] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help="exit with 1: accepted, unverified, or coverage[=SHARE]"),
    ] = None,
    top: Annotated[int, typer.Option(help="rows of each list in the text", min=0)] = 10,
    with_graph: Annotated[
        bool, typer.Option("--with-graph", help="put the captured graph into the report")
    ] = False,
) -> int:
    """Report what to fuse in MODEL, why, and what it saves."""
    outputs = _outputs(format or [], json)
    conditions = [_condition(text) for text in fail_on or []]
    if out is not None:
        require_folder(out)
    request = options.request("kernels" if out else None)
    analysis = _analyze(request, options.verbose)
    report = analysis.report
    if with_graph:
        report.graph = _graph(analysis)
    if out is not None:
        _write_folder(out, analysis)
    _deliver(report, outputs)
    if not any(output.name == "text" for output in outputs):
        _show(report, top)
    return FAILED if any(condition.holds(report) for condition in conditions) else 0


@app.command()
@_takes_options
def emit(
    options: _Options, *, out: Annotated[Path, typer.Option(help="folder for the kernels")]
) -> int:
    """Write a checked Triton kernel for each accepted group of MODEL."""
    require_folder(out)
    analysis = _analyze(options.request(str(out)), options.verbose)
    for kernel in analysis.kernels:
        write(out / f"{kernel.name}.py", kernel.text)
    from fusion_advisor.reports import wording

    for group in analysis.report.groups:
        _tell(f"{group.kernel.file or group.id}: {group.pattern}: {wording.kernel(group)}")
    return 0


@app.command()
@_takes_options
def patch(
    options: _Options,
    *,
    out: Annotated[Path | None, typer.Option(help="the diff, as git apply takes it")] = None,
    model_new: Annotated[
        Path | None,
        typer.Option(
            help="one file with a class ModelNew and its kernels, as KernelBench takes it"
        ),
    ] = None,
    level: Annotated[
        str, typer.Option(help="kernel; or framework: PyTorch's own ops where one does the same")
    ] = "kernel",
    check: Annotated[
        bool, typer.Option("--check", help="exit with 1 if kernels of an earlier patch are stale")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="the tree that may be edited (default: the git one)")
    ] = None,
) -> int:
    """Put the kernels of MODEL's groups into its source: as a diff, or as a class ModelNew."""
    from rich.console import Console

    from fusion_advisor.capture import capture
    from fusion_advisor.patching import patched

    if options.model.startswith("hf:"):
        if out is None or check or model_new or level != "kernel":
            raise UsageError(f"patch {options.model}: takes --out FILE and no other form of patch")
        return _patch_family(options, out, root or _tree_of(out))
    file = Path(options.model.partition(":")[0])
    if file.suffix != ".py":
        raise UsageError(
            f"patch {options.model}: only a model in a .py file, or of hf:, has a source"
        )
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    if check:
        return _check_kernels(file, options.rules or [])
    if out is None and model_new is None:
        raise UsageError(
            "patch: say where to write it: --out FILE, --model-new FILE or both; or give --check"
        )
    operators = _one_of("--level", level, "kernel", "framework") == "framework"
    for written in (out, model_new):
        if written is not None:
            require_folder(written.parent)
    tree = (root or _tree_of(file)).resolve()
    if not file.resolve().is_relative_to(tree):
        raise UsageError(f"--root {tree}: {file} is not in it")
    request = options.request("kernels")

    def captured(model: str, scenario: Scenario, references: str | None) -> Graph:
        return capture(
            model, scenario, request.limits, request.debug, trail=True, references=references
        )

    if model_new is not None and options.model.partition(":")[2] not in ("", "Model"):
        raise UsageError(f"--model-new: {options.model} is not a class called Model")
    with Console(stderr=True).status("starting") as status:
        made = patched(
            request, tree, captured, _Terminal(status, options.verbose),
            diff=out is not None, model_new=model_new is not None, operators=operators,
        )  # fmt: skip
    return _written(made, out, model_new, operators=operators)


def _patch_family(options: _Options, out: Path, root: Path) -> int:
    """A package that swaps classes of transformers, whose source is not the user's."""
    from rich.console import Console

    require_folder(out.parent)
    if not root.is_dir():
        raise UsageError(f"--root {root}: no such folder")
    request = options.request("kernels")
    with Console(stderr=True).status("starting") as status:
        from fusion_advisor.transformers_patch import patched_family

        listener = _Terminal(status, options.verbose)
        made = patched_family(request, root.resolve(), listener.stage, listener.assumed)
    return _written(made, out)


def _written(
    made: Patched, out: Path | None, model_new: Path | None = None, *, operators: bool = False
) -> int:
    """Says what became of the groups, and writes what was asked for where it holds."""
    from fusion_advisor.reports import wording

    for put in made.patch.puts:
        places = ", ".join(f"{_beneath(e.file, made.root)}:{e.lines[0]}" for e in put.edits)
        _tell(
            f"{put.finding.id} {put.finding.pattern}: {places}, saves "
            f"{wording.time(put.finding.saved_us_total)} in {put.occurrences} "
            f"{'places that run' if put.occurrences > 1 else 'place that runs'}"
        )
    for name, reason in made.patch.refused.items():
        _tell(f"{name} is left out: {reason}")
    for launches, reason in made.unplaced.items():
        _tell(f"cannot be written as one call: {launches}: {reason}")
    lost = made.free_us - made.saved_us
    if lost > 0:
        _tell(
            f"the source cannot express groups that would save {wording.time(lost)} more "
            f"of {wording.time(made.free_us)}"
        )
    if made.wrong:
        for said, what in made.wrong.items():
            _tell(f"{said}: {what}")
        raise PatchError("nothing is written, for the patched model is not the original")
    for path, changed in made.patch.outdated.items():
        _tell(
            f"{_beneath(str(path), made.root)}: {changed} changed since it was written; with this "
            "patch it stands for that as it is now: see that it still computes it"
        )
    left = False
    for place, text in ((out, made.diff), (model_new, made.model_new)):
        if place is None:
            continue
        if not text and place == out and made.package:
            has = f"{made.package} has every kernel that the source can call"
            _tell(f"{out}: not written, for {has}")
            continue
        if not text:
            _tell(f"{place}: not written, for no group can be put into the source")
            left = True
            continue
        write(place, text)
        holds = "computes what the original does" if operators else "is the original"
        _tell(f"{place}: the patched model {holds} {', '.join(made.tried)}")
    return FAILED if left else 0


def _check_kernels(model: Path, rules: Sequence[Path]) -> int:
    """Says of the kernels beside a model which are stale, and why."""
    from fusion_advisor.machine import version
    from fusion_advisor.package import package_name, stale
    from fusion_advisor.rulefiles import load_rulebook

    folder = model.parent / package_name(model)
    if not folder.is_dir():
        raise UsageError(f"{folder}: is not there; write it with patch {model} --out FILE")
    tool = version("fusion-advisor") or "unknown"
    found = [*stale(folder, tool, load_rulebook(rules).hash)]
    for path, why in found:
        _tell(f"{path}: stale: {why}")
    if not found:
        _tell(f"{folder}: every kernel is as its patch left it, and so is what it was made from")
    return FAILED if found else 0


def _beneath(file: str, root: Path) -> Path:
    """A file as seen from a folder that it is in."""
    path = Path(file).resolve()
    return path.relative_to(root) if path.is_relative_to(root) else path


def _tree_of(file: Path) -> Path:
    """The git working tree that a file is in, else its folder."""
    folder = file.resolve().parent
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), folder)


def _floating(option: str, given: str | None, *known: str) -> str | None:
    """The dtype that an option names. UsageError unless models can be built or run in it."""
    from fusion_advisor.scenario import parse_dtype

    if given is None:
        return None
    dtype = parse_dtype(given)
    known = known or ("float64", "float32", "bfloat16", "float16")
    if dtype not in known:
        raise UsageError(f"{option} {given!r}: expected {' or '.join(known)}")
    return dtype


def _one_of(option: str, value: str, *known: str) -> Any:
    if value not in known:
        raise UsageError(f"{option} {value!r}: expected {' or '.join(known)}")
    return value


_KEPT_OPTIONS = frozenset(
    {"--device", "--mode", "--dtype", "--autocast", "--batch", "--seq", "--input", "--phase",
     "--kv-len", "--rules"}
)  # fmt: skip


def _regenerate() -> str:
    """The command that makes the same kernels again: the model and its scenario."""
    import shlex

    words = sys.argv[2:]
    kept: list[str] = []
    while words:
        word = words.pop(0)
        option = word.split("=")[0]
        if option in _KEPT_OPTIONS:
            kept.append(word)
            if "=" not in word and words:
                kept.append(words.pop(0))
        elif word == "--dynamic" or not word.startswith("-"):
            kept.append(word)
        elif option in _WITH_VALUE and "=" not in word and words:
            words.pop(0)
    if sys.argv[1:2] == ["patch"]:
        return shlex.join(["fusion-advisor", "patch", *kept, "--out", "kernels.patch"])
    return shlex.join(["fusion-advisor", "emit", *kept, "--out", "kernels"])


_WITH_VALUE = frozenset(
    {"--out", "--format", "--json", "--timeout", "--memory", "--fail-on", "--top"}
    | {"--model-new", "--root", "--level"}
)


def _analyze(request: Request, verbose: bool) -> Analysis:
    from fusion_advisor.capture import capturing

    with capturing(request.model, request.scenario, request.limits, request.debug) as captured:
        from rich.console import Console  # while the child imports torch

        from fusion_advisor.pipeline import analyze

        with Console(stderr=True).status("starting") as status:
            return analyze(request, captured, _Terminal(status, verbose))


class _Terminal:
    """Says what was assumed, and shows the running stage where standard error is a terminal."""

    def __init__(self, status: Status, verbose: bool) -> None:
        self._status = status
        self._verbose = verbose
        self._running = ""
        self._since = time.perf_counter()

    def assumed(self, facts: Sequence[str]) -> None:
        _tell(f"assumed: {'; '.join(facts)}")

    def stage(self, name: str) -> None:
        """One stage has ended and the next begins."""
        now = time.perf_counter()
        if self._verbose and self._running:
            _tell(f"{self._running}: {now - self._since:.2f} s")
        self._running, self._since = name, now
        self._status.update(name)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


# -- on a GPU --------------------------------------------------------------------------------------


@app.command()
@_takes_options
def bench(
    options: _Options,
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
) -> int:
    """Check and time eager, its rivals and the emitted kernels of MODEL or a REPORT.json."""
    from fusion_advisor.machine import gpu_names

    if not rehearse and not gpu_names():
        raise UsageError(
            "bench times on a GPU and there is none here; take the report's folder to one, "
            "or give --rehearse to see that every way runs"
        )
    if options.model.endswith(".json") and not options.model.startswith("hf:"):
        folder = Path(options.model).parent
    else:
        folder = out or Path("bench")
        require_folder(folder)
        _write_folder(folder, _analyze(options.request("kernels"), options.verbose))
    return _bench(
        folder, out or folder, options, only or [], candidates=candidates, resume=resume,
        compiled=torch_compile, whole=whole, rehearse=rehearse,
    )  # fmt: skip


def _bench(
    folder: Path,
    out: Path,
    options: _Options,
    only: list[str],
    *,
    candidates: bool,
    resume: bool,
    compiled: bool,
    whole: bool,
    rehearse: bool,
) -> int:
    """Measures what `analyze --out` left in a folder; rows and reports go to `out`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from fusion_advisor.bench import Run, bench
    from fusion_advisor.ledger import Ledger
    from fusion_advisor.report import load_report
    from fusion_advisor.reports import EXTENSIONS, render

    given = Path(options.model)
    file = given if given.suffix == ".json" else folder / "report.json"
    report = load_report(file)
    require_folder(out)
    graph = _graph_of(report, file)
    texts = {
        group.id: (folder / group.kernel.file).read_text(encoding="utf-8")
        for group in report.groups
        if group.kernel.file and (folder / group.kernel.file).is_file()
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=None)

        def told(what: str, done: int, total: int) -> None:
            shown.update(task, description=what, completed=done, total=total)

        rulebook = _rulebook(options.rules)
        ledger = Ledger(out / "bench.jsonl", report, rulebook.hash, resume=resume)
        run = Run(
            report, graph, rulebook, texts, tuple(only), candidates, compiled,
            whole=whole and not rehearse, rehearse=rehearse, told=told,
            ledger=None if rehearse else ledger,
        )  # fmt: skip
        found = bench(run)
    if rehearse:
        _tell("rehearsed on the CPU: nothing was measured, no report is written")
        broken = [f"{who}: {row.way}: {row.failure}" for who, row in run.failures()]
        for line in broken:
            _tell(line)
        return FAILED if broken else 0
    for name, extension in EXTENSIONS.items():
        write(out / f"report.{extension}", render(found, name))
    _show(found, len(found.groups))
    return 0


def _graph_of(report: Report, file: Path) -> Graph:
    """The graph in a report, or beside it as `analyze --out` leaves it."""
    from json import dumps

    from fusion_advisor.wire import graph_from_json

    beside = file.parent / "graph.json"
    if report.graph is None and not beside.is_file():
        raise UsageError(
            f"{file}: no graph in it and no graph.json beside it; run analyze with --out again"
        )
    text = dumps(report.graph) if report.graph else beside.read_text(encoding="utf-8")
    try:
        return graph_from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{beside}: not a graph of fusion-advisor; analyze again") from error


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="TOML file, to be laid over the rules")],
    device: Annotated[str | None, typer.Option(help="whose rules (default: the GPU here)")] = None,
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Measure what the GPU here reaches, as rules: copy bandwidth, matrix products, a launch."""
    from fusion_advisor.calibrate import calibrated, overlay
    from fusion_advisor.machine import gpu_names

    gpus = gpu_names()
    if not gpus:
        raise UsageError("calibrate measures a GPU and there is none here")
    rulebook = _rulebook(rules)
    part = rulebook.device(device or gpus[0])
    write(out, overlay(part, calibrated(part, rulebook)))
    _tell(f"{out}: lay it over the rules with --rules {out}")


# -- where a report goes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """A format and its file; None is standard output."""

    name: str
    file: Path | None


def _outputs(formats: list[str], json: str | None) -> list[_Output]:
    """What `--format` and `--json` ask for. UsageError for an unknown format."""
    from fusion_advisor.reports import FORMATS

    if json is not None:
        formats = [*formats, "json" if json == "-" else f"json={json}"]
    outputs: list[_Output] = []
    for text in formats:
        name, _, file = text.partition("=")
        if name not in FORMATS:
            raise UsageError(f"--format {text!r}: expected {', '.join(FORMATS)}, with =FILE or not")
        outputs.append(_Output(name, Path(file) if file and file != "-" else None))
    if sum(output.file is None for output in outputs) > 1:
        raise UsageError("only one format can go to standard output: give the others =FILE")
    return outputs


def _deliver(report: Report, outputs: list[_Output]) -> None:
    from fusion_advisor.reports import render

    for output in outputs:
        text = render(report, output.name)
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


def _show(report: Report, top: int) -> None:
    """The text on standard error, in colour on a terminal."""
    from rich.console import Console

    from fusion_advisor.reports.text import MIN_WIDTH, document

    console = Console(stderr=True)
    console.width = max(MIN_WIDTH, console.width if console.is_terminal else 100)
    console.print(document(report, top))


def _write_folder(out: Path, analysis: Analysis) -> None:
    """The kernels and every format of the report, in place of what an earlier run left."""
    from json import dumps

    from fusion_advisor.reports import EXTENSIONS, render

    write(out / "graph.json", dumps(_graph(analysis)))
    stale = _kernel_files(out)
    for kernel in analysis.kernels:
        write(out / "kernels" / f"{kernel.name}.py", kernel.text)
    for file in stale - {f"{kernel.name}.py" for kernel in analysis.kernels}:
        (out / "kernels" / file).unlink(missing_ok=True)
    for name, extension in EXTENSIONS.items():
        write(out / f"report.{extension}", render(analysis.report, name))


def _kernel_files(out: Path) -> set[str]:
    """The kernels that the report in a folder names: files of ours, unlike others beside them."""
    from fusion_advisor.report import load_report

    try:
        groups = load_report(out / "report.json").groups
    except UsageError:
        return set()  # no report, or none of this version: whose the files are is not known
    return {Path(group.kernel.file).name for group in groups if group.kernel.file}


def _graph(analysis: Analysis) -> dict[str, Any]:
    from json import loads

    from fusion_advisor.wire import graph_to_json

    return loads(graph_to_json(analysis.flow.annotated.graph))


@dataclass(frozen=True)
class _Condition:
    """A `--fail-on`: `least` is the coverage that is enough."""

    name: str
    least: float = 1.0

    def holds(self, report: Report) -> bool:
        from fusion_advisor.reports import wording

        if self.name == "accepted":
            failed = bool(report.groups)
            why = f"{len(report.groups)} groups are worth fusing"
        elif self.name == "unverified":
            unproven = [group.id for group in report.groups if not wording.verified(group)]
            failed = bool(unproven)
            why = f"no check has passed for {', '.join(unproven)}"
        else:
            failed = report.totals.coverage < self.least
            why = f"coverage is {report.totals.coverage:.4g}, needs {self.least:g}"
        if failed:
            _tell(f"fusion-advisor: --fail-on {self.name}: {why}")
        return failed


def _condition(text: str) -> _Condition:
    name, given, share = text.partition("=")
    if name in ("accepted", "unverified") and not given:
        return _Condition(name)
    if name == "coverage":
        try:
            return _Condition(name, float(share) if given else 1.0)
        except ValueError:
            pass
    raise UsageError(
        f"--fail-on {text!r}: expected accepted, unverified, coverage or coverage=SHARE (0.95)"
    )


# -- reports that are there ------------------------------------------------------------------------


@app.command()
def report(
    file: Annotated[Path, typer.Argument(metavar="REPORT.json")],
    format: Annotated[
        list[str] | None,
        typer.Option(help="text (default), json, md or html, with =FILE into a file"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show a report again in any format, without running the model."""
    from fusion_advisor.report import load_report

    outputs = _outputs(format or ["text"], None)
    _deliver(load_report(file), outputs)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json")],
    debug: Debug = False,
) -> None:
    """Say what a change did to traffic and verdicts."""
    from fusion_advisor.compare import compare
    from fusion_advisor.report import load_report

    for line in compare(load_report(old), load_report(new)):
        print(line)


# -- what is known ---------------------------------------------------------------------------------


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(metavar="CODE|NAME")] = None,
    all: Annotated[bool, typer.Option("--all", help="every gate and idiom")] = False,
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Say what a gate or idiom asks, why, its limits and their sources."""
    rulebook = _rulebook(rules)
    if all:
        chosen = [*rulebook.gates.values(), *rulebook.patterns.values()]
    elif name:
        chosen = [_named(rulebook, name)]
    else:
        raise UsageError("explain what? Give a code or name (FA401, softmax), or --all")
    print("\n\n".join("\n".join(_explained(rulebook, entry)) for entry in chosen))


def _rulebook(rules: list[Path] | None) -> Rulebook:
    from fusion_advisor.rulefiles import load_rulebook

    return load_rulebook(rules or ())


def _named(rulebook: Rulebook, name: str) -> Gate | Pattern:
    if name.strip().lower() in rulebook.patterns:
        return rulebook.pattern(name)
    try:
        return rulebook.gate(name)
    except UsageError as error:
        raise UsageError(f"{error}; idioms: {', '.join(rulebook.patterns)}") from error


def _explained(rulebook: Rulebook, entry: Gate | Pattern) -> Iterator[str]:
    from fusion_advisor.rulebook import Gate

    if isinstance(entry, Gate):
        yield f"{entry.code} {entry.name}: {entry.question}"
        yield from _wrapped(entry.why)
        yield f"  holds if measured {entry.comparison} {entry.limit}, in {entry.unit}"
        for name, number in entry.limits.items():
            yield from _wrapped(f"{name} = {number} ({number.source})")
        yield from _wrapped(f"otherwise: {entry.fix}")
        return
    yield f"{entry.name}: {entry.what}"
    codes = ", ".join(f"{rulebook.gate(name).code} {name}" for name in entry.gates)
    yield from _wrapped(f"judged by {codes}")
    if entry.claimed:
        upper = f" to {entry.claimed_up_to}" if entry.claimed_up_to else ""
        yield from _wrapped(f"claimed {entry.claimed}{upper} ({entry.claimed.source})")
    if entry.framework:
        yield f"  PyTorch has it: {entry.framework}"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 98, initial_indent="  ", subsequent_indent="    ")


@app.command()
def devices(rules: Rules = None, debug: Debug = False) -> None:
    """List the GPUs that can be judged for."""
    for name, device in _rulebook(rules).devices.items():
        print(
            f"{name:10} {device.title:32} sm_{device.capability:<4}"
            f"{device.datasheet_bandwidth / 1e9:6.0f} GB/s"
            f"{device.peak_flops('tensor', 'bfloat16') / 1e12:8.1f} TFLOP/s bf16"
            f"{device.sm_count:5} SMs"
        )


@app.command()
def rules(rules: Rules = None, debug: Debug = False) -> None:
    """List the gates, idioms and tuned numbers, with the rules' version and hash."""
    rulebook = _rulebook(rules)
    print(f"rules {rulebook.version} {rulebook.hash}")
    for gate in rulebook.gates.values():
        limits = ", ".join(f"{name} {number}" for name, number in gate.limits.items())
        print(f"{gate.code} {gate.name:20} {gate.comparison:2} {limits or gate.limit}")
    for pattern in rulebook.patterns.values():
        print(f"      {pattern.name:20} {pattern.what}")
    for field, number in rulebook.tuned():
        print(f"      {field:36} {number!s:16} {number.source}")


@app.command()
def ops(debug: Debug = False) -> None:
    """List the ops that are modelled, and whether they have a meaning that can be fused."""
    from fusion_advisor.ops import REGISTRY

    for name, op in sorted(REGISTRY.items()):
        print(f"{name:56} {op.pattern:12} {'fusible' if op.meaning else 'counted'}")


@app.command()
def doctor(debug: Debug = False) -> None:
    """Say what this machine can run and what it cannot."""
    from fusion_advisor.machine import choose_device, gpu_names, ptxas, version

    gpus, assembler = gpu_names(), ptxas()
    triton = version("triton")
    rows = {
        "python": sys.version.split()[0],
        "fusion-advisor": version("fusion-advisor") or "not installed",
        "torch": version("torch") or "missing: models cannot be captured; pip install torch",
        "triton": triton or "missing: kernels are not checked; pip install triton",
        "transformers": version("transformers") or "missing: hf: models need it",
        "GPU": ", ".join(gpus) or "none: kernels are checked by Triton's interpreter",
        "device": choose_device(None, _rulebook(None), gpus)[1],
        "interpreter": "yes" if triton else "no: needs triton",
        "ptxas": str(assembler or "missing: kernels are not compiled"),
    }
    for name, value in rows.items():
        print(f"{name:15} {value}")


if __name__ == "__main__":
    main()
