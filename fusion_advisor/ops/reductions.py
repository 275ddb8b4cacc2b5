"""Ops that combine values along dimensions, and the normalisations that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import Call, formula, meaning_of, reduction
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.region.builder import Builder, Scalar, Value

Dim = int | Sequence[int] | None


def _dims(dim: Dim) -> tuple[int, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _in_result(b: Builder, x: Value) -> Value:
    """The operand in the dtype in which eager accumulates."""
    assert b.out is not None
    return b.cast(x, b.out.dtype)


# -- plain reductions ------------------------------------------------------------------------------


@reduction("aten.sum.default", "aten.sum.dim_IntList")
def sum_(b: Builder, x: Value, dim: Dim = None, keepdim: bool = False, dtype: Arg = None) -> Value:
    return b.reduce("sum", _in_result(b, x), _dims(dim), keepdim)


@reduction("aten.nansum.default")
def nansum(
    b: Builder, x: Value, dim: Dim = None, keepdim: bool = False, dtype: Arg = None
) -> Value:
    value = _in_result(b, x)
    known = b.apply("where", b.apply("ne", value, value), 0, value)
    return b.reduce("sum", known, _dims(dim), keepdim)


@reduction("aten.count_nonzero.dim_IntList", discrete=True)
def count_nonzero(b: Builder, x: Value, dim: Dim = None) -> Value:
    return b.reduce("sum", _in_result(b, _truth(b, x)), _dims(dim))


@reduction("aten.mean.default", "aten.mean.dim")
def mean(b: Builder, x: Value, dim: Dim = None, keepdim: bool = False, dtype: Arg = None) -> Value:
    return b.mean(_in_result(b, x), _dims(dim), keepdim)


def _extreme(b: Builder, op: str, x: Value, dims: tuple[int, ...], keepdim: bool = False) -> Value:
    if x.dtype == "bool":
        return b.apply("ne", b.reduce(op, b.cast(x, "int32"), dims, keepdim), 0)
    return b.reduce(op, x, dims, keepdim)


for _which in ("max", "min"):

    @reduction(f"aten.a{_which}.default", f"aten.{_which}.default")
    def _extremes(
        b: Builder, x: Value, dim: Dim = None, keepdim: bool = False, _op: str = _which
    ) -> Value:
        return _extreme(b, _op, x, _dims(dim), keepdim)

    @reduction(f"aten.{_which}.dim")
    def _extremes_with_places(
        b: Builder, x: Value, dim: int, keepdim: bool = False, _op: str = _which
    ) -> tuple[Value, Value]:
        return _extreme(b, _op, x, (dim,), keepdim), _arg(b, f"arg{_op}", x, (dim,), keepdim)

    @reduction(f"aten.arg{_which}.default", discrete=True)
    def _places(
        b: Builder, x: Value, dim: Dim = None, keepdim: bool = False, _op: str = _which
    ) -> Value:
        return b.reduce(f"arg{_op}", x, _dims(dim), keepdim)


@reduction("aten.aminmax.default")
def aminmax(
    b: Builder, x: Value, dim: int | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    dims = _dims(dim)
    return _extreme(b, "min", x, dims, keepdim), _extreme(b, "max", x, dims, keepdim)


def _arg(b: Builder, op: str, x: Value, dims: tuple[int, ...], keepdim: bool) -> Value:
    """The position of the extreme; its FLOPs are those of the pass that finds the extreme."""
    flops, special = b.flops, b.special_flops
    found = b.reduce(op, b.cast(x, "int32") if x.dtype == "bool" else x, dims, keepdim)
    b.flops, b.special_flops = flops, special
    return found


@reduction("aten.prod.default", "aten.prod.dim_int")
def prod(b: Builder, x: Value, dim: Dim = None, keepdim: bool = False, dtype: Arg = None) -> Value:
    return b.reduce("prod", _in_result(b, x), _dims(dim), keepdim)


@reduction("aten.any.default", "aten.any.dim", "aten.any.dims", discrete=True)
def any_(b: Builder, x: Value, dim: Dim = None, keepdim: bool = False) -> Value:
    return _extreme(b, "max", _truth(b, x), _dims(dim), keepdim)


@reduction("aten.all.default", "aten.all.dim", "aten.all.dims", discrete=True)
def all_(b: Builder, x: Value, dim: Dim = None, keepdim: bool = False) -> Value:
    return _extreme(b, "min", _truth(b, x), _dims(dim), keepdim)


def _truth(b: Builder, x: Value) -> Value:
    return x if x.dtype == "bool" else b.apply("ne", x, 0)


@dataclass(frozen=True)
class _Moments:
    """Mean, deviations and variance; mean and deviations keep the reduced dimensions."""

    mean: Value
    deviation: Value
    variance: Value


def _moments(
    b: Builder, x: Value, dim: Dim, correction: Scalar | None = 0, keepdim: bool = True
) -> _Moments:
    """Mean and variance in two passes over what is on chip, as exact as eager's Welford. What
    rounding took from the mean is subtracted from the deviations, which large means with small
    spreads need; these steps count as part of the mean's pass. The first mean has few digits."""
    dims = _dims(dim)
    count = b.count(x, dims)
    first = b.reduce("sum", x, dims, True) / count
    rough = replace(first, id=b.coarse(first.id))
    apart = x - rough
    flops, special = b.flops, b.special_flops
    left = b.reduce("sum", apart, dims, True) / count
    mean, deviation = rough + left, apart - left
    b.flops, b.special_flops = flops, special
    lost = 1 if correction is None else correction
    free = count if lost == 0 else b.apply("maximum", count - lost, 0.0)
    variance = b.reduce("sum", deviation * deviation, dims, keepdim) / free
    return _Moments(mean, deviation, variance)


