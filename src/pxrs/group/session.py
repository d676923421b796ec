"""What a member has in the registry at a moment: its lease, its incarnation, and a watch of the keys that concern it.

A member joins, and so begins a session; if it loses the lease, it joins again, with a new lease and a new incarnation
(G1). The object stays the same, so that the parts of a member (`rounds.py`, `pauses.py`, `leaving.py`) share it.

Threads: `mutex` is held while a procedure of the protocol or a callback of the user runs: by the thread that runs a
round of the member's work, or by a thread of the user that commits or closes. The questions at the end of the class
need no mutex, except `checkpoint`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeVar

from pxrs.errors import DamagedFrame, HubMoved, LogError, LogNotReadable, RegistryUnavailable
from pxrs.group.checkpoints import Holding
from pxrs.group.events import MemberEvents
from pxrs.group.foreign import foreign_parts
from pxrs.group.incarnation import LEASE_ENDED, Hooks
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol, rearmed
from pxrs.group.records import Checkpoint, Home, Keys, Member, ReadTopic
from pxrs.group.reporting import Reporter
from pxrs.group.timings import Timings
from pxrs.log.contract import Source
from pxrs.metrics.instruments import CONSUMER_COMMIT
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease
from pxrs.registry.steps import Steps, drive
from pxrs.registry.watch import Watch
from pxrs.scheduler import Scheduled
from pxrs.waiting import Subscription

T = TypeVar("T")

_STARTS_WAIT_S: Final = 0.5
"""How long a member that waits for the group's first checkpoints sleeps at most before it asks whether it is closed."""


class Busy(RegistryUnavailable):
    """Another thread has held the member's mutex for all the time of this call."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What a member was made with."""

    keys: Keys
    name: str
    source: Source
    start_of: Callable[[int, int], int]
    """Where a partition begins that has no checkpoint, given its number and the first offset that retention has
    left."""
    find_home: Callable[[], Home | None]
    """Gives the identity of the hub that the source belongs to; raises if its groups may not be joined from here."""
    timings: Timings
    assignor: str
    is_alone: bool
    """Whether the group may have no other member."""
    sees_all: bool
    """Whether the member reads and watches all members and targets, also if it does not lead."""

    def home(self) -> Home | None:
        """The identity of the hub. Raises what says that its groups may not be joined from here (WrongRegistry,
        HubMoved, a record that is damaged or may not be read). Raises RegistryUnavailable if that is not known now, as
        with too many open files or a file server that does not answer: then nothing may be written, but nothing is lost
        either."""
        try:
            return self.find_home()
        except (HubMoved, DamagedFrame, LogNotReadable):
            raise
        except (OSError, LogError) as error:
            raise RegistryUnavailable(f"the hub's own record cannot be read: {error}") from error

    def record(self) -> Member:
        """The member's key, as of a join now."""
        return Member.reading(
            self.name,
            [ReadTopic(part.id, part.name, part.partitions) for part in self.source.parts],
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.time(),
            assignor=self.assignor,
            is_alone=self.is_alone,
            handover_s=self.timings.handover_timeout,
        )


