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
`threads_max` workers are busy, for example in callbacks of the user that block, work waits for one of them to return.
Nothing whose lateness does harm may depend on a scheduler: leases are renewed elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

from pxrs.clock import Clock

_logger = logging.getLogger(__name__)

IDLE_S: Final = 5.0
"""How long a thread without work is kept."""
THREADS_MAX: Final = 32
"""How many pieces of work run at once by default."""


class Next(NamedTuple):
    """When the work is to run again. What comes first counts."""

    at: float | None = None
    """A moment on the scheduler's clock. None: only when it is woken."""
    pause_s: float | None = None
    """A pause in seconds of the machine's time, during which `wake` does not shorten the wait; None: no pause. For work
    that has failed: the failure may be what wakes it."""


class State(Enum):
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


_AFTER: Final[dict[tuple[State, str], State]] = {
    (State.WAITING, "wake"): State.READY,
    (State.WAITING, "due"): State.READY,
    (State.WAITING, "end"): State.ENDED,
    (State.PAUSING, "wake"): State.PAUSING,
    (State.PAUSING, "due"): State.READY,
    (State.PAUSING, "end"): State.ENDED,
    (State.READY, "wake"): State.READY,
    (State.READY, "due"): State.READY,
    (State.READY, "run"): State.RUNNING,
    (State.READY, "end"): State.ENDED,
    (State.RUNNING, "wake"): State.WOKEN,
    (State.RUNNING, "return"): State.WAITING,
    (State.RUNNING, "pause"): State.PAUSING,
    (State.RUNNING, "end"): State.ENDING,
    (State.WOKEN, "wake"): State.WOKEN,
    (State.WOKEN, "return"): State.READY,
    (State.WOKEN, "pause"): State.PAUSING,
    (State.WOKEN, "end"): State.ENDING,
    (State.ENDING, "wake"): State.ENDING,
    (State.ENDING, "end"): State.ENDING,
    (State.ENDING, "return"): State.ENDED,
    (State.ENDING, "pause"): State.ENDED,
    (State.ENDED, "wake"): State.ENDED,
    (State.ENDED, "end"): State.ENDED,
    (State.ENDED, "due"): State.ENDED,
    (State.ENDED, "run"): State.ENDED,
}


