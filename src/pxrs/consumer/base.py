"""`BaseConsumer`: reads topics as a member of a group. The base class of `Consumer` and `TopicsConsumer`.

    for message in inbox:       # a message is done when the next one is asked for
        handle(message)

This module is the surface: it checks arguments, builds the parts and passes calls on to them. The package's own page
(`pxrs.consumer`) says which part does what, and which thread holds which lock.
"""

from __future__ import annotations

import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self

from pxrs import arguments, dropped
from pxrs.consumer import loops
from pxrs.consumer.counts import watch_owned
from pxrs.consumer.events import Callback, Callbacks, EventRelay, GroupEvents, OnAssigned
from pxrs.consumer.hand_out import HandOut
from pxrs.consumer.lifetime import Lifetime
from pxrs.consumer.loops import ConsumedBatch
from pxrs.consumer.partitions import P, PartitionNames
from pxrs.consumer.readers import Reading
from pxrs.consumer.runner import Handler, Runner
from pxrs.consumer.settings import Start, check_choices, error_policy, start_of, timings_of
from pxrs.consumer.settling import QueueTransaction
from pxrs.consumer.states import Event
from pxrs.errors import InvalidGroup, MissingDependency, OffsetOutOfRange
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.group.committing import CommitMore
from pxrs.group.member import GroupMember
from pxrs.group.records import Home
from pxrs.log.contract import Source
from pxrs.model import Message
from pxrs.producer.producer import Producer
from pxrs.registry.contract import Registry

if TYPE_CHECKING:
    from pxrs.registry.sql.borrowed import Connection, Engine

__all__ = ["BaseConsumer", "Callback", "ConsumedBatch", "OnAssigned", "Start"]

PREFETCH_BYTES_DEFAULT: Final = 8 << 20


