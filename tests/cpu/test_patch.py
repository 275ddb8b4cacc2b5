"""Patches: what they edit, what they leave, and that the patched model is the original."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fusion_advisor.codegen.kernel_package import ASKING
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.sourcepatch.editing.outline import always_eager
from fusion_advisor.sourcepatch.equivalence import difference
from fusion_advisor.sourcepatch.trial import Runs, Trial, patched_copy, run_trial
from fusion_advisor.workflows.analyze import analyze
from fusion_advisor.workflows.patch import Patched, patch_model

from . import spawned
from .checks import CRITERION
from .in_process import captured, captured_as_asked
from .spawned import run_script

pytestmark = pytest.mark.usefixtures("ways")

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        # the mean of the squares
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)
"""


def made(
    folder: Path,
    body: str,
    *,
    mode: str = "eval",
    shape: str = "8, 32, 1024",
    resized: bool = False,
    everywhere: bool = False,
    count: int = 1,
) -> Patched:
    """The patch of a file with a model of `count` inputs, kernels unchecked; with `resized` at
    other sizes, too, and with `everywhere`, or in the deep tests, in the other mode, in another
    dtype and under autocast."""
    file = folder / "model.py"
    given = ", ".join([f"torch.empty({shape})"] * count)
    inputs = f"\n\ndef get_inputs():\n    return [{given}]\n"
    file.write_text(HEAD + textwrap.dedent(body) + inputs)
    scenario = Scenario(mode="train" if mode == "train" else "eval")
    request = Request(str(file), scenario, device="h200", verify=False, compile=False)
    capturing = captured_as_asked(scenario, resized=resized, everywhere=everywhere)
    return patch_model(request, folder.resolve(), captured=capturing)


def changed(patch: Patched) -> str:
    """The model's file after the patch; the patch has to hold."""
    assert patch.wrong == {}
    return next(text for path, text in patch.patch.after.items() if path.name == "model.py")


def asking(patch: Patched) -> str:
    """The functions of a patch that ask before they launch a kernel; the patch has to hold."""
    assert patch.wrong == {}
    return next(text for path, text in patch.patch.after.items() if path.name == ASKING)


def test_statements_become_a_call(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = Norm(1024)

            def forward(self, x):
                return self.norm(x)
        """,
    )
    text = changed(patch)
    assert "return fused_model.rms_norm_or_eager(x, self.weight)" in text
    assert "# the mean of the squares" in text, "comments stay"
    assert "variance" not in text, "what nothing reads any more goes"
    assert "dtype = x.dtype" not in text
    assert "x.float()" not in text
    assert "import fused_model" in text
    _, function = asking(patch).split("\n\n\n")
    assert function == textwrap.dedent("""\
        def rms_norm_or_eager(x, weight):
            '''In place of statements of Norm.forward(), model.py.'''
            if (fused := rms_norm.or_none(x, weight)) is None:
                dtype = x.dtype
                x = x.float()
                variance = x.pow(2).mean(-1, keepdim=True)
                x = x * torch.rsqrt(variance + 1e-06)
                return weight * x.to(dtype)
            return fused
    """).replace("'''", '"""')


def test_a_tied_weight_is_read_where_the_statements_read_it(tmp_path: Path) -> None:
    """A model that is untied afterwards has two weights, and its statements read this one."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(512, 256)
                self.head = nn.Linear(256, 512, bias=False)
                self.words.weight = self.head.weight

            def forward(self, ids):
                x = self.words(ids) * 2
                y = torch.sigmoid(x) + x
                return self.head(y)
        """,
        shape="64, 512, dtype=torch.int64",
    )
    assert "y = fused_model.embedding_mul_sigmoid_add_or_eager(self.words, ids)" in changed(patch)
    assert "embedding_mul_sigmoid_add.or_none(words.weight, ids)" in asking(patch)


def test_a_function_is_given_what_its_statements_read(tmp_path: Path) -> None:
    """What the file defines, local names, attributes of modules, the results of what stays; of two
    results both. What it imports of torch and the standard library is imported."""
    patch = made(
        tmp_path,
        """
        import math

        TWICE = 2.0

        def shifted(x):
            return torch.tanh(x) * TWICE

        class Scores(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin, self.drop, self.gelu = nn.Linear(64, 64), nn.Dropout(0.5), 3.0

            def forward(self, q, k):
                att = (q @ k.mT) * (1.0 / math.sqrt(k.size(-1)))
                att = self.drop(shifted(att).softmax(-1))
                gelu = F.gelu(self.lin(q)) ** self.gelu
                return att, gelu

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.scores, self.norm, self.power = Scores(), nn.LayerNorm(64), 2.0

            def forward(self, x):
                y = x ** self.power
                y += x.tanh()
                x = self.norm(y)
                return self.scores(x, x), y
        """,
        shape="8, 512, 64",
    )
    text, functions = changed(patch), asking(patch)
    assert " if " not in text, "what is asked is asked beside the kernels"
    assert "        att = q @ k.mT\n" in text
    assert "self.drop(fused_model.mul_tanh_softmax_or_eager(att, q, k, shifted))" in text
    assert "gelu = fused_model.gelu_pow_or_eager(self.lin(q), self.gelu)" in text
    assert "def gelu_pow_or_eager(lin, gelu_):" in functions, "a name of the function is no other"
    assert "pow_tanh_add_layer_norm_or_eager(x, self.norm, self.power)" in text
    assert functions.endswith(
        """\
        y = x ** power
        y += x.tanh()
        x = norm(y)
        return y, x
    return fused
"""
    )
    assert "pow_tanh_add_layer_norm.or_none(x, norm.weight, norm.bias, norm.eps)" in functions
    assert "\nimport math\n\nimport torch\nimport torch.nn.functional as F\n\nfrom ." in functions


def test_a_function_takes_no_name_for_another(tmp_path: Path) -> None:
    """What a function around gives is not what the file imports; a kernel's name is no other's."""
    patch = made(
        tmp_path,
        """
        def making(F, scale):
            class Made(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.tanh_mul_add = nn.Linear(96, 96), 2.0

                def forward(self, x):
                    import math
                    tanh_mul_add = self.lin(x)
                    y = F(tanh_mul_add) * self.tanh_mul_add * scale + math.sqrt(scale)
                    return y

            return Made

        Model = making(torch.tanh, 2.5)
        """,
        shape="4, 512, 96",
    )
    assert (
        "fused_model.tanh_mul_add_or_eager(tanh_mul_add, self.tanh_mul_add, scale, F, math)"
        in changed(patch)
    )
    text = asking(patch)
    assert "tanh_mul_add.or_none(tanh_mul_add_, tanh_mul_add__, scale)" in text
    assert "import math" not in text
    assert "torch.nn.functional" not in text


