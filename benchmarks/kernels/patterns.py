"""The patterns of the speed table, as a user of PyTorch writes them. None is written as a kernel.

Each has its inputs (built on fakes, on a CPU or on a GPU), the share of the copy bandwidth that is
its goal, and where they exist the framework's own op, and Liger's and QuACK's kernels, for the same
computation.
"""

# torch is typed in places only, Liger and QuACK not at all.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Result = Tensor | tuple[Tensor, ...]
Function = Callable[..., Result]

EPS = 1e-5
BEYOND = 97.0
"""The goal beyond the goal, where the issue names no other."""
CLOSE = 5.0
"""Points that a size that is no power of two, or float32, may stay behind the row it is near."""


@dataclass(frozen=True)
class Input:
    """One tensor: `shape` as it lies in memory, then permuted by `order` when that is given.

    Kinds: `normal`, `positive` (0.5 to 1.5), `causal` (a bool mask, true above the diagonal),
    `index` (int64 below `high`), `halves` (below 1; both halves of the last dimension alike).
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    kind: Literal["normal", "positive", "causal", "index", "halves"] = "normal"
    high: int = 0
    order: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def build(self, device: str, *, zeros: bool = False) -> Tensor:
        """Random, or all zeros: harmless as data and as places."""
        dtype = getattr(torch, self.dtype)
        if zeros:
            tensor = torch.zeros(self.shape, dtype=dtype, device=device)
        elif self.kind == "causal":
            tensor = torch.ones(self.shape, dtype=dtype, device=device).triu(1)
        elif self.kind == "index":
            tensor = torch.randint(self.high, self.shape, dtype=dtype, device=device)
        elif self.kind == "halves":
            half = (*self.shape[:-1], self.shape[-1] // 2)
            tensor = torch.rand(half, dtype=dtype, device=device)
            tensor = torch.cat((tensor, tensor), -1)
        elif self.kind == "positive":
            tensor = torch.rand(self.shape, dtype=dtype, device=device) + 0.5
        else:
            tensor = torch.randn(self.shape, dtype=dtype, device=device)
        return tensor.permute(self.order) if self.order else tensor


@dataclass(frozen=True)
class Pattern:
    """One row of the table. `goal` and `beyond` are percent of the copy bandwidth; with `near` the
    goal is that row's own result less CLOSE points. `random`: no two runs draw alike."""

    name: str
    function: Function
    inputs: tuple[Input, ...]
    goal: float | None = None
    beyond: float = BEYOND
    near: str = ""
    own: Function | None = None
    liger: Callable[[], Function] | None = None
    quack: Callable[[], Function] | None = None
    random: bool = False

    def build(self, device: str, *, zeros: bool = False) -> tuple[Tensor, ...]:
        return tuple(given.build(device, zeros=zeros) for given in self.inputs)


# -- what a user writes ----------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def tanh_chain(x: Tensor) -> Tensor:
    return torch.tanh((x + 0.3) * 1.7)


