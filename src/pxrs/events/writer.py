"""`EventWriter`: the recorder of an open hub. It keeps events in a bounded buffer, and one thread stores them.

Whoever records an event takes a lock for a moment and returns: no caller waits for a disk or a server.

    what happens                          what the writer does
    -----------------------------------   ---------------------------------------------------------------------
    the buffer is full                    drops the event, counts it, and logs that once until there is room
    storing fails, as on a full disk      logs an outage, and tries again after a pause that doubles each time
    the hub has no directory (yet)        drops the events; the log still has them
    this process may not write            logs that once, and keeps no further events (the log still has them)
    events were dropped, and it works     stores `events.dropped` with their number
    `close`                               stores what is in the buffer, for at most CLOSE_S seconds

The thread starts with the first event and ends after IDLE_S seconds without one, so that an idle hub has no thread. The
writer refers to the log and not to the hub: a hub that nobody uses any more closes itself, and with it the writer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from pxrs.errors import (
    Closed,
    HubMoved,
    InvalidArgument,
    NoDirectory,
    NotPermitted,
    NoWritePermission,
    Unauthenticated,
    UsedAfterFork,
)
from pxrs.events.model import Event, Json
from pxrs.events.recording import log_event, now_us, user
from pxrs.events.storing import EventStore
from pxrs.limited_log import Outage
from pxrs.wording import counted

_logger = logging.getLogger(__name__)

BUFFER_MAX: Final = 10_000
"""How many events wait to be stored at most."""
BATCH_MAX: Final = 500
"""How many events are stored in one append."""
LINGER_S: Final = 0.005
"""How long the thread waits for further events before it stores one: a rebalance records many at once."""
IDLE_S: Final = 2.0
CLOSE_S: Final = 2.0
"""How long `close` may take to store what is in the buffer."""
_RETRY_S: Final = (0.05, 5.0)
"""The first and the longest pause after a failure."""
_FINAL: Final = (
    *(NoWritePermission, NotPermitted, Unauthenticated, HubMoved, Closed, UsedAfterFork),
    InvalidArgument,  # a server of an earlier version does not know the call
)
"""Errors after which storing is not tried again."""


class _Waiting(NamedTuple):
    event: Event
    on_stored: Callable[[], None] | None


class EventWriter:
    """A `Recorder`. Any thread may call it; in a forked child it only logs."""

    def __init__(
        self, store: EventStore, url: str, *, now_us: Callable[[], int] = now_us, buffer_max: int = BUFFER_MAX
    ) -> None:
        """url: of the log, for messages. now_us: gives the time of day in microseconds since 1970."""
        self._store, self._url, self._now_us, self._buffer_max = store, url, now_us, buffer_max
        self._condition = threading.Condition()
        """Guards all fields below; notified when an event is added or stored, and by `close`."""
        self._waiting: deque[_Waiting] = deque()
        self._taken = 0
        """How many events the thread is storing now."""
        self._dropped = 0
        """How many events were dropped and are not yet counted by an `events.dropped`."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._problem: str | None = None
        """Why no events are stored any more; None while they are."""
        self._pid = os.getpid()
        self._outage = Outage(_logger, f"events of {url} are not stored", extra={"hub": url})

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
        with self._condition:
            if self._is_closed or self._problem is not None:
                return False
            is_full = len(self._waiting) >= self._buffer_max
            if is_full:
                self._dropped += 1
            else:
                self._waiting.append(_Waiting(event, on_stored))
                self._start()
                self._condition.notify_all()
            is_first = is_full and self._dropped == 1
        if is_first:
            _logger.warning(
                "%s events of %s wait to be stored: further ones are dropped until there is room",
                f"{self._buffer_max:,}",
                self._url,
                extra={"hub": self._url},
            )
        return not is_full

    def flush(self, timeout_s: float) -> bool:
        """Wait until all events recorded so far are stored, or dropped for good. False if the time is up."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting and not self._taken, timeout_s)

    def close(self) -> None:
        """Store what is in the buffer, for at most CLOSE_S, and end the thread. May be called again."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
        with self._condition:
            left = len(self._waiting) + self._taken + self._dropped
        if left:
            _logger.warning("%s of %s were not stored", counted(left, "event"), self._url, extra={"hub": self._url})

    # The thread.

    def _start(self) -> None:
        """Under the condition's lock: start the thread, unless it runs."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._serve, name=f"pxrs-events-{self._url}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached, or the process is ending: the next event tries
            _logger.info("the events of %s have no thread: %s", self._url, error)
            return
        self._thread = thread

    def _serve(self) -> None:
        pause_s = _RETRY_S[0]
        while (some := self._take()) is not None:
            try:
                self._store.store([each.event for each in some])
            except NoDirectory:
                self._stored([])
                continue
            except _FINAL as error:
                self._stop(error)
                return
            except Exception as error:  # noqa: BLE001 - logged as an outage; the events are stored again
                self._outage.failed(error)
                if not self._put_back(some, pause_s):
                    return
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            pause_s = _RETRY_S[0]
            self._outage.worked()
            self._stored(some)

    def _take(self) -> list[_Waiting] | None:
        """Events to be stored, once there are some; None if the thread is to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._is_closed, IDLE_S)
            if not self._waiting and not self._dropped:
                self._thread = None
                return None
            if not self._is_closed:
                # More may come at once, and are stored in the same append.
                self._condition.wait_for(lambda: self._is_closed or len(self._waiting) >= BATCH_MAX, LINGER_S)
            some = [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]
            if self._dropped:
                fields = {"count": self._dropped, "reason": "the buffer was full"}
                some.append(_Waiting(Event("events.dropped", self._now_us(), fields), None))
                self._dropped = 0
            self._taken = len(some)
            return some

    def _put_back(self, some: list[_Waiting], pause_s: float) -> bool:
        """After a failure: wait, and have the events stored again. False if the thread is to end."""
        with self._condition:
            self._waiting.extendleft(reversed(some))
            self._taken = 0
            self._condition.wait_for(lambda: self._is_closed, pause_s)
            if self._is_closed:
                self._thread = None
                return False
            return True

    def _stored(self, some: list[_Waiting]) -> None:
        """Those that were taken are done with, and these of them are stored."""
        for each in some:
            if each.on_stored is not None:
                each.on_stored()
        with self._condition:
            self._taken = 0
            self._condition.notify_all()

    def _stop(self, error: Exception) -> None:
        """Keep no further events: this process cannot store them."""
        with self._condition:
            self._problem = str(error)
            self._waiting.clear()
            self._taken = self._dropped = 0
            self._thread = None
            self._condition.notify_all()
        if not isinstance(error, Closed | UsedAfterFork):
            _logger.info("events of %s are logged but not stored: %s", self._url, error, extra={"hub": self._url})
