"""Files that stand beside emitted kernels in a user's folder: what they need, and what they say."""

from __future__ import annotations

import ast
import re
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
    IMPORT,
    RUNTIME,
    SHIPPED,
    beside,
    functions,
    shaken,
    texts,
    write_kernel,
)
from fusion_advisor.support.errors import UsageError

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
    """But for the repairs of the interpreter, which it asks for where they are."""
    tree = ast.parse(texts()[name])
    optional = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "repair"]
    nodes = [n for each in tree.body if each not in optional for n in ast.walk(each)]
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
    """Kernels of earlier patches call these functions of the runtime that a later patch writes:
    each goes on to serve them, or what it does now gets another name."""
    lines = [
        f"{name} {node.name}({ast.unparse(node.args)})"
        for name, text in texts().items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    ]
    golden("shipped.txt", "\n".join([*lines, ""]))


MODULE = '''"""Says what it is."""

import math
import os

# -- numbers ---

# Right above.
LIMIT = 3
"""Right below."""

kept = {}


def root(x):
    return half(math.sqrt(x)) % LIMIT


@decorated
def half(x):
    """Halve."""
    return x / 2


def home():
    return os.getcwd()


if __name__ == "__main__":
    print(kept)
'''


def test_a_module_is_cut_to_what_is_wanted_of_it() -> None:
    whole = shaken(MODULE, {"root", "home"})
    assert whole == MODULE.replace("\n# -- numbers ---\n", "")
    assert (
        shaken(MODULE, {"half"})
        == MODULE.partition("\nimport")[0]
        + '''
kept = {}


@decorated
def half(x):
    """Halve."""
    return x / 2


if __name__ == "__main__":
    print(kept)
'''
    )


def kernel(*names: str, device: str = "") -> str:
    taken = f"from .fused_device import {device}\n" if device else ""
    return f"{IMPORT}\n{taken}" + "".join(f"host.{name}(1)\n" for name in names)


@each_file
def test_what_all_kernels_ask_for_is_all(name: str) -> None:
    every = kernel(*functions(RUNTIME), device=", ".join(sorted(functions(DEVICE))))
    found, whole = (ast.parse(text[name]) for text in (beside([every]), texts()))
    assert ast.dump(found) == ast.dump(whole)


def test_a_folder_has_what_its_kernels_ask_for() -> None:
    """The union for all of them; device functions only where some are called."""
    plain, drawing = kernel("cdiv"), kernel("random_state", device="random16_run")
    assert set(beside([plain])) == {"fused_runtime.py"}
    assert "def cdiv" in beside([plain])["fused_runtime.py"]
    assert "def trained" not in beside([plain])["fused_runtime.py"]
    both = beside([plain, drawing])
    assert {"def cdiv", "def random_state", "def main"} <= {
        *re.findall(r"def \w+", both[f"{RUNTIME}.py"])
    }
    assert re.findall(r"def (\w+)", both[f"{DEVICE}.py"]) == ["blocks", "random16", "random16_run"]
    assert "libdevice" not in both[f"{DEVICE}.py"]
    assert beside(["def softmax(x):\n    return host.wrong(x)\n"]) == {}, "that is no kernel's file"


def test_a_kernel_that_asks_for_what_there_is_not_is_one_line() -> None:
    with pytest.raises(
        UsageError, match=r"fused_runtime.py has no gone, which a kernel of the folder"
    ):
        beside([kernel("cdiv", "gone")])


def test_its_numbers_are_those_of_the_plans() -> None:
    found = numbers(RUNTIME)
    ours = {"DIVISOR": DIVISOR, "REGISTERS": REGISTERS}
    assert {**found, **ours} == found
    assert f"second, {ROUNDS})" in texts()[f"{DEVICE}.py"]
    assert f"range({ROUNDS})" in texts()[f"{RUNTIME}.py"]


def test_what_kernels_and_references_name_is_there() -> None:
    assert functions(RUNTIME) >= set(REFERENCE_RANDOM)
    assert {f"widened_{way}" for way in range(1, WAYS)} <= functions(DEVICE)
    assert f"widened_{WAYS}" not in functions(DEVICE)
    assert not functions(RUNTIME) & functions(DEVICE)


def test_it_is_written_where_a_kernel_is(tmp_path: Path) -> None:
    """Anew for each further kernel, so that it serves the earlier ones, too."""
    folder, one, two = tmp_path / "kernels", kernel("cdiv"), kernel("divisor", device="wide")
    write_kernel(folder / "one.py", one)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {"one.py": one, **beside([one])}
    (folder / "mine.py").write_bytes(b"# \xe9\n")
    write_kernel(folder / "two.py", two)
    assert {name: (folder / name).read_text() for name in SHIPPED} == beside([one, two])
