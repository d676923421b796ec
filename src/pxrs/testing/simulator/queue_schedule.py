"""What the processes of simulated queues share: the choices of a seed, the time, the store, and the parts that a test
may replace by defective ones."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pxrs.queue.outcomes import OutcomeSweep, Slot, resolve
from pxrs.queue.policy import AtLeastOnce, ConsumeOnce, ConsumeTimes, FixedBackoff
from pxrs.queue.protocol import InHand, Reason, TransactionProtocol, give_back, read_head
from pxrs.queue.records import Queue
from pxrs.queue.sweeping import Sweeping
from pxrs.registry.contract import Entry, Limits
from pxrs.registry.steps import Operation, Steps
from pxrs.testing.simulator.queue_ghost import QueueGhost
from pxrs.testing.simulator.store import Request, SimulatedStore

Alter = Callable[[Operation], Operation]


@dataclass(frozen=True, slots=True)
class QueueDefects:
    """What a test puts in place of the sound parts, to see that the simulator notices."""

    protocol: type[TransactionProtocol] = TransactionProtocol
    sweeping: type[Sweeping] = Sweeping
    outcomes: type[OutcomeSweep] = OutcomeSweep
    read_head: Callable[[Queue, int], Steps[list[Entry]]] = read_head
    resolve: Callable[[Slot, str, Callable[[], float], float], Steps[bool]] = resolve
    give_back: Callable[[InHand, Reason, Limits], Steps[None]] = give_back
    alter: Alter | None = None
    """Changes an operation as it is sent."""
    counts_anew: bool | None = None


SOUND_QUEUES: Final = QueueDefects()


class QueueSchedule:
    """The state of one schedule, apart from its processes."""

    def __init__(self, seed: int, defects: QueueDefects = SOUND_QUEUES, *, steps: int = 300, trace: int = 0) -> None:
        """`trace` is how many of the last events are kept, to be shown."""
        self.seed, self.defects, self.steps_max = seed, defects, steps
        self.rng = rng = random.Random(f"queues {seed}")
        self.now = 0.0
        self.ttl = 10.0
        self.is_calm = False
        self.limits = Limits(rng.choice((6, 8, 64)), 1_000_000, 100_000)
        self.slow = rng.choice((0.0, 0.2, 0.5))
        self.lost = rng.choice((0.0, 0.05, 0.15, 0.3))
        self.unavailable = rng.choice((0.0, 0.03))
        self.event = rng.choice((0.01, 0.03))
        self.late_rate = rng.choice((0.02, 0.1, 0.3))
        counts_anew = rng.random() < 0.3 if defects.counts_anew is None else defects.counts_anew
        self.store = SimulatedStore(rng, counts_anew=counts_anew, scans_in_two_moments=rng.random() < 0.5)
        backoff = rng.choice((None, FixedBackoff(3.0)))
        plain = rng.choice((AtLeastOnce(), ConsumeTimes(2), ConsumeOnce()))
        fifo = rng.choice((AtLeastOnce(), AtLeastOnce(), ConsumeTimes(3)))
        self.queues = [
            Queue("plain", "q1", plain, False, backoff, 0.0),
            Queue("line", "q2", fifo, True, backoff, 0.0),
            Queue("doomed", "q3", AtLeastOnce(), False, backoff, 0.0),
        ]
        """The last one is deleted at some moment of the storm (`_delete`), or at its end."""
        self.chosen = rng.choice((self.queues, self.queues, self.queues[1:2]))
        """The queues that transactions take from: all of them, or the FIFO queue alone, which has the most rules."""
        self.ghost = QueueGhost(self.store, self.queues)
        self.store.on_accepted = self.ghost.accepted
        self.sweeping = defects.sweeping(self.limits, lambda: self.now, rng.random)
        self.late: list[Request] = []
        self.serial = self.names = 0
        self.steps = 0
        self.forgotten = 0
        """How many outcomes could not be told any more."""
        self.events: deque[str] = deque(maxlen=trace or 1)
        self.is_tracing = trace > 0

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def strikes(self, rate: float) -> bool:
        return rate > 0.0 and not self.is_calm and self.rng.random() < rate

    def altered(self, operation: Operation) -> Operation:
        return operation if self.defects.alter is None else self.defects.alter(operation)

    def apply(self, request: Request) -> None:
        self.ghost.now = self.now
        self.store.apply(request)
        self.note(
            request.incarnation, request.operation, "->", type(request.error).__name__ if request.error else "done"
        )

    def note(self, *what: object) -> None:
        if self.is_tracing:
            self.events.append(f"{self.steps:5d} {self.now:8.2f}s  {' '.join(map(str, what))}")
