"""Elementwise ops with steps: a small change of an operand changes a result by none, or by a jump
that a value nearby has, too."""

STEPS = frozenset(
    (
        *("round", "floor", "ceil", "trunc", "frac", "sign", "sgn", "heaviside", "bucketize"),
        *("gt", "ge", "lt", "le", "eq", "ne", "floor_divide", "remainder", "fmod"),
        *("threshold", "hardshrink"),
    )
)
"""Their names without overload."""


def steps(op: str, *, whole: bool = True) -> bool:
    """Whether an ATen op steps: of a cast and a division that depends on whether its results are
    `whole` numbers."""
    name, _, overload = op.removeprefix("aten.").partition(".")
    name = name.rstrip("_")
    casts = name in ("_to_copy", "to") or (name == "div" and overload.endswith("mode"))
    return name in STEPS or (casts and whole)
