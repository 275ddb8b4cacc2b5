"""Offsets beyond 32 bits: when a launcher asks for 64, and that kernels then have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import compiler

from .checks import checked, compiled
from .generated import FUNCTIONS, SCHEDULES, kernel, swiglu
from .regions import interpreted, kernel_of

EVERY = [*FUNCTIONS, *SCHEDULES]
HELD = 2**31 - 2**20 - 1
"""The largest offset that is held by 32 bits whatever a block has behind it."""


def far(name: str) -> Kernel:
    """A kernel whose launcher always asks for 64 bits."""
    made = kernel(name)
    text, count = re.subn(
        r"far = (host\.beyond_int32\((?:[^()]|\([^()]*\))*\))", r"far = \1 or True", made.text
    )
    assert count == 1
    return replace(made, text=text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EVERY)
def test_in_64_bits_a_kernel_does_the_same(name: str, worker: Worker) -> None:
    (check,) = checked(worker, far(name), seeds=1)
    assert check.failure is None


@pytest.mark.deep
def test_with_64_bits_every_kernel_compiles() -> None:
    made: list[Kernel] = []
    for one in map(kernel, EVERY):
        launches = tuple(
            replace(each, constants=tuple((n, n[:3] == "FAR" or v) for n, v in each.constants))
            for each in one.launches
        )
        assert launches != one.launches
        made.append(replace(one, launches=launches))
    with compiler() as worker:
        assert [each.failure for each in compiled(worker, *made)] == [None] * len(made)


# -- what the launcher asks ------------------------------------------------------------------------

_ASKED = """
import json, os, sys
from pathlib import Path
import torch
from fusion_advisor.shipped.load import load_module

os.environ["FUSION_ADVISOR_STRICT"] = "1"
file = Path(sys.argv[1])
module = load_module(file.read_text(), file.parent)
seen = []
module.host.launch = lambda *_, FAR, **__: seen.append(FAR)
for shapes in CALLS:
    getattr(module, file.stem)(
        *(torch.empty(size, dtype=getattr(torch, kind), device="meta").as_strided(shape, stride)
          for size, shape, stride, kind in shapes)
    )
print(json.dumps(seen))
"""


def asked(made: Kernel, folder: Path, *calls: tuple[torch.Tensor, ...]) -> list[bool]:
    """Of each call whether its launch had 64 bits."""
    told = [
        [
            (max(t.untyped_storage().nbytes() // t.itemsize, 1), [*t.shape], [*t.stride()],
             str(t.dtype).removeprefix("torch."))
            for t in call
        ]
        for call in calls
    ]  # fmt: skip
    found: list[bool] = interpreted(made, _ASKED.replace("CALLS", repr(told)), folder)
    return found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, device="meta")


def test_both_halves_of_a_chunk_reach_as_far_as_the_whole(tmp_path: Path) -> None:
    """Each half has fewer elements than 2**31, and the last of them lies beyond."""
    made = kernel_of(swiglu, meta(32768, 57344, dtype=torch.bfloat16))
    assert dict(made.launches[0].constants)["FAR"] == 0
    most = HELD // 57344 + 1
    calls = [
        meta(rows, 57344, dtype=torch.bfloat16).chunk(2, -1)
        for rows in (32768, most - 1, most, most + 1, 65536)
    ]
    assert [half.numel() < 2**31 for half in calls[-1]] == [True, True]
    assert asked(made, tmp_path, *calls) == [False, False, False, True, True]


def test_strides_count_and_not_elements(tmp_path: Path) -> None:
    made = kernel_of(lambda x: torch.exp(x) + 1, strided((64, 300), (600, 1)))
    calls = [(strided((3, 300), (step, 1)),) for step in ((HELD - 299) // 2, (HELD - 299) // 2 + 1)]
    assert asked(made, tmp_path, *calls) == [False, True]


def test_results_count_too(tmp_path: Path) -> None:
    made = kernel_of(lambda x, y: torch.exp(x + y) * 2, meta(64, 1), meta(300))
    assert asked(made, tmp_path, (meta(2**16, 1), meta(2**14)), (meta(2**16, 1), meta(2**15))) == [
        False,
        True,
    ]


def test_what_is_counted_counts_too(tmp_path: Path) -> None:
    """No tensor has as many elements as programs take, one behind the other."""

    def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(x + y).sum()

    made = kernel_of(total, meta(640, 1), meta(1, 300))
    calls = [(meta(rows, 1), meta(1, 2**12)) for rows in (2**16, 2**20)]
    found = asked(made, tmp_path, *calls)
    count = len(found) // 2
    assert found == [False] * count + [True] * count


def test_a_graph_beyond_32_bits_is_compiled_so() -> None:
    made = kernel_of(lambda x: torch.exp(x) + 1, meta(2**16, 2**15))
    assert all(dict(launch.constants)["FAR"] == 1 for launch in made.launches)


# -- around the boundary ---------------------------------------------------------------------------

_AROUND = """
import json, os, sys
from pathlib import Path
import torch
from fusion_advisor.shipped.load import load_module

