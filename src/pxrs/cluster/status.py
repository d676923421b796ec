"""The state of the cluster as recorded in the registry: brokers, storage nodes, topics, partitions, ledgers, faults.

`read_status` needs no broker. `assemble` is pure. The records are read by several scans one after the other, so they
may be of slightly different moments, and may have changed when they are shown.

A place (a position of a fragment of a ledger) is reported as lacking copies as soon as its node is away. Brokers wait
for `copies_grace_s` before they create the copies again, so a node that is being restarted is reported for a short
time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

from pxrs.cluster import records
from pxrs.cluster.copies import is_used
from pxrs.cluster.ledgers import CLOSED, LedgerName, LedgerRecord
from pxrs.cluster.naming import known_cluster_id
from pxrs.cluster.placement import shortfall, storage_candidates
from pxrs.cluster.records import (
    RETIRED,
    Abandonment,
    AliveNode,
    BrokerRecord,
    DeletedTopic,
    NodeRecord,
    OwnerRecord,
    TopicRecord,
)
from pxrs.cluster.staged import STAGED, StagedFile, StagedName
from pxrs.cluster.troubles import TROUBLES, Troubles
from pxrs.model import is_internal
from pxrs.registry.contract import Registry

NO_NODE: Final = "no node"
"""The position has no node, because there was no spare."""
AWAY: Final = "node is away"
RETIRING: Final = "node is retired"
"""The node was retired: its copies are being created again on other nodes."""
UNCHECKED: Final = "not checked"
"""A recovery closed the ledger, or a node failed while it was open, and no repair has checked its copies yet."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker that is alive."""

    incarnation: str
    name: str
    address: str
    version: str
    started_at: float
    """Wall-clock seconds; 0 if unknown."""
    is_leaving: bool
    partitions: int
    """How many partitions it owns."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A storage node, whether it is alive or not."""

    id: str
    address: str
    is_alive: bool
    is_retired: bool
    refuses: str | None
    """Why the node accepts no entries; None if it does, and for a node that is away."""
    starts: int
    format: int
    used_bytes: int
    """0 for a node that is away, like the next two fields."""
    free_bytes: int
    ledgers: int
    """The number of ledgers of which the node has data, as the node reports it."""
    named: int
    """The number of ledgers whose record names the node. If it is 0, the cluster does not need the node."""
    doubts: int = 0
    """The number of ledgers about which the node is in doubt (C7); 0 for a node that is away, like the next field."""
    damaged: int = 0
    """The number of damaged entries on the node that are not repaired yet."""
    is_unchecked: bool = False
    """The node has started in doubt, and has not compared all closed ledgers with its disk yet."""


@dataclass(frozen=True, slots=True)
class TopicStatus:
    name: str
    id: str
    partitions: int
    ensemble: int
    write_quorum: int
    ack_quorum: int
    placement: str
    is_internal: bool
    under_replicated: int
    """How many of its ledgers lack copies, with those of rows that Spark has staged for it."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A place that lacks copies, or whose copies were not checked."""

    ledger: str
    topic: str
    """The name of the topic."""
    partition: int
    first: int
    """The first entry of the fragment."""
    position: int
    node: str | None
    """None if the position has no node."""
    why: str
    """NO_NODE, AWAY, RETIRING or UNCHECKED."""
    copied_to: str | None
    """The node to which the copies are being copied; None if there is none."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """A ledger of a partition, or of rows that a task of Spark has staged."""

    id: str
    topic_id: str
    """As in the ledger's id; for staged rows it begins with `staged-`."""
    topic: str
    """The name of the topic; empty if that was deleted."""
    query: str | None
    """The query of Spark that has staged the rows; None for a ledger of a partition."""
    partition: int
    number: int
    state: str
    base: int
    end: int | None
    """The offset after its last message; None while the ledger is not closed."""
    last: int | None
    """Its last entry; None while the ledger is not closed."""
    size: int
    """In bytes; 0 while the ledger is not closed."""
    fragments: tuple[tuple[int, tuple[str | None, ...]], ...]
    """The first entry of each fragment, and the node at each position."""
    is_complete: bool
    abandoned: tuple[str, ...]
    """Nodes without which an operator has decided to continue: acknowledged entries may be lost."""
    doubted: tuple[str, ...]
    """Nodes that were in doubt when a recovery ended the ledger by their answers (C8): acknowledged entries may be
    lost."""
    shortages: tuple[Shortage, ...]
    """Empty for a ledger of a deleted topic, and for one of staged rows that is not closed. The first is removed, not
    repaired. So is the second if its writer has died, which nobody can see."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    topic: str
    topic_id: str
    partition: int
    broker: str
    """The incarnation of its owner; empty if no broker has claimed it, or if the broker that did is not alive."""
    owner: str
    """The owner's name, or its address if it has no name; empty if `broker` is."""
    address: str
    epoch: int
    ledgers: Mapping[str, int]
    """The number of ledgers by state."""
    start: int
    size: int
    """The size of its closed ledgers, in bytes."""
    under_replicated: int
    """How many of its ledgers lack copies."""
    unserved: str | None
    """Why its owner does not serve it; None if it does, if there is no owner, or if the owner lists too many others."""


