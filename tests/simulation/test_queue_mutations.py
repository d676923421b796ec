"""Each rule of the queues' protocol, left out on purpose: the simulator must notice, and the sound code must pass.

A defect is an operation changed on its way, or a function or subclass with the mistake in it. None of them is a switch
in the product.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pxrs.errors import Conflict
from pxrs.queue.outcomes import OutcomeSweep, Slot, load_outcome
from pxrs.queue.protocol import (
    InHand,
    PendingTake,
    Reason,
    TransactionProtocol,
    TurnRead,
    give_back,
    read_turn,
)
from pxrs.queue.records import OUTCOMES, TAKERS, Queue, Record, Turn
from pxrs.queue.sweeping import InFlight, Sweeping, read_takers
from pxrs.registry.contract import ABSENT, Entry, Limits
from pxrs.registry.steps import Get, Operation, Scan, Steps, Write
from pxrs.testing.simulator import Violation
from pxrs.testing.simulator.queue_schedule import SOUND_QUEUES, QueueDefects
from pxrs.testing.simulator.queue_simulation import QueueSimulation, simulate_queues

SEEDS = 1_000 if os.environ.get("PXRS_SOAK") else 60


def without(mapping: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if part not in key}


def is_take(operation: Operation) -> bool:
    return isinstance(operation, Write) and any("/inflight/" in key for key in operation.put)


def is_commit(operation: Operation) -> bool:
    return isinstance(operation, Write) and any(
        key.startswith(OUTCOMES) and load_outcome(key, value)[1] == "committed" for key, value in operation.put.items()
    )


def is_return(operation: Operation) -> bool:
    return (
        isinstance(operation, Write) and not is_commit(operation) and any("/inflight/" in k for k in operation.delete)
    )


def frees_a_turn(operation: Operation) -> bool:
    """By a roll back or a sweep."""
    return (
        isinstance(operation, Write)
        and not is_commit(operation)
        and any(key.endswith("/turn") and not Turn.load(key, value).holder for key, value in operation.put.items())
    )


def change(applies: Callable[[Operation], bool], changed: Callable[[Write], Write]) -> Callable[[Operation], Operation]:
    def alter(operation: Operation) -> Operation:
        return changed(operation) if isinstance(operation, Write) and applies(operation) else operation

    return alter


def uncounted(write: Write) -> Write:
    put = dict(write.put)
    for key, value in put.items():
        if "/inflight/" in key:
            record = Record.load(key, value)
            put[key] = replace(record, deliveries=record.deliveries - 1).dump()
    return write._replace(put=put)


def keeps_names(write: Write) -> Write:
    """Items that come back keep their names: their keys are used a second time (R4)."""
    put, expect = {}, dict(write.expect)
    for key, value in write.put.items():
        if "/ready/" in key or "/delayed/" in key or "/dead/" in key:
            name, _, moves = key.rpartition(".")
            expect.pop(key, None)
            key = f"{name}.{int(moves, 16) - 1:x}"
            expect[key] = ABSENT
        put[key] = value
    return write._replace(put=put, expect=expect)


class OneByOne(TransactionProtocol):
    """The items are removed by one commit, and what is put is written by another."""

    def commit(self, slot: Slot, *, now: float, sent_at: float) -> Steps[None]:
        puts, self.puts = self.puts, []
        yield from super().commit(slot, now=now, sent_at=sent_at)
        self.puts = puts
        if puts:
            yield from super().commit(slot, now=now, sent_at=sent_at)


class ForgetsPendingTakes(TransactionProtocol):
    """After a lost reply a take counts as not applied."""

    def _resolve_take(self, pending: PendingTake) -> Steps[dict[str, int]]:
        yield from ()
        return {}


class ReadsPendingTakes(TransactionProtocol):
    """After a lost reply the item's key is read, and not written: the take may be applied later (R5)."""

    def _resolve_take(self, pending: PendingTake) -> Steps[dict[str, int]]:
        found: dict[str, int] = {}
        for key in [each.target for each in pending.planned] + ([pending.queue.turn] if pending.writes_turn else []):
            entry: Entry | None = yield Get(key)
            if entry is not None:
                found[key] = entry.version
        return found if pending.planned[0].target in found else {}


class FreesTheTurnFirst(TransactionProtocol):
    """A take from a FIFO queue whose reply was lost is left to the keeper; the transaction ends before it is known."""

    def put_aside(self) -> PendingTake | None:
        pending, self.pending = self.pending, None
        self.put_aside_count += pending is not None
        return pending


class KeepsItsName(TransactionProtocol):
    """An item that is taken again after a lost reply gets the key that the first take may write yet."""

    @property
    def _name(self) -> str:
        return self.id[:12]


class TakesPastUnresolvedTakes(TransactionProtocol):
    """A take from a FIFO queue does not wait until an earlier take of its transaction is resolved."""

    def begin_fifo_take(self, queue: Queue, reason: Reason) -> Steps[TurnRead | None]:
        return None if queue.id in self.turns else (yield from read_turn(queue))


