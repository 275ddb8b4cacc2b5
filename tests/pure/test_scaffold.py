"""Which model a tree has, found without running it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from fusion_advisor.ci.init import Candidate, adapter, block, candidates, chosen
from fusion_advisor.support.errors import UsageError

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden: int, *, bias: bool = True):
        super().__init__()

    def forward(self, x, mask="a\\"b"):
        return x
"""
READY = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x

def get_inputs():
    return [torch.ones(2)]
"""


def put(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = root / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root.resolve()


def test_a_class_of_modules_is_found_with_what_it_takes(tmp_path: Path) -> None:
    (found,) = candidates(put(tmp_path, src__pkg__net=NET))
    assert found.model == "src/pkg/net.py:Net"
    assert found.init == "hidden: int, *, bias: bool=True"
    assert found.forward == "x, mask='a\"b'"
    assert not found.complete


@pytest.mark.parametrize(
    "text",
    [
        "class Net(Base):\n    def forward(self, x): ...\n",
        "class Net(nn.Module):\n    pass\n",
        "def forward(x): ...\n",
        "class (",
        "",
    ],
)
def test_what_is_no_model_is_not(tmp_path: Path, text: str) -> None:
    assert candidates(put(tmp_path, net=text)) == []


def test_tests_and_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    root = put(tmp_path, tests__net=NET, build__lib__net=NET)
    put(root / ".hidden", net=NET)
    assert candidates(root) == []


def test_the_only_model_is_chosen(tmp_path: Path) -> None:
    assert chosen(put(tmp_path, net=NET)).name == "Net"
    assert chosen(put(tmp_path, ready=READY)).model == "ready.py:Model"
    assert chosen(tmp_path.resolve(), "net.py:Net").name == "Net"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "found a.py:Net, b.py:Net"),
        ("a.py:Other", "found none"),
        ("c.py", "c.py: no such file"),
        ("../x.py", r"\.\./x.py: is not below"),
    ],
)
def test_what_cannot_be_chosen_is_told(tmp_path: Path, given: str, message: str) -> None:
    root = put(tmp_path / "tree", a=NET, b=NET)
    put(tmp_path, x=NET)
    with pytest.raises(UsageError, match=message):
        chosen(root, given)


def test_the_block_names_the_model() -> None:
    table = tomllib.loads(block('a "b".py:Net'))["tool"]["fusion-advisor"]
    assert table["model"] == 'a "b".py:Net'


def test_the_adapter_says_what_is_missing(tmp_path: Path) -> None:
    text = adapter(chosen(put(tmp_path, src__pkg__net=NET)))
    tree = ast.parse(text)
    assert "from pkg.net import Net as Model" in text
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    said = [ast.literal_eval(call.args[0]) for call in raised if isinstance(call, ast.Call)]
    assert said == [
        "return the arguments of __init__(hidden: int, *, bias: bool=True)",
        "return the inputs of forward(x, mask='a\"b')",
    ]


def test_a_class_that_is_built_from_nothing_needs_no_arguments() -> None:
    bare = Candidate(Path("net.py"), "Net", "", "x", False)  # type: ignore[arg-type]
    assert "    return []\n" in adapter(bare)