@dataclass(frozen=True, slots=True)
class UnservedPartition:
    """A partition that its owner cannot serve: it stores nothing, and may not answer reads."""

    topic: str
    topic_id: str
    partition: int
    broker: str
    """The incarnation of its owner."""
    owner: str
    """The owner's name, or its address if it has no name."""
    since: float
    """Wall-clock seconds, by the clock of the broker."""
    kind: str
    """One of `troubles.KINDS`."""
    why: str


@dataclass(frozen=True, slots=True)
class LackingNodes:
    """Fewer storage nodes accept entries than the ensemble of a topic has positions."""

    topic: str
    accepting: int
    """How many storage nodes accept entries."""
    needed: int
    """How many must accept entries so that anything can be stored."""
    ensemble: int
    can_store: bool
    """Whether messages are stored, with fewer copies than the topic asks for."""
    why: str
    """The numbers as text."""


@dataclass(frozen=True, slots=True)
class FailedPlacement:
    """The placement function of a topic has failed at a broker."""

    topic: str
    placement: str
    owner: str
    """The name or the address of the broker."""
    why: str


@dataclass(frozen=True, slots=True)
class Deletion:
    """A deleted topic whose records are not all removed from the registry yet."""

    topic_id: str
    name: str
    deleted_at: float
    ledgers: int
    """The number of ledger records that are left."""


