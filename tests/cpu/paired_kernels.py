"""Kernels that train, in what traces and differentiates them, in Triton's interpreter: run as a
program, in a folder with a package `mine`. Prints what each scenario saw, as JSON."""

# torch is partly untyped, emitted files are so altogether.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, os.getcwd())

import torch
from scenarios import Facts, report
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def module(name: str) -> Any:
    return importlib.import_module(f"mine.{name}")


swiglu, reference = module("swiglu").swiglu, module("swiglu").reference
norm, by_hand = (
    getattr(module("residual_rms_norm"), n) for n in ("residual_rms_norm", "reference")
)


def fallbacks() -> dict[str, int]:
    return dict(importlib.import_module("mine.fused_runtime").fallbacks)


def inputs(rows: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, 300, dtype=dtype).requires_grad_() for _ in range(2)]


def rows(count: int = 7) -> list[Tensor]:
    return [*inputs(count), torch.linspace(0.5, 2.0, 300).requires_grad_()]


def gradients(call: Callable[..., Any], given: list[Tensor]) -> list[Tensor | None]:
    found = call(*given)
    found = found if isinstance(found, tuple) else (found,)
    weights = [torch.linspace(-1.0, 1.0, x.numel()).view(x.shape).to(x.dtype) for x in found]
    sum((x * weight).sum() for x, weight in zip(found, weights, strict=True)).backward()
    return [each.grad for each in given]


def close(one: list[Any], two: list[Any], **how: float) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(one, two, strict=True))


def eager() -> Facts:
    same = close(gradients(swiglu, inputs()), gradients(reference, inputs()))
    same = same and close(gradients(norm, rows()), gradients(by_hand, rows()))
    return {"same": same, "fallbacks": fallbacks()}


def compiled() -> Facts:
    """Each backend, sizes fixed and free: one graph without a break."""
    found: list[bool] = []
    graphs: list[int] = []
    ways = [(b, d) for b in ("eager", "aot_eager") for d in (False, True)] + [("inductor", True)]
    for backend, dynamic in ways:
        torch._dynamo.reset()
        counted: list[Any] = []

        def noted(graph: Any, given: Any, backend: str = backend, counted: Any = counted) -> Any:
            counted.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, given)

        call: Any = torch.compile(norm, fullgraph=True, dynamic=dynamic, backend=noted)
        found.append(close(gradients(call, rows()), gradients(by_hand, rows())))
        graphs.append(len(counted))
    return {"each": found, "graphs": max(graphs), "fallbacks": fallbacks()}


def checkpointed() -> Facts:
    def through(reentrant: bool) -> Callable[..., Any]:
        return lambda *given: checkpoint(norm, *given, use_reentrant=reentrant)

    plain = gradients(by_hand, rows())
    same = [close(gradients(through(each), rows()), plain) for each in (True, False)]
    return {"same": same, "fallbacks": fallbacks()}


class Normed(nn.Module):
    """A norm between two operations, or the statements that it stands for."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 300))
        self.call = call

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        normed, whole = self.call(x * 2.0, r, self.weight)
        return normed + whole.sin()


def distributed() -> Facts:
    """A model in DDP, of one process: eager and compiled."""
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    plain = Normed(by_hand)
    plain(*inputs()).sum().backward()
    same: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/it", rank=0, world_size=1)
        try:
            for compiled in (False, True):
                model = DistributedDataParallel(Normed(norm))
                call: Any = torch.compile(model, backend="aot_eager") if compiled else model
                call(*inputs()).sum().backward()
                same.append(close([model.module.weight.grad], [plain.weight.grad]))
        finally:
            dist.destroy_process_group()
    return {"same": same, "fallbacks": fallbacks()}


def spread() -> Facts:
    """A gradient that lies in memory otherwise than the result: one number for all."""
    ours, plain = inputs(), inputs()
    swiglu(*ours).sum().backward()
    reference(*plain).sum().backward()
    same = close([x.grad for x in ours], [x.grad for x in plain])
    return {"same": same, "fallbacks": fallbacks()}


def some() -> Facts:
    """A gradient that nobody asks for."""
    gate, up = inputs()
    swiglu(gate, up.detach()).sum().backward()
    other, plain = inputs()
    reference(other, plain.detach()).sum().backward()
    return {"asked": close([gate.grad], [other.grad]), "other": up.grad, "fallbacks": fallbacks()}


def without_gradients() -> Facts:
    with torch.no_grad():
        found = swiglu(*inputs())
        same = close([found], [reference(*inputs())])
    return {"same": same, "graded": found.requires_grad, "fallbacks": fallbacks()}


def exported() -> Facts:
    program = torch.export.export(Normed(norm), tuple(inputs()))
    plain, model = Normed(by_hand), program.module()
    model(*inputs()).sum().backward()
    plain(*inputs()).sum().backward()
    (weight,) = model.parameters()
    return {
        "same": close([model(*inputs())], [plain(*inputs())]),
        "gradient": close([weight.grad], [plain.weight.grad]),
    }


def in_another_dtype() -> Facts:
    """What the kernels do not serve: the statements run, and autograd sees them."""
    before = fallbacks()
    ours, plain = (gradients(f, inputs(dtype=torch.float64)) for f in (swiglu, reference))
    fell = [name for name, count in fallbacks().items() if count > before.get(name, 0)]
    return {"same": close(ours, plain), "fell": fell}


def again() -> Facts:
    """A gradient of a gradient."""
    said: list[str] = []
    for power in (1, 2):
        given = inputs()
        try:
            torch.autograd.grad(swiglu(*given).pow(power).sum(), given[0], create_graph=True)
        except RuntimeError as error:
            said.append(str(error))
    return {"said": said}


def deterministic() -> Facts:
    first, second = (gradients(norm, rows(60)) for _ in range(2))
    return {"same": all(torch.equal(a, b) for a, b in zip(first, second, strict=True))}


SCENARIOS = (
    eager, compiled, checkpointed, distributed, spread, some, without_gradients, exported,
    deterministic, again, in_another_dtype,
)  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report(SCENARIOS, sys.argv[1:])
