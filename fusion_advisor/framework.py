"""Does one PyTorch op compute exactly what a region computes? Proven on the numbers of a sample
row, however the source spells it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from fusion_advisor.axes import Dims
from fusion_advisor.gates import Subject
from fusion_advisor.lanes import WIDTH, Lanes, evaluate, near
from fusion_advisor.records import FLOATS, Tensor
from fusion_advisor.region import Region

Formula = Callable[..., Lanes]


def _softmax(eps: float, x: Lanes) -> Lanes:
    total = math.fsum(map(math.exp, x))
    return [math.exp(a) / total for a in x]


def _rms_norm(eps: float, x: Lanes, *weight: Lanes) -> Lanes:
    scale = 1.0 / math.sqrt(math.fsum(a * a for a in x) / len(x) + eps)
    return _affine([a * scale for a in x], *weight)


def _layer_norm(eps: float, x: Lanes, *weight: Lanes) -> Lanes:
    mean = math.fsum(x) / len(x)
    return _rms_norm(eps, [a - mean for a in x], *weight)


def _affine(x: Lanes, weight: Lanes | None = None, bias: Lanes | None = None) -> Lanes:
    scaled = [a * w for a, w in zip(x, weight or [1.0] * len(x), strict=True)]
    return [a + b for a, b in zip(scaled, bias or [0.0] * len(x), strict=True)]


def _gelu_tanh(eps: float, x: Lanes) -> Lanes:
    return [0.5 * a * (1.0 + math.tanh(0.7978845608 * (a + 0.044715 * a**3))) for a in x]


_EXACT: dict[str, tuple[Formula, int]] = {
    "softmax": (_softmax, 0),
    "rms-norm": (_rms_norm, 1),
    "layer-norm": (_layer_norm, 2),
    "gelu-tanh": (_gelu_tanh, 0),
}
"""What each op computes on one row, and how many vectors it takes beside the row."""


@dataclass(frozen=True)
class Spelling:
    """A region as one call: PyTorch's line and Liger's, empty where there is none; `names` says
    which input of the region each name in them is."""

    framework: str
    liger: str
    names: tuple[tuple[str, int], ...]


def exact(subject: Subject, name: str) -> Spelling | None:
    """The call that computes exactly this region; None when there is none.

    One full-size input, the op's vectors, one output of the input's size and dtype, and the same
    numbers on a sample row.
    """
    rule, known = subject.rulebook.patterns.get(name), _EXACT.get(name)
    if subject.expressed is None or rule is None or not rule.framework or known is None:
        return None
    region, (formula, vectors) = subject.expressed.region, known
    loads = [i for i in region.live if region.exprs[i].op == "load"]
    row = region.reduced
    full = [i for i in loads if region.depends[i] == frozenset(region.sizes)]
    extra = [i for i in loads if i not in full]
    if len(full) != 1 or len(region.outputs) != 1 or len(extra) > vectors:
        return None
    output, source = region.outputs[0], _loaded(region, full[0])[0]
    same = output.tensor.shape == source.shape and output.tensor.dtype == source.dtype
    if not same or any(region.depends[i] != row for i in extra):
        return None
    matching = _matching(region, formula, full[0], extra)
    if matching is None:
        return None
    eps, order = matching
    line = _spelled(rule.framework, region, full[0], eps, len(extra))
    whole = len(extra) == vectors  # Liger asks for all of them
    liger = _spelled(rule.liger, region, full[0], eps, vectors) if rule.liger and whole else ""
    numbers = (region.exprs[i].input for i in (full[0], *order))
    names = tuple(zip(("x", "weight", "bias"), numbers, strict=False))
    return Spelling(line, liger, names) if line else None


def _matching(
    region: Region, formula: Formula, x: int, extra: Sequence[int]
) -> tuple[float, tuple[int, ...]] | None:
    """The constant and the order of the vectors with which the formula gives the region's
    numbers."""
    draw = random.Random(0)
    result = region.outputs[0].value
    # On a row of small values an eps shows.
    samples = [
        {i: [scale * draw.uniform(-2.0, 2.0) for _ in range(WIDTH)] for i in (x, *extra)}
        for scale in (1.0, 1e-3)
    ]
    got = [evaluate(region, sample, [result]) for sample in samples]
    constants = [region.exprs[i] for i in region.live if region.exprs[i].op == "const"]
    choices = {float(c.literal) for c in constants if c.dtype in FLOATS}
    for order in permutations(extra):
        for eps in sorted(choices | {0.0}):
            wanted = [formula(eps, s[x], *(s[i] for i in order)) for s in samples]
            if all(
                g is not None and len(g[result]) == WIDTH and all(map(near, g[result], w))
                for g, w in zip(got, wanted, strict=True)
            ):
                return eps, order
    return None


def _spelled(line: str, region: Region, x: int, eps: float, vectors: int) -> str:
    """The rulebook's line with this region's dimension and constants."""
    dims = _loaded(region, x)[1]
    reduced = [d for d, axes in enumerate(dims) if axes and set(axes) <= region.reduced]
    if reduced and "dim=-1" in line:
        if len(reduced) != 1:
            return ""
        return line if reduced[0] == len(dims) - 1 else line.replace("dim=-1", f"dim={reduced[0]}")
    if reduced and len(dims) - 1 not in reduced:
        return ""
    for name in ("weight", "bias")[vectors:]:
        line = line.replace(f", {name}", f", {name}=None" if name == "weight" else ", None")
    return line.replace("weight=None", "None").replace("eps", repr(eps))


def _loaded(region: Region, load: int) -> tuple[Tensor, Dims]:
    number: int = region.exprs[load].input
    return region.inputs[number], region.input_dims[number]
