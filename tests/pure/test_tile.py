"""Tile programs: their own text, and the rules that each keeps."""

from __future__ import annotations

import re

import pytest

from fusion_advisor.tile.program import (
    Across,
    Address,
    Begin,
    Binary,
    Block,
    Cast,
    Combine,
    DeviceCall,
    Do,
    Elementwise,
    For,
    Full,
    If,
    Lanes,
    Let,
    Literal,
    Load,
    Multiple,
    Name,
    ProgramId,
    Reduce,
    Scan,
    Settled,
    Store,
    Tile,
    TileFunction,
    Unary,
    Update,
    product,
    quotient,
    summed,
    walk,
    where,
)
from fusion_advisor.tile.text import Text, shown
from fusion_advisor.tile.verify import Malformed, verify

A, B, C = map(Name, "abc")
COLS = Name("COLS")


def function(*body: object, constants: tuple[str, ...] = ("COLS",)) -> TileFunction:
    arguments = ("x_ptr", "y_ptr", "rows", "cols")
    return TileFunction("norm_kernel", arguments, constants, body)  # pyright: ignore[reportArgumentType]


COL = Let(("col",), Lanes(COLS))
INSIDE = Let(("inside",), Name("col") < Name("cols"))
X = Address("x_ptr", (ProgramId(0) * Name("cols"), Name("col")))
Y = Address("y_ptr", (ProgramId(0) * Name("cols"), Name("col")))
LOADED = Let(("x",), Load(X, Name("inside"), Literal("-inf")))
STORED = Store(Y, Elementwise("exp", (Name("x"),)), Name("inside"))


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (A + B * C, "a + b * c"),
        ((A + B) * C, "(a + b) * c"),
        (A - (B - C), "a - (b - c)"),
        (A - B - C, "a - b - c"),
        (A // B % C, "a // b % c"),
        (A // (B % C), "a // (b % c)"),
        ((A < B) & (B < C), "(a < b) & (b < c)"),
        ((A < B).equals(B < C), "(a < b) == (b < c)"),
        (Unary("-", A) * B, "-a * b"),
        (Unary("-", A * B), "-(a * b)"),
        (Unary("~", A < B), "~(a < b)"),
        (A * Literal("-1"), "a * -1"),
        (Elementwise("add", (A, B)), "a + b"),
        (Elementwise("div", (A, B), "precise"), "div.precise(a, b)"),
        (Elementwise("neg", (A + B,)), "-(a + b)"),
        (where(A < B, A, B), "where(a < b, a, b)"),
        (quotient(A, B), "cdiv(a, b)"),
        (summed([A, B, C]), "a + b + c"),
        (summed([]), "0"),
        (product([]), "1"),
        (Cast(A + B, "float32"), "float32(a + b)"),
        (Across(A, 0), "a[None, :]"),
        (Across(A + B, 1), "(a + b)[:, None]"),
        (Full((), Literal("0.0"), "float32"), "float32(0.0 in ())"),
        (Full((A, COLS), Literal("0"), "int32"), "int32(0 in [a, COLS])"),
        (Reduce("sum", A, 0), "sum(a over axis 0)"),
        (Reduce("max", A, 1, kept=True), "max(a over axis 1, kept)"),
        (Reduce("argmax", A, 0, place=B), "argmax(a, b over axis 0)"),
        (Scan("sum", A, 0, reverse=True), "scan(sum, a over axis 0, backwards)"),
        (Combine("max", A, B), "max(a, b)"),
        (ProgramId(1), "program(1)"),
        (ProgramId(0, all=True), "programs(0)"),
        (Load(X, Name("inside"), Literal("0")),
         "load(x_ptr[program(0) * cols + col] where inside else 0)"),
        (Address("x_ptr", (A,), (B,)), "x_ptr[a in [b]]"),
        (DeviceCall("wide", (A, Name("FAR"))), "wide(a, FAR)"),
    ],
)  # fmt: skip
def test_text_of_a_value_has_no_more_brackets_than_it_needs(value: Tile, text: str) -> None:
    assert shown(value) == text


