"""What `make` installs: each target what it needs, once, with a line every few seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import installation

ROOT = Path(__file__).parents[2]
DEMO, DEV = "python -m tests.installation demo", "python -m tests.installation dev"
LINT = ["ruff check .", "ruff format --check ."]
Make = Callable[[str], list[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, and with programs that note their arguments in place of those of `.venv`."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    bin_ = tmp_path / ".venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_.parent / "pyvenv.cfg").touch()
    for name in ("python", "pxrs", "ruff"):
        (bin_ / name).write_text(f'#!/bin/sh\necho "{name} $*" >> called\n')
        (bin_ / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def make(checkout: Path) -> Make:
    """Run a target; the programs that it has called, with their arguments."""

    def make(target: str) -> list[str]:
        called = checkout / "called"
        called.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        subprocess.run(["make", target], cwd=checkout, env=environment, check=True, timeout=60, capture_output=True)
        return called.read_text().splitlines()

    return make


def test_the_demo_installs_what_it_needs_and_a_second_time_nothing(make: Make) -> None:
    assert make("demo") == [DEMO, "pxrs demo"]
    assert make("demo") == ["pxrs demo"]


def test_other_targets_add_what_they_need_to_what_the_demo_has_installed(make: Make) -> None:
    make("demo")
    assert make("lint") == [DEV, *LINT]
    assert make("lint") == LINT
    assert make("demo") == ["pxrs demo"]


def test_the_demo_installs_nothing_after_other_targets(make: Make) -> None:
    assert make("lint") == [DEV, *LINT]
    assert make("demo") == ["pxrs demo"]


def test_what_a_target_needs_is_installed_again_after_a_change_of_versions(make: Make, checkout: Path) -> None:
    make("demo")
    make("lint")
    for stamp in (".demo-ready", ".ready"):
        os.utime(checkout / ".venv" / stamp, (0, 0))  # older than constraints.txt
    assert make("demo") == [DEMO, "pxrs demo"]
    assert make("lint") == [DEV, *LINT]


def test_dev_contains_demo_so_that_its_stamp_may_stand_for_both() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (of_pxrs,) = (each for each in extras["dev"] if each.startswith("pxrs["))
    assert "demo" in of_pxrs.removeprefix("pxrs[").removesuffix("]").split(",")
    assert installation.EXTRAS.keys() <= extras.keys()


BUILDING = "Building wheel for pyspark: started"
WAITS_FOR_A_LINE = """
import sys
print("Collecting pyarrow", flush=True)
print("  Building wheel for pyspark: started", flush=True)
sys.stdin = open(sys.argv[1])
input()
"""


@pytest.mark.limit(60)
def test_a_line_every_few_seconds_says_how_far_pip_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in for pip ends when the last of its lines has been told twice."""
    os.mkfifo(tmp_path / "pipe")
    told: list[str] = []
    tell = installation.tell

    def note(text: str) -> None:
        tell(text)
        told.append(text.partition(" s  ")[2])
        if told[-1] == BUILDING and told.count(BUILDING) == 2:
            (tmp_path / "pipe").write_text("\n")

    monkeypatch.setattr(installation, "tell", note)
    command = [sys.executable, "-c", WAITS_FOR_A_LINE, str(tmp_path / "pipe")]
    assert installation.install(command, tell_s=0.05) == 0
    assert told[-1] == "installed"
    assert "Collecting pyarrow" not in capsys.readouterr().out.splitlines(), "what pip prints is not repeated"


def test_all_that_pip_has_printed_is_shown_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('Collecting pyarrow', flush=True); sys.exit('ERROR: no pyarrow')"
    assert installation.install([sys.executable, "-c", code]) == 1
    out = capsys.readouterr().out
    assert "Collecting pyarrow\nERROR: no pyarrow\n" in out
    assert out.endswith("pip ended with exit code 1; what it printed is above\n")


def test_what_is_installed_is_told_before_pip_runs_with_the_pinned_versions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    before: list[str] = []

    def install(command: list[str]) -> int:
        ran.append(command)
        before.append(capsys.readouterr().out)
        return 0

    monkeypatch.setattr(installation, "install", install)
    monkeypatch.setattr("sys.argv", ["installation", "demo"])
    assert installation.main() == 0
    demo = installation.EXTRAS["demo"]
    assert all(part in before[0] for part in (demo.what, demo.disk, demo.download, demo.lasts))
    assert ran[0][-4:] == ["--constraint", "constraints.txt", "--editable", ".[demo]"]
