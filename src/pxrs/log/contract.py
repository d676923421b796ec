"""What a group needs of a source of messages (`Source`), and what a log adds to it (`TopicLog`, `Log`).

A `Source` is the reading half of one topic; a table of another system can be one too. Offsets number the messages of a
partition from 0 on; every range is half-open. Readers see only what is durable (L1): a message that was read once stays
until retention removes it.

The calls of a `Source` can be sent over a network: positions and limits go in, bounds and batches come out. Only
`subscribe`, and the `cancel` of `fetch`, need the caller's own memory; a client of a remote source turns the former
into messages of a stream and the latter into the cancellation of its request (docs/writing-a-source.md).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs.clock import SYSTEM, Clock
from pxrs.errors import DamagedFrame, HubMoved, InvalidArgument, LogError, LogNotReadable, UnknownTopic
from pxrs.log.batch import ANONYMOUS, Batch, Origin, Payload, encode
from pxrs.log.outcomes import Outcome
from pxrs.model import Topic, TopicPartition
from pxrs.waiting import Callback, Cancel, Subscription, wait_for

READ_BYTES_DEFAULT = 8 << 20
_OF_THE_WHOLE: Final = (UnknownTopic, HubMoved, InvalidArgument)
"""Errors of `Source.read` that concern the source or the call, and not only the partition that was read."""


# Over the limit: most of it documents what each call of a log and of its topics promises, which is read together.
class DamagedTopic(NamedTuple):
    """A topic that cannot be opened, because its stored description is missing, damaged, or that of another topic, or
    because this process may not read it."""

    name: str
    id: str | None
    """The id of the topic; None if it is not known."""
    error: DamagedFrame | LogNotReadable
    """What is wrong with the topic; LogNotReadable if only the permission to read it is lacking."""


class Append(NamedTuple):
    """An encoded batch for one partition, and its origin. Two batches with the same origin are stored once (L4)."""

    partition: int
    payload: Payload
    """The encoded records. The log checks these bytes (`pxrs.log.batch.check_encoded`) and stores them as they are."""
    origin: Origin = ANONYMOUS
    since: int | None = None
    """The end of the partition as it was before the first try of this producer's first batch. A log that has forgotten
    producers since then searches its batches from this offset on for the producer. With None the log cannot search, and
    refuses the batch with UnknownProducer if it has forgotten any producer."""

    @classmethod
    def encoded(
        cls,
        partition: int,
        records: pa.RecordBatch,
        origin: Origin = ANONYMOUS,
        since: int | None = None,
        *,
        codec: str = "none",
    ) -> Append:
        """Encode the records. Raises InvalidRecord if they are none, of another schema, or too large for one frame."""
        return cls(partition, encode(records, codec), origin, since)


Tell = Callable[[Mapping[int, Sequence[Outcome]]], None]
"""Given the outcomes of the batches of some partitions, in the order of the batches: see `TopicLog.append_each`."""


def by_partition(appends: Iterable[Append], outcomes: Iterable[Outcome]) -> dict[int, list[Outcome]]:
    """The outcomes of these batches by partition."""
    found: dict[int, list[Outcome]] = {}
    for append, outcome in zip(appends, outcomes, strict=True):
        found.setdefault(append.partition, []).append(outcome)
    return found


class RetentionPlan(NamedTuple):
    """What `TopicLog.plan_retention` found."""

    starts: dict[int, int]
    """The new start of each partition from which something may be removed."""
    errors: list[LogError]
    """The errors of partitions that could not be read, and are not in `starts`."""


class Bounds(NamedTuple):
    """The offsets that a partition has: from `start` on, and before `end`."""

    start: int
    """The first offset that is still there."""
    end: int
    """The offset that the next message will get. Everything before it is durable."""


class Fetched(NamedTuple):
    """What `Source.fetch` found in one partition: batches, or why there are none and will be none."""

    batches: tuple[Batch, ...] = ()
    """The batches from exactly the position that was asked for, in order. The next position is the `next_offset` of the
    last one."""
    error: LogError | None = None
    """Why this partition cannot be read at the position, though others can: OffsetTrimmed before its start,
    OffsetOutOfRange beyond its end, DamagedFrame, ReadFailed."""
    is_ended: bool = False
    """No message will ever be at this position or behind it. Do not fetch this partition again: `fetch` would return at
    once each time."""


class Source(ABC):
    """The messages of one topic, in partitions, to be read by any number of readers. Threads share it.

    A source implements `bounds`, `read`, `subscribe` and `offset_at`; readers that follow a source call `fetch`."""

    name: str
    id: str
    """Identifies this topic, and no other one that is created later under the same name (G7)."""
    partitions: int
    has_gaps: bool = False
    """Whether offsets are not consecutive, as in a table whose ids are the offsets. A batch may then be empty and only
    move the position, an offset before the start is no loss, and only `read` knows whether an offset is beyond the
    end."""
    has_latency: bool = False
    """Whether a read waits for something outside of this machine, such as a database or a server. Consumers then read
    ahead on a thread of their own while messages are handled (`pxrs.consumer.read_ahead`, decision 0031)."""
    keeps_unread: bool = False
    """Whether retention removes nothing that a group has yet to read. Then every commit that gives a group a checkpoint
    must also write the gate, which retention expects (`pxrs.group.retention`)."""

    # For sources that are no topics of a hub: see `pxrs.sources.sql_table.identity`.
    fingerprint: str | None = None
    """Identifies what is read, whatever address is used; None if it is not known."""
    mark: str = ""
    """The fingerprint, or the best name without one; empty if there is only the id. A group reads sources with the same
    mark under one id and with one meaning."""
    former_ids: tuple[str, ...] = ()
    """Other ids that earlier versions may have given to the same source."""
    address: str = ""
    """The address of what is read, for messages: without user and password."""
    meaning: str = ""
    """A text that says which messages are in which partition. A group refuses to continue checkpoints that were written
    with another meaning."""

    @property
    def parts(self) -> tuple[Source, ...]:
        """The topics that are read through this source: the source itself, or those that `pxrs.log.joined` joins."""
        return (self,)

    def place(self, number: int) -> tuple[Source, int]:
        """The part that has this partition, and the number of the partition in it. A source that joins several others
        numbers their partitions consecutively; for every other source this is the source itself and the same number."""
        return self, number

    def named(self, numbers: Iterable[int]) -> list[int] | list[TopicPartition]:
        """These partitions as errors and users name them: by number; a `JoinedSource` by topic name and number."""
        return list(numbers)

    @abstractmethod
    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        """The start and the end of each of these partitions; not all at one moment."""

    @abstractmethod
    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        """Batches from exactly this offset on, about `max_bytes` of them but at least one; none at the end. Never waits
        for a message.

        Raises OffsetTrimmed before the start, OffsetOutOfRange beyond the end, DamagedFrame where bytes are damaged."""

    def batches(self, partition: int, start: int, end: int | None = None) -> Iterator[Batch]:
        """The batches from exactly this offset on and before `end`. Without `end`, or if the partition has less: up to
        the end of the partition, as it is when the iterator comes to it. Raises as `read`. A source with latency reads
        ahead of the caller."""
        while end is None or start < end:
            found = self.read(partition, start)
            if not found:
                return
            for batch in found:
                batch = batch.within(start, end)
                yield batch
                start = batch.next_offset
                if end is not None and start >= end:
                    return

    @abstractmethod
    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        """Call the callback after each change that may let `read` find more in one of these partitions, and when the
        source is closed or its topic deleted. Too many calls are allowed, a missing one is not.

        The callback is called on a thread of the source, of which there is one for all subscriptions (W6). Subscribe
        first, then read: what was readable before the subscription causes no call."""

    def fetch(
        self,
        positions: Mapping[int, int],
        max_bytes: int = READ_BYTES_DEFAULT,
        timeout: float | None = 0.0,
        cancel: Cancel | None = None,
    ) -> dict[int, Fetched]:
        """Wait until something can be read at one of these positions (offsets by partition), and read it.

        max_bytes: about how much to read in all, but at least one batch. What is left of it is shared equally by the
                   partitions that have something, in the order of `positions`. If it does not suffice for all, the last
                   ones are left out, so a caller with many partitions gives them in another order each time.
        timeout:   how many seconds to wait; 0 to take only what is there, None for no limit
        cancel:    ends the wait from another thread

        Returns the partitions that have something to tell, by number; none if the time is up or `cancel` was set. An
        error that concerns the whole source is raised: Closed, UsedAfterFork, TopicDeleted, HubMoved, InvalidRecord."""
        return wait_for(
            lambda: self._read_all(positions, max_bytes),
            lambda callback: self.subscribe(positions, callback),
            timeout,
            cancel,
            lambda: self.look_again_s(positions),
        )

    def readable(self, positions: Mapping[int, int]) -> Collection[int]:
        """The partitions at whose position `read` may find something, or raise. Used by `fetch`: a source overrides it
        if it can find out at less cost than by reading each partition. It must leave out none that can be read."""
        return positions.keys()

    def look_again_s(self, positions: Mapping[int, int]) -> float | None:
        """After how many seconds `readable` may find more at these positions although nothing has changed, so that no
        callback is called; None: never. Asked by `fetch` before it sleeps."""
        return None

    def is_ended(self, partition: int, offset: int) -> bool:
        """Whether no message will ever be at this offset or behind it. False for every topic."""
        return False

    def _read_all(self, positions: Mapping[int, int], max_bytes: int) -> dict[int, Fetched]:
        found: dict[int, Fetched] = {}
        chosen = list(self.readable(positions))
        left = max(1, max_bytes)
        for at, partition in enumerate(chosen):
            if left <= 0:
                break
            offset = positions[partition]
            try:
                batches = self.read(partition, offset, max(1, left // (len(chosen) - at)))
            except LogError as error:
                if isinstance(error, _OF_THE_WHOLE):
                    raise
                found[partition] = Fetched(error=error)
                continue
            if batches:
                found[partition] = Fetched(tuple(batches))
                if at + 1 < len(chosen):  # counting the bytes of a small batch costs about as much as reading it
                    left -= sum(batch.records.nbytes for batch in batches)
            elif self.is_ended(partition, offset):
                found[partition] = Fetched(is_ended=True)
        return found

    def start(self, partition: int) -> int:
        """The start of one partition; see `bounds`."""
        return self.bounds((partition,))[partition].start

    def end(self, partition: int) -> int:
        """The end of one partition; see `bounds`."""
        return self.bounds((partition,))[partition].end

    def ends(self) -> list[int]:
        """The end of each partition, as `end` tells it; not all at one moment. For a reader that asks often: a log may
        make this cheaper than `bounds`."""
        found = self.bounds(range(self.partitions))
        return [found[partition].end for partition in range(self.partitions)]

    def ends_problem(self) -> str | None:
        """Why the end of a partition is only a lower bound: it has messages, or may have, that this process cannot show
        yet. None if all ends are exact. Ask before the ends are read: a bound may become exact at any moment."""
        return None

    def extents(self) -> list[tuple[int, int]]:
        """For each partition the first offset, and the offset behind the last visible message: for the lag of a group.
        In a table this includes rows that are not final, which `read` does not hand out yet."""
        found = self.bounds(range(self.partitions))
        return [(found[partition].start, found[partition].end) for partition in range(self.partitions)]

    def was_given_out(self, partition: int, offset: int) -> bool:
        """Whether a checkpoint may be here: every offset before it is that of a message that is or was there, or of a
        gap. False if the source counts anew, or is an older copy than the checkpoint."""
        return offset <= self.end(partition)

    @abstractmethod
    def offset_at(self, partition: int, timestamp: int) -> int:
        """The first offset whose message is of that time or later, in microseconds since 1970; the end if none is."""


class TopicLog(Source):
    """A topic of a log: a Source that can be appended to."""

    topic: Topic
    clock: Clock = SYSTEM
    """Whose `wall_time_us` appends are stamped with, and the age of what is stored is counted by."""
    warnings: Sequence[str] = ()
    """Of a handle that `Log.create_topic` has returned: what its caller should know, each as one sentence."""

    @property
    def local(self) -> TopicLog:
        """What this process serves by itself: of a cluster's topic the partitions that this broker owns."""
        return self

    def owners(self) -> dict[int, str]:
        """In a cluster: the address of the broker that owns each partition, if it has one. Otherwise empty."""
        return {}

    def refresh(self) -> None:
        """Have `topic` be the settings as they are now, if another process can have changed them."""

    def check_writable(self) -> None:
        """Raise NoWritePermission if it can be told, without writing, that this process may not append."""

    @abstractmethod
    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        """Store the batches of each partition in their order, durably, and return the outcome of each batch.

        The batches of one partition are stored together, so that either all of them are StoredAt or none is. A
        partition that fails changes nothing for the other partitions. The error of a batch that is NotStored is
        AppendFailed if a later try may work; UnknownProducer or SequenceGap if the origin is refused. MaybeStored has
        AppendUnknown. Nothing is resent inside of this call (W1).

        Raises only before anything is stored, for the whole call: InvalidRecord if a batch is damaged or names a
        partition that does not exist, TopicDeleted, HubMoved, NoWritePermission, Closed, UsedAfterFork. An interrupt
        (such as KeyboardInterrupt) leaves every outcome unknown.

        If this thread has a time limit (`pxrs.waiting.time_limit`), waits inside of this call end with it: what was not
        given to the disk or the server by then is NotStored, with AppendFailed; what has no answer is MaybeStored. A
        system call that hangs cannot be ended."""

    def append_each(self, appends: Sequence[Append], tell: Tell) -> None:
        """As `append`, but partitions that are answered late do not hold up what is known of the others: calls `tell`
        with the outcomes of partitions as soon as they are known, each partition once, from any thread. Raises as
        `append`; what it raises is the outcome of every partition that `tell` was not called for."""
        tell(by_partition(appends, self.append(appends)))

    @abstractmethod
    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        """Which start each partition may get by the topic's retention, at this time in microseconds. Removes nothing.

        unread: by partition, the offset from which on everything is kept."""

    @abstractmethod
    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        """Remove the messages before these offsets, by partition, as far as whole stored pieces lie before them; the
        new starts of the partitions that moved. A partition that fails keeps no other from being trimmed."""

    def glance(self) -> list[Bounds]:
        """The bounds of all partitions, for whoever looks at thousands of them: no file stays open afterwards, and the
        end of a partition that no process has opened since the machine started may be a lower bound."""
        found = self.bounds(range(self.partitions))
        return [found[partition] for partition in range(self.partitions)]

    def stored_bytes(self) -> list[int] | None:
        """How many bytes the messages of each partition take on the disk; None if this log does not know."""
        return None

    def retention_problem(self) -> str | None:
        """Of a topic that a server keeps: why its retention removes nothing there; None if nothing prevents it."""
        return None

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
    keeps_copies: bool = False
    """Whether copies of the messages are kept on several storage nodes (`Topic.write_quorum`)."""
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

    def topic_now(self, name: str) -> TopicLog:
        """As `topic`, but never by what this process saw some time ago, when a topic of this name may have been another
        one."""
        return self.topic(name)

    @abstractmethod
    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicLog:
        """Change settings of a topic, durably: the fields of `Topic` in ALTERABLE. Appends and retention use the new
        ones from now on, in every process. Raises UnknownTopic, and InvalidTopic if a setting cannot be changed."""

    @abstractmethod
    def delete_topic(self, name: str) -> str:
        """Remove a topic, also a damaged one; its id. Who has it open gets TopicDeleted. Raises UnknownTopic."""

    def check_place(self) -> None:  # noqa: B027 - a log in memory has none
        """Raise HubMoved if what this handle has open is not what is to be found at its address any more."""

    def identity(self, *, joins: bool) -> tuple[str, str] | None:
        """Of a log that a server keeps: the id and the place of its hub, as the server tells them; None if the hub has
        none. For every other log None: the hub's directory, if there is one, has a record (`pxrs.belonging`).

        joins: if no registry is on record for the hub, the server records its own. Raises WrongRegistry,
        RegistryUnavailable."""
        return None

    def check_topics(self) -> None:  # noqa: B027 - a log that is there has topics
        """Raise NoDirectory if this stands for the log of a hub that was opened without a directory."""

    def record_events(self, events: Sequence[bytes]) -> None:
        """Of a log that a server keeps: have the server store these events (`pxrs.events.Event.dump`) in its internal
        topics. Every other log has these topics itself. Raises NotPermitted, InvalidArgument, ReadFailed."""
        raise NotImplementedError(f"{self.url} is kept by no server")

    def finish_deletions(self) -> None:  # noqa: B027 - a log that deletes at once has none
        """Remove what deletions of topics that were cut short have left. Several processes may call it at once. What
        fails is logged, and tried again by the next call."""

    @abstractmethod
    def close(self) -> None: ...
