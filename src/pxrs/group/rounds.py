"""The recurring work of a member: rounds of looking at the group, acting, and committing what is done.

A round runs when something that the member watches has changed, when a thread of the user wakes the member, and at the
next moment at which something is due: a commit, a fence, the end of the lease. Rounds run on threads that all members
of an open registry share (`Registry.scheduler`), never two rounds of one member at once. What blocks a round without
a time limit, a callback of the user or a thread of the user that holds the mutex, does not delay other members
(`Session.blocking`).

What follows a round (`Pace`):

    the round                                                  the next one
    --------------------------------------------------------   ---------------------------------------------------
    found nothing more to do                                   when woken, or at the next moment that is due
    the same, and something is due already                     after `DUE_PAUSE_S`
    found more to do after `LOOKS_MAX` looks                   after a pause that doubles each time
    failed: registry not reached, reply lost, lease expired    after a pause that doubles each time
    raised another error                                       none: the member has failed, and leaves the group
    saw that the member is closing                             none
"""

from __future__ import annotations

import logging
from typing import Final

from pxrs.errors import Closed, LeaseExpired, OutcomeUnknown, RegistryUnavailable
from pxrs.group.events import MemberEvents
from pxrs.group.leaving import leave
from pxrs.group.lifecycle import Lifecycle
from pxrs.group.ownership import Ownership
from pxrs.group.pauses import Pauses
from pxrs.group.projection import Projection
from pxrs.group.protocol import MemberProtocol
from pxrs.group.session import Session
from pxrs.limited_log import Outage
from pxrs.scheduler import Next

_logger = logging.getLogger(__name__)

RETRY_S: Final = (0.05, 1.0)
"""The first and the longest pause after a round that failed, or that found more to do after `LOOKS_MAX` looks."""
LOOKS_MAX: Final = 10
"""How often a round looks at the group while there is more to do, before it goes on to the other duties."""
DUE_PAUSE_S: Final = 0.001
"""The pause before a round for what is due already. A fault that leaves something due for ever then does not take a
whole processor."""


class Pace:
    """Decides when the next round begins. No I/O, no clock."""

    def __init__(self, commit_interval: float) -> None:
        self._commit_interval = commit_interval
        self.commits_at = 0.0
        """When the next periodic commit is due."""
        self._retry_s = RETRY_S[0]

    def set_commit(self, now: float) -> None:
        """A commit begins now: the next one is due after an interval."""
        self.commits_at = now + self._commit_interval

    def after_failure(self) -> Next:
        """A wake does not shorten the pause: what goes wrong may itself cause wakes."""
        pause_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_S[1])
        return Next(pause_s=pause_s)

    def after_success(self, now: float, due_at: float) -> Next:
        self._retry_s = RETRY_S[0]
        return Next(pause_s=DUE_PAUSE_S) if due_at <= now else Next(at=due_at)


