"""`fusion_advisor.export`: a folder that gives a model back, with kernels, without this package."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_advisor as fa
from fusion_advisor.support.errors import CaptureError, UsageError


class Block(nn.Module):
    """A causal block that counts its calls; returns its result and what it adds to."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.gate = nn.Linear(32, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        batch, length, _ = x.shape
        heads = self.heads(self.norm(x)).view(batch, length, 3, 4, 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).flatten(2)) * scale
        gate, up = self.gate(self.norm(x)).chunk(2, -1)
        return {"out": x + F.silu(gate) * up, "before": x}


_LOADED = """
import os, sys
if os.environ["TRITON_INTERPRET"] != "1":
    sys.modules["fusion_advisor"] = None  # an import of it fails
import json, torch
sys.path.insert(0, sys.argv[1])
from {package}.program import load
model, given = load(), torch.load(sys.argv[2])
found = [model(x, scale=2.0) for x in given["inputs"]]
print(json.dumps({{
    "apart": [
        float((one[name] - wanted[name]).abs().max())
        for one, wanted in zip(found, given["wanted"]) for name in ("out", "before")
    ],
    "names": [list(one) for one in found],
    "calls": float(model.state_dict()["calls"]),
    "ours": sorted(n.target.__name__ for n in model.graph.nodes if "{named}" in str(n.target)),
}}))
"""


_RUN = ("TRITON_INTERPRET", "FUSION_ADVISOR_STRICT")
"""What has kernels run on a CPU, and nothing else in their place."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.Module, Path]:
    torch.manual_seed(0)
    model = Block().eval()
    given = (torch.randn(4, 24, 32),), {"scale": 2.0}
    folder = tmp_path_factory.mktemp("here") / "fused_block"
    return fa.export(model, folder, given, device="h200"), model, folder


def loaded(
    folder: Path, model: nn.Module, tmp_path: Path, name: str, *, interpreted: bool = True
) -> dict[str, Any]:
    """What another process sees of the program, at three sizes: in the interpreter, which this
    package repairs, or on a CPU without this package."""
    inputs = [torch.randn(*sizes, 32) for sizes in ((4, 24), (2, 24), (3, 129))]
    with torch.no_grad():
        wanted = [model(x, scale=2.0) for x in inputs]
    torch.save({"inputs": inputs, "wanted": wanted}, tmp_path / "given.pt")
    code = _LOADED.format(package=folder.name, named=name)
    done = subprocess.run(
        [sys.executable, "-c", code, folder.parent, tmp_path / "given.pt"],
        env={**os.environ, **dict.fromkeys(_RUN, str(int(interpreted)))},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_has_the_model_with_its_kernels(
    exported: tuple[Any, nn.Module, Path], tmp_path: Path
) -> None:
    """Wherever the folder is moved to, under another name."""
    done, model, folder = exported
    assert done.kernels == {"mul_add_layer_norm": 1, "swiglu_add": 1}, str(done)
    assert done.rewrites == {"needless-mask": 1}
    assert done.folder == folder
    moved = tmp_path / "vendored" / "of_others"
    shutil.copytree(folder, moved)
    facts = loaded(moved, model, tmp_path, folder.name)
    assert max(facts["apart"]) < 1e-5
    assert facts["names"] == [["out", "before"]] * 3
    assert facts["calls"] == 3
    assert len(facts["ours"]) == 2


def test_a_process_without_this_package_has_it_too(
    exported: tuple[Any, nn.Module, Path], tmp_path: Path
) -> None:
    """On a CPU, where the references run; on a GPU the same modules are imported."""
    _, model, folder = exported
    facts = loaded(folder, model, tmp_path, folder.name, interpreted=False)
    assert max(facts["apart"]) < 1e-5
    assert len(facts["ours"]) == 2


def test_this_process_has_the_folder_too(
    exported: tuple[Any, nn.Module, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook would go on; and an export under the same name, elsewhere, is another one."""
    _, model, folder = exported
    monkeypatch.syspath_prepend(folder.parent)
    program = importlib.import_module(f"{folder.name}.program")
    assert Path(program.__file__ or "").parent == folder
    x = torch.randn(2, 7, 32)
    with torch.no_grad(), pytest.warns(UserWarning, match="running eager instead"):
        found, wanted = program.load()(x, scale=2.0), model(x, scale=2.0)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(UsageError, match="name of a package that is there"):
        fa.export(model, tmp_path / folder.name, (x,), {"scale": 2.0})
    shutil.move(folder, tmp_path / "away")  # and anew where it was
    fa.export(model, folder, (x,), {"scale": 2.0}, device="h200", verify=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="running eager instead"):
        torch.testing.assert_close(program.load()(x, scale=2.0), wanted)


