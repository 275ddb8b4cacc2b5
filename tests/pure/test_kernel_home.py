"""Where a patch puts the kernels of a model, and how the model's files import them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.codegen.kernel_package import Home, home_of, package_files, written_for
from fusion_advisor.support.errors import UsageError

ROOT = Path("/tree")
ENTRY = ROOT / "entry.py"


@pytest.mark.parametrize(
    ("ran", "home"),
    [
        ({}, "fused_entry"),
        ({"entry.py": ""}, "fused_entry"),
        ({"entry.py": "", "norms.py": ""}, "fused_entry"),
        ({"entry.py": "", "net/model.py": "net"}, "net/fused_entry"),
        ({"net/model.py": "net", "net/blocks/mlp.py": "net.blocks"}, "net/fused_entry"),
        ({"net/blocks/mlp.py": "net.blocks"}, "net/fused_entry"),
        ({"python/src/net/blocks/mlp.py": "net.blocks"}, "python/src/net/fused_entry"),
        ({"net/model.py": "net", "text/model.py": "text"}, "fused_entry"),
        ({"net/model.py": "net", ".venv/site-packages/einops/a.py": "einops"}, "net/fused_entry"),
        ({"../other/net/model.py": "net"}, "fused_entry"),
        ({"net/model.py": "net", "net/fused_entry/or_eager.py": "net.fused_entry"},
         "net/fused_entry"),
        ({"fused_entry/or_eager.py": "fused_entry"}, "fused_entry"),
    ],
)  # fmt: skip
def test_kernels_lie_at_the_top_of_the_package_that_runs(ran: dict[str, str], home: str) -> None:
    packages = {str(ROOT / file): package for file, package in ran.items()}
    assert home_of(ENTRY, packages, ROOT).folder == ROOT / home


def test_kernels_that_lie_beside_the_file_stay_there(tmp_path: Path) -> None:
    (tmp_path / "fused_entry").mkdir()
    packages = {str(tmp_path / "net" / "model.py"): "net"}
    home = home_of(tmp_path / "entry.py", packages, tmp_path)
    assert (home.folder, home.package) == (tmp_path / "fused_entry", "")


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("net/model.py", "from . import fused_entry"),
        ("net/blocks/mlp.py", "from .. import fused_entry"),
        ("net/blocks/gated/mlp.py", "from ... import fused_entry"),
        ("entry.py", "from net import fused_entry"),
        ("net/script.py", "from net import fused_entry"),
    ],
)
def test_each_file_imports_them_from_where_it_is(file: str, statement: str) -> None:
    home = Home(ROOT / "net" / "fused_entry", "net", frozenset({ROOT / "net" / "script.py"}))
    assert home.imported(ROOT / file) == statement


def test_files_of_no_package_import_them_by_name() -> None:
    assert Home(ROOT / "fused_entry").imported(ROOT / "norms.py") == "import fused_entry"


def written(folder: Path) -> None:
    folder.mkdir(parents=True)
    opening = folder / "__init__.py"
    opening.write_text(package_files(folder, {})[opening])


def test_an_earlier_patch_is_found_in_its_package(tmp_path: Path) -> None:
    model = tmp_path / "scripts" / "entry.py"
    model.parent.mkdir()
    assert written_for(model, tmp_path) is None
    (tmp_path / "text" / "fused_entry").mkdir(parents=True)  # the user's own
    assert written_for(model, tmp_path) is None
    written(tmp_path / "python" / "src" / "net" / "fused_entry")
    assert written_for(model, tmp_path) == tmp_path / "python" / "src" / "net" / "fused_entry"
    written(model.parent / "fused_entry")
    assert written_for(model, tmp_path) == model.parent / "fused_entry", "the nearest"


def test_two_packages_with_kernels_of_that_name_are_told(tmp_path: Path) -> None:
    for name in ("net", "text"):
        written(tmp_path / name / "fused_entry")
    with pytest.raises(UsageError, match=r"called fused_entry: net/fused_entry, text/fused_entry"):
        written_for(tmp_path / "entry.py", tmp_path)
