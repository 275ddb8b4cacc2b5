"""Computation of a region in words that people use: `residual + RMSNorm`, `SwiGLU`, `mish + add`.

A norm, a softmax and the like are seen in the structure, however they are written; every launch
that is no part of one is named by its op.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.gates import Subject
from fusion_advisor.fusion.idioms import Form, gated, normalised, softmaxes, tanh_gelus
from fusion_advisor.fusion.lower import Expressed, boundary, lower_region
from fusion_advisor.ir.graph import FLOATS, Ref
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.schedules.names import Names

_MOST = 4
"""Limit on the words of a name. Beyond it, runs of plain ops become a count, then the last words
are left out."""

_CALLED = {
    "mm": "matrix product", "bmm": "matrix product", "addmm": "matrix product",
    "baddbmm": "matrix product", "_scaled_mm": "matrix product",
    "convolution": "convolution", "relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "elu": "ELU",
    "native_layer_norm": "LayerNorm", "_fused_rms_norm": "RMSNorm", "rms_norm": "RMSNorm",
    "native_group_norm": "GroupNorm", "native_batch_norm": "BatchNorm",
    "cudnn_batch_norm": "BatchNorm", "_native_batch_norm_legit": "BatchNorm",
    "_native_batch_norm_legit_no_training": "BatchNorm", "native_dropout": "dropout",
    "amax": "max", "amin": "min", "_to_copy": "cast", "clone": "copy",
    "constant_pad_nd": "pad", "_log_softmax": "log-softmax", "nll_loss_forward": "NLL loss",
}  # fmt: skip
"""Names of ops that are not called by their own name."""

_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "neg", "cast", "copy")
"""Words that say least of a computation."""

_MOVES = ("_to_copy", "clone", "copy", "copy_", "contiguous", "cat", "stack", "fill", "fill_")
"""Ops that compute nothing: named only where nothing else is there."""


@dataclass(frozen=True)
class _NamedIdiom:
    """Idiom with a name of its own: all launches from one of `starts` up to its result. Starts and
    result are values of the region."""

    name: str
    starts: frozenset[int]
    end: int


def computation_name(subject: Subject) -> str:
    """Identifier for a set of launches: what they compute, in the graph's order, of at most four
    words: `add_mish_rms_norm`. Where there are more, arithmetic is left out first, and what has a
    name of its own stays. The launches of one call of the source have the call's name."""
    flow, named = subject.flow, _named(subject)
    here = Counter(flow.nodes[i].fx for i in named)
    for i in named:
        call = flow.nodes[i].fx
        if here[call] == flow.launches_of[call] > 1:  # the whole call is here
            named[i] = re.sub(r"_\d+$", "", call)
    every = list(dict.fromkeys(map(_identifier, named.values())))
    words = list(dict.fromkeys(map(_identifier, _words(subject, named))))
    ops = set(map(_identifier, _plain(subject)))
    telling = sorted(words, key=lambda word: (word in ops, word in _ARITHMETIC))[:_MOST]
    name = "_".join(word for word in words if word in telling)
    if Names().claim(name) == name:
        return name
    # A kernel `sum` would hide Python's own.
    return f"repeated_{name}" if words == every else "_".join(every)


def _identifier(word: str) -> str:
    """Word as a part of a name: `RMSNorm` is `rms_norm`."""
    spelled = re.sub(r"(?<=[A-Za-z])Norm", "_norm", word.removeprefix("linalg "))
    return re.sub(r"\W+", "_", spelled, flags=re.ASCII).strip("_").lower()


def describe_computation(subject: Subject) -> str:
    """Words for a set of launches, in the graph's order, joined by ` + `."""
    words = _words(subject, _named(subject))
    if len(words) > _MOST:
        ops = _plain(subject)
        words = words if ops.issuperset(words) else list(_counted(words, ops))
    if len(words) > _MOST:
        words = [*words[: _MOST - 1], f"{len(words) - _MOST + 1} more"]
    return " + ".join(words)


