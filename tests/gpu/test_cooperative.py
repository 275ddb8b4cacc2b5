"""Programs that share rows and wait for each other: right, alike from run to run, and never stuck,
whoever else is on the GPU."""

# Triton is partly untyped.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.shipped.load import load_module
from fusion_advisor.verify.driver import checker

from ..cpu.checks import checked
from ..cpu.regions import kernel_of

ROWS, COLS = 96, 131072
FREE = 16
"""Multiprocessors that the kernel beside leaves."""
SECONDS = 300.0
"""For one kernel on the GPU, its compilations included."""


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b)


def normalised_softmax(x: torch.Tensor) -> torch.Tensor:
    """Two exchanges, the second of what the first gives."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return torch.softmax(scaled, -1).to(x.dtype)


def spread(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three values in an exchange, and a result for each row."""
    wide = x.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    mean = wide.sum(-1, keepdim=True) / x.shape[-1]
    return ((wide - mean) / (high - low)).to(x.dtype), (high - low).squeeze(-1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "softmax": (softmax, 0),
    "layer_norm": (layer_norm, 2),
    "normalised_softmax": (normalised_softmax, 0),
    "spread": (spread, 0),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Loaded(NamedTuple):
    """A kernel with its module; `launch` is the module's entry."""

    kernel: Kernel
    module: ModuleType
    weights: int
    dtype: torch.dtype

    def inputs(self, seed: int, rows: int = ROWS, cols: int = COLS) -> list[torch.Tensor]:
        made = torch.Generator("cuda").manual_seed(seed)
        shapes = [(rows, cols), *[(cols,)] * self.weights]
        return [
            torch.randn(shape, device="cuda", generator=made).to(self.dtype) for shape in shapes
        ]

    def launch(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = getattr(self.module, self.kernel.entry)(*inputs)
        return found if isinstance(found, tuple) else (found,)


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module", params=FUNCTIONS)
def loaded(
    request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    function, weights = FUNCTIONS[request.param]
    shapes = [(ROWS, COLS), *[(COLS,)] * weights]
    kernel = kernel_of(function, *(torch.empty(shape, dtype=dtype) for shape in shapes))
    assert "published(" in kernel.text
    folder: Path = tmp_path_factory.mktemp("emitted")
    return Loaded(kernel, load_module(kernel.text, folder), weights, dtype)


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_right_against_fp64(loaded: Loaded) -> None:
    """The cases that the interpreter judges, with the programs that wait."""
    with checker("gpu") as worker:
        (check,) = checked(worker, loaded.kernel, timeout_s=SECONDS)
    assert check.passed, check.failure


def test_the_same_bits_from_run_to_run(loaded: Loaded) -> None:
    inputs = loaded.inputs(0)
    first = loaded.launch(*inputs)
    assert all(same(first, loaded.launch(*inputs)) for _ in range(50))


def test_the_same_bits_where_no_program_waits(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interpreter judges is what the waiting programs compute."""
    inputs = loaded.inputs(1)
    together = loaded.launch(*inputs)

    def too_few(device: torch.device, warps: int) -> int:
        return 0

    monkeypatch.setattr(loaded.module.host, "resident", too_few)
    loaded.module.host.plans.clear()  # what was launched before would be launched again
    assert same(together, loaded.launch(*inputs))


def test_two_streams_at_once(loaded: Loaded) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    given = [loaded.inputs(seed) for seed in (2, 3)]
    expected = [loaded.launch(*inputs) for inputs in given]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(20):
        for stream, inputs, results in zip(streams, given, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(loaded.launch(*inputs))
    torch.cuda.synchronize()
    for right, results in zip(expected, found, strict=True):
        assert all(same(right, one) for one in results)


def test_replays_of_a_graph(loaded: Loaded) -> None:
    static = loaded.inputs(4)
    loaded.launch(*static)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = loaded.launch(*static)
    for seed in range(5, 15):
        fresh = loaded.inputs(seed)
        for into, values in zip(static, fresh, strict=True):
            into.copy_(values)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert same(results, loaded.launch(*fresh))


HELD = 32
"""32-bit values that each thread of the kernel beside keeps: with 1024 threads a program, more
registers than half a multiprocessor has."""
HOLD_NS = 2_000_000_000
"""Time that it keeps them: several test processes may take turns on one GPU."""


@triton.jit
def hold(started_ptr, kept_ptr, nanoseconds, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Keeps a multiprocessor for a while."""
    lane = tl.arange(0, LANES)
    mine = kept_ptr + tl.program_id(0) * LANES + lane
    kept = tl.load(mine, volatile=True)
    tl.atomic_add(started_ptr, 1)
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred again;
            .reg .u64 end, now;
            mov.u64 end, %globaltimer;
            add.u64 end, end, $1;
            wait: nanosleep.u32 1000;
            mov.u64 now, %globaltimer;
            setp.lt.u64 again, now, end;
            @again bra wait;
            mov.u64 $0, now;
        }
        """,
        "=l,l",
        [tl.full((THREADS,), 0, tl.int64) + nanoseconds],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    tl.store(mine, kept + 1)


def test_beside_a_kernel_that_holds_most_multiprocessors(loaded: Loaded) -> None:
    """Each of its programs has a multiprocessor of its own: where one held half of each, ours would
    wait for all of it, since a multiprocessor divides its memory anew when nothing runs there."""
    inputs = loaded.inputs(6)
    first, second, look = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()  # the other streams do not wait for what makes the inputs
    with torch.cuda.stream(second):
        expected = loaded.launch(*inputs)
        loaded.launch(*inputs)  # to have the memory: to ask for more waits for every kernel
    held = torch.cuda.get_device_properties(0).multi_processor_count - FREE
    started = torch.zeros(1, dtype=torch.int32, device="cuda")
    lanes = 1024 * HELD
    kept = torch.zeros(held * lanes, dtype=torch.int32, device="cuda")
    seen = torch.zeros(1, dtype=torch.int32).pin_memory()
    hold[(held,)](started, kept, 0, THREADS=1024, LANES=lanes, num_warps=32)  # compiled, loaded
    started.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        hold[(held,)](started, kept, HOLD_NS, THREADS=1024, LANES=lanes, num_warps=32)
        holding = torch.cuda.Event()
        holding.record()
    while int(seen) < held:
        with torch.cuda.stream(look):
            seen.copy_(started, non_blocking=True)
        look.synchronize()
    with torch.cuda.stream(second):
        found = loaded.launch(*inputs)
    second.synchronize()
    assert not holding.query(), "the kernel that holds the multiprocessors ended before"
    assert same(expected, found)
    torch.cuda.synchronize()