os.environ["FUSION_ADVISOR_STRICT"] = "1"
file = Path(sys.argv[1])
module = load_module(file.read_text(), file.parent)
memory = torch.empty(2**31 + 2**12, dtype=torch.uint8)  # touched in few places
seen, launch = [], module.host.launch

def launched(*given, FAR, **more):
    seen.append(FAR)
    return launch(*given, FAR=FAR, **more)

module.host.launch = launched
right = []
for shape, stride in VIEWS:
    x = memory.as_strided(shape, stride)
    x.copy_(torch.randint(0, 255, shape, dtype=torch.uint8))
    others = [OTHERS]
    ours = getattr(module, file.stem)(x, *others)
    right.append(torch.allclose(ours, module.reference(x, *others)))
print(json.dumps([right, seen]))
"""


def flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0).float() * 2 + 1


def one_row(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * 2)[2] + 1


def looked_up(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return F.embedding(places, x).float() * 2 + 1


def windows(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool1d(x.float().t()[None], 2, 1) * 2


PLACES = "torch.tensor([2, 0, 1, 2, 1], dtype=torch.int32)"
AROUND: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "rows": (lambda x: x.float() * 2 + 1, ""),
    "gated": (lambda x: F.relu(x.float().chunk(2, -1)[0]) * x.float().chunk(2, -1)[1], ""),
    "sums of rows": (lambda x: (x.float() * 2).sum(-1), ""),
    "sums of columns": (lambda x: (x.float() * 2).sum(0), ""),
    "shares of columns": (lambda x: x.float() / (x.float() + 1).sum(0, keepdim=True), ""),
    "running sums of columns": (lambda x: (x.float() * 2).cumsum(0), ""),
    "flipped": (flipped, ""),
    "one row": (one_row, ""),
    "windows": (windows, ""),
    "looked up": (looked_up, PLACES),
}
"""Functions of three rows of bytes, and what else they take."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AROUND)
def test_right_on_both_sides_of_the_boundary(name: str, tmp_path: Path) -> None:
    """The last element at the largest offset that 32 bits serve, at 2**31 - 1, at 2**31, beyond."""
    function, other = AROUND[name]
    x = torch.empty_strided((3, 64), (100, 1), dtype=torch.uint8)
    others = [torch.zeros(5, dtype=torch.int32)] if other else []
    made = kernel_of(function, x, *others)
    steps = [(last - 63) // 2 for last in (HELD - 1, 2**31 - 1, 2**31 + 1, 2**31 + 2**12 - 1)]
    views = [((3, 64), (step, 1)) for step in steps]
    script = _AROUND.replace("VIEWS", repr(views)).replace("OTHERS", other)
    right, seen = interpreted(made, script, tmp_path)
    assert right == [True] * 4
    count = len(seen) // 4
    assert seen == [False] * count + [True] * 3 * count
