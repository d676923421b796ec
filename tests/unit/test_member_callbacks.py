"""Callbacks of the user's that call back into their consumer: whatever they call and whenever, the member goes on.

Memory hub, real threads. Each scenario makes the member call callbacks; each of these makes calls of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.errors import PartitionLost
from pxrs.group.records import Checkpoint, Keys, Member, Owner, Target
from pxrs.hub import Hub
from pxrs.scheduler import ScheduledState
from pxrs.testing.waiting import aside, eventually

PARTITIONS = 4
PATIENCE_S = 30.0
KEYS = Keys("g")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        topic = hub.create_topic("t", partitions=PARTITIONS)
        rows = [(partition, b"x") for partition in range(PARTITIONS) for _ in range(5)]
        with hub.producer("t") as out:
            columns = {"value": [row[1] for row in rows], "partition": pa.array([row[0] for row in rows], pa.int32())}
            out.send_batch(pa.table(columns))
        assert topic.id
        yield hub


def owner(hub: Hub, partition: int) -> Owner:
    entry = hub.registry.get(KEYS.owner(hub.topic("t").id, partition))
    return Owner(None, 0) if entry is None else Owner.load(entry.key, entry.value)


def checkpoint(hub: Hub, partition: int) -> int:
    entry = hub.registry.get(KEYS.checkpoint(hub.topic("t").id, partition))
    assert entry is not None
    return Checkpoint.load(entry.key, entry.value).offset


def members(hub: Hub) -> dict[str, str]:
    """The names of those who are there, by incarnation."""
    found = hub.registry.scan(KEYS.members)
    return {entry.key.rpartition("/")[2]: Member.load(entry.key, entry.value).name for entry in found}


def take_away(hub: Hub) -> None:
    """Free every owner key, as an administrator does who resets a group; the members are not told yet."""
    topic = hub.topic("t").id
    free = {KEYS.owner(topic, p): Owner(None, owner(hub, p).epoch + 1).dump() for p in range(PARTITIONS)}
    hub.registry.commit(put=free)


def have_members_look(hub: Hub) -> None:
    """As whoever takes a partition from them does."""
    for entry in hub.registry.scan(KEYS.targets):
        target = Target.load(entry.key, entry.value)
        hub.registry.commit(put={entry.key: replace(target, taken=target.taken + 1).dump()})


def settle(*consumers: Consumer) -> None:
    eventually(lambda: sorted(p for each in consumers for p in each.assignment) == list(range(PARTITIONS)), PATIENCE_S)
    for each in consumers:  # no round of its member's work runs or is due
        eventually(lambda each=each: each._member.session.scheduled.state is ScheduledState.WAITING, PATIENCE_S)  # type: ignore[misc]


def finish_one_of_each(hub: Hub, inbox: Consumer) -> None:
    """One message of each partition is done, and none of that is written."""
    done: set[int] = set()
    while len(done) < PARTITIONS:
        (message,) = inbox.poll(1, timeout=PATIENCE_S)
        inbox.ack(message)
        done.add(message.partition)
    assert [checkpoint(hub, p) for p in range(PARTITIONS)] == [0] * PARTITIONS


class Calls:
    """A consumer whose callbacks all make the same calls, and what these raised."""

    def __init__(self, hub: Hub, call: Callable[[Consumer, int], None], **options: Any) -> None:
        self._call = call
        self._begins = threading.Event()
        self.told: list[tuple[str, int]] = []
        self.errors: list[Exception] = []
        self._inside = False
        self.other: Consumer | None = None
        """A member that has joined beside it; one that nobody keeps would leave."""
        given = {f"on_{what}": self._callback(what) for what in ("assigned", "revoked", "lost")}
        # Checkpoints are written by the callbacks alone, and nothing is taken because of slowness.
        options = {"ack": "manual", "commit_interval": 3_600.0, "handover_timeout": 3_600.0, **options}
        self.inbox = hub.consumer("t", "g", name="calls", **given, **options)
        self._begins.set()

    def _callback(self, what: str) -> Callable[[Any], None]:
        def told(partitions: Any) -> None:
            assert self._begins.wait(PATIENCE_S)
            if self._inside:
                self.errors.append(AssertionError(f"{what} {partitions} was called inside another callback"))
            self._inside = True
            for partition in partitions:
                self.told.append((what, partition))
                try:
                    self._call(self.inbox, partition)
                except PartitionLost:
                    pass  # which is what a call for a partition that has gone raises
                except Exception as error:  # noqa: BLE001 - looked at by the test
                    self.errors.append(error)
            self._inside = False

        return told


def commit(inbox: Consumer, partition: int) -> None:
    inbox.commit()


def seek(inbox: Consumer, partition: int) -> None:
    inbox.seek(partition, 2)


def hold(inbox: Consumer, partition: int) -> None:
    inbox.pause(partition)
    inbox.resume(partition)
    inbox.pause()
    inbox.resume()


def look(inbox: Consumer, partition: int) -> None:
    assert partition in inbox.assignment or inbox._lanes.get(partition) is None or inbox._lanes[partition].is_stopping
    assert inbox.is_away in (True, False)


def everything(inbox: Consumer, partition: int) -> None:
    hold(inbox, partition)
    look(inbox, partition)
    inbox.commit()
    inbox.seek(partition, 2)
    inbox.commit()


def close(inbox: Consumer, partition: int) -> None:
    inbox.close()
    inbox.commit()


def lease_ends(hub: Hub, calls: Calls) -> None:
    """The lease is lost, and all partitions are somebody else's by then: a commit of one is refused."""
    take_away(hub)
    lease = calls.inbox._member.lease
    assert lease is not None
    lease.expire()
    calls.inbox._member.wake()
    eventually(lambda: {p for what, p in calls.told if what == "lost"} == set(range(PARTITIONS)), PATIENCE_S)


