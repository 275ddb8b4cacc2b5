"""Joint graph of a training step: the forward graph, run again under autograd, and its backward.

The graph that `export` traced is run once more on fake CPU tensors, the parameters as leaves, and
`torch.autograd.grad` follows it under the same `make_fx`. In-place writes stay as eager makes them,
and what autograd reads in backward is what it saves in eager. A node of backward has the stack
trace and the module of the forward node that it belongs to (by the sequence number that autograd
gives to both).

The nodes of a checkpoint of the model run within a checkpoint: backward keeps what eager keeps, and
computes the rest again.

Where autograd on a CPU takes another way than on CUDA, the forward node is replaced: `dropout` by
`native_dropout`, `rms_norm` and attention by functions whose backward is CUDA's one kernel.
"""
# torch.fx and autograd carry Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from fusion_advisor.frontend.autocast import Casts
from fusion_advisor.frontend.checkpoints import Checkpoint, parts
from fusion_advisor.frontend.eager_trace import autocast_of
from fusion_advisor.frontend.export import Placeholder, Traced
from fusion_advisor.frontend.recurrent import RECURRENT
from fusion_advisor.frontend.trained import AS_CUDA_TRAINS
from fusion_advisor.ir.graph import Phase
from fusion_advisor.support.errors import CaptureError

aten = torch.ops.aten

_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_LOSS = "fusion_advisor_loss"
_SUM_OF_GRADIENTS = fx_traceback.GRADIENT_ACC_SPECIAL_STACK

LOSSES = {
    getattr(aten, name)
    for name in (
        "cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d", "mse_loss", "l1_loss",
        "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "ctc_loss",
        "binary_cross_entropy_with_logits", "soft_margin_loss", "hinge_embedding_loss",
        "margin_ranking_loss", "triplet_margin_loss", "cosine_embedding_loss", "multi_margin_loss",
        "multilabel_margin_loss", "poisson_nll_loss", "gaussian_nll_loss",
    )
    if hasattr(aten, name)
}  # fmt: skip
"""Operators that compare a result with what is wanted: a loss begins with one."""


@dataclass(frozen=True)
class Joint:
    """Forward and backward as one graph. Its last outputs are the gradients of `parameters`, names
    of placeholders; `assumed` says where backward begins."""

    traced: Traced
    parameters: tuple[str, ...]
    assumed: str


@contextmanager
def followed_by(
    module: torch.nn.Module, loss: Callable[[Any], Any] | None
) -> Generator[None, None, None]:
    """While active, the model's forward ends in the loss of its output; None: it stays."""
    if loss is None:
        yield
        return
    forward = module.forward

    @functools.wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        with fx_traceback.preserve_node_meta(), fx_traceback.annotate({_LOSS: True}):
            return loss(output)

    module.forward = with_loss
    try:
        yield
    finally:
        del module.forward


def joint(
    traced: Traced, fake: FakeTensorMode, maker: str, autocast: torch.dtype | None = None
) -> Joint:
    """Joint graph of a forward graph, whose outputs the `maker` returns; forward runs under
    `autocast`, backward behind it. Raises CaptureError, which says why there is none."""
    _refuse(traced)
    leaves, positions = _leaves(traced, fake)
    found: list[str] = []
    phases = _Phases()
    casts = Casts()
    casting = functools.partial(casts.block, autocast, enabled=autocast is not None)

    def step(given: list[Any], tangents: list[torch.Tensor]) -> Any:
        forward = _Forward(traced.module, casts, phases, traced.checkpoints)
        with casting():
            results = forward.results([given[at] for at in positions])
        made = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
        roots, incoming, said = _roots(made, tangents, maker)
        found.append(said)
        setup_stacktrace_preservation_hooks([root.grad_fn for root in roots if root.grad_fn])
        wanted = [leaf for leaf in given if _trains(leaf)]
        gradients = torch.autograd.grad(roots, wanted, incoming, allow_unused=True)
        phases.mark("backward")
        return made, gradients

    with _under_autograd(fake), casts.on_cpu():
        with casting():
            tangents = _tangents(traced, leaves, positions, casts, maker)
        graph = make_fx(step, record_stack_traces=True, _allow_non_fake_inputs=True)(
            [each.value for each in leaves], tangents
        )
    inputs = [
        *leaves,
        *(Placeholder(f"gradient_{n}", "input", each) for n, each in enumerate(tangents)),
    ]
    _pair(graph)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    trained = [each.name for each in leaves if _trains(each.value)]
    gradients = pytree.tree_leaves(output.args, is_leaf=lambda each: each is None)[-len(trained) :]
    reached = [name for name, value in zip(trained, gradients, strict=True) if value is not None]
    whole = replace(traced, module=graph, placeholders=inputs, trail=None)
    return Joint(whole, tuple(reached), found[-1])


