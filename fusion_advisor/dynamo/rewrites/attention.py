"""A call of `scaled_dot_product_attention` in Dynamo's graph, or in an exported program's."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.dynamo.rewrites.nodes import argument, called, value_of
from fusion_advisor.frontend.expansions import hint

_OPERATOR = torch.nn.functional.scaled_dot_product_attention
_SPELLINGS = _OPERATOR, torch.ops.aten.scaled_dot_product_attention.default
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class Attention:
    """The call, with its arguments by name: query [..., queries, width], key [..., keys, width]."""

    node: torch.fx.Node
    given: dict[str, Any]

    def tensor(self, name: str) -> torch.Tensor:
        """The fake tensor of an argument."""
        return self.given[name].meta["example_value"]

    @property
    def mask(self) -> torch.fx.Node | None:
        mask = self.given.get("attn_mask")
        return mask if isinstance(mask, torch.fx.Node) else None

    @property
    def leading(self) -> tuple[Any, ...]:
        """Sizes of the query before queries and width: batch and heads."""
        return tuple(self.tensor("query").shape[:-2])

    @property
    def queries(self) -> Any:
        return self.tensor("query").shape[-2]

    @property
    def keys(self) -> Any:
        return self.tensor("key").shape[-2]

    @property
    def many(self) -> bool:
        """Whether more than one query is answered at a time, whatever the sizes."""
        return statically_known_true(self.queries > 1)

    @property
    def scaled_up(self) -> bool:
        """Whether the scale is above zero: torch's kernels hide places before they scale."""
        scale = self.given.get("scale")
        if isinstance(scale, torch.fx.Node):
            scale = scale.meta.get("example_value", 0.0)
        return scale is None or bool(scale > 0)  # guarded, as torch fixes the number anyway

    @property
    def flops(self) -> float:
        """Work of both products at the sizes of this call, nothing left out."""
        sizes = (*self.tensor("query").shape, self.keys)
        return 4.0 * math.prod(int(hint(each)) for each in sizes)

    def change(self, **arguments: Any) -> None:
        """Give the call other arguments, in the graph; the query stays in place."""
        given = {**self.given, **arguments}
        self.node.args = tuple(given.pop(name) for name in _POSITIONAL[:3])
        self.node.kwargs = given


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
) -> bool:
    """Whether torch chooses a fused kernel for a call on a GPU, of fake tensors [batch, heads,
    length, width]; elsewhere nothing is asked. Keys and values may have fewer heads."""
    if not query.is_cuda:
        return True
    grouped = not statically_known_true(query.shape[1] == key.shape[1])
    return any(
        name.startswith("_scaled_dot_product")
        for name in launched(
            _OPERATOR, query, key, value, mask, dropout, causal, enable_gqa=grouped
        )
    )


def launched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Names of the operators that a call comes to, on fake tensors: what is asked is what
    AOTAutograd gets as it traces the call. Their mode is entered, since a call makes tensors of
    its own, as of a mask of booleans."""
    mode = next(each.fake_mode for each in args if isinstance(each, FakeTensor))
    with mode, _Launches() as seen, torch.no_grad():
        function(*args, **kwargs)
    return seen.names


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attentions(graph: torch.fx.Graph) -> Iterator[Attention]:
    """Yield the calls of a graph in their order, those whose tensors are described."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _SPELLINGS:
            continue
        given = {**dict(zip(_POSITIONAL, node.args, strict=False)), **node.kwargs}
        tensors = [given.get(name) for name in _POSITIONAL[:3]]
        if isinstance(given.get("attn_mask"), torch.fx.Node):
            tensors.append(given["attn_mask"])
        if all(value_of(each) is not None for each in tensors):
            yield Attention(node, given)


_LINEAR = "linear", "matmul", "__matmul__", "mm", "bmm"


def flops_before(node: torch.fx.Node) -> float:
    """Work of the matrix products that stand before a node, at the sizes of this call."""
    work = 0.0
    for each in node.graph.nodes:
        if each is node:
            break
        left, made = value_of(argument(each, 0, "input")), value_of(each)
        if left is not None and made is not None and called(each, *_LINEAR):
            work += 2.0 * math.prod(int(hint(size)) for size in (*made.shape, left.shape[-1]))
    return work
