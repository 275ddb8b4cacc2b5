"""Functions that a kernel makes together with the 1 that is added to them, and the logistic: fewer
instructions than the math library's, and as good as eager's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.schedules.online import passes
from fusion_advisor.support.worker import Worker

from .regions import LOADED, PACKED, decided, flow_of, interpreted, kernel_of
from .test_emit import Tensors, checked, x

BF16 = torch.bfloat16
SPELLED: dict[str, tuple[Callable[..., object], Tensors, list[str]]] = {
    "GELU": (lambda a: F.gelu(a) * 2, (x(40, 70),), ["one_plus_erf"]),
    "GELU in 16 bits": (lambda a: F.gelu(a) * 2, (x(40, 70, dtype=BF16),), ["one_plus_erf"]),
    "GELU as one writes it": (
        lambda a: 0.5 * a * (torch.erf(a / math.sqrt(2)) + 1), (x(40, 70),), ["one_plus_erf"],
    ),
    "GELU by tanh": (
        lambda a: F.gelu(a, approximate="tanh") * 2, (x(40, 70),), ["one_plus_tanh"],
    ),
    "GELU by tanh in 16 bits": (
        lambda a: F.gelu(a, approximate="tanh") * 2, (x(40, 70, dtype=BF16),), ["one_plus_tanh"],
    ),
    "an error function alone": (lambda a: torch.erf(a) * 2, (x(40, 70),), ["libdevice.erf"]),
    "one that is needed besides": (
        lambda a: torch.erf(a) * (1 + torch.erf(a)), (x(40, 70),), ["libdevice.erf"],
    ),
    "another number added": (lambda a: 2 + torch.tanh(a), (x(40, 70),), ["libdevice.tanh"]),
    "float64": (
        lambda a: F.gelu(a) * 2, (x(40, 70, dtype=torch.float64),), [],
    ),
    "SiLU": (lambda a: F.silu(a) * 2, (x(40, 70),), ["logistic"]),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPELLED)
def test_what_is_made_together(name: str, worker: Worker) -> None:
    function, inputs, calls = SPELLED[name]
    text = kernel_of(function, *inputs).text
    body = text[text.index("def k_kernel") : text.index("def k(")]
    for call in ("one_plus_erf", "one_plus_tanh", "libdevice.erf", "libdevice.tanh", "logistic"):
        if inputs[0].dtype != torch.float64:
            assert (f"{call}(" in body) == (call in calls)
    if inputs[0].numel() < 1 << 20:
        assert checked(function, inputs, worker, PACKED) is None


SCRIPT = f"""{LOADED}
inf, nan = float("inf"), float("nan")
ends = torch.tensor([inf, -inf, nan, 3e38, -3e38, 0.0])
given = torch.cat((torch.linspace(-14, 14, 20001), ends))
got, eager = (f(given)[:] for f in (module.k, module.reference))
exact = module.reference(given.double())
off = lambda a: (a.double() - exact)[:-6].abs().max().item()
print(json.dumps([off(got), off(eager), [str(v) for v in got[-6:].tolist()],
                  [str(v) for v in eager[-6:].tolist()]]))
"""


def gelu(a: torch.Tensor) -> torch.Tensor:
    """As CUDA's; that of the CPU is NaN where it is infinite."""
    return 0.5 * a * (1 + torch.erf(a * math.sqrt(0.5)))


@pytest.mark.parametrize("function", [gelu, torch.sigmoid, F.silu])
def test_as_good_as_eagers_where_functions_are_steep_flat_or_endless(
    function: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    kernel = kernel_of(lambda a: function(a) * 1.0, x(20007))
    error, eagers, ends, expected = interpreted(kernel, SCRIPT, tmp_path)
    assert error <= 1.5 * eagers + 2**-24
    assert ends == expected


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(a, b, -1)


def expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(a, -1) * b).sum(-1)


def shares_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    share = torch.softmax(a, -1)
    return (share * b * share).sum(-1)


def half_a_cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The other operand may be of any size."""
    return (F.normalize(a, dim=-1) * b).sum(-1)


def safe_norm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    largest = a.abs().amax(-1, keepdim=True)
    return largest.squeeze(-1) * ((a / largest) ** 2).sum(-1).sqrt() * b[:, 0]


def weighted_shares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a / a.abs().sum(-1, keepdim=True) * b).sum(-1)


def kurtosis(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    centred = a - a.mean(-1, keepdim=True)
    return ((centred / (centred**2).mean(-1, keepdim=True).sqrt()) ** 4).mean(-1) * b[:, 0]


def squared_again_and_again(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    share = torch.softmax(a, -1)
    for _ in range(12):
        share = share * share
    return (share * b).sum(-1)


def rounded_shares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (torch.round(torch.softmax(a, -1) * 9) * b).sum(-1)


WALKS: dict[Callable[..., torch.Tensor], int] = {
    cosine: 1, expected: 1, shares_twice: 1,
    half_a_cosine: 2, safe_norm: 2, weighted_shares: 2, kurtosis: 2,
    squared_again_and_again: 2, rounded_shares: 2,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", WALKS)
def test_a_sum_does_not_wait_for_its_factors(
    function: Callable[..., torch.Tensor], worker: Worker
) -> None:
    """What all terms are divided by divides their sum, where they stay in range as they are."""
    inputs = x(40, 300), x(40, 300)
    expressed = decided(flow_of(function, *inputs)).subject.expressed
    assert expressed is not None
    region = expressed.region
    (row,) = {region.exprs[n].axes for n in region.all("reduce")}
    assert len(passes(region, frozenset(row))) == WALKS[function]
    assert checked(function, inputs, worker, PACKED) is None
    assert checked(function, (x(7, 9000), x(7, 9000)), worker) is None


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_a_cosine_of_small_and_of_large_rows_is_as_good_as_eagers(
    scale: float, worker: Worker
) -> None:
    def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return cosine(a * scale, b * scale)

    assert checked(scaled, (x(20, 300), x(20, 300)), worker, PACKED) is None
