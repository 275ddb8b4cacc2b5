"""Rewrite of a product and its cross-entropy: in chunks of rows, with the same loss and gradients,
and only where nothing else reads the logits."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_advisor.dynamo import chunked_loss
from fusion_advisor.dynamo.rewrites import rewrite
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Rulebook

pytestmark = pytest.mark.usefixtures("compiled_anew")

WORDS, WIDTH = 40, 16
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def small_chunks() -> Rulebook:
    """Rules by which a chunk is a few rows."""
    with TemporaryDirectory() as folder:
        overlay = Path(folder) / "chunks.toml"
        chunk = 'chunk = { value = 960, unit = "B", source = "test" }'
        overlay.write_text(f"[rewrites.linear-cross-entropy.limits]\n{chunk}\n")
        return load_rulebook((overlay,))


@dataclass
class Seen:
    """A backend that runs the rewritten graph, and keeps the names of its rewrites."""

    names: list[str] = field(default_factory=list[str])

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        done = rewrite(module, inputs, small_chunks(), chunked_loss=True)
        self.names += [each.name for each in done.taken]
        return done.module.forward


class Head(nn.Module):
    """A layer, a head of words, and a loss of the logits [batch, length, words]."""

    def __init__(self, loss: Loss, *, bias: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.layer(x))), labels)


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, WORDS), labels.flatten(), label_smoothing=0.2)


def ignoring(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1).clamp_min(0), None, None, 3)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As language models were trained before they padded the labels."""
    rows = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(rows.view(-1, WORDS), labels[..., 1:].contiguous().view(-1))


def by_module(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(logits.to(torch.float32).view(-1, WORDS), labels.view(-1)) * 3


def given(rows: tuple[int, ...] = (3, 14)) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, rows)
    labels[0, 2] = -100
    return torch.randn(*rows, WIDTH), labels


def step(model: nn.Module, call: Callable[..., Any], *inputs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def near(model: nn.Module, call: Callable[..., Any], *inputs: Any, factor: float = 2) -> bool:
    """Whether loss and gradients are as near to float64's as eager's, within a factor."""
    found, eager = step(model, call, *inputs), step(model, model, *inputs)
    wide = copy.deepcopy(model).double()
    exact = step(wide, wide, inputs[0].double(), inputs[1])
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        ulp = float(true.abs().max()) * torch.finfo(theirs.dtype).eps
        allowed = factor * float((theirs.double() - true).abs().max()) + 2 * ulp
        if ours.dtype is not theirs.dtype or float((ours.double() - true).abs().max()) > allowed:
            return False
    return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [mean, summed, smoothed, ignoring, shifted, by_module])
def test_loss_and_gradients_are_eagers(loss: Loss, dynamic: bool) -> None:
    for bias in (False, True):
        torch.compiler.reset()
        model, seen = Head(loss, bias=bias), Seen()
        compiled = torch.compile(model, backend=seen, dynamic=dynamic)
        for rows in ((3, 14), (2, 30)) if dynamic else ((3, 14),):
            assert near(model, compiled, *given(rows))
        assert seen.names == ["linear-cross-entropy"]


def test_bfloat16_is_as_near_as_eagers() -> None:
    for dtype, loss in ((torch.bfloat16, shifted), (torch.bfloat16, mean)):
        torch.compiler.reset()
        model, seen = Head(loss, bias=True).to(dtype), Seen()
        x, labels = given((4, 30))
        assert near(model, torch.compile(model, backend=seen), x.to(dtype), labels)
        assert seen.names == ["linear-cross-entropy"]


def test_without_gradients_only_the_loss_is_made() -> None:
    model, seen = Head(mean), Seen()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=seen)(*given()), model(*given()))
    assert seen.names == ["linear-cross-entropy"]


def test_what_is_frozen_has_no_gradient() -> None:
    for frozen in ("head", "layer"):
        torch.compiler.reset()
        model, seen = Head(smoothed, bias=True), Seen()
        cast(nn.Module, getattr(model, frozen)).requires_grad_(False)
        assert near(model, torch.compile(model, backend=seen), *given())
        assert seen.names == ["linear-cross-entropy"]


def test_labels_that_are_all_ignored_give_nan() -> None:
    model, seen = Head(mean), Seen()
    x, labels = given()
    labels.fill_(-100)
    assert torch.compile(model, backend=seen)(x, labels).isnan()
    assert model(x, labels).isnan()


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 64])
def test_chunks_are_few_and_cover_all_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = chunked_loss.losses

    def losses(logits: torch.Tensor, *more: Any, **how: Any) -> Any:
        sizes.append(logits.shape[0])
        return real(logits, *more, **how)

    monkeypatch.setattr(chunked_loss, "losses", losses)
    hidden, weight = torch.randn(rows, 8), torch.randn(20, 8)
    labels = torch.randint(0, 20, (rows,))
    needed = [True, True, False]
    loss, by_hidden, by_weight, by_bias = chunked_loss.linear_cross_entropy(
        hidden, weight, None, labels, -100, True, 0.0, 2 * 20 * 4, 8, needed
    )
    assert sum(sizes) == rows
    assert len(sizes) == min(8, -(-rows // 2))
    a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    F.cross_entropy(a @ b.t(), labels).backward()
    torch.testing.assert_close(by_hidden, a.grad)
    torch.testing.assert_close(by_weight, b.grad)
    assert by_bias.numel() == 0
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), labels))


# -- losses that stay ------------------------------------------------------------------------------


def returned(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    return mean(logits, labels) + logits.sum() * 0


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), logits.new_ones(WORDS))


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="none").sum()


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(torch.tanh(logits / 30) * 30, labels)


def some_words(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[..., :39].flatten(0, 1), labels.flatten().clamp_max(38))


def other_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(logits.transpose(0, 1).contiguous(), labels)


def written(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits += 1
    return mean(logits, labels)


@pytest.mark.parametrize(
    "loss", [returned, weighted, each, capped, some_words, other_rows, written]
)
def test_other_losses_stay(loss: Loss) -> None:
    model, seen = Head(loss), Seen()
    assert near(model, torch.compile(model, backend=seen), *given())
    assert seen.names == []


def test_small_logits_and_float16_stay() -> None:
    for rows, dtype in (((1, 11), torch.float32), ((3, 40), torch.float16)):
        torch.compiler.reset()
        model, seen = Head(shifted).to(dtype), Seen()
        x, labels = given(rows)
        torch.compile(model, backend=seen)(x.to(dtype), labels)
        assert seen.names == []


def test_autocast_stays() -> None:
    model, seen = Head(mean), Seen()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=seen)(*given((3, 40)))
    assert seen.names == []
