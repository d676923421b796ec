"""A member of a group: the recurring work that looks at the group, performs what the protocol says, and commits.

The work runs on any change of the group and at certain moments, on threads that all members of an open registry share
(`Registry.scheduler`), never on two of them at once. "The member's thread" below is the one that runs it just then.
Handlers run on other threads and share only the fields of their lanes with the member's thread, so a slow handler
delays no member. A slow callback occupies one of the shared threads while it runs.

Callbacks of the user's may call back into the member: `commit`, `close`, `seek`, `pause`. So none of them runs in the
middle of a procedure of the protocol. The listener takes note of what happens at once, and calls the user's callbacks
in `call_back`, which this module calls when a procedure is over and the protocol's state is consistent.

Time: `commit` and `close` each end within the registry's `timeout_s`, the user's callbacks aside, also if the member's
thread holds the mutex while it waits for the store.

On failure:
- The store cannot be reached, or the hub's own record cannot be read: try again, with pauses; what is owned stays
  usable until the lease's own deadline, which every hand-out checks for itself (G8, X12).
- The lease is lost: everything here is lost at once, and the member joins again as a new incarnation (X11).
- A handler makes no progress for `progress_timeout`: the member gives everything up and leaves (X13); it joins again
  when the handler comes back.
- Anything else is fatal, also what a callback of the user's raises: it is raised in the user's thread, and the member
  leaves. Callbacks that are due when one raises are still called, and what is under way is finished.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from pxrs import arguments
from pxrs.errors import (
    Closed,
    CommitUnknown,
    Conflict,
    DamagedFrame,
    GroupError,
    GroupUnavailable,
    HubMoved,
    InvalidGroup,
    LeaseExpired,
    LogError,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryUnavailable,
    name_partitions,
)
from pxrs.failures import Failure
from pxrs.group.assign import assignor_named
from pxrs.group.checkpoints import FencedWrite, Holding
from pxrs.group.committing import CommitMore
from pxrs.group.foreign import foreign_of
from pxrs.group.incarnation import LEASE_ENDED, RELEASED, TAKEN
from pxrs.group.lane import Lane
from pxrs.group.projection import Names, projection_of
from pxrs.group.protocol import MemberProtocol, rearmed
from pxrs.group.records import Checkpoint, Home, Keys, Member, Paused, partition_of
from pxrs.limited_log import Outage
from pxrs.log.contract import Source
from pxrs.registry.contract import Registry
from pxrs.registry.lease import LEASE_TTL_MIN, Lease
from pxrs.registry.limit import time_limit
from pxrs.registry.steps import Steps, drive
from pxrs.registry.watch import Watch
from pxrs.scheduler import Next, Scheduled
from pxrs.waiting import Subscription

_logger = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_TTL_DEFAULT: Final = 10.0
HANDOVER_TIMEOUT_DEFAULT: Final = 30.0
PROGRESS_TIMEOUT_DEFAULT: Final = 300.0
COMMIT_INTERVAL_DEFAULT: Final = 1.0
_RETRY_S: Final = (0.05, 1.0)
"""The first and the longest pause after a turn that failed, or that did not come to rest."""
_LOOKS_MAX: Final = 10
"""How often a member looks without a pause while there is more to do, before it looks at the rest of its duties."""
_AT_ONCE: Final = float("-inf")
"""A moment that has passed on every clock."""
_TURN_S_MIN: Final = 0.001
"""The pause before a duty that is due already, so that a fault which leaves it due takes no whole processor."""
_STARTS_WAIT_S: Final = 0.5
"""How long a member that waits for the group's first checkpoints sleeps at most before it asks whether it is closed."""
_END_S_MIN: Final = 1.0
"""How long a member that could not join may at least take to end its lease."""


