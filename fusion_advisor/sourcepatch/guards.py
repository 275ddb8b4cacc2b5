"""Guards: the conditions under which the replaced source computes something else than its kernel.

A kernel is made for a mode, a dtype, and the numbers that the model held when it was captured. A
guard stands in the source before the call; where it holds, the original statements run.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Literal, cast

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import Arg, Node, Ref
from fusion_advisor.ir.source_trace import CHANGING, LENGTH, UNSPELLED, ModuleAttributes, Span
from fusion_advisor.ops import REGISTRY
from fusion_advisor.sourcepatch.editing.called import Called, another_function, none_of
from fusion_advisor.sourcepatch.editing.constructors import PARAMETERS, Constructors
from fusion_advisor.sourcepatch.editing.numbers import HeldNumber, HeldNumbers
from fusion_advisor.sourcepatch.editing.opened import alters
from fusion_advisor.sourcepatch.editing.outline import require_function
from fusion_advisor.sourcepatch.editing.rewrite import Edit, NotPlaced
from fusion_advisor.sourcepatch.editing.sources import (
    Block,
    Function,
    SourcePlace,
    Sources,
    SpelledCall,
    assigned,
    held_path,
    span_of,
    spelled,
)
from fusion_advisor.sourcepatch.editing.spelling import (
    SpellingAtPlace,
    binds,
    enclosed,
    parameters,
)
from fusion_advisor.sourcepatch.given import Held
from fusion_advisor.sourcepatch.other_sizes import SIZED


@dataclass(frozen=True)
class Other:
    """The source as it runs in another mode, dtype or autocast."""

    sources: Sources
    differs: Literal["mode", "dtype", "autocast"]
    training: bool = False
    """Whether the mode is training, where `differs` is `mode`."""


@dataclass(frozen=True)
class _Ask:
    """Condition on a dimension of a tensor: that it has another size, or, with `one`, one
    element. Before it is asked whether the tensor has as many dimensions as it had."""

    ref: Ref
    rank: int
    dim: int
    size: int
    one: bool = False

    def text(self, name: str) -> str:
        return f"{name}.size({self.dim}) {'== 1' if self.one else f'!= {self.size}'}"

    def holds(self, there: Dataflow) -> bool:
        """Whether it holds in the model at another size; not where that makes no such tensor."""
        tensor = there.annotated.tensors.get(self.ref)
        if tensor is None:
            return False
        if len(tensor.shape) != self.rank:
            return True
        found = tensor.shape[self.dim]
        return found == 1 if self.one else found != self.size


def _asked(ref: Ref | None, shape: Sequence[int], dim: int) -> Iterator[_Ask]:
    if ref is not None:
        yield _Ask(ref, len(shape), dim, shape[dim])
        if shape[dim] != 1:
            yield _Ask(ref, len(shape), dim, shape[dim], one=True)


def _telling(
    asks: Mapping[str, _Ask], others: Sequence[Dataflow], served: Sequence[Dataflow]
) -> list[str]:
    """Texts of conditions of which one holds in each of some graphs; none where some is not told.
    The first holds in most of them, and of such conditions in the fewest that are served."""
    told = {text: sum(ask.holds(each) for each in others) for text, ask in asks.items()}
    lost = {text: sum(ask.holds(each) for each in served) for text, ask in asks.items()}
    best = max(asks, key=lambda text: (told[text], -lost[text]), default="")
    if not told.get(best):
        return []
    left = [each for each in others if not asks[best].holds(each)]
    more = _telling(asks, left, served) if left else []
    return [best, *more] if more or not left else []


@dataclass(frozen=True)
class Guards:
    """The source as it ran, in other modes and dtypes, and at other sizes."""

    sources: Sources
    flow: Dataflow
    others: Sequence[Other] = ()
    resized: Sequence[Sources] = ()

    def of(
        self,
        place: SourcePlace,
        edit: Edit,
        operands: Mapping[Ref, str],
        passed: Collection[Held] = (),
        *,
        renumbered: Collection[str] = (),
        only_dtype: bool,
    ) -> str:
        """The condition under which what is replaced computes something else; empty where there is
        none. `operands` are the texts of what its kernel takes. Numbers that are `passed` need no
        asking; those of nodes that are `renumbered` at other sizes do, though sizes are asked for:
        they may follow from more. With `only_dtype` another dtype is one.
        NotPlaced where it cannot be asked there."""
        self._require_once(place.block, edit)
        here = _computed(self.sources, place.block, edit)
        names = self.sources.names.get(place, {}).get(edit.lines[0], {})

        def given(ref: Ref) -> str:
            return self._given(edit, operands[ref]) if ref in operands else ""

        def module(path: str) -> Iterator[str]:
            text = spelled(self.sources.trail, path, names) or ""
            return _another_module(text, self._modules(place.block, edit).get(text, set()))

        whole = any("float" not in self.sources.dtype(ref) for ref in operands)
        conditions = {
            **dict.fromkeys(self._called.conditions(place, edit, given, module)),
            **dict.fromkeys(self._exchanged(place, edit, names, passed)),
            **dict.fromkeys(self._elsewhere(place, edit, here, names, operands, only_dtype)),
            **dict.fromkeys(self._numbers(place, edit, passed, renumbered, whole=whole)),
            **dict.fromkeys(self._told_apart(place, edit, names)),
            **dict.fromkeys(self._dropping(place, edit, names)),
        }
        return " or ".join(conditions)

    def _require_once(self, block: Block, edit: Edit) -> None:
        """NotPlaced where operands that a function beside the kernels makes draw random numbers or
        write in place in another mode: they are made again where the kernel is refused."""
        for other in self.others if edit.opened else ():
            held = other.sources.held
            places = [place for place in held if place.block == block]
            steps = (s for each in places for s, at in held[each].items() if edit.takes(at.span))
            kept = frozenset(step for step in steps if other.sources.stays(step, edit.opened))
            if alters(other.sources, kept):
                text = edit.opened[0].text
                raise NotPlaced(f"line {edit.lines[0]}: `{text}` may be made once alone")

    # Another size.

    def of_size(
        self,
        place: SourcePlace,
        edit: Edit,
        others: Sequence[Dataflow],
        served: Sequence[Dataflow] = (),
    ) -> str:
        """Condition that tensors have sizes as they have in some graphs at other sizes: another
        than captured, or one element; and whether they have these dimensions. It asks as little as
        tells all of them, and of that what is so in the fewest graphs that are `served`. Raises
        NotPlaced where no name tells one."""
        tensors, asks = self.flow.annotated.tensors, dict[str, _Ask]()
        ranks = dict[str, str]()
        for name, word in self.sources.names.get(place, {}).get(edit.lines[0], {}).items():
            ref = self.sources.value(word)
            shape = tensors[ref].shape if ref else ()
            for dim in range(len(shape)):
                more = {ask.text(name): ask for ask in _asked(ref, shape, dim)}
                asks |= more
                ranks |= dict.fromkeys(more, f"{name}.dim() != {len(shape)}")
        found = _telling(asks, others, served)
        if not found:
            raise NotPlaced(
                f"line {edit.lines[0]}: it serves one size alone, which no name has there"
            )
        return " or ".join(dict.fromkeys(part for text in found for part in (ranks[text], text)))

    def telling(
        self, edit: Edit, some: Sequence[SourcePlace], others: Sequence[SourcePlace]
    ) -> str:
        """Condition that holds in some runs of a block and in none of the others, by the sizes of
        what the kernel is given, or by which of it is one tensor; empty where there is none."""
        known = [self._facts_at(place, edit) for place in others]
        found = dict[str, None]()
        for place in some:
            own = self._facts_at(place, edit)
            texts = [text for text in own if all(text not in each for each in known)]
            if not texts:
                return ""
            if not any(text in own for text in found):
                found[texts[0]] = None
        return " or ".join(found)

    def _facts_at(self, place: SourcePlace, edit: Edit) -> list[str]:
        """The sizes of an edit's operands that have names, or that modules hold, as one run of the
        block has them, and which of these are one: as conditions."""
        names = self.sources.names.get(place, {}).get(edit.lines[0], {})
        found, words = list[str](), dict[str, str]()
        for text in dict.fromkeys(edit.taken.operands):
            node, placeholders = ast.parse(text, mode="eval").body, self.sources.trail.placeholders
            held = held_path(node, names)
            word = names.get(node.id, "") if isinstance(node, ast.Name) else ""
            if held in placeholders:
                word = f"@{placeholders.index(held)}"
            ref = self.sources.value(word)
            shape = self.sources.shape(ref) if ref else ()
            found += (f"{text}.size({dim}) == {size}" for dim, size in enumerate(shape))
            if ref:
                words[text] = word
        pairs = combinations(words, 2)
        return [*found, *(f"{a} is {b}" for a, b in pairs if words[a] == words[b])]

    def require_settled(self, place: SourcePlace, edit: Edit) -> None:
        """NotPlaced where a condition reads what the model sets as it runs: it may be set between
        the lines that asked it and the call."""
        names = self.sources.names.get(place, {}).get(edit.lines[0], {})
        for text in edit.conditions:
            for node in ast.walk(ast.parse(text, mode="eval")):
                path = held_path(node, names) if isinstance(node, ast.Attribute) else None
                held, inside = self.sources.innermost(path or "")
                if held.plain.get(".".join(inside)) == CHANGING:
                    what = f"line {edit.lines[0]}: `{ast.unparse(node)}` changes as the model runs"
                    raise NotPlaced(f"{what}, and cannot be asked there")

    def gives_way(self, edit: Edit, run: SourcePlace) -> bool:
        """Whether a condition of an edit holds in another run of its block, for another branch ran
        there, of its lines or of a function that they call."""
        return self._called.branches_otherwise(edit, run)

    def launches_otherwise(self, place: SourcePlace, edit: Edit, there: Sources) -> bool:
        """Whether the text that an edit replaces launches other ops in another run of the model."""
        here, other = (_launched(s, place.block, edit) for s in (self.sources, there))
        return here != other

    def of_dtypes(self, operands: Mapping[Ref, str]) -> Iterator[str]:
        """Conditions that operands have other dtypes than captured, which a launcher asks."""
        yield from (
            _in_other_dtype(text, self.sources.dtype(ref)) for ref, text in operands.items()
        )

    def is_composite(self, block: Block, edit: Edit) -> bool:
        """Whether one expression that an edit replaces launches several ops in some run of a block:
        torch's own code then decides which."""
        return any(map(edit.takes, self._composite[block]))

    def inverts(self, edit: Edit) -> bool:
        """Whether an edit replaces a `~`, which raises an error of its own where the op raises
        another one."""
        expressions = self.sources.file(edit.file).expressions.items()
        inverted = (s for s, n in expressions if isinstance(getattr(n, "op", None), ast.Invert))
        return any(map(edit.takes, inverted))

    @cached_property
    def _composite(self) -> Mapping[Block, set[Span]]:
        """Places of the expressions that launch several ops, by block; a function of torch's in
        Python makes each in a step of its own, and one of the user's in a block of its own."""
        found, position = defaultdict[Block, set[Span]](set), self.flow.position
        inner = {
            step: place
            for place in sorted(self.sources.held, key=lambda place: place.activation)
            for step in self.sources.held[place]
        }
        for place, held in self.sources.held.items():
            launched = Counter[Span]()
            for step, standing in held.items():
                if inner[step] == place:
                    made = self.sources.made.get(step, ())
                    launches = (self.flow.launches(position[node.name]) for node in made)
                    launched[standing.span] += sum(launches)
            found[place.block] |= {span for span, count in launched.items() if count > 1}
        return found

    def of_held(
        self,
        place: SourcePlace,
        edit: Edit,
        held: Sequence[tuple[Ref, int]],
        operands: Mapping[Ref, str],
        asked: str = "",
    ) -> Iterator[str]:
        """Conditions that dimensions of a kernel's operands have other sizes than captured, where
        the condition `asked` does not ask it already; `operands` are the texts of all. A function
        beside the kernels asks what has no name of the operand that it is given; NotPlaced where
        there can be none."""
        words = self.sources.names.get(place, {}).get(edit.lines[0], {})
        names = {self.sources.value(word): name for name, word in words.items()}
        for ref, dim in held:
            shape = self.flow.annotated.tensors[ref].shape
            size, spelt = shape[dim], (dim, dim - len(shape))
            called = self.sources.names.get(place, {}).get(edit.called.line, {})
            same = {name: word for name, word in words.items() if called.get(name) == word}
            name = names.get(ref) or self._view_of_named(ref, operands[ref], same)
            if not name:
                name = self._given(edit, operands[ref])
            if not name:
                taken = self.sources.described(ref.node)
                raise NotPlaced(
                    f"line {edit.lines[0]}: it serves {size} alone in dimension {dim} of {taken}, "
                    "for its numbers may follow from that, and no name there holds it"
                )
            known = (f"{name}.{t}" for d in spelt for t in (f"size({d})", f"shape[{d}]"))
            if not any(f"{text} != {size}" in asked for text in known):
                yield f"{name}.size({dim}) != {size}"

    def _given(self, edit: Edit, operand: str) -> str:
        """Text of an operand where a function beside the kernels is given it; else empty."""
        text = ast.unparse(ast.parse(f"({operand}).size", mode="eval")).removesuffix(".size")
        if " or " in text:  # which stands between conditions
            return ""
        asking = replace(edit, guard=f"{text}.dim() == 0")
        try:
            require_function(self.sources.file(edit.file), asking)
        except NotPlaced:
            return ""
        return text

    def _view_of_named(self, ref: Ref, text: str, words: Mapping[str, str]) -> str:
        """Text of an operand that is a view of what a name holds as the edit begins, or that a
        module holds which has one; else empty. `words` are those of the names that are not bound
        anew up to the call."""
        mentioned = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        base, held = self.flow.base(ref), map(self.sources.value, words.values())
        bases = {name: of and self.flow.base(of) for name, of in zip(words, held, strict=True)}
        of_module = self.flow.nodes[self.flow.position[base.node]].kind in ("parameter", "buffer")
        viewed = all(
            bases.get(name) == base or (of_module and words.get(name, "").startswith(":"))
            for name in mentioned
        )
        return text if viewed and not text.isidentifier() else ""

    def notices(
        self,
        place: SourcePlace,
        edit: Edit,
        passed: Collection[Held],
        sources: Sources,
        flow: Dataflow,
    ) -> bool:
        """Whether some condition of an edit asks for a number that differs in the source as it ran
        built otherwise."""
        asked = [
            {
                *guards._exchanged(place, edit, names, passed),
                *guards._numbers(place, edit, passed),
            }
            for guards in (
                Guards(self.sources, self.flow, resized=self.resized),
                Guards(sources, flow, resized=self.resized),
            )
            for names in [guards.sources.names.get(place, {}).get(edit.lines[0], {})]
        ]
        return bool(asked[0] - asked[1])

    # Another mode, dtype, autocast.

    def _elsewhere(
        self,
        place: SourcePlace,
        edit: Edit,
        here: Mapping[object, set[str]],
        names: Mapping[str, str],
        operands: Mapping[Ref, str],
        only_dtype: bool,
    ) -> Iterator[str]:
        other_dtype = any(other.differs == "dtype" for other in self.others)
        read = self._dtypes(place, edit, operands)
        converts = not other_dtype and self._converts(place, edit)
        if only_dtype or converts or len(read) > 1:
            yield from self._of_dtype(edit, names, read)
        for other in self.others:
            there = _computed(other.sources, place.block, edit)
            differing = here.keys() ^ there.keys()
            if not differing:
                continue
            if other.differs == "mode":
                for sources, ran in ((self.sources, here), (other.sources, there)):
                    own = {m for key in differing for m in ran.get(key, ())}
                    yield from _in_mode(sources, place.block, edit, own, training=other.training)
            elif other.differs == "autocast":
                yield "torch.is_autocast_enabled()"
            else:
                yield from self._of_dtype(edit, names, read)

    def _converts(self, place: SourcePlace, edit: Edit) -> bool:
        """Whether what an edit replaces asks for a dtype that the model may be cast to: where the
        model was not seen in another, that may be its inputs'."""
        flow, spelling = self.flow, SpellingAtPlace(self.sources, place, edit.lines[0])

        def casts(node: Node) -> bool:
            of = flow.annotated.tensors[flow.operands[flow.position[node.name]][0]]
            return not self._cast_with_the_model.isdisjoint((of.dtype, node.out.dtype))

        def asks(node: ast.AST) -> bool:
            if not isinstance(node, ast.Attribute) or node.attr not in _CONVERTING:
                return False
            ref = spelling.tensor(node.value, place.activation)
            ref = ref or self.sources.value_at(place, span_of(node.value))
            whole = ref is not None and "float" not in self.sources.dtype(ref)
            return not whole or node.attr not in _TO_ONE_DTYPE

        taken = self.sources.taken(place, edit.takes, edit.opened)
        nodes = (node for step, _ in taken for node in self.sources.made.get(step, ()))
        return any(node.op == "aten._to_copy.default" and casts(node) for node in nodes) or any(
            map(asks, self._replaced(edit))
        )

    @cached_property
    def _cast_with_the_model(self) -> set[str]:
        """Dtypes of the floating tensors that the model is given or holds."""
        given = (node for node in self.flow.nodes if node.kind != "call")
        return {t.dtype for node in given for t in node.outputs if t and "float" in t.dtype}

    def _of_dtype(
        self, edit: Edit, names: Mapping[str, str], read: Mapping[str, str]
    ) -> Iterator[str]:
        """Conditions that tensors have other dtypes than they were captured in: those whose dtypes
        are `read`, else the first that has a name."""
        refs = ((name, self.sources.value(word)) for name, word in names.items())
        known = ((name, self.sources.dtype(ref)) for name, ref in refs if ref is not None)
        first = next((pair for pair in known if "float" in pair[1]), None)
        if not read and first is None:
            raise NotPlaced(f"line {edit.lines[0]}: another dtype changes what it computes")
        asked = read or dict(filter(None, [first]))
        yield from (_in_other_dtype(text, dtype) for text, dtype in asked.items())

    def _dtypes(
        self, place: SourcePlace, edit: Edit, operands: Mapping[Ref, str]
    ) -> dict[str, str]:
        """The float tensors whose dtypes what an edit replaces reads, or that it converts: their
        texts, with the dtypes. Of one that is made there, those that the kernel is given."""
        spelling = SpellingAtPlace(self.sources, place, edit.lines[0])
        read = [(place.activation, node) for node in self._replaced(edit)]
        for number in self.sources.called(place, edit.takes, edit.opened):
            function = self.sources.code(number)
            read += [(number, node) for node in ast.walk(function)] if function else []
        leaves = [leaf for part in edit.taken.parts for leaf in part.leaves]
        found, between = dict[str, str](), set[Ref]()
        for number, node in read:
            values: list[ast.expr] = []
            match node:
                case ast.Attribute(value, "dtype"):
                    values.append(value)
                case ast.Call(ast.Attribute(value, name), args) if name in _CONVERTING:
                    values += (value, *args)
                case _:
                    pass
            parts = (n for value in values for n in ast.walk(value) if isinstance(n, ast.expr))
            for each in parts:
                own = number == place.activation and edit.keeps(span_of(each))
                ref = None if own else spelling.tensor(each, number)
                text = spelling.of(each, number) if ref else None
                if ref is not None and text is not None:
                    found[ast.unparse(text)] = self.sources.dtype(ref)
                elif ref is not None:
                    between.add(ref)
            inside = {text for span, text in leaves if any(span_of(v).holds(span) for v in values)}
            for ref, text in operands.items() if number == place.activation else ():
                if text in inside and not text.isidentifier() and (text := self._given(edit, text)):
                    found[text] = self.sources.dtype(ref)
        found |= self._of_operands(place, edit, self._made_of(between, operands))
        return {text: dtype for text, dtype in found.items() if "float" in dtype}

    def _of_operands(
        self, place: SourcePlace, edit: Edit, operands: Mapping[Ref, str]
    ) -> dict[str, str]:
        """Dtypes of operands, by texts that the place has for them."""
        words, found = self.sources.names.get(place, {}).get(edit.lines[0], {}), dict[str, str]()
        for ref, name in operands.items():
            text = name if self.sources.value(words.get(name)) == ref else ""
            if not name.isidentifier():
                text = self._given(edit, name)
            if text:
                found[text] = self.sources.dtype(ref)
        return found

    def _made_of(self, values: Iterable[Ref], operands: Mapping[Ref, str]) -> dict[Ref, str]:
        """The operands that some values are made of, with their texts."""
        todo, seen = [*values], set[Ref]()
        while todo:
            ref = todo.pop()
            if ref not in seen and ref not in operands and ref.node in self.flow.position:
                todo += self.flow.operands[self.flow.position[ref.node]]
            seen.add(ref)
        return {ref: text for ref, text in operands.items() if ref in seen}

    # Another module.

    def of_chains(
        self, place: SourcePlace, edit: Edit
    ) -> Iterator[tuple[Span, tuple[str, ...], bool]]:
        """Yield the calls of a `Sequential` that are spelled out of which an edit takes a part, the
        conditions that one runs otherwise, and whether all of it is taken."""
        for span, call in self.sources.file(edit.file).spelled.items():
            taken = [edit.takes(link) for link in call.links]
            if any(taken):
                yield span, self._of_containers(place.block, span, call), all(taken)

    def _of_containers(self, block: Block, span: Span, call: SpelledCall) -> tuple[str, ...]:
        """The conditions that a `Sequential` of a call runs otherwise than in some run of a
        block."""
        if (block, span) not in self._known_chains:
            found = list[str]()
            node = self.sources.file(block.file).expressions[span]
            runs = [run for run in self.sources.names if run.block == block]
            words = [self.sources.at(node, run.activation, run) or {} for run in runs]
            for text, _ in reversed(call.containers):
                callee = ast.parse(text, mode="eval").body
                paths = filter(None, (self.sources.held_module(callee, names) for names in words))
                found += _another_module(text, {self._kind(path) for path in paths})
            self._known_chains[block, span] = tuple(found)
        return self._known_chains[block, span]

    def _exchanged(
        self, place: SourcePlace, edit: Edit, names: Mapping[str, str], passed: Collection[Held]
    ) -> Iterator[str]:
        """Conditions that a module whose call is removed is of another class or has hooks, or that
        it, or the module that is edited, holds other numbers which torch's own code reads."""
        trail = self.sources.trail
        made = _computed(self.sources, place.block, edit, place)
        for text, held in self._modules(place.block, edit).items():
            yield from _another_module(text, held)
        given_too = {(each.module, each.attribute) for each in passed if each.attribute}
        lengths = self._normalized_lengths(place, edit)
        for path in sorted(set[str]().union(*made.values())):
            text, held = spelled(trail, path, names), trail.modules.get(path)
            if held is None:
                continue
            if not self._constructors.says_parameters(path):
                held_too = (f"{path}.{each}" in trail.placeholders for each in PARAMETERS)
                for name, there in zip(PARAMETERS, held_too, strict=True):
                    if there and text is not None:
                        yield f"{text}.{name} is None"
            given = {text for key, paths in made.items() if path in paths for text in _given(key)}
            # What has no parameters is its numbers, those that are the op's defaults included.
            alone = held.kind.startswith("torch.nn.") and not _is_dropout(held)
            alone &= not any(each.startswith(f"{path}.") for each in trail.placeholders)
            for name in held.inherited if held.file else held.plain:
                value = held.plain[name]
                if (path, name) in given_too:
                    continue
                named = value in given or value == "None" or value.startswith("'")
                if not (named or (alone and name.isidentifier())):
                    continue
                if text is None:
                    raise NotPlaced(f"line {edit.lines[0]}: no name there holds {path}")
                if name == "normalized_shape" and lengths.get((path, value)):
                    value = f"({lengths[path, value]},)"
                yield _differs(f"{text}.{name}", value)

    def _normalized_lengths(self, place: SourcePlace, edit: Edit) -> dict[tuple[str, str], str]:
        """Texts of the size that a norm without weights has to be for, by its path and that size
        as a tuple: its kernel serves any."""
        spelling = SpellingAtPlace(self.sources, place, edit.lines[0])
        nodes = (
            node
            for step, _ in self.sources.taken(place, edit.takes, edit.opened)
            for node in self.sources.made.get(step, ())
            if "norm" in node.op
        )
        given = ((node.module, next(iter(node.refs()), None)) for node in nodes)
        return {
            (path, f"({self.sources.shape(ref)[-1]},)"): spelling.size(ref, -1)
            for path, ref in given
            if ref is not None and self.sources.shape(ref)
        }

    def _modules(self, block: Block, edit: Edit) -> Mapping[str, set[_Kind]]:
        """The modules whose calls are removed in some run of a block, as its text spells them: the
        classes that are there in all of its runs, and what their calls run. NotPlaced where no name
        holds one."""
        if (block, edit) not in self._known_modules:
            trail, found = self.sources.trail, dict[str, set[_Kind]]()
            runs = [place for place in self.sources.names if place.block == block]
            words = [self.sources.names[run].get(edit.lines[0], {}) for run in runs]
            for run, names in zip(runs, words, strict=True):
                gone = set[str]().union(*_computed(self.sources, block, edit, run).values())
                gone |= self._called.modules(run, edit)
                for path in sorted(gone - {self.sources.module(run.activation)}):
                    text = spelled(trail, path, names)
                    if text is None:
                        raise NotPlaced(
                            f"line {edit.lines[0]}: no name there holds {path or 'the model'}, "
                            "whose call goes"
                        )
                    found.setdefault(text, set())
            for text, held in found.items():
                node = ast.parse(text, mode="eval").body
                paths = filter(None, (self.sources.held_module(node, names) for names in words))
                held |= {self._kind(path) for path in paths}
            self._known_modules[block, edit] = found
        return self._known_modules[block, edit]

    def _kind(self, path: str) -> _Kind:
        """The class of a module, as a condition can ask for it. NotPlaced where its file has
        several classes of that name."""
        held = self.sources.trail.modules[path]
        runs = held.forward.rpartition(":")[2]
        if held.file and runs in self.sources.file(held.file).repeated:
            raise NotPlaced(f"which of several {runs}() is called cannot be asked")
        return held.kind, held.forward, held.plain.get(LENGTH, "")

    # What was the same by chance.

    def _replaced(self, edit: Edit) -> Iterator[ast.AST]:
        """Yield the nodes of the text that an edit replaces."""
        file = self.sources.file(edit.file)
        for span, _ in edit.replaced:
            node = file.expressions.get(span) or file.statements.get(span)
            yield from ast.walk(node) if node is not None else ()

    def _told_apart(
        self, place: SourcePlace, edit: Edit, names: Mapping[str, str]
    ) -> Iterator[str]:
        """Conditions that two names or attributes of the replaced text are no longer one tensor, or
        one module, which the kernel is given once."""
        function = self.sources.code(place.activation)
        first = dict[Ref, str]()
        read = [n.id for n in self._replaced(edit) if isinstance(n, ast.Name)]
        for name in dict.fromkeys(read):
            ref = self.sources.value(names.get(name))
            if ref is None or function is None:
                continue
            other = first.setdefault(ref, name)
            line = edit.lines[0]
            if name != other and not (
                _follows(function, name, other, line) or _follows(function, other, name, line)
            ):
                yield f"{name} is not {other}"
        trail, tied = self.sources.trail, dict[tuple[str, ...], str]()
        owners = {other: first for first, others in trail.shared.items() for other in others}
        for node in self._replaced(edit):
            held = isinstance(node, ast.Attribute | ast.Subscript)
            path = held_path(node, names) if held else None
            if path is None:
                continue
            text = ast.unparse(node)
            if path in owners:
                same = spelled(trail, owners[path], names)
                if same not in (None, text):
                    yield f"{text} is not {same}"
            same = tied.setdefault(trail.tied.get(path, (path,)), text)
            if same != text:
                yield f"{text} is not {same}"

    def _dropping(self, place: SourcePlace, edit: Edit, names: Mapping[str, str]) -> Iterator[str]:
        """Conditions that a dropout trains which dropped nothing when the model was captured: its
        share may be another one later. One in an operand stays as it was."""
        asked = set[str | None]()
        for node in self._replaced(edit):
            if not isinstance(node, ast.Call) or edit.keeps(span_of(node)):
                continue
            path = held_path(node.func, names)
            held = None if path is None else self.sources.trail.modules.get(path)
            if held is not None and _is_dropout(held):
                asked.add(path)
                yield f"{ast.unparse(node.func)}.training"
            elif ast.unparse(node.func).rpartition(".")[2] == "dropout":
                given = [*node.args, *(each.value for each in node.keywords)]
                yield from (
                    ast.unparse(each)
                    for each in given
                    if isinstance(each, ast.Attribute) and each.attr == "training"
                )
        for path in sorted(self._called.modules(place, edit) - asked):
            held = self.sources.trail.modules.get(path)
            share = held.plain.get("p", "") if held and _is_dropout(held) else ""
            if share in _DROPPING_NOTHING:
                text = spelled(self.sources.trail, path, names)
                if text is None:
                    raise NotPlaced(f"line {edit.lines[0]}: whether {path} drops cannot be asked")
                yield f"{text}.p != {share}"

    # Another number.

    def _numbers(
        self,
        place: SourcePlace,
        edit: Edit,
        passed: Collection[Held],
        renumbered: Collection[str] = (),
        *,
        whole: bool = False,
    ) -> Iterator[str]:
        """Conditions that numbers which Python holds have changed, for those that were
        always the same, or that nodes which are `renumbered` were given; with `whole`, where
        integers are computed with, that they are of another type: 2.0 makes floats of those."""
        seen, together = self._seen(place.block, edit), dict[str, Mapping[_Run, str]]()
        for number, decisive in _read(*self._readers[0], place, edit, renumbered):
            if any(each.has(number.file, number.span) for each in passed):
                continue
            runs = seen[number.file, number.span, number.text]
            values = {*runs.values()}
            if len(values) > 1 and not decisive:
                config = number.of == "module" or (number.of == "name" and _is_fixed(runs))
                if config and number.text and CHANGING not in values:
                    together[number.text] = runs
            elif number.text:
                if number.of == "name" and self._is_bound_again(place, number.text):
                    yield f"isinstance({number.text}, torch.Tensor)"  # a sum that begins with 0
                yield _differs(number.text, number.value)
                if whole and number.value.lstrip("-")[:1].isdigit():
                    kind = type(ast.literal_eval(number.value)).__name__
                    yield f"type({number.text}) is not {kind}"
            elif number.value != "None":  # what is not given is seldom given later
                marks = {CHANGING: "what changes in", UNSPELLED: "which function is called in"}
                what = marks.get(number.value, f"the {number.value} of")
                raise NotPlaced(
                    f"line {edit.lines[0]}: {what} {number.file}:{number.span.line} cannot be "
                    "asked there"
                )
        yield from _as_seen(together)

    def _is_bound_again(self, place: SourcePlace, name: str) -> bool:
        """Whether the function of a place binds a name several times."""
        function = self.sources.code(place.activation)
        nodes = ast.walk(function) if function else ()
        return sum(binds(node, name) for node in nodes) > 1

    def _seen(self, block: Block, edit: Edit) -> Mapping[tuple[str, Span, str], Mapping[_Run, str]]:
        """The values of each number of an edit, by its place and text, in all runs of its block."""
        if (block, edit) not in self._known:
            seen = self._known[block, edit] = defaultdict[tuple[str, Span, str], dict[_Run, str]](
                dict
            )
            for size, (sources, reader) in enumerate(self._readers):
                for run in [run for run in sources.names if run.block == block]:
                    for number, _ in _read(sources, reader, run, edit):
                        seen[number.file, number.span, number.text][size, run] = number.value
        return self._known[block, edit]

    @cached_property
    def _called(self) -> Called:
        return Called(self.sources)

    @cached_property
    def _constructors(self) -> Constructors:
        return Constructors(self.sources.trail, self.sources.file)

    @cached_property
    def _known(self) -> dict[tuple[Block, Edit], dict[tuple[str, Span, str], dict[_Run, str]]]:
        """Answers so far: the edits of many occurrences are the same."""
        return {}

    @cached_property
    def _known_chains(self) -> dict[tuple[Block, Span], tuple[str, ...]]:
        return {}

    @cached_property
    def _known_modules(self) -> dict[tuple[Block, Edit], dict[str, set[_Kind]]]:
        return {}

    @cached_property
    def _readers(self) -> list[tuple[Sources, HeldNumbers]]:
        return [(sources, HeldNumbers(sources)) for sources in (self.sources, *self.resized)]


