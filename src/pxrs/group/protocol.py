"""The registry operations of a member after it has joined, step by step: read, decide, act.

`look` reads the keys that concern the member, calls `reconcile`, and performs the actions that it returns. The number
of keys read and written grows with the partitions that the member gains and loses. Only the leader reads the whole
group.

Rules, each with a mutation of the simulator that fails without it:
- The leader writes targets and fences only by commits that expect the leader key as it was read, under its lease (G2).
- If the reply to a commit of targets was lost, the leader writes the leader key with the next term before it writes
  other targets. The first commit is then refused if it arrives late (R5).
- A claim expects the member's own target as it was read. So once the leader has replaced the target of a member, that
  member cannot claim what the new target does not name, and the leader, which reads the owners after that, sees every
  partition that the member has to release.
- Whoever takes a partition from a member that is there raises `taken` in that member's target, in the same commit. The
  member watches its target, and then reads all its owner keys; otherwise it does not read the owner keys of partitions
  that it keeps.
- The checkpoint is read after the claim has committed (G3).
- A member watches the owner keys of what it gains and loses, and the members that it waits for, before it reads them
  (R2): see `watched_keys`.

The targets of many members are written in several commits. A leader that dies in between leaves targets of two
generations: a partition is then in two targets, or in none. Both are safe, as only a claim makes an owner. The next
leader finds them different from what it wants, and writes them anew; that may move a partition once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pxrs.errors import Conflict, GroupActive, OutcomeUnknown
from pxrs.group.checkpoints import Holding
from pxrs.group.committing import Committing, in_parts
from pxrs.group.incarnation import LEASE_ENDED
from pxrs.group.joining import Joining
from pxrs.group.reconcile import (
    AskedSince,
    Assign,
    Claim,
    Fence,
    Lead,
    Leave,
    Lose,
    Me,
    Release,
    Resume,
    Revoke,
    asked_since,
    is_led_by,
    moving,
    next_fence_at,
    reconcile,
)
from pxrs.group.records import Checkpoint, Leader, LegacyAssignment, Owner, Target, partition_of
from pxrs.group.snapshot import GroupState, read_partitions
from pxrs.log.numbering import TopicPartition
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Scan, Steps, Write

COMMIT_BYTES_MAX: Final = 500_000
"""How many bytes of targets one commit writes at most: less than the limit of every store."""
SPARE_KEYS: Final = 16
"""How many keys that are not needed a watch may cover in any case."""


@dataclass
class MemberProtocol(Joining, Committing):
    """One incarnation of a member."""

    asked: AskedSince = field(default_factory=dict)
    """As the leader: since when each partition has been asked of its owner."""
    is_gone: bool = False
    """The registry has no record of this member any more: it has to join anew."""
    snapshot: GroupState | None = None
    """What the last `look` has read."""
    taken: int = 0
    """`Target.taken` of this member when it last read all its owner keys."""
    has_migrated: bool = False
    """As the leader: whether the key of layout 1 was looked for, and deleted."""
    has_late_targets: bool = False
    """Set on the leader when the reply to a commit of targets was lost, so that it may still be applied. Cleared when
    the leader has begun another term."""

    @property
    def is_leading(self) -> bool:
        """Whether this member is the leader, as of its last look."""
        return self.snapshot is not None and is_led_by(self.snapshot, self.incarnation)

    @property
    def fence_at(self) -> float:
        """When, as the leader, it has to look whether the next partition that it has asked for was released."""
        if self.snapshot is None:
            return float("inf")
        return next_fence_at(self.snapshot, self.incarnation, self.asked, self.handover_s)

    # What it reads.

    def watched_keys(self) -> frozenset[str]:
        """The keys and folders whose changes concern this member, as far as the last look has shown.

        They are to be watched before the next look. If a look has shown more of them than were watched, it has to be
        repeated: a change in between would be missed otherwise (R2)."""
        keys, state = self.keys, self.snapshot
        watched = {keys.leader, keys.target(self.incarnation)}
        if state is None:
            return frozenset({*watched, keys.member(self.incarnation)})
        members = {self.incarnation}
        if state.leader is not None and state.leader[0].incarnation in state.members:
            members.add(state.leader[0].incarnation)
        target, _ = state.target(self.incarnation)
        for number in moving(target, self._me()):
            place = self.place(number)
            watched.add(keys.owner(*place))
            owner = state.owner(place)[0].incarnation
            if number not in self.held and owner is not None and owner in state.members:
                members.add(owner)
        if self.sees_all:
            watched.add(keys.targets)
        if self.sees_all or self.is_leading:
            return frozenset({*watched, keys.members})
        return frozenset({*watched, *map(keys.member, members)})

    def _read(self) -> Steps[GroupState]:
        keys = self.keys
        state = GroupState()
        yield from self._get(state, keys.member(self.incarnation), keys.leader)
        if self.incarnation not in state.members:
            return state
        if is_led_by(state, self.incarnation):
            for prefix in (keys.members, keys.targets, keys.owners):
                yield from self._scan(state, prefix)
            return state
        if self.sees_all:
            for prefix in (keys.members, keys.targets):
                yield from self._scan(state, prefix)
        else:
            if state.leader is not None and state.leader[0].incarnation:
                yield from self._get(state, keys.member(state.leader[0].incarnation))
            yield from self._get(state, keys.target(self.incarnation))
        self._check_leader(state)
        yield from self._read_owners(state)
        return state

    def _read_owners(self, state: GroupState) -> Steps[None]:
        """Read the owner keys of the partitions that this member gains or loses, and the member keys of their
        owners."""
        me = self._me()
        target, _ = state.target(self.incarnation)
        numbers = moving(target, me)
        if target.taken != self.taken:
            numbers |= me.held.keys()
        for topic, some in self.numbering.by_topic(sorted(numbers)).items():
            for entry in (yield from read_partitions(self.keys.owners_of(topic), some)):
                state.add(self.keys, entry)
        waited_for = {state.owner(self.place(number))[0].incarnation for number in numbers - me.held.keys()}
        unknown = sorted(name for name in waited_for if name is not None and name not in state.members)
        if not self.sees_all:
            yield from self._get(state, *map(self.keys.member, unknown))

    def _get(self, state: GroupState, *keys: str) -> Steps[None]:
        for key in keys:
            entry: Entry | None = yield Get(key)
            if entry is not None:
                state.add(self.keys, entry)

    def _scan(self, state: GroupState, prefix: str) -> Steps[None]:
        for entry in (yield Scan(prefix)):
            state.add(self.keys, entry)

    def _check_leader(self, state: GroupState) -> None:
        """Raise GroupActive if the leader is of layout 1, which does not write targets. A member of version 0.1 joins
        whatever members are there."""
        leader = state.members.get(state.leader[0].incarnation) if state.leader is not None else None
        if leader is not None and not leader.is_of_this_layout:
            raise GroupActive(
                f"group {self.keys.group} is led by the member {leader.name} on {leader.host}, which runs an earlier "
                "version of pxrs and cannot share the group with this version: stop all members of the earlier version"
            )

    def _me(self) -> Me:
        revoking = [number for number, holding in self.held.items() if holding.is_revoking]
        drained = [number for number in revoking if self.held[number].lane.is_drained]
        held = {number: holding.version for number, holding in self.held.items()}
        return Me(self.incarnation, self.numbering, held, revoking, drained, self.has_late_targets)

    # What it does.

    def look(self, now: float) -> Steps[bool]:
        """Read what concerns this member, and do what follows from it. True if there is more to do at once."""
        state = yield from self._read()
        self.snapshot = state
        self.asked = asked_since(state, self.asked, now) if self.is_leading else {}
        actions = reconcile(state, self._me(), self.asked, now, self.handover_s)
        has_changed = False
        claims: list[Claim] = []
        releases: list[int] = []
        try:
            for action in actions:
                match action:
                    case Claim():
                        claims.append(action)
                    case Release(partition):
                        releases.append(partition)
                    case Lead():
                        yield from self._take_lead(action)
                        has_changed = True
                    case Assign():
                        yield from self._assign(action)
                        has_changed = True
                    case Fence():
                        yield from self._fence(action)
                        has_changed = True
                    case Revoke(partition):
                        self._revoke(partition)
                        has_changed = True
                    case Resume(partition):
                        has_changed = (yield from self._resume(partition)) or has_changed
                    case Lose(partition):
                        self.lose(partition)
                        has_changed = True
                    case Leave():
                        self.lose_all(LEASE_ENDED)
                        self.is_gone = True
            if not any(isinstance(action, Lead | Assign) for action in actions):
                # All that was taken from this member is lost by now.
                self.taken = state.target(self.incarnation)[0].taken
            if releases:
                yield from self.commit(releases, is_last=True)
                has_changed = True
            for some in in_parts(claims, max(1, (self.keys_max - 1) // 2)):
                yield from self._claim(some)
                has_changed = True
        except Conflict:
            has_changed = True
        return has_changed

    def _take_lead(self, action: Lead) -> Steps[None]:
        keys = self.keys
        absent = {keys.member(action.gone): ABSENT} if action.gone else {}
        leader = Leader(self.incarnation, action.term)
        yield Write({keys.leader: action.version, **absent}, {keys.leader: leader.dump()})
        self.has_late_targets = False

    def _assign(self, action: Assign) -> Steps[None]:
        """Write the targets in as few commits as can hold them, then delete those of former members."""
        keys, leads = self.keys, {self.keys.leader: action.leader_version}
        legacy: Entry | None = None
        if not self.has_migrated:
            legacy = yield Get(keys.legacy_assignment)
        earlier = 0 if legacy is None else LegacyAssignment.load(legacy.key, legacy.value).generation
        targets = {
            name: (replace(target, generation=target.generation + earlier), version)
            for name, (target, version) in action.targets.items()
        }
        for some in self._commits_of(targets):
            expect = {keys.target(name): targets[name][1] for name in some}
            try:
                yield Write({**leads, **expect}, {keys.target(name): targets[name][0].dump() for name in some})
            except OutcomeUnknown:
                self.has_late_targets = True
                raise
            self.reports.targets_written({name: targets[name][0] for name in some})
        gone = {keys.target(name): version for name, version in action.gone.items()}
        if legacy is not None:
            gone[legacy.key] = legacy.version
        for doomed in in_parts(sorted(gone), max(1, self.keys_max - 1)):
            yield Write({**leads, **{key: gone[key] for key in doomed}}, delete=doomed)
        self.has_migrated = True

    def _commits_of(self, targets: Mapping[str, tuple[Target, int]]) -> Iterator[list[str]]:
        """The incarnations in groups. The targets of each group fit into one commit."""
        some: list[str] = []
        size = 0
        for name, (target, _) in sorted(targets.items()):
            more = len(target.dump())
            if some and (size + more > COMMIT_BYTES_MAX or len(some) >= self.keys_max - 1):
                yield some
                some, size = [], 0
            some.append(name)
            size += more
        if some:
            yield some

    def _fence(self, action: Fence) -> Steps[None]:
        """Free the owner keys, and raise `Target.taken` of the owner, so that the owner reads its owner keys."""
        assert self.snapshot is not None
        key, target, version = self.keys.target(action.owner), action.target, action.target_version
        for some in in_parts(sorted(action.partitions.items()), max(1, self.keys_max - 2)):
            target = replace(target, taken=target.taken + 1)
            expect = {self.keys.owner(*partition): owner_version for partition, (owner_version, _) in some}
            before = {partition: self.snapshot.owner(partition)[0] for partition, _ in some}
            after = {place: Owner(None, epoch, past=before[place].history()) for place, (_, epoch) in some}
            put = {self.keys.owner(*partition): owner.dump() for partition, owner in after.items()}
            leads = {self.keys.leader: action.leader_version, key: version}
            version = (yield Write({**leads, **expect}, {**put, key: target.dump()}))[key]
            for partition, owner in after.items():
                self.reports.owner_changed("fenced", partition, before[partition], owner)

    def _claim(self, claims: Sequence[Claim]) -> Steps[None]:
        """Claim several partitions in one commit. If another member has claimed one of them, claim the others. Raises
        Conflict if the target of this member has changed."""
        assert self.snapshot is not None
        target_key = self.keys.target(self.incarnation)
        put, expect = {}, {target_key: self.snapshot.target(self.incarnation)[1]}
        before = {claim.partition: self.snapshot.owner(self.place(claim.partition))[0] for claim in claims}
        owners = dict[int, Owner]()
        for claim in claims:
            past = before[claim.partition].history()
            owners[claim.partition] = Owner(self.incarnation, claim.epoch, self.member.name, past)
            key = self.keys.owner(*self.place(claim.partition))
            expect[key] = claim.version
            put[key] = owners[claim.partition].dump()
            if claim.gone is not None:
                expect[self.keys.member(claim.gone)] = ABSENT
        try:
            versions = yield Write(expect, put)
        except Conflict as conflict:
            if target_key in conflict.keys:
                raise
            rest = [claim for claim in claims if not self._differs(claim, conflict)]
            if rest and len(rest) < len(claims):
                yield from self._claim(rest)
            return
        for number, owner in owners.items():
            self.reports.owner_changed("claimed", self.place(number), before[number], owner)
        # Read after the claim: what the former owner wrote until the claim counts (G3).
        found = yield from self._read_checkpoints(claims)
        if len(found) < len(claims):  # somebody has deleted the group meanwhile: it begins anew
            topics = self.numbering.by_topic(claim.partition for claim in claims)
            for topic in self.member.reads:
                if topic.id in topics:
                    yield from self._pin(topic)
            found = yield from self._read_checkpoints(claims)
        for claim, entry in found:
            # The failure is that of another owner.
            checkpoint = replace(Checkpoint.load(entry.key, entry.value), failure="")
            lane = self.hooks.assigned(claim.partition, claim.epoch, checkpoint.offset)
            version = versions[self.keys.owner(*self.place(claim.partition))]
            self.held[claim.partition] = Holding(
                claim.epoch, version, checkpoint, entry.version, lane, owner=owners[claim.partition]
            )

    def _differs(self, claim: Claim, conflict: Conflict) -> bool:
        gone = claim.gone is not None and self.keys.member(claim.gone) in conflict.keys
        return gone or self.keys.owner(*self.place(claim.partition)) in conflict.keys

    def _read_checkpoints(self, claims: Sequence[Claim]) -> Steps[list[tuple[Claim, Entry]]]:
        found: dict[TopicPartition, Entry] = {}
        for topic, numbers in self.numbering.by_topic(claim.partition for claim in claims).items():
            entries = yield from read_partitions(self.keys.checkpoints_of(topic), numbers)
            found |= {partition_of(entry.key): entry for entry in entries}
        places = [(claim, self.place(claim.partition)) for claim in claims]
        return [(claim, found[place]) for claim, place in places if place in found]

    def _revoke(self, partition: int) -> None:
        holding = self.held[partition]
        holding.is_revoking = True
        holding.lane.is_stopping = True
        self.hooks.revoked(holding.lane)

    def _resume(self, partition: int) -> Steps[bool]:
        """Hand out the partition again, unless it turns out to be lost. A release whose reply was lost may still be
        applied; a checkpoint first changes the version that the release expects, so that it is refused (R5)."""
        if self.held[partition].may_be_released and (yield from self.commit([partition])):
            return True
        holding = self.held[partition]
        self.hooks.resumed(holding.lane)
        holding.is_revoking = holding.lane.is_stopping = False
        return False


def rearmed(watched: frozenset[str], needed: frozenset[str]) -> frozenset[str] | None:
    """What to watch from now on, before the next look; None if what is watched is enough.

    A watch that covers more than is needed is kept until it covers much more: to replace it costs a call of the
    registry, and a look."""
    if needed <= watched and len(watched) <= 2 * len(needed) + SPARE_KEYS:
        return None
    return needed
