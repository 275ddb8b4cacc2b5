"""Patches for training: kernels of both passes in the source, proven with gradients."""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.codegen.header import read_stamp, stamped
from fusion_advisor.codegen.kernel_package import kernels_of, read_package
from fusion_advisor.codegen.pair import has_backward
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.sourcepatch.trial import Runs, run_trial
from fusion_advisor.workflows.patch import Patched, patch_model
from fusion_advisor.workflows.update import UpdateResult, update_kernels

from .checks import CRITERION
from .in_process import captured, captured_as_asked
from .spawned import command, facts_by
from .test_called_together import MODEL as ATTENTION
from .test_called_together import ROTATED

pytestmark = pytest.mark.usefixtures("ways")

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""

NORM = f"""{HEAD}

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, width))

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h
"""

MODEL = f"""{NORM}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm(256)
        self.gate = nn.Linear(256, 512, bias=False)
        self.up = nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256, bias=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(256, 500, bias=False)

    def forward(self, x, residual, targets):
        x = x + residual
        y = self.norm(x)
        x = x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))
        scores = self.head(x)
        top = scores.max(dim=-1, keepdim=True)[0]
        e = torch.exp(scores - top)
        p = e / e.sum(dim=-1, keepdim=True)
        return -torch.log(p.gather(-1, targets[:, None])[:, 0]).mean()


def get_inputs():
    return [torch.randn(4096, 256), torch.randn(4096, 256), torch.randint(0, 500, (4096,))]
"""


def asked(folder: Path, mode: str = "train") -> Request:
    """Request for a patch of a folder's model, kernels unchecked."""
    scenario = Scenario(mode="train" if mode == "train" else "eval")
    return Request(
        str(folder / "model.py"), scenario, device="h200", verify=False, compile=False,
        pairs=mode == "train",
    )  # fmt: skip


def made(folder: Path, text: str) -> Patched:
    (folder / "model.py").write_text(text)
    request = asked(folder)
    capture = captured_as_asked(request.scenario, resized=True)
    patch = patch_model(request, folder.resolve(), captured=capture)
    assert patch.wrong == {}
    return patch


def apply(folder: Path, patch: Patched) -> None:
    subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=folder, check=True)


def changed(patch: Patched) -> str:
    return next(text for path, text in patch.patch.after.items() if path.name == "model.py")


def kernels(patch: Patched) -> dict[str, str]:
    files = {path: text for path, text in patch.patch.after.items() if path.name != "model.py"}
    return kernels_of(files)


@dataclass(frozen=True)
class Case:
    """A folder with a model, and its patch."""

    folder: Path
    patch: Patched

    def ran(self, wrong: tuple[str, str, str] | None = None) -> tuple[dict[str, str], str]:
        """What a run with gradients says, of the patch or with a mistake in one of its kernels: its
        name, what is written there (a pattern), and what is written instead."""
        edited = self.patch.patch
        if wrong:
            name, right, instead = wrong
            path = next(path for path in edited.after if path.stem == name)
            text = re.sub(right, instead, edited.after[path])
            assert text != edited.after[path]
            edited = replace(edited, after=edited.after | {path: text})
        # a mistake is seen in one draw: eager need not be drawn thousands of times beside it
        criterion = replace(CRITERION, eager_elements=1) if wrong else CRITERION
        runs = Runs(
            (((1, 0), (3, 0)),), Scenario(mode="train"), "fused_model", 1, 600.0, criterion,
            () if wrong else ("bfloat16",), gradients=True,
        )  # fmt: skip
        root = self.folder.resolve()
        with ThreadPoolExecutor(1) as pool:
            return run_trial(
                edited.diff(root), edited.after, root, str(root / "model.py"), [], no_capture,
                pool, runs,
            )  # fmt: skip


def no_capture(*_: object) -> Dataflow:
    raise AssertionError("nothing is captured")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("trained")
    return Case(folder, made(folder, MODEL))


def test_the_kernels_of_both_passes_stand_behind_the_same_call(case: Case) -> None:
    text = changed(case.patch)
    assert "x, y = fused_model.residual_rms_norm_or_eager(x, residual, self.norm)" in text
    assert "fused_model.swiglu(self.gate(y), self.up(y))" in text
    assert text.count(", with its backward: ") == 3
    files = kernels(case.patch)
    assert len(files) == 3
    assert all(has_backward(text) for text in files.values())
    assert case.patch.backward.keys() == files.keys()
    assert re.fullmatch(
        r"with its backward in 1 launch, for which 16.8 MB are kept instead of 25.2 MB",
        case.patch.backward["swiglu"],
    )


