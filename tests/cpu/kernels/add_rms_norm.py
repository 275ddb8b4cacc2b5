"""h = x + r and its RMSNorm, bf16, both outputs: h is rounded to bf16 before the norm, as eager."""

import os
import warnings

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

fallbacks = 0
EPS = 1e-06


@triton.jit
def add_rms_norm_kernel(
    x_ptr, r_ptr, g_ptr, h_ptr, y_ptr,
    rows, columns, x_stride, r_stride, h_stride, y_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + row.to(tl.int64) * r_stride + col, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    h = (x + r).to(tl.bfloat16).to(tl.float32)
    tl.store(h_ptr + row.to(tl.int64) * h_stride + col, h, mask=inside)
    v = tl.div_rn(tl.sum(tl.where(inside, h * h, 0.0), axis=1, keep_dims=True), columns * 1.0)
    y = h * libdevice.rsqrt(v + 1e-06) * g
    tl.store(y_ptr + row.to(tl.int64) * y_stride + col, y, mask=inside)


def serves(x, r, g):
    on_device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    flat = x.dim() == 2 and x.stride(1) == r.stride(1) == g.stride(0) == 1
    return on_device and flat and all(t.dtype == torch.bfloat16 for t in (x, r, g))


def reference(x, r, g):
    h = torch.ops.aten.add.Tensor(x, r)
    f = torch.ops.aten._to_copy.default(h, dtype=torch.float32)
    v = torch.ops.aten.mean.dim(torch.ops.aten.mul.Tensor(f, f), [1], True)
    n = torch.ops.aten.mul.Tensor(
        f, torch.ops.aten.rsqrt.default(torch.ops.aten.add.Scalar(v, 1e-06))
    )
    b = torch.ops.aten._to_copy.default(n, dtype=torch.bfloat16)
    return h, torch.ops.aten.mul.Tensor(b, g)


def add_rms_norm(x, r, g):
    if not serves(x, r, g):
        return fall_back(x, r, g)
    rows, columns = x.shape
    h = torch.empty_strided((rows, columns), (columns, 1), dtype=torch.bfloat16, device=x.device)
    y = torch.empty_strided((rows, columns), (columns, 1), dtype=torch.bfloat16, device=x.device)
    ROWS, COLS = 1, triton.next_power_of_2(columns)
    with torch.cuda.device_of(x):
        add_rms_norm_kernel[(triton.cdiv(rows, ROWS),)](
            x, r, g, h, y,
            rows, columns, x.stride(0), r.stride(0), h.stride(0), y.stride(0),
            ROWS, COLS, num_warps=4,
        )  # fmt: skip
    return h, y


def fall_back(*tensors):
    global fallbacks
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError("add_rms_norm does not serve these inputs")
    if not fallbacks:
        warnings.warn("add_rms_norm: falling back to the reference", stacklevel=3)
    fallbacks += 1
    return reference(*tensors)
