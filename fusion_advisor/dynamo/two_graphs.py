"""Choice between a rewritten graph that means the same under some conditions, as that an input is
without padding, and the graph that serves all inputs.

The conditions are asked once a call, before either graph. One that is read from the GPU makes the
host wait; under the capture of a CUDA graph nothing can be read, and the graph for all inputs runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_advisor.dynamo.rewrites import Rewritten

Run = Callable[..., Any]


def choosing(
    short: Rewritten,
    whole: Rewritten,
    inputs: Sequence[Any],
    compiled: Callable[[Rewritten], Run],
    compiled_later: Callable[[Rewritten], Run],
) -> Run:
    """Callable that runs `short` where it serves the inputs, and `whole` elsewhere. What these
    inputs ask for is `compiled` at once; the other graph by `compiled_later`, as its first call
    comes."""
    first = short.serves(inputs)
    runs: dict[bool, Run] = {first: compiled(short if first else whole)}

    def run(*given: Any) -> Any:
        use_short = short.serves(given)
        if use_short not in runs:
            runs[use_short] = compiled_later(short if use_short else whole)
        return runs[use_short](*given)

    return run
