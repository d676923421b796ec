"""The callbacks of a consumer: what they are told, and what they may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    PartitionLost,
)
from pxrs.hub import Hub
from pxrs.testing.waiting import aside, eventually
from tests.unit.consumer.reading import (
    BOUND_S,
    SOON_S,
    checkpoint,
    create,
    in_time,
    members,
    offsets,
    owner,
    polled,
    send,
    settle,
    steal,
    take,
    wake,
)


def test_callbacks_tell_what_comes_and_goes(hub: Hub) -> None:
    create(hub, partitions=2)
    told: list[tuple[str, int]] = []

    def note(what: str) -> Callable[[Any], None]:
        return lambda partitions: told.extend((what, each) for each in partitions)

    with hub.consumer(
        "t", "g", on_assigned=note("assigned"), on_revoked=note("revoked"), on_lost=note("lost")
    ) as first:
        eventually(lambda: sorted(told) == [("assigned", 0), ("assigned", 1)])
        told.clear()
        with hub.consumer("t", "g") as second:
            (moved,) = eventually(lambda: second.assignment)
            assert told == [("revoked", moved)]
            told.clear()
        eventually(lambda: told == [("assigned", moved)])
        told.clear()
        take_all = polled(first, 0)
        assert take_all == []
        send(hub, {0: 1})
        polled(first, 1)
        steal(hub, 0)
        with pytest.raises(PartitionLost):
            first.commit()
        eventually(lambda: ("lost", 0) in told)


def test_a_partition_that_stays_after_all_is_handed_out_again(hub: Hub) -> None:
    """It was asked for, its owner had something in hand, and the one who asked went away again."""
    create(hub, partitions=2, count=1)
    told: list[tuple[str, int]] = []
    with hub.consumer(
        "t",
        "g",
        ack="manual",
        on_assigned=lambda some: told.extend(("assigned", each) for each in some),
        on_revoked=lambda some: told.extend(("revoked", each) for each in some),
    ) as first:
        found = polled(first, 2)
        second = hub.consumer("t", "g")
        (moving,) = eventually(lambda: set(range(2)) - set(first.assignment))
        waiting = aside(lambda: first.poll(timeout=BOUND_S))
        second.close()
        eventually(lambda: first.assignment == [0, 1])
        send(hub, {moving: 1})
        started = time.monotonic()
        assert offsets(waiting.result(2 * BOUND_S)) == [1]
        assert time.monotonic() - started < BOUND_S / 2, "nobody was told that it may be handed out again"
        for each in found:
            first.ack(each)
        assert told[2:] == [("revoked", moving), ("assigned", moving)]


def test_an_error_in_a_callback_is_raised_where_the_user_reads(hub: Hub) -> None:
    create(hub, count=1)

    def fail(partitions: Any) -> None:
        raise ZeroDivisionError

    with hub.consumer("t", "g", on_assigned=fail) as inbox, pytest.raises(ZeroDivisionError):
        in_time(lambda: list(inbox))
    assert members(hub) == []


def test_an_error_in_a_callback_of_a_lost_lease_leaves_no_member_behind(hub: Hub) -> None:
    create(hub, partitions=3, count=1)

    def fail(partitions: Any) -> None:
        raise ZeroDivisionError

    inbox = hub.consumer("t", "g", on_lost=fail, commit_interval=SOON_S)
    settle(inbox, partitions=3)
    lease = inbox._member.lease
    assert lease is not None
    lease.expire()
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: next(iter(inbox)))
    eventually(lambda: members(hub) == [])
    inbox.close()


def test_what_closes_is_told_as_what_goes(hub: Hub) -> None:
    create(hub, partitions=2, count=1)
    told: list[tuple[str, int]] = []
    with hub.consumer(
        "t",
        "g",
        on_revoked=lambda some: told.extend(("revoked", each) for each in some),
        on_lost=lambda some: told.extend(("lost", each) for each in some),
    ) as inbox:
        settle(inbox, partitions=2)
        inbox.poll(timeout=BOUND_S)
    assert sorted(told) == [("revoked", 0), ("revoked", 1)]


def test_x13_what_is_given_up_is_told_and_as_lost_if_it_was_in_hand(hub: Hub) -> None:
    create(hub, partitions=2, count=1)
    told: list[tuple[str, int]] = []
    with hub.consumer(
        "t",
        "g",
        progress_timeout=0.2,
        commit_interval=SOON_S,
        on_revoked=lambda some: told.extend(("revoked", each) for each in some),
        on_lost=lambda some: told.extend(("lost", each) for each in some),
    ) as inbox:
        settle(inbox, partitions=2)
        (message,) = take(iter(inbox), 1)
        eventually(lambda: inbox.is_away)
        assert sorted(told) == [("lost", message.partition), ("revoked", 0), ("revoked", 1)]


def test_an_error_in_a_callback_of_close_is_raised_when_all_is_released(hub: Hub) -> None:
    create(hub, partitions=2)

    def fail(partitions: Any) -> None:
        raise ZeroDivisionError

    inbox = hub.consumer("t", "g", on_revoked=fail)
    settle(inbox, partitions=2)
    with pytest.raises(ZeroDivisionError):
        inbox.close()
    assert members(hub) == []
    assert [owner(hub, p).incarnation for p in range(2)] == [None, None]


def test_a_commit_in_a_callback_does_not_count_what_is_in_hand(hub: Hub) -> None:
    """It would be released, and go on elsewhere, while its message is still being handled."""
    create(hub, partitions=2, count=3)
    asked = threading.Event()

    def revoked(partitions: Any) -> None:
        first.commit()
        asked.set()

    with hub.consumer("t", "g", on_revoked=revoked) as first:
        settle(first, partitions=2)
        first.pause(0)
        messages = iter(first)
        assert [message.partition for message in take(messages, 1)] == [1]  # the one that will move
        with hub.consumer("t", "g"):
            assert asked.wait(BOUND_S)
            assert not first._lanes[1].is_drained
            assert checkpoint(hub, 1) == 0


def test_a_commit_in_a_callback_leaves_what_was_lost_before_to_be_told_to_the_reader(hub: Hub) -> None:
    create(hub, count=3)
    told = threading.Event()

    def lost(partitions: Any) -> None:
        inbox.commit()
        told.set()

    with hub.consumer("t", "g", on_lost=lost, commit_interval=SOON_S) as inbox:
        messages = iter(inbox)
        take(messages, 1)
        steal(hub)
        wake(hub)
        assert told.wait(BOUND_S)
        with pytest.raises(PartitionLost):
            inbox.commit()
        assert offsets(take(messages, 1)) == [0]


@pytest.mark.parametrize("what", ["assigned", "revoked", "lost"])
def test_a_callback_may_close_its_consumer(hub: Hub, what: str) -> None:
    create(hub, partitions=4, count=1)
    ready = threading.Event()

    def close(partitions: Any) -> None:
        assert ready.wait(BOUND_S)
        inbox.close()

    inbox = hub.consumer("t", "g", commit_interval=SOON_S, **{f"on_{what}": close})
    ready.set()
    others: list[Consumer] = []
    if what != "assigned":
        settle(inbox, partitions=4)
    if what == "revoked":
        others.append(hub.consumer("t", "g"))
    if what == "lost":
        steal(hub, 0)
        steal(hub, 1)
        wake(hub)
    eventually(lambda: inbox._lifetime.is_closed and len(members(hub)) == len(others))
    for other in others:
        settle(other, partitions=4)
    in_time(inbox.close)
    assert inbox._member._lifecycle.error is None


def test_a_seek_in_a_callback_comes_before_the_first_message(hub: Hub) -> None:
    create(hub, count=6)
    ready, has_polled = threading.Event(), threading.Event()

    def seek(partitions: Any) -> None:
        assert ready.wait(BOUND_S)
        assert inbox.poll(timeout=0.05) == []
        has_polled.set()
        inbox.seek(0, 4)

    with hub.consumer("t", "g", on_assigned=seek) as inbox:
        ready.set()
        assert has_polled.wait(BOUND_S)
        assert offsets(take(iter(inbox), 1)) == [4]
