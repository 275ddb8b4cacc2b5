"""Advice on kernels in training: autograd does not know them."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model


def find(model: Model) -> Iterator[Advice]:
    """One for a model in training that has groups."""
    if model.training and model.grouped:
        step = any(node.phase == "backward" for node in model.flow.nodes)
        message = (
            "autograd knows none of the kernels, and their launchers run the eager reference where"
            " an operand requires gradients: call those of forward and of backward from a"
            " torch.autograd.Function"
            if step
            else "the kernels are for the forward pass: where an operand requires gradients, their"
            " launchers run the eager reference, and nothing is saved"
        )
        yield Advice("forward-only", message, None, ())
