"""A condition variable that an interrupt cannot break.

A KeyboardInterrupt that is raised inside `threading.Condition` can leave its lock taken, or released twice, and then a
later `send` or `flush` hangs or fails. Here each change is one step that an interrupt comes before or after.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_WAIT_S_MAX: Final = 1.0
"""The longest single wait for a lock. Then the condition is checked, and the wait goes on. Python runs the handler of a
signal only between two waits if the signal came just before the wait, or to another thread: so Ctrl-C during `flush`
takes effect within this time."""


class Condition:
    """Has no lock of its own: a waiter gives a function that checks what it waits for. Whoever may have made that true
    calls `notify_all` afterwards."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()
        """A lock for each waiter, taken; releasing it wakes the waiter."""

    def wait_for(self, is_true: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until `is_true()`. False if that takes longer than `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not is_true():
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            try:
                left = _WAIT_S_MAX if until is None else min(until - time.monotonic(), _WAIT_S_MAX)
                # Checked again, because a notification between the first check and `append` has missed this waiter.
                if not is_true() and (left <= 0 or not waiter.acquire(timeout=left)) and left < _WAIT_S_MAX:
                    return bool(is_true())
            finally:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        return True

    def notify_all(self) -> None:
        # Only the waiter itself removes its lock from the list. So if an interrupt ends this loop, the waiters that
        # were not woken are woken by the next call.
        for waiter in list(self._waiters):
            with contextlib.suppress(RuntimeError):  # it was woken already, and has not run since
                waiter.release()

    def forget_waiters(self) -> None:
        """In a forked child: the threads that waited do not exist here."""
        self._waiters.clear()
