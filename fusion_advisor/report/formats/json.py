"""The report as JSON: CONTRACT's fields, one document."""

from __future__ import annotations

from fusion_advisor.report.schema import Report


def render(report: Report) -> str:
    """Indented by one, ending in a newline."""
    return report.model_dump_json(indent=1) + "\n"
