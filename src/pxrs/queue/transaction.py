"""Take N items and put K, from and to any queues: all or nothing.

    with hub.transaction() as tx:           # commits on a clean exit, rolls back on an exception
        item = tx.take("mail", timeout=5)
        tx.put("sent", item.value)

A take moves the item into this process's hands, and counts it as delivered, in a commit of its own: so nobody else has
it, and nothing that is held or delayed stands at the head of the queue (Q1). What is put stays in memory. The commit
removes what was taken, expecting each item as it was taken (Q2), and writes what was put, under the taker's lease.

On failure:
- The lease was lost: others may have the items already. The commit is refused, with TransactionLost.
- A queue that it puts into was deleted: UnknownQueue, also if there is another of that name by now.
- The reply to the commit was lost: OutcomeUnknown. `outcome` settles it, for good; so does the keeper if nobody asks.
- The reply to a take was lost: what it left is looked at and made certain before anything else happens.
- A rollback always succeeds. If the store cannot be reached, the keeper gives the items back when it can be, and the
  end of the lease does so in any case.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

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
    RegistryUnavailable,
    TransactionEnded,
    TransactionLost,
    TransactionTooLarge,
    UnknownQueue,
)
from pxrs.failures import Failure, failure_of
from pxrs.queue import moves
from pxrs.queue.head import Head
from pxrs.queue.items import BYTES_PER_KEY, Item, Put, Taken, add_puts, check_put, duration, note_numbers
from pxrs.queue.moves import Changes, Move, Take
from pxrs.queue.records import Queue, Turn
from pxrs.queue.store import QueueStore
from pxrs.queue.taker import SETTLE_ATTEMPTS, Slot, Taker, settle
from pxrs.registry.contract import ABSENT, Entry, Registry
from pxrs.wording import counted

_logger = logging.getLogger(__name__)

Outcome = Literal["open", "committed", "rolled back"]
Write = Callable[[Mapping[str, int], Mapping[str, bytes]], dict[str, int]]
_KEYS_RESERVED: Final = 2
_KEYS_SPARE: Final = 16
_BYTES_PER_PARTITION: Final = 1_024
"""What a checkpoint takes at most for each, to be counted on: two keys and a value."""
_AGAIN_S: Final = 0.02
_CLOCKS_APART_S: Final = 60.0
"""How far two machines' clocks may differ before a backoff that was given by the other is not waited for."""
_LOOK_S_MAX: Final = 1.0
"""How long a wait is that is counted on the wall clock, which may be set meanwhile."""


class _Retry(NamedTuple):
    """When a take that found nothing tries again: at one of the two moments, whichever comes first."""

    at: float | None
    """On the registry's clock."""
    within_s: float
    """Seconds of the machine's time."""


class Inbox(Protocol):
    """What `checkpoint` needs of a consumer."""

    @property
    def registry(self) -> Registry: ...

    def commit_with(self, write: Write) -> dict[str, int]: ...

    def enlist_in(self, transaction: Transaction) -> None: ...

    def partitions_in_hand(self) -> int: ...


class Named(Protocol):
    """A queue's handle, which may stand for its name."""

    @property
    def name(self) -> str: ...


