"""A process of the story: how it ends, and what it said last."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Final

KILLED_S_MAX: Final = 10.0
"""How long one that was killed, or its last words, may take."""


def end(process: subprocess.Popen[bytes], reader: threading.Thread, wait_s: float) -> bool:
    """Wait for one that was asked to stop, or kill it; whether it left gracefully. All it has told is read then."""
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
