"""What a member should do next: a pure function of what the registry holds and of what the member owns.

The protocol is level-triggered. A change that concerns a member wakes it, it reads what concerns it, and `reconcile`
says what to do. Each action is a commit that expects what was read, so an action that was decided on an outdated state
is refused, and the member reads again. No event has to be caught, and events may come in any order.

What a member reads is in `GroupState`: the leader reads the whole group; every other member reads its own target, the
owner keys of the partitions that it gains or loses (`moving`), and whether the members that it depends on are there.

What happens to a partition as one member sees it. "Meant" is that the member's target names it:

    the member        meant    owner key                        action          then
    --------------    -----    -----------------------------    ------------    --------------------------------------
    does not own it   no       -                                -
    does not own it   yes      free, never written, or of a     Claim           owns it, and reads its checkpoint (G3)
                               member that is gone (G1), or
                               of this member by a claim
                               whose reply was lost (R5)
    does not own it   yes      of a member that is there        - (waits)       is woken when the owner key changes (X6)
    owns it           yes      as claimed                       -
    owns it           no       as claimed                       Revoke          hands out nothing more of it
    is revoking it    no       as claimed, some in hand         - (waits)
    is revoking it    no       as claimed, nothing in hand      Release         does not own it; the owner key is free
    is revoking it    yes      as claimed                       Resume          owns it, and hands out again
    owns it, or is    any      has another version              Lose            does not own it
    revoking it

The leader alone writes the targets (G2). It fences a partition whose owner does not release it within the hand-over
time that the owner's member record states (X8)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pxrs.group.assign import shared_out
from pxrs.group.records import Leader, Member, Owner, Target
from pxrs.group.snapshot import GroupState
from pxrs.log.numbering import Numbering, TopicPartition
from pxrs.registry.contract import ABSENT


@dataclass(frozen=True, slots=True)
class Lead:
    """Become the leader, or begin another term as the leader. The commit expects this version of the leader key, and
    that the former leader is gone, unless this member is the leader."""

    version: int
    term: int
    gone: str | None


@dataclass(frozen=True, slots=True)
class Assign:
    """Write these targets and delete those of members that are gone. They may be more than one commit can hold: then
    the leader writes them in several commits, each of which expects the leader key."""

    targets: Mapping[str, tuple[Target, int]]
    """By incarnation: the new target, and the expected version of its key."""
    gone: Mapping[str, int]
    """By incarnation: the expected version of a target to delete."""
    leader_version: int


@dataclass(frozen=True, slots=True)
class Claim:
    partition: int
    version: int
    epoch: int
    gone: str | None
    """The former owner if it is gone: its absence is part of the commit (G1)."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Hand out nothing more of the partition; release it when nothing of it is in hand."""

    partition: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The partition is meant for this member again: hand it out."""

    partition: int


@dataclass(frozen=True, slots=True)
class Release:
    partition: int


@dataclass(frozen=True, slots=True)
class Lose:
    """The leader or an administrator has taken the partition from this member."""

    partition: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Take partitions from a member that is there and has not released them in time."""

    owner: str
    partitions: Mapping[TopicPartition, tuple[int, int]]
    """By partition: the expected version of the owner key, and the new epoch."""
    target: Target
    """The target of the owner as read, which does not name the partitions. The commit expects the version of its key,
    so that a fence that is applied late takes no partition that was meant for the owner again since; and it raises
    `taken`."""
    target_version: int
    leader_version: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The registry has no record of this member any more."""


Action = Lead | Assign | Claim | Revoke | Resume | Release | Lose | Fence | Leave


@dataclass(frozen=True, slots=True)
class Me:
    """The member that decides, and what it owns."""

    incarnation: str
    numbering: Numbering
    """The topics that the member reads. Here and in the actions, the member's own partitions are numbers of this."""
    held: Mapping[int, int] = field(default_factory=dict)
    """By partition: the version of the owner key as this member's claim wrote it."""
    revoking: Collection[int] = ()
    drained: Collection[int] = ()
    """The partitions of `revoking` with nothing in hand."""
    has_late_targets: bool = False
    """Whether this member leads, and a commit of targets whose reply was lost may still be applied."""


