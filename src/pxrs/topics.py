"""The topics of an open hub: `TopicHandle`, by which one looks at a topic and reads it, and `Topics`, which creates,
alters and deletes them.

A topic exists once `create` has made it; asking for another name raises UnknownTopic. Creating a topic needs the
registry only if the topic has `keep_unread`. Deleting one also removes what the registry holds of it; a failure of that
is logged, because the topic itself is gone, and the janitor tries again (`pxrs.upkeep.deleted_topics`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

import pyarrow as pa

from pxrs import arguments
from pxrs.errors import (
    InvalidRecord,
    InvalidTopic,
    OffsetTrimmed,
    TopicDiffers,
    TopicExists,
    UnknownTopic,
)
from pxrs.hub_parts import HubParts
from pxrs.hub_sources import HubSources
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Bounds, TopicLog, wait_for_messages
from pxrs.log.messages import messages_of
from pxrs.model import Message, Topic
from pxrs.upkeep import deleted_topics, retention
from pxrs.wording import counted

CREATE_ATTEMPTS_MAX: Final = 100
"""How often `Topics.create_or_open` tries to create a topic that others create and delete at the same time."""
TABLE_SCHEMA: Final = pa.schema(
    [pa.field("partition", pa.int32(), nullable=False), pa.field("offset", pa.int64(), nullable=False), *SCHEMA]
)


class TopicHandle:
    """A topic to look at: its settings, its offsets and its messages. Reading here moves no checkpoint."""

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
        """The first offset that is still there."""
        return self.log.start(self._partition(partition))

    def end(self, partition: int) -> int:
        """The offset that the next message will get."""
        return self.log.end(self._partition(partition))

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        """The start and the end of each of these partitions, all in one call."""
        return self.log.bounds([self._partition(number) for number in partitions])

    def offset_at(self, partition: int, timestamp: int) -> int:
        """The first offset whose message is of that time or later, in microseconds since 1970; the end if none is."""
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
        """Remove what the topic's retention allows, now; the new starts of the partitions that moved.

        The hub's janitor does it by itself: see `pxrs.upkeep`. Of a topic with `keep_unread`: raises WrongRegistry if
        this process has another registry than the hub, RetentionPostponed if it is not known which one the hub has."""
        moved = retention.retain(self._parts, self.log)
        if moved:
            self._parts.events.audit("retain", topic=self.name, starts=moved)
        return moved

    def retention_problem(self) -> str | None:
        """Why `retain` removes nothing in this process; None if nothing prevents it."""
        return retention.problem_of(self._parts, self.log)

    def wait(self, positions: Mapping[int, int], timeout: float | timedelta | None = None) -> set[int]:
        """Wait until any of these partitions has messages from its offset on; those that have. Empty: time is up."""
        if not isinstance(positions, Mapping):
            raise InvalidRecord(
                f"positions is {arguments.shown(positions)}: give offsets by partition, such as {{0: 120}}"
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

        start, end: offsets, in each partition; by default all that is there when this is called.
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


class Topics:
    """Creates, opens and deletes the topics of one open hub. Threads share it."""

    def __init__(self, parts: HubParts, sources: HubSources) -> None:
        self._parts, self._sources = parts, sources

    def create(self, topic: Topic, *, by: str | None = None) -> TopicLog:
        """Make the topic. Raises TopicExists, InvalidTopic. by: who does it; by default the user of this process."""
        self._sources.refuse_name(topic.name)
        return self._create(topic, by)

    def _create(self, topic: Topic, by: str | None = None) -> TopicLog:
        if self._parts.belonging is not None:
            self._parts.belonging.begin(keeps_unread=topic.keeps_unread)
        log = self._parts.log
        created = log.create_topic(topic)
        if not log.is_kept_by_server:  # which records it there
            self._audit("create_topic", by, topic=topic.name, topic_id=topic.id, partitions=topic.partitions)
        return created

    def _audit(self, action: str, by: str | None, **fields: object) -> None:
        self._parts.events.audit(action, **({} if by is None else {"who": by}), **fields)

    def create_or_open(self, asked: Topic) -> TopicLog:
        """The topic of this name, created if there is none. Raises TopicDiffers if there is one with other settings.

        A topic's name and all its settings appear at one moment, so a topic that is found here has them all."""
        attempt = 0
        while True:
            attempt += 1
            try:
                found = self._parts.log.topic(asked.name)
            except UnknownTopic:
                # Outside the inner `try`, which takes TopicExists for a race with another process and tries again.
                self._sources.refuse_name(asked.name)
                try:
                    return self._create(asked)
                except TopicExists:
                    if attempt == CREATE_ATTEMPTS_MAX:
                        raise
                    continue  # another process created it between the two calls: compare its settings
            if differences := found.topic.differences(asked):
                raise TopicDiffers(asked.name, differences)
            return found

    def open_like(self, topic: Topic, name: str, partitions: int | None) -> TopicLog:
        """The topic of this name; if there is none, one with the settings of `topic`. Raises InvalidTopic if it has
        another number of partitions than is given."""
        try:
            found = self._parts.log.topic(name)
        except UnknownTopic:
            count = topic.partitions if partitions is None else partitions
            new = replace(topic, name=name, id=uuid.uuid4().hex, partitions=count, revision=0, extra={})
            return self.create_or_open(new)
        if partitions not in (None, found.partitions):
            raise InvalidTopic(f"{name} has {counted(found.partitions, 'partition')}, and not {partitions}")
        return found

    def alter(self, name: str, changes: Mapping[str, object], *, by: str | None = None) -> TopicLog:
        """Change settings of a topic, given as fields of `Topic`. Raises UnknownTopic, InvalidTopic. by: who does it;
        by default the user of this process."""
        log, belonging = self._parts.log, self._parts.belonging
        if log.is_kept_by_server:
            return log.alter_topic(name, changes)  # which does the rest of this function there
        before = log.topic(name).topic
        if belonging is not None and before.altered(changes).keeps_unread:
            belonging.begin(keeps_unread=True)
        altered = log.alter_topic(name, changes)
        if altered.topic.revision != before.revision:
            self._audit("alter_topic", by, topic=name, topic_id=altered.id, changes=dict(changes))
        return altered

    def names(self) -> dict[str, str]:
        """The names of all topics by their ids; of the damaged ones too, if their id is known."""
        log = self._parts.log
        damaged = {topic.id: topic.name for topic in log.damaged_topics() if topic.id is not None}
        return damaged | {topic.id: topic.name for topic in log.topics()}

    def delete(self, name: str, *, by: str | None = None) -> str:
        """Remove the topic, its messages, and what the registry and the staging folder hold of it. Returns its id. by:
        who does it; by default the user of this process."""
        log = self._parts.log
        if log.is_kept_by_server:
            return log.delete_topic(name)  # which does the rest of this function there
        # A damaged topic may have had `keep_unread`: its description cannot be read.
        damaged = {topic.id: topic.name for topic in log.damaged_topics() if topic.id is not None}
        # A topic whose settings were changed may have had it too.
        keeping = {topic.id: topic.name for topic in log.topics() if topic.keeps_unread or topic.revision} | damaged
        for identity, each in keeping.items():
            if each == name:
                deleted_topics.note(self._parts, identity)
        identity = log.delete_topic(name)
        # Before the rest, which may fail: the topic is deleted.
        self._audit("delete_topic", by, topic=name, topic_id=identity)
        if identity in keeping:
            deleted_topics.forget(self._parts, identity)
        deleted_topics.forget_published(self._parts, identity)
        deleted_topics.forget_copies(self._parts, identity)
        return identity


def _with_place(records: pa.RecordBatch, partition: int, offset: int) -> pa.RecordBatch:
    rows = records.num_rows
    partitions = pa.repeat(pa.scalar(partition, pa.int32()), rows)
    offsets = pa.array(range(offset, offset + rows), pa.int64())
    return pa.RecordBatch.from_arrays([partitions, offsets, *records.columns], schema=TABLE_SCHEMA)
