# SPDX-License-Identifier: 0BSD
"""Runtime of the kernels beside this file: operators, guards, launches, fallback, check and bench.

Written by fusion-advisor, with what these kernels call and no more. It needs torch and Triton
alone. Kernels compute in float32 for narrower floats, round at the stores, and give bitwise the
same from run to run.

    python FOLDER/fused_runtime.py [NAME ...] --check --bench
"""

import argparse
import ast
import functools
import hashlib
import importlib
import inspect
import json
import linecache
import math
import os
import re
import sys
import threading
import types
import warnings
from pathlib import Path

import torch
import triton
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

IMPORT = "from . import fused_runtime as host\n"
"""Line by which a kernel's file is known."""

# -- operators: what torch.compile and torch.export see of a launcher ------------------------------

LIBRARY = torch.library.Library("fusion_advisor", "FRAGMENT")
TAGS = torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag


class Here(threading.local):
    """Whether launchers launch nothing in this thread; a list of what they would launch, where that
    is asked."""

    idle, asked = False, None


here = Here()


class Unlaunched(Exception):
    """Raised by a launcher that launches nothing, with tensors of which its results come first."""


class Unserved(RuntimeError):
    """Raised by a launcher for what its kernels cannot take."""


class Empty(Unserved):
    """Raised by a launcher for tensors without elements, of which the reference makes results."""


class Resized(Unserved, ValueError):
    """Raised by a launcher for a size that its reference does not serve either."""


def launcher(reference, results):
    """Decorator of a function that checks what it is given, launches kernels and returns results
    and launches: it becomes one that returns the results, and an operator. A call of a layout that
    came before is not checked again. What the kernels cannot take, what is no tensor or no number
    where they take one, and what has no elements, runs the reference; without one, Unserved is
    raised. Where the caller has statements of its own for that, it calls `or_none`, which gives
    None there."""

    def register(made):
        signature = inspect.signature(made)
        taken = signature.parameters.values()
        count = sum(each.annotation is each.empty for each in taken)  # numbers stand behind

        def attempt(instead, *given):
            tensors, numbers = given[:count], given[count:]
            if reference and (problem := misfit(given, count)):
                return fall_back(problem, run, instead, *given)
            layout, plan = plan_of(run, *tensors, numbers=numbers)
            if plan is not None:
                return do_again(plan, *given)
            try:
                found, *done = made(*given)
            except Unserved as unserved:
                if reference is None or (instead and isinstance(unserved, Resized)):
                    raise
                if isinstance(unserved, Empty):
                    return instead and instead(*given)
                return fall_back(unserved, run, instead, *given)
            remember(layout, tensors, found, *done)
            return found[0] if results == 1 else found

        @functools.wraps(made)
        def run(*given, **named):
            if named:
                given = signature.bind(*given, **named).args
            return attempt(reference, *given)

        def or_none(*given):
            if not (is_dynamo_compiling() or isinstance(given[0], TRACED)):
                return attempt(None, *given)
            try:  # whether the kernels can take it: else the caller's statements are traced
                if not misfit(given, count):
                    made(*given)
            except Unlaunched:
                return run.operator(*given)
            except Unserved:
                pass
            return noted(run.__module__, run.__name__, "it is traced with what no kernel takes")

        run.reference, run.or_none = reference, or_none
        return registered(results)(run)

    return register


def ungraded(launcher):
    """Decorator of a launcher through which no gradient passes, since its results are integers or
    truths or follow from such: its inputs may require one."""

    def alone(call):
        @functools.wraps(call)
        def run(*given, **named):
            if not torch.is_grad_enabled():
                return call(*given, **named)
            with torch.no_grad():
                return call(*given, **named)

        return run

    found = alone(launcher)
    found.or_none = alone(launcher.or_none)
    return found


def registered(results):
    """Decorator that registers a launcher as an operator, for what traces it, and gives it back as
    it is, for eager. The name has the package and a hash of the file's text: the same file is
    defined once, wherever it lies."""

    def register(launcher):
        function = inspect.unwrap(launcher)
        linecache.checkcache(function.__code__.co_filename)
        lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
        calls = re.findall(r"\bhost\.(\w+)\(", "".join(lines)) if IMPORT in lines else ()
        if lacking := sorted({*calls} - globals().keys()):
            raise ImportError(
                f"{__file__} has no {', '.join(lacking)}, which {launcher.__module__} calls: have "
                "it written for all kernels of its folder (fusion-advisor patch MODEL --update)"
            )
        name = operator_name(function)
        if not hasattr(torch.ops.fusion_advisor, name):
            define(name, launcher, results)
        launcher.operator = getattr(torch.ops.fusion_advisor, name).default
        return launcher

    return register