def softmax(x: Tensor) -> Tensor:
    largest = x.max(dim=-1, keepdim=True)[0]
    exponent = torch.exp(x - largest)
    return exponent / exponent.sum(dim=-1, keepdim=True)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    scaled = scores * 0.125
    hidden = scaled.masked_fill(mask, float("-inf"))
    exponent = torch.exp(hidden - hidden.max(dim=-1, keepdim=True)[0])
    return exponent / exponent.sum(dim=-1, keepdim=True)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + EPS)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def add_rms_norm_silu(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.silu(rms_norm(x + residual, weight))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    normal = (wide - mean) * torch.rsqrt(variance + EPS)
    return normal.to(x.dtype) * weight + bias


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def rotate_half(x: Tensor) -> Tensor:
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def cross_entropy_narrow(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normal = x.float() * rstd
    grad = dy.float()
    scaled = grad * weight.float()
    shift = (scaled * normal).mean(-1, keepdim=True)
    dx = (scaled - normal * shift) * rstd
    dw = (grad * normal).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def dropout_gelu(x: Tensor) -> Tensor:
    return F.dropout(F.gelu(x), 0.1, training=True)


# -- the framework's own ops -----------------------------------------------------------------------


def _own_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _own_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def _own_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _own_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def _own_rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Result:
    backward: Any = torch.ops.aten._fused_rms_norm_backward
    return backward(dy, x, [x.shape[-1]], rstd, weight, [True, True])


# -- Liger's ---------------------------------------------------------------------------------------


def _liger(name: str, *more: Any) -> Callable[[], Function]:
    """Liger's function of this name, called with the pattern's inputs and then `more`."""

    def found() -> Function:
        from liger_kernel.transformers import functional

        call: Any = getattr(functional, name)
        return lambda *inputs: call(*inputs, *more)

    return found


def _liger_rope() -> Function:
    from liger_kernel.transformers import functional

    call: Any = functional.liger_rope

    def run(*inputs: Tensor) -> Result:
        return call(*inputs)[:2]

    return run


def _liger_rms_norm_backward() -> Function:
    from liger_kernel.ops import rms_norm as liger
    from liger_kernel.ops.utils import calculate_settings

    call: Any = liger.rms_norm_backward
    mode: Any = liger._CASTING_MODE_LLAMA.value

    def run(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Result:
        block, warps = calculate_settings(x.shape[-1])
        return call(dy, x, weight, rstd, 0.0, mode, block, warps, False, None)

    return run


def _quack_softmax() -> Function:
    from quack.softmax import softmax_fwd

    call: Any = softmax_fwd
    return call


# -- the table -------------------------------------------------------------------------------------

_POWERS = (4096, 16384, 65536, 131072)
_ODD = (5120, 12288, 50257, 65535, 151936)


def patterns(*, tiny: bool = False) -> list[Pattern]:
    """Every row: the shapes of the issue, the same in float32, and sizes that are no power of two.
    `tiny` keeps the rows and takes a few of them, to rehearse without a GPU."""
    main = _main(tiny)
    same = (cross_entropy_narrow,)  # float() changes nothing
    wide = [
        _in_float32(p) for p in main if p.inputs[0].dtype == "bfloat16" and p.function not in same
    ]
    have = {p.name: p for p in (*main, *wide)}
    return [*have.values(), *(p for p in _sizes(tiny) if p.name not in have)]


def _main(tiny: bool) -> list[Pattern]:
    def n(count: int) -> int:
        return 6 if tiny else count

    def x(*shape: int) -> Input:
        return Input(shape)

    softmaxes = [
        _softmax(n(rows), rows, columns, goal, beyond)
        for rows, columns, goal, beyond in (
            (262144, 1024, 97, 97),
            (65536, 4096, 95, 97),
            (16384, 16384, 93, 97),
            (8192, 32768, 90, 97),
            (4096, 131072, 75, 95),
        )
    ]
    square = 64 if tiny else 2048
    hidden = n(32768)
    vocabulary = 128256
    targets = Input((n(8192),), "int64", "index", vocabulary)
    half = replace(x(4, n(2048), 4096), dtype="float16")
    length = 16 if tiny else 4096
    angles = Input((1, length, 128), kind="halves")
    return [
        Pattern("GELU by hand 16384x16384", gelu, (x(n(16384), 16384),), 85, own=_own_gelu),
        Pattern("tanh((x+c)*s) 16384x8192", tanh_chain, (x(n(16384), 8192),), 82),
        *softmaxes,
        Pattern(
            "masked scaled softmax 64x2048x2048", masked_softmax,
            (x(n(64), square, square), Input((square, square), "bool", "causal")), 93,
        ),
        _rms_norm(hidden, 32768, 4096, 95),
        Pattern(
            "add+RMSNorm 32768x4096", add_rms_norm,
            (x(hidden, 4096), x(hidden, 4096), x(4096)), 95,
            liger=_liger("liger_fused_add_rms_norm", EPS, 0.0, "llama", False),
        ),
        Pattern(
            "add+RMSNorm+SiLU fp16 4x2048x4096", add_rms_norm_silu,
            (half, half, Input((4096,), "float16")), 86,
        ),
        Pattern(
            "LayerNorm by hand 32768x4096", layer_norm, (x(hidden, 4096), x(4096), x(4096)), 95,
            own=_own_layer_norm, liger=_liger("liger_layer_norm", EPS),
        ),
        Pattern(
            "silu(a)*b 16384x14336", silu_mul, (x(n(16384), 14336), x(n(16384), 14336)), 99,
            beyond=99, liger=_liger("liger_swiglu"),
        ),
        Pattern(
            "RoPE q32 k8 B4 T4096 D128", rope,
            (
                Input((4, length, 32, 128), order=(0, 2, 1, 3)),
                Input((4, length, 8, 128), order=(0, 2, 1, 3)),
                angles, angles,
            ),
            92, liger=_liger_rope,
        ),
        Pattern(
            "cross-entropy 8192x128256", cross_entropy, (x(n(8192), vocabulary), targets), 86,
            own=F.cross_entropy, liger=_liger("liger_cross_entropy"),
        ),
        Pattern(
            "cross-entropy, no float() 8192x128256", cross_entropy_narrow,
            (x(n(8192), vocabulary), targets), 86, liger=_liger("liger_cross_entropy"),
        ),
        Pattern(
            "RMSNorm backward 32768x4096", rms_norm_backward,
            (
                x(hidden, 4096), x(hidden, 4096), x(4096),
                Input((hidden, 1), "float32", "positive"),
            ),
            90, own=_own_rms_norm_backward, liger=_liger_rms_norm_backward,
        ),
        Pattern(
            "dropout(gelu(x)) 16384x8192", dropout_gelu, (x(n(16384), 8192),), 50, beyond=70,
            random=True,
        ),
    ]  # fmt: skip


def _softmax(
    rows: int, named: int, columns: int, goal: float | None = None, beyond: float = BEYOND
) -> Pattern:
    return Pattern(
        f"softmax {named}x{columns}", softmax, (Input((rows, columns)),), goal, beyond,
        own=_own_softmax, liger=_liger("liger_softmax"), quack=_quack_softmax,
    )  # fmt: skip


def _rms_norm(rows: int, named: int, columns: int, goal: float | None = None) -> Pattern:
    return Pattern(
        f"RMSNorm {named}x{columns}", rms_norm, (Input((rows, columns)), Input((columns,))), goal,
        own=_own_rms_norm, liger=_liger("liger_rms_norm", EPS, 0.0, "llama", False),
    )  # fmt: skip


def _in_float32(pattern: Pattern) -> Pattern:
    """The same in float32, held against its own row in the narrower type."""
    inputs = tuple(
        replace(given, dtype="float32") if given.dtype == "bfloat16" else given
        for given in pattern.inputs
    )
    return replace(
        pattern, name=f"{pattern.name} fp32", inputs=inputs, goal=None, near=pattern.name
    )


_ROWS = {
    4096: (65536, 32768), 16384: (16384, 8192), 65536: (4096, 2048), 131072: (4096, 1024),
    5120: (49152, 24576), 12288: (20480, 10240), 50257: (4864, 2432), 65535: (3840, 1920),
    151936: (1664, 832),
}  # fmt: skip
"""For each number of columns: rows for half a gigabyte in bfloat16, of softmax; and of RMSNorm in
bfloat16, or of either in float32. Those of the issue's own rows are theirs."""


def _sizes(tiny: bool) -> list[Pattern]:
    """Softmax and RMSNorm at powers of two and at sizes that are none, in both types."""
    found: list[Pattern] = []
    for make in (_softmax, _rms_norm):
        for dtype in ("bfloat16", "float32"):
            near: dict[int, str] = {}
            for columns in (*_POWERS, *_ODD):
                rows = _ROWS[columns][make is _rms_norm]
                if columns in _ODD and dtype == "float32":
                    rows = _ROWS[columns][1]
                pattern = make(6 if tiny else rows, rows, columns)
                if dtype == "float32":
                    pattern = _in_float32(pattern)
                if columns in _POWERS:
                    near[columns] = pattern.name
                else:
                    best = min(_POWERS, key=lambda power: abs(math.log(power / columns)))
                    pattern = replace(pattern, near=near[best])
                found.append(pattern)
    return found
