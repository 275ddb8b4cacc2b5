"""Records of a whole training step: forward, loss, backward, optimizer.

Where the step cannot be captured, the reason is the first assumption, and the caller falls back on
the forward pass alone.
"""
# torch carries Any in most of what is used here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import logging

import torch

from fusion_advisor.frontend.eager_trace import EagerTrace
from fusion_advisor.frontend.export import Traced, launch
from fusion_advisor.frontend.joint import first_line, joint
from fusion_advisor.frontend.optimizer import update
from fusion_advisor.frontend.user_model import Loaded
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.support.errors import UsageError

_log = logging.getLogger(__name__)

Launched = tuple[EagerTrace, tuple[Ref, ...]]


def captured_step(
    traced: Traced,
    loaded: Loaded,
    scenario: Scenario,
    autocast: torch.dtype | None,
    assumed: list[str],
) -> Launched | None:
    """Records of the step that follows a forward graph, with what the step returns; None where
    there are none. Forward runs under `autocast`. What was assumed, or why there are none, is added
    to `assumed`."""
    try:
        maker = "loss() of the model's file" if loaded.loss else "the model"
        found = joint(traced, loaded.fake, maker, autocast)
        launcher = EagerTrace()
        outputs = launch(found.traced, launcher)
    except Exception as error:  # noqa: BLE001 whatever autograd or a tracer raises
        _log.debug("no joint graph", exc_info=error)
        assumed.append(f"{_ALONE}: {first_line(error)}")
        return None
    assumed.append(f"whole training step, {found.assumed}")
    gradients = dict(zip(found.parameters, outputs[-len(found.parameters) :], strict=True))
    try:
        assumed.append(update(launcher, gradients, scenario.optimizer, loaded.optimizer))
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 an optimizer is somebody's code
        assumed.append(f"optimizer=none: {scenario.optimizer} raised {first_line(error)}")
    return launcher, outputs


_ALONE = "forward pass alone, no backward"
