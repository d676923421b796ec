"""Pure: the writer of one ledger. Which entry goes to which nodes, and when is it confirmed.

The shell passes messages in (an entry to append, an acknowledgement, a failed node, the outcome of a compare-and-set)
and performs the actions that come back, in their order. Nothing here does I/O or reads a clock.

An entry is confirmed when it and all earlier entries have Qa acknowledgements from nodes that the *committed* record
names for them (C1, C4). Only confirmed entries are acknowledged to producers and shown to readers.

A node that fails is replaced by a compare-and-set of the ledger's record, one position at a time:

- The replacement gets every entry from the first one on that the failed node has not acknowledged. What the failed node
  has acknowledged before stays in its keeping; `copies` replaces it there when the ledger is closed.
- But an entry that is confirmed must keep Qa copies on nodes that the record names. If acknowledgements came out of
  order, the replacement begins behind the last confirmed entry that needs the failed node's copy. The entries in
  between lack a copy (`is_complete` of the closed record is then False).
- Until the change is committed, nothing is sent to the replacement and nothing is confirmed that was not before: a
  recoverer that asks the nodes of the old record must find every confirmed entry.
- Acknowledgements are matched with the node's tenure (`Send.tenure`). A node that was replaced and comes back begins a
  new tenure; a late acknowledgement of an earlier one says nothing about what the node has now.

Without a spare the position becomes empty by the same compare-and-set. A spare that is offered later gets the entries
that the writer still holds, and all later ones.

"Fenced" stops the writer. It is never taken for a failure of the node (C1). After `Stop` the outcome of every entry
that is not confirmed is unknown: the partition's owner recovers the ledger, which decides it (C4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pxrs.cluster.ledgers import OPEN, EntryHead, LedgerRecord

FENCED: Final = "fenced"
CHANGED: Final = "changed"
CLOSED: Final = "closed"


class Send(NamedTuple):
    """Send the entry to the node, and pass `node`, `tenure` and `entry` to `acked` once the node has answered."""

    node: str
    tenure: int
    entry: int
    lac: int


class Change(NamedTuple):
    """Compare and set the ledger's record: then call `committed`, `conflicted` or `unknown`."""

    record: LedgerRecord
    expect: int
    """The version that the key must have."""


class Confirmed(NamedTuple):
    """All entries up to this one are confirmed."""

    upto: int


class Forget(NamedTuple):
    """Every node has all entries up to this one: the writer does not need their bytes any more."""

    upto: int


class Stop(NamedTuple):
    """The writer has ended. Nothing more comes back from it."""

    why: str
    """FENCED: another broker recovers the ledger. CHANGED: somebody else has changed the record. CLOSED: this writer
    has closed the ledger, and `record` is the closed one."""
    record: LedgerRecord | None = None
    """What was found in the registry, if it was read; None: unknown, or the record is gone."""


Action = Send | Change | Confirmed | Forget | Stop


@dataclass(slots=True)
class Slot:
    """One position of the last fragment."""

    node: str | None
    first: int
    """The first entry that the node keeps."""
    tenure: int
    is_failed: bool = False
    """The node has failed and is to be replaced. Its acknowledgements do not count from here on."""


