"""What all tests share: the tier of a test follows from its folder, and golden files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TIERS = {"pure": "notorch", "cpu": "torch", "browser": "browser", "gpu": "gpu"}
HERE = Path(__file__).resolve().parent


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
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


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
