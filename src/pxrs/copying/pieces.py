"""Cuts a source into pieces, and splits a piece by the partitions of the target. Nothing here writes."""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa
import xxhash

from pxrs.errors import OffsetOutOfRange, OffsetTrimmed
from pxrs.hashing import hash_named, partitions_of
from pxrs.log.contract import TopicLog
from pxrs.producer.tables import cut, sort_by_partition

PIECE_BYTES: Final = 8 << 20
"""About how many bytes a piece has at most; a larger message is a piece by itself. So the rows of one target partition
always fit one frame."""
PIECE_ROWS: Final = 100_000


class Cut(NamedTuple):
    """The next rows of a source partition."""

    end: int
    """The offset behind the last of them."""
    rows: list[pa.RecordBatch]
    offsets: list[int]
    """The offset of the first row of each batch. Between two batches may be a gap, which has no messages."""


def next_cut(source: TopicLog, partition: int, start: int, until: int) -> Cut:
    """The rows from `start` on and before `until`, as many as one piece holds; at least one, unless there is a gap.

    Raises OffsetTrimmed if retention has removed the first of them."""
    found, size, count, end = Cut(start, [], []), 0, 0, start
    for batch in source.read(partition, start, PIECE_BYTES):
        batch = batch.within(end, until)
        for part in cut(batch.records, PIECE_ROWS, PIECE_BYTES) if batch.records.num_rows else ():
            if found.rows and (size + part.nbytes > PIECE_BYTES or count + part.num_rows > PIECE_ROWS):
                return found._replace(end=end)
            found.rows.append(part)
            found.offsets.append(end)
            size, count, end = size + part.nbytes, count + part.num_rows, end + part.num_rows
        end = min(batch.next_offset, until)
        if end >= until:
            break
    return found._replace(end=end)


def rows_between(source: TopicLog, partition: int, start: int, end: int) -> Cut:
    """All rows of a piece that was recorded. Raises OffsetTrimmed if retention has removed some of them, and
    OffsetOutOfRange if the source is an older copy of itself."""
    found = Cut(end, [], [])
    for batch in source.batches(partition, start, end):
        if batch.records.num_rows:
            found.rows.append(batch.records)
            found.offsets.append(batch.base_offset)
        start = batch.next_offset
    if start < end:
        raise OffsetOutOfRange(f"{source.name}/{partition}", end, start)
    return found


def mark_of(records: pa.RecordBatch) -> str:
    """A checksum of the last of these messages: its time, key and value."""
    last = records.slice(records.num_rows - 1)
    digest = xxhash.xxh3_64(b"%d" % last.column("timestamp")[0].value)
    for name in ("key", "value"):
        data = last.column(name)[0].as_buffer()
        digest.update(b" null" if data is None else b" %d:" % data.size)
        digest.update(data or b"")
    return digest.hexdigest()


def mark_before(source: TopicLog, partition: int, offset: int) -> str:
    """The mark of the message before this offset; empty if there is none any more, or never was.

    Raises OffsetOutOfRange if the partition ends before this offset."""
    if offset == 0:
        return ""
    try:
        found = source.read(partition, offset - 1, 1)
    except OffsetTrimmed:
        return ""
    if not found:
        raise OffsetOutOfRange(f"{source.name}/{partition}", offset, offset - 1)
    records = found[0].within(offset - 1, offset).records
    return mark_of(records) if records.num_rows else ""


def split(source: TopicLog, target: TopicLog, partition: int, found: Cut) -> list[tuple[int, pa.RecordBatch]]:
    """The rows for each partition of the target, in their order.

    If both topics spread keys over the same number of partitions by the same partitioner, each message stays in the
    partition of the same number. Otherwise its key decides; a message without a key goes to the partition that its
    offset gives."""
    if not found.rows:
        return []
    records = pa.concat_batches(found.rows)
    ours, theirs = source.topic, target.topic
    if (ours.partitions, ours.partitioner) == (theirs.partitions, theirs.partitioner):
        return [(partition, records)]
    chosen = partitions_of(records.column("key"), hash_named(theirs.partitioner), theirs.partitions)
    if chosen.null_count:
        import pyarrow.compute as pc

        spread = [
            (offset + partition) % theirs.partitions
            for first, rows in zip(found.offsets, found.rows, strict=True)
            for offset in range(first, first + rows.num_rows)
        ]
        chosen = pc.coalesce(chosen, pa.array(spread, pa.int32()))
    return sort_by_partition(records, chosen)[1]
