# SPDX-License-Identifier: 0BSD
"""2 eager launches as one flat kernel.

Replaces: gelu.default, native_dropout.default.
Source: generated.py:73.
HBM: 288000 B unfused, 128016 B here (2.25 times fewer) at the sizes it was made for.
Deterministic: bitwise the same for the same seed and offset, on any device.
Random: Philox-4x32-7 of seed, offset and the number of the element. Both are one int64 each in a
tensor on the device, so that replays of a CUDA graph may change them; an int is filled into such
a tensor. Without a seed they are drawn from torch's generator of the device, by one launch more;
with one, that generator is left alone.
"""

import torch
import triton
import triton.language as tl

from . import fused_runtime as host
from .fused_device import one_plus_erf, random16_run, wide
from .fused_runtime import dropped, random_bits


@triton.jit
def dropout_gelu_kernel(
    args_0_ptr, seed_ptr, offset_ptr, dropout_gelu_out_ptr, count, BLOCK: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    # One program, one block of consecutive elements of the result.
    index = wide(tl.program_id(0), FAR) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    args_0 = tl.load(args_0_ptr + index, mask=mask, other=0.0).to(tl.float32)
    gelu = args_0 * 0.5 * one_plus_erf(args_0 * 0.7071067811865476)
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    dropout_gelu_1_bits = random16_run(
        seed, offset, 0, wide(tl.program_id(0), FAR) * BLOCK, BLOCK, True
    )
    dropout_gelu_1_part = tl.where(dropout_gelu_1_bits >= -1717986918, 1.1111111111111112, 0.0)
    dropout_gelu_1 = gelu * dropout_gelu_1_part
    tl.store(dropout_gelu_out_ptr + index, dropout_gelu_1, mask=mask)


def reference(args_0, seed, offset):
    """What eager launches, on the kernels' random bits."""
    gelu = torch.ops.aten.gelu.default(args_0)
    dropout_gelu_1 = dropped(
        gelu, random_bits((gelu.shape[0], gelu.shape[1]), 8, seed, offset, 0, args_0.device), 0.1
    )
    return dropout_gelu_1[0]


@host.seeded
@host.launcher(reference, results=1)
def dropout_gelu(args_0, seed=None, offset=None):
    n0, n1 = host.ranked(args_0.shape, 2)
    host.takes("args_0", args_0, torch.bfloat16, (n0, n1), (n1, 1))
    host.takes("seed", seed, torch.int64, (), ())
    host.takes("offset", offset, torch.int64, (), ())
    host.not_empty(n0 * n1)
    dropout_gelu_out = host.empty((n0, n1), (n1, 1), torch.bfloat16, args_0)
    far = host.beyond_int32((dropout_gelu_out, args_0, seed, offset))
    steps = [host.launch(
        dropout_gelu_kernel, lambda at: (host.cdiv(n0 * n1, at["BLOCK"]),),
        (args_0, seed, offset, dropout_gelu_out), (n0 * n1,), BLOCK=1024, FAR=far, num_warps=4,
    )]  # fmt: skip
    return (dropout_gelu_out,), steps


# For fused_runtime.py, by input: shape, strides (None: dense), dtype, range of integers.
SMALL = [
    ((47, 45), None, torch.bfloat16),
    ((), None, torch.int64, -9223372036854775808, 9223372036854775807),
    ((), None, torch.int64, -9223372036854775808, 9223372036854775807),
]  # fmt: skip
FULL = [
    ((64, 500), None, torch.bfloat16),
    ((), None, torch.int64, -9223372036854775808, 9223372036854775807),
    ((), None, torch.int64, -9223372036854775808, 9223372036854775807),
]  # fmt: skip
TOLERANCE = {"factor": 2.0, "elements": 4096, "float32": 2.0, "float64": 16.0, "narrow": 2.0}
