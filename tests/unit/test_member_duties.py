"""What a member that waits asks of the registry and the log: next to nothing, whatever it waits for.

Operations are counted over a second. A member that spins makes thousands of them, one that waits a few; the bounds lie
far from both, so that a busy machine changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pxrs.consumer.consumer import Consumer
from pxrs.errors import Closed, Conflict, OutcomeUnknown, RegistryUnavailable
from pxrs.group.records import Keys, Leader, Pinned
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.testing.hooked import HookedRegistry, SharedStore
from pxrs.testing.waiting import aside, eventually

PATIENCE_S = 30.0
COUNTED_S = 1.0
KEYS = Keys("g")
QUIET = {"commit_interval": 3_600.0, "lease_ttl": 3_600.0}
"""Nothing is due for a long time, but what a test is about."""


@pytest.fixture
def place() -> Iterator[SharedStore]:
    with ExitStack() as stack:
        yield SharedStore(stack, MemoryStore())


class Calls:
    """How often something was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1

    def in_a_second(self) -> int:
        before = self.count
        threading.Event().wait(COUNTED_S)
        return self.count - before


def counted(registry: HookedRegistry) -> Calls:
    registry.reach = calls = Calls()
    return calls


def with_topic(place: SharedStore, partitions: int) -> tuple[Hub, HookedRegistry]:
    hub, registry = place.hooked()
    hub.create_topic("t", partitions=partitions)
    send(hub, partitions, 3)
    return hub, registry


def send(hub: Hub, partitions: int, count: int) -> None:
    for partition in range(partitions):
        with hub.producer("t") as out:
            for _ in range(count):
                out.send(b"x", partition=partition)


def another(place: SharedStore, hub: Hub) -> tuple[Hub, HookedRegistry]:
    """A hub with the same topic, and a registry handle of its own."""
    registry = HookedRegistry(place.store)
    return place.open(registry, hub.log), registry  # type: ignore[arg-type]


def is_leader(consumer: Consumer) -> bool:
    protocol = consumer._member.session.protocol
    return protocol is not None and protocol.is_leading


def term(registry: HookedRegistry) -> int:
    entry = registry.get(KEYS.leader)
    assert entry is not None
    return Leader.load(entry.key, entry.value).term


def take_all_in_hand(inbox: Consumer, partitions: int) -> list[Message]:
    """With ack="manual": a message of each partition, none of which is acknowledged."""
    found: dict[int, Message] = {}
    while len(found) < partitions:
        for message in inbox.poll(1, timeout=PATIENCE_S):
            found[message.partition] = message
    return list(found.values())


def test_x8_members_that_do_not_lead_wait_quietly_for_a_hand_over_that_is_overdue(place: SharedStore) -> None:
    hub, _ = with_topic(place, 2)
    slow = hub.consumer("t", "g", ack="manual", handover_timeout=3_600, **QUIET)
    take_all_in_hand(slow, 2)
    assert is_leader(slow)
    hub_2, registry = another(place, hub)
    waits = hub_2.consumer("t", "g", handover_timeout=0.02, **QUIET)
    eventually(lambda: len(slow.assignment) == 1, PATIENCE_S)
    eventually(lambda: any(key.startswith(KEYS.owners) for key in waits._member.session.watched), PATIENCE_S)
    assert counted(registry).in_a_second() < 100
    assert waits.assignment == []


def test_x8_a_leader_whose_fence_is_refused_again_and_again_pauses_between_its_tries(place: SharedStore) -> None:
    hub, registry = with_topic(place, 2)
    leads = hub.consumer("t", "g", ack="manual", handover_timeout=0.02, **QUIET)
    take_all_in_hand(leads, 2)
    assert is_leader(leads)
    refused = Calls()

    def refuse(commit: Commit) -> None:
        if KEYS.leader in commit.expect and any(key.startswith(KEYS.owners) for key in commit.put):
            refused()
            raise Conflict([KEYS.leader])

    registry.before = refuse
    hub_2, _ = another(place, hub)
    waits = hub_2.consumer("t", "g", **QUIET)
    eventually(lambda: refused.count > 0, PATIENCE_S)
    assert counted(registry).in_a_second() < 600
    registry.before = lambda commit: None
    eventually(lambda: len(leads._lanes.owned()) == 1, PATIENCE_S)
    eventually(lambda: len(waits.assignment) == 1, PATIENCE_S)


