"""Methods that compute a product and a part of a group: they are opened beside the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .test_other_uses import uses
from .test_patch import made

pytestmark = pytest.mark.usefixtures("ways")

ATTENTION = """
    class Attention(nn.Module):
        cap = 0.0

        def __init__(self):
            super().__init__()
            self.qkv, self.causal = nn.Linear(256, 768), False
            self.table = nn.Parameter(torch.randn(1, 4, 1, 1))

        def position(self, q):
            return None

        def scores(self, q, k):
            s = q @ k.transpose(-2, -1)
            bias = self.position(q)
            if bias is not None:
                s = s + bias
            s = s / q.size(-1) ** 0.5
            if self.cap > 0.0:
                s = torch.tanh(s / self.cap) * self.cap
            return s

        def masked(self, s, keep):
            if self.causal:
                future = torch.ones(s.size(-2), s.size(-1), dtype=torch.bool, device=s.device)
                s = s.masked_fill(future.triu(1), float("-inf"))
            if keep is not None:
                s = s.masked_fill(~keep[:, None, None, :], -1e4)
            return s

        def forward(self, x, keep=None):
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
            s = self.masked(self.scores(q, k), keep)
            p = F.softmax(s, dim=-1, dtype=torch.float32).to(v.dtype)
            return (p @ v).transpose(1, 2).flatten(2)

    class Biased(Attention):
        cap = 30.0

        def position(self, q):
            return self.table @ q.new_ones(1, 4, 1, q.size(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = {kind}()

        def forward(self, x):
            return self.attention(x, x[..., 0] > -2.0)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Attention", "Biased"])
def test_a_product_of_a_method_is_made_beside_the_kernel(kind: str, tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        results = list[object]()
        for dtype in (torch.float32, torch.bfloat16):
            for cls in (file.Attention, file.Biased):
                model = file.Model().to(dtype)
                model.attention = cls().to(dtype)
                x, found = torch.randn(2, 5, 256).to(dtype), model.attention
                found.load_state_dict(file.Attention().state_dict())
                for causal, cap in ((False, 0.0), (True, 0.0), (False, 5.0)):
                    found.causal, found.cap = causal, cap
                    with torch.no_grad():
                        results += [model(x), found(x)]
                    x.requires_grad_()
                    results.append(torch.autograd.grad(model(x).sum(), x)[0])
                    x = x.detach()
                found.scores = lambda q, k: q @ k.transpose(-2, -1) * 2.0
                with torch.no_grad():
                    results.append(model(x))
        return results

    torch.manual_seed(0)
    text = uses(tmp_path, ATTENTION.replace("{kind}", kind), use, "8, 512, 256", resized=True)
    assert "        p = fused_model." in text
    assert "self.scores(q, k)" not in text
    bias = "position, " if kind == "Biased" else ""
    assert f".or_none( q @ k.transpose(-2, -1), {bias}keep" in " ".join(text.split())


def test_a_name_is_bound_where_it_is_read_and_in_no_text(tmp_path: Path) -> None:
    body = ATTENTION.replace("{kind}", "Biased").replace("Attention", "position")
    patch = made(tmp_path, body, shape="8, 512, 256", resized=True)
    (text,) = (text for path, text in patch.patch.after.items() if path.name == "or_eager.py")
    assert patch.wrong == {}
    assert "co_qualname != 'position.scores'" in text
    assert text.count(":= self.position(q)) is None") == 1


def model(*scores: str, call: str = "self.scores(q, k)", before: str = "pass") -> str:
    """A model that takes a softmax over what one of its methods gives."""
    lines = "\n".join(" " * 16 + line for line in scores)
    return f"""
        def outer(q, k):
            return q @ k.transpose(-2, -1)

        def weighed(q, k, scale):
            return torch.tanh(outer(q, k)) * scale

        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x, scale=2.0):
                return torch.tanh(self.lin(x)) * scale

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.inner = nn.Linear(1024, 1024), nn.Linear(1024, 1024), Inner()
                self.drop, self.last, self.scale, self.flag = nn.Dropout(0.5), None, 1.5, True

            def scores(self, q, k):
{lines}

            def kept(self, s):
                if self.last is not None:
                    s = s + self.last
                return s

            def more(self, q):
                return torch.sigmoid(q[..., :1]) * self.scale

            def forward(self, x):
                q, k = self.a(x), self.b(x)
                {before}
                p = F.softmax({call}, -1)
                return p @ k.mT if p.size(-1) == k.size(-1) else p @ k
    """


OPENED = {
    "a method": model("return torch.tanh(q @ k.transpose(-2, -1)) * 0.5"),
    "names of the method": model(
        "kt = k.transpose(-2, -1)", "s = q @ kt", "s = s * self.scale", "return s.tanh()"
    ),
    "a branch of the method": model(
        "s = q @ k.transpose(-2, -1)",
        "if self.flag:",
        "    s = s * q.size(-1) ** -0.5",
        "return s.tanh()",
    ),
    "a product of a product": model(
        "s = self.inner.lin(q) @ k.transpose(-2, -1)", "return s.tanh() * 0.5"
    ),
    "a function of the file": model("return q", call="weighed(q, k, self.scale)"),
    "another module": model("return q", call="self.inner(q)"),
    "another module, given a number": model("return q", call="self.inner(q, scale=self.scale)"),
    "a method that hands on what it is given": model(
        "return torch.tanh(q @ k.transpose(-2, -1)) * 0.5", call="self.kept(self.scores(q, k))"
    ),
    "an addition that another method makes": model(
        "s, more = q @ k.transpose(-2, -1), self.more(q)",
        "if more is not None:",
        "    s = s + more",
        "return s.tanh()",
    ),
    "arguments that are bound again": model(
        "return torch.tanh(q @ k.transpose(-2, -1)) * 0.5",
        call="self.scores(h, q)",
        before="h, q = q, k",
    ),
}
KEPT = {
    "a dropout before the product": model(
        "s = self.drop(q) @ k.transpose(-2, -1)", "return s.tanh() * 0.5"
    ),
    "a product that is written into": model(
        "s = q @ k.transpose(-2, -1)", "s *= 0.5", "return s.tanh()"
    ),
    "an argument that is computed": model(
        "return torch.tanh(q @ k.transpose(-2, -1)) * 0.5",
        call="self.scores(self.inner.lin(q), k)",
    ),
    "two products of one": model(
        "s = self.inner.lin(q)", "return torch.tanh(s @ k.mT) * (s @ q.mT)"
    ),
}


def used(file: Any) -> list[object]:
    results = list[object]()
    for dtype in (torch.float32, torch.bfloat16):
        model = file.Model().to(dtype)
        for training, flag, scale in ((False, True, 1.5), (True, False, 1.5), (False, True, 3.0)):
            model.train(training)
            model.flag, model.scale = flag, scale
            x = torch.randn(2, 5, 1024).to(dtype)
            torch.manual_seed(1)
            with torch.no_grad():
                results += [model(x), model(x), str(model.last)]
            x.requires_grad_()
            results.append(torch.autograd.grad(model(x).sum(), x)[0])
        model.last = 0.5
        with torch.no_grad():
            results.append(model(x))
        model.scores = lambda q, k: q @ k.transpose(-2, -1) * 2.0
        model.inner.forward = lambda x, scale=1.0: x @ x.mT * scale
        model.inner.register_forward_hook(lambda module, given, made: made * 2.0)
        with torch.no_grad():
            results.append(model(x))
    return results


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OPENED)
def test_what_a_call_computes_beside_a_kernel_is_made_once(name: str, tmp_path: Path) -> None:
    text = uses(tmp_path, OPENED[name], used, "8, 512, 1024", resized=True)
    (call,) = [line for line in text.splitlines() if line.strip().startswith("p = ")]
    assert "fused_model." in call
    assert "torch.is_grad_enabled()" in text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KEPT)
def test_what_may_not_be_made_again_is_left_where_it_was(name: str, tmp_path: Path) -> None:
    text = uses(tmp_path, KEPT[name], used, "8, 512, 1024", resized=True)
    assert "torch.is_grad_enabled()" not in text


def test_a_product_does_not_come_behind_a_write_into_what_it_reads(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model, x = file.Model(), torch.randn(2, 5, 1024)
        with torch.no_grad():
            return [model(x)]

    body = model(
        "return torch.tanh(q @ k.transpose(-2, -1)) * 0.5",
        call="s",
        before="s = self.scores(q, k)\n" + " " * 16 + "q.mul_(2.0)",
    )
    assert "torch.is_grad_enabled()" not in uses(tmp_path, body, use, "8, 512, 1024")


def test_what_a_method_keeps_is_made_by_it(tmp_path: Path) -> None:
    body = model("self.last = q @ k.transpose(-2, -1)", "return self.last.tanh() * 0.5")
    patch = made(tmp_path, body, shape="8, 512, 1024", resized=True)
    assert patch.diff == ""
    assert any("cannot be asked" in why for why in patch.unplaced.values())
