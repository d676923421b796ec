"""Pure: the writer of one ledger. It decides to which nodes an entry is sent, and when the entry is confirmed.

The caller (`broker.writing`) calls a method for each event (an entry to append, an acknowledgement, a failed node, the
outcome of a compare-and-set) and performs the returned actions in their order. Nothing here does I/O or reads a clock.

An entry is confirmed when it and all earlier entries have Qa acknowledgements from nodes that the *committed* record
names for them (C1, C4). Only confirmed entries are acknowledged to producers and shown to readers.

The writer replaces a failed node by a compare-and-set of the ledger's record, one position at a time:

- The replacement gets every entry from the first one that the failed node has not acknowledged. For earlier entries the
  record still names the failed node; `copies` replaces it there when the ledger is closed.
- A confirmed entry must keep Qa copies on nodes that the record names. If acknowledgements arrived out of order, the
  replacement therefore begins after the last confirmed entry that needs the copy of the failed node. The entries
  between the two lack a copy (`is_complete` of the closed record is then False).
- Until the change is committed, the writer sends nothing to the replacement and confirms no further entries: a recovery
  that asks the nodes of the old record must find every confirmed entry.
- Each assignment of a node to a position has a number, the tenure (`Send.tenure`). A node that was replaced and is used
  again gets a new tenure. An acknowledgement with an old tenure is ignored: it does not prove that the node still has
  the entry.

Without a spare, the same compare-and-set leaves the position empty. A spare that is offered later gets the entries that
the writer still holds in memory, and all later ones.

The answer "fenced" stops the writer; it is never treated as the failure of a node (C1). After `Stop` the outcome of
every entry that is not confirmed is unknown until the owner of the partition has recovered the ledger (C4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pxrs.cluster.ledgers import OPEN, EntryHead, LedgerRecord

FENCED: Final = "fenced"
CHANGED: Final = "changed"
CLOSED: Final = "closed"


class Send(NamedTuple):
    """Send the entry to the node, and call `acked` with `node`, `tenure` and `entry` when the node has acknowledged
    it."""

    node: str
    tenure: int
    entry: int
    lac: int


class Change(NamedTuple):
    """Write the ledger's record by compare-and-set, then call `committed`, `conflicted` or `unknown`."""

    record: LedgerRecord
    expect: int
    """The version that the key must have."""


class Confirmed(NamedTuple):
    """All entries up to this one are confirmed."""

    upto: int


class Forget(NamedTuple):
    """Every node has its entries up to this one: the caller can free their bytes."""

    upto: int


class Stop(NamedTuple):
    """The writer has stopped and returns no further actions."""

    why: str
    """FENCED: a recovery has fenced the ledger. CHANGED: another process has changed the record. CLOSED: this writer
    has closed the ledger, and `record` is the closed record. Or a text that the caller of `stop` gave."""
    record: LedgerRecord | None = None
    """The record in the registry, if it was read; None if it was not read or no longer exists."""


Action = Send | Change | Confirmed | Forget | Stop


@dataclass(slots=True)
class Slot:
    """One position of the last fragment."""

    node: str | None
    first: int
    """The first entry that the node keeps."""
    tenure: int
    is_failed: bool = False
    """The node has failed and will be replaced. Its acknowledgements are ignored from now on."""


