"""What all tests share: the tier of a test follows from its folder, what of it is deep from a hash,
and golden files."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest

TIERS = {"pure": "notorch", "cpu": "torch", "browser": "browser", "gpu": "gpu"}
HERE = Path(__file__).resolve().parent
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
"""Of torch in each process: workers of pytest share the cores, on which more would wait in loops
for each other, and a pool of Inductor's imports torch once more for each."""
OBJECTS = 100_000
"""New objects from which the collector begins: torch's are a million, walked each time."""

os.environ.update({name: os.environ.get(name, "1") for name in ONE_THREAD})
gc.set_threshold(OBJECTS)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that is no terminal's starts what it leaves in the background so, and children inherit
    # it: tests that interrupt them would wait for nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regen", action="store_true", help="rewrite golden files from what the code does now"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder not in TIERS:
            raise pytest.UsageError(
                f"{item.path}: put the test under tests/{', tests/'.join(TIERS)}"
            )
        item.add_marker(TIERS[folder])
    _leave_to_deep(items)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_sessionfinish() -> None:
    """Spare pytest's last collections, which walk all of torch's objects five times; Python's own
    at its end comes behind them."""
    gc.freeze()
    atexit.register(gc.unfreeze)


def _leave_to_deep(items: list[pytest.Item]) -> None:
    """Of a parametrised test that says `sampled(n)` one case in n is fast, at least one, and the
    rest is deep; with `sampled(n, each="name")` one in n for every value of that parameter. Which
    hangs on a hash of the case alone: none is picked by hand."""
    cases: dict[tuple[object, ...], list[tuple[int, pytest.Function, int]]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        deep = item.get_closest_marker("deep")  # anyway
        if mark is not None and deep is None and isinstance(item, pytest.Function):
            (one_in,), each = mark.args, mark.kwargs.get("each")
            case = item.nodeid.partition("::")[2]
            value = str(item.callspec.params[each]) if each else ""
            key = case.partition("[")[0], value, item.path
            cases[key].append((crc32(case.encode()), item, one_in))
    for found in cases.values():
        found.sort(key=lambda case: case[0])
        for _, item, _ in found[-(-len(found) // found[0][2]) :]:
            item.add_marker("deep")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No command takes what somebody's earlier run has left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_ADVISOR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str | Path, str], None]:
    """`golden(path, text)`: the file at `path`, in `golden/` beside the test, must hold `text`.

    With `--regen` the file is written instead.
    """
    folder = request.path.parent / "golden"

    def check(path: str | Path, text: str) -> None:
        file = folder / path
        if request.config.getoption("--regen"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"{file} is missing: run pytest with --regen"
        assert text == file.read_text(encoding="utf-8"), f"{file} is stale: run pytest with --regen"

    return check