def not_implied(conditions: Sequence[str]) -> Iterator[str]:
    """Yield conditions of which any decides, without those that hold only where another one does,
    `a and b` beside `b`: what that asks of a module, one of another class may not have."""
    for text in conditions:
        match ast.parse(text, mode="eval").body:
            case ast.BoolOp(ast.And(), parts) if {*map(ast.unparse, parts)} & {*conditions}:
                continue
            case _:
                yield text


_Kind = tuple[str, str, str]
"""Class of a module, what a call of it runs, and of a `Sequential` how many modules it holds."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold what runs when it is called, beside `forward`."""
_DROPPING_NOTHING = ("0", "0.0", "False")
"""Shares of a dropout that drops nothing, and whether it trains."""
_TO_ONE_DTYPE = ("float", "half", "bfloat16", "double")
"""Attributes of tensors that name the dtype which they give."""
_CONVERTING = ("dtype", "to", "type", "type_as", *_TO_ONE_DTYPE)
"""Attributes of tensors that give or take a dtype."""


def _is_dropout(held: ModuleAttributes) -> bool:
    return held.kind.startswith("torch.nn.") and "Dropout" in held.kind


def _another_module(text: str, held: Collection[_Kind]) -> Iterator[str]:
    """Conditions that a module which `text` spells is of other classes, has hooks or holds other
    numbers of modules than some that were `held`."""
    kinds, runs, lengths = ({each[n] for each in held} for n in range(3))
    if len(kinds) == 1 == len(runs) and (kind := min(kinds)).startswith("torch."):
        yield f"type({text}) is not {kind}"
    elif held:
        yield from another_function(f"{text}.forward", runs)
    yield from (f"{text}.{hooks}" for hooks in _HOOKS if held)
    if held and "" not in lengths:
        yield none_of(f"len({text})", sorted(lengths))


