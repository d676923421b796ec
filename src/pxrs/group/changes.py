"""The commits by which an administrator changes a group's checkpoints: see `group/admin.py` for what they promise."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pxrs.group.checkpoints import CheckpointWrite, FencedWrite
from pxrs.group.records import Checkpoint, Gate, Keys, Owner, Starts, Target, gate_key, start_key
from pxrs.group.snapshot import GroupState
from pxrs.log.numbering import TopicPartition
from pxrs.registry.contract import ABSENT, Limits


@dataclass(slots=True)
class Guard:
    """What every commit of a change expects beside the partitions that it changes, and writes with them."""

    keys: Keys
    expect: dict[str, int] = field(default_factory=dict)
    put: dict[str, bytes] = field(default_factory=dict)
    starts: dict[str, Starts] = field(default_factory=dict)
    """The starts of the topics with `keep_unread`, by the id of the topic."""
    versions: dict[str, int] = field(default_factory=dict)
    """The versions of the keys of `starts`, by the id of the topic."""
    ungated: set[str] = field(default_factory=set)
    """The ids of the topics without `keep_unread` that have no gate: a commit of theirs expects that they have none, so
    that it fails if the topic was given that setting, and retention has begun to ask the groups."""
    owners: dict[TopicPartition, str | None] = field(default_factory=dict)
    """The owner of each partition, as read."""
    members: Collection[str] = ()
    """The incarnations that were found. Those of an earlier version have no targets; they watch all owner keys."""
    targets: dict[str, tuple[Target, int]] = field(default_factory=dict)
    """The targets of the members that are there, as the next commit writes them, and the versions that it expects."""
    dumped: dict[str, bytes] = field(default_factory=dict)
    """The values of `targets` that were needed so far: that of a member with many partitions is large."""

    def take(self, state: GroupState) -> None:
        """Note the members, the owners of partitions, and the targets of members: a commit that takes a partition from
        a member raises `taken` in its target."""
        self.members = frozenset(state.members)
        self.owners = {partition: owner.incarnation for partition, (owner, _) in state.owners.items()}
        there = {name: each for name, each in state.targets.items() if name in state.members}
        self.targets = {name: (_raised(target), version) for name, (target, version) in there.items()}
        self.dumped.clear()

    def merged(self, writes: Sequence[CheckpointWrite]) -> tuple[dict[str, int], dict[str, bytes], list[str]]:
        """What one commit of these checkpoints expects, puts and deletes. The commit also removes the pauses of the
        partitions, and raises `taken` in the targets of the members that lose one.

        An owner that was not found among the members must be gone: the commit expects that its key is absent, as a
        claim does (G1). A scan is no picture of one moment (R1): the owner may have joined and claimed while the group
        was read. Its target would not be raised, it would not look at its owner keys, and the partition would stay
        without an owner."""
        expect, put = self.of(sorted({write.partition[0] for write in writes}))
        for write in writes:
            owner = self.owners.get(write.partition)
            if owner is not None and owner not in self.members:
                expect[self.keys.member(owner)] = ABSENT
        for name in self._owners_of(writes):
            target, expect[self.keys.target(name)] = self.targets[name]
            if name not in self.dumped:
                self.dumped[name] = target.dump()
            put[self.keys.target(name)] = self.dumped[name]
        fenced = FencedWrite(writes)
        pauses = [self.keys.pause(*write.partition) for write in writes]
        return {**expect, **fenced.expect}, {**put, **fenced.put}, [*fenced.delete, *pauses]

    def committed(self, writes: Sequence[CheckpointWrite], versions: Mapping[str, int]) -> None:
        """Note the new versions after a commit: the next commit expects them."""
        self.expect |= {key: versions[key] for key in self.put}
        for name in self._owners_of(writes):
            target, _ = self.targets[name]
            self.targets[name] = _raised(target), versions[self.keys.target(name)]
            self.dumped.pop(name, None)

    def _owners_of(self, writes: Iterable[CheckpointWrite]) -> list[str]:
        """The members that are there and own one of these partitions."""
        owners = {self.owners.get(write.partition) for write in writes}
        return sorted(owner for owner in owners if owner is not None and owner in self.targets)

    def of(self, topics: Iterable[str]) -> tuple[dict[str, int], dict[str, bytes]]:
        """What a commit that changes partitions of these topics expects and puts besides."""
        chosen = list(topics)
        kept = [topic for topic in chosen if topic in self.starts]
        expect = {start_key(topic): self.versions[topic] for topic in kept}
        expect |= {gate_key(topic): ABSENT for topic in chosen if topic in self.ungated}
        put = {gate_key(topic): Gate("admin", time.time()).dump() for topic in kept}
        return {**self.expect, **expect}, {**self.put, **put}


def _raised(target: Target) -> Target:
    """The target with `taken` raised, so that the member notices that a partition was taken from it."""
    return replace(target, taken=target.taken + 1)


def write_of(keys: Keys, state: GroupState, partition: TopicPartition, offset: int | None, by: str) -> CheckpointWrite:
    """The checkpoint at this offset, or none, with the owner key free and under a new epoch (G5)."""
    owner, owner_version = state.owner(partition)
    _, version = state.checkpoints.get(partition, (None, ABSENT))
    free = Owner(None, owner.epoch + 1, past=owner.history())
    checkpoint = None if offset is None else Checkpoint(offset, time.time(), by, free.epoch)
    return CheckpointWrite(keys, partition, owner_version, version, checkpoint, free)


def in_commits(
    writes: Sequence[CheckpointWrite], guard: Guard, limits: Limits, count_max: int | None
) -> Iterator[list[CheckpointWrite]]:
    """The writes in parts, each as large as one commit may hold, and of at most `count_max`."""
    part: list[CheckpointWrite] = []
    keys: set[str] = set()
    size = 0
    for write in writes:
        expect, put, delete = guard.merged([write])
        named = {*expect, *put, *delete}
        more = named - keys
        grown = size + sum(len(key) + len(put.get(key, b"")) for key in more)
        is_full = len(keys) + len(more) > limits.commit_keys_max or grown > limits.commit_bytes_max
        if part and (is_full or len(part) == count_max):
            yield part
            part, keys = [], set()
            grown = sum(len(key) + len(put.get(key, b"")) for key in named)
        part.append(write)
        keys |= named
        size = grown
    if part:
        yield part
