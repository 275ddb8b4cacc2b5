"""Advice that the kernels have no backward."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model


def find(model: Model) -> Iterator[Advice]:
    """One for a model in training that has groups."""
    if model.training and model.grouped:
        message = (
            "the kernels are for the forward pass: where an operand requires gradients, their"
            " launchers run the eager reference, and nothing is saved"
        )
        yield Advice("forward-only", message, None, ())