@pytest.mark.parametrize("is_written", [False, True])
def test_r5_a_leader_whose_targets_are_not_answered_begins_one_term_for_each_try(
    place: SharedStore, is_written: bool
) -> None:
    """The store answers small commits, and is too slow for those of targets; whether it applies them or not."""
    hub, registry = with_topic(place, 2)
    leads = hub.consumer("t", "g", **QUIET)
    eventually(lambda: leads.assignment == [0, 1], PATIENCE_S)
    first = term(registry)
    tries = Calls()

    def lose_the_reply(commit: Commit) -> None:
        if KEYS.leader in commit.expect and any(key.startswith(KEYS.targets) for key in commit.put):
            tries()
            raise OutcomeUnknown("no answer")

    if is_written:
        registry.after = lose_the_reply
    else:
        registry.before = lose_the_reply
    hub_2, _ = another(place, hub)
    joins = hub_2.consumer("t", "g", **QUIET)
    eventually(lambda: tries.count > 0, PATIENCE_S)
    assert tries.in_a_second() < 20
    assert term(registry) - first <= tries.count
    registry.before = registry.after = lambda commit: None
    eventually(lambda: len(leads.assignment) == len(joins.assignment) == 1, PATIENCE_S)
    eventually(lambda: term(registry) - first == tries.count, PATIENCE_S)


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_store_that_is_away_is_asked_with_pauses_however_often_the_member_is_woken(
    place: SharedStore, is_woken: bool
) -> None:
    hub, registry = with_topic(place, 1)
    inbox = hub.consumer("t", "g", **QUIET)
    eventually(lambda: inbox.assignment == [0], PATIENCE_S)
    asked, is_over = Calls(), threading.Event()

    def away() -> None:
        asked()
        raise RegistryUnavailable("away")

    def wake_often() -> None:
        while not is_over.wait(0.001):
            inbox._member.wake()

    registry.reach = away
    waking = aside(wake_often) if is_woken else None
    inbox._member.wake()
    eventually(lambda: asked.count > 0, PATIENCE_S)
    assert asked.in_a_second() < 50
    is_over.set()
    if waking is not None:
        waking.result(PATIENCE_S)
    registry.reach = lambda: None


def read_to_the_end(inbox: Consumer, seen: list[Message]) -> None:
    seen.extend(inbox)


def run_to_the_end(inbox: Consumer, seen: list[Message]) -> None:
    inbox.run(seen.append)


@pytest.mark.parametrize("read", [read_to_the_end, run_to_the_end])
def test_until_end_waits_quietly_for_the_rest_while_the_topic_grows(
    place: SharedStore, monkeypatch: pytest.MonkeyPatch, read: Callable[[Consumer, list[Message]], None]
) -> None:
    hub, _ = with_topic(place, 2)
    with hub.consumer("t", "g", until="end") as inbox:
        eventually(lambda: inbox.assignment == [0, 1], PATIENCE_S)
        inbox.pause(1)
        send(hub, 1, 100)  # behind the end of partition 0 that counts
        looks = Calls()
        for name in ("fetch", "read"):
            noting(monkeypatch, inbox._source, name, looks)
        seen: list[Message] = []
        reading = aside(lambda: read(inbox, seen))
        eventually(lambda: inbox._lanes[0].position == 3, PATIENCE_S)
        assert looks.in_a_second() < 100
        assert not reading.done()
        inbox.resume(1)
        reading.result(PATIENCE_S)
    found = sorted((message.partition, message.offset) for message in seen)
    assert found == [(partition, offset) for partition in (0, 1) for offset in (0, 1, 2)]


