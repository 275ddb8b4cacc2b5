"""Which lines a comment asks to leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.ci.ignores import ignores

SOURCE = """\
import torch

class Model(torch.nn.Module):
    # fusion-advisor: ignore[FA401] the whole method, from above its decorator
    @torch.no_grad()
    def first(self, x):
        y = x + 1
        return y * 2

    def second(self, x):  # fusion-advisor: ignore[softmax, FA401] from its head
        # fusion-advisor: ignore[swiglu] the next line alone
        y = x + 1
        z = torch.cat(
            [x, y],  # fusion-advisor: ignore[FA101] anywhere in the call
        )
        # not for us: fusion-advisor: ignore[FA401] in the middle
        text = "# fusion-advisor: ignore[FA401] no comment"
        if x is None: return y  # fusion-advisor:ignore[rms-norm]  without blanks
        return z  # fusion-advisor: residual-norm, 2 kernels in one: what a patch writes
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    return file


def test_what_each_comment_holds_for(source: Path) -> None:
    found = [(i.line, i.code, i.reason, (i.lines[0], i.lines[-1])) for i in ignores(source, "m.py")]
    assert found == [
        (4, "FA401", "the whole method, from above its decorator", (5, 8)),
        (10, "softmax", "from its head", (10, 19)),
        (10, "FA401", "from its head", (10, 19)),
        (11, "swiglu", "the next line alone", (12, 12)),
        (14, "FA101", "anywhere in the call", (13, 15)),
        (18, "rms-norm", "without blanks", (18, 18)),
    ]
    assert {i.file for i in ignores(source, "m.py")} == {"m.py"}
    assert not any(i.fault for i in ignores(source, "m.py"))


@pytest.mark.parametrize(
    ("comment", "fault"),
    [
        ("ignore[FA401]", "gives no reason"),
        ("ignore FA401 for a reason", "names no code"),
        ("ignore[] for a reason", "names no code"),
    ],
)
def test_a_comment_that_cannot_hold_says_why(tmp_path: Path, comment: str, fault: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"x = 1  # fusion-advisor: {comment}\n")
    (found,) = ignores(file, "model.py")
    assert found.fault.startswith(fault)


@pytest.mark.parametrize("content", [b"x = (\n", b"\xff\xfe", b"\0", b""])
def test_what_is_no_python_has_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.py"
    file.write_bytes(content)
    assert ignores(file, "model.py") == []
    assert ignores(tmp_path / "none.py", "none.py") == []
