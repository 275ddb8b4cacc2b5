"""`apply(how="source")` on models of transformers that return a cache, called as everyone does.

`torch.export` refuses them; the plain run that is traced instead knows the modules of its nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers

import fusion_advisor
from fusion_advisor.frontend.child import capture_module

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 256,
}  # fmt: skip

apply = partial(fusion_advisor.apply, device="h200", verify=False, how="source")


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(**SMALL)
    return transformers.LlamaForCausalLM(config)


def gemma3() -> torch.nn.Module:
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=16)
    return transformers.Gemma3ForCausalLM(config)


def built(model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return model().eval()


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 128, (batch, tokens))


def test_nodes_of_a_plain_run_have_their_modules() -> None:
    graph = capture_module(built(llama), (), {"input_ids": ids(2, 32)}, breaks=False)
    assert graph.captured_by == "make_fx"
    calls = [node for node in graph.nodes if node.kind == "call"]
    named = [node.module for node in calls if node.module]
    assert len(named) > 0.9 * len(calls)
    assert {"model.layers.0.mlp", "model.layers.1.self_attn", "model.norm"} <= {*named}


@pytest.mark.filterwarnings("ignore:.*running eager instead")
@pytest.mark.parametrize(
    ("model", "least"), [(llama, 10), pytest.param(gemma3, 8, marks=pytest.mark.deep)]
)
def test_kernels_are_placed(model: Callable[[], torch.nn.Module], least: int) -> None:
    """None were where no node had a module; results at other sizes are the plain model's."""
    plain, fused = built(model), built(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*that analysis accepts")
        done = apply(
            fused, (), {"input_ids": ids(2, 32)}, device="h200", verify=False, how="source"
        )
    assert sum(done.kernels.values()) >= least, done
    assert done.share > 0.5
    for shape in [(2, 8), (3, 5), (1, 8), (2, 1)]:
        given = ids(*shape)
        with torch.no_grad():
            found, wanted = fused(input_ids=given), plain(input_ids=given)
        torch.testing.assert_close(found.logits, wanted.logits)


class Hidden(torch.nn.Module):
    """What it computes has no statement of its own: each part stands in a block of a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.exp(x) if x.dim() == 2 else x
        return x


def test_it_warns_where_most_is_not_placed() -> None:
    with pytest.warns(UserWarning, match="kernels are in 0 places and save .* cannot express"):
        done = apply(
            Hidden(), (torch.empty(4096, 4096),), device="h200", verify=False, how="source"
        )
    assert done.kernels == {}
    assert done.share == 0


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.randn(512))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by = self.by
        turned = (x @ x) * by.to(device=x.device, dtype=torch.float)
        cos = turned.cos() * 2
        sin = turned.sin() * 2
        return cos, sin


@pytest.mark.filterwarnings("ignore:.*running eager instead")
def test_a_name_whose_tensor_is_handed_on_keeps_it() -> None:
    """`by.to(...)` launches nothing: the statement binds another tensor, and `by` stays."""
    model, x = Scaled(), torch.randn(512, 512)
    wanted = model(x)
    assert apply(model, (x,)).kernels
    torch.testing.assert_close(model(x), wanted)
