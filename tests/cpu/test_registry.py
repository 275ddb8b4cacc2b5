"""Every op with a meaning, through the whole pipeline, held to eager and fp64.

Each entry of the registry is called on small tensors, planned as a group of one, emitted and
verified through the interpreter. What the region form cannot express for a dtype must be refused.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any
from zlib import crc32

import pytest
import torch

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.kernel import Check
from fusion_advisor.ops import REGISTRY
from fusion_advisor.ops.registry import in_place
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import submit_check

from .regions import RULES, Tape, decided, why_not

SEEDS = 2
"""Mixed magnitudes, and NaN with ±inf."""
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
EVERY = (*FLOATS, *INTEGERS)
SAMPLES_OF = {torch.float32: 99, torch.float64: 2, torch.bool: 2}
"""How many samples of each op run in a dtype; one in the others, unless the environment sets
FUSION_ADVISOR_SLOW_TESTS."""
SLOW = "FUSION_ADVISOR_SLOW_TESTS" in os.environ


@dataclass(frozen=True)
class T:
    """A tensor of the dtype under test, or of a fixed one, with elements from 0 to `below`."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int = 0

    def make(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(self.shape, dtype=self.dtype or dtype)


@dataclass(frozen=True)
class Sample:
    """Arguments of one call. `refused`: it has no plan, and must not get a wrong one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    refused: bool = False


def S(*args: Any, refused: bool = False, **kwargs: Any) -> Sample:
    return Sample(args, kwargs, refused)


X = T((5, 33))
Y = T((5, 1))
V = T((33,))
B = T((3, 5, 6))
M = T((5, 33), torch.bool)
I = T((5, 33), torch.int64)  # noqa: E741
C = T((2, 6, 5, 3))
W = T((6,))
W32 = T((6,), torch.float32)
X32 = T((5, 33), torch.float32)
U = T((5, 33), below=1)
P = T((2, 6, 8, 9))
L = T((2, 6, 7))
D = T((2, 6, 4, 6, 5))


def places(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> T:
    return T(shape, dtype, below)


DEFAULT = (S(X),)
TWO = (S(X, X), S(X, V), S(Y, V))
SCALAR = (S(X, 2.3), S(X, 3))
ALPHA = (*TWO, S(X, V, alpha=2))
COMPARED = (*TWO, S(X, 0.5), S(X, 0))
DIM = (S(X, [1]), S(X, [0], True), S(B, [1], False), S(B, [0, 2], True), S(B, [0, 1, 2]))
ONE_DIM = (S(X, 1), S(X, 0, True), S(B, -2, False))

SAMPLES: dict[str, tuple[Sample, ...]] = {
    "aten.add.Tensor": ALPHA,
    "aten.sub.Tensor": ALPHA,
    "aten.rsub.Tensor": ALPHA,
    "aten.add.Scalar": (S(X, 2.5), S(X, 3), S(X, 3, 2)),
    "aten.sub.Scalar": (S(X, 2.5), S(X, 3), S(X, 3, 2)),
    "aten.rsub.Scalar": (S(X, 2.5), S(X, 3), S(X, 3, 2)),
    "aten.mul.Tensor": TWO,
    "aten.mul.Scalar": (*SCALAR, S(X, True)),
    "aten.div.Tensor": TWO,
    "aten.div.Scalar": SCALAR,
    "aten.div.Tensor_mode": tuple(
        S(X, V, rounding_mode=mode) for mode in (None, "floor", "trunc")
    ),
    "aten.div.Scalar_mode": tuple(
        S(X, by, rounding_mode=mode) for mode in (None, "floor", "trunc") for by in (2.5, -3)
    ),
    "aten.remainder.Tensor": TWO,
    "aten.remainder.Scalar": (S(X, 2.5), S(X, -3)),
    "aten.fmod.Tensor": TWO,
    "aten.fmod.Scalar": (S(X, 2.5), S(X, -3)),
    "aten.pow.Tensor_Scalar": tuple(S(X, e) for e in (2, 3, 1, 0, 0.5, -0.5, -1, -2, 2.5, 4, -3)),
    "aten.pow.Tensor_Tensor": TWO,
    "aten.pow.Scalar": (S(2.5, X), S(0, X), S(-2, X)),
    "aten.atan2.default": TWO,
    "aten.hypot.default": TWO,
    "aten.hardtanh.default": (S(X), S(X, -0.5, 2.0)),
    "aten.leaky_relu.default": (S(X), S(X, 0.3), S(X, -0.5)),
    "aten._prelu_kernel.default": (S(X, T((33,))),),
    "aten.threshold.default": (S(X, 0.5, -2.0), S(X, 1, 7)),
    "aten.elu.default": (S(X), S(X, 0.5), S(X, 0.5, 2.0, 1.5)),
    "aten.celu.default": (S(X), S(X, 0.5)),
    "aten.gelu.default": (S(X), S(X, approximate="tanh")),
    "aten.softplus.default": (S(X), S(X, 2.0, 10.0), S(X, -1.5)),
    "aten.softshrink.default": (S(X), S(X, 0.25)),
    "aten.hardshrink.default": (S(X), S(X, 0.25), S(X, 0)),
    "aten.maximum.default": TWO,
    "aten.minimum.default": TWO,
    "aten.fmax.default": TWO,
    "aten.fmin.default": TWO,
    "aten.clamp.default": (S(X, -1, 1), S(X, None, 0.3), S(X, 0.5), S(X, 2.0, -2.0)),
    "aten.clamp.Tensor": (S(X, V, X), S(X, V), S(X, None, Y)),
    "aten.clamp_min.default": SCALAR,
    "aten.clamp_min.Tensor": TWO,
    "aten.clamp_max.default": SCALAR,
    "aten.clamp_max.Tensor": TWO,
    "aten.where.self": (S(M, X, X), S(T((33,), torch.bool), X, Y), S(M, T(()), X)),
    "aten.where.ScalarSelf": (S(M, 1.3, X), S(M, 2, X)),
    "aten.where.ScalarOther": (S(M, X, 1.5), S(M, X, -2)),
    "aten.masked_fill.Scalar": (S(X, M, float("-inf")), S(X, T((33,), torch.bool), -3)),
    "aten.masked_fill.Tensor": (S(X, M, T(())),),
    "aten.lerp.Scalar": (S(X, X, 0.3), S(X, X, 0.75), S(X, X, 0.5)),
    "aten.lerp.Tensor": (S(X, X, X), S(X, X, V)),
    "aten.addcmul.default": (S(X, X, V), S(X, X, V, value=0.5)),
    "aten.addcdiv.default": (S(X, X, V), S(X, X, V, value=0.5)),
    **{f"aten.{op}.Tensor": TWO for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"aten.{op}.Scalar": (S(X, 0.5), S(X, 0)) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"aten.logical_{op}.default": TWO for op in ("and", "or", "xor")},
    **{f"aten.bitwise_{op}.Tensor": TWO for op in ("and", "or", "xor")},
    **{f"aten.bitwise_{op}.Scalar": (S(X, 3),) for op in ("and", "or", "xor")},
    "aten.bitwise_not.default": (S(X),),
    "aten._to_copy.default": (
        *(
            S(X, dtype=dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)
        ),
        S(X, dtype=torch.int64), S(X, dtype=torch.int32),
    ),
    "aten.copy.default": (S(X, X), S(X, V), S(X, T((5, 33), torch.bfloat16)), S(X, I)),
    "aten.clone.default": (S(X), S(C, memory_format=torch.channels_last)),
    **{
        f"aten.{op}_backward.default": (S(X, X),)
        for op in ("sigmoid", "tanh", "silu", "hardsigmoid")
    },
    "aten.threshold_backward.default": (S(X, X, 0), S(X, X, 0.5)),
    "aten.gelu_backward.default": (S(X, X), S(X, X, approximate="tanh")),
    "aten.leaky_relu_backward.default": (S(X, X, 0.3, False),),
    "aten.softplus_backward.default": (S(X, X, 2.0, 10.0),),
    "aten._prelu_kernel_backward.default": (S(X, X, V),),
    "aten.elu_backward.default": (
        S(X, 0.5, 2.0, 1.5, False, X), S(X, 1.0, 1.0, 1.0, False, X), S(X, 0.5, 2.0, 1.5, True, X),
    ),
    "aten.hardtanh_backward.default": (S(X, X, -0.5, 2.0),),
    "aten.hardswish_backward.default": (S(X, X),),
    **{f"aten.{op}shrink_backward.default": (S(X, X, 0.25),) for op in ("hard", "soft")},
    "aten.glu_backward.default": (S(T((2, 3, 5, 3)), C, 1), S(T((5, 17)), T((5, 34)), -1)),
    "aten.native_dropout_backward.default": (S(X, M, 2.0),),
    "aten.native_dropout.default": (S(X, 0.3, True), S(B, 0.5, True)),
    **{
        f"aten.{op}_backward_data.default": (S(X32, X32, 1, torch.float32),)
        for op in ("_softmax", "_log_softmax")
    },
    "aten.native_layer_norm_backward.default": (
        S(X, X, [33], T((5, 1)), T((5, 1)), V, V, [True, True, True]),
        S(B, B, [5, 6], T((3, 1, 1)), T((3, 1, 1)), None, None, [True, False, False]),
    ),
    "aten._fused_rms_norm_backward.default": (
        S(X, X, [33], T((5, 1)), V, [True, True]), S(X, X, [33], T((5, 1)), None, [True, False]),
    ),
    **{
        f"aten.{op}_loss_backward.default": tuple(
            S(grad, X, X, reduction, 1.5) for grad, reduction in ((T(()), 1), (X, 0), (T(()), 2))
        )
        for op in ("smooth_l1", "huber")
    },
    "aten.binary_cross_entropy_backward.default": (
        S(T(()), U, U, None, 1), S(X, U, U, V, 0), S(T(()), U, U, None, 2),
    ),
    "aten.mse_loss_backward.default": (S(T(()), X, X, 1), S(X, X, X, 0), S(T(()), X, X, 2)),
    "aten.nll_loss_backward.default": (
        S(T(()), X, places(5, below=33), None, 1, -100, T(())),
        S(T(()), X, places(5, below=33), V, 2, 3, T(())),
        S(T((5,)), X, places(5, below=33), V, 0, -100, T(())),
        S(T(()), V, places(below=33), None, 1, -100, T(())),
    ),
    "aten.nll_loss2d_backward.default": (
        S(T(()), C, places(2, 5, 3, below=6), W, 1, -100, T(())),
    ),
    "aten.xlogy.Tensor": TWO,
    "aten.floor_divide.default": TWO,
    "aten.logaddexp.default": TWO,
    "aten.heaviside.default": TWO,
    "aten.nan_to_num.default": (S(X), S(X, 1.5, 2.0, -3.0)),
    **{f"aten.__{op}__.Tensor": TWO for op in ("lshift", "rshift")},
    **{f"aten.__{op}__.Scalar": (S(I, 3), S(I, 70, refused=True)) for op in ("lshift", "rshift")},
    "aten._weight_norm_interface.default": (S(X, Y), S(B, T((1, 1, 6)), 2)),
    "aten.glu.default": (S(C, 1), S(T((5, 34)))),
    **{
        f"aten.{op}_loss.default": (S(X, X, 0), S(X, X), S(X, X, 2))
        for op in ("mse", "smooth_l1", "huber", "soft_margin")
    },
    "aten.binary_cross_entropy.default": (
        S(U, U, None, 0), S(U, U, None, 1), S(U, U, V, 2),
    ),
    "aten.nll_loss_forward.default": (
        S(X, places(5, below=33), None, 1, -100), S(X, places(5, below=33), V, 1, 3),
        S(X, places(5, below=33), V, 2, -100), S(V, places(below=33), None, 1, -100),
    ),
    "aten.nll_loss2d_forward.default": (
        S(C, places(2, 5, 3, below=6), None, 1, -100), S(C, places(2, 5, 3, below=6), W, 2, 3),
    ),
    "aten.embedding.default": (S(X, places(2, 3, below=5)), S(X, places(4, below=5), 2)),
    "aten.index_select.default": (
        S(X, 1, places(7, below=33)), S(B, -2, places(5, below=5)), S(X, 0, places(below=5)),
        S(X, 0, places(9, below=5, dtype=torch.int32)),
    ),
    "aten.gather.default": (
        S(X, 1, places(5, 3, below=33)), S(X, 0, places(2, 7, below=5)),
        S(B, -1, places(3, 5, 6, below=6)), S(B, 1, places(2, 9, 4, below=5)),
    ),
    **{
        f"aten.{op}.Tensor": (
            S(X, [places(7, below=5)]), S(X, [places(7, 1, below=5), places(4, below=33)]),
            S(B, [None, places(2, 3, below=5)]), S(C, [None, places(4, below=6), places(below=5)]),
            S(C, [places(4, below=2), None, places(3, 1, below=5)]),
            S(X, [places(7, below=5, dtype=torch.int32)]),
        )
        for op in ("index", "_unsafe_index")
    },
    "aten.cat.default": (
        S([X, X], 1), S([X, T((5, 2)), T((5, 1))], 1), S([X, X, X], 0), S([X, T((0,)), V], 0),
        S([T((5, 33), torch.bfloat16), X], -1), S([X]), S([Y, Y], 1),
    ),
    "aten.stack.default": (S([X, X]), S([X, X, X], -1), S([X, X], 1), S([T(()), T(())])),
    "aten.constant_pad_nd.default": (
        S(X, [1, 2]), S(X, [0, 3, 2, 0], 1.5), S(X, [-1, 2, 0, -2]), S(B, [0, 0, 1, 1]),
        S(Y, [1, 1], 2.0), S(X, [0, 0]),
    ),
    "aten.reflection_pad1d.default": (S(L, [1, 3]), S(X, [0, 2])),
    "aten.reflection_pad2d.default": (S(C, [1, 2, 3, 0]),),
    "aten.reflection_pad3d.default": (S(D, [1, 2, 3, 0, 1, 1]),),
    "aten.replication_pad1d.default": (S(L, [1, 9]), S(X, [0, 2])),
    "aten.replication_pad2d.default": (S(C, [1, 2, 3, 0]), S(C, [-1, 2, 0, -1])),
    "aten.replication_pad3d.default": (S(D, [1, 2, 3, 0, 1, 1]),),
    "aten._pad_circular.default": (S(C, [1, 2, 3, 0]), S(L, [-1, 7], refused=True)),
    "aten.flip.default": (S(X, [0]), S(B, [-1, 0]), S(Y, [1])),
    "aten.roll.default": (S(X, [1], [0]), S(B, [-2, 9], [-1, 0]), S(B, [7]), S(X, [1, 2], [1, 1])),
    "aten.repeat.default": (S(X, [3, 1]), S(X, [2, 1, 3]), S(Y, [1, 4])),
    "aten.tile.default": (S(X, [2, 1]), S(X, [3])),
    "aten.repeat_interleave.self_int": (S(X, 3, 1), S(X, 2), S(B, 2, -2)),
    "aten.pixel_shuffle.default": (S(T((2, 8, 3, 5)), 2), S(T((9, 2, 2)), 3)),
    "aten.pixel_unshuffle.default": (S(T((2, 3, 4, 6)), 2),),
    "aten.channel_shuffle.default": (S(C, 3), S(L, 2)),
    "aten.native_channel_shuffle.default": (S(C, 3),),
    **{
        f"aten.{op}2d.{overload}": samples
        for op in ("upsample_nearest", "_upsample_nearest_exact")
        for overload, samples in (
            ("default", (S(C, [10, 6]), S(C, [7, 2]), S(C, [10, 9], 2.0, 3.0))),
            ("vec", (S(C, None, [2.0, 3.0]), S(C, [4, 7], None))),
        )
    },
    **{
        f"aten.{op}{n}d.{overload}": samples
        for op in ("upsample_nearest", "_upsample_nearest_exact")
        for n, overload, samples in (
            (1, "default", (S(L, [14]), S(L, [10]))), (1, "vec", (S(L, None, [2.0]),)),
            (3, "default", (S(D, [4, 12, 7]),)), (3, "vec", (S(D, None, [2.0, 1.0, 3.0]),)),
        )
    },
    **{
        f"aten.avg_pool{n}d.default": (
            S(x, k), S(x, [3] * n, [2] * n, [1] * n), S(x, [3] * n, [2] * n, [1] * n, True),
            S(x, [3] * n, [2] * n, [1] * n, True, False), S(x, [2] * n, [3] * n),
        )
        for n, x, k in ((1, L, [7]), (2, P, [4, 3]), (3, D, [2, 3, 5]))
    },
    **{
        f"aten.max_pool{n}d_with_indices.default": (
            S(x, k), S(x, [3] * n, [2] * n, [1] * n), S(x, [2] * n, [3] * n),
            S(x, [3] * n, [2] * n, [1] * n, [1] * n, True),
            S(x, [2] * n, [1] * n, [1] * n, [2] * n),
        )
        for n, x, k in ((1, L, [7]), (2, P, [4, 3]), (3, D, [2, 3, 5]))
    },
    **{
        f"aten.max_pool{n}d.default": (S(x, [2] * n), S(x, [3] * n, [2] * n, [1] * n))
        for n, x in ((1, L), (2, P), (3, D))
    },
    **{
        f"aten.{op}avg_pool{n}d.default": samples
        for op in ("_adaptive_", "adaptive_")
        for n, samples in (
            (2, (S(P, [2, 3]), S(P, [3, 3], refused=True))), (3, (S(D, [2, 3, 1]),)),
        )
    },
    "aten.adaptive_avg_pool1d.default": (S(L, [1]), S(L, [7]), S(L, [2], refused=True)),
    "aten.adaptive_max_pool1d.default": (S(L, [1]), S(L, [2], refused=True)),
    "aten.adaptive_max_pool2d.default": (S(P, [2, 3]),),
    "aten.adaptive_max_pool3d.default": (S(D, [2, 3, 1]),),
    "aten.cumsum.default": (S(X, 1), S(X, 0), S(B, -2), S(Y, 1)),
    "aten.cumprod.default": (S(X, 1), S(B, -2)),
    "aten.logcumsumexp.default": (S(X, 1), S(B, -2)),
    "aten._native_batch_norm_legit.default": (S(C, W, W, W, W, False, 0.1, 1e-5),),
    "aten._native_batch_norm_legit.no_stats": (
        S(C, W, W, True, 0.1, 1e-5), S(L, None, None, True, 0.1, 1e-5),
    ),
    "aten.cudnn_batch_norm.default": (S(C, W, W, W, W, False, 0.1, 1e-5),),
    "aten.tril.default": (S(X), S(B, 1), S(B, -2)),
    "aten.triu.default": (S(X), S(B, 1), S(B, -2)),
    "aten.sum.default": (S(X), S(B)),
    "aten.sum.dim_IntList": (*DIM, S(X, [-1], dtype=torch.float32)),
    "aten.nansum.default": DIM,
    "aten.count_nonzero.dim_IntList": (S(X, [1]), S(B, [0, 2])),
    "aten.aminmax.default": (S(X), S(X, dim=1), S(B, dim=0, keepdim=True)),
    "aten.mean.default": (S(X), S(B)),
    "aten.mean.dim": (*DIM, S(X, [-1], dtype=torch.float32)),
    "aten.amax.default": DIM,
    "aten.amin.default": DIM,
    "aten.max.dim": ONE_DIM,
    "aten.min.dim": ONE_DIM,
    "aten.argmax.default": (S(X, 1), S(X), S(B, 1, True)),
    "aten.argmin.default": (S(X, 1), S(X), S(B, 1, True)),
    "aten.prod.dim_int": ONE_DIM,
    "aten.any.dim": ONE_DIM,
    "aten.any.dims": DIM,
    "aten.all.dim": ONE_DIM,
    "aten.all.dims": DIM,
    **{
        f"aten.{op}.correction": (
            S(X, [1]), S(X, [1], correction=0), S(X, [0], correction=2, keepdim=True),
            S(B, [1, 2]), S(B), S(X, [1], correction=0.5),
        )
        for op in ("var", "std")
    },
    # A short column whose last element is infinite has an infinite mean in Welford's order alone.
    "aten.var_mean.correction": (S(X, [1]), S(X, [1], correction=0, keepdim=True), S(B, [1, 2])),
    "aten.linalg_vector_norm.default": (
        S(X, 2, [1]), S(X, 1, [1], True), S(X, float("inf"), [0]), S(X),
        S(X, float("-inf"), [1]), S(X, 3, [1]), S(X, 0.5, [0]), S(X, 0, [1], refused=True),
    ),
    "aten.norm.ScalarOpt_dim": (S(X, None, [1]), S(X, 1, [0], True), S(X, 3, [1])),
    "aten.norm.Scalar": (S(X), S(X, 1)),
    "aten._softmax.default": (S(X, 1, False), S(X, 0, False), S(B, 1, False)),
    "aten._log_softmax.default": (S(X, 1, False), S(X, 0, False), S(B, 1, False)),
    "aten._safe_softmax.default": (S(X, 1), S(B, 1)),
    "aten.logsumexp.default": (S(X, [1]), S(X, [0], True), S(B, [1, 2])),
    "aten.native_layer_norm.default": (
        S(X, [33], V, V, 1e-5), S(X, [33], None, None, 1e-5), S(B, [5, 6], T((5, 6)), None, 1e-5),
    ),
    "aten._fused_rms_norm.default": (
        S(X, [33], V, 1e-6), S(X, [33], None, None), S(B, [5, 6], T((5, 6)), 1e-6),
    ),
    "aten.native_group_norm.default": (
        S(C, W, W, 2, 6, 15, 3, 1e-5), S(C, None, None, 2, 6, 15, 2, 1e-5),
    ),
    "aten._native_batch_norm_legit_no_training.default": (
        S(C, W, W, W, W, 0.1, 1e-5), S(C, None, None, W, W, 0.1, 1e-5), S(C, W32, W32, W32, W32,
        0.1, 1e-5),
    ),
    "aten.native_batch_norm.default": (
        S(C, W, W, W, W, False, 0.1, 1e-5), S(C, W, W, None, None, True, 0.1, 1e-5),
    ),
}  # fmt: skip

VIEWS: dict[str, tuple[Sample, ...]] = {
    "aten.view.default": (
        S(X, [165]),
        S(B, [15, 6]),
        S(B, [3, 5, 2, 3]),
        S(B, [3, 6, 5]),
        S(B, [9, 10]),
    ),
    "aten._unsafe_view.default": (S(X, [165]),),
    "aten.reshape.default": (S(B, [3, 30]),),
    "aten.unsqueeze.default": (S(X, 1), S(X, -1)),
    "aten.squeeze.default": (S(Y),),
    "aten.squeeze.dim": (S(Y, 1),),
    "aten.squeeze.dims": (S(Y, [1]),),
    "aten.alias.default": (S(X),),
    "aten.detach.default": (S(X),),
    "aten.lift_fresh.default": (S(X),),
    "aten.permute.default": (S(B, [2, 0, 1]), S(B, [-1, 1, 0])),
    "aten.transpose.int": (S(B, 0, 2), S(B, -1, -2)),
    "aten.t.default": (S(X), S(V)),
    "aten.expand.default": (S(Y, [5, 4]), S(Y, [2, -1, 3])),
    "aten.slice.Tensor": (
        S(X, 1, 0, 33),
        S(X, 1, 3, 20),
        S(X, 1, -7, 2**63 - 1),
        S(B, -1, 3, 6),
        S(X, 1, 1, 30, 4),
        S(B, 1, 0, -2),
        S(B, 2, 2, 3),
    ),
    "aten.select.int": (S(T((5, 1)), 1, 0), S(X, 1, 3), S(B, 0, -1)),
    "aten.split.Tensor": (S(X, 11, 1), S(X, 10, -1), S(X, 2), S(X, 40, 1)),
    "aten.split_with_sizes.default": (S(X, [11, 22], 1), S(X, [1, 4])),
    "aten.unbind.int": (S(X), S(B, -1)),
    "aten.unfold.default": (S(X, 1, 4, 3), S(B, 0, 2, 1)),
}
"""Views of a value that the region computes."""

CREATIONS: dict[str, tuple[Sample, ...]] = {
    "aten.zeros.default": (S([5, 33]),),
    "aten.ones.default": (S([5, 33]),),
    "aten.full.default": (S([5, 33], 1.5), S([33], 2)),
    "aten.scalar_tensor.default": (S(1.5),),
    "aten.arange.default": (S(33),),
    "aten.arange.start": (S(2, 35),),
    "aten.arange.start_step": (S(2, 68, 2), S(0.5, 33.5, 1.0), S(2, 35)),
    "aten.full_like.default": (S(X, 1.5),),
    "aten.fill.Scalar": (S(X, 1.5), S(X, 2)),
    "aten.zero.default": (S(X),),
    "aten.zeros_like.default": (S(X),),
    "aten.ones_like.default": (S(X),),
    "aten.new_zeros.default": (S(X, [5, 33]),),
    "aten.new_ones.default": (S(X, [33]),),
    "aten.new_full.default": (S(X, [5, 33], 1.5),),
    "aten.bernoulli.p": (S(X, 0.3), S(B, 0.0), S(X, 1.0)),
    "aten.uniform.default": (S(X), S(B, -1.0, 3.0)),
    "aten.normal_functional.default": (S(X), S(B, 0.5, 2.0)),
    "aten.exponential.default": (S(X), S(B, 0.5)),
    "aten.rand.default": (S([5, 33]), S([5, 1])),
    "aten.randn.default": (S([5, 33]), S([33])),
    "aten.rand_like.default": (S(X), S(B)),
    "aten.randn_like.default": (S(X), S(B)),
    "aten.normal.float_float": (S(0.5, 2.0, [5, 33]),),
}
"""Tensors made from nothing, added to an input."""

FIRST_OUTPUT_ONLY = {
    "aten.native_batch_norm.default", "aten._native_batch_norm_legit.default",
    "aten.cudnn_batch_norm.default",
    "aten._native_batch_norm_legit_no_training.default", "aten.log_sigmoid_forward.default",
    *(f"aten.max_pool{n}d_with_indices.default" for n in (1, 2, 3)),
    *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)),
}  # fmt: skip
"""The other outputs hold nothing, or have no meaning (the places of a pooling)."""


def target_of(name: str) -> Any:
    return reduce(getattr, name.split("."), torch.ops)


def samples_of(name: str) -> tuple[Sample, ...]:
    for table in (SAMPLES, VIEWS, CREATIONS):
        if name in table:
            return table[name]
    return DEFAULT


def made(value: Any, make: Callable[[T], Any]) -> Any:
    """An argument with its tensors made."""
    if isinstance(value, T):
        return make(value)
    return [made(item, make) for item in value] if isinstance(value, list) else value


def recorded(
    tape: Tape, name: str, sample: Sample, dtype: torch.dtype, make: Callable[[T], torch.Tensor]
) -> list[torch.Tensor]:
    """The op on inputs: a view between two ops, a creation times an input, others alone."""
    target, aten = target_of(name), torch.ops.aten
    args = made(list(sample.args), lambda t: tape.input(make(t)))
    kwargs = dict(sample.kwargs)
    if name in VIEWS:
        seen = tape.call(target, tape.call(aten.neg.default, args[0]), *args[1:], **kwargs)
        return [tape.call(aten.abs.default, part) for part in results_of(seen)]
    if name in CREATIONS:
        if args and not isinstance(args[0], torch.Tensor):
            kwargs |= {"dtype": dtype, "device": torch.device("cuda")}
        x = args[0] if args and isinstance(args[0], torch.Tensor) else tape.input(make(X))
        return [tape.call(aten.mul.Tensor, x, tape.call(target, *args, **kwargs))]
    results = results_of(tape.call(target, *args, **kwargs))
    return results[:1] if name in FIRST_OUTPUT_ONLY else results


def results_of(result: Any) -> list[torch.Tensor]:
    """The tensors that a call returns."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [tensor for tensor in found if tensor is not None]


def needs_data(sample: Sample) -> bool:
    """Whether eager takes only elements from a range that the checks do not know."""
    found: list[bool] = []
    made(list(sample.args), lambda t: found.append(t.below > 0))
    return any(found)


def _graph(
    name: str, sample: Sample, dtype: torch.dtype, lay: Callable[[torch.Tensor], torch.Tensor]
) -> Dataflow:
    tape = Tape()
    return tape.flow(*recorded(tape, name, sample, dtype, lambda t: lay(t.make(dtype))))


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The second dimension's elements next to each other in memory."""
    return x if x.dim() < 2 else x.movedim(1, -1).contiguous().movedim(-1, 1)


def eager_takes(name: str, sample: Sample, dtype: torch.dtype) -> bool:
    """Whether eager has a kernel for the dtype."""
    args = made(list(sample.args), lambda t: t.make(dtype))
    try:
        target_of(name)(*args, **sample.kwargs)
        if name in VIEWS:
            args[0].neg().abs()
        if name in CREATIONS and not isinstance(sample.args[0], T):
            target_of(name)(*args, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        return False
    return True


NAMES = [
    name
    for name, op in REGISTRY.items()
    if op.meaning is not None and not re.search(r"[^_]_[.]", name)  # in place
]


def _drawn_dtype(name: str, sample: Sample) -> torch.dtype:
    """One of those that eager takes, by a hash of the call; floating for every second."""
    number = crc32(f"{name} {sample.args} {sample.kwargs}".encode())
    kinds = FLOATS if number % 2 else EVERY
    taken = [dtype for dtype in kinds if eager_takes(name, sample, dtype)]
    return taken[number % len(taken)] if taken else torch.float32


Call = tuple[str, Sample, torch.dtype]
Pending = tuple[str, Callable[[], Check]]


def _calls(dtype: torch.dtype) -> list[Call]:
    """In one dtype, of each op as many samples as are judged in it."""
    few = 99 if SLOW else SAMPLES_OF.get(dtype, 1)
    return [(name, sample, dtype) for name in NAMES for sample in samples_of(name)[:few]]


def _pending(
    calls: list[Call], worker: Worker, cases: int, *, checks_an_op: int = 99
) -> Iterator[Pending]:
    """Calls that eager takes and that have a plan are emitted and handed to the checker, the first
    few of each op."""
    handed = Counter[str]()
    for name, sample, dtype in calls:
        done = handed[name] >= checks_an_op
        if done or needs_data(sample) or not eager_takes(name, sample, dtype):
            continue
        what = f"{name} {sample.args} {sample.kwargs} in {dtype}"
        decision = decided(flow := _graph(name, sample, dtype, torch.Tensor.contiguous))
        if decision.subject.plan is None:
            parts = name in VIEWS and "different iteration spaces" in why_not(decision)
            must = dtype.is_floating_point and not sample.refused and not parts
            assert not must, f"{what} has no plan: {why_not(decision)}"
            continue
        assert not (sample.refused and dtype.is_floating_point), f"{what} has a plan"
        kernel = emit(flow, decision, "alone", RULES)
        handed[name] += 1
        kernel = replace(kernel, cases=kernel.cases[:cases])
        yield what, submit_check(worker, kernel, seeds=SEEDS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(4))
def test_every_op_in_one_dtype(part: int, worker: Worker) -> None:
    """Of each op the call that a hash puts first."""
    names = NAMES[part::4]
    calls = [(n, each, _drawn_dtype(n, each)) for n in names for each in samples_of(n)]
    calls.sort(key=lambda call: crc32(f"{call}".encode()))
    pending = list(_pending(calls, worker, 1, checks_an_op=1))
    checks = [(what, answer()) for what, answer in pending]
    assert [f"{what}: {check.failure}" for what, check in checks if not check.passed] == []
    assert len({what.split()[0] for what, _ in checks}) > 37


@pytest.mark.deep
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_every_op_as_eager(dtype: torch.dtype, worker: Worker) -> None:
    cases = 99 if SLOW else 2 if dtype == torch.float32 else 1
    pending = list(_pending(_calls(dtype), worker, cases))
    checks = [(what, answer()) for what, answer in pending]
    assert [f"{what}: {check.failure}" for what, check in checks if not check.passed] == []
    assert len({what.split()[0] for what, _ in checks}) > (150 if dtype in FLOATS else 50)


NOT_PERMUTED = {
    "aten._weight_norm_interface.default": "eager takes weights in one piece alone",
    "aten._log_softmax.default": "a CPU build's fake tensors ask for CUDA",
    "aten.native_group_norm.default": "eager takes images in one piece alone",
    "aten.nll_loss2d_backward.default": "the same",
    "aten.view.default": "no view there",
}
"""Ops that no graph calls on such inputs, and why."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize("part", range(12))
def test_every_op_lays_its_results_out_as_the_graph_says(part: int, worker: Worker) -> None:
    """A CPU's eager lays some out otherwise: its values are judged, not its strides."""
    pending: list[Pending] = []
    for name in NAMES[part::12]:
        for sample in samples_of(name):
            what = f"{name} {sample.args} {sample.kwargs}"
            if name in NOT_PERMUTED or needs_data(sample):
                continue
            if not eager_takes(name, sample, torch.float32):
                continue
            decision = decided(flow := _graph(name, sample, torch.float32, channels_last))
            if decision.subject.plan is not None:
                kernel = emit(flow, decision, "alone", RULES)
                kernel = replace(kernel, cases=kernel.cases[:1])
                pending.append((what, submit_check(worker, kernel, seeds=1)))
    checks = [(what, answer()) for what, answer in pending]
    assert [f"{what}: {check.failure}" for what, check in checks if not check.passed] == []
    assert len({what.split()[0] for what, _ in checks}) > 10


def test_every_entry_has_its_sample() -> None:
    known = {*SAMPLES, *VIEWS, *CREATIONS}
    assert known <= set(NAMES), known - set(NAMES)
    for name in set(NAMES) - known:
        (sample,) = DEFAULT
        assert eager_takes(name, sample, torch.float32), f"{name} needs a sample call of its own"


def test_in_place_overloads_mean_what_the_functional_ones_do() -> None:
    found = [name for name in NAMES if in_place(name) in REGISTRY]
    assert len(found) > 100
    for name in found:
        assert REGISTRY[in_place(name)].meaning is REGISTRY[name].meaning
