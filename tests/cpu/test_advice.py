"""Advice that is no fusion, on models as they are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusion_advisor.advice.run import advise
from fusion_advisor.cost.annotate import annotate
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook

ROWS = 256


class Of(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(ROWS, ROWS))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self, *args)


def captured(function: Callable[..., Any], *args: torch.Tensor) -> Graph:
    most = load_rulebook().capture.mask_elements.count
    return capture_module(Of(function), args, scenario=Scenario(), mask_elements=most)


def advice(graph: Graph, rulebook: Any = None) -> dict[str, Any]:
    """By code; the last of each."""
    rulebook = rulebook or load_rulebook()
    flow = dataflow(graph, rulebook.device("h200"))
    return {found.code: found for found in advise(flow, (), False, rulebook)}


def heads(dtype: torch.dtype = torch.bfloat16, count: int = 8) -> torch.Tensor:
    return torch.zeros(2, count, ROWS, 64, dtype=dtype)


def attending(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention under a mask that forward makes."""

    def forward(model: nn.Module, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(q))

    return forward


def ones(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[0], 1, ROWS, ROWS, dtype=torch.bool, device=q.device)


def zeros(q: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ROWS, ROWS, dtype=q.dtype, device=q.device)


def lower(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).tril()


def arranged(q: torch.Tensor) -> torch.Tensor:
    places = torch.arange(ROWS, device=q.device)
    return (places[None] <= places[:, None])[None, None]


def added(q: torch.Tensor) -> torch.Tensor:
    least = torch.finfo(q.dtype).min
    return torch.full((ROWS, ROWS), least, dtype=q.dtype, device=q.device).triu(1)


def windowed(q: torch.Tensor) -> torch.Tensor:
    places = torch.arange(ROWS, device=q.device)
    return (places[None] - places[:, None]).abs() < 32


def later(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).tril(1)


def softened(q: torch.Tensor) -> torch.Tensor:
    """Numbers that hide nothing and are not zero."""
    return torch.full((ROWS, ROWS), -1.0, dtype=q.dtype, device=q.device).triu(1)


def written(q: torch.Tensor) -> torch.Tensor:
    """A mask of ones, into which a window is written."""
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device)
    mask[:, 5:].fill_(False)
    return mask


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (ones, "nothing"), (zeros, "nothing"), (lower, "causal"), (arranged, "causal"),
        (added, "causal"), (windowed, "other"), (later, "other"), (softened, "other"),
        (written, "other"),
    ],
)  # fmt: skip
def test_a_mask_of_sizes_alone_is_known(make: Callable[..., Any], says: str) -> None:
    graph = captured(attending(make), heads())
    assert [mask.says for mask in graph.masks] == [says]
    found = advice(graph)["masked-attention"]
    assert (found.saved_us is not None) == (says in ("nothing", "causal"))
    assert "made from sizes alone" in found.evidence[0]


def test_a_mask_of_an_input_is_not_known() -> None:
    def forward(model: nn.Module, q: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=keep[:, None, None, :])

    graph = captured(forward, heads(), torch.ones(2, ROWS, dtype=torch.bool))
    found = advice(graph)["masked-attention"]
    assert found.saved_us is None
    assert "it depends on" in found.evidence[0]