NUMBERS = float, int, torch.SymFloat, torch.SymInt


def misfit(given, count):
    """Reason why a launcher cannot take what it is given: something is no tensor among the first,
    or no number behind them; None where all is."""
    for place, each in enumerate(given):
        if not isinstance(each, torch.Tensor if place < count else NUMBERS):
            return f"{type(each).__name__}, no {'tensor' if place < count else 'number'}"
    return None


def require(version):
    """Serve a kernel's file that asks for a version of the runtime, as files of before do."""


def operator_name(function):
    """Name of a function's operator."""
    package = function.__module__.rpartition(".")[0] or function.__module__
    return re.sub(r"\W", "_", f"{package}_{function.__name__}_{fingerprint(function)}")


def fingerprint(function):
    """Hash of the text of a function's file, for which `inspect` would walk all modules."""
    lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


def schema(name, function, results):
    """Signature of an operator: tensors and annotated numbers in, tensors out."""
    taken = inspect.signature(function).parameters.values()
    kinds = ["Tensor" if each.annotation is each.empty else "float" for each in taken]
    given = ", ".join(f"{kind} in{n}" for n, kind in enumerate(kinds))
    made = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"{name}({given}) -> {made}"


def define(name, launcher, results):
    """Define an operator: on tensors it is the launcher, on fake ones what that allocates. Where a
    gradient is required, the launcher runs the reference, through which autograd sees."""

    def idle(*given):
        lowering = sys.modules.get("torch._inductor.lowering")
        if KNOWN and lowering and launcher.operator not in lowering.lowerings:
            lower(launcher, results)  # Inductor asks on fake tensors before it compiles
        before, here.idle = here.idle, True
        try:
            return launcher(*given)
        except Unlaunched as unlaunched:
            return unlaunched.args[0] if results == 1 else unlaunched.args[:results]
        finally:
            here.idle = before

    def under_autograd(keys, *given):
        if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given):
            return idle(*given)
        return launcher.operator.redispatch(keys & torch._C._after_autograd_keyset, *given)

    LIBRARY.define(schema(name, launcher, results), tags=TAGS)
    LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
    LIBRARY.impl(name, under_autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"fusion_advisor::{name}", idle, lib=LIBRARY)


# -- lowering: Inductor launches the kernels itself, without the operator's time on the host -------

KNOWN = (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 13)
"""Whether this is a PyTorch whose Inductor is known to take a lowering as `lower` makes it."""


