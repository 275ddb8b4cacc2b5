"""The body of a generated kernel: a plan's values as lines of Triton."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from fusion_advisor.primitives import MONOIDS, PRIMITIVES
from fusion_advisor.region import Expr
from fusion_advisor.schedules.base import Plan
from fusion_advisor.schedules.layout import Access, Group, gaps

TRITON_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}
_LANGUAGE = {"bool": "int1", "float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}
_LIMITS = {
    "int64": ("-9223372036854775808", "9223372036854775807"),
    "int32": ("-2147483648", "2147483647"),
    "int16": ("-32768", "32767"),
    "int8": ("-128", "127"),
    "uint8": ("0", "255"),
}
_RESERVED = frozenset({*keyword.kwlist, *dir(builtins)}) | frozenset(
    [
        "row",
        "col",
        "index",
        "mask",
        "row_mask",
        "col_mask",
        "rows",
        "cols",
        "count",
        "ROWS",
        "COLS",
        "BLOCK",
        "tl",
        "torch",
        "triton",
        "libdevice",
        "os",
        "warnings",
        "reference",
        "serves",
        "fall_back",
        "fallbacks",
        "problem",
        "within_reach",
    ]
)
"""What a generated name must not hide."""
_LONGEST_PART = 60
"""Columns; a longer part of an expression gets a line and a name of its own."""


def language_dtype(dtype: str) -> str:
    """`tl`'s name of a dtype."""
    return f"tl.{_LANGUAGE.get(dtype, dtype)}"


@dataclass
class Names:
    """Names that are unique within one file."""

    used: set[str] = field(default_factory=lambda: set(_RESERVED))

    def claim(self, wish: str) -> str:
        name = re.sub(r"\W", "_", wish).strip("_") or "value"
        name = f"v{name}" if name[0].isdigit() else name
        candidate, number = name, 1
        while candidate in self.used:
            candidate, number = f"{name}_{number}", number + 1
        self.used.add(candidate)
        return candidate


