"""Choice between a rewritten graph that means the same under some conditions, as that an input is
without padding, and the graph that serves all inputs.

The conditions are asked once a call, before either graph. One that is read from the GPU makes the
host wait: where the graph can be cut, it is asked before and awaited behind the part that both
graphs begin with, so that the GPU works meanwhile. A call after one that had padding waits for
nothing: it has the graph for all inputs, and what was read of it decides for the next. Under the
capture of a CUDA graph nothing can be read, and the graph for all inputs runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_advisor.dynamo.rewrites.conditions import Answer, Requirement, asked

Run = Callable[..., Any]


def _nothing(*given: Any) -> tuple[()]:
    return ()


def choosing(
    conditions: Sequence[Requirement],
    first: bool,
    compiled: Callable[[bool], Run],
    compiled_later: Callable[[bool], Run],
    before: Run = _nothing,
) -> Run:
    """Callable that runs the rewritten graph where the conditions hold, and the graph for all
    inputs elsewhere; after `before`, the part that both begin with, they get the inputs and what it
    gave. `first` is the answer for the inputs that are compiled for: its graph is `compiled` at
    once, the other by `compiled_later`, as its first call comes."""
    runs = {first: compiled(first)}
    last = Answer(first)

    def run(*given: Any) -> Any:
        nonlocal last
        answer, known = asked(conditions, given), last
        between = before(*given)
        # of a call before it is known, or nearly, while that of this call is far from it
        kept = (not answer.waits or known.holds()) and answer.holds()
        last = answer
        if kept not in runs:
            runs[kept] = compiled_later(kept)
        return runs[kept](*given, *between)

    return run