class Session:
    """Shared by the parts of one member."""

    def __init__(
        self, registry: Registry, settings: MemberSettings, hooks: Hooks, events: MemberEvents, reporter: Reporter
    ) -> None:
        self.registry, self.settings, self.reporter = registry, settings, reporter
        self._hooks, self._events = hooks, events
        self._commit_time = CONSUMER_COMMIT.of(settings.keys.group)
        self.mutex = threading.RLock()
        """Held while the protocol or a callback runs."""
        self.scheduled: Scheduled | None = None
        """The member's recurring work (`rounds.py`); None before the member is started."""
        self.failure: str | None = None
        """Why the last round of the member's work failed; None if it succeeded. Set by `rounds.py`."""
        self.lease: Lease | None = None
        self.protocol: MemberProtocol | None = None
        """The present incarnation; None before the first join, and after the member has left."""
        self._former: set[str] = set()
        """Earlier incarnations of this member, whose keys the store may show until it has noticed that they ended."""
        self._watch: Watch | None = None
        self._subscription: Subscription | None = None
        """Wakes `scheduled` when `_watch` tells of a change."""
        self.watched: frozenset[str] = frozenset()
        """The keys and folders that `_watch` covers."""

    # Threads.

    @contextmanager
    def procedure(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the mutex for procedures of the protocol, then call the callbacks that these have caused.

        timeout_s: how long to wait for the mutex. Raises Busy after it."""
        if not self.mutex.acquire(blocking=False):
            with self.blocking():  # the thread that has the mutex may be in a callback of the user
                is_acquired = self.mutex.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            if not is_acquired:
                raise Busy("another call or a callback of this member was under way all the time")
        try:
            try:
                yield
            finally:
                self._events.call_back()
        finally:
            self.mutex.release()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Entered around what may take any time, such as a callback of the user: on a thread that members share, it
        does not delay the others."""
        scheduled = self.scheduled
        with nullcontext() if scheduled is None else scheduled.blocking():
            yield

    def wake(self) -> None:
        """Have a round of the member's work begin soon. Calls nothing of the registry, and returns at once."""
        scheduled = self.scheduled
        if scheduled is not None:
            scheduled.wake()

    # The registry. Under the mutex.

    def drive(self, steps: Steps[T]) -> T:
        """Run a procedure of the protocol under the present lease."""
        return drive(steps, self.registry, self.lease)

    def commit(self, protocol: MemberProtocol, partitions: Iterable[int], *, is_last: bool = False) -> list[int]:
        """Run `Committing.commit`, and add to the metrics how long it took."""
        numbers = list(partitions)
        if not numbers:
            return []
        began = time.monotonic()
        try:
            return self.drive(protocol.commit(numbers, is_last=is_last))
        finally:
            self._commit_time.observe(time.monotonic() - began)

    @property
    def problem(self) -> str | None:
        """What keeps the member from its work now; None if nothing does. From any thread, without the mutex."""
        failure = self.failure
        if failure is None and not self.is_joined:
            return "it is not in the group: its lease has ended, and it has not joined again yet"
        return failure

    @property
    def is_joined(self) -> bool:
        lease, protocol = self.lease, self.protocol
        return lease is not None and lease.alive and protocol is not None and not protocol.is_gone

    def join(self, closing: threading.Event) -> MemberProtocol:
        """Begin anew: a lease, an incarnation, the group's first checkpoints. What an earlier incarnation of this
        member owned is lost.

        closing: set when the member is closed; a wait for the first checkpoints ends then"""
        if self.protocol is not None:
            self._former.add(self.protocol.incarnation)
            self.reporter.lost_lease(len(self.protocol.held))
            self.protocol.lose_all(LEASE_ENDED)
            self._events.call_back()
        if self.lease is not None:
            self.lease.close()
        settings = self.settings
        home = settings.home()
        self.lease = self.registry.lease(settings.timings.lease_ttl)
        self.protocol = protocol = MemberProtocol(
            settings.keys,
            uuid.uuid4().hex,
            settings.record(),
            hooks=self._hooks,
            start_of=settings.start_of,
            wall=time.time,
            keys_max=self.registry.limits.commit_keys_max,
            handover_s=settings.timings.handover_timeout,
            home=home,
            foreign=foreign_parts(settings.keys, settings.source),
            keeps_unread=frozenset(part.id for part in settings.source.parts if part.keeps_unread),
            former=frozenset(self._former),
            sees_all=settings.sees_all,
            named=settings.source.named,
            reports=self.reporter,
        )
        self.reporter.begin(protocol)
        try:
            if not self.drive(protocol.join()):
                self._await_starts(protocol, closing)
        except BaseException:
            # The next round joins anew and ends this lease. With the lease, the key goes by which other members wait
            # for this one to write the first checkpoints.
            protocol.is_gone = True
            raise
        self.reporter.joined(protocol)
        return protocol

    def _await_starts(self, protocol: MemberProtocol, closing: threading.Event) -> None:
        """Wait until another member has written the first checkpoints. If that takes longer than the registry's
        `timeout_s`, write them here too."""
        until = time.monotonic() + self.registry.timeout_s
        with self.registry.watch(*sorted(protocol.pin_keys)) as watch:
            while not closing.is_set():
                left_s = until - time.monotonic()
                if self.drive(protocol.pin(waits=left_s > 0)):
                    return
                watch.wait(max(0.0, min(left_s, _STARTS_WAIT_S)))

    # The watch. Under the mutex, by the member's work.

    def needed_keys(self, protocol: MemberProtocol) -> frozenset[str]:
        """What this member has to watch: what the protocol says, and the pauses of its partitions that a failed message
        holds up, on which an administrator decides. Commits of checkpoints wake no watch."""
        holdings = protocol.held.items()
        failed = [number for number, holding in holdings if holding.lane.is_failed]
        pauses = [protocol.keys.pause(*protocol.place(number)) for number in failed]
        return protocol.watched_keys() | frozenset(pauses)

    def is_watching_enough(self, protocol: MemberProtocol) -> bool:
        """Whether the last look has shown nothing that has to be watched before another look (R2)."""
        return rearmed(self.watched, self.needed_keys(protocol)) is None

    def arm(self, protocol: MemberProtocol) -> None:
        """Watch what concerns this member, before it looks (R2)."""
        chosen = rearmed(self.watched, self.needed_keys(protocol))
        if chosen is None and self._watch is not None:
            return
        scheduled = self.scheduled
        assert scheduled is not None
        needed = self.needed_keys(protocol) if chosen is None else chosen
        old, self._watch = self._watch, self.registry.watch(*sorted(needed))
        self.watched = needed
        if self._subscription is not None:
            self._subscription.close()  # closing the old watch calls its callbacks
        # The registry keeps the watch. `scheduled` refers to the member only until its work has ended, so a watch that
        # was never closed does not keep a member that has failed.
        self._subscription = self._watch.subscribe(scheduled.wake)
        if old is not None:
            old.close()

    def check_watch(self) -> None:
        """Raise Closed if the registry was closed."""
        if self._watch is not None:
            self._watch.wait(0)

    def close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    # Questions.

    def holding(self, lane: Lane) -> Holding | None:
        """The protocol's record of a lane, None if the lane is owned no more. Its fields change under the mutex."""
        protocol = self.protocol
        holding = protocol.held.get(lane.partition) if protocol is not None else None
        return None if holding is None or holding.lane is not lane else holding

    def checkpoint(self, lane: Lane) -> tuple[Checkpoint, int] | None:
        """The checkpoint that was read after the claim, or written since, and the version of the owner key; None if the
        lane is owned no more. Waits for the mutex."""
        with self.mutex:
            holding = self.holding(lane)
            return None if holding is None else (holding.checkpoint, holding.version)

    def checkpoints(self) -> dict[Lane, int]:
        """The offset of the last checkpoint that is known to be written, of each lane that is owned.

        Without the mutex, which another thread may hold for as long as the store does not answer: each checkpoint is
        replaced as a whole, and `held` is copied in one step."""
        protocol = self.protocol
        return {} if protocol is None else {each.lane: each.checkpoint.offset for each in protocol.held.copy().values()}

    def has_whole_target(self) -> bool:
        """Whether the leader has written a target for this member, and the member owns all that the target names."""
        protocol = self.protocol
        seen = protocol.snapshot if protocol is not None else None
        if protocol is None or seen is None or protocol.incarnation not in seen.targets:
            return False
        target, _ = seen.target(protocol.incarnation)
        named = {(topic, number) for topic, numbers in target.partitions.items() for number in numbers}
        return protocol.numbers_of(named) <= protocol.held.keys()

    def are_meant_for_others(self, partitions: Iterable[int]) -> bool:
        """Whether each of these was in the target of another member that was there, when this one looked last. Only a
        member that `sees_all` can tell."""
        protocol = self.protocol
        seen = protocol.snapshot if protocol is not None else None
        if protocol is None or seen is None or protocol.incarnation not in seen.targets:
            return False
        meant = seen.meant_for()
        owners = (meant.get(protocol.place(number)) for number in partitions)
        return all(owner not in (None, protocol.incarnation) for owner in owners)
