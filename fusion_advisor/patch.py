"""Stage: accepted groups as edits of the files that the model is written in.

A span of source serves every call of its function, so a group is put there only if all of the
calls that ran ask for the same edit. What the source cannot express is refused with the reason.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fusion_advisor.dataflow import Dataflow
from fusion_advisor.decide import Decision
from fusion_advisor.editing.rewrite import Call, Edit, NotPlaced, attribute, rewrite
from fusion_advisor.editing.sources import Block, Place, Sources
from fusion_advisor.editing.splice import splice
from fusion_advisor.express import Boundary, Expressed, boundary, express
from fusion_advisor.identify import Finding
from fusion_advisor.kernels import Kernel
from fusion_advisor.records import Arg, Ref
from fusion_advisor.reports import wording
from fusion_advisor.trail import Span


@dataclass(frozen=True)
class Put:
    """A group in the source: its edits, one for each block, and how many of its occurrences they
    serve."""

    finding: Finding
    edits: tuple[Edit, ...]
    occurrences: int


@dataclass
class Patch:
    """New texts of the files that change and of those that are added, by their paths; why the other
    groups are not in it, by their ids."""

    puts: list[Put] = field(default_factory=list[Put])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    before: dict[Path, str] = field(default_factory=dict[Path, str])
    after: dict[Path, str] = field(default_factory=dict[Path, str])

    def diff(self, root: Path) -> str:
        """As `git apply` takes it, paths from `root`."""
        return "".join(
            _difference(path.relative_to(root).as_posix(), self.before.get(path), text)
            for path, text in sorted(self.after.items())
        )


@dataclass(frozen=True)
class Other:
    """The source as it runs in another mode, dtype or autocast."""

    sources: Sources
    differs: Literal["mode", "dtype", "autocast"]
    training: bool = False
    """Of `mode`: whether this one is training."""


@dataclass(frozen=True)
class Placement:
    """What the source asks of the groups, for `group`. `editable` says which functions may change,
    by a file and a line in them; `others` is the source as it runs otherwise, for what must stay as
    it is then. With `wary` the source stays where a tensor has another dtype, and where a module
    has hooks whose call would go."""

    sources: Sources
    flow: Dataflow
    editable: Callable[[str, int], bool]
    others: tuple[Other, ...] = ()
    wary: bool = False

    def judged(self, decision: Decision) -> Decision:
        """An accepted set with why the source cannot express it, if so."""
        expressed = decision.subject.expressed
        if not decision.accepted or expressed is None:
            return decision
        try:
            self.edited(decision.subject.border, _call(expressed, "kernel"))
        except NotPlaced as reason:
            return replace(decision, unplaced=str(reason))
        return decision

    def edited(self, border: Boundary, call: Call) -> tuple[Place, Edit]:
        """Where a group is made, and the edit there. NotPlaced with the reason."""
        place, edit = rewrite(self.sources, self.flow, border.members, call)
        if not self.editable(edit.file, edit.lines[0]):
            raise NotPlaced(
                f"{edit.file}:{edit.lines[0]}: {edit.function}() cannot be edited there"
            )
        return place, replace(edit, guard=self._guard(place, edit))

    def _guard(self, place: Place, edit: Edit) -> str:
        """The condition under which what is replaced computes something else."""
        conditions: dict[str, None] = {}
        here = _computed(self.sources, place.block, edit)
        names = self.sources.names.get(place, {}).get(edit.lines[0], {})
        for other in self.others:
            there = _computed(other.sources, place.block, edit)
            differing = here.keys() ^ there.keys()
            if not differing:
                continue
            if other.differs == "mode":
                modules = {m for key in differing for m in here.get(key) or there.get(key) or ()}
                conditions |= dict.fromkeys(_in_mode(modules, names, edit, other.training))
            elif other.differs == "autocast":
                conditions["torch.is_autocast_enabled()"] = None
            else:
                conditions[self._of_dtype(edit, names)] = None
        if self.wary:
            conditions[self._of_dtype(edit, names)] = None
            own = self.sources.module(place.activation)
            only = _computed(self.sources, place.block, edit, place)
            for path in sorted(set[str]().union(*only.values()) - {own}):
                text = attribute(path, names)
                if text is None:
                    raise NotPlaced(
                        f"line {edit.lines[0]}: no name there holds {path}, whose call goes"
                    )
                conditions[f"{text}._forward_hooks"] = None
                conditions[f"{text}._forward_pre_hooks"] = None
        if any("torch." in text for text in conditions) and not self._has_torch(edit.file):
            raise NotPlaced(f"{edit.file} does not `import torch`, which its guard needs")
        return " or ".join(conditions)

    def _of_dtype(self, edit: Edit, names: Mapping[str, str]) -> str:
        """That a tensor has another dtype than it was captured in."""
        for name, word in names.items():
            ref = self.sources.value(word)
            tensor = self.flow.annotated.tensors.get(ref) if ref else None
            if tensor is not None and "float" in tensor.dtype:
                return f"{name}.dtype != torch.{tensor.dtype}"
        raise NotPlaced(f"line {edit.lines[0]}: another dtype changes what it computes")

    def _has_torch(self, file: str) -> bool:
        imports = (n for n in self.sources.file(file).tree.body if isinstance(n, ast.Import))
        return any((a.asname or a.name) == "torch" for node in imports for a in node.names)

    def barred(self) -> Dataflow:
        """The dataflow with launches kept apart that no block of the source could have in one
        kernel."""
        holding: dict[Place, int] = {}
        possible = [tuple(self._possible(node.step)) for node in self.flow.nodes]
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

    def _possible(self, step: int | None) -> Iterator[Place]:
        """The places of an evaluation in which its statement has no block of its own, and the
        expression that it is a part of computes nothing that is in no kernel."""
        for place, standing in (self.sources.standing[step] if step is not None else {}).items():
            file = self.sources.file(place.block.file)
            if hasattr(file.statements[standing.statement], "body"):
                continue
            beside = self.sources.evaluated(place, standing.span, within=False)
            nodes = (node for each in beside for node in self.sources.made.get(each, ()))
            numbers = (self.flow.position[node.name] for node in nodes)
            if all(self.flow.fusible[n] or not self.flow.launches(n) for n in numbers):
                yield place

    def kind(self, component: tuple[int, ...]) -> object:
        """Equal for components whose parts are made at the same places of the source."""
        known: dict[Place, int] = {}
        rows: list[object] = []
        for number in component:
            step = self.flow.nodes[number].step
            places = self.sources.standing[step] if step is not None else {}
            rows.append(tuple((known.setdefault(p, len(known)), p.block) for p in places))
        return tuple(rows)


def _in_mode(
    modules: Iterable[str], names: Mapping[str, str], edit: Edit, training: bool
) -> Iterator[str]:
    """That one of the modules is in training, or is not."""
    for path in sorted(modules):
        text = attribute(path, names)
        if text is None:
            raise NotPlaced(
                f"line {edit.lines[0]}: training changes what it computes, and no name there "
                f"holds the module {path or 'itself'}"
            )
        yield f"{text}.training" if training else f"not {text}.training"


def _computed(
    sources: Sources, block: Block, edit: Edit, only: Place | None = None
) -> dict[object, set[str]]:
    """What the text that an edit replaces launches, by place and arguments, with the modules that
    it is launched in: in every run of the block, or in one."""
    found: dict[object, set[str]] = {}
    for place, held in sources.held.items():
        if place.block != block or only not in (None, place):
            continue
        for step, standing in held.items():
            replaced = any(span.holds(standing.span) for span, _ in edit.replaced)
            if replaced and not any(span.holds(standing.span) for span in edit.kept):
                for node in sources.made.get(step, ()):
                    key = standing.span, node.op, _plain(node.args), _plain(node.kwargs)
                    found.setdefault(key, set()).add(node.module)
    return found


def _plain(arg: Arg) -> object:
    """An argument without which tensor stands where."""
    if isinstance(arg, tuple):
        return tuple(map(_plain, arg))
    return "tensor" if isinstance(arg, Ref) else repr(arg)


def patch(
    placement: Placement, findings: Sequence[Finding], kernels: Mapping[str, Kernel], model: Path
) -> Patch:
    """The files with a call of its kernel in place of every group that they can express.

    `kernels` are those of the findings by their names, each proven; `model` is the file beside
    which the package with the kernels is put.
    """
    result = Patch()
    folder = model.parent / package_name(model)
    chosen: dict[Place, list[Edit]] = {}
    noted: dict[str, list[tuple[Edit, str]]] = {}
    waiting = [finding for finding in findings if finding.name in kernels]
    result.refused |= {f.id: "its kernel is not proven" for f in findings if f not in waiting}
    while waiting:  # a call that is edited away in one place no longer speaks against another
        before = len(waiting)
        for finding in list(waiting):
            try:
                edits = _edits(placement, finding, folder.name, chosen)
            except NotPlaced as reason:
                result.refused[finding.id] = str(reason)
                continue
            for place, each in edits.items():
                chosen.setdefault(place, []).extend(each)
            once = tuple(dict.fromkeys(edit for each in edits.values() for edit in each))
            for edit in once:
                noted.setdefault(edit.file, []).append((edit, _comment(finding)))
            result.refused.pop(finding.id, None)
            result.puts.append(Put(finding, once, len(finding.instances)))
            waiting.remove(finding)
        if len(waiting) == before:
            break
    for file, edits in noted.items():
        path = Path(file).resolve()
        result.before[path] = placement.sources.file(file).text
        result.after[path] = splice(result.before[path], edits, _import(path, folder))
    if result.puts:
        result.after |= _package(folder, [kernels[put.finding.name] for put in result.puts])
    return result


def package_name(model: Path) -> str:
    """The package beside a model's file that its kernels are in."""
    return f"fused_{re.sub(r'[^0-9a-zA-Z_]', '_', model.stem)}"


