"""The body of a kernel whose programs walk their rows in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import Scope
from fusion_advisor.schedules.layout import reach, traced
from fusion_advisor.schedules.online import Moments, Pass, Rescaled, passes
from fusion_advisor.schedules.spelling import bare, language_dtype


@dataclass
class ChunkedBody(Body):
    """One loop over the row for each pass of reductions, and one for what lies along it."""

    fills: ClassVar[bool] = False  # a loop's loads are on their way before it

    start: ClassVar[str] = "start"
    _carried: dict[int, str] = field(default_factory=dict[int, str])
    """What a walk over the row carries for each scan."""

    def prepare(self) -> None:
        super().prepare()
        self.whole = bool(self.step.parts) and self.step.stages == 1 and not self.step.vector

    def _program(self) -> list[str]:
        lines = self._row(self._number)
        if self.step.part:
            lines.append(f"part = {self.wide('tl.program_id(1)')}")
        if self.several:
            lines.append(f"row_mask = row < {self.size(self.step.outer, 'rows')}")
        return lines

    def _make(self, number: int) -> None:
        if number in self._carried:
            expr = self.region.exprs[number]
            self._carry(number, self._masked(expr, self.text(expr.args[0])))
        else:
            super()._make(number)

    def _results(self) -> None:
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
        self._hoist(self._of_rows([output.value for output, _ in along]))
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

        def further(number: int) -> Iterable[int] | None:
            within = (self._inner | self.step.serial) & self.region.depends[number]
            return self.region.exprs[number].args if within else None

        ends = traced([n for n in wanted if not self.known(n)], further).ends
        return self._worked_out({number for number in ends if not self.known(number)})

    def _hoist(self, wanted: set[int]) -> None:
        """Lines in front of a loop: each value has a name, so that it is not made in every lane."""
        self._emit(wanted)
        for number in sorted(wanted, key=self._rank.__getitem__):
            if not self.text(number).isidentifier():
                self._assign(number, self.text(number))

    def _open(self) -> Scope:
        inside = Scope(places={"col": "col"})
        inside.head += self._columns("start + ", " | WHOLE" if self.whole else "")
        if self.several:
            inside.head.append("mask = row_mask & col_mask")
        self.scopes.append(inside)
        return inside

    def _begin_scan(self, number: int) -> str:
        """What the chunks walked so far add to each element of the next."""
        return self._begin(number, f"{self.region.labels[number]}_carried", self._row_shape())

    def _carry(self, number: int, operand: str) -> None:
        """A scan of one chunk, on from what was carried there; the chunk's own total joins it."""
        expr, name = self.region.exprs[number], self._carried[number]
        scanned = self.names.claim(f"{self.region.labels[number]}_chunk")
        self.scope.lines.append(f"{scanned} = {operand}")
        here = self._combined(expr, name, self._scan(expr, scanned))
        self._assign(number, here)
        total = self._combined(expr, name, self._reduce(expr, scanned))
        self.scope.lines.append(f"{name} = {total}")

    def _close(self, inside: Scope, *, backwards: bool = False) -> None:
        """The loop over the row's chunks; `backwards` begins with those that the L2 still holds."""
        self.scopes.pop()
        cols = self.size(self.step.inner, "cols")
        staged = f", num_stages={self.step.stages}" if self.step.stages > 1 else ""
        if backwards:
            self.scope.lines += [
                f"for chunk in tl.range(0, tl.cdiv({cols}, COLS){staged}):",
                f"    start = (tl.cdiv({cols}, COLS) - 1 - chunk) * COLS",
                *inside.indented(),
            ]
            return
        bounds = f"0, {self.wide(cols)}"
        if self.step.part:
            bounds = f"part * PART, tl.minimum(part * PART + PART, {cols})"
        self.scope.lines += [f"for start in tl.range({bounds}, COLS{staged}):", *inside.indented()]

    def _pass(self, one: Pass) -> None:
        """A loop that carries what the reductions of one pass have so far."""
        region = self.region
        operands = [region.exprs[n].args[0] for n in one.plain]
        operands += [region.exprs[r.total].args[0] for r in one.rescaled]
        operands += [m.value for m in one.moments]
        carried = {r.peak for r in one.rescaled}
        self._hoist(self._of_rows(operands) - self._made_from(carried))
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
        return {n for n in self.region.live if numbers & reach(self.region, n)}

    def _row_shape(self) -> str:
        return "[ROWS, 1]" if self.several else "()"

    def _begin_peak(self, number: int) -> str:
        wish = f"{self.region.labels.get(number, 'value')}_max"
        return self._begin(number, self.region.results.get(number) or wish, self._row_shape())

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
            self.scopes.append(Scope(texts={rescaled.shift: after}))
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
        self.scopes.append(Scope(texts={rescaled.peak: safe}))
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
        carried = names if self.step.vector else names[1:]
        self.scope.lines += [f"{name} = tl.full({shape}, 0.0, {kind})" for name in carried]
        return names[0], names[1], names[2]

    def _deviate(self, moments: Moments, names: tuple[str, str, str]) -> None:
        """Welford's update in each lane. In the n-th chunk all lanes have their n-th element, but
        for those behind the row's end, which do not deviate; where lanes take whole vectors, each
        counts for itself."""
        seen, mean, spread = names
        self._emit([moments.value])
        value, apart = self.names.claim("element"), self.names.claim("apart")
        moved = f"{apart} / tl.maximum({seen}, 1.0)"
        counted = [f"{seen} = {seen} + tl.where(col_mask, 1.0, 0.0)"]
        if not self.step.vector:
            share, since = self.names.claim("share"), "start"
            if self.step.part:
                since = "start - part * PART"
            kind = language_dtype(self.region.exprs[moments.squares].dtype)
            counted = [f"{share} = tl.full((), COLS, {kind}) / ({since} + COLS)"]
            moved = f"{apart} * {share}"
        self.scope.lines += [
            f"{value} = tl.where(col_mask, {bare(self.text(moments.value))}, {mean})",
            *counted,
            f"{apart} = {value} - {mean}",
            f"{mean} = {mean} + {moved}",
            f"{spread} = {spread} + {apart} * ({value} - {mean})",
        ]

    def _count_seen(self, moments: Moments, seen: str) -> str:
        """How many elements of the row each lane has had."""
        length = self.size(self.step.inner, "cols")
        if self.step.part:
            length = f"tl.minimum({length} - part * PART, PART)"
        across = "[None, :]" if self.several and self._spans(moments.value)[0] else ""
        kind = language_dtype(self.region.exprs[moments.squares].dtype)
        return f"{seen} = tl.cdiv({length} - tl.arange(0, COLS){across}, COLS).to({kind})"

    def _finish_moments(self, moments: Moments, names: tuple[str, str, str]) -> None:
        """The lanes' means and deviations moved to the mean of the row."""
        seen, mean, spread = names
        expr = self.region.exprs[moments.squares]
        if not self.step.vector:
            self.scope.lines.append(self._count_seen(moments, seen))
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
