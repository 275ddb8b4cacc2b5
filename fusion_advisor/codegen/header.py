"""Header of an emitted file: tool and rules that wrote it, its source, its check, the command that
makes it again, and a hash of its own text.

The header stands last in the file's docstring. Nothing in it changes from run to run.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from fusion_advisor.codegen.spelling import quoted
from fusion_advisor.ir.kernel import Check

_DIGITS = 12
_BY, _FROM = "Written by: fusion-advisor ", "Source hash: "
_CHECKED, _TEXT = "Checked: ", "Text hash: "
_MADE = "Made by: "
_LINE = re.compile(rf"^{_TEXT}.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Stamp:
    """`rules` is a rulebook's hash; `sources` names the model's files that the group's lines come
    from, each with the `fingerprint` of its text; `checked` and `command` are for people."""

    tool: str
    rules: str
    sources: tuple[tuple[str, str], ...] = ()
    checked: str = "no"
    command: str = ""


def fingerprint(text: str | bytes) -> str:
    """The first digits of a text's SHA-256."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def checked(check: Check | None) -> str:
    """Where a kernel was checked and with how much, for a stamp."""
    if check is None:
        return "no"
    place = check.where.removeprefix("cuda:")
    place = "Triton's interpreter" if place == "interpreter" else place
    if not check.passed:
        return f"failed on {place}: {check.failure}"
    return f"on {place}, {len(check.shapes)} shapes, {check.seeds} seeds"


def stamped(text: str, stamp: Stamp) -> str:
    """An emitted file with a stamp, in place of the one that it has, if any."""
    head, rest = _split(unstamped(text))
    lines = [
        f"{_BY}{stamp.tool}, rules {stamp.rules[:_DIGITS]}",
        *(f"{_FROM}{mark} {quoted(name)}" for name, mark in stamp.sources),
        *_over_lines(f"{_CHECKED}{quoted(stamp.checked)}"),
        *_over_lines(f"{_MADE}{quoted(stamp.command)}" if stamp.command else ""),
    ]
    return _signed("\n".join([head, "", *lines]), rest)


def restamped(text: str, sources: tuple[tuple[str, str], ...]) -> str:
    """A stamped file that names its sources' texts as they are now."""
    head, rest = _split(_LINE.sub("", text, 1))
    lines = [line for line in head.splitlines() if not line.startswith(_FROM)]
    at = next(number for number, line in enumerate(lines) if line.startswith(_BY)) + 1
    lines[at:at] = [f"{_FROM}{mark} {quoted(name)}" for name, mark in sources]
    return _signed("\n".join(lines), rest)


def _signed(head: str, rest: str) -> str:
    """A file with the hash of its text at the end of its docstring."""
    mark = fingerprint(f'{head}\n"""\n{rest}')
    return f'{head}\n{_TEXT}{mark}\n"""\n{rest}'


def unstamped(text: str) -> str:
    """An emitted file as the emitter wrote it."""
    head, rest = _split(text)
    head = head.split(f"\n\n{_BY}")[0]
    return f'{head}\n"""\n{rest}'


def body(text: str) -> str:
    """What an emitted file computes: all but its docstring."""
    return _split(text)[1]


def does(text: str) -> str:
    """Fingerprint of what an emitted file computes."""
    return fingerprint(body(text))


def edited(text: str) -> bool:
    """Whether a stamped file differs from the text that was written."""
    found = _LINE.search(text)
    return found is None or fingerprint(_LINE.sub("", text, 1)) != found[0].split()[-1]


def read_stamp(text: str) -> Stamp | None:
    """The stamp of a file; None where there is none."""
    lines = _split(text)[0].splitlines()
    by = next((line.removeprefix(_BY) for line in lines if line.startswith(_BY)), "")
    tool, _, rules = by.partition(", rules ")
    marked = [line.removeprefix(_FROM).partition(" ") for line in lines if line.startswith(_FROM)]
    if not rules:
        return None
    try:
        return Stamp(
            tool,
            rules,
            tuple((_unquoted(name), mark) for mark, _, name in marked),
            *(_unquoted(_said(lines, what)) for what in (_CHECKED, _MADE)),
        )
    except (SyntaxError, ValueError):
        return None


def _said(lines: Sequence[str], what: str) -> str:
    """The value of a header line, with its continuation lines; "" where there is none."""
    found = dropwhile(lambda line: not line.startswith(what), lines)
    first = next(found, what).removeprefix(what)
    further = takewhile(lambda line: line.startswith("    "), found)
    return " ".join([first, *map(str.strip, further)])


def _unquoted(text: str) -> str:
    """What `quoted` made a text of. SyntaxError and ValueError where it did not."""
    return ast.literal_eval(f'"{text}"')


def same_rules(stamp: Stamp, rules: str) -> bool:
    """Whether a file was written under the rules with this hash."""
    return stamp.rules == rules[:_DIGITS]


def _over_lines(text: str) -> list[str]:
    """A text over as many lines as it takes; none for an empty one."""
    return textwrap.wrap(
        text, 98, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _split(text: str) -> tuple[str, str]:
    """The lines of the docstring, and the rest of the file."""
    head, _, rest = text.partition('\n"""\n')
    return head, rest
