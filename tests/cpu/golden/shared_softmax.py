# SPDX-License-Identifier: 0BSD
"""5 eager launches as one cooperative kernel.

Replaces: max.dim, sub.Tensor, exp.default, sum.dim_IntList, div.Tensor.
Source: generated.py:21, generated.py:22, generated.py:23.
HBM: 211840 B unfused, 52800 B here (4.01 times fewer) at the sizes it was made for.
"""

import torch
import triton
import triton.language as tl

from . import fused_runtime as host
from .fused_device import max_nan, publish, published, ticket, wide, widened_1, widened_2


@triton.jit
def shared_softmax_kernel(
    args_0_ptr, softmax_out_ptr, workspace_ptr, parts, cols, COLS: tl.constexpr,
    PEERS: tl.constexpr, DIVISOR: tl.constexpr, FAR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # One program has a part of a row, and takes what the others found from them.
    cols = cols // DIVISOR * DIVISOR  # seen to hold whole vectors
    program = wide(ticket(workspace_ptr, STEP < 0), FAR)
    row = program // parts
    part = program % parts
    col = part * COLS + wide(tl.arange(0, COLS), FAR)
    col_mask = col < cols
    args_0 = tl.load(args_0_ptr + row * cols + col, mask=col_mask, other=0.0)
    args_0_wide = args_0.to(tl.float32)
    m_max = tl.reduce(tl.where(col_mask, args_0_wide, float("-inf")), 0, max_nan)
    args_0_wide_1 = widened_1(args_0, STEP < 0)
    sub_part = args_0_wide_1 - m_max
    e_part = tl.exp2(sub_part * 1.44269504)
    sum_1_sum = tl.sum(tl.where(col_mask, e_part, 0.0), axis=0)
    words = workspace_ptr + 16 + row.to(tl.int64) * parts
    if STEP <= 0:
        publish(words + part, m_max, sum_1_sum, STEP < 0)
    if STEP != 0:
        peer = tl.arange(0, PEERS)
        peer_mask = peer < parts
        m_parts, sum_1_parts = published(words + peer, peer_mask, STEP < 0)
        m_max_1 = tl.reduce(tl.where(peer_mask, m_parts, float("-inf")), 0, max_nan)
        value_part = tl.where(
            m_parts == float("-inf"), 0.0, sum_1_parts * tl.exp2((m_parts - m_max_1) * 1.44269504)
        )
        value_sum = tl.sum(tl.where(peer_mask, value_part, 0.0), axis=0)
        value_part_1 = tl.where(m_max_1 == float("-inf"), float("nan"), value_sum)
        args_0_wide_2 = widened_2(args_0, STEP < 0)
        sub_part_1 = args_0_wide_2 - m_max_1
        e_part_1 = tl.exp2(sub_part_1 * 1.44269504)
        softmax_part = e_part_1 * (1.0 / value_part_1)
        tl.store(softmax_out_ptr + row * cols + col, softmax_part, mask=col_mask)


def reference(args_0):
    """What eager launches."""
    m = torch.ops.aten.max.dim(args_0, -1, True)
    sub = torch.ops.aten.sub.Tensor(args_0, m[0])
    e = torch.ops.aten.exp.default(sub)
    sum_1 = torch.ops.aten.sum.dim_IntList(e, [-1], True)
    softmax = torch.ops.aten.div.Tensor(e, sum_1)
    return softmax


@host.launcher(reference, results=1)
def shared_softmax(args_0):
    n0, n1 = host.ranked(args_0.shape, 2)
    host.takes("args_0", args_0, torch.bfloat16, (n0, n1), (n1, 1))
    host.not_empty(n0 * n1)
    parts = host.cdiv(n1, 64)
    softmax_out = host.empty((n0, n1), (n1, 1), torch.bfloat16, args_0)
    far = host.beyond_int32((softmax_out, args_0))
    # Words of this call alone, 0 until they are left; a captured graph zeroes them anew.
    workspace = torch.zeros(16 + n0 * parts, dtype=torch.int64, device=args_0.device)
    # Programs wait where there surely is room for all of a row, and for other such kernels;
    # elsewhere one launch leaves the words for the next.
    together = 2 * parts <= host.resident(args_0.device, 1)
    steps = [
        host.launch(
            shared_softmax_kernel, (n0 * parts,), (args_0, softmax_out, workspace), (parts, n1),
            COLS=64, PEERS=host.power_of_two(parts), DIVISOR=host.divisor(n1), FAR=far, STEP=step,
            num_warps=1,
        ) for step in ((-1,) if together else (0, 1))
    ]  # fmt: skip
    return (softmax_out,), steps, (), (workspace,)


# For fused_runtime.py, by input: shape, strides (None: dense), dtype, range of integers.
SMALL = [((7, 65), None, torch.bfloat16)]
FULL = [((40, 330), None, torch.bfloat16)]
TOLERANCE = {"factor": 2.0, "elements": 4096, "float32": 2.0, "float64": 16.0, "narrow": 2.0}
