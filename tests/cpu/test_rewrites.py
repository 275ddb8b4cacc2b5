"""Rewrites of Dynamo's graph: taken where they mean the same, and nowhere else."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.dynamo.rewrites import rewrite, tables
from fusion_advisor.dynamo.rewrites.attention import launched
from fusion_advisor.dynamo.rewrites.conditions import Requirement, Unchanged, hold
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Rulebook

pytestmark = pytest.mark.usefixtures("compiled_anew")

Mask = Callable[..., Any]


@dataclass
class Seen:
    """What the rewrites said of the graphs of one function; calling it runs the rewritten graphs,
    each only where its inputs have the ones that it asks for."""

    read: bool = True
    names: list[str] = field(default_factory=list[str])
    conditions: list[tuple[Requirement, ...]] = field(default_factory=list[tuple[Requirement, ...]])
    places: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        done = rewrite(module, inputs, always_read(), read="before" if self.read else "never")
        self.names += [each.name for each in done.taken]
        self.places += [(each.source.file, each.source.line) for each in done.taken if each.source]
        self.conditions.append(done.conditions)

        def run(*given: Any) -> Any:
            return (done.module if hold(done.conditions, given) else module)(*given)

        return run


@cache
def always_read() -> Rulebook:
    """Rules by which an input is read for the smallest attention, too."""
    with TemporaryDirectory() as folder:
        overlay = Path(folder) / "read.toml"
        worth = 'worth = { value = 1e-12, unit = "x", source = "test" }'
        overlay.write_text(f"[rewrites.needless-mask.limits]\n{worth}\n")
        return load_rulebook((overlay,))


def attended(mask: Mask, **more: Any) -> Callable[..., torch.Tensor]:
    """Attention whose mask is made of its operands and of what else is given."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor
    ) -> torch.Tensor:
        made = mask(q, k, *given)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=made, **more)

    return forward


def operands(batch: int = 2, heads: int = 3, queries: int = 6, keys: int = 6) -> list[torch.Tensor]:
    return [torch.randn(batch, heads, n, 8) for n in (queries, keys, keys)]


def least(q: torch.Tensor) -> float:
    return torch.finfo(q.dtype).min


# -- masks that are needless -----------------------------------------------------------------------


def by_tril(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))


def by_comparison(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.arange(k.shape[2])[None, :] <= torch.arange(q.shape[2])[:, None]


def by_triu_of_least(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[2], k.shape[2]), least(q)).triu(1)[None, None]


