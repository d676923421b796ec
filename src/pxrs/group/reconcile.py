"""What a member should do next: a pure function of what the registry holds and what the member has.

No event has to be caught and no order kept: any change wakes a member, it reads a snapshot, and this says what to do.
Each action is a compare-and-commit on what the snapshot showed, so a stale snapshot makes a refused commit, never a
wrong one; then the member looks again.

The rules: the leader is taken when the one named is gone (G2), and it alone writes the assignment. A partition is
claimed when it is free or its owner is gone, never from one who lives (X6); the one who has it releases it when it has
finished what is in hand. The leader takes it from an owner that does not, once that owner's own hand-over time, which
its member record states, has passed (X8).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pxrs.group.assign import targets_of
from pxrs.group.records import Assignment, Leader, Member, Owner, TopicPartition
from pxrs.group.snapshot import NOBODY
from pxrs.registry.contract import ABSENT


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the registry holds of a group, each record with its version."""

    members: Mapping[str, Member]
    leader: tuple[Leader, int] | None = None
    assignment: tuple[Assignment, int] | None = None
    owners: Mapping[TopicPartition, tuple[Owner, int]] = field(default_factory=dict)

    def owner(self, place: TopicPartition) -> tuple[Owner, int]:
        return self.owners.get(place, (NOBODY, ABSENT))


@dataclass(frozen=True, slots=True)
class Lead:
    """Take the lead: the key must still have this version, and the one it names be gone."""

    version: int
    term: int
    gone: str | None


@dataclass(frozen=True, slots=True)
class Assign:
    assignment: Assignment
    version: int
    leader_version: int


@dataclass(frozen=True, slots=True)
class Claim:
    partition: int
    version: int
    epoch: int
    gone: str | None
    """The dead owner, whose absence is part of the commit (G1)."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Hand out nothing more of it; release it when what is in hand is done."""

    partition: int


@dataclass(frozen=True, slots=True)
class Resume:
    """It is to stay here after all."""

    partition: int


@dataclass(frozen=True, slots=True)
class Release:
    partition: int


@dataclass(frozen=True, slots=True)
class Lose:
    """Somebody has taken it."""

    partition: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Take it from an owner that lives and does not release it in time."""

    place: TopicPartition
    version: int
    epoch: int
    leader_version: int
    assignment_version: int
    """That which asks for it: a fence that lands late must not take what is to stay after all."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The registry does not know this member any more."""


Action = Lead | Assign | Claim | Revoke | Resume | Release | Lose | Fence | Leave


@dataclass(frozen=True, slots=True)
class Me:
    """The member that looks, and what it has: the version of the owner key at which it claimed each partition."""

    incarnation: str
    topic: str
    partitions: int
    held: Mapping[int, int] = field(default_factory=dict)
    revoking: Collection[int] = ()
    drained: Collection[int] = ()
    """Of those it is revoking, the ones with nothing in hand."""


Asked = Mapping[tuple[TopicPartition, int], float]
"""Since when, on this member's clock, each partition has been asked of its owner, which is named by its epoch."""


def asked_since(snapshot: Snapshot, before: Asked, now: float) -> dict[tuple[TopicPartition, int], float]:
    """What is asked of whom, and since when. The time does not begin anew when another one asks (G9)."""
    if snapshot.assignment is None:
        return {}
    asked = {}
    for place, (owner, _) in snapshot.owners.items():
        target = snapshot.assignment[0].target(*place)
        if owner.incarnation in snapshot.members and target is not None and target != owner.incarnation:
            asked[place, owner.epoch] = before.get((place, owner.epoch), now)
    return asked


def reconcile(snapshot: Snapshot, me: Me, asked: Asked, now: float, handover_s: float) -> list[Action]:
    """What to do, in this order. The member looks again when all is done, or when a commit was refused.

    handover_s: of this member. As the leader it applies it to owners whose record states no time of their own."""
    if me.incarnation not in snapshot.members:
        return [Leave()]
    # What is decided here follows from the assignment that was read: one that is being replaced decides nothing more.
    return _lead(snapshot, me) or [*_own(snapshot, me), *_fence(snapshot, me, asked, now, handover_s)]


def _lead(snapshot: Snapshot, me: Me) -> list[Action]:
    leader, version = snapshot.leader or (Leader("", 0), ABSENT)
    if leader.incarnation != me.incarnation:
        if leader.incarnation in snapshot.members:
            return []
        return [Lead(version, leader.term + 1, leader.incarnation or None)]
    before, assignment_version = snapshot.assignment or (Assignment(0), ABSENT)
    targets = assign_all(snapshot, before)
    if targets == before.targets:
        return []
    return [Assign(Assignment(before.generation + 1, targets), assignment_version, version)]