def _follows(function: Function, name: str, other: str, line: int) -> bool:
    """Whether a name is always bound to what another one has as a line begins, or to what that
    hands on: `residual = x`, `y = x.float()`, and nothing in between binds either."""
    pairs = [
        (node, value)
        for node in ast.walk(function)
        for target, value in assigned(node)
        if isinstance(target, ast.Name) and target.id == name
    ]
    bound = [value for _, value in pairs]
    since = min((getattr(node, "lineno", 0) for node, _ in pairs), default=0)
    again = [
        node
        for node in ast.walk(function)
        if binds(node, name) or (binds(node, other) and getattr(node, "lineno", 0) >= since)
    ]
    own = [node for node, _ in pairs]
    if name in parameters(function) or any(
        node not in own and getattr(node, "lineno", 0) < line for node in again
    ):
        return False
    roots = [
        value.func.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
        else value
        for value in bound
    ]
    return bool(roots) and all(isinstance(r, ast.Name) and r.id == other for r in roots)


def _in_other_dtype(text: str, dtype: str) -> str:
    return f"{enclosed(text)}.dtype != torch.{dtype}"


_Run = tuple[int, SourcePlace]
"""A run of a block, in the model at one of the sizes that it was seen at."""


def _is_fixed(runs: Mapping[_Run, str]) -> bool:
    """Whether a number is the same at every size of the inputs, though not in every run."""
    first = {run: value for (size, run), value in runs.items() if size == 0}
    return all(first.get(run, value) == value for (_, run), value in runs.items())


def _as_seen(together: Mapping[str, Mapping[_Run, str]]) -> Iterator[str]:
    """Yield the condition that numbers, by their texts, are together as in none of some runs."""
    every = list(together.values())
    runs = dict.fromkeys(run for each in every for run in each)
    rows = {tuple(each[run] for each in every) for run in runs if all(run in e for e in every)}
    if len(every) > 1 and rows:
        seen = ", ".join(f"({', '.join(row)})" for row in sorted(rows))
        yield f"({', '.join(together)}) not in ({seen}{',' if len(rows) == 1 else ''})"
        return
    for text, values in together.items():
        yield f"{enclosed(text)} not in ({', '.join(sorted({*values.values()}))})"


def _differs(text: str, value: str) -> str:
    """Python condition that is true when expression `text` no longer equals the captured
    `value`."""
    text = enclosed(text)
    if value == "False":  # 0 is as good
        return text
    same = value in ("None", "True") or value.startswith("torch.")
    return f"{text} is not {value}" if same else f"{text} != {value}"


def _read(
    sources: Sources,
    reader: HeldNumbers,
    place: SourcePlace,
    edit: Edit,
    renumbered: Collection[str] = (),
) -> Iterator[tuple[HeldNumber, bool]]:
    """The numbers of the expressions that an edit removes from a place, each with whether it made a
    node that is `renumbered`."""
    for step, _ in sources.taken(place, edit.takes, edit.opened):
        made = sources.made.get(step, ())
        decisive = any(node.name in renumbered for node in made)
        idle = "" if made else reader.idle(step)
        plain = decisive or bool(idle) or any(node.op not in SIZED for node in made)
        for number in reader.read(step, place, edit.lines[0]) if made or idle else ():
            if idle == "dropout" and number.value not in _DROPPING_NOTHING:
                continue  # it drops as the module trains, which is asked
            if plain or number.of == "module":  # sizes that follow from tensors' are no numbers
                yield number, decisive


