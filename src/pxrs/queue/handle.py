"""A queue as a program sees it: put items, read its head and its depth, and decide about its dead letters. Items are
taken by transactions: see `transaction`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final

from pxrs import arguments
from pxrs.errors import Conflict, InvalidItem, MissingDependency, RegistryCorrupt
from pxrs.events.recording import attempted
from pxrs.metrics.instruments import QUEUE_PUT
from pxrs.queue import moves
from pxrs.queue.items import BYTES_PER_KEY, Item, Put, check_put, placed_in
from pxrs.queue.moves import Move
from pxrs.queue.policy import Backoff, Policy
from pxrs.queue.protocol import move_all
from pxrs.queue.puts import put as put_steps
from pxrs.queue.records import Queue, Record, time_in
from pxrs.queue.store import QueueStore
from pxrs.registry.contract import Entry
from pxrs.registry.steps import drive

if TYPE_CHECKING:
    from pxrs.registry.sql.borrowed import Connection

_logger = logging.getLogger(__name__)

ITEMS_MAX: Final = 100
"""How many ids of items an audited action names."""
PEEK_MAX: Final = 10_000
SCAN_ITEMS: Final = 500
"""How many keys are read at a time."""
_KEYS_BESIDE: Final = 2
"""How many keys a put needs besides those of its items: the existence key, and the last number of a FIFO queue."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many items a queue has in each state."""

    ready: int
    delayed: int
    in_flight: int
    """Taken by transactions that have not ended, or whose items were not returned yet."""
    dead: int


