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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from fusion_advisor.errors import AdvisorError, PatchError, UsageError
from fusion_advisor.files import require_folder, write

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.status import Status

    from fusion_advisor.cache import Outcome
    from fusion_advisor.configuration import Settings
    from fusion_advisor.patching import Patched
    from fusion_advisor.pipeline import Analysis
    from fusion_advisor.records import Graph
    from fusion_advisor.report import Report
    from fusion_advisor.rulebook import Rulebook
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
_FORMATS = "text, json, md, html, sarif or model-explorer"
Baseline = Annotated[
    Path | None, typer.Option(help="an earlier report.json, or the folder that --out left")
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        help="exit with 1: new, accepted, unverified, regression[=SHARE], coverage[=SHARE]"
    ),
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
    """What every command takes that captures a model. None: as pyproject.toml has it, else by
    default."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="file.py, file.py:name, package.module:name, hf:config.json[#AutoClass], a .pt2;"
            " the one of [tool.fusion-advisor] if left out",
        ),
    ] = None
    scenario: Annotated[
        str | None, typer.Option(help="one scenario of [tool.fusion-advisor], by its name")
    ] = None
    device: Annotated[
        str | None, typer.Option(help="GPU to judge for (default: the one here, else h200)")
    ] = None
    mode: Annotated[str | None, typer.Option(help="eval (default) or train")] = None
    dtype: Annotated[str | None, typer.Option(help="dtype that the model is built in")] = None
    autocast: Annotated[
        str | None, typer.Option(help="dtype of torch.autocast around the model")
    ] = None
    batch: Annotated[int | None, typer.Option(help="size of the inputs' first dimension")] = None
    seq: Annotated[int | None, typer.Option(help="size of the inputs' second dimension")] = None
    input: Annotated[
        list[str] | None,
        typer.Option("--input", help="an input as NAME=SHAPE:DTYPE, x=4x128:int64"),
    ] = None
    dynamic: Annotated[bool | None, typer.Option("--dynamic", help="keep sizes symbolic")] = None
    phase: Annotated[str | None, typer.Option(help="forward (default), prefill or decode")] = None
    kv_len: Annotated[int | None, typer.Option(help="filled length of the cache in decode")] = None
    rules: Rules = None
    timeout: Annotated[
        float | None, typer.Option(help="seconds that the model's code may run (default: 180)")
    ] = None
    memory: Annotated[
        float | None, typer.Option(help="GiB that the model's code may use (default: 8)")
    ] = None
    verify: Annotated[bool, typer.Option(help="check every kernel against fp64")] = True
    compile: Annotated[bool, typer.Option(help="compile every kernel for the device")] = True
    verbose: Annotated[bool, typer.Option("--verbose", help="show the time of each stage")] = False
    debug: Debug = False

    def settings(self, **more: Any) -> Settings:
        """The options, and `more` of them by their keys, over what pyproject.toml has. UsageError
        for a wrong value."""
        from fusion_advisor.configuration import ScenarioTable, settled

        asked = {name.replace("_", "-"): getattr(self, name, None) for name in _keys(ScenarioTable)}
        rules = [str(path) for path in self.rules] if self.rules else None
        given = {
            "model": self.model, "device": self.device, "rules": rules,
            "timeout": self.timeout, "memory": self.memory, **more,
        }  # fmt: skip
        return settled(_given(given), _given(asked), self.scenario)

    def request(
        self, settings: Settings, folder: str | None, scenario: str | None = None
    ) -> Request:
        """One scenario of the settings as a request, kernels going to `folder`. UsageError where
        there are several and none is named."""
        from fusion_advisor.scenario import Limits, Request

        values, asked = settings.values, settings.scenarios[scenario or settings.only].scenario
        if asked.phase != "forward" and not settings.model.startswith("hf:"):
            raise UsageError(f"phase {asked.phase}: only for hf: models, which have a cache")
        return Request(
            model=settings.model,
            scenario=asked,
            limits=Limits(values.timeout, int(values.memory * GIB)),
            device=values.device,
            rules=settings.rules,
            verify=self.verify,
            compile=self.compile,
            folder=folder,
            command=_regenerate(scenario if len(settings.scenarios) > 1 else None),
            debug=self.debug,
        )


def _keys(table: type[BaseModel]) -> list[str]:
    return list(table.model_fields)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


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
        list[str] | None, typer.Option(help=f"{_FORMATS}, with =FILE into a file")
    ] = None,
    json: Annotated[str | None, typer.Option(help="the JSON report's file; - is stdout")] = None,
    baseline: Baseline = None,
    fail_on: FailOn = None,
    top: Annotated[int, typer.Option(help="rows of each list in the text", min=0)] = 10,
    with_graph: Annotated[
        bool, typer.Option("--with-graph", help="put the captured graph into the report")
    ] = False,
    cache: Annotated[
        bool, typer.Option(help="take what an earlier run of the unchanged model came to")
    ] = True,
) -> int:
    """Report what to fuse in MODEL, why, and what it saves; in each of its scenarios."""
    from fusion_advisor.reviewing import Reviewing, unused_comments

    outputs = _outputs(format or [], json)
    settings = options.settings(**{"baseline": _text(baseline), "fail-on": fail_on})
    several = len(settings.scenarios) > 1
    if several and any(output.file is None for output in outputs):
        raise UsageError("several scenarios: give each format =FILE, or choose one: --scenario")
    if out is not None:
        require_folder(out)
    tree = _tree_of(Path.cwd() / "any")
    reviewing = Reviewing(settings, _rulebook(settings.rules), tree)
    kernels = "kernels" if out else None
    requests = {name: options.request(settings, kernels, name) for name in settings.scenarios}
    reports: dict[str, Report] = {}
    for name, request in requests.items():
        if several:
            _tell(f"scenario {name}")
        outcome = _outcome(request, options.verbose, cached=cache and not options.debug)
        report = reports[name] = outcome.report
        if with_graph:
            report.graph = dict(outcome.graph)
        reviewing.review(name, report)
        if out is not None:
            _write_folder(out / name if several else out, outcome)
        _deliver(report, [output.of(name) for output in outputs] if several else outputs)
        if not any(output.name == "text" for output in outputs):
            _show(report, top)
    if several:
        _weigh(settings, reports, out)
    for line in unused_comments(reports):
        _tell(line)
    failures = [*reviewing.failures(reports)]
    for line in failures:
        _tell(f"fusion-advisor: {line}")
    return FAILED if failures else 0


def _weigh(settings: Settings, reports: Mapping[str, Report], out: Path | None) -> None:
    """Says what all scenarios come to, and leaves it beside their folders."""
    from fusion_advisor.weighted import as_data, described, weighed

    rows = [weighed(name, settings.scenarios[name].weight, reports[name]) for name in reports]
    for line in described(rows):
        _tell(line)
    if out is not None:
        write(out / "scenarios.json", dumps(as_data(rows), indent=1) + "\n")


@app.command()
@_takes_options
def config(options: _Options, *, baseline: Baseline = None, fail_on: FailOn = None) -> int:
    """Print what [tool.fusion-advisor] and the options set, each value with its origin."""
    given = {"baseline": _text(baseline), "fail-on": fail_on}
    for setting in options.settings(**given).each():
        value = "" if setting.value is None else dumps(setting.value)
        print(f"{'.'.join(setting.path):28} {value:24} {setting.origin}")
    return 0


@app.command()
def init(
    model: Annotated[
        str, typer.Argument(metavar="FILE.py[:CLASS]", help="where the folder has several models")
    ] = "",
    debug: Debug = False,
) -> None:
    """Write [tool.fusion-advisor] for a model that is found below the working directory."""
    from fusion_advisor.configuration import FILE, TABLE, has_table
    from fusion_advisor.scaffold import ADAPTER, adapter, block, chosen

    root = Path.cwd().resolve()
    table, made = root / FILE, root / ADAPTER
    if has_table(table):
        raise UsageError(f"{FILE}: has [{TABLE}] already; edit that")
    one = chosen(root, model)
    if not one.complete:
        if made.exists():
            raise UsageError(f"{ADAPTER}: is there already; complete it, then init {ADAPTER}:Model")
        write(made, adapter(one))
        _tell(f"{ADAPTER}: takes {one.model}; complete it where it raises")
    before = f"{table.read_text(encoding='utf-8')}\n" if table.is_file() else ""
    write(table, before + block(one.model if one.complete else ADAPTER))
    _tell(f"{FILE}: has [{TABLE}]; fusion-advisor analyze takes it from there")


@app.command()
@_takes_options
def emit(
    options: _Options, *, out: Annotated[Path, typer.Option(help="folder for the kernels")]
) -> int:
    """Write a checked Triton kernel for each accepted group of MODEL."""
    require_folder(out)
    analysis = _analyze(options.request(options.settings(), str(out)), options.verbose)
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

    settings = options.settings()
    model = settings.model
    if model.startswith("hf:"):
        if out is None or check or model_new or level != "kernel":
            raise UsageError(f"patch {model}: takes --out FILE and no other form of patch")
        return _patch_family(options, settings, out, root or _tree_of(out))
    file = Path(model.partition(":")[0])
    if file.suffix != ".py":
        raise UsageError(f"patch {model}: only a model in a .py file, or of hf:, has a source")
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    if check:
        return _check_kernels(file, settings.rules)
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
    request = options.request(settings, "kernels")

    def captured(
        model: str, scenario: Scenario, references: str | None, moved: tuple[str, str] | None
    ) -> Graph:
        return capture(
            model, scenario, request.limits, request.debug,
            trail=True, references=references, moved=moved,
        )  # fmt: skip

    if model_new is not None and model.partition(":")[2] not in ("", "Model"):
        raise UsageError(f"--model-new: {model} is not a class called Model")
    with Console(stderr=True).status("starting") as status:
        made = patched(
            request, tree, captured, _Terminal(status, options.verbose),
            diff=out is not None, model_new=model_new is not None, operators=operators,
        )  # fmt: skip
    return _written(made, out, model_new, operators=operators)


def _patch_family(options: _Options, settings: Settings, out: Path, root: Path) -> int:
    """A package that swaps classes of transformers, whose source is not the user's."""
    from rich.console import Console

    require_folder(out.parent)
    if not root.is_dir():
        raise UsageError(f"--root {root}: no such folder")
    request = options.request(settings, "kernels")
    with Console(stderr=True).status("starting") as status:
        from fusion_advisor.transformers_patch import patched_family

        listener = _Terminal(status, options.verbose)
        made = patched_family(request, root.resolve(), listener)
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
    if made.diff and made.ran:
        _tell(f"{out}: {made.ran}")
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


