"""Stage: prove the emitted kernels, against fp64 and by compiling them for their device.

Both happen in long-lived child processes, because the interpreter and the compiler cannot share
one. Start them early (while the model is captured), and hand the kernels in when they are emitted:

    with provers(90, rules, check=True, compile=True) as children:
        ...                                     # capture, group, plan, decide, emit
        proofs = verify(kernels, children)

A child that crashes, hangs or fails to start gives one failed record.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

from fusion_advisor.codegen.header import body
from fusion_advisor.ir.kernel import (
    Check,
    CheckJob,
    Compiled,
    CompileJob,
    Criterion,
    Kernel,
)
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.quantities import Number
from fusion_advisor.rulebook.schema import Verify
from fusion_advisor.support.codec import to_json
from fusion_advisor.support.worker import Worker, WorkerError
from fusion_advisor.verify.proofs import Proofs

Where = Literal["auto", "interpreter", "gpu"]
_Proof = TypeVar("_Proof", Check, Compiled)


def criterion_of(rules: Verify) -> Criterion:
    """Criterion for the checking child, from the rules."""

    def plain(number: Number, kind: Any) -> Any:
        return number.count if kind == "int" else number.value

    numbers = rules.criterion
    return Criterion(**{f.name: plain(getattr(numbers, f.name), f.type) for f in fields(Criterion)})


def checker(where: Where, rules: Verify | None = None) -> Worker:
    """Child process that checks: on the GPU, through the interpreter, or (`auto`) on the GPU where
    there is one."""
    return Worker("fusion_advisor.verify.check_child", where, niceness=_known(rules).niceness.count)


def compiler(rules: Verify | None = None) -> Worker:
    """Child process that compiles: never under the interpreter."""
    environment = {"TRITON_INTERPRET": "0"}
    niceness = _known(rules).niceness.count
    return Worker("fusion_advisor.verify.compile_child", environment=environment, niceness=niceness)


def _known(rules: Verify | None) -> Verify:
    """Rules as given, else the shipped rules."""
    return rules or load_rulebook().verify


def submit_check(
    worker: Worker,
    kernel: Kernel,
    *,
    seeds: int = 5,
    timeout_s: float | None = None,
    rules: Verify | None = None,
) -> Callable[[], Check]:
    """Hand one kernel in; the returned function waits for its record. A child that did not answer
    is a failed check."""
    rules = _known(rules)
    job = CheckJob(kernel, seeds, criterion_of(rules))
    answer = worker.submit(job, Check, timeout_s or rules.timeout.base)
    return partial(
        _record, answer, lambda why: Check(kernel.name, "nowhere", False, seeds=seeds, failure=why)
    )


def submit_compile(
    worker: Worker, kernel: Kernel, capability: int, *, rules: Verify | None = None
) -> Callable[[], Compiled]:
    """Hand one kernel in; the returned function waits for its record. A child that did not answer
    is a failed compile."""
    job = CompileJob(kernel, capability)
    answer = worker.submit(job, Compiled, _known(rules).timeout.base)
    return partial(_record, answer, lambda why: Compiled(kernel.name, failure=why))


def _record(answer: Future[_Proof], failed: Callable[[str], _Proof]) -> _Proof:
    try:
        return answer.result()
    except WorkerError as error:
        return failed(str(error))


@dataclass(frozen=True)
class Provers:
    """Child processes that check and compile; None for one that is not wanted. `capability` is the
    device's, which need not be here (90: H100, H200). Kernels whose proof is in `known` are not
    proven again."""

    check: Worker | None
    compile: Worker | None
    capability: int
    rules: Verify
    known: Proofs | None = None


@contextmanager
def provers(
    capability: int,
    rules: Verify,
    *,
    check: bool,
    compile: bool,
    where: Where = "interpreter",
    known: Proofs | None = None,
) -> Generator[Provers, None, None]:
    """Start the child processes now, so that they have imported what they need when the kernels
    come; they end with the block, even in the middle of work. Checks run (`where`) in the
    interpreter, which is on every machine, unless something is measured."""
    with ExitStack() as stack:
        checking = stack.enter_context(checker(where, rules)) if check else None
        compiling = stack.enter_context(compiler(rules)) if compile else None
        for child in (checking, compiling):
            if child:
                stack.callback(child.abandon)
        yield Provers(checking, compiling, capability, rules, known)


def holds(check: Check | None, compiled: Compiled | None) -> bool:
    """Whether a kernel passed each of check and compile that was asked for."""
    return (not check or check.passed) and (not compiled or not compiled.failure)


def verify(
    kernels: Sequence[Kernel], children: Provers, *, seeds: int | None = None
) -> list[tuple[Check | None, Compiled | None]]:
    """Check and compile every kernel, both at the same time; in the order of the kernels, with None
    where there is no such child. Each case has `seeds` draws; None: those of the rules."""
    rules = children.rules
    seeds, capability = seeds or rules.seeds.count, children.capability

    def checked(worker: Worker, kernel: Kernel) -> Callable[[], Check]:
        job = to_json(CheckJob(_bare(kernel), seeds, criterion_of(rules)))
        submit = partial(submit_check, worker, kernel, seeds=seeds, rules=rules)
        return _proven(Check, job, submit, children.known)

    def compiled(worker: Worker, kernel: Kernel) -> Callable[[], Compiled]:
        job = to_json(CompileJob(_bare(kernel), capability))
        submit = partial(submit_compile, worker, kernel, capability, rules=rules)
        return _proven(Compiled, job, submit, children.known)

    handed = [
        (
            children.check and checked(children.check, kernel),
            children.compile and compiled(children.compile, kernel),
        )
        for kernel in kernels
    ]
    return [(check and check(), compile and compile()) for check, compile in handed]


def _bare(kernel: Kernel) -> Kernel:
    """Kernel reduced to its computation, without its place in a model."""
    return replace(kernel, text=body(kernel.text))


def _proven(
    kind: type[_Proof], job: str, submit: Callable[[], Callable[[], _Proof]], known: Proofs | None
) -> Callable[[], _Proof]:
    """Begin a job, unless its record is known; the returned function waits for the record."""
    found = known and known.find(kind, job)
    if found is not None:
        return lambda: found
    answer = submit()

    def collected() -> _Proof:
        proof = answer()
        if known is not None:
            known.keep(job, proof)
        return proof

    return collected
