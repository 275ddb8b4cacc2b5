"""A model's file run on numbers, as a child process of `trial`: the original, or as patched.

A request is a `RunJob`, a reply is a `RunResult`. The original draws its inputs, and leaves its
weights and for each run inputs, results and those of a float64 run in a folder; the patched model
takes the weights and inputs from there, and its results are held to both. Both begin every job with
those weights. A job may ask for gradients: a backward pass from all results then follows, and the
gradients of parameters and inputs are held as results are. Kernels run through Triton's
interpreter, with a GPU there as without one: a patch is the same on every machine. They may not
fall back, but where the model and its inputs are cast to another dtype than they were asked for in,
or have other sizes.
"""
# A model file is somebody's code: everything that comes out of it is Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import copy
import os
import re
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.frontend.child import relocate
from fusion_advisor.frontend.emitted_calls import references
from fusion_advisor.frontend.user_model import (
    OnHost,
    defaults,
    found_in,
    leading_sizes,
    named_inputs,
    resized,
    with_size,
)
from fusion_advisor.ir.scenario import Scenario, Sizes
from fusion_advisor.measure.protocol import RunJob, RunResult
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.support.worker import serve
from fusion_advisor.verify.check_child import prepare
from fusion_advisor.verify.launch_counter import counted
from fusion_advisor.verify.references import Float64Mode
from fusion_advisor.verify.stepping import truth_of
from fusion_advisor.verify.tolerance import TooFew, Truth, compare, missing_draws


@dataclass
class _Model:
    """A model that is loaded once for all of its jobs."""

    module: torch.nn.Module
    draw: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


_Given = tuple[tuple[Any, ...], dict[str, Any]]
_SEEDS_APART = 1000
"""Distance between the seeds of further draws."""


def _loaded(job: RunJob, device: str) -> _Model:
    if job.moved:
        relocate(*job.moved)
    with defaults(job.scenario), _on(device), _marked():
        torch.manual_seed(0)
        module, draw, *_ = found_in(job.model, job.scenario.sizes)
        for each in (*module.parameters(), *module.buffers()):
            held = each.data
            if (numbers := _written(held)) is not held:
                held.copy_(numbers)
    return _Model(module.to(device).train(job.scenario.mode == "train"), draw)


def _on(device: str) -> AbstractContextManager[Any]:
    """Context in which queries of the user's code for CUDA are answered by the host, where there is
    no CUDA."""
    return OnHost() if device == "cpu" else nullcontext()


