"""`stop` ends every way of reading: from any thread, in a callback and in the handler of a signal. Nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

import pxrs
from pxrs.consumer.consumer import Consumer, TopicsConsumer
from pxrs.errors import ReadFailed
from pxrs.hub import Hub
from pxrs.testing.waiting import aside, eventually
from tests.unit.consumer.reading import BOUND_S, checkpoint, create, in_time, offsets, send

Inbox = Consumer | TopicsConsumer
WAYS: dict[str, Callable[[Inbox], object]] = {
    "iterate": list,
    "batches": lambda inbox: list(inbox.batches()),
    "poll": lambda inbox: inbox.poll(),
    "run": lambda inbox: inbox.run(lambda message: None),
}
"""Calls that wait for messages without a limit, on an empty topic."""
ENDED: dict[str, object] = {"iterate": [], "batches": [], "poll": [], "run": None}


def when_it_waits(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once a call of the consumer is about to wait for messages."""
    waits = threading.Event()
    fetch = inbox._source.fetch

    def noted(positions: Any, max_bytes: int, timeout: float | None = 0.0, cancel: Any = None) -> Any:
        if timeout is None:
            waits.set()
        return fetch(positions, max_bytes, timeout, cancel)

    monkeypatch.setattr(inbox._source, "fetch", noted)
    return waits


@pytest.mark.parametrize("topics", ["one topic", "several topics"])
@pytest.mark.parametrize("way", WAYS)
def test_stop_from_another_thread_ends_a_call_that_waits(
    hub: Hub, way: str, topics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub)
    create(hub, topic="u")
    with hub.consumer("t", "g") if topics == "one topic" else hub.consumer(["t", "u"], "g") as inbox:
        waits = when_it_waits(inbox, monkeypatch)
        reading = aside(lambda: WAYS[way](inbox))
        assert waits.wait(BOUND_S)
        inbox.stop()
        assert reading.result() == ENDED[way]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_begins_after_stop_ends_at_once_with_messages_that_nobody_has_read(hub: Hub, way: str) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g") as inbox:
        inbox.stop()
        inbox.stop()
        for _ in range(2):
            assert in_time(lambda: WAYS[way](inbox)) == ENDED[way]
        inbox.commit()
    assert checkpoint(hub) == 0


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub", registry=f"sqlite:///{tmp_path / 'shop.db'}") as hub:
        yield hub


def test_stop_ends_a_loop_over_transactions_when_the_transaction_is_committed(shop: Hub, tmp_path: Path) -> None:
    create(shop, count=4)
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with shop.consumer("t", "g") as inbox:
        seen = []

        def read() -> None:
            for messages, _ in inbox.transactions(engine, max_messages=1):
                seen.extend(offsets(messages))
                if len(seen) == 2:
                    inbox.stop()

        in_time(read)
    engine.dispose()
    assert seen == [0, 1]
    assert checkpoint(shop) == 2


@pytest.mark.parametrize("way", ["iterate", "batches"])
def test_the_last_message_of_a_loop_that_stop_ends_is_done(hub: Hub, way: str) -> None:
    """The loop has asked for the next message, and what it asked for was not handed out."""
    create(hub)
    for _ in range(3):
        send(hub, {0: 1})
    seen = []
    with hub.consumer("t", "g") as inbox:

        def read() -> None:
            loop: Any = inbox if way == "iterate" else inbox.batches()
            for each in loop:
                seen.append(each.offset)
                if each.offset == 1:
                    inbox.stop()

        in_time(read)
        assert inbox.position == {0: 2}
        inbox.commit()
        assert checkpoint(hub) == 2
    with hub.consumer("t", "g", until="end") as other:
        assert in_time(lambda: offsets(list(other))) == [2]
    assert seen == [0, 1]


def test_a_loop_that_stop_ends_leaves_a_message_that_was_not_acknowledged(hub: Hub) -> None:
    create(hub, count=3)
    with hub.consumer("t", "g", ack="manual") as inbox:

        def read() -> None:
            for message in inbox:
                if message.offset == 1:
                    inbox.stop()
                else:
                    inbox.ack(message)

        in_time(read)
    assert checkpoint(hub) == 1