def lower(launcher, results):
    """Give Inductor a lowering of a launcher's operator: the launches, where sizes are numbers and
    Inductor compiles a kernel as Triton would here; else the operator is called."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    called = lowering.fallback_handler(launcher.operator, add_to_fallback_set=False)
    allocate = lowering.lowerings[torch.ops.aten.empty_strided.default]
    launch_one = lowering.lowerings[torch.ops.higher_order.triton_kernel_wrapper_mutation]

    def launched_by_inductor(*given):
        taken = [getattr(each, "meta", {}).get("val", each) for each in V.graph.current_node.args]
        asked = asked_of(launcher, taken)
        if asked is None:
            return called(*given)
        found, scratch, launches = asked
        held = {
            id(like): ir.ExternKernel.require_exact_strides(box, like.stride())
            for box, like in zip(given, taken, strict=True) if isinstance(like, torch.Tensor)
        }  # fmt: skip
        for each in (*found, *scratch):
            shape, stride = [*each.shape], [*each.stride()]
            held[id(each)] = allocate(shape, stride, dtype=each.dtype, device=each.device)
        for kernel, warps, grid, arguments in launches:
            floats = [name for name, each in arguments.items() if isinstance(each, float)]
            launch_one(
                kernel_idx=table.add_kernel(inlined(kernel, warps, *floats)),
                constant_args_idx=table.add_constant_args({}),
                grid=[grid], tma_descriptor_metadata={},
                kwargs={name: held.get(id(each), each) for name, each in arguments.items()},
            )  # fmt: skip
        return held[id(found[0])] if results == 1 else tuple(held[id(each)] for each in found)

    lowering.register_lowering(launcher.operator, type_promotion_kind=None)(launched_by_inductor)


def asked_of(launcher, given):
    """Results and scratch of a launcher as fake tensors, and the launches that it would make:
    kernel, warps, grid and arguments by their names. None where Inductor cannot make them: a size
    or a number is not known yet, or beyond 32 bits, where PyTorch 2.11 stops; the kernel takes no
    such tensors, needs zeroed memory, is not `analysed`, or is interpreted."""
    for each in given:
        numbers = (*each.shape, *each.stride()) if isinstance(each, FakeTensor) else (each,)
        if any(type(number) not in (int, float) for number in numbers):
            return None
    here.asked = asked = []
    try:
        with torch.no_grad(), given[0].fake_mode:
            found, _, *more = inspect.unwrap(launcher)(*given)
    except Unserved:
        return None
    finally:
        here.asked = None
    scratch, *zeroed = more or ((),)
    launches = []
    for kernel, grid, arguments, constants in asked:
        warps = constants.pop("num_warps")
        near = all(type(each) is not int or each < 2**31 for each in arguments)
        known = near and analysed(kernel) and {*constants} <= {*kernel.arg_names}
        if zeroed or not known:
            return None
        names = [name for name in kernel.arg_names if name not in constants]
        named = dict(zip(names, arguments, strict=True))
        launches.append((kernel, warps, (*grid, 1, 1)[:3], named | constants))
    return found, scratch, launches


@functools.cache
def analysed(kernel):
    """Whether Inductor, which asks what a compiled kernel writes, knows all that it calls: it takes
    a kernel with assembly for one that writes into every tensor."""
    if not isinstance(kernel, triton.JITFunction):
        return False
    names, known = kernel.fn.__code__.co_names, kernel.fn.__globals__
    called = [known[name] for name in names if isinstance(known.get(name), triton.JITFunction)]
    return "inline_asm_elementwise" not in names and all(map(analysed, called))


@functools.cache
def inlined(kernel, warps, *floats):
    """Kernel that Inductor compiles for a number of warps, with these numbers as constants:
    Inductor hands floats over in 64 bits, in which the kernel would compute."""
    if floats:
        tree = ast.parse(inspect.getsource(kernel.fn))
        for each in [each for each in tree.body[0].args.args if each.arg in floats]:
            each.annotation = ast.parse("tl.constexpr", mode="eval").body
        text = ast.unparse(tree)
        file = f"<{kernel.__module__}.{kernel.__name__}, {', '.join(floats)} constant>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        exec(compile(text, file, "exec"), names := {**kernel.fn.__globals__})
        kernel = names[kernel.__name__]
    return triton.autotune([triton.Config({}, num_warps=warps)], [])(kernel)


# -- kernels that train: a forward and a backward pass as one function -----------------------------


def refuse(problem):
    """Raise Unserved."""
    raise Unserved(problem)


def made_for(*sizes):
    """Raise Unserved where a tensor has another size in a dimension than numbers of the backward
    kernels may follow from."""
    for name, tensor, dim, size in sizes:
        if tensor.shape[dim] != size:
            refuse(f"{name} has {tensor.shape[dim]} in dimension {dim}, not {size}")


def trained(backward, reference, gradients, results):
    """Decorator of a function that returns results and what backward reads of them: it becomes one
    that returns the results, and that autograd follows. `backward` makes the gradients of the
    inputs that are named, whichever of them are asked for. What the kernels do not serve runs the
    reference, through which autograd sees; so does an input that requires another gradient.
    `or_none` is as a launcher's, but for tracers: they see an operator that is made of those of the
    launchers, and runs the reference."""

    def register(forward):
        names = [*inspect.signature(forward).parameters]
        others = [place for place, name in enumerate(names) if name not in gradients]

        class Pair(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                made, kept = forward(*tensors)
                ctx.save_for_backward(*kept)
                ctx.layouts = [(each.shape, each.stride()) for each in made]
                ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
                return made if results > 1 else made[0]

            @staticmethod
            def backward(ctx, *given):
                if torch.is_grad_enabled() and not isinstance(given[0], TRACED):
                    raise RuntimeError(
                        f"{forward.__name__}: its gradients have none (create_graph=True): "
                        "run the model's own statements where they are needed"
                    )
                found = backward(ctx.saved_tensors, [*map(in_layout, given, ctx.layouts)])
                found = dict(zip(gradients, found, strict=True))
                asked = zip(names, ctx.needs_input_grad, strict=True)
                return tuple(found[name] if needed else None for name, needed in asked)

        def attempt(instead, *tensors):
            if problem := misfit(tensors, len(names)):
                return fall_back(problem, run, instead, *tensors)
            try:
                if transformed():
                    refuse("torch.func transforms what runs")
                if not torch.is_grad_enabled() or True not in [x.requires_grad for x in tensors]:
                    made, _ = forward(*tensors)
                    return made if results > 1 else made[0]
                for place in others:
                    if tensors[place].requires_grad:
                        refuse(f"no kernel makes the gradient of {names[place]}")
                return Pair.apply(*tensors)
            except Unserved as unserved:
                if instead and isinstance(unserved, Resized):
                    raise
                return fall_back(unserved, run, instead, *tensors)

        def call(*tensors):
            return attempt(reference, *tensors)

        def traced(tensors):
            traced = is_dynamo_compiling() or isinstance(tensors[0], TRACED)
            return traced and not misfit(tensors, len(names))

        @functools.wraps(forward)
        def run(*tensors):
            return run.operator(*tensors) if traced(tensors) else call(*tensors)

        def or_none(*tensors):
            return run.operator(*tensors) if traced(tensors) else attempt(None, *tensors)

        name = operator_name(forward)
        if not hasattr(torch.ops.fusion_advisor, name):
            LIBRARY.define(schema(name, forward, results), tags=TAGS)
            LIBRARY.impl(name, call, "CompositeImplicitAutograd")
        run.operator = getattr(torch.ops.fusion_advisor, name).default
        run.reference, run.or_none = reference, or_none
        run.graded = [differentiated(each, gradients) for each in (run, reference)]
        return run

    return register


def in_layout(gradient, layout):
    """A gradient as its tensor lies in memory, where the kernels read it."""
    shape, stride = layout
    if gradient.stride() == stride:
        return gradient
    laid = torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device)
    return laid.copy_(gradient)


# -- numbers that launchers ask for ----------------------------------------------------------------


def cdiv(count, size):
    """Number of blocks of a size that hold so many; Triton's own takes the host longer."""
    return -(-count // size)


def inverse(number):
    """Factor by which eager divides by a number."""
    return 1.0 / number if number else math.copysign(math.inf, number)


def power_of_two(count):
    """Least power of two that is as large."""
    return 1 << (count - 1).bit_length()


def first_piece(count):
    """The larger of two powers of two that hold so many."""
    return max(power_of_two(count) // 2, 1)


def second_piece(count):
    """Elements held beside the first piece: a power of two from an eighth to half as many where
    that is enough, else as many."""
    first = first_piece(count)
    over = count - first
    return max(power_of_two(over), first // 8) if 0 < 2 * over <= first else first


DIVISOR = 16
"""Bytes of a whole vector, and the largest power of two that is looked for."""


def divisor(count):
    """The largest power of two up to DIVISOR that divides a number."""
    return min(count & -count, DIVISOR)


SETTLED = 4
"""Sizes that a kernel is compiled for, each for itself, before one serves all others."""
settled_sizes = {}


def settled(kernel, name, size):
    """A size that a kernel is compiled for; 0 where it serves this size as it serves any, since
    sizes keep changing. The interpreter, which compiles nothing, has one, so that checks of a few
    sizes see both."""
    known = settled_sizes.setdefault((id(kernel), name), set())
    if len(known) < (1 if interpreted() else SETTLED):
        known.add(size)
    return size if size in known else 0


def empty(shape, stride, dtype, beside):
    """Memory for a tensor where another lies."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=beside.device)


BEHIND = 2**20
"""Lanes that a kernel may count behind its last element: as many as a block has."""


def beyond_int32(tensors, *counted, behind=BEHIND):
    """Whether an offset in one of the tensors is too large for 32 bits, or a number counted to.
    Raises Unserved for tensors of several devices, and Unlaunched where nothing will be launched:
    sizes may be symbolic."""
    idle = here.idle or is_dynamo_compiling() or isinstance(tensors[0], TRACED)
    if idle and here.asked is None:
        raise Unlaunched(*tensors)
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        raise Unserved(f"its tensors lie on {' and '.join(sorted(map(str, devices)))}")
    most = [*counted]
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        most.append(sum([(size - 1) * step for size, step in steps]))
    return max(most) >= 2**31 - behind


REGISTERS = 256
"""Registers of a thread, at the most, in a kernel whose programs wait for each other."""


def resident(device, warps):
    """Programs that the device holds at once at the least; 0 where they run one by one."""
    if device.type != "cuda":
        return 0
    has, threads = torch.cuda.get_device_properties(device), 32 * warps
    fit = min(
        has.regs_per_multiprocessor // (REGISTERS * threads),
        has.max_threads_per_multi_processor // threads,
    )
    return has.multi_processor_count * max(fit, 1)


# -- guards ----------------------------------------------------------------------------------------


def ranked(numbers, rank):
    """A tensor's sizes or strides; none that fits where it has another number of dimensions."""
    return numbers if len(numbers) == rank else (-1,) * rank


def held_to(name, tensor, dim, size):
    """Raise Resized where a dimension has another size than was captured: numbers in the
    kernel's file may have been made of that."""
    if tensor.dim() > dim and tensor.shape[dim] != size:
        raise Resized(
            f"{name} has {tensor.shape[dim]} in dimension {dim}, and this was made for {size}, "
            "which its numbers may follow from: run the model's own statements, or make it anew"
        )


def transformed():
    """Whether forward-mode gradients are made, or torch.func transforms what runs: tensors may be
    others than they seem."""
    if forward_ad._current_level >= 0:
        return True
    return not is_dynamo_compiling() and torch._C._functorch.maybe_current_level() is not None


def serves(name, tensor, dtype, shape, stride):
    """Reason why a kernel cannot take this tensor; None when it can."""
    if not (tensor.is_cuda or interpreted()):
        return f"{name} is on {tensor.device}"
    if tensor.dim() != len(shape):
        return f"{name} has {tensor.dim()} dimensions, not {len(shape)}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return f"{name} requires a gradient"
    if transformed():
        return f"{name} may have a tangent or a hidden dimension: torch.func transforms what runs"
    if not is_compiling() and tensor.is_neg():
        return f"{name} lies negated in memory"
    if tensor.dtype != dtype:
        return f"{name} has dtype {tensor.dtype}, not {dtype}"
    if tuple(tensor.shape) != tuple(shape):
        return f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}"
    if tensor.stride() != stride and tensor.numel():
        steps = zip(shape, tensor.stride(), stride, strict=True)
        if any(n > 1 and have != want for n, have, want in steps):
            return f"{name} has strides {tensor.stride()}, not {tuple(stride)}"
    return None


def takes(name, tensor, dtype, shape, stride):
    """Raise Unserved where a kernel cannot take this tensor."""
    problem = serves(name, tensor, dtype, shape, stride)
    if problem:
        raise Unserved(problem)


def holds(name, tensor, dim, count):
    """Raise Unserved where a dimension has fewer places than are read along it: eager raises."""
    if tensor.shape[dim] < count:
        raise Unserved(f"{name} has {tensor.shape[dim]} in dimension {dim}, and {count} are read")


def not_empty(count):
    """Raise Empty where there are no elements."""
    if not count:
        raise Empty("a tensor has no elements")


fallbacks = {}
"""Calls of each launcher that eager ran instead."""


@torch.compiler.assume_constant_result
def noted(module, name, problem):
    """Count a call that eager runs, and warn at the first; RuntimeError in strict mode."""
    if os.environ.get("FUSION_ADVISOR_STRICT") == "1":
        raise RuntimeError(f"{name}: {problem}")
    place = f"{module}.{name}"
    if place not in fallbacks:
        warnings.warn(f"{name}: {problem}; running eager instead", stacklevel=5)
    fallbacks[place] = fallbacks.get(place, 0) + 1


def fall_back(problem, launcher, reference, *given):
    """Run the reference instead, if there is one; else None."""
    noted(launcher.__module__, launcher.__name__, problem)
    if reference is None:
        return None
    device = next((x.device.type for x in given if isinstance(x, torch.Tensor)), "cpu")
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return reference(*given)
    with torch.autocast(device, enabled=False):  # the casts are made already
        return reference(*given)


# -- launches --------------------------------------------------------------------------------------


VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
DIRECT = (3, 6) <= VERSION <= (3, 9) and not torch.version.hip
"""Whether this Triton is one whose compiled kernels are known to be launched as `starter` does."""

launched = {}
"""Functions that launch what Triton compiled, by the arguments that it was compiled for."""


def interpreted():
    """Whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def repair():
    """Repair Triton's interpreter, which fusion-advisor can where it is installed."""
    try:
        from fusion_advisor.shipped.fused_interpreter import install
    except ModuleNotFoundError:
        warnings.warn(
            "Triton's interpreter cuts bfloat16 off where a GPU rounds, and has no libdevice: "
            "pip install fusion-advisor repairs it", stacklevel=5,
        )  # fmt: skip
    else:
        install()


@functools.cache
def tuned(function, device):
    """Numbers with which a search found a kernel of this text fastest on such a GPU: those of
    `tuning/GPU.json` beside the kernels, if it is there (`fusion-advisor emit --search`)."""
    gpu = re.sub(r"\W+", "_", torch.cuda.get_device_name(device))
    file = Path(function.__code__.co_filename).with_name("tuning") / f"{gpu}.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get(function.__name__)
        if found is None or found["text"] == fingerprint(function):
            return {**found["numbers"]} if found else {}
        problem = f"{function.__name__} has another text than the one that was measured"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"{file}: {problem}; search again, or delete it", stacklevel=6)
    return {}


def launch(kernel, grid, tensors, numbers, **constants):
    """Call `kernel[grid](...)`; `grid` may be a function of the constants. What Triton compiled
    for such arguments before is launched directly; then what launches it, the tensors and the other
    arguments are given back."""
    if here.asked is not None:
        if tensors[0].is_cuda:
            constants |= tuned(kernel.fn, tensors[0].device.index)
        grid = grid(constants) if callable(grid) else grid
        return here.asked.append((kernel, grid, (*tensors, *numbers), constants))
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, numbers, **constants)
    if device >= 0:
        constants |= tuned(kernel.fn, device)
    grid = grid(constants) if callable(grid) else grid
    odd = tuple(tensor.data_ptr() % 16 for tensor in tensors)
    key = id(kernel), device, grid, numbers, odd, *constants.values()
    known = launched.get(key)
    if known is not None:
        start, values = known
        start(*tensors, *values)
        return None if any(odd) else (start, tensors, values)
    if interpreted():
        repair()
    compiled = kernel[grid](*tensors, *numbers, **{"enable_fp_fusion": True} | constants)
    if DIRECT and compiled is not None:  # the interpreter compiles nothing
        if len(launched) == 4096:  # sizes keep changing
            launched.clear()
        values = [constants[name] for name in kernel.arg_names if name in constants]
        start = starter(compiled, (*grid, 1, 1)[:3], device)
        start.kernel = kernel  # kept alive, for its id is a key here and may be in `plans`
        launched[key] = start, (*numbers, *values)
    return None


