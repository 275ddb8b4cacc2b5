"""Settings of a repository: `[tool.fusion-advisor]` in its pyproject.toml, under the options of a
command, over the defaults. Each value knows where it is from."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fusion_advisor.ci.conditions import parse_condition
from fusion_advisor.ir.recording_file import call_of, recording_of
from fusion_advisor.ir.scenario import Scenario, parse_dtype, parse_input
from fusion_advisor.rulebook.quantities import Tree, table_of
from fusion_advisor.support.errors import UsageError

FILE = "pyproject.toml"
TABLE = "tool.fusion-advisor"
ONLY = "default"
"""Name of the scenario where none has a name."""

Keys = tuple[str, ...]


def _hyphened(name: str) -> str:
    return name.replace("_", "-")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, alias_generator=_hyphened)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Tree:
        expected = ", ".join(map(_hyphened, cls.model_fields))
        table = table_of(data)
        if table is None:
            raise ValueError(f"{data!r}; expected a table with {expected}")
        for key in table:
            if key.replace("-", "_") not in cls.model_fields or "_" in key:
                raise ValueError(f"unknown key {key!r}; expected {expected}")
        return table


def _one_line(check: Any) -> AfterValidator:
    """A parser as a check of a value, which stays as it was written."""

    def checked(text: str) -> str:
        try:
            check(text)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return text

    return AfterValidator(checked)


def _floating(*known: str) -> AfterValidator:
    """Accept a dtype that models can be built or run in."""

    def check(text: str) -> None:
        if parse_dtype(text) not in known:
            raise UsageError(f"{text!r}; expected {' or '.join(known)}")

    return _one_line(check)


BuiltIn = Annotated[str, _floating("float64", "float32", "bfloat16", "float16")]
RunIn = Annotated[str, _floating("bfloat16", "float16")]
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Growth = Annotated[float, Field(ge=0)]
Input = Annotated[str, _one_line(parse_input)]
Condition = Annotated[str, _one_line(parse_condition)]


class ScenarioTable(_Table):
    """A scenario: how the model is run, and its weight, in steps."""

    weight: float = Field(default=1.0, gt=0)
    mode: Literal["eval", "train"] = "eval"
    dtype: BuiltIn | None = None
    autocast: RunIn | None = None
    batch: Size | None = None
    seq: Size | None = None
    input: list[Input] = []
    dynamic: bool = False
    phase: Literal["forward", "prefill", "decode"] = "forward"
    kv_len: Size | None = None
    grad: bool | None = None
    optimizer: Literal["none", "adamw", "sgd", "module"] = "adamw"

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            mode=self.mode,
            dtype=parse_dtype(self.dtype) if self.dtype else None,
            autocast=parse_dtype(self.autocast) if self.autocast else None,
            batch=self.batch,
            seq=self.seq,
            inputs=tuple(map(parse_input, self.input)),
            dynamic=self.dynamic,
            phase=self.phase,
            kv_len=self.kv_len,
            grad=self.grad,
            optimizer=self.optimizer,
        )


class Thresholds(_Table):
    """Thresholds: a group that saves less than `saved_us` microseconds or `share` of the step is no
    finding, and no patch puts it into the source; where `share` is not given, every saving is a
    finding, and a patch has the rules' own. `coverage` is what `--fail-on coverage` needs,
    `regression` the growth that `--fail-on regression` allows."""

    saved_us: Growth = 0.0
    share: Share | None = None
    coverage: Share = 1.0
    regression: Growth = 0.0


class Configuration(_Table):
    """The table's keys, with hyphens for underscores. Paths are seen from the pyproject.toml.
    `timeout` is in seconds, `memory` in GiB."""

    model: str | None = None
    device: str | None = None
    rules: list[str] = []
    timeout: float = Field(default=180.0, gt=0)
    memory: float = Field(default=8.0, gt=0)
    select: list[str] = []
    ignore: list[str] = []
    ignore_in: dict[str, list[str]] = {}
    baseline: str | None = None
    fail_on: list[Condition] = []
    thresholds: Thresholds = Thresholds()
    scenarios: dict[str, ScenarioTable] = {}


@dataclass(frozen=True)
class Layer:
    """Values from one origin, by their path in the table."""

    tree: Tree
    file: Path | None = None
    """None: they are options of the command."""

    def origin(self, path: Keys) -> str:
        """The origin of a value, in the user's words."""
        if self.file is None:
            return "MODEL" if path == ("model",) else f"--{path[-1]}"
        if self.file.name != FILE:  # a recording
            return str(self.file)
        return f"{self.file} [{'.'.join((TABLE, *path[:-1]))}]"

    def field(self, path: Keys) -> str:
        return self.origin(path) if self.file is None else f"{self.origin(path)} {path[-1]}"


