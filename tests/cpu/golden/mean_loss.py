# SPDX-License-Identifier: 0BSD
"""2 eager launches as 2 kernels (carried).

Replaces: _log_softmax.default, nll_loss_forward.default.
Source: regions.py:71.
HBM: 25808 B unfused, 13284 B here (1.94 times fewer) at the sizes it was made for.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from . import fused_runtime as host
from .fused_device import max_nan, wide


@triton.jit
def mean_loss_parts_kernel(
    args_1_ptr, args_0_ptr, nll_loss_parts_ptr, nll_loss_parts_1_ptr, cols, rows,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIVISOR: tl.constexpr, ROWS_DIVISOR: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    # One program walks its share of the rows.
    cols = cols // DIVISOR * DIVISOR  # seen to hold whole vectors
    rows = rows // ROWS_DIVISOR * ROWS_DIVISOR  # seen to hold whole vectors
    part = wide(tl.program_id(0), FAR)
    col = wide(tl.arange(0, COLS), FAR)
    col_mask = col < cols
    nll_loss_sums = tl.full([ROWS, 1], 0.0, tl.float32)
    nll_loss_sums_1 = tl.full([ROWS, 1], 0.0, tl.float32)
    for start in tl.range(part * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        row_mask = row < rows
        mask = row_mask & col_mask
        args_0 = tl.load(args_0_ptr + row * cols + col, mask=mask, other=0.0)
        log_softmax_max = tl.reduce(
            tl.where(col_mask, args_0, float("-inf")), 1, max_nan, keep_dims=True
        )
        log_softmax_sum = tl.sum(
            tl.where(col_mask, tl.exp2((args_0 - log_softmax_max) * 1.44269504), 0.0),
            axis=1,
            keep_dims=True,
        )
        args_1 = tl.load(args_1_ptr + row, mask=row_mask, other=0)
        nll_loss_part = args_1 != -100
        args_0_1 = tl.load(
            args_0_ptr + row * cols + args_1, mask=row_mask & nll_loss_part, other=0.0
        )
        log_softmax_part = args_0_1 - log_softmax_max - libdevice.log(log_softmax_sum)
        nll_loss_sums += tl.where(row_mask, tl.where(nll_loss_part, -log_softmax_part, 0.0), 0.0)
        nll_loss_sums_1 += tl.where(row_mask, tl.where(nll_loss_part, 1.0, 0.0), 0.0)
    tl.store(nll_loss_parts_ptr + part, tl.sum(nll_loss_sums, axis=None))
    tl.store(nll_loss_parts_1_ptr + part, tl.sum(nll_loss_sums_1, axis=None))


@triton.jit
def mean_loss_results_kernel(
    nll_loss_parts_ptr, nll_loss_parts_1_ptr, nll_loss_out_ptr, cols, COLS: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    # One program holds one whole row on chip.
    col = wide(tl.arange(0, COLS), FAR)
    col_mask = col < cols
    nll_loss_parts = tl.load(nll_loss_parts_ptr + col, mask=col_mask, other=0.0)
    value_part = nll_loss_parts.to(tl.float64)
    nll_loss_sum = tl.sum(tl.where(col_mask, value_part, 0.0), axis=0)
    value_part_1 = nll_loss_sum.to(tl.float32)
    nll_loss_parts_1 = tl.load(nll_loss_parts_1_ptr + col, mask=col_mask, other=0.0)
    value_part_2 = nll_loss_parts_1.to(tl.float64)
    nll_loss_sum_1 = tl.sum(tl.where(col_mask, value_part_2, 0.0), axis=0)
    value_part_3 = nll_loss_sum_1.to(tl.float32)
    nll_loss_part = tl.div_rn(value_part_1, value_part_3)
    tl.store(nll_loss_out_ptr, nll_loss_part)


def reference(args_0, args_1):
    """What eager launches."""
    log_softmax = torch.ops.aten._log_softmax.default(args_0, 1, False)
    nll_loss = torch.ops.aten.nll_loss_forward.default(log_softmax, args_1, None, 1, -100)
    return nll_loss[0]


PROGRAMS = 4224  # at the most: each walks rows


@host.launcher(reference, results=1)
def mean_loss(args_0, args_1):
    n1, n0 = host.ranked(args_0.shape, 2)
    args_0_strides = host.ranked(args_0.stride(), 2)
    host.takes("args_1", args_1, torch.int64, (n1,), (1,))
    host.takes("args_0", args_0, torch.float32, (n1, n0), (args_0_strides[0], 1))
    host.takes("args_0", args_0, torch.float32, (n1, n0), (n0, 1))
    host.not_empty(n0 * n1)
    parts = torch.sym_min(host.cdiv(n1, 32), PROGRAMS)
    nll_loss_parts = host.empty((parts,), (1,), torch.float32, args_0)
    nll_loss_parts_1 = host.empty((parts,), (1,), torch.float32, args_0)
    nll_loss_out = host.empty((), (), torch.float32, args_0)
    far = host.beyond_int32((nll_loss_out, args_1, args_0, nll_loss_parts, nll_loss_parts_1))
    steps = [
        host.launch(
            mean_loss_parts_kernel, (parts,), (args_1, args_0, nll_loss_parts, nll_loss_parts_1),
            (n0, n1), ROWS=32, COLS=host.power_of_two(n0), DIVISOR=host.divisor(n0),
            ROWS_DIVISOR=host.divisor(n1), FAR=far, num_warps=1,
        ),
        host.launch(
            mean_loss_results_kernel, (1,), (nll_loss_parts, nll_loss_parts_1, nll_loss_out),
            (parts,), COLS=host.power_of_two(parts), FAR=far, num_warps=1,
        ),
    ]  # fmt: skip
    return (nll_loss_out,), steps, (nll_loss_parts, nll_loss_parts_1)


# For fused_runtime.py, by input: shape, strides (None: dense), dtype, range of integers.
SMALL = [((63, 17), None, torch.float32), ((63,), None, torch.int64, 0, 17)]
FULL = [((150, 20), None, torch.float32), ((150,), None, torch.int64, 0, 20)]
TOLERANCE = {"factor": 2.0, "elements": 4096, "float32": 4.0, "float64": 16.0, "narrow": 2.0}