class LedgerWriter:
    """Appends to one open ledger. Not thread-safe."""

    def __init__(self, record: LedgerRecord, version: int) -> None:
        """record: as this broker has just created it, open and without entries; version: that of its key."""
        if record.state != OPEN or len(record.fragments) != 1:
            raise ValueError(f"{record.id} is {record.state} with {len(record.fragments)} fragments; it must be new")
        self.record, self.version = record, version
        self.quorum = record.quorum
        self.confirmed = -1
        self.forgotten = -1
        self.next = 0
        """The number of the next entry."""
        self.stopped: Stop | None = None
        self._slots = [Slot(node, 0, number) for number, node in enumerate(record.fragments[0].nodes)]
        self._by_node = {slot.node: position for position, slot in enumerate(self._slots) if slot.node is not None}
        self._tenures = len(self._slots) - 1
        self._acks: dict[int, int] = {}
        """By entry that is not forgotten: the positions that have acknowledged it, as bits."""
        self._awaited: dict[int, int] = {}
        """The positions whose node has the entry or is to get it, as bits."""
        self._spares: list[str] = []
        self._barred: set[str] = set()
        self._proposed: tuple[LedgerRecord, int | None, int] | None = None
        """The change that is under way: the record, the position that gets another node (None: the ledger is closed),
        and the first entry of that node."""
        self._is_closing = False
        self._has_gaps = False
        self._last = EntryHead(record.base, 0, 0, 0, 0, 0)
        self._size = 0

    # What the shell may ask.

    @property
    def end(self) -> int:
        """The offset behind the last entry, confirmed or not."""
        return self._last.next_offset

    @property
    def is_degraded(self) -> bool:
        """Whether a position has no node now."""
        return any(slot.node is None or slot.is_failed for slot in self._slots)

    @property
    def should_roll(self) -> bool:
        """Whether some entries have lost a copy that only a closed ledger gets back: close this ledger, and write the
        next one. (While a ledger is open nobody but its writer changes the record.)"""
        return len(self.record.fragments) > 1 or self._has_gaps

    @property
    def is_changing(self) -> bool:
        """Whether a compare-and-set is under way; nothing is confirmed in the meantime."""
        return self._proposed is not None

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def awaiting(self) -> list[tuple[str, int, int]]:
        """The nodes that have entries to acknowledge: node, tenure, the first such entry. For timeouts."""
        found = []
        for node, position in self._by_node.items():
            first = self._first_without(position)
            if first < self.next and not self._slots[position].is_failed:
                found.append((node, self._slots[position].tenure, first))
        return found

    # Messages.

    def append(self, head: EntryHead) -> list[Action]:
        """Append the next entry, number `next`. The shell keeps its bytes until `Forget`."""
        if self.stopped or self._is_closing:
            raise ValueError(f"{self.record.id}: the writer is closed")
        entry, self.next = self.next, self.next + 1
        self._last = head
        self._size += head.size if entry else 0
        self._acks[entry] = awaited = 0
        actions: list[Action] = []
        for position in self.quorum.write_set(entry):
            slot = self._slots[position]
            if slot.node is not None:
                awaited |= 1 << position
                if not slot.is_failed:
                    actions.append(Send(slot.node, slot.tenure, entry, self.confirmed))
        self._awaited[entry] = awaited
        return actions

    def acked(self, node: str, tenure: int, entry: int) -> list[Action]:
        """The node has the entry on its disk."""
        position = self._by_node.get(node)
        if position is None or self.stopped:
            return []
        slot = self._slots[position]
        if slot.tenure != tenure or slot.is_failed or entry not in self._acks or entry < slot.first:
            return []
        self._acks[entry] |= 1 << position
        if self._proposed is not None or (entry != self.confirmed + 1 and entry != self.forgotten + 1):
            return []
        return self._advance()

    def failed(self, node: str, tenure: int, *, is_lasting: bool = False) -> list[Action]:
        """The node did not answer in time, or refused for a reason of its own. is_lasting: it must not be taken back
        for this ledger, because it has removed it (LedgerRemoved)."""
        position = self._by_node.get(node)
        if is_lasting:
            self._barred.add(node)
        if position is None or self.stopped or self._slots[position].tenure != tenure:
            return []
        self._slots[position].is_failed = True
        return self._propose()

    def fenced(self) -> list[Action]:
        """A node has answered that the ledger is fenced."""
        return self._stop(Stop(FENCED))

    def offer(self, spares: Iterable[str]) -> list[Action]:
        """The nodes that may be used from now on, the best first. They replace those that were offered before."""
        self._spares = list(spares)
        return [] if self.stopped else self._propose()

    def close(self) -> list[Action]:
        """Take no more entries; close the ledger as soon as every entry is confirmed. `Stop(CLOSED)` follows."""
        self._is_closing = True
        return [] if self.stopped else self._propose()

    def stop(self, why: str) -> list[Action]:
        """End the writer, for instance because the broker has lost its claim or too few nodes answer."""
        return self._stop(Stop(why))

    def committed(self, version: int) -> list[Action]:
        """The change that was under way is committed, and this is the key's version."""
        if self._proposed is None or self.stopped:
            return []
        (self.record, position, first), self._proposed = self._proposed, None
        self.version = version
        if position is None:
            return self._stop(Stop(CLOSED, self.record))
        return [*self._install(position, first), *self._advance(), *self._propose()]

    def conflicted(self, found: LedgerRecord | None, version: int) -> list[Action]:
        """The key has another version than expected. `found` is what is there (None: nothing). It is this writer's own
        change if an earlier try has landed after all; everything else is somebody else's, and ends the writer."""
        if self._proposed is None or self.stopped:
            return []
        if found == self._proposed[0]:
            return self.committed(version)
        return self._stop(Stop(CHANGED, found))

    def unknown(self) -> list[Action]:
        """It is not known whether the change was committed. The same compare-and-set, again: it is committed, or a
        conflict shows what has happened."""
        if self._proposed is None or self.stopped:
            return []
        return [Change(self._proposed[0], self.version)]

    # Within.

    def _stop(self, stop: Stop) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = stop
        return [stop]

    def _advance(self) -> list[Action]:
        """Confirm and forget what can be."""
        confirmed, forgotten = self.confirmed, self.forgotten
        needed, acks = self.quorum.ack_quorum, self._acks
        while confirmed + 1 < self.next and acks[confirmed + 1].bit_count() >= needed:
            confirmed += 1
        while forgotten < confirmed and self._awaited[forgotten + 1] & ~acks[forgotten + 1] == 0:
            forgotten += 1
            del acks[forgotten], self._awaited[forgotten]
        actions: list[Action] = []
        if confirmed > self.confirmed:
            self.confirmed = confirmed
            actions.append(Confirmed(confirmed))
        if forgotten > self.forgotten:
            self.forgotten = forgotten
            actions.append(Forget(forgotten))
        if self._is_closing and confirmed + 1 == self.next:
            actions += self._propose()
        return actions

    def _propose(self) -> list[Action]:
        """The next change of the record, if one is due and none is under way."""
        if self._proposed is not None or self.stopped:
            return []
        if self._is_closing and self.confirmed + 1 == self.next:
            return self._propose_close()
        for position, slot in enumerate(self._slots):
            if slot.is_failed:
                return self._replace(position, self._boundary(position), may_be_empty=True)
        for position, slot in enumerate(self._slots):
            if slot.node is None:
                actions = self._replace(position, max(slot.first, self.forgotten + 1), may_be_empty=False)
                if actions:
                    return actions
        return []

    def _first_without(self, position: int) -> int:
        """The first entry that the node at this position has not acknowledged; `next` if there is none."""
        bit = 1 << position
        begin = max(self._slots[position].first, self.forgotten + 1)
        return next(
            (entry for entry in range(begin, self.next) if self._awaited[entry] & bit and not self._acks[entry] & bit),
            self.next,
        )

    def _boundary(self, position: int) -> int:
        """From which entry on another node takes this position: see the module's page."""
        bit = 1 << position
        first = self._first_without(position)
        for entry in range(self.confirmed, first - 1, -1):
            if (self._acks[entry] & ~bit).bit_count() < self.quorum.ack_quorum:
                return entry + 1
        return first

    def _replace(self, position: int, first: int, *, may_be_empty: bool) -> list[Action]:
        # Those that keep any entry from `first` on: a node must not keep two copies of one entry.
        taken = {
            node
            for fragment in self.record.fragments
            if fragment is self.record.fragments[-1] or (self.record.last_of(fragment) or 0) >= first
            for node in fragment.nodes
        }
        node = next((node for node in self._spares if node not in taken and node not in self._barred), None)
        if node is None and not may_be_empty:
            return []
        if node is not None:
            self._spares.remove(node)
        record = replace(self.record.with_node(first, position, node), confirmed=self.confirmed)
        self._proposed = record, position, first
        return [Change(record, self.version)]

    def _install(self, position: int, first: int) -> list[Action]:
        """The committed record names another node, or none, for the entries from `first` on."""
        node = self.record.fragments[-1].nodes[position]
        old, bit = self._slots[position], 1 << position
        if old.node is not None:
            del self._by_node[old.node]
            for entry in range(max(old.first, self.forgotten + 1), first):
                if self._awaited[entry] & bit and not self._acks[entry] & bit:
                    self._has_gaps = True  # the old node keeps its place for this entry, and will never get it
                    self._awaited[entry] &= ~bit
        self._tenures += 1
        slot = self._slots[position] = Slot(node, first, self._tenures)
        if node is not None:
            self._by_node[node] = position
        actions: list[Action] = []
        for entry in range(first, self.next):
            if self.quorum.keeps(position, entry):
                self._acks[entry] &= ~bit
                self._awaited[entry] = self._awaited[entry] & ~bit if node is None else self._awaited[entry] | bit
                if node is not None:
                    actions.append(Send(node, slot.tenure, entry, self.confirmed))
        return actions

    def _propose_close(self) -> list[Action]:
        is_complete = not self._has_gaps and self.forgotten == self.confirmed
        record = self.record.closed(
            self.confirmed, self.end, size=self._size, stored_at=self._last.stored_at, is_complete=is_complete
        )
        self._proposed = replace(record, confirmed=self.confirmed), None, 0
        return [Change(self._proposed[0], self.version)]
