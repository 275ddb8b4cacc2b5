"""Kernels handed to a child, and its records."""

from __future__ import annotations

from fusion_advisor.ir.kernel import Check, Compiled, Kernel
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import (
    criterion_of,
    submit_check,
    submit_compile,
)

CRITERION = criterion_of(load_rulebook().verify)
"""The shipped one."""


def checked(
    worker: Worker, *kernels: Kernel, seeds: int = 5, timeout_s: float | None = None
) -> list[Check]:
    """One check for each kernel, in order. Seeds 0 to 5 draw six different distributions."""
    answers = [submit_check(worker, k, seeds=seeds, timeout_s=timeout_s) for k in kernels]
    return [answer() for answer in answers]


def compiled(worker: Worker, *kernels: Kernel, capability: int = 90) -> list[Compiled]:
    """The offline compile of each kernel, in order."""
    answers = [submit_compile(worker, k, capability) for k in kernels]
    return [answer() for answer in answers]