@dataclass(frozen=True, slots=True)
class AbandonedLedger:
    """A ledger that an operator has decided to recover without some nodes, and that is not recovered yet."""

    ledger: str
    nodes: tuple[str, ...]
    who: str
    at: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The state of the whole cluster."""

    id: str | None
    """The cluster's id; None if there is no cluster in this registry."""
    brokers: tuple[BrokerStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    topics: tuple[TopicStatus, ...] = ()
    partitions: tuple[PartitionStatus, ...] = ()
    ledgers: tuple[LedgerStatus, ...] = ()
    deletions: tuple[Deletion, ...] = ()
    abandoned: tuple[AbandonedLedger, ...] = ()
    unserved: tuple[UnservedPartition, ...] = ()
    """Those that have been unserved for longest first. A broker lists at most `troubles.LISTED_MAX`."""
    unserved_more: int = 0
    """How many more partitions are owned and not served, and not listed."""
    lacking_nodes: tuple[LackingNodes, ...] = ()
    placements: tuple[FailedPlacement, ...] = ()

    @property
    def shortages(self) -> list[Shortage]:
        return [shortage for ledger in self.ledgers for shortage in ledger.shortages]

    @property
    def under_replicated(self) -> list[LedgerStatus]:
        """The ledgers that lack copies."""
        return [ledger for ledger in self.ledgers if ledger.shortages]

    @property
    def without_owner(self) -> list[PartitionStatus]:
        return [each for each in self.partitions if not each.broker]

    @property
    def cannot_store(self) -> list[LackingNodes]:
        """The topics in which nothing can be stored, because too few storage nodes accept entries."""
        return [each for each in self.lacking_nodes if not each.can_store]

    @property
    def has_faults(self) -> bool:
        """Whether a partition is not served, a ledger lacks copies, nothing can be stored in a topic, a placement
        function fails, or a node is in doubt or has damaged entries. `pxrs cluster status` then exits with 1."""
        is_disk_bad = any(node.doubts or node.damaged or node.is_unchecked for node in self.nodes)
        is_unserved = self.without_owner or self.unserved or self.unserved_more
        return bool(is_unserved or self.under_replicated or self.cannot_store or self.placements or is_disk_bad)

    @property
    def is_whole(self) -> bool:
        """Whether there are no faults, no deletion is unfinished, and no decision to abandon nodes is pending."""
        return not (self.has_faults or self.deletions or self.abandoned)

    def to_json(self, *, ledgers: bool = True) -> dict[str, Any]:
        """The status as plain values for JSON. ledgers: include the list of all ledgers, which may be long."""
        found = asdict(self)
        if not ledgers:
            del found["ledgers"]
        return {
            **found,
            "is_whole": self.is_whole,
            "has_faults": self.has_faults,
            "doubted": [{"ledger": each.id, "nodes": each.doubted} for each in self.ledgers if each.doubted],
            "under_replicated": len(self.under_replicated),
            "shortages": [asdict(shortage) for shortage in self.shortages],
        }


@dataclass(frozen=True, slots=True)
class Found:
    """The records under `cluster/` in the registry."""

    id: str | None = None
    brokers: Mapping[str, BrokerRecord] = field(default_factory=dict)
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    alive: Mapping[str, AliveNode] = field(default_factory=dict)
    topics: Mapping[str, TopicRecord] = field(default_factory=dict)
    owners: Mapping[str, OwnerRecord] = field(default_factory=dict)
    """By topic id, a slash, and the partition."""
    ledgers: Collection[LedgerRecord] = ()
    """In the order of their keys."""
    deleted: Mapping[str, DeletedTopic] = field(default_factory=dict)
    abandoned: Mapping[str, Abandonment] = field(default_factory=dict)
    """By ledger id, in the form that the key has."""
    staged: Mapping[str, StagedName] = field(default_factory=dict)
    """By the id of the ledger that has the rows."""
    troubles: Mapping[str, Troubles] = field(default_factory=dict)
    """By the incarnation of the broker."""


def read_status(registry: Registry) -> ClusterStatus:
    """Read the state of the cluster. Raises what the registry raises, including RegistryCorrupt."""

    def scan(prefix: str, parse: Callable[[str, bytes], T]) -> dict[str, T]:
        return {entry.key.removeprefix(prefix): parse(entry.key, entry.value) for entry in registry.scan(prefix)}

    return assemble(
        Found(
            known_cluster_id(registry),
            scan(records.BROKERS, BrokerRecord.parse),
            scan(records.NODES, NodeRecord.parse),
            scan(records.ALIVE, AliveNode.parse),
            scan(records.TOPICS, TopicRecord.parse),
            scan(records.OWNERS, OwnerRecord.parse),
            scan(records.LEDGERS, LedgerRecord.parse).values(),
            scan(records.DELETED, DeletedTopic.parse),
            scan(records.ABANDONED, Abandonment.parse),
            {
                StagedFile.parse(entry.key, entry.value).ledger: StagedName.of_key(entry.key)
                for entry in registry.scan(STAGED)
            },
            scan(TROUBLES, Troubles.parse),
        )
    )


def assemble(found: Found) -> ClusterStatus:
    """The status that follows from these records."""
    names = {record.topic.id: name for name, record in found.topics.items()}
    ledgers = [_ledger(record, names, found) for record in found.ledgers]
    short = Counter(ledger.topic for ledger in ledgers if ledger.shortages)
    left = Counter(ledger.topic_id for ledger in ledgers)
    unclosed = {ledger.id for ledger in ledgers if ledger.state != CLOSED}
    unserved = _unserved(found, names)
    return ClusterStatus(
        found.id,
        _brokers(found),
        _nodes(found),
        tuple(
            TopicStatus(
                name,
                record.topic.id,
                record.topic.partitions,
                record.quorum.ensemble,
                record.quorum.write_quorum,
                record.quorum.ack_quorum,
                record.placement,
                is_internal(name),
                short[name],
            )
            for name, record in sorted(found.topics.items())
        ),
        _partitions(found, ledgers, {(each.topic_id, each.partition): each.why for each in unserved}),
        tuple(ledgers),
        tuple(
            Deletion(topic_id, gone.name, gone.deleted_at, left[topic_id])
            for topic_id, gone in sorted(found.deleted.items())
        ),
        tuple(
            AbandonedLedger(name.id, each.nodes, each.who, each.at)
            for name, each in sorted((LedgerName.of_id(ledger), each) for ledger, each in found.abandoned.items())
            if name.id in unclosed
        ),
        unserved,
        sum(
            max(0, each.unserved_total - len(each.unserved))
            for broker, each in found.troubles.items()
            if broker in found.brokers
        ),
        _lacking_nodes(found),
        _placements(found, names),
    )


def _unserved(found: Found, names: Mapping[str, str]) -> tuple[UnservedPartition, ...]:
    """What brokers report of partitions that they still own."""
    rows = []
    for incarnation, troubles in found.troubles.items():
        broker = found.brokers.get(incarnation)
        for each in troubles.unserved:
            owner = found.owners.get(f"{each.topic_id}/{each.partition}")
            if broker is not None and owner is not None and owner.broker == incarnation and each.topic_id in names:
                rows.append(
                    UnservedPartition(
                        names[each.topic_id],
                        each.topic_id,
                        each.partition,
                        incarnation,
                        broker.name or broker.address,
                        each.since,
                        each.kind,
                        each.why,
                    )
                )
    return tuple(sorted(rows, key=lambda row: (row.since, row.topic, row.partition)))


def _lacking_nodes(found: Found) -> tuple[LackingNodes, ...]:
    retired = {node for node, record in found.nodes.items() if record.state == RETIRED}
    accepting = len(storage_candidates(found.alive, retired))
    rows = []
    for name, record in sorted(found.topics.items()):
        lack = shortfall(record.quorum, accepting)
        if lack is not None:
            rows.append(LackingNodes(name, *lack, lack.can_store, f"{lack}"))
    return tuple(rows)


def _placements(found: Found, names: Mapping[str, str]) -> tuple[FailedPlacement, ...]:
    return tuple(
        FailedPlacement(
            names[each.topic_id],
            found.topics[names[each.topic_id]].placement,
            found.brokers[incarnation].name or found.brokers[incarnation].address,
            each.why,
        )
        for incarnation, troubles in sorted(found.troubles.items())
        for each in troubles.placements
        if incarnation in found.brokers and each.topic_id in names
    )


def _brokers(found: Found) -> tuple[BrokerStatus, ...]:
    owned = Counter(owner.broker for owner in found.owners.values())
    return tuple(
        BrokerStatus(
            incarnation,
            broker.name,
            broker.address,
            broker.version,
            broker.started_at,
            broker.is_leaving,
            owned[incarnation],
        )
        for incarnation, broker in sorted(found.brokers.items(), key=lambda item: (item[1].name, item[0]))
    )


def _nodes(found: Found) -> tuple[NodeStatus, ...]:
    named = Counter(node for record in found.ledgers for node in record.named)
    nodes = []
    for node, record in sorted(found.nodes.items()):
        alive = found.alive.get(node)
        shown = alive or AliveNode(record.address, record.starts)
        nodes.append(
            NodeStatus(
                node,
                shown.address,
                alive is not None,
                record.state == RETIRED,
                shown.refuses,
                record.starts,
                record.format,
                shown.used_bytes,
                shown.free_bytes,
                shown.ledgers,
                named[node],
                shown.doubts,
                shown.damaged,
                shown.is_unchecked,
            )
        )
    return tuple(nodes)


def _partitions(
    found: Found, ledgers: list[LedgerStatus], unserved: Mapping[tuple[str, int], str]
) -> tuple[PartitionStatus, ...]:
    chains: defaultdict[tuple[str, int], list[LedgerStatus]] = defaultdict(list)
    for ledger in ledgers:
        chains[ledger.topic_id, ledger.partition].append(ledger)
    partitions = []
    for name, record in sorted(found.topics.items()):
        for number in range(record.topic.partitions):
            owner = found.owners.get(f"{record.topic.id}/{number}", OwnerRecord())
            broker = found.brokers.get(owner.broker)
            chain = chains[record.topic.id, number]
            partitions.append(
                PartitionStatus(
                    name,
                    record.topic.id,
                    number,
                    "" if broker is None else owner.broker,
                    "" if broker is None else broker.name or broker.address,
                    "" if broker is None else broker.address,
                    owner.epoch,
                    dict(Counter(ledger.state for ledger in chain)),
                    chain[0].base if chain else 0,
                    sum(ledger.size for ledger in chain),
                    sum(bool(ledger.shortages) for ledger in chain),
                    unserved.get((record.topic.id, number)),
                )
            )
    return tuple(partitions)


def _ledger(record: LedgerRecord, names: Mapping[str, str], found: Found) -> LedgerStatus:
    file = found.staged.get(record.id)
    topic = names.get(record.topic_id if file is None else file.topic, "")
    has_shortages = topic and (file is None or record.is_closed)
    return LedgerStatus(
        record.id,
        record.topic_id,
        topic,
        None if file is None else file.query,
        record.partition,
        record.number,
        record.state,
        record.base,
        record.end,
        record.last,
        record.size,
        tuple((fragment.first, fragment.nodes) for fragment in record.fragments),
        record.is_complete,
        record.abandoned,
        record.doubted,
        tuple(_shortages(record, topic, found)) if has_shortages else (),
    )


def _shortages(record: LedgerRecord, topic: str, found: Found) -> list[Shortage]:
    joining = {(each.first, each.position): each.node for each in record.joining}
    shortages = []
    for fragment in record.fragments:
        for position, node in enumerate(fragment.nodes):
            why = _why(record, node, found)
            if why is None or (record.is_closed and not is_used(record, fragment, position)):
                continue
            copied_to = joining.get((fragment.first, position))
            shortages.append(
                Shortage(record.id, topic, record.partition, fragment.first, position, node, why, copied_to)
            )
    return shortages


def _why(record: LedgerRecord, node: str | None, found: Found) -> str | None:
    """Why a place with this node lacks copies; None if it does not."""
    if node is None:
        return NO_NODE
    if node not in found.alive:
        return AWAY
    known = found.nodes.get(node)
    if known is not None and known.state == RETIRED:
        return RETIRING
    return UNCHECKED if record.is_closed and not record.is_complete else None
