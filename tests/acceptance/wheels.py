"""The wheel, built from this checkout, and environments that hold it and what it asks for, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel in this empty folder, from a copy of the sources."""
    # By the build backend itself, without pip: pip would ask the package index for the backend.
    pytest.importorskip("setuptools", "77", reason="setuptools is older than pyproject.toml asks for: make test")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    run = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    (wheel,) = (folder / "dist").glob("pxrs-*-py3-none-any.whl")
    return wheel


class Environment:
    """A virtual environment. `install` does what `pip install WHEEL[EXTRAS]` does, with the packages of the environment
    that runs the tests: each file of a distribution that the wheel requires is linked, and no other distribution is
    there. So a requirement that the wheel does not declare is missing here, as it is for a user."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.EnvBuilder(symlinks=True).create(folder)
        self.bin = folder / "bin"
        (self._packages,) = folder.glob("lib/python3*/site-packages")
        self._installed = set[str]()
        with ZipFile(wheel) as archive:
            archive.extractall(self._packages)
        (metadata,) = self._packages.glob("pxrs-*.dist-info")
        self._wheel = PathDistribution(metadata)
        script = self.bin / "pxrs"
        script.write_text(
            f"#!{self.bin / 'python'}\nimport sys\nfrom pxrs.cli.app import main\nsys.exit(main())\n"  # as pip's
        )
        script.chmod(0o755)

    def install(self, extras: set[str]) -> None:
        self._require(self._wheel, extras)

    def _require(self, required: Distribution, extras: set[str]) -> None:
        for text in required.requires or ():
            wanted = Requirement(text)
            marker = wanted.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                continue
            found = self._wheel if wanted.name == "pxrs" else distribution(wanted.name)
            self._link(found)
            key = f"{wanted.name}[{','.join(sorted(wanted.extras))}]"
            if key not in self._installed:
                self._installed.add(key)
                self._require(found, wanted.extras)

    def _link(self, found: Distribution) -> None:
        if found is self._wheel or found.name in self._installed:
            return
        self._installed.add(found.name)
        for file in found.files or ():
            target = self._packages / file if file.parts[0] != ".." else self.bin / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(file.locate())).resolve())
