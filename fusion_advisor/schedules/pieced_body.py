"""The body of a kernel that holds a row in two pieces, the second at most as long as the first.

Tiles are powers of two: a row of 12288 elements in one of 16384 leaves a quarter of the lanes, and
of the registers, to nothing. In pieces of 8192 and 4096 it leaves none.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

from fusion_advisor.schedules.spelling import Names
from fusion_advisor.schedules.text import Body, Scope


class _RestNames(Names):
    """Names of what the second piece has."""

    def claim(self, wish: str) -> str:
        return super().claim(f"{wish}_rest")


class _Rest(Body):
    """Writes what the second piece has."""

    lane: ClassVar[str] = "rest"
    lanes: ClassVar[str] = "REST"


class PiecedBody(Body):
    """Every value that lies along the row is made for one piece, then for the other; reductions of
    both are combined."""

    def _program(self) -> list[str]:
        wide = ".to(tl.int64)" if self.wide else ""
        row = self._row(f"tl.program_id(0){wide}")
        second = _Rest(
            self.step, self.tensors, self.precise, self.wide, self.wide_rows, self.unrolled,
            _RestNames(self.names.used), self.sizes, self.strides, self.helpers,
            scopes=[self.scope],
        )  # fmt: skip
        second.prepare()
        self._pieces: tuple[Body, ...] = (self, second)
        whole = self.scope
        self._own = {id(body): Scope(head=whole.head, lines=whole.lines) for body in self._pieces}
        col, _ = self._columns("")
        return [*row, col, *second._columns(f"{self.lanes} + ")]

    @property
    def _within_row(self) -> str:
        return ""  # the first piece is no longer than the row

    @contextmanager
    def _piece(self, body: Body) -> Generator[None]:
        """What a body makes is known to its own piece alone."""
        body.scopes.append(self._own[id(body)])
        yield
        body.scopes.pop()

    def _results(self) -> None:
        region = self.region
        wanted = self._missing(output.value for output in region.outputs)
        for number in sorted(wanted, key=self._rank.__getitem__):
            if region.depends[number] & self._inner:
                for body in self._pieces:
                    with self._piece(body):
                        body._make(number)
            elif region.exprs[number].op == "reduce":
                self._assign(number, self._of_both(number))
            else:
                self._make(number)
        for output, access in zip(region.outputs, self.step.stores, strict=True):
            along = region.depends[output.value] & self._inner
            for body in self._pieces if along else (self,):
                with self._piece(body):
                    body._store(access, body.text(output.value))

    def _of_both(self, number: int) -> str:
        """A reduction along the row."""
        expr = self.region.exprs[number]
        parts: list[str] = []
        for body in self._pieces:
            with self._piece(body):
                parts.append(body._reduce(expr, body._masked(expr, body.text(expr.args[0]))))
        return self._combined(expr, *parts)
