"""The import contract of the rooms: along the flow only, and torch only where it is needed."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fusion_advisor"

CONTRACT = """
support
shipped      support
ir           support
rulebook     support ir
region       ir rulebook
tile         region
ops          ir region
frontend     support shipped ir rulebook ops
cost         ir rulebook region ops
schedules    shipped ir rulebook region tile
perfmodel    ir rulebook region ops cost schedules
profile      support ir rulebook cost
fusion       ir rulebook region ops cost schedules
codegen      support shipped ir rulebook region tile ops cost schedules fusion
verify       support shipped ir rulebook cost codegen
measure      support shipped ir rulebook frontend cost schedules fusion codegen verify
advice       ir rulebook ops cost
report       support ir rulebook ops cost profile fusion measure advice
ci           support ir rulebook cost fusion report
sourcepatch  support shipped ir rulebook region ops frontend cost fusion codegen verify measure report
dynamo       support shipped ir rulebook region ops frontend cost schedules fusion codegen verify measure report
workflows    support shipped ir rulebook frontend cost profile fusion codegen verify measure report sourcepatch dynamo
cli          support shipped ir rulebook ops frontend codegen measure report ci workflows
"""  # noqa: E501
"""A room, and the rooms whose modules it imports: all of them stand above it."""

ALLOWED = {room: tuple(rooms) for room, *rooms in map(str.split, CONTRACT.strip().splitlines())}
ENTRIES = 25
"""Most entries of the package: what one reads in a listing."""

USES_TORCH = ("shipped", "frontend", "verify", "measure", "sourcepatch", "dynamo", "workflows")
"""The rooms that may import torch or triton, at the top of a module or inside a function."""

HEAVY = ("torch", "triton", "networkx", "pydantic", "numpy", "sympy", "transformers")
"""What `--help` must not pay for."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    """The room of a source, such as `ops`; empty for the package's own two files."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@cache
def imports(file: Path) -> tuple[tuple[int, str], ...]:
    """Line and absolute dotted name of everything a file imports when it runs, wherever it does."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    package = file.relative_to(ROOT).parent.parts
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    typing = (n for n in ast.walk(tree) if isinstance(n, ast.If))
    typing = (n for n in typing if ast.unparse(n.test) == "TYPE_CHECKING")
    left = {each for node in typing for each in ast.walk(node)}
    for node in ast.walk(tree):
        if node in left:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def uses(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, room and module or name of each import from another room."""
    for line, name in imports(file):
        parts = name.split(".")
        if parts[0] == PACKAGE.name and len(parts) > 2 and parts[1] != room_of(file):
            yield line, parts[1], parts[2]


def offers(room: str) -> set[str]:
    """The modules that a room says others may import."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    found = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OFFERS"
    ]
    return set(found[0]) if found else set()


each_source = pytest.mark.parametrize(
    "file", SOURCES, ids=[str(file.relative_to(PACKAGE)) for file in SOURCES]
)


def test_the_listing_is_the_architecture() -> None:
    entries = {p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"}
    assert entries == {*ALLOWED, "__init__.py", "__main__.py"}
    assert len(entries) <= ENTRIES
    for room in ALLOWED:
        said = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
        assert (said or "").partition("\n")[0].endswith("."), (
            f"{room}: say in a sentence what it is"
        )


def test_rooms_stand_one_above_the_other() -> None:
    for number, (room, rooms) in enumerate(ALLOWED.items()):
        assert {*rooms} <= {*list(ALLOWED)[:number]}, f"{room} imports what stands below it"


@each_source
def test_imports_keep_to_the_contract(file: Path) -> None:
    allowed = ALLOWED.get(room_of(file), tuple(ALLOWED))
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {room}"
        for line, room, _ in uses(file)
        if room not in allowed
    ]
    assert not wrong


def test_the_contract_allows_no_more_than_is_needed() -> None:
    needed: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for file in SOURCES:
        if room_of(file):
            needed[room_of(file)] |= {room for _, room, _ in uses(file)}
    assert {room: {*rooms} for room, rooms in ALLOWED.items()} == needed


def test_rooms_offer_what_others_import_and_nothing_else() -> None:
    wanted: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for file in filter(room_of, SOURCES):
        for _, room, name in uses(file):
            folder = PACKAGE / room
            if (folder / f"{name}.py").exists() or (folder / name).is_dir():
                wanted[room].add(name)
    assert {room: offers(room) for room in ALLOWED} == wanted


@each_source
def test_only_these_rooms_import_torch_or_triton(file: Path) -> None:
    if room_of(file) in USES_TORCH:
        return
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(file)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.rglob("*.py")), ids=lambda f: f.name)
def test_this_tier_needs_no_torch(file: Path) -> None:
    for line, name in imports(file):
        assert name.split(".")[0] not in ("torch", "triton"), f"{file}:{line}: move it to tests/cpu"


def loaded_by(module: str) -> set[str]:
    """Which of HEAVY a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split()) & set(HEAVY)


