"""Writes that land after their sender gave them up, each as the one schedule that does harm if it is not thought of."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pxrs.errors import OutcomeUnknown
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Keys, Member, Owner
from pxrs.registry.steps import Steps, Write
from pxrs.testing.simulator.store import Request, SimulatedStore

KEYS = Keys("g")


class Consumer:
    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None: ...

    def lost(self, lane: Lane) -> None: ...


class Group:
    """Members without time or threads. `hold` names the write whose sender hears nothing and which lands later."""

    def __init__(self, partitions: int) -> None:
        self.store = SimulatedStore(random.Random(0), counts_anew=False, scans_in_two_moments=False)
        self.partitions = partitions
        self.held_back: list[Request] = []

    def join(self, name: str) -> MemberProtocol:
        self.store.begin_lease(name, float("inf"))
        record = Member(name, "t", "orders", self.partitions, since=len(self.store.expiry))
        protocol = MemberProtocol(
            KEYS, name, record, Consumer(), lambda partition, first: first, lambda: 0.0, keys_max=64, handover_s=10.0
        )
        self.drive(protocol, protocol.join())
        return protocol

    def leave(self, protocol: MemberProtocol) -> None:
        self.store.end_lease(protocol.incarnation)

    def drive(self, protocol: MemberProtocol, steps: Steps[Any], hold: Callable[[Write], bool] | None = None) -> Any:
        try:
            operation = next(steps)
            while True:
                request = Request(operation, protocol.incarnation, protocol.incarnation)
                if hold is not None and isinstance(operation, Write) and hold(operation):
                    self.held_back.append(request)
                    operation = steps.throw(OutcomeUnknown("no answer"))
                    continue
                self.store.apply(request)
                operation = steps.send(request.result) if request.error is None else steps.throw(request.error)
        except StopIteration as end:
            return end.value

    def look(self, *protocols: MemberProtocol) -> None:
        """Everybody looks until there is nothing more to do."""
        while True:
            has_changed = [self.drive(protocol, protocol.look(0.0)) for protocol in protocols]
            if not any(has_changed):
                return

    def owner(self, partition: int) -> Owner:
        entry = self.store.state.get(KEYS.owner("t", partition))
        assert entry is not None
        return Owner.load(entry.key, entry.value)

    def land(self) -> None:
        while self.held_back:
            self.store.apply(self.held_back.pop(0))


def is_release(write: Write) -> bool:
    return not write.is_leased and any(key.startswith(KEYS.owners) for key in write.put)


def hands_out(protocol: MemberProtocol, partition: int) -> bool:
    return partition in protocol.held and not protocol.held[partition].lane.is_stopping


def test_x3_a_release_that_lands_after_the_partition_was_resumed_does_not_make_two_owners() -> None:
    group = Group(2)
    a = group.join("a")
    group.look(a)
    b = group.join("b")
    group.drive(a, a.look(0.0))  # assigns partition 1 to b
    group.drive(a, a.look(0.0))  # revokes it
    with pytest.raises(OutcomeUnknown):
        group.drive(a, a.look(0.0), is_release)
    group.leave(b)
    group.look(a)
    assert hands_out(a, 1)
    c = group.join("c")
    group.drive(a, a.look(0.0))  # assigns partition 1 to c; a has not looked again yet
    group.land()
    group.drive(c, c.look(0.0))
    assert not (hands_out(a, 1) and hands_out(c, 1))


def test_x8_a_fence_that_lands_after_the_partition_was_resumed_takes_nothing() -> None:
    group = Group(2)
    a = group.join("a")
    group.look(a)
    a.held[1].lane.position += 1  # in hand: it cannot be released
    b = group.join("b")
    group.look(a)
    with pytest.raises(OutcomeUnknown):
        group.drive(a, a.look(11.0), lambda write: KEYS.owner("t", 1) in write.put)
    group.leave(b)
    group.look(a)
    assert hands_out(a, 1)
    group.land()
    assert group.owner(1).incarnation == "a"
