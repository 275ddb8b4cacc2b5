"""`fusion_advisor.apply(dry=True)` and `fusion-advisor apply`: what they say, and that they leave
everything as it was. test_apply holds a dry run to a real one."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusion_advisor as fa
from fusion_advisor.dynamo.backend import Outcome, fusion_advisor
from fusion_advisor.support.errors import CaptureError, UsageError

from . import spawned

HOW: dict[str, Any] = {"inner": "eager", "device": "h200", "dry": True}

MODEL = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        assert x.shape[0] != 7
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)


def get_inputs():
    return [torch.randn(1024, 4096)]
"""
BRANCHES = """
import torch
from torch.nn.attention.flex_attention import flex_attention


class Model(torch.nn.Module):
    def forward(self, x, flag):
        x = torch.cond(flag.sum() > 0, torch.sin, torch.cos, (x,))
        y = torch.sigmoid(x * 2) + x
        y = flex_attention(y, y, y)
        return torch.sigmoid(y) * y


def get_inputs():
    return [torch.randn(4, 8, 1024, 64), torch.ones(2)]
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip


class Counting(nn.Module):
    """Writes a buffer, draws and has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = torch.tanh(x * self.scale + 1).softmax(-1)
        return self.last(y) * random.random() + torch.rand(256)


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_everything_stays_as_it_was() -> None:
    model, x = Counting(), torch.randn(64, 256)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn, by_torch = random.getstate(), torch.get_rng_state()
    would = fa.apply(model, x, **HOW)
    assert would.kernels
    assert drawn == random.getstate()
    assert torch.equal(by_torch, torch.get_rng_state())
    assert all(torch.equal(kept[name], each) for name, each in model.state_dict().items())
    assert model._compiled_call_impl is None
    assert model.training
    assert "TRITON_INTERPRET" not in os.environ


