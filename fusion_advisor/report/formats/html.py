"""Report as one HTML page that opens from disk and asks the network for nothing.

The page carries its style, its scripts and the report's data. A Content-Security-Policy lets
exactly that style and those scripts run, by their hashes, and forbids every connection; the scripts
put the model's strings into the page as text only. The plots are drawn by the page's own scripts:
plotly would add 4.8 MB to each report, and its WebGL needs the policy to allow `eval`.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template

from pydantic_core import to_json

from fusion_advisor.report.formats.page_data import page_data
from fusion_advisor.report.schema import Report

SCRIPTS = (
    "format", "numbers", "dom", "theme", "model", "state", "table", "overview", "layout",
    "viewport", "roofline", "graph", "details", "lists", "main",
)  # fmt: skip
"""Modules of the page, each after those that it imports."""

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./\w+\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|function|class)", re.MULTILINE)


def render(report: Report) -> str:
    """Render the whole page. The kernels' source comes from the report as it was loaded."""
    style, script = _part("style.css"), _script()
    page = Template(_part("index.html"))
    return page.substitute(
        title=escape(f"{report.model.source} on {report.device.title}"),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)};"
        " base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        data=_in_script(to_json(page_data(report), inf_nan_mode="null").decode()),
    )


def _part(name: str) -> str:
    return (files("fusion_advisor.report.formats") / "page" / name).read_text(encoding="utf-8")


def _script() -> str:
    """Join all modules into one: in a file without a server, modules cannot import each other."""
    whole = "\n".join(_EXPORT.sub("", _IMPORT.sub("", _part(f"{name}.js"))) for name in SCRIPTS)
    return f'\n"use strict";\n{whole}'


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _in_script(json: str) -> str:
    """Escape JSON so that no string in it can end the script element."""
    for character in "<>&\u2028\u2029":
        json = json.replace(character, f"\\u{ord(character):04x}")
    return json
