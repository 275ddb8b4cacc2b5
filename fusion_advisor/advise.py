"""Stage: findings that are not a fusion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusion_advisor.dataflow import Dataflow
from fusion_advisor.ops import Call
from fusion_advisor.records import Node, Source

_COPIES = frozenset(
    {"aten.clone.default", "aten.contiguous.default", "aten.copy_.default", "aten._to_copy.default"}
)
_SYNCS = frozenset(
    {"aten._local_scalar_dense.default", "aten.item.default", "aten.nonzero.default",
     "aten.masked_select.default", "aten._unique2.default", "aten.unique_dim.default"}
)  # fmt: skip
_MASK_ARGUMENT = 3
"""Where scaled_dot_product_attention takes its mask."""


@dataclass(frozen=True)
class Advice:
    """`saved_us` is what following it saves at most; None where nothing predicts it."""

    code: str
    message: str
    saved_us: float | None
    sources: tuple[Source, ...]


def advise(flow: Dataflow, grouped: set[int], training: bool) -> tuple[Advice, ...]:
    """All findings, the most time first. `grouped` are the launches that a kernel takes over."""
    found = [
        *(_forward_only() if training and grouped else ()),
        *_launch_bound(flow),
        *_hidden_copies(flow, grouped),
        *_float64(flow),
        *_masked_attention(flow),
        *_host_syncs(flow),
        *_differs(flow),
    ]
    return tuple(sorted(found, key=lambda advice: -(advice.saved_us or 0.0)))


def _sources(nodes: Iterable[Node]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(node.source for node in nodes if node.source))


def _time(flow: Dataflow, nodes: Iterable[Node]) -> float:
    return sum(flow.annotated.costs[node.name].time_us for node in nodes)


def _forward_only() -> Iterator[Advice]:
    """Kernels have no backward."""
    message = (
        "the kernels are for the forward pass: where an operand requires gradients, their launchers"
        " run the eager reference, and nothing is saved"
    )
    yield Advice("forward-only", message, None, ())


def _launch_bound(flow: Dataflow) -> Iterator[Advice]:
    """More time goes into launches that are shorter than their own cost than into anything else."""
    costs = flow.annotated.costs
    short = [node for node in flow.nodes if costs[node.name].bound == "overhead"]
    spent, total = _time(flow, short), _time(flow, flow.nodes)
    if not total or spent * 2 < total:
        return
    launches = len(short) * flow.annotated.device.launch_us
    yield Advice(
        "launch-bound",
        f"{spent / total:.0%} of the time is in {len(short)} kernels that are shorter than their"
        " launch: capture the model in a CUDA graph"
        ' (torch.compile(mode="reduce-overhead") or torch.cuda.graph), or raise the batch',
        launches,
        (),
    )


def _hidden_copies(flow: Dataflow, grouped: set[int]) -> Iterator[Advice]:
    """Launches that move a tensor to another layout and compute nothing."""
    copies: dict[Source | None, list[Node]] = {}
    for i, node in enumerate(flow.nodes):
        if node.op in _COPIES and i not in grouped and flow.launches(i) and _same_dtype(flow, node):
            copies.setdefault(node.source, []).append(node)
    for nodes in copies.values():
        moved = sum(flow.annotated.costs[node.name].bytes for node in nodes)
        yield Advice(
            "hidden-copy",
            f"{len(nodes)} copies ({nodes[0].name}, {moved / 1e6:.1f} MB in all) only change the"
            " layout: keep the layout that the next op takes, or let it read through the view",
            _time(flow, nodes),
            _sources(nodes),
        )


def _same_dtype(flow: Dataflow, node: Node) -> bool:
    operands = Call(node, flow.annotated.tensors).operands
    return bool(operands) and operands[-1].dtype == node.out.dtype


def _float64(flow: Dataflow) -> Iterator[Advice]:
    costs = flow.annotated.costs
    wide = [n for n in flow.nodes if costs[n.name].launches and costs[n.name].dtype == "float64"]
    if wide:
        yield Advice(
            "float64",
            f"{len(wide)} kernels compute in float64: twice the bytes of float32 at half its rate"
            " or far less; a Python or NumPy constant may be the cause",
            _time(flow, wide) / 2,
            _sources(wide),
        )


def _masked_attention(flow: Dataflow) -> Iterator[Advice]:
    tensors = flow.annotated.tensors
    masked = [
        node
        for node in flow.nodes
        if node.op == "aten.scaled_dot_product_attention.default"
        and Call(node, tensors).tensor(_MASK_ARGUMENT, "attn_mask") is not None
    ]
    if masked:
        yield Advice(
            "masked-attention",
            f"{len(masked)} attentions take attn_mask, which keeps them off the flash kernel: pass"
            " is_causal=True where the mask is causal, and leave a mask of all ones out",
            None,
            _sources(masked),
        )


def _host_syncs(flow: Dataflow) -> Iterator[Advice]:
    waits = [node for node in flow.nodes if node.op in _SYNCS]
    if waits:
        yield Advice(
            "host-sync",
            f"{len(waits)} ops ({waits[0].op}) make the host wait for the GPU: keep the value on"
            " the device",
            None,
            _sources(waits),
        )


def _differs(flow: Dataflow) -> Iterator[Advice]:
    for line in flow.annotated.graph.differs_from_eager:
        yield Advice(
            "differs-from-eager", f"what was analysed is not all eager runs: {line}", None, ()
        )