def test_what_the_last_poll_returned_is_done_when_a_loop_around_poll_sees_that_it_is_stopped(hub: Hub) -> None:
    create(hub, count=3)
    seen = []
    with hub.consumer("t", "g") as inbox:
        assert not inbox.is_stopped

        def read() -> None:
            while not inbox.is_stopped:
                for message in inbox.poll(1):
                    seen.append(message.offset)
                    if message.offset == 1:
                        inbox.stop()
            assert inbox.poll() == []

        in_time(read)
        in_time(inbox.commit)
    assert seen == [0, 1]
    assert checkpoint(hub) == 2


def test_a_handler_that_is_being_retried_is_not_called_again_after_stop(hub: Hub) -> None:
    create(hub, count=1)
    failed = threading.Event()

    def handle(message: object) -> None:
        assert not failed.is_set(), "called after `stop`"
        failed.set()
        raise ValueError("not yet")

    with hub.consumer("t", "g", on_error="retry", retry_pause=3600) as inbox:
        running = aside(lambda: inbox.run(handle))
        assert failed.wait(BOUND_S)
        inbox.stop()
        running.result()
    assert checkpoint(hub) == 0


def test_a_loop_ends_normally_if_the_consumer_is_stopped_and_then_closed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub)
    with hub.consumer("t", "g") as inbox:
        waits = when_it_waits(inbox, monkeypatch)
        reading = aside(lambda: list(inbox))
        assert waits.wait(BOUND_S)
        inbox.stop()
        inbox.close()
        assert reading.result() == []


def test_a_read_that_fails_after_stop_is_logged_and_its_loop_ends_normally(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a server that does not answer, which the client gives up after its `patience`."""
    create(hub)
    with hub.consumer("t", "g") as inbox:
        reads = threading.Event()

        def failing(*_: object) -> Any:
            reads.set()
            eventually(lambda: inbox.is_stopped)
            raise ReadFailed("no server answers")

        monkeypatch.setattr(inbox._source, "fetch", failing)
        reading = aside(lambda: list(inbox))
        assert reads.wait(BOUND_S)
        inbox.stop()
        assert reading.result() == []
    assert "no server answers" in caplog.text


def test_stop_in_a_callback_ends_the_loop(hub: Hub) -> None:
    create(hub)
    inboxes: list[Consumer] = []
    made = threading.Event()

    def stop(partitions: object) -> None:
        assert made.wait(BOUND_S)
        inboxes[0].stop()

    with hub.consumer("t", "g", on_assigned=stop) as inbox:
        inboxes.append(inbox)
        made.set()
        assert in_time(lambda: list(inbox)) == []


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what SIGUSR1 calls. SIGALRM ends a test that hangs in the main thread."""

    def late(*_: object) -> None:
        raise AssertionError("the main thread was not woken in time")

    before = signal.signal(signal.SIGALRM, late), signal.getsignal(signal.SIGUSR1)
    signal.alarm(int(BOUND_S))
    yield lambda call: signal.signal(signal.SIGUSR1, lambda *_: call()) and None
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before[0])
    signal.signal(signal.SIGUSR1, before[1])


def test_stop_in_the_handler_of_a_signal_waits_for_no_lock_that_the_main_thread_holds(
    hub: Hub, on_signal: Callable[[Callable[[], None]], None]
) -> None:
    create(hub)
    with hub.consumer("t", "g") as inbox:
        on_signal(inbox.stop)
        change = inbox._changes.next_change
        with inbox._changes._lock:
            signal.raise_signal(signal.SIGUSR1)
        assert inbox.is_stopped
        eventually(lambda: change.is_set)


def test_a_signal_ends_a_loop_of_the_main_thread(
    hub: Hub, on_signal: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub, count=1)
    with hub.consumer("t", "g") as inbox:
        on_signal(inbox.stop)
        waits = when_it_waits(inbox, monkeypatch)
        handed = threading.Event()

        def signals() -> None:
            assert handed.wait(BOUND_S)
            assert waits.wait(BOUND_S)
            signal.raise_signal(signal.SIGUSR1)  # this thread gets it, so that it does not wake the main thread

        sender = aside(signals)
        for message in inbox:
            assert message.offset == 0
            waits.clear()
            handed.set()
        sender.result()
    assert checkpoint(hub) == 1