def test_statements_that_no_function_can_hold_are_left(tmp_path: Path) -> None:
    """A name that is bound between the parts; a part that may not be evaluated and `super()` are no
    obstacles."""
    patch = made(
        tmp_path,
        """
        class Kept(nn.Module):
            def __init__(self):
                super().__init__()
                self.by = 3.0

            def scaled(self, x):
                return x ** self.by

        class Model(Kept):
            def __init__(self):
                super().__init__()
                self.lin, self.on = nn.Linear(1024, 1024), True

            def some(self, x):
                return torch.tanh(x) ** (self.by if self.on else self.missing)

            def bound(self, x):
                by = self.by
                y = torch.tanh(x)
                by = by + 1.0
                return y ** by

            def above(self, x):
                return torch.tanh(super().scaled(x))

            def forward(self, x):
                x = self.lin(self.some(x))
                x = self.lin(self.bound(x))
                return self.lin(self.above(x))
        """,
    )
    text, functions = changed(patch), asking(patch)
    assert " if " not in text
    assert "y = torch.tanh(x)" in text
    (why,) = patch.unplaced.values()
    assert why.endswith("no function can hold its lines: `by` is bound between them")
    assert "return torch.tanh(x) ** (self.by if self.on else self.missing)" in functions
    assert "fused_model.pow_tanh_or_eager(x, self.by, super())" in text
    assert "return torch.tanh(above.scaled(x))" in functions


