"""A group seen from outside: what it does, and what an administrator may do to it.

Looking takes no lock and needs no member: it is one scan of the group's keys, then the log's ends (X17).

Changing goes through the fence. Whatever an administrator writes about a partition also writes its owner key, free and
with a new epoch, in the same commit and expecting its version (G5). So
- a checkpoint that the last owner still had on its way is refused, and cannot undo what was done here;
- the change itself, if its reply is lost and it lands late, is refused once anybody has owned the partition since;
- a member that lives finds that it has lost the partition, claims it again and starts at what was written.

Each partition is changed as a whole or not at all; several go together as far as one commit can hold them. If an error
ends a change half-way, run it again: each of them may be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, Protocol

import pyarrow as pa

from pxrs import arguments
from pxrs.errors import (
    Conflict,
    GroupActive,
    GroupError,
    InvalidGroup,
    OffsetOutOfRange,
    OffsetTrimmed,
    UnknownGroup,
    UnknownTopic,
)
from pxrs.group.projection import projection_of
from pxrs.group.reconcile import NOBODY, Place
from pxrs.group.records import GROUP_NAME, Assignment, Checkpoint, Keys, Leader, Member, Owner, Paused, partition_of
from pxrs.model import Topic, microseconds_of
from pxrs.registry.contract import ABSENT, Entry, Registry

ATTEMPTS_MAX: Final = 100
"""How often a change is tried again because the group has changed meanwhile."""
KEYS_EACH: Final = 3
"""A change of one partition names its owner, its checkpoint and its pause."""

To = Literal["earliest", "latest"] | int | datetime | Mapping[int, int]
_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("owner", pa.string()),
        pa.field("owner_name", pa.string()),
        pa.field("target", pa.string()),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("checkpoint", pa.int64()),
        pa.field("when", pa.timestamp("us", "UTC")),
        pa.field("by", pa.string()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("lag", pa.int64()),
        pa.field("paused_at", pa.int64()),
        pa.field("error", pa.string()),
    ]
)


class Offsets(Protocol):
    """What is needed of a topic. A `Source` has it, and so has a `TopicHandle`."""

    name: str
    id: str
    partitions: int
    has_gaps: bool

    def start(self, partition: int) -> int: ...

    def end(self, partition: int) -> int: ...

    def offset_at(self, partition: int, timestamp: int) -> int: ...


class Topics(Protocol):
    """Where topics are looked up. A `Hub` does, and so does a `Log`."""

    def topics(self) -> Sequence[Topic]: ...

    def topic(self, name: str) -> Offsets: ...


@dataclass(frozen=True, slots=True)
class MemberDescription:
    incarnation: str
    name: str
    host: str
    pid: int
    topic: str
    since: float
    """Wall-clock seconds of its own machine."""
    partitions: int
    """How many it owns."""


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    topic: str
    """Its name, or its id if nobody knows the name any more."""
    topic_id: str
    partition: int
    owner: str | None
    """The incarnation that has it; None if it is free."""
    owner_name: str | None
    is_owner_there: bool
    """False also if the owner is dead and nobody has claimed it since."""
    target: str | None
    """The incarnation that it is meant for."""
    epoch: int
    checkpoint: int | None
    """The offset of the next message to read."""
    when: float | None
    by: str | None
    start: int | None
    end: int | None
    lag: int | None
    """How many messages are there to be read; None if the topic or the checkpoint is not there."""
    paused: Paused | None
    """The message that holds the partition up, and why."""

    @property
    def error(self) -> str | None:
        return None if self.paused is None else self.paused.error


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """What a group was doing while it was looked at; not one moment's picture (R1)."""

    name: str
    generation: int
    """Of the assignment: it rises with every rebalance."""
    leader: str | None
    """An incarnation that is there."""
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]

    @property
    def lag(self) -> int:
        """Of all partitions whose lag is known."""
        return sum(row.lag or 0 for row in self.partitions)

    def to_arrow(self) -> pa.Table:
        """A row for each partition."""
        rows = [
            {
                **{name: getattr(row, name) for name in _SCHEMA.names if name not in ("when", "paused_at")},
                "when": None if row.when is None else round(row.when * 1e6),
                "paused_at": None if row.paused is None else row.paused.offset,
            }
            for row in self.partitions
        ]
        return pa.Table.from_pylist(rows, _SCHEMA)

    def __str__(self) -> str:
        return (
            f"group {self.name}: {len(self.members)} members, {len(self.partitions)} partitions, "
            f"generation {self.generation}, lag {self.lag:,}"
        )