def starter(compiled, grid, device):
    """Function that launches a compiled kernel as `compiled[grid]` does, in half of the host's
    time: what hooks are told is put together only where there are hooks. Pointers may be
    numbers."""
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


TRACED = FakeTensor, FunctionalTensor
"""Tensors that tracers run a launcher on."""

plans = {}
"""Allocations and launches of a call, by the launcher and the layout of what it was given."""


def plan_of(launcher, *tensors, numbers=()):
    """Layout of what a launcher was given; and where the tensors lie, with what was done for others
    of that layout and the same numbers. None where the launcher has to ask; what is traced calls
    its operator."""
    traced = isinstance(tensors[0], TRACED)
    if traced or is_compiling() or here.idle:
        # Dynamo traces this; export runs it on fake tensors, and so does the operator then.
        traced = is_dynamo_compiling() or (traced and not here.idle)
        return None, getattr(launcher, "operator", None) if traced else None
    if transformed():
        return None, None
    layout = [(launcher, *numbers)]
    for tensor in tensors:
        shape, stride, device = tensor.shape, tensor.stride(), tensor.get_device()
        layout += shape, stride, tensor.dtype, device, tensor.requires_grad, tensor.is_neg()
    layout = tuple(layout)
    plan = plans.get(layout)
    if plan is None:
        return layout, None
    ends, pointers = 0, [tensor.data_ptr() for tensor in tensors]
    for pointer in pointers:
        ends |= pointer
    graded = torch.is_grad_enabled() and True in layout[5::6]
    if ends % 16 or graded or layout[4] != torch.cuda.current_device():
        return None, None
    return layout, (pointers, plan)


