"""Numbers of the rules, each a value with unit and source; and tables of them."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_COUNTED = (
    "share", "x", "bit", "ulp", "count", "elements", "multiprocessors", "nodes", "operators",
    "plans", "programs", "registers", "instructions", "kernels", "rows", "dimensions", "seeds",
    "sets", "stages", "threads", "warps",
)  # fmt: skip
UNITS: dict[str, float] = {
    "MHz": 1e6,
    "s": 1,
    "us": 1e-6,
    "B": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "GB": 1e9,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "Gbit/s": 1e9,
    "GFLOP/s": 1e9,
    "TFLOP/s": 1e12,
    "TOP/s": 1e12,
    "FLOP/B": 1,
    **dict.fromkeys(_COUNTED, 1),
}
"""Each unit a rule may use, in its base unit: Hz, s, B, B/s, bit/s, FLOP/s, OP/s, or itself."""

Tree = dict[str, Any]
"""Rules as TOML gives them."""


def table_of(value: Any) -> Tree | None:
    """A value that is a table; None for any other."""
    return cast(Tree, value) if isinstance(value, dict) else None


class Table(BaseModel):
    """A frozen table that accepts no unknown field."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Tree:
        expected = ", ".join(cls.model_fields)
        table = table_of(data)
        if table is None:
            raise ValueError(f"{data!r}; expected a table with {expected}")
        for key in table:
            if key not in cls.model_fields:
                raise ValueError(f"unknown field {key!r}; expected {expected}")
        return table


Text = Annotated[str, Field(min_length=1)]


class Number(Table):
    """A value with its unit and its source."""

    value: float = Field(ge=0, allow_inf_nan=False)
    unit: Text
    source: Text

    @property
    def base(self) -> float:
        """The value in the base unit: B/s of `4.8 TB/s`, s of `2.5 us`."""
        return self.value * UNITS[self.unit]

    @property
    def count(self) -> int:
        """The value in the base unit as a whole number, rounded down."""
        return int(self.base)

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


def _in(*units: str, zero: bool = False) -> AfterValidator:
    """Accept a number in one of these units, above zero unless `zero`."""

    def check(number: Number) -> Number:
        if number.unit not in units:
            raise ValueError(f"unit {number.unit!r}; expected {' or '.join(units)}")
        if not (number.value or zero):
            raise ValueError(f"{number}; expected more than 0")
        return number

    return AfterValidator(check)


def _whole(unit: str) -> AfterValidator:
    """Accept a whole number of this unit, 1 or more."""

    def check(number: Number) -> Number:
        if number.unit != unit or not number.value.is_integer() or not number.value:
            raise ValueError(f"{number}; expected a whole number of {unit}, 1 or more")
        return number

    return AfterValidator(check)


AnyNumber = Annotated[Number, _in(*UNITS, zero=True)]
Frequency = Annotated[Number, _in("MHz")]
Bytes = Annotated[Number, _in("B", "KiB", "MiB", "GiB", "GB")]
Bandwidth = Annotated[Number, _in("GB/s", "TB/s")]
DataRate = Annotated[Number, _in("Gbit/s")]
Rate = Annotated[Number, _in("GFLOP/s", "TFLOP/s", "TOP/s")]
Share = Annotated[Number, _in("share")]
Speedup = Annotated[Number, _in("x")]
Time = Annotated[Number, _in("us")]
Instruction = Annotated[Number, _in("instructions")]
Seconds = Annotated[Number, _in("s")]
Count = Annotated[Number, _whole("count")]
Bits = Annotated[Number, _whole("bit")]
Dimensions = Annotated[Number, _whole("dimensions")]
Elements = Annotated[Number, _whole("elements")]
Kernels = Annotated[Number, _whole("kernels")]
Nodes = Annotated[Number, _whole("nodes")]
Sets = Annotated[Number, _whole("sets")]
Operators = Annotated[Number, _whole("operators")]
Plans = Annotated[Number, _whole("plans")]
Programs = Annotated[Number, _whole("programs")]
Registers = Annotated[Number, _whole("registers")]
Rows = Annotated[Number, _whole("rows")]
Seeds = Annotated[Number, _whole("seeds")]
Stages = Annotated[Number, _whole("stages")]
Threads = Annotated[Number, _whole("threads")]
Ulps = Annotated[Number, _in("ulp", zero=True)]
Warps = Annotated[Number, _whole("warps")]
Multiprocessors = Annotated[Number, _whole("multiprocessors")]


def said(value: float, digits: int = 4) -> str:
    """A number as text: whole where it is a count, else four digits."""
    return str(int(value)) if value == int(value) else f"{value:.{digits}g}"


def told_apart(measured: float, limit: float) -> tuple[str, str]:
    """A number and its limit as text, with as many digits as tell them apart."""
    digits = 4
    while measured != limit and said(measured, digits) == said(limit, digits):
        digits += 1
    return said(measured, digits), said(limit, digits)
