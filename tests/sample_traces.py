"""Traces as a profiler would write them, of models that are written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZE = 2048
DEVICE = "NVIDIA H200"
LAYER = ("mm", "cos", "exp", "sin")
"""A layer's launches, each of what the one before gives; the matrix product takes a weight, too."""

KERNELS = {
    "mm": "nvjet_sm90_tst_128x64",
    "cos": "void at::native::vectorized_elementwise_kernel<4, cos_kernel_cuda(Iter&)>(int)",
    "exp": "void at::native::vectorized_elementwise_kernel<4, exp_kernel_cuda(Iter&)>(int)",
    "sin": "void at::native::vectorized_elementwise_kernel<4, sin_kernel_cuda(Iter&)>(int)",
}
US = {"mm": 100.0, "cos": 20.0, "exp": 30.0, "sin": 40.0}


@dataclass
class Recording:
    """What a profiler would write of a program: the host launches each microsecond, kernels run one
    after the other."""

    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    host: float = 1e6
    gpu: float = 1e6
    ids: int = 0
    sized: bool = True

    def event(self, kind: str, name: str, start: float, us: float, tid: int, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": us,
             "args": args}
        )  # fmt: skip

    def span(
        self, kind: str, name: str, body: Callable[[], None], tid: int = 7, **args: Any
    ) -> None:
        start = self.host
        self.host += 1
        body()
        self.host += 1
        self.event(kind, name, start, self.host - start, tid, **args)

    def kernel(
        self, name: str, us: float, tid: int = 7, after: float = 2, kind: str = "kernel"
    ) -> None:
        """Launch one kernel, which begins `after` so many microseconds where the GPU is free."""
        self.ids += 1
        self.event("cuda_runtime", "cudaLaunchKernel", self.host, 1, tid, correlation=self.ids)
        self._run(name, us, self.ids, self.host + after, kind)
        self.host += 3

    def graph(self, kernels: Sequence[tuple[str, float]]) -> None:
        self.ids += 1
        self.event("cuda_runtime", "cudaGraphLaunch", self.host, 5, 7, correlation=self.ids)
        for name, us in kernels:
            self._run(name, us, self.ids, self.host + 8)
        self.host += 10

    def _run(self, name: str, us: float, number: int, begin: float, kind: str = "kernel") -> None:
        self.gpu = max(self.gpu, begin)
        self.event(kind, name, self.gpu, us, 3, device=0, stream=3, correlation=number)
        self.gpu += us

    def op(
        self, name: str, kernels: Sequence[tuple[str, float]], sizes: Any = None, tid: int = 7,
        outer: str = "", sequence: int = -1,
    ) -> None:  # fmt: skip
        args: dict[str, Any] = {} if sequence < 0 else {"Sequence number": sequence}

        def launch() -> None:
            for kernel, us in kernels:
                self.kernel(kernel, us, tid)

        if self.sized:
            args["Input Dims"] = sizes if sizes is not None else [[SIZE, SIZE]]

        def inner() -> None:
            self.span("cpu_op", name, launch, tid, **args)

        if outer:
            self.span("cpu_op", outer, inner, tid, **args)
        else:
            inner()

    def layers(self, count: int, factor: float = 1.0) -> None:
        for _ in range(count):
            for op in LAYER:
                sizes = [[SIZE, SIZE]] * (2 if op == "mm" else 1)
                self.op(f"aten::{op}", [(KERNELS[op], factor * US[op])], sizes)

    def wait(self) -> None:
        """The host waits until the GPU has run everything."""
        end = max(self.gpu + 1, self.host)
        self.event("cuda_runtime", "cudaDeviceSynchronize", self.host, end - self.host, 7)
        self.host = end

    def write(self, file: Path, device: str = DEVICE) -> Path:
        content: dict[str, Any] = {
            "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": device}],
            "traceEvents": [{"ph": "M", "name": "process_name", "args": {}}, *self.events],
        }  # fmt: skip
        file.write_text(json.dumps(content, indent=2))
        return file

    def steps(self, count: int, body: Callable[[int], None]) -> None:
        for number in range(count):
            self.span("user_annotation", f"ProfilerStep#{number}", lambda n=number: body(n))
