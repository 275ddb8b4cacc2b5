"""`patch hf:config.json`: a package beside the user's code that swaps classes of transformers."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.support.errors import UsageError
from fusion_advisor.workflows.patch import Patched
from fusion_advisor.workflows.patch_transformers import patch_family

from .spawned import run_script

LLAMA: dict[str, object] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip


MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}


def made(folder: Path, config: dict[str, object] = LLAMA) -> Patched:
    (folder / "config.json").write_text(json.dumps(config))
    request = Request(
        f"hf:{folder / 'config.json'}", Scenario(dtype="bfloat16", batch=2, seq=24), device="h200",
        verify=False, compile=False,
    )  # fmt: skip
    return patch_family(request, folder)


def run(folder: Path, script: str) -> None:
    """In a process of its own, whose Triton is the interpreter."""
    head = """
        import torch
        from fusion_advisor.verify.interpreter import install
        install()
        import copy, pickle, sys, warnings
        from transformers import AutoConfig, AutoModel
        import fused_llama
        from fused_llama import fuse
        import json
        config = AutoConfig.for_model(**json.load(open("config.json")))
        torch.manual_seed(0)
        plain = AutoModel.from_config(config).eval().to(torch.bfloat16)
        model = copy.deepcopy(plain)
        given = dict(input_ids=torch.randint(0, 128, (2, 24)), use_cache=False)
    """
    run_script(textwrap.dedent(head) + textwrap.dedent(script), folder=folder)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of a small Llama, put there by `git apply`."""
    folder = tmp_path_factory.mktemp("llama").resolve()
    patch = made(folder)
    assert patch.wrong == {}
    assert patch.tried[:3] == ("as asked", "in train mode", "under autocast")
    assert "at 1 x 1" in patch.tried[3:], "other sizes, too"
    assert patch.saved_us > 0
    assert all(line[6:].startswith("fused_llama/") for line in patch.diff.splitlines()
               if line.startswith("+++ b/")), "nothing outside the package"  # fmt: skip
    subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=folder, check=True)
    return folder


def test_only_what_changes_is_in_the_package(tree: Path) -> None:
    text = (tree / "fused_llama" / "modeling_llama.py").read_text()
    assert "class FusedLlamaMLP(LlamaMLP):\n    def forward(self, x):\n" in text
    assert "    @dynamic_rope_update" in text, "decorators stay"
    assert "def rotate_half" not in text
    assert "class FusedLlamaModel" not in text
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), "copies keep their licence"
    others = {*(tree / "fused_llama").rglob("*.py")} - {tree / "fused_llama/modeling_llama.py"}
    assert all(each.read_text().startswith("# SPDX-License-Identifier: 0BSD\n") for each in others)
    kernels = {path.stem for path in (tree / "fused_llama" / "kernels").glob("*.py")}
    assert {"residual_rms_norm", "rms_norm", "swiglu", "__init__"} <= kernels


def test_the_fused_model_computes_the_same(tree: Path) -> None:
    run(
        tree,
        """
        assert fuse(model) is model
        with torch.no_grad():
            torch.testing.assert_close(model(**given)[0], plain(**given)[0], rtol=.05, atol=.05)
        files = [m for n, m in sys.modules.items() if n.startswith("fused_llama.kernels.")]
        hosts = [file.host for file in files if "host" in vars(file)]
        assert len(hosts) >= 5 and not any(host.fallbacks for host in hosts)
        from fusion_advisor.frontend.child import capture_module
        graph = capture_module(model, (), given)
        own = [node for node in graph.nodes if node.op.startswith("fusion_advisor.")]
        assert len(own) == 2 * 5 + 1 + 1, own
        assert list(model.state_dict()) == list(plain.state_dict())
        assert type(pickle.loads(pickle.dumps(model)).layers[0]) is type(model.layers[0])
        model.train(), model.gradient_checkpointing_enable()
        plain.train()
        for each in (model, plain):
            each(**given)[0].float().square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=.1, atol=.1)
        """,
    )


def test_another_version_leaves_the_model_as_it_is(tree: Path) -> None:
    run(
        tree,
        """
        known = fused_llama._MADE_OF["transformers.models.llama.modeling_llama"]
        known["LlamaMLP"] = "another"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fuse(model)
        assert "whose LlamaMLP is another; the model stays as it is" in str(said[-1].message)
        assert [*map(type, model.modules())] == [*map(type, plain.modules())]
        """,
    )


@pytest.mark.deep
def test_functions_of_tables_are_left(tmp_path: Path) -> None:
    """Experts are looked up as the model runs; the function that they call as a method is put under
    the name that the class has for it."""
    patch = made(tmp_path.resolve(), MIXTRAL)
    assert patch.wrong == {}
    left = "grouped_mm_experts_forward() cannot be edited there"
    assert any(why.endswith(left) for why in patch.unplaced.values()), patch.unplaced
    assert (
        "+class FusedMixtralExperts(MixtralExperts):\n+    def _default_apply_gate(" in patch.diff
    )
    assert "\n+    _apply_gate = _default_apply_gate\n" in patch.diff
    assert "grouped_mm_experts_forward" not in patch.diff


def test_a_package_that_is_there_is_left(tree: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        made(tree)
