"""`run`: handlers on threads, in order within a partition, and how a run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pxrs.errors import (
    HandlerFailed,
    InvalidGroup,
)
from pxrs.group.lane import Lane
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.testing.waiting import aside, eventually
from pxrs.waiting import Cancel
from tests.unit.consumer.reading import BOUND_S, SOON_S, checkpoint, create, in_time, paused, send, settle, steal, wake


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
        running = aside(lambda: inbox.run(handle))
        assert entered.wait(BOUND_S)
        inbox.stop()
        assert not running.done()
        go.set()
        running.result()
    assert checkpoint(hub) == 4


def test_stop_ends_a_run_that_waits_for_messages(hub: Hub) -> None:
    create(hub, count=1)
    seen = threading.Event()
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        running = aside(lambda: inbox.run(lambda message: seen.set()))
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
        with pytest.raises(HandlerFailed, match="instead of doing its work"):
            in_time(lambda: inbox.run(lambda message: asynchronous(message)))
    assert hub.group("g").describe().lag == 1


def test_closing_ends_a_run(hub: Hub) -> None:
    create(hub)
    inbox = hub.consumer("t", "g")
    running = aside(lambda: inbox.run(lambda message: None))
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
        running = aside(lambda: inbox.run(handle, threads=2))
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
        running = aside(lambda: inbox.run(handle, threads=2))
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