def by_infinity(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    later = torch.arange(k.shape[2]) > torch.arange(q.shape[2]).view(-1, 1)
    return torch.zeros(q.shape[2], k.shape[2]).masked_fill(later, float("-inf"))


def by_where(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(q.shape[2], k.shape[2]).tril().bool()
    return torch.where(seen, 0.0, least(q))


def by_product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As transformers 4.40 had it: a triangle times a comparison."""
    made = torch.triu(torch.full((q.shape[2], k.shape[2]), least(q)), diagonal=1)
    made = made * (torch.arange(k.shape[2]) > torch.arange(q.shape[2]).reshape(-1, 1))
    return made[None, None, :, :].expand(q.shape[0], 1, -1, -1)


def written_in_place(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(q.shape[2], k.shape[2])
    made.masked_fill_(torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None], least(q))
    return made


def inverted(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(diagonal=1)
    return ~later


def wide_window(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A window as wide as there are keys."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return (j <= i) & (i - j < k.shape[2])


def sequences(positions: Callable[[int], torch.Tensor]) -> Mask:
    """As transformers has it without a cache: tokens see those before them of their own sequence,
    and another begins where a position is not the next one."""

    def mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        place = positions(q.shape[2])[None].expand(q.shape[0], -1)
        apart = torch.diff(place, prepend=place[:, :1] - 1, dim=-1)
        number = (apart != 1).cumsum(-1)
        batch = torch.arange(q.shape[0])[:, None, None, None]
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return (j <= i) & (number[batch, i] == number[batch, j])

    mask.__name__ = f"sequences by {positions.__name__}"
    return mask


def one_sequence(length: int) -> torch.Tensor:
    return torch.arange(length) + 3


def from_a_place(length: int) -> torch.Tensor:
    """Positions behind one that they continue."""
    return torch.cat([torch.arange(5, 6), torch.arange(6, 5 + length)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "mask",
    [by_tril, by_comparison, by_triu_of_least, by_infinity, by_where, by_product,
     written_in_place, inverted, wide_window, sequences(one_sequence), sequences(from_a_place)],
)  # fmt: skip
def test_a_causal_mask_goes(mask: Mask, dynamic: bool) -> None:
    seen = Seen()
    forward = attended(mask)
    compiled = torch.compile(forward, backend=seen, dynamic=dynamic)
    for queries in (6, 9):
        given = operands(queries=queries, keys=queries)
        torch.testing.assert_close(compiled(*given), forward(*given))
    assert set(seen.names) == {"needless-mask"}, seen


def test_keys_after_the_last_query_are_left_out() -> None:
    """As a static cache that is not full has them."""
    seen = Seen()
    forward = attended(by_comparison)
    given = operands(queries=5, keys=9)
    torch.testing.assert_close(torch.compile(forward, backend=seen)(*given), forward(*given))
    assert seen.names == ["needless-mask"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_hides_nothing_goes(dynamic: bool) -> None:
    def mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        offset = k.shape[2] - q.shape[2]
        return torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + offset

    def ones(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)

    for made, given in ((mask, operands(queries=1)), (ones, operands(queries=4, keys=7))):
        seen = Seen()
        compiled = torch.compile(attended(made), backend=seen, dynamic=dynamic)
        torch.testing.assert_close(compiled(*given), attended(made)(*given))
        assert seen.names == ["needless-mask"], made


# -- padding ---------------------------------------------------------------------------------------


def padded_and_causal(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers has it: read by the places of batch and key."""
    kept = mask.to(torch.bool)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    i, j = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None]
    return (j <= i) & kept[batch, j]


def padded_by_numbers(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As BERT had it: added, and nothing is causal."""
    return (1.0 - mask[:, None, None, :].to(q.dtype)) * least(q)


@pytest.mark.parametrize("mask", [padded_and_causal, padded_by_numbers])
@pytest.mark.parametrize("dynamic", [False, True])
def test_padding_is_read(mask: Mask, dynamic: bool) -> None:
    forward = attended(mask)
    for read in (True, False):
        torch.compiler.reset()
        seen = Seen(read)
        compiled = torch.compile(forward, backend=seen, dynamic=dynamic)
        whole, holes = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
        holes[1, 4:] = 0
        for given in (whole, holes):
            values = operands()
            torch.testing.assert_close(compiled(*values, given), forward(*values, given))
        assert bool(seen.names) == read
        assert all(bool(each) == read for each in seen.conditions)


def test_small_attention_is_not_worth_a_read() -> None:
    module: list[tuple[torch.fx.GraphModule, Sequence[Any]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        module.append((graph, inputs))
        return graph.forward

    torch.compile(attended(padded_and_causal), backend=backend)(
        *operands(), torch.ones(2, 6, dtype=torch.int64)
    )
    assert not rewrite(*module[0], load_rulebook(())).taken


# -- triangles that a model keeps ------------------------------------------------------------------


class Kept(torch.nn.Module):
    """As GPT-2 and minGPT keep their mask: a buffer, of which a call takes a corner."""

    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        corner = self.table[:, :, k.size(2) - q.size(2) : k.size(2), : k.size(2)]
        scores = scores.masked_fill(corner == 0, float("-inf"))
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_triangle_that_a_model_keeps(dynamic: bool) -> None:
    model, seen = Kept(torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)), Seen()
    compiled = torch.compile(model, backend=seen, dynamic=dynamic)
    for length in (6, 9):
        given = operands(queries=length, keys=length)
        torch.testing.assert_close(compiled(*given), model(*given))
    assert set(seen.names) == {"attention-by-hand", "needless-mask"}
    assert all(isinstance(each, Unchanged) for (each,) in seen.conditions)
    model.table[0, 0, 3, 0] = 0  # one place is hidden from now on
    torch.testing.assert_close(compiled(*given), model(*given))


def test_other_tables_stay() -> None:
    window = torch.ones(16, 16).tril().triu(-3)
    for table in (window, torch.randn(16, 16), torch.ones(16, 16).tril(-1)):
        torch.compiler.reset()
        model, seen, given = Kept(table.view(1, 1, 16, 16)), Seen(), operands()
        compiled = torch.compile(model, backend=seen)
        torch.testing.assert_close(compiled(*given), model(*given), equal_nan=True)
        assert seen.names == []


def test_a_rewrite_names_the_line_that_it_is_at() -> None:
    seen = Seen()
    compiled = torch.compile(Kept(torch.ones(16, 16).tril().view(1, 1, 16, 16)), backend=seen)
    compiled(*operands())
    lines = Path(__file__).read_text().splitlines()
    last = 1 + lines.index("        return scores.softmax(-1) @ v")
    assert seen.names == ["attention-by-hand", "needless-mask"]
    assert seen.places == [(__file__, last)] * 2


class Weighed(Kept):
    """A model that keeps weights beside its triangle."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table)
        self.out = torch.nn.Linear(8, 24)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(q, k, v))


def test_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []

    def triangle(value: torch.Tensor, most: int) -> Any:
        read.append(tuple(value.shape))
        return looked_at(value, most)

    looked_at = getattr(tables, "_triangle")  # noqa: B009
    monkeypatch.setattr(tables, "_triangle", triangle)
    model, seen = Weighed(torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)), Seen()
    given = operands()
    torch.compile(model, backend=seen)(*given)
    assert "needless-mask" in seen.names
    assert set(read) == {(1, 1, 16, 16)}


