"""2 eager launches as one cooperative kernel.

Replaces: native_group_norm.default, relu.default.
Source: generated.py:56.
HBM: 205472 B unfused, 102432 B here (2.01 times fewer) at the sizes it was made for.
Computes in float32 for narrower floats; rounds at the stores.
Deterministic: bitwise the same from run to run.
"""

import os
import warnings

import torch
import triton
import triton.language as tl


@triton.jit
def ticket(workspace_ptr, WAIT: tl.constexpr):
    # The order in which programs begin, for that of the grid is not promised. So the programs of
    # every row but the last begun are all resident or done, and nobody waits for one without room.
    if WAIT:
        number = tl.atomic_add(workspace_ptr, 1, sem="relaxed").to(tl.int32)
    else:
        number = tl.program_id(0)
    return number


@triton.jit
def publish(word_ptr, lower, upper, WAIT: tl.constexpr):
    # Two float32 as one word that is never 0: inverted, and NaN is spelled one way.
    lower = tl.where(lower == lower, lower, float("nan")).to(tl.int32, bitcast=True)
    upper = upper.to(tl.int32, bitcast=True)
    word = ~((upper.to(tl.int64) << 32) | (lower.to(tl.int64) & 0xFFFFFFFF))
    if WAIT:
        tl.atomic_xchg(word_ptr, word, sem="relaxed")
    else:
        tl.store(word_ptr, word)


