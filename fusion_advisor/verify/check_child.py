"""Child process of `verify` that checks one emitted kernel against the model's graph in fp64.

A request is a `CheckJob`, a reply is a `Check`. Under the interpreter the environment needs
nothing: this module sets `TRITON_INTERPRET=1` itself when it finds no GPU.

What is held, for each case and seed:

- the outputs are those of the model's graph, by the criterion of `tolerance`;
- they lie in memory as the graph says: as the reference does on the meta device, which follows CUDA
  as the graph's fake tensors do. A CPU's eager may lay results out otherwise (a batch norm of a
  permuted tensor, a padding of channels-last images), so only its values are asked;
- inputs stay bit for bit as they were;
- interpreter: addresses in bounds, no races, traffic equal to the plan's to the byte, and no more
  elements asked for than the plan says, repeats included;
  GPU: a second launch gives the same bits.

And once for a kernel: its launcher refuses inputs that it was not made for, or gives what the graph
does; and offsets of 64 bits come to the same.
"""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from fusion_advisor.ir.kernel import Case, Check, CheckJob, Criterion, Kernel
from fusion_advisor.shipped.load import load_module, process_folder
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.support.worker import serve
from fusion_advisor.verify.gradients import check_gradients, gradients_of
from fusion_advisor.verify.inputs import DISTRIBUTIONS, OVERFLOWING, build_inputs
from fusion_advisor.verify.launchers import Launcher
from fusion_advisor.verify.launches import has_runtime, launch, limited
from fusion_advisor.verify.references import check_layouts, truth, with_numbers
from fusion_advisor.verify.tolerance import Error, Tensors, compare


def _describe(case: Case) -> str:
    tensors = (f"{'x'.join(map(str, t.shape)) or 'scalar'} {t.dtype}" for t in case.inputs)
    return f"{case.name}: {', '.join(tensors)}"


def _check_traffic(case: Case, loaded: int, stored: int) -> None:
    for what, planned, seen in (
        ("loaded", case.loaded_bytes, loaded),
        ("stored", case.stored_bytes, stored),
    ):
        if planned is not None and planned != seen:
            raise KernelFault(f"{what} {seen} bytes, the plan says {planned}")


def _check_requests(case: Case, loads: int, stores: int) -> None:
    """Raise KernelFault where a kernel asks for elements more often than its plan does."""
    for what, planned, seen in (("loads", case.loads, loads), ("stores", case.stores, stores)):
        if planned is not None and seen > planned:
            raise KernelFault(
                f"{what} {seen} elements, repeats included; the plan at most {planned}"
            )


def _launch_twice(
    kernel: Kernel, module: ModuleType, inputs: Tensors, numbers: Sequence[float]
) -> Tensors:
    """Launch on a GPU. Raises KernelFault when a second launch gives other bits."""
    ours, again = (launch(module, kernel.entry, inputs, numbers) for _ in range(2))
    if not all(_same_bits(a, b) for a, b in zip(ours, again, strict=True)):
        raise KernelFault("a second launch gave different bits")
    return ours


class Counted(Protocol):
    """Traffic of the launches of a check: distinct bytes, and elements, repeats counted."""

    loaded: int
    stored: int
    loads: int
    stores: int


@dataclass(frozen=True)
class Run:
    """One draw of a case's inputs, and how its launches run: on a GPU, or interpreted, which counts
    their traffic; None: it is not held to the plan's. `scale` is a factor on floating numbers."""

    seed: int
    device: str
    criterion: Criterion
    counting: Callable[[], AbstractContextManager[Counted | None]] = nullcontext
    scale: float = 1.0

    @property
    def distribution(self) -> str:
        return DISTRIBUTIONS[self.seed % len(DISTRIBUTIONS)]

    def numbers(self, case: Case) -> tuple[float, ...]:
        """The numbers behind the tensors: the graph's with every second seed, else others."""
        return tuple(_OTHER * n if self.seed % 2 else n for n in case.numbers)

    def inputs(self, case: Case, further: int = 0) -> Tensors:
        """The tensors of a case; `further` is added to the seed for other draws."""
        return build_inputs(case, self.distribution, self.seed + further, self.device, self.scale)

    def in_range(self, call: Callable[..., Any], cases: Sequence[Case]) -> Run:
        """The run with numbers small enough that eager's results of a call are finite where
        float64's are, at half of the elements of each. Where eager overflows on the way, as float16
        does in the product of two large inputs, its NaN tests nothing and has no error that ours
        could be compared with. The first case that is not endless tells it for all: what overflows
        does so at any size, and the graph's may take most of a GPU's memory."""
        run = self
        case = next((case for case in cases if not case.endless), cases[0])
        call = with_numbers(call, run.numbers(case))
        while run.distribution in OVERFLOWING and run.scale > _SMALLEST_SCALE:
            known = truth(call, run.inputs(case))
            if all(map(_mostly_finite, known.eager, known.exact)):
                return run
            run = replace(run, scale=run.scale / 4)
        return run


