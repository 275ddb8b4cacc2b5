"""The body of a kernel whose programs walk their rows in chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import COLS, ROWS, Scope
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import reach, traced
from fusion_advisor.schedules.online import Moments, Pass, Rescaled, Shifted
from fusion_advisor.schedules.row_walks import RowWalk, row_walks
from fusion_advisor.tile.program import (
    Across,
    Barrier,
    Begin,
    Cast,
    Elementwise,
    For,
    Full,
    Lanes,
    Let,
    Literal,
    Name,
    ProgramId,
    Shape,
    Statement,
    Tile,
    Update,
    least,
    quotient,
    where,
)

PART, CHUNK, START = map(Name, ("PART", "chunk", "start"))
LOWEST, ZERO = Literal("-inf"), Literal("0.0")


@dataclass
class ChunkedBody(Body):
    """One loop over the row for each pass of reductions, and one for results that need them."""

    start: ClassVar[Tile] = START
    share: ClassVar[Tile] = PART
    _carried: dict[int, Name] = field(default_factory=dict[int, Name])
    """What a walk over the row carries for each scan."""

    @property
    def note(self) -> str:
        rows = "several rows" if self.several else "a row"
        return f"One program walks {f'a part of {rows}' if self.step.part else rows} in chunks."

    @property
    def tile_constants(self) -> tuple[Constant, ...]:
        step = self.step
        rows = (Constant("ROWS", step.rows),) if self.several else ()
        part = (Constant("PART", step.part),) if step.part else ()
        return (*rows, *part, Constant("COLS", step.block))

    def _program(self) -> list[Statement]:
        found = self._row(self._number) if self.step.outer else []
        if self.step.part:
            found.append(Let(("part",), self.wide(ProgramId(1))))
        if self.several:
            within = Name("row") < self.size(self.step.outer, "rows")
            found.append(Let(("row_mask",), within))
        return found

    def _make(self, number: int) -> None:
        if number in self._carried:
            expr = self.region.exprs[number]
            self._carry(number, self._masked(expr, self.value(expr.args[0])))
        else:
            super()._make(number)

    def _results(self) -> None:
        region = self.region
        walks = row_walks(region, self._inner)
        for walk in walks:
            if walk.found is not None:
                self._pass(walk.found, walk)
        self._leave([o.value for o in region.outputs if not self._inner & region.depends[o.value]])
        last = walks[-1] if walks else None
        if last is None or last.found is not None:
            return
        self._hoist(self._of_rows(last.stored, last.back))
        self._carried = {n: self._begin_scan(n) for n in region.all("scan")}
        inside = self._open(last)
        self._leave(last.stored)
        scans = {region.exprs[n].reverse for n in self._carried}
        again = not scans and len(walks) > 1
        self._close(inside, backwards=again or True in scans)

    def _of_rows(self, wanted: Iterable[int], back: Collection[int] = ()) -> set[int]:
        """What some values along the row use of the row as a whole, where others are read back."""

        def further(number: int) -> Iterable[int] | None:
            if number in back:
                return ()
            within = (self._inner | self.step.serial) & self.region.depends[number]
            return self.region.exprs[number].args if within else None

        ends = traced([n for n in wanted if not self.known(n)], further).ends
        return self._worked_out({number for number in ends if not self.known(number)})

    def _hoist(self, wanted: set[int]) -> None:
        """Values in front of a loop: each has a name, so that it is not made in every lane."""
        self._emit(wanted)
        for number in sorted(wanted, key=self._rank.__getitem__):
            if not isinstance(self.value(number), Name):
                self._assign(number, self.value(number))

    def _open(self, walk: RowWalk) -> Scope:
        """The inside of a walk, with what it reads back."""
        if walk.back:
            self.scope.body.append(Barrier())
        inside = Scope(places={"col": "col"})
        inside.head += self._columns(START)
        if self.several:
            inside.head.append(Let(("mask",), Name("row_mask") & Name("col_mask")))
        self.scopes.append(inside)
        values = (output.value for output in self.region.outputs)
        stores = dict(zip(values, self.step.stores, strict=True))
        for number in sorted(walk.back):
            value = self._widened(stores[number], self.region.exprs[number].dtype)
            inside.values[number] = inside.let(self.names.claim(self._wish(number)), value)
        return inside

    def _begin_scan(self, number: int) -> Name:
        """What the chunks walked so far add to each element of the next."""
        return self._begin(number, f"{self.region.labels[number]}_carried", self._row_shape())

    def _carry(self, number: int, operand: Tile) -> None:
        """A scan of one chunk, on from what was carried there; the chunk's own total joins it. Of
        one position that is one combination."""
        expr, name = self.region.exprs[number], self._carried[number]
        if self.step.block == 1:
            self._assign(number, self._combined(expr, name, operand))
            self.scope.body.append(Update(name.id, self.value(number)))
            return
        chunk = self.scope.let(self.names.claim(f"{self.region.labels[number]}_chunk"), operand)
        self._assign(number, self._combined(expr, name, self._scan(expr, chunk)))
        total = self._combined(expr, name, self._reduce(expr, chunk))
        self.scope.body.append(Update(name.id, total))

    def _close(self, inside: Scope, *, backwards: bool = False) -> None:
        """The loop over the row's chunks; `backwards` begins with those that the L2 still holds."""
        self.scopes.pop()
        cols, stages = self.size(self.step.inner, "cols"), self.step.stages
        if backwards:
            chunks = quotient(cols, COLS)
            start = Let(("start",), (chunks - 1 - CHUNK) * COLS)
            bounds = (Literal("0"), chunks, Literal("1"))
            body = (start, *inside.block())
            self.scope.body.append(For("chunk", *bounds, body, stages=stages))
            return
        begin, end = Literal("0"), self.wide(cols)
        if self.step.part:
            begin = Name("part") * PART
            end = least(begin + PART, cols)
        self.scope.body.append(For("start", begin, end, COLS, inside.block(), stages=stages))

    def _pass(self, one: Pass, walk: RowWalk) -> None:
        """A loop that carries what the reductions of one pass have so far."""
        region = self.region
        operands = [region.exprs[n].args[0] for n in one.plain]
        operands += [region.exprs[each.total].args[0] for each in one.followers]
        operands += [m.value for m in one.moments]
        carried = {each.peak for each in one.followers}
        wanted = self._of_rows([*operands, *walk.stored], walk.back)
        self._hoist(wanted - self._made_from(carried))
        totals = {n: self._begin(n) for n in one.plain if n not in carried}
        peaks = {n: self._begin_peak(n) for n in sorted(carried)}
        sums = {each.total: self._begin(each.total) for each in one.followers}
        spreads = [(m, self._begin_moments(m)) for m in one.moments]
        inside = self._open(walk)
        for number, name in totals.items():
            expr = region.exprs[number]
            self._emit(expr.args)
            value = self._masked(expr, self.value(expr.args[0]))
            inside.body.append(Update(name.id, self._combined(expr, name, value)))
        for number, name in peaks.items():
            self._grow(number, name, [r for r in one.followers if r.peak == number], sums)
        for moments, spread in spreads:
            self._deviate(moments, spread)
        self._leave(walk.stored)
        self._close(inside)
        for number, name in totals.items():
            self._assign(number, self._reduce(region.exprs[number], name))
        for number, name in peaks.items():
            self.scope.values[number] = name
        for follower in one.followers:
            self._finish_follower(follower, sums[follower.total])
        for moments, spread in spreads:
            self._finish_moments(moments, spread)

    def _made_from(self, numbers: set[int]) -> set[int]:
        return {n for n in self.region.live if numbers & reach(self.region, n)}

    def _row_shape(self) -> Shape:
        return (ROWS, Literal("1")) if self.several else ()

    def _begin_peak(self, number: int) -> Name:
        wish = f"{self.region.labels.get(number, 'value')}_max"
        return self._begin(number, self.region.results.get(number) or wish, self._row_shape())

    def _grow(
        self, peak: int, name: Name, followers: Sequence[Rescaled | Shifted], sums: dict[int, Name]
    ) -> None:
        """A running maximum, and the sums whose terms it scales or lowers."""
        region, scope = self.region, self.scope
        expr = region.exprs[peak]
        self._emit(expr.args)
        chunk = self._reduce(expr, self._masked(expr, self.value(expr.args[0])))
        grown = self.names.claim(f"{name.id}_grown")
        higher = scope.let(grown, self._combined(expr, name, chunk))
        for follower in followers:
            before = self._shift(follower, name.id)
            after = self._shift(follower, grown)
            held, total = sums[follower.total], region.exprs[follower.total]
            if isinstance(follower, Rescaled):
                power = Elementwise("exp", (before - after,), "plain")
                scaled = where(name.equals(LOWEST), ZERO, power)
                moved = held * scope.let(self.names.claim("scale"), scaled)
            else:  # each lane has had an element of each chunk before
                chunks = Full((), self._since, total.dtype) / COLS
                growth = scope.let(self.names.claim("growth"), chunks * (before - after))
                moved = held + growth
            self.scopes.append(Scope(values={follower.shift: after}))
            self._emit(total.args)
            inner = self.scopes.pop()
            scope.body += inner.block()
            term = self._masked(total, inner.values[total.args[0]])
            scope.body.append(Update(held.id, moved + term))
        scope.body.append(Update(name.id, higher))

    @property
    def _since(self) -> Tile:
        """Elements of the row, or of its part, that come before the chunk."""
        return START - Name("part") * PART if self.step.part else START

    def _shift(self, follower: Rescaled | Shifted, peak: str) -> Tile:
        """What a maximum makes the terms shift by; 0 while there is none."""
        there = Name(peak)
        safe = self.scope.let(
            self.names.claim(f"{peak}_safe"), where(there.equals(LOWEST), ZERO, there)
        )
        if follower.shift == follower.peak:
            return safe
        self.scopes.append(Scope(values={follower.peak: safe}))
        self._emit([follower.shift])
        inner = self.scopes.pop()
        self.scope.body += inner.block()
        return inner.values[follower.shift]

    def _finish_follower(self, follower: Rescaled | Shifted, name: Name) -> None:
        value = self._reduce(self.region.exprs[follower.total], name)
        if follower.shift == follower.peak:
            peak = self.value(follower.peak)
            value = where(peak.equals(LOWEST), Literal("nan"), value)
        self._assign(follower.total, value)

    def _begin_moments(self, moments: Moments) -> tuple[str, str, str]:
        """For each lane how many elements it has seen, their mean, their squared deviations."""
        label = self.region.labels.get(moments.squares, "value")
        shape = self._shape_of(moments.value)
        kind = self.region.exprs[moments.squares].dtype
        names = tuple(self.names.claim(f"{label}_{what}") for what in ("seen", "mean", "spread"))
        self.scope.body += [Begin(name, Full(shape, ZERO, kind)) for name in names[1:]]
        return names[0], names[1], names[2]

    def _deviate(self, moments: Moments, names: tuple[str, str, str]) -> None:
        """Welford's update in each lane. In the n-th chunk all lanes have their n-th element, but
        for those behind the row's end, which do not deviate."""
        _, mean, spread = map(Name, names)
        self._emit([moments.value])
        value, apart = self.names.claim("element"), self.names.claim("apart")
        deviation, share = Name(apart), self.names.claim("share")
        kind = self.region.exprs[moments.squares].dtype
        inside = where(Name("col_mask"), self.value(moments.value), mean)
        element = self.scope.let(value, inside)
        self.scope.body += [
            Let((share,), Full((), COLS, kind) / (self._since + COLS)),
            Let((apart,), element - mean),
            Update(mean.id, mean + deviation * Name(share)),
            Update(spread.id, spread + deviation * (element - mean)),
        ]

    def _count_seen(self, moments: Moments, seen: str) -> Statement:
        """How many elements of the row each lane has had."""
        length = self.size(self.step.inner, "cols")
        if self.step.part:
            length = least(length - Name("part") * PART, PART)
        lanes: Tile = Lanes(COLS)
        if self.several and self._spans(moments.value)[0]:
            lanes = Across(lanes, 0)
        kind = self.region.exprs[moments.squares].dtype
        return Let((seen,), Cast(quotient(length - lanes, COLS), kind))

    def _finish_moments(self, moments: Moments, names: tuple[str, str, str]) -> None:
        """The lanes' means and deviations moved to the mean of the row."""
        seen, mean, spread = map(Name, names)
        expr = self.region.exprs[moments.squares]
        self.scope.body.append(self._count_seen(moments, seen.id))
        self._assign(moments.total, self._reduce(expr, seen * mean))
        self._emit([moments.mean])
        away = mean - self.value(moments.mean)
        if self.region.exprs[moments.mean].op == "round" and moments.rest and moments.lost:
            self._assign(moments.rest, self._reduce(expr, seen * away))
            self._emit([moments.lost])
            away = away - self.value(moments.lost)
        elif moments.rest is not None:  # the mean has all its digits
            self.scope.values[moments.rest] = ZERO
        self._assign(moments.squares, self._reduce(expr, spread + seen * away * away))
