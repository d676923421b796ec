"""Messages of a consumer, one by one, polled or in batches: what is handed out, and when it counts as done."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from pxrs.consumer.hand_out import HandOut
from pxrs.errors import (
    InvalidGroup,
)
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.testing.waiting import aside, eventually
from tests.unit.consumer.reading import (
    BOUND_S,
    SOON_S,
    checkpoint,
    count_reads,
    create,
    in_time,
    offsets,
    polled,
    send,
    settle,
    take,
)


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
        waiting = aside(lambda: next(iter(inbox)))
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
            running = aside(lambda: inbox.run(lambda message: seen.append(message.offset)))
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
            going = aside(lambda: next(iter(first)))
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
