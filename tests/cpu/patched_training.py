"""A patched model in training, beside the original, in Triton's interpreter: run as a program, in a
folder with both. Prints what each scenario saw, as JSON."""

# torch is partly untyped, a model's file is so altogether.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FUSION_ADVISOR_STRICT"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, os.getcwd())

import torch
from scenarios import Facts, report
from torch import Tensor

from fusion_advisor.verify.launch_counter import counted

patched, original = (importlib.import_module(name) for name in ("model", "original"))
runtime = importlib.import_module("fused_model.fused_runtime")


def inputs(dtype: torch.dtype, trained: bool = True) -> list[Tensor]:
    torch.manual_seed(1)
    floats = [torch.randn(5, 256).to(dtype).requires_grad_(trained) for _ in range(2)]
    return [*floats, torch.randint(0, 500, (5,))]


def models(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Both models with the same weights: the patched one, and the original in a dtype."""
    torch.manual_seed(0)
    ours, theirs = patched.Model().train(), original.Model().train()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs.to(dtype)


def step(model: Any, given: list[Tensor]) -> list[Tensor | None]:
    """The loss and the gradients of a step."""
    torch.manual_seed(2)  # of dropout
    loss = model(*given)
    loss.backward()
    return [loss.detach(), *(x.grad for x in [*model.parameters(), *given[:2]])]


def close(one: list[Tensor | None], two: list[Tensor | None], by: float = 1e-5) -> bool:
    if [each is None for each in one] != [each is None for each in two]:
        return False
    pairs = zip(one, two, strict=True)
    return all(
        torch.allclose(a.double(), b.double(), rtol=by, atol=by * float(b.abs().max()))
        for a, b in pairs
        if a is not None and b is not None
    )


def trained() -> Facts:
    ours, theirs = models(torch.float64)
    with counted() as launches:
        found = step(ours, inputs(torch.float32))
    same = close(found, step(theirs, inputs(torch.float64)))
    return {"same": same, "fallbacks": dict(runtime.fallbacks), "launches": passes(launches)}


def passes(launches: Any) -> int:
    """Launchers of a pass that launched anything: a kernel's name begins with its launcher's."""
    return len({name.partition("_kernel")[0] for name in launches})


def without_gradients() -> Facts:
    ours, theirs = (model.eval() for model in models(torch.float64))
    with torch.no_grad(), counted() as launches:
        found = ours(*inputs(torch.float32))
        same = close([found], [theirs(*inputs(torch.float64))])
    return {"same": same, "fallbacks": dict(runtime.fallbacks), "launches": passes(launches)}


def inputs_that_need_none() -> Facts:
    ours, theirs = models(torch.float64)
    with counted() as launches:
        found = step(ours, inputs(torch.float32, False))
    same = close(found, step(theirs, inputs(torch.float64, False)))
    return {"same": same, "fallbacks": dict(runtime.fallbacks), "launches": passes(launches)}


def frozen() -> Facts:
    """A weight that is not trained any more."""
    ours, theirs = models(torch.float64)
    for model in (ours, theirs):
        model.norm.weight.requires_grad_(False)
    found = step(ours, inputs(torch.float32))
    same = close(found, step(theirs, inputs(torch.float64)))
    none = ours.norm.weight.grad is None
    return {"same": same, "none": none, "fallbacks": dict(runtime.fallbacks)}


def under_autocast() -> Facts:
    """What the kernels were not made for: the statements run, with the gradients that they have."""
    ours, theirs = models()
    os.environ["FUSION_ADVISOR_STRICT"] = "0"
    found: list[list[Tensor | None]] = []
    for model in (ours, theirs):
        given = inputs(torch.float32)
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*given)
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in [*model.parameters(), *given[:2]])])
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    return {"same": close(*found, by=1e-2)}


def twice() -> Facts:
    """A gradient of a gradient, which no kernel makes."""
    ours, _ = models()
    given = inputs(torch.float32)
    try:
        torch.autograd.grad(ours(*given), given[0], create_graph=True)
    except RuntimeError as error:
        return {"said": "its gradients have none (create_graph=True)" in str(error)}
    return {"said": False}


SCENARIOS = (trained, without_gradients, inputs_that_need_none, frozen, twice, under_autocast)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report(SCENARIOS, sys.argv[1:])
