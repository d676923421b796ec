"""`GroupMember`: one member of a group, as a consumer or a streaming query uses it.

This module is the surface: what the user's threads call. The parts of a member, which share a `Session`:

    lifecycle.py    pure: the states of a member, and the error that has ended it
    session.py      its lease, its incarnation, its watch, and the mutex of its threads
    rounds.py       its recurring work: look, act, commit; pure: when the next round begins
    ownership.py    what the protocol tells of partitions, passed on to the consumer; whether a handler is stuck
    pauses.py       partitions that a failed message holds up
    leaving.py      the last commit, the releases and the end of the lease
    protocol.py     what the member says to the registry, as generators without a thread or a clock

"The member's thread" is the one that runs a round just then. Handlers run on other threads, and share only the fields
of their lanes with it, so a slow handler delays no round.

Callbacks of the user may call back into the member: `commit`, `close`, `seek`, `pause`. So no callback runs in the
middle of a procedure of the protocol. The consumer takes note of each event at once (`MemberEvents`), and calls the
user's callbacks in `call_back`, which is called when a procedure is over and the protocol's state is consistent.

Time: `commit` and `close` each end within the registry's `timeout_s`, the user's callbacks aside, also if the member's
thread holds the mutex while it waits for the store.

On failure:
- The store cannot be reached, or the hub's own record cannot be read: rounds are tried again, with pauses. What is
  owned stays usable until the lease's own deadline, which every hand-out checks for itself (G8, X12).
- The lease is lost: everything that is owned is lost at once, and the member joins again as a new incarnation (X11).
- A handler makes no progress for `progress_timeout`: the member gives everything up and leaves (X13). It joins again
  when the handler returns.
- Any other error is fatal, also one that a callback of the user raises: it is raised on the user's threads, and the
  member leaves. Callbacks that are due when one raises are still called, and what is under way is finished.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from pxrs.errors import GroupUnavailable, LeaseExpired, OutcomeUnknown, PartitionLost, RegistryUnavailable
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.failures import Failure
from pxrs.group.assign import assignor_named
from pxrs.group.checkpoints import FencedWrite
from pxrs.group.committing import CommitMore
from pxrs.group.events import MemberEvents
from pxrs.group.incarnation import TAKEN
from pxrs.group.lane import Lane
from pxrs.group.leaving import leave, not_committed
from pxrs.group.lifecycle import Lifecycle
from pxrs.group.ownership import Ownership
from pxrs.group.pauses import Pauses
from pxrs.group.projection import Names, projection_of
from pxrs.group.records import Home, Keys
from pxrs.group.reporting import Reporter
from pxrs.group.rounds import Rounds
from pxrs.group.session import Busy, MemberSettings, Session
from pxrs.group.timings import Timings
from pxrs.log.contract import Source
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease
from pxrs.registry.limit import time_limit
from pxrs.scheduler import Next

_END_S_MIN: Final = 1.0
"""How long a member that could not join may at least take to end its lease."""
_AWAY: Final = "it left the group because a handler makes no progress, and rejoins when the handler returns"


class GroupMember:
    """Made by a consumer, started once, closed once."""

    def __init__(
        self,
        registry: Registry,
        group: str,
        source: Source,
        events: MemberEvents,
        *,
        start_of: Callable[[int, int], int],
        name: str | None = None,
        timings: Timings | None = None,
        assignor: str = "sticky",
        is_alone: bool = False,
        topic_names: Names | None = None,
        home: Callable[[], Home | None] | None = None,
        sees_all: bool = False,
        recorder: Recorder = LOGGED_ONLY,
    ) -> None:
        """home: gives the identity of the hub that the source is of, and raises if its groups may not be joined from
        here; it is called before every join and every checkpoint. An error of the disk is taken for an outage.
        recorder: keeps the events of this member.
        sees_all: read and watch all members and targets, so that `Session.are_meant_for_others` can be asked."""
        assignor_named(assignor)
        self.keys = Keys(group)
        self.timings = timings or Timings()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        find_home = (lambda: None) if home is None else home
        settings = MemberSettings(
            self.keys, self.name, source, start_of, find_home, self.timings, assignor, is_alone, sees_all
        )
        self._events = events
        self.reporter = Reporter(group, self.name, source, recorder)
        """Records what happens to this member."""
        self._ownership = Ownership(events, self.reporter)
        self.session = Session(registry, settings, self._ownership, events, self.reporter)
        """What the member has in the registry, and what it knows of its partitions."""
        self._pauses = Pauses(self.session, self._ownership, events)
        self._lifecycle = Lifecycle()
        self._projection = projection_of(registry, self.keys, topic_names)
        self._rounds = Rounds(self.session, self._ownership, self._pauses, self._lifecycle, events, self._projection)

    def start(self) -> None:
        """Join. Raises GroupUnavailable if the registry does not answer in time."""
        session = self.session
        timeout_s, began = session.registry.timeout_s, time.monotonic()
        with session.mutex:
            try:
                session.join(self._lifecycle.closing)
                self._rounds.pace.set_commit(session.registry.clock.now())
                session.scheduled = session.registry.scheduler.add(f"pxrs-member-{self.keys.group}", self._run)
            except BaseException as error:
                self._lifecycle.closing.set()  # if the work was added before an interrupt (KeyboardInterrupt)
                if session.lease is not None:
                    with time_limit(max(_END_S_MIN, began + timeout_s - time.monotonic())):
                        session.lease.close()
                if isinstance(error, RegistryUnavailable | OutcomeUnknown | LeaseExpired):
                    what = f"{self.name} could not join and owns no partitions"
                    raise GroupUnavailable(self.keys.group, (), what, str(error)) from error
                raise

    def _run(self) -> Next | None:
        """The member's recurring work, which the registry's scheduler calls."""
        following = self._rounds.run()
        if following is None and self._lifecycle.closes_itself:
            self._end_later()
        return following

    # What is known. From any thread, without the mutex.

    @property
    def deadline(self) -> float:
        """From this moment on, on the registry's clock, nothing may be handed out."""
        lease = self.session.lease
        return lease.deadline if lease is not None else float("-inf")

    @property
    def lease(self) -> Lease | None:
        return self.session.lease

    @property
    def incarnation(self) -> str | None:
        protocol = self.session.protocol
        return protocol.incarnation if protocol is not None else None

    @property
    def is_settled(self) -> bool:
        """Whether the leader has written a target for this member, and the consumer was given all that it names."""
        return not self._ownership.unannounced and self.session.has_whole_target()

    @property
    def has_due(self) -> bool:
        """Whether `commit` has something to do: there are checkpoints to write, or the member is not in the group."""
        protocol = self.session.protocol
        return protocol is None or bool(protocol.due())

    @property
    def is_away(self) -> bool:
        """Whether the member has left the group because a handler makes no progress."""
        return self._lifecycle.is_away

    def check(self) -> None:
        """Raise what has ended this member. For the user's threads: `close` does not raise it again."""
        self._lifecycle.check()

    # What wakes the member.

    def wake(self) -> None:
        """Have a round begin soon: a lane is drained, or a handler has returned. Returns at once."""
        self.session.wake()

    def fail_later(self, error: Exception) -> None:
        """A callback has raised in the middle of something that is to be finished first: the next round ends the
        member."""
        self._lifecycle.note(error)
        self.wake()

    def come_back(self) -> None:
        """The handler that made no progress has returned: the member joins again."""
        if self._lifecycle.is_away:
            self._lifecycle.is_away = False
            self.wake()

    # Procedures of the protocol.

    def procedure(self, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """See `Session.procedure`."""
        return self.session.procedure(timeout_s)

    @contextmanager
    def _procedure_in_time(self) -> Iterator[None]:
        try:
            with self.procedure(self.session.registry.timeout_s):
                yield
        except Busy as busy:
            raise GroupUnavailable(self.keys.group, (), "no checkpoint was written", str(busy)) from busy

    def check_home(self) -> None:
        """Raise WrongRegistry, HubMoved or DamagedFrame if no checkpoint may be written from here any more, and
        RegistryUnavailable if that is not known now."""
        self.session.settings.home()

    def commit(self) -> None:
        """Write the checkpoints of what is done now, within the registry's `timeout_s`.

        Raises PartitionLost for what is owned no more, after the rest is written; CommitUnknown or GroupUnavailable for
        what is not confirmed in time."""
        session = self.session
        protocol = session.protocol
        timeout_s = session.registry.timeout_s
        until = time.monotonic() + timeout_s
        try:
            with self.procedure(timeout_s):
                self.check()
                self.check_home()
                protocol = session.protocol
                if protocol is None:
                    raise PartitionLost(self.keys.group, [], _AWAY)
                with time_limit(until - time.monotonic()):
                    lost = session.commit(protocol, protocol.due())
        except (RegistryUnavailable, OutcomeUnknown) as error:
            raise not_committed(session, error, protocol) from error
        if lost:
            self.wake()  # a lost partition may still be in this member's target, and free
            raise PartitionLost(self.keys.group, session.settings.source.named(lost), TAKEN)

    def commit_with(self, finish: Callable[[], None], write: CommitMore) -> dict[str, int]:
        """Write the checkpoints of what `finish` counts as done, in one commit with something else, all or nothing.

        finish:  counts messages in hand as done. Undone if the commit fails, so that no other commit writes it
        write:   makes the commit, given what to expect and to put"""
        with self._procedure_in_time():
            self.check()
            self.check_home()
            protocol = self.session.protocol
            if protocol is None:
                raise PartitionLost(self.keys.group, [], _AWAY)
            before = {number: (each.lane, each.lane.done, each.lane.seeks) for number, each in protocol.held.items()}
            finish()
            # Only the partitions that `finish` has moved: the caller has checked that one commit can hold so many.
            moved = [number for number, (lane, done, _) in before.items() if lane.done > done]
            try:
                return self.session.drive(protocol.commit_with(moved, write))
            except BaseException:
                for lane, done, seeks in before.values():
                    if lane.seeks == seeks:
                        lane.done = done
                raise

    def read_checkpoint_again(self, lane: Lane) -> FencedWrite | None:
        """Read the checkpoint of a lane again after a lost reply. Returns what a write of it would expect now; None if
        the lane turned out to be lost. The caller is in `procedure`."""
        session, protocol = self.session, self.session.protocol
        if protocol is None or session.holding(lane) is None or not session.drive(protocol.read_again(lane.partition)):
            return None
        return protocol.checkpoint_write([lane.partition])

    def lose(self, lane: Lane) -> None:
        """A checkpoint that was written in the user's own database transaction was refused by the fence: the lane is
        lost."""
        with self.procedure():
            protocol = self.session.protocol
            if protocol is not None and self.session.holding(lane) is not None:
                protocol.lose(lane.partition)

    def pause(self, lane: Lane, offset: int, failure: Failure) -> None:
        """Write that a message could not be handled; its partition is held up until an administrator decides (X14)."""
        with self.procedure():
            self._pauses.pause(lane, offset, failure)
        self.wake()

    # The end.

    def close(self) -> None:
        """Write what is done, release everything, leave. In this order: a release needs the member's lease.

        Ends within the registry's `timeout_s`, the user's callbacks aside. Raises PartitionLost, CommitUnknown or
        GroupUnavailable if what is done could not be written, and what has ended the member before if no call has
        raised it. A second call waits for the first, and finishes it if an interrupt has ended that."""
        session, lifecycle = self.session, self._lifecycle
        lifecycle.closing.set()
        until = time.monotonic() + session.registry.timeout_s
        if session.scheduled is not None:
            session.scheduled.end(session.registry.timeout_s)
        try:
            with self.procedure(until - time.monotonic()):
                self._end(until)
                error = lifecycle.take_unraised()
        except Busy as busy:
            # The thread that has the mutex waits for the store. A thread that gets the mutex after it leaves the group.
            name = f"pxrs-member-{self.keys.group}-end"
            threading.Thread(target=self._end_later, name=name, daemon=True).start()
            raise not_committed(session, busy, session.protocol, is_last=True) from busy
        if error is not None:
            raise error

    def close_later(self) -> None:
        """Close after the callback in which this is called: the member's own work leaves the group."""
        self._lifecycle.closes_itself = True
        self._lifecycle.closing.set()
        self.wake()

    def _end_later(self) -> None:
        with self.procedure():
            try:
                self._end()
            except Exception as error:  # noqa: BLE001 - raised by the next call of `close`
                self.fail_later(error)

    def _end(self, until: float | None = None) -> None:
        """Leave, once. until: when it should be over, on `time.monotonic`; by default after the registry's time."""
        if self._lifecycle.is_closed:
            return
        try:
            leave(self.session, self._ownership, self._events, until, may_fail=self._lifecycle.error is not None)
        finally:
            self.session.close_watch()
            if self._projection is not None:
                self._projection.close()
            self._lifecycle.is_closed = True
