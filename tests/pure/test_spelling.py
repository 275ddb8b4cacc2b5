"""Lines of generated files, broken where they are too long."""

from __future__ import annotations

import ast
from typing import get_args

import pytest

from fusion_advisor.codegen.spelling import WIDTH, Parts, fitted

LONG = "modules_embeddings_parameters_weight" * 3


@pytest.mark.parametrize("parts", get_args(Parts))
@pytest.mark.parametrize(
    "line",
    [
        f"taken(({LONG}_strides[0], 1, x[1]), 'in [0')",
        f"steps = [launch(f, ({LONG}[0],), ({LONG}, y))]",
        f"y = x + {LONG}[0] * (a - {LONG})",
    ],
)
def test_a_broken_line_means_the_same(line: str, parts: Parts) -> None:
    lines = fitted(line, parts=parts)
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(line))
    assert all(len(each) <= WIDTH or LONG in each for each in lines)