def test_its_files_import_torch_and_triton_alone(
    exported: tuple[Any, nn.Module, Path],
) -> None:
    roots: set[str] = set()
    for file in exported[2].glob("*.py"):
        roots |= set(re.findall(r"^(?:from|import) ([a-z_]\w*)", file.read_text(), re.MULTILINE))
    assert roots - set(sys.stdlib_module_names) <= {"torch", "triton", "pytest"}


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(8)
    fa.export(model, tmp_path / "fused", torch.randn(4, 8), device="h200", verify=False)
    assert model.training
    assert model.num_batches_tracked is not None
    assert int(model.num_batches_tracked) == 0
    assert all(each.requires_grad for each in model.parameters())


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, torch.Tensor]


class Scaled(nn.Module):
    """Returns a record of its library, and has what it returns from another module's method."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(F.silu(x) * x * self.scale, {"most": x.max(-1)[0]})


@pytest.mark.parametrize("kind", ["another's forward", "parametrized", "keywords"])
def test_other_kinds_of_models(kind: str, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    model: nn.Module = Scaled(1.0)
    given: dict[str, Any] = {}
    if kind == "another's forward":
        model.forward = Scaled(7.0).forward
    elif kind == "parametrized":
        model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    else:

        class Keywords(Scaled):
            def forward(self, x: torch.Tensor, **more: torch.Tensor) -> Pair:
                return super().forward(x * more["by"])

        model, given = Keywords(2.0), {"by": torch.ones(8)}
    said = pytest.warns(UserWarning, match="every size is fixed") if given else nullcontext()
    with said:
        done = fa.export(model, tmp_path / "fused", (x,), given, device="h200", verify=False)
    program = torch.export.load(done.folder / "program.pt2").module()
    with torch.no_grad():
        wanted = model(x, **given)
        found = program(x, **given)
    if isinstance(wanted, Pair):
        torch.testing.assert_close(found, tuple(wanted))
    else:
        torch.testing.assert_close(found, wanted)


def test_what_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: int(x.sum())]

    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, "a string, which torch writes and cannot read"

    x = torch.ones(4)
    with pytest.raises(UsageError, match="do not fit forward"):
        fa.export(Block(), tmp_path / "fused", (x, x, x))
    with pytest.raises(UsageError, match="name of a package that is there"):
        fa.export(Block(), tmp_path / "torch", x)
    with pytest.raises(UsageError, match="is no name of a package"):
        fa.export(Block(), tmp_path / "class", x)
    with pytest.raises(CaptureError, match=r"writing .* raised RuntimeError"):
        fa.export(Named(), tmp_path / "fused", x)
    with pytest.raises(UsageError, match="is no name of a package"):
        fa.export(Block(), tmp_path / "my-model", x)
    with pytest.raises(UsageError, match="is there already"):
        fa.export(Block(), tmp_path, x)
    with pytest.raises(CaptureError, match="exporting Counting raised"):
        fa.export(Counting(), tmp_path / "fused", x)
    assert not (tmp_path / "fused").exists()
