"""What one open log and its topics share: the connection while the log is open, and the subscriptions."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pxrs import dropped
from pxrs.errors import Closed, ReadFailed, UsedAfterFork
from pxrs.remote.client.connection import PAUSE_S_MAX, PAUSE_S_MIN, Connection, acquire, release
from pxrs.remote.client.faults import AWAY, NothingListens, Refused, Unanswered
from pxrs.remote.client.settings import Settings
from pxrs.remote.client.subscriptions import TopicSubscriptions
from pxrs.waiting import seconds_left

T = TypeVar("T")


class Session:
    """Threads share it; a forked child must open its own."""

    def __init__(self, settings: Settings) -> None:
        self.url = settings.shown
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection = acquire(settings)
        self.subscriptions = TopicSubscriptions(self._connection)
        self._is_closed = False

    def connection(self) -> Connection:
        """The connection. Raises Closed, UsedAfterFork."""
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the log {self.url} was opened before a fork: open it again in the child")
        if self._is_closed:
            raise Closed(f"the log {self.url} was closed")
        return self._connection

    def ask(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make a call that may be repeated; waits for a server that is away. Raises what the server answers;
        ReadFailed, Closed, UsedAfterFork."""
        return self.patiently(
            lambda connection, until: connection.call(call, arguments, max(0.0, until - time.monotonic()))
        )

    def patiently(self, attempt: Callable[[Connection, float], T]) -> T:
        """Make an attempt that may be repeated, until it is answered, or the patience or the limit of this thread
        (`waiting.time_limit`) is over; then ReadFailed.

        attempt: is given the connection, and when the patience is over, on the monotonic clock"""
        connection = self.connection()
        until = time.monotonic() + seconds_left(connection.patience_s)
        pause_s = PAUSE_S_MIN
        while True:
            try:
                return attempt(connection, until)
            except (Unanswered, *AWAY) as error:
                self.connection()  # raises Closed if the log was closed meanwhile
                if isinstance(error, NothingListens | Refused) or connection.settings.is_direct:
                    raise ReadFailed(f"{self.url}: {error}") from error
                if time.monotonic() + pause_s >= until:
                    raise ReadFailed(f"{self.url}: {error}; {connection.given_up(connection.patience_s)}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def close(self) -> None:
        """Wake whoever waits, and let go of the connection. Idempotent."""
        if os.getpid() != self._pid:
            return  # in a forked child: the log belongs to the parent
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self.subscriptions.close()
            release(self._connection)

    def __del__(self) -> None:
        if getattr(self, "_is_closed", True) or os.getpid() != self._pid or sys.is_finalizing():
            return
        dropped.apart(self.close)
        dropped.warn(f"the log {self.url}", "its connection is closed now", self)
