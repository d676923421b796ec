"""Ends a process of the demo, and reads the last line of its standard error."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Final

KILLED_S_MAX: Final = 10.0
"""How long to wait for a process that was killed, or for the end of its output."""


def end(process: subprocess.Popen[bytes], reader: threading.Thread, wait_s: float) -> bool:
    """Wait for a process that was asked to stop, and kill it if it does not. Returns whether it left gracefully. All
    its output is read then."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILLED_S_MAX)
    reader.join(KILLED_S_MAX)
    return process.returncode == 0


def last_words(errors: Path) -> str:
    """The last line of the standard error of the process."""
    return (errors.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def end_with_input() -> None:
    """Have this process get SIGTERM when its standard input ends: the demo closes the pipe, or has died."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
