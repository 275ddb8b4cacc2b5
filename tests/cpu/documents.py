"""A page of `docs/` as its reader follows it, from the first block to the last.

A block ```` ```LANGUAGE PATH ```` is a file, which is written; ```` ```diff ```` is applied by git;
```` ```console ```` has commands after `$ `, each with what it prints. There a line `...` stands
for any lines, and `...` within one for any characters. A command ends with 0 unless `echo $?`
follows.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECONDS = 600


@dataclass(frozen=True)
class Step:
    """A command with the lines that it prints; None where the page does not show them."""

    command: str
    expected: str | None = None


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Language, the word behind it, and content."""
    for match in _BLOCK.finditer(page):
        yield match[1], match[2] or "", match[3]


def files(page: str) -> dict[str, str]:
    """The files that the page shows, by path, as they are first written."""
    shown: dict[str, str] = {}
    for _, path, content in blocks(page):
        if path:
            shown.setdefault(path, content)
    return shown


def steps(page: str) -> Iterator[Step]:
    """What the reader does."""
    for language, word, content in blocks(page):
        if language == "console":
            yield from _commands(content)
        elif word:
            folder, path = shlex.quote(str(Path(word).parent)), shlex.quote(word)
            yield Step(f"mkdir -p {folder}; cat > {path} <<'END_OF_FILE'\n{content}END_OF_FILE")
        elif language == "diff":
            yield Step(f"git apply - <<'END_OF_FILE'\n{content}END_OF_FILE")


def _commands(content: str) -> Iterator[Step]:
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield Step(command, expected)


def follow(page: str, folder: Path, package: Path, ours: str | Path = sys.executable) -> None:
    """Do all steps of a page in `folder`, with the `fusion-advisor` of `package`, in one shell.
    AssertionError for the first that does or says something else."""
    todo = list(steps(page))
    log = folder.parent / f"{folder.name}-log"
    log.mkdir()
    lines = [f"cd {shlex.quote(str(folder))}"]
    for number, step in enumerate(todo):
        place = shlex.quote(str(log / str(number)))
        lines.append(f"{{ {step.command}\n}} > {place} 2>&1; code=$?; echo $code > {place}.code")
        lines.append("(exit $code)")
    env = {**os.environ, **surroundings(folder, package, ours)}
    subprocess.run(
        ["bash", "-s"], input="\n".join(lines) + "\n", env=env, text=True, timeout=_SECONDS
    )
    for number, step in enumerate(todo):
        code = int((log / f"{number}.code").read_text())
        said = (log / str(number)).read_text()
        told = number + 1 < len(todo) and todo[number + 1].command == "echo $?"
        assert not code or told, f"$ {step.command}\nexits with {code}:\n{said}"
        if step.expected is not None:
            assert matches(said, step.expected), (
                f"$ {step.command}\nprints\n{said}\nand the page says\n{step.expected}"
            )


def surroundings(folder: Path, package: Path, ours: str | Path = sys.executable) -> dict[str, str]:
    """A shell in which `fusion-advisor` is installed, which `ours` runs, and git knows its user."""
    bin = folder.parent / f"{folder.name}-bin"
    bin.mkdir(exist_ok=True)
    for name, python, command in (
        ("fusion-advisor", ours, "-m fusion_advisor"),
        ("python", sys.executable, ""),
    ):
        script = f'#!/bin/sh\nexec {shlex.quote(str(python))} {command} "$@"\n'
        (bin / name).write_text(script)
        (bin / name).chmod(0o755)
    user = {"NAME": "A Reader", "EMAIL": "reader@example.com"}
    git = {f"GIT_{who}_{k}": v for who in ("AUTHOR", "COMMITTER") for k, v in user.items()}
    return git | {
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(package),
        "NO_COLOR": "1",
        "FUSION_ADVISOR_CACHE": str(folder.parent / f"{folder.name}-cache"),
    }


def matches(said: str, expected: str) -> bool:
    """Is that what a page shows, its ellipses filled in?"""
    pattern = ""
    for line in expected.rstrip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.rstrip().split("...")) + r"\n"
    lines = "".join(f"{line.rstrip()}\n" for line in said.rstrip().splitlines())
    return re.fullmatch(pattern, lines) is not None