class LedgerWriter:
    """Appends to one open ledger. Not thread-safe."""

    def __init__(self, record: LedgerRecord, version: int) -> None:
        """record: the record that this broker has just created, open and without entries. version: the version of its
        key."""
        if record.state != OPEN or len(record.fragments) != 1:
            raise ValueError(f"{record.id} is {record.state} with {len(record.fragments)} fragments, not new")
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
        """By entry, until `Forget`: the positions whose node has acknowledged it, as a bit mask."""
        self._awaited: dict[int, int] = {}
        """By entry, until `Forget`: the positions whose node has the entry or will get it, as a bit mask."""
        self._spares: list[str] = []
        self._barred: set[str] = set()
        self._proposed: tuple[LedgerRecord, int | None, int] | None = None
        """The compare-and-set that is under way: the new record, the position that gets another node (None if the
        change closes the ledger), and the first entry of that node."""
        self._is_closing = False
        self._has_gaps = False
        self._last = EntryHead(record.base, 0, 0, 0, 0, 0)
        self._size = 0

    # Properties for the caller.

    @property
    def end(self) -> int:
        """The offset after the last row of the last entry, whether that entry is confirmed or not."""
        return self._last.next_offset

    @property
    def slots(self) -> Sequence[Slot]:
        """The positions of the last fragment."""
        return self._slots

    @property
    def is_degraded(self) -> bool:
        """Whether a position has no node now."""
        return any(slot.node is None or slot.is_failed for slot in self._slots)

    @property
    def should_roll(self) -> bool:
        """Whether entries lack a copy. Copies are created again only in closed ledgers, because only the writer changes
        the record of an open one. So the caller should close this ledger and begin the next one."""
        return len(self.record.fragments) > 1 or self._has_gaps

    @property
    def is_changing(self) -> bool:
        """Whether a compare-and-set is under way; nothing is confirmed in the meantime."""
        return self._proposed is not None

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def awaiting(self) -> list[tuple[str, int, int]]:
        """The nodes with unacknowledged entries: node, tenure, and the first such entry. For timeouts."""
        found = []
        for node, position in self._by_node.items():
            first = self._first_without(position)
            if first < self.next and not self._slots[position].is_failed:
                found.append((node, self._slots[position].tenure, first))
        return found

    # Events.

    def append(self, head: EntryHead) -> list[Action]:
        """Append the entry with the number `next`. The caller keeps its bytes until `Forget`."""
        if self.stopped or self._is_closing:
            raise ValueError(f"{self.record.id}: the writer has stopped, or the ledger is being closed")
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
        """The node has synced the entry."""
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
        """The node did not answer in time, or refused an add, for example because its disk is full. is_lasting: it must
        not be used for this ledger again, and may have lost what it has acknowledged: it has removed the ledger, or has
        restarted in doubt (LedgerRemoved)."""
        position = self._by_node.get(node)
        if is_lasting:
            self._barred.add(node)
            self._has_gaps = self._has_gaps or node in self.record.named
        if position is None or self.stopped or self._slots[position].tenure != tenure:
            return []
        self._slots[position].is_failed = True
        if is_lasting:
            # It may have lost what it has acknowledged. What is confirmed already is made good by a repair.
            for entry in range(self.confirmed + 1, self.next):
                self._acks[entry] &= ~(1 << position)
        return self._propose()

    def doubted(self, node: str) -> list[Action]:
        """The node has restarted in doubt (C7) and takes no more entries of this ledger."""
        position = self._by_node.get(node)
        tenure = -1 if position is None else self._slots[position].tenure
        return self.failed(node, tenure, is_lasting=True)

    def fenced(self) -> list[Action]:
        """A node has answered that the ledger is fenced."""
        return self._stop(Stop(FENCED))

    def offer(self, spares: Iterable[str]) -> list[Action]:
        """Set the spares, the best first. They replace the spares of an earlier call."""
        self._spares = list(spares)
        return [] if self.stopped else self._propose()

    def close(self) -> list[Action]:
        """Accept no more entries, and close the ledger when every entry is confirmed. `Stop(CLOSED)` follows."""
        self._is_closing = True
        return [] if self.stopped else self._propose()

    def stop(self, why: str) -> list[Action]:
        """Stop the writer, for example because the broker has lost its claim or too few nodes answer."""
        return self._stop(Stop(why))

    def committed(self, version: int) -> list[Action]:
        """The compare-and-set succeeded; `version` is the new version of the key."""
        if self._proposed is None or self.stopped:
            return []
        (self.record, position, first), self._proposed = self._proposed, None
        self.version = version
        if position is None:
            return self._stop(Stop(CLOSED, self.record))
        return [*self._install(position, first), *self._advance(), *self._propose()]

    def conflicted(self, found: LedgerRecord | None, version: int) -> list[Action]:
        """The compare-and-set failed because the key has another version. found: the record under the key; None if
        there is none. If it equals the proposed record, an earlier attempt with an unknown outcome has succeeded. Any
        other record was written by another process and stops the writer."""
        if self._proposed is None or self.stopped:
            return []
        if found == self._proposed[0]:
            return self.committed(version)
        return self._stop(Stop(CHANGED, found))

    def unknown(self) -> list[Action]:
        """The outcome of the compare-and-set is unknown: repeat it. It succeeds, or the conflict shows what is
        stored."""
        if self._proposed is None or self.stopped:
            return []
        return [Change(self._proposed[0], self.version)]

    # Internal.

    def _stop(self, stop: Stop) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = stop
        return [stop]

    def _advance(self) -> list[Action]:
        """Confirm the entries that have Qa acknowledgements, and forget those that all their nodes have."""
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
        """Propose the next change of the record, if one is needed and none is under way."""
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
        """The first entry that a replacement at this position gets: see the module's docstring."""
        bit = 1 << position
        first = self._first_without(position)
        for entry in range(self.confirmed, first - 1, -1):
            if (self._acks[entry] & ~bit).bit_count() < self.quorum.ack_quorum:
                return entry + 1
        return first

    def _replace(self, position: int, first: int, *, may_be_empty: bool) -> list[Action]:
        # The nodes that store any entry from `first` on: a node must not store two copies of one entry.
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
        """The record that names another node, or none, for the entries from `first` on was committed."""
        node = self.record.fragments[-1].nodes[position]
        old, bit = self._slots[position], 1 << position
        if old.node is not None:
            del self._by_node[old.node]
            for entry in range(max(old.first, self.forgotten + 1), first):
                if self._awaited[entry] & bit and not self._acks[entry] & bit:
                    self._has_gaps = True  # the record names the old node for this entry, which it will never get
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
