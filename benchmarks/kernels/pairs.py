"""How fast groups with their backward are in eager mode beside what else there is; writes a table.

    python -m benchmarks.kernels.pairs --out pairs.md [--only REGEX] [--budget SECONDS]
    python -m benchmarks.kernels.pairs --dry-run --out pairs.md      # on the CPU, small

A row is forward and backward of one pattern at one size, in bfloat16: eager, torch.compile, Liger
where it is installed, and the file that `emit --mode train` writes. Each is run in turn with the
others. `gpu` is the time that a call keeps the GPU busy, the median of medians with a cold L2;
`host` is how long the host takes to queue it; `wall` is both, for who waits; `memory` is the most
that is allocated during a call beside its inputs and gradients. `off` is the largest difference of
a gradient from eager's in float32, as a share of the largest gradient, beside eager's own in
bfloat16. Whatever fails has its error in the table, and the table is written after each row.
"""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_advisor.ir.graph import Ref
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.codec import to_json
from fusion_advisor.support.files import write
from fusion_advisor.support.kernel_fault import cause

from ..gpu import clock, heading, lost
from .liger import STATEMENTS, dyt, group_norm, jsd, kl_div, relu_squared, tvd
from .patterns import (
    EPS,
    Function,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rope,
    silu_mul,
)
from .speed import Whole

WAYS = ("eager", "compile", "Liger", "ours")
ROUNDS = 5
"""Turns of each way; a turn is a batch of runs."""
HOST_RUNS = 20
CHECKED_ROWS = 256
"""Rows on which gradients are compared: eager in float32 would not fit at full size."""


def gelu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return layer_norm(total, w, b), total


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * 0.125 + mask).float(), -1).to(scores.dtype)


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    x = logits.float()
    normalizer = torch.logsumexp(x, -1)
    loss = F.cross_entropy(x, targets, label_smoothing=0.1)
    return loss + 1e-4 * normalizer.square().mean()


def fake_quantized(x: Tensor, scale: Tensor) -> Tensor:
    rounded = (x / scale).round().clamp(-127, 127) * scale
    return x + (rounded - x).detach()


# -- Liger's ---------------------------------------------------------------------------------------


def _liger(name: str, *more: Any, **named: Any) -> Callable[[], Function]:
    """Liger's function of this name, called with the pattern's inputs and then `more`."""

    def found() -> Function:
        from liger_kernel.transformers import functional

        call: Any = getattr(functional, name)
        return lambda *inputs: call(*inputs, *more, **named)

    return found


def _liger_rope() -> Function:
    from liger_kernel.transformers import functional

    call: Any = functional.liger_rope
    return lambda q, k, cos, sin: call(q, k, cos, sin)


def _liger_gelu() -> Function:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    call: Any = LigerGELUMulFunction
    return lambda a, b: call.apply(a, b)


def _liger_z_loss() -> Function:
    from liger_kernel.transformers import functional

    call: Any = functional.liger_cross_entropy

    def run(logits: Tensor, targets: Tensor) -> Tensor:
        found = call(
            logits, targets, lse_square_scale=1e-4, label_smoothing=0.1, return_z_loss=False
        )
        return found[0] if isinstance(found, tuple) else found

    return run


def _liger_class(statements: Callable[..., Any], *more: Any) -> Callable[[], Function]:
    """Liger's operator that the statements stand for, called with the pattern's inputs first."""

    def found() -> Function:
        import liger_kernel.ops

        name = next(name for name, each in STATEMENTS.items() if each is statements)
        call: Any = getattr(liger_kernel.ops, name)
        return lambda *inputs: call.apply(*inputs, *more)

    return found


def _with(statements: Callable[..., Any], *more: Any) -> Function:
    return lambda *inputs: statements(*inputs, *more)


