"""Dry run of `fusion_advisor.apply`: Dynamo captures a call on fake tensors and the backend places
kernels, without a GPU, without weights, and without a run of the model or of a kernel."""
# The model and its inputs are whatever the user has.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from fusion_advisor.frontend.session import undisturbed, without_weights
from fusion_advisor.frontend.signature import fakes, objects_known, signature, undescribed
from fusion_advisor.frontend.user_model import HostFakeMode, swappable
from fusion_advisor.ir.frames import source_of_traceback
from fusion_advisor.support.errors import CaptureError, UsageError


def dry_run(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
) -> None:
    """Call a copy of a module, or a function, on fake tensors like the arguments, through
    torch.compile with a backend that compiles nothing. Raises UsageError for arguments that cannot
    be described, CaptureError for a module that cannot be copied, and any exception of the
    model."""
    given = signature((args, dict(kwargs)))
    if why := undescribed(given, "dry=True cannot describe"):
        raise UsageError(f"apply: {why}")
    fake = HostFakeMode()
    with undisturbed(), objects_known(given):
        bare = without_weights(model, fake) if isinstance(model, torch.nn.Module) else model
        fake_args, fake_kwargs = fakes(given, fake)
        call_on_fakes(bare, fake_args, fake_kwargs, fake, backend, dynamic=dynamic)


def call_on_fakes(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fake: FakeTensorMode,
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
) -> None:
    """Call a model whose tensors, as its arguments', belong to the fake mode, through torch.compile
    and without gradients. Raises CaptureError for a model that asks for a number in a tensor's
    data, or for a size that follows from it, and any exception of the model."""
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    # As a first call is: sizes of calls before it, of other models too, would make some symbolic.
    first = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    with warnings.catch_warnings(), torch.no_grad(), fake, first, swappable():
        warnings.simplefilter("ignore")  # they are about running what is not run here
        try:
            compiled(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            source = source_of_traceback(error)
            where = f"{source.file}:{source.line}: " if source else ""
            raise CaptureError(
                f"{where}the model asks for a number or a size that is in a tensor, whose data a "
                "dry run lacks; call fusion_advisor.apply(model, inputs) on the GPU"
            ) from error
