"""The rulebook's files: `rules/` as shipped, and a user's own laid over it.

In one overlay file the path of a field is the TOML key; an overlay folder is laid out as `rules/`
is. An overlaid number replaces the shipped one whole, source included.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fusion_advisor.rulebook.quantities import Table, Tree, table_of
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import AdvisorError, UsageError

_FOLDERS = ("advice", "devices", "gates", "patterns", "rewrites", "schedules")
_NAMED = ("advice", "devices", "gates", "patterns", "rewrites")
_SHARED = ("times", "instructions")
"""Tables that all devices share, laid under each device's own."""

_EXAMPLES = frozenset({"holds", "fails", "never_fails", "example", "nearly"})

Layers = Sequence[tuple[Path, Tree]]
"""Files with their rules, each laid over the ones before it."""


def load_rulebook(overlays: Sequence[Path] = ()) -> Rulebook:
    """The shipped rules with `overlays` (TOML files or folders) laid over them, in order.

    UsageError, one line, when an overlay is missing, is not TOML, or has a wrong field.
    """
    if not overlays:
        return _shipped_rulebook()
    layers = [*_shipped_layers(), *(layer for path in overlays for layer in _read(Path(path)))]
    return _build(layers)


@lru_cache(maxsize=1)
def _shipped_rulebook() -> Rulebook:
    return _build(_shipped_layers())


@lru_cache(maxsize=1)
def _shipped_layers() -> tuple[tuple[Path, Tree], ...]:
    here = Path(__file__).resolve().parents[1]
    for root in (here / "rules", here.parent / "rules"):
        if (root / "model.toml").is_file():
            return tuple(_read(root))
    raise AdvisorError(f"the shipped rules are missing beside {here}: reinstall fusion-advisor")


def _read(path: Path) -> list[tuple[Path, Tree]]:
    """Each TOML file at `path` with its rules, placed where the folder says."""
    if path.is_file():
        return [(path, _parse(path))]
    if not path.is_dir():
        raise UsageError(f"{path}: no such rules file or folder")
    layers = [(file, _parse(file)) for file in sorted(path.glob("*.toml"))]
    for folder in _FOLDERS:
        for file in sorted((path / folder).glob("*.toml")):
            layers.append((file, {folder: {file.stem: _parse(file)}}))
    if not layers:
        raise UsageError(f"{path}: no rules; expected TOML files in it or in {', '.join(_FOLDERS)}")
    return layers


def _parse(file: Path) -> Tree:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: expected TOML: {error}") from error


def _merge(under: Tree, over: Tree) -> Tree:
    """`over` laid over `under`; a table that is a number replaces the one below whole."""
    merged = dict(under)
    for key, value in over.items():
        below, above = table_of(merged.get(key)), table_of(value)
        if below is None or above is None or "value" in above:
            merged[key] = value
        else:
            merged[key] = _merge(below, above)
    return merged


def _build(layers: Layers) -> Rulebook:
    tree: Tree = {}
    for _, layer in layers:
        tree = _merge(tree, layer)
    text = json.dumps(_deciding(tree), sort_keys=True, default=str)
    tree["hash"] = hashlib.sha256(text.encode()).hexdigest()
    for folder in _NAMED:
        tree[folder] = _named(tree.get(folder))
    for shared in _SHARED:
        tree["devices"] = _with_own(tree["devices"], shared, tree.get(shared))
    try:
        rulebook = Rulebook.model_validate(tree)
    except ValidationError as error:
        raise _first_fault(layers, error) from error
    _check_names(rulebook, layers)
    return rulebook


def _deciding(tree: Tree) -> Tree:
    """The rules without their examples: a changed example makes no kernel stale."""
    kept = {key: value for key, value in tree.items() if key not in _EXAMPLES}
    tables = {key: table for key, value in kept.items() if (table := table_of(value)) is not None}
    return kept | {key: _deciding(table) for key, table in tables.items()}


