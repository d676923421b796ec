"""The workers of the demo, in the process that starts them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pxrs.cli.demo.child import end, how_it_ended
from pxrs.cli.demo.spark import SOURCE

READ_BYTES = 1 << 16


class Worker:
    """A worker process, and the events that it has printed."""

    def __init__(self, url: str, registry: str, group: str, name: str, folder: Path) -> None:
        self.name, self.state = name, "starting"
        self.told: list[str] = []
        self.in_hand: str | None = None
        self.handled = 0
        self.refused: str | None = None
        self.is_killed = False
        """Whether the demo has killed it."""
        self._errors = folder / f"{name}.stderr"
        code = "from pxrs.cli.demo.worker import main; main()"
        command = [sys.executable, "-c", code, url, registry, SOURCE, group, name]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        assert self.process.stdout is not None
        self._pipe = self.process.stdout.fileno()
        # Held while a thread reads from the pipe and takes in what it has read: `_rest` and the fields above.
        self._lock = threading.Lock()
        self._rest = b""
        """The begin of a line whose end is not read yet."""
        self._is_read = False
        """Whether the pipe has ended."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._is_read:
            select.select([self._pipe], [], [])
            self.catch_up()

    def catch_up(self) -> None:
        """Take in all that the worker has printed so far. If the worker is stopped, its fields are exact then."""
        with self._lock:
            while not self._is_read and select.select([self._pipe], [], [], 0)[0]:
                read = os.read(self._pipe, READ_BYTES)
                self._is_read = not read
                *lines, self._rest = (self._rest + read).split(b"\n")
                for line in lines:
                    self._take_in(line.decode())

    def _take_in(self, text: str) -> None:
        self.told.append(text)
        what, _, detail = text.partition(" ")
        self.in_hand = detail if what == "began" else None
        self.handled += what == "handled"
        if what == "refused":
            self.refused = detail

    def signal(self, number: int, state: str) -> None:
        self.state = state
        self.is_killed = self.is_killed or number == signal.SIGKILL
        self.process.send_signal(number)

    def is_stopped(self) -> bool:
        """Whether the process has stopped since it got SIGSTOP; True is returned once. A busy machine takes a while."""
        pid, status = os.waitpid(self.process.pid, os.WUNTRACED | os.WNOHANG)
        if pid and not os.WIFSTOPPED(status):  # it has ended: only this call knows how
            self.process.returncode = os.waitstatus_to_exitcode(status)
        return bool(pid) and os.WIFSTOPPED(status)

    def failure(self) -> str | None:
        """Why the worker has ended, if it has and the demo has not killed it."""
        if self.is_killed or self.process.poll() is None:
            return None
        return how_it_ended(self.name, self.process, self._errors)

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def end(self, until: float, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the worker to finish, or kill it. Returns whether it left gracefully. All its events are read
        then."""
        self.ask_to_stop()
        return end(self.process, self._reader, until, on_wait)
