"""Recurring work of many objects on few threads.

A group member, for example, has work to do when something in its group changes and at certain moments, and none in
between. With a thread for each member, a process with 1,000 waiting consumers would have 1,000 threads that wait. Here
they share one timer thread and a bounded number of workers, which are started when there is work and end when there
has been none for `IDLE_S`.

Promises:
- The work of one `Scheduled` never runs on two threads at once.
- A `wake` that comes while the work runs makes the work run once more.
- `end` returns when the work does not run and will not run again, or when its time limit is over.

Failure: work that raises is logged and is not run again; a caller that can do better catches its own errors. If
`threads_max` workers are busy, work waits for one of them to return. So work that may wait without a time limit, such
as in a callback of the user, does that in `Scheduled.blocking`, which lets another worker be started. If the system
refuses a new thread, the workers that there are do the work; if there are none, the start is tried again every
`START_RETRY_S`. Nothing whose lateness does harm may depend on a scheduler: leases are renewed elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Final, NamedTuple

from pxrs.clock import Clock

_logger = logging.getLogger(__name__)

IDLE_S: Final = 5.0
"""How long a thread without work is kept."""
THREADS_MAX: Final = 32
"""How many pieces of work run at once by default."""
TIMERS_MIN: Final = 64
"""A heap of timers with at most as many entries is not searched for entries that are out of date."""
START_RETRY_S: Final = 1.0
"""How often the start of a thread that the system has refused is tried again."""


class Next(NamedTuple):
    """When the work is to run again, unless it is woken before. If there is a pause, `at` does not count."""

    at: float | None = None
    """A moment on the scheduler's clock. None: only when it is woken."""
    pause_s: float | None = None
    """A pause in seconds of the machine's time, during which `wake` does not shorten the wait; None: no pause. For work
    that has failed: the failure may be what wakes it."""


Work = Callable[[], Next | None]
"""Does what there is to do. Returns when to run it again; None: never again."""


class ScheduledState(Enum):
    """What a `Scheduled` is doing. `_AFTER` has all transitions."""

    WAITING = auto()
    """For its moment, or to be woken."""
    PAUSING = auto()
    """As WAITING, but `wake` has no effect before the pause is over."""
    READY = auto()
    """In the queue for a worker."""
    RUNNING = auto()
    WOKEN = auto()
    """It runs, and was woken meanwhile: it runs once more."""
    ENDING = auto()
    """It runs for the last time."""
    ENDED = auto()


_AFTER: Final[dict[tuple[ScheduledState, str], ScheduledState]] = {
    (ScheduledState.WAITING, "wake"): ScheduledState.READY,
    (ScheduledState.WAITING, "due"): ScheduledState.READY,
    (ScheduledState.WAITING, "end"): ScheduledState.ENDED,
    (ScheduledState.PAUSING, "wake"): ScheduledState.PAUSING,
    (ScheduledState.PAUSING, "due"): ScheduledState.READY,
    (ScheduledState.PAUSING, "end"): ScheduledState.ENDED,
    (ScheduledState.READY, "wake"): ScheduledState.READY,
    (ScheduledState.READY, "due"): ScheduledState.READY,
    (ScheduledState.READY, "run"): ScheduledState.RUNNING,
    (ScheduledState.READY, "end"): ScheduledState.ENDED,
    (ScheduledState.RUNNING, "wake"): ScheduledState.WOKEN,
    (ScheduledState.RUNNING, "return"): ScheduledState.WAITING,
    (ScheduledState.RUNNING, "pause"): ScheduledState.PAUSING,
    (ScheduledState.RUNNING, "end"): ScheduledState.ENDING,
    (ScheduledState.WOKEN, "wake"): ScheduledState.WOKEN,
    (ScheduledState.WOKEN, "return"): ScheduledState.READY,
    (ScheduledState.WOKEN, "pause"): ScheduledState.PAUSING,
    (ScheduledState.WOKEN, "end"): ScheduledState.ENDING,
    (ScheduledState.ENDING, "wake"): ScheduledState.ENDING,
    (ScheduledState.ENDING, "end"): ScheduledState.ENDING,
    (ScheduledState.ENDING, "return"): ScheduledState.ENDED,
    (ScheduledState.ENDING, "pause"): ScheduledState.ENDED,
    (ScheduledState.ENDED, "wake"): ScheduledState.ENDED,
    (ScheduledState.ENDED, "end"): ScheduledState.ENDED,
    (ScheduledState.ENDED, "due"): ScheduledState.ENDED,
    (ScheduledState.ENDED, "run"): ScheduledState.ENDED,
}


