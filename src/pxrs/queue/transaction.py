"""Take N items and put K, from and to any queues: all or nothing.

    with hub.transaction() as tx:           # commits on a clean exit, rolls back on an exception
        item = tx.take("mail", timeout=5)
        tx.put("sent", item.value)

A take moves the item into this process's hands, and counts it as delivered, in a commit of its own: so nobody else has
the item, and nothing that is held or delayed stands at the head of the queue (Q1). What is put stays in memory. The
commit removes what was taken, expecting each item as it was taken (Q2), and writes what was put, under the taker's
lease. `protocol` has these steps; this module is what runs them on a registry, for the threads of a process.

On failure:
- The lease was lost: other processes may have the items already. The commit is refused, with TransactionLost.
- A queue that the transaction puts into was deleted: UnknownQueue, also if another queue has its name by now.
- The reply to the commit was lost: OutcomeUnknown. `outcome` resolves it for good; so does the keeper if nobody asks.
- The reply to a take was lost: the take is resolved before anything else happens, or by the keeper if the store does
  not answer.
- A rollback always succeeds. If the store cannot be reached, the keeper returns the items when it can be, and a sweeper
  returns them in any case once the lease has ended.

The states and their transitions are in `states`. `_lock` guards everything; it is not held while `take` waits.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Literal, Protocol, Self, cast

from pxrs import arguments
from pxrs.errors import (
    Closed,
    Conflict,
    InvalidItem,
    LeaseExpired,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryCorrupt,
    TransactionEnded,
    TransactionLost,
    UnknownQueue,
)
from pxrs.failures import Failure, failure_of
from pxrs.queue.capacity import Capacity
from pxrs.queue.counts import count_committed
from pxrs.queue.items import Item, check_put, duration
from pxrs.queue.outcomes import Slot, resolve
from pxrs.queue.protocol import TransactionProtocol, give_back
from pxrs.queue.states import TransactionEvent, TransactionState, transaction_after
from pxrs.queue.store import QueueStore
from pxrs.queue.taker import Taker
from pxrs.queue.taking import Taking
from pxrs.registry.contract import Registry
from pxrs.registry.steps import Write, drive

_logger = logging.getLogger(__name__)

Outcome = Literal["open", "committed", "rolled back"]
CommitWith = Callable[[Mapping[str, int], Mapping[str, bytes]], dict[str, int]]
"""Makes a commit with these expectations and puts added; returns the versions of the keys that it wrote."""


class Inbox(Protocol):
    """What `checkpoint` needs of a consumer."""

    @property
    def registry(self) -> Registry: ...

    def commit_with(self, write: CommitWith) -> dict[str, int]: ...

    def enlist_in(self, transaction: Transaction) -> None: ...

    def partitions_in_hand(self) -> int: ...


class Named(Protocol):
    """A queue's handle, which callers may give in place of the queue's name."""

    @property
    def name(self) -> str: ...


class Transaction:
    """What `hub.transaction()` returns. Threads may share it: it makes one call at a time, but a take that waits for
    items does not block other calls. If the transaction ends meanwhile, that take raises TransactionEnded when it is
    woken."""

    def __init__(self, store: QueueStore) -> None:
        self.id = uuid.uuid4().hex
        self.hub: object = None
        """The hub that made this transaction. It closes its registry with its last reference, which is here."""
        self._store = store
        self._registry = store.registry
        self._lock = threading.RLock()
        self._taker: Taker | None = None
        """The taker whose lease the commit names. It stays the same once something was taken."""
        self._slot: Slot | None = None
        """Set before the commit is sent."""
        self._protocol = TransactionProtocol(self.id, store.versions, store.registry.limits)
        self.taken_by_queue: Callable[[], Mapping[str, int]] = self._protocol.taken_by_queue
        self._taking = Taking(store, self._protocol)
        self._capacity = Capacity(store.registry.limits, self._protocol)
        self._inboxes: dict[Inbox, int] = {}
        """The consumers whose checkpoints are in this transaction, and how many partitions each has in hand."""
        self._was_abandoned = False
        self.was_doubted = False
        """Whether the reply to its commit was lost."""
        self._state = TransactionState.OPEN
        store.began(self)

    # Taking and putting.

    def take(self, queue: str | Named, timeout: float | timedelta | None = None) -> Item | None:
        """The next item, locked for this transaction; None if there is none within the timeout. Without a timeout it
        waits."""
        items = self.take_many(queue, 1, timeout)
        return items[0] if items else None

    def take_many(self, queue: str | Named, max_items: int, timeout: float | timedelta | None = None) -> list[Item]:
        """Up to `max_items` items, as many as are ready; waits for the first one until the timeout."""
        max_items = arguments.whole(InvalidItem, "max_items", max_items, 1)
        until = None if timeout is None else time.monotonic() + duration("timeout", timeout)
        return self._take(_name_of(queue), max_items, until, lambda: False)

    def _take(self, name: str, count: int, until: float | None, is_over: Callable[[], bool]) -> list[Item]:
        with self._lock:
            self._check_open()
        queue = self._store.catalog.queue(name)
        self._store.keeper.look_after(queue)
        head = self._store.head(queue)
        is_waiting = False
        try:
            while True:
                queue = self._store.catalog.queue_of(queue)  # its settings may be changed during the wait
                with self._lock:  # and not during the wait
                    self._check_open()
                    room = self._capacity.check(queue)
                    taker = self._present()
                    try:
                        taken, retry = self._taking.attempt(queue, head, taker, min(count, room))
                    except LeaseExpired as error:
                        raise self._lost(error) from error
                    if taken:
                        self._capacity.note_taken(queue)
                if taken or is_over():
                    return [Item.of(queue, each.record) for each in taken]
                left_s = None if until is None else until - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return []
                if not taker.is_alive:
                    continue  # with another taker: the items that were refused to this one may still be there
                if not is_waiting:
                    head.enter()
                    is_waiting = True
                    # Look once more: what changed before the watch was set has woken nobody.
                    self._store.check_exists(queue)
                    continue
                if retry is not None:
                    left_s = retry.within_s if left_s is None else min(left_s, retry.within_s)
                head.wait(left_s, is_over, None if retry is None else retry.at)
                self._store.check_exists(queue)
        finally:
            if is_waiting:
                head.leave()

    def put(
        self,
        queue: str | Named,
        value: bytes | str,
        *,
        priority: int = 0,
        delay: float | timedelta | None = None,
        key: bytes | str | None = None,
    ) -> str:
        """Put an item when this transaction is committed; its id. Raises InvalidItem, TransactionTooLarge."""
        with self._lock:
            self._check_open()
            found = self._store.catalog.queue(_name_of(queue))
            now, bytes_max = self._store.wall_time(), self._registry.limits.value_bytes_max
            new = check_put(found, value, priority, delay, key, now, bytes_max)
            self._capacity.check(found, put=new)
            self._capacity.note_put(new)
            self._protocol.puts.append(new)
            return new.record.id

    def checkpoint(self, inbox: Inbox) -> None:
        """Write the checkpoint of the messages that the consumer has handed out so far, in the same commit: from topic
        to queue with nothing lost and nothing duplicated. The consumer must use the same registry."""
        with self._lock:
            self._check_open()
            if not hasattr(inbox, "enlist_in"):
                raise InvalidItem(f"{inbox!r} is not a consumer")
            if inbox.registry is not self._registry:
                raise InvalidItem(
                    "the consumer belongs to another hub: open the consumer and the transaction with the same hub"
                )
            count = inbox.partitions_in_hand()
            more = count - self._inboxes.get(inbox, 0)
            if more > 0:
                self._capacity.check(partitions=more)
            inbox.enlist_in(self)
            self._inboxes[inbox] = count
            self._capacity.note_partitions(sum(self._inboxes.values()))

    # The ends.

    def commit(self) -> None:
        """Commit all takes and puts; they are durable when this returns. Raises TransactionLost if the lease was lost,
        OutcomeUnknown if the reply was lost; after another error nothing was committed, and it may be tried again."""
        with self._lock:
            self._check_open()
            if not self._protocol.is_used and not self._inboxes:
                self._end(TransactionEvent.COMMITTED)
                return
            try:
                self._commit()
            except (Conflict, LeaseExpired) as error:
                raise self._lost(error) from error
            except OutcomeUnknown as error:
                self._doubt()
                error.add_note("pxrs: call tx.outcome() to find out whether it was committed")
                raise
            except (PartitionLost, UnknownQueue) as error:  # what was put came of messages that others have now
                self._give_back(Failure(str(error)))
                self._end(TransactionEvent.ROLLED_BACK)
                raise
            except BaseException as error:
                # After an interrupt nobody knows whether the commit was sent, unless there is no slot yet.
                if not isinstance(error, Exception) and self._slot is not None:
                    self._doubt()
                raise  # after another error nothing was written
            self._end(TransactionEvent.COMMITTED)

    def _commit(self) -> None:
        if self._protocol.unresolved:
            reason = self._store.reason(Failure("the reply to the take was lost"))
            drive(self._protocol.return_unresolved(reason), self._registry)
        try:
            self._commit_as(self._present())
        except LeaseExpired:
            if self._protocol.taken:
                raise
            self._taker = None  # nothing was taken with that lease: commit with another one
            self._commit_as(self._present())

    def _commit_as(self, taker: Taker) -> None:
        slot = self._slot or taker.slot()
        slot.sent_at = self._registry.clock.now()
        self._slot = slot  # last: after an interrupt before this line, nothing was sent
        targets = list({put.queue.id: put.queue for put in self._protocol.puts}.values())

        def write(step: Write) -> dict[str, int]:
            if self._inboxes:
                return self._write_with_checkpoints(step, taker)
            return self._store.combiner.commit(step, taker.lease)

        def attempt() -> None:
            for queue in targets:
                self._store.catalog.check_same(queue)
            steps = self._protocol.commit(slot, now=self._store.wall_time(), sent_at=time.time())
            drive(steps, self._registry, commit=write)

        self._store.catalog.retry(targets, lambda: {slot.key, *self._protocol.owned_keys}, attempt)

    def _write_with_checkpoints(self, write: Write, taker: Taker) -> dict[str, int]:
        """Make the commit, with the checkpoints of the consumers. Each consumer calls `add` while it holds its member's
        lock; the consumers are called in one order, so that two transactions cannot wait for each other."""
        inboxes = sorted(self._inboxes, key=id)
        expected, written = dict(write.expect), dict(write.put)

        def add(expect: Mapping[str, int], put: Mapping[str, bytes]) -> dict[str, int]:
            expected.update(expect)
            written.update(put)
            if inboxes:
                return inboxes.pop().commit_with(add)
            return self._store.combiner.commit(write._replace(expect=expected, put=written), taker.lease)

        return add({}, {})

    def _doubt(self) -> None:
        """The reply to the commit was lost: if nobody asks for the outcome, the keeper resolves it."""
        self._state = transaction_after(self._state, TransactionEvent.REPLY_LOST)
        self.was_doubted = True
        taker = self._taker

        def resolve_it() -> None:
            try:
                self._resolve()
            except (OutcomeUnknown, RegistryCorrupt):
                if taker is not None and taker.is_alive:
                    raise
                # The outcome is not on record any more, or damaged. A sweeper has returned what was taken.

        self._store.keeper.finish(resolve_it)

    def rollback(self, error: BaseException | str = "") -> None:
        """Undo it: the taken items are returned, and what was put is dropped. Always succeeds.

        error: the reason, stored with the items; of an exception also the traceback, with those that become dead
               letters."""
        with self._lock:
            if self._state == TransactionState.ROLLED_BACK:
                return
            self._check_open()
            self._give_back(failure_of(error) if isinstance(error, BaseException) else Failure(str(error)))
            self._end(TransactionEvent.ROLLED_BACK)

    def _give_back(self, failure: Failure) -> None:
        job = self._giving_back(failure)
        if job is None:
            return
        try:
            job()
        except Exception as error:  # whatever it is, the keeper tries again
            if not isinstance(error, PxrsError):
                _logger.warning("queues of %s: %s; will try again", self._registry.url, error, exc_info=error)
            self._store.keeper.finish(job)
        except BaseException:  # an interrupt: the job does nothing twice
            self._store.keeper.finish(job)
            raise

    def _giving_back(self, failure: Failure) -> Callable[[], None] | None:
        """A job that returns what was taken; None if nothing was. It does not refer to the transaction."""
        in_hand, store, taker = self._protocol.in_hand, self._store, self._taker
        if not any(in_hand):
            return None

        def job() -> None:
            if taker is None or taker.is_alive:  # else a sweeper does it
                drive(give_back(in_hand, store.reason(failure), store.registry.limits), store.registry)

        return job

    def outcome(self) -> Outcome:
        """The outcome of the transaction. After OutcomeUnknown this resolves it: a commit that was not applied by now
        never will be.

        Raises RegistryUnavailable while the store cannot be reached: call it again."""
        with self._lock:
            if self._state == TransactionState.UNKNOWN:
                self._resolve()
            assert self._state != TransactionState.UNKNOWN
            return cast(Outcome, str(self._state))

    def _resolve(self) -> None:
        with self._lock:
            if self._state != TransactionState.UNKNOWN:
                return
            assert self._slot is not None
            if drive(resolve(self._slot, self.id, self._registry.clock.now, time.time()), self._registry):
                self._end(TransactionEvent.FOUND_COMMITTED)
                return
            self._give_back(Failure("the commit did not reach the store"))
            self._end(TransactionEvent.FOUND_ABORTED)

    def abandon(self, *, gives_back: bool = True) -> None:
        """The hub is closed: an open transaction is rolled back.

        gives_back: False if there is no time to return the items; a sweeper returns them when the lease has ended."""
        if not self._lock.acquire(timeout=1 if gives_back else 0):
            return  # a call of another thread is under way; what was taken is returned when the lease has ended
        try:
            if self._state == TransactionState.OPEN:
                self._was_abandoned = True
                self.rollback() if gives_back else self._end(TransactionEvent.ROLLED_BACK)
        except PxrsError as error:
            _logger.debug("%r: %s; what was taken is returned when the lease has ended", self, error)
        finally:
            self._lock.release()

    def _end(self, event: TransactionEvent) -> None:
        self._state = transaction_after(self._state, event)
        if self._state is TransactionState.COMMITTED:
            count_committed(self._protocol.taken, self._protocol.puts)
        if self._slot is not None and self._taker is not None:
            self._taker.free(self._slot)
            self._slot = None
        self._protocol.clear()
        self._inboxes = {}
        self._store.ended(self)

    # What is checked.

    def _check_open(self) -> None:
        self._store.check_usable()
        if self._state == TransactionState.UNKNOWN:
            raise TransactionEnded("the commit of this transaction was sent, but the reply was lost: call tx.outcome()")
        if self._state != TransactionState.OPEN:
            raise TransactionEnded(f"this transaction was {self._state}: begin a new one")

    def _present(self) -> Taker:
        """The taker that this transaction is bound to, once it has taken something; before that, any that lives."""
        taker = self._taker
        if taker is None or not (taker.is_alive or self._protocol.taken):
            self._taker, self._slot = self._store.taker(), None
        elif not taker.is_alive:
            raise self._lost(LeaseExpired(f"lease {taker.lease.id} has ended"))
        assert self._taker is not None
        return self._taker

    def _lost(self, error: Exception) -> TransactionLost:
        """Other processes may have the items: roll back. Returns the error to raise."""
        taken = [each.record.id for each in self._protocol.taken]
        self._give_back(Failure("the commit was refused"))
        self._end(TransactionEvent.ROLLED_BACK)
        return TransactionLost(taken, str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != TransactionState.OPEN:
            if self._was_abandoned and error is None:
                raise Closed(f"the hub of {self._registry.url} was closed: {self!r} was rolled back")
            return
        if error is not None:
            self.rollback(error)
            return
        try:
            self.commit()
        except BaseException as failure:
            if self._state == TransactionState.OPEN:
                self.rollback(failure)
            raise

    def __del__(self) -> None:
        is_open = getattr(self, "_state", None) == TransactionState.OPEN
        if not is_open or not (self._protocol.is_used or self._inboxes):
            return
        warnings.warn(f"{self!r} was neither committed nor rolled back", ResourceWarning, stacklevel=2, source=self)
        job = self._giving_back(Failure("the transaction was dropped"))
        if job is not None:
            self._store.keeper.drop(job)

    def __repr__(self) -> str:
        taken, puts = self._protocol.taken, self._protocol.puts
        return f"<Transaction {self.id} {self._state}: {len(taken)} taken, {len(puts)} put>"


def _name_of(queue: str | Named) -> str:
    name = queue if isinstance(queue, str) else getattr(queue, "name", None)
    if not isinstance(name, str):
        raise InvalidItem(f"{queue!r} is not a queue: give the name of a queue, or its handle")
    return name
