"""Numbers of launches that a search on a GPU found faster than those that the rules choose.

A kernel's text has the rules' own: how many elements a tile has, with how many warps it is
launched. What a search found stands in `tuning/GPU.json` beside the kernels, and their runtime
takes it from there as it launches on such a GPU (`shipped/fused_runtime.py`). So no text hangs on a
stopwatch, and whoever deletes the file has the rules' own again.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping

from fusion_advisor.codegen.header import fingerprint
from fusion_advisor.shipped.files import HOST

Numbers = Mapping[str, Mapping[str, int]]
"""Numbers of the launches of each JIT function, by the names of its constants."""

_SIZED = ("SMALL", "FULL", "TOLERANCE", "BESIDE")
"""Names of a file that serve its check, whose sizes follow from the numbers."""


def launched(text: str) -> tuple[str, Numbers]:
    """What a kernel's file computes, but for the numbers of its launches; and those numbers."""
    numbers: dict[str, dict[str, int]] = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=host), attr="launch")) if (
                host == HOST
            ):
                found = numbers.setdefault(ast.unparse(node.args[0]), {})
                for given in node.keywords:
                    match given:
                        case ast.keyword(arg=str(name), value=ast.Constant(int(value))) if (
                            not isinstance(value, bool)
                        ):
                            found[name] = value
                            given.value = ast.Constant(0)
                        case _:
                            pass
            case _:
                pass
    return "\n".join(ast.unparse(node) for node in tree.body[1:] if not _is_sized(node)), numbers


def _is_sized(node: ast.stmt) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name in _SIZED
        case _:
            return False


def tuning_path(gpu: str) -> str:
    """Path of the file of a GPU in a folder of kernels."""
    return "tuning/" + re.sub(r"\W+", "_", gpu) + ".json"


def tuning_text(found: Mapping[str, tuple[Numbers, str]], before: str = "") -> str:
    """Text of that file: for the text of each kernel's file the numbers of its launches and, in
    words, what they were measured by. They hold for that text alone. What the file had `before` for
    other kernels stays. Raises ValueError where that is no JSON, TypeError where it is no
    object."""
    rows = {
        kernel: {"numbers": {**numbers}, "text": fingerprint(text), "found": said}
        for text, (launches, said) in found.items()
        for kernel, numbers in launches.items()
    }
    known: dict[str, object] = json.loads(before) if before else {}
    return json.dumps({**known, **rows}, indent=1, sort_keys=True) + "\n"