def test_a_function_has_its_kernels() -> None:
    def scaled(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return softmax(x * scale)

    would = fa.apply(scaled, torch.empty(64, 256), {"scale": 2.0}, **HOW)
    assert (dict(would.kernels), would.refused, would.share) == ({"mul_softmax": 1}, {}, 1)


def test_symbolic_sizes_are_told() -> None:
    """A kernel serves every size; what follows from a size changes from call to call."""

    def averaged(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(softmax(x) @ x.T / x.shape[0])

    would = fa.apply(averaged, torch.empty(64, 256), dynamic=True, **HOW)
    assert would.kernels == {"softmax": 1}
    (why,) = would.refused.values()
    assert "computes with s" in why


def test_a_product_of_more_tensors_than_an_operator_takes_is_two_kernels() -> None:
    def combined(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        for each in more:
            x = x * each
        return softmax(x @ x.T)

    would = fa.apply(combined, [torch.empty(256, 256) for _ in range(70)], **HOW)
    assert would.kernels == {"mul": 1, "mul_2": 1, "softmax": 1}
    assert not would.refused


class Dropped(nn.Module):
    """A residual norm behind dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm = nn.Linear(256, 256), nn.Dropout(0.1), nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.drop(self.up(x)))


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_that_is_off_launches_nothing(grad: bool) -> None:
    """As in eager. What torch's tracers make of it, a copy, would be saved by a kernel that joins
    it to what no kernel is needed for."""
    told: list[Outcome] = []
    options = {"inner": "eager", "device": "h200"}
    backend = partial(fusion_advisor, dry=True, options=options, on_outcome=told.append)
    with torch.set_grad_enabled(grad):
        torch.compile(Dropped().eval(), backend=backend)(torch.empty(64, 256))
    launched = [node.op for node in told[0].report.nodes] if told[0].report else []
    assert "aten.addmm.default" in launched
    assert "aten.clone.default" not in launched


def test_higher_order_operators_are_called_on_fake_tensors(folder: Path) -> None:
    """torch looks for the rule of a mode by its class, and the dry run's is its own."""
    (folder / "branches.py").write_text(BRANCHES)
    done = spawned.command("apply", "branches.py", "--inner", "eager", "--json", "-", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"].keys() >= {"mul_sigmoid_add", "silu"}


class Casting(nn.Module):
    """Casts a part of itself as it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.last.to(torch.bfloat16)
        return torch.sigmoid(self.last(x)) * 2 + 1


def test_a_model_may_cast_itself() -> None:
    would = fa.apply(Casting(), torch.empty(8, 64, dtype=torch.bfloat16), **HOW)
    assert would.kernels == {"sigmoid_mul_add": 1}


@pytest.mark.parametrize("asked", [lambda x: x.max().item(), torch.nonzero], ids=["number", "size"])
def test_what_only_data_tells_is_one_line(asked: Callable[[torch.Tensor], Any]) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return softmax(x) + torch.as_tensor(asked(x)).sum()

    with pytest.raises(CaptureError, match=r"test_dry_run.py:\d+: .* that is in a tensor"):
        fa.apply(scaled, torch.empty(64, 256), **HOW)


def test_an_exception_of_the_model_is_the_callers() -> None:
    with pytest.raises(RuntimeError, match=r"\[4, 9\]|4x9"):
        fa.apply(nn.Linear(8, 8), torch.empty(4, 9), **HOW)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("models")
    (here / "model.py").write_text(MODEL)
    (here / "config.json").write_text(json.dumps(LLAMA))
    return here


def test_a_named_model_is_told_by_text_and_json(folder: Path) -> None:
    done = spawned.command("apply", "model.py", "--inner", "eager", "--json", "x.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assumed, said, kernel = done.stderr.splitlines()
    assert assumed == "assumed: device=h200 (the default); mode=eval; dtype as the model has it"
    assert said.endswith("that analysis accepts (100 %)")
    assert kernel == "  softmax x1"
    found = json.loads((folder / "x.json").read_text())
    assert (found["kernels"], found["refused"], found["share"]) == ({"softmax": 1}, {}, 1)


@pytest.mark.parametrize("phase", ["prefill", pytest.param("decode", marks=pytest.mark.deep)])
def test_phases_of_a_config_are_run(folder: Path, phase: str) -> None:
    words = ("--phase", phase, "--batch", "2", "--dtype", "bf16", "--inner", "eager", "--json", "-")
    done = spawned.command("apply", "hf:config.json", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["share"] == 1
    assert found["kernels"]["swiglu"] == 2


FLAUBERT = {
    "model_type": "flaubert", "architectures": ["FlaubertWithLMHeadModel"], "emb_dim": 64,
    "n_layers": 1, "n_heads": 4, "vocab_size": 128,
}  # fmt: skip


def test_a_model_may_ask_how_long_its_text_is(folder: Path) -> None:
    (folder / "flaubert.json").write_text(json.dumps(FLAUBERT))
    done = spawned.command(
        "apply", "hf:flaubert.json", "--inner", "eager", "--json", "-", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["share"] == 1


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("model.py", "--mode", "train"), 2, "--mode train: kernels run without gradients"),
        (("model.py", "--autocast", "bf16"), 2, "--autocast: casts differ"),
        (("model.py", "--phase", "decode"), 2, "phase decode: only for hf: models"),
        (("model.py", "--inner", "none"), 2, "--inner 'none': expected eager or inductor"),
        (("nowhere.py",), 2, "nowhere.py: no such file"),
        (("model.py", "--batch", "7"), 3, "model.py:7: running model.py raised AssertionError"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path, words: tuple[str, ...], code: int, line: str
) -> None:
    done = spawned.command("apply", *words, cwd=folder)
    assert done.returncode == code
    (said,) = done.stderr.splitlines()
    assert said.startswith("fusion-advisor: error: ")
    assert line in said


def test_several_inputs_go_in_a_tuple() -> None:
    x: Any = torch.empty(8, 64)
    with pytest.raises(UsageError, match="example_kwargs is a Tensor; several inputs are a tuple"):
        fa.apply(lambda x, y: x + y, x, x, **HOW)


@pytest.mark.parametrize("form", ["divided", "masked", "multiplied", "not scaled", "with a sink"])
def test_attention_that_is_written_out_is_inductors_where_it_has_one_operator(form: str) -> None:
    """Inductor has one for the first two, unless the softmax is a kernel of ours."""

    def attention(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = q @ q.transpose(-1, -2)
        if form == "divided":
            return (scores / 8).softmax(-1) @ q
        if form == "masked":
            return (scores / 8 + mask).softmax(-1) @ q
        if form == "multiplied":
            return (scores * 0.125 + mask).softmax(-1) @ q
        if form == "not scaled":
            return (scores + mask).softmax(-1) @ q
        scores = torch.cat([scores, q[:, :, :1, :1].expand(2, 24, 4096, 1)], -1)
        return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ q

    q = torch.empty(2, 24, 4096, 64, dtype=torch.bfloat16)
    mask = torch.empty(2, 1, 4096, 4096, dtype=torch.bfloat16)
    would = fa.apply(attention, (q, mask), device="h200", dry=True)
    assert any("softmax" in name for name in would.kernels) == (form not in ("divided", "masked"))