def _in_mode(
    sources: Sources, block: Block, edit: Edit, modules: Iterable[str], *, training: bool
) -> Iterator[str]:
    """Condition that one of the modules is in training, or is not, as a run of the block that has
    it spells that."""
    runs = [names for place, names in sources.names.items() if place.block == block]
    known = [names[edit.lines[0]] for names in runs if edit.lines[0] in names]
    for path in sorted(modules):
        texts = [
            text for names in known if (text := spelled(sources.trail, path, names)) is not None
        ]
        if not texts:
            raise NotPlaced(
                f"line {edit.lines[0]}: training changes what it computes, and no name there "
                f"holds the module {path or 'itself'}"
            )
        text = min(texts, key=len)
        yield f"{text}.training" if training else f"not {text}.training"


def _computed(
    sources: Sources, block: Block, edit: Edit, only: SourcePlace | None = None
) -> dict[object, set[str]]:
    """Launches of the text that an edit replaces, by place and arguments, with the modules that
    they are in: in every run of the block, or in one."""
    found: dict[object, set[str]] = {}
    for place in sources.held:
        if place.block != block or only not in (None, place):
            continue
        taken = sources.taken(place, edit.takes, edit.opened)
        made = [(span, node) for step, span in taken for node in sources.made.get(step, ())]
        own = {node.name for _, node in made}
        for span, node in made:
            given = _plain(node.args, own), _plain(node.kwargs, own)
            key = span, node.op, *given, sources.narrows(node)
            found.setdefault(key, set()).add(node.module)
    return found


