"""What worker processes report to their supervisor, and what it answers for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

import pxrs
from pxrs.cli import supervised
from pxrs.cli.supervised import LATE_S, Monitor, Slot
from pxrs.cli.worker_process import Listeners, Process
from pxrs.cli.worker_settings import Settings
from pxrs.clock import ManualClock
from pxrs.errors import RegistryUnavailable
from pxrs.metrics import reports
from pxrs.metrics.health import SILENT_S
from pxrs.metrics.instruments import Distribution, Snapshot
from pxrs.metrics.reports import Reporter, Reports, dump, load
from pxrs.testing.handlers import memory_hub
from pxrs.testing.waiting import aside, eventually

COUNTS: Snapshot = {
    "pxrs.consumer.messages": [(("g", "t"), 7)],
    "pxrs.consumer.poll": [(("g",), Distribution((1, 2), 0.5))],
}


@pytest.fixture
def received() -> Iterator[Reports]:
    with closing(Reports()) as received:
        yield received


def test_a_report_is_read_as_it_was_written() -> None:
    assert load(dump({"state": "ready"}, COUNTS)) == ({"state": "ready"}, COUNTS)


def test_the_last_whole_report_of_each_worker_is_kept(received: Reports) -> None:
    ends = {}
    for number in (1, 2):
        ours, ends[number] = os.pipe()
        received.add(number, ours)
    os.write(ends[1], dump({"state": "starting"}, {}) + dump({"state": "ready"}, COUNTS) + b'{"state": {"sta')
    os.write(ends[2], dump({"state": "away"}, {}))
    eventually(lambda: len(received.latest()) == 2)
    latest = received.latest()
    assert (latest[1].state, latest[1].counts, latest[2].state) == ({"state": "ready"}, COUNTS, {"state": "away"})
    os.write(ends[1], b'te": "stopping"}, "counts": {}}\n')
    eventually(lambda: received.latest()[1].state == {"state": "stopping"})
    os.close(ends[1])
    os.write(ends[2], b"what a handler has printed\n")
    eventually(lambda: _is_closed(ends[2]))
    assert received.latest()[2].state == {"state": "away"}, "what cannot be read is ignored"
    ours, ends[1] = os.pipe()
    received.add(1, ours)
    assert 1 not in received.latest(), "another process has taken the place of the first"
    for each in ends.values():
        os.close(each)


def _is_closed(end: int) -> bool:
    try:
        os.write(end, b"\n")
    except BrokenPipeError:
        return True
    return False


def test_a_worker_that_waits_for_a_database_goes_on_reporting(
    received: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "REPORT_S", 0.001)
    ours, end = os.pipe()
    received.add(1, ours)
    answered = threading.Event()
    told = []

    def state() -> dict[str, Any]:
        told.append("ready")
        return {"state": "ready"}

    def wait() -> Snapshot:
        answered.wait(20)
        return COUNTS

    Reporter(end, state, wait).start()
    eventually(lambda: len(told) > 3 and received.latest())
    assert received.latest()[1].counts == {}
    answered.set()
    eventually(lambda: received.latest()[1].counts == COUNTS)
    received.close()  # then the worker's threads end
    eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("pxrs-worker-")])
    os.close(end)


def test_v4_a_worker_that_is_silent_is_not_ready_and_then_not_alive(
    received: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = cast(Any, object())
    slots = [Slot(1, process, restart_at=None), Slot(2, process, restart_at=None)]
    monitor = Monitor(slots, received)
    assert monitor.ready().reason == "waiting for the registry"
    monitor.waiting = None  # the trial process has succeeded
    for slot in slots:
        slot.started_at = time.monotonic()
    assert (monitor.ready().reason, monitor.live().is_ok) == ("worker 1 is starting", True)
    slots[0].started_at -= SILENT_S
    assert not monitor.live().is_ok, "a process that was stopped before its first report"
    slots[0].started_at += SILENT_S
    ends = []
    for number in (1, 2):
        ours, end = os.pipe()
        received.add(number, ours)
        os.write(end, dump({"state": "ready"}, {}))
        ends.append(end)
    eventually(lambda: monitor.ready().is_ok)
    now = time.monotonic()
    monkeypatch.setattr(supervised.time, "monotonic", lambda: now + LATE_S + 1)
    assert (monitor.ready().reason, monitor.live().is_ok) == ("worker 1 is silent", True)
    monkeypatch.setattr(supervised.time, "monotonic", lambda: now + SILENT_S + 1)
    assert not monitor.live().is_ok
    assert monitor.live().reason.startswith("worker 1 has reported nothing for 6")
    monkeypatch.undo()
    slots[0].process, slots[0].restart_at = None, 0.0
    assert monitor.ready().fields == {"workers": {"1": "starting", "2": "ready"}}
    slots[0].restart_at = None
    assert monitor.ready().reason == "worker 1 is stopped"
    for end in ends:
        os.close(end)


# What a worker reports.


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hub(clock: ManualClock) -> Iterator[pxrs.Hub]:
    with memory_hub(clock) as hub:
        hub.create_topic("t", partitions=1)
        hub.create_queue("q")
        yield hub


def unreachable(*arguments: object, **named: object) -> Any:
    raise RegistryUnavailable("no answer")


def test_v4_a_member_whose_checkpoints_cannot_be_written_says_so(
    hub: pxrs.Hub, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk: the lease goes on, and the registry can be read."""
    with hub.producer("t") as out:
        out.send(b"x")
    with hub.consumer("t", "g", lease_ttl=3600, commit_interval=1) as inbox:
        assert inbox.poll(timeout=30)
        assert inbox.problem is None
        with monkeypatch.context() as patch:
            patch.setattr(type(hub.registry), "_commit", unreachable)
            assert inbox.poll(timeout=0) == []  # acknowledges it
            clock.advance(2)
            eventually(lambda: inbox.problem == "no answer")
        eventually(lambda: inbox.problem is None)


def test_v4_a_worker_whose_lease_has_ended_is_not_ready_until_it_is_back(
    hub: pxrs.Hub, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the registry cannot be reached, members lose their partitions and queues give out nothing."""
    listeners = Listeners([hub.queue("q")], lambda transaction, item: None, 1)
    lifeline = os.open(os.devnull, os.O_RDONLY)
    both = [Process(Settings("m:f", [], None, None, None, 1, 1.0, {}), lifeline) for _ in range(2)]

    def states() -> list[str]:
        return [each._state()["state"] for each in both]

    assert states() == ["starting", "starting"]
    both[1]._listeners = listeners
    running = aside(listeners.run)
    with hub.consumer("t", "g") as both[0]._consumer:
        eventually(lambda: states() == ["ready", "ready"])
        with monkeypatch.context() as patch:
            for call in ("_scan", "_get", "_commit", "_lease"):
                patch.setattr(type(hub.registry), call, unreachable)
            clock.advance(60)
            assert states() == ["disconnected", "disconnected"]
        eventually(lambda: states() == ["ready", "ready"])
    listeners.stop()
    running.result()
    os.close(lifeline)
