"""The projects of `pxrs new`, made by an installed wheel: the commands of their READMEs work as printed, in order, and
their code passes the linter. `test_types.py` checks its types."""

from __future__ import annotations

import os
import shlex
import signal
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tests.acceptance.wheels import ROOT, build_wheel

LIMIT_S = 120
KINDS = pytest.mark.parametrize("options", [(), ("--queue",)], ids=["topic", "queue"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


class Terminal:
    """A shell in an empty folder, with a virtual environment in which pip has installed the wheel. pip asks no index:
    the environment also sees the other packages of the one that runs the tests."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        environment, self.folder = folder / "environment", folder / "home"
        self.folder.mkdir()
        venv.EnvBuilder(symlinks=True).create(environment)
        (packages,) = environment.glob("lib/python3*/site-packages")
        (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
        self.variables = {
            "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        # pip finds the pxrs of the other packages too, and would take it for this one.
        self.type(f"python -m pip install --no-deps --ignore-installed {wheel}")

    def type(self, line: str) -> str:
        """Run a line as a shell does; what it has printed on standard output."""
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            self.variables[name] = value
            return ""
        if line.startswith("cd "):
            self.folder /= line.removeprefix("cd ")
            return ""
        ran = subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ran.returncode == 0, f"{line}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    def type_and_interrupt(self, line: str, printed: str) -> str:
        """Run a line, press Ctrl-C when it has printed this line, and wait for its end."""
        with subprocess.Popen(
            shlex.split(line, comments=True),
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                assert process.stdout is not None
                told = ""
                for each in process.stdout:
                    told += each
                    if each == f"{printed}\n":
                        os.killpg(process.pid, signal.SIGINT)
                assert process.wait(LIMIT_S) == 0, told
            finally:
                process.kill()
        assert printed in told
        return told


@KINDS
def test_the_commands_of_a_new_project_work_as_printed_in_order(
    tmp_path: Path, wheel: Path, options: tuple[str, ...]
) -> None:
    terminal = Terminal(tmp_path, wheel)
    next_lines = terminal.type(shlex.join(["pxrs", "new", "tea-shop", *options])).splitlines()
    printed = ""
    for line in (line.strip() for line in next_lines if line.startswith("  ")):
        if line.endswith("  # until Ctrl-C"):
            printed += terminal.type_and_interrupt(line, "packed 2 x tea")
        else:
            printed += terminal.type(line)
    assert terminal.folder == tmp_path / "home" / "tea-shop"
    assert f"\npxrs @ {wheel.as_uri()}\n" in (terminal.folder / "requirements.txt").read_text()
    if options:
        assert "packed 2 x tea\n" in printed
        assert "2 passed" in printed
    else:
        assert "ann orders 2 x tea\n" in printed
        assert "tea-shop  generation 1  members 0  lag 0\n" in printed
        assert "3 passed" in printed


@KINDS
def test_the_code_of_a_new_project_passes_the_linter(tmp_path: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pxrs.cli", "new", "shop", *options]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=LIMIT_S)
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]
    rules.remove("T20")  # the handlers print
    for arguments in (["check", f"--select={','.join(rules)}"], ["format", "--check", "--diff"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache", "."]
        ran = subprocess.run(command, cwd=tmp_path / "shop", capture_output=True, text=True, timeout=LIMIT_S)
        assert ran.returncode == 0, ran.stdout + ran.stderr
