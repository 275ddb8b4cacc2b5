# SPDX-License-Identifier: 0BSD
"""3 eager launches as one blocked kernel.

Replaces: _to_copy.default, mul.Tensor, cumsum.default.
Source: generated.py:141.
HBM: 9011200000 B unfused, 2457600000 B here (3.67 times fewer) at the sizes it was made for.
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


@triton.jit
def wide(place, FAR: tl.constexpr):
    # What offsets are made from, in 64 bits where some of them are beyond 32.
    if FAR:
        place = place + tl.full((), 0, tl.int64)
    return place


@triton.jit
def blocked_kernel(
    args_0_ptr,
    cumsum_out_ptr,
    cols,
    COLS: tl.constexpr,
    FAR: tl.constexpr,
):
    # One program walks a row in chunks.
    row = wide(tl.program_id(0), FAR)
    cumsum_carried = tl.full((), 0.0, tl.float32)
    for start in tl.range(0, wide(cols, FAR), COLS, num_stages=3):
        col = start + wide(tl.arange(0, COLS), FAR)
        col_mask = col < cols
        args_0 = tl.load(args_0_ptr + row * cols + col, mask=col_mask, other=0.0).to(tl.float32)
        mul = args_0 * 2.0
        cumsum_chunk = tl.where(col_mask, mul, 0.0)
        cumsum = cumsum_carried + tl.cumsum(cumsum_chunk, axis=0)
        cumsum_carried += tl.sum(cumsum_chunk, axis=0)
        tl.store(cumsum_out_ptr + row * cols + col, cumsum, mask=col_mask)


def blocked(args_0):
    layout, plan = plan_of(blocked_kernel, args_0)
    if plan is not None:
        return do_again(plan, args_0)
    n0, n1 = ranked(args_0.shape, 2)
    problem = serves("args_0", args_0, torch.bfloat16, (n0, n1), (n1, 1))
    if problem:
        return fall_back(problem, args_0)
    if not n0 * n1:
        return reference(args_0)
    cumsum_out = torch.empty_strided((n0, n1), (n1, 1), dtype=torch.float32, device=args_0.device)
    far = beyond_int32((args_0, cumsum_out))
    steps = [
        launch(
            blocked_kernel,
            (n0,),
            (args_0, cumsum_out),
            (n1,),
            COLS=2048,
            FAR=far,
            num_warps=4,
            enable_fp_fusion=True,
        ),
    ]
    remember(layout, (args_0,), (cumsum_out,), steps)
    return cumsum_out


def reference(args_0):
    """What eager launches."""
    to = torch.ops.aten._to_copy.default(args_0, dtype=torch.float32)
    mul = torch.ops.aten.mul.Tensor(to, 2)
    cumsum = torch.ops.aten.cumsum.default(mul, -1)
    return cumsum


def beyond_int32(tensors, *counted):
    """Is an offset in one of the tensors too large for 32 bits, or a number that is counted to?"""
    most = [*counted]
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        most.append(sum([(size - 1) * step for size, step in steps]))
    return max(most) >= 2**31 - 1048576


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
        raise RuntimeError(f"blocked: {problem}")
    if not fallbacks:
        warnings.warn(f"blocked: {problem}; running eager instead", stacklevel=3)
    fallbacks += 1
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return reference(*tensors)
    with torch.autocast(device, enabled=False):  # the casts are made already
        return reference(*tensors)


# -- python FILE --check --bench -------------------------------------------------------------------


# Of each input: shape, strides, dtype, and from where to where integers go.
SMALL = [((3, 2125), (2125, 1), torch.bfloat16)]
FULL = [((4096, 100000), (100000, 1), torch.bfloat16)]


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
    for number, ours in enumerate(results(blocked, [*drawn(inputs, device)])):
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
        "blocked": blocked,
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


def main():
    """The command line. Without a GPU the check runs through Triton's interpreter."""
    parser = argparse.ArgumentParser(description="blocked beside eager")
    parser.add_argument("--check", action="store_true", help="errors against float64 (default)")
    parser.add_argument("--bench", action="store_true", help="times on a GPU")
    asked = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ["FUSION_ADVISOR_STRICT"] = "1"  # the kernel's own answer, or none
    near = True
    with torch.no_grad():
        if asked.check or not asked.bench:
            near = check(SMALL, "cpu" if interpreted else "cuda")
            near = near and (interpreted or check(FULL, "cuda"))
        if asked.bench and interpreted:
            sys.exit("blocked: --bench times on a GPU, and there is none here")
        if asked.bench:
            bench()
    sys.exit(not near)


if __name__ == "__main__":
    main()