# -- the patterns ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A pattern at one size: shapes of its inputs, whole numbers below `below` where the last
    dimension is 0; the first `trained` inputs require a gradient."""

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    trained: int
    liger: Callable[[], Function] | None = None
    below: int = 2

    def build(
        self, device: str, rows: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> list[Tensor]:
        """Inputs, with a gradient where one is required; with fewer `rows` on request."""
        made: list[Tensor] = []
        torch.manual_seed(0)
        for number, shape in enumerate(self.shapes):
            if rows and len(shape) > 1:
                shape = (min(rows, shape[0]), *shape[1:])
            if not shape[-1]:
                made.append(torch.randint(self.below, shape[:-1], device=device))
                continue
            x = torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
            made.append(x.requires_grad_(number < self.trained))
        return made


def cases(*, tiny: bool) -> list[Trained]:
    """The patterns at Liger's sizes."""
    found: list[Trained] = []
    norms = [(7, 64)] if tiny else [(4096, 4096), (16384, 8192)]
    for n, d in norms:
        llama = (EPS, 0.0, "llama", False)
        x, size = (n, d), f"{n} x {d}"
        found += [
            Trained(f"RMSNorm {size}", rms_norm, (x, (d,)), 2, _liger("liger_rms_norm", *llama)),
            Trained(
                f"residual + RMSNorm {size}", add_rms_norm, (x, x, (d,)), 3,
                _liger("liger_fused_add_rms_norm", *llama),
            ),
            Trained(
                f"LayerNorm {size}", layer_norm, (x, (d,), (d,)), 3,
                _liger("liger_layer_norm", EPS),
            ),
            Trained(f"residual + LayerNorm {size}", add_layer_norm, (x, x, (d,), (d,)), 4),
        ]  # fmt: skip
    for n, d in [(9, 48)] if tiny else [(4096, 11008), (16384, 14336)]:
        x, size = (n, d), f"{n} x {d}"
        found += [
            Trained(f"SwiGLU {size}", silu_mul, (x, x), 2, _liger("liger_swiglu")),
            Trained(f"GEGLU {size}", gelu_mul, (x, x), 2, _liger_gelu),
            Trained(f"fake quantization {size}", fake_quantized, (x, (1,)), 1),
        ]
    for n, v in [(512, 500)] if tiny else [(8192, 32000), (8192, 128256)]:
        named = f"cross-entropy, z-loss, smoothing {n} x {v}"
        found.append(Trained(named, z_loss, ((n, v), (n, 0)), 1, _liger_z_loss, v))
    n, v = (64, 96) if tiny else (8192, 32000)
    for name, distance in (("KL", kl_div), ("JS", jsd), ("total variation", tvd)):
        given = {"KL": ("batchmean", True), "JS": (None,), "total variation": (None, "batchmean")}
        found.append(
            Trained(
                f"{name} distance {n} x {v}", _with(distance, *given[name]), ((n, v), (n, v)), 1,
                _liger_class(distance, *given[name]),
            )
        )  # fmt: skip
    n, d = (24, 64) if tiny else (16384, 4096)
    found += [
        Trained(
            f"dynamic tanh {n} x {d}", dyt, ((n, d), (1,), (d,), (d,)), 4, _liger_class(dyt)
        ),
        Trained(
            f"squared ReLU {n} x {d}", relu_squared, ((n, d),), 1, _liger_class(relu_squared)
        ),
    ]  # fmt: skip
    n, d, g = (2, 16, 4) if tiny else (32, 4096, 32)
    found.append(
        Trained(
            f"group norm {n} x {d} x 512", _with(group_norm, d, g, EPS), ((n, d, 512), (d,), (d,)),
            3, _liger_class(group_norm, d, g, EPS),
        )
    )  # fmt: skip
    b, h, s = (1, 2, 8) if tiny else (4, 32, 2048)
    found.append(
        Trained(f"softmax, mask {b} x {h} x {s}", masked_softmax, ((b, h, s, s), (b, 1, s, s)), 1)
    )
    table = (b, s, 128)
    found.append(
        Trained(
            f"rotary {b} x {h} x {s}", rope,
            ((b, h, s, 128), (b, max(h // 4, 1), s, 128), table, table), 2, _liger_rope,
        )
    )  # fmt: skip
    return found


# -- ours ------------------------------------------------------------------------------------------


def emitted(
    name: str,
    function: Function,
    build: Callable[[], Sequence[Tensor]],
    device: str,
    folder: Path,
) -> Function:
    """A function with its groups replaced by files with their backward; a group that has none has
    the kernel of its forward pass, and is told. `build` makes the inputs, which are fakes on a CPU.
    Raises ValueError where no group has a backward."""
    from fusion_advisor.cost.dataflow import dataflow
    from fusion_advisor.frontend.child import capture_loaded
    from fusion_advisor.frontend.user_model import HostFakeMode, Loaded
    from fusion_advisor.fusion.findings import fuse
    from fusion_advisor.ir.scenario import Scenario
    from fusion_advisor.workflows.analyze import emit_group
    from fusion_advisor.workflows.pairs import Occurrences, pair_of

    rules = load_rulebook()
    module = torch.nn.Module()
    module.forward = function
    with HostFakeMode() as fake:
        inputs = tuple(build())
    loaded = Loaded(module.train(), inputs, {}, fake, "pattern")
    graph = capture_loaded(loaded, Scenario(mode="train"))
    flow = dataflow(graph, rules.device(device))
    groups: list[dict[str, Any]] = []
    without: list[str] = []
    for finding in fuse(flow, rules).groups:
        kernel = emit_group(finding, rules, full_size=False)
        if isinstance(kernel, str):
            raise ValueError(f"{finding.name}: {kernel}")
        pair = pair_of(Occurrences(finding.decision, finding.instances), kernel, rules)
        if isinstance(pair, str):
            without.append(f"{finding.name} has no backward: {pair}")
            print(f"{name}: {without[-1]}", flush=True)
        else:
            kernel = pair.kernel
        expressed = finding.decision.subject.expressed
        assert expressed is not None
        groups.append({"text": kernel.text, "entry": kernel.entry, "of": expressed})
    if not any("@host.trained(" in group["text"] for group in groups):
        raise ValueError("; ".join(without) or "it has no group")
    return _assembled(graph, groups, folder)


def _assembled(graph: Any, groups: Sequence[dict[str, Any]], folder: Path) -> Function:
    """One group that takes the pattern's inputs as they are is called itself: what puts several
    together would be in the host's time."""
    given = [Ref(node.name) for node in graph.nodes if node.kind == "input"]
    of = groups[0]["of"]
    if len(groups) == 1 and {*of.inputs} <= {*given} and {*of.outputs} == {*graph.outputs}:
        entry = getattr(load_module(groups[0]["text"], folder), groups[0]["entry"])
        places = [given.index(ref) for ref in of.inputs]
        made = [of.outputs.index(ref) for ref in graph.outputs]

        def call(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
            found = entry(*[inputs[place] for place in places])
            return found if len(made) == 1 else tuple(found[place] for place in made)

        return call
    job = {
        "graph": to_json(graph),
        "groups": [
            {
                "text": group["text"],
                "entry": group["entry"],
                "inputs": [[ref.node, ref.output] for ref in group["of"].inputs],
                "outputs": [[ref.node, ref.output] for ref in group["of"].outputs],
            }
            for group in groups
        ],
    }
    return Whole(job, folder, "cuda" if torch.cuda.is_available() else "cpu")


# -- time ------------------------------------------------------------------------------------------


class Step:
    """Forward and backward of a way, on inputs of its own."""

    def __init__(self, call: Function, inputs: list[Tensor]) -> None:
        self.call, self.inputs = call, inputs
        self.arriving: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        found = self.call(*self.inputs)
        results = [found] if isinstance(found, Tensor) else [*found]
        results = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
        if not self.arriving:
            self.arriving = [_gradient_of(each) for each in results]
        return [*torch.autograd.grad(results, self.wanted, self.arriving)]

    @property
    def wanted(self) -> list[Tensor]:
        return [each for each in self.inputs if each.requires_grad]


def _gradient_of(result: Tensor) -> Tensor:
    """The gradient that a result is given: the same numbers for each way."""
    drawn = torch.Generator().manual_seed(1)
    if result.numel() == 1:
        return torch.ones_like(result)
    few = torch.randn(1 << 16, generator=drawn).to(torch.bfloat16)
    count = -(-result.numel() // few.numel())
    return few.repeat(count)[: result.numel()].view(result.shape).to(result.device, result.dtype)


@dataclass
class Found:
    """What was measured of one way."""

    gpu: str = ""
    host: str = ""
    wall: str = ""
    memory: str = ""
    off: str = ""
    failure: str = ""

    def cells(self) -> list[str]:
        if self.failure:
            return [f"failed: {self.failure[:160]}".replace("|", "/").replace("\n", " "), *[""] * 4]
        return [self.gpu, self.host, self.wall, self.memory, self.off]


@dataclass
class Run:
    dry: bool
    device: str
    out: Path
    deadline: float
    folder: Path
    rows: list[str] = field(default_factory=list[str])

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def record(self, case: Trained, ways: dict[str, Found]) -> None:
        """Writes the table anew."""
        for way, found in ways.items():
            self.rows.append(f"| {case.name} | {way} | {' | '.join(found.cells())} |")
            print(self.rows[-1], flush=True)
        head = [
            *heading("Forward and backward of groups, in eager mode"), "",
            "| pattern | way | gpu, us | host, us | wall, us | memory, MB | off (eager's own) |",
            "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        write(self.out, "\n".join([*head, *self.rows]) + "\n")


def measure(run: Run, case: Trained, clock: Any) -> None:
    """One row for each way, whatever happens to one of them."""
    where = "cpu" if run.dry else "cuda"
    makers: dict[str, Callable[[], Function]] = {"eager": lambda: case.function}
    if run.left() > 45.0 or run.dry:
        makers["compile"] = lambda: torch.compile(case.function, dynamic=False)
    if case.liger is not None:
        makers["Liger"] = case.liger
    build = partial(case.build, "cpu")
    makers["ours"] = partial(emitted, case.name, case.function, build, run.device, run.folder)
    if run.dry:
        makers.pop("compile", None)
    found = {way: Found() for way in makers}
    steps: dict[str, Step] = {}
    for way, maker in makers.items():
        try:
            torch._dynamo.reset() if way == "compile" else None
            call = maker()
            found[way].off = _off(case, _of_few_rows(run, case) if way == "ours" else call, where)
            steps[way] = Step(call, case.build(where))
            steps[way]()
        except Exception as error:  # noqa: BLE001 rivals raise what they like: it is the row
            found[way].failure = cause(error)
            steps.pop(way, None)
    for way, step in steps.items():
        try:
            _beside(run, step, found[way])
        except Exception as error:  # noqa: BLE001 as above
            found[way].failure = cause(error)
    try:
        calls = [step for way, step in steps.items() if not found[way].failure]
        ways = [way for way in steps if not found[way].failure]
        for way, times in zip(ways, clock.turns(calls, ROUNDS), strict=True):
            found[way].gpu = f"{statistics.median(times):.1f}"
    except Exception as error:  # noqa: BLE001 as above
        for way in steps:
            found[way].failure = found[way].failure or cause(error)
    finally:
        steps.clear()
        clock.release()
    run.record(case, found)


def _of_few_rows(run: Run, case: Trained) -> Function:
    """The pattern by a file that is made for few rows: its numbers may follow from their count."""
    build = partial(case.build, "cpu", CHECKED_ROWS)
    return emitted(case.name, case.function, build, run.device, run.folder)


def _off(case: Trained, call: Function, where: str) -> str:
    """Difference of the gradients from eager's in float32, on few rows; and eager's own."""
    exact = Step(case.function, case.build(where, CHECKED_ROWS, torch.float32))()
    found = [Step(each, case.build(where, CHECKED_ROWS))() for each in (call, case.function)]
    ours, eager = (
        max(
            float((x.float() - y).abs().max() / y.abs().max().clamp_min(1e-30))
            for x, y in zip(each, exact, strict=True)
        )
        for each in found
    )
    return f"{ours:.2g} ({eager:.2g})"


def _beside(run: Run, step: Step, found: Found) -> None:
    """The host's time, the wait of who asks, and the memory of a call."""
    if run.dry:
        return
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    torch.cuda.synchronize()
    own = sum(each.untyped_storage().nbytes() for each in kept)
    found.memory = f"{(torch.cuda.max_memory_allocated() - before - own) / 1e6:.1f}"
    del kept
    hosts: list[float] = []
    walls: list[float] = []
    for _ in range(HOST_RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - began)
    found.host = f"{1e6 * statistics.median(hosts):.0f}"
    found.wall = f"{1e6 * statistics.median(walls):.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="a regular expression over the names")
    parser.add_argument("--device", default="h200", help="whose rules plan the kernels")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds, all told")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, under the interpreter")
    given = parser.parse_args()
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        from fusion_advisor.verify.interpreter import install

        install()
    timer = clock(given.device, dry=given.dry_run)
    chosen = [
        case
        for case in cases(tiny=given.dry_run)
        if re.search(given.only, case.name, re.IGNORECASE)
    ]
    with tempfile.TemporaryDirectory() as folder:
        deadline = time.monotonic() + given.budget
        run = Run(given.dry_run, given.device, given.out, deadline, Path(folder))
        for case in chosen:
            if run.left() < 5.0 and not run.dry:
                run.rows.append(f"| {case.name} | not run: the time was up | | | | | |")
                continue
            measure(run, case, timer)
            if any(map(lost, run.rows)):
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
