"""`EventWriter`: the recorder of an open hub. It logs events, and gives them to the buffer of their topic.

Whoever records an event takes a lock for a moment and returns: no caller waits for a disk or a server. The writer
refers to the log and not to the hub: a hub that nobody uses any more closes itself, and with it the writer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from typing import Final

from pxrs.events.buffer import EventBuffer
from pxrs.events.model import Event, Json
from pxrs.events.recording import log_event, now_us, user
from pxrs.events.storing import EventStore
from pxrs.model import AUDIT_TOPIC, EVENTS_TOPIC
from pxrs.wording import counted

_logger = logging.getLogger(__name__)

BUFFER_MAX: Final = 10_000
"""How many events wait to be stored at most, for each of the two topics."""
CLOSE_S: Final = 2.0
"""How long `close` may take to store what is in the buffers."""


class EventWriter:
    """A `Recorder`. Any thread may call it; in a forked child it only logs."""

    def __init__(
        self, store: EventStore, url: str, *, now_us: Callable[[], int] = now_us, buffer_max: int = BUFFER_MAX
    ) -> None:
        """url: of the log, for messages. now_us: gives the time of day in microseconds since 1970."""
        self._url, self._now_us = url, now_us
        self._events = EventBuffer(EVENTS_TOPIC, store, url, self._record_dropped, buffer_max=buffer_max)
        self._audit = EventBuffer(AUDIT_TOPIC, store, url, self._record_dropped, buffer_max=buffer_max)
        self._pid = os.getpid()

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: Json) -> None:
        """Log the event, and have it stored soon. Never waits, never raises because of the event log."""
        event = Event(name, self._now_us(), fields)
        log_event(event)
        self.keep(event, on_stored)

    def audit(self, action: str, /, **fields: Json) -> None:
        """Record the action of an administrator. who: by default the user of this process."""
        self.record(f"audit.{action}", **{"who": user(), **fields})

    def keep(self, event: Event, on_stored: Callable[[], None] | None = None) -> bool:
        """Have the event stored soon, without logging it. Whether there was room for it."""
        if os.getpid() != self._pid:
            return False
        return (self._audit if event.is_audit else self._events).put(event, on_stored)

    def withdraw(self, events: Collection[Event]) -> None:
        """Do not store these events that `keep` was given, unless that has begun."""
        for buffer in (self._events, self._audit):
            buffer.withdraw(events)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all events recorded so far are stored, or dropped for good. False if the time is up."""
        until = time.monotonic() + timeout_s
        # `_audit` first: what it has dropped becomes an event of the other buffer.
        return all(buffer.flush(max(0.0, until - time.monotonic())) for buffer in (self._audit, self._events))

    def close(self) -> None:
        """Store what is in the buffers, for at most CLOSE_S, and end the threads. May be called again."""
        if os.getpid() != self._pid:
            return
        until = time.monotonic() + CLOSE_S
        buffers = (self._audit, self._events)
        for buffer in buffers:
            buffer.begin_close()
        left = sum([buffer.close(max(0.0, until - time.monotonic())) for buffer in buffers])
        if left:
            _logger.warning("%s of %s were not stored", counted(left, "event"), self._url, extra={"hub": self._url})

    def _record_dropped(self, count: int) -> None:
        """Called by the threads of the buffers. The event is stored although the buffer may be full again."""
        event = Event("events.dropped", self._now_us(), {"count": count, "reason": "the buffer was full"})
        log_event(event)
        self._events.put(event, is_forced=True)