_SMALLEST_SCALE = 1 / 256
"""Factor at which large numbers are of the size of normal ones."""


def _mostly_finite(eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result of eager is finite at half of the elements at least where float64's, rounded
    to its dtype, is."""
    held = exact.to(eager.dtype).double().isfinite()
    return bool(2 * (held & eager.double().isfinite()).sum() >= held.sum())


def _judge(
    yardstick: Callable[..., Any], case: Case, run: Run, inputs: Tensors, ours: Tensors
) -> Error:
    """Compare results with eager and float64, and with further draws of eager's."""
    further = (truth(yardstick, run.inputs(case, 1000 * draw)) for draw in count(1))
    return compare(ours, truth(yardstick, inputs), run.criterion, case.summed, further)


_OTHER = 0.75
"""Factor of a number of the graph that makes it another one, which is no infinity."""


def check_once(
    kernel: Kernel, module: ModuleType, yardstick: Callable[..., Any], case: Case, run: Run
) -> Error:
    """Check one case with one draw. Raises KernelFault where something is wrong."""
    inputs, numbers = run.inputs(case), run.numbers(case)
    yardstick = with_numbers(yardstick, numbers)
    try:
        if run.device != "cpu":
            with limited(module, case.programs):
                ours, traffic = _launch_twice(kernel, module, inputs, numbers), None
        else:
            with run.counting() as traffic, limited(module, case.programs):
                ours = launch(module, kernel.entry, inputs, numbers)
        error = _judge(yardstick, case, run, inputs, ours)
        check_layouts(yardstick, inputs, ours)
        if traffic:
            _check_traffic(case, traffic.loaded, traffic.stored)
            _check_requests(case, traffic.loads, traffic.stores)
        return error
    except KernelFault as fault:
        raise KernelFault(f"{_drawn(case, run)}: {fault}") from fault


def check_pair_once(
    kernel: Kernel, module: ModuleType, yardstick: Callable[..., Any], case: Case, run: Run
) -> None:
    """Check the gradients of one case with one draw. Raises KernelFault where one is wrong."""
    try:
        with limited(module, case.programs):
            check_gradients(
                kernel, getattr(module, kernel.entry), yardstick, case,
                lambda further: run.inputs(case, 1000 * further), run.criterion,
            )  # fmt: skip
    except KernelFault as fault:
        raise KernelFault(f"gradients: {_drawn(case, run)}: {fault}") from fault


def _drawn(case: Case, run: Run) -> str:
    return f"case {case.name}, seed {run.seed} ({run.distribution})"


def yardstick_of(kernel: Kernel, module: ModuleType) -> Callable[..., Any]:
    """Computation of the model's graph. Raises KernelFault where the file's `reference` is
    another one."""
    if not kernel.yardstick:
        return module.reference
    scope = dict(vars(module))
    exec(compile(kernel.yardstick, f"<the graph of {kernel.name}>", "exec"), scope)
    told, own = (canonical_reference(text) for text in (kernel.yardstick, kernel.text))
    if told != own:
        raise KernelFault("the file's reference is not the model's graph")
    return scope["reference"]


def canonical_reference(text: str) -> str:
    """Body of `reference` in a file, without its docstring and whatever its own names are: the
    model's source names them, and it may have changed since the file was written."""
    made = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    body = next((each for each in made if each.name == "reference"), None)
    if body is None:
        return ""
    inner = [*ast.walk(body)]
    taken = [arg.arg for arg in body.args.args]
    kept = [n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    places = {name: f"{place}" for place, name in enumerate(dict.fromkeys([*taken, *kept]))}
    for node in inner:
        if isinstance(node, ast.Name):
            node.id = places.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = places[node.arg]
    first, *rest = body.body
    said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return ast.dump(ast.Module(rest if said else body.body, [])) + ast.dump(body.args)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(left), _bytes_of(right))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as bytes, whatever the layout or rank."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check(
    kernel: Kernel,
    seeds: int,
    where: str,
    device: str,
    folder: Path,
    criterion: Criterion,
) -> Check:
    """Check every case with every seed; stops at the first failure."""
    cases = [case for case in kernel.cases if device != "cpu" or not case.endless]
    passed = Check(kernel.name, where, True, tuple(map(_describe, cases)), seeds)
    worst, at = Error(), ""
    stepped = 0.0
    counting: Any = nullcontext
    if device == "cpu":
        from fusion_advisor.verify.interpreter import counting
    try:
        module = load_module(kernel.text, folder)
        if not kernel.cases or seeds < 1:
            raise KernelFault("nothing to check: no cases or no seeds")
        if not cases:
            raise KernelFault("sizes that the graph pins are too large for the interpreter")
        yardstick = yardstick_of(kernel, module)
        drawn = [Run(seed, device, criterion, counting) for seed in range(seeds)]
        runs = [run.in_range(yardstick, cases) for run in drawn]
        backward = gradients_of(yardstick, kernel, 0)
        graded = [run.in_range(backward, cases) for run in drawn] if kernel.gradients else runs
        for case in cases:
            few = 2 if case.costly and device == "cpu" else seeds
            for run, pair in list(zip(runs, graded, strict=True))[:few]:
                error = check_once(kernel, module, yardstick, case, run)
                stepped = max(stepped, error.stepped)
                if error.ours >= worst.ours:
                    worst, at = error, _drawn(case, run)
                if kernel.gradients:
                    check_pair_once(kernel, module, yardstick, case, pair)
        if kernel.launches and has_runtime(module):
            small = min(cases, key=lambda case: sum(x.extent for x in case.inputs))
            inputs = Run(0, device, criterion).inputs(small)
            launcher = Launcher(module, kernel, yardstick, small, inputs, criterion)
            launcher.check_refusals()
            if device == "cpu":  # elsewhere the plan of a call before is taken again
                launcher.check_width()
    except KernelFault as fault:
        return replace(passed, passed=False, failure=" ".join(str(fault).split()))
    except Exception as error:  # noqa: BLE001 (the reference may raise anything: it is named)
        return replace(passed, passed=False, failure=f"the check itself failed: {cause(error)}")
    return replace(
        passed, max_error=worst.ours, eager_error=worst.eager, tolerance=worst.tolerance,
        case=at, stepped=stepped,
    )  # fmt: skip


# --- the child -----------------------------------------------------------------------------------


def prepare(where: str) -> tuple[str, str]:
    """Set the process up for `where` (auto, interpreter, gpu); returns its full name and torch's
    device. Raises KernelFault when a GPU is asked for and there is none."""
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    has_gpu = where != "interpreter" and torch.cuda.is_available()
    if has_gpu:
        os.environ.pop("TRITON_INTERPRET", None)
        return f"cuda:{torch.cuda.get_device_name()}", "cuda"
    if where == "gpu":
        raise KernelFault("verification on a GPU was asked for and torch sees none")
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from fusion_advisor.verify.interpreter import install

    install()
    return "interpreter", "cpu"


def main(where: str) -> None:
    """Run the child: `where` is auto, interpreter or gpu."""
    warnings.simplefilter("ignore")
    try:
        place, device = prepare(where)
    except KernelFault as fault:
        missing = str(fault)
        serve({CheckJob: lambda job: Check(job.kernel.name, where, False, failure=missing)})
        return

    def checked(job: CheckJob) -> Check:
        return check(job.kernel, job.seeds, place, device, process_folder(), job.criterion)

    # other children check beside this one
    serve({CheckJob: checked}, torch.cuda.empty_cache if device == "cuda" else None)
