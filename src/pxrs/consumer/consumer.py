"""`Consumer` and `TopicsConsumer`: the two classes that `Hub.consumer` makes. They differ in how they name
partitions; everything else is in `base.py`."""

from __future__ import annotations

from pxrs.consumer.base import BaseConsumer, Callback, ConsumedBatch, OnAssigned, Start
from pxrs.consumer.partitions import Numbers, PartitionNames, TopicPartitions
from pxrs.errors import InvalidGroup
from pxrs.log.contract import Source
from pxrs.log.joined import JoinedSource
from pxrs.model import TopicPartition

__all__ = ["Callback", "ConsumedBatch", "Consumer", "OnAssigned", "Start", "TopicsConsumer"]


class Consumer(BaseConsumer[int]):
    """A member of a group that reads one topic or source, whose partitions it names by their numbers.

    One thread iterates or polls; `ack`, `commit`, `pause` and the rest may come from any thread."""

    @classmethod
    def _names_of(cls, source: Source) -> PartitionNames[int]:
        if isinstance(source, JoinedSource):
            raise InvalidGroup("a Consumer reads one topic; use a TopicsConsumer to read several")
        return Numbers(source.name, source.partitions)


class TopicsConsumer(BaseConsumer[TopicPartition]):
    """A member of a group that reads several topics or sources, with one lease. It names a partition by the topic and
    the number: `TopicPartition("orders", 3)`, also in `seek`, in callbacks and in errors. A message has the name of its
    own topic.

    One thread iterates or polls; `ack`, `commit`, `pause` and the rest may come from any thread."""

    @classmethod
    def _names_of(cls, source: Source) -> PartitionNames[TopicPartition]:
        if not isinstance(source, JoinedSource):
            raise InvalidGroup("a TopicsConsumer reads a JoinedSource; use a Consumer to read one topic")
        return TopicPartitions(source)
