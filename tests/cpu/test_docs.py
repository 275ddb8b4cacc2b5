"""The pages of `docs/`, followed to the letter; their workflow and their hooks, run as CI would."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .documents import blocks, files, follow, matches, steps, surroundings
from .door import door

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
IN_A_CHECKOUT = {"README.md", "docs/teach-an-op.md"}
"""Whose reader stands in a checkout of this repository, and may change it."""
OWN_PROGRAMS = {"docs/find-waste.md", "docs/python.md"}
"""Whose reader runs programs that import the package, or a model of a library's: its lines are
those of the outermost file that is no library's, which in a fork is the one that forks."""
LONG = {"docs/training.md"}
"""Whose training steps and kernels with a backward take as long as all other pages together."""

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FOLLOWED = [str(page.relative_to(ROOT)) for page in PAGES if "```console" in page.read_text()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader begins: an empty folder."""
    here = tmp_path / "reader"
    here.mkdir()
    return here


def check_out(folder: Path) -> None:
    """A checkout of this repository, without its history."""
    folder.mkdir(exist_ok=True)
    for name in ("fusion_advisor", "rules", "tests", "examples", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What shells run this repository's package with: forks that have imported torch."""
    with door(tmp_path_factory.mktemp("door")) as program:
        yield program


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [name for name in FOLLOWED if name not in IN_A_CHECKOUT | OWN_PROGRAMS | LONG],
)
def test_what_a_page_shows_is_what_happens(name: str, folder: Path, forked: Path) -> None:
    follow((ROOT / name).read_text(), folder, ROOT, forked)


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(IN_A_CHECKOUT | OWN_PROGRAMS | LONG))
def test_what_a_page_shows_happens_in_processes_as_readers_start_them(
    name: str, folder: Path
) -> None:
    """Of the package that the page may have changed."""
    if name in IN_A_CHECKOUT:
        check_out(folder)
    follow((ROOT / name).read_text(), folder, folder if name in IN_A_CHECKOUT else ROOT)


