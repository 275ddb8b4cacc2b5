"""Training steps compiled with `backend="fusion_advisor"` in Triton's interpreter: a program, for
Triton is imported for the interpreter or not at all. Prints what each scenario saw, as JSON."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FUSION_ADVISOR_STRICT"] = "1"  # a launcher that falls back raises
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from scenarios import Facts, report
from torch import nn
from torch._inductor import graph
from torch.utils.checkpoint import checkpoint

from fusion_advisor.dynamo import backend
from fusion_advisor.dynamo.backend import Outcome, fusion_advisor


class Gated(nn.Module):
    """A language model of one gated block, with its loss."""

    def __init__(self, size: int = 24, words: int = 40, dropped: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.before, self.after = nn.LayerNorm(size), nn.RMSNorm(size)
        self.gate, self.up = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, 2 * size)
        self.down, self.head = nn.Linear(2 * size, size), nn.Linear(size, words)
        self.dropped = dropped

    def block(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + F.dropout(y, self.dropped, self.training)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.after(self.block(self.words(ids)))
        x = x + F.gelu(x)
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)


class Checkpointed(Gated):
    """A block that is computed again in the backward pass."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x: Any = checkpoint(self.block, self.words(ids), use_reentrant=False)
        return F.cross_entropy(self.head(self.after(x)).flatten(0, 1), labels.flatten())


def tokens(batch: int = 2, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = torch.randint(0, 40, (batch, length)), torch.randint(0, 40, (batch, length))
    labels[0, 3] = -100
    return ids, labels


def compiled(model: nn.Module, told: list[Outcome], **options: Any) -> Any:
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    backed = partial(
        fusion_advisor,
        options={"inner": "eager", "take_all": True, **options},
        on_outcome=told.append,
    )  # fmt: skip
    return torch.compile(model, backend=backed, dynamic=dynamic)


def gradients(model: nn.Module, call: Callable[..., Any], *given: Any) -> list[torch.Tensor]:
    """Gradients of all parameters that have any, after one step; the loss is the first."""
    model.zero_grad()
    loss = call(*given)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def worst(model: nn.Module, call: Callable[..., Any], *given: Any) -> Facts:
    """Error of a step against float64 as a share of what eager's own error allows."""
    found, eager = gradients(model, call, *given), gradients(model, model, *given)
    wide = copy.deepcopy(model).double()
    exact = gradients(wide, wide, *(x.double() if x.is_floating_point() else x for x in given))
    shares: list[float] = []
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        ulp = float(true.abs().max()) * torch.finfo(theirs.dtype).eps
        allowed = 2 * float((theirs.double() - true).abs().max()) + 4 * ulp
        shares.append(float((ours.double() - true).abs().max()) / allowed)
    same = all(a.stride() == b.stride() for a, b in zip(found, eager, strict=True))
    return {"share": max(shares), "same": same}


def said(told: list[Outcome]) -> Facts:
    return {
        "phases": [outcome.phase for outcome in told],
        "taken": [len(outcome.taken) for outcome in told],
        "why": [outcome.why for outcome in told],
        "left": [place.why for outcome in told for place in outcome.left],
    }


def run(model: nn.Module, *given: Any, **options: Any) -> Facts:
    told: list[Outcome] = []
    call = compiled(model, told, **options)
    return {**worst(model, call, *given), **said(told)}


# -- scenarios -------------------------------------------------------------------------------------


def a_language_model() -> Facts:
    """With the tensors that are alive after two steps and were not before; Inductor's own are
    empty."""

    def alive() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}

    model, given, told = Gated(), tokens(), list[Outcome]()
    call = compiled(model, told)
    before = alive()
    for _ in range(2):
        call(*given).backward()
        model.zero_grad()
    after = alive()
    kept = [e for e in gc.get_objects() if id(e) in after - before and e.numel()]
    facts = {"kept": [list(each.shape) for each in kept]}
    del kept
    return {**facts, **worst(model, call, *given), **said(told)}


