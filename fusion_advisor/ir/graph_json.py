"""A `Graph` as JSON and back, exactly: ints, floats (`Infinity`, `NaN`), bools and tuples survive.

Pydantic cannot build a schema for the recursive `Arg`, so the few records are spelled out here.
A reference is `{"node": ..., "output": ...}`, a torch constant `{"text": ...}`, a tuple a list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from fusion_advisor.ir.graph import Arg, Graph, Mask, Node, Ref, Source, Symbol, Tensor
from fusion_advisor.ir.source_trace import Activation, Evaluation, Held, Moment, Span, Trail


def graph_to_json(graph: Graph) -> bytes:
    """The graph as one line of JSON."""
    return json.dumps(graph_to_data(graph)).encode()


def graph_from_json(text: bytes | str) -> Graph:
    """The graph that `graph_to_json` wrote; ValueError or KeyError when it is something else."""
    return graph_from_data(json.loads(text))


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """The graph as what JSON can hold, for a file that has more in it."""
    return {
        "nodes": [_encode_node(node) for node in graph.nodes],
        "outputs": [[ref.node, ref.output] for ref in graph.outputs],
        "captured_by": graph.captured_by,
        "graph_breaks": graph.graph_breaks,
        "differs_from_eager": graph.differs_from_eager,
        "source": graph.source,
        "assumed": graph.assumed,
        "trail": _encode_trail(graph.trail) if graph.trail else None,
        "files": graph.files,
        "masks": [[mask.node, mask.says, mask.why] for mask in graph.masks],
        "built": graph.built,
        "not_run": graph.not_run,
    }


def graph_from_data(content: Mapping[str, Any]) -> Graph:
    """The graph that `graph_to_data` gave, from JSON or not."""
    return Graph(
        nodes=tuple(_decode_node(node) for node in content["nodes"]),
        outputs=tuple(Ref(node, output) for node, output in content["outputs"]),
        captured_by=content["captured_by"],
        graph_breaks=tuple(content["graph_breaks"]),
        differs_from_eager=tuple(content["differs_from_eager"]),
        source=content["source"],
        assumed=tuple(content["assumed"]),
        trail=_decode_trail(content["trail"]) if content.get("trail") else None,
        files=tuple(content.get("files", ())),
        masks=tuple(Mask(*mask) for mask in content.get("masks", ())),
        built=tuple(content.get("built", ())),
        not_run=tuple(content.get("not_run", ())),
    )


def _encode_trail(trail: Trail) -> dict[str, Any]:
    def span(place: Span | None) -> list[int] | None:
        return [place.line, place.column, place.end_line, place.end_column] if place else None

    return {
        "activations": [
            [a.file, a.function, a.caller, span(a.place), a.value] for a in trail.activations
        ],
        "steps": [
            [step.activation, step.line, step.names]
            if isinstance(step, Moment)
            else [step.activation, span(step.place)]
            for step in trail.steps
        ],
        "placeholders": trail.placeholders,
        "values": trail.values,
        "modules": {
            path: [held.kind, held.file, held.plain] for path, held in trail.modules.items()
        },
    }


def _decode_trail(content: dict[str, Any]) -> Trail:
    return Trail(
        activations=tuple(
            Activation(file, function, caller, Span(*place) if place else None, value)
            for file, function, caller, place, value in content["activations"]
        ),
        steps=tuple(
            Moment(*step) if len(step) > 2 else Evaluation(step[0], Span(*step[1]))
            for step in content["steps"]
        ),
        placeholders=tuple(content["placeholders"]),
        values={word: (node, output) for word, (node, output) in content["values"].items()},
        modules={path: Held(*held) for path, held in content["modules"].items()},
    )


def _encode_node(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.op,
        "kind": node.kind,
        "args": [_encode(arg) for arg in node.args],
        "kwargs": [[name, _encode(arg)] for name, arg in node.kwargs],
        "outputs": [_encode_tensor(tensor) for tensor in node.outputs],
        "mutates": node.mutates,
        "source": [node.source.file, node.source.line] if node.source else None,
        "module": node.module,
        "step": node.step,
        "fx": node.fx,
    }


def _decode_node(content: dict[str, Any]) -> Node:
    return Node(
        name=content["name"],
        op=content["op"],
        kind=content["kind"],
        args=tuple(_decode(arg) for arg in content["args"]),
        kwargs=tuple((name, _decode(arg)) for name, arg in content["kwargs"]),
        outputs=tuple(_decode_tensor(tensor) for tensor in content["outputs"]),
        mutates=tuple(content["mutates"]),
        source=Source(*content["source"]) if content["source"] else None,
        module=content["module"],
        step=content.get("step"),
        fx=content.get("fx", ""),
    )


def _encode_tensor(tensor: Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    return [tensor.shape, tensor.stride, tensor.dtype, tensor.storage, tensor.offset, tensor.dims]


def _decode_tensor(content: list[Any] | None) -> Tensor | None:
    if content is None:
        return None
    shape, stride, dtype, storage, offset, dims = content
    return Tensor(tuple(shape), tuple(stride), dtype, storage, offset, tuple(dims))


def _encode(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"node": arg.node, "output": arg.output}
    if isinstance(arg, Symbol):
        return {"text": arg.text}
    if isinstance(arg, tuple):
        return [_encode(item) for item in arg]
    return arg


def _decode(content: Any) -> Arg:
    if isinstance(content, dict):
        fields = cast("dict[str, Any]", content)
        return Symbol(fields["text"]) if "text" in fields else Ref(fields["node"], fields["output"])
    if isinstance(content, list):
        return tuple(_decode(item) for item in cast("list[Any]", content))
    return content
