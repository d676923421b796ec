"""The picture of ownership, from events and from what the registry holds now."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pxrs.events import Event
from pxrs.group.description import GroupDescription, PartitionDescription
from pxrs.group.records import Paused
from pxrs.web import views
from pxrs.web.timeline import BARS_MAX, EVENTS_MAX, LANES_MAX, MARKS_MAX, timeline

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


def moved(partition: int, at_s: float, epoch: int) -> Event:
    place = {"group": "g", "topic": "orders", "topic_id": "t", "partition": partition}
    fields = {**place, "epoch": epoch, "member": f"m{epoch % 7}", "incarnation": f"i{epoch % 7}", "past": []}
    return Event("partition.handed_over", int(at_s * S), fields)


def test_a_picture_of_very_many_changes_is_bounded_and_begins_later() -> None:
    """10,000 hand-overs of 10 partitions in 1,000 s: the last 200 s or so are shown, without a hole."""
    events = [moved(number % 10, number / 10, number // 10 + 1) for number in range(10_000)]
    found = timeline(None, {}, events, 0, 1_000 * S)
    assert sum(len(row["bars"]) for row in found["rows"]) <= BARS_MAX + len(found["rows"])
    assert (len(found["marks"]), len(found["events"])) == (MARKS_MAX, EVENTS_MAX)
    assert found["since"] == 800
    for row in found["rows"]:
        assert (row["bars"][0]["from"], row["bars"][-1]["to"]) == (800, 1_000)
        assert all(one["to"] == next["from"] for one, next in pairwise(row["bars"]))


def test_a_picture_has_the_partitions_with_the_newest_changes() -> None:
    events = [moved(number, number, 1) for number in range(1_500)]
    found = timeline(None, {}, events, 0, 2_000 * S)
    assert [row["partition"] for row in found["rows"]] == list(range(1_500 - LANES_MAX, 1_500))
    assert found["partitions"] == 1_500


def test_a_change_on_a_machine_whose_clock_is_ahead_ends_no_bar_before_it_begins() -> None:
    events = [change("claimed", 10, 1, "a"), change("handed_over", 90, 2, "b"), change("handed_over", 30, 3, "c")]
    found = timeline(described(3, "c"), {}, events, 0, 40 * S)
    assert all(bar["from"] <= bar["to"] for row in found["rows"] for bar in row["bars"])
    assert [bar["epoch"] for row in found["rows"] for bar in row["bars"]] == [1, 2, 3]


def test_a_group_of_very_many_partitions_is_shown_by_those_that_need_attention() -> None:
    paused = Paused(3, "ValueError: no", traceback="where", failure="f")
    rows = [
        PartitionDescription(
            *("orders", "t", number, "i", "m", number != 2_300, "i", 1, 0, 1.0, "m", 0, number, number, True),
            paused if number in (7, 2_400) else None,
        )
        for number in range(2_500)
    ]
    found = views.described(GroupDescription("g", 1, None, (), tuple(rows), ()))
    assert (found["partitions"], found["paused"], found["unowned"]) == (2_500, 2, 1)
    assert len(found["rows"]) == views.ROWS_MAX
    shown = [row["partition"] for row in found["rows"]]
    assert shown == sorted(shown)
    assert {7, 2_300, 2_400, 2_499, 1_600} <= set(shown)
    assert found["rows"][0]["paused"]["traceback"] == "where"