@dataclass(frozen=True)
class Setting:
    """A value by its path, with its origin."""

    path: Keys
    value: Any
    layer: Layer | None
    """None: it is the default."""

    @property
    def origin(self) -> str:
        """The origin of the value, in the user's words."""
        return self.layer.origin(self.path) if self.layer else "default"

    @property
    def field(self) -> str:
        """The origin with the key, for a message about the value."""
        return self.layer.field(self.path) if self.layer else self.path[-1]


@dataclass(frozen=True)
class Settings:
    """All settings, and the scenarios to run, by name."""

    values: Configuration
    scenarios: Mapping[str, ScenarioTable]
    layers: Sequence[Layer]
    recorded: bool = False
    """Whether the scenarios are the calls of a recording."""

    @property
    def model(self) -> str:
        """MODEL. Raises UsageError where none is set."""
        if self.values.model is None:
            raise UsageError(f"MODEL is missing: give it, or set model in {FILE} [{TABLE}]")
        return self.values.model

    def model_in(self, scenario: str) -> str:
        """MODEL in one of the scenarios: for a recording, the call. Raises UsageError where
        none is set."""
        return call_of(self.model, scenario) if self.recorded else self.model

    @property
    def rules(self) -> tuple[Path, ...]:
        return tuple(map(Path, self.values.rules))

    @property
    def only(self) -> str:
        """Name of the only scenario. Raises UsageError where there are several."""
        if len(self.scenarios) > 1:
            raise UsageError(f"--scenario is missing: one of {', '.join(self.scenarios)}")
        return next(iter(self.scenarios))

    def each(self) -> Iterator[Setting]:
        """Every value, in the order of the table."""
        for path, value in _leaves(self.values.model_dump(by_alias=True)):
            layer = next((one for one in reversed(self.layers) if _has(one.tree, path)), None)
            yield Setting(path, value, layer)


def load_settings(
    options: Tree, asked: Tree, scenario: str | None = None, folder: Path | None = None
) -> Settings:
    """The table that is found from `folder` (the working directory) upwards, under `options`, by
    their paths in it, and what is `asked` of every scenario. Of another model than the table's,
    its scenarios and baseline are not; unless a `scenario` is chosen by name. The calls of a
    recording are scenarios of which nothing but the weight can be set, and so is the one of an
    exported program.

    UsageError, one line with file and field or option, for an unknown key or a wrong value.
    """
    found = _found((folder or Path.cwd()).absolute())
    below = [_of_model(found, options.get("model"), scenario)] if found else []
    recorded = _recorded(options.get("model") or (below[0].tree.get("model") if below else None))
    below = [*recorded, *below]
    named = _validated(below).scenarios
    if scenario is not None and scenario not in named:
        raise UsageError(f"--scenario {scenario!r}: known: {', '.join(named) or 'none'}")
    names = [scenario] if scenario is not None else list(named) or [ONLY]
    layers = [*below, Layer({**options, "scenarios": dict.fromkeys(names, asked)})]
    values = _validated(layers)
    for name in names:
        if not re.fullmatch(r"[\w-]+", name):
            raise UsageError(f"scenario {name!r}: a name has letters, digits, _ and - alone")
    if recorded:
        _refuse_unrecorded(recorded[0], below, names)
        why = f"the calls in {recorded[0].file} are as they were recorded; record others"
        _refuse_others(layers, values, _validated(recorded), names, why)
    elif values.model is not None and values.model.endswith(".pt2"):
        why = f"{values.model} is as it was exported; export it so"
        _refuse_others(layers, values, Configuration(), names, why)
    scenarios = {name: values.scenarios[name] for name in names}
    return Settings(values, scenarios, layers, bool(recorded))


def _recorded(model: Any) -> list[Layer]:
    """The scenarios of a recording, as a table has them; none for any other model."""
    recording = recording_of(model) if isinstance(model, str) else None
    if recording is None:
        return []
    calls = {
        call.name: {
            "weight": call.count,
            "mode": call.mode,
            "autocast": call.autocast,
            "grad": call.grad,
        }
        for call in recording.captured.values()
    }
    return [Layer({"scenarios": calls}, recording.file)]


