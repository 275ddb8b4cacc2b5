"""Choice between a rewritten graph that means the same under some conditions, as that an input is
without padding, and the graph that serves all inputs.

The conditions are asked once a call, before either graph. One that is read from the GPU makes the
host wait: where the rewritten graph can be cut, it is asked before and awaited behind the first
part, so that the GPU works meanwhile; that part is done in vain where there is padding. A call
after one that had padding waits for nothing: it has the graph for all inputs, and what was read of
it decides for the next. Under the capture of a CUDA graph nothing can be read, and the graph for
all inputs runs.
"""
# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from fusion_advisor.dynamo.rewrites.conditions import Answer, Requirement, asked

Run = Callable[..., Any]
Which = Literal["for all", "before", "rewritten"]
"""Graph for all inputs; part of the rewritten one before its cut; the rewritten one, or its part
behind the cut, which gets the inputs and what the part before gave."""


def choosing(
    conditions: Sequence[Requirement],
    inputs: Sequence[Any],
    compiled: Mapping[Which, Run],
    later: Callable[[Which], Run],
    *,
    parted: bool = False,
) -> Run:
    """Callable that runs the rewritten graph where the conditions hold, and the graph for all
    inputs elsewhere. `compiled` has the graphs that `inputs` need; the others are compiled by
    `later`, as the first call of each comes. `parted`: the rewritten graph is cut."""
    runs = dict(compiled)
    generators = list(_generators(inputs)) if parted else []
    last = Answer("rewritten" in compiled)

    def graph(which: Which) -> Run:
        if which not in runs:
            runs[which] = later(which)
        return runs[which]

    def run(*given: Any) -> Any:
        nonlocal last
        answer, before = asked(conditions, given), last
        last = answer
        # the answer of the call before is known, or nearly, while that of this one is far from it
        if not answer.met or (answer.waits and not before.holds()):
            return graph("for all")(*given)
        if not parted:
            return graph("rewritten" if answer.holds() else "for all")(*given)
        states = [each.get_state() for each in generators]
        between = graph("before")(*given)
        if answer.holds():
            return graph("rewritten")(*given, *between)
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)  # what the part before drew is drawn again
        return graph("for all")(*given)

    return run


def _generators(inputs: Sequence[Any]) -> Iterator[torch.Generator]:
    """Generators of random numbers that a graph with these inputs may draw from."""
    yield torch.default_generator
    for device in {e.device for e in inputs if isinstance(e, torch.Tensor) and e.is_cuda}:
        yield torch.cuda.default_generators[device.index]
