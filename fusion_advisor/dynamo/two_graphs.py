"""Choice between a rewritten graph that means the same under some conditions, as that an input is
without padding, and the graph that serves all inputs.

The conditions are asked once a call, before either graph. One that is read from the GPU makes the
host wait; under the capture of a CUDA graph nothing can be read, and the graph for all inputs runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_advisor.dynamo.rewrites.conditions import Requirement, hold

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
