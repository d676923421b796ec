"""How long a stream of one connection may stay without progress. One thread looks after all streams of the connection.

The problem: a server whose threads hang, on a disk or a lock, sends nothing and closes nothing, and gRPC still answers
the pings of the client there. A deadline of gRPC would not do: a stream may take long, and its reader may pause. So the
thread that uses a stream says when it begins to wait and when it does not wait, and a stream on which it has waited for
too long is ended. `is_over` tells such an end from others.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pxrs.remote.client.faults import Unanswered
from pxrs.waiting import BackgroundThread

LOOK_S: Final = 0.5
"""How often the streams whose time is over are ended."""


class Limit:
    """That of one stream. The thread that uses the stream writes `_until`, the thread of `Limits` reads it: without a
    lock, because it is one assignment for each message. A stream that makes progress while its end is being decided is
    ended all the same."""

    __slots__ = ("_latest", "_until", "end", "is_over", "seconds")

    def __init__(self, seconds: float, latest: float = math.inf) -> None:
        """latest: a moment of the monotonic clock at which the stream is ended, whatever progress there was."""
        self.seconds, self._latest = seconds, latest
        self.end: Callable[[], object] = _nothing
        """Ends the stream, from any thread. Set by `Limits.kept`."""
        self.is_over = False
        """The stream was ended because there was no progress for `seconds`."""
        self.wait()

    def wait(self) -> None:
        """From now on the server must do something: there was progress, or the pause is over."""
        self._until = min(self._latest, time.monotonic() + self.seconds)

    def pause(self) -> None:
        """Nothing is expected of the server until `wait` is called."""
        self._until = math.inf

    def is_due(self, now: float) -> bool:
        return self._until <= now


class Limits:
    """Those of the streams of one connection that are in use. Threads share it."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a generator that holds a limit, while this thread has the lock.
        self._lock = threading.RLock()
        self._kept: set[Limit] = set()
        self._wake = threading.Event()
        self._thread = BackgroundThread("pxrs-remote-limit", self._end_overdue, self._wake.set)
        self._is_closed = False
        self._pid = os.getpid()

    @contextmanager
    def kept(self, limit: Limit, end: Callable[[], object]) -> Iterator[None]:
        """Within it, the stream is ended when the limit is over, or by `close`. end: ends it, from any thread. Raises
        Unanswered if the connection was closed."""
        self._thread.need()
        try:
            with self._lock:
                if self._is_closed:
                    raise Unanswered("the connection was closed", was_sent=False)
                limit.end = end
                self._kept.add(limit)
            yield
        finally:
            # Not in a forked child: a thread that does not exist there may hold one of the locks.
            if os.getpid() == self._pid:
                with self._lock:
                    self._kept.discard(limit)
                self._thread.release()

    def close(self) -> None:
        """End all streams. Idempotent."""
        with self._lock:
            self._is_closed = True
            kept = list(self._kept)
        for limit in kept:
            limit.end()
        self._thread.close()

    def _end_overdue(self) -> None:
        self._wake.wait(LOOK_S)
        now = time.monotonic()
        with self._lock:
            kept = list(self._kept)
        for limit in kept:
            if limit.is_due(now):
                limit.is_over = True
                limit.end()


def _nothing() -> None:
    """There is no stream to end yet."""
