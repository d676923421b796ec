"""What really happened to the items of simulated queues, and the rules, held against it.

The ghost is told of every write that the store accepts, before the store applies it, and of what transactions are told:
which items were delivered to them, and whether they were committed. It trusts no version and no lease of the protocol,
only the order of these events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pxrs.queue.outcomes import load_outcome
from pxrs.queue.records import OUTCOMES, TAKERS, Queue, Record, Turn, name_in, taker_in, time_in
from pxrs.queue.states import ITEM_TRANSITIONS, ItemState, state_in
from pxrs.registry.steps import Write
from pxrs.testing.simulator.ghost import Violation
from pxrs.testing.simulator.store import Request, SimulatedStore

ALLOWED: Final = {(before, after) for (before, _), after in ITEM_TRANSITIONS.items()}


@dataclass
class TransactionFacts:
    """One transaction, as the ghost knows it."""

    id: str
    delivered: set[str] = field(default_factory=set)
    """The items that were handed to the user."""
    puts: set[str] = field(default_factory=set)
    is_committed: bool = False
    told: bool | None = None
    """Whether the user was told that it was committed; None: not told yet."""
    is_open: bool = True
    """Whether the user still works with its items."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An item's key, and the item."""

    key: str
    record: Record


class QueueGhost:
    def __init__(self, store: SimulatedStore, queues: list[Queue]) -> None:
        self.store = store
        self.queues = {queue.id: queue for queue in queues}
        self.items: dict[str, Stored] = {}
        self.transactions: dict[str, TransactionFacts] = {}
        self.now = 0.0
        """The time, which the simulation sets before each write."""
        self.deleted: set[str] = set()
        """The ids of the queues that were deleted."""
        self.deleted_items: set[str] = set()
        """The items that were deleted with their queue."""
        self.last_numbers = dict.fromkeys(self.queues, 0)
        """By FIFO queue: the number of the last item that was put."""
        self.last_finished: dict[str, str] = {}
        """By FIFO queue: the order of the last item that a transaction has finished."""
        self.takes = self.commits = self.returns = self.deaths = self.delays = self.resolved = 0

    def transaction(self, key: str) -> TransactionFacts:
        """The transaction that has taken an item, by the item's key in flight."""
        return self.transactions[key.split("~")[1].partition(".")[0]]

    # What the store accepts.

    def accepted(self, request: Request, write: Write) -> None:
        self.deleted |= {queue.id for queue in self.queues.values() if queue.existence in write.delete}
        removed = self._removed(write)
        added = self._added(write)
        committed = self._committed(request, write)
        for item, (_, new) in added.items():
            before = self.items.get(item)
            if before is not None and item not in removed:
                raise Violation("Q1 one state", f"{item} is at {before.key}, and is written to {new.key}")
        for item, (queue, new) in added.items():
            self._moved(request, queue, self.items.get(item), new, added)
        for old in sorted((removed[item] for item in removed.keys() - added.keys()), key=lambda each: each.key):
            self._finished(committed, old)
        if committed is not None:
            self._check_whole(committed, removed, added)
        for key, value in write.put.items():
            if key.endswith("/turn"):
                self._turn(key, Turn.load(key, value), removed)
        for item in removed:
            del self.items[item]
        self.items |= {item: new for item, (_, new) in added.items()}

    def _removed(self, write: Write) -> dict[str, Stored]:
        keys = {stored.key: item for item, stored in self.items.items()}
        return {keys[key]: self.items[keys[key]] for key in write.delete if key in keys}

    def _added(self, write: Write) -> dict[str, tuple[Queue, Stored]]:
        added: dict[str, tuple[Queue, Stored]] = {}
        for key, value in write.put.items():
            if not key.startswith("items/") or key.count("/") < 3:
                continue
            new = Stored(key, Record.load(key, value))
            item = new.record.id
            if item in self.items and self.items[item] == new:
                continue  # written again in its place
            if item in added:
                raise Violation("Q1 one state", f"{item} is written to {added[item][1].key} and {key}")
            added[item] = self.queues[key.split("/")[1]], new
        return added

    def _committed(self, request: Request, write: Write) -> TransactionFacts | None:
        for key, value in write.put.items():
            if key.startswith(OUTCOMES):
                transaction, outcome = load_outcome(key, value)
                if outcome == "committed":
                    facts = self.transactions[transaction]
                    self._check_commit(request, write, facts)
                    facts.is_committed = True
                    self.commits += 1
                    return facts
        return None

    def _check_commit(self, request: Request, write: Write, facts: TransactionFacts) -> None:
        if facts.is_committed:
            raise Violation("Z2 committed once", f"{facts.id} was committed again")
        if facts.told is not None:
            raise Violation("R5 told once", f"{facts.id} is committed after it was told to be rolled back")
        if not self.store.has(f"{TAKERS}{request.incarnation}"):
            raise Violation("R3 no zombie commits", f"{facts.id} is committed by {request.incarnation}, which is gone")

    def _check_whole(
        self, facts: TransactionFacts, removed: dict[str, Stored], added: dict[str, tuple[Queue, Stored]]
    ) -> None:
        if set(removed) != facts.delivered or set(added) != facts.puts:
            raise Violation(
                "Z2 all or nothing",
                f"{facts.id} took {sorted(facts.delivered)}, put {sorted(facts.puts)}; its commit removes "
                f"{sorted(removed)} and adds {sorted(added)}",
            )

    # One item.

    def _moved(
        self,
        request: Request,
        queue: Queue,
        old: Stored | None,
        new: Stored,
        added: dict[str, tuple[Queue, Stored]],
    ) -> None:
        before, after = None if old is None else state_in(old.key), state_in(new.key)
        if (before, after) not in ALLOWED:
            raise Violation("Q1 transitions", f"{new.record.id} went from {before} to {after}")
        if name_in(new.key).split(".")[1] != new.record.id:
            raise Violation("Q1 transitions", f"{new.key} is not the key of {new.record.id}")
        if old is None:
            self._put(queue, new)
        elif before is ItemState.READY:
            self._taken(request, queue, old, new, added)
        elif new.record.deliveries != old.record.deliveries:
            raise Violation("Q1 deliveries counted", f"{old} became {new} without a take")
        elif before is ItemState.IN_FLIGHT:
            self._returned(request, queue, old, new)
        elif before is ItemState.DELAYED:
            self.delays += 1
            if time_in(old.key) > self.now:
                raise Violation("Q1 delays", f"{old.key} was made ready at {self.now}")

    def _put(self, queue: Queue, new: Stored) -> None:
        if queue.id in self.deleted:
            raise Violation("Z2 puts need their queue", f"{new.key} was put after its queue was deleted")
        if not queue.is_fifo:
            return
        number = int(new.record.order, 16)
        if number != self.last_numbers[queue.id] + 1:
            raise Violation("Q3 numbers", f"{new.key} follows {self.last_numbers[queue.id]}")
        self.last_numbers[queue.id] = number

    def _taken(
        self, request: Request, queue: Queue, old: Stored, new: Stored, added: dict[str, tuple[Queue, Stored]]
    ) -> None:
        self.takes += 1
        if new.record.deliveries != old.record.deliveries + 1:
            raise Violation("Q1 deliveries counted", f"{old} became {new} by a take")
        most = queue.policy.deliveries_max
        if most is not None and new.record.deliveries > most:
            raise Violation("Z6 policy", f"{new} is delivered more often than {most} times")
        if not self.store.has(f"{TAKERS}{taker_in(new.key)}"):
            raise Violation("R3 no zombie takes", f"{new.key}: its taker is gone")
        if not queue.is_fifo:
            return
        for other in self.of(queue, ItemState.READY):
            if other.key < old.key and other.record.id not in added:
                raise Violation("Z7 first in, first out", f"{old.key} is taken before {other.key}")
        for other in self.of(queue, ItemState.IN_FLIGHT):
            if self.transaction(other.key) is not self.transaction(new.key):
                raise Violation("Z7 one transaction at a time", f"{new.key} is taken while {other.key} is in flight")

    def _returned(self, request: Request, queue: Queue, old: Stored, new: Stored) -> None:
        self.returns += 1
        facts, taker = self.transaction(old.key), taker_in(old.key)
        if self.store.has(f"{TAKERS}{taker}"):
            if request.incarnation != taker and not self._is_of_same_process(request, taker):
                raise Violation("Q1 the living keep their items", f"{request.incarnation} returned {old.key}")
            if facts.is_open and old.record.id in facts.delivered:
                raise Violation("Q1 the living keep their items", f"{old.key} was returned, and its user works with it")
        most = queue.policy.deliveries_max
        is_dead = state_in(new.key) is ItemState.DEAD
        self.deaths += is_dead
        if is_dead != (most is not None and new.record.deliveries >= most):
            raise Violation("Z6 policy", f"{old} became {new}")
        if new.record.moves <= old.record.moves:
            raise Violation("R4 new names", f"{old.key} became {new.key}")

    def _is_of_same_process(self, request: Request, taker: str) -> bool:
        """A process that got another taker may return what its former one has taken."""
        return request.incarnation.partition("-")[0] == taker.partition("-")[0]

    def _finished(self, committed: TransactionFacts | None, old: Stored) -> None:
        if committed is None and old.key.split("/")[1] in self.deleted:
            self.deleted_items.add(old.record.id)
            return
        if committed is None or state_in(old.key) is not ItemState.IN_FLIGHT:
            raise Violation("Z2 nothing lost", f"{old.key} was deleted by no commit of a transaction")
        if self.transaction(old.key) is not committed:
            raise Violation("Z2 all or nothing", f"{committed.id} removed {old.key}")
        queue = self.queues[old.key.split("/")[1]]
        if queue.is_fifo:
            if old.record.order <= self.last_finished.get(queue.id, ""):
                raise Violation("Z7 first in, first out", f"{old.key} after {self.last_finished[queue.id]}")
            self.last_finished[queue.id] = old.record.order

    def _turn(self, key: str, turn: Turn, removed: dict[str, Stored]) -> None:
        """When the turn is freed, no item of the queue stays in flight."""
        queue = self.queues[key.split("/")[1]]
        left = [stored for stored in self.of(queue, ItemState.IN_FLIGHT) if stored.record.id not in removed]
        if not turn.holder and left:
            raise Violation("Z7 one transaction at a time", f"the turn is free, and {left} are in flight")

    def of(self, queue: Queue, state: ItemState) -> list[Stored]:
        folder = queue.folder(state)
        return [stored for stored in self.items.values() if stored.key.startswith(folder)]

    # What transactions are told.

    def deliver(self, transaction: str, taker: str, items: list[str]) -> None:
        """The user gets items that a take of this transaction has returned."""
        facts = self.transactions[transaction]
        for item in items:
            stored = self.items.get(item)
            is_in_flight = stored is not None and state_in(stored.key) is ItemState.IN_FLIGHT
            is_owned = stored is not None and is_in_flight and self.transaction(stored.key) is facts
            is_deleted = item in self.deleted_items  # after the take was applied, and before its reply came
            if not is_owned and not is_deleted and self.store.has(f"{TAKERS}{taker}"):
                raise Violation("Q1 one owner", f"{item} was delivered to {transaction}, and is at {stored}")
            facts.delivered.add(item)

    def tell(self, transaction: str, *, is_committed: bool) -> None:
        facts = self.transactions[transaction]
        if facts.is_committed != is_committed:
            raise Violation("R5 told the truth", f"{facts} was told: {is_committed}")
        facts.told, facts.is_open = is_committed, False

    # At rest.

    def check_rest(self) -> None:
        stored = {
            entry.key
            for queue in self.queues.values()
            for state in ItemState
            for entry in self.store.state.scan(queue.folder(state), None, None)
        }
        known = {each.key for each in self.items.values()}
        if stored != known:
            raise Violation("Q1 one state", f"the store has {stored - known}, and lacks {known - stored}")
        alive = [each.key for each in self.items.values() if state_in(each.key) is not ItemState.DEAD]
        if alive:
            raise Violation("Z2 comes to rest", f"nobody finishes {alive}")
