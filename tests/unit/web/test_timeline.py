"""The picture of ownership, from events and from what the registry holds now."""

from __future__ import annotations

from typing import Any

from pxrs.events import Event
from pxrs.group.description import GroupDescription, PartitionDescription
from pxrs.web.timeline import timeline

S = 1_000_000


def change(name: str, at_s: int, epoch: int, member: str | None, past: list[list[Any]] | None = None) -> Event:
    place = {"group": "g", "topic": "orders", "topic_id": "t", "partition": 0}
    incarnation = None if member is None else f"i-{member}"
    return Event(
        f"partition.{name}",
        at_s * S,
        {**place, "epoch": epoch, "member": member, "incarnation": incarnation, "past": past or []},
    )


def described(epoch: int, member: str | None) -> GroupDescription:
    owner = None if member is None else f"i-{member}"
    row = PartitionDescription(
        *("orders", "t", 0, owner, member, True, owner, epoch, None, None, None, 0, 0, 0, True, None)
    )
    return GroupDescription("g", 1, None, (), (row,), ())


def bars(found: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    (row,) = found["rows"]
    return [(bar["epoch"], bar["member"], bar["from"], bar["to"]) for bar in row["bars"]]


def test_each_owner_has_a_bar_from_its_epoch_to_the_next() -> None:
    events = [
        change("claimed", 10, 1, "a"),
        change("released", 20, 2, None),
        change("handed_over", 21, 3, "b"),
        change("taken_over", 30, 4, "c"),
    ]
    found = timeline(described(4, "c"), {}, events, 0, 40 * S)
    assert bars(found) == [(1, "a", 10, 20), (3, "b", 21, 30), (4, "c", 30, 40)]
    assert [mark["name"] for mark in found["marks"]] == [event.name for event in events]


def test_an_owner_that_no_event_tells_of_yet_begins_when_it_was_first_seen() -> None:
    found = timeline(described(2, "b"), {("t", 0): (2, 33 * S)}, [change("claimed", 10, 1, "a")], 0, 40 * S)
    assert bars(found) == [(1, "a", 10, 33), (2, "b", 33, 40)]


def test_an_epoch_whose_event_was_lost_is_known_from_the_next_one() -> None:
    events = [change("claimed", 10, 1, "a"), change("taken_over", 30, 3, "c", [[2, "i-b", "b"]])]
    found = timeline(described(3, "c"), {}, events, 0, 40 * S)
    assert bars(found) == [(1, "a", 10, 30), (2, "b", 30, 30), (3, "c", 30, 40)]


def test_an_owner_from_before_the_picture_begins_with_it() -> None:
    found = timeline(described(7, "a"), {}, [], 100 * S, 140 * S)
    assert bars(found) == [(7, "a", 100, 140)]


def test_a_refused_checkpoint_and_a_pause_are_marks_and_lines() -> None:
    place = {"group": "g", "topic": "orders", "topic_id": "t", "partition": 0, "epoch": 1, "member": "<b>a</b>"}
    events = [
        Event("partition.refused", 5 * S, {**place, "offset": 3}),
        Event("partition.paused", 6 * S, {**place, "offset": 4, "error": "ValueError: x"}),
        Event("member.joined", 7 * S, {"group": "g", "member": "a"}),
    ]
    found = timeline(None, {}, events, 0, 10 * S)
    assert [(mark["name"], mark["partition"]) for mark in found["marks"]] == [
        ("partition.refused", 0),
        ("partition.paused", 0),
    ]
    assert [line["name"] for line in found["events"]] == ["member.joined", "partition.paused", "partition.refused"]
    assert "<b>a</b>" in found["marks"][0]["text"]
