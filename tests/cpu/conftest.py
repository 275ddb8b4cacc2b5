"""What the tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import checker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """A warm child that checks kernels on the interpreter: to start one takes seconds."""
    with checker("interpreter") as worker:
        yield worker
