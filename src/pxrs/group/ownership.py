"""Tells the consumer of the partitions that its member has gained, revoked and lost, and finds out whether a handler is
stuck."""

from __future__ import annotations

from collections.abc import Iterable

from pxrs.group.events import MemberEvents
from pxrs.group.lane import Lane
from pxrs.group.reporting import Reporter


class Ownership:
    """The `Hooks` of a member's protocol. Its methods are called under the member's mutex."""

    def __init__(self, events: MemberEvents, reporter: Reporter) -> None:
        self._events, self._reporter = events, reporter
        self.unannounced: list[Lane] = []
        """Assigned, and not yet given to the consumer: the member reads first whether a failed message holds them
        up."""
        self._lost_in_hand: list[Lane] = []
        """Lost while a handler had a message of them that has not been finished yet."""

    # Hooks of the protocol.

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        lane = Lane(partition, epoch, offset, self._reporter.incarnation)
        self.unannounced.append(lane)
        return lane

    def revoked(self, lane: Lane) -> None:
        self._events.lane_revoked(lane)

    def resumed(self, lane: Lane) -> None:
        self._events.lane_resumed(lane)

    def released(self, lane: Lane) -> None:
        self._events.lane_released(lane)

    def lost(self, lane: Lane) -> None:
        self._reporter.lost(lane)
        if lane in self.unannounced:
            self.unannounced.remove(lane)
            return
        if not lane.is_drained and not lane.has_unacknowledged:
            self._lost_in_hand.append(lane)
        self._events.lane_lost(lane)

    # For the member.

    def announce(self) -> None:
        """Give the unannounced lanes to the consumer."""
        lanes, self.unannounced = [lane for lane in self.unannounced if not lane.is_lost], []
        self._events.lanes_assigned(lanes)

    def revoke_all(self, lanes: Iterable[tuple[Lane, bool]]) -> None:
        """Stop handing out messages of all owned partitions, each given with whether it is being revoked already."""
        owned = list(lanes)
        for lane, _ in owned:
            lane.is_stopping = True
        for lane, is_revoking in owned:
            if not is_revoking and lane not in self.unannounced:
                self._events.lane_revoked(lane)

    def is_stuck(self, owned: Iterable[Lane], now: float, limit_s: float | None) -> bool:
        """Whether a message was handed out `limit_s` ago, or earlier, and is still in hand. None: never."""
        if limit_s is None:
            return False
        self._lost_in_hand = [lane for lane in self._lost_in_hand if not lane.is_drained]
        lanes = [*self._lost_in_hand, *owned]
        return any(not lane.is_drained and lane.handed_at and now >= lane.handed_at + limit_s for lane in lanes)