def _call(expressed: Expressed, name: str) -> Call:
    if expressed.draws:
        raise NotPlaced("it draws random numbers, which would be others than torch's")
    return Call(name, expressed.inputs, expressed.outputs)


def _edits(
    placement: Placement, finding: Finding, package: str, chosen: Mapping[Place, Sequence[Edit]]
) -> dict[Place, tuple[Edit, ...]]:
    """The edits of a group, by the places that it is made in, in one maybe several times. NotPlaced
    where a block would have to be edited differently for some of its runs, or where another group
    is put already."""
    flow, sources = placement.flow, placement.sources
    served = finding.decision.subject.expressed
    assert served is not None  # an accepted set has a plan
    found: dict[Block, dict[Place, tuple[Edit, ...]]] = {}
    for instance in finding.instances:
        border = boundary(flow, [number for number in instance if flow.launches(number)])
        expressed = express(flow, border)
        if served.form != expressed.form:
            raise NotPlaced("its occurrences take their operands in different orders")
        place, edit = placement.edited(border, _call(expressed, f"{package}.{finding.name}"))
        here = found.setdefault(place.block, {})
        for other in (*chosen.get(place, ()), *here.get(place, ())):
            if _overlap(edit.touched, other.touched):
                line = edit.lines[0]
                raise NotPlaced(f"line {line}: a group with as much to save is put there")
            _check_guards(edit, other)
        here[place] = tuple(sorted((*here.get(place, ()), edit), key=lambda e: e.touched))
    for block, edits in found.items():
        every = next(iter(edits.values()))
        first = every[0]
        if any(each != every for each in edits.values()):
            raise NotPlaced(f"{first.function}(): its calls would be edited differently")
        ran = {place for place in sources.names if place.block == block}
        left = {p for p in ran - edits.keys() if not _edited_away(sources, p, chosen)}
        if left:
            raise NotPlaced(
                f"{first.function}() ran {len(ran)} times, and in {len(left)} of them its parts "
                "are not this group"
            )
    return {place: each for edits in found.values() for place, each in edits.items()}


