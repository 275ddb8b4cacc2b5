# SPDX-License-Identifier: 0BSD
"""5 eager launches as one cooperative kernel.

Replaces: max.dim, sub.Tensor, exp.default, sum.dim_IntList, div.Tensor.
Source: generated.py:21, generated.py:22, generated.py:23.
HBM: 211840 B unfused, 52800 B here (4.01 times fewer) at the sizes it was made for.
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
def ticket(workspace_ptr, WAIT: tl.constexpr):
    # The order in which programs begin, for that of the grid is not promised. So the programs of
    # every row but the last begun are all resident or done, and nobody waits for one without room.
    if WAIT:
        number = tl.atomic_add(workspace_ptr, 1, sem="relaxed").to(tl.int32)
    else:
        number = tl.program_id(0)
    return number


@triton.jit
def around_vectors(
    first,
    cols,
    start,
    COLS: tl.constexpr,
    ENDS: tl.constexpr,
    FAR: tl.constexpr,
):
    # Of a row that begins at element `first`: the columns and places of its whole vectors, from
    # lane `start` of them on, and the columns around them, which whoever has the first lane takes.
    VECTOR: tl.constexpr = ENDS // 2
    head = tl.minimum(-first & (VECTOR - 1), cols).to(tl.int32)
    inside = tl.multiple_of((cols - head) & -VECTOR, VECTOR)
    lane = start + wide(tl.arange(0, COLS), FAR)
    vectors = tl.multiple_of(first + head, VECTOR) + lane
    end = wide(tl.arange(0, ENDS), FAR)
    end_mask = end < tl.where(start == 0, cols - inside, 0)
    return lane + head, vectors, lane < inside, tl.where(end < head, end, end + inside), end_mask


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def widened_1(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;",
            "=&r,=r,r",
            [x],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


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
def widened_2(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "mul.lo.u32 $0, $2, 65536; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def shared_softmax_kernel(
    args_0_ptr,
    div_out_ptr,
    workspace_ptr,
    parts,
    cols,
    COLS: tl.constexpr,
    PEERS: tl.constexpr,
    ENDS: tl.constexpr,
    FAR: tl.constexpr,
    STEP: tl.constexpr,
):
    # One program has a part of a row, and takes what the others found from them.
    program = wide(ticket(workspace_ptr, STEP < 0), FAR)
    row = program // parts
    part = program % parts
    col, vectors, col_mask, end, end_mask = around_vectors(
        row * cols,
        cols,
        part * COLS,
        COLS,
        ENDS,
        FAR,
    )
    args_0 = tl.load(args_0_ptr + vectors, mask=col_mask, other=float("-inf"))
    args_0_wide = args_0.to(tl.float32)
    args_0_end = tl.load(
        args_0_ptr + row * cols + end,
        mask=end_mask,
        other=float("-inf"),
    ).to(tl.float32)
    max_1_max = max_nan(tl.reduce(args_0_wide, 0, max_nan), tl.reduce(args_0_end, 0, max_nan))
    args_0_wide_1 = widened_1(args_0, STEP < 0)
    sub_part = args_0_wide_1 - max_1_max
    sub_part_end = args_0_end - max_1_max
    exp_part = tl.exp2(sub_part * 1.44269504)
    exp_part_end = tl.exp2(sub_part_end * 1.44269504)
    sum_1_sum = tl.sum(exp_part, axis=0) + tl.sum(exp_part_end, axis=0)
    words = workspace_ptr + 16 + row.to(tl.int64) * parts
    if STEP <= 0:
        publish(words + part, max_1_max, sum_1_sum, STEP < 0)
    if STEP != 0:
        peer = tl.arange(0, PEERS)
        peer_mask = peer < parts
        max_1_parts, sum_1_parts = published(words + peer, peer_mask, STEP < 0)
        max_1_max_1 = tl.reduce(tl.where(peer_mask, max_1_parts, float("-inf")), 0, max_nan)
        value_part = tl.where(
            max_1_parts == float("-inf"),
            0.0,
            sum_1_parts * tl.exp2((max_1_parts - max_1_max_1) * 1.44269504),
        )
        value_sum = tl.sum(tl.where(peer_mask, value_part, 0.0), axis=0)
        value_part_1 = tl.where(max_1_max_1 == float("-inf"), float("nan"), value_sum)
        args_0_wide_2 = widened_2(args_0, STEP < 0)
        sub_part_1 = args_0_wide_2 - max_1_max_1
        exp_part_1 = tl.exp2(sub_part_1 * 1.44269504)
        div_part = exp_part_1 * (1.0 / value_part_1)
        tl.store(div_out_ptr + vectors, div_part, mask=col_mask)
        sub_part_end_1 = args_0_end - max_1_max_1
        exp_part_end_1 = tl.exp2(sub_part_end_1 * 1.44269504)
        div_part_end = exp_part_end_1 * (1.0 / value_part_1)
        tl.store(div_out_ptr + row * cols + end, div_part_end, mask=end_mask)


def shared_softmax(args_0):
    layout, plan = plan_of(shared_softmax_kernel, args_0)
    if plan is not None:
        return do_again(plan, args_0)
    n0, n1 = ranked(args_0.shape, 2)
    problem = serves("args_0", args_0, torch.bfloat16, (n0, n1), (n1, 1))
    if problem:
        return fall_back(problem, args_0)
    if not n0 * n1:
        return reference(args_0)
    parts = cdiv(n1, 64)
    div_out = torch.empty_strided((n0, n1), (n1, 1), dtype=torch.bfloat16, device=args_0.device)
    # Words of this call alone, 0 until they are left; a captured graph zeroes them anew.
    workspace = torch.zeros(16 + n0 * parts, dtype=torch.int64, device=args_0.device)
    # Programs wait where there surely is room for all of a row, and for other such kernels;
    # elsewhere one launch leaves the words for the next.
    together = 2 * parts <= resident(args_0.device, 1)
    far = beyond_int32((args_0, div_out))
    steps = [
        launch(
            shared_softmax_kernel,
            (n0 * parts,),
            (args_0, div_out, workspace),
            (parts, n1),
            COLS=64,
            PEERS=power_of_two(parts),
            ENDS=16,
            FAR=far,
            STEP=step,
            num_warps=1,
            enable_fp_fusion=True,
        )
        for step in ((-1,) if together else (0, 1))
    ]
    remember(layout, (args_0,), (div_out,), steps, zeroed=(workspace,))
    return div_out


def reference(args_0):
    """What eager launches."""
    max_1 = torch.ops.aten.max.dim(args_0, -1, True)
    sub = torch.ops.aten.sub.Tensor(args_0, max_1[0])
    exp = torch.ops.aten.exp.default(sub)
    sum_1 = torch.ops.aten.sum.dim_IntList(exp, [-1], True)
    div = torch.ops.aten.div.Tensor(exp, sum_1)
    return div


def beyond_int32(tensors, *counted):
    """Is an offset in one of the tensors too large for 32 bits, or a number that is counted to?"""
    most = [*counted]
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        most.append(sum([(size - 1) * step for size, step in steps]))
    return max(most) >= 2**31 - 1048576


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
        raise RuntimeError(f"shared_softmax: {problem}")
    if not fallbacks:
        warnings.warn(f"shared_softmax: {problem}; running eager instead", stacklevel=3)
    fallbacks += 1
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return reference(*tensors)
    with torch.autocast(device, enabled=False):  # the casts are made already
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


# -- python FILE --check --bench -------------------------------------------------------------------


# Of each input: shape, strides, dtype, and from where to where integers go.
SMALL = [((3, 141), (141, 1), torch.bfloat16)]
FULL = [((40, 330), (330, 1), torch.bfloat16)]


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
    ulps = {torch.float32: 2.0, torch.float64: 16.0}.get(dtype, 2.0)
    top = apart(exact, torch.zeros_like(exact)) or torch.finfo(dtype).tiny
    return ulps * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))


def check(inputs, device):
    """Print our errors beside eager's, both against float64; does each of ours hold?"""
    holds = True
    for number, ours in enumerate(results(shared_softmax, [*drawn(inputs, device)])):
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
        "shared_softmax": shared_softmax,
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
    parser = argparse.ArgumentParser(description="shared_softmax beside eager")
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
            sys.exit("shared_softmax: --bench times on a GPU, and there is none here")
        if asked.bench:
            bench()
    sys.exit(not near)


if __name__ == "__main__":
    main()
