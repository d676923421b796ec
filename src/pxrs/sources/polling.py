"""A base class for sources of one's own that learn of new messages only by looking."""

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
"""How long `close` waits for a look of the thread to end."""


class PollingSource(Source):
    """A `Source` with `subscribe` and `close`: one thread compares `ends()` with what it saw before, every `poll_s`
    seconds, while anyone waits (W6). A subclass sets `name`, `id` and `partitions`, and implements `bounds`, `read` and
    `offset_at`, each of which calls `check_usable` first."""

    def __init__(self, poll_s: float = POLL_S_DEFAULT) -> None:
        self._poll_s = arguments.seconds(InvalidRecord, "poll_s", poll_s, 0.001, arguments.DAY_S)
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._subscribers = Subscribers()
        self._seen: list[int] | None = None
        """The ends at the last look of the thread; None before the first one and after one that failed."""
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
        self._poller.need()  # first: it raises if no thread can be started
        added = self._subscribers.add(chosen, callback)

        def end() -> None:
            added.close()
            self._poller.release()

        return Subscription(end)

    def wake(self) -> None:
        """Have everyone who waits look now: for a subclass that has another way to learn of changes too."""
        self._subscribers.wake_all()

    def close(self) -> None:
        """Whoever waits gets Closed. Idempotent."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        self._closing.set()
        self._poller.close(CLOSE_S_MAX)
        self._subscribers.wake_all()

    def _poll(self) -> None:
        # The first look after a start of the thread finds `_seen` old or None, and so wakes all: what changed before it
        # may have been missed by nobody or by somebody, and a wake too many costs only a look.
        if self._closing.wait(self._poll_s):
            return
        try:
            ends = self.ends()
        except (LogError, OSError) as error:  # whoever waits looks too, and raises what it meets
            log.info("looking for news in %s: %s", self.name, error)
            self._seen = None
            self._subscribers.wake_all()
            return
        if ends != self._seen:
            self._seen = ends
            self._subscribers.wake_all()
