"""The thread of a process that does for its queues what no caller waits for: unfinished jobs, sweeping, delays.

The problem: an item in flight belongs to its taker for as long as the taker lives. If a rollback could not reach the
store, or the reply to a take was lost, the item would stay in flight although nobody works on it. So what a transaction
could not finish is a job here: it is tried again until it is done, or until the taker's lease has ended.

The items of dead takers, and the delayed ones, are the sweeper's (`sweeping`). For each queue that this process takes
from, this thread tries to become the sweeper, and sweeps if it is.

The thread is woken by watches, by the time of the next delayed item, and once a minute, because clocks can be set. A
delay is counted on the clocks of those who put and sweep: only the length of delays depends on them. These waits go by
the registry's clock; the pauses after a failure go by the machine's.
"""

from __future__ import annotations

import logging
import queue as queue_
import threading
import time
from collections.abc import Callable
from typing import Final

from pxrs.dropped import apart
from pxrs.errors import Closed, Conflict, LeaseExpired, OutcomeUnknown, PxrsError, RegistryUnavailable
from pxrs.limited_log import Outage
from pxrs.queue.catalog import QueueCatalog
from pxrs.queue.outcomes import OutcomeSweep
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import TAKERS, Queue
from pxrs.queue.sweeping import Sweeping, claim_sweeper, left_where_it_is, read_takers
from pxrs.queue.taker import Taker
from pxrs.registry.contract import Registry
from pxrs.registry.steps import drive
from pxrs.registry.watch import Watch
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

LOOK_S_MAX: Final = 60.0
RETRY_S: Final = 0.2
RETRY_S_MAX: Final = 10.0
"""The longest pause before a job is tried again that failed although the store could be reached."""
CLOSE_S_MAX: Final = 5.0
Job = Callable[[], None]
"""What a transaction could not finish. It raises an error if it has to be tried again."""


