"""No process of a program that a test runs is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests import sessions

STARTS_ANOTHER = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
open(sys.argv[1], "w").write(str(other.pid))
if sys.argv[2] == "waits":
    print("it waits", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("what", ["ends", "waits"])
def test_what_a_program_has_started_ends_with_it_and_when_its_time_is_over(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", STARTS_ANOTHER, str(tmp_path / "pid"), what]
    if what == "ends":
        assert sessions.run(command, 60.0).returncode == 0
    else:
        with pytest.raises(AssertionError, match=r"did not end in 2 s: it waits"):
            sessions.run(command, 2.0)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