class Transaction:
    """What `hub.transaction()` returns. Threads may share it; one call at a time is made, but one that waits for items
    keeps nobody. If the transaction ends meanwhile, that one raises TransactionEnded when it is woken."""

    def __init__(self, store: QueueStore) -> None:
        self.id = uuid.uuid4().hex
        self.hub: object = None
        """The hub that made this transaction. It closes its registry with its last reference, which is here."""
        self._store = store
        self._registry = store.registry
        self._lock = threading.RLock()
        self._taker: Taker | None = None
        self._slot: Slot | None = None
        self._taken: list[Taken] = []
        self._puts: list[Put] = []
        self._turns: dict[str, tuple[Queue, int]] = {}
        """By queue: of the strict ones taken from, the version of the turn's key as this transaction wrote it."""
        self._strict: set[str] = set()
        """The strict queues that it takes from or puts into: each has two keys of its own."""
        self._targets: set[str] = set()
        """The queues that it puts into: that each is there is one key more."""
        self._inboxes: dict[Inbox, int] = {}
        """With how many partitions each has in hand."""
        self._bytes = 0
        self._was_abandoned = False
        self.was_doubted = False
        """Whether the reply to its commit was lost."""
        self._state: Outcome | Literal["unknown"] = "open"
        store.began(self)

    # Taking and putting.

    def take(self, queue: str | Named, timeout: float | timedelta | None = None) -> Item | None:
        """The next item, locked for this transaction; None if none came in time. Without a timeout it waits."""
        items = self.take_many(queue, 1, timeout)
        return items[0] if items else None

    def take_many(self, queue: str | Named, max_items: int, timeout: float | timedelta | None = None) -> list[Item]:
        """Up to so many items that are there, at least one if one comes in time."""
        max_items = arguments.whole(InvalidItem, "max_items", max_items, 1)
        until = None if timeout is None else time.monotonic() + duration("timeout", timeout)
        return self._take(_name_of(queue), max_items, until, lambda: False)

    def _take(self, name: str, count: int, until: float | None, is_over: Callable[[], bool]) -> list[Item]:
        with self._lock:
            self._check_open()
        queue = self._store.queue(name)
        self._store.keeper.look_after(queue)
        head = self._store.head(queue)
        is_waiting = False
        try:
            while True:
                with self._lock:  # and not during the wait
                    self._check_open()
                    room = self._room(queue)
                    taker = self._present()
                    taken, retry = self._try_take(queue, head, taker, min(count, room))
                    if taken and queue.is_fifo:
                        self._strict.add(queue.id)
                if taken or is_over():
                    return [Item.of(queue, each.record) for each in taken]
                left_s = None if until is None else until - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return []
                if not taker.is_alive:
                    continue  # with another lease: what was refused to this one may still be there
                if not is_waiting:
                    head.enter()
                    is_waiting = True
                    # Look again: what came before the watch was set woke nobody, nor did the end of the queue.
                    self._store.check_exists(queue)
                    continue
                if retry is not None:
                    left_s = retry.within_s if left_s is None else min(left_s, retry.within_s)
                head.wait(left_s, is_over, None if retry is None else retry.at)
                self._store.check_exists(queue)
        finally:
            if is_waiting:
                head.leave()

    def _try_take(self, queue: Queue, head: Head, taker: Taker, count: int) -> tuple[list[Taken], _Retry | None]:
        """What could be taken, without waiting; and if that is nothing, when to try again although no key changes."""
        turn: Entry | None = None
        if queue.is_fifo and queue.id not in self._turns:
            turn = self._registry.get(queue.turn)
            state = Turn() if turn is None else Turn.load(turn.key, turn.value)
            if state.holder:
                return [], None
            now = self._registry.clock.now()  # before the time of day: a clock that moves between the two ends the wait
            wait_s = state.not_before - self._store.wall_time()
            if 0 < wait_s <= moves.longest_s(queue) + _CLOCKS_APART_S:  # else a clock was set back since
                return [], _Retry(now + wait_s, _LOOK_S_MAX)
        while entries := head.choose(count):
            taken: list[Taken] = []
            is_through = False
            try:
                taken = self._take_these(queue, taker, self._planned(queue, head, entries, taker), turn)
                is_through = not taken or len(taken) == len(entries)
            finally:
                head.tried(entries, was_refused=not taken, are_left=not is_through)
            if taken:
                return taken, None
            if queue.is_fifo or not taker.is_alive:
                # It is somebody else's turn, or nobody's: a lost lease or reply, an item that was written anew. Nothing
                # tells which, and the last ones wake nobody.
                return [], _Retry(None, _AGAIN_S)
        return [], None

    def _planned(self, queue: Queue, head: Head, entries: list[Entry], taker: Taker) -> list[Take]:
        """As many as one commit takes, without those that are damaged. In a strict queue such a one holds up the
        others, as nobody knows what it is."""
        planned = []
        for entry in entries:
            try:
                planned.append(moves.take(queue, entry, taker.id, self.id[:12]))
            except RegistryCorrupt as error:
                if queue.is_fifo:
                    raise
                head.hide(entry)
                _logger.error("queue %s: %s; it is left where it is", queue.name, error)
        parts = moves.in_parts([each.move for each in planned], self._registry.limits)
        return planned[: len(next(parts, []))]

    def _take_these(self, queue: Queue, taker: Taker, planned: list[Take], turn: Entry | None) -> list[Taken]:
        """Those of the items that nobody was faster on."""
        while planned:
            changes = Changes.of(each.move for each in planned)
            if queue.is_fifo:
                if queue.id in self._turns:
                    changes.expect[queue.turn] = self._turns[queue.id][1]
                else:
                    changes.expect[queue.turn] = ABSENT if turn is None else turn.version
                    changes.put[queue.turn] = Turn(holder=taker.id).dump()
            try:
                versions = self._store.combiner.commit(changes, taker.lease, quiet=True)
                return self._note_taken(queue, planned, versions)
            except Conflict as conflict:
                if queue.turn in conflict.keys:
                    return []
                planned = [each for each in planned if each.move.source not in conflict.keys]
                if queue.is_fifo:
                    return []
                continue
            except LeaseExpired as error:
                if not self._taken:
                    taker.lease.expire()  # also if it was the store that said so
                    return []
                raise self._lost(error) from error
            except OutcomeUnknown:
                versions = self._settle_take(queue, planned)
                if not versions:
                    return []
            except PxrsError:
                raise  # nothing was taken
            except BaseException:  # an interrupt: nobody knows whether it was sent
                self._give_back_later(queue, planned)
                raise
            return self._note_taken(queue, planned, versions)
        return []

    def _note_taken(self, queue: Queue, planned: list[Take], versions: Mapping[str, int]) -> list[Taken]:
        taken = _taken(queue, planned, versions)
        turn = {queue.id: (queue, versions[queue.turn])} if queue.turn in versions else {}
        both = self._taken + taken, self._turns | turn
        self._taken, self._turns = both  # no call in between: an interrupt finds both or none
        return taken

    def _settle_take(self, queue: Queue, planned: list[Take]) -> dict[str, int]:
        """After a lost reply: the versions of what was taken, empty if nothing was; and then it never will be (R5).

        If that cannot be told now, the keeper finds out, and gives back what was taken."""
        for _ in range(SETTLE_ATTEMPTS):
            try:
                return self._find_out(queue, planned)
            except OutcomeUnknown:
                continue
            except RegistryUnavailable:
                break
        self._give_back_later(queue, planned)
        raise RegistryUnavailable(
            f"{self._registry.url}: the reply to a take was lost; what it took will be given back"
        )

    def _find_out(self, queue: Queue, planned: list[Take]) -> dict[str, int]:
        """Write the first item anew where it was: the take expects it as it was, and cannot land any more. If it is
        not there as it was, the take has landed, or somebody else was faster."""
        first, before = planned[0].move, planned[0].before
        try:
            self._registry.commit({first.source: first.version}, {first.source: before}, quiet=True)
            return {}
        except Conflict:
            pass
        keys = [each.target for each in planned]
        if queue.is_fifo and queue.id not in self._turns:
            keys.append(queue.turn)
        found = [self._registry.get(key) for key in keys]
        return {each.key: each.version for each in found if each is not None} if found[0] is not None else {}

    def _give_back_later(self, queue: Queue, planned: list[Take]) -> None:
        def give_back() -> None:
            versions = self._find_out(queue, planned)
            if versions:
                turns = {queue.id: (queue, versions[queue.turn])} if queue.turn in versions else {}
                _give_back(
                    self._store, _taken(queue, planned, versions), turns, Failure("the reply to the take was lost")
                )

        self._store.keeper.finish(give_back)

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
            found = self._store.queue(_name_of(queue))
            now, bytes_max = self._store.wall_time(), self._registry.limits.value_bytes_max
            new = check_put(found, value, priority, delay, key, now, bytes_max)
            self._room(found, put=new)
            if found.is_fifo:
                self._strict.add(found.id)
            self._targets.add(found.id)
            self._puts.append(new)
            self._bytes += new.size
            return new.record.id

    def checkpoint(self, inbox: Inbox) -> None:
        """Also write down, in the same commit, that what the consumer has handed out by now is done: from topic to
        queue with nothing lost and nothing doubled. The consumer must be of the same registry."""
        with self._lock:
            self._check_open()
            if not hasattr(inbox, "enlist_in"):
                raise InvalidItem(f"{inbox!r} is no consumer")
            if inbox.registry is not self._registry:
                raise InvalidItem("the consumer is of another hub: open it and the transaction from the same one")
            count = inbox.partitions_in_hand()
            more = count - self._inboxes.get(inbox, 0)
            if more > 0:
                self._room(partitions=more)
            inbox.enlist_in(self)
            self._inboxes[inbox] = count

    # The ends.

    def commit(self) -> None:
        """All of it, durably, when this returns. Raises TransactionLost if the lease was lost, OutcomeUnknown if the
        reply was; after another error nothing has happened, and it may be tried again."""
        with self._lock:
            self._check_open()
            if not self._taken and not self._puts and not self._inboxes:
                self._end("committed")
                return
            try:
                self._commit()
            except (Conflict, LeaseExpired) as error:
                raise self._lost(error) from error
            except OutcomeUnknown as error:
                self._doubt()
                error.add_note("pxrs: tx.outcome() finds out what became of it")
                raise
            except (PartitionLost, UnknownQueue) as error:  # what was put came of messages that are others' now
                self._give_back(Failure(str(error)))
                self._end("rolled back")
                raise
            except Exception:
                raise  # nothing was written
            except BaseException:  # an interrupt: nobody knows whether it was sent
                if self._slot is not None:  # else it was not
                    self._doubt()
                raise
            self._end("committed")

    def _commit(self) -> None:
        try:
            self._commit_as(self._present())
        except LeaseExpired:
            if self._taken:
                raise
            self._taker = None  # nothing hangs on that lease: with another one, then
            self._commit_as(self._present())

    def _commit_as(self, taker: Taker) -> None:
        slot = self._slot or taker.slot()
        slot.sent_at = self._registry.clock.now()
        self._slot = slot  # last: an interrupt before this finds that nothing was sent
        queues = list({put.queue.id: put.queue for put in self._puts}.values())
        ours = {slot.key, *(each.key for each in self._taken), *(queue.turn for queue, _ in self._turns.values())}

        def attempt() -> None:
            for queue in queues:
                self._store.check_same(queue)
            self._commit_once(taker, slot)

        self._store.patiently(queues, ours, attempt)

    def _doubt(self) -> None:
        self._state, self.was_doubted = "unknown", True
        taker = self._taker

        def settle_it() -> None:
            try:
                self._settle()
            except (OutcomeUnknown, RegistryCorrupt):
                if taker is not None and taker.is_alive:
                    raise
                # It is not on record any more, or damaged. What was taken was given back with the lease's end.

        self._store.keeper.finish(settle_it)

    def _commit_once(self, taker: Taker, slot: Slot) -> None:
        changes = Changes.of(Move(each.key, each.version, None) for each in self._taken)
        changes.expect[slot.key] = slot.version
        changes.put[slot.key] = slot.committed(self.id)
        for queue, version in self._turns.values():
            changes.expect[queue.turn] = version
            changes.put[queue.turn] = Turn().dump()
        numbers = add_puts(self._store, self._puts, changes)
        inboxes = sorted(self._inboxes, key=id)  # in one order: each holds its member's mutex
        is_quiet = not self._puts and not self._turns

        def write(expect: Mapping[str, int], put: Mapping[str, bytes]) -> dict[str, int]:
            changes.expect.update(expect)
            changes.put.update(put)
            if inboxes:
                return inboxes.pop().commit_with(write)
            return self._store.combiner.commit(changes, taker.lease, quiet=is_quiet)

        versions = write({}, {})
        slot.version = versions[slot.key]
        note_numbers(self._store, numbers, versions)

    def rollback(self, error: BaseException | str = "") -> None:
        """Nothing of it happens: what was taken is given back, what was put is dropped. Always succeeds.

        error: why, to be kept with the items; an exception's traceback too, with those that become dead letters."""
        with self._lock:
            if self._state == "rolled back":
                return
            if self._state == "unknown":
                raise TransactionEnded("the commit of this transaction was sent, and its reply lost: use tx.outcome()")
            self._check_open()
            self._give_back(failure_of(error) if isinstance(error, BaseException) else Failure(str(error)))
            self._end("rolled back")

    def _give_back(self, reason: Failure) -> None:
        taken, turns = self._taken, self._turns
        if not taken and not turns:
            return
        taker = self._taker

        def give_back() -> None:
            if taker is None or taker.is_alive:  # else they are the sweeper's
                _give_back(self._store, taken, turns, reason)

        try:
            give_back()
        except Exception as error:  # whatever it is, the keeper tries again
            if not isinstance(error, PxrsError):
                _logger.warning("queues of %s: %s; will try again", self._registry.url, error, exc_info=error)
            self._store.keeper.finish(give_back)
        except BaseException:  # an interrupt: done again, it does nothing twice
            self._store.keeper.finish(give_back)
            raise

    def outcome(self) -> Outcome:
        """What became of it. After OutcomeUnknown this settles it: a commit that has not landed by now never will.

        Raises RegistryUnavailable while the store cannot be reached: ask again."""
        with self._lock:
            if self._state == "unknown":
                self._settle()
            assert self._state != "unknown"
            return self._state

    def _settle(self) -> None:
        with self._lock:
            if self._state != "unknown":
                return
            assert self._slot is not None
            if settle(self._registry, self._slot, self.id):
                self._end("committed")
                return
            self._give_back(Failure("the commit did not reach the store"))
            self._end("rolled back")

    def abandon(self, *, gives_back: bool = True) -> None:
        """The hub is closed: what is still open is rolled back."""
        if not self._lock.acquire(timeout=1 if gives_back else 0):
            return  # somebody is in the middle of something; the lease's end does it
        try:
            if self._state != "open":
                return
            self._was_abandoned = True
            if gives_back:
                self.rollback()
            else:
                self._end("rolled back")  # the lease's end gives back
        except PxrsError:
            pass  # the same
        finally:
            self._lock.release()

    def _end(self, state: Outcome) -> None:
        self._state = state
        if self._slot is not None and self._taker is not None:
            self._taker.give_back(self._slot)
            self._slot = None
        self._taken, self._puts, self._turns, self._inboxes = [], [], {}, {}
        self._store.ended(self)

    # What is checked.

    def _check_open(self) -> None:
        self._registry._check_usable()  # also that this is no forked child's copy of it
        if self._state == "unknown":
            raise TransactionEnded("the commit of this transaction was sent, and its reply lost: use tx.outcome()")
        if self._state != "open":
            raise TransactionEnded(f"this transaction was {self._state}: begin another one")

    def _present(self) -> Taker:
        """The taker that this transaction is bound to, once it has taken something; before that, any that lives."""
        taker = self._taker
        if taker is None or not (taker.is_alive or self._taken):
            self._taker, self._slot = self._store.taker(), None
        elif not taker.is_alive:
            raise self._lost(LeaseExpired(f"lease {taker.lease.id} has ended"))
        assert self._taker is not None
        return self._taker

    def _lost(self, error: Exception) -> TransactionLost:
        """The items may be in other hands by now: nothing of this transaction will happen."""
        taken = [each.record.id for each in self._taken]
        self._give_back(Failure("the commit was refused"))
        self._end("rolled back")
        return TransactionLost(taken, str(error))

    def _room(self, queue: Queue | None = None, *, put: Put | None = None, partitions: int = 0) -> int:
        """How many items of this queue the transaction may take besides what it has. Raises TransactionTooLarge if it
        is none, or if what is to be put, or so many partitions of a checkpoint more, are too much."""
        limits = self._registry.limits
        strict, targets = len(self._strict), len(self._targets)
        if queue is not None:
            strict += queue.is_fifo and queue.id not in self._strict
            targets += put is not None and queue.id not in self._targets
        partitions += sum(self._inboxes.values())
        keys = len(self._taken) + len(self._puts) + 2 * strict + targets + 2 * partitions + _KEYS_RESERVED
        left = limits.commit_keys_max - keys
        if left < (0 if queue is None else 1):
            raise TransactionTooLarge(
                f"{counted(len(self._taken), 'item')} taken, {len(self._puts)} put and "
                f"{counted(partitions, 'partition')} of a checkpoint in one transaction are more than this store "
                f"takes: it changes {limits.commit_keys_max} keys at once"
            )
        size = self._bytes + (0 if put is None else put.size) + partitions * _BYTES_PER_PARTITION
        size += (len(self._taken) + 2 * strict + targets + _KEYS_SPARE) * BYTES_PER_KEY
        left_bytes = limits.commit_bytes_max - size
        if left_bytes < (BYTES_PER_KEY if queue is not None and put is None else 0):
            raise TransactionTooLarge(
                f"{size:,} bytes in one transaction are too many, as this store takes {limits.commit_bytes_max:,}: put "
                "less in one"
            )
        return min(left, left_bytes // BYTES_PER_KEY)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != "open":
            if self._was_abandoned and error is None:
                raise Closed(f"the hub of {self._registry.url} was closed: {self!r} was rolled back")
            return
        if error is not None:
            self.rollback(error)
            return
        try:
            self.commit()
        except BaseException as failure:
            if self._state == "open":
                self.rollback(failure)
            raise

    def __del__(self) -> None:
        if getattr(self, "_state", "") != "open" or not (self._taken or self._puts or self._inboxes):
            return
        warnings.warn(f"{self!r} was neither committed nor rolled back", ResourceWarning, stacklevel=2, source=self)
        if not self._taken:
            return  # nothing of it is in the store
        store, taker, taken, turns = self._store, self._taker, self._taken, self._turns

        def give_back() -> None:
            if taker is None or taker.is_alive:
                _give_back(store, taken, turns, Failure("the transaction was dropped"))

        store.keeper.drop(give_back)

    def __repr__(self) -> str:
        return f"<Transaction {self.id} {self._state}: {len(self._taken)} taken, {len(self._puts)} put>"


def _taken(queue: Queue, planned: list[Take], versions: Mapping[str, int]) -> list[Taken]:
    return [
        Taken(queue, each.target, versions[each.target], each.record) for each in planned if each.target in versions
    ]


def _give_back(store: QueueStore, taken: list[Taken], turns: Mapping[str, tuple[Queue, int]], reason: Failure) -> None:
    """Each queue's items together, and its turn with the last of them. May be done again after a lost reply."""
    now = store.wall_time()
    queues = {each.queue.id: each.queue for each in taken} | {queue.id: queue for queue, _ in turns.values()}
    for queue in queues.values():
        held = [(each.key, each.version, each.record) for each in taken if each.queue.id == queue.id]
        version = turns[queue.id][1] if queue.id in turns else None
        returned, last = moves.give_back_all(queue, held, reason, version, random.random, now)
        try:
            store.move_all(returned, last=last)
        except Conflict:
            continue  # it is not this transaction's turn any more: the sweeper has given the items back


def _name_of(queue: str | Named) -> str:
    name = queue if isinstance(queue, str) else getattr(queue, "name", None)
    if not isinstance(name, str):
        raise InvalidItem(f"{queue!r} is no queue: give its name, or its handle")
    return name
