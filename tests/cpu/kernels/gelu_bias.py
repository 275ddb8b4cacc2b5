"""gelu(x + b) by hand with tanh, fp32, x transposed in its outer dimensions, b broadcast."""

import os
import warnings

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

fallbacks = 0


@triton.jit
def gelu_bias_kernel(
    x_ptr, b_ptr, y_ptr, count, size_1, size_2,
    x_stride_0, x_stride_1, b_stride_2, y_stride_0, y_stride_1, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    i_2 = index % size_2
    i_1 = (index // size_2) % size_1
    i_0 = (index // size_2 // size_1).to(tl.int64)
    x = tl.load(x_ptr + i_0 * x_stride_0 + i_1 * x_stride_1 + i_2, mask=inside, other=0.0)
    b = tl.load(b_ptr + i_2 * b_stride_2, mask=inside, other=0.0)
    h = x + b
    t = libdevice.tanh(0.79788456 * (h + 0.044715 * h * h * h))
    y = 0.5 * h * (1.0 + t)
    tl.store(y_ptr + i_0 * y_stride_0 + i_1 * y_stride_1 + i_2, y, mask=inside)


def serves(x, b):
    on_device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    same = x.dim() == 3 and x.shape == b.shape and x.stride(2) == 1
    broadcast = b.dim() == 3 and b.stride(0) == b.stride(1) == 0
    return on_device and same and broadcast and x.dtype == b.dtype == torch.float32


def reference(x, b):
    mul, add = torch.ops.aten.mul, torch.ops.aten.add
    h = add.Tensor(x, b)
    cube = mul.Tensor(mul.Tensor(mul.Scalar(h, 0.044715), h), h)
    t = torch.ops.aten.tanh.default(mul.Scalar(add.Tensor(h, cube), 0.79788456))
    return mul.Tensor(mul.Scalar(h, 0.5), add.Scalar(t, 1.0))


def gelu_bias(x, b):
    if not serves(x, b):
        return fall_back(x, b)
    shape, stride = tuple(x.shape), tuple(x.stride())
    y = torch.empty_strided(shape, stride, dtype=torch.float32, device=x.device)
    count, BLOCK = x.numel(), 512
    with torch.cuda.device_of(x):
        gelu_bias_kernel[(triton.cdiv(count, BLOCK),)](
            x, b, y, count, shape[1], shape[2],
            x.stride(0), x.stride(1), b.stride(2), y.stride(0), y.stride(1), BLOCK, num_warps=4,
        )  # fmt: skip
    return y


def fall_back(*tensors):
    global fallbacks
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError("gelu_bias does not serve these inputs")
    if not fallbacks:
        warnings.warn("gelu_bias: falling back to the reference", stacklevel=3)
    fallbacks += 1
    return reference(*tensors)
