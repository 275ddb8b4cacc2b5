"""The codec of frozen records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from fusion_advisor.support.codec import ROWS, from_data, from_json, row, to_data, to_json


@row
@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.5


@dataclass(frozen=True)
class Named:
    name: str


Value = Point | Named | None | bool | int | str | tuple["Value", ...]


@dataclass(frozen=True)
class Everything:
    values: tuple[Value, ...]
    points: tuple[Point | None, ...] = ()
    named: tuple[Named, ...] = field(default=(), metadata=ROWS)
    pair: tuple[str, int] = ("", 0)
    table: Mapping[str, Point] = field(default_factory=dict[str, Point])
    way: Literal["a", "b"] = "a"


WHOLE = Everything(
    (1, True, "x", None, ("y", (2, Named("n")))),
    (Point(1, math.inf), None), (Named("m"),), ("p", 3), {"k": Point(4)}, "b",
)  # fmt: skip


def test_records_survive_and_rows_are_lists() -> None:
    data = to_data(WHOLE)
    assert data == {
        "values": [1, True, "x", None, ["y", [2, {"name": "n"}]]],
        "points": [[1, math.inf], None],
        "named": [["m"]],
        "pair": ["p", 3],
        "table": {"k": [4, 0.5]},
        "way": "b",
    }
    assert from_data(Everything, data) == WHOLE
    assert from_json(Everything, to_json(WHOLE)) == WHOLE


def test_readers_take_either_form_of_a_record() -> None:
    told = {"values": [], "points": [{"x": 1, "later": 2}], "named": [{"name": "m"}], "later": 3}
    assert from_data(Everything, told) == Everything((), (Point(1),), (Named("m"),))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "Everything without values"),
        ({"values": 3}, "3 is no list"),
        ({"values": [], "points": [["x"]]}, "'x' is no int"),
        ({"values": [], "points": [[True]]}, "True is no int"),
        ({"values": [], "pair": ["p"]}, "shorter"),
        ({"values": [2.5]}, "2.5 is none of"),
        ([], "Everything without values"),
    ],
)
def test_what_is_something_else_is_an_error(data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_data(Everything, json.loads(json.dumps(data)))
