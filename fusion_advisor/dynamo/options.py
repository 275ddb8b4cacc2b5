"""Options of the backend, and who compiles what is not ours."""
# torch.compile and Inductor's internals are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from fusion_advisor.dynamo.custom_ops import introduce
from fusion_advisor.dynamo.measured import Tune
from fusion_advisor.dynamo.partition import InnerCompiler
from fusion_advisor.dynamo.training import Put, through_eager, through_inductor

Inner = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Trained = Callable[[torch.fx.GraphModule, Sequence[Any], Put], Callable[..., Any]]


@dataclass(frozen=True)
class BackendOptions:
    """Options of this backend, and how the rest is compiled."""

    inner: Inner
    patches: Mapping[str, Any] | None
    """Settings of Inductor for this graph; None where its rest is not Inductor's."""
    trained: Trained | None
    compiler: InnerCompiler
    device: str | None = None
    rules: tuple[Path, ...] = ()
    rewrites: bool = True
    training: bool = True
    chunked_loss: bool = False
    read_inputs: bool = True
    tune: Tune = "cached"


def options_of(mode: str | None, options: dict[str, Any]) -> BackendOptions:
    """Options as they were given to torch.compile: ours are taken out of `options`, and the others
    are Inductor's. Raises ValueError for a value that no option has."""
    inner = options.pop("inner", "inductor")
    device, rules = options.pop("device", None), options.pop("rules", ())
    take_all = bool(options.pop("take_all", inner == "eager"))
    switches = ("rewrites", "training", "chunked_loss", "read_inputs")
    switched = {name: bool(options.pop(name)) for name in switches if name in options}
    tune = options.pop("tune", None)
    if tune not in (None, *get_args(Tune)):
        raise ValueError(f"tune={tune!r}: one of 'off', 'cached' and 'now'")
    from torch._inductor import config, list_mode_options

    patches = {**(list_mode_options(mode) if mode else {}), **options}

    def setting(name: str) -> bool:
        known = config.get_config_copy()
        return bool(patches.get(name, known[name]))

    compiler = InnerCompiler(setting("max_autotune"), setting("triton.cudagraphs"), take_all)
    paths = tuple(map(Path, (rules,) if isinstance(rules, str | Path) else rules))
    return BackendOptions(
        inner_compiler(inner, patches), patches if inner == "inductor" else None,
        _trained(inner, patches), compiler, device, paths,
        tune=tune or ("now" if compiler.tuned else "cached"), **switched,
    )  # fmt: skip


def inner_compiler(name: str | Inner, patches: Mapping[str, Any]) -> Inner:
    """Compiler of a graph by its name, with settings of Inductor."""
    if callable(name):
        return name
    if name == "eager":
        return lambda module, inputs: module.forward
    if name != "inductor":
        raise ValueError(f"inner={name!r}: one of 'inductor', 'eager', or a backend function")

    def inductor(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        introduce(module.graph)
        compiled: Any = compile_fx(module, inputs, config_patches=dict(patches))
        return compiled

    return inductor


def channels_last(
    module: torch.fx.GraphModule, patches: Mapping[str, Any] | None, *, training: bool
) -> bool:
    """Whether Inductor, with some settings, lays out the convolutions of a graph with channels
    last; False where the rest is not Inductor's."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    with config.patch(dict(patches or {})):
        return patches is not None and GraphLowering.decide_layout_opt(
            module, is_inference=not training
        )


def alone(patches: Mapping[str, Any]) -> tuple[Inner, str]:
    """Inductor for what is timed, without CUDA graphs, and a digest of its settings."""
    from torch._inductor import config

    settings = repr(sorted({**config.save_config_portable(), **patches}.items()))
    inner = inner_compiler("inductor", {**patches, "triton.cudagraphs": False})
    return inner, hashlib.sha256(settings.encode()).hexdigest()


def _trained(name: str | Inner, patches: Mapping[str, Any]) -> Trained | None:
    """How a graph under gradients is compiled; None where the caller does that."""
    if callable(name):
        return None
    return through_eager if name == "eager" else partial(through_inductor, patches=patches)
