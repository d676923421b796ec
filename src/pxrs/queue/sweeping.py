"""What the sweeper of a queue does: return the items of takers that are gone, and make delayed items ready.

Of all processes that take from a queue, one is its sweeper, by an ephemeral key. That only spares the others the work.
Any thread of any process may run the procedures here at any time, also two at once, or one that slept for an hour:

- Every move expects the item's key in the version that was read, so that an item is moved once.
- Items of a taker are returned only by commits that expect the taker's key ABSENT. The items are read before the
  takers: a taker's key is there before the taker takes anything. A taker never gets its key again, so one that is found
  absent after its items were read is gone for good.
- FIFO queues: the turn is freed by the commit that returns the last item of the dead taker, expecting the turn as it
  was read. The items are read again after the taker was found absent, because it may have taken more items in between.

The procedures are generators (`pxrs.registry.steps`): no thread, no registry, no clock. What is damaged is logged and
left where it is; it does not hold up the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from pxrs.errors import Conflict, RegistryCorrupt
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.failures import Failure
from pxrs.queue import moves
from pxrs.queue.counts import count_given_back
from pxrs.queue.moves import Held
from pxrs.queue.protocol import move_all, record_dead
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import TAKERS, Queue, Record, Turn, taker_in, time_in
from pxrs.registry.contract import ABSENT, Entry, Limits
from pxrs.registry.steps import Get, Scan, Steps, Write

_logger = logging.getLogger(__name__)

PROMOTE_ITEMS: Final = 100
"""How many delayed items are read at a time."""
ITEMS_MAX: Final = 100
"""How many items the event of returned items names."""
TAKER_GONE: Final = "the process that had taken it died, or lost its lease"


class InFlight(NamedTuple):
    """What was in flight in a queue when it was read."""

    queue: Queue
    items: list[Entry]
    turn: Entry | None
    """None: the queue is not FIFO, or nobody has ever taken from it."""


def claim_sweeper(queue: Queue, taker: str, versions: PutVersions) -> Steps[bool | None]:
    """Become the queue's sweeper if it has none. Whether this taker is the sweeper; None: the queue was deleted."""
    settings: Entry | None = yield Get(queue.key)
    if settings is None or Queue.load(settings.key, settings.value).id != queue.id:
        return None
    expect = {queue.sweeper: ABSENT, queue.existence: (yield from versions.existence(queue))}
    try:
        yield Write(expect, ephemeral={queue.sweeper: taker.encode()})
    except Conflict:
        found: Entry | None = yield Get(queue.sweeper)
        return found is not None and found.value == taker.encode()  # it is, if the reply to the last try was lost
    return True


def read_takers() -> Steps[set[str]]:
    """The takers whose lease lives."""
    found: list[Entry] = yield Scan(TAKERS)
    return {entry.key[len(TAKERS) :] for entry in found}


@dataclass
class Sweeping:
    """The sweeper's procedures, with what they need of their process."""

    limits: Limits
    wall_time: Callable[[], float]
    """Seconds since 1970, on the clock by which delays are counted."""
    random: Callable[[], float]
    """Numbers from 0 to 1, for the backoffs."""
    recorder: Recorder = LOGGED_ONLY

    def return_items_of_dead(self, queues: Sequence[Queue]) -> Steps[set[str] | None]:
        """Return the items of these queues whose takers are gone. The takers that live; None if they were not read,
        because nothing is in flight."""
        read: list[InFlight] = []
        for queue in queues:
            items: list[Entry] = yield Scan(queue.inflight)
            turn: Entry | None = (yield Get(queue.turn)) if queue.is_fifo else None
            read.append(InFlight(queue, items, turn))
        if not any(each.items or each.turn is not None for each in read):
            return None
        alive = yield from read_takers()
        for each in read:
            with left_where_it_is(each.queue):
                yield from self._return_from(each, alive)
        return alive

    def _return_from(self, read: InFlight, alive: set[str]) -> Steps[None]:
        queue, items, turn = read
        holder = "" if turn is None else Turn.load(turn.key, turn.value).holder
        takers = {taker_in(entry.key) for entry in items} | ({holder} if holder else set())
        dead = takers - alive
        if queue.is_fifo and dead:
            items = yield Scan(queue.inflight)  # with what they took after the first scan
        for taker in sorted(dead):
            held = [entry for entry in items if taker_in(entry.key) == taker]
            version = turn.version if turn is not None and holder == taker else None
            try:
                yield from self._return_items_of(queue, taker, held, version)
            except Conflict:
                continue  # another sweeper has freed the turn

    def _return_items_of(self, queue: Queue, taker: str, entries: list[Entry], turn_version: int | None) -> Steps[None]:
        held, now = list(_undamaged(queue, entries)), self.wall_time()
        returned, last = moves.give_back_all(queue, held, Failure(TAKER_GONE), turn_version, self.random, now)
        done = yield from move_all(returned, self.limits, expect={f"{TAKERS}{taker}": ABSENT}, last=last)
        count_given_back(queue, returned[:done])
        if done:  # otherwise another sweeper was faster
            items = [record.id for _, _, record in held]
            place = {"queue": queue.name, "queue_id": queue.id, "taker": taker}
            self.recorder.record("item.returned", **place, count=done, items=items[:ITEMS_MAX])
            record_dead(self.recorder, queue, held, returned, Failure(TAKER_GONE))

    def end_delays(self, queue: Queue) -> Steps[float | None]:
        """Make ready the delayed items that are due. When the next one is, in seconds since 1970; None: there is
        none."""
        after: str | None = None
        while entries := (yield Scan(queue.delayed, after, PROMOTE_ITEMS)):
            now = self.wall_time()
            due: list[moves.Move] = []
            for entry, due_at in _due_times(queue, entries):
                if due_at > now:
                    yield from move_all(due, self.limits)
                    return due_at
                due.append(moves.make_ready(queue, entry))
            yield from move_all(due, self.limits)
            after = entries[-1].key  # and not from the start: a damaged item stays where it is
        return None


@contextmanager
def left_where_it_is(queue: Queue) -> Iterator[None]:
    """Log what is damaged in one queue, so that the others are looked after all the same."""
    try:
        yield
    except RegistryCorrupt as error:
        _logger.error("queue %s: %s; the damaged record is skipped", queue.name, error)


def _undamaged(queue: Queue, entries: Iterable[Entry]) -> Iterator[Held]:
    for entry in entries:
        with left_where_it_is(queue):
            yield entry.key, entry.version, Record.load(entry.key, entry.value)


def _due_times(queue: Queue, entries: Iterable[Entry]) -> Iterator[tuple[Entry, float]]:
    """When each item is due, without those that are damaged."""
    for entry in entries:
        with left_where_it_is(queue):
            Record.load(entry.key, entry.value)
            yield entry, time_in(entry.key)
