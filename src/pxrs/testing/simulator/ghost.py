"""What has really happened in a schedule (ghost state, as in program verification), and the rules of the protocol.

The ghost receives every write that the store accepts, every message that is handed out or finished, and every lane that
a member is given. It relies on no key and no version, only on the order of these events. Each rule is named after the
requirement that it checks, such as "X9 stale epoch"; `Violation.rule` has the name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from pxrs.group.lane import Lane
from pxrs.group.records import (
    BY_HAND,
    NOBODY,
    Checkpoint,
    Keys,
    Leader,
    Member,
    Owner,
    Paused,
    ReadTopic,
    Starts,
    Target,
    partition_of,
)
from pxrs.log.numbering import TopicPartition
from pxrs.registry.steps import Write
from pxrs.testing.simulator.store import Request, SimulatedStore

ADMIN: Final = "admin"
"""The sender of requests that reset checkpoints."""
RETENTION: Final = "retention"
"""The sender of requests that move a topic's start."""


class Violation(AssertionError):
    """A rule was broken. `rule` is its name. Running the same seed again breaks it again."""

    def __init__(self, rule: str, message: str) -> None:
        self.rule, self.message = rule, message
        super().__init__(f"{rule}: {message}")


class Ghost:
    """The facts of one schedule. Its methods raise Violation."""

    def __init__(self, keys: Keys, store: SimulatedStore) -> None:
        self.keys, self.store = keys, store
        self.owners: dict[TopicPartition, Owner] = {}
        """The owner that was written last."""
        self.checkpoints: dict[TopicPartition, int] = {}
        """The offset that was written last."""
        self.at_claim: dict[tuple[TopicPartition, int], int | None] = {}
        """The checkpoint at the moment of each claim, by epoch; None if there was none."""
        self.leader: Leader | None = None
        """The leader that was written last."""
        self.targets: dict[str, Target] = {}
        """By incarnation: the target that was written last."""
        self.taken: set[tuple[TopicPartition, int]] = set()
        """Partitions and epochs that a fence or a reset has taken from a living owner, which may not know it yet."""
        self.start: dict[TopicPartition, int] = {}
        """The start that retention has written last: messages before it may be removed."""
        self.end: dict[TopicPartition, int] = {}
        """The offset that the next message of the partition gets."""
        self.end_at_first_join: dict[TopicPartition, int] = {}
        """`end` when the first member had joined: the group must read every message from there on."""
        self.finished: dict[TopicPartition, set[int]] = {}
        """Offsets that a handler has finished, and no reset has asked for again."""
        self.next_out: dict[tuple[TopicPartition, int], int] = {}
        """By partition and epoch: the offset that must be handed out next."""
        self.failures: set[str] = set()
        """Failures whose pause was written. An administrator may have deleted the pause since."""
        self.is_calm = False
        """No member is slow and nothing fails, so that no partition may be fenced."""
        self.claims = self.commits = self.fences = self.handed = self.moves = 0

    # What the store accepts.

    def accepted(self, request: Request, write: Write) -> None:
        """The store accepts this write, and applies it next. Checkpoints are looked at before owners: the commit that
        releases a partition writes both."""
        for key, value in {**write.put, **write.ephemeral}.items():
            if key.startswith(self.keys.checkpoints):
                self._checkpoint(request, partition_of(key), Checkpoint.load(key, value))
        for key in write.delete:
            if key.startswith(self.keys.targets):
                self._target_deleted(request, key.removeprefix(self.keys.targets))
        for key, value in {**write.put, **write.ephemeral}.items():
            if key.startswith(self.keys.owners):
                self._owner(request, write, partition_of(key), Owner.load(key, value))
            elif key.startswith(self.keys.paused):
                self._paused(request, partition_of(key), Paused.load(key, value))
            elif key == self.keys.leader:
                self._leader(request, Leader.load(key, value))
            elif key.startswith(self.keys.targets):
                self._target(request, key.removeprefix(self.keys.targets), Target.load(key, value))
            elif key.startswith(self.keys.members):
                self._member(key, Member.load(key, value))
            elif key.startswith("topics/") and key.endswith("/start"):
                self._start(key.split("/")[1], Starts.load(key, value))

    def _member(self, key: str, member: Member) -> None:
        for entry in self.store.state.scan(self.keys.members, None, None):
            other = Member.load(entry.key, entry.value)
            if other.assignor != member.assignor:
                raise Violation("F7 one assignor", f"{key} joined with {member.assignor}, and {other} is there")

    def _start(self, topic: str, starts: Starts) -> None:
        for number, start in starts.offsets.items():
            place = (topic, int(number))
            if start < self.start.get(place, 0):
                raise Violation("O10 starts rise", f"{place} went from {self.start[place]} to {start}")
            if start > self.checkpoints.get(place, start):
                raise Violation(
                    "O10 unread is kept", f"{place} begins at {start}, and the group is at {self.checkpoints[place]}"
                )
            self.start[place] = start
        self.moves += 1

    def _checkpoint(self, request: Request, place: TopicPartition, checkpoint: Checkpoint) -> None:
        before = self.checkpoints.get(place)
        if checkpoint.offset < self.start.get(place, 0):
            raise Violation(
                "O10 unread is kept", f"{place} begins at {self.start[place]}, and was put to {checkpoint.offset}"
            )
        if checkpoint.by == "start":
            if before is not None:
                raise Violation("G6 pinned once", f"{place} had {before} and was pinned at {checkpoint.offset}")
            self._not_skipped(place, checkpoint.offset)
        elif request.incarnation == ADMIN:
            # Messages from the new checkpoint on must be handed out and finished again.
            finished = self.finished.setdefault(place, set())
            self.finished[place] = {offset for offset in finished if offset < checkpoint.offset}
        else:
            self.commits += 1
            owner = self.owners.get(place, NOBODY)
            epoch = owner.epoch if checkpoint.by in BY_HAND else checkpoint.epoch
            if (owner.incarnation, owner.epoch) != (request.incarnation, epoch):
                raise Violation(
                    "X9 stale epoch",
                    f"{request.incarnation} committed {checkpoint.offset} of {place} under epoch {checkpoint.epoch}, "
                    f"which {owner.incarnation} has under {owner.epoch}",
                )
            if before is not None and checkpoint.offset < before:
                raise Violation("X10 never back", f"{place} went from {before} to {checkpoint.offset}")
            first = before if before is not None else self.end_at_first_join.get(place, checkpoint.offset)
            finished = self.finished.setdefault(place, set())
            missing = [offset for offset in range(first, checkpoint.offset) if offset not in finished]
            if missing:
                raise Violation(
                    "X11 nothing lost", f"{place} is at {checkpoint.offset}, and nobody has finished {missing}"
                )
        self.checkpoints[place] = checkpoint.offset

    def _not_skipped(self, place: TopicPartition, offset: int) -> None:
        if offset > self.end_at_first_join.get(place, offset):
            end = self.end_at_first_join[place]
            raise Violation("G6 start pinned", f"{place} begins at {offset}, and ended at {end} at the first join")

    def _owner(self, request: Request, write: Write, place: TopicPartition, owner: Owner) -> None:
        before = self.owners.get(place, NOBODY)
        if owner.epoch <= before.epoch:
            raise Violation("X9 epochs rise", f"{place} went from {before} to {owner}")
        if owner.incarnation is not None:
            self._claimed(request, place, before, owner)
        elif before.incarnation != request.incarnation or self.keys.checkpoint(*place) not in write.put:
            self._fenced(request, write, place, before)  # a leader may also fence a partition of its own
        self.owners[place] = owner

    def _claimed(self, request: Request, place: TopicPartition, before: Owner, owner: Owner) -> None:
        self.claims += 1
        if owner.incarnation != request.incarnation:
            raise Violation("X3 claims for itself", f"{request.incarnation} made {owner.incarnation} own {place}")
        if before.incarnation not in (None, owner.incarnation) and self._is_member(before.incarnation):
            raise Violation("X6 release, then claim", f"{owner.incarnation} claimed {place} from living {before}")
        if not self._reads(owner.incarnation, place[0]):
            raise Violation("X4 only what is read", f"{owner.incarnation} claimed {place}, and does not read it")
        if not self._is_meant(place, owner.incarnation):
            raise Violation("G2 claims by its target", f"{owner.incarnation} claimed {place}, and should not have it")
        self.at_claim[place, owner.epoch] = self.checkpoints.get(place)

    def _reads(self, incarnation: str, topic: str) -> bool:
        entry = self.store.state.get(self.keys.member(incarnation))
        return entry is None or topic in Member.load(entry.key, entry.value).topics

    def _is_meant(self, place: TopicPartition, incarnation: str) -> bool:
        return place[1] in self.targets.get(incarnation, Target()).numbers(place[0])

    def _paused(self, request: Request, place: TopicPartition, paused: Paused) -> None:
        owner = self.owners.get(place, NOBODY)
        if owner.incarnation != request.incarnation:
            raise Violation("X9 stale epoch", f"{request.incarnation} paused {place}, which {owner} has")
        if paused.failure in self.failures:
            raise Violation("X14 paused once", f"{place}: the pause of {paused.failure} was written again")
        self.failures.add(paused.failure)

    def _fenced(self, request: Request, write: Write, place: TopicPartition, before: Owner) -> None:
        self.taken.add((place, before.epoch))
        if request.incarnation == ADMIN:
            return
        self.fences += 1
        if self.keys.target(before.incarnation or "") not in write.put:
            raise Violation("X8 the owner is told", f"{place} was taken from {before}, and its target left as it is")
        if self.leader is None or self.leader.incarnation != request.incarnation:
            raise Violation("G2 leader", f"{request.incarnation} fenced {place}, and {self.leader} leads")
        if before.incarnation is not None and self._is_meant(place, before.incarnation):
            raise Violation("X8 fences what is asked for", f"{place} was taken from {before}, for whom it is meant")
        if self.is_calm:
            raise Violation("X7 nothing fenced", f"{place} had to be taken from {before}, and nobody was slow")

    def _leader(self, request: Request, leader: Leader) -> None:
        before = self.leader
        if before is not None and leader.term <= before.term:
            raise Violation("G2 terms rise", f"{leader} after {before}")
        if before is not None and before.incarnation != leader.incarnation and self._is_member(before.incarnation):
            raise Violation("G2 leader", f"{leader} took the lead from living {before}")
        self.leader = leader

    def _target(self, request: Request, incarnation: str, target: Target) -> None:
        before = self.targets.get(incarnation, Target())
        if request.incarnation == ADMIN and target == replace(before, taken=target.taken):
            pass
        elif self.leader is None or self.leader.incarnation != request.incarnation:
            raise Violation(
                "G2 leader", f"{request.incarnation} wrote the target of {incarnation}; {self.leader} leads"
            )
        if target.generation < before.generation or target.taken < before.taken:
            raise Violation("G2 generations rise", f"{target} of {incarnation} after {before}")
        if unread := [topic for topic in target.partitions if not self._reads(incarnation, topic)]:
            raise Violation("X4 only what is read", f"{incarnation} was given partitions of {unread}")
        self.targets[incarnation] = target

    def _target_deleted(self, request: Request, incarnation: str) -> None:
        if self._is_member(incarnation):
            raise Violation("G2 targets of the living stay", f"{request.incarnation} deleted that of {incarnation}")
        if self.leader is None or self.leader.incarnation != request.incarnation:
            raise Violation("G2 leader", f"{request.incarnation} deleted the target of {incarnation}")
        self.targets.pop(incarnation, None)

    def _is_member(self, incarnation: str | None) -> bool:
        return incarnation is not None and self.store.has(self.keys.member(incarnation))

    # What members do.

    def joined(self, topics: Iterable[ReadTopic]) -> None:
        """A member has joined: the start of every partition of the topics that it reads is written."""
        for place in ((topic.id, number) for topic in topics for number in range(topic.partitions)):
            if place not in self.checkpoints:
                raise Violation("G6 start pinned", f"a member that reads {place} has joined, and it has no checkpoint")
            self.end_at_first_join.setdefault(place, self.end.get(place, 0))
            if place in self.checkpoints:
                self._not_skipped(place, min(self.checkpoints[place], self.end_at_first_join[place]))

    def assigned(self, place: TopicPartition, epoch: int, offset: int) -> None:
        """A member begins to hand out a partition, from this offset on."""
        if (place, epoch) not in self.at_claim:
            raise Violation("X3 claimed, then owned", f"{place} is handed out under {epoch}, and nobody has claimed it")
        at_claim = self.at_claim[place, epoch]
        if self.owners[place].epoch != epoch:
            pass  # the member was slow to read the checkpoint, and does not own the partition any more
        elif at_claim is None:
            self._not_skipped(place, offset)
        elif offset != at_claim:
            raise Violation("G3 starts at the checkpoint", f"{place} was at {at_claim} and starts at {offset}")
        self.next_out[place, epoch] = offset

    def hand_out(self, place: TopicPartition, lane: Lane) -> None:
        """A member hands out the message at the lane's position."""
        self.handed += 1
        epoch, offset = lane.epoch, lane.position
        if offset != self.next_out[place, epoch]:
            raise Violation("X2 order", f"{place}: {offset} was handed out after {self.next_out[place, epoch] - 1}")
        self.next_out[place, epoch] = offset + 1
        if (place, epoch) not in self.taken and offset < self.checkpoints.get(place, 0):
            raise Violation("X11 nothing again", f"{place}: {offset} is below the checkpoint {self.checkpoints[place]}")

    def finish(self, place: TopicPartition, offset: int) -> None:
        """A handler has finished the message."""
        self.finished.setdefault(place, set()).add(offset)

    def check_owners(self, acting: Iterable[tuple[object, TopicPartition, Lane]]) -> None:
        """At most one member acts as the owner of a partition. A member from which the partition was taken does not
        count: it may not know that yet, and its commits are fenced.

        acting: which member acts as the owner of which partition."""
        seen: dict[TopicPartition, object] = {}
        for member, place, lane in acting:
            if (place, lane.epoch) in self.taken:
                continue
            if place in seen:
                raise Violation("X3 one owner", f"{place}: {seen[place]} and {member} act as its owner")
            seen[place] = member