def do_again(plan, *given):
    """Allocate and launch as before, or call an operator."""
    if type(plan) is not tuple:
        return plan(*given)
    pointers, (made, zeroed, steps, results) = plan
    held = []  # what is made begins at multiples of 16, as all that is allocated on a GPU
    for like, sizes, options in made:
        if like is None:
            held.append(torch.empty_strided(*sizes, **options))
        else:
            held.append(torch.empty_like(given[like]))
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
    """Way to make such a tensor: as one of the others is, which is quicker, or by sizes."""
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    for place, other in enumerate(others):
        same = other.shape == shape and other.stride() == stride and other.dtype == dtype
        if same and torch.empty_like(other).stride() == stride:
            return place, (), {}
    return None, (shape, stride), {"dtype": dtype, "device": tensor.device}


# -- random numbers, as the kernels make them ------------------------------------------------------


def seeded(run):
    """Decorator of a launcher whose last two tensors are seed and offset: either may be missing, or
    a number."""
    signature = inspect.signature(run)
    count = len(signature.parameters)

    @functools.wraps(run)
    def drawn(*given, **named):
        if named:
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            given = bound.args
        *tensors, seed, offset = (*given, None, None)[:count]
        return run(*tensors, *random_state(seed, offset, tensors[0].device))

    return drawn


