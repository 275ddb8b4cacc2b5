"""What a region means, held to eager without any kernel: every op, chains of ops, random views."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fusion_advisor.ops import REGISTRY
from fusion_advisor.region.axes import NotExpressible

from .evaluating import drawn_reference, expressed_whole, held_to_eager, meaning
from .regions import Tape
from .test_registry import (
    CREATIONS,
    FIRST_OUTPUT_ONLY,
    NAMES,
    VIEWS,
    Sample,
    T,
    eager_takes,
    made,
    recorded,
    results_of,
    samples_of,
    target_of,
)

Tensor = torch.Tensor
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
CLOSE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (5e-2, 5e-2)}
"""Relative and absolute: eager rounds elsewhere than a region in the same dtype."""
UNSIGNED = {
    "aten.relu.default",
    "aten.relu6.default",
    "aten.fmax.default",
    "aten.fmin.default",
    "aten.softshrink.default",
    "aten.max.dim",
    "aten.max_pool3d_with_indices.default",
    "aten.adaptive_avg_pool1d.default",
}
"""Eager's own zeros have either sign here: of equal elements the larger is whichever comes first,
softshrink's is another at the end of a row than within, and a mean of one begins at zero or not."""
UNSURE = {
    "aten._to_copy.default",
    "aten.floor_divide.default",
    "aten.elu_backward.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    "aten.hardshrink_backward.default",
    "aten.softshrink_backward.default",
}
"""A NaN or an infinity as an integer is what the machine makes of it; torch's `fmod` on a CPU is
NaN where the quotient overflows, which its `floor_divide` does without; a CPU's vectors give a NaN
another gradient than its last elements."""


def data(t: T, dtype: torch.dtype, special: bool) -> Tensor:
    """Elements of mixed size; the special ones hold NaN, infinities, zeros of both signs, the least
    normal number and denormal ones."""
    held = t.dtype or dtype
    if t.below and held.is_floating_point:
        return torch.rand(t.shape, dtype=torch.float64).to(held) * t.below
    if t.below:
        return torch.randint(0, t.below, t.shape, dtype=held)
    if not held.is_floating_point:
        low = 0 if held in (torch.uint8, torch.bool) else -4
        return torch.randint(low, 2 if held == torch.bool else 5, t.shape).to(held)
    found = torch.randn(t.shape, dtype=torch.float64) * 2
    if special and found.dim():
        found.flatten()[::7] = torch.tensor(float("nan"))
        found.flatten()[3::11] = float("inf")
        found.flatten()[5::13] = float("-inf")
        tiny = torch.finfo(held).tiny
        for place, small in enumerate((0.0, -0.0, tiny, -tiny, tiny / 4, -tiny / 1024)):
            found.flatten()[8 + place :: 17] = small
    return found.to(held)


def eager(name: str, sample: Sample, dtype: torch.dtype, inputs: list[Tensor]) -> list[Tensor]:
    """What `recorded` writes down, run."""
    given = iter(inputs)
    args = made(list(sample.args), lambda _: next(given))
    kwargs, target = dict(sample.kwargs), target_of(name)
    if name in VIEWS:
        return [part.abs() for part in results_of(target(args[0].neg(), *args[1:], **kwargs))]
    if name in CREATIONS:
        from_tensor = bool(args) and isinstance(args[0], Tensor)
        x = args[0] if from_tensor else next(given)
        return [x * target(*args, **kwargs, **({} if from_tensor else {"dtype": dtype}))]
    results = results_of(target(*args, **kwargs))
    return results[:1] if name in FIRST_OUTPUT_ONLY else results


def checked(name: str, sample: Sample, dtype: torch.dtype, special: bool) -> bool:
    """Hold one call to eager; False where it is refused."""
    tape = Tape()
    inputs: list[Tensor] = []

    def make(t: T) -> Tensor:
        inputs.append(data(t, dtype, special))
        return inputs[-1]

    flow = tape.flow(*recorded(tape, name, sample, dtype, make))
    try:
        found = expressed_whole(flow)
    except NotExpressible:
        return False
    random = bool(REGISTRY[name].reference)
    wanted = drawn_reference(flow, found, inputs) if random else eager(name, sample, dtype, inputs)
    results = meaning(flow, found, inputs)
    for ref, tensor in zip(flow.annotated.graph.outputs, wanted, strict=True):
        rtol, atol = CLOSE.get(tensor.dtype, (1e-9, 1e-11))
        torch.testing.assert_close(
            results[ref],
            tensor,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            check_dtype=dtype != torch.bfloat16,  # statistics are float32 on CUDA alone
        )
        if special and tensor.is_floating_point() and name not in UNSIGNED:
            zeros = (tensor == 0) & (results[ref] == 0)
            differ = zeros & (tensor.signbit() != results[ref].signbit())
            assert not differ.any(), f"{int(differ.sum())} zeros of the other sign"
    return True


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_as_eager(name: str) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        for sample in samples_of(name):
            if not eager_takes(name, sample, dtype):
                continue
            found = checked(name, sample, dtype, special=False)
            if dtype.is_floating_point:
                assert found != sample.refused, f"{sample.args} in {dtype}"
            if found and dtype == torch.float64 and name not in UNSURE:
                checked(name, sample, dtype, special=True)


