"""A consumer from the user's side: what is handed out, what counts as done, and what an error leaves behind.

Memory hub, real threads. Whatever may block runs under `in_time`, so that a consumer that hangs is a failure.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
import sqlalchemy

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.consumer.hand_out import HandOut
from pxrs.errors import (
    CheckpointOutOfRange,
    Closed,
    HandlerFailed,
    InvalidGroup,
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionLost,
    PartitionsPaused,
    RegistryUnavailable,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.group.admin import GroupHandle
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.group.records import Checkpoint, Keys, Member, Owner, Paused, Target
from pxrs.hub import Hub
from pxrs.log.batch import Batch
from pxrs.model import Message
from pxrs.sources import sql_table
from pxrs.testing.faults import child, wait_exit
from pxrs.waiting import Cancel

BOUND_S = 30.0
SOON_S = 0.02
T = TypeVar("T")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


def eventually(condition: Callable[[], T], bound: float = BOUND_S) -> T:
    until = time.monotonic() + bound
    while not (found := condition()):
        assert time.monotonic() < until, "it has not become true in time"
        time.sleep(0.005)
    return found


class Background:
    """A call on another thread, whose result or error is wanted later."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised in `result`
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self, bound: float = BOUND_S) -> Any:
        self._thread.join(bound)
        assert not self._thread.is_alive(), "it has not returned in time"
        if self._error is not None:
            raise self._error
        return self._result


class Reader:
    """One thread for all calls of a test: a loop and what `poll` returned are for the thread that began them."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised in `result`
                future.set_exception(error)
            del call, future

    def begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def result(self, call: Callable[[], T], bound: float) -> T:
        if threading.current_thread() is self._thread:
            return call()
        future = self.begin(call)
        try:
            return future.result(bound)
        except TimeoutError:
            assert future.done(), "it has not returned in time"
            raise


_reader = Reader()


@pytest.fixture(autouse=True)
def _fresh_reader() -> None:
    global _reader
    _reader = Reader()


def in_time(call: Callable[[], T], bound: float = BOUND_S) -> T:
    """On the test's one reading thread."""
    return _reader.result(call, bound)


def take(messages: Iterator[T], count: int) -> list[T]:
    return in_time(lambda: [next(messages) for _ in range(count)])


def send(hub: Hub, counts: dict[int, int], topic: str = "t", size: int = 0) -> None:
    """So many messages to each partition; the value of each is its offset, with zeros up to the size."""
    rows = [
        (partition, str(hub.topic(topic).end(partition) + at).zfill(size).encode())
        for partition, count in counts.items()
        for at in range(count)
    ]
    partitions, values = [row[0] for row in rows], [row[1] for row in rows]
    with hub.producer(topic) as out:
        out.send_batch(pa.table({"value": values, "partition": pa.array(partitions, pa.int32())}))


def create(hub: Hub, partitions: int = 1, count: int = 0, topic: str = "t", **options: Any) -> None:
    """A topic, with so many messages in each partition."""
    hub.create_topic(topic, partitions=partitions, **options)
    if count:
        send(hub, dict.fromkeys(range(partitions), count), topic)


def checkpoint(hub: Hub, partition: int = 0, group: str = "g", topic: str = "t") -> int | None:
    entry = hub.registry.get(Keys(group).checkpoint(hub.topic(topic).id, partition))
    return None if entry is None else Checkpoint.load(entry.key, entry.value).offset


def owner(hub: Hub, partition: int = 0, group: str = "g") -> Owner:
    entry = hub.registry.get(Keys(group).owner(hub.topic("t").id, partition))
    return Owner(None, 0) if entry is None else Owner.load(entry.key, entry.value)


def paused(hub: Hub, partition: int = 0, group: str = "g") -> Paused | None:
    entry = hub.registry.get(Keys(group).pause(hub.topic("t").id, partition))
    return None if entry is None else Paused.load(entry.key, entry.value)


def members(hub: Hub, group: str = "g") -> list[str]:
    return [Member.load(entry.key, entry.value).name for entry in hub.registry.scan(Keys(group).members)]


def steal(hub: Hub, partition: int = 0, group: str = "g") -> None:
    """Take it from its owner, as a leader does that fences a slow one."""
    key = Keys(group).owner(hub.topic("t").id, partition)
    hub.registry.commit(put={key: Owner(None, owner(hub, partition, group).epoch + 1).dump()})


def wake(hub: Hub, group: str = "g") -> None:
    """Let the members look at all their owners, as everyone does who takes something from one of them."""
    for entry in hub.registry.scan(Keys(group).targets):
        target = Target.load(entry.key, entry.value)
        hub.registry.commit(put={entry.key: replace(target, taken=target.taken + 1).dump()})


def on_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch, act: Callable[[dict[str, Any], list[str]], None]) -> None:
    """Before each commit, call `act` with what it puts and what it deletes."""
    commit = hub.registry.commit

    def acting(expect: Any = (), put: Any = (), *rest: Any, delete: Any = (), **named: Any) -> dict[str, int]:
        act(dict(put), list(delete))
        return commit(dict(expect), dict(put), *rest, delete=delete, **named)

    monkeypatch.setattr(hub.registry, "commit", acting)


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


def settle(*consumers: Consumer, partitions: int) -> None:
    """Wait until each partition is with one of them."""
    eventually(lambda: sorted(p for each in consumers for p in each.assignment) == list(range(partitions)))


def polled(consumer: Consumer, count: int, max_messages: int = 500) -> list[Message]:
    """Poll until so many have come."""
    found: list[Message] = []
    until = time.monotonic() + BOUND_S
    while len(found) < count:
        assert time.monotonic() < until, found
        found += consumer.poll(max_messages, timeout=0.05)
    return found


# Iterating.