def random_state(seed, offset, device):
    """Seed and offset as the kernels read them: one int64 each, on the device."""
    if seed is None:
        seed, _, drawn = torch.randint(2**63 - 1, (3,), device=device)  # 16 bytes apart
        offset = drawn if offset is None else offset
    offset = 0 if offset is None else offset
    state = (seed, offset)
    return [
        s.reshape(()) if isinstance(s, torch.Tensor) else torch.full((), s, device=device)
        for s in state
    ]


def philox(seed, offset, stream, number):
    """The four words of some blocks, as the kernels make them."""
    low = 2**32 - 1
    a, b = number & low, (number >> 32) + (stream << 16)
    c, d = offset & low, offset >> 32 & low
    left, right = seed & low, seed >> 32 & low
    for _ in range(7):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (second >> 32 & low) ^ b ^ left, second & low
        c, d = (first >> 32 & low) ^ d ^ right, first & low
        left, right = (left + 0x9E3779B9) & low, (right + 0xBB67AE85) & low
    return torch.stack([a, b, c, d], -1)


def random_bits(shape, share, seed, offset, stream, device):
    """The kernels' random bits, `share` elements to a block, as signed 32-bit numbers."""
    count = torch.Size(shape).numel()
    number = torch.arange(-(-count // share), device=device)
    words = philox(seed, offset, stream, number)
    if share == 8:
        words = torch.stack([words, (words << 16 | words >> 16) & (2**32 - 1)], -1)
    return ((words.flatten()[:count] ^ 2**31) - 2**31).reshape(shape)


def laid_out(values, x, dtype):
    """Values in another dtype, in memory as x is."""
    return torch.empty_like(x, dtype=dtype).copy_(values)


def dropped(x, bits, p):
    """Zero with probability p, else divided by 1 - p; and which elements are kept."""
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    kept = laid_out(bits >= min(round(p * 2**32), 2**32 - 1) - 2**31, x, torch.bool)
    return x * kept * (1.0 / (1.0 - p)), kept


def chance(bits, p):
    """True with probability p, to 2**-32."""
    return bits >= min(round((1.0 - p) * 2**32), 2**32 - 1) - 2**31 if p else bits != bits


def random_digits(digits, bits):
    """Binary digits as an integer, and the dtype that holds them."""
    if len(bits) == 1:
        return bits[0] & 2**digits - 1, torch.float32
    above = digits - 26
    return (bits[0] & 2**above - 1) * 2**26 + (bits[1] & 2**26 - 1), torch.float64


def uniform(digits, *bits):
    """Multiples of 2**-digits from 0 to 1, 1 left out."""
    number, dtype = random_digits(digits, bits)
    return number.to(dtype) * 2.0**-digits


def between(digits, *bits):
    """Odd multiples of 2**-digits between 0 and 1."""
    number, dtype = random_digits(digits - 1, bits)
    return (number * 2 + 1).to(dtype) * 2.0**-digits


def normal(radius, angle):
    """Normal numbers from pairs of uniform ones (Box and Muller)."""
    return torch.sqrt(torch.log(radius) * -2.0) * torch.cos(angle * (2.0 * torch.pi))


# -- python FOLDER/fused_runtime.py [NAME ...] --check --bench -------------------------------------


def drawn(inputs, device, seed=0):
    """Random tensors, the same each time, by shape, strides (None: dense), dtype and range of
    integers; a number is itself."""
    torch.manual_seed(seed)
    for given in inputs:
        if isinstance(given, float):
            yield given
            continue
        shape, stride, dtype, *bounds = given
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)),)
        draw = functools.partial(torch.randint, *bounds) if bounds else torch.randn
        yield draw(size, device=device).to(dtype).as_strided(shape, stride)


