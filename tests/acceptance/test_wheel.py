"""The wheel that `make wheel` builds has everything that an installation needs, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from zipfile import ZipFile

from tests.acceptance.wheels import ROOT, build_wheel


def test_the_wheel_holds_the_packages_and_their_marker_for_type_checkers(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    files = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()}
    sources = {str(path) for path in files if "__pycache__" not in path.parts and "egg-info" not in str(path)}
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
