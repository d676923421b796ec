"""A process that the demo starts: how it ends, and what it wrote last."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Final

KILLED_S_MAX: Final = 10.0
"""How long to wait for the end of a killed process, and for the rest of its output."""


def end(process: subprocess.Popen[bytes], reader: threading.Thread, wait_s: float) -> bool:
    """Wait for a process that was asked to stop, and kill it after `wait_s`; whether it ended with exit code 0. Its
    whole output has been read then."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILLED_S_MAX)
    reader.join(KILLED_S_MAX)
    return process.returncode == 0


def last_words(errors: Path) -> str:
    """The last line of its standard error."""
    return (errors.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def end_with_input() -> None:
    """Have this process get SIGTERM when its standard input ends: the demo closes the pipe, or has died."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
