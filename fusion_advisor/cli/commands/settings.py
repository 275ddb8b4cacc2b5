"""`config` and `init`: the settings of pyproject.toml, and a first version of them."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from fusion_advisor.cli.commands.options import (
    Baseline,
    Debug,
    FailOn,
    Ignore,
    Options,
    Select,
    reviewing_options,
    takes_options,
)
from fusion_advisor.cli.commands.output import tell
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import write


@takes_options
def config(
    options: Options,
    *,
    baseline: Baseline = None,
    fail_on: FailOn = None,
    select: Select = None,
    ignore: Ignore = None,
) -> int:
    """Print what [tool.fusion-advisor] and the options set, each value with its origin."""
    given = reviewing_options(baseline, fail_on, select, ignore)
    for setting in options.settings(**given).each():
        value = "" if setting.value is None else dumps(setting.value)
        print(f"{'.'.join(setting.path):28} {value:24} {setting.origin}")
    return 0


def init(
    model: Annotated[
        str, typer.Argument(metavar="FILE.py[:CLASS]", help="where the folder has several models")
    ] = "",
    debug: Debug = False,
) -> None:
    """Write [tool.fusion-advisor] for a model that is found below the working directory."""
    from fusion_advisor.ci.configuration import FILE, TABLE, has_table
    from fusion_advisor.ci.init import ADAPTER, adapter, block, chosen

    root = Path.cwd().resolve()
    table, made = root / FILE, root / ADAPTER
    if has_table(table):
        raise UsageError(f"{FILE}: has [{TABLE}] already; edit that")
    one = chosen(root, model)
    if not one.complete:
        if made.exists():
            raise UsageError(f"{ADAPTER}: is there already; complete it, then init {ADAPTER}:Model")
        write(made, adapter(one))
        tell(f"{ADAPTER}: takes {one.model}; complete it where it raises")
    before = f"{table.read_text(encoding='utf-8')}\n" if table.is_file() else ""
    write(table, before + block(one.model if one.complete else ADAPTER))
    tell(f"{FILE}: has [{TABLE}]; fusion-advisor analyze takes it from there")
