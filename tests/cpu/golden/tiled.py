# SPDX-License-Identifier: 0BSD
"""3 eager launches as one tiled kernel.

Replaces: add.Tensor, tanh.default, mul.Tensor.
Source: generated.py:135.
HBM: 2237920 B unfused, 746080 B here (3.00 times fewer) at the sizes it was made for.
"""

import torch
import triton
import triton.language as tl

from . import fused_runtime as host
from .fused_device import wide, wide_tanh


@triton.jit
def tiled_kernel(
    args_0_ptr, args_1_ptr, mul_out_ptr, cols, rows, row_1_size, ROWS: tl.constexpr,
    COLS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    # One program has one part of several rows.
    program = wide(tl.program_id(0), FAR)
    parts = tl.cdiv(cols, COLS)
    row = program // parts * ROWS + tl.arange(0, ROWS)[:, None]
    part = program % parts
    col = part * COLS + wide(tl.arange(0, COLS), FAR)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    row_1 = row % row_1_size
    args_0 = tl.load(args_0_ptr + row * cols + col, mask=mask, other=0.0)
    args_1 = tl.load(args_1_ptr + row_1, mask=row_mask, other=0.0)
    add = args_0 + args_1
    tanh = wide_tanh(add)
    mul = tanh * 2.0
    tl.store(mul_out_ptr + row * cols + col, mul, mask=mask)


def reference(args_0, args_1):
    """What eager launches."""
    add = torch.ops.aten.add.Tensor(args_0, args_1)
    tanh = torch.ops.aten.tanh.default(add)
    mul = torch.ops.aten.mul.Tensor(tanh, 2)
    return mul


@host.launcher(reference, results=1)
def tiled(args_0, args_1):
    n0, n1, n2 = host.ranked(args_0.shape, 3)
    args_1_strides = host.ranked(args_1.stride(), 2)
    host.takes("args_0", args_0, torch.float32, (n0, n1, n2), (n1 * n2, n2, 1))
    host.takes("args_1", args_1, torch.float32, (n1, 1), (1, args_1_strides[1]))
    host.not_empty(n0 * n1 * n2)
    mul_out = host.empty((n0, n1, n2), (n1 * n2, n2, 1), torch.float32, args_0)
    far = host.beyond_int32((mul_out, args_0, args_1))
    steps = [host.launch(
        tiled_kernel, lambda at: (host.cdiv(n0 * n1, at["ROWS"]) * host.cdiv(n2, at["COLS"]),),
        (args_0, args_1, mul_out), (n2, n0 * n1, n1), ROWS=2, COLS=512, FAR=far, num_warps=2,
    )]  # fmt: skip
    return (mul_out,), steps


# For fused_runtime.py, by input: shape, strides (None: dense), dtype, range of integers.
SMALL = [((2, 3, 513), None, torch.float32), ((3, 1), None, torch.float32)]
FULL = [((7, 40, 333), None, torch.float32), ((40, 1), None, torch.float32)]
TOLERANCE = {"factor": 2.0, "elements": 4096, "float32": 2.0, "float64": 16.0, "narrow": 2.0}
