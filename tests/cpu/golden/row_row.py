# SPDX-License-Identifier: 0BSD
"""2 eager launches as 2 kernels (row + row).

Replaces: amax.default, amin.default.
Source: generated.py:137.
HBM: 15624004 B unfused, 15624004 B here (1.00 times fewer) at the sizes it was made for.
"""

import torch
import triton
import triton.language as tl

from . import fused_runtime as host
from .fused_device import max_nan, min_nan, wide


@triton.jit
def row_row_rows_kernel(
    args_0_ptr, amax_values_ptr, cols, COLS: tl.constexpr, REST: tl.constexpr,
    DIVISOR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    # One program holds one whole row in pieces on chip.
    cols = cols // DIVISOR * DIVISOR  # seen to hold whole vectors
    row = wide(tl.program_id(0), FAR)
    col = wide(tl.arange(0, COLS), FAR)
    rest = COLS + wide(tl.arange(0, REST), FAR)
    rest_mask = rest < cols
    args_0 = tl.load(args_0_ptr + row * cols + col, eviction_policy="evict_first")
    args_0_rest = tl.load(
        args_0_ptr + row * cols + rest, mask=rest_mask, other=0.0, eviction_policy="evict_first"
    )
    amax_max = max_nan(
        tl.reduce(args_0, 0, max_nan),
        tl.reduce(tl.where(rest_mask, args_0_rest, float("-inf")), 0, max_nan),
    )
    tl.store(amax_values_ptr + row, amax_max)


@triton.jit
def row_row_results_kernel(
    amax_values_ptr, amin_out_ptr, cols, COLS: tl.constexpr, REST: tl.constexpr,
    DIVISOR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    # One program holds one whole row in pieces on chip.
    cols = cols // DIVISOR * DIVISOR  # seen to hold whole vectors
    col = wide(tl.arange(0, COLS), FAR)
    rest = COLS + wide(tl.arange(0, REST), FAR)
    rest_mask = rest < cols
    amax_values = tl.load(amax_values_ptr + col)
    amax_values_rest = tl.load(amax_values_ptr + rest, mask=rest_mask, other=0.0)
    amin_min = min_nan(
        tl.reduce(amax_values, 0, min_nan),
        tl.reduce(tl.where(rest_mask, amax_values_rest, float("inf")), 0, min_nan),
    )
    tl.store(amin_out_ptr, amin_min)


def reference(args_0):
    """What eager launches."""
    amax = torch.ops.aten.amax.default(args_0, [-1])
    amin = torch.ops.aten.amin.default(amax)
    return amin


@host.launcher(reference, results=1)
def row_row(args_0):
    n0, n1 = host.ranked(args_0.shape, 2)
    host.takes("args_0", args_0, torch.float32, (n0, n1), (n1, 1))
    host.not_empty(n0 * n1)
    amax_values = host.empty((n0,), (1,), torch.float32, args_0)
    amin_out = host.empty((), (), torch.float32, args_0)
    far = host.beyond_int32((amin_out, args_0, amax_values))
    steps = [
        host.launch(
            row_row_rows_kernel, (n0,), (args_0, amax_values), (n1,), COLS=host.first_piece(n1),
            REST=host.second_piece(n1), DIVISOR=host.divisor(n1), FAR=far, num_warps=1,
        ),
        host.launch(
            row_row_results_kernel, (1,), (amax_values, amin_out), (n0,), COLS=host.first_piece(n0),
            REST=host.second_piece(n0), DIVISOR=host.divisor(n0), FAR=far, num_warps=4,
        ),
    ]  # fmt: skip
    return (amin_out,), steps, (amax_values,)


# For fused_runtime.py, by input: shape, strides (None: dense), dtype, range of integers.
SMALL = [((7, 65), None, torch.float32)]
FULL = [((3000, 1300), None, torch.float32)]
TOLERANCE = {"factor": 2.0, "elements": 4096, "float32": 2.0, "float64": 16.0, "narrow": 2.0}