def through_inductor() -> Facts:
    with mock.patch.object(graph, "make_fallback", wraps=graph.make_fallback) as found:
        facts = run(Gated(), *tokens(), inner="inductor")
    unknown = [str(call.args[0]) for call in found.call_args_list]
    return {**facts, "unknown": [each for each in unknown if "fusion_advisor" in each]}


def a_block_that_is_computed_again() -> Facts:
    """With parts that are frozen."""
    model = Checkpointed()
    model.words.requires_grad_(False)
    model.gate.requires_grad_(False)
    return run(model, *tokens())


def sizes() -> Facts:
    """One pair of graphs for all batches and lengths."""
    model, told = Gated(), list[Outcome]()
    call = compiled(model, told, dynamic=True)
    found = [worst(model, call, *tokens(*size)) for size in ((2, 9), (3, 5), (5, 12))]
    same = all(one["same"] for one in found)
    return {"share": max(one["share"] for one in found), "same": same, **said(told)}


def statistics_of_a_batch() -> Facts:
    """A norm that writes its running statistics in the forward pass."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norm(self.first(x)) * 2 + 1).square().sum()

    model, x = Normed(), torch.randn(12, 6)
    plain = copy.deepcopy(model)
    facts = run(model, x)
    for _ in range(2):  # as many steps as `run` has taken, compiled and plain
        plain(x)
    mean, wanted = model.norm.running_mean, plain.norm.running_mean
    assert mean is not None
    assert wanted is not None
    return {**facts, "mean": float((mean - wanted).abs().max())}


def dropout() -> Facts:
    """What the forward pass drops has no gradient."""

    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.gelu(x) * 2 + 1, 0.5, training=True)

    told: list[Outcome] = []
    x = torch.randn(32, 32, requires_grad=True)
    result = compiled(Dropped(), told)(x)
    (grad,) = torch.autograd.grad(result.sum(), x)
    return {"agrees": torch.equal(result == 0, grad == 0), "dropped": float((grad == 0).sum())}


def _saved(model: nn.Module, call: Callable[..., Any], *given: Any) -> int:
    """Bytes that a step keeps for its backward pass, of parameters and inputs none."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *given)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(*given)
    return sum(kept.values())


def what_is_saved() -> Facts:
    """Bytes saved for the backward pass with our kernels and without."""
    found: Facts = {}
    given = tokens()
    for name in ("ours", "theirs"):
        torch.manual_seed(0)
        model, told = Gated(), list[Outcome]()
        none = mock.patch.object(backend, "substitute", return_value=[])
        with none if name == "theirs" else mock.patch.dict(os.environ, {}):
            found[name] = _saved(model, compiled(model, told), *given)
            found[f"{name} taken"] = sum(len(outcome.taken) for outcome in told)
    return found


def a_fault_in_the_backward_pass() -> Facts:
    """Costs the backward pass its kernels, and the forward pass none."""
    model, real, told = Gated(), backend.record, list[Outcome]()
    calls: list[int] = []

    def broken(graph: torch.fx.GraphModule) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the analysis is out")
        return real(graph)

    with (
        mock.patch.object(backend, "record", broken),
        mock.patch.dict(os.environ, {"FUSION_ADVISOR_STRICT": "0"}),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        facts = worst(model, compiled(model, told), *tokens())
    ours = [str(each.message) for each in warned if "fusion_advisor" in str(each.message)]
    return {**facts, **said(told), "warned": ours}


def an_inner_function() -> Facts:
    def inner(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return module.forward

    return run(Gated(), *tokens(), inner=inner)


def kernels_of_a_step_are_counted() -> Facts:
    """Results of `apply` hold both passes of a model."""
    import fusion_advisor as fa

    model = Gated()
    applied = fa.apply(model, inner="eager")
    given = tokens()
    model(*given).backward()
    return {"kernels": dict(applied.kernels), "share": applied.share, "text": str(applied)}


SCENARIOS = (
    a_language_model, through_inductor, a_block_that_is_computed_again, sizes,
    statistics_of_a_batch, dropout, what_is_saved, a_fault_in_the_backward_pass,
    an_inner_function, kernels_of_a_step_are_counted,
)  # fmt: skip

if __name__ == "__main__":
    report(SCENARIOS, sys.argv[1:])
