"""Messages on their way, and the promises given for them: what a producer's senders and its thread share.

A chunk collects rows; once sealed it is sorted by partition and cut into batches, alone or with others, and its
receipts find their places through its fate. `Bell` wakes those who wait.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pxrs import arguments
from pxrs.errors import InvalidArgument
from pxrs.log.batch import SCHEMA
from pxrs.producer.hashing import no_headers

Headers = list[tuple[str, bytes | None]]
WIDTH: Final = 3
"""How many elements of a chunk are a row."""
_WAIT_S_MAX: Final = 86_400.0
_MILLION: Final = pa.scalar(1e6)
_TIME: Final = SCHEMA.field("timestamp").type
_HEADERS: Final = SCHEMA.field("headers").type


class Extra(NamedTuple):
    """What stands for the time of a row that has more than that."""

    now: float
    time_us: int | None = None
    headers: Headers | None = None
    partition: int | None = None


class Bell:
    """Wakes those who wait for something to become true. Each step is a single one, so that an interrupt leaves nothing
    half done: one that comes inside a `threading.Condition` can leave its lock taken, or released twice."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait_for(self, is_true: Callable[[], object], timeout: float | None = None) -> bool:
        """False if it has not become true in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while not is_true():
            turn = threading.Lock()
            turn.acquire()
            self._waiters.append(turn)
            try:
                left = _WAIT_S_MAX if until is None else min(until - time.monotonic(), _WAIT_S_MAX)
                # Asked again now that the bell would be heard.
                if not is_true() and (left <= 0 or not turn.acquire(timeout=left)) and left < _WAIT_S_MAX:
                    return bool(is_true())
            finally:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(turn)
        return True

    def ring(self) -> None:
        # Only a waiter takes itself off the list: one that an interrupt keeps from being woken here is woken next time.
        for turn in list(self._waiters):
            with contextlib.suppress(RuntimeError):
                turn.release()


class SentBatch:
    """Messages of one partition on their way, or on their own: one append's worth."""

    __slots__ = ("done", "error", "offset", "partition", "records", "size")

    def __init__(self, partition: int, done: Bell, records: pa.RecordBatch | None, size: int) -> None:
        self.partition, self.done = partition, done
        self.records, self.size = records, size
        self.offset = -1
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.offset >= 0 or self.error is not None


class Sorted:
    """The batches that the rows of some chunks went into, and the way there."""

    __slots__ = ("_order", "_places", "_starts", "batches")

    def __init__(self, order: pa.Array | None, starts: Sequence[int], batches: list[SentBatch]) -> None:
        """
        order:  the rows as they lie in the batches, one behind the other; None if they are where they were.
        starts: where each batch begins in this order.
        """
        self._order, self._starts, self.batches = order, starts, batches
        self._places: memoryview | None = None

    def find(self, row: int) -> tuple[SentBatch, int]:
        """The batch, and the row in it."""
        if self._order is not None:
            # The way back is made when somebody asks for the first time: of most rows nobody does.
            if self._places is None:
                self._places = memoryview(pc.array_sort_indices(self._order).buffers()[1]).cast("Q")
            row = self._places[row]
        at = bisect_right(self._starts, row) - 1
        return self.batches[at], row - self._starts[at]


class Fate:
    """What became of the rows of a chunk: nothing yet, or what they were sorted into."""

    __slots__ = ("done", "first", "sorted")

    def __init__(self, done: Bell) -> None:
        self.done = done
        self.first = 0
        """Which row of `sorted` the chunk's first one is."""
        self.sorted: Sorted | None = None

    @property
    def batches(self) -> list[SentBatch]:
        return [] if self.sorted is None else self.sorted.batches

    def of(self, row: int) -> tuple[SentBatch, int] | None:
        """The batch, if it is done, and the row in it."""
        if self.sorted is None:
            return None
        batch, row = self.sorted.find(self.first + row)
        return (batch, row) if batch.is_done else None

    def fail(self, error: BaseException) -> None:
        if self.sorted is None:
            failed = SentBatch(-1, self.done, None, 0)
            failed.error = error
            self.sorted = Sorted(None, [0], [failed])


class Chunk:
    """Rows that are being collected. Its receipts keep the fate, not the rows."""

    __slots__ = ("counted", "fate", "has_extras", "is_sealed", "is_watched", "large_bytes", "rows", "taken")

    def __init__(self, done: Bell) -> None:
        self.rows: list[Any] = []
        """Key, value, time in seconds or an Extra, and so on."""
        self.fate = Fate(done)
        self.is_sealed = False
        self.is_watched = False
        """Whoever has added a row must look again: it is sealed, or the thread sleeps until there is a row."""
        self.taken = -1
        """How much of `rows` counts, decided under the lock once it is sealed; what came later was sent again."""
        self.counted = 0
        """What was counted in the buffer for its small messages when it was sealed."""
        self.has_extras = False
        self.large_bytes = 0


