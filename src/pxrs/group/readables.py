"""What a group can read, looked up by id or name: the topics of a hub, sources that were given, registered sources.

A topic comes before a registered source of the same name. Reading a registered source opens its database. If that
fails, a caller that only shows a group gets the reason as a value (`look`), and a caller that changes something gets
the error (`find`, `named`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import UUID

from pxrs.errors import HubMoved, InvalidUrl, LogError, MissingDependency, NoDirectory, UnknownTopic
from pxrs.group.lag import Seen, beyond
from pxrs.group.positions import Offsets
from pxrs.group.records import SourceRead
from pxrs.log.contract import DamagedTopic, Source
from pxrs.model import Topic


class Topics(Protocol):
    """Finds topics by name. A `Hub` is one, and so is a `Log`."""

    def topics(self) -> Sequence[Topic]: ...

    def damaged_topics(self) -> Sequence[DamagedTopic]: ...

    def topic(self, name: str) -> Offsets: ...


class RegisteredName(Protocol):
    """The fields of the record of a registered source that are used here."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> str: ...


class Sources(Protocol):
    """Finds registered sources: see `pxrs.sources.catalog`."""

    def records(self) -> Sequence[RegisteredName]: ...

    def open(self, name: str) -> Source: ...

    def open_to_look(self, name: str) -> Source: ...


@dataclass(frozen=True, slots=True)
class Listing:
    """The topics that there were at one moment, by id: to list them costs a read of each, so a description of a group,
    or of all groups, lists them once."""

    names: Mapping[str, str]
    """Of the topics that can be opened."""
    damaged: Mapping[str, DamagedTopic]

    @classmethod
    def of(cls, topics: Topics) -> Listing:
        damaged = {each.id: each for each in topics.damaged_topics() if each.id is not None}
        return cls({topic.id: topic.name for topic in topics.topics()}, damaged)

    def name(self, id: str) -> str | None:
        """None if there is no topic with this id."""
        found = self.names.get(id)
        return self.damaged[id].name if found is None and id in self.damaged else found


class Readables:
    def __init__(self, topics: Topics, sources: Iterable[Offsets], registered: Sources | None) -> None:
        self._topics, self.sources, self._registered = topics, tuple(sources), registered

    def listing(self) -> Listing:
        return Listing.of(self._topics)

    def names(self, ids: Iterable[str] | None, listing: Listing) -> dict[str, str]:
        """The names of those of these topics and sources that are known here. ids: None for all that are known."""
        sources = {record.id: record.name for record in self._records()}
        sources |= {source.id: source.name for source in self.sources}
        if ids is None:
            ids = {*sources, *listing.damaged, *listing.names}
        found = {id: listing.name(id) or sources.get(id) for id in ids}
        return {id: name for id, name in found.items() if name is not None}

    def ids_named(self, name: str) -> set[str]:
        """The ids of everything that has this name; one table may be known by several names."""
        ids = {record.id for record in self._records() if record.name == name}
        ids |= {source.id for source in self.sources if source.name == name}
        ids |= {each.id for each in self._topics.damaged_topics() if each.name == name and each.id is not None}
        return ids | {topic.id for topic in self._topics.topics() if topic.name == name}

    def foreign_ids(self) -> set[str]:
        """The ids of the given and the registered sources."""
        return {source.id for source in self.sources} | {record.id for record in self._records()}

    def find(self, id: str, listing: Listing) -> Offsets | None:
        """The topic or source with this id; None if there is none, or if it is not registered. Raises DamagedFrame if
        it is a topic that cannot be opened, and what opening a registered source raises."""
        found = self._find_here(id, listing)
        return self._open(id, lambda sources, name: sources.open(name)) if found is None else found

    def named(self, name: str) -> Offsets:
        """The topic or source with this name or id. Raises UnknownTopic, and what opening it raises."""
        for source in self.sources:
            if name in (source.name, source.id):
                return source
        try:
            return self._topics.topic(name)
        except (UnknownTopic, NoDirectory):
            ids = [record.id for record in self._records() if name in (record.name, record.id)]
            found = self._open(ids[0], lambda sources, name: sources.open(name)) if ids else None
            if found is None:
                raise
            return found

    def look(self, id: str, name: str, checkpoints: Mapping[int, int], listing: Listing) -> Seen | None:
        """The extents of the partitions, or why they are not known; None if there is nothing with this id."""
        is_source = True
        try:
            found = self._find_here(id, listing)
            is_source = found is None or found in self.sources
            if found is None:
                found = self._open(id, lambda sources, name: sources.open_to_look(name))
            if found is None:
                return None
            problem = found.ends_problem() if isinstance(found, Source) else None  # before the ends are read
            seen, was_given_out = _look_at(found, is_source)
            if problem is not None:
                return replace(seen, problem=f"the lag in {name} is not known: {problem}")
            wrong = beyond(seen, checkpoints, was_given_out)
        except HubMoved:
            raise
        except (LogError, InvalidUrl, MissingDependency) as error:
            return Seen(is_source=is_source, problem=f"the lag in {name} is not known: {error}")
        if wrong is None:
            return seen
        number, checkpoint = wrong
        problem = (
            f"the lag in {name} is not known: the checkpoint of partition {number}, {checkpoint:,}, is beyond the end, "
            f"{seen.extents[number][1]:,}. It was emptied and restarted its offsets, or is an older copy than the "
            "checkpoint, or its newest rows were deleted and the database does not report which ids it has assigned"
        )
        return replace(seen, problem=problem)

    def _records(self) -> Sequence[RegisteredName]:
        return () if self._registered is None else self._registered.records()

    def _find_here(self, id: str, listing: Listing) -> Offsets | None:
        """Look among the given sources and the topics."""
        for source in self.sources:
            if source.id == id:
                return source
        name = listing.names.get(id)
        if name is not None:
            try:
                found = self._topics.topic(name)
            except UnknownTopic:  # deleted meanwhile
                return None
            return found if found.id == id else None
        if id in listing.damaged:
            raise listing.damaged[id].error
        return None

    def _open(self, id: str, open: Callable[[Sources, str], Source]) -> Source | None:
        for record in self._records():
            if record.id == id and self._registered is not None:
                return open(self._registered, record.name)
        return None


def is_topic_id(id: str) -> bool:
    """Whether the id has the form of a topic's id, a random UUID; ids of tables have another form."""
    try:
        return UUID(hex=id).version == 4
    except ValueError:
        return False


def advice(group: str, name: str, id: str, read: SourceRead | None) -> str:
    """What to do about a source that is not registered. read: what the group has on record of it."""
    where = f" ({read.address})" if read is not None and read.address else ""
    called = f"{name}{where} is" if name != id else f"the source with the id {id} is"
    return (
        f"{called} neither a topic of this hub nor a registered source: if it is a table, register it with `pxrs "
        f"source add {name if name != id else 'NAME'} --id {id} --sql-table URL --table TABLE ...`; if the group "
        f"should no longer read it, `pxrs group delete {group} --topic {id}` removes its checkpoints"
    )


def _look_at(found: Offsets, is_source: bool) -> tuple[Seen, Callable[[int, int], bool]]:
    """The extents of each partition, and the function that says whether a checkpoint can be at an offset."""
    if isinstance(found, Source):
        return Seen(found.extents(), found.has_gaps, is_source), found.was_given_out
    extents: list[tuple[int, int]] = list(found.bounds(range(found.partitions)).values())
    return Seen(extents, found.has_gaps, is_source), lambda number, offset: offset <= extents[number][1]
