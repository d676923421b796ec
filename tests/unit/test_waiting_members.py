"""Consumers that wait cost a process no thread and no descriptor each (W6), except the caller's own thread and what a
lease costs: on a registry in files, the descriptor of the lease's locked file. `benchmarks/waiting.py` measures the
same with 1,000."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import scheduler, waiting
from pxrs.consumer.consumer import Consumer
from pxrs.events import buffer
from pxrs.group import projection
from pxrs.hub import Hub
from pxrs.scheduler import ScheduledState
from pxrs.testing.waiting import eventually

FEW, MANY = 5, 50
OPTIONS: Any = {"start": "latest", "commit_interval": 3_600.0, "lease_ttl": 3_600.0}
"""Nothing is due for a long time."""


@pytest.fixture(params=["memory", "file"])
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(scheduler, "IDLE_S", 0.05)
    monkeypatch.setattr(waiting, "LINGER_S", 0.05)
    monkeypatch.setattr(projection, "INTERVAL_S", 0.05)
    monkeypatch.setattr(buffer, "IDLE_S", 0.05)
    with pxrs.open("memory:" if request.param == "memory" else tmp_path / "data") as hub:
        hub.create_topic("t", partitions=1)
        yield hub


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub whose members share two threads."""
    monkeypatch.setattr(scheduler.Scheduler.__init__, "__defaults__", (2,))
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=1)
        yield hub


def test_callbacks_that_block_do_not_delay_the_consumers_of_the_same_process(narrow: Hub) -> None:
    entered, proceed = threading.Semaphore(0), threading.Event()

    def block(partitions: object) -> None:
        entered.release()
        assert proceed.wait(60.0)

    with ExitStack() as stack:
        for number in range(4):
            stack.enter_context(narrow.consumer("t", f"blocks{number}", on_assigned=block, **OPTIONS))
        for _ in range(4):
            assert entered.acquire(timeout=30.0)
        free = stack.enter_context(narrow.consumer("t", "free", **OPTIONS))
        eventually(lambda: is_at_rest(free))
        proceed.set()


def test_a_thread_of_the_user_that_holds_a_members_mutex_does_not_delay_other_members(narrow: Hub) -> None:
    """As a callback does that runs in `commit`, on the thread that commits."""
    with ExitStack() as stack:
        held = [stack.enter_context(narrow.consumer("t", f"held{number}", **OPTIONS)) for number in range(4)]
        eventually(lambda: all(map(is_at_rest, held)))
        with ExitStack() as mutexes:
            for each in held:
                mutexes.enter_context(each._member.session.mutex)
                each._member.wake()
            free = stack.enter_context(narrow.consumer("t", "free", **OPTIONS))
            eventually(lambda: is_at_rest(free))


def descriptors() -> int:
    """Without those of leases."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "/leases/" not in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def is_at_rest(inbox: Consumer) -> bool:
    work = inbox._member.session.scheduled
    return inbox.assignment == [0] and work is not None and work.state is ScheduledState.WAITING


def is_worker(thread: threading.Thread) -> bool:
    """Workers are named after their work while they run it. The threads that store events end soon, too, and so does
    the timer of what writes the readable files of a group, which waits a moment before it writes."""
    return "worker" in thread.name or thread.name.startswith(
        ("pxrs-member", "pxrs-projection", "pxrs-housekeeping", "pxrs_events", "pxrs_audit")
    )


def wait(inbox: Consumer) -> int:
    """How many messages came."""
    found = inbox.poll(timeout=60.0)
    inbox.commit()
    return len(found)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks the kernel which files are open")
def test_w6_fifty_waiting_consumers_have_no_more_threads_and_descriptors_than_five(hub: Hub) -> None:
    before = set(threading.enumerate())
    inboxes: list[Consumer] = []
    costs = []
    with ExitStack() as stack:
        for count in (FEW, MANY):
            while len(inboxes) < count:
                inboxes.append(stack.enter_context(hub.consumer("t", f"g{len(inboxes)}", **OPTIONS)))
            eventually(lambda: all(map(is_at_rest, inboxes)))
            with ThreadPoolExecutor(count) as pool:
                polls = [pool.submit(wait, each) for each in inboxes]
                callers = pool._threads

                def ours(callers: set[threading.Thread] = callers) -> set[threading.Thread]:
                    return set(threading.enumerate()) - before - callers

                # Idle workers have ended; what remains waits for all consumers together.
                eventually(lambda ours=ours: not any(is_worker(thread) for thread in ours()))  # type: ignore[misc]
                costs.append((sorted(thread.name for thread in ours()), descriptors()))
                with hub.producer("t") as out:
                    out.send(b"x", partition=0)
                assert [each.result(60.0) for each in polls] == [1] * count
    few, many = costs
    assert many[0] == few[0]
    assert many[1] <= few[1], "fewer: what earlier tests have left may be closed meanwhile"
