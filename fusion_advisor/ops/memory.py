"""Ops whose traffic is not "every operand once, every result once": gathers, windows, copies."""

from __future__ import annotations

import math

from fusion_advisor.ops.registry import Call, Formula, Traffic, formula

# -- gathers: rows touched, not tables -------------------------------------------------------------


def _embedding(call: Call) -> tuple[int, int]:
    table, places = call.operand(0), call.operand(1)
    return places.bytes + min(call.out.numel * table.itemsize, table.bytes), call.out.bytes


def _gather(call: Call) -> tuple[int, int]:
    source, places = call.operand(0), call.operand(2)
    return places.bytes + min(call.out.numel * source.itemsize, source.bytes), call.out.bytes


def _index(call: Call) -> tuple[int, int]:
    source = call.operand(0)
    places = sum(t.bytes for t in call.operands[1:])
    return places + min(call.out.numel * source.itemsize, source.bytes), call.out.bytes


formula("gather", "aten.embedding.default", traffic=_embedding)
formula("gather", "aten.gather.default", "aten.index_select.default", traffic=_gather)
formula("gather", "aten.index.Tensor", "aten._unsafe_index.Tensor", traffic=_index)


def _nll(call: Call) -> tuple[int, int]:
    """One score of each row, and its target."""
    scores, target = call.operand(0), call.operand(1)
    weight = call.tensor(2)
    read = target.bytes + target.numel * scores.itemsize
    if weight is not None:
        read += min(target.numel * weight.itemsize, weight.bytes)
    return read, sum(t.bytes for t in call.node.outputs if t is not None)


formula(
    "gather",
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    traffic=_nll,
    flops=lambda call: call.operand(1).numel,
)

# -- scatters: the places written ------------------------------------------------------------------


def _scatter_into(copied: bool) -> Traffic:
    def traffic(call: Call) -> tuple[int, int]:
        """Out of place the target is copied first; a value replaces, an addition reads too."""
        target, operands = call.operand(0), call.operands[1:]
        values = operands[-1].numel if operands else 0
        read = sum(t.bytes for t in operands)
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
        return sum(t.bytes for t in operands) + base + places, base + places

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

# -- copies ----------------------------------------------------------------------------------------


formula(
    "copy",
    "aten.cat.default",
    "aten.stack.default",
    "aten.constant_pad_nd.default",
    "aten.roll.default",
    "aten.flip.default",
    "aten.repeat.default",
    "aten.tile.default",
    "aten.repeat_interleave.Tensor",
    "aten.repeat_interleave.self_int",
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad1d.default",
    "aten._pad_circular.default",
    "aten.diag_embed.default",
    "aten.col2im.default",
    "aten.im2col.default",
    "aten.pixel_shuffle.default",
    "aten.pixel_unshuffle.default",
    "aten.channel_shuffle.default",
)

# -- windows ---------------------------------------------------------------------------------------


def spread(value: object, count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions."""
    if isinstance(value, int):
        return (value,) * count
    found = tuple(int(v) for v in value) if isinstance(value, tuple) else ()  # pyright: ignore
    return found * count if len(found) == 1 else found


def covered(size: int, out: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Distinct positions of one dimension that some window touches."""
    touched = bytearray(size)
    for tap in range(kernel):
        first = tap * dilation - pad
        skipped = max(0, -(first // stride)) if first < 0 else 0
        places = range(first + skipped * stride, min(size, first + out * stride), stride)
        touched[places.start : places.stop : stride] = b"\1" * len(places)
    return sum(touched)


def _pooling(spatial: int, dilated: bool) -> Traffic:
    def traffic(call: Call) -> tuple[int, int]:
        x, out = call.operand(0), call.out
        kernel = spread(call.arg(1, "kernel_size"), spatial)
        stride = spread(call.arg(2, "stride", ()), spatial) or kernel
        pad = spread(call.arg(3, "padding", 0), spatial)
        dilation = spread(call.arg(4, "dilation", 1), spatial) if dilated else (1,) * spatial
        share = math.prod(
            covered(
                x.shape[d - spatial],
                out.shape[d - spatial],
                kernel[d],
                stride[d],
                pad[d],
                dilation[d],
            )
            for d in range(spatial)
        )
        read = math.prod(x.shape[:-spatial]) * share * x.itemsize
        return read, sum(t.bytes for t in call.node.outputs if t is not None)

    return traffic


def _window_flops(spatial: int) -> Formula:
    def flops(call: Call) -> int:
        return call.out.numel * math.prod(spread(call.arg(1, "kernel_size"), spatial))

    return flops


for _spatial in (1, 2, 3):
    formula(
        "window",
        f"aten.avg_pool{_spatial}d.default",
        traffic=_pooling(_spatial, False),
        flops=_window_flops(_spatial),
    )
    formula(
        "window",
        f"aten.max_pool{_spatial}d_with_indices.default",
        f"aten.max_pool{_spatial}d.default",
        traffic=_pooling(_spatial, True),
        flops=_window_flops(_spatial),
    )
    formula(
        "window",
        f"aten._adaptive_avg_pool{_spatial}d.default",
        f"aten.adaptive_avg_pool{_spatial}d.default",
        f"aten.adaptive_max_pool{_spatial}d.default",
        flops=lambda call: call.operand(0).numel,
    )

formula(
    "window",
    "aten.upsample_nearest2d.default",
    "aten.upsample_nearest2d.vec",
    "aten.upsample_nearest1d.default",
    "aten.upsample_nearest3d.default",
    "aten._upsample_nearest_exact2d.default",
)
formula(
    "window",
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_trilinear3d.default",
    "aten.upsample_bicubic2d.default",
    "aten.upsample_linear1d.default",
    "aten.grid_sampler_2d.default",
    flops=lambda call: 8 * call.out.numel,
)

# -- scans, sorts and the rest ---------------------------------------------------------------------

formula(
    "scan",
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.logcumsumexp.default",
    "aten.cumsum_.default",
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
formula("random", "aten.native_dropout.default", flops=lambda call: 2 * call.operand(0).numel)
formula("random", "aten.multinomial.default")


def _loss(call: Call) -> tuple[int, int]:
    """One pass that writes the elements, and one that reduces them, unless reduction is none."""
    read, size = sum(t.bytes for t in call.operands[:2]), call.operand(0).bytes
    if call.arg(_REDUCTION_AT.get(call.node.op, 2), "reduction", 1) == 0:
        return read, call.out.bytes
    return read + size, size + call.out.bytes


_REDUCTION_AT = {"aten.binary_cross_entropy.default": 3}
formula(
    "reduction",
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.soft_margin_loss.default",
    traffic=_loss,
    flops=lambda call: 3 * call.operand(0).numel,
)
formula("pointwise", "aten.glu.default", flops=lambda call: 5 * call.out.numel)
formula(
    "pairwise",
    "aten._cdist_forward.default",
    flops=lambda call: 3 * call.out.numel * call.operand(0).shape[-1],
)