class Scheduled:
    """One object's recurring work. `Scheduler.add` makes it."""

    def __init__(self, scheduler: Scheduler, name: str, work: Work) -> None:
        self.name, self.work = name, work
        self.state = ScheduledState.WAITING
        """Read and written under the scheduler's lock."""
        self.wait = 0
        """Number of the current wait. A timer that names another number is out of date."""
        self.thread: threading.Thread | None = None
        """The worker that runs the work now."""
        self.is_blocking = False
        """Whether the work is in `blocking`: its worker does not count among the `threads_max`."""
        self._scheduler = scheduler

    def wake(self) -> None:
        """Run the work as soon as possible, unless it pauses."""
        self._scheduler.wake(self)

    def end(self, timeout: float | None = None) -> bool:
        """Do not run the work again. Waits until it does not run any more, at most `timeout` seconds; False if it still
        runs then, or if this is called by the work itself. A second call waits too."""
        return self._scheduler.end(self, timeout)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that runs the work."""
        return self.thread is threading.current_thread()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Let another worker be started while the work waits for something that has no time limit, such as code of the
        user. The number of threads is then bounded by the number of `Scheduled`. Without effect on other threads than
        the one that runs the work, and inside another such block."""
        if not self.is_here or self.is_blocking:
            yield
            return
        self._scheduler.set_blocking(self, True)
        try:
            yield
        finally:
            self._scheduler.set_blocking(self, False)