AskedSince = Mapping[tuple[TopicPartition, int], float]
"""Since when, on the leader's clock, each partition has been asked of its owner. The int is the owner's epoch."""


def moving(target: Target, me: Me) -> set[int]:
    """The partitions that a member gains or loses: whose owner keys it reads, and watches."""
    meant = _meant(target, me)
    return (meant - me.held.keys()) | (me.held.keys() - meant) | set(me.revoking)


def _meant(target: Target, me: Me) -> set[int]:
    """The numbers of the partitions that the target names. Partitions of topics that the member does not read are left
    out."""
    found = {me.numbering.number_of(topic, each) for topic, numbers in target.partitions.items() for each in numbers}
    return {number for number in found if number is not None}


def asked_since(state: GroupState, before: AskedSince, now: float) -> dict[tuple[TopicPartition, int], float]:
    """Which partitions the leader asks of which owner, and since when. state: that of the leader, which is complete.
    The time does not begin anew when a partition is asked for another member (G9)."""
    meant = state.meant_for()
    asked = {}
    for partition, (owner, _) in state.owners.items():
        if owner.incarnation in state.members and meant.get(partition, owner.incarnation) != owner.incarnation:
            asked[partition, owner.epoch] = before.get((partition, owner.epoch), now)
    return asked


def reconcile(state: GroupState, me: Me, asked: AskedSince, now: float, handover_s: float) -> list[Action]:
    """The actions of a member, in this order. The member reads again when all are done, or when a commit was refused.

    handover_s: the hand-over time of this member. As the leader, it uses this for owners whose record has none."""
    if me.incarnation not in state.members:
        return [Leave()]
    # If targets are about to be replaced, everything else is decided after that.
    return _lead(state, me) or [*_own(state, me), *_fence(state, me, asked, now, handover_s)]


def is_led_by(state: GroupState, incarnation: str) -> bool:
    return state.leader is not None and state.leader[0].incarnation == incarnation


def _lead(state: GroupState, me: Me) -> list[Action]:
    leader, version = state.leader or (Leader("", 0), ABSENT)
    if leader.incarnation != me.incarnation:
        if leader.incarnation in state.members:
            return []
        return [Lead(version, leader.term + 1, leader.incarnation or None)]
    if me.has_late_targets:
        # The late commit expects the leader key as it was, so a new term refuses it from then on (R5). If it was
        # applied before, the next look reads its targets. Without a new term it could be applied after newer targets: a
        # partition would be in two targets, or a member that is gone would have one, until the leader looks again.
        return [Lead(version, leader.term + 1, None)]
    wanted = assign_all(state)
    generation = state.generation + 1
    targets = {}
    for incarnation, partitions in wanted.items():
        before, target_version = state.target(incarnation)
        if target_version == ABSENT or before.partitions != partitions:
            targets[incarnation] = replace(before, generation=generation, partitions=partitions), target_version
    gone = {name: version for name, (_, version) in state.targets.items() if name not in state.members}
    return [Assign(targets, gone, version)] if targets or gone else []


def assign_all(state: GroupState) -> dict[str, dict[str, list[int]]]:
    """The partitions that each member should own, by topic: as far as possible those that it was meant to own before.
    Members of another layout are given nothing. Raises AssignorFailed.

    Topics that are read by exactly the same members are shared out together, and apart from all others. So a member
    that reads other topics than the rest changes only the shares of the topics that it reads."""
    there = {name: member for name, member in state.members.items() if member.is_of_this_layout}
    meant = state.meant_for()
    wanted: dict[str, dict[str, list[int]]] = {incarnation: {} for incarnation in there}
    for members, topics in _read_together(there):
        named = [there[member].assignor for member in members if there[member].assignor]
        chosen = shared_out(
            named[0] if named else "sticky",
            members,
            topics,
            # The member that the partition was meant for; if it is gone, the member that owns it.
            lambda place: meant.get(place, state.owner(place)[0].incarnation),
        )
        for (topic, number), incarnation in sorted(chosen.items()):
            wanted[incarnation].setdefault(topic, []).append(number)
    return wanted


