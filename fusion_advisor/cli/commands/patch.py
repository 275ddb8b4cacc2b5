"""`patch`: the kernels of MODEL's groups in its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.commands.options import FAILED, Options, Search, takes_options
from fusion_advisor.cli.commands.outcome import prepare, searched_lines, searcher_of
from fusion_advisor.cli.commands.output import following, tell
from fusion_advisor.support.errors import PatchError, UsageError, one_of
from fusion_advisor.support.files import require_file, write

if TYPE_CHECKING:
    from fusion_advisor.ir.graph import Rewrite
    from fusion_advisor.ir.scenario import Request
    from fusion_advisor.sourcepatch.placement import Patch
    from fusion_advisor.workflows.patch import Patched


@takes_options
def patch(
    options: Options,
    *,
    out: Annotated[Path | None, typer.Option(help="the diff, as git apply takes it")] = None,
    model_new: Annotated[
        Path | None,
        typer.Option(
            help="one file with a class ModelNew and its kernels, as KernelBench takes it"
        ),
    ] = None,
    level: Annotated[
        str, typer.Option(help="kernel; or framework: PyTorch's own ops where one does the same")
    ] = "kernel",
    check: Annotated[
        bool, typer.Option("--check", help="exit with 1 if kernels of an earlier patch are stale")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="write kernels of an earlier patch anew, in place")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="the tree that may be edited (default: the git one)")
    ] = None,
    search: Search = False,
) -> int:
    """Put the kernels of MODEL's groups into its source: as a diff, or as a class ModelNew."""
    from fusion_advisor.rulebook.local_gpu import require_triton
    from fusion_advisor.workflows.patch import STAGES, patch_model, source_of, tree_for

    settings = options.settings()
    model = settings.model
    file = source_of(model)
    if (check or update) and (
        (check and update) or out or model_new or level != "kernel" or search
    ):
        raise UsageError("patch: --check and --update each stand alone")
    if check:
        return _check_kernels(file, tree_for(model, root), settings.rules)
    require_triton("patch")
    if out is None and model_new is None and not update:
        raise UsageError(
            "patch: say where to write it: --out FILE, --model-new FILE or both; or give --check "
            "or --update"
        )
    operators = one_of("--level", level, "kernel", "framework") == "framework"
    if operators and search:
        raise UsageError("--level framework: writes no kernels that --search could time")
    for written in (out, model_new):
        if written is not None:
            require_file(written)
    tree = tree_for(model, root)
    request = options.request(settings, "kernels", measured=search)
    request = replace(request, pairs=request.scenario.gradients and not operators)
    if request.pairs and search:
        raise UsageError("--search: of kernels without backward alone; leave out --mode train")
    prepare(request, checks=False)
    if update:
        return _update(request, _kernels_of(file, tree), tree, verbose=options.verbose)
    if model_new is not None and model.partition(":")[2] not in ("", "Model"):
        raise UsageError(f"--model-new: {model} is not a class called Model")
    stages = (*STAGES, "search") if search else STAGES
    with (
        searcher_of(request, search=search) as searcher,
        following(stages, verbose=options.verbose) as listener,
    ):
        made = patch_model(
            request, tree, listener,
            diff=out is not None, model_new=model_new is not None, operators=operators,
            searcher=searcher,
        )  # fmt: skip
    return _written(made, out, model_new, operators=operators, verbose=options.verbose)


_LEFT = 12
"""Groups left out that are named without `--verbose`."""


def _written(
    made: Patched,
    out: Path | None,
    model_new: Path | None = None,
    *,
    operators: bool = False,
    verbose: bool = False,
) -> int:
    """Says what became of the groups, and writes what was asked for where it holds."""
    from fusion_advisor.report.formats import wording

    if made.free_us and not operators:
        saved, free = wording.time(made.saved_us), wording.time(made.free_us)
        tell(
            f"placed: {saved} of the {free} that kernels would save "
            f"({made.saved_us / made.free_us:.0%}); a step takes {wording.time(made.step_us)}"
        )
    for put in made.patch.puts:
        places = ", ".join(f"{_beneath(e.file, made.root)}:{e.lines[0]}" for e in put.edits)
        backward = made.backward.get(put.kernel)
        tell(
            f"{put.finding.id} {put.finding.computes}: {places}, saves "
            f"{wording.time(put.finding.saved_us_total)} in {put.occurrences} "
            f"{'places that run' if put.occurrences > 1 else 'place that runs'}"
            + (f", in forward alone; {backward}" if backward else "")
        )
        for line in searched_lines(made.searches.get(put.finding.name)):
            tell(line)
    shown = made.left if verbose else made.left[:_LEFT]
    for each in shown:
        where = f"{_beneath(each.place.file, made.root)}:{each.place.line}, " if each.place else ""
        why = each.why.replace(f"{made.root}/", "")
        tell(f"left out: {each.computes}: {where}{wording.time(each.saved_us)}: {why}")
    if len(shown) < len(made.left):
        rest = wording.time(max(each.saved_us for each in made.left[_LEFT:]))
        tell(f"left out: {len(made.left) - _LEFT} more of up to {rest} each: --verbose names them")
    for note in dict.fromkeys(_rewrite(each, made.root) for each in made.rewrites):
        tell(note)
    _refuse_wrong(made.wrong)
    _tell_outdated(made.patch, made.root)
    left = False
    for place, text in ((out, made.diff), (model_new, made.model_new)):
        if place is None:
            continue
        if not text and place == out and made.package:
            has = f"{made.package} has every kernel that the source can call"
            tell(f"{out}: not written, for {has}")
            continue
        if not text:
            tell(f"{place}: not written, for no group can be put into the source")
            left = True
            continue
        write(place, text)
        holds = "computes what the original does" if operators else "is the original"
        tell(f"{place}: the patched model {holds} {', '.join(made.tried)}")
    for place, ran in ((out, made.ran), (model_new, made.new_ran)):
        if ran:
            tell(f"{place}: {ran}")
    return FAILED if left else 0


