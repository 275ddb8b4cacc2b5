"""Models compiled with `backend="fusion_advisor"` in Triton's interpreter: run as a program, for
Triton is imported for the interpreter or not at all. Prints what each scenario saw, as JSON."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FUSION_ADVISOR_STRICT"] = "1"  # a launcher that falls back raises
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from scenarios import Facts, report
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

from fusion_advisor.dynamo import backend
from fusion_advisor.dynamo.backend import fusion_advisor, last
from fusion_advisor.verify.interpreter import install


class RMSNorm(nn.Module):
    """As Llama spells it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A pre-norm transformer block with a gated MLP."""

    def __init__(self, size: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = RMSNorm(size), RMSNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.gate, self.up = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, size))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(Block(), Block()), RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x))


class Perceptron(nn.Module):
    """Layer norm by hand, and results that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24)
        self.scale = nn.Parameter(torch.rand(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y -= y.mean(-1, keepdim=True)
        y /= (y * y).mean(-1, keepdim=True).sqrt() + 1e-5
        return self.second(torch.relu_(y * self.scale)).softmax(-1)


class Parts(nn.Module):
    """Parts of a tensor, written in place: in the graph they have the steps of the whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_zeros(x.shape[0], 8, x.shape[1])
        whole[:, 2] = torch.tanh(x.exp() * 2 + 1)
        whole[:, :, 4:8] = torch.sigmoid(x.exp() * 3)[:, None, 4:8]
        return whole


class Losses(nn.Module):
    """What CUDA runs as several kernels: some of the same operator, some in place."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = F.smooth_l1_loss(x.tanh(), y, reduction="none", beta=0.5) + F.huber_loss(x, y)
        each += F.mse_loss(x, y.tanh(), reduction="none") + x.exp().logsumexp(-1, keepdim=True)
        return each + F.mse_loss(x.tanh(), y) + F.soft_margin_loss(x, y.sign())


def compiled(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"inner": "eager", "take_all": True, **options}
    return torch.compile(model, backend=fusion_advisor, dynamic=dynamic, options=options)


def apart(model: nn.Module, found: torch.Tensor, *inputs: torch.Tensor) -> Facts:
    """The error against float64, and what eager's own and an ulp of the largest value allow."""
    with torch.no_grad():
        eager = model(*inputs)
        exact = copy.deepcopy(model).double()(*(x.double() for x in inputs))
    ulp = float(exact.abs().max()) * torch.finfo(eager.dtype).eps
    allowed = 2 * float((eager.double() - exact).abs().max()) + 2 * ulp
    same = found.shape == eager.shape and found.stride() == eager.stride()
    return {"error": float((found.double() - exact).abs().max()), "allowed": allowed, "same": same}


def seen() -> Facts:
    outcome = last()
    assert outcome is not None
    return {
        "taken": [place.name for place in outcome.taken],
        "left": [place.why for place in outcome.left],
        "why": outcome.why,
        "groups": len(outcome.report.groups) if outcome.report else None,
        "statuses": [g.kernel.status for g in outcome.report.groups] if outcome.report else [],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
    }


def run(model: nn.Module, *inputs: torch.Tensor, **how: Any) -> Facts:
    with torch.no_grad():
        found = compiled(model.eval(), **how)(*inputs)
    return {**apart(model, found, *inputs), **seen()}


# -- scenarios -------------------------------------------------------------------------------------


def transformer() -> Facts:
    return run(Stack(), torch.randn(2, 5, 32))


def transformer_in_bfloat16() -> Facts:
    """The interpreter truncates to bfloat16: right within an ulp or two, not to eager's error."""
    model, x = Stack().bfloat16(), torch.randn(2, 5, 32).bfloat16()
    facts = run(model, x)
    return {**facts, "allowed": 4 * facts["allowed"]}


def perceptron() -> Facts:
    return run(Perceptron(), torch.randn(6, 24))


def parts() -> Facts:
    return run(Parts(), torch.randn(6, 24))


def losses() -> Facts:
    return run(Losses(), torch.randn(6, 24), torch.randn(6, 24))


def operators_are_shared() -> Facts:
    """Two blocks, one operator for what they have in common."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    run(Stack(), torch.randn(2, 5, 32), inner=keep)
    ours = [str(n.target) for n in graphs[0].graph.nodes if "fusion_advisor" in str(n.target)]
    return {"calls": len(ours), "operators": len(set(ours))}


def sizes(dynamic: bool | None) -> Facts:
    model = Stack().eval()
    call = compiled(model, dynamic)
    found: list[Facts] = []
    with torch.no_grad():
        for shape in ((2, 5, 32), (3, 7, 32), (6, 4, 32), (5, 9, 32)):
            x = torch.randn(shape)
            found.append(apart(model, call(x), x))
    worst = max(found, key=lambda one: one["error"] / one["allowed"])
    return {**worst, "same": all(one["same"] for one in found), **seen()}


def sizes_found_dynamic() -> Facts:
    return sizes(None)


def sizes_said_dynamic() -> Facts:
    return sizes(True)


def numbers_made_from_sizes() -> Facts:
    class Averaged(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x / x.shape[0]).softmax(-1)
            return torch.tanh(y * 2 + 1)

    model = Averaged()
    call = compiled(model, True)
    with torch.no_grad():
        found = [apart(model, call(x), x) for x in (torch.randn(n, 8) for n in (3, 5, 9))]
    return {**max(found, key=lambda one: one["error"] / one["allowed"]), **seen()}


def rows_made_from_sizes() -> Facts:
    """The kernel would have the captured length in it."""

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            place = torch.arange(x.shape[0] * 2, dtype=x.dtype)
            return torch.exp(-place * 0.5).add(1.0).sum() + x.sum() * 0

    model = Counted()
    call = compiled(model, True)
    with torch.no_grad():
        found = [apart(model, call(x), x) for x in (torch.randn(n, 8) for n in (3, 5))]
    return {**max(found, key=lambda one: one["error"] / one["allowed"]), **seen()}


def numbers_given_by_the_caller() -> Facts:
    """A temperature that changes from call to call is no constant of a kernel."""

    def warmed(x: torch.Tensor, temperature: float) -> torch.Tensor:
        return torch.tanh(torch.sigmoid(x * temperature) + 1.0)

    call = compiled(warmed, True)
    x = torch.randn(4, 8)
    with torch.no_grad():
        off = [float((call(x, t) - warmed(x, t)).abs().max()) for t in (0.5, 0.7, 0.9, 1.1)]
    return {"off": max(off), **seen()}


def gradients_within() -> Facts:
    """Forces from an energy: the model switches gradients on where its caller has none."""

    class Forces(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = (x * x).sum(-1).rsqrt().tanh().sum()
                (force,) = torch.autograd.grad(energy, x)
            return force

    return run(Forces(), torch.randn(6, 24))


def inference_mode() -> Facts:
    model, x = Perceptron().eval(), torch.randn(6, 24)
    with torch.inference_mode():
        found = compiled(model)(x)
    return {**apart(model, found.clone(), x), **seen()}


def constants() -> Facts:
    """Tensors that the graph itself holds, through Inductor too."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.dtype)
            return torch.tanh(y + 1).softmax(-1)

    return run(Scaled(), torch.randn(3, 4), inner="inductor")


def autocast() -> Facts:
    """Casts are in the graph, so that kernels have them too."""
    model, x = Stack().eval(), torch.randn(2, 5, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
        found = compiled(model)(x)
    off = float((found - eager).abs().max() / eager.abs().max())
    return {"off": off, "dtype": found.dtype == eager.dtype, **seen()}


def dropout() -> Facts:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.gelu(x) * 2 + 1, 0.5, training=True)

    with torch.no_grad():
        found = compiled(Dropped())(torch.randn(64, 64))
    return {"dropped": float((found == 0).float().mean()), **seen()}


def state_written_in_place() -> Facts:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(8))
            self.norm = RMSNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x + self.calls)
            self.calls.add_(1)
            return y + self.calls

    model, x = Counting(), torch.randn(3, 8)
    plain = copy.deepcopy(model)
    call = compiled(model)
    with torch.no_grad():
        off = [float((call(x) - plain(x)).abs().max()) for _ in range(3)]
    return {"off": max(off), "calls": float(model.calls[0]), **seen()}


