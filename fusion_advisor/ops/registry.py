"""The registry: one entry an op, with its meaning, parallel pattern, FLOPs and traffic.

A meaning over a `Builder` gives the FLOPs, the kernel, and what a gate needs to know; ops without
one (matrix products, scatters, sorts) state FLOPs and traffic by formula and are never fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal

from fusion_advisor.ir.graph import Arg, Node, Ref, Tensor
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.region.builder import Builder, Value, compute_dtype

Meaning = Callable[..., Any]
Unit = Literal["cuda", "tensor"]


@dataclass(frozen=True, slots=True)
class Call:
    """A node with the tensors that its arguments refer to."""

    node: Node
    tensors: Mapping[Ref, Tensor]

    def arg(self, position: int, name: str = "", default: Arg = None) -> Arg:
        """An argument by position, else by keyword, else the default."""
        if position < len(self.node.args):
            return self.node.args[position]
        return dict(self.node.kwargs).get(name, default)

    def tensor(self, position: int, name: str = "") -> Tensor | None:
        found = self.arg(position, name)
        return self.tensors.get(found) if isinstance(found, Ref) else None

    def operand(self, position: int) -> Tensor:
        """A tensor argument that must be there; ValueError names the node when it is not."""
        found = self.tensor(position)
        if found is None:
            raise ValueError(f"{self.node.op} has no tensor as argument {position}")
        return found

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors[ref] for ref in self.node.refs() if ref in self.tensors)

    @property
    def out(self) -> Tensor:
        return self.node.out


Formula = Callable[[Call], int]
Traffic = Callable[[Call], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Op:
    """`pattern` is how the op spreads over threads; `inputs` says how tensor operands are
    converted before the meaning sees them: to the dtype of the result, or not at all."""

    name: str
    pattern: str
    meaning: Meaning | None = None
    flops: Formula | None = None
    traffic: Traffic | None = None
    unit: Unit = "cuda"
    launches: Formula | None = None
    """Kernels of one call; None: one."""
    inputs: Literal["result", "raw"] = "result"
    discrete: bool = False
    """A small change of an operand can change the result by a step."""
    sizes: Mapping[int, str] = field(default_factory=dict[int, str])
    """Arguments that repeat sizes, so that the eager reference serves other sizes too: Python
    text by position, with `{0}` for the first argument, `{rank}` for the number of the sizes,
    `{shape}` for the result's shape and `{size}` for its elements. None says nothing of sizes."""
    reference: str = ""
    """The eager reference of a random op, which must draw what the kernel draws: Python text as in
    `sizes`, with `{dtype}` for the result's dtype and `<random16>` or `<random32>` for each draw of
    the meaning."""

    @property
    def unstated(self) -> str:
        """Why the op has no meaning."""
        return f"{self.name} {_UNSTATED.get(self.pattern, 'has no meaning in the registry')}"


_UNSTATED = {
    "matmul": "is a matrix product",
    "convolution": "is a convolution",
    "attention": "is attention",
    "recurrent": "is a recurrent layer",
    "pairwise": "compares every row with every other",
    "scatter": "is a scatter: what it writes where depends on data",
    "sort": "sorts, counts or searches",
    "scan": "is a scan that carries more than one value",
    "random": "is made of random numbers",
    "foreach": "works on many tensors at once",
    "allocation": "is memory that nothing has been written to",
}
"""Why ops of a pattern have no meaning."""


REGISTRY: dict[str, Op] = {}


def register(op: Op) -> None:
    if op.name in REGISTRY:
        raise ValueError(f"op {op.name} is registered twice")
    REGISTRY[op.name] = op


def in_place(name: str) -> str:
    """The name of the in-place overload: `aten.add_.Tensor` for `aten.add.Tensor`."""
    namespace, base, overload = name.split(".", 2)
    return f"{namespace}.{base}_.{overload}"


def meaning_of(
    pattern: str,
    *names: str,
    inputs: Literal["result", "raw"] = "result",
    discrete: bool = False,
    also_in_place: bool = False,
    traffic: Traffic | None = None,
    flops: Formula | None = None,
    launches: Formula | None = None,
    sizes: Mapping[int, str] | None = None,
) -> Callable[[Meaning], Meaning]:
    """Decorate the meaning that some overloads share. `flops` is given where eager's count differs
    from the meaning's."""

    def wrap(meaning: Meaning) -> Meaning:
        for name in names:
            op = Op(
                name,
                pattern,
                meaning,
                flops,
                inputs=inputs,
                discrete=discrete,
                traffic=traffic,
                launches=launches,
                sizes=sizes or {},
            )
            register(op)
            if also_in_place:
                register(replace(op, name=in_place(name)))
        return meaning

    return wrap