@dataclass(slots=True)
class _State:
    """All that the registry holds of a group, with the versions."""

    members: dict[str, Member] = field(default_factory=dict)
    leader: tuple[Leader, int] | None = None
    assignment: tuple[Assignment, Entry] | None = None
    owners: dict[Place, tuple[Owner, int]] = field(default_factory=dict)
    checkpoints: dict[Place, tuple[Checkpoint, int]] = field(default_factory=dict)
    paused: dict[Place, tuple[Paused, int]] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """A leader and owners alone are what a deleted group leaves behind."""
        return bool(self.members or self.checkpoints)


@dataclass(frozen=True, slots=True)
class _Change:
    """Of one partition, to be committed alone or with others."""

    place: Place
    expect: dict[str, int]
    put: dict[str, bytes]
    delete: list[str]

    @property
    def size(self) -> int:
        names = {*self.expect, *self.put, *self.delete}
        return sum(map(len, names)) + sum(map(len, self.put.values()))


def groups(registry: Registry) -> list[str]:
    """The names of all groups that have members or checkpoints, in order."""
    found = []
    after = None
    # From one group's first key straight to the next group's: '0' is what follows '/', and the keys of a group may be
    # many.
    while entries := registry.scan("groups/", after, 1):
        name = entries[0].key.split("/")[1]
        after = f"groups/{name}0"
        if GROUP_NAME.fullmatch(name):
            keys = Keys(name)
            if registry.scan(keys.checkpoints, limit=1) or registry.scan(keys.members, limit=1):
                found.append(name)
    return sorted(found)


def unread(registry: Registry, topic: str) -> dict[int, int]:
    """Of a topic's partitions, by its id: the first offset that some group has yet to read."""
    found: dict[int, int] = {}
    for name in groups(registry):
        for entry in registry.scan(f"{Keys(name).checkpoints}{topic}/"):
            number = int(entry.key.rpartition("/")[2])
            offset = Checkpoint.load(entry.key, entry.value).offset
            found[number] = min(offset, found.get(number, offset))
    return found


