"""What an emitted launcher does again without asking, and when it asks: kernels are recorded here
instead of launched, for they would be on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fusion_advisor.emitted import load_module

GOLDEN = Path(__file__).parent / "golden"


class Kernel:
    """Stands for a jit function, and for what it compiles: notes each launch, and of whom."""

    arg_names = ("BLOCK",)

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]], compiled: Kernel | None) -> None:
        self.calls, self.compiled = calls, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Kernel | None:
            how = "compiled" if self.compiled is None else "by its function"
            self.calls.append((how, arguments))
            return self.compiled

        return launch


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """SwiGLU's, for tensors of the host; `asked` counts what is asked of tensors one by one."""
    module: Any = load_module((GOLDEN / "swiglu.py").read_text(), tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FUSION_ADVISOR_STRICT", "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as the host's tensors say
    module.calls, module.asked, serves = [], 0, module.serves
    module.swiglu_kernel = Kernel(module.calls, Kernel(module.calls, None))

    def counted(*given: Any) -> str | None:
        module.asked += 1
        return serves(*given)

    module.serves = counted
    with torch.no_grad():
        yield module


def halves(rows: int = 3, cols: int = 8) -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, rows, 2 * cols, dtype=torch.bfloat16).chunk(2, -1)


def test_what_was_done_for_a_layout_is_done_again(file: Any) -> None:
    for _ in range(2):  # compiled, then launched directly
        file.swiglu(*halves())
    assert (file.asked, [how for how, _ in file.calls]) == (4, ["by its function", "compiled"])
    one, two = halves()
    made = file.swiglu(one, two)
    assert file.asked == 4
    assert (made.shape, made.stride(), made.dtype) == ((2, 3, 8), (24, 8, 1), torch.bfloat16)
    (_, before), (how, given) = file.calls[1:]
    assert how == "compiled"
    assert all(a is b for a, b in zip(given[:3], (one, two, made), strict=True))
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


def test_one_tensor_given_twice_says_nothing_of_two(file: Any) -> None:
    same = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    for _ in range(3):
        file.swiglu(same, same)
    assert not file.plans
    other = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    file.swiglu(same, other)
    assert file.calls[-1][1][1] is other


def test_a_compiler_traces_past_it(file: Any) -> None:
    """While Dynamo traces, nothing is looked up or kept, and no graph breaks."""
    for _ in range(3):
        file.swiglu(*halves())
    file.plans.clear()
    file.serves = lambda *_: None

    def launch(kernel: Any, grid: Any, tensors: Any, *_: Any, **__: Any) -> None:
        del kernel, grid
        tensors[2].copy_(tensors[0])

    file.launch = launch
    traced = torch.compile(file.swiglu, fullgraph=True, dynamic=True, backend="eager")
    one, two = halves()
    assert torch.equal(traced(one + 1, two), one + 1)
    assert not file.plans
