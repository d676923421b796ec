"""The thread that does what nobody waits for: settle lost replies, give back what dead takers held, end delays.

The problem: an item in flight belongs to a taker for as long as that lives. If a rollback could not reach the store, or
the reply to a take was lost, nobody might ever ask for the item again though its taker lives. So what could not be
finished is tried here again until it is, or until the taker's lease is over.

And what belongs to the dead, or waits for its time, belongs to nobody. Of all processes that take from a queue one is
its sweeper, by an ephemeral key. That is only to spare the others the work: each move expects what it saw, so that
two sweepers do no harm, nor does one that slept.

It wakes by watches and by the time of the next delayed item, and looks without either once a minute, because clocks can
be set. A delay is counted on the clocks of those who put and sweep: nothing but the length of a delay depends on them.
These waits go by the registry's clock; the pauses after a failure go by the machine's.
"""

from __future__ import annotations

import logging
import queue as queue_
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pxrs.dropped import apart
from pxrs.errors import Closed, Conflict, LeaseExpired, OutcomeUnknown, PxrsError, RegistryCorrupt, RegistryUnavailable
from pxrs.failures import Failure
from pxrs.limited_log import Outage
from pxrs.queue import moves
from pxrs.queue.records import TAKERS, Queue, Record, Turn, taker_in, time_in
from pxrs.queue.taker import Leftovers, Taker
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.watch import Watch
from pxrs.waiting import start_thread
from pxrs.wording import counted

if TYPE_CHECKING:
    from pxrs.queue.store import QueueStore

_logger = logging.getLogger(__name__)

LOOK_S_MAX: Final = 60.0
RETRY_S: Final = 0.2
RETRY_S_MAX: Final = 10.0
"""Of what failed though the store can be reached."""
PROMOTE_ITEMS: Final = 100
CLOSE_S_MAX: Final = 5.0
_DIED: Final = "the process that had taken it died, or lost its lease"
Job = Callable[[], None]
"""Raises if it is to be tried again."""


