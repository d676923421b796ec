"""Ranges of ids that were read, split by partition, and kept for the other partitions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs.log.batch import SCHEMA, Batch


class Page(NamedTuple):
    """The rows with ids from `start` to `end`, split by partition."""

    start: int
    end: int
    parts: dict[int, tuple[pa.Int64Array, pa.RecordBatch]]
    size: int


class Stretch(NamedTuple):
    """Rows of all partitions in the order of their ids, as three columns: partition, id and record."""

    partitions: pa.Int32Array
    offsets: pa.Int64Array
    records: pa.RecordBatch


class Pages:
    """The pages that were used last, up to a number of bytes. They never overlap."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pages: OrderedDict[int, Page] = OrderedDict()
        self._starts: list[int] = []
        self.size = 0

    def at(self, offset: int) -> Page | None:
        place = bisect_right(self._starts, offset) - 1
        if place < 0:
            return None
        page = self._pages[self._starts[place]]
        if offset >= page.end:
            return None
        self._pages.move_to_end(page.start)
        return page

    def next_start(self, offset: int, end: int) -> int:
        """The start of the first page behind this offset; `end` if there is none before it."""
        place = bisect_right(self._starts, offset)
        return min(end, self._starts[place]) if place < len(self._starts) else end

    def add(self, page: Page) -> None:
        self._pages[page.start] = page
        self._starts.insert(bisect_right(self._starts, page.start), page.start)
        self.size += page.size
        while self.size > self._bytes_max and len(self._pages) > 1:
            start, oldest = self._pages.popitem(last=False)
            del self._starts[bisect_right(self._starts, start) - 1]
            self.size -= oldest.size


def cut(page: Page, partition: int, offset: int, max_bytes: int) -> Batch:
    """The rows of one partition in the page, from this offset on, about `max_bytes` of them."""
    if partition not in page.parts:
        return nothing(offset, page.end)
    ids, records = page.parts[partition]
    first = bisect_left(memoryview(ids.buffers()[1]).cast("q")[: len(ids)], offset)
    ids, records = ids.slice(first), records.slice(first)
    if records.num_rows and records.nbytes > max_bytes:
        count = max(1, records.num_rows * max(max_bytes, 0) // records.nbytes)
        if count < records.num_rows:
            ids, records = ids.slice(0, count), records.slice(0, count)
            return Batch(offset, records, ids, ids[-1].as_py() + 1)
    return Batch(offset, records, ids, page.end)


def append(batches: list[Batch], batch: Batch) -> None:
    """Append a batch to the list. If it or the last one is empty, both become one batch."""
    if batches and not (batch.records.num_rows and batches[-1].records.num_rows):
        last = batches.pop()
        full = batch if batch.records.num_rows else last
        batch = Batch(last.base_offset, full.records, full.offsets, batch.next_offset)
    batches.append(batch)


def nothing(start: int, end: int) -> Batch:
    return Batch(start, _NO_RECORDS, _NO_OFFSETS, end)


_NO_RECORDS: Final = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA)
_NO_OFFSETS: Final = pa.nulls(0, pa.int64())  # `pa.array` would import pandas, if it is installed
