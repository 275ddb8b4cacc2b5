"""Expressions by themselves."""

from __future__ import annotations

import pytest

from fusion_advisor.exprs import INDEX, Expr


@pytest.mark.parametrize(
    ("dtype", "literal", "number"),
    [("bool", "False", 0), ("bool", "True", 1), (INDEX, "0", 0), ("int64", "-7", -7)],
)
def test_a_constant_has_its_number(dtype: str, literal: str, number: int) -> None:
    assert Expr("const", (), dtype, literal=literal).number == number


def test_what_is_no_integer_has_none() -> None:
    assert Expr("const", (), "float32", literal="1.0").number is None
    assert Expr("place", (), INDEX, axes=(0,)).number is None