class Keeper:
    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._retry_s = RETRY_S
        self._dropped: queue_.SimpleQueue[Job] = queue_.SimpleQueue()
        self._queues: dict[str, Queue] = {}
        self._swept: dict[str, str] = {}
        """By queue: the taker as which this process is its sweeper."""
        self._leftovers = Leftovers(store.registry)
        self._clears_at = 0.0
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        self._deaths: Watch | None = None
        self._woken = threading.Event()
        self._is_stopping = False
        what = f"queues of {store.registry.url}"
        # At this level, for those who use the queues are told of the same outage by their own calls.
        self._outage = Outage(_logger, what, level=logging.INFO)
        self._jobs_outage = Outage(_logger, f"{what}, what transactions have left", level=logging.INFO)

    def look_after(self, queue: Queue) -> None:
        """This process takes from the queue."""
        if queue.id in self._queues:
            return
        with self._lock:
            self._queues[queue.id] = queue
        self._start()

    def forget(self, queue: Queue) -> None:
        with self._lock:
            self._queues.pop(queue.id, None)
            self._swept.pop(queue.id, None)
        self.wake()

    def finish(self, job: Job) -> None:
        """Do it here, again and again until it is done."""
        with self._lock:
            self._jobs.append(job)
            self._retry_s = RETRY_S
        self._start()

    def close(self, until: float = float("inf")) -> None:
        """Stop, after one last try at what is unfinished, begun before `until` (`time.monotonic`)."""
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
        """Look: something has changed in this process."""
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
                looks_at = self._turn()
                self._outage.worked()
            except Closed:
                return
            except (RegistryUnavailable, OutcomeUnknown, LeaseExpired, Conflict) as error:
                self._outage.failed(error)
                pause_s = RETRY_S
            except PxrsError as error:  # such as an item that is damaged: it must not keep the others
                _logger.warning("queues of %s: %s", self._store.registry.url, error)
                pause_s = LOOK_S_MAX
            except Exception:
                _logger.exception("queues of %s", self._store.registry.url)
                pause_s = LOOK_S_MAX
            try:
                clock = self._store.registry.clock
                if self._jobs:
                    retry_s = self._retry_s if pause_s is None else min(pause_s, RETRY_S_MAX)
                    clock.wait(self._woken, looks_at, retry_s)
                elif self._watch is None:
                    clock.wait(self._woken, looks_at, pause_s)
                elif not self._woken.is_set():
                    self._watch.wait_until(looks_at, clock, pause_s)
            except Closed:
                return

    def _turn(self) -> float:
        """Look after everything once. The moment, on the registry's clock, of the next time if nothing happens."""
        self._do_jobs()
        clock = self._store.registry.clock
        with self._lock:
            queues = list(self._queues.values())
        if not queues:
            return clock.now() + LOOK_S_MAX
        # Anew, if the lease was lost while all threads wait: else nobody here would sweep for them.
        taker = self._store.taker()
        self._arm(queues, taker)
        for queue in queues:
            with _apart(queue):
                self._stand_for(queue, taker)
        mine = [queue for queue in queues if self._swept.get(queue.id) == taker.id]
        if self._arm(queues, taker) or (self._deaths is not None and self._deaths.wait(0)):
            self._sweep(mine)
        # Whether the lease lives is looked at here alone, so often.
        looks_at = clock.now() + min(LOOK_S_MAX, taker.lease.ttl)
        for queue in mine:
            with _apart(queue):
                due_at = self.end_delays(queue)
                if due_at is not None:
                    # `now` is read first: if the clock is moved between the two, the look is early, not late.
                    looks_at = min(looks_at, clock.now() + (due_at - self._store.wall_time()))
        if mine:
            self._clear()
        return looks_at

    def drop(self, job: Job) -> None:
        """As `finish`, from a finalizer: this takes no lock, for the finalizer's thread may have it."""
        self._dropped.put(job)
        apart(self.wake)

    def _do_jobs(self, until: float = float("inf")) -> None:
        with self._lock:
            jobs, self._jobs = self._jobs, []
        while not self._dropped.empty():
            jobs.append(self._dropped.get())
        url = self._store.registry.url
        has_failed = False
        try:
            while jobs and time.monotonic() < until:  # else the lease's end does it
                try:
                    jobs[0]()
                except RegistryUnavailable as error:
                    self._jobs_outage.failed(error)
                    return  # the others cannot be done either
                except Exception as error:  # whatever it is, the others are to be done
                    _logger.warning("queues of %s: %s; will try again", url, error, exc_info=not _is_ours(error))
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

    def _stand_for(self, queue: Queue, taker: Taker) -> None:
        """Be the queue's sweeper, if nobody is."""
        if self._swept.get(queue.id) == taker.id:
            return
        registry, me = self._store.registry, taker.id.encode()
        settings = registry.get(queue.key)
        if settings is None or Queue.load(settings.key, settings.value).id != queue.id:
            self.forget(queue)  # it was deleted: nothing is to be made there any more
            return
        expect = {queue.sweeper: ABSENT, queue.standing: self._store.standing(queue)}
        try:
            registry.commit(expect, ephemeral={queue.sweeper: me}, lease=taker.lease)
        except Conflict:
            found = registry.get(queue.sweeper)
            if found is None or found.value != me:  # it is, if the reply to the last try was lost
                return
        with self._lock:
            if queue.id in self._queues:
                self._swept[queue.id] = taker.id

    def _arm(self, queues: list[Queue], taker: Taker) -> bool:
        """Watch what concerns this process, before it looks (R2). Whether that has changed."""
        mine = {queue.id for queue in queues if self._swept.get(queue.id) == taker.id}
        wanted = [queue.delayed if queue.id in mine else queue.sweeper for queue in queues]
        prefixes = tuple([*wanted, TAKERS] if mine else wanted)
        if self._watch is not None and self._watch.prefixes == prefixes:
            return False
        registry = self._store.registry
        old, self._watch = self._watch, registry.watch(*prefixes) if prefixes else None
        if old is not None:
            old.close()
        if mine and self._deaths is None:
            self._deaths = registry.watch(TAKERS)
        return bool(mine)

    # What a sweeper does.

    def _sweep(self, queues: list[Queue]) -> None:
        """Give back what dead takers held."""
        if not queues:
            return
        registry = self._store.registry
        try:
            # The items first: a taker is there before anything is in its hands.
            held = {queue.id: registry.scan(queue.inflight) for queue in queues}
            turns = {queue.id: registry.get(queue.turn) for queue in queues if queue.is_fifo}
            alive = {entry.key[len(TAKERS) :] for entry in registry.scan(TAKERS)}
            for queue in queues:
                with _apart(queue):
                    self._bury_all(queue, held[queue.id], turns.get(queue.id), alive)
            self._leftovers.sweep(alive)
        except BaseException:
            if self._deaths is not None:
                self._deaths.wake()  # it is not done
            raise

    def return_items_of_dead(self, queue: Queue) -> None:
        """Give back the items of a queue that takers hold whose lease has ended.

        Any thread of any process may call it: each commit expects the items as they were read, and the taker's key
        ABSENT."""
        registry = self._store.registry
        held = registry.scan(queue.inflight)  # before the takers: a taker's key is there before it holds an item
        turn = registry.get(queue.turn) if queue.is_fifo else None
        if held or turn is not None:
            alive = {entry.key[len(TAKERS) :] for entry in registry.scan(TAKERS)}
            with _apart(queue):
                self._bury_all(queue, held, turn, alive)

    def _bury_all(self, queue: Queue, held: list[Entry], turn: Entry | None, alive: set[str]) -> None:
        holders = {taker_in(entry.key) for entry in held}
        if turn is not None and (holder := Turn.load(turn.key, turn.value).holder):
            holders.add(holder)
        dead = holders - alive
        if queue.is_fifo and dead:  # what they took since: the turn goes with the last of it
            held = self._store.registry.scan(queue.inflight)
        for taker in dead:
            try:
                self._bury(queue, taker, [entry for entry in held if taker_in(entry.key) == taker], turn)
            except Conflict:
                continue  # somebody else does it

    def _clear(self) -> None:
        """Remove, now and then, what is left of deleted queues and of takers that are long gone."""
        registry = self._store.registry
        if registry.clock.now() > self._leftovers.due_at:
            self._leftovers.sweep({entry.key[len(TAKERS) :] for entry in registry.scan(TAKERS)})
        if time.monotonic() >= self._clears_at:
            self._clears_at = time.monotonic() + LOOK_S_MAX
            self._store.clear_deleted()

    def _bury(self, queue: Queue, taker: str, held: list[Entry], turn: Entry | None) -> None:
        whole = []
        for entry in held:
            try:
                whole.append((entry.key, entry.version, Record.load(entry.key, entry.value)))
            except RegistryCorrupt as error:
                _logger.error("queue %s: %s; it is left where it is", queue.name, error)
        has_turn = turn is not None and Turn.load(turn.key, turn.value).holder == taker
        version = turn.version if turn is not None and has_turn else None
        now = self._store.wall_time()
        returned, last = moves.give_back_all(queue, whole, Failure(_DIED), version, random.random, now)
        self._store.move_all(returned, expect={f"{TAKERS}{taker}": ABSENT}, last=last)
        given = counted(len(held), "item")
        _logger.info("queue %s: gave back %s of taker %s, which is gone", queue.name, given, taker)

    def end_delays(self, queue: Queue) -> float | None:
        """Make ready the delayed items that are due. When the next one is, in seconds since 1970; None: there is none.

        Any thread of any process may call it: each move expects the item as it was read."""
        registry = self._store.registry
        after: str | None = None
        while entries := registry.scan(queue.delayed, after, PROMOTE_ITEMS):
            now = self._store.wall_time()
            due: list[moves.Move] = []
            for entry, due_at in _timed(queue, entries):
                if due_at > now:
                    self._store.move_all(due)
                    return due_at
                due.append(moves.make_ready(queue, entry))
            self._store.move_all(due)
            after = entries[-1].key  # not from the start: one that is damaged stays
        return None


@contextmanager
def _apart(queue: Queue) -> Iterator[None]:
    """What is damaged in one queue must not keep the others."""
    try:
        yield
    except RegistryCorrupt as error:
        _logger.error("queue %s: %s; it is left where it is", queue.name, error)


def _is_ours(error: Exception) -> bool:
    return isinstance(error, PxrsError)


def _timed(queue: Queue, entries: list[Entry]) -> Iterator[tuple[Entry, float]]:
    """When each is due, without those that are damaged."""
    for entry in entries:
        try:
            Record.load(entry.key, entry.value)
            yield entry, time_in(entry.key)
        except RegistryCorrupt as error:
            _logger.error("queue %s: %s; it is left where it is", queue.name, error)
