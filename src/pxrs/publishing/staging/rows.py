"""Cuts the rows of a task into pieces, each of which is appended to one partition as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from pxrs.log.batch import encode
from pxrs.model import Topic

CHUNK_ROWS_MAX: Final = 10_000
CHUNK_BYTES_MAX: Final = 8 << 20
BUFFER_BYTES_MAX: Final = 64 << 20
"""How many bytes of incomplete pieces, of all partitions together, a task keeps in memory."""


def pieces_of(topic: Topic, turn: int, tables: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(partition, records): the rows of each partition in their order. Raises InvalidRecord for rows that the topic's
    log would refuse, because a manifest that names such rows could never be finished.

    turn: selects the partition at which rows without a key begin. It differs between the tasks of a batch and between
          the batches of a task, so that rows without keys are spread over all partitions."""
    for partition, records in _pieces(topic, turn, tables):
        if records.nbytes > 2 * CHUNK_BYTES_MAX:
            encode(records, topic.codec)  # raises if the encoded piece is too large for the log
        yield partition, records


def _pieces(topic: Topic, turn: int, tables: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    # Imported here because only tasks that write need these modules. A task that reads does not wait for them.
    from pxrs.hashing import hash_named
    from pxrs.producer.keyless import KeylessSpread
    from pxrs.producer.tables import MESSAGE_BYTES_MAX, read_table, slices, split_table

    hash_of = hash_named(topic.partitioner)
    keyless = KeylessSpread(topic.partitions, turn % topic.partitions)
    waiting: dict[int, list[pa.RecordBatch]] = {}
    size = 0
    for table in tables:
        rows = read_table(table, topic.partitions, MESSAGE_BYTES_MAX)
        for piece in slices(rows, CHUNK_ROWS_MAX, CHUNK_BYTES_MAX):
            for partition, records in split_table(piece, hash_of, topic.partitions, keyless.fill):
                before = sum(part.nbytes for part in waiting.get(partition, ()))
                if before and before + records.nbytes > CHUNK_BYTES_MAX:
                    size -= before
                    yield partition, _joined(waiting.pop(partition))
                waiting.setdefault(partition, []).append(records)
                size += records.nbytes
                parts = waiting[partition]
                is_full = sum(part.num_rows for part in parts) >= CHUNK_ROWS_MAX // 2
                if is_full or sum(part.nbytes for part in parts) >= CHUNK_BYTES_MAX // 2:
                    size -= sum(part.nbytes for part in parts)
                    yield partition, _joined(waiting.pop(partition))
        while size > BUFFER_BYTES_MAX:
            largest = max(waiting, key=lambda partition: sum(part.nbytes for part in waiting[partition]))
            size -= sum(part.nbytes for part in waiting[largest])
            yield largest, _joined(waiting.pop(largest))
    for partition in sorted(waiting):
        yield partition, _joined(waiting[partition])


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
