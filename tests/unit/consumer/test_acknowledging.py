"""Acknowledging by hand, committing, and what is refused after a partition or the lease was lost."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from pxrs.errors import (
    InvalidGroup,
    PartitionLost,
)
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.testing.waiting import aside, eventually
from tests.unit.consumer.reading import (
    BOUND_S,
    SOON_S,
    checkpoint,
    create,
    in_time,
    members,
    offsets,
    on_commit,
    owner,
    polled,
    settle,
    steal,
    take,
    wake,
)


def test_x22_acknowledged_in_any_order_the_checkpoint_is_the_contiguous_watermark(hub: Hub) -> None:
    create(hub, count=6)
    with hub.consumer("t", "g", ack="manual") as inbox:
        messages = inbox.poll(timeout=BOUND_S)
        for number, watermark in [(1, 0), (2, 0), (0, 3), (5, 3), (4, 3), (3, 6)]:
            inbox.ack(messages[number])
            inbox.commit()
            assert checkpoint(hub) == watermark


@pytest.mark.parametrize("way", ["iterate", "poll", "batches"])
def test_x22_nothing_is_done_by_being_handed_out(hub: Hub, way: str) -> None:
    create(hub, count=4)
    with hub.consumer("t", "g", ack="manual") as inbox:
        if way == "iterate":
            take(iter(inbox), 4)
        elif way == "poll":
            polled(inbox, 4, max_messages=1)
        else:
            take(inbox.batches(), 1)
        inbox.commit()
    assert checkpoint(hub) == 0


@pytest.mark.parametrize("way", ["iterate", "poll"])
def test_x22_an_ack_while_the_next_is_being_handed_out_covers_only_what_was_handed_out(
    hub: Hub, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker acknowledges the last open message in the middle of the hand-out of the next one."""
    create(hub, count=4)
    earlier: list[Message] = []
    done: list[int] = []
    expect = Lane.expect

    with hub.consumer("t", "g", ack="manual") as inbox:

        def interrupted(lane: Lane, coming: Any) -> None:
            for message in earlier:
                in_time(lambda m=message: inbox.ack(m))  # type: ignore[misc]
            if earlier:
                done.append(lane.done)
            expect(lane, coming)

        monkeypatch.setattr(Lane, "expect", interrupted)
        messages = iter(inbox)
        for _ in range(3):
            earlier[:] = take(messages, 1) if way == "iterate" else inbox.poll(1, timeout=BOUND_S)
    assert done == [1, 2]


def test_x22_a_revoked_partition_is_released_when_all_of_it_is_acknowledged(hub: Hub) -> None:
    create(hub, partitions=2, count=4)
    with hub.consumer("t", "g", ack="manual") as first:
        found = polled(first, 8)
        with hub.consumer("t", "g") as second:
            (moving,) = eventually(lambda: set(range(2)) - set(first.assignment))
            mine = {each.offset: each for each in found if each.partition == moving}
            for offset in (3, 1, 0):
                first.ack(mine[offset])
            assert second.assignment == []
            first.ack(mine[2])
            eventually(lambda: second.assignment == [moving])
            assert checkpoint(hub, moving) == 4
            with pytest.raises(PartitionLost):
                first.ack(mine[2])


def test_x22_a_revoke_that_is_not_finished_leaves_the_watermark_to_the_next_owner(hub: Hub) -> None:
    create(hub, partitions=2, count=4)
    short = {"handover_timeout": 0.2, "commit_interval": SOON_S}
    with hub.consumer("t", "g", ack="manual", **short) as first:
        found = polled(first, 8)
        for each in found:
            if each.offset in (0, 2, 3):
                first.ack(each)
        eventually(lambda: [checkpoint(hub, partition) for partition in range(2)] == [1, 1])
        with hub.consumer("t", "g", **short) as second:
            (moving,) = eventually(lambda: set(second.assignment))
            assert offsets(polled(second, 3)) == [1, 2, 3]
            late = next(each for each in found if each.partition == moving and each.offset == 1)
            with pytest.raises(PartitionLost):
                first.ack(late)


def test_x22_a_seek_forgets_what_was_open(hub: Hub) -> None:
    create(hub, count=10)
    with hub.consumer("t", "g", ack="manual") as inbox:
        inbox.poll(3, timeout=BOUND_S)
        inbox.seek(0, 5)
        for message in polled(inbox, 5):
            inbox.ack(message)
        inbox.commit()
    assert checkpoint(hub) == 10


