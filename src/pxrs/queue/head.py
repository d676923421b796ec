"""The items at the head of a queue that the threads of this process may try to take, and the wait for the next ones.

A look at the head is a request to the store, and so is each take. So one look reads several items, which the threads of
this process share out among them. Looking is no delivery (Q2). Another process may have read the same items; if both
try to take one, one of them is refused. The more often a process is refused, the larger the number of first items among
which it chooses at random (`_spread`, Q1). A process that is never refused takes the items in their order. In a FIFO
queue only the first item is tried.

Threads: one thread at a time looks (`_looking`), and one at a time waits in the store for all that wait (`_waiting`).
`_lock` guards the other attributes, and is never held during a call of the store."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from pxrs.errors import PxrsError
from pxrs.queue.protocol import read_head
from pxrs.queue.records import Queue, name_in
from pxrs.registry.contract import Entry, Registry
from pxrs.registry.steps import drive
from pxrs.registry.watch import Watch

LOOK_ITEMS: Final = 64
UNKNOWN_ITEMS_MAX: Final = 500
"""How many items a look reads at most while their size is not known."""
LOOK_BYTES: Final = 8 << 20
"""How many bytes a look should read; the size of the items is estimated from the look before."""
LOOK_AGE_S: Final = 0.25
"""How old what was read may be, so that an item of a higher priority is seen after that time. If a look takes long, ten
times its duration: looking takes at most a tenth of the time."""
SPREAD_MAX: Final = 64
RECHECK_S: Final = 0.5
"""How often a thread that waits behind another one checks whether it still has to wait."""
TRIED_S_MAX: Final = 1.0
"""How long an item that one thread tries to take is kept from the other threads. Bounded, because a KeyboardInterrupt
may have kept that thread from calling `tried`."""
REFUSALS_MAX: Final = 3
"""After so many refusals in a row the head is read again."""


class Head:
    """The head of one queue, shared by the threads of a process."""

    def __init__(self, registry: Registry, queue: Queue) -> None:
        self.queue = queue
        self._registry = registry
        self._lock = threading.Lock()
        self._seen: list[Entry] = []
        self._tried: dict[str, float] = {}
        """The keys of the items that threads of this process are trying to take now, and since when."""
        self._hidden: set[str] = set()
        """The keys of damaged items."""
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
        """Up to `count` items to try to take, read from the store if too few are known here."""
        came = time.monotonic()
        with self._looking:  # and not `_lock`, which `wake` needs: that must not wait for the store
            if len(self._seen) < count or self._refusals >= REFUSALS_MAX or time.monotonic() > self._good_until:
                if self._failed is not None and self._failed[0] >= came:
                    raise copy.copy(self._failed[1])  # of the look that this thread has waited for: it would fail too
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
                self._watch.wake()  # a waiting thread has not seen these items
            return chosen

    def _look(self, count: int) -> None:
        began = time.monotonic()
        with self._lock:
            self._tried = {key: since for key, since in self._tried.items() if began - since < TRIED_S_MAX}
            # An item that is taken during the scan may still be in what the scan finds.
            tried = self._tried.keys() | self._hidden
        limit = max(self._look_items, min(count, self._look_items_max)) + len(tried)
        found = drive(read_head(self.queue, limit), self._registry)
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
        """The item is damaged: no thread of this process tries it again."""
        with self._lock:
            self._hidden |= {entry.key}

    def tried(self, entries: list[Entry], *, was_refused: bool, are_left: bool = False) -> None:
        """A thread has tried to take these items.

        was_refused: it got none of them. are_left: some of them may still be there."""
        with self._lock:
            for entry in entries:
                self._tried.pop(entry.key, None)
            if was_refused:
                self._refusals += 1
                self._spread = min(SPREAD_MAX, self._spread * 4)
            else:
                self._refusals = 0
            if are_left and self._watch is not None:
                self._watch.wake()  # a waiting thread may have looked while these items were kept from it

    def enter(self) -> None:
        """Begin to wait: the watch sees everything from now on. The caller has to look once more after this (R2)."""
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
        """Wait until there may be items, or the caller has to check something else; at most `timeout` seconds, and no
        longer than until the registry's clock reaches `until_at`."""
        until = None if timeout is None else time.monotonic() + timeout
        # For a bounded time: the thread that waits in the store does not notice that this thread should end.
        while not self._waiting.acquire(timeout=_left_s(until)):
            if is_over() or (until is not None and time.monotonic() >= until):
                return
        try:
            with self._lock:
                watch, is_known = self._watch, bool(self._seen)
                left_s = None if until is None else max(until - time.monotonic(), 0.0)
                if self._tried:  # these were left out of the last look, and may become free without a change of a key
                    left_s = TRIED_S_MAX if left_s is None else min(left_s, TRIED_S_MAX)
            if watch is not None and not is_known and not is_over():
                watch.wait_until(until_at, self._registry.clock, left_s)
        finally:
            self._waiting.release()

    def leave(self) -> None:
        """Stop waiting. Another waiting thread is woken, in case that this one was woken and has not looked."""
        with self._lock:
            self._waiters -= 1
            watch, is_used = self._watch, self._waiters > 0
            if not is_used:
                self._watch = None
        if watch is not None:
            watch.wake() if is_used else watch.close()

    def wake(self) -> None:
        """Have the waiting threads check whether they still have to wait."""
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.wake()


def _left_s(until: float | None) -> float:
    return RECHECK_S if until is None else min(max(until - time.monotonic(), 0.0), RECHECK_S)
