"""`fusion_advisor.analyze(model, inputs)`: the report of a model that is there, in a notebook say.

The model is captured in a copy that has no weights, on fake tensors: nothing is copied or moved to
another device, nothing is computed, and the model's mode and the generators of random numbers stay
as they are. A model that is named as on the command line is captured in a child process.
"""
# Inputs are whatever the model takes.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from json import dumps
from pathlib import Path
from typing import Any, Literal

import torch

from fusion_advisor.frontend.child import capturing
from fusion_advisor.frontend.export import unwrapped
from fusion_advisor.frontend.session import captured_bare
from fusion_advisor.frontend.signature import signature
from fusion_advisor.frontend.user_model import inputs_of
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.graph_json import graph_to_data
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.report import schema as report
from fusion_advisor.report.formats import EXTENSIONS, render
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import require_folder, write
from fusion_advisor.workflows.analyze import analyze as analyzed


class Report(report.Report):
    """The JSON report's fields as attributes. A notebook shows it as the page that `--format html`
    writes, and `print` as text."""

    def to_json(self) -> str:
        return render(self, "json")

    def to_html(self) -> str:
        """A page that stands alone."""
        return render(self, "html")

    def save(self, folder: str | Path) -> None:
        """Leaves what `analyze --out` does: every format, the graph and the kernels."""
        place = Path(folder)
        require_folder(place)
        write(place / "graph.json", dumps(self.graph))
        without = self.model_copy(update={"graph": None})
        for name, extension in EXTENSIONS.items():
            write(place / f"report.{extension}", render(without, name))
        for group in self.groups:
            if group.kernel.text and group.kernel.file:
                write(place / group.kernel.file, group.kernel.text)

    def __str__(self) -> str:
        return render(self, "text")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither it nor the notebook styles the other."""
        without = self.model_copy(update={"graph": None})
        return (
            f'<iframe srcdoc="{escape(render(without, "html"))}" sandbox="allow-scripts" '
            'title="fusion-advisor" style="width: 100%; height: 50em; border: 0"></iframe>'
        )


def analyze(
    model: torch.nn.Module | str,
    inputs: Any = None,
    *,
    kwargs: dict[str, Any] | None = None,
    device: str | None = None,
    mode: Literal["eval", "train"] = "eval",
    rules: Sequence[str | Path] = (),
    verify: bool = True,
    compile: bool = True,
) -> Report:
    """The report of one forward pass of a model in a mode, whatever mode it is in.

    `inputs` are a tensor, a list or tuple, a dict of keywords, or `(args, kwargs)`; of tensors only
    shape, strides, dtype and device count. Without them `model` is MODEL as on the command line,
    which has its own. `device`, `rules`, `verify` and `compile` are as there. Raises UsageError and
    CaptureError.
    """
    paths = tuple(map(Path, rules))
    scenario, most = Scenario(mode=mode), load_rulebook(paths).capture.mask_elements.count
    request = Request(
        "", scenario, device=device, rules=paths,
        verify=verify, compile=compile, folder="kernels",
    )  # fmt: skip
    if isinstance(model, str):
        if inputs is not None or kwargs:
            raise UsageError(f"analyze {model}: has inputs of its own; give none")
        with capturing(model, scenario, mask_elements=most) as captured:
            return _shown(replace(request, model=model), captured())
    bare, notes = unwrapped(model)
    args, named = inputs_of(() if inputs is None else inputs, "analyze")
    arguments = signature((args, {**named, **(kwargs or {})}))
    modes = {name: mode == "train" for name, _ in bare.named_modules()}
    graph = captured_bare(bare, arguments, modes, scenario, most)
    graph = replace(
        graph,
        assumed=(f"mode={mode}", *graph.assumed),
        differs_from_eager=(*notes, *graph.differs_from_eager),
    )
    return _shown(replace(request, model=type(bare).__name__), graph)


def _shown(request: Request, graph: Graph) -> Report:
    """The report of a captured graph, with the graph in it."""
    found = analyzed(request, lambda: graph).report
    found.graph = graph_to_data(graph)
    fields: dict[str, Any] = {name: getattr(found, name) for name in report.Report.model_fields}
    return Report.model_construct(None, **fields)
