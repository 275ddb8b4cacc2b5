"""Source expression of each node, as a trace of the model's own code recorded it.

A `Trail` is the record that `frontend.source_tracer` makes while a model is traced: the calls of
functions with source (of torch's own, `Sequential.forward` alone), and the events in them in order.
Free of torch.

A value is named by a word: `#3` is the value of step 3, `@2` the graph's third placeholder,
`:layers.0` a module by its path (`:` is the model itself), `=0.5` a Python value: a number, a plain
string or a function of torch, as source spells it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_advisor.support.codec import row


@row
@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Stretch of source: lines count from 1, columns are bytes of UTF-8 from 0, the end is
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
    """One call of a function, by its qualified name: the caller, the place of the call in it, and
    the word of the returned value."""

    file: str
    function: str
    caller: int | None
    place: Span | None
    value: str | None = None


@row
@dataclass(frozen=True, slots=True)
class Evaluation:
    """Step that made a node of the graph: the expression at `place`."""

    activation: int
    place: Span


@dataclass(frozen=True, slots=True)
class Chosen:
    """Step just before a branch of a conditional expression, `a if c else b` or `a and b`, or of an
    `if` on one line is evaluated: one that makes no node would leave no trace."""

    activation: int
    branch: Span


@row
@dataclass(frozen=True, slots=True)
class Moment:
    """Step just before a line runs, with the words of the local names."""

    activation: int
    line: int
    names: dict[str, str]


LENGTH = "len()"
"""Name under which a container of modules has how many it holds."""

SEQUENTIAL = "torch.nn.Sequential.forward"
"""Name of an activation that runs the modules of a `Sequential`. Its moments are those before each
of them: `self` is the `Sequential`, `module` what runs next."""

CHANGING = "..."
"""Marker in place of an attribute that the model sets as it runs."""

OPAQUE = "?"
"""Marker in place of an object that no source spells, of which the code may take numbers."""

UNSPELLED = "?()"
"""Marker in place of a callable that no source spells and whose code is not followed: a partial, a
function of a library, a method of a module of torch's."""


@row
@dataclass(frozen=True, slots=True)
class ModuleAttributes:
    """Module by its class, as source spells it (`torch.nn.GELU`; other classes by their bare
    names), and the Python values of its attributes, as source spells them: `eps`,
    `config.rms_norm_eps`."""

    kind: str
    file: str
    """File that defines the class; empty for torch's."""
    plain: dict[str, str] = field(default_factory=dict[str, str])
    inherited: tuple[str, ...] = ()
    """Names of attributes that a class of torch gives to one that inherits from it."""
    forward: str = ""
    """File, without its folder, and qualified name of what a call of the module runs:
    `norms.py:Norm.forward`; empty for what has no code."""


@dataclass(frozen=True, slots=True)
class Trail:
    """Steps of a trace in order. `placeholders` are the graph's, by their paths in the model
    (`layers.0.weight`) or by the names of inputs; `values` says which output of which node a word
    stands for; `modules` are by path, with the values of the attributes that the code names. `tied`
    has all paths of a parameter or buffer that has several, by each of them, `shared` the other
    paths of a module that has several, by its first. `packages` are those that files ran as modules
    of, by the files, with dots; "" for a file that is a module by itself."""

    activations: tuple[Activation, ...]
    steps: tuple[Evaluation | Chosen | Moment, ...]
    placeholders: tuple[str, ...] = ()
    values: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    modules: dict[str, ModuleAttributes] = field(default_factory=dict[str, ModuleAttributes])
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    packages: dict[str, str] = field(default_factory=dict[str, str])
