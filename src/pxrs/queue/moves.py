"""Which key an item gets next, decided without a store: taken, returned, due, dead, retried.

A move deletes an item's key and writes its next one, in one commit that expects the first key in the version that was
read and the second ABSENT. So an item has exactly one key at every moment, whoever else moves it at the same time. The
folder of the next key is what the table of `states` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pxrs.failures import Failure
from pxrs.queue.items import Taken
from pxrs.queue.records import Queue, Record, Turn, key_of
from pxrs.queue.states import ItemEvent, ItemState, folder_after, item_after, state_in
from pxrs.registry.contract import ABSENT, Entry, Limits

DELIVERIES_MANY: Final = 1_000_000
EXTRA_KEYS: Final = 4
"""How many keys a commit of moves may name besides those of the moves: the turn, the taker, an existence key."""


class Move(NamedTuple):
    source: str
    version: int
    target: str | None
    """The item's next key; None if the item is removed from the queue."""
    value: bytes = b""

    @property
    def keys_count(self) -> int:
        return 1 if self.target is None else 2

    @property
    def size(self) -> int:
        return len(self.source) + len(self.target or "") + len(self.value)


@dataclass(slots=True)
class Changes:
    """The arguments of a commit that is being built."""

    expect: dict[str, int]
    put: dict[str, bytes]
    delete: list[str]

    @classmethod
    def of(cls, moves: Iterable[Move]) -> Changes:
        expect: dict[str, int] = {}
        put: dict[str, bytes] = {}
        delete: list[str] = []
        for source, version, target, value in moves:
            expect[source] = version
            delete.append(source)
            if target is not None:
                expect[target] = ABSENT
                put[target] = value
        return cls(expect, put, delete)


class Take(NamedTuple):
    """The move of an item into the hands of a transaction."""

    move: Move
    target: str
    """The item's key once it is in flight."""
    record: Record
    """The item with this delivery counted."""
    before: bytes
    """The value of the ready item's key, as it was read."""


Held = tuple[str, int, Record]
"""The key of an item in flight, its version, and the item."""

# Takes and finishes are made for every item. Their transitions are looked up once, here.
_TAKEN: Final = folder_after(ItemState.READY, ItemEvent.TAKE)
_FINISHED: Final = item_after(ItemState.IN_FLIGHT, ItemEvent.FINISH)
assert _FINISHED is None


def take(queue: Queue, entry: Entry, taker: str, transaction: str) -> Take:
    """The move of a ready item into flight, which also counts the delivery (Q1). Raises RegistryCorrupt."""
    record = Record.load(entry.key, entry.value).taken()
    target = f"{queue.root}{_TAKEN}/{record.name}~{transaction}~{taker}"
    return Take(Move(entry.key, entry.version, target, record.dump()), target, record, entry.value)


def finish(taken: Iterable[Taken]) -> Changes:
    """Items that a transaction has taken leave their queues when it commits. Each is expected in the version that the
    take wrote (Q2)."""
    expect = {each.key: each.version for each in taken}
    return Changes(expect, {}, list(expect))


def purge(entry: Entry) -> Move:
    """A dead letter leaves its queue."""
    target = item_after(state_in(entry.key), ItemEvent.PURGE)
    assert target is None
    return Move(entry.key, entry.version, None)


def give_back(
    queue: Queue, source: str, version: int, record: Record, failure: Failure, now: float, random: Callable[[], float]
) -> tuple[Move, float]:
    """The move of an item that was taken and is not finished: to READY, to DELAYED if the queue has a backoff, or to
    DEAD if the policy allows no other delivery.

    In a FIFO queue the item keeps its place, and its backoff holds up the whole queue. So the second value is the time
    before which nothing of the queue may be taken, 0.0 if there is none."""
    most = queue.policy.deliveries_max
    is_last = most is not None and record.deliveries >= most
    delay_s = 0.0 if is_last or queue.backoff is None else queue.backoff.delay_s(record.deliveries, random)
    if is_last:
        event, when = ItemEvent.GIVE_UP, now
    elif delay_s > 0 and not queue.is_fifo:
        event, when = ItemEvent.BACK_OFF, now + delay_s
    else:
        event, when = ItemEvent.RETURN, 0.0
    state = item_after(state_in(source), event)
    moved = record.failed(failure, is_dead=state is ItemState.DEAD)
    move = Move(source, version, key_of(queue, moved, state, when), moved.dump())
    return move, now + delay_s if event is ItemEvent.RETURN and delay_s > 0 else 0.0


def longest_s(queue: Queue) -> float:
    """The longest backoff of an item of this queue."""
    return 0.0 if queue.backoff is None else queue.backoff.delay_s(DELIVERIES_MANY, lambda: 1.0)


def give_back_all(
    queue: Queue,
    held: Iterable[Held],
    failure: Failure,
    turn_version: int | None,
    random: Callable[[], float],
    now: float,
) -> tuple[list[Move], tuple[dict[str, int], dict[str, bytes]] | None]:
    """The moves of several items of one queue; and, if `turn_version` is the version of the queue's turn, what the
    commit of the last of them has to expect and to put besides, so that the turn is free when all items are back."""
    returned = [give_back(queue, key, version, record, failure, now, random) for key, version, record in held]
    found = [move for move, _ in returned]
    if turn_version is None:
        return found, None
    free = Turn(not_before=max((ready_at for _, ready_at in returned), default=0.0))
    return found, ({queue.turn: turn_version}, {queue.turn: free.dump()})


def make_ready(queue: Queue, entry: Entry) -> Move:
    """A delayed item whose time has come. Raises RegistryCorrupt."""
    record = Record.load(entry.key, entry.value).moved()
    state = item_after(state_in(entry.key), ItemEvent.COME_DUE)
    return Move(entry.key, entry.version, key_of(queue, record, state), record.dump())


def retry(queue: Queue, entry: Entry, record: Record) -> Move:
    """A dead letter that becomes ready, as if it had never been delivered."""
    revived = record.revived()
    state = item_after(state_in(entry.key), ItemEvent.RETRY)
    return Move(entry.key, entry.version, key_of(queue, revived, state), revived.dump())


def in_parts(moves: Sequence[Move], limits: Limits) -> Iterator[list[Move]]:
    """The moves, in lists that fit into one commit each."""
    part: list[Move] = []
    keys_count = size = 0
    for move in moves:
        is_full = keys_count + move.keys_count > limits.commit_keys_max - EXTRA_KEYS
        if part and (is_full or size + move.size > limits.commit_bytes_max - _EXTRA_BYTES):
            yield part
            part, keys_count, size = [], 0, 0
        part.append(move)
        keys_count += move.keys_count
        size += move.size
    if part:
        yield part


_EXTRA_BYTES: Final = 4_096
