"""A second count of bytes and FLOPs that shares nothing with the analyser's: the model runs eagerly
under fake tensors, and a dispatch mode adds up what each op is given and returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fusion_advisor.frontend.loading import load
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.ops import REGISTRY

COUNTED_PATTERNS = ("matmul", "convolution", "attention", "recurrent")
"""The ops whose FLOPs `flop_counter` knows."""

_BY_PATTERN = {
    "gather": "gather",
    "scatter": "scatter",
    "window": "window",
    "attention": "attention",
    "recurrent": "recurrent",
    "creation": "creation",
    "allocation": "allocation",
    "view": "view",
}


def _flash_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


_CPU_VARIANTS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_on_cpu,
}
"""What flop_counter knows under its CUDA name only."""
_OVERWRITES = ("copy_", "fill_", "zero_", "copy.", "fill.", "normal_", "uniform_", "bernoulli_")
_AROUND_ATTENTION = ("clone", "aten.mm", "aten.bmm", "_unsafe_view", "addmm")
_NORMS = ("_fused_rms_norm", "rms_norm")


@dataclass
class Seen:
    """Totals of one eager run; bytes by overload."""

    bytes: Counter[str] = field(default_factory=Counter[str])
    flops: int = 0


def count(model: str, scenario: Scenario) -> Seen:
    """Load a model as `analyze` does and run it once, eagerly, under fake tensors."""
    loaded = load(model, scenario)
    seen = Seen()
    flops = FlopCounterMode(display=False, custom_mapping=_CPU_VARIANTS)
    grad = torch.set_grad_enabled(scenario.mode == "train")
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        unfused = torch.backends.mkldnn.flags(enabled=False)
        with loaded.fake, grad, unfused, flops, _Bytes(seen.bytes):
            loaded.module(*loaded.args, **loaded.kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    seen.flops = flops.get_total_flops()
    return seen


class _Bytes(TorchDispatchMode):
    """Every operand once and every fresh or written result once, by elements addressed."""

    def __init__(self, total: Counter[str]) -> None:
        super().__init__()
        self._total = total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        known = {t.untyped_storage()._cdata for t in given}
        fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, torch.Tensor)
        ]
        if fresh or written:
            moved = {_elements(t): _size(t) for t in given}
            self._total[str(func)] += sum(moved.values()) + sum(map(_size, [*fresh, *written]))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= int(size) if stride or not size else 1
    return count * tensor.element_size()


def _elements(tensor: torch.Tensor) -> Any:
    """Equal for views that address the same elements."""
    storage = tensor.untyped_storage()._cdata
    order = sorted(
        (int(s), int(n)) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s
    )
    return storage, int(tensor.storage_offset()), _size(tensor), order[0][0] if order else 0


def reason(op: str, patterns: frozenset[str], ops: frozenset[str]) -> str:
    """Why the two counts may differ on an op: a key of `audit.REASONS`, or ''.

    `patterns` and `ops` are the whole model's: a cell that the CPU build unrolls explains every op.
    """
    entry = REGISTRY.get(op)
    if "recurrent" in patterns:
        return "recurrent"
    if "convolution" in op:
        return "window"
    if any(name in op for name in _NORMS):
        return "norm"
    if any(name in op for name in _OVERWRITES):
        return "overwrite"
    if entry is not None and entry.pattern in _BY_PATTERN:
        return _BY_PATTERN[entry.pattern]
    attends = "attention" in patterns or {"aten.bmm.default", "aten._softmax.default"} <= ops
    if attends and any(name in op for name in _AROUND_ATTENTION):
        return "device"
    if "loss" in op or "binary_cross_entropy" in op:
        return "loss"
    return ""
