"""What a consumer tells about its partitions: `assignment`, `position`, `committed`, `lag`; and `on_assigned`.

Memory hub, real threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.errors import PartitionLost
from pxrs.group.records import Keys, Owner
from pxrs.hub import Hub
from pxrs.scheduler import State
from pxrs.testing.waiting import aside, eventually

PARTITIONS = 2
COUNT = 10
BOUND_S = 30.0
KEYS = Keys("g")
QUIET: dict[str, Any] = {"commit_interval": 3_600}
"""Nothing is committed unless the test says so."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=PARTITIONS)
        send(hub, *range(PARTITIONS), count=COUNT)
        yield hub


def send(hub: Hub, *partitions: int, count: int = 1) -> None:
    places = [partition for partition in partitions for _ in range(count)]
    with hub.producer("t") as out:
        out.send_batch(pa.table({"value": [b"x"] * len(places), "partition": pa.array(places, pa.int32())}))


def settle(inbox: Consumer, *partitions: int) -> None:
    """Wait until it owns these, and no round of its member's work runs or is due."""
    eventually(lambda: inbox.assignment == list(partitions), BOUND_S)
    eventually(lambda: inbox._member.session.scheduled.state is State.WAITING, BOUND_S)


def read(inbox: Consumer, partition: int, count: int) -> None:
    """Have this partition at hand up to this offset, and the other one paused."""
    others = [number for number in inbox.assignment if number != partition]
    if others:
        inbox.pause(*others)
    while inbox.position[partition] < count:
        inbox.poll(count - inbox.position[partition], timeout=BOUND_S)


def seen(inbox: Consumer) -> tuple[Any, ...]:
    return inbox.assignment, inbox.position, inbox.committed, inbox.lag


def steal(hub: Hub, partition: int) -> None:
    """Take it from its owner, as the leader does with a slow one."""
    key = KEYS.owner(hub.topic("t").id, partition)
    entry = hub.registry.get(key)
    assert entry is not None
    hub.registry.commit(put={key: Owner(None, Owner.load(key, entry.value).epoch + 1).dump()})


def test_position_is_what_comes_next_committed_what_is_written_and_lag_what_is_not_done(hub: Hub) -> None:
    with hub.consumer("t", "g", **QUIET) as inbox:
        settle(inbox, 0, 1)
        assert seen(inbox) == ([0, 1], {0: 0, 1: 0}, {0: 0, 1: 0}, {0: 10, 1: 10})
        read(inbox, 1, 4)
        assert inbox.position == {0: 0, 1: 4}
        assert inbox.lag == {0: 10, 1: 10}, "what is in hand is not done"
        inbox.poll(2, timeout=BOUND_S)
        assert inbox.position == {0: 0, 1: 6}
        assert inbox.lag == {0: 10, 1: 6}, "what was polled before is done"
        assert inbox.committed == {0: 0, 1: 0}, "and not committed yet"
        inbox.commit()
        assert seen(inbox) == ([0, 1], {0: 0, 1: 6}, {0: 0, 1: 6}, {0: 10, 1: 4})
        send(hub, 0, 1, count=3)
        assert inbox.lag == {0: 13, 1: 7}


def test_with_manual_acks_the_lag_counts_from_the_first_message_that_is_not_acknowledged(hub: Hub) -> None:
    with hub.consumer("t", "g", ack="manual", **QUIET) as inbox:
        settle(inbox, 0, 1)
        inbox.pause(1)
        messages = inbox.poll(4, timeout=BOUND_S)
        inbox.ack(messages[1])
        assert (inbox.position[0], inbox.lag[0]) == (4, 10)
        inbox.ack(messages[0])
        assert (inbox.position[0], inbox.lag[0]) == (4, 8)


def test_a_loop_and_run_move_the_position_message_by_message(hub: Hub) -> None:
    with hub.consumer("t", "g", until="end", **QUIET) as inbox:
        settle(inbox, 0, 1)
        for message in inbox:
            assert inbox.position[message.partition] == message.offset + 1
            assert inbox.lag[message.partition] == COUNT - message.offset
            if message.offset == 4:
                break
        inbox.commit()
        found = []
        inbox.run(lambda message: found.append(inbox.position[message.partition] - message.offset))
        assert set(found) == {1}
        assert inbox.lag == {0: 0, 1: 0}


def test_a_seek_moves_the_position_and_the_lag_and_never_the_checkpoint_back(hub: Hub) -> None:
    with hub.consumer("t", "g", **QUIET) as inbox:
        settle(inbox, 0, 1)
        read(inbox, 0, 6)
        inbox.commit()
        inbox.seek(0, 2)
        inbox.seek(1, 9)
        assert seen(inbox) == ([0, 1], {0: 2, 1: 9}, {0: 6, 1: 0}, {0: 8, 1: 1})
        inbox.commit()
        assert inbox.committed == {0: 6, 1: 9}


def test_a_paused_partition_is_still_assigned(hub: Hub) -> None:
    with hub.consumer("t", "g", **QUIET) as inbox:
        settle(inbox, 0, 1)
        before = seen(inbox)
        inbox.pause()
        assert seen(inbox) == before


