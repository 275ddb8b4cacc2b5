# SPDX-License-Identifier: 0BSD
"""2 eager launches as 2 kernels (carried).

Replaces: _log_softmax.default, nll_loss_forward.default.
Source: regions.py:76.
HBM: 25808 B unfused, 13284 B here (1.94 times fewer) at the sizes it was made for.
Computes in float32 for narrower floats; rounds at the stores.
Deterministic: bitwise the same from run to run.
"""

import argparse
import math
import os
import sys
import warnings

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.language.extra import libdevice


@triton.jit
def wide(place, FAR: tl.constexpr):
    # What offsets are made from, in 64 bits where some of them are beyond 32.
    if FAR:
        place = place + tl.full((), 0, tl.int64)
    return place


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def mean_loss_parts_kernel(
    args_1_ptr,
    args_0_ptr,
    cross_entropy_loss_nll_loss_forward_parts_ptr,
    cross_entropy_loss_nll_loss_forward_parts_1_ptr,
    cols,
    rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIVISOR: tl.constexpr,
    FAR: tl.constexpr,
):
    # One program walks its share of the rows.
    cols = cols // DIVISOR * DIVISOR  # seen to hold whole vectors
    part = wide(tl.program_id(0), FAR)
    col = wide(tl.arange(0, COLS), FAR)
    col_mask = col < cols
    cross_entropy_loss_nll_loss_forward_sums = tl.full([ROWS, 1], 0.0, tl.float32)
    cross_entropy_loss_nll_loss_forward_sums_1 = tl.full([ROWS, 1], 0.0, tl.float32)
    for start in tl.range(part * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        row_mask = row < rows
        mask = row_mask & col_mask
        args_0 = tl.load(args_0_ptr + row * cols + col, mask=mask, other=0.0)
        cross_entropy_loss_log_softmax_max = tl.reduce(
            tl.where(col_mask, args_0, float("-inf")),
            1,
            max_nan,
            keep_dims=True,
        )
        cross_entropy_loss_log_softmax_sum = tl.sum(
            tl.where(
                col_mask,
                tl.exp2((args_0 - cross_entropy_loss_log_softmax_max) * 1.44269504),
                0.0,
            ),
            axis=1,
            keep_dims=True,
        )
        args_1 = tl.load(args_1_ptr + row, mask=row_mask, other=0)
        cross_entropy_loss_nll_loss_forward_part = args_1 != -100
        args_0_1 = tl.load(
            args_0_ptr + row * cols + args_1,
            mask=row_mask & cross_entropy_loss_nll_loss_forward_part,
            other=0.0,
        )
        cross_entropy_loss_log_softmax_part = (
            args_0_1
            - cross_entropy_loss_log_softmax_max
            - libdevice.log(cross_entropy_loss_log_softmax_sum)
        )
        cross_entropy_loss_nll_loss_forward_part_1 = tl.where(
            cross_entropy_loss_nll_loss_forward_part,
            -cross_entropy_loss_log_softmax_part,
            0.0,
        )
        cross_entropy_loss_nll_loss_forward_part_2 = tl.where(
            cross_entropy_loss_nll_loss_forward_part,
            1.0,
            0.0,
        )
        cross_entropy_loss_nll_loss_forward_sums += tl.where(
            row_mask,
            cross_entropy_loss_nll_loss_forward_part_1,
            0.0,
        )
        cross_entropy_loss_nll_loss_forward_sums_1 += tl.where(
            row_mask,
            cross_entropy_loss_nll_loss_forward_part_2,
            0.0,
        )
    tl.store(
        cross_entropy_loss_nll_loss_forward_parts_ptr + part,
        tl.sum(cross_entropy_loss_nll_loss_forward_sums, axis=None),
    )
    tl.store(
        cross_entropy_loss_nll_loss_forward_parts_1_ptr + part,
        tl.sum(cross_entropy_loss_nll_loss_forward_sums_1, axis=None),
    )


@triton.jit
def mean_loss_results_kernel(
    cross_entropy_loss_nll_loss_forward_parts_ptr,
    cross_entropy_loss_nll_loss_forward_parts_1_ptr,
    cross_entropy_loss_nll_loss_forward_out_ptr,
    cols,
    COLS: tl.constexpr,
    FAR: tl.constexpr,
):
    # One program holds one whole row on chip.
    col = wide(tl.arange(0, COLS), FAR)
    col_mask = col < cols
    cross_entropy_loss_nll_loss_forward_parts = tl.load(
        cross_entropy_loss_nll_loss_forward_parts_ptr + col,
        mask=col_mask,
        other=0.0,
    )
    value_part = cross_entropy_loss_nll_loss_forward_parts.to(tl.float64)
    cross_entropy_loss_nll_loss_forward_sum = tl.sum(value_part, axis=0)
    value_part_1 = cross_entropy_loss_nll_loss_forward_sum.to(tl.float32)
    cross_entropy_loss_nll_loss_forward_parts_1 = tl.load(
        cross_entropy_loss_nll_loss_forward_parts_1_ptr + col,
        mask=col_mask,
        other=0.0,
    )
    value_part_2 = cross_entropy_loss_nll_loss_forward_parts_1.to(tl.float64)
    cross_entropy_loss_nll_loss_forward_sum_1 = tl.sum(value_part_2, axis=0)
    value_part_3 = cross_entropy_loss_nll_loss_forward_sum_1.to(tl.float32)
    cross_entropy_loss_nll_loss_forward_part = tl.div_rn(value_part_1, value_part_3)
    tl.store(cross_entropy_loss_nll_loss_forward_out_ptr, cross_entropy_loss_nll_loss_forward_part)


def mean_loss(args_0, args_1):
    layout, plan = plan_of(mean_loss_parts_kernel, args_0, args_1)
    if plan is not None:
        return do_again(plan, args_0, args_1)
    n1, _ = ranked(args_0.shape, 2)
    args_0_strides = ranked(args_0.stride(), 2)
    problem = (
        serves("args_1", args_1, torch.int64, (n1,), (1,))
        or serves("args_0", args_0, torch.float32, (n1, 20), (args_0_strides[0], 1))
        or serves("args_0", args_0, torch.float32, (n1, 20), (20, 1))
    )
    if problem:
        return fall_back(problem, args_0, args_1)
    if not n1 * 20:
        return reference(args_0, args_1)
    parts = min(cdiv(n1, 32), 4224)
    cross_entropy_loss_nll_loss_forward_parts = torch.empty_strided(
        (parts,),
        (1,),
        dtype=torch.float32,
        device=args_0.device,
    )
    cross_entropy_loss_nll_loss_forward_parts_1 = torch.empty_strided(
        (parts,),
        (1,),
        dtype=torch.float32,
        device=args_0.device,
    )
    cross_entropy_loss_nll_loss_forward_out = torch.empty_strided(
        (),
        (),
        dtype=torch.float32,
        device=args_0.device,
    )
    far = beyond_int32(
        (
            args_1,
            args_0,
            cross_entropy_loss_nll_loss_forward_parts,
            cross_entropy_loss_nll_loss_forward_parts_1,
            cross_entropy_loss_nll_loss_forward_out,
        )
    )
    steps = [
        launch(
            mean_loss_parts_kernel,
            (parts,),
            (
                args_1,
                args_0,
                cross_entropy_loss_nll_loss_forward_parts,
                cross_entropy_loss_nll_loss_forward_parts_1,
            ),
            (20, n1),
            ROWS=32,
            COLS=power_of_two(20),
            DIVISOR=divisor(20),
            FAR=far,
            num_warps=1,
            enable_fp_fusion=True,
        ),
        launch(
            mean_loss_results_kernel,
            (1,),
            (
                cross_entropy_loss_nll_loss_forward_parts,
                cross_entropy_loss_nll_loss_forward_parts_1,
                cross_entropy_loss_nll_loss_forward_out,
            ),
            (parts,),
            COLS=power_of_two(parts),
            FAR=far,
            num_warps=2,
            enable_fp_fusion=True,
        ),
    ]
    remember(
        layout,
        (args_0, args_1),
        (cross_entropy_loss_nll_loss_forward_out,),
        steps,
        scratch=(
            cross_entropy_loss_nll_loss_forward_parts,
            cross_entropy_loss_nll_loss_forward_parts_1,
        ),
    )
    return cross_entropy_loss_nll_loss_forward_out


def reference(args_0, args_1):
    """What eager launches."""
    cross_entropy_loss_log_softmax = torch.ops.aten._log_softmax.default(args_0, 1, False)
    cross_entropy_loss_nll_loss_forward = torch.ops.aten.nll_loss_forward.default(
        cross_entropy_loss_log_softmax,
        args_1,
        None,
        1,
        -100,
    )
    return cross_entropy_loss_nll_loss_forward[0]


def beyond_int32(tensors, *counted):
    """Is an offset in one of the tensors too large for 32 bits, or a number that is counted to?"""
    most = [*counted]
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        most.append(sum([(size - 1) * step for size, step in steps]))
    return max(most) >= 2**31 - 1048576


def divisor(count):
    """The largest power of two up to 16 that divides it."""
    return min(count & -count, 16)


def cdiv(count, size):
    """How many blocks of a size hold so many."""
    return -(-count // size)


def power_of_two(count):
    """The least one that is as large."""
    return 1 << (count - 1).bit_length()


launched = {}


def launch(kernel, grid, tensors, numbers, **constants):
    """`kernel[grid](...)`. What Triton compiled for such arguments before is launched directly;
    then what launches it, the tensors and the other arguments are given back."""
    if torch.compiler.is_compiling() or torch.version.hip:
        kernel[grid](*tensors, *numbers, **constants)
        return None
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, numbers, **constants)
    odd = tuple(tensor.data_ptr() % 16 for tensor in tensors)
    key = id(kernel), device, grid, numbers, odd, *constants.values()
    known = launched.get(key)
    if known is not None:
        start, values = known
        start(*tensors, *values)
        return None if any(odd) else (start, tensors, values)
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(launched) == 4096:  # sizes keep changing
            launched.clear()
        values = [constants[name] for name in kernel.arg_names if name in constants]
        launched[key] = starter(compiled, (*grid, 1, 1)[:3], device), (*numbers, *values)
    return None


def starter(compiled, grid, device):
    """What launches a compiled kernel as `compiled[grid]` does, in half of the host's time: what
    hooks are told is put together only where there are hooks. Pointers may be numbers."""
    told, run = compiled[grid], compiled.run
    function, packed = compiled.function, compiled.packed_metadata
    hooks, stream_of = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream

    def start(*arguments):
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            told(*arguments)
        else:
            run(*grid, stream_of(device), function, packed, None, None, None, *arguments)

    return start


plans = {}


def plan_of(kernel, *tensors):
    """What a launcher asks of its tensors; and where they lie, with what it did for others that are
    the same in that: how it allocated and what it launched. None where it has to ask."""
    if torch.compiler.is_compiling():
        return None, None
    layout = [id(kernel)]
    for tensor in tensors:
        layout += tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
        layout.append(tensor.requires_grad)
    layout = tuple(layout)
    plan = plans.get(layout)
    if plan is None:
        return layout, None
    ends, pointers = 0, [tensor.data_ptr() for tensor in tensors]
    for pointer in pointers:
        ends |= pointer
    graded = True in layout[5::5] and torch.is_grad_enabled()
    if ends % 16 or graded or layout[4] != torch.cuda.current_device():
        return None, None
    return layout, (pointers, *plan)


def do_again(plan, *tensors):
    """Allocate and launch as before."""
    pointers, made, zeroed, steps, results = plan
    held = []  # what is made begins at multiples of 16, as all that is allocated on a GPU
    for like, sizes, options in made:
        if like is None:
            held.append(torch.empty_strided(*sizes, **options))
        else:
            held.append(torch.empty_like(tensors[like]))
    for size, options in zeroed:
        held.append(torch.zeros(size, **options))
    for each in held:
        pointers.append(each.data_ptr())
    for start, places, values in steps:
        start(*[pointers[place] for place in places], *values)
    return held[0] if results == 1 else tuple(held[:results])


def remember(layout, tensors, results, steps, scratch=(), zeroed=()):
    """Keep what was done for tensors of a layout, if it can be done again."""
    if layout is None or None in steps:
        return
    held = [*map(id, (*tensors, *results, *scratch, *zeroed))]
    if len(held) > len({*held}):  # one tensor for two would be taken for both
        return
    if len(plans) == 4096:  # sizes keep changing
        plans.clear()
    made = [allocation(each, tensors) for each in (*results, *scratch)]
    zeros = [(each.shape, {"dtype": each.dtype, "device": each.device}) for each in zeroed]
    again = [
        (start, [held.index(id(tensor)) for tensor in taken], values)
        for start, taken, values in steps
    ]
    plans[layout] = made, zeros, again, len(results)


def allocation(tensor, others):
    """How to make such a tensor: as one of the others is, which is quicker, or by sizes."""
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    for place, other in enumerate(others):
        if other.shape == shape and other.stride() == stride and other.dtype == dtype:
            if torch.empty_like(other).stride() == stride:
                return place, (), {}
    return None, (shape, stride), {"dtype": dtype, "device": tensor.device}


def ranked(numbers, rank):
    """A tensor's sizes or strides; none that fits where it has another number of dimensions."""
    return numbers if len(numbers) == rank else (-1,) * rank


fallbacks = 0


def serves(name, tensor, dtype, shape, stride):
    """Why the kernel cannot take this tensor; None when it can."""
    if (
        tensor.is_cuda
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.stride() == stride
        and not (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return None
    if not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"{name} is on {tensor.device}"
    if tensor.dim() != len(shape):
        return f"{name} has {tensor.dim()} dimensions, not {len(shape)}"
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
        raise RuntimeError(f"mean_loss: {problem}")
    if not fallbacks:
        warnings.warn(f"mean_loss: {problem}; running eager instead", stacklevel=3)
    fallbacks += 1
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return reference(*tensors)
    with torch.autocast(device, enabled=False):  # the casts are made already
        return reference(*tensors)


# -- python FILE --check --bench -------------------------------------------------------------------


# Of each input: shape, strides, dtype, and from where to where integers go.
SMALL = [((63, 20), (20, 1), torch.float32), ((63,), (1,), torch.int64, 0, 20)]
FULL = [((150, 20), (20, 1), torch.float32), ((150,), (1,), torch.int64, 0, 20)]


def drawn(inputs, device, seed=0):
    """Random tensors, the same each time."""
    torch.manual_seed(seed)
    for shape, stride, dtype, *bounds in inputs:
        size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)),)
        made = torch.randint(*bounds, size, device=device) if bounds else None
        made = torch.randn(size, device=device) if made is None else made
        yield made.to(dtype).as_strided(shape, stride)


