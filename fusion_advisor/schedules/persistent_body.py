"""The body of a kernel whose programs walk their share of the rows, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.primitives import MONOIDS
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import Scope
from fusion_advisor.schedules.layout import traced
from fusion_advisor.schedules.spelling import as_operand, bare


class PersistentBody(Body):
    """A loop over a program's rows, which carries what is combined down the columns."""

    fills: ClassVar[bool] = False  # a loop's loads are on their way before it

    def _program(self) -> list[str]:
        columns = self._columns("")
        columns = columns[:1] if self.step.vector else columns
        return [f"part = {self.wide('tl.program_id(0)')}", *columns]

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
                "row = start + tl.arange(0, ROWS)[:, None]",
                f"row_mask = row < {rows}",
                "mask = row_mask & col_mask",
            ]
        if step.vector:
            inside.head += self._in_vectors("")
        self.scopes.append(inside)
        self._emit(wanted)
        for number, name in names.items():
            expr = region.exprs[number]
            value = self.text(expr.args[0])
            if self.several:
                if expr.dtype == "int64" and expr.monoid in ("max", "min"):  # of int32 places, say
                    value = f"{as_operand(value)}.to(tl.int64)"
                value = f"tl.where(row_mask, {bare(value)}, {self._neutral(expr)})"
            combines = MONOIDS[expr.monoid].helper
            combined = f"= {self._combined(expr, name, value)}" if combines else f"+= {value}"
            inside.lines.append(f"{name} {combined}")
        for output, access in early:
            self._store(access, self.text(output.value))
        self.scopes.pop()
        bounds = f"part, {rows}, tl.num_programs(0)"
        if self.several:
            bounds = f"part * ROWS, {rows}, tl.num_programs(0) * ROWS"
        walked = "start" if self.several else "row"
        staged = f", num_stages={step.stages}" if step.stages > 1 else ""
        self.scope.lines += [f"for {walked} in tl.range({bounds}{staged}):", *inside.indented()]
        for output, access in pairs:
            if output.value in names:
                text = names[output.value]
                if self.several:
                    text = self._down(region.exprs[output.value], text)
                self._store(access, text)

    def _apart_from(self, wanted: Iterable[int], axes: frozenset[int]) -> set[int]:
        """What some values are made from that does not vary along some axes."""

        def further(number: int) -> Iterable[int] | None:
            expr = self.region.exprs[number]
            varies = self.region.depends[number] & axes
            return expr.args if varies or expr.op == "reduce" else None

        return self._worked_out(traced(wanted, further).ends)

    def _down(self, expr: Expr, operand: str) -> str:
        """The rows of a tile combined: in each column, or to one number."""
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
        axis = "0" if self._spans(expr.args[0])[1] else "None"
        template = monoid.text.replace("axis=1, keep_dims=True", f"axis={axis}")
        template = template.replace("{0}, 1, ", f"{{0}}, {axis}, ").replace(", keep_dims=True", "")
        return template.format(operand)
