"""The log in one process's memory: for tests, and for programs that need no other process.

Batches are kept as the encoded bytes that a log on disk stores, so that the same input is refused and the records that
the caller holds are not shared. Each topic has one lock, because appends are short. The thread that appends calls the
callbacks of those who wait for that partition, after it has released the lock.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pxrs.clock import SYSTEM, Clock
from pxrs.errors import (
    Closed,
    InvalidRecord,
    OffsetOutOfRange,
    OffsetTrimmed,
    SequenceGap,
    TopicDeleted,
    TopicExists,
    UnknownProducer,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.log.batch import SCHEMA, Batch, Origin, Payload, check_encoded
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, DamagedTopic, Log, RetentionPlan, TopicLog
from pxrs.log.outcomes import NotStored, Outcome, StoredAt
from pxrs.log.producers import SILENT_S_MAX, Incoming, Placement, Producers, named
from pxrs.log.retention import credible_time
from pxrs.model import Topic, is_internal
from pxrs.waiting import Callback, Subscribers, Subscription


class _Partition:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.bases: list[int] = []
        self.payloads: list[Payload] = []
        self.stored: list[int] = []
        """When each batch was stored."""
        self.origins: list[Origin] = []
        self.start = 0
        self.end = 0
        self.producers = Producers()

    def place(self, incoming: list[Incoming]) -> list[Placement]:
        incoming = self.producers.recall(incoming, self.end, self._origins_since, self._clock.wall_time_us() / 1e6)
        return self.producers.place(incoming, self.end)

    def _origins_since(self, offset: int) -> Iterable[tuple[Origin, int]] | None:
        if offset < self.start:
            return None
        first = max(0, bisect_right(self.bases, offset) - 1)
        return zip(self.origins[first:], self.bases[first:], strict=True)

    def store(self, payload: Payload, origin: Origin) -> None:
        now = self._clock.wall_time_us()
        self.producers.note(origin, self.end, now / 1e6)
        self.bases.append(self.end)
        self.payloads.append(payload)
        self.stored.append(now)
        self.origins.append(origin)
        self.end += payload.rows

    def count_before(self, offset: int) -> int:
        """How many batches, from the first on, end at this offset or before it."""
        return len(self.bases) if offset >= self.end else max(0, bisect_right(self.bases, offset) - 1)

    def drop(self, count: int) -> None:
        """Forget the first batches."""
        del self.bases[:count], self.payloads[:count], self.stored[:count], self.origins[:count]
        self.start = self.bases[0] if self.bases else self.end


class MemoryTopic(TopicLog):
    def __init__(self, topic: Topic, log: MemoryLog) -> None:
        self.topic = topic
        self.name, self.id, self.partitions = topic.name, topic.id, topic.partitions
        self._log, self.clock = log, log.clock
        self._lock = threading.Lock()
        self._subscribers = Subscribers()
        self._stored = [_Partition(log.clock) for _ in range(topic.partitions)]
        self._is_deleted = False

    @property
    def keeps_unread(self) -> bool:  # type: ignore[override]  # it may be changed
        return self.topic.keeps_unread

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        places = {partition: self._partition(partition) for partition in partitions}
        with self._lock:
            self._check_usable()
            return {partition: Bounds(place.start, place.end) for partition, place in places.items()}

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        place = self._partition(partition)
        with self._lock:
            self._check_usable()
            if offset > place.end:
                raise OffsetOutOfRange(f"{self.name}/{partition}", offset, place.end)
            if offset < place.start:
                raise OffsetTrimmed(f"{self.name}/{partition}", offset, place.start)
            if offset == place.end:
                return []
            chosen: list[tuple[int, Payload]] = []
            size = 0
            for i in range(bisect_right(place.bases, offset) - 1, len(place.bases)):
                size += place.payloads[i].data.size
                if chosen and size > max_bytes:
                    break
                chosen.append((place.bases[i], place.payloads[i]))
        batches = [Batch(base, pa.ipc.read_record_batch(payload.data, SCHEMA)) for base, payload in chosen]
        skip = offset - batches[0].base_offset
        if skip:
            batches[0] = Batch(offset, batches[0].records.slice(skip))
        return batches

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        places = {partition: self._partition(partition) for partition in positions}
        with self._lock:
            self._check_usable()
            return [partition for partition, offset in positions.items() if places[partition].end != offset]

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        chosen = tuple(partitions)
        for partition in chosen:
            self._partition(partition)
        return self._subscribers.add(chosen, callback)

    def offset_at(self, partition: int, timestamp: int) -> int:
        place = self._partition(partition)
        with self._lock:
            self._check_usable()
            stored = zip(place.bases, place.payloads, strict=True)
            found = next((each for each in stored if each[1].last_timestamp >= timestamp), None)
            if found is None:
                return place.end
        times = pa.ipc.read_record_batch(found[1].data, SCHEMA).column("timestamp").cast(pa.int64())
        return found[0] + int(pc.index(pc.greater_equal(times, timestamp), True).as_py())

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        by_partition: dict[int, list[Append]] = {}
        for append in appends:
            self._partition(append.partition)
            check_encoded(append.payload)
            by_partition.setdefault(append.partition, []).append(append)
        with self._lock:
            self._check_usable()
            outcomes = {number: iter(self._append(number, batches)) for number, batches in by_partition.items()}
        self._subscribers.wake(by_partition)
        return [next(outcomes[append.partition]) for append in appends]

    def _append(self, number: int, batches: list[Append]) -> list[Outcome]:
        """The batches of one partition. The caller holds `_lock`."""
        partition = self._stored[number]
        try:
            placed = partition.place([Incoming(each.origin, each.payload.rows, each.since) for each in batches])
        except (UnknownProducer, SequenceGap) as error:
            return [NotStored(named(error, f"{self.name}/{number}"))] * len(batches)
        for batch, placement in zip(batches, placed, strict=True):
            if placement.is_new:
                partition.store(batch.payload, batch.origin)
        return [StoredAt(placement.offset, not placement.is_new) for placement in placed]

    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        plan = RetentionPlan({}, [])
        with self._lock:
            self._check_usable()
            for partition, place in enumerate(self._stored):
                place.producers.forget_silent(now / 1e6 - SILENT_S_MAX)
                count = self._expired(place, now)
                if unread and partition in unread:  # the batch that holds the first unread message stays
                    count = min(count, place.count_before(unread[partition]))
                if count:
                    plan.starts[partition] = place.bases[count] if count < len(place.bases) else place.end
        return plan

    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        moved = {}
        with self._lock:
            self._check_usable()
            for partition, start in starts.items():
                place = self._stored[partition]
                if count := place.count_before(start):
                    place.drop(count)
                    moved[partition] = place.start
        return moved

    def _expired(self, place: _Partition, now: int) -> int:
        """How many batches, from the first on, are older than the retention, or exceed the bytes that may be kept."""
        count, payloads = 0, place.payloads
        if self.topic.retention_s is not None:
            oldest = now - int(self.topic.retention_s * 1_000_000)
            while count < len(payloads) and credible_time(place.stored, count, now) < oldest:
                count += 1
        if self.topic.retention_bytes is not None:
            size = sum(payload.frame_bytes for payload in payloads[count:])
            while size > self.topic.retention_bytes:
                size -= payloads[count].frame_bytes
                count += 1
        return count

    def _partition(self, partition: int) -> _Partition:
        if not 0 <= partition < self.partitions:
            raise InvalidRecord(f"{self.name} has no partition {partition}; it has 0 to {self.partitions - 1}")
        # Before the lock is touched: in a forked child another thread may have held it.
        self._log._check_process()
        return self._stored[partition]

    def _check_usable(self) -> None:
        self._log._check_usable()
        if self._is_deleted:
            raise TopicDeleted(self.name, self.id, self.name in self._log._topics)

    def _wake(self, *, is_deleted: bool = False) -> None:
        with self._lock:
            self._is_deleted |= is_deleted
        self._subscribers.wake_all()


class MemoryLog(Log):
    """A log that is gone with its process."""

    url = "memory:"
    own_registry = "memory:"

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._topics: dict[str, MemoryTopic] = {}
        self._is_closed = False

    def create_topic(self, topic: Topic) -> MemoryTopic:
        self._check_usable()
        with self._lock:
            if topic.name in self._topics:
                raise TopicExists(f"topic {topic.name!r} already exists")
            created = self._topics[topic.name] = MemoryTopic(topic, self)
            return created

    def topics(self) -> list[Topic]:
        self._check_usable()
        with self._lock:
            return [self._topics[name].topic for name in sorted(self._topics)]

    def damaged_topics(self) -> list[DamagedTopic]:
        self._check_usable()
        return []

    def topic(self, name: str) -> MemoryTopic:
        self._check_usable()
        with self._lock:
            if name not in self._topics:
                raise UnknownTopic(name, sorted(each for each in self._topics if not is_internal(each)))
            return self._topics[name]

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> MemoryTopic:
        found = self.topic(name)
        with self._lock:
            found.topic = found.topic.altered(changes)
        return found

    def delete_topic(self, name: str) -> str:
        self._check_usable()
        with self._lock:
            if name not in self._topics:
                raise UnknownTopic(name, sorted(each for each in self._topics if not is_internal(each)))
            gone = self._topics.pop(name)
        gone._wake(is_deleted=True)
        return gone.id

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # in a forked child: the log belongs to the parent
        with self._lock:
            self._is_closed = True
            topics = list(self._topics.values())
        for topic in topics:
            topic._wake()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork("the log in memory was created before a fork: create another one in the child")

    def _check_usable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise Closed("the log in memory was closed")