@dataclass
class Body:
    """A kernel in the making. `sizes` and `strides` collect the run-time arguments it needs, in
    the order of first use: group sizes by group, strides by (tensor name, group)."""

    plan: Plan
    tensors: dict[str, str]
    """Each access's own name to the name in the file."""
    precise: bool
    names: Names = field(default_factory=Names)
    sizes: dict[str, Sequence[Group]] = field(default_factory=dict[str, Sequence[Group]])
    strides: dict[str, tuple[Access, Group]] = field(
        default_factory=dict[str, tuple[Access, Group]]
    )
    helpers: dict[str, None] = field(default_factory=dict[str, None])
    coordinates: dict[str, None] = field(default_factory=dict[str, None])
    texts: dict[int, str] = field(default_factory=dict[int, str])
    lines: list[str] = field(default_factory=list[str])

    # -- where a tensor's elements are ---------------------------------------------------------

    def size(self, groups: Sequence[Group], name: str) -> str:
        """The run-time argument that holds the extent of some groups."""
        self.sizes.setdefault(name, groups)
        return name

    def total(self, groups: Sequence[Group]) -> str:
        """The extent of all outer or all inner groups."""
        if self.plan.schedule == "flat":
            return self.size(groups, "count")
        return self.size(groups, "cols" if groups == self.plan.inner else "rows")

    def extent_of(self, group: Group) -> str:
        for groups in (self.plan.outer, self.plan.inner):
            if groups == (group,):
                return self.total(groups)
        return self.size((group,), f"{group.name}_size")

    def offset(self, access: Access) -> str:
        """Elements from the tensor's first to the one that a program's lane addresses."""
        parts: list[str] = []
        for groups, linear in ((self.plan.outer, self._outer_name), (self.plan.inner, "col")):
            part = self._offset_within(access, groups, linear)
            if part:
                parts.append(part)
        return " + ".join(parts)

    @property
    def _outer_name(self) -> str:
        return "index" if self.plan.schedule == "flat" else "row"

    def _offset_within(self, access: Access, groups: Sequence[Group], linear: str) -> str:
        steps = gaps(access, (*self.plan.outer, *self.plan.inner))
        if not any(group.name in steps for group in groups):
            return ""
        after = steps.get(groups[-1].name)
        if after is not None and all(
            steps.get(group.name) == (*groups[place + 1 :], *after)
            for place, group in enumerate(groups)
        ):
            return self._times(linear, after)
        terms: list[str] = []
        for group in groups:
            if group.name not in steps:
                continue
            place, later = self.coordinate(group, groups, linear), steps[group.name]
            if later is None:
                name = f"{self.tensors[access.name]}_stride_{group.name}"
                self.strides.setdefault(name, (access, group))
                terms.append(f"{place} * {name}")
            else:
                terms.append(self._times(place, later))
        return " + ".join(terms)

    def _times(self, place: str, groups: Sequence[Group]) -> str:
        """A coordinate times the extents of the groups that it steps over."""
        if tuple(groups) == self.plan.inner and groups:
            return f"{place} * {self.total(groups)}"
        return " * ".join([place, *(self.extent_of(group) for group in groups)])

    def coordinate(self, group: Group, groups: Sequence[Group], linear: str) -> str:
        """The index within one group, taken from the linear index over all of them."""
        if len(groups) == 1:
            return linear
        if group.name not in self.coordinates:
            self.coordinates[group.name] = None
            after = groups[groups.index(group) + 1 :]
            text = linear
            for later in reversed(after):
                text = f"{text} // {self.extent_of(later)}"
            if group is not groups[0]:
                text = f"{text} % {self.extent_of(group)}"
            self.lines.append(f"{group.name} = {text}")
        return group.name

    def mask(self, access: Access) -> str:
        """The lanes that address an element; empty when all do."""
        inner = any(axis in access.strides for group in self.plan.inner for axis in group.axes)
        outer = any(axis in access.strides for group in self.plan.outer for axis in group.axes)
        if self.plan.schedule == "flat":
            return "mask" if outer else ""
        if self.plan.rows == 1:
            return "col_mask" if inner else ""
        if inner and outer:
            return "mask"
        return "col_mask" if inner else "row_mask" if outer else ""

    # -- what a value is -----------------------------------------------------------------------

    def render(self) -> list[str]:
        """Every line from the first load to the last store."""
        region = self.plan.region
        loads = iter(self.plan.loads)
        by_value = {
            number: next(loads) for number in region.live if region.exprs[number].op == "load"
        }
        uses: dict[int, list[int]] = {}
        for number in self.plan.order:
            for arg in region.exprs[number].args:
                uses.setdefault(arg, []).append(number)
        stored = {output.value for output in region.outputs}
        for number in self.plan.order:
            expr = region.exprs[number]
            if expr.op == "load":
                self._load(number, by_value[number])
                continue
            text = self._text(number)
            readers = uses.get(number, [])
            label = region.labels.get(number)
            alone = len(readers) == 1 and region.labels.get(readers[0]) == label
            alone = alone and expr.op != "reduce" and len(text) <= _LONGEST_PART
            inline = expr.op in ("const", "size") or (alone and number not in region.results)
            if inline and number not in stored:
                self.texts[number] = text
            else:
                self._assign(number, text)
        for output, access in zip(region.outputs, self.plan.stores, strict=True):
            self._store(access, self.texts[output.value])
        return self.lines

    def _assign(self, number: int, text: str) -> None:
        region = self.plan.region
        expr = region.exprs[number]
        part = expr.monoid or "part"
        wish = region.results.get(number) or f"{region.labels.get(number, 'value')}_{part}"
        name = self.names.claim(wish)
        self.lines.append(f"{name} = {_bare(text)}")
        self.texts[number] = name

    def _load(self, number: int, access: Access) -> None:
        name = self.names.claim(self.tensors[access.name])
        offset, mask = self.offset(access), self.mask(access)
        pointer = f"{self.tensors[access.name]}_ptr"
        where = f"{pointer} + {offset}" if offset else pointer
        held = self.plan.region.exprs[number].dtype
        neutral = {"float32": "0.0", "float64": "0.0", "bool": "False"}.get(held, "0")
        masked = f", mask={mask}, other={neutral}" if mask else ""
        converted = f".to({language_dtype(held)})" if held != access.tensor.dtype else ""
        self.lines.append(f"{name} = tl.load({where}{masked}){converted}")
        self.texts[number] = name

    def _store(self, access: Access, text: str) -> None:
        offset, mask = self.offset(access), self.mask(access)
        pointer = f"{self.tensors[access.name]}_ptr"
        where = f"{pointer} + {offset}" if offset else pointer
        masked = f", mask={mask}" if mask else ""
        self.lines.append(f"tl.store({where}, {_bare(text)}{masked})")

    def _text(self, number: int) -> str:
        expr = self.plan.region.exprs[number]
        operands = [self.texts[arg] for arg in expr.args]
        if expr.op == "const":
            return _literal(expr.literal)
        if expr.op == "size":
            return self._extent(expr)
        if expr.op == "index":
            return self._index(expr)
        if expr.op == "round":
            return f"{operands[0]}.to({language_dtype(expr.to)}).to(tl.float32)"
        if expr.op == "cast":
            if self.plan.region.exprs[expr.args[0]].op in ("const", "size"):  # bare numbers
                return f"tl.full((), {_bare(operands[0])}, {language_dtype(expr.to)})"
            return f"{_as_operand(operands[0])}.to({language_dtype(expr.to)})"
        if expr.op == "reduce":
            return self._reduce(expr, operands[0])
        primitive = PRIMITIVES[expr.op]
        if not primitive.text.startswith("("):
            operands = [self._typed(arg) for arg in expr.args]
        held = self.plan.region.exprs[expr.args[-1]].dtype
        template = primitive.text
        if held == "float64" and primitive.double:
            template = primitive.double
        elif held not in ("float32", "float64") and primitive.integer:
            template = primitive.integer
        elif held == "float32" and self.precise and primitive.precise:
            template = primitive.precise
        elif held == "float32" and self.precise and primitive.scalar and self._of_row(number):
            template = primitive.scalar
        return _filled(template, operands)

    def _of_row(self, number: int) -> bool:
        """One number a row, where a slow instruction costs nothing."""
        inner = {axis for group in self.plan.inner for axis in group.axes}
        return bool(inner) and not inner & self.plan.region.depends[number]

    def _typed(self, number: int) -> str:
        """An operand of a function, to which Triton hands bare numbers as float32 or int32."""
        expr, text = self.plan.region.exprs[number], self.texts[number]
        if expr.op != "const" or expr.dtype in ("float32", "int32", "int64", "bool"):
            return text
        return f"tl.full((), {text}, {language_dtype(expr.dtype)})"

    def _extent(self, expr: Expr) -> str:
        for groups in (self.plan.inner, self.plan.outer):
            if groups and {a for g in groups for a in g.axes} == set(expr.axes):
                return f"({self.total(groups)} * 1.0)"
        return repr(float(prod(self.plan.region.sizes[axis] for axis in expr.axes)))

    def _index(self, expr: Expr) -> str:
        """The position along some axes, each of which is a group of its own."""
        text = ""
        for axis in expr.axes:
            groups, linear = (self.plan.inner, "col")
            if not any(axis in group.axes for group in groups):
                groups, linear = self.plan.outer, self._outer_name
            group = next(group for group in groups if axis in group.axes)
            place = self.coordinate(group, groups, linear)
            text = f"({text} * {self.extent_of(group)} + {place})" if text else place
        return f"{_as_operand(text)}.to({language_dtype(expr.dtype)})"

    def _reduce(self, expr: Expr, operand: str) -> str:
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
        neutral = monoid.neutral
        if expr.dtype not in ("float32", "float64"):
            low, high = _LIMITS[expr.dtype]
            neutral = {"lowest": low, "highest": high}.get(
                monoid.integer_neutral, monoid.integer_neutral
            )
        masked = f"tl.where(col_mask, {_bare(operand)}, {neutral})"
        template = monoid.text
        if self.plan.rows == 1:
            template = template.replace(", keep_dims=True", "").replace("axis=1", "axis=0")
            template = template.replace("{0}, 1,", "{0}, 0,")
        return template.format(masked)


