"""`torch.compile(model, backend="fusion_advisor")` with Inductor, on a GPU."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusion_advisor.dynamo.backend import Outcome, fusion_advisor, last
from fusion_advisor.dynamo.rewrites.conditions import Answer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that falls back, or an analysis that fails, fails the test."""
    monkeypatch.setenv("FUSION_ADVISOR_STRICT", "1")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(model: Callable[..., Any], **how: Any) -> Any:
    return torch.compile(model, backend=fusion_advisor, **how)


def outcome() -> Outcome:
    found = last()
    assert found is not None
    return found


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def right(model: nn.Module, found: torch.Tensor, *inputs: torch.Tensor) -> None:
    """As near to float64 as eager, within a factor and an ulp of the largest value."""
    eager = model(*inputs)
    wide = copy.deepcopy(model).double()
    exact = wide(*(x.double() if x.is_floating_point() else x for x in inputs))
    own = float((eager.double() - exact).abs().max())
    ulp = float(exact.abs().max()) * torch.finfo(eager.dtype).eps
    assert found.shape == eager.shape
    assert float((found.double() - exact).abs().max()) <= 2 * own + 2 * ulp


class Attention(nn.Module):
    """Scores, softmax and mixing by hand: the softmax is where Inductor falls behind."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        scores = scores - scores.amax(-1, keepdim=True)
        weights = torch.exp(scores)
        return (weights / weights.sum(-1, keepdim=True)) @ self.value(x)


def llama(layers: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, vocab_size=1000,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaModel(config).eval().cuda().to(torch.bfloat16)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).last_hidden_state

    return Hidden()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch, length), device="cuda")


MODES = ["default", "reduce-overhead"]


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_llama(mode: str) -> None:
    """Every accepted group as a kernel, around them Inductor's; no graph breaks, in a CUDA graph
    too."""
    model = llama()
    options = {"take_all": True}
    if mode == "reduce-overhead":
        options["triton.cudagraphs"] = True
    call = compiled(model, fullgraph=True, options=options)
    for seed in range(4):  # warm-up, capture, replays
        torch.manual_seed(seed)
        x = tokens(2, 128)
        right(model, call(x).clone(), x)
    assert outcome().taken
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    if mode == "reduce-overhead":
        assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


class Padded(nn.Module):
    """Attention to what is before each place and no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 768)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        mask = (place <= place[:, None]) & kept[:, None, None, :].bool()
        heads = self.layer(x.relu()).unflatten(-1, (12, 64)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*heads.chunk(3, 1), attn_mask=mask)
        return x + mixed.transpose(1, 2).flatten(2)


@torch.no_grad()
def test_padding_is_read_while_the_gpu_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, without, and right after a call that had some, for which nothing waits."""
    rules = tmp_path / "read.toml"
    worth = 'worth = { value = 1e-12, unit = "x", source = "test" }'
    rules.write_text(f"[rewrites.needless-mask.limits]\n{worth}\n")
    chosen: list[bool] = []
    holds = Answer.holds

    def noted(answer: Answer) -> bool:
        found = holds(answer)
        chosen.extend([found] * answer.waits)
        return found

    monkeypatch.setattr(Answer, "holds", noted)
    model = Padded().cuda().to(torch.bfloat16)
    call = compiled(model, options={"rules": (str(rules),)})
    whole = torch.ones(4, 128, device="cuda", dtype=torch.int64)
    holes = whole.clone()
    holes[0, :40] = 0
    asked: list[list[bool]] = []
    for kept in (whole, holes, holes, whole, whole):
        x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
        chosen.clear()
        found = call(x, kept)
        asked.append([*chosen])
        right(model, found[1:], x[1:], kept[1:])
        torch.testing.assert_close(found, model(x, kept), rtol=0.02, atol=0.02)
    # what the call before had, and where that was no padding what this one has
    assert asked == [[True], [True, False], [False], [False], [True, True]]


class Placed(nn.Module):
    """A layer that is told where its rows begin by what counts the calls, as by a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        at = torch.arange(x.shape[0], device=x.device) + cache.seen
        return self.layer(x) * torch.cos(at * 0.1)[:, None]


