"""Child process of `verify` that checks one emitted kernel against the model's graph in fp64.

A request is a `CheckJob`, a reply is a `Check`. Under the interpreter the environment needs
nothing: this module sets `TRITON_INTERPRET=1` itself when it finds no GPU.

What is held, for each case and seed:

- the outputs are those of the model's graph, by the criterion of `tolerance`;
- they lie in memory as the graph says: as the reference does on the meta device, which follows CUDA
  as the graph's fake tensors do. A CPU's eager may lay results out otherwise (a batch norm of a
  permuted tensor, a padding of channels-last images), so only its values are asked;
- inputs stay bit for bit as they were;
- interpreter: addresses in bounds, no races, traffic equal to the plan's to the byte, and no more
  elements asked for than the plan says, repeats included;
  GPU: a second launch gives the same bits.

And once for a kernel: its launcher refuses inputs that it was not made for, or gives what the graph
does; and offsets of 64 bits come to the same.
"""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import ast
import math
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import PROGRAMS, Case, Check, CheckJob, Criterion, Kernel
from fusion_advisor.shipped.files import HOST
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.kernel_fault import KernelFault, cause, process_folder
from fusion_advisor.support.worker import serve
from fusion_advisor.verify.stepping import LaunchMode, as_tuple, truth_of
from fusion_advisor.verify.tolerance import Error, Tensors, Truth, compare

DISTRIBUTIONS = ("normal", "special", "tiny", "large", "across", "faint")
"""Distributions of random inputs; seed s draws from entry s, cyclically. Every draw has one scale,
so that no small number hides behind a large one's error. In `large` each row of the last dimension
is on one side of zero, in `across` each column."""

_GUARD = 64
"""Poisoned elements around each input on a GPU, where addresses cannot be checked."""
_RARE = 8
"""Integers of which one, on average, is a number that the kernel compares them with."""
_ALIGNMENT = 64
"""Alignment of inputs in elements: a multiple of the alignment of every load."""

# --- inputs --------------------------------------------------------------------------------------


_SCALES = {"large": (1e3, 200.0), "across": (1e3, 200.0), "tiny": (1e-3, 1e-3)} | {
    "faint": (1e-13, 1e-2)
}
"""Factors on the numbers of a draw; the second is for float16, whose squares overflow sooner."""


def _floats(spec: Tensor, distribution: str, gen: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    values = torch.randn(spec.shape, generator=gen, dtype=torch.float64, device=gen.device)
    if distribution in ("large", "across"):  # far from zero: no element saves a wrong maximum
        shape = (*spec.shape[:-1], 1) if spec.shape else ()
        across = (*(1 for _ in spec.shape[:-1]), *spec.shape[-1:])
        sided = shape if distribution == "large" else across
        side = torch.randint(0, 2, sided, generator=gen, device=gen.device)
        values += 5.0 * (side * 2 - 1)
    values *= _SCALES.get(distribution, (1.0, 1.0))[dtype == torch.float16]
    if distribution == "special" and values.numel():
        _sprinkle(values, gen)
    top = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-top, top), values).to(dtype)


