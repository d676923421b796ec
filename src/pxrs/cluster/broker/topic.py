"""The partitions of a topic that this broker owns: see `pxrs.log.contract.TopicLog`.

`log.ClusterTopic` is a `RoutedTopic` in front of it, which forwards calls for other partitions to their owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.opened import Ticket
from pxrs.cluster.broker.ownership import Ownership
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.records import TopicRecord
from pxrs.errors import AppendFailed, InvalidRecord, LogError, PartitionMoved, PxrsError, UnknownTopic
from pxrs.log.batch import Batch, check_encoded
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, RetentionPlan, TopicLog
from pxrs.log.outcomes import NotStored, Outcome
from pxrs.waiting import Callback, Subscription


class OwnedTopic(TopicLog):
    """Threads share it."""

    def __init__(self, record: TopicRecord, broker: Broker, ownership: Ownership) -> None:
        self.topic = record.topic
        self.name, self.id, self.partitions = self.topic.name, self.topic.id, self.topic.partitions
        self.keeps_unread = self.topic.keeps_unread
        self.clock = broker.clock
        self._broker, self._ownership = broker, ownership

    def _checked(self, number: int) -> int:
        if not 0 <= number < self.partitions:
            raise InvalidRecord(f"{self.name} has no partition {number}; it has 0 to {self.partitions - 1}")
        return number

    def _partition(self, number: int) -> OwnedPartition:
        found = self._ownership.owned(self.id, self._checked(number))
        if found is None:
            raise PartitionMoved(f"{self.name}/{number}: this broker does not own the partition")
        return found

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        return {number: self._partition(number).bounds() for number in partitions}

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        return self._partition(partition).read(offset, max_bytes)

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        found = []
        for number, offset in positions.items():
            try:
                if self._partition(number).bounds().end != offset:
                    found.append(number)
            except PartitionMoved:
                found.append(number)  # reported as readable, so that `read` raises the error for this partition only
        return found

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        chosen = list(partitions)
        for number in chosen:
            self._partition(number)
        return self._ownership.subscribers(self.id).add(chosen, callback)

    def offset_at(self, partition: int, timestamp: int) -> int:
        return self._partition(partition).offset_at(timestamp)

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        by_partition: dict[int, list[Append]] = {}
        for append in appends:
            check_encoded(append.payload)
            self._checked(append.partition)
            by_partition.setdefault(append.partition, []).append(append)
        begun: dict[int, tuple[OwnedPartition, Ticket] | list[Outcome]] = {}
        for number, batches in by_partition.items():
            # Errors become outcomes from here on, because other partitions may have stored their batches already.
            try:
                partition = self._partition(number)
                ticket = partition.begin(batches)
            except (AppendFailed, UnknownTopic) as error:
                begun[number] = [NotStored(error)] * len(batches)
            except PxrsError as error:  # such as ReadFailed: the entries needed to recognise a duplicate cannot be read
                failed = AppendFailed(f"{self.name}/{number}: {error}; nothing was stored")
                begun[number] = [NotStored(failed)] * len(batches)
            else:
                begun[number] = (partition, ticket) if isinstance(ticket, Ticket) else ticket
        outcomes = {
            number: iter(found if isinstance(found, list) else found[0].wait(found[1]))
            for number, found in begun.items()
        }
        return [next(outcomes[append.partition]) for append in appends]

    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        plan = RetentionPlan({}, [])
        for number in range(self.partitions):
            if self._ownership.owned(self.id, number) is None:
                continue
            try:
                start = self._partition(number).expired(now, None if unread is None else unread.get(number))
            except LogError as error:
                plan.errors.append(error)
            else:
                if start is not None:
                    plan.starts[number] = start
        return plan

    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        moved = {}
        for number, start in starts.items():
            found = self._partition(number).trim(start)
            if found is not None:
                moved[number] = found
        return moved
