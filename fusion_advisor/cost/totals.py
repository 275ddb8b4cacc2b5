"""Lower bound on the time of a whole graph with everything fused."""

from __future__ import annotations

from collections.abc import Mapping

from fusion_advisor.cost.annotate import element_set
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import Ref


def least_us(flow: Dataflow, eager_us: Mapping[str, float]) -> float:
    """Lower bound on the time when everything fusible is fused, us.

    It counts the call, every launch that is never fused, and for the fusible launches the bytes
    that must move: each tensor from the caller or a never-fused launch is read once, and each
    tensor for them is written once. The fusible part takes at least as many launches as lie one
    after the other with a never-fused launch between them.
    """
    annotated, device = flow.annotated, flow.annotated.device
    names = [node.name for node in flow.nodes]
    stays = [flow.launches(i) and not flow.fusible[i] for i in range(len(names))]
    left_us = sum(us for name, us in eager_us.items() if not name or stays[flow.position[name]])
    written = 0
    read: dict[Ref, dict[object, int]] = {}
    turns = [0] * len(names)  # odd within a fused launch, even behind one that is never fused
    for i, name in enumerate(names):
        turn = max((turns[p] for p in flow.before[i]), default=0)
        turns[i] = turn + turn % 2 if stays[i] else turn | int(flow.fusible[i])
        if not flow.fusible[i]:
            continue
        cost = annotated.costs[name]
        for ref in flow.operands[i]:
            base = flow.base(ref)
            maker = flow.position[base.node]
            if stays[maker] or flow.nodes[maker].kind != "call":
                parts, tensor = read.setdefault(base, {}), annotated.tensors[ref]
                key = element_set(tensor)
                parts[key] = max(parts.get(key, 0), min(tensor.bytes, cost.bytes_read))
        for n, tensor in enumerate(flow.nodes[i].outputs):
            ref = Ref(name, n)
            if tensor is not None and any(use < 0 or stays[use] for use in flow.uses(ref)):
                written += min(tensor.bytes, cost.bytes_written)
    fastest = device.bandwidth * device.times.fastest
    # Views that overlap are together no more than what they look at.
    taken = sum(min(sum(parts.values()), annotated.tensors[b].bytes) for b, parts in read.items())
    moving_us = (taken + written) / fastest * 1e6
    least_launch = device.times.launch.value
    launches = (max(turns, default=0) + 1) // 2
    return left_us + max(moving_us, launches * least_launch)
