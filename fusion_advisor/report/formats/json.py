"""Report as one JSON document, with the fields of the schema."""

from __future__ import annotations

from fusion_advisor.report.schema import Report


def render(report: Report) -> str:
    """Render the report as JSON, indented by one, ending in a newline."""
    return report.model_dump_json(indent=1) + "\n"
