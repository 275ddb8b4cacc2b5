"""Files that stand beside emitted kernels in a user's folder: what they need, and what they say."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.ir.kernel import LICENSE
from fusion_advisor.region.random import REFERENCE_RANDOM, ROUNDS
from fusion_advisor.schedules.base import DIVISOR
from fusion_advisor.schedules.cooperative import REGISTERS
from fusion_advisor.schedules.exchange import WAYS
from fusion_advisor.shipped.files import (
    DEVICE,
    RUNTIME,
    SHIPPED,
    functions,
    needed,
    texts,
    version,
    write_beside,
    write_kernel,
)

each_file = pytest.mark.parametrize("name", SHIPPED)


def numbers(module: str) -> dict[str, object]:
    """Numbers at the top of a shipped module, by name."""
    tree = ast.parse(texts()[f"{module}.py"])
    assigned = [n for n in tree.body if isinstance(n, ast.Assign) and len(n.targets) == 1]
    found: dict[str, object] = {}
    for node in assigned:
        value = ast.unparse(node.value)
        if set(value) <= set("0123456789* "):
            found[ast.unparse(node.targets[0])] = eval(value)
    return found


@each_file
def test_it_needs_torch_and_triton_alone(name: str) -> None:
    tree = ast.parse(texts()[name])
    nodes = [*ast.walk(tree)]
    modules = [each.name for n in nodes if isinstance(n, ast.Import) for each in n.names]
    modules += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    known = {"torch", "triton", *sys.stdlib_module_names}
    assert {module.split(".")[0] for module in modules} <= known


@each_file
def test_it_imports_its_neighbours_relatively(name: str) -> None:
    relative = [n for n in ast.walk(ast.parse(texts()[name])) if isinstance(n, ast.ImportFrom)]
    beside = {each.name for n in relative if n.level == 1 and not n.module for each in n.names}
    assert beside <= {file.removesuffix(".py") for file in SHIPPED}
    assert all(n.level <= 1 for n in relative)


@each_file
def test_it_is_the_users_own(name: str) -> None:
    assert texts()[name].startswith(f'{LICENSE}\n"""')
    assert "Written by fusion-advisor" in texts()[name]


def test_a_change_of_what_kernels_may_ask_is_seen(golden: Callable[[str, str], None]) -> None:
    """Whoever changes a function that files of users call thinks of VERSION, too."""
    lines = [
        f"{name} {node.name}({ast.unparse(node.args)})"
        for name, text in texts().items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    ]
    golden("shipped.txt", "\n".join([f"version {version()}", *lines, ""]))


def test_a_kernel_asks_for_the_least_version_that_has_all_it_calls() -> None:
    assert needed("far = host.beyond_int32((x,))") == 1
    assert needed("@host.registered(results=1)\ndef softmax(x):") == 2
    assert needed("\n".join(f"host.{name}()" for name in functions(RUNTIME))) == version()


def test_its_numbers_are_those_of_the_plans() -> None:
    found = numbers(RUNTIME)
    ours = {"DIVISOR": DIVISOR, "REGISTERS": REGISTERS, "VERSION": version()}
    assert {**found, **ours} == found
    assert f"second, {ROUNDS})" in texts()[f"{DEVICE}.py"]
    assert f"range({ROUNDS})" in texts()[f"{RUNTIME}.py"]


def test_what_kernels_and_references_name_is_there() -> None:
    assert functions(RUNTIME) >= set(REFERENCE_RANDOM)
    assert {f"widened_{way}" for way in range(1, WAYS)} <= functions(DEVICE)
    assert f"widened_{WAYS}" not in functions(DEVICE)
    assert not functions(RUNTIME) & functions(DEVICE)


def test_it_is_written_where_a_kernel_is(tmp_path: Path) -> None:
    write_kernel(tmp_path / "kernels" / "softmax.py", "softmax = 1\n")
    written = {path.name: path.read_text() for path in (tmp_path / "kernels").iterdir()}
    assert written == {"softmax.py": "softmax = 1\n", **texts()}
    (tmp_path / "kernels" / f"{RUNTIME}.py").write_text("VERSION = 0\n")
    write_beside(tmp_path / "kernels")
    assert (tmp_path / "kernels" / f"{RUNTIME}.py").read_text() == texts()[f"{RUNTIME}.py"]
