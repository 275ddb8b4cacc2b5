"""`report` and `diff`: existing reports, without their models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.commands.options import (
    FAILED,
    FORMAT_NAMES,
    Debug,
    FailOn,
    Redact,
    rulebook_of,
)
from fusion_advisor.cli.commands.output import asked_outputs, deliver, tell

if TYPE_CHECKING:
    from fusion_advisor.report.schema import Report


def report(
    file: Annotated[Path, typer.Argument(metavar="REPORT.json")],
    format: Annotated[
        list[str] | None,
        typer.Option(help=f"{FORMAT_NAMES}, with =FILE (default: text)"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="the text with every gate and all that is rejected")
    ] = False,
    redact: Redact = False,
    debug: Debug = False,
) -> None:
    """Show a report again in any format, without running the model."""
    from fusion_advisor.report.redact import redacted
    from fusion_advisor.report.schema import load_report

    outputs = asked_outputs(format or ["text"], None)
    found = load_report(file)
    deliver(redacted(found) if redact else found, outputs, verbose=verbose)


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json")],
    fail_on: FailOn = None,
    debug: Debug = False,
) -> int:
    """Say what a change did to traffic and verdicts."""
    from fusion_advisor.ci.conditions import parse_condition, violation
    from fusion_advisor.ci.findings import Policy, review
    from fusion_advisor.report.diff import compare

    conditions = [parse_condition(text) for text in fail_on or []]
    before, after = _by_one_judge(old, new)
    for line in compare(before, after):
        print(line)
    if conditions:
        after.review = review(after, Policy(), Path.cwd(), (str(old), before))
    broken = {condition.name: violation(condition, after, before) for condition in conditions}
    for name, why in broken.items():
        if why:
            tell(f"fusion-advisor: --fail-on {name}: {why}")
    return FAILED if any(broken.values()) else 0


def _by_one_judge(old: Path, new: Path) -> tuple[Report, Report]:
    """Two reports, judged again by this version where others made them and their graphs are there;
    which those are is told."""
    from fusion_advisor.ci.baseline import judge_again
    from fusion_advisor.report.diff import made_by, same_tool_and_rules
    from fusion_advisor.report.schema import Report, load_report

    before, after = load_report(old), load_report(new)
    if same_tool_and_rules(before, after):
        return before, after
    rulebook = rulebook_of(None)
    found = [judge_again(before, old, rulebook), judge_again(after, new, rulebook)]
    for file, report, again in zip((old, new), (before, after), found, strict=True):
        said = again if isinstance(again, str) else "judged again from its graph"
        tell(f"{file}: made by {made_by(report)}: {said}")
    first, second = found
    if isinstance(first, Report) and isinstance(second, Report):
        return first, second
    return before, after