@triton.jit
def published(words_ptr, mask, WAIT: tl.constexpr):
    # The words of all parts of a row, as soon as they are there.
    if WAIT:
        word = tl.inline_asm_elementwise(
            """
            {
                .reg .pred again;
                mov.u64 $0, 0;
                setp.eq.u32 again, $2, 0;
                @again bra done;
                wait: ld.relaxed.gpu.global.u64 $0, [$1];
                setp.eq.u64 again, $0, 0;
                @again bra wait;
                done:
            }
            """,
            "=&l,l,r",
            [words_ptr.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(words_ptr, mask=mask, other=0)
    lower = (~word).to(tl.int32).to(tl.float32, bitcast=True)
    upper = (~word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return lower, upper


@triton.jit
def load_by_place(each_ptr, first_ptr, following_ptr, in_first, mask, NEAR: tl.constexpr):
    # What all lanes at one place share.
    if NEAR:
        value = tl.where(in_first, tl.load(first_ptr), tl.load(following_ptr))
    else:
        value = tl.load(each_ptr, mask=mask, other=0)
    return value


@triton.jit
def place_of(col, first, following, size, NEAR: tl.constexpr):
    # Which run of `size` columns each lane is in: one of two, where a run is as long as all lanes.
    if NEAR:
        place = tl.where(col < (first + 1) * size, first, following)
    else:
        place = col // size
    return place


@triton.jit
def shared_group_norm_kernel(
    args_0_ptr,
    args_1_ptr,
    args_2_ptr,
    relu_out_ptr,
    workspace_ptr,
    parts,
    cols,
    elements,
    col_0_size,
    col_1_size,
    args_0_stride_row_0,
    args_0_stride_1,
    COLS: tl.constexpr,
    PEERS: tl.constexpr,
    WHOLE: tl.constexpr,
    NEAR: tl.constexpr,
    STEP: tl.constexpr,
):
    # One program has a part of a row, and takes what the others found from them.
    program = ticket(workspace_ptr, STEP < 0)
    row = program // parts
    part = program % parts
    col = part * COLS + tl.arange(0, COLS)
    col_mask = (col < cols) | WHOLE
    row_1 = row % elements
    row_0 = row // elements
    args_0 = tl.load(args_0_ptr + row * cols + col, mask=col_mask, other=0.0)
    args_0_1 = tl.load(args_0_ptr + row_0 * args_0_stride_row_0 + (row_1 * 2) * args_0_stride_1)
    value_part = args_0 - args_0_1
    group_norm_sum = tl.sum(tl.where(col_mask, value_part, 0.0), axis=0)
    value_part_1 = args_0 - args_0_1
    value_part_2 = tl.div_rn(group_norm_sum, tl.minimum(cols - part * COLS, COLS) * 1.0)
    value_part_3 = value_part_1 - value_part_2
    value_part_4 = value_part_3 * value_part_3
    group_norm_sum_1 = tl.sum(tl.where(col_mask, value_part_4, 0.0), axis=0)
    words = workspace_ptr + 16 + row.to(tl.int64) * parts
    if STEP <= 0:
        publish(words + part, group_norm_sum, group_norm_sum_1, STEP < 0)
    if STEP != 0:
        peer = tl.arange(0, PEERS)
        peer_mask = peer < parts
        group_norm_parts, group_norm_parts_1 = published(words + peer, peer_mask, STEP < 0)
        value_part_5 = group_norm_parts.to(tl.float64)
        args_0_2 = tl.load(args_0_ptr + row_0 * args_0_stride_row_0 + (row_1 * 2) * args_0_stride_1)
        value_sum = tl.sum(tl.where(peer_mask, value_part_5, 0.0), axis=0)
        value_part_6 = tl.full((), cols * 1.0, tl.float64)
        value_part_7 = tl.minimum(cols - (peer * 32), 32).to(tl.float64)
        value_part_8 = value_sum / value_part_6
        value_part_9 = (value_part_5 / value_part_7) - value_part_8
        value_part_10 = group_norm_parts_1.to(tl.float64) + (
            value_part_7 * (value_part_9 * value_part_9)
        )
        value_sum_1 = tl.sum(tl.where(peer_mask, value_part_10, 0.0), axis=0)
        value_part_11 = value_sum_1.to(tl.float32)
        value_part_12 = args_0_2.to(tl.float64) + value_part_8
        value_part_13 = (value_part_12 * value_part_6).to(tl.float32)
        value_part_14 = value_part_12 - (value_part_13.to(tl.float64) / value_part_6)
        value_part_15 = (value_part_14 * value_part_6).to(tl.float32)
        group_norm_part = tl.div_rn(value_part_13, cols * 1.0)
        group_norm_part_1 = tl.div_rn(value_part_15, cols * 1.0)
        group_norm_part_2 = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(value_part_11, cols * 1.0) + 1e-05))
        first = part * COLS // col_1_size
        following = tl.minimum(first + 1, col_0_size - 1)
        place = place_of(col, first, following, col_1_size, NEAR)
        group_norm_part_3 = ((args_0 - group_norm_part) - group_norm_part_1) * group_norm_part_2
        args_1 = load_by_place(
            args_1_ptr + row_1 * col_0_size + place,
            args_1_ptr + row_1 * col_0_size + first,
            args_1_ptr + row_1 * col_0_size + following,
            place == first,
            col_mask,
            NEAR,
        )
        args_2 = load_by_place(
            args_2_ptr + row_1 * col_0_size + place,
            args_2_ptr + row_1 * col_0_size + first,
            args_2_ptr + row_1 * col_0_size + following,
            place == first,
            col_mask,
            NEAR,
        )
        group_norm_part_4 = (group_norm_part_3 * args_1) + args_2
        relu_part = tl.maximum(group_norm_part_4, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(relu_out_ptr + row * cols + col, relu_part, mask=col_mask)


def shared_group_norm(args_0, args_1, args_2):
    n0 = args_0.shape[0]
    n1 = args_0.shape[2]
    problem = (
        serves("args_0", args_0, torch.float32, (n0, 4, n1), (n1 * 4, n1, 1))
        or serves("args_1", args_1, torch.float32, (4,), (1,))
        or serves("args_2", args_2, torch.float32, (4,), (1,))
        or within_reach(n0 * n1 * 4)
    )
    if problem:
        return fall_back(problem, args_0, args_1, args_2)
    if not n0 * n1 * 4:
        return reference(args_0, args_1, args_2)
    parts = cdiv(n1 * 2, 32)
    relu_out = torch.empty_strided(
        (n0, 4, n1),
        (n1 * 4, n1, 1),
        dtype=torch.float32,
        device=args_0.device,
    )
    # Words of this call alone, 0 until they are left; a captured graph zeroes them anew.
    workspace = torch.zeros(16 + n0 * 2 * parts, dtype=torch.int64, device=args_0.device)
    # Programs wait where there surely is room for all of a row, and for other such kernels;
    # elsewhere one launch leaves the words for the next.
    together = 2 * parts <= resident(args_0.device, 2)
    for step in (-1,) if together else (0, 1):
        launch(
            shared_group_norm_kernel,
            (n0 * 2 * parts,),
            args_0,
            args_1,
            args_2,
            relu_out,
            workspace,
            parts,
            n1 * 2,
            2,
            2,
            n1,
            args_0.stride(0),
            args_0.stride(1),
            COLS=32,
            PEERS=power_of_two(parts),
            WHOLE=n1 * 2 % 32 == 0,
            NEAR=n1 >= 32,
            STEP=step,
            num_warps=2,
            enable_fp_fusion=True,
        )
    return relu_out


def reference(args_0, args_1, args_2):
    """What eager launches."""
    group_norm = torch.ops.aten.native_group_norm.default(
        args_0,
        args_1,
        args_2,
        args_0.shape[0],
        args_0.shape[1],
        args_0.shape[2:].numel(),
        2,
        1e-05,
    )
    relu = torch.ops.aten.relu.default(group_norm[0])
    return relu


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
        raise RuntimeError(f"shared_group_norm: {problem}")
    if not fallbacks:
        warnings.warn(f"shared_group_norm: {problem}; running eager instead", stacklevel=3)
    fallbacks += 1
    with torch.autocast(tensors[0].device.type, enabled=False):  # the casts are made already
        return reference(*tensors)


def resident(device, warps):
    """Programs that the device holds at once at the least; 0 where they run one by one."""
    if device.type != "cuda":
        return 0
    has, threads = torch.cuda.get_device_properties(device), 32 * warps
    fit = min(
        has.regs_per_multiprocessor // (256 * threads),
        has.max_threads_per_multi_processor // threads,
    )
    return has.multi_processor_count * max(fit, 1)
