"""Options that several commands share, as settings, a request, and the command that repeats
the run."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fusion_advisor.support.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fusion_advisor.ci.configuration import Settings
    from fusion_advisor.ir.scenario import Request
    from fusion_advisor.rulebook.schema import Rulebook


GIB = 1 << 30

FAILED = 1
"""Exit code of a `--fail-on` condition."""

FORMAT_NAMES = "text, json, md, html, sarif or model-explorer"

Rules = Annotated[
    list[Path] | None, typer.Option("--rules", help="TOML file or folder laid over the rules")
]
Baseline = Annotated[
    Path | None, typer.Option(help="an earlier report.json, or the folder that --out left")
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        help="exit with 1: new, accepted, advice, unverified, fault, regression[=SHARE],"
        " regression-time[=SHARE], coverage[=SHARE]"
    ),
]
Select = Annotated[
    list[str] | None, typer.Option(help="findings of this code or name alone; repeatable")
]
Ignore = Annotated[
    list[str] | None, typer.Option(help="set findings of this code or name aside; repeatable")
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="on a GPU: time other numbers of the launches, keep the fastest in tuning/",
    ),
]
Redact = Annotated[
    bool,
    typer.Option("--redact", help="leave out source text, paths and names of modules and tensors"),
]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks and the model's output")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command that captures a model. None: as pyproject.toml has it, else
    by default."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="file.py, file.py:name, package.module:name, hf:config.json[#AutoClass], a .pt2,"
            " a recording; the one of [tool.fusion-advisor] if left out",
        ),
    ] = None
    scenario: Annotated[
        str | None, typer.Option(help="one scenario of [tool.fusion-advisor] or of a recording")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="GPU to judge for (default: h200; the one here in bench and --search)"),
    ] = None
    mode: Annotated[str | None, typer.Option(help="eval (default) or train")] = None
    optimizer: Annotated[
        str | None,
        typer.Option(help="of a training step: adamw (default), sgd, module (the file's) or none"),
    ] = None
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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="show all of the report, and each stage's time")
    ] = False
    strict: Annotated[
        bool, typer.Option("--strict", help="a fault of ours in one region ends the run (exit 4)")
    ] = False
    debug: Debug = False

    def settings(self, **more: Any) -> Settings:
        """The options, and `more` of them by their keys, over what pyproject.toml has. UsageError
        for a wrong value."""
        from fusion_advisor.ci.configuration import ScenarioTable, load_settings

        asked = {name.replace("_", "-"): getattr(self, name, None) for name in _keys(ScenarioTable)}
        rules = [str(path) for path in self.rules] if self.rules else None
        given = {
            "model": self.model, "device": self.device, "rules": rules,
            "timeout": self.timeout, "memory": self.memory, **more,
        }  # fmt: skip
        return load_settings(only_given(given), only_given(asked), self.scenario)

    def request(
        self,
        settings: Settings,
        folder: str | None,
        scenario: str | None = None,
        *,
        measured: bool = False,
        step: bool = False,
    ) -> Request:
        """One scenario of the settings as a request, kernels going to `folder`; judged for the GPU
        here, if no device is asked for, where it is `measured` on that. With `step` train mode is a
        whole training step. UsageError where there are several scenarios and none is named."""
        from fusion_advisor.ir.scenario import Least, Limits, Request
        from fusion_advisor.rulebook.local_gpu import gpu_names, has_triton

        name = scenario or settings.only
        values, asked = settings.values, settings.scenarios[name].scenario
        if asked.phase != "forward" and not settings.model.startswith("hf:"):
            raise UsageError(f"phase {asked.phase}: only for hf: models, which have a cache")
        if asked.kv_len is not None and asked.phase != "decode":
            raise UsageError(f"kv-len {asked.kv_len}: only for phase decode, not {asked.phase}")
        return Request(
            model=settings.model_in(name),
            scenario=replace(asked, step=step and asked.mode == "train"),
            limits=Limits(values.timeout, int(values.memory * GIB)),
            device=values.device,
            rules=settings.rules,
            verify=self.verify and has_triton(),
            compile=self.compile and has_triton(),
            folder=folder,
            command=regenerate(scenario if len(settings.scenarios) > 1 else None),
            debug=self.debug,
            strict=self.strict,
            gpus=gpu_names() if measured else (),
            least=Least(values.thresholds.saved_us, values.thresholds.share),
        )


def _keys(table: type[BaseModel]) -> list[str]:
    return list(table.model_fields)


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose first parameter is `Options`, as typer sees it: each field a parameter."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    types = get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[option.name],
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
        )
        for option in fields(Options)
    ]  # fmt: skip

    @functools.wraps(command)
    def run(**given: Any) -> int:
        options = Options(**{option.name: given.pop(option.name) for option in shared})
        return command(options, **given)

    vars(run)["__signature__"] = inspect.Signature([*own, *shared])
    return run


def reviewing_options(
    baseline: Path | None,
    fail_on: list[str] | None,
    select: list[str] | None,
    ignore: list[str] | None,
) -> dict[str, Any]:
    """Options of reviewers' policy, by their keys in pyproject.toml."""
    path = None if baseline is None else str(baseline)
    return {"baseline": path, "fail-on": fail_on, "select": select, "ignore": ignore}


def rulebook_of(rules: Sequence[Path] | None) -> Rulebook:
    """The rules with those of `--rules` laid over them."""
    from fusion_advisor.rulebook.load import load_rulebook

    return load_rulebook(rules or ())


_KEPT_OPTIONS = frozenset(
    {"--device", "--mode", "--optimizer", "--dtype", "--autocast", "--batch", "--seq", "--input",
     "--phase", "--kv-len", "--rules", "--scenario"}
)  # fmt: skip
_WITH_VALUE = frozenset(
    {"--out", "--format", "--json", "--timeout", "--memory", "--fail-on", "--top"}
    | {"--model-new", "--root", "--profile", "--level", "--baseline", "--select", "--ignore"}
)


def regenerate(scenario: str | None) -> str:
    """The command that makes the same kernels again: the model and its scenario, by its name where
    it is one of several."""
    words = sys.argv[2:]
    kept = ["--scenario", scenario] if scenario else []
    while words:
        word = words.pop(0)
        option = word.split("=")[0]
        if option in _KEPT_OPTIONS:
            kept.append(word)
            if "=" not in word and words:
                kept.append(words.pop(0))
        elif word in ("--dynamic", "--search") or not word.startswith("-"):
            kept.append(word)
        elif option in _WITH_VALUE and "=" not in word and words:
            words.pop(0)
    if sys.argv[1:2] == ["patch"]:
        return shlex.join(["fusion-advisor", "patch", *kept, "--out", "kernels.patch"])
    return shlex.join(["fusion-advisor", "emit", *kept, "--out", "kernels"])
