"""A group seen from outside: what it does, and what an administrator may do to it.

Looking takes no lock and needs no member: it is one scan of the group's keys, then the log's ends (X17).

Changing goes through the fence. Whatever an administrator writes about a partition also writes its owner key, free and
with a new epoch, in the same commit and expecting its version (G5). So
- a checkpoint that the last owner still had on its way is refused, and cannot undo what was done here;
- the change itself, if its reply is lost and it lands late, is refused once anybody has owned the partition since;
- a member that owns the partition finds that it has lost it, claims it again and starts at what was written. It looks
  because the same commit raises `taken` in its target, expecting the target's version: every member watches its target,
  and reads all its owner keys when `taken` has changed. So the member is told even if this process dies right after the
  commit. A member that waits for the partition watches the owner key itself.

A checkpoint that is written here may lie before those of all other groups. Of a topic that keeps what is unread it goes
through the gate (O10, see `retention.py`): the commit expects `start` as it was read, and writes the gate.

Each partition is changed as a whole or not at all; several go together as far as one commit can hold them. If an error
ends a change half-way, run it again: each of them may be repeated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import pyarrow as pa

from pxrs import arguments
from pxrs.errors import (
    Conflict,
    GroupActive,
    GroupElsewhere,
    GroupError,
    InvalidGroup,
    NoDirectory,
    PxrsError,
    UnknownGroup,
    UnknownTopic,
)
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite
from pxrs.group.foreign import check_meaning, foreign_of
from pxrs.group.lag import Seen, TopicLag
from pxrs.group.positions import Offsets, To, resolve_offsets, resolve_position
from pxrs.group.projection import projection_of
from pxrs.group.readables import Readables, Sources, Topics, advice, is_topic_id
from pxrs.group.records import (
    GROUP_NAME,
    Checkpoint,
    Gate,
    Home,
    Keys,
    Leader,
    Member,
    Owner,
    Paused,
    Pinned,
    SourceRead,
    Starts,
    Target,
    TopicPartition,
    gate_key,
    start_key,
)
from pxrs.group.snapshot import GroupState
from pxrs.group.text import group_text, lag_text
from pxrs.log.contract import Source
from pxrs.registry.contract import ABSENT, Registry

ATTEMPTS_MAX: Final = 100
"""How often a change is tried again because the group has changed meanwhile."""

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
        pa.field("is_lag_exact", pa.bool_(), nullable=False),
        pa.field("paused_at", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("traceback", pa.string()),
    ]
)


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
    """The incarnation that it is meant for; None if that is gone, and the leader has yet to choose another."""
    epoch: int
    checkpoint: int | None
    """The offset of the next message to read."""
    when: float | None
    by: str | None
    start: int | None
    end: int | None
    lag: int | None
    """How many messages are there to be handled, or at most so many; None if the topic is not there or cannot be looked
    at."""
    is_lag_exact: bool
    """False if `lag` is an upper bound, or None. It is a bound of a table, where it counts the ids of other partitions
    too, and of a partition without a checkpoint, where it counts from the partition's start."""
    paused: Paused | None
    """The message that holds the partition up, and why."""

    @property
    def error(self) -> str | None:
        """What holds the partition up: the class and message of what the handler raised."""
        return None if self.paused is None else self.paused.error

    @property
    def error_type(self) -> str | None:
        """The class alone; empty if the pause was written by version 0.1, as is `traceback`."""
        return None if self.paused is None else self.paused.error_type

    @property
    def traceback(self) -> str | None:
        return None if self.paused is None else self.paused.traceback


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """What a group was doing while it was looked at; not one moment's picture (R1)."""

    name: str
    generation: int
    """Of the targets: it rises with every rebalance."""
    leader: str | None
    """An incarnation that is there."""
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    topics: tuple[TopicLag, ...]
    """How far the group is behind in each topic and source that it reads."""

    @property
    def lag(self) -> int | None:
        """How many messages are there to be handled, in all topics and sources together, or at most so many: see
        `is_lag_exact`. None if that is not known of one of them: `lag_problem` says why."""
        lags = [each.lag for each in self.topics]
        return None if None in lags else sum(lag for lag in lags if lag is not None)

    @property
    def is_lag_exact(self) -> bool:
        """False if `lag` is an upper bound, or None."""
        return all(each.is_exact for each in self.topics)

    @property
    def lag_problem(self) -> str | None:
        """Why `lag` is None, and what to do about it."""
        problems = [each.problem for each in self.topics if each.problem is not None]
        return "; ".join(problems) or None

    @property
    def lag_text(self) -> str:
        """The lag for people: `12`, `<= 12` if it is an upper bound, or `unknown`."""
        return lag_text(self.lag, self.is_lag_exact)

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
        """Tables to be printed: members, owners, epochs, checkpoints and lag."""
        return group_text(self)


