"""A simulated machine with a storage node: its disk, its journal, its crashes and its garbage collector.

What is written to the journal is lost by a crash unless it was synced; of what was not, a part may be on the disk
nevertheless. A machine may also come back with an empty disk, or with a copy of its disk that was made earlier. And its
disk may damage what was synced: items in the middle of the journal or at its end, the end itself, or single entries
that cannot be read any more. The mark (C9) survives the process, and is lost with the machine's power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pxrs.cluster.ledgers import LedgerName, LedgerRecord
from pxrs.cluster.records import OWNERS, NodeRecord, OwnerRecord, node_key, owner_key
from pxrs.cluster.storage.core import (
    Added,
    Cookie,
    JournalItem,
    Mark,
    NodeCore,
    Outcome,
    RememberItem,
    RemoveItem,
    Start,
    StoreItem,
    decide_start,
    next_cookie,
    proven_end,
)
from pxrs.errors import EntryDiffers
from pxrs.testing.simulator.cluster_schedule import ClusterSchedule, Event, ledger_key

CLUSTER = "c"


@dataclass(slots=True)
class Disk:
    """What a crash leaves."""

    cookie: Cookie | None = None
    journal: list[JournalItem | None] = field(default_factory=list)
    """None: the item is damaged."""
    durable: dict[str, set[int]] = field(default_factory=dict)
    """By ledger: the entries that the journal has."""
    known: set[int] = field(default_factory=set)
    """The places in the journal that were damaged before an earlier start, which has journaled its doubt."""
    unreadable: set[tuple[str, int]] = field(default_factory=set)
    """Entries that the journal has, and that cannot be read."""
    is_unchecked: bool = False
    """Closed ledgers were not compared with the journal since a start in doubt."""

    @property
    def node(self) -> str:
        return "" if self.cookie is None else self.cookie.node

    def write(self, items: Iterable[JournalItem]) -> None:
        for item in items:
            self.journal.append(item)
            self._count(item)

    def _count(self, item: JournalItem) -> None:
        if isinstance(item, StoreItem):
            self.durable.setdefault(item.ledger, set()).add(item.entry)
            self.unreadable.discard((item.ledger, item.entry))
        elif isinstance(item, RemoveItem):
            self.durable.pop(item.ledger, None)
            self.unreadable = {each for each in self.unreadable if each[0] != item.ledger}
        elif not isinstance(item, RememberItem):
            self.durable.setdefault(item.ledger, set())

    def damage(self, places: Iterable[int], *, is_cut: bool = False) -> set[tuple[str, int]]:
        """Items are damaged; is_cut: they are gone, and all that follow them. Returns the entries that are lost."""
        before = {(ledger, entry) for ledger, found in self.durable.items() for entry in found}
        unreadable = self.unreadable
        for place in places:
            self.journal[place] = None
            if is_cut:
                del self.journal[place:]
                break
        self.durable = {}
        for item in self.journal:
            if item is not None:
                self._count(item)
        self.unreadable = {each for each in unreadable if each[1] in self.durable.get(each[0], ())}
        return before - {(ledger, entry) for ledger, found in self.durable.items() for entry in found}

    def has(self, ledger: str, entry: int) -> bool:
        """Whether the entry is there and can be read."""
        return entry in self.durable.get(ledger, ()) and (ledger, entry) not in self.unreadable

    def copy(self) -> Disk:
        durable = {ledger: set(found) for ledger, found in self.durable.items()}
        return Disk(self.cookie, list(self.journal), durable, set(self.known), set(self.unreadable), self.is_unchecked)


class Machine:
    """A storage node's process, on the machine with this address."""

    def __init__(self, world: ClusterSchedule, address: int) -> None:
        self.world, self.address = world, address
        self.disk = Disk()
        self.copies: list[Disk] = []
        """Copies of the disk that were made before its last start, or before its journal's end was last recorded."""
        self.mark: Mark | None = None
        self.is_hurt = False
        """Whether the disk has lost something that was synced, and that is not repaired yet."""
        self.hurt: set[tuple[str, int]] = set()
        """The entries that the disk has lost, by ledger and number."""
        self.told: set[tuple[str, int]] = set()
        """The unreadable entries of which the ledgers were marked as incomplete by this process."""
        self.scanned: Any = None
        """What `scan` has found when a copy of the disk was made; for a defect."""
        self.is_up = self.is_syncing = False
        self.run = 0
        """Which start this is. What an earlier process has left to be done is void."""
        self.core = NodeCore("")
        self.tail: list[JournalItem] = []
        """Appended to the journal, and not synced."""
        self.replies: list[tuple[Any, Callable[[Any], None], Event]] = []
        """They wait for the next sync."""
        self.start()

    # Its life.

    def start(self) -> None:
        world, cookie = self.world, self.disk.cookie
        self.run += 1
        found = world.registry.get(node_key(cookie.node)) if cookie else None
        registered: NodeRecord | None = found.value if found else None
        start, tried = self.decide(cookie, registered), world.next_name("s")
        is_proven = start.is_new or self.is_proven(proven_end(registered, self.mark))
        if start.is_new:
            if cookie is not None:
                world.lost_nodes.add(cookie.node)
            self.disk, self.copies, self.is_hurt, self.hurt = Disk(), [], False, set()
        elif cookie is not None:
            self.copies.append(self.disk.copy())
        self.disk.cookie = next_cookie(cookie, registered, start, CLUSTER, tried)
        before = registered.start if registered is not None and not start.is_new else tried
        self.mark = Mark((tried, before), len(self.disk.journal)) if is_proven else None
        record = NodeRecord(str(self.address), start.starts, journal_end=len(self.disk.journal), start=tried)
        world.registry.commit({}, {node_key(start.node): record})
        world.homes[start.node] = self
        self.core = world.defects.node(start.node)
        for item in self.disk.journal:
            if item is not None:
                self.core.replay(item)
        self.tail, self.replies, self.told = [], [], set()
        world.note(start.node, "starts at", self.address, start.why, "" if is_proven else "in doubt")
        if not is_proven:
            world.counts["start in doubt"] += 1
            if not world.is_calm and world.rng.random() < 0.2:
                world.counts["died before its doubt"] += 1
                return
            self.begin_doubt()
        self.is_up, self.is_syncing = True, False

    def is_proven(self, proof: int | None) -> bool:
        """Whether the journal is whole up to this position."""
        journal, known = self.disk.journal, self.disk.known
        if proof is None or len(journal) < proof:
            return False
        return all(item is not None or place in known for place, item in enumerate(journal[:proof]))

    def begin_doubt(self) -> None:
        unclosed, highest = self.scan()
        self.journal_doubt(self.core.begin_doubt(unclosed, highest))
        self.disk.known = {place for place, item in enumerate(self.disk.journal) if item is None}
        self.disk.is_unchecked = True
        assert self.disk.cookie is not None
        self.mark = Mark(self.disk.cookie.tries[-1:], len(self.disk.journal))

    def scan(self) -> tuple[list[str], list[str]]:
        """The ledgers that are not closed and name the node, and the ledgers with the highest numbers."""
        unclosed = []
        highest: dict[tuple[str, int], int] = {}
        for record, _ in self.world.registry.ledgers():
            highest[record.topic_id, record.partition] = record.number
            if not record.is_closed and self.core.node in self.named(record):
                unclosed.append(record.id)
        for key, (owner, _) in self.world.registry.keys.items():
            if isinstance(owner, OwnerRecord) and owner.next:
                topic_id, _, partition = key.removeprefix(OWNERS).rpartition("/")
                highest[topic_id, int(partition)] = max(owner.next - 1, highest.get((topic_id, int(partition)), -1))
        return unclosed, [LedgerName(*partition, number).id for partition, number in highest.items()]

    def named(self, record: LedgerRecord) -> set[str]:
        return record.named

    def journal_doubt(self, items: list[JournalItem]) -> None:
        self.disk.write(items)

    def decide(self, cookie: Cookie | None, registered: NodeRecord | None) -> Start:
        return decide_start(cookie, registered, CLUSTER, len(self.disk.journal), self.world.next_name("n"))

    def crash(self) -> None:
        self.world.counts["crash, not all synced" if self.tail else "crash"] += 1
        kept = self.tail[: int(self.world.rng.random() * (len(self.tail) + 1))]
        self.disk.write(kept)
        self.is_up = False
        self.world.note(self.core.node, "crashes")

    def lose_disk(self, *, older: bool) -> None:
        """The disk is empty, or an earlier copy of it, when the machine starts again."""
        self.world.note(self.core.node, "loses its disk", "to an older copy" if older else "")
        self.world.lost_nodes.add(self.core.node)
        self.world.counts["disk, older" if older else "disk, empty"] += 1
        self.disk = self.copies[int(self.world.rng.random() * len(self.copies))].copy() if older else Disk()

    def lose_power(self) -> None:
        if self.is_up:
            self.crash()
        self.mark = None

    def harm(self, places: Iterable[int], *, is_cut: bool = False) -> None:
        """The disk of a machine that is down has damaged these items of its journal, or lost its end."""
        self.world.note(self.disk.node, "has lost of its disk", list(places), "the end" if is_cut else "")
        self.is_hurt = True
        self.hurt |= self.disk.damage(places, is_cut=is_cut)

    def turn_back(self, copy: Disk) -> None:
        """The disk of a machine that is down is a copy that was made while it ran."""
        self.world.note(self.disk.node, "has an older disk", len(copy.journal), "of", len(self.disk.journal))
        lost = {
            (ledger, entry)
            for ledger, found in self.disk.durable.items()
            for entry in found - copy.durable.get(ledger, set())
        }
        self.is_hurt, self.hurt, self.disk = True, self.hurt | lost, copy

    def rot(self, ledger: str, entry: int) -> None:
        """An entry cannot be read any more."""
        self.world.note(self.disk.node, "cannot read entry", entry, "of", ledger)
        self.is_hurt = True
        self.hurt.add((ledger, entry))
        self.disk.unreadable.add((ledger, entry))

    # Requests.

    def receive(
        self, node: str, act: Callable[[NodeCore], Any], on_reply: Callable[[Any], None], on_failure: Event
    ) -> None:
        if not self.is_up or not self.is_meant(node):
            self.world.post(on_failure)
            return
        self.handle(act(self.core), on_reply, on_failure)

    def is_meant(self, node: str) -> bool:
        return self.core.node == node

    def handle(self, outcome: Outcome, on_reply: Callable[[Any], None], on_failure: Event) -> None:
        if isinstance(outcome.reply, EntryDiffers):
            self.world.ghost.fail("C2 one entry of a number", outcome.reply)
        self.tail += outcome.append
        reply = outcome.reply
        if isinstance(reply, Added) and not outcome.append and (reply.ledger, reply.entry) in self.disk.unreadable:
            state = self.core.state(reply.ledger)
            assert state is not None
            head = state.index.heads[reply.entry]  # type: ignore[attr-defined]
            self.tail.append(StoreItem(reply.ledger, reply.entry, head, -1, None))  # it is written again
        if self.tail and not self.is_syncing:
            self.is_syncing = True
            self.world.delay(partial(self.sync, self.run), "sync", None, self.address)
        if outcome.is_after_sync and self.tail:
            self.replies.append((outcome.reply, on_reply, on_failure))
        else:
            self.world.send(partial(on_reply, outcome.reply), on_failure, "answer", None, self.address)

    def sync(self, run: int) -> None:
        if run != self.run or not self.is_up:
            return
        records_end = self.world.rng.random() < 0.1
        if records_end:
            self.copies.append(self.disk.copy())  # its journal is shorter than the one that is recorded now
        self.disk.write(self.tail)
        if self.mark is not None:
            self.mark = self.mark._replace(end=len(self.disk.journal))
        self.tail, replies, self.replies, self.is_syncing = [], self.replies, [], False
        for reply, on_reply, on_failure in replies:
            self.world.send(partial(on_reply, reply), on_failure, "answer", None, self.address)
        if records_end:
            key = node_key(self.core.node)
            record = replace(self.world.registry.get(key).value, journal_end=len(self.disk.journal))
            self.world.registry.commit({}, {key: record})

    # Garbage.

    def collect(self) -> None:
        """List the ledgers; then, at a later moment, read their records; then remove."""
        self.world.delay(partial(self.look, self.run, self.core.ledgers()))
        self.world.delay(partial(self.settle, self.run))

    def settle(self, run: int) -> None:
        """End doubts, and have the copies made again of what the node lacks (C7)."""
        if run != self.run or not self.is_up:
            return
        registry = self.world.registry
        for ledger in self.core.doubts():
            record, version = registry.get(ledger_key(ledger))
            if record is None or record.is_closed:
                self.compare(record, version)
                self.core.end_doubt(ledger)
        for record, version in registry.ledgers():
            rotten = {each for each in self.disk.unreadable if each[0] == record.id}
            if record.is_closed and (self.disk.is_unchecked or rotten - self.told or (rotten and record.is_complete)):
                self.compare(record, version)
                self.told |= rotten
        self.disk.is_unchecked = False
        if self.is_hurt and not self.core.doubts() and not self.lacking():
            self.is_hurt, self.hurt = False, set()

    def compare(self, record: LedgerRecord | None, version: int) -> None:
        """The closed ledger is marked as incomplete if the node lacks an entry of it. If it is marked already, its
        version is raised: a repair that is under way may have counted on the entry."""
        if record is None or not record.is_closed:
            return
        lacks = any(not self.disk.has(record.id, entry) for entry in self.entries_of(record))
        if lacks or any(each.node == self.core.node for each in record.joining):
            self.world.counts["cleared"] += lacks
            is_complete = record.is_complete and not lacks
            self.world.registry.commit({record.key: version}, {record.key: replace(record, is_complete=is_complete)})

    def entries_of(self, record: LedgerRecord) -> Iterator[int]:
        """The entries of a closed ledger that its record assigns to this node."""
        for fragment in record.fragments:
            for position, node in enumerate(fragment.nodes):
                if node == self.core.node:
                    yield from record.entries_of(fragment, position)

    def lacking(self) -> bool:
        """Whether the disk still lacks what it has lost, and a record assigns to it."""
        for ledger, entry in self.hurt:
            record: LedgerRecord | None = self.world.registry.get(ledger_key(ledger)).value
            if record is not None and record.position_of(self.disk.node, entry) is not None:
                is_in = record.last is None or entry <= record.last
                if is_in and not self.disk.has(ledger, entry):
                    return True
        return False

    def look(self, run: int, listed: list[tuple[str, int]]) -> None:
        for ledger, mark in listed if run == self.run and self.is_up else ():
            record: LedgerRecord | None = self.world.registry.get(ledger_key(ledger)).value
            if record is None or self.core.node not in record.named:
                if record is not None:
                    self.world.on_garbage(record)
                self.world.delay(partial(self.remove, run, ledger, mark), "remove", None, self.address)

    def remove(self, run: int, ledger: str, mark: int) -> None:
        if run != self.run or not self.is_up:
            return
        topic_id, partition, _ = ledger.split("/")
        has_partition = self.world.registry.get(owner_key(topic_id, int(partition))).value is not None
        outcome = self.core.remove(ledger, mark, has_partition=has_partition)
        self.world.note(self.core.node, "removes", ledger, outcome.reply)
        self.world.ghost.counts["removed"] += bool(outcome.append)
        self.world.counts["not removed, touched"] += not outcome.append and self.core.state(ledger) is not None
        self.handle(outcome, lambda reply: None, lambda: None)
