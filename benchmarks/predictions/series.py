"""Small patterns over many sizes, which the fit sees: operators alone and chains to be fused."""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from . import shapes
from .shapes import COLUMNS, HEADS, IMAGES, ROWS, SIGNALS, VOLUMES, Draw, Shape

DRAWN = 6
"""Uses of a pattern at sizes that are drawn."""

Inputs = Callable[[Shape], tuple[Shape, ...]]
"""The shapes of the inputs, of the first one's."""


def alone(shape: Shape) -> tuple[Shape, ...]:
    """One input."""
    return (shape,)


def alike(count: int) -> Inputs:
    """So many inputs of one shape."""
    return lambda shape: (shape,) * count


def with_last(count: int) -> Inputs:
    """A tensor, and vectors along its last dimension."""
    return lambda shape: (shape, *((shape[-1],),) * count)


def with_channels(count: int) -> Inputs:
    """A tensor, and tensors that have its channels alone."""
    return lambda shape: (shape, *((shape[1], *(1,) * (len(shape) - 2)),) * count)


@dataclass(frozen=True)
class Pattern:
    """A function, and the sizes of its first input, by hand and drawn, which `inputs` makes the
    shapes of all from; `integers` are the inputs that hold indices."""

    name: str
    function: Callable[..., Any]
    sizes: Sequence[Shape]
    inputs: Inputs = alone
    draw: Draw | None = None
    integers: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[tuple[Shape, ...]]:
        """Of the inputs, in each use."""
        drawn = shapes.drawn(self.name, self.draw, DRAWN) if self.draw else []
        return [self.inputs(size) for size in (*self.sizes, *drawn)]


def patterns() -> list[Pattern]:
    """All of them."""
    return [
        *_chains(), *_epilogues(), *_norms(), *_features(), *_reductions(), *_windows(), *_copies(),
        *_layers(),
    ]  # fmt: skip


