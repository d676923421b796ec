"""Consumers that are used wrongly: after a fork, after `close`, with bad options."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pxrs.errors import (
    Closed,
    InvalidGroup,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.hub import Hub
from pxrs.scheduler import Scheduled
from pxrs.testing.faults import child, wait_exit
from pxrs.testing.waiting import aside
from tests.unit.consumer.reading import BOUND_S, checkpoint, create, in_time, members, on_commit, polled, settle


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
    end, interrupts = Scheduled.end, [KeyboardInterrupt]

    def interrupted(scheduled: Scheduled, timeout: float | None = None) -> bool:
        if interrupts and scheduled is inbox._member.session.scheduled and not scheduled.is_here:
            raise interrupts.pop()
        return end(scheduled, timeout)

    monkeypatch.setattr(Scheduled, "end", interrupted)
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
    first = aside(inbox.close)
    assert inside.wait(BOUND_S)
    closing = aside(hub.close)
    with pytest.raises(TimeoutError):
        closing.result(0.1)
    go.set()
    first.result()
    closing.result()


def test_closing_the_hub_closes_its_consumers_and_ends_who_waits(hub: Hub) -> None:
    create(hub)
    inbox = hub.consumer("t", "g")
    settle(inbox, partitions=1)
    waiting = aside(lambda: next(iter(inbox)))
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