def _one_of(option: str, value: str, *known: str) -> Any:
    if value not in known:
        raise UsageError(f"{option} {value!r}: expected {' or '.join(known)}")
    return value


_KEPT_OPTIONS = frozenset(
    {"--device", "--mode", "--dtype", "--autocast", "--batch", "--seq", "--input", "--phase",
     "--kv-len", "--rules", "--scenario"}
)  # fmt: skip


def _regenerate(scenario: str | None) -> str:
    """The command that makes the same kernels again: the model and its scenario, by its name where
    it is one of several."""
    import shlex

    words = sys.argv[2:]
    kept = ["--scenario", scenario] if scenario else []
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
    | {"--model-new", "--root", "--level", "--baseline"}
)


def _analyze(request: Request, verbose: bool) -> Analysis:
    from fusion_advisor.capture import capturing

    with capturing(request.model, request.scenario, request.limits, request.debug) as captured:
        from rich.console import Console  # while the child imports torch

        from fusion_advisor.pipeline import analyze

        with Console(stderr=True).status("starting") as status:
            return analyze(request, captured, _Terminal(status, verbose))


def _outcome(request: Request, verbose: bool, *, cached: bool) -> Outcome:
    """The report, kernels and graph of a request: of the cache where it has them, else anew."""
    from fusion_advisor.cache import Outcome, cache_folder, find, keep

    rulebook, folder = _rulebook(request.rules), cache_folder()
    found = find(folder, request, rulebook) if cached else None
    if found is not None:
        _tell(f"assumed: {'; '.join(found.report.scenario.defaults)}")
        _tell(f"nothing changed since an earlier run: taken from {folder}; --no-cache runs again")
        return found
    started = time.time()
    analysis = _analyze(request, verbose)
    graph = analysis.flow.annotated.graph
    texts = {kernel.name: kernel.text for kernel in analysis.kernels}
    outcome = Outcome(analysis.report, texts, _as_json(graph))
    if cached and not _failed_check(analysis.report):
        keep(folder, request, rulebook, outcome, graph.files, started)
    return outcome


