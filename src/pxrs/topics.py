"""`TopicHandle`, by which one looks at a topic of an open hub, and reads it without a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final

import pyarrow as pa

from pxrs import arguments
from pxrs.errors import InvalidRecord, OffsetTrimmed
from pxrs.hub_parts import HubParts
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Bounds, TopicLog
from pxrs.log.messages import messages_of
from pxrs.model import Message, Topic
from pxrs.upkeep import retention
from pxrs.wording import counted

TABLE_SCHEMA: Final = pa.schema(
    [pa.field("partition", pa.int32(), nullable=False), pa.field("offset", pa.int64(), nullable=False), *SCHEMA]
)


class TopicHandle:
    """A handle of a topic: its settings, its offsets and its messages. Reading here moves no checkpoint."""

    def __init__(self, log: TopicLog, parts: HubParts, hub: object) -> None:
        self.hub = hub
        """The hub that made this handle. The handle refers to it because a hub that nothing refers to closes itself."""
        self._parts = parts
        self.log = log
        """The topic itself, to append batches of one's own, or to read it as a member of a group."""
        self.name, self.id, self.partitions = log.name, log.id, log.partitions
        self.has_gaps = log.has_gaps

    @property
    def topic(self) -> Topic:
        """The settings, as this process knows them: those of the last append, or of the moment it was opened."""
        return self.log.topic

    @property
    def keeps_unread(self) -> bool:
        return self.log.keeps_unread

    def start(self, partition: int) -> int:
        """The first offset that retention has not removed."""
        return self.log.start(self._partition(partition))

    def end(self, partition: int) -> int:
        """The offset that the next message will get."""
        return self.log.end(self._partition(partition))

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        """The start and the end of each of these partitions, all in one call."""
        return self.log.bounds([self._partition(number) for number in partitions])

    def offset_at(self, partition: int, timestamp: int) -> int:
        """The first offset whose message has that time or a later one, in microseconds since 1970; the end if there is
        none."""
        timestamp = arguments.whole(InvalidRecord, "timestamp", timestamp, -(1 << 63), (1 << 63) - 1)
        return self.log.offset_at(self._partition(partition), timestamp)

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        """Batches from exactly this offset on, about `max_bytes` of them; none at the end."""
        partition, offset = self._partition(partition), self._offset("offset", offset)
        return self.log.read(partition, offset, arguments.whole(InvalidRecord, "max_bytes", max_bytes, 1))

    def batches(self, partition: int, start: int = 0, end: int | None = None) -> Iterator[Batch]:
        """Batches from exactly this offset on and before `end`, one after another. Without `end`, or if the partition
        has less: up to the end of the partition, as it is when the iterator comes to it. A topic on a server is read
        ahead of the caller."""
        partition, start = self._partition(partition), self._offset("start", start)
        return self.log.batches(partition, start, None if end is None else self._offset("end", end))

    def retain(self) -> dict[int, int]:
        """Remove now what the topic's retention allows. Returns the new starts of the partitions that have changed.

        The hub's janitor does this automatically: see `pxrs.upkeep`. For a topic with `keep_unread`: raises
        WrongRegistry if this process has another registry than the hub, RetentionPostponed if it is not known which one
        the hub has."""
        moved = retention.retain(self._parts, self.log)
        if moved:
            self._parts.events.audit("retain", topic=self.name, starts=moved)
        return moved

    def retention_problem(self) -> str | None:
        """Why `retain` removes nothing in this process; None if nothing prevents it."""
        return retention.problem_of(self._parts, self.log)

    def wait(self, positions: Mapping[int, int], timeout: float | timedelta | None = None) -> set[int]:
        """Wait until any of these partitions has messages from its offset on. Returns those that have; none after the
        timeout."""
        if not isinstance(positions, Mapping):
            raise InvalidRecord(
                f"positions must be offsets by partition, such as {{0: 120}}, not {arguments.shown(positions)}"
            )
        places = {self._partition(number): self._offset("offset", offset) for number, offset in positions.items()}
        limit = None if timeout is None else arguments.seconds(InvalidRecord, "timeout", timeout)
        return wait_for_messages(self.log, places, limit)

    def messages(self, partition: int, offset: int = 0) -> Iterator[Message]:
        """The messages from this offset on, up to the end as it is when it is reached."""
        return self._messages(self._partition(partition), self._offset("offset", offset))

    def _messages(self, partition: int, offset: int) -> Iterator[Message]:
        for batch in self.log.batches(partition, offset):
            yield from messages_of(batch, self.name, partition)

    def to_arrow(self, partition: int | None = None, start: int | None = None, end: int | None = None) -> pa.Table:
        """The messages as a table: partition, offset, key, value, timestamp, headers.

        start, end: offsets, in each partition; by default all messages that exist when this is called.
        """
        numbers = range(self.partitions) if partition is None else (self._partition(partition),)
        start = None if start is None else self._offset("start", start)
        end = None if end is None else self._offset("end", end)
        parts = [part for number in numbers for part in self._records(number, start, end)]
        return pa.Table.from_batches(parts, TABLE_SCHEMA)

    def _records(self, partition: int, start: int | None, end: int | None) -> Iterator[pa.RecordBatch]:
        last = self.log.end(partition)
        end = last if end is None else min(end, last)
        offset = self.log.start(partition) if start is None else start
        while offset < end:
            try:
                for batch in self.log.batches(partition, offset, end):
                    if batch.records.num_rows:
                        yield _with_place(batch.records, partition, batch.base_offset)
                    offset = batch.next_offset
                return
            except OffsetTrimmed as error:
                if start is not None:
                    raise
                offset = error.first_offset  # retention has removed the messages

    def _partition(self, given: int) -> int:
        return arguments.partition(InvalidRecord, self.name, given, self.partitions)

    def _offset(self, name: str, given: int) -> int:
        return arguments.whole(InvalidRecord, name, given, 0)

    def __repr__(self) -> str:
        return f"<TopicHandle {self.name} with {counted(self.partitions, 'partition')}>"


def _with_place(records: pa.RecordBatch, partition: int, offset: int) -> pa.RecordBatch:
    rows = records.num_rows
    partitions = pa.repeat(pa.scalar(partition, pa.int32()), rows)
    offsets = pa.array(range(offset, offset + rows), pa.int64())
    return pa.RecordBatch.from_arrays([partitions, offsets, *records.columns], schema=TABLE_SCHEMA)
