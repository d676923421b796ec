"""Keeps leases alive: one `Renewer` for each open registry, however many leases the registry has given out.

The problem: one thread for each lease does not scale, and one thread for all of them lets a renewal that hangs expire
every other lease (R6). So one scheduling thread decides when each lease is due and calls no store; a due lease goes to
a queue, and worker threads take leases from the queue and renew them. There is one worker while renewals are answered
promptly. A lease that has waited in the queue for `ttl / 16` gets another worker, up to `workers_max`; a worker that
finds the queue empty while another one is idle ends. A logging handler of the program may block, or a logging filter
may raise. So the scheduling thread does not log: it queues the line, and a worker logs it. And a worker logs the
failure of a renewal only after it has set the time of the next one.

The bound: at most `workers_max` renewals are under way at a time (WORKERS_MAX unless told otherwise). If all of them
hang, further leases wait in the queue. Each backend bounds a renewal to a part of the ttl, so a worker becomes free
again; a lease that is not renewed in time passes its own deadline and is lost, which is safe.

The states of the renewals of one lease:

    state    event                                        next
    -------  -------------------------------------------  -----------------------------------------------
    WAITING  the next renewal is due                      QUEUED
    WAITING  due, and the lease was abandoned             WAITING until the deadline
    QUEUED   a worker takes it                            RUNNING
    QUEUED   still there after `ttl / 16`                 QUEUED; one more worker, if the bound allows it
    RUNNING  the store renewed the lease                  WAITING for `ttl / 4`
    RUNNING  the renewal failed                           WAITING for `ttl / 16`
    RUNNING  LeaseExpired                                 STOPPED; a warning, unless the holder has ended the lease
    any      the deadline passes                          STOPPED; `Lease.lost` is set
    any      `stop`, `Renewer.close`, the lease is freed  STOPPED

The threads start with the first lease and end with the last one. They refer to a lease, and by it to its registry, only
while they look at it or renew it, so that a registry that nobody uses any more is collected and closed.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
import weakref
from collections import deque
from typing import Final

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired
from pxrs.registry.lease import RENEWALS_PER_TTL, Lease
from pxrs.waiting import start_thread

log = logging.getLogger(__name__)

WORKERS_MAX: Final = 16
"""How many renewals of one registry may be under way at a time, unless `Renewer` is told otherwise."""
RETRIES_PER_TTL: Final = 4 * RENEWALS_PER_TTL
"""How often a failing renewal is tried within a ttl; also the part of a ttl after which a queued one gets a worker."""
JOIN_S_MAX: Final = 1.0
"""How long `close` waits for the scheduling thread, which calls no store."""


class RenewalState(enum.Enum):
    """See the table above."""

    WAITING = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    STOPPED = enum.auto()


class Renewals:
    """The renewals of one lease. All fields are guarded by the lock of the `Renewer`."""

    __slots__ = ("_renewer", "due", "lease", "state", "thread")

    def __init__(self, renewer: Renewer, lease: Lease) -> None:
        self._renewer = renewer
        self.lease = weakref.ref(lease)
        self.state = RenewalState.WAITING
        self.due = 0.0
        """When the scheduling thread looks at this lease next. An entry of the heap with another time is void."""
        self.thread: threading.Thread | None = None
        """The worker that renews the lease now."""

    def stop(self, wait_s: float) -> None:
        """Make no further renewal. Waits for one that is under way for at most this number of seconds."""
        self._renewer.stop(self, wait_s)


class Renewer:
    """Renews leases until they are stopped or have expired. See the module's page for its threads and their bound."""

    def __init__(self, clock: Clock, workers_max: int = WORKERS_MAX) -> None:
        self._clock, self._workers_max = clock, workers_max
        self._lock = threading.Condition()
        """Guards the fields below. Never held while a store is called or a lease may be freed."""
        self._heap: list[tuple[float, int, Renewals]] = []
        """When to look at which lease, the earliest first."""
        self._order = itertools.count()
        self._queue: deque[Renewals | str] = deque()
        """Leases to renew, and lines to log, for the workers."""
        self._workers: set[threading.Thread] = set()
        self._idle_count = 0
        """How many workers wait for the queue."""
        self._scheduler: threading.Thread | None = None
        self._is_closed = False
        self._wake = threading.Event()
        """Interrupts the scheduling thread's wait, after the heap got an earlier entry or lost one."""

    def add(self, lease: Lease) -> None:
        """Renew the lease from now on, and set its field `renewal`."""
        renewals = Renewals(self, lease)
        lease.renewal = renewals
        with self._lock:
            if self._is_closed:
                renewals.state = RenewalState.STOPPED
                return
            self._look_at(renewals, min(self._clock.now() + lease.ttl / RENEWALS_PER_TTL, lease.deadline))
            if self._scheduler is None:
                self._scheduler = start_thread(self._schedule, "pxrs-renewals")

    def stop(self, renewals: Renewals, wait_s: float) -> None:
        """See `Renewals.stop`."""
        with self._lock:
            renewals.state = RenewalState.STOPPED
            self._wake.set()  # the scheduling thread ends if this was the last lease
            if renewals.thread is not threading.current_thread():
                self._lock.wait_for(lambda: renewals.thread is None, wait_s)

    def close(self) -> None:
        """Make no further renewal. One that hangs is not waited for: its worker ends when the call returns."""
        with self._lock:
            self._is_closed = True
            for _, _, renewals in self._heap:
                renewals.state = RenewalState.STOPPED
            self._heap.clear()
            self._queue.clear()
            self._lock.notify_all()
            self._wake.set()
            scheduler = self._scheduler
        if scheduler is not None and scheduler is not threading.current_thread():
            scheduler.join(JOIN_S_MAX)

    # The scheduling thread

    def _schedule(self) -> None:
        seen: list[Lease] = []
        while (until := self._look(seen)) is not None:
            seen.clear()  # outside the lock: to free a lease may free its registry
            self._clock.wait(self._wake, until)

    def _look(self, seen: list[Lease]) -> float | None:
        """Act on every lease that is due; returns when the next one is, or None if there is none and the thread is to
        end. The leases that it has looked at are in `seen`, for the caller to let go of."""
        with self._lock:
            self._wake.clear()
            now = self._clock.now()
            while self._heap:
                due, _, renewals = self._heap[0]
                is_void = renewals.state is RenewalState.STOPPED or renewals.due != due
                if not is_void and due > now:
                    return due
                heapq.heappop(self._heap)
                lease = None if is_void else renewals.lease()
                if lease is not None:
                    seen.append(lease)
                    self._act(renewals, lease, now)
                elif not is_void:
                    renewals.state = RenewalState.STOPPED
            self._scheduler = None
            self._lock.notify_all()  # the idle worker ends too
            return None

    def _act(self, renewals: Renewals, lease: Lease, now: float) -> None:
        if not lease.alive:
            renewals.state = RenewalState.STOPPED
            if lease.deadline > float("-inf"):  # otherwise it was ended, and whoever ended it knows
                self._hand_over(f"lease {lease.id} could not be renewed before its deadline")
            return
        if renewals.state is RenewalState.RUNNING or lease.is_abandoned:
            self._look_at(renewals, lease.deadline)
            return
        if renewals.state is RenewalState.WAITING:
            renewals.state = RenewalState.QUEUED
            self._hand_over(renewals)
        elif len(self._workers) < self._workers_max:
            self._add_worker()
        self._look_at(renewals, min(now + lease.ttl / RETRIES_PER_TTL, lease.deadline))

    def _hand_over(self, work: Renewals | str) -> None:
        self._queue.append(work)
        self._lock.notify_all()
        if not self._workers:
            self._add_worker()

    def _look_at(self, renewals: Renewals, due: float) -> None:
        renewals.due = due
        heapq.heappush(self._heap, (due, next(self._order), renewals))
        self._wake.set()

    def _add_worker(self) -> None:
        try:
            self._workers.add(start_thread(self._work, "pxrs-renewal"))
        except RuntimeError as error:  # the process has as many threads as it may have, or is ending
            self._queue.append(f"no further thread could be started to renew leases: {error}")

    # The workers

    def _work(self) -> None:
        try:
            while (work := self._take()) is not None:
                line = (logging.WARNING, work) if isinstance(work, str) else self._renew(work)
                del work
                if line is not None:
                    log.log(*line)
        finally:  # also if the log has raised: a dead worker must not count
            with self._lock:
                self._workers.discard(threading.current_thread())

    def _take(self) -> Renewals | str | None:
        """The next lease to renew, or line to log; None if this worker is to end."""
        me = threading.current_thread()
        with self._lock:
            while True:
                while self._queue:
                    work = self._queue.popleft()
                    if isinstance(work, str):
                        return work
                    if work.state is RenewalState.QUEUED:
                        work.state, work.thread = RenewalState.RUNNING, me
                        return work
                if self._scheduler is None or self._is_closed or self._idle_count:
                    self._workers.discard(me)  # here, so that `_hand_over` does not count on this worker
                    return None
                self._idle_count += 1
                try:
                    self._lock.wait()
                finally:
                    self._idle_count -= 1

    def _renew(self, renewals: Renewals) -> tuple[int, str] | None:
        """Renew the lease once, and set the time of the next renewal. Returns the level and the text of a line to log,
        if there is one."""
        lease = renewals.lease()
        pause_s: float | None = None
        line: tuple[int, str] | None = None
        try:
            if lease is not None:
                lease.renew()
                pause_s = lease.ttl / RENEWALS_PER_TTL
        except LeaseExpired as error:
            assert lease is not None
            if not lease.is_ended:
                line = logging.WARNING, f"lease {lease.id} has expired: {error}"
        except Exception as error:  # noqa: BLE001 - whatever failed, the deadline decides
            assert lease is not None
            line = logging.INFO, f"lease {lease.id}: renewal failed, will try again: {error}"
            pause_s = lease.ttl / RETRIES_PER_TTL
        with self._lock:
            renewals.thread = None
            if pause_s is None or lease is None:
                renewals.state = RenewalState.STOPPED
                self._wake.set()
            elif renewals.state is RenewalState.RUNNING:
                renewals.state = RenewalState.WAITING
                self._look_at(renewals, min(self._clock.now() + pause_s, lease.deadline))
            self._lock.notify_all()
        return line
