"""A process that takes from simulated queues: the shell around `pxrs.queue.protocol`, one step at a time.

It does what a real process's threads do. The user's thread takes, puts, commits or rolls back, and resolves a commit
whose reply was lost. The keeper's thread finishes what could not be finished, sweeps, and ends delays. Between any two
operations each of them can be stopped, for ever or for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pxrs.errors import Conflict, LeaseExpired, OutcomeLost, OutcomeUnknown, PxrsError, RegistryUnavailable
from pxrs.failures import Failure
from pxrs.queue.deleting import clear_deleted
from pxrs.queue.items import Put, Taken
from pxrs.queue.outcomes import OutcomeSweep, Slot
from pxrs.queue.protocol import Reason, TransactionProtocol, return_pending
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import DELETED, OUTCOMES, TAKERS, Queue, Record
from pxrs.queue.states import TransactionEvent, TransactionState, transaction_after
from pxrs.queue.sweeping import claim_sweeper, read_takers
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Operation, Scan, Steps, Write
from pxrs.testing.simulator.queue_ghost import TransactionFacts
from pxrs.testing.simulator.queue_schedule import QueueSchedule
from pxrs.testing.simulator.store import Request

Ended = Callable[[Any, PxrsError | None], None]
"""Called with what a procedure returned or raised."""


class SimulatedThread:
    """Runs one procedure at a time."""

    def __init__(self, process: QueueProcess) -> None:
        self.process = process
        self.steps: Steps[Any] | None = None
        self.ended: Ended = lambda result, error: None
        self.operation: Operation | None = None
        """Decided, and not sent yet."""
        self.request: Request | None = None
        self.taker = self.lease = ""

    def begin(self, steps: Steps[Any], ended: Ended) -> None:
        self.steps, self.ended = steps, ended
        self.taker, self.lease = self.process.taker, self.process.lease
        self._advance(None, None)

    def step(self) -> None:
        if self.request is not None:
            self._go_on(self.request)
        elif self.operation is not None:
            self._send(self.operation)

    def _send(self, operation: Operation) -> None:
        simulation = self.process.simulation
        operation = simulation.altered(operation)
        self.operation = None
        is_leased = isinstance(operation, Write) and (operation.is_leased or bool(operation.ephemeral))
        # A process may pass the check of its own deadline just before it is stopped: then the store has to refuse.
        if is_leased and not self.process.is_alive and simulation.rng.random() < 0.5:
            self._advance(None, LeaseExpired("the deadline has passed"))
        elif simulation.strikes(simulation.unavailable):
            self._advance(None, RegistryUnavailable("no answer"))
        else:
            self.request = Request(operation, self.taker, self.lease)
            if not simulation.strikes(simulation.slow):
                self._go_on(self.request)

    def _go_on(self, request: Request) -> None:
        simulation = self.process.simulation
        if not request.is_applied:
            if simulation.strikes(simulation.lost):
                self._give_up(request)
                return
            simulation.apply(request)
            if not request.is_applied or simulation.strikes(simulation.slow):
                return
        if simulation.strikes(simulation.lost):
            self._give_up(request)
        else:
            self.request = None
            self._advance(request.result, request.error)

    def _give_up(self, request: Request) -> None:
        self.request = None
        is_write = isinstance(request.operation, Write)
        if is_write and not request.is_applied:
            self.process.simulation.late.append(request)
        self._advance(None, OutcomeUnknown("no answer") if is_write else RegistryUnavailable("no answer"))

    def _advance(self, result: Any, error: PxrsError | None) -> None:
        assert self.steps is not None
        try:
            self.operation = self.steps.send(result) if error is None else self.steps.throw(error)
        except StopIteration as end:
            self.steps = None
            self.ended(end.value, None)
        except PxrsError as failure:
            self.steps = None
            self.ended(None, failure)

    def drop(self) -> None:
        """The process dies. A write that was sent, or was about to be, may still be applied."""
        simulation = self.process.simulation
        if self.operation is not None and simulation.rng.random() < 0.5:
            self.request = Request(simulation.altered(self.operation), self.taker, self.lease)
        if self.request is not None and not self.request.is_applied and isinstance(self.request.operation, Write):
            simulation.late.append(self.request)
        if self.steps is not None:
            self.steps.close()
        self.steps = self.operation = self.request = None


class SimulatedTransaction:
    """A transaction of the user's thread, and what is still to be done with it."""

    def __init__(self, process: QueueProcess) -> None:
        simulation, rng = process.simulation, process.simulation.rng
        self.id = f"tx{simulation.next_serial():010d}"
        self.facts = simulation.ghost.transactions[self.id] = TransactionFacts(self.id)
        self.protocol: TransactionProtocol = simulation.defects.protocol(self.id, process.versions, simulation.limits)
        self.state = TransactionState.OPEN
        self.taker = ""
        self.slot: Slot | None = None
        chosen = simulation.queues if simulation.is_calm else simulation.chosen
        takes = [rng.choice(chosen) for _ in range(rng.randint(1, 4))]
        targets = simulation.queues if rng.random() < 0.5 else [rng.choice(simulation.queues)]
        puts = [] if simulation.is_calm else [rng.choice(targets) for _ in range(rng.randint(0, 3))]
        self.plan: list[tuple[str, Queue | None]] = [("take", queue) for queue in takes]
        self.plan += [("put", queue) for queue in puts]
        if simulation.is_calm or rng.random() < 0.7:
            self.plan.append(("commit", None))
        else:
            self.plan.append(("roll back", None))

    def apply(self, event: TransactionEvent) -> None:
        self.state = transaction_after(self.state, event)


