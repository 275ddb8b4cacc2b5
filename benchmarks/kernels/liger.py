"""Liger's own tests, with pairs that are emitted here in place of its operators; writes a table.

    python -m benchmarks.kernels.liger CHECKOUT --out liger.md [--jobs N] [--files REGEX] [-k EXPR]

CHECKOUT is a clone of Liger-Kernel with its tests. Each operator below is the same computation as
statements of PyTorch; one that PyTorch has as a single kernel is spelled out, since nothing of it
would be fused. The first call with its dtypes, ranks and options emits a file with forward
and backward for the sizes of that call; later calls are served by that file, or where it
says that its numbers may follow from sizes, by one that is made for theirs. A test is counted
where it calls at least one such operator; `eager` counts those of whose calls the file's guards
gave one back to PyTorch, `refused` those for which no pair could be written. Not asked for is the
error that Liger raises for labels out of bounds.

The module is a plugin of pytest, too: it puts the pairs in place before the tests import them.
"""

# torch is typed in places only, Liger and pytest's reports not at all.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_advisor.support.files import write
from fusion_advisor.support.kernel_fault import cause

from ..gpu import heading

FILES = (
    "rms_norm", "fused_add_rms_norm", "layer_norm", "group_norm", "rope", "swiglu", "geglu",
    "relu_squared", "dyt", "softmax", "cross_entropy", "kl_div", "jsd", "tvd",
)  # fmt: skip
"""Liger's test files of operators that have statements below."""
WAY = "FUSION_ADVISOR_LIGER"
"""Variable of the environment: the device whose rules decide, or `eager` for the statements."""


# -- Liger's operators as statements ---------------------------------------------------------------


def rms_norm(
    x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True, row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    h = x if casting_mode == "none" else x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        h = h.to(x.dtype)
    if w is not None:
        scale = w.float() if casting_mode == "gemma" else w
        h = h * (scale + offset) if offset else h * scale
    return h.to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, r: Tensor, w: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = x + r
    return rms_norm(total, w, eps, offset, casting_mode), total


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * w + b).to(x.dtype)


def group_norm(
    x: Tensor, w: Tensor, b: Tensor, num_channels: int, num_groups: int, eps: float
) -> Tensor:
    h = x.float().reshape(x.shape[0], num_groups, -1)
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = h.reshape(x.shape[0], num_channels, -1) * w[:, None] + b[:, None]
    return h.reshape(x.shape).to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if cos.ndim > 2:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin


def silu_mul(
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    made = F.silu(gate) * b
    return made if down_multiplier == 1.0 else made * down_multiplier


def gelu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    made = gamma * torch.tanh(alpha * x)
    return made if beta is None else made + beta


def softmax(x: Tensor) -> Tensor:
    h = x.float()
    h = torch.exp(h - h.amax(-1, keepdim=True))
    return (h / h.sum(-1, keepdim=True)).to(x.dtype)


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    kept = target != ignore_index
    logits = x.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, target, weight=None if weight is None else weight.float(),
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip
    z_loss = right = best = None
    if lse_square_scale or return_z_loss:
        squared = torch.logsumexp(logits, -1).square() * lse_square_scale
        z_loss = _reduced(torch.where(kept, squared, 0.0), kept, reduction)
        loss = loss + z_loss
        z_loss = z_loss.to(x.dtype) if return_z_loss else None
    if return_token_accuracy:
        hits = torch.where(kept, (logits.argmax(-1) == target).float(), 0.0)
        right = hits if reduction == "none" else hits.sum() / kept.sum()
    if return_predicted_tokens:
        best = torch.where(kept, logits.argmax(-1), -1)
    return loss.to(x.dtype), z_loss, right, best


def _reduced(each: Tensor, kept: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.sum() / kept.sum() if reduction == "mean" else each.sum()


def kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str, log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    truth = y_true.exp() if log_target else y_true
    log = y_true if log_target else y_true.clamp_min(eps).log()
    each = truth * (log - y_pred)
    if reduction == "none":
        return each
    total = each.sum()
    if reduction == "sum":
        return total
    return total / (each.shape[0] if reduction == "batchmean" else each.numel())


def jsd(
    x: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    log_q, log_p = x.float(), target.float()
    q, p = log_q.exp(), log_p.exp()
    if beta == 0.0:
        each = p * (log_p - log_q)
    elif beta == 1.0:
        each = q * (log_q - log_p)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        each = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    if shift_labels is None:
        return (each.sum() / x.shape[0]).to(x.dtype)
    kept = shift_labels != ignore_index
    each = torch.where(kept[:, None], each, 0.0)
    return (each.sum() / kept.sum().clamp_min(1)).to(x.dtype)


def tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    each = 0.5 * (p - q).abs()
    count: Any = p.shape[0]
    if shift_labels is not None:
        kept = shift_labels != ignore_index
        each = torch.where(kept[:, None], each, 0.0)
        count = kept.sum()
    if reduction == "none":
        return each
    total = each.sum()
    if reduction == "sum":
        return total
    return total / (count if reduction == "batchmean" else count * p.shape[1])


STATEMENTS: dict[str, Callable[..., Any]] = {
    "LigerRMSNormFunction": rms_norm,
    "LigerFusedAddRMSNormFunction": fused_add_rms_norm,
    "LigerLayerNormFunction": layer_norm,
    "LigerGroupNormFunction": group_norm,
    "LigerRopeFunction": rope,
    "LigerSiLUMulFunction": silu_mul,
    "LigerGELUMulFunction": gelu_mul,
    "LigerReLUSquaredFunction": relu_squared,
    "LigerDyTFunction": dyt,
    "LigerSoftmaxFunction": softmax,
    "LigerCrossEntropyFunction": cross_entropy,
    "LigerKLDivLossFunction": kl_div,
    "LigerJSDFunction": jsd,
    "LigerTVDLossFunction": tvd,
}


# -- pairs in their place --------------------------------------------------------------------------


@dataclass
class Calls:
    """What the calls of one test came to."""

    made: int = 0
    refused: list[str] = field(default_factory=list[str])
    eager: list[str] = field(default_factory=list[str])


class Placed:
    """An operator of Liger's, computed by pairs; `apply` takes what Liger's own takes."""

    calls = Calls()

    def __init__(self, statements: Callable[..., Any], way: str, folder: Path) -> None:
        self._statements, self._way, self._folder = statements, way, folder
        self._signature = inspect.signature(statements)
        self._pairs: dict[Any, Callable[..., Any] | str] = {}

    def apply(self, *args: Any) -> Any:
        """The operator's results, by the pair of these dtypes, ranks and options."""
        bound = self._signature.bind(*args)
        bound.apply_defaults()
        given = bound.arguments
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        options = {name: each for name, each in given.items() if name not in tensors}
        key = (
            tuple((name, repr(each)) for name, each in options.items()),
            tuple((x.dtype, x.requires_grad, _ones(x)) for x in tensors.values()),
        )
        sized = key, tuple(x.shape for x in tensors.values())
        found = self._pairs.get(sized) or self._pairs.get(key)
        if found is None:
            found = self._pair(tensors, options)
            self._pairs[sized if isinstance(found, str) else key] = found
        Placed.calls.made += 1
        if not isinstance(found, str):
            try:
                return found(*tensors.values())
            except ValueError:  # its numbers may follow from the sizes that it was made for
                found = self._pairs[sized] = self._pair(tensors, options)
        if isinstance(found, str):
            Placed.calls.refused.append(found)
            return self._statements(**given)
        return found(*tensors.values())

    def _pair(
        self, tensors: dict[str, Tensor], options: dict[str, Any]
    ) -> Callable[..., Any] | str:
        """A function of the tensors, or why there is none."""
        from .pairs import emitted

        names = [*tensors]
        absent: list[int] = []

        def statements(*given: Tensor) -> Any:
            made = self._statements(**dict(zip(names, given, strict=True)), **options)
            if not isinstance(made, tuple):
                return made
            absent[:] = [place for place, each in enumerate(made) if each is None]
            return tuple(each for each in made if each is not None)

        def build() -> list[Tensor]:
            return [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(
                    x.requires_grad
                )
                for x in tensors.values()
            ]

        whole = statements
        if self._way != "eager":
            name = self._statements.__name__
            try:
                whole = emitted(name, statements, build, self._way, self._folder)
            except Exception as error:  # noqa: BLE001 whatever it is, it is told as the reason
                return f"{name}: {cause(error)}"

        def call(*given: Tensor) -> Any:
            found = whole(*given)
            made = [*found] if isinstance(found, tuple) else [found]
            for place in absent:
                made.insert(place, None)
            several = len(made) > 1 or isinstance(found, tuple)
            return tuple(made) if several and self._several else made[0]

        with FakeTensorMode():  # which tells what of the results is absent
            statements(*build())
        return call

    @property
    def _several(self) -> bool:
        return "tuple" in str(self._signature.return_annotation)


def _ones(x: Tensor) -> tuple[bool, ...]:
    """Which dimensions have one place: a file that was made there may take them for no others."""
    return tuple(size == 1 for size in x.shape)


def pytest_configure(config: pytest.Config) -> None:
    """Put the pairs in place, in each process that runs tests."""
    way = os.environ.get(WAY)
    if way is None:
        return
    import liger_kernel.ops

    folder = Path(tempfile.mkdtemp(prefix="pairs-"))
    placed = {
        getattr(liger_kernel.ops, name): Placed(statements, way, folder)
        for name, statements in STATEMENTS.items()
    }
    for module in [each for name, each in sys.modules.items() if name.startswith("liger_kernel.")]:
        for name, each in [*vars(module).items()]:
            if isinstance(each, type) and each in placed:
                setattr(module, name, placed[each])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note what the operators' calls of a test came to."""
    Placed.calls = calls = Calls()
    before = _fallbacks()
    try:
        return (yield)
    finally:
        torch.cuda.empty_cache()  # several processes share the memory
        calls.eager += [name for name, n in _fallbacks().items() if n > before.get(name, 0)]
        told = {"made": calls.made, "refused": calls.refused[:3], "eager": calls.eager[:3]}
        item.user_properties.append(("calls", told))


def _fallbacks() -> dict[str, int]:
    """Calls that guards gave back to PyTorch, by operator."""
    found: dict[str, int] = {}
    for name, module in [*sys.modules.items()]:
        if name.endswith(".fused_runtime"):
            found |= {f"{name}:{place}": n for place, n in module.fallbacks.items()}
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line for each test that ran, in the process that collects reports."""
    out = os.environ.get(f"{WAY}_OUT")
    if out is None or report.when != "call" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    told = dict(report.user_properties).get("calls", {})
    line = {"test": report.nodeid, "outcome": report.outcome, **cast(dict[str, Any], told)}
    if report.failed:
        line["failure"] = str(report.longrepr).strip().splitlines()[-1][:300]
    with Path(out).open("a") as file:
        file.write(json.dumps(line) + "\n")


# -- the table -------------------------------------------------------------------------------------


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each of Liger's files, then what failed, was refused or left to eager, by cause."""
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line.get("made") and line["outcome"] != "skipped":  # or expected to fail
            files[re.sub(r".*/test_(\w+)\.py.*", r"\1", line["test"])].append(line)
    rows = [
        "| Liger's tests of | call the operators | passed | without one refused or in eager |",
        "|---|---|---|---|",
    ]
    tests = [line for of in files.values() for line in of]
    for name, of in [*sorted(files.items()), ("all", tests)]:
        passed = [line for line in of if line["outcome"] == "passed"]
        whole = [line for line in passed if not line["refused"] and not line["eager"]]
        rows.append(f"| {name} | {len(of)} | {len(passed)} | {len(whole)} |")
    causes = Counter(
        f"{line['outcome']}: {reason}"
        for line in tests
        for reason in [
            *(line.get("refused") or [])[:1],
            *(f"eager: {name.rpartition('.')[2]}" for name in (line.get("eager") or [])[:1]),
            *([line["failure"]] if "failure" in line else []),
        ]
    )
    return [*rows, "", *(f"- {count}: {reason}" for reason, count in causes.most_common())]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--files", default="")
    parser.add_argument("-k", default="test")
    parser.add_argument("--seconds", type=float, default=500)
    asked = parser.parse_args(argv)
    checkout = asked.checkout.resolve()
    names = [name for name in FILES if re.fullmatch(asked.files or ".*", name)]
    log = asked.out.with_suffix(".jsonl").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    root = Path(__file__).resolve().parents[2]
    paths = [root, checkout / "src", checkout, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, WAY: asked.device, f"{WAY}_OUT": str(log),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short",
        "-p", "benchmarks.kernels.liger", "-p", "no:cacheprovider",
        "-n", str(asked.jobs), "-k", f"({asked.k}) and not out_of_bounds",
        *(f"test/transformers/test_{name}.py" for name in names),
    ]  # fmt: skip
    run = partial(subprocess.run, command, cwd=checkout, env=environment, check=False)
    try:
        run(timeout=asked.seconds)
    except subprocess.TimeoutExpired:
        print(f"the time was up after {asked.seconds:g} s", flush=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    text = "\n".join([*heading("Liger's own tests by emitted pairs"), "", *table(lines)])
    write(asked.out, text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
