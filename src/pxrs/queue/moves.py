"""Where an item goes next, decided without a store: taken, given back, due, dead, tried again.

A move takes an item from one key to another in one commit, which expects the first as it was read and the second
absent. So an item is in one place at every moment, whoever else moves it at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pxrs.failures import Failure
from pxrs.queue.records import Queue, Record, Turn, timed
from pxrs.registry.contract import ABSENT, Entry, Limits

DELIVERIES_MANY: Final = 1_000_000
EXTRA_KEYS: Final = 4
"""How many keys beside those of the moves a commit of moves may name."""


class Move(NamedTuple):
    source: str
    version: int
    target: str | None
    """None: it is removed."""
    value: bytes = b""

    @property
    def keys_count(self) -> int:
        return 1 if self.target is None else 2

    @property
    def size(self) -> int:
        return len(self.source) + len(self.target or "") + len(self.value)


@dataclass(slots=True)
class Changes:
    """A commit that is being put together."""

    expect: dict[str, int]
    put: dict[str, bytes]
    delete: list[str]

    @classmethod
    def of(cls, moves: Iterable[Move]) -> Changes:
        changes = cls({}, {}, [])
        for source, version, target, value in moves:
            changes.expect[source] = version
            changes.delete.append(source)
            if target is not None:
                changes.expect[target] = ABSENT
                changes.put[target] = value
        return changes


class Take(NamedTuple):
    """An item on its way into the hands of a transaction."""

    move: Move
    target: str
    record: Record
    before: bytes
    """Its value as it was."""


def take(queue: Queue, entry: Entry, taker: str, transaction: str) -> Take:
    """The delivery is counted in the same commit (Q1). Raises RegistryCorrupt."""
    record = Record.load(entry.key, entry.value).taken()
    target = f"{queue.inflight}{record.name}~{transaction}~{taker}"
    return Take(Move(entry.key, entry.version, target, record.dump()), target, record, entry.value)


def give_back(
    queue: Queue, source: str, version: int, record: Record, failure: Failure, now: float, random: Callable[[], float]
) -> tuple[Move, float]:
    """From a taker's hands, undone: to the others, to the delayed, or to the dead. And from when on the item may be
    taken: in a strict queue it keeps its place, and the whole queue waits for it."""
    most = queue.policy.deliveries_max
    is_dead = most is not None and record.deliveries >= most
    moved = record.failed(failure, is_dead=is_dead)
    if is_dead:
        return Move(source, version, timed(queue.dead, now, moved), moved.dump()), 0.0
    delay_s = 0.0 if queue.backoff is None else queue.backoff.delay_s(record.deliveries, random)
    if delay_s > 0 and not queue.is_fifo:
        return Move(source, version, timed(queue.delayed, now + delay_s, moved), moved.dump()), 0.0
    return Move(source, version, f"{queue.ready}{moved.name}", moved.dump()), now + delay_s if delay_s > 0 else 0.0


def longest_s(queue: Queue) -> float:
    """How long an item that came back waits at most."""
    return 0.0 if queue.backoff is None else queue.backoff.delay_s(DELIVERIES_MANY, lambda: 1.0)


Held = tuple[str, int, Record]
"""The key of an item in flight, its version, and the item."""


def give_back_all(
    queue: Queue,
    held: Iterable[Held],
    failure: Failure,
    turn_version: int | None,
    random: Callable[[], float],
    now: float,
) -> tuple[list[Move], tuple[dict[str, int], dict[str, bytes]] | None]:
    """Several items of one queue; and with a strict queue's turn, of this version, what the last commit of them expects
    and writes to free it."""
    returned = [give_back(queue, key, version, record, failure, now, random) for key, version, record in held]
    found = [move for move, _ in returned]
    if turn_version is None:
        return found, None
    free = Turn(not_before=max((ready_at for _, ready_at in returned), default=0.0))
    return found, ({queue.turn: turn_version}, {queue.turn: free.dump()})


def make_ready(queue: Queue, entry: Entry) -> Move:
    """A delayed item whose time has come."""
    record = Record.load(entry.key, entry.value).moved()
    return Move(entry.key, entry.version, f"{queue.ready}{record.name}", record.dump())


def in_parts(moves: Sequence[Move], limits: Limits) -> Iterator[list[Move]]:
    """As many together as one commit may hold."""
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