def _named(subject: Subject) -> dict[int, str]:
    """Words for each launch: the idiom that it is part of, else its op."""
    named = {i: _of_op(subject.flow, i) for i in subject.launches}
    for name, members in _wholes(subject):
        named |= dict.fromkeys(members, name)
    return named


def _words(subject: Subject, named: Mapping[int, str]) -> list[str]:
    """Words for all launches, each once; without those for moves where there are others."""
    flow, launches = subject.flow, subject.launches
    moves = {_of_op(flow, i) for i in launches if _short(flow.nodes[i].op) in _MOVES}
    words = list(dict.fromkeys(named[i] for i in launches))
    return [word for word in words if word not in moves] or words


def _plain(subject: Subject) -> set[str]:
    """Names of the ops that are called by their own name."""
    return {_of_op(subject.flow, i) for i in subject.launches} - set(_CALLED.values())


def _counted(words: Iterable[str], ops: Set[str]) -> Iterator[str]:
    """Words, with each run of ops replaced by a count."""
    for plain, run in groupby(words, lambda word: word in ops):
        found = list(run)
        yield from [f"{len(found)} ops"] if plain and len(found) > 1 else found


def _short(op: str) -> str:
    """Short name of an op: `aten.add.Tensor` is `add`."""
    parts = op.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def _of_op(flow: Dataflow, launch: int) -> str:
    """Name of a launch by its op."""
    cost = flow.annotated.costs[flow.nodes[launch].name]
    if cost.pattern == "attention":
        return "attention"
    short = _short(flow.nodes[launch].op)
    return _CALLED.get(short, short.strip("_").replace("_", " "))


def _wholes(subject: Subject) -> Iterator[tuple[str, list[int]]]:
    """Yield each named idiom and its launches."""
    expressed = subject.expressed or _without_products(subject)
    if expressed is None:
        return
    form = Form(expressed.region)
    ends = _LaunchesOfValues(subject.flow, expressed, form)
    for i in form.region.all("add"):  # a part of a norm is called by that, below
        made = ends.launch_of(i)
        if made is None or not _short(subject.flow.nodes[made].op).startswith("add"):
            continue  # the last sum of a LayerNorm
        if _is_bias(form, i):
            yield "bias", [made]
    found = [
        *_norms(form),
        *_softmaxes(form),
        *_gates(form),
        *_gelus(form),
        *_rotations(form, ends),
    ]
    for whole in found:
        if members := ends.between(whole.starts, whole.end):
            yield whole.name, members
    for row in {start for whole in found if whole.name in _NORMS for start in whole.starts}:
        if _is_residual(form, row) and (made := ends.launch_of(row)) is not None:
            yield "residual", [made]


_NORMS = ("RMSNorm", "LayerNorm", "L2 norm")


def _without_products(subject: Subject) -> Expressed | None:
    """Region of the launches that could share a kernel, where matrix products keep the whole set
    from being a region."""
    flow = subject.flow
    fusible = [i for i in subject.launches if flow.fusible[i]]
    if not fusible or len(fusible) == len(subject.launches):
        return None
    try:
        return lower_region(flow, boundary(flow, fusible))
    except NotExpressible:
        return None


