"""How true the predictions are: predicted against measured time, traffic and verdict.

    python benchmarks/predictions.py emit GRAPHS --out cases.jsonl      # on a CPU: analyse and emit
    python benchmarks/predictions.py time cases.jsonl --out times.jsonl # on the GPU
    python benchmarks/predictions.py count cases.jsonl                  # on the GPU, below ncu
    python benchmarks/predictions.py fit cases.jsonl times.jsonl --out rules/predict.toml
    python benchmarks/predictions.py table cases.jsonl times.jsonl [--counts FILE] [--out FILE]

GRAPHS is a folder of captured graphs (`NAME.json`, as `graph_to_json` writes them, or pickles).
A case is a part of one of them that stands alone: an accepted group, a rejected candidate that has
a plan, or a single launch of either or of a memory-bound problem. The goal set is KernelBench level
1 and 2 and five families; whatever else is in the folder, and a series of small patterns over many
sizes, serves the fit alone. `fit` sees that and the half of the goal set that a hash of the
problem's name chooses; `table` reports the other half.

Times are medians with quartiles, cold L2 (a buffer of five times its size is written before each
run), between events of work that was queued while the device was held, so that the host does not
limit. `time` appends every measurement as it goes: a run that is cut short keeps what it has.
"""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fusion_advisor.annotate import annotate
from fusion_advisor.axes import NotExpressible
from fusion_advisor.cases import FULL_SIZE
from fusion_advisor.dataflow import Dataflow, dataflow
from fusion_advisor.decide import Decision, decide
from fusion_advisor.emit import emit
from fusion_advisor.emitted import Fault, cause, load_module
from fusion_advisor.express import boundary
from fusion_advisor.group import group
from fusion_advisor.kernels import Case as Inputs
from fusion_advisor.kernels import Kernel, from_json, to_json
from fusion_advisor.predict import Work, call_us, launch_us, memory_us, speedup_interval
from fusion_advisor.records import Arg, Graph, Node, Ref, Symbol, Tensor
from fusion_advisor.rulebook import Device, Number, Rulebook, Speed, Times
from fusion_advisor.rulefiles import load_rulebook
from fusion_advisor.wire import graph_from_json, graph_to_json
from fusion_advisor.works import eager_works, fused_works

DEVICE = "h200"
GOAL = re.compile(r"level[12]_|transformers_(Llama|BERT|GPT-NeoX|ViT|Mixtral)$")
"""The problems that the predictions are judged on."""

SECONDS = 120
"""Of analysis for one graph."""
FLUSH_BYTES = 256 << 20
BATCH = 16
LEAST_RUNS, MOST_RUNS, SPENT_S = 12, 32, 0.02
AHEAD = 2.0
"""How much longer the device is held than the host takes to queue a batch."""
LARGE_BYTES = 2 << 30
"""Cases that move more are warmed up by few processes at a time: all would not fit."""
MOST_BYTES = 60 << 30


@dataclass(frozen=True)
class Case:
    """A part of a graph that stands alone, and the kernel that replaces it.

    `name` is the problem and a number; `graph` has the inputs as its first nodes; `ranges` bounds
    the values of integer inputs, by their node. `text` is empty where no kernel is emitted.
    `accepted` and `gate` are the chapter's verdict and the gate that decides; `weight` counts the
    places at which the goal set has this very case.
    """

    name: str
    graph: str
    launches: int
    bytes: int
    weight: int = 1
    accepted: bool = False
    gate: str = ""
    schedule: str = ""
    entry: str = ""
    text: str = ""
    inputs: tuple[tuple[str, int], ...] = ()
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def problem(self) -> str:
        return self.name.split("/", maxsplit=1)[0]

    @property
    def goal(self) -> bool:
        return bool(GOAL.match(self.problem))

    @property
    def reported(self) -> bool:
        """In the half that is never fitted."""
        return self.goal and hashlib.sha256(self.problem.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True)
class Timed:
    """One measurement: `way` is `eager` or `kernel`; microseconds; `failure` says why there is
    none."""

    name: str
    way: str
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    runs: int = 0
    host_ahead: bool = True
    resources: str = ""
    failure: str = ""