@torch.no_grad()
def test_a_number_that_changes_leaves_one_cuda_graph() -> None:
    model = Placed().cuda()
    call = compiled(model, mode="reduce-overhead")
    x = torch.randn(8, 64, device="cuda")
    for seen in range(3, 9):  # a constant, a number, warm-up, capture, replays
        cache = SimpleNamespace(seen=seen)
        torch.testing.assert_close(call(x, cache), model(x, cache))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for seen in range(9, 12):
            call(x, SimpleNamespace(seen=seen))
    assert graphs() == 2
    assert sum(event.name == "cudaGraphLaunch" for event in profile.events()) == 3


@torch.no_grad()
def test_llama_at_any_size() -> None:
    model = llama()
    call = compiled(model, options={"take_all": True})
    for batch, length in ((2, 64), (3, 96), (5, 33), (4, 128)):
        x = tokens(batch, length)
        right(model, call(x), x)
    assert graphs() <= 2


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_kernel_that_wins_is_taken(mode: str) -> None:
    model = Attention().cuda().bfloat16()
    x = torch.randn(8, 4096, 256, device="cuda", dtype=torch.bfloat16)
    call = compiled(model, mode=mode)
    for _ in range(3):
        found = call(x).clone()
    assert [place.name for place in outcome().taken] == ["softmax"]
    right(model, found, x)


@pytest.mark.parametrize("take_all", [False, True])
def test_a_training_step(take_all: bool) -> None:
    model = Attention().cuda()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 64, 256, device="cuda")
    compiled(model, options={"take_all": take_all})(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert outcome().phase == "backward"
    assert bool(outcome().taken) == take_all
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_second_device_gets_its_own_launches() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    model = Attention().to("cuda:1").bfloat16()
    x = torch.randn(2, 512, 256, device="cuda:1", dtype=torch.bfloat16)
    found = compiled(model, options={"take_all": True})(x)
    assert outcome().taken
    right(model, found, x)


@torch.no_grad()
def test_a_whole_graph_is_timed_with_kernels_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are kept; a graph that is said to be slower with kernels has none, without any
    being timed."""
    monkeypatch.setenv("FUSION_ADVISOR_CACHE", str(tmp_path))
    model = Attention(1024).cuda().to(torch.bfloat16)
    x = torch.randn(8, 2048, 1024, device="cuda", dtype=torch.bfloat16)

    def kept() -> dict[Path, dict[str, Any]]:
        found = {file: json.loads(file.read_text()) for file in (tmp_path / "tuned").iterdir()}
        return {file: times for file, times in found.items() if "alone_us" in times}

    right(model, compiled(model, dynamic=False, options={"tune": "now"})(x), x)
    assert outcome().taken
    ((file, times),) = kept().items()
    assert 50 < times["ours_us"] < 0.99 * times["alone_us"] + times["spread_us"]

    file.write_text(json.dumps({**times, "ours_us": 2 * times["alone_us"]}))
    torch._dynamo.reset()
    right(model, compiled(model, dynamic=False, options={"tune": "cached"})(x), x)
    assert not outcome().taken
    assert "the graph takes" in outcome().left[0].why


def one_of_two(rank: int, folder: Path) -> None:
    """Compile in a process of a group, and say what was placed."""
    os.environ["FUSION_ADVISOR_CACHE"] = str(folder / str(rank))
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=f"file://{folder}/met"
    )

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(x.float()), -1).to(x.dtype)

    with torch.no_grad():
        x = torch.randn(4096, 7168, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(rows, options={"tune": "now"})(x), rows(x))
    places = [(each.kernel and each.kernel.text, each.why) for each in outcome().places]
    (folder / f"{rank}.json").write_text(json.dumps(places))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_processes_of_a_group_place_what_rank_0_chose(tmp_path: Path) -> None:
    """Rank 0 alone measures, and keeps what it measured."""
    torch.multiprocessing.spawn(one_of_two, (tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second != []
    assert [*(tmp_path / "0").glob("tuned/*")]
    assert not [*(tmp_path / "1").glob("tuned/*")]
