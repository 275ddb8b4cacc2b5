"""Kernels in a training step: places of the forward and of the backward graph are replaced after
AOTAutograd has traced both and parted them.

Until then nothing of ours is in the graph: the partitioner sees every operator, and what it saves
for the backward pass is what it saves under torch.compile, to the byte. The two graphs are in
Inductor's decompositions, and Inductor compiles them with the kernels in them.
"""
# torch.compile and Inductor's internals are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as aot_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fusion_advisor.dynamo.custom_ops import introduce
from fusion_advisor.frontend.decompositions import eager_dropout

Phase = Literal["forward", "backward"]

Put = Callable[[torch.fx.GraphModule, Phase], torch.fx.GraphModule]
"""Function that returns one of the two graphs with calls of kernels in it."""


def through_inductor(
    module: torch.fx.GraphModule, inputs: Sequence[Any], put: Put, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's with Inductor, kernels in its forward and backward graphs."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: torch.fx.GraphModule, given: Sequence[Any], **how: Any) -> Any:
        phase: Phase = "backward" if how.get("is_backward") else "forward"
        ours = put(graph, phase)
        introduce(ours.graph)
        return compile_fx_inner(ours, given, **how)

    # A step out of AOTAutograd's cache would pass by `put`; Inductor's has the kernels in its key.
    with aot_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(
            module, inputs, inner_compile=inner, config_patches=dict(patches)
        )
    return compiled


def through_eager(
    module: torch.fx.GraphModule, inputs: Sequence[Any], put: Put
) -> Callable[..., Any]:
    """Part a graph of Dynamo's as Inductor does, and run its forward and backward graphs as they
    are, with kernels in them."""
    from torch._inductor.decomposition import select_decomp_table

    def compiler(phase: Phase, graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        return make_boxed_func(put(graph, phase).forward)

    backend: Any = aot_autograd(
        fw_compiler=partial(compiler, "forward"),
        bw_compiler=partial(compiler, "backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    with eager_dropout():  # Inductor drops what a copy is too many
        return backend(module, inputs)
