"""Workers at the queues of one hub, in processes of their own, which are killed, stopped and woken at random under
load; and the checks of what they leave."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pxrs
from pxrs.hub import Hub
from pxrs.queue.items import Item
from pxrs.queue.records import OUTCOMES, TAKERS, Record, Turn
from pxrs.testing.queue_worker import COINS, DONE, JOBS, LOG, NUMBERS, POISON, Attempt, Delivery, QueueWorker

EVENTS = 60 if os.environ.get("PXRS_SOAK") else 12
"""How many kills and stops."""
WORKERS = 3
TTL_S = 1.5
PATIENCE_S = 60.0
COINS_COUNT = 20
DELIVERIES_MAX = 4
JOBS_AN_EVENT = 6
NUMBERS_AN_EVENT = 4
EVENTS_A_POISON = 20
WRITTEN_BYTES = 300, 1200
"""How much the workers write into their journals between two events: a transaction is about 150 bytes."""


class QueueChaos(ExitStack):
    """Workers that come and go by seed, while items are put. What was started is ended with it."""

    def __init__(
        self,
        folder: Path,
        registry: str,
        work: Sequence[str],
        ttl: float = TTL_S,
        urls: Sequence[str] = (),
    ) -> None:
        """urls: a new worker opens the one that the fewest have open. Without any, all open the hub's directory and its
        registry."""
        super().__init__()
        self.urls = urls
        self.seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
        self.random = random.Random(self.seed)
        self.folder, self.registry, self.work, self.ttl = folder, registry, work, ttl
        self.is_sqlite = registry.startswith("sqlite")
        """One who is stopped with its only lock in hand stops all who write: so there is one at a time."""
        self.workers: list[QueueWorker] = []
        self.worker_urls: dict[str, str] = {}
        """What each worker has opened, by its name."""
        self.stopped: list[QueueWorker] = []
        self.leaving: list[QueueWorker] = []
        self.kills = self.stops = 0
        self.kill_at = self.random.randrange(4)
        """Which of the next four events is a kill."""
        self.fenced: list[tuple[QueueWorker, int]] = []
        """Transactions that were in hand when their worker lost its lease: the worker, and which of its attempts."""
        self.hub = self.enter_context(
            pxrs.open(folder / "data", registry=None if registry == "-" else registry, lease_ttl=ttl)
        )

    # Workers.

    def start(self) -> None:
        seed = self.random.randrange(1 << 30)
        name = f"w{len(self.workers)}"
        url, registry = str(self.folder / "data"), self.registry
        if self.urls:
            used = Counter(self.worker_urls[worker.name] for worker in self.alive())
            url, registry = min(self.urls, key=lambda each: used[each]), "-"
        worker = QueueWorker(url, registry, name, self.folder, self.ttl, seed, self.work)
        self.worker_urls[name] = url
        self.workers.append(self.enter_context(worker))

    def alive(self) -> list[QueueWorker]:
        """Those that have a part in this, stopped or not."""
        for worker in self.workers:
            code = worker.process.poll()
            assert code in (None, 0, -signal.SIGKILL, -signal.SIGTERM), self.tell(f"{worker.name} ended with {code}")
        return [worker for worker in self.workers if worker.is_running and worker not in self.leaving]

    def working(self) -> list[QueueWorker]:
        return [worker for worker in self.alive() if worker.is_ready and worker not in self.stopped]

    def wake(self, workers: Iterable[QueueWorker]) -> None:
        for worker in list(workers):
            worker.signal(signal.SIGCONT)
            if worker in self.stopped:
                self.stopped.remove(worker)

    def fill_up(self) -> None:
        """As many as there should be: poison kills them too."""
        self.stopped = [worker for worker in self.stopped if worker.is_running]
        while len(self.alive()) < WORKERS:
            self.start()

    def go_on(self, load: Callable[[], None]) -> None:
        """All the events, while there is load between them."""
        self.fill_up()
        # So that the events do not go to processes that are starting: it takes some as long as several events.
        self.eventually(lambda: all(worker.is_ready for worker in self.alive()), "the first workers do not start")
        for number in range(EVENTS):
            self.work_on(load)
            self.wake([worker for worker in self.stopped if self.random.random() < 0.15])
            self.event("kill" if number % 4 == self.kill_at else "stop")
            if number % 4 == 3:
                self.kill_at = self.random.randrange(4)
                self.hold_still(is_long=number % 20 == 11)

    def work_on(self, load: Callable[[], None]) -> None:
        """Until something more was done: on a busy machine an event may come before anybody has done anything."""
        is_blocked = self.is_sqlite and self.stopped
        if not is_blocked:
            load()
        enough = self.written() + self.random.randrange(*WRITTEN_BYTES)
        until = time.monotonic() + self.random.uniform(0.1, 1.0)

        def has_gone_on() -> bool:
            self.fill_up()
            return self.written() > enough or (is_blocked and time.monotonic() > until)

        self.eventually(has_gone_on, "nobody does anything")

    def written(self) -> int:
        return sum(worker.journal.stat().st_size for worker in self.workers if worker.is_ready)

    def event(self, kind: str) -> None:
        """Not to those that are still starting, and one who works is left."""
        while self.stopped and (self.is_sqlite or len(self.working()) < 2):
            self.wake(self.stopped[:1])
        working: list[QueueWorker] = []

        def is_anybody_left() -> bool:
            self.fill_up()
            working[:] = self.working()
            return bool(working)

        self.eventually(is_anybody_left, "nobody is left")
        worker = self.random.choice(working)
        if kind == "kill":
            worker.kill()
            self.kills += 1
        else:
            if self.random.random() < 0.5:
                self._stop_at_commit(worker)
            worker.signal(signal.SIGSTOP)
            self.stopped.append(worker)
            self.stops += 1
        if self.random.random() < 0.05 and (alive := self.alive()):
            self.leaving.append(worker := self.random.choice(alive))
            self.wake([worker])
            worker.signal(signal.SIGTERM)

    def _stop_at_commit(self, worker: QueueWorker) -> None:
        """Where it hurts most, if it gets there soon."""
        until = time.monotonic() + 1.0
        worker.signal(signal.SIGHUP)
        self.eventually(lambda: worker.is_halted or time.monotonic() > until, "no time passes")

    # A moment at which nothing moves.

    def hold_still(self, is_long: bool) -> None:
        """Stop everybody and count the coins; for a long one also wait until all of them have lost their leases."""
        everybody: list[QueueWorker] = []
        if self.is_sqlite:
            self.wake(self.stopped)

        def stop() -> bool:
            """For a long one, when somebody has something in hand."""
            self.wake(worker for worker in everybody if worker not in self.stopped)
            self.fill_up()
            everybody[:] = self.alive()  # those who leave are gone soon, and must not be kept from it
            if is_long and all(self._in_hand(worker) is None for worker in everybody):
                return False
            for worker in everybody:
                worker.signal(signal.SIGSTOP)
            self.eventually(lambda: all(worker.is_halted for worker in everybody), "some do not stop")
            if self.is_sqlite and not self._can_lock():
                return False
            return not is_long or any(self._in_hand(worker) is not None for worker in everybody)

        self.eventually(stop, "nobody has anything in hand")
        self.check_coins()
        if is_long:
            self.eventually(lambda: not self.hub.registry.scan(TAKERS), "stopped takers do not lose their leases")
            for worker in everybody:
                number = self._in_hand(worker)
                if number is not None:
                    self.fenced.append((worker, number))
            self.check_coins()
        self.wake(worker for worker in everybody if worker not in self.stopped)

    def _in_hand(self, worker: QueueWorker) -> int | None:
        """Which attempt of a worker it has in hand, with the commit still to come."""
        attempts = worker.read().attempts
        return len(attempts) - 1 if worker.is_running and attempts and attempts[-1].is_in_hand else None

    def _can_lock(self) -> bool:
        """Whether nobody was stopped with SQLite's only lock in its hands."""
        with closing(sqlite3.connect(self.folder / "registry.db", timeout=0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            return True

    def check_coins(self) -> None:
        """Each is in one of the two queues, once. Two equal scans are the state of the moment between them: no key is
        ever there twice."""
        queues = [self.hub.queue(name).settings for name in COINS]
        scans: list[list[tuple[str, int, bytes]]] = []

        def is_settled() -> bool:
            entries = [entry for queue in queues for entry in self.hub.registry.scan(queue.root)]
            scans.append([(entry.key, entry.version, entry.value) for entry in entries])
            return len(scans) > 1 and scans[-1] == scans[-2]

        self.eventually(is_settled, "the queues go on changing though everybody is stopped")
        items = [(key, value) for key, _, value in scans[-1] if not key.endswith("/sweeper")]
        found = Counter(Record.load(key, value).value.decode() for key, value in items)
        wrong = Counter(coins()) - found, found - Counter(coins())
        assert wrong == (Counter(), Counter()), self.tell(f"coins lost: {wrong[0]}, and too many: {wrong[1]}")

    # The end.

    def calm_down(self, is_done: Callable[[], bool], tell: Callable[[], str]) -> None:
        """Wake everybody and let them finish; then nothing is in anybody's hands, though all are still there."""
        self.wake(self.stopped)

        def is_finished() -> bool:
            self.fill_up()
            return is_done()

        self.eventually(is_finished, tell)
        self.eventually(lambda: all(worker.is_ready for worker in self.alive()), "the last workers do not start")
        for worker in self.alive():
            worker.signal(signal.SIGUSR1)
        self.eventually(lambda: all(worker.read().is_calm for worker in self.alive()), "some do not calm down")
        depths = {queue.name: queue.depth for queue in self.hub.queues()}
        self.eventually(
            lambda: all(depth().in_flight == 0 for depth in depths.values()),
            lambda: f"nobody works, and in flight there are { ({name: depth() for name, depth in depths.items()}) }",
        )

    def end(self) -> None:
        for worker in (alive := self.alive()):
            worker.signal(signal.SIGTERM)
        codes = {worker.name: worker.process.wait(PATIENCE_S) for worker in (*alive, *self.leaving)}
        # One that was sent away while it was still starting had nothing to give up.
        assert set(codes.values()) <= {0, -signal.SIGKILL, -signal.SIGTERM}, self.tell(f"{codes}")
        assert not any(codes[worker.name] for worker in alive), self.tell(f"{codes}")

    def check_nothing_is_held(self) -> None:
        """No lease, no sweeper, no turn."""
        registry = self.hub.registry
        queues = [queue.settings for queue in self.hub.queues()]
        self.eventually(
            lambda: not registry.scan(TAKERS) and not any(registry.get(queue.sweeper) for queue in queues),
            lambda: f"{registry.scan(TAKERS)}, {[registry.get(queue.sweeper) for queue in queues]}",
        )
        for queue in queues:
            turn = registry.get(queue.turn)
            assert turn is None or not Turn.load(turn.key, turn.value).holder, self.tell(f"{turn}")

    def check_outcomes_are_removed(self) -> None:
        """Outcomes are left of those alone who could not remove them."""
        # By those who left: a taker whose lease ends before the worker has written its id down is in no journal.
        left = {taker for worker in self.workers for taker in worker.read().left}
        outcomes = [entry.key.removeprefix(OUTCOMES) for entry in self.hub.registry.scan(OUTCOMES)]
        assert not {outcome.rpartition("-")[0] for outcome in outcomes} & left, self.tell(f"{outcomes} of {left}")

    def check_fence(self) -> None:
        """Nobody commits what it had in hand when it lost its lease, also if nobody else has asked for it since."""
        for worker, number in self.fenced:
            attempt = worker.read().attempts[number]
            assert attempt.outcome != "committed", self.tell(f"{worker.name} committed without a lease: {attempt}")

    def check_losses(self) -> None:
        """Nobody loses a transaction but with its lease: then it goes on as another taker."""
        for worker in self.workers:
            attempts = [attempt for attempt in worker.read().attempts if attempt.taken]
            unjust = [
                each for each, after in pairwise(attempts) if each.outcome == "lost" and each.taker == after.taker
            ]
            assert not unjust, self.tell(f"{worker.name} lost items while it had its lease: {unjust}")

    def attempts(self) -> list[Attempt]:
        return [attempt for worker in self.workers for attempt in worker.read().attempts]

    def check_deliveries(self) -> list[Delivery]:
        """Each was counted before it happened: no item was delivered twice as the same delivery."""
        deliveries = [delivery for attempt in self.attempts() for delivery in attempt.taken]
        counts = Counter((delivery.item, delivery.deliveries) for delivery in deliveries)
        again = {each: count for each, count in counts.items() if count > 1}
        assert not again, self.tell(f"delivered more often than counted: {again}")
        return deliveries

    def eventually(self, check: Callable[[], bool], tell: str | Callable[[], str]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not check():
            assert time.monotonic() < until, self.tell(tell if isinstance(tell, str) else tell())
            time.sleep(0.02)

    def tell(self, what: str) -> str:
        for worker in self.workers:
            if worker.is_running and worker.is_ready:
                worker.signal(signal.SIGUSR2)
        time.sleep(0.5)  # so that they can say what they are doing
        errors = "".join(
            f"{worker.name}: {text[-6000:]}\n" for worker in self.workers if (text := worker.errors.read_text())
        )
        return f"SEED={self.seed}: {what}\n{errors}"


def coins() -> list[str]:
    return [f"coin-{number}" for number in range(COINS_COUNT)]


def values(hub: Hub, queue: str) -> list[str]:
    """Of what is ready, in its order."""
    entries = hub.registry.scan(hub.queue(queue).settings.ready)
    return [Record.load(entry.key, entry.value).value.decode() for entry in entries]


def given_up(hub: Hub) -> list[Item]:
    return [letter for name in JOBS for letter in hub.queue(name).dead_letters()]


def create_queues(hub: Hub) -> None:
    policy = pxrs.ConsumeTimes(DELIVERIES_MAX)
    for name in COINS:
        hub.create_queue(name)
    hub.create_queue(JOBS[0], policy)
    hub.create_queue(JOBS[1], policy, backoff=pxrs.ExponentialBackoff(first=0.005, cap=0.05))
    hub.create_queue(DONE)
    hub.create_queue(NUMBERS, fifo=True)
    hub.create_queue(LOG, fifo=True)
    hub.queue(COINS[0]).put_many(coins())


class Load:
    """Jobs, some of them poison, and numbers, put as the events go on."""

    def __init__(self, chaos: QueueChaos) -> None:
        self._hub = chaos.hub
        self._poison_at = chaos.random.randrange(JOBS_AN_EVENT)
        self.jobs: list[str] = []
        self.numbers = 0

    def __call__(self) -> None:
        """What belongs to the next event."""
        first = len(self.jobs)
        poison = first + self._poison_at if first % (EVENTS_A_POISON * JOBS_AN_EVENT) == 0 else -1
        numbers = range(first, first + JOBS_AN_EVENT)
        new = [f"{number} {POISON}" if number == poison else f"{number}" for number in numbers]
        for at, name in enumerate(JOBS):
            self._hub.queue(name).put_many(new[at :: len(JOBS)])
        self.jobs += new
        self._hub.queue(NUMBERS).put_many(
            f"{number}" for number in range(self.numbers, self.numbers + NUMBERS_AN_EVENT)
        )
        self.numbers += NUMBERS_AN_EVENT


def check_jobs(chaos: QueueChaos, jobs: Sequence[str], deliveries: Sequence[Delivery]) -> int:
    """Each was done once or is a dead letter, and was not delivered too often; how many are dead."""
    hub = chaos.hub
    letters = given_up(hub)
    done, dead = Counter(values(hub, DONE)), Counter(letter.value.decode() for letter in letters)
    wrong = {job: (done[job], dead[job]) for job in {*jobs, *done, *dead} if done[job] + dead[job] != 1}
    assert not wrong, chaos.tell(f"jobs that were not either done or given up, once: {wrong}")
    alive = [job for job in jobs if job.endswith(POISON) and job not in dead]
    assert not alive, chaos.tell(f"poison that is no dead letter: {alive}")
    counts = Counter(delivery.item for delivery in deliveries if delivery.queue in JOBS)
    most = max(delivery.deliveries for delivery in deliveries if delivery.queue in JOBS)
    assert max(counts.values()) <= DELIVERIES_MAX, chaos.tell(f"delivered too often: {counts.most_common(3)}")
    assert most <= DELIVERIES_MAX, chaos.tell(f"a delivery counted as {most}")
    assert {letter.deliveries for letter in letters} == {DELIVERIES_MAX}, chaos.tell(f"{letters}")
    told = {each.value for a in chaos.attempts() if a.outcome == "committed" for each in a.taken if each.queue in JOBS}
    assert told <= done.keys(), chaos.tell(f"committed, and not there: {told - done.keys()}")
    return len(letters)


def check_log(chaos: QueueChaos, count: int) -> None:
    """All the numbers in their order."""
    found = [int(line.split()[0]) for line in values(chaos.hub, LOG)]
    at = next((at for at, number in enumerate(found) if number != at), None)
    assert found == list(range(count)), chaos.tell(
        f"the log is wrong at {at}: {found[at - 3 : at + 5] if at else found}"
    )