def _sprinkle(values: torch.Tensor, gen: torch.Generator) -> None:
    """Put NaN and ±inf into a third of the rows, one each, so that the other rows stay finite."""
    flat = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    odd = torch.tensor([math.nan, math.inf, -math.inf], dtype=values.dtype, device=gen.device)
    if flat.shape[0] == 1 and flat.shape[1] > 8:
        spots = torch.randperm(flat.shape[1], generator=gen, device=gen.device)[:3]
        flat[0, spots] = odd
        return
    rows = torch.arange(0, flat.shape[0], 2, device=gen.device)
    columns = torch.randint(flat.shape[1], rows.shape, generator=gen, device=gen.device)
    flat[rows, columns] = odd[rows // 2 % 3]


def _integers(
    spec: Tensor, bounds: tuple[int, int] | None, rare: Sequence[int], gen: torch.Generator
) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        return _flags(spec.shape, gen)
    low, high = bounds or ((0, 8) if spec.dtype.startswith("u") else (-8, 8))
    values = torch.randint(low, high, spec.shape, generator=gen, device=gen.device)
    if rare and values.numel():
        drawn = torch.tensor(rare, device=gen.device)
        which = torch.randint(0, len(rare), spec.shape, generator=gen, device=gen.device)
        some = torch.randint(0, _RARE, spec.shape, generator=gen, device=gen.device) == 0
        values = torch.where(some, drawn[which], values)
    return values.to(dtype)


def _flags(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """Random bools, with a quarter of the rows all false and a quarter all true."""
    of_rows = (*shape[:-1], 1) if shape else ()
    rows = torch.randint(0, 4, of_rows, generator=gen, device=gen.device)
    mixed = torch.randint(0, 2, shape, generator=gen, device=gen.device).bool()
    return torch.where(rows == 0, False, torch.where(rows == 1, True, mixed))


def _poison(storage: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with an odd byte pattern for a dtype without NaN."""
    if storage.is_floating_point():
        return storage.fill_(math.nan)
    storage.view(torch.uint8).fill_(0xA5)
    return storage


def _lay_out(
    spec: Tensor, others: Sequence[Tensor], values: torch.Tensor, held: dict[object, torch.Tensor]
) -> torch.Tensor:
    """Lay `values` out at the spec's strides and alignment, with poison in every gap: in memory of
    their own, or in the memory `held` for all `others` of the spec's storage. A broadcast dimension
    (stride 0) takes the values of its first index. A large offset is cut to the same alignment, so
    that a slice of a huge tensor stays small."""
    guard = _GUARD if values.device.type != "cpu" else 0
    first = min(other.offset for other in others)
    moved = _ALIGNMENT + first % _ALIGNMENT - first if first >= 2 * _ALIGNMENT else 0
    key = spec.storage, spec.dtype
    storage = held.get(key)
    if storage is None:
        extent = max(other.offset + other.extent for other in others) + moved
        storage = torch.empty(guard + extent + guard, dtype=values.dtype, device=values.device)
        _poison(storage)
        if len(others) > 1:
            held[key] = storage
    view = storage.as_strided(spec.shape, spec.stride, guard + spec.offset + moved)
    narrow = tuple(slice(None) if stride else slice(0, 1) for stride in spec.stride)
    view[narrow].copy_(values[narrow])
    return view


def build_inputs(case: Case, distribution: str, seed: int, device: str = "cpu") -> Tensors:
    """Build the case's tensors with random data; the same arguments give the same data."""
    gen = torch.Generator(device).manual_seed(seed)
    bounds = case.ranges or (None,) * len(case.inputs)
    held: dict[object, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    rare = case.rare or ((),) * len(case.inputs)
    for spec, limit, few in zip(case.inputs, bounds, rare, strict=True):
        floats = getattr(torch, spec.dtype).is_floating_point
        values = _floats(spec, distribution, gen) if floats else _integers(spec, limit, few, gen)
        alike = (spec.storage, spec.dtype)
        others = [x for x in case.inputs if x.storage >= 0 and (x.storage, x.dtype) == alike]
        made.append(_lay_out(spec, others or [spec], values, held))
    return tuple(made)


# --- references ----------------------------------------------------------------------------------


_HALF_TO_FLOAT = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)
"""Ops that may widen half precision in CUDA's eager; a CPU's eager refuses."""


class Float64Mode(LaunchMode):
    """Run every operation in float64, whatever float dtype it names or would return."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HALF_TO_FLOAT:
            args = (*args[:2], False)  # half_to_float: float64 is wide enough
        widened = tree_map(_widen, (args, kwargs or {}))
        if func is torch.ops.aten._fused_rms_norm.default:
            return _rms_norm(*widened[0])
        if func is torch.ops.aten.native_group_norm.default:
            return _group_norm(*widened[0])
        if func is torch.ops.aten.native_batch_norm.default and not widened[0][5]:
            return _batch_norm(*widened[0])
        return tree_map(_widen, func(*widened[0], **widened[1]))


def _rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> Any:
    """RMS norm by its definition: CUDA's kernel takes moments, which an infinity turns into NaN for
    a whole row."""
    dims = tuple(range(-len(shape), 0))
    scale = torch.rsqrt(x.square().mean(dims, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
    return x * scale if weight is None else x * scale * weight, scale


def _group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, area: int, groups: int, eps: float
) -> Any:
    """Group norm by its definition. A CPU's kernel always, and CUDA's unless a channel is one
    place, subtracts the mean after scaling, which an infinite weight turns into NaN."""
    grouped = x.reshape(batch, groups, -1)
    mean = grouped.mean(-1, keepdim=True)
    scale = torch.rsqrt((grouped - mean).square().mean(-1, keepdim=True) + eps)
    normal = ((grouped - mean) * scale).reshape(batch, channels, area)
    normal = normal if weight is None else normal * weight[:, None]
    normal = normal if bias is None else normal + bias[:, None]
    return normal.reshape(x.shape), mean[..., 0], scale[..., 0]


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm with given statistics, by its definition, as CUDA's kernel computes it: a CPU's
    kernel subtracts the mean after scaling."""
    del training, momentum

    def by_channel(values: Any) -> Any:
        return values.reshape(-1, *(1,) * (x.dim() - 2))

    normal = (x - by_channel(mean)) * by_channel(torch.rsqrt(var + eps))
    normal = normal if weight is None else normal * by_channel(weight)
    normal = normal if bias is None else normal + by_channel(bias)
    return normal, x.new_empty(0), x.new_empty(0)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value if value.dtype == torch.float64 else value.double()
    return value


def _widen_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy of a tensor in float64, with the tensor's own strides."""
    if not tensor.is_floating_point():
        return tensor
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    wide = tensor.as_strided((size,), (1,), 0).double()
    return wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _AsCuda(LaunchMode):
    """Mode that makes a CPU's eager round as CUDA's kernels do. Prefix sums and products of float32
    run in float32: a CPU's run in float64, and their results would be more exact than any kernel. A
    softmax that widens half precision widens first."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HALF_TO_FLOAT and args[2]:
            return func(args[0].float(), args[1], False)
        combine = _SCANS.get(func)
        if combine and args[0].dtype == torch.float32 and args[0].dim() and not kwargs:
            x, dim = args
            return _scanned(x, dim, combine)
        return func(*args, **(kwargs or {}))


_SCANS = {
    torch.ops.aten.cumsum.default: torch.add,
    torch.ops.aten.cumprod.default: torch.mul,
}


def _scanned(x: Any, dim: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine each element with all elements before it, twice as many with each step."""
    length, step = x.shape[dim], 1
    while step < length:
        before, after = x.narrow(dim, 0, length - step), x.narrow(dim, step, length - step)
        x = torch.cat((x.narrow(dim, 0, step), combine(before, after)), dim)
        step *= 2
    return x


def truth(call: Callable[..., Any], inputs: Tensors) -> Truth:
    """Reference results of a call, which kernels are compared with."""

    def exactly() -> Tensors:
        wide = [_widen_storage(tensor) for tensor in inputs]
        with Float64Mode():
            return as_tuple(call(*wide))

    return truth_of(lambda: _eagerly(call, inputs), exactly)


def _eagerly(call: Callable[..., Any], inputs: Tensors) -> Tensors:
    """Results of eager, as CUDA's kernels round."""
    with nullcontext() if any(tensor.is_cuda for tensor in inputs) else _AsCuda():
        return as_tuple(call(*inputs))


def _check_layouts(call: Callable[..., Any], inputs: Tensors, ours: Tensors) -> None:
    """Raise KernelFault where an output has other strides than the graph gives it at these
    sizes."""
    meta_inputs = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs
    ]
    for index, (mine, theirs) in enumerate(zip(ours, as_tuple(call(*meta_inputs)), strict=True)):
        got, expected = (_strides_that_matter(tensor) for tensor in (mine, theirs))
        if mine.numel() and got != expected:
            raise KernelFault(f"output {index} has strides {got}, the graph says {expected}")


def _strides_that_matter(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


# --- the launch ----------------------------------------------------------------------------------

_ALLOCATORS = ("empty_strided", "empty", "empty_like")


@contextmanager
def poisoned_outputs() -> Generator[None, None, None]:
    """Poison every tensor that the launcher allocates: it starts as NaN or an odd pattern."""
    originals = {name: getattr(torch, name) for name in _ALLOCATORS}

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            _poison(tensor.as_strided((size,), (1,), 0))
            return tensor

        return wrapper

    for name, original in originals.items():
        setattr(torch, name, poisoning(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _launch(module: ModuleType, entry: str, inputs: Tensors) -> Tensors:
    before = [tensor.untyped_storage().clone() for tensor in inputs]
    try:
        with poisoned_outputs():
            result = as_tuple(getattr(module, entry)(*inputs))
    except Exception as error:
        raise KernelFault(cause(error)) from error
    for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
        after = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        after.set_(tensor.untyped_storage())
        kept = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        kept.set_(copy)
        if not torch.equal(after, kept):
            raise KernelFault(f"input {index} was changed by the kernel")
    return result


# --- what a launcher refuses ---------------------------------------------------------------------


def check_refusals(
    kernel: Kernel, module: ModuleType, yardstick: Callable[..., Any], case: Case, run: Run
) -> None:
    """Hand the launcher inputs that it was not made for, one changed at a time: it refuses them, or
    gives what the model's graph does. Raises KernelFault where it does neither."""
    given = run.inputs(case)
    for place, name in enumerate(kernel.inputs[: len(given)]):
        for what, changed in _others(given[place]):
            inputs = (*given[:place], changed, *given[place + 1 :])
            try:
                with _limited(module, case.programs):
                    ours = _taken(module, kernel.entry, inputs)
                if ours is not None:
                    _check_agreement(yardstick, inputs, ours, run.criterion)
            except KernelFault as fault:
                raise KernelFault(f"{name} {what}: {fault}") from fault


def _taken(module: ModuleType, entry: str, inputs: Tensors) -> Tensors | None:
    """Results of a launcher for inputs that it may refuse; None where it does, however it says so.
    Raises KernelFault where it launches something that fails."""
    launches: list[Any] = []

    def noted(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            launches.append(given)
            return launch(*given, **more)

        return call

    with _instead(module, "launch", noted):
        try:
            return as_tuple(getattr(module, entry)(*inputs))
        except Exception as error:
            if not launches:  # no result, so none that is wrong
                return None
            raise KernelFault(f"taken, and its kernel fails: {cause(error)}") from error


@contextmanager
def _instead(
    module: ModuleType, name: str, other: Callable[[Any], Any]
) -> Generator[None, None, None]:
    """Give a kernel's file another function of the runtime, made of its own."""
    host: Any = getattr(module, HOST, module)
    own = getattr(host, name)
    setattr(host, name, other(own))
    try:
        yield
    finally:
        setattr(host, name, own)


def check_width(
    kernel: Kernel, module: ModuleType, yardstick: Callable[..., Any], case: Case, run: Run
) -> None:
    """Launch as if some offset were beyond 32 bits: the launcher asks it of every result, and its
    kernels give the same. Raises KernelFault."""
    inputs, asked = run.inputs(case), list[torch.Tensor]()

    def beyond(tensors: Sequence[torch.Tensor], *counted: int, behind: int = 0) -> bool:
        del counted, behind
        asked.extend(tensors)
        return True

    with _limited(module, case.programs), _instead(module, "beyond_int32", lambda _: beyond):
        ours = _launch(module, kernel.entry, inputs)
    if not {tensor.data_ptr() for tensor in ours if tensor.numel()} <= {
        x.data_ptr() for x in asked
    }:
        raise KernelFault("no launch asks whether offsets in a result are beyond 32 bits")
    _check_agreement(yardstick, inputs, ours, run.criterion)


def _others(tensor: torch.Tensor) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Tensors of the same numbers that a launcher may take for another: of a dtype, a layout, a
    place in memory, a rank or a size of its own, or one that requires a gradient."""
    for dtype in _OTHER_DTYPES.get(tensor.dtype, ()):
        yield f"in {str(dtype).removeprefix('torch.')}", tensor.to(dtype)
    if tensor.dim() and tensor.shape[-1] > 1:
        spread = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2]
        yield "with gaps between its elements", spread.copy_(tensor)
    if tensor.dim() > 1 and min(tensor.shape[-2:]) > 1:
        turned = torch.empty_like(tensor.transpose(-1, -2), memory_format=torch.contiguous_format)
        yield "with columns in rows' place", turned.transpose(-1, -2).copy_(tensor)
        yield "with another row", torch.cat((tensor, tensor[..., :1, :]), -2)
    apart = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    yield "one element further in memory", apart.copy_(tensor)
    yield "with a dimension more", tensor[None]
    if tensor.is_floating_point():
        yield "that requires a gradient", tensor.detach().clone().requires_grad_()


_GROSS = 16
"""Times eager's error, and ulps, beyond which a result of one small draw is another one."""
_OTHER_DTYPES = {
    torch.float64: (torch.float32,),
    torch.float32: (torch.float16, torch.float64),
    torch.bfloat16: (torch.float16, torch.float32),
    torch.float16: (torch.bfloat16, torch.float32),
    torch.int64: (torch.int32,),
    torch.int32: (torch.int64,),
}


def _check_agreement(
    yardstick: Callable[..., Any], inputs: Tensors, ours: Tensors, criterion: Criterion
) -> None:
    """Raise KernelFault where results of inputs that a launcher took are not the graph's."""
    try:
        eager = truth(yardstick, inputs)
    except Exception as error:
        raise KernelFault(f"taken, and eager refuses it: {cause(error)}") from error
    graded = any(tensor.requires_grad for tensor in _eagerly(yardstick, inputs))
    if graded and not any(tensor.requires_grad for tensor in ours):
        raise KernelFault("taken, and the results have no gradient")
    grossly = replace(criterion, factor=_GROSS, ulps=_GROSS, eager_elements=1)
    compare(tuple(tensor.detach() for tensor in ours), eager, grossly)
    _check_layouts(yardstick, inputs, ours)


# --- one kernel ----------------------------------------------------------------------------------


def _describe(case: Case) -> str:
    tensors = (f"{'x'.join(map(str, t.shape)) or 'scalar'} {t.dtype}" for t in case.inputs)
    return f"{case.name}: {', '.join(tensors)}"


def _check_traffic(case: Case, loaded: int, stored: int) -> None:
    for what, planned, seen in (
        ("loaded", case.loaded_bytes, loaded),
        ("stored", case.stored_bytes, stored),
    ):
        if planned is not None and planned != seen:
            raise KernelFault(f"{what} {seen} bytes, the plan says {planned}")


def _check_requests(case: Case, loads: int, stores: int) -> None:
    """Raise KernelFault where a kernel asks for elements more often than its plan does."""
    for what, planned, seen in (("loads", case.loads, loads), ("stores", case.stores, stores)):
        if planned is not None and seen > planned:
            raise KernelFault(
                f"{what} {seen} elements, repeats included; the plan at most {planned}"
            )


def _launch_twice(kernel: Kernel, module: ModuleType, inputs: Tensors) -> Tensors:
    """Launch on a GPU. Raises KernelFault when a second launch gives other bits."""
    ours, again = (_launch(module, kernel.entry, inputs) for _ in range(2))
    if not all(_same_bits(a, b) for a, b in zip(ours, again, strict=True)):
        raise KernelFault("a second launch gave different bits")
    return ours


class Counted(Protocol):
    """Traffic of the launches of a check: distinct bytes, and elements, repeats counted."""

    loaded: int
    stored: int
    loads: int
    stores: int


@dataclass(frozen=True)
class Run:
    """One draw of a case's inputs, and how its launches run: on a GPU, or interpreted, which counts
    their traffic; None: it is not held to the plan's."""

    seed: int
    device: str
    criterion: Criterion
    counting: Callable[[], AbstractContextManager[Counted | None]] = nullcontext

    @property
    def distribution(self) -> str:
        return DISTRIBUTIONS[self.seed % len(DISTRIBUTIONS)]

    def inputs(self, case: Case, further: int = 0) -> Tensors:
        """The tensors of a case; `further` is added to the seed for other draws."""
        return build_inputs(case, self.distribution, self.seed + further, self.device)


def _judge(
    yardstick: Callable[..., Any], case: Case, run: Run, inputs: Tensors, ours: Tensors
) -> Error:
    """Compare results with eager and float64, and with further draws of eager's."""
    further = (truth(yardstick, run.inputs(case, 1000 * draw)) for draw in count(1))
    return compare(ours, truth(yardstick, inputs), run.criterion, case.summed, further)


def check_once(
    kernel: Kernel, module: ModuleType, yardstick: Callable[..., Any], case: Case, run: Run
) -> Error:
    """Check one case with one draw. Raises KernelFault where something is wrong."""
    inputs = run.inputs(case)
    try:
        if run.device != "cpu":
            with _limited(module, case.programs):
                ours, traffic = _launch_twice(kernel, module, inputs), None
        else:
            with run.counting() as traffic, _limited(module, case.programs):
                ours = _launch(module, kernel.entry, inputs)
        error = _judge(yardstick, case, run, inputs, ours)
        _check_layouts(yardstick, inputs, ours)
        if traffic:
            _check_traffic(case, traffic.loaded, traffic.stored)
            _check_requests(case, traffic.loads, traffic.stores)
        return error
    except KernelFault as fault:
        raise KernelFault(f"{_drawn(case, run)}: {fault}") from fault


@contextmanager
def _limited(module: ModuleType, programs: int) -> Generator[None, None, None]:
    """Let no more programs walk the rows than a case says; 0: as many as the file says."""
    own = {name: most for name, most in vars(module).items() if name.startswith(PROGRAMS)}
    if programs:
        vars(module).update(dict.fromkeys(own, programs))
    yield
    vars(module).update(own)


def _drawn(case: Case, run: Run) -> str:
    return f"case {case.name}, seed {run.seed} ({run.distribution})"


def yardstick_of(kernel: Kernel, module: ModuleType) -> Callable[..., Any]:
    """Computation of the model's graph. Raises KernelFault where the file's `reference` is
    another one."""
    if not kernel.yardstick:
        return module.reference
    scope = dict(vars(module))
    exec(compile(kernel.yardstick, f"<the graph of {kernel.name}>", "exec"), scope)
    told, own = (_function(text) for text in (kernel.yardstick, kernel.text))
    if told != own:
        raise KernelFault("the file's reference is not the model's graph")
    return scope["reference"]


def _function(text: str) -> str:
    """Body of `reference` in a file, without its docstring."""
    made = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    body = next((each for each in made if each.name == "reference"), None)
    if body is None:
        return ""
    first, *rest = body.body
    said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return ast.dump(ast.Module(rest if said else body.body, [])) + ast.dump(body.args)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(left), _bytes_of(right))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as bytes, whatever the layout or rank."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check(
    kernel: Kernel,
    seeds: int,
    where: str,
    device: str,
    folder: Path,
    criterion: Criterion,
) -> Check:
    """Check every case with every seed; stops at the first failure."""
    passed = Check(kernel.name, where, True, tuple(_describe(case) for case in kernel.cases), seeds)
    worst, at = Error(), ""
    stepped = 0.0
    counting: Any = nullcontext
    if device == "cpu":
        from fusion_advisor.verify.interpreter import counting
    try:
        module = load_module(kernel.text, folder)
        if not kernel.cases or seeds < 1:
            raise KernelFault("nothing to check: no cases or no seeds")
        yardstick = yardstick_of(kernel, module)
        for case in kernel.cases:
            drawn = min(seeds, 2) if case.costly and device == "cpu" else seeds
            for seed in range(drawn):
                run = Run(seed, device, criterion, counting)
                error = check_once(kernel, module, yardstick, case, run)
                stepped = max(stepped, error.stepped)
                if error.ours >= worst.ours:
                    worst, at = error, _drawn(case, run)
        if kernel.yardstick:  # kernels that people wrote have launchers of their own
            small = min(kernel.cases, key=lambda case: sum(x.extent for x in case.inputs))
            first = Run(0, device, criterion)
            check_refusals(kernel, module, yardstick, small, first)
            if device == "cpu":  # elsewhere the plan of a call before is taken again
                check_width(kernel, module, yardstick, small, first)
    except KernelFault as fault:
        return replace(passed, passed=False, failure=" ".join(str(fault).split()))
    except Exception as error:  # noqa: BLE001 (the reference may raise anything: it is named)
        return replace(passed, passed=False, failure=f"the check itself failed: {cause(error)}")
    return replace(
        passed, max_error=worst.ours, eager_error=worst.eager, tolerance=worst.tolerance,
        case=at, stepped=stepped,
    )  # fmt: skip


# --- the child -----------------------------------------------------------------------------------


def prepare(where: str) -> tuple[str, str]:
    """Set the process up for `where` (auto, interpreter, gpu); returns its full name and torch's
    device. Raises KernelFault when a GPU is asked for and there is none."""
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    has_gpu = where != "interpreter" and torch.cuda.is_available()
    if has_gpu:
        os.environ.pop("TRITON_INTERPRET", None)
        return f"cuda:{torch.cuda.get_device_name()}", "cuda"
    if where == "gpu":
        raise KernelFault("verification on a GPU was asked for and torch sees none")
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from fusion_advisor.verify.interpreter import install

    install()
    return "interpreter", "cpu"


def main(where: str) -> None:
    """Run the child: `where` is auto, interpreter or gpu."""
    warnings.simplefilter("ignore")
    try:
        place, device = prepare(where)
    except KernelFault as fault:
        missing = str(fault)
        serve({CheckJob: lambda job: Check(job.kernel.name, where, False, failure=missing)})
        return

    def checked(job: CheckJob) -> Check:
        return check(job.kernel, job.seeds, place, device, process_folder(), job.criterion)

    # other children check beside this one
    serve({CheckJob: checked}, torch.cuda.empty_cache if device == "cuda" else None)
