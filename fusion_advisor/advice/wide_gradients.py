"""Gradients that are sent between GPUs in float32 though they are 16-bit floats."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, mark
from fusion_advisor.ir.graph import Ref

CODE = "wide-gradients"


def find(model: Model) -> Iterator[Advice]:
    """One for each 16-bit float that trained float32 parameters are cast to, by one cast that is
    all that reads them: its backward widens the gradient, which is then of that float's values."""
    flow = model.flow
    trained = frozenset(flow.annotated.graph.trained if model.training else ())
    sums = {
        number: flow.annotated.tensors[Ref(node.name)]
        for number, node in enumerate(flow.nodes)
        if node.kind == "parameter" and node.name in trained and node.out.dtype == "float32"
    }
    casts: dict[int, str] = {}
    for number in sums:
        ahead = [i for i in flow.uses(Ref(flow.nodes[number].name)) if i >= 0]
        ahead = [i for i in ahead if flow.nodes[i].phase in ("forward", "loss")]
        made = [flow.nodes[i] for i in ahead]
        if len(made) == 1 and made[0].op == "aten._to_copy.default":
            casts[number] = made[0].out.dtype
    whole = sum(t.bytes for t in sums.values())
    share = model.rulebook.advice_kind(CODE).number("share").value
    for dtype, numbers in by(casts, lambda i: casts[i]).items():
        wide = sum(sums[i].bytes for i in numbers)
        if not dtype.endswith("float16") or wide < share * whole:
            continue
        less = wide - wide // 2
        link = flow.annotated.device.link
        us = "" if link is None else f", {2e6 * less / link.bandwidth.base:.0f} us less"
        yield Advice(
            CODE,
            f"gradients of {counted(numbers, 'parameter')} ({wide / 1e9:.3g} GB) are {dtype} values"
            f" in float32: data-parallel training sends half as much in {dtype} ({less / 1e9:.3g}"
            f" GB less each way{us}), by DDP's bf16_compress_hook or FSDP2's"
            f" MixedPrecisionPolicy(reduce_dtype=torch.{dtype})",
            None,
            model.sources(i for n in numbers for i in flow.uses(Ref(flow.nodes[n].name)) if i >= 0),
            (f"{wide / 1e6:.1f} MB of {whole / 1e6:.1f} MB of float32 gradients",),
            mark(CODE, dtype),
        )