def test_a_message_is_done_when_the_next_is_asked_for(hub: Hub) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        messages = iter(inbox)
        assert [message.value for message in take(messages, 3)] == [b"0", b"1", b"2"]
        eventually(lambda: checkpoint(hub) == 2)
    assert checkpoint(hub) == 2  # closing does not make the last one done


def test_an_exception_in_the_body_leaves_the_message_undone(hub: Hub) -> None:
    create(hub, count=5)

    def consume() -> None:
        with hub.consumer("t", "g") as inbox:
            for message in inbox:
                if message.offset == 2:
                    raise RuntimeError("handler")

    with pytest.raises(RuntimeError, match="handler"):
        in_time(consume)
    assert checkpoint(hub) == 2
    with hub.consumer("t", "g") as again:
        assert offsets(take(iter(again), 3)) == [2, 3, 4]


def test_x10_a_restart_goes_on_at_the_checkpoint_of_every_partition(hub: Hub) -> None:
    create(hub, partitions=3, count=10)
    first: list[Message] = []

    def consume() -> None:
        with hub.consumer("t", "g") as inbox:
            for message in inbox:
                if len(first) == 17:
                    break
                first.append(message)

    in_time(consume)
    with hub.consumer("t", "g", until="end") as inbox:
        rest: list[Message] = in_time(lambda: list(inbox))
    assert Counter((each.partition, each.offset) for each in first + rest) == Counter(
        (p, offset) for p in range(3) for offset in range(10)
    )


def test_messages_of_a_partition_come_in_order_and_carry_its_epoch(hub: Hub) -> None:
    create(hub, partitions=4, count=50)
    with hub.consumer("t", "g", until="end") as inbox:
        found: list[Message] = in_time(lambda: list(inbox))
    for partition in range(4):
        assert offsets([each for each in found if each.partition == partition]) == list(range(50))
    assert {each.epoch for each in found} == {1}
    with hub.consumer("t", "g") as inbox:  # the release made epoch 2
        send(hub, {0: 1})
        assert take(iter(inbox), 1)[0].epoch == 3


def test_x15_a_waiting_consumer_is_woken_by_a_message(hub: Hub) -> None:
    create(hub)
    with hub.consumer("t", "g") as inbox:
        settle(inbox, partitions=1)
        waiting = Background(lambda: next(iter(inbox)))
        send(hub, {0: 1})
        assert waiting.result().offset == 0


# Polling and batches.


def test_what_was_polled_is_done_when_the_next_poll_comes(hub: Hub) -> None:
    create(hub, count=5)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        assert offsets(inbox.poll(3, timeout=BOUND_S)) == [0, 1, 2]
        assert checkpoint(hub) == 0
        assert offsets(inbox.poll(3, timeout=BOUND_S)) == [3, 4]
        eventually(lambda: checkpoint(hub) == 3)
        assert inbox.poll(timeout=timedelta(milliseconds=1)) == []
        eventually(lambda: checkpoint(hub) == 5)


def test_what_was_polled_and_not_followed_by_a_poll_is_undone(hub: Hub) -> None:
    create(hub, count=5)
    with hub.consumer("t", "g") as inbox:
        inbox.poll(2, timeout=BOUND_S)
        inbox.poll(2, timeout=BOUND_S)
    assert checkpoint(hub) == 2


@pytest.mark.parametrize("count", [0, -1])
def test_polling_for_no_message_is_refused(hub: Hub, count: int) -> None:
    create(hub, count=1)
    with hub.consumer("t", "g") as inbox:
        settle(inbox, partitions=1)
        with pytest.raises(InvalidGroup, match="max_messages"):
            inbox.poll(count, timeout=BOUND_S)


def test_small_polls_do_not_read_the_same_bytes_again_and_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create_topic("t", partitions=1)
    for _ in range(20):
        send(hub, {0: 10})  # twenty batches
    with hub.consumer("t", "g") as inbox:
        reads = count_reads(inbox, monkeypatch)
        assert offsets(polled(inbox, 200, max_messages=5)) == list(range(200))
    assert len(reads) < 5


def count_reads(inbox: Consumer, monkeypatch: pytest.MonkeyPatch, held: Callable[[], int] = lambda: 0) -> list[int]:
    """The bytes that each read of the source gave that was not empty, and those that were held by then."""
    reads: list[int] = []
    read = inbox._source.read

    def counted(partition: int, offset: int, max_bytes: int = 0) -> list[Batch]:
        batches = read(partition, offset, max_bytes)
        if batches:
            reads.append(held() + sum(batch.records.nbytes for batch in batches))
        return batches

    monkeypatch.setattr(inbox._source, "read", counted)
    return reads


