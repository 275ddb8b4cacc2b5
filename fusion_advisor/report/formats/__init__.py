"""Formats of the report: every module here has one `render(report) -> str`.

The modules are imported where they are used, because rich and pydantic take time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fusion_advisor.support.errors import UsageError

if TYPE_CHECKING:
    from fusion_advisor.report.schema import Report

FORMATS = {
    "text": "text",
    "json": "json",
    "md": "markdown",
    "html": "html",
    "sarif": "sarif",
    "model-explorer": "model_explorer",
}
"""Name of each format on the command line, and its module."""

EXTENSIONS = {
    "json": "json",
    "md": "md",
    "html": "html",
    "sarif": "sarif",
    "model-explorer": "explorer.json",
}
"""Extensions of the files that `--out` writes beside the kernels."""


def render(report: Report, name: str) -> str:
    """Render the report in a format. UsageError names the known formats."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}: known: {', '.join(FORMATS)}")
    return import_module(f"{__name__}.{FORMATS[name]}").render(report)
