"""Python interface of `fusion_advisor`: `analyze`, `capture`, `fuse`, `patch` and `bench`.

A live model is captured in a copy that has no weights, on fake tensors: nothing is copied or moved
to another device, nothing is computed, and the model's mode and the generators of random numbers
stay as they are. A model that is named as on the command line is captured in a child process.
"""
# Inputs are whatever the model takes.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from json import dumps
from pathlib import Path
from typing import Any, Literal

import torch

from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import ChildJob, capturing
from fusion_advisor.frontend.export import unwrapped
from fusion_advisor.frontend.session import captured_bare
from fusion_advisor.frontend.signature import signature
from fusion_advisor.frontend.user_model import given_inputs
from fusion_advisor.fusion import findings
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.report import schema as report
from fusion_advisor.report.formats import EXTENSIONS, render
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device, gpu_names, require_triton
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped.files import write_kernel
from fusion_advisor.support.codec import from_data, to_data
from fusion_advisor.support.errors import AdvisorError, PatchError, UsageError, one_of
from fusion_advisor.support.files import require_folder, write
from fusion_advisor.workflows.analyze import analyze as analyzed
from fusion_advisor.workflows.analyze import emit_group
from fusion_advisor.workflows.bench import BenchRun, read
from fusion_advisor.workflows.bench import bench as benched
from fusion_advisor.workflows.patch import Patched, patch_model, tree_for
from fusion_advisor.workflows.rewrites import finding_rewrites, with_rewrites

Mode = Literal["eval", "train"]


class Report(report.Report):
    """Report with the JSON fields as attributes. A notebook shows it as the page that `--format
    html` writes, and `print` as text."""

    def to_json(self) -> str:
        return render(self, "json")

    def to_html(self) -> str:
        """Render the report as a page that stands alone."""
        return render(self, "html")

    def save(self, folder: str | Path) -> None:
        """Write the files of `analyze --out` into a folder: every format, the graph and the
        kernels."""
        place = Path(folder)
        require_folder(place)
        write(place / "graph.json", dumps(self.graph))
        without = self.model_copy(update={"graph": None})
        for name, extension in EXTENSIONS.items():
            write(place / f"report.{extension}", render(without, name))
        for group in self.groups:
            if group.kernel.text and group.kernel.file:
                write_kernel(place / group.kernel.file, group.kernel.text)

    def __str__(self) -> str:
        return render(self, "text")

    def _repr_html_(self) -> str:
        """Page in a frame of its own, so that neither it nor the notebook styles the other."""
        without = self.model_copy(update={"graph": None})
        return (
            f'<iframe srcdoc="{escape(render(without, "html"))}" sandbox="allow-scripts" '
            'title="fusion-advisor" style="width: 100%; height: 50em; border: 0"></iframe>'
        )


@dataclass(kw_only=True)
class Fusion(findings.FusedGraph):
    """Launches of a graph divided: `groups` are accepted and `candidates` rejected, the largest
    saving first.

    Each has a `decision` with the verdict (`accepted`), every gate with its reading, and predicted
    times in microseconds and bytes of one occurrence; `instances` are positions in `flow.nodes`.
    `faults` lists the regions that a fault of the tool kept from being judged.
    """

    rulebook: Rulebook
    faults: Faults

    def kernel(self, group: str) -> Kernel:
        """Triton kernel of a group, given by id or name, at any sizes; its file is `.text`. Raises
        UsageError where there is no such group, or where it has no kernel, with the reason."""
        for finding in self.groups:
            if group in (finding.id, finding.name):
                kernel = emit_group(finding, self.rulebook, full_size=False)
                if isinstance(kernel, str):
                    raise UsageError(f"{group}: {kernel}")
                return kernel
        raise UsageError(f"{group}: the groups are {', '.join(each.id for each in self.groups)}")


def analyze(
    model: torch.nn.Module | str,
    inputs: Any = None,
    *,
    kwargs: dict[str, Any] | None = None,
    device: str | None = None,
    mode: Mode = "eval",
    rules: Sequence[str | Path] = (),
    verify: bool = True,
    compile: bool = True,
    profile: str | Path | None = None,
) -> Report:
    """Report of one forward pass of a model, which is captured as by `capture`; in train mode of a
    whole training step with AdamW.

    `device`, `rules`, `verify`, `compile` and `profile` are as on the command line. Raises
    UsageError and CaptureError.
    """
    scenario = Scenario(mode=_mode(mode), step=mode == "train")
    then = finding_rewrites(tuple(map(Path, rules)))
    graph = _captured(model, inputs, kwargs, scenario, rules, then)
    request = Request(
        model if isinstance(model, str) else type(unwrapped(model)[0]).__name__,
        scenario, device=device, rules=tuple(map(Path, rules)),
        verify=verify, compile=compile, folder="kernels",
        profile=None if profile is None else Path(profile),
    )  # fmt: skip
    found = analyzed(request, lambda: graph).report
    found.graph = to_data(graph)
    return _shown(found)


def capture(
    model: torch.nn.Module | str,
    inputs: Any = None,
    *,
    kwargs: dict[str, Any] | None = None,
    mode: Mode = "eval",
    rules: Sequence[str | Path] = (),
) -> Graph:
    """Graph of eager's launches in one forward pass of a model, in `mode`, whatever mode the model
    is in.

    `inputs` are a tensor, a list or tuple, a dict of keywords, or `(args, kwargs)`; of tensors only
    shape, strides, dtype and device count. Without `inputs`, `model` is MODEL as on the command
    line, which has its own. Raises UsageError and CaptureError.
    """
    return _captured(model, inputs, kwargs, Scenario(mode=_mode(mode)), rules)


