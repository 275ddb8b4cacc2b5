"""Ops for which the host waits until the GPU has run all that was launched."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, counted, mark
from fusion_advisor.advice.launch_queue import step
from fusion_advisor.ir.graph import Ref, Symbol

_WAITING = frozenset(
    {"aten._local_scalar_dense.default", "aten.item.default", "aten.nonzero.default",
     "aten.masked_select.default", "aten._unique2.default", "aten.unique_dim.default",
     "aten.unique_consecutive.default", "aten.repeat_interleave.Tensor", "aten.bincount.default"}
)  # fmt: skip
_INDEXED = ("aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default")
_MASKS = ("bool", "uint8")


def find(model: Model) -> Iterator[Advice]:
    """One for the model."""
    found = waits(model)
    if not found:
        return
    nodes = model.flow.nodes
    launched = {i for i in found if model.flow.launches(i)}
    saved = step(model, launched).us - step(model, ()).us
    names = ", ".join(dict.fromkeys(nodes[i].op for i in found))
    yield Advice(
        "host-sync",
        f"the host waits for the GPU at {counted(found, 'op')} ({names}): keep the value on the"
        " device",
        saved or None,
        model.sources(found),
        tuple(dict.fromkeys(_why(model, i) for i in found)),
        mark("host-sync", *sorted({nodes[i].op for i in found})),
    )


def waits(model: Model) -> list[int]:
    """Positions of the ops that make the host wait."""
    return [i for i in range(len(model.flow.nodes)) if _why(model, i)]


def _why(model: Model, number: int) -> str:
    """The reason that a node makes the host wait; "" where it does not."""
    node = model.flow.nodes[number]
    if node.op in _WAITING and dict(node.kwargs).get("output_size") is None:
        return f"the host needs what {node.op} found, or how much"
    if node.op in _INDEXED and _masked(model, number):
        return f"{node.op} by a mask: how many elements it takes is counted on the GPU"
    if node.op == "aten._to_copy.default" and _to_cpu(dict(node.kwargs).get("device")):
        return f"{node.op} to the CPU"
    return ""


def _masked(model: Model, number: int) -> bool:
    """Whether an index is a mask. Storing a number at a mask is a fill, which makes nobody wait."""
    call, tensors = model.call(number), model.flow.annotated.tensors
    indices, value = call.arg(1, "indices"), call.arg(2, "values")
    if isinstance(value, Ref) and tensors[value].numel == 1 and _constant(model, value):
        return False
    given = indices if isinstance(indices, tuple) else ()
    return any(isinstance(ref, Ref) and tensors[ref].dtype in _MASKS for ref in given)


def _constant(model: Model, ref: Ref) -> bool:
    return model.origin(ref).kind == "constant"


def _to_cpu(device: object) -> bool:
    text = device.text if isinstance(device, Symbol) else device
    return isinstance(text, str) and text.startswith("cpu")
