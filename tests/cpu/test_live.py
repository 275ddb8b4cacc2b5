"""`fusion_advisor.analyze(model, inputs)`: the report of a model that is there, left as it is."""

from __future__ import annotations

import json
import random
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_advisor as fa
from fusion_advisor.report.schema import load_report
from fusion_advisor.support.errors import CaptureError, UsageError

from ..sample_traces import Recording

QUICK = {"device": "h200", "verify": False, "compile": False}


class Model(nn.Module):
    """A group, a dropout that draws in train mode, and a count that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return x + self.drop(torch.sigmoid(self.linear(x)) * scale)


class Computing(TorchDispatchMode):
    """Notes what is launched on tensors that have data."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launched.append(str(func))
        return func(*args, **(kwargs or {}))


X = torch.randn(512, 64)


def test_a_live_model_is_analysed_and_left_as_it_is() -> None:
    model = Model().train()
    model.linear.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    drawn, drawn_by_torch = random.getstate(), torch.get_rng_state()
    with Computing() as computing:
        report = fa.analyze(model, X, **QUICK)
    assert computing.launched == [], "nothing is copied and nothing computed"
    assert [group.pattern for group in report.groups] == ["pointwise-chain"]
    assert (report.scenario.mode, report.model.source) == ("eval", "Model")
    assert "mode=eval" in report.scenario.defaults
    assert [m.training for m in model.modules()] == [True, False, True]
    assert model.calls == 0
    assert all(torch.equal(state[n], tensor) for n, tensor in model.state_dict().items())
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places
    assert random.getstate() == drawn
    assert torch.equal(torch.get_rng_state(), drawn_by_torch)


def test_a_model_needs_no_weights_at_all() -> None:
    with torch.device("meta"):
        model, x = Model(), torch.empty(512, 64)
    report = fa.analyze(model, (x,), **QUICK)
    assert report.groups
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "given",
    [X, [X], (X,), {"x": X}, ([X], {"scale": 2.0})],
    ids=["a tensor", "a list", "a tuple", "keywords", "both"],
)
def test_inputs_are_given_as_in_a_file(given: Any) -> None:
    report = fa.analyze(Model(), given, **QUICK)
    expected = fa.analyze(Model(), None, kwargs={"x": X}, **QUICK)
    assert report.totals == expected.totals


def test_train_mode_is_that_of_the_report_alone() -> None:
    model = Model().eval()
    report = fa.analyze(model, X, mode="train", **QUICK)
    assert any("dropout" in node.op or "bernoulli" in node.op for node in report.nodes)
    assert not any(module.training for module in model.modules())


def test_a_model_may_be_named_as_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Softmax(-1)\nexample_inputs = [torch.empty(64, 64)]\n"
    )
    assert fa.analyze(str(file), **QUICK).model.source == str(file)
    with pytest.raises(UsageError, match="has inputs of its own"):
        fa.analyze(str(file), X, **QUICK)


def test_what_cannot_be_captured_is_one_line() -> None:
    with pytest.raises(CaptureError, match="forward raised RuntimeError") as caught:
        fa.analyze(Model(), torch.empty(3, 5), **QUICK)
    assert "\n" not in str(caught.value)


def test_a_kernel_is_checked_and_has_its_text() -> None:
    report = fa.analyze(Model(), X, device="h200", compile=False)
    (group,) = report.groups
    assert group.kernel.status == "interpreted"
    assert "@triton.jit" in (group.kernel.text or "")


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    report = fa.analyze(Model(), X, **QUICK)
    shown = report._repr_html_()
    head, text, tail = shown.split('"', 2)
    assert (head, tail.count("<")) == ("<iframe srcdoc=", 1), "nothing of the page is outside"
    assert unescape(text) == report.model_copy(update={"graph": None}).to_html()
    assert 'sandbox="allow-scripts"' in tail
    assert str(report).startswith("Model on NVIDIA H200")


def test_saved_it_is_what_the_command_leaves(tmp_path: Path) -> None:
    report = fa.analyze(Model(), X, **QUICK)
    report.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "graph.json", "kernels", "report.explorer.json", "report.html", "report.json",
        "report.md", "report.sarif",
    ]  # fmt: skip
    loaded = load_report(tmp_path / "report.json")
    assert loaded.totals == report.totals
    assert loaded.groups[0].kernel.text == report.groups[0].kernel.text
    assert json.loads((tmp_path / "graph.json").read_text()) == json.loads(json.dumps(report.graph))


def test_a_profile_gives_measured_times(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(3):
        recording.op("aten::addmm", [("nvjet_gemm", 30.0)], [[64], [512, 64], [64, 64]])
        recording.op("aten::sigmoid", [("sigmoid_kernel_cuda", 5.0)], [[512, 64]])
        recording.op("aten::mul", [("MulFunctor", 6.0)], [[512, 64]])
        recording.op("aten::add", [("CUDAFunctor_add", 7.0)], [[512, 64], [512, 64]])
    trace = recording.write(tmp_path / "trace.json")
    report = fa.analyze(Model(), X, verify=False, compile=False, profile=trace)
    assert report.profile is not None
    assert (report.profile.steps, report.profile.forward_linked) == (3, pytest.approx(1))
    times = [node.measured.us for node in report.nodes if node.measured]
    assert times == [30.0, 5.0, 6.0, 7.0]
    (group,) = report.groups
    assert (group.impact.basis, report.device.name) == ("profile", "h200")
    with pytest.raises(UsageError, match="a trace of other sizes"):
        fa.analyze(Model(), X[:256], verify=False, compile=False, profile=str(trace))