class _LaunchesOfValues:
    """Map from the values of a region to the launches that made them, and the launches between two
    values."""

    def __init__(self, flow: Dataflow, expressed: Expressed, form: Form) -> None:
        self.flow, self.expressed = flow, expressed
        self.members = [i for i in expressed.members if flow.launches(i)]
        self.makers = {
            form.bare(value): flow.position[name]
            for value, name in expressed.region.results.items()
        }
        self.before = {i: self._read(i) for i in self.members}

    def _read(self, launch: int) -> set[str]:
        """Tensors behind the operands of a launch."""
        return {self.flow.base(ref).node for ref in self.flow.operands[launch]}

    def launch_of(self, value: int) -> int | None:
        """Launch that made a value; None for an input of the region, and for a part of a launch."""
        return self.makers.get(value)

    def base(self, load: int) -> str:
        """Tensor behind a load; empty for the seed and the offset of random bits."""
        number = self.expressed.region.exprs[load].input
        if number >= len(self.expressed.inputs):
            return ""
        return self.flow.base(self.expressed.inputs[number]).node

    def between(self, starts: Iterable[int], end: int) -> list[int]:
        """Launches on the paths from a start to the end, with the end's own launch; empty where the
        end is no launch's result."""
        last = self.launch_of(end)
        if last is None:
            return []
        names = {self._name(start) for start in starts}
        found: list[int] = []
        for i in self.members:  # in the graph's order, so what a launch reads is seen before it
            if self.before[i] & names and i <= last:
                names.add(self.flow.nodes[i].name)
                found.append(i)
        needed = {last}
        for i in reversed(found):
            if i in needed:
                needed |= {self.flow.position[name] for name in self.before[i]}
        inside = {i for i in found if i in needed}
        whole = self.flow.nodes[last].out.numel
        for i in reversed(self.members):  # what is made for those alone: 1 + weight, say
            if self.flow.nodes[i].out.numel < whole and inside.issuperset(self._uses(i)):
                inside.add(i)
        return sorted(inside)

    def _uses(self, launch: int) -> Iterator[int]:
        node = self.flow.nodes[launch]
        return (use for n in range(len(node.outputs)) for use in self.flow.uses(Ref(node.name, n)))

    def _name(self, value: int) -> str:
        made = self.launch_of(value)
        if made is not None:
            return self.flow.nodes[made].name
        load = self.expressed.region.exprs[value].op == "load"
        return self.base(value) if load and self._given(value) else ""

    def _given(self, load: int) -> bool:
        return self.expressed.region.exprs[load].input < len(self.expressed.inputs)


# -- what has a name -------------------------------------------------------------------------------


def _norms(form: Form) -> Iterator[_NamedIdiom]:
    """Match a row times one over the root of its mean square, then a weight and a bias; or of its
    sum of squares."""
    for row, squared, centred in normalised(form):
        end = next(filter(None, (_scaled(form, i, squared) for i in form.users(squared))), None)
        if end is not None:
            mean = _of_a_mean(form, end, squared)
            name = "LayerNorm" if centred else "RMSNorm" if mean else "L2 norm"
            yield _NamedIdiom(name, frozenset({row}), _affine(form, end))


def _of_a_mean(form: Form, scaled: int, row: int) -> bool:
    """Whether a constant divides what a row is scaled by, on the way from the sum of squares."""
    others = (arg for arg in form.args(scaled) if arg != row)
    way = (form.expr(i) for arg in others for i in form.behind(arg, _ROOT))
    return any(any(map(form.constant, e.args)) for e in way if e.op in ("mul", "div"))


_ROOT = ("add", "mul", "div", "maximum", "sqrt", "rsqrt", "reciprocal")
"""Ops on the way from a sum of squares to what a row is divided by."""


def _scaled(form: Form, number: int, row: int) -> int | None:
    """Value itself, where it is a row divided by a root of something; else None."""
    expr = form.region.exprs[number]
    if expr.op not in ("mul", "div") or row not in form.args(number):
        return None
    under = (form.behind(arg, _ROOT) for arg in form.args(number) if arg != row)
    roots = any(form.expr(i).op in ("sqrt", "rsqrt") for values in under for i in values)
    return number if roots else None


def _affine(form: Form, number: int) -> int:
    """Value after scaling and shifting by factors and terms that are the same in every row."""
    region = form.region
    while True:
        after = next((i for i in form.users(number) if _by_a_row(form, i, number)), None)
        if after is None:
            return number
        number = after
        assert region.exprs[number].op in ("mul", "add")


def _by_a_row(form: Form, number: int, of: int) -> bool:
    """Whether a value is scaled or shifted by an operand that is the same in every row."""
    expr = form.region.exprs[number]
    if expr.op not in ("mul", "add") or expr.dtype not in FLOATS:
        return False
    others = [arg for arg in form.args(number) if arg != of]
    return len(others) == 1 and not form.constant(others[0]) and _is_a_row(form, others[0], of)


def _is_a_row(form: Form, number: int, of: int) -> bool:
    """Whether a value varies along fewer axes than another. With one row alone both have as many
    axes: then whether it is made of vectors alone, and the other is not."""
    depends = form.region.depends
    if depends[number] != depends[of]:
        return depends[number] < depends[of]
    return _rank(form, number) == 1 < _rank(form, of)


