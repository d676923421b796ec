"""How a member joins: it agrees with the others on an assignor and a hub, and the group's first checkpoints are
written.

Rules, each with a test or a mutation that fails without it:
- A member joins only by a commit that expects the key of the group's assignor in a version that names its own, and only
  if no member that may be there has another one: see `_agree`.
- The first checkpoint of every partition of every topic that the member reads is written before the join is over, so
  before anything is handed out (G6). One member does it for a topic, the others wait for it: see `pin`.
- For a topic with `keep_unread`, a start is written only if retention has not moved `topics/<id>/start` since it
  was read, and the same commit writes `topics/<id>/gate`, which retention expects (O10).
- A source that is no topic of a hub is read under one id, whatever its address: the first checkpoints are written
  in one commit with `groups/<group>/sources/...`, which names the id, expecting its version (see `foreign.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pxrs.errors import AssignorMismatch, Conflict, GroupActive, GroupElsewhere, RegistryUnavailable
from pxrs.group.foreign import Foreign, changed, check_meaning, former_reads
from pxrs.group.incarnation import ATTEMPTS_MAX, Incarnation
from pxrs.group.records import (
    Checkpoint,
    ChosenAssignor,
    Gate,
    Home,
    Member,
    Pinned,
    ReadTopic,
    SourceRead,
    Starts,
    gate_key,
    partition_of,
    start_key,
)
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Scan, Steps, Write

PIN_KEYS: Final = 3
"""How many keys a commit of starts names at most besides the checkpoints: for a topic those of the group's hub, the
topic's `start` and its gate; for a source that is no topic, the key of its record."""


