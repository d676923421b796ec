"""How a member leaves its group, and the errors of commits that were not confirmed.

The order of leaving: stop handing out; call `on_revoked`; write the last checkpoints and the releases in one commit
(G5), under the lease; end the lease, and with it the member's key. If the commit fails, the lease is ended
nevertheless: then others claim what was not released.
"""

from __future__ import annotations

import logging
import time

from pxrs.errors import (
    CommitUnknown,
    GroupError,
    GroupUnavailable,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryUnavailable,
    name_partitions,
)
from pxrs.group.events import MemberEvents
from pxrs.group.incarnation import LEASE_ENDED, RELEASED, TAKEN
from pxrs.group.ownership import Ownership
from pxrs.group.protocol import MemberProtocol
from pxrs.group.session import Busy, Session
from pxrs.registry.lease import Lease
from pxrs.registry.limit import time_limit

_logger = logging.getLogger(__name__)


def leave(
    session: Session, ownership: Ownership, events: MemberEvents, until: float | None = None, *, may_fail: bool = False
) -> None:
    """Release what is held, with what is done of it, and end the lease. Under the mutex.

    until:     when it should be over, on `time.monotonic`, callbacks aside; by default after the registry's `timeout_s`
    may_fail:  do not raise if the last commit fails; that is logged in any case"""
    protocol, lease, settings = session.protocol, session.lease, session.settings
    if until is None:
        until = time.monotonic() + session.registry.timeout_s
    reason = RELEASED
    try:
        if protocol is not None and lease is not None and lease.alive:
            left_s = until - time.monotonic()
            ownership.revoke_all((each.lane, each.is_revoking) for each in protocol.held.values())
            events.call_back()  # before they are released
            until = time.monotonic() + left_s  # the time of the callbacks does not count
        if protocol is not None and lease is not None:
            reason = RELEASED if lease.alive else LEASE_ENDED
            with time_limit(until - time.monotonic()):
                _release_all(session, protocol, lease)
    except (PxrsError, OSError) as error:
        _logger.warning(
            "group %s, member %s left without its last commit: %s", settings.keys.group, settings.name, error
        )
        if not may_fail:
            raise
    finally:
        session.protocol = session.lease = None
        if protocol is not None:
            if reason is LEASE_ENDED:
                session.reporter.lost_lease(len(protocol.held))
            protocol.lose_all(reason)
            session.reporter.left()
        if lease is not None:
            with time_limit(until - time.monotonic()):
                lease.close()
    events.call_back()


def _release_all(session: Session, protocol: MemberProtocol, lease: Lease) -> None:
    """The last checkpoints and the releases. Raises an error of the group that says what could not be written."""
    due = protocol.due()
    if not lease.alive:
        if due:
            raise PartitionLost(protocol.keys.group, protocol.named(due), LEASE_ENDED)
        return
    try:
        lost = session.commit(protocol, list(protocol.held), is_last=True)
    except (RegistryUnavailable, OutcomeUnknown) as error:
        raise not_committed(session, error, protocol, is_last=True) from error
    if undone := sorted(set(lost) & set(due)):
        raise PartitionLost(protocol.keys.group, protocol.named(undone), TAKEN)


def not_committed(
    session: Session,
    error: RegistryUnavailable | OutcomeUnknown,
    protocol: MemberProtocol | None,
    *,
    is_last: bool = False,
) -> GroupError:
    """The error for a commit that was not confirmed. is_last: it was the last one, which releases too."""
    group, name = session.settings.keys.group, session.settings.name
    numbers: list[int] = []
    if protocol is not None:
        numbers = sorted(protocol.held.copy()) if is_last else protocol.due()
    partitions = session.settings.source.named(numbers)
    reason = (
        f"{error}; other members claim the unreleased partitions when the lease has ended" if is_last else str(error)
    )
    # The outcome is unknown also if the mutex could not be had: what is done may be in a commit that the thread with
    # the mutex waits for. And if an earlier commit of these partitions was sent without an answer.
    is_unknown = isinstance(error, OutcomeUnknown | Busy)
    if is_unknown or (protocol is not None and protocol.is_in_doubt(numbers)):
        return CommitUnknown(group, partitions, reason)
    named = name_partitions(partitions)
    what = f"the checkpoint of {named} was not written"
    if is_last:
        what = f"{name} could not write the last checkpoint of {named} and has not released them"
    return GroupUnavailable(group, partitions, what, reason)