class QueueHandle:
    """What `hub.queue(name)` returns. Threads share it."""

    def __init__(self, store: QueueStore, queue: Queue) -> None:
        self.store, self.settings = store, queue
        self._registry = store.registry
        self.hub: object = None
        """The hub that made this handle. It closes its registry with its last reference, which is here."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def policy(self) -> Policy:
        return self.settings.policy

    @property
    def is_fifo(self) -> bool:
        return self.settings.is_fifo

    @property
    def backoff(self) -> Backoff | None:
        return self.settings.backoff

    def put(
        self,
        value: bytes | str,
        *,
        priority: int = 0,
        delay: float | timedelta | None = None,
        key: bytes | str | None = None,
        connection: Connection | None = None,
    ) -> str:
        """Put an item and return its id. The item is durable when this returns.

        priority:   items of a higher priority are taken first; best effort.
        delay:      seconds, or a timedelta, before which the item is not taken.
        key:        stored with the item; the queue makes no use of it.
        connection: a SQLAlchemy connection to the database that the registry is in. The item is put when the
                    transaction of the connection commits.
        Raises InvalidItem, and OutcomeUnknown if the reply was lost. To be able to find out the outcome, put in a
        transaction."""
        put = self._checked(value, priority, delay, key)
        if connection is None:
            self._put([put])
        else:
            try:
                from pxrs.queue.enlist import put_in
            except ImportError as error:
                raise MissingDependency.of_extra("connection=", error.name, "sql") from error
            put_in(connection, self.store, put)
        return put.record.id

    def put_many(
        self, values: Iterable[bytes | str], *, priority: int = 0, delay: float | timedelta | None = None
    ) -> list[str]:
        """Put several items, as many in one commit as the store allows, and return their ids. If this raises an error,
        the items of earlier commits are in the queue."""
        if isinstance(values, str | bytes | bytearray | memoryview):
            raise InvalidItem("values is one value: give several, such as a list, or use `put`")
        if not isinstance(values, Iterable):
            raise InvalidItem(f"values is {arguments.shown(values)}: give several, such as a list")
        limits = self._registry.limits
        ids: list[str] = []
        batch: list[Put] = []
        size = 0
        for value in values:
            put = self._checked(value, priority, delay, None)
            is_full = len(batch) + 1 + _KEYS_BESIDE > limits.commit_keys_max
            if batch and (is_full or size + put.size + _KEYS_BESIDE * BYTES_PER_KEY > limits.commit_bytes_max):
                self._put(batch)
                batch, size = [], 0
            batch.append(put)
            size += put.size
            ids.append(put.record.id)
        if batch:
            self._put(batch)
        return ids

    def _checked(
        self, value: bytes | str, priority: int, delay: float | timedelta | None, key: bytes | str | None
    ) -> Put:
        queue = self.store.catalog.queue(self.name)
        now, bytes_max = self.store.wall_time(), self._registry.limits.value_bytes_max
        return check_put(queue, value, priority, delay, key, now, bytes_max)

    def _put(self, puts: list[Put]) -> None:
        queues: list[Queue] = []

        def attempt() -> None:
            queue = self.store.catalog.queue(self.name)  # another one if it was deleted and created again
            queues[:] = [queue]
            _put(self.store, [placed_in(queue, put) for put in puts])

        self.store.catalog.retry(queues, lambda: (), attempt)
        QUEUE_PUT.of(self.name).add(len(puts))

    def peek(self, max_items: int = 1) -> list[Item]:
        """The first ready items. They are not taken."""
        max_items = arguments.whole(InvalidItem, "max_items", max_items, 1, PEEK_MAX)
        queue = self.store.catalog.queue(self.name)
        entries = self._registry.scan(queue.ready, limit=max_items)
        return [Item.of(queue, record) for _, record in _whole(queue, entries)]

    def depth(self) -> Depth:
        """How many items are in each state. All keys are read, state by state: the numbers are not of one moment."""
        queue = self.store.catalog.queue(self.name)
        folders = (queue.ready, queue.delayed, queue.inflight, queue.dead)
        return Depth(*(sum(len(page) for page in _pages(self.store, folder)) for folder in folders))

    def dead_letters(self) -> DeadLetters:
        """The items that will not be delivered again."""
        return DeadLetters(self)

    def __repr__(self) -> str:
        return f"<QueueHandle {self.name}>"


class DeadLetters:
    """The dead letters of a queue: list, retry or remove them."""

    def __init__(self, handle: QueueHandle) -> None:
        self._handle, self._store = handle, handle.store

    def list(self, max_items: int = 100) -> list[Item]:
        """The oldest ones."""
        max_items = arguments.whole(InvalidItem, "max_items", max_items, 0, sys.maxsize)
        return [*islice(self, max_items)]

    def __iter__(self) -> Iterator[Item]:
        queue = self._store.catalog.queue(self._handle.name)
        for page in _pages(self._store, queue.dead):
            for entry, record in _whole(queue, page):
                yield Item.of(queue, record, time_in(entry.key))

    def __len__(self) -> int:
        return sum(len(page) for page in _pages(self._store, self._store.catalog.queue(self._handle.name).dead))

    def retry(self, ids: Iterable[str] | None = None) -> int:
        """Make the dead letters with these ids, or all, ready again, with no delivery counted. Returns how many.

        In a FIFO queue they come last. If this was interrupted, call it again."""
        queue, chosen = self._store.catalog.queue(self._handle.name), arguments.ids(InvalidItem, "ids", ids)
        done = 0
        with attempted(self._store.recorder, "requeue", queue=queue.name) as attempt:
            for page in self._chosen(queue, chosen):
                if queue.is_fifo:
                    for entry, record in _whole(queue, page):
                        done += self._retry_in_order(queue, entry, record)
                        attempt.has_effect = done > 0
                    continue
                done += self._move([moves.retry(queue, entry, record) for entry, record in _whole(queue, page)])
                attempt.has_effect = done > 0
        self._audit("requeue", queue, chosen, done)
        return done

    def _retry_in_order(self, queue: Queue, entry: Entry, found: Record) -> int:
        record = found.revived()

        def attempt() -> None:
            self._store.catalog.check_same(queue)
            _put(self._store, [Put(queue, record, 0.0)], [Move(entry.key, entry.version, None)])

        try:
            self._store.catalog.retry([queue], lambda: [entry.key], attempt)
        except Conflict:
            self._store.catalog.check_same(queue)  # the conflict may also name the existence key of a deleted queue
            return 0  # somebody else has retried or removed the dead letter
        return 1

    def purge(self, ids: Iterable[str] | None = None) -> int:
        """Delete the dead letters with these ids, or all. Returns how many."""
        queue, chosen = self._store.catalog.queue(self._handle.name), arguments.ids(InvalidItem, "ids", ids)
        done = 0
        with attempted(self._store.recorder, "purge", queue=queue.name) as attempt:
            for page in self._chosen(queue, chosen):
                done += self._move([moves.purge(entry) for entry in page])
                attempt.has_effect = done > 0
        self._audit("purge", queue, chosen, done)
        return done

    def _audit(self, action: str, queue: Queue, chosen: set[str] | None, count: int) -> None:
        """action: what was done to so many dead letters. chosen: their ids; None if all were meant."""
        items = None if chosen is None else sorted(chosen)[:ITEMS_MAX]
        self._store.recorder.audit(action, queue=queue.name, items=items, count=count)

    def _move(self, planned: Sequence[Move]) -> int:
        return drive(move_all(planned, self._store.registry.limits), self._store.registry)

    def _chosen(self, queue: Queue, wanted: set[str] | None) -> Iterator[Sequence[Entry]]:
        """The chosen dead letters, in pages, at most as many as there are now: a letter that is retried may become a
        dead letter again while this goes on."""
        left = len(self)
        for page in _pages(self._store, queue.dead):
            page = page[:left]
            if wanted is None:
                yield page
            else:
                yield [entry for entry, record in _whole(queue, page) if record.id in wanted]
            left -= len(page)
            if left <= 0:
                return


def _put(store: QueueStore, puts: Sequence[Put], removed: Sequence[Move] = ()) -> None:
    """Put items in one commit, which also makes the moves `removed`."""
    steps = put_steps(puts, store.versions, store.wall_time(), removed)
    drive(steps, store.registry, commit=store.combiner.commit)


def _whole(queue: Queue, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Record]]:
    """The entries with their records; damaged ones are logged and left out."""
    for entry in entries:
        try:
            yield entry, Record.load(entry.key, entry.value)
        except RegistryCorrupt as error:
            _logger.error("queue %s: %s; it is left where it is", queue.name, error)


def _pages(store: QueueStore, prefix: str) -> Iterator[Sequence[Entry]]:
    """The entries below a prefix, in pages, so that the size of each reply is bounded."""
    after: str | None = None
    while page := store.registry.scan(prefix, after, SCAN_ITEMS):
        yield page
        if len(page) < SCAN_ITEMS:
            return
        after = page[-1].key
