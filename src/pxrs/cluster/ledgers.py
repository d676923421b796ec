"""The record of a ledger in the registry: which nodes store which entries, the ledger's state, and its transitions.

Every change of a record is a compare-and-set on its key, so exactly one process makes each transition:

    state        who                     what                                                next state
    (none)       owner of the partition  creates it, in one commit with its own owner key    open
    open         its writer              replaces a node, leaves a position empty, fills it  open
    open         its writer              closes it when every entry is confirmed             closed
    open         owner of the partition  begins recovery, `recovery` + 1                     recovering
    recovering   owner of the partition  begins another recovery, `recovery` + 1             recovering
    recovering   the last recovery       names a spare in `joining`                          recovering
    recovering   the last recovery       closes it, with replacements in `fragments`         closed
    closed       owner of the partition  names a spare in `joining`, then in `fragments`     closed

While a ledger is open, only its writer changes the record, except for the change to "recovering", which stops the
writer. So a recovery finds the record as the writer has last committed it.

A position without a node (None) never has a copy. A recovery counts it as fenced, and as the answer "no such entry".
This is safe because of how the writer empties a position: every confirmed entry from the first one of the new fragment
on has Qa copies at other positions, and the writer confirms nothing until the change is committed. So an entry whose
write set has m empty positions was confirmed by Qa of the other Qw - m.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from pxrs.errors import InvalidTopic, RegistryCorrupt

OPEN: Final = "open"
RECOVERING: Final = "recovering"
CLOSED: Final = "closed"
STATES: Final = (OPEN, RECOVERING, CLOSED)
ENSEMBLE_MAX: Final = 16
LEDGERS: Final = "cluster/ledgers/"
NUMBER_DIGITS: Final = 10
T = TypeVar("T")
encode: Final = json.JSONEncoder(separators=(",", ":")).encode


class LedgerName(NamedTuple):
    """The parts of a ledger's id. Topic ids and numbers are never reused, so ledger ids are not either (C5)."""

    topic_id: str
    partition: int
    number: int

    @property
    def id(self) -> str:
        return f"{self.topic_id}/{self.partition}/{self.number}"

    @property
    def key(self) -> str:
        return f"{LEDGERS}{self.topic_id}/{self.partition}/{self.number:0{NUMBER_DIGITS}}"

    @classmethod
    def of_id(cls, ledger: str) -> LedgerName:
        """Raises ValueError if the text is not the id of a ledger."""
        topic_id, partition, number = ledger.rsplit("/", 2)
        if not topic_id:
            raise ValueError(f"{ledger!r} is not the id of a ledger")
        return cls(topic_id, int(partition), int(number))

    @classmethod
    def of_key(cls, key: str) -> LedgerName:
        """Raises ValueError if the key is not that of a ledger's record."""
        if not key.startswith(LEDGERS):
            raise ValueError(f"{key!r} is not the key of a ledger")
        return cls.of_id(key.removeprefix(LEDGERS))


class EntryHead(NamedTuple):
    """The description of an entry without its bytes."""

    offset: int
    """The offset of its first row."""
    rows: int
    """The number of rows; 0 for entry 0, which holds the producers' state."""
    size: int
    """The length of the body in bytes."""
    last_timestamp: int
    """The latest timestamp of a row, in microseconds since 1970."""
    stored_at: int
    """When the broker encoded it, in microseconds since 1970."""
    checksum: int
    """XXH3-64 of the body."""

    @property
    def next_offset(self) -> int:
        return self.offset + self.rows


