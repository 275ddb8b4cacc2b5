"""`--level framework`: PyTorch's own op in place of the statements that compute the same."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.sourcepatch.editing.rewrite import KernelCall, NotPlaced
from fusion_advisor.sourcepatch.equivalence import missing_launch
from fusion_advisor.workflows.patch import Patched, patch_model

from .in_process import captured
from .spawned import run_script

MODEL = """
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d))
        self.bias = nn.Parameter(torch.rand(d))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.weight + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin = Norm(96), nn.Linear(96, 64)

    def forward(self, x):
        x = self.lin(self.norm(x))
        # of each row
        x = x - x.max(dim=-1, keepdim=True)[0]
        e = torch.exp(x)
        p = e / e.sum(dim=-1, keepdim=True)
        return p @ self.lin.weight


def get_inputs():
    return [torch.rand(300, 96)]
"""


def made(
    folder: Path, text: str, *, verify: bool, rules: tuple[Path, ...] = (), model_new: bool = False
) -> Patched:
    file = folder / "model.py"
    file.write_text(text)
    request = Request(str(file), device="h200", verify=verify, compile=False, rules=rules)
    return patch_model(
        request, folder.resolve(), captured=captured, operators=True, model_new=model_new
    )


def test_statements_become_the_op_that_computes_the_same(tmp_path: Path) -> None:
    patch = made(tmp_path, MODEL, verify=True)
    assert patch.wrong == {}
    (text,) = patch.patch.after.values()
    shape = "(x.shape[-1],)"
    line = f"return torch.nn.functional.layer_norm(x, {shape}, self.weight, self.bias, 1e-05)"
    assert line in text
    assert "p = torch.nn.functional.softmax(x, dim=-1)" in text
    assert "# fusion-advisor: softmax, 5 kernels in one of PyTorch's: " in text
    assert "dtype" not in text, "each is as exact as the statements in every dtype"
    assert "fused_" not in text, "no kernels"
    _computes_the_same(tmp_path, text, "Model")


@pytest.mark.deep
def test_a_class_of_its_own_has_the_ops_too(tmp_path: Path) -> None:
    patch = made(tmp_path, MODEL, verify=True, model_new=True)
    assert patch.wrong == {}
    assert "triton" not in patch.model_new
    _computes_the_same(tmp_path, patch.model_new, "ModelNew")


def _computes_the_same(folder: Path, text: str, name: str) -> None:
    (folder / "patched.py").write_text(text)
    run = f"""
        import torch
        import model
        from patched import {name}
        for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            torch.manual_seed(0)
            one = model.Model().to(dtype)
            x = torch.randn(37, 96, dtype=dtype)
            one(x).sum().backward()
            two = {name}().to(dtype)
            two.load_state_dict(one.state_dict())
            torch.testing.assert_close(two(x), one(x), atol=near, rtol=near)
            two(x).sum().backward()
            gradients = two.norm.weight.grad, one.norm.weight.grad
            torch.testing.assert_close(*gradients, atol=20 * near, rtol=20 * near)
    """
    run_script(textwrap.dedent(run), folder=folder)


@pytest.mark.deep
def test_without_a_check_other_dtypes_keep_the_statements(tmp_path: Path) -> None:
    patch = made(tmp_path, MODEL, verify=False)
    (text,) = patch.patch.after.values()
    assert patch.wrong == {}
    assert text.count("x.dtype != torch.float32") == 2


@pytest.mark.deep
def test_an_op_that_is_less_exact_is_not_put(tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    off = "1.00001 * torch.nn.functional.softmax(x, dim=-1)"
    rules.write_text(f'[patterns.softmax]\nframework = "{off}"\n')
    patch = made(tmp_path, MODEL, verify=True, rules=(rules,))
    (text,) = patch.patch.after.values()
    assert "softmax" not in text
    assert "layer_norm" in text
    assert [*patch.patch.refused.values()] == ["its PyTorch op is not proven"]


@pytest.mark.deep
def test_what_no_op_computes_is_left(tmp_path: Path) -> None:
    text = MODEL.replace("e = torch.exp(x)", "e = torch.exp(x) * torch.sigmoid(x)")
    patch = made(tmp_path, text, verify=False)
    assert [put.finding.pattern for put in patch.patch.puts] == ["layer-norm"]
    assert "no PyTorch op computes exactly this" in patch.unplaced.values()
    assert 0 < patch.saved_us < patch.free_us


def test_an_operand_is_computed_once() -> None:
    names = (("x", 1), ("weight", 0))
    call = KernelCall("", (), (), "norm(x, (x.shape[-1],), weight)", names)
    assert call.written(["self.w", "y.z"]) == "norm(y.z, (y.z.shape[-1],), self.w)"
    with pytest.raises(NotPlaced, match="computed more than once"):
        call.written(["self.w", "self.lin(x)"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("@ self", "@ -self"), ""),
        (("x = self.lin(", "x = 2 * self.lin("), ""),
        (("p @ self.lin.weight", "p"), "a result has another shape"),
        (("self.lin(self.norm(x))", "self.lin(x)"), "is not launched as it was"),
        (("p @ self.lin.weight", "(p.half() @ self.lin.weight.half()).float()"), "mm.default"),
    ],
)
def test_what_has_to_stay_is_missed(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    """More launches may be there, none less, and the results' layouts have to be the same."""

    def flow(text: str) -> Dataflow:
        (tmp_path / "model.py").write_text(text)
        graph = captured(str(tmp_path / "model.py"), Scenario())
        return dataflow(graph, load_rulebook().device("h200"))

    found = missing_launch(flow(MODEL), flow(MODEL.replace(*change)), ())
    assert why in found
    assert bool(found) == bool(why)