class BaseConsumer(ABC, Generic[P]):
    """A member of a group. One thread iterates or polls; `ack`, `commit`, `pause` and the rest may come from any
    thread.

    A second thread that asks for messages meanwhile gets ConsumerBusy: see docs/groups.md, "Threads".

    `P` is what the user calls a partition: see `Consumer` and `TopicsConsumer`, and `partitions.py`."""

    # Over the limit: users find every operation here, with its documentation. Each method checks its arguments and
    # calls the part that does the work; the package's page says which part that is.

    _events_type: type[GroupEvents[Any]] = GroupEvents
    """The class that receives the events of the member. Tests that record assignments with their epochs override it."""

    @classmethod
    @abstractmethod
    def _names_of(cls, source: Source) -> PartitionNames[P]:
        """Converts between the source's partition numbers and the names that this class shows. Raises InvalidGroup if
        the source is for the other class."""

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
        on_assigned: OnAssigned[P] | None = None,
        on_revoked: Callback[P] | None = None,
        on_lost: Callback[P] | None = None,
        topic_names: Callable[[], Mapping[str, str]] | None = None,
        home: Callable[[], Home | None] | None = None,
        recorder: Recorder = LOGGED_ONLY,
        place: Sequence[str] = (),
    ) -> None:
        """
        name:             shown by `describe`; by default the host's and the process's.
        ack:              "auto": a message is done when the next is asked for; "manual": when `ack` was called for it.
        start:            where a group without a checkpoint begins: "earliest", "latest", or a time.
        until:            "end": stop where the topic ends now, instead of waiting for more.
        assignor:         "sticky" (fair shares, fewest moves), "range", "round-robin", or the name of an entry point
                          pxrs.assignors. All members of a group must have the same.
        lease_ttl:        how long after its last renewal of its lease a member counts as dead (10 s).
        handover_timeout: how long finishing what is in hand here may delay a hand-over to another member (30 s).
        progress_timeout: how long one message may take before the member gives up its partitions (300 s).
        commit_interval:  how often checkpoints are written (1 s).
        prefetch_bytes:   how much is read ahead, for all partitions together.
        on_trimmed:       what to do if retention has removed messages that the group has not read: raise, or skip to
                          what is left.
        on_error:         what `run` does when a handler raises: "pause" its partition, "retry" it up to `retries_max`
                          times with pauses that double from `retry_pause` and then pause, send it to the topic
                          `dead_letters` ("dead-letter"; if that fails, pause), or "raise".
        on_assigned:      called with the partitions that come, before their first message is handed out: a mapping of
                          each partition to the offset at which reading begins there. This is the group's checkpoint;
                          for a partition that was to move to another member and stays after all, it is `position`.
        on_revoked:       called with the partitions that go, before they are released, also by `close`. `position` and
                          `committed` still have them.
        on_lost:          called with the partitions that were taken away, or given up with messages in hand, when that
                          is known. All three are called on another thread, and should be quick.
        topic_names:      gives the names of topics by their ids, to be shown; a hub passes those of its own topics.
        home:             gives the identity of the hub that the source belongs to, None if it belongs to none; raises
                          if this process may not join groups there. A hub gives its own.
        recorder:         keeps the events of the member; a hub gives its own.
        place:            the options that name the hub on the command line, such as --at, for messages; a hub gives
                          its own.
        """
        # Over the limit: 28 lines are the signature, and the rest builds the parts in the order in which
        # they depend on each other. `ConsumerOptions` repeats the signature, and a test compares the two.
        check_choices(ack, until, on_trimmed, name, start)
        prefetch_bytes = arguments.whole(InvalidGroup, "prefetch_bytes", prefetch_bytes, 1, 1 << 40)
        names: PartitionNames[P] = self._names_of(source)
        self._names: PartitionNames[P] = names
        callbacks = Callbacks(on_assigned, on_revoked, on_lost)
        arguments.functions(InvalidGroup, **callbacks._asdict(), topic_names=topic_names)
        self._policy = error_policy(on_error, retries_max, retry_pause, dead_letters)
        timings = timings_of(
            lease_ttl=lease_ttl,
            handover_timeout=handover_timeout,
            progress_timeout=progress_timeout,
            commit_interval=commit_interval,
        )
        bounds = source.bounds(range(source.partitions)) if until == "end" else {}
        ends = {number: each.end for number, each in bounds.items()} if until == "end" else None
        relay = EventRelay()
        self._member = member = GroupMember(
            registry,
            group,
            source,
            relay,
            start_of=functools.partial(start_of, source, start),
            name=name,
            timings=timings,
            assignor=assignor,
            topic_names=topic_names,
            home=home,
            sees_all=ends is not None,
            recorder=recorder,
        )
        self.topic, self.group, self.name, self.timings = source.name, group, member.name, member.timings
        self.topics = tuple(part.name for part in source.parts)
        """The names of the topics or sources that are read."""
        self.registry = registry
        """The registry that has the group."""
        self._source, self._lifetime = source, Lifetime(source.name, group)
        self._hand_out = HandOut(
            source,
            names,
            member,
            registry.clock,
            self._lifetime,
            is_manual=ack == "manual",
            prefetch_bytes=prefetch_bytes,
            skips_trimmed=on_trimmed == "skip",
            ends=ends,
            place=place,
        )
        self._lanes, self._settling = self._hand_out.lanes, self._hand_out.settling
        self._read_ahead, self._changes = self._hand_out.read_ahead, self._hand_out.changes
        self._events = self._events_type(self._hand_out, names, callbacks)
        self.hub: object = None
        """The hub that made this consumer. The hub closes its log and registry when nothing refers to it any more."""
        self._is_started = False
        relay.connect(self._events)
        member.start()
        self._is_started = True
        watch_owned(self)

    # Reading.

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, in order within each partition. Ends after `stop`, and with `until="end"`."""
        return loops.messages(self._hand_out, self)

    def poll(self, max_messages: int = 500, timeout: float | timedelta | None = None) -> list[Message]:
        """Up to `max_messages` messages of one partition; none if the time is up, or after `stop`. They are done when
        this thread calls again.

        Until then, or until `commit`, other threads that ask for messages get ConsumerBusy; with ack="manual" threads
        may take turns. See docs/groups.md, "Threads"."""
        max_messages = arguments.whole(InvalidGroup, "max_messages", max_messages, 1)
        timeout_s = None if timeout is None else arguments.seconds(InvalidGroup, "timeout", timeout)
        return loops.poll(self._hand_out, max_messages, timeout_s)

    def batches(self) -> Iterator[ConsumedBatch]:
        """Messages as Arrow record batches, each done when the next is asked for."""
        return loops.batches(self._hand_out, self)

    def transactions(self, engine: Engine, max_messages: int = 500) -> Iterator[tuple[list[Message], Connection]]:
        """Batches of messages, each with a connection whose transaction also writes their checkpoint (X20).

        See docs/transactions.md."""
        try:
            from pxrs.consumer.transactions import transactions
        except ImportError as error:
            raise MissingDependency("transactions need SQLAlchemy: pip install 'pxrs[sql]'") from error
        return transactions(self._hand_out, engine, max_messages, self)

    def run(self, handler: Handler, threads: int = 1) -> None:
        """Call the handler with every message: partitions in parallel on `threads` threads, the messages of each in
        order.

        Returns when `stop` was called and the running handlers have returned, or at the end with `until="end"`. Raises
        HandlerFailed if `on_error` says so, and PartitionsPaused if all other partitions are read to their end and some
        are paused at a message that could not be handled."""
        settling = self._settling
        self._lifetime.check_usable()
        settling.check_possible(Event.RUN)
        reading = Reading("`run`")
        try:
            settling.enter(reading)
            settling.begin(Event.RUN)
            try:
                Runner(self._hand_out, handler, threads, self._policy).run()
            finally:
                settling.end(Event.RUN_ENDS)
        finally:
            reading.is_over = True

    def stop(self) -> None:
        """Hand out nothing more, for good. From any thread, in a callback, and in the handler of a signal; a second
        call does nothing.

        Loops end normally when they ask for the next message: their last message is done, because it was asked for.
        `poll` returns at once, with an empty list; what the call before returned is done. `run` returns when the
        running handlers have returned. Calls that begin later end at once too. The consumer stays a member of its group
        and owns its partitions until `close`: call that, or `commit`, next. To read again, make another consumer."""
        self._lifetime.check_process()
        self._lifetime.is_stopped = True
        # Only the main thread runs the handlers of signals, and may hold any lock when one interrupts it.
        if threading.current_thread() is threading.main_thread():
            dropped.apart(self._changes.announce)
        else:
            self._changes.announce()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called: a loop around `poll` ends when this is true."""
        return self._lifetime.is_stopped

    # What is done.

    def ack(self, message: Message) -> None:
        """Count this message as done. In any order; the checkpoint is the first offset that is not acknowledged. Raises
        PartitionLost."""
        self._lifetime.check_process()
        self._settling.ack(message)

    def commit(self) -> None:
        """Write the checkpoints now; all that was handed out counts as done unless `ack` is "manual".

        From any thread, and then every thread may read again. But in a callback, in a handler of `run`, and while
        another thread is in a loop or in `poll`, what is in hand stays undone: only that thread can tell. Ends within
        the registry's `timeout`, callbacks aside. Raises PartitionLost if some of it is owned by others now, when the
        rest is written; CommitUnknown if it may have been written; GroupUnavailable if it was not."""
        is_callback = self._events.is_in_callback
        if not is_callback:
            self._lifetime.check_usable()
        self._settling.commit(is_callback=is_callback)

    # For transactions of work queues.

    def partitions_in_hand(self) -> int:
        """How many partitions have messages that were handed out and are not done."""
        return self._settling.partitions_in_hand()

    def enlist_in(self, transaction: QueueTransaction) -> None:
        """Let a transaction decide about what was handed out so far: it is done when the transaction is committed, and
        handed out again if the transaction is rolled back. What is handed out later is not part of it."""
        self._lifetime.check_usable()
        self._settling.check_possible(Event.CHECKPOINT)
        if self._events.is_in_callback:
            raise InvalidGroup("a checkpoint in a transaction is for the thread that reads, not for a callback")
        self._settling.hold(transaction)

    def commit_with(self, write: CommitMore) -> dict[str, int]:
        """Write the checkpoint of what a transaction has (`enlist_in`), in one commit with what `write` adds."""
        self._lifetime.check_usable()
        self._settling.check_possible(Event.CHECKPOINT)
        if self._events.is_in_callback:
            raise InvalidGroup("a checkpoint in a transaction is for the thread that reads, not for a callback")
        return self._settling.commit_with(write)

    # The owned partitions. These may be called from any thread, also in callbacks; they make no call of the registry
    # and are empty after `close`.

    @property
    def assignment(self) -> list[P]:
        """The partitions that this consumer owns and hands out, in rising order; also those that are paused. One that
        is being handed over to another member is not here any more."""
        self._lifetime.check_process()
        return self._names.named(lane.partition for lane in self._lanes.owned() if not lane.is_stopping)

    def _by_partition(self, found: Mapping[int, int]) -> dict[P, int]:
        """The same values, keyed by the user's names of the partitions instead of the source's numbers."""
        return dict(zip(self._names.named(found), found.values(), strict=True))

    @property
    def position(self) -> dict[P, int]:
        """The offset from which the next message will be handed out, by partition. A copy of this moment.

        It has the partitions of `assignment`, and those that are being handed over until they are released, so that
        `on_revoked` finds them here."""
        self._lifetime.check_process()
        return self._by_partition({lane.partition: lane.handed for lane in self._lanes.owned()})

    @property
    def committed(self) -> dict[P, int]:
        """The last checkpoint that is known to be written, by partition: the offset at which another member would go
        on. It has the partitions of `position`.

        After a `seek` back it is larger than `position`. If the reply to a commit was lost it may be older than what is
        in the registry, until the next commit."""
        self._lifetime.check_process()
        checkpoints = self._member.session.checkpoints()
        owned = [lane for lane in self._lanes.owned() if lane in checkpoints]
        return self._by_partition({lane.partition: checkpoints[lane] for lane in owned})

    @property
    def lag(self) -> dict[P, int]:
        """How many messages are not done yet, by partition: those in hand, and those up to the end of the topic. It has
        the partitions of `position`. What `describe` shows is larger by what is done and not committed yet.

        Reads the ends of the partitions, which is cheap for a topic; for a table in a database it takes two queries. Of
        a source with gaps, such as a table, it is an upper bound: ids that are not there, and those of other
        partitions, are counted too, and so are rows that can be seen and are not final yet. Raises what the source
        raises, such as TopicDeleted."""
        self._lifetime.check_process()
        done = [(lane.partition, lane.done) for lane in self._lanes.owned()]
        extents = self._source.extents() if done else []
        return self._by_partition({number: max(0, extents[number][1] - offset) for number, offset in done})

    @property
    def skipped(self) -> int:
        """How many messages retention removed before they were read; counted if `on_trimmed` is "skip"."""
        return self._read_ahead.skipped

    @property
    def is_away(self) -> bool:
        """Whether the member has given up its partitions because a handler makes no progress. The member joins again
        when the handler returns."""
        return self._member.is_away

    @property
    def is_in_callback(self) -> bool:
        """Whether the calling thread is inside a callback of this consumer."""
        return self._events.is_in_callback

    @property
    def problem(self) -> str | None:
        """What holds up the member, which goes on trying: an outage of the registry, a full disk. None if nothing."""
        return self._member.session.problem

    # Which messages come next.

    def pause(self, *partitions: P) -> None:
        """Hand out no messages of these partitions, or of all that are owned, until `resume`. They stay owned.

        Raises PartitionNotAssigned if one of them is not owned; then none is paused."""
        self._set_paused(partitions, True)

    def resume(self, *partitions: P) -> None:
        """Hand out messages of these partitions again, or of all that are owned. Raises PartitionNotAssigned if one of
        them is not owned."""
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: tuple[P, ...], is_paused: bool) -> None:
        self._lifetime.check_process()
        self._lanes.set_paused([self._names.checked(each) for each in partitions], is_paused)
        self._changes.announce()

    def seek(self, partition: P, offset: int) -> None:
        """Hand out this partition from this offset on. The checkpoint does not go back by it: reset the group for that.

        Raises OffsetOutOfRange, and PartitionNotAssigned if this consumer does not own the partition."""
        self._lifetime.check_process()
        number = self._names.checked(partition)
        offset = arguments.whole(InvalidGroup, "offset", offset, 0)
        self._lanes.check_assigned([number])  # before the call of `bounds`, which may be slow
        part, place = self._source.place(number)
        if not part.has_gaps:
            start, end = part.bounds((place,))[place]
            if not start <= offset <= end:
                raise OffsetOutOfRange(f"{part.name}/{place}", offset, end)
        with self._lanes.lock:
            self._lanes.check_assigned([number])
            lane = self._lanes[number]
            self._read_ahead.discard(lane)
            lane.seek(offset)
        self._changes.announce()

    # The end.

    def close(self) -> None:
        """Write the checkpoints, release the partitions, leave the group. A message in hand is not done.

        Ends within the registry's `timeout`, callbacks aside. Raises PartitionLost, CommitUnknown or GroupUnavailable
        if what is done could not be written, and what has ended this consumer before, such as an error of a callback,
        if no other call has raised it; the consumer is closed all the same. May be called again, from any thread: each
        call returns when it is over. In a callback it is only begun."""
        if self._lifetime.is_forked:
            return
        self._lifetime.is_closed = True
        self._lanes.stop()
        try:
            if self._events.is_in_callback:
                self._member.close_later()
            else:
                self._member.close()
        finally:
            self._changes.announce()

    def __del__(self) -> None:
        if not getattr(self, "_is_started", False) or self._lifetime.is_closed:
            return
        if self._lifetime.is_forked or sys.is_finalizing():
            return
        name, self._lifetime.is_closed = repr(self), True
        dropped.apart(_leave, self._member, self.hub)
        dropped.warn(name, "its member leaves the group; what was in hand is not done, and goes to others", self)

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
        closed = " closed" if self._lifetime.is_closed else ""
        return f"<{type(self).__name__} of {self.topic} in group {self.group}{closed}>"


def _leave(member: GroupMember, hub: object) -> None:
    """Close the member of a dropped consumer. `hub` is referred to until then, because a hub that nothing refers to
    closes its registry."""
    member.close()
