"""What really happened in a simulated cluster, and the rules, held against it.

The ghost is told what brokers confirm (which readers may see from then on), what readers read, what producers are told,
and every record of a ledger that the registry accepts. It looks at the disks of the storage nodes, and trusts nothing
that the processes believe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pxrs.cluster.ledgers import LedgerName, LedgerRecord
from pxrs.cluster.records import owner_key
from pxrs.cluster.recovery import Recovery
from pxrs.testing.simulator.cluster_schedule import ClusterSchedule
from pxrs.testing.simulator.ghost import Violation

if TYPE_CHECKING:
    from pxrs.testing.simulator.cluster_machine import Disk

Partition = tuple[str, int]


class Beyond(Exception):
    """More is damaged than the quorum allows, and something is lost: the schedule ends."""


COUNTED = (
    *("confirmed", "told", "read", "recovered", "closed", "changed", "repaired", "removed"),
    *("copies checked", "shown again", "whole partitions checked"),
)
"""What is counted: events, and checks that could have failed."""


class Batch(NamedTuple):
    """The body of an entry with rows."""

    origin: tuple[int, int]
    """A producer, and the number of its batch."""
    offset: int
    rows: int


class ClusterGhost:
    def __init__(self, world: ClusterSchedule) -> None:
        self.world = world
        self.shown: dict[tuple[Partition, int], Batch] = {}
        """By partition and offset: the batch that readers may have seen there."""
        self.stored: dict[tuple[Partition, tuple[int, int]], int] = {}
        """By partition and origin: the offset of the batch that readers may have seen."""
        self.told: dict[tuple[Partition, tuple[int, int]], int] = {}
        """The offsets that producers were told."""
        self.confirmed: dict[str, int] = {}
        """By ledger: the last entry that was confirmed to anybody."""
        self.lasts: dict[str, int] = {}
        """By ledger that was closed: its last entry."""
        self.on_recovered: Callable[[LedgerRecord], None] = lambda record: None
        """Told of every ledger that a recovery closes."""
        self.deleted: set[str] = set()
        self.counts = dict.fromkeys(COUNTED, 0)
        self.refused: set[tuple[str, str]] = set()
        """By ledger and node: the nodes that have told the ledger's writer that they may have lost entries."""
        self._heard: dict[tuple[str, int], int] = {}
        """By ledger and number of a recovery: the highest entry that a node has told it to be confirmed, before it has
        proposed the close."""
        self._found: dict[tuple[str, int], set[int]] = {}
        """The same: the entries that nodes have returned to it."""

    def fail(self, rule: str, *what: object) -> None:
        if self.world.is_beyond and not rule.startswith("C8"):
            raise Beyond(rule)
        raise Violation(rule, " ".join(map(str, what)))

    # What recoveries hear.

    def is_heard(self, recovery: Recovery, lac: int) -> None:
        """A node has told a recovery that this entry is confirmed."""
        if recovery.stopped is None and not recovery.is_closing:
            key = recovery.record.id, recovery.record.recovery
            self._heard[key] = max(lac, self._heard.get(key, -1))

    def is_found(self, recovery: Recovery, entry: int) -> None:
        """A node has returned this entry to a recovery."""
        if recovery.stopped is None and not recovery.is_closing and recovery.cursor >= 0:
            key = recovery.record.id, recovery.record.recovery
            self._found.setdefault(key, set()).add(entry)

    def proposes(self, recovery: Recovery) -> None:
        """A recovery changes the record. It may leave out an entry for which there are too few nodes."""
        if recovery.left_out is not None:
            self._found.pop((recovery.record.id, recovery.record.recovery), None)

    def check_recovered(self, after: LedgerRecord) -> None:
        key = after.id, after.recovery
        if after.last is None or after.abandoned:
            return
        if after.last < self._heard.get(key, -1):
            self.fail("C8 no end below what is confirmed", after.id, "ends at", after.last, "heard", self._heard[key])
        if after.last + 1 in self._found.get(key, ()):
            self.fail("C8 a copy wins", after.id, "ends at", after.last, "although the next entry was returned")

    # What is shown, and what is told.

    def is_confirmed(self, record: LedgerRecord, entry: int, body: Any) -> None:
        """A broker confirms an entry of a ledger that it writes."""
        ledger, partition = record.id, (record.topic_id, record.partition)
        self.counts["confirmed"] += 1
        if record.topic_id in self.deleted:
            return
        if entry > self.lasts.get(ledger, entry):
            self.fail("P5 acknowledged entries survive", "entry", entry, "of", ledger, "is confirmed behind its end")
        if entry != self.confirmed.get(ledger, -1) + 1:
            self.fail("C4 confirmed in order", "entry", entry, "of", ledger, "is confirmed before an earlier one")
        self.confirmed[ledger] = entry
        found = self.world.registry.get(record.key).value
        if found is not None and not found.is_closed:
            self.check_copies(found, entry, "P3 on Qa disks")
        self.show(partition, body)

    def show(self, partition: Partition, body: Any) -> None:
        if not isinstance(body, Batch):
            return
        self.counts["shown again"] += (partition, body.offset) in self.shown
        for offset in range(body.offset, body.offset + body.rows):
            if self.shown.setdefault((partition, offset), body) != body:
                self.fail("P4 one batch at an offset", offset, "has", body, "and had", self.shown[partition, offset])
        if self.stored.setdefault((partition, body.origin), body.offset) != body.offset:
            self.fail("P3 stored once", body, "is also at", self.stored[partition, body.origin])

    def is_read(self, partition: Partition, position: int, body: Batch) -> None:
        """A reader that has read up to the position is given this batch."""
        self.counts["read"] += 1
        if body.offset != position:
            self.fail("P4 reads have no holes", body, "was read at", position)
        if self.shown.get((partition, position)) != body:
            self.fail("C4 only what is confirmed is read", body, "instead of", self.shown.get((partition, position)))

    def is_told(self, partition: Partition, origin: tuple[int, int], offset: int) -> None:
        """A producer is told that its batch is stored."""
        self.counts["told"] += 1
        if partition[0] in self.deleted:
            return
        if self.stored.get((partition, origin)) != offset:
            self.fail(
                "P3 told the truth", origin, "was told", offset, "and is at", self.stored.get((partition, origin))
            )
        self.told[partition, origin] = offset

    # Records and copies.

    def on_ledger(self, before: LedgerRecord | None, after: LedgerRecord) -> None:
        """The registry accepts a record."""
        self.world.note("record", after.id, after.state, after.recovery, after.fragments, after.joining, after.last)
        if before is None:
            return
        self.counts["changed"] += not after.is_closed
        self.count_change(before, after)
        if before.is_closed:
            if (before.last, before.end) != (after.last, after.end):
                self.fail("C1 closed for ever", before, after)
            self.counts["repaired"] += before.fragments != after.fragments
        elif after.is_closed and after.last is not None:
            self.counts["recovered" if after.recovery else "closed"] += 1
            if after.recovery:
                self.check_recovered(after)
                self.on_recovered(after)
            elif after.is_complete and any((after.id, node) in self.refused for node in after.named):
                self.fail("C7 not complete after a doubt", after)
            self.lasts[after.id] = after.last
            if after.topic_id not in self.deleted and after.last < self.confirmed.get(after.id, -1):
                self.fail("P5 acknowledged entries survive", after.id, "ends at", after.last)
        if after.topic_id not in self.deleted:
            last = after.last if after.last is not None else self.confirmed.get(after.id, -1)
            for entry in range(last + 1):
                self.check_copies(after, entry, "C1 Qa copies")

    def count_change(self, before: LedgerRecord, after: LedgerRecord) -> None:
        """What has happened to the nodes of a ledger."""
        counts, nodes = self.world.counts, after.fragments[-1].nodes
        if before.is_closed and before.fragments != after.fragments:
            records = self.world.registry.ledgers()
            counts["repair during a fail-over"] += any(each.state == "recovering" for each, _ in records)
        elif after.state == "open" and before.fragments != after.fragments:
            for old, new in zip(before.fragments[-1].nodes, nodes, strict=True):
                if old != new:
                    counts["emptied" if new is None else "filled" if old is None else "replaced"] += 1
                    counts["node taken back"] += new is not None and new in before.named
        elif after.state == "recovering":
            counts["recovered anew"] += before.state == "recovering" and before.recovery < after.recovery
            counts["joined a recovery"] += bool(after.joining)

    def check_copies(self, record: LedgerRecord, entry: int, rule: str) -> None:
        """The entry is on the disks of Qa nodes that the record names for it. Disks that were lost count: how many may
        be lost is the schedule's business."""
        self.counts["copies checked"] += 1
        nodes = [node for _, node in record.nodes_of(entry) if node is not None]
        count = sum(
            node in self.world.lost_nodes
            or (record.id, entry) in self.world.machine_of(node).hurt
            or self.is_on_disk(node, record.id, entry)
            for node in nodes
        )
        if count < record.quorum.ack_quorum:
            self.fail(rule, "entry", entry, "of", record.id, "is on the disks of", count, "of", nodes)

    def is_on_disk(self, node: str, ledger: str, entry: int) -> bool:
        disk: Disk = self.world.machine_of(node).disk
        return disk.node == node and disk.has(ledger, entry)

    # The end.

    def is_whole(self, partition: Partition, records: list[LedgerRecord]) -> bool:
        """Whether everything that was shown is in the partition as it is now. False: a node does not serve."""
        bodies: list[Any] = []
        for record in records:
            last = record.last if record.last is not None else self.confirmed.get(record.id, -1)
            for entry in range(last + 1):
                body = self.world.read(record, entry)
                if body is None:
                    return False
                bodies.append(body)
        found: dict[int, Batch] = {}
        for body in bodies:
            if isinstance(body, Batch):
                self.show(partition, body)
                found.update(dict.fromkeys(range(body.offset, body.offset + body.rows), body))
        self.counts["whole partitions checked"] += 1
        start = records[0].base if records else 0
        for (where, offset), body in self.shown.items():
            if where == partition and offset >= start and found.get(offset) != body:
                self.fail("P5 acknowledged entries survive", offset, "had", body, "and has", found.get(offset))
        return True

    def check_rest(self) -> None:
        """Nothing happens any more: every ledger has all its copies, and nothing is left that no record names."""
        world = self.world
        for record, _ in world.registry.ledgers():
            count = min(record.quorum.write_quorum, len(world.machines))
            if record.is_closed and record.last is not None:
                for entry in range(record.last + 1):
                    kept = [
                        node for _, node in record.nodes_of(entry) if node and self.is_on_disk(node, record.id, entry)
                    ]
                    if len(kept) < count:
                        self.fail("P6 all copies", "entry", entry, "of", record.id, "is on", kept)
            elif world.registry.get(owner_key(record.topic_id, record.partition)).value.epoch != record.epoch:
                self.fail("P5 closed or written", record)
        for machine in world.machines:
            for ledger in machine.disk.durable:
                record = world.registry.get(LedgerName.of_id(ledger).key).value
                if record is None or machine.core.node not in record.named:
                    self.fail("P7 nothing is left", ledger, "on", machine.core.node)
        for key in world.registry.keys:
            if any(topic_id in key for topic_id in self.deleted):
                self.fail("P7 nothing is left", key)
