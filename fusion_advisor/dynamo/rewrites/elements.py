"""Elements of a tensor as functions of their index, read from the ATen graph that makes the tensor.

A graph that builds a mask computes with places: `arange`, comparisons, views. Here each tensor of
such a graph becomes a function from an index, which may be symbolic, to a term. A term is a whole
number as an expression of sympy, a constant, a comparison that depends on the index (`Holds`), an
element of an input (`Read`), or an operator of terms (`Composed`). Nothing is said of what is not
understood: `Unproven` is raised where an element is asked for.
"""
# torch.fx and sympy carry Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch

aten = torch.ops.aten

Index = tuple[sympy.Expr, ...]


class Unproven(Exception):
    """Raised for an element that is not a function of its index and of inputs as terms have it."""


@dataclass(frozen=True)
class Holds:
    """Truth of `value >= 0`."""

    value: sympy.Expr

    @property
    def opposite(self) -> Holds:
        return Holds(sympy.expand(-self.value - 1))


@dataclass(frozen=True)
class Read:
    """An element of an input of the graph."""

    name: str
    index: Index
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class FixedValue:
    """A number that is no whole number, or a truth value: a tensor of no dimension."""

    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Composed:
    """A pointwise operator of terms, computed by the operator itself where all of them are
    constants."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Term = sympy.Expr | Holds | Read | FixedValue | Composed


@dataclass(frozen=True)
class Elements:
    """A tensor by its elements. `sizes` may be symbolic."""

    sizes: Index
    dtype: torch.dtype
    at: Callable[[Index], Term]


def elements_of(node: torch.fx.Node, known: Mapping[str, Callable[[Index], Term]]) -> Elements:
    """Elements of a node's tensor, of a graph that `make_fx` traced; those of some inputs are
    known, by the input's name. Raises Unproven."""
    return _Reader(known).of(node)


def leaves(term: Term) -> Iterator[Holds | Read]:
    """Yield what a term depends on beyond constants."""
    seen: set[int] = set()
    todo: list[Any] = [term]
    while todo:
        one = todo.pop()
        if isinstance(one, Holds | Read):
            yield one
        elif isinstance(one, Composed) and id(one) not in seen:
            seen.add(id(one))
            todo += one.args


def evaluated(term: Term, known: Mapping[Holds | Read, torch.Tensor]) -> torch.Tensor:
    """Value of a term, a tensor of no dimension, where what it depends on has these values. Raises
    Unproven."""
    done: dict[int, torch.Tensor] = {}  # terms share their parts

    def value(term: Term) -> torch.Tensor:
        if isinstance(term, FixedValue):
            return term.value
        if isinstance(term, Holds | Read):
            return known[term]
        if isinstance(term, sympy.Integer):
            return torch.tensor(int(term))
        if not isinstance(term, Composed):
            raise Unproven(f"it has the number {term}")
        if id(term) not in done:
            given = [value(each) if isinstance(each, Term) else each for each in term.args]
            done[id(term)] = term.operator(*given, **term.kwargs)
        return done[id(term)]

    return value(term)


