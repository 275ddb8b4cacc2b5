"""`ModelNew`: one file that stands alone, with the same parameters and the same results."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.sourcepatch.editing.inline import inline, require_model
from fusion_advisor.sourcepatch.trial import Runs, run_trial_of_file
from fusion_advisor.support.errors import UsageError
from fusion_advisor.workflows.patch import Patched, patch_model

from . import spawned
from .checks import CRITERION
from .generated import kernel
from .in_process import captured_as_asked
from .spawned import run_script

pytestmark = pytest.mark.usefixtures("ways")

CROWDED = '''
"""A problem whose names are those of emitted files."""

import math as os

import torch
from torch import nn
from torch.nn import functional as F

rows, reference, fused_swiglu = 700, 96, 64


def serves(x):
    return x + 1


class Norm(nn.Module):
    """Of each row."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d))

    def forward(self, x):
        # the mean of the squares
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x


class Model(nn.Module):
    """Another Model than that of one norm."""

    def __init__(self, d, wide=fused_swiglu):
        super(Model, self).__init__()
        tl = os.sqrt(d)
        assert tl > 1
        self.norm = Norm(d)
        self.gate, self.up = nn.Linear(d, wide), nn.Linear(d, wide)

    def forward(self, x):
        y = self.norm(serves(x))
        return F.silu(self.gate(y)) * self.up(y)


def get_inputs():
    return [torch.rand(rows, reference)]


def get_init_inputs():
    return [reference]
