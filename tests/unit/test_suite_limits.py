"""The suite's own promises: no test hangs, and no process is left behind. Each test runs pytest on a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pxrs.testing.waiting import eventually
from tests import soak
from tests.run import is_alive

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.limits import Limits

def pytest_configure(config):
    config.pluginmanager.register(Limits(grace_s=GRACE_S))
    config.addinivalue_line("markers", "limit(seconds): as in the real suite")
"""
SERVER = """
import pathlib, subprocess, sys, threading, time
import pytest

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("server").write_text(str(process.pid))
    yield process
    process.kill()
    process.wait()
"""


def run(folder: Path, tests: str, *options: str, grace_s: float = 60.0) -> subprocess.Popen[str]:
    """grace_s: the time between two signals to a test that has reached its limit. It begins before the stacks and
    processes are written down."""
    folder.joinpath("conftest.py").write_text(CONFTEST.replace("GRACE_S", str(grace_s)))
    folder.joinpath("test_it.py").write_text(SERVER + tests)
    arguments = [sys.executable, "-m", "tests.run", "-q", f"--rootdir={folder}", "-p", "no:cacheprovider", *options]
    return subprocess.Popen(
        [*arguments, str(folder / "test_it.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def server_of(folder: Path) -> psutil.Process:
    return psutil.Process(int(eventually(lambda: (folder / "server").exists() and (folder / "server").read_text())))


def test_a_test_that_hangs_fails_with_its_threads_and_processes_and_the_next_test_has_its_server(
    tmp_path: Path,
) -> None:
    process = run(
        tmp_path,
        """
@pytest.mark.limit(1.0)
def test_hangs(server):
    threading.Thread(target=lambda: time.sleep(600), name="helper-of-the-test", daemon=True).start()
    threading.Event().wait()

def test_next(server):
    assert server.poll() is None
""",
    )
    out, _ = process.communicate(timeout=60)
    assert "1 failed, 1 passed" in out
    assert "test_hangs has taken more than 1 s" in out
    assert "--- thread helper-of-the-test" in out
    assert "time.sleep(600)" in out  # the command of the server, in the list of processes
    assert "a process was left" not in out


def test_a_test_that_ignores_its_limit_ends_its_process_and_leaves_no_other(tmp_path: Path) -> None:
    process = run(
        tmp_path,
        """
@pytest.mark.limit(1.0)
def test_hangs(server):
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def test_next(server):
    pass
""",
        "--numprocesses=1",
        grace_s=0.5,
    )
    out, _ = process.communicate(timeout=60)
    assert "The test ignores its limit" in out
    assert "crashed while running" in out
    assert "1 failed, 1 passed" in out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_after_an_interrupt_or_a_crash(tmp_path: Path, how: signal.Signals) -> None:
    """SIGINT and SIGTERM: of the whole run. SIGKILL: of pytest alone, as if it had crashed."""
    process = run(
        tmp_path,
        """
def test_waits(server):
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True).wait()
""",
    )
    server = server_of(tmp_path)
    runner = psutil.Process(process.pid)
    all_ = eventually(lambda: found if len(found := runner.children(recursive=True)) >= 4 else None)
    if how == signal.SIGKILL:
        next(child for child in runner.children() if "pytest" in child.cmdline()).kill()
    elif how == signal.SIGINT:
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does it
    else:
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert server.pid in {each.pid for each in all_}
    # Whoever gets the orphans collects those that have ended after a moment.
    eventually(lambda: not any(is_alive(each) for each in all_), what=out)


def test_a_process_that_a_passing_test_has_left_fails_the_run(tmp_path: Path) -> None:
    process = run(
        tmp_path,
        """
def test_leaves():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
""",
    )
    out, _ = process.communicate(timeout=60)
    assert "1 passed" in out
    assert "a process was left, and killed" in out
    assert process.returncode == 1


def test_every_test_is_in_one_part_of_a_soak_run_and_the_one_that_measures_times_is_the_last() -> None:
    parts = soak.parts()
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(name for names in parts.values() for name in names) == files
    assert list(parts)[-1] == soak.ALONE


def test_a_soak_run_goes_on_with_the_parts_that_have_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"sound": 0, "broken": 1}
    begun: list[str] = []

    def begin(part: str, files: list[str], into: Path) -> soak.Running:
        begun.append(part)
        log = into / part
        log.write_text("=== 1 passed in 1 s ===\n")
        process = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({codes[part]})"])
        return soak.Running(part, process, log, "", 0.0)

    monkeypatch.setattr(soak, "begin", begin)
    monkeypatch.setattr(soak, "parts", lambda: {part: [part] for part in codes})
    monkeypatch.setattr(soak, "POLL_S", 0.01)
    monkeypatch.setattr(sys, "argv", ["soak", "--into", str(tmp_path)])
    assert soak.main() == 1
    assert "failed: broken" in capsys.readouterr().out
    codes["broken"] = 0
    assert soak.main() == 0
    assert begun == ["sound", "broken", "broken"]
    assert "2 of 2 parts have passed" in capsys.readouterr().out
