"""The import contract: along the flow only, and torch only where it is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fusion_advisor"

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        # shared knowledge
        "errors axes philox trail ignores",
        "records scaffold faults",
        "primitives addressed",
        "exprs",
        "bounds builder",
        "renaming",
        "quantities scenario frames kernels region wire files attention",
        "device",
        "wavefronts",
        "rulebook",
        "recording",
        "functions",
        "predict explanation",
        "rehearsal emitted rulefiles measurements",
        "machine algebra",
        "ops",
        # capture, in the child process that runs somebody's code
        "opaque own_kernels models recurrent provenance signature",
        "transformers_models",
        "loading",
        "expansions",
        "composites",
        "whole_operators",
        "launching",
        "tracing",
        "replay",
        "masks",
        "lowering forks",
        "capture",
        # the stages on records
        "times",
        "blocks",
        "launched",
        "annotate",
        "dataflow",
        "contracted",
        "express equivalence instructions sequence",
        "schedules",
        "requests tiles",
        "issue",
        "plan",
        "gates",
        "works partition",
        # `group` searches over what `decide` says of each region
        "decide",
        "group neighbours",
        "framework",
        "kernel_file",
        "asked",
        "launcher cases reference",
        "resized",
        "alone held",
        "emit",
        "stamp kept",
        # proof: `checking` and `compiling` are the child processes of `verify`
        "proofs",
        "workers interpreting comparing counting",
        "stepping",
        "verify",
        "checking compiling",
        "fingerprint idiom",
        "computes",
        "operators",
        # measurement: `measuring` is the child process of `measure`
        "timing inductor_coverage",
        "measuring",
        "running",
        "measure",
        "calibrate search",
        # what is said about it
        "identify",
        "routing inductor advice",
        "advise",
        "report",
        "judge ledger beside",
        "recommend",
        "assemble",
        "reports redact",
        "compare",
        "review conditions weighted cache",
        "baseline configuration",
        "reviewing",
        # the kernels in the model's own source
        "editing",
        "guards",
        "package",
        "patch trial",
        # where stages meet, and who may call that
        "pipeline bench",
        "patching dividing",
        "updating",
        # torch.compile's backend: calls the pipeline as the command line does
        "substitute",
        "backend applied recorded",
        "live",
        "transformers_patch",
        "commands",
        "cli",
        "__main__",
    )
)
"""A module imports modules of earlier layers only; a folder of like units counts as one module."""

USES_TORCH = frozenset(
    {
        "opaque",
        "own_kernels",
        "models",
        "recurrent",
        "provenance",
        "transformers_models",
        "tracing",
        "capture",
        "masks",
    }
    | {"expansions", "composites", "whole_operators", "launching"}
    | {
        "interpreting",
        "comparing",
        "stepping",
        "counting",
        "checking",
        "compiling",
        "timing",
        "replay",
    }
    | {"measuring", "running", "inductor_coverage", "lowering", "substitute", "backend", "applied"}
    | {"transformers_patch", "signature", "recorded", "live"}
)
"""Who may import torch or triton, at the top or inside a function."""

HEAVY = ("torch", "triton", "networkx", "pydantic", "numpy", "sympy", "transformers")
"""What `--help` must not pay for."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> str:
    """The top-level module: `ops` for fusion_advisor/ops/views.py, "" for the package itself."""
    first = file.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a file imports when it runs, wherever it does."""
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


def uses(file: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level module of each import from this package, but for the file's own."""
    for line, name in imports(file):
        parts = name.split(".")
        if parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] != module_of(file):
            yield line, parts[1]


each_source = pytest.mark.parametrize(
    "file", SOURCES, ids=[str(file.relative_to(PACKAGE)) for file in SOURCES]
)


@each_source
def test_the_layer_of_a_module_is_known(file: Path) -> None:
    module = module_of(file)
    assert not module or module in RANK, f"give {module!r} its place in LAYERS"


@each_source
def test_imports_point_along_the_flow(file: Path) -> None:
    rank = RANK.get(module_of(file), len(LAYERS))
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {used}"
        for line, used in uses(file)
        if RANK.get(used, -1) >= rank
    ]
    assert not wrong


@each_source
def test_only_these_import_torch_or_triton(file: Path) -> None:
    if module_of(file) in USES_TORCH:
        return
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(file)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong


def test_what_is_imported_is_asked_for() -> None:
    """And nothing hangs on what another package brings along, as torch once did NumPy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    known = {re.split(r"[^\w-]", name)[0] for name in asked} | {PACKAGE.name}
    used = {name.split(".")[0] for file in SOURCES for _, name in imports(file)}
    assert used - sys.stdlib_module_names - {"pydantic_core"} == known & used  # pydantic's own half
    assert known - used == set()


NETWORK = (
    *("aiohttp", "asyncio", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib"),
    *("socket", "socketserver", "ssl", "urllib.request", "urllib3", "webbrowser", "xmlrpc"),
)
LOCAL = {("forks.py", "socket")}
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
        tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
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


@pytest.mark.skipif(not (PACKAGE / "cli.py").exists(), reason="there is no command line yet")
def test_the_command_line_starts_light() -> None:
    assert loaded_by("fusion_advisor.cli") == set()


def test_a_capture_starts_light() -> None:
    assert loaded_by("fusion_advisor.capture") == set()


def test_the_rulebook_needs_pydantic_alone() -> None:
    assert loaded_by("fusion_advisor.rulefiles") == {"pydantic"}
