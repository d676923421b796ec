"""One look at the hub for all requests of the same moment.

Requests come every second from each open page. The first request after `REFRESH_S` refreshes what is known, under a
lock; the others are answered from that. While nobody looks, nothing is done, except that a thread follows the events.

If the registry or the log cannot be read, what was known before stays, and `problem` says why it is old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from pxrs.errors import PxrsError
from pxrs.hub import Hub
from pxrs.web.cluster import ClusterBook
from pxrs.web.groups import GroupBook
from pxrs.web.history import History
from pxrs.web.queries import QueryBook
from pxrs.web.queues import QueueBook
from pxrs.web.topics import TopicBook

REFRESH_S: Final = 0.8
_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Observer:
    """Threads share it. `_lock` guards all that the books hold."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._lock = threading.Lock()
        registry = hub.registry
        self.topics = TopicBook(hub.log)
        self.groups = GroupBook(registry, self.topics, hub.check_registry)
        self.queues = QueueBook(registry)
        self.queries = QueryBook(registry)
        self.cluster = ClusterBook(registry)
        self.history = History(lambda since: hub.events(since=since, follow=True))
        self.problem: str | None = None
        self.looked_at = 0.0
        """When the last refresh was complete, in seconds since 1970; 0 before the first one."""
        self._next = 0.0

    def start(self) -> None:
        """Follow the events, and look for the first time, so that the first request need not wait for that."""
        self.history.start()
        threading.Thread(target=self.see, args=(lambda: None,), name="pxrs-web-first-look", daemon=True).start()

    def see(self, look: Callable[[], T]) -> T:
        """What `look` returns, called while nothing is refreshed, with what is at most about a second old."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next:
                self._refresh(now)
                self._next = time.monotonic() + REFRESH_S
            return look()

    def forget(self) -> None:
        """Refresh at the next request: something was changed through the page."""
        self._next = 0.0
        self.queues.count_again()

    def _refresh(self, now: float) -> None:
        problems = []
        for book in (self.topics, self.groups, self.queues, self.queries):
            try:
                book.refresh(now)
                if book is self.groups:
                    self.groups.add_named(self.history.groups(), now)
            except PxrsError as error:
                problems.append(str(error))
        if problems and self.problem is None:
            _logger.warning("the web page shows stale data: %s", "; ".join(problems))
        self.problem = "; ".join(problems) or None
        if not problems:
            self.looked_at = time.time()

    def close(self) -> None:
        self.history.close()
        with self._lock:
            self.groups.close()
            self.queues.close()
            self.queries.close()