@dataclass(frozen=True, slots=True)
class Quorum:
    """The quorum of a topic. It cannot be changed."""

    ensemble: int = 3
    """E: the number of nodes over which the entries of a ledger are distributed."""
    write_quorum: int = 3
    """Qw: the number of copies of each entry."""
    ack_quorum: int = 2
    """Qa: the number of copies that must be synced before an entry is acknowledged."""

    def __post_init__(self) -> None:
        for name in ("ensemble", "write_quorum", "ack_quorum"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= ENSEMBLE_MAX:
                raise InvalidTopic(f"{name} is {value!r}; choose from 1 to {ENSEMBLE_MAX}")
        if not self.ensemble >= self.write_quorum >= self.ack_quorum:
            raise InvalidTopic(
                f"ensemble {self.ensemble}, write_quorum {self.write_quorum}, ack_quorum {self.ack_quorum}: the "
                "ensemble must not be smaller than the write quorum, and the write quorum not smaller than the ack "
                "quorum"
            )
        if self.ack_quorum == 1 < self.write_quorum:
            raise InvalidTopic(
                f"ack_quorum 1 with write_quorum {self.write_quorum} is refused: an acknowledged entry may be on one "
                "node only, and a recovery would need the answers of all nodes of the entry; choose an ack_quorum of 2 "
                "or more, or a write_quorum of 1"
            )

    def write_set(self, entry: int) -> list[int]:
        """The positions that store this entry."""
        return [(entry + k) % self.ensemble for k in range(self.write_quorum)]

    def keeps(self, position: int, entry: int) -> bool:
        """Whether the position is in the entry's write set."""
        return (position - entry) % self.ensemble < self.write_quorum

    @property
    def refusals(self) -> int:
        """Qw - Qa + 1. If this many positions of an entry's write set do not have the entry, it was not confirmed; if
        this many are fenced, it never will be. They are counted within the write set of each entry (C2)."""
        return self.write_quorum - self.ack_quorum + 1


class Fragment(NamedTuple):
    """A range of entries that have the same ensemble. It ends where the next fragment begins."""

    first: int
    nodes: tuple[str | None, ...]
    """The node at each position; None if the position is empty."""


class Joining(NamedTuple):
    """A node that gets copies before `fragments` names it. It is named here so that it does not remove the copies as
    garbage (C5)."""

    node: str
    first: int
    """The first entry of the fragment into which the node will be put; in a recovery, the first entry that it gets."""
    position: int


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One ledger. The module's docstring lists the states and who makes which transition."""

    topic_id: str
    partition: int
    number: int
    epoch: int
    """The epoch of the claim that writes this ledger."""
    quorum: Quorum
    base: int
    """The offset of the ledger's first row."""
    fragments: tuple[Fragment, ...]
    state: str = OPEN
    recovery: int = 0
    """The number of the last recovery that was begun; 0 if none was."""
    recoverer: int = 0
    """The epoch of the claim under which that recovery was begun. Without it, two brokers could propose the same
    record, and the one whose compare-and-set failed would mistake the other's record for its own."""
    joining: tuple[Joining, ...] = ()
    confirmed: int = -1
    """Entries up to this one were confirmed when the writer last wrote the record. A recovery begins after it."""
    last: int | None = None
    """The last entry; -1 if there is none. Set in closed ledgers only, like `end`, `size`, `stored_at`,
    `is_complete`."""
    end: int | None = None
    """The offset after the last row."""
    size: int = 0
    """The total length of all entries except entry 0, in bytes."""
    stored_at: int = 0
    """`EntryHead.stored_at` of the last entry, in microseconds since 1970."""
    is_complete: bool = False
    """Whether every node is known to have all the entries that `fragments` assigns to it. False after a recovery, which
    stops at Qa copies, until a repair has checked the copies (`copies`)."""
    abandoned: tuple[str, ...] = ()
    """The nodes without which an operator decided to continue (C6). If there are any, acknowledged entries may be
    lost."""
    doubted: tuple[str, ...] = ()
    """The nodes that were in doubt (C7) when a recovery ended the ledger, if it ended by their answers (C8).
    Acknowledged entries are lost if more than Qa - 1 copies of them were damaged."""

    def __post_init__(self) -> None:
        firsts = [fragment.first for fragment in self.fragments]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise ValueError(f"{self.id}: the fragments begin at {firsts}, which must rise from 0")
        for fragment in self.fragments:
            nodes = [node for node in fragment.nodes if node is not None]
            if len(fragment.nodes) != self.quorum.ensemble or len(set(nodes)) != len(nodes):
                raise ValueError(f"{self.id}: {fragment} needs {self.quorum.ensemble} positions with different nodes")
        if self.state not in STATES:
            raise ValueError(f"{self.id}: the state is {self.state!r}; it must be one of {', '.join(STATES)}")
        if (self.state == CLOSED) != (self.last is not None) or (self.last is None) != (self.end is None):
            raise ValueError(f"{self.id}: {self.state}, with the last entry {self.last} and the end {self.end}")

    @property
    def name(self) -> LedgerName:
        return LedgerName(self.topic_id, self.partition, self.number)

    @property
    def id(self) -> str:
        return f"{self.topic_id}/{self.partition}/{self.number}"

    @property
    def key(self) -> str:
        return self.name.key

    @property
    def is_closed(self) -> bool:
        return self.state == CLOSED

    # Which nodes store which entries.

    def fragment_of(self, entry: int) -> Fragment:
        return next(fragment for fragment in reversed(self.fragments) if fragment.first <= entry)

    def nodes_of(self, entry: int) -> list[tuple[int, str | None]]:
        """The write set of an entry: each position with its node."""
        nodes = self.fragment_of(entry).nodes
        return [(position, nodes[position]) for position in self.quorum.write_set(entry)]

    def position_of(self, node: str, entry: int) -> int | None:
        """The position of this node in the write set of the entry; None if it is not in it."""
        return next((position for position, each in self.nodes_of(entry) if each == node), None)

    def last_of(self, fragment: Fragment) -> int | None:
        """The last entry of a fragment; None if it is the last fragment of a ledger that is not closed."""
        following = [each.first for each in self.fragments if each.first > fragment.first]
        return min(following) - 1 if following else self.last

    def entries_of(self, fragment: Fragment, position: int) -> Iterator[int]:
        """The entries of a fragment of a closed ledger that this position stores."""
        last = self.last_of(fragment)
        if last is None:
            raise ValueError(f"{self.id}: the fragment from entry {fragment.first} on has no end yet")
        return (entry for entry in range(fragment.first, last + 1) if self.quorum.keeps(position, entry))

    @property
    def named(self) -> set[str]:
        """Every node that may have data of this ledger (C5). Any other node may remove the ledger."""
        nodes = {node for fragment in self.fragments for node in fragment.nodes if node is not None}
        return nodes | {each.node for each in self.joining}

    # Transitions.

    def with_node(self, first: int, position: int, node: str | None, *, is_one: bool = False) -> LedgerRecord:
        """The record with another node at a position, for the entries from `first` on. is_one: only up to the end of
        the fragment that contains `first`."""
        split = self.fragment_of(first)
        fragments: list[Fragment] = []
        for fragment in self.fragments:
            nodes = (*fragment.nodes[:position], node, *fragment.nodes[position + 1 :])
            if fragment.first < first or (is_one and fragment is not split):
                fragments.append(fragment)
                if fragment is split:
                    fragments.append(Fragment(first, nodes))
            else:
                fragments.append(Fragment(fragment.first, nodes))
        return replace(self, fragments=merged(fragments))

    def with_node_in(self, first: int, position: int, node: str | None) -> LedgerRecord:
        """The record with another node at a position of the fragment that begins at `first`, and of no other fragment.
        Equal neighbours are not merged, because a repair identifies places by the fragments' first entries."""
        fragments = [
            each._replace(nodes=(*each.nodes[:position], node, *each.nodes[position + 1 :]))
            if each.first == first
            else each
            for each in self.fragments
        ]
        return replace(self, fragments=tuple(fragments))

    def in_recovery(self, recoverer: int, abandoned: Iterable[str] = ()) -> LedgerRecord:
        """The record at the beginning of a recovery. Nodes that an earlier recovery named in `joining` are dropped.
        recoverer: the epoch of the owner's claim. abandoned: added to the field of that name."""
        if self.is_closed:
            raise ValueError(f"{self.id} is closed: there is nothing to recover")
        return replace(
            self,
            state=RECOVERING,
            recovery=self.recovery + 1,
            recoverer=recoverer,
            joining=(),
            abandoned=tuple(dict.fromkeys([*self.abandoned, *abandoned])),
        )

    def with_joining(self, joining: Iterable[Joining]) -> LedgerRecord:
        return replace(self, joining=tuple(dict.fromkeys(joining)))

    def closed(self, last: int, end: int, *, size: int, stored_at: int, is_complete: bool) -> LedgerRecord:
        """The record of the closed ledger. Fragments that begin after the last entry are dropped."""
        fragments = tuple(each for each in self.fragments if each.first <= max(last, 0))
        return replace(
            self,
            state=CLOSED,
            fragments=fragments,
            joining=(),
            last=last,
            end=end,
            size=size,
            stored_at=stored_at,
            is_complete=is_complete,
        )

    # As JSON.

    def dump(self) -> bytes:
        found = {
            "topic_id": self.topic_id,
            "partition": self.partition,
            "number": self.number,
            "epoch": self.epoch,
            "ensemble": self.quorum.ensemble,
            "write_quorum": self.quorum.write_quorum,
            "ack_quorum": self.quorum.ack_quorum,
            "base": self.base,
            "state": self.state,
            "recovery": self.recovery,
            "recoverer": self.recoverer,
            "fragments": [[fragment.first, list(fragment.nodes)] for fragment in self.fragments],
            "joining": [list(each) for each in self.joining],
            "confirmed": self.confirmed,
        }
        if self.is_closed:
            found |= {
                "last": self.last,
                "end": self.end,
                "size": self.size,
                "stored_at": self.stored_at,
                "is_complete": self.is_complete,
            }
        if self.abandoned:
            found["abandoned"] = list(self.abandoned)
        if self.doubted:
            found["doubted"] = list(self.doubted)
        return encode(found).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> LedgerRecord:
        """Raises RegistryCorrupt."""
        return parsed(key, value, cls._of)

    @classmethod
    def _of(cls, found: Mapping[str, Any]) -> LedgerRecord:
        return cls(
            topic_id=str(found["topic_id"]),
            partition=int(found["partition"]),
            number=int(found["number"]),
            epoch=int(found["epoch"]),
            quorum=Quorum(found["ensemble"], found["write_quorum"], found["ack_quorum"]),
            base=int(found["base"]),
            fragments=tuple(Fragment(int(first), _nodes(nodes)) for first, nodes in found["fragments"]),
            state=found["state"],
            recovery=int(found["recovery"]),
            recoverer=int(found["recoverer"]),
            joining=tuple(Joining(node, int(first), int(position)) for node, first, position in found["joining"]),
            confirmed=int(found.get("confirmed", -1)),
            last=None if found.get("last") is None else int(found["last"]),
            end=None if found.get("end") is None else int(found["end"]),
            size=int(found.get("size", 0)),
            stored_at=int(found.get("stored_at", 0)),
            is_complete=bool(found.get("is_complete", False)),
            abandoned=tuple(found.get("abandoned", ())),
            doubted=tuple(found.get("doubted", ())),
        )


def _nodes(found: Any) -> tuple[str | None, ...]:
    """The nodes of a fragment. Raises TypeError: what is no list of ids would be asked as if it were nodes."""
    if not isinstance(found, list) or not all(node is None or (isinstance(node, str) and node) for node in found):
        raise TypeError(f"{found!r} is not a list of storage nodes")
    return tuple(found)


def merged(fragments: Iterable[Fragment]) -> tuple[Fragment, ...]:
    """The fragments, with neighbours that have the same nodes merged."""
    found: list[Fragment] = []
    for fragment in fragments:
        if not found or found[-1].nodes != fragment.nodes:
            found.append(fragment)
    return tuple(found)


def parsed(key: str, value: bytes, make: Callable[[dict[str, Any]], T]) -> T:
    """The result of `make` for the JSON object under a key. Raises RegistryCorrupt if the value is not JSON, not an
    object, or refused by `make`."""
    try:
        found = json.loads(value)
        if not isinstance(found, dict):
            raise TypeError(f"expected a JSON object, not {type(found).__name__}")
        return make(found)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RegistryCorrupt(key, f"the value is not a valid record of the cluster: {error!r}") from error
