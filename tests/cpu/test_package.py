"""Packages of kernels that are there already: second patches, and what is stale."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.codegen.header import body, does, read_stamp, stamped
from fusion_advisor.codegen.kernel_package import ASKING, kernels_of, older, read_package, stale
from fusion_advisor.ir.scenario import Least, Request, Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import version
from fusion_advisor.shipped.files import SHIPPED, beside
from fusion_advisor.support.errors import UsageError
from fusion_advisor.workflows.patch import Patched, patch_model
from fusion_advisor.workflows.update import UpdateResult, update_kernels

from . import spawned
from .in_process import captured, captured_as_asked

pytestmark = pytest.mark.usefixtures("ways")

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(96, 64), nn.Linear(96, 64)
        self.wide = nn.Linear(64, 512)

    def forward(self, x):
        x = F.silu(self.gate(x)) * self.up(x)
        return x


def get_inputs():
    return [torch.empty(64, 128, 96)]
"""
MORE = """\
        y = self.wide(x)
        y = F.silu(y[..., 256:]) * y[..., :256]
        return x, y
"""
TOOL, RULES = version("fusion-advisor") or "unknown", load_rulebook().hash


def again(folder: Path, least: Least | None = None, *, resized: bool = True) -> Patched:
    """The patch of the model in a folder as it is now, kernels unchecked; proven at its own sizes
    alone unless `resized`."""
    request = Request(
        str(folder / "model.py"), Scenario(), device="h200", verify=False, compile=False,
        least=least or Least(),
    )  # fmt: skip
    capture = captured_as_asked(request.scenario, resized=resized)
    return patch_model(request, folder.resolve(), captured=capture)


def applied(folder: Path) -> Patched:
    made = again(folder)
    assert made.wrong == {}
    subprocess.run(["git", "apply", "-"], input=made.diff.encode(), cwd=folder, check=True)
    return made


@pytest.fixture(scope="module")
def patched_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which a patch was applied: it takes seconds, and says nothing of its folder."""
    made = tmp_path_factory.mktemp("patched")
    (made / "model.py").write_text(MODEL)
    applied(made)
    return made


@pytest.fixture
def folder(patched_once: Path, tmp_path: Path) -> Path:
    """That model, for a test to change."""
    shutil.copytree(patched_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def kernels(folder: Path) -> dict[str, str]:
    return kernels_of(read_package(folder / "fused_model"))


def reasons(folder: Path) -> dict[str, str]:
    return {file.name: why for file, why in stale(folder / "fused_model")}


def aged(folder: Path, tool: str = TOOL, rules: str = RULES) -> dict[str, str]:
    return {file.name: why for file, why in older(folder / "fused_model", tool, rules)}


def made_older(folder: Path) -> None:
    """The kernels as an earlier version left them, which wrote other texts."""
    for name, text in kernels(folder).items():
        stamp = read_stamp(text)
        assert stamp
        old = text.replace("num_warps=", "num_warps=1 * ")
        assert old != text
        old = stamped(old, replace(stamp, tool="0.0.1", rules="0" * 12))
        (folder / "fused_model" / f"{name}.py").write_text(old)


def brought_up(folder: Path) -> UpdateResult:
    """The kernels of a folder written anew, unchecked, where nothing is wrong."""
    request = Request(
        str(folder / "model.py"), Scenario(), device="h200", verify=False, compile=False
    )
    capture = captured_as_asked(request.scenario, resized=True)
    made = update_kernels(request, folder.resolve(), captured=capture)
    assert made.wrong == {}
    for path, text in made.patch.after.items():
        path.write_text(text)
    return made


@pytest.mark.deep
def test_a_patch_applied_twice_changes_nothing(folder: Path) -> None:
    made = again(folder)
    assert made.diff == ""
    assert made.package == "fused_model"


SPDX = "# SPDX-License-Identifier: 0BSD\n"


def test_every_file_says_that_it_is_the_users_own(folder: Path) -> None:
    files = [*(folder / "fused_model").glob("*.py")]
    assert {file.name for file in files} == {
        *("__init__.py", "swiglu.py", "test_fused_model.py"),
        *SHIPPED,
    }
    assert all(file.read_text().startswith(f'{SPDX}"""') for file in files)
    assert "SPDX" not in (folder / "model.py").read_text()


