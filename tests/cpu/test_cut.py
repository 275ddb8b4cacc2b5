"""A graph in two parts: what runs while the host waits to know whether there is padding, and what
runs behind where there is none; and the choice between it and the graph for all inputs."""
# Dynamo's graphs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.dynamo import backend, two_graphs
from fusion_advisor.dynamo.cut import TwoParts, cut
from fusion_advisor.dynamo.rewrites import rewrite
from fusion_advisor.dynamo.rewrites.attention import attentions, flops_before
from fusion_advisor.dynamo.rewrites.conditions import Answer, Ones, asked
from fusion_advisor.rulebook.load import load_rulebook
from tests.cpu.test_rewrites import always_read

pytestmark = pytest.mark.usefixtures("compiled_anew")

Model = Callable[..., Any]
WHOLE, HOLES = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
HOLES[1, 4:] = 0


def parts_of(model: Model, *given: Any, dynamic: bool = False) -> TwoParts | None:
    """Parts of the one graph of a model that is called with a padding mask; None where it stays
    whole."""
    found: list[TwoParts | None] = []

    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten = rewrite(module, inputs, always_read(), read="within")
        assert rewritten.reads
        found.append(parts := cut(rewritten))

        def run(*given: Any) -> Any:
            if parts is None:
                return module(*given)
            between = parts.before(*given)  # in vain where there is padding
            holds = asked(rewritten.conditions, given).holds()
            return parts.behind(*given, *between) if holds else module(*given)

        return run

    with torch.no_grad():
        compiled = torch.compile(model, backend=seen, dynamic=dynamic)
        for kept in (WHOLE, HOLES, WHOLE):
            ours, theirs = copies(given), copies(given)
            torch.testing.assert_close(compiled(*ours, kept), model(*theirs, kept))
            torch.testing.assert_close(ours, theirs)  # what is written is the same, too
    (parts,) = found
    return parts


def copies(given: Sequence[Any]) -> list[Any]:
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in given]


def masked(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[1], device=x.device)
    return (place <= place[:, None]) & kept[:, None, None, :].bool()


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2)


