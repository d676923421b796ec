"""What the registry holds of a group, parsed: the one reader of a group's keys.

The members (`group/protocol.py`), the administrator (`group/admin.py`) and the readable files (`group/projection.py`)
read a group through `GroupState.of`. A state may be partial: it has what was among the entries that it was made of. It
is not one moment's picture, because a scan is not (R1): whoever acts on it expects the versions that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from pxrs.group.records import (
    Assignment,
    Checkpoint,
    Home,
    Keys,
    Leader,
    Member,
    Owner,
    Paused,
    SourceRead,
    TopicPartition,
    partition_of,
)
from pxrs.registry.contract import ABSENT, Entry

NOBODY: Final = Owner(None, 0)
"""The owner of a partition that has no owner key, because no member has ever claimed it."""


@dataclass(slots=True)
class GroupState:
    """The records of a group, each with the version of its key where a commit may have to expect it."""

    members: dict[str, Member] = field(default_factory=dict)
    """By incarnation."""
    leader: tuple[Leader, int] | None = None
    assignment: tuple[Assignment, int] | None = None
    owners: dict[TopicPartition, tuple[Owner, int]] = field(default_factory=dict)
    checkpoints: dict[TopicPartition, tuple[Checkpoint, int]] = field(default_factory=dict)
    paused: dict[TopicPartition, tuple[Paused, int]] = field(default_factory=dict)
    source_records: dict[str, tuple[SourceRead, int]] = field(default_factory=dict)
    """By registry key: what the group has on record of each source that it reads and that is no topic of a hub. Records
    of forgotten sources, whose id is empty, are left out."""
    home: Home = field(default_factory=Home)
    """The hub whose topics the group reads."""

    @classmethod
    def of(cls, keys: Keys, entries: Iterable[Entry]) -> GroupState:
        """Raises RegistryCorrupt if a value cannot be read. Keys that it does not know are left out."""
        state = cls()
        for entry in entries:
            state.add(keys, entry)
        return state

    def add(self, keys: Keys, entry: Entry) -> None:
        key, value, version = entry.key, entry.value, entry.version
        if key == keys.leader:
            self.leader = Leader.load(key, value), version
        elif key == keys.assignment:
            self.assignment = Assignment.load(key, value), version
        elif key.startswith(keys.members):
            self.members[key.removeprefix(keys.members)] = Member.load(key, value)
        elif key.startswith(keys.owners):
            self.owners[partition_of(key)] = Owner.load(key, value), version
        elif key.startswith(keys.checkpoints):
            self.checkpoints[partition_of(key)] = Checkpoint.load(key, value), version
        elif key.startswith(keys.paused):
            self.paused[partition_of(key)] = Paused.load(key, value), version
        elif key.startswith(keys.sources):
            read = SourceRead.load(key, value)
            if read.id:
                self.source_records[key] = read, version
        elif key == keys.home:
            self.home = Home.load(key, value)

    @property
    def sources(self) -> dict[str, SourceRead]:
        """The records of `source_records` by the id of the source."""
        return {read.id: read for read, _ in self.source_records.values()}

    @property
    def is_there(self) -> bool:
        """Whether the group exists. A deleted group leaves its leader key and its owner keys behind (R4)."""
        return bool(self.members or self.checkpoints)

    def owner(self, partition: TopicPartition) -> tuple[Owner, int]:
        return self.owners.get(partition, (NOBODY, ABSENT))

    def partitions(self) -> set[TopicPartition]:
        """The partitions that members read, or that have a checkpoint or a pause. A deleted group leaves owner keys
        behind, so an owner key alone does not count."""
        read = {(member.topic, number) for member in self.members.values() for number in range(member.partitions)}
        return {*self.checkpoints, *self.paused, *read}

    def only(self, topics: Collection[str] | None) -> GroupState:
        """What concerns the topics with these ids; everything if that is None."""
        if topics is None:
            return self
        return replace(
            self,
            members={name: member for name, member in self.members.items() if member.topic in topics},
            owners={place: each for place, each in self.owners.items() if place[0] in topics},
            checkpoints={place: each for place, each in self.checkpoints.items() if place[0] in topics},
            paused={place: each for place, each in self.paused.items() if place[0] in topics},
            source_records={key: each for key, each in self.source_records.items() if each[0].id in topics},
        )

    def checkpoints_of(self, topic: str) -> dict[int, Checkpoint]:
        """The checkpoints of one topic or source, by partition."""
        return {number: each for (id, number), (each, _) in self.checkpoints.items() if id == topic}

    def offsets(self, topic: str) -> dict[int, int]:
        return {number: each.offset for number, each in self.checkpoints_of(topic).items()}