# -- the inputs of a step --------------------------------------------------------------------------


def _refuse(traced: Traced) -> None:
    """Raise CaptureError for a graph whose backward is another on a CPU than on CUDA."""
    for module in traced.module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.target in RECURRENT:
                raise CaptureError(f"the backward of {node.target} is cuDNN's, which is not here")
            if node.op == "call_function" and str(node.target).startswith("fusion_advisor"):
                raise CaptureError(f"{node.target} has no backward")


def _leaves(traced: Traced, fake: FakeTensorMode) -> tuple[list[Placeholder], list[int]]:
    """Distinct inputs, parameters as leaves of autograd, and the position among them of each
    placeholder: a tied weight has several."""
    kept: list[Placeholder] = []
    known: dict[object, int] = {}
    positions: list[int] = []
    for each in traced.placeholders:
        value = each.value
        if not isinstance(value, torch.Tensor):
            positions.append(len(kept))
            kept.append(each)
            continue
        layout = (value.storage_offset(), *value.shape, *value.stride())
        place = (value.untyped_storage()._cdata, *map(str, layout))  # symbols have no hash
        if place not in known:
            known[place] = len(kept)
            with fake, torch.no_grad():
                own = value if fake.is_our_fake(value) else fake.from_tensor(value)
                leaf = own.detach().requires_grad_(value.requires_grad)
            kept.append(replace(each, value=leaf))
        positions.append(known[place])
    return kept, positions


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _tangents(
    traced: Traced,
    leaves: list[Placeholder],
    positions: list[int],
    casts: Casts,
    maker: str,
) -> list[torch.Tensor]:
    """Gradients of the outputs, which arrive from outside where no output is a loss."""
    given = [leaves[at].value for at in positions]
    results = _Forward(traced.module, casts).results(given)
    made = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
    if not any(map(_trains, made)):
        raise CaptureError(f"nothing that {maker} returns depends on a parameter that is trained")
    if any(map(_is_loss, made)):
        return []
    with torch.no_grad():
        return [torch.empty_like(each) for each in made if _trains(each)]


def _is_loss(output: torch.Tensor) -> bool:
    return output.numel() == 1 and output.requires_grad


def _roots(
    made: list[torch.Tensor], tangents: list[torch.Tensor], maker: str
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, str]:
    """Tensors that backward starts from, their gradients, and the assumption in words: the first
    scalar is the loss; without one all outputs have a gradient."""
    if not tangents:
        losses = [each for each in made if _is_loss(each)]
        which = "the scalar" if len(losses) == 1 else f"the first of {len(losses)} scalars"
        return losses[:1], None, f"loss={which} that {maker} returns"
    roots = [each for each in made if _trains(each)]
    counted = "what" if len(roots) == 1 else f"{len(roots)} tensors that"
    return (
        roots,
        tangents,
        f"loss=none: the gradient of {counted} {maker} returns comes from outside",
    )


# -- the run under autograd ------------------------------------------------------------------------


class _Phases:
    """Writes the phase into the nodes of the graph that is being traced."""

    def mark(self, phase: Phase) -> None:
        """Give all nodes that have no phase yet this one."""
        mode = get_proxy_mode()
        assert mode is not None
        for node in reversed(mode.tracer.graph.nodes):
            if "phase" in node.meta:
                return
            node.meta["phase"] = phase