def test_gradients_are_those_of_float64_and_no_kernel_falls_back(case: Case) -> None:
    wrong, ran = case.ran()
    assert wrong == {}
    assert ran.startswith("run at 1 and 3 with 1 seeds, without and with a backward pass, ")
    assert "in bfloat16, too" in ran


@pytest.mark.parametrize(
    ("kernel", "right", "instead", "said"),
    [
        (
            "swiglu",
            r"return \((\w+), (\w+)\)(?=\n\n\ndef reference)",
            r"return (\2, \1)",
            "with gradients: gradient of norm.weight",
        ),
        (
            "residual_rms_norm",
            r"\* -0\.5\b",
            "* -0.51",
            "with gradients: gradient of input 0",
        ),
        # dropout stands before it: all that are compared draw the same numbers
        ("swiglu", r"(tl\.store\(mul_out_ptr.*), mul\b", r"\1, mul * 1.01", "output 0"),
    ],
)
def test_a_mistake_in_either_pass_is_seen(
    case: Case, kernel: str, right: str, instead: str, said: str
) -> None:
    wrong, ran = case.ran((kernel, right, instead))
    assert ran == ""
    assert said in wrong["run at 1 and 3"]


# -- in a program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenarios(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario of `patched_training` saw, all in one process of their own."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "original.py").write_text(MODEL)
    (folder / "model.py").write_text(MODEL)
    apply(folder, case.patch)
    return facts_by("patched_training.py", folder)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("trained", {"same": True, "fallbacks": {}, "launches": 8}),
        ("without_gradients", {"same": True, "fallbacks": {}, "launches": 4}),
        ("inputs_that_need_none", {"same": True, "fallbacks": {}, "launches": 8}),
        ("frozen", {"same": True, "none": True, "fallbacks": {}}),
        ("under_autocast", {"same": True}),
        ("twice", {"said": True}),
    ],
)
def test_a_program_trains_with_it(
    scenarios: dict[str, dict[str, Any]], name: str, seen: dict[str, Any]
) -> None:
    facts = scenarios[name]
    assert "raised" not in facts, facts["raised"]
    assert facts == seen


# -- activations and losses ------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "computed",
    [
        "F.relu6(x) + F.hardswish(y) * F.elu(x)",
        "F.softsign(x) * F.mish(y)",
        "F.huber_loss(F.selu(x), y, reduction='none').sum(-1)",
        "F.binary_cross_entropy_with_logits(x * 0.5, y, reduction='none').mean(-1)",
    ],
)
def test_activations_and_losses_have_their_backward(computed: str, tmp_path: Path) -> None:
    model = f"""{HEAD}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(512, 512)

    def forward(self, x, y):
        x = self.lin(x)
        return {computed}


def get_inputs():
    return [torch.randn(4096, 512), torch.randn(4096, 512)]
"""
    ((_, kernel),) = kernels(made(tmp_path, model)).items()
    assert has_backward(kernel)


# -- what has no backward --------------------------------------------------------------------------

WITHOUT = f"""{HEAD}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(512, 512)

    def forward(self, x, scale, places):
        x = self.lin(x)
        h = torch.sigmoid(x) * 2.0
        y = h.gather(-1, places) * h[:, :256]
        scale = torch.tanh(scale) * 3.0 + 1.0
        return y @ self.lin.weight[:256], torch.cumsum(scale, 0)


def get_inputs():
    places = torch.randint(0, 512, (4096, 256))
    return [torch.randn(4096, 512).requires_grad_(), torch.randn(4096, 512), places]
"""


def test_a_size_that_a_backward_alone_is_held_to_is_asked(tmp_path: Path) -> None:
    """128 is the width and the least number of an int8: the gradient's file serves that width."""
    text = f"""{HEAD}

class Model(nn.Module):
    def forward(self, a):
        a = F.elu(a)
        s = a.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return torch.round(a / s).clamp(-128, 127).to(torch.int8), s


def get_inputs():
    return [torch.randn(7, 128)]
"""
    patch = made(tmp_path, text)
    assert any("a.size(1) != 128" in text for text in patch.patch.after.values())
    assert list(map(has_backward, kernels(patch).values())) == [True]


