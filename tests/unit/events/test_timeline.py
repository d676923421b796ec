"""The history of owners, rebuilt from events, although processes die before they have stored theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.events import Event
from pxrs.events.model import Json
from pxrs.events.storing import EventStore
from pxrs.events.timeline import Place, Tenure, owners
from pxrs.events.writer import EventWriter
from pxrs.group.records import PAST_MAX, Keys, Owner
from pxrs.hub import Hub
from pxrs.testing.waiting import eventually
from pxrs.upkeep.observing import OwnerObserver

WAIT_S = 20.0


class Dying:
    """The recorder of a process that is killed before any of its events is stored."""

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: Json) -> None: ...

    def audit(self, action: str, /, **fields: Json) -> None: ...


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=1)
        with hub.producer("t") as out:
            out.send("x")
        yield hub


def own(hub: Hub, name: str, *, is_killed: bool) -> None:
    """A member that owns the partition for a while. is_killed: none of its events is stored."""
    recorder = Dying() if is_killed else hub.parts.events
    with Consumer(hub.topic("t").log, hub.registry, "g", name=name, recorder=recorder) as member:
        eventually(lambda: member.assignment == [0])
        assert hub.parts.events.flush(WAIT_S)  # so that it knows at its release that its claim is stored
    assert hub.parts.events.flush(WAIT_S)


def told(hub: Hub) -> list[tuple[int, str]]:
    (found,) = owners(hub.events(group="g")).values()
    return [(each.epoch, each.member) for each in found]


def test_what_a_dead_process_has_not_stored_is_told_by_the_next_one(hub: Hub) -> None:
    own(hub, "anna", is_killed=False)
    own(hub, "bert", is_killed=True)
    own(hub, "cleo", is_killed=True)
    own(hub, "dora", is_killed=False)
    assert told(hub) == [
        *((1, "anna"), (2, ""), (3, "bert"), (4, ""), (5, "cleo"), (6, ""), (7, "dora"), (8, "")),
    ]
    handed = [each for each in hub.events() if each.name == "partition.handed_over"]
    assert [(each.fields["from_member"], each.fields["member"]) for each in handed] == [("cleo", "dora")]


def test_upkeep_tells_of_the_last_owners_that_nobody_has_told_of_and_of_each_once(hub: Hub) -> None:
    own(hub, "anna", is_killed=False)
    own(hub, "bert", is_killed=True)
    assert told(hub) == [(1, "anna"), (2, "")]
    for _ in range(2):
        assert hub.run_upkeep().errors == {}
        assert told(hub) == [(1, "anna"), (2, ""), (3, "bert"), (4, "")]
    assert [each.name for each in hub.events() if each.name == "partition.observed"] == ["partition.observed"]
    own(hub, "cleo", is_killed=False)
    assert told(hub)[-2:] == [(5, "cleo"), (6, "")]


def test_the_owner_key_carries_no_more_than_needed(hub: Hub) -> None:
    for name in ("anna", "bert", "cleo"):
        own(hub, name, is_killed=False)
    (entry,) = hub.registry.scan("groups/g/owners/")
    assert [each.name for each in Owner.load(entry.key, entry.value).past] == ["cleo"]  # the rest is stored
    for _ in range(PAST_MAX):
        own(hub, "dora", is_killed=True)
    (entry,) = hub.registry.scan("groups/g/owners/")
    assert len(Owner.load(entry.key, entry.value).past) == PAST_MAX


def test_a_duplicate_is_told_by_the_epoch_and_the_event_of_the_change_itself_counts_first() -> None:
    place = {"group": "g", "topic_id": "t", "partition": 0}
    claimed = Event("partition.claimed", 7, {**place, "epoch": 1, "member": "a", "incarnation": "i", "past": []})
    seen = Event("partition.observed", 9, {**place, "epoch": 1, "member": "a", "incarnation": "i", "past": []})
    freed = Event(
        "partition.freed", 8, {**place, "epoch": 2, "member": "", "incarnation": None, "past": [[1, "i", "a"]]}
    )
    expected = [Tenure(1, "i", "a", 7, "partition.claimed"), Tenure(2, None, "", 8, "partition.freed")]
    for events in ([claimed, freed, seen], [seen, freed, claimed], [freed, claimed, claimed]):
        assert owners(events) == {Place("g", "t", 0): expected}
    assert owners([freed])[Place("g", "t", 0)][0] == Tenure(1, "i", "a", None, None)


@pytest.mark.parametrize("past", [None, 7, [[1]], ["x"], [[None, "i", "a"]], [[True, "i", "a"]]])
def test_a_damaged_past_is_passed_over(past: object) -> None:
    event = Event("partition.freed", 8, {"group": "g", "topic_id": "t", "partition": 0, "epoch": 2, "past": past})
    assert [each.epoch for each in owners([event])[Place("g", "t", 0)]] == [2]


def test_upkeep_tells_of_the_owners_of_a_group_that_a_killed_process_has_deleted(hub: Hub) -> None:
    own(hub, "anna", is_killed=False)
    group = hub.group("g")
    setattr(group, "_recorder", Dying())  # noqa: B010 - for this one, and not for its class
    group.delete()
    assert told(hub) == [(1, "anna"), (2, "")]
    hub.run_upkeep()
    assert told(hub) == [(1, "anna"), (2, ""), (3, "")]


def test_the_history_begins_anew_when_the_hub_is_given_to_another_registry(tmp_path: Path) -> None:
    """There the epochs begin at 1 again, and are no duplicates of those in the former registry."""
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        hub.create_topic("t", partitions=1)
        own(hub, "anna", is_killed=False)
        own(hub, "bert", is_killed=False)
    with pxrs.open(tmp_path / "hub", f"sqlite:///{tmp_path}/registry.db", upkeep=False) as hub:
        hub.adopt_registry()
        own(hub, "cleo", is_killed=True)
        hub.run_upkeep()
        assert told(hub) == [(1, "cleo"), (2, "")]
        own(hub, "dora", is_killed=False)
        assert told(hub) == [(1, "cleo"), (2, ""), (3, "dora"), (4, "")]


def claim(hub: Hub, group: str, count: int) -> None:
    """Owner keys of so many partitions, of which no event tells."""
    keys = Keys(group)
    owner = Owner("i", 1, "anna").dump()
    for first in range(0, count, 500):
        numbers = range(first, min(first + 500, count))
        hub.registry.commit(put={keys.owner("topic", number): owner for number in numbers})


def test_upkeep_tells_of_more_owners_than_the_buffer_of_events_can_hold(hub: Hub) -> None:
    claim(hub, "large", 2_500)
    hub.parts.events = EventWriter(EventStore(hub.log, lambda: None), "memory:", buffer_max=1_200)
    observer = OwnerObserver(hub.parts)
    assert observer.observe(lambda: False) == 2_500
    assert len(owners(hub.events(group="large"))) == 2_500
    assert not [each for each in hub.events() if each.name == "events.dropped"]
    assert OwnerObserver(hub.parts).observe(lambda: False) == 0


def test_a_damaged_owner_key_does_not_keep_upkeep_from_telling_of_the_others(hub: Hub) -> None:
    claim(hub, "a", 2)
    claim(hub, "b", 1)
    hub.registry.commit(put={Keys("a").owner("topic", 0): b"damaged"})
    assert [*hub.run_upkeep().errors] == ["recording owners"]
    assert {(place.group, place.partition) for place in owners(hub.events())} == {("a", 1), ("b", 0)}


def test_upkeep_does_not_tell_of_a_change_whose_event_is_stored_while_it_looks(hub: Hub) -> None:
    observer = OwnerObserver(hub.parts)
    own(hub, "anna", is_killed=False)
    assert observer.observe(lambda: False) == 0
    registry = hub.parts.registry.get()
    scan = registry.scan

    def slow_scan(prefix: str, *rest: Any) -> Any:
        if prefix == Keys("g").owners:
            setattr(registry, "scan", scan)  # noqa: B010 - once
            own(hub, "bert", is_killed=False)  # whose events are stored before the keys have been looked at
        return scan(prefix, *rest)

    setattr(registry, "scan", slow_scan)  # noqa: B010 - for this one, and not for its class
    assert observer.observe(lambda: False) == 0
    assert told(hub)[-2:] == [(3, "bert"), (4, "")]
