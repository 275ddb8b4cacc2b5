"""Lines that a patch writes: calls of kernels in lines of their own, and over several lines."""

from __future__ import annotations

from textwrap import dedent, indent

import libcst as cst
import pytest

from fusion_advisor.sourcepatch.editing.splice import WIDTH, KernelCalls, narrowed


def apart(line: str, *taken: str) -> list[str]:
    """A statement as the lines that a patch writes for it."""
    statement = cst.parse_statement(line)
    assert isinstance(statement, cst.SimpleStatementLine)
    made = KernelCalls("fused_m", {*taken}).apart(statement)
    return [cst.Module([each]).code.rstrip() for each in made]


def test_a_call_that_another_takes_has_a_line_and_a_name() -> None:
    line = "return fused_m.swiglu_or_eager(x, self.mlp(fused_m.rms_norm_or_eager_2(x, self.w)))"
    assert apart(line) == [
        "rms_norm = fused_m.rms_norm_or_eager_2(x, self.w)",
        "return fused_m.swiglu_or_eager(x, self.mlp(rms_norm))",
    ]


def test_its_name_is_no_name_of_the_file() -> None:
    line = "y = fused_m.add_mul(fused_m.rms_norm(x), 'é', fused_m.rms_norm(y))"
    assert apart(line, "rms_norm") == [
        "rms_norm_2 = fused_m.rms_norm(x)",
        "rms_norm_3 = fused_m.rms_norm(y)",
        "y = fused_m.add_mul(rms_norm_2, 'é', rms_norm_3)",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "y = fused_m.add_mul(self.drop(x), fused_m.rms_norm(x))",  # which draws first
        "y = fused_m.add_mul(fused_m.rms_norm(x) if x.dim() else x)",
        "y = fused_m.add_mul([fused_m.rms_norm(each) for each in x])",
        "y += fused_m.add_mul(fused_m.rms_norm(x))",
        "q, k = fused_m.rms_norm(q), fused_m.rms_norm(k)",
        "y = other.add_mul(fused_m.rms_norm(x))",
    ],
)
def test_what_would_be_evaluated_in_another_order_stays(line: str) -> None:
    assert apart(line) == [line]


def written(line: str, before: str = "") -> str:
    """A statement of a method as it is written over lines."""
    text = f"class A:\n    def f(self):\n{indent(line, ' ' * 8)}\n"
    made = narrowed(text, before, "fused_m")
    assert made.count("\n") == len(made.splitlines())
    return dedent(made.partition("self):\n")[2]).rstrip()


LONG = "residual_rms_norm_with_a_name_of_some_length"


def test_a_call_that_is_too_wide_is_over_lines() -> None:
    args = "self.attention(x), self.weight, self.eps"
    line = f"return fused_m.{LONG}({args})"
    assert written(line) == f"return fused_m.{LONG}(\n    {args}\n)"
    assert written(line, f"        {line}") == line, "it was there before"
    many = ", ".join(f"self.some_operand_{n}" for n in range(5))
    rows = ",\n    ".join(many.split(", "))
    assert written(f"return fused_m.{LONG}({many})") == f"return fused_m.{LONG}(\n    {rows},\n)"
    short = "return fused_m.rms_norm(x)"
    assert len(short) < WIDTH
    assert written(short) == short


def test_two_calls_side_by_side_are_in_parentheses() -> None:
    one, two = f"fused_m.{LONG}(q)", f"fused_m.{LONG}(k)"
    assert written(f"q, k = {one}, {two}") == f"q, k = (\n    {one},\n    {two},\n)"