def test_two_guards_of_one_statement_are_asked_by_two_calls(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
                self.s, self.t = 1.5, 2.5

            def forward(self, x):
                return (torch.tanh(self.a(x)) ** self.s) @ (torch.sigmoid(self.b(x)) ** self.t).mT
        """,
    )
    text = "".join(line.strip() for line in changed(patch).splitlines())
    one, two = "tanh_pow_or_eager(self.a(x), self.s)", "sigmoid_pow_or_eager(self.b(x), self.t)"
    assert f"return fused_model.{one} @ fused_model.{two}.mT" in text


def test_statements_beside_the_kernels_are_tried(tmp_path: Path) -> None:
    """What no scenario runs, for it asks for a number, has to be the original, too."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.by = 3.0

            def forward(self, x):
                return torch.tanh(x) ** self.by
        """,
    )
    (file,) = (path for path in patch.patch.after if path.name == ASKING)
    written = patch.patch.after[file]
    wrong = written.replace("torch.tanh(x)", "torch.tanh(x + 1)")
    assert wrong != written
    device = load_rulebook().device("h200")

    def flow(model: str, scenario: Scenario, moved: object = None) -> Dataflow:
        return dataflow(captured(model, scenario, "fused_model"), device)

    model = str(tmp_path / "model.py")
    before = flow(model, Scenario())
    trials = [Trial("as asked", Scenario(), partial(difference, before))]
    for text, right in ((written, True), (wrong, False)):
        after = patch.patch.after | {file: always_eager(text)}
        diff = replace(patch.patch, after=after).diff(tmp_path.resolve())
        with ThreadPoolExecutor(1) as pool:
            said, _ = run_trial(diff, after, tmp_path.resolve(), model, trials, flow, pool)
        assert (said == {}) == right, said


def test_what_is_asked_decides_when_it_runs(tmp_path: Path) -> None:
    """A number that changes afterwards, in a module whose call went."""
    patch = made(
        tmp_path,
        """
        class Mean(nn.Module):
            def __init__(self):
                super().__init__()
                self.power = 1.5

            def forward(self, x):
                return x / x.abs().pow(self.power).mean(-1, keepdim=True)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.mean, self.lin = Mean(), nn.Linear(96, 96)

            def forward(self, x):
                x = x + torch.sigmoid(x)
                y = self.mean(x)
                return self.lin(y), x
        """,
        shape="700, 96",
    )
    assert "_or_eager(x, self.mean)" in changed(patch)
    (tmp_path / "original.py").write_text((tmp_path / "model.py").read_text())
    subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path, check=True)
    run = """
        import torch
        from fusion_advisor.verify.interpreter import install
        install()
        import original, model
        one, two = original.Model().eval(), model.Model().eval()
        two.load_state_dict(one.state_dict())
        x = torch.randn(5, 96)
        for power in (1.5, 1.0, 2):
            one.mean.power = two.mean.power = power
            with torch.no_grad():
                torch.testing.assert_close(two(x), one(x))
    """
    run_script(textwrap.dedent(run), folder=tmp_path)


@pytest.mark.deep
def test_a_dtype_that_follows_an_input_is_asked_for(tmp_path: Path) -> None:
    """Weights of another dtype than the inputs': the third one tells what follows which."""
    body = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1024, dtype=torch.float32))

            def forward(self, x):
                x = x.bfloat16() if x.dtype == torch.float32 else x
                h = x.float()
                h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
                return h.to(x.dtype)
        """
    patch = made(tmp_path, body, shape="64, 128, 1024, dtype=torch.bfloat16")
    assert ".or_none(x, weight)) is None:\n        h = x.float()" in asking(patch)
    assert 'host.takes("x", x, torch.bfloat16' in patch.diff


@pytest.mark.deep
def test_a_cast_between_two_parts_that_does_nothing_in_one_dtype(tmp_path: Path) -> None:
    """Nothing of what goes is launched otherwise in another dtype: it is handed another tensor."""
    body = """
        class Model(nn.Module):
            def forward(self, x):
                x = x + torch.tanh(x)
                h = x.float()
                return x, F.normalize(h, dim=-1).to(x.dtype)
        """
    patch = made(tmp_path, body)
    assert 'host.takes("x", x, torch.float32' in patch.diff
    assert "h = x.float()" in asking(patch)


@pytest.mark.deep
def test_the_frameworks_own_norm_becomes_a_part_of_a_kernel(tmp_path: Path) -> None:
    """The reference calls it by the name that it has in the graph, and is the same there."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1024))

            def forward(self, x):
                y = F.rms_norm(x + 1, (1024,), self.weight, 1e-6)
                return y * torch.sigmoid(y)
        """,
    )
    text = changed(patch)
    assert "F.rms_norm" not in text
    assert "fused_model." in text


@pytest.mark.deep
def test_an_expression_keeps_its_operands(tmp_path: Path) -> None:
    text = changed(
        made(
            tmp_path,
            """
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gate, self.up = nn.Linear(1024, 2048), nn.Linear(1024, 2048)
                    self.down = nn.Linear(2048, 1024)

                def forward(self, x):
                    return self.down(F.silu(self.gate(x)) * self.up(x))
            """,
        )
    )
    assert "return self.down(fused_model.swiglu(self.gate(x), self.up(x)))" in text
    assert "if " not in text.split("class Model")[1], "no guard: nothing hangs on mode or dtype"


@pytest.mark.deep
def test_results_without_a_name_get_one_each(tmp_path: Path) -> None:
    """Of two groups in one function, whose kernels both give more than what is stored."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.ones(4096, 2048))

            def forward(self, x):
                a = x.exp() + 1
                b = self.table.softmax(1)
                return a, a.sum(-1), a.amax(-1), b, self.table.var(1), self.table.argmax(1)
        """,
    )
    calls = [line for line in changed(patch).splitlines() if "= fused_model." in line]
    names = [name for line in calls for name in line.split(" = ")[0].split(", ")]
    assert len(calls) > 1
    assert len(names) == len(set(names))


@pytest.mark.deep
def test_two_groups_in_one_statement_are_both_said(tmp_path: Path) -> None:
    text = changed(
        made(
            tmp_path,
            """
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

                def forward(self, x):
                    return (torch.tanh(self.a(x)) * 0.5) @ (torch.sigmoid(self.b(x)) + 1).mT
            """,
        )
    )
    call = text[: text.index("        return fused_model.")].splitlines()[-2:]
    assert all(line.strip().startswith("# fusion-advisor: ") for line in call)


@pytest.mark.parametrize(
    ("wide", "narrow"), [(4096, 1024), (1024, 4096)], ids=["the inner saves more", "the outer"]
)
def test_a_group_in_an_operand_of_another(tmp_path: Path, wide: int, narrow: int) -> None:
    """What a kernel takes may be made of what another gives, whichever is put first; that has a
    line of its own."""
    patch = made(
        tmp_path,
        f"""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(1024, {wide}), nn.Linear({wide}, {narrow})

            def forward(self, x):
                return torch.tanh(self.b(F.gelu(self.a(x)) * 2)) + 1
        """,
    )
    text = changed(patch)
    outer, inner = (
        next(p.kernel for p in patch.patch.puts if w in p.kernel) for w in ("tanh", "gelu")
    )
    assert f"        {inner} = fused_model.{inner}(self.a(x))\n" in text
    assert f"        return fused_model.{outer}(self.b({inner}))\n" in text
    assert text.count("# fusion-advisor: ") == 2
    assert patch.patch.refused == {}


def test_operands_of_an_operand_are_put_first(tmp_path: Path) -> None:
    """What an operand holds may be one result of several, made of more operands than it."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.p, self.q, self.r = (nn.Linear(1024, 1024) for _ in range(3))

            def forward(self, x):
                y = self.q(x)
                v = F.silu(self.p(F.gelu(x) * 2)) * self.q(torch.sigmoid(y) + 1)
                return torch.tanh(self.r(v.abs())) + 1, v
        """,
    )
    assert changed(patch).count("# fusion-advisor: ") == 4
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_a_module_that_is_shared_is_known(tmp_path: Path) -> None:
    """Torch traces a model with one through others with the same attributes."""
    patch = made(
        tmp_path,
        """
        class Squash(nn.Module):
            def __init__(self, cap):
                super().__init__()
                self.cap = cap

            def forward(self, x):
                return torch.tanh(x / self.cap) * self.cap ** 2

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, act = nn.Linear(1024, 1024), Squash(3.0)
                self.acts = nn.ModuleList([act, act])
                self.norm = Norm(1024)

            def forward(self, x):
                for act in self.acts:
                    x = act(self.first(x))
                return self.norm(self.first(x))
        """,
    )
    assert "x, self.cap" in changed(patch)
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_an_if_that_asks_what_python_holds_is_no_border(tmp_path: Path) -> None:
    """Where another branch would run the statements do. One that returns is a border."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, scale=0.5, cap=3.0):
                super().__init__()
                self.a, self.scale, self.cap = nn.Linear(1024, 1024), scale, cap

            def reduced(self, x, how="mean"):
                x = torch.exp(-x)
                if how == "sum":
                    return x.sum(-1)
                elif how == "mean":
                    return x.mean(-1)
                return x

            def forward(self, x, mask=None, raw=False):
                y = torch.tanh(self.a(x) / self.cap) * self.cap
                if raw:
                    return y
                if mask is None and self.scale is not None:
                    y = y * self.scale
                y = torch.softmax(y, -1)
                return self.reduced(self.a(y))
        """,
    )
    text, functions = changed(patch), asking(patch)
    assert "        if raw:\n            return y\n" in text
    assert "        y = fused_model.mul_softmax_or_eager(y, self, mask)\n" in text
    assert "if mask is None and self.scale is not None:\n            y = y * self" in functions
    assert "mask is not None\n        or self.scale is None\n" in functions
    assert any("model.py:36 leaves a branch" in why for why in patch.unplaced.values())
    assert patch.saved_us < patch.free_us


def test_an_if_that_cannot_be_asked_before_is_a_border(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        def wanted(x):
            rank = 3
            return x.dim() == rank

        class Model(nn.Module):
            def forward(self, x):
                y = torch.tanh(x) * 2
                if wanted(y):
                    y = y.exp() + 1
                return torch.softmax(y, -1)
        """,
    )
    assert patch.saved_us < 0.9 * patch.free_us
    assert not patch.diff or "wanted(y)" in changed(patch)


def test_views_within_a_call_are_the_kernels(tmp_path: Path) -> None:
    """Those that a function, or torch's own, makes of what it is given have no name outside."""
    patch = made(
        tmp_path,
        """
        def modulate(x, shift, scale):
            return x * (1 + scale[:, None]) + shift[:, None]

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.norm = nn.Linear(1024, 1024), nn.LayerNorm(1024)

            def forward(self, x):
                shift, scale = self.a(x[:, 0]), self.a(x[:, 1])
                y = self.a(modulate(self.norm(x), shift, scale))
                return F.cross_entropy(y.transpose(1, 2), x[:, :, 2].long())
        """,
    )
    text = changed(patch)
    assert "x, norm.weight, norm.bias, scale, shift" in asking(patch)
    assert "_or_eager(y.transpose(1, 2), x[:, :, 2]" in text
    assert patch.saved_us > 0.95 * patch.free_us


