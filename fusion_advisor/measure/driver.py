"""Stage: time eager, its rivals and the emitted kernels on the local GPU.

Each way of each group, and of the whole graph, is one job for a child process: one that crashes,
hangs or runs out of memory costs its own row alone. Rows come as they are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.codegen.emit import emit
from fusion_advisor.codegen.test_inputs import FULL_SIZE, at_full_size
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.decide import Decision, decide
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.fusion.lower import Expressed, fused_traffic
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.measure.protocol import (
    COMPILED,
    EAGER,
    KERNEL,
    Ceilings,
    CeilingsJob,
    GroupJob,
    Measurement,
    ModelJob,
    Replacement,
    TimingRules,
    Turns,
    TurnsJob,
    Way,
)
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.worker import Worker, WorkerError
from fusion_advisor.verify.driver import criterion_of
from fusion_advisor.verify.sequence import ReplacedNodes, graph_without

_DTYPES = ("bfloat16", "float16", "tf32", "float32")
"""Dtypes whose matrix products are measured as ceilings."""


@dataclass(frozen=True)
class BenchSubject:
    """Group to measure: its kernel with the graph's own sizes, and all of its occurrences.

    `instances` are the launches of each occurrence; `accepted` is false for a candidate.
    """

    id: str
    pattern: str
    decision: Decision
    kernel: Kernel
    instances: tuple[tuple[int, ...], ...]
    accepted: bool = True


def timing_rules(rulebook: Rulebook, device: Device) -> TimingRules:
    """Numbers that the timing child needs."""
    rules = rulebook.measure
    return TimingRules(
        flush_bytes=int(rules.flush.value * device.memory.l2.count),
        batch=rules.batch.count,
        least_runs=rules.least_runs.count,
        most_runs=rules.most_runs.count,
        spent_s=rules.spent.base,
        ahead=rules.ahead.value,
        slack=rules.slack.value,
        criterion=criterion_of(rulebook.verify),
        datasheet_bandwidth=device.datasheet_bandwidth,
        compiled=rulebook.tuning.compiled.count,
    )


def ways(subject: BenchSubject, *, compiled: bool = True) -> tuple[Way, ...]:
    """Ways to compute a group; the emitted kernel is second."""
    found = [EAGER, KERNEL]
    spelling = exact(subject.decision.subject, subject.pattern)
    if spelling is not None:
        found.append(Way("framework", "line", line=spelling.framework, names=spelling.names))
        if spelling.liger:
            imports = ("import liger_kernel.transformers.functional as liger",)
            found.append(
                Way(
                    "Liger", "line", line=spelling.liger, names=spelling.names,
                    imports=imports, needs=("liger_kernel",),
                )
            )  # fmt: skip
    return (*found, *(COMPILED if compiled else ()))


def ceilings(worker: Worker, rules: TimingRules, timeout_s: float) -> Ceilings:
    """Measure the speed that the GPU itself reaches. Raises WorkerError when the child does
    not answer."""
    job = CeilingsJob(rules, _DTYPES)
    return worker.submit(job, Ceilings, timeout_s).result()


def measure_group(
    subject: BenchSubject, way: Way, worker: Worker, rules: TimingRules, timeout_s: float
) -> Measurement:
    """Measure one way of one group; a failure is in the row."""
    kernel = _at_full_size(subject.kernel)
    job = GroupJob(
        subject=subject.id,
        way=way,
        kernel=kernel,
        least_bytes=_least_bytes(subject.decision, kernel),
        rules=rules,
        random=_draws(subject.decision),
    )
    return _answered(job, subject.id, way, worker, timeout_s)


def _at_full_size(kernel: Kernel) -> Kernel:
    return replace(kernel, cases=(at_full_size(kernel),))


def _least_bytes(decision: Decision, kernel: Kernel) -> int:
    """Bytes that every way must move at the graph's sizes: results, and inputs that no way can do
    without, each once."""
    inside = decision.subject
    if kernel.cases[0].name != FULL_SIZE or inside.plan is None:
        return 0
    region = inside.plan.region
    crossing = min(fused_traffic(inside.flow, inside.border), decision.fused_bytes)
    return max(crossing - sum(region.inputs[n].bytes for n in region.discarded), 0)


def _draws(decision: Decision) -> bool:
    expressed = decision.subject.expressed
    return bool(expressed and expressed.draws)


def measure_turns(
    decision: Decision,
    kernels: Sequence[Kernel],
    rounds: int,
    worker: Worker,
    rules: TimingRules,
    timeout_s: float,
) -> Turns:
    """Time kernels of one group in several configurations in turn."""
    first, *others = kernels
    first = _at_full_size(first)
    job = TurnsJob(
        subject=first.name,
        kernels=(first, *(replace(other, cases=()) for other in others)),
        least_bytes=_least_bytes(decision, first),
        rules=rules,
        rounds=rounds,
        random=_draws(decision),
    )
    try:
        return worker.submit(job, Turns, timeout_s).result()
    except WorkerError as error:
        return Turns(failure=str(error))


def measure_model(
    flow: Dataflow,
    replaced: Sequence[Replacement],
    way: Way,
    worker: Worker,
    rules: TimingRules,
    timeout_s: float,
) -> Measurement:
    """Measure the whole graph in one way, with `replaced` in place of their launches."""
    return _answered(model_job(flow, replaced, way, rules), "model", way, worker, timeout_s)


def model_job(
    flow: Dataflow, replaced: Sequence[Replacement], way: Way, rules: TimingRules
) -> ModelJob:
    """Job of a whole graph in one way, with `replaced` in place of their launches."""
    job = ModelJob(way, flow.annotated.graph, tuple(replaced), rules)
    if not replaced:
        return job
    groups = [
        ReplacedNodes(
            {flow.position[name] for name in one.members}, [Ref(*ref) for ref in one.inputs]
        )
        for one in replaced
    ]
    rest, after = graph_without(flow, groups)
    return replace(job, rest=rest, after=after)


def _answered(
    job: GroupJob | ModelJob, subject: str, way: Way, worker: Worker, timeout_s: float
) -> Measurement:
    try:
        return worker.submit(job, Measurement, timeout_s).result()
    except WorkerError as error:
        return Measurement(subject, way.name, failure=str(error))


def in_place(
    flow: Dataflow, subjects: Sequence[BenchSubject], rulebook: Rulebook
) -> Iterator[Replacement]:
    """Yield every group's kernel in place of each occurrence of the group."""
    for subject in subjects:
        first = subject.decision.subject.expressed
        assert first is not None
        for place in subject.instances:
            decision = decide(flow, place, rulebook)
            here = decision.subject.expressed
            assert here is not None
            kernel = subject.kernel
            if here.form != first.form:  # equal computations whose nodes stand in another order
                kernel = emit(flow, decision, subject.kernel.name, rulebook)
            yield _replacement(kernel.text, kernel.entry, flow, here, here.inputs)


def own_ops(
    flow: Dataflow, subjects: Sequence[BenchSubject], rulebook: Rulebook
) -> Iterator[Replacement]:
    """Yield the framework's own op in place of each occurrence of a group that computes exactly the
    same."""
    for subject in subjects:
        for place in subject.instances:
            inside = decide(flow, place, rulebook).subject
            spelling, here = exact(inside, subject.pattern), inside.expressed
            if spelling is None or here is None:
                continue
            names = ", ".join(name for name, _ in spelling.names)
            text = f"import torch\n\n\ndef own_op({names}):\n    return {spelling.framework}\n"
            taken = [here.inputs[number] for _, number in spelling.names]
            yield _replacement(text, "own_op", flow, here, taken)


def _replacement(
    text: str, entry: str, flow: Dataflow, here: Expressed, taken: Sequence[Ref]
) -> Replacement:
    members = tuple(flow.nodes[number].name for number in here.members)
    return Replacement(text, entry, _refs(taken), _refs(here.outputs), members)


def _refs(refs: Sequence[Ref]) -> tuple[tuple[str, int], ...]:
    return tuple((ref.node, ref.output) for ref in refs)
