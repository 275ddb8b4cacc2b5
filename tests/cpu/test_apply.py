"""`fusion_advisor.apply`: the model's groups run as kernels in memory, all else stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.norm, self.drop = Norm(d), nn.Dropout(p)
        self.gate, self.up, self.down = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, h):
        x = x + h
        y = self.norm(x)
        z = F.silu(self.gate(y)) * self.up(y)
        return x, self.drop(self.down(z))


class Model(nn.Module):
    def __init__(self, d=96, p=0.0):
        super().__init__()
        self.layers = nn.ModuleList([Block(d, p), Block(d, p)])

    def forward(self, x):
        h = torch.sin(x) * 2
        for layer in self.layers:
            x, h = layer(x, h)
        return x + h
"""

HEAD = """
import torch
from fusion_advisor.interpreting import install
install()
import fusion_advisor
from kept import Model, Norm

torch.manual_seed(0)
model = Model().eval()
plain = Model().eval()
plain.load_state_dict(model.state_dict())
keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
x = torch.randn(40, 96)
done = fusion_advisor.apply(model, (x,), device="h200", verify=False)


def fallbacks():
    launchers = vars(model.layers[0].forward.__globals__["fused_kernels_1"])
    return sum(launcher.__globals__["fallbacks"] for launcher in launchers.values())


def same(a, b):
    with torch.no_grad():
        torch.testing.assert_close(a(x), b(x), rtol=1e-4, atol=1e-5)
"""


def run(folder: Path, script: str) -> None:
    """In a process of its own, whose Triton is the interpreter."""
    (folder / "kept.py").write_text(MODEL)
    text = HEAD + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_kernels_run_and_all_else_stays(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        assert sum(done.kernels.values()) >= 4, done
        assert type(model.layers[0]).__name__ == "Block"
        assert isinstance(model.layers[0].norm, Norm)
        assert list(model.state_dict()) == keys
        assert [id(p) for p in model.parameters()] == parameters
        same(model, plain)
        x = torch.randn(7, 96)
        same(model, plain)
        assert fallbacks() == 0
        """,
    )


def test_what_the_kernels_do_not_serve(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        model.train(), plain.train()
        a, b = model(x).sum(), plain(x).sum()
        a.backward(), b.backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        model.eval(), plain.eval()
        before = fallbacks()
        for dtype in (torch.bfloat16, torch.float64):
            model.to(dtype), plain.to(dtype)
            x = x.to(dtype)
            with torch.no_grad():
                assert torch.equal(model(x), plain(x)), dtype
        assert fallbacks() == before, "the original statements run, not a launcher's reference"
        """,
    )


def test_hooks_copies_and_pickles(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import copy, io, pickle
        seen = []
        for m in (model, plain):
            m.layers[0].norm.register_forward_hook(lambda *_: seen.append("norm"))
            m.layers[1].register_forward_hook(lambda *_: seen.append("block"))
        same(model, plain)
        assert seen == ["norm", "block"] * 2
        for m in (model, plain):
            m.layers[0].norm._forward_hooks.clear()
            m.layers[1]._forward_hooks.clear()
        twin = copy.deepcopy(model)
        assert type(twin.layers[0]) is type(model.layers[0])
        assert twin.layers[0].norm.weight is not model.layers[0].norm.weight
        same(twin, plain)
        back = pickle.loads(pickle.dumps(model))
        import kept
        assert type(back.layers[0]) is kept.Block
        same(back, plain)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        same(torch.load(buffer, weights_only=False), plain)
        same(torch.nn.DataParallel(model), plain)
        """,
    )


def test_the_module_is_there_without_torch() -> None:
    """Importing the package costs nothing until `apply` is asked for."""
    code = """
        import sys, fusion_advisor
        assert "torch" not in sys.modules
        assert callable(fusion_advisor.apply) and callable(fusion_advisor.apply)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
