"""2 eager launches as one flat kernel.

Replaces: silu.default, mul.Tensor.
Source: generated.py:40.
HBM: 768000 B unfused, 460800 B here (1.67 times fewer) at the sizes it was made for.
Computes in float32 for narrower floats; rounds at the stores.
Deterministic: bitwise the same from run to run.
"""

import os
import warnings

import torch
import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    chunk_1_ptr,
    chunk_1_1_ptr,
    mul_out_ptr,
    count,
    n_1_size,
    chunk_1_stride_n_0,
    chunk_1_1_stride_n_0,
    BLOCK: tl.constexpr,
):
    # One program, one block of consecutive elements of the result.
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    n_0 = index // n_1_size
    n_1 = index % n_1_size
    chunk_1 = tl.load(
        chunk_1_ptr + n_0 * chunk_1_stride_n_0 + n_1,
        mask=mask,
        other=0.0,
    ).to(tl.float32)
    silu = chunk_1 * tl.sigmoid(chunk_1)
    chunk_1_1 = tl.load(
        chunk_1_1_ptr + n_0 * chunk_1_1_stride_n_0 + n_1,
        mask=mask,
        other=0.0,
    ).to(tl.float32)
    mul = silu * chunk_1_1
    tl.store(mul_out_ptr + index, mul, mask=mask)


def swiglu(chunk_1, chunk_1_1):
    n0 = chunk_1.shape[0]
    n1 = chunk_1.shape[1]
    n2 = chunk_1.shape[2]
    problem = (
        serves(
            "chunk_1",
            chunk_1,
            torch.bfloat16,
            (n0, n1, n2),
            (chunk_1.stride(1) * n1, chunk_1.stride(1), 1),
        )
        or serves(
            "chunk_1_1",
            chunk_1_1,
            torch.bfloat16,
            (n0, n1, n2),
            (chunk_1_1.stride(1) * n1, chunk_1_1.stride(1), 1),
        )
        or within_reach(n0 * n1 * n2)
    )
    if problem:
        return fall_back(problem, chunk_1, chunk_1_1)
    if not n0 * n1 * n2:
        return reference(chunk_1, chunk_1_1)
    mul_out = torch.empty_strided(
        (n0, n1, n2),
        (n1 * n2, n2, 1),
        dtype=torch.bfloat16,
        device=chunk_1.device,
    )
    launch(
        swiglu_kernel,
        (cdiv(n0 * n1 * n2, 1024),),
        chunk_1,
        chunk_1_1,
        mul_out,
        n0 * n1 * n2,
        n2,
        chunk_1.stride(1),
        chunk_1_1.stride(1),
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return mul_out


def reference(chunk_1, chunk_1_1):
    """What eager launches."""
    silu = torch.ops.aten.silu.default(chunk_1)
    mul = torch.ops.aten.mul.Tensor(silu, chunk_1_1)
    return mul


def within_reach(elements):
    """Why 32-bit offsets do not reach every element; None when they do."""
    return None if elements < 2**31 else f"{elements} elements are beyond 32-bit offsets"


def cdiv(count, size):
    """How many blocks of a size hold so many."""
    return -(-count // size)


launched = {}


def launch(kernel, grid, *arguments, **constants):
    """`kernel[grid](...)`. What Triton compiled for such arguments before is launched directly."""
    if torch.compiler.is_compiling() or torch.version.hip:
        kernel[grid](*arguments, **constants)
        return
    given = [a if isinstance(a, int) else a.data_ptr() % 16 for a in arguments]
    key = id(kernel), arguments[0].get_device(), grid, *given, *constants.values()
    with torch.cuda.device_of(arguments[0]):
        if key in launched:
            run, values = launched[key]
            run(*arguments, *values)
            return
        compiled = kernel[grid](*arguments, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(launched) == 4096:  # sizes keep changing
            launched.clear()
        values = [constants[name] for name in kernel.arg_names if name in constants]
        launched[key] = compiled[(*grid, 1, 1)], values


fallbacks = 0


def serves(name, tensor, dtype, shape, stride):
    """Why the kernel cannot take this tensor; None when it can."""
    if (
        tensor.is_cuda
        and tensor.dtype == dtype
        and tensor.shape == shape
        and tensor.stride() == stride
        and not (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return None
    if not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"{name} is on {tensor.device}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return f"{name} requires a gradient"
    if tensor.dtype != dtype:
        return f"{name} has dtype {tensor.dtype}, not {dtype}"
    if tuple(tensor.shape) != tuple(shape):
        return f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}"
    steps = zip(shape, tensor.stride(), stride, strict=True)
    if tensor.numel() and any(n > 1 and have != want for n, have, want in steps):
        return f"{name} has strides {tensor.stride()}, not {tuple(stride)}"
    return None


def fall_back(problem, *tensors):
    """Run the reference instead, once with a warning; an error in strict mode."""
    global fallbacks
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError(f"swiglu: {problem}")
    if not fallbacks:
        warnings.warn(f"swiglu: {problem}; running eager instead", stacklevel=3)
    fallbacks += 1
    with torch.autocast(tensors[0].device.type, enabled=False):  # the casts are made already
        return reference(*tensors)
