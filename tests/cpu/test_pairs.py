"""Groups with their backward: one file, whose gradients are those of float64 autograd."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.shipped.files import write_kernel
from fusion_advisor.support.worker import Worker

from .checks import checked
from .paired_models import DTYPES, MODELS, RULES, dropped, gathered, pair, pairs_of
from .spawned import command, facts_by

IN_SEVERAL = "quantized", "layer_norm_of_few_rows", "group_norm"
"""Pairs of which a pass has no launcher, or several: a weight's gradient is summed apart."""
WITH_MORE = "loss", "masked_distance"
"""Pairs that have no kernels where they keep no more than eager."""

each_pair = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.sampled(5)  # the files of all are made and read by the next test
@each_dtype
@each_pair
def test_results_and_gradients_are_those_of_float64(
    name: str, dtype: torch.dtype, worker: Worker, request: pytest.FixtureRequest
) -> None:
    found = pair(name, dtype)
    (check,) = checked(
        worker, found.kernel, seeds=6 if request.node.get_closest_marker("deep") else 2
    )
    assert check.failure is None
    for part in checked(worker, *found.parts, seeds=1):
        assert part.failure is None


@pytest.mark.sampled(3)
@each_dtype
@each_pair
def test_a_pass_is_one_launcher_and_keeps_no_more_than_eager(name: str, dtype: torch.dtype) -> None:
    found = pair(name, dtype)
    text = " ".join(found.kernel.text.split())
    launchers = re.findall(r"def \w+_(forward|backward)\(", text)
    assert launchers == ["forward", "backward"] or name in IN_SEVERAL
    kept, eager = map(int, re.findall(r"(\d+) B are alive for it, in eager (\d+) B", text)[0])
    assert kept <= eager * (1 + RULES.pairs.more_kept.value * (name in WITH_MORE))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        # x is an input; beside it a number of each row
        ("rms_norm", 512 * 1024 * 2 + 1024 * 2 + 512 * 4),
        ("residual_layer_norm", 512 * 1024 * 2 + 1024 * 2 + 2 * 512 * 4),
        ("swiglu", 2 * 512 * 1000 * 2),
        ("softmax", 2 * 4 * 200 * 200 * 2),  # its result
        ("z_loss", 512 * 2000 * 2 + 512 * 8 + 2 * 512 * 4),
        ("quantized", 0),
    ],
)
def test_statistics_of_rows_are_kept_and_results_made_again(name: str, kept: int) -> None:
    assert f"{kept} B are alive for it" in " ".join(pair(name, DTYPES[0]).kernel.text.split())


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("swiglu", r"return \((\w+), (\w+)\)(?=\n\n\ndef reference)", r"return (\2, \1)"),
        ("rms_norm", r"\* -0\.5\b", "* -0.51"),
        ("quantized", r"return \(gradient,\)", "return (gradient * 0.99,)"),
    ],
)
def test_a_wrong_gradient_is_seen(name: str, right: str, wrong: str, worker: Worker) -> None:
    kernel = pair(name, torch.float32).kernel
    text = re.sub(right, wrong, kernel.text)
    assert text != kernel.text
    (check,) = checked(worker, replace(kernel, text=text), seeds=1)
    assert (check.failure or "").startswith("gradients: ")


@pytest.mark.parametrize("name", ["rotary", "swiglu", "geglu", "softmax"])
def test_the_statements_have_the_gradients_of_differences(name: str) -> None:
    _, shapes, trained = MODELS[name]
    scope: dict[str, Any] = {"torch": torch}
    exec(pair(name, torch.float32).kernel.yardstick, scope)
    small = [tuple(min(size, 4 if d < 3 else 64) for d, size in enumerate(s)) for s in shapes]
    if name == "rotary":
        small = [(1, 1, 1, 64), (1, 1, 1, 64), (1, 1, 1, 64)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in small]
    for each in inputs[:trained]:
        each.requires_grad_()
    assert torch.autograd.gradcheck(scope["reference"], inputs)


@pytest.mark.parametrize(
    ("call", "shapes", "why"),
    [
        (
            dropped,
            ((512, 1000), (512, 1000)),
            "it draws random numbers, which backward would have to draw again",
        ),
        (gathered, ((512, 2000), (512, 40), (512, 40, 0)), "a part of it has no kernel: "),
    ],
)
def test_what_has_no_pair_says_why_in_a_line(
    call: Any, shapes: tuple[tuple[int, ...], ...], why: str
) -> None:
    (found,) = pairs_of(call, shapes, 2, torch.bfloat16)
    assert isinstance(found, str)
    assert found.startswith(why)
    assert "\n" not in found


def test_what_requires_no_gradient_has_no_pair() -> None:
    call, shapes, _ = MODELS["swiglu"]
    found = pairs_of(lambda a, b: call(a.detach(), b.detach()), shapes, 2, torch.bfloat16)
    assert found == ["none of its inputs requires a gradient"]


# -- in a program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario of `paired_kernels` saw, all in one process of their own."""
    folder = tmp_path_factory.mktemp("paired")
    for name in ("swiglu", "residual_rms_norm"):
        kernel = pair(name, torch.float32).kernel
        write_kernel(folder / "mine" / f"{kernel.name}.py", kernel.text)
    return facts_by("paired_kernels.py", folder)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("eager", {"same": True, "fallbacks": {}}),
        ("compiled", {"each": [True] * 5, "graphs": 1, "fallbacks": {}}),
        ("checkpointed", {"same": [True, True], "fallbacks": {}}),
        ("distributed", {"same": [True, True], "fallbacks": {}}),
        ("spread", {"same": True, "fallbacks": {}}),
        ("some", {"asked": True, "other": None, "fallbacks": {}}),
        ("without_gradients", {"same": True, "graded": False, "fallbacks": {}}),
        ("exported", {"same": True, "gradient": True}),
        ("in_another_dtype", {"same": True, "fell": ["mine.swiglu.swiglu"]}),
        ("again", {"said": ["swiglu: its gradients have none (create_graph=True): run the "
                            "model's own statements where they are needed"] * 2}),
        ("deterministic", {"same": True}),
    ],
)  # fmt: skip
def test_autograd_follows_it(
    scenarios: dict[str, dict[str, Any]], name: str, seen: dict[str, Any]
) -> None:
    facts = scenarios[name]
    assert "raised" not in facts, facts["raised"]
    assert facts == seen


MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 512, bias=False)
        self.gate = nn.Linear(64, 512, bias=False)

    def forward(self, x):
        return F.dropout(F.silu(self.gate(x)) * self.up(x), 0.1) @ self.up.weight


def get_inputs():
    return [torch.randn(512, 64)]
"""


def test_emit_in_train_mode_writes_files_that_train(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("F.dropout(", "(").replace(", 0.1)", ")"))
    done = command("emit", "model.py", "--mode", "train", "--out", "kernels", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with its backward" in done.stderr
    text = (tmp_path / "kernels" / "swiglu.py").read_text()
    assert "@host.trained(" in text
    assert text.count("Checked: on Triton's interpreter") == 1


def test_emit_says_what_has_no_backward(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    given = ("--mode", "train", "--no-verify", "--no-compile", "--out", "kernels")
    done = command("emit", "model.py", *given, cwd=tmp_path)
    assert "no backward: it draws random numbers" in done.stderr
    searched = command(
        "emit", "model.py", "--mode", "train", "--search", "--out", "k", cwd=tmp_path
    )
    assert searched.returncode == 2
    assert "--search" in searched.stderr


def test_the_limit_on_launchers_is_a_rule() -> None:
    assert RULES.pairs.launchers.count >= 2