@dataclass(slots=True)
class _Guard:
    """What every commit of a change expects beside the partitions that it changes, and writes with them."""

    expect: dict[str, int] = field(default_factory=dict)
    put: dict[str, bytes] = field(default_factory=dict)
    starts: dict[str, Starts] = field(default_factory=dict)
    """By the id of each topic that keeps what is unread: where it begins."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of the keys of these."""
    owners: dict[TopicPartition, str | None] = field(default_factory=dict)
    """Who owns the partitions, as read."""
    targets: dict[str, tuple[Target, int]] = field(default_factory=dict)
    """Of the members that are there, as read or written last."""

    def taken_from(self, writes: Iterable[CheckpointWrite]) -> dict[str, tuple[Target, int]]:
        """The targets of the members from whom these writes take a partition."""
        owners = {self.owners.get(write.partition) for write in writes}
        return {name: each for name, each in self.targets.items() if name in owners}

    def of(self, topics: Iterable[str]) -> tuple[dict[str, int], dict[str, bytes]]:
        """For a commit that changes partitions of these topics."""
        kept = [topic for topic in topics if topic in self.starts]
        expect = {start_key(topic): self.versions[topic] for topic in kept}
        put = {gate_key(topic): Gate("admin", time.time()).dump() for topic in kept}
        return {**self.expect, **expect}, {**self.put, **put}


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


def members_of(registry: Registry, topic: str) -> list[tuple[str, str]]:
    """The members of all groups that read the topic or source with this id: (group, member's name)."""
    found = []
    for group in groups(registry):
        for entry in registry.scan(Keys(group).members):
            member = Member.load(entry.key, entry.value)
            if member.topic == topic:
                found.append((group, member.name))
    return found


