"""Recurring work on few threads: when it runs, that it never runs twice at once, and that the threads are bounded."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable

import pytest

from pxrs import scheduler as scheduler_module
from pxrs.clock import SYSTEM, ManualClock
from pxrs.scheduler import Next, Scheduler, State
from pxrs.testing.waiting import eventually

LONG_S = 30


def threads_named(prefix: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(prefix)]


def test_work_runs_at_once_when_woken_and_at_its_moment() -> None:
    clock = ManualClock()
    runs: list[float] = []

    def work() -> Next:
        runs.append(clock.now())
        return Next(at=clock.now() + 10)

    added = Scheduler(clock, "s").add("work", work)
    eventually(lambda: len(runs) == 1)
    eventually(lambda: added.state is State.WAITING)
    clock.advance(10)
    eventually(lambda: len(runs) == 2)
    eventually(lambda: added.state is State.WAITING)
    added.wake()
    eventually(lambda: len(runs) == 3)
    assert added.end(LONG_S)
    clock.advance(100)
    added.wake()
    assert len(runs) == 3


def test_a_wake_while_the_work_runs_makes_it_run_once_more() -> None:
    entered, proceed = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> Next:
        entered.release()
        assert proceed.acquire(timeout=LONG_S)
        return Next()

    added = Scheduler(SYSTEM, "s").add("work", work)
    assert entered.acquire(timeout=LONG_S)
    added.wake()
    added.wake()
    proceed.release()
    assert entered.acquire(timeout=LONG_S), "the two wakes are one more run"
    proceed.release()
    eventually(lambda: added.state is State.WAITING)
    assert not entered.acquire(blocking=False)
    assert added.end(LONG_S)


def test_a_wake_does_not_shorten_a_pause() -> None:
    clock = ManualClock()
    began: list[float] = []

    def work() -> Next:
        began.append(time.monotonic())
        return Next(pause_s=0.2)

    added = Scheduler(clock, "s").add("work", work)

    def wake() -> bool:
        added.wake()
        return len(began) >= 3

    eventually(wake)
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(began))
    assert added.end(LONG_S)


def test_end_waits_for_the_work_that_runs_and_says_if_it_still_does() -> None:
    entered, proceed = threading.Event(), threading.Event()
    is_over: list[bool] = []

    def work() -> Next:
        entered.set()
        assert proceed.wait(LONG_S)
        is_over.append(True)
        return Next()

    added = Scheduler(SYSTEM, "s").add("work", work)
    assert entered.wait(LONG_S)
    assert not added.end(0)
    threading.Timer(0.05, proceed.set).start()
    assert added.end(LONG_S)
    assert is_over == [True]


def test_work_can_end_itself() -> None:
    found: list[bool] = []

    is_added = threading.Event()

    def work() -> Next:
        assert is_added.wait(LONG_S)
        found.extend([added.is_here, added.end(LONG_S)])
        return Next()

    added = Scheduler(SYSTEM, "s").add("work", work)
    is_added.set()
    eventually(lambda: added.state is State.ENDED)
    assert found == [True, False]
    assert not added.is_here


def test_many_wait_on_one_thread_and_none_remains_when_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.05)
    clock = ManualClock()
    scheduler = Scheduler(clock, "many", threads_max=4)
    runs = [0] * 1000

    def work_of(number: int) -> Callable[[], Next]:
        def work() -> Next:
            runs[number] += 1
            return Next(at=clock.now() + 10)

        return work

    added = [scheduler.add("work", work_of(number)) for number in range(1000)]
    eventually(lambda: min(runs) == 1)
    eventually(lambda: len(threads_named("many")) == 1)
    clock.advance(10)
    eventually(lambda: min(runs) == 2)
    assert len(threads_named("many")) <= 5
    assert max(runs) == 2
    for each in added:
        assert each.end(LONG_S)
    clock.advance(10)
    eventually(lambda: not threads_named("many"))


@pytest.mark.parametrize("failure", [ValueError("broken"), SystemExit("broken")])
def test_work_that_raises_is_logged_and_not_run_again(caplog: pytest.LogCaptureFixture, failure: BaseException) -> None:
    def work() -> Next:
        raise failure

    with caplog.at_level(logging.ERROR, "pxrs.scheduler"):
        added = Scheduler(SYSTEM, "s").add("the work", work)
        eventually(lambda: added.state is State.ENDED)
    assert "the work has failed" in caplog.text
    assert "broken" in caplog.text
    added.wake()
    assert added.state is State.ENDED


def test_random_wakes_never_run_work_twice_at_once_and_none_is_missed() -> None:
    chance = random.Random(7)
    scheduler = Scheduler(SYSTEM, "s", threads_max=3)
    asked, seen, running = [0] * 20, [0] * 20, [0] * 20
    overlaps: list[int] = []

    def work_of(number: int) -> Callable[[], Next]:
        def work() -> Next:
            running[number] += 1
            if running[number] != 1:
                overlaps.append(number)
            seen[number] = asked[number]
            time.sleep(0)
            running[number] -= 1
            return Next(at=SYSTEM.now() + 0.001 if number % 2 else None)

        return work

    added = [scheduler.add("work", work_of(number)) for number in range(20)]
    for _ in range(5000):
        number = chance.randrange(20)
        asked[number] += 1
        added[number].wake()
    eventually(lambda: seen == asked)
    assert all(each.end(LONG_S) for each in added)
    assert overlaps == []
