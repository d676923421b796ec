"""What a transaction says to the registry, step by step: look at the head of a queue, take, commit, give back.

The procedures are generators (`pxrs.registry.steps`): no thread, no registry, no clock. `Transaction` and `Head` run
them on a registry; the simulator (`pxrs.testing.simulator`) runs them on a simulated one, stops them between any two
operations, loses replies and applies writes late. What a sweeper does is in `sweeping`.

Rules, each with a mutation that the simulator catches (tests/simulation/test_queue_mutations.py), or, where the
schedule is too rare for it, a test of that schedule (tests/unit/test_queue_protocol.py):
- A take moves the item and counts the delivery in one commit, under the taker's lease, expecting the item's key in the
  version that was read (Q1).
- A transaction's commit deletes the keys of all items that it took, expecting each in the version that the take wrote
  (Q2), writes all items that it puts, and puts "committed" into its slot: one commit, under the taker's lease.
- After a lost reply to a take, the first of its items is written again in its place: then the take, which expects that
  key as it was, can be applied no more. If that write is refused, the take was applied or another one was (R5): then
  the turn is read, and after it the items.
- An item that comes back gets a name that no key had before (R4): see `records`.
- FIFO queues: a transaction's first take expects the turn free and writes its taker into it, and its later takes expect
  it as written. The end of the transaction frees the turn, with the commit that removes or returns the last item, and
  after every take of the transaction is resolved. A take takes the first item: see `read_head`.

Nothing of a transaction is in the registry but the items that it has taken, and the turn of FIFO queues."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pxrs.errors import Conflict, OutcomeUnknown, PxrsError, RegistryCorrupt, RegistryUnavailable
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.failures import Failure
from pxrs.queue import moves
from pxrs.queue.counts import by_queue, count_given_back
from pxrs.queue.items import Put, Taken
from pxrs.queue.moves import Changes, Held, Move, Take, in_parts
from pxrs.queue.outcomes import RESOLVE_ATTEMPTS, Slot, dump_outcome
from pxrs.queue.puts import PutVersions, add_puts
from pxrs.queue.records import Queue, Turn
from pxrs.registry.contract import ABSENT, Entry, Limits
from pxrs.registry.steps import Get, Scan, Steps, Write

_logger = logging.getLogger(__name__)

Turns = dict[str, tuple[Queue, int]]
"""By the id of a FIFO queue: the queue, and the version in which a transaction has written its turn."""


class TurnRead(NamedTuple):
    """The turn of a FIFO queue as it was read."""

    version: int
    """ABSENT: nobody has ever taken from the queue."""
    turn: Turn


class PendingTake(NamedTuple):
    """A take that was sent, and whose outcome this process does not know."""

    queue: Queue
    planned: list[Take]
    writes_turn: bool
    """Whether the take was to write the turn of a FIFO queue: the first take of a transaction does."""


# The head of a queue.


def read_head(queue: Queue, limit: int) -> Steps[list[Entry]]:
    """The first ready items. In a FIFO queue no earlier one is missing.

    A scan may see an item and miss an earlier one that was put while the scan went on (R1). So a FIFO queue is scanned
    twice: all items up to the last one that the first scan saw were there before the second scan began."""
    found: list[Entry] = yield Scan(queue.ready, None, limit)
    if queue.is_fifo and found:
        last = found[-1].key
        again: list[Entry] = yield Scan(queue.ready, None, limit)
        found = [entry for entry in again if entry.key <= last]
    return found


def read_turn(queue: Queue) -> Steps[TurnRead]:
    entry: Entry | None = yield Get(queue.turn)
    return TurnRead(ABSENT, Turn()) if entry is None else TurnRead(entry.version, Turn.load(entry.key, entry.value))


# Moves.


def move_all(
    planned: Sequence[Move],
    limits: Limits,
    *,
    expect: Mapping[str, int] | None = None,
    last: tuple[Mapping[str, int], Mapping[str, bytes]] | None = None,
) -> Steps[int]:
    """Make as many of the moves as can be made, several in a commit. Returns how many that were.

    expect: what every commit has to expect besides; if that does not hold, Conflict is raised.
    last:   what the last commit has to expect and to put besides, the same.
    An item that somebody else has moved meanwhile is left alone. So all of it may be done again after a lost reply."""
    expect = expect or {}
    done = 0
    parts = list(in_parts(planned, limits)) or [[]]
    for number, part in enumerate(parts):
        more, put = last if last is not None and number == len(parts) - 1 else ({}, {})
        while part or put:
            changes = Changes.of(part)
            fixed = {**expect, **more}
            try:
                yield Write({**changes.expect, **fixed}, {**changes.put, **put}, is_leased=False, delete=changes.delete)
                done += len(part)
                break
            except Conflict as conflict:
                differing = set(conflict.keys)
                if differing & fixed.keys():
                    raise
                part = [move for move in part if not differing & {move.source, move.target}]
    return done


class InHand(NamedTuple):
    """What a transaction has taken, or may have."""

    taken: list[Taken]
    turns: Turns
    unresolved: list[PendingTake]
    """Pending takes from FIFO queues whose turn the transaction has. They must be resolved before the turn is freed: an
    item that one of them took would be overtaken otherwise."""


class Reason(NamedTuple):
    """Why items are returned, and what decides where they go."""

    failure: Failure
    now: Callable[[], float]
    """Seconds since 1970, on the clock by which delays are counted."""
    random: Callable[[], float]
    """Numbers from 0 to 1, for the backoffs."""
    recorder: Recorder = LOGGED_ONLY
    """Told of the items that became dead letters."""


def give_back(in_hand: InHand, reason: Reason, limits: Limits) -> Steps[None]:
    """Return what a transaction has taken: the items of each queue together, and the turn with the last of them. It may
    be done again after a lost reply."""
    taken, turns, unresolved = in_hand
    for pending in unresolved:
        yield from return_pending(pending, reason, limits)
    now = reason.now()
    queues = {each.queue.id: each.queue for each in taken} | {queue.id: queue for queue, _ in turns.values()}
    for queue in queues.values():
        held = [(each.key, each.version, each.record) for each in taken if each.queue.id == queue.id]
        version = turns[queue.id][1] if queue.id in turns else None
        returned, last = moves.give_back_all(queue, held, reason.failure, version, reason.random, now)
        try:
            done = yield from move_all(returned, limits, last=last)
        except Conflict:
            continue  # the turn is not this transaction's any more: a sweeper has returned the items
        count_given_back(queue, returned[:done])
        if done:
            record_dead(reason.recorder, queue, held, returned, reason.failure)


def record_dead(
    recorder: Recorder, queue: Queue, held: Iterable[Held], returned: Iterable[Move], failure: Failure
) -> None:
    """Record the items that have become dead letters. held, returned: items in flight, and the move of each."""
    for (_, _, record), move in zip(held, returned, strict=True):
        if move.target is not None and move.target.startswith(queue.dead):
            place = {"queue": queue.name, "queue_id": queue.id, "item": record.id, "deliveries": record.deliveries}
            recorder.record("item.dead", **place, error=failure.text, error_type=failure.type)


def return_pending(pending: PendingTake, reason: Reason, limits: Limits) -> Steps[None]:
    """Find out whether a pending take was applied, and return what it has taken. It may be done again."""
    queue, planned, _ = pending
    written = yield from resolve_take(pending)
    if written:
        in_hand = InHand(_taken(queue, planned, written), _turns(queue, written), [])
        yield from give_back(in_hand, reason, limits)


# A transaction.


@dataclass
class TransactionProtocol:
    """One transaction. The caller makes one call at a time."""

    id: str
    versions: PutVersions
    limits: Limits
    taken: list[Taken] = field(default_factory=list)
    turns: Turns = field(default_factory=dict)
    """Of the FIFO queues that the transaction has taken from."""
    puts: list[Put] = field(default_factory=list)
    pending: PendingTake | None = None
    """Set before a take is sent, cleared when its outcome is known. Still set after `take` has raised: the take may
    have been applied, or may yet be. Then the caller has to call `put_aside`."""
    unresolved: list[PendingTake] = field(default_factory=list)
    """See `InHand`."""
    put_aside_count: int = 0
    """How many pending takes were put aside. It is part of the keys of items that are taken later: if the same item is
    taken again, whoever resolves the pending take must not mistake that key for the key of the pending take."""

    def plan(self, queue: Queue, entries: Iterable[Entry], taker: str) -> tuple[list[Take], list[Entry]]:
        """As many of the items as one commit can take, and the entries that are damaged. A damaged item of a FIFO queue
        raises RegistryCorrupt: nothing may overtake it."""
        planned, damaged = [], []
        for entry in entries:
            try:
                planned.append(moves.take(queue, entry, taker, self._name))
            except RegistryCorrupt as error:
                if queue.is_fifo:
                    raise
                damaged.append(entry)
                _logger.error("queue %s: %s; the damaged record is skipped", queue.name, error)
        if len(planned) > 1:
            parts = in_parts([each.move for each in planned], self.limits)
            planned = planned[: len(next(parts, []))]
        return planned, damaged

    @property
    def _name(self) -> str:
        """What stands for this transaction in the keys of the items that it takes."""
        return f"{self.id[:12]}.{self.put_aside_count}" if self.put_aside_count else self.id[:12]

    def begin_fifo_take(self, queue: Queue, reason: Reason) -> Steps[TurnRead | None]:
        """What has to be done before the head of a FIFO queue is read for a take: return what earlier takes of this
        transaction have taken whose replies were lost, and read the turn. None: this transaction has the turn.

        The items of such a take are in flight, and so they are not at the head. Without this, the next take would take
        a later item, and the transaction would finish that item first."""
        yield from self.return_unresolved(reason)
        return None if queue.id in self.turns else (yield from read_turn(queue))

    def take(self, queue: Queue, taker: str, planned: list[Take], turn: TurnRead | None) -> Steps[list[Taken]]:
        """Take those of the items that nobody else was faster on; of a FIFO queue all or none.

        turn: of a FIFO queue, what `begin_fifo_take` returned.
        Raises LeaseExpired, and RegistryUnavailable if nothing was taken; OutcomeUnknown with `pending` set."""
        while planned:
            changes = Changes.of(each.move for each in planned)
            if queue.is_fifo:
                self._expect_turn(queue, taker, turn, changes)
            self.pending = PendingTake(queue, planned, queue.turn in changes.put)
            try:
                written = yield Write(changes.expect, changes.put, is_quiet=True, delete=changes.delete)
            except Conflict as conflict:
                self.pending = None
                rest = [each for each in planned if each.move.source not in conflict.keys]
                if queue.is_fifo or len(rest) == len(planned):
                    return []
                planned = rest
                continue
            except OutcomeUnknown:
                written = yield from self._resolve_take(self.pending)
            except PxrsError:
                self.pending = None  # nothing was taken
                raise
            return self._note_taken(queue, planned, written)
        return []

    def _expect_turn(self, queue: Queue, taker: str, turn: TurnRead | None, changes: Changes) -> None:
        if queue.id in self.turns:
            changes.expect[queue.turn] = self.turns[queue.id][1]
        else:
            assert turn is not None
            changes.expect[queue.turn] = turn.version
            changes.put[queue.turn] = Turn(holder=taker).dump()

    def _note_taken(self, queue: Queue, planned: list[Take], written: Mapping[str, int]) -> list[Taken]:
        taken = _taken(queue, planned, written)
        turn = _turns(queue, written)
        all_taken, all_turns = self.taken + taken, self.turns | turn
        # No call between these stores: a KeyboardInterrupt finds the items either pending or taken.
        self.taken, self.turns, self.pending = all_taken, all_turns, None
        return taken

    def _resolve_take(self, pending: PendingTake) -> Steps[dict[str, int]]:
        """After a lost reply: see `resolve_take`. Raises OutcomeUnknown if the registry does not answer."""
        for _ in range(RESOLVE_ATTEMPTS):
            try:
                return (yield from resolve_take(pending))
            except OutcomeUnknown:
                continue
            except RegistryUnavailable as error:
                raise OutcomeUnknown(f"the reply to a take was lost, and then: {error}") from error
        raise OutcomeUnknown("the reply to a take was lost, and so were the replies to the attempts to resolve it")

    def put_aside(self) -> PendingTake | None:
        """The pending take, if `take` has left one. The caller has to run `return_pending` until that returns. A take
        from a FIFO queue whose turn this transaction has is kept here, and None is returned: see `unresolved`."""
        pending, self.pending = self.pending, None
        self.put_aside_count += pending is not None
        if pending is not None and pending.queue.id in self.turns:
            self.unresolved.append(pending)
            return None
        return pending

    @property
    def is_used(self) -> bool:
        """Whether anything was taken or put, or may have been taken."""
        return bool(self.taken or self.puts or self.unresolved)

    @property
    def in_hand(self) -> InHand:
        return InHand(self.taken, self.turns, self.unresolved)

    def return_unresolved(self, reason: Reason) -> Steps[None]:
        """Return what unresolved takes have taken: before a commit, which frees the turns, and before the next take.
        Raises RegistryUnavailable if that cannot be found out: then nothing was committed or taken."""
        while self.unresolved:
            try:
                yield from return_pending(self.unresolved[0], reason, self.limits)
            except OutcomeUnknown as error:
                raise RegistryUnavailable(
                    f"it is not known yet which items an earlier take has taken: {error}"
                ) from error
            del self.unresolved[0]

    def taken_by_queue(self) -> Counter[str]:
        """How many items of each queue the transaction has taken, and not finished. May be called by any thread."""
        return by_queue(list(self.taken))

    @property
    def owned_keys(self) -> set[str]:
        """The keys that nobody else may change as long as the taker lives: a Conflict that names one of them means that
        the transaction has lost its items."""
        return {*(each.key for each in self.taken), *(queue.turn for queue, _ in self.turns.values())}

    def commit(self, slot: Slot, *, now: float, sent_at: float) -> Steps[None]:
        """All of the transaction in one commit.

        now: seconds since 1970, on the clock by which delays are counted. sent_at: seconds since 1970.
        Raises Conflict, LeaseExpired, RegistryUnavailable: nothing was written; and OutcomeUnknown: see `outcomes`."""
        changes = moves.finish(self.taken)
        changes.expect[slot.key] = slot.version
        changes.put[slot.key] = dump_outcome(self.id, "committed", sent_at)
        for queue, version in self.turns.values():
            changes.expect[queue.turn] = version
            changes.put[queue.turn] = Turn().dump()
        numbers = (yield from add_puts(self.puts, self.versions, changes, now)) if self.puts else {}
        is_quiet = not self.puts and not self.turns
        written = yield Write(changes.expect, changes.put, is_quiet=is_quiet, delete=changes.delete)
        slot.version = written[slot.key]
        if numbers:
            self.versions.note(numbers, written)

    def clear(self) -> None:
        """The transaction has ended."""
        self.taken, self.turns, self.puts, self.unresolved = [], {}, [], []


def resolve_take(pending: PendingTake) -> Steps[dict[str, int]]:
    """After a lost reply to a take: the versions of the keys that the take wrote and that are still there. Empty: the
    take was not applied and cannot be applied any more (R5), or all of its items were returned already."""
    queue, planned, writes_turn = pending
    first, before = planned[0].move, planned[0].before
    try:
        # The take expects this key as it was read. Once the key is written again, the take is refused.
        yield Write({first.source: first.version}, {first.source: before}, is_leased=False, is_quiet=True)
        return {}
    except Conflict:
        pass  # the take was applied, or somebody else has moved the item: then the take is refused as well
    # The turn is read before the items. If one of the items is in flight after that, the turn was still this take's at
    # the moment of the read, because it is freed with the last item. Read later, it might be another transaction's.
    turn: Entry | None = (yield Get(queue.turn)) if writes_turn else None
    found: dict[str, int] = {}
    for each in planned:
        entry: Entry | None = yield Get(each.target)
        if entry is not None:
            found[each.target] = entry.version
    if found and turn is not None:
        found[queue.turn] = turn.version
    return found


def _taken(queue: Queue, planned: Iterable[Take], written: Mapping[str, int]) -> list[Taken]:
    return [Taken(queue, each.target, written[each.target], each.record) for each in planned if each.target in written]


def _turns(queue: Queue, written: Mapping[str, int]) -> Turns:
    return {queue.id: (queue, written[queue.turn])} if queue.turn in written else {}