def main() -> int:
    arguments = _arguments()
    sys.setrecursionlimit(10_000)
    return arguments.run(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("emit")
    verb.set_defaults(run=_run_emit)
    verb.add_argument("graphs", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--only", default="", help="a regular expression over the names")
    verb.add_argument("--processes", type=int, default=1)
    verb = verbs.add_parser("time")
    verb.set_defaults(run=_run_time)
    verb.add_argument("cases", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--budget", type=float, default=360.0, help="seconds, all told")
    verb.add_argument("--processes", type=int, default=12, help="that compile ahead")
    verb.add_argument("--only", default="")
    verb.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, to rehearse")
    verb = verbs.add_parser("count")
    verb.set_defaults(run=_run_count)
    verb.add_argument("cases", type=Path)
    verb.add_argument("--kernels", type=int, default=20, help="emitted kernels at most")
    for name, run in (("fit", _run_fit), ("table", _run_table)):
        verb = verbs.add_parser(name)
        verb.set_defaults(run=run)
        verb.add_argument("cases", type=Path)
        verb.add_argument("times", type=Path, nargs="+", help="later ones win")
        verb.add_argument("--out", type=Path)
    verb.add_argument("--counts", type=Path, help="what ncu wrote for `count`")
    return parser.parse_args()


# -- emit ------------------------------------------------------------------------------------------


def _run_emit(arguments: argparse.Namespace) -> int:
    """Every distinct case of every graph, weighted; launches of kept cases are cases themselves."""
    files = sorted(arguments.graphs.glob("*.pkl")) or sorted(arguments.graphs.glob("*.json"))
    files = [f for f in files if re.search(arguments.only, f.stem)]
    # The goal set names a case that others have, too.
    files.sort(key=lambda f: not GOAL.match(f.stem))
    kept: dict[str, Case] = {}
    weights: dict[str, int] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, maxtasksperchild=20) as pool:
        sources = [*files, *_series()]
        for problem, found, failure in pool.imap(_cases_of, sources):
            if failure:
                print(f"{problem}: {failure}", flush=True)
            for case, key in found:
                if key not in kept:
                    kept[key] = case
                    weights[key] = 0
                if GOAL.match(problem) or not kept[key].goal:
                    weights[key] += case.weight
    with arguments.out.open("w") as out:
        for key, case in kept.items():
            content = {**asdict(case), "weight": weights[key]}
            out.write(json.dumps(content) + "\n")
    kernels = [case for case in kept.values() if case.text]
    accepted = sum(case.accepted for case in kernels)
    print(f"{len(kept)} cases, {len(kernels)} with a kernel, {accepted} of them accepted")
    return 0


Source = Path | tuple[str, str, tuple[int, int], str]
"""A file with a graph, or a pattern of the series: its name, function, shape and dtype."""


def _cases_of(source: Source) -> tuple[str, list[tuple[Case, str]], str]:
    """The cases of one graph, each with what makes it the same as another."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    sys.setrecursionlimit(10_000)
    problem = source.stem if isinstance(source, Path) else source[0]
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return problem, _analysed(problem, _graph_of(source)), ""
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        return problem, [], f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)


def _graph_of(source: Source) -> Graph:
    if isinstance(source, Path):
        content = source.read_bytes()
        return pickle.loads(content) if source.suffix == ".pkl" else graph_from_json(content)
    import torch

    from fusion_advisor.capture import capture_module
    from fusion_advisor.models import HostFakeMode

    _, function, shape, dtype = source
    module = torch.nn.Module()
    module.forward = _FUNCTIONS[function]
    with HostFakeMode():
        inputs = _inputs(function, shape, getattr(torch, dtype))
    return capture_module(module, inputs)


def _analysed(problem: str, graph: Graph) -> list[tuple[Case, str]]:
    rules = load_rulebook()
    flow = dataflow(annotate(graph, rules.device(DEVICE)))
    grouping = group(flow, lambda launches: decide(flow, launches, rules), rules)
    found: list[tuple[Case, str]] = []
    alone: dict[int, None] = {}
    for one in (*grouping.groups, *grouping.candidates):
        if one.decision.subject.plan is None:
            continue
        name = f"{problem}/{len(found)}"
        found.append(_case(flow, one.decision, name, len(one.instances), rules))
        alone |= dict.fromkeys(one.decision.subject.launches)
    for number, node in enumerate(flow.nodes):
        cost = flow.annotated.costs[node.name]
        if cost.modelled and cost.memory_bound and flow.launches(number) and cost.unit == "cuda":
            alone[number] = None
    seen: set[int] = set()
    for number in alone:
        kind = flow.annotated.classes[flow.nodes[number].name]
        if kind not in seen:
            seen.add(kind)
            name = f"{problem}/{flow.nodes[number].name}"
            found.append(_case(flow, decide(flow, [number], rules), name, 1, rules))
    return found


def _case(
    flow: Dataflow, decision: Decision, name: str, weight: int, rules: Rulebook
) -> tuple[Case, str]:
    subject = decision.subject
    part, renamed = _cut(flow, subject.launches)
    graph = graph_to_json(part).decode()
    made: dict[str, Any] = {}
    inputs: tuple[Ref, ...] = ()
    several = len(subject.launches) > 1
    indexed = any(
        "int" in tensor.dtype
        for node in part.nodes[: len(subject.border.inputs)]
        for tensor in node.outputs
        if tensor
    )
    # A single launch is emitted only to learn how large its indices may be.
    if subject.plan is not None and subject.expressed is not None and (several or indexed):
        try:
            kernel = emit(flow, decision, "fused", rules, full_size=True)
        except (NotExpressible, ValueError) as error:
            if several:
                print(f"{name}: not emitted: {error}", flush=True)
        else:
            inputs = tuple(renamed[ref] for ref in subject.expressed.inputs)
            full = _full(kernel)
            pairs = zip(inputs, full.ranges, strict=False)
            made["ranges"] = {ref.node: pair for ref, pair in pairs if pair is not None}
            if several:
                made |= {
                    "entry": kernel.entry,
                    "text": kernel.text,
                    "schedule": subject.plan.schedule,
                    "inputs": tuple((ref.node, ref.output) for ref in inputs),
                }
    deciding = decision.deciding
    case = Case(
        name=name,
        graph=graph,
        launches=len(subject.launches),
        bytes=decision.unfused_bytes,
        weight=weight,
        accepted=decision.accepted,
        gate=deciding.name if deciding else "",
        **made,
    )
    return case, hashlib.sha256((graph + case.text).encode()).hexdigest()


def _full(kernel: Kernel) -> Inputs:
    """The inputs at the graph's own sizes, under whatever name those are checked."""
    return next((c for c in kernel.cases if c.name == FULL_SIZE), kernel.cases[0])


def _cut(flow: Dataflow, launches: Iterable[int]) -> tuple[Graph, dict[Ref, Ref]]:
    """A set of launches, and the views between them, as a graph of its own; and what each tensor
    that it reads or makes is called there."""
    border = boundary(flow, launches)
    tensors = flow.annotated.tensors
    renamed: dict[Ref, Ref] = {}
    storages: dict[int, int] = {}
    nodes: list[Node] = []

    def lay(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        number = storages.setdefault(tensor.storage, len(storages))
        return Tensor(tensor.shape, tensor.stride, tensor.dtype, number, tensor.offset)

    for ref in border.inputs:
        renamed[ref] = Ref(f"in{len(nodes)}")
        nodes.append(Node(f"in{len(nodes)}", "input", "input", outputs=(lay(tensors[ref]),)))
    for place, number in enumerate(border.members):
        node = flow.nodes[number]
        operands = iter(flow.operands[number])

        def named(arg: Arg, operands: Iterator[Ref] = operands) -> Arg:
            if isinstance(arg, Ref):
                return renamed[next(operands)] if arg in tensors else arg
            if isinstance(arg, tuple):
                return tuple(named(item, operands) for item in arg)
            return arg

        args = tuple(named(arg) for arg in node.args)
        kwargs = tuple((key, named(arg)) for key, arg in node.kwargs)
        outputs = tuple(lay(tensor) for tensor in node.outputs)
        mutates = tuple(storages[s] for s in node.mutates if s in storages)
        nodes.append(Node(f"n{place}", node.op, "call", args, kwargs, outputs, mutates))
        for i in range(len(outputs)):
            renamed[Ref(node.name, i)] = Ref(f"n{place}", i)
    return Graph(tuple(nodes), tuple(renamed[ref] for ref in border.outputs)), renamed


# -- the series: patterns over sizes, for the fit alone --------------------------------------------


def _series() -> list[Source]:
    shapes = (
        (16, 256), (64, 1024), (256, 1024), (1024, 1024), (2048, 2048), (4096, 4096),
        (16384, 4096), (65536, 8192), (131072, 128), (1048576, 64), (32, 262144), (4095, 1023),
        (65535, 2047), (512, 16384),
    )  # fmt: skip
    found: list[Source] = []
    for number, function in enumerate(_FUNCTIONS):
        for place, shape in enumerate(shapes):
            dtype = "bfloat16" if (number + place) % 2 else "float32"
            name = f"series_{function}_{shape[0]}x{shape[1]}_{dtype}"
            found.append((name, function, shape, dtype))
    return found


def _functional() -> dict[str, Callable[..., Any]]:
    import torch
    import torch.nn.functional as F

    def softmax(x: Any) -> Any:
        return torch.softmax(x * 0.125, -1)

    def column(x: Any) -> Any:
        return torch.relu(x).sum(0)

    def rows(x: Any) -> Any:
        return (x * x).mean(-1)

    def add_norm(x: Any, y: Any, w: Any, b: Any) -> Any:
        z = x + y
        return z, F.layer_norm(z, (z.shape[-1],), w, b)

    def heavy(x: Any) -> Any:
        return torch.sin(torch.tanh(torch.exp(-torch.erf(x)))) + torch.log1p(x * x)

    def gated(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    return {
        "gelu": lambda x, w: F.gelu(x * 0.5 + w),
        "add": lambda x, y: torch.relu(x + y),
        "heavy": heavy,
        "gated": gated,
        "softmax": softmax,
        "add_norm": add_norm,
        "rows": rows,
        "column": column,
        "transposed": lambda x, y: torch.relu(x.t() + y),
        "cat": lambda x, y: torch.cat((-x, y), -1) * 2,
    }


class _Functions(Mapping[str, Callable[..., Any]]):
    """The patterns of the series, made when first asked for: torch takes seconds to import."""

    names = (
        "gelu", "add", "heavy", "gated", "softmax", "add_norm", "rows", "column", "transposed",
        "cat",
    )  # fmt: skip

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _functional()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


_FUNCTIONS = _Functions()


def _inputs(function: str, shape: tuple[int, int], dtype: Any) -> tuple[Any, ...]:
    import torch

    def new(*sizes: int) -> Any:
        return torch.empty(sizes, dtype=dtype)

    rows, length = shape
    x = new(rows, length)
    if function == "gelu":
        return x, new(length)
    if function in ("add", "cat"):
        return x, new(rows, length)
    if function == "transposed":
        return x, new(length, rows)
    if function == "add_norm":
        return x, new(rows, length), new(length), new(length)
    if function == "gated":
        return (new(rows, 2 * length),)
    return (x,)


# -- on the GPU ------------------------------------------------------------------------------------


class Eager:
    """A case as eager launches it: node after node, each value dropped after its last use."""

    def __init__(self, graph: Graph, device: str) -> None:
        self._device = device
        self._inputs = [node.name for node in graph.nodes if node.kind == "input"]
        calls = [node for node in graph.nodes if node.kind == "call"]
        last: dict[str, int] = {}
        for i, node in enumerate(calls):
            last |= {ref.node: i for ref in node.refs()} | {node.name: i}
        kept = {ref.node for ref in graph.outputs}
        dead = [
            [n for n, at in last.items() if at == i and n not in kept] for i in range(len(calls))
        ]
        self._steps = [
            (self._call(node), node, gone) for node, gone in zip(calls, dead, strict=True)
        ]
        self._outputs = graph.outputs

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        values: dict[str, Sequence[Any]] = {
            name: (x,) for name, x in zip(self._inputs, inputs, strict=True)
        }
        for call, node, gone in self._steps:
            arguments = [self._argument(arg, values) for arg in node.args]
            named = {
                key: self._device if key == "device" and arg else self._argument(arg, values)
                for key, arg in node.kwargs
            }
            results = call(*arguments, **named)
            values[node.name] = results if isinstance(results, tuple | list) else (results,)
            for name in gone:
                del values[name]
        return tuple(values[ref.node][ref.output] for ref in self._outputs)

    @staticmethod
    def _call(node: Node) -> Any:
        import torch

        call: Any = torch.ops
        for part in node.op.split("."):
            call = getattr(call, part)
        return call

    def _argument(self, arg: Arg, values: Mapping[str, Sequence[Any]]) -> Any:
        if isinstance(arg, Ref):
            return values[arg.node][arg.output]
        if isinstance(arg, Symbol):
            return _constant(arg.text)
        if isinstance(arg, tuple):
            return [self._argument(item, values) for item in arg]
        return arg


def _constant(text: str) -> Any:
    import torch

    value: Any = torch
    for part in text.removeprefix("torch.").split("."):
        value = getattr(value, part)
    return value


def _built(case: Case, graph: Graph, device: str, *, random: bool = True) -> list[Any]:
    """Data for every input, laid out as the graph says; inputs may share a storage."""
    import torch

    nodes = [node for node in graph.nodes if node.kind == "input"]
    extents: dict[int, int] = {}
    for tensor in (node.out for node in nodes):
        pairs = zip(tensor.shape, tensor.stride, strict=True)
        reach = tensor.offset + sum((n - 1) * s for n, s in pairs) + 1
        extents[tensor.storage] = max(extents.get(tensor.storage, 1), reach)
    storages: dict[int, Any] = {}
    found: list[Any] = []
    for node in nodes:
        tensor = node.out
        if tensor.storage not in storages:
            dtype = getattr(torch, tensor.dtype)
            size = (extents[tensor.storage],)
            if dtype.is_floating_point and random:
                wide = torch.float32 if dtype.itemsize == 1 else dtype
                flat = torch.randn(size, dtype=wide, device=device).to(dtype)
            elif dtype.is_complex or not random:
                flat = torch.zeros(size, dtype=dtype, device=device)
            else:
                low, high = case.ranges.get(node.name, (0, 2))
                flat = torch.randint(low, high, size, device=device).to(dtype)
            storages[tensor.storage] = flat
        flat = storages[tensor.storage]
        if flat.dtype != getattr(torch, tensor.dtype):
            flat = flat.view(getattr(torch, tensor.dtype))
        found.append(flat.as_strided(tensor.shape, tensor.stride, tensor.offset))
    return found


class Clock:
    """The GPU's time of a call: cold L2, the launches queued ahead of the device."""

    def __init__(self) -> None:
        import torch

        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._rate = 1e3 * torch.cuda.get_device_properties(0).clock_rate

    def times(self, call: Callable[[], Any]) -> tuple[list[float], bool]:
        """Microseconds of each run, and whether the host kept ahead of the device throughout."""
        import torch

        call()
        torch.cuda.synchronize()
        self._hold(0.002)
        began = time.perf_counter()
        call()
        host_s = time.perf_counter() - began
        torch.cuda.synchronize()
        first, _ = self._batch(call, 3, host_s)
        fitting = int(SPENT_S / max(statistics.median(first) * 1e-6, 1e-6))
        wanted = min(MOST_RUNS, max(LEAST_RUNS, fitting))
        found: list[float] = []
        ahead = True
        while len(found) < wanted:
            some, queued = self._batch(call, min(BATCH, wanted - len(found)), host_s)
            found += some
            ahead = ahead and queued
        return found, ahead

    def _hold(self, seconds: float) -> None:
        import torch

        sleep: Any = torch.cuda._sleep  # pyright: ignore[reportPrivateUsage]
        sleep(int(seconds * self._rate))

    def _batch(
        self, call: Callable[[], Any], count: int, host_s: float
    ) -> tuple[list[float], bool]:
        import torch

        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        self._hold(AHEAD * count * (host_s + 5e-5))
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        ahead = not pairs[0][0].query()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs], ahead


def _read(file: Path, only: str = "") -> list[Case]:
    cases = [from_json(Case, line) for line in file.read_text().splitlines()]
    return [case for case in cases if re.search(only, case.name)]


def _resources(module: Any) -> str:
    """Registers and spills as the driver counts them, of each kernel: `168/0, 40/0`."""
    found: list[str] = []
    for value in vars(module).values():
        caches = getattr(value, "device_caches", None) or {}
        for cache in list(caches.values()):
            kernels = cache[0] if isinstance(cache, tuple) else cache
            for kernel in getattr(kernels, "values", list)():
                registers = getattr(kernel, "n_regs", None)
                if registers is not None:
                    found.append(f"{registers}/{getattr(kernel, 'n_spills', '?')}")
    return ", ".join(found)


def _run_time(arguments: argparse.Namespace) -> int:
    import torch

    deadline = time.monotonic() + arguments.budget
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    cases = [case for case in _read(arguments.cases, arguments.only) if case.bytes < MOST_BYTES]
    # What is judged first, then what the fit needs, the short ones of each before the long.
    cases.sort(key=lambda case: (not case.goal, not case.text, case.bytes))
    if arguments.dry_run:
        return _rehearse(cases)
    failed = _warmed(cases, arguments.processes, min(150.0, 0.45 * arguments.budget))
    out = arguments.out.open("a")

    def record(timed: Timed) -> None:
        out.write(to_json(timed) + "\n")
        out.flush()

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        clock = Clock()
        for giga in (0.25, 1, 4):
            source = torch.randn(int(giga * (1 << 27)), device="cuda")
            target = torch.empty_like(source)
            _measure(
                f"copy/{2 * source.nbytes}", "eager", partial(target.copy_, source), clock, record
            )
        del source, target
        for case in cases:
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                break
            try:
                _time_case(case, Path(folder), failed, clock, record)
            except Exception as error:  # noqa: BLE001 a case that breaks is recorded
                text = cause(error)
                record(Timed(case.name, "eager", failure=text))
                print(f"{case.name}: {text}", flush=True)
                if "CUDA error" in text or "illegal memory" in text:
                    return 1
            gc.collect()
            if case.bytes > 1 << 30:
                torch.cuda.empty_cache()
    return 0


def _time_case(
    case: Case,
    folder: Path,
    failed: Mapping[str, str],
    clock: Clock,
    record: Callable[[Timed], None],
) -> None:
    graph = graph_from_json(case.graph)
    inputs = _built(case, graph, "cuda")
    eager = Eager(graph, "cuda")
    _measure(case.name, "eager", lambda: eager(*inputs), clock, record)
    if not case.text:
        return
    if case.name in failed:
        record(Timed(case.name, "kernel", failure=failed[case.name]))
        return
    try:
        module = load_module(case.text, folder)
        launch = getattr(module, case.entry)
        given = _given(case, graph, inputs)
        launch(*given)
        found = _resources(module)
        _measure(case.name, "kernel", lambda: launch(*given), clock, record, found)
    except Exception as error:
        text = cause(error)
        record(Timed(case.name, "kernel", failure=text))
        print(f"{case.name}: kernel: {text}", flush=True)
        if "CUDA error" in text or "illegal memory" in text:
            raise


def _given(case: Case, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    names = [node.name for node in graph.nodes if node.kind == "input"]
    by_name = dict(zip(names, inputs, strict=True))
    return [by_name[node] for node, _ in case.inputs]


def _measure(
    name: str,
    way: str,
    call: Callable[[], Any],
    clock: Clock,
    record: Callable[[Timed], None],
    resources: str = "",
) -> None:
    times, ahead = clock.times(call)
    low, middle, high = statistics.quantiles(times, n=4)
    record(Timed(name, way, middle, low, high, len(times), ahead, resources))


def _rehearse(cases: Sequence[Case]) -> int:
    """Every small case once on the CPU: do the graphs run, do the launchers take the inputs?"""
    import torch

    bad = 0
    for case in cases:
        if case.bytes > 64 << 20:
            continue
        graph = graph_from_json(case.graph)
        try:
            with torch.no_grad():
                inputs = _built(case, graph, "cpu")
                results = Eager(graph, "cpu")(*inputs)
            for ref, result in zip(graph.outputs, results, strict=True):
                node = next(n for n in graph.nodes if n.name == ref.node)
                expected = node.outputs[ref.output]
                assert expected is not None
                if tuple(result.shape) != expected.shape:
                    raise Fault(f"{tuple(result.shape)}, not {expected.shape}")
            _given(case, graph, inputs)
        except Exception as error:  # noqa: BLE001 listed
            bad += 1
            print(f"{case.name}: {cause(error)}")
    print(f"{len(cases)} cases, {bad} bad")
    return int(bad > 0)


def _warmed(cases: Sequence[Case], processes: int, seconds: float) -> dict[str, str]:
    """Run every kernel once in processes of their own: Triton's cache is warm afterwards, and one
    that takes its device down does so there. Returns why, by name, where one failed."""
    began = time.monotonic()
    failed: dict[str, str] = {}
    kernels = [case for case in cases if case.text]
    parts = (
        ([c for c in kernels if c.bytes < LARGE_BYTES], processes),
        ([c for c in kernels if c.bytes >= LARGE_BYTES], max(1, processes // 4)),
    )
    context = multiprocessing.get_context("spawn")
    for some, count in parts:
        pool = ProcessPoolExecutor(max(1, min(count, len(some))), mp_context=context)
        pending = {case.name: pool.submit(_run_once, case) for case in some}
        for name, answer in pending.items():
            left = began + seconds - time.monotonic()
            try:
                problem = answer.result(timeout=max(0.1, left))
            except (Late, BrokenProcessPool) as error:
                problem = "" if isinstance(error, Late) else f"alone: {type(error).__name__}"
            if problem:
                failed[name] = problem
        if any(not answer.done() for answer in pending.values()):  # a worker hangs
            workers: Iterable[Any] = (getattr(pool, "_processes", None) or {}).values()
            for worker in list(workers):
                worker.kill()
        pool.shutdown(wait=True, cancel_futures=True)
    print(
        f"ran {len(kernels)} once in {time.monotonic() - began:.0f} s; failed: {failed}", flush=True
    )
    return failed


_lost = False


def _run_once(case: Case) -> str:
    """Empty, or why it failed. A process whose device is lost passes the rest by."""
    global _lost
    if _lost:
        return ""
    import torch

    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            graph = graph_from_json(case.graph)
            inputs = _built(case, graph, "cuda", random=False)
            getattr(load_module(case.text, Path(folder)), case.entry)(*_given(case, graph, inputs))
            torch.cuda.synchronize()
            del inputs
            torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 the parent records it
        text = cause(error)
        _lost = "CUDA error" in text or "illegal memory" in text
        return text
    return ""


# -- fit -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What was measured of a case, and what it is predicted from: `fused` is empty for a case
    without a kernel, times are 0 where there is none."""

    case: Case
    eager: tuple[Work, ...]
    fused: tuple[Work, ...]
    eager_us: float
    kernel_us: float
    failure: str
    decision: Decision


def _samples(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> list[Sample]:
    """Every case that was timed, predicted as the rules are now; a case whose plan is of another
    schedule than the kernel that was timed is left out."""
    timed: dict[tuple[str, str], Timed] = {}
    for file in arguments.times:
        for line in file.read_text().splitlines():
            found = from_json(Timed, line)
            timed[found.name, found.way] = found
    samples: list[Sample] = []
    for case in _read(arguments.cases):
        eager = timed.get((case.name, "eager"))
        if eager is None or not eager.us:
            continue
        flow = dataflow(annotate(graph_from_json(case.graph), device))
        launches = [i for i in range(len(flow.nodes)) if flow.launches(i)]
        kernel = timed.get((case.name, "kernel"))
        decision = decide(flow, launches, rules)
        plan = decision.subject.plan
        if case.text and (plan is None or plan.schedule != case.schedule):
            continue
        samples.append(
            Sample(
                case,
                eager_works(decision.subject),
                fused_works(decision.subject) if case.text else (),
                eager.us,
                kernel.us if kernel else 0.0,
                kernel.failure if kernel else "",
                decision,
            )
        )
    return samples


FITTED = "fitted: benchmarks/predictions.py, run of 2026-11-21 on an H200"
GLOBAL = (
    "call", "eager_launch", "kernel_launch", "ramp", "l2_speed", "program_bandwidth", "unaligned",
    "overlap",
)  # fmt: skip
FIGURES = ("share", "elements", "programs", "arithmetic", "launches")
KEPT = (0.4, 0.6, 0.8)
"""Shares of the L2 to try."""
ROUNDS = 12
LEAST_SAMPLES = 3
"""Of a kind or an op, to have figures of its own."""
OUTLIER = 0.15
"""Of a logarithm: beyond it a residual counts linearly."""
PULL = 0.003
"""What a figure's distance from its start costs, in squared logarithms of one sample."""

Point = tuple[tuple[Work, ...], float]
"""What a call does, and the microseconds that it took."""


def _run_fit(arguments: argparse.Namespace) -> int:
    """Least squares on logarithms of time, figure after figure; half of the goal set unseen."""
    rules = load_rulebook()
    fitted: list[tuple[float, Device]] = []
    for share in KEPT:
        device = _with(rules.device(DEVICE), "l2_kept", share)
        samples = [s for s in _samples(arguments, device, rules) if not s.case.reported]
        points: list[Point] = [(s.eager, s.eager_us) for s in samples]
        points += [(s.fused, s.kernel_us) for s in samples if s.kernel_us]
        device = _own_kinds(device, points)
        loss, device = _fitted(device, points)
        print(f"l2_kept {share}: {loss / len(points):.5f} a sample, of {len(points)}", flush=True)
        fitted.append((loss, _with_spreads(device, samples)))
    device = min(fitted, key=lambda pair: pair[0])[1]
    text = _toml(device.times)
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text)
    return 0


def _with(device: Device, name: str, value: float) -> Device:
    """The device with another figure; `name` as in the rules: `call`, `kernel.row.share`."""
    times = device.times
    if "." not in name:
        number = getattr(times, name).model_copy(update={"value": value})
        return device.model_copy(update={"times": times.model_copy(update={name: number})})
    who, kind, figure = name.split(".")
    speeds: dict[str, Speed] = dict(getattr(times, who))
    number = getattr(speeds[kind], figure).model_copy(update={"value": value})
    speeds[kind] = speeds[kind].model_copy(update={figure: number})
    return device.model_copy(update={"times": times.model_copy(update={who: speeds})})


def _value(device: Device, name: str) -> float:
    found: Any = device.times
    for part in name.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found.value


def _own_kinds(device: Device, points: Sequence[Point]) -> Device:
    """Figures for every kind of kernel, and every op of a kind of few, that was timed often."""
    counts: dict[tuple[str, str], int] = {}
    for works, _ in points:
        for key in {key for work in works for key in _names(work)}:
            counts[key] = counts.get(key, 0) + 1
    speeds = {"eager": dict(device.times.eager), "kernel": dict(device.times.kernel)}
    for (who, name), count in counts.items():
        if count >= LEAST_SAMPLES:
            speeds[who].setdefault(name, speeds[who]["other"])
    return device.model_copy(update={"times": device.times.model_copy(update=speeds)})


BY_OP = ("eager.normal", "eager.window", "eager.scan", "eager.sort", "eager.column", "eager.row")
"""Kinds whose ops have little in common."""


def _names(work: Work) -> list[tuple[str, str]]:
    who, _, kind = work.kind.partition(".")
    return [(who, kind), *([(who, work.op)] if work.kind in BY_OP else [])]


def _fitted(device: Device, points: Sequence[Point]) -> tuple[float, Device]:
    """Descend along one figure after the other, by ever smaller steps."""
    users: dict[str, list[int]] = {name: list(range(len(points))) for name in GLOBAL}
    for place, (works, _) in enumerate(points):
        for work in works:
            who, _, kind = work.kind.partition(".")
            table = getattr(device.times, who)
            name = next(n for n in (work.op, kind, "other") if n in table)
            for figure in FIGURES:
                if figure != "launches" or work.kind in BY_OP:
                    users.setdefault(f"{who}.{name}.{figure}", []).append(place)
    start = {name: _value(device, name) for name in users}

    def lost(candidate: Device, name: str) -> float:
        places = dict.fromkeys(users[name])
        pull = PULL * math.log(_value(candidate, name) / start[name]) ** 2
        return pull + sum(_misfit(call_us(points[i][0], candidate), points[i][1]) for i in places)

    for number in range(ROUNDS):
        step = 1.0 + 0.6 * 0.7**number
        for name in users:
            here = lost(device, name)
            for factor in (step, 1 / step):
                value = _value(device, name) * factor
                if name.endswith("launches"):
                    value = _value(device, name) + (1 if factor > 1 else -1)
                if not _possible(device, name, value):
                    continue
                moved = _with(device, name, value)
                there = lost(moved, name)
                while there < here and _possible(moved, name, _value(moved, name)):
                    device, here = moved, there
                    if name.endswith("launches"):
                        break
                    moved = _with(device, name, _value(device, name) * factor)
                    there = lost(moved, name)
    return sum(_misfit(call_us(works, device), us) for works, us in points), device


def _possible(device: Device, name: str, value: float) -> bool:
    """No kernel beats the datasheet's bandwidth or the peaks, or is launched less than once."""
    if name.endswith("share"):
        return value <= device.datasheet_bandwidth / device.bandwidth
    if name.endswith("arithmetic"):
        return value <= 1.0
    return value >= 1.0 or not (name == "overlap" or name.endswith("launches"))


def _misfit(predicted: float, measured: float) -> float:
    off = abs(math.log(predicted / measured))
    return off * off if off < OUTLIER else OUTLIER * (2 * off - OUTLIER)


def _with_spreads(device: Device, samples: Sequence[Sample]) -> Device:
    """What holds 90 % of the speed-ups that the fit saw, in the short kernels and in the rest."""
    for name, short in (("spread_short", True), ("spread_long", False)):
        off = sorted(
            abs(math.log(_speedup(s, device) * s.kernel_us / s.eager_us))
            for s in samples
            if s.kernel_us and (call_us(s.fused, device) < device.times.short.value) == short
        )
        if off:
            place = min(len(off) - 1, math.ceil(0.92 * len(off)))
            device = _with(device, name, math.exp(off[place]) - 1)
    return device


def _speedup(sample: Sample, device: Device) -> float:
    return call_us(sample.eager, device) / call_us(sample.fused, device)


def _toml(times: Times) -> str:
    """The figures as the rules hold them."""

    def line(name: str, number: Number, source: str = FITTED) -> str:
        value = f'value = {number.value:.4g}, unit = "{number.unit}"'
        return f'{name} = {{ {value}, source = "{source}" }}'

    chosen = "chosen: shorter kernels hang on what is no bandwidth"
    lines = [
        "# How long launches take (`predict`). benchmarks/predictions.py fit writes this file.",
        "[times]",
        f'fitted_on = "{times.fitted_on}"',
        *(line(name, getattr(times, name)) for name in (*GLOBAL, "l2_kept")),
        line("short", times.short, chosen),
        *(line(name, getattr(times, name)) for name in ("spread_short", "spread_long")),
    ]
    for who in ("eager", "kernel"):
        for name, speed in sorted(getattr(times, who).items()):
            lines += ["", f"[times.{who}.{name}]"]
            lines += [line(figure, getattr(speed, figure)) for figure in FIGURES]
    return "\n".join(lines) + "\n"


# -- table -----------------------------------------------------------------------------------------


GAIN = 1.0
"""Faster than eager by any amount is a gain."""


def _run_table(arguments: argparse.Namespace) -> int:
    """The half of the goal set that the fit has not seen; beside it, all of the goal set's
    decisions."""
    rules = load_rulebook()
    device = rules.device(DEVICE)
    goal = [s for s in _samples(arguments, device, rules) if s.case.goal]
    unseen = [s for s in goal if s.case.reported]
    timed = [s for s in unseen if s.kernel_us]
    alone = [s for s in unseen if s.case.launches == 1]
    accepted = [s for s in timed if s.case.accepted]
    lines = [
        "# Predicted against measured",
        "",
        f"On an {device.title}, torch 2.11, Triton 3.6, cold L2, medians; the half of the goal set"
        " that the fit has not seen:",
        f"{len(timed)} kernels ({len(accepted)} of accepted groups) and {len(alone)} launches of"
        f" eager alone, from {len({s.case.problem for s in unseen})} problems. Errors are of the"
        " larger over the smaller, less one.",
        "",
        "| figure | cases | median | 90th | 95th percentile |",
        "|---|---|---|---|---|",
        _errors(
            "time of a launch of eager alone", [_off(s.eager, s.eager_us, device) for s in alone]
        ),
        _errors("time of a group in eager", [_off(s.eager, s.eager_us, device) for s in timed]),
        _errors("time of an emitted kernel", [_off(s.fused, s.kernel_us, device) for s in timed]),
        _errors("speed-up, accepted groups", [_off_speedup(s, device) for s in accepted]),
        _errors("speed-up, all that have a plan", [_off_speedup(s, device) for s in timed]),
        "",
        _coverage(timed, device),
        "",
    ]
    for title, some in (("the unseen half", timed), ("the whole goal set", _kernels(goal))):
        lines += _decisions(title, some, device)
    lines += _losses(_kernels(goal), device)
    if arguments.counts:
        lines += _traffic(arguments, device, rules)
    text = "\n".join(lines) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    print(text)
    return 0


def _counted(file: Path) -> dict[str, tuple[float, float]]:
    """Bytes that HBM gave and took, by case, as ncu's raw page has them."""
    text = file.read_text()
    found: dict[str, tuple[float, float]] = {}
    for row in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        mark = next(value for key, value in row.items() if key.startswith("thread Domain:Push"))
        if "case:" not in mark:
            continue  # the row of units
        name = mark.split("case:")[1].split(":none")[0]
        read, written = (
            float(row[f"dram__bytes_{way}.sum"].replace(",", "")) for way in ("read", "write")
        )
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + read, before[1] + written
    return found


def _traffic(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> list[str]:
    """Predicted against counted HBM bytes. What is written last may still lie in the L2 when a
    kernel ends, so that counts are short by up to its size: an error is what that leaves open."""
    counted = _counted(arguments.counts)
    rows: list[tuple[str, float, float, str]] = []
    for case in _read(arguments.cases):
        if case.name not in counted:
            continue
        flow = dataflow(annotate(graph_from_json(case.graph), device))
        launches = [i for i in range(len(flow.nodes)) if flow.launches(i)]
        subject = decide(flow, launches, rules).subject
        works = fused_works(subject) if case.text else eager_works(subject)
        read, written = sum(w.bytes_read for w in works), sum(w.bytes_written for w in works)
        hbm_read, hbm_written = counted[case.name]
        most = hbm_read + hbm_written + min(device.memory.l2.base, written)
        total = read + written
        off = max(0.0, hbm_read + hbm_written - total, total - most) / total
        what = case.schedule or flow.nodes[launches[0]].op
        rows.append((case.name, abs(hbm_read - read) / total, off, what))
    if not rows:
        return []
    return [
        "",
        "## HBM bytes, counted by ncu at 8 times the L2 and more",
        "",
        "Every op class alone and emitted kernels; errors are shares of the predicted bytes.",
        "",
        "| figure | cases | median | 90th | 95th percentile |",
        "|---|---|---|---|---|",
        _errors("bytes read", [read for _, read, _, _ in rows]),
        _errors("bytes read and written", [total for _, _, total, _ in rows]),
        "",
        *(
            f"- {name} ({what}): off by {100 * total:.1f} %"
            for name, _, total, what in rows
            if total > FAR_BYTES
        ),
    ]


FAR_BYTES = 0.05
"""Of the predicted bytes: listed by name."""


def _kernels(samples: Iterable[Sample]) -> list[Sample]:
    return [s for s in samples if s.kernel_us]


def _off(works: tuple[Work, ...], us: float, device: Device) -> float:
    return math.exp(abs(math.log(call_us(works, device) / us))) - 1


def _off_speedup(sample: Sample, device: Device) -> float:
    measured = sample.eager_us / sample.kernel_us
    return math.exp(abs(math.log(_speedup(sample, device) / measured))) - 1


def _errors(title: str, off: Sequence[float]) -> str:
    ranked = sorted(off)

    def at(share: float) -> str:
        return f"{100 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]:.1f} %"

    figures = (at(0.5), at(0.9), at(0.95)) if ranked else ("", "", "")
    return f"| {title} | {len(ranked)} | {' | '.join(figures)} |"


def _coverage(samples: Sequence[Sample], device: Device) -> str:
    inside = 0
    for sample in samples:
        unfused, fused = call_us(sample.eager, device), call_us(sample.fused, device)
        low, high = speedup_interval(unfused, fused, device)
        inside += low <= sample.eager_us / sample.kernel_us <= high
    share = 100 * inside / max(len(samples), 1)
    return f"Inside their interval: {inside} of {len(samples)} speed-ups ({share:.0f} %)."


def _decisions(title: str, samples: Sequence[Sample], device: Device) -> list[str]:
    """Verdicts against what was gained, weighted by how often each kernel is there."""
    rows: list[str] = []
    best = sum(min(s.eager_us, s.kernel_us) * s.case.weight for s in samples)
    verdicts: tuple[tuple[str, Callable[[Sample], bool]], ...] = (
        ("chapter", lambda s: s.case.accepted),
        ("time model", lambda s: _speedup(s, device) > GAIN),
    )
    for who, fuse in verdicts:
        cells = {(a, b): 0 for a in (True, False) for b in (True, False)}
        taken = 0.0
        for sample in samples:
            cells[fuse(sample), sample.kernel_us < sample.eager_us] += 1
            taken += (sample.kernel_us if fuse(sample) else sample.eager_us) * sample.case.weight
        lost = 100 * (taken / best - 1) if best else 0.0
        rows.append(
            f"| {who} | {cells[True, True]} | {cells[True, False]} | {cells[False, True]}"
            f" | {cells[False, False]} | {lost:.2f} % |"
        )
    return [
        f"## Verdicts, {title}",
        "",
        "| verdict | fuse, faster | fuse, not faster | reject, faster | reject, not faster |"
        " time lost against hindsight |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _losses(samples: Sequence[Sample], device: Device) -> list[str]:
    """Every kernel that is slower than eager although a verdict wants it, or left out although it
    is faster, with what decides its predicted time."""
    found: list[str] = []
    for s in samples:
        fuse, gain = s.case.accepted, s.kernel_us < s.eager_us
        model = _speedup(s, device) > GAIN
        if fuse != gain or model != gain:
            eager, fused = call_us(s.eager, device), call_us(s.fused, device)
            found.append(
                f"| {s.case.name} | {s.case.schedule} | {'fuse' if fuse else s.case.gate}"
                f" | {'fuse' if model else 'leave'} | {s.eager_us:.1f} ({eager:.1f})"
                f" | {s.kernel_us:.1f} ({fused:.1f}) | {_reason(s, device)} |"
            )
    head = [
        "## Verdicts that are wrong, the whole goal set",
        "",
        "| case | schedule | chapter | time model | eager µs (predicted) | kernel µs (predicted) |"
        " what its time hangs on |",
        "|---|---|---|---|---|---|---|",
    ]
    failures = [f"- {s.case.name}: {s.failure}" for s in samples if s.failure]
    return [*head, *found, *(["", *failures] if failures else [])]


def _reason(sample: Sample, device: Device) -> str:
    """The largest part of the kernel's predicted time, and what would be without the others."""
    work = max(sample.fused, key=lambda work: launch_us(work, device))
    speed = device.times.speed(work.kind, work.op)
    parts = {
        f"{work.bytes / 1e6:.1f} MB from {work.programs} programs": memory_us(work, device),
        f"{work.elements:.3g} elements walked": 1e6 * work.elements / speed.elements.base,
        "arithmetic": work.arithmetic_us / speed.arithmetic.value,
    }
    why, us = max(parts.items(), key=lambda item: item[1])
    return f"{why}: {us:.1f} µs"


# -- counters --------------------------------------------------------------------------------------


def _run_count(arguments: argparse.Namespace) -> int:
    """Launch what is large enough to be counted, once each, between marks that ncu sees:

    ncu --nvtx --profile-from-start off --clock-control none --csv --page raw --metrics METRICS ...
    """
    import torch

    rules = load_rulebook()
    least = 8 * rules.device(DEVICE).memory.l2.base
    cases = [c for c in _read(arguments.cases) if least <= c.bytes <= 8 * least]
    ops: dict[str, Case] = {}
    for case in cases:
        if case.launches == 1:
            op = next(n.op for n in graph_from_json(case.graph).nodes if n.kind == "call")
            ops.setdefault(op, case)
    kernels = [case for case in cases if case.text and case.bytes >= 2 * least]
    step = max(1, len(kernels) // arguments.kernels)
    runtime: Any = torch.cuda.cudart()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for case in (*kernels[::step][: arguments.kernels], *ops.values()):
            try:
                graph = graph_from_json(case.graph)
                inputs = _built(case, graph, "cuda")
                call: Any = Eager(graph, "cuda")
                if case.text:
                    call = getattr(load_module(case.text, Path(folder)), case.entry)
                    inputs = _given(case, graph, inputs)
                call(*inputs)
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_push(f"case:{case.name}")
                runtime.cudaProfilerStart()
                call(*inputs)
                torch.cuda.synchronize()
                runtime.cudaProfilerStop()
                torch.cuda.nvtx.range_pop()
            except Exception as error:  # noqa: BLE001 listed, the rest goes on
                print(f"{case.name}: {cause(error)}", file=sys.stderr, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
