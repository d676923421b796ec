"""A watch: a flag that a change raises and that `wait` lowers.

It tells that something under its prefixes has changed, never what: the reader scans again. So several
changes may be one wake, and a doubt (a reconnect, an overflow, a lost notification) is a wake too.
Open the watch first, then scan: whatever changes after the scan raises the flag (R2).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from pxrs import arguments
from pxrs.clock import SYSTEM, Clock
from pxrs.errors import Closed, InvalidArgument, UsedAfterFork


class Watch:
    """What `Registry.watch(*prefixes)` returns. One thread waits on it at a time.

    The registry keeps it: a watch that is dropped without `close` ends with the registry."""

    def __init__(self, prefixes: Iterable[str], on_close: Callable[[Watch], None]) -> None:
        self.prefixes = tuple(prefixes)
        self._raised = threading.Event()
        self._closed = False
        self._on_close = on_close
        self._pid = os.getpid()

    def covers(self, key: str) -> bool:
        """Whether a change of the key concerns this watch. A prefix that ends in no slash is a single key."""
        return any(key.startswith(p) if p == "" or p.endswith("/") else key == p for p in self.prefixes)

    def wake(self) -> None:
        """Raise the flag. The store's side calls it; so may anyone who wants the waiter to look."""
        self._raised.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a change since the last call. True if there may be one, False if the time has passed."""
        return self.wait_until(None, SYSTEM, timeout)

    def wait_until(self, until: float | None, clock: Clock, timeout: float | None = None) -> bool:
        """As `wait`, and no longer than until this clock's `now` has reached `until`."""
        timeout = None if timeout is None else arguments.seconds(InvalidArgument, "timeout", timeout)
        if os.getpid() != self._pid:
            raise UsedAfterFork("the watch was opened before a fork: open one in the child")
        woken = clock.wait(self._raised, until, timeout)
        if woken:
            # Lowered before looking: a close that comes in between is seen here, or raises the flag again. And lowered
            # only if it was seen up: one that goes up just now, at the end of the time, is for the next call.
            self._raised.clear()
        if self._closed:
            self._raised.set()
            raise Closed("the watch was closed")
        return woken

    def close(self) -> None:
        """Stop watching. A waiter is woken and finds it closed."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._raised.set()
        self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