class Keeper:
    """Any thread may call the public methods. `_lock` guards the jobs, the queues and `_swept`; the watches are used by
    the keeper's thread alone, but for `wake`."""

    def __init__(
        self,
        registry: Registry,
        catalog: QueueCatalog,
        versions: PutVersions,
        sweeping: Sweeping,
        taker: Callable[[], Taker],
    ) -> None:
        """taker: returns this process's taker, a new one if its lease was lost."""
        self._registry = registry
        self._catalog, self._versions, self._sweeping, self._taker = catalog, versions, sweeping, taker
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._retry_s = RETRY_S
        self._dropped: queue_.SimpleQueue[Job] = queue_.SimpleQueue()
        """Jobs that finalizers have left: see `drop`."""
        self._queues: dict[str, Queue] = {}
        self._swept: dict[str, str] = {}
        """By queue id: the id of the taker as which this process is the queue's sweeper."""
        self._outcomes = OutcomeSweep()
        self._clears_at = 0.0
        """When the keys of deleted queues are looked for next (`time.monotonic`)."""
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        """What wakes the thread; replaced when the queues, or those that it sweeps, change."""
        self._deaths: Watch | None = None
        """Raised when a taker comes or goes. It tells `_look` whether there is anything to sweep."""
        self._woken = threading.Event()
        self._is_stopping = False
        what = f"queues of {registry.url}"
        # At INFO: the callers of the queues get errors of the same outage.
        self._outage = Outage(_logger, what, level=logging.INFO)
        self._jobs_outage = Outage(_logger, f"{what}, finishing transactions", level=logging.INFO)

    def look_after(self, queue: Queue) -> None:
        """This process takes from the queue: try to become its sweeper."""
        if self._queues.get(queue.id) == queue:
            return
        with self._lock:
            self._queues[queue.id] = queue  # also if its settings were changed
        self._start()

    def forget(self, queue: Queue) -> None:
        with self._lock:
            self._queues.pop(queue.id, None)
            self._swept.pop(queue.id, None)
        self.wake()

    def finish(self, job: Job) -> None:
        """Have the thread do a job, again and again until the job returns."""
        with self._lock:
            self._jobs.append(job)
            self._retry_s = RETRY_S
        self._start()

    def close(self, until: float = float("inf")) -> None:
        """Stop. Each job that is left is tried once more, if that begins before `until` (`time.monotonic`)."""
        self._is_stopping = True
        self.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, min(CLOSE_S_MAX, until - time.monotonic())))
        self._do_jobs(until)
        for watch in (self._watch, self._deaths):
            if watch is not None:
                watch.close()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_stopping:
                self._thread = start_thread(self._run, "pxrs-queue-keeper")
        self.wake()

    def wake(self) -> None:
        """Have the thread look: something has changed in this process."""
        self._woken.set()
        watch = self._watch
        if watch is not None:
            watch.wake()

    def _run(self) -> None:
        while not self._is_stopping:
            self._woken.clear()
            looks_at: float | None = None
            pause_s: float | None = None
            try:
                looks_at = self._look()
                self._outage.worked()
            except Closed:
                return
            except (RegistryUnavailable, OutcomeUnknown, LeaseExpired, Conflict) as error:
                self._outage.failed(error)
                pause_s = RETRY_S
            except PxrsError as error:  # such as a damaged record: try again in a while
                _logger.warning("queues of %s: %s", self._registry.url, error)
                pause_s = LOOK_S_MAX
            except Exception:
                _logger.exception("queues of %s", self._registry.url)
                pause_s = LOOK_S_MAX
            try:
                clock = self._registry.clock
                if self._jobs:
                    retry_s = self._retry_s if pause_s is None else min(pause_s, RETRY_S_MAX)
                    clock.wait(self._woken, looks_at, retry_s)
                elif self._watch is None:
                    clock.wait(self._woken, looks_at, pause_s)
                elif not self._woken.is_set():
                    self._watch.wait_until(looks_at, clock, pause_s)
            except Closed:
                return

    def _look(self) -> float:
        """Look after everything once. When to look again if nothing wakes the thread, on the registry's clock."""
        self._do_jobs()
        clock = self._registry.clock
        with self._lock:
            queues = list(self._queues.values())
        queues = [self._catalog.queue_of(queue) for queue in queues]
        if not queues:
            return clock.now() + LOOK_S_MAX
        # A new taker, if the lease was lost while all threads of this process wait for items: they need a sweeper.
        taker = self._taker()
        self._arm(queues, taker)
        for queue in queues:
            with left_where_it_is(queue):
                self._claim_sweeper(queue, taker)
        mine = [queue for queue in queues if self._swept.get(queue.id) == taker.id]
        if self._arm(queues, taker) or (self._deaths is not None and self._deaths.wait(0)):
            self._sweep(mine)
        looks_at = clock.now() + min(LOOK_S_MAX, taker.lease.ttl)  # nothing else notices that the lease was lost
        for queue in mine:
            with left_where_it_is(queue):
                due_at = drive(self._sweeping.end_delays(queue), self._registry)
                if due_at is not None:
                    # `now` is read first: if the clock is moved between the two, the look is early, not late.
                    looks_at = min(looks_at, clock.now() + (due_at - self._sweeping.wall_time()))
        if mine:
            self._clear()
        return looks_at

    def drop(self, job: Job) -> None:
        """As `finish`, for finalizers. It takes no lock: a finalizer may run in a thread that holds the lock."""
        self._dropped.put(job)
        apart(self.wake)

    def _do_jobs(self, until: float = float("inf")) -> None:
        with self._lock:
            jobs, self._jobs = self._jobs, []
        while not self._dropped.empty():
            jobs.append(self._dropped.get())
        url = self._registry.url
        has_failed = False
        try:
            while jobs and time.monotonic() < until:  # what is left is returned when the lease ends
                try:
                    jobs[0]()
                except RegistryUnavailable as error:
                    self._jobs_outage.failed(error)
                    return  # the other jobs would fail too
                except Exception as error:  # whatever it is, the other jobs are to be done
                    _logger.warning(
                        "queues of %s: %s; will try again", url, error, exc_info=not isinstance(error, PxrsError)
                    )
                    has_failed = True
                    with self._lock:
                        self._jobs.append(jobs[0])
                del jobs[0]
            if not has_failed:
                self._jobs_outage.worked()
        finally:
            with self._lock:
                self._jobs = jobs + self._jobs
                self._retry_s = min(2 * self._retry_s, RETRY_S_MAX) if has_failed else RETRY_S

    def _claim_sweeper(self, queue: Queue, taker: Taker) -> None:
        """Become the queue's sweeper, if it has none."""
        if self._swept.get(queue.id) == taker.id:
            return
        is_sweeper = drive(claim_sweeper(queue, taker.id, self._versions), self._registry, taker.lease)
        if is_sweeper is None:
            self.forget(queue)  # it was deleted
        with self._lock:
            if is_sweeper and queue.id in self._queues:
                self._swept[queue.id] = taker.id

    def _arm(self, queues: list[Queue], taker: Taker) -> bool:
        """Watch what concerns this process, before it looks (R2). Whether that has changed, and there is something to
        sweep."""
        mine = {queue.id for queue in queues if self._swept.get(queue.id) == taker.id}
        wanted = [queue.delayed if queue.id in mine else queue.sweeper for queue in queues]
        prefixes = tuple([*wanted, TAKERS] if mine else wanted)
        if self._watch is not None and self._watch.prefixes == prefixes:
            return False
        old, self._watch = self._watch, self._registry.watch(*prefixes) if prefixes else None
        if old is not None:
            old.close()
        if mine and self._deaths is None:
            self._deaths = self._registry.watch(TAKERS)
        return bool(mine)

    def _sweep(self, queues: list[Queue]) -> None:
        """Return the items of dead takers, and delete their slots."""
        if not queues:
            return
        try:
            alive = drive(self._sweeping.return_items_of_dead(queues), self._registry)
            self._sweep_outcomes(alive)
        except BaseException:
            if self._deaths is not None:
                self._deaths.wake()  # sweep again at the next look
            raise

    def _sweep_outcomes(self, alive: set[str] | None = None) -> None:
        if alive is None:
            alive = drive(read_takers(), self._registry)
        drive(self._outcomes.sweep(alive, self._registry.clock.now(), time.time()), self._registry)

    def _clear(self) -> None:
        """Delete, now and then, the slots of takers that are long gone, and the keys of deleted queues."""
        if self._registry.clock.now() > self._outcomes.due_at:
            self._sweep_outcomes()
        if time.monotonic() >= self._clears_at:
            self._clears_at = time.monotonic() + LOOK_S_MAX
            self._catalog.clear_deleted()