def _check_guards(one: Edit, other: Edit) -> None:
    """NotPlaced where two edits get one guard, since their lines overlap, and that of the later
    reads names that may not be bound, or otherwise, where the earlier begins."""
    early, late = sorted((one, other), key=lambda edit: edit.lines)
    if late.lines[0] > early.lines[1]:
        return
    more = set(late.guard.split(" or ")) - set(early.guard.split(" or "))
    roots = {condition.removeprefix("not ").partition(".")[0] for condition in more}
    if roots - {"self", "torch", ""}:
        raise NotPlaced(f"line {late.lines[0]}: its guard would stand before line {early.lines[0]}")


def _edited_away(sources: Sources, place: Place, chosen: Mapping[Place, Sequence[Edit]]) -> bool:
    """Whether the call that a place is in stands in an expression that an edit replaces."""
    call = sources.trail.activations[place.activation]
    if call.caller is None or call.place is None:
        return False
    for at, span in sources.chain(call.caller, call.place):
        for other, edits in chosen.items():
            if other.activation == at and any(
                replaced.holds(span) for edit in edits for replaced, _ in edit.replaced
            ):
                return True
    return False


def _overlap(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(a.holds(b) or b.holds(a) for a in spans for b in others)


def _comment(finding: Finding) -> str:
    """What stands above a call in the source."""
    decision = finding.decision
    saved = decision.unfused_bytes - decision.fused_bytes
    launches = len(decision.subject.launches)
    return (
        f"fusion-advisor: {finding.pattern}, {launches} kernels in one: "
        f"{wording.size(saved)} less through HBM, {wording.time(finding.saved_us)} predicted"
    )


def _import(file: Path, folder: Path) -> str:
    """How a file imports the package of kernels: as its neighbour in a package, or by name."""
    within = file.parent == folder.parent and (file.parent / "__init__.py").is_file()
    return f"from . import {folder.name}" if within else f"import {folder.name}"


def _package(folder: Path, kernels: Iterable[Kernel]) -> dict[Path, str]:
    """The files of the package: one that stands alone for each kernel, and what it offers."""
    files = {folder / f"{kernel.name}.py": kernel.text for kernel in kernels}
    names = sorted(path.stem for path in files)
    lines = ['"""Kernels written by fusion-advisor. Each file stands alone."""', ""]
    lines += [f"from .{name} import {name}" for name in names]
    listed = ", ".join(f'"{name}"' for name in names)
    lines += ["", f"__all__ = [{listed}]", ""]
    return {**files, folder / "__init__.py": "\n".join(lines)}


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
