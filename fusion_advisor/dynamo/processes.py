"""Decisions of a stopwatch in a group of processes: rank 0 makes them and tells the others, by the
store at which the group met.

No collective call is made: processes may compile other graphs than rank 0 does, or the same in
another order, and would wait for each other for good. A decision is found by what was asked, and
who does not hear of it in time goes by the rules.
"""
# torch.distributed is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import distributed_c10d


@dataclass
class Ranks:
    """Processes of a group, seen from one of them. `waited_s`: how long the others wait for rank 0;
    `late`: rank 0 did not tell in that time once, and this process no longer waits."""

    rank: int
    store: Any
    waited_s: float
    late: bool = False

    def decided(self, asked: Mapping[str, Any], decide: Callable[[], Any]) -> Any:
        """Rank 0's decision on what is asked, JSON like the question; None where it came too
        late. `decide` is called on rank 0 alone."""
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        if self.rank == 0:
            made = decide()
            self.store.set(key, json.dumps(made))
            return made
        if self.late:
            return None
        try:
            self.store.wait([key], timedelta(seconds=self.waited_s))
        except RuntimeError:  # of the store, whose kinds differ in what they raise
            self.late = True
            warnings.warn(
                f"fusion_advisor: rank 0 chose no kernels for rank {self.rank} in"
                f" {self.waited_s:.0f} s; rank {self.rank} goes by the rules",
                stacklevel=2,
            )
            return None
        return json.loads(self.store.get(key))


def grouped() -> bool:
    """Whether this process is one of a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def ranks(waited_s: float) -> Ranks | None:
    """Group that this process is in; None where there is none."""
    if not grouped():
        return None
    return _ranks(distributed_c10d._get_default_store(), torch.distributed.get_rank(), waited_s)


@cache
def _ranks(store: Any, rank: int, waited_s: float) -> Ranks:
    return Ranks(rank, distributed_c10d.PrefixStore("fusion_advisor", store), waited_s)