def taken(hub: Hub, calls: Calls) -> None:
    take_away(hub)
    have_members_look(hub)
    eventually(lambda: {p for what, p in calls.told if what == "lost"} == set(range(PARTITIONS)), PATIENCE_S)


def commit_refused(hub: Hub, calls: Calls) -> None:
    """The reader's own commit is the first to find out."""
    take_away(hub)
    with pytest.raises(PartitionLost):
        aside(calls.inbox.commit).result(PATIENCE_S)


def another_joins(hub: Hub, calls: Calls) -> None:
    calls.other = hub.consumer("t", "g", name="other")
    eventually(lambda: sum(what == "revoked" for what, _ in calls.told) >= PARTITIONS // 2, PATIENCE_S)


def another_comes_and_goes(hub: Hub, calls: Calls) -> None:
    """What is in hand keeps the partitions here until they are to stay after all."""
    inbox = calls.inbox
    for _ in range(PARTITIONS):
        assert inbox.poll(1, timeout=PATIENCE_S)
    other = hub.consumer("t", "g", name="other")
    eventually(lambda: any(what == "revoked" for what, _ in calls.told), PATIENCE_S)
    other.close()


def gives_up(hub: Hub, calls: Calls) -> None:
    """A handler makes no progress."""
    inbox = calls.inbox
    for lane in inbox._lanes.owned():
        lane.position = lane.handed = lane.done + 1
        lane.handed_at = inbox._hand_out.clock.now() - 7_200.0
    inbox._member.wake()
    eventually(lambda: inbox.is_away or inbox._lifetime.is_closed, PATIENCE_S)


def closes(hub: Hub, calls: Calls) -> None:
    aside(calls.inbox.close).result(PATIENCE_S)


SCENARIOS = [lease_ends, taken, commit_refused, another_joins, another_comes_and_goes, gives_up, closes]


@pytest.mark.parametrize("call", [commit, seek, hold, look, everything, close], ids=lambda each: each.__name__)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_callback_may_call_its_consumer_whatever_the_member_is_at(
    hub: Hub, scenario: Callable[[Hub, Calls], None], call: Callable[[Consumer, int], None]
) -> None:
    calls = Calls(hub, lambda inbox, partition: None, progress_timeout=3_600.0)
    inbox = calls.inbox
    settle(inbox)
    finish_one_of_each(hub, inbox)
    calls._call = call
    scenario(hub, calls)
    if call is close or scenario is closes:
        eventually(lambda: "calls" not in members(hub).values(), PATIENCE_S)
    else:
        # It goes on: every partition is somebody's who is there.
        eventually(lambda: inbox.poll(1, timeout=0) is not None and not inbox.is_away, PATIENCE_S)
        eventually(lambda: {owner(hub, p).incarnation for p in range(PARTITIONS)} <= set(members(hub)), PATIENCE_S)
        assert "calls" in members(hub).values()
    assert calls.errors == []
    assert inbox._member._lifecycle.error is None
    assert not inbox._member._lifecycle.has_unraised


def test_a_commit_in_on_lost_that_loses_more_is_told_after_that_callback(hub: Hub) -> None:
    calls = Calls(hub, commit)
    settle(calls.inbox)
    finish_one_of_each(hub, calls.inbox)
    lease_ends(hub, calls)
    lost = [partition for what, partition in calls.told if what == "lost"]
    assert sorted(lost) == list(range(PARTITIONS)), "each once"
    assert calls.errors == []
    settle(calls.inbox)
    assert calls.inbox._member._lifecycle.error is None


def test_in_on_lost_the_partition_is_gone_and_in_on_revoked_it_is_still_owned(hub: Hub) -> None:
    seen: list[tuple[str, bool]] = []

    def note(inbox: Consumer, partition: int) -> None:
        what = calls.told[-1][0]
        seen.append((what, partition in inbox.assignment))
        if what == "revoked":
            seen.append(("is owner", owner(hub, partition).incarnation == inbox._member.incarnation))

    calls = Calls(hub, note)
    settle(calls.inbox)
    seen.clear()
    another_joins(hub, calls)
    assert set(seen) == {("revoked", False), ("is owner", True)}
    assert calls.other is not None
    settle(calls.inbox, calls.other)
    settled = calls.inbox.assignment
    seen.clear()
    take_away(hub)
    have_members_look(hub)
    eventually(lambda: len([each for each in seen if each[0] == "lost"]) == len(settled), PATIENCE_S)
    assert ("lost", True) not in seen


def test_a_commit_in_on_revoked_is_in_the_registry_before_the_partition_is_released(hub: Hub) -> None:
    written: dict[int, int] = {}

    def keep(inbox: Consumer, partition: int) -> None:
        if calls.told[-1][0] == "revoked":
            inbox.commit()
            written[partition] = checkpoint(hub, partition)

    calls = Calls(hub, keep)
    settle(calls.inbox)
    finish_one_of_each(hub, calls.inbox)
    closes(hub, calls)
    assert written == dict.fromkeys(range(PARTITIONS), 1)
    assert calls.errors == []


def test_a_partition_that_stays_after_all_is_not_read_before_on_assigned_has_returned(hub: Hub) -> None:
    calls = Calls(hub, lambda inbox, partition: None)
    inbox = calls.inbox
    settle(inbox)
    early: list[int] = []

    def note(inbox: Consumer, partition: int) -> None:
        if calls.told[-1][0] == "assigned":
            early.extend(lane.partition for lane in inbox._hand_out.readable() if lane.partition == partition)

    calls._call = note
    another_comes_and_goes(hub, calls)
    eventually(lambda: any(what == "assigned" for what, _ in calls.told[PARTITIONS:]), PATIENCE_S)
    assert early == []
    settle(inbox)


def wait_for_end(inbox: Consumer) -> None:
    scheduled = inbox._member.session.scheduled
    assert scheduled is not None
    eventually(lambda: scheduled.state is ScheduledState.ENDED, PATIENCE_S)


def test_what_a_callback_raised_is_raised_by_close_if_nobody_has_read_since(hub: Hub) -> None:
    def fail(partitions: Any) -> None:
        raise ZeroDivisionError(partitions)

    inbox = hub.consumer("t", "g", on_assigned=fail)
    wait_for_end(inbox)  # of the member, which what a callback raises ends
    with pytest.raises(ZeroDivisionError):
        inbox.close()
    inbox.close()


def test_what_was_raised_where_the_user_reads_is_not_raised_again_by_close(hub: Hub) -> None:
    def fail(partitions: Any) -> None:
        raise ZeroDivisionError(partitions)

    inbox = hub.consumer("t", "g", on_assigned=fail)
    with pytest.raises(ZeroDivisionError):
        inbox.poll(timeout=PATIENCE_S)
    wait_for_end(inbox)
    inbox.close()
