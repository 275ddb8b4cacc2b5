# SPDX-License-Identifier: 0BSD
"""2 eager launches as one persistent kernel.

Replaces: mul.Tensor, _softmax.default.
Source: generated.py:131.
HBM: 491520000 B unfused, 245760000 B here (2.00 times fewer) at the sizes it was made for.
Computes in float32 for narrower floats; rounds at the stores.
Deterministic: bitwise the same from run to run.
"""

import torch
import triton
import triton.language as tl

if not __package__:
    raise (SystemExit if __name__ == "__main__" else ImportError)(
        "persistent.py is one of a package: import that, or run fused_runtime.py beside it"
    )
from . import fused_runtime as host
from .fused_device import max_nan, wide

host.require(1)


@triton.jit
def persistent_kernel(
    args_0_ptr,
    softmax_out_ptr,
    cols,
    rows,
    COLS: tl.constexpr,
    FAR: tl.constexpr,
):
    # One program walks its share of the rows.
    part = wide(tl.program_id(0), FAR)
    col = wide(tl.arange(0, COLS), FAR)
    col_mask = col < cols
    for row in tl.range(part, rows, tl.num_programs(0), num_stages=3):
        args_0 = tl.load(
            args_0_ptr + row * cols + col,
            mask=col_mask,
            other=0.0,
            eviction_policy="evict_last",
        ).to(tl.float32)
        mul = args_0 * 2.0
        softmax_max = tl.reduce(tl.where(col_mask, mul, float("-inf")), 0, max_nan)
        softmax_part = tl.exp2((mul - softmax_max) * 1.44269504)
        softmax_sum = tl.sum(tl.where(col_mask, softmax_part, 0.0), axis=0)
        softmax = softmax_part * (1.0 / softmax_sum)
        tl.store(softmax_out_ptr + row * cols + col, softmax, mask=col_mask)


# Programs at the most: each walks rows.
PROGRAMS = 528


def persistent(args_0):
    layout, plan = host.plan_of(persistent_kernel, args_0)
    if plan is not None:
        return host.do_again(plan, args_0)
    n0, n1 = host.ranked(args_0.shape, 2)
    problem = host.serves("args_0", args_0, torch.bfloat16, (n0, n1), (n1, 1))
    if problem:
        return host.fall_back(problem, persistent, reference, args_0)
    if not n0 * n1:
        return reference(args_0)
    softmax_out = torch.empty_strided((n0, n1), (n1, 1), dtype=torch.bfloat16, device=args_0.device)
    far = host.beyond_int32((args_0, softmax_out))
    steps = [
        host.launch(
            persistent_kernel,
            (min(n0, PROGRAMS),),
            (args_0, softmax_out),
            (n1, n0),
            COLS=host.power_of_two(n1),
            FAR=far,
            num_warps=32,
            enable_fp_fusion=False,
        ),
    ]
    host.remember(layout, (args_0,), (softmax_out,), steps)
    return softmax_out


def reference(args_0):
    """What eager launches."""
    mul = torch.ops.aten.mul.Tensor(args_0, 2)
    softmax = torch.ops.aten._softmax.default(mul, -1, False)
    return softmax


# -- python fused_runtime.py persistent --check --bench --------------------------------------------

# Of each input: shape, strides, dtype, and from where to where integers go.
SMALL = [((7, 65), (65, 1), torch.bfloat16)]
FULL = [((2048, 30000), (30000, 1), torch.bfloat16)]
TOLERANCE = {"factor": 2.0, "elements": 4096, "float32": 2.0, "float64": 16.0, "narrow": 2.0}
