"""A group seen from outside: its records, and the topics and sources that it reads, by id or name.

`group/admin.py` describes and changes groups with it. It writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from pxrs import arguments
from pxrs.errors import GroupError, InvalidGroup, NoDirectory, PxrsError, UnknownGroup, UnknownTopic
from pxrs.group.description import GroupDescription, MemberDescription, describe_partition
from pxrs.group.lag import Seen
from pxrs.group.positions import Offsets, To
from pxrs.group.readables import Listing, Readables, advice, is_topic_id
from pxrs.group.records import Home, Keys
from pxrs.group.snapshot import GroupState
from pxrs.registry.contract import Registry


class GroupReader:
    """home: gives the identity of the hub that the topics are of, and raises WrongRegistry if its groups may not be
    changed through this registry."""

    def __init__(self, registry: Registry, keys: Keys, readables: Readables, home: Callable[[], Home | None]) -> None:
        self._registry, self._keys, self._home, self.readables = registry, keys, home, readables

    def read(self) -> GroupState:
        return GroupState.of(self._keys, self._registry.scan(self._keys.root))

    def names(self, state: GroupState, listing: Listing) -> dict[str, str]:
        """The names of the topics and sources of the group by their ids, also of those whose name only the group's or a
        member's record holds."""
        names = {id: read.name for id, read in state.sources.items() if read.name}
        names |= state.topics_read()
        return names | self.readables.names({*names, *(id for id, _ in state.partitions())}, listing)

    def look(self, state: GroupState, id: str, name: str, offsets: Mapping[int, int], listing: Listing) -> Seen:
        """The extents of a topic or source. If it cannot be read, the reason: the checkpoints of the group are shown
        all the same.

        offsets: the checkpoints of it, by partition."""
        seen = self.readables.look(id, name, offsets, listing)
        if seen is not None:
            return seen
        return Seen(is_source=True, is_deleted=self.is_deleted_topic(state, id), problem=self.missing(name, id, state))

    def described(self, state: GroupState, listing: Listing) -> GroupDescription:
        leader = state.leader[0].incarnation if state.leader else None
        names, meant, offsets = self.names(state, listing), state.meant_for(), state.offsets_by_topic()
        # Read the ends after the checkpoints, so that no end is behind a checkpoint.
        places = state.partitions()
        seen = {
            topic: self.look(state, topic, names.get(topic, topic), offsets.get(topic, {}), listing)
            for topic in sorted({topic for topic, _ in places})
        }
        places |= {(topic, number) for topic, each in seen.items() for number in range(each.count)}
        return GroupDescription(
            self._keys.group,
            state.generation,
            leader if leader in state.members else None,
            tuple(
                MemberDescription(
                    incarnation,
                    member.name,
                    member.host,
                    member.pid,
                    ", ".join(topics := tuple(names.get(each.id, each.name) for each in member.reads)),
                    member.since,
                    sum(owner.incarnation == incarnation for owner, _ in state.owners.values()),
                    topics,
                )
                for incarnation, member in sorted(state.members.items(), key=lambda each: (each[1].since, each[0]))
            ),
            tuple(
                describe_partition(
                    state, meant.get((topic, number)), (topic, number), names.get(topic, topic), seen[topic]
                )
                for topic, number in sorted(places, key=lambda place: (names.get(place[0], place[0]), place))
            ),
            tuple(
                sorted(
                    (each.total(names.get(id, id), id, offsets.get(id, {})) for id, each in seen.items()),
                    key=lambda each: (each.topic, each.topic_id),
                )
            ),
        )

    def missing(self, name: str, id: str, state: GroupState) -> str:
        """What to do about something that the group reads and that is not known here."""
        read = state.sources.get(id)
        if read is None and is_topic_id(id) and state.home.place:
            return f"{name} is not a topic of this hub: the group reads the hub at {state.home.place}"
        return advice(self._keys.group, name, id, read)

    def is_deleted_topic(self, state: GroupState, id: str) -> bool:
        """Whether this is the id of a deleted topic of this hub, and not of something that cannot be read from here."""
        if not is_topic_id(id) or id in state.sources:
            return False
        try:
            home = self._home()
        except PxrsError:  # this process has another registry than the hub, or it is not known which one the hub has
            return False
        return home is None or state.home.hub in ("", home.hub)

    def source(self, name: str) -> Offsets:
        arguments.text(InvalidGroup, "topic", name, "the topic's name")
        try:
            return self.readables.named(name)
        except UnknownTopic:
            for id, read in self.read().sources.items():
                if name in (id, read.name):
                    raise GroupError(advice(self._keys.group, read.name, id, read)) from None
            raise

    def sources_read(self, state: GroupState) -> list[Offsets]:
        """The topics and sources that the group reads and that still exist. Raises GroupError if it reads a source that
        is not registered: to leave that out would do only a part of what was asked."""
        ids = sorted({id for id, _ in state.partitions()} | state.topics_read().keys())
        listing = self.readables.listing()
        names = self.names(state, listing)
        sources = []
        for id in ids:
            if (source := self.readables.find(id, listing)) is not None:
                sources.append(source)
            elif not self.is_deleted_topic(state, id):
                raise GroupError(f"{self.missing(names.get(id, id), id, state)}; or name the topic explicitly")
        if not sources:
            raise GroupError(
                f"group {self._keys.group} reads no topic that still exists; name one, or delete the group"
            )
        return sorted(sources, key=lambda source: source.name)

    def sources_to_reset(self, to: To, topic: str | None) -> list[Offsets]:
        """The topics and sources whose checkpoints a reset sets. topic: the name of one; None for all that the group
        reads. Raises UnknownGroup, UnknownTopic, WrongRegistry, and InvalidGroup if it is not clear of which topic the
        offsets are."""
        state = self.read_there()
        if topic is not None:
            return [self.source(topic)]
        self.check_registry((id for id, _ in state.partitions()), state)
        sources = self.sources_read(state)
        if len(sources) > 1 and not isinstance(to, str | datetime):
            names = ", ".join(source.name for source in sources)
            raise InvalidGroup(f"group {self._keys.group} reads {names}: name the topic that the offsets are for")
        return sources

    def ids_to_forget(self, state: GroupState, topic: str) -> set[str]:
        """The ids of the topics or sources with this name or id of which the group has any record."""
        arguments.text(InvalidGroup, "topic", topic, "the topic's name or id")
        there = {id for id, _ in state.partitions()} | state.topics_read().keys()
        ids = there & self.ids_named(state, topic)
        if not ids:
            raise GroupError(f"group {self._keys.group} reads no topic or source named {topic}")
        return ids

    def ids_named(self, state: GroupState, name: str) -> set[str]:
        """All ids that have this name here, in the group's records or in those of its members; and the name itself,
        which may be an id."""
        ids = {id for id, read in state.sources.items() if read.name == name}
        ids |= {each.id for member in state.members.values() for each in member.reads if each.name == name}
        return ids | self.readables.ids_named(name) | {name}

    def read_there(self) -> GroupState:
        """The state of the group. Raises UnknownGroup; or WrongRegistry if the hub has another registry, which may have
        the group."""
        state = self.read()
        if state.is_there:
            return state
        if not self.readables.sources:
            with contextlib.suppress(NoDirectory):  # a hub without a directory has no other registry to name
                self._home()
        raise UnknownGroup(self._keys.group)

    def check_registry(self, topics: Iterable[str], state: GroupState | None = None) -> Home | None:
        """The identity of the hub, if one of the topics with these ids belongs to it; otherwise None. Raises
        WrongRegistry, and NoDirectory if there is no hub to ask. state: that of the group, with its records of sources
        that are no topics."""
        foreign = self.readables.foreign_ids() | (set() if state is None else state.sources.keys())
        return self._home() if any(topic not in foreign for topic in topics) else None
