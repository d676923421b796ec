"""One process of a local cluster: how it is started, when it is ready, how it ends.

On Linux it ends with the process that has started it, however that one ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pxrs.cli.exits import EXIT_FINAL
from pxrs.cli.supervised import ending
from pxrs.launching import launch
from pxrs.wording import printable

LOG_BYTES_MAX: Final = 16 << 20
"""A log file that is larger when its process is started is renamed first; the one before it is removed."""
TAIL_BYTES: Final = 2_000
PAUSE_S: Final = (0.5, 10.0)
"""How long a process that has ended is not started again: at first, and at most. Each pause is twice the one before."""
STEADY_S: Final = 10.0
"""A process that has run for so long begins with the first pause again."""


class ProcessFailed(Exception):
    """A process of the cluster did not start. The message has the last line of its log."""


@dataclass(slots=True)
class Process:
    """One process, which may be started several times."""

    name: str
    command: tuple[str, ...]
    log: Path
    is_ready: Callable[[Process], bool]
    """Whether a process that runs does its work."""
    env: Mapping[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause_s: float = PAUSE_S[0]
    restart_at: float | None = None
    """When it is started again (monotonic); None while it runs, and if it is not started again."""
    _log_from: int = 0
    """The size of the log when the process was started."""

    def start(self) -> None:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            os.replace(self.log, self.log.with_suffix(".log.1"))
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        self.child = launch(self.command, self.log, signal.SIGKILL, None, self.env, Path.cwd())
        self.started_at, self.restart_at = time.monotonic(), None

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.poll() is None

    @property
    def pid(self) -> int | None:
        """None if it does not run."""
        return self.child.pid if self.child is not None and self.child.poll() is None else None

    def has_printed(self, what: bytes) -> bool:
        """Whether the log has this since the process was started."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_from)
                return what in log.read()
        except FileNotFoundError:
            return False

    def last_line(self) -> str:
        """The last line of its log."""
        try:
            lines = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return printable(lines[-1]) if lines else "its log is empty"

    def ended(self, now: float) -> str | None:
        """Note that the process has ended by itself: what to tell of it; None if it runs, or if that was noted."""
        if self.child is None or self.child.poll() is None:
            return None
        code = self.child.returncode
        self.child = None
        if code == EXIT_FINAL:
            return f"{self.name} {ending(code)} and is not restarted: {self.last_line()}"
        if now - self.started_at > STEADY_S:
            self.pause_s = PAUSE_S[0]
        self.restart_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, PAUSE_S[1])
        return f"{self.name} {ending(code)}" + ("" if code < 0 else f": {self.last_line()}")

    def kill(self) -> None:
        """End it at once, as a crash would. `ended` then tells of it."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        self.restart_at = None
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)  # one that an experiment has stopped could not act on the next
            self.child.terminate()

    def has_ended(self, until: float) -> bool:
        """Wait until the process has ended, at most until that moment (monotonic)."""
        if self.child is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(max(0.0, until - time.monotonic()))
        return self.child.returncode is not None