def _read_together(there: Mapping[str, Member]) -> list[tuple[tuple[str, ...], dict[str, int]]]:
    """The sets of members that read the same topics, the oldest member first, and how many partitions each of these
    topics has. A topic that a member must have alone is read by that member only."""
    readers: dict[str, list[str]] = {}
    partitions: dict[str, int] = {}
    for incarnation, member in sorted(there.items(), key=lambda each: (each[1].since, each[0])):
        for topic in member.reads:
            readers.setdefault(topic.id, []).append(incarnation)
            partitions[topic.id] = max(topic.partitions, partitions.get(topic.id, 0))
    together: dict[tuple[str, ...], dict[str, int]] = {}
    for topic_id, members in sorted(readers.items()):
        chosen = [member for member in members if there[member].is_alone][:1] or members
        together.setdefault(tuple(chosen), {})[topic_id] = partitions[topic_id]
    return list(together.items())


def _own(state: GroupState, me: Me) -> list[Action]:
    actions: list[Action] = []
    target, _ = state.target(me.incarnation)
    meant = _meant(target, me)
    for partition in sorted({*me.held, *meant}):
        place = me.numbering.place(partition)
        owner, version = state.owner(place)
        if partition in me.held:
            # An owner key that was not read has not changed: see `Target.taken`.
            is_taken = place in state.owners and version != me.held[partition]
            actions += [Lose(partition)] if is_taken else _keep_or_release(partition, partition in meant, me)
        elif _is_free(owner, state, me):
            is_dead = owner.incarnation is not None and owner.incarnation != me.incarnation
            actions.append(Claim(partition, version, owner.epoch + 1, owner.incarnation if is_dead else None))
    return actions


def _keep_or_release(partition: int, is_meant: bool, me: Me) -> list[Action]:
    if is_meant:
        return [Resume(partition)] if partition in me.revoking else []
    if partition not in me.revoking:
        return [Revoke(partition)]
    return [Release(partition)] if partition in me.drained else []


def _is_free(owner: Owner, state: GroupState, me: Me) -> bool:
    # An owner key that names this member, which does not own the partition: the reply to its claim was lost.
    return owner.incarnation == me.incarnation or owner.incarnation not in state.members


def _fence(state: GroupState, me: Me, asked: AskedSince, now: float, handover_s: float) -> list[Action]:
    due: dict[str, dict[TopicPartition, tuple[int, int]]] = {}
    for (partition, epoch), at in _fence_times(state, me.incarnation, asked, handover_s).items():
        owner, version = state.owner(partition)
        if now >= at and owner.incarnation is not None:
            due.setdefault(owner.incarnation, {})[partition] = version, epoch + 1
    leader_version = ABSENT if state.leader is None else state.leader[1]
    return [Fence(owner, some, *state.target(owner), leader_version) for owner, some in sorted(due.items())]


def next_fence_at(state: GroupState, incarnation: str, asked: AskedSince, handover_s: float) -> float:
    """When this member, if it leads, has to look whether the next partition was released; infinity if there is none."""
    return min(_fence_times(state, incarnation, asked, handover_s).values(), default=math.inf)


def _fence_times(
    state: GroupState, incarnation: str, asked: AskedSince, handover_s: float
) -> dict[tuple[TopicPartition, int], float]:
    """When each partition that is asked of its owner may be taken from it. Empty unless this member leads: nobody else
    may fence, so nobody else has to wake for it."""
    if not is_led_by(state, incarnation):
        return {}
    times = {}
    for (partition, epoch), since in asked.items():
        owner = state.members.get(state.owner(partition)[0].incarnation or "")
        own_s = owner.handover_s if owner is not None else None
        times[partition, epoch] = since + (handover_s if own_s is None else own_s)
    return times
