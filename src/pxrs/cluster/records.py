"""What the cluster keeps in the registry: its keys, and the values under them, as JSON. Nothing here does I/O.

    cluster/id                                      the cluster's id, made by the first process
    cluster/topics/<name>                           TopicRecord: the topic's settings and its quorum
    cluster/deleted/<topic id>                      DeletedTopic: its ledgers are not all removed yet
    cluster/brokers/<incarnation>                   BrokerRecord, ephemeral
    cluster/nodes/<node id>                         NodeRecord, persistent
    cluster/alive/<node id>                         AliveNode, ephemeral
    cluster/owners/<topic id>/<partition>           OwnerRecord, persistent: the guard of a partition (R4)
    cluster/ledgers/<topic id>/<partition>/<number> LedgerRecord, persistent (`ledgers`)
    cluster/abandoned/<ledger id>                   Abandonment, persistent until the ledger's recovery has used it
    cluster/decisions/<id>                          Decision, persistent until a broker has put it into the audit

Clients cannot touch these keys (C6). A partition's owner key is expected, by its version, in every commit that creates
a ledger of the partition, and the same commit raises `next`. So a broker that has lost its claim creates no ledger.
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
    """The prefix of the records of a partition's ledgers, in the order of their numbers; of a topic's without one."""
    return f"{LEDGERS}{topic_id}/" if partition is None else f"{LEDGERS}{topic_id}/{partition}/"


def checked_id(given: str) -> str:
    """The id of a node or of a broker's incarnation. Raises ValueError if it cannot be part of a key."""
    if not _ID.fullmatch(given):
        raise ValueError(f"{given!r} is no id: use up to 80 letters, digits, '_' or '-'")
    return given


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic of the cluster."""

    topic: Topic
    quorum: Quorum
    placement: str = "least loaded"
    """Names the function that chooses the nodes of its ledgers (`placement`)."""

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
        # Settings that a later version wrote are kept as they are.
        unknown = {
            name: value for name, value in found.items() if name not in fields and name not in ("quorum", "placement")
        }
        known = {name: value for name, value in found.items() if name in fields}
        topic = Topic(**{**known, "extra": {**known.get("extra", {}), **unknown}})
        return cls(topic, Quorum(**found["quorum"]), str(found.get("placement", "least loaded")))


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """A topic that was deleted. Its name is free at once; the key goes when no ledger record of it is left (P7)."""

    name: str
    partitions: int
    deleted_at: float = 0.0
    """Wall-clock seconds, to be shown."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> DeletedTopic:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class BrokerRecord:
    """A broker that lives. The key names its incarnation, which is new with each start (G1)."""

    address: str
    name: str = ""
    load: float = 0.0
    started_at: float = 0.0
    version: str = ""
    is_leaving: bool = False
    """The broker is stopping: it serves until it has released its partitions, and takes no others."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> BrokerRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A storage node, whether it lives or not."""

    address: str
    starts: int
    """How often it was started. The same number is on its disk (C5)."""
    format: int = 1
    journal_end: int = 0
    """Its journal was synced up to this position at least. A disk whose journal is shorter is an older copy."""
    state: str = IN_USE

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> NodeRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(**_known(cls, found)))


@dataclass(frozen=True, slots=True)
class AliveNode:
    """A storage node that lives, and its load."""

    address: str
    starts: int
    used_bytes: int = 0
    ledgers: int = 0
    free_bytes: int = 0
    refuses: str | None = None
    """Why the node takes no new ledgers, such as a full disk; None if it does."""

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
        """The epoch stays, so that the next claim's is higher."""
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
    """An operator has decided that one ledger does without these nodes (C6). Entries that were acknowledged may be
    lost. It is kept for each ledger by itself, so that it concerns no ledger that is written later, on nodes that have
    come back after all."""

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
    """What an operator has done to the registry. A broker puts it into the audit and then deletes the key."""

    action: str
    """Names the event of the audit, without `audit.`."""
    fields: Mapping[str, Any]
    """The fields of the event, `who` among them."""

    def dump(self) -> bytes:
        return encode({"action": self.action, "fields": dict(self.fields)}).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> Decision:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(str(found["action"]), dict(found["fields"])))


def state_ledgers(records: Sequence[LedgerRecord]) -> int:
    """From which of a partition's closed ledgers (an index into `records`, in the order of their numbers) the state of
    the producers must be rebuilt: the last one that has entry 0. A ledger that was closed empty has no snapshot.
    Retention must keep this ledger and all behind it (C3). 0 if no ledger has a snapshot: nothing was ever stored."""
    for index in range(len(records) - 1, -1, -1):
        last = records[index].last
        if last is not None and last >= 0:
            return index
    return 0


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a later version wrote."""
    return {name: value for name, value in found.items() if name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
