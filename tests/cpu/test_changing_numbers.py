"""Numbers that change from call to call, left out of what a CUDA graph is recorded of."""
# Dynamo's graphs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fusion_advisor.dynamo import backend
from fusion_advisor.dynamo.backend import Outcome
from fusion_advisor.dynamo.numbers import NumbersOutside, numbers_outside

pytestmark = pytest.mark.usefixtures("compiled_anew")

Step = Callable[["Cache", torch.Tensor], Any]
WINDOW = 8


class Cache:
    """What a model keeps between calls: how many there were, and a window of what they brought."""

    def __init__(self) -> None:
        self.seen, self.others = 3, 5
        self.kept = torch.zeros(WINDOW, 4)
        self.length = torch.tensor(3)


def called(step: Step, calls: int = 6) -> list[NumbersOutside | None]:
    """What stays outside of each graph of a step that is called some times; each call gives and
    leaves what the step does as it is written, and the graph runs without the numbers."""
    found: list[NumbersOutside | None] = []

    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(outside := numbers_outside(module, inputs))
        if outside is None:
            return module.forward

        def run(*given: Any) -> Any:
            assert not any(isinstance(each, int) for each in given)
            return outside.module(*given)

        assert not any(isinstance(each, torch.SymInt) for each in outside.inputs)
        return outside.around(run)

    ours, theirs = Cache(), Cache()
    compiled = torch.compile(step, backend=seen)
    with torch.no_grad():
        for _ in range(calls):
            x = torch.randn(4)
            torch.testing.assert_close(compiled(ours, x.clone()), step(theirs, x.clone()))
            assert vars(ours).keys() == vars(theirs).keys()
            torch.testing.assert_close([*vars(ours).values()], [*vars(theirs).values()])
    return found


def counted(cache: Cache, x: torch.Tensor) -> Any:
    at = torch.arange(4) + cache.seen
    cache.seen += 1
    return torch.cos(at * 0.1) * x, at > cache.seen


def written_as_it_is_counted(cache: Cache, x: torch.Tensor) -> Any:
    cache.kept.index_copy_(0, torch.arange(1) + cache.seen % WINDOW, x[None])
    cache.length.add_(cache.seen - cache.others)
    cache.seen += 1
    return cache.kept.sum(0), cache.seen


def a_range(cache: Cache, x: torch.Tensor) -> Any:
    at = torch.arange(cache.seen, cache.seen + 4, dtype=torch.int32)
    cache.seen += 4
    return at, at * x


def two(cache: Cache, x: torch.Tensor) -> Any:
    apart = (torch.arange(4) - cache.seen) * cache.others
    cache.seen, cache.others = cache.seen + 1, cache.others + 2
    return apart + max(cache.seen, cache.others), x


def only_counted(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen += 2
    return x * 2


@pytest.mark.parametrize("step", [counted, written_as_it_is_counted, a_range, two, only_counted])
def test_a_number_that_changes_stays_outside(step: Step) -> None:
    first, *others = called(step)
    assert first is None  # Dynamo takes a number for a constant until it changes
    assert others
    assert all(each is not None and each.taken for each in others)


def test_calls_within_inference_mode_and_without_share_a_tensor() -> None:
    (outside,) = [each for each in called(counted, calls=3) if each is not None]
    run = outside.around(outside.module)
    x = torch.randn(4)

    def found(seen: int) -> list[Any]:
        given: list[Any] = [seen, seen]
        given[outside.graph_reads[0]] = x
        return [each for each in run(*given) if isinstance(each, torch.Tensor)]

    def wanted(seen: int) -> list[torch.Tensor]:
        cache = Cache()
        cache.seen = seen
        return list(counted(cache, x))

    with torch.inference_mode():
        torch.testing.assert_close(found(3), wanted(3))
    torch.testing.assert_close(found(4), wanted(4))


def until_it_is_full(cache: Cache, x: torch.Tensor) -> Any:
    lost: int = torch.sym_max(cache.seen - WINDOW + 1, 0)  # pyright: ignore[reportAssignmentType]
    at = torch.arange(4) + cache.seen
    cache.seen += 1
    return torch.nn.functional.pad(x, [0, lost]) + lost if cache.seen <= WINDOW else x - at


def test_a_number_that_the_guards_know_is_put_in() -> None:
    _, growing, full = called(until_it_is_full, calls=9)
    assert growing is not None
    assert full is not None
    assert not any(
        "pad" in str(n.target) and n.all_input_nodes[1:] for n in growing.module.graph.nodes
    )


def a_size(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen += 1
    return x.expand(cache.seen, 4)


def a_slice(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen = cache.seen % 6 + 1
    return cache.kept[: cache.seen] + x


def an_index(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen = cache.seen % 6 + 1
    return cache.kept[cache.seen] + x


def with_floats(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen += 1
    return x.to(torch.float16) * cache.seen


def a_long_range(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen += 1
    return torch.arange(cache.seen) + 1, x


def another_dtype(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen += 1
    return torch.tensor(3, dtype=torch.int32) + cache.seen, x


def filled(cache: Cache, x: torch.Tensor) -> Any:
    cache.seen += 1
    return torch.full((4,), cache.seen), x


@pytest.mark.parametrize(
    "step", [a_size, a_slice, an_index, with_floats, a_long_range, another_dtype, filled]
)
def test_what_has_to_know_a_number_keeps_it(step: Step) -> None:
    assert not any(called(step))


def test_what_keeps_a_number_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fusion_advisor"):
        called(with_floats)
    assert any(
        "a CUDA graph has one value of" in said and "mul" in said for said in caplog.messages
    )


def test_a_window_of_transformers_fills_up() -> None:
    """Its length is a number; it is a constant once, grows, and stays as long as the window."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.MistralConfig(**sizes, **heads, sliding_window=6)
    model = transformers.MistralForCausalLM(config).eval()
    caches = [transformers.StaticCache(config=config, max_cache_len=32) for _ in range(2)]
    found: list[NumbersOutside] = []

    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if (outside := numbers_outside(module, inputs)) is None:
            return module.forward
        found.append(outside)
        return outside.around(outside.module)

    step = torch.compile(model, backend=seen)
    with torch.no_grad():
        for tokens in (3, *[1] * 7):
            ids = torch.randint(0, 50, (2, tokens))
            call = model if tokens > 1 else step
            ours, theirs = (
                f(ids, past_key_values=c) for f, c in zip((call, model), caches, strict=True)
            )
            torch.testing.assert_close(ours.logits, theirs.logits)
    growing, full = found
    for outside in (growing, full):
        assert len(outside.taken) == 2
        assert not any(isinstance(each, torch.SymInt) for each in outside.inputs)


@pytest.mark.parametrize("graphed", [False, True])
def test_the_backend_leaves_numbers_out_under_cuda_graphs_alone(
    graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inductor(module: torch.fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        return module.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)
    outcomes: list[Outcome] = []

    def compiled(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = {"triton.cudagraphs": graphed}
        return backend.fusion_advisor(module, inputs, options=options, on_outcome=outcomes.append)

    ours, theirs = Cache(), Cache()
    step = torch.compile(counted, backend=compiled)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4)
            torch.testing.assert_close(step(ours, x), counted(theirs, x))
    assert ours.seen == theirs.seen
    named = [[each.name for each in outcome.rewrites] for outcome in outcomes]
    assert named == [[], ["changing-number"] * graphed]
