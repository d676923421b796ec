"""Which member should own which partition: pure functions from members and partitions to an assignment (X4, F7).

An assignor is given the incarnations of the members, the oldest first; the number of partitions; and for each partition
the incarnation that it was meant for before, or None. It returns a list with the incarnation of one of these members
for each partition. It must be deterministic, and must return `before` unchanged if that is its own result for the same
members: the leader asks it whenever it looks at the group, and each difference is a hand-over. The assignors of pxrs
give `P // C` partitions to each member and one more to `P % C` of them.

An installed package may bring others. What any assignor returns is checked (`targets_of`): a partition that is assigned
to no member, or to one that is not there, would never be read, and nothing else would report that.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from pxrs.errors import AssignorFailed, InvalidGroup
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
        raise InvalidGroup(f"assignor is {name!r}; give the name of one, such as {', '.join(ASSIGNORS)}")
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
        raise AssignorFailed(name, f"it assigned {len(targets)} partitions, and there are {partitions}")
    there = set(members)
    for number, target in enumerate(targets):
        if not isinstance(target, str) or target not in there:
            raise AssignorFailed(name, f"it assigned partition {number} to {target!r}, which is no member of the group")
    return targets
