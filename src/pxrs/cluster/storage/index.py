"""The positions of a storage node's records in its journal, and which of them are live.

`Entries` is the index of one ledger: 64 bytes for each entry, in arrays that are sorted by the entry's number. A writer
adds entries in rising order, so almost every entry is appended to the arrays; an entry that arrives out of order is
inserted. `NodeCore` adds an entry when it accepts it; the entry has no position until it is synced.

`Index` gets every synced record, in the order of positions: those of the existing journal when the node starts, and
then those of each batch. When the node starts, it also passes them to the core. It counts the dead bytes of each
segment, so that segments can be removed or compacted. A record is live until the node no longer needs it:

| record | it is live until |
|---|---|
| ENTRY | compaction writes the entry again at another position, or its ledger is removed |
| FENCE | a higher fence of the ledger is written, or the ledger is removed |
| REMOVED | no segment contains a record that it voids, and the core need not remember it for the partition |
| DOUBT | the doubt ends, or the ledger is removed |
| PROBE | it is written: it is never live |
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from pxrs.cluster.ledgers import EntryHead, LedgerName
from pxrs.cluster.storage.core import (
    DoubtItem,
    FenceItem,
    LedgerState,
    NodeCore,
    RememberItem,
    RemoveItem,
    StoreItem,
)
from pxrs.cluster.storage.format import Kind, Record, record_bytes

UNSYNCED: Final = -1
"""The position of an entry that is not synced yet."""


class Place(NamedTuple):
    """An entry that the node has, and its position."""

    entry: int
    position: int
    """Where its record begins in the journal, or UNSYNCED."""
    offset: int
    rows: int
    size: int
    last_timestamp: int
    stored_at: int
    checksum: int

    @property
    def head(self) -> EntryHead:
        return EntryHead(*self[2:])


_WIDTH: Final = len(Place._fields) - 1
_SIZE: Final = Place._fields.index("size") - 1
"""The place of the size in a row of `Entries._rest`."""
_WRAP: Final = 1 << 64


class Entries:
    """The entries of one ledger: an `EntryIndex` of the core."""

    __slots__ = ("_numbers", "_rest")

    def __init__(self) -> None:
        self._numbers = array("q")
        """The entries' numbers, in rising order."""
        self._rest = array("q")
        """The other fields of each `Place`, entry after entry; the checksum as a signed number."""

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, int) and self._at(entry) is not None

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, entry: int, head: EntryHead) -> None:
        """Add an entry that the index does not contain, without a position."""
        *most, checksum = head
        # Made before anything is changed: a number that does not fit raises OverflowError here.
        row = array("q", (UNSYNCED, *most, checksum - _WRAP if checksum >= _WRAP >> 1 else checksum))
        if not self._numbers or entry > self._numbers[-1]:
            self._numbers.append(entry)
            self._rest.extend(row)
        else:
            at = bisect_left(self._numbers, entry)
            self._numbers.insert(at, entry)
            self._rest[at * _WIDTH : at * _WIDTH] = row

    def checksum(self, entry: int) -> int:
        found = self.find(entry)
        assert found is not None
        return found.checksum

    def after(self, entry: int, limit: int) -> list[int]:
        begin = bisect_right(self._numbers, entry)
        return self._numbers[begin : begin + limit].tolist()

    @property
    def last(self) -> int:
        return self._numbers[-1] if self._numbers else -1

    def find(self, entry: int) -> Place | None:
        at = self._at(entry)
        return None if at is None else self._place(at)

    def is_synced(self, entry: int) -> bool:
        """Whether the entry is in the index and synced."""
        at = self._at(entry)
        return at is not None and self._rest[at * _WIDTH] != UNSYNCED

    def numbers(self) -> Sequence[int]:
        """A copy of the entries' numbers."""
        return self._numbers[:]

    def copied(self) -> Entries:
        """A copy, to be looked through without the lock."""
        made = Entries()
        made._numbers, made._rest = self._numbers[:], self._rest[:]
        return made

    def places(self) -> list[Place]:
        return [self._place(at) for at in range(len(self))]

    def within(self, begin: int, end: int, header: int) -> list[int]:
        """The entries of whose record a part lies in this range of positions. header: the length of their headers."""
        positions, sizes = self._rest[::_WIDTH], self._rest[_SIZE::_WIDTH]
        return [
            self._numbers[at]
            for at, position in enumerate(positions)
            if position != UNSYNCED and position < end and position + header + sizes[at] > begin
        ]

    def move(self, entry: int, position: int) -> int:
        """Set the position of an entry that the index contains. Returns its former position."""
        at = self._at(entry)
        assert at is not None
        before = self._rest[at * _WIDTH]
        self._rest[at * _WIDTH] = position
        return before

    def discard(self, entry: int) -> None:
        """Remove an entry whose write failed."""
        at = self._at(entry)
        if at is not None:
            del self._numbers[at]
            del self._rest[at * _WIDTH : (at + 1) * _WIDTH]

    def _at(self, entry: int) -> int | None:
        numbers = self._numbers
        if not numbers or entry > numbers[-1]:
            return None
        at = bisect_left(numbers, entry)
        return at if numbers[at] == entry else None

    def _place(self, at: int) -> Place:
        *most, checksum = self._rest[at * _WIDTH : (at + 1) * _WIDTH]
        return Place._make((self._numbers[at], *most, checksum + _WRAP if checksum < 0 else checksum))


