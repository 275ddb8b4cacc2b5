"""`report` and `diff`: reports that are there, without their models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusion_advisor.commands.options import FAILED, FORMAT_NAMES, Debug, FailOn
from fusion_advisor.commands.output import asked_outputs, deliver, tell


def report(
    file: Annotated[Path, typer.Argument(metavar="REPORT.json")],
    format: Annotated[
        list[str] | None,
        typer.Option(help=f"{FORMAT_NAMES}, with =FILE (default: text)"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="the text with every gate and all that is rejected")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show a report again in any format, without running the model."""
    from fusion_advisor.report import load_report

    outputs = asked_outputs(format or ["text"], None)
    deliver(load_report(file), outputs, verbose=verbose)


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json")],
    fail_on: FailOn = None,
    debug: Debug = False,
) -> int:
    """Say what a change did to traffic and verdicts."""
    from fusion_advisor.compare import compare
    from fusion_advisor.conditions import parse_condition, violation
    from fusion_advisor.report import load_report
    from fusion_advisor.review import Policy, review

    conditions = [parse_condition(text) for text in fail_on or []]
    before, after = load_report(old), load_report(new)
    for line in compare(before, after):
        print(line)
    if conditions:
        after.review = review(after, Policy(), Path.cwd(), (str(old), before))
    broken = {condition.name: violation(condition, after, before) for condition in conditions}
    for name, why in broken.items():
        if why:
            tell(f"fusion-advisor: --fail-on {name}: {why}")
    return FAILED if any(broken.values()) else 0