def _rewrite(rewrite: Rewrite, root: Path) -> str:
    """Line on a rewrite: its place, and what a person would write there."""
    source = rewrite.source
    place = f"{_beneath(source.file, root)}:{source.line}: " if source else ""
    known = f"fusion-advisor explain {rewrite.name}"
    return f"{place}{rewrite.name}: {rewrite.why}; " + (
        f"write {rewrite.line} ({known})" if rewrite.line else f"{known} says what to do"
    )


def _check_kernels(model: Path, tree: Path, rules: Sequence[Path]) -> int:
    """Says of the kernels of a model which are stale, and why; and which are of an older tool,
    which fails nothing."""
    from fusion_advisor.codegen.kernel_package import older, stale
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.rulebook.local_gpu import version

    folder = _kernels_of(model, tree)
    found = [*stale(folder)]
    for path, why in found:
        tell(f"{path}: stale: {why}")
    aged = [*older(folder, version("fusion-advisor") or "unknown", load_rulebook(rules).hash)]
    for path, why in aged:
        tell(f"{path}: {why}")
    if aged:
        tell(f"to have {'them' if len(aged) > 1 else 'it'} written anew: patch {model} --update")
    if not found:
        tell(f"{folder}: every kernel is as its patch left it, and so is what it was made from")
    return FAILED if found else 0


def _kernels_of(model: Path, tree: Path) -> Path:
    """The package of the kernels of a model's file, as seen from here. UsageError where there is
    none."""
    from fusion_advisor.codegen.kernel_package import package_name, written_for

    folder = written_for(model.resolve(), tree)
    if folder is None:
        name = package_name(model)
        raise UsageError(f"{tree}: has no {name}; write it with patch {model} --out FILE")
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _update(request: Request, folder: Path, tree: Path, *, verbose: bool) -> int:
    """Writes the kernels beside a model anew, where they lie."""
    from fusion_advisor.workflows.update import STAGES, update_kernels

    with following(STAGES, verbose=verbose) as listener:
        made = update_kernels(request, tree, listener)
    for name, reason in made.left.items():
        tell(f"{folder / name}.py: left as it is: {reason}")
    _refuse_wrong(made.wrong)
    for path, text in made.patch.after.items():
        write(path, text)
    for name in made.written:
        tell(f"{folder / name}.py: written anew")
    _tell_outdated(made.patch, tree)
    if made.patch.after:
        tell(f"{folder}: the model is what it was {', '.join(made.tried)}")
    else:
        tell(f"{folder}: nothing to write")
    if made.ran:
        tell(f"{folder}: {made.ran}")
    return 0


def _refuse_wrong(wrong: Mapping[str, str]) -> None:
    """PatchError where a patched model is not the original; further scenarios are told."""
    if wrong:
        (said, what), *further = wrong.items()
        for other, why in further:
            tell(f"{other}: {why}")
        raise PatchError(
            f"nothing is written: the patched model is not the original {said}: {what}"
        )


def _tell_outdated(patch: Patch, root: Path) -> None:
    """Says of kernels which of their sources are others since they were written."""
    for path, changed in patch.outdated.items():
        tell(
            f"{_beneath(str(path), root)}: {changed} changed since it was written; now it stands "
            "for that as it is: see that it still computes it"
        )


def _beneath(file: str, root: Path) -> Path:
    """A file as seen from a folder that it is in."""
    path = Path(file).resolve()
    return path.relative_to(root) if path.is_relative_to(root) else path