def test_ack_without_manual_is_refused(hub: Hub) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g") as inbox:
        first, *_ = inbox.poll(timeout=BOUND_S)
        with pytest.raises(InvalidGroup, match="manual"):
            inbox.ack(first)


# Committing, and losing.


def test_commit_writes_at_once_what_was_handed_out(hub: Hub) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g", commit_interval=3600) as inbox:
        take(iter(inbox), 2)
        assert checkpoint(hub) == 0
        inbox.commit()
        assert checkpoint(hub) == 2


def test_a_commit_in_the_middle_of_a_hand_out_that_is_refused_does_not_count_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is asked for last: another thread commits just before, and the answer is no."""
    create(hub, count=3)
    is_armed = False

    class Asked:
        def __init__(self, lease: Any) -> None:
            self._lease = lease

        @property
        def deadline(self) -> float:
            nonlocal is_armed
            if is_armed:
                is_armed = False
                in_time(inbox.commit)
                return float("-inf")
            return float(self._lease.deadline)

    monkeypatch.setattr(GroupMember, "lease", property(lambda member: Asked(member.session.lease)))
    with hub.consumer("t", "g") as inbox:
        messages = iter(inbox)
        take(messages, 1)
        is_armed = True
        assert offsets(take(messages, 1)) == [1]
        assert checkpoint(hub) == 1


def test_x9_a_commit_after_the_partition_was_taken_is_refused(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    lost: list[int] = []
    with hub.consumer("t", "g", commit_interval=3600, on_lost=lost.extend) as inbox:
        polled(inbox, 6)
        steal(hub, 1)
        stolen = owner(hub, 1).epoch
        with pytest.raises(PartitionLost) as caught:
            inbox.commit()
        assert (caught.value.group, caught.value.partitions) == ("g", (1,))
        assert (checkpoint(hub, 0), checkpoint(hub, 1)) == (3, 0)  # what is still owned is written
        # The partition has no owner now: the member's thread may have claimed it again, under another epoch.
        assert inbox.assignment == [0] or owner(hub, 1).epoch > stolen
        eventually(lambda: lost == [1])


def test_x9_a_commit_is_refused_also_when_the_loss_was_already_told(hub: Hub) -> None:
    create(hub, count=3)
    lost = threading.Event()
    with hub.consumer("t", "g", commit_interval=SOON_S, on_lost=lambda _: lost.set()) as inbox:
        messages = iter(inbox)
        take(messages, 1)
        steal(hub)
        wake(hub)
        assert lost.wait(BOUND_S)
        with pytest.raises(PartitionLost):
            inbox.commit()
    assert checkpoint(hub) == 0


def test_x13_a_commit_that_comes_while_all_is_given_up_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint is on its way already when what is in hand is said to be done."""
    create(hub, count=1)
    late: list[Future[None]] = []

    with hub.consumer("t", "g", progress_timeout=0.2, commit_interval=SOON_S) as inbox:

        def interrupted(put: dict[str, Any], _: list[str]) -> None:
            if not late and any("/owners/" in key for key in put):
                late.append(aside(inbox.commit))
                eventually(lambda: all(lane.is_drained for lane in inbox._lanes.owned()))

        settle(inbox, partitions=1)
        on_commit(hub, monkeypatch, interrupted)  # before the time of what is handed out begins
        polled(inbox, 1)
        eventually(lambda: late)
        with pytest.raises(PartitionLost):
            late[0].result()
        assert checkpoint(hub) == 0


def test_x11_a_lost_lease_loses_everything_and_the_member_comes_back_as_another(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    lost: list[int] = []
    with hub.consumer("t", "g", on_lost=lost.extend, commit_interval=SOON_S) as inbox:
        polled(inbox, 3)
        before = inbox._member.incarnation
        lease = inbox._member.lease
        assert lease is not None
        hub.registry._store.end_lease(lease.id)  # type: ignore[attr-defined] # the store counts it as dead
        eventually(lambda: sorted(lost) == [0, 1])
        eventually(lambda: inbox.assignment == [0, 1])
        assert inbox._member.incarnation != before
        assert len(members(hub)) == 1
