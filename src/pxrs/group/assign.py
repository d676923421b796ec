"""Which member should own which partition: pure functions from members and partitions to an assignment (X4, F7).

An assignor is given the incarnations of the members, the oldest first; the number of partitions; and for each partition
the incarnation that it was meant for before, or None. It returns a list with the incarnation of one of these members
for each partition. It must be deterministic, and must return `before` unchanged if that is its own result for the same
members: the leader calls it whenever it reads the group, and each difference is a hand-over. The assignors of pxrs
give `P // C` partitions to each member and one more to `P % C` of them.

Members that read the same topics share out all partitions of these topics (`shared_out`). "sticky" and "round-robin"
are given them as one list, so that the shares are fair over everything that the members read. "range", and every
assignor of an installed package, is called once for each topic, so that partitions of the same number in topics with
the same number of partitions go to the same member.

An installed package may bring other assignors. What any assignor returns is checked (`targets_of`): a partition that
is assigned to no member, or to one that is not there, would never be read, and nothing else would report that.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pxrs.errors import AssignorFailed, InvalidGroup
from pxrs.log.numbering import TopicPartition
from pxrs.plugins import function_named

Targets = list[str | None]
Assignor = Callable[[Sequence[str], int, Sequence[str | None]], Targets]


def sticky(members: Sequence[str], partitions: int, before: Sequence[str | None]) -> Targets:
    """Equal shares with the fewest moves: each member keeps what it has, up to its share."""
    if not members:
        return [None] * partitions
    known = set(members)
    targets: Targets = [
        before[number] if number < len(before) and before[number] in known else None for number in range(partitions)
    ]
    counts = Counter(targets)
    has = {member: counts[member] for member in members}
    base, more = divmod(partitions, len(members))
    # Members with the most partitions get the larger shares, so that fewer partitions move.
    ranked = sorted(members, key=lambda member: -has[member])
    share = {member: base + (rank < more) for rank, member in enumerate(ranked)}
    for number in range(partitions - 1, -1, -1):
        member = targets[number]
        if member is not None and has[member] > share[member]:
            has[member] -= 1
            targets[number] = None
    wanting = [member for member in members for _ in range(share[member] - has[member])]
    free = [number for number in range(partitions) if targets[number] is None]
    for number, member in zip(free, wanting, strict=True):
        targets[number] = member
    return targets


def range_(members: Sequence[str], partitions: int, before: Sequence[str | None]) -> Targets:
    """Each member gets a range of consecutive partitions."""
    if not members:
        return [None] * partitions
    base, more = divmod(partitions, len(members))
    return [member for rank, member in enumerate(members) for _ in range(base + (rank < more))]


def round_robin(members: Sequence[str], partitions: int, before: Sequence[str | None]) -> Targets:
    """The partitions go to the members in turn."""
    if not members:
        return [None] * partitions
    return [members[number % len(members)] for number in range(partitions)]


ASSIGNORS: Final[dict[str, Assignor]] = {"sticky": sticky, "range": range_, "round-robin": round_robin}


ENTRY_POINTS: Final = "pxrs.assignors"
"""The entry point group under which installed packages register assignors."""


def assignor_named(name: str) -> Assignor:
    """The assignor of this name. Raises InvalidGroup if there is none."""
    if not isinstance(name, str):
        raise InvalidGroup(f"assignor must be a name, such as {', '.join(ASSIGNORS)}, not {name!r}")
    return _found(name)


@functools.lru_cache(maxsize=64)
def _found(name: str) -> Assignor:
    """The assignor of this name, cached: the leader asks at every look, and a search of the installed packages takes
    milliseconds."""
    return function_named("assignor", name, ASSIGNORS, ENTRY_POINTS, InvalidGroup)


def targets_of(name: str, members: Sequence[str], partitions: int, before: Sequence[str | None]) -> Targets:
    """The result of the assignor of this name, checked. Raises AssignorFailed if it is not a valid assignment."""
    assign = assignor_named(name)
    try:
        targets = list(assign(tuple(members), partitions, tuple(before)))
    except Exception as error:  # errors of the code of an installed package
        raise AssignorFailed(name, f"it raised {error!r}") from error
    if len(targets) != partitions:
        raise AssignorFailed(name, f"it assigned {len(targets)} partitions, but there are {partitions}")
    there = set(members)
    for number, target in enumerate(targets):
        if not isinstance(target, str) or target not in there:
            raise AssignorFailed(
                name, f"it assigned partition {number} to {target!r}, which is not a member of the group"
            )
    return targets


def shared_out(
    name: str, members: Sequence[str], topics: Mapping[str, int], before: Callable[[TopicPartition], str | None]
) -> dict[TopicPartition, str]:
    """The member that each partition of these topics is assigned to. Raises AssignorFailed.

    members: their incarnations, the oldest first; all of them read all of the topics
    topics:  by topic id: how many partitions the topic has
    before:  the incarnation that a partition was meant for before, or None"""
    found: dict[TopicPartition, str] = {}
    for places in _lists_of(name, topics):
        chosen = targets_of(name, members, len(places), [before(place) for place in places])
        # `targets_of` has checked that each partition has a member.
        found |= {place: target for place, target in zip(places, chosen, strict=True) if target is not None}
    return found


def _lists_of(name: str, topics: Mapping[str, int]) -> list[list[TopicPartition]]:
    """The lists of partitions that the assignor of this name shares out, each by itself.

    "sticky" gives each member consecutive partitions of its list at first, so the list has partition 0 of all topics,
    then partition 1 of all topics, and so on: each member gets a share of every topic, and not all of a busy one.
    "round-robin" does so if the list has one topic after the other."""
    each = [[(topic, number) for number in range(topics[topic])] for topic in sorted(topics)]
    if name not in ("sticky", "round-robin"):
        return each
    places = [place for some in each for place in some]
    return [sorted(places, key=lambda place: (place[1], place[0]))] if name == "sticky" else [places]