ODD = torch.tensor(
    [*map(float, ("nan", "inf", "-inf")), 0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 2.5, -2.5],
    dtype=torch.float64,
)
OF_OTHERS = (
    *("aten.tril", "aten.triu", "aten.masked_fill.Tensor", "aten.bitwise", "aten.__"),
    *("aten.glu_backward", "aten.binary_cross_entropy_backward"),
)
"""Ops of integers, matrices, probabilities, and of tensors without dimensions or of other sizes."""
PAIRED = [
    name for name in NAMES if REGISTRY[name].pattern == "pointwise" and name not in UNSURE
    and not REGISTRY[name].reference and name not in {**VIEWS, **CREATIONS}
    and not name.startswith(OF_OTHERS)
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PAIRED)
def test_every_number_meets_every_other(name: str) -> None:
    """NaN, infinities and zeros in any operand, with each of the others in the next one."""
    held = [_pairs(name, sample) for sample in samples_of(name)]
    assert any(held)


def _pairs(name: str, sample: Sample) -> bool:
    """Hold a call on all pairs to eager; False where it takes others than floats and bools."""
    tape, inputs = Tape(), list[Tensor]()
    grid = torch.cartesian_prod(ODD, ODD)

    def make(t: T) -> Tensor:
        flip = grid.flip(0) if len(inputs) >= 2 else grid
        x = flip[:, len(inputs) % 2].contiguous()
        inputs.append(x > 0 if t.dtype == torch.bool else x)
        return inputs[-1]

    kinds: list[T] = []
    made(list(sample.args), kinds.append)
    if any(t.below or t.dtype not in (None, torch.bool) for t in kinds):
        return False
    try:
        flow = tape.flow(*recorded(tape, name, sample, torch.float64, make))
        wanted = eager(name, sample, torch.float64, inputs)
        found = expressed_whole(flow)
    except (NotExpressible, RuntimeError, IndexError):  # no op of one dimension, or refused
        return False
    results = meaning(flow, found, inputs)
    for ref, tensor in zip(flow.annotated.graph.outputs, wanted, strict=True):
        torch.testing.assert_close(results[ref], tensor, rtol=1e-9, atol=1e-11, equal_nan=True)
    return True


