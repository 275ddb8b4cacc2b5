"""What the tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import checker

from . import spawned
from .in_process import EVERY_WAY, WAYS


@pytest.fixture(scope="module", autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children of the package are forks of a process that has torch imported, but where a module
    says that it is `ABOUT_PROCESSES`."""
    if getattr(request.module, "ABOUT_PROCESSES", False):
        yield
        return
    undo = spawned.install()
    yield
    undo()


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """No call of the package leaves gradients off in the process of its caller."""
    assert torch.is_grad_enabled()
    yield
    left = torch.is_grad_enabled()
    torch.set_grad_enabled(True)  # for the next test, whatever this one did
    assert left, "gradients are off"


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """What torch.compile made before and after a test is forgotten; what is drawn is the same."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """A warm child that checks kernels on the interpreter: to start one takes seconds."""
    with checker("interpreter") as worker:
        yield worker


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that is deep anyway has no quick case."""
    if "ways" in metafunc.fixturenames:
        every = pytest.param(EVERY_WAY, marks=pytest.mark.deep)
        deep = metafunc.definition.get_closest_marker("deep")
        metafunc.parametrize("ways", [every] if deep else ["as asked", every], indirect=True)


@pytest.fixture
def ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models are patched as asked for; in the deep tests in the other mode, in another dtype and
    under autocast, too, which is most of what a patch takes."""
    deep = request.node.get_closest_marker("deep")
    before = WAYS.set(EVERY_WAY if deep else request.param)
    yield
    WAYS.reset(before)
