"""Handlers that raise or hang: pauses, retries, dead letters, and partitions that are given up."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from pxrs.errors import (
    HandlerFailed,
    OutcomeUnknown,
    RegistryUnavailable,
)
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.testing.waiting import aside, eventually
from tests.unit.consumer.reading import (
    BOUND_S,
    SOON_S,
    admin,
    checkpoint,
    create,
    in_time,
    members,
    offsets,
    on_commit,
    owner,
    paused,
    poison,
    polled,
    send,
    settle,
    steal,
    wake,
)


def test_x14_pause_holds_only_the_partition_of_the_message_and_shows_why(hub: Hub) -> None:
    create(hub, partitions=2, count=3)
    handle, seen = poison((0, 1))
    with hub.consumer("t", "g", name="worker", commit_interval=SOON_S) as inbox:
        running = aside(lambda: inbox.run(handle))
        found = eventually(lambda: paused(hub, 0))
        assert (found.offset, found.error, found.by, found.skip) == (1, "ValueError: poison 1", "worker", False)
        eventually(lambda: (checkpoint(hub, 0), checkpoint(hub, 1)) == (1, 3))
        send(hub, {1: 2})
        eventually(lambda: checkpoint(hub, 1) == 5)
        inbox.resume(0)  # is not for the user to decide by accident
        assert not running.done()
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: first.run(handle, threads=2))
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
    is_lost = threading.Event()

    def handle(message: Message) -> None:
        tried.append(message.epoch)
        if message.epoch == 1:
            assert is_lost.wait(BOUND_S)
        raise ValueError("not yet")

    options: dict[str, Any] = {"on_error": "retry", "retries_max": 5, "retry_pause": 0.05}
    with hub.consumer("t", "g", commit_interval=SOON_S, **options) as inbox:
        running = aside(lambda: inbox.run(handle))
        eventually(lambda: tried)
        lease = inbox._member.lease
        assert lease is not None
        lease.expire()  # as when the process has slept
        is_lost.set()
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: inbox.run(handle))
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
        running = aside(lambda: slow.run(handle))
        assert entered.wait(BOUND_S)
        with hub.consumer("t", "g", commit_interval=SOON_S) as other:
            settle(other, partitions=2)
            handling = aside(lambda: other.run(lambda message: None))
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
        running = aside(lambda: slow.run(handle))
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