class InFloat64(TorchDispatchMode):
    """Mode that runs every operation in float64, whatever dtype it names."""

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


def called(function, tensors):
    """Results of a call as a tuple."""
    found = function(*tensors)
    return found if isinstance(found, tuple) else (found,)


def truth(reference, number, inputs, device, seed):
    """A result of the reference as it is and in float64."""
    tensors = [*drawn(inputs, device, seed)]
    eager = called(reference, tensors)[number]
    with InFloat64():
        return eager, called(reference, [*map(widened, tensors)])[number]


def errors(found, exact):
    """The error of each element; 0 where one is not finite."""
    error = (found.double() - exact.double()).abs()
    return torch.where(error.isfinite(), error, 0.0)


def apart(found, exact):
    """The largest error, among what is finite."""
    return errors(found, exact).max().item()


def rounded(dtype, exact, tolerance):
    """Error that roundings to the dtype may make of the largest result."""
    ulps = tolerance.get(str(dtype).removeprefix("torch."), tolerance["narrow"])
    top = apart(exact, torch.zeros_like(exact)) or torch.finfo(dtype).tiny
    return ulps * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))


def differentiated(function, names):
    """Function that makes the gradients of the named inputs of a function."""

    def gradients(*tensors):
        given = zip(inspect.signature(function).parameters, tensors, strict=True)
        leaves = {name: tensor.detach() for name, tensor in given}
        wanted = [leaves[name].requires_grad_() for name in names]
        with torch.enable_grad():
            made = [each for each in called(function, leaves.values()) if each.requires_grad]
            numbers = [torch.linspace(-1, 1, each.numel()).bfloat16() for each in made]
            given = [n.view(each.shape).to(each) for n, each in zip(numbers, made, strict=True)]
            return torch.autograd.grad(made, wanted, given)

    return gradients


