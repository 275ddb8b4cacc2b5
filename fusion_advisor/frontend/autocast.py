"""CUDA's autocast on a machine without CUDA: a CPU's casts as CUDA's would.

While `Casts.on_cpu` is active, autocast of a CPU has CUDA's operators and no others. What CUDA's
autocast does to a call is read from torch itself: the call runs on fake CUDA tensors with autocast
on. What it casts before its first launch are autocast's casts; without autocast the call has to
launch the same on operands that are cast so, by the dtype that autocast gives it.
"""
# torch is untyped here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusion_advisor.frontend.eager_trace import autocast_of, on_cuda
from fusion_advisor.frontend.expansions import hint
from fusion_advisor.support.errors import CaptureError

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class _Form:
    """Call of an operator as autocast makes it: the operator, the dtype of each operand that is
    cast, by its position among the leaves, and that of the result where the operator is told it."""

    operator: Any
    casts: Mapping[int, torch.dtype]
    result: torch.dtype | None = None


@dataclass
class Casts:
    """Casts of a run. A parameter is cast once and kept, as autocast keeps it until it is left."""

    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor]]
    )
    _forms: dict[Any, _Form] = field(default_factory=dict[Any, _Form])

    @contextmanager
    def on_cpu(self) -> Generator[None, None, None]:
        """While active, autocast of a CPU casts as CUDA's does, from where it is switched on first:
        most models run without, and some hundred operators take a while to change."""
        plain = torch.set_autocast_enabled
        with ExitStack() as stack:
            change = functools.cache(lambda: stack.enter_context(self._changed()))

            def switched(device: Any, enabled: bool) -> None:
                if device == "cpu" and enabled:
                    change()
                plain(device, enabled)

            stack.enter_context(mock.patch.object(torch, "set_autocast_enabled", switched))
            if torch.is_autocast_enabled("cpu"):
                switched("cpu", True)
            yield

    @contextmanager
    def _changed(self) -> Generator[None, None, None]:
        """While active, autocast of a CPU has kernels that cast as CUDA's do."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of a CPU gives way
            for name, operator in _operators().items():
                kernel = self._kernel(operator) if operator else torch.library.fallthrough_kernel
                library.impl(name, kernel, "AutocastCPU")
        try:
            yield
        finally:
            library._destroy()

    @contextmanager
    def block(self, dtype: torch.dtype | None, *, enabled: bool) -> Generator[None, None, None]:
        """While active, autocast is on, in a dtype (None: CUDA's default), or off."""
        outermost = not torch.is_autocast_enabled("cpu")
        dtype = dtype or torch.get_autocast_dtype("cuda")
        with autocast_of("cpu", dtype if enabled else None):
            yield
        if outermost:
            self.kept.clear()

    @contextmanager
    def afresh(self) -> Generator[None, None, None]:
        """While active, no cast from before is known."""
        before, self.kept = self.kept, {}
        try:
            yield
        finally:
            self.kept = before

    def cast(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Call as the autocast that is on makes it: operator and arguments."""
        name = str(getattr(target, "_name", "")).removeprefix("aten::")
        if not torch.is_autocast_enabled("cpu") or not _operators().get(name):
            return target, args, kwargs
        wanted = torch.get_autocast_dtype("cpu")
        left = target._schema.arguments[len(args) :]
        unsaid = {each.name: each.default_value for each in left if each.has_default_value()}
        leaves, spec = pytree.tree_flatten((args, {**unsaid, **kwargs}))  # another may need them
        key = target, wanted, spec, *map(_frozen, leaves)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _form(target, leaves, spec, wanted)
        for at, dtype in form.casts.items():
            leaves[at] = self._cast(leaves[at], dtype, wanted)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        more = {} if form.result is None else {"dtype": form.result}
        return form.operator, args, {**kwargs, **more}

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, narrow: torch.dtype) -> torch.Tensor:
        leaf = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        if not leaf or tensor._is_view() or dtype != narrow:
            return tensor.to(dtype)
        known = self.kept.get(id(tensor))
        if known is None:
            known = self.kept[id(tensor)] = tensor, tensor.to(dtype)
        return known[1]

    def _kernel(self, operator: Any) -> Callable[..., Any]:
        def cast_and_call(*args: Any, **kwargs: Any) -> Any:
            called, args, kwargs = self.cast(operator, args, kwargs)
            with torch._C._ExcludeDispatchKeyGuard(_ON_CPU):
                return called(*args, **kwargs)

        return cast_and_call


@contextmanager
def blocks_on_cpu() -> Generator[None, None, None]:
    """While active, a block of CUDA's autocast is one of a CPU's, too."""

    def both(plain: Callable[..., None]) -> Callable[..., None]:
        def switched(device: Any, *value: Any) -> None:
            plain(device, *value)
            if device == "cuda":
                plain("cpu", *value)

        return switched

    with ExitStack() as stack:
        for name in ("set_autocast_enabled", "set_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, both(getattr(torch, name))))
        yield


@functools.cache
def _operators() -> dict[str, Any]:
    """Operators of ATen that CUDA's autocast knows, by name; None for those of a CPU's alone."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found: dict[str, Any] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        own = name.removeprefix("aten::")
        base, _, overload = own.partition(".")
        if has(name, "AutocastCUDA"):
            found[own] = getattr(getattr(torch.ops.aten, base), overload or "default")
        elif has(name, "AutocastCPU"):
            found[own] = None
    return found


def _frozen(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride()
    return repr(leaf)


class _Launched(TorchDispatchMode):
    """Writes down operators with the dtypes of their results, and the operand that a cast is of."""

    def __init__(self, operands: Sequence[Any]) -> None:
        super().__init__()
        self.operands = {id(each): at for at, each in enumerate(operands)}
        self.calls: list[tuple[Any, list[torch.dtype]]] = []
        self.cast: list[int | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = on_cuda(func, args, kwargs or {})
        if func.namespace == "prim":  # autocast asks each operand for its device
            return result
        self.calls.append((func, _dtypes(result)))
        self.cast.append(self.operands.get(id(args[0])) if func is _TO_COPY else None)
        return result


def _form(target: Any, leaves: Sequence[Any], spec: Any, dtype: torch.dtype) -> _Form:
    """Form of a call under autocast. Raises CaptureError where none launches what autocast does."""
    wanted, results = _run(leaves, spec, dtype, _Form(target, {}))
    before = zip(wanted.cast, wanted.calls, strict=True)
    first = list(takewhile(lambda each: each[0] is not None, before))
    told = _told(target) if results else []
    for count in range(len(first) + 1):  # the last of them may be the operator's own casts
        casts = {at: made[0] for at, (_, made) in first[:count] if at is not None}
        for form in (_Form(target, casts), *(_Form(each, casts, results[0]) for each in told)):
            try:
                found, same = _run(leaves, spec, None, form)
            except (RuntimeError, TypeError):  # operands of several dtypes, which autocast unites
                continue
            if found.calls == wanted.calls[count:] and same == results:
                return form
    raise CaptureError(f"what autocast makes of {target} is not known")


def _told(target: Any) -> list[Any]:
    """Overloads that are told the dtype of the result, the operator itself among them."""
    packet = target._overloadpacket
    found = [target, *(getattr(packet, name) for name in packet.overloads())]
    return [each for each in found if any(a.name == "dtype" for a in each._schema.arguments)]


def _run(
    leaves: Sequence[Any], spec: Any, dtype: torch.dtype | None, form: _Form
) -> tuple[_Launched, list[torch.dtype]]:
    """Launches of a call on fake CUDA tensors, and the dtypes of its results."""
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        twins = [_twin(leaf, form.casts.get(at)) for at, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(twins, spec)
        if form.result is not None:
            kwargs = {**kwargs, "dtype": form.result}
        with autocast_of("cuda", dtype), _Launched(twins) as launched:
            result = form.operator(*args, **kwargs)
    return launched, _dtypes(result)


def _twin(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Leaf of a call as a fake CUDA tensor, of another dtype on request."""
    if isinstance(leaf, torch.device):
        return torch.device("cuda", 0)
    if not isinstance(leaf, torch.Tensor):
        return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf
    shape, stride = [hint(n) for n in leaf.shape], [hint(n) for n in leaf.stride()]
    return torch.empty_strided(shape, stride, dtype=dtype or leaf.dtype, device="cuda")


def _dtypes(result: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
