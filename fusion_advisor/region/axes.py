"""Axes: the extents over which values are indexed. Stating a region unifies and splits them."""

from __future__ import annotations

AxisList = tuple[int, ...]
Dims = tuple[AxisList, ...]


class NotExpressible(Exception):
    """Raised for a meaning that the region form cannot state; the message says which. `final`: no
    larger set of nodes can be stated either."""

    def __init__(self, why: str, *, final: bool = True) -> None:
        super().__init__(why)
        self.final = final


class Axes:
    """Union-find over axes that can also be split into factors, outermost first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, AxisList] = {}

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, axis: int) -> int:
        while self._parent[axis] != axis:
            self._parent[axis] = self._parent[self._parent[axis]]
            axis = self._parent[axis]
        return axis

    def resolve(self, axes: AxisList) -> AxisList:
        """The unsplit representatives that stand for these axes, outermost first."""
        found: list[int] = []
        for axis in axes:
            representative = self.root(axis)
            if representative in self._parts:
                found.extend(self.resolve(self._parts[representative]))
            else:
                found.append(representative)
        return tuple(found)

    def size(self, axes: AxisList) -> int:
        total = 1
        for axis in axes:
            total *= self.sizes[axis]
        return total

    def split(self, axis: int, outer: int) -> AxisList:
        """Split an unsplit representative into `outer` × the rest."""
        size = self.sizes[axis]
        if size % outer:
            raise NotExpressible(f"a reshape that cuts a dimension of {size} at {outer}")
        parts = (self.new(outer), self.new(size // outer))
        self._parts[axis] = parts
        return parts

    def unify(self, left: AxisList, right: AxisList) -> None:
        """Make two factorisations of the same extent one; NotExpressible if they do not nest."""
        one, other = list(self.resolve(left)), list(self.resolve(right))
        while one and other:
            a, b = one.pop(0), other.pop(0)
            if a == b:
                continue
            if self.sizes[a] == self.sizes[b]:
                self._parent[b] = a
            elif self.sizes[a] > self.sizes[b]:
                head, tail = self.split(a, self.sizes[b])
                self._parent[b] = head
                one.insert(0, tail)
            else:
                head, tail = self.split(b, self.sizes[a])
                self._parent[a] = head
                other.insert(0, tail)
        if one or other:
            raise NotExpressible("dimensions whose sizes do not match")
