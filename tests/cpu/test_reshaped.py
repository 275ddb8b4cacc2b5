"""Results that are copied: by their own expression into another shape, where the kernel writes what
that gives, and by a product that takes them, where it writes what that copies."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from .spawned import run_script
from .test_patch import changed, made

pytestmark = pytest.mark.usefixtures("ways")

MODEL = """
    from einops import rearrange

    class Model(nn.Module):
        def __init__(self, heads=8):
            super().__init__()
            self.up, self.gate, self.out = (nn.Linear(512, 512) for _ in range(3))
            self.mix = nn.Parameter(torch.ones(heads, 512 // heads, 512 // heads) * 0.1)
            self.heads = heads

        def forward(self, x):
            b, t, d = x.shape
            y = self.up(x).view(b, t, self.heads, -1).transpose(1, 2)
            g = self.gate(x).view(b, t, self.heads, -1).transpose(1, 2)
            y = y @ self.mix
            {}
            return self.out(y)
"""
RUN = """
    import torch
    from fusion_advisor.verify.interpreter import install
    install()
    import original, model
    torch.manual_seed(0)
    for heads in (8, 4, 1):
        one, two = original.Model(heads).eval(), model.Model(heads).eval()
        two.load_state_dict(one.state_dict())
        for shape in ((3, 33), (1, 33), (3, 1), (1, 1)):
            x = torch.randn(*shape, 512)
            with torch.no_grad():
                made, known = two(x), one(x)
            assert made.stride() == known.stride()
            torch.testing.assert_close(made, known)
    import fused_model
    assert not fused_model.fused_runtime.fallbacks
"""
WAYS = {
    "reshape": "y = y * torch.sigmoid(g)\n            y = y.transpose(1, 2).reshape(b, t, d)",
    "in one": "y = (y * torch.sigmoid(g)).transpose(1, 2).reshape(b, t, -1)",
    "flatten": "y = (y * torch.sigmoid(g)).transpose(1, 2).flatten(2)",
    "rearrange": "y = rearrange(y * torch.sigmoid(g), 'b h t c -> b t (h c)')",
}


PRODUCT = """
    class Model(nn.Module):
        def __init__(self, heads=8):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512)
            self.heads = heads

        def forward(self, x):
            b, t, d = x.shape
            q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
            k = self.k(x).view(b, t, self.heads, -1).transpose(1, 2)
            {}
            y = (s @ self.out(x).view(b, t, self.heads, -1).transpose(1, 2)) + s.mean()
            return self.out(y.transpose(1, 2).reshape(b, t, d))
"""
PRODUCTS = {
    "matmul": """
            q, k = torch.tanh(q) * 2.0, torch.sigmoid(k) * 0.5
            s = torch.matmul(q, k.transpose(-1, -2))""",
    "operator": """
            q = torch.tanh(q) * 2.0
            s = q @ (torch.sigmoid(k) * 0.5).mT""",
    "einsum": """
            q = torch.tanh(q) * 2.0
            s = torch.einsum("bhid,bhjd->bhij", q, k)""",
    "read once more": """
            q = torch.tanh(q) * 2.0
            k = torch.sigmoid(k) * 0.5
            s = torch.matmul(q, k.transpose(-1, -2)) + q.mean(-1, keepdim=True)""",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", PRODUCTS)
def test_the_copy_that_a_product_makes_is_the_kernels(way: str, tmp_path: Path) -> None:
    """Where nothing else reads what is copied: of that the strides would be others. What einsum
    copies has one more dimension, of one element."""
    patch = made(tmp_path, PRODUCT.format(PRODUCTS[way]), shape="16, 512, 512", resized=True)
    text = changed(patch)
    assert "torch.tanh(q)" not in text
    assert "torch.sigmoid(k)" not in text
    texts = [t for path, t in patch.patch.after.items() if path.parent.name == "fused_model"]
    copies = sum("copy_out" in text for text in texts)  # another is of the reshape behind it
    assert copies == {"matmul": 2, "operator": 2, "einsum": 1, "read once more": 1}[way]
    (tmp_path / "original.py").write_text((tmp_path / "model.py").read_text())
    applied = subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path)
    assert applied.returncode == 0
    rounded = "(made, known, rtol=1e-4, atol=1e-4)"  # a product of rows that lie otherwise
    run_script(textwrap.dedent(RUN).replace("(made, known)", rounded), folder=tmp_path)


def test_a_linear_layer_is_another_product_of_rows_that_lie_together(tmp_path: Path) -> None:
    """So it is left to copy them."""
    body = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.out = nn.Conv2d(64, 64, 1), nn.Linear(64, 64)

        def forward(self, x):
            x = self.up(x).permute(0, 2, 3, 1)
            x = torch.tanh(x) * 2.0
            return self.out(x)
    """
    text = changed(made(tmp_path, body, shape="16, 64, 32, 32", resized=True))
    assert "x = fused_model.tanh_mul(x)" in text
    assert "return self.out(x)" in text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_the_copy_of_of_a_reshape_is_the_kernels(way: str, tmp_path: Path) -> None:
    patch = made(tmp_path, MODEL.format(WAYS[way]), shape="16, 512, 512", resized=True)
    text = changed(patch)
    assert "torch.sigmoid(g)" not in text
    assert not any(each in text for each in ("reshape(", "flatten(", "rearrange(y"))
    (tmp_path / "original.py").write_text((tmp_path / "model.py").read_text())
    applied = subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path)
    assert applied.returncode == 0
    run_script(textwrap.dedent(RUN), folder=tmp_path)
