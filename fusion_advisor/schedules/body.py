"""The tile program of a kernel, built from the values of its plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, TypeVar

from fusion_advisor.region.exprs import Expr, number_of
from fusion_advisor.region.peephole import WITH_ONE, added_up, one_more, rounded_apart
from fusion_advisor.region.primitives import MONOIDS, PRIMITIVES
from fusion_advisor.region.random import SHARES
from fusion_advisor.schedules.addresses import Addresses
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.coordinates import COLS, ROWS, Scope
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import Access, reach, spanned, traced
from fusion_advisor.schedules.names import Names
from fusion_advisor.schedules.online import at_least_one, only_summed
from fusion_advisor.tile.program import (
    Across,
    Begin,
    Block,
    Broadcast,
    Cast,
    Combine,
    DeviceCall,
    Elementwise,
    For,
    Full,
    Let,
    Literal,
    Load,
    Name,
    Reduce,
    Scan,
    Shape,
    Store,
    Tile,
    Update,
    least,
    tile,
    where,
)
from fusion_advisor.tile.text import shown

_LONGEST_PART = 50
"""Letters; a longer part of an expression gets a statement and a name of its own."""
_NUMBERS = ("const", "given", "size", "taken", "extent")
"""Numbers, or arguments that may be one."""
_UNMADE = ("const", "given", "size", "taken", "extent", "place")
"""What takes no line: numbers, sizes and places, written where they are used."""

_Kind = TypeVar("_Kind", bound="Body")


@dataclass(kw_only=True)
class Body(Addresses):
    """The body of one kernel in the making: what is loaded, made of it, and stored."""

    precise: bool
    unrolled: int
    """Elements that a warp may have on the way at once where a walk is written out."""
    draws_runs: bool = False
    """Its rows draw random bits, several elements from one block where rows are long enough."""
    share: ClassVar[Tile] = COLS
    """Elements of a row that one of several programs has."""

    @property
    def note(self) -> str:
        """Words for the work of one program."""
        if not self.step.part:
            whole = "several whole rows" if self.several else "one whole row"
            return f"One program holds {whole} on chip."
        part = "part of several rows" if self.several else "part of a row"
        held = f"holds a {part} on chip" if self.region.reduced else f"has one {part}"
        return f"One program {held}."

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Constants of the tile, once its program is made."""
        step, axes = self.step, spanned(self.step.inner or self.step.outer)
        length, found = prod(step.sizes[axis] for axis in axes), [*self.tile_constants]
        if self.draws_runs:
            runs = length % max(SHARES.values()) == 0
            found.append(Constant("SHARED", int(runs), "in_runs", axes))
        return (*found, *self.told, Constant("FAR", int(self.far), "far"))

    @property
    def tile_constants(self) -> tuple[Constant, ...]:
        """Extents of the tile."""
        step, inner = self.step, spanned(self.step.inner)
        rows = (Constant("ROWS", step.rows),) if self.several else ()
        whole = Constant("COLS", step.block, "power_of_two", inner)
        return (*rows, Constant("COLS", step.block) if step.part else whole)

    def program(self) -> Block:
        """Every statement of the kernel."""
        found = self.statements()
        return (*self._divided(), *found)

    def statements(self) -> Block:
        """Every statement from the program's place to its last store."""
        self.prepare()
        start = self._program()
        self._results()
        return (*start, *self.scopes[0].block())

    def beside(
        self, kind: type[_Kind], step: Step, names: Names, scopes: list[Scope], **more: Any
    ) -> _Kind:
        """Another body of the same kernel; `more` is what its kind has besides."""
        return kind(
            step=step,
            far=self.far,
            fixed=self.fixed,
            sizes=self.sizes,
            scopes=scopes,
            tensors=self.tensors,
            names=names,
            strides=self.strides,
            numbers=self.numbers,
            precise=self.precise,
            unrolled=self.unrolled,
            **more,
        )

    def prepare(self) -> None:
        """Look up what is asked of the region again and again."""
        self._uses = self.region.users()
        self._rank = {number: n for n, number in enumerate(self.step.order)}
        self._access = dict(zip(self.region.all("load"), self.step.loads, strict=True))
        sums = at_least_one(self.region, self._inner)
        self._terms = only_summed(self.region, sums)
        self._large = self._at_least_one(sums)
        self._one_more = one_more(self.region)
        self._uncontracted = rounded_apart(self.region)
        self._added_up = added_up(self.region)

    def _at_least_one(self, sums: Mapping[int, int]) -> Mapping[int, int]:
        """Values that may be divided by as well as multiplied with their reciprocal, and the terms
        that each is the sum of."""
        return sums

    def _results(self) -> None:
        """Every result, from the loads to the stores."""
        self._leave([output.value for output in self.region.outputs])

    def _leave(self, values: Collection[int]) -> None:
        """The results that have some values."""
        self._emit(values)
        for output, access in zip(self.region.outputs, self.step.stores, strict=True):
            if output.value in values:
                self._store(access, self.value(output.value))

    # -- what is made --------------------------------------------------------------------------

    def known(self, number: int) -> bool:
        return any(number in scope.values for scope in self.scopes)

    def _emit(self, wanted: Iterable[int]) -> None:
        """Makes some values and what they are made from, in the order of the source."""
        for number in sorted(self._missing(wanted), key=self._rank.__getitem__):
            if not self.known(number):  # unless another one brought it
                self._make(number)

    def _make(self, number: int) -> None:
        """Makes one value, under a name if it takes one."""
        expr = self.region.exprs[number]
        if expr.op == "load":
            self._load(number, self._access[number])
        elif expr.op == "reduce" and set(expr.axes) <= self.step.serial:
            self._serially(number)
        else:
            value = self._made(number)
            stored = any(output.value == number for output in self.region.outputs)
            if self._inline(number, value) and not stored:
                self.scope.values[number] = value
            else:
                self._assign(number, value)

    def _missing(self, wanted: Iterable[int]) -> set[int]:
        """What must be written before some values are known here, themselves included."""

        def further(number: int) -> Iterable[int] | None:
            expr = self.region.exprs[number]
            if self.known(number):
                return None
            if expr.op == "reduce" and set(expr.axes) <= self.step.serial:
                return self._around(expr)
            return self._addressed_by(number) if expr.op == "load" else expr.args

        return traced(wanted, further).passed

    def _addressed_by(self, number: int) -> tuple[int, ...]:
        """What says where a load reads, and whether."""
        access = self._access[number]
        guard = () if access.guard is None else (access.guard,)
        return (*access.pulled.values(), *guard)

    def _around(self, expr: Expr) -> set[int]:
        """What the loop of a serial reduction uses and need not make again at each place."""

        def further(number: int) -> Iterable[int] | None:
            made = self.region.exprs[number]
            if not self.region.depends[number] & set(expr.axes):
                return None
            if made.op == "reduce" and set(made.axes) <= self.step.serial:
                return self._around(made)  # a loop of its own
            return made.args

        return self._worked_out(traced(expr.args, further).ends)

    def _worked_out(self, numbers: set[int]) -> set[int]:
        """Those of some values that take a line."""
        return {number for number in numbers if self.region.exprs[number].op not in _UNMADE}

    def _inline(self, number: int, value: Tile) -> bool:
        """Is a value written where it is used, without a name of its own?"""
        expr = self.region.exprs[number]
        if expr.op in _UNMADE:
            return True
        if len(shown(value)) > _LONGEST_PART or expr.op in ("reduce", "scan"):
            return False
        if expr.dtype == "index":
            return True
        readers = self._uses.get(number, [])
        label = self.region.labels.get(number)
        alone = len(readers) == 1 and self.region.labels.get(readers[0]) == label
        return alone and number not in self.region.results

    def _assign(self, number: int, value: Tile) -> None:
        self.scope.values[number] = self.scope.let(self.names.claim(self._wish(number)), value)

    def _wish(self, number: int) -> str:
        """What a value that has a line would be called."""
        expr, label = self.region.exprs[number], self.region.labels.get(number, "value")
        part = expr.monoid or ("at" if expr.dtype == "index" else "part")
        part = "bits" if expr.op in SHARES else part
        return self.region.results.get(number) or f"{label}_{part}"

    # -- loads and stores ----------------------------------------------------------------------

    def _load(self, number: int, access: Access) -> None:
        value = self._widened(access, self.region.exprs[number].dtype)
        known = self.scope.loaded.get(value)  # two guards have a load each, of the same elements
        if known is None:
            known = self.scope.let(self.names.claim(self.tensors[access.name]), value)
        if access.name.startswith("in"):  # what kernels leave for each other changes meanwhile
            self.scope.loaded[value] = known
        self.scope.values[number] = known

    def _widened(self, access: Access, held: str) -> Tile:
        """The elements of a tensor in the type that they have on chip."""
        value = self._read(access, held)
        return value if held == access.tensor.dtype else Cast(value, held)

    def _read(self, access: Access, held: str) -> Tile:
        """The elements of a tensor as they lie in memory, zero where there are none."""
        mask = self.mask(access)
        floating = held in ("float32", "float64")
        other = Literal("0.0" if floating else "False" if held == "bool" else "0")
        address = self._pointer(access)
        if access.guard is not None and self._is_one(access):
            outer, inner, _ = self._addressed(access)  # a guard says which lanes load it
            address = replace(address, shape=self._shape(outer, inner))
        return Load(address, mask, None if mask is None else other, self.step.passes(access))

    def _is_one(self, access: Access) -> bool:
        """Do all lanes of a program address one element?"""
        walked = frozenset(access.strides)
        spans = [(bool(walked - self._inner), bool(walked & self._inner))]
        spans += [self._spans(i) for d, i in access.pulled.items() if access.tensor.stride[d]]
        return not any(inner or (outer and self._apart) for outer, inner in spans)

    @property
    def _apart(self) -> bool:
        """Have the lanes of a program several places along the rows?"""
        return self.several

    def _store(self, access: Access, value: Tile) -> None:
        mask = self.mask(access)
        if access.tensor.dtype.startswith("float8"):
            value = self._rounded(value, access.tensor.dtype)
        self.scope.body.append(Store(self._pointer(access), value, mask))

    def _rounded(self, value: Tile, dtype: str) -> Tile:
        """A float32 in a narrower type; what is too large becomes what it does in torch: infinite
        in e5m2, where the hardware stops at the largest number. In e4m3fn torch stops there too,
        from 2.12 on (its pull request 178817); before, eager gave NaN."""
        if dtype != "float8_e5m2":
            return Cast(value, dtype)
        if isinstance(value, Literal):
            value = Full((), value, "float32")
        return DeviceCall("as_float8_e5m2", (value,))

    # -- expressions ---------------------------------------------------------------------------

    def _made(self, number: int) -> Tile:
        """A value of what it is made from."""
        expr = self.region.exprs[number]
        if expr.op == "const":
            return Literal(expr.literal)
        if expr.op == "given":
            return self._given(expr)
        if expr.op in ("size", "taken", "extent"):
            return self._extent(expr)
        if expr.op == "place":
            return self._place(expr.axes) or Literal("0")
        if expr.op in SHARES:
            return self._random(expr)
        operands = [self.value(arg) for arg in expr.args]
        if expr.op == "round":
            return Cast(self._rounded(operands[0], expr.to), "float32")
        if expr.op == "cast":
            if self.region.exprs[expr.args[0]].op in _NUMBERS:
                return Full((), operands[0], expr.to)
            return Cast(operands[0], expr.to)
        if expr.op == "reduce":
            return self._reduce(expr, self._operand(number))
        if expr.op == "scan":
            return self._scan(expr, self._masked(expr, operands[0]))
        return self._applied(number, expr, operands)

    def _given(self, expr: Expr) -> Tile:
        """A number that the kernel is given, by its name."""
        name = self.tensors[number_of(expr)]
        self.numbers[name] = expr
        return Name(name)

    def _applied(self, number: int, expr: Expr, operands: list[Tile]) -> Tile:
        """A primitive of its operands."""
        if sums := [self.value(arg) for arg in expr.args if arg in self._one_more]:
            return sums[0]
        primitive = PRIMITIVES[expr.op]
        if not primitive.text.startswith("("):
            operands = [self._typed(arg) for arg in expr.args]
        held = self.region.exprs[expr.args[-1]].dtype
        single, loose = held == "float32", not expr.exact
        precise = self.precise and not expr.rough
        way = ""
        if number in self._uncontracted:
            return Elementwise(expr.op, tuple(map(self._typed, expr.args)), "apart")
        if number in self._one_more:
            return DeviceCall(WITH_ONE[expr.op], (operands[0],))
        if held == "float64" and primitive.double:
            way = "double"
        elif held not in ("float32", "float64") and primitive.integer:
            way = "integer"
        elif single and precise and loose and self._is_share(expr):
            return DeviceCall("share_of", tuple(operands))
        elif single and loose and self.step.rows > 1 and self._is_mean(expr):
            count = self.region.exprs[expr.args[-1]]
            exactly = precise and not set(count.axes) <= self.fixed  # a literal is made so
            # once for all rows; eager multiplies, too
            return operands[0] * _inverse(operands[1], "precise" if exactly else "")
        elif single and loose and self._loses_little(number):
            pass
        elif single and self._may_invert(number, expr, precise=precise):
            return operands[0] * _inverse(operands[1])
        elif single and (precise or expr.exact) and self._has_one_divisor(expr):
            return DeviceCall("divided", tuple(operands))
        elif expr.exact:
            way = "precise" if primitive.precise else ""
        elif single and precise and primitive.precise:
            way = "precise"
        elif single and precise and primitive.scalar and self._of_row(number):
            way = "scalar"
        elif single and expr.op == "div" and expr.args[1] in self._large:
            return operands[0] * _inverse(operands[1])
        return Elementwise(expr.op, tuple(operands), way)

    def _is_mean(self, expr: Expr) -> bool:
        """Something over a number of elements."""
        size = self.region.exprs[expr.args[-1]]
        return expr.op == "div" and size.op == "size"

    def _is_shift(self, expr: Expr) -> bool:
        """The mean of a part of a row: deviations from about there are as good."""
        return expr.op == "div" and self.region.exprs[expr.args[-1]].op == "taken"

    def _loses_little(self, number: int) -> bool:
        """A deviation, or a term of a sum of at least 1: it loses no more than rounding."""
        return self._is_shift(self.region.exprs[number]) or number in self._terms

    def _has_one_divisor(self, expr: Expr) -> bool:
        """A quotient of many lanes by one number."""
        if expr.op != "div":
            return False
        lanes = self._inner or {axis for group in self.step.outer for axis in group.axes}
        given, divisor = (self.region.depends[arg] & lanes for arg in expr.args)
        return bool(given) and not divisor

    def _may_invert(self, number: int, expr: Expr, *, precise: bool) -> bool:
        """A quotient of many lanes by one number that may be a product with its reciprocal."""
        loose = not expr.exact and (not precise or number in self._added_up)
        return loose and self._has_one_divisor(expr)

    def _is_share(self, expr: Expr) -> bool:
        """A term of a sum that is not less than 1, over the sum."""
        return expr.op == "div" and self._large.get(expr.args[1]) == expr.args[0]

    def _of_row(self, number: int) -> bool:
        """One number for all lanes, where a slow instruction costs nothing."""
        whole = bool(self._inner) and self.step.rows == 1
        return whole and not self._inner & self.region.depends[number]

    def _typed(self, number: int) -> Tile:
        """An operand of a function, to which Triton hands bare numbers as float32 or int32."""
        expr, value = self.region.exprs[number], self.value(number)
        untyped = ("float32", "int32", "int64", "bool", "index")
        if expr.op != "const" or expr.dtype in untyped:
            return value
        return Full((), value, expr.dtype)

    def _extent(self, expr: Expr) -> Tile:
        """How many elements there are along some axes: a float, or an integer of an index."""
        if expr.op == "taken":
            rest = self.total(self.step.inner) - Name("part") * self.share
            return least(rest, self.share) * Literal("1.0")
        if set(expr.axes) <= self.fixed:
            count = prod(self.region.sizes[axis] for axis in expr.axes)
            return tile(count) if expr.op == "extent" else Literal(repr(float(count)))
        found: Tile | None = None
        for groups in (self.step.inner, self.step.outer):
            if groups and {a for g in groups for a in g.axes} == set(expr.axes):
                found = self.total(groups)
        found = found or self._argument(tuple(expr.axes), "elements")
        return found if expr.op == "extent" else found * Literal("1.0")

    def _random(self, expr: Expr) -> Tile:
        """Random bits of the elements that a program has: a run of them where they lie one after
        the other, else each for itself."""
        seed, offset, element = expr.args
        state = (self.value(seed), self.value(offset), Literal(expr.literal))
        first = self._first_of_run(self.region.exprs[element].axes)
        if first is None:
            place = self.value(element)
            place = Full((), place, "int32") if isinstance(place, Literal) else place
            return DeviceCall(expr.op, (*state, place))
        return DeviceCall(f"{expr.op}_run", (*state, first, Name(self.lanes), self._in_runs))

    @property
    def _in_runs(self) -> Tile:
        """Do rows begin at a run of elements that share random bits?"""
        self.draws_runs = True
        return Name("SHARED")

    # -- reductions ----------------------------------------------------------------------------

    def _neutral(self, expr: Expr) -> Tile:
        dtype = self.region.exprs[expr.args[0]].dtype
        return Literal(MONOIDS[expr.monoid].neutral_of(dtype))

    def _masked(self, expr: Expr, operand: Tile) -> Tile:
        """The operand with what changes nothing in the lanes behind the row's end."""
        within = self._within_row
        return operand if within is None else where(within, operand, self._neutral(expr))

    def _operand(self, number: int) -> Tile:
        """What a reduction along the row combines, neutral behind the row's end."""
        expr = self.region.exprs[number]
        return self._masked(expr, self.value(expr.args[0]))

    def _reduce(self, expr: Expr, operand: Tile) -> Tile:
        outer, inner = self._spans(expr.args[0])
        rows = self.several and outer
        axis, place = 1 if rows else 0, None
        if expr.monoid in ("argmax", "argmin"):
            lane, lanes = Name(self.lane), Name(self.lanes)
            shape = (ROWS, lanes) if rows else (lanes,)
            place = Broadcast(Across(lane, 0) if rows else lane, shape)
            operand = Broadcast(operand, shape) if rows or not inner else operand
        return Reduce(expr.monoid, operand, axis, kept=rows, place=place)

    def _scan(self, expr: Expr, operand: Tile) -> Tile:
        axis = 1 if self.several and self._spans(expr.args[0])[0] else 0
        return Scan(expr.monoid, operand, axis, expr.reverse)

    def _shape(self, outer: bool, inner: bool) -> Shape:
        """The shape of a tile of values: one column, or the columns alone, where it does not
        vary."""
        if self.several and outer:
            return ROWS, Name(self.lanes) if inner else Literal("1")
        return (Name(self.lanes),) if inner else ()

    def _shape_of(self, number: int) -> Shape:
        return self._shape(*self._spans(number))

    def _spans(self, number: int) -> tuple[bool, bool]:
        """Has a value a number of its own for each row of the tile, and for each place within?"""
        outer = inner = False
        rows = {axis for group in self.step.outer for axis in group.axes}

        def further(at: int) -> Iterable[int] | None:
            return () if at in self._access else self.region.exprs[at].args

        for at in traced([number], further).passed:
            expr = self.region.exprs[at]
            if at in self._access:
                across, along, _ = self._addressed(self._access[at])
            else:
                places = set(expr.axes) if expr.op == "place" else set[int]()
                across, along = bool(places & rows), bool(places & self._inner)
            outer, inner = outer or across, inner or along
        depends = self.region.depends[number]  # less than what was combined since
        return outer and bool(rows & depends), inner and bool(self._inner & depends)

    def _combined(self, expr: Expr, left: Tile, right: Tile) -> Tile:
        """Two partial results of a reduction as one."""
        return Combine(expr.monoid, left, right)

    def _begin(self, number: int, wish: str = "", shape: Shape | None = None) -> Name:
        """What a reduction or a scan has so far, neutral to begin with: for each lane, unless
        another shape is asked for."""
        expr = self.region.exprs[number]
        wish = wish or f"{self.region.labels.get(number, 'value')}_{expr.monoid}s"
        name = self.names.claim(wish)
        shape = self._shape_of(expr.args[0]) if shape is None else shape
        self.scope.body.append(Begin(name, Full(shape, self._neutral(expr), expr.dtype)))
        return Name(name)

    # -- walks ---------------------------------------------------------------------------------

    def _serially(self, number: int) -> None:
        """Loops in which each lane combines place after place, those that are close together in
        memory one behind the other; as many of the last as may be are written out."""
        expr = self.region.exprs[number]
        operand = expr.args[0]
        name = self._begin(number, self.region.results.get(number) or expr.monoid)
        axes = self._by_distance(expr)
        apart = self._walked_in_a_loop(operand, axes)
        loops: list[tuple[str, int, Scope, bool]] = []
        for some, unrolled in ((axes[:apart], False), (axes[apart:], True)):
            if some:
                loops.append((*self._loop(some), unrolled))
                self.scopes.append(loops[-1][2])
        self._emit([operand])
        combined = self._combined(expr, name, self.value(operand))
        self.scope.body.append(Update(name.id, combined))
        for tap, count, inside, unrolled in reversed(loops):
            self.scopes.pop()
            bounds = (Literal("0"), tile(count), Literal("1"))
            self.scope.body.append(For(tap, *bounds, inside.block(), unrolled))
        self.scope.values[number] = name

    def _loop(self, axes: Sequence[int]) -> tuple[str, int, Scope]:
        """The variable of a loop over the places along some axes, the last one fastest, how many
        there are, and the scope that knows the place along each."""
        sizes = [self.region.sizes[axis] for axis in axes]
        tap, inside = self.names.claim("tap"), Scope()
        behind = 1
        for position, (axis, size) in reversed(list(enumerate(zip(axes, sizes, strict=True)))):
            along = Name(tap) if behind == 1 else Name(tap) // behind
            along = along % size if position else along
            place = self.names.claim(f"{tap}_{position}")
            inside.head.insert(0, Let((place,), self.wide(along)))
            inside.places[f"axis {axis}"] = place
            behind *= size
        return tap, prod(sizes), inside

    def _by_distance(self, expr: Expr) -> list[int]:
        """The axes of a walk, from those that step furthest in memory to the nearest."""
        behind = reach(self.region, expr.args[0])
        loads = [access for number, access in self._access.items() if number in behind]

        def furthest(axis: int) -> int:
            return max((abs(load.step(axis)) for load in loads), default=0)

        return sorted(expr.axes, key=lambda axis: (-furthest(axis), axis))

    def _walked_in_a_loop(self, operand: int, axes: Sequence[int]) -> int:
        """How many of the first axes are walked in a loop. The places along the others are written
        out, so that their loads are all on the way at once."""
        behind = reach(self.region, operand)
        if any(self.region.exprs[n].op in ("reduce", "scan") for n in behind):
            return len(axes)
        held, apart = max(1, self.step.rows * self.step.block // self.step.warps), len(axes)
        while apart and held * self.region.sizes[axes[apart - 1]] <= self.unrolled:
            apart -= 1
            held *= self.region.sizes[axes[apart]]
        return apart


def _inverse(value: Tile, way: str = "") -> Tile:
    """1 over a value."""
    return Elementwise("div", (Literal("1.0"), value), way)
