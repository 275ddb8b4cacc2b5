"""Losses: the loss of each element, kept, added up or averaged."""

from __future__ import annotations

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ops.registry import Call, Formula, Traffic, meaning_of
from fusion_advisor.region.builder import Builder, Value, floats_only

NONE, MEAN, SUM = 0, 1, 2
"""Eager's numbers for a loss's `reduction`."""


def reduced(b: Builder, loss: Value, reduction: int) -> Value:
    """The element losses reduced as the argument `reduction` says."""
    if reduction == NONE:
        return loss
    return b.mean(loss, ()) if reduction == MEAN else b.reduce("sum", loss, ())


def _loss(position: int) -> Traffic:
    def traffic(call: Call) -> tuple[int, int]:
        """One pass that writes the elements, and one that reduces them, unless none does."""
        read, size = addressed_bytes(call.operands[:2]), call.operand(0).bytes
        if call.arg(position, "reduction", 1) == NONE:
            return read, call.out.bytes
        return read + size, size + call.out.bytes

    return traffic


def _three_steps(call: Call) -> int:
    return 3 * call.operand(0).numel


_PLAIN = _loss(2)
_FLOPS: Formula = _three_steps


@meaning_of("reduction", "aten.mse_loss.default", traffic=_PLAIN, flops=_FLOPS)
def mse_loss(b: Builder, x: Value, target: Value, reduction: int = MEAN) -> Value:
    apart = x - target
    return reduced(b, apart * apart, reduction)


@meaning_of("reduction", "aten.smooth_l1_loss.default", traffic=_PLAIN, flops=_FLOPS)
def smooth_l1_loss(
    b: Builder, x: Value, target: Value, reduction: int = MEAN, beta: float = 1.0
) -> Value:
    apart = b.apply("abs", x - target)
    beyond = apart - 0.5 * beta
    near = beyond if beta == 0 else 0.5 * apart * apart / beta
    return reduced(b, b.apply("where", apart < beta, near, beyond), reduction)


@meaning_of("reduction", "aten.huber_loss.default", traffic=_PLAIN, flops=_FLOPS)
def huber_loss(
    b: Builder, x: Value, target: Value, reduction: int = MEAN, delta: float = 1.0
) -> Value:
    apart = b.apply("abs", x - target)
    near, beyond = 0.5 * apart * apart, delta * (apart - 0.5 * delta)
    return reduced(b, b.apply("where", apart <= delta, near, beyond), reduction)


@meaning_of("reduction", "aten.soft_margin_loss.default", traffic=_PLAIN, flops=_FLOPS)
def soft_margin_loss(b: Builder, x: Value, target: Value, reduction: int = MEAN) -> Value:
    return reduced(b, b.apply("log1p", b.apply("exp", -target * x)), reduction)