def _with_own(devices: Any, name: str, shared: Any) -> Any:
    """Give each device a table that all share, with its own laid over it."""
    tables, table = table_of(devices), table_of(shared)
    if tables is None or table is None:
        return devices

    def given(entry: Any) -> Any:
        device = table_of(entry)
        own = None if device is None else table_of(device.get(name, {}))
        return entry if device is None or own is None else {**device, name: _merge(table, own)}

    return {key: given(entry) for key, entry in tables.items()}


def _named(entries: Any) -> Any:
    """Give each entry the name of its table or file, and sort: by `order`, else by name."""
    tables = table_of(entries)
    if tables is None:
        return entries

    def place(name: str) -> tuple[float, str]:
        order = (table_of(tables[name]) or {}).get("order")
        return (order if isinstance(order, int) else 0, name)

    return {name: _with_name(name, tables[name]) for name in sorted(tables, key=place)}


def _with_name(name: str, entry: Any) -> Any:
    table = table_of(entry)
    return entry if table is None else {**table, "name": name}


def _check_names(rulebook: Rulebook, layers: Layers) -> None:
    """Check what spans fields: names that must exist, and names that must be unique."""
    for pattern in rulebook.patterns.values():
        for gate in pattern.gates:
            if gate not in rulebook.gates:
                expected = ", ".join(rulebook.gates)
                loc = ("patterns", pattern.name, "gates")
                raise _fault(layers, loc, f"unknown gate {gate!r}; expected {expected}")
    for name, knob in rulebook.tuning.knobs.items():
        schedule: Table = getattr(rulebook.schedules, knob.schedule)
        known = type(schedule).model_fields
        for number in knob.numbers:
            if number not in known:
                loc = ("tuning", "knobs", name, "numbers")
                raise _fault(layers, loc, f"unknown number {number!r}; expected {', '.join(known)}")
    codes: dict[str, str] = {}
    for gate in rulebook.gates.values():
        if codes.setdefault(gate.code, gate.name) != gate.name:
            taken = f"{gate.code} is taken by {codes[gate.code]}; expected a code of its own"
            raise _fault(layers, ("gates", gate.name, "code"), taken)
    names = {name: name for name in rulebook.devices}
    for device in rulebook.devices.values():
        for alias in device.aliases:
            if names.setdefault(alias, device.name) != device.name:
                taken = f"{alias!r} is taken by {names[alias]}; expected another"
                raise _fault(layers, ("devices", device.name, "aliases"), taken)


def _first_fault(layers: Layers, error: ValidationError) -> UsageError:
    """The first of the faults, with the number of the others; a fault in a shared table
    counts once."""
    first, *_ = errors = error.errors(include_url=False)
    places = [[str(part) for part in each["loc"] if part != "[key]"] for each in errors]
    count = len({tuple(_as_set(layers, place)) for place in places})
    loc = places[0]
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    more = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "missing":
        return _fault(layers, loc[:-1], f"{loc[-1]!r} is missing; expected a value{more}")
    if first["type"] != "value_error":
        message = f"{first['input']!r}; {message}"
    return _fault(layers, loc, message + more)


def _fault(layers: Layers, loc: Sequence[str], message: str) -> UsageError:
    """One line: the file, the field, what was expected."""
    loc = _as_set(layers, loc)
    return UsageError(f"{_file_of(layers, loc)}: {'.'.join(loc) or 'rules'}: {message}")


def _as_set(layers: Layers, loc: Sequence[str]) -> Sequence[str]:
    """The path of a field in its file: tables that devices share are copied to each device when
    they are read."""
    shared = loc[2:]
    if len(loc) < 3 or loc[0] != "devices" or loc[2] not in _SHARED:
        return loc
    own, common = (max(_depth(tree, place) for _, tree in layers) for place in (loc, shared))
    return shared if common + 2 > own else loc


def _file_of(layers: Layers, loc: Sequence[str]) -> Path:
    """The file that set a field, or the file that came nearest to it; of equals the last."""
    return max(reversed(layers), key=lambda layer: _depth(layer[1], loc))[0]


def _depth(tree: Tree, loc: Sequence[str]) -> int:
    """The number of steps of `loc` that a tree has."""
    node: Tree | None = tree
    for steps, part in enumerate(loc):
        if node is None or part not in node:
            return steps
        node = table_of(node[part])
    return len(loc)