def test_a_group_without_backward_is_left_with_the_reason(tmp_path: Path) -> None:
    """A group that no gradient passes through needs none, and is put as it is."""
    patch = made(tmp_path, WITHOUT)
    (why,) = patch.patch.refused.values()
    assert why.startswith("no backward: a part of it has no kernel: aten.scatter_add.default is a")
    text = changed(patch)
    assert "h = torch.sigmoid(x) * 2.0" in text
    assert "fused_model.tanh_mul" in text
    ((_, kernel),) = kernels(patch).items()
    assert not has_backward(kernel)
    assert patch.backward == {}


# -- kernels that are there ------------------------------------------------------------------------


@pytest.fixture
def standing(case: Case, tmp_path: Path) -> Path:
    """That model with its patch, the kernels as an earlier version left them."""
    shutil.copytree(case.folder, tmp_path, dirs_exist_ok=True)
    apply(tmp_path, case.patch)
    for name, text in kernels_of(read_package(tmp_path / "fused_model")).items():
        stamp = read_stamp(text)
        assert stamp
        old = stamped(text.replace("num_warps=", "num_warps=1 * "), replace(stamp, tool="0.0.1"))
        (tmp_path / "fused_model" / f"{name}.py").write_text(old)
    return tmp_path


def updated(folder: Path, mode: str) -> UpdateResult:
    found = update_kernels(asked(folder, mode), folder.resolve(), captured=captured)
    assert found.wrong == {}
    return found


@pytest.mark.deep
def test_files_with_their_backward_are_written_anew_in_train_mode(
    case: Case, standing: Path
) -> None:
    left = updated(standing, "eval")
    assert left.written == ()
    assert {*left.left.values()} == {"it has its backward, which --mode train writes anew"}
    found = updated(standing, "train")
    assert {*found.written} == kernels(case.patch).keys()
    assert all(has_backward(text) for p, text in found.patch.after.items() if p.stem == "swiglu")


@pytest.mark.deep
def test_statements_that_were_put_back_get_their_kernels_again(case: Case, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    apply(tmp_path, case.patch)
    patch = made(tmp_path, MODEL)
    assert {path.name for path in patch.patch.after} == {"model.py"}


@pytest.mark.deep
def test_the_command_says_what_it_placed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    given = ("patch", "model.py", "--mode", "train", "--device", "h200", "--no-compile")
    done = command(*given, "--model-new", "new.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in forward alone; with its backward in 1 launch, for which" in done.stderr
    assert "without and with a backward pass" in done.stderr
    searched = command(*given, "--search", "--out", "x.patch", cwd=tmp_path)
    assert searched.returncode == 2
    assert "--search" in searched.stderr


FROZEN = f"""{NORM}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 256)
        self.given = nn.Linear(256, 256)
        for each in (*self.words.parameters(), *self.given.parameters()):
            each.requires_grad_(False)
        self.first, self.second, self.lin = Norm(256), Norm(256), nn.Linear(256, 256)
        self.second.weight.requires_grad_(False)

    def forward(self, ids):
        return self.second(self.lin(self.first(self.given(self.words(ids)))))


def get_inputs():
    return [torch.randint(0, 100, (4096,))]
"""


def test_one_kernel_has_the_gradients_that_any_of_its_calls_asks_for(tmp_path: Path) -> None:
    """What the first call takes requires no gradient, and the weight of the second is frozen."""
    case = Case(tmp_path, made(tmp_path, FROZEN))
    (text,) = kernels(case.patch).values()
    assert re.search(r'gradients=\("\w+", "\w+"\)', text)
    wrong, ran = case.ran()
    assert wrong == {}
    assert ran.startswith("run at 1 and 3 with 1 seeds, without and with a backward pass, ")


def test_each_part_of_a_call_that_gives_several_results_keeps_its_kernel(tmp_path: Path) -> None:
    """No backward is that of several results: the norms and the rotations have kernels."""
    inputs = "def get_inputs():\n    return [torch.empty(16, 512, 64)]\n"
    patch = made(tmp_path, NORM + textwrap.dedent(ROTATED + ATTENTION) + "\n\n" + inputs)
    assert "q_out = fused_model.rotary_embedding" in changed(patch)
    assert "return fused_model.rms_norm" in changed(patch)