# -- masks that stay -------------------------------------------------------------------------------


def narrow_window(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return (j <= i) & (i - j < 3)


def strictly_before(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool), diagonal=1)


def from_the_end(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(k.shape[2]) >= torch.arange(q.shape[2])[:, None]
    return torch.where(seen, 0.0, least(q))


def softly(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.where(by_comparison(q, k), 0.0, -3.0)


def one_of_two(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A part of several results."""
    made = torch.zeros(2 * q.shape[2], k.shape[2]).chunk(2)[1]
    return made.cummax(0)[0]


def by_distance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return (j - i).to(q.dtype) * 0.5


def on_the_diagonal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.arange(k.shape[2]) == torch.arange(q.shape[2])[:, None]


def off_the_diagonal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.arange(k.shape[2]) != torch.arange(q.shape[2])[:, None] + 1


def wrapping(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What is added is 0 in 32 bits."""
    much = torch.ones(1, dtype=torch.int32) * 65536 * 65536
    place = torch.arange(q.shape[2], dtype=torch.int32)[:, None] + much
    return place >= torch.arange(k.shape[2], dtype=torch.int32)


def cut_short(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    much = torch.full((1,), 2**32).to(torch.int32)
    return torch.arange(q.shape[2])[:, None] + much >= torch.arange(k.shape[2]) + 1


def without_a_sign(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    below = (torch.arange(q.shape[2]) - q.shape[2]).to(torch.uint32).to(torch.int64)
    return (below[:, None] < 0) | (torch.arange(k.shape[2]) <= 0 * below[:, None] + 1)


def of_no_dimension(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (torch.ones((), dtype=torch.int64).cumsum(0) >= 2) | softly(q, k).bool()


def two_sequences(length: int) -> torch.Tensor:
    return torch.cat([torch.arange(2), torch.arange(length - 2)])


def every_other(length: int) -> torch.Tensor:
    return 2 * torch.arange(length)


def begun_again(length: int) -> torch.Tensor:
    return torch.cat([torch.arange(1), torch.arange(length - 1)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "mask",
    [narrow_window, strictly_before, from_the_end, softly, one_of_two, by_distance,
     wrapping, cut_short, without_a_sign, of_no_dimension, on_the_diagonal, off_the_diagonal,
     sequences(two_sequences), sequences(every_other), sequences(begun_again)],
)  # fmt: skip
def test_other_masks_stay(mask: Mask, dynamic: bool) -> None:
    seen = Seen()
    compiled = torch.compile(attended(mask), backend=seen, dynamic=dynamic)
    given = operands()
    torch.testing.assert_close(compiled(*given), attended(mask)(*given))
    assert seen.names == []


def test_a_mask_that_the_caller_gives_stays() -> None:
    """It depends on the query: nobody reads all of it."""
    seen = Seen()

    def mask(q: torch.Tensor, k: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given

    forward, given = attended(mask), torch.ones(6, 6, dtype=torch.bool).tril()
    values = operands()
    compiled = torch.compile(forward, backend=seen)
    torch.testing.assert_close(compiled(*values, given), forward(*values, given))
    assert seen.names == []


def test_a_mask_that_is_written_later_stays() -> None:
    seen = Seen()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = by_where(q, k)
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask[0, 0] = 1.5
        mask[1, 0] = 2.5
        return F.scaled_dot_product_attention(first, k, v, attn_mask=mask)

    given = operands()
    torch.testing.assert_close(torch.compile(forward, backend=seen)(*given), forward(*given))
    assert len(seen.names) <= 1


def test_of_a_graph_only_what_makes_masks_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of each layer stand behind the layers before; what is written into one is kept."""
    masks = importlib.import_module("fusion_advisor.dynamo.rewrites.needless_masks")
    traced: list[torch.fx.GraphModule] = []

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def trace(*given: Any) -> torch.fx.GraphModule:
            traced.append(make_fx(run)(*given))
            return traced[-1]

        return trace

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        unread = q.exp().contiguous()  # noqa: F841 nothing but a tensor
        for _ in range(2):
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
            mask.logical_not_().logical_not_()
            q = F.scaled_dot_product_attention(q @ q.mT @ q, k, v, attn_mask=mask)
        return q

    monkeypatch.setattr(masks, "make_fx", noted)
    seen, given = Seen(), operands()
    torch.testing.assert_close(torch.compile(forward, backend=seen)(*given), forward(*given))
    assert seen.names == ["needless-mask"] * 2
    (module,) = traced
    found = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert "aten.logical_not.default" in found
    assert not any("mm" in name or "attention" in name or "exp" in name for name in found)


# -- drawn masks -----------------------------------------------------------------------------------


def _drawn(draw: random.Random, depth: int) -> Callable[[Any, Any, int], Any]:
    """A mask as a formula of query, key and how many there are."""
    if depth == 0 or draw.random() < 0.2:
        shift = draw.choice((0, 0, 0, 0, 1, -1, 2, -5, 40))
        sign = draw.choice((1, 1, -1))
        compared = draw.choice((torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne))
        ends = draw.random() < 0.2

        def leaf(i: Any, j: Any, n: int) -> Any:
            moved = i + (n if ends else shift)
            return compared(j, moved) if sign > 0 else compared(moved, j)

        return leaf
    one, other = _drawn(draw, depth - 1), _drawn(draw, depth - 1)
    kind = draw.choice(("and", "or", "not", "where", "xor"))
    if kind == "not":
        return lambda i, j, n: ~one(i, j, n)
    if kind == "where":
        return lambda i, j, n: torch.where(one(i, j, n), other(i, j, n), one(i, j, n))
    joined = {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor}[kind]
    return lambda i, j, n: joined(one(i, j, n), other(i, j, n))


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.deep)])
def test_drawn_masks_go_only_where_they_may(count: int) -> None:
    """Of random formulas none that hides anything else is taken, and of those that are causal or
    hide nothing nearly all are; some rows may be hidden wholly, which only the mask itself does."""
    draw = random.Random(20261125)
    taken = needless = 0
    for number in range(count):
        formula, additive = _drawn(draw, draw.randint(0, 3)), draw.random() < 0.5
        size = draw.choice((4, 7))

        def mask(
            q: torch.Tensor, k: torch.Tensor, formula: Any = formula, additive: bool = additive
        ) -> torch.Tensor:
            i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
            seen = formula(i, j, q.shape[2])
            return torch.where(seen, 0.0, float("-inf")) if additive else seen

        q = torch.randn(1, 1, size, 8)
        made = mask(q, q)
        seen = made if made.dtype is torch.bool else made == 0
        asked = Seen()
        torch.compiler.reset()
        torch.compile(attended(mask), backend=asked, dynamic=number % 2 == 0)(q, q, q)
        causal = torch.ones(size, size).tril().bool()
        right = bool(seen.all()) or bool((seen == causal).all())
        assert right or not asked.names, f"formula {number} hides other places"
        needless += right
        taken += bool(asked.names)
    assert needless > count / 8
    assert taken >= 0.8 * needless, (taken, needless)


# -- grouped heads ---------------------------------------------------------------------------------


def expanded(x: torch.Tensor, n: int) -> torch.Tensor:
    batch, groups, keys, width = x.shape
    return (
        x[:, :, None, :, :]
        .expand(batch, groups, n, keys, width)
        .reshape(batch, groups * n, keys, width)
    )


def interleaved(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.repeat_interleave(n, dim=1)


def unsqueezed(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2).contiguous()


def tiled(x: torch.Tensor, n: int) -> torch.Tensor:
    """Groups follow each other: another order of heads."""
    return x.repeat(1, n, 1, 1)


def expanded_in_front(x: torch.Tensor, n: int) -> torch.Tensor:
    batch, groups, keys, width = x.shape
    return x[:, None].expand(batch, n, groups, keys, width).reshape(batch, -1, keys, width)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("repeated", "goes"),
    [(expanded, True), (interleaved, True), (unsqueezed, True), (tiled, False),
     (expanded_in_front, False)],
)  # fmt: skip
def test_grouped_heads(repeated: Callable[..., torch.Tensor], goes: bool, dynamic: bool) -> None:
    seen = Seen()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeated(k, 3), repeated(v, 3), is_causal=True)

    compiled = torch.compile(forward, backend=seen, dynamic=dynamic)
    for length in (5, 8):
        q = torch.randn(2, 6, length, 8)
        k, v = torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
        torch.testing.assert_close(compiled(q, k, v), forward(q, k, v))
    assert set(seen.names) == ({"grouped-heads"} if goes else set())


@pytest.mark.parametrize("additive", [False, True])
def test_one_query_of_grouped_heads_with_a_mask(additive: bool) -> None:
    """As a step against a cache of fixed length: no mask that goes, and nothing is copied."""
    seen = Seen()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(k.shape[2]) <= torch.arange(3, 3 + q.shape[0])[:, None])[:, None, None]
        mask = torch.where(mask, 0.0, float("-inf")) if additive else mask
        return F.scaled_dot_product_attention(q, expanded(k, 3), expanded(v, 3), mask)

    compiled = torch.compile(forward, backend=seen)
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((6, 1), (2, 9), (2, 9)))
    torch.testing.assert_close(compiled(q, k, v), forward(q, k, v))
    assert seen.names == ["grouped-heads"]


# -- attention by hand -----------------------------------------------------------------------------


def as_nano_gpt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = F.dropout(F.softmax(scores, dim=-1), 0.1, training=False)
    return weights @ v


def as_bert(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / math.sqrt(q.shape[-1])
    return torch.matmul(torch.softmax(scores, -1), v)


def as_llama(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    scores = scores + torch.full((q.size(2), k.size(2)), least(q)).triu(1)[None, None]
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q = q * q.size(-1) ** -0.5
    scores = (q @ k.mT).float()
    scores = torch.where(by_comparison(q, k), scores, least(q))
    return scores.softmax(-1).type_as(v) @ v


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1)
    scores *= 0.125
    scores += by_triu_of_least(q, k)
    return scores.softmax(dim=-1).matmul(v)


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads behind places, as timm and einops have them."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def in_batches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) / 2.0).softmax(-1), v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "forward",
    [as_nano_gpt, as_bert, as_llama, in_float32, in_place, by_einsum, in_batches],
)
def test_attention_by_hand(forward: Callable[..., torch.Tensor], dynamic: bool) -> None:
    seen = Seen()
    compiled = torch.compile(forward, backend=seen, dynamic=dynamic)
    for length in (6, 9):
        given = operands(queries=length, keys=length)
        torch.testing.assert_close(compiled(*given), forward(*given))
    assert seen.names[:1] == ["attention-by-hand"]


def weights_too(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def over_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-2) @ v


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(q @ k.mT).softmax(-1) @ v


def with_a_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT + by_distance(q, k)).softmax(-1) @ v


def hidden_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A first row that sees nothing: NaN by hand."""
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(-1)
    return (q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def masked_before_scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT + by_triu_of_least(q, k)) * -1.0).softmax(-1) @ v


def divided_by_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (2.0 / (q @ k.mT)).softmax(-1) @ v


def of_other_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v.mT @ (q @ k.mT).softmax(-1)


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return F.dropout((q @ k.mT).softmax(-1), 0.5, training=True) @ v


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "forward",
    [weights_too, over_queries, capped, with_a_bias, hidden_rows, masked_before_scaled,
     divided_by_scores, of_other_weights, dropped],
)  # fmt: skip
def test_what_is_not_attention_stays(forward: Callable[..., Any]) -> None:
    seen, given = Seen(), operands()
    found, wanted = torch.compile(forward, backend=seen)(*given), forward(*given)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert seen.names == []


def test_layers_of_attention_by_hand() -> None:
    """Several at a time, one of which has to stay."""
    seen = Seen()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in (as_nano_gpt, as_llama, with_a_bias, in_place):
            x = x + layer(x, x * 0.5, x)
        return x

    # Steep softmaxes in turn multiply what float32 rounds, which a CPU rounds as it has lanes.
    x = 0.5 * torch.randn(2, 3, 6, 8)
    torch.testing.assert_close(torch.compile(forward, backend=seen)(x), forward(x))
    assert seen.names == ["attention-by-hand"] * 3 + ["needless-mask"] * 3


def test_writes_that_are_read_stay() -> None:
    """What is dead to torch.fx: a call in place whose result has no name."""
    seen = Seen()

    def forward(q: torch.Tensor, k: torch.Tensor, state: torch.Tensor) -> Any:
        mask = written_in_place(q, k)
        state[0].add_(1.0)
        unread = torch.zeros(4)
        unread.add_(1.0)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask), mask * 2

    given = [*operands()[:2], torch.zeros(2, 3)]
    mine = [each.clone() for each in given]
    torch.testing.assert_close(torch.compile(forward, backend=seen)(*mine), forward(*given))
    torch.testing.assert_close(mine, given)
    assert seen.names == ["needless-mask"]


def test_the_kernel_that_torch_chooses_is_seen_on_fake_tensors() -> None:
    """As for the question whether one fused kernel serves a call, which only a GPU has."""
    with FakeTensorMode():
        q, k = torch.empty(2, 4, 16, 32), torch.empty(2, 4, 16, 32)
        mask = torch.empty(2, 1, 1, 16, dtype=torch.bool)
        attention = F.scaled_dot_product_attention
        fused = launched(attention, q, k, k, is_causal=True)
        plain = launched(attention, q, k, k, dropout_p=0.5)
    masked = launched(attention, q, k, k, mask)  # as backends are called, out of the mode
    assert "_scaled_dot_product_flash_attention_for_cpu" in fused
    assert "_scaled_dot_product_flash_attention_for_cpu" in masked
    assert "bmm" in plain
    assert not any(name.startswith("_scaled_dot_product") for name in plain)


# -- what a second pair of eyes broke --------------------------------------------------------------

T: TypeAlias = torch.Tensor


def tril(q: T) -> torch.Tensor:
    return torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()


def filled_with_zero(q: T, k: T, v: T) -> torch.Tensor:
    return (q @ k.mT).masked_fill(~tril(q), 0.0).softmax(-1) @ v


def filled_twice(q: T, k: T, v: T) -> torch.Tensor:
    scores = (q @ k.mT).masked_fill(~tril(q), float("-inf")).masked_fill(~tril(q), 0.0)
    return scores.softmax(-1) @ v


def scaled_down(q: T, k: T, v: T) -> torch.Tensor:
    return ((q @ k.mT) * -0.5).masked_fill(~tril(q), float("-inf")).softmax(-1) @ v


def scaled_down_by_torch(q: T, k: T, v: T) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=tril(q), scale=-0.5)


def condition_written_later(q: T, k: T, v: T) -> torch.Tensor:
    hidden = torch.zeros(q.size(-2), q.size(-2), dtype=torch.bool)
    hidden[:, 3:] = True
    return (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def key_written_between(q: T, k: T, v: T) -> torch.Tensor:
    k = k * 1
    scores = q @ k.mT
    k.copy_(v)
    return scores.softmax(-1) @ v


def repeated_and_written(q: T, k: T, v: T) -> torch.Tensor:
    k, v = k[:, :1].repeat_interleave(3, 1), v[:, :1].repeat_interleave(3, 1)
    k[:, :, 0] = 0
    return F.scaled_dot_product_attention(q, k, v)


def viewed_afterwards(q: T, k: T, v: T) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    made = (q @ k.mT).softmax(-1) @ v
    return made.view(-1, made.size(-1))


def written_by_a_flag(q: T, k: T, v: T) -> torch.Tensor:
    s = q * 1
    F.relu(s, inplace=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=tril(q)) + s


def mask_written_by_a_flag(q: T, k: T, v: T) -> torch.Tensor:
    mask = torch.where(tril(q), 0.0, least(q))
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    F.relu(mask, inplace=True)
    return first + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def larger_than_the_scores(q: T, k: T, v: T) -> torch.Tensor:
    added = torch.zeros(4, 1, q.size(-2), q.size(-2))
    return (q[:1] @ k[:1].mT + added).softmax(-1) @ v[:1]


def into_the_scores(q: T, k: T, v: T) -> Any:
    scores = q @ k.mT
    weights = torch.softmax(scores * 2, -1, out=torch.empty_like(scores))
    return weights @ v


def sliced_before_the_start(q: T, k: T, v: T) -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).tril(4)[-10:]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def cubed(q: T, k: T, v: T) -> torch.Tensor:
    i, j = torch.arange(6), torch.arange(6)
    mask = (i * i * i)[:, None] + 0 * j <= 3
    mask = mask | (j == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def wrapped_around(q: T, k: T, v: T) -> torch.Tensor:
    i = torch.arange(6, dtype=torch.uint8)
    mask = (i[None] - i[:, None]) <= 0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_keywords(q: T, k: T, v: T) -> torch.Tensor:
    weights = F.softmax(input=q @ k.mT, dim=-1)
    return F.dropout(input=weights, p=0.0, training=False) @ v


def beside_a_vmap(q: T, k: T, v: T) -> torch.Tensor:
    made = F.scaled_dot_product_attention(q, k, v, attn_mask=tril(q))
    return made + torch.vmap(torch.sin)(q)


BROKEN = [
    filled_with_zero, filled_twice, scaled_down, scaled_down_by_torch, condition_written_later,
    key_written_between, repeated_and_written, viewed_afterwards, written_by_a_flag,
    mask_written_by_a_flag, larger_than_the_scores, into_the_scores, sliced_before_the_start,
    cubed, wrapped_around, by_keywords, beside_a_vmap,
]  # fmt: skip


@pytest.mark.parametrize("forward", BROKEN)
def test_it_means_the_same(forward: Callable[..., torch.Tensor]) -> None:
    given = operands()
    found, wanted = torch.compile(forward, backend=Seen())(*given), forward(*given)
    torch.testing.assert_close(found, wanted)
    assert found.shape == wanted.shape


@pytest.mark.parametrize("part", ["weights", "repetition"])
def test_gradients_that_are_switched_off_stay_off(part: str) -> None:
    def weights(q: T, k: T, v: T) -> torch.Tensor:
        with torch.no_grad():
            made = (q @ k.mT).softmax(-1)
        return made @ v

    def repetition(q: T, k: T, v: T) -> torch.Tensor:
        with torch.no_grad():
            k, v = k[:, :1].repeat_interleave(3, 1), v[:, :1].repeat_interleave(3, 1)
        return F.scaled_dot_product_attention(q, k, v)

    forward = {"weights": weights, "repetition": repetition}[part]
    found: list[list[torch.Tensor | None]] = []
    given = operands()
    for call in (forward, torch.compile(forward, backend=Seen())):
        mine = [each.clone().requires_grad_() for each in given]
        call(*mine).square().sum().backward()
        found.append([each.grad for each in mine])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def test_a_mask_that_is_made_of_itself_many_times() -> None:
    """Its parts are shared: read as a tree, they are 3 to the 14th."""

    def mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        made = tril(q)
        for _ in range(14):
            made = made & (made | made)
        return made

    seen, given = Seen(), operands()
    torch.compile(attended(mask), backend=seen)(*given)
    assert seen.names == ["needless-mask"]


def test_gradients_are_the_same() -> None:
    forward = attended(by_comparison)
    given = [each.requires_grad_() for each in operands()]
    wanted = torch.autograd.grad(forward(*given).square().sum(), given)
    seen = Seen()
    found = torch.autograd.grad(torch.compile(forward, backend=seen)(*given).square().sum(), given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert seen.names == ["needless-mask"]