def _filled(template: str, operands: Sequence[str]) -> str:
    """The operands in their places, without parentheses where they are whole arguments."""
    whole = {int(n) for n in re.findall(r"(?<=[(,])\s*\{(\d)\}(?=[,)])", template)}
    if template.startswith("("):
        whole = set[int]()
    ready = [_bare(text) if n in whole else text for n, text in enumerate(operands)]
    return template.format(*ready)


def _literal(text: str) -> str:
    if text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    return text


def _bare(text: str) -> str:
    """Without parentheses that enclose the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]


def _as_operand(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+(\(.*\))?|\(.*\)", text) else f"({text})"


def fitted(line: str, width: int = 100) -> list[str]:
    """A line of Python broken at its widest brackets until every part fits."""
    opening, closing = _widest_brackets(line) if len(line) > width else (0, 0)
    if not closing:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()))
    inside, rest = line[opening + 1 : closing], line[closing:]
    parts = _at_commas(inside)
    comma = "," if len(parts) > 1 or inside.endswith(",") else ""
    found = [line[: opening + 1]]
    for part in parts:
        found += fitted(f"{margin}    {part}{comma}", width)
    return [*found, *fitted(margin + rest, width)]


def _widest_brackets(line: str) -> tuple[int, int]:
    """Where the outermost pair with the most inside opens and closes; zeros without one."""
    best, stack = (0, 0), list[int]()
    for place, letter in enumerate(line):
        if letter in "([":
            stack.append(place)
        elif letter in ")]":
            start = stack.pop()
            if not stack and place - start > max(best[1] - best[0], 1):
                best = start, place
    return best


def _at_commas(text: str) -> list[str]:
    parts, depth, start = list[str](), 0, 0
    for place, letter in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
