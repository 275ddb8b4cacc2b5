"""What `import fusion_advisor` offers beside `analyze` and `apply`: `capture`, `fuse`, `patch` and
`bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.support.errors import UsageError

MODEL = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)


def get_inputs():
    return [torch.randn(1024, 1024)]
"""


class Softmax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "model.py"
    written.write_text(MODEL)
    return written


def test_every_name_is_there() -> None:
    assert {name for name in fa.__all__ if getattr(fa, name, None) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'fused'"):
        _ = fa.fused  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]


def test_a_graph_is_captured_and_fused(file: Path) -> None:
    live = fa.capture(Softmax(), torch.empty(1024, 1024))
    named = fa.capture(str(file))
    assert [node.op for node in live.nodes] == [node.op for node in named.nodes]
    fusion = fa.fuse(live, "h200")
    report = fa.analyze(Softmax(), torch.empty(1024, 1024), device="h200", verify=False)
    (group,), (row,) = fusion.groups, report.groups
    assert (group.id, group.pattern, group.decision.accepted) == ("g1", "softmax", True)
    assert group.decision.fused_bytes == row.traffic.fused_bytes
    assert [candidate.id for candidate in fusion.candidates] == [
        candidate.id for candidate in report.candidates
    ]
    assert fusion.kernel("g1").text == fusion.kernel("softmax").text
    with pytest.raises(UsageError, match="g2: the groups are g1"):
        fusion.kernel("g2")


def test_a_device_decides() -> None:
    graph = fa.capture(Softmax(), torch.empty(1024, 1024))
    saved = {name: fa.fuse(graph, name).groups[0].saved_us for name in ("h200", "a100")}
    assert saved["a100"] != saved["h200"]
    with pytest.raises(UsageError, match="h2000"):
        fa.fuse(graph, "h2000")


def test_a_patch_is_text(file: Path) -> None:
    made = fa.patch(str(file), root=file.parent, device="h200", verify=False, compile=False)
    assert "    return fused_model.softmax_or_eager(x)\n" in made.diff
    assert not (file.parent / "fused_model").exists()
    assert file.read_text() == MODEL
    assert not made.wrong


def test_a_patch_says_what_is_wrong_with_its_arguments(file: Path) -> None:
    with pytest.raises(UsageError, match="nowhere\\.py: no such file"):
        fa.patch("nowhere.py")
    with pytest.raises(UsageError, match="is not in it"):
        fa.patch(str(file), root=Path(__file__).parent)
    with pytest.raises(UsageError, match="source of transformers is not yours"):
        fa.patch("hf:config.json")


X = torch.empty(8, 8)
NUMBER: Any = 3
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "analyze": (lambda: fa.analyze(Softmax(), NUMBER), "inputs are a int; give a list"),
    "capture": (lambda: fa.capture(Softmax(), X, mode=NUMBER), "mode 3: expected eval or train"),
    "fuse": (lambda: fa.fuse(NUMBER), "int is no Graph; give what capture returns"),
    "apply": (lambda: fa.apply(NUMBER), "int is neither a module nor a function"),
    "apply tune": (lambda: fa.apply(Softmax(), tune=NUMBER), "tune=3: one of 'off', 'cached'"),
    "apply mode": (lambda: fa.apply(Softmax(), mode="fast"), "apply: .*mode=fast"),
    "apply inner": (lambda: fa.apply(Softmax(), inner="gcc"), "inner='gcc': one of 'inductor'"),
    "apply inputs": (lambda: fa.apply(Softmax(), NUMBER), "inputs are a int; give a list"),
    "apply dry": (
        lambda: fa.apply(Softmax(), [iter([X])], dry=True),
        "list_iterator, which dry=True",
    ),
    "unapply": (lambda: fa.unapply(torch.relu), "is no module; apply changed none"),
    "patch level": (lambda: fa.patch("model.py", level=NUMBER), "expected kernel or framework"),
    "patch mode": (lambda: fa.patch("model.py", mode=NUMBER), "expected eval or train"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_line(name: str) -> None:
    call, line = WRONG[name]
    with pytest.raises(UsageError, match=line):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_needs_a_gpu_or_rehearses(tmp_path: Path) -> None:
    report = fa.analyze(
        Softmax(), torch.empty(256, 256), device="h200", verify=False, compile=False
    )
    with pytest.raises(UsageError, match="there is none here; give rehearse=True"):
        fa.bench(report)
    assert fa.bench(report, rehearse=True, torch_compile=False) is report
    report.save(tmp_path)
    with pytest.raises(UsageError, match="--only g7"):
        fa.bench(tmp_path, only=["g7"], rehearse=True)