class InFloat64(TorchDispatchMode):
    """Runs every operation in float64, whatever dtype it names."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_softmax" in str(function):
            args = (*args[:2], False)  # float64 is wide enough as it is
        args, kwargs = tree_map(widened, (args, kwargs or {}))
        return tree_map(widened, function(*args, **kwargs))


def widened(value):
    """A tensor or a dtype in float64, anything else as it is."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def results(function, tensors):
    found = function(*tensors)
    return found if isinstance(found, tuple) else (found,)


def truth(number, inputs, device, seed):
    """A result of the reference as it is and in float64."""
    tensors = [*drawn(inputs, device, seed)]
    eager = results(reference, tensors)[number]
    with InFloat64():
        return eager, results(reference, [*map(widened, tensors)])[number]


def apart(found, exact):
    """The largest error, among what is finite."""
    error = (found.double() - exact.double()).abs()
    return torch.where(error.isfinite(), error, 0.0).max().item()


def rounded(dtype, exact):
    """What roundings to the dtype may make of the largest result."""
    ulps = {torch.float32: 4.0, torch.float64: 16.0}.get(dtype, 2.0)
    top = apart(exact, torch.zeros_like(exact)) or torch.finfo(dtype).tiny
    return ulps * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))


def check(inputs, device):
    """Print our errors beside eager's, both against float64; does each of ours hold?"""
    holds = True
    for number, ours in enumerate(results(mean_loss, [*drawn(inputs, device)])):
        eager, exact = truth(number, inputs, device, 0)
        error, own, seen = apart(ours, exact), apart(eager, exact), eager.numel()
        if ours.dtype.is_floating_point:
            wrong = ~ours.double().isfinite() & exact.isfinite() & eager.double().isfinite()
            slack = rounded(ours.dtype, exact)
        else:
            wrong, slack = (ours != exact) & (ours != eager), math.inf
        while error > 2.0 * own + slack and seen < 4096:  # eager alone is drawn again
            own, seen = max(own, apart(*truth(number, inputs, device, seen))), seen + eager.numel()
        allowed = 2.0 * own + slack
        near = error <= allowed and not wrong.any()
        print(f"{[*ours.shape]} {ours.dtype}: error {error:.3g},", end=" ")
        print(f"eager's {own:.3g}, allowed {allowed:.3g}:", end=" ")
        print("near enough" if near else "TOO FAR")
        holds = holds and near
    return holds


