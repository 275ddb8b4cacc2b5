"""LayerNorm by hand, fp32: mean, centred, variance, scale and shift, the row kept on chip."""

import os
import warnings

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

fallbacks = 0


@triton.jit
def layer_norm_kernel(
    x_ptr, g_ptr, b_ptr, y_ptr, rows, columns, x_stride, y_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < columns)
    size = columns * 1.0
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=inside, other=0.0)
    g = tl.load(g_ptr + col, mask=col < columns, other=0.0)
    b = tl.load(b_ptr + col, mask=col < columns, other=0.0)
    mu = tl.div_rn(tl.sum(tl.where(inside, x, 0.0), axis=1, keep_dims=True), size)
    c = x - mu
    v = tl.div_rn(tl.sum(tl.where(inside, c * c, 0.0), axis=1, keep_dims=True), size)
    y = c * libdevice.rsqrt(v + 1e-05) * g + b
    tl.store(y_ptr + row.to(tl.int64) * y_stride + col, y, mask=inside)


def serves(x, g, b):
    on_device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    flat = x.dim() == 2 and x.stride(1) == g.stride(0) == b.stride(0) == 1
    return on_device and flat and all(t.dtype == torch.float32 for t in (x, g, b))


def reference(x, g, b):
    c = torch.ops.aten.sub.Tensor(x, torch.ops.aten.mean.dim(x, [-1], True))
    v = torch.ops.aten.mean.dim(torch.ops.aten.mul.Tensor(c, c), [-1], True)
    n = torch.ops.aten.mul.Tensor(
        c, torch.ops.aten.rsqrt.default(torch.ops.aten.add.Scalar(v, 1e-05))
    )
    return torch.ops.aten.add.Tensor(torch.ops.aten.mul.Tensor(n, g), b)


def layer_norm(x, g, b):
    if not serves(x, g, b):
        return fall_back(x, g, b)
    rows, columns = x.shape
    y = torch.empty_strided((rows, columns), (columns, 1), dtype=torch.float32, device=x.device)
    ROWS, COLS = 4, triton.next_power_of_2(columns)
    with torch.cuda.device_of(x):
        layer_norm_kernel[(triton.cdiv(rows, ROWS),)](
            x, g, b, y, rows, columns, x.stride(0), y.stride(0), ROWS, COLS, num_warps=4
        )
    return y


def fall_back(*tensors):
    global fallbacks
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError("layer_norm does not serve these inputs")
    if not fallbacks:
        warnings.warn("layer_norm: falling back to the reference", stacklevel=3)
    fallbacks += 1
    return reference(*tensors)
