"""How fast the emitted kernels are on a GPU, beside what else there is; writes a table.

    python -m benchmarks.kernels.speed emit --out speed.jsonl       # on a CPU: analyse, emit
    python -m benchmarks.kernels.speed time speed.jsonl --out DIR   # on the GPU: check, time
    python -m benchmarks.kernels.speed table RESULTS... [--out FILE]  # of several runs

The patterns are plain PyTorch (patterns.py). Each goes through capture, annotate, group, decide and
emit; what the tool leaves in eager is timed in eager, as part of the whole. Times are medians with
a cold L2 (a buffer of five times its size is written before each run), between events of work that
was queued behind a sleep, so that the host does not limit; shares are of the copy bandwidth
measured in the same run, over the bytes of every input and output once. A time below what the
datasheet's bandwidth allows is refused. `time` appends every measurement to DIR/results.jsonl and
rewrites DIR/table.md as it goes: a run that is cut short keeps what it has.
"""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusion_advisor.ir.graph import Arg, Graph, Ref, Symbol
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.kernel_fault import KernelFault, cause

from ..gpu import ahead, clock, copy_bandwidth, heading, lost, machine, resources
from .patterns import CLOSE, Function, Pattern, patterns

EMIT_SECONDS = 240

CONTENDERS = ("ours", "eager", "own", "Liger", "QuACK", "compile", "max-autotune")
MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
FAR = 0.03
"""A rival further from eager, as a share of the largest value, computes something else."""

