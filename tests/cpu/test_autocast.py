"""CUDA's autocast on a CPU: the operands that are cast, and the dtypes of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fusion_advisor.frontend.autocast import Casts
from fusion_advisor.frontend.eager_trace import autocast_of

WIDE, NARROW = torch.float32, torch.bfloat16

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a product": lambda x, w: x @ w,
    "a product of two dtypes": lambda x, w: torch.bmm(
        x.unsqueeze(0).bfloat16(), w.unsqueeze(0)
    ),
    "a sum of products": lambda x, w: torch.einsum("ij,jk->ki", x, w),
    "a layer with a bias": lambda x, w: F.linear(x, w, w.sum(0)),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(1, 2, 4, 8), w.view(1, 2, 4, 8), w.view(1, 2, 4, 8)
    ),
    "told a dtype": lambda x, w: x.bfloat16().softmax(-1),
    "told another dtype": lambda x, w: x.bfloat16().softmax(-1, torch.float16),
    "another overload": lambda x, w: F.pairwise_distance(x.bfloat16(), w.bfloat16()),
    "a norm": lambda x, w: F.layer_norm(x.bfloat16(), (8,), w.sum(0), w.sum(1)),
    "wide functions": lambda x, w: (x.bfloat16().exp(), x.bfloat16().pow(2), x.bfloat16().sum()),
    "a loss within": lambda x, w: F.cross_entropy(x.bfloat16(), torch.zeros(8, dtype=torch.long)),
    "the widest of several": lambda x, w: (torch.cat((x.bfloat16(), w)), torch.addcmul(x, w, x)),
    "what autocast does not know": lambda x, w: (x + w.bfloat16(), x.bfloat16().tanh()),
    "what a CPU casts alone": lambda x, w: (
        F.avg_pool3d(x.bfloat16().view(1, 4, 4, 4), 1),
        x.bfloat16().trace(),
    ),
}  # fmt: skip


def dtypes(call: Callable[[Tensor, Tensor], Any], device: str) -> list[torch.dtype]:
    with FakeTensorMode(), autocast_of(device, NARROW), torch.device(device, 0):
        found = call(torch.empty(8, 8), torch.empty(8, 8))
    return [tensor.dtype for tensor in pytree.tree_leaves(found)]


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_dtypes_of_cudas_autocast(name: str) -> None:
    with Casts().on_cpu():
        assert dtypes(CALLS[name], "cpu") == dtypes(CALLS[name], "cuda")


def test_a_cpu_has_its_own_autocast_again() -> None:
    own = dtypes(CALLS["told a dtype"], "cpu")
    with Casts().on_cpu():
        assert dtypes(CALLS["told a dtype"], "cpu") == [WIDE]
    assert dtypes(CALLS["told a dtype"], "cpu") == own == [NARROW]


def test_a_parameter_is_cast_once_until_autocast_is_left() -> None:
    casts = Casts()
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    with casts.on_cpu():
        with casts.block(NARROW, enabled=True):
            first = F.linear(x, weight)
            kept = [id(cast) for _, cast in casts.kept.values()]
            assert len(kept) == 1
            second = F.linear(first, weight)
            assert [id(cast) for _, cast in casts.kept.values()] == kept, "for its second use, too"
            with casts.afresh():
                F.linear(x, weight)
                assert [id(cast) for _, cast in casts.kept.values()] != kept
            F.linear(x, weight.detach().requires_grad_(False))
            assert [id(cast) for _, cast in casts.kept.values()] == kept, (
                "what is not trained is not kept"
            )
            with casts.block(NARROW, enabled=False):
                assert F.linear(x, weight).dtype == WIDE
        assert not casts.kept
        assert F.linear(x, weight).dtype == WIDE
    (gradient,) = torch.autograd.grad(second.sum(), weight)
    assert (first.dtype, gradient.dtype) == (NARROW, WIDE)