@pytest.mark.deep
def test_a_package_of_before_there_were_such_lines_is_known(folder: Path) -> None:
    before = folder / "fused_model" / "__init__.py"
    before.write_text(before.read_text().removeprefix(SPDX))
    assert again(folder).diff == ""
    assert reasons(folder) == {}


@pytest.mark.deep
def test_a_second_patch_adds_what_is_new(folder: Path) -> None:
    before = kernels(folder)
    file = folder / "model.py"
    file.write_text(file.read_text().replace("        return x\n", MORE))
    made = applied(folder)
    after = kernels(folder)
    assert set(before) == {"swiglu"}
    assert set(after) == {"swiglu", "swiglu_2"}
    assert body(after["swiglu"]) == body(before["swiglu"])
    text = file.read_text()
    assert text.count("import fused_model\n") == 1
    assert all(f"fused_model.{name}(" in text for name in after)
    assert all(f"from .{name} import {name}\n" in (folder / "fused_model/__init__.py").read_text()
               for name in after)  # fmt: skip
    assert [path.name for path in made.patch.outdated] == ["swiglu.py"], "the model had changed"
    assert reasons(folder) == {}
    assert again(folder).diff == ""


ASKS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.by, self.to = nn.Linear(96, 96), 3.0, 3.0

    def forward(self, x):
        return self.lin(torch.tanh(x) ** self.by)


def get_inputs():
    return [torch.empty(64, 128, 96)]
"""


@pytest.mark.deep
def test_a_second_patch_keeps_the_functions_that_ask(tmp_path: Path) -> None:
    """Another call of the same kernel that asks otherwise gets a function of its own; statements
    that were put back get the one that is there; kernels written anew leave all."""
    file, beside = tmp_path / "model.py", tmp_path / "fused_model" / ASKING
    file.write_text(ASKS)
    applied(tmp_path)
    assert "return self.lin(fused_model.tanh_pow_or_eager(x, self.by))" in file.read_text()
    first = beside.read_text()
    file.write_text(ASKS)
    assert [path.name for path in applied(tmp_path).patch.after] == ["model.py"]
    text = file.read_text().replace("return self", "x = self")
    file.write_text(
        text.replace("\n\n\ndef get", "\n        return torch.tanh(x) ** self.to\n\n\ndef get")
    )
    made = applied(tmp_path)
    assert {path.name for path in made.patch.after} >= {"model.py", ASKING, "__init__.py"}
    assert "return fused_model.tanh_pow_or_eager_2(x, self.to)" in file.read_text()
    assert beside.read_text().startswith(first.rstrip())
    assert "or to != 3.0 or (fused := " in beside.read_text()
    before = beside.read_text()
    made_older(tmp_path)
    assert brought_up(tmp_path).written == ("tanh_pow",)
    assert beside.read_text() == before
    assert (
        "from .or_eager import tanh_pow_or_eager_2" in (beside.parent / "__init__.py").read_text()
    )
    beside.write_text("def f(:\n")
    file.write_text(ASKS)
    with pytest.raises(UsageError, match=r"or_eager.py:1: "):
        again(tmp_path)


@pytest.mark.deep
def test_a_second_patch_for_another_dtype_asks_before_the_first(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    scaled = "(torch.tanh(x.float()) * 3.0).to(x.dtype)"
    file.write_text(ASKS.replace("torch.tanh(x) ** self.by", scaled))
    applied(tmp_path)
    assert "self.lin(fused_model.tanh_mul_or_eager(x).to(x.dtype))" in file.read_text()
    request = Request(
        str(file), Scenario(dtype="bfloat16"), device="h200", verify=False, compile=False
    )
    made = patch_model(request, tmp_path.resolve(), captured=captured)
    assert made.wrong == {}
    text = made.patch.after[tmp_path.resolve() / "fused_model" / ASKING]
    assert "        return tanh_mul_or_eager(x).to(x.dtype)\n" in text


@pytest.mark.deep
def test_statements_that_were_put_back_get_their_kernel_again(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    made = applied(folder)
    assert set(made.patch.after) == {folder / "model.py"}, "the kernel is there"
    assert "fused_model.swiglu(" in (folder / "model.py").read_text()
    assert reasons(folder) == {}


def test_what_is_stale(folder: Path) -> None:
    assert reasons(folder) == {}
    model, kernel = folder / "model.py", folder / "fused_model" / "swiglu.py"
    model.write_text(model.read_text() + "\n# more\n")
    assert reasons(folder) == {"swiglu.py": "model.py changed since"}
    kernel.write_text(kernel.read_text().replace("BLOCK=1024", "BLOCK=512"))
    assert reasons(folder) == {
        "swiglu.py": "it was edited since it was written; model.py changed since"
    }
    kernel.write_text("def swiglu(a, b):\n    return a\n")
    assert reasons(folder) == {"swiglu.py": "does not say what wrote it"}
    assert aged(folder) == {}


def test_what_kernels_share_is_looked_at_too(folder: Path) -> None:
    runtime = folder / "fused_model" / "fused_runtime.py"
    runtime.write_text(runtime.read_text() + "\n# mine\n")
    assert reasons(folder) == {}
    assert aged(folder) == {
        "fused_runtime.py": "is not as this version of fusion-advisor writes it"
    }
    made = brought_up(folder)
    assert runtime in made.patch.after
    assert runtime.read_text() == beside(kernels(folder).values())["fused_runtime.py"]
    assert (reasons(folder), aged(folder)) == ({}, {})
    runtime.unlink()
    assert reasons(folder) == {"fused_runtime.py": "is gone, and kernels import it"}


@pytest.mark.parametrize(
    ("least", "why"),
    [(Least(saved_us=1e6), "the threshold is 1"), (Least(share=1.0), "the threshold is 100.00%")],
)
def test_what_saves_less_than_the_thresholds_is_left(
    tmp_path: Path, least: Least, why: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    made = again(tmp_path, least, resized=False)
    assert made.diff == ""
    assert made.saved_us == 0.0
    (said,) = made.patch.refused.values()
    assert said.startswith("it saves ")
    assert why in said


SMALL_BESIDE = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(96, 4096), nn.Linear(96, 4096)

    def gated(self, x, y):
        return F.silu(x) * y

    def forward(self, x, a, b, c):
        return self.gated(self.gate(x), self.up(x)), self.gated(a, b), torch.tanh(c) * 3.0


def get_inputs():
    return [torch.empty(64, 1024, 96), *torch.empty(3, 8, 16, 96)]
"""