def test_text_of_a_function_names_what_it_takes() -> None:
    loop = For(
        "at", Literal("0"), Name("cols"), COLS, (Update("s", Combine("sum", A, B)),), stages=3
    )
    made = TileFunction("k", ("x_ptr", "cols"), ("COLS",), (
        Multiple("cols", "DIVISOR", "told to the compiler"),
        Settled("cols", "N", "compiled for it"),
        Begin("s", Literal("0.0")),
        loop,
        If(A < B, (Do(DeviceCall("copies_made", (Name("EARLY"),))),), (If(A.differs(B), (), ()),)),
        Store(Y, A),
    ))  # fmt: skip
    assert Text().function(made).splitlines() == [
        "k(x_ptr, cols; COLS):",
        "    cols = cols // DIVISOR * DIVISOR  # told to the compiler",
        "    cols = N if N else cols  # compiled for it",
        "    s := 0.0",
        "    for at in 0, cols, COLS, 3 stages:",
        "        s <- sum(a, b)",
        "    if a < b:",
        "        copies_made(EARLY)",
        "    elif a != b:",
        "    store y_ptr[program(0) * cols + col] = a",
    ]


def test_equal_programs_are_equal_records() -> None:
    assert function(COL, INSIDE, LOADED) == function(COL, INSIDE, LOADED)
    assert len({A + B, A + B, B + A}) == 2
    names = [node.id for node in walk([STORED]) if isinstance(node, Name)]
    assert names == ["cols", "col", "x", "inside"]


# --- rules ---------------------------------------------------------------------------------------


def test_a_program_that_keeps_every_rule() -> None:
    verify(function(COL, INSIDE, LOADED, STORED))


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ((COL, LOADED), "inside: used before it begins"),
        ((COL, COL), "col: begins twice"),
        ((Let(("rows",), A),), "a: used before it begins"),
        ((Let(("rows",), Literal("1")),), "rows: begins twice"),
        ((Update("rows", Literal("1")),), "rows: updated, and was not begun"),
        ((Let(("n",), Literal("1")), Update("n", Literal("2"))), "n: updated, and was not begun"),
        ((COL, INSIDE, Let(("x",), Load(X))), "load of x_ptr: no mask along COLS"),
        ((COL, INSIDE, LOADED, Store(Y, Name("x"))), "store of y_ptr: no mask along COLS"),
        ((COL, INSIDE, Store(Y, Literal("0"), Name("rows") < 3)),
         "store of y_ptr: no mask along COLS"),
        ((COL, If(Name("col") < 3, ())), "a branch hangs on what differs from lane to lane"),
        ((COL, For("at", Literal("0"), Name("col"), Literal("1"), ())),
         "at: bounds of a loop differ from lane to lane"),
        ((COL, Multiple("col", "COLS", "")), "col: told to the compiler, and is no argument"),
        ((COL, Settled("col", "COLS", "")), "col: told to the compiler, and is no argument"),
        ((Settled("rows", "N", ""),), "N: used before it begins"),
        ((If(Name("rows") < 3, (Let(("n",), Literal("1")),)), Let(("m",), Name("n"))),
         "n: used before it begins"),
        ((Let(("m",), Load(Address("z_ptr"))),), "z_ptr: used before it begins"),
    ],
)  # fmt: skip
def test_a_rule_that_is_broken_is_named(body: Block, fault: str) -> None:
    with pytest.raises(Malformed, match=f"^norm_kernel: {re.escape(fault)}$"):
        verify(function(*body))


def test_a_mask_is_not_asked_along_lanes_that_all_have_an_element() -> None:
    body = (COL, Let(("x",), Load(X)), Store(Y, Name("x")))
    verify(function(*body), ("COLS",))