class Rounds:
    """The work of one member, without its end: see `GroupMember`."""

    def __init__(
        self,
        session: Session,
        ownership: Ownership,
        pauses: Pauses,
        lifecycle: Lifecycle,
        events: MemberEvents,
        projection: Projection | None,
    ) -> None:
        self._session, self._ownership, self._pauses = session, ownership, pauses
        self._lifecycle, self._events, self._projection = lifecycle, events, projection
        self._clock = session.registry.clock
        settings = session.settings
        self._group, self._name, self._timings = settings.keys.group, settings.name, settings.timings
        self.pace = Pace(self._timings.commit_interval)
        fields = {"group": self._group, "member": self._name}
        self.outage = Outage(_logger, f"group {self._group}, member {self._name}", extra=fields)
        """Logs what keeps rounds from succeeding, such as a store that is full or cannot be reached."""
        self._announced: object = None
        """The targets and members for which `group_changed` was called last."""

    def run(self) -> Next | None:
        """One round. None if there is to be no other one."""
        closing = self._lifecycle.closing
        following = None if closing.is_set() else self._run()
        return None if closing.is_set() else following

    def _run(self) -> Next | None:
        try:
            self._session.check_watch()
            with self._session.procedure():
                due_at = self._act()
            if due_at is None:
                _logger.warning("group %s, member %s: work is left after %d passes", self._group, self._name, LOOKS_MAX)
            self.outage.worked()
            self._session.failure = None
        except (RegistryUnavailable, OutcomeUnknown, LeaseExpired) as error:
            self.outage.failed(error)
            self._session.failure = str(error)
            due_at = None
        except BaseException as error:  # noqa: BLE001 - raised on the user's threads by `check`
            if not (isinstance(error, Closed) and self._lifecycle.closing.is_set()):
                self._fail(error)
            return None
        return self.pace.after_failure() if due_at is None else self.pace.after_success(self._clock.now(), due_at)

    def _act(self) -> float | None:
        """Do all that is due. The moment of the next duty if nothing happens, on the registry's clock; None if there is
        more to do after `LOOKS_MAX` looks."""
        session, lifecycle = self._session, self._lifecycle
        if lifecycle.closing.is_set():
            return float("-inf")
        if lifecycle.first_error is not None:
            raise lifecycle.first_error
        now = self._clock.now()
        if session.protocol is not None:
            lanes = [each.lane for each in session.protocol.held.values()]
            if self._ownership.is_stuck(lanes, now, self._timings.progress_timeout):
                self._give_up()
        if lifecycle.is_away:
            return now + self._timings.commit_interval
        protocol = session.protocol
        if protocol is None or not session.is_joined:
            protocol = session.join(lifecycle.closing)
        is_at_rest = self._look(protocol)
        if protocol.is_gone or lifecycle.closing.is_set():
            return float("-inf")
        self._pauses.write()
        self._pauses.follow(protocol)
        if self._projection is not None and protocol.is_leading:
            self._projection.start()
        self._tell_of_changes(protocol)
        self._commit(protocol)
        return self._next_duty_at(protocol) if is_at_rest else None

    def _look(self, protocol: MemberProtocol) -> bool:
        """Look and act until nothing more is to be done. False if that takes more than `LOOKS_MAX` looks."""
        session = self._session
        for _ in range(LOOKS_MAX):
            session.arm(protocol)
            has_changed = session.drive(protocol.look(self._clock.now()))
            self._pauses.announce(protocol)
            # Before the next look: the partitions that this look has revoked are released by the next one.
            self._events.call_back()
            if protocol.is_gone or self._lifecycle.closing.is_set():
                return True
            if not has_changed and session.is_watching_enough(protocol):
                return True
        return False

    def _tell_of_changes(self, protocol: MemberProtocol) -> None:
        seen = protocol.snapshot
        state = None if seen is None else (seen.targets, frozenset(seen.members))
        if state != self._announced:
            self._announced = state
            self._warn_of_layouts(protocol)
            self._events.group_changed()

    def _warn_of_layouts(self, protocol: MemberProtocol) -> None:
        """Members of version 0.1 join whatever members are there, and do not follow the targets."""
        members = protocol.snapshot.members.values() if protocol.snapshot is not None else ()
        names = sorted(each.name for each in members if not each.is_of_this_layout)
        if names and protocol.is_leading:
            _logger.warning(
                "group %s, member %s: the members %s run an earlier version of pxrs and get no partitions; stop them",
                self._group,
                self._name,
                ", ".join(names),
            )

    def _commit(self, protocol: MemberProtocol) -> None:
        """Write the checkpoints of what is done, if that is due."""
        now = self._clock.now()
        if now < self.pace.commits_at:
            return
        self.pace.set_commit(now)
        self._session.settings.home()
        if self._session.commit(protocol, protocol.due()):
            self._session.wake()  # a lost partition may still be in this member's target, and free

    def _next_duty_at(self, protocol: MemberProtocol) -> float:
        lease = self._session.lease
        return min(self.pace.commits_at, protocol.fence_at, float("-inf") if lease is None else lease.deadline)

    def _give_up(self) -> None:
        """A handler makes no progress: leave the group until it returns (X13)."""
        self._session.reporter.stuck(self._timings.progress_timeout)
        leave(self._session, self._ownership, self._events, may_fail=True)
        # Last: a thread that reads calls `come_back` as soon as it sees this, unless it has a message of a lost lane.
        self._lifecycle.is_away = True
        self._events.group_changed()

    def _fail(self, error: BaseException) -> None:
        """The member has ended because of an error: leave the group, and have `check` raise the error."""
        self._lifecycle.fail(error)
        self._session.reporter.failed(error)
        try:
            with self._session.procedure():
                leave(self._session, self._ownership, self._events, may_fail=True)
        except Exception as failure:  # noqa: BLE001 - a note of the error that came first
            error.add_note(f"pxrs: leaving the group failed too: {failure}")
        finally:
            self._events.member_failed()