def test_what_gains_less_than_a_thousandth_of_the_step_is_left_but_in_lines_that_gain_more(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(SMALL_BESIDE)
    made = again(tmp_path, resized=False)
    assert made.wrong == {}
    assert [(put.kernel, put.occurrences) for put in made.patch.puts] == [("swiglu", 1)] * 2
    assert [each.computes for each in made.left if "the threshold is 0.10%" in each.why] == [
        "tanh + mul"
    ]
    everything = again(tmp_path, Least(share=0.0), resized=False)
    assert {put.kernel for put in everything.patch.puts} == {"swiglu", "tanh_mul"}


def test_an_older_tool_and_other_rules_are_told_and_make_nothing_stale(folder: Path) -> None:
    assert aged(folder) == {}
    other = "0" * 64
    assert aged(folder, tool="9.9") == {
        "swiglu.py": f"written by fusion-advisor {TOOL}, this is 9.9"
    }
    assert aged(folder, rules=other) == {
        "swiglu.py": f"written by rules {RULES[:12]}, these are {other[:12]}"
    }
    made_older(folder)
    assert reasons(folder) == {}


@pytest.mark.deep
def test_kernels_of_an_older_tool_are_written_anew_in_place(folder: Path) -> None:
    before, model = kernels(folder), (folder / "model.py").read_text()
    made_older(folder)
    (folder / "fused_model" / "__init__.py").touch()
    made = brought_up(folder)
    assert (made.written, made.left) == (("swiglu",), {})
    assert [path.name for path in made.patch.after] == ["swiglu.py"]
    assert body(kernels(folder)["swiglu"]) == body(before["swiglu"])
    assert (folder / "model.py").read_text() == model
    assert (reasons(folder), aged(folder)) == ({}, {})
    assert brought_up(folder).patch.after == {}, "there is nothing left to do"
    assert again(folder).diff == ""


def test_a_kernel_written_anew_names_the_line_that_calls_it(folder: Path) -> None:
    made_older(folder)
    brought_up(folder)
    lines = (folder / "model.py").read_text().splitlines()
    called = next(n for n, line in enumerate(lines, 1) if "fused_model.swiglu(" in line)
    assert f"\nSource: model.py:{called}.\n" in kernels(folder)["swiglu"]


@pytest.mark.deep
def test_sources_that_changed_are_taken_as_they_are_and_told(folder: Path) -> None:
    model = folder / "model.py"
    model.write_text(model.read_text() + "\n# more\n")
    made = brought_up(folder)
    assert {path.name: what for path, what in made.patch.outdated.items()} == {
        "swiglu.py": "model.py"
    }
    assert reasons(folder) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("num_warps=", "num_warps=1 * "), "it was edited since"),
        (lambda text: "def swiglu(a, b):\n    return a\n", "it does not say what wrote it"),
    ],
)
def test_what_is_not_as_it_was_written_is_left(
    folder: Path, change: Callable[[str], str], why: str
) -> None:
    kernel = folder / "fused_model" / "swiglu.py"
    kernel.write_text(change(kernel.read_text()))
    mine = kernel.read_text()
    made = brought_up(folder)
    assert made.left["swiglu"].startswith(why)
    assert kernel.read_text() == mine


