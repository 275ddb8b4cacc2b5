"""Softmax of x / 8 where `k` holds, fp16, and how many elements of each row it holds for, int64."""

import os
import warnings

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

fallbacks = 0


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def masked_softmax_kernel(
    x_ptr, k_ptr, y_ptr, n_ptr, rows, columns, x_stride, k_stride, y_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row.to(tl.int64) * k_stride + col, mask=inside, other=0) != 0
    z = tl.where(k, x * 0.125, -10000.0)
    m = tl.reduce(tl.where(inside, z, float("-inf")), 1, _max_nan, keep_dims=True)
    e = libdevice.exp(z - m)
    s = tl.sum(tl.where(inside, e, 0.0), axis=1, keep_dims=True)
    n = tl.sum(tl.where(inside, k.to(tl.int64), 0), axis=1, keep_dims=True)
    tl.store(y_ptr + row.to(tl.int64) * y_stride + col, tl.div_rn(e, s), mask=inside)
    tl.store(n_ptr + row, n, mask=row < rows)


def serves(x, k):
    on_device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    same = x.dim() == 2 and x.shape == k.shape and x.stride(1) == k.stride(1) == 1
    return on_device and same and x.dtype == torch.float16 and k.dtype == torch.bool


def reference(x, k):
    z = torch.ops.aten.masked_fill.Scalar(
        torch.ops.aten.mul.Scalar(x, 0.125), torch.ops.aten.logical_not.default(k), -10000.0
    )
    return torch.ops.aten._softmax.default(z, 1, False), torch.ops.aten.sum.dim_IntList(k, [1])


def masked_softmax(x, k):
    if not serves(x, k):
        return fall_back(x, k)
    rows, columns = x.shape
    y = torch.empty_strided((rows, columns), (columns, 1), dtype=torch.float16, device=x.device)
    n = torch.empty_strided((rows,), (1,), dtype=torch.int64, device=x.device)
    ROWS, COLS = 2, triton.next_power_of_2(columns)
    with torch.cuda.device_of(x):
        masked_softmax_kernel[(triton.cdiv(rows, ROWS),)](
            x, k, y, n, rows, columns, x.stride(0), k.stride(0), y.stride(0), ROWS, COLS,
            num_warps=4,
        )  # fmt: skip
    return y, n


def fall_back(*tensors):
    global fallbacks
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError("masked_softmax does not serve these inputs")
    if not fallbacks:
        warnings.warn("masked_softmax: falling back to the reference", stacklevel=3)
    fallbacks += 1
    return reference(*tensors)
