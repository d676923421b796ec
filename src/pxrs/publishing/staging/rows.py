"""Cuts the rows of a task into pieces, each of which is appended to one partition of a topic as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from pxrs.errors import InvalidRecord
from pxrs.log.batch import encode
from pxrs.model import Topic
from pxrs.publishing.staging.frames import Piece

PIECE_ROWS_MAX: Final = 10_000
PIECE_BYTES_MAX: Final = 8 << 20


class _Waiting:
    """The rows of one partition that are not a whole piece yet."""

    __slots__ = ("parts", "rows", "size")

    def __init__(self) -> None:
        self.parts: list[pa.RecordBatch] = []
        self.rows = self.size = 0

    def add(self, records: pa.RecordBatch, size: int) -> None:
        self.parts.append(records)
        self.rows += records.num_rows
        self.size += size

    @property
    def is_full(self) -> bool:
        return self.rows >= PIECE_ROWS_MAX // 2 or self.size >= PIECE_BYTES_MAX // 2

    def joined(self) -> pa.RecordBatch:
        return self.parts[0] if len(self.parts) == 1 else pa.concat_batches(self.parts)

    def copy(self) -> None:
        """Copy the rows, so that the tables of which they are slices can be freed."""
        # The empty part makes `concat_batches` copy also if there is only one other part.
        self.parts = [pa.concat_batches([*self.parts, self.parts[0].slice(0, 0)])]


class Cutter:
    """Cuts the rows of one task for one topic, and encodes the pieces for the topic's log. The rows of each partition
    stay in their order."""

    def __init__(self, topic: Topic, turn: int) -> None:
        """turn: selects the partition at which rows without a key begin. It differs between the tasks of a batch and
        between the batches of a task, so that rows without keys are spread over all partitions."""
        # Imported here because only tasks that write need these modules. A task that reads does not wait for them.
        from pxrs.hashing import hash_named
        from pxrs.producer.keyless import KeylessSpread

        self.topic = topic
        self.size = 0
        """The bytes of the rows that wait for their piece to become whole."""
        self.held = 0
        """The bytes that these rows keep in memory at most. They are slices of tables whose other rows may be staged
        already."""
        self._hash_of = hash_named(topic.partitioner)
        self._keyless = KeylessSpread(topic.partitions, turn % topic.partitions)
        self._waiting: dict[int, _Waiting] = {}

    def add(self, table: pa.RecordBatch) -> Iterator[Piece]:
        """The pieces that are whole with these rows. Raises InvalidRecord for rows that the topic's log would refuse,
        because a manifest that names such rows could never be finished."""
        from pxrs.producer.tables import MESSAGE_BYTES_MAX, read_table, slices, split_table

        self.held += table.nbytes
        _check_partitions(table, self.topic)
        rows = read_table(table, self.topic.partitions, MESSAGE_BYTES_MAX)
        for part in slices(rows, PIECE_ROWS_MAX, PIECE_BYTES_MAX):
            for partition, records in split_table(part, self._hash_of, self.topic.partitions, self._keyless.fill):
                size = records.nbytes
                waiting = self._waiting.setdefault(partition, _Waiting())
                if waiting.rows and waiting.size + size > PIECE_BYTES_MAX:
                    yield self._piece(partition)
                    waiting = self._waiting.setdefault(partition, _Waiting())
                waiting.add(records, size)
                self.size += size
                if waiting.is_full:
                    yield self._piece(partition)

    def largest(self) -> Piece:
        """The partition with the most bytes that wait, as a piece. Call it only if `size` is not 0."""
        return self._piece(max(self._waiting, key=lambda partition: self._waiting[partition].size))

    def copy_waiting(self) -> None:
        """Copy the rows that wait, so that they keep no more than `size` bytes in memory."""
        for waiting in self._waiting.values():
            waiting.copy()
        self.held = self.size

    def rest(self) -> Iterator[Piece]:
        """All rows that wait, partition by partition."""
        for partition in sorted(self._waiting):
            yield self._piece(partition)

    def _piece(self, partition: int) -> Piece:
        waiting = self._waiting.pop(partition)
        self.size -= waiting.size
        return Piece(partition, encode(waiting.joined(), self.topic.codec))


def _check_partitions(table: pa.RecordBatch, topic: Topic) -> None:
    """Raise InvalidRecord if a row names a partition that the topic does not have."""
    if "partition" not in table.schema.names:
        return
    import pyarrow.compute as pc

    column = table.column("partition")
    if not pa.types.is_integer(column.type):
        return  # `read_table` raises, or all values are null
    least, most = (bound.as_py() for bound in pc.min_max(column).values())
    if least is not None and not 0 <= least <= most < topic.partitions:
        raise InvalidRecord(
            f"a row names partition {most if least >= 0 else least}, but the topic {topic.name} has partitions 0 to "
            f"{topic.partitions - 1}. The column partition says which partition of this topic a row goes to. Omit it, "
            "for example with df.drop('partition'), to let pxrs choose the partition by the key"
        )