def _refuse_unrecorded(recorded: Layer, layers: Sequence[Layer], names: Sequence[str]) -> None:
    """Raise UsageError for a scenario that was not recorded."""
    calls = recorded.tree["scenarios"]
    for name in names:
        if name not in calls:
            where = _where(layers, ("scenarios", name))
            raise UsageError(f"{where}: {recorded.file} has {', '.join(calls)}")


def _refuse_others(
    layers: Sequence[Layer],
    asked: Configuration,
    made: Configuration,
    names: Sequence[str],
    why: str,
) -> None:
    """Raise UsageError where settings other than the weight are asked of a model whose scenarios
    are fixed (`made`)."""
    for name in names:
        of = made.scenarios.get(name, ScenarioTable())
        for key in ScenarioTable.model_fields:
            if key != "weight" and getattr(asked.scenarios[name], key) != getattr(of, key):
                where = _where(layers, ("scenarios", name, _hyphened(key)))
                raise UsageError(f"{where}: {why}, or give the model itself")


def _of_model(layer: Layer, model: Any, scenario: str | None) -> Layer:
    """The part of a table that holds for the model asked for; None: the table's own model."""
    own = layer.tree.get("model")
    if model is None or (isinstance(own, str) and os.path.normpath(own) == os.path.normpath(model)):
        return layer
    others = {"model", "baseline"} if scenario else {"model", "baseline", "scenarios"}
    return Layer({k: v for k, v in layer.tree.items() if k not in others}, layer.file)


def _found(folder: Path) -> Layer | None:
    """The table of the nearest pyproject.toml that has one, within the git working tree."""
    for place in (folder, *folder.parents):
        file = place / FILE
        if file.is_file() and (table := _table(file)) is not None:
            return Layer(_seen_from_here(table, place), Path(os.path.relpath(file)))
        if (place / ".git").exists():
            return None
    return None


def has_table(file: Path) -> bool:
    """Whether a pyproject.toml has the table. Raises UsageError where the file is no TOML."""
    return file.is_file() and _table(file) is not None


def _table(file: Path) -> Tree | None:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: expected TOML: {error}") from error
    table = (table_of(content.get("tool")) or {}).get("fusion-advisor")
    if table is not None and table_of(table) is None:
        raise UsageError(f"{file}: {TABLE}: {table!r}; expected a table")
    return table


def _seen_from_here(table: Tree, folder: Path) -> Tree:
    """The table with paths of files as they are from the working directory."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in cast("list[Any]", value)]
        return _moved(value, folder) if isinstance(value, str) else value

    paths = ("model", "rules", "baseline")
    return {key: moved(value) if key in paths else value for key, value in table.items()}


def _moved(text: str, folder: Path) -> str:
    """A path, or a MODEL with one, as it is from the working directory; a module's name as is."""
    found = re.fullmatch(r"(hf:)?([^#:]+)(.*)", text)
    if found is None or not (folder / found[2]).exists():
        return text
    return f"{found[1] or ''}{os.path.relpath(folder / found[2])}{found[3]}"


def _validated(layers: Sequence[Layer]) -> Configuration:
    tree: Tree = {}
    for layer in layers:
        tree = _merged(tree, layer.tree)
    try:
        return Configuration.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = tuple(str(part) for part in first["loc"] if isinstance(part, str))
        raise UsageError(f"{_where(layers, path)}: {_said(first)}") from error


def _where(layers: Sequence[Layer], path: Keys) -> str:
    """The layer that set a value, or came nearest to it; of equals the last."""
    while path:
        for layer in reversed(layers):
            if _has(layer.tree, path):
                return layer.field(path)
        path = path[:-1]
    return layers[0].origin(("",)) if layers else TABLE


def _said(error: Any) -> str:
    message = str(error["msg"])
    if error["type"] == "value_error":
        return message.removeprefix("Value error, ")
    return f"{error['input']!r}; {message.replace('Input should be', 'expected')}"


def _merged(under: Tree, over: Tree) -> Tree:
    """`over` laid over `under`, table by table."""
    merged = {**under, **over}
    for key in under.keys() & over.keys():
        below, above = table_of(under[key]), table_of(over[key])
        if below is not None and above is not None:
            merged[key] = _merged(below, above)
    return merged


def _has(tree: Tree, path: Keys) -> bool:
    for part in path[:-1]:
        tree = table_of(tree.get(part)) or {}
    return path[-1] in tree


def _leaves(tree: Tree, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in tree.items():
        if below := table_of(value):
            yield from _leaves(below, (*path, key))
        else:
            yield (*path, key), value
