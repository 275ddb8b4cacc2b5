"""Lines that run several times: with other modules, at other sizes, for other arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.sourcepatch.editing.outline import KernelRun, choice

from .test_patch import asking, changed, made

pytestmark = pytest.mark.usefixtures("ways")


def test_a_size_that_a_guard_asks_for_holds_no_other(tmp_path: Path) -> None:
    """32 is the number of groups and no size: one line serves 64 and 128 channels."""
    patch = made(
        tmp_path,
        """
        class Block(nn.Module):
            def __init__(self, c):
                super().__init__()
                self.norm = nn.GroupNorm(32, c)

            def forward(self, x):
                return F.silu(self.norm(x))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = Block(64), Block(128)
                self.wider = nn.Conv2d(64, 128, 1)

            def forward(self, x):
                return self.two(self.wider(self.one(x)))
        """,
        shape="16, 64, 64, 64",
    )
    assert "return fused_model.group_norm_silu" in changed(patch)
    assert "num_groups != 32" in asking(patch)
    assert "size(1) !=" not in asking(patch)


def test_a_run_of_other_sizes_keeps_the_statements(tmp_path: Path) -> None:
    """One of four weights is a single element a row, which no kernel gains on."""
    patch = made(
        tmp_path,
        """
        def standardized(w, eps=1e-5):
            mean = w.mean(dim=(1, 2), keepdim=True)
            var = w.var(dim=(1, 2), keepdim=True, unbiased=False)
            return (w - mean) / torch.sqrt(var + eps)

        class Conv(nn.Module):
            def __init__(self, taken, given, width):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(given, taken, width))

            def forward(self, x):
                return F.conv1d(x, standardized(self.weight))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = Conv(1, 512, 1)
                self.convs = nn.Sequential(*[Conv(512, 512, 3) for _ in range(3)])

            def forward(self, x):
                return self.convs(self.first(x))
        """,
        shape="8, 1, 1024",
    )
    assert patch.diff, (patch.unplaced, patch.patch.refused)
    assert "size(1) == 1" in asking(patch) + changed(patch)


def test_training_is_asked_of_the_modules_of_any_run(tmp_path: Path) -> None:
    """The first block has an Identity where the second one drops in training."""
    patch = made(
        tmp_path,
        """
        class Drop(nn.Module):
            def forward(self, x):
                return F.dropout(x, 0.1, self.training)

        class Block(nn.Module):
            def __init__(self, drop):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)
                self.scale = nn.Parameter(torch.ones(1024))
                self.drop = Drop() if drop else nn.Identity()

            def forward(self, x):
                return x + self.drop(self.scale * self.lin(x))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block(False), Block(True)])

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x
        """,
        everywhere=True,
    )
    assert "return fused_model." in changed(patch)
    assert "drop.training" in asking(patch)


def test_a_module_that_several_hold_is_called_as_each_holds_it(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Bias(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.zeros(256, 1024))

            def forward(self):
                return torch.sigmoid(self.table)

        class Block(nn.Module):
            def __init__(self, bias):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)
                self.bias = bias

            def forward(self, x):
                return torch.softmax(self.lin(x) + self.bias(), -1)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                bias = Bias()
                self.blocks = nn.ModuleList([Block(bias), Block(bias)])

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x
        """,
        shape="8, 256, 1024",
    )
    assert patch.diff, (patch.unplaced, patch.patch.refused)
    assert "self.bias" in changed(patch)
    assert "bias.table" in asking(patch)


def test_an_operand_takes_no_name_that_the_call_needs(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.bias = nn.Linear(1024, 1024)

            def forward(self, x):
                y = x @ x.transpose(1, 2)
                y = y + self.bias(x)
                y = y.softmax(-1)
                return y @ x
        """,
        shape="8, 1024, 1024",
    )
    text = changed(patch)
    assert "bias = self.bias(x)" in text
    assert "y = fused_model.add_softmax" in text
    assert "(y, bias)" in text


def test_a_number_of_modules_is_given_as_the_source_counts_them(tmp_path: Path) -> None:
    """A model with other layers has another."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.convs = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(4)])

            def forward(self, x):
                skip = 0
                for conv in self.convs:
                    skip = skip + conv(x)
                return F.leaky_relu(skip / len(self.convs), 0.1)
        """,
    )
    assert "div_leaky_relu_or_eager(skip, self.convs)" in changed(patch)
    assert "div_leaky_relu.or_none(skip, len(convs))" in asking(patch)


def test_a_number_of_what_nothing_names_is_not_baked_in(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        def weighted(xs):
            return torch.tanh(xs[0] / len(xs)) * 0.5

        class Model(nn.Module):
            def forward(self, x):
                xs = (x, x)
                return weighted(xs)
        """,
    )
    assert "fused_model.tanh_mul(xs[0] / len(xs))" in changed(patch)


