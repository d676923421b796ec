"""`EventBuffer`: the events that wait to be stored in one internal topic, at most so many, and the thread that does it.

`_events` and `_audit` have a buffer each. So an outage of one topic, or thousands of events of a rebalance, neither
delay nor drop what administrators did, and no event is stored again because storing others failed.

    what happens                          what the buffer does
    -----------------------------------   ---------------------------------------------------------------------
    it is full                            drops the event, counts it, and logs that once until there is room
    storing fails, as on a full disk      logs an outage, and tries again after a pause that doubles each time
    the server refuses an event           stores the others of the batch one by one, and drops the refused ones;
                                          after REFUSALS_MAX in a row it keeps no further events
    the hub has no directory (yet)        drops the events; the log still has them
    this process may not write            logs that once, and keeps no further events (the log still has them)
    events were dropped, and it works     calls `on_dropped` with their number
    `close`                               stores what is in it, for at most the time that it is given

The thread starts with the first event and ends after IDLE_S seconds without one, so that an idle hub has no thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from pxrs.errors import Closed, HubMoved, InvalidArgument, NoDirectory, NotPermitted, NoWritePermission, UsedAfterFork
from pxrs.events.model import Event
from pxrs.events.storing import EventStore
from pxrs.limited_log import LimitedLog, Outage

_logger = logging.getLogger(__name__)

BATCH_MAX: Final = 500
"""How many events are stored in one append."""
LINGER_S: Final = 0.005
"""How long the thread waits for further events before it stores one: a rebalance records many at once."""
IDLE_S: Final = 2.0
REFUSALS_MAX: Final = 100
"""After so many refused events in a row it is assumed that this process may record none, or that the server is of an
earlier version and does not know the call."""
_RETRY_S: Final = (0.05, 5.0)
"""The first and the longest pause after a failure."""
_FINAL: Final = (NoWritePermission, HubMoved, Closed, UsedAfterFork)
"""Errors after which storing is not tried again."""
_REFUSED: Final = (NotPermitted, InvalidArgument)
"""Errors by which a server refuses some event of a batch."""


class _Waiting(NamedTuple):
    event: Event
    on_stored: Callable[[], None] | None


class EventBuffer:
    """Any thread may call it."""

    def __init__(
        self, name: str, store: EventStore, url: str, on_dropped: Callable[[int], None], *, buffer_max: int
    ) -> None:
        """name: of the topic. url: of the log, for messages. on_dropped: called on the thread of the buffer."""
        self._name, self._store, self._url = name, store, url
        self._on_dropped, self._buffer_max = on_dropped, buffer_max
        self._condition = threading.Condition()
        """Guards all fields below; notified when an event is added or stored, and by `begin_close`."""
        self._waiting: deque[_Waiting] = deque()
        self._taken = 0
        """How many events the thread is storing now."""
        self._dropped = 0
        """How many events were dropped and not yet given to `on_dropped`."""
        self._refusals = 0
        """How many events were refused since the last one that was stored. Of the thread alone."""
        self._refusal: Exception | None = None
        """Why the last of them was. Of the thread alone."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._problem: str | None = None
        """Why no events are stored any more; None while they are."""
        self._outage = Outage(_logger, f"events of {url} are not stored", extra={"hub": url, "topic": name})
        self._limited = LimitedLog(_logger)

    def put(self, event: Event, on_stored: Callable[[], None] | None = None, *, is_forced: bool = False) -> bool:
        """Have the event stored soon. Whether there was room for it. is_forced: although the buffer is full."""
        with self._condition:
            if self._is_closed or self._problem is not None:
                return False
            is_full = len(self._waiting) >= self._buffer_max and not is_forced
            if is_full:
                self._dropped += 1
            else:
                self._waiting.append(_Waiting(event, on_stored))
                self._start()
                self._condition.notify_all()
            is_first = is_full and self._dropped == 1
        if is_first:
            _logger.warning(
                "%s events of %s are waiting to be stored: further events are dropped until there is room",
                f"{self._buffer_max:,}",
                self._url,
                extra={"hub": self._url, "topic": self._name},
            )
        return not is_full

    def withdraw(self, events: Collection[Event]) -> None:
        """Do not store these objects, unless that has begun."""
        withdrawn = {id(event) for event in events}
        with self._condition:
            self._waiting = deque(each for each in self._waiting if id(each.event) not in withdrawn)
            self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all events so far are stored, or dropped for good. False if the time is up."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting and not self._taken, timeout_s)

    def begin_close(self) -> None:
        """Take no further events. The thread stores what waits, and ends after the first failure."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def close(self, timeout_s: float) -> int:
        """After `begin_close`: wait for the thread. How many events were not stored."""
        with self._condition:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        self._limited.flush()
        with self._condition:
            return len(self._waiting) + self._taken + self._dropped

    # The thread.

    def _start(self) -> None:
        """Under the condition's lock: start the thread, unless it runs."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._serve, name=f"pxrs{self._name}-{self._url}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached, or the process is ending: the next event tries
            _logger.info("no thread could be started to store the events of %s: %s", self._url, error)
            return
        self._thread = thread

    def _serve(self) -> None:
        pause_s = _RETRY_S[0]
        while (some := self._take()) is not None:
            try:
                self._store_all(some)
            except NoDirectory:
                pass
            except _FINAL as error:
                self._stop(error)
                return
            except Exception as error:  # noqa: BLE001 - logged as an outage; the events are stored again
                self._outage.failed(error)
                if not self._put_back(some, pause_s):
                    return
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            if self._refusal is not None and self._refusals >= REFUSALS_MAX:
                self._stop(self._refusal)
                return
            pause_s = _RETRY_S[0]
            self._outage.worked()
            self._finish()

    def _take(self) -> deque[_Waiting] | None:
        """Events to be stored, once there are some; None if the thread is to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._is_closed, IDLE_S)
            if not self._waiting:
                self._thread = None
                return None
            if not self._is_closed:
                # More may come at once, and are stored in the same append.
                self._condition.wait_for(lambda: self._is_closed or len(self._waiting) >= BATCH_MAX, LINGER_S)
            some = deque(self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting))))
            self._taken = len(some)
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self._on_dropped(dropped)
        return some

    def _store_all(self, some: deque[_Waiting]) -> None:
        """Store these events, and remove those from `some` that need not be tried again: they are stored, or a server
        has refused them. Raises what `EventStore.store` raises."""
        try:
            self._store.store(self._name, [each.event for each in some])
        except _REFUSED as error:
            if len(some) == 1:
                self._refuse(some[0].event, error)
            for each in list(some) if len(some) > 1 else ():
                if self._refusals < REFUSALS_MAX:
                    self._store_all(deque([each]))
                some.popleft()
        else:
            self._refusals = 0
            for each in some:
                if each.on_stored is not None:
                    each.on_stored()
        some.clear()

    def _refuse(self, event: Event, error: Exception) -> None:
        self._refusal, self._refusals = error, self._refusals + 1
        extra = {"hub": self._url, "topic": self._name, "refused_event": event.name}
        self._limited.log("refused", logging.WARNING, "an event of %s was refused: %s", self._url, error, extra=extra)

    def _put_back(self, some: deque[_Waiting], pause_s: float) -> bool:
        """After a failure: wait, and have the events stored again. False if the thread is to end."""
        with self._condition:
            self._waiting.extendleft(reversed(some))
            self._taken = 0
            self._condition.wait_for(lambda: self._is_closed, pause_s)
            if self._is_closed:
                self._thread = None
                return False
            return True

    def _finish(self) -> None:
        """Those that were taken are stored, or dropped for good."""
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
            _logger.info(
                "events of %s are logged but not stored: %s",
                self._url,
                error,
                extra={"hub": self._url, "topic": self._name},
            )
