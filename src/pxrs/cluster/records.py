"""The keys of the cluster in the registry, and their values as JSON. Nothing here does I/O.

    cluster/id                                      the cluster's id, written by the first process that starts
    cluster/topics/<name>                           TopicRecord: the topic's settings and its quorum
    cluster/deleted/<topic id>                      DeletedTopic: some of its records are not removed yet
    cluster/brokers/<incarnation>                   BrokerRecord, ephemeral
    cluster/nodes/<node id>                         NodeRecord, persistent
    cluster/alive/<node id>                         AliveNode, ephemeral
    cluster/troubles/<incarnation>                  Troubles, ephemeral: what a broker does not serve (`troubles`)
    cluster/owners/<topic id>/<partition>           OwnerRecord, persistent: the guard of a partition (R4)
    cluster/ledgers/<topic id>/<partition>/<number> LedgerRecord, persistent (`ledgers`)
    cluster/abandoned/<ledger id>                   Abandonment, persistent until the ledger is recovered
    cluster/decisions/<id>                          Decision, persistent until a broker has recorded it in the audit

Clients cannot write these keys (C6). Every commit that creates a ledger of a partition expects the version of the
partition's owner key, and raises `next` in it. So a broker that has lost its claim cannot create a ledger.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pxrs.cluster.ledgers import (
    CLOSED,
    LEDGERS,
    OPEN,
    RECOVERING,
    EntryHead,
    Fragment,
    Joining,
    LedgerName,
    LedgerRecord,
    Quorum,
    encode,
    parsed,
)
from pxrs.model import Topic

__all__ = [
    "ABANDONED",
    "ALIVE",
    "BROKERS",
    "CLOSED",
    "CLUSTER",
    "CLUSTER_ID",
    "DECISIONS",
    "DELETED",
    "IN_USE",
    "LEDGERS",
    "NOBODY",
    "NODES",
    "OPEN",
    "OWNERS",
    "RECOVERING",
    "RETIRED",
    "TOPICS",
    "Abandonment",
    "AliveNode",
    "BrokerRecord",
    "Decision",
    "DeletedTopic",
    "EntryHead",
    "Fragment",
    "Joining",
    "LedgerName",
    "LedgerRecord",
    "NodeRecord",
    "OwnerRecord",
    "Quorum",
    "TopicRecord",
    "abandoned_key",
    "alive_key",
    "broker_key",
    "deleted_key",
    "ledgers_prefix",
    "node_key",
    "owner_key",
    "state_ledgers",
    "topic_key",
]

CLUSTER: Final = "cluster/"
CLUSTER_ID: Final = "cluster/id"
TOPICS: Final = "cluster/topics/"
DELETED: Final = "cluster/deleted/"
BROKERS: Final = "cluster/brokers/"
NODES: Final = "cluster/nodes/"
ALIVE: Final = "cluster/alive/"
OWNERS: Final = "cluster/owners/"
ABANDONED: Final = "cluster/abandoned/"
DECISIONS: Final = "cluster/decisions/"
IN_USE: Final = "in use"
RETIRED: Final = "retired"
NOBODY: Final = ""
"""`OwnerRecord.broker` of a partition that no broker has claimed."""
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")


def topic_key(name: str) -> str:
    return TOPICS + name


def deleted_key(topic_id: str) -> str:
    return DELETED + topic_id


def broker_key(incarnation: str) -> str:
    return BROKERS + checked_id(incarnation)


def node_key(node: str) -> str:
    return NODES + checked_id(node)


def alive_key(node: str) -> str:
    return ALIVE + checked_id(node)


def owner_key(topic_id: str, partition: int) -> str:
    return f"{OWNERS}{topic_id}/{partition}"


def abandoned_key(ledger: LedgerName) -> str:
    return ABANDONED + ledger.key.removeprefix(LEDGERS)


def ledgers_prefix(topic_id: str, partition: int | None = None) -> str:
    """The prefix of the records of a partition's ledgers; without a partition, of all ledgers of the topic. A scan
    returns the ledgers of a partition in the order of their numbers."""
    return f"{LEDGERS}{topic_id}/" if partition is None else f"{LEDGERS}{topic_id}/{partition}/"


def checked_id(given: str) -> str:
    """The id of a node or of a broker's incarnation. Raises ValueError if it cannot be part of a key."""
    if not _ID.fullmatch(given):
        raise ValueError(f"{given!r} is not a valid id: use up to 80 letters, digits, '_' or '-'")
    return given


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic of the cluster."""

    topic: Topic
    quorum: Quorum
    placement: str = "least loaded"
    """The name of the function that chooses the nodes of its ledgers (module `placement`)."""

    def dump(self) -> bytes:
        settings = asdict(self.topic)
        return encode({**settings, "quorum": asdict(self.quorum), "placement": self.placement}).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> TopicRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, cls._of)

    @classmethod
    def _of(cls, found: Mapping[str, Any]) -> TopicRecord:
        fields = Topic.__dataclass_fields__
        # Settings that this version does not know, because a later version wrote them, are preserved.
        unknown = {
            name: value for name, value in found.items() if name not in fields and name not in ("quorum", "placement")
        }
        known = {name: value for name, value in found.items() if name in fields}
        topic = Topic(**{**known, "extra": {**known.get("extra", {}), **unknown}})
        return cls(topic, Quorum(**found["quorum"]), str(found.get("placement", "least loaded")))


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """A topic that was deleted. Its name can be used again at once. A broker deletes this key when it has removed all
    records of the topic's ledgers (P7)."""

    name: str
    partitions: int
    deleted_at: float = 0.0
    """Wall-clock seconds, for `pxrs cluster status`."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> DeletedTopic:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class BrokerRecord:
    """A broker that is alive. The key contains its incarnation: an id that each start, and each new lease, creates."""

    address: str
    name: str = ""
    load: float = 0.0
    started_at: float = 0.0
    version: str = ""
    is_leaving: bool = False
    """The broker is stopping: it serves each partition until it has released it, and claims no others."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> BrokerRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A storage node, whether it is alive or not."""

    address: str
    starts: int
    """How often it was started. The node stores the same number on its disk (C5)."""
    format: int = 1
    journal_end: int = 0
    """The journal was synced at least up to this position. A disk whose journal is shorter is an older copy (C5)."""
    state: str = IN_USE
    start: str = ""
    """A random id of the start that wrote `starts`. The disk has it too, so a node can tell its own start from that of
    a process on a copy of its disk. Empty if a version of pxrs without such ids wrote the record."""
    stopped_at: int | None = None
    """The end of the journal at the last stop, written after everything that was acknowledged was synced. None while
    the node runs, and if it did not stop in order (C9)."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> NodeRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class AliveNode:
    """A storage node that is alive, and its load."""

    address: str
    starts: int
    used_bytes: int = 0
    ledgers: int = 0
    free_bytes: int = 0
    refuses: str | None = None
    """Why the node accepts no entries, for example because its disk is full; None if it accepts them."""
    doubts: int = 0
    """How many ledgers are in doubt: the node does not know which of their entries it has lost (C7)."""
    damaged: int = 0
    """How many entries, or ranges of the journal, are damaged and not repaired yet."""
    is_unchecked: bool = False
    """The node has started in doubt, and has not compared all closed ledgers with its journal yet."""
    cleared: int = 0
    """How often this process has cleared `is_complete` of a closed ledger's record, because the node lacks entries of
    it. A change tells brokers to read the records of the node's ledgers again."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> AliveNode:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """Which broker owns a partition."""

    epoch: int = 0
    """Raised by each claim."""
    broker: str = NOBODY
    """The incarnation that has claimed the partition."""
    address: str = ""
    next: int = 0
    """The number of the partition's next ledger."""
    is_deleted: bool = False
    """The topic was deleted: nobody may claim the partition any more."""

    def claimed(self, broker: str, address: str) -> OwnerRecord:
        return replace(self, epoch=self.epoch + 1, broker=broker, address=address)

    def released(self) -> OwnerRecord:
        """The record without an owner. The epoch is kept, so that the next claim has a higher one."""
        return replace(self, broker=NOBODY, address="")

    def deleted(self) -> OwnerRecord:
        return replace(self, epoch=self.epoch + 1, broker=NOBODY, address="", is_deleted=True)

    def with_ledger(self) -> OwnerRecord:
        return replace(self, next=self.next + 1)

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> OwnerRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class Abandonment:
    """The decision of an operator to recover one ledger without these nodes (C6). Acknowledged entries may be lost. The
    decision is stored per ledger, so that it does not apply to ledgers that are written later, should one of these
    nodes come back."""

    nodes: tuple[str, ...]
    who: str
    at: float
    """Wall-clock seconds."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> Abandonment:
        """Raises RegistryCorrupt."""
        return parsed(
            key, value, lambda found: cls(tuple(found["nodes"]), str(found["who"]), float(found.get("at", 0.0)))
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of the registry that an operator made. A broker records it in the audit and then deletes the key."""

    action: str
    """The name of the audit event, without the prefix `audit.`."""
    fields: Mapping[str, Any]
    """The fields of the audit event; `who` is one of them."""

    def dump(self) -> bytes:
        return encode({"action": self.action, "fields": dict(self.fields)}).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> Decision:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(str(found["action"]), dict(found["fields"])))


def state_ledgers(records: Sequence[LedgerRecord]) -> int:
    """The index, in the closed ledgers `records` of a partition (in the order of their numbers), of the ledger from
    which the producers' state is rebuilt: the last one that has an entry 0, which is the snapshot of that state. A
    ledger that was closed without entries has none. Retention must keep this ledger and all later ones (C3). Returns 0
    if no ledger has a snapshot: nothing was ever stored."""
    for index in range(len(records) - 1, -1, -1):
        last = records[index].last
        if last is not None and last >= 0:
            return index
    return 0


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows; a later version may have written others."""
    return {name: value for name, value in found.items() if name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
