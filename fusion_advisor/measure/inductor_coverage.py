"""Coverage of Inductor's kernels: the nodes that each kernel covers, and Inductor's own reasons for
not fusing.

Inductor keeps, through every pass, from which line of the compiled function an operation comes.
A function with one node a line is therefore enough to name kernels by nodes. What is read are
Inductor's records of provenance (`trace.provenance_tracking_level`) and its log of fusions, in
torch 2.11 and 2.13.
"""

# Inductor's internals are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ast
import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fusion_advisor.measure.protocol import Apart, InductorRun

Lines = Mapping[tuple[str, int], str]
"""Node on each line of a file."""

_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_LONGEST = 300
"""Limit on the characters of a reason: some reasons list every dependency."""


def lines_of(function: Callable[..., Any], nodes: Sequence[str]) -> dict[tuple[str, int], str]:
    """Line of each node in a function whose statements `name = call(...)` are the nodes, in their
    order. Empty where the numbers of statements and nodes differ."""
    source, first = inspect.getsourcelines(function)
    (defined,) = ast.parse(textwrap.dedent("".join(source))).body
    assert isinstance(defined, ast.FunctionDef)
    calls = [
        statement.lineno + first - 1
        for statement in defined.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    ]
    if len(calls) != len(nodes):
        return {}
    file = function.__code__.co_filename
    return {(file, line): node for line, node in zip(calls, nodes, strict=True)}


@contextmanager
def watched(lines: Lines) -> Generator[list[InductorRun]]:
    """Collect Inductor's kernels of each graph that is compiled within the block; Inductor's cache
    is off, since it keeps no reasons."""
    from torch._functorch import config as autograd
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found: list[InductorRun] = []
    with _refusals() as refused:

        def written(code: str) -> None:
            del code
            try:
                found.append(_made(lines, refused))
            except (AttributeError, KeyError) as error:
                found.append(InductorRun(unknown=f"Inductor's records are others: {error!r}"))
            refused.clear()

        with (
            config.patch({"trace.provenance_tracking_level": 2, "fx_graph_cache": False}),
            autograd.patch(enable_autograd_cache=False),
            mock.patch.object(GraphLowering, "save_output_code", written),
        ):
            yield found


def _made(lines: Lines, refused: Iterable[tuple[str, str, str]]) -> InductorRun:
    """Kernels of the graph whose code was just written."""
    from torch._inductor import debug
    from torch._inductor.virtualized import V

    scheduler: Any = V.graph.scheduler
    kernels = tuple(
        (name.rpartition(":")[0], _nodes(traces, lines))
        for name, traces in debug._inductor_kernel_stack_trace.items()
    )

    def operations(name: str) -> list[str]:
        """Names of the operations that a fused node was made of."""
        return [part for part in re.findall(r"[a-z]+\d+", name) if part in scheduler.name_to_node]

    def covered(names: Iterable[str]) -> tuple[str, ...]:
        operations = (scheduler.name_to_node[name].node for name in names)
        origins = [one for node in operations if node is not None for one in node.get_origins()]
        return _nodes([one.stack_trace or "" for one in origins], lines)

    apart: dict[Apart, None] = {}
    for first, second, why in refused:
        sides = operations(first), operations(second)
        ends = {scheduler.name_to_fused_node[name] for side in sides for name in side}
        if all(sides) and len(ends) > 1:  # else they came together in the end
            apart[Apart(covered(sides[0]), covered(sides[1]), why)] = None
    return InductorRun(kernels, tuple(apart))


def _nodes(traces: Iterable[str], lines: Lines) -> tuple[str, ...]:
    """Nodes that stack traces come from, in the function's order: for each trace the innermost
    frame on a line of the function."""
    frames = ([(file, int(line)) for file, line in _FRAME.findall(trace)] for trace in traces)
    inner = (next((at for at in reversed(some) if at in lines), None) for some in frames)
    found = {at for at in inner if at is not None}
    return tuple(lines[at] for at in lines if at in found)


@contextmanager
def _refusals() -> Generator[list[tuple[str, str, str]]]:
    """Collect the pairs that Inductor's scheduler does not fuse, by its names, and why."""
    found: list[tuple[str, str, str]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            refusal: Any = record.msg
            if type(refusal).__name__ == "WhyNoFuse":
                why = " ".join((refusal.reason % refusal.args).split())
                found.append((refusal.name1, refusal.name2, why[:_LONGEST]))

    reader = Reader(logging.DEBUG)
    logger = logging.getLogger("torch._inductor.scheduler.__fusion")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.addHandler(reader)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(reader)
        logger.setLevel(level)
        logger.propagate = propagate