def test_a_kernel_that_is_not_called_is_left(folder: Path) -> None:
    made_older(folder)
    (folder / "model.py").write_text(MODEL)
    assert brought_up(folder).left == {"swiglu": "the model does not call it as it was run"}


def test_a_kernel_that_would_take_its_arguments_in_another_order_is_left(folder: Path) -> None:
    """An earlier version may have ordered them otherwise; the calls in the source stay."""
    (text,) = kernels(folder).values()
    stamp, call = read_stamp(text), "(gate, up)"
    assert stamp
    assert f"def swiglu{call}" in text
    turned = text.replace(f"def swiglu{call}", "def swiglu(up, gate)")
    turned = turned.replace(f"def reference{call}", "def reference(up, gate)")
    (folder / "fused_model" / "swiglu.py").write_text(stamped(turned, stamp))
    model = folder / "model.py"
    model.write_text(
        model.read_text().replace("(self.gate(x), self.up(x))", "(self.up(x), self.gate(x))")
    )
    made = brought_up(folder)
    assert made.left == {"swiglu": "it would take other arguments"}


def test_a_kernel_that_somebody_edited_stays_as_it_is(folder: Path) -> None:
    model, kernel = folder / "model.py", folder / "fused_model" / "swiglu.py"
    kernel.write_text(kernel.read_text().replace("BLOCK=1024", "BLOCK=512"))
    model.write_text(model.read_text().replace("        return x\n", MORE))
    mine = kernel.read_text()
    applied(folder)
    assert kernel.read_text() == mine


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "fused_model").mkdir()
    (tmp_path / "fused_model" / "__init__.py").write_text("mine = 1\n")
    with pytest.raises(UsageError, match="not a package of fusion-advisor's"):
        again(tmp_path)


@pytest.mark.deep
def test_the_command_says_what_is_stale_and_the_test_runs(folder: Path) -> None:
    def check() -> subprocess.CompletedProcess[str]:
        return spawned.command("patch", "model.py", "--check", cwd=folder)

    assert check().returncode == 0
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "fused_model"],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr
    (folder / "model.py").write_text(MODEL)
    done = check()
    assert done.returncode == 1
    assert done.stderr == "fused_model/swiglu.py: stale: model.py changed since\n"


@pytest.mark.deep
def test_the_command_writes_kernels_anew(folder: Path) -> None:
    def patch(*options: str) -> subprocess.CompletedProcess[str]:
        return spawned.command("patch", "model.py", *options, cwd=folder)

    made_older(folder)
    done = patch("--check")
    assert done.returncode == 0, done.stderr
    told, how, last = done.stderr.splitlines()
    assert told.startswith("fused_model/swiglu.py: written by fusion-advisor 0.0.1, this is ")
    assert how == "to have it written anew: patch model.py --update"
    done = patch("--update", "--device", "h200", "--no-compile")
    assert done.returncode == 0, done.stderr
    assert "fused_model/swiglu.py: written anew\n" in done.stderr
    assert "launches of kernels on Triton's interpreter" in done.stderr, "run beside the old one"
    assert patch("--check").stderr == f"{last}\n"
    done = patch("--update", "--check")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