'''


def made(file: Path, *, mode: str = "train", resized: bool = True) -> Patched:
    """The file's patch and its `ModelNew`, kernels unchecked; proven at its own sizes alone unless
    `resized`."""
    scenario = Scenario(mode="train" if mode == "train" else "eval")
    request = Request(str(file), scenario, device="h200", verify=False, compile=False)
    capture = captured_as_asked(scenario, resized=resized)
    return patch_model(request, file.parent.resolve(), captured=capture, model_new=True)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Patched]:
    """The crowded file and its patch, which no test changes."""
    file = tmp_path_factory.mktemp("crowded") / "problem.py"
    file.write_text(CROWDED)
    return file, made(file, resized=False)


def test_it_computes_what_the_model_does(crowded: tuple[Path, Patched], tmp_path: Path) -> None:
    """Loaded as KernelBench loads it, in train mode without gradients: the same parameters after
    the same seed, kernels launched through the interpreter, fall-backs forbidden."""
    file, patch = crowded
    assert patch.wrong == {}
    assert {put.finding.pattern for put in patch.patch.puts} == {"rms-norm", "swiglu"}
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    (alone / "new.py").write_text(patch.model_new)
    run = f"""
        import importlib.util, sys
        import torch
        from fusion_advisor.verify.interpreter import install
        install()
        spec = importlib.util.spec_from_file_location("temp_module", "new.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["temp_module"] = module
        spec.loader.exec_module(module)
        original = {{}}
        exec(open({str(file)!r}).read(), original)
        with torch.no_grad():
            torch.manual_seed(42)
            one = original["Model"](*original["get_init_inputs"]())
            torch.manual_seed(42)
            two = module.ModelNew(*original["get_init_inputs"]())
            assert [*one.state_dict()] == [*two.state_dict()]
            for name, value in one.state_dict().items():
                assert torch.equal(value, two.state_dict()[name]), name
            for rows in (1, 37, 700):
                x = torch.rand(rows, 96)
                torch.testing.assert_close(two(x), one(x), atol=1e-4, rtol=1e-4)
            whole = torch.compile(two, fullgraph=True, dynamic=True, backend="eager")
            torch.testing.assert_close(whole(x), one(x), atol=1e-4, rtol=1e-4)
    """
    run_script(textwrap.dedent(run), folder=alone, FUSION_ADVISOR_STRICT="1")


ASKS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = 3.0

    def forward(self, x):
        return torch.tanh(x) ** self.by


def get_inputs():
    return [torch.rand(64, 96)]


def get_init_inputs():
    return []
"""


def test_functions_that_ask_stand_behind_the_kernels(tmp_path: Path) -> None:
    """And not under the kernels' licence, for their statements are the problem's."""
    file = tmp_path / "problem.py"
    file.write_text(ASKS)
    text = made(file, resized=False).model_new
    assert "return fused_tanh_pow_or_eager(x, self.by)" in text
    assert text.index("SPDX-SnippetEnd") < text.index("def fused_tanh_pow_or_eager(x, by):")
    (tmp_path / "new.py").write_text(text)
    run = """
        import torch
        from fusion_advisor.verify.interpreter import install
        install()
        import new, problem
        one, two, x = problem.Model(), new.ModelNew(), torch.rand(7, 96)
        for by in (3.0, 2.0):
            one.by = two.by = by
            torch.testing.assert_close(two(x), one(x))
    """
    run_script(textwrap.dedent(run), folder=tmp_path, FUSION_ADVISOR_STRICT="1")


@pytest.mark.deep
def test_a_wrong_kernel_in_it_is_found(crowded: tuple[Path, Patched]) -> None:
    """It is run beside the original before it is written, as a diff is."""
    file, patch = crowded
    text = patch.model_new
    by = "2 launches of kernels on Triton's interpreter"
    assert run_on_numbers(file, text) == ({}, f"run at 3 with 1 seeds, {by}")
    wrong = text.replace("(variance_sum, cols * 1.0)", "(variance_sum, 500.0)")
    assert wrong != text
    said, _ = run_on_numbers(file, wrong)
    assert "error" in said["run at 3"]
    fallen = text.replace("torch.float32, (n0, n1)", "torch.float64, (n0, n1)")
    _, said = run_on_numbers(file, fallen)
    assert said.startswith("not run: RuntimeError: fused_add_rms_norm: "), said


def run_on_numbers(model: Path, text: str) -> tuple[dict[str, str], str]:
    """What a run of a `ModelNew` beside the model says."""
    runs = Runs((((3, 0),),), Scenario(mode="train"), "fused_problem", 1, 100.0, CRITERION)
    with ThreadPoolExecutor(1) as pool:
        return run_trial_of_file(text, model, [], no_capture, pool, runs)


def no_capture(*_: object) -> Dataflow:
    raise AssertionError("nothing is captured")


def test_it_is_one_file(crowded: tuple[Path, Patched]) -> None:
    text = crowded[1].model_new
    tree = ast.parse(text)
    tried = {n for each in ast.walk(tree) if isinstance(each, ast.Try) for n in ast.walk(each)}
    needed = [node for node in ast.walk(tree) if node not in tried]  # the interpreter's repairs
    imports = [node for node in needed if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {
        alias.name.split(".")[0] for n in imports for alias in n.names if type(n) is ast.Import
    }
    roots |= {str(n.module).split(".")[0] for n in imports if isinstance(n, ast.ImportFrom)}
    assert roots <= {"torch", "triton"} | sys.stdlib_module_names
    bound = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    assert len(bound) == len(set(bound)), "no name has two meanings"
    assert "ModelNew" in bound
    assert "Model" not in bound
    assert not {"get_inputs", "get_init_inputs"} & set(bound)
    assert "import math as os" in text, "what the model's file calls os stays that"
    assert "import os as fused_os" in text
    assert "import triton.language as tl" in text, "a local name is in nobody's way"
    assert "fused_swiglu_2(self.gate(y), self.up(y))" in text, "fused_swiglu is a number there"
    assert "# Replaces: " in text, "what each kernel is"
    assert "super(ModelNew, self).__init__()" in text
    assert '"""Another Model than that of one norm."""' in text
    assert text.count("SPDX-") == 3, "around the kernels: the model is of its own licence"
    begin, end = "# SPDX-SnippetBegin\n# SPDX-License-Identifier: 0BSD\n", "# SPDX-SnippetEnd\n"
    before, _, rest = text.partition(begin)
    kernels, _, after = rest.partition(end)
    assert "@triton.jit" not in before + after
    assert kernels.count("@triton.jit") >= 2
    assert "class ModelNew" in after


def test_what_files_share_stands_once() -> None:
    names = ("softmax", "swiglu")
    model = "import torch\nimport fused_m\n\n\nclass Model:\n    def f(self, x):\n"
    model += "        return fused_m.softmax(fused_m.swiglu(x, x))\n"
    text = inline(model, "fused_m", {name: kernel(name).text for name in names})
    defined = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    assert defined.count("serves") == 1
    assert not [name for name in defined if name.endswith("_serves")]
    assert sum(name.endswith("fall_back") for name in defined) == 1
    assert "host." not in text
    assert "return fused_softmax(fused_swiglu(x, x))" in text


def test_what_is_read_elsewhere_stays() -> None:
    text = "import fused_m\n\n\nclass Model:\n    pass\n\n\ndef get_inputs():\n    return []\n\n\n"
    text += "if __name__ == '__main__':\n    Model(*get_inputs())\n"
    changed = inline(text, "fused_m", {})
    assert "def get_inputs" in changed
    assert "ModelNew(*get_inputs())" in changed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model = 1\n", "has to define once"),
        ("from other import Model\n", "has to define once"),
        ("class Model:\n    pass\n\n\nModel = wrapped(Model)\n", "has to define once"),
        ("class Model:\n    pass\n\n\nModelNew = Model\n", "uses that name already"),
    ],
)
def test_what_has_no_model_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        require_model(text)


NEIGHBOUR = """
import torch
from torch import nn
from layers import Act


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.lin = Act(), nn.Linear(1024, 1024)

    def forward(self, x):
        return torch.tanh(self.lin(self.act(x))) * 0.5


def get_inputs():
    return [torch.rand(4096, 1024)]
"""


def test_a_file_imports_what_the_models_does(tmp_path: Path) -> None:
    """Groups in other files are left to the diff; what is imported from there stays imported."""
    (tmp_path / "layers.py").write_text(
        "import torch\n\n\nclass Act(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.sigmoid(x + 1) * 2\n"
    )
    file, out = tmp_path / "problem.py", tmp_path / "new.py"
    file.write_text(NEIGHBOUR)
    done = command(file, "--model-new", str(out))
    assert done.returncode == 0, done.stderr
    assert "layers.py:6: forward() cannot be edited there" in done.stderr
    assert "from layers import Act" in out.read_text()
    assert "new.py: the patched model is the original as asked" in done.stderr


def command(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`patch`, kernels unchecked."""
    quick = ("--no-verify", "--no-compile", "--device", "h200")
    return spawned.command("patch", file, *options, *quick, cwd=file.parent)


@pytest.mark.deep
def test_the_command(tmp_path: Path) -> None:
    file, out = tmp_path / "problem.py", tmp_path / "new.py"
    file.write_text(CROWDED)
    done = command(file, "--model-new", str(out))
    assert done.returncode == 0, done.stderr
    assert "new.py: the patched model is the original as asked" in done.stderr
    assert "class ModelNew" in out.read_text()
    assert "Written by: fusion-advisor" in out.read_text()
    assert "new.py" not in out.read_text(), "the kernels come from the model's file"
    assert sorted(path.name for path in tmp_path.glob("*.p*")) == ["new.py", "problem.py"]
    done = command(file)
    assert done.returncode == 2
    assert "--out FILE, --model-new FILE or both" in done.stderr
