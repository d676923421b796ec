"""The workers of the demo, in the process that starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

from pxrs.cli.demo.child import end, last_words
from pxrs.cli.demo.spark import SOURCE

STOP_S = 10.0


class Worker:
    """A worker process, and the events that it has printed."""

    def __init__(self, url: str, registry: str, group: str, name: str, folder: Path) -> None:
        self.name, self.state = name, "starting"
        self.told: list[str] = []
        self.in_hand: str | None = None
        self.handled = 0
        self.refused: str | None = None
        self._errors = folder / f"{name}.stderr"
        code = "from pxrs.cli.demo.worker import main; main()"
        command = [sys.executable, "-c", code, url, registry, SOURCE, group, name]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode().strip()
            self.told.append(text)
            what, _, detail = text.partition(" ")
            self.in_hand = detail if what == "began" else None
            self.handled += what == "handled"
            if what == "refused":
                self.refused = detail

    def signal(self, number: int, state: str) -> None:
        self.state = state
        self.process.send_signal(number)

    @property
    def is_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    def failure(self) -> str | None:
        """Why the worker has ended, if it has and the demo has not killed it."""
        if self.process.poll() in (None, -signal.SIGKILL):
            return None
        self._reader.join(STOP_S)
        return f"{self.name} ended with exit code {self.process.returncode}: {last_words(self._errors)}"

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> bool:
        """Wait for the worker to finish, or kill it. Returns whether it left gracefully. All its events are read
        then."""
        self.ask_to_stop()
        return end(self.process, self._reader, STOP_S)