class Joining(Incarnation):
    def join(self) -> Steps[bool]:
        """Write this member's key, and every partition's start. False if another member is writing the starts: then the
        join is over when `pin` has returned True.

        Raises GroupElsewhere if the group reads the topics of another hub, AssignorMismatch if members that are there
        have another assignor, and GroupActive if members that are there cannot share the group with this one."""
        key = self.keys.member(self.incarnation)
        for attempt in range(ATTEMPTS_MAX):
            expect, put = {key: ABSENT}, {}
            if self.home is not None:
                is_ours, version = yield from self._read_home(self.home)
                # Only expected, not written: members that join at the same time must not make each other fail.
                expect[self.keys.home] = version
                if not is_ours:
                    put[self.keys.home] = self.home.dump()
            is_agreed, expect[self.keys.assignor] = yield from self._agree()
            if not is_agreed:
                is_shared = not self.member.is_alone and not self.meets_alone
                chosen = ChosenAssignor.of(self.member.assignor, is_agreed=is_shared)
                put[self.keys.assignor] = chosen.dump()
            try:
                yield Write(expect, put, ephemeral={key: self.member.dump()})
                break
            except Conflict as conflict:  # unless of this member's own key: another member joins just now
                if key in conflict.keys or attempt == ATTEMPTS_MAX - 1:
                    raise
        return (yield from self.pin())

    def _agree(self) -> Steps[tuple[bool, int]]:
        """Whether all members that are there have agreed on this member's assignor, and the version of the assignor key
        that the join must expect. If they have not, the join must also write the key.

        The key names an assignor, and says whether it is agreed. A member writes an agreed key only by its join, after
        it has read the key and then all members, and has found none with another assignor. A join of another member in
        between would have made that commit fail: a member that joins while the key is not agreed writes the key. So
        when an agreed key is written, all members have its assignor. As long as the key stays agreed, only members with
        this assignor join: a member with another one first writes the key as not agreed, and then reads all members.

        It must write the key before it reads the members, and not only with its join: a member that finds the key
        agreed does not write it, so a join that only expects the old version of the key would not notice that member.

        A member that must be alone (`Member.is_alone`) does the same as one with another assignor, and does not leave
        the key agreed, so that every other member reads all members before it joins. A member that reads other topics
        than that one may join, and does not leave the key agreed either: the next member may read the same
        topics as the member that must be alone."""
        key, mine = self.keys.assignor, self.member.assignor
        for _ in range(ATTEMPTS_MAX):
            entry: Entry | None = yield Get(key)
            chosen = ChosenAssignor() if entry is None else ChosenAssignor.load(key, entry.value)
            if entry is not None and chosen.names(mine) and chosen.is_agreed and not self.member.is_alone:
                return True, entry.version
            yield from self._check_members()
            may_join = chosen.names(mine) and not (chosen.is_agreed and self.member.is_alone)
            if entry is None or may_join:
                return False, ABSENT if entry is None else entry.version
            try:
                unagreed = ChosenAssignor.of(mine, is_agreed=False)
                yield Write({key: entry.version}, {key: unagreed.dump()}, is_quiet=True)
            except Conflict:
                continue
        raise RegistryUnavailable(f"{key} was changed by other processes {ATTEMPTS_MAX} times; try again")

    def _check_members(self) -> Steps[None]:
        """Raise AssignorMismatch if a member has another assignor, whatever topic it reads: any member may come to
        lead, the leader assigns the partitions of all topics, and it may not have the assignor of others installed. A
        record without an assignor goes with any.

        Raise GroupActive if a member is of another layout; or if it reads one of the same topics, and it or this one
        must be alone (K4)."""
        mine, others = self.member.assignor, {}
        self.meets_alone = False
        for entry in (yield Scan(self.keys.members)):
            if entry.key.rpartition("/")[2] in self.former:
                continue
            other = Member.load(entry.key, entry.value)
            self._check_company(other)
            self.meets_alone |= other.is_alone
            if other.assignor not in ("", mine):
                others[f"{other.name} on {other.host}"] = other.assignor
        if others and mine:
            raise AssignorMismatch(self.keys.group, mine, others)

    def _check_company(self, other: Member) -> None:
        group, named = self.keys.group, f"{other.name} on {other.host}"
        if not other.is_of_this_layout:
            raise GroupActive(
                f"member {named} of group {group} runs an earlier version of pxrs, which cannot share the group with "
                "this version: stop all members of the earlier version, then start this one; the group continues where "
                "they stopped"
            )
        if not other.topics & self.member.topics:
            return
        if other.is_alone:
            raise GroupActive(f"group {group} is used exclusively by {named}: stop it, or use another group")
        if self.member.is_alone:
            raise GroupActive(
                f"group {group} already has the member {named}, and this member does not share the "
                "group: stop it, use another group, or share the group"
            )

    def _read_home(self, ours: Home) -> Steps[tuple[bool, int]]:
        """Whether the group is recorded to read this member's hub, and the version of the key that says so.

        A group that has neither members nor checkpoints was deleted, or never existed: any hub may use its name. It is
        safe to read members and checkpoints one after the other: a commit that writes a checkpoint for the first time
        also writes this key, so that it refuses a commit which expects the key as it was read before."""
        entry: Entry | None = yield Get(self.keys.home)
        home = Home() if entry is None else Home.load(entry.key, entry.value)
        if home.hub not in ("", ours.hub):
            for prefix in (self.keys.members, self.keys.checkpoints):
                if (yield Scan(prefix, limit=1)):
                    raise GroupElsewhere(self.keys.group, home.place, ours.place)
        return home.hub == ours.hub, ABSENT if entry is None else entry.version

    @property
    def pin_keys(self) -> frozenset[str]:
        """The keys that a member watches while it waits for another one to write the starts."""
        waiting = self.member.topics - self.pinned
        return frozenset(key(topic) for topic in waiting for key in (self.keys.starts, self.keys.pinning))

    def pin(self, *, waits: bool = True) -> Steps[bool]:
        """Make sure that every partition has a checkpoint. False if another member is writing those of a topic.

        A member that joins a group with many partitions reads one key for each topic: `starts` counts the partitions
        that have one. If that is not enough, one member writes the rest, the one that has put the ephemeral key
        `pinning`. It would be safe without it, as every commit expects the checkpoints to be absent, but all members
        that start together would then refuse each other's commits. A member has at most one such key, that of the topic
        that it is writing, so members that read several topics cannot wait for each other in a circle.

        waits: False writes them although another member is writing them, because that takes too long."""
        for topic in self.member.reads:
            if topic.id not in self.pinned:
                if not (yield from self._pin_topic(topic, waits=waits)):
                    return False
                self.pinned.add(topic.id)
        return True

    def _pin_topic(self, topic: ReadTopic, *, waits: bool) -> Steps[bool]:
        starts, pinning = self.keys.starts(topic.id), self.keys.pinning(topic.id)
        for _ in range(ATTEMPTS_MAX):
            entry: Entry | None = yield Get(starts)
            pinned = Pinned() if entry is None else Pinned.load(starts, entry.value)
            # A source that is no topic is checked at every join: see `_read_foreign`.
            if pinned.partitions >= topic.partitions and topic.id not in self.foreign:
                return True
            if waits and not (yield from self._take_pinning(pinning)):
                return False
            yield from self._pin(topic)
            expect = {starts: ABSENT if entry is None else entry.version}
            done = Pinned(max(pinned.partitions, topic.partitions))
            try:
                yield Write(expect, {starts: done.dump()}, delete=[pinning] if waits else [])
                return True
            except Conflict:
                continue  # another member has counted them, or the group was deleted meanwhile
        raise RegistryUnavailable(f"{starts} was changed by other processes {ATTEMPTS_MAX} times; try again")

    def _take_pinning(self, key: str) -> Steps[bool]:
        entry: Entry | None = yield Get(key)
        if entry is None:
            try:
                yield Write({key: ABSENT}, ephemeral={key: self.incarnation.encode()})
                return True
            except Conflict:
                return False
        return entry.value == self.incarnation.encode()

    def _pin(self, topic: ReadTopic) -> Steps[None]:
        """Write the checkpoints of a topic that are missing, expecting them ABSENT."""
        foreign, conflicts = self.foreign.get(topic.id), 0
        while True:
            expect: dict[str, int] = {}
            put: dict[str, bytes] = {}
            if self.home is not None:
                _, expect[self.keys.home] = yield from self._read_home(self.home)
                put[self.keys.home] = self.home.dump()
            starts = Starts()
            if foreign is None:
                # Not by `keeps_unread` alone: the topic may have been given that setting since this member joined.
                gate: Entry | None = yield Get(gate_key(topic.id))
                if gate is None and topic.id not in self.keeps_unread:
                    expect[gate_key(topic.id)] = ABSENT
                else:
                    key = start_key(topic.id)
                    moved: Entry | None = yield Get(key)
                    starts = Starts() if moved is None else Starts.load(key, moved.value)
                    expect[key] = ABSENT if moved is None else moved.version
                    put[gate_key(topic.id)] = Gate(self.member.name, self.wall()).dump()
            found = yield Scan(self.keys.checkpoints_of(topic.id))
            there = {partition_of(entry.key)[1] for entry in found}
            missing = [number for number in range(topic.partitions) if number not in there]
            is_named = True
            if foreign is not None:
                is_named, expect[foreign.key] = yield from self._read_foreign(foreign, found)
                put[foreign.key] = foreign.read.dump()
            if not missing and is_named:
                return
            try:
                yield from self._pin_missing(topic.id, missing, starts, expect, put)
            except Conflict:  # another member has written some of them, or `start` has moved
                conflicts += 1
                if conflicts == ATTEMPTS_MAX:
                    raise

    def _pin_missing(
        self, topic: str, missing: list[int], starts: Starts, expect: dict[str, int], put: dict[str, bytes]
    ) -> Steps[None]:
        """Write the checkpoints of these partitions of a topic, as many in one commit as it can hold.

        expect, put: what each commit expects and writes beside the checkpoints."""
        size = max(1, self.keys_max - PIN_KEYS)
        for at in range(0, max(1, len(missing)), size):
            new = {
                self.keys.checkpoint(topic, number): Checkpoint(
                    self._start_of(topic, number, starts), self.wall(), "start"
                ).dump()
                for number in missing[at : at + size]
            }
            versions = yield Write({**expect, **dict.fromkeys(new, ABSENT)}, {**put, **new}, is_quiet=True)
            expect |= {key: versions[key] for key in expect if key in put}

    def _start_of(self, topic: str, partition: int, starts: Starts) -> int:
        number = self.numbering.number_of(topic, partition)
        assert number is not None, "the partition is one of a topic that this member reads"
        return self.start_of(number, starts.of(partition))

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
