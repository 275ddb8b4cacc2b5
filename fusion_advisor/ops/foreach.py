"""Ops over many tensors at once, as optimizers call them: counted, never fused.

One call packs as many tensors and chunks into a launch as its arguments hold, and launches again
for the rest (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.ops.registry import Call, formula

_CHUNK = 65_536
"""Elements that one block works on (`kChunkSize`)."""
_BLOCKS = 320
"""Blocks of one launch (`depth_to_max_blocks`)."""
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of one launch by the number of lists (`depth_to_max_tensors`)."""


def _lists(call: Call) -> list[list[Tensor]]:
    """Lists of tensors that the call is given, and the one that it makes."""
    given = [
        [call.tensors[ref] for ref in arg if isinstance(ref, Ref) and ref in call.tensors]
        for arg in call.node.args
        if isinstance(arg, tuple)
    ]
    made = [tensor for tensor in call.node.outputs if tensor is not None]
    return [each for each in (*given, made) if each]


def _launches(call: Call) -> int:
    """Launches of one call: each is full by its tensors or by its blocks."""
    lists = _lists(call)
    first = lists[0] if lists else []
    chunks = sum(math.ceil(tensor.numel / _CHUNK) for tensor in first)
    most = _TENSORS[min(max(len(lists), 1), max(_TENSORS))]
    return max(math.ceil(len(first) / most), math.ceil(chunks / _BLOCKS), 1)


def _steps(each: int, call: Call) -> int:
    """FLOPs: so many of each element of the first list."""
    lists = _lists(call)
    return each * sum(tensor.numel for tensor in lists[0]) if lists else 0


def _steps_of(each: int) -> Callable[[Call], int]:
    return partial(_steps, each)


_STEPS = {
    "add": 1, "sub": 1, "mul": 1, "div": 1, "sqrt": 1, "neg": 1, "reciprocal": 1, "abs": 1,
    "lerp": 3, "addcmul": 3, "addcdiv": 3, "maximum": 1, "copy": 0, "zero": 0, "sign": 1,
    "pow": 1, "exp": 1, "norm": 2, "clamp_max": 1, "clamp_min": 1,
}  # fmt: skip
"""FLOPs of an element by op."""

_FUSED_STEPS = {"adam": 12, "adamw": 12, "sgd": 4, "adagrad": 6}
"""FLOPs of an element by optimizer: its formulas in torch/optim, constants of the step aside."""


def _fused(call: Call) -> tuple[int, int]:
    """HBM bytes: every tensor read once, and all but the gradients written: those change only where
    a scaler's factor is given."""
    lists = _lists(call)
    sizes = [sum(tensor.bytes for tensor in each) for each in lists]
    return sum(sizes), sum(sizes) - (sizes[1] if len(sizes) > 1 else 0)


for _name, _each in _FUSED_STEPS.items():
    for _overload in ("default", "tensor_lr"):
        formula(
            "foreach",
            f"aten._fused_{_name}_.{_overload}",
            flops=_steps_of(_each),
            traffic=_fused,
            launches=_launches,
        )

_OVERLOADS = ("default", "List", "Scalar", "ScalarList", "Tensor")

for _name, _each in _STEPS.items():
    for _overload in _OVERLOADS:
        formula(
            "foreach",
            f"aten._foreach_{_name}.{_overload}",
            f"aten._foreach_{_name}_.{_overload}",
            flops=_steps_of(_each),
            launches=_launches,
        )
