"""Pure: which closed ledgers lack copies, and how they get them back (P6).

A closed ledger has a shortage where a position has no node, where its node is gone for good, or as long as nobody has
looked whether its nodes have all their entries (`is_complete`): recovery stops at Qa copies, and a writer at the
entries that its nodes had acknowledged.

Open ledgers are left to their writers, which close them when they have a shortage (`LedgerWriter.should_roll`).

A `Repair` brings one ledger in order, one place (a position of a fragment) at a time:

1. The place has no node that lives: name a spare in `joining` by compare-and-set, so that the spare does not take the
   copies for garbage (C5).
2. List what the node has, after the record was read or written that names it. The node does not remove a ledger that
   was listed since its garbage collector last looked (`NodeCore.index`). So what is listed stays.
3. Copy every entry of the place that is missing.
4. A spare: put it into the fragment by compare-and-set. The record must not have changed since step 1.

A place whose node does not answer, or one of whose entries cannot be read, is left as it is, and the other places are
put in order. A spare that fails is replaced by another one.

In the end, when every node of the record was seen to have everything, `is_complete` is set. A conflict at any step ends
the repair: begin a new one with the record as it is then, from step 1. A repair that was cut off costs nothing but
time: the next one finds the node in `joining`, and the copies that were made.
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
    """A place that lacks copies."""

    place: Place
    node: str | None
    """None: the position has no node."""
    why: str


class ListEntries(NamedTuple):
    """List all that the node has of the ledger (`storage.index`, page by page): then call `listed` or `failed`."""

    node: str


class CopyEntry(NamedTuple):
    """Read the entry from one of the sources and add it on the target, with the recovery number: then call `copied`, or
    `failed` with the target if that did not answer, or `lost` if none of the sources could be read."""

    entry: int
    sources: tuple[str, ...]
    target: str
    recovery: int


class Repaired(NamedTuple):
    """Nothing is left to do now. `shortages` are those for which there was no node."""

    record: LedgerRecord
    version: int
    shortages: tuple[Shortage, ...]


class Ended(NamedTuple):
    """The repair could not go on. Try again later, with the record as it is then."""

    why: str


Action = Change | ListEntries | CopyEntry | Repaired | Ended


def shortages(record: LedgerRecord, live: Collection[str]) -> list[Shortage]:
    """Where a closed ledger lacks copies. live: the nodes that are alive, or may come back soon."""
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
    """Whether a repair of this ledger has anything to do. A node that is left in `joining` keeps copies in vain."""
    return record.is_closed and (bool(record.joining) or bool(shortages(record, live)))


def is_repairable(record: LedgerRecord, live: Collection[str], spares: Collection[str]) -> bool:
    """Whether a repair could do anything now. Without it, a ledger for which there is no node would be repaired again
    and again in vain."""
    if not record.is_closed:
        return False
    return bool(record.joining) or any(
        shortage.why == "not checked"
        or any(node not in record.fragment_of(shortage.place.first).nodes for node in spares)
        for shortage in shortages(record, live)
    )


def is_used(record: LedgerRecord, fragment: Fragment, position: int) -> bool:
    """Whether the place has entries at all."""
    return next(iter(record.entries_of(fragment, position)), None) is not None


def urgency(record: LedgerRecord, live: Collection[str]) -> tuple[int, int]:
    """By which shortages are mended first, the smallest first: how many live nodes the worst fragment has, then the
    negated number of shortages."""
    counts = [sum(node in live for node in fragment.nodes) for fragment in record.fragments]
    return min(counts), -len(shortages(record, live))


@dataclass(slots=True)
class Job:
    """The place that is being filled or checked."""

    place: Place
    node: str
    is_joining: bool
    missing: list[int]
    """The entries that are not requested yet, the last one first."""
    under_way: set[int]
    """The entries that were requested and are not copied yet. A reply may come twice."""
    is_listed: bool = False


class Repair:
    """Brings one closed ledger in order. Not thread-safe."""

    def __init__(
        self,
        record: LedgerRecord,
        version: int,
        live: Collection[str],
        spares: Iterable[str],
        *,
        at_once: int = COPIES_AT_ONCE,
    ) -> None:
        """live: as for `shortages`; spares: nodes that may take copies, the best first; at_once: how many copies are
        under way at the same time."""
        if not record.is_closed:
            raise ValueError(f"{record.id} is {record.state}; only closed ledgers are repaired")
        self.record, self.version = record, version
        self.ended: Repaired | Ended | None = None
        self.copied_entries = 0
        self._live, self._spares, self._at_once = frozenset(live), list(spares), at_once
        self._done: set[Place] = set()
        """Places whose node was seen to have all its entries."""
        self._left: list[Shortage] = []
        """Those for which there is no node, or that could not be mended."""
        self._failed: set[str] = set()
        """Nodes that did not answer, or took no copy."""
        self._blocked: set[Place] = set()
        """Places that could not be mended: who is in `joining` for them keeps the copies for the next repair."""
        self._problem = ""
        """Why, for the last one of them."""
        self._job: Job | None = None
        self._proposed: LedgerRecord | None = None

    def start(self) -> list[Action]:
        return self._go_on()

    # Messages.

    def committed(self, version: int) -> list[Action]:
        if self._proposed is None or self.ended:
            return []
        self.record, self._proposed, self.version = self._proposed, None, version
        job = self._job
        if job is not None and job.is_listed:  # the node has its place
            self._done.add(job.place)
            self._job = None
        elif job is not None:
            return [ListEntries(job.node)]
        return self._go_on()

    def conflicted(self) -> list[Action]:
        return self._end(Ended("the record has changed"))

    def unknown(self) -> list[Action]:
        """The record is read again by the next repair."""
        return self._end(Ended("it is not known whether a change of the record was committed"))

    def listed(self, node: str, entries: Collection[int]) -> list[Action]:
        """The node has these entries on its disk."""
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
        """The node has the entry on its disk."""
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
        return self._leave(job, f"entry {entry} can be read from none of its nodes")

    # Within.

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
        """The next place, or the end."""
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
        """Begin to fill a place that has no node that lives."""
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