class TakesWithoutTurn(TransactionProtocol):
    def _expect_turn(self, queue: Queue, taker: str, turn: TurnRead | None, changes: Any) -> None:
        """The turn of a FIFO queue is neither expected nor written."""


def one_scan(queue: Queue, limit: int) -> Steps[list[Entry]]:
    found: list[Entry] = yield Scan(queue.ready, None, limit)
    return found


def reads_the_outcome(slot: Slot, transaction: str, now: Callable[[], float], at: float) -> Steps[bool]:
    """What is not there is taken for final, though the commit may still be applied (R5)."""
    found: Entry | None = yield Get(slot.key)
    if found is None or load_outcome(slot.key, found.value)[0] != transaction:
        return False
    slot.version = found.version
    return load_outcome(slot.key, found.value)[1] == "committed"


def aborts_over_everything(slot: Slot, transaction: str, now: Callable[[], float], at: float) -> Steps[bool]:
    """ "aborted" is written whatever is in the slot."""
    written = yield Write({}, {slot.key: b'{"transaction":"%s","outcome":"aborted"}' % transaction.encode()}, {}, False)
    slot.version = written[slot.key]
    return False


class SweepsOutcomesAtOnce(OutcomeSweep):
    """The slots of a taker that is gone are deleted as soon as that is seen."""

    def sweep(self, alive: Any, now: float, wall_time: float) -> Steps[None]:
        yield from super().sweep(alive, now, wall_time)
        yield from super().sweep(alive, now + 3_700, wall_time)


class SweepsTheLiving(Sweeping):
    """The takers are read before the items, and their absence is not expected."""

    def return_items_of_dead(self, queues: Any) -> Steps[set[str] | None]:
        alive = yield from read_takers()
        for queue in queues:
            items: list[Entry] = yield Scan(queue.inflight)
            turn: Entry | None = (yield Get(queue.turn)) if queue.is_fifo else None
            yield from self._return_from(InFlight(queue, items, turn), alive)
        return alive


def expects_no_taker(write: Write) -> Write:
    return write._replace(expect={key: version for key, version in write.expect.items() if not key.startswith(TAKERS)})


class ReadsInFlightOnce(Sweeping):
    """What a dead taker took from a FIFO queue after the first scan is not seen: the turn is freed without it."""

    def _return_from(self, read: InFlight, alive: set[str]) -> Steps[None]:
        steps = super()._return_from(read, alive)
        result: Any = None
        try:
            while True:
                operation = steps.send(result)
                result = read.items if isinstance(operation, Scan) else (yield operation)
        except StopIteration:
            return


class WakesEarly(Sweeping):
    def end_delays(self, queue: Queue) -> Steps[float | None]:
        wall_time = self.wall_time
        early = replace(self, wall_time=lambda: wall_time() + 2.0)
        return (yield from Sweeping.end_delays(early, queue))


def frees_the_turn_apart(in_hand: InHand, reason: Reason, limits: Limits) -> Steps[None]:
    """The turn is freed before the items are back."""
    for queue, version in in_hand.turns.values():
        try:
            yield Write({queue.turn: version}, {queue.turn: Turn().dump()}, is_leased=False)
        except Conflict:
            return
    yield from give_back(in_hand._replace(turns={}), reason, limits)


@dataclass(frozen=True)
class Mutation:
    name: str
    defects: QueueDefects
    rules: tuple[str, ...]
    """Those that may be the first to be broken."""
    seeds_max: int = 700
    first_seed: int = 0
    """Where to begin, for a defect that few schedules reach. If it is not caught from there on, all seeds are tried."""


def altered(
    applies: Callable[[Operation], bool], changed: Callable[[Write], Write], *, counts_anew: bool | None = None
) -> QueueDefects:
    return QueueDefects(alter=change(applies, changed), counts_anew=counts_anew)


STUCK = ("Z2 comes to rest",)
FIFO = ("Z7 first in, first out", "Z7 one transaction at a time")

