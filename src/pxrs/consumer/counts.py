"""What one consumer adds to the metrics of its process, once for each batch, and to the traces of its program."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import pyarrow.compute as pc

from pxrs.group.lane import Lane
from pxrs.log.batch import Batch
from pxrs.metrics import instruments
from pxrs.metrics.instruments import Count, Read
from pxrs.tracing import consumer_tracing

LAG_S: Final = 5.0
"""For how long the lag that was read for the metrics is given again: of a table it takes two queries."""


class Owning(Protocol):
    """A consumer, as far as its gauges know it."""

    group: str
    topic: str

    @property
    def position(self) -> Mapping[Any, int]: ...

    @property
    def lag(self) -> Mapping[Any, int]: ...


def watch_owned(consumer: Owning) -> None:
    """Have the metrics of this process read what the consumer owns, until it is garbage-collected."""
    instruments.CONSUMER_PARTITIONS.watch(consumer, _partitions)
    instruments.CONSUMER_LAG.watch(consumer, _lag)


def _partitions(consumer: Owning) -> list[Read]:
    return _by_topic(consumer, dict.fromkeys(consumer.position, 1))


_lags: weakref.WeakKeyDictionary[Owning, tuple[float, list[Read]]] = weakref.WeakKeyDictionary()
"""When the lag of each consumer was read last, and what it was."""


def _lag(consumer: Owning) -> list[Read]:
    read_at, found = _lags.get(consumer, (float("-inf"), []))
    if time.monotonic() >= read_at + LAG_S:
        found = _by_topic(consumer, consumer.lag)
        if found:  # a consumer that owns nothing reads nothing
            _lags[consumer] = time.monotonic(), found
    return found


def _by_topic(consumer: Owning, by_partition: Mapping[Any, int]) -> list[Read]:
    """The sum of each topic. A consumer of one topic names its partitions by numbers, others by TopicPartition."""
    sums: Counter[str] = Counter()
    for partition, value in by_partition.items():
        sums[consumer.topic if isinstance(partition, int) else partition[0]] += value
    return [((consumer.group, topic), value) for topic, value in sums.items()]


class ConsumerCounts:
    def __init__(self, group: str, place: Callable[[int], tuple[str, int]]) -> None:
        """place: the topic and the partition that one of the consumer's numbers stands for."""
        self._group, self._place = group, place
        self._by_topic: dict[str, tuple[Count, Count]] = {}
        self.poll = instruments.CONSUMER_POLL.of(group)
        self.tracing = consumer_tracing(group)
        """None unless the program has configured a tracer before it made the consumer."""

    def handed_out(self, lane: Lane, batch: Batch, position: int) -> None:
        """The messages of this batch before `position` were handed out."""
        if position <= batch.base_offset:
            return
        topic = self._place(lane.partition)[0]
        counts = self._by_topic.get(topic)
        if counts is None:
            counts = self._by_topic[topic] = (
                instruments.CONSUMER_MESSAGES.of(self._group, topic),
                instruments.CONSUMER_BATCHES.of(self._group, topic),
            )
        if position >= batch.next_offset:
            rows = batch.records.num_rows
        elif batch.offsets is None:
            rows = position - batch.base_offset
        else:  # the offsets have gaps
            rows = pc.sum(pc.less(batch.offsets, position)).as_py() or 0
        counts[0].add(rows)
        counts[1].add()

    def received(self, lane: Lane, batch: Batch) -> None:
        """The messages of this batch are about to be handed out together, to the user's own code."""
        if self.tracing is not None:
            self.tracing.received(*self._place(lane.partition), batch.records)

    def handled(self, lane: Lane, batch: Batch, position: int, began: float) -> None:
        """A handler was called with the messages before `position`, from the moment `began` of `time.monotonic` on."""
        self.handed_out(lane, batch, position)
        topic = self._place(lane.partition)[0]
        instruments.CONSUMER_HANDLING.of(self._group, topic).add(time.monotonic() - began)

    def failed(self, topic: str, outcome: str) -> None:
        """A handler failed; outcome: what followed from it."""
        instruments.CONSUMER_FAILURES.of(self._group, topic, outcome).add()

    def moved(self, change: str, partitions: int = 1) -> None:
        """Partitions have come or gone."""
        instruments.CONSUMER_MOVES.of(self._group, change).add(partitions)
