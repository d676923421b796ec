"""Pure: which storage nodes keep a ledger, which one takes the place of another, which broker takes a partition (P9).

A placement is a function of the candidates, a count, and a number that says how often something was placed before. It
returns the best candidates first. `least loaded` is the default; installed packages register others as entry points of
the group `pxrs.placements`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pxrs import plugins
from pxrs.cluster.records import AliveNode, BrokerRecord
from pxrs.errors import InvalidPlacement

ENTRY_POINTS: Final = "pxrs.placements"


class Candidate(NamedTuple):
    """A storage node or a broker that may be chosen."""

    id: str
    load: float
    """Bytes on a storage node, partitions of a broker: the smaller, the better."""
    free_bytes: int = 0
    """What a storage node has left; 0 for a broker."""


Placement = Callable[[Sequence[Candidate], int, int], Sequence[str]]
"""Given candidates in the order of their ids, how many are wanted, and the number of the decision (each one is one
higher than the last of the process): the ids of as many as wanted, or fewer if there are fewer; the best first."""


def least_loaded(candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
    """Those with the least load. Among equals the turn decides, so that not all ledgers begin at the same node."""
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
    """The nodes that take new ledgers, by their ids; not those in `without`, such as the nodes that a ledger has."""
    excluded = {*without}
    return [
        Candidate(node, float(found.used_bytes), found.free_bytes)
        for node, found in sorted(alive.items())
        if found.refuses is None and node not in excluded
    ]


def broker_candidates(brokers: Mapping[str, BrokerRecord]) -> list[Candidate]:
    return [Candidate(incarnation, found.load) for incarnation, found in sorted(brokers.items())]


def choose(placement: Placement, candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
    """At most `count` of the candidates, the best first. Raises InvalidPlacement if the function's answer cannot be
    used: a ledger would have two copies on one node."""
    if not candidates or count < 1:
        return []
    chosen = list(placement(candidates, count, turn))
    known = {each.id for each in candidates}
    if len(chosen) > count or len(set(chosen)) != len(chosen) or not set(chosen) <= known:
        raise InvalidPlacement(
            f"the placement returned {chosen!r}; it must return at most {count} different ones of {sorted(known)!r}"
        )
    return chosen


def ensemble(placement: Placement, alive: Mapping[str, AliveNode], size: int, turn: int) -> tuple[str | None, ...]:
    """The positions of a new ledger; None where there is no node: the ledger is under-replicated, which `copies` and
    `pxrs cluster status` show."""
    chosen: list[str | None] = [*choose(placement, storage_candidates(alive), size, turn)]
    return tuple(chosen + [None] * (size - len(chosen)))