class QueueProcess:
    def __init__(self, simulation: QueueSchedule, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.user, self.keeper = SimulatedThread(self), SimulatedThread(self)
        self.versions = PutVersions()
        self.taker = self.lease = ""
        self.deadline = 0.0
        self.is_registered = False
        self.stopped_until = 0.0
        self.renewals_fail_until = 0.0
        self.slots: list[Slot] = []
        """The taker's slots that no transaction uses."""
        self.slots_count = 0
        self.transaction: SimulatedTransaction | None = None
        self.jobs: list[Callable[[], Steps[Any]]] = []
        """What the keeper tries until it is done, or until the taker that it is for has lost its lease."""
        self.swept: set[str] = set()
        """The ids of the queues that it sweeps."""
        self.outcomes: OutcomeSweep = simulation.defects.outcomes()

    def __repr__(self) -> str:
        return self.taker or self.name

    @property
    def is_alive(self) -> bool:
        return self.simulation.now < self.deadline

    @property
    def is_doubting(self) -> bool:
        """Whether it does not know the outcome of its transaction."""
        return self.transaction is not None and self.transaction.state == TransactionState.UNKNOWN

    @property
    def reason(self) -> Reason:
        return Reason(Failure("failed"), lambda: self.simulation.now, self.simulation.rng.random)

    def renew(self) -> None:
        simulation = self.simulation
        if not self.is_alive or simulation.now < self.renewals_fail_until:
            return
        if simulation.store.renew_lease(self.lease, simulation.now + simulation.ttl):
            self.deadline = simulation.now + simulation.ttl

    def step(self) -> None:
        thread = self.simulation.rng.choice((self.user, self.user, self.keeper))
        if thread.steps is not None:
            thread.step()
        elif not self.is_registered or not self.is_alive:
            if self.user.steps is None and self.keeper.steps is None:
                self._register()
        elif thread is self.user:
            self._use()
        else:
            self._keep()

    def crash(self) -> None:
        for thread in (self.user, self.keeper):
            thread.drop()
        if self.transaction is not None:
            self.transaction.facts.is_open = False

    # The user's thread.

    def _register(self) -> None:
        """A new taker. What was taken with the former one is lost."""
        transaction = self.transaction
        if transaction is not None and transaction.state == TransactionState.OPEN and transaction.protocol.taken:
            self._lose(transaction)
        serial = self.simulation.next_serial()
        self.taker, self.lease = f"{self.name}-{serial}", f"lease-{serial}"
        self.deadline = self.simulation.now + self.simulation.ttl
        self.simulation.store.begin_lease(self.lease, self.deadline)
        self.is_registered, self.slots, self.slots_count, self.swept = False, [], 0, set()
        if transaction is not None and transaction.state == TransactionState.OPEN:
            transaction.slot = None
        key = f"{TAKERS}{self.taker}"

        def register() -> Steps[None]:
            yield Write({key: ABSENT}, ephemeral={key: b""})

        def registered(result: Any, error: PxrsError | None) -> None:
            self.is_registered = error is None
            if error is not None:
                self.deadline = 0.0
                self.simulation.store.end_lease(self.lease)

        self.user.begin(register(), registered)

    def _use(self) -> None:
        transaction = self.transaction
        if transaction is None:
            self.transaction = SimulatedTransaction(self)
            return
        if transaction.state == TransactionState.UNKNOWN:
            self._resolve(transaction)
            return
        action, queue = transaction.plan[0]
        match action:
            case "take":
                assert queue is not None
                del transaction.plan[0]
                transaction.taker = transaction.taker if transaction.protocol.taken else self.taker
                self.user.begin(
                    self._take(transaction, queue), lambda taken, error: self._took(transaction, taken, error)
                )
            case "put":
                assert queue is not None
                del transaction.plan[0]
                item = f"i{self.simulation.next_serial():06d}"
                delay_s = 0.0 if queue.is_fifo else self.simulation.rng.choice((0.0, 0.0, 5.0))
                transaction.protocol.puts.append(Put(queue, Record("5000", item, 0, b"", self.simulation.now), delay_s))
                transaction.facts.puts.add(item)
            case "commit":
                self._commit(transaction)
            case "roll back":
                self._roll_back(transaction)

    def _take(self, transaction: SimulatedTransaction, queue: Queue) -> Steps[list[Taken]]:
        simulation, protocol = self.simulation, transaction.protocol
        turn = (yield from protocol.begin_fifo_take(queue, self.reason)) if queue.is_fifo else None
        if turn is not None and (turn.turn.holder or turn.turn.not_before > simulation.now):
            return []
        count = simulation.rng.randint(1, 2)
        entries = yield from simulation.defects.read_head(queue, count if queue.is_fifo else 4)
        if not queue.is_fifo and len(entries) > count:
            entries = simulation.rng.sample(entries, count)
        planned, _ = protocol.plan(queue, entries, self.taker)
        return (yield from protocol.take(queue, self.taker, planned, turn))

    def _took(self, transaction: SimulatedTransaction, taken: list[Taken] | None, error: PxrsError | None) -> None:
        pending = transaction.protocol.put_aside()
        if pending is not None:
            limits = self.simulation.limits
            self.jobs.append(lambda: return_pending(pending, self.reason, limits))
        if taken:
            self.simulation.ghost.deliver(transaction.id, self.user.taker, [each.record.id for each in taken])
        if isinstance(error, LeaseExpired):
            self.deadline = 0.0  # `_register` gives the transaction up if it has taken something

    def _commit(self, transaction: SimulatedTransaction) -> None:
        protocol = transaction.protocol
        if protocol.taken and transaction.taker != self.taker:
            self._lose(transaction)
            return
        if transaction.slot is None:
            transaction.slot = self._slot()
        slot = transaction.slot
        slot.sent_at = self.simulation.now
        transaction.taker = self.taker

        def commit() -> Steps[None]:
            yield from protocol.return_unresolved(self.reason)
            yield from protocol.commit(slot, now=self.simulation.now, sent_at=self.simulation.now)

        self.user.begin(commit(), lambda _, error: self._committed(transaction, slot, error))

    def _slot(self) -> Slot:
        if self.slots:
            return self.slots.pop()
        self.slots_count += 1
        return Slot(f"{OUTCOMES}{self.taker}-{self.slots_count}")

    def _committed(self, transaction: SimulatedTransaction, slot: Slot, error: PxrsError | None) -> None:
        protocol = transaction.protocol
        match error:
            case None:
                self._end(transaction, TransactionEvent.COMMITTED)
            case OutcomeUnknown():
                transaction.apply(TransactionEvent.REPLY_LOST)
            case Conflict() if set(error.keys).isdisjoint({slot.key, *protocol.owned_keys}):
                for put in protocol.puts:
                    self.versions.forget_number(put.queue)
                    if put.queue.existence in error.keys:  # the queue was deleted
                        transaction.plan = [("roll back", None)]
            case LeaseExpired() if not protocol.taken:
                self.deadline, transaction.slot = 0.0, None
            case RegistryUnavailable():
                if self.simulation.rng.random() < 0.3:
                    transaction.plan = [("roll back", None)]
            case _:
                self._lose(transaction)

    def _resolve(self, transaction: SimulatedTransaction) -> None:
        assert transaction.slot is not None
        now = self.simulation.now
        steps = self.simulation.defects.resolve(transaction.slot, transaction.id, lambda: self.simulation.now, now)
        self.user.begin(steps, lambda result, error: self._resolved(transaction, result, error))

    def _resolved(self, transaction: SimulatedTransaction, result: bool | None, error: PxrsError | None) -> None:
        if isinstance(error, OutcomeLost):
            self.simulation.forgotten += 1
            transaction.facts.is_open = False
            self.transaction = None
        elif error is None:
            self.simulation.ghost.resolved += 1
            if not result:
                self._give_back_later(transaction)
            self._end(transaction, TransactionEvent.FOUND_COMMITTED if result else TransactionEvent.FOUND_ABORTED)

    def _roll_back(self, transaction: SimulatedTransaction) -> None:
        self._give_back_later(transaction)
        self._end(transaction, TransactionEvent.ROLLED_BACK)

    def _lose(self, transaction: SimulatedTransaction) -> None:
        self._roll_back(transaction)

    def _give_back_later(self, transaction: SimulatedTransaction) -> None:
        """The keeper does it, or nobody does if the lease was lost: then a sweeper will."""
        in_hand, taker, limits = transaction.protocol.in_hand, transaction.taker, self.simulation.limits
        give_back = self.simulation.defects.give_back

        def job() -> Steps[None]:
            if taker == self.taker and self.is_alive:
                yield from give_back(in_hand, self.reason, limits)

        if any(in_hand):
            self.jobs.append(job)

    def _end(self, transaction: SimulatedTransaction, event: TransactionEvent) -> None:
        transaction.apply(event)
        self.simulation.ghost.tell(transaction.id, is_committed=transaction.state == TransactionState.COMMITTED)
        if transaction.slot is not None and transaction.taker == self.taker:
            self.slots.append(transaction.slot)
        transaction.protocol.clear()
        self.transaction = None

    # The keeper's thread.

    def _keep(self) -> None:
        simulation, rng = self.simulation, self.simulation.rng
        if self.jobs:
            job = self.jobs[0]
            self.keeper.begin(job(), lambda _, error: self.jobs.remove(job) if error is None else None)
            return
        if rng.random() < 0.1:
            self.keeper.begin(self._clear_deleted(), lambda result, error: None)
            return
        queue = rng.choice(simulation.queues)
        # Any process may sweep at any time, as `QueueListener.handle_next` does; in the calm the sweeper alone.
        may_sweep = queue.id in self.swept or (not simulation.is_calm and rng.random() < 0.5)
        if not may_sweep:
            self.keeper.begin(
                claim_sweeper(queue, self.taker, self.versions),
                lambda is_sweeper, error: self.swept.add(queue.id) if is_sweeper else None,
            )
        elif rng.random() < 0.45:
            self.keeper.begin(simulation.sweeping.return_items_of_dead([queue]), lambda result, error: None)
        elif rng.random() < 0.6:
            self.keeper.begin(simulation.sweeping.end_delays(queue), lambda result, error: None)
        else:
            self.keeper.begin(self._sweep_outcomes(), lambda result, error: None)

    def _clear_deleted(self) -> Steps[None]:
        found: list[Entry] = yield Scan(DELETED)
        for deleted in found:
            yield from clear_deleted(deleted, self.simulation.limits)

    def _sweep_outcomes(self) -> Steps[None]:
        alive = yield from read_takers()
        yield from self.outcomes.sweep(alive, self.simulation.now, self.simulation.now)
