"""What an emitted launcher does again without asking, and when it asks: kernels are recorded here
instead of launched, for they would be on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.autograd import forward_ad

from fusion_advisor.shipped.load import load_module

from .generated import kernel


class Compiled:
    """Stands for what Triton compiled: notes each launch, as it is told of and as it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append(("told", arguments))

    def run(self, *given: Any) -> None:
        assert given[3:9] == ("stream of -1", self.function, self.packed_metadata, None, None, None)
        self.calls.append(("run", given[9:]))


class Kernel:
    """Stands for a jit function: notes each launch."""

    arg_names = ("BLOCK", "COLS", "PEERS", "STEP")

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.calls.append(("function", arguments))
            return Compiled(self.calls)

        return launch


def _loaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An emitted file's module, for tensors of the host."""
    module: Any = load_module(kernel(name).text, tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FUSION_ADVISOR_STRICT", "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as the host's tensors say
    streams = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=streams))
    module.calls = []
    for each in [each for each in vars(module) if each.endswith("_kernel")]:
        setattr(module, each, Kernel(module.calls))
    return module


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """SwiGLU's; `asked` counts what is asked of tensors one by one."""
    module = _loaded("swiglu", tmp_path, monkeypatch)
    module.asked, serves = 0, module.host.serves

    def counted(*given: Any) -> str | None:
        module.asked += 1
        return serves(*given)

    module.host.serves = counted
    with torch.no_grad():
        yield module


def halves(rows: int = 3, cols: int = 8) -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, rows, 2 * cols, dtype=torch.bfloat16).chunk(2, -1)


def test_what_was_done_for_a_layout_is_done_again(file: Any) -> None:
    for _ in range(2):  # compiled, then launched directly
        file.swiglu(*halves())
    assert (file.asked, [how for how, _ in file.calls]) == (4, ["function", "run"])
    one, two = halves()
    made = file.swiglu(one, two)
    assert file.asked == 4
    assert (made.shape, made.stride(), made.dtype) == ((2, 3, 8), (24, 8, 1), torch.bfloat16)
    (_, before), (how, given) = file.calls[1:]
    assert how == "run"
    assert given[:3] == tuple(each.data_ptr() for each in (one, two, made))
    assert given[3:] == before[3:], "sizes, strides and constants"


@pytest.mark.parametrize("change", ["size", "stride", "dtype", "device", "place"])
def test_another_layout_is_asked_of(
    file: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        file.swiglu(*halves())
    one, two = halves()
    if change == "size":
        one, two = halves(rows=4)
    elif change == "stride":
        two = two.contiguous()
    elif change == "dtype":
        two = two.float()
    elif change == "device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    else:
        wide = torch.zeros(97, dtype=torch.bfloat16)[1:].view(2, 3, 16)
        one, two = wide.chunk(2, -1)
        assert one.data_ptr() % 16
    asked = file.asked
    if change == "dtype":
        with pytest.raises(RuntimeError, match=r"dtype torch\.float32, not torch\.bfloat16"):
            file.swiglu(one, two)
    else:
        file.swiglu(one, two)
    assert file.asked == asked + 2


def test_a_gradient_is_asked_of(file: Any) -> None:
    for _ in range(3):
        file.swiglu(*halves())
    one, two = halves()
    with torch.enable_grad(), pytest.raises(RuntimeError, match="requires a gradient"):
        file.swiglu(one.requires_grad_(), two)


def test_tensors_may_be_given_by_name(file: Any) -> None:
    one, two = halves()
    names = inspect.signature(file.swiglu).parameters
    for _ in range(3):
        made = file.swiglu(**dict(zip(names, (one, two), strict=True)))
    assert file.calls[-1][1][:3] == tuple(each.data_ptr() for each in (one, two, made))
    with pytest.raises(TypeError, match="unexpected keyword argument 'none_of_these'"):
        file.swiglu(one, two, none_of_these=two)


def test_a_tangent_is_asked_of(file: Any) -> None:
    """Kernels take pointers, and would leave the tangents of forward mode behind."""
    for _ in range(3):
        file.swiglu(*halves())
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="may have a tangent"):
        file.swiglu(*halves())


def test_one_tensor_given_twice_says_nothing_of_two(file: Any) -> None:
    same = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    for _ in range(3):
        file.swiglu(same, same)
    assert not file.host.plans
    other = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    file.swiglu(same, other)
    assert file.calls[-1][1][1] is other


def test_hooks_are_told_of_what_is_done_again(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        file.swiglu(*halves())
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    file.swiglu(*halves())
    assert [how for how, _ in file.calls] == ["function", "run", "run", "told"]


def test_a_hook_may_be_a_plain_function(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for hook, expected in ((lambda metadata: None, "told"), (None, "run")):
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        for _ in range(3):
            file.swiglu(*halves())
        assert file.calls[-1][0] == expected


def test_words_of_an_exchange_are_zero_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of one launch wait where there is room for them; else there is one for each turn."""
    file = _loaded("shared_softmax", tmp_path, monkeypatch)
    words: list[torch.Tensor] = []
    allocate = torch.zeros

    def zeros(*given: Any, **options: Any) -> torch.Tensor:
        words.append(allocate(*given, **options))
        return words[-1]

    monkeypatch.setattr(torch, "zeros", zeros)
    rows = torch.ones(4, 100, dtype=torch.bfloat16)
    for _ in range(3):
        made = file.shared_softmax(rows)
    assert [how for how, _ in file.calls] == ["function"] * 2 + ["run"] * 4
    assert len({each.data_ptr() for each in words}) == len(words) == 3
    pointers = (rows.data_ptr(), made.data_ptr(), words[-1].data_ptr())
    assert [given[:3] for _, given in file.calls[-2:]] == [pointers] * 2
    turns = [tuple(each[5:] for _, each in file.calls[at : at + 2]) for at in (2, 4)]
    assert turns[0] == turns[1], "both turns, in order"


def test_drawn_seeds_are_given_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _loaded("dropout_gelu", tmp_path, monkeypatch)
    values = torch.ones(8, 64, dtype=torch.bfloat16)
    for _ in range(4):
        file.dropout_gelu(values)
    assert [how for how, _ in file.calls] == ["function", "run", "run", "run"]
    assert len(file.host.plans) == 1
    assert len({given[1] for _, given in file.calls[2:]}) == 2, "seeds of two calls"


def test_to_a_compiler_it_is_one_operator(file: Any) -> None:
    """While Dynamo traces, nothing is asked or kept, and no graph breaks."""
    for _ in range(3):
        file.swiglu(*halves())
    file.host.plans.clear()
    file.host.serves = lambda *_: None

    def launch(kernel: Any, grid: Any, tensors: Any, *_: Any, **__: Any) -> None:
        del kernel, grid
        tensors[2].copy_(tensors[0])

    file.host.launch = launch
    traced = torch.compile(file.swiglu, fullgraph=True, dynamic=True, backend="eager")
    one, two = halves()
    assert torch.equal(traced(one + 1, two), one + 1)
    assert not file.host.plans
