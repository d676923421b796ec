"""The rows of a table by partition: each range of ids is read once and split, for all partitions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from pxrs.hashing import hash_named
from pxrs.log.batch import SCHEMA
from pxrs.sources.sql_table.pages import Page, Pages, Stretch
from pxrs.sources.sql_table.table import Row, Rows, Table

SKIP_S: Final = 1.0
"""A partition counts as readable if its position could pass any ids of other partitions for this long, although it has
no message. So the checkpoint of a partition without messages follows the others, and a group that has handled
everything has no lag."""
PASSABLE_MAX: Final = 1024
"""How many positions are remembered to measure `SKIP_S`. Beyond it, the oldest is forgotten, and measured again."""
_PAGE_OVERHEAD: Final = 1024


class PartitionedRows:
    """Pages of the table in a cache of bounded size. The caller holds the lock of the `SqlTable`."""

    def __init__(self, table: Table, partitions: int, partitioner: str, page_bytes: int, cache_bytes: int) -> None:
        self._table, self._partitions, self._page_bytes = table, partitions, page_bytes
        self._hash = hash_named(partitioner)
        self._pages = Pages(cache_bytes)
        self._empty: dict[int, tuple[int, int]] = {}
        """By partition: a range of ids in which the partition has no rows."""

    @property
    def cached_bytes(self) -> int:
        return self._pages.size

    def in_memory(self, partition: int, offset: int) -> Page | None:
        """The page with this offset, if it is in the cache; an empty page if the partition is known to have no rows
        there."""
        start, end = self._empty.get(partition, (0, 0))
        return Page(offset, end, {}, 0) if start <= offset < end else self._pages.at(offset)

    def load(self, offset: int, end: int) -> Page:
        """Read the page that begins at this offset, for all partitions, up to `end` at most."""
        until = self._pages.next_start(offset, end)
        page = self._split(offset, until, self._table.rows(offset, until, self._page_bytes))
        self._pages.add(page)
        return page

    def note_empty(self, partition: int, start: int, end: int) -> None:
        """Remember that a partition has no rows in this range, so that it is not read again after its page has left the
        cache."""
        known = self._empty.get(partition)
        if known is not None and known[0] <= start <= known[1]:
            start, end = known[0], max(end, known[1])
        self._empty[partition] = start, end

    def stretch(self, rows: Sequence[Row]) -> Stretch:
        """Rows of all partitions, as Arrow arrays."""
        partitions = pa.array([self._partition_of(row) for row in rows], pa.int32())
        return Stretch(partitions, *_as_arrow(rows))

    def _split(self, start: int, until: int, rows: Rows) -> Page:
        lists: dict[int, list[Row]] = {}
        for row in rows.rows:
            lists.setdefault(self._partition_of(row), []).append(row)
        parts = {partition: _as_arrow(chosen) for partition, chosen in lists.items()}
        size = sum(ids.nbytes + records.nbytes + _PAGE_OVERHEAD for ids, records in parts.values()) + _PAGE_OVERHEAD
        return Page(start, rows.last + 1 if rows.is_cut else until, parts, size)

    def _partition_of(self, row: Row) -> int:
        """By the hash of the key, or of the id if the row has no key."""
        hashed = str(row[0]).encode() if row[1] is None else row[1]
        return self._hash(hashed) % self._partitions


class PassablePositions:
    """Since when positions could pass ids of other partitions, on the monotonic clock. Readers of one partition may be
    at different offsets. The caller holds the lock of the `SqlTable`."""

    def __init__(self, partitions: int) -> None:
        self._size_max = max(PASSABLE_MAX, partitions)
        self._since: dict[tuple[int, int], float] = {}
        """By (partition, offset), the oldest first. At most `_size_max`."""

    def has_been(self, partition: int, offset: int, end: int) -> bool:
        """Whether the position could have passed ids of other partitions for `SKIP_S`, up to the settled end `end`."""
        if offset >= end:
            self._since.pop((partition, offset), None)
            return False
        now = time.monotonic()
        since = self._since.get((partition, offset))
        if since is not None:
            return now - since >= SKIP_S
        while len(self._since) >= self._size_max:
            del self._since[next(iter(self._since))]
        self._since[partition, offset] = now
        return False

    def due_s(self, positions: Iterable[tuple[int, int]]) -> float | None:
        """The time until one of these positions has been passable for `SKIP_S`; None if none of them is passable."""
        dues = [self._since[each] + SKIP_S for each in positions if each in self._since]
        return max(0.01, min(dues) - time.monotonic()) if dues else None


def _as_arrow(rows: Sequence[Row]) -> tuple[pa.Int64Array, pa.RecordBatch]:
    """Rows as Arrow arrays: ids and records."""
    ids, keys, values, times = zip(*rows, strict=True)
    columns = [
        pa.array(keys, SCHEMA.field("key").type),
        pa.array(values, SCHEMA.field("value").type),
        pa.array(times, pa.int64()).cast(SCHEMA.field("timestamp").type),
        pa.nulls(len(ids), SCHEMA.field("headers").type),
    ]
    return pa.array(ids, pa.int64()), pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
