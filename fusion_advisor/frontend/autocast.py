"""Casts of CUDA's autocast, on a machine without CUDA, in a form that autograd can follow.

What autocast does to a call is read from torch itself: the call runs on fake CUDA tensors with
autocast on. What it casts before its first launch are autocast's casts; without autocast the call
has to launch the same on operands that are cast so, by the dtype that autocast gives it. An
operator that autocast looks into (`cross_entropy`, of which it casts the softmax's operand) is
taken apart into the calls that it makes.
"""
# torch is untyped here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusion_advisor.frontend.eager_trace import cuda_autocast, on_cuda
from fusion_advisor.frontend.expansions import hint
from fusion_advisor.support.errors import CaptureError

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class _Form:
    """Call of an operator as autocast makes it: the dtype of each operand that is cast, by its
    position among the leaves, and that of the result where the operator is told it; or the graph of
    the calls that it is taken apart into."""

    casts: Mapping[int, torch.dtype]
    result: torch.dtype | None = None
    parts: torch.fx.GraphModule | None = None


@dataclass
class Autocast:
    """Autocast of a part of a graph; None: it is off. A parameter is cast once and kept, as CUDA's
    autocast keeps it, until the part ends."""

    dtype: torch.dtype | None
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor]]
    )
    _forms: dict[Any, _Form] = field(default_factory=dict[Any, _Form])

    def inside(self, dtype: torch.dtype | None) -> Autocast:
        """Autocast of a part within this one, which keeps casts together with it."""
        return Autocast(dtype, self.kept, self._forms)

    def afresh(self) -> Autocast:
        """The same with no cast kept."""
        return Autocast(self.dtype, {}, self._forms)

    def call(self, target: Any, args: Any, kwargs: Any, runs: Mapping[Any, Any]) -> Any:
        """Result of a call on operands that are cast as autocast casts them; `runs` has what is
        called in place of an operator."""
        if self.dtype is None or not isinstance(target, torch._ops.OpOverload):
            return runs.get(target, target)(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = target, self.dtype, spec, *map(_frozen, leaves)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _form(target, leaves, spec, self.dtype)
        if form.parts is not None:
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            return _Parts(form.parts, self, runs).run(*tensors)
        for at, dtype in form.casts.items():
            leaves[at] = self._cast(leaves[at], dtype)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        more = {} if form.result is None else {"dtype": form.result}
        return runs.get(target, target)(*args, **kwargs, **more)

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        leaf = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        if not leaf or tensor._is_view() or dtype != self.dtype:
            return tensor.to(dtype)
        known = self.kept.get(id(tensor))
        if known is None:
            known = self.kept[id(tensor)] = tensor, tensor.to(dtype)
        return known[1]


class _Parts(torch.fx.Interpreter):
    """Runs the calls that an operator is taken apart into."""

    def __init__(
        self, module: torch.fx.GraphModule, autocast: Autocast, runs: Mapping[Any, Any]
    ) -> None:
        super().__init__(module)
        self._autocast, self._runs = autocast, runs

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._autocast.call(target, args, kwargs, self._runs)


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
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _Form({})
    wanted, results = _run(target, leaves, spec, dtype, _Form({}))
    before = zip(wanted.cast, wanted.calls, strict=True)
    first = list(takewhile(lambda each: each[0] is not None, before))
    told = bool(results) and any(each.name == "dtype" for each in target._schema.arguments)
    for count in range(len(first) + 1):  # the last of them may be the operator's own casts
        casts = {at: made[0] for at, (_, made) in first[:count] if at is not None}
        for form in (_Form(casts), _Form(casts, results[0])) if told else (_Form(casts),):
            try:
                found, same = _run(target, leaves, spec, None, form)
            except (RuntimeError, TypeError):  # operands of several dtypes, which autocast unites
                continue
            if found.calls == wanted.calls[count:] and same == results:
                return form
    if target.has_kernel_for_dispatch_key(_COMPOSITE):
        return _Form({}, parts=_parts(target, leaves, spec))
    raise CaptureError(f"what autocast makes of {target} is not known")


def _parts(target: Any, leaves: Sequence[Any], spec: Any) -> torch.fx.GraphModule:
    """Graph of the calls that an operator makes, its tensors as inputs."""

    def whole(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(each, torch.Tensor) else each for each in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        twins = [_twin(leaf, None, "cpu") for leaf in leaves]
        tensors = [each for each in twins if isinstance(each, torch.Tensor)]
        apart = {target: partial(target._op_dk, _COMPOSITE)}
        return make_fx(whole, decomposition_table=apart, pre_dispatch=True)(*tensors)


def _run(
    target: Any, leaves: Sequence[Any], spec: Any, dtype: torch.dtype | None, form: _Form
) -> tuple[_Launched, list[torch.dtype]]:
    """Launches of a call on fake CUDA tensors, and the dtypes of its results."""
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        twins = [_twin(leaf, form.casts.get(at), "cuda") for at, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(twins, spec)
        if form.result is not None:
            kwargs = {**kwargs, "dtype": form.result}
        with cuda_autocast(dtype), _Launched(twins) as launched:
            result = target(*args, **kwargs)
    return launched, _dtypes(result)


def _twin(leaf: Any, dtype: torch.dtype | None, device: str) -> Any:
    """Leaf of a call as a tensor of a device, of another dtype on request."""
    if isinstance(leaf, torch.device):
        return torch.device(device, 0)
    if not isinstance(leaf, torch.Tensor):
        return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf
    shape, stride = [hint(n) for n in leaf.shape], [hint(n) for n in leaf.stride()]
    return torch.empty_strided(shape, stride, dtype=dtype or leaf.dtype, device=device)


def _dtypes(result: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
