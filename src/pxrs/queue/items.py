"""What is put and taken, as values, and what a put writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from pxrs.errors import InvalidItem, InvalidQueue
from pxrs.queue.moves import Changes
from pxrs.queue.policy import seconds
from pxrs.queue.records import Queue, Record, first_key, in_sequence, new_record
from pxrs.queue.store import QueueStore
from pxrs.registry.contract import ABSENT

BYTES_PER_KEY: Final = 160
"""What an item's key takes at most, to be counted on."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a queue, as a value."""

    queue: str
    id: str
    value: bytes
    key: bytes | None
    """Carried along as it was put; the queue does not look at it."""
    priority: int
    deliveries: int
    """How often it was delivered, this time included."""
    put_at: float
    """Seconds since 1970, on the clock of the one who put it."""
    error: str = ""
    """What the last delivery failed with, if one did."""
    died_at: float | None = None
    """Of a dead letter: when it was given up."""
    error_type: str = ""
    """Of a dead letter: the class of what the last delivery raised, if it raised something."""
    traceback: str = ""
    """Of a dead letter: where that was raised, shortened to what the record has room for."""

    @classmethod
    def of(cls, queue: Queue, record: Record, died_at: float | None = None) -> Item:
        return cls(
            queue.name,
            record.id,
            record.value,
            record.key,
            record.priority,
            record.deliveries,
            record.put_at,
            record.error,
            died_at,
            record.error_type,
            record.traceback,
        )


class Taken(NamedTuple):
    queue: Queue
    key: str
    version: int
    record: Record


class Put(NamedTuple):
    queue: Queue
    record: Record
    delay_s: float

    @property
    def size(self) -> int:
        return len(self.record.value) + 2 * len(self.record.key or b"") + 2 * BYTES_PER_KEY


def duration(name: str, value: float | timedelta) -> float:
    """In seconds. Raises InvalidItem."""
    try:
        return seconds(name, value)
    except InvalidQueue as error:
        raise InvalidItem(str(error)) from None


def check_put(
    queue: Queue,
    value: bytes | str,
    priority: int,
    delay: float | timedelta | None,
    key: bytes | str | None,
    now: float,
    value_bytes_max: int,
) -> Put:
    """What is to be put, checked. now: in seconds since 1970. Raises InvalidItem."""
    delay_s = 0.0 if delay is None else duration("delay", delay)
    return placed_in(queue, Put(queue, new_record(value, key, priority, now, value_bytes_max), delay_s))


def placed_in(queue: Queue, put: Put) -> Put:
    """The same for a queue that was made again. Raises InvalidItem if that one does not take it."""
    if queue.is_fifo and (put.record.priority or put.delay_s):
        raise InvalidItem(f"queue {queue.name} is strictly first in, first out: no priority or delay can be kept there")
    return put._replace(queue=queue)


def add_puts(store: QueueStore, puts: list[Put], changes: Changes) -> dict[str, tuple[Queue, int]]:
    """Into a commit: each where it belongs, if the queue is still there, numbered where that is strict (Q3). The strict
    ones' last numbers."""
    numbers: dict[str, tuple[Queue, int]] = {}
    now = store.wall_time()
    for queue, record, delay_s in puts:
        if queue.standing not in changes.expect:
            changes.expect[queue.standing] = store.standing(queue)
        if queue.is_fifo:
            if queue.id in numbers:
                number = numbers[queue.id][1]
            else:
                number, changes.expect[queue.sequence] = store.next_number(queue)
            number += 1
            numbers[queue.id] = queue, number
            changes.put[queue.sequence] = str(number).encode()
            record = in_sequence(record, number)
        key = first_key(queue, record, delay_s, now)
        changes.expect[key], changes.put[key] = ABSENT, record.dump()
    return numbers


def note_numbers(store: QueueStore, numbers: dict[str, tuple[Queue, int]], versions: Mapping[str, int]) -> None:
    for queue, number in numbers.values():
        store.numbered(queue, number, versions[queue.sequence])