def _failed_check(report: Report) -> bool:
    """Did a check fail, which may have been for want of time or memory?"""
    checks = [group.kernel.check for group in report.groups]
    return any(check is not None and not check.passed for check in checks)


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
    settings = options.settings()
    if settings.model.endswith(".json") and not settings.model.startswith("hf:"):
        folder = Path(settings.model).parent
    else:
        folder = out or Path("bench")
        require_folder(folder)
        request = options.request(settings, "kernels")
        _write_folder(folder, _outcome(request, options.verbose, cached=False))
    return _bench(
        folder, out or folder, settings, only or [], candidates=candidates, resume=resume,
        compiled=torch_compile, whole=whole, rehearse=rehearse,
    )  # fmt: skip


def _bench(
    folder: Path,
    out: Path,
    settings: Settings,
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

    given = Path(settings.model)
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

        rulebook = _rulebook(settings.rules)
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

    def of(self, scenario: str) -> _Output:
        """The same for one scenario of several: `report.decode.json` for `report.json`."""
        assert self.file is not None
        return _Output(self.name, self.file.with_suffix(f".{scenario}{self.file.suffix}"))


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


def _write_folder(out: Path, outcome: Outcome) -> None:
    """The kernels and every format of the report, in place of what an earlier run left."""
    from fusion_advisor.reports import EXTENSIONS, render

    write(out / "graph.json", dumps(outcome.graph))
    stale = _kernel_files(out)
    for name, text in outcome.kernels.items():
        write(out / "kernels" / f"{name}.py", text)
    for file in stale - {f"{name}.py" for name in outcome.kernels}:
        (out / "kernels" / file).unlink(missing_ok=True)
    for name, extension in EXTENSIONS.items():
        write(out / f"report.{extension}", render(outcome.report, name))


def _kernel_files(out: Path) -> set[str]:
    """The kernels that the report in a folder names: files of ours, unlike others beside them."""
    from fusion_advisor.report import load_report

    try:
        groups = load_report(out / "report.json").groups
    except UsageError:
        return set()  # no report, or none of this version: whose the files are is not known
    return {Path(group.kernel.file).name for group in groups if group.kernel.file}


def _as_json(graph: Graph) -> dict[str, Any]:
    from json import loads

    from fusion_advisor.wire import graph_to_json

    return loads(graph_to_json(graph))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


# -- reports that are there ------------------------------------------------------------------------


@app.command()
def report(
    file: Annotated[Path, typer.Argument(metavar="REPORT.json")],
    format: Annotated[
        list[str] | None, typer.Option(help=f"{_FORMATS}, with =FILE into a file (default: text)")
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
    fail_on: FailOn = None,
    debug: Debug = False,
) -> int:
    """Say what a change did to traffic and verdicts."""
    from fusion_advisor.compare import compare
    from fusion_advisor.conditions import parse_condition, violation
    from fusion_advisor.report import load_report
    from fusion_advisor.review import Policy, review

    conditions = [parse_condition(text) for text in fail_on or []]
    before, after = load_report(old), load_report(new)
    for line in compare(before, after):
        print(line)
    if conditions:
        after.review = review(after, Policy(), Path.cwd(), (str(old), before))
    broken = {condition.name: violation(condition, after, before) for condition in conditions}
    for name, why in broken.items():
        if why:
            _tell(f"fusion-advisor: --fail-on {name}: {why}")
    return FAILED if any(broken.values()) else 0


# -- what is known ---------------------------------------------------------------------------------


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(metavar="CODE|NAME")] = None,
    all: Annotated[bool, typer.Option("--all", help="every gate and idiom")] = False,
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Say what a gate or idiom asks, why, its limits and their sources."""
    from fusion_advisor.explanation import entry, explanation

    rulebook = _rulebook(rules)
    if all:
        chosen = [*rulebook.gates.values(), *rulebook.patterns.values()]
    elif name:
        chosen = [entry(rulebook, name)]
    else:
        raise UsageError("explain what? Give a code or name (FA401, softmax), or --all")
    print("\n\n".join(explanation(rulebook, rule) for rule in chosen))


def _rulebook(rules: Sequence[Path] | None) -> Rulebook:
    from fusion_advisor.rulefiles import load_rulebook

    return load_rulebook(rules or ())


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
    from fusion_advisor.cache import cache_folder
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
        "cache": str(cache_folder()),
    }
    for name, value in rows.items():
        print(f"{name:15} {value}")


if __name__ == "__main__":
    main()