def bench():
    """Print how long a call of each keeps the GPU busy at the graph's sizes, with a cold L2."""
    tensors = [*drawn(FULL, "cuda")]
    ways = {
        "mean_loss": mean_loss,
        "eager": reference,
        "torch.compile": torch.compile(reference, dynamic=False),
    }
    cold = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for name, way in ways.items():
        way(*tensors)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(33)]
        torch.cuda._sleep(2**27)  # cycles, in which all runs are queued
        for start, end in pairs:
            cold.zero_()
            start.record()
            way(*tensors)
            end.record()
        torch.cuda.synchronize()
        middle = sorted(start.elapsed_time(end) for start, end in pairs)[16]
        print(f"{name}: {1e3 * middle:.2f} us")


def interpret_libdevice():
    """Give Triton's interpreter, which has no math library, torch's functions in float64."""
    from triton.runtime.interpreter import TensorHandle

    def taken(function):
        def call(*args):
            blocks = [arg for arg in args if isinstance(arg, tl.tensor)]
            kind, dtype = blocks[0].dtype.scalar, blocks[0].handle.data.dtype
            arrays = [arg.handle.data if isinstance(arg, tl.tensor) else arg for arg in args]
            made = function(*(torch.as_tensor(each).double() for each in arrays)).numpy()
            whole = any(block.type.is_block() for block in blocks)
            handle = TensorHandle(made.astype(dtype), kind)
            return tl.tensor(handle, tl.block_type(kind, list(made.shape)) if whole else kind)

        return call

    for name, function in {"log": torch.log}.items():
        setattr(libdevice, name, taken(function))


def main():
    """The command line. Without a GPU the check runs through Triton's interpreter."""
    parser = argparse.ArgumentParser(description="mean_loss beside eager")
    parser.add_argument("--check", action="store_true", help="errors against float64 (default)")
    parser.add_argument("--bench", action="store_true", help="times on a GPU")
    asked = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ["FUSION_ADVISOR_STRICT"] = "1"  # the kernel's own answer, or none
    if interpreted:
        interpret_libdevice()
    near = True
    with torch.no_grad():
        if asked.check or not asked.bench:
            near = check(SMALL, "cpu" if interpreted else "cuda")
            near = near and (interpreted or check(FULL, "cuda"))
        if asked.bench and interpreted:
            sys.exit("mean_loss: --bench times on a GPU, and there is none here")
        if asked.bench:
            bench()
    sys.exit(not near)


if __name__ == "__main__":
    main()