def test_a_default_is_what_the_file_spells(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        IGNORED, POWER = -100, 1.5

        def powered(x, power=POWER):
            return torch.tanh(x) ** power + 1

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(1024, 1024)

            def forward(self, x):
                return F.gelu(powered(self.a(x))) * 2
        """,
    )
    assert "return fused_model." in changed(patch)
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_a_number_of_an_object_that_nothing_asks_is_left(tmp_path: Path) -> None:
    """Of an argument that is no module, or an object in an object: the old one stayed."""
    patch = made(
        tmp_path,
        """
        from types import SimpleNamespace

        def scaled(x, options):
            return torch.tanh(x) * options.by

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.options = SimpleNamespace(by=3.0, loss=SimpleNamespace(by=2.0))

            def forward(self, x):
                loss = self.options.loss
                return scaled(x, self.options), torch.exp(x) * loss.by
        """,
    )
    assert patch.patch.puts == []


def test_a_number_of_a_default_is_as_it_was_given(tmp_path: Path) -> None:
    """A whole one stays whole: eager may compute otherwise with another."""
    patch = made(
        tmp_path,
        """
        def rounded(x, scale, zero=0):
            return ((torch.round(x / scale) + zero).clamp(-128, 127) - zero) * scale

        class Model(nn.Module):
            def forward(self, x):
                scale = x.abs().amax(-1, keepdim=True)
                return rounded(x, scale)
        """,
    )
    assert "(x, 0)" in changed(patch)
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_a_group_in_an_operand_of_another_with_guards(tmp_path: Path) -> None:
    """Each asks in a function of its own; the first gives two results."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, p=1.5):
                super().__init__()
                self.a, self.p = nn.Linear(1024, 4096), p

            def forward(self, x):
                y = F.gelu(x ** self.p)
                s = y.abs().amax(-1, keepdim=True).clamp(min=1e-5)
                return torch.tanh(self.a(y.float() / s) ** self.p) + 1, s
        """,
    )
    text = changed(patch)
    assert text.count("_or_eager(") == text.count("# fusion-advisor: ") == 2
    assert "_or_eager(self.a(quotient)" in text
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_a_constant_that_is_lifted_shifts_no_input(tmp_path: Path) -> None:
    """Export puts what `torch.tensor` makes before the inputs, once the trace is over."""
    text = changed(
        made(
            tmp_path,
            """
            class Model(nn.Module):
                def forward(self, x):
                    y = torch.sin(x - torch.tensor([0.25, 0.75])[:, None])
                    return y * 2 + x
            """,
            shape="64, 2, 1024",
        )
    )
    assert "(x, torch.tensor([0.25, 0.75])[:, None])" in text


def test_a_loop_over_layers_is_a_barrier(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = Norm(1024), Norm(1024)
                self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

            def forward(self, x):
                x = x + self.a(self.one(x))
                y = self.two(x)
                return x + self.b(y)


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([Block(), Block()])

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x
        """,
    )
    text = changed(patch)
    assert "x, y = fused_model.residual_rms_norm_or_eager(x, self.a(self.one(x)), self.two)" in text
    assert "residual_rms_norm.or_none(x, a, two.weight)" in asking(patch)
    assert "fused_model.rms_norm_or_eager(x, self.weight)" in text, "a block begins with a norm"
    assert 0 < patch.saved_us < patch.free_us
    assert "for layer in self.layers:\n            x = layer(x)\n" in text


def test_training_keeps_its_dropout(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout(0.5)
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                h = F.gelu(self.lin(x), approximate="tanh")
                h = self.drop(h)
                return torch.sigmoid(h * 2) - x
        """,
    )
    assert "self.drop(h)" not in changed(patch)
    text = asking(patch)
    assert "type(drop) is not torch.nn.Dropout\n" in text
    assert text.count("h = drop(h)") == 1, "the original stays for training"


def test_numbers_that_the_model_holds_are_guarded(tmp_path: Path) -> None:
    """Those of attributes, wherever they are read, and of which class each module is; no sizes that
    the kernel takes from its tensors."""
    text = asking(
        made(
            tmp_path,
            """
            def scaled(x, by):
                by = by + 1
                return torch.tanh(x) ** by

            class Model(nn.Module):
                def __init__(self, slope=0.2, by=3.0):
                    super().__init__()
                    self.lin = nn.Linear(1024, 1024)
                    self.act = nn.Softplus(slope)
                    self.sure = nn.Sequential(nn.Linear(1024, 1024), nn.Sigmoid())
                    self.chosen = nn.ReLU() if by > 2 else nn.GELU()
                    self.by = by

                def forward(self, x):
                    b, t, c = x.shape
                    x = self.lin(self.act(x).view(b, t, c) + x)
                    x = self.sure(x) + x
                    x = self.lin(x)
                    x = self.chosen(x) + x
                    x = self.lin(x)
                    return scaled(x, self.by)
            """,
            everywhere=True,
        )
    )
    tests = [node.test for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If)]
    asked = [[*map(ast.unparse, test.values)] for test in tests if isinstance(test, ast.BoolOp)]
    assert [[each for each in some if "fused" not in each] for some in asked] == [
        ["torch.is_autocast_enabled()", "by != 4.0"],
        [
            *("type(act) is not torch.nn.Softplus", *hooked("act")),
            *("act.beta != 0.2", "act.threshold != 20.0"),
        ],
        ["type(sure_[1]) is not torch.nn.Sigmoid", *hooked("sure_[1]")],
        ["type(chosen) is not torch.nn.ReLU", *hooked("chosen"), "chosen.inplace"],
        ["type(sure) is not torch.nn.Sequential", *hooked("sure"), "len(sure) != 2"],
    ]


def hooked(name: str) -> tuple[str, str]:
    return f"{name}._forward_hooks", f"{name}._forward_pre_hooks"


@pytest.mark.deep
def test_a_number_that_cannot_be_asked_is_left(tmp_path: Path) -> None:
    """A size that a tensor has from one with a name is asked of that; here none has it."""
    body = """
        def scaled(x):
            y = torch.tanh(GIVEN)
            return y ** y.size(-1)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                return scaled(self.lin(x)) + 1
    """
    text = asking(made(tmp_path, body.replace("GIVEN", "x")))
    assert "or x.size(-1) != 1024\n        or (fused := " in text
    patch = made(tmp_path, body.replace("GIVEN", "x.unflatten(-1, (8, 128))"))
    reasons = patch.unplaced.values()
    assert any(re.search(r"the 128 of \S+model.py:22 cannot be asked", why) for why in reasons), (
        reasons
    )


@pytest.mark.deep
def test_weights_of_a_dtype_that_the_file_names_may_be_cast(tmp_path: Path) -> None:
    """`.float()` launches nothing where all is float32; cast to 16 bits the module has it."""
    patch = made(
        tmp_path,
        """
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.w = nn.Parameter(torch.rand(1024, dtype=torch.float32))

                def forward(self, a):
                    a = a * self.w
                    y = a.float() + 1
                    return torch.exp(y) * 2
            """,
    )
    assert ".or_none(a, w)) is None" in asking(patch)
    assert 'host.takes("a", a, torch.float32' in patch.diff


@pytest.mark.deep
def test_batch_norm_is_guarded_by_its_mode(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.bn = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)

            def forward(self, x):
                x = self.bn(self.conv(x))
                return torch.relu(x) * 0.5
        """,
        shape="64, 8, 130, 130",
    )
    text, function = changed(patch), asking(patch)
    assert "bn.training\n" in function
    assert "x = self.conv(x)" in text
    assert "bn.weight" in function
    assert "self.bn(" not in text


