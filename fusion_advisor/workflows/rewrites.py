"""Workflow that finds the rewrites of a model: Dynamo captures it on fake tensors, in the process
that has just captured its launches, and only where these have what a rewrite begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_advisor.frontend.child import ChildJob
from fusion_advisor.ir.graph import Graph, Rewrite
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.errors import AdvisorError

if TYPE_CHECKING:
    import torch

    from fusion_advisor.frontend.user_model import Loaded
    from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class RewritesJob:
    """Request for the rewrites by some rules; logits of `large` bytes may be worth one."""

    rules: tuple[str, ...]
    large: float


def finding_rewrites(rules: Sequence[Path]) -> ChildJob | None:
    """Step that follows a capture in its child: `with_rewrites`; None where the room of the
    rewrites is deleted."""
    if find_spec("fusion_advisor.dynamo") is None:
        return None
    from fusion_advisor.rulebook.load import load_rulebook  # which most children do not need

    limits = load_rulebook(rules).rewrites["linear-cross-entropy"].limits
    large = limits["least"].value * limits["chunk"].count
    job = RewritesJob(tuple(map(str, rules)), large)
    return ChildJob(f"{__name__}:with_rewrites", to_json(job))


def with_rewrites(given: str, loaded: Loaded, scenario: Scenario, graph: Graph) -> Graph:
    """Graph with the places that rewrites take, or with why they were not looked for; `given` is a
    `RewritesJob`, as JSON. Nothing that happens here is an error of the capture."""
    from fusion_advisor.dynamo.begins import may_begin

    job = from_json(RewritesJob, given)
    if not may_begin(graph, job.large):
        return graph
    from fusion_advisor.frontend.export import unwrapped
    from fusion_advisor.frontend.joint import followed_by
    from fusion_advisor.frontend.user_model import failure
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.workflows.dry_run import call_on_fakes

    if loaded.program is not None:
        return replace(graph, not_rewritten="an exported program has no Python for Dynamo")
    if scenario.autocast:
        return replace(graph, not_rewritten="autocast casts otherwise where there is no GPU")
    seen = _Seen(load_rulebook(tuple(map(Path, job.rules))))
    model, _ = unwrapped(loaded.module)
    dynamic = True if scenario.dynamic else None
    why = ""
    try:
        with followed_by(model, loaded.loss if scenario.trains else None):
            call_on_fakes(model, loaded.args, loaded.kwargs, loaded.fake, seen, dynamic=dynamic)
    except AdvisorError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 whatever Dynamo or the model raises is told
        why = str(failure("Dynamo's capture", error, "see what torch.compile says of it"))
    if not seen.graphs and not why:
        why = "Dynamo captures no graph of this model; see what TORCH_LOGS=graph_breaks says of it"
    return replace(graph, rewrites=tuple(dict.fromkeys(seen.found)), not_rewritten=why)


class _Seen:
    """Backend of torch.compile that notes rewrites, and runs graphs as they are."""

    def __init__(self, rulebook: Rulebook) -> None:
        self.graphs = 0
        self.found: list[Rewrite] = []
        self._rulebook = rulebook

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from fusion_advisor.dynamo.rewrites import rewrite
        from fusion_advisor.dynamo.rewrites.written import described

        self.graphs += 1
        done = rewrite(module, inputs, self._rulebook, chunked_loss=True)
        self.found += described(module, done)
        return module.forward
