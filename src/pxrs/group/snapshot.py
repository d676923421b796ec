"""What the registry holds of a group, parsed: the one reader of a group's keys.

The members (`group/protocol.py`), the administrator (`group/admin.py`) and the readable files (`group/projection.py`)
read a group through `GroupState.of`. A state may be partial: it has what was among the entries that it was made of. It
is not one moment's picture, because a scan is not (R1): whoever acts on it expects the versions that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pxrs.group.records import (
    NOBODY,
    Checkpoint,
    Home,
    Keys,
    Leader,
    Member,
    Owner,
    Paused,
    SourceRead,
    Target,
    partition_of,
)
from pxrs.log.numbering import TopicPartition
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Scan, Steps

GAP_MAX: Final = 16
"""How many entries that are not needed are read to save a call: a call costs about as much."""


@dataclass(slots=True)
class GroupState:
    """The records of a group, each with the version of its key where a commit may have to expect it."""

    members: dict[str, Member] = field(default_factory=dict)
    """By incarnation."""
    leader: tuple[Leader, int] | None = None
    targets: dict[str, tuple[Target, int]] = field(default_factory=dict)
    """By incarnation."""
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
        if key.startswith(keys.checkpoints):  # these and the owners first: most keys are such
            self.checkpoints[partition_of(key)] = Checkpoint.load(key, value), version
        elif key.startswith(keys.owners):
            self.owners[partition_of(key)] = Owner.load(key, value), version
        elif key == keys.leader:
            self.leader = Leader.load(key, value), version
        elif key.startswith(keys.targets):
            self.targets[key.removeprefix(keys.targets)] = Target.load(key, value), version
        elif key.startswith(keys.members):
            self.members[key.removeprefix(keys.members)] = Member.load(key, value)
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

    def target(self, incarnation: str) -> tuple[Target, int]:
        return self.targets.get(incarnation, (Target(), ABSENT))

    @property
    def generation(self) -> int:
        """The generation of the last rebalance."""
        return max((target.generation for target, _ in self.targets.values()), default=0)

    def meant_for(self) -> dict[TopicPartition, str]:
        """Which member that is there each partition is meant for. While the leader replaces the targets one after the
        other, a partition may be in two of them: then its owner counts, if it is one of the two."""
        meant: dict[TopicPartition, str] = {}
        for incarnation, (target, _) in sorted(self.targets.items()):
            if incarnation in self.members:
                for topic, numbers in target.partitions.items():
                    for partition in ((topic, number) for number in numbers):
                        if partition not in meant or self.owner(partition)[0].incarnation == incarnation:
                            meant[partition] = incarnation
        return meant

    def partitions(self) -> set[TopicPartition]:
        """The partitions that members read, or that have a checkpoint or a pause. A deleted group leaves owner keys
        behind, so an owner key alone does not count."""
        read = {topic for member in self.members.values() for topic in member.reads}
        return {*self.checkpoints, *self.paused, *((each.id, n) for each in read for n in range(each.partitions))}

    def topics_read(self) -> dict[str, str]:
        """The topics that members read, by id: the name that a member's record has."""
        return {topic.id: topic.name for member in self.members.values() for topic in member.reads}

    def only(self, topics: Collection[str] | None) -> GroupState:
        """What concerns the topics with these ids; everything if that is None."""
        if topics is None:
            return self
        return replace(
            self,
            members={name: member for name, member in self.members.items() if not member.topics.isdisjoint(topics)},
            owners={place: each for place, each in self.owners.items() if place[0] in topics},
            checkpoints={place: each for place, each in self.checkpoints.items() if place[0] in topics},
            paused={place: each for place, each in self.paused.items() if place[0] in topics},
            source_records={key: each for key, each in self.source_records.items() if each[0].id in topics},
        )

    def checkpoints_of(self, topic: str) -> dict[int, Checkpoint]:
        """The checkpoints of one topic or source, by partition."""
        return {number: each for (id, number), (each, _) in self.checkpoints.items() if id == topic}

    def offsets_by_topic(self) -> dict[str, dict[int, int]]:
        """The checkpoints of each topic or source that has any, by partition."""
        found: dict[str, dict[int, int]] = {}
        for (topic, number), (each, _) in self.checkpoints.items():
            found.setdefault(topic, {})[number] = each.offset
        return found

    def offsets(self, topic: str) -> dict[int, int]:
        return {number: each.offset for number, each in self.checkpoints_of(topic).items()}


def read_partitions(folder: str, numbers: Collection[int]) -> Steps[list[Entry]]:
    """The entries of these partitions in a folder of owners or checkpoints of one topic, those that are there.

    Partitions with at most `GAP_MAX` others between them are read by one scan. So what is read is bounded by what was
    asked for: at most `GAP_MAX` + 1 entries for each partition, and one call."""
    found: list[Entry] = []
    for first, last in _ranges(sorted(numbers)):
        if first == last:
            entry: Entry | None = yield Get(f"{folder}{first:05d}")
            found += [] if entry is None else [entry]
        else:
            after = None if first == 0 else f"{folder}{first - 1:05d}"
            found += yield Scan(folder, after, last - first + 1)
    wanted = set(numbers)
    return [entry for entry in found if partition_of(entry.key)[1] in wanted]


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of these ascending numbers, each with its first and its last."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number - runs[-1][1] <= GAP_MAX + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs
