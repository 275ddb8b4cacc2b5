"""Stage: accepted groups as edits of the files that the model is written in.

A span of source serves every call of its function, so a group is put there only if all of the
calls that ran ask for the same edit. What the source cannot express is refused with the reason.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path

from fusion_advisor.codegen.header import Stamp, edited, fingerprint, read_stamp, restamped, stamped
from fusion_advisor.codegen.held import held as held_to
from fusion_advisor.codegen.kernel_file import fixed_axes, only_indexed, origins
from fusion_advisor.codegen.kernel_package import (
    ASKING,
    Home,
    kernels_of,
    mark_of,
    package_files,
    place_of,
)
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import Finding
from fusion_advisor.fusion.gates import Subject
from fusion_advisor.fusion.idioms import name_of
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.fusion.lower import Boundary, Expressed, boundary, lower_region
from fusion_advisor.ir.graph import Node, Ref
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.region.axes import Dims
from fusion_advisor.report.formats import wording
from fusion_advisor.sourcepatch.editing.opened import opened_operand
from fusion_advisor.sourcepatch.editing.outline import (
    BY_SIZE,
    Choice,
    KernelRun,
    Outlines,
    choice,
    require_function,
)
from fusion_advisor.sourcepatch.editing.rewrite import Edit, KernelCall, NotPlaced, rewrite
from fusion_advisor.sourcepatch.editing.sequential import folded
from fusion_advisor.sourcepatch.editing.sources import (
    Block,
    ExpressionPosition,
    SourcePlace,
    Sources,
    span_of,
)
from fusion_advisor.sourcepatch.editing.splice import narrowed, nested, splice
from fusion_advisor.sourcepatch.given import GivenNumbers, Held
from fusion_advisor.sourcepatch.guards import Guards, Other, not_implied
from fusion_advisor.sourcepatch.other_sizes import (
    ResizedModel,
    Serving,
    alike,
    size_numbers,
)


@dataclass(frozen=True)
class PlacedGroup:
    """A group in the source: its edits, one for each block, how many of its occurrences they
    serve, and the name of the kernel that they call: its own, or that of a group of the same
    computation."""

    finding: Finding
    edits: tuple[Edit, ...]
    occurrences: int
    kernel: str


@dataclass
class Patch:
    """New texts of the files that change and of those that are added, by their paths; reasons for
    the groups that are left out, by their ids. `outdated` names for existing kernels the source
    files that have changed since."""

    puts: list[PlacedGroup] = field(default_factory=list[PlacedGroup])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    before: dict[Path, str] = field(default_factory=dict[Path, str])
    after: dict[Path, str] = field(default_factory=dict[Path, str])
    outdated: dict[Path, str] = field(default_factory=dict[Path, str])

    def diff(self, root: Path) -> str:
        """The patch in the format of `git apply`, with paths from `root`."""
        return "".join(
            _difference(path.relative_to(root).as_posix(), self.before.get(path), text)
            for path, text in sorted(self.after.items())
        )


_NUMBER = "a size became a number there"


@dataclass(frozen=True)
class Placement:
    """Conditions of the source on the groups, for `fusion.components`. `editable` says which
    functions may change, by a file and a line in them; `others` is the source as it runs otherwise,
    for the behaviour that must stay as it is then. With `operators` a group is put
    where one PyTorch op computes exactly the same, as a call of that op."""

    sources: Sources
    flow: Dataflow
    editable: Callable[[str, int], bool]
    others: tuple[Other, ...] = ()
    operators: bool = False
    resized: tuple[ResizedModel, ...] = ()
    """The model at other sizes."""
    batch: ResizedModel | None = None
    """The one of these at a larger batch; None without one."""
    seen: tuple[Sources, ...] = ()
    """The source as it ran at each of the other sizes."""
    general: Callable[[Decision], Decision] | None = None
    """The group that a kernel is written from: the group itself, or the same group at the
    larger batch."""
    decided: Callable[[Iterable[int]], Decision] | None = None
    """Decision on any launches."""
    given: GivenNumbers | None = None
    """The numbers that kernels are given; None where all are constants."""
    backward_held: Mapping[object, Sequence[tuple[int, int]]] = field(
        default_factory=dict[object, Sequence[tuple[int, int]]]
    )
    """Dimensions of what a group takes in which its backward serves one size, by its form."""
    serving: Serving | None = None
    """Comparison of launches by their kernels; None where each kernel serves its own alone."""

    @cached_property
    def _guards(self) -> Guards:
        pairs = zip(self.resized, self.seen, strict=True)
        seen = [sources for each, sources in pairs if not each.sizes.built]
        return Guards(self.sources, self.flow, self.others, seen)

    @cached_property
    def _numbers(self) -> list[dict[str, str]]:
        return size_numbers(self.flow, self.resized, self.sources.described)

    @cached_property
    def _told(self) -> list[Mapping[Ref, frozenset[int]]]:
        return [each.given for each in self.flow.varied]

    def judged(self, decision: Decision) -> Decision:
        """An accepted set with why the source cannot express it, if so."""
        expressed = decision.subject.expressed
        if not decision.accepted or expressed is None:
            return decision
        why = self.unexpressed(decision, decision.subject.border, expressed)
        return replace(decision, unplaced=why)

    def unexpressed(self, decision: Decision, border: Boundary, expressed: Expressed) -> str:
        """Reason why the source cannot express an occurrence of a group, lowered as `expressed`;
        empty where it can."""
        try:
            self.edited(decision, border, expressed, "kernel")
        except NotPlaced as reason:
            return str(reason)
        return ""

    def edited(
        self,
        decision: Decision,
        border: Boundary,
        expressed: Expressed,
        name: str,
        *,
        only_dtype: bool = False,
    ) -> tuple[SourcePlace, Edit]:
        """Find the place where one occurrence of a group, lowered as `expressed`, is made, and the
        edit there; `decision` is the group's. Raises NotPlaced with the reason."""
        call = self._call(decision.subject, expressed, name, only_dtype=only_dtype)
        members, call = self._before_copies(border.members, call)
        place, edit = rewrite(self.sources, self.flow, members, call)
        try:
            return place, self._asking(place, edit, decision, expressed, only_dtype=only_dtype)
        except NotPlaced as reason:
            raise reason.within(edit.file) from reason

    def _asking(
        self,
        place: SourcePlace,
        edit: Edit,
        decision: Decision,
        expressed: Expressed,
        *,
        only_dtype: bool,
    ) -> Edit:
        """The edit of a place with all that it has to ask. Raises NotPlaced with the reason."""
        unserved, renumbered = self._unserved(decision, expressed)
        if not self.editable(edit.file, edit.lines[0]):
            raise NotPlaced(
                f"{edit.file}:{edit.lines[0]}: {edit.function}() cannot be edited there"
            )
        passed = self._passed(expressed, edit)
        operands = dict(zip(expressed.inputs, edit.taken.operands, strict=False))
        names = {name for _, name, _ in renumbered}
        asked = self._guards.of(
            place, edit, operands, passed, renumbered=names, only_dtype=only_dtype
        )
        chains = [*self._guards.of_chains(place, edit)]
        inside = [c for _, each, all_of_it in chains if all_of_it or self.operators for c in each]
        parted = ((call, each) for call, each, all_of_it in chains if not all_of_it)
        guards = [*edit.steering, *inside, asked]
        asked_too = {*self._guards.of_dtypes(operands)}
        unserved += [
            each.flow
            for each, sources in zip(self.resized, self.seen, strict=True)
            if not each.sizes.built
            and all(each.flow is not flow for flow in unserved)
            and not alike(self.flow, each.flow)
            and self._guards.launches_otherwise(place, edit, sources)
        ]
        if unserved:
            left = {id(flow) for flow in (*unserved, *(flow for flow, *_ in renumbered))}
            served = [
                each.flow
                for each in self.resized
                if id(each.flow) not in left and alike(self.flow, each.flow)
            ]
            told = self._guards.of_size(place, edit, unserved, served)
            guards.append(told)
            if all(self._refused_by_shape(expressed, flow) for flow in unserved):
                asked_too |= {*told.split(" or ")}
        held = [] if self.operators else self._held(decision, expressed)
        asked_too |= {*self._guards.of_held(place, edit, held, operands)}
        more = self.backward_held.get(expressed.form, ()) if self.backward_held else ()
        held += [(expressed.inputs[n], d) for n, d in more if (expressed.inputs[n], d) not in held]
        self._refuse_renumbered(held, renumbered)
        guards += self._guards.of_held(place, edit, held, operands, " or ".join(guards))
        self._refuse_unnoticed(place, edit, decision, expressed, held, passed)
        edit = replace(edit, guard=" or ".join(dict.fromkeys(filter(None, guards))))
        edit = replace(edit, guard=" or ".join(not_implied(edit.conditions)))
        edit = replace(
            edit,
            with_statements=self._guards.is_composite(place.block, edit)
            or self._guards.inverts(edit)
            or any(held.leaves or held.attribute for held in passed),
            wholes=() if self.operators else tuple(parted),
            asked_too=frozenset(asked_too.intersection(edit.conditions)),
        )
        self.require_held(edit)
        self._guards.require_settled(place, edit)
        return edit

    def require_held(self, edit: Edit) -> None:
        """NotPlaced where nothing can hold what an edit asks, or names."""
        file = self.sources.file(edit.file)
        named = self.operators or "torch." in edit.guard
        if named and not (file.has_torch or file.may_import_torch):
            raise NotPlaced(f"{edit.file}: torch, which the edit names, is something else there")
        if not self.operators and (edit.needs_function or edit.wholes):
            require_function(file, edit)

    def _before_copies(
        self, members: Sequence[int], call: KernelCall
    ) -> tuple[Sequence[int], KernelCall]:
        """Members of a group and its call without the copies that an expression makes of what
        it is given, before it computes something else: `matmul`, of rows that lie apart. The call
        gives what is copied as the copy lies, and nothing is left to copy."""
        inside, outputs, views = {*members}, list[Ref](), list[str]()
        for ref in call.outputs:
            copied = self._copied.get(self.flow.position[ref.node], [])
            if copied and self.flow.position[copied[-1].node] in inside:
                inside -= {self.flow.position[each.node] for each in copied[:-1]}
                ref = copied[-1]
                views.append(self._back(copied) or "")
            outputs.append(ref)
        seen = next(filter(None, views), "")
        if seen and len(outputs) > 1:
            raise NotPlaced(f"{call.outputs[0].node} is a copy in another shape, beside others")
        return sorted(inside), replace(call, outputs=tuple(outputs), viewed=seen)

    @cached_property
    def _copied(self) -> dict[int, list[Ref]]:
        """Copies, each within a product of matrices in batches: a copy, the views that it is made
        of, and what the product is given, which is computed, and is read by nothing else. No op
        stands for one of these."""
        found, flow = dict[int, list[Ref]](), self.flow
        for number, node in enumerate(() if self.operators else flow.nodes):
            if node.op != "aten.clone.default" or node.step is None:
                continue
            if not self._multiplies(node.step):
                continue
            chain = [Ref(node.name)]
            while flow.nodes[at := flow.position[chain[-1].node]].step == node.step:
                of = flow.operands[at][0]
                if of in flow.returned or [*flow.readers.get(of, ())] != [at]:
                    break
                chain.append(of)
            else:
                if flow.nodes[at].kind == "call" and self._back(chain) is not None:
                    found[number] = chain
        return found

    def _back(self, chain: Sequence[Ref]) -> str | None:
        """Text behind a copy that is a view of it in the shape of what was copied, which is the
        last of a chain; None where the views between do more than to move dimensions and to add
        some of one element."""
        flow, tensors = self.flow, self.flow.annotated.tensors
        shape = tensors[chain[-1]].shape
        if tensors[chain[0]].shape == shape:
            return ""
        dims: list[int | None] = [*range(len(shape))]
        for ref in chain[-2:0:-1]:
            match flow.nodes[flow.position[ref.node]]:
                case Node(op="aten.unsqueeze.default", args=(_, int(at))):
                    dims.insert(at % (len(dims) + 1), None)
                case Node(op="aten.permute.default", args=(_, tuple(order))):
                    dims = [dims[at] for at in order if isinstance(at, int)]
                case _:
                    return None
        added = "".join(f".squeeze({at})" for at, dim in [*enumerate(dims)][::-1] if dim is None)
        left = [dim for dim in dims if dim is not None]
        order = [left.index(dim) for dim in range(len(left))]
        return added + (f".permute{tuple(order)}" if order != [*range(len(order))] else "")

    def _multiplies(self, step: int) -> bool:
        """Whether an expression is a product of two batches of matrices, which is the same product
        wherever they lie; one with a matrix alone, as a linear layer's, is another where rows lie
        together."""
        flow, tensors = self.flow, self.flow.annotated.tensors
        numbers = [flow.position[each.name] for each in self.sources.made.get(step, ())]
        launched = [n for n in numbers if flow.launches(n) and not flow.fusible[n]]
        given = [ref for n in numbers for ref in flow.operands[n]]
        given = [ref for ref in given if flow.position[ref.node] not in numbers]
        return [flow.nodes[n].op for n in launched] == ["aten.bmm.default"] and all(
            len(tensors[ref].shape) > len(("rows", "columns")) for ref in given
        )

    def _step(self, number: int) -> int | None:
        """Evaluation that a launch is put in place of: of a copy that an expression makes of
        what it is given, the one that makes that."""
        copied = self._copied.get(number)
        return self.flow.nodes[self.flow.position[copied[-1].node] if copied else number].step

    def _call(
        self, subject: Subject, expressed: Expressed, name: str, *, only_dtype: bool = False
    ) -> KernelCall:
        """Call that replaces one occurrence of a group. Raises NotPlaced where there is none."""
        if expressed.draws:
            raise NotPlaced("it draws random numbers, which would be others than torch's")
        for ref in expressed.inputs:
            node = self.flow.nodes[self.flow.position[ref.node]]
            if node.kind == "constant" and not node.out.shape:
                raise NotPlaced(f"{ref.node} is a number in a tensor, which may lie on the host")
        call = KernelCall(name, expressed.inputs, expressed.outputs, only_dtype=only_dtype)
        if not self.operators:
            return replace(call, numbers=partial(self._number_texts, expressed))
        spelling = exact(subject, name_of(subject, subject.rulebook))
        if spelling is None:
            raise NotPlaced("no PyTorch op computes exactly this")
        return replace(call, line=spelling.framework, names=spelling.names)

    def _members(self, expressed: Expressed) -> list[Node]:
        return [self.flow.nodes[number] for number in expressed.members]

    def _number_texts(
        self, expressed: Expressed, place: SourcePlace, line: int, names: Mapping[str, str]
    ) -> list[str]:
        """The numbers of an occurrence as a line of a place spells them."""
        if not (self.given and expressed.numbers):
            return []
        return self.given.texts(expressed.numbers, self._members(expressed), place, line, names)

    def _passed(self, expressed: Expressed, edit: Edit) -> list[Held]:
        """Origins of the numbers that an occurrence's kernel is given as the source spells them; of
        one that its call has as a literal a guard asks."""
        if not self.given or self.operators:
            return []
        texts = edit.taken.operands[len(expressed.inputs) :]
        given = {n.key: text for n, text in zip(expressed.numbers, texts, strict=True)}
        uses = self.given.of(self._members(expressed))
        literal = {number.key for number, held in uses if given[number.key] == held.literal}
        return [held for number, held in uses if number.key not in literal]

    def _unserved(
        self, decision: Decision, expressed: Expressed
    ) -> tuple[list[Dataflow], list[tuple[Dataflow, str, str]]]:
        """The model at the other sizes of its inputs at which neither a group's kernel nor its
        reference computes what it does there: those where a dimension of one element has another
        size, and those where any other number is another, or a size that the kernel's inputs lack,
        each with the node and that in words."""
        found, renumbered = list[Dataflow](), list[tuple[Dataflow, str, str]]()
        read = _read(decision, expressed)
        widens = self.general is not None and self.general(decision) is not decision
        for each, numbers, told in zip(self.resized, self._numbers, self._told, strict=True):
            if each.sizes.built:
                continue
            for ref, dims in expressed.dims.items():
                if ref in expressed.inputs:
                    continue
                if ref.node in numbers:
                    why = f"{self.sources.described(ref.node)}: {_NUMBER}: {numbers[ref.node]}"
                    renumbered.append((each.flow, ref.node, why))
                sizes = self.flow.annotated.tensors[ref].shape
                for d in self._unread(ref, dims, told, read):
                    if sizes[d] != 1:
                        why = f"{sizes[d]} in dimension {d}, which is no size of what it takes"
                        said = self.sources.described(ref.node)
                        renumbered.append((each.flow, ref.node, f"{said}: {_NUMBER}: {why}"))
                    elif not (widens and each is self.batch):
                        found.append(each.flow)
        return [*{id(flow): flow for flow in found}.values()], renumbered

    def _refused_by_shape(self, expressed: Expressed, there: Dataflow) -> bool:
        """Whether a kernel's operands have shapes at another size that its launcher refuses: one
        axis has two sizes, or a dimension of one element another. The launches before them
        are those that were captured."""
        here, sizes = self.flow.annotated.tensors, dict[tuple[int, ...], int]()
        nodes = [self.flow.nodes[self.flow.position[ref.node]] for ref in expressed.inputs]
        if not alike(self.flow, there) and any(node.kind == "call" for node in nodes):
            return False
        for ref in expressed.inputs:
            shape = there.annotated.tensors[ref].shape
            for d, dim in enumerate(expressed.dims[ref]):
                known = sizes.setdefault(dim, shape[d]) if dim else here[ref].shape[d]
                if shape[d] != known:
                    return True
        return False

    def _refuse_renumbered(
        self, held: Sequence[tuple[Ref, int]], renumbered: Sequence[tuple[Dataflow, str, str]]
    ) -> None:
        """NotPlaced where a group has other numbers at other sizes, and none of the sizes that its
        kernel is held to is another there; or one of these is no last dimension: what a model's
        weights do not hold differs from call to call, and a kernel that serves one size of it
        would seldom run."""
        here = self.flow.annotated.tensors
        last = all(d == len(here[ref].shape) - 1 for ref, d in held)
        for flow, _, why in renumbered:
            there = flow.annotated.tensors
            if not last or all(there[ref].shape[d] == here[ref].shape[d] for ref, d in held):
                raise NotPlaced(why)

    def _held(self, decision: Decision, expressed: Expressed) -> list[tuple[Ref, int]]:
        """The dimensions of what an occurrence's kernel takes in which it serves one size."""
        subject = (self.general(decision) if self.general else decision).subject
        plan, written = subject.plan, subject.expressed
        if plan is None or written is None:
            return []
        return [
            (expressed.inputs[number], d)
            for number, d in held_to(
                subject.flow, written, origins(plan.region, fixed_axes(plan)),
                only_indexed(plan.region), subject.rulebook.held.telling.count,
            )
        ]  # fmt: skip

    @staticmethod
    def _unread(
        ref: Ref, dims: Dims, told: Mapping[Ref, frozenset[int]], read: Collection[int]
    ) -> list[int]:
        """The dimensions of a result whose other sizes cannot be read off what the kernel takes."""
        differing = sorted(told.get(ref, ()))
        return [d for d in differing if not dims[d] or any(axis not in read for axis in dims[d])]

    def _refuse_unnoticed(
        self,
        place: SourcePlace,
        edit: Edit,
        decision: Decision,
        expressed: Expressed,
        held: Sequence[tuple[Ref, int]],
        passed: Sequence[Held],
    ) -> None:
        """NotPlaced where a model that is built with other numbers has others in the group, or a
        size that the kernel's inputs lack, and nothing that the guard asks for is another there."""
        here, read = self.flow.annotated.tensors, _read(decision, expressed)
        inside = {r: dims for r, dims in expressed.dims.items() if r not in expressed.inputs}
        rows = zip(self.resized, self.seen, self._numbers, self._told, strict=True)
        for each, sources, numbers, told in rows:
            lacking = (
                ref
                for ref, dims in inside.items()
                if ref.node in numbers or self._unread(ref, dims, told, read)
            )
            ref = next(lacking, None) if each.sizes.built else None
            there = each.flow.annotated.tensors
            if ref is None or any(there[of].shape[d] != here[of].shape[d] for of, d in held):
                continue
            if not self._guards.notices(place, edit, passed, sources, each.flow):
                why = numbers.get(ref.node, f"a view has another size {each.said}")
                raise NotPlaced(f"{self.sources.described(ref.node)}: {_NUMBER}: {why}")

    def lines_of(self, finding: Finding) -> set[object]:
        """The texts of the source that a group would be put into, one for each that has an
        edit."""
        found = set[object]()
        for launches in finding.instances:
            border = boundary(self.flow, launches)
            with suppress(NotPlaced):  # told when it is put there
                _, edit = self.edited(
                    finding.decision, border, lower_region(self.flow, border), "kernel"
                )
                found.add((edit.block, edit.touched))
        return found

    def likewise(self, one: Decision, name: str, run: SourcePlace, edit: Edit) -> Decision | None:
        """Decision on what an edit replaces in another run of its block, if the same call may stand
        there: `one` is the decision on what it replaces, `name` the function that it calls."""
        if self.decided is None or self.serving is None:
            return None
        taken = self.sources.taken(run, edit.takes, edit.opened)
        nodes = (node for step, _ in taken for node in self.sources.made.get(step, ()))
        numbers = {self.flow.position[node.name] for node in nodes}
        launches = [number for number in numbers if self.flow.launches(number)]
        decision = self.decided(launches) if launches else None
        expressed = decision.subject.expressed if decision else None
        if decision is None or expressed is None or not self.serving.same(one, decision):
            return None
        try:
            found = self.edited(decision, decision.subject.border, expressed, name)
        except NotPlaced:
            return None
        there, own = found
        alike = _asking_alike({run: (own,), replace(run, activation=-1): (edit,)})
        return decision if there == run and alike[run] == (edit,) else None

    def kernel_for(
        self, finding: Finding, there: Decision, owners: Mapping[tuple[int, ...], str]
    ) -> str:
        """Name of the kernel for launches that a group's lines make in another run: the group's, if
        it serves them, else that of the launches' own group; empty where there is none."""
        assert self.serving is not None  # it said that the two are the same
        worth = there.accepted or there.worthwhile
        if worth and self.serving.serves(finding.decision, there):
            return finding.name
        return owners.get(there.subject.launches, "")

    def gives_way(self, edit: Edit, run: SourcePlace) -> bool:
        """Whether a condition of an edit holds in another run of its block, for another branch ran
        there."""
        return self._guards.gives_way(edit, run)

    def told_apart(
        self, edits: Sequence[Edit], some: Sequence[SourcePlace], others: Sequence[SourcePlace]
    ) -> str:
        """Condition that holds in some runs of lines, which stay as they are written there, and not
        in the others; empty where there is none."""
        if self.operators or len(edits) > 1 or len(some) > len(others):
            return ""
        return self._guards.telling(edits[0], some, others)

    def run_of(self, kernel: str, decision: Decision) -> KernelRun:
        """Run in which a kernel serves a set of launches."""
        expressed = decision.subject.expressed
        assert expressed is not None  # it has a plan
        reference = self.serving.reference(decision) if self.serving else ""
        tensors = self.flow.annotated.tensors
        return KernelRun(kernel, reference, [tensors[ref] for ref in expressed.inputs])

    def barred(self) -> Dataflow:
        """The dataflow with launches kept apart that no block of the source could have in
        one kernel."""
        holding: dict[SourcePlace, int] = {}
        possible = [tuple(self._possible(self._step(n))) for n in range(len(self.flow.nodes))]
        for number, places in enumerate(possible):
            for place in places:
                holding[place] = holding.get(place, 0) | 1 << number
        everything = (1 << len(self.flow.nodes)) - 1
        beyond: list[int] = []
        for places, barred in zip(possible, self.flow.beyond, strict=True):
            near = 0
            for place in places:
                near |= holding[place]
            beyond.append(barred | everything & ~near)
        return replace(self.flow, beyond=beyond)

    def called_together(
        self, groups: Iterable[tuple[int, ...]]
    ) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        """Sets of groups of which one call, which gives several results, makes a part of each: the
        source has the call, or a launcher of all of them."""
        parts = [launched(self.flow, group) for group in groups]
        calls = [[self._calls(launch) for launch in part] for part in parts]
        made = [frozenset[int]().union(*each) for each in calls]
        found = dict[tuple[int, ...], list[tuple[int, ...]]]()
        partly = (
            own - called[0].intersection(*called[1:])
            for own, called in zip(made, calls, strict=True)
        )
        for call in frozenset[int]().union(*partly):
            some = [part for part, own in zip(parts, made, strict=True) if call in own]
            if 1 < len(some) <= len(self.sources.returned(call)):
                found[tuple(sorted(n for part in some for n in part))] = some
        return found

    def _calls(self, launch: int) -> frozenset[int]:
        """The calls that a launch is made in, by their numbers."""
        step = self._step(launch)
        places = self.sources.standing[step] if step is not None else {}
        return frozenset(place.activation for place in places)

    def _possible(self, step: int | None) -> Iterator[SourcePlace]:
        """The places of an evaluation in which its statement has no block of its own, or is an `if`
        that computes nothing for what it asks, and the expression that it is a part of computes
        nothing that is in no kernel."""
        for place, standing in (self.sources.standing[step] if step is not None else {}).items():
            file = self.sources.file(place.block.file)
            statement = file.statements[standing.statement]
            asked = span_of(statement.test) if isinstance(statement, ast.If) else standing.statement
            if hasattr(statement, "body") and self.sources.evaluated(place, asked, within=True):
                continue
            if self._has_in_parts(place, standing):
                yield place

    def _has_in_parts(self, place: SourcePlace, standing: ExpressionPosition) -> bool:
        """Whether an expression computes nothing that is in no kernel, or is a call that may be
        opened, so that the rest are operands of a kernel."""
        if (place, standing) not in self._known_in_parts:
            beside = self.sources.evaluated(place, standing.span, within=False)
            numbers = [
                (step, self.flow.position[node.name])
                for step in beside
                for node in self.sources.made.get(step, ())
            ]
            apart = {s for s, n in numbers if self.flow.launches(n) and not self.flow.fusible[n]}
            called = self.sources.calls_at(place, standing.span) if not self.operators else ()
            names = self.sources.names.get(place, {}).get(standing.statement.line, {})

            def opens(step: int) -> bool:
                made = self.sources.value(f"#{step}")
                line = standing.statement.line
                return made is not None and bool(
                    opened_operand(self.sources, self.flow, place, line, names, made, set())
                )

            self._known_in_parts[place, standing] = not apart or (
                bool(called) and all(map(opens, sorted(apart)))
            )
        return self._known_in_parts[place, standing]

    @cached_property
    def _known_in_parts(self) -> dict[tuple[SourcePlace, ExpressionPosition], bool]:
        return {}

    def around(self, launch: int) -> Iterator[object]:
        """Yield the blocks of the source that a launch is made in, and the statements of these."""
        step = self._step(launch)
        for place, standing in (self.sources.standing[step] if step is not None else {}).items():
            yield from (place, (place, standing.statement))
        yield from (each for each in self.flow.called_together if launch in each)

    def kind(self, component: tuple[int, ...]) -> object:
        """Equal for components whose parts are made at the same places of the source."""
        known: dict[SourcePlace, int] = {}
        rows: list[object] = []
        for number in component:
            step = self._step(number)
            places = self.sources.standing[step] if step is not None else {}
            rows.append(tuple((known.setdefault(p, len(known)), p.block) for p in places))
        return tuple(rows)


def _read(decision: Decision, expressed: Expressed) -> Collection[int]:
    """The axes whose sizes a set's kernel reads off what it takes."""
    plan = decision.subject.plan
    return origins(expressed.region, fixed_axes(plan)) if plan else ()


def replaced_nodes(sources: Sources, edits: Collection[Edit]) -> set[str]:
    """The nodes of a graph, by name, that the text made which edits replace."""
    return {
        node.name
        for place in sources.held
        for edit in edits
        if place.block.file == edit.file
        for step, _ in sources.taken(place, edit.takes, edit.opened)
        for node in sources.made.get(step, ())
    }


class Kept(NotPlaced):
    """Raised for a group in whose place another one's kernel is put already."""

    def __init__(self, at: str, kernel: str) -> None:
        super().__init__(f"{at}: {kernel} is put there, a group with as much to save")
        self.kernel = kernel


@dataclass
class Together:
    """Groups whose edits one source can have: the edits, each with the group that it is of, the
    functions that choose a kernel, and reasons for the groups that are left out, by their ids.
    `kept` names the kernels that keep some of these out."""

    puts: list[PlacedGroup] = field(default_factory=list[PlacedGroup])
    edits: list[tuple[Edit, Finding]] = field(default_factory=list[tuple[Edit, Finding]])
    choices: list[Choice] = field(default_factory=list[Choice])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    kept: dict[str, str] = field(default_factory=dict[str, str])


def together(
    placement: Placement,
    findings: Sequence[Finding],
    package: str,
    only_dtype: Collection[str] = (),
) -> Together:
    """The groups that a source can express beside each other, in their order, with calls of
    kernels of a package; those of `only_dtype` serve the dtypes that were captured."""
    result = Together()
    chosen: dict[SourcePlace, list[Edit]] = {}
    waiting = {finding.id: finding for finding in findings}
    before = 0
    while len(waiting) != before:  # a call that is edited away no longer speaks against another
        before = len(waiting)
        for number in list(waiting):
            finding = waiting.get(number)
            if finding is None:
                continue
            try:
                alone = finding.name in only_dtype
                made = _edits(
                    placement, finding, package, chosen, waiting.values(), only_dtype=alone
                )
            except NotPlaced as reason:
                result.refused[finding.id] = str(reason)
                if isinstance(reason, Kept):
                    result.kept[finding.id] = reason.kernel
                continue
            for place, each in made.edits.items():
                chosen.setdefault(place, []).extend(each)
            once = tuple(dict.fromkeys(edit for each in made.edits.values() for edit in each))
            result.edits += ((edit, finding) for edit in once)
            result.choices += [made.choice] if made.choice else []
            for each in [*waiting.values()]:
                runs = {i: made.served.get(launched(placement.flow, i)) for i in each.instances}
                for kernel in dict.fromkeys(filter(None, runs.values())):
                    taken = tuple(i for i, by in runs.items() if by == kernel)
                    part = replace(each, instances=taken)
                    result.puts.append(PlacedGroup(part, once, len(taken), kernel))
                rest = tuple(i for i, by in runs.items() if by is None)
                waiting[each.id] = replace(each, instances=rest)
                if not rest:
                    del waiting[each.id]
                    result.refused.pop(each.id, None)
    return result


def patch(
    placement: Placement,
    findings: Sequence[Finding],
    kernels: Mapping[str, Kernel],
    home: Home,
    only_dtype: Collection[str] = (),
    standing: Mapping[Path, str] | None = None,
    stamps: Mapping[str, Stamp] | None = None,
) -> Patch:
    """The files with a call of its kernel in place of every group that they can express, or of an
    op of PyTorch's where the placement asks for those.

    `kernels` are those of the findings by their names, each proven, those of `only_dtype` for the
    dtypes that were captured; `home` is where the package with them lies. `standing` are the files
    of that package that are there already: its kernels stay, and serve findings of the same name.
    `stamps` say of the kernels what wrote and checked them. What guards ask, and the statements
    that run where they hold, are in functions beside the kernels.
    """
    standing, stamps = standing or {}, stamps or {}
    result = Patch()
    folder = home.folder
    proven = [finding for finding in findings if finding.name in kernels]
    what = "PyTorch op" if placement.operators else "kernel"
    result.refused |= {f.id: f"its {what} is not proven" for f in findings if f not in proven}
    made = together(placement, proven, folder.name, only_dtype)
    result.puts, result.refused = made.puts, result.refused | made.refused
    noted: dict[str, list[tuple[Edit, str]]] = {}
    for edit, finding in made.edits:
        note = _comment(finding, kernels[finding.name], placement.operators)
        noted.setdefault(edit.file, []).append((edit, note))
    there = kernels_of(standing)
    trained = {name for name, kernel in kernels.items() if kernel.gradients}
    outlines = Outlines(standing.get(folder / ASKING, ""), kernels.keys() | there.keys(), trained)
    for each in made.choices:
        kernel = kernels[each.kernels[-1]]
        outlines.choose(each, (*kernel.inputs, *kernel.numbers))
    for file, edits in noted.items():
        path, source = Path(file).resolve(), placement.sources.file(file)
        result.before[path] = source.before
        if placement.operators:
            imported = [] if source.has_torch else ["import torch"]
        else:
            edits = outlines.whole(source, outlines.outlined(source, edits))
            imported = [home.imported(path)]
        edits = [*nested(source, edits)]
        text = folded(source, splice(source.text, edits, imported, folder.name))
        result.after[path] = narrowed(text, source.before, folder.name)
    if placement.operators:
        return result
    texts = {name: _kept(result, folder, name, text) for name, text in there.items()}
    for put in result.puts:
        name = put.kernel
        if name not in texts:
            texts[name] = _new(result, placement, folder, put, kernels[name], stamps.get(name))
    changed = package_files(folder, texts, outlines.text) if texts else {}
    if texts.keys() == there.keys() and outlines.text == standing.get(folder / ASKING, ""):
        # what stands around them may be an older one's
        changed = {path: text for path, text in changed.items() if path.stem in texts}
    changed = {path: text for path, text in changed.items() if standing.get(path) != text}
    result.before |= {path: standing[path] for path in changed if path in standing}
    result.after |= changed
    return result


def _new(
    result: Patch,
    placement: Placement,
    folder: Path,
    put: PlacedGroup,
    kernel: Kernel,
    stamp: Stamp | None,
) -> str:
    """The file of a kernel that is added; a stamp names the sources as the patch leaves them."""
    if stamp is None:
        return kernel.text
    nodes = placement.flow.nodes
    made_in = [nodes[number].source for instance in put.finding.instances for number in instance]
    lines = [(source.file, source.line) for source in made_in if source]
    files = {file for file, line in lines if placement.editable(file, line)}
    paths = sorted({Path(file).resolve() for file in files | {edit.file for edit in put.edits}})
    sources = tuple((place_of(path, folder), _left(result, path)) for path in paths)
    return stamped(kernel.text, replace(stamp, sources=sources))


def _kept(result: Patch, folder: Path, name: str, text: str) -> str:
    """The file of a kernel that stays; its stamp names the sources as the patch leaves them."""
    stamp = read_stamp(text)
    if stamp is None or edited(text):
        return text
    paths = [(folder.parent / place).resolve() for place, _ in stamp.sources]
    pairs = zip(paths, stamp.sources, strict=True)
    old = [place for path, (place, mark) in pairs if mark_of(path) != mark]
    if old:
        result.outdated[folder / f"{name}.py"] = ", ".join(old)
    left = tuple((place_of(path, folder), _left(result, path)) for path in paths)
    return text if left == stamp.sources else restamped(text, left)


def _left(result: Patch, path: Path) -> str:
    """The fingerprint of a source file as a patch leaves it."""
    return fingerprint(result.after[path]) if path in result.after else mark_of(path)


@dataclass(frozen=True)
class _Chosen:
    """The edits of a group, by the places that it is made in, in one maybe several times. `served`
    has the launches of all runs of its lines, those that are another group's included, with the
    kernel that serves each; `choice` is the function that calls one of several kernels."""

    edits: dict[SourcePlace, tuple[Edit, ...]]
    served: dict[tuple[int, ...], str]
    choice: Choice | None = None


def _edits(
    placement: Placement,
    finding: Finding,
    package: str,
    chosen: Mapping[SourcePlace, Sequence[Edit]],
    others: Iterable[Finding] = (),
    choosing: str = "",
    *,
    only_dtype: bool,
) -> _Chosen:
    """Find the edits of a group, in which a kernel of one of the `others` may have to be called in
    some runs: then by the function called `choosing`. NotPlaced where a block would have to be
    edited differently for some of its runs, or where another group is put already."""
    flow, sources = placement.flow, placement.sources
    served = {launched(flow, each): finding.name for each in finding.instances}
    owners = {launched(flow, each): other.name for other in others for each in other.instances}
    first = finding.decision.subject.expressed
    assert first is not None  # an accepted set has a plan
    found: dict[Block, dict[SourcePlace, tuple[Edit, ...]]] = {}

    def add(place: SourcePlace, edit: Edit) -> None:
        here = found.setdefault(place.block, {})
        for other in (*chosen.get(place, ()), *here.get(place, ())):
            if not edit.takes_as_operand(other) and not other.takes_as_operand(edit):
                raise Kept(f"{edit.file}:{edit.lines[0]}", other.taken.kernel)
            if placement.operators and _guards_over(edit, other):
                at = f"{edit.file}:{edit.lines[0]}"
                raise NotPlaced(f"{at}: its guard would stand over another edit")
        here[place] = tuple(sorted((*here.get(place, ()), edit), key=lambda e: e.touched))

    name = f"{package}.{choosing or finding.name}"
    for launches in served:
        border = boundary(flow, launches)
        expressed = lower_region(flow, border)
        if first.form != expressed.form:
            raise NotPlaced("its occurrences take their operands in different orders")
        add(*placement.edited(finding.decision, border, expressed, name, only_dtype=only_dtype))
    runs = [placement.run_of(finding.name, finding.decision)]
    for block, edits in list(found.items()):
        edits = found[block] = _asking_alike(edits)
        every = next(iter(edits.values()))
        if any(each != every for each in edits.values()):
            raise NotPlaced(f"{every[0].function}(): its calls would be edited differently")
        ran = {place for place in sources.names if place.block == block}
        left = {p for p in ran - edits.keys() if not _edited_away(sources, p, chosen)}
        left -= {p for p in left if all(_passes_by(sources, p, edit) for edit in every)}
        for place in [place for place in sources.names if place in left]:
            kernels = dict[tuple[int, ...], str]()
            for edit in every:
                there = placement.likewise(finding.decision, name, place, edit)
                kernel = placement.kernel_for(finding, there, owners) if there else ""
                if there is None or not kernel:
                    break
                kernels[there.subject.launches] = kernel
                runs.append(placement.run_of(kernel, there))
            else:
                left.remove(place)
                served |= kernels
                for edit in every:
                    add(place, edit)
        for edit, place in product(every, left):
            for other in chosen.get(place, ()):
                _require_alternatives(edit, other)
        left -= {p for p in left if all(placement.gives_way(edit, p) for edit in every)}
        told = placement.told_apart(every, [*left], [*edits]) if left else ""
        if left and not told:
            raise NotPlaced(
                f"{every[0].function}() ran {len(ran)} times, and in {len(left)} of them its parts "
                "are not this group"
            )
        for place in edits if left else ():
            edits[place] = tuple(edit.guarded(told) for edit in edits[place])
            for edit in edits[place]:
                placement.require_held(edit)
    edits = {place: each for edits in found.values() for place, each in edits.items()}
    if {*served.values()} == {finding.name}:
        return _Chosen(edits, served)
    if choosing:
        for edit in {edit for each in edits.values() for edit in each}:
            require_function(sources.file(edit.file), edit)
        return _Chosen(edits, served, choice(choosing, runs))
    choosing = f"{finding.name}{BY_SIZE}"
    return _edits(placement, finding, package, chosen, others, choosing, only_dtype=only_dtype)