NO_TORCH = """
from torch import empty, nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(1024, 1024)

    def forward(self, x):
        y = self.lin(x)
        return y.pow(2) * F.sigmoid(y)


def get_inputs():
    return [empty(64, 1024)]
"""


def test_a_guard_imports_what_it_names(tmp_path: Path) -> None:
    """Under autocast a power is computed in float32, and the guard that says so names torch."""
    file = tmp_path / "model.py"
    file.write_text(NO_TORCH)
    request = Request(str(file), device="h200", verify=False, compile=False)
    patch = patch_model(request, tmp_path.resolve(), captured=captured)
    assert "\nfrom torch.nn import functional as F\nimport fused_model\n" in changed(patch)
    text = asking(patch)
    assert "if torch.is_autocast_enabled()" in text
    assert "\nimport torch\nfrom torch.nn import functional as F\n" in text
    file.write_text(NO_TORCH + "\n\ntorch = None\n")
    left = patch_model(request, tmp_path.resolve(), captured=captured)
    whys = {why.partition(": ")[2] for why in left.unplaced.values()}
    assert whys == {"torch, which the edit names, is something else there"}
    assert all("torch." not in e.guard for put in left.patch.puts for e in put.edits)


@pytest.mark.deep
def test_a_number_of_a_size_is_given(tmp_path: Path) -> None:
    """Of a batch of one: the kernel serves several, and takes the number that is the batch's or the
    length's."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x):
                y = torch.tanh(x) + torch.exp(x)
                return y.sum(1) / x.shape[1] + 2.0
        """,
        shape="1, 512, 1024",
        resized=True,
    )
    assert patch.saved_us == patch.free_us
    assert "tanh_exp_add_sum.or_none(x, x.size(1))" in asking(patch)
    kernels = [text for text in patch.patch.after.values() if "def reference" in text]
    assert any("n0, n1, n2 = host.ranked(x.shape, 3)" in kernel for kernel in kernels)


def test_calls_that_differ_are_left(tmp_path: Path) -> None:
    """One function, two computations: what one call could use would change the other."""
    patch = made(
        tmp_path,
        """
        def scaled(x, by):
            y = torch.tanh(x ** by)
            return y + 1


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                return self.lin(scaled(self.lin(scaled(x, 1.5)), 2.5))
        """,
    )
    text = changed(patch)
    assert "x ** by" in text
    assert len(re.findall(r"= fused_model|return fused_model", text)) == 1  # what both compute


@pytest.mark.deep
def test_norms_of_several_widths_are_one_line(tmp_path: Path) -> None:
    """How wide torch's norm is follows from its weight."""
    patch = made(
        tmp_path,
        """
        class Block(nn.Module):
            def __init__(self, width, out):
                super().__init__()
                self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, out)

            def forward(self, x):
                return self.up(F.gelu(self.norm(x)))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(map(Block, (1024, 2048, 512), (2048, 512, 1024)))

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x
        """,
    )
    assert changed(patch).count("fused_model.") == 1
    assert patch.saved_us == pytest.approx(patch.free_us)


def test_a_value_that_is_read_elsewhere_stays(tmp_path: Path) -> None:
    """A result that something else reads is given by the kernel, too."""
    text = changed(
        made(
            tmp_path,
            """
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(1024, 1024)

                def forward(self, x):
                    a = torch.sigmoid(x)
                    b = torch.tanh(a * x)
                    return self.lin(b) + self.lin(a)
            """,
        )
    )
    assert "a, b = fused_model." in text


def test_sizes_that_nothing_reads_any_more_go(tmp_path: Path) -> None:
    """Their names are letters of others; they were read of a tensor that the kernel has."""
    text = changed(
        made(
            tmp_path,
            """
            class Model(nn.Module):
                def forward(self, x):
                    x = torch.clamp(x, 0.0, 1.0)
                    b, s, e = x.shape
                    x = x.view(b, -1)
                    x = torch.softmax(x, dim=1)
                    x = x.view(b, s, e)
                    return x * 2
            """,
            shape="64, 8, 1024",
        )
    )
    assert "return fused_model.clamp_softmax_mul(x)" in text
    assert ".shape" not in text


@pytest.mark.deep
def test_a_number_on_the_host_is_no_operand(tmp_path: Path) -> None:
    """Beside tensors of a GPU eager takes one of no dimension from the host; a kernel does not."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                x = torch.min(self.lin(x), torch.tensor(0.5))
                x = x + 1
                return torch.tanh(x)
        """,
    )
    text = changed(patch)
    assert "x = torch.min(self.lin(x), torch.tensor(0.5))" in text
    assert "return fused_model.add_tanh(x)" in text
    assert any("may lie on the host" in why for why in patch.unplaced.values())


def test_our_own_kernels_are_known(tmp_path: Path) -> None:
    """Analysed again, the patched model has no group, and the bytes that were predicted."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = Norm(1024)
                self.gate, self.up = nn.Linear(1024, 2048), nn.Linear(1024, 2048)

            def forward(self, x):
                x = x + 1
                y = self.norm(x)
                return F.silu(self.gate(y)) * self.up(y), x
        """,
    )
    file = tmp_path / "model.py"
    request = Request(str(file), Scenario(), device="h200", verify=False, compile=False)
    before = analyze(request, lambda: captured(str(file), Scenario())).report
    subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path, check=True)
    after = analyze(request, lambda: captured(str(file), Scenario())).report
    assert len(before.groups) == 2
    assert after.groups == []
    assert after.totals.hbm_bytes_unfused == before.totals.hbm_bytes_fused
    assert after.totals.coverage == before.totals.coverage
    training = captured(str(file), Scenario(mode="train"))
    assert not any("fused" in node.op for node in training.nodes), "with gradients eager runs"


