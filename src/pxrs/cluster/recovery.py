"""Pure: where a ledger ends whose writer is gone, or may be gone (C1, C2).

The owner of the partition passes messages in and performs the actions that come back. The steps:

1. Compare and set the record to "recovering", with the next recovery number. From here on the writer changes the record
   no more, so what it has confirmed, or will ever confirm, it confirms by the nodes that the record names.
2. Fence nodes until no write set can reach Qa acknowledgements any more: Qw - Qa + 1 of each, in every fragment that
   may hold entries behind the highest `lac` of the answers. From here on nothing more is confirmed.
3. From lac + 1 on, read each entry from its own write set. One node has it: bring it to Qa copies. Qw - Qa + 1 do not
   have it: it was never confirmed, and the ledger ends before it. A node that does not answer counts as neither.
4. Compare and set the record to "closed".

A recovered entry that was not confirmed may be kept or not; both are right, because no producer or reader was told.

Replacements. If fewer than Qa nodes of a write set can take a recovered entry, another node takes it. That node is
named in `joining` first (a node removes what no record names), and gets its place in `fragments` only by the commit
that closes the ledger. Until then the record has the writer's own fragments: a second recoverer must ask the nodes that
the writer has written to. (If the replacement were committed first: the second recoverer asks it about the next entry,
counts its "no such entry", and an entry that was acknowledged by the node that it has replaced is gone.) For the same
reason recovered entries are sent with the `lac` that recovery began with: the copies on a replacement are not confirmed
for anybody but this recoverer.

Empty positions count as fenced and as "no such entry": see `ledgers`. So do nodes that an operator has abandoned (C6),
but only once every other node of the write set has answered. Entries may be lost by it; the record names these nodes
for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pxrs.cluster.ledgers import EntryHead, Fragment, Joining, LedgerRecord
from pxrs.cluster.recovery_actions import (
    CHANGED,
    DAMAGED,
    FENCED,
    Action,
    AddEntry,
    Closed,
    FenceNode,
    Measure,
    NeedSpares,
    ReadEntry,
    Stopped,
)
from pxrs.cluster.replication import Change

__all__ = [
    "CHANGED",
    "DAMAGED",
    "FENCED",
    "Action",
    "AddEntry",
    "Closed",
    "FenceNode",
    "Measure",
    "NeedSpares",
    "ReadEntry",
    "Recovery",
    "Stopped",
]

WINDOW: Final = 32
"""How many entries are read at once."""


@dataclass(slots=True)
class Searched:
    """One entry that is being recovered."""

    refusals: set[int] = field(default_factory=set)
    """The positions that have no copy, by the writer's fragments."""
    head: EntryHead | None = None
    """None: not found yet."""
    body: Any = None
    copies: set[int] = field(default_factory=set)
    """The positions that have a copy, by the fragments that the closed record will have."""
    sent: set[str] = field(default_factory=set)
    """The nodes that were sent the entry and have not answered."""


