"""Operators kept whole: the CPU build would expand what a CUDA build runs as one kernel."""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusion_advisor.frontend import trained
from fusion_advisor.frontend.expansions import (
    ExpandedLaunch,
    ExpandedOutput,
    Expansion,
    Slot,
    TracedValue,
    dense,
    describe,
    freeze,
    layout_of,
    permuted,
    returned,
    schema_values,
    values_in,
)
from fusion_advisor.frontend.recurrent import RECURRENT, output_shape
from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.ops.attention import ATTENTION, EFFICIENT_BACKWARD, FLASH_BACKWARD

_log = logging.getLogger(__name__)

aten = torch.ops.aten


def _rms_norm(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion | None:
    """`rms_norm` is one fused kernel on CUDA where input and weight agree in dtype."""
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = layout_of(given["input"])
    weight = given.get("weight")
    if weight is not None and layout_of(weight).dtype != x.dtype:
        return None
    whole = _fused_rms_norm(args, kwargs, slots)
    return replace(whole, result=whole.result[0])


def _fused_rms_norm(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion:
    """The same kernel by its own name, as the reference of an emitted file calls it: the result,
    and the scale of each row."""
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = layout_of(given["input"])
    normalized = len(given["normalized_shape"])
    rows = x.shape[: len(x.shape) - normalized] + (1,) * normalized
    statistics = "float32" if x.dtype in ("float16", "bfloat16") else x.dtype
    out = dense(x.shape, x.dtype)
    call = tuple(freeze(given.get(name), slots) for name in names)
    return _single("aten._fused_rms_norm.default", call, (), (out, dense(rows, statistics)), None)


def _attention(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion | None:
    """Flash or memory-efficient attention: one kernel for [B, H, S, D] operands.

    Flash lays its output out as the query is, memory-efficient attention as [B, S, H, D]. The
    logsumexp that the kernel also writes is not modelled. Operands of other ranks than 4 take the
    unfused path on CUDA too.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, value = layout_of(given["query"]), layout_of(given["value"])
    if len(query.shape) != 4 or len(value.shape) != 4 or query.dtype == "float64":
        return None
    batch, heads, length, _ = query.shape
    width = value.shape[-1]
    flash = query.dtype in ("float16", "bfloat16") and given.get("attn_mask") is None
    order = (0, 2, 1, 3)
    if flash and query.stride[1] > query.stride[2]:
        order = (0, 1, 2, 3)
    out = permuted((batch, heads, length, width), order, query.dtype)
    frozen = tuple(freeze(arg, slots) for arg in args)
    options = tuple((name, freeze(arg, slots)) for name, arg in kwargs.items())
    return _single(ATTENTION, frozen, options, (out,), 0)


def _trained_attention(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion:
    """Attention of a training step, which also writes the logsumexp of each row."""
    query, key, value, mask, *options = args
    *plain, scale, grouped = options
    given = (query, key, value, mask, *plain)
    named = {"scale": scale, "enable_gqa": grouped}
    whole = _attention(given, named, slots)
    assert whole is not None  # other operands are never made into this operator
    (launch,) = whole.launches
    shape = layout_of(query).shape[:-1]
    outputs = (*launch.outputs, ExpandedOutput(dense(shape, "float32"), None))
    return replace(
        whole, launches=(replace(launch, outputs=outputs),), result=(Slot(0, 0), Slot(0, 1))
    )


def _attention_backward(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion:
    """Backward of attention: one kernel for the gradients of query, key and value, and of a mask
    that is trained."""
    grad, query, key, value, mask, out, logsumexp, trained_mask, *options = args
    flash = layout_of(query).dtype in ("float16", "bfloat16") and mask is None
    given = (grad, query, key, value, *(() if flash else (mask,)), out, logsumexp)
    outputs = tuple(
        replace(layout_of(each), storage=-1, offset=0)
        if layout_of(each).numel == layout_of(each).extent
        else dense(layout_of(each).shape, layout_of(each).dtype)
        for each in (query, key, value, *((mask,) if trained_mask else ()))
    )
    call = tuple(freeze(each, slots) for each in (*given, *options))
    made = _single(FLASH_BACKWARD if flash else EFFICIENT_BACKWARD, call, (), outputs, None)
    return replace(made, result=(*made.result, None)[:4])


def _rms_norm_backward(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion:
    """Backward of RMSNorm: one call for the gradients of the input and of the weight."""
    _, x, _, _, weight = args
    outputs = [dense(layout_of(x).shape, layout_of(x).dtype)]
    if weight is not None:
        outputs.append(dense(layout_of(weight).shape, layout_of(weight).dtype))
    call = (*(freeze(each, slots) for each in args), (True, weight is not None))
    made = _single("aten._fused_rms_norm_backward.default", call, (), tuple(outputs), None)
    return replace(made, result=(*made.result, None)[:2])


def _native_batch_norm(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion | None:
    """The same kernel as it is trained: the result with the statistics of the batch."""
    whole = _batch_norm(args, kwargs, slots)
    return whole and replace(whole, result=tuple(Slot(0, output) for output in range(3)))


def _batch_norm(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion | None:
    """One kernel for both modes; in training it writes the running statistics in place."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum")
    given = dict(zip((*names, "eps"), args, strict=False)) | dict(kwargs)
    x = layout_of(given["input"])
    training = bool(given["training"])
    channels = (x.shape[1] if training else 0,)
    statistics = dense(channels, "float32" if x.dtype in ("float16", "bfloat16") else x.dtype)
    out = replace(x, storage=-1, offset=0)
    if 0 in x.stride or x.numel != x.extent:
        out = dense(x.shape, x.dtype)
    call = tuple(freeze(given.get(name), slots) for name in (*names, "eps"))
    running = (given.get("running_mean"), given.get("running_var"))
    written = tuple(slots[value.ref] for value in running if isinstance(value, TracedValue))
    expansion = _single(
        "aten.native_batch_norm.default", call, (), (out, statistics, statistics), 0
    )
    launch = replace(expansion.launches[0], written=written if training else ())
    return replace(expansion, launches=(launch,))


def _recurrent(operator: Any) -> Callable[[Any, Any, dict[Ref, Slot]], Expansion]:
    """One node for a recurrent layer: every step's state, then the last states."""

    def whole(args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion:
        x = layout_of(args[0])
        states = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        last = [dense(layout_of(state).shape, x.dtype) for state in states]
        shape = output_shape(x.shape, last[0].shape, bool(args[7]))
        out = permuted(shape, (1, 0, 2), x.dtype) if args[8] else dense(shape, x.dtype)
        call = tuple(freeze(arg, slots) for arg in args)
        return _single(str(operator), call, (), (out, *last), None)

    return whole


_WHOLE: dict[Any, Callable[[Any, Any, dict[Ref, Slot]], Expansion | None]] = {
    trained.ATTENTION: _trained_attention,
    trained.ATTENTION_BACKWARD: _attention_backward,
    trained.RMS_NORM: _fused_rms_norm,
    trained.RMS_NORM_BACKWARD: _rms_norm_backward,
    aten.native_batch_norm.default: _native_batch_norm,
    aten.batch_norm.default: _batch_norm,
    aten.rms_norm.default: _rms_norm,
    aten._fused_rms_norm.default: _fused_rms_norm,
    **{operator: _recurrent(operator) for operator in RECURRENT},
    aten.scaled_dot_product_attention.default: _attention,
}


def whole_operator(target: Any, args: Any, kwargs: Any, slots: dict[Ref, Slot]) -> Expansion | None:
    """The launches of an operator that must not be taken apart; None for any other."""
    try:
        rule = _WHOLE.get(target)
    except TypeError:
        return None
    return rule(args, kwargs, slots) if rule else None


def _single(
    op: str, args: Any, kwargs: Any, outputs: tuple[Tensor, ...], result: int | None
) -> Expansion:
    launch = ExpandedLaunch(
        op, args, kwargs, tuple(ExpandedOutput(tensor, None) for tensor in outputs), ()
    )
    slots = tuple(Slot(0, index) for index in range(len(outputs)))
    return Expansion((launch,), slots if result is None else slots[result])


def kept_whole(
    target: Any, args: Any, kwargs: Any, slots: dict[Ref, Slot], example: Any
) -> Expansion:
    """One node with the outputs that tracing saw, for an operator that cannot be expanded here."""
    written: list[Slot] = []
    for argument, value in schema_values(target, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [slots[operand.ref] for operand in values_in(value)]
    outputs = tuple(
        ExpandedOutput(describe(leaf), None) if isinstance(leaf, torch.Tensor) else None
        for leaf in returned(example)
    )
    launch = ExpandedLaunch(
        op_name(target),
        freeze(args, slots),
        tuple((name, freeze(value, slots)) for name, value in kwargs.items()),
        outputs,
        tuple(written),
    )
    results = tuple(Slot(0, index) if output else None for index, output in enumerate(outputs))
    single = not isinstance(example, (tuple, list))
    return Expansion((launch,), results[0] if single and results else results)


class Method:
    """A tensor method as a callable target, equal by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.name)(*args, **kwargs)

    def __str__(self) -> str:
        return f"method.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def op_name(target: Any) -> str:
    """A call's target as a node's `op` spells it."""
    if isinstance(target, (torch._ops.OpOverload, Method)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{getattr(target, '__name__', type(target).__name__)}".lstrip(".")
