"""The wheel that `make wheel` builds has everything that an installation needs, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_packages_and_their_marker_for_type_checkers(tmp_path: Path) -> None:
    # By the build backend itself, without pip: pip would ask the package index for the backend.
    pytest.importorskip("setuptools", "77", reason="setuptools is older than pyproject.toml asks for: make test")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    # Before the build, which adds the folder of its metadata.
    sources = {str(path.relative_to(tmp_path / "src")) for path in (tmp_path / "src").rglob("*") if path.is_file()}
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    run = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

    (wheel,) = (tmp_path / "dist").glob("pxrs-*-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        stored = {name for name in archive.namelist() if ".dist-info/" not in name}
        (scripts,) = (archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert stored == sources
    assert {"pxrs/__init__.py", "pxrs/py.typed", "pyspark_pxrs/__init__.py"} <= stored
    assert b"pxrs = pxrs.cli.app:main" in scripts


def test_make_wheel_builds_into_dist_from_an_empty_build_folder() -> None:
    # What the recipe does, not a run of it: that would ask the package index.
    recipe = subprocess.run(
        ["make", "--dry-run", "wheel"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert recipe.index("rm -rf build") < recipe.index("pip wheel")
    assert "--no-deps --wheel-dir dist ." in recipe
