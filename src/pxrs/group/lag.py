"""How far a group is behind: what is exact, what is an upper bound, and what is not known.

- A topic counts the offsets of each partition by itself and without gaps: its lag is exact. A partition without a
  checkpoint, because a member has just joined or only some were imported, counts from its start: an upper bound.
- A table's offsets are its ids, which all partitions share, and which have gaps. The lag of a partition counts all ids
  from its checkpoint on, also those of rows in other partitions: it is an upper bound. The lag of the whole table
  counts each id once, from the lowest checkpoint on: an upper bound too. Both are exactly 0 when every checkpoint has
  passed the last row, and not before.
- What cannot be looked at, because the database cannot be reached or nobody has registered the table, has a lag that is
  not known. It is never shown as 0. Nor is it known in a topic that has messages which this process cannot show yet,
  because it may not write there (`Source.ends_problem`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Extent = tuple[int, int]
"""The first offset of a partition, and the one behind the last message that can be seen."""


@dataclass(frozen=True, slots=True)
class TopicLag:
    """How far a group is behind in one topic or source."""

    topic: str
    """The name of the topic or source, or its id if the name is not known."""
    topic_id: str
    is_source: bool
    """Whether it is a source other than a topic of the hub, such as a table of another system."""
    lag: int | None
    """How many messages are yet to be handled, or an upper bound of that; None if it is not known."""
    is_exact: bool
    """False if `lag` is an upper bound or None."""
    problem: str | None = None
    """Why `lag` is None, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The extents of a topic or source, or why they are not known."""

    extents: Sequence[Extent] = ()
    has_gaps: bool = False
    is_source: bool = False
    problem: str | None = None
    is_deleted: bool = False
    """Whether it was a topic of this hub that is deleted: there is nothing left to handle."""

    def partition_lag(self, partition: int, checkpoint: int | None) -> int | None:
        """checkpoint: None counts from the partition's start, which is an upper bound: see `is_partition_exact`."""
        if self.problem is not None or partition >= self.count:
            return None
        return _behind(0 if checkpoint is None else checkpoint, self.extents[partition])

    def is_partition_exact(self, lag: int | None, checkpoint: int | None) -> bool:
        """lag: what `partition_lag` gave for this checkpoint."""
        return lag == 0 or (lag is not None and checkpoint is not None and not self.has_gaps)

    def total(self, topic: str, topic_id: str, checkpoints: Mapping[int, int]) -> TopicLag:
        """checkpoints: by partition."""
        if self.is_deleted:
            return TopicLag(topic, topic_id, False, 0, True)
        if self.problem is not None:
            return TopicLag(topic, topic_id, self.is_source, None, False, self.problem)
        if not self.has_gaps:
            at = [checkpoints.get(number) for number in range(self.count)]
            lags = [self.partition_lag(number, each) for number, each in enumerate(at)]
            is_exact = all(map(self.is_partition_exact, lags, at))
            return TopicLag(topic, topic_id, self.is_source, sum(lag or 0 for lag in lags), is_exact)
        # In a partition without a checkpoint everything is yet to be handled.
        lowest = min((checkpoints.get(number, 0) for number in range(self.count)), default=0)
        start, end = min(each[0] for each in self.extents), max(each[1] for each in self.extents)
        lag = _behind(lowest, (start, end))
        return TopicLag(topic, topic_id, self.is_source, lag, lag == 0)

    @property
    def count(self) -> int:
        return len(self.extents)


def beyond(
    seen: Seen, checkpoints: Mapping[int, int], was_given_out: Callable[[int, int], bool]
) -> tuple[int, int] | None:
    """A partition whose checkpoint the source cannot have reached, and that checkpoint; None if there is none. A lag of
    0 would be wrong there: what comes next is not read, or comes again.

    The extents were read after the checkpoints, so only a source that counts anew or is an old copy is behind them."""
    for number, checkpoint in sorted(checkpoints.items()):
        if number < seen.count and checkpoint > seen.extents[number][1] and not was_given_out(number, checkpoint):
            return number, checkpoint
    return None


def _behind(checkpoint: int, extent: Extent) -> int:
    start, end = extent
    return max(0, end - max(checkpoint, start))
