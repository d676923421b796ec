"""Runs pytest and leaves no process behind, however pytest ends: `python -m tests.run [arguments of pytest]`.

Servers that tests start end with the process that started them (`pxrs.launching`), and fixtures stop what they have
started. Some processes escape both after an interrupt or a crash: those that the killed ones had started themselves.
On Linux this process is the one that the system gives orphans to (PR_SET_CHILD_SUBREAPER), so all of them are below
it when pytest has ended. They get `GRACE_S` to end by themselves; those that do not are named and killed, and the run
has failed: a test, or the product, has lost a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Final

import psutil

GRACE_S: Final = 10.0
INTERRUPTED_S: Final = 120.0
"""How long pytest may take to stop its workers and servers after an interrupt."""
KILLED_S: Final = 30.0
"""How long a process that was killed may take to end: it may wait for a disk."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def run(command: list[str]) -> int:
    """Run the command, then end what is left of its processes. Returns its exit code, or 1 if processes were left."""
    is_linux = sys.platform == "linux"
    if is_linux:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The command is in the same process group: an interrupt at the keyboard reaches it, and this process waits for it.
    interrupted: list[float] = []
    child = subprocess.Popen(command, preexec_fn=_end_with_parent if is_linux else None)

    def pass_on(number: int, frame: FrameType | None) -> None:
        interrupted.append(time.monotonic())
        if number == signal.SIGTERM or len(interrupted) > 1:
            child.send_signal(signal.SIGINT if len(interrupted) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = None
    while code is None:
        # Orphans are collected too: else every process that ends after its parent stays in the system's table.
        code = _reap().get(child.pid)
        if code is None:
            time.sleep(0.1)
            if interrupted and time.monotonic() > interrupted[0] + INTERRUPTED_S:
                child.kill()
    child.returncode = code
    left = end_all(GRACE_S if not interrupted and code >= 0 else 0.0)
    for line in left:
        sys.stderr.write(f"a process was left, and killed: {line}\n")
    if code < 0:
        sys.stderr.write(f"{command[0]} was ended by signal {-code}\n")
    return code if code > 0 else 1 if left or code < 0 else 0


def end_all(grace_s: float) -> list[str]:
    """Wait until the processes below this one have ended, and kill those that have not by then. Returns these."""
    until = time.monotonic() + grace_s
    killed: dict[int, str] = {}
    while True:
        _reap()
        left = _left()
        if not left or time.monotonic() >= until + KILLED_S:
            return list(killed.values())
        if time.monotonic() >= until:
            for process in filter(is_alive, left):
                with contextlib.suppress(psutil.NoSuchProcess):
                    killed.setdefault(process.pid, f"{process.pid} {' '.join(process.cmdline())[:200]}")
                    process.kill()
        time.sleep(0.05)


def _left() -> list[psutil.Process]:
    """The processes below this one that have not ended, and its own children that cannot be collected yet. Java's first
    thread ends before its others do: it is shown as ended, and its CPU time is counted only when it is collected."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if is_alive(process) or _parent(process) == os.getpid()]


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether the process has not ended: one that has ended stays in the system's table until it is collected."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reap() -> dict[int, int]:
    """Collect the children and orphans that have ended. Returns their exit codes by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run([sys.executable, "-m", "pytest", *sys.argv[1:]]))
