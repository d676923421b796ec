"""What `GroupHandle.describe` returns: values that say who is there, who owns what, and how far the group is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pxrs.group.lag import Seen, TopicLag
from pxrs.group.records import Paused, TopicPartition
from pxrs.group.snapshot import GroupState
from pxrs.group.text import group_text, lag_text

_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("owner", pa.string()),
        pa.field("owner_name", pa.string()),
        pa.field("target", pa.string()),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("checkpoint", pa.int64()),
        pa.field("when", pa.timestamp("us", "UTC")),
        pa.field("by", pa.string()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("lag", pa.int64()),
        pa.field("is_lag_exact", pa.bool_(), nullable=False),
        pa.field("paused_at", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("traceback", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class MemberDescription:
    incarnation: str
    name: str
    host: str
    pid: int
    topic: str
    since: float
    """Wall-clock seconds of its own machine."""
    partitions: int
    """How many it owns."""


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    topic: str
    """Its name, or its id if nobody knows the name any more."""
    topic_id: str
    partition: int
    owner: str | None
    """The incarnation that has it; None if it is free."""
    owner_name: str | None
    is_owner_there: bool
    """False also if the owner is dead and nobody has claimed it since."""
    target: str | None
    """The incarnation that it is meant for; None if that is gone, and the leader has yet to choose another."""
    epoch: int
    checkpoint: int | None
    """The offset of the next message to read."""
    when: float | None
    by: str | None
    start: int | None
    end: int | None
    lag: int | None
    """The lag: how many messages are yet to be handled, or an upper bound of that; None if the topic does not exist or
    cannot be read."""
    is_lag_exact: bool
    """False if `lag` is an upper bound, or None. It is a bound of a table, where it counts the ids of other partitions
    too, and of a partition without a checkpoint, where it counts from the partition's start."""
    paused: Paused | None
    """The message that holds the partition up, and why."""

    @property
    def error(self) -> str | None:
        """What holds the partition up: the class and message of what the handler raised."""
        return None if self.paused is None else self.paused.error

    @property
    def error_type(self) -> str | None:
        """The class alone; empty if the pause was written by version 0.1, as is `traceback`."""
        return None if self.paused is None else self.paused.error_type

    @property
    def traceback(self) -> str | None:
        return None if self.paused is None else self.paused.traceback


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """What a group was doing while it was looked at; not one moment's picture (R1)."""

    name: str
    generation: int
    """Of the targets: it rises with every rebalance."""
    leader: str | None
    """An incarnation that is there."""
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    topics: tuple[TopicLag, ...]
    """How far the group is behind in each topic and source that it reads."""

    @property
    def lag(self) -> int | None:
        """The lag of all topics and sources together: exact or an upper bound, see `is_lag_exact`. None if it is not
        known for one of them: `lag_problem` says why."""
        lags = [each.lag for each in self.topics]
        return None if None in lags else sum(lag for lag in lags if lag is not None)

    @property
    def is_lag_exact(self) -> bool:
        """False if `lag` is an upper bound, or None."""
        return all(each.is_exact for each in self.topics)

    @property
    def lag_problem(self) -> str | None:
        """Why `lag` is None, and what to do about it."""
        problems = [each.problem for each in self.topics if each.problem is not None]
        return "; ".join(problems) or None

    @property
    def lag_text(self) -> str:
        """The lag for people: `12`, `<= 12` if it is an upper bound, or `unknown`."""
        return lag_text(self.lag, self.is_lag_exact)

    def to_arrow(self) -> pa.Table:
        """A row for each partition."""
        rows = [
            {
                **{name: getattr(row, name) for name in _SCHEMA.names if name not in ("when", "paused_at")},
                "when": None if row.when is None else round(row.when * 1e6),
                "paused_at": None if row.paused is None else row.paused.offset,
            }
            for row in self.partitions
        ]
        return pa.Table.from_pylist(rows, _SCHEMA)

    def __str__(self) -> str:
        """Tables to be printed: members, owners, epochs, checkpoints and lag."""
        return group_text(self)


def describe_partition(
    state: GroupState, target: str | None, place: TopicPartition, name: str, seen: Seen
) -> PartitionDescription:
    owner, _ = state.owner(place)
    checkpoint = state.checkpoints[place][0] if place in state.checkpoints else None
    start, end = seen.extents[place[1]] if place[1] < seen.count else (None, None)
    offset = None if checkpoint is None else checkpoint.offset
    lag = seen.partition_lag(place[1], offset)
    return PartitionDescription(
        name,
        *place,
        owner=owner.incarnation,
        owner_name=None if owner.incarnation is None else owner.name,
        is_owner_there=owner.incarnation in state.members,
        target=target,
        epoch=owner.epoch,
        checkpoint=None if checkpoint is None else checkpoint.offset,
        when=None if checkpoint is None else checkpoint.when,
        by=None if checkpoint is None else checkpoint.by,
        start=start,
        end=end,
        lag=lag,
        is_lag_exact=seen.is_partition_exact(lag, offset),
        paused=state.paused[place][0] if place in state.paused else None,
    )