MUTATIONS = [
    Mutation(
        "take leaves the ready item",
        altered(is_take, lambda write: write._replace(delete=[])),
        ("Q1 one state",),
    ),
    Mutation(
        "take does not expect the item",
        altered(is_take, lambda write: write._replace(expect=without(write.expect, "/ready/"))),
        ("Q1 one state", "Q1 transitions", *FIFO),
    ),
    Mutation("take does not count the delivery", altered(is_take, uncounted), ("Q1 deliveries counted",)),
    Mutation(
        "take without the lease",
        altered(is_take, lambda write: write._replace(is_leased=False)),
        ("R3 no zombie takes",),
    ),
    Mutation(
        "commit does not expect its items",
        altered(is_commit, lambda write: write._replace(expect=without(write.expect, "/inflight/"))),
        ("Z2 all or nothing",),
    ),
    Mutation(
        # With the lease alone, or the items alone, a zombie's commit is refused as well.
        "commit expects neither the items nor the lease",
        altered(is_commit, lambda write: write._replace(expect=without(write.expect, "/inflight/"), is_leased=False)),
        ("Z2 all or nothing", "R3 no zombie commits"),
    ),
    Mutation(
        "commit without the lease",
        altered(is_commit, lambda write: write._replace(is_leased=False)),
        ("R3 no zombie commits",),
    ),
    Mutation(
        "commit does not expect its slot",
        altered(is_commit, lambda write: write._replace(expect=without(write.expect, OUTCOMES))),
        ("R5 told once", "Z2 committed once"),
    ),
    Mutation("items and puts in two commits", QueueDefects(protocol=OneByOne), ("Z2 all or nothing",)),
    Mutation(
        "put does not expect the last number",
        altered(is_commit, lambda write: write._replace(expect=without(write.expect, "/sequence"))),
        ("Q3 numbers",),
    ),
    Mutation(
        "put does not expect its queue",
        altered(is_commit, lambda write: write._replace(expect=without(write.expect, "standing/"))),
        ("Z2 puts need their queue",),
    ),
    Mutation("outcome is read, not resolved", QueueDefects(resolve=reads_the_outcome), ("R5 told once",)),
    Mutation("aborted over everything", QueueDefects(resolve=aborts_over_everything), ("R5 told the truth",)),
    Mutation(
        "outcomes swept at once",
        QueueDefects(outcomes=SweepsOutcomesAtOnce),
        ("R5 told the truth", "R5 told once", *STUCK),
        first_seed=154,
    ),
    Mutation("pending take forgotten", QueueDefects(protocol=ForgetsPendingTakes), (*STUCK, *FIFO)),
    Mutation("pending take read, not resolved", QueueDefects(protocol=ReadsPendingTakes), (*STUCK, *FIFO)),
    Mutation(
        "item taken again under the key of a pending take",
        QueueDefects(protocol=KeepsItsName),
        ("Q1 the living keep their items", *FIFO, *STUCK),
        seeds_max=1_000,
        first_seed=914,
    ),
    Mutation(
        "pending take left when the turn is freed", QueueDefects(protocol=FreesTheTurnFirst), FIFO, first_seed=219
    ),
    Mutation("FIFO take past an unresolved one", QueueDefects(protocol=TakesPastUnresolvedTakes), FIFO, first_seed=451),
    Mutation("FIFO take without the turn", QueueDefects(protocol=TakesWithoutTurn), FIFO),
    Mutation("FIFO head read by one scan", QueueDefects(read_head=one_scan), FIFO, first_seed=26),
    Mutation("turn freed before the items are back", QueueDefects(give_back=frees_the_turn_apart), FIFO),
    Mutation(
        "items come back under their old names", altered(is_return, keeps_names, counts_anew=True), ("R4 new names",)
    ),
    Mutation(
        "return does not expect the item",
        altered(is_return, lambda write: write._replace(expect=without(write.expect, "/inflight/"))),
        ("Q1 one state", "Q1 transitions", "Z2 puts need their queue", *FIFO),
    ),
    Mutation(
        "turn freed without expecting it",
        altered(frees_a_turn, lambda write: write._replace(expect=without(write.expect, "/turn"))),
        FIFO,
    ),
    Mutation(
        "sweeper reads takers first, and does not expect them gone",
        QueueDefects(sweeping=SweepsTheLiving, alter=change(is_return, expects_no_taker)),
        ("Q1 the living keep their items", *FIFO),
        first_seed=213,
    ),
    Mutation(
        "FIFO sweeper reads what is in flight once", QueueDefects(sweeping=ReadsInFlightOnce), FIFO, first_seed=464
    ),
    Mutation("delays end early", QueueDefects(sweeping=WakesEarly), ("Q1 delays",)),
]


def seeds_to_catch(mutation: Mutation) -> tuple[list[int], Violation] | None:
    """The seeds that were tried, of which the last one has caught the defect, and what it found."""
    tried: list[int] = []
    for seed in (*range(mutation.first_seed, mutation.seeds_max), *range(mutation.first_seed)):
        tried.append(seed)
        try:
            simulate_queues(seed, mutation.defects)
        except Violation as violation:
            return tried, violation
    return None


@functools.cache
def is_sound(seed: int) -> bool:
    simulate_queues(seed)
    return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_defect_is_caught_and_the_sound_code_passes_the_same_seeds(mutation: Mutation) -> None:
    caught = seeds_to_catch(mutation)
    assert caught is not None, f"not caught within {mutation.seeds_max} seeds"
    tried, violation = caught
    assert violation.rule in mutation.rules
    assert all(is_sound(seed) for seed in tried)


def test_rules_hold_after_every_step_and_every_item_is_finished_or_dead() -> None:
    simulations = [simulate_queues(seed) for seed in range(SEEDS)]
    ghosts = [simulation.ghost for simulation in simulations]
    for count in ("takes", "commits", "returns", "delays"):  # a simulator that gets nowhere would find nothing either
        assert sum(getattr(ghost, count) for ghost in ghosts) > 2 * len(ghosts), count
    for count in ("deaths", "resolved"):
        assert sum(getattr(ghost, count) for ghost in ghosts) > len(ghosts), count


def test_a_seed_replays_exactly() -> None:
    for seed in range(3):
        events = [list(QueueSimulation(seed, SOUND_QUEUES, trace=100_000).run().events) for _ in range(2)]
        assert events[0] == events[1]
