"""Expressions by themselves."""

from __future__ import annotations

import pytest

from fusion_advisor.region.exprs import INDEX, Expr, Pool


@pytest.mark.parametrize(
    ("dtype", "literal", "number"),
    [("bool", "False", 0), ("bool", "True", 1), (INDEX, "0", 0), ("int64", "-7", -7)],
)
def test_a_constant_has_its_number(dtype: str, literal: str, number: int) -> None:
    assert Expr("const", (), dtype, literal=literal).number == number


def test_what_is_no_integer_has_none() -> None:
    assert Expr("const", (), "float32", literal="1.0").number is None
    assert Expr("place", (), INDEX, axes=(0,)).number is None


def test_a_quotient_and_its_remainder_are_the_whole() -> None:
    pool = Pool(sizes={0: 24})
    where, divisor, other = pool.place((0,)), pool.whole(12), pool.whole(6)

    def split(by: int, times: int, rest: int) -> int:
        scaled = pool.reckon("mul", pool.reckon("floordiv", where, by), times)
        return pool.reckon("add", scaled, pool.reckon("mod", where, rest))

    assert split(divisor, divisor, divisor) == where
    for wrong in ((divisor, other, divisor), (divisor, divisor, other), (other, divisor, divisor)):
        assert pool.exprs[split(*wrong)].op == "add"
