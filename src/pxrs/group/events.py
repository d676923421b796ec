"""What a member tells the consumer that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pxrs.group.lane import Lane


class MemberEvents(Protocol):
    """Implemented by the consumer, and called by the thread that holds the member's mutex (`Session.mutex`): mostly the
    thread that runs a round of the member's work.

    All methods but `call_back` are called in the middle of a procedure of the protocol. They change the consumer's own
    state, and call neither the member nor code of the user."""

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        """The member owns these partitions now. An empty sequence: a partition that a failed message held up goes on,
        so look for messages again."""

    def lane_revoked(self, lane: Lane) -> None:
        """The partition will be released when nothing of it is in hand."""

    def lane_released(self, lane: Lane) -> None:
        """The release was confirmed by the registry."""

    def lane_lost(self, lane: Lane) -> None:
        """The member does not own the partition any more, and has not released it."""

    def lane_resumed(self, lane: Lane) -> None:
        """A partition that was revoked stays after all."""

    def group_changed(self) -> None:
        """The members or the targets have changed, or the member has left the group for now (`GroupMember.is_away`)."""

    def call_back(self) -> None:
        """Call the user's callbacks for the events since the last time. They may call the member."""

    def member_failed(self) -> None:
        """`GroupMember.check` raises from now on."""
