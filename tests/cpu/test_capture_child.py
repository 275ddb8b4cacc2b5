"""The child process: what a model file can do wrong, each as one line with file and line."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusion_advisor.frontend import child as capture_module
from fusion_advisor.frontend.child import Limits, Scenario, capture, prepared
from fusion_advisor.ir.scenario import Request
from fusion_advisor.support import forkserver as forks
from fusion_advisor.support.errors import CaptureError, UsageError
from fusion_advisor.workflows.analyze import analyze

ABOUT_PROCESSES = True
HEAD = "import torch\nclass Model(torch.nn.Module):\n"
TAIL = "\ndef get_inputs():\n    return [torch.randn(4, 8)]\n"
FORWARD = "    def forward(self, x):\n        "


@pytest.fixture(autouse=True, scope="module")
def template() -> Iterator[None]:
    """Children are forks, as those of a command are; `alone` are processes from the start."""
    environment = capture_module._environment

    def unnamed() -> dict[str, str]:
        """pytest has the test's name in it."""
        return {k: v for k, v in environment().items() if k != "PYTEST_CURRENT_TEST"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_module, "_environment", unnamed)
        with prepared():
            yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forked has the surroundings of its template: in others there is nothing to fork."""
    monkeypatch.setenv("SOMETHING_ELSE", "1")


def write(folder: Path, text: str) -> str:
    file = folder / "model.py"
    file.write_text(text)
    return str(file)


def refused(folder: Path, text: str, limits: Limits | None = None) -> str:
    """The one line that capturing this source ends in."""
    with pytest.raises(CaptureError) as caught:
        capture(write(folder, text), Scenario(), limits)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_what_the_model_prints_does_not_reach_the_graph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "print('noise'); import os; os.write(1, b'more'); return x.exp()"
    graph = capture(write(tmp_path, HEAD + FORWARD + body + TAIL))
    assert [node.op for node in graph.nodes] == ["input", "aten.exp.default"]
    assert graph.nodes[1].source is not None
    assert graph.nodes[1].source.line == 4
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import not_there\n", "model.py:1: importing .* install not_there"),
        ("def broken(:\n", "model.py:1: .*SyntaxError"),
        ("x = 1\n", "no Model and no model found"),
        (HEAD + "    def __init__(self, width, depth=2):\n        super().__init__()\n" + TAIL,
         r"model.py: Model\(width, depth=2\): missing .* 'width'; define get_init_inputs"),
        ("def model(x, y):\n    return x + y\n" + TAIL,
         r"model.py: model\(x, y\): missing .* into the forward of a torch.nn.Module"),
        ("import sys\nsys.exit(3)\n", "model.py:2: .*remove the call that ends the process"),
        (HEAD + "    def __init__(self):\n        raise ValueError('bad')\n" + TAIL,
         "model.py:4: building Model.*ValueError: bad"),
        (HEAD + FORWARD + "return x + missing" + TAIL, "model.py:4: forward .*NameError"),
        (HEAD + FORWARD + "return x @ x" + TAIL, "model.py:4: forward"),
        (HEAD + "    def forward(self, x, y):\n        return x + y" + TAIL,
         "model.py.*forward .*TypeError.*'y'"),
        (HEAD + FORWARD + "return x" + TAIL, "launches no kernel"),
        (HEAD + FORWARD + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)" + TAIL,
         "model.py:4: the model crashed its process .SIGSEGV."),
        (HEAD + FORWARD + "import os; os._exit(7)" + TAIL,
         "model.py:4: the model ended its process .exit code 7.; remove the call that exits"),
        ("import os\nos._exit(0)\n", "model.py:2: the model ended its process .exit code 0."),
        (HEAD + FORWARD + "import sys; sys.exit(3)" + TAIL,
         "model.py:4: the model raised SystemExit"),
        (HEAD + FORWARD + "import signal; signal.raise_signal(signal.SIGINT)" + TAIL,
         "model.py:4: the model raised KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_one_line_names_the_place(tmp_path: Path, text: str, expected: str) -> None:
    message = refused(tmp_path, text)
    assert re.search(expected, message), message


HANG = HEAD + FORWARD + "import time\n        while True:\n            time.sleep(0.01)" + TAIL


def test_a_hang_is_ended_and_named(tmp_path: Path) -> None:
    message = refused(tmp_path, HANG, Limits(seconds=3))
    assert "ran longer than 3 s" in message
    assert re.search(r"model.py:[56]: ", message), message


@pytest.mark.usefixtures("alone")
@pytest.mark.deep
def test_a_hang_of_a_process_of_its_own(tmp_path: Path) -> None:
    message = refused(tmp_path, HANG, Limits(seconds=12))
    assert "ran longer than 12 s" in message
    assert re.search(r"model.py:[56]: ", message), message


@pytest.mark.usefixtures("alone")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import os; os._exit(7)", "model.py:4: the model ended its process .exit code 7."),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
         "model.py:4: the model crashed its process .SIGSEGV."),
        ("return x + missing", "model.py:4: forward .*NameError"),
    ],
)  # fmt: skip
def test_a_process_of_its_own(tmp_path: Path, body: str, expected: str) -> None:
    message = refused(tmp_path, HEAD + FORWARD + body + TAIL)
    assert re.search(expected, message), message


def test_forks_know_nothing_of_each_other(tmp_path: Path) -> None:
    """What one model does to its process no other finds."""
    spoilt = "import torch, os\ntorch.set_default_dtype(torch.float64)\nos.chdir('/')\n"
    text = HEAD + FORWARD + "return x.exp()" + TAIL
    assert capture(write(tmp_path, spoilt + text)).nodes[1].outputs[0].dtype == "float64"
    assert capture(write(tmp_path, text)).nodes[1].outputs[0].dtype == "float32"


def test_a_folder_that_was_left_is_not_the_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a file beside the model does not stand in for the library's."""
    write(tmp_path, HEAD + FORWARD + "return x.exp()" + TAIL)
    (tmp_path / "html.py").write_text("raise RuntimeError('not the library')\n")
    monkeypatch.chdir(tmp_path)
    assert [node.op for node in capture("model.py").nodes] == ["input", "aten.exp.default"]


