"""Settings under which a model is captured, and limits on the capture's cost. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fusion_advisor.ir.graph import DTYPE_BYTES
from fusion_advisor.support.errors import UsageError

_DTYPE_ALIASES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
}

Moved = tuple[str, str]
"""Folder, and the copy of it that a model imports from instead."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input given by the user: `NAME=SHAPE:DTYPE`. An empty dtype keeps the model's own."""

    name: str
    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Other sizes than the model's file gives, to build or run the model with. `inputs` has the
    number of an input's tensor, a dimension and its size; `built` has whole numbers among the
    factory's arguments (`get_init_inputs()`), and the numbers given in their place."""

    inputs: tuple[tuple[int, int, int], ...] = ()
    built: tuple[tuple[int, int], ...] = ()


Optimizer = Literal["none", "adamw", "sgd", "module"]
"""Optimizer of a training step; `module`: the one that the model's file defines."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Settings of the model's run. None: as the model's own file has it."""

    mode: Literal["eval", "train"] = "eval"
    dtype: str | None = None
    autocast: str | None = None
    batch: int | None = None
    seq: int | None = None
    inputs: tuple[InputSpec, ...] = ()
    dynamic: bool = False
    phase: Literal["forward", "prefill", "decode"] = "forward"
    kv_len: int | None = None
    grad: bool | None = None
    sizes: Sizes = Sizes()
    cast: bool = False
    """Whether the floats of a built module are cast to `dtype`, too, which the model's file
    may name."""
    step: bool = False
    """Whether a whole training step is captured, where gradients are on: forward, loss, backward
    and optimizer. Without it the forward pass alone is."""
    optimizer: Optimizer = "adamw"

    @property
    def gradients(self) -> bool:
        """Whether gradients are on: in train mode, unless the scenario says otherwise."""
        return self.mode == "train" if self.grad is None else self.grad

    @property
    def trains(self) -> bool:
        """Whether a whole training step is captured."""
        return self.step and self.mode == "train" and self.gradients


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on running the model file of a user: wall seconds and resident bytes."""

    seconds: float = 180.0
    memory_bytes: int = 8 << 30


@dataclass(frozen=True)
class Least:
    """Least saving that is worth an edit, of all places together that are the same lines:
    microseconds, and share of the step (0 to 1; None: that of the rules)."""

    saved_us: float = 0.0
    share: float | None = None


@dataclass(frozen=True)
class Request:
    """Request for an analysis: the model, the device, and how far to prove the kernels. `folder` is
    the kernels' folder in the report, None when they are not written; `command` is the command line
    that makes them again."""

    model: str
    scenario: Scenario = field(default_factory=Scenario)
    limits: Limits = field(default_factory=Limits)
    device: str | None = None
    rules: tuple[Path, ...] = ()
    verify: bool = True
    compile: bool = True
    folder: str | None = None
    command: str = ""
    debug: bool = False
    strict: bool = False
    """Whether a fault of the analyzer in one region is raised instead of reported."""
    gpus: tuple[str, ...] = ()
    """GPUs of this machine; where no `device` is asked for, the first is the device. Only a
    measurement sets this: a report or a patch of anything else is the same on every machine."""
    proofs: Path | None = None
    """Cache of check and compile results; None where each is done anew."""
    profile: Path | None = None
    """Trace of the model by a profiler, whose times take the place of predicted ones."""
    pairs: bool = False
    """Whether the file of a group has the group's backward, too, where it can be written."""
    least: Least = field(default_factory=Least)
    """Saving below which a patch leaves the source as it is."""


def file_or_module(model: str) -> str:
    """File or Python module that MODEL is in."""
    in_it = "#" if model.startswith("hf:") else ":"
    return model.removeprefix("hf:").partition(in_it)[0]


def parse_dtype(text: str) -> str:
    """Parse `bf16`, `torch.bfloat16` or `bfloat16` to torch's name. Raises UsageError when
    unknown."""
    name = text.strip().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise UsageError(f"unknown dtype {text!r}: one of {', '.join(DTYPE_BYTES)}")
    return name


def parse_input(text: str) -> InputSpec:
    """Parse `x=4x128x512:bf16` or `x=4,128,512`; a scalar tensor is `x=:int64`. Raises UsageError
    for any other form."""
    match = re.fullmatch(r"(\w+)=((?:\d+(?:[x,]\d+)*)?)(?::([\w.]+))?", text.strip())
    if match is None:
        raise UsageError(f"{text!r}; expected NAME=SHAPE:DTYPE, such as x=4x128:bfloat16")
    name, shape, dtype = match.groups()
    sizes = tuple(int(size) for size in re.split("[x,]", shape) if size)
    return InputSpec(name, sizes, parse_dtype(dtype) if dtype else "")