class GroupHandle:
    """A group by name. It need not be there: what needs it to be raises UnknownGroup."""

    def __init__(self, registry: Registry, name: str, topics: Topics, sources: Iterable[Offsets] = ()) -> None:
        """sources: what the group reads beside the `topics`, such as somebody else's table."""
        self.name = name
        self._keys = Keys(name)
        self._registry, self._topics, self._sources = registry, topics, tuple(sources)
        self._hub: object = None
        """The hub that made this handle. It closes its log and registry with its last reference, which is here."""

    def describe(self) -> GroupDescription:
        """Who is there, who has what, how far it is. Raises UnknownGroup."""
        state = self._read()
        if not state.is_there:
            raise UnknownGroup(self.name)
        assignment = state.assignment[0] if state.assignment else Assignment(0)
        leader = state.leader[0].incarnation if state.leader else None
        names = self._names(state)
        # Read after the checkpoints: an end is never behind them.
        ranges = {topic: self._ranges(topic) for topic in {topic for topic, _ in _places(state)}}
        return GroupDescription(
            self.name,
            assignment.generation,
            leader if leader in state.members else None,
            tuple(
                MemberDescription(
                    incarnation,
                    member.name,
                    member.host,
                    member.pid,
                    names.get(member.topic, member.topic_name),
                    member.since,
                    sum(owner.incarnation == incarnation for owner, _ in state.owners.values()),
                )
                for incarnation, member in sorted(state.members.items(), key=lambda each: (each[1].since, each[0]))
            ),
            tuple(
                _describe(state, assignment, (topic, number), names.get(topic, topic), ranges[topic].get(number))
                for topic, number in sorted(_places(state), key=lambda place: (names.get(place[0], place[0]), place))
            ),
        )

    def reset(self, to: To, topic: str | None = None, force: bool = False) -> dict[str, dict[int, int]]:
        """Have the group go on elsewhere. The new offsets, by topic and partition.

        to:    "earliest", "latest", an offset for every partition, a time (the first message of that time or later),
               or offsets by partition; partitions that are not named stay where they are.
        topic: its name; by default every topic that the group reads and that is still there.
        force: also while members are there. They lose their partitions, claim them again and go on at the new offsets;
               what they have in hand is done all the same, and its checkpoint refused.

        A paused partition goes on too. Nothing is written if an offset is not in the log: OffsetOutOfRange,
        OffsetTrimmed. Raises UnknownGroup, UnknownTopic, GroupActive.
        """
        arguments.flag(InvalidGroup, "force", force)
        state = self._read()
        if not state.is_there:
            raise UnknownGroup(self.name)
        sources = [self._source(topic)] if topic is not None else self._read_sources(state)
        if len(sources) > 1 and not isinstance(to, str | datetime):
            raise InvalidGroup(
                f"group {self.name} reads {', '.join(source.name for source in sources)}: say of which the offsets are"
            )
        offsets = {source.id: _resolve(to, source) for source in sources}
        places = {(id, number): offset for id, of in offsets.items() for number, offset in of.items()}
        self._change(places, "reset", force=force)
        return {source.name: offsets[source.id] for source in sources}

    def import_checkpoint(self, offset: int | Mapping[int, int], topic: str, force: bool = False) -> dict[int, int]:
        """Start from the checkpoint that an old consumer had (X21). The offsets that were written, by partition.

        offset: of the next message to read. A single one is meant for every partition; in a partition that does not
                reach to it, or that begins behind it, it is the end or the start. One behind the end of all
                partitions is no offset of this topic: OffsetOutOfRange. Offsets by partition are taken as they are.
        force:  replace checkpoints that are there; without it they are left as they are.

        The group need not be there. Raises GroupActive while members are, whatever `force` says: see `reset`.
        """
        arguments.flag(InvalidGroup, "force", force)
        source = self._source(topic)
        if isinstance(offset, Mapping):
            offsets = _resolve(offset, source)
        else:
            offsets = _resolve_global(offset, source)
        places = {(source.id, number): each for number, each in offsets.items()}
        written = self._change(places, "import", replaces=force)
        return {number: each for number, each in offsets.items() if (source.id, number) in written}

    def delete(self, force: bool = False) -> None:
        """Forget the group: whoever consumes under its name later starts afresh.

        Its checkpoints, pauses and assignment are removed. Its owner keys and its leader key stay, free and with a new
        epoch and term: they are the guards of all other writes, and a guard that is deleted and made again may get an
        old version again (R4). So no write from before the deletion can pass after it, on any store: a checkpoint
        expects its owner's old version, an assignment its leader's, a claim and a start need a lease that lives, and
        what an administrator writes expects the owner too. A partition that nobody has owned gets its owner key now.

        force: also while members are there. They are sent away, join again as new members and start afresh; so is one
        that joins in just this moment. Raises UnknownGroup, GroupActive.
        """
        arguments.flag(InvalidGroup, "force", force)
        state = self._read()
        if not state.is_there:
            raise UnknownGroup(self.name)
        self._check_idle(state, force)
        owned = {place for place, (owner, _) in state.owners.items() if owner.incarnation is not None}
        self._change(dict.fromkeys(state.checkpoints.keys() | state.paused.keys() | owned), "delete", force=True)
        # Only now: a member that joined before the last checkpoint was removed may miss one, and must join again. One
        # that joins after this look has seen all of them gone.
        state = self._read()
        members = [self._keys.member(incarnation) for incarnation in state.members]
        size = self._registry.limits.commit_keys_max
        for at in range(0, len(members), size):
            self._registry.commit(delete=members[at : at + size])
        self._retire_leader(state)
        self._project()

    def retry(self, topic: str, partition: int) -> None:
        """Have a paused partition try its message again. Raises GroupError if it is not paused."""
        for _ in range(ATTEMPTS_MAX):
            key, _, version = self._pause(topic, partition)
            try:
                self._registry.commit({key: version}, delete=[key])
                return
            except Conflict:  # another message, or somebody else's decision
                continue
        raise self._too_lively()

    def skip(self, topic: str, partition: int, offset: int | None = None) -> int:
        """Have a paused partition go on behind its message, whose offset is returned.

        offset: only if it is this message. Raises GroupError if it is another one, or if nothing is paused.
        """
        offset = None if offset is None else arguments.whole(InvalidGroup, "offset", offset, 0)
        key, paused, version = self._pause(topic, partition)
        is_other = offset is not None and paused.offset != offset
        if not is_other and not paused.skip:
            order = Paused(paused.offset, paused.error, paused.when, paused.by, skip=True)
            try:
                self._registry.commit({key: version}, {key: order.dump()})
            except Conflict:  # never another message than the one that was seen
                is_other = True
        if is_other:
            raise GroupError(f"group {self.name}: another message holds up {topic}/{partition} now; look again")
        return paused.offset

    def paused(self, topic: str, partition: int) -> Paused:
        """The message that holds a partition up, and why. Raises GroupError if none does."""
        return self._pause(topic, partition)[1]

    # What is there.

    def _read(self) -> _State:
        state, keys = _State(), self._keys
        for entry in self._registry.scan(keys.root):
            key, value, version = entry.key, entry.value, entry.version
            if key == keys.leader:
                state.leader = Leader.load(key, value), version
            elif key == keys.assignment:
                state.assignment = Assignment.load(key, value), entry
            elif key.startswith(keys.members):
                state.members[key.removeprefix(keys.members)] = Member.load(key, value)
            elif key.startswith(keys.owners):
                state.owners[partition_of(key)] = Owner.load(key, value), version
            elif key.startswith(keys.checkpoints):
                state.checkpoints[partition_of(key)] = Checkpoint.load(key, value), version
            elif key.startswith(keys.paused):
                state.paused[partition_of(key)] = Paused.load(key, value), version
        return state

    def _names(self, state: _State) -> dict[str, str]:
        """Of topics by id, also of those that only a member still knows."""
        names = {member.topic: member.topic_name for member in state.members.values()}
        names |= {source.id: source.name for source in self._sources}
        return names | {topic.id: topic.name for topic in self._topics.topics()}

    def _find(self, id: str) -> Offsets | None:
        for source in self._sources:
            if source.id == id:
                return source
        for topic in self._topics.topics():
            if topic.id == id:
                try:
                    found = self._topics.topic(topic.name)
                except UnknownTopic:  # deleted just now
                    return None
                return found if found.id == id else None
        return None

    def _ranges(self, id: str) -> dict[int, tuple[int, int]]:
        """The start and end of each partition; none of a topic that is gone."""
        try:
            source = self._find(id)
            if source is None:
                return {}
            return {number: (source.start(number), source.end(number)) for number in range(source.partitions)}
        except UnknownTopic:
            return {}

    def _source(self, name: str) -> Offsets:
        arguments.text(InvalidGroup, "topic", name, "its name")
        found = [source for source in self._sources if name in (source.name, source.id)]
        return found[0] if found else self._topics.topic(name)

    def _read_sources(self, state: _State) -> list[Offsets]:
        """What the group reads and what is still there."""
        ids = sorted({id for id, _ in _places(state)} | {member.topic for member in state.members.values()})
        sources = [source for id in ids if (source := self._find(id)) is not None]
        if not sources:
            raise GroupError(f"group {self.name} reads no topic that is still there; name one, or delete the group")
        return sorted(sources, key=lambda source: source.name)

    def _pause(self, topic: str, partition: int) -> tuple[str, Paused, int]:
        arguments.text(InvalidGroup, "topic", topic, "its name")
        partition = arguments.whole(InvalidGroup, "partition", partition, 0)
        state = self._read()
        if not state.is_there:
            raise UnknownGroup(self.name)
        ids = [id for id, name in self._names(state).items() if name == topic] or [topic]
        for id in ids:  # a deleted topic's name may be another one's now
            if (id, partition) in state.paused:
                return self._keys.pause(id, partition), *state.paused[id, partition]
        raise GroupError(
            f"group {self.name} has not paused partition {partition} of {topic}: there is nothing to decide"
        )

    def _check_idle(self, state: _State, force: bool) -> None:
        if state.members and not force:
            names = sorted(member.name for member in state.members.values())
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise GroupActive(f"group {self.name} has members: {some}; stop them first, or force it")

    def _too_lively(self) -> GroupActive:
        return GroupActive(f"group {self.name} changes faster than it can be written to; stop its members first")

    # What is done to it.

    def _change(
        self, offsets: Mapping[Place, int | None], by: str, *, force: bool = False, replaces: bool = True
    ) -> set[Place]:
        """Write these checkpoints, remove those that are None, and bump the owners. The places that were written.

        replaces: False leaves those that are there."""
        todo, written = dict(offsets), set[Place]()
        for attempt in range(ATTEMPTS_MAX):
            state = self._read()
            self._check_idle(state, force)
            if not replaces:
                todo = {place: offset for place, offset in todo.items() if place not in state.checkpoints}
            changes = [self._change_of(state, place, offset, by) for place, offset in todo.items()]
            # Together at first; where somebody else was faster on one of them, each by itself.
            for some in self._parts(changes, None if attempt == 0 else 1):
                if self._commit(some):
                    written |= {change.place for change in some}
            todo = {place: offset for place, offset in todo.items() if place not in written}
            if not todo:
                if state.members:
                    self._call()
                else:
                    self._project()
                return written
        raise self._too_lively()

    def _change_of(self, state: _State, place: Place, offset: int | None, by: str) -> _Change:
        owner_key, checkpoint_key = self._keys.owner(*place), self._keys.checkpoint(*place)
        owner, owner_version = state.owners.get(place, (NOBODY, ABSENT))
        _, version = state.checkpoints.get(place, (None, ABSENT))
        free = Owner(None, owner.epoch + 1)
        put, delete = {owner_key: free.dump()}, [self._keys.pause(*place)]
        if offset is None:
            delete.append(checkpoint_key)
        else:
            put[checkpoint_key] = Checkpoint(offset, time.time(), by, free.epoch).dump()
        return _Change(place, {owner_key: owner_version, checkpoint_key: version}, put, delete)

    def _parts(self, changes: Sequence[_Change], count_max: int | None) -> Iterator[list[_Change]]:
        """As many together as one commit may hold."""
        limits = self._registry.limits
        count_max = count_max or max(1, limits.commit_keys_max // KEYS_EACH)
        part: list[_Change] = []
        size = 0
        for change in changes:
            if part and (len(part) == count_max or size + change.size > limits.commit_bytes_max):
                yield part
                part, size = [], 0
            part.append(change)
            size += change.size
        if part:
            yield part

    def _commit(self, changes: Sequence[_Change]) -> bool:
        expect = {key: version for change in changes for key, version in change.expect.items()}
        put = {key: value for change in changes for key, value in change.put.items()}
        try:
            self._registry.commit(expect, put, delete=[key for change in changes for key in change.delete])
        except Conflict:
            return False
        return True

    def _call(self) -> None:
        """Have the members look: one that waits for no partition does not watch the owners. All watch the assignment,
        so it is written again as it is."""
        state = self._read()
        if state.assignment is None:
            return
        _, entry = state.assignment
        try:
            self._registry.commit({entry.key: entry.version}, {entry.key: entry.value})
        except Conflict:
            return  # somebody else has written it, and so called them

    def _project(self) -> None:
        """Show what was changed, where there is a place for it and no member does it."""
        projection = projection_of(self._registry, self._keys, lambda: self._names(_State()))
        if projection is not None:
            projection.refresh()

    def _retire_leader(self, state: _State) -> None:
        """Refuse what the last leader may still have on its way, then forget what it has assigned."""
        if state.leader is None:
            return
        leader, version = state.leader
        expect = {self._keys.leader: version}
        if state.assignment is not None:
            expect[self._keys.assignment] = state.assignment[1].version
        try:
            put = {self._keys.leader: Leader("", leader.term + 1).dump()}
            self._registry.commit(expect, put, delete=[self._keys.assignment])
        except Conflict:
            return  # a new member leads already, by a new term


def _places(state: _State) -> set[Place]:
    """The partitions that concern anybody: an owner key alone is what a deleted group left behind."""
    owned = {place for place, (owner, _) in state.owners.items() if owner.incarnation in state.members}
    return {*state.checkpoints, *state.paused, *owned}


def _describe(
    state: _State, assignment: Assignment, place: Place, name: str, bounds: tuple[int, int] | None
) -> PartitionDescription:
    owner, _ = state.owners.get(place, (NOBODY, ABSENT))
    checkpoint = state.checkpoints[place][0] if place in state.checkpoints else None
    start, end = bounds or (None, None)
    lag = None
    if checkpoint is not None and start is not None and end is not None:
        lag = max(0, end - max(checkpoint.offset, start))
    return PartitionDescription(
        name,
        *place,
        owner=owner.incarnation,
        owner_name=None if owner.incarnation is None else owner.name,
        is_owner_there=owner.incarnation in state.members,
        target=assignment.target(*place),
        epoch=owner.epoch,
        checkpoint=None if checkpoint is None else checkpoint.offset,
        when=None if checkpoint is None else checkpoint.when,
        by=None if checkpoint is None else checkpoint.by,
        start=start,
        end=end,
        lag=lag,
        paused=state.paused[place][0] if place in state.paused else None,
    )


def _resolve(to: To, source: Offsets) -> dict[int, int]:
    """The offset for each partition. Raises if one is not in the log."""
    numbers = range(source.partitions)
    match to:
        case "earliest":
            return {number: source.start(number) for number in numbers}
        case "latest":
            return {number: source.end(number) for number in numbers}
        case datetime():
            if to.tzinfo is None:
                raise InvalidGroup(f"reset to {to}: give the time a time zone, such as tzinfo=UTC")
            at = microseconds_of(to)
            return {number: source.offset_at(number, at) for number in numbers}
        case Mapping():
            if not to:
                raise InvalidGroup("no partition is named: give offsets by partition, such as {0: 120}")
            for number in to:
                if not _is_count(number) or number >= source.partitions:
                    raise InvalidGroup(
                        f"{source.name} has no partition {number!r}; it has 0 to {source.partitions - 1}"
                    )
            return {number: _checked(offset, number, source) for number, offset in sorted(to.items())}
        case int():
            return {number: _checked(to, number, source) for number in numbers}
    raise InvalidGroup(
        f"reset to {arguments.shown(to)}: use 'earliest', 'latest', an offset, a time, or offsets by partition"
    )


def _resolve_global(offset: int, source: Offsets) -> dict[int, int]:
    """One offset for all partitions, within each one's bounds: no message that was not read is passed over."""
    if not _is_count(offset):
        raise InvalidGroup(f"{offset!r} is no offset: give a number from 0 on")
    if source.has_gaps:  # as it is: rows that were handled may be gone from the table, which says nothing of the others
        return dict.fromkeys(range(source.partitions), offset)
    bounds = {number: (source.start(number), source.end(number)) for number in range(source.partitions)}
    last = max(end for _, end in bounds.values())
    if offset > last:
        raise OffsetOutOfRange(source.name, offset, last)
    return {number: min(max(offset, start), end) for number, (start, end) in bounds.items()}


def _checked(offset: int, partition: int, source: Offsets) -> int:
    if not _is_count(offset):
        raise InvalidGroup(f"{source.name}/{partition}: {offset!r} is no offset; give a number from 0 on")
    if source.has_gaps:
        return offset
    start, end = source.start(partition), source.end(partition)
    if offset > end:
        raise OffsetOutOfRange(f"{source.name}/{partition}", offset, end)
    if offset < start:
        raise OffsetTrimmed(f"{source.name}/{partition}", offset, start)
    return offset


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
