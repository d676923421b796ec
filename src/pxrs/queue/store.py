"""The queues of a hub as its process sees them: their settings, their heads, and the process itself as a taker.

A hub has one QueueStore. Its transactions, handles and listeners share it, and so does the keeper, a thread that begins
with the first take: see `keeper`."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from pxrs.errors import Closed, UsedAfterFork
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.failures import Failure
from pxrs.metrics.instruments import QUEUE_IN_FLIGHT, Read
from pxrs.queue.catalog import QueueCatalog
from pxrs.queue.combine import Combiner
from pxrs.queue.head import Head
from pxrs.queue.keeper import CLOSE_S_MAX, Keeper
from pxrs.queue.protocol import Reason, read_turn
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import Queue
from pxrs.queue.sweeping import Sweeping
from pxrs.queue.taker import Taker
from pxrs.registry.contract import Registry
from pxrs.registry.steps import drive


class Abandonable(Protocol):
    """An open transaction, as the store needs it."""

    def abandon(self, *, gives_back: bool) -> None: ...

    taken_by_queue: Callable[[], Mapping[str, int]]
    """Gives how many items of each queue it has taken and not finished."""


class QueueStore:
    """Threads share it. `_lock` guards the heads and the open transactions; `_taker_lock` is held while a taker
    registers, which is a call of the registry."""

    def __init__(self, registry: Registry, lease_ttl: float, recorder: Recorder = LOGGED_ONLY) -> None:
        """recorder: keeps the events of the queues."""
        self.registry, self.recorder = registry, recorder
        self.lease_ttl = lease_ttl
        self.versions = PutVersions()
        self.combiner = Combiner(registry)
        self.catalog = QueueCatalog(registry, self.versions, self._forget, recorder)
        self.sweeping = Sweeping(registry.limits, self.wall_time, random.random, recorder)
        self.keeper = Keeper(registry, self.catalog, self.versions, self.sweeping, self.taker)
        self._lock = threading.Lock()
        self._taker_lock = threading.Lock()
        self._taker: Taker | None = None
        self._heads: dict[str, Head] = {}
        self._open: weakref.WeakSet[Abandonable] = weakref.WeakSet()
        self._is_closing = False
        """No transaction begins any more."""
        self._is_closed = False
        self._pid = os.getpid()
        QUEUE_IN_FLIGHT.watch(self, QueueStore._in_flight)

    def wall_time(self) -> float:
        """Seconds since 1970, on the registry's clock: delays and backoffs of items are counted by it."""
        return self.registry.clock.wall_time_us() / 1e6

    def reason(self, failure: Failure) -> Reason:
        """Why items are returned, for the procedures of `protocol`."""
        return Reason(failure, self.wall_time, random.random, self.recorder)

    def check_usable(self) -> None:
        """Raises Closed, and UsedAfterFork in a forked child."""
        if self._is_closed:
            raise Closed(f"the hub of {self.registry.url} was closed")
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the registry {self.registry.url} was opened before a fork: open it in the child")

    def check_exists(self, queue: Queue) -> None:
        """Raises UnknownQueue if the queue was deleted, also if another one has its name; Closed."""
        if self._is_closing:
            raise Closed(f"the hub of {self.registry.url} was closed")
        self.catalog.check_exists(queue)

    def _forget(self, queue: Queue) -> None:
        """The queue was deleted: those who wait for its items are woken, and find that out."""
        with self._lock:
            head = self._heads.pop(queue.id, None)
        if head is not None:
            head.wake()
        self.keeper.forget(queue)

    def head(self, queue: Queue) -> Head:
        with self._lock:
            if queue.id not in self._heads:
                self._heads[queue.id] = Head(self.registry, queue)
            return self._heads[queue.id]

    def wake(self, name: str) -> None:
        """Have the threads that wait for items of the queues of this name check whether they still have to wait."""
        with self._lock:
            heads = [head for head in self._heads.values() if head.queue.name == name]
        for head in heads:
            head.wake()

    def return_items_of_dead(self, queue: Queue) -> None:
        """Return the items of a queue whose takers are gone, whoever is the queue's sweeper."""
        drive(self.sweeping.return_items_of_dead([queue]), self.registry)

    def end_delays(self, queue: Queue) -> float | None:
        """Make ready the delayed items that are due, whoever is the queue's sweeper. When the next one is, in seconds
        since 1970; None: there is none."""
        return drive(self.sweeping.end_delays(queue), self.registry)

    def next_due_at(self, queue: Queue) -> float | None:
        """When an item that waits for its delay or backoff may be taken, in seconds since 1970; None if none waits.
        Items of takers that are gone are returned first, and delayed items that are due are made ready."""
        self.return_items_of_dead(queue)
        due_at = self.end_delays(queue)
        if not queue.is_fifo:
            return due_at
        turn = drive(read_turn(queue), self.registry).turn  # in a FIFO queue the first item waits in its place
        is_waiting = not turn.holder and turn.not_before > self.wall_time()
        return turn.not_before if is_waiting and self.registry.scan(queue.ready, limit=1) else None

    # This process.

    @property
    def has_lease(self) -> bool:
        """Whether this process can take items: it has a lease that has not ended. Does not wait."""
        taker = self._taker
        return taker is not None and taker.is_alive

    def taker(self) -> Taker:
        """This process as a taker; another one if the lease of the last one was lost."""
        with self._taker_lock:
            if self._is_closing:
                raise Closed(f"the hub of {self.registry.url} was closed")
            if self._taker is None or not self._taker.is_alive:
                former, self._taker = self._taker, None
                if former is not None:
                    former.close()
                self._taker = Taker(self.registry, self.lease_ttl)
                self.keeper.wake()
            return self._taker

    def began(self, transaction: Abandonable) -> None:
        with self._lock:
            if self._is_closing:
                raise Closed(f"the hub of {self.registry.url} was closed")
            self._open.add(transaction)

    def ended(self, transaction: Abandonable) -> None:
        with self._lock:
            self._open.discard(transaction)

    def _in_flight(self) -> list[Read]:
        """For the metrics: how many items the open transactions of this process have taken."""
        with self._lock:
            transactions = list(self._open)
        found: Counter[str] = Counter()
        for each in transactions:
            found.update(each.taken_by_queue())
        return [((queue,), items) for queue, items in found.items()]

    def close(self) -> None:
        """Roll back the open transactions, then have the keeper finish its jobs, then close the taker. In this order:
        the first two need the taker's lease, and what they could not return is returned when the lease ends."""
        with self._lock:
            self._is_closing = True
            heads, transactions = list(self._heads.values()), list(self._open)
        for head in heads:
            head.wake()
        until = time.monotonic() + CLOSE_S_MAX
        for transaction in transactions:
            transaction.abandon(gives_back=time.monotonic() < until)
        self.keeper.close(until)
        with self._taker_lock:
            taker, self._taker = self._taker, None
        if taker is not None:
            taker.close()
        self._is_closed = True