def pointwise(
    *names: str,
    inputs: Literal["result", "raw"] = "result",
    discrete: bool = False,
) -> Callable[[Meaning], Meaning]:
    """Register a pointwise meaning, with its in-place overloads."""
    return meaning_of("pointwise", *names, inputs=inputs, discrete=discrete, also_in_place=True)


def reduction(
    *names: str, discrete: bool = False, sizes: Mapping[int, str] | None = None
) -> Callable[[Meaning], Meaning]:
    """Register a meaning that combines along dimensions; operands arrive in their own dtype."""
    return meaning_of("reduction", *names, inputs="raw", discrete=discrete, sizes=sizes)


def view(*names: str, sizes: Mapping[int, str] | None = None) -> Callable[[Meaning], Meaning]:
    """Register a view: other dimensions over the same elements, no launch."""
    return meaning_of("view", *names, inputs="raw", sizes=sizes)


def copied(
    *names: str, inputs: Literal["result", "raw"] = "raw", sizes: Mapping[int, str] | None = None
) -> Callable[[Meaning], Meaning]:
    """Register a copy: elements of the operands at other positions."""
    return meaning_of("copy", *names, inputs=inputs, sizes=sizes)


def creation(
    *names: str, sizes: Mapping[int, str] | None = None, traffic: Traffic | None = None
) -> Callable[[Meaning], Meaning]:
    """Register a creation: a tensor made from nothing."""
    return meaning_of("creation", *names, inputs="raw", sizes=sizes, traffic=traffic)


def random(
    *names: str,
    reference: str,
    discrete: bool = False,
    reads: bool = False,
    flops: Formula | None = None,
) -> Callable[[Meaning], Meaning]:
    """Register random numbers; `reads` says whether the elements of the operands matter."""

    def wrap(meaning: Meaning) -> Meaning:
        for name in names:
            register(
                Op(
                    name,
                    "random",
                    meaning,
                    flops,
                    None if reads else nothing_read,
                    inputs="raw",
                    discrete=discrete,
                    reference=reference,
                )
            )
        return meaning

    return wrap


def nothing_read(call: Call) -> tuple[int, int]:
    """Traffic of an op that uses the shape of its operand alone."""
    return 0, call.out.bytes


def formula(
    pattern: str,
    *names: str,
    flops: Formula | None = None,
    traffic: Traffic | None = None,
    unit: Unit = "cuda",
    launches: Formula | None = None,
) -> None:
    """Register ops that are counted by formula and have no meaning."""
    for name in names:
        register(Op(name, pattern, None, flops, traffic, unit, launches))


def state(
    op: Op, builder: Builder, node: Node, operands: Callable[[Ref], Value], label: str = ""
) -> tuple[Value | None, ...]:
    """Add the meaning of a node to a region: one value for each output. Raises NotExpressible where
    the region form cannot state this call."""
    if op.meaning is None:
        raise NotExpressible(op.unstated)
    held = compute_dtype(node.out.dtype)

    def ready(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            value = operands(arg)
            return builder.cast(value, held) if op.inputs == "result" else value
        if isinstance(arg, tuple):
            return tuple(ready(item) for item in arg)
        return arg

    args = [ready(arg) for arg in node.args]
    kwargs = {name: ready(value) for name, value in node.kwargs}
    builder.out, builder.label = node.out, label or node.name  # operands may have set others
    try:
        signature(op.meaning).bind(builder, *args, **kwargs)
    except TypeError as error:
        raise NotExpressible(f"{node.op}: {error}") from error
    result: Value | tuple[Value | None, ...] = op.meaning(builder, *args, **kwargs)
    values: Sequence[Value | None] = result if isinstance(result, tuple) else (result,)
    found: list[Value | None] = []
    for value, tensor in zip(values, node.outputs, strict=False):
        if value is None or tensor is None:
            found.append(None)
            continue
        if value.shape != tensor.shape:
            raise NotExpressible(
                f"{node.op} gives {tensor.shape} where its meaning gives {value.shape}"
            )
        found.append(value if op.pattern == "view" else builder.cast(value, tensor.dtype))
    return tuple(found)