def size(number: Any) -> sympy.Expr:
    """A size as an expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


_SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default,
         aten.lift_fresh_copy.default, aten.lift_fresh.default)  # fmt: skip
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_FULL: dict[Any, float | None] = {
    aten.full.default: None, aten.full_like.default: None, aten.new_full.default: None,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
}  # fmt: skip
_EXACT: dict[Any, Callable[[Any, Any], sympy.Expr]] = {
    aten.add: lambda a, b: a + b, aten.sub: lambda a, b: a - b, aten.mul: lambda a, b: a * b,
    aten.rsub: lambda a, b: b - a,
}  # fmt: skip
"""Operators of whole numbers whose result is an expression again."""
_COMPARED: dict[Any, Callable[[Any, Any], sympy.Expr]] = {
    aten.ge: lambda a, b: a - b, aten.gt: lambda a, b: a - b - 1,
    aten.le: lambda a, b: b - a, aten.lt: lambda a, b: b - a - 1,
}  # fmt: skip
"""Comparisons of whole numbers, as what is not negative where they hold."""
_EQUAL: dict[Any, Any] = {aten.eq: aten.logical_and.default, aten.ne: aten.logical_or.default}
"""Equality of whole numbers, as what joins the comparisons of one with the other."""


class _Reader:
    def __init__(self, inputs: Mapping[str, Callable[[Index], Term]]) -> None:
        self._inputs = inputs
        self._known: dict[torch.fx.Node, Elements] = {}

    def of(self, node: torch.fx.Node) -> Elements:
        if node not in self._known:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                raise Unproven(f"{node.name} is no tensor")
            sizes = tuple(map(size, value.shape))
            at = _remembered(self._function(node, sizes, value))
            self._known[node] = Elements(sizes, value.dtype, at)
        return self._known[node]

    def _function(
        self, node: torch.fx.Node, sizes: Index, value: torch.Tensor
    ) -> Callable[[Index], Term]:
        if node.op == "placeholder" and node.name in self._inputs:
            return self._inputs[node.name]
        if node.op == "placeholder":
            return lambda index: Read(node.name, index, value.dtype)
        if node.op == "get_attr":
            return self._constant(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unproven(f"{node.name} is no call of an operator")
        target: Any = node.target
        args = [self._given(each) for each in node.args]
        if target in _SAME:
            return args[0].at
        if target in _FULL:
            filled = _FULL[target]
            if filled is None:
                filled = args[2 if target is aten.new_full.default else 1]
            return _filled(filled, value.dtype)
        if target is aten.scalar_tensor.default:
            return _filled(args[0], value.dtype)
        if target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
            start = args[0] if len(args) > 1 else 0
            step = args[2] if len(args) > 2 else 1
            if value.dtype.is_floating_point or _is_narrow(value.dtype):
                raise Unproven(f"{node.name} counts in {value.dtype}")
            return lambda index: size(start) + size(step) * index[0]
        if target in _VIEWS:
            return _viewed(args[0], sizes)
        if target is aten.expand.default:
            return lambda index: args[0].at(within(args[0].sizes, index))
        if target is aten._to_copy.default:
            return lambda index: _converted(args[0], index, value.dtype)
        if target is aten.copy.default:
            return lambda index: _converted(args[1], within(args[1].sizes, index), value.dtype)
        along = target in _MOVED or target in (aten.cat.default, aten.cumsum.default)
        if along and not value.dim() and target is not aten.select.int:
            raise Unproven(f"{node.name} has no dimension")
        if target in _MOVED:
            return _MOVED[target](*args)
        if target in (aten.triu.default, aten.tril.default):
            diagonal = size(args[1] if len(args) > 1 else 0)
            sign = 1 if target is aten.triu.default else -1
            none = FixedValue(torch.zeros((), dtype=value.dtype))
            return lambda index: Composed(
                aten.where.self,
                (Holds(sympy.expand(sign * (index[-1] - index[-2] - diagonal))), args[0].at(index),
                 none), {},
            )  # fmt: skip
        if target is aten.index.Tensor:
            return _gathered(args[0], args[1])
        if target is aten.cat.default:
            return _joined(args[0], args[1] if len(args) > 1 else 0)
        if target is aten.cumsum.default and value.dtype is torch.int64:
            return _counted(args[0], args[1])
        if torch.Tag.pointwise in target.tags or target is aten.masked_fill.Tensor:
            return _pointwise(target, args, node.kwargs)
        raise Unproven(f"{node.name} is made by {target}")

    def _given(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            inner = value.meta.get("val")
            return self.of(value) if isinstance(inner, torch.Tensor) else inner
        return [self._given(each) for each in value] if isinstance(value, list | tuple) else value

    def _constant(self, node: torch.fx.Node) -> Callable[[Index], Term]:
        held: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if held.numel() != 1:
            raise Unproven(f"{node.name} is a table of {held.numel()} numbers")
        return _filled(held.item(), held.dtype)


def _remembered(function: Callable[[Index], Term]) -> Callable[[Index], Term]:
    """The function, asked once for an index."""
    known: dict[Index, Term] = {}

    def at(index: Index) -> Term:
        if index not in known:
            known[index] = function(index)
        return known[index]

    return at


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether whole numbers of a dtype may wrap where places are counted."""
    if dtype.is_floating_point or dtype is torch.bool:
        return False
    return dtype.itemsize < 4 or not dtype.is_signed