def entries_of(state: LedgerState) -> Entries:
    """The index of a ledger, which this node has given to the core."""
    assert isinstance(state.index, Entries)
    return state.index


class Removal(NamedTuple):
    """A removal of a ledger: its records before `upto` are void."""

    upto: int
    position: int
    """The position of the REMOVED record, or UNSYNCED."""
    is_remembered: bool
    segments: set[int]
    """The bases of the segments that contain void records of the ledger."""


class Index:
    """Not thread-safe: the node's lock guards it."""

    def __init__(self, core: NodeCore, bases: list[int]) -> None:
        """bases: the position of the first byte of each segment, in rising order; the journal changes this list."""
        self._core, self._bases = core, bases
        self.fences: dict[str, tuple[int, int]] = {}
        """By ledger: the number of the synced fence, and the position of its record."""
        self._replayed: dict[str, list[tuple[int, int]]] = {}
        """At the start of the node, by ledger: number and position of each fence that was read."""
        self.doubts: dict[str, int] = {}
        """By ledger in doubt: the position of its last DOUBT record."""
        self.removals: dict[str, Removal] = {}
        self._remembered: dict[tuple[str, int], str] = {}
        """By topic id and partition: the removed ledger with the highest number."""
        self.dead: Counter[int] = Counter()
        """By the base of a segment: how many of its bytes belong to records that are not live."""
        self.bytes = 0
        """The total length of all synced entries."""

    # Records that are synced.

    def replay(self, record: Record) -> None:
        """Apply a record that was read from the journal when the node started."""
        if record.kind is Kind.ENTRY:
            head = EntryHead(
                record.offset,
                record.rows,
                record.body_bytes,
                record.last_timestamp,
                record.stored_at,
                record.checksum,
            )
            self._core.replay(StoreItem(record.ledger, record.entry, head, record.lac, record.recovery))
        elif record.kind is Kind.FENCE:
            self._core.replay(FenceItem(record.ledger, record.recovery or 0))
            self._replayed.setdefault(record.ledger, []).append((record.recovery or 0, record.position))
        elif record.kind is Kind.DOUBT:
            self._core.replay(DoubtItem(record.ledger))
        elif record.kind is Kind.REMOVED:
            self._replay_removal(record)
        self.written(record)

    def end_replay(self) -> None:
        """All records of the journal were replayed."""
        self._replayed.clear()

    def _replay_removal(self, record: Record) -> None:
        """The core drops all entries and fences of the ledger. Compaction may have moved the REMOVED record behind
        entries, fences and doubts that were added after the removal; those are passed to the core again."""
        if not record.offset:  # it voids nothing
            self._core.replay(RememberItem(record.ledger))
            return
        state = self._core.state(record.ledger)
        doubted = self.doubts.get(record.ledger, -1)
        self._core.replay(RemoveItem(record.ledger, bool(record.rows)))
        if state is None:
            return
        if doubted >= record.offset:
            self._core.replay(DoubtItem(record.ledger))
        voided = Entries()
        for place in entries_of(state).places():
            if place.position >= record.offset:
                self._core.replay(StoreItem(record.ledger, place.entry, place.head, state.lac, None))
                again = self._core.state(record.ledger)
                assert again is not None
                entries_of(again).move(place.entry, place.position)
            else:
                voided.add(place.entry, place.head)
                voided.move(place.entry, place.position)
        self.void(record, voided)
        later = [fence for fence in self._replayed.pop(record.ledger, []) if fence[1] >= record.offset]
        if later:
            self._replayed[record.ledger] = later
            if record.ledger not in self.fences:  # a higher one, which is voided now, had hidden it
                self.fences[record.ledger] = max(later)
                self.dead[self.segment_of(max(later)[1])] -= record_bytes(record.ledger, 0)
            self._core.replay(FenceItem(record.ledger, self.fences[record.ledger][0]))

    def written(self, record: Record) -> None:
        """A record that the core has accepted was synced."""
        if record.kind is Kind.ENTRY:
            state = self._core.state(record.ledger)
            if state is None or record.entry not in state.index:  # its ledger was removed before the sync
                self._bury(record.position, record.size)
                return
            before = entries_of(state).move(record.entry, record.position)
            if before == UNSYNCED:
                self.bytes += record.body_bytes
            else:
                self._bury(before, record.size)
        elif record.kind is Kind.FENCE:
            self._fenced(record)
        elif record.kind is Kind.DOUBT:
            self._doubted(record)
        elif record.kind is Kind.REMOVED:
            self._removed(record)
        else:
            self._bury(record.position, record.size)

    def _fenced(self, record: Record) -> None:
        number, before = self.fences.get(record.ledger, (0, -1))
        if self._core.state(record.ledger) is None or (record.recovery or 0) < number:
            self._bury(record.position, record.size)
            return
        if before >= 0:
            self._bury(before, record.size)
        self.fences[record.ledger] = record.recovery or 0, record.position

    def _doubted(self, record: Record) -> None:
        state = self._core.state(record.ledger)
        if state is None or not state.is_in_doubt:
            self._bury(record.position, record.size)
            return
        self.end_doubt(record.ledger)
        self.doubts[record.ledger] = record.position

    def end_doubt(self, ledger: str) -> None:
        """The DOUBT record of the ledger is not needed any more."""
        before = self.doubts.pop(ledger, None)
        if before is not None:
            self._bury(before, record_bytes(ledger, 0))

    def upto(self, ledger: str) -> int:
        """The position up to which the records of the ledger are void."""
        removal = self.removals.get(ledger)
        return 0 if removal is None else removal.upto

    def _removed(self, record: Record) -> None:
        before = self.removals.get(record.ledger)
        segments: set[int] = set()
        if before is not None and before.position != UNSYNCED and record.offset < before.upto:
            self._bury(record.position, record.size)  # a copy of an older one that was written late
            return
        if before is not None:
            segments |= before.segments
            self._bury(before.position, record.size)
        self.removals[record.ledger] = Removal(record.offset, record.position, bool(record.rows), segments)
        name = LedgerName.of_id(record.ledger)
        partition = name.topic_id, name.partition
        known = self._remembered.get(partition)
        if not record.rows:
            self._remembered.pop(partition, None)
        elif known is None or LedgerName.of_id(known).number <= name.number:
            self._remembered[partition] = record.ledger
        for ledger in {record.ledger, known or record.ledger}:
            self._forget_removal(ledger)

    def void(self, record: Record, entries: Entries) -> None:
        """The core has removed a ledger that had these entries, and the REMOVED record was synced. The caller then
        calls `written` for the record."""
        segments = set()
        for place in entries.places():
            if place.position != UNSYNCED:
                self._bury(place.position, record_bytes(record.ledger, place.size))
                segments.add(self.segment_of(place.position))
                self.bytes -= place.size
        _number, position = self.fences.get(record.ledger, (0, -1))
        if 0 <= position < record.offset:
            self._bury(position, record_bytes(record.ledger, 0))
            segments.add(self.segment_of(position))
            del self.fences[record.ledger]
        doubted = self.doubts.get(record.ledger, -1)
        if 0 <= doubted < record.offset:
            segments.add(self.segment_of(doubted))
            self.end_doubt(record.ledger)
        before = self.removals.get(record.ledger)
        if before is None:
            self.removals[record.ledger] = Removal(record.offset, UNSYNCED, bool(record.rows), segments)
        else:
            before.segments.update(segments)

    def drop(self, ledger: str, entry: int) -> None:
        """The node does not need this entry of the ledger."""
        state = self._core.state(ledger)
        place = None if state is None else entries_of(state).find(entry)
        if state is not None and place is not None and place.position != UNSYNCED:
            self._bury(place.position, record_bytes(ledger, place.size))
            self.bytes -= place.size
            entries_of(state).discard(entry)

    def forget_segment(self, base: int) -> None:
        """The segment was unlinked."""
        self.dead.pop(base, None)
        for ledger, removal in list(self.removals.items()):
            removal.segments.discard(base)
            self._forget_removal(ledger)

    def _forget_removal(self, ledger: str) -> None:
        """Forget the removal of a ledger if its REMOVED record is not live any more."""
        removal = self.removals.get(ledger)
        if removal is None or removal.segments or removal.position == UNSYNCED:
            return
        name = LedgerName.of_id(ledger)
        if self._remembered.get((name.topic_id, name.partition)) != ledger:
            del self.removals[ledger]
            self._bury(removal.position, record_bytes(ledger, 0))

    def segment_of(self, position: int) -> int:
        return self._bases[bisect_right(self._bases, position) - 1]

    def _bury(self, position: int, size: int) -> None:
        if position != UNSYNCED:
            self.dead[self.segment_of(position)] += size
