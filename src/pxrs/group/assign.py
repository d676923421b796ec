"""Who should have what: pure functions from members and partitions to an assignment (X4, F7).

An assignor is given the members in a fixed order, the number of partitions, and whom each partition was meant for
before. It must be deterministic, and give `P // C` partitions to each member and one more to `P % C` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pxrs.errors import InvalidGroup

Targets = list[str | None]
Assignor = Callable[[Sequence[str], int, Sequence[str | None]], Targets]


def sticky(members: Sequence[str], partitions: int, before: Sequence[str | None]) -> Targets:
    """A fair share with the fewest moves: everyone keeps what it has, up to its share."""
    if not members:
        return [None] * partitions
    known = set(members)
    targets: Targets = [
        before[number] if number < len(before) and before[number] in known else None for number in range(partitions)
    ]
    has = {member: targets.count(member) for member in members}
    base, more = divmod(partitions, len(members))
    # Those who have most are given the larger shares: each of them then moves one partition less.
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
    """Neighbouring partitions together."""
    if not members:
        return [None] * partitions
    base, more = divmod(partitions, len(members))
    return [member for rank, member in enumerate(members) for _ in range(base + (rank < more))]


def round_robin(members: Sequence[str], partitions: int, before: Sequence[str | None]) -> Targets:
    """One after the other."""
    if not members:
        return [None] * partitions
    return [members[number % len(members)] for number in range(partitions)]


ASSIGNORS: Final[dict[str, Assignor]] = {"sticky": sticky, "range": range_, "round-robin": round_robin}


def assignor_named(name: str) -> Assignor:
    """Raises InvalidGroup if there is none of this name."""
    if not isinstance(name, str) or name not in ASSIGNORS:
        raise InvalidGroup(f"assignor is {name!r}; choose from {', '.join(ASSIGNORS)}")
    return ASSIGNORS[name]