@pytest.mark.deep
def test_what_the_patched_model_computes(tmp_path: Path) -> None:
    """Through the interpreter, fall-backs forbidden: the same as the original, but for rounding."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = Norm(96)
                self.gate, self.up = nn.Linear(96, 64), nn.Linear(96, 64)

            def forward(self, x):
                y = self.norm(x + 1)
                return F.silu(self.gate(y)) * self.up(y)
        """,
        shape="700, 96",
    )
    assert changed(patch).count("fused_model.") >= 2
    (tmp_path / "original.py").write_text((tmp_path / "model.py").read_text())
    applied = subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path)
    assert applied.returncode == 0
    run = """
        import torch
        from fusion_advisor.verify.interpreter import install
        install()
        import original, model
        torch.manual_seed(0)
        one, two = original.Model().eval(), model.Model().eval()
        two.load_state_dict(one.state_dict())
        for rows in (1, 37, 700):
            x = torch.randn(rows, 96)
            with torch.no_grad():
                torch.testing.assert_close(two(x), one(x))
        import fused_model
        assert not fused_model.fused_runtime.fallbacks
        one.train(), two.train()
        y = two(x)
        y.sum().backward()
        g = two.norm.weight.grad
        one(x).sum().backward()
        torch.testing.assert_close(g, one.norm.weight.grad)
    """
    run_script(textwrap.dedent(run), folder=tmp_path)


def test_a_wrong_edit_is_found(tmp_path: Path) -> None:
    """What is tried is the diff itself: one that swaps operands does not pass."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.up = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

            def forward(self, x):
                return F.silu(self.gate(x)) * self.up(x)
        """,
    )
    wrong = patch.diff.replace("(self.gate(x), self.up(x))", "(self.up(x), self.gate(x))")
    assert wrong != patch.diff
    rulebook = load_rulebook()
    device = rulebook.device("h200")

    def flow(model: Path, references: str | None = None) -> Dataflow:
        return dataflow(captured(str(model), Scenario(), references), device)

    before = flow(tmp_path / "model.py")
    with patched_copy(patch.diff, patch.patch.after, tmp_path.resolve()) as copy:
        assert difference(before, flow(copy / "model.py", "fused_model")) == ""
    with patched_copy(wrong, patch.patch.after, tmp_path.resolve()) as copy:
        assert "instead of" in difference(before, flow(copy / "model.py", "fused_model"))


def test_a_dtype_that_autocast_names_changes_nothing(tmp_path: Path) -> None:
    """Autocast gives some operators the dtype that their operand has."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x):
                h = x.flatten(1).float()
                return 1 - F.cosine_similarity(h, h.exp(), dim=-1)
        """,
        shape="64, 128, 1024, dtype=torch.bfloat16",
        everywhere=True,
    )
    assert "fused_model." in changed(patch)
    assert "under autocast" in patch.tried


def test_a_cast_that_asks_what_is_gone_goes_with_it(tmp_path: Path) -> None:
    """`.to(x.dtype)` launches nothing here; in other dtypes the guard runs the source's lines."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x):
                x = x * 0.7
                h = x.float()
                return (h - h.mean(-1, keepdim=True)).to(x.dtype)
        """,
    )
    assert ".to(" not in changed(patch).partition("class Model(")[2]
    assert 'host.takes("x", x, torch.float32' in patch.diff
    assert ".to(x.dtype)" in asking(patch)


def test_a_write_that_rounds_in_another_dtype_is_guarded(tmp_path: Path) -> None:
    """A kernel's reference writes nothing in place; of a float32 weight and bfloat16 inputs the
    source's result is bfloat16."""
    body = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("weight", torch.rand(1024, dtype=torch.float32) + 0.5)

            def forward(self, x):
                return F.binary_cross_entropy_with_logits(x, x.detach(), pos_weight=self.weight)
    """
    patch = made(tmp_path, body)
    assert ".or_none(x, weight)) is None:\n        return F.binary_cross" in asking(patch)
    assert 'host.takes("x", x, torch.float32' in patch.diff


def run_on_numbers(patch: Patched, folder: Path, diff: str) -> tuple[dict[str, str], str]:
    """What a run of a patched model beside the original says."""
    sizes = (((1, 33),), ((3, 0),))
    runs = Runs(sizes, Scenario(), "fused_model", 1, 600.0, CRITERION, ("bfloat16", "float16"))
    paths, model = patch.patch.after, str(folder / "model.py")
    with ThreadPoolExecutor(1) as pool:
        return run_trial(diff, paths, folder.resolve(), model, [], no_capture, pool, runs)


def no_capture(*_: object) -> Dataflow:
    raise AssertionError("nothing is captured")


ALONE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm(512)

    def forward(self, x):
        return self.norm(x)
"""


def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    """A kernel that does not compute its reference passes as a graph, and not on numbers."""
    patch = made(tmp_path, ALONE, shape="64, 512")
    assert run_on_numbers(patch, tmp_path, patch.diff) == (
        {},
        "run at 3 with 1 seeds, 1 launches of kernels on Triton's interpreter; "
        "in bfloat16 and float16, too",
    )
    wrong = patch.diff.replace("(variance_sum, cols * 1.0)", "(variance_sum, 500.0)")
    assert wrong != patch.diff
    said, _ = run_on_numbers(patch, tmp_path, wrong)
    assert said["run at 3"].startswith("output 0[")


def test_a_run_at_sizes_that_a_guard_leaves_to_the_source_tells_nothing(tmp_path: Path) -> None:
    """Of a second dimension of one the first sizes make more, which the kernel does not serve: the
    kernels run at the next sizes; where no size launches one, the patch is wrong."""
    body = """
        class Model(nn.Module):
            def forward(self, x):
                b = x.flatten(1).exp()
                return F.normalize(F.silu(x), dim=-1) * (1 + b[:, None]) + b[:, None]
    """
    patch = made(tmp_path, body, shape="8, 1, 130")
    assert patch.wrong == {}
    said, ran = run_on_numbers(patch, tmp_path, patch.diff)
    assert said == {}
    assert ran.startswith("run at 3 with 1 seeds, "), ran


@pytest.mark.deep
def test_a_fall_back_is_no_run(tmp_path: Path) -> None:
    patch = made(tmp_path, ALONE, shape="64, 512")
    fallen = patch.diff.replace("torch.float32, (n0, n1)", "torch.float64, (n0, n1)")
    assert fallen != patch.diff
    _, said = run_on_numbers(patch, tmp_path, fallen)
    assert said.startswith("not run: RuntimeError: rms_norm: ")