@dataclass(frozen=True, slots=True)
class Timings:
    """In seconds."""

    lease_ttl: float = LEASE_TTL_DEFAULT
    """How long after its last sign of life a member counts as dead."""
    handover_timeout: float = HANDOVER_TIMEOUT_DEFAULT
    """How long this member may take to finish what it has in hand before a partition is taken from it."""
    progress_timeout: float | None = PROGRESS_TIMEOUT_DEFAULT
    """How long a handler may take for one message before its member gives up its partitions."""
    commit_interval: float = COMMIT_INTERVAL_DEFAULT
    """How often what is done is written down."""

    def __post_init__(self) -> None:
        arguments.seconds(InvalidGroup, "lease_ttl", self.lease_ttl, LEASE_TTL_MIN, arguments.DAY_S)
        for name in ("handover_timeout", "progress_timeout", "commit_interval"):
            value = getattr(self, name)
            if value is not None or name != "progress_timeout":
                arguments.seconds(InvalidGroup, name, value, 0, arguments.DAY_S, above=True)
        if self.lease_ttl < LEASE_TTL_MIN:
            raise InvalidGroup(
                f"lease_ttl is {self.lease_ttl!r}: no store grants a lease for less than {LEASE_TTL_MIN} s"
            )


class Listener(Protocol):
    """The consumer's side, called by the thread that has the member's mutex, mostly the member's own.

    All but `call_back` are called in the middle of something: they change the listener's own state, and call neither
    the member nor code of the user's."""

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None: ...

    def lane_revoked(self, lane: Lane) -> None: ...

    def lane_released(self, lane: Lane) -> None: ...

    def lane_lost(self, lane: Lane) -> None: ...

    def lane_resumed(self, lane: Lane) -> None: ...

    def group_changed(self) -> None: ...

    def call_back(self) -> None:
        """Call the user's callbacks for what was told since the last time. They may call the member."""

    def member_failed(self) -> None:
        """`GroupMember.check` raises from now on."""


class _Busy(RegistryUnavailable):
    """Another thread has held the member's mutex for all the time of this call."""