def _launched(sources: Sources, block: Block, edit: Edit) -> set[tuple[object, object]]:
    """Ops that the text that an edit replaces launches, and where in it."""
    return {(key[0], key[1]) for key in _computed(sources, block, edit) if isinstance(key, tuple)}


def _given(computed: object) -> Iterator[str]:
    """The numbers and words among the arguments of what is computed, beside the sizes that a
    reference reads off its tensors."""
    if isinstance(computed, tuple):
        launch = cast("tuple[object, str, tuple[object, ...], object, bool]", computed)
        _, name, args, kwargs, _ = launch
        op = REGISTRY.get(name)
        numbers = (arg for place, arg in enumerate(args) if op is None or place not in op.sizes)
        yield from _texts(tuple(numbers))
        yield from _texts(kwargs)


def _texts(given: object) -> Iterator[str]:
    if isinstance(given, tuple):
        for part in cast("tuple[object, ...]", given):
            yield from _texts(part)
    elif isinstance(given, str):
        yield given


def _plain(arg: Arg, own: Collection[str]) -> object:
    """An argument; of a tensor whether one of the `own` nodes made it. What lies between two parts
    of an edit may compute nothing in one dtype, and a tensor of its own in another."""
    if isinstance(arg, tuple):
        return tuple(_plain(each, own) for each in arg)
    if isinstance(arg, Ref):
        return "own tensor" if arg.node in own else "tensor"
    return repr(arg)
