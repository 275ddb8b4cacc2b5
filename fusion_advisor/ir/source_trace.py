"""Which expression of the source made each node, as a trace of the model's own code recorded it.

A `Trail` is what `capture.source_tracer` writes down while a model is traced: the calls of
functions whose source there is (torch's own are left out), and in order what happened in them. Free
of torch.

A value is named by a word: `#3` is what step 3 evaluated, `@2` the graph's third placeholder,
`:layers.0` a module by its path (`:` is the model itself), `=0.5` what Python holds: a number, a
plain string or a function of torch's, as source spells it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_advisor.support.codec import row


@row
@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stretch of source: lines count from 1, columns are bytes of UTF-8 from 0, the end is
    exclusive, as in Python's `ast`."""

    line: int
    column: int
    end_line: int
    end_column: int

    def holds(self, other: Span) -> bool:
        """Whether the other stretch lies within this one."""
        return (
            (self.line, self.column) <= (other.line, other.column)
            and (other.end_line, other.end_column) <= (self.end_line, self.end_column)
        )  # fmt: skip


@row
@dataclass(frozen=True, slots=True)
class Activation:
    """One call of a function, by its qualified name: by whom, from where in it, and the word of
    what it returned."""

    file: str
    function: str
    caller: int | None
    place: Span | None
    value: str | None = None


@row
@dataclass(frozen=True, slots=True)
class Evaluation:
    """A node of the graph was made by the expression at `place`."""

    activation: int
    place: Span


@row
@dataclass(frozen=True, slots=True)
class Moment:
    """A line is about to run; the words of the local names."""

    activation: int
    line: int
    names: dict[str, str]


CHANGING = "..."
"""What stands for an attribute that the model sets as it runs."""


@row
@dataclass(frozen=True, slots=True)
class Held:
    """A module by its class, as source spells it (`torch.nn.GELU`; others by their bare names), and
    what Python holds in it, as source spells it, by attributes: `eps`, `config.rms_norm_eps`."""

    kind: str
    file: str
    """That the class is written in; empty for torch's."""
    plain: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Trail:
    """The steps of a trace in their order. `placeholders` are the graph's, by their paths in the
    model (`layers.0.weight`) or by the names of inputs; `values` says which output of which node a
    word stands for; `modules` are by their paths, with what they hold in attributes that the code
    names."""

    activations: tuple[Activation, ...]
    steps: tuple[Evaluation | Moment, ...]
    placeholders: tuple[str, ...] = ()
    values: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    modules: dict[str, Held] = field(default_factory=dict[str, Held])