def test_of_all_that_a_mask_depends_on_a_few_are_named_the_inputs_first() -> None:
    def forward(model: Any, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        mask = model.weight + sum(others) > 0
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    graph = captured(forward, heads(), torch.zeros(ROWS, ROWS), torch.zeros(ROWS))
    inputs = [node.name for node in graph.nodes if node.kind == "input"][1:]
    (weight,) = (node.name for node in graph.nodes if node.kind == "parameter")
    assert graph.masks[0].why == f"it depends on {', '.join(inputs)}, {weight}"
    more = captured(forward, heads(), *(torch.zeros(ROWS) for _ in range(3)))
    inputs = [node.name for node in more.nodes if node.kind == "input"][1:]
    assert more.masks[0].why == f"it depends on {', '.join(inputs)} and others"


def test_a_mask_drawn_at_random_is_not_known() -> None:
    graph = captured(attending(lambda q: torch.rand(ROWS, ROWS, device=q.device) < 2), heads())
    assert [(mask.says, mask.why) for mask in graph.masks] == [("unknown", "it is drawn at random")]


def test_the_launches_that_make_a_mask_are_saved_with_it() -> None:
    """An attention that takes longer by a factor, and the mask's own launches."""
    rulebook = load_rulebook()
    graph = captured(attending(lower), heads())
    costs = annotate(graph, rulebook.device("h200")).costs
    times = {node.name: costs[node.name].time_us for node in graph.nodes}
    (attention,) = (node for node in graph.nodes if "attention" in node.op)
    kind = rulebook.advice_kind("masked-attention")
    making = sum(times.values()) - times[attention.name]
    saved = times[attention.name] * (1 - 1 / kind.number("causal").value) + making
    assert making > 0
    assert advice(graph)["masked-attention"].saved_us == pytest.approx(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_flash_kernel_s_dtypes_are_kept_off_it(dtype: torch.dtype) -> None:
    found = advice(captured(attending(ones), heads(dtype)))
    assert ("masked-attention" in found) == (dtype == torch.bfloat16)


def repeated(model: nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    many = k[:, :, None].expand(2, 2, 4, ROWS, 64).reshape(2, 8, ROWS, 64)
    return F.scaled_dot_product_attention(q, many, many)


def test_a_mask_is_what_it_was_when_attention_took_it() -> None:
    """It is written into afterwards, for the next attention."""

    def forward(model: nn.Module, q: torch.Tensor) -> torch.Tensor:
        mask = lower(q)
        first = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        mask.fill_(True)
        return F.scaled_dot_product_attention(first, q, q, attn_mask=mask)

    assert [mask.says for mask in captured(forward, heads()).masks] == ["causal", "nothing"]


@pytest.mark.parametrize("width", [64, 512])
def test_heads_too_wide_for_the_flash_kernel(width: int) -> None:
    q = torch.zeros(1, 2, ROWS, width, dtype=torch.bfloat16)
    assert ("masked-attention" in advice(captured(attending(ones), q))) == (width == 64)


def tiled(k: torch.Tensor) -> torch.Tensor:
    """Head i reads i % 2."""
    return k[:, None].expand(2, 4, 2, ROWS, 64).reshape(2, 8, ROWS, 64)


def along(k: torch.Tensor) -> torch.Tensor:
    """The same place for several of the sequence."""
    return k[:, :, :1].expand(2, 2, ROWS, 64).repeat(1, 4, 1, 1)


@pytest.mark.parametrize("make", [tiled, along])
def test_other_repeats_are_not_those_of_shared_heads(make: Callable[..., Any]) -> None:
    def forward(model: nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, make(k), make(k))

    assert "repeated-heads" not in advice(captured(forward, heads(), heads(count=2)))


def test_shared_keys_with_values_of_their_own() -> None:
    def forward(
        model: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        many = k[:, :, None].expand(2, 2, 4, ROWS, 64).reshape(2, 8, ROWS, 64)
        return F.scaled_dot_product_attention(q, many, v)

    found = advice(captured(forward, heads(), heads(count=2), heads()))
    assert "repeated-heads" not in found


def test_keys_repeated_for_heads_that_share_them() -> None:
    graph = captured(repeated, heads(), heads(count=2))
    found = advice(graph)
    assert "hidden-copy" not in found
    assert "each element 4 times" in found["repeated-heads"].evidence[0]


def test_shared_keys_are_repeated_by_nobody() -> None:
    def forward(model: nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    assert "repeated-heads" not in advice(captured(forward, heads(), heads(count=2)))


def written_into(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 3] = 0
    return y.sum(0)


def kept_before(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    before = y.clone()
    y.mul_(2)
    return before @ y


def returned(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


@pytest.mark.parametrize("forward", [written_into, kept_before, returned])
def test_a_copy_that_is_needed(forward: Callable[..., Any]) -> None:
    assert "hidden-copy" not in advice(captured(forward, torch.zeros(ROWS, ROWS)))


def test_a_copy_of_a_parameter_says_that_it_is_one() -> None:
    graph = captured(lambda model, x: x @ model.weight.t().contiguous(), torch.zeros(ROWS, ROWS))
    found = advice(graph)["hidden-copy"]
    assert any("a parameter: it can be stored so once" in fact for fact in found.evidence)


def test_a_parameter_that_is_converted_at_every_call() -> None:
    graph = captured(
        lambda model, x: x @ model.weight.to(torch.bfloat16),
        torch.zeros(ROWS, ROWS, dtype=torch.bfloat16),
    )
    found = advice(graph)
    assert "from float32 to bfloat16" in found["weight-cast"].message
    assert "hidden-copy" not in found


def test_a_parameter_that_is_stored_narrower_than_used() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ model.weight.double()

    graph = captured(forward, torch.zeros(ROWS, ROWS, dtype=torch.float64))
    assert "weight-cast" not in advice(graph)


def test_a_cache_that_grows_by_concatenation() -> None:
    def forward(model: nn.Module, cache: torch.Tensor, new: torch.Tensor) -> Any:
        keys = torch.cat([cache, new.relu()], dim=2)
        return keys, keys.sum()

    found = advice(captured(forward, heads(), heads()[:, :, :1]))
    assert "99.6%" in found["growing-cache"].evidence[0]


def skipped(model: nn.Module, x: torch.Tensor, new: torch.Tensor) -> Any:
    """A connection around a layer: what is appended is computed of the rest."""
    joined = torch.cat([x, x[:, :, :1].relu()], dim=2)
    return joined, joined.sum()


def padded(model: Any, x: torch.Tensor, new: torch.Tensor) -> Any:
    """A token of the model's own."""
    joined = torch.cat([x, model.weight[:1, :64].expand(2, 8, 1, 64)], dim=2)
    return joined, joined.sum()


def joined(model: nn.Module, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, new.relu()], dim=2)


@pytest.mark.parametrize("forward", [skipped, padded, joined])
def test_what_is_appended_to_no_cache(forward: Callable[..., Any]) -> None:
    inputs = heads(torch.float32), heads(torch.float32)[:, :, :1]
    assert "growing-cache" not in advice(captured(forward, *inputs))


def test_where_float64_begins() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return ((x.cos().double() + 1).sqrt() * x).float()

    found = advice(captured(forward, torch.zeros(ROWS, ROWS)))["float64"]
    assert any(fact.startswith("it begins at") and "_to_copy" in fact for fact in found.evidence)
    assert "float64" not in advice(captured(lambda _, x: x.cos(), torch.zeros(ROWS)))


def test_writing_by_a_mask_waits_for_the_gpu() -> None:
    def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        y[y > 0] = x.mean()
        return y

    def filled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        y[y > 0] = 1.0
        return y

    found = advice(captured(masked, torch.zeros(ROWS, ROWS)))["host-sync"]
    assert found.saved_us
    assert "host-sync" not in advice(captured(filled, torch.zeros(ROWS, ROWS)))


def test_results_that_nothing_reads_are_in_no_group() -> None:
    """With all that is made for them alone; what writes into a tensor that is read is none."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        (wide * 2).exp()
        return (x + 1).relu()

    def read(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide.exp_()
        y, _ = wide.max(-1, keepdim=True)
        return x - y

    given = torch.zeros(ROWS, ROWS, dtype=torch.bfloat16)
    found = advice(captured(forward, given))["unread-result"]
    assert "nothing reads what 3 operators make" in found.message
    flow = dataflow(captured(forward, given), load_rulebook().device("h200"))
    launched = [flow.fusible[i] for i in range(len(flow.nodes)) if flow.launches(i)]
    assert launched == [False, False, False, True, True]
    assert "unread-result" not in advice(captured(read, given))


def test_short_kernels_wait_for_their_launches_and_long_ones_do_not() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x.cos()
        return x

    found = advice(captured(forward, torch.zeros(ROWS)))["launch-bound"]
    assert "20 kernels" in found.evidence[1]
    assert "launch-bound" not in advice(captured(forward, torch.zeros(1 << 26)))


def test_advice_keeps_its_mark_in_a_deeper_model() -> None:
    def deep(times: int) -> Callable[..., torch.Tensor]:
        def forward(model: nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                q = repeated(model, q, k)
            return q

        return forward

    graphs = [captured(deep(times), heads(), heads(count=2)) for times in (1, 3)]
    one, three = (advice(graph)["repeated-heads"] for graph in graphs)
    assert one.mark == three.mark
    assert three.saved_us > one.saved_us
