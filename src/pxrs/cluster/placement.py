"""Pure: which storage nodes a ledger uses, which node replaces another, and which broker claims a partition (P9).

A placement is a function of the candidates, the number wanted, and the number of the decision, which rises with each
decision of the process. It returns the best candidates first. `least loaded` is the default; installed packages
register others as entry points of the group `pxrs.placements`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pxrs import plugins
from pxrs.cluster.ledgers import Quorum
from pxrs.cluster.records import AliveNode, BrokerRecord
from pxrs.errors import InvalidPlacement

ENTRY_POINTS: Final = "pxrs.placements"


class Candidate(NamedTuple):
    """A storage node or a broker that may be chosen."""

    id: str
    load: float
    """Bytes on a storage node, or partitions of a broker. Smaller is better."""
    free_bytes: int = 0
    """Free disk space of a storage node; 0 for a broker."""


Placement = Callable[[Sequence[Candidate], int, int], Sequence[str]]
"""Takes the candidates in the order of their ids, the number wanted, and the number of the decision. Returns the ids of
that many candidates, or of all if there are fewer, the best first."""


def least_loaded(candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
    """The candidates with the least load. `turn` rotates candidates of equal load, so that not all ledgers begin with
    the same node."""
    shift = {each.id: (number - turn) % len(candidates) for number, each in enumerate(candidates)}
    return [each.id for each in sorted(candidates, key=lambda each: (each.load, shift[each.id]))[:count]]


def round_robin(candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
    return [candidates[(turn + k) % len(candidates)].id for k in range(min(count, len(candidates)))]


def at_random(candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
    ids = [each.id for each in candidates]
    random.shuffle(ids)
    return ids[:count]


LEAST_LOADED: Final = "least loaded"
PLACEMENTS: Final[Mapping[str, Placement]] = {
    LEAST_LOADED: least_loaded,
    "round robin": round_robin,
    "random": at_random,
}


def placement_named(name: object) -> Placement:
    """Raises InvalidPlacement."""
    return plugins.function_named("placement", name, PLACEMENTS, ENTRY_POINTS, InvalidPlacement)


def storage_candidates(alive: Mapping[str, AliveNode], without: Iterable[str] = ()) -> list[Candidate]:
    """The nodes that accept entries, in the order of their ids, except those in `without`, for example the nodes that a
    ledger already uses."""
    excluded = {*without}
    return [
        Candidate(node, float(found.used_bytes), found.free_bytes)
        for node, found in sorted(alive.items())
        if found.refuses is None and node not in excluded
    ]


def broker_candidates(brokers: Mapping[str, BrokerRecord]) -> list[Candidate]:
    return [Candidate(incarnation, found.load) for incarnation, found in sorted(brokers.items())]


def choose(placement: Placement, candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
    """At most `count` of the candidates, the best first. Raises InvalidPlacement if the function returns too many ids,
    an unknown one, or one twice, which would put two copies of an entry on one node."""
    if not candidates or count < 1:
        return []
    chosen = list(placement(candidates, count, turn))
    known = {each.id for each in candidates}
    if len(chosen) > count or len(set(chosen)) != len(chosen) or not set(chosen) <= known:
        raise InvalidPlacement(
            f"the placement returned {chosen!r}; it must return at most {count} different nodes of {sorted(known)!r}"
        )
    return chosen


def ensemble(placement: Placement, alive: Mapping[str, AliveNode], size: int, turn: int) -> tuple[str | None, ...]:
    """The node at each position of a new ledger; None where there are too few nodes. Such a ledger lacks copies, which
    `copies` and `pxrs cluster status` report."""
    chosen: list[str | None] = [*choose(placement, storage_candidates(alive), size, turn)]
    return tuple(chosen + [None] * (size - len(chosen)))


class Shortfall(NamedTuple):
    """Fewer storage nodes accept entries than the ensemble of a topic has positions."""

    accepting: int
    needed: int
    """How many must accept entries so that every entry can get Qa acknowledgements."""
    ensemble: int

    @property
    def can_store(self) -> bool:
        """Whether new ledgers can be written, with fewer copies than the topic asks for."""
        return self.accepting >= self.needed

    def warning(self, topic: str) -> str:
        """For the caller who creates a topic."""
        if self.can_store:
            return f"messages of topic {topic} get fewer copies than asked for: {self}; start more storage nodes"
        return f"topic {topic} was created, but nothing can be stored in it yet: {self}; start more storage nodes"

    def __str__(self) -> str:
        if self.can_store:
            return f"{self.accepting} of {self.ensemble} storage nodes of the ensemble accept entries"
        return (
            f"{self.accepting} of {self.needed} needed storage nodes accept entries ({self.ensemble} in the ensemble)"
        )


def nodes_needed(quorum: Quorum) -> int:
    """How many positions of an ensemble need a node so that every entry can get Qa acknowledgements. The empty ones are
    next to each other, so a write set may contain all of them."""
    return quorum.ensemble - quorum.write_quorum + quorum.ack_quorum


def shortfall(quorum: Quorum, accepting: int) -> Shortfall | None:
    """What a topic with this quorum lacks when so many storage nodes accept entries; None if it lacks nothing."""
    if accepting >= quorum.ensemble:
        return None
    return Shortfall(accepting, nodes_needed(quorum), quorum.ensemble)