@reduction("aten.var.correction")
def var(
    b: Builder, x: Value, dim: Dim = None, correction: Scalar | None = None, keepdim: bool = False
) -> Value:
    return _moments(b, x, dim, correction, keepdim).variance


@reduction("aten.std.correction")
def std(
    b: Builder, x: Value, dim: Dim = None, correction: Scalar | None = None, keepdim: bool = False
) -> Value:
    return b.apply("sqrt", _moments(b, x, dim, correction, keepdim).variance)


@reduction("aten.var_mean.correction")
def var_mean(
    b: Builder, x: Value, dim: Dim = None, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    found = _moments(b, x, dim, correction, keepdim)
    return found.variance, b.reshape(found.mean, found.variance.shape)


@reduction("aten.linalg_vector_norm.default")
def vector_norm(
    b: Builder,
    x: Value,
    ord: Scalar = 2,
    dim: Dim = None,
    keepdim: bool = False,
    dtype: Arg = None,
) -> Value:
    value, dims = _in_result(b, x), _dims(dim)
    if ord == 2:
        return b.apply("sqrt", b.reduce("sum", value * value, dims, keepdim))
    if ord == 1:
        return b.reduce("sum", b.apply("abs", value), dims, keepdim)
    if abs(ord) == float("inf"):
        return b.reduce("max" if ord > 0 else "min", b.apply("abs", value), dims, keepdim)
    if ord == 0:
        raise NotExpressible("a vector norm of order 0")
    total = b.reduce("sum", b.apply("pow", b.apply("abs", value), float(ord)), dims, keepdim)
    return b.apply("pow", total, 1.0 / ord)


@reduction("aten.norm.Scalar", "aten.norm.ScalarOpt_dim")
def norm(
    b: Builder, x: Value, p: Scalar | None = 2, dim: Dim = None, keepdim: bool = False
) -> Value:
    return vector_norm(b, x, 2 if p is None else p, dim, keepdim)


@reduction("aten._weight_norm_interface.default")
def weight_norm(b: Builder, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    """A weight whose slices along one dimension have the lengths `g`, and the lengths of `v`."""
    others = tuple(d for d in range(len(v.shape)) if d != dim % len(v.shape))
    length = b.apply("sqrt", b.reduce("sum", v * v, others, True))
    return v * (g / length), length


# -- softmax ---------------------------------------------------------------------------------------


@reduction("aten._softmax.default")
def softmax(b: Builder, x: Value, dim: int, half_to_float: bool = False) -> Value:
    raised = b.apply("exp", x - b.reduce("max", x, (dim,), True))
    return raised / b.reduce("sum", raised, (dim,), True)


@reduction("aten._log_softmax.default")
def log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool = False) -> Value:
    shifted = x - b.reduce("max", x, (dim,), True)
    return shifted - b.apply("log", b.reduce("sum", b.apply("exp", shifted), (dim,), True))


@reduction("aten.logsumexp.default")
def logsumexp(b: Builder, x: Value, dim: Dim, keepdim: bool = False) -> Value:
    """log Σ exp. The shift is 0 where the maximum is infinite, as in eager."""
    dims = _dims(dim)
    peak = b.reduce("max", _in_result(b, x), dims, True)
    safe = b.apply("where", b.apply("eq", b.apply("abs", peak), float("inf")), 0.0, peak)
    total = b.apply("log", b.reduce("sum", b.apply("exp", x - safe), dims, keepdim))
    shift = safe if keepdim else b.reduce("max", _in_result(b, x), dims, False)
    if not keepdim:
        shift = b.apply("where", b.apply("eq", b.apply("abs", shift), float("inf")), 0.0, shift)
    return total + shift


# -- normalisations --------------------------------------------------------------------------------

_LAST = {1: "{0}.shape[-{rank}:]"}


def _scaled(x: Value, weight: Value | None, bias: Value | None) -> Value:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


@reduction("aten.native_layer_norm.default", sizes=_LAST)
def layer_norm(
    b: Builder,
    x: Value,
    shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    dims = tuple(range(-len(shape), 0))
    found = _moments(b, x, dims)
    scale = b.apply("rsqrt", found.variance + eps)
    return _scaled(found.deviation * scale, weight, bias), found.mean, scale


@reduction("aten._fused_rms_norm.default", sizes=_LAST)
def rms_norm(
    b: Builder,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    eps: float | None = None,
) -> tuple[Value, Value]:
    dims = tuple(range(-len(shape), 0))
    if eps is None:
        eps = {"float64": 2.220446049250313e-16}.get(x.dtype, 1.1920928955078125e-07)
    scale = b.apply("rsqrt", b.mean(x * x, dims, True) + eps)
    return _scaled(x * scale, weight, None), scale


@reduction(
    "aten.native_group_norm.default",
    sizes={3: "{0}.shape[0]", 4: "{0}.shape[1]", 5: "{0}.shape[2:].numel()"},
)
def group_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    grouped = b.reshape(x, (batch, groups, channels // groups, area))
    b.pin([grouped.dims[1]])  # of one channel each a group is a dimension, and still an argument
    found = _moments(b, grouped, (2, 3))
    scale = b.apply("rsqrt", found.variance + eps)
    normal = b.reshape(found.deviation * scale, (batch, channels, area))
    scaled = _scaled(normal, *(_by_channel(b, p, 3) for p in (weight, bias)))
    flat = (batch, groups)
    return b.reshape(scaled, x.shape), b.reshape(found.mean, flat), b.reshape(scale, flat)


def _by_channel(b: Builder, parameter: Value | None, rank: int) -> Value | None:
    """A per-channel vector lined up with dimension 1."""
    if parameter is None:
        return None
    return b.reshape(parameter, (*parameter.shape, *(1,) * (rank - 2)))


def _batch_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    centre: Value,
    variance: Value,
    eps: float,
) -> Value:
    rank = len(x.dims)
    middle, spread, gain, shift = (
        None if p is None else _by_channel(b, b.cast(p, x.logical), rank)
        for p in (centre, b.apply("rsqrt", variance + eps), weight, bias)
    )
    assert middle is not None
    assert spread is not None
    return _scaled((x - middle) * spread, gain, shift)


@reduction("aten._native_batch_norm_legit_no_training.default")
def batch_norm_eval(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, None, None]:
    return _batch_norm(b, x, weight, bias, mean, var, eps), None, None


Statistics = tuple[Value, Value | None, Value | None]


def _normalised(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> Statistics:
    """Batch norm by the batch's own statistics, with these statistics."""
    others = tuple(d for d in range(len(x.dims)) if d != 1)
    found = _moments(b, x, others)
    scale = b.apply("rsqrt", found.variance + eps)
    gain, shift = (_by_channel(b, p, len(x.dims)) for p in (weight, bias))
    flat = (x.shape[1],)
    result = _scaled(found.deviation * scale, gain, shift)
    rough = b.mean(x, others, True)
    mean = b.apply("where", b.apply("eq", found.mean, found.mean), found.mean, rough)
    return result, b.reshape(mean, flat), b.reshape(scale, flat)


@reduction("aten.native_batch_norm.default")
def batch_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Statistics:
    if training and mean is None and var is None:
        return _normalised(b, x, weight, bias, eps)
    if training or mean is None or var is None:
        raise NotExpressible("a batch norm that writes its running statistics in place")
    return _batch_norm(b, x, weight, bias, mean, var, eps), None, None


def _eight_steps(call: Call) -> int:
    return 8 * call.operand(0).numel


meaning_of("reduction", "aten._native_batch_norm_legit.default", inputs="raw", flops=_eight_steps)(
    batch_norm
)


@meaning_of("reduction", "aten._native_batch_norm_legit.no_stats", inputs="raw", flops=_eight_steps)
def batch_norm_of_its_own(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Statistics:
    return _normalised(b, x, weight, bias, eps)


@meaning_of("reduction", "aten.cudnn_batch_norm.default", inputs="raw", flops=_eight_steps)
def cudnn_batch_norm(b: Builder, *args: Any) -> tuple[Value | None, ...]:
    """Batch norm by cuDNN; its fourth result is scratch space."""
    return (*batch_norm(b, *args), None)


formula(
    "reduction",
    "aten._batch_norm_with_update.default",
    "aten.miopen_batch_norm.default",
    flops=_eight_steps,
)


# -- scans -----------------------------------------------------------------------------------------


def _each_once(call: Call) -> int:
    return call.operand(0).numel


@meaning_of("scan", "aten.cumsum.default", "aten.cumsum_.default", flops=_each_once)
def cumsum(b: Builder, x: Value, dim: int, dtype: Arg = None) -> Value:
    return b.scan("sum", x, dim) if x.dims else x


@meaning_of("scan", "aten.cumprod.default", flops=_each_once)
def cumprod(b: Builder, x: Value, dim: int, dtype: Arg = None) -> Value:
    return b.scan("prod", x, dim) if x.dims else x


@meaning_of("scan", "aten.logcumsumexp.default", flops=lambda call: 4 * _each_once(call))
def logcumsumexp(b: Builder, x: Value, dim: int) -> Value:
    return b.scan("logsum", x, dim) if x.dims else x


@meaning_of("reduction", "aten._safe_softmax.default", inputs="raw")
def safe_softmax(b: Builder, x: Value, dim: int, dtype: Arg = None) -> Value:
    """Softmax with zeros in rows that are masked whole."""
    peak = b.reduce("max", x, (dim,), True)
    raised = b.apply("exp", x - peak)
    shares = raised / b.reduce("sum", raised, (dim,), True)
    return b.apply("where", b.apply("eq", peak, float("-inf")), 0.0, shares)
