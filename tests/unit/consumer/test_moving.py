"""Pausing and seeking, and reading up to where the topic ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pxrs.consumer.hand_out import HandOut
from pxrs.errors import (
    InvalidGroup,
    OffsetOutOfRange,
    PartitionsPaused,
)
from pxrs.group.lane import Lane
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.testing.waiting import aside, eventually
from tests.unit.consumer.reading import (
    BOUND_S,
    SOON_S,
    admin,
    begin,
    checkpoint,
    create,
    in_time,
    offsets,
    poison,
    polled,
    send,
    settle,
    take,
)


def test_assignment_is_shared_and_comes_back(hub: Hub) -> None:
    create(hub, partitions=4)
    with hub.consumer("t", "g") as first:
        settle(first, partitions=4)
        with hub.consumer("t", "g") as second:
            eventually(lambda: len(first.assignment) == len(second.assignment) == 2)
            assert sorted(first.assignment + second.assignment) == [0, 1, 2, 3]
        settle(first, partitions=4)


def test_what_is_paused_is_not_handed_out_and_stays_owned(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    with hub.consumer("t", "g") as inbox:
        settle(inbox, partitions=2)
        inbox.pause(0)
        assert {each.partition for each in polled(inbox, 3)} == {1}
        assert inbox.poll(timeout=0.05) == []
        assert inbox.assignment == [0, 1]
        inbox.resume(0)
        assert {each.partition for each in polled(inbox, 3)} == {0}
        inbox.pause()
        send(hub, {0: 1, 1: 1})
        assert inbox.poll(timeout=0.05) == []
        inbox.resume()
        polled(inbox, 2)


def test_a_pause_in_the_body_takes_effect_with_the_next_message(hub: Hub) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g") as inbox:
        messages = iter(inbox)
        take(messages, 1)
        inbox.pause()
        waiting = begin(lambda: next(messages))
        inbox.resume()
        assert waiting.result(BOUND_S).offset == 1


def test_seek_reads_again_and_the_checkpoint_never_goes_back(hub: Hub) -> None:
    create(hub, count=6)
    with hub.consumer("t", "g") as inbox:
        assert offsets(inbox.poll(timeout=BOUND_S)) == [0, 1, 2, 3, 4, 5]
        inbox.commit()
        inbox.seek(0, 2)
        assert offsets(inbox.poll(2, timeout=BOUND_S)) == [2, 3]
        inbox.commit()
        assert checkpoint(hub) == 6
    assert checkpoint(hub) == 6


def test_seek_in_the_body_of_an_iteration(hub: Hub) -> None:
    create(hub, count=6)
    with hub.consumer("t", "g") as inbox:
        messages = iter(inbox)
        assert offsets(take(messages, 2)) == [0, 1]
        inbox.seek(0, 4)
        assert offsets(take(messages, 1)) == [4]
        inbox.seek(0, 0)
        assert offsets(take(messages, 3)) == [0, 1, 2]


def test_a_seek_to_the_end_in_the_body_leaves_nothing_in_hand(hub: Hub) -> None:
    """What is skipped is done: a partition with nothing in hand must be free to move, and makes no hung handler."""
    create(hub, partitions=2, count=6)
    with hub.consumer("t", "g", handover_timeout=3600, commit_interval=SOON_S) as first:
        messages = iter(first)
        for message in take(messages, 1):
            first.seek(message.partition, 6)
            first.seek(1 - message.partition, 6)
        waiting = begin(lambda: next(messages))
        eventually(lambda: [checkpoint(hub, p) for p in range(2)] == [6, 6])
        with hub.consumer("t", "g") as second:
            eventually(lambda: len(first.assignment) == len(second.assignment) == 1)
            send(hub, {0: 1, 1: 1})
            assert waiting.result(BOUND_S).offset == 6


def test_a_seek_just_before_the_hand_out_is_not_forgotten(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, count=6)
    find, seeks = HandOut.next, [4]

    def interrupted(hand_out: HandOut, *given: Any, **named: Any) -> Any:
        found = find(hand_out, *given, **named)
        if seeks:
            in_time(lambda: inbox.seek(0, seeks.pop()))
        return found

    monkeypatch.setattr(HandOut, "next", interrupted)
    with hub.consumer("t", "g") as inbox:
        assert offsets(take(iter(inbox), 1)) == [4]


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("way", ["iterate", "poll"])
def test_a_seek_in_the_middle_of_a_hand_out_is_not_forgotten(
    hub: Hub, way: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub, count=6)
    expect, seeks = Lane.expect, [offset, -1, -1]

    with hub.consumer("t", "g", ack="manual") as inbox:

        def interrupted(lane: Lane, coming: Any) -> None:
            expect(lane, coming)
            if seeks and (to := seeks.pop()) >= 0:
                in_time(lambda: inbox.seek(0, to))

        monkeypatch.setattr(Lane, "expect", interrupted)
        messages = iter(inbox)
        found: list[Message] = []
        for _ in range(3):
            found += take(messages, 1) if way == "iterate" else inbox.poll(1, timeout=BOUND_S)
        assert offsets(found) == [0, 1, offset]
        inbox.ack(found[2])
        inbox.commit()
        assert checkpoint(hub) == offset + 1


@pytest.mark.parametrize("offset", [-1, 7])
def test_a_seek_out_of_range_is_refused_and_spoils_no_checkpoint(hub: Hub, offset: int) -> None:
    create(hub, count=6)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        settle(inbox, partitions=1)
        with pytest.raises((InvalidGroup, OffsetOutOfRange)):
            inbox.seek(0, offset)
        assert offsets(inbox.poll(timeout=BOUND_S)) == [0, 1, 2, 3, 4, 5]
    assert checkpoint(hub) == 0


# Bounded reading.


def test_until_end_stops_where_the_topic_ended_when_it_began(hub: Hub) -> None:
    create(hub, partitions=3, count=5)
    with hub.consumer("t", "g", until="end") as inbox:
        send(hub, {0: 3})
        assert len(in_time(lambda: list(inbox))) == 15
    assert [checkpoint(hub, p) for p in range(3)] == [5, 5, 5]
    with hub.consumer("t", "g", until="end") as inbox:
        assert len(in_time(lambda: list(inbox))) == 3
    with hub.consumer("t", "g", until="end") as inbox:
        assert in_time(lambda: list(inbox)) == []


def test_until_end_with_run_returns_when_all_is_handled(hub: Hub) -> None:
    create(hub, partitions=4, count=25)
    seen: list[int] = []
    with hub.consumer("t", "g", until="end") as inbox:
        in_time(lambda: inbox.run(lambda message: seen.append(message.offset), threads=3))
    assert Counter(seen) == Counter(list(range(25)) * 4)
    assert [checkpoint(hub, p) for p in range(4)] == [25] * 4


@pytest.mark.parametrize("way", ["run", "iterate", "poll", "batches"])
def test_x14_until_end_ends_where_a_message_holds_a_partition_up_and_tells_of_it(hub: Hub, way: str) -> None:
    create(hub, partitions=3, count=3)
    handle, seen = poison((1, 1))
    with hub.consumer("t", "g", until="end") as inbox, pytest.raises(PartitionsPaused) as caught:
        in_time(lambda: inbox.run(handle))
    assert (caught.value.group, caught.value.partitions) == ("g", (1,))
    assert [checkpoint(hub, p) for p in range(3)] == [3, 1, 3]
    if way == "run":
        admin(hub).skip("t", 1)  # nobody is there: the next one finds it decided
        with hub.consumer("t", "g", until="end") as inbox:
            in_time(lambda: inbox.run(handle))
        assert seen.count((1, 1)) == 1
        assert [checkpoint(hub, p) for p in range(3)] == [3, 3, 3]
        return
    with hub.consumer("t", "g", until="end") as inbox:
        ways: dict[str, Callable[[], object]] = {
            "iterate": lambda: list(inbox),
            "poll": inbox.poll,
            "batches": lambda: list(inbox.batches()),
        }
        with pytest.raises(PartitionsPaused):
            in_time(ways[way])


def test_until_end_with_two_members_ends_for_both_and_reads_everything_once(hub: Hub) -> None:
    create(hub, partitions=4, count=25)
    with (
        hub.consumer("t", "g", until="end", commit_interval=SOON_S) as first,
        hub.consumer("t", "g", until="end", commit_interval=SOON_S) as second,
    ):
        eventually(lambda: len(first.assignment) == len(second.assignment) == 2)
        reading = [aside(lambda each=each: list(each)) for each in (first, second)]  # type: ignore[misc]
        found = [message for each in reading for message in each.result()]
    assert Counter((each.partition, each.offset) for each in found) == Counter(
        (p, offset) for p in range(4) for offset in range(25)
    )


def test_until_end_with_two_members_that_read_one_after_the_other(hub: Hub) -> None:
    """The second has long been settled, and has looked many times, before it is read to the end."""
    create(hub, partitions=4, count=25)
    with (
        hub.consumer("t", "g", until="end", commit_interval=SOON_S) as first,
        hub.consumer("t", "g", until="end", commit_interval=SOON_S) as second,
    ):
        eventually(lambda: len(first.assignment) == len(second.assignment) == 2)
        assert len(in_time(lambda: list(first))) == 50
        eventually(lambda: second._member.is_settled)
        version = second._member.session.protocol.snapshot  # type: ignore[union-attr]
        eventually(lambda: second._member.session.protocol.snapshot is not version)  # type: ignore[union-attr]
        assert len(in_time(lambda: list(second))) == 50


def test_until_end_takes_over_what_another_member_leaves(hub: Hub) -> None:
    create(hub, partitions=2, count=5)
    with hub.consumer("t", "g", until="end") as first:
        second = hub.consumer("t", "g")
        eventually(lambda: len(first.assignment) == len(second.assignment) == 1)
        reading = aside(lambda: list(first))
        second.close()
        assert reading.result() is not None
    with hub.consumer("t", "g", until="end") as rest:
        in_time(lambda: list(rest))
    assert [checkpoint(hub, p) for p in range(2)] == [5, 5]
