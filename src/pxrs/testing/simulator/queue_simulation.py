"""One schedule of queues, by a seed: which process takes the next step, what fails, when time passes.

First the storm: processes take, put, commit and roll back; they crash, are stopped past their lease and go on where
they were; replies are lost, writes are applied late, several processes sweep at once. `QueueGhost` checks every write
that the store accepts. Then the calm: nothing fails any more, and every item must be finished or dead in the end.
"""

from __future__ import annotations

from typing import Any, Final

from pxrs.queue.deleting import delete_queue
from pxrs.queue.items import Put
from pxrs.queue.puts import PutVersions, put
from pxrs.queue.records import DELETED, Record
from pxrs.registry.contract import ABSENT
from pxrs.registry.steps import Steps, Write
from pxrs.testing.simulator.ghost import Violation
from pxrs.testing.simulator.queue_process import QueueProcess
from pxrs.testing.simulator.queue_schedule import SOUND_QUEUES, QueueDefects, QueueSchedule
from pxrs.testing.simulator.store import Request

CALM_STEPS_MAX: Final = 30_000
"""More than queues of this size need to come to rest."""
LONG_S: Final = 4_000.0
"""Longer than the outcomes of a taker that is gone are kept."""


class QueueSimulation(QueueSchedule):
    def __init__(self, seed: int, defects: QueueDefects = SOUND_QUEUES, *, steps: int = 300, trace: int = 0) -> None:
        """`trace` is how many of the last events are kept, to be shown."""
        super().__init__(seed, defects, steps=steps, trace=trace)
        self.processes: list[QueueProcess] = []
        self._create_queues()
        for _ in range(self.rng.randint(2, 3)):
            self._start()

    def _create_queues(self) -> None:
        for queue in self.queues:
            expect = {queue.key: ABSENT, queue.existence: ABSENT}
            self.store.apply(Request(Write(expect, {queue.key: queue.dump(), queue.existence: b""}), "admin", None))
            for _ in range(self.rng.choice((0, 1, 3, 6))):
                record = Record("5000", f"i{self.next_serial():06d}", 0, b"", self.now)
                self._run(put([Put(queue, record, 0.0)], PutVersions(), self.now))

    def _run(self, steps: Steps[Any]) -> None:
        """A procedure of somebody else, at once."""
        result, error = None, None
        try:
            while True:
                request = Request(steps.send(result) if error is None else steps.throw(error), "admin", None)
                while not request.is_applied:
                    self.apply(request)
                result, error = request.result, request.error
        except StopIteration:
            return

    def _delete(self) -> None:
        """Somebody deletes a queue; the processes remove its items."""
        settings = self.store.state.get(self.queues[-1].key)
        if settings is not None:
            self._run(delete_queue(settings, PutVersions()))

    # The storm.

    def run(self) -> QueueSimulation:
        """Raises Violation."""
        while self.steps < self.steps_max:
            self._step()
        self._come_to_rest()
        return self

    def _step(self) -> None:
        self.steps += 1
        roll = self.rng.random()
        if roll < self.event:
            self._happen()
        elif roll < 0.1:
            self._pass(self.rng.expovariate(1.5))
        elif self.late and self.rng.random() < self.late_rate:
            self._land_late()
        else:
            running = [process for process in self.processes if self.now >= process.stopped_until]
            if not running:
                self._pass(self.ttl / 4)
                return
            process = self.rng.choice(running)
            process.renew()
            for _ in range(self.rng.randint(1, 6)):
                process.step()

    def _start(self) -> None:
        self.names += 1
        self.processes.append(QueueProcess(self, f"p{self.names}"))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.store.expired(self.now):
            if self.rng.random() < 0.5 or self.store.expiry[lease] + self.ttl < self.now:
                self.note(lease, "expires")
                self.store.end_lease(lease)

    def _land_late(self) -> None:
        request = self.late.pop(self.rng.randrange(len(self.late)))
        if self.rng.random() < 0.8:
            self.note("late:")
            self.apply(request)

    def _happen(self) -> None:
        # What happens to a process that does not know an outcome matters most.
        doubting = [process for process in self.processes if process.is_doubting]
        process = self.rng.choice(doubting if doubting and self.rng.random() < 0.5 else self.processes)
        kind = self.rng.choice(("crash", "crash", "stop", "stop", "stop", "renewals fail", "expire", "long", "delete"))
        self.note(process, kind)
        match kind:
            case "crash":
                process.crash()
                self.processes.remove(process)
                self._start()
            case "stop":
                process.stopped_until = self.now + self.rng.uniform(0.5, 3.0) * self.ttl
            case "renewals fail":
                process.renewals_fail_until = self.now + self.rng.uniform(0.5, 2.0) * self.ttl
            case "expire":
                self.store.end_lease(process.lease)  # the store ends it before its time, as after a restart
            case "delete" if self.rng.random() < 0.3:
                self._delete()
            case "long" if self.rng.random() < 0.3 and not self._is_resolving(process):
                self._pass_long(process)

    def _is_resolving(self, stopped: QueueProcess) -> bool:
        """Whether another process has a commit whose outcome it does not know. A process that lives resolves it long
        before an hour has passed."""
        return any(process.is_doubting for process in self.processes if process is not stopped)

    def _pass_long(self, stopped: QueueProcess) -> None:
        """One process is stopped for more than an hour; the others go on."""
        stopped.stopped_until = self.now + LONG_S
        self.now += LONG_S - 1.0
        for process in self.processes:
            if process is not stopped and process.lease in self.store.expiry:
                self.store.expiry[process.lease] = process.deadline = self.now + self.ttl
        self._pass(0.0)

    # The calm.

    def _come_to_rest(self) -> None:
        self.note("calm")
        self.is_calm = True
        self._delete()
        for process in self.processes:
            process.stopped_until = process.renewals_fail_until = 0.0
        while self.late:
            self._land_late()
        for _ in range(CALM_STEPS_MAX):
            self.steps += 1
            if self.rng.random() < 0.1:
                self._pass(self.rng.expovariate(1.0))
            process = self.rng.choice(self.processes)
            for each in self.processes:
                each.renew()
            process.step()
            if self._is_at_rest():
                break
        self.ghost.check_rest()

    def _is_at_rest(self) -> bool:
        if any("/dead/" not in stored.key for stored in self.ghost.items.values()):
            return False
        if self.store.state.scan(DELETED, None, None):
            return False
        return not any(process.jobs for process in self.processes)


def simulate_queues(seed: int, defects: QueueDefects = SOUND_QUEUES, *, steps: int = 300) -> QueueSimulation:
    """Run one schedule. A Violation says how to replay it."""
    try:
        return QueueSimulation(seed, defects, steps=steps).run()
    except Violation as violation:
        violation.add_note(f"SEED={seed}  replay: QueueSimulation({seed}, trace=100_000).run()")
        raise
