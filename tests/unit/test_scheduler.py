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
from pxrs.scheduler import Next, Scheduled, Scheduler, State
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


def test_work_that_blocks_in_code_of_the_user_does_not_delay_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.05)
    scheduler = Scheduler(SYSTEM, "blocked", threads_max=2)
    entered, proceed = threading.Semaphore(0), threading.Event()
    added: list[Scheduled] = []
    is_added = threading.Event()

    def work_of(number: int) -> Callable[[], Next]:
        def work() -> Next:
            assert is_added.wait(LONG_S)
            with added[number].blocking(), added[number].blocking():
                entered.release()
                assert proceed.wait(LONG_S)
            return Next()

        return work

    added += [scheduler.add("work", work_of(number)) for number in range(10)]
    is_added.set()
    for _ in range(10):
        assert entered.acquire(timeout=LONG_S), "more than threads_max run, as each of them blocks"
    ran = threading.Event()
    last = scheduler.add("last", lambda: ran.set() or Next())  # type: ignore[func-returns-value]
    assert ran.wait(LONG_S)
    proceed.set()
    eventually(lambda: all(each.state is State.WAITING for each in added))
    for each in [*added, last]:
        each.wake()
    eventually(lambda: all(each.state is State.WAITING for each in added))
    eventually(lambda: not threads_named("blocked"))
    assert scheduler._workers == 0, "as many are counted as there are"


def test_blocking_on_another_thread_has_no_effect() -> None:
    scheduler = Scheduler(SYSTEM, "s")
    added = scheduler.add("work", Next)
    eventually(lambda: added.state is State.WAITING)
    with added.blocking():
        assert not added.is_blocking
    assert added.end(LONG_S)


class Refusing:
    """Lets the start of threads with a name be refused, as the system does at its limit of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: tuple[str, ...] = ()
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            if self.refuses and thread.name.startswith(self.refuses):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)


def test_work_whose_worker_cannot_be_started_is_refused_when_added_and_runs_later_when_woken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.05)
    monkeypatch.setattr(scheduler_module, "START_RETRY_S", 0.01)
    refusing = Refusing(monkeypatch)
    scheduler = Scheduler(SYSTEM, "few")
    refusing.refuses = ("few-worker",)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        scheduler.add("work", Next)
    refusing.refuses = ()
    runs: list[float] = []

    def work() -> Next:
        runs.append(time.monotonic())
        return Next(at=SYSTEM.now() + 3_600)

    added = scheduler.add("work", work)
    eventually(lambda: len(runs) == 1 and len(threads_named("few")) == 1)  # the timer
    refusing.refuses = ("few-worker",)
    with caplog.at_level(logging.WARNING, "pxrs.scheduler"):
        added.wake()
        eventually(lambda: "a thread of few could not be started: can't start new thread" in caplog.text)
    assert added.state is State.READY
    refusing.refuses = ()
    eventually(lambda: len(runs) == 2)
    assert added.end(LONG_S)


def test_a_timer_that_cannot_be_started_is_started_later_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.05)
    refusing = Refusing(monkeypatch)
    refusing.refuses = ("few-timer",)
    runs: list[float] = []

    def work() -> Next:
        runs.append(time.monotonic())
        return Next(pause_s=0.01)

    added = Scheduler(SYSTEM, "few").add("work", work)
    eventually(lambda: added.state is State.PAUSING)
    refusing.refuses = ()
    eventually(lambda: len(runs) > 2)
    assert added.end(LONG_S)


def test_work_that_returns_none_is_not_run_again() -> None:
    added = Scheduler(SYSTEM, "s").add("work", lambda: None)
    eventually(lambda: added.state is State.ENDED)


def test_an_interrupt_while_work_is_made_ready_does_not_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(SYSTEM, "s")
    runs: list[int] = []
    added = scheduler.add("work", lambda: runs.append(1) or Next())  # type: ignore[func-returns-value]
    eventually(lambda: added.state is State.WAITING)
    with scheduler._lock:
        added.state = State.READY  # the interrupt came here: it is in no queue
    added.wake()
    eventually(lambda: len(runs) == 2)
    assert added.end(LONG_S)