def test_the_command_line_starts_light() -> None:
    assert loaded_by("fusion_advisor.cli.app") == set()


def test_the_package_starts_light() -> None:
    assert loaded_by("fusion_advisor") == set()


def test_a_capture_starts_light() -> None:
    assert loaded_by("fusion_advisor.frontend.child") == set()


def test_the_rulebook_needs_pydantic_alone() -> None:
    assert loaded_by("fusion_advisor.rulebook.load") == {"pydantic"}


def test_what_is_imported_is_asked_for() -> None:
    """And nothing hangs on what another package brings along, as torch once did NumPy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    known = {re.split(r"[^\w-]", name)[0] for name in asked} | {PACKAGE.name}
    used = {name.split(".")[0] for file in SOURCES for _, name in imports(file)}
    assert used - sys.stdlib_module_names - {"pydantic_core"} == known & used  # pydantic's own half
    assert known - used == set()


SHARED = {"Report": "the schema's row, and the class that a notebook shows, both public names"}
"""Public class names that stand more than once, and why."""

UNFINISHED = ("schedules", "codegen")
"""Rooms whose docstrings are still to be rewritten."""
BANNED = {
    *("Of", "What", "Which", "That", "Those", "Where", "Whose", "Who"),
    *("Is", "Are", "Does", "Do", "Has", "Have", "Can"),
}
"""First words that make a reader ask for the noun, or that ask a question."""


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = {}
    for file in SOURCES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1}.keys() == {*SHARED}


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a file: of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case _:
                pass


@pytest.mark.parametrize("room", ["", *(room for room in ALLOWED if room not in UNFINISHED)])
def test_a_docstring_begins_with_a_verb_or_a_noun(room: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.split()[0]} …"
        for file in SOURCES
        if room_of(file) == room
        for line, text in docstrings(file)
        if text.split() and text.split()[0] in BANNED
    ]
    assert not wrong


NETWORK = (
    *("aiohttp", "asyncio", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib"),
    *("socket", "socketserver", "ssl", "urllib.request", "urllib3", "webbrowser", "xmlrpc"),
)
LOCAL = {("forkserver.py", "socket")}
"""A pair of sockets between two processes of ours, which nothing else can reach."""


@each_source
def test_nothing_is_sent(file: Path) -> None:
    """SECURITY.md says that there is no telemetry and no connection."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(file)
        for network in NETWORK
        if f"{name}.".startswith(f"{network}.") and (file.name, network) not in LOCAL
    ]
    assert not wrong


def test_sockets_are_pairs() -> None:
    for name, module in LOCAL:
        tree = ast.parse((PACKAGE / "support" / name).read_text(encoding="utf-8"))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == module
        }
        assert used == {"socketpair", "socket", "send_fds", "recv_fds"}
        assert not any(
            isinstance(node, ast.Attribute) and node.attr in ("connect", "bind", "listen")
            for node in ast.walk(tree)
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rooms", [("perfmodel",), ("sourcepatch",), ("dynamo",)], ids="-".join)
def test_a_room_can_be_thrown_away_whole(rooms: tuple[str, ...], tmp_path: Path) -> None:
    """Without the time model, the source patch or the backend, `analyze` works as before."""
    without = shutil.ignore_patterns("__pycache__", *rooms)
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=without)
    (tmp_path / "rules").symlink_to(ROOT / "rules")
    (tmp_path / "model.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.tanh(x).exp() * 2\n\n\n"
        "def get_inputs():\n    return [torch.empty(4096, 4096)]\n"
    )
    words = ["analyze", "model.py", "--device", "h200", "--no-verify", "--no-compile", "--out", "o"]
    done = subprocess.run(
        [sys.executable, "-m", "fusion_advisor", *words],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "g1" in (tmp_path / "o" / "report.json").read_text()