def test_a_batch_is_done_when_the_next_is_asked_for(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    send(hub, {0: 4})
    send(hub, {0: 3})
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        batches = inbox.batches()
        (first,) = take(batches, 1)
        assert (first.topic, first.partition, first.offset, first.epoch) == ("t", 0, 0, 1)
        assert first.records.column("value").to_pylist() == [b"0", b"1", b"2", b"3"]
        (second,) = take(batches, 1)
        assert (second.offset, second.records.num_rows) == (4, 3)
        eventually(lambda: checkpoint(hub) == 4)


def test_batches_end_exactly_where_the_topic_ended(hub: Hub) -> None:
    create(hub, count=10)
    with hub.consumer("t", "g", until="end") as inbox:
        send(hub, {0: 5})
        assert sum(in_time(lambda: [batch.records.num_rows for batch in inbox.batches()])) == 10
    assert checkpoint(hub) == 10


@pytest.mark.parametrize("then", ["iterate", "poll", "batches", "run"])
@pytest.mark.parametrize("way", ["iterate", "batches"])
def test_what_a_loop_was_left_with_comes_again_however_one_goes_on(hub: Hub, way: str, then: str) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        loop: Any = iter(inbox) if way == "iterate" else inbox.batches()
        take(loop, 1)
        loop.close()  # as `break` and an exception do
        if then == "iterate":
            first = take(iter(inbox), 1)[0].offset
        elif then == "poll":
            first = inbox.poll(1, timeout=BOUND_S)[0].offset
        elif then == "batches":
            first = take(inbox.batches(), 1)[0].offset
        else:
            seen: list[int] = []
            running = Background(lambda: inbox.run(lambda message: seen.append(message.offset)))
            first = eventually(lambda: seen[:1])[0]
            inbox.stop()
            running.result()
        assert first == 0


def test_a_partition_that_is_asked_for_goes_when_its_loop_was_left_and_another_begins(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    with hub.consumer("t", "g", handover_timeout=3600) as first:
        settle(first, partitions=2)
        first.pause(0)
        loop: Any = iter(first)
        assert [message.partition for message in take(loop, 1)] == [1]
        with hub.consumer("t", "g") as second:
            eventually(lambda: first.assignment == [0])
            loop.close()
            going = Background(lambda: next(iter(first)))
            eventually(lambda: second.assignment == [1])
            assert offsets(second.poll(1, timeout=BOUND_S)) == [0]
            first.resume()
            going.result()


def test_a_poll_in_the_body_of_a_loop_goes_on_from_there(hub: Hub) -> None:
    create(hub, count=5)
    with hub.consumer("t", "g") as inbox:
        messages = iter(inbox)
        assert offsets(take(messages, 1)) == [0]
        assert offsets(in_time(lambda: inbox.poll(2, timeout=BOUND_S))) == [1, 2]


def test_a_poll_without_a_timeout_returns_no_empty_list(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had found was stopped at the last moment, as by a pause or a rebalance."""
    create(hub, count=2)
    take_in_hand, refusals = HandOut.take_in_hand, [1]

    def refusing(hand_out: HandOut, *given: Any) -> bool:
        return False if refusals and refusals.pop() else take_in_hand(hand_out, *given)

    monkeypatch.setattr(HandOut, "take_in_hand", refusing)
    with hub.consumer("t", "g") as inbox:
        assert offsets(in_time(lambda: inbox.poll(5))) == [0, 1]


# Acknowledging by hand.


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

    monkeypatch.setattr(GroupMember, "lease", property(lambda member: Asked(member._lease)))
    with hub.consumer("t", "g") as inbox:
        messages = iter(inbox)
        take(messages, 1)
        is_armed = True
        assert offsets(take(messages, 1)) == [1]
        assert checkpoint(hub) == 1


def test_x9_a_commit_after_the_partition_was_taken_is_refused(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    with hub.consumer("t", "g", commit_interval=3600) as inbox:
        polled(inbox, 6)
        steal(hub, 1)
        with pytest.raises(PartitionLost) as caught:
            inbox.commit()
        assert (caught.value.group, caught.value.partitions) == ("g", (1,))
        assert (checkpoint(hub, 0), checkpoint(hub, 1)) == (3, 0)  # what is still owned is written
        assert inbox.assignment == [0]


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
    late: list[Background] = []

    with hub.consumer("t", "g", progress_timeout=0.2, commit_interval=SOON_S) as inbox:

        def interrupted(put: dict[str, Any], _: list[str]) -> None:
            if not late and any("/owners/" in key for key in put):
                late.append(Background(inbox.commit))
                eventually(lambda: all(lane.is_drained for lane in inbox._lanes.owned()))

        polled(inbox, 1)
        on_commit(hub, monkeypatch, interrupted)
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


# Position.


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
        waiting = _reader.begin(lambda: next(messages))
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
        waiting = _reader.begin(lambda: next(messages))
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
        reading = [Background(lambda each=each: list(each)) for each in (first, second)]  # type: ignore[misc]
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
        version = second._member._protocol.snapshot  # type: ignore[union-attr]
        eventually(lambda: second._member._protocol.snapshot is not version)  # type: ignore[union-attr]
        assert len(in_time(lambda: list(second))) == 50


def test_until_end_takes_over_what_another_member_leaves(hub: Hub) -> None:
    create(hub, partitions=2, count=5)
    with hub.consumer("t", "g", until="end") as first:
        second = hub.consumer("t", "g")
        eventually(lambda: len(first.assignment) == len(second.assignment) == 1)
        reading = Background(lambda: list(first))
        second.close()
        assert reading.result() is not None
    with hub.consumer("t", "g", until="end") as rest:
        in_time(lambda: list(rest))
    assert [checkpoint(hub, p) for p in range(2)] == [5, 5]


# Callbacks.


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
        waiting = Background(lambda: first.poll(timeout=BOUND_S))
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
    assert inbox._member._error is None


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


# Handlers on threads.


def test_run_handles_partitions_in_parallel_and_each_in_order(hub: Hub) -> None:
    create(hub, partitions=4, count=30)
    together = threading.Barrier(4, timeout=BOUND_S)
    seen: dict[int, list[int]] = {p: [] for p in range(4)}
    inside: set[int] = set()

    def handle(message: Message) -> None:
        assert message.partition not in inside, "two messages of one partition at once"
        inside.add(message.partition)
        if message.offset == 0:
            together.wait()  # all four at once, or nobody gets further
        seen[message.partition].append(message.offset)
        inside.discard(message.partition)

    with hub.consumer("t", "g", until="end", on_error="raise") as inbox:
        settle(inbox, partitions=4)
        in_time(lambda: inbox.run(handle, threads=4))
    assert seen == {p: list(range(30)) for p in range(4)}


def test_stop_lets_run_return_when_what_is_in_hand_is_done(hub: Hub) -> None:
    create(hub, count=10)
    entered, go = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 3:
            entered.set()
            assert go.wait(BOUND_S)

    with hub.consumer("t", "g") as inbox:
        running = Background(lambda: inbox.run(handle))
        assert entered.wait(BOUND_S)
        inbox.stop()
        assert running.is_running
        go.set()
        running.result()
    assert checkpoint(hub) == 4


def test_stop_ends_a_run_that_waits_for_messages(hub: Hub) -> None:
    create(hub, count=1)
    seen = threading.Event()
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(lambda message: seen.set()))
        assert seen.wait(BOUND_S)
        eventually(lambda: checkpoint(hub) == 1)
        inbox.stop()
        running.result()


def test_a_stop_that_comes_before_the_run_ends_it_at_once(hub: Hub) -> None:
    create(hub, count=1)
    with hub.consumer("t", "g") as inbox:
        inbox.stop()
        in_time(lambda: inbox.run(lambda message: None))


def test_a_handler_that_would_do_nothing_is_refused_and_its_message_not_done(hub: Hub) -> None:
    async def asynchronous(message: Message) -> None: ...

    def generator(message: Message) -> Iterator[None]:
        yield

    hub.create_topic("t", partitions=1)
    send(hub, {0: 1})
    with hub.consumer("t", "g", until="end", on_error="raise") as inbox:
        for handler in (asynchronous, generator, lambda: None, "handle"):
            with pytest.raises(InvalidGroup, match="the handler"):
                inbox.run(handler)  # type: ignore[arg-type]
        with pytest.raises(HandlerFailed, match="done nothing"):
            in_time(lambda: inbox.run(lambda message: asynchronous(message)))
    assert hub.group("g").describe().lag == 1


def test_closing_ends_a_run(hub: Hub) -> None:
    create(hub)
    inbox = hub.consumer("t", "g")
    running = Background(lambda: inbox.run(lambda message: None))
    settle(inbox, partitions=1)
    inbox.close()
    running.result()


def test_a_commit_in_a_handler_does_not_count_what_other_threads_have_in_hand(hub: Hub) -> None:
    create(hub, partitions=2, count=1)
    entered, go = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.partition == 0:
            entered.set()
            go.wait(BOUND_S)
            raise RuntimeError("after the commit of another thread")
        assert entered.wait(BOUND_S)
        inbox.commit()
        go.set()

    with hub.consumer("t", "g") as inbox:
        running = Background(lambda: inbox.run(handle, threads=2))
        eventually(lambda: paused(hub, 0))
        inbox.stop()
        running.result()
    assert checkpoint(hub, 0) == 0


def test_a_partition_that_was_lost_and_comes_back_waits_for_the_handler_that_has_it(hub: Hub) -> None:
    create(hub, count=3)
    inside: list[Message] = []
    together: list[int] = []
    go = threading.Event()

    def handle(message: Message) -> None:
        inside.append(message)
        together.append(len(inside))
        if message.epoch == 1:
            assert go.wait(BOUND_S)
        inside.remove(message)

    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(handle, threads=2))
        eventually(lambda: inside)
        steal(hub)
        wake(hub)
        eventually(lambda: [lane.epoch for lane in inbox._lanes.owned()] == [3])
        change = Cancel()
        change.set()
        assert inbox._hand_out.next_for(set(inbox._lanes.owned()), 1, change) == []  # in nobody's way
        time.sleep(0.1)  # there is nothing to wait on: nothing must happen
        go.set()
        eventually(lambda: checkpoint(hub) == 3)
        inbox.stop()
        running.result()
    assert max(together) == 1


def test_run_sees_a_handler_that_returns_right_after_it_has_looked_which_lanes_are_busy(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub, count=1)
    has_looked, has_returned = threading.Event(), threading.Event()
    with hub.consumer("t", "g", until="end") as inbox:
        next_for, announce = inbox._hand_out.next_for, inbox._changes.announce

        def look(busy: set[Lane], *given: Any) -> Any:
            if busy:
                has_looked.set()
                assert has_returned.wait(BOUND_S)
            return next_for(busy, *given)

        def note() -> None:
            announce()
            if threading.current_thread().name.startswith("pxrs-handler"):
                has_returned.set()

        monkeypatch.setattr(inbox._hand_out, "next_for", look)
        monkeypatch.setattr(inbox._changes, "announce", note)
        in_time(lambda: inbox.run(lambda message: has_looked.wait(BOUND_S) and None))
        assert has_looked.is_set()
    assert checkpoint(hub) == 1


def test_run_refuses_manual_acknowledgement(hub: Hub) -> None:
    """A message is done when its handler returns: to let `ack` be called and count for nothing would lose some."""
    create(hub, count=5)
    with hub.consumer("t", "g", ack="manual") as inbox, pytest.raises(InvalidGroup, match="manual"):
        in_time(lambda: inbox.run(lambda message: inbox.stop()))
    assert checkpoint(hub) == 0


# Errors of handlers.


def poison(*bad: tuple[int, int]) -> tuple[Callable[[Message], None], list[tuple[int, int]]]:
    """A handler that raises at these places, and where it has been called."""
    seen: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        seen.append((message.partition, message.offset))
        if (message.partition, message.offset) in bad:
            raise ValueError(f"poison {message.offset}")

    return handle, seen


def admin(hub: Hub) -> GroupHandle:
    return GroupHandle(hub.registry, "g", hub.log)


def test_x14_pause_holds_only_the_partition_of_the_message_and_shows_why(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    handle, seen = poison((0, 1))
    with hub.consumer("t", "g", name="worker", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(handle))
        found = eventually(lambda: paused(hub, 0))
        assert (found.offset, found.error, found.by, found.skip) == (1, "ValueError: poison 1", "worker", False)
        eventually(lambda: (checkpoint(hub, 0), checkpoint(hub, 1)) == (1, 3))
        send(hub, {1: 2})
        eventually(lambda: checkpoint(hub, 1) == 5)
        inbox.resume(0)  # is not for the user to decide by accident
        assert running.is_running
        assert seen.count((0, 1)) == 1
        assert (0, 2) not in seen
        inbox.stop()
        running.result()


def test_x14_a_retried_message_comes_again_and_the_partition_goes_on(hub: Hub) -> None:
    create(hub, count=3)
    healed = threading.Event()
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.offset)
        if message.offset == 1 and not healed.is_set():
            raise ValueError("not yet")

    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(handle))
        eventually(lambda: paused(hub))
        healed.set()
        admin(hub).retry("t", 0)
        eventually(lambda: checkpoint(hub) == 3)
        inbox.stop()
        running.result()
    assert seen == [0, 1, 1, 2]
    assert paused(hub) is None


def test_x14_a_skipped_message_is_passed_over(hub: Hub) -> None:
    create(hub, count=3)
    handle, seen = poison((0, 1))
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(handle))
        eventually(lambda: paused(hub))
        admin(hub).skip("t", 0)
        eventually(lambda: checkpoint(hub) == 3)
        eventually(lambda: paused(hub) is None)
        inbox.stop()
        running.result()
    assert seen == [(0, 0), (0, 1), (0, 2)]


def test_x14_a_pause_outlives_its_member(hub: Hub) -> None:
    create(hub, count=3)
    handle, _ = poison((0, 1))
    with hub.consumer("t", "g") as inbox:
        running = Background(lambda: inbox.run(handle))
        eventually(lambda: paused(hub))
        inbox.stop()
        running.result()
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        settle(inbox, partitions=1)
        assert inbox.poll(timeout=0.1) == []
        admin(hub).retry("t", 0)
        assert offsets(polled(inbox, 2)) == [1, 2]


def test_x14_retry_tries_again_with_pauses_that_grow(hub: Hub) -> None:
    create(hub, count=2)
    tried: list[float] = []

    def handle(message: Message) -> None:
        if message.offset == 0:
            tried.append(time.monotonic())
            if len(tried) < 4:
                raise ValueError("not yet")

    with hub.consumer("t", "g", on_error="retry", retries_max=3, retry_pause=SOON_S, until="end") as inbox:
        in_time(lambda: inbox.run(handle))
    assert checkpoint(hub) == 2
    assert paused(hub) is None
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert len(gaps) == 3
    assert all(gap >= pause for gap, pause in zip(gaps, (SOON_S, 2 * SOON_S, 4 * SOON_S), strict=True))


def test_x14_retry_pauses_the_partition_when_the_retries_are_used_up(hub: Hub) -> None:
    create(hub, count=2)
    handle, seen = poison((0, 0))
    with hub.consumer("t", "g", on_error="retry", retries_max=2, retry_pause=0) as inbox:
        running = Background(lambda: inbox.run(handle))
        assert eventually(lambda: paused(hub)).offset == 0
        inbox.stop()
        running.result()
    assert seen == [(0, 0)] * 3


def test_x14_a_revoke_during_the_retries_leaves_them_to_the_next_owner(hub: Hub) -> None:
    create(hub, partitions=2, count=1)
    asked = threading.Event()
    failing = threading.Event()

    def handle(message: Message) -> None:
        failing.set()
        asked.wait(BOUND_S)
        raise ValueError("not yet")

    options: dict[str, Any] = {"on_error": "retry", "retries_max": 1000, "retry_pause": 0.01}
    with hub.consumer("t", "g", on_revoked=lambda _: asked.set(), **options) as first:
        running = Background(lambda: first.run(handle, threads=2))
        assert failing.wait(BOUND_S)
        with hub.consumer("t", "g") as second:
            (moved,) = eventually(lambda: second.assignment)
            assert paused(hub, moved) is None
            assert offsets(second.poll(timeout=BOUND_S)) == [0]
        first.stop()
        running.result()


def test_g8_a_message_is_not_tried_again_once_its_partition_may_be_anothers(hub: Hub) -> None:
    """To try again is to hand out."""
    create(hub, count=1)
    tried: list[int] = []

    def handle(message: Message) -> None:
        tried.append(message.epoch)
        raise ValueError("not yet")

    options: dict[str, Any] = {"on_error": "retry", "retries_max": 5, "retry_pause": 0.3}
    with hub.consumer("t", "g", commit_interval=SOON_S, **options) as inbox:
        running = Background(lambda: inbox.run(handle))
        eventually(lambda: tried)
        lease = inbox._member.lease
        assert lease is not None
        lease.expire()  # as when the process has slept
        eventually(lambda: max(tried) > 1)  # as a new member
        inbox.stop()
        running.result()
    assert tried.count(1) == 1


def test_a_dead_letter_is_not_sent_of_a_partition_that_is_lost(hub: Hub) -> None:
    create(hub, count=1)
    hub.create_topic("dead", partitions=1)
    entered, go = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.epoch == 1:
            entered.set()
            assert go.wait(BOUND_S)
            raise ValueError("late")

    options: dict[str, Any] = {"on_error": "dead-letter", "dead_letters": "dead"}
    with hub.consumer("t", "g", commit_interval=SOON_S, **options) as inbox:
        running = Background(lambda: inbox.run(handle))
        assert entered.wait(BOUND_S)
        steal(hub)
        wake(hub)
        eventually(lambda: owner(hub).epoch == 3)
        go.set()
        eventually(lambda: checkpoint(hub) == 1)
        inbox.stop()
        running.result()
    assert list(hub.topic("dead").messages(0)) == []


@pytest.mark.parametrize("error", [RegistryUnavailable("away"), OutcomeUnknown("no answer")], ids=repr)
def test_x14_a_pause_that_cannot_be_written_is_written_later(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    create(hub, partitions=2, count=3)
    handle, seen = poison((0, 1))
    failures = [1, 2, 3]

    def fail(put: dict[str, Any], _: list[str]) -> None:
        if failures and any("/paused/" in key for key in put):
            failures.pop()
            raise error

    on_commit(hub, monkeypatch, fail)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(handle))
        assert eventually(lambda: paused(hub, 0)).error == "ValueError: poison 1"
        eventually(lambda: checkpoint(hub, 1) == 3)
        inbox.stop()
        running.result()
    assert (seen.count((0, 1)), checkpoint(hub, 0)) == (1, 1)


def test_x14_a_reset_in_the_middle_of_a_skip_ends_no_member(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, count=3)
    handle, seen = poison((0, 1))
    resets = ["earliest"]

    def interrupted(put: dict[str, Any], delete: list[str]) -> None:
        if resets and not put and any("/paused/" in key for key in delete):
            admin(hub).reset(resets.pop(), force=True)  # type: ignore[arg-type]

    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = Background(lambda: inbox.run(handle))
        eventually(lambda: paused(hub))
        on_commit(hub, monkeypatch, interrupted)
        admin(hub).skip("t", 0)
        eventually(lambda: seen.count((0, 0)) == 2)
        inbox.stop()
        running.result()


def test_x14_a_dead_letter_carries_the_message_and_the_reason(hub: Hub) -> None:
    create(hub)
    hub.create_topic("dead", partitions=1)
    with hub.producer("t") as out:
        for number in range(3):
            out.send(b"%d" % number, b"key", [("mine", b"x")], 1_000 + number)
    handle, seen = poison((0, 1))
    with hub.consumer("t", "g", on_error="dead-letter", dead_letters="dead", until="end") as inbox:
        in_time(lambda: inbox.run(handle))
    assert seen == [(0, 0), (0, 1), (0, 2)]
    assert checkpoint(hub) == 3
    (dead,) = hub.topic("dead").messages(0)
    assert (dead.key, dead.value, dead.timestamp) == (b"key", b"1", 1_001)
    assert dead.headers is not None
    assert dead.headers[:4] == [
        ("mine", b"x"),
        ("pxrs-reason", b"ValueError: poison 1"),
        ("pxrs-origin", b"t/0 offset 1"),
        ("pxrs-error-type", b"ValueError"),
    ]
    assert [name for name, _ in dead.headers[4:]] == ["pxrs-traceback"]


def test_x14_raise_ends_the_run_and_leaves_the_message_undone(hub: Hub) -> None:
    create(hub, count=3)
    handle, _ = poison((0, 1))
    with hub.consumer("t", "g", on_error="raise") as inbox:
        with pytest.raises(HandlerFailed, match="t/0 offset 1: ValueError: poison 1") as caught:
            in_time(lambda: inbox.run(handle))
        assert isinstance(caught.value.__cause__, ValueError)
    assert checkpoint(hub) == 1


def test_x13_a_hung_handler_of_run_stays_away_until_it_returns(hub: Hub) -> None:
    create(hub, partitions=2, count=2)
    entered, go = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if not entered.is_set():
            entered.set()
            go.wait(2 * BOUND_S)

    with hub.consumer("t", "g", progress_timeout=0.2, commit_interval=SOON_S) as slow:
        running = Background(lambda: slow.run(handle))
        assert entered.wait(BOUND_S)
        with hub.consumer("t", "g", commit_interval=SOON_S) as other:
            settle(other, partitions=2)
            handling = Background(lambda: other.run(lambda message: None))
            eventually(lambda: [checkpoint(hub, p) for p in range(2)] == [2, 2])
            assert len(members(hub)) == 1, "it has come back while its only thread hangs"
            send(hub, {0: 1, 1: 1})
            eventually(lambda: [checkpoint(hub, p) for p in range(2)] == [3, 3])
            assert len(members(hub)) == 1, "it has come back while its only thread hangs"
            go.set()
            eventually(lambda: len(slow.assignment) == 1)
            other.stop()
            handling.result()
        slow.stop()
        running.result()


def test_x13_a_handler_that_hangs_on_a_partition_it_has_lost_gives_up_the_others_too(hub: Hub) -> None:
    """Its partition was fenced before the progress deadline; the rest must not wait for a thread that never comes."""
    create(hub, partitions=2, count=1)
    go = threading.Event()
    held: list[int] = []
    lost: list[int] = []

    def handle(message: Message) -> None:
        held.append(message.partition)
        go.wait(3 * BOUND_S)

    with hub.consumer("t", "g", progress_timeout=0.5, commit_interval=SOON_S, on_lost=lost.extend) as slow:
        running = Background(lambda: slow.run(handle))
        eventually(lambda: held)
        steal(hub, held[0])
        wake(hub)
        eventually(lambda: lost == held)
        with hub.consumer("t", "g") as other:
            settle(other, partitions=2)
            go.set()
            eventually(lambda: len(slow.assignment) == len(other.assignment) == 1)
        slow.stop()
        running.result()


# Starts.


@pytest.mark.parametrize("leaves", [True, False])
def test_g6_latest_is_pinned_when_the_group_begins(hub: Hub, leaves: bool) -> None:
    create(hub, count=5)
    first = hub.consumer("t", "g", start="latest")
    if leaves:
        first.close()
    send(hub, {0: 3})
    if leaves:
        first = hub.consumer("t", "g", start="latest")
    assert offsets(polled(first, 3)) == [5, 6, 7]


def test_g6_a_group_that_has_begun_keeps_its_start(hub: Hub) -> None:
    create(hub, count=5)
    hub.consumer("t", "g", start="latest").close()
    assert checkpoint(hub) == 5
    with hub.consumer("t", "g", start="earliest", until="end") as inbox:
        assert in_time(lambda: list(inbox)) == []


def test_g6_a_group_can_start_at_a_time(hub: Hub) -> None:
    create(hub)
    with hub.producer("t") as out:
        for second in range(10):
            out.send(b"%d" % second, None, None, second * 1_000_000)
    with hub.consumer("t", "g", start=datetime(1970, 1, 1, 0, 0, 6, tzinfo=UTC)) as inbox:
        assert offsets(polled(inbox, 4)) == [6, 7, 8, 9]


def test_a_start_without_a_time_zone_is_refused_and_leaves_no_member_behind(hub: Hub) -> None:
    create(hub, partitions=2, count=1)
    with pytest.raises(InvalidGroup, match="time zone"):
        hub.consumer("t", "g", start=datetime(2020, 1, 1))
    assert members(hub) == []
    with hub.consumer("t", "g") as inbox:
        settle(inbox, partitions=2)


def test_a_member_that_cannot_begin_leaves_nothing_behind(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, partitions=2, count=1)
    monkeypatch.setattr(hub.log.topic("t"), "start", lambda partition: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        hub.consumer("t", "g")
    assert members(hub) == []


def trimmed(hub: Hub) -> None:
    """A group with its checkpoint at 2 of a topic that begins at 10."""
    hub.create_topic("t", partitions=1, retention_bytes=15_000)
    send(hub, {0: 10}, size=1_000)
    with hub.consumer("t", "g") as inbox:
        inbox.poll(2, timeout=BOUND_S)
        inbox.commit()
    send(hub, {0: 10}, size=1_000)
    hub.topic("t").retain()
    assert (checkpoint(hub), hub.topic("t").start(0)) == (2, 10)


def test_what_retention_took_is_an_error_by_default(hub: Hub) -> None:
    trimmed(hub)
    with hub.consumer("t", "g") as inbox, pytest.raises(CheckpointOutOfRange, match="on_trimmed='skip'"):
        in_time(lambda: next(iter(inbox)))
    assert checkpoint(hub) == 2


def test_what_retention_took_can_be_skipped_and_is_counted(hub: Hub) -> None:
    trimmed(hub)
    with hub.consumer("t", "g", on_trimmed="skip", until="end") as inbox:
        assert offsets(in_time(lambda: list(inbox))) == list(range(10, 20))
        assert inbox.skipped == 8
    assert checkpoint(hub) == 20


def test_x22_skipping_what_retention_took_acknowledges_nothing_before_it(hub: Hub) -> None:
    hub.create_topic("t", partitions=1, retention_bytes=15_000)
    send(hub, {0: 4}, size=1_000)
    with hub.consumer("t", "g", ack="manual", on_trimmed="skip") as inbox:
        first = in_time(lambda: inbox.poll(4))
        send(hub, {0: 6}, size=1_000)
        send(hub, {0: 10}, size=1_000)
        hub.topic("t").retain()
        assert hub.topic("t").start(0) == 10
        second = in_time(lambda: inbox.poll(1))
        assert (offsets(second), inbox.skipped) == ([10], 6)
        inbox.commit()
        assert checkpoint(hub) == 0, "nothing is acknowledged yet"
        for message in first:
            inbox.ack(message)
        inbox.commit()
        assert checkpoint(hub) == 10


@pytest.mark.parametrize("until", [None, "end"])
def test_g7_a_checkpoint_beyond_the_end_is_an_error(hub: Hub, until: str | None) -> None:
    create(hub, count=5)
    key = Keys("g").checkpoint(hub.topic("t").id, 0)
    hub.registry.commit(put={key: Checkpoint(50).dump()})
    with hub.consumer("t", "g", until=until) as inbox, pytest.raises(CheckpointOutOfRange, match="50"):
        in_time(lambda: list(inbox))
    assert checkpoint(hub) == 50


def test_g7_until_end_accepts_a_checkpoint_whose_rows_were_removed_from_the_table(hub: Hub, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as db:
        db.execute(sqlalchemy.text("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT)"))
        db.execute(sqlalchemy.text("INSERT INTO orders (body) VALUES ('a'), ('b'), ('c')"))
    with sql_table(url, "orders", value_column="body", partitions=1, poll_s=SOON_S) as orders:
        with hub.consumer(orders, "g", until="end") as inbox:
            assert offsets(in_time(lambda: list(inbox))) == [1, 2, 3]
        with engine.begin() as db:
            db.execute(sqlalchemy.text("DELETE FROM orders WHERE id > 1"))
    with sql_table(url, "orders", value_column="body", partitions=1, poll_s=SOON_S) as orders:
        with hub.consumer(orders, "g", until="end") as inbox:
            assert in_time(lambda: list(inbox)) == []
        hub.registry.commit(put={Keys("g").checkpoint(orders.id, 0): Checkpoint(50).dump()})
        with hub.consumer(orders, "g", until="end") as inbox, pytest.raises(CheckpointOutOfRange, match="50"):
            in_time(lambda: list(inbox))
    engine.dispose()


# Wrong use.


def test_r11_a_forked_child_cannot_use_its_parents_consumer(hub: Hub) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g", ack="manual") as inbox:
        first, second, third = polled(inbox, 3)
        uses: dict[str, Callable[[], object]] = {
            "iterate": lambda: next(iter(inbox)),
            "poll": lambda: inbox.poll(timeout=0),
            "batches": lambda: next(inbox.batches()),
            "run": lambda: inbox.run(lambda message: None),
            "commit": inbox.commit,
            "ack": lambda: inbox.ack(first),
            "seek": lambda: inbox.seek(0, 0),
            "pause": inbox.pause,
            "resume": inbox.resume,
            "assignment": lambda: inbox.assignment,
            "position": lambda: inbox.position,
            "committed": lambda: inbox.committed,
            "lag": lambda: inbox.lag,
            "stop": inbox.stop,
        }

        def work() -> None:
            allowed = [name for name, use in uses.items() if not raises(use, UsedAfterFork)]
            inbox.close()  # does nothing: it is the parent's
            assert not allowed, f"not refused: {', '.join(allowed)}"

        with child(work) as pid:
            assert wait_exit(pid) == 0
        for message in (third, second, first):
            inbox.ack(message)
        inbox.commit()
    assert checkpoint(hub) == 3


def raises(call: Callable[[], object], kind: type[BaseException]) -> bool:
    try:
        call()
    except kind:
        return True
    except Exception:  # noqa: BLE001 - another error is not this one
        return False
    return False


def test_a_closed_consumer_says_so(hub: Hub) -> None:
    create(hub, count=3)
    inbox = hub.consumer("t", "g")
    polled(inbox, 3)
    inbox.close()
    inbox.close()
    for use in (
        lambda: next(iter(inbox)),
        lambda: inbox.poll(timeout=0),
        lambda: next(inbox.batches()),
        lambda: inbox.run(lambda message: None),
        inbox.commit,
    ):
        with pytest.raises(Closed):
            in_time(use)
    assert inbox.assignment == []
    assert members(hub) == []
    assert "closed" in repr(inbox)


def test_a_close_that_was_interrupted_is_finished_by_the_next(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, count=1)
    inbox = hub.consumer("t", "g")
    settle(inbox, partitions=1)
    join, interrupts = threading.Thread.join, [KeyboardInterrupt]

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if interrupts and thread is inbox._member._thread:
            raise interrupts.pop()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inbox.close()
    inbox.close()
    assert members(hub) == []


def test_a_second_close_waits_for_the_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes the hub would take the registry away from under the last checkpoint."""
    create(hub, count=1)
    inbox = hub.consumer("t", "g", commit_interval=3600)
    polled(inbox, 1)
    inbox.poll(timeout=0)
    inside, go = threading.Event(), threading.Event()

    def slow(put: dict[str, Any], _: list[str]) -> None:
        if any("/owners/" in key for key in put):
            inside.set()
            assert go.wait(BOUND_S)

    on_commit(hub, monkeypatch, slow)
    first = Background(inbox.close)
    assert inside.wait(BOUND_S)
    closing = Background(hub.close)
    closing._thread.join(0.1)
    assert closing.is_running
    go.set()
    first.result()
    closing.result()


def test_closing_the_hub_closes_its_consumers_and_ends_who_waits(hub: Hub) -> None:
    create(hub)
    inbox = hub.consumer("t", "g")
    settle(inbox, partitions=1)
    waiting = Background(lambda: next(iter(inbox)))
    hub.close()
    with pytest.raises(Closed):
        waiting.result()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ack": "later"}, ("ack", "auto", "manual")),
        ({"until": "noon"}, ("until", "end")),
        ({"start": "middle"}, ("start", "earliest", "latest")),
        ({"on_trimmed": "cry"}, ("on_trimmed", "error", "skip")),
        ({"on_error": "ignore"}, ("on_error", "pause", "retry", "dead-letter", "raise")),
        ({"on_error": "dead-letter"}, ("dead_letters",)),
        ({"assignor": "random"}, ("assignor", "sticky", "range", "round-robin")),
        ({"prefetch_bytes": 0}, ("prefetch_bytes",)),
        ({"retries_max": 0}, ("retries_max",)),
        ({"retry_pause": -1}, ("retry_pause",)),
        ({"lease_ttl": 0}, ("lease_ttl",)),
        ({"handover_timeout": -1}, ("handover_timeout",)),
        ({"progress_timeout": timedelta(days=2)}, ("progress_timeout",)),
        ({"commit_interval": 0}, ("commit_interval",)),
        ({"commit_interval": "1s"}, ("commit_interval",)),
        ({"group": "a/b"}, ("a/b",)),
    ],
    ids=str,
)
def test_a_bad_option_is_an_error_that_names_the_choices(
    hub: Hub, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    create(hub)
    with pytest.raises(InvalidGroup) as caught:
        hub.consumer("t", **{"group": "g", **options})
    assert all(name in str(caught.value) for name in names), caught.value
    assert hub.registry.scan("") == []


@pytest.mark.parametrize("threads", [0, 1001])
def test_a_bad_number_of_threads_is_refused(hub: Hub, threads: int) -> None:
    create(hub)
    with hub.consumer("t", "g") as inbox, pytest.raises(InvalidGroup, match="threads"):
        inbox.run(lambda message: None, threads=threads)


def test_an_unknown_topic_is_an_error_at_once(hub: Hub) -> None:
    create(hub)
    with pytest.raises(UnknownTopic):
        hub.consumer("other", "g")
    with pytest.raises(UnknownTopic):
        hub.consumer("t", "g", on_error="dead-letter", dead_letters="other")


# Bounds and independence.


def test_x16_reading_ahead_is_bounded_for_all_partitions_together(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create_topic("t", partitions=4)
    large, bound, rows = 10_000, 100_000, 40
    for partition in range(4):
        for _ in range(rows):  # a batch for each
            with hub.producer("t") as out:
                out.send_batch(pa.table({"value": [b"x" * large], "partition": pa.array([partition], pa.int32())}))
    with hub.consumer("t", "g", prefetch_bytes=bound) as inbox:
        settle(inbox, partitions=4)
        reads = count_reads(inbox, monkeypatch, inbox._read_ahead.bytes_ahead)
        most = 0
        messages = iter(inbox)
        for _ in range(4 * rows):
            take(messages, 1)
            most = max(most, inbox._read_ahead.bytes_ahead())
    assert 0 < most <= bound
    assert max(reads) <= bound + 2 * large


def test_x16_a_consumer_that_does_not_ask_reads_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, count=5)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        reads = count_reads(inbox, monkeypatch)
        settle(inbox, partitions=1)
        assert reads == []


def test_x3_groups_are_independent(hub: Hub) -> None:
    create(hub, partitions=2, count=5)
    with hub.consumer("t", "one") as one, hub.consumer("t", "two") as two:
        assert len(polled(one, 10)) == len(polled(two, 10)) == 10
        assert one.assignment == two.assignment == [0, 1]
        one.commit()
        assert [checkpoint(hub, p, "one") for p in range(2)] == [5, 5]
        assert [checkpoint(hub, p, "two") for p in range(2)] != [5, 5]
