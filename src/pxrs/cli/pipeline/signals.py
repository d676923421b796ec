"""SIGTERM and SIGINT for a loop that waits: a signal ends the wait and is then handled by the loop, and not in the
middle of a call to Spark."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """A context manager: within it, SIGTERM and SIGINT are kept in `received` until `wait` returns them."""

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        """on_signal: called by the signal handler, so it must not wait for a lock."""
        self._on_signal = on_signal
        self.received: list[int] = []
        self.count = 0
        """How many signals `wait` has returned."""

    def __enter__(self) -> Signals:
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, again if another library has replaced them meanwhile."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> int | None:
        """The next signal; None if none arrives within the timeout."""
        if not self.received and select.select([self._woken], [], [], timeout_s)[0]:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        if not self.received:
            return None
        self.count += 1
        return self.received.pop(0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._on_signal()

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._woken.close()
        self._waker.close()