def test_every_task_has_a_page_with_commands() -> None:
    tasks = ("add-a-device", "find-waste", "gate-a-pull-request", "read-a-kernel", "teach-an-op")
    assert {f"docs/{task}.md" for task in tasks} <= set(FOLLOWED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ {4}.*", "", page.read_text(), flags=re.MULTILINE)  # code, where a[2](b) calls
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_an_ellipsis_stands_for_what_it_covers_and_for_nothing_else() -> None:
    assert matches("a\nb 1 µs\nc\n", "a\n...\n")
    assert matches("a\nb 1 µs\nc\n", "a\nb ... µs\nc\n")
    assert matches("a  \nc\n", "a\n...\nc\n")
    assert not matches("a\nb 1 µs\nc\n", "a\nc\n")
    assert not matches("a\nb 1 µs\nc\n", "a\nb ... ms\n...\n")


# -- the workflow and the hooks --------------------------------------------------------------------

GATE = (DOCS / "gate-a-pull-request.md").read_text()
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
RECORDED = ("gh", "pip")
"""What would leave the machine: a stand-in writes down how it was called."""


@pytest.fixture
def pull_request(folder: Path, forked: Path) -> dict[str, str]:
    """The page's project with a commit of the base branch and one of a pull request; the
    environment of a runner."""
    change = next(content for language, _, content in blocks(GATE) if language == "diff")
    env = {**os.environ, **surroundings(folder, ROOT, forked), "RUNNER_TEMP": str(folder.parent)}
    for path, content in files(GATE).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    bin = Path(env["PATH"].partition(os.pathsep)[0])
    for name in RECORDED:
        (bin / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "$RUNNER_TEMP/recorded"\n')
        (bin / name).chmod(0o755)
    called = (bin / "python").read_text().replace("exec ", '[ "$1 $2" = "-m pip" ] || exec ')
    (bin / "python").write_text(f'{called}shift 2; pip "$@"\n')

    def git(*words: str, given: str | None = None) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, env=env, input=given, text=True, check=True,
            capture_output=True,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "--quiet", ".")
    git("add", "--all")
    git("commit", "--quiet", "--message", "base")
    env["BASE"] = git("rev-parse", "HEAD")
    git("apply", "-", given=change)
    git("commit", "--quiet", "--all", "--message", "change")
    return {**env, "NUMBER": "7", "GH_TOKEN": "none"}


def expanded(text: str, known: dict[str, str]) -> str:
    """What GitHub makes of a text with `${{ expressions }}`; KeyError for one that is not known."""
    return re.sub(r"\$\{\{ (.+?) \}\}", lambda found: known[found[1]], text)


def test_the_workflow_of_the_page_is_short_and_names_nobody() -> None:
    shown = files(GATE)[".github/workflows/fusion-advisor.yml"]
    assert len(shown.splitlines()) <= 8
    workflow: dict[Any, Any] = yaml.safe_load(shown)
    assert workflow[True] == "pull_request"  # YAML's word for `on`
    checkout, ours = workflow["jobs"]["traffic"]["steps"]
    assert checkout["with"] == {"fetch-depth": 0, "submodules": True}
    assert ours == {"uses": "./tools/fusion-advisor"}
    assert not re.search("OWNER|YOUR|EXAMPLE", GATE)


def test_the_action_fails_for_waste_that_the_base_branch_has_not(
    folder: Path, pull_request: dict[str, str]
) -> None:
    known = {f"inputs.{name}": given["default"] for name, given in ACTION["inputs"].items()}
    known |= {
        "github.action_path": str(ROOT), "github.token": "none",
        "github.event.pull_request.base.sha": pull_request["BASE"],
        "github.event.pull_request.number": "7",
    }  # fmt: skip
    codes: dict[str, int] = {}
    for step in ACTION["runs"]["steps"]:
        if "run" in step:
            assert "${{" not in step["run"], "what others may choose is no part of a script"
            env = {name: expanded(value, known) for name, value in step["env"].items()}
            command = [step["shell"], "-e", "-o", "pipefail", "-c", step["run"]]
            done = subprocess.run(command, cwd=folder, env={**pull_request, **env})
            codes[step["name"]] = done.returncode
        elif "upload-sarif" in step["uses"]:
            assert (folder / step["with"]["sarif_file"]).is_file()
    assert codes == {"Install": 0, "Base branch": 0, "Pull request": 1, "Comment": 0}
    comment = (folder / "out/report.md").read_text()
    assert "GELU at model.py:14" in comment
    recorded = (folder.parent / "recorded").read_text()
    assert "gh pr comment 7 " in recorded
    assert "pip install torch==2.13.* " in recorded
    assert f"pip install {ROOT}\n" in recorded


@pytest.mark.parametrize(("tag", "code"), [("v0.1.0", 0), ("v9.9.9", 1)])
def test_a_release_is_of_the_version_that_the_package_says(
    tag: str, code: int, folder: Path
) -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = {step.get("name"): step for step in release["jobs"]["build"]["steps"]}
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n")
    shutil.copy(ROOT / "pyproject.toml", folder)
    env = {**os.environ, **surroundings(folder, ROOT), "GITHUB_REF_NAME": tag}
    command = ["bash", "-e", "-o", "pipefail", "-c", steps["Version"]["run"]]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == ("tag v9.9.9 is not version 0.1.0\n" if code else "")
    assert (ROOT / steps["Test"]["run"]).is_file()


def check_out_hooks(folder: Path, repo: str, rev: str) -> Path:
    """The clone that pre-commit makes of a clone of this repository, at the tag of the page."""
    beside, made = folder / repo, folder.parent / "made"
    check_out(beside)
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", beside)
    env = {**os.environ, **surroundings(folder, ROOT)}
    for command in (
        ("git", "-C", str(beside), "add", "--all"),
        ("git", "-C", str(beside), "commit", "--quiet", "--message", "all"),
        ("git", "-C", str(beside), "tag", rev),
        ("git", "clone", "--quiet", "--no-checkout", str(beside), str(made)),
        ("git", "-C", str(made), "checkout", "--quiet", rev),
    ):
        subprocess.run(command, env=env, check=True)
    return made


@pytest.mark.deep
def test_the_hooks_of_the_page_are_there_and_do_what_they_say(
    folder: Path, pull_request: dict[str, str]
) -> None:
    (used,) = yaml.safe_load(files(GATE)[".pre-commit-config.yaml"])["repos"]
    (asked,) = used["hooks"]
    clone = check_out_hooks(folder, used["repo"], used["rev"])
    hooks = {h["id"]: h for h in yaml.safe_load((clone / ".pre-commit-hooks.yaml").read_text())}
    (baseline,) = [s.command for s in steps(GATE) if s.command.endswith("--json baseline.json")]

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(
            shlex.split(command), cwd=folder, env=pull_request, text=True, capture_output=True
        )
        return done.returncode, done.stderr

    hook = f"{hooks[asked['id']]['entry']} {shlex.join(asked['args'])}"
    assert run("git checkout --quiet HEAD~1")[0] == 0
    assert run(baseline)[0] == 0
    assert run(hook)[0] == 0
    assert run("git checkout --quiet -")[0] == 0
    code, said = run(hook)
    assert code == 1
    assert "not in the baseline: g1 GELU at model.py:14, costs " in said
    code, said = run(hooks["fusion-advisor-stale"]["entry"])
    assert (code, "fused_model: is not there" in said) == (2, True)
