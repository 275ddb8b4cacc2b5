"""The name and the route of a group follow from what it computes, however it is spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.fusion.findings import Finding, Identified, fuse
from fusion_advisor.fusion.route import action
from fusion_advisor.rulebook.load import load_rulebook

ROWS, COLUMNS = 1024, 4096


def findings(function: Callable[..., Any], *inputs: torch.Tensor) -> Identified:
    """What is found in a function of some inputs, on the H200."""

    class Model(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return function(*inputs)

    rulebook = load_rulebook()
    flow = dataflow(capture_module(Model(), inputs), rulebook.device("h200"))
    return fuse(flow, rulebook)


def full(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=dtype, device="meta")


def vector(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(COLUMNS, dtype=dtype, device="meta")


def softmax(x: Any) -> Any:
    e = torch.exp(x - x.max(dim=1)[0][:, None])
    return e / e.sum(dim=1)[:, None]


def scaled_softmax(x: Any) -> Any:
    return softmax(x * 0.125)


def shifted_exp(x: Any) -> Any:
    z = torch.exp(x) + 1.0
    return z / z.sum(-1, keepdim=True)


def layer_norm(x: Any, g: Any, b: Any) -> Any:
    mu = x.mean(-1, keepdim=True)
    c = x - mu
    v = (c * c).mean(-1, keepdim=True)
    return c * torch.rsqrt(v + 1e-5) * g + b


def rms_norm(h: Any, g: Any) -> Any:
    v = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(v + 1e-6) * g


def llama_norm(x: Any, g: Any) -> Any:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return g * h.to(x.dtype)


def residual_norm(x: Any, r: Any, g: Any) -> Any:
    h = x + r
    return rms_norm(h, g)


def native_residual_norm(x: Any, r: Any, g: Any) -> Any:
    y = functional.rms_norm(x + r, (COLUMNS,), g, 1e-6)
    return y * torch.sigmoid(y)


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def almost_gelu(x: Any) -> Any:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x * x * x)))


def swiglu(a: Any, b: Any) -> Any:
    return functional.silu(a) * b


def spelled_swiglu(a: Any, b: Any) -> Any:
    return a * torch.sigmoid(a) * b


def cosines(x: Any) -> Any:
    return x.cos().cos()


CASES: list[tuple[Callable[..., Any], str, str, str]] = [
    (softmax, "softmax", "framework", "softmax(x, dim=-1)"),
    (scaled_softmax, "softmax", "triton", ""),
    (shifted_exp, "reduction-pointwise", "triton", ""),
    (layer_norm, "layer-norm", "framework", "layer_norm(x, (x.shape[-1],), weight, bias, 1e-05)"),
    (rms_norm, "rms-norm", "framework", "rms_norm(x, (x.shape[-1],), weight, 1e-06)"),
    (residual_norm, "residual-norm", "triton", ""),
    (native_residual_norm, "residual-norm", "triton", ""),
    (gelu_tanh, "gelu-tanh", "framework", 'gelu(x, approximate="tanh")'),
    (almost_gelu, "pointwise-chain", "triton", ""),
    (swiglu, "swiglu", "inductor", "torch.compile"),
    (spelled_swiglu, "swiglu", "inductor", "torch.compile"),
    (cosines, "pointwise-chain", "inductor", "torch.compile"),
]


def inputs_of(function: Callable[..., Any]) -> list[torch.Tensor]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    vectors = {"g"} | ({"b"} if function is layer_norm else set())
    return [vector() if name in vectors else full() for name in names]


def only(found: Identified) -> Finding:
    assert len(found.groups) == 1, [f.pattern for f in found.groups]
    return found.groups[0]


@pytest.mark.parametrize(
    ("function", "pattern", "route", "code"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_name_and_route(function: Callable[..., Any], pattern: str, route: str, code: str) -> None:
    finding = only(findings(function, *inputs_of(function)))
    advice = action(finding, load_rulebook())
    assert (finding.pattern, advice.route) == (pattern, route)
    assert code in advice.code


def test_a_norm_that_converts_around_itself_is_still_the_framework_s() -> None:
    bfloat16 = torch.bfloat16
    finding = only(findings(llama_norm, full(bfloat16), vector(bfloat16)))
    assert finding.framework == "torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-05)"


def by_hand(h: Any) -> Any:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def planes(x: Any) -> Any:
    h = x.view(8, -1, COLUMNS)
    return h * torch.rsqrt(h.pow(2).mean((1, 2), keepdim=True) + 1e-6)


def transposed(x: Any) -> Any:
    x = x[:, :ROWS]
    return (functional.softmax(x + 0.0, -1)).t().contiguous()


ALMOST: dict[str, Callable[..., Any]] = {
    "clamped rms norm": lambda x: by_hand(x.clamp(max=10.0)),
    "clipped rms norm": lambda x: by_hand(x.clamp(-10.0, 10.0)),
    "scaled rms norm": lambda x: by_hand(x * -0.5),
    "clamped softmax": lambda x: softmax(x.clamp(max=10.0)),
    "a clamp of what is normal": lambda x: by_hand(x).clamp(max=30.0),
    "hardtanh before a layer norm": (
        lambda x: functional.layer_norm(functional.hardtanh(x), (COLUMNS,))
    ),
    "whole numbers": lambda x: by_hand(x.int().float()),
    "8 bits": lambda x: by_hand(x.to(torch.float8_e4m3fn).float()),
    "roots of squares": lambda x: softmax((x * x).sqrt()),
    "flipped": lambda x: softmax(x.flip(-1)),
    "rolled": lambda x: by_hand(x.roll(1, -1)),
    "rows of two dimensions": planes,
    "transposed": transposed,
    "another cube": lambda x: 0.5 * x * (1.0 + torch.tanh(0.797 * (x + 0.0447 * x * x * x.abs()))),
    "a count that is written out": (
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 4095 + 1e-6)
    ),
}  # fmt: skip
"""Equal to a PyTorch op on many rows, and not on all."""


@pytest.mark.parametrize("function", ALMOST.values(), ids=ALMOST)
def test_what_only_looks_like_the_framework_s_op_is_not_sent_there(
    function: Callable[..., Any],
) -> None:
    groups = findings(function, full()).groups
    assert groups
    assert [finding.framework for finding in groups] == [""] * len(groups)


def test_softmax_along_another_dimension_names_it() -> None:
    def first(x: Any) -> Any:
        e = torch.exp(x - x.amax(0, keepdim=True))
        return e / e.sum(0, keepdim=True)

    found = findings(first, full())
    assert all("dim=0" in f.framework for f in found.groups if f.pattern == "softmax")


def test_a_fingerprint_survives_renaming_and_repetition() -> None:
    def once(x: Any) -> Any:
        return gelu_tanh(x)

    def twice(first: Any, other: Any) -> Any:
        return gelu_tanh(first), gelu_tanh(other)

    single, double = only(findings(once, full())), only(findings(twice, full(), full()))
    assert single.fingerprint == double.fingerprint
    assert (len(single.instances), len(double.instances)) == (1, 2)


def test_a_fingerprint_depends_on_shape_dtype_and_constants() -> None:
    marks = {
        only(findings(gelu_tanh, full())).fingerprint,
        only(findings(gelu_tanh, full(torch.bfloat16))).fingerprint,
        only(findings(gelu_tanh, full().t())).fingerprint,
        only(findings(almost_gelu, full())).fingerprint,
    }
    assert len(marks) == 4