class GroupHandle:
    """A group by name. It need not be there: what needs it to be raises UnknownGroup."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        topics: Topics,
        sources: Iterable[Offsets] = (),
        home: Callable[[], Home | None] | None = None,
        registered: Sources | None = None,
    ) -> None:
        """sources: what the group reads beside the `topics` and the `registered` sources, such as somebody's table.
        home:    gives the identity of the hub that the `topics` are of, and raises WrongRegistry if its groups may not
                 be changed through this registry. Asked before every change that concerns one of the `topics`."""
        self.name = name
        self._keys = Keys(name)
        self._home = (lambda: None) if home is None else home
        self._registry, self._readables = registry, Readables(topics, sources, registered)
        self.hub: object = None
        """The hub that made this handle. It closes its log and registry with its last reference, which is here."""

    def describe(self) -> GroupDescription:
        """Who is there, who has what, how far it is. Raises UnknownGroup."""
        state = self._read_there()
        leader = state.leader[0].incarnation if state.leader else None
        names, meant = self._names(state), state.meant_for()
        # Read after the checkpoints: an end is never behind them.
        places = state.partitions()
        seen = {
            topic: self._look(state, topic, names.get(topic, topic)) for topic in sorted({topic for topic, _ in places})
        }
        places |= {(topic, number) for topic, each in seen.items() for number in range(each.count)}
        return GroupDescription(
            self.name,
            state.generation,
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
                _describe(state, meant.get((topic, number)), (topic, number), names.get(topic, topic), seen[topic])
                for topic, number in sorted(places, key=lambda place: (names.get(place[0], place[0]), place))
            ),
            tuple(
                sorted(
                    (each.total(names.get(id, id), id, state.offsets(id)) for id, each in seen.items()),
                    key=lambda each: (each.topic, each.topic_id),
                )
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
        OffsetTrimmed, or CheckpointOutOfRange if the log is an older copy than the registry. Raises UnknownGroup,
        UnknownTopic, GroupActive.
        """
        arguments.flag(InvalidGroup, "force", force)
        state = self._read_there()
        if topic is None:
            self._check_registry((id for id, _ in state.partitions()), state)
        sources = [self._source(topic)] if topic is not None else self._read_sources(state)
        if len(sources) > 1 and not isinstance(to, str | datetime):
            raise InvalidGroup(
                f"group {self.name} reads {', '.join(source.name for source in sources)}: say of which the offsets are"
            )
        written = self._set(sources, lambda source, starts: resolve_offsets(to, source, starts), "reset", force=force)
        return {
            source.name: {number: offset for (id, number), offset in sorted(written.items()) if id == source.id}
            for source in sources
        }

    def import_checkpoint(self, offset: int | Mapping[int, int], topic: str, force: bool = False) -> dict[int, int]:
        """Start from the checkpoint that an old consumer had (X21). The offsets that were written, by partition.

        offset: of the next message to read, by partition. A single one is understood where offsets are global: of a
                source whose offsets are the ids of a table, for all its partitions, and of a topic with one partition.
                A topic with several counts in each of them from 0, and a single one is refused: InvalidGroup.
        force:  replace checkpoints that are there; without it they are left as they are.

        Nothing is written if an offset is not in the log: OffsetOutOfRange, OffsetTrimmed. The group need not be there.
        Raises GroupActive while members are, whatever `force` says: see `reset`.
        """
        arguments.flag(InvalidGroup, "force", force)
        source = self._source(topic)

        def resolve(source: Offsets, starts: Starts) -> dict[int, int]:
            if isinstance(offset, Mapping):
                return resolve_offsets(offset, source, starts)
            return resolve_position(offset, source, starts, self.name)

        written = self._set([source], resolve, "import", replaces=force)
        return {number: each for (_, number), each in sorted(written.items())}

    def delete(self, force: bool = False, topic: str | None = None) -> None:
        """Forget the group: whoever consumes under its name later starts afresh.

        topic: forget only the checkpoints and pauses of this topic or source, given by its name or id; it need not be
               there any more. The members that read other topics stay, as do their checkpoints.

        Its checkpoints, pauses and targets are removed. Its owner keys and its leader key stay, free and with a new
        epoch and term: they are the guards of all other writes, and a guard that is deleted and made again may get an
        old version again (R4). So no write from before the deletion can pass after it, on any store: a checkpoint
        expects its owner's old version, a target its leader's, a claim and a start need a lease that lives, and
        what an administrator writes expects the owner too. A partition that nobody has owned gets its owner key now.

        force: also while members are there. They are sent away, join again as new members and start afresh; so is one
        that joins in just this moment. Raises UnknownGroup, GroupActive, and GroupError if the group does not read the
        topic.
        """
        arguments.flag(InvalidGroup, "force", force)
        state = self._read_there()
        ids = None if topic is None else self._ids_to_forget(state, topic)
        state = state.only(ids)
        self._check_registry((id for id, _ in state.partitions()), state)
        self._check_idle(state, force)
        owned = {place for place, (owner, _) in state.owners.items() if owner.incarnation is not None}
        gone = dict.fromkeys(state.checkpoints.keys() | state.paused.keys() | owned)
        self._change(_Guard, lambda _: gone, "delete", force=True)
        # In this order: a member that joins before `starts` is set back may take it that every partition has a
        # checkpoint, and is sent away; one that joins later looks at the checkpoints, which are all gone.
        for topic in sorted({topic for topic, _ in gone} | {member.topic for member in state.members.values()}):
            self._registry.commit(put={self._keys.starts(topic): Pinned().dump()})
        state = self._read().only(ids)
        self._delete([self._keys.member(incarnation) for incarnation in state.members])
        self._retire_sources(state)
        if ids is None or not (left := self._read()).is_there:
            self._retire_leader(state if ids is None else left)
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
            order = replace(paused, skip=True)
            try:
                self._registry.commit({key: version}, {key: order.dump()})
            except Conflict:  # never another message than the one that was seen
                is_other = True
        if is_other:
            raise GroupError(f"group {self.name}: another message holds up {topic}/{partition} now; look again")
        return paused.offset

    def paused(self, topic: str, partition: int) -> Paused:
        """The message that holds a partition up, and why. Raises GroupError if none does."""
        return self._pause(topic, partition, is_changed=False)[1]

    # What is there.

    def _read(self) -> GroupState:
        return GroupState.of(self._keys, self._registry.scan(self._keys.root))

    def _names(self, state: GroupState) -> dict[str, str]:
        """The names of topics and sources by their ids, also of those whose name only the group's or a member's record
        holds."""
        names = {id: read.name for id, read in state.sources.items() if read.name}
        names |= {member.topic: member.topic_name for member in state.members.values()}
        return names | self._readables.names()

    def _look(self, state: GroupState, id: str, name: str) -> Seen:
        """How far a topic or source reaches. If it cannot be looked at, why: where the group is can be told all the
        same."""
        seen = self._readables.look(id, name, state.offsets(id))
        if seen is not None:
            return seen
        return Seen(
            is_source=True, is_deleted=self._is_deleted_topic(state, id), problem=self._missing(name, id, state)
        )

    def _missing(self, name: str, id: str, state: GroupState) -> str:
        """What is to be done about something that the group reads and that is not known here."""
        read = state.sources.get(id)
        if read is None and is_topic_id(id) and state.home.place:
            return f"{name} is no topic of this hub: the group reads the hub at {state.home.place}"
        return advice(self.name, name, id, read)

    def _is_deleted_topic(self, state: GroupState, id: str) -> bool:
        """Whether what has this id was a topic of this hub, and nothing else that cannot be looked at from here."""
        if not is_topic_id(id) or id in state.sources:
            return False
        try:
            home = self._home()
        except PxrsError:  # this process has another registry than the hub, or cannot tell
            return False
        return home is None or state.home.hub in ("", home.hub)

    def _source(self, name: str) -> Offsets:
        arguments.text(InvalidGroup, "topic", name, "its name")
        try:
            return self._readables.named(name)
        except UnknownTopic:
            for id, read in self._read().sources.items():
                if name in (id, read.name):
                    raise GroupError(advice(self.name, read.name, id, read)) from None
            raise

    def _read_sources(self, state: GroupState) -> list[Offsets]:
        """What the group reads and what is still there. Raises GroupError if it reads a source that is not registered:
        to leave that out would do half of what was asked."""
        ids = sorted({id for id, _ in state.partitions()} | {member.topic for member in state.members.values()})
        names = self._names(state)
        sources = []
        for id in ids:
            if (source := self._readables.find(id)) is not None:
                sources.append(source)
            elif not self._is_deleted_topic(state, id):
                raise GroupError(f"{self._missing(names.get(id, id), id, state)}; or name the topic that is meant")
        if not sources:
            raise GroupError(f"group {self.name} reads no topic that is still there; name one, or delete the group")
        return sorted(sources, key=lambda source: source.name)

    def _ids_to_forget(self, state: GroupState, topic: str) -> set[str]:
        """The ids of what is called so, or has this id, and of which the group has anything."""
        arguments.text(InvalidGroup, "topic", topic, "its name or id")
        there = {id for id, _ in state.partitions()} | {member.topic for member in state.members.values()}
        ids = there & self._ids_named(state, topic)
        if not ids:
            raise GroupError(f"group {self.name} reads nothing that is called {topic}")
        return ids

    def _ids_named(self, state: GroupState, name: str) -> set[str]:
        """All ids that have this name here, in the group's records or in those of its members; and the name itself,
        which may be an id."""
        ids = {id for id, read in state.sources.items() if read.name == name}
        ids |= {member.topic for member in state.members.values() if member.topic_name == name}
        return ids | self._readables.ids_named(name) | {name}

    def _pause(self, topic: str, partition: int, is_changed: bool = True) -> tuple[str, Paused, int]:
        """The key, the record and the version of a pause. is_changed: raise WrongRegistry if it may not be."""
        arguments.text(InvalidGroup, "topic", topic, "its name")
        partition = arguments.whole(InvalidGroup, "partition", partition, 0)
        state = self._read_there()
        names = self._names(state)
        ids = sorted(self._ids_named(state, topic))
        for id in ids:  # a deleted topic's name may be another one's now
            if (id, partition) in state.paused:
                if is_changed:
                    self._check_registry([id], state)
                return self._keys.pause(id, partition), *state.paused[id, partition]
        nameless = sorted(id for id, number in state.paused if number == partition and id not in names)
        if ids == [topic] and nameless:
            raise GroupError(
                f"group {self.name} reads nothing that is called {topic}, and has paused partition {partition} of a "
                f"source that is not registered: {self._missing(nameless[0], nameless[0], state)}; or give its id as "
                "TOPIC"
            )
        raise GroupError(
            f"group {self.name} has not paused partition {partition} of {topic}: there is nothing to decide"
        )

    def _read_there(self) -> GroupState:
        """Raises UnknownGroup; or WrongRegistry if the hub has another registry, where the group may be."""
        state = self._read()
        if state.is_there:
            return state
        if not self._readables.sources:
            with contextlib.suppress(NoDirectory):  # a hub without a directory has no other registry to name
                self._home()
        raise UnknownGroup(self.name)

    def _check_registry(self, topics: Iterable[str], state: GroupState | None = None) -> Home | None:
        """The identity of the hub, if any of the topics with these ids is of it; else None. Raises WrongRegistry, and
        NoDirectory if there is no hub to ask. state: the group's, with its records of what is no topic of a hub."""
        foreign = self._readables.foreign_ids() | (set() if state is None else state.sources.keys())
        return self._home() if any(topic not in foreign for topic in topics) else None

    def _check_idle(self, state: GroupState, force: bool) -> None:
        if state.members and not force:
            names = sorted(member.name for member in state.members.values())
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise GroupActive(f"group {self.name} has members: {some}; stop them first, or force it")

    def _too_lively(self) -> GroupActive:
        return GroupActive(f"group {self.name} changes faster than it can be written to; stop its members first")

    # What is done to it.

    def _set(
        self,
        sources: Sequence[Offsets],
        resolve: Callable[[Offsets, Starts], Mapping[int, int]],
        by: str,
        *,
        force: bool = False,
        replaces: bool = True,
    ) -> dict[TopicPartition, int]:
        """Write the checkpoints that `resolve` gives for each source; what was written."""

        def choose(guard: _Guard) -> dict[TopicPartition, int | None]:
            return {
                (source.id, number): offset
                for source in sources
                for number, offset in resolve(source, guard.starts.get(source.id, Starts())).items()
            }

        written = self._change(lambda: self._guard(sources), choose, by, force=force, replaces=replaces)
        return {place: offset for place, offset in written.items() if offset is not None}

    def _guard(self, sources: Sequence[Offsets]) -> _Guard:
        """For a change that writes checkpoints. Raises WrongRegistry, and GroupElsewhere if the group reads the topics
        of another hub."""
        guard = _Guard()
        home = self._check_registry(source.id for source in sources)
        if home is not None:
            # Read before the rest of the group: see `MemberProtocol._read_home`.
            entry = self._registry.get(self._keys.home)
            known = Home() if entry is None else Home.load(entry.key, entry.value)
            if known.hub not in ("", home.hub) and self._read().is_there:
                raise GroupElsewhere(self.name, known.place, home.place)
            guard.expect[self._keys.home] = ABSENT if entry is None else entry.version
            guard.put[self._keys.home] = home.dump()
        for source in sources:
            foreign = foreign_of(self._keys, source) if isinstance(source, Source) else None
            if foreign is not None:  # in one commit with its first checkpoints: see `SourceRead`
                state = self._read()
                check_meaning(self.name, foreign, state.sources.values(), state.checkpoints_of(source.id))
                entry = self._registry.get(foreign.key)
                guard.expect[foreign.key] = ABSENT if entry is None else entry.version
                guard.put[foreign.key] = foreign.read.dump()
            if source.keeps_unread:
                entry = self._registry.get(start_key(source.id))
                guard.starts[source.id] = Starts() if entry is None else Starts.load(entry.key, entry.value)
                guard.versions[source.id] = ABSENT if entry is None else entry.version
        return guard

    def _change(
        self,
        guarded: Callable[[], _Guard],
        choose: Callable[[_Guard], Mapping[TopicPartition, int | None]],
        by: str,
        *,
        force: bool = False,
        replaces: bool = True,
    ) -> dict[TopicPartition, int | None]:
        """Write the checkpoints that `choose` gives, remove those that are None, and bump the owners. What was written.

        replaces: False leaves those that are there."""
        written: dict[TopicPartition, int | None] = {}
        for attempt in range(ATTEMPTS_MAX):
            guard = guarded()
            todo = {place: offset for place, offset in choose(guard).items() if place not in written}
            state = self._read()
            self._check_idle(state, force)
            if not replaces:
                todo = {place: offset for place, offset in todo.items() if place not in state.checkpoints}
            guard.owners = {place: owner.incarnation for place, (owner, _) in state.owners.items()}
            guard.targets = {name: each for name, each in state.targets.items() if name in state.members}
            writes = [self._write_of(state, place, offset, by) for place, offset in todo.items()]
            # Together at first; where somebody else was faster on one of them, each by itself.
            for some in self._parts(writes, guard, None if attempt == 0 else 1):
                if self._commit(some, guard):
                    written |= {write.partition: todo[write.partition] for write in some}
            if todo.keys() <= written.keys():
                if not state.members:
                    self._project()
                return written
        raise self._too_lively()

    def _write_of(self, state: GroupState, partition: TopicPartition, offset: int | None, by: str) -> CheckpointWrite:
        """The checkpoint at this offset, or none, with the owner key free and under a new epoch (G5)."""
        owner, owner_version = state.owner(partition)
        _, version = state.checkpoints.get(partition, (None, ABSENT))
        free = Owner(None, owner.epoch + 1)
        checkpoint = None if offset is None else Checkpoint(offset, time.time(), by, free.epoch)
        return CheckpointWrite(self._keys, partition, owner_version, version, checkpoint, free)

    def _parts(
        self, writes: Sequence[CheckpointWrite], guard: _Guard, count_max: int | None
    ) -> Iterator[list[CheckpointWrite]]:
        """As many together as one commit may hold."""
        limits = self._registry.limits
        part: list[CheckpointWrite] = []
        keys: set[str] = set()
        size = 0
        for write in writes:
            expect, put, delete = self._merged([write], guard)
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

    def _merged(
        self, writes: Sequence[CheckpointWrite], guard: _Guard
    ) -> tuple[dict[str, int], dict[str, bytes], list[str]]:
        """What one commit of these checkpoints expects, puts and deletes. It also removes their pauses."""
        expect, put = guard.of(sorted({write.partition[0] for write in writes}))
        for name, (target, version) in guard.taken_from(writes).items():
            expect[self._keys.target(name)] = version
            put[self._keys.target(name)] = replace(target, taken=target.taken + 1).dump()
        fenced = FencedWrite(writes)
        pauses = [self._keys.pause(*write.partition) for write in writes]
        return {**expect, **fenced.expect}, {**put, **fenced.put}, [*fenced.delete, *pauses]

    def _commit(self, writes: Sequence[CheckpointWrite], guard: _Guard) -> bool:
        expect, put, delete = self._merged(writes, guard)
        try:
            versions = self._registry.commit(expect, put, delete=delete)
        except Conflict:
            return False
        # As the next part finds them.
        guard.expect |= {key: versions[key] for key in guard.put}
        for name, (target, _) in guard.taken_from(writes).items():
            guard.targets[name] = replace(target, taken=target.taken + 1), versions[self._keys.target(name)]
        return True

    def _project(self) -> None:
        """Show what was changed, where there is a place for it and no member does it."""
        projection = projection_of(self._registry, self._keys, lambda: self._names(GroupState()))
        if projection is not None:
            projection.refresh()

    def _retire_sources(self, state: GroupState) -> None:
        """Forget under which ids the group has read its sources: it may begin under others."""
        for key, (_, version) in state.source_records.items():
            try:
                self._registry.commit({key: version}, {key: SourceRead().dump()})
            except Conflict:
                continue  # a member has joined since, and has written what it reads

    def _retire_leader(self, state: GroupState) -> None:
        """Refuse what the last leader may still have on its way, then delete the targets that it has written."""
        if state.leader is not None:
            leader, version = state.leader
            try:
                retired = Leader("", leader.term + 1)
                self._registry.commit({self._keys.leader: version}, {self._keys.leader: retired.dump()})
            except Conflict:
                return  # a new member leads already, by a new term, and deletes them
        # Of members that are gone: an incarnation that joins later has another key.
        targets = [self._keys.target(incarnation) for incarnation in state.targets]
        self._delete([*targets, self._keys.legacy_assignment])

    def _delete(self, keys: Sequence[str]) -> None:
        size = self._registry.limits.commit_keys_max
        for at in range(0, len(keys), size):
            self._registry.commit(delete=keys[at : at + size])


def _describe(
    state: GroupState, target: str | None, place: TopicPartition, name: str, seen: Seen
) -> PartitionDescription:
    owner, _ = state.owner(place)
    checkpoint = state.checkpoints[place][0] if place in state.checkpoints else None
    start, end = seen.extents[place[1]] if place[1] < seen.count else (None, None)
    offset = None if checkpoint is None else checkpoint.offset
    lag = seen.partition_lag(place[1], offset)
    return PartitionDescription(
        name,
        *place,
        owner=owner.incarnation,
        owner_name=None if owner.incarnation is None else owner.name,
        is_owner_there=owner.incarnation in state.members,
        target=target,
        epoch=owner.epoch,
        checkpoint=None if checkpoint is None else checkpoint.offset,
        when=None if checkpoint is None else checkpoint.when,
        by=None if checkpoint is None else checkpoint.by,
        start=start,
        end=end,
        lag=lag,
        is_lag_exact=seen.is_partition_exact(lag, offset),
        paused=state.paused[place][0] if place in state.paused else None,
    )
