"""What is put and taken, as values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from pxrs.errors import InvalidItem, InvalidQueue
from pxrs.queue.policy import seconds
from pxrs.queue.records import Queue, Record, new_record

BYTES_PER_KEY: Final = 160
"""An upper bound of the length of a queue's keys, for the sizes of commits."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a queue, as a value."""

    queue: str
    id: str
    value: bytes
    key: bytes | None
    """As it was put. The queue makes no use of it."""
    priority: int
    deliveries: int
    """How often it was delivered, this time included."""
    put_at: float
    """Seconds since 1970, on the clock of the one who put it."""
    error: str = ""
    """What the last delivery failed with, if one did."""
    died_at: float | None = None
    """Of a dead letter: when it became one."""
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
    """An item that a transaction has taken: its key in flight, and the version in which the take wrote that key."""

    queue: Queue
    key: str
    version: int
    record: Record


class Put(NamedTuple):
    """An item that is to be put."""

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
    """The same item for another queue, such as one that was created again under the name. Raises InvalidItem if that
    queue cannot keep the item's priority or delay."""
    if queue.is_fifo and (put.record.priority or put.delay_s):
        raise InvalidItem(f"queue {queue.name} is a FIFO queue: its items cannot have a priority or a delay")
    return put._replace(queue=queue)
