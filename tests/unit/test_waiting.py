"""Waiting without a thread for each waiter: what is subscribed, cancelled, looked at again."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pxrs import registry, waiting
from pxrs.clock import ManualClock
from pxrs.producer.condition import Condition
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.waiting import aside, eventually
from pxrs.waiting import (
    BackgroundThread,
    Callback,
    Cancel,
    SignalEvent,
    Subscribers,
    Subscription,
    wait_for,
    wait_for_signal,
)

BOUND_S = 30.0


class Place:
    """Something that changes."""

    def __init__(self) -> None:
        self.subscribers = Subscribers()
        self.value = 0
        self.looks = 0

    def look(self) -> int:
        self.looks += 1
        return self.value

    def subscribe(self, callback: Callback) -> Subscription:
        return self.subscribers.add((0,), callback)

    def change(self) -> None:
        self.value += 1
        self.subscribers.wake((0,))


def test_a_change_between_the_look_and_the_subscription_is_seen() -> None:
    place = Place()

    def subscribe(callback: Callback) -> Subscription:
        place.change()  # after the first look; the callback is not registered yet
        return place.subscribe(callback)

    assert wait_for(place.look, subscribe, BOUND_S) == 1
    assert place.looks == 2


def test_a_change_during_a_look_is_seen() -> None:
    place = Place()

    def look() -> int:
        found = place.look()
        if place.looks == 2:  # this one is subscribed already, and returns what was there before the change
            place.change()
        return found

    assert aside(lambda: wait_for(look, place.subscribe, None)).result(BOUND_S) == 1


def test_what_is_there_costs_no_subscription() -> None:
    place = Place()
    place.change()

    def refuse(callback: Callback) -> Subscription:
        raise AssertionError("it need not wait")

    assert wait_for(place.look, refuse, None) == 1
    assert wait_for(lambda: 0, refuse, 0.0) == 0


def test_a_wait_that_ends_or_fails_leaves_no_subscription() -> None:
    place = Place()
    cancel = Cancel()
    assert wait_for(place.look, place.subscribe, 0.01, cancel) == 0

    def fail() -> int:
        if place.look() or place.looks > 3:
            raise ValueError("broken")
        return 0

    with pytest.raises(ValueError, match="broken"):
        wait_for(fail, place.subscribe, 0.01, cancel, lambda: 0.001)
    assert len(place.subscribers) == 0
    assert not cancel._callbacks


def test_it_is_looked_again_after_the_time_that_was_asked_for() -> None:
    place = Place()
    assert wait_for(lambda: place.look() >= 0 and place.looks > 2, place.subscribe, BOUND_S, None, lambda: 0.001)


@pytest.mark.parametrize("moment", ["before", "while it subscribes", "after"])
def test_cancel_ends_a_wait_whenever_it_is_set(moment: str) -> None:
    place, cancel = Place(), Cancel()

    def subscribe(callback: Callback) -> Subscription:
        if moment == "while it subscribes":
            cancel.set()
        elif moment == "after":
            threading.Timer(0.01, cancel.set).start()
        return place.subscribe(callback)

    if moment == "before":
        cancel.set()
    assert wait_for(place.look, subscribe, None, cancel) == 0
    assert cancel.is_set


def test_a_callback_that_comes_after_cancel_was_set_is_called_at_once() -> None:
    cancel, called = Cancel(), list[int]()
    cancel.set()
    cancel.subscribe(lambda: called.append(1))
    assert called == [1]


def test_only_those_who_are_concerned_are_called_and_a_failure_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscribers, called = Subscribers(), list[str]()

    def fail() -> None:
        raise ValueError("a callback's own")

    def note(name: str) -> Callable[[], None]:
        return lambda: called.append(name)

    subscribers.add((1,), fail)
    subscribers.add((1, 2), note("both"))
    two = subscribers.add((2,), note("two"))
    subscribers.add((), note("none"))
    subscribers.wake((1, 2))
    assert called == ["both", "two"]
    assert "a callback's own" in caplog.text
    two.close()
    two.close()
    called.clear()
    subscribers.wake_all()
    assert called == ["both", "none"]
    assert len(subscribers) == 3


class Steps:
    """A background thread that counts its steps."""

    def __init__(self) -> None:
        self.count, self.ended = 0, 0
        self.go = threading.Semaphore(0)
        self.thread = BackgroundThread("pxrs-test-steps", self.step, self.go.release, self.end)

    def step(self) -> None:
        self.go.acquire(timeout=BOUND_S)
        self.count += 1
        if self.count == 2:
            raise ValueError("one step fails")

    def end(self) -> None:
        self.ended += 1

    @property
    def is_running(self) -> bool:
        return any(thread.name == "pxrs-test-steps" for thread in threading.enumerate())


def test_a_background_thread_runs_while_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LINGER_S", 0.01)
    monkeypatch.setattr(waiting, "FAILED_PAUSE_S", 0.01)
    steps = Steps()
    assert not steps.is_running
    for expected in (3, 6):
        for _ in range(2):
            steps.thread.need()
        steps.go.release(3)
        eventually(lambda count=expected: steps.count == count)  # type: ignore[misc]
        steps.thread.release()
        assert steps.is_running
        steps.thread.release()
        steps.go.release()  # the step that it is in
        eventually(lambda: not steps.is_running)
        steps.count -= 1
    assert "one step fails" in caplog.text
    assert steps.ended == 0
    steps.thread.close()
    steps.thread.close()
    assert steps.ended == 1
    steps.thread.need()
    assert not steps.is_running, "it is closed"


def test_closing_ends_a_background_thread_and_then_what_it_uses() -> None:
    steps = Steps()
    steps.thread.need()
    eventually(lambda: steps.is_running)
    began = time.monotonic()
    steps.thread.close()
    assert not steps.is_running
    assert steps.ended == 1
    assert time.monotonic() - began < BOUND_S


def test_r2_a_thread_that_could_not_be_started_is_started_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process may have all the threads that it may have, for a moment. No object may then believe for ever that its
    thread runs."""
    start, is_full = threading.Thread.start, False

    def refuse(thread: threading.Thread) -> None:
        if is_full and thread.name.startswith("pxrs-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    steps = Steps()
    is_full = True
    with pytest.raises(RuntimeError):
        steps.thread.need()
    is_full = False
    steps.thread.need()
    assert steps.is_running
    steps.thread.release()
    steps.thread.close()
    assert steps.ended == 1
    for url in (f"file:{tmp_path}/files", f"sqlite:///{tmp_path}/registry.db?poll=0.01"):
        with registry.open(url) as handle:
            handle.commit(put={"a": b"0"})
            descriptors = count_descriptors()
            is_full = True
            for _ in range(5):
                with pytest.raises(RuntimeError):
                    handle.watch("")
            assert count_descriptors() <= descriptors + SQLITE_DESCRIPTORS, "each failure leaves some open"
            is_full = False
            with handle.watch("") as watch:
                handle.commit(put={"a": b"1"})
                assert watch.wait(BOUND_S), url
        gc.collect()
        # Threads that earlier tests have left may open some for a moment.
        eventually(lambda: count_descriptors() <= descriptors, BOUND_S, what=url)  # noqa: B023
    clock = ManualClock()
    with MemoryRegistry(MemoryStore(clock)) as handle, handle.watch("m") as watch:
        is_full = True
        with pytest.raises(RuntimeError):
            handle.lease(1.0, renewed=False)
        is_full = False
        handle.commit(ephemeral={"m": b""}, lease=handle.lease(1.0, renewed=False))
        assert watch.wait(BOUND_S)
        clock.advance(2.0)
        assert watch.wait(BOUND_S), "nobody ends the lease"


SQLITE_DESCRIPTORS = 3
"""What a connection of SQLite has open: the file, the log and its index."""


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def _signal_for_another_thread() -> Iterator[threading.Event]:
    """Sets the event in the handler of SIGUSR1, which the system gives to a thread that is not the main thread."""
    assert threading.current_thread() is threading.main_thread()
    is_handled, is_over = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: is_handled.set())
    receiver = threading.Thread(target=is_over.wait)  # started while the signal is not blocked: so it receives it
    receiver.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    killer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    killer.start()
    try:
        yield is_handled
    finally:
        killer.join()
        is_over.set()
        receiver.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_another_thread_receives_ends_the_wait_of_the_main_thread() -> None:
    begun = time.monotonic()
    with _signal_for_another_thread() as is_handled:
        late = threading.Timer(BOUND_S, is_handled.set)
        late.start()
        wait_for_signal(is_handled)
        late.cancel()
    with _signal_for_another_thread() as is_handled:
        Condition().wait_for(is_handled.is_set, timeout=BOUND_S)
    assert time.monotonic() - begun < BOUND_S