@pytest.mark.usefixtures("alone")
def test_a_template_that_dies_is_replaced(tmp_path: Path) -> None:
    text = write(tmp_path, HEAD + FORWARD + "return x.exp()" + TAIL)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fusion_advisor.frontend.child._COMMAND", ("false",))
            stack.enter_context(prepared())
        time.sleep(0.5)
        assert capture(text).nodes[1].op == "aten.exp.default"


def test_what_is_prepared_is_not_started_again() -> None:
    """`fa.patch` captures many times, in a command that has prepared and in one that has not."""
    before = [*capture_module._prepared]
    with prepared():
        assert capture_module._prepared == before
    assert capture_module._prepared == before


def test_memory_is_limited(tmp_path: Path) -> None:
    text = "import time\nblocks = [bytes([1]) * (64 << 20) for _ in range(80)]\ntime.sleep(60)\n"
    message = refused(tmp_path, text, Limits(memory_bytes=1 << 30))
    assert "used more than 1 GiB" in message
    assert "model.py:" in message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        capture(str(tmp_path / "none.py"))


def test_a_folder_is_no_model() -> None:
    for folder in (".", str(Path(__file__).parent)):
        with pytest.raises(UsageError, match=r": a folder; give FILE\.py"):
            capture(folder)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("none")
    with pytest.raises(UsageError, match="a file of another kind"):
        capture(str(notes))


def test_the_parent_imports_no_torch() -> None:
    code = "import sys, fusion_advisor.frontend.child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("apart", [False, True], ids=["forked", "alone"])
@pytest.mark.parametrize(
    "session", ["", "os.setsid(); ", "os.setsid(); os.fork() and os._exit(0); "]
)
@pytest.mark.parametrize("end", ["", "import ctypes; ctypes.string_at(0)\n"])
def test_a_process_that_the_model_leaves_behind_ends_with_it(
    tmp_path: Path, session: str, end: str, apart: bool, request: pytest.FixtureRequest
) -> None:
    note = tmp_path / "pid"
    leave = (
        f"import os, time\nnote = {str(note)!r}\nif os.fork() == 0:\n    {session}"
        "open(note + '.new', 'w').write(str(os.getpid()))\n    os.rename(note + '.new', note)\n"
        "    time.sleep(40)\n    os._exit(0)\n"
        f"while not os.path.exists(note):\n    time.sleep(0.01)\n{end}"
    )
    began = time.monotonic()
    text = write(tmp_path, leave + HEAD + FORWARD + "return x.exp()" + TAIL)
    if apart:
        request.getfixturevalue("alone")
    if end:
        with pytest.raises(CaptureError, match="SIGSEGV"):
            capture(text)
    else:
        assert [node.op for node in capture(text).nodes] == ["input", "aten.exp.default"]
    assert time.monotonic() - began < 40
    if forks.HERE:
        assert not Path(f"/proc/{note.read_text()}").exists()


def test_no_elements_in_a_row(tmp_path: Path) -> None:
    """Zero columns have no plan, and are no fault of ours."""
    body = "return (x * 2).sum(-1) + 1\ndef get_inputs():\n    return [torch.randn(8, 0)]\n"
    graph = capture(write(tmp_path, HEAD + FORWARD + body))
    request = Request(model="model.py", device="h200", verify=False, compile=False)
    assert analyze(request, lambda: graph).report.groups == []