@contextmanager
def _marked() -> Generator[None]:
    """Memory that nothing was written to holds NaN, and the largest integer: what lay there before
    may hide any error, as numbers do whose squares overflow."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _original(job: RunJob, model: _Model, place: str, device: str) -> RunResult:
    """Runs the original, with the references of kernels that it has already, and leaves what the
    patched model is held to."""
    folder = Path(job.folder)
    try:
        _same_weights(job, model, folder)
        module = _cast(model.module, job.cast)
        wide = _cast(module, "float64")

        def drawn(size: tuple[int, int], seed: int) -> tuple[_Given, Truth]:
            torch.manual_seed(seed)
            with defaults(job.scenario), _on(device), _marked():
                given = _asked(model, job.scenario, device)
                given = _sized(resized(given, job.scenario.sizes), size, device)
            given = _leaves(_in_dtype(given, job.cast or job.scenario.dtype))
            return given, truth_of(
                partial(_results, job, module, given, seed, device),
                partial(_results, job, wide, _in_dtype(given, "float64"), seed, device, wide=True),
            )

        for number, (size, seed) in enumerate(_runs(job)):
            given, known = drawn(size, seed)
            missing = [missing_draws(each, job.criterion) for each in known.eager]
            draws = range(1, 1 + min(max(missing, default=0), job.further))
            further = [drawn(size, seed + _SEEDS_APART * draw)[1] for draw in draws]
            torch.save((given, known, further), folder / f"{job.cast}{number}.pt")
    except Exception as error:  # noqa: BLE001 the user's code, at sizes that it may not know
        return RunResult(place, unfit=f"the original does not run so: {cause(error)}")
    return RunResult(place)


def _patched(job: RunJob, model: _Model, place: str, device: str) -> RunResult:
    """Runs the patched model on what the original left."""
    folder = Path(job.folder)
    lenient = bool(job.cast) or job.scenario.sizes != Sizes()
    strict = {"FUSION_ADVISOR_STRICT": "0" if lenient else "1"}
    with counted(Path(job.kernels)) as launches, mock.patch.dict(os.environ, strict):
        try:
            _same_weights(job, model, folder)
            module = _cast(model.module, job.cast)
            for number, (_, seed) in enumerate(_runs(job)):
                kept = folder / f"{job.cast}{number}.pt"
                given, known, further = torch.load(kept, weights_only=False)
                found = _results(job, module, given, seed, device)
                names = [name for name, _ in _trained(module, given)] if job.gradients else []
                with _naming(names, len(found)):
                    compare(found, known, job.criterion, job.summed, further)
        except KernelFault as fault:
            return RunResult(place, wrong=str(fault), few=isinstance(fault, TooFew))
        except Exception as error:  # noqa: BLE001 the user's code, edited
            trace = traceback.extract_tb(error.__traceback__)
            # of several kernels in one file each has a function of its own to fall back
            if not lenient and any(frame.name.endswith("fall_back") for frame in trace):
                return RunResult(place, unfit=cause(error))
            return RunResult(place, wrong=cause(error))
        return RunResult(place, launches.total())


_DTYPES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "bfloat16": torch.nn.Module.bfloat16,
    "float16": torch.nn.Module.half,
    "float32": torch.nn.Module.float,
    "float64": torch.nn.Module.double,
}


def _cast(module: torch.nn.Module, dtype: str) -> torch.nn.Module:
    """A copy with its floats in a dtype; the module itself where none is asked for."""
    return _DTYPES[dtype](copy.deepcopy(module)) if dtype else module


def _same_weights(job: RunJob, model: _Model, folder: Path) -> None:
    """The weights that the original was built with: a run may change them."""
    built = "".join(f"_{other}_for_{one}" for one, other in job.scenario.sizes.built)
    weights = folder / f"weights{built}.pt"
    if weights.exists():
        model.module.load_state_dict(torch.load(weights, weights_only=False))
    else:
        torch.save(model.module.state_dict(), weights)


def _runs(job: RunJob) -> list[tuple[tuple[int, int], int]]:
    return [(size, seed) for size in job.sizes for seed in range(1, job.seeds + 1)]


def _results(
    job: RunJob,
    module: torch.nn.Module,
    given: _Given,
    seed: int,
    device: str,
    *,
    wide: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The tensors that a forward pass returns; with the gradients that a backward pass leaves where
    they are asked for: one without elements where it leaves none."""
    given = copy.deepcopy(given)
    autocast = job.scenario.autocast
    dtype = getattr(torch, autocast) if autocast and not wide else None
    torch.manual_seed(seed)
    with (
        torch.set_grad_enabled(job.gradients), _on(device),
        defaults(Scenario(dtype="float64" if wide else job.scenario.dtype)),
        Float64Mode() if wide else nullcontext(),
    ):  # fmt: skip
        # a leaf that requires a gradient may not be written in place, what is computed may
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            result = module(*args, **kwargs)
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        if not job.gradients:
            return tuple(results)
        return (*(x.detach() for x in results), *_gradients(module, given, results, seed))


def _gradients(
    module: torch.nn.Module, given: _Given, results: Sequence[torch.Tensor], seed: int
) -> list[torch.Tensor]:
    """Gradients of parameters and inputs, from random gradients of all results: odd eighths, which
    are the same in every dtype, and never 0."""
    roots = [each for each in results if each.requires_grad]
    if not roots:
        raise ValueError("no result depends on a tensor that requires a gradient")
    drawn = torch.Generator().manual_seed(seed)
    eighths = (torch.randint(-8, 8, x.shape, generator=drawn) * 2 + 1 for x in roots)
    arriving = [numbers.to(x) / 8 for numbers, x in zip(eighths, roots, strict=True)]
    module.zero_grad()
    torch.autograd.backward(roots, arriving)
    leaves = [leaf for _, leaf in _trained(module, given)]
    return [x.new_empty(0) if x.grad is None else x.grad.clone() for x in leaves]