@pytest.mark.deep
def test_what_is_wrong_in_another_dtype_is_found(tmp_path: Path) -> None:
    """There kernels may fall back; the results hold to the same measure, and errors are faults."""
    body = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.kept = Norm(512), {"float16": torch.float32}

            def forward(self, x):
                dtype = str(x.dtype).removeprefix("torch.")
                return F.linear(self.norm(x), torch.eye(512, dtype=self.kept.get(dtype, x.dtype)))
    """
    patch = made(tmp_path, body, shape="64, 512")
    said, ran = run_on_numbers(patch, tmp_path, patch.diff)
    assert said == {}
    assert "; in bfloat16, too; not in float16: the original does not run so: Runtime" in ran
    returned = "+        return weight * x.to(dtype)"
    uncast = patch.diff.replace(returned, returned.replace(".to(dtype)", ""))
    assert uncast != patch.diff
    said, ran = run_on_numbers(patch, tmp_path, uncast)
    assert [*said] == ["run in bfloat16 at 3"], said
    assert said["run in bfloat16 at 3"].startswith("RuntimeError: expected m1"), said
    assert not ran
    added = "+        x = x * torch.rsqrt(variance + 1e-06)"
    wrong = patch.diff.replace(added, added.replace("= x", "= 1.5 * x"))
    assert wrong != patch.diff
    said, _ = run_on_numbers(patch, tmp_path, wrong)
    assert said["run in bfloat16 at 3"].startswith("output 0["), said


@pytest.mark.deep
def test_files_are_tried_where_they_were_edited(tmp_path: Path) -> None:
    """A model that imports its layers by the tree's folder on the path, where the patch edits."""
    (tmp_path / "layers").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "layers" / "norm.py").write_text(HEAD)
    file = tmp_path / "models" / "model.py"
    file.write_text(
        "import torch\nfrom layers.norm import Norm\n\n\nmodel = Norm(512)\n"
        "example_inputs = [torch.empty(256, 512)]\n"
    )
    out = tmp_path / "x.patch"
    options = ("--out", out, "--no-compile", "--device", "h200", "--root", tmp_path)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).resolve().parents[2])))
    done = spawned.command("patch", file, *options, cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "layers/norm.py:13, saves" in done.stderr
    assert "4 launches of kernels" in done.stderr, done.stderr


NORM_ALONE = """

class Model(Norm):
    pass


def get_init_inputs():
    return [512]


def get_inputs():
    return [torch.empty(256, 512)]
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="patches are tried with git apply")
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(HEAD + NORM_ALONE)
    out, new = tmp_path / "x.patch", tmp_path / "new.py"
    options = ["--out", out, "--model-new", new, "--no-compile", "--device", "h200"]
    done = spawned.command("patch", file, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model.py:13, saves" in done.stderr
    ran = (
        "run at 1 and 3 with 2 seeds, 4 launches of kernels on Triton's interpreter; "
        "in bfloat16 and float16, too"
    )
    assert f"{out}: {ran}" in done.stderr, done.stderr
    assert f"{new}: {ran}" in done.stderr, done.stderr
    assert "class ModelNew" in new.read_text()
    before = file.read_text()
    assert file.read_text() == before, "nothing but the patch is written"
    subprocess.run(["git", "apply", str(out)], cwd=tmp_path, check=True)
    assert "fused_model.rms_norm" in file.read_text()
    assert (tmp_path / "fused_model" / "rms_norm.py").is_file()
    again = subprocess.run(["git", "apply", str(out)], cwd=tmp_path, capture_output=True)
    assert again.returncode != 0


def test_what_has_no_source_is_refused(tmp_path: Path) -> None:
    done = spawned.command("patch", "model.pt2", "--out", tmp_path / "x", cwd=tmp_path)
    assert done.returncode == 2
    assert "only a model in a .py file" in done.stderr


def test_calls_that_ask_the_same_share_a_function(tmp_path: Path) -> None:
    """Two norms of one block are asked by one function, whatever they are called."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two, self.power = nn.LayerNorm(1024), nn.LayerNorm(1024), 2

            def forward(self, x):
                y = torch.sigmoid(self.one(x)) ** self.power
                z = y.sort()[0]
                return torch.sigmoid(self.two(z)) ** self.power
        """,
    )
    assert asking(patch).count("def layer_norm") == 1
    assert changed(patch).count("_or_eager(") == 2


def test_what_a_call_makes_is_a_group_where_a_search_would_be_long(tmp_path: Path) -> None:
    """The norm and the turns are 27 launches, more than a search goes through. No call makes a part
    of what `turned_both` does."""
    patch = made(
        tmp_path,
        """
        def turned(x, cos, sin):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat((-b, a), -1) * sin


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = Norm(1024)
                self.register_buffer("cos", torch.rand(256))
                self.register_buffer("sin", torch.rand(256))

            def turn(self, q):
                a, b, c, d = q.chunk(4, -1)
                a, b = turned(a, self.cos, self.sin), turned(b, self.cos, self.sin)
                c, d = turned(c, self.cos, self.sin), turned(d, self.cos, self.sin)
                return torch.cat((a, b, c, d), -1)

            def turned_both(self, q, k):
                return self.turn(q), self.turn(k)

            def forward(self, q, k):
                q, k = self.norm(q), self.norm(k)
                q, k = self.turned_both(q, k)
                return q @ k.transpose(-2, -1)
        """,
        count=2,
    )
    text = changed(patch)
    assert "return fused_model.rms_norm_or_eager(x, self.weight)" in text
    assert "fused_model.mul_neg_add_or_eager(a, self.cos, self.sin, b, c, d, turned)" in text
    assert text.count("fused_model.") == 2


def test_what_is_left_out_adds_up_to_what_is_accepted_and_not_placed(tmp_path: Path) -> None:
    """No cut has the turns of a loop together, and so none is refused that has them."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x, y):
                for bias in (y, y.flip(0)):
                    x = x + bias
                x = x.relu() * 2
                return x.softmax(-1)
        """,
        count=2,
    )
    assert [put.finding.computes for put in patch.patch.puts] == ["ReLU + mul + softmax"]
    (left,) = patch.left
    assert left.why.endswith("model.py:22: a part of it is in a block of its own")
    assert left.saved_us == pytest.approx(patch.free_us - patch.saved_us)


def test_an_operand_that_an_identity_hands_on_stays_as_it_is_written(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.scaled = nn.Identity()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x, y):
                x = x + y * self.scaled(self.lin(x))
                return x.softmax(-1) @ x.transpose(-2, -1)
        """,
        count=2,
    )
    text = changed(patch)
    assert "x, softmax_out = fused_model.mul_add_softmax(y, self.scaled(self.lin(x)), x)" in text


def test_a_tensor_that_is_read_in_two_shapes_has_the_name_of_one(tmp_path: Path) -> None:
    """What a linear layer multiplies is a matrix that has no name; `x` is a view of that, and the
    norm reads a view of `x`."""
    patch = made(
        tmp_path,
        """
        class Dice(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.norm = nn.BatchNorm1d(d, affine=False)

            def forward(self, x):
                b, t, d = x.shape
                p = torch.sigmoid(self.norm(x.reshape(b * t, d)).reshape(b, t, d))
                return p * x + (1 - p) * x * 0.1


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)
                self.act = Dice(1024)

            def forward(self, x):
                return self.act(self.lin(x))
        """,
        resized=True,
    )
    (put,) = patch.patch.puts
    assert put.finding.computes == "BatchNorm + 4 ops"
    call = "return fused_model.batch_norm_sigmoid_mul_rsub_or_eager(x, self.norm)"
    assert call in changed(patch)


