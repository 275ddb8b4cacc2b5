"""Child process of `measure`: checks and times one way of computing something on a GPU.

A request is a `GroupJob`, a `ModelJob`, a `CeilingsJob` or a `TurnsJob`, a reply its `Measurement`,
`Ceilings` or `Turns`. A way is right when, on fresh data in the buffers that it was timed on, its
results are as near to a float64 run of the same ops as the rules allow, before the timing and after
it. Between the two everything it allocates is poisoned, the data in its
inputs is replaced while the GPU is held back, and its results are copied on its own stream at once:
zeros, results of an earlier call and work on another stream are not right then.
"""

# torch.compile is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusion_advisor.frontend.replay import ReplayedKernel, opaque, operator_of, replayed
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Case, Criterion
from fusion_advisor.measure.clocks import Clock, DeviceClock, HostClock, refuse_too_fast
from fusion_advisor.measure.protocol import (
    Ceilings,
    CeilingsJob,
    GroupJob,
    Measurement,
    ModelJob,
    Series,
    TimingRules,
    Turns,
    TurnsJob,
    Way,
)
from fusion_advisor.rulebook.local_gpu import version
from fusion_advisor.shipped.load import load_module, process_folder
from fusion_advisor.support.kernel_fault import KernelFault, cause, needs_restart
from fusion_advisor.support.worker import serve
from fusion_advisor.verify.inputs import build_inputs
from fusion_advisor.verify.launches import poisoned_outputs
from fusion_advisor.verify.references import truth
from fusion_advisor.verify.stepping import LaunchMode, as_tuple
from fusion_advisor.verify.tolerance import Error, Tensors, Truth, compare

Call = Callable[..., Any]


class Absent(Exception):
    """Raised where a way does not exist here; one line says why."""


# -- ways ------------------------------------------------------------------------------------------


def way_of(way: Way, plain: Call, emitted: Call | None) -> Call:
    """Callable of a way over the inputs; `plain` is eager's computation. Raises Absent."""
    if way.kind == "kernel":
        assert emitted is not None
        return emitted
    if way.kind == "line":
        return _line(way)
    if way.kind == "compiled":
        torch.compiler.reset()
        if way.backend not in torch.compiler.list_backends(exclude_tags=()):
            raise Absent(f"{way.backend} is no backend here: its package is not installed")
        return torch.compile(plain, mode=way.mode or None, dynamic=False, backend=way.backend)
    return plain