def _trained(module: torch.nn.Module, given: _Given) -> list[tuple[str, torch.Tensor]]:
    """Parameters and inputs that require a gradient, by what to call them."""
    inputs = pytree.tree_flatten_with_path(given)[0]
    named = [
        *module.named_parameters(),
        *((f"input {_key(path)}", x) for path, x in inputs if isinstance(x, torch.Tensor)),
    ]
    return [(name, each) for name, each in named if each.requires_grad]


def _key(path: Sequence[Any]) -> str:
    """The place of an input among the arguments: behind the first key, which tells how it is
    passed."""
    return pytree.keystr(tuple(path[1:])).strip("[]'")


@contextmanager
def _naming(names: Sequence[str], count: int) -> Generator[None]:
    """Let faults of the last of `count` outputs, which are gradients, name what they are of."""
    try:
        yield
    except KernelFault as fault:
        first = count - len(names)

        def name(found: re.Match[str]) -> str:
            number = int(found[1]) - first
            return f"gradient of {names[number]}" if number >= 0 else found[0]

        raise type(fault)(re.sub(r"^output (\d+)", name, str(fault))) from fault


def _leaves(given: _Given) -> _Given:
    """Inputs that require a gradient where they say so; where none does, all floats."""
    floats = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor) and _floats(x)]
    said = any(x.requires_grad for x in floats)
    return pytree.tree_map_only(
        torch.Tensor,
        lambda x: x.detach().requires_grad_(_floats(x) and (x.requires_grad or not said)),
        given,
    )


def _floats(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.element_size() > 1


def _asked(model: _Model, scenario: Scenario, device: str) -> _Given:
    """Inputs as the model's file draws them, with those that the scenario names, at its batch and
    sequence length."""
    given = named_inputs(model.module, *model.draw(), scenario)
    return _sized(given, (scenario.batch or 0, scenario.seq or 0), device)


def _sized(given: _Given, size: tuple[int, int], device: str) -> _Given:
    """Inputs whose first and second dimensions, where they are as long as those of the first
    tensor, have other lengths: their own elements, again from the start where these do not do.
    Numbers that say little, as those of `torch.empty`, are drawn anew."""
    leading = leading_sizes(given)

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for dim, wanted in enumerate(size):
            if wanted and value.dim() > dim and value.shape[dim] == leading[dim] != 0:
                value = with_size(value, dim, wanted)
        if value.is_floating_point() and value.numel() > 1 and _says_little(value):
            value = torch.randn(value.shape).to(value.dtype)
        return _written(value).to(device)

    return pytree.tree_map(changed, given)


def _says_little(value: torch.Tensor) -> bool:
    """Whether numbers are all one, not finite, or such that their squares may overflow."""
    largest = value.abs().max()
    return not 1e-20 < float(largest) < 1e15 or bool((value == value.flatten()[0]).all())


def _written(value: torch.Tensor) -> torch.Tensor:
    """With numbers where `_marked` found none: random ones, and the index 0."""
    if value.dtype in (torch.int32, torch.int64):
        unwritten = value == torch.iinfo(value.dtype).max
    elif value.is_floating_point() and value.element_size() > 1:
        unwritten = value.isnan()
    else:
        return value
    if not unwritten.any():
        return value
    numbers = torch.randn(value.shape) if value.is_floating_point() else torch.zeros(value.shape)
    return torch.where(unwritten, numbers.to(value), value)


def _in_dtype(given: _Given, dtype: str | None) -> _Given:
    """Inputs with their floats in a dtype, if one is asked for."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not (floating and dtype):
            return value
        return value.detach().to(getattr(torch, dtype)).requires_grad_(value.requires_grad)

    return pytree.tree_map(cast, given)


def main() -> None:
    """The child's life: one model, built once with the same numbers, and its jobs."""
    warnings.simplefilter("ignore")
    place, device = prepare("interpreter")
    models: dict[object, _Model] = {}

    def ran(job: RunJob) -> RunResult:
        try:
            if job.scenario.sizes.built not in models:
                models[job.scenario.sizes.built] = _loaded(job, device)
        except Exception as error:  # noqa: BLE001 the user's code
            return RunResult(place, unfit=f"it cannot be built: {cause(error)}")
        with nullcontext() if job.moved else references():
            run = _patched if job.moved else _original
            return run(job, models[job.scenario.sizes.built], place, device)

    serve({RunJob: ran})