def result_in_a_written_input() -> Facts:
    """The caller may go on writing through what it gets: that is no copy. It gets the input itself,
    or a part of it, wherever the input lies in its memory."""

    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        return x, torch.tanh(x.exp() + 1)

    def scaled_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        return x[1:, 1], torch.tanh(x.exp() + 1)

    facts: Facts = {"x": [], "said": [], "taken": []}
    with torch.no_grad(), mock.patch.dict(os.environ, {"FUSION_ADVISOR_STRICT": "0"}):
        for function in (scaled, scaled_part):
            run = compiled(function)
            for start in (0, 2):
                whole = torch.ones(6)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    result, _ = run(whole[start : start + 4].view(2, 2))
                result.add_(1)
                facts["x"].append(whole.tolist())
                facts["said"].append([str(w.message) for w in said])
                facts["taken"].append(seen()["taken"])
    return facts


def a_fault_of_ours() -> Facts:
    model, x = Stack().eval(), torch.randn(2, 5, 32)

    def broken(*_: object) -> None:
        raise RuntimeError("the analysis is out")

    facts: Facts = {}
    with mock.patch.object(backend, "lower", broken), torch.no_grad():
        try:
            compiled(model)(x)
        except BackendCompilerFailed as error:
            facts["strict"] = str(error)
        with mock.patch.dict(os.environ, {"FUSION_ADVISOR_STRICT": "0"}):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = compiled(model)(x)
            facts["said"] = [str(w.message) for w in said]
    return {**facts, "equal": torch.equal(found, model(x).detach()), **seen()}


