"""A partition that this broker owns: its chain of ledgers, the last of which this broker writes.

| state | becomes | when |
|---|---|---|
| stuck | serving | `opening` has recovered the last ledger and begun the next one, under the same claim |
| serving | stuck | an entry was not acknowledged in time, the writer stopped, or the next ledger could not be begun |
| serving, stuck | gone | the claim or the lease was lost, the topic was deleted, or the broker stops |

A partition begins as stuck. A stuck partition refuses appends. It answers reads of confirmed entries, unless it is
being opened for the first time.

Offsets are assigned before their entries are confirmed; readers get only confirmed entries (C4). An entry that failed
keeps its offset: the partition accepts no appends until its ledger has been recovered. A retry of a batch that is not
confirmed yet is not stored again: `Producers.place` finds the batch, and the retry waits for the same confirmation.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pxrs.cluster.broker.beginning import Claim, has_enough, next_ledger, remove_ledgers
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.entries import STATE_ENTRY, Entry, encode_entry, offset_of, state_entry, within
from pxrs.cluster.broker.index import Indexed, LedgerIndex
from pxrs.cluster.broker.opened import NodeCount, Opened, Ticket, counts, fresh
from pxrs.cluster.broker.recalling import Origins, Recalled, Span, Unread, closed_spans
from pxrs.cluster.broker.retaining import Piece, keep_from
from pxrs.cluster.broker.writing import LedgerShell
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.troubles import NODES, OTHER, Reason
from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    OffsetOutOfRange,
    OffsetTrimmed,
    PartitionMoved,
    PartitionUnavailable,
    PxrsError,
    SequenceGap,
    UnknownProducer,
)
from pxrs.limited_log import LimitedLog
from pxrs.log.batch import Batch, place_id
from pxrs.log.contract import Append, Bounds
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, StoredAt
from pxrs.log.producers import SILENT_S_MAX, Incoming, Producers, named
from pxrs.waiting import Subscribers, limit_until, seconds_left

_logger = logging.getLogger(__name__)
_log: Final = LimitedLog(_logger, records_max=1)

RECALLS_MAX: Final = 8
"""How often one append reads stored entries, to find out whether a producer unknown to `Producers` has stored batches
here. Each producer of the append may need a read; entries that are stored in the meantime are mostly cached."""
CLOSE_S: Final = 2.0
"""How long `close_ledger` waits for a ledger to be closed."""


# Over the limit: the calls of TopicLog for one partition, and its opening and closing, share one lock and its fields.
class OwnedPartition:
    """Threads share it."""

    def __init__(
        self, broker: Broker, topic: TopicRecord, partition: int, claim: Claim, subscribers: Subscribers
    ) -> None:
        self.topic, self.partition = topic, partition
        self.name = f"{topic.topic.name}/{partition}"
        self._broker, self._subscribers = broker, subscribers
        self.place = place_id(topic.topic.id, partition)
        self.incarnation = broker.membership.incarnation
        self.claim = claim
        self.lock = threading.RLock()
        """Guards the fields below, and the writer."""
        self._changed = threading.Condition(self.lock)
        self._recent = broker.recent.partition()
        self._gone: PxrsError | None = None
        self._stuck: PxrsError | None = PartitionUnavailable(self.name, "it is being opened")
        self.reason: Reason | None = None
        """Why the partition is stuck, as the attempts to open it tell; None while it serves, and before they do."""
        self._generation = 0
        self._chain: list[LedgerRecord] = []
        self._kept_from = 0
        """The number of the first ledger that `trim` has not removed."""
        self.counted: Mapping[str, NodeCount] = {}
        """By storage node: what was known of it before the records of the chain were read. Replaced, never changed."""
        self._writer: LedgerShell | None = None
        self._index = LedgerIndex()
        """The confirmed entries of the ledger that is being written."""
        self._producers = Producers()
        self._pending: deque[Entry] = deque()
        """The unconfirmed entries, in order."""
        self._pending_bytes = 0
        self._next = 0
        """The offset of the next message that is appended."""
        self._end = 0
        """The offset after the last confirmed message."""
        self._is_rolling = False

    # Opening and giving up.

    @property
    def epoch(self) -> int:
        return self.claim.owner.epoch

    def begin_next(self, base: int, claim: Claim) -> tuple[LedgerShell, Claim]:
        """Create the next ledger, which begins at the offset `base`, and its writer. Returns the claim as that has
        changed it. claim: read before the caller looked which ledger is the partition's last one. If a roll and an
        opening begin a ledger at the same time, one of them has an older claim by then, and raises PartitionMoved.
        Raises as `next_ledger`."""
        begun = next_ledger(self._broker, self.topic, self.partition, claim, base)
        writer = LedgerShell(
            self._broker, self.topic, begun.record, begun.version, self._changed, self._confirmed, self._stopped
        )
        return writer, begun.claim

    def _stopped(self, writer: LedgerShell, why: str) -> None:
        if writer is self._writer and self._stuck is None and self._gone is None:
            _logger.warning("ledger %s will be recovered, because its writer stopped: %s", writer.record.id, why)
            self._stuck = PartitionUnavailable(self.name, f"its ledger is being recovered, its writer stopped: {why}")
            self._drop_pending()
            self._changed.notify_all()
            self._broker.view.look_again()

    def check_end(self, closed: Sequence[LedgerRecord]) -> None:
        """Raise PartitionUnavailable if these ledgers, all of the partition, end before what was confirmed here, unless
        an operator has decided to go on without the nodes that have the rest (C6)."""
        end = (closed[-1].end or 0) if closed else 0
        with self.lock:
            if end >= self._end or self._abandoned(closed):
                return
            why = f"it was recovered up to offset {end}, but offsets up to {self._end} had been confirmed"
        _log.log(self.name, logging.ERROR, "%s is not served: %s", self.name, why)
        raise PartitionUnavailable(self.name, why)

    def _abandoned(self, closed: Sequence[LedgerRecord]) -> LedgerRecord | None:
        """Under the lock: the ledger that an operator has decided to close without some of its nodes, from the last one
        on that was written here."""
        first = 0 if self._writer is None else self._writer.record.number
        return next((record for record in closed if record.number >= first and record.abandoned), None)

    def note_counts(self, before: Mapping[str, NodeCount], now: Mapping[str, NodeCount]) -> None:
        """Note that the records of the chain were read again when the nodes had the counts `now`. before: `counted` as
        it was before that. If it was replaced meanwhile, nothing is noted, and the records are read once more."""
        with self.lock:
            if self.counted is before:
                self.counted = {**before, **now}

    def serve(self, opened: Opened) -> None:
        """Serve what was opened, unless the partition was given up in the meantime."""
        with self.lock:
            if self._gone is not None:  # it was given up while it was being opened
                opened.writer.stop()
                return
            self._generation += 1
            self.claim = opened.claim
            # `trim` may have removed ledgers since the chain was read.
            self._chain = [record for record in opened.chain if record.number >= self._kept_from]
            self.counted = opened.counted
            self._producers = opened.producers
            self._drop_pending()
            base = opened.writer.record.base
            if base < self._end:
                self._tell_lost(base, opened.chain)
            if base != self._end or self._generation == 1:
                self._recent.forget()  # recovered entries are not cached, and the cache must have no gap
            self._next = self._end = base
            self._begin_ledger(opened.writer)
            self._stuck = self.reason = None
            self._is_rolling = False
            self._changed.notify_all()
        self._subscribers.wake((self.partition,))

    def tell_why(self, reason: Reason) -> None:
        """Have the errors of further appends tell why the partition could not be opened."""
        with self.lock:
            if self._stuck is not None:
                self._stuck, self.reason = PartitionUnavailable(self.name, reason.with_advice), reason

    def _tell_lost(self, base: int, closed: Sequence[LedgerRecord]) -> None:
        """Under the lock. `check_end` has found that an operator has decided it."""
        abandoned = self._abandoned(closed)
        assert abandoned is not None
        _logger.error(
            "%s: the confirmed messages with the offsets %d to %d are lost, because an operator abandoned storage "
            "nodes of ledger %s (%s); the next messages reuse these offsets",
            self.name,
            base,
            self._end - 1,
            abandoned.id,
            ", ".join(abandoned.abandoned),
        )

    def _begin_ledger(self, writer: LedgerShell) -> None:
        """Under the lock: append to this ledger from now on. Entry 0 is the producers' state (C3)."""
        self._writer, self._index = writer, LedgerIndex()
        self._producers.forget_silent(self._broker.clock.wall_time_us() / 1e6 - SILENT_S_MAX)
        entry = state_entry(self._producers, self._next, self._broker.clock.wall_time_us())
        self._add_pending(entry)
        writer.append(entry)

    def _add_pending(self, entry: Entry) -> None:
        """Under the lock."""
        self._pending.append(entry)
        self._pending_bytes += entry.size
        self._broker.room.add(entry.size)

    def _drop_pending(self) -> None:
        """Under the lock: the writer has stopped, and confirms nothing more."""
        dropped, self._pending_bytes = self._pending_bytes, 0
        self._pending.clear()
        self._broker.room.give_back(dropped)

    def give_up(self, why: PxrsError) -> None:
        """Stop serving the partition for good. why: the error that further calls raise."""
        with self.lock:
            self._gone = self._gone or why
            writer, self._writer = self._writer, None
            self._drop_pending()
            self._changed.notify_all()
            if writer is not None:
                writer.stop()
        self._recent.forget()
        self._subscribers.wake((self.partition,))

    @property
    def is_stuck(self) -> bool:
        return self._stuck is not None and self._gone is None

    @property
    def is_degraded(self) -> bool:
        """Whether new entries get fewer than Qw copies, because there are too few storage nodes."""
        writer = self._writer
        return writer is not None and writer.is_degraded

    @property
    def why_not(self) -> PxrsError | None:
        """Why the partition does not serve now; None if it does."""
        return self._gone or self._stuck

    @property
    def why_unserved(self) -> Reason | None:
        """Why clients cannot use the partition; None if they can. A partition whose ledger has begun, and whose storage
        nodes do not acknowledge the first entry, does not serve: it would count as opened again and again."""
        why, index, writer = self.why_not, self._index, self._writer
        if why is not None:
            text = why.why if isinstance(why, PartitionUnavailable) else f"{why}"
            return self.reason or Reason(OTHER, text)
        if len(index) or writer is None:
            return None
        return Reason(NODES, f"too few storage nodes have acknowledged the first entry of ledger {writer.record.id}")

    def confirmed_of(self, ledger: str) -> int:
        """The last entry of a ledger that this partition has confirmed; -1 if it has not written the ledger."""
        with self.lock:
            writer = self._writer
            return writer.confirmed if writer is not None and writer.record.id == ledger else -1

    def get_stuck(self, why: str, generation: int | None = None) -> None:
        """Stop the writer. Appends fail until the ledger is recovered. Idempotent.

        generation: the generation that the caller has used; if the partition was opened again since, nothing
        happens."""
        with self.lock:
            if generation not in (None, self._generation):
                return
            if self._stuck is None:
                self._stuck = PartitionUnavailable(self.name, why)
            if self._writer is not None:
                self._writer.stop()
            self._drop_pending()
            self._changed.notify_all()
        self._broker.view.look_again()

    def check_kept(self) -> None:
        """Raise an error if the partition was given up."""
        if self._gone is not None:
            raise fresh(self._gone)

    def _check(self) -> None:
        """Raise an error if this broker may not answer reads (C4). If its lease has expired, another broker may have
        claimed the partition and confirmed more entries."""
        self.check_kept()
        if self._broker.membership.lease is None or self._broker.membership.incarnation != self.incarnation:
            raise PartitionMoved(f"{self.name}: the lease of this broker has ended")
        if self._generation == 0:
            why = "" if self.reason is None else f", so far without success: {self.reason.with_advice}"
            raise PartitionMoved(f"{self.name}: the partition is being opened{why}")

    @property
    def chain(self) -> Sequence[LedgerRecord]:
        """The closed ledgers. Each change replaces the list, so that callers can compare it by identity."""
        return self._chain

    def repaired(self, record: LedgerRecord) -> None:
        """A repair has changed the record of a closed ledger: other nodes have its copies now."""
        with self.lock:
            self._chain = [record if each.number == record.number else each for each in self._chain]

    def look_again(self, nodes: Collection[str], before: Mapping[str, NodeCount]) -> None:
        """Have `Repairs` read the records of the chain again if one of these nodes may have changed one since. before:
        the counts of the nodes from before a record was written that the chain has now."""
        now = counts(self._broker.view.seen.alive)
        if any(now.get(node) != before.get(node) for node in nodes):
            with self.lock:
                self.counted = {}

    # Reading.

    def bounds(self) -> Bounds:
        with self.lock:
            self._check()
            return Bounds(self._start, self._end)

    @property
    def _start(self) -> int:
        return self._chain[0].base if self._chain else self._writer.record.base if self._writer else self._end

    def read(self, offset: int, max_bytes: int) -> list[Batch]:
        with self.lock:
            self._check()
            if offset > self._end:
                raise OffsetOutOfRange(self.name, offset, self._end)
            if offset < self._start:
                raise OffsetTrimmed(self.name, offset, self._start)
            if offset == self._end:
                return []
            kept = self._recent.read(offset, max_bytes)
            if kept is None:
                record, index = self._ledger_at(offset)
                if index is not None:  # under the lock: the writer's confirmations add entries to this index
                    first, last = index.span(offset, max_bytes)
        if kept is not None:
            return within(kept, offset, max_bytes)
        if index is None:
            first, last = self._broker.reader.index(record).span(offset, max_bytes)
        found = self._broker.reader.entries(record, first, last, max_bytes, self.place)
        with self.lock:
            self._check()
            if offset < self._start:  # retention has removed it during the read
                raise OffsetTrimmed(self.name, offset, self._start)
        return within((frame for entry in found for frame in entry.frames), offset, max_bytes)

    def _ledger_at(self, offset: int) -> tuple[LedgerRecord, LedgerIndex | None]:
        """The ledger that contains this offset, and its index if it is the ledger that is being written. Under the
        lock."""
        if self._writer is not None and offset >= self._writer.record.base:
            return self._writer.record, self._index
        at = bisect_right([record.base for record in self._chain], offset) - 1
        while self._chain[at].end == self._chain[at].base and at + 1 < len(self._chain):
            at += 1  # skip ledgers without messages
        return self._chain[at], None

    def offset_at(self, timestamp: int) -> int:
        with self.lock:
            self._check()
            ledgers: list[tuple[LedgerRecord, LedgerIndex | None]] = [(record, None) for record in self._chain]
            if self._writer is not None:
                ledgers.append((self._writer.record, self._index))
            end = self._end
        for record, known in ledgers:
            index = known or self._broker.reader.index(record)
            with self.lock:
                number = next(index.not_before(timestamp), None)
            if number is None:
                continue
            entry = self._broker.reader.entries(record, number, number, 0, self.place)[0]
            found = offset_of(entry.frames, timestamp)
            if found is not None:
                return found
        return end

    # Appending.

    def begin(self, batches: Sequence[Append]) -> Ticket | list[Outcome]:
        """Assign offsets to the batches and send them to the nodes. Returns a ticket for `wait`, or the outcomes if the
        batches are refused."""
        recalled: dict[int, Recalled] = {}
        try:
            for _ in range(RECALLS_MAX):
                try:
                    return self._place_in_room(batches, recalled)
                except Unread as unread:
                    recalled[unread.since] = unread.read(self._broker.reader, self.place)
            raise PartitionUnavailable(self.name, "the search for a producer's batches did not finish: try again")
        except (UnknownProducer, SequenceGap) as error:
            return [NotStored(named(error, self.name))] * len(batches)
        except AppendFailed as error:
            return [NotStored(error)] * len(batches)

    def _place_in_room(self, batches: Sequence[Append], recalled: dict[int, Recalled]) -> Ticket:
        """Wait until the writer and the broker can accept an entry, then place the batches. Begin the next ledger if
        this one is full. Raises PartitionMoved, PartitionUnavailable, what `_place` raises."""
        until = time.monotonic() + seconds_left(self._broker.settings.append_s)
        room, size = self._broker.room, sum(batch.payload.frame_bytes for batch in batches)
        while True:
            with self.lock:
                self._wait_for_room(until)
                if room.take(self._pending_bytes, size):
                    try:
                        return self._place(batches, recalled)
                    finally:
                        room.give_back(size)  # `_place` has counted the entry, if there is a new one
            # Without the lock: confirmations in other partitions make room, and this partition's own need its lock.
            if not room.wait(lambda: self._pending_bytes, until):
                raise PartitionUnavailable(self.name, "earlier appends to this broker are not acknowledged yet")

    def _wait_for_room(self, until: float) -> None:
        """Wait until this partition has room. Under the lock. Raises PartitionMoved, PartitionUnavailable."""
        while True:
            self._check()
            if self._stuck is not None:
                raise fresh(self._stuck)
            assert self._writer is not None
            if self._is_full() and not self._is_rolling:
                self._roll()
                continue
            if not self._is_rolling and self._pending_bytes < self._broker.settings.pending_bytes_max:
                return
            if not self._changed.wait(until - time.monotonic()):
                raise PartitionUnavailable(self.name, "too many earlier appends are not acknowledged by storage nodes")

    def _place(self, batches: Sequence[Append], recalled: dict[int, Recalled]) -> Ticket:
        now = self._broker.clock.wall_time_us()
        incoming = [Incoming(each.origin, each.payload.rows, each.since) for each in batches]
        since = functools.partial(self._origins_since, recalled=recalled)
        incoming = self._producers.recall(incoming, self._next, since, now / 1e6)
        placed = self._producers.place(incoming, self._next)
        new = [(batch, at.offset) for batch, at in zip(batches, placed, strict=True) if at.is_new]
        # An entry is confirmed as a whole, so a batch is confirmed if its first row is. A duplicate may have another
        # length.
        needed = max(at.offset for at in placed) + 1
        if new:
            assert self._writer is not None
            entry = encode_entry(new, self.place, now)
            self._add_pending(entry)
            self._next = entry.next_offset
            for batch, offset in new:
                self._producers.note(batch.origin, offset, now / 1e6)
            try:
                self._writer.append(entry)
            except Exception:  # some nodes may have the entry: only a recovery can find out
                _logger.exception("%s: an entry could not be sent", self.name)
                self.get_stuck("an entry could not be sent to its storage nodes")
        return Ticket(placed, needed, self._generation, time.monotonic())

    def _origins_since(self, since: int, recalled: dict[int, Recalled]) -> Origins | None:
        """The origins of the batches from this offset on, for `Producers.recall`; None if retention has removed some of
        them. Called under the lock. Raises Unread if they must be read from storage nodes first."""
        if since < self._start:
            return None
        known = recalled.get(since)
        confirmed = None
        if known is not None and known.generation == self._generation:
            confirmed = self._recent.entries_from(known.upto) if known.upto < self._end else []
        if known is None or confirmed is None:
            spans = closed_spans(self._chain, since)
            if self._writer is not None and len(self._index):
                first = max(STATE_ENTRY + 1, self._index.find(since))
                spans.append(Span(self._writer.record, first, len(self._index) - 1))
            raise Unread(since, self._generation, self._end, spans)
        return [*known.origins, *(each for entry in (*confirmed, *self._pending) for each in entry.origins(self.place))]

    def wait(self, ticket: Ticket) -> list[Outcome]:
        """Wait for the outcomes of an append."""
        overdue = ticket.began_at + self._broker.settings.append_s
        until = min(overdue, limit_until())
        with self.lock:
            while ticket.needed > self._end and ticket.generation == self._generation:
                if self.why_not is not None or not self._changed.wait(until - time.monotonic()):
                    break
            if ticket.needed <= self._end and ticket.generation == self._generation:
                return [StoredAt(at.offset, not at.is_new) for at in ticket.placed]
            why = self.why_not
        if why is None and time.monotonic() >= overdue:  # and not only the caller's limit is over
            self.get_stuck("too few storage nodes acknowledged an append in time", ticket.generation)
        unknown = AppendUnknown(
            f"{self.name}: {why or 'too few storage nodes acknowledged it in time'}; the batch may have been stored"
        )
        return [MaybeStored(unknown)] * len(ticket.placed)

    def _confirmed(self, writer: LedgerShell, count: int) -> None:
        """The first `count` pending entries are confirmed. The writer calls this under the lock."""
        if writer is not self._writer:
            return
        before = self._pending_bytes
        for _ in range(count):
            entry = self._pending.popleft()
            self._pending_bytes -= entry.size
            self._index.add(Indexed(entry.offset, entry.rows, entry.size, entry.last_timestamp, entry.stored_at))
            if entry.rows:
                self._recent.add(entry)
                self._end = entry.next_offset
        self._broker.room.give_back(before - self._pending_bytes)
        self._changed.notify_all()
        self._subscribers.wake((self.partition,))

    # Rolling: the next ledger begins.

    def _is_full(self) -> bool:
        """Under the lock: whether the next entry should go to a new ledger."""
        assert self._writer is not None
        if len(self._index) + len(self._pending) < 2:  # the ledger has no messages yet
            return False
        return self._writer.is_full(self.topic.topic)

    def _roll(self) -> None:
        """Under the lock: have another thread close this ledger and begin the next one."""
        self._is_rolling = True
        self._broker.rollers.submit(self._roll_apart, self._generation)

    def _roll_apart(self, generation: int) -> None:
        with self.lock:
            full = self._writer
            if full is None or generation != self._generation or self._stuck is not None:
                return  # given up or recovered in the meantime, or about to be recovered
            claim, counted = self.claim, counts(self._broker.view.seen.alive)
        try:
            closed = full.close(time.monotonic() + self._broker.settings.append_s)
            assert closed.end is not None
            writer, claim = self.begin_next(closed.end, claim)
        except Exception as error:  # noqa: BLE001 - opening the partition again reports the problem
            self.get_stuck(f"the next ledger could not be started: {error}", generation)
            return
        with self.lock:
            if generation != self._generation or self.why_not is not None:
                writer.stop()  # an opening recovers its ledger
                return
            self.claim, self._chain = claim, [*self._chain, closed]
            self.look_again(closed.named, counted)
            self._begin_ledger(writer)
            self._is_rolling = False
            self._changed.notify_all()

    def tend(self, live: Collection[str], lacking: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        """Offer new storage nodes to the writer, and begin the next ledger if this one lacks copies, whether or not
        clients append: only closed ledgers are repaired. `Repairs` calls this. live: as for `LedgerShell.is_short`.
        lacking: by node, the ledgers of which it may have lost entries."""
        with self.lock:
            if self._writer is None or self.why_not is not None or self._is_rolling:
                return
            for node, ledgers in lacking.items():
                if self._writer.record.id in ledgers:
                    self._writer.doubt(node)
            self._writer.offer_spares()
            if self._writer.is_short(live) and has_enough(self.topic.quorum, self._broker.ensemble(self.topic)):
                self._roll()

    def close_ledger(self) -> None:
        """Close the ledger before the partition is released, so that the next owner need not recover it."""
        with self.lock:
            self._changed.wait_for(lambda: not self._is_rolling or self.why_not is not None, CLOSE_S)
            writer = self._writer if self._stuck is None and not self._is_rolling else None
            self._is_rolling = True
        if writer is not None:
            try:
                writer.close(time.monotonic() + CLOSE_S)
            except PxrsError as error:
                _logger.info("%s: %s; the next owner will recover the ledger", self.name, error)

    # Retention.

    def expired(self, now: int, unread: int | None) -> int | None:
        """The new start of the partition according to the topic's retention; None if nothing may be removed.

        unread: everything from this offset on is kept; None if there is no such bound."""
        with self.lock:
            self._check()
            chain, index, end = list(self._chain), self._index, self._end
            stored_at, size = index.stored_at, index.bytes
        last = None if stored_at is None else Piece(end, stored_at, size)
        start = keep_from(self.topic.topic, self._start, [Piece.of(record) for record in chain], last, now, unread)
        return start if start > self._start else None

    def trim(self, start: int) -> int | None:
        """Remove the ledgers that end at or before the offset `start`. Returns the new start; None if nothing was
        removed. Raises PartitionMoved, PartitionUnavailable, and what the registry raises."""
        with self.lock:
            self._check()
            if start >= self._end and self._index.stored_at is not None and not self._pending and not self._is_rolling:
                self._roll()
            until = time.monotonic() + self._broker.settings.append_s
            while self._is_rolling or (not len(self._index) and self.why_not is None):
                if self.why_not is not None or not self._changed.wait(until - time.monotonic()):
                    break
            if self.why_not is not None:
                raise fresh(self.why_not)
            if not len(self._index):  # entry 0, the producers' state, of the remaining ledger is not confirmed (C3)
                return None
            gone = [record for record in self._chain if (record.end or 0) <= start]
        for numbers in remove_ledgers(self._broker, lambda: self.claim, gone):
            with self.lock:
                self._chain = [record for record in self._chain if record.number not in numbers]
                self._kept_from = max(self._kept_from, *(number + 1 for number in numbers))
        for record in gone:
            self._broker.reader.forget(record.id)
        return self.bounds().start if gone else None
