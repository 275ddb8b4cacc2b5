"""Findings that are not a fusion, by the name of their kind in `rules/advice/`."""

from collections.abc import Callable, Iterator

from fusion_advisor.advice import (
    checkpoint,
    differs_from_eager,
    float64,
    float_copies,
    forward_only,
    growing_cache,
    hidden_copy,
    host_sync,
    kept_results,
    launch_bound,
    masked_attention,
    materialised_logits,
    repeated_heads,
    same_sum,
    unfused_optimizer,
    unread_result,
    weight_cast,
    wide_gradients,
)
from fusion_advisor.advice.base import Advice, Model

KINDS: dict[str, Callable[[Model], Iterator[Advice]]] = {
    "launch-bound": launch_bound.find,
    "masked-attention": masked_attention.find,
    "repeated-heads": repeated_heads.find,
    "hidden-copy": hidden_copy.find,
    "growing-cache": growing_cache.find,
    "weight-cast": weight_cast.find,
    "float64": float64.find,
    "host-sync": host_sync.find,
    "unread-result": unread_result.find,
    "unfused-optimizer": unfused_optimizer.find,
    "materialised-logits": materialised_logits.find,
    "float-copies": float_copies.find,
    "kept-results": kept_results.find,
    "checkpoint": checkpoint.find,
    "same-sum": same_sum.find,
    "wide-gradients": wide_gradients.find,
    "forward-only": forward_only.find,
    "differs-from-eager": differs_from_eager.find,
}

__all__ = ["KINDS", "Advice", "Model"]

OFFERS = (
    "base",
    "run",
)
"""The modules that other rooms may import."""
