"""Programs that start processes of their own, such as Spark's Java: they share a session, and none is left behind.

Java and Spark's Python processes outlive the program that started them for a while, or for ever if it was killed."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

import psutil

END_S_MAX = 30.0
TAIL = 5_000
"""How many characters of its output a failure shows."""


def members(leader: int) -> list[psutil.Process]:
    """The processes of the session of this process that live, also those whose parents have ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end(leader: int) -> None:
    """Kill all processes of the session of this process, which was started with `start_new_session`."""
    until = time.monotonic() + END_S_MAX
    while processes := members(leader):
        assert time.monotonic() < until, f"they cannot be killed: {processes}"
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=5)


def run(command: list[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a session of its own. When it has ended, or was not done in time, no process of it is left."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as error:  # those that are left would keep a pipe open

        def told() -> tuple[str, str]:
            return tuple(file.seek(0) or file.read() for file in (out, error))  # type: ignore[return-value]

        process = subprocess.Popen(command, stdout=out, stderr=error, start_new_session=True, **options)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            texts = "\n".join(text[-TAIL:] for text in told())
            raise AssertionError(f"{command} did not end in {timeout_s:g} s: {texts}") from None
        finally:
            end(process.pid)
            process.wait(END_S_MAX)
        return subprocess.CompletedProcess(command, process.returncode, *told())
