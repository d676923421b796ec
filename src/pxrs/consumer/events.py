"""Events of the member, and the user's callbacks that follow from them.

The member calls `GroupEvents` in the middle of its procedures, on the thread that holds the member's mutex (mostly the
member's own). So each event only changes the lanes and queues a notice. The user's callbacks, which may call the
consumer and so the member, run in `call_back`, which the member calls when the procedure is over.

    event            lanes                            callback
    lanes_assigned   owned; readable after callback   on_assigned
    lane_revoked     not readable (`is_stopping`)     on_revoked, before the release
    lane_resumed     readable again after callback    on_assigned
    lane_released    removed                          on_lost, if messages were in hand
    lane_lost        removed                          on_lost

Invariants: callbacks run one after the other, in the order of the events. An error of a callback ends the member
(`GroupMember.fail_later`) and is raised where the user reads. `EventRelay` holds `GroupEvents` weakly, so that the
member's thread does not keep a consumer alive that nobody else refers to.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple

from pxrs.consumer.hand_out import HandOut
from pxrs.consumer.partitions import P, PartitionNames
from pxrs.group.lane import Lane

OnAssigned = Callable[[Mapping[P, int]], None]
"""Called with partitions that come: the offset at which reading begins, by partition."""
Callback = Callable[[Sequence[P]], None]
"""Called with the partitions that go."""


class Callbacks(NamedTuple, Generic[P]):
    """The user's callbacks; None for one that the user has not given."""

    on_assigned: OnAssigned[P] | None
    on_revoked: Callback[P] | None
    on_lost: Callback[P] | None


class _Notice(NamedTuple):
    """A callback that is due."""

    what: Literal["assigned", "revoked", "lost"]
    lanes: Sequence[Lane]


class GroupEvents(Generic[P]):
    """Applies the member's events to the parts of one consumer, and calls the user's callbacks."""

    def __init__(self, hand_out: HandOut, names: PartitionNames[P], callbacks: Callbacks[P]) -> None:
        self._lanes, self._read_ahead, self._settling = hand_out.lanes, hand_out.read_ahead, hand_out.settling
        self._changes, self._member, self._lifetime = hand_out.changes, hand_out.member, hand_out.lifetime
        self._counts = hand_out.counts
        self._names: PartitionNames[P] = names
        self._callbacks: Callbacks[P] = callbacks
        self._due: deque[_Notice] = deque()
        self._calling: int | None = None
        """The id of the thread that runs a callback now. There is at most one: it holds the member's mutex."""

    @property
    def is_in_callback(self) -> bool:
        """Whether the calling thread is inside a callback of this consumer."""
        return self._calling == threading.get_ident()

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        self._lanes.add(lanes)
        if lanes:
            self._counts.moved("assigned", len(lanes))
            self._due.append(_Notice("assigned", lanes))
        self._changes.announce()

    def lane_revoked(self, lane: Lane) -> None:
        with self._lanes.lock:
            self._read_ahead.discard(lane)
        self._changes.announce()
        self._counts.moved("revoked")
        self._due.append(_Notice("revoked", [lane]))

    def lane_resumed(self, lane: Lane) -> None:
        self._lanes.hold_back(lane)
        self._due.append(_Notice("assigned", [lane]))

    def lane_released(self, lane: Lane) -> None:
        self._remove(lane)
        self._counts.moved("released")
        if lane.has_undone and not self._lifetime.is_closed:
            self._settling.note_lost(lane)
            self._due.append(_Notice("lost", [lane]))

    def lane_lost(self, lane: Lane) -> None:
        self._remove(lane)
        self._counts.moved("lost")
        if lane.has_undone and not self._lifetime.is_closed:
            self._settling.note_lost(lane)
        self._due.append(_Notice("lost", [lane]))

    def group_changed(self) -> None:
        self._changes.announce()

    def member_failed(self) -> None:
        self._changes.announce()

    def call_back(self) -> None:
        """Call the callbacks that are due. If a callback calls the consumer and that makes more of them due, they are
        called when the callback has returned."""
        if self._calling is not None:  # it is this thread, which holds the member's mutex: the loop below goes on
            return
        while self._due:
            notice = self._due.popleft()
            try:
                self._call(notice)
            finally:
                if notice.what == "assigned":
                    self._lanes.arrived(notice.lanes)
                    self._changes.announce()

    def _remove(self, lane: Lane) -> None:
        with self._lanes.lock:
            self._read_ahead.discard(lane)
            self._lanes.remove(lane)
        self._changes.announce()

    def _user_callback(self, notice: _Notice) -> Callable[[], None] | None:
        """The call that a notice makes due; None if the user has not given that callback."""
        callbacks, lanes = self._callbacks, notice.lanes
        partitions = self._names.named(lane.partition for lane in lanes)
        if notice.what == "assigned":
            assigned = callbacks.on_assigned
            if assigned is None:
                return None
            return lambda: assigned({each: lane.handed for each, lane in zip(partitions, lanes, strict=True)})
        call = callbacks.on_revoked if notice.what == "revoked" else callbacks.on_lost
        return None if call is None else lambda: call(partitions)

    def _call(self, notice: _Notice) -> None:
        call = self._user_callback(notice)
        if call is None:
            return
        self._calling = threading.get_ident()
        try:
            with self._member.session.blocking():
                call()
        except Exception as error:  # noqa: BLE001 - raised where the user reads
            self._member.fail_later(error)
        finally:
            self._calling = None


class EventRelay:
    """The `MemberEvents` that a member is given. It passes events on to a `GroupEvents` as long as that is there.

    The relay is made before the member, and connected before the member is started."""

    def __init__(self) -> None:
        self._events: Callable[[], GroupEvents[Any] | None] = lambda: None

    def connect(self, events: GroupEvents[Any]) -> None:
        self._events = weakref.ref(events)

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        if (events := self._events()) is not None:
            events.lanes_assigned(lanes)

    def lane_revoked(self, lane: Lane) -> None:
        if (events := self._events()) is not None:
            events.lane_revoked(lane)

    def lane_resumed(self, lane: Lane) -> None:
        if (events := self._events()) is not None:
            events.lane_resumed(lane)

    def lane_released(self, lane: Lane) -> None:
        if (events := self._events()) is not None:
            events.lane_released(lane)

    def lane_lost(self, lane: Lane) -> None:
        if (events := self._events()) is not None:
            events.lane_lost(lane)

    def group_changed(self) -> None:
        if (events := self._events()) is not None:
            events.group_changed()

    def call_back(self) -> None:
        if (events := self._events()) is not None:
            events.call_back()

    def member_failed(self) -> None:
        if (events := self._events()) is not None:
            events.member_failed()
