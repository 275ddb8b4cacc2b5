"""The report in each format: every module here has one `render(report) -> str`.

They are imported where they are used, because rich and pydantic take time.
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
"""Each format's name on the command line, and its module."""

EXTENSIONS = {
    "json": "json",
    "md": "md",
    "html": "html",
    "sarif": "sarif",
    "model-explorer": "explorer.json",
}
"""What `--out` writes beside the kernels."""


def render(report: Report, name: str) -> str:
    """The report in a format. UsageError names the known formats."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}: known: {', '.join(FORMATS)}")
    return import_module(f"{__name__}.{FORMATS[name]}").render(report)