def check(name, function, reference, tolerance, inputs, device):
    """Print the errors of a function beside those of its reference, both against float64; does
    each hold?"""
    holds, factor, least = True, tolerance["factor"], tolerance["elements"]
    for number, ours in enumerate(called(function, [*drawn(inputs, device)])):
        eager, exact = truth(reference, number, inputs, device, 0)
        error, own, seen = apart(ours, exact), apart(eager, exact), eager.numel()
        if ours.dtype.is_floating_point:
            wrong = ~ours.double().isfinite() & exact.isfinite() & eager.double().isfinite()
            slack = rounded(ours.dtype, exact, tolerance)
        else:
            wrong, slack = (ours != exact) & (ours != eager), math.inf
        while error > factor * own + slack and seen < least:  # eager alone is drawn again
            own = max(own, apart(*truth(reference, number, inputs, device, seen)))
            seen += eager.numel()
        allowed = factor * own + slack
        far = (wrong | (errors(ours, exact) > allowed)).sum().item()
        near = far <= tolerance.get("decided", 0.0) * ours.numel()  # steps that are taken elsewhere
        print(f"{name}: {[*ours.shape]} {ours.dtype}: error {error:.3g},", end=" ")
        print(f"eager's {own:.3g}, allowed {allowed:.3g}:", "near enough" if near else "TOO FAR")
        holds = holds and near
    return holds


def bench(name, kernel):
    """Print how long a call of each way keeps the GPU busy at the graph's sizes, with a cold L2."""
    tensors, beside = [*drawn(kernel.FULL, "cuda")], getattr(kernel, "BESIDE", {})
    ways = {"kernel": getattr(kernel, name), "eager": kernel.reference, **beside}
    ways["torch.compile"] = torch.compile(kernel.reference, dynamic=False)
    for way, call in ways.items():
        call = functools.partial(call, *tensors)
        milliseconds = triton.testing.do_bench(call, return_mode="median")
        print(f"{name}: {way}: {1e3 * milliseconds:.2f} us")


def main():
    """Run the command line. Without a GPU the check runs through Triton's interpreter."""
    parser = argparse.ArgumentParser(description="the kernels of this folder beside eager")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a kernel (default: all)")
    parser.add_argument("--check", action="store_true", help="errors against float64 (default)")
    parser.add_argument("--bench", action="store_true", help="times on a GPU")
    asked, files = parser.parse_args(), sorted(Path(__file__).parent.glob("*.py"))
    known = [file.stem for file in files if IMPORT in file.read_text("utf-8")]
    for name in {*asked.names} - {*known}:
        sys.exit(f"{name}: is no kernel of this folder, which has {', '.join(known) or 'none'}")
    if not interpreted() and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ["FUSION_ADVISOR_STRICT"] = "1"  # the kernel's own answer, or none
    near, device = True, "cpu" if interpreted() else "cuda"
    for name in asked.names or known:
        kernel = importlib.import_module(f"{__package__}.{name}")
        launcher = getattr(kernel, name)
        ways = {name: (launcher, kernel.reference)}
        ways[f"gradients of {name}"] = getattr(launcher, "graded", None)
        sizes = (kernel.SMALL,) if interpreted() else (kernel.SMALL, kernel.FULL)
        with torch.no_grad():
            for inputs in sizes if asked.check or not asked.bench else ():
                for what, both in ways.items():
                    if both:
                        near = check(what, *both, kernel.TOLERANCE, inputs, device) and near
            if asked.bench and interpreted():
                sys.exit(f"{name}: --bench times on a GPU, and there is none here")
            if asked.bench:
                bench(name, kernel)
    sys.exit(not near)


if __name__ == "__main__":  # the kernels import this file as one of a package
    package = sys.modules["fused_kernels"] = types.ModuleType("fused_kernels")
    package.__path__ = [str(Path(__file__).resolve().parent)]
    importlib.import_module(f"fused_kernels.{Path(__file__).stem}").main()
