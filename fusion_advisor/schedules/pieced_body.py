"""The body of a kernel that holds a row in pieces.

Tiles are powers of two: a row of 12288 elements in one of 16384 leaves a quarter of the lanes, and
of the registers, to nothing; in pieces of 8192 and 4096 it leaves none. And where rows begin
anywhere, what lies around their whole vectors is a piece of its own (see `vectors`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import COLS, Scope
from fusion_advisor.schedules.layout import Group
from fusion_advisor.schedules.names import Names
from fusion_advisor.tile.program import Let, ProgramId, Statement, Tile


@dataclass
class LaterNames(Names):
    """Names of what a later piece has."""

    suffix: str = ""

    def claim(self, wish: str) -> str:
        return super().claim(f"{wish}_{self.suffix}")


class Later(Body):
    """Writes what a later piece has."""

    def _place_name_of(self, group: Group) -> str:
        return f"{group.name}_{self.lane}"


class Rest(Later):
    """What a row has beyond the first piece."""

    lane: ClassVar[str] = "rest"
    lanes: ClassVar[str] = "REST"
    vectors: ClassVar[str] = "rest_vectors"
    copy: ClassVar[str] = "rest_shared"


class Ends(Later):
    """What lies around the whole vectors of a row."""

    lane: ClassVar[str] = "end"
    lanes: ClassVar[str] = "ENDS"
    in_vectors: ClassVar[bool] = False


class InPieces(Body):
    """Every value that lies along the row is made for one piece after the other; reductions of all
    are combined."""

    others: tuple[Body, ...] = ()
    """Write what the other pieces have."""

    def _results(self) -> None:
        """The results; beside ends, and of parts of rows, piece by piece, for registers are free
        again once a piece is stored."""
        if not self.others:
            super()._results()
            return
        region = self.region
        wanted = self._missing(output.value for output in region.outputs)
        late = {n for n in wanted if region.depends[n] & self._inner}
        whole = wanted - late
        self._emit(whole)
        apart = self.step.ends or self.step.part
        together = [(body,) for body in self._pieces] if apart else [self._pieces]
        for bodies in together:
            for number in sorted(late, key=self._rank.__getitem__):
                self._make_along(number, bodies)
            for output, access in zip(region.outputs, self.step.stores, strict=True):
                for body in bodies if self._inner & access.walks else ():
                    with self._piece(body):
                        body._store(access, body.value(output.value))
        for output, access in zip(region.outputs, self.step.stores, strict=True):
            if not self._inner & access.walks:
                self._store(access, self.value(output.value))

    def other(self, kind: type[Later], **more: Any) -> Later:
        """What writes another piece beside this one; `more` is what its kind has besides."""
        names = LaterNames(self.names.used, kind.lane)
        found = self.beside(kind, self.step, names, self.scopes, **more)
        found.prepare()
        return found

    def _make_along(self, number: int, bodies: Iterable[Body]) -> None:
        """A value that lies along the row, for some of its pieces."""
        for body in bodies:
            with self._piece(body):
                if not body.known(number):
                    body._make(number)

    def _emit(self, wanted: Iterable[int]) -> None:
        if not self.others:
            super()._emit(wanted)
            return
        whole, self._pieces = self.scope, (self, *self.others)
        self._own = {
            id(body): Scope(places={body.lane: body.lane}, head=whole.head, body=whole.body)
            for body in self._pieces
        }
        for number in sorted(self._missing(wanted), key=self._rank.__getitem__):
            if self.region.depends[number] & self._inner:
                self._make_along(number, self._pieces)
            elif self.region.exprs[number].op == "reduce":
                self._assign(number, self._of_all(number))
            else:
                self._make(number)

    @contextmanager
    def _piece(self, body: Body) -> Generator[None]:
        """What a body makes is known to its own piece alone."""
        body.scopes.append(self._own[id(body)])
        yield
        body.scopes.pop()

    def _of_all(self, number: int) -> Tile:
        """A reduction along the row."""
        expr = self.region.exprs[number]
        found: Tile | None = None
        for first, *others in self._alike():
            part = self._operand_of(first, number)
            for body in others:
                part = self._combined(expr, part, self._operand_of(body, number))
            part = first._reduce(expr, part)
            found = part if found is None else self._combined(expr, found, part)
        assert found is not None, "a row has a piece at the least"
        return found

    def _alike(self) -> Iterable[tuple[Body, ...]]:
        """Pieces of as many lanes, which are combined lane by lane."""
        return ((body,) for body in self._pieces)

    def _operand_of(self, body: Body, number: int) -> Tile:
        """What a reduction combines of one piece."""
        with self._piece(body):
            return body._operand(number)


class PiecedBody(InPieces):
    """A program has all pieces of its row, or of its part of one."""

    def _program(self) -> list[Statement]:
        found = self._row(self._number)
        rest = self.other(Rest) if self.step.rest else None
        ends = self.other(Ends) if self.step.ends else None
        self.others = tuple(body for body in (rest, ends) if body)
        if ends:
            if self.step.part:
                found.append(Let(("part",), self.wide(ProgramId(1))))
            found += self._around_vectors(self._first_of_part)
            return [*found, *rest._around_vectors(COLS, ("_", "_"))] if rest else found
        found.append(self._columns(None)[0])
        return [*found, *rest._columns(COLS)] if rest else found

    @property
    def _within_row(self) -> Tile | None:
        return super()._within_row if self.step.ends else None  # no row is shorter than that piece