_MOST = 2**31
"""Whole numbers in a formula stay below: larger ones may wrap in 32 bits, and are no places."""


def _counts(number: sympy.Expr) -> sympy.Expr:
    """The expression, where its numbers are such as places have. Raises Unproven."""
    if any(abs(each) >= _MOST for each in number.atoms(sympy.Integer)):
        raise Unproven(f"it computes with {number}, which may wrap")
    return number


def _filled(number: Any, dtype: torch.dtype) -> Callable[[Index], Term]:
    whole = not dtype.is_floating_point and dtype is not torch.bool
    if whole or isinstance(number, torch.SymInt):
        return lambda index: _counts(size(number))
    return lambda index: FixedValue(torch.tensor(number, dtype=dtype))


def within(sizes: Index, index: Index) -> Index:
    """The index into a tensor of these sizes where it is broadcast: 0 along a size of one."""
    own = index[len(index) - len(sizes) :]
    return tuple(sympy.Integer(0) if n == 1 else place for n, place in zip(sizes, own, strict=True))


def _converted(source: Elements, index: Index, dtype: torch.dtype) -> Term:
    term = source.at(index)
    if _is_narrow(dtype):
        raise Unproven(f"it is converted to {dtype}")
    whole = isinstance(term, sympy.Expr)
    if dtype == source.dtype or (whole and not dtype.is_floating_point and dtype is not torch.bool):
        return term
    return Composed(torch.Tensor.to, (term, dtype), {})


def _viewed(source: Elements, sizes: Index) -> Callable[[Index], Term]:
    """A view that puts in or takes out dimensions of one element."""
    kept = [d for d, n in enumerate(sizes) if n != 1]
    old = [d for d, n in enumerate(source.sizes) if n != 1]
    if [sizes[d] for d in kept] != [source.sizes[d] for d in old]:
        raise Unproven(f"a view of {source.sizes} as {sizes}")

    def at(index: Index) -> Term:
        place = dict(zip(old, (index[d] for d in kept), strict=True))
        return source.at(tuple(place.get(d, sympy.Integer(0)) for d in range(len(source.sizes))))

    return at


def _permuted(source: Elements, order: Sequence[int]) -> Callable[[Index], Term]:
    rank = len(source.sizes)
    place = {d % rank: number for number, d in enumerate(order)}
    return lambda index: source.at(tuple(index[place[d]] for d in range(rank)))


def _transposed(source: Elements, one: int, other: int) -> Callable[[Index], Term]:
    order = list(range(len(source.sizes)))
    order[one], order[other] = order[other], order[one]
    return _permuted(source, order)


def _sliced(
    source: Elements, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Callable[[Index], Term]:
    del end  # the sizes have it
    dim %= len(source.sizes)
    first = _from_front(source, dim, 0 if start is None else start)

    def at(index: Index) -> Term:
        return source.at((*index[:dim], first + size(step) * index[dim], *index[dim + 1 :]))

    return at


def _selected(source: Elements, dim: int, place: Any) -> Callable[[Index], Term]:
    dim %= len(source.sizes)
    here = _from_front(source, dim, place)
    return lambda index: source.at((*index[:dim], here, *index[dim:]))


def _from_front(source: Elements, dim: int, place: Any) -> sympy.Expr:
    given = size(place)
    if given.is_negative:
        given = source.sizes[dim] + given
    if not given.is_nonnegative:  # torch begins at 0 where a negative place is before it
        raise Unproven(f"a place {given} that may count from the end")
    return given


def _unsqueezed(source: Elements, dim: int) -> Callable[[Index], Term]:
    dim %= len(source.sizes) + 1
    return lambda index: source.at((*index[:dim], *index[dim + 1 :]))


def _squeezed(source: Elements, dims: Any = None) -> Callable[[Index], Term]:
    rank = len(source.sizes)
    asked = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in asked if source.sizes[d % rank] == 1}

    def at(index: Index) -> Term:
        given = iter(index)
        return source.at(tuple(sympy.Integer(0) if d in gone else next(given) for d in range(rank)))

    return at


_MOVED: dict[Any, Callable[..., Callable[[Index], Term]]] = {
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: partial(_transposed, one=-2, other=-1),
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
}


