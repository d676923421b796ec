"""One try to take items for a transaction, without waiting: choose items at the head of the queue, and take them. If
nothing was taken, it says when to try again."""

from __future__ import annotations

from typing import Final, NamedTuple

from pxrs.errors import LeaseExpired, OutcomeUnknown, RegistryUnavailable
from pxrs.failures import Failure
from pxrs.metrics.instruments import QUEUE_TAKEN
from pxrs.queue import moves
from pxrs.queue.head import Head
from pxrs.queue.items import Taken
from pxrs.queue.protocol import TransactionProtocol, TurnRead, return_pending
from pxrs.queue.records import Queue
from pxrs.queue.store import QueueStore
from pxrs.queue.taker import Taker
from pxrs.registry.contract import Entry
from pxrs.registry.steps import Write, drive, perform

_RETRY_S: Final = 0.02
_CLOCKS_APART_S: Final = 60.0
"""How far the clocks of two machines may differ. A backoff that lies further ahead than it can be long, and this much
more, was written before a clock was set back: nobody waits for it."""
_RECHECK_S: Final = 1.0
"""How often a wait for a time of day is checked, because the clock may be set meanwhile."""


_REPLY_LOST: Final = Failure("the reply to the take was lost")


class Retry(NamedTuple):
    """When a take that found nothing tries again although no key changes: at the earlier one of two moments."""

    at: float | None
    """On the registry's clock."""
    within_s: float
    """Seconds of the machine's time."""


class Taking:
    """Takes items for one transaction. The transaction's lock is held during each call."""

    __slots__ = ("_protocol", "_registry", "_store")

    def __init__(self, store: QueueStore, protocol: TransactionProtocol) -> None:
        self._store, self._protocol = store, protocol
        self._registry = store.registry

    def attempt(self, queue: Queue, head: Head, taker: Taker, count: int) -> tuple[list[Taken], Retry | None]:
        """What could be taken; and if that is nothing, when to try again although no key changes.

        Raises LeaseExpired if the taker's lease has ended and the transaction has taken items with it; otherwise that
        lease is marked as ended, and nothing is returned."""
        turn = self._begin_fifo_take(queue) if queue.is_fifo else None
        if turn is not None:
            if turn.turn.holder:
                return [], None  # the end of the holder's transaction changes the key of the turn, which is watched
            now = self._registry.clock.now()  # before the time of day: a clock that moves between the two ends the wait
            wait_s = turn.turn.not_before - self._store.wall_time()
            if 0 < wait_s <= moves.longest_s(queue) + _CLOCKS_APART_S:
                return [], Retry(now + wait_s, _RECHECK_S)
        while entries := head.choose(count):
            taken: list[Taken] = []
            are_left = True
            try:
                taken = self._take(queue, head, entries, taker, turn)
                are_left = bool(taken) and len(taken) < len(entries)
            finally:
                head.tried(entries, was_refused=not taken, are_left=are_left)
            if taken:
                QUEUE_TAKEN.of(queue.name).add(len(taken))
                return taken, None
            if queue.is_fifo or not taker.is_alive:
                # Another transaction has the turn; or the lease or the reply was lost, or the item was written again by
                # `resolve_take`. The last three change no key that is watched.
                return [], Retry(None, _RETRY_S)
        return [], None

    def _begin_fifo_take(self, queue: Queue) -> TurnRead | None:
        return drive(self._protocol.begin_fifo_take(queue, self._store.reason(_REPLY_LOST)), self._registry)

    def _take(self, queue: Queue, head: Head, entries: list[Entry], taker: Taker, turn: TurnRead | None) -> list[Taken]:
        protocol = self._protocol
        planned, damaged = protocol.plan(queue, entries, taker.id)
        for entry in damaged:
            head.hide(entry)
        combiner, lease = self._store.combiner, taker.lease

        def commit(write: Write) -> dict[str, int]:
            if write.is_leased:
                return combiner.commit(write, lease)
            return perform(write, self._registry)  # type: ignore[no-any-return]

        try:
            steps = protocol.take(queue, taker.id, planned, turn)
            return drive(steps, self._registry, lease, commit=commit)
        except LeaseExpired:
            if protocol.taken:
                raise
            lease.expire()  # the store may have said so before the deadline
            return []
        except OutcomeUnknown as error:
            raise RegistryUnavailable(
                f"{self._registry.url}: the reply to a take was lost; the items that it took will be returned"
            ) from error
        finally:
            self._return_pending()

    def _return_pending(self) -> None:
        """If a take was sent, and an error or an interrupt has kept its outcome from being known, have the keeper find
        it out, and return what was taken."""
        pending = self._protocol.put_aside()
        if pending is None:
            return
        store = self._store

        def give_back() -> None:
            drive(return_pending(pending, store.reason(_REPLY_LOST), store.registry.limits), store.registry)

        store.keeper.finish(give_back)