class GroupMember:
    """Made by a consumer, started once, closed once."""

    def __init__(
        self,
        registry: Registry,
        group: str,
        source: Source,
        listener: Listener,
        *,
        start_of: Callable[[int, int], int],
        name: str | None = None,
        timings: Timings | None = None,
        assignor: str = "sticky",
        is_alone: bool = False,
        topic_names: Names | None = None,
        home: Callable[[], Home | None] | None = None,
        sees_all: bool = False,
    ) -> None:
        """home: gives the identity of the hub that the source is of, and raises if its groups may not be joined from
        here; it is asked before every join and every checkpoint. An error of the disk is taken for an outage.
        sees_all: read and watch all members and targets, so that `are_meant_for_others` can be asked."""
        assignor_named(assignor)
        self.keys = Keys(group)
        self.timings = timings or Timings()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        self._registry, self._source, self._listener = registry, source, listener
        self._start_of, self._assignor, self._is_alone, self._sees_all = start_of, assignor, is_alone, sees_all
        self._find_home = (lambda: None) if home is None else home
        self._former: set[str] = set()
        """Incarnations of this member that are over, and may be listed until the store has noticed."""
        self._clock = registry.clock
        self._mutex = threading.RLock()
        """Held while the protocol or a callback runs: by the member's thread, or by a commit on the user's."""
        self._lease: Lease | None = None
        self._protocol: MemberProtocol | None = None
        self._watch: Watch | None = None
        self._subscription: Subscription | None = None
        """Has `wake` called when `_watch` tells of a change."""
        self._watched: frozenset[str] = frozenset()
        """The keys and folders that `_watch` covers."""
        self._fresh: list[Lane] = []
        """Assigned, and not yet given to the consumer."""
        self._projection = projection_of(registry, self.keys, topic_names)
        fields = {"group": group, "member": self.name}
        self._outage = Outage(_logger, f"group {group}, member {self.name}", extra=fields)
        """Logs what keeps the member's thread from its work, such as a store that is full or cannot be reached."""
        self._commits_at = 0.0
        self._told: object = None
        self._adrift: list[Lane] = []
        """Lost with a message in hand, whose handler has not returned."""
        self._unwritten: dict[Lane, Paused] = {}
        """Held up by a message that could not be handled, which the store has not been told yet."""
        self._is_away = False
        self._closing = threading.Event()
        """Set when `close` is called: the member's thread ends."""
        self._is_closed = False
        self._closes_itself = False
        """It was closed in a callback, in the middle of something: its thread leaves when that is over."""
        self._error: BaseException | None = None
        """What has ended this member."""
        self._untold: BaseException | None = None
        """An error that was raised on the member's thread or in a callback, until `check` or `close` has raised it."""
        self._scheduled: Scheduled | None = None
        """The member's recurring work, on threads that all members of this registry share; None before `start`."""
        self._retry_s = _RETRY_S[0]
        """The pause after the next round of work that fails."""

    # For the consumer.

    def start(self) -> None:
        """Join. Raises GroupUnavailable if the registry does not answer in time."""
        timeout_s = self._registry.timeout_s
        began = time.monotonic()
        with self._mutex:
            try:
                self._join()
                self._commits_at = self._clock.now() + self.timings.commit_interval
                self._scheduled = self._registry.scheduler.add(f"pxrs-member-{self.keys.group}", self._work)
            except BaseException as error:
                self._closing.set()  # if it was the interrupt of a thread that runs already
                if self._lease is not None:
                    with time_limit(max(_END_S_MIN, began + timeout_s - time.monotonic())):
                        self._lease.close()
                if isinstance(error, RegistryUnavailable | OutcomeUnknown | LeaseExpired):
                    what = f"{self.name} could not join, and owns nothing"
                    raise GroupUnavailable(self.keys.group, (), what, str(error)) from error
                raise

    @contextmanager
    def procedure(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the mutex for procedures of the protocol, then call the callbacks that these have caused.

        timeout_s: how long to wait for the mutex. Raises RegistryUnavailable after it."""
        if not self._mutex.acquire(blocking=False):
            with self.blocking():  # the thread that has the mutex may be in a callback of the user
                is_acquired = self._mutex.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            if not is_acquired:
                raise _Busy("another call or a callback of this member was under way all the time")
        try:
            try:
                yield
            finally:
                self._listener.call_back()
        finally:
            self._mutex.release()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Entered around what may take any time, such as a callback of the user: on a thread that members share, it
        does not delay the others."""
        scheduled = self._scheduled
        with nullcontext() if scheduled is None else scheduled.blocking():
            yield

    @property
    def deadline(self) -> float:
        """From this moment on, on the registry's clock, nothing may be handed out."""
        lease = self._lease
        return lease.deadline if lease is not None else float("-inf")

    @property
    def lease(self) -> Lease | None:
        return self._lease

    def checkpoint(self, lane: Lane) -> tuple[Checkpoint, int] | None:
        """What was read after the claim, or written since, and the version of the owner's key; None if it is lost."""
        with self._mutex:
            holding = self._protocol.held.get(lane.partition) if self._protocol is not None else None
            return None if holding is None or holding.lane is not lane else (holding.checkpoint, holding.version)

    def checkpoints(self) -> dict[Lane, int]:
        """The offset of the last checkpoint that is known to be written, of each lane that is owned.

        Without the mutex, which the member's thread may hold for as long as the store does not answer: each checkpoint
        is replaced as a whole, and `held` is copied in one step."""
        protocol = self._protocol
        return {} if protocol is None else {each.lane: each.checkpoint.offset for each in protocol.held.copy().values()}

    @property
    def is_settled(self) -> bool:
        """Whether the leader has written a target for this member, and all that the target names is here."""
        protocol = self._protocol
        seen = protocol.snapshot if protocol is not None else None
        if protocol is None or seen is None or self._fresh or protocol.incarnation not in seen.targets:
            return False
        target, _ = seen.target(protocol.incarnation)
        held = protocol.held
        return all(number in held for number in target.numbers(protocol.member.topic))

    def are_meant_for_others(self, partitions: Iterable[int]) -> bool:
        """Whether each of these was meant for another member that was there, when this one looked last. Only a member
        that `sees_all` can tell."""
        protocol = self._protocol
        seen = protocol.snapshot if protocol is not None else None
        if protocol is None or seen is None or protocol.incarnation not in seen.targets:
            return False
        meant = seen.meant_for()
        owners = (meant.get((protocol.member.topic, number)) for number in partitions)
        return all(owner not in (None, protocol.incarnation) for owner in owners)

    @property
    def incarnation(self) -> str | None:
        return self._protocol.incarnation if self._protocol is not None else None

    @property
    def registry(self) -> Registry:
        """Where the group is kept."""
        return self._registry

    # For checkpoints that are written in a transaction of the user's own database.

    def holding(self, lane: Lane) -> Holding | None:
        """The member's record of a lane, None if the lane is owned no more. Its fields change under the mutex."""
        protocol = self._protocol
        holding = protocol.held.get(lane.partition) if protocol is not None else None
        return None if holding is None or holding.lane is not lane else holding

    def check_home(self) -> None:
        """Raise WrongRegistry, HubMoved or DamagedFrame if no checkpoint may be written from here any more, and
        RegistryUnavailable if that cannot be told now."""
        self._home()

    def read_checkpoint_again(self, lane: Lane) -> FencedWrite | None:
        """Read the checkpoint of a lane again after a lost reply. Returns what a write of it would expect now; None if
        the lane turned out to be lost. The caller is in `procedure`."""
        protocol = self._protocol
        if protocol is None or self.holding(lane) is None or not self._drive(protocol.read_again(lane.partition)):
            return None
        return protocol.checkpoint_write([lane.partition])

    def check(self) -> None:
        """Raise what has ended this member. For the user's threads: what was raised here, `close` does not raise."""
        if self._error is None:
            self._error = self._untold
        if self._error is not None:
            if self._untold is self._error:
                self._untold = None
            raise self._error

    def fail_later(self, error: Exception) -> None:
        """A callback has raised, in the middle of something that is to be finished first."""
        if self._untold is None:
            self._untold = error
        self.wake()

    def wake(self) -> None:
        """Have the member look: something in its group may have changed, a lane is drained, or a handler has returned.
        Calls nothing of the registry, and returns at once."""
        scheduled = self._scheduled
        if scheduled is not None:
            scheduled.wake()

    def commit(self) -> None:
        """Write down what is done, now, within the registry's `timeout_s`.

        Raises PartitionLost for what is owned no more, after the rest is written; CommitUnknown or GroupUnavailable for
        what is not confirmed in time."""
        protocol = self._protocol
        timeout_s = self._registry.timeout_s
        until = time.monotonic() + timeout_s
        try:
            with self.procedure(timeout_s):
                self.check()
                self._home()
                protocol = self._protocol
                if protocol is None:
                    raise PartitionLost(self.keys.group, [], "it has left the group for now")
                with time_limit(until - time.monotonic()):
                    lost = self._drive(protocol.commit(protocol.due()))
        except (RegistryUnavailable, OutcomeUnknown) as error:
            raise self._not_committed(error, protocol) from error
        if lost:
            self.wake()  # it may be meant for this member still, and free
            raise PartitionLost(self.keys.group, lost, TAKEN)

    def _not_committed(
        self, error: RegistryUnavailable | OutcomeUnknown, protocol: MemberProtocol | None, *, is_last: bool = False
    ) -> GroupError:
        """What the user is told of a commit, or of the last one, that was not confirmed."""
        partitions: list[int] = []
        if protocol is not None:
            partitions = sorted(protocol.held.copy()) if is_last else protocol.due()
        reason = f"{error}; others claim what was not released when the lease has ended" if is_last else str(error)
        # Busy: what is done may be in a commit that the member's own thread waits for. In doubt: in an earlier one.
        is_unknown = isinstance(error, OutcomeUnknown | _Busy)
        if is_unknown or (protocol is not None and protocol.is_in_doubt(partitions)):
            return CommitUnknown(self.keys.group, partitions, reason)
        named = name_partitions(partitions)
        what = f"the checkpoint of {named} was not written"
        if is_last:
            what = f"{self.name} could not write the last checkpoint of {named}, and has not released them"
        return GroupUnavailable(self.keys.group, partitions, what, reason)

    def commit_with(self, finish: Callable[[], None], write: CommitMore) -> dict[str, int]:
        """Write down what `finish` says is done, in one commit with something else, all or nothing: `write` makes it,
        given what to expect and to put. If nothing comes of it, what `finish` said is taken back, so that no other
        commit writes it."""
        with self._procedure_in_time():
            self.check()
            self._home()
            protocol = self._protocol
            if protocol is None:
                raise PartitionLost(self.keys.group, [], "it has left the group for now")
            before = {number: (each.lane, each.lane.done, each.lane.seeks) for number, each in protocol.held.items()}
            finish()
            # No others: how many that are decides whether one commit can hold it, and is known only for these.
            moved = [number for number, (lane, done, _) in before.items() if lane.done > done]
            try:
                return self._drive(protocol.commit_with(moved, write))
            except BaseException:
                for lane, done, seeks in before.values():
                    if lane.seeks == seeks:
                        lane.done = done
                raise

    @contextmanager
    def _procedure_in_time(self) -> Iterator[None]:
        try:
            with self.procedure(self._registry.timeout_s):
                yield
        except _Busy as busy:
            raise GroupUnavailable(self.keys.group, (), "no checkpoint was written", str(busy)) from busy

    def pause(self, lane: Lane, offset: int, failure: Failure) -> None:
        """Write down that a message could not be handled; its partition stands until somebody decides (X14).

        If the store cannot be reached the partition stands all the same, and the member's thread tries again."""
        with self.procedure():
            lane.is_paused = lane.is_failed = True
            lane.seek(lane.done)  # here, for as soon as it is written somebody may decide to go on behind it
            self._unwritten[lane] = Paused(
                offset,
                failure.text,
                time.time(),
                self.name,
                error_type=failure.type,
                traceback=failure.traceback,
                failure=uuid.uuid4().hex,
            )
            try:
                self._write_paused()
            except (RegistryUnavailable, OutcomeUnknown) as failure:
                _logger.warning("group %s, member %s: %s; will try again", self.keys.group, self.name, failure)
        self.wake()

    def close(self) -> None:
        """Write down what is done, release everything, leave. In this order: a release needs the lease's member.

        Ends within the registry's `timeout_s`, the user's callbacks aside. Raises PartitionLost, CommitUnknown or
        GroupUnavailable if what is done could not be written, and what has ended the member before if nobody was told.
        A second call waits for the first, and finishes it if an interrupt has ended that."""
        self._closing.set()
        self.wake()
        until = time.monotonic() + self._registry.timeout_s
        if self._scheduled is not None:
            self._scheduled.end(self._registry.timeout_s)
        try:
            with self.procedure(until - time.monotonic()):
                self._end(until)
                error, self._untold = self._untold, None
        except _Busy as busy:
            # The thread that has the mutex waits for the store. Whoever gets the mutex next finishes this.
            name = f"pxrs-member-{self.keys.group}-end"
            threading.Thread(target=self._end_later, name=name, daemon=True).start()
            raise self._not_committed(busy, self._protocol, is_last=True) from busy
        if error is not None:
            raise error

    def close_later(self) -> None:
        """Close, but not here: this is a callback."""
        self._closes_itself = True
        self._closing.set()
        self.wake()

    def _end_later(self) -> None:
        with self.procedure():
            try:
                self._end()
            except Exception as error:  # noqa: BLE001 - raised by `close`, if somebody calls it again
                self.fail_later(error)

    def _end(self, until: float | None = None) -> None:
        """Leave, once. until: when it should be over, on `time.monotonic`; by default after the registry's time."""
        if self._is_closed:
            return
        try:
            self._leave(until)
        finally:
            if self._watch is not None:
                self._watch.close()
            if self._projection is not None:
                self._projection.close()
            self._is_closed = True

    # The member's recurring work.

    def _work(self) -> Next | None:
        """One round of work, called by the scheduler: never by two threads at once. None: the member has ended."""
        following = None if self._closing.is_set() else self._round()
        if following is not None and not self._closing.is_set():
            return following
        if self._closes_itself:
            self._end_later()
        return None

    def _round(self) -> Next | None:
        """Look, act, commit. When to look again; None if the member has ended."""
        try:
            if self._watch is not None:
                self._watch.wait(0)  # raises Closed if the registry was closed
            with self.procedure():
                next_duty_at = self._turn()
            if next_duty_at is None:
                _logger.warning(
                    "group %s, member %s: still not at rest after %d looks", self.keys.group, self.name, _LOOKS_MAX
                )
            self._outage.worked()
        except (RegistryUnavailable, OutcomeUnknown, LeaseExpired) as error:
            self._outage.failed(error)
            next_duty_at = None
        except BaseException as error:  # noqa: BLE001 - raised in the user's thread by `check`
            if not (isinstance(error, Closed) and self._closing.is_set()):
                self._fail(error)
            return None
        if next_duty_at is None:
            pause_s, self._retry_s = self._retry_s, min(2 * self._retry_s, _RETRY_S[1])
            return Next(pause_s=pause_s)  # changes do not shorten it: what goes wrong may itself cause them
        self._retry_s = _RETRY_S[0]
        return Next(pause_s=_TURN_S_MIN) if next_duty_at <= self._clock.now() else Next(at=next_duty_at)

    def _turn(self) -> float | None:
        """Look after everything once. The moment, on the registry's clock, of the next time if nothing happens; None if
        there is more to do after `_LOOKS_MAX` looks, so that a pause is due."""
        if self._closing.is_set():
            return _AT_ONCE
        error = self._untold if self._error is None else self._error
        if error is not None:
            raise error
        now = self._clock.now()
        if self._is_stuck(now):
            self._give_up()
        if self._is_away:
            return now + self.timings.commit_interval
        if self._lease is None or not self._lease.alive or self._protocol is None or self._protocol.is_gone:
            self._join()
        protocol = self._protocol
        assert protocol is not None
        is_at_rest = False
        for _ in range(_LOOKS_MAX):
            self._arm(protocol)
            has_changed = self._drive(protocol.look(self._clock.now()))
            self._hand_over_fresh(protocol)
            self._listener.call_back()  # before the next look: what is revoked by this one is released by that
            if protocol.is_gone or self._closing.is_set():
                return _AT_ONCE
            if is_at_rest := not has_changed and rearmed(self._watched, self._needed(protocol)) is None:
                break
        self._write_paused()
        self._look_at_paused(protocol)
        seen = protocol.snapshot
        if self._projection is not None and protocol.is_leading:
            self._projection.start()
        state = None if seen is None else (seen.targets, frozenset(seen.members))
        if state != self._told:
            self._told = state
            self._warn_of_layouts(protocol)
            self._listener.group_changed()
        now = self._clock.now()
        if now >= self._commits_at:
            self._commits_at = now + self.timings.commit_interval
            self._home()
            if self._drive(protocol.commit(protocol.due())):
                self.wake()  # what is lost may be meant for this member still, and free
        return self._next_duty_at(protocol) if is_at_rest else None

    def _warn_of_layouts(self, protocol: MemberProtocol) -> None:
        """Members of version 0.1 join whatever members are there, and do not follow the targets."""
        members = protocol.snapshot.members.values() if protocol.snapshot is not None else ()
        names = sorted(each.name for each in members if not each.is_of_this_layout)
        if names and protocol.is_leading:
            _logger.warning(
                "group %s, member %s: the members %s are of an earlier version of pxrs and are given no partitions; "
                "stop them",
                self.keys.group,
                self.name,
                ", ".join(names),
            )

    def _next_duty_at(self, protocol: MemberProtocol) -> float:
        return min(self._commits_at, protocol.fence_at, self.deadline)

    def _home(self) -> Home | None:
        """The identity of the hub. Raises what says that its groups may not be joined from here (WrongRegistry,
        HubMoved, a damaged record), and RegistryUnavailable if that cannot be told now, as with too many open files or
        a file server that does not answer: then nothing may be written, but nothing is lost either."""
        try:
            return self._find_home()
        except (HubMoved, DamagedFrame):
            raise
        except (OSError, LogError) as error:
            raise RegistryUnavailable(f"the hub's own record cannot be read: {error}") from error

    def _drive(self, steps: Steps[T]) -> T:
        return drive(steps, self._registry, self._lease)

    def _join(self) -> None:
        if self._protocol is not None:
            self._former.add(self._protocol.incarnation)
            self._protocol.lose_all(LEASE_ENDED)
            self._listener.call_back()
        if self._lease is not None:
            self._lease.close()
        home = self._home()
        self._lease = self._registry.lease(self.timings.lease_ttl)
        source = self._source
        self._protocol = MemberProtocol(
            self.keys,
            uuid.uuid4().hex,
            Member(
                self.name,
                source.id,
                source.name,
                source.partitions,
                socket.gethostname(),
                os.getpid(),
                time.time(),
                self._assignor,
                self._is_alone,
                self.timings.handover_timeout,
            ),
            hooks=self,
            start_of=self._start_of,
            wall=time.time,
            keys_max=self._registry.limits.commit_keys_max,
            handover_s=self.timings.handover_timeout,
            home=home,
            foreign=foreign_of(self.keys, source),
            keeps_unread=source.keeps_unread,
            former=frozenset(self._former),
            sees_all=self._sees_all,
        )
        try:
            if not self._drive(self._protocol.join()):
                self._await_starts(self._protocol)
        except BaseException:
            # The next turn joins anew and ends this lease: with it the key goes by which others wait for this member to
            # write the starts.
            self._protocol.is_gone = True
            raise

    def _await_starts(self, protocol: MemberProtocol) -> None:
        """Wait until another member has written where the partitions begin. If that takes too long, write it too."""
        until = time.monotonic() + self._registry.timeout_s
        with self._registry.watch(*protocol.pin_keys) as watch:
            while not self._closing.is_set():
                left_s = until - time.monotonic()
                if self._drive(protocol.pin(waits=left_s > 0)):
                    return
                watch.wait(max(0.0, min(left_s, _STARTS_WAIT_S)))

    def _needed(self, protocol: MemberProtocol) -> frozenset[str]:
        """What this member has to watch: also the pauses of its partitions that a failed message holds up, on which an
        administrator decides. Commits of checkpoints wake nobody."""
        holdings = protocol.held.items()
        failed = [number for number, holding in holdings if holding.lane.is_failed]
        pauses = [self.keys.pause(protocol.member.topic, number) for number in failed]
        return protocol.watched_keys() | frozenset(pauses)

    def _arm(self, protocol: MemberProtocol) -> None:
        """Watch what concerns this member, before it looks (R2)."""
        chosen = rearmed(self._watched, self._needed(protocol))
        if chosen is None and self._watch is not None:
            return
        scheduled = self._scheduled
        assert scheduled is not None
        needed = self._needed(protocol) if chosen is None else chosen
        old, self._watch = self._watch, self._registry.watch(*sorted(needed))
        self._watched = needed
        if self._subscription is not None:
            self._subscription.close()  # closing the old watch calls its callbacks
        # Not `self.wake`: the registry keeps the watch, and would keep this member after its work has ended.
        self._subscription = self._watch.subscribe(scheduled.wake)
        if old is not None:
            old.close()

    def _hand_over_fresh(self, protocol: MemberProtocol) -> None:
        """Give new lanes to the consumer, once it is known whether a message holds them up."""
        if not self._fresh:
            return
        topic = protocol.member.topic
        paused = {partition_of(e.key)[1] for e in self._registry.scan(f"{self.keys.paused}{topic}/")}
        for lane in self._fresh:
            lane.is_paused = lane.is_failed = lane.partition in paused
        self._look_at_paused(protocol)  # what is decided already holds nobody up
        fresh, self._fresh = [lane for lane in self._fresh if not lane.is_lost], []
        self._listener.lanes_assigned(fresh)

    def _write_paused(self) -> None:
        """Under the fence: of a partition that is another's now, the next owner finds out for itself."""
        for lane, paused in list(self._unwritten.items()):
            protocol = self._protocol
            holding = None if protocol is None else protocol.held.get(lane.partition)
            if protocol is not None and holding is not None and holding.lane is lane:
                self._drive(protocol.pause(lane.partition, paused))
            del self._unwritten[lane]

    def _look_at_paused(self, protocol: MemberProtocol) -> None:
        """Go on with what an admin has decided to try again or to skip."""
        lanes = [holding.lane for holding in protocol.held.values()]
        failed = [lane for lane in lanes if lane.is_failed and lane not in self._unwritten]
        if not failed:
            return
        topic = protocol.member.topic
        found = {partition_of(entry.key)[1]: entry for entry in self._registry.scan(f"{self.keys.paused}{topic}/")}
        for lane in failed:
            entry = found.get(lane.partition)
            if entry is not None:
                paused = Paused.load(entry.key, entry.value)
                if not paused.skip:
                    continue
                lane.seek(max(lane.done, paused.offset + 1))
                if self._drive(protocol.commit([lane.partition])):
                    continue
                fence = self.keys.owner(topic, lane.partition)
                expect = {fence: protocol.held[lane.partition].version, entry.key: entry.version}
                try:
                    self._registry.commit(expect, delete=[entry.key])
                except Conflict:
                    self.wake()  # it was taken, or somebody has decided otherwise: look again
                    continue
            else:
                lane.seek(lane.done)
            lane.is_failed = lane.is_paused = False
            self._listener.lanes_assigned([])

    # Hooks of the protocol.

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        lane = Lane(partition, epoch, offset)
        self._fresh.append(lane)
        return lane

    def revoked(self, lane: Lane) -> None:
        self._listener.lane_revoked(lane)

    def resumed(self, lane: Lane) -> None:
        self._listener.lane_resumed(lane)

    def released(self, lane: Lane) -> None:
        self._listener.lane_released(lane)

    def lost(self, lane: Lane) -> None:
        if lane in self._fresh:
            self._fresh.remove(lane)
            return
        if not lane.is_drained and not lane.has_unacknowledged:
            self._adrift.append(lane)
        self._listener.lane_lost(lane)

    # The ends.

    def _is_stuck(self, now: float) -> bool:
        limit = self.timings.progress_timeout
        if limit is None or self._protocol is None:
            return False
        self._adrift = [lane for lane in self._adrift if not lane.is_drained]
        lanes = [*self._adrift, *(holding.lane for holding in self._protocol.held.values())]
        return any(not lane.is_drained and lane.handed_at and now >= lane.handed_at + limit for lane in lanes)

    def _give_up(self) -> None:
        _logger.warning(
            "group %s, member %s: a handler has made no progress for %g s; giving up its partitions",
            self.keys.group,
            self.name,
            self.timings.progress_timeout,
        )
        self._leave(may_fail=True)
        # Last: who reads comes back as soon as it sees this, unless it has a message of a lane that is lost.
        self._is_away = True
        self._listener.group_changed()

    def come_back(self) -> None:
        """A handler that was given up has returned."""
        if self._is_away:
            self._is_away = False
            self.wake()

    @property
    def is_away(self) -> bool:
        return self._is_away

    def _leave(self, until: float | None = None, *, may_fail: bool = False) -> None:
        """Release what is held, with what is done of it, and end the lease."""
        protocol, lease = self._protocol, self._lease
        if until is None:
            until = time.monotonic() + self._registry.timeout_s
        reason = RELEASED
        try:
            if protocol is not None and lease is not None and lease.alive:
                left_s = until - time.monotonic()
                self._revoke_all(protocol)
                self._listener.call_back()  # before they are released
                until = time.monotonic() + left_s  # the time of the callbacks does not count
            if protocol is not None and lease is not None:
                reason = RELEASED if lease.alive else LEASE_ENDED
                with time_limit(until - time.monotonic()):
                    self._release_all(protocol, lease)
        except (PxrsError, OSError) as error:
            _logger.warning("group %s, member %s left without its last commit: %s", self.keys.group, self.name, error)
            if self._error is None and not may_fail:
                raise
        finally:
            self._protocol = self._lease = None
            if protocol is not None:
                protocol.lose_all(reason)
            if lease is not None:
                with time_limit(until - time.monotonic()):
                    lease.close()
        self._listener.call_back()

    def _release_all(self, protocol: MemberProtocol, lease: Lease) -> None:
        """The last checkpoints and the releases. Raises an error of the group that says what could not be written."""
        due = protocol.due()
        if not lease.alive:
            if due:
                raise PartitionLost(self.keys.group, due, LEASE_ENDED)
            return
        try:
            lost = drive(protocol.commit(list(protocol.held), is_last=True), self._registry, lease)
        except (RegistryUnavailable, OutcomeUnknown) as error:
            raise self._not_committed(error, protocol, is_last=True) from error
        if undone := sorted(set(lost) & set(due)):
            raise PartitionLost(self.keys.group, undone, TAKEN)

    def _revoke_all(self, protocol: MemberProtocol) -> None:
        holdings = list(protocol.held.values())
        for holding in holdings:
            holding.lane.is_stopping = True
        for holding in holdings:
            if not holding.is_revoking and holding.lane not in self._fresh:
                self._listener.lane_revoked(holding.lane)

    def lose(self, lane: Lane) -> None:
        """A checkpoint that the protocol does not know of was refused by the fence: the lane is lost."""
        with self.procedure():
            if self._protocol is not None and self.holding(lane) is not None:
                self._protocol.lose(lane.partition)

    def _fail(self, error: BaseException) -> None:
        if self._untold is None and error is not self._error:  # else `check` has raised it
            self._untold = error
        self._error = error
        try:
            with self.procedure():
                self._leave()
        except Exception as failure:  # noqa: BLE001 - told with the error that came first
            error.add_note(f"pxrs: leaving the group failed too: {failure}")
        finally:
            self._listener.member_failed()
