"""What a model is captured under, and what its capture may cost. Free of torch."""

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
"""A folder, and the copy of it that a model imports from instead."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input given by the user: `NAME=SHAPE:DTYPE`. An empty dtype keeps the model's own."""

    name: str
    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where a model is built or run at other sizes than its file says: `inputs` has the number of
    an input's tensor, a dimension and its size; `built` has whole numbers among what a factory is
    given (`get_init_inputs()`), and what is given in their place."""

    inputs: tuple[tuple[int, int, int], ...] = ()
    built: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """How the model is run. None means: as the model's own file has it."""

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
    """Whether the floats of a built module are cast to `dtype`, too, which its file may name."""

    @property
    def gradients(self) -> bool:
        """Whether gradients are on: in train mode, unless it says otherwise."""
        return self.mode == "train" if self.grad is None else self.grad


@dataclass(frozen=True, slots=True)
class Limits:
    """What running somebody's model file may cost: wall seconds and resident bytes."""

    seconds: float = 180.0
    memory_bytes: int = 8 << 30


@dataclass(frozen=True)
class Request:
    """What to analyse, for which device, and how far to prove it.

    `folder` is where a report says that the kernels are, None when they are not written;
    `command` is the command line that makes them again.
    """

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
    """Raise a fault of ours in one region instead of reporting it."""
    gpus: tuple[str, ...] = ()
    """The GPUs here, the first of which is judged for where no `device` is asked for: for what is
    measured on it. A report or a patch of anything else is the same on every machine."""
    proofs: Path | None = None
    """Where what checks and compiles came to is kept; None where each is done anew."""


def named_by(model: str) -> str:
    """The file, or the Python module, that MODEL is in."""
    in_it = "#" if model.startswith("hf:") else ":"
    return model.removeprefix("hf:").partition(in_it)[0]


def parse_dtype(text: str) -> str:
    """`bf16`, `torch.bfloat16` or `bfloat16` as torch names it; UsageError when unknown."""
    name = text.strip().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise UsageError(f"unknown dtype {text!r}: one of {', '.join(DTYPE_BYTES)}")
    return name


def parse_input(text: str) -> InputSpec:
    """`x=4x128x512:bf16` or `x=4,128,512`; a scalar tensor is `x=:int64`. UsageError otherwise."""
    match = re.fullmatch(r"(\w+)=((?:\d+(?:[x,]\d+)*)?)(?::([\w.]+))?", text.strip())
    if match is None:
        raise UsageError(f"{text!r}; expected NAME=SHAPE:DTYPE, such as x=4x128:bfloat16")
    name, shape, dtype = match.groups()
    sizes = tuple(int(size) for size in re.split("[x,]", shape) if size)
    return InputSpec(name, sizes, parse_dtype(dtype) if dtype else "")
