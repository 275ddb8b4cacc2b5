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

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A function, and the shapes of its inputs in each of its uses; `integers` are the inputs that
    hold indices."""

    name: str
    function: Callable[..., Any]
    shapes: Sequence[tuple[Shape, ...]]
    integers: tuple[int, ...] = ()


ROWS: tuple[Shape, ...] = (
    (16, 256), (64, 1024), (256, 1024), (1024, 1024), (2048, 2048), (4096, 4096),
    (16384, 4096), (65536, 8192), (131072, 128), (1048576, 64), (32, 262144), (4095, 1023),
    (65535, 2047), (512, 16384),
)  # fmt: skip
IMAGES: tuple[Shape, ...] = (
    (8, 16, 30, 30), (16, 64, 56, 56), (64, 64, 112, 112), (128, 32, 126, 126), (16, 128, 255, 255),
)  # fmt: skip
VOLUMES: tuple[Shape, ...] = ((8, 16, 16, 32, 32), (16, 32, 24, 48, 48), (16, 64, 31, 62, 62))


def patterns() -> list[Pattern]:
    """All of them."""
    return [*_chains(), *_norms(), *_reductions(), *_windows(), *_copies()]


def _alike(shapes: Sequence[Shape], count: int = 1) -> list[tuple[Shape, ...]]:
    return [(shape,) * count for shape in shapes]


def _with_last(shapes: Sequence[Shape], count: int = 1) -> list[tuple[Shape, ...]]:
    """A tensor, and vectors along its last dimension."""
    return [(shape, *((shape[-1],),) * count) for shape in shapes]


def _with_channels(shapes: Sequence[Shape]) -> list[tuple[Shape, ...]]:
    return [(shape, (shape[1], *(1,) * (len(shape) - 2))) for shape in shapes]


def _chains() -> list[Pattern]:
    def add_norm(x: Any, y: Any, w: Any, b: Any) -> Any:
        z = x + y
        return z, F.layer_norm(z, (z.shape[-1],), w, b)

    def gated(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    def rms(x: Any, w: Any) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    return [
        Pattern("gelu", lambda x, w: F.gelu(x * 0.5 + w), _with_last(ROWS)),
        Pattern("add", lambda x, y: torch.relu(x + y), _alike(ROWS, 2)),
        Pattern(
            "heavy",
            lambda x: torch.sin(torch.tanh(torch.exp(-torch.erf(x)))) + torch.log1p(x * x),
            _alike(ROWS),
        ),
        Pattern("gated", gated, [((rows, 2 * length),) for rows, length in ROWS]),
        Pattern("softmax", lambda x: torch.softmax(x * 0.125, -1), _alike(ROWS)),
        Pattern("rms", rms, _with_last(ROWS)),
        Pattern("add_norm", add_norm, [(s, s, (s[-1],), (s[-1],)) for s in ROWS]),
        Pattern("rows", lambda x: (x * x).mean(-1), _alike(ROWS)),
        Pattern("column", lambda x: torch.relu(x).sum(0), _alike(ROWS)),
        Pattern(
            "transposed", lambda x, y: torch.relu(x.t() + y), [(s, (s[1], s[0])) for s in ROWS]
        ),
        Pattern("joined", lambda x, y: torch.cat((-x, y), -1) * 2, _alike(ROWS, 2)),
        Pattern("loss", lambda x, y: ((x - y) ** 2).mean(), _alike(ROWS, 2)),
        Pattern(
            "biased", lambda x, c: torch.sigmoid(torch.tanh(x + c) * 2), _with_channels(IMAGES)
        ),
        Pattern(
            "group_norm",
            lambda x, c: torch.tanh(F.group_norm(x * c, 8)),
            _with_channels((*IMAGES, *VOLUMES, (1024, 8192), (16384, 512))),
        ),
        Pattern(
            "instance_norm",
            lambda x: F.instance_norm(torch.relu(x)),
            _alike((*IMAGES, *VOLUMES)),
        ),
        Pattern("channels", lambda x: torch.softmax(torch.tanh(x), 1), _alike((*IMAGES, *VOLUMES))),
        Pattern("pooled", lambda x: torch.tanh(F.max_pool2d(torch.relu(x), 2)), _alike(IMAGES)),
        Pattern("averaged", lambda x: F.avg_pool2d(torch.sigmoid(x), 4), _alike(IMAGES)),
        Pattern(
            "pooled3d", lambda x: torch.sigmoid(F.max_pool3d(torch.tanh(x), 2)), _alike(VOLUMES)
        ),
        Pattern("global", lambda x: torch.relu(x * 2).mean((2, 3)), _alike(IMAGES)),
        Pattern("least", lambda x: torch.min(x * 2, 1)[0], _alike((*IMAGES, *VOLUMES))),
        Pattern(
            "turned",
            lambda x, c, s: x * c + torch.cat((-x[..., 64:], x[..., :64]), -1) * s,
            [((b, h, n, 128), (n, 128), (n, 128)) for b, h, n in ((1, 8, 512), (4, 32, 2048))],
        ),
    ]


def _norms() -> list[Pattern]:
    long: tuple[Shape, ...] = ((16, 64, 256, 256), (128, 64, 64, 64), (512, 1, 1, 65536))
    return [
        Pattern("softmax_rows", lambda x: torch.softmax(x, -1), _alike(ROWS)),
        Pattern("log_softmax_rows", lambda x: F.log_softmax(x, -1), _alike(ROWS[::2])),
        Pattern("softmax_channels", lambda x: torch.softmax(x, 1), _alike((*IMAGES, *VOLUMES))),
        Pattern(
            "layer_norm_rows",
            lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
            _with_last(ROWS, 2),
        ),
        Pattern(
            "layer_norm_long",
            lambda x: F.layer_norm(x, x.shape[1:]),
            _alike((*long, *IMAGES[1:])),
        ),
        *(
            Pattern(
                f"group_norm_{groups}",
                lambda x, groups=groups: F.group_norm(x, groups),
                _alike((*IMAGES, *VOLUMES, (1024, 8192), (16384, 512))),
            )
            for groups in (4, 16)
        ),
        Pattern("instance_norm_alone", F.instance_norm, _alike((*IMAGES, *VOLUMES, *long))),
        Pattern(
            "batch_norm",
            lambda x, m, v: F.batch_norm(x, m, v),
            [
                (s, (s[1],), (s[1],))
                for s in (*IMAGES, *VOLUMES, (1024, 8192), (16384, 4096), (256, 512))
            ],
        ),
    ]


def _reductions() -> list[Pattern]:
    columns: list[tuple[Shape, ...]] = _alike(
        ((16, 256, 30), (64, 1024, 256), (128, 4096, 511), (16, 128, 65536), (512, 64, 4096))
    )
    images = _alike((*IMAGES, *VOLUMES))
    return [
        *(
            Pattern(f"{name}_rows", lambda x, f=f: f(x, -1), _alike(ROWS[::step]))
            for name, f, step in (
                ("mean", torch.mean, 1), ("sum", torch.sum, 2),
                ("max", lambda x, d: x.max(d)[0], 2), ("min", lambda x, d: x.min(d)[0], 3),
                ("argmax", torch.argmax, 3), ("logsumexp", torch.logsumexp, 2),
                ("norm", torch.linalg.vector_norm, 2),
            )
        ),
        *(
            Pattern(f"{name}_columns", lambda x, f=f: f(x, 1), [*columns, *images[:3]])
            for name, f in (
                ("mean", torch.mean), ("sum", torch.sum), ("max", lambda x, d: x.max(d)[0]),
                ("min", lambda x, d: x.min(d)[0]), ("argmin", torch.argmin),
                ("logsumexp", torch.logsumexp), ("norm", torch.linalg.vector_norm),
            )
        ),
        Pattern("mean_all", torch.mean, _alike(ROWS[::2])),
        Pattern("mean_images", lambda x: x.mean((2, 3)), _alike(IMAGES)),
        Pattern("cumsum_rows", lambda x: x.cumsum(-1), _alike(ROWS[::2])),
        Pattern("cumsum_columns", lambda x: x.cumsum(1), columns),
        Pattern("loss_huber", F.smooth_l1_loss, _alike(ROWS[::3], 2)),
        Pattern(
            "loss_classes", F.cross_entropy, [((r, n), (r,)) for r, n in ROWS[1::2]], integers=(1,)
        ),
    ]  # fmt: skip


def _windows() -> list[Pattern]:
    signals = _alike(((8, 16, 1000), (64, 128, 16384), (64, 192, 65536)))
    images = _alike(IMAGES)
    volumes = _alike(VOLUMES)
    return [
        *(
            Pattern(f"max_pool_{k}_{s}", lambda x, k=k, s=s: F.max_pool2d(x, k, s, k // 2), images)
            for k, s in ((2, 2), (3, 2), (4, 1), (4, 4))
        ),
        *(
            Pattern(f"avg_pool_{k}_{s}", lambda x, k=k, s=s: F.avg_pool2d(x, k, s), images)
            for k, s in ((2, 2), (3, 1), (4, 4), (11, 11))
        ),
        *(
            Pattern(f"max_pool3d_{k}_{s}", lambda x, k=k, s=s: F.max_pool3d(x, k, s), volumes)
            for k, s in ((2, 2), (3, 2))
        ),
        *(
            Pattern(f"avg_pool3d_{k}_{s}", lambda x, k=k, s=s: F.avg_pool3d(x, k, s), volumes)
            for k, s in ((2, 2), (3, 2))
        ),
        Pattern("max_pool1d", lambda x: F.max_pool1d(x, 8, 1, 4), signals),
        Pattern("avg_pool1d", lambda x: F.avg_pool1d(x, 8, 1, 4), signals),
    ]


def _copies() -> list[Pattern]:
    heads: tuple[Shape, ...] = (
        (1, 8, 512, 128),
        (4, 512, 32, 64),
        (64, 512, 1, 96),
        (4, 32, 2048, 64),
    )
    return [
        Pattern("cat_last", lambda x, y: torch.cat((x, y), -1), _alike(heads, 2)),
        Pattern("cat_first", lambda x, y: torch.cat((x, y), 0), _alike((*heads, (8192, 8192)), 2)),
        Pattern("cat_one", lambda x, y: torch.cat((x, y), 1), [((8, 1, 1024), (8, 196, 1024))]),
        Pattern(
            "cat_part",
            lambda x, y: torch.cat((x[..., 32:], y[..., :32]), -1),
            _alike(heads, 2),
        ),
        Pattern("flip", lambda x: x.flip(-1), _alike(ROWS[::3])),
        Pattern("transposed_copy", lambda x: x.transpose(1, 2).contiguous(), _alike(heads)),
        Pattern("half_neg", lambda x: -x[..., x.shape[-1] // 2 :], _alike(heads)),
        Pattern(
            "transposed_mul", lambda x, y: x.transpose(1, 2) * y.transpose(1, 2), _alike(heads, 2)
        ),
        Pattern("channels_mul", lambda x, c: x * c, _with_channels((*IMAGES, *VOLUMES))),
        Pattern("last_add", lambda x, c: x + c, _with_last(ROWS)),
        Pattern("first_mul", lambda x, c: x * c, [(s, (s[0], 1)) for s in ROWS]),
        Pattern("double", lambda x: x.double(), _alike(ROWS[::3])),
        Pattern(
            "embedding",
            lambda table, at: F.embedding(at, table),
            [
                ((32000, 4096), (1, 512)), ((50432, 6144), (4, 512)), ((30522, 768), (8, 512)),
                ((1000, 64), (16, 64)),
            ],
            integers=(1,),
        ),
        Pattern(
            "taken",
            lambda x, at: x[at],
            [((r, n), (r,)) for r, n in ((512, 4096), (8192, 4096), (65536, 512), (64, 128))],
            integers=(1,),
        ),
    ]  # fmt: skip
