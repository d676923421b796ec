"""The queues of a registry as one process sees them: their settings, their heads, and itself as a taker.

One of these belongs to a hub. Transactions, handles and listeners share it; so does the keeper, a thread that begins
with the first take and does what nobody waits for: see `keeper`."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from pxrs.errors import (
    Closed,
    Conflict,
    QueueDiffers,
    QueueExists,
    RegistryCorrupt,
    RegistryUnavailable,
    UnknownQueue,
)
from pxrs.queue.combine import Combiner
from pxrs.queue.head import Head
from pxrs.queue.keeper import CLOSE_S_MAX, Keeper
from pxrs.queue.moves import Changes, Move, in_parts
from pxrs.queue.policy import Backoff, Policy
from pxrs.queue.records import DELETED, QUEUES, Queue, Turn, check_name, load_number, root_of
from pxrs.queue.taker import Taker
from pxrs.registry.contract import ABSENT, Registry

if TYPE_CHECKING:
    from pxrs.queue.transaction import Transaction

_logger = logging.getLogger(__name__)

SETTINGS_AGE_S: Final = 1.0
"""How old what is known of a queue may be. It can only be deleted meanwhile, and a put finds that out."""
ATTEMPTS_MAX: Final = 200
SCAN_ITEMS: Final = 500
_PAUSE_S_MAX: Final = 0.02

T = TypeVar("T")


class QueueStore:
    def __init__(self, registry: Registry, lease_ttl: float) -> None:
        self.registry = registry
        self.lease_ttl = lease_ttl
        self.combiner = Combiner(registry)
        self.keeper = Keeper(self)
        self._lock = threading.Lock()
        self._taker_lock = threading.Lock()
        self._taker: Taker | None = None
        self._known: dict[str, tuple[Queue, float]] = {}
        self._heads: dict[str, Head] = {}
        self._standing: dict[str, int] = {}
        """By queue: the version of the key that is there as long as the queue is. It is written once."""
        self._sequences: dict[str, tuple[int, int]] = {}
        """Of strict queues: the last number and the version of its key, as last seen."""
        self._open: weakref.WeakSet[Transaction] = weakref.WeakSet()
        self._is_closed = False

    def wall_time(self) -> float:
        """Seconds since 1970, on the registry's clock: delays and backoffs of items are counted by it."""
        return self.registry.clock.wall_time_us() / 1e6

    # Queues.

    def create(
        self, name: str, policy: Policy, is_fifo: bool, backoff: Backoff | None, *, exist_ok: bool = False
    ) -> Queue:
        """Create a queue. Raises QueueExists.

        exist_ok: return the queue that has the name if its settings are those given here. Raises QueueDiffers if they
                  are not."""
        asked = Queue(name, uuid.uuid4().hex, policy, bool(is_fifo), backoff, self.wall_time())
        if not exist_ok:
            return self._create(asked)
        for _ in range(ATTEMPTS_MAX):
            found = self._look_up(name)
            if found is not None:
                if differences := found.differences(asked):
                    raise QueueDiffers(name, differences)
                return found
            try:
                return self._create(asked)
            except QueueExists:
                continue  # another process created it between the two calls: compare its settings
        raise RegistryUnavailable(f"queue {name!r} was created and deleted by others {ATTEMPTS_MAX} times; try again")

    def _create(self, queue: Queue) -> Queue:
        try:
            versions = self.registry.commit(
                {queue.key: ABSENT, queue.standing: ABSENT},
                {queue.key: queue.dump(), queue.standing: queue.name.encode()},
            )
        except Conflict:
            raise QueueExists(f"there is a queue {queue.name!r} already: use it, or choose another name") from None
        self._standing[queue.id] = versions[queue.standing]
        return queue

    def queues(self) -> list[Queue]:
        """All whose settings are not damaged."""
        found = []
        for entry in self.registry.scan(QUEUES):
            try:
                found.append(Queue.load(entry.key, entry.value))
            except RegistryCorrupt as error:
                _logger.error("queues of %s: %s", self.registry.url, error)
        return found

    def queue(self, name: str) -> Queue:
        """Its settings. Raises UnknownQueue."""
        check_name(name)
        with self._lock:
            known = self._known.get(name)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        queue = self._look_up(name)
        if queue is None:
            raise self.unknown(name)
        return queue

    def _look_up(self, name: str) -> Queue | None:
        """Read a queue's settings from the registry, whatever this process knows of it, and remember them. None if
        there is no queue of this name. What was remembered of a deleted queue is forgotten."""
        with self._lock:
            known = self._known.get(name)  # before the read: what another thread learns meanwhile is not forgotten
        entry = self.registry.get(f"{QUEUES}{name}")
        if entry is None:
            with self._lock:
                self._known.pop(name, None)
            if known is not None:
                self._forget(known[0])
            return None
        queue = Queue.load(entry.key, entry.value)
        if known is not None and known[0].id != queue.id:
            self._forget(known[0])
        with self._lock:
            self._known[name] = queue, time.monotonic() + SETTINGS_AGE_S
        return queue

    def unknown(self, name: str) -> UnknownQueue:
        """There is none, or no more: one that was made again is another one."""
        return UnknownQueue(name, [queue.name for queue in self.queues() if queue.name != name])

    def check_exists(self, queue: Queue) -> None:
        """Raise UnknownQueue if it was deleted meanwhile, also if there is another of this name."""
        if self._is_closed:
            raise Closed(f"the hub of {self.registry.url} was closed")
        with self._lock:
            self._expire(queue)
        self.check_same(queue)

    def check_same(self, queue: Queue) -> None:
        """As `check_exists`, as far as is known here."""
        if self.queue(queue.name).id != queue.id:
            raise self.unknown(queue.name)

    def standing(self, queue: Queue) -> int:
        """The version of the key that a put expects. Raises Conflict if it is gone, and the queue with it."""
        version = self._standing.get(queue.id)
        if version is None:
            entry = self.registry.get(queue.standing)
            if entry is None:
                settings = self.registry.get(queue.key)
                if settings is not None and Queue.load(settings.key, settings.value).id == queue.id:
                    raise RegistryCorrupt(queue.standing, f"it is not there, and queue {queue.name} is")
                raise Conflict([queue.standing])
            version = self._standing[queue.id] = entry.version
        return version

    def delete(self, name: str) -> None:
        """The queue with all that is in it. What was taken from it cannot be committed any more.

        It may be called again if it was interrupted: what is left of deleted queues is removed."""
        check_name(name)
        entry = self.registry.get(f"{QUEUES}{name}")
        if entry is None:
            if name not in self.clear_deleted():
                raise self.unknown(name)
            return
        queue = Queue.load(entry.key, entry.value)
        try:
            # Not by the settings alone: where a key that is made again has its old version (R4), they may be another's.
            expect = {entry.key: entry.version, queue.standing: self.standing(queue)}
            self.registry.commit(expect, {queue.deleted: name.encode()}, delete=list(expect))
        except Conflict:
            raise self.unknown(name) from None
        except RegistryUnavailable as error:
            error.add_note("if others put into the queue without a pause, have them stop first")
            raise
        with self._lock:
            self._known.pop(name, None)
        self._forget(queue)
        self.clear_deleted()

    def clear_deleted(self) -> set[str]:
        """Remove what is left of deleted queues. Their names."""
        names = set()
        for record in self.registry.scan(DELETED):
            root = root_of(record.key[len(DELETED) :])
            empty = 0
            while empty < 2:  # what is moved while a scan goes on may be in none of its parts (R1)
                entries = self.registry.scan(root, limit=SCAN_ITEMS)
                self.move_all([Move(entry.key, entry.version, None) for entry in entries])
                empty = 0 if entries else empty + 1
            self.move_all([Move(record.key, record.version, None)])
            names.add(record.value.decode(errors="replace"))
        return names

    def _expire(self, queue: Queue) -> None:
        """Under the lock: look again, when it is next asked for."""
        if queue.name in self._known:
            self._known[queue.name] = self._known[queue.name][0], 0.0

    def _forget(self, queue: Queue) -> None:
        with self._lock:
            self._standing.pop(queue.id, None)
            self._sequences.pop(queue.id, None)
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
        """Those who wait for items of a queue of this name, whichever it is, are to look whether they still wait."""
        with self._lock:
            heads = [head for head in self._heads.values() if head.queue.name == name]
        for head in heads:
            head.wake()

    # Items.

    def move_all(
        self,
        moves: Sequence[Move],
        *,
        expect: Mapping[str, int] | None = None,
        last: tuple[Mapping[str, int], Mapping[str, bytes]] | None = None,
    ) -> int:
        """Make as many of the moves as can be made, several in a commit; how many that were.

        expect: what must hold besides, or Conflict is raised. last: what the last commit expects and writes besides.
        What was moved meanwhile by others is left alone, so that all this may be done again after a lost reply."""
        expect = expect or {}
        done = 0
        parts = list(in_parts(moves, self.registry.limits)) or [[]]
        for number, part in enumerate(parts):
            more, put = last if last is not None and number == len(parts) - 1 else ({}, {})
            while part or put:
                changes = Changes.of(part)
                fixed = {**expect, **more}
                try:
                    self.registry.commit({**changes.expect, **fixed}, {**changes.put, **put}, delete=changes.delete)
                    done += len(part)
                    break
                except Conflict as conflict:
                    differing = set(conflict.keys)
                    if differing & fixed.keys():
                        raise
                    part = [move for move in part if not differing & {move.source, move.target}]
        return done

    def next_number(self, queue: Queue) -> tuple[int, int]:
        """The last number of a strict queue and the version of its key, as last seen."""
        with self._lock:
            if queue.id in self._sequences:
                return self._sequences[queue.id]
        entry = self.registry.get(queue.sequence)
        found = (0, ABSENT) if entry is None else (load_number(entry.key, entry.value), entry.version)
        with self._lock:
            self._sequences[queue.id] = found
        return found

    def numbered(self, queue: Queue, number: int, version: int) -> None:
        with self._lock:
            self._sequences[queue.id] = number, version

    def patiently(self, puts: Sequence[Queue], ours: Collection[str], attempt: Callable[[], T]) -> T:
        """Try a commit again while all that stands against it is what others change at any time: the last number of a
        strict queue, the queue itself, a checkpoint of one's own that landed late. `ours` are the keys that nobody else
        may change. Of the queues that it puts into, what is known is then looked at again."""
        for count in range(ATTEMPTS_MAX):
            try:
                return attempt()
            except BaseException as error:
                with self._lock:
                    for queue in puts:
                        self._sequences.pop(queue.id, None)
                        if isinstance(error, Conflict) and queue.standing in error.keys:
                            self._expire(queue)
                is_ours = isinstance(error, Conflict) and not set(error.keys).isdisjoint(ours)
                if not isinstance(error, Conflict) or is_ours:
                    raise
            time.sleep(random.random() * min(0.001 * 2**count, _PAUSE_S_MAX))
        raise RegistryUnavailable(f"{self.registry.url}: others were first {ATTEMPTS_MAX} times; try again")

    def next_due_at(self, queue: Queue) -> float | None:
        """When an item that waits for its delay or backoff may be taken, in seconds since 1970; None if none waits.
        Items of takers whose lease has ended are given back, and delayed items that are due are made ready."""
        self.keeper.return_items_of_dead(queue)
        due_at = self.keeper.end_delays(queue)
        if not queue.is_fifo:
            return due_at
        entry = self.registry.get(queue.turn)  # of a strict queue the first item waits in its place
        turn = Turn() if entry is None else Turn.load(entry.key, entry.value)
        is_waiting = not turn.holder and turn.not_before > self.wall_time()
        return turn.not_before if is_waiting and self.registry.scan(queue.ready, limit=1) else None

    # This process.

    def taker(self) -> Taker:
        """This process as one that takes, made anew if its lease was lost."""
        with self._taker_lock:
            if self._is_closed:
                raise Closed(f"the hub of {self.registry.url} was closed")
            if self._taker is None or not self._taker.is_alive:
                former, self._taker = self._taker, None
                if former is not None:
                    former.close()
                self._taker = Taker(self.registry, self.lease_ttl)
                self.keeper.wake()
            return self._taker

    def began(self, transaction: Transaction) -> None:
        with self._lock:
            if self._is_closed:
                raise Closed(f"the hub of {self.registry.url} was closed")
            self._open.add(transaction)

    def ended(self, transaction: Transaction) -> None:
        with self._lock:
            self._open.discard(transaction)

    def close(self) -> None:
        """Roll back what is open, then settle what is left, then leave. In this order: giving back needs the store,
        and leaving is what gives back the rest."""
        with self._lock:
            self._is_closed = True
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