def _gathered(source: Elements, tables: Sequence[Elements | None]) -> Callable[[Index], Term]:
    """Elements at the places that tables of whole numbers have, for leading dimensions alone."""
    given = [table for table in tables if table is not None]
    if None in tables[: len(given)] or any(table.dtype is torch.bool for table in given):
        raise Unproven("places of some dimensions, not of the first ones")
    rank = max(len(table.sizes) for table in given)

    def at(index: Index) -> Term:
        places: list[sympy.Expr] = []
        for table in given:
            term = table.at(within(table.sizes, index[:rank]))
            if not isinstance(term, sympy.Expr) or not term.is_nonnegative:
                raise Unproven("places that are not known, or that count from the end")
            places.append(term)
        return source.at((*places, *index[rank:]))

    return at


def _joined(parts: Sequence[Elements], dim: int) -> Callable[[Index], Term]:
    """Tensors one behind the other, where one expression has the places of all of them: those of
    one element may stand before or behind a longer one that they continue."""
    dim %= len(parts[0].sizes)
    start: sympy.Expr = sympy.Integer(0)
    starts = [start := start + part.sizes[dim] for part in parts[:-1]]
    begun = list(zip(parts, [sympy.Integer(0), *starts], strict=True))
    long = [each for each in begun if each[0].sizes[dim] != 1]
    if len(long) != 1:
        raise Unproven(f"{len(long)} tensors of several places are joined")

    def moved(index: Index, place: sympy.Expr) -> Index:
        return (*index[:dim], place, *index[dim + 1 :])

    def at(index: Index) -> Term:
        whole, first = long[0]
        term = whole.at(moved(index, index[dim] - first))
        for part, start in begun:
            one: Any = part.at(moved(index, sympy.Integer(0)))
            there: Any = whole.at(moved(index, start - first))
            numbers = isinstance(one, sympy.Expr) and isinstance(there, sympy.Expr)
            if part is not whole and not (numbers and sympy.expand(one - there) == 0):
                raise Unproven("what is joined does not go on as it begins")
        if not isinstance(term, sympy.Expr):
            raise Unproven("what is joined is no whole number")
        return term

    return at


def _counted(source: Elements, dim: int) -> Callable[[Index], Term]:
    """Sums of all places up to each, where all of them have the same whole number."""
    dim %= len(source.sizes)

    def at(index: Index) -> Term:
        place = sympy.Symbol("place", integer=True, nonnegative=True)
        term = source.at((*index[:dim], place, *index[dim + 1 :]))
        known = {each: _settled(each) for each in leaves(term)}
        value = evaluated(term, known)
        if not torch.isfinite(value):
            raise Unproven(f"a sum of {float(value)}")
        return _counts(int(value) * (index[dim] + 1))

    return at


def _settled(leaf: Holds | Read) -> torch.Tensor:
    """Truth of a comparison of numbers. Raises Unproven for one that depends on a place."""
    if isinstance(leaf, Read) or not leaf.value.is_number:
        raise Unproven("a sum of elements that are not all the same")
    return torch.tensor(bool(leaf.value >= 0))


def _pointwise(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[Index], Term]:
    family = target.overloadpacket
    if any(isinstance(each, Elements) and _is_narrow(each.dtype) for each in args):
        raise Unproven("it computes with narrow integers")

    def at(index: Index) -> Term:
        given: list[Any] = []
        for each in args:
            if isinstance(each, Elements):
                given.append(each.at(within(each.sizes, index)))
            else:
                given.append(each)
        whole = [_whole(each) for each in given]
        if len(given) == 2 and None not in whole and not kwargs:
            if family in _EXACT:
                return _counts(sympy.expand(_EXACT[family](*whole)))
            if family in _COMPARED:
                return Holds(sympy.expand(_COMPARED[family](*whole)))
            if family in _EQUAL:
                strict = 0 if family is aten.eq else 1
                apart = sympy.expand(_EXACT[aten.sub](*whole))
                sides = (Holds(apart - strict), Holds(sympy.expand(-apart) - strict))
                return Composed(_EQUAL[family], sides, {})
        return Composed(target, tuple(given), kwargs)

    return at


def _whole(value: Any) -> sympy.Expr | None:
    """A whole number as an expression; None for any other operand."""
    if isinstance(value, sympy.Expr):
        return value
    whole = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    return size(value) if whole else None