def attended(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The mask is made first, as transformers makes it."""
    mask = masked(x, kept)
    q, k, v = map(heads, (x.relu() @ weight).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return x + mixed.transpose(1, 2).flatten(2)


def twice(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return attended(attended(x, weight, kept), weight, kept)


def a_half_behind(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """One of two halves is taken behind the attention."""
    halves = x.sin().chunk(2, 0)
    made = attended(x, weight, kept)
    return made + torch.cat([halves[1], halves[1]])


def cached(
    x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Keys go into a cache before the attention, and the cache is read behind it."""
    mask = masked(x, kept)
    q, k, v = map(heads, (x @ weight).chunk(3, -1))
    cache[:, :, : x.shape[1]] = k
    mixed = F.scaled_dot_product_attention(q, cache[:, :, : x.shape[1]], v, attn_mask=mask)
    return x + mixed.transpose(1, 2).flatten(2) + cache.sum()


def operands(batch: int = 2, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, length, 16), torch.randn(16, 48)


@pytest.mark.parametrize("model", [attended, twice, a_half_behind])
@pytest.mark.parametrize("dynamic", [False, True])
def test_both_parts_are_the_whole(model: Model, dynamic: bool) -> None:
    parts = parts_of(model, *operands(), dynamic=dynamic)
    assert parts is not None
    products = [sum("matmul" in str(n.target) for n in g.graph.nodes) for g in graphs(parts)]
    assert products == ([1, 1] if model is twice else [1, 0])
    assert not any("arange" in str(n.target) for g in graphs(parts) for n in g.graph.nodes)


def within_a_window(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Constants that are made before the attention and read on both sides."""
    window, steps = torch.tensor(3), torch.arange(x.shape[1]).unsqueeze(0)
    seen = (x * (steps % window)[..., None]).relu()
    return attended(seen, weight, kept) * (steps - window)[..., None]


def test_a_constant_is_made_in_each_part_that_reads_it() -> None:
    parts = parts_of(within_a_window, *operands())
    assert parts is not None
    for part in graphs(parts):
        assert any(node.target is torch.tensor for node in part.graph.nodes)
    across = parts.before.graph.output_node().all_input_nodes
    assert not any(each.meta["example_value"].dtype == torch.int64 for each in across)


def one_is_written(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(x.shape[1])
    made = attended(x * steps[:, None], weight, kept)
    steps.add_(1)
    return made * steps[:, None]


def test_a_constant_that_is_written_behind_leaves_the_graph_whole() -> None:
    assert parts_of(one_is_written, *operands()) is None


def graphs(parts: TwoParts) -> list[torch.fx.GraphModule]:
    return [parts.before, parts.behind]


def counted(
    x: torch.Tensor, weight: torch.Tensor, count: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """An input is written before the attention: it may be a part of the mask in a later call."""
    mask = masked(x, kept)
    count.mul_(0).add_(1)
    q, k, v = map(heads, (x @ weight).chunk(3, -1))
    return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Nothing is before the attention."""
    mask = kept.bool()[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def mapped(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The mask is made within `torch.vmap`, whose ends nothing reads."""
    place = torch.arange(x.shape[1])
    rows = torch.vmap(lambda i: torch.vmap(lambda j: j <= i)(place))(place)
    q, k, v = map(heads, (x.relu() @ weight).chunk(3, -1))
    mask = rows & kept[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_what_writes_an_input_before_stays_whole() -> None:
    assert parts_of(counted, *operands(), torch.zeros(6, dtype=torch.int64)) is None
    torch.compiler.reset()
    assert parts_of(cached, *operands(), torch.zeros(2, 2, 9, 8)) is None


def test_without_work_before_a_graph_stays_whole() -> None:
    assert parts_of(at_once, *(torch.randn(2, 2, 6, 8) for _ in range(3))) is None


def test_a_state_is_not_left_between_the_parts() -> None:
    assert parts_of(mapped, *operands()) is None


def without_gradients(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return attended(x, weight, kept)


def first_without(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = x * 2
    return attended(x, weight, kept)


@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_are_not_left_switched_between_the_parts(enabled: bool) -> None:
    """A part that ends without gradients, where they were on, would leave them off for the graph
    that runs after it in vain."""

    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        parts.append(cut(rewrite(module, inputs, always_read(), read="within")))
        return module.forward

    for model, stays in ((without_gradients, enabled), (first_without, False)):
        torch.compiler.reset()
        parts: list[TwoParts | None] = []
        with torch.set_grad_enabled(enabled):
            torch.compile(model, backend=seen)(*operands(), WHOLE)
        assert [each is None for each in parts] == [stays]


def sized(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> Any:
    """A size across the cut, which the first part comes to know as a number."""
    twice = x.shape[0] * 2
    x = x + x.unbind(0)[0]
    return attended(x, weight, kept), x.new_zeros(twice)


def test_each_part_works_sizes_out() -> None:
    parts = parts_of(sized, *operands(), dynamic=True)
    assert parts is not None
    across = parts.before.graph.output_node().all_input_nodes
    assert across
    assert all(isinstance(node.meta["example_value"], torch.Tensor) for node in across)


def mask_by_what_is_written(
    x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """The mask reads places before something is added to them."""
    mask = (place <= place[:, None]) & kept[:, None, None, :].bool()
    shown = mask.clone()
    place.add_(1)
    q, k, v = map(heads, ((x + place[:, None]) @ weight).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)


def residual_written(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """What comes across is written behind."""
    mask, rest = masked(x, kept), x * 2
    q, k, v = map(heads, (rest @ weight).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rest += mixed.transpose(1, 2).flatten(2)
    return rest


def under_autocast(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attended(x, weight, kept)


def test_what_the_parts_would_do_otherwise_stays_whole() -> None:
    assert parts_of(residual_written, *operands()) is None
    torch.compiler.reset()
    assert parts_of(under_autocast, *operands()) is None


def test_a_mask_of_what_the_first_part_writes() -> None:
    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten = rewrite(module, inputs, always_read(), read="within")
        if rewritten.reads:  # none where the places are no arange
            assert cut(rewritten) is None
        return module.forward

    with torch.no_grad():
        torch.compile(mask_by_what_is_written, backend=seen)(*operands(), torch.arange(6), WHOLE)


# -- what a wait costs -----------------------------------------------------------------------------


def test_work_before_the_first_attention() -> None:
    found: list[float] = []

    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(flops_before(each.node) for each in attentions(module.graph))
        return module.forward

    with torch.no_grad():
        torch.compile(twice, backend=seen)(*operands(), WHOLE)
    assert found == [2 * 2 * 6 * 16 * 48, 2 * 2 * 2 * 6 * 16 * 48]


@pytest.mark.parametrize(("width", "read", "taken"), [
    (4096, "before", False), (4096, "within", True), (64, "within", False),
])  # fmt: skip
def test_an_input_is_read_within_where_the_gpu_has_work(width: int, read: Any, taken: bool) -> None:
    """Attention that a mask costs 660 us, behind a product of 820 GFLOP or of 13."""
    found: list[bool] = []

    def model(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        mask = masked(x, kept)
        q, k, v = ((x @ weight).unflatten(-1, (64, 64)).transpose(1, 2) for _ in range(3))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def seen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(rewrite(module, inputs, load_rulebook(()), read=read).reads)
        return lambda *given: [torch.empty(0)]

    kind: Any = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = torch.empty(4, 2048, width, **kind), torch.empty(width, 4096, **kind)
    with torch.no_grad():
        kept = torch.ones(4, 2048, dtype=torch.int64, device="meta")
        torch.compile(model, backend=seen)(x, weight, kept)
    assert found == [taken]


# -- answers ---------------------------------------------------------------------------------------


def test_answers_on_the_host_are_known_at_once() -> None:
    written = Ones(0, written=(1,))
    shared = torch.ones(3)
    assert asked([Ones(0)], [torch.ones(3)]).holds()
    assert not asked([Ones(0)], [torch.tensor([1, 0])]).holds()
    assert asked([written], [shared, torch.ones(3)]).holds()
    assert not asked([written], [shared, shared]).holds()
    assert not asked([Ones(0), Ones(1)], [torch.ones(1), torch.zeros(1)]).holds()


def test_under_a_compiler_of_ones_own_a_graph_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives for fake tensors is not known."""
    cuts: list[Any] = []
    monkeypatch.setattr(backend, "cut", lambda *given: cuts.append(given))

    def inner(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return module.forward

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for compiler, asked_for in ((inner, 0), ("eager", 1)):
        torch.compiler.reset()
        options = {"inner": compiler, "device": "h200"}

        def compiled(graph: Any, given: Any, options: Any = options) -> Callable[..., Any]:
            return backend.fusion_advisor(graph, given, options=options)

        monkeypatch.setattr(backend, "load_rulebook", lambda rules: always_read())
        with torch.no_grad():
            torch.compile(attended, backend=compiled)(*operands(), WHOLE)
        assert len(cuts) == asked_for


WHOLE_ONE: tuple[two_graphs.Which, ...] = ("rewritten",)
PARTED: tuple[two_graphs.Which, ...] = ("before", "rewritten")


class Calls:
    """Calls of two graphs whose condition is read from a GPU, by what each call is to find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ones: Sequence[bool]) -> None:
        self.waited: list[int] = []
        """Calls whose answer was waited for."""
        self._answers = iter([self._read(number, each) for number, each in enumerate(ones)])
        monkeypatch.setattr(two_graphs, "asked", lambda *_: next(self._answers))

    def _read(self, number: int, ones: bool) -> Answer:
        event = Mock(synchronize=lambda: self.waited.append(number))
        return Answer(met=True, read=((torch.tensor(ones), event),))


@pytest.mark.parametrize("parted", [False, True])
def test_a_call_after_one_with_padding_waits_for_nothing(
    parted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the graph for all inputs, and what was read of it decides for the next call."""
    ones = [True, False, False, True, True, False, True]
    calls, later, ran = Calls(monkeypatch, ones), list[str](), list[str]()

    def graph(which: two_graphs.Which) -> two_graphs.Run:
        def run(*given: str) -> tuple[str]:
            ran.append(which)
            assert given == ("between",) * (which == "rewritten" and parted)
            return ("between",)

        return run

    def compiled_later(which: two_graphs.Which) -> two_graphs.Run:
        later.append(which)
        return graph(which)

    compiled = {which: graph(which) for which in (PARTED if parted else WHOLE_ONE)}
    run = two_graphs.choosing((), (), compiled, compiled_later, parted=parted)
    found: list[tuple[list[str], list[int]]] = []
    for number in range(len(ones)):
        calls.waited.clear()
        ran.clear()
        run()
        found.append(([*ran], [each for each in calls.waited if each == number]))
    first = ["before"] * parted
    kept, dropped, at_once = [*first, "rewritten"], [*first, "for all"], ["for all"]
    assert found == [
        (kept, [0]),
        (dropped, [1]),
        (at_once, []),  # call 1 had padding: nothing is waited for, and the graph serves both
        (at_once, []),
        (kept, [4]),
        (dropped, [5]),
        (at_once, []),
    ]
    assert later == ["for all"], "the other graph is compiled once"


def test_a_part_that_ran_in_vain_leaves_random_numbers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Calls(monkeypatch, [False])

    def drawn(*_: Any) -> tuple[torch.Tensor]:
        return (torch.rand(3),)

    compiled: dict[two_graphs.Which, two_graphs.Run] = {"before": drawn, "rewritten": drawn}
    run = two_graphs.choosing((), (), compiled, lambda _: drawn, parted=True)
    torch.manual_seed(7)
    (found,) = run()
    torch.manual_seed(7)
    assert torch.equal(found, torch.rand(3))
