"""A base class for sources that can learn of new messages only by asking again and again."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Final

from pxrs import arguments
from pxrs.errors import Closed, InvalidRecord, LogError, UsedAfterFork
from pxrs.log.contract import Source
from pxrs.waiting import BackgroundThread, Callback, Subscribers, Subscription

log: Final = logging.getLogger(__name__)

POLL_S_DEFAULT: Final = 1.0
CLOSE_S_MAX: Final = 5.0
"""How long `close` waits for a poll that is under way."""


class PollingSource(Source):
    """A `Source` with `subscribe` and `close`. While anyone waits, one thread compares `ends()` with the last ones
    every `poll_s` seconds (W6). A subclass sets `name`, `id` and `partitions`, and implements `bounds`, `read` and
    `offset_at`, each of which calls `check_usable` first."""

    def __init__(self, poll_s: float = POLL_S_DEFAULT) -> None:
        self._poll_s = arguments.seconds(InvalidRecord, "poll_s", poll_s, 0.001, arguments.DAY_S)
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._subscribers = Subscribers()
        self._seen: list[int] | None = None
        """The ends at the last poll; None before the first poll and after one that failed."""
        self._poller = BackgroundThread("pxrs-source-poller", self._poll, lambda: None)

    def check_usable(self, partitions: Iterable[int] = ()) -> None:
        """Raise UsedAfterFork, Closed, or InvalidRecord if one of these partitions is not there."""
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the source {self.name} was opened before a fork: open another one in the child")
        if self._closing.is_set():
            raise Closed(f"the source {self.name} was closed")
        for partition in partitions:
            if not 0 <= partition < self.partitions:
                raise InvalidRecord(f"{self.name} has no partition {partition}; it has 0 to {self.partitions - 1}")

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        self.check_usable(positions)
        return list(super().readable(positions))

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        chosen = tuple(partitions)
        self.check_usable(chosen)
        return self._subscribers.add_needing(self._poller, chosen, callback)

    def close(self) -> None:
        """Threads that wait get Closed. Idempotent."""
        if os.getpid() != self._pid:
            return  # in a forked child: the source belongs to the parent
        self._closing.set()
        self._poller.close(CLOSE_S_MAX)
        self._subscribers.wake_all()

    def _poll(self) -> None:
        # The first poll after the thread starts finds `_seen` outdated or None, and wakes everybody. A change may have
        # come before it; a wake without a change costs only one look.
        if self._closing.wait(self._poll_s):
            return
        try:
            ends = self.ends()
        except (LogError, OSError) as error:  # the waiting threads are woken, look too, and raise it
            log.info("looking for new messages in %s failed: %s", self.name, error)
            self._seen = None
            self._subscribers.wake_all()
            return
        if ends != self._seen:
            self._seen = ends
            self._subscribers.wake_all()
