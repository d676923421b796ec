"""Reading a topic as a member of a group, from the user's side.

    for message in inbox:       # done when the next one is asked for
        handle(message)

The member's thread decides which partitions are here; the user's thread hands out their messages, one lane for each.
Before every message it asks whether the lane is still to be handed out and whether the lease's deadline has passed
(G8): a process that was stopped for a minute wakes up in the middle of this loop, and must not go on with what others
have taken over.

What is done is written down by the member's thread about once a second, when a partition is given up, and at the end;
`commit` does it at once. Reading ahead is bounded by `prefetch_bytes`, for all partitions together.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, Self

import pyarrow as pa

from pxrs import arguments, dropped
from pxrs.consumer.readers import Loop, Reading, Readings
from pxrs.consumer.runner import ON_ERROR, ErrorPolicy, Handler, Runner
from pxrs.errors import (
    CheckpointOutOfRange,
    Closed,
    CommitUnknown,
    ConsumerBusy,
    GroupUnavailable,
    InvalidGroup,
    MissingDependency,
    OffsetOutOfRange,
    OffsetTrimmed,
    OutcomeLost,
    PartitionLost,
    PartitionNotAssigned,
    PartitionsPaused,
    UsedAfterFork,
)
from pxrs.group.committing import CommitMore
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember, Timings
from pxrs.group.positions import check_start
from pxrs.group.records import Home
from pxrs.log.batch import Batch
from pxrs.log.contract import Source
from pxrs.log.messages import messages_of
from pxrs.model import Message, microseconds_of
from pxrs.producer.producer import Producer
from pxrs.registry.contract import Registry
from pxrs.registry.limit import time_limit

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

PREFETCH_BYTES_DEFAULT: Final = 8 << 20
RETRIES_MAX: Final = 1_000_000
Start = Literal["earliest", "latest"] | datetime
OnAssigned = Callable[[Mapping[int, int]], None]
"""Called with partitions that come: the offset at which reading begins, by partition."""
Callback = Callable[[Sequence[int]], None]
"""Called with the numbers of partitions that go."""


class Settling(Protocol):
    """A transaction of work queues, as far as a consumer knows it."""

    id: str
    was_doubted: bool

    def outcome(self) -> str: ...


class ConsumedBatch(NamedTuple):
    """What `batches` yields: records of one partition, with consecutive offsets."""

    topic: str
    partition: int
    offset: int
    records: pa.RecordBatch
    epoch: int
    offsets: pa.Int64Array | None = None
    """Of a source with gaps; else they follow `offset` one by one."""


class Consumer:
    """A member of a group. One thread iterates or polls; `ack`, `commit`, `pause` and the rest may come from any.

    A second thread that asks for messages meanwhile gets ConsumerBusy: see docs/groups.md, "Threads"."""

    def __init__(
        self,
        source: Source,
        registry: Registry,
        group: str,
        *,
        name: str | None = None,
        ack: Literal["auto", "manual"] = "auto",
        start: Start = "earliest",
        until: Literal["end"] | None = None,
        assignor: str = "sticky",
        lease_ttl: float | timedelta | None = None,
        handover_timeout: float | timedelta | None = None,
        progress_timeout: float | timedelta | None = None,
        commit_interval: float | timedelta | None = None,
        prefetch_bytes: int = PREFETCH_BYTES_DEFAULT,
        on_trimmed: Literal["error", "skip"] = "error",
        on_error: Literal["pause", "retry", "dead-letter", "raise"] = "pause",
        retries_max: int = 5,
        retry_pause: float | timedelta = 0.1,
        dead_letters: Callable[[], Producer] | None = None,
        on_assigned: OnAssigned | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
        topic_names: Callable[[], Mapping[str, str]] | None = None,
        home: Callable[[], Home | None] | None = None,
    ) -> None:
        """
        name:             shown by `describe`; by default the host's and the process's.
        ack:              "auto": a message is done when the next is asked for; "manual": when `ack` was called for it.
        start:            where a group begins that has no checkpoint: "earliest", "latest", or a time.
        until:            "end": stop where the topic ends now, instead of waiting for more.
        assignor:         "sticky" (fair shares, fewest moves), "range", "round-robin", or the name of an entry point
                          pxrs.assignors. All members of a group must have the same.
        lease_ttl:        how long after its last sign of life a member counts as dead (10 s).
        handover_timeout: how long finishing what is in hand here may delay a hand-over to another member (30 s).
        progress_timeout: how long one message may take before the member gives up its partitions (300 s).
        commit_interval:  how often what is done is written down (1 s).
        prefetch_bytes:   how much is read ahead, for all partitions together.
        on_trimmed:       what to do if retention has overtaken the group: raise, or skip to what is left.
        on_error:         what `run` does when a handler raises: "pause" its partition, "retry" it up to `retries_max`
                          times with pauses that double from `retry_pause` and then pause, send it to the topic
                          `dead_letters` ("dead-letter"; if that fails, pause), or "raise".
        on_assigned:      called with the partitions that come, before their first message is handed out: a mapping of
                          each partition to the offset at which reading begins there. This is the group's checkpoint;
                          of a partition that was to go elsewhere and stays after all, it is `position`.
        on_revoked:       called with the partitions that go, before they are released, also by `close`. `position` and
                          `committed` still have them.
        on_lost:          called with the partitions that were taken away, or given up with messages in hand, when that
                          is known. All three are called on another thread, and should be quick.
        topic_names:      gives the names of topics by their ids, to be shown; a hub knows those of its own.
        home:             gives the identity of the hub that the source is of, None if it is of none; raises if this
                          process may not join groups there. A hub gives its own.
        """
        arguments.choice(InvalidGroup, "ack", ack, ("auto", "manual"))
        arguments.choice(InvalidGroup, "until", until, ("end", None))
        arguments.choice(InvalidGroup, "on_trimmed", on_trimmed, ("error", "skip"))
        if name is not None:
            arguments.text(InvalidGroup, "name", name, "the member's name")
        if not isinstance(start, datetime):
            arguments.choice(InvalidGroup, "start", start, ("earliest", "latest"))
        elif start.tzinfo is None:
            raise InvalidGroup(f"start: the time {start} has no time zone; give one, such as UTC")
        prefetch_bytes = arguments.whole(InvalidGroup, "prefetch_bytes", prefetch_bytes, 1, 1 << 40)
        arguments.functions(
            InvalidGroup, on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost, topic_names=topic_names
        )
        arguments.functions(InvalidGroup, dead_letters=dead_letters)
        arguments.choice(InvalidGroup, "on_error", on_error, ON_ERROR)
        retries_max = arguments.whole(InvalidGroup, "retries_max", retries_max, 1, RETRIES_MAX)
        pause_s = arguments.seconds(InvalidGroup, "retry_pause", retry_pause, 0, arguments.DAY_S)
        self._policy = ErrorPolicy(on_error, retries_max, pause_s, dead_letters)
        self.topic, self.group = source.name, group
        self._source = source
        self._is_manual = ack == "manual"
        self._prefetch_bytes, self._skips_trimmed = prefetch_bytes, on_trimmed == "skip"
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._clock = registry.clock
        self._lock = threading.Lock()
        self._lanes: dict[int, Lane] = {}
        self._ready: dict[Lane, deque[Batch]] = {}
        """Read ahead."""
        self._version = 0
        """Rises whenever a waiter should look again."""
        self._turn = 0
        self._readings = Readings(group)
        """The calls that hand out messages now. Changed under `_lock`."""
        self._polled: Lane | None = None
        """What the last `poll` was given from."""
        self._polled_by: threading.Thread | None = None
        """The thread whose `poll` that was."""
        self._polled_before: set[Lane] = set()
        """The same of those before it, while a transaction of work queues has the checkpoint."""
        self._arriving: set[Lane] = set()
        """Lanes whose `on_assigned` callback has not returned yet; nothing of them may be handed out."""
        self._notices: deque[tuple[str, Sequence[Lane]]] = deque()
        """Callbacks that are due, in the order of what they tell: "assigned", "revoked" or "lost", and which lanes."""
        self._calling: int | None = None
        """The thread that is in a callback. It has the member's mutex, so there is at most one."""
        self._lost: dict[int, str] = {}
        """Partitions that were lost with something undone, and why, until `commit` has raised PartitionLost."""
        self._settling: Settling | None = None
        """The transaction of work queues that has the checkpoint of what was handed out, until it is over."""
        self._settled: dict[Lane, tuple[int, int]] = {}
        """How far that is, by lane, and how often the lane had been set elsewhere by then."""
        self._lost_in_hand: set[int] = set()
        """Partitions that were taken away with messages in hand, or waiting for a transaction, until more is asked
        for."""
        self._done_by: str | None = None
        """Such a one that was committed though its reply was lost, until more is handed out."""
        self._stopping = threading.Event()
        self._is_running = self._is_transactional = self._is_started = False
        self._hub: object = None
        """The hub that made this consumer. It closes its log and registry with its last reference, which is here."""
        self.skipped = 0
        """How many messages retention took before they were read; counted if `on_trimmed` is "skip"."""
        self._pid = os.getpid()
        self._is_closed = False
        timings = _timings(
            lease_ttl=lease_ttl,
            handover_timeout=handover_timeout,
            progress_timeout=progress_timeout,
            commit_interval=commit_interval,
        )
        self._ends = {p: source.end(p) for p in range(source.partitions)} if until == "end" else None
        self._member = GroupMember(
            registry,
            group,
            source,
            _Listener(self),
            start_of=functools.partial(_start_of, source, start),
            name=name,
            timings=timings,
            assignor=assignor,
            topic_names=topic_names,
            home=home,
            sees_all=self._ends is not None,
        )
        self._member.start()
        self._is_started = True

    # Reading.

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, in order within each partition. Ends only with `until="end"`."""
        clock, topic, is_manual = self._clock.now, self.topic, self._is_manual
        reading = Reading("a loop over its messages", is_loop=True)
        try:
            self._enter(reading)
            self._begin_reading()
            while (found := self._next(reading=reading)) is not None:
                lane, batch = found
                lease = self._member.lease
                if lease is None:
                    continue
                position, seeks = batch.base_offset, lane.seeks
                for message in messages_of(batch, topic, lane.partition, lane.epoch):
                    if lane.position != position:
                        break  # somebody has called `seek`
                    lane.handed_at = now = clock()
                    if is_manual:
                        lane.expect((message[2],))
                    # In hand first, then the look. Who stops the lane does it the other way round: one sees the other.
                    lane.position = position = message[2] + 1
                    if lane.is_halted or now >= lease.deadline or lane.seeks != seeks:
                        lane.position = lane.handed
                        self._retract(lane, min(lane.handed, message[2]))
                        break
                    lane.handed = position
                    yield message
                    self._done_by = None
                    if self._settling is not None and self._is_held(is_over=True):
                        continue
                    if not is_manual and lane.position == position:
                        lane.done = position
                else:
                    self._pass_gap(lane, position, batch)
                self._after(lane)
        finally:
            reading.is_over = True

    def poll(self, max_messages: int = 500, timeout: float | timedelta | None = None) -> list[Message]:
        """Up to so many messages of one partition; none if the time is up. They are done when this thread calls again.

        Until then, or until `commit`, other threads that ask for messages get ConsumerBusy; with ack="manual" threads
        may take turns. See docs/groups.md, "Threads"."""
        max_messages = arguments.whole(InvalidGroup, "max_messages", max_messages, 1)
        timeout_s = None if timeout is None else arguments.seconds(InvalidGroup, "timeout", timeout)
        reading = Reading("`poll`")
        try:
            self._enter(reading)
            return self._poll(reading, max_messages, timeout_s)
        finally:
            reading.is_over = True

    def _poll(self, reading: Reading, max_messages: int, timeout: float | None) -> list[Message]:
        if not self._is_held(is_over=True):
            self._finish_polled()
        elif self._polled is not None:
            self._polled_before.add(self._polled)
        until = None if timeout is None else time.monotonic() + timeout
        while (found := self._next(None if until is None else until - time.monotonic())) is not None:
            lane, batch = found
            messages: list[Message] = []
            for message in messages_of(batch, self.topic, lane.partition, lane.epoch):
                if len(messages) >= max_messages:
                    break
                messages.append(message)
            end = batch.next_offset if len(messages) == batch.records.num_rows else messages[-1].offset + 1
            if not self._hand_out(lane, batch.base_offset, end, batch):
                self._after(lane)
                continue
            if end < batch.next_offset:
                with self._lock:
                    if self._lanes.get(lane.partition) is lane:
                        self._ready.setdefault(lane, deque()).appendleft(batch)
            self._polled_by = reading.thread
            self._polled = lane  # last: what an interrupt keeps from the user comes again
            return messages
        return []

    def batches(self) -> Iterator[ConsumedBatch]:
        """The same as Arrow record batches, each done when the next is asked for."""
        return Loop("a loop over its batches", self._batches, self._check_step)

    def _batches(self, reading: Reading) -> Generator[ConsumedBatch, None, None]:
        try:
            self._enter(reading)
            self._begin_reading()
            while (found := self._next()) is not None:
                lane, batch = found
                if self._hand_out(lane, batch.base_offset, batch.next_offset, batch):
                    yield ConsumedBatch(
                        self.topic, lane.partition, batch.base_offset, batch.records, lane.epoch, batch.offsets
                    )
                    self._done_by = None
                    if not self._is_held(is_over=True) and not self._is_manual:
                        lane.done = lane.handed
                self._after(lane)
        finally:
            reading.is_over = True

    def transactions(self, engine: Engine, max_messages: int = 500) -> Iterator[tuple[list[Message], Connection]]:
        """Messages, each time with a connection whose transaction also writes their checkpoint (X20).

        See docs/transactions.md."""
        try:
            from pxrs.consumer.transactions import transactions
        except ImportError as error:
            raise MissingDependency("transactions need SQLAlchemy: pip install 'pxrs[sql]'") from error
        return transactions(self, engine, max_messages)

    def run(self, handler: Handler, threads: int = 1) -> None:
        """Call the handler with every message: partitions in parallel on so many threads, each in order.

        Returns when `stop` is called, or at the end with `until="end"`. Raises HandlerFailed if `on_error` says so, and
        PartitionsPaused if the end is reached but where a message that could not be handled holds its partition up."""
        self._check_usable()
        if self._is_manual:
            raise InvalidGroup("run counts a message as done when its handler returns: ack='manual' is not for it")
        reading = Reading("`run`")
        try:
            self._enter(reading)
            self._check_not_held()
            self._rewind()
            self._is_running = True
            try:
                Runner(self, handler, threads, self._policy, self._stopping).run()
            finally:
                self._stopping.clear()
                self._is_running = False
        finally:
            reading.is_over = True

    def stop(self) -> None:
        """Let `run` return when what is in hand is done; one that begins later returns at once.

        From any thread. A signal handler should leave it to one: it may have interrupted the code that this needs."""
        self._check_process()
        self._stopping.set()
        self._change()

    def ack(self, message: Message) -> None:
        """This message is done. In any order; the checkpoint is what is done without a gap. Raises PartitionLost."""
        self._check_process()
        if not self._is_manual or self._is_transactional:
            raise InvalidGroup("ack is for a consumer with ack='manual'; a transaction acknowledges by its COMMIT")
        if not isinstance(message, Message):
            raise InvalidGroup(f"{arguments.shown(message)} is no message that this consumer handed out")
        with self._lock:
            lane = self._lanes.get(message.partition)
            if lane is None or lane.epoch != message.epoch:
                raise PartitionLost(self.group, [message.partition])
            lane.ack(message.offset)
            is_leaving = lane.is_stopping
        if is_leaving and lane.is_drained:
            self._member.wake()

    def commit(self) -> None:
        """Write down what is done, now; all that was handed out counts as done unless `ack` is "manual".

        From any thread, and then every thread may read again. But in a callback, in a handler of `run`, and while
        another thread is in a loop or in `poll`, what is in hand stays undone: only that thread can say. Ends within
        the registry's `timeout`, callbacks aside. Raises PartitionLost if some of it is owned by others now, when the
        rest is written; CommitUnknown if it may have been written; GroupUnavailable if it was not."""
        is_callback = self._calling == threading.get_ident()
        if not is_callback:
            self._check_usable()
            with time_limit(self.registry.timeout_s):
                self._check_not_held()
            self._finish_all()
        lost: dict[int, str] = {}
        try:
            self._member.commit()
        except PartitionLost as error:
            lost = dict.fromkeys(error.partitions, error.reason)
        except (CommitUnknown, GroupUnavailable) as error:
            if error.partitions or not self._lost:
                raise
            # Nothing is left to be written: what was done is lost already, which is told below.
        with self._lock:  # also what was lost before: the member's thread may have been the first to learn of it
            if not is_callback:  # that is for the one who reads
                lost = {**self._lost, **lost}
                self._lost.clear()
        if lost:
            raise PartitionLost(self.group, sorted(lost), "; ".join(sorted(set(lost.values()))))

    @property
    def registry(self) -> Registry:
        """Where its group is kept."""
        return self._member._registry

    def commit_with(self, write: CommitMore) -> dict[str, int]:
        """`commit` in one with something else, for the transactions of work queues; see `GroupMember.commit_with`."""
        self._check_settles()
        return self._member.commit_with(self._finish_if_here, write)

    def _check_settles(self) -> None:
        self._check_usable()
        if self._is_manual or self._is_running or self._is_transactional:
            raise InvalidGroup(
                "a checkpoint in a transaction counts what was handed out: read by a loop or `poll`, with ack='auto'"
            )
        if self._calling == threading.get_ident():
            raise InvalidGroup("a checkpoint in a transaction is for the thread that reads, not for a callback")

    def partitions_in_hand(self) -> int:
        """How many have messages that were handed out and are not done."""
        with self._lock:
            return sum(lane.done < lane.handed for lane in self._lanes.values())

    def settle_with(self, transaction: Settling) -> None:
        """What was handed out by now is done when this transaction is committed, and comes again if it is rolled back.
        What is handed out later is for the next call."""
        self._check_settles()
        if self._settling is not transaction:
            if self._is_held():
                raise InvalidGroup("another transaction that is still open has the checkpoint of what was handed out")
            if self._done_by is not None:
                raise InvalidGroup(
                    f"what was handed out is done: transaction {self._done_by}, whose reply was lost, was committed; "
                    "read on"
                )
        with self._lock:
            self._readings.check_alone(threading.current_thread())  # it alone can say what is done
            self._settled = {lane: (lane.handed, lane.seeks) for lane in self._lanes.values()}
        self._settling = transaction

    def _is_held(self, *, is_over: bool = False) -> bool:
        """Whether what was handed out waits for a transaction. If that is over by now, what it says is so.

        is_over: the reader is through with what was handed out, and asks for more."""
        transaction = self._settling
        if transaction is None:
            return False
        try:
            became = transaction.outcome()
        except OutcomeLost:  # if it was committed after all, the next checkpoint is refused, and the right one read
            became = "rolled back"
        if became == "open":
            return True
        self._settling = None
        if became == "committed":
            if is_over and self._readings.has_loop:
                self._finish_all()
            else:
                self._finish_settled()
            self._done_by = transaction.id if transaction.was_doubted and not is_over else None
        else:
            self._lost_in_hand.clear()
            self._rewind()
        self._settled = {}
        return False

    def _check_not_held(self) -> None:
        """Raise InvalidGroup if what was handed out waits for a transaction. To hand it out again, as `run` would, or
        to count it as done would both break that transaction's promise."""
        if self._is_held():
            raise InvalidGroup("a transaction has the checkpoint of what was handed out: commit that, or roll it back")

    def _enter(self, reading: Reading) -> None:
        """Register a call that hands out messages. Raises ConsumerBusy, see `pxrs.consumer.readers`."""
        self._check_usable()
        with self._lock:
            self._readings.check_alone(reading.thread)
        if self._polled is not None and self._polled_by is not reading.thread:
            self._is_held()  # a transaction that has ended by now has decided about what was polled
        with self._lock:
            if self._is_polled_by_another(reading.thread):
                assert self._polled_by is not None
                ended = "" if self._polled_by.is_alive() else "(which has ended) "
                raise ConsumerBusy(
                    self.group,
                    self._polled_by.name,
                    f"{ended}has messages in hand that its `poll` returned: call `commit` if they are done, or close "
                    "the consumer to have them handed out again; with ack='manual' any thread may poll",
                )
            self._readings.add(reading)

    def _is_polled_by_another(self, thread: threading.Thread) -> bool:
        """Under the lock: whether what another thread's `poll` returned is neither done nor lost."""
        if self._is_manual or self._polled is None or self._polled_by is thread:
            return False
        polled = self._polled_before | {self._polled}
        return any(lane.done < lane.handed and self._lanes.get(lane.partition) is lane for lane in polled)

    def _check_step(self, reading: Reading, is_under_way: bool) -> None:
        """Raise ConsumerBusy unless this thread may take the next step of a loop.

        is_under_way: another thread takes a step right now."""
        me = threading.current_thread()
        if reading.thread is me and not is_under_way:
            return
        if is_under_way or not self._is_manual or self._is_transactional:
            raise ConsumerBusy(
                self.group,
                reading.thread.name,
                f"is in {reading.what}: its iterator is for that thread alone; with ack='manual' threads take turns",
            )
        reading.thread = me

    def _begin_reading(self) -> None:
        if not self._is_held():
            self._rewind()

    def _finish_if_here(self) -> None:
        """What the transaction has is done, if all of it is still owned; else none of it may be written with it."""
        with self._lock:
            lost, self._lost_in_hand = sorted(self._lost_in_hand), set()
            reasons = {self._lost.pop(number, "") for number in lost}
        if lost:
            raise PartitionLost(self.group, lost, "; ".join(sorted(filter(None, reasons))))
        self._finish_settled()

    def _finish_settled(self) -> None:
        with self._lock:
            lanes = [lane for lane in self._lanes.values() if lane in self._settled]
            for lane in lanes:
                handed, seeks = self._settled[lane]
                if lane.seeks == seeks:
                    lane.done = max(lane.done, handed)
        for lane in lanes:
            self._after(lane)

    # What is here. From any thread, in callbacks too, and without a call of the registry; empty after `close`.

    @property
    def assignment(self) -> list[int]:
        """The partitions that this consumer owns and hands out, in rising order; also those that are paused. One that
        is being handed over to another member is not here any more."""
        self._check_process()
        with self._lock:
            return sorted(lane.partition for lane in self._lanes.values() if not lane.is_stopping)

    @property
    def position(self) -> dict[int, int]:
        """The offset from which the next message will be handed out, by partition. A copy of this moment.

        It has the partitions of `assignment`, and those that are being handed over until they are released, so that
        `on_revoked` finds them here."""
        return {lane.partition: lane.handed for lane in self._owned()}

    @property
    def committed(self) -> dict[int, int]:
        """The last checkpoint that is known to be written, by partition: the offset at which another member would go
        on. It has the partitions of `position`.

        After a `seek` back it is larger than `position`. If the reply to a commit was lost it may be older than what is
        in the registry, until the next commit."""
        checkpoints = self._member.checkpoints()
        return {lane.partition: checkpoints[lane] for lane in self._owned() if lane in checkpoints}

    @property
    def lag(self) -> dict[int, int]:
        """How many messages are not done yet, by partition: those in hand, and those up to the end of the topic. It has
        the partitions of `position`. What `describe` shows is larger by what is done and not committed yet.

        Asks the log for its end, which is cheap; for a table in a database it is two queries. Of a source with gaps,
        such as a table, it is an upper bound: ids that are not there, and those of other partitions, are counted too,
        and so are rows that can be seen and are not final yet. Raises what the source raises, such as TopicDeleted."""
        done = [(lane.partition, lane.done) for lane in self._owned()]
        extents = self._source.extents() if done else []
        return {number: max(0, extents[number][1] - offset) for number, offset in done}

    def _owned(self) -> list[Lane]:
        self._check_process()
        with self._lock:
            return sorted(self._lanes.values(), key=lambda lane: lane.partition)

    @property
    def name(self) -> str:
        return self._member.name

    @property
    def timings(self) -> Timings:
        return self._member.timings

    @property
    def is_away(self) -> bool:
        """Whether its partitions were given up, because a handler makes no progress; it comes back when that does."""
        return self._member.is_away

    def pause(self, *partitions: int) -> None:
        """Hand out nothing of these, or of all that are here, until `resume`. They stay owned.

        Raises PartitionNotAssigned if one of them is not here; then none is paused."""
        self._set_paused(partitions, True)

    def resume(self, *partitions: int) -> None:
        """Hand out these again, or all that are here. Raises PartitionNotAssigned if one of them is not here."""
        self._set_paused(partitions, False)

    def seek(self, partition: int, offset: int) -> None:
        """Go on reading here. The checkpoint never goes back by it: reset the group for that.

        Raises OffsetOutOfRange, PartitionNotAssigned if the partition is not here."""
        self._check_process()
        partition = arguments.partition(InvalidGroup, self.topic, partition, self._source.partitions)
        offset = arguments.whole(InvalidGroup, "offset", offset, 0)
        self._check_assigned({partition})  # before its bounds are asked for, which may take a while
        if not self._source.has_gaps:
            start, end = self._source.start(partition), self._source.end(partition)
            if not start <= offset <= end:
                raise OffsetOutOfRange(f"{self.topic}/{partition}", offset, end)
        with self._lock:
            self._check_assigned({partition})
            lane = self._lanes[partition]
            self._ready.pop(lane, None)
            lane.seek(offset)
        self._change()

    # Lanes and what is read ahead of them.

    def _next(self, timeout: float | None = None, reading: Reading | None = None) -> tuple[Lane, Batch] | None:
        """A lane, and messages from its position on. None when the time is up, or all is read with `until="end"`.

        reading: of a loop without a `Loop` around it, to be checked here."""
        if reading is not None:
            self._check_step(reading, False)
        self._done_by = None
        if self._settling is None:  # what was in hand is over
            with self._lock:
                self._lost_in_hand.clear()
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_usable()
            self._member.check()
            version = self._version
            if self._member.is_away:
                self._member.come_back()
            lanes = self._readable()
            for lane in lanes:
                batch = self._take(lane)
                if batch is not None:
                    return lane, batch
            if self._is_at_end():
                return None
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            positions = {lane.partition: lane.position for lane in lanes}
            self._source.wait(positions, left, lambda v=version: self._version != v)  # type: ignore[misc]

    def _next_for(
        self, busy: Collection[Lane], count: int, is_over: Callable[[], bool], version: int
    ) -> list[tuple[Lane, Batch]] | None:
        """Up to so many lanes that are not busy, with their messages. None at the end with `until="end"`.

        version: `_version` as it was before `busy` was read. A lane that has ceased to be busy since then has raised
                 `_version`, so that this call does not wait for something else to happen."""
        self._check_usable()
        self._member.check()
        if self._member.is_away and not any(lane.is_lost for lane in busy):
            self._member.come_back()
        # By number: one that was lost and came back waits for the handler that still has a message of it.
        numbers = {lane.partition for lane in busy}
        lanes = [lane for lane in self._readable() if lane.partition not in numbers] if count > 0 else []
        found: list[tuple[Lane, Batch]] = []
        for lane in lanes:
            batch = self._take(lane) if len(found) < count else None
            if batch is not None:
                found.append((lane, batch))
        if found:
            return found
        if not busy and self._is_at_end():
            return None
        positions = {lane.partition: lane.position for lane in lanes}
        self._source.wait(positions, None, lambda: self._version != version or is_over())
        return []

    def _readable(self) -> list[Lane]:
        """Every lane that may be handed out, each time another one first."""
        if self._clock.now() >= self._member.deadline:
            return []
        ends = self._ends
        with self._lock:
            lanes = [lane for lane in self._lanes.values() if not lane.is_halted and lane not in self._arriving]
            if ends is not None:  # more may follow behind the end that was asked for: nobody waits for that
                lanes = [lane for lane in lanes if lane.position < ends[lane.partition]]
            self._turn += 1
        at = self._turn % len(lanes) if lanes else 0
        return lanes[at:] + lanes[:at]

    def _take(self, lane: Lane) -> Batch | None:
        with self._lock:
            ready = self._ready.get(lane)
            batch = ready.popleft() if ready else None
        if batch is None:
            batches = self._read(lane)
            if not batches:
                return None
            batch = batches[0]
            with self._lock:
                if self._lanes.get(lane.partition) is lane:
                    self._ready[lane] = deque(batches[1:])
        position = lane.position
        if not batch.base_offset <= position < batch.next_offset:
            with self._lock:
                self._ready.pop(lane, None)  # read before a `seek`
            return None
        batch = batch.within(position, self._ends[lane.partition] if self._ends is not None else None)
        if batch.records.num_rows:
            return batch
        self._pass_gap(lane, position, batch)
        return None

    def _pass_gap(self, lane: Lane, position: int, batch: Batch) -> None:
        """Nothing more lies before the batch's end: what is done up to here is done up to there."""
        if batch.offsets is None or lane.position != position or lane.is_stopping or batch.next_offset <= position:
            return
        with self._lock:  # an `ack` that comes now is for what was before the gap, or for what is behind it
            if lane.is_drained:
                lane.position = lane.handed = lane.done = batch.next_offset
            else:
                lane.position = lane.handed = batch.next_offset
                if self._settled.get(lane) == (position, lane.seeks):
                    self._settled[lane] = batch.next_offset, lane.seeks
        self._version += 1  # there may be more behind it: look again before any wait

    def _read(self, lane: Lane) -> list[Batch]:
        with self._lock:
            share = max(1, self._prefetch_bytes // max(1, len(self._lanes)))
        try:
            return self._source.read(lane.partition, lane.position, share)
        except OffsetTrimmed as error:
            if not self._skips_trimmed:
                raise CheckpointOutOfRange(
                    f"group {self.group} is at offset {lane.position} of {self.topic}/{lane.partition}, and retention "
                    f"has removed what is before {error.first_offset}; reset the group, or consume with "
                    "on_trimmed='skip' to accept the loss"
                ) from error
            self.skipped += error.first_offset - lane.position
            lane.seek(error.first_offset)
            return []
        except OffsetOutOfRange as error:
            raise self._beyond_end(lane, error.end) from error

    def _check_reachable(self, lane: Lane) -> None:
        """Raise CheckpointOutOfRange if the source cannot have had the messages before the lane's position.

        That the position lies behind `end` proves it for a topic alone: the last rows of a table may have been handled
        and removed since, or other processes may know more of them to be final. Its `read` can tell."""
        position = lane.position
        if position <= self._source.end(lane.partition):
            return
        try:
            self._source.read(lane.partition, position, 1)
        except OffsetOutOfRange as error:
            raise self._beyond_end(lane, error.end) from error

    def _beyond_end(self, lane: Lane, end: int) -> CheckpointOutOfRange:
        return CheckpointOutOfRange(
            f"group {self.group} is at offset {lane.position} of {self.topic}/{lane.partition}, which ends at {end}; "
            "is this the same log? Reset the group if it is"
        )

    def _hand_out(self, lane: Lane, offset: int, end: int, batch: Batch | None = None) -> bool:
        """Take them in hand, unless the lane is not to be handed out; the order of steps is that of `__iter__`."""
        seeks = lane.seeks
        if lane.position != offset:
            return False
        if self._is_manual and batch is not None:
            lane.expect(number for number in _offsets(batch) if number < end)
        lane.handed_at = now = self._clock.now()
        lane.position = end
        if lane.is_halted or now >= self._member.deadline or lane.seeks != seeks:
            lane.position = lane.handed
            self._retract(lane, min(lane.handed, offset))
            return False
        lane.handed = end
        return True

    def _retract(self, lane: Lane, offset: int) -> None:
        with self._lock:  # others may acknowledge what came before
            lane.retract(offset)

    def _after(self, lane: Lane) -> None:
        """What was in hand is done, or was not handed out: a lane that is to go can go."""
        if lane.is_stopping and lane.is_drained:
            self._member.wake()

    def _finish_polled(self) -> None:
        """What the last `poll` gave is done, and what a loop has in hand that goes on; what one left with is not."""
        if self._readings.has_loop:
            self._finish_all()
            return
        if self._polled is not None and not self._is_manual:
            for lane in self._polled_before | {self._polled}:
                lane.done = lane.handed
                self._after(lane)
        self._rewind()

    def _finish_all(self) -> None:
        """All that was handed out is done, unless another thread is being handed messages: that one can say."""
        if self._is_manual or self._is_running:
            return
        with self._lock:  # all of it: another thread's `poll` begins before this, or after
            if self._readings.of_another(threading.current_thread()) is not None:
                return
            lanes = list(self._lanes.values())
            for lane in lanes:
                lane.done = lane.handed
        for lane in lanes:
            self._after(lane)

    def _rewind(self) -> None:
        """A loop that was left has left its message undone: it comes again, unless `commit` was called."""
        self._polled = self._polled_by = None
        self._polled_before.clear()
        if self._is_manual or self._is_running:
            return
        with self._lock:
            left = [lane for lane in self._lanes.values() if not lane.is_drained]
            for lane in left:
                self._ready.pop(lane, None)
                lane.seek(lane.done)
        for lane in left:
            self._after(lane)

    def _is_at_end(self) -> bool:
        if self._ends is None:
            return False
        with self._lock:
            mine = dict(self._lanes)
        for partition, lane in mine.items():  # lanes behind the end that was asked for are not read: see `_readable`
            if lane.position > self._ends[partition]:
                self._check_reachable(lane)
        short = [lane for partition, lane in mine.items() if not lane.is_lost and lane.position < self._ends[partition]]
        if not all(lane.is_failed for lane in short):
            return False
        if not self._member.are_of_others(number for number in range(self._source.partitions) if number not in mine):
            return False
        if short:  # nothing here will move them on
            raise PartitionsPaused(self.group, sorted(lane.partition for lane in short))
        return True

    def _set_paused(self, partitions: Iterable[int], is_paused: bool) -> None:
        self._check_process()
        count = self._source.partitions
        chosen = {arguments.partition(InvalidGroup, self.topic, number, count) for number in partitions}
        with self._lock:
            self._check_assigned(chosen)
            for number in chosen or set(self._lanes):
                if not self._lanes[number].is_failed:
                    self._lanes[number].is_paused = is_paused
        self._change()

    def _check_assigned(self, partitions: set[int]) -> None:
        missing = sorted(partitions - self._lanes.keys())
        if missing:
            raise PartitionNotAssigned(self.group, missing, sorted(self._lanes))

    def _change(self) -> None:
        self._version += 1
        self._source.wake()

    # What the member tells, on its thread.

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        with self._lock:
            for lane in lanes:
                self._lanes[lane.partition] = lane
            self._arriving.update(lanes)
        if lanes:
            self._notices.append(("assigned", lanes))
        self._change()

    def lane_revoked(self, lane: Lane) -> None:
        with self._lock:
            self._ready.pop(lane, None)
        self._change()
        self._notices.append(("revoked", [lane]))

    def group_changed(self) -> None:
        self._change()

    def lane_resumed(self, lane: Lane) -> None:
        with self._lock:
            self._arriving.add(lane)
        self._notices.append(("assigned", [lane]))

    def lane_released(self, lane: Lane) -> None:
        self._forget(lane)
        if lane.has_undone and not self._is_closed:  # given up in the middle of it
            self._note_lost(lane)
            self._notices.append(("lost", [lane]))

    def lane_lost(self, lane: Lane) -> None:
        self._forget(lane)
        if lane.has_undone and not self._is_closed:
            self._note_lost(lane)
        self._notices.append(("lost", [lane]))

    def call_back(self) -> None:
        """Call the callbacks that are due. What one of them causes by calling this consumer is told after it."""
        if self._calling is not None:  # this thread's own: it has the member's mutex. The loop below goes on after it
            return
        while self._notices:
            what, lanes = self._notices.popleft()
            try:
                self._call(what, lanes)
            finally:
                if what == "assigned":
                    with self._lock:
                        self._arriving.difference_update(lanes)
                    self._change()

    def _note_lost(self, lane: Lane) -> None:
        with self._lock:
            self._lost[lane.partition] = lane.lost_reason
            if lane.done < lane.handed:
                self._lost_in_hand.add(lane.partition)

    def _forget(self, lane: Lane) -> None:
        with self._lock:
            self._ready.pop(lane, None)
            if self._lanes.get(lane.partition) is lane:
                del self._lanes[lane.partition]
        self._change()

    def member_failed(self) -> None:
        self._change()

    def _call(self, what: str, lanes: Sequence[Lane]) -> None:
        self._calling = threading.get_ident()
        try:
            if what == "assigned" and self._on_assigned is not None:
                self._on_assigned({lane.partition: lane.handed for lane in lanes})
            elif what == "revoked" and self._on_revoked is not None:
                self._on_revoked([lane.partition for lane in lanes])
            elif what == "lost" and self._on_lost is not None:
                self._on_lost([lane.partition for lane in lanes])
        except Exception as error:  # noqa: BLE001 - raised where the user reads
            self._member.fail_later(error)
        finally:
            self._calling = None

    # The end.

    def close(self) -> None:
        """Write down what is done, release the partitions, leave the group. A message in hand is not done.

        Ends within the registry's `timeout`, callbacks aside. Raises PartitionLost, CommitUnknown or GroupUnavailable
        if what is done could not be written, and what has ended this consumer before, such as an error of a callback,
        if no other call has raised it; the consumer is closed all the same. May be called again, from any thread: each
        call returns when it is over. In a callback it is only begun."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        self._stopping.set()
        with self._lock:
            for lane in self._lanes.values():
                lane.is_stopping = True
        try:
            if self._calling == threading.get_ident():
                self._member.close_later()
            else:
                self._member.close()
        finally:
            self._change()

    def __del__(self) -> None:
        if not getattr(self, "_is_started", False) or self._is_closed:
            return
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        name, self._is_closed = repr(self), True
        dropped.apart(_leave, self._member, self._hub)
        dropped.warn(name, "its member leaves the group; what was in hand is not done, and goes to others", self)

    def _check_usable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise Closed(f"the consumer of {self.topic} in group {self.group} was closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the consumer of {self.topic} was made before a fork: make one in the child")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"pxrs: leaving the group {self.group} failed too: {failure}")

    def __repr__(self) -> str:
        return f"<Consumer of {self.topic} in group {self.group}{' closed' if self._is_closed else ''}>"


class _Listener:
    """What the member calls, on its thread. It holds the consumer weakly, so that a consumer that nobody has any more
    can be collected, though its member's thread still runs: the consumer's finalizer then ends that thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = weakref.ref(consumer)

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.lanes_assigned(lanes)

    def lane_revoked(self, lane: Lane) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.lane_revoked(lane)

    def lane_released(self, lane: Lane) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.lane_released(lane)

    def lane_lost(self, lane: Lane) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.lane_lost(lane)

    def lane_resumed(self, lane: Lane) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.lane_resumed(lane)

    def call_back(self) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.call_back()

    def group_changed(self) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.group_changed()

    def member_failed(self) -> None:
        if (consumer := self._consumer()) is not None:
            consumer.member_failed()


def _leave(member: GroupMember, hub: object) -> None:
    """Close the member of a dropped consumer. `hub` is kept until then, for it closes the registry when it goes."""
    member.close()


def _start_of(source: Source, start: Start, partition: int, first: int) -> int:
    """Where a group without a checkpoint begins. Not before `first`: retention may be about to remove what lies before
    it. This is no method because the member keeps it, and must not keep the consumer."""
    check_start(source, partition, first)
    if start == "earliest":
        return max(first, source.start(partition))
    if start == "latest":
        return source.end(partition)
    assert isinstance(start, datetime)
    return max(first, source.offset_at(partition, microseconds_of(start)))


def _timings(**given: float | timedelta | None) -> Timings:
    """Those that are None have their defaults. How short each may be, `Timings` knows."""
    return Timings(
        **{
            name: arguments.seconds(InvalidGroup, name, value, most=arguments.DAY_S)
            for name, value in given.items()
            if value is not None
        }
    )


def _offsets(batch: Batch) -> Iterable[int]:
    if batch.offsets is not None:
        return batch.offsets.to_pylist()  # type: ignore[no-any-return]
    return range(batch.base_offset, batch.next_offset)
