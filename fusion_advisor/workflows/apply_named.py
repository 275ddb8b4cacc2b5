"""Workflow of `fusion-advisor apply MODEL`: what `apply` would place in a model that is named as on
the command line, found in a child process, where nobody's code can do harm. Imports no torch where
the child is only asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusion_advisor.frontend.child import ChildJob, in_child
from fusion_advisor.ir.recording_file import names_json
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.errors import AdvisorError, UsageError
from fusion_advisor.workflows.placed import Placed

NamedInner = Literal["eager", "inductor"]


@dataclass(frozen=True)
class DryRunJob:
    """Request for a dry run to a child."""

    model: str
    scenario: Scenario
    inner: NamedInner
    device: str
    rules: tuple[str, ...]
    strict: bool


@dataclass(frozen=True)
class NamedPlacement:
    """Kernels that `apply` would place in a named model, and what was assumed of its run."""

    placed: Placed
    assumed: tuple[str, ...]


def placed_in_named(request: Request, inner: NamedInner) -> NamedPlacement:
    """Account of what `apply` would place in a named model. Raises UsageError for a model or a
    scenario that `apply` does not take, and CaptureError for a model that cannot be run."""
    _refuse(request)
    device, chosen = choose_device(request.device, load_rulebook(request.rules), request.gpus)
    job = DryRunJob(
        request.model, request.scenario, inner, device.name,
        tuple(map(str, request.rules)), request.strict,
    )  # fmt: skip
    asked = ChildJob(f"{__name__}:placed_for", to_json(job))
    with in_child(asked, request.model, request.limits, request.debug) as answered:
        found = from_json(NamedPlacement, answered())
    return NamedPlacement(found.placed, (chosen, *found.assumed))


def _refuse(request: Request) -> None:
    """Raise UsageError for what `apply` does not take."""
    model, asked = request.model, request.scenario
    if names_json(model) or model.endswith(".pt2"):
        raise UsageError(f"apply {model}: has a graph, not a model to call; give the model")
    if asked.gradients:
        raise UsageError("--mode train: kernels run without gradients alone; leave --mode out")
    if asked.autocast:
        raise UsageError(
            "--autocast: casts differ where there is no GPU; give --dtype, or call "
            "fusion_advisor.apply(model) on the GPU"
        )


def placed_for(given: str) -> str:
    """Result for a `DryRunJob`, both as JSON: what the child of `placed_in_named` does."""
    from functools import partial

    from torch._dynamo.exc import BackendCompilerFailed

    from fusion_advisor.dynamo.backend import fusion_advisor
    from fusion_advisor.frontend.loading import load
    from fusion_advisor.frontend.user_model import failure
    from fusion_advisor.workflows.apply import Gathered
    from fusion_advisor.workflows.dry_run import call_on_fakes

    job = from_json(DryRunJob, given)
    if job.strict:
        os.environ["FUSION_ADVISOR_STRICT"] = "1"
    loaded, placed = load(job.model, job.scenario), Placed()
    backend = partial(
        fusion_advisor, on_outcome=Gathered(placed).add, dry=True,
        options={"inner": job.inner, "device": job.device, "rules": tuple(map(Path, job.rules))},
    )  # fmt: skip
    dynamic = True if job.scenario.dynamic else None
    try:
        call_on_fakes(
            loaded.module, loaded.args, loaded.kwargs, loaded.fake, backend, dynamic=dynamic
        )
    except BackendCompilerFailed as error:  # under `strict`: a fault of ours
        raise AdvisorError(str(error.inner_exception)) from error
    except AdvisorError:
        raise
    except Exception as error:
        advice = loaded.hint or "correct the model or its inputs"
        raise failure(f"running {loaded.source}", error, advice) from error
    return to_json(NamedPlacement(placed, tuple(loaded.assumed)))
