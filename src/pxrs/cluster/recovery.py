"""Pure: finds the last entry of a ledger that its writer has not closed, and closes the ledger (C1, C2).

The owner of the partition calls a method for each event and performs the returned actions. The steps:

1. Change the record to "recovering" by compare-and-set, with the next recovery number. The writer can no longer change
   the record, so whatever it confirms is on the nodes that the record names.
2. Fence nodes until no write set can reach Qa acknowledgements: Qw - Qa + 1 nodes of each write set, in every fragment
   that may hold entries after the highest `lac` among the answers. From now on no further entry can be confirmed.
3. From lac + 1 on, read each entry from its write set. If one node has the entry, copy it until it has Qa copies.
   Otherwise the ledger ends before it under the conditions of "The end of the ledger".
4. Change the record to "closed" by compare-and-set.

The end of the ledger (C8). A node answers for an entry that it has it, that it has it and cannot read it, that it does
not have it ("missing"), or that it does not know ("unknown"): a node in doubt has lost records of its journal, and
cannot tell whether the entry was among them (C7). The recovery asks the whole write set. It ends the ledger before the
first entry that no node has returned, if

- Qw - Qa + 1 positions answer "missing", and every other one has answered too or has had one retry period for it; or
- every position has answered "missing" or "unknown". Then the closed record names the nodes that do not know
  (`LedgerRecord.doubted`). Without this rule a power loss of all nodes, which puts all of them in doubt, would stop
  every partition for ever. It is sound while at most Qa - 1 copies of an entry are damaged.

An entry that is returned before the close is proposed becomes part of the ledger, whatever the other nodes have
answered. The ledger never ends at or before an entry that any node knows to be confirmed (`lac`), also if that node's
answer to the fence comes late: if no node has such an entry, it is damaged, and the recovery stops. In all other cases
the recovery goes on asking.

An entry that was not confirmed may become part of the ledger or not. Both are correct, because it was neither
acknowledged to its producer nor shown to a reader.

Replacements. If fewer than Qa nodes of a write set can store a recovered entry, a spare stores it. The recovery first
names the spare in `joining`, because a node removes ledgers whose record does not name it, and puts it into `fragments`
only by the commit that closes the ledger. Until then `fragments` has the nodes to which the writer has written, which a
second recovery must ask. (If the spare were in `fragments` earlier, a second recovery would ask the spare about the
next entry and count its answer "no such entry", although the replaced node has acknowledged that entry; it would be
lost.) For the same reason the recovery sends recovered entries with the `lac` with which it began: the copies on a
spare must not look confirmed to another recovery.

An empty position counts as fenced, and as the answer "missing": see `ledgers`. So does a node that an operator has
abandoned (C6), but only after every other node of the write set has answered "missing" or "unknown". This may lose
entries; the record lists the abandoned nodes permanently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    "MISSING",
    "UNKNOWN",
    "UNREADABLE",
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
"""How many entries are read at the same time."""
MISSING: Final = "missing"
UNKNOWN: Final = "unknown"
UNREADABLE: Final = "unreadable"


@dataclass(slots=True)
class Searched:
    """One entry that is being recovered."""

    answers: dict[int, str] = field(default_factory=dict)
    """By position in the writer's fragments: what its node has last answered instead of the entry: MISSING, UNKNOWN or
    UNREADABLE."""
    has_waited: bool = False
    """Whether one retry period has passed since the entry was first asked for."""
    head: EntryHead | None = None
    """None until a node has returned the entry."""
    body: Any = None
    copies: set[int] = field(default_factory=set)
    """The positions, in the fragments of the future closed record, that have the entry."""
    sent: set[str] = field(default_factory=set)
    """The nodes to which the entry was sent and which have not answered."""


# Over the limit: one method for each of the twelve events, and the steps that they share.
class Recovery:
    """Recovers one ledger once. Not thread-safe."""

    def __init__(
        self,
        record: LedgerRecord,
        version: int,
        epoch: int,
        *,
        abandoned: Collection[str] = (),
        confirmed: int = -1,
        window: int = WINDOW,
    ) -> None:
        """record, version: the ledger's record, open or recovering, read after the partition was claimed. epoch: that
        of the claim. abandoned: nodes without which an operator has decided to continue. confirmed: an entry that the
        caller knows to be confirmed, with all before it."""
        self.version = version
        self.record = record
        """The record as last committed. Its fragments are those of the writer."""
        self.planned = record
        """The record with the replacements in its fragments; it is committed when the ledger is closed."""
        self.stopped: Stopped | Closed | None = None
        self.window = window
        self.refusals = record.quorum.refusals
        """How many nodes of a write set must be fenced, or must not have the entry: see `Quorum.refusals`."""
        self.lac = max(record.confirmed, confirmed)
        """The highest entry that is known to be confirmed."""
        self.cursor = -1
        """The first entry that is not known to have Qa copies; -1 until enough nodes are fenced."""
        self._epoch = epoch
        self._abandoned = {*record.abandoned, *abandoned}
        self._fenced: set[str] = set()
        self._failed: set[str] = set()
        self._spares: list[str] = []
        self._searched: dict[int, Searched] = {}
        self._anchor = -1
        """The last entry known to be confirmed when enough nodes were fenced; -1 if there is none. It is the last entry
        of the ledger if no later one is recovered."""
        self._anchor_answers: dict[int, str] = {}
        """As `Searched.answers`, for the anchor."""
        self._sent_lac = -1
        """The `lac` of the entries that this recovery sends: that with which it began to read."""
        self._doubted: tuple[str, ...] = ()
        """See `LedgerRecord.doubted`."""
        self.left_out: int | None = None
        """An entry that was found and left out: it was never confirmed, and too few nodes could store it."""
        self._end: EntryHead | None = None
        """The head of the last entry found so far that belongs to the ledger; None until one is read."""
        self._proposed: LedgerRecord | None = None
        self._joins: tuple[int, str] | None = None
        """The position and the node that the compare-and-set under way names in `joining`."""
        self._is_begun = False
        """Whether this recovery has committed the record as "recovering"."""
        self._is_measuring = False

    @property
    def is_closing(self) -> bool:
        """Whether the end of the ledger is decided, and its closed record proposed."""
        return self._proposed is not None and self._proposed.is_closed

    # Events.

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
        """As `LedgerWriter.conflicted`: `found` is the change of this recovery, or that of another process."""
        if self._proposed is None or self.stopped:
            return []
        if found == self._proposed:
            return self.committed(version)
        return self._stop(Stopped(CHANGED, found, version))

    def unknown(self) -> list[Action]:
        """The outcome of the compare-and-set is unknown: repeat it."""
        if self._proposed is None or self.stopped:
            return []
        return [Change(self._proposed, self.version)]

    def fenced(self, node: str, lac: int) -> list[Action]:
        """The node has synced the fence. lac: the highest entry that the node knows to be confirmed."""
        if self.stopped:
            return []
        self._fenced.add(node)
        self._failed.discard(node)
        self.lac = max(self.lac, lac)
        if 0 <= self.cursor <= self.lac and self._proposed is None:
            self._take_back()
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
                if entry == self.cursor:
                    self._take_back()
            position = self.planned.position_of(node, entry)
            if position is not None:
                searched.copies.add(position)
        return self._look()

    def _take_back(self) -> None:
        """An end before the cursor may have been decided, and is not proposed yet: it was wrong."""
        self._is_measuring, self._doubted, self.left_out = False, (), None

    def awaited(self) -> tuple[int | None, dict[str, str | None]]:
        """What the recovery waits for. None and the nodes that are not fenced; or the entry at the cursor, and what the
        nodes of its write set have answered: None if a node has not; no nodes if it was returned, and lacks copies."""
        if self.cursor < 0:
            return None, {
                str(node): None
                for fragment, _ in unsettled(self.record, self.lac)
                for node in fragment.nodes
                if not self._is_out(node) and node not in self._fenced
            }
        searched = self._searched.get(self.cursor, Searched())
        if searched.head is not None:  # it waits for copies
            return self.cursor, {}
        return self.cursor, {
            str(node): searched.answers.get(position)
            for position, node in self.record.nodes_of(self.cursor)
            if not self._is_out(node)
        }

    def missing(self, node: str, entry: int) -> list[Action]:
        """The node does not have the entry, and will accept it from this recovery only: the read has fenced the
        ledger."""
        return self._answered(node, entry, MISSING)

    def doubtful(self, node: str, entry: int) -> list[Action]:
        """The node is in doubt about the ledger and does not know whether it had the entry."""
        return self._answered(node, entry, UNKNOWN)

    def unreadable(self, node: str, entry: int) -> list[Action]:
        """The node has the entry and cannot read it now. `retry` asks it again."""
        return self._answered(node, entry, UNREADABLE)

    def _answered(self, node: str, entry: int, answer: str) -> list[Action]:
        if self.stopped or self.cursor < 0:
            return []
        self._failed.discard(node)
        position = self.record.position_of(node, entry)
        if position is not None and entry == self._anchor:
            self._anchor_answers[position] = answer
        if position is not None and entry in self._searched:
            self._searched[entry].answers[position] = answer
        return self._look()

    def acked(self, node: str, entry: int) -> list[Action]:
        """The node has synced the recovered entry."""
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
        """A node is fenced with a higher recovery number."""
        return self._stop(Stopped(FENCED))

    def failed(self, node: str) -> list[Action]:
        """The node did not answer. `retry` asks it again."""
        if self.stopped:
            return []
        self._failed.add(node)
        for searched in self._searched.values():
            searched.sent.discard(node)
        return self._look()

    def offer(self, spares: Iterable[str]) -> list[Action]:
        """Set the spares, the best first."""
        self._spares = list(spares)
        return [] if self.stopped else self._look()

    def retry(self) -> list[Action]:
        """Repeat every request that was not answered; all of them are idempotent. The caller calls this from time to
        time."""
        if self.stopped or self._proposed is not None:
            return []
        self._failed.clear()
        for searched in self._searched.values():
            searched.sent.clear()
            searched.has_waited = True
        if self._is_measuring and self.cursor > 0:
            return [Measure(self.cursor - 1)]
        actions = self._fence_more()  # also after enough are fenced: the others may know of confirmed entries
        if self.cursor >= 0:
            actions += [*self._read_anchor(), *self._read(self._searched)]
        return [*actions, *self._look()]

    def measured(self, last: int, size: int) -> list[Action]:
        """The answer to `Measure`."""
        if self.stopped or not self._is_measuring or self._proposed is not None or last != self.cursor - 1:
            return []
        return self._close(size)

    # Fencing.

    def _fence_more(self) -> list[Action]:
        """Fence every node that is not fenced yet, in the fragments that may hold entries after `lac`."""
        nodes = dict.fromkeys(
            node
            for fragment, _ in unsettled(self.record, self.lac)
            for node in fragment.nodes
            if node is not None and node not in self._abandoned and node not in self._fenced
        )
        return [FenceNode(node, self.record.recovery) for node in nodes]

    def _is_fenced(self) -> bool:
        """Whether no entry after `lac` can be confirmed any more."""
        quorum = self.record.quorum
        for fragment, entries in unsettled(self.record, self.lac):
            closed = {position for position, node in enumerate(fragment.nodes) if self._is_out(node)}
            closed |= {position for position, node in enumerate(fragment.nodes) if node in self._fenced}
            for entry in entries:
                if len(closed.intersection(quorum.write_set(entry))) < self.refusals:
                    return False
        return True

    def _is_out(self, node: str | None) -> bool:
        """Whether the position counts as fenced and as having no entry, without asking: it is empty or abandoned."""
        return node is None or node in self._abandoned

    # Reading.

    def _look(self) -> list[Action]:
        """The next actions, given what is known now."""
        if self._proposed is not None or self.stopped or self._is_measuring:
            return []
        actions: list[Action] = []
        if self.cursor < 0:
            if not self._is_begun or not self._is_fenced():
                return []
            self.cursor, self._anchor, self._sent_lac = self.lac + 1, self.lac, self.lac
            actions += self._read_anchor()
        self._settle()
        searched = self._searched.get(self.cursor)
        if searched is not None and searched.head is None:
            if self.cursor <= self.lac and self._is_settled(self.cursor, searched.answers):
                return [*actions, *self._lose(self.cursor, self._finish)]
            if self.cursor > self.lac and self._is_refuted(self.cursor, searched):
                self._doubted = self._in_doubt(self.cursor, searched)
                return [*actions, *self._finish()]
        wanted = [e for e in range(self.cursor, self.cursor + self.window) if e not in self._searched]
        for entry in wanted:
            self._searched[entry] = Searched()
        return [*actions, *self._read(wanted), *self._copy()]

    def _read(self, entries: Iterable[int]) -> list[Action]:
        """Read these entries from all their nodes that have not answered. So one round trip reads the whole window; the
        first copy that arrives is used."""
        actions: list[Action] = []
        for entry in entries:
            searched = self._searched[entry]
            if searched.head is None:
                actions += self._reads(entry, searched.answers)
        return actions

    def _read_anchor(self) -> list[Action]:
        if self._anchor < 0 or self._end is not None:
            return []
        return self._reads(self._anchor, self._anchor_answers)

    def _reads(self, entry: int, answers: Mapping[int, str]) -> list[Action]:
        return [
            ReadEntry(node, entry, self.record.recovery)
            for position, node in self.record.nodes_of(entry)
            if node is not None and node not in self._abandoned and answers.get(position) not in (MISSING, UNKNOWN)
        ]

    def _settle(self) -> None:
        """Move the cursor past the entries that have Qa copies."""
        while (searched := self._searched.get(self.cursor)) is not None:
            if searched.head is None or len(searched.copies) < self.record.quorum.ack_quorum:
                return
            self._end = searched.head
            del self._searched[self.cursor]
            self.cursor += 1

    def _is_refuted(self, entry: int, searched: Searched) -> bool:
        """Whether the ledger may end before this entry, which no node has returned."""
        if self._is_settled(entry, searched.answers):
            if self._has_abandoned(entry) or self._is_missing(entry, searched.answers):
                return True
            # It ends by nodes that do not know: each of them must have told what it knows to be confirmed.
            return self._fenced.issuperset(node for _, node in self.record.nodes_of(entry) if node is not None)
        return searched.has_waited and not self._has_abandoned(entry) and self._is_missing(entry, searched.answers)

    def _is_missing(self, entry: int, answers: Mapping[int, str]) -> bool:
        """Whether so many positions do not have the entry that it was not confirmed."""
        nodes = self.record.nodes_of(entry)
        return sum(node is None or answers.get(position) == MISSING for position, node in nodes) >= self.refusals

    def _is_settled(self, entry: int, answers: Mapping[int, str]) -> bool:
        """Whether every node of the write set has answered that it does not have the entry, or does not know."""
        return all(
            self._is_out(node) or answers.get(position) in (MISSING, UNKNOWN)
            for position, node in self.record.nodes_of(entry)
        )

    def _has_abandoned(self, entry: int) -> bool:
        return any(node in self._abandoned for _, node in self.record.nodes_of(entry))

    def _in_doubt(self, entry: int, searched: Searched) -> tuple[str, ...]:
        """The nodes that do not know whether they had the entry, if the ledger ends by their answers."""
        if self._has_abandoned(entry) or self._is_missing(entry, searched.answers):
            return ()
        nodes = self.record.nodes_of(entry)
        return tuple(str(node) for position, node in nodes if searched.answers.get(position) == UNKNOWN)

    def _lose(self, entry: int, go_on: Callable[[], list[Action]]) -> list[Action]:
        """No node has this entry, which was confirmed. It is damaged, unless an operator has accepted its loss (C6)."""
        return go_on() if self._has_abandoned(entry) else self._stop(Stopped(DAMAGED, self.record, self.version))

    # Copies.

    def _copy(self) -> list[Action]:
        """Send the entries that were found to those nodes of the future closed record that lack them."""
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
                    actions.append(
                        AddEntry(node, entry, searched.head, searched.body, self._sent_lac, self.record.recovery)
                    )
        return [*actions, *self._replace()]

    def _replace(self) -> list[Action]:
        """If fewer than Qa nodes can store the entry at the cursor, name a spare in `joining`."""
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
        # Only nodes of this fragment are excluded: the nodes of a later fragment may be the only spares.
        taken = {*self.record.fragment_of(self.cursor).nodes, *self.planned.fragment_of(self.cursor).nodes}
        node = next((each for each in self._spares if each not in taken and each not in self._abandoned), None)
        if node is None:
            if self.cursor <= self.lac or not self._is_missing(self.cursor, searched.answers):
                return [NeedSpares()]
            # The entry was never confirmed: leave it out instead of waiting for a spare.
            searched.head, self.left_out = None, self.cursor
            return self._finish()
        self._spares.remove(node)
        self._joins = unable[0], node
        joining = Joining(node, self.cursor, unable[0])
        return self._change(self.record.with_joining([*self.record.joining, joining]))

    def _join(self, position: int, node: str) -> None:
        """The record names the node in `joining`: plan it at the position from the cursor to the end of the fragment.
        The copies of the node that it replaces no longer count there."""
        self.planned = self.planned.with_node(self.cursor, position, node, is_one=True)
        for entry, searched in self._searched.items():
            if self.planned.fragment_of(entry).nodes[position] == node:
                searched.copies.discard(position)

    # The end.

    def _finish(self) -> list[Action]:
        """The ledger ends before the cursor."""
        if self._end is None and self._anchor >= 0:
            if not self._is_settled(self._anchor, self._anchor_answers):
                return []  # an answer is still missing
            return self._lose(self._anchor, self._step_back)
        if self.cursor < 2:
            return self._close(0)
        self._is_measuring = True
        return [Measure(self.cursor - 1)]

    def _step_back(self) -> list[Action]:
        """Only abandoned nodes had the anchor: end the ledger before it."""
        self._anchor, self.cursor, self._anchor_answers = self._anchor - 1, self._anchor, {}
        self._searched = {self.cursor: Searched(dict.fromkeys(self.record.quorum.write_set(self.cursor), MISSING))}
        return [*self._read_anchor(), *(self._finish() if self._anchor < 0 else [])]

    def _close(self, size: int) -> list[Action]:
        end, stored_at = (self.record.base, 0) if self._end is None else (self._end.next_offset, self._end.stored_at)
        closed = self.planned.closed(self.cursor - 1, end, size=size, stored_at=stored_at, is_complete=False)
        return self._change(replace(closed, doubted=self._doubted))

    # Internal.

    def _change(self, record: LedgerRecord) -> list[Action]:
        self._proposed = record
        return [Change(record, self.version)]

    def _stop(self, stopped: Stopped) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = stopped
        return [stopped]


def unsettled(record: LedgerRecord, lac: int) -> Iterator[tuple[Fragment, range]]:
    """The fragments that may hold entries after `lac`, each with a range of such entries that covers all its write
    sets."""
    for fragment in record.fragments:
        first, last = max(fragment.first, lac + 1), record.last_of(fragment)
        count = record.quorum.ensemble if last is None else min(record.quorum.ensemble, last + 1 - first)
        if count > 0:
            yield fragment, range(first, first + count)
