"""Gradients of drawn modules, with kernels in both passes on Triton's interpreter: results and
gradients are held to float64's, within twice eager's own error and a few units in the last place.

    python -m benchmarks.drawn.gradients --seed SEED [--count 40]

Each module is at small sizes; what is stored in 8 bits is not compared. A module that eager itself
cannot train here is listed with its error.
"""
# torch is partly untyped; a drawn file defines whatever it defines.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FUSION_ADVISOR_STRICT"] = "1"

import torch

from fusion_advisor.verify.references import Float64Mode
from fusion_advisor.verify.stepping import as_tuple

from .__main__ import drawn_module

_HOW = {"inner": "eager", "take_all": True, "device": "h200"}


def _trained(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An input that gradients are wanted of, where it has any."""
    if not value.is_floating_point():
        return value
    return value.detach().to(dtype or value.dtype).requires_grad_()


def _compared(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[int]:
    """The results that have gradients and more than 8 bits, by number."""
    every = as_tuple(model(*inputs))
    return [n for n, each in enumerate(every) if each.requires_grad and each.element_size() > 1]


def _step(
    call: Callable[..., Any],
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    results: Sequence[int],
) -> list[torch.Tensor | None]:
    """Some results of a step, by number, and the gradients of parameters and inputs."""
    model.zero_grad()
    for each in inputs:
        each.grad = None
    every = as_tuple(call(*inputs))
    made = [every[number] for number in results]
    generator = torch.Generator().manual_seed(1)
    weighted = [each.double() * torch.randn(each.shape, generator=generator) for each in made]
    if weighted:
        torch.stack([each.sum() for each in weighted]).sum().backward()
    wanted = [*model.parameters(), *(each for each in inputs if each.requires_grad)]
    return [*(each.detach() for each in made), *(each.grad for each in wanted)]


def _share(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> float:
    """Error against float64 as a share of what is allowed."""
    ulp = float(exact.abs().max()) * torch.finfo(eager.dtype).eps
    own = float((eager.double() - exact).abs().nan_to_num().max())
    return float((found.double() - exact).abs().nan_to_num().max()) / (2 * own + 8 * ulp + 1e-30)


def row(seed: str, number: int) -> dict[str, Any]:
    """Result for one module: kernels placed in each pass, and the worst error as a share."""
    from fusion_advisor.dynamo.backend import Outcome, fusion_advisor

    torch.compiler.reset()
    torch.manual_seed(0)
    name, file = drawn_module(seed, number, small=True)
    model = file.Model(*file.get_init_inputs()).train()
    given = file.get_inputs()
    inputs = [_trained(each) for each in given]
    try:
        wide = copy.deepcopy(model).double()
        results = _compared(model, inputs)
        with Float64Mode():  # what a module casts to float32 by itself stays wide, too
            exact = _step(wide, wide, [_trained(each, torch.float64) for each in given], results)
        eager = [x if x is None else x.clone() for x in _step(model, model, inputs, results)]
    except RuntimeError as error:
        return {"module": name, "eager": str(error).splitlines()[0]}
    told: list[Outcome] = []
    backend = partial(fusion_advisor, options=_HOW, on_outcome=told.append)
    found = _step(torch.compile(model, backend=backend), model, inputs, results)
    missing = [a is None for a in found] != [a is None for a in eager]
    shares = [
        _share(a, b, c)
        for a, b, c in zip(found, eager, exact, strict=True)
        if a is not None and b is not None and c is not None and a.numel()
    ]
    kernels = [len(outcome.taken) for outcome in told]
    return {"module": name, "missing": missing, "share": max(shares, default=0), "kernels": kernels}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", required=True)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    rows = [row(options.seed, number) for number in range(options.count)]
    wrong = [each for each in rows if each.get("missing") or each.get("share", 0) > 1]
    for each in rows:
        print(json.dumps(each))
    compared = [each for each in rows if "share" in each]
    kernels = sum(sum(each["kernels"]) for each in compared)
    print(f"{len(compared)} of {len(rows)} compared, {kernels} kernels, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