def nothing_that_wins() -> Facts:
    """Small tensors: the graph goes to the inner compiler as Dynamo made it."""
    given: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        given.append(module)
        return module.forward

    facts = run(Stack(), torch.randn(2, 5, 32), take_all=False, inner=keep)
    untouched = "torch._C._nn.linear" in given[0].code
    return {**facts, "untouched": untouched}


def no_gpu() -> Facts:
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"}):
        return run(Perceptron(), torch.randn(6, 24))


def logged() -> Facts:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("fusion_advisor")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run(Perceptron(), torch.randn(6, 24))
    finally:
        logger.removeHandler(handler)
    kept: Any = vars(records[-1])["outcome"]
    return {
        "text": records[-1].getMessage(),
        "level": records[-1].levelname,
        "kept": kept is last(),
    }


def a_wrong_option() -> Facts:
    try:
        with torch.no_grad():
            compiled(Perceptron(), inner="inductr")(torch.randn(6, 24))
    except BackendCompilerFailed as error:
        return {"raised": str(error).splitlines()[1]}
    return {}


class Padded(nn.Module):
    """Attention that hides padding and what comes later, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = RMSNorm(32), nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        place = torch.arange(length)
        seen = (place <= place[:, None]) & kept[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def padding() -> Facts:
    """Of the two graphs each is compiled as it is first asked for, in either order. Of each, the
    number of its inputs that a CUDA graph need not copy."""

    def inner(module: torch.fx.GraphModule, given: Any, noted: Any) -> Callable[..., Any]:
        return compile_fx(module, given, inner_compile=noted)

    return padded_or_not(lambda noted: partial(inner, noted=noted))


def padding_asked_within() -> Facts:
    """Under Inductor the graph without padding is cut before its attention."""

    def inner(noted: Any) -> str:
        compiling.compile_fx = lambda module, given, **_: compile_fx(
            module, given, inner_compile=noted
        )
        return "inductor"

    compiling: Any = importlib.import_module("torch._inductor.compile_fx")
    try:
        return padded_or_not(inner)
    finally:
        compiling.compile_fx = compile_fx


def padded_or_not(inner: Callable[[Any], Any]) -> Facts:
    model, facts = Padded().eval(), Facts()
    stay: list[int] = []

    def noted(graph: torch.fx.GraphModule, given: Any, **how: Any) -> Callable[..., Any]:
        stay.append(len(how["static_input_idxs"]))
        return make_boxed_func(graph.forward)

    whole, holes = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
    holes[1, 4:] = 0
    with TemporaryDirectory() as folder:
        rules = Path(folder) / "read.toml"
        worth = 'worth = { value = 1e-12, unit = "x", source = "test" }'
        rules.write_text(f"[rewrites.needless-mask.limits]\n{worth}\n")
        for name, order in (("whole", (whole, holes, whole)), ("holes", (holes, whole, holes))):
            torch.compiler.reset()
            outcomes: list[backend.Outcome] = []
            options = {"device": "h200", "take_all": True, "inner": inner(noted), "rules": rules}
            stay.clear()
            call = torch.compile(
                model, backend=partial(fusion_advisor, options=options, on_outcome=outcomes.append)
            )
            counts: list[int] = []
            near = True
            for kept in order:
                x = torch.randn(2, 6, 32)
                with torch.no_grad():
                    near = near and torch.allclose(call(x, kept), model(x, kept), 1e-4, 1e-5)
                counts.append(len(outcomes))
            rewritten = [len(each.rewrites) for each in outcomes]
            taken = [len(each.taken) for each in outcomes]
            facts[name] = {
                "near": near, "counts": counts, "rewritten": rewritten, "taken": taken,
                "stay": [*stay],
            }  # fmt: skip
    return facts


def inductor() -> Facts:
    """Inductor's own code for the CPU around our kernels, for all sizes."""
    model = Stack().eval()
    call = compiled(model, True, inner="inductor")
    with torch.no_grad():
        found = [apart(model, call(x), x) for x in (torch.randn(n, n + 2, 32) for n in (2, 5))]
    return {**max(found, key=lambda one: one["error"] / one["allowed"]), **seen()}