# Over the limit: a method for each of its twelve messages, and the steps that they share.
class Recovery:
    """Recovers one ledger once. Not thread-safe."""

    def __init__(
        self,
        record: LedgerRecord,
        version: int,
        epoch: int,
        *,
        abandoned: Collection[str] = (),
        window: int = WINDOW,
    ) -> None:
        """record, version: the ledger's record as it was read after the partition was claimed, open or recovering;
        epoch: that of the claim; abandoned: nodes that an operator has decided to go on without."""
        self.version = version
        self.record = record
        """As committed; its fragments are the writer's."""
        self.planned = record
        """With the nodes that take over; committed with the close."""
        self.stopped: Stopped | Closed | None = None
        self.window = window
        self.refusals = record.quorum.refusals
        """How many of an entry's write set must have no copy, or be fenced: see `Quorum.refusals`."""
        self.lac = record.confirmed
        self.cursor = -1
        """The first entry that does not have Qa copies; -1 until enough nodes are fenced."""
        self._epoch = epoch
        self._abandoned = {*record.abandoned, *abandoned}
        self._fenced: set[str] = set()
        self._failed: set[str] = set()
        self._spares: list[str] = []
        self._searched: dict[int, Searched] = {}
        self._anchor = -1
        """The confirmed entry that the ledger ends with if nothing is recovered; -1: none."""
        self._anchor_refusals: set[int] = set()
        self._end: EntryHead | None = None
        """The head of the last entry that belongs to the ledger, once it is known."""
        self._proposed: LedgerRecord | None = None
        self._joins: tuple[int, str] | None = None
        """The position and the node that a change under way names in `joining`."""
        self._is_begun = False
        """The record is committed as "recovering" by this recovery."""
        self._is_measuring = False

    # Messages.

    def start(self) -> list[Action]:
        return self._change(self.record.in_recovery(self._epoch, sorted(self._abandoned)))

    def committed(self, version: int) -> list[Action]:
        if self._proposed is None or self.stopped:
            return []
        self.record, self._proposed, self.version = self._proposed, None, version
        if self.record.is_closed:
            self.stopped = Closed(self.record, version)
            return [self.stopped]
        if not self._is_begun:
            self._is_begun, self.planned = True, self.record
            return [*self._fence_more(), *self._look()]
        if self._joins is not None:
            self._join(*self._joins)
            self._joins = None
        return self._look()

    def conflicted(self, found: LedgerRecord | None, version: int) -> list[Action]:
        """As for `LedgerWriter`: what is found is this recovery's own change, or somebody else's."""
        if self._proposed is None or self.stopped:
            return []
        if found == self._proposed:
            return self.committed(version)
        return self._stop(Stopped(CHANGED, found, version))

    def unknown(self) -> list[Action]:
        """The same compare-and-set, again."""
        if self._proposed is None or self.stopped:
            return []
        return [Change(self._proposed, self.version)]

    def fenced(self, node: str, lac: int) -> list[Action]:
        """The node is fenced, and has synced it; lac: the highest entry that it knows to be confirmed."""
        if self.stopped:
            return []
        self._fenced.add(node)
        self._failed.discard(node)
        if self.cursor < 0:
            self.lac = max(self.lac, lac)
        return self._look()

    def found(self, node: str, entry: int, head: EntryHead, body: Any) -> list[Action]:
        if self.stopped or self.cursor < 0:
            return []
        self._failed.discard(node)
        if entry == self._anchor and self._end is None:
            self._end = head
        searched = self._searched.get(entry)
        if searched is not None:
            if searched.head is None:
                searched.head, searched.body = head, body
            position = self.planned.position_of(node, entry)
            if position is not None:
                searched.copies.add(position)
        return self._look()

    def missing(self, node: str, entry: int) -> list[Action]:
        """The node does not have the entry, and never will from anybody else: the read has fenced it."""
        if self.stopped or self.cursor < 0:
            return []
        self._failed.discard(node)
        position = self.record.position_of(node, entry)
        if position is not None and entry == self._anchor:
            self._anchor_refusals.add(position)
        if position is not None and entry in self._searched:
            self._searched[entry].refusals.add(position)
        return self._look()

    def acked(self, node: str, entry: int) -> list[Action]:
        """The node has the recovered entry on its disk."""
        searched = self._searched.get(entry)
        if self.stopped or searched is None:
            return []
        self._failed.discard(node)
        searched.sent.discard(node)
        position = self.planned.position_of(node, entry)
        if position is not None:
            searched.copies.add(position)
        return self._look()

    def refused(self) -> list[Action]:
        """A node is fenced by a higher recovery number."""
        return self._stop(Stopped(FENCED))

    def failed(self, node: str) -> list[Action]:
        """The node does not answer. It is asked again after `retry`."""
        if self.stopped:
            return []
        self._failed.add(node)
        for searched in self._searched.values():
            searched.sent.discard(node)
        return self._look()

    def offer(self, spares: Iterable[str]) -> list[Action]:
        """The nodes that may be used from now on, the best first."""
        self._spares = list(spares)
        return [] if self.stopped else self._look()

    def retry(self) -> list[Action]:
        """Ask again whatever was not answered; every request may be made twice. To be called now and then."""
        if self.stopped or self._proposed is not None:
            return []
        self._failed.clear()
        for searched in self._searched.values():
            searched.sent.clear()
        if self._is_measuring and self.cursor > 0:
            return [Measure(self.cursor - 1)]
        actions = self._fence_more() if self.cursor < 0 else [*self._read_anchor(), *self._read(self._searched)]
        return [*actions, *self._look()]

    def measured(self, size: int) -> list[Action]:
        """The answer to `Measure`."""
        if self.stopped or not self._is_measuring or self._proposed is not None:
            return []
        return self._close(size)

    # Fencing.

    def _fence_more(self) -> list[Action]:
        """Requests for every node that is not fenced, of the fragments that may hold unconfirmed entries."""
        nodes = dict.fromkeys(
            node
            for fragment, _ in unsettled(self.record, self.lac)
            for node in fragment.nodes
            if node is not None and node not in self._abandoned and node not in self._fenced
        )
        return [FenceNode(node, self.record.recovery) for node in nodes]

    def _is_fenced(self) -> bool:
        """Whether nothing behind `lac` can be confirmed any more."""
        quorum = self.record.quorum
        for fragment, entries in unsettled(self.record, self.lac):
            closed = {position for position, node in enumerate(fragment.nodes) if self._is_out(node)}
            closed |= {position for position, node in enumerate(fragment.nodes) if node in self._fenced}
            for entry in entries:
                if len(closed.intersection(quorum.write_set(entry))) < self.refusals:
                    return False
        return True

    def _is_out(self, node: str | None) -> bool:
        """Whether the position counts as fenced and as having no copy, without an answer."""
        return node is None or node in self._abandoned

    # Reading.

    def _look(self) -> list[Action]:
        """Whatever follows from what is known."""
        if self._proposed is not None or self.stopped or self._is_measuring:
            return []
        actions: list[Action] = []
        if self.cursor < 0:
            if not self._is_begun or not self._is_fenced():
                return []
            self.cursor, self._anchor = self.lac + 1, self.lac
            actions += self._read_anchor()
        self._settle()
        searched = self._searched.get(self.cursor)
        if searched is not None and searched.head is None and self._is_refuted(self.cursor, searched):
            return [*actions, *self._finish()]
        wanted = [e for e in range(self.cursor, self.cursor + self.window) if e not in self._searched]
        for entry in wanted:
            out = {position for position, node in self.record.nodes_of(entry) if self._is_out(node)}
            self._searched[entry] = Searched(out)
        return [*actions, *self._read(wanted), *self._copy()]

    def _read(self, entries: Iterable[int]) -> list[Action]:
        """Read these entries from all their nodes that have not answered. One round trip serves the whole window; the
        first copy that comes is used."""
        actions: list[Action] = []
        for entry in entries:
            searched = self._searched[entry]
            if searched.head is None:
                for position, node in self.record.nodes_of(entry):
                    if node is not None and node not in self._abandoned and position not in searched.refusals:
                        actions.append(ReadEntry(node, entry, self.record.recovery))
        return actions

    def _read_anchor(self) -> list[Action]:
        if self._anchor < 0 or self._end is not None:
            return []
        return [
            ReadEntry(node, self._anchor, self.record.recovery)
            for position, node in self.record.nodes_of(self._anchor)
            if node is not None and node not in self._abandoned and position not in self._anchor_refusals
        ]

    def _settle(self) -> None:
        """Pass the entries that have Qa copies."""
        while (searched := self._searched.get(self.cursor)) is not None:
            if searched.head is None or len(searched.copies) < self.record.quorum.ack_quorum:
                return
            self._end = searched.head
            del self._searched[self.cursor]
            self.cursor += 1

    def _is_refuted(self, entry: int, searched: Searched) -> bool:
        """Whether the entry was certainly not confirmed. An abandoned node may have had it: so as not to lose more than
        must be, all the others are heard first."""
        if len(searched.refusals) < self.refusals:
            return False
        nodes = self.record.nodes_of(entry)
        return not any(node in self._abandoned for _, node in nodes) or len(searched.refusals) == len(nodes)

    # Copies.

    def _copy(self) -> list[Action]:
        """Send the entries that were found to the nodes that are to keep them."""
        actions: list[Action] = []
        for entry, searched in self._searched.items():
            if searched.head is None:
                continue
            for position, node in self.planned.nodes_of(entry):
                if (
                    node is not None
                    and position not in searched.copies
                    and not self._is_out(node)
                    and node not in self._failed
                    and node not in searched.sent
                ):
                    searched.sent.add(node)
                    actions.append(AddEntry(node, entry, searched.head, searched.body, self.lac, self.record.recovery))
        return [*actions, *self._replace()]

    def _replace(self) -> list[Action]:
        """If too few nodes can take the entry at the cursor: name another node in `joining`."""
        searched = self._searched.get(self.cursor)
        if searched is None or searched.head is None:
            return []
        able, unable = 0, []
        for position, node in self.planned.nodes_of(self.cursor):
            if position in searched.copies or not (self._is_out(node) or node in self._failed):
                able += 1
            else:
                unable.append(position)
        if able >= self.record.quorum.ack_quorum or not unable:
            return []
        # Of this fragment alone: a node of a later one may be all that is left.
        taken = {*self.record.fragment_of(self.cursor).nodes, *self.planned.fragment_of(self.cursor).nodes}
        node = next((each for each in self._spares if each not in taken and each not in self._abandoned), None)
        if node is None:
            if not self._is_refuted(self.cursor, searched):
                return [NeedSpares()]
            # It was never confirmed. Rather than wait for a node that could take a copy, leave the entry out.
            searched.head = None
            return self._finish()
        self._spares.remove(node)
        self._joins = unable[0], node
        joining = Joining(node, self.cursor, unable[0])
        return self._change(self.record.with_joining([*self.record.joining, joining]))

    def _join(self, position: int, node: str) -> None:
        """`joining` names the node: it takes the position from the cursor to the end of the fragment. What the node
        before it has counts no more there."""
        self.planned = self.planned.with_node(self.cursor, position, node, is_one=True)
        for entry, searched in self._searched.items():
            if self.planned.fragment_of(entry).nodes[position] == node:
                searched.copies.discard(position)

    # The end.

    def _finish(self) -> list[Action]:
        """The ledger ends before the cursor."""
        if self._end is None and self._anchor >= 0:
            refused = len(self._anchor_refusals)
            nodes = self.record.nodes_of(self._anchor)
            if refused < sum(not self._is_out(node) for _, node in nodes):
                return []  # an answer is still missing
            if not any(node in self._abandoned for _, node in nodes):
                return self._stop(Stopped(DAMAGED, self.record, self.version))
            # It was on abandoned nodes alone: the operator has accepted that.
            self._anchor, self.cursor, self._anchor_refusals = self._anchor - 1, self._anchor, set()
            self._searched = {self.cursor: Searched({*self.record.quorum.write_set(self.cursor)})}
            return [*self._read_anchor(), *(self._finish() if self._anchor < 0 else [])]
        if self.cursor < 2:
            return self._close(0)
        self._is_measuring = True
        return [Measure(self.cursor - 1)]

    def _close(self, size: int) -> list[Action]:
        end, stored_at = (self.record.base, 0) if self._end is None else (self._end.next_offset, self._end.stored_at)
        closed = self.planned.closed(self.cursor - 1, end, size=size, stored_at=stored_at, is_complete=False)
        return self._change(closed)

    # Within.

    def _change(self, record: LedgerRecord) -> list[Action]:
        self._proposed = record
        return [Change(record, self.version)]

    def _stop(self, stopped: Stopped) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = stopped
        return [stopped]


def unsettled(record: LedgerRecord, lac: int) -> Iterator[tuple[Fragment, range]]:
    """The fragments with entries behind `lac`, and entries of each that together have all its write sets."""
    for fragment in record.fragments:
        first, last = max(fragment.first, lac + 1), record.last_of(fragment)
        count = record.quorum.ensemble if last is None else min(record.quorum.ensemble, last + 1 - first)
        if count > 0:
            yield fragment, range(first, first + count)