class _Forward(torch.fx.Interpreter):
    """Runs a forward graph as CUDA does, each checkpoint of it within one of torch's, and marks the
    nodes that it makes."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        casts: Casts,
        phases: _Phases | None = None,
        checkpoints: Sequence[Checkpoint] = (),
    ) -> None:
        super().__init__(module)
        self._graph = module.graph
        self._casts = casts
        self._phases = phases
        self._checkpoints = checkpoints
        self._loss = _loss_nodes(module)

    def results(self, given: Sequence[Any]) -> Any:
        """Results of the graph for its inputs."""
        self.args_iter = iter(given)
        self.env = {}
        for number, nodes in parts(self._graph):
            if number is None or not self._checkpoints:
                for node in nodes:
                    self.env[node] = self.run_node(node)
            else:
                self._run_part(nodes, self._checkpoints[number])
        return self.env[self._graph.output_node()]

    def _run_part(self, nodes: list[torch.fx.Node], checkpoint: Checkpoint) -> None:
        """Run the nodes of a checkpoint; a later run of them is backward's."""
        inside = set(nodes)
        operands = [*dict.fromkeys(each for n in nodes for each in n.all_input_nodes)]
        operands = [each for each in operands if each not in inside]
        results = [each for each in nodes if not inside.issuperset(each.users)]
        phases, began = self._phases, False

        def part(*given: Any) -> list[Any]:
            nonlocal began
            outer, self.env = self.env, dict(zip(operands, given, strict=True))
            self._phases, again = (None, self._casts.afresh()) if began else (phases, nullcontext())
            began = True
            try:
                with again:
                    for node in nodes:
                        self.env[node] = self.run_node(node)
                return [self.env[each] for each in results]
            finally:
                self.env, self._phases = outer, phases

        found = checkpoint.run(part, [self.env[each] for each in operands])
        self.env.update(zip(results, found, strict=True))

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if self._phases is not None and n.op not in ("placeholder", "get_attr", "output"):
            self._phases.mark("loss" if n in self._loss else "forward")
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _AUTOCAST:
            with self._casts.block(args[1], enabled=args[2]):
                return self._inner(args[4]).results(args[5:])
        if target is _SET_GRAD:
            with torch.set_grad_enabled(args[0]):
                return self._inner(args[1]).results(args[2:])
        run = AS_CUDA_TRAINS.get(target)
        if run is None:
            return target(*args, **kwargs)
        _, args, kwargs = self._casts.cast(target, args, kwargs)
        with autocast_of("cpu", None):
            return run(*args, **kwargs)

    def _inner(self, module: torch.fx.GraphModule) -> _Forward:
        return _Forward(module, self._casts, self._phases, self._checkpoints)


def _loss_nodes(module: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Nodes of the loss: those of the user's `loss`, else those from a loss operator on."""
    nodes = list(module.graph.nodes)
    own = {node for node in nodes if _LOSS in node.meta.get("custom", {})}
    if own:
        return own
    found: set[torch.fx.Node] = set()
    for node in nodes:
        named = getattr(node.target, "overloadpacket", None) in LOSSES
        if node.op != "output" and (named or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


@contextmanager
def _under_autograd(fake: FakeTensorMode) -> Generator[None, None, None]:
    """Fake tensors with gradients, and notes on each node of the line and number that autograd
    knows it by."""
    with (
        warnings.catch_warnings(),
        fake,
        torch.enable_grad(),
        fx_traceback.preserve_node_meta(),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        warnings.simplefilter("ignore")  # that anomaly detection is slow, on every run
        yield


def _pair(graph: torch.fx.GraphModule) -> None:
    """Give each node of backward the name and the module of the forward node that it belongs to:
    the first of its number. A sum of gradients has the number of none."""
    forward: dict[int, torch.fx.Node] = {}
    for node in graph.graph.nodes:
        number = node.meta.get("seq_nr")
        if number is None or node.op != "call_function":
            continue
        if node.meta["phase"] != "backward":
            forward.setdefault(number, node)
        elif number in forward and _SUM_OF_GRADIENTS not in (node.stack_trace or ""):
            of = forward[number]
            node.meta["backward_of"] = of.name
            node.meta["nn_module_stack"] = of.meta.get("nn_module_stack")
            node.stack_trace = node.stack_trace or of.stack_trace


def first_line(error: BaseException) -> str:
    """First line of what an error says, with the error's name."""
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines() if line.strip())
    said = next(iter(lines), "no message")[:200]
    return said if isinstance(error, CaptureError) else f"{type(error).__name__}: {said}"