@pytest.mark.parametrize("axis", [0, None])
def test_what_is_reduced_is_one_number_for_all_lanes(axis: int | None) -> None:
    """An element that an arg-max finds is loaded without a mask."""
    found = Let(("at",), Reduce("argmax", Name("x"), axis, place=Name("col")))
    verify(function(COL, INSIDE, LOADED, found, Let(("y",), Load(Address("y_ptr", (Name("at"),))))))


def test_a_column_of_results_differs_along_rows_alone() -> None:
    rows = Across(Lanes(Name("ROWS")), 1)
    tile = Let(("x",), Load(Address("x_ptr", (rows + Name("col"),)), Name("mask"), Literal("inf")))
    mask = Let(("mask",), Name("inside") & (rows < Name("rows")))
    least = Let(("at",), Reduce("min", Name("x"), 1, kept=True))
    load = Load(Address("y_ptr", (Name("at"),)))
    with pytest.raises(Malformed, match=r"no mask along ROWS$"):
        verify(
            function(COL, INSIDE, mask, tile, least, Let(("y",), load), constants=("COLS", "ROWS"))
        )


SQUARE = Name("x") * Name("x")
ROW_MASK = Let(("row_mask",), ProgramId(0) < Name("rows"))


@pytest.mark.parametrize(
    ("monoid", "value", "kept"),
    [
        ("max", Name("x"), True),  # as it was loaded
        ("max", Cast(Name("x"), "float32"), True),
        ("min", Name("x"), False),
        ("sum", SQUARE, False),
        ("sum", where(Name("inside"), SQUARE, Literal("0.0")), True),
        ("sum", where(Name("inside"), SQUARE, Literal("1.0")), False),
        ("prod", where(Name("inside"), SQUARE, Literal("1.0")), True),
        ("max", where(Name("inside"), Name("n"), Literal("-2147483648")), True),
        ("sum", where(Name("row_mask"), SQUARE, Literal("0.0")), False),  # another lane's question
        ("sum", where(Name("inside"), SQUARE, Literal("0.0")) * Name("cols"), True),
        ("sum", SQUARE + where(Name("inside"), SQUARE, Literal("0.0")), False),
    ],
)
def test_what_is_combined_is_neutral_where_lanes_are_empty(
    monoid: str, value: Tile, *, kept: bool
) -> None:
    n = Let(("n",), Name("col") * 2)
    body = (COL, INSIDE, ROW_MASK, LOADED, n, Let(("found",), Reduce(monoid, value, None)))
    verify(function(*body), ("COLS",))
    if kept:
        verify(function(*body))
        return
    with pytest.raises(Malformed, match=f"{monoid} along COLS: not neutral where lanes are empty$"):
        verify(function(*body))


@pytest.mark.parametrize(("begun", "kept"), [("0.0", True), ("1.0", False)])
def test_a_sum_for_each_lane_begins_with_nothing(begun: str, *, kept: bool) -> None:
    chunk = where(Name("inside"), Name("x"), Literal("0.0"))
    body = (
        COL, INSIDE, LOADED, Begin("sums", Full((COLS,), Literal(begun), "float32")),
        Update("sums", Combine("sum", Name("sums"), chunk)),
        Let(("found",), Reduce("sum", Name("sums"), 0)),
    )  # fmt: skip
    if kept:
        verify(function(*body))
        return
    with pytest.raises(Malformed, match="sum along COLS: not neutral"):
        verify(function(*body))


def test_what_both_sides_of_a_branch_begin_is_known_behind_it() -> None:
    one, other = ((Let(("n",), Literal(text)),) for text in "12")
    verify(function(If(Name("rows") < 3, one, other), Let(("m",), Name("n"))))


def test_what_a_condition_on_arguments_lets_begin_is_known_where_it_is_asked_again() -> None:
    asked = Name("COLS").differs(0)
    body = (If(asked, (Let(("n",), Literal("1")),)), If(asked, (Let(("m",), Name("n")),)))
    verify(function(*body))


def test_a_comparison_of_records_is_none_of_lanes() -> None:
    assert Name("a") == A
    assert A.equals(B) == Binary("==", A, B)
