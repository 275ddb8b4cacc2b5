"""The body of a generated kernel: a plan's values as lines of Triton."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from fusion_advisor.exprs import Expr
from fusion_advisor.philox import NAMES, SHARES, STATE, kernel_helpers
from fusion_advisor.primitives import HELPERS, MONOIDS, PRIMITIVES
from fusion_advisor.region import Region
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.layout import Access, Group, gaps, reach
from fusion_advisor.schedules.online import Moments, Pass, Rescaled, passes

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
        "part",
        "parts",
        "chunk",
        "start",
        "elements",
        "ROWS",
        "COLS",
        "PART",
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
        *(NAMES - set(STATE)),
    ]
)
"""What a generated name must not hide."""
_MOST_UNROLLED = 32
"""Places; a longer walk of a lane stays a loop of the GPU."""
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
class _Scope:
    """A block of lines: where places are worked out first, then the values that it knows."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    places: dict[str, str] = field(default_factory=dict[str, str])
    head: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])

    def block(self) -> list[str]:
        return [*self.head, *self.lines]


@dataclass
class Body:
    """The body of one kernel in the making.

    `sizes` and `strides` collect the run-time arguments it needs, in the order of first use:
    extents by the axes that they span, strides by the tensor and the group or dimension that they
    step along.
    """

    step: Step
    tensors: dict[str, str]
    """Each access's own name to the name in the file."""
    precise: bool
    wide: bool
    """Some offset is beyond 32 bits."""
    wide_rows: bool
    """Some offset within a row is."""
    names: Names = field(default_factory=Names)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    strides: dict[str, tuple[Access, Group | int]] = field(
        default_factory=dict[str, tuple[Access, Group | int]]
    )
    helpers: dict[str, None] = field(default_factory=dict[str, None])
    shares: bool = False
    """Its rows draw random bits, several elements from one block where rows are long enough."""
    scopes: list[_Scope] = field(default_factory=lambda: [_Scope()])
    _carried: dict[int, str] = field(default_factory=dict[int, str])
    """What a walk over the row carries for each scan."""

    # -- the program ---------------------------------------------------------------------------

    def render(self) -> list[str]:
        """Every line from the program's place to its last store."""
        self._uses = self._count_uses()
        self._rank = {number: n for n, number in enumerate(self.step.order)}
        self._access = dict(zip(self.region.all("load"), self.step.loads, strict=True))
        start = self._program()
        if self.step.schedule == "blocked":
            self._walk()
        elif self.step.schedule == "persistent":
            self._persist()
        else:
            self._emit([output.value for output in self.region.outputs])
            for output, access in zip(self.region.outputs, self.step.stores, strict=True):
                self._store(access, self.text(output.value))
        return [*start, *self.scopes[0].block()]

    @property
    def region(self) -> Region:
        return self.step.region

    @property
    def scope(self) -> _Scope:
        return self.scopes[-1]

    @property
    def several(self) -> bool:
        """Does a program hold several rows?"""
        return self.step.rows > 1

    def _program(self) -> list[str]:
        """Which elements this program has."""
        step, wide = self.step, ".to(tl.int64)" if self.wide else ""
        if step.schedule == "flat":
            return [
                f"index = tl.program_id(0){wide} * BLOCK + tl.arange(0, BLOCK)",
                f"mask = index < {self.size(step.outer, 'count')}",
            ]
        if step.schedule == "persistent":
            return ["part = tl.program_id(0)", *self._columns("")]
        lines = [f"row = tl.program_id(0){wide}"]
        if self.several:
            lines = [f"row = tl.program_id(0){wide} * ROWS + tl.arange(0, ROWS)[:, None]"]
        if step.part:
            lines.append("part = tl.program_id(1)")
        if step.schedule == "blocked":
            if self.several:
                lines.append(f"row_mask = row < {self.size(step.outer, 'rows')}")
            return lines
        lines += self._columns("part * COLS + " if step.part else "")
        if self.several:
            lines.insert(-1, f"row_mask = row < {self.size(step.outer, 'rows')}")
            lines.append("mask = row_mask & col_mask")
        return lines

    def _columns(self, start: str) -> list[str]:
        """The places along the row that the lanes have, from `start` on."""
        across = "[None, :]" if self.several else ""
        far = ".to(tl.int64)" if self.wide_rows else ""
        return [
            f"col = {start}tl.arange(0, COLS){across}{far}",
            f"col_mask = col < {self.size(self.step.inner, 'cols')}",
        ]

    def _count_uses(self) -> dict[int, list[int]]:
        uses: dict[int, list[int]] = {}
        for number in self.region.live:
            for arg in self.region.exprs[number].args:
                uses.setdefault(arg, []).append(number)
        return uses

    # -- where a tensor's elements are ---------------------------------------------------------

    def size(self, groups: Sequence[Group], name: str) -> str:
        """The run-time argument that holds the extent of some groups."""
        return self._argument(tuple(axis for group in groups for axis in group.axes), name)

    def _argument(self, axes: tuple[int, ...], name: str) -> str:
        for known, spanned in self.sizes.items():
            if spanned == axes:
                return known
        taken = sum(known.startswith(name) for known in self.sizes)
        name = f"{name}_{taken}" if name in self.sizes else name
        self.sizes[name] = axes
        return name

    def total(self, groups: Sequence[Group]) -> str:
        """The extent of all outer or all inner groups."""
        if self.step.schedule == "flat":
            return self.size(groups, "count")
        return self.size(groups, "cols" if groups == self.step.inner else "rows")

    def extent_of(self, group: Group) -> str:
        if set(group.axes) <= self.region.pinned:
            return str(group.size)
        for groups in (self.step.outer, self.step.inner):
            if groups == (group,):
                return self.total(groups)
        return self.size((group,), "parts" if group is self.step.parts else f"{group.name}_size")

    def offset(self, access: Access) -> str:
        """Elements from the tensor's first to the one that a program's lane addresses."""
        parts = [
            part
            for groups, linear in self._levels()
            if (part := self._offset_within(access, groups, linear))
        ]
        for d, index in access.pulled.items():
            place = self.text(index)
            if place == "0":
                continue
            if access.tensor.stride[d] == 1:
                parts.append(place)
            elif access.tensor.stride[d]:
                name = f"{self.tensors[access.name]}_stride_{d}"
                self.strides.setdefault(name, (access, d))
                parts.append(f"{_as_operand(place)} * {name}")
        parts += [
            " * ".join([self._serial_place(axis), *self._serial_stride(access, axis)])
            for axis in sorted(self.step.serial & access.walks)
        ]
        return " + ".join(parts)

    def _serial_stride(self, access: Access, axis: int) -> list[str]:
        """The factors of the step along an axis that a lane walks, as it stands in the tensor."""
        d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
        within = [self._size_of(a) for a in dim[dim.index(axis) + 1 :]]
        if access.tensor.stride[d] == 1:
            return within
        name = f"{self.tensors[access.name]}_stride_{d}"
        self.strides.setdefault(name, (access, d))
        return [name, *within]

    def _size_of(self, axis: int) -> str:
        """The extent of one axis: a number where the kernel serves no other."""
        if axis in self.step.serial | self.region.pinned:
            return str(self.region.sizes[axis])
        return self._argument((axis,), "elements")

    def _levels(self) -> Iterator[tuple[tuple[Group, ...], str]]:
        """The groups that share a linear index, with its name."""
        yield self.step.outer, self._outer_name
        if self.step.parts:
            yield (self.step.parts,), "part"
        yield self.step.inner, "col"

    @property
    def _outer_name(self) -> str:
        return "index" if self.step.schedule == "flat" else "row"

    def _offset_within(self, access: Access, groups: Sequence[Group], linear: str) -> str:
        steps = gaps(access, self.step.groups)
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
        if tuple(groups) == self.step.inner and groups:
            return f"{place} * {self.total(groups)}"
        return " * ".join([place, *(self.extent_of(group) for group in groups)])

    def coordinate(self, group: Group, groups: Sequence[Group], linear: str) -> str:
        """The index within one group, taken from the linear index over all of them."""
        if len(groups) == 1:
            return linear
        known = next((s.places[group.name] for s in self.scopes if group.name in s.places), None)
        if known is None:
            text = linear
            for later in reversed(groups[groups.index(group) + 1 :]):
                text = f"{text} // {self.extent_of(later)}"
            if group is not groups[0]:
                text = f"{text} % {self.extent_of(group)}"
            known = group.name
            scope = next((s for s in reversed(self.scopes) if linear in s.places), self.scopes[0])
            scope.places[known] = known
            scope.head.append(f"{known} = {text}")
        return known

    def mask(self, access: Access) -> str:
        """The lanes that address an element; empty when all do."""
        axes = frozenset(access.strides)
        for d, index in access.pulled.items():
            if access.tensor.stride[d]:
                axes |= self.region.depends[index]
        guard = access.guard
        if guard is not None and not self._guards(access, guard, axes):
            guard = None
        if guard is not None:
            axes |= self.region.depends[guard]
        inner = any(axis in axes for group in self.step.inner for axis in group.axes)
        outer = any(axis in axes for group in self.step.outer for axis in group.axes)
        if self.step.schedule == "flat":
            masks = ["mask"] if outer else []
        elif not self.several:
            masks = ["col_mask"] if inner else []
        elif inner and outer:
            masks = ["mask"]
        else:
            masks = ["col_mask"] if inner else ["row_mask"] if outer else []
        if guard is not None:
            masks.append(self.text(guard))
        return " & ".join(masks)

    def _guards(self, access: Access, guard: int, addressed: frozenset[int]) -> bool:
        """Must, or may, a guard stand in a mask? Where every address is good and fewer lanes load
        than decide, the value is chosen later alone."""
        moved = any(access.tensor.stride[d] for d in access.pulled)
        return moved or self.region.depends[guard] <= addressed

    # -- what a value is -----------------------------------------------------------------------

    def text(self, number: int) -> str:
        """How a value that is known here is written."""
        for scope in reversed(self.scopes):
            if number in scope.texts:
                return scope.texts[number]
        raise KeyError(number)

    def known(self, number: int) -> bool:
        return any(number in scope.texts for scope in self.scopes)

    def _emit(self, wanted: Iterable[int]) -> None:
        """Lines for some values and what they are made from, in the order of the source."""
        stored = {output.value for output in self.region.outputs}
        for number in sorted(self._missing(wanted), key=self._rank.__getitem__):
            expr = self.region.exprs[number]
            if expr.op == "load":
                self._load(number, self._access[number])
            elif expr.op == "reduce" and set(expr.axes) <= self.step.serial:
                self._serially(number)
            elif number in self._carried:
                self._carry(number, self._masked(expr, self.text(expr.args[0])))
            else:
                text = self._text(number)
                if self._inline(number, text) and number not in stored:
                    self.scope.texts[number] = text
                else:
                    self._assign(number, text)

    def _missing(self, wanted: Iterable[int]) -> set[int]:
        """What must be written before some values are known here, themselves included."""
        found: set[int] = set()
        todo = list(wanted)
        while todo:
            number = todo.pop()
            if number in found or self.known(number):
                continue
            found.add(number)
            expr = self.region.exprs[number]
            if expr.op == "reduce" and set(expr.axes) <= self.step.serial:
                todo.extend(self._around(expr))
            elif expr.op == "load":
                access = self._access[number]
                todo.extend(access.pulled.values())
                todo.extend([access.guard] if access.guard is not None else [])
            else:
                todo.extend(expr.args)
        return found

    def _around(self, expr: Expr) -> set[int]:
        """What the loop of a serial reduction uses and need not make again at each place."""
        axes, found, seen = set(expr.axes), set[int](), set[int]()
        todo = list(expr.args)
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            made = self.region.exprs[number]
            if not self.region.depends[number] & axes:
                if made.op not in ("const", "size", "extent", "place"):
                    found.add(number)
            elif made.op == "reduce" and set(made.axes) <= self.step.serial:
                todo.extend(self._around(made))  # a loop of its own
            else:
                todo.extend(made.args)
        return found

    def _inline(self, number: int, text: str) -> bool:
        """Is a value written where it is used, without a name of its own?"""
        expr = self.region.exprs[number]
        if expr.op in ("const", "size", "taken", "extent", "place"):
            return True
        if len(text) > _LONGEST_PART or expr.op in ("reduce", "scan"):
            return False
        if expr.dtype == "index":
            return True
        readers = self._uses.get(number, [])
        label = self.region.labels.get(number)
        alone = len(readers) == 1 and self.region.labels.get(readers[0]) == label
        return alone and number not in self.region.results

    def _assign(self, number: int, text: str) -> None:
        region = self.region
        expr = region.exprs[number]
        part = expr.monoid or ("at" if expr.dtype == "index" else "part")
        part = "bits" if expr.op in SHARES else part
        wish = region.results.get(number) or f"{region.labels.get(number, 'value')}_{part}"
        name = self.names.claim(wish)
        self.scope.lines.append(f"{name} = {_bare(text)}")
        self.scope.texts[number] = name

    def _load(self, number: int, access: Access) -> None:
        name = self.names.claim(self.tensors[access.name])
        offset, mask = self.offset(access), self.mask(access)
        pointer = f"{self.tensors[access.name]}_ptr"
        where = f"{pointer} + {offset}" if offset else pointer
        held = self.region.exprs[number].dtype
        neutral = {"float32": "0.0", "float64": "0.0", "bool": "False"}.get(held, "0")
        masked = f", mask={mask}, other={neutral}" if mask else ""
        converted = f".to({language_dtype(held)})" if held != access.tensor.dtype else ""
        self.scope.lines.append(f"{name} = tl.load({where}{masked}){converted}")
        self.scope.texts[number] = name

    def _store(self, access: Access, text: str) -> None:
        offset, mask = self.offset(access), self.mask(access)
        pointer = f"{self.tensors[access.name]}_ptr"
        where = f"{pointer} + {offset}" if offset else pointer
        masked = f", mask={mask}" if mask else ""
        if access.tensor.dtype.startswith("float8"):
            text = self._rounded(text, access.tensor.dtype)
        self.scope.lines.append(f"tl.store({where}, {_bare(text)}{masked})")

    def _rounded(self, text: str, dtype: str) -> str:
        """A float32 in a narrower type; what is too large becomes what it does in torch."""
        if f"as_{dtype}" not in HELPERS:
            return f"{_as_operand(text)}.to({language_dtype(dtype)})"
        self.helpers[f"as_{dtype}"] = None
        text = _bare(text)
        number = re.fullmatch(r"-?[\d.e+-]+|float\(.*\)", text)
        return f"as_{dtype}({f'tl.full((), {text}, tl.float32)' if number else text})"

    def _text(self, number: int) -> str:
        expr = self.region.exprs[number]
        if expr.op == "const":
            return _literal(expr.literal)
        if expr.op in ("size", "taken", "extent"):
            return self._extent(expr)
        if expr.op == "place":
            return self._place(expr.axes)
        if expr.op in SHARES:
            return self._random(expr)
        operands = [self.text(arg) for arg in expr.args]
        if expr.op == "round":
            return f"{self._rounded(operands[0], expr.to)}.to(tl.float32)"
        if expr.op == "cast":
            bare = ("const", "size", "taken", "extent")  # numbers, or arguments that may be one
            if self.region.exprs[expr.args[0]].op in bare:
                return f"tl.full((), {_bare(operands[0])}, {language_dtype(expr.to)})"
            return f"{_as_operand(operands[0])}.to({language_dtype(expr.to)})"
        if expr.op == "reduce":
            return self._reduce(expr, self._masked(expr, operands[0]))
        if expr.op == "scan":
            return self._scan(expr, self._masked(expr, operands[0]))
        return self._applied(number, expr, operands)

    def _applied(self, number: int, expr: Expr, operands: list[str]) -> str:
        """A primitive of its operands."""
        primitive = PRIMITIVES[expr.op]
        if not primitive.text.startswith("("):
            operands = [self._typed(arg) for arg in expr.args]
        held = self.region.exprs[expr.args[-1]].dtype
        template = primitive.text
        if held == "float64" and primitive.double:
            template = primitive.double
        elif held not in ("float32", "float64") and primitive.integer:
            template = primitive.integer
        elif held == "float32" and self.precise and primitive.precise:
            template = primitive.precise
        elif held == "float32" and self.precise and primitive.scalar and self._of_row(number):
            template = primitive.scalar
        if template == primitive.text and primitive.helper:
            self.helpers[primitive.helper] = None
        return _filled(template, operands)

    def _of_row(self, number: int) -> bool:
        """One number a row, where a slow instruction costs nothing."""
        return bool(self._inner) and not self._inner & self.region.depends[number]

    @property
    def _inner(self) -> frozenset[int]:
        return frozenset(axis for group in self.step.inner for axis in group.axes)

    def _typed(self, number: int) -> str:
        """An operand of a function, to which Triton hands bare numbers as float32 or int32."""
        expr, text = self.region.exprs[number], self.text(number)
        bare = ("float32", "int32", "int64", "bool", "index")
        if expr.op != "const" or expr.dtype in bare:
            return text
        return f"tl.full((), {text}, {language_dtype(expr.dtype)})"

    def _extent(self, expr: Expr) -> str:
        """How many elements there are along some axes: a float, or an integer of an index."""
        if expr.op == "taken":
            share = "PART" if self.step.schedule == "blocked" else "COLS"
            rest = f"{self.total(self.step.inner)} - part * {share}"
            return f"(tl.minimum({rest}, {share}) * 1.0)"
        if set(expr.axes) <= self.region.pinned:
            count = prod(self.region.sizes[axis] for axis in expr.axes)
            return str(count) if expr.op == "extent" else repr(float(count))
        text = ""
        for groups in (self.step.inner, self.step.outer):
            if groups and {a for g in groups for a in g.axes} == set(expr.axes):
                text = self.total(groups)
        text = text or self._argument(tuple(expr.axes), "elements")
        return text if expr.op == "extent" else f"({text} * 1.0)"

    def _place(self, axes: tuple[int, ...]) -> str:
        """The position along some axes, outermost first."""
        text = ""
        while axes:
            count, place, extent = self._place_along(axes)
            text = f"({text} * {extent} + {place})" if text else place
            axes = axes[count:]
        return text

    def _place_along(self, axes: tuple[int, ...]) -> tuple[int, str, str]:
        """How many of some axes lie along a group, or along all that share a linear index; the
        place there, and its extent."""
        if axes[0] in self.step.serial:
            return 1, self._serial_place(axes[0]), self._size_of(axes[0])
        for groups, linear in self._levels():
            spanned = tuple(axis for group in groups for axis in group.axes)
            if spanned and axes[: len(spanned)] == spanned and len(groups) > 1:
                return len(spanned), linear, self.total(groups)
            for group in groups:
                if axes[: len(group.axes)] == group.axes:
                    extent = self._size_of(axes[0]) if len(group.axes) == 1 else None
                    place = self.coordinate(group, groups, linear)
                    return len(group.axes), place, extent or self.extent_of(group)
        raise KeyError(axes[0])

    def _random(self, expr: Expr) -> str:
        """Random bits of the elements that a program has: a run of them where they lie one after
        the other, else each for itself."""
        seed, offset, element = expr.args
        state = f"{self.text(seed)}, {self.text(offset)}, {expr.literal}"
        first = self._first_of_run(self.region.exprs[element].axes)
        name = f"{expr.op}_run" if first else expr.op
        self.helpers |= dict.fromkeys(kernel_helpers([name]))
        if not first:
            place = self.text(element)
            place = f"tl.full((), {place}, tl.int32)" if place.isdigit() else place
            return f"{name}({state}, {_bare(place)})"
        if self.step.schedule == "flat":
            return f"{name}({state}, {first}, BLOCK, True)"
        self.shares = True
        return f"{name}({state}, {first}, COLS, SHARED)"

    def _first_of_run(self, axes: tuple[int, ...]) -> str:
        """Where a program's elements begin when it has a run of them; empty when it has none."""
        step, wide = self.step, ".to(tl.int64)" if self.wide else ""
        if not axes:
            return ""
        if step.schedule == "flat":
            whole = axes == tuple(axis for group in step.outer for axis in group.axes)
            return f"tl.program_id(0){wide} * BLOCK" if whole else ""
        inner = tuple(axis for group in step.inner for axis in group.axes)
        if step.block < max(SHARES.values()) or not inner or axes[-len(inner) :] != inner:
            return ""
        part = "part * COLS" if step.part and step.schedule != "blocked" else ""
        start = "start" if step.schedule == "blocked" else part
        row = self._place(axes[: -len(inner)])
        row = f"{row} * {self.total(step.inner)}" if row else ""
        return " + ".join(filter(None, (row, start))) or "tl.full((), 0, tl.int32)"

    # -- reductions ----------------------------------------------------------------------------

    def _neutral(self, expr: Expr) -> str:
        monoid, dtype = MONOIDS[expr.monoid], self.region.exprs[expr.args[0]].dtype
        if dtype in ("float32", "float64"):
            return monoid.neutral
        low, high = _LIMITS[dtype]
        return {"lowest": low, "highest": high}.get(monoid.integer_neutral, monoid.integer_neutral)

    def _masked(self, expr: Expr, operand: str) -> str:
        """The operand with what changes nothing in the lanes behind the row's end."""
        return f"tl.where(col_mask, {_bare(operand)}, {self._neutral(expr)})"

    def _reduce(self, expr: Expr, operand: str) -> str:
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
        template = monoid.text
        if not self.several:
            template = template.replace(", keep_dims=True", "").replace("axis=1", "axis=0")
            template = template.replace("{0}, 1,", "{0}, 0,").replace("{1}), 1,", "{1}), 0,")
        return template.format(operand, f"tl.broadcast_to(col, {self._shape_of(expr.args[0])})")

    def _scan(self, expr: Expr, operand: str) -> str:
        axis = 1 if self.several else 0
        turned = ", reverse=True" if expr.reverse else ""
        monoid = MONOIDS[expr.monoid]
        if expr.monoid == "sum":
            return f"tl.cumsum({operand}, axis={axis}{turned})"
        self.helpers[monoid.helper] = None
        return f"tl.associative_scan({operand}, {axis}, {monoid.helper}{turned})"

    def _shape(self, outer: bool, inner: bool) -> str:
        """The shape of a tile of values, with one row or one column where it does not vary."""
        if self.step.schedule == "flat":
            return "[BLOCK]" if outer else "()"
        if not self.several:
            return "[COLS]" if inner else "()"
        return f"[{'ROWS' if outer else '1'}, {'COLS' if inner else '1'}]"

    def _shape_of(self, number: int) -> str:
        depends = self.region.depends[number]
        outer = {axis for group in self.step.outer for axis in group.axes}
        return self._shape(bool(outer & depends), bool(self._inner & depends))

    def _combined(self, expr: Expr, left: str, right: str) -> str:
        """Two partial results of a reduction as one."""
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
            return f"{monoid.helper}({left}, {_bare(right)})"
        return f"{left} + {right}"

    def _serial_place(self, axis: int) -> str:
        for scope in reversed(self.scopes):
            if f"axis {axis}" in scope.places:
                return scope.places[f"axis {axis}"]
        raise KeyError(axis)

    def _serially(self, number: int) -> None:
        """A loop in which each lane combines place after place."""
        expr = self.region.exprs[number]
        axes = sorted(expr.axes)
        sizes = [self.region.sizes[axis] for axis in axes]
        operand = expr.args[0]
        name = self.names.claim(self.region.results.get(number) or f"{expr.monoid}")
        tap = self.names.claim("tap")
        kind = language_dtype(expr.dtype)
        shape = self._shape_of(operand)
        self.scope.lines.append(f"{name} = tl.full({shape}, {self._neutral(expr)}, {kind})")
        inside = _Scope()
        behind = 1
        for axis, size in reversed(list(zip(axes, sizes, strict=True))):
            text = tap if behind == 1 else f"{tap} // {behind}"
            if axis != axes[0]:
                text = f"{text} % {size}"
            place = tap
            if len(axes) > 1:
                place = self.names.claim(f"{tap}_{axes.index(axis)}")
                inside.head.insert(0, f"{place} = {text}")
            inside.places[f"axis {axis}"] = place
            behind *= size
        self.scopes.append(inside)
        self._emit([operand])
        inside.lines.append(f"{name} = {self._combined(expr, name, self.text(operand))}")
        self.scopes.pop()
        count = prod(sizes)
        walk = "tl.static_range" if count <= _MOST_UNROLLED else "range"
        self.scope.lines.append(f"for {tap} in {walk}({count}):")
        self.scope.lines += [f"    {line}" for line in inside.block()]
        self.scope.texts[number] = name

    # -- rows in chunks --------------------------------------------------------------------------

    def _walk(self) -> None:
        """One loop over the row for each pass, and one for what lies along it."""
        region = self.region
        for one in passes(region, self._inner):
            self._pass(one)
        pairs = list(zip(region.outputs, self.step.stores, strict=True))
        apart = [(o, a) for o, a in pairs if not self._inner & region.depends[o.value]]
        along = [(o, a) for o, a in pairs if self._inner & region.depends[o.value]]
        self._emit([output.value for output, _ in apart])
        for output, access in apart:
            self._store(access, self.text(output.value))
        if not along:
            return
        self._emit(self._of_rows([output.value for output, _ in along]))
        self._carried = {n: self._begin_scan(n) for n in region.all("scan")}
        inside = self._open()
        self._emit([output.value for output, _ in along])
        for output, access in along:
            self._store(access, self.text(output.value))
        scans = {region.exprs[n].reverse for n in self._carried}
        again = not scans and any(passes(region, self._inner))
        self._close(inside, backwards=again or True in scans)

    def _of_rows(self, wanted: Iterable[int]) -> set[int]:
        """What some values along the row use of the row as a whole."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = list(wanted)
        while todo:
            number = todo.pop()
            if number in seen or self.known(number):
                continue
            seen.add(number)
            expr = self.region.exprs[number]
            if self._inner & self.region.depends[number]:
                todo.extend(expr.args)
            elif expr.op not in ("const", "size", "taken", "extent", "place"):
                found.add(number)
        return found

    def _open(self) -> _Scope:
        inside = _Scope(places={"col": "col"})
        inside.head += self._columns("start + ")
        if self.several:
            inside.head.append("mask = row_mask & col_mask")
        self.scopes.append(inside)
        return inside

    def _begin_scan(self, number: int) -> str:
        """What the chunks walked so far add to each element of the next."""
        expr = self.region.exprs[number]
        name, kind = self.names.claim(f"{self.region.labels[number]}_carried"), expr.dtype
        neutral, shape = self._neutral(expr), self._row_shape()
        self.scope.lines.append(f"{name} = tl.full({shape}, {neutral}, {language_dtype(kind)})")
        return name

    def _carry(self, number: int, operand: str) -> None:
        """A scan of one chunk, on from what was carried there; the chunk's own total joins it."""
        expr, name = self.region.exprs[number], self._carried[number]
        scanned = self.names.claim(f"{self.region.labels[number]}_chunk")
        self.scope.lines.append(f"{scanned} = {operand}")
        here = self._combined(expr, name, self._scan(expr, scanned))
        self._assign(number, here)
        total = self._combined(expr, name, self._reduce(expr, scanned))
        self.scope.lines.append(f"{name} = {total}")

    def _close(self, inside: _Scope, *, backwards: bool = False) -> None:
        """The loop over the row's chunks; `backwards` begins with those that the L2 still holds."""
        self.scopes.pop()
        cols = self.size(self.step.inner, "cols")
        if backwards:
            staged = f", num_stages={self.step.stages}" if self.step.stages > 1 else ""
            self.scope.lines += [
                f"for chunk in tl.range(0, tl.cdiv({cols}, COLS){staged}):",
                f"    start = (tl.cdiv({cols}, COLS) - 1 - chunk) * COLS",
                *(f"    {line}" for line in inside.block()),
            ]
            return
        bounds = f"0, {cols}"
        if self.step.part:
            bounds = f"part * PART, tl.minimum(part * PART + PART, {cols})"
        staged = f", num_stages={self.step.stages}" if self.step.stages > 1 else ""
        self.scope.lines.append(f"for start in tl.range({bounds}, COLS{staged}):")
        self.scope.lines += [f"    {line}" for line in inside.block()]

    # -- rows one after the other ----------------------------------------------------------------

    def _persist(self) -> None:
        """A loop over a program's rows, which carries what is combined down the columns."""
        region, step = self.region, self.step
        outer = frozenset(axis for group in step.outer for axis in group.axes)
        pairs = list(zip(region.outputs, step.stores, strict=True))
        carried = [n for n in region.all("reduce") if outer & set(region.exprs[n].axes)]
        early = [(o, a) for o, a in pairs if o.value not in carried]
        operands = [region.exprs[n].args[0] for n in carried]
        wanted = [*operands, *(o.value for o, _ in early)]
        self._emit(self._apart_from(wanted, outer))
        names = {n: self._begin(n) for n in carried}
        inside = _Scope(places={"row": "row"})
        rows, far = self.size(step.outer, "rows"), ".to(tl.int64)" if self.wide else ""
        if self.several:
            inside.head += [
                f"row = start + tl.arange(0, ROWS)[:, None]{far}",
                f"row_mask = row < {rows}",
                "mask = row_mask & col_mask",
            ]
        elif self.wide:
            inside.head.append("row = start + tl.full((), 0, tl.int64)")
        self.scopes.append(inside)
        self._emit(wanted)
        for number, name in names.items():
            expr = region.exprs[number]
            value = self.text(expr.args[0])
            if self.several:
                value = f"tl.where(row_mask, {_bare(value)}, {self._neutral(expr)})"
            inside.lines.append(f"{name} = {self._combined(expr, name, value)}")
        for output, access in early:
            self._store(access, self.text(output.value))
        self.scopes.pop()
        bounds = f"part, {rows}, tl.num_programs(0)"
        if self.several:
            bounds = f"part * ROWS, {rows}, tl.num_programs(0) * ROWS"
        walked = "start" if self.several or self.wide else "row"
        staged = f", num_stages={step.stages}" if step.stages > 1 else ""
        self.scope.lines.append(f"for {walked} in tl.range({bounds}{staged}):")
        self.scope.lines += [f"    {line}" for line in inside.block()]
        for output, access in pairs:
            if output.value in names:
                text = names[output.value]
                if self.several:
                    text = self._down(region.exprs[output.value], text)
                self._store(access, text)

    def _apart_from(self, wanted: Iterable[int], axes: frozenset[int]) -> set[int]:
        """What some values are made from that does not vary along some axes."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = list(wanted)
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            expr = self.region.exprs[number]
            if self.region.depends[number] & axes or expr.op == "reduce":
                todo.extend(expr.args)
            elif expr.op not in ("const", "size", "taken", "extent", "place"):
                found.add(number)
        return found

    def _down(self, expr: Expr, operand: str) -> str:
        """The rows of a tile combined."""
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
        template = monoid.text.replace("axis=1", "axis=0").replace("{0}, 1,", "{0}, 0,")
        return template.format(operand)

    def _pass(self, one: Pass) -> None:
        """A loop that carries what the reductions of one pass have so far."""
        region = self.region
        operands = [region.exprs[n].args[0] for n in one.plain]
        operands += [region.exprs[r.total].args[0] for r in one.rescaled]
        operands += [m.value for m in one.moments]
        carried = {r.peak for r in one.rescaled}
        self._emit(self._of_rows(operands) - self._made_from(carried))
        totals = {n: self._begin(n) for n in one.plain if n not in carried}
        peaks = {n: self._begin_peak(n) for n in sorted(carried)}
        sums = {r.total: self._begin(r.total) for r in one.rescaled}
        spreads = [(m, self._begin_moments(m)) for m in one.moments]
        inside = self._open()
        for number, name in totals.items():
            expr = region.exprs[number]
            self._emit(expr.args)
            value = self._masked(expr, self.text(expr.args[0]))
            inside.lines.append(f"{name} = {self._combined(expr, name, value)}")
        for number, name in peaks.items():
            self._grow(number, name, [r for r in one.rescaled if r.peak == number], sums)
        for moments, spread in spreads:
            self._deviate(moments, spread)
        self._close(inside)
        for number, name in totals.items():
            self._assign(number, self._reduce(region.exprs[number], name))
        for number, name in peaks.items():
            self.scope.texts[number] = name
        for rescaled in one.rescaled:
            self._finish_rescaled(rescaled, sums[rescaled.total])
        for moments, spread in spreads:
            self._finish_moments(moments, spread)

    def _made_from(self, numbers: set[int]) -> set[int]:
        return {n for n in self.region.live if numbers & set(reach(self.region, n))}

    def _begin(self, number: int) -> str:
        """An accumulator for each lane, neutral to begin with."""
        expr = self.region.exprs[number]
        wish = f"{self.region.labels.get(number, 'value')}_{expr.monoid}s"
        name, kind = self.names.claim(wish), language_dtype(expr.dtype)
        shape = self._shape_of(expr.args[0])
        self.scope.lines.append(f"{name} = tl.full({shape}, {self._neutral(expr)}, {kind})")
        return name

    def _row_shape(self) -> str:
        return "[ROWS, 1]" if self.several else "()"

    def _begin_peak(self, number: int) -> str:
        expr = self.region.exprs[number]
        name = self.names.claim(
            self.region.results.get(number) or f"{self.region.labels.get(number, 'value')}_max"
        )
        kind = language_dtype(expr.dtype)
        self.scope.lines.append(f'{name} = tl.full({self._row_shape()}, float("-inf"), {kind})')
        return name

    def _grow(
        self, peak: int, name: str, followers: Sequence[Rescaled], sums: dict[int, str]
    ) -> None:
        """A running maximum, and the sums whose terms it scales."""
        region, lines = self.region, self.scope.lines
        expr = region.exprs[peak]
        self._emit(expr.args)
        chunk = self._reduce(expr, self._masked(expr, self.text(expr.args[0])))
        grown = self.names.claim(f"{name}_grown")
        lines.append(f"{grown} = {self._combined(expr, name, chunk)}")
        for rescaled in followers:
            before = self._shift(rescaled, name)
            after = self._shift(rescaled, grown)
            scale = self.names.claim("scale")
            power = f"tl.exp({before} - {after})"
            lines.append(f'{scale} = tl.where({name} == float("-inf"), 0.0, {power})')
            total = region.exprs[rescaled.total]
            self.scopes.append(_Scope(texts={rescaled.shift: after}))
            self._emit(total.args)
            inner = self.scopes.pop()
            lines += inner.block()
            term = self._masked(total, inner.texts[total.args[0]])
            held = sums[rescaled.total]
            lines.append(f"{held} = {held} * {scale} + {term}")
        lines.append(f"{name} = {grown}")

    def _shift(self, rescaled: Rescaled, peak: str) -> str:
        """What a maximum makes the terms shift by; 0 while there is none."""
        safe = self.names.claim(f"{peak}_safe")
        line = f'{safe} = tl.where({peak} == float("-inf"), 0.0, {peak})'
        self.scope.lines.append(line)
        if rescaled.shift == rescaled.peak:
            return safe
        self.scopes.append(_Scope(texts={rescaled.peak: safe}))
        self._emit([rescaled.shift])
        inner = self.scopes.pop()
        self.scope.lines += inner.block()
        return inner.texts[rescaled.shift]

    def _finish_rescaled(self, rescaled: Rescaled, name: str) -> None:
        text = self._reduce(self.region.exprs[rescaled.total], name)
        if rescaled.shift == rescaled.peak:
            peak = self.text(rescaled.peak)
            text = f'tl.where({peak} == float("-inf"), float("nan"), {text})'
        self._assign(rescaled.total, text)

    def _begin_moments(self, moments: Moments) -> tuple[str, str, str]:
        """For each lane how many elements it has seen, their mean, their squared deviations."""
        label = self.region.labels.get(moments.squares, "value")
        shape = self._shape_of(moments.value)
        kind = language_dtype(self.region.exprs[moments.squares].dtype)
        names = tuple(self.names.claim(f"{label}_{what}") for what in ("seen", "mean", "spread"))
        self.scope.lines += [f"{name} = tl.full({shape}, 0.0, {kind})" for name in names]
        return names[0], names[1], names[2]

    def _deviate(self, moments: Moments, names: tuple[str, str, str]) -> None:
        """Welford's update in each lane."""
        seen, mean, spread = names
        self._emit([moments.value])
        value, apart = self.names.claim("element"), self.names.claim("apart")
        self.scope.lines += [
            f"{value} = tl.where(col_mask, {_bare(self.text(moments.value))}, {mean})",
            f"{seen} = {seen} + tl.where(col_mask, 1.0, 0.0)",
            f"{apart} = {value} - {mean}",
            f"{mean} = {mean} + {apart} / tl.maximum({seen}, 1.0)",
            f"{spread} = {spread} + {apart} * ({value} - {mean})",
        ]

    def _finish_moments(self, moments: Moments, names: tuple[str, str, str]) -> None:
        """The lanes' means and deviations moved to the mean of the row."""
        seen, mean, spread = names
        expr = self.region.exprs[moments.squares]
        self._assign(moments.total, self._reduce(expr, f"{seen} * {mean}"))
        total = self.text(moments.total)
        count, centre = self.names.claim("count"), self.names.claim("centre")
        moved = f"{spread} + {seen} * ({mean} - {centre}) * ({mean} - {centre})"
        self.scope.lines += [
            f"{count} = {self._reduce(expr, seen)}",
            f"{centre} = {total} / {count}",
        ]
        self._assign(moments.squares, self._reduce(expr, moved))
        if moments.rest is not None:
            self.scope.texts[moments.rest] = "0.0"


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
        elif letter in ")]" and stack:  # a line may begin with what closes an earlier one
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
