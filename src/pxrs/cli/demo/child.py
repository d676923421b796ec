"""The processes of the demo: how to end one, the last lines that it printed, the CPU time that it has used."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

KILLED_S_MAX: Final = 10.0
"""How long to wait for a process that was killed, or for the end of its output."""
_LINES: Final = 5
_LOOK_S: Final = 0.5


def end(
    process: subprocess.Popen[bytes], reader: threading.Thread, until: float, on_wait: Callable[[], None] | None = None
) -> bool:
    """Wait for a process that was asked to stop, and kill it if it has not ended at `until`, a time of
    `time.monotonic`. Returns whether it left gracefully. All its output is read then.

    on_wait: is called again and again while the process lives."""
    while process.poll() is None and time.monotonic() < until:
        if on_wait is not None:
            on_wait()
        try:
            process.wait(max(0.0, min(_LOOK_S, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None:
        process.kill()
        process.wait(KILLED_S_MAX)
    reader.join(KILLED_S_MAX)
    return process.returncode == 0


def how_it_ended(name: str, process: subprocess.Popen[bytes], errors: Path) -> str:
    """The exit code or the signal of a process that has ended, and the last lines of its standard error."""
    code = process.returncode
    what = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    lines = errors.read_text(errors="replace").strip().splitlines()[-_LINES:]
    if len(lines) < 2:
        return f"{name} {what}: {lines[0] if lines else 'it printed nothing'}"
    return "\n".join([f"{name} {what}; its last output:", *(f"    {line}" for line in lines)])


def cpu_s(pids: Iterable[int]) -> dict[int, float]:
    """The seconds of CPU time that each of these processes has used, with its descendants. Those that have ended are
    left out; where there is no /proc, all of them."""
    used: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    for each in map(int, filter(str.isdecimal, names)):
        try:
            # After the name of the program, which may hold spaces: the parent is the 2nd field, and the 12th to 15th
            # are the ticks of the process and of its children that have ended.
            fields = Path("/proc", str(each), "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(each)
        used[each] = sum(map(int, fields[11:15]))

    def ticks(pid: int) -> int:
        return used[pid] + sum(map(ticks, children[pid]))

    return {pid: ticks(pid) / os.sysconf("SC_CLK_TCK") for pid in pids if pid in used}


def end_with_input() -> None:
    """Have this process get SIGTERM when its standard input ends: the demo closes the pipe, or has died."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
