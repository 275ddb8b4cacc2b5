"""Launches that compute in float64, and where that begins."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import MOST_TOLD, Advice, Model, counted, mark
from fusion_advisor.ir.graph import Ref


def find(model: Model) -> Iterator[Advice]:
    """One for the model."""
    flow = model.flow
    wide = [i for i in model.launches if model.cost(i).dtype == "float64"]
    if not wide:
        return
    begins = [i for i in model.launches if _makes(model, i) and not _reads(model, i)]
    read = (model.origin(ref) for i in wide for ref in _reads(model, i))
    given = dict.fromkeys(node.name for node in read if node.kind != "call")
    evidence = [
        f"it begins at {flow.nodes[i].name} ({flow.nodes[i].op})" for i in begins[:MOST_TOLD]
    ]
    evidence += [f"{name} is given in float64" for name in list(given)[:MOST_TOLD]]
    yield Advice(
        "float64",
        f"{counted(wide, 'kernel')} in float64: twice the bytes of float32 at half its rate"
        " or far less; a Python or NumPy constant may be the cause",
        model.time_us(wide) / 2,
        model.sources([*begins, *wide]),
        tuple(evidence),
        mark("float64"),
    )


def _makes(model: Model, number: int) -> bool:
    outputs = model.flow.nodes[number].outputs
    return any(tensor is not None and tensor.dtype == "float64" for tensor in outputs)


def _reads(model: Model, number: int) -> list[Ref]:
    """The operands in float64."""
    tensors = model.flow.annotated.tensors
    return [ref for ref in model.flow.operands[number] if tensors[ref].dtype == "float64"]
