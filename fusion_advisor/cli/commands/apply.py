"""`apply`: MODEL in, and the kernels that `fusion_advisor.apply` would place in it."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.commands.options import Options, takes_options
from fusion_advisor.cli.commands.outcome import prepare
from fusion_advisor.cli.commands.output import tell
from fusion_advisor.support.errors import one_of
from fusion_advisor.support.files import require_file, write

if TYPE_CHECKING:
    from fusion_advisor.workflows.apply_named import NamedPlacement


@takes_options
def apply(
    options: Options,
    *,
    inner: Annotated[
        str, typer.Option(help="compiler of the rest: inductor; or eager, none, for every group")
    ] = "inductor",
    json: Annotated[
        str | None, typer.Option(help="a file for the result as JSON; - is stdout")
    ] = None,
) -> int:
    """Say which kernels fusion_advisor.apply would place in MODEL, without a GPU."""
    from fusion_advisor.rulebook.local_gpu import require_triton

    one_of("--inner", inner, "eager", "inductor")
    if json not in (None, "-"):
        require_file(Path(json))
    require_triton("apply")
    request = options.request(options.settings(), None)
    prepare(request, checks=False)
    from fusion_advisor.workflows.apply_named import placed_in_named

    found = placed_in_named(request, "eager" if inner == "eager" else "inductor")
    tell(f"assumed: {'; '.join(found.assumed)}")
    if json == "-":
        sys.stdout.write(_as_json(found))
        return 0
    if json is not None:
        write(Path(json), _as_json(found))
    tell(str(found.placed))
    return 0


def _as_json(found: NamedPlacement) -> str:
    from fusion_advisor.support.codec import to_data

    data = {**to_data(found.placed), "share": found.placed.share, "assumed": found.assumed}
    return dumps(data, indent=1) + "\n"