class Scheduled:
    """One object's recurring work. `Scheduler.add` makes it."""

    def __init__(self, scheduler: Scheduler, name: str, work: Callable[[], Next]) -> None:
        self.name, self.work = name, work
        self.state = State.WAITING
        """Read and written under the scheduler's lock."""
        self.wait = 0
        """Number of the current wait. A timer that names another number is out of date."""
        self.thread: threading.Thread | None = None
        """The worker that runs the work now."""
        self._scheduler = scheduler

    def wake(self) -> None:
        """Have the work run as soon as possible, unless it pauses."""
        self._scheduler.wake(self)

    def end(self, timeout: float | None = None) -> bool:
        """Do not run the work again. Waits until it does not run any more, at most `timeout` seconds; False if it still
        runs then, or if this is called by the work itself. A second call waits too."""
        return self._scheduler.end(self, timeout)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that runs the work."""
        return self.thread is threading.current_thread()


class Scheduler:
    """Threads share it. It has no `close`: its threads end by themselves when there is nothing to do."""

    def __init__(self, clock: Clock, name: str, threads_max: int = THREADS_MAX) -> None:
        self._clock, self._name, self._threads_max = clock, name, threads_max
        self._lock = threading.Lock()
        """Guards everything below, and the fields of all `Scheduled`. Never held while work runs."""
        self._idle = threading.Condition(self._lock)
        """Notified when there is a `_ready` entry for a worker that waits."""
        self._returned = threading.Condition(self._lock)
        """Notified when work has returned for the last time."""
        self._ready: deque[Scheduled] = deque()
        self._workers = self._workers_idle = 0
        self._order = itertools.count()
        """Makes heap entries with equal moments comparable."""
        self._at: list[tuple[float, int, int, Scheduled]] = []
        """Heap of moments on the clock: moment, order, number of the wait, whose."""
        self._pauses: list[tuple[float, int, int, Scheduled]] = []
        """The same for the ends of pauses, on `time.monotonic`."""
        self._timer_wake = threading.Event()
        self._has_timer = False
        self._pid = os.getpid()

    def add(self, name: str, work: Callable[[], Next]) -> Scheduled:
        """Run the work now, and then whenever it says. name: of the thread while it runs it."""
        added = Scheduled(self, name, work)
        self.wake(added)
        return added

    def wake(self, scheduled: Scheduled) -> None:
        if os.getpid() != self._pid:  # a forked child has none of the threads, and may have inherited a locked lock
            return
        with self._lock:
            self._move(scheduled, "wake")

    def end(self, scheduled: Scheduled, timeout: float | None) -> bool:
        if os.getpid() != self._pid:
            return True
        with self._lock:
            self._move(scheduled, "end")
            if scheduled.is_here:
                return False
            return self._returned.wait_for(lambda: scheduled.state is State.ENDED, timeout)

    def _move(self, scheduled: Scheduled, event: str) -> None:
        before, scheduled.state = scheduled.state, _AFTER[scheduled.state, event]
        if scheduled.state is State.READY and before is not State.READY:
            self._ready.append(scheduled)
            if self._workers_idle:
                self._idle.notify()
            if len(self._ready) > self._workers_idle and self._workers < self._threads_max:
                self._workers += 1
                threading.Thread(target=self._work, name=f"{self._name}-worker", daemon=True).start()
        elif scheduled.state is State.ENDED:
            self._returned.notify_all()

    # The workers.

    def _work(self) -> None:
        thread = threading.current_thread()
        idle_name = thread.name
        while (scheduled := self._take(thread)) is not None:
            thread.name = scheduled.name
            following: Next | None = None
            try:
                following = scheduled.work()
            except BaseException:  # also SystemExit: this worker has other work to do
                _logger.exception("%s has failed and is not run again", scheduled.name)
            finally:
                thread.name = idle_name
                self._put_back(scheduled, following)

    def _take(self, thread: threading.Thread) -> Scheduled | None:
        """The next work for this worker; None if there has been none for `IDLE_S`, and the worker ends."""
        with self._lock:
            while True:
                while self._ready:
                    scheduled = self._ready.popleft()
                    self._move(scheduled, "run")
                    if scheduled.state is State.RUNNING:
                        scheduled.thread = thread
                        return scheduled
                self._workers_idle += 1
                is_notified = self._idle.wait(IDLE_S)
                self._workers_idle -= 1
                if not is_notified and not self._ready:
                    self._workers -= 1
                    return None

    def _put_back(self, scheduled: Scheduled, following: Next | None) -> None:
        with self._lock:
            scheduled.thread = None
            if following is None:
                self._move(scheduled, "end")
                following = Next()
            scheduled.wait += 1
            self._move(scheduled, "return" if following.pause_s is None else "pause")
            if scheduled.state is State.PAUSING and following.pause_s is not None:
                self._set_timer(self._pauses, time.monotonic() + following.pause_s, scheduled)
            elif scheduled.state is State.WAITING and following.at is not None:
                self._set_timer(self._at, following.at, scheduled)

    # The timer.

    def _set_timer(self, heap: list[tuple[float, int, int, Scheduled]], moment: float, scheduled: Scheduled) -> None:
        heapq.heappush(heap, (moment, next(self._order), scheduled.wait, scheduled))
        if heap[0][3] is scheduled:
            self._timer_wake.set()
        if not self._has_timer:
            self._has_timer = True
            threading.Thread(target=self._time, name=f"{self._name}-timer", daemon=True).start()

    def _time(self) -> None:
        """Make ready what is due. Ends when nothing has been due for `IDLE_S` and nothing is waited for."""
        while True:
            self._timer_wake.clear()
            with self._lock:
                self._make_ready(self._at, self._clock.now())
                self._make_ready(self._pauses, time.monotonic())
                until = self._at[0][0] if self._at else None
                pause_s = self._pauses[0][0] - time.monotonic() if self._pauses else None
            if until is None and pause_s is None:
                self._timer_wake.wait(IDLE_S)
                with self._lock:
                    if not self._at and not self._pauses:
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
        return wait == scheduled.wait and scheduled.state in (State.WAITING, State.PAUSING)
