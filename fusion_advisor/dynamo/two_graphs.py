"""Choice between a rewritten graph that means the same under some conditions, as that an input is
without padding, and the graph that serves all inputs.

The conditions are asked once a call, before either graph. One that is read from the GPU makes the
host wait: where the graph can be cut, it is asked before and awaited behind the part that both
graphs begin with, so that the GPU works meanwhile. Under the capture of a CUDA graph nothing can be
read, and the graph for all inputs runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_advisor.dynamo.rewrites.conditions import Requirement, asked, hold

Run = Callable[..., Any]


def choosing(
    conditions: Sequence[Requirement],
    inputs: Sequence[Any],
    compiled: Callable[[bool], Run],
    compiled_later: Callable[[bool], Run],
) -> Run:
    """Callable that runs the rewritten graph where the conditions hold, and the graph for all
    inputs elsewhere. What these inputs ask for is `compiled` at once, told whether the conditions
    hold; the other graph by `compiled_later`, as its first call comes."""
    first = hold(conditions, inputs)
    runs = {first: compiled(first)}

    def run(*given: Any) -> Any:
        kept = hold(conditions, given)
        if kept not in runs:
            runs[kept] = compiled_later(kept)
        return runs[kept](*given)

    return run


def choosing_behind(
    conditions: Sequence[Requirement],
    before: Run,
    first: bool,
    compiled: Callable[[bool], Run],
    compiled_later: Callable[[bool], Run],
) -> Run:
    """Callable that runs the part of a graph before a cut, and behind it the part for the answer,
    which gets the inputs and what the first part gave. `first` is the answer for the inputs that
    the graph is compiled for, whose part is compiled at once."""
    runs = {first: compiled(first)}

    def run(*given: Any) -> Any:
        answer = asked(conditions, given)
        between = before(*given)
        kept = answer()
        if kept not in runs:
            runs[kept] = compiled_later(kept)
        return runs[kept](*given, *between)

    return run
