"""Pure: which closed ledgers lack copies, and how the copies are created again (P6).

A place is a position of a fragment. A closed ledger has a shortage at a place if the position has no node, if its node
is lost (away for too long, or retired), or if it is not known that the node has all its entries (`is_complete` of the
record is False): a recovery stops at Qa copies, and a writer may close a ledger before the last node has answered.

Open ledgers are not repaired. Their writers close them when they lack copies (`LedgerWriter.should_roll`).

A `Repair` repairs one ledger, one place at a time:

1. If the place has no live node, name a spare in `joining` by compare-and-set, so that the spare does not remove the
   copies as garbage (C5).
2. List the entries that the node has, after the record that names the node was read or written. A node does not remove
   a ledger that was listed since its garbage collector read the record (`NodeCore.index`). So what was listed stays.
3. Copy every entry of the place that the node lacks.
4. If the node is a spare, put it into the fragment by compare-and-set. The record must not have changed since step 1.

If the node of a position does not answer, or one of its entries cannot be read, the repair leaves this position as it
is and continues with the others. A spare that fails is replaced by another one.

When every node of the record is known to have all its entries, the repair sets `is_complete`. A conflict at any step
ends the repair; the caller begins a new one with the current record, from step 1. An interrupted repair loses no work:
the next one finds the node in `joining`, and the entries that were copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pxrs.cluster.ledgers import Fragment, Joining, LedgerRecord
from pxrs.cluster.replication import Change

COPIES_AT_ONCE: Final = 16


class Place(NamedTuple):
    """A position of the fragment that begins at `first`."""

    first: int
    position: int


class Shortage(NamedTuple):
    """A place that lacks copies, or whose copies were not checked."""

    place: Place
    node: str | None
    """None: the position has no node."""
    why: str


class ListEntries(NamedTuple):
    """List all entries of the ledger that the node has (`storage.index`), then call `listed` or `failed`."""

    node: str


class CopyEntry(NamedTuple):
    """Read the entry from one of the sources and add it on the target, with the recovery number. Then call `copied`;
    `failed` with the target if the target did not answer; or `lost` if the entry could be read from no source."""

    entry: int
    sources: tuple[str, ...]
    target: str
    recovery: int


class Repaired(NamedTuple):
    """The repair has done all that it can. `shortages` are the places for which there was no spare."""

    record: LedgerRecord
    version: int
    shortages: tuple[Shortage, ...]


class Ended(NamedTuple):
    """The repair failed. Try again later, with the record as it is then."""

    why: str


Action = Change | ListEntries | CopyEntry | Repaired | Ended


def shortages(record: LedgerRecord, live: Collection[str]) -> list[Shortage]:
    """The places of a closed ledger that lack copies or were not checked. live: the nodes that are alive, or have been
    away for less than `copies_grace_s`, without retired ones."""
    if not record.is_closed:
        return []
    found = []
    for fragment in record.fragments:
        for position, node in enumerate(fragment.nodes):
            if not is_used(record, fragment, position):
                continue
            if node is None:
                found.append(Shortage(Place(fragment.first, position), None, "no node"))
            elif node not in live:
                found.append(Shortage(Place(fragment.first, position), node, "node is gone"))
            elif not record.is_complete:
                found.append(Shortage(Place(fragment.first, position), node, "not checked"))
    return found


def needs_repair(record: LedgerRecord, live: Collection[str]) -> bool:
    """Whether the ledger needs a repair. A node that an interrupted repair left in `joining` is a reason too, because
    it stores copies that the record does not use."""
    return record.is_closed and (bool(record.joining) or bool(shortages(record, live)))


def is_repairable(record: LedgerRecord, live: Collection[str], spares: Collection[str]) -> bool:
    """Whether a repair could make progress now. Without this check, a ledger for which there is no spare would be
    repaired in an endless loop."""
    if not record.is_closed:
        return False
    return bool(record.joining) or any(
        shortage.why == "not checked"
        or any(node not in record.fragment_of(shortage.place.first).nodes for node in spares)
        for shortage in shortages(record, live)
    )


def is_used(record: LedgerRecord, fragment: Fragment, position: int) -> bool:
    """Whether the place has any entries."""
    return next(iter(record.entries_of(fragment, position)), None) is not None


def urgency(record: LedgerRecord, live: Collection[str]) -> tuple[int, int]:
    """The sort key of repairs; the smallest is repaired first. The number of live nodes of the fragment that has the
    fewest, then the negated number of shortages."""
    counts = [sum(node in live for node in fragment.nodes) for fragment in record.fragments]
    return min(counts), -len(shortages(record, live))


@dataclass(slots=True)
class Job:
    """The place that the repair works on."""

    place: Place
    node: str
    is_joining: bool
    missing: list[int]
    """The entries to copy that were not requested yet, the last one first."""
    under_way: set[int]
    """The entries that were requested and are not copied yet. A second reply for an entry is ignored."""
    is_listed: bool = False


class Repair:
    """Repairs one closed ledger. Not thread-safe."""

    def __init__(
        self,
        record: LedgerRecord,
        version: int,
        live: Collection[str],
        spares: Iterable[str],
        *,
        at_once: int = COPIES_AT_ONCE,
    ) -> None:
        """live: as for `shortages`. spares: nodes that accept copies, the best first. at_once: how many entries are
        copied at the same time."""
        if not record.is_closed:
            raise ValueError(f"{record.id} is {record.state}; only closed ledgers are repaired")
        self.record, self.version = record, version
        self.ended: Repaired | Ended | None = None
        self.copied_entries = 0
        self._live, self._spares, self._at_once = frozenset(live), list(spares), at_once
        self._done: set[Place] = set()
        """Places whose node is known to have all its entries."""
        self._left: list[Shortage] = []
        """Shortages for which there is no spare, or that could not be repaired."""
        self._failed: set[str] = set()
        """Nodes that did not answer, or accepted no copy."""
        self._blocked: set[Place] = set()
        """Positions that could not be repaired. Their nodes in `joining` keep the copies for the next repair."""
        self._problem = ""
        """Why the last one of them could not be repaired."""
        self._job: Job | None = None
        self._proposed: LedgerRecord | None = None

    def start(self) -> list[Action]:
        return self._go_on()

    # Events.

    def committed(self, version: int) -> list[Action]:
        if self._proposed is None or self.ended:
            return []
        self.record, self._proposed, self.version = self._proposed, None, version
        job = self._job
        if job is not None and job.is_listed:  # this commit put the spare into its fragment
            self._done.add(job.place)
            self._job = None
        elif job is not None:
            return [ListEntries(job.node)]
        return self._go_on()

    def conflicted(self) -> list[Action]:
        return self._end(Ended("the record has changed"))

    def unknown(self) -> list[Action]:
        """The outcome of the compare-and-set is unknown. The next repair reads the record again."""
        return self._end(Ended("it is not known whether a change of the record was committed"))

    def listed(self, node: str, entries: Collection[int]) -> list[Action]:
        """The node has synced these entries."""
        job = self._job
        if self.ended or job is None or job.is_listed or job.node != node:
            return []
        present = frozenset(entries)
        fragment = self.record.fragment_of(job.place.first)
        job.missing = [e for e in self.record.entries_of(fragment, job.place.position) if e not in present]
        job.missing.reverse()
        job.is_listed = True
        return self._copy()

    def copied(self, node: str, entry: int) -> list[Action]:
        """The node has synced the entry."""
        job = self._job
        if self.ended or job is None or job.node != node or entry not in job.under_way:
            return []
        self.copied_entries += 1
        job.under_way.remove(entry)
        return self._copy()

    def failed(self, node: str) -> list[Action]:
        """The node that gets copies, or is asked for its list, does not answer, or takes no copy."""
        job = self._job
        if self.ended or job is None or job.node != node:
            return []
        self._failed.add(node)
        return self._leave(job, f"storage node {node} does not answer")

    def lost(self, entry: int) -> list[Action]:
        """The entry could be read from none of its nodes."""
        job = self._job
        if self.ended or job is None or entry not in job.under_way:
            return []
        nodes = self.record.fragment_of(job.place.first).nodes
        self._left.append(Shortage(job.place, nodes[job.place.position], "entries cannot be read"))
        return self._leave(job, f"entry {entry} cannot be read from any of its nodes")

    # Internal.

    def _end(self, ended: Repaired | Ended) -> list[Action]:
        if self.ended:
            return []
        self.ended = ended
        return [ended]

    def _leave(self, job: Job, why: str) -> list[Action]:
        """Go on without what the job could not do."""
        self._blocked.add(job.place)
        self._problem = why
        if self._proposed is not None:  # a request of an earlier job
            return self._end(Ended(why))
        self._job = None
        return self._go_on()

    def _go_on(self) -> list[Action]:
        """Begin with the next place that has a shortage, or end the repair."""
        done = {shortage.place for shortage in self._left} | self._done
        for shortage in shortages(self.record, self._live):
            if shortage.place in done:
                continue
            if shortage.why == "not checked" and shortage.node is not None and shortage.node not in self._failed:
                self._job = Job(shortage.place, shortage.node, False, [], set())
                return [ListEntries(shortage.node)]
            if shortage.why != "not checked" and (actions := self._join(shortage)):
                return actions
            self._left.append(shortage)
        gone = [shortage for shortage in self._left if shortage.node is not None]
        is_complete = self.record.is_complete or not gone
        joining = tuple(each for each in self.record.joining if each[1:] in self._blocked)
        if is_complete != self.record.is_complete or self.record.joining != joining:
            self._proposed = replace(self.record, is_complete=is_complete, joining=joining)
            return [Change(self._proposed, self.version)]
        if self._problem and self._left:
            return self._end(Ended(self._problem))
        return self._end(Repaired(self.record, self.version, tuple(self._left)))

    def _join(self, shortage: Shortage) -> list[Action]:
        """Begin to fill a place that has no live node; nothing if there is no spare for it."""
        place = shortage.place
        nodes = self.record.fragment_of(place.first).nodes
        begun = [each.node for each in self.record.joining if each[1:] == place and each.node in self._spares]
        able = self._live - self._failed
        node = next((node for node in [*begun, *self._spares] if node in able and node not in nodes), None)
        if node is None:
            return []
        self._job = Job(place, node, True, [], set())
        if node in begun:
            return [ListEntries(node)]
        others = [each for each in self.record.joining if each[1:] != place]
        self._proposed = self.record.with_joining([*others, Joining(node, *place)])
        return [Change(self._proposed, self.version)]

    def _copy(self) -> list[Action]:
        job = self._job
        assert job is not None
        actions: list[Action] = []
        while job.missing and len(job.under_way) < self._at_once:
            entry = job.missing.pop()
            job.under_way.add(entry)
            sources = [node for _, node in self.record.nodes_of(entry) if node is not None and node != job.node]
            sources.sort(key=lambda node: node not in self._live)
            actions.append(CopyEntry(entry, tuple(sources), job.node, self.record.recovery))
        if job.under_way or job.missing:
            return actions
        if not job.is_joining:
            self._done.add(job.place)
            self._job = None
            return [*actions, *self._go_on()]
        joining = [each for each in self.record.joining if each[1:] != job.place]
        self._proposed = self.record.with_node_in(*job.place, job.node).with_joining(joining)
        return [*actions, Change(self._proposed, self.version)]
