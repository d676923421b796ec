"""What users test their own handlers with: time that is advanced, queues that are drained, messages made by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import pxrs
from pxrs.clock import ManualClock, SystemClock
from pxrs.errors import (
    Closed,
    DrainLimitReached,
    HandlerFailed,
    InvalidArgument,
    InvalidGroup,
    InvalidQueue,
    UnknownQueue,
)
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.queue.items import Item
from pxrs.queue.listener import QueueListener
from pxrs.queue.transaction import Transaction
from pxrs.testing import Drained, drain, drain_queue, item, memory_hub, message
from pxrs.testing.waiting import aside, eventually

PATIENCE_S = 30.0
HOUR_S = 3_600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hub(clock: ManualClock) -> Iterator[Hub]:
    with memory_hub(clock) as hub:
        yield hub


def values(items: list[Item]) -> list[bytes]:
    return [each.value for each in items]


def nothing(tx: Transaction, item: Item) -> None:
    pass


def broken(tx: Transaction, item: Item) -> None:
    raise ValueError(f"no: {item.value!r}")


def fail_once(hub: Hub, queue: str) -> None:
    tx = hub.transaction()
    assert tx.take(queue, timeout=PATIENCE_S) is not None
    tx.rollback("it failed")


# The clock.


def test_the_manual_clock_tells_the_time_of_day_in_order_and_moves_it_too() -> None:
    began = datetime(2030, 1, 1, tzinfo=UTC)
    clock = ManualClock(wall=began)
    first, second = clock.wall_time_us(), clock.wall_time_us()
    assert first < second
    clock.advance(timedelta(hours=1))
    assert clock.now() == 1_000 + HOUR_S
    assert datetime.fromtimestamp(clock.wall_time_us() / 1e6, UTC) - began == pytest.approx(
        timedelta(hours=1), abs=timedelta(milliseconds=1)
    )
    assert ManualClock().wall_time_us() / 1e6 == pytest.approx(time.time(), abs=PATIENCE_S)
    for wrong in (-1, float("nan"), "1"):
        with pytest.raises(InvalidArgument, match="seconds"):
            clock.advance(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="time zone"):
        ManualClock(wall=datetime(2030, 1, 1))


def test_a_wait_ends_at_its_moment_though_the_clock_was_advanced_before_it_began(clock: ManualClock) -> None:
    until = clock.now() + 10
    clock.advance(10)
    assert not clock.wait(threading.Event(), until)


@pytest.mark.parametrize("kind", [ManualClock, SystemClock])
def test_a_wait_ends_with_its_timeout_or_its_event_whatever_the_clock_says(
    kind: type[ManualClock] | type[SystemClock],
) -> None:
    clock, event = kind(), threading.Event()
    assert not clock.wait(event, clock.now() + HOUR_S, 0.01)
    assert not clock.wait(event, None, 0)
    event.set()
    assert clock.wait(event, None)
    assert clock.wait(event, clock.now() - 1)


def test_a_thread_that_waits_wakes_when_the_clock_is_advanced(clock: ManualClock) -> None:
    until = clock.now() + 10
    waiting = aside(lambda: clock.wait(threading.Event(), until))
    clock.advance(9)
    assert not waiting.done()
    clock.advance(1)
    assert waiting.result(PATIENCE_S) is False


# What goes by the clock.


def test_a_delay_of_an_hour_passes_by_advancing_the_clock(hub: Hub, clock: ManualClock) -> None:
    hub.create_queue("q").put("late", delay=HOUR_S)
    with hub.transaction() as tx:
        assert tx.take("q", timeout=0) is None
        clock.advance(HOUR_S - 1)
        assert tx.take("q", timeout=0.02) is None
        clock.advance(1)
        taken = tx.take("q", timeout=PATIENCE_S)
    assert taken is not None
    assert taken.value == b"late"


@pytest.mark.parametrize("delay_s", [5.0, HOUR_S], ids=["within a lease", "longer than a lease"])
def test_a_delay_is_over_for_one_who_waits_for_the_item(hub: Hub, clock: ManualClock, delay_s: float) -> None:
    hub.create_queue("q").put("late", delay=delay_s)

    def take() -> Item | None:
        with hub.transaction() as tx:
            return tx.take("q", timeout=PATIENCE_S)

    waiting = aside(take)
    eventually(lambda: hub.queue("q").store.keeper._watch is not None)
    clock.advance(delay_s)
    found = waiting.result(PATIENCE_S)
    assert found is not None
    assert found.value == b"late"


@pytest.mark.parametrize("fifo", [False, True])
def test_an_exponential_backoff_passes_by_advancing_the_clock(hub: Hub, clock: ManualClock, fifo: bool) -> None:
    backoff = pxrs.ExponentialBackoff(first=HOUR_S, factor=2, cap=10 * HOUR_S, jitter=0)
    hub.create_queue("q", backoff=backoff, fifo=fifo).put("x")
    for hours in (1, 2, 4):
        fail_once(hub, "q")
        clock.advance(hours * HOUR_S - 1)
        with hub.transaction() as tx:
            assert tx.take("q", timeout=0.02) is None
        clock.advance(1)
    with hub.transaction() as tx:
        taken = tx.take("q", timeout=PATIENCE_S)
    assert taken is not None
    assert taken.deliveries == 4


def test_items_are_taken_in_the_order_of_their_puts_though_the_clock_stands(hub: Hub) -> None:
    queue = hub.create_queue("q")
    sent = [b"%d" % number for number in range(50)]
    for value in sent:
        queue.put(value)
    assert values(drain_queue(hub, "q", nothing).done) == sent


def test_a_retry_pause_passes_by_advancing_the_clock(hub: Hub, clock: ManualClock) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send("x")
    tries: list[float] = []

    def handle(message: Message) -> None:
        tries.append(clock.now())
        if len(tries) < 3:
            raise ValueError

    def go_on() -> bool:
        clock.advance(1)
        return running.done()

    with hub.consumer("t", "g", until="end", on_error="retry", retry_pause=20, lease_ttl=24 * HOUR_S) as inbox:
        running = aside(lambda: inbox.run(handle))
        eventually(go_on)  # in steps: nothing tells a test when the pause has begun
        running.result(0)
    assert tries[1] - tries[0] >= 20
    assert tries[2] - tries[1] >= 30


def test_a_commit_interval_passes_by_advancing_the_clock(hub: Hub, clock: ManualClock) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send("x")

    def checkpoint() -> int | None:
        (row,) = hub.group("g").describe().partitions
        return row.checkpoint

    with hub.consumer("t", "g", lease_ttl=HOUR_S, commit_interval=60, ack="manual") as inbox:
        eventually(lambda: inbox._member._rounds.pace.commits_at > clock.now())  # the next commit is due later
        (found,) = inbox.poll(timeout=PATIENCE_S)
        inbox.ack(found)
        assert checkpoint() == 0
        clock.advance(60)
        eventually(lambda: checkpoint() == 1)


def test_retention_by_age_passes_by_advancing_the_clock(hub: Hub, clock: ManualClock) -> None:
    topic = hub.create_topic("t", partitions=1, retention=timedelta(days=7))
    with hub.producer("t") as out:
        out.send("old")
    clock.advance(timedelta(days=4))
    with hub.producer("t") as out:
        out.send("new")
    assert topic.retain() == {}
    clock.advance(timedelta(days=4))
    assert topic.retain() == {0: 1}
    kept = hub.create_topic("kept", partitions=1, retention=timedelta(days=7), keep_unread=True)
    with hub.producer("kept") as out:
        out.send("unread")
    hub.consumer("kept", "g").close()
    clock.advance(timedelta(days=8))
    assert kept.retain() == {}
    assert drain(hub, "kept", lambda message: None, group="g") == 1
    assert kept.retain() == {0: 1}


def test_times_of_items_are_those_of_the_clock(hub: Hub, clock: ManualClock) -> None:
    queue = hub.create_queue("q", pxrs.ConsumeOnce())
    queue.put("x")
    clock.advance(HOUR_S)
    drain_queue(hub, "q", broken)
    (dead,) = queue.dead_letters()
    assert dead.died_at is not None
    assert dead.died_at - dead.put_at == pytest.approx(HOUR_S, abs=1)


# Draining a queue.


def test_drain_queue_handles_all_that_can_be_taken_on_the_callers_thread(hub: Hub) -> None:
    hub.create_queue("mail").put_many(["a", "b", "c"])
    hub.create_queue("sent")
    threads: set[int] = set()

    def send(tx: Transaction, item: Item) -> None:
        threads.add(threading.get_ident())
        tx.put("sent", item.value.upper())

    drained = drain_queue(hub, "mail", send)
    assert values(drained.done) == [b"a", b"b", b"c"]
    assert (drained.failed, drained.errors, drained.advanced_s) == ([], [], 0)
    assert threads == {threading.get_ident()}
    assert values(hub.queue("sent").peek(10)) == [b"A", b"B", b"C"]
    assert drain_queue(hub, "mail", send) == Drained(())


def test_drain_queue_ends_delays_that_are_due_by_itself(hub: Hub, clock: ManualClock) -> None:
    queue = hub.create_queue("q")
    queue.put("late", delay=HOUR_S)
    clock.advance(HOUR_S)
    # It does not wait for the keeper's thread, which only begins with the first take.
    assert values(drain_queue(hub, "q", nothing).done) == [b"late"]


@pytest.mark.parametrize("fifo", [False, True])
def test_drain_queue_keeps_policy_backoff_and_dead_letters(hub: Hub, clock: ManualClock, fifo: bool) -> None:
    queue = hub.create_queue("q", pxrs.ConsumeTimes(2), fifo=fifo, backoff=pxrs.FixedBackoff(HOUR_S))
    queue.put("x")
    drained = drain_queue(hub, "q", broken)
    assert values(drained.failed) == [b"x"]
    assert [str(error) for error in drained.errors] == ["no: b'x'"]
    assert drain_queue(hub, "q", broken).deliveries == (), "it waits for its backoff"
    clock.advance(HOUR_S)
    (second,) = drain_queue(hub, "q", broken).deliveries
    assert (second.item.deliveries, second.outcome) == (2, "rolled back")
    assert values(queue.dead_letters().list()) == [b"x"]
    assert queue.dead_letters().list()[0].error_type == "ValueError"


@pytest.mark.parametrize("fifo", [False, True])
def test_drain_queue_advances_the_clock_from_delay_to_delay_when_asked(
    hub: Hub, clock: ManualClock, fifo: bool
) -> None:
    backoff = pxrs.ExponentialBackoff(first=60, factor=2, cap=HOUR_S, jitter=0)
    queue = hub.create_queue("q", pxrs.ConsumeTimes(4), fifo=fifo, backoff=backoff)
    queue.put_many(["good", "bad"])
    if not fifo:
        queue.put("tomorrow", delay=timedelta(days=1))
    began = clock.now()

    def handle(tx: Transaction, item: Item) -> None:
        if item.value == b"bad":
            raise ValueError("bad")

    drained = drain_queue(hub, "q", handle, advance=True)
    assert values(drained.done) == ([b"good"] if fifo else [b"good", b"tomorrow"])
    assert values(drained.failed) == [b"bad"] * 4
    passed = 60 + 120 + 240 if fifo else 86_400
    assert drained.advanced_s == pytest.approx(passed, abs=1)
    assert clock.now() - began == drained.advanced_s
    assert values(queue.dead_letters().list()) == [b"bad"]
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight) == (0, 0, 0)


def test_drain_queue_advances_no_machines_clock() -> None:
    with pxrs.open("memory:") as hub:
        hub.create_queue("q").put("x")
        with pytest.raises(InvalidArgument, match="ManualClock"):
            drain_queue(hub, "q", nothing, advance=True)
        assert values(drain_queue(hub, "q", nothing).done) == [b"x"]


def test_drain_queue_stops_a_handler_that_puts_an_item_for_each_one(hub: Hub) -> None:
    hub.create_queue("q").put("x")
    calls: list[bytes] = []

    def again(tx: Transaction, item: Item) -> None:
        calls.append(item.value)
        tx.put("q", item.value)

    with pytest.raises(DrainLimitReached, match="put an item for each item") as caught:
        drain_queue(hub, "q", again, deliveries_max=20)
    assert (caught.value.queue, caught.value.deliveries, caught.value.failures) == ("q", 20, 0)
    assert caught.value.__cause__ is None
    assert len(calls) == 20
    assert hub.queue("q").depth().ready == 1


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_drain_queue_stops_on_an_item_that_fails_every_time(hub: Hub, pause: float) -> None:
    hub.create_queue("q", backoff=pxrs.FixedBackoff(pause) if pause else None).put("x")
    with pytest.raises(DrainLimitReached) as caught:
        drain_queue(hub, "q", broken, advance=True, deliveries_max=10)
    assert caught.value.failures == 10
    assert isinstance(caught.value.__cause__, ValueError)


def test_drain_queue_may_make_exactly_as_many_deliveries_as_there_are(hub: Hub) -> None:
    hub.create_queue("q").put_many(["x"] * 5)
    assert len(drain_queue(hub, "q", nothing, deliveries_max=5).done) == 5
    with pytest.raises(InvalidArgument, match="deliveries_max"):
        drain_queue(hub, "q", nothing, deliveries_max=0)


def test_drain_queue_does_not_wait_in_a_handler_that_takes_more(hub: Hub) -> None:
    hub.create_queue("q").put("x")
    hub.create_queue("other").put("y")
    taken: list[Item | None] = []

    def take_more(tx: Transaction, item: Item) -> None:
        taken.append(tx.take("other"))
        tx.take("other")

    with pytest.raises(DrainLimitReached) as caught:
        drain_queue(hub, "q", take_more, deliveries_max=1)
    assert isinstance(caught.value.__cause__, Closed)
    assert "does not wait" in str(caught.value.__cause__)
    assert [each.value for each in taken if each] == [b"y"]
    assert (hub.queue("q").depth().ready, hub.queue("other").depth().ready) == (1, 1)


def test_an_item_whose_handler_commits_and_then_raises_is_done_and_its_error_is_told(hub: Hub) -> None:
    hub.create_queue("q").put("x")

    def commit_and_raise(tx: Transaction, item: Item) -> None:
        tx.commit()
        raise ValueError("too late")

    drained = drain_queue(hub, "q", commit_and_raise)
    assert values(drained.done) == [b"x"]
    assert [str(error) for error in drained.errors] == ["too late"]


def test_a_listener_with_threads_handles_nothing_on_the_callers_thread(hub: Hub) -> None:
    queue = hub.create_queue("q")
    with QueueListener(queue, nothing) as listener, pytest.raises(InvalidQueue, match="was started"):
        listener.handle_next()
    with pytest.raises(Closed):
        listener.handle_next()
    with pytest.raises(UnknownQueue):
        drain_queue(hub, "none", nothing)


def test_drain_tries_again_without_a_pause(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send("x")
    tries: list[Message] = []

    def handle(message: Message) -> None:
        tries.append(message)
        if len(tries) < 3:
            raise ValueError

    assert drain(hub, "t", handle, on_error="retry", retry_pause=HOUR_S) == 1
    assert len(tries) == 3


# Messages and items made by hand.


def test_a_message_is_made_by_what_matters_to_the_handler() -> None:
    made = message("paid", "account-7", headers={"trace": b"1", "raw": b"\xff"})
    assert (made.value, made.key, made.headers) == (b"paid", b"account-7", [("trace", b"1"), ("raw", b"\xff")])
    assert (made.topic, made.partition, made.offset, made.epoch) == ("test", 0, 0, 1)
    assert made.timestamp / 1e6 == pytest.approx(time.time(), abs=PATIENCE_S)
    when = datetime(2030, 1, 1, tzinfo=UTC)
    full = message(None, topic="t", partition=3, offset=9, timestamp=when, headers=[("a", b"b")], epoch=4)
    assert full == Message("t", 3, 9, None, None, int(when.timestamp()) * 1_000_000, [("a", b"b")], 4)
    assert message(timestamp=5).timestamp == 5


def test_an_item_is_made_by_what_matters_to_the_handler() -> None:
    made = item("hello", deliveries=3, error="ValueError: no")
    assert (made.value, made.key, made.queue, made.priority) == (b"hello", None, "test", 0)
    assert (made.deliveries, made.error) == (3, "ValueError: no")
    assert made.put_at == pytest.approx(time.time(), abs=PATIENCE_S)
    assert made.id != item("hello").id
    when = datetime(2030, 1, 1, tzinfo=UTC)
    assert item(b"x", b"k", queue="q", id="i", priority=2, put_at=when) == Item(
        "q", "i", b"x", b"k", 2, 1, when.timestamp()
    )


def test_what_cannot_be_made_is_refused() -> None:
    naive = datetime(2030, 1, 1)
    for make in (
        lambda: message(5),  # type: ignore[arg-type]
        lambda: message("x", key=7),  # type: ignore[arg-type]
        lambda: message("x", headers={"a": 1}),  # type: ignore[arg-type]
        lambda: message("x", timestamp=naive),
        lambda: item(None),  # type: ignore[arg-type]
        lambda: item("x", put_at=naive),
    ):
        with pytest.raises(InvalidArgument):
            make()


# Handlers that would do nothing, and items whose taker is gone.


class LazyCall:
    async def __call__(self, message: Message) -> None:
        raise AssertionError("nobody awaits it")


async def lazy(message: Message) -> None:
    raise AssertionError("nobody awaits it")


def generator(message: Message) -> Iterator[None]:
    yield


@pytest.mark.parametrize("handler", [lazy, generator, LazyCall(), lambda: None])
def test_drain_refuses_a_handler_that_does_nothing_when_it_is_called(hub: Hub, handler: Any) -> None:
    hub.create_topic("orders", partitions=1)
    with hub.producer("orders") as out:
        out.send("a")
    with pytest.raises(InvalidGroup, match=r"is an async or generator function|cannot be called"):
        drain(hub, "orders", handler)
    assert hub.groups() == [], "it is refused before the group is joined"


@pytest.mark.parametrize("function", [lazy, generator])
def test_drain_counts_no_message_whose_handler_returned_work_that_nobody_does(hub: Hub, function: Any) -> None:
    hub.create_topic("orders", partitions=1)
    with hub.producer("orders") as out:
        out.send("a")
    with pytest.raises(HandlerFailed, match="instead of doing its work"):
        drain(hub, "orders", lambda message: function(message))
    assert drain(hub, "orders", lambda message: None) == 1, "it comes again"


@pytest.mark.parametrize("fifo", [False, True])
def test_drain_queue_delivers_what_an_ended_lease_held(hub: Hub, clock: ManualClock, fifo: bool) -> None:
    """20 times: the thread that sweeps for this process may be first in some of them."""
    for number in range(20):
        queue = hub.create_queue(f"mail-{number}", fifo=fifo)
        queue.put("hello")
        with hub.transaction() as tx:
            assert tx.take(queue) is not None
            clock.advance(2 * hub.queue(queue.name).store.lease_ttl + 1)
            drained = drain_queue(hub, queue.name, nothing, advance=True)
            assert values(drained.done) == [b"hello"]
            tx.rollback()
