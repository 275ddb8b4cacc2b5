"""Account of the kernels that are placed in a model. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusion_advisor.report.formats import wording


@dataclass
class Placed:
    """Account of a model's groups: `kernels` has in how many places each kernel runs, by name;
    `refused` why other groups do not run as kernels, by name; `saved_us` the microseconds that the
    kernels are predicted to save in a call, and `accepted_us` the microseconds that all accepted
    groups would save; `rewrites` in how many places the graph was rewritten, by the rewrite, and
    `rewritten_at` the lines of the user's source that were, each as `file:line`."""

    kernels: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    saved_us: float = 0.0
    accepted_us: float = 0.0
    rewrites: Mapping[str, int] = field(default_factory=dict[str, int])
    rewritten_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @property
    def share(self) -> float:
        """Saving of the kernels as a share of the saving of all accepted groups. 1 where there are
        none; 0 where the saving is unknown, since a graph was left as it is."""
        if self.accepted_us:
            return self.saved_us / self.accepted_us
        return 0.0 if self.refused else 1.0

    def __str__(self) -> str:
        places, share = sum(self.kernels.values()), wording.percent(self.share)
        lines = [
            f"kernels in {places} places save {wording.time(self.saved_us)} of "
            f"{wording.time(self.accepted_us)} that analysis accepts ({share})"
        ]
        lines += [f"  {name} x{count}" for name, count in self.kernels.items()]
        for name, count in self.rewrites.items():
            places = ", ".join(self.rewritten_at.get(name, ()))
            lines += [f"  rewritten: {name} x{count}" + f" at {places}" * bool(places)]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)