class Receipt:
    """What `send` returns: the promise of a place in the log."""

    __slots__ = ("_at", "_fate")  # no __init__: calling one would cost more than all else that `send` does with it
    _fate: Fate
    _at: int

    def result(self, timeout: float | timedelta | None = None) -> tuple[int, int]:
        """(partition, offset), when the message is durable. Raises the error if it could not be stored, TimeoutError
        if it takes longer."""
        fate, row = self._fate, self._at // WIDTH
        if not fate.done.wait_for(lambda: fate.of(row) is not None, _timeout_s(timeout)):
            raise TimeoutError(f"not stored within {timeout} s; it may be yet")
        found = fate.of(row)
        assert found is not None
        batch, row = found
        if batch.error is not None:
            raise again(batch.error)
        return batch.partition, batch.offset + row

    @property
    def is_done(self) -> bool:
        return self._fate.of(self._at // WIDTH) is not None

    def __repr__(self) -> str:
        return f"<Receipt{' done' if self.is_done else ''}>"


class Stored(NamedTuple):
    """Messages that lie together."""

    partition: int
    offset: int
    rows: int


class TableReceipt:
    """What `send_batch` returns."""

    __slots__ = ("_batches",)

    def __init__(self, batches: Sequence[tuple[SentBatch, int]]) -> None:
        self._batches = batches  # each with its number of rows

    def result(self, timeout: float | timedelta | None = None) -> list[Stored]:
        """Where the rows are, when all are durable; within a partition in the table's order."""
        timeout_s = _timeout_s(timeout)
        if self._batches and not self._batches[0][0].done.wait_for(lambda: self.is_done, timeout_s):
            raise TimeoutError(f"not all stored within {timeout} s; they may be yet")
        for batch, _ in self._batches:
            if batch.error is not None:
                raise again(batch.error)
        return [Stored(batch.partition, batch.offset, count) for batch, count in self._batches]

    @property
    def is_done(self) -> bool:
        return all(batch.is_done for batch, _ in self._batches)


def _timeout_s(given: float | timedelta | None) -> float | None:
    return None if given is None else arguments.seconds(InvalidArgument, "timeout", given)


def receipt_of(chunk: Chunk, at: int, time: object) -> Receipt:
    """The receipt of the row with this very time, which is at this place or behind it."""
    while chunk.rows[at + 2] is not time:
        at += WIDTH
    receipt = Receipt()
    receipt._fate, receipt._at = chunk.fate, at
    return receipt


def taken_of(chunk: Chunk) -> int:
    """Under the lock, of a chunk that is sealed: how much of it counts, decided by whoever asks first."""
    if chunk.taken < 0:
        chunk.taken = len(chunk.rows)
    return chunk.taken


def columns_of(chunks: Sequence[Chunk], ends: Sequence[int]) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows that count as the log's columns; and the partition that the sender gave for each, null if none."""
    keys, values = (_column(chunks, ends, at, pa.binary()) for at in range(2))
    asked = pa.nulls(len(keys), pa.int32())
    if any(chunk.has_extras for chunk in chunks):
        moments = [each for chunk, end in zip(chunks, ends, strict=True) for each in chunk.rows[2:end:WIDTH]]
        extras = [each if isinstance(each, Extra) else Extra(each) for each in moments]
        times_us = [int(extra.now * 1e6) if extra.time_us is None else extra.time_us for extra in extras]
        times, headers = pa.array(times_us, _TIME), pa.array([extra.headers for extra in extras], _HEADERS)
        asked = pa.array([extra.partition for extra in extras], pa.int32())
    else:
        # A float holds the time to a quarter of a microsecond, and becomes an Arrow number in half the time of an int.
        times = pc.multiply(_column(chunks, ends, 2, pa.float64()), _MILLION).cast(pa.int64(), safe=False).cast(_TIME)
        headers = no_headers(len(keys))
    return pa.RecordBatch.from_arrays([keys, values, times, headers], schema=SCHEMA), asked


def _column(chunks: Sequence[Chunk], ends: Sequence[int], at: int, kind: pa.DataType) -> pa.Array:
    # Chunk by chunk as long as they are Python objects: those of all would not stay in the processor's cache.
    parts = [pa.array(chunk.rows[at:end:WIDTH], kind) for chunk, end in zip(chunks, ends, strict=True)]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def again(error: BaseException) -> BaseException:
    """A copy to raise: the same one raised again and again would gather tracebacks, and all that their frames hold."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:  # noqa: BLE001 - somebody else's error, which cannot be copied
        return error.with_traceback(None)
