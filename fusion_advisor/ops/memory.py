"""Ops that are counted and never fused: scatters, sorts, and scans that carry two values."""

from __future__ import annotations

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ops.registry import Call, Traffic, formula

# -- scatters: the places written ------------------------------------------------------------------


def _scatter_into(copied: bool) -> Traffic:
    def traffic(call: Call) -> tuple[int, int]:
        """HBM bytes. Out of place the target is copied first; writing a value replaces an element,
        adding also reads it."""
        target, operands = call.operand(0), call.operands[1:]
        values = operands[-1].numel if operands else 0
        read = addressed_bytes(operands)
        base = target.bytes if copied else 0
        return read + base, base + values * target.itemsize

    return traffic


formula(
    "scatter",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.index_copy.default",
    "aten.slice_scatter.default",
    "aten.select_scatter.default",
    "aten.masked_scatter.default",
    traffic=_scatter_into(True),
)
formula(
    "scatter",
    "aten.scatter_.src",
    "aten.scatter_.value",
    "aten.index_copy_.default",
    traffic=_scatter_into(False),
)


def _accumulate(copied: bool) -> Traffic:
    def traffic(call: Call) -> tuple[int, int]:
        target, operands = call.operand(0), call.operands[1:]
        places = min(operands[-1].numel, target.numel) * target.itemsize
        base = target.bytes if copied else 0
        return addressed_bytes(operands) + base + places, base + places

    return traffic


formula(
    "scatter",
    "aten.index_add.default",
    "aten.scatter_add.default",
    "aten.index_put.default",
    "aten.scatter_reduce.two",
    traffic=_accumulate(True),
)
formula(
    "scatter",
    "aten.index_add_.default",
    "aten.scatter_add_.default",
    "aten.index_put_.default",
    "aten.scatter_reduce_.two",
    traffic=_accumulate(False),
)

# -- scans, sorts and the rest ---------------------------------------------------------------------

formula(
    "scan",
    "aten.cummax.default",
    "aten.cummin.default",
    flops=lambda call: call.operand(0).numel,
)
formula(
    "sort",
    "aten.topk.default",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.kthvalue.default",
    "aten.median.dim",
    "aten.histc.default",
    "aten.bincount.default",
    "aten.searchsorted.Tensor",
    "aten.bucketize.Tensor",
    "aten.unique_dim.default",
    "aten.argsort.default",
    "aten.argsort.stable",
)
formula(
    "pairwise",
    "aten._cdist_forward.default",
    flops=lambda call: 3 * call.out.numel * call.operand(0).shape[-1],
)
