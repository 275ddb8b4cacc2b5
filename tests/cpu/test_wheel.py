"""The wheel, built and run as somebody would who has no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import fusion_advisor.rulebook.load as rulefiles
rules = rulefiles.load_rulebook()
print(rulefiles.__file__, rules.device("h200").name, rules.hash)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, in an environment that knows nothing of the checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel; the dependencies come from this one, read only."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(
        *(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", folder / "dist", ROOT),
        cwd=folder,
    )
    (wheel,) = (folder / "dist").glob("fusion_advisor-*.whl")
    clean = folder / "clean"
    venv.create(clean, symlinks=True)
    python = clean / "bin" / "python"
    run(
        *pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder
    )
    site = next((clean / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return clean


def test_the_rules_travel_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    from fusion_advisor.rulebook.load import load_rulebook

    file, device, digest = run(installed / "bin" / "python", "-c", PROBE, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed)
    assert (device, digest) == ("h200", load_rulebook().hash)


@pytest.mark.deep
def test_a_folder_installs_and_analyses(tmp_path: Path) -> None:
    """`pip install .` of the folder, in an environment that has the dependencies alone."""
    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    site = next((clean / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("fusion_advisor", "rules", "pyproject.toml", "README.md", "LICENSE", "examples"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check"),
        *("--python", clean / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "."), cwd=tree,
    )  # fmt: skip
    shutil.rmtree(tree / "fusion_advisor")
    shutil.rmtree(tree / "rules")
    words = ("analyze", "examples/softmax.py", "--no-verify", "--no-compile", "--out", "out")
    run(clean / "bin" / "fusion-advisor", *words, cwd=tree)
    (group,) = json.loads((tree / "out" / "report.json").read_text())["groups"]
    assert group["pattern"] == "softmax"


@pytest.mark.deep  # it downloads torch
@pytest.mark.skipif(shutil.which("uvx") is None, reason="no uv")
def test_uvx_runs_it_from_a_folder(tmp_path: Path) -> None:
    uvx = (str(shutil.which("uvx")), "--python", sys.executable, "--from", ROOT, "fusion-advisor")
    words = ("analyze", ROOT / "examples" / "softmax.py", "--json", "-")
    report = json.loads(run(*uvx, *words, cwd=tmp_path))
    (group,) = report["groups"]
    assert group["kernel"]["status"] == "interpreted"


def test_triton_is_asked_for_where_it_is_built(installed: Path) -> None:
    metadata = next((installed / "lib").rglob("fusion_advisor-*.dist-info/METADATA")).read_text()
    (triton,) = [line for line in metadata.splitlines() if "Requires-Dist: triton" in line]
    assert triton.partition("; ")[2].replace("'", '"') == 'sys_platform == "linux"'


def test_what_stands_beside_kernels_travels_too(installed: Path, tmp_path: Path) -> None:
    from fusion_advisor.shipped.files import texts

    code = "import json; from fusion_advisor.shipped.files import texts; print(json.dumps(texts()))"
    assert json.loads(run(installed / "bin" / "python", "-c", code, cwd=tmp_path)) == texts()


@pytest.mark.skipif(
    not (ROOT / "fusion_advisor" / "cli.py").exists(), reason="there is no command line yet"
)
def test_the_command_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert "h200" in run(installed / "bin" / "fusion-advisor", "devices", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_page_of_a_report_travels_too(installed: Path, tmp_path: Path) -> None:
    report = ROOT / "tests" / "cpu" / "golden" / "norm_silu_report.json"
    page = tmp_path / "report.html"
    run(
        installed / "bin" / "fusion-advisor", "report", report, "--format", f"html={page}",
        cwd=tmp_path,
    )  # fmt: skip
    assert page.read_text().startswith("<!doctype html>")


BACKEND = """
import torch
from torch._dynamo.backends.registry import lookup_backend
print(lookup_backend("fusion_advisor").__module__)
"""


@pytest.mark.deep  # test_backend asks the entry point itself
def test_torch_finds_the_backend(installed: Path, tmp_path: Path) -> None:
    found = run(installed / "bin" / "python", "-c", BACKEND, cwd=tmp_path)
    assert found.strip() == "fusion_advisor.dynamo.backend"
