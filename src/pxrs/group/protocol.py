"""What a member says to the registry, step by step, without a thread, a clock or a store.

Every procedure is a generator that yields one registry operation at a time (`registry/steps.py`), so that the same code
runs on a real store and in the simulator.

Invariants, each with the mutation of the simulator that breaks without it:
- A checkpoint is written only together with the owner key's version at which this member claimed, and its own (G4).
- The checkpoint is read after the claim has committed (G3).
- The last checkpoint and the release are one commit, with a new epoch (G5, X9).
- A member joins only by a commit that expects the key of the group's assignor in a version that names its own, and only
  if it has seen no member with another one after it read that version: see `_agree`.
- Every partition's start is written down before anything is handed out (G6).
- Of a topic that keeps what is unread, a start is written down only if retention has not moved `topics/<id>/start`
  since it was read, and the same commit bumps `topics/<id>/gate`, which retention expects (O10).
- A reply that was lost leaves the version unknown: it is read again, and nothing is concluded from not seeing it (R5).
- What is no topic of a hub is read under one id, by whatever address: the first checkpoints are written in one commit
  with `groups/<group>/sources/...`, which names the id, expecting its version (see `foreign.py`).
- A pause is written at most once, in one commit with a checkpoint that names the failure: see `pause`.

The hooks are called in the middle of a procedure, so they only take note. Code of the user's, which may call back into
the member, runs when the procedure is over: see `GroupMember.procedure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

from pxrs.errors import (
    AssignorMismatch,
    Conflict,
    GroupElsewhere,
    OutcomeUnknown,
    PartitionLost,
    RegistryUnavailable,
)
from pxrs.group.checkpoints import FencedWrite, Holding, Outcome
from pxrs.group.foreign import Foreign, changed, check_meaning, former_reads
from pxrs.group.lane import Lane
from pxrs.group.reconcile import (
    Asked,
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
    Snapshot,
    asked_since,
    is_waiting,
    next_fence_at,
    reconcile,
)
from pxrs.group.records import (
    Assignment,
    Checkpoint,
    ChosenAssignor,
    Gate,
    Home,
    Keys,
    Leader,
    Member,
    Owner,
    Paused,
    SourceRead,
    Starts,
    gate_key,
    partition_of,
    start_key,
)
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Scan, Steps, Write

ATTEMPTS_MAX: Final = 100
"""How often a commit is tried again because another one was faster."""
PIN_KEYS: Final = 3
"""What a commit of starts names at most beside the checkpoints: of a topic the group's hub, and the topic's `start` and
gate; of a source that is no topic, the key that names it."""
PAUSE_ATTEMPTS_MAX: Final = 10
TAKEN: Final = "another member owns it, or the leader or an administrator has taken it from this member"
LEASE_ENDED: Final = "the lease of this member ended before it could be renewed"
RELEASED: Final = "this member released it before all that was handed out was done"


CommitMore = Callable[[Mapping[str, int], Mapping[str, bytes]], dict[str, int]]
"""Makes one registry commit of these expectations and writes, and of more of its own. Returns the new versions."""


class Hooks(Protocol):
    """What the member is told. An implementation calls nothing of the protocol, nor code of the user's."""

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane: ...

    def revoked(self, lane: Lane) -> None:
        """It will be released when what is in hand is done."""

    def released(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None:
        """It stays after all: `is_stopping` is cleared as soon as this returns."""

    def lost(self, lane: Lane) -> None: ...


@dataclass(slots=True)
class MemberProtocol:
    """One incarnation of a member. `keys_max` is how many keys one commit may name."""

    keys: Keys
    incarnation: str
    member: Member
    hooks: Hooks
    start_of: Callable[[int, int], int]
    """Where a partition begins that has no checkpoint, given its number and the offset before which retention may have
    removed everything."""
    wall: Callable[[], float]
    keys_max: int
    handover_s: float
    home: Home | None = None
    """The hub that the topic is of; None for a source that belongs to none, which is not checked."""
    foreign: Foreign | None = None
    """What is read, if it is no topic of a hub."""
    keeps_unread: bool = False
    """Whether the topic's retention spares what groups have yet to read: then starts are written through the gate."""
    held: dict[int, Holding] = field(default_factory=dict)
    asked: Asked = field(default_factory=dict)
    is_waiting: bool = True
    """Whether changes of owners concern this member now."""
    assignment_version: int = ABSENT
    """Of the assignment with which all owners were last read."""
    is_gone: bool = False
    snapshot: Snapshot | None = None

    @property
    def is_leading(self) -> bool:
        """As far as it knows."""
        leader = self.snapshot.leader if self.snapshot is not None else None
        return leader is not None and leader[0].incarnation == self.incarnation

    @property
    def fence_at(self) -> float:
        """When, as the leader, it has to take the next partition from an owner that is slow to hand it over."""
        if self.snapshot is None:
            return float("inf")
        return next_fence_at(self.snapshot, self.incarnation, self.asked, self.handover_s)

    def join(self) -> Steps[None]:
        """Be there; and write down where each partition begins, before anybody is handed anything (G6).

        Raises GroupElsewhere if the group reads the topics of another hub, and AssignorMismatch if members that are
        there have another assignor."""
        key = self.keys.member(self.incarnation)
        for attempt in range(ATTEMPTS_MAX):
            expect, put = {key: ABSENT}, {}
            if self.home is not None:
                is_ours, version = yield from self._read_home(self.home)
                # Expected, and not written again: members that join at the same time must not refuse one another.
                expect[self.keys.home] = version
                if not is_ours:
                    put[self.keys.home] = self.home.dump()
            version = yield from self._agree()
            expect[self.keys.assignor] = version
            if version == ABSENT:
                put[self.keys.assignor] = ChosenAssignor(self.member.assignor).dump()
            try:
                yield Write(expect, put, ephemeral={key: self.member.dump()})
                break
            except Conflict as conflict:  # of the other keys: a member of another hub or assignor was faster
                if key in conflict.keys or attempt == ATTEMPTS_MAX - 1:
                    raise
        yield from self._pin()

    def _agree(self) -> Steps[int]:
        """The version of the key of the group's assignor that the join must expect. It names this member's assignor, or
        is ABSENT, and then the join writes it.

        Two members with different assignors that live at the same time cannot both have joined. Say the second one
        joined at a version that it had read, and the first one before it, at another version. The key had the first
        one's version when that joined, so the second one's was written later, and so was read later. The second one
        looks at the members after it has read the version, so it has seen the first one, and was refused.

        So the key is written before the members are looked at, not by the join itself: a member that finds its own
        assignor there does not write the key, and would not be noticed by a join that only expects the old version."""
        key, mine = self.keys.assignor, self.member.assignor
        for _ in range(ATTEMPTS_MAX):
            entry: Entry | None = yield Get(key)
            yield from self._check_assignors()
            if entry is None:
                return ABSENT
            if ChosenAssignor.load(key, entry.value).assignor == mine:
                return entry.version
            try:
                yield Write({key: entry.version}, {key: ChosenAssignor(mine).dump()}, is_quiet=True)
            except Conflict:
                continue
        raise RegistryUnavailable(f"{key} was changed by others {ATTEMPTS_MAX} times; try again")

    def _check_assignors(self) -> Steps[None]:
        """Raise AssignorMismatch if a member has another assignor, whatever topic it reads. Any member may come to
        lead, the leader assigns the partitions of all topics, and it may not have the assignor of others installed.

        A record without one, of a version that kept none, goes with any."""
        mine, others = self.member.assignor, {}
        for entry in (yield Scan(self.keys.members)):
            other = Member.load(entry.key, entry.value)
            if other.assignor not in ("", mine):
                others[f"{other.name} on {other.host}"] = other.assignor
        if others and mine:
            raise AssignorMismatch(self.keys.group, mine, others)

    def _read_home(self, ours: Home) -> Steps[tuple[bool, int]]:
        """Whether the group is known to read this member's hub, and the version of the key that says so.

        A group that has neither members nor checkpoints is deleted, or was never there: any hub may take its name. That
        is safe although they are looked at one after the other: who writes a checkpoint that was not there also writes
        this key, and so refuses a commit that expects it as it was read before."""
        entry: Entry | None = yield Get(self.keys.home)
        home = Home() if entry is None else Home.load(entry.key, entry.value)
        if home.hub not in ("", ours.hub):
            for prefix in (self.keys.members, self.keys.checkpoints):
                if (yield Scan(prefix, limit=1)):
                    raise GroupElsewhere(self.keys.group, home.place, ours.place)
        return home.hub == ours.hub, ABSENT if entry is None else entry.version

    def _pin(self) -> Steps[None]:
        topic, conflicts = self.member.topic, 0
        while True:
            expect: dict[str, int] = {}
            put: dict[str, bytes] = {}
            if self.home is not None:
                _, expect[self.keys.home] = yield from self._read_home(self.home)
                put[self.keys.home] = self.home.dump()
            starts = Starts()
            if self.keeps_unread:
                key = start_key(topic)
                moved: Entry | None = yield Get(key)
                starts = Starts() if moved is None else Starts.load(key, moved.value)
                expect[key] = ABSENT if moved is None else moved.version
                put[gate_key(topic)] = Gate(self.member.name, self.wall()).dump()
            found = yield Scan(f"{self.keys.checkpoints}{topic}/")
            there = {partition_of(entry.key)[1] for entry in found}
            missing = [number for number in range(self.member.partitions) if number not in there]
            is_told = True
            if self.foreign is not None:
                is_told, expect[self.foreign.key] = yield from self._read_foreign(self.foreign, found)
                put[self.foreign.key] = self.foreign.read.dump()
            if not missing and is_told:
                return
            for number in missing[: max(1, self.keys_max - PIN_KEYS)]:
                key = self.keys.checkpoint(topic, number)
                expect[key] = ABSENT
                put[key] = Checkpoint(self.start_of(number, starts.of(number)), self.wall(), "start").dump()
            try:
                yield Write(expect, put, is_quiet=True)
            except Conflict:  # somebody else has written some of them, so that fewer are missing; or `start` has moved
                conflicts += 1
                if conflicts == ATTEMPTS_MAX:
                    raise

    def _read_foreign(self, ours: Foreign, found: Iterable[Entry]) -> Steps[tuple[bool, int]]:
        """Whether the group has the source on record as this member gives it, and the version of the key that says so.

        found: the group's checkpoints under this member's id. Raises IdentityChanged, SourceChanged: see `foreign.py`.
        """
        entries: list[Entry] = yield Scan(self.keys.sources)
        known = {entry.key: SourceRead.load(entry.key, entry.value) for entry in entries}
        checkpoints = {partition_of(entry.key)[1]: Checkpoint.load(entry.key, entry.value) for entry in found}
        check_meaning(self.keys.group, ours, known.values(), checkpoints)
        for former in former_reads(ours, known, bool(checkpoints)):
            if (yield Scan(f"{self.keys.checkpoints}{former.id}/", limit=1)):
                raise changed(self.keys.group, ours, former)
        versions = {entry.key: entry.version for entry in entries}
        return known.get(ours.key) == ours.read, versions.get(ours.key, ABSENT)

    def look(self, now: float) -> Steps[bool]:
        """Read what is, do what follows from it. True if there is more to do at once."""
        snapshot = yield from self._read()
        self.snapshot = snapshot
        self.asked = asked_since(snapshot, self.asked, now)
        actions = reconcile(snapshot, self._me(), self.asked, now, self.handover_s)
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
                    case Lead() | Assign() | Fence():
                        yield self._write_for(action)
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
            if releases:
                yield from self.commit(releases, is_last=True)
                has_changed = True
            for some in _in_parts(claims, self.keys_max // 2):
                yield from self._claim(some)
                has_changed = True
        except Conflict:
            has_changed = True
        self.is_waiting = is_waiting(snapshot, self._me())
        return has_changed

    def _read(self) -> Steps[Snapshot]:
        members = {
            entry.key.rpartition("/")[2]: Member.load(entry.key, entry.value)
            for entry in (yield Scan(self.keys.members))
        }
        leader: Entry | None = yield Get(self.keys.leader)
        assignment: Entry | None = yield Get(self.keys.assignment)
        led = None if leader is None else (Leader.load(leader.key, leader.value), leader.version)
        assigned = (
            None if assignment is None else (Assignment.load(assignment.key, assignment.value), assignment.version)
        )
        if self._needs_owners(members, led, assigned):
            owners = {
                partition_of(entry.key): (Owner.load(entry.key, entry.value), entry.version)
                for entry in (yield Scan(self.keys.owners))
            }
            self.assignment_version = assigned[1] if assigned else ABSENT
        else:
            owners = {
                (self.member.topic, number): (Owner(self.incarnation, holding.epoch), holding.version)
                for number, holding in self.held.items()
            }
        return Snapshot(members, led, assigned, owners)

    def _needs_owners(
        self,
        members: Mapping[str, Member],
        leader: tuple[Leader, int] | None,
        assignment: tuple[Assignment, int] | None,
    ) -> bool:
        """A member that has what it should and leads nobody need not read them all: it learns of a loss by the fence.

        Whoever takes from it writes the assignment anew, also an admin who resets the group."""
        if self.is_waiting or leader is None or assignment is None or assignment[1] != self.assignment_version:
            return True
        return leader[0].incarnation == self.incarnation or leader[0].incarnation not in members

    def _me(self) -> Me:
        revoking = [number for number, holding in self.held.items() if holding.is_revoking]
        drained = [number for number in revoking if self.held[number].lane.is_drained]
        held = {number: holding.version for number, holding in self.held.items()}
        return Me(self.incarnation, self.member.topic, self.member.partitions, held, revoking, drained)

    def _write_for(self, action: Lead | Assign | Fence) -> Write:
        keys = self.keys
        match action:
            case Lead(version, term, gone):
                absent = {keys.member(gone): ABSENT} if gone else {}
                return Write({keys.leader: version, **absent}, {keys.leader: Leader(self.incarnation, term).dump()})
            case Assign(assignment, version, leader_version):
                expect = {keys.leader: leader_version, keys.assignment: version}
                return Write(expect, {keys.assignment: assignment.dump()})
            case Fence(place, version, epoch, leader_version, assignment_version):
                key = keys.owner(*place)
                expect = {key: version, keys.leader: leader_version, keys.assignment: assignment_version}
                return Write(expect, {key: Owner(None, epoch).dump()})

    def _claim(self, claims: Sequence[Claim]) -> Steps[None]:
        """Claim several together; if somebody was faster on one of them, the others."""
        topic = self.member.topic
        put, expect = {}, {}
        for claim in claims:
            key = self.keys.owner(topic, claim.partition)
            expect[key] = claim.version
            put[key] = Owner(self.incarnation, claim.epoch, self.member.name).dump()
            if claim.gone is not None:
                expect[self.keys.member(claim.gone)] = ABSENT
        try:
            versions = yield Write(expect, put)
        except Conflict as conflict:
            rest = [claim for claim in claims if not self._differs(claim, conflict)]
            if rest and len(rest) < len(claims):
                yield from self._claim(rest)
            return
        # Only now: what the last owner wrote until the claim counts (G3).
        found = yield from self._read_checkpoints(claims)
        if len(found) < len(claims):  # somebody has deleted the group meanwhile: it begins anew
            yield from self._pin()
            found = yield from self._read_checkpoints(claims)
        for claim, entry in found:
            checkpoint = replace(Checkpoint.load(entry.key, entry.value), failure="")  # that was another owner's
            lane = self.hooks.assigned(claim.partition, claim.epoch, checkpoint.offset)
            version = versions[self.keys.owner(topic, claim.partition)]
            self.held[claim.partition] = Holding(claim.epoch, version, checkpoint, entry.version, lane)

    def _differs(self, claim: Claim, conflict: Conflict) -> bool:
        gone = claim.gone is not None and self.keys.member(claim.gone) in conflict.keys
        return gone or self.keys.owner(self.member.topic, claim.partition) in conflict.keys

    def _read_checkpoints(self, claims: Sequence[Claim]) -> Steps[list[tuple[Claim, Entry]]]:
        topic = self.member.topic
        if len(claims) == 1:
            entry = yield Get(self.keys.checkpoint(topic, claims[0].partition))
            return [(claims[0], entry)] if entry is not None else []
        found = {partition_of(entry.key)[1]: entry for entry in (yield Scan(f"{self.keys.checkpoints}{topic}/"))}
        return [(claim, found[claim.partition]) for claim in claims if claim.partition in found]

    def _revoke(self, partition: int) -> None:
        holding = self.held[partition]
        holding.is_revoking = True
        holding.lane.is_stopping = True
        self.hooks.revoked(holding.lane)

    def _resume(self, partition: int) -> Steps[bool]:
        """Hand it out again, unless it turns out to be lost. A release that may still land is first made to fail, by a
        checkpoint that takes away the version it expects (R5)."""
        if self.held[partition].may_be_released and (yield from self.commit([partition])):
            return True
        holding = self.held[partition]
        self.hooks.resumed(holding.lane)
        holding.is_revoking = holding.lane.is_stopping = False
        return False

    def lose(self, partition: int, reason: str = TAKEN) -> None:
        holding = self.held.pop(partition)
        lane = holding.lane
        lane.has_undone, lane.lost_reason = lane.position > holding.checkpoint.offset, reason
        lane.is_stopping = lane.is_lost = True
        self.hooks.lost(lane)

    def lose_all(self, reason: str) -> None:
        """Nothing here is owned any more, or may be: the lease is gone, or this member has left."""
        for partition in list(self.held):
            self.lose(partition, reason)

    def due(self) -> list[int]:
        """The partitions whose checkpoint is behind what is done."""
        holdings = list(self.held.items())  # at once: a thread that could not get the mutex in time reads it too
        return [number for number, holding in holdings if holding.lane.done > holding.checkpoint.offset]

    def is_in_doubt(self, partitions: Iterable[int]) -> bool:
        """Whether a checkpoint of any of these was sent without an answer, and may have been written."""
        holdings = dict(self.held)
        return any(number in holdings and holdings[number].checkpoint_version is None for number in partitions)

    def commit(self, partitions: Iterable[int], *, is_last: bool = False) -> Steps[list[int]]:
        """Write the checkpoints of what is done; with `is_last` release the partitions in the same commit (G5).

        The partitions that turned out to be lost."""
        lost: list[int] = []
        for some in _in_parts(list(partitions), self.keys_max // 2):
            lost += yield from self._commit_some([number for number in some if number in self.held], is_last)
        return lost

    def _commit_some(self, partitions: list[int], is_last: bool) -> Steps[list[int]]:
        lost: list[int] = []
        while partitions:
            for number in partitions:
                if self.held[number].checkpoint_version is None and not (yield from self.read_again(number)):
                    lost.append(number)
            partitions = [number for number in partitions if number in self.held]
            if not partitions:
                break
            write = self.checkpoint_write(partitions, is_last=is_last)
            try:
                versions = yield Write(write.expect, write.put, is_leased=False, is_quiet=not is_last)
            except Conflict as conflict:
                lost += self._settle(write, conflict)
                partitions = [number for number in partitions if number in self.held]
                continue
            except OutcomeUnknown as unknown:
                self._settle(write, unknown)
                raise
            self._settle(write, versions)
            if is_last:
                self._release(partitions)
            break
        return lost

    def _release(self, partitions: list[int]) -> None:
        """The registry has confirmed the release: these are not owned any more."""
        for number in partitions:
            holding = self.held.pop(number)
            # By what was written: more may have been done since, which the next owner will do again.
            holding.lane.has_undone = holding.lane.handed > holding.checkpoint.offset
            holding.lane.lost_reason = RELEASED
            holding.lane.is_stopping = holding.lane.is_lost = True
            self.hooks.released(holding.lane)

    def commit_with(self, partitions: list[int], write: CommitMore) -> Steps[dict[str, int]]:
        """The checkpoints of what is done, fenced as ever, in a commit that `write` makes of them and of more.

        Raises PartitionLost if any of it is owned no more, and what `write` raises."""
        for number in partitions:
            if self.held[number].checkpoint_version is None and not (yield from self.read_again(number)):
                raise PartitionLost(self.keys.group, [number], TAKEN)
        planned = self.checkpoint_write(partitions)
        try:
            versions = write(planned.expect, planned.put)
        except Conflict as conflict:
            if lost := self._settle(planned, conflict):
                raise PartitionLost(self.keys.group, lost, TAKEN) from conflict
            raise
        except OutcomeUnknown as unknown:
            self._settle(planned, unknown)
            raise
        self._settle(planned, versions)
        return versions

    def pause(self, partition: int, paused: Paused) -> Steps[bool]:
        """Write that a message could not be handled. False if the partition turned out to be lost.

        The pause is written in one commit with a checkpoint that names the failure. If the reply is lost, call this
        again: the checkpoint then tells whether the first write landed. If it has not, it never will once this one is
        written, as both expect the same version of the checkpoint. So an administrator who has removed the pause in
        between, to have the message tried again, does not see it come back."""
        place = self.member.topic, partition
        key = self.keys.pause(*place)
        for _ in range(PAUSE_ATTEMPTS_MAX):
            holding = self.held.get(partition)
            if holding is None:
                return False
            if holding.checkpoint_version is None and not (yield from self.read_again(partition)):
                return False
            if holding.checkpoint.failure == paused.failure:
                return True
            there: Entry | None = yield Get(key)
            if there is not None and Paused.load(key, there.value).offset == paused.offset:
                return True  # it stands already, and an administrator may have decided on it
            planned = self.checkpoint_write([partition], failure=paused.failure)
            expect = {**planned.expect, key: ABSENT if there is None else there.version}
            try:
                versions = yield Write(expect, {**planned.put, key: paused.dump()}, is_leased=False)
            except Conflict as conflict:
                self._settle(planned, conflict)
                continue
            except OutcomeUnknown as unknown:
                self._settle(planned, unknown)
                raise
            self._settle(planned, versions)
            return True
        raise RegistryUnavailable(f"{key} was changed by others {PAUSE_ATTEMPTS_MAX} times; try again")

    def checkpoint_write(
        self, partitions: Iterable[int], *, is_last: bool = False, failure: str | None = None
    ) -> FencedWrite:
        """The checkpoints of what is done, as a value: see `Holding.write`. Their versions must be known."""
        topic, when, name = self.member.topic, self.wall(), self.member.name
        holdings = [self.held[number] for number in partitions]
        return FencedWrite(
            [each.write(self.keys, topic, when, name, is_last=is_last, failure=failure) for each in holdings]
        )

    def _settle(self, write: FencedWrite, outcome: Mapping[str, int] | Conflict | OutcomeUnknown) -> list[int]:
        """Note what a commit of this write has returned or raised. The partitions that turned out to be lost."""
        lost = []
        for part, settled in write.settle(outcome):
            _, number = part.partition
            self.held[number].settle(part, settled)
            if settled.outcome is Outcome.LOST:
                self.lose(number)
                lost.append(number)
        return lost

    def read_again(self, partition: int) -> Steps[bool]:
        """Read a checkpoint and its version again, because a write of this member may have been applied late. False if
        the partition turned out to be lost."""
        holding = self.held[partition]
        owner: Entry | None = yield Get(self.keys.owner(self.member.topic, partition))
        if owner is None or owner.version != holding.version:
            self.lose(partition)
            return False
        entry: Entry | None = yield Get(self.keys.checkpoint(self.member.topic, partition))
        if entry is None:
            self.lose(partition)
            return False
        holding.checkpoint, holding.checkpoint_version = Checkpoint.load(entry.key, entry.value), entry.version
        return True


P = TypeVar("P")


def _in_parts(items: Sequence[P], size: int) -> list[Sequence[P]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