BLOCKS = """
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(96, 64), nn.Linear(96, 64)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)
"""
NET = """
from torch import nn

from .blocks.mlp import Mlp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.down = Mlp(), nn.Linear(64, 96)

    def forward(self, x):
        h = self.down(self.mlp(x))
        return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
"""
ENTRY = """
import torch
from net_of_a_user import Net

model = Net()
example_inputs = [torch.empty(64, 128, 96)]
"""


@pytest.fixture
def in_a_package(tmp_path: Path) -> Path:
    """A package of a user's with a package in it, and a file beside it that makes the model."""
    net = tmp_path / "net_of_a_user"
    (net / "blocks").mkdir(parents=True)
    (net / "__init__.py").write_text("from .model import Net\n")
    (net / "blocks" / "__init__.py").write_text("")
    (net / "blocks" / "mlp.py").write_text(BLOCKS)
    (net / "model.py").write_text(NET)
    (tmp_path / "entry.py").write_text(ENTRY)
    return tmp_path


@pytest.mark.deep
def test_kernels_of_a_package_lie_in_it(in_a_package: Path) -> None:
    def patch(*options: str) -> subprocess.CompletedProcess[str]:
        return spawned.command("patch", "entry.py", *options, cwd=in_a_package)

    where = ("--root", ".", "--device", "h200", "--no-compile")
    done = patch("--out", "x.patch", *where)
    assert done.returncode == 0, done.stderr
    assert "launches of kernels on Triton's interpreter" in done.stderr
    subprocess.run(["git", "apply", "x.patch"], cwd=in_a_package, check=True)
    net = in_a_package / "net_of_a_user"
    assert "\nfrom .. import fused_entry\n" in (net / "blocks" / "mlp.py").read_text()
    assert "\nfrom . import fused_entry\n" in (net / "model.py").read_text()
    assert (in_a_package / "entry.py").read_text() == ENTRY
    # it is whole where it is installed without what stands beside it, whatever comes first
    shutil.copytree(net, in_a_package / "elsewhere" / net.name)
    ways = ("net_of_a_user", "net_of_a_user.blocks.mlp", "net_of_a_user.fused_entry.swiglu")
    for first in ways:
        subprocess.run(
            [sys.executable, "-c", f"import {first}"], cwd=in_a_package / "elsewhere", check=True
        )
    assert patch("--check", *where[:2]).stderr.startswith("net_of_a_user/fused_entry: every kernel")
    assert "not written, for" in patch("--out", "y.patch", *where).stderr
    for file in (net / "fused_entry").glob("*.py"):
        if (stamp := read_stamp(file.read_text())) is not None:
            old = file.read_text().replace("num_warps=", "num_warps=1 * ")
            file.write_text(stamped(old, replace(stamp, tool="0.0.1", rules="0" * 12)))
    done = patch("--update", *where)
    assert "net_of_a_user/fused_entry/swiglu.py: written anew\n" in done.stderr, done.stderr


def test_a_source_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + MODEL.encode())
    with pytest.raises(UsageError, match=r"model.py: byte 28 is not UTF-8: save the file as UTF-8"):
        again(tmp_path)


NORMED = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.GroupNorm(32, 64), nn.SiLU(), nn.Conv2d(64, 64, 1))

    def forward(self, x):
        return self.block(x)


def get_inputs():
    return [torch.empty(16, 64, 64, 64)]
"""


@pytest.mark.deep
def test_kernels_that_are_given_numbers_are_written_anew_as_they_were(tmp_path: Path) -> None:
    """An eps is given, the 32 groups are no size: neither is known from the kernel's text alone."""
    (tmp_path / "model.py").write_text(NORMED)
    applied(tmp_path)
    before = kernels(tmp_path)
    made_older(tmp_path)
    made = brought_up(tmp_path)
    assert made.left == {}
    assert made.written == ("group_norm_silu",)
    assert does(kernels(tmp_path)["group_norm_silu"]) == does(before["group_norm_silu"])
