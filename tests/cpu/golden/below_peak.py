"""3 eager launches as one row kernel.

Replaces: amax.default, mul.Tensor, sub.Tensor.
Source: generated.py:60.
HBM: 63040 B unfused, 41600 B here (1.52 times fewer) at the sizes it was made for.
Computes in float32 for narrower floats; rounds at the stores.
Deterministic: bitwise the same from run to run.
"""

import os
import warnings

import torch
import triton
import triton.language as tl


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def below_peak_kernel(
    args_0_ptr,
    sub_out_ptr,
    cols,
    rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    # One program holds several whole rows on chip.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    args_0 = tl.load(args_0_ptr + row * cols + col, mask=mask, other=0.0)
    amax = tl.reduce(tl.where(col_mask, args_0, float("-inf")), 1, max_nan, keep_dims=True)
    mul = amax * 0.5
    sub = args_0 - mul
    tl.store(sub_out_ptr + row * cols + col, sub, mask=mask)


def below_peak(args_0):
    n0 = args_0.shape[0]
    n1 = args_0.shape[1]
    problem = serves("args_0", args_0, torch.float32, (n0, n1), (n1, 1)) or within_reach(n0 * n1)
    if problem:
        return fall_back(problem, args_0)
    if not n0 * n1:
        return reference(args_0)
    sub_out = torch.empty_strided((n0, n1), (n1, 1), dtype=torch.float32, device=args_0.device)
    launch(
        below_peak_kernel,
        (cdiv(n0, 8),),
        args_0,
        sub_out,
        n1,
        n0,
        ROWS=8,
        COLS=power_of_two(n1),
        num_warps=2,
        enable_fp_fusion=True,
    )
    return sub_out


def reference(args_0):
    """What eager launches."""
    amax = torch.ops.aten.amax.default(args_0, [-1], True)
    mul = torch.ops.aten.mul.Tensor(amax, 0.5)
    sub = torch.ops.aten.sub.Tensor(args_0, mul)
    return sub


def within_reach(elements):
    """Why 32-bit offsets do not reach every element; None when they do."""
    return None if elements < 2**31 else f"{elements} elements are beyond 32-bit offsets"


def cdiv(count, size):
    """How many blocks of a size hold so many."""
    return -(-count // size)


def power_of_two(count):
    """The least one that is as large."""
    return 1 << (count - 1).bit_length()


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
        raise RuntimeError(f"below_peak: {problem}")
    if not fallbacks:
        warnings.warn(f"below_peak: {problem}; running eager instead", stacklevel=3)
    fallbacks += 1
    with torch.autocast(tensors[0].device.type, enabled=False):  # the casts are made already
        return reference(*tensors)
