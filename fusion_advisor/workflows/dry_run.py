"""Dry run of `fusion_advisor.apply`: Dynamo captures a call on fake tensors and the backend places
kernels, without a GPU, without weights, and without a run of the model or of a kernel."""
# The model and its inputs are whatever the user has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fusion_advisor.frontend.loading import load
from fusion_advisor.frontend.session import undisturbed, without_weights
from fusion_advisor.frontend.signature import fakes, objects_known, signature, unknown_in
from fusion_advisor.frontend.user_model import HostFakeMode
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.support.errors import UsageError


def dry_run(
    model: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    scenario: Scenario | None = None,
) -> None:
    """Call a copy of the model on fake tensors through torch.compile with a backend that compiles
    nothing. `model` is a MODEL of the command line, whose inputs are its own, a module or a
    function; neither is changed. Raises UsageError for arguments that cannot be described,
    CaptureError for a MODEL that cannot be loaded, and any exception of the model."""
    if isinstance(model, str):
        loaded = load(model, scenario or Scenario())
        with undisturbed(), _quiet(), loaded.fake:
            _called(loaded.module, loaded.args, loaded.kwargs, backend, dynamic)
        return
    given = signature((args, dict(kwargs)))
    for what in unknown_in(given):
        raise UsageError(f"apply: dry=True cannot describe an argument: it is {what}")
    fake = HostFakeMode()
    with undisturbed(), objects_known(given), _quiet():
        bare = without_weights(model, fake) if isinstance(model, torch.nn.Module) else model
        fake_args, fake_kwargs = fakes(given, fake)
        with fake:
            _called(bare, fake_args, fake_kwargs, backend, dynamic)


def _called(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: Callable[..., Any],
    dynamic: bool | None,
) -> None:
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        compiled(*args, **kwargs)


@contextmanager
def _quiet() -> Generator[None]:
    """Silence warnings of what torch would do with fake tensors, which nothing is done with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
