"""A simulated machine with a storage node: its disk, its journal, its crashes and its garbage collector.

What is written to the journal is lost by a crash unless it was synced; of what was not, a part may be on the disk
nevertheless. A machine may also come back with an empty disk, or with a copy of its disk that was made earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import NodeRecord, node_key, owner_key
from pxrs.cluster.storage.core import (
    Cookie,
    JournalItem,
    NodeCore,
    Outcome,
    RemoveItem,
    Start,
    StoreItem,
    decide_start,
)
from pxrs.errors import EntryDiffers
from pxrs.testing.simulator.cluster_schedule import ClusterSchedule, Event, ledger_key

CLUSTER = "c"


@dataclass(slots=True)
class Disk:
    """What a crash leaves."""

    cookie: Cookie | None = None
    journal: list[JournalItem] = field(default_factory=list)
    durable: dict[str, set[int]] = field(default_factory=dict)
    """By ledger: the entries that the journal has."""

    @property
    def node(self) -> str:
        return "" if self.cookie is None else self.cookie.node

    def write(self, items: list[JournalItem]) -> None:
        for item in items:
            self.journal.append(item)
            if isinstance(item, StoreItem):
                self.durable.setdefault(item.ledger, set()).add(item.entry)
            elif isinstance(item, RemoveItem):
                self.durable.pop(item.ledger, None)
            else:
                self.durable.setdefault(item.ledger, set())

    def copy(self) -> Disk:
        return Disk(self.cookie, list(self.journal), {ledger: set(found) for ledger, found in self.durable.items()})


class Machine:
    """A storage node's process, on the machine with this address."""

    def __init__(self, world: ClusterSchedule, address: int) -> None:
        self.world, self.address = world, address
        self.disk = Disk()
        self.copies: list[Disk] = []
        """Copies of the disk that were made before its last start, or before its journal's end was last recorded."""
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
        start = self.decide(cookie, found.value if found else None)
        if start.is_new:
            if cookie is not None:
                world.lost_nodes.add(cookie.node)
            self.disk, self.copies = Disk(), []
        elif cookie is not None:
            self.copies.append(self.disk.copy())
        self.disk.cookie = Cookie(start.node, CLUSTER, start.starts)
        record = NodeRecord(str(self.address), start.starts, journal_end=len(self.disk.journal))
        world.registry.commit({}, {node_key(start.node): record})
        world.homes[start.node] = self
        self.core = world.defects.node(start.node)
        for item in self.disk.journal:
            self.core.replay(item)
        self.tail, self.replies = [], []
        self.is_up, self.is_syncing = True, False
        world.note(start.node, "starts at", self.address, start.why)

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
