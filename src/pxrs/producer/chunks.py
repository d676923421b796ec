"""Chunks: the rows that senders add one by one, before they become Arrow columns.

A chunk is one flat list, to which a sender adds key, value and time with one call of `list.extend`. CPython neither
switches threads nor raises an interrupt inside that call, so a row is in the list whole or not at all, without a lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pxrs.log.batch import SCHEMA
from pxrs.producer.condition import Condition
from pxrs.producer.fields import Headers
from pxrs.producer.receipts import WIDTH, ChunkPlaces, RowReceipt
from pxrs.producer.tables import no_headers

_MILLION: Final = pa.scalar(1e6)
_TIME: Final = SCHEMA.field("timestamp").type
_HEADERS: Final = SCHEMA.field("headers").type


class RowDetails(NamedTuple):
    """Fills the time slot of a row that also has headers, an explicit time or a partition."""

    now: float
    """When the row was added, in seconds since 1970: the time of the message if `time_us` is None."""
    time_us: int | None = None
    headers: Headers | None = None
    partition: int | None = None


class Chunk:
    """Rows that are being collected.

    | state   | `is_sealed` | `taken` | who may add rows                                                      |
    |---------|-------------|---------|-----------------------------------------------------------------------|
    | open    | False       | -1      | any sender                                                            |
    | sealed  | True        | -1      | senders that read the chunk before; they check `is_watched` afterwards |
    | counted | True        | >= 0    | nobody: rows behind `taken` are ignored, and their senders send again |
    """

    __slots__ = (
        *("counted", "has_details", "is_sealed", "is_watched", "large_bytes", "opened_at", "places", "rows"),
        *("serial", "since", "taken"),
    )

    def __init__(self, done: Condition) -> None:
        self.rows: list[Any] = []
        """Key, value, time in seconds (or RowDetails) of the first row, then of the second, and so on."""
        self.places = ChunkPlaces(done)
        self.opened_at = self.since = time.monotonic()
        """since: nothing in the chunk was added before this moment of the monotonic clock, but for the moment that the
        background thread takes to wake up. Set when the chunk is sealed."""
        self.serial = 0
        """The chunk's number among what the outbox has sealed. Set when the chunk is sealed."""
        self.is_sealed = False
        self.is_watched = False
        """A sender that has added a row must call `Outbox.recheck`: the chunk was sealed meanwhile, or the background
        thread sleeps until the first row is there."""
        self.taken = -1
        """How many elements of `rows` are stored. Decided under the outbox's lock, once the chunk is sealed."""
        self.counted = 0
        """The bytes that its small messages count for in the buffer. Set when the chunk is sealed."""
        self.has_details = False
        """Whether any row has RowDetails."""
        self.large_bytes = 0
        """The bytes of the messages that are not small."""

    def decide_taken(self) -> int:
        """How many elements of `rows` are stored, decided by the first call. The caller holds the outbox's lock, and
        the chunk is sealed."""
        if self.taken < 0:
            self.taken = len(self.rows)
        return self.taken

    def receipt_of(self, index: int, time: object) -> RowReceipt:
        """The receipt of the row with this very object as its time, which begins at `index` or behind it."""
        while self.rows[index + 2] is not time:
            index += WIDTH
        receipt = RowReceipt()
        receipt.places, receipt.index = self.places, index
        return receipt


def columns_of(chunks: Sequence[Chunk], ends: Sequence[int]) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows as the log's columns; and the partition that the sender gave for each row, null if none.

    ends: how many elements of each chunk's `rows` are stored."""
    keys, values = (_column(chunks, ends, at, pa.binary()) for at in range(2))
    given = pa.nulls(len(keys), pa.int32())
    if any(chunk.has_details for chunk in chunks):
        times = [each for chunk, end in zip(chunks, ends, strict=True) for each in chunk.rows[2:end:WIDTH]]
        details = [each if isinstance(each, RowDetails) else RowDetails(each) for each in times]
        times_us = [int(each.now * 1e6) if each.time_us is None else each.time_us for each in details]
        timestamps, headers = pa.array(times_us, _TIME), pa.array([each.headers for each in details], _HEADERS)
        given = pa.array([each.partition for each in details], pa.int32())
    else:
        # A float holds the time to a quarter of a microsecond, and becomes an Arrow number in half the time of an int.
        seconds = _column(chunks, ends, 2, pa.float64())
        timestamps = pc.multiply(seconds, _MILLION).cast(pa.int64(), safe=False).cast(_TIME)
        headers = no_headers(len(keys))
    return pa.RecordBatch.from_arrays([keys, values, timestamps, headers], schema=SCHEMA), given


def _column(chunks: Sequence[Chunk], ends: Sequence[int], at: int, kind: pa.DataType) -> pa.Array:
    # One chunk at a time while the values are Python objects: those of all chunks do not fit the processor's cache.
    parts = [pa.array(chunk.rows[at:end:WIDTH], kind) for chunk, end in zip(chunks, ends, strict=True)]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
