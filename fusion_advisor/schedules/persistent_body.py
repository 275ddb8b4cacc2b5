"""The body of a kernel whose programs walk their share of the rows, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from fusion_advisor.region.exprs import Expr
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import ROWS, Scope
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import spanned, traced
from fusion_advisor.tile.program import (
    Across,
    Cast,
    For,
    Lanes,
    Let,
    Name,
    ProgramId,
    Reduce,
    Statement,
    Tile,
    Update,
    where,
)


class PersistentBody(Body):
    """A loop over a program's rows, which carries what is combined down the columns."""

    @property
    def note(self) -> str:
        return "One program walks its share of the rows."

    @property
    def tile_constants(self) -> tuple[Constant, ...]:
        rows = (Constant("ROWS", self.step.rows),) if self.several else ()
        inner = spanned(self.step.inner)
        return (*rows, Constant("COLS", self.step.block, "power_of_two", inner))

    def _program(self) -> list[Statement]:
        return [Let(("part",), self.wide(ProgramId(0))), *self._columns(None)]

    def _results(self) -> None:
        region, step = self.region, self.step
        outer = frozenset(axis for group in step.outer for axis in group.axes)
        pairs = list(zip(region.outputs, step.stores, strict=True))
        carried = [n for n in region.all("reduce") if outer & set(region.exprs[n].axes)]
        early = [(o, a) for o, a in pairs if o.value not in carried]
        operands = [region.exprs[n].args[0] for n in carried]
        wanted = [*operands, *(o.value for o, _ in early)]
        self._emit(self._apart_from(wanted, outer | step.serial))
        names = {n: self._begin(n) for n in carried}
        inside = Scope(places={"row": "row"})
        rows = self.size(step.outer, "rows")
        if self.several:
            inside.head += [
                Let(("row",), Name("start") + Across(Lanes(ROWS), 1)),
                Let(("row_mask",), Name("row") < rows),
                Let(("mask",), Name("row_mask") & Name("col_mask")),
            ]
        self.scopes.append(inside)
        self._emit(wanted)
        for number, name in names.items():
            expr = region.exprs[number]
            value = self.value(expr.args[0])
            if self.several:
                if expr.dtype == "int64" and expr.monoid in ("max", "min"):  # of int32 places, say
                    value = Cast(value, "int64")
                value = where(Name("row_mask"), value, self._neutral(expr))
            inside.body.append(Update(name.id, self._combined(expr, name, value)))
        for output, access in early:
            self._store(access, self.value(output.value))
        self.scopes.pop()
        every, part = ProgramId(0, all=True), Name("part")
        bounds, walked = (part, rows, every), "row"
        if self.several:
            bounds, walked = (part * ROWS, rows, every * ROWS), "start"
        self.scope.body.append(For(walked, *bounds, inside.block(), stages=step.stages))
        for output, access in pairs:
            if output.value in names:
                value: Tile = names[output.value]
                if self.several:
                    value = self._down(region.exprs[output.value], value)
                self._store(access, value)

    def _apart_from(self, wanted: Iterable[int], axes: frozenset[int]) -> set[int]:
        """What some values are made from that does not vary along some axes."""

        def further(number: int) -> Iterable[int] | None:
            expr = self.region.exprs[number]
            varies = self.region.depends[number] & axes
            return expr.args if varies or expr.op == "reduce" else None

        return self._worked_out(traced(wanted, further).ends)

    def _down(self, expr: Expr, operand: Tile) -> Tile:
        """The rows of a tile combined: in each column, or to one number."""
        return Reduce(expr.monoid, operand, 0 if self._spans(expr.args[0])[1] else None)