# -- chains: what is computed, pulled --------------------------------------------------------------


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def at(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s


def shifted(x: Tensor) -> Tensor:
    """A window shift, its partition, and back."""
    rolled = torch.roll(x, (-1, -1), (1, 2)).view(2, 2, 2, 2, 2, 3).transpose(2, 3)
    normal = F.layer_norm(rolled.reshape(8, 4, 3), (3,))
    back = normal.view(2, 2, 2, 2, 2, 3).transpose(2, 3).reshape(2, 4, 4, 3)
    return torch.roll(back, (1, 1), (1, 2))


CHAINS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "slice of relu": (lambda x: x.relu()[:, 1:4].neg(), (r(5, 6),)),
    "slice with a step": (lambda x: x.relu()[1::2, ::3].exp(), (r(5, 8),)),
    "cat of computed": (
        lambda x, y: torch.cat([x.relu(), y.exp(), x[:, :1]], 1) * 2, (r(5, 6), r(5, 3)),
    ),
    "equal cat of computed": (
        lambda x, y: torch.cat([x.relu(), y.exp(), x - y], 1) * 2, (r(5, 6), r(5, 6)),
    ),
    "nested cats": (
        lambda x, y: torch.cat([torch.cat([x.relu(), y], 1), torch.cat([y.exp(), x], 1)], 0),
        (r(5, 6), r(5, 3)),
    ),
    "flip of softmax": (lambda x: x.softmax(-1).flip(-1) * x, (r(5, 6),)),
    "softmax of a cat": (lambda x, y: torch.cat([x.relu(), y], 1).softmax(1), (r(5, 6), r(5, 3))),
    "rotate half": (rotated, (r(2, 3, 8), r(3, 8), r(3, 8))),
    "rotate half of computed": (
        lambda x, c, s: rotated(x.sin(), c.cos(), s.sin()), (r(2, 3, 8), r(3, 8), r(3, 8)),
    ),
    "swiglu": (swiglu, (r(5, 8),)),
    "swiglu of computed": (lambda x: swiglu(x.relu() + 1), (r(5, 8),)),
    "four chunks": (
        lambda x: (lambda i, f, g, o: o.sigmoid() * (i * f + g).tanh())(*x.exp().chunk(4, 1)),
        (r(5, 12),),
    ),
    "chunks of chunks": (
        lambda x: sum(a * b for a, b in (c.chunk(2, 1) for c in x.exp().chunk(3, 1))), (r(5, 12),),
    ),
    "uneven split": (lambda x: torch.cat([p.sin() for p in x.exp().split(3, 1)], 1), (r(5, 8),)),
    "glu": (lambda x: F.glu(x.exp(), 1), (r(2, 6, 3),)),
    "cumsum of flip": (lambda x: x.flip(1).cumsum(1) * 2, (r(5, 6),)),
    "flip, cumsum, flip": (lambda x: x.exp().flip(1).cumsum(1).flip(1), (r(5, 6),)),
    "exclusive cumsum": (
        lambda x: torch.cat([torch.zeros_like(x[:, :1]), x], 1).cumsum(1), (r(5, 6),),
    ),
    "exclusive cumsum of computed": (
        lambda x: torch.cat([torch.zeros_like(x[:, :1]), x.exp().cumsum(1)[:, :-1]], 1) * 2,
        (r(5, 6),),
    ),
    "padded cumprod": (lambda x: F.pad(x.exp().cumprod(1), (2, 1)) + 1, (r(5, 6),)),
    "rest of a cumsum": (
        lambda x: (x.exp().cumsum(1)[:, -1:] - x.exp().cumsum(1)).exp(), (r(5, 6),),
    ),
    "first of a reversed cumsum": (
        lambda x: x.exp().flip(1).cumsum(1).flip(1)[:, 0] * 2, (r(5, 6),),
    ),
    "counted by a cumsum": (
        lambda x: x.exp() * torch.ones(1, 6, dtype=torch.int64).cumsum(1), (r(5, 6),),
    ),
    "masked cumsum": (lambda x, m: (x * (m > 0)).cumsum(0), (r(5, 6), r(5, 6))),
    "cross entropy": (F.cross_entropy, (r(5, 6), torch.tensor([1, -100, 5, 0, 2]))),
    "cross entropy of each": (
        lambda x, t, w: F.cross_entropy(x.tanh(), t, w, reduction="none"),
        (r(5, 6), at(6, 5), r(6)),
    ),
    "cross entropy of images": (F.cross_entropy, (r(2, 5, 3, 3), at(5, 2, 3, 3))),
    "chosen log probability": (
        lambda x, t: x.log_softmax(-1).gather(-1, t[:, None]).squeeze(-1), (r(5, 6), at(6, 5)),
    ),
    "embeddings": (
        lambda w, p, i: F.layer_norm(F.embedding(i, w) + p[: i.shape[1]], (4,)),
        (r(9, 4), r(7, 4), at(9, 2, 3)),
    ),
    "rows and columns": (
        lambda x, i, j: x.relu()[i, :, j], (r(5, 6, 7), torch.tensor([[0], [-1]]), at(7, 3) - 3),
    ),
    "diagonal by index": (lambda x, t: x.exp()[torch.arange(5), t].log(), (r(5, 6), at(6, 5))),
    "index of a place": (lambda x, y: y.exp().gather(1, x.argmax(1, True)), (r(5, 6), r(5, 6))),
    "pool of a chain": (lambda x: F.max_pool2d((x * 2).relu(), 3, 2, 1), (r(2, 3, 7, 8),)),
    "pool of a pool": (
        lambda x: F.max_pool2d(F.avg_pool2d(x.exp(), 3, 1, 1), 2), (r(2, 3, 6, 8),),
    ),
    "parts of a pool": (lambda x: F.avg_pool2d(x.relu(), 2).softmax(1) * 2, (r(2, 3, 6, 8),)),
    "pool of an enlargement": (
        lambda x: F.avg_pool2d(F.interpolate(x.exp(), scale_factor=2.0), 2), (r(1, 2, 3, 4),),
    ),
    "pool of a padding": (
        lambda x: F.avg_pool2d(F.pad(x.exp(), (1, 1, 0, 2), mode="reflect"), 2), (r(2, 3, 5, 6),),
    ),
    "enlarged and joined": (
        lambda x, y: torch.cat([F.interpolate(x, scale_factor=2.0), y.relu()], 1),
        (r(1, 2, 3, 4), r(1, 5, 6, 8)),
    ),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x.relu(), 2).tanh(), (r(2, 8, 3, 5),)),
    "channel shuffle": (
        lambda x, y: F.channel_shuffle(torch.cat([x, y.relu()], 1), 2),
        (r(1, 3, 2, 2), r(1, 3, 2, 2)),
    ),
    "shifted windows": (shifted, (r(2, 4, 4, 3),)),
    "instance norm": (lambda x: F.instance_norm(x.relu()).exp(), (r(2, 3, 5, 6),)),
    "instance norm with parameters": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b).relu(), (r(2, 3, 5, 6), r(3), r(3)),
    ),
    "norm of a slice": (lambda x: F.layer_norm(x.sin()[:, 2:], (4,)), (r(5, 6),)),
    "uneven reshape": (lambda x: x.relu().reshape(2, 3, 8, 5).exp(), (r(2, 4, 6, 5),)),
    "sum of what does not vary": (
        lambda x: x.relu().unsqueeze(1).expand(5, 3, 6).sum((1, 2)), (r(5, 6),),
    ),
    "extreme of what does not vary": (
        lambda x: x.relu().unsqueeze(1).expand(5, 3, 6).amax((1, 2)), (r(5, 6),),
    ),
    "mean of a repeat": (lambda x: x.exp().repeat(2, 3).mean(1), (r(5, 6),)),
    "sliding sums": (lambda x: x.relu().unfold(1, 3, 2).sum(-1), (r(5, 9),)),
    "divergence": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        (r(5, 8), r(5, 8)),
    ),
    "losses": (
        lambda x, y: (F.mse_loss(x.tanh(), y), F.smooth_l1_loss(x, y), F.huber_loss(x, y)),
        (r(5, 8), r(5, 8)),
    ),
    "heads merged": (
        lambda x: x.relu().transpose(1, 2).reshape(2, 5, 12) + 1, (r(2, 3, 5, 4),),
    ),
    "interleaved rotation": (
        lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) + x, (r(2, 3, 8),),
    ),
    "a number along its only dimension": (
        lambda x: (
            x.softmax(0) + x.exp().sum(-1) + x.var(0, correction=0) + x.amax(0) + x.mean(-1),
            x.neg().cumsum(0) + x.argmax(0) + x.flip(0) + x.roll(1) + x.sin().logsumexp(0),
            (x.exp().unfold(0, 1, 1) + x.transpose(0, -1).tanh()).gather(0, x.new_zeros(1).long()),
        ),
        (r(),),
    ),
    "repeated heads": (
        lambda x: x.exp()[:, :, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4) * 2,
        (r(2, 3, 5, 4),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chain_as_eager(name: str) -> None:
    function, inputs = CHAINS[name]
    held_to_eager(function, *inputs)


@pytest.mark.parametrize(
    ("function", "inputs", "why"),
    [
        (lambda x: x + x.sum(1).flip(0), (r(6, 6),), "along its own axis"),
        (lambda x: x.cumsum(1)[:, 1:] + 1, (r(5, 6),), "read out of order"),
        (lambda x: x.relu().unsqueeze(1).expand(5, 3, 6).prod(1), (r(5, 6),), "broadcast"),
        (lambda x: F.adaptive_avg_pool2d(x.relu(), 4), (r(1, 2, 6, 6),), "differ in size"),
    ],
    ids=["captured", "scan", "product", "adaptive"],
)
def test_refused(function: Callable[..., Any], inputs: tuple[Tensor, ...], why: str) -> None:
    with pytest.raises(NotExpressible, match=why):
        held_to_eager(function, *inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0.1, 0.7, -1.3, 1e-9])
def test_what_is_compared_is_rounded_as_eager_rounds_it(dtype: torch.dtype, number: float) -> None:
    """To the dtype of the tensor that has dimensions: 0.1 is less than the nearest bfloat16."""
    x = torch.tensor([number, 2 * number, 0.0, 1.0]).to(dtype)
    held_to_eager(lambda x: (x > number, x >= number, x == number, x < number), x)
    held_to_eager(lambda x: (number > x, x <= number, x != number), x)
    held_to_eager(lambda x, y: (x > y, y >= x, x == y), x, torch.tensor(number))
    held_to_eager(lambda x: F.hardshrink(x, abs(number)), x)


# -- random views of computed values ---------------------------------------------------------------


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """Names of views and copies, with numbers that say where and how far."""
    number = st.integers(0, 7)
    move = st.tuples(st.sampled_from(sorted(MOVES)), number, number, number)
    return draw(st.lists(move, min_size=1, max_size=5))


def _dim(x: Tensor, a: int) -> int:
    return a % x.dim()


def _sliced(x: Tensor, a: int, b: int, c: int) -> Tensor:
    dim = _dim(x, a)
    start, step = b % x.shape[dim], 1 + c % 3
    return torch.ops.aten.slice.Tensor(x, dim, start, 2**63 - 1, step)


def _regrouped(x: Tensor, a: int, b: int, c: int) -> Tensor:
    sizes = [n for n in range(1, x.numel() + 1) if x.numel() % n == 0]
    first = sizes[(a + 8 * b) % len(sizes)]
    return x.reshape(first, x.numel() // first) if c % 2 else x.reshape(-1, first)


def _split(x: Tensor, a: int, b: int, c: int) -> Tensor:
    parts = x.split(1 + b % x.shape[_dim(x, a)], _dim(x, a))
    return torch.cat(
        [part.tanh() if n == c % len(parts) else part for n, part in enumerate(parts)], _dim(x, a)
    )


def _grown(x: Tensor, a: int, b: int, c: int) -> Tensor:
    return x.unsqueeze(_dim(x, a)).expand(*x.shape[: _dim(x, a)], 1 + b % 3, *x.shape[_dim(x, a) :])


MOVES: dict[str, Callable[[Tensor, int, int, int], Tensor]] = {
    "slice": _sliced,
    "select": lambda x, a, b, c: (
        x.select(_dim(x, a), b % x.shape[_dim(x, a)]) if x.dim() > 1 else x
    ),
    "cat": lambda x, a, b, c: torch.cat([x.sin(), x, x.tanh()][: 2 + b % 2], _dim(x, a)),
    "cat of a part": lambda x, a, b, c: torch.cat([x, _sliced(x, a, b, c).cos()], _dim(x, a)),
    "flip": lambda x, a, b, c: x.flip(sorted({_dim(x, a), _dim(x, b)})),
    "roll": lambda x, a, b, c: x.roll(b - 3, _dim(x, a)) if c else x.roll(b),
    "pad": lambda x, a, b, c: F.pad(x, (b % 3, c % 3), value=1.5),
    "crop": lambda x, a, b, c: F.pad(x, (-1, c % 3)) if x.shape[-1] > 1 else x,
    "permute": lambda x, a, b, c: x.transpose(_dim(x, a), _dim(x, b)),
    "reshape": _regrouped,
    "expand": _grown,
    "repeat": lambda x, a, b, c: x.repeat(*(1 + (n == _dim(x, a)) for n in range(x.dim()))),
    "interleave": lambda x, a, b, c: x.repeat_interleave(2, _dim(x, a)),
    "stack": lambda x, a, b, c: torch.stack([x, x.neg()], _dim(x, a)),
    "unbind": lambda x, a, b, c: x.unbind(_dim(x, a))[0] if x.dim() > 1 else x,
    "split": _split,
    "add": lambda x, a, b, c: x + x.sum(_dim(x, a), keepdim=True),
    "cumsum": lambda x, a, b, c: x.cumsum(_dim(x, a)),
    "sum": lambda x, a, b, c: x.amax(_dim(x, a)) if x.dim() > 1 else x,
    "sigmoid": lambda x, a, b, c: x.sigmoid(),
}


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    moves=moves(),
)
@settings(
    max_examples=200 if "FUSION_ADVISOR_SLOW_TESTS" not in os.environ else 5000, deadline=None
)
def test_random_views_as_eager(shape: list[int], moves: list[tuple[str, int, int, int]]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        for name, a, b, c in moves:
            if y.numel() < 2000:
                y = MOVES[name](y, a, b, c)
        return y.tanh()

    torch.manual_seed(0)
    try:
        held_to_eager(function, r(*shape))
    except NotExpressible:
        reject()  # a scan out of order, or a reduction of padding alone
