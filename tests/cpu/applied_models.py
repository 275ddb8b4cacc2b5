"""What `fusion_advisor.apply` does to models and functions, in Triton's interpreter: run as a
program. Prints what each scenario saw, as JSON."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import json
import pickle
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from compiled_models import Facts, Stack  # sets Triton up for the interpreter, before torch
from torch import nn

import fusion_advisor as fa

HOW: dict[str, Any] = {"inner": "eager", "device": "h200"}


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5))


def without_examples() -> Facts:
    model, plain = Stack().eval(), Stack().eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 32)
    done = fa.apply(model, **HOW)
    before = dict(done.kernels)
    with torch.no_grad():
        right = near(model(x), plain(x))
        after = dict(done.kernels)
        wider = torch.randn(3, 7, 32)
        right = right and near(done(wider), plain(wider))
    return {
        "before": before, "after": after, "again": dict(done.kernels), "right": right,
        "share": done.share, "saved": done.saved_us, "said": str(done),
    }  # fmt: skip


class Drawing(nn.Module):
    """Draws, counts and is in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.drop, self.norm = Stack(), nn.Dropout(0.5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.stack(x))) * random.random()


def with_examples() -> Facts:
    model, x = Drawing().train(), torch.randn(2, 5, 32)
    drawn, by_torch = random.getstate(), torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = fa.apply(model, x, **HOW)
    return {
        "kernels": dict(done.kernels), "refused": dict(done.refused),
        "drawn": drawn == random.getstate() and torch.equal(by_torch, torch.get_rng_state()),
        "state": all(torch.equal(state[name], t) for name, t in model.state_dict().items()),
        "training": all(module.training for module in model.modules()),
        "gradients": torch.is_grad_enabled(),
    }  # fmt: skip


def taken_out_again() -> Facts:
    model, x = Stack().eval(), torch.randn(2, 5, 32)
    done = fa.apply(model, (x,), **HOW)
    facts: Facts = {"placed": sum(done.kernels.values()), "ran": runs_kernels(model, x)}
    fa.unapply(model)
    return {**facts, "runs": runs_kernels(model, x)}


def runs_kernels(model: nn.Module, x: torch.Tensor) -> bool:
    """Does a call of the model do something else than its classes say?"""
    with torch.no_grad():
        model(x)
    return model._compiled_call_impl is not None  # pyright: ignore[reportPrivateUsage]


def copies() -> Facts:
    model, x = Stack().eval(), torch.randn(2, 5, 32)
    done = fa.apply(model, (x,), **HOW)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    return {
        "placed": sum(done.kernels.values()), "runs": runs_kernels(model, x),
        "copied": runs_kernels(copied, x), "pickled": runs_kernels(pickled, x),
        "type": [type(each).__name__ for each in (copied, pickled)],
    }  # fmt: skip


def a_function() -> Facts:
    def function(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return torch.softmax(x.float() * scale, -1) * 2 + 1

    x = torch.randn(64, 128)
    done = fa.apply(function, [x], {"scale": 2.0}, **HOW)
    return {
        "kernels": dict(done.kernels),
        "right": near(done(x, scale=2.0), function(x, scale=2.0)),
    }


def two_models() -> Facts:
    """Each has what became of its own graphs."""
    first = fa.apply(Stack().eval(), **HOW)
    second = fa.apply(Stack().eval(), (torch.randn(2, 5, 32),), **HOW)
    return {"first": dict(first.kernels), "second": dict(second.kernels)}


def with_gradients() -> Facts:
    model = Stack()
    done = fa.apply(model, training=False, **HOW)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.randn(2, 5, 32)).sum().backward()
        model(torch.randn(3, 6, 32)).sum().backward()  # captured again, and said once
    said = [str(each.message) for each in seen if "fusion_advisor" in str(each.message)]
    return {
        "said": said,
        "kernels": dict(done.kernels), "refused": dict(done.refused), "share": done.share,
        "has": all(parameter.grad is not None for parameter in model.parameters()),
    }  # fmt: skip


def a_model_that_raises() -> Facts:
    model = Stack().eval()
    try:
        fa.apply(model, (torch.randn(2, 5, 31),), **HOW)
    except RuntimeError as error:
        said = str(error)
    return {"said": said, "runs": model._compiled_call_impl is not None}  # pyright: ignore[reportPrivateUsage]


def dry_first() -> Facts:
    """The model draws random numbers; its outcome before it has kernels, and with them."""
    model, x = Drawing().train(), torch.randn(2, 5, 32)
    found: list[fa.Applied] = []
    runs: list[bool] = []
    for dry in (True, False):
        found.append(fa.apply(model, x, dry=dry, **HOW))
        runs.append(runs_kernels(model, x))
    dry, placed = ({k: v for k, v in vars(each).items() if k != "run"} for each in found)
    return {"dry": dry, "placed": placed, "runs": runs}


def as_it_was_called() -> Facts:
    """`verify=` was of the edited statements, which are gone."""
    model, x = Stack().eval(), torch.randn(2, 5, 32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        done = fa.apply(model, (x,), {}, verify=False, **HOW)
    said = [str(each.message) for each in seen if each.category is DeprecationWarning]
    ours = [each for each in said if "fusion_advisor" in each]
    return {"said": ours, "kernels": dict(done.kernels)}


SCENARIOS: tuple[Callable[[], Facts], ...] = (
    without_examples, with_examples, taken_out_again, copies, a_function, two_models,
    with_gradients, a_model_that_raises, dry_first, as_it_was_called,
)  # fmt: skip


def main() -> None:
    found: dict[str, Facts] = {}
    for scenario in SCENARIOS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            found[scenario.__name__] = scenario()
        except Exception:  # noqa: BLE001 told of each scenario
            found[scenario.__name__] = {"raised": traceback.format_exc()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
