"""Receipts: how a sender learns where its message was stored, or why it was not.

A receipt does not keep the message. It names a row of a chunk; the chunk's `ChunkPlaces` says, once the chunk was
sorted by partition and cut into batches, which row of which batch that is; and the `SentBatch` has the offset or the
error once the log has answered.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pxrs import arguments
from pxrs.errors import InvalidArgument
from pxrs.producer.condition import Condition

WIDTH: Final = 3
"""How many elements of a chunk's list are one row: key, value, time."""


class SentBatch:
    """Messages of one partition that are stored together by one batch of an append."""

    __slots__ = ("done", "error", "expires_at", "offset", "partition", "records", "round", "serial", "size")

    def __init__(
        self,
        partition: int,
        done: Condition,
        records: pa.RecordBatch | None,
        size: int,
        expires_at: float = math.inf,
        serial: int = 0,
    ) -> None:
        """
        done:       notified when `offset` or `error` is set.
        size:       bytes that the batch counts for in the buffer.
        expires_at: when it fails if it is not stored by then, on the monotonic clock.
        serial:     that of the last message in it, see `Outbox.serial`.
        """
        self.partition, self.done = partition, done
        self.records, self.size = records, size
        self.expires_at, self.serial = expires_at, serial
        self.round = 0
        """The serial of the first thing that the background thread has taken together with it."""
        self.offset = -1
        """The offset of the first message; -1 until the batch is stored."""
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.offset >= 0 or self.error is not None


Result = tuple[SentBatch, int | BaseException]
"""A batch, and its offset or why it has none."""


class SortedRows:
    """The rows of some chunks after they were sorted by partition and cut into batches."""

    __slots__ = ("_order", "_positions", "_starts", "batches")

    def __init__(self, order: pa.Array | None, starts: Sequence[int], batches: list[SentBatch]) -> None:
        """
        order:  for each position in the batches, one behind the other, the number of the row that is there; None if
                the rows kept their places.
        starts: the position at which each batch begins.
        """
        self._order, self._starts, self.batches = order, starts, batches
        self._positions: memoryview | None = None
        """The inverse of `_order`. Computed for the first receipt that is asked: most receipts never are."""

    def find(self, row: int) -> tuple[SentBatch, int]:
        """The batch of a row, and the row's number in the batch."""
        if self._order is not None:
            if self._positions is None:
                self._positions = memoryview(pc.array_sort_indices(self._order).buffers()[1]).cast("Q")
            row = self._positions[row]
        at = bisect_right(self._starts, row) - 1
        return self.batches[at], row - self._starts[at]


class ChunkPlaces:
    """Where the rows of one chunk are, once the chunk was sorted. Its receipts keep it, and not the chunk's rows."""

    __slots__ = ("done", "first", "sorted")

    def __init__(self, done: Condition) -> None:
        self.done = done
        self.first = 0
        """The number, in `sorted`, of the chunk's first row."""
        self.sorted: SortedRows | None = None
        """None until the chunk was sorted."""

    @property
    def batches(self) -> list[SentBatch]:
        return [] if self.sorted is None else self.sorted.batches

    def find(self, row: int) -> tuple[SentBatch, int] | None:
        """The batch of a row, and the row's number in the batch; None until the batch is done."""
        if self.sorted is None:
            return None
        batch, row = self.sorted.find(self.first + row)
        return (batch, row) if batch.is_done else None

    def fail(self, error: BaseException) -> None:
        """Set this error for all rows, unless the chunk was sorted."""
        if self.sorted is None:
            failed = SentBatch(-1, self.done, None, 0)
            failed.error = error
            self.sorted = SortedRows(None, [0], [failed])


class Receipt(ABC):
    """Returned by `send`. `result()` returns where the message was stored."""

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | timedelta | None = None) -> tuple[int, int]:
        """(partition, offset), when the message is durable. Raises the error if it could not be stored, TimeoutError
        if it takes longer."""

    @property
    @abstractmethod
    def is_done(self) -> bool: ...

    def __repr__(self) -> str:
        return f"<Receipt{' done' if self.is_done else ''}>"


class RowReceipt(Receipt):
    """The receipt of one row of a chunk."""

    # Set by `send`; there is no __init__, because a call of one would cost more than all else that `send` does with it.
    __slots__ = ("index", "places")
    places: ChunkPlaces
    index: int
    """The index of the row's first element in the chunk's list."""

    def result(self, timeout: float | timedelta | None = None) -> tuple[int, int]:
        places, row = self.places, self.index // WIDTH
        if not places.done.wait_for(lambda: places.find(row) is not None, _timeout_s(timeout)):
            raise TimeoutError(f"not stored within {timeout} s; it may still be stored")
        found = places.find(row)
        assert found is not None
        batch, row = found
        if batch.error is not None:
            raise copy_of(batch.error)
        return batch.partition, batch.offset + row

    @property
    def is_done(self) -> bool:
        return self.places.find(self.index // WIDTH) is not None


class Stored(NamedTuple):
    """Messages of a partition with consecutive offsets."""

    partition: int
    offset: int
    rows: int


class TableReceipt:
    """Returned by `send_batch`. `result()` returns where the rows were stored."""

    __slots__ = ("_batches",)

    def __init__(self, batches: Sequence[tuple[SentBatch, int]]) -> None:
        """batches: each with its number of rows."""
        self._batches = batches

    def result(self, timeout: float | timedelta | None = None) -> list[Stored]:
        """Where the rows are, when all are durable; within a partition in the table's order. Raises the first error if
        some could not be stored, TimeoutError if it takes longer."""
        timeout_s = _timeout_s(timeout)
        if self._batches and not self._batches[0][0].done.wait_for(lambda: self.is_done, timeout_s):
            raise TimeoutError(f"not all stored within {timeout} s; they may still be stored")
        for batch, _ in self._batches:
            if batch.error is not None:
                raise copy_of(batch.error)
        return [Stored(batch.partition, batch.offset, count) for batch, count in self._batches]

    @property
    def is_done(self) -> bool:
        return all(batch.is_done for batch, _ in self._batches)


def copy_of(error: BaseException) -> BaseException:
    """A copy of an error that is raised several times. Each time an error is raised, Python adds to its traceback,
    which keeps the frames and all that they refer to."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:  # noqa: BLE001 - an error of another library that cannot be copied
        return error.with_traceback(None)


def _timeout_s(given: float | timedelta | None) -> float | None:
    return None if given is None else arguments.seconds(InvalidArgument, "timeout", given)