def assign_all(snapshot: Snapshot, before: Assignment) -> dict[str, list[str | None]]:
    """The targets of every topic that anybody reads, as far as possible where they are. Raises AssignorFailed."""
    readers: dict[str, list[str]] = {}
    for incarnation, member in sorted(snapshot.members.items(), key=lambda each: (each[1].since, each[0])):
        readers.setdefault(member.topic, []).append(incarnation)
    targets = {}
    for topic, members in sorted(readers.items()):
        members = [member for member in members if snapshot.members[member].is_alone][:1] or members
        partitions = max(snapshot.members[member].partitions for member in members)
        has = [_holder(snapshot, before, topic, number) for number in range(partitions)]
        # All have the same one, or none on record; members of version 0.1 did not see to that, and took the oldest's.
        named = [snapshot.members[member].assignor for member in members if snapshot.members[member].assignor]
        targets[topic] = targets_of(named[0] if named else "sticky", members, partitions, has)
    return targets


def _holder(snapshot: Snapshot, before: Assignment, topic: str, partition: int) -> str | None:
    """Whom it was meant for, or if that one is gone, who has it."""
    target = before.target(topic, partition)
    return target if target in snapshot.members else snapshot.owner((topic, partition))[0].incarnation


def _own(snapshot: Snapshot, me: Me) -> list[Action]:
    actions: list[Action] = []
    assignment = snapshot.assignment[0] if snapshot.assignment else Assignment(0)
    for partition in range(me.partitions):
        target = assignment.target(me.topic, partition)
        owner, version = snapshot.owner((me.topic, partition))
        if partition in me.held:
            actions += _keep_or_release(partition, version, target == me.incarnation, me)
        elif target == me.incarnation and _is_free(owner, snapshot, me):
            is_dead = owner.incarnation is not None and owner.incarnation != me.incarnation
            gone = owner.incarnation if is_dead else None
            actions.append(Claim(partition, version, owner.epoch + 1, gone))
    return actions


def _keep_or_release(partition: int, version: int, is_mine: bool, me: Me) -> list[Action]:
    if version != me.held[partition]:
        return [Lose(partition)]
    if is_mine:
        return [Resume(partition)] if partition in me.revoking else []
    if partition not in me.revoking:
        return [Revoke(partition)]
    return [Release(partition)] if partition in me.drained else []


def _is_free(owner: Owner, snapshot: Snapshot, me: Me) -> bool:
    # One that names this member without its knowing is an earlier claim whose reply was lost: it is claimed again.
    return owner.incarnation == me.incarnation or owner.incarnation not in snapshot.members


def _fence(snapshot: Snapshot, me: Me, asked: Asked, now: float, handover_s: float) -> list[Action]:
    if snapshot.leader is None or snapshot.assignment is None:
        return []
    fences: list[Action] = []
    for (place, epoch), at in _fence_times(snapshot, me.incarnation, asked, handover_s).items():
        if now >= at:
            _, version = snapshot.owner(place)
            fences.append(Fence(place, version, epoch + 1, snapshot.leader[1], snapshot.assignment[1]))
    return fences


def next_fence_at(snapshot: Snapshot, incarnation: str, asked: Asked, handover_s: float) -> float:
    """When this member, if it leads, has to take the next partition from a slow owner; infinity if there is none."""
    return min(_fence_times(snapshot, incarnation, asked, handover_s).values(), default=math.inf)


def _fence_times(
    snapshot: Snapshot, incarnation: str, asked: Asked, handover_s: float
) -> dict[tuple[TopicPartition, int], float]:
    """When each partition that is asked of its owner may be taken from it. Empty unless this member leads: nobody else
    may fence, so nobody else has to wake for it."""
    if snapshot.assignment is None or snapshot.leader is None or snapshot.leader[0].incarnation != incarnation:
        return {}
    times = {}
    for (place, epoch), since in asked.items():
        owner = snapshot.members.get(snapshot.owner(place)[0].incarnation or "")
        own_s = owner.handover_s if owner is not None else None
        times[place, epoch] = since + (handover_s if own_s is None else own_s)
    return times


def is_waiting(snapshot: Snapshot, me: Me) -> bool:
    """Whether changes of owners concern it: it waits for a partition, gives one up, or leads while one moves."""
    if me.revoking or snapshot.assignment is None:
        return True
    targets = snapshot.assignment[0].targets.get(me.topic, [])
    if any(target == me.incarnation and number not in me.held for number, target in enumerate(targets)):
        return True
    if snapshot.leader is None or snapshot.leader[0].incarnation != me.incarnation:
        return False
    # Also what is free as yet: a late claim of one that it is not meant for any more has to be found and fenced.
    places = [(topic, number) for topic, each in snapshot.assignment[0].targets.items() for number in range(len(each))]
    return any(snapshot.owner(place)[0].incarnation != snapshot.assignment[0].target(*place) for place in places)
