"""What a broker owns and cannot serve, as it publishes it for `pxrs cluster status`. Pure.

    cluster/troubles/<incarnation>      Troubles, ephemeral under the broker's lease

The key is there only while the broker has troubles. A partition that is not served for a moment, as in every fail-over,
is none: see `TROUBLE_S` in `broker.ownership`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from pxrs.cluster.ledgers import encode, parsed
from pxrs.cluster.records import checked_id
from pxrs.errors import InvalidPlacement, NotEnoughNodes, PartitionUnavailable, ReadFailed

TROUBLES: Final = "cluster/troubles/"
LISTED_MAX: Final = 100
"""How many partitions, and how many topics, one broker lists; of the others only the number is published."""
WHY_MAX: Final = 400
"""How many characters of a reason are published."""

NODES: Final = "nodes"
"""Too few storage nodes accept entries."""
PLACEMENT: Final = "placement"
"""The placement function of the topic has failed."""
RECOVERY: Final = "recovery"
"""What is stored cannot be recovered or read: storage nodes do not answer, or entries are damaged."""
OTHER: Final = "other"
KINDS: Final = (NODES, PLACEMENT, RECOVERY, OTHER)

ADVICE: Final[Mapping[str, str]] = {
    NODES: "start more storage nodes, or make room on those that refuse entries",
    PLACEMENT: "correct the function on every broker, and restart the brokers",
    RECOVERY: "start the storage nodes that are away; `pxrs cluster abandon` is for nodes that will never return",
    OTHER: "the log of the broker has the details",
}
"""What to do about each kind."""


class Reason(NamedTuple):
    """Why a partition is not served."""

    kind: str
    """One of KINDS."""
    text: str

    @property
    def with_advice(self) -> str:
        """For the error of a client, which may not know the cluster."""
        return f"{self.text}; {ADVICE[self.kind]}; see `pxrs cluster status`"


def reason_of(error: Exception) -> Reason:
    """Why a partition was not opened, by the error of the attempt."""
    if isinstance(error, NotEnoughNodes):
        return Reason(NODES, f"{error}".partition(";")[0])
    if isinstance(error, InvalidPlacement):
        return Reason(PLACEMENT, f"{error}")
    if isinstance(error, PartitionUnavailable) and not error.place.startswith("ledger "):  # nodes are not the cause
        return Reason(OTHER, error.why)
    if isinstance(error, ReadFailed):
        text = f"{error.place}: {error.why}" if isinstance(error, PartitionUnavailable) else f"{error}"
        return Reason(RECOVERY, text)
    return Reason(OTHER, f"{error}" or type(error).__name__)


@dataclass(frozen=True, slots=True)
class Unserved:
    """A partition that the broker owns and does not serve."""

    topic_id: str
    partition: int
    since: float
    """Wall-clock seconds."""
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class BadPlacement:
    """The placement function of a topic has failed."""

    topic_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Troubles:
    """The troubles of one broker."""

    unserved: tuple[Unserved, ...] = ()
    unserved_total: int = 0
    """The number of partitions that are not served, listed or not."""
    placements: tuple[BadPlacement, ...] = ()

    @classmethod
    def of(cls, unserved: Iterable[Unserved], placements: Iterable[BadPlacement]) -> Troubles:
        """Bounded: the partitions that have been unserved for longest are listed, with the beginning of each reason."""
        rows = sorted(unserved, key=lambda each: (each.since, each.topic_id, each.partition))
        listed = tuple(
            Unserved(each.topic_id, each.partition, round(each.since, 3), each.kind, each.why[:WHY_MAX])
            for each in rows[:LISTED_MAX]
        )
        failed = sorted(placements, key=lambda each: each.topic_id)[:LISTED_MAX]
        return cls(listed, len(rows), tuple(BadPlacement(each.topic_id, each.why[:WHY_MAX]) for each in failed))

    def __bool__(self) -> bool:
        return bool(self.unserved_total or self.placements)

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> Troubles:
        """Raises RegistryCorrupt."""
        return parsed(key, value, cls._of)

    @classmethod
    def _of(cls, found: Mapping[str, Any]) -> Troubles:
        return cls(
            tuple(
                Unserved(
                    str(each["topic_id"]),
                    int(each["partition"]),
                    float(each["since"]),
                    each["kind"] if each["kind"] in KINDS else OTHER,  # a later version may know more of them
                    str(each["why"]),
                )
                for each in found.get("unserved", ())
            ),
            int(found.get("unserved_total", 0)),
            tuple(BadPlacement(str(each["topic_id"]), str(each["why"])) for each in found.get("placements", ())),
        )


def troubles_key(incarnation: str) -> str:
    return TROUBLES + checked_id(incarnation)
