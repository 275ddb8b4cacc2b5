"""Elements of which Triton's 16 divides no number: whole blocks are moved in whole vectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import collect_check, submit_check

from .generated import rotated
from .regions import decided, flow_of, interpreted, kernel_of, ptx_of

BF16 = torch.bfloat16
COUNTS = (1, 7, 1023, 1024, 1025, 2048, 4097)
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from fusion_advisor.shipped.load import load_module
file = Path(sys.argv[1])
module = load_module(file.read_text(), file.parent)
found = {}
for count in COUNTS:
    x, y = (torch.randn(count + 2048) for _ in range(2))
    made = [torch.full_like(x, float("nan")) for _ in range(2)]
    module.k_kernel[(-(-count // 1024),)](x, y, *made, count, BLOCK=1024, FAR=False)
    wanted = module.reference(x[:count], y[:count])
    right = all(torch.equal(one[:count], two) for one, two in zip(made, wanted))
    found[count] = [right, all(bool(one[count:].isnan().all()) for one in made)]
print(json.dumps(found))
"""


def x(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(a + b), a - b


def test_every_element_is_written_and_none_behind_them(tmp_path: Path) -> None:
    kernel = kernel_of(both, x(4097, dtype=torch.float32), x(4097, dtype=torch.float32))
    found = interpreted(kernel, SCRIPT.replace("COUNTS", str(COUNTS)), tmp_path)
    assert found == {str(count): [True, True] for count in COUNTS}


KERNELS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "two results": (both, (x(33, 65), x(33, 65))),
    "broadcasts": (
        lambda a, b, c: torch.sigmoid(a * b) + c, (x(7, 11, 31), x(11, 1), x(31)),
    ),
    "long runs": (lambda a, b: torch.relu(a + b), (x(5, 1025), x(5, 1))),
    "random bits": (lambda a: F.dropout(a.tanh(), 0.1, training=True), (x(2051),)),
    "an index": (lambda table, at: table[at] * 2, (x(50), x(4099, dtype=torch.int64))),
    "flags": (lambda a, b: a > b, (x(4099), x(4099))),
    "side by side": (
        rotated, (x(1, 3, 41, 34), x(1, 1, 41, 34), x(41, 34), x(41, 34)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_of_every_kind(name: str, worker: Worker) -> None:
    function, inputs = KERNELS[name]
    steps = decided(flow_of(function, *inputs)).subject.plan
    assert steps is not None
    kernel = kernel_of(function, *inputs)
    blocks = sum(step.unmasked for step in steps.steps)
    assert blocks >= 1
    assert kernel.text.count("WHOLE: tl.constexpr,") == blocks
    assert len(re.findall(r"if start <= count(_\d)? - BLOCK:", kernel.text)) == blocks
    assert collect_check(kernel, submit_check(worker, kernel)).failure is None


def test_where_16_divides_nothing_is_told_apart() -> None:
    assert "WHOLE" not in kernel_of(both, x(4096), x(4096)).text
    assert "WHOLE" not in kernel_of(both, x(1023), x(1023)).text  # one block
    windows = x(3, 7, 30, 22)  # 2310 of them; what lanes walk takes the time
    assert "WHOLE" not in kernel_of(lambda a: F.max_pool2d(a, 2).tanh(), windows).text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("count", [4097, 4098, 4104])
def test_whole_blocks_are_moved_in_vectors(count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    kernel = kernel_of(both, x(count, dtype=dtype), x(count, dtype=dtype))
    (launch,) = kernel.launches
    text = ptx_of(kernel, launch, tmp_path)
    vectors = 1024 * dtype.itemsize // (launch.num_warps * 32 * 16)
    for way in ("ld", "st"):
        found = re.findall(rf"{way}\.global\.((?:v\d\.)?b\d+)", text)
        assert found.count("v4.b32") == 2 * vectors
        assert found.count(f"b{8 * dtype.itemsize}") == 2 * 8  # of the last block
