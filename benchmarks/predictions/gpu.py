"""On the GPU: time every case, and launch what ncu counts."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.frontend.replay import replayed
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.measure.clocks import Clock
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.kernel_fault import KernelFault, cause

from ..gpu import ahead, counted, lost, resources
from ..gpu import clock as clock_of
from .cases import DEVICE, Case, read

LARGE_BYTES = 2 << 30
"""Cases that move more are warmed up by few processes at a time: all would not fit."""
MOST_BYTES = 60 << 30
KEPT_BYTES = 1 << 29
"""What moves less leaves its memory to the next."""


@dataclass(frozen=True)
class Timed:
    """One measurement: `way` is `eager`, `kernel`, `compiled`, or `beside`, the kernel right behind
    that; microseconds; `failure` says why there is none."""

    name: str
    way: str
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    runs: int = 0
    host_ahead: bool = True
    resources: str = ""
    failure: str = ""

    @property
    def compiled(self) -> list[tuple[int, ...]]:
        """Registers and spills of each kernel."""
        every = self.resources.split(", ") if self.resources else []
        return [tuple(map(int, one.split("/"))) for one in every]


def _built(case: Case, graph: Graph, device: str, *, random: bool = True) -> list[Any]:
    """Data for every input, laid out as the graph says; inputs may share a storage."""
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


def _whole(graph: Graph) -> Graph:
    """With what nobody reads as results, too: eager makes it."""
    calls = [node for node in graph.nodes if node.kind == "call"]
    read = {ref for node in calls for ref in node.refs()} | {*graph.outputs}
    made = ((node, Ref(node.name, n)) for node in calls for n, t in enumerate(node.outputs) if t)
    unread = [ref for node, ref in made if ref not in read and not node.mutates]
    return replace(graph, outputs=(*graph.outputs, *unread))


def run(arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + arguments.budget
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are processes enough
    cases = [case for case in read(arguments.cases, arguments.only) if case.bytes < MOST_BYTES]
    # What is judged first, then what the fit needs, the short ones of each before the long.
    cases.sort(key=lambda case: (not case.goal, not case.text, case.bytes))
    if arguments.dry_run:
        return _rehearse(cases)
    rivals = {c.name for c in cases if arguments.compiled and c.goal and c.accepted}
    limit = min(150.0, 0.45 * arguments.budget)
    failed = _warmed(cases, rivals, arguments.processes, limit)
    out = arguments.out.open("a")

    def record(timed: Timed) -> None:
        out.write(to_json(timed) + "\n")
        out.flush()

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        clock = clock_of(DEVICE)
        for giga in (0.25, 1, 4):
            source = torch.randn(int(giga * (1 << 27)), device="cuda")
            target = torch.empty_like(source)
            _measure(
                f"copy/{2 * source.nbytes}", "eager", partial(target.copy_, source), clock, record
            )
        del source, target
        for case in cases * arguments.rounds:
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                break
            try:
                _time_case(case, Path(folder), failed, clock, record)
                if case.name in rivals and case.name not in failed:
                    _time_compiled(case, Path(folder), clock, record)
            except Exception as error:  # noqa: BLE001 a case that breaks is recorded
                text = cause(error)
                record(Timed(case.name, "eager", failure=text))
                print(f"{case.name}: {text}", flush=True)
                if lost(text):
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
    graph = from_json(Graph, case.graph)
    inputs = _built(case, graph, "cuda")
    eager, _ = replayed(_whole(graph), (), "cuda", tuple(inputs))
    _measure(case.name, "eager", lambda: eager(*inputs), clock, record)
    if not case.text:
        return
    if case.name in failed:
        record(Timed(case.name, "kernel", failure=failed[case.name]))
        return
    try:
        _time_kernel(case, "kernel", _given(case, graph, inputs), folder, clock, record)
    except Exception as error:
        text = cause(error)
        record(Timed(case.name, "kernel", failure=text))
        print(f"{case.name}: kernel: {text}", flush=True)
        if lost(text):
            raise


def _time_kernel(
    case: Case,
    way: str,
    given: Sequence[Any],
    folder: Path,
    clock: Clock,
    record: Callable[[Timed], None],
) -> None:
    module = load_module(case.text, folder)
    launch = getattr(module, case.entry)
    launch(*given)
    _measure(case.name, way, lambda: launch(*given), clock, record, resources([module]))


def _time_compiled(case: Case, folder: Path, clock: Clock, record: Callable[[Timed], None]) -> None:
    """What torch.compile makes of the same launches, sizes static, and the kernel beside it: while
    it compiles the device rests, and is a little faster for a while."""
    torch.compiler.reset()
    call, inputs = _compiled(case)
    _measure(case.name, "compiled", lambda: call(*inputs), clock, record)
    given = _given(case, from_json(Graph, case.graph), inputs)
    _time_kernel(case, "beside", given, folder, clock, record)


def _compiled(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    graph = from_json(Graph, case.graph)
    inputs = _built(case, graph, "cuda")
    eager, _ = replayed(graph, (), "cuda", tuple(inputs))
    compiled: Any = torch.compile(eager, dynamic=False)
    compiled(*inputs)
    return compiled, inputs


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
    t = clock.time(call, 0)
    record(Timed(name, way, t.us, t.low_us, t.high_us, t.runs, t.host_ahead, resources))


def _rehearse(cases: Sequence[Case]) -> int:
    """Every small case once on the CPU: do the graphs run, do the launchers take the inputs?"""
    bad = 0
    for case in cases:
        if case.bytes > 64 << 20:
            continue
        graph = from_json(Graph, case.graph)
        try:
            with torch.no_grad():
                inputs = _built(case, graph, "cpu")
                eager, _ = replayed(graph, (), "cpu", tuple(inputs))
                results = eager(*inputs)
            for ref, result in zip(graph.outputs, results, strict=True):
                node = next(n for n in graph.nodes if n.name == ref.node)
                expected = node.outputs[ref.output]
                assert expected is not None
                if tuple(result.shape) != expected.shape:
                    raise KernelFault(f"{tuple(result.shape)}, not {expected.shape}")
            _given(case, graph, inputs)
        except Exception as error:  # noqa: BLE001 listed
            bad += 1
            print(f"{case.name}: {cause(error)}")
    print(f"{len(cases)} cases, {bad} bad")
    return int(bad > 0)


def _warmed(
    cases: Sequence[Case], rivals: Collection[str], processes: int, seconds: float
) -> dict[str, str]:
    """Why, by name, a kernel failed that was run once ahead; fewer of the large ones at a time."""
    deadline = time.monotonic() + seconds
    kernels = [case for case in cases if case.text]
    parts = (
        ([c for c in kernels if c.bytes < LARGE_BYTES], processes),
        ([c for c in kernels if c.bytes >= LARGE_BYTES], max(1, processes // 4)),
    )
    failed: dict[str, str] = {}
    for some, count in parts:
        jobs = {case.name: (case, case.name in rivals) for case in some}
        failed |= ahead(_run_once, jobs, count, deadline)
    return failed


def _run_once(given: tuple[Case, bool]) -> None:
    """A kernel once on zeros, and what torch.compile makes of its rival."""
    case, compiled = given
    with tempfile.TemporaryDirectory() as folder:
        graph = from_json(Graph, case.graph)
        inputs = _built(case, graph, "cuda", random=False)
        getattr(load_module(case.text, Path(folder)), case.entry)(*_given(case, graph, inputs))
        torch.cuda.synchronize()
        del inputs
        if compiled:
            _compiled(case)
            torch.compiler.reset()


def count(arguments: argparse.Namespace) -> int:
    """Launch some of what is large enough for its bytes to be counted, or every emitted kernel, or
    eager's launches alone, once each, between marks that ncu sees:

    ncu --nvtx --profile-from-start off --clock-control none --csv --page raw --metrics METRICS ...
    """
    known = read(arguments.cases)
    every = [case for case in known if case.text and case.bytes < LARGE_BYTES]
    if arguments.ahead:
        failed = _warmed(every, (), arguments.processes, arguments.budget)
        return int(bool(failed))
    if arguments.every:
        cases = every
    elif arguments.alone:
        cases = [case for case in known if case.launches == 1 and case.bytes < arguments.most]
    else:
        cases = _large(known, arguments.kernels)
    deadline = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for case in cases:
            if time.monotonic() > deadline:
                print("out of time", file=sys.stderr, flush=True)
                break
            try:
                graph = from_json(Graph, case.graph)
                inputs = _built(case, graph, "cuda")
                call: Any
                call, _ = replayed(graph, (), "cuda", tuple(inputs))
                if case.text:
                    call = getattr(load_module(case.text, Path(folder)), case.entry)
                    inputs = _given(case, graph, inputs)
                call(*inputs)
                with counted(case.name):
                    call(*inputs)
                del inputs
            except Exception as error:  # noqa: BLE001 listed, the rest goes on
                print(f"{case.name}: {cause(error)}", file=sys.stderr, flush=True)
            gc.collect()
            if case.bytes > KEPT_BYTES:
                torch.cuda.empty_cache()
    return 0


def _large(every: Iterable[Case], most: int) -> list[Case]:
    """At `most` so many emitted kernels and each op once, of which the L2 holds little."""
    least = 8 * load_rulebook().device(DEVICE).memory.l2.base
    cases = [c for c in every if least <= c.bytes <= 8 * least]
    ops: dict[str, Case] = {}
    for case in cases:
        if case.launches == 1:
            op = next(n.op for n in from_json(Graph, case.graph).nodes if n.kind == "call")
            ops.setdefault(op, case)
    kernels = [case for case in cases if case.text and case.bytes >= 2 * least]
    step = max(1, len(kernels) // most)
    return [*kernels[::step][:most], *ops.values()]
