"""Normal forms: equal where two spellings are one function, different where they are not."""

from __future__ import annotations

import math

import pytest

from fusion_advisor.region.normal_form import (
    Form,
    equal,
    exponential,
    hyperbolic_tangent,
    logistic,
    number,
    plus,
    power,
    size,
    symbol,
    times,
    total,
)

ROW = frozenset({0})
X, Y = symbol("x", ROW), symbol("y", ROW)
M = symbol("m")
"""What does not change along the row."""


def less(one: Form, other: Form) -> Form:
    return plus(one, times(other, number(-1.0)))


def mean(x: Form) -> Form:
    return times(total(x, ROW), power(size(ROW), -1.0))


def softmax(x: Form) -> Form:
    return times(exponential(x), power(total(exponential(x), ROW), -1.0))


CENTRED = less(X, mean(X))
SAME: dict[str, tuple[Form, Form]] = {
    "a square of a sum": (
        power(plus(X, Y), 2.0), plus(times(X, X), times(Y, Y), times(number(2.0), times(X, Y))),
    ),
    "a softmax, shifted": (softmax(less(X, M)), softmax(X)),
    "a variance": (mean(times(CENTRED, CENTRED)), less(mean(times(X, X)), power(mean(X), 2.0))),
    "a division by a root": (
        times(X, power(power(plus(mean(times(X, X)), number(1e-6)), 0.5), -1.0)),
        times(X, power(plus(number(1e-6), mean(power(X, 2.0))), -0.5)),
    ),
    "a tanh as a logistic": (
        times(number(0.5), plus(number(1.0), hyperbolic_tangent(X))),
        logistic(times(number(2.0), X)),
    ),
    "a power of two": (
        exponential(times(times(X, number(1.4426950408889634)), number(math.log(2.0)))),
        exponential(X),
    ),
    "a sum of ones": (total(number(1.0), ROW), size(ROW)),
    "nothing": (less(times(X, Y), times(Y, X)), {}),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_spellings_of_one_function_have_one_form(one: Form, other: Form) -> None:
    assert equal(one, other)


DIFFERENT: dict[str, tuple[Form, Form]] = {
    "a root of a square": (power(times(X, X), 0.5), X),
    "a root of a negative": (power(times(number(-4.0), X), 0.5), times(number(2.0), power(X, 0.5))),
    "a sum of products": (total(times(X, Y), ROW), times(total(X, ROW), total(Y, ROW))),
    "a scale in a softmax": (softmax(times(number(0.5), X)), softmax(X)),
    "another constant": (plus(X, number(1e-5)), plus(X, number(1.1e-5))),
    "a count": (mean(X), times(total(X, ROW), number(1 / 5))),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_functions_have_another_form(one: Form, other: Form) -> None:
    assert not equal(one, other)