def test_an_argument_that_may_be_left_out_is_asked_for(tmp_path: Path) -> None:
    """The question stands in the function that is called."""
    patch = made(
        tmp_path,
        """
        def weighted_mean(x, weight=None):
            if weight is None:
                return x.mean()
            return (x * weight).sum() / weight.sum().clamp_min(1e-6)

        class Model(nn.Module):
            def forward(self, x, weight=None):
                p = torch.sigmoid(x)
                return weighted_mean(p * (1 - p), weight)
        """,
        shape="8, 32, 1024), torch.empty(8, 32, 1024",
    )
    assert "weight is None" in asking(patch)


def test_a_dtype_that_a_property_gives_is_asked_for(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1024, dtype=torch.bfloat16))

            @property
            def dtype(self):
                return next(self.parameters()).dtype

            def forward(self, x):
                return torch.tanh(x * 3.0).to(self.dtype) * self.weight
        """,
    )
    assert "self.dtype is not torch.bfloat16" in changed(patch) or "dtype is not" in asking(patch)


def test_a_dtype_is_asked_for_where_the_model_runs_in_no_other(tmp_path: Path) -> None:
    """The file builds model and inputs in bfloat16; whoever uses the model may cast both."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                y = torch.tanh(self.lin(x).float()) * 3.0
                return y.to(x.dtype)

        def get_model():
            return Model().to(torch.bfloat16)
        """,
        shape="8, 32, 1024, dtype=torch.bfloat16",
    )
    assert "x.dtype != torch.bfloat16" in asking(patch)


def asked(folder: Path, body: str, shape: str = "8, 32, 1024") -> str:
    """The source and the guards of a patch."""
    patch = made(folder, body, shape=shape)
    assert patch.diff, (patch.unplaced, patch.patch.refused)
    functions = [t for p, t in patch.patch.after.items() if p.name == "or_eager.py"]
    return "\n".join([changed(patch), *functions])


def test_two_arguments_that_were_one_tensor_are_told_apart(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        class Gate(nn.Module):
            def forward(self, q, k):
                return torch.sigmoid(q) * torch.tanh(k) + q * k

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = Gate()

            def forward(self, x):
                return self.gate(x, x)
        """,
    )
    assert "k is not q" in text


def test_a_default_that_another_argument_gives_is_told_apart(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x, ctx=None):
                ctx = x if ctx is None else ctx
                return torch.sigmoid(x) * torch.tanh(ctx) + 1.0
        """,
    )
    assert "ctx is not x" in text


def test_what_a_name_is_always_bound_to_is_not_asked(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x):
                residual = x
                return torch.sigmoid(x) * torch.tanh(residual) + 1.0
        """,
    )
    assert "is not" not in text


def test_two_modules_that_were_one_are_told_apart(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, tied=True):
                super().__init__()
                self.one = nn.LayerNorm(1024)
                self.two = self.one if tied else nn.LayerNorm(1024)

            def forward(self, x):
                return torch.tanh(self.one(x)) + self.two(x * 2.0)
        """,
    )
    assert "two is not" in text


def test_a_dropout_of_nothing_is_asked_whether_it_trains(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        class Path(nn.Module):
            def __init__(self, share):
                super().__init__()
                self.share = share

            def forward(self, x):
                if self.share == 0.0 or not self.training:
                    return x
                return x * (torch.rand_like(x[..., :1]) > self.share)

        class Model(nn.Module):
            def __init__(self, p=0.0):
                super().__init__()
                self.drop, self.path, self.p = nn.Dropout(p), Path(p), p

            def forward(self, x):
                y = self.path(self.drop(torch.tanh(x) * 2.0)) + x
                y = y @ y.transpose(1, 2) @ y
                return F.dropout(torch.tanh(y) * 2.0, self.p, self.training) + y
        """,
    )
    assert "drop.training" in text
    assert "path.share != 0.0" in text
    assert "self.training" in text or "training or" in text or "if training" in text