@meaning_of("reduction", "aten.binary_cross_entropy.default", traffic=_loss(3), flops=_FLOPS)
def binary_cross_entropy(
    b: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    """Binary cross-entropy. Logarithms are clamped at -100, as in eager."""
    of_rest = b.apply("maximum", b.apply("log1p", -x), -100.0)
    of_x = b.apply("maximum", b.apply("log", x), -100.0)
    loss = (target - 1.0) * of_rest - target * of_x
    return reduced(b, loss if weight is None else loss * weight, reduction)


# -- of one score a row ----------------------------------------------------------------------------


def _nll(call: Call) -> tuple[int, int]:
    """HBM bytes: one score of each row, and its target."""
    scores, target = call.operand(0), call.operand(1)
    weight = call.tensor(2)
    read = target.bytes + target.numel * scores.itemsize
    if weight is not None:
        read += min(target.numel * weight.itemsize, weight.bytes)
    return read, sum(t.bytes for t in call.node.outputs if t is not None)


@meaning_of(
    "gather",
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    inputs="raw",
    traffic=_nll,
    flops=lambda call: call.operand(1).numel,
)
def nll_loss(
    b: Builder, scores: Value, target: Value, weight: Value | None, reduction: int, ignored: int
) -> tuple[Value, Value | None]:
    """Negative log-likelihood and the total weight, which is None without a reduction."""
    dim = min(1, len(scores.dims) - 1)
    others = (*scores.dims[:dim], *scores.dims[dim + 1 :])
    dims = b.broadcast([target.dims, others])
    counts = b.apply("ne", target, ignored)
    picked = b.pull(scores, dim, target.id, dims, counts.id)
    one = b.const(1.0, scores.logical)
    share = one if weight is None else b.pull(weight, 0, target.id, dims, counts.id)
    weighed = -picked if weight is None else -picked * share
    loss = b.apply("where", counts, weighed, 0.0)
    if reduction == NONE:
        return loss, None
    total = b.reduce("sum", b.apply("where", counts, share, 0.0), ())
    found = b.reduce("sum", loss, ())
    return found / total if reduction == MEAN else found, total


@meaning_of(
    "gather", "aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default", inputs="raw"
)
def nll_loss_backward(
    b: Builder,
    grad: Value,
    scores: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignored: int,
    total: Value,
) -> Value:
    """The gradient of each score: zero except for the score that its row picked."""
    dim = min(1, len(scores.dims) - 1)
    chosen = _along(target, dim)
    b.bound(target.id, scores.dims[dim])
    b.broadcast([scores.dims, chosen.dims])  # so that their rows are one axis: no score is read
    here = b.apply("eq", b.index_of(scores, dim), chosen)
    counts = b.apply("and", here, b.apply("ne", chosen, ignored))
    scale = -_along(grad, dim) if reduction == NONE else -grad
    if weight is not None:
        scale = scale * _per_class(weight, len(scores.dims) - 1 - dim)
    found = scale / total if reduction == MEAN else scale
    return b.apply("where", counts, found, b.const(0.0, scores.logical))


def _along(x: Value, dim: int) -> Value:
    """A value with one more dimension, along which it is constant."""
    return x.builder.seen(x.id, (*x.dims[:dim], (), *x.dims[dim:]), x.logical)


def _per_class(weight: Value, behind: int) -> Value:
    return weight.builder.seen(weight.id, (*weight.dims, *((),) * behind), weight.logical)


@meaning_of("pointwise", "aten.mse_loss_backward.default")
def mse_loss_backward(b: Builder, grad: Value, x: Value, target: Value, reduction: int) -> Value:
    floats_only(x, "a gradient of integers")
    return _shared(b, 2.0 * (x - target) * grad, reduction)


@meaning_of("pointwise", "aten.smooth_l1_loss_backward.default")
def smooth_l1_loss_backward(
    b: Builder, grad: Value, x: Value, target: Value, reduction: int, beta: float
) -> Value:
    return _shared(b, _bounded(b, grad, x - target, beta, 1.0, beta), reduction)


@meaning_of("pointwise", "aten.huber_loss_backward.default")
def huber_loss_backward(
    b: Builder, grad: Value, x: Value, target: Value, reduction: int, delta: float
) -> Value:
    return _shared(b, _bounded(b, grad, x - target, delta, delta, 1.0), reduction)


def _bounded(
    b: Builder, grad: Value, apart: Value, limit: float, slope: float, scale: float
) -> Value:
    """The gradient of a loss that is a parabola up to a distance and straight beyond."""
    floats_only(apart, "a gradient of integers")
    above = b.apply("where", apart >= limit, grad * slope, grad * apart / scale)
    return b.apply("where", apart <= -limit, grad * -slope, above)


@meaning_of("pointwise", "aten.binary_cross_entropy_backward.default")
def binary_cross_entropy_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    """The gradient of the probability, whose variance is at least 1e-12, as in eager."""
    found = grad * (x - target) / b.apply("maximum", (1.0 - x) * x, 1e-12)
    return _shared(b, found if weight is None else found * weight, reduction)


def _shared(b: Builder, found: Value, reduction: int) -> Value:
    """The gradient of each element's loss as the argument `reduction` says."""
    return found / b.count(found, ()) if reduction == MEAN else found