def _chains() -> list[Pattern]:
    def add_norm(x: Any, y: Any, w: Any, b: Any) -> Any:
        z = x + y
        return z, F.layer_norm(z, (z.shape[-1],), w, b)

    def gated(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    def rms(x: Any, w: Any) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    heavy = lambda x: torch.sin(torch.tanh(torch.exp(-torch.erf(x)))) + torch.log1p(x * x)  # noqa: E731
    grouped = (*IMAGES, *VOLUMES, (1024, 8192), (16384, 512))
    return [
        Pattern("gelu", lambda x, w: F.gelu(x * 0.5 + w), ROWS, with_last(1), shapes.rows),
        Pattern("add", lambda x, y: torch.relu(x + y), ROWS, alike(2), shapes.rows),
        Pattern("heavy", heavy, ROWS, draw=shapes.rows),
        Pattern("gated", gated, ROWS, lambda s: ((s[0], 2 * s[1]),), shapes.rows),
        Pattern("softmax", lambda x: torch.softmax(x * 0.125, -1), ROWS, draw=shapes.rows),
        Pattern("rms", rms, ROWS, with_last(1), shapes.rows),
        Pattern("add_norm", add_norm, ROWS, lambda s: (s, s, s[-1:], s[-1:]), shapes.rows),
        Pattern("rows", lambda x: (x * x).mean(-1), ROWS, draw=shapes.rows),
        Pattern("column", lambda x: torch.relu(x).sum(0), ROWS, draw=shapes.rows),
        Pattern(
            "transposed",
            lambda x, y: torch.relu(x.t() + y),
            ROWS,
            lambda s: (s, s[::-1]),
            shapes.rows,
        ),
        Pattern("joined", lambda x, y: torch.cat((-x, y), -1) * 2, ROWS, alike(2), shapes.rows),
        Pattern("loss", lambda x, y: ((x - y) ** 2).mean(), ROWS, alike(2), shapes.rows),
        Pattern(
            "biased",
            lambda x, c: torch.sigmoid(torch.tanh(x + c) * 2),
            IMAGES,
            with_channels(1),
            shapes.images,
        ),
        Pattern(
            "group_norm",
            lambda x, c: torch.tanh(F.group_norm(x * c, 8)),
            grouped,
            with_channels(1),
            shapes.images,
        ),
        Pattern(
            "instance_norm",
            lambda x: F.instance_norm(torch.relu(x)),
            (*IMAGES, *VOLUMES),
            draw=shapes.images,
        ),
        Pattern(
            "channels",
            lambda x: torch.softmax(torch.tanh(x), 1),
            (*IMAGES, *VOLUMES),
            draw=shapes.images,
        ),
        Pattern(
            "pooled",
            lambda x: torch.tanh(F.max_pool2d(torch.relu(x), 2)),
            IMAGES,
            draw=shapes.images,
        ),
        Pattern(
            "averaged", lambda x: F.avg_pool2d(torch.sigmoid(x), 4), IMAGES, draw=shapes.images
        ),
        Pattern(
            "pooled3d",
            lambda x: torch.sigmoid(F.max_pool3d(torch.tanh(x), 2)),
            VOLUMES,
            draw=shapes.volumes,
        ),
        Pattern("global", lambda x: torch.relu(x * 2).mean((2, 3)), IMAGES, draw=shapes.images),
        Pattern(
            "least", lambda x: torch.min(x * 2, 1)[0], (*IMAGES, *VOLUMES), draw=shapes.volumes
        ),
        Pattern(
            "turned",
            lambda x, c, s: x * c + torch.cat((-x[..., 64:], x[..., :64]), -1) * s,
            [(1, 8, 512, 128), (4, 32, 2048, 128)],
            lambda s: (s, s[2:], s[2:]),
        ),
        Pattern(
            "rotated",
            lambda x, c, s: (
                x * c + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * s
            ),
            (),
            lambda s: (s, s[2:], s[2:]),
            shapes.heads,
        ),
        Pattern(
            "masked_softmax",
            lambda x, m: torch.softmax(x * 0.125 + m, -1),
            [(8, 12, 512, 512), (1, 32, 1024, 1024)],
            lambda s: (s, s[2:]),
        ),
    ]


def _epilogues() -> list[Pattern]:
    """Of products and of convolutions, as models have them."""

    def clamped_norm(x: Any, w: Any, b: Any) -> Any:
        return F.hardtanh(F.group_norm(x, 8, w, b), -2.0, 2.0)

    def residual_norm(x: Any, w: Any, b: Any) -> Any:
        return F.hardswish(torch.tanh(F.group_norm(x, 8, w, b))) + x

    def pooled_sum(x: Any) -> Any:
        return torch.sigmoid(F.avg_pool2d(x, 4)).sum((1, 2, 3))

    both = (*IMAGES, *VOLUMES)
    return [
        Pattern("mish", lambda x: torch.tanh(F.mish(F.mish(x))), (), draw=shapes.images),
        Pattern(
            "leaky", lambda x, c: F.leaky_relu(x * c, 0.2), (), with_channels(1), shapes.volumes
        ),
        Pattern(
            "clamped", lambda x, c: (x + c).clamp(0, 1) / 2, (), with_channels(1), shapes.images
        ),
        Pattern("softplus", lambda x, c: F.softplus(x) * c, (), with_channels(1), shapes.volumes),
        Pattern("swish", lambda x: torch.sigmoid(x) * x * 2.0, (), draw=shapes.rows),
        Pattern("hard", lambda x, y: F.hardswish(x + y) * x, (), alike(2), shapes.volumes),
        Pattern("scaled_bias", lambda x, w: (x + w) * 0.5 + x, (), with_last(1), shapes.rows),
        Pattern("pointwise_least", lambda x: torch.tanh(torch.tanh(x.min(1, True)[0])), both),
        Pattern("least_of_images", lambda x: F.gelu(x.amin(1, True).sum(2, True)), both),
        Pattern(
            "summed_exponents",
            lambda x: F.relu(torch.logsumexp(x, 1, True)),
            (),
            draw=shapes.volumes,
        ),
        Pattern("total", lambda x: torch.tanh(x.sum(1, True) * 2), (), draw=shapes.rows),
        Pattern("most", lambda x: F.gelu(x.max(1, True)[0] - 1), (), draw=shapes.rows),
        Pattern("mean_less", lambda x: F.gelu(x - x.mean(1, True)), (), draw=shapes.rows),
        Pattern(
            "summed_rows", lambda x: torch.logsumexp(F.leaky_relu(x), 1, True), (), draw=shapes.rows
        ),
        Pattern(
            "averaged_rows", lambda x: F.gelu(F.avg_pool1d(x[None], 16)[0]), (), draw=shapes.rows
        ),
        Pattern(
            "clamped_group_norm",
            clamped_norm,
            (),
            lambda s: (s, s[1:2], s[1:2]),
            shapes.images,
        ),
        Pattern(
            "residual_group_norm",
            residual_norm,
            (),
            lambda s: (s, s[1:2], s[1:2]),
            shapes.images,
        ),
        Pattern(
            "group_norm_rows",
            lambda x, w, b: F.hardtanh(F.group_norm(x, 8, w, b)),
            [(1024, 8192), (128, 1024), (16384, 512), (4096, 4096)],
            with_last(2),
        ),
        Pattern(
            "scaled_batch_norm",
            lambda x, m, v: F.batch_norm(x, m, v) * 2.0 + 1.0,
            (),
            lambda s: (s, s[1:2], s[1:2]),
            shapes.images,
        ),
        Pattern(
            "divided_instance_norm",
            lambda x: F.instance_norm(x) / 2.0,
            (),
            draw=shapes.images,
        ),
        Pattern(
            "layer_norm_gelu",
            lambda x, w, b: F.gelu(F.layer_norm(x, x.shape[-1:], w, b)) * 2,
            (),
            with_last(2),
            shapes.volumes,
        ),
        Pattern(
            "softmax_channels_scaled",
            lambda x, c: torch.sigmoid((torch.softmax(x, 1) + c) * 2),
            (),
            with_channels(1),
            shapes.images,
        ),
        Pattern(
            "mean_channels", lambda x: torch.tanh(x.mean(1, True) * 2), (), draw=shapes.volumes
        ),
        Pattern("mean_volumes", lambda x: F.relu(x).mean((2, 3, 4)), (), draw=shapes.volumes),
        Pattern("pooled_sum", pooled_sum, (), draw=shapes.images),
        Pattern(
            "pooled_twice",
            lambda x: F.max_pool3d(F.max_pool3d(x, 2), 2).sum(1, True),
            (),
            draw=shapes.volumes,
        ),
        Pattern(
            "averaged_volumes",
            lambda x: F.gelu(F.avg_pool3d(x, 2)) + 1,
            (),
            draw=shapes.volumes,
        ),
    ]


def _norms() -> list[Pattern]:
    long: tuple[Shape, ...] = ((16, 64, 256, 256), (128, 64, 64, 64), (512, 1, 1, 65536))
    grouped = (*IMAGES, *VOLUMES, (1024, 8192), (16384, 512))
    return [
        Pattern("softmax_rows", lambda x: torch.softmax(x, -1), ROWS, draw=shapes.rows),
        Pattern("log_softmax_rows", lambda x: F.log_softmax(x, -1), ROWS[::2], draw=shapes.rows),
        Pattern(
            "softmax_channels",
            lambda x: torch.softmax(x, 1),
            (*IMAGES, *VOLUMES),
            draw=shapes.images,
        ),
        Pattern(
            "layer_norm_rows",
            lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
            ROWS,
            with_last(2),
            shapes.rows,
        ),
        Pattern(
            "layer_norm_long",
            lambda x: F.layer_norm(x, x.shape[1:]),
            (*long, *IMAGES[1:]),
            draw=shapes.volumes,
        ),
        *(
            Pattern(
                f"group_norm_{groups}",
                lambda x, groups=groups: F.group_norm(x, groups),
                grouped,
                draw=draw,
            )
            for groups, draw in ((4, shapes.volumes), (16, None))
        ),
        Pattern("group_norm_8", lambda x: F.group_norm(x, 8), (), draw=shapes.images),
        Pattern(
            "instance_norm_alone", F.instance_norm, (*IMAGES, *VOLUMES, *long), draw=shapes.images
        ),
        Pattern(
            "batch_norm",
            lambda x, m, v: F.batch_norm(x, m, v),
            (*IMAGES, *VOLUMES, (1024, 8192), (16384, 4096), (256, 512)),
            lambda s: (s, s[1:2], s[1:2]),
            shapes.images,
        ),
    ]


def _features() -> list[Pattern]:
    """What stands behind a matrix product: rows of features."""
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
    statistics: Inputs = lambda s: (s, s[1:], s[1:])  # noqa: E731
    return [
        Pattern(
            "batch_norm_features",
            lambda x, m, v: F.batch_norm(x, m, v),
            (),
            statistics,
            shapes.features,
        ),
        Pattern(
            "batch_norm_features_gelu",
            lambda x, m, v: F.gelu(F.batch_norm(x * 0.5, m, v)),
            (),
            statistics,
            shapes.features,
        ),
        *(
            Pattern(
                f"group_norm_features_{each}",
                lambda x, n=each: F.leaky_relu(F.group_norm(x, x.shape[1] // n)) * 2.0,
                (),
                draw=shapes.features,
            )
            for each in (16, 64)
        ),
        Pattern("softmax_features", lambda x: F.softmax(x, -1), (), draw=shapes.features),
        Pattern("gelu_softmax", lambda x: F.softmax(F.gelu(x), -1), (), draw=shapes.features),
        *(
            Pattern(f"{name}_of_one", lambda x, f=f: f(x, 1, True) * 2.0, (), draw=shapes.ones)
            for name, f in (("mean", torch.mean), ("sum", torch.sum), ("most", torch.amax))
        ),
        Pattern("other_type", lambda x: x.to(other[x.dtype]), (), draw=shapes.features),
        Pattern("scaled_type", lambda x: (x * 2.0).to(other[x.dtype]), (), draw=shapes.features),
        Pattern(
            "masked_cumsum", lambda x, y: (x * y).cumsum(-1), (), alike(2), shapes.features
        ),
    ]  # fmt: skip


def _reductions() -> list[Pattern]:
    images = (*IMAGES, *VOLUMES)
    return [
        *(
            Pattern(f"{name}_rows", lambda x, f=f: f(x, -1), ROWS[::step], draw=shapes.rows)
            for name, f, step in (
                ("mean", torch.mean, 1), ("sum", torch.sum, 2),
                ("max", lambda x, d: x.max(d)[0], 2), ("min", lambda x, d: x.min(d)[0], 3),
                ("argmax", torch.argmax, 3), ("logsumexp", torch.logsumexp, 2),
                ("norm", torch.linalg.vector_norm, 2),
            )
        ),
        *(
            Pattern(
                f"{name}_columns", lambda x, f=f: f(x, 1), [*COLUMNS, *images[:3]], draw=draw
            )
            for name, f, draw in (
                ("mean", torch.mean, shapes.columns), ("sum", torch.sum, shapes.images),
                ("max", lambda x, d: x.max(d)[0], shapes.columns),
                ("min", lambda x, d: x.min(d)[0], shapes.volumes),
                ("argmin", torch.argmin, shapes.columns),
                ("logsumexp", torch.logsumexp, shapes.images),
                ("norm", torch.linalg.vector_norm, shapes.columns),
            )
        ),
        Pattern("prod_columns", lambda x: x.prod(1), (), draw=shapes.columns),
        Pattern("mean_all", torch.mean, ROWS[::2], draw=shapes.rows),
        Pattern("sum_all", torch.sum, (), draw=shapes.columns),
        Pattern("mean_images", lambda x: x.mean((2, 3)), IMAGES, draw=shapes.images),
        Pattern("sum_images", lambda x: x.sum((1, 2, 3)), (), draw=shapes.images),
        Pattern("mean_two", lambda x: x.mean((1, 2)), (), draw=shapes.images),
        Pattern("sum_first", lambda x: x.sum(0), (), draw=shapes.images),
        Pattern("cumsum_rows", lambda x: x.cumsum(-1), ROWS[::2], draw=shapes.rows),
        Pattern("cumsum_columns", lambda x: x.cumsum(1), COLUMNS, draw=shapes.columns),
        Pattern("loss_huber", F.smooth_l1_loss, ROWS[::3], alike(2), shapes.rows),
        Pattern(
            "loss_hinge",
            lambda x, y: torch.clamp(1 - x * y, min=0).mean(),
            (),
            alike(2),
            shapes.rows,
        ),
        Pattern(
            "loss_kl",
            lambda x, y: F.kl_div(F.log_softmax(x, -1), torch.softmax(y, -1)),
            (),
            alike(2),
            shapes.rows,
        ),
        Pattern(
            "loss_cosine",
            lambda x, y: (1 - F.cosine_similarity(x, y, 1)).mean(),
            (),
            alike(2),
            shapes.rows,
        ),
        Pattern(
            "loss_classes",
            F.cross_entropy,
            ROWS[1::2],
            lambda s: (s, s[:1]),
            shapes.rows,
            integers=(1,),
        ),
        Pattern("normalized", lambda x: x / x.norm(2, 1, True), (), draw=shapes.rows),
        Pattern("absolute", lambda x: x / x.abs().mean(1, True), (), draw=shapes.rows),
        Pattern(
            "rms_channels",
            lambda x: x / torch.sqrt((x**2).mean(1, True) + 1e-5),
            (),
            draw=shapes.images,
        ),
    ]  # fmt: skip


def _windows() -> list[Pattern]:
    return [
        *(
            Pattern(
                f"max_pool_{k}_{s}",
                lambda x, k=k, s=s: F.max_pool2d(x, k, s, k // 2),
                IMAGES,
                draw=shapes.images if k < 4 else None,
            )
            for k, s in ((2, 2), (3, 2), (4, 1), (4, 4))
        ),
        *(
            Pattern(
                f"avg_pool_{k}_{s}",
                lambda x, k=k, s=s: F.avg_pool2d(x, k, s),
                IMAGES,
                draw=shapes.images if s > 2 else None,
            )
            for k, s in ((2, 2), (3, 1), (4, 4), (11, 11))
        ),
        *(
            Pattern(
                f"max_pool3d_{k}_{s}",
                lambda x, k=k, s=s: F.max_pool3d(x, k, s),
                VOLUMES,
                draw=shapes.volumes,
            )
            for k, s in ((2, 2), (3, 2))
        ),
        *(
            Pattern(
                f"avg_pool3d_{k}_{s}",
                lambda x, k=k, s=s: F.avg_pool3d(x, k, s),
                VOLUMES,
                draw=shapes.volumes,
            )
            for k, s in ((2, 2), (3, 2))
        ),
        Pattern("max_pool1d", lambda x: F.max_pool1d(x, 8, 1, 4), SIGNALS, draw=shapes.signals),
        Pattern("avg_pool1d", lambda x: F.avg_pool1d(x, 8, 1, 4), SIGNALS, draw=shapes.signals),
    ]


def _copies() -> list[Pattern]:
    images = (*IMAGES, *VOLUMES)
    return [
        Pattern(
            "cat_last", lambda x, y: torch.cat((x, y), -1), HEADS, alike(2), shapes.heads
        ),
        Pattern(
            "cat_first",
            lambda x, y: torch.cat((x, y), 0),
            (*HEADS, (8192, 8192)),
            alike(2),
            shapes.rows,
        ),
        Pattern(
            "cat_one",
            lambda x, y: torch.cat((x, y), 1),
            [(8, 1, 1024)],
            lambda s: (s, (8, 196, 1024)),
        ),
        Pattern(
            "cat_channels", lambda x, y: torch.cat((x, y), 1), (), alike(2), shapes.images
        ),
        Pattern(
            "cat_part",
            lambda x, y: torch.cat((x[..., 32:], y[..., :32]), -1),
            HEADS,
            alike(2),
            shapes.heads,
        ),
        Pattern("flip", lambda x: x.flip(-1), ROWS[::3], draw=shapes.rows),
        Pattern(
            "transposed_copy",
            lambda x: x.transpose(1, 2).contiguous(),
            HEADS,
            draw=shapes.heads,
        ),
        Pattern(
            "channels_copy", lambda x: x.permute(0, 2, 3, 1).contiguous(), (), draw=shapes.images
        ),
        Pattern("half_neg", lambda x: -x[..., x.shape[-1] // 2 :], HEADS, draw=shapes.heads),
        Pattern(
            "transposed_mul",
            lambda x, y: x.transpose(1, 2) * y.transpose(1, 2),
            HEADS,
            alike(2),
            shapes.heads,
        ),
        Pattern("channels_mul", lambda x, c: x * c, images, with_channels(1), shapes.images),
        Pattern("last_add", lambda x, c: x + c, ROWS, with_last(1), shapes.rows),
        Pattern("first_mul", lambda x, c: x * c, ROWS, lambda s: (s, (s[0], 1)), shapes.rows),
        Pattern("double", lambda x: x.double(), ROWS[::3], draw=shapes.rows),
        Pattern("gelu_alone", F.gelu, (), draw=shapes.rows),
        Pattern("tanh_alone", torch.tanh, (), draw=shapes.images),
        Pattern("product", lambda x, y: x * y, (), alike(2), shapes.images),
        Pattern(
            "filled", lambda x, y: x.masked_fill(y > 0, -1e4), (), alike(2), shapes.heads
        ),
        Pattern(
            "embedding",
            lambda table, at: F.embedding(at, table),
            [
                (32000, 4096, 1, 512),
                (50432, 6144, 4, 512),
                (30522, 768, 8, 512),
                (1000, 64, 16, 64),
            ],
            lambda s: (s[:2], s[2:]),
            integers=(1,),
        ),
        Pattern(
            "taken",
            lambda x, at: x[at],
            [(512, 4096), (8192, 4096), (65536, 512), (64, 128)],
            lambda s: (s, s[:1]),
            integers=(1,),
        ),
    ]  # fmt: skip


def _layers() -> list[Pattern]:
    """What stands around products in networks, at the sizes that it has there."""
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
    statistics: Inputs = lambda s: (s, s[1:2], s[1:2])  # noqa: E731
    features: Inputs = lambda s: (s, s[1:], s[1:])  # noqa: E731

    def turned_norm(x: Any) -> Any:
        y = x.transpose(1, 2)
        return y / y.norm(2, -1, True)

    def joined_norm(*parts: Any) -> Any:
        *images, m, v = parts
        return torch.relu(F.batch_norm(torch.cat(images, 1), m, v))

    def several(count: int) -> Inputs:
        return lambda s: (*(s,) * count, (count * s[1],), (count * s[1],))

    return [
        *(
            Pattern(f"batch_norm_{name}", lambda x, m, v: F.batch_norm(x, m, v), (), statistics, d)
            for name, d in (("odd", shapes.odd_images), ("odd_volumes", shapes.odd_volumes))
        ),
        Pattern(
            "batch_norm_pooled",
            lambda x, m, v: F.avg_pool3d(F.avg_pool3d(F.batch_norm(x, m, v), 2), 2),
            (),
            statistics,
            shapes.odd_volumes,
        ),
        Pattern(
            "unit_heads", lambda x, c: x / x.norm(2, -1, True) * c, (), lambda s: (s, (s[1], 1, 1)),
            shapes.short_heads,
        ),
        Pattern("turned_unit", turned_norm, (), draw=shapes.tokens),
        Pattern(
            "turned_layer_norm",
            lambda x, w, b: F.layer_norm(x.transpose(1, 2), x.shape[1:2], w, b),
            (),
            lambda s: (s, s[1:2], s[1:2]),
            shapes.tokens,
        ),
        Pattern(
            "assigned", lambda x, m, v: torch.softmax(F.batch_norm(x, m, v), -1), (), features,
            shapes.clusters,
        ),
        Pattern("gelu_held_softmax", lambda x: torch.softmax(F.gelu(x), -1), (),
                draw=shapes.held_rows),
        Pattern("long_softmax", lambda x: torch.softmax(x * 0.125, -1), (), draw=shapes.long_rows),
        Pattern("square_cumsum", lambda x: (x * 2).cumsum(-1), (), draw=shapes.squares),
        Pattern("square_cumsum_first", lambda x: (x * 2).cumsum(0), (), draw=shapes.squares),
        Pattern("lower", lambda x: torch.tril(x * 2), (), draw=shapes.squares),
        Pattern(
            "of_two_types", lambda x, c: torch.relu(x * c.to(other[c.dtype])), (),
            lambda s: (s, (s[0], 1)), shapes.rows,
        ),
        Pattern(
            "both_of_two_types", lambda x, y: x * y.to(other[y.dtype]), (), alike(2), shapes.rows
        ),
        Pattern(
            "quarter_turned",
            lambda x, c: torch.cat((x[..., :16] * c[..., :16], x[..., 16:]), -1),
            (),
            lambda s: (s, s[2:]),
            shapes.heads,
        ),
        Pattern("joined_norm", joined_norm, (), several(6), shapes.images),
        Pattern("rolled", lambda x: torch.roll(x, (-3, -3), (1, 2)) * 2, (), draw=shapes.heads),
        Pattern(
            "stacked", lambda x, y: torch.stack((x * 2, y), -1), (), alike(2), shapes.clusters
        ),
        Pattern(
            "embedded",
            lambda table, at: F.embedding(at, table) * 0.5,
            [(32000, 1024, 2, 512), (30522, 768, 16, 128), (512, 384, 4, 384), (1000, 16, 512, 512),
             (50000, 4096, 4, 1024)],
            lambda s: (s[:2], s[2:]),
            integers=(1,),
        ),
        Pattern(
            "picked",
            lambda x, at: x[at] * 2,
            [(64, 16), (2401, 8), (1024, 64), (4096, 1024), (16384, 256)],
            lambda s: (s, s[:1]),
            integers=(1,),
        ),
        Pattern(
            "least_then_softmax", lambda x: torch.softmax(x.amin(2), 1), (), draw=shapes.volumes
        ),
    ]  # fmt: skip
