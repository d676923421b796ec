"""The items at the head of a queue that this process may try to take, and the wait for the next ones.

Looking at the head is a request, and so is each take. So a look brings several items, which the threads of this process
share out: looking is no delivery (Q2). Another process may have the same in its hand, and then one of the two is
refused. The more often that happens, the further apart the takers choose: at random among the first few (Q1). Alone, a
process takes them in their order; in a strict queue there is only the first.

One thread at a time waits in the store, for all that wait here."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from pxrs.errors import PxrsError
from pxrs.queue.records import Queue, name_in
from pxrs.registry.contract import Entry, Registry
from pxrs.registry.watch import Watch

LOOK_ITEMS: Final = 64
UNKNOWN_ITEMS_MAX: Final = 500
"""How many a look is to bring at most while it is not known how large they are."""
LOOK_BYTES: Final = 8 << 20
"""How much a look is to bring; how large items are is known from the look before."""
LOOK_AGE_S: Final = 0.25
"""An item of a higher priority is seen after so long at the latest, but looking takes no more than a tenth of the
time."""
SPREAD_MAX: Final = 64
TURN_S_MAX: Final = 0.5
"""So long one who waits behind another does not look whether it is still to wait."""
TRIED_S_MAX: Final = 1.0
"""So long what one thread tries to take is kept from the others; an interrupt may have kept it from giving it free."""
REFUSALS_MAX: Final = 3
"""After so many in a row what is known of the head is too old."""


class Head:
    """Of one queue, shared by the threads of a process."""

    def __init__(self, registry: Registry, queue: Queue) -> None:
        self.queue = queue
        self._registry = registry
        self._lock = threading.Lock()
        self._seen: list[Entry] = []
        self._tried: dict[str, float] = {}
        """The keys of those that threads of this process are trying to take now, and since when."""
        self._hidden: set[str] = set()
        """Those that are damaged."""
        self._look_items = 1 if queue.is_fifo else LOOK_ITEMS
        self._look_items_max = UNKNOWN_ITEMS_MAX
        self._good_until = 0.0
        self._spread = 1
        self._refusals = 0
        self._looking = threading.Lock()
        self._failed: tuple[float, PxrsError] | None = None
        self._waiting = threading.Lock()
        self._waiters = 0
        self._watch: Watch | None = None

    def choose(self, count: int) -> list[Entry]:
        """Up to so many items to try, looking at the store if none is known here."""
        came = time.monotonic()
        with self._looking:  # and not `_lock`: who wants to wake those who wait must not wait for the store
            if len(self._seen) < count or self._refusals >= REFUSALS_MAX or time.monotonic() > self._good_until:
                if self._failed is not None and self._failed[0] >= came:
                    raise copy.copy(self._failed[1])  # the look that this one has waited for: not one after the other
                try:
                    self._look(count)
                except PxrsError as error:
                    self._failed = time.monotonic(), error
                    raise
            return self._share_out(count)

    def _share_out(self, count: int) -> list[Entry]:
        with self._lock:
            if self.queue.is_fifo:
                chosen, self._seen = self._seen[:count], []
                return chosen
            chosen = [self._pick() for _ in range(min(count, len(self._seen)))]
            self._tried |= dict.fromkeys((entry.key for entry in chosen), time.monotonic())
            if self._seen and self._watch is not None:
                self._watch.wake()  # one that waits does not know of these yet
            return chosen

    def _look(self, count: int) -> None:
        began = time.monotonic()
        with self._lock:
            self._tried = {key: since for key, since in self._tried.items() if began - since < TRIED_S_MAX}
            tried = self._tried.keys() | self._hidden  # one that was taken meanwhile may still be in what is found
        limit = max(self._look_items, min(count, self._look_items_max)) + len(tried)
        found = self._registry.scan(self.queue.ready, limit=limit)
        if self.queue.is_fifo and found:
            # A scan may see a later item and not an earlier one that came meanwhile (R1). What the first scan has seen
            # was there before the second, and so was all that is before it.
            last = found[-1].key
            found = [entry for entry in self._registry.scan(self.queue.ready, limit=limit) if entry.key <= last]
        with self._lock:
            self._seen = [entry for entry in found if entry.key not in tried and entry.key not in self._tried]
        now = time.monotonic()
        self._good_until = now + max(LOOK_AGE_S, 10 * (now - began))
        if self._refusals == 0:
            self._spread = max(1, self._spread // 2)
        self._refusals = 0
        if self._seen and not self.queue.is_fifo:
            size = sum(len(entry.value) for entry in self._seen)
            self._look_items_max = max(1, LOOK_BYTES * len(self._seen) // max(size, 1))
            self._look_items = min(LOOK_ITEMS, self._look_items_max)

    def _pick(self) -> Entry:
        if self._spread == 1:
            return self._seen.pop(0)
        priority = name_in(self._seen[0].key)[:4]
        few = min(self._spread, len(self._seen))
        while not name_in(self._seen[few - 1].key).startswith(priority):
            few -= 1
        return self._seen.pop(random.randrange(few))

    def hide(self, entry: Entry) -> None:
        """It is damaged: nobody here is to try it again."""
        with self._lock:
            self._hidden |= {entry.key}

    def tried(self, entries: list[Entry], *, was_refused: bool, are_left: bool = False) -> None:
        """These were chosen here and tried: taken, or somebody else was faster."""
        with self._lock:
            for entry in entries:
                self._tried.pop(entry.key, None)
            if was_refused:
                self._refusals += 1
                self._spread = min(SPREAD_MAX, self._spread * 4)
            else:
                self._refusals = 0
            if are_left and self._watch is not None:
                self._watch.wake()  # one that waits looked while these were kept from it

    def enter(self) -> None:
        """Begin to wait: from now on nothing that comes is missed. Look again after this (R2)."""
        queue = self.queue
        prefixes = (queue.ready, queue.key, queue.turn) if queue.is_fifo else (queue.ready, queue.key)
        with self._lock:
            self._waiters += 1
            if self._watch is None:
                try:
                    self._watch = self._registry.watch(*prefixes)
                except BaseException:
                    self._waiters -= 1
                    raise
            self._good_until = 0.0

    def wait(self, timeout: float | None, is_over: Callable[[], bool], until_at: float | None = None) -> None:
        """Until there may be items, or something else is to be looked at; for `timeout` seconds at most, and no longer
        than until the registry's clock has reached `until_at`."""
        until = None if timeout is None else time.monotonic() + timeout
        # Not for long at a time: who has it may be another's, and take no notice when this one is to end.
        while not self._waiting.acquire(timeout=_left_s(until)):
            if is_over() or (until is not None and time.monotonic() >= until):
                return
        try:
            with self._lock:
                watch, is_known = self._watch, bool(self._seen)
                left_s = None if until is None else max(until - time.monotonic(), 0.0)
                if self._tried:  # kept from the look before this wait: it may not be taken in the end
                    left_s = TRIED_S_MAX if left_s is None else min(left_s, TRIED_S_MAX)
            if watch is not None and not is_known and not is_over():
                watch.wait_until(until_at, self._registry.clock, left_s)
        finally:
            self._waiting.release()

    def leave(self) -> None:
        """Wait no more. If this one was woken and did not look, another does."""
        with self._lock:
            self._waiters -= 1
            watch, is_used = self._watch, self._waiters > 0
            if not is_used:
                self._watch = None
        if watch is not None:
            watch.wake() if is_used else watch.close()

    def wake(self) -> None:
        """Those who wait here are to look whether they are still to wait."""
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.wake()


def _left_s(until: float | None) -> float:
    return TURN_S_MAX if until is None else min(max(until - time.monotonic(), 0.0), TURN_S_MAX)