def test_what_is_told_is_a_copy(hub: Hub) -> None:
    with hub.consumer("t", "g", **QUIET) as inbox:
        settle(inbox, 0, 1)
        for told in (inbox.position, inbox.committed, inbox.lag):
            told.clear()
        inbox.assignment.clear()
        assert seen(inbox) == ([0, 1], {0: 0, 1: 0}, {0: 0, 1: 0}, {0: 10, 1: 10})


def test_after_close_there_is_nothing(hub: Hub) -> None:
    inbox = hub.consumer("t", "g", **QUIET)
    settle(inbox, 0, 1)
    inbox.close()
    assert seen(inbox) == ([], {}, {}, {})


def test_it_is_told_while_the_member_waits_for_the_store(hub: Hub) -> None:
    with hub.consumer("t", "g", **QUIET) as inbox:
        settle(inbox, 0, 1)
        with inbox._member.session.mutex:  # as the member's thread does for as long as the store does not answer
            assert aside(lambda: seen(inbox)).result(BOUND_S) == ([0, 1], {0: 0, 1: 0}, {0: 0, 1: 0}, {0: 10, 1: 10})


def test_on_assigned_gets_the_offsets_at_which_reading_begins(hub: Hub) -> None:
    with hub.consumer("t", "g", **QUIET) as first:
        settle(first, 0, 1)
        read(first, 1, 7)
        first.commit()
        read(first, 1, 9)  # in hand when it leaves, so not done
    told: dict[int, int] = {}
    with hub.consumer("t", "g", on_assigned=told.update, **QUIET) as second:
        eventually(lambda: told == {0: 0, 1: 7}, BOUND_S)
        settle(second, 0, 1)
        assert second.position == second.committed == told


def test_a_callback_that_takes_a_collection_of_numbers_goes_on_working(hub: Hub) -> None:
    told: list[int] = []

    def assigned(partitions: Collection[int]) -> None:
        told.extend(partitions)
        assert len(partitions) > 0
        assert told[-1] in partitions
        assert sorted(partitions)[0] == min(partitions)

    with hub.consumer("t", "g", on_assigned=assigned, **QUIET) as inbox:
        settle(inbox, 0, 1)
        assert sorted(told) == [0, 1]


def test_a_hand_over_tells_the_next_owner_where_the_last_one_stopped(hub: Hub) -> None:
    in_revoked: list[tuple[Any, ...]] = []
    told: dict[int, int] = {}

    def revoked(partitions: Sequence[int]) -> None:
        in_revoked.extend((number, *(each.get(number) for each in seen(first)[1:])) for number in partitions)

    with hub.consumer("t", "g", on_revoked=revoked, **QUIET) as first:
        settle(first, 0, 1)
        for partition in range(PARTITIONS):
            first.resume()
            read(first, partition, 3 + partition)
        first.commit()
        with hub.consumer("t", "g", on_assigned=told.update, **QUIET) as second:
            (moved,) = eventually(lambda: second.assignment, BOUND_S)
            stayed = 1 - moved
            assert in_revoked == [(moved, 3 + moved, 3 + moved, 7 - moved)]
            eventually(lambda: told == {moved: 3 + moved}, BOUND_S)
            assert seen(second) == ([moved], {moved: 3 + moved}, {moved: 3 + moved}, {moved: 7 - moved})
            assert seen(first) == ([stayed], {stayed: 3 + stayed}, {stayed: 3 + stayed}, {stayed: 7 - stayed})


def test_a_partition_that_stays_after_all_is_told_with_its_position(hub: Hub) -> None:
    told: list[Mapping[int, int]] = []
    with hub.consumer("t", "g", ack="manual", on_assigned=told.append, **QUIET) as first:
        settle(first, 0, 1)
        messages = [*first.poll(4, timeout=BOUND_S), *first.poll(4, timeout=BOUND_S)]
        told.clear()
        second = hub.consumer("t", "g", **QUIET)
        (moving,) = eventually(lambda: set(range(PARTITIONS)) - set(first.assignment), BOUND_S)
        assert moving in first.position, "it is owned until it is released"
        second.close()
        eventually(lambda: first.assignment == [0, 1], BOUND_S)
        eventually(lambda: told == [{moving: sum(message.partition == moving for message in messages)}], BOUND_S)


def test_a_partition_that_was_fenced_is_gone_from_all_of_them(hub: Hub) -> None:
    in_lost: list[tuple[Any, ...]] = []
    told: list[Mapping[int, int]] = []

    def lost(partitions: Sequence[int]) -> None:
        in_lost.append((list(partitions), *seen(inbox)))

    with hub.consumer("t", "g", on_lost=lost, on_assigned=told.append, **QUIET) as inbox:
        settle(inbox, 0, 1)
        read(inbox, 0, 5)
        inbox.commit()
        inbox.poll(1, timeout=BOUND_S)
        told.clear()
        steal(hub, 0)
        with pytest.raises(PartitionLost):
            inbox.commit()
        assert in_lost == [([0], [1], {1: 0}, {1: 0}, {1: 10})]
        # The leader still means it for this member, which claims it again, at the checkpoint.
        eventually(lambda: told == [{0: 5}], BOUND_S)
        assert inbox.committed == {0: 5, 1: 0}
