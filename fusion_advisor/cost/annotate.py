"""Stage: cost of each launch. Records in, costs out; no torch.

Bytes are HBM bytes as eager launches the op: every addressed element once, in however many views of
one storage, and every fresh output once; an in-place op reads and writes its target; a view is
free. FLOPs come from the op's meaning, or from its formula where it has none. An op without an
entry is counted by its tensors, marked, and never fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fusion_advisor.cost.times import EagerLaunch, time_model
from fusion_advisor.ir.addressed import addressed_bytes, of_tensor
from fusion_advisor.ir.graph import OWN_OPS, Arg, Graph, Node, Ref, Tensor
from fusion_advisor.ops import REGISTRY, Call, Op, state
from fusion_advisor.ops.attention import ATTENTION_BACKWARDS
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.region.builder import Builder, Value
from fusion_advisor.rulebook.devices import Device, Unit

Bound = Literal["compute", "memory", "overhead", "free"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one node on one device. `intensity` and `ridge` are FLOP/B. `time_us` is the time of
    the launch among others with a cold L2, and `work` the time model's notes on it. `fusible` nodes
    have a meaning that the region form can express."""

    flops: int
    special_flops: int
    bytes_read: int
    bytes_written: int
    unit: Unit
    dtype: str
    pattern: str
    axes: str
    modelled: bool
    fusible: bool
    launches: int
    intensity: float
    ridge: float
    work: object
    time_us: float
    bound: Bound

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def memory_bound(self) -> bool:
        """Whether the node is memory-bound: fewer FLOP per byte than the unit's ridge (step 1 of
        the flow)."""
        return self.launches > 0 and self.intensity < self.ridge


@dataclass(frozen=True, slots=True)
class Annotated:
    """Graph with the cost of each node, in the graph's order."""

    graph: Graph
    costs: Mapping[str, Cost]
    tensors: Mapping[Ref, Tensor]
    device: Device
    classes: Mapping[str, int]
    """Nodes of one class run the same op on the same layouts."""


def annotate(graph: Graph, device: Device) -> Annotated:
    """Cost every node of a graph for a device."""
    tensors = {
        Ref(node.name, i): tensor
        for node in graph.nodes
        for i, tensor in enumerate(node.outputs)
        if tensor is not None
    }
    numbers: dict[object, int] = {}
    by_class: list[Cost] = []
    classes: dict[str, int] = {}
    for node in graph.nodes:
        key = _signature(node, tensors)
        found = numbers.get(key)
        if found is None:
            found = numbers[key] = len(by_class)
            by_class.append(_cost(Call(node, tensors), device))
        classes[node.name] = found
    costs = {name: by_class[number] for name, number in classes.items()}
    return Annotated(graph, costs, tensors, device, classes)