Job = dict[str, Any]
Line = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    return arguments.run(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("emit")
    verb.set_defaults(run=_run_emit)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--only", default="", help="a regular expression over the names")
    verb.add_argument("--processes", type=int, default=1)
    verb.add_argument("--device", default="h200")
    verb.add_argument("--tiny", action="store_true", help="few rows, to rehearse without a GPU")
    verb = verbs.add_parser("time")
    verb.set_defaults(run=_run_time)
    verb.add_argument("jobs", type=Path)
    verb.add_argument("--out", type=Path, required=True, help="a folder")
    verb.add_argument("--only", default="")
    verb.add_argument("--device", default="h200", help="whose rules the clock has")
    verb.add_argument("--budget", type=float, default=540.0, help="seconds, all told")
    verb.add_argument("--processes", type=int, default=12, help="that compile ahead")
    verb.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    verb.add_argument("--who", default=",".join(CONTENDERS), help="whom to time, by commas")
    verb.add_argument("--dry-run", action="store_true", help="on the CPU, under the interpreter")
    verb = verbs.add_parser("table")
    verb.set_defaults(run=_run_table)
    verb.add_argument("results", type=Path, nargs="+", help="results.jsonl; later ones win")
    verb.add_argument("--out", type=Path)
    return parser.parse_args()


def _chosen(only: str, *, tiny: bool) -> list[Pattern]:
    return [p for p in patterns(tiny=tiny) if re.search(only, p.name, re.IGNORECASE)]


# -- emit ------------------------------------------------------------------------------------------


def _run_emit(arguments: argparse.Namespace) -> int:
    chosen = _chosen(arguments.only, tiny=arguments.tiny)
    given = [(p.name, arguments.tiny, arguments.device) for p in chosen]
    beside = arguments.out.with_suffix(".part")
    with (
        beside.open("w") as file,
        multiprocessing.get_context("spawn").Pool(arguments.processes) as pool,
    ):
        for job in pool.imap(_emitted, given):
            file.write(json.dumps(job) + "\n")
            file.flush()
            print(_said(job), flush=True)
    beside.replace(arguments.out)
    return 0


def _said(job: Job) -> str:
    head = f"{job['pattern']}: {job['status']}"
    return "\n".join([head, *(f"    {gate}" for gate in job["gates"])])


def _emitted(given: tuple[str, bool, str]) -> Job:
    """One pattern through the real stages."""
    name, tiny, device = given
    torch.set_num_threads(1)
    pattern = next(p for p in patterns(tiny=tiny) if p.name == name)
    job: Job = {
        "pattern": name, "tiny": tiny, "groups": [], "gates": [], "schedule": "", "ideal_bytes": 0,
    }  # fmt: skip

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {EMIT_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(EMIT_SECONDS)
    try:
        _analyse(pattern, job, device)
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        job["status"] = f"error: {type(error).__name__}: {str(error)[:300]}"
    signal.alarm(0)
    return job


def _analyse(pattern: Pattern, job: Job, device: str) -> None:
    from fusion_advisor.codegen.emit import emit
    from fusion_advisor.cost.dataflow import dataflow
    from fusion_advisor.frontend.child import capture_module
    from fusion_advisor.frontend.user_model import HostFakeMode
    from fusion_advisor.fusion.decide import decide
    from fusion_advisor.fusion.findings import fuse

    started = time.perf_counter()
    rules = load_rulebook()
    module = torch.nn.Module()
    module.forward = pattern.function
    with HostFakeMode():
        inputs = pattern.build("cpu")
    graph = capture_module(module, inputs)
    job["graph"] = to_json(graph)
    flow = dataflow(graph, rules.device(device))
    tensors = flow.annotated.tensors
    job["ideal_bytes"] = sum(given.bytes for given in pattern.inputs) + sum(
        tensors[ref].bytes for ref in graph.outputs
    )
    grouping = fuse(flow, rules).grouping
    covered: set[int] = set()
    for found in grouping.groups:
        for instance in found.instances:
            decision = decide(flow, instance, rules)
            entry = _identifier(pattern.name, len(job["groups"]))
            kernel = emit(flow, decision, entry, rules)
            expressed, plan = decision.subject.expressed, decision.subject.plan
            assert expressed is not None
            assert plan is not None
            covered |= set(instance)
            job["groups"].append(
                {
                    "entry": entry,
                    "text": kernel.text,
                    "inputs": [[ref.node, ref.output] for ref in expressed.inputs],
                    "outputs": [[ref.node, ref.output] for ref in expressed.outputs],
                    "schedule": plan.schedule,
                    "replaces": len(instance),
                    "bytes": decision.fused_bytes,
                    "steps": [_described(step) for step in plan.steps],
                }
            )
    launches = [i for i, node in enumerate(flow.nodes) if flow.launches(i) and node.kind == "call"]
    left = [flow.nodes[i].op for i in launches if i not in covered]
    job["left"] = left
    job["schedule"] = _summary(job)
    job["status"] = f"{job['schedule']} ({time.perf_counter() - started:.1f} s)"
    if left or len(job["groups"]) != 1:
        whole = decide(flow, launches, rules)
        job["gates"] = [
            f"{gate.name}: {gate.outcome}: {gate.why[:200]}"
            for gate in whole.gates
            if gate.outcome != "holds"
        ]
        planned = whole.subject.planned
        for refusal in planned.refusals if planned else ():
            job["gates"].append(f"refused by {refusal.gate}: {refusal.why[:200]}")


def _identifier(name: str, number: int) -> str:
    words = re.sub(r"\W+", "_", name.lower()).strip("_")
    return f"{words}_{number}" if number else words


def _described(step: Any) -> str:
    parts = [f"{step.schedule} rows={step.rows} block={step.block}"]
    parts += [f"part={step.part}"] if step.part else []
    return " ".join([*parts, f"warps={step.warps} stages={step.stages}"])


def _summary(job: Job) -> str:
    """`row`, `split: 2 kernels`, `row + flat + 2 eager`; `eager` when nothing was fused."""
    parts = [
        group["schedule"] + (f" ({len(group['steps'])} kernels)" if len(group["steps"]) > 1 else "")
        for group in job["groups"]
    ]
    left = len(job["left"])
    return " + ".join([*parts, *([f"{left} eager"] if left and parts else [])]) or "eager"


# -- what the tool made of a pattern, as one function ----------------------------------------------


class Whole:
    """The pattern with its accepted groups replaced by their kernels, the rest in eager.

    Values are asked for from the outputs back, so that kernels and eager calls fall into an order
    that works without being told.
    """

    def __init__(self, job: Job, folder: Path, device: str) -> None:
        self.modules: list[ModuleType] = []
        self._graph: Graph = from_json(Graph, job["graph"])
        self._nodes = {node.name: node for node in self._graph.nodes}
        self._device = device
        self._given = [node.name for node in self._graph.nodes if node.kind == "input"]
        self._makers: dict[Ref, tuple[Any, list[Ref], list[Ref]]] = {}
        for group in job["groups"]:
            module = load_module(group["text"], folder)
            self.modules.append(module)
            inputs = [Ref(*ref) for ref in group["inputs"]]
            outputs = [Ref(*ref) for ref in group["outputs"]]
            maker = (getattr(module, group["entry"]), inputs, outputs)
            self._makers |= dict.fromkeys(outputs, maker)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if len(inputs) != len(self._given):
            raise KernelFault(f"{len(inputs)} inputs for {len(self._given)} of the graph")
        values = {Ref(name): x for name, x in zip(self._given, inputs, strict=True)}
        return tuple(self._value(ref, values) for ref in self._graph.outputs)

    def _value(self, ref: Ref, values: dict[Ref, Tensor]) -> Tensor:
        if ref not in values:
            if ref in self._makers:
                launch, asked, made = self._makers[ref]
                results = launch(*(self._value(one, values) for one in asked))
                results = results if isinstance(results, tuple) else (results,)
                values.update(zip(made, results, strict=True))
            else:
                self._eager(ref.node, values)
        return values[ref]

    def _eager(self, name: str, values: dict[Ref, Tensor]) -> None:
        node = self._nodes[name]
        if node.kind != "call":
            raise KernelFault(f"{name} is a {node.kind}, which is not carried")
        call: Any = torch.ops
        for part in node.op.split("."):
            call = getattr(call, part)
        arguments = [self._argument(arg, values) for arg in node.args]
        named = {key: self._argument(arg, values) for key, arg in node.kwargs if key != "device"}
        if dict(node.kwargs).get("device") is not None:
            named["device"] = self._device
        results = call(*arguments, **named)
        results = results if isinstance(results, tuple | list) else (results,)
        values.update({Ref(name, i): x for i, x in enumerate(results)})

    def _argument(self, arg: Arg, values: dict[Ref, Tensor]) -> Any:
        if isinstance(arg, Ref):
            return self._value(arg, values)
        if isinstance(arg, Symbol):
            return _constant(arg.text)
        if isinstance(arg, tuple):
            return [self._argument(item, values) for item in arg]
        return arg

    def resources(self) -> str:
        """Registers and spills of each kernel."""
        return resources(self.modules)


def _constant(text: str) -> Any:
    value: Any = torch
    for part in text.removeprefix("torch.").split("."):
        value = getattr(value, part)
    return value


# -- time ------------------------------------------------------------------------------------------


class Run:
    """A run on one device: what it measured so far, and where it writes that."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.dry: bool = arguments.dry_run
        self.device = "cpu" if self.dry else "cuda"
        self.deadline = time.monotonic() + arguments.budget
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.lines: list[Line] = []
        self.copies: list[float] = []
        self.jobs: dict[str, Job] = {}
        for text in arguments.jobs.read_text().splitlines():
            job = json.loads(text)
            self.jobs[job["pattern"]] = job
        tiny = any(job["tiny"] for job in self.jobs.values())
        chosen = [p for p in _chosen(arguments.only, tiny=tiny) if p.name in self.jobs]
        self.patterns = chosen
        self.clock = clock(arguments.device, dry=self.dry)
        self.broken = False
        self.machine = "the CPU, under the interpreter" if self.dry else machine()

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def record(self, pattern: str, who: str, **found: Any) -> None:
        """One measurement: into the file at once, and the table made anew beside the old one."""
        job = self.jobs.get(pattern, {})
        line: Line = {
            "pattern": pattern,
            "who": who,
            "copy": statistics.median(self.copies) if self.copies else 0.0,
            "ideal_bytes": job.get("ideal_bytes", 0),
            "schedule": job.get("schedule", ""),
            "machine": self.machine,
            **found,
        }
        self.lines.append(line)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        _replace(self.out / "table.md", _table(self.lines))
        told = {key: value for key, value in found.items() if key != "steps"}
        print(f"{pattern} | {who} | {_share_text(line)} | {told}", flush=True)

    def measure_copy(self) -> None:
        """What shares are of, now."""
        self.copies.append(copy_bandwidth(self.clock, *([1 << 13] if self.dry else [])))

    def time_one(self, pattern: Pattern, who: str, call: Function, **found: Any) -> None:
        """Time one way to compute a pattern, on fresh data. Raises KernelFault for a time that
        no memory of the device reaches."""
        inputs = pattern.build(self.device)
        t = self.clock.time(lambda: call(*inputs), self.jobs[pattern.name]["ideal_bytes"])
        found |= {
            "us": t.us, "low_us": t.low_us, "high_us": t.high_us, "runs": t.runs,
            "host_ahead": t.host_ahead,
        }  # fmt: skip
        self.record(pattern.name, who, **found)

    @contextmanager
    def attempt(self, pattern: str, who: str) -> Generator[None]:
        """Whatever one measurement raises becomes its line; a lost device ends the run."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # noqa: BLE001 rivals raise what they like: it is recorded
            text = cause(error)
            self.broken = lost(text)
            self.record(pattern, who, failure=text)
        finally:
            if not self.broken:
                self.clock.release()


def _replace(file: Path, text: str) -> None:
    beside = file.with_suffix(".part")
    beside.write_text(text)
    beside.replace(file)


def _run_time(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        from fusion_advisor.verify.interpreter import install

        install()
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    run = Run(arguments)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        _measure(run, arguments, Path(folder))
    text = _table(run.lines)
    _replace(run.out / "table.md", text)
    print(text)
    return int(run.broken)


def _measure(run: Run, arguments: argparse.Namespace, folder: Path) -> None:
    wanted = set(arguments.who.split(",")) & set(CONTENDERS)
    failed: dict[str, str] = {}
    if "ours" in wanted and not run.dry:
        failed = _compiled_ahead(run, arguments.processes)
    for _ in range(3):
        run.measure_copy()
    known: dict[str, Callable[[Run, Pattern], None]] = {
        "ours": partial(_time_ours, folder=folder, failed=failed),
        "eager": _time_eager,
        "own": _time_own,
        "Liger": partial(_time_library, who="Liger"),
        "QuACK": partial(_time_library, who="QuACK"),
    }
    stages = [stage for who, stage in known.items() if who in wanted]
    modes = [who for who in MODES if who in wanted and not arguments.no_compile]
    if modes:
        stages.append(partial(_time_compiled, modes=modes))
    for stage in stages:
        for pattern in run.patterns:
            if run.broken or run.left() < 5:
                return
            stage(run, pattern)
        run.measure_copy()


def _compiled_ahead(run: Run, processes: int) -> dict[str, str]:
    """Why, by pattern, where its kernels failed when they were run once ahead."""
    jobs = {p.name: run.jobs[p.name] for p in run.patterns if run.jobs[p.name]["groups"]}
    return ahead(_run_once, jobs, processes, time.monotonic() + min(240.0, 0.5 * run.left()))


def _run_once(job: Job) -> None:
    pattern = next(p for p in patterns(tiny=job["tiny"]) if p.name == job["pattern"])
    with tempfile.TemporaryDirectory() as folder:
        Whole(job, Path(folder), "cuda")(*pattern.build("cuda", zeros=True))


def _time_ours(run: Run, pattern: Pattern, folder: Path, failed: dict[str, str]) -> None:
    job = run.jobs[pattern.name]
    if not job["groups"]:
        run.record(pattern.name, "ours", failure=f"{job['status']}; {'; '.join(job['gates'])}")
        return
    if pattern.name in failed:
        run.record(pattern.name, "ours", failure=failed[pattern.name])
        return
    with run.attempt(pattern.name, "ours"):
        whole = Whole(job, folder, run.device)
        checked = _check(run, pattern, whole)
        run.clock.release()
        steps = [step for group in job["groups"] for step in group["steps"]]
        run.time_one(
            pattern, "ours", whole, **checked, resources=whole.resources(), steps=steps,
            gates=job["gates"],
        )  # fmt: skip


def _time_eager(run: Run, pattern: Pattern) -> None:
    with run.attempt(pattern.name, "eager"):
        run.time_one(pattern, "eager", pattern.function)


def _time_own(run: Run, pattern: Pattern) -> None:
    if pattern.own is not None:
        with run.attempt(pattern.name, "own"):
            run.time_one(
                pattern, "own", pattern.own, differs=_difference(run, pattern, pattern.own)
            )


def _time_library(run: Run, pattern: Pattern, who: str) -> None:
    make = {"Liger": pattern.liger, "QuACK": pattern.quack}[who]
    if make is not None:
        with run.attempt(pattern.name, who):
            call = make()
            run.time_one(pattern, who, call, differs=_difference(run, pattern, call))


def _time_compiled(run: Run, pattern: Pattern, modes: Sequence[str]) -> None:
    """No compilation begins that the budget may not hold."""
    for who in modes:
        if run.broken or run.left() < 25:
            return
        with run.attempt(pattern.name, who):
            torch.compiler.reset()
            started = time.monotonic()
            compiled: Any = torch.compile(pattern.function, mode=MODES[who], dynamic=False)
            compiled(*pattern.build(run.device))
            seconds = time.monotonic() - started
            run.time_one(pattern, who, compiled, compile_seconds=round(seconds, 1))


# -- is it right? ----------------------------------------------------------------------------------


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


@contextmanager
def _poisoned() -> Generator[None]:
    """What a launcher allocates is full of NaN, or of ones where there is none."""
    names = ("empty", "empty_like", "empty_strided")
    before = {name: getattr(torch, name) for name in names}

    def poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **named: Any) -> Tensor:
            tensor = allocate(*args, **named)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

        return allocated

    try:
        for name, allocate in before.items():
            setattr(torch, name, poisoning(allocate))
        yield
    finally:
        for name, allocate in before.items():
            setattr(torch, name, allocate)


def _check(run: Run, pattern: Pattern, whole: Whole) -> dict[str, Any]:
    """Largest errors against float64 on the real size, ours and eager's. Raises KernelFault when
    ours is not finite, or more than twice eager's and an ulp of the largest value."""
    from fusion_advisor.verify.references import Float64Mode

    inputs = pattern.build(run.device)
    with _poisoned():
        ours = whole(*inputs)
    if pattern.random:
        return _check_dropout(inputs[0], ours[0])
    with Float64Mode():
        exact = _outputs(pattern.function(*(_widened(x) for x in inputs)))
    run.clock.release()
    eager = _outputs(pattern.function(*inputs))
    errors: list[float] = []
    theirs: list[float] = []
    for mine, other, true in zip(ours, eager, exact, strict=True):
        if mine.shape != other.shape or mine.dtype != other.dtype:
            raise KernelFault(f"{mine.shape} {mine.dtype}, not {other.shape} {other.dtype}")
        errors.append(_largest(mine, true))
        theirs.append(_largest(other, true))
        top = float(true.abs().max())
        allowed = 2 * theirs[-1] + top * torch.finfo(mine.dtype).eps
        if not errors[-1] <= allowed:
            raise KernelFault(
                f"error {errors[-1]:.3g}, eager's {theirs[-1]:.3g}, largest {top:.3g}"
            )
    return {"errors": errors, "eager_errors": theirs}


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _largest(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max())


def _check_dropout(x: Tensor, ours: Tensor) -> dict[str, Any]:
    """A tenth is zero, the rest is gelu over nine tenths."""
    exact = torch.nn.functional.gelu(x.double()) / 0.9
    kept = ours != 0
    share = float(kept.double().mean())
    error = float(((ours.double() - exact) * kept).abs().max())
    if not (0.895 < share < 0.905 and error < 0.05) and x.numel() > 1 << 20:
        raise KernelFault(f"kept {share:.4f} of the elements, error {error:.3g}")
    return {"errors": [error], "eager_errors": [], "kept": share}


def _difference(run: Run, pattern: Pattern, call: Function) -> list[float]:
    """Distance of a rival from eager, as a share of the largest value. Raises KernelFault when that
    is far."""
    inputs = pattern.build(run.device)
    expected = _outputs(pattern.function(*inputs))
    found = _outputs(call(*(x.clone() for x in inputs)))
    shares = [
        _largest(mine, other) / max(float(other.abs().max()), 1e-30)
        for mine, other in zip(found, expected, strict=False)
    ]
    if not max(shares) <= FAR:
        raise KernelFault(f"not the same computation: {max(shares):.3g} of the largest value away")
    return shares


# -- the table -------------------------------------------------------------------------------------

_RIVALS = CONTENDERS[1:]


def _run_table(arguments: argparse.Namespace) -> int:
    lines = [json.loads(text) for file in arguments.results for text in file.open()]
    text = _table(lines)
    if arguments.out:
        _replace(arguments.out, text)
    print(text)
    return 0


def _share(line: Line | None) -> float | None:
    """Percent of the copy bandwidth."""
    if line is None or not line.get("us") or not line["copy"]:
        return None
    return 100 * line["ideal_bytes"] / (line["us"] * 1e-6) / line["copy"]


def _share_text(line: Line | None) -> str:
    share = _share(line)
    if share is None:
        return "" if line is None else "failed"
    return f"{share:.1f}" + ("" if line is None or line.get("host_ahead", True) else " (host)")


def _table(lines: Sequence[Line]) -> str:
    """Later lines win over earlier ones of the same pattern and contender."""
    found = {(line["pattern"], line["who"]): line for line in lines}
    rows = [p for p in patterns() if any(name == p.name for name, _ in found)]
    head = ["pattern", "schedule", "ours", *_RIVALS, "best rival", "goal", "reached", "beyond"]
    head += ["registers/spills", "error / eager's"]
    text = [*heading("Emitted kernels beside what else there is"), _measured(lines), ""]
    text += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    text += [f"| {' | '.join(_cells(p, found))} |" for p in rows]
    ours = [found[p.name, "ours"] for p in rows if (p.name, "ours") in found]
    noted = [(line["pattern"], line["failure"]) for line in ours if line.get("failure")]
    noted += [
        (line["pattern"], "; ".join(line["gates"]))
        for line in ours
        if line.get("gates") and not line.get("failure")
    ]
    text += ["", *(f"- {name}: {why}" for name, why in noted)]
    text += [
        f"- {line['pattern']}, {line['who']}: {line['failure']}"
        for line in found.values()
        if line["who"] != "ours" and line.get("failure")
    ]
    return "\n".join(text) + "\n"


def _measured(lines: Sequence[Line]) -> str:
    copies = sorted({line["copy"] for line in lines if line["copy"]}) or [0.0]
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    return (
        f"{machines}. Percent of the copy bandwidth ({copies[0] / 1e9:.0f} to"
        f" {copies[-1] / 1e9:.0f} GB/s read+write), cold L2, medians."
    )


def _cells(pattern: Pattern, found: dict[tuple[str, str], Line]) -> list[str]:
    ours = found.get((pattern.name, "ours"))
    share = _share(ours)
    rivals = {who: _share(found.get((pattern.name, who))) for who in _RIVALS}
    known = {who: value for who, value in rivals.items() if value is not None}
    best = max(known, key=lambda who: known[who], default="")
    goal = pattern.goal
    near = _share(found.get((pattern.near, "ours"))) if pattern.near else None
    if near is not None:
        goal = near - CLOSE
    line = ours or {}
    beyond = goal if goal is None or pattern.near else max(goal, pattern.beyond)
    return [
        pattern.name,
        line.get("schedule", ""),
        _share_text(ours),
        *(_share_text(found.get((pattern.name, who))) for who in _RIVALS),
        f"{best} {known[best]:.1f}" if best else "",
        "" if goal is None else f"{goal:.0f}" if near is None else f"{goal:.1f} (near - {CLOSE:g})",
        _reached(share, goal),
        _reached(share, beyond),
        line.get("resources", ""),
        " ".join(
            f"{mine:.2g}/{other:.2g}"
            for mine, other in zip(
                line.get("errors", []), line.get("eager_errors", []), strict=False
            )
        ),
    ]


def _reached(share: float | None, goal: float | None) -> str:
    if goal is None:
        return ""
    if share is None:
        return "no"
    return "yes" if share >= goal else f"no ({share - goal:.1f})"


if __name__ == "__main__":
    sys.exit(main())