def test_a_cast_of_whole_numbers_asks_for_no_dtype(tmp_path: Path) -> None:
    """The model is bfloat16: what it counts in float32 is counted so in any dtype that it is cast
    to."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.bias = nn.Parameter(torch.rand(32, dtype=torch.bfloat16))

            def forward(self, at):
                assert self.bias.dtype == torch.bfloat16
                rel = at.unsqueeze(-2) - at.unsqueeze(-1)
                near = torch.log(rel.abs().float().clamp(min=1.0)) * 3.5
                return near.long() + 1, self.bias.exp()
        """,
        shape="8, 512, dtype=torch.int64",
    )
    text = changed(patch)
    assert ".float()" not in text.partition("class Model(")[2]
    assert "dtype" not in text.rpartition("fused_model.")[2].partition(")")[0]


def test_operands_of_a_sum_that_goes_get_names(tmp_path: Path) -> None:
    """Three products are made where their sum was, in their order."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = (nn.Linear(1024, 1024) for _ in range(3))
                self.norm = nn.LayerNorm(1024)

            def forward(self, x):
                a = x * 1.5
                gated = torch.sigmoid(self.a(x)) + self.b(x) * self.c(a)
                return self.norm(gated) + a
        """,
        everywhere=True,
        resized=True,
    )
    text = changed(patch)
    assert "a_, b, c = self.a(x), self.b(x), self.c(a)" in text
    assert "gated" not in text.partition("class Model(")[2]
    assert "gated = torch.sigmoid(a_) + b * c" in asking(patch)


def test_what_a_function_asks_and_a_view_that_a_branch_names(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        def exists(value):
            return value is not None


        class Model(nn.Module):
            cap = 30.0

            def forward(self, x, mask=None):
                if exists(self.cap):
                    x = torch.tanh(x / self.cap) * self.cap
                if exists(mask):
                    mask = mask[:, None]
                    x = x.masked_fill(mask < 0, -10000.0)
                return x.softmax(-1)
        """,
        shape="8, 512, 512",
        count=2,
    )
    text = changed(patch).partition("def forward")[2]
    assert "if exists" not in text
    assert "mask[:, None]" not in text
    held = asking(patch)
    assert "self.cap is None\n        or mask is None" in held
    assert "mask = mask[:, None]" in held  # where the statements run


def test_a_number_that_a_tensor_of_numbers_gives(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            most = 100.0

            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(8, 1, 1))

            def forward(self, x):
                scale = torch.clamp(self.scale, max=torch.log(torch.tensor(self.most)).item())
                return (x * scale.exp()).softmax(-1)
        """,
        shape="16, 8, 512, 512",
    )
    assert "most != 100.0" in asking(patch)


def test_a_sum_that_begins_with_a_number(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x):
                loss = 0.0
                for share, y in zip((1.0, 0.5), (x,)):
                    loss = loss + share * torch.tanh(y).pow(2)
                return loss
        """,
    )
    asked = asking(patch)
    assert asked.index("isinstance(loss, torch.Tensor)") < asked.index("loss != 0.0")


def test_what_einsum_copies_is_written_as_it_is_copied(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            scale = 0.125

            def forward(self, q, k):
                q = q.unflatten(-1, (8, 128)).transpose(1, 2) * self.scale
                k = k.unflatten(-1, (8, 128)).transpose(1, 2)
                return torch.einsum("b h i d, b h j d -> b h i j", q, k)
        """,
        shape="8, 512, 1024",
        count=2,
        resized=True,
    )
    assert "self.scale" in changed(patch)
    assert "return fused.squeeze(" in asking(patch)


def test_parameters_that_a_class_always_has_are_not_asked_for(tmp_path: Path) -> None:
    body = """
        class Norms(nn.Module):
            def __init__(self, c{more}):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(c))
                self.bias = {bias}

            def forward(self, x):
                x = x - x.mean(-1, keepdim=True)
                return x * self.weight + self.bias


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norms = nn.ModuleList([])
                for c in (1024, 1024):
                    self.norms.append(Norms({given}))

            def forward(self, x):
                for norm in self.norms:
                    x = norm(x)
                return x
        """
    always = made(tmp_path, body.format(more="", bias="nn.Parameter(torch.zeros(c))", given="c"))
    changed(always)
    assert not any("weight is None" in text for text in always.patch.after.values())
    other = "nn.Parameter(torch.zeros(c)) if bias else None"
    sometimes = made(tmp_path, body.format(more=", *, bias=True", bias=other, given="c, **{}"))
    assert "bias is None" in asking(sometimes)


def test_one_group_serves_all_sizes_where_each_would_have_another(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class Responses(nn.Module):
            def __init__(self, c):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(c))
                self.bias = nn.Parameter(torch.zeros(c))

            def forward(self, x):
                norm = x.norm(p=2, dim=(1, 2), keepdim=True)
                norm = norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)
                bias, weight = self.bias.view(1, 1, 1, -1), self.weight.view(1, 1, 1, -1)
                return x + torch.addcmul(bias, weight, x * norm)


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.large, self.small = Responses(512), Responses(2048)

            def forward(self, x):
                y = x.reshape(-1, 64, 64, 2048)[:, :32]
                return self.large(x), self.small(y)
        """,
        shape="4, 128, 128, 512",
    )
    assert patch.patch.refused == {}
    assert patch.saved_us > 0.85 * patch.free_us


def test_a_module_that_may_be_another_is_given_whole(tmp_path: Path) -> None:
    """Another one may lack the attributes that the kernel takes."""
    patch = made(
        tmp_path,
        """
        def normed(x, norm):
            return torch.tanh(norm(x)) * 2


        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(1024)

            def forward(self, x):
                return normed(x, self.norm)
        """,
    )
    assert "_or_eager(x, norm)" in changed(patch)
    asked = asking(patch)
    assert asked.index("type(norm) is not") < asked.index("norm.weight")


def test_a_result_that_is_one_of_a_tuple(tmp_path: Path) -> None:
    """A name that holds the tuple is not the result's."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def forward(self, x, y):
                z = torch.tanh(x) * 2
                both = y, (z * z).mean(-1)
                return both, torch.exp(z) + both[1][..., None]
        """,
        count=2,
    )
    changed(patch)
    texts = [t for path, t in patch.patch.after.items() if path.name == ASKING]
    assert not any("return both" in text or ", both" in text for text in texts)