def _signature(node: Node, tensors: Mapping[Ref, Tensor]) -> object:
    """Key that is equal for nodes of the same cost: op, arguments, layouts, and which
    operands alias."""
    storages: dict[int, int] = {}

    def seen(tensor: Tensor | None) -> object:
        if tensor is None:
            return None
        number = storages.setdefault(tensor.storage, len(storages))
        return tensor.shape, tensor.stride, tensor.dtype, tensor.offset, number

    def flat(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return seen(tensors.get(arg))
        if isinstance(arg, tuple):
            return tuple(flat(item) for item in arg)
        return type(arg).__name__, arg

    return (
        node.op,
        node.kind,
        tuple(flat(arg) for arg in node.args),
        tuple((name, flat(value)) for name, value in node.kwargs),
        tuple(seen(tensor) for tensor in node.outputs),
        tuple(storages.get(s, -1) for s in node.mutates),
    )


def _cost(call: Call, device: Device) -> Cost:
    node = call.node
    op = REGISTRY.get(node.op)
    relabels = op is not None and op.pattern == "view"
    if node.kind != "call" or relabels or is_view(node, call.operands):
        return _free(node, op, node.kind == "call" and _arithmetic(call, op).fusible)
    read, written = _traffic(call, op)
    made = _arithmetic(call, op)
    flops, special = made.flops, made.special
    dtype = _arithmetic_dtype(call, op)
    unit = op.unit if op else "cuda"
    ours = node.op.startswith(OWN_OPS)
    launches = 0 if op is not None and op.pattern == "allocation" else 1
    if op is not None and op.launches is not None:
        launches = op.launches(call)
    if not launches or not read + written:
        return _free(node, op)
    arithmetic_us = seconds_of_arithmetic(device, unit, dtype, flops, special) * 1e6
    launch = EagerLaunch(call, op, read, written, unit, arithmetic_us, made.instructions(device))
    time_us, work = time_model().launch(launch, device)
    time_us += max(launches - 1, 0) * device.launch_us
    intensity, ridge = flops / (read + written), device.ridge(unit, dtype)
    bound: Bound = "memory" if intensity < ridge else "compute"
    if max((read + written) / device.bandwidth * 1e6, arithmetic_us) < device.launch_us:
        bound = "overhead"
    return Cost(
        flops=flops,
        special_flops=special,
        bytes_read=read,
        bytes_written=written,
        unit=unit,
        dtype=dtype,
        pattern=op.pattern if op else "fused" if ours else "opaque",
        axes=_axes(call, op),
        modelled=ours or op is not None,
        fusible=made.fusible,
        launches=launches,
        intensity=intensity,
        ridge=ridge,
        work=work,
        time_us=time_us,
        bound=bound,
    )


def _free(node: Node, op: Op | None, fusible: bool = False) -> Cost:
    """Cost of a node that launches nothing: a view, an allocation, an empty tensor or a tensor that
    exists before the graph runs."""
    pattern = node.kind
    if node.kind == "call":
        pattern = "view" if any(True for _ in node.refs()) else "allocation"
    if op is not None and op.pattern in ("view", "allocation"):
        pattern = op.pattern
    return Cost(0, 0, 0, 0, "cuda", "", pattern, "", True, fusible, 0, 0.0, 0.0, None, 0.0, "free")


def is_view(node: Node, operands: tuple[Tensor, ...]) -> bool:
    """Whether every result shares its storage with an operand and nothing is written."""
    storages = {tensor.storage for tensor in operands}
    results = [tensor for tensor in node.outputs if tensor is not None]
    return bool(results) and not node.mutates and all(t.storage in storages for t in results)


def seconds_of_arithmetic(
    device: Device, unit: str, dtype: str, flops: int, special_flops: int
) -> float:
    """Seconds of the arithmetic alone. On CUDA cores plain steps are not fused multiply-adds and
    reach half the peak; transcendentals run at the rate of the special-function unit."""
    if unit == "tensor":
        return flops / device.peak_flops("tensor", dtype)
    plain = (flops - special_flops) / (device.peak_flops("cuda", dtype) / 2)
    return plain + special_flops / device.special_rate


_CUDNN = ("convolution", "recurrent")


def _arithmetic_dtype(call: Call, op: Op | None) -> str:
    """Dtype whose peak applies: the widest floating operand, else the result's. cuDNN takes float32
    in TF32 by default (`torch.backends.cudnn.allow_tf32`), cuBLAS does not."""
    dtype = _widest(call)
    return "tf32" if dtype == "float32" and op is not None and op.pattern in _CUDNN else dtype


def _widest(call: Call) -> str:
    if call.node.op in ATTENTION_BACKWARDS:
        return call.operand(0).dtype  # the logsumexp is float32 in any case
    tensors = [*call.operands, *(t for t in call.node.outputs if t is not None)]
    floats = [t for t in call.operands if t.dtype.startswith(("float", "bfloat"))]
    if floats:
        return max(floats, key=lambda t: t.itemsize).dtype
    return tensors[-1].dtype if tensors else "float32"


def _traffic(call: Call, op: Op | None) -> tuple[int, int]:
    if op is not None and op.traffic is not None:
        return op.traffic(call)
    node = call.node
    results = [tensor for tensor in node.outputs if tensor is not None]
    owned = {tensor.storage for tensor in call.operands} - {*node.mutates}
    written = [tensor for tensor in results if tensor.storage not in owned]
    returned = {tensor.storage for tensor in results}
    for tensor in call.operands:  # which of them is not told where no result is
        if tensor.storage in node.mutates and tensor.storage not in returned:
            written.append(tensor)
    return addressed_bytes(call.operands), addressed_bytes(written)


def element_set(tensor: Tensor) -> object:
    """Key that is equal for views of one storage that address the same elements, however
    permuted."""
    return tensor.storage, tensor.offset, tensor.dtype, of_tensor(tensor)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """Arithmetic of an op: FLOPs, the transcendental ones among them, whether the region form can
    express the op, and at how many places it applies which primitive, to which dtype."""

    flops: int
    special: int
    fusible: bool
    applied: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def instructions(self, device: Device) -> int:
        """Warp instructions, in their longer forms: eager's kernels are compiled for every float32
        value alike."""
        lanes = sum(
            count * device.worth(name, dtype, precise=True)
            for (name, dtype), count in self.applied.items()
        )
        return int(lanes / device.warp_size)


def _arithmetic(call: Call, op: Op | None) -> _Arithmetic:
    if op is None or op.meaning is None:
        return _Arithmetic(op.flops(call) if op is not None and op.flops else 0, 0, False)
    builder = Builder()
    inputs: dict[Ref, Value] = {}

    def operand(ref: Ref) -> Value:
        if ref not in inputs:
            tensor = call.tensors.get(ref)
            if tensor is None:
                raise NotExpressible(f"{ref.node} is not a tensor")
            inputs[ref] = builder.input(tensor)
        return inputs[ref]

    try:
        state(op, builder, call.node, operand)
    except NotExpressible:
        flops = op.flops(call) if op.flops else builder.flops
        return _Arithmetic(flops, builder.special_flops, False, builder.applied)
    flops = op.flops(call) if op.flops else builder.flops
    special = min(flops, builder.special_flops)
    return _Arithmetic(flops, special, not writes_alias(call), builder.applied)


def writes_alias(call: Call) -> bool:
    """Whether the call writes in place through a view of a larger tensor: a part of that tensor
    changes for its other readers."""
    return any(
        tensor.storage in call.node.mutates
        and (tensor.offset != 0 or tensor.addressed != tensor.numel)
        for tensor in call.operands
    )


def _axes(call: Call, op: Op | None) -> str:
    """Dimensions that the op reduces, as torch numbers them: `1`, `2,3`."""
    if op is None or op.pattern != "reduction" or not call.operands:
        return ""
    before, after = call.operands[0].shape, call.out.shape
    if len(before) == len(after):
        reduced = [i for i, (m, n) in enumerate(zip(before, after, strict=True)) if m != n]
        if reduced:
            return ",".join(map(str, reduced))
    dim = call.arg(1, "dim")
    if isinstance(dim, tuple):
        return ",".join(str(d) for d in dim)
    return str(dim) if isinstance(dim, int) else ""
