"""What a group needs of a queue (`Source`), and what a log adds to it (`TopicLog`, `Log`).

A `Source` is the reading half of one topic: somebody else's table can be one. Offsets count the messages of a partition
from 0 without gaps; every range is half-open. Readers see only what is durable (L1): what was read once is there for
good, until retention removes it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pxrs.clock import SYSTEM, Clock
from pxrs.errors import DamagedFrame, LogError
from pxrs.log.batch import ANONYMOUS, Batch, Origin
from pxrs.model import Topic

READ_BYTES_DEFAULT = 8 << 20


class DamagedTopic(NamedTuple):
    """A topic that cannot be opened, because its stored description is missing, damaged, or that of another topic."""

    name: str
    id: str | None
    """None if it cannot be told."""
    error: DamagedFrame
    """What is wrong with it."""


class Append(NamedTuple):
    """Records for one partition, and who sends them. The same origin twice is stored once (L4)."""

    partition: int
    records: pa.RecordBatch
    origin: Origin = ANONYMOUS
    since: int | None = None
    """Where the partition ended before the first try of this producer's first batch: if it has forgotten producers
    since, it looks from there whether this is one of them. Without it, that is refused: UnknownProducer."""


class RetentionPlan(NamedTuple):
    """What `TopicLog.plan_retention` found."""

    starts: dict[int, int]
    """The new start of each partition from which something may be removed."""
    errors: list[LogError]
    """Why partitions that are not in `starts` could not be looked at."""


class Source(ABC):
    """The messages of one topic, in partitions, to be read by any number of readers."""

    name: str
    id: str
    """Names this topic and no other, also if one of the same name is made later (G7)."""
    partitions: int
    has_gaps: bool = False
    """Offsets are not consecutive: those of a table are its ids. A batch may then be empty and only lead further, an
    offset before the start is no loss, and whether one lies beyond the end only `read` can tell."""
    keeps_unread: bool = False
    """Retention removes nothing that a group has yet to read, so whoever gives a group a checkpoint must go through the
    gate that retention expects (`pxrs.group.retention`)."""

    # Of sources that are no topics of a hub. See `pxrs.sources.sql_table.identity` for what they protect from.
    fingerprint: str | None = None
    """Names what is read, however it is addressed; None if that is not known."""
    mark: str = ""
    """The fingerprint, or the best name that there is without one; empty if there is only the id. A group reads what
    has one mark under one id and with one meaning."""
    former_ids: tuple[str, ...] = ()
    """Other ids that earlier versions may have given to the same source."""
    address: str = ""
    """What is read, for messages: without user and password."""
    meaning: str = ""
    """Which messages are in which partition, in words: a group refuses to go on where another one has begun."""

    @abstractmethod
    def start(self, partition: int) -> int:
        """The first offset that is still there."""

    @abstractmethod
    def end(self, partition: int) -> int:
        """The offset that the next message will get. Everything before it is durable."""

    def ends(self) -> list[int]:
        """The end of each partition, as `end` tells it; not all at one moment. For a reader that asks often: a log may
        make this cheaper than so many calls of `end`."""
        return [self.end(partition) for partition in range(self.partitions)]

    def ends_problem(self) -> str | None:
        """Why the end of a partition is only a lower bound: it has messages, or may have, that this process cannot show
        yet. None if all ends are exact. Ask before the ends are read: a bound may become exact at any moment."""
        return None

    def extents(self) -> list[tuple[int, int]]:
        """Of each partition the first offset, and the one behind the last message that can be seen: for the lag of a
        group. Of a table this includes rows that are not final, which `read` does not hand out yet."""
        return [(self.start(partition), end) for partition, end in enumerate(self.ends())]

    def was_given_out(self, partition: int, offset: int) -> bool:
        """Whether a checkpoint may be here: every offset before it is that of a message that is or was there, or of a
        gap. False if the source counts anew, or is an older copy than the checkpoint."""
        return offset <= self.end(partition)

    @abstractmethod
    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        """Batches from exactly this offset on, about `max_bytes` of them but at least one; none at the end.

        Raises OffsetTrimmed before the start, OffsetOutOfRange beyond the end, DamagedFrame where bytes are damaged."""

    @abstractmethod
    def wait(
        self,
        positions: Mapping[int, int],
        timeout: float | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> set[int]:
        """Wait until any of these partitions has messages from its offset on; those that have. Empty: time is up.

        is_over: asked before it sleeps and whenever `wake` is called; the wait ends, empty, when it says so."""

    @abstractmethod
    def wake(self) -> None:
        """Let everyone who waits here in this process ask its `is_over` again."""

    @abstractmethod
    def offset_at(self, partition: int, timestamp: int) -> int:
        """The first offset whose message is of that time or later, in microseconds since 1970; the end if none is."""


class TopicLog(Source):
    """A topic of a log: a Source that can be appended to."""

    topic: Topic
    clock: Clock = SYSTEM
    """Whose `wall_time_us` appends are stamped with, and the age of what is stored is counted by."""

    def check_writable(self) -> None:
        """Raise NoWritePermission if it can be told, without writing, that this process may not append."""

    @abstractmethod
    def append(self, appends: Sequence[Append]) -> list[int]:
        """Store the batches of each partition in order, durable when it returns; the offset of each one's first record.

        All or nothing for each partition; an error names one that failed, and others may be stored. Raises AppendFailed
        if nothing of that partition was stored, UnknownProducer and SequenceGap by origin."""

    @abstractmethod
    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        """Which start each partition may get by the topic's retention, at this time in microseconds. Removes nothing.

        unread: by partition, the offset from which on everything is kept."""

    @abstractmethod
    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        """Remove the messages before these offsets, by partition, as far as whole stored pieces lie before them; the
        new starts of the partitions that moved. A partition that fails keeps no other from being trimmed."""

    def retain(self, now: int, unread: Mapping[int, int] | None = None) -> dict[int, int]:
        """`plan_retention`, then `trim`. Raises the first error once every sound partition is trimmed."""
        plan = self.plan_retention(now, unread)
        moved = self.trim(plan.starts)
        if plan.errors:
            raise plan.errors[0]
        return moved


class Log(ABC):
    """Topics by name. Threads share it; a forked child must open its own."""

    url: str
    """The log's address, without a password."""
    folder: Path | None = None
    """The directory in which the log is; None if it is in none."""
    clock: Clock = SYSTEM
    """Which clock the times of stored messages, and the schedule of upkeep, are read from."""
    is_kept_by_server: bool = False
    """Whether a server stands before this log and does its upkeep, so that no client may (W4)."""
    own_registry: str | os.PathLike[str] | None = None
    """The address of the registry that is kept with this log, which a hub has if no other is given. None: one must be
    given."""

    @abstractmethod
    def create_topic(self, topic: Topic) -> TopicLog:
        """Raises TopicExists if one of this name is there."""

    @abstractmethod
    def topics(self) -> list[Topic]:
        """All topics that can be opened, in the order of their names."""

    @abstractmethod
    def damaged_topics(self) -> list[DamagedTopic]:
        """The topics whose stored description is damaged, in the order of their names. They cannot be opened."""

    @abstractmethod
    def topic(self, name: str) -> TopicLog:
        """Raises UnknownTopic, and DamagedFrame if the topic's stored description is damaged."""

    @abstractmethod
    def delete_topic(self, name: str) -> str:
        """Remove a topic, also a damaged one; its id. Who has it open gets TopicDeleted. Raises UnknownTopic."""

    def check_place(self) -> None:  # noqa: B027 - a log in memory has none
        """Raise HubMoved if what this handle has open is not what is to be found at its address any more."""

    def check_topics(self) -> None:  # noqa: B027 - a log that is there has topics
        """Raise NoDirectory if this stands for the log of a hub that was opened without a directory."""

    def finish_deletions(self) -> None:  # noqa: B027 - a log that deletes at once has none
        """Remove what deletions of topics that were cut short have left behind. May be called at any time, by several
        processes at once. What fails is logged, and tried again by the next call."""

    @abstractmethod
    def close(self) -> None: ...