def _rank(form: Form, number: int) -> int:
    """Largest number of dimensions among the loads behind a value; 0 for a constant."""
    inputs = form.region.inputs
    return max((len(inputs[form.expr(i).input].shape) for i in _loads(form, number)), default=0)


def _is_bias(form: Form, number: int) -> bool:
    """Whether the value is a sum with a vector."""
    return any(
        _by_a_row(form, number, arg) and min(_rank(form, side) for side in form.args(number)) == 1
        for arg in form.args(number)
    )


def _is_residual(form: Form, row: int) -> bool:
    """Whether the row is a sum of two tensors of its own size, one of which is an input."""
    depends = form.region.depends
    if form.expr(row).op != "add":
        return False
    sides = form.args(row)
    alike = all(depends[side] == depends[row] and not _is_a_row(form, side, row) for side in sides)
    return alike and any(form.expr(side).op == "load" for side in sides)


def _softmaxes(form: Form) -> Iterator[_NamedIdiom]:
    for given, end in softmaxes(form):
        yield _NamedIdiom("softmax", frozenset({given}), end)


def _gates(form: Form) -> Iterator[_NamedIdiom]:
    """Match a · sigmoid(a), and that product times another factor."""
    for product, gate, more in sorted(gated(form), key=lambda found: found[2]):  # the larger last
        yield _NamedIdiom("SwiGLU" if more else "SiLU", frozenset({gate}), product)


def _gelus(form: Form) -> Iterator[_NamedIdiom]:
    """Match the whole GELU of u: the largest sum or product made of u and constants alone."""
    for tanh, given in tanh_gelus(form):
        end = tanh
        for i in form.region.live:
            factor = form.expr(i).op in ("add", "mul")
            if factor and end in form.args(i) and _only_of(form, i, given):
                end = i
        yield _NamedIdiom("GELU", frozenset({given}), end)


def _only_of(form: Form, number: int, given: int) -> bool:
    """Whether a value is made of `given` and of constants alone."""
    todo = [number]
    while todo:
        one = form.bare(todo.pop())
        if one == given or form.constant(one):
            continue
        args = form.args(one)
        if not args or form.expr(one).op == "load":
            return False
        todo.extend(args)
    return True


def _rotations(form: Form, ends: _LaunchesOfValues) -> Iterator[_NamedIdiom]:
    """Match x · cos ± y · sin, where x and y are elements of one tensor, and y has the other sign
    or another place."""
    for op in ("add", "sub"):
        for total in form.region.all(op):
            terms = [form.args(arg) for arg in form.args(total) if form.expr(arg).op == "mul"]
            if len(terms) == 2 and (turned := _turned(form, ends, terms)):
                yield _NamedIdiom("rotary embedding", turned, form.bare(total))


def _turned(
    form: Form, ends: _LaunchesOfValues, terms: Sequence[tuple[int, ...]]
) -> frozenset[int]:
    """Two values that are rotated; empty where there are none."""
    for x in terms[0]:
        for y in terms[1]:
            cos, sin = _other(terms[0], x), _other(terms[1], y)
            if x == y or cos == sin or form.constant(cos) or form.constant(sin):
                continue
            first, second = _loads(form, x), _loads(form, y)
            others = _loads(form, cos) | _loads(form, sin)
            bases = set(map(ends.base, first))
            same = bases and bases == set(map(ends.base, second)) and first != second
            if same and bases.isdisjoint(map(ends.base, others)):
                return frozenset({x, y})
    return frozenset()


def _other(factors: tuple[int, ...], one: int) -> int:
    """Second factor of a product; for a square the first again."""
    return next((factor for factor in factors if factor != one), one)


def _loads(form: Form, value: int) -> frozenset[int]:
    """Loads that a value is made of."""
    exprs = form.region.exprs
    found: set[int] = set()
    todo = [value]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo.extend(exprs[one].args)
    return frozenset(i for i in found if exprs[i].op == "load")