def noting(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str, calls: Calls) -> None:
    original = getattr(thing, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls()
        return original(*given, **named)

    monkeypatch.setattr(thing, name, noted)


def test_until_end_goes_on_where_a_seek_has_led_back(place: SharedStore) -> None:
    hub, _ = with_topic(place, 2)
    with hub.consumer("t", "g", until="end") as inbox:
        eventually(lambda: inbox.assignment == [0, 1], PATIENCE_S)
        inbox.pause(1)
        seen: list[Message] = []
        reading = aside(lambda: read_to_the_end(inbox, seen))
        eventually(lambda: inbox._lanes[0].position == 3, PATIENCE_S)
        inbox.seek(0, 1)
        eventually(lambda: len(seen) == 5, PATIENCE_S)
        inbox.resume(1)
        reading.result(PATIENCE_S)
    assert [message.offset for message in seen if message.partition == 0] == [0, 1, 2, 1, 2]


# Whose time counts.


class Shared:
    """Four partitions: a leader that has nothing in hand, and an owner with a message of each of its two in hand. Then
    two others join, and each of the first two has to give one away."""

    def __init__(self, place: SharedStore, leader_s: float, owner_s: float) -> None:
        self.lost: list[int] = []
        hub, _ = with_topic(place, 4)
        self.leads = hub.consumer("t", "g", handover_timeout=leader_s, **QUIET)
        eventually(lambda: is_leader(self.leads) and len(self.leads.assignment) == 4, PATIENCE_S)
        self.owns = another(place, hub)[0].consumer(
            "t", "g", ack="manual", handover_timeout=owner_s, on_lost=self.lost.extend, **QUIET
        )
        eventually(lambda: len(self.owns.assignment) == 2, PATIENCE_S)
        self.in_hand = take_all_in_hand(self.owns, 2)
        self.others = [another(place, hub)[0].consumer("t", "g", **QUIET) for _ in range(2)]

    @property
    def has_moved(self) -> bool:
        return all(each.assignment for each in self.others)


def test_x8_an_owner_that_needs_no_time_is_not_given_that_of_the_leader(place: SharedStore) -> None:
    shared = Shared(place, leader_s=3_600, owner_s=0.05)
    eventually(lambda: shared.has_moved, PATIENCE_S)
    eventually(lambda: len(shared.lost) == 1, PATIENCE_S)
    assert len(shared.owns.assignment) == 1


def test_x8_an_owner_that_needs_time_is_given_it_though_the_leader_is_hurried(place: SharedStore) -> None:
    shared = Shared(place, leader_s=0.02, owner_s=3_600)
    protocol = shared.leads._member.session.protocol
    assert protocol is not None
    (since,) = eventually(lambda: len(protocol.asked) == 1 and list(protocol.asked.values()), PATIENCE_S)
    eventually(lambda: place.store.clock.now() > since + 0.5, PATIENCE_S)
    shared.leads._member.wake()
    assert shared.lost == []
    assert not shared.has_moved
    for message in shared.in_hand:
        shared.owns.ack(message)
    eventually(lambda: shared.has_moved, PATIENCE_S)
    assert shared.lost == []


def test_a_member_is_woken_by_a_change_of_its_group_and_by_the_end_of_its_registry(place: SharedStore) -> None:
    """Nothing else is due for an hour."""
    hub, registry = with_topic(place, 2)
    first = hub.consumer("t", "g", **QUIET)
    eventually(lambda: first.assignment == [0, 1], PATIENCE_S)
    hub_2, _ = another(place, hub)
    second = hub_2.consumer("t", "g", **QUIET)
    eventually(lambda: len(first.assignment) == len(second.assignment) == 1, PATIENCE_S)
    second.close()
    eventually(lambda: first.assignment == [0, 1], PATIENCE_S)
    registry.close()
    with pytest.raises(Closed):
        aside(lambda: list(first)).result(PATIENCE_S)


def test_x8_a_leader_wakes_when_the_time_of_an_owner_is_over(place: SharedStore) -> None:
    """Its next duty is then, neither at its own time nor at the next checkpoint."""
    shared = Shared(place, leader_s=0.02, owner_s=300)
    member = shared.leads._member
    protocol = member.session.protocol
    assert protocol is not None
    (since,) = eventually(lambda: len(protocol.asked) == 1 and list(protocol.asked.values()), PATIENCE_S)
    assert protocol.fence_at == since + 300
    assert member._rounds._next_duty_at(protocol) == since + 300
    for other in (shared.owns, *shared.others):
        followed = other._member.session.protocol
        assert followed is not None
        assert followed.fence_at == float("inf")


def test_g6_a_member_that_could_not_finish_its_join_joins_anew(place: SharedStore) -> None:
    """Else the members that wait for it to write the starts would wait until their time is over."""
    hub, registry = with_topic(place, 2)
    inbox = hub.consumer("t", "g", **QUIET)
    failed = Calls()

    def fail_once(commit: Commit) -> None:
        if any("/starts/" in key for key in commit.put) and not failed.count:
            failed()
            raise RegistryUnavailable("no answer")

    starts = KEYS.starts(hub.topic("t").id)
    eventually(lambda: inbox.assignment == [0, 1], PATIENCE_S)
    lease = inbox._member.lease
    assert lease is not None
    registry.commit(put={starts: Pinned().dump()}, delete=[KEYS.checkpoint(hub.topic("t").id, 0)])
    registry.before = fail_once
    lease.close()
    inbox._member.wake()
    eventually(lambda: failed.count == 1, PATIENCE_S)
    eventually(lambda: inbox.assignment == [0, 1], PATIENCE_S)
    eventually(lambda: registry.get(KEYS.pinning(hub.topic("t").id)) is None, PATIENCE_S)
    entry = registry.get(starts)
    assert entry is not None
    assert Pinned.load(starts, entry.value) == Pinned(2)
