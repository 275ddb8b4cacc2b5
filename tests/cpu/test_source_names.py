"""Names in kernels are those of the user's source; a kernel is named for what it computes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.verify.check_child import canonical_reference

from .regions import H200, PACKED, decided, flow_of, group_of, kernel_of
from .test_idiom import findings, only

Function = Callable[..., Any]


def x() -> torch.Tensor:
    return torch.empty(64, 128)


def made(function: Function, *inputs: torch.Tensor) -> list[str]:
    """Names in the reference of a function's kernel, line by line."""
    return lines_of(kernel_of(function, *inputs).yardstick)


def lines_of(reference: str) -> list[str]:
    return re.findall(r"^ {4}(\w+) = (?!\w+\.shape)", reference, re.MULTILINE)


def assigned(q: Any, k: Any) -> Any:
    logits = q * k
    logits += 1  # fmt: skip
    gate, bias = torch.sigmoid(logits), torch.tanh(logits)
    halves: Any = torch.exp(gate) - bias
    return halves * 2


def parted(h: Any) -> Any:
    h = torch.exp(h)
    left, right = h.chunk(2, dim=-1)
    waves = left.view(64, 8, 8).sin()
    return waves, right.cos()


def _shifted(row: Any) -> Any:
    moved = row - 1
    return torch.sin(moved)


def helped(h: Any) -> Any:
    up = _shifted(h) * 2
    down = _shifted(up) * 3
    return down


def looped(h: Any) -> Any:
    for _ in range(3):
        h = torch.sin(h) + 1
    return h


def clashing(tl: Any, row: Any) -> Any:
    mask = tl * row
    row = mask + 1
    x_ptr = row.sin()
    n0 = x_ptr - row
    SHARED = n0.exp()
    return SHARED, x_ptr


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(128))
        self.act = torch.nn.SiLU()

    def forward(self, h: Any) -> Any:
        scaled = h * self.scale
        return self.act(scaled) + h


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, h: Any) -> Any:
        for layer in self.layers:
            h = layer(h)
        return h


@pytest.mark.parametrize(
    ("function", "count", "names"),
    [
        (assigned, 2, ["logits", "logits_1", "gate", "bias", "exp", "halves", "assigned"]),
        (parted, 1, ["h", "split", "left", "waves", "cos"]),
        (helped, 1, ["moved", "shifted", "up", "moved_1", "shifted_1", "down"]),
        (looped, 1, ["sin", "h", "sin_1", "h_1", "sin_2", "h_2"]),
        (Layers(), 1, ["scaled", "act", "add", "scaled_1", "act_1", "add_1"]),
    ],
    ids=["assignments", "tuple", "helper", "loop", "layers"],
)  # fmt: skip
def test_values_have_the_names_of_the_source(
    function: Function, count: int, names: list[str]
) -> None:
    assert made(function, *[x()] * count) == names


def test_inputs_have_the_names_of_the_source_and_parameters_no_layer() -> None:
    assert kernel_of(Layers(), x()).inputs == ("h", "scale", "scale_1")


def test_names_hide_nothing_of_the_file() -> None:
    flow, decision, name, rules = group_of(clashing, x(), x())
    text = emit(flow, decision, name, rules).text
    kernel = next(f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef))
    arguments = [argument.arg for argument in kernel.args.args]
    assert len({*arguments}) == len(arguments)
    assigned = [n.id for n in ast.walk(kernel) if isinstance(n, ast.Name) and _stored(n)]
    assert len({*assigned}) == len(assigned)  # one value each
    assert not {*assigned} & {*arguments, "tl", "row", "SHARED", "n0", "x_ptr"}


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def test_a_graph_whose_source_is_missing_has_short_names_of_ops() -> None:
    flow = flow_of(assigned, x(), x())
    gone = dataflow(flow.annotated.graph.naming(lambda file: f"{file}.gone"), H200)
    assert not gone.source_names
    text = emit(gone, decided(gone), "k", PACKED).yardstick
    assert lines_of(text) == ["mul", "add", "sigmoid", "tanh", "exp", "sub", "mul_1"]
    nodes = tuple(replace(node, source=None) for node in flow.nodes)
    bare = dataflow(replace(flow.annotated.graph, nodes=nodes), H200)
    assert emit(bare, decided(bare), "k", PACKED).yardstick == text


@pytest.mark.parametrize(
    ("function", "count", "name"),
    [
        (lambda a, b: functional.rms_norm(functional.mish(a + b), (128,)), 2, "add_mish_rms_norm"),
        (lambda a, b: functional.cosine_similarity(a * 2, b, -1), 2, "mul_cosine_similarity"),
        (lambda a: functional.normalize(a.exp(), dim=-1), 1, "exp_l2_norm"),
        (lambda a: functional.log_softmax((a * 2).masked_fill(a > 0, 1), -1), 1,
         "mul_gt_masked_fill_log_softmax"),
        (lambda a: torch.sign(a).relu().mean(-1), 1, "sign_relu_mean"),
        (lambda a: a.abs().abs(), 1, "repeated_abs"),
        (lambda a: (((a * 2 + 1).sin() - 3).exp() / 5).tanh().cos(), 1, "sin_exp_tanh_cos"),
    ],
)  # fmt: skip
def test_a_kernel_is_named_for_what_it_computes(function: Function, count: int, name: str) -> None:
    large = [torch.empty(4096, 8, 128) for _ in range(count)]
    assert only(findings(function, *large)).name == name


def test_a_file_that_was_written_under_other_names_is_still_checked() -> None:
    """The source may be gone, or edited, when a report's kernels are checked again."""
    kernel = kernel_of(assigned, x(), x())
    renamed = kernel.yardstick.replace("gate", "other")
    assert canonical_reference(renamed) == canonical_reference(kernel.yardstick)
    assert canonical_reference(
        renamed.replace("sigmoid.default", "tanh.default")
    ) != canonical_reference(kernel.yardstick)
    swapped = renamed.replace("sub.Tensor(exp, bias)", "sub.Tensor(bias, exp)")
    assert swapped != renamed
    assert canonical_reference(swapped) != canonical_reference(kernel.yardstick)
