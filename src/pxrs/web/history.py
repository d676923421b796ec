"""The newest events of the hub, kept in memory, so that a timeline costs no read of the log.

One thread follows `_events`, from `HOURS` ago on. At most `EVENTS_MAX` are kept, the newest; each group's are found
without looking at those of others. If the events cannot be followed, the thread notes why, and tries again.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from pxrs.errors import Closed, NoDirectory, PxrsError
from pxrs.events import Event
from pxrs.events.names import ADOPTED_REGISTRY

HOURS: Final = 6
EVENTS_MAX: Final = 50_000
AGAIN_S: Final = 5.0
_logger = logging.getLogger(__name__)

Follow = Callable[[timedelta], Iterator[Event]]
"""Gives the events since so long ago, oldest first, and goes on with those that come, until the hub is closed."""


class History:
    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._lock = threading.Lock()
        self._by_group: dict[str, deque[Event]] = defaultdict(deque)
        self._order: deque[str] = deque()
        """The group of each event that is kept, oldest first: by it the oldest ones are forgotten."""
        self.problem: str | None = None
        """Why no events are followed now."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pxrs-web-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The thread ends when the hub is closed; it is not waited for."""
        self._is_closed.set()

    def of_group(self, group: str, since_us: int) -> list[Event]:
        """The events of this group, oldest first."""
        with self._lock:
            return [event for event in self._by_group.get(group, ()) if event.at >= since_us]

    def groups(self) -> list[str]:
        """The names of all groups that an event has named."""
        with self._lock:
            return list(self._by_group)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                for event in self._follow(timedelta(hours=HOURS)):
                    self.problem = None
                    self._add(event)
                    if self._is_closed.is_set():
                        return
            except Closed:
                return
            except NoDirectory as error:  # a hub without topics keeps no events
                self.problem = str(error)
                return
            except PxrsError as error:
                if self.problem != str(error):
                    _logger.warning("cannot follow the events of the hub; retrying: %s", error)
                self.problem = str(error)
            with self._lock:
                self._by_group.clear()
                self._order.clear()
            self._is_closed.wait(AGAIN_S)

    def _add(self, event: Event) -> None:
        if event.name == ADOPTED_REGISTRY:  # earlier epochs are those of another registry
            with self._lock:
                self._by_group.clear()
                self._order.clear()
        group = event.fields.get("group")
        if not isinstance(group, str):
            return
        with self._lock:
            self._by_group[group].append(event)
            self._order.append(group)
            if len(self._order) > EVENTS_MAX:
                oldest = self._order.popleft()
                self._by_group[oldest].popleft()
                if not self._by_group[oldest]:
                    del self._by_group[oldest]
