"""On the GPU: time every case."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.frontend.replay import replayed
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.measure.clocks import Clock
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.kernel_fault import KernelFault, cause

from ..gpu import ahead, lost, resources
from ..gpu import clock as clock_of
from .cases import DEVICE, Case, read

LARGE_BYTES = 2 << 30
"""Cases that move more are warmed up by few processes at a time: all would not fit."""
MOST_BYTES = 60 << 30
KEPT_BYTES = 1 << 29
"""What moves less leaves its memory to the next."""


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
    """Time every case, kernels first, the short ones before the long; each as it is timed is
    appended to the file."""
    deadline = time.monotonic() + arguments.budget
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    cases = [case for case in read(arguments.cases, arguments.only) if case.bytes < MOST_BYTES]
    cases.sort(key=lambda case: (not case.text, case.bytes))
    if arguments.dry_run:
        return _rehearse(cases)
    failed = _warmed(cases, arguments.processes, min(150.0, 0.45 * arguments.budget))
    with arguments.out.open("a") as out, tempfile.TemporaryDirectory() as folder, torch.no_grad():
        clock = clock_of(DEVICE)

        def record(timed: Timed) -> None:
            out.write(to_json(timed) + "\n")
            out.flush()

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
                if lost(text):
                    return 1
            if case.bytes > KEPT_BYTES:
                gc.collect()
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
        module, given = load_module(case.text, folder), _given(case, graph, inputs)
        launch = getattr(module, case.entry)
        launch(*given)
        _measure(case.name, "kernel", lambda: launch(*given), clock, record, resources([module]))
    except Exception as error:
        text = cause(error)
        record(Timed(case.name, "kernel", failure=text))
        print(f"{case.name}: kernel: {text}", flush=True)
        if lost(text):
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


def _warmed(cases: Sequence[Case], processes: int, seconds: float) -> dict[str, str]:
    """Why, by name, a kernel failed that was run once ahead; fewer of the large ones at a time."""
    deadline = time.monotonic() + seconds
    kernels = [case for case in cases if case.text]
    parts = (
        ([c for c in kernels if c.bytes < LARGE_BYTES], processes),
        ([c for c in kernels if c.bytes >= LARGE_BYTES], max(1, processes // 4)),
    )
    failed: dict[str, str] = {}
    for some, count in parts:
        failed |= ahead(_run_once, {case.name: case for case in some}, count, deadline)
    return failed


def _run_once(case: Case) -> None:
    """A kernel once on zeros."""
    with tempfile.TemporaryDirectory() as folder:
        graph = from_json(Graph, case.graph)
        inputs = _built(case, graph, "cuda", random=False)
        getattr(load_module(case.text, Path(folder)), case.entry)(*_given(case, graph, inputs))
        torch.cuda.synchronize()