class Scheduler:
    """Threads share it. It has no `close`: its threads end by themselves when there is nothing to do."""

    def __init__(self, clock: Clock, name: str, threads_max: int = THREADS_MAX) -> None:
        self._clock, self._name, self._threads_max = clock, name, threads_max
        self._lock = threading.Lock()
        """Guards everything below, and the fields of all `Scheduled`. Never held while work runs."""
        self._idle: list[threading.Condition] = []
        """One for each worker that waits for work. The last one is notified first: so the others reach `IDLE_S`, and a
        scheduler with little to do keeps few workers."""
        self._returned = threading.Condition(self._lock)
        """Notified when work has returned for the last time."""
        self._ready: OrderedDict[Scheduled, None] = OrderedDict()
        """Waits for a worker, in this order."""
        self._workers = 0
        """How many workers there are, without those in `Scheduled.blocking`."""
        self._coming = 0
        """How many workers were started or notified, and have not looked at `_ready` since."""
        self._order = itertools.count()
        """Makes heap entries with equal moments comparable."""
        self._at: list[tuple[float, int, int, Scheduled]] = []
        """Heap of moments on the clock: moment, order, number of the wait, whose."""
        self._pauses: list[tuple[float, int, int, Scheduled]] = []
        """The same for the ends of pauses, on `time.monotonic`."""
        self._timers_max = TIMERS_MIN
        """How many entries a heap may have before those that are out of date are removed: about twice as many as there
        are `Scheduled` that wait for a moment."""
        self._timer_wake = threading.Event()
        self._has_timer = False
        self._refusal: RuntimeError | None = None
        """Why the last thread could not be started, until that is logged or raised, which happens without the lock."""
        self._pid = os.getpid()

    def add(self, name: str, work: Work) -> Scheduled:
        """Run the work now, and then whenever it says. name: of the thread while it runs it.

        Raises RuntimeError if the system refuses a thread and there is none that could run the work."""
        added = Scheduled(self, name, work)
        with self._lock:
            self._move(added, "wake")
            if self._workers <= 0 and self._refusal is not None:
                refusal, self._refusal = self._refusal, None
                self._move(added, "end")
                raise refusal
        return added

    def wake(self, scheduled: Scheduled) -> None:
        if os.getpid() != self._pid:  # a forked child has none of the threads, and may have inherited a locked lock
            return
        with self._locked():
            self._move(scheduled, "wake")

    def end(self, scheduled: Scheduled, timeout: float | None) -> bool:
        if os.getpid() != self._pid:
            return True
        with self._lock:
            self._move(scheduled, "end")
            if scheduled.is_here:
                return False
            return self._returned.wait_for(lambda: scheduled.state is ScheduledState.ENDED, timeout)

    def set_blocking(self, scheduled: Scheduled, is_blocking: bool) -> None:
        """For `Scheduled.blocking`."""
        with self._locked():
            scheduled.is_blocking = is_blocking
            self._workers += -1 if is_blocking else 1
            if is_blocking:
                self._call_worker()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; after it, log that a thread could not be started: a log handler may call this scheduler."""
        with self._lock:
            yield
            refusal, self._refusal = self._refusal, None
        if refusal is not None:
            _logger.warning("a thread of %s could not be started: %s", self._name, refusal)

    def _move(self, scheduled: Scheduled, event: str) -> None:
        scheduled.state = _AFTER[scheduled.state, event]
        if scheduled.state is ScheduledState.READY:
            # Also if it was READY before: an interrupt of the main thread (KeyboardInterrupt) may have come in between.
            self._ready[scheduled] = None
            if event != "return":  # then the worker that returns is the next one to look at `_ready`
                self._call_worker()
        elif scheduled.state is ScheduledState.ENDED:
            scheduled.work = Next  # a timer may refer to it for long, and must not keep what the work refers to
            self._ready.pop(scheduled, None)
            self._returned.notify_all()

    def _call_worker(self, *, is_retry: bool = False) -> None:
        """Notify or start one more worker if there is work for it and the limit allows it.

        If the system refuses a thread, and there is no worker, the timer tries again (`is_retry`) every
        `START_RETRY_S`. The counters are raised last: an interrupt of the main thread in between makes them too small,
        which costs a thread, and not too large, which would leave work waiting."""
        if len(self._ready) <= self._coming:
            return
        if self._idle:
            self._idle.pop().notify()
            self._coming += 1
        elif self._workers < self._threads_max:
            if self._start(self._work, "worker"):
                self._workers += 1
                self._coming += 1
            elif self._workers <= 0 and not is_retry:
                self._timer_wake.set()
                self._ensure_timer()

    def _start(self, target: Callable[[], None], what: str) -> bool:
        try:
            threading.Thread(target=target, name=f"{self._name}-{what}", daemon=True).start()
        except RuntimeError as error:  # the limit of threads is reached, or the interpreter is exiting
            self._refusal = error
            return False
        return True

    # The workers.

    def _work(self) -> None:
        thread = threading.current_thread()
        idle_name = thread.name
        with self._lock:
            self._coming -= 1
        while self._run_next(thread):
            thread.name = idle_name

    def _run_next(self, thread: threading.Thread) -> bool:
        """False if there has been no work for `IDLE_S`, or there are too many workers: this one ends.

        A function of its own, so that a worker without work refers to nothing that it has worked on."""
        scheduled = self._take(thread)
        if scheduled is None:
            return False
        thread.name = scheduled.name
        following: Next | None = None
        try:
            following = scheduled.work()
        except BaseException:  # also SystemExit: this worker has other work to do
            _logger.exception("%s has failed and will not run again", scheduled.name)
        finally:
            self._put_back(scheduled, following)
        return True

    def _take(self, thread: threading.Thread) -> Scheduled | None:
        called = threading.Condition(self._lock)
        with self._locked():
            while True:
                if self._workers > self._threads_max:  # another worker was started while one was in `blocking`
                    self._workers -= 1
                    self._call_worker()
                    return None
                while self._ready:
                    scheduled, _ = self._ready.popitem(last=False)
                    self._move(scheduled, "run")
                    if scheduled.state is ScheduledState.RUNNING:
                        scheduled.thread = thread
                        return scheduled
                self._idle.append(called)
                called.wait(IDLE_S)
                if called not in self._idle:  # `_call_worker` has removed it
                    self._coming -= 1
                    continue
                self._idle.remove(called)
                if not self._ready and self._ensure_timer():
                    self._workers -= 1
                    return None

    def _put_back(self, scheduled: Scheduled, following: Next | None) -> None:
        with self._locked():
            scheduled.thread = None
            if following is None:
                self._move(scheduled, "end")
                following = Next()
            scheduled.wait += 1
            self._move(scheduled, "return" if following.pause_s is None else "pause")
            if scheduled.state is ScheduledState.PAUSING and following.pause_s is not None:
                self._set_timer(self._pauses, time.monotonic() + following.pause_s, scheduled)
            elif scheduled.state is ScheduledState.WAITING and following.at is not None:
                self._set_timer(self._at, following.at, scheduled)

    # The timer.

    def _set_timer(self, heap: list[tuple[float, int, int, Scheduled]], moment: float, scheduled: Scheduled) -> None:
        heapq.heappush(heap, (moment, next(self._order), scheduled.wait, scheduled))
        if len(heap) > self._timers_max:  # work that is woken before its moment leaves an entry each time
            heap[:] = [entry for entry in heap if self._counts(entry)]
            heapq.heapify(heap)
            self._timers_max = 2 * (len(self._at) + len(self._pauses)) + TIMERS_MIN
        if heap[0][3] is scheduled:
            self._timer_wake.set()
        self._ensure_timer()

    def _ensure_timer(self) -> bool:
        """Start the timer if there is something to wait for. False if it is needed and could not be started: then the
        worker that calls this does not end, and tries again."""
        if not self._has_timer and self._needs_timer():
            self._has_timer = self._start(self._time, "timer")
            return self._has_timer
        return True

    def _needs_timer(self) -> bool:
        return bool(self._at or self._pauses or (self._ready and self._workers <= 0))

    def _time(self) -> None:
        """Make ready what is due. Ends when nothing has been due for `IDLE_S` and nothing is waited for."""
        while True:
            self._timer_wake.clear()
            with self._locked():
                self._make_ready(self._at, self._clock.now())
                self._make_ready(self._pauses, time.monotonic())
                if self._workers <= 0:
                    self._call_worker(is_retry=True)
                until = self._at[0][0] if self._at else None
                pause_s = self._pauses[0][0] - time.monotonic() if self._pauses else None
                if self._ready and self._workers <= 0:  # no worker could be started
                    pause_s = START_RETRY_S if pause_s is None else min(pause_s, START_RETRY_S)
            if until is None and pause_s is None:
                self._timer_wake.wait(IDLE_S)
                with self._lock:
                    if not self._needs_timer():
                        self._has_timer = False
                        return
            else:
                self._clock.wait(self._timer_wake, until, None if pause_s is None else max(0.0, pause_s))

    def _make_ready(self, heap: list[tuple[float, int, int, Scheduled]], now: float) -> None:
        while heap and (heap[0][0] <= now or not self._counts(heap[0])):
            entry = heapq.heappop(heap)
            if self._counts(entry):
                self._move(entry[3], "due")

    @staticmethod
    def _counts(entry: tuple[float, int, int, Scheduled]) -> bool:
        """Whether the wait that this timer was set for is not over yet."""
        _, _, wait, scheduled = entry
        return wait == scheduled.wait and scheduled.state in (ScheduledState.WAITING, ScheduledState.PAUSING)