def _mode(mode: Mode) -> Mode:
    return one_of("mode", mode, "eval", "train")


def _captured(
    model: torch.nn.Module | str,
    inputs: Any,
    kwargs: dict[str, Any] | None,
    scenario: Scenario,
    rules: Sequence[str | Path],
    then: ChildJob | None = None,
) -> Graph:
    """Graph of a model in a scenario, as `capture` has it, and what follows the capture."""
    mode = scenario.mode
    most = load_rulebook(tuple(map(Path, rules))).capture.mask_elements.count
    if isinstance(model, str):
        if inputs is not None or kwargs:
            raise UsageError(f"{model}: has inputs of its own; give none")
        with capturing(model, scenario, mask_elements=most, then=then) as captured:
            return captured()
    bare, notes = unwrapped(model)
    args, named = given_inputs(inputs)
    arguments = signature((args, {**named, **(kwargs or {})}))
    modes = {name: mode == "train" for name, _ in bare.named_modules()}
    following = partial(with_rewrites, then.given) if then else None
    graph = captured_bare(bare, arguments, modes, scenario, most, following)
    return replace(
        graph,
        assumed=(*graph.assumed, f"mode={mode}"),
        differs_from_eager=(*notes, *graph.differs_from_eager),
    )


def fuse(graph: Graph, device: str | None = None, *, rules: Sequence[str | Path] = ()) -> Fusion:
    """Divide a graph for a device (h200 if none is named): groups that should be one kernel each,
    and regions that should not. Raises UsageError for a device or rules that are not known."""
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance] untyped callers
        raise UsageError(f"fuse: {type(graph).__name__} is no Graph; give what capture returns")
    rulebook, faults = load_rulebook(tuple(map(Path, rules))), Faults()
    part, _ = choose_device(device, rulebook)
    found = findings.fuse(dataflow(graph, part), rulebook, faults)
    return Fusion(**vars(found), rulebook=rulebook, faults=faults)


def patch(
    model: str,
    *,
    root: str | Path | None = None,
    device: str | None = None,
    mode: Mode = "eval",
    level: Literal["kernel", "framework"] = "kernel",
    model_new: bool = False,
    rules: Sequence[str | Path] = (),
    verify: bool = True,
    compile: bool = True,
) -> Patched:
    """Put the kernels of a model's groups into its source: `.diff` is the input of `git apply` in
    `root` (the git tree, if none is named), or with `model_new`, `.model_new` is a file with a
    class `ModelNew`. Nothing is written.

    MODEL is `file.py` or `file.py:name`. The other arguments are as on the command line.
    `.patch.refused` says which groups are left out, and why; the text is empty where all are.
    Raises UsageError and CaptureError, and PatchError where the patched model is not the original.
    """
    require_triton("patch")
    operators = one_of("level", level, "kernel", "framework") == "framework"
    request = Request(
        model, Scenario(mode=one_of("mode", mode, "eval", "train")), device=device,
        rules=tuple(map(Path, rules)),
        verify=verify, compile=compile, folder="kernels", pairs=mode == "train" and not operators,
    )  # fmt: skip
    made = patch_model(
        request, tree_for(model, root), diff=not model_new, model_new=model_new,
        operators=operators,
    )  # fmt: skip
    for said, what in made.wrong.items():
        raise PatchError(f"{model}: the patched model is not the original {said}: {what}")
    return made


def bench(
    report: Report | str | Path,
    *,
    only: Sequence[str] = (),
    candidates: bool = False,
    torch_compile: bool = True,
    whole: bool = True,
    tune: bool = True,
    rehearse: bool = False,
    rules: Sequence[str | Path] = (),
) -> Report:
    """Measure a report: the result has every group's `measured` beside its predictions, and `bench`
    of the whole.

    `report` is the result of `analyze`, a folder that `--out` or `save` left, or its `report.json`.
    The other arguments are as on the command line: `rehearse` runs each way once, at small sizes
    and without a GPU, to see that it works, and leaves the report unchanged. Raises UsageError
    where there is no GPU, and where a group is not in the report's graph, and AdvisorError for a
    way that fails when it is rehearsed.
    """
    require_triton("bench")
    if not rehearse and not gpu_names():
        raise UsageError("bench times on a GPU and there is none here; give rehearse=True")
    if isinstance(report, Report):
        before, graph, texts = report, *_with_it(report)
    else:
        file = Path(report)
        before, graph, texts = read(file / "report.json" if file.is_dir() else file)
    measured = before.model_copy(update={"graph": None}).model_copy(deep=True)
    run = BenchRun(
        measured, graph, load_rulebook(tuple(map(Path, rules))), texts, tuple(only), candidates,
        torch_compile, whole=whole and not rehearse, rehearse=rehearse, tune=tune,
    )  # fmt: skip
    found = benched(run)
    if not rehearse:
        return _shown(found)
    for who, row in run.failures():
        raise AdvisorError(f"{who}: {row.way}: {row.failure}")
    return report if isinstance(report, Report) else _shown(before)


def _with_it(report: Report) -> tuple[Graph, dict[str, str]]:
    """Graph in a report, and the kernels' texts by group. Raises UsageError without a graph."""
    if report.graph is None:
        raise UsageError("bench: the report has no graph in it; give what analyze returns")
    texts = {row.id: row.kernel.text for row in report.groups if row.kernel.text}
    return from_data(Graph, report.graph), texts


def _shown(found: report.Report) -> Report:
    """Report that a notebook shows."""
    fields: dict[str, Any] = {name: getattr(found, name) for name in report.Report.model_fields}
    return Report.model_construct(None, **fields)