def views_of_what_inductor_lays_otherwise() -> Facts:
    """As keys that are appended to an empty cache: Inductor's decomposition of `cat` keeps the
    strides of the one part that has elements, eager's result is dense."""

    def attended(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = (x @ weight).view(4, 64, 6, 16).transpose(1, 2)
        keys = torch.cat([torch.empty(4, 6, 0, 16), heads], dim=-2)
        scores = (heads @ (keys.transpose(-1, -2) * 1.5)).softmax(-1)
        return F.gelu(scores) * scores

    x, weight = torch.randn(4, 64, 96), torch.randn(96, 96)
    with torch.no_grad():
        found = compiled(attended, inner="inductor")(x, weight)
        near = torch.allclose(found, attended(x, weight), 1e-4, 1e-5)
    return {"near": near, **seen()}


SCENARIOS: tuple[Callable[[], Facts], ...] = (
    transformer, transformer_in_bfloat16, perceptron, parts, losses, operators_are_shared,
    sizes_found_dynamic, sizes_said_dynamic, numbers_made_from_sizes, rows_made_from_sizes,
    numbers_given_by_the_caller, gradients_within, inference_mode, autocast,
    dropout, state_written_in_place, result_in_a_written_input, a_fault_of_ours,
    nothing_that_wins, no_gpu, logged, a_wrong_option, padding, padding_asked_within,
    inductor,
)  # fmt: skip
LONG: tuple[Callable[[], Facts], ...] = (constants, views_of_what_inductor_lays_otherwise)
"""Further ones that Inductor compiles, which only the deep tests ask for."""


def main() -> None:
    install()
    report(LONG if sys.argv[1:] == ["long"] else SCENARIOS)


if __name__ == "__main__":
    main()
