"""Writes that land after their sender gave them up, each as the one schedule that does harm if it is not thought of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pxrs.errors import LeaseExpired, OutcomeUnknown
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Keys, Member, Owner, Target
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

    def __init__(self, partitions: int, *, keys_max: int = 64, counts_anew: bool = False) -> None:
        self.store = SimulatedStore(random.Random(0), counts_anew=counts_anew, scans_in_two_moments=False)
        self.partitions = partitions
        self.keys_max = keys_max
        self.held_back: list[Request] = []
        self._events: list[tuple[float, Callable[[], None]]] = []
        self._operations = 0

    def join(self, name: str) -> MemberProtocol:
        self.store.begin_lease(name, float("inf"))
        record = Member(name, "t", "orders", self.partitions, since=len(self.store.expiry))
        protocol = MemberProtocol(
            KEYS,
            name,
            record,
            Consumer(),
            lambda partition, first: first,
            lambda: 0.0,
            keys_max=self.keys_max,
            handover_s=10.0,
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
                self._happen()
                self.store.apply(request)
                operation = steps.send(request.result) if request.error is None else steps.throw(request.error)
        except StopIteration as end:
            return end.value

    def expect_events(self, *events: tuple[float, Callable[[], None]]) -> None:
        """Each happens before the operation of this number, counted from now on; the first operation is 1."""
        self._events, self._operations = sorted(events, key=lambda event: event[0]), 0

    def _happen(self) -> None:
        self._operations += 1
        while self._events and self._events[0][0] <= self._operations:
            self._events.pop(0)[1]()

    def look(self, *protocols: MemberProtocol) -> None:
        """All members look until no look changes anything."""
        while True:
            has_changed = [self.drive(protocol, protocol.look(0.0)) for protocol in protocols]
            if not any(has_changed):
                return

    def owner(self, partition: int) -> Owner:
        entry = self.store.state.get(KEYS.owner("t", partition))
        assert entry is not None
        return Owner.load(entry.key, entry.value)

    def found(self, folder: str) -> dict[str, bytes]:
        return {entry.key.removeprefix(folder): entry.value for entry in self.store.state.scan(folder, None, None)}

    def check_targets(self) -> None:
        """Every member and nobody else has a target, and every partition is in one target and owned by that member."""
        targets = {name: Target.load(name, value) for name, value in self.found(KEYS.targets).items()}
        assert targets.keys() == self.found(KEYS.members).keys()
        meant = [(number, name) for name, target in targets.items() for number in target.numbers("t")]
        assert sorted(meant) == [(number, self.owner(number).incarnation) for number in range(self.partitions)]

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
    a.held[1].lane.position += 1  # a message is in hand: not released
    b = group.join("b")
    group.look(a)
    with pytest.raises(OutcomeUnknown):
        group.drive(a, a.look(11.0), lambda write: KEYS.owner("t", 1) in write.put)
    group.leave(b)
    group.look(a)
    assert hands_out(a, 1)
    group.land()
    assert group.owner(1).incarnation == "a"


def is_of_targets(write: Write) -> bool:
    return KEYS.leader in write.expect and any(key.startswith(KEYS.targets) for key in write.put)


def is_fence(write: Write) -> bool:
    return KEYS.leader in write.expect and any(key.startswith(KEYS.owners) for key in write.put)


def is_deletion(write: Write) -> bool:
    return any(key.startswith(KEYS.targets) for key in write.delete)


def second(is_held: Callable[[Write], bool]) -> Callable[[Write], bool]:
    """The second of these writes."""
    count = itertools.count()
    return lambda write: is_held(write) and next(count) == 1


def is_term(write: Write) -> bool:
    return KEYS.leader in write.put


AFTER_HANDOVER = 11.0
UNANSWERED: dict[str, Callable[[], list[Callable[[Write], bool]]]] = {
    "targets": lambda: [is_of_targets],
    "second targets": lambda: [second(is_of_targets)],
    "targets and the next term": lambda: [is_of_targets, is_term],
    "deletion": lambda: [is_deletion],
    "fence": lambda: [is_fence],
}
"""The writes of a leader, one in each of its looks."""


class Led:
    """A group led by "a", whose writes of this kind were not answered and have not landed yet."""

    def __init__(self, kind: str, keys_max: int, *, counts_anew: bool) -> None:
        self.group = Group(3, keys_max=keys_max, counts_anew=counts_anew)
        self.members: dict[str, MemberProtocol] = {}
        self.join("a")
        self.look(0.0)
        leader = self.members["a"]
        if kind == "fence":
            leader.held[2].lane.position += 1  # a message is in hand: not released
        self.join("b")
        self.look(0.0)
        if kind != "fence":
            self.join("c")
        if kind == "deletion":
            self.look(0.0)
            self.leave("b")
        for is_held in UNANSWERED[kind]():
            look = leader.look(AFTER_HANDOVER)
            with pytest.raises(OutcomeUnknown):
                self.group.drive(leader, look, is_held)

    def join(self, name: str) -> None:
        self.members[name] = self.group.join(name)

    def leave(self, name: str) -> None:
        self.group.leave(self.members.pop(name))

    def look(self, now: float) -> None:
        """All members look until no look changes anything."""
        has_changed = True
        while has_changed:
            has_changed = False
            for protocol in list(self.members.values()):
                with suppress(LeaseExpired):  # the member has left in the middle of its look
                    has_changed = self.group.drive(protocol, protocol.look(now)) or has_changed


def one_joins_and_the_leader_dies(led: Led) -> None:
    led.join("d")
    led.leave("a")


CHANGES: dict[str, Callable[[Led], None]] = {
    "the leader dies": lambda led: led.leave("a"),
    "the newest dies": lambda led: led.leave(max(led.members)),
    "one joins": lambda led: led.join("d"),
    "one joins and the leader dies": one_joins_and_the_leader_dies,
}
LATE = [
    ("targets", 64, True),
    ("targets", 2, False),
    ("second targets", 2, True),
    ("targets and the next term", 64, False),
    ("deletion", 64, True),
    ("fence", 64, False),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "keys_max", "counts_anew"), LATE)
def test_r5_whenever_a_late_write_of_a_leader_lands_every_partition_is_in_one_target(
    kind: str, keys_max: int, counts_anew: bool, change: str
) -> None:
    """The change at every moment, counted in operations of members, and the write landing at every moment. A write that
    was refused once would be refused later too."""

    def is_refused(changes_at: int, lands_at: float) -> bool:
        led = Led(kind, keys_max, counts_anew=counts_anew)
        group, late = led.group, led.group.held_back[0]
        group.expect_events((changes_at, lambda: CHANGES[change](led)), (lands_at, group.land))
        led.look(AFTER_HANDOVER)
        has_landed_before = not group.held_back
        group.land()
        group.check_targets()
        assert has_landed_before or late.error is not None, "nobody would look for it any more"
        return late.error is not None

    for changes_at in itertools.count(1):
        is_refused(changes_at, changes_at - 0.5)  # right before the change, before the same operation
        if next(at for at in itertools.count(1) if is_refused(changes_at, at)) < changes_at:
            return