def _with_signal_at_step(number: int, run: Callable[[], object]) -> bool:
    """Run the function in the main thread, with SIGUSR1 just before its step of this number: a line of its code, or of
    what it calls. Returns whether it has so many steps."""
    steps, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        if event == "line":
            steps += 1
            if steps == number:
                sys.settrace(before)
                signal.raise_signal(signal.SIGUSR1)  # its handler runs before the traced line does
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return steps >= number


def _interrupt_a_wait(step: int) -> bool:
    """Whether a wait has a step of this number. The signal that interrupts it there sets its event."""
    event = SignalEvent()
    before = signal.signal(signal.SIGUSR1, lambda *_: event.set())
    try:
        is_reached = _with_signal_at_step(step, lambda: event.wait(0.01))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert event.is_set() == event.wait(0.0) == is_reached
    return is_reached


def test_the_handler_of_a_signal_can_set_its_event_wherever_it_interrupts_the_main_thread() -> None:
    """With `threading.Event` this never ends: the thread holds the lock of the event at one of these steps."""
    steps = 0
    while _interrupt_a_wait(steps + 1):
        steps += 1
    assert steps > 3


def test_an_event_of_signals_is_cleared_and_set_again() -> None:
    event = SignalEvent()
    event.set()
    assert event.wait(BOUND_S)
    event.clear()
    assert not event.is_set()
    assert not event.wait(0.0)
    killer = threading.Timer(0.01, event.set)
    killer.start()
    wait_for_signal(event)
    assert event.is_set()
    killer.join()
