"""One pass over the rows of a region, cut into parts: what each part finds, what the parts make
together, and what is left of the region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusion_advisor.ir.graph import DTYPE_BYTES
from fusion_advisor.region.exprs import INDEX, Expr, Pool
from fusion_advisor.region.region import Output, Region
from fusion_advisor.schedules.cutting import (
    Copier,
    apply,
    combined_parts,
    constant,
    converted,
    loaded,
    piece,
    pool_of,
    space,
    summed,
)
from fusion_advisor.schedules.layout import accesses, leading, ordered, reach, traced
from fusion_advisor.schedules.online import Moments, Pass, Rescaled, Shifted


@dataclass
class Cut:
    """One pass over the rows of a region, cut into parts along a new axis."""

    region: Region
    inner: frozenset[int]
    first: Pass
    part: int
    before: int
    """How many kernels there are already."""
    exact: bool = True
    """Are sums of scaled terms combined in float64, and means out of two sums of a part? Once a row
    that costs nothing; where every program combines, eager's own precision has to do."""

    @property
    def partials(self) -> dict[int, Output]:
        """What the parts of a row leave in memory for each reduction of the pass."""
        rests = {m.rest for m in self.first.moments if m.rest is not None}
        left_out = set[int]() if self.exact and not self.narrow else rests
        return {
            number: space(
                self._name(number, "part"),
                number,
                (*self._kept(number), self.parts),
                self.region.exprs[number].dtype,
                self.sizes,
            )
            for number in sorted(self.first.found - left_out)
        }

    @property
    def early(self) -> list[Output]:
        """Results that lie along the rows and need no more of them than the pass loads: a part
        leaves its own, where another kernel would read the rows again. A program that waits for
        others has them on chip still."""
        region = self.region
        loaded = {n for m in self.first.found for n in reach(region, m)} & {*region.all("load")}

        def follows(out: Output) -> bool:
            made = reach(region, out.value)
            waits = any(region.exprs[n].op in ("reduce", "scan") for n in made)
            return not waits and made & {*region.all("load")} <= loaded

        return [
            out for out in region.outputs if self.exact and self._lies_along(out) and follows(out)
        ]

    def _lies_along(self, out: Output) -> bool:
        """Are neighbours along the rows neighbours in memory?"""
        steps = zip(out.dims, out.tensor.stride, strict=True)
        return any(dim and step == 1 and dim[-1] in self.inner for dim, step in steps)

    @property
    def narrow(self) -> bool:
        """Whether results are rounded to less than float32."""
        return all(DTYPE_BYTES[output.tensor.dtype] < 4 for output in self.region.outputs)

    @property
    def kind(self) -> str:
        """What means and deviations are combined in: where every program does it, and results are
        rounded to less, in float32. It takes fewer registers, so that more programs are resident,
        and no division in float64: LayerNorm over 24576 bfloat16 columns in parts of 4096 took 338
        us on an H200, and takes 295."""
        return "float32" if self.narrow and not self.exact else "float64"

    @property
    def length(self) -> int:
        return prod(self.region.sizes[axis] for axis in self.inner)

    @property
    def count(self) -> int:
        return -(-self.length // self.part)

    @property
    def parts(self) -> int:
        """The axis that numbers the parts of a row."""
        return self.region.free_axis

    @property
    def sizes(self) -> dict[int, int]:
        return {**self.region.sizes, self.parts: self.count}

    def _kept(self, number: int) -> tuple[int, ...]:
        """The axes of a row-level value, in the order in which the rows lie."""
        loads, stores = accesses(self.region)
        return ordered(sorted(self.region.depends[number]), leading((*loads, *stores)))

    def _name(self, number: int, kind: str) -> str:
        return f"ws_{kind}{self.before}_{number}"

    # -- the parts of a row ----------------------------------------------------------------------

    def partial(self) -> Region:
        """Every reduction of the pass, over one part of each row, and the early results."""
        pool, known = pool_of(self.region, self.sizes), dict[int, int]()
        for moments in self.first.moments:
            known |= _local_moments(pool, moments, back=moments.rest in self.partials)
        outputs = [
            replace(left, value=known.get(number, number)) for number, left in self.partials.items()
        ]
        return piece(self.region, pool, [*outputs, *self.early], (), self.sizes)

    # -- what they make together -------------------------------------------------------------------

    def combined(self) -> tuple[Region, Region | None]:
        """The region that combines the parts, and what is left of the region after it."""
        pool = pool_of(self.region, self.sizes)
        known = _Whole(pool, self.region, self).reductions()
        made = {out.name for out in self.early}
        waiting = [out for out in self.region.outputs if out.name not in made]
        return self._parted(pool, known, waiting, list(self.partials.values()))

    def whole(self) -> tuple[Region, Region | None]:
        """The region that reduces whole rows, and what is left of the region after it."""
        return self._parted(pool_of(self.region, self.sizes), {}, self.region.outputs, [])

    def _parted(
        self, pool: Pool, known: dict[int, int], waiting: Sequence[Output], spaces: list[Output]
    ) -> tuple[Region, Region | None]:
        """The region of what a row has one of, `known` what stands for its reductions, which are
        made of `spaces`; and the region of the results that wait for it."""
        region, copier = self.region, Copier(pool, self.region, known)
        later = [out for out in waiting if not self._complete(out.value)]
        outputs = [
            replace(out, value=copier.copied(out.value))
            for out in waiting
            if self._complete(out.value)
        ]
        crossing = self._crossing([out.value for out in later])
        handed = {
            number: space(
                self._name(number, "row"),
                copier.copied(number),
                self._kept(number),
                region.exprs[number].dtype,
                self.sizes,
            )
            for number in crossing
        }
        combined = piece(region, pool, [*outputs, *handed.values()], spaces, self.sizes)
        if not later:
            return combined, None
        rest = pool_of(self.region, self.sizes)
        known = {
            number: loaded(rest, len(region.inputs) + place, left)
            for place, (number, left) in enumerate(handed.items())
        }
        remaining = Copier(rest, region, known)
        left = [replace(out, value=remaining.copied(out.value)) for out in later]
        return combined, piece(region, rest, left, list(handed.values()), self.sizes)

    def _complete(self, number: int) -> bool:
        """Is a value known once the parts are combined, and does a row have one of it?"""
        region = self.region
        if not region.depends[number] <= self._rows:
            return False
        later = {
            n
            for n in reach(region, number)
            if region.exprs[n].op == "reduce" and n not in self.first.found
        }
        return not any(self.inner & set(region.exprs[n].axes) for n in later)

    @property
    def _rows(self) -> frozenset[int]:
        """The axes that number the rows of the pass."""
        return frozenset[int]().union(*(self.region.depends[n] for n in self.first.found))

    def _crossing(self, wanted: list[int]) -> list[int]:
        """Row-level values made from the pass's reductions that the rest of the region uses."""
        region = self.region

        def further(number: int) -> Iterable[int] | None:
            made_here = self.first.found & reach(region, number)
            return None if self._complete(number) and made_here else region.exprs[number].args

        return sorted(traced(wanted, further).ends)


def _shift(pool: Pool, moments: Moments, *, back: bool) -> int:
    """The first element of each row: what its moments are taken about, so that a large mean with
    a small spread loses nothing."""
    axes = pool.exprs[moments.total].axes
    first = pool.pulled(moments.value, dict.fromkeys(axes, pool.whole(0)))
    return pool.coarse(first) if back else first


def _local_moments(pool: Pool, moments: Moments, *, back: bool) -> dict[int, int]:
    """The sum, and the squared deviations from the mean, of a part of a row. With `back`, where the
    mean of a whole row may be far smaller than what is summed here, the sum is in two: about how
    large the mean of the part is, and the sum of the deviations from that."""
    expr = pool.exprs[moments.total]
    value = apply(pool, "sub", moments.value, _shift(pool, moments, back=back))
    label = pool.labels.get(moments.squares, "")

    def total(of: int) -> int:
        return pool.add(replace(expr, args=(of,)), label)

    whole, count = total(value), pool.add(Expr("taken", (), expr.dtype, axes=expr.axes))
    mean = apply(pool, "div", whole, count)
    mean = pool.coarse(mean) if back else mean
    apart, found = apply(pool, "sub", value, mean), {moments.total: whole}
    if back and moments.rest is not None:
        left = total(apart)
        found = {moments.total: mean, moments.rest: left}
        apart = apply(pool, "sub", apart, apply(pool, "div", left, count))
    return found | {moments.squares: total(apply(pool, "mul", apart, apart))}


@dataclass
class _Whole:
    """The reductions over whole rows, out of the parts that are in memory."""

    pool: Pool
    region: Region
    cut: Cut

    def reductions(self) -> dict[int, int]:
        """What stands for each reduction of the pass."""
        cut, known = self.cut, dict[int, int]()
        for number in cut.first.plain:
            expr = self.region.exprs[number]
            label = self.region.labels.get(number, "")
            known[number] = combined_parts(self.pool, expr, self._part(number), cut.parts, label)
        for rescaled in cut.first.rescaled:
            known[rescaled.total] = self._rescaled(rescaled, known)
        for shifted in cut.first.shifted:
            known[shifted.total] = self._shifted(shifted, known)
        for moments in cut.first.moments:
            self._moments(moments, known)
        return known

    def _part(self, number: int) -> int:
        """A partial result."""
        place = len(self.region.inputs) + list(self.cut.partials).index(number)
        return loaded(self.pool, place, self.cut.partials[number])

    def _wide(self, value: int) -> int:
        return converted(self.pool, value, self.cut.kind)

    def _rescaled(self, rescaled: Rescaled, known: dict[int, int]) -> int:
        pool, dtype = self.pool, self.region.exprs[rescaled.total].dtype
        peak, whole = self._part(rescaled.peak), known[rescaled.peak]
        kind = "float64" if self.cut.exact else dtype
        power = apply(pool, "exp", self._growth(rescaled, whole))
        scale = converted(pool, power, kind)
        lowest = constant(pool, "-inf", dtype)
        moved = apply(pool, "mul", converted(pool, self._part(rescaled.total), kind), scale)
        nothing = apply(pool, "eq", peak, lowest)
        zero = constant(pool, "0.0", kind)
        kept = pool.add(Expr("where", (nothing, zero, moved), kind))
        return self._of_parts(rescaled, kept, whole)

    def _shifted(self, shifted: Shifted, known: dict[int, int]) -> int:
        pool, total = self.pool, self.region.exprs[shifted.total]
        peak, whole = self._part(shifted.peak), known[shifted.peak]
        kind = "float64" if self.cut.exact else total.dtype
        count = converted(pool, self._count(total), kind)
        growth = converted(pool, self._growth(shifted, whole), kind)
        part = converted(pool, self._part(shifted.total), kind)
        moved = apply(pool, "add", part, apply(pool, "mul", count, growth))
        lowest = constant(pool, "-inf", total.dtype)
        nothing = apply(pool, "eq", peak, lowest)
        kept = pool.add(Expr("where", (nothing, constant(pool, "-inf", kind), moved), kind))
        return self._of_parts(shifted, kept, whole)

    def _growth(self, follower: Rescaled | Shifted, whole: int) -> int:
        """How much the shift of a part is less than that of the whole row, as a difference."""

        def shift(of: int) -> int:
            return Copier(self.pool, self.region, {follower.peak: of}).copied(follower.shift)

        return apply(self.pool, "sub", shift(self._part(follower.peak)), shift(whole))

    def _of_parts(self, follower: Rescaled | Shifted, kept: int, whole: int) -> int:
        """A sum of what the parts keep; NaN where a row's maximum is -inf, and is the shift."""
        pool, dtype = self.pool, self.region.exprs[follower.total].dtype
        total = converted(pool, summed(pool, kept, (self.cut.parts,)), dtype)
        if follower.shift != follower.peak:
            return total
        empty = apply(pool, "eq", whole, constant(pool, "-inf", dtype))
        return pool.add(Expr("where", (empty, constant(pool, "nan", dtype), total), dtype))

    def _moments(self, moments: Moments, known: dict[int, int]) -> None:
        """Chan's combination of means and squared deviations."""
        pool, cut = self.pool, self.cut
        expr = self.region.exprs[moments.total]
        back, part = moments.rest in cut.partials, self._wide(self._part(moments.total))
        shift = self._wide(_shift(pool, moments, back=back))
        count = self._count(expr)
        if back and moments.rest is not None:
            left = self._wide(self._part(moments.rest))
            part = apply(pool, "add", apply(pool, "mul", part, count), left)
        whole = summed(pool, part, (cut.parts,))
        size = self._wide(pool.add(Expr("size", (), "float32", axes=expr.axes)))
        one = constant(pool, "1.0", cut.kind)
        inverse = apply(pool, "div", one, size)  # ready before the parts are
        centre = apply(pool, "mul", whole, inverse)
        own = apply(pool, "mul", part, apply(pool, "div", one, count))
        apart = apply(pool, "sub", own, centre)
        moved = apply(pool, "mul", count, apply(pool, "mul", apart, apart))
        squares = apply(pool, "add", self._wide(self._part(moments.squares)), moved)
        spread = summed(pool, squares, (cut.parts,))
        known[moments.squares] = converted(pool, spread, expr.dtype)
        self._divided(moments.squares, apply(pool, "mul", spread, inverse), known)
        mean = apply(pool, "add", shift, centre)
        known[moments.total] = converted(pool, apply(pool, "mul", mean, size), expr.dtype)
        self._divided(moments.total, mean, known)
        if self.region.exprs[moments.mean].op == "round":  # known already with all its digits
            known[moments.mean] = converted(pool, mean, expr.dtype)
        if moments.rest is not None:
            rounded = converted(pool, mean, expr.dtype)
            if cut.kind == expr.dtype:
                lost = apply(pool, "sub", centre, apply(pool, "sub", mean, shift))
            else:
                lost = apply(pool, "sub", mean, self._wide(rounded))
            known[moments.rest] = converted(pool, apply(pool, "mul", lost, size), expr.dtype)
            self._divided(moments.rest, lost, known)

    def _count(self, total: Expr) -> int:
        """How many elements each part of a row has, as a float."""
        pool, cut = self.pool, self.cut
        start = pool.reckon("mul", pool.place((cut.parts,)), pool.whole(cut.part))
        extent = pool.add(Expr("extent", (), INDEX, axes=total.axes))
        behind = pool.reckon("sub", extent, start)
        taken = pool.add(Expr("minimum", (behind, pool.whole(cut.part)), INDEX))
        return pool.add(Expr("cast", (taken,), cut.kind, to=cut.kind))

    def _divided(self, total: int, mean: int, known: dict[int, int]) -> None:
        """Where the region divides a sum by the length of its row stands its mean: nothing waits
        for a division of what the parts make together."""
        exprs = self.region.exprs
        for number in self.region.all("div"):
            expr, (value, count) = exprs[number], exprs[number].args
            whole = exprs[count].op == "size" and {*exprs[count].axes} == {*exprs[total].axes}
            if value == total and whole:
                label = self.region.labels.get(number, "")
                known[number] = converted(self.pool, mean, expr.dtype, label)
