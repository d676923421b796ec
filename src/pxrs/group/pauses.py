"""Partitions that a failed message holds up (X14): the member writes the pause, and follows what becomes of it.

A pause is a key that a handler's failure makes, with the failed offset and the error. It stays when the partition moves
to another member. An administrator decides on it:

    the administrator      the key                  what the owner does
    --------------------   ----------------------   -----------------------------------------------------------------
    `skip`                 has `skip` set           writes a checkpoint behind the message, deletes the key, goes on
    `retry`                is deleted               hands out the message again
    nothing                stays                    hands out nothing of the partition
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable

from pxrs.errors import Conflict, OutcomeUnknown, RegistryUnavailable
from pxrs.failures import Failure
from pxrs.group.events import MemberEvents
from pxrs.group.lane import Lane
from pxrs.group.ownership import Ownership
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Paused, partition_of
from pxrs.group.session import Session
from pxrs.registry.contract import Entry

_logger = logging.getLogger(__name__)


class Pauses:
    """All methods are called under the member's mutex."""

    def __init__(self, session: Session, ownership: Ownership, events: MemberEvents) -> None:
        self._session, self._ownership, self._events = session, ownership, events
        self.unwritten: dict[Lane, Paused] = {}
        """Pauses of partitions that are not in the registry yet."""

    def pause(self, lane: Lane, offset: int, failure: Failure) -> None:
        """Write that a message could not be handled. If the registry cannot be reached, the partition is held up
        nevertheless, and the next round of the member's work tries again."""
        lane.is_paused = lane.is_failed = True
        # Before the pause is written: as soon as it is there, an administrator may decide to go on behind the message.
        lane.seek(lane.done)
        name = self._session.settings.name
        self.unwritten[lane] = Paused(
            offset,
            failure.text,
            time.time(),
            name,
            error_type=failure.type,
            traceback=failure.traceback,
            failure=uuid.uuid4().hex,
        )
        try:
            self.write()
        except (RegistryUnavailable, OutcomeUnknown) as error:
            group = self._session.settings.keys.group
            _logger.warning("group %s, member %s: %s; will try again", group, name, error)

    def write(self) -> None:
        """Write the unwritten pauses, under the fence. A pause of a partition that is lost by now is dropped: the next
        owner's handler fails on the message too."""
        for lane, paused in list(self.unwritten.items()):
            protocol = self._session.protocol
            is_held = protocol is not None and self._session.holding(lane) is not None
            if protocol is not None and is_held and self._session.drive(protocol.pause(lane.partition, paused)):
                failure = Failure(paused.error, paused.error_type)
                self._session.reporter.failure("partition.paused", lane, paused.offset, failure)
            del self.unwritten[lane]

    def announce(self, protocol: MemberProtocol) -> None:
        """Give new lanes to the consumer, once it is known which of them a failed message holds up."""
        new = self._ownership.unannounced
        if not new:
            return
        paused = self._read(protocol, new)
        for lane in new:
            lane.is_paused = lane.is_failed = lane.partition in paused
        self.follow(protocol)  # an administrator may have decided on some of them already
        self._ownership.announce()

    def follow(self, protocol: MemberProtocol) -> None:
        """Go on with the partitions on whose messages an administrator has decided."""
        lanes = [holding.lane for holding in protocol.held.values()]
        failed = [lane for lane in lanes if lane.is_failed and lane not in self.unwritten]
        if not failed:
            return
        found = self._read(protocol, failed)
        for lane in failed:
            entry = found.get(lane.partition)
            if entry is not None and not self._skip(protocol, lane, entry):
                continue
            if entry is None:
                lane.seek(lane.done)
            lane.is_failed = lane.is_paused = False
            if entry is None:
                self._session.reporter.decided("partition.retried", lane, lane.done)
            self._events.lanes_assigned([])

    def _read(self, protocol: MemberProtocol, lanes: Iterable[Lane]) -> dict[int, Entry]:
        """The pauses of the partitions of these lanes' topics, by the member's number of the partition."""
        found: dict[int, Entry] = {}
        for topic in protocol.numbering.by_topic(lane.partition for lane in lanes):
            for entry in self._session.registry.scan(protocol.keys.pauses_of(topic)):
                number = protocol.numbering.number_of(*partition_of(entry.key))
                if number is not None:
                    found[number] = entry
        return found

    def _skip(self, protocol: MemberProtocol, lane: Lane, entry: Entry) -> bool:
        """Pass the failed message, if the pause says so: False if it does not, or the partition or the pause has
        changed."""
        paused = Paused.load(entry.key, entry.value)
        if not paused.skip:
            return False
        lane.seek(max(lane.done, paused.offset + 1))
        if self._session.drive(protocol.commit([lane.partition])):
            return False
        fence = protocol.keys.owner(*protocol.place(lane.partition))
        expect = {fence: protocol.held[lane.partition].version, entry.key: entry.version}
        try:
            self._session.registry.commit(expect, delete=[entry.key])
        except Conflict:
            self._session.wake()  # the partition was taken, or an administrator has decided anew: read again
            return False
        self._session.reporter.decided("partition.skipped", lane, paused.offset)
        return True
