"""Report as node data for Google's Model Explorer, to be laid over the same model's `.pt2`.

Each node of the exported program has the predicted microseconds of eager's launches for it, which
the viewer adds up by module, and the colour of its group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import NodeRow, Report

_GROUPS = (
    "#a6cee3", "#b2df8a", "#fdbf6f", "#cab2d6", "#fb9a99", "#ffff99", "#80cdc1", "#f4a582",
)  # fmt: skip
"""Colours of groups: light enough for black text, distinct for most eyes; the groups take
them in turn."""

_ALONE = "#eeeeee"
"""Colour of a launch that is in no group."""


def render(report: Report) -> str:
    """Render one set of node data, by the names of the exported program's nodes."""
    times: dict[str, float] = defaultdict(float)
    colours: dict[str, str] = {}
    coloured = _coloured(report)
    for row in report.nodes:
        times[_key(row)] += row.time_us
        if row.time_us:
            colour = coloured.get(row.name, _ALONE)
            # Where launches of one node are apart, the group says more than what is alone.
            if colours.get(_key(row), _ALONE) == _ALONE:
                colours[_key(row)] = colour
    results = {
        key: {"value": round(us, 3), **({"bgColor": colours[key]} if key in colours else {})}
        for key, us in times.items()
    }
    content: dict[str, Any] = {
        "name": f"{report.tool.name}: predicted µs, coloured by group ({_legend(report)})",
        "results": results,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _key(row: NodeRow) -> str:
    return row.fx or row.name


def _coloured(report: Report) -> dict[str, str]:
    """Colour of each launch that is in a group."""
    return {
        node: _GROUPS[number % len(_GROUPS)]
        for number, group in enumerate(report.groups)
        for place in group.instances
        for node in place
    }


def _legend(report: Report) -> str:
    """Legend of groups and colours, as far as the colours go."""
    named = zip(report.groups, _GROUPS, strict=False)
    entries = [f"{group.id} {wording.computes(group)} {colour}" for group, colour in named]
    return ", ".join([*entries, f"none {_ALONE}"])