def test_a_parameter_that_a_module_may_lack_is_asked_for(tmp_path: Path) -> None:
    body = """
        class Model(nn.Module):
            def __init__(self, bias={bias}):
                super().__init__()
                self.norm = nn.LayerNorm(1024, bias=bias)
                self.sure = nn.LayerNorm(1024)

            def forward(self, x):
                y = torch.tanh(self.norm(x))
                return torch.tanh(self.sure(y @ y.transpose(1, 2) @ y))
        """
    for folder in (tmp_path / "with", tmp_path / "without"):
        folder.mkdir()
    text = asked(tmp_path / "with", body.replace("{bias}", "True"))
    assert "norm.bias is None" in text
    assert "norm.bias is not None" in asked(tmp_path / "without", body.replace("{bias}", "False"))
    assert "sure.bias is" not in text


def test_a_dtype_that_a_function_asks_for_is_asked(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        def limited(x):
            if x.dtype == torch.float16:
                x = x.clamp(-1, 1)
            return torch.tanh(x) * 2.0

        class Model(nn.Module):
            def forward(self, x):
                return limited(x * 3.0)
        """,
    )
    assert "x.dtype == torch.float16" in text


def test_a_number_that_differs_where_it_decides_nothing_is_asked_for(tmp_path: Path) -> None:
    text = asked(
        tmp_path,
        """
        class Block(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.n = n

            def forward(self, x):
                return torch.tanh(x ** max(3.0, self.n / 100)) + x

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = Block(8), Block(9)

            def forward(self, x):
                y = self.one(x)
                return self.two(y @ y.transpose(1, 2) @ y)
        """,
    )
    assert "n not in (8, 9)" in text


def test_a_size_that_torch_counts_by_is_given(tmp_path: Path) -> None:
    """The mean over the batch: no text of the source has that number."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x, y):
                return F.kl_div(
                    F.log_softmax(x, -1), F.log_softmax(y, -1), log_target=True,
                    reduction="batchmean",
                )
        """,
        shape="8192, 1024), torch.empty(8192, 1024",
        resized=True,
    )
    assert "fused_model.log_softmax_kl_div_div_or_eager(x, y)" in changed(patch)
    assert "log_softmax_kl_div_div.or_none(x, y, x.size(0))" in asking(patch)


def test_a_model_that_is_a_sequential_of_ones_own_blocks(tmp_path: Path) -> None:
    """No class of the user's holds the blocks."""
    text = asked(
        tmp_path,
        """
        Model = lambda: nn.Sequential(Norm(1024), nn.Linear(1024, 1024))
        """,
    )
    assert "fused_model.rms_norm" in text


def test_a_size_is_asked_of_what_has_that_dimension(tmp_path: Path) -> None:
    """An operand of another rank has no such size: the statements run."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = nn.Linear(1024, 1024)

            def forward(self, x, y):
                return F.cosine_similarity(self.proj(x), y, dim=-1) * 2.0
        """,
        shape="8, 32, 1024), torch.empty(8, 32, 1024",
        resized=True,
    )
    assert "y.dim() != 3 or y.size(2) != 1024" in " ".join(asking(patch).split())


def test_an_operand_that_its_statement_keeps_is_given(tmp_path: Path) -> None:
    """It has a name there alone, which nothing had before."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(2, 64, (3, 3), padding=(1, 2))

            def forward(self, x):
                t = x.shape[-1]
                h = torch.tanh(self.conv(x)[..., :t])
                a, b = h.split(32, dim=1)
                return a * torch.sigmoid(b)
        """,
        shape="4, 2, 256, 500",
    )
    assert "h = self.conv(x)[..., :t]\n" in changed(patch)
    assert "return fused_model.tanh_sigmoid_mul_or_eager(h)\n" in changed(patch)
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_strides_tell_kernels_of_equal_sizes_apart() -> None:
    """What is cut off wider tensors has the same sizes, and lies further apart."""

    def run(kernel: str, wide: int, rows: int = 64) -> KernelRun:
        stride = 64 * rows * wide, rows * wide, wide, 1
        return KernelRun(kernel, "", [Tensor((4, 64, rows, 500), stride, "float32")])

    runs = [run("one", 502), run("two", 508), run("two", 504), run("three", 504, 32)]
    assert choice("by", runs).cases == (
        ("{0}.stride(2) == 508 or {0}.stride(1) == 32256", "two"),
        ("{0}.size(2) == 32", "three"),
        ("", "one"),
    )