def _asking_alike(
    edits: dict[SourcePlace, tuple[Edit, ...]],
) -> dict[SourcePlace, tuple[Edit, ...]]:
    """The edits of a block, each with all that another run of it asks whether an operand is None,
    or what one is a view of: so it is in none of these, whether the class of its module says so or
    not."""

    def paths(edit: Edit) -> set[str]:
        nodes = (n for text in edit.taken.operands for n in ast.walk(ast.parse(text)))
        return {ast.unparse(n) for n in nodes if isinstance(n, ast.Name | ast.Attribute)}

    def asks(edit: Edit) -> set[str]:
        return {f"{text} is None" for text in paths(edit)}.intersection(edit.conditions)

    every = [edit for several in edits.values() for edit in several]
    asked = dict.fromkeys(text for edit in every for text in edit.conditions if text in asks(edit))
    launchers = {text for edit in every for text in edit.asked_too}.intersection(asked)

    def asking(edit: Edit) -> Edit:
        own = [text for text in asked if text.removesuffix(" is None") in paths(edit)]
        others = [text for text in edit.conditions if text not in asked]
        asked_too = edit.asked_too | launchers.intersection(own)
        return replace(edit, guard=" or ".join([*others, *own]), asked_too=asked_too)

    alike = len({edit.conditions for edit in every}) == 1
    return edits if alike else {place: tuple(map(asking, some)) for place, some in edits.items()}


