"""The import contract: along the flow only, and torch only where it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
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
    """Line and absolute dotted name of everything a file imports, wherever it does."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
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
