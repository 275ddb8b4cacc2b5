"""Graph as JSON and back, exactly: floats (`Infinity`, `NaN`), bools and tuples survive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion_advisor.ir.graph import Graph
from fusion_advisor.support.codec import from_data, from_json, to_data, to_json


def graph_to_json(graph: Graph) -> bytes:
    """Encode a graph as one line of JSON."""
    return to_json(graph).encode()


def graph_from_json(text: bytes | str) -> Graph:
    """Decode a graph that `graph_to_json` wrote. Raises ValueError for anything else."""
    return from_json(Graph, text)


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """Encode a graph as dicts and lists for a JSON file that has more in it."""
    return to_data(graph)


def graph_from_data(content: Mapping[str, Any]) -> Graph:
    """Decode a graph from the data of `graph_to_data`, before or after JSON. Raises ValueError for
    anything else."""
    return from_data(Graph, content)