def _require_alternatives(edit: Edit, other: Edit) -> None:
    """NotPlaced where two edits, of which each asks for its own runs, touch the same text and no
    one call can stand for both."""
    if edit.takes_as_operand(other) and other.takes_as_operand(edit):
        return
    if edit.wholes or other.wholes or edit.as_called() != other.as_called():
        at, taken = f"{edit.file}:{edit.lines[0]}", other.taken.kernel
        raise NotPlaced(f"{at}: {taken} is put there in other runs, over other lines")


def _guards_over(one: Edit, other: Edit) -> bool:
    """Whether a guard in the source, with the lines that it keeps, would hold both edits."""
    early, late = sorted((one.lines, other.lines))
    return bool(one.guard or other.guard) and late[0] <= early[1]


def launched(flow: Dataflow, instance: Iterable[int]) -> tuple[int, ...]:
    """The launches of an instance, without the views between them."""
    return tuple(sorted(number for number in instance if flow.launches(number)))


def _edited_away(
    sources: Sources, place: SourcePlace, chosen: Mapping[SourcePlace, Sequence[Edit]]
) -> bool:
    """Whether an edit removes the call that a place is in."""
    call = sources.trail.activations[place.activation]
    if call.caller is None or call.place is None:
        return False
    around = [*sources.chain(call.caller, call.place)]
    return any(
        edit.takes(span) and not any(sources.opens(edit.opened, *each) for each in around)
        for at, span in around
        for other, edits in chosen.items()
        if other.activation == at
        for edit in edits
    )


def _passes_by(sources: Sources, run: SourcePlace, edit: Edit) -> bool:
    """Whether a run of an edit's block comes to nothing of what it changes, so that it need not ask
    for that run."""
    changed = all(sources.passed_by(run, span) for span in edit.touched)
    return changed and not [*sources.taken(run, edit.takes, edit.opened)]


def _comment(finding: Finding, kernel: Kernel, operator: bool) -> str:
    """The comment above a call in the source."""
    decision = finding.decision
    launches = len(decision.subject.launches)
    if operator:
        less = f"{wording.size(decision.unfused_bytes - decision.fused_bytes)} less through HBM"
        return f"fusion-advisor: {finding.pattern}, {launches} kernels in one of PyTorch's: {less}"
    kernels = "another kernel"
    if launches > 1:
        kernels = wording.in_place_of(launches, launches - finding.launches_saved)
    backward = ", with its backward" if kernel.gradients else ""
    us = wording.time(finding.saved_us)
    return f"fusion-advisor: {finding.pattern}, {kernels}{backward}: {us} saved a call (predicted)"


def _difference(name: str, before: str | None, after: str) -> str:
    """One file of a diff in git's form."""
    head = f"diff --git a/{name} b/{name}\n"
    if before is None:
        head += "new file mode 100644\n"
    old = "/dev/null" if before is None else f"a/{name}"
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True), after.splitlines(keepends=True), old, f"b/{name}"
    )
    return head + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