def _line(way: Way) -> Call:
    """Callable of PyTorch code over named inputs."""
    missing = [name for name in way.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise Absent(f"{missing[0]} is not installed")
    known: dict[str, Any] = {"torch": torch}
    for statement in way.imports:
        exec(statement, known)  # of the rules, like the line: nothing of the model is in them
    function: Call = eval(f"lambda {', '.join(n for n, _ in way.names)}: {way.line}", known)
    return lambda *inputs: function(*(inputs[number] for _, number in way.names))


# -- is it right? ----------------------------------------------------------------------------------


def fresh(inputs: Tensors, drawn: Tensors) -> None:
    """Copy other data into the same input buffers."""
    for old, new in zip(inputs, drawn, strict=True):
        if 0 in old.stride():
            old[tuple(slice(None) if s else slice(0, 1) for s in old.stride())].copy_(
                new[tuple(slice(None) if s else slice(0, 1) for s in new.stride())]
            )
        else:
            old.copy_(new)


def snapshot(call: Call, inputs: Tensors) -> Tensors:
    """Run a call and copy its results on its own stream at once; memory that the call allocates was
    poisoned before."""
    with poisoned_outputs():
        return tuple(result.clone() for result in as_tuple(call(*inputs)))


def _further(plain: Call, case: Case, seed: int, clock: Clock) -> Iterator[Truth]:
    """Yield further draws of the distribution of a seed."""
    for draw in count(1):
        yield truth(plain, build_inputs(case, "normal", 1000 * draw + seed, clock.device))


# -- one group -------------------------------------------------------------------------------------


def group(job: GroupJob, module: ModuleType, clock: Clock) -> Measurement:
    """Measure one way of one group. Raises KernelFault where the way is wrong or its time is
    impossible, Absent where it does not exist here."""
    plain: Call = module.reference
    call = way_of(job.way, plain, getattr(module, job.kernel.entry))
    case = job.kernel.cases[0]
    inputs = build_inputs(case, "normal", 0, clock.device)
    call(*inputs)

    def right(seed: int) -> tuple[float, float]:
        drawn = build_inputs(case, "normal", seed, clock.device)
        fresh(inputs, drawn)
        del drawn
        found = snapshot(call, inputs)
        if job.random:
            return 0.0, 0.0
        held = compare(
            found,
            truth(plain, inputs),
            job.rules.criterion,
            case.summed,
            _further(plain, case, seed, clock),
        )
        return held.ours, held.eager

    before = right(1)
    clock.release()
    timing = clock.time(lambda: call(*inputs), job.least_bytes)
    after = right(2)
    worst = max(before, after)
    error = None if job.random else worst[0]
    return Measurement(job.subject, job.way.name, timing, error, None if job.random else worst[1])


# -- kernels in turn -------------------------------------------------------------------------------


def turns(job: TurnsJob, folder: Path, clock: Clock) -> Turns:
    """Check each kernel against float64 before and after all kernels are timed in turn. A kernel's
    failure or error is in its series. Raises KernelFault where the first kernel's file does not
    even import."""
    plain: Call = load_module(job.kernels[0].text, folder).reference
    case = job.kernels[0].cases[0]
    inputs = build_inputs(case, "normal", 0, clock.device)
    calls: dict[int, Call] = {}
    series: dict[int, Series] = {}

    def attempted(number: int, what: Callable[[], Any]) -> Any:
        try:
            return what()
        except Exception as error:  # noqa: BLE001 whatever a configuration raises is its row
            text = str(error) if isinstance(error, KernelFault) else cause(error)
            series[number] = Series(failure=" ".join(text.split()))
            calls.pop(number, None)

    def ready(number: int) -> None:
        kernel = job.kernels[number]
        calls[number] = getattr(load_module(kernel.text, folder), kernel.entry)

    def first(number: int) -> None:
        with torch.no_grad():
            calls[number](*inputs)

    def compiled(number: int) -> None:
        attempted(number, partial(first, number))

    def right(seed: int) -> None:
        fresh(inputs, build_inputs(case, "normal", seed, clock.device))
        known = truth(plain, inputs)

        def near(call: Call) -> None:
            found = snapshot(call, inputs)
            compare(
                found, known, job.rules.criterion, case.summed, _further(plain, case, seed, clock)
            )

        for number, call in list(calls.items()):
            attempted(number, partial(near, call))

    for number in range(len(job.kernels)):
        attempted(number, partial(ready, number))
    # A first run compiles, which takes its time; Triton's interpreter is not for several threads.
    with ThreadPoolExecutor(job.rules.compiled if clock.device == "cuda" else 1) as pool:
        list(pool.map(compiled, list(calls)))
    if not job.random:
        right(1)
    clock.release()
    timed = clock.turns([partial(call, *inputs) for call in calls.values()], job.rounds)
    for number, us in zip(list(calls), timed, strict=True):
        series[number] = Series(tuple(us))
        middle = statistics.median(us)
        attempted(number, partial(refuse_too_fast, middle, job.least_bytes, job.rules))
    if not job.random:
        right(2)
    rows = tuple(series[number] for number in range(len(job.kernels)))
    broken = next((row.failure for row in rows if row.failure and needs_restart(row.failure)), None)
    return Turns(rows, tuple(machine(clock.device).items()), broken)


# -- a whole model ---------------------------------------------------------------------------------


def model(job: ModelJob, folder: Path, clock: Clock) -> Measurement:
    """Measure a whole graph in one way, on random weights, and the distance of the results from
    eager's. Raises KernelFault where that is too far."""
    graph = job.graph
    launchers = tuple(
        ReplayedKernel(
            getattr(load_module(one.text, folder), one.entry), one.inputs, one.outputs, after
        )
        for one, after in zip(job.kernels, job.after, strict=True)
    )
    compiled = job.way.kind == "compiled"
    if compiled:
        launchers = tuple(opaque(one, graph, clock.device) for one in launchers)
    plain, inputs = replayed(graph, (), clock.device)
    rest = job.rest or graph
    chosen, _ = replayed(rest, launchers, clock.device, inputs)
    call: Call = way_of(job.way, chosen, None) if compiled else chosen
    first = _unwritten(graph, inputs)
    results = as_tuple(call(*first()))
    held = Error()
    checked = bool(launchers) and not _random(graph)
    if checked:
        rival = partial(way_of, job.way, plain, None) if compiled else None
        held = _apart(results, plain, first, job.rules.criterion, rival)
    del results
    clock.release()
    timing = clock.time(lambda: call(*inputs), 0)
    return Measurement(
        "model", job.way.name, timing, held.ours if checked else None,
        held.eager if checked else None,
    )  # fmt: skip


def _unwritten(graph: Graph, inputs: Tensors) -> Callable[[], Tensors]:
    """Function that returns the inputs as they were at first: copies of the inputs that the graph
    writes in place."""
    written = {storage for node in graph.nodes for storage in node.mutates}
    given = [node for node in graph.nodes if node.kind != "call" and node.outputs]
    kept = [node.out.storage not in written for node in given]

    def copies() -> Tensors:
        return tuple(
            tensor if stays else _copied(tensor) for stays, tensor in zip(kept, inputs, strict=True)
        )

    return copies


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    fresh((copy,), (tensor,))
    return copy


def _random(graph: Graph) -> bool:
    """Whether the graph draws random numbers, which differ from run to run."""
    tag = torch.Tag.nondeterministic_seeded
    return any(node.kind == "call" and tag in operator_of(node).tags for node in graph.nodes)


class _Moved(LaunchMode):
    """Mode that moves every floating result of a launch by about one unit in the last place of its
    dtype, up or down."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        operands = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        held = {each.untyped_storage().data_ptr() for each in operands}
        returned: tuple[Any, ...] = as_tuple(found)
        for result in returned:
            if not isinstance(result, torch.Tensor) or not result.is_floating_point():
                continue
            views = result.untyped_storage().data_ptr() in held and not func._schema.is_mutable
            if views or not operands or result.element_size() == 1:
                continue
            sign = torch.randint(0, 2, result.shape, device=result.device, dtype=torch.int8) * 2 - 1
            moved = result + result * torch.finfo(result.dtype).eps * sign
            result.copy_(torch.where(moved.isfinite(), moved, result))
        return found


def _apart(
    found: Tensors,
    plain: Call,
    inputs: Callable[[], Tensors],
    criterion: Criterion,
    rival: Callable[[], Call] | None = None,
) -> Error:
    """Largest difference from eager. Raises KernelFault where a result is further off than the
    criterion allows.

    Few whole models run in float64, so eager stands in its place; eager's own error is then the
    change of its results when each launch is rounded otherwise. A compiler may change launches that
    are not replaced (another algorithm for a convolution): with a `rival`, the plain model compiled
    likewise, the rival's error counts as eager's where it is larger.
    """
    eager = as_tuple(plain(*inputs()))

    def moved() -> Truth:
        with _Moved():
            return Truth(as_tuple(plain(*inputs())), eager)

    def further() -> Iterator[Truth]:
        while True:
            yield moved()

    try:
        return compare(found, moved(), criterion, further=further())
    except KernelFault as fault:
        if rival is None:
            raise KernelFault(f"not what eager gives: {fault}") from fault
    rivals_truth = Truth(as_tuple(rival()(*inputs())), eager)
    try:
        return compare(found, rivals_truth, criterion)
    except KernelFault as fault:
        raise KernelFault(f"not what eager gives: {fault}") from fault


# -- ceilings --------------------------------------------------------------------------------------


def ceilings(job: CeilingsJob, clock: Clock) -> Ceilings:
    """Measure the speed of a large copy, of large matrix products and of a launch."""
    count = 1 << (29 if clock.device == "cuda" else 16)
    source = torch.randn(count, device=clock.device)
    target = torch.empty_like(source)
    copied = clock.time(partial(target.copy_, source), 0)
    del target, source
    clock.release()
    products = tuple((dtype, _matmul(dtype, clock)) for dtype in job.dtypes)
    small = torch.zeros(32, device=clock.device)
    launched = clock.time(lambda: small.add_(1.0), 0)
    return Ceilings(
        copy=2 * 4 * count / (copied.us * 1e-6),
        matmul=products,
        launch_us=launched.us,
        host_launch_us=_host_us(small),
        machine=tuple(machine(clock.device).items()),
    )


def _matmul(dtype: str, clock: Clock) -> float:
    """FLOP/s of a square product on random data; TF32 is float32 with the mode set."""
    size = 8192 if clock.device == "cuda" else 64
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    a, b = (torch.randn(size, size, device=clock.device).to(kind) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        spent = clock.time(lambda: a @ b, 0)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2 * size**3 / (spent.us * 1e-6)


def _host_us(small: torch.Tensor) -> float:
    """Host time of one small launch, us, averaged over a thousand."""
    spent: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            small.add_(1.0)
        spent.append((time.perf_counter() - began) * 1e3)
        if small.is_cuda:
            torch.cuda.synchronize()
    return statistics.median(spent)


def machine(device: str) -> dict[str, str]:
    """Machine that measures: the GPU with its clocks, and the versions."""
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "gpu": "none"}
    liger = version("liger-kernel")
    found |= {"liger": liger} if liger else {}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found |= _driver()
    return found


def _driver() -> dict[str, str]:
    import subprocess

    names = ("driver_version", "clocks.current.sm", "clocks.current.memory", "power.limit")
    asked = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver": f"not known: {type(error).__name__}"}
    return dict(zip(names, map(str.strip, done.stdout.split(",")), strict=False))


# -- the child -------------------------------------------------------------------------------------


def answers(
    folder: Path, clock: Callable[[TimingRules], Clock]
) -> dict[type[Any], Callable[[Any], Any]]:
    """Function for each class of job. A way that does not exist here is answered as absent; the
    functions raise for failures."""

    def measured(job: GroupJob | ModelJob) -> Measurement:
        subject = job.subject if isinstance(job, GroupJob) else "model"
        try:
            if isinstance(job, GroupJob):
                return group(job, load_module(job.kernel.text, folder), clock(job.rules))
            return model(job, folder, clock(job.rules))
        except Absent as absent:
            return Measurement(subject, job.way.name, absent=str(absent))

    return {
        GroupJob: measured,
        ModelJob: measured,
        TurnsJob: lambda job: turns(job, folder, clock(job.rules)),
        CeilingsJob: lambda job: ceilings(job, clock(job.rules)),
    }


def _clock(device: str) -> Callable[[TimingRules], Clock]:
    """Clock for the child's whole life, made once because its buffer is large."""
    made: list[Clock] = []

    def clock(rules: TimingRules) -> Clock:
        if not made:
            made.append(DeviceClock(rules) if device == "cuda" else HostClock())
        return made[0]

    return clock


def main(where: str) -> None:
    """Run the child: `where` is `gpu`, or `rehearse` for the interpreter on a CPU."""
    warnings.simplefilter("ignore")
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    device = "cuda" if where == "gpu" else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from fusion_advisor.verify.interpreter import install

        install()
    with torch.no_grad():
        after = torch.cuda.empty_cache if device == "cuda" else None
        serve(answers(process_folder(), _clock(device)), after)
