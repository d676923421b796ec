"""The groups of a registry as they were last looked at, each read again only after its records have changed.

The first look scans all groups twice. From then on each group has a watch of its own, so a refresh scans exactly the
groups of which a record has changed, once each, however many groups there are. The watch is opened before the scan, so
a change after the scan is noticed at the next refresh (R2).

A new group is found by the events of its first member. One more watch covers all groups: if it has woken and no known
group has changed, something that is not known yet has, and the names are listed again, by one scan of a single key for
each group. If known groups change all the time, this is done every `LIST_S`. The lag is computed from the offsets
of `TopicBook`, without the registry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pxrs.clock import wall_time_us
from pxrs.errors import PxrsError, UnknownGroup
from pxrs.group.admin import GroupHandle
from pxrs.group.description import GroupDescription
from pxrs.group.records import GROUP_NAME, Home, Keys
from pxrs.group.snapshot import GroupState
from pxrs.log.contract import Source
from pxrs.log.numbering import TopicPartition
from pxrs.registry.contract import Entry, Registry
from pxrs.sources.catalog import PREFIX, Catalog, RegisteredSource
from pxrs.web.topics import TopicBook
from pxrs.web.watching import LateWatch, Watching, watch

ROOT: Final = "groups/"
LIST_S: Final = 60.0
WATCHES_MAX: Final = 800
"""How many groups have a watch of their own: a server allows a client 1,000. The others are read again every
`UNWATCHED_S` while any group changes."""
UNWATCHED_S: Final = 5.0
FOREIGN_S: Final = 5.0
"""How old the lag in a table of another system may be: to compute it asks the database."""


class SourceBook:
    """The registered sources, read again after a change. It is the `Sources` that descriptions are made with."""

    def __init__(self, registry: Registry) -> None:
        self._watch = LateWatch(registry, PREFIX)
        self._catalog = Catalog(registry)
        self._records: Sequence[RegisteredSource] | None = None
        self._is_due = True
        """The sources have changed since they were last read, or the last try to read them failed."""
        self.changes = 0

    def refresh(self) -> None:
        self._is_due = self._watch.wait(0) or self._is_due
        if self._is_due:
            self._records = self._catalog.records()
            self._is_due = False
            self.changes += 1

    def records(self) -> Sequence[RegisteredSource]:
        return self._records or ()

    def open(self, name: str) -> Source:
        return self._catalog.open(name)

    def open_to_look(self, name: str) -> Source:
        return self._catalog.open_to_look(name)

    def close(self) -> None:
        self._watch.close()
        self._catalog.close()


@dataclass(slots=True)
class WatchedGroup:
    """A group that is or was there."""

    handle: GroupHandle
    watch: Watching | None
    state: GroupState = field(default_factory=GroupState)
    reads: int = 0
    """How often the records were read."""
    read_at: float = 0.0
    error: PxrsError | None = None
    """Why the records could not be read or described."""
    description: GroupDescription | None = None
    described_at: float = 0.0
    epochs: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """The epoch of each partition, and when it was first seen here, in microseconds since 1970."""
    _ids: list[str] | None = None
    """The ids of the topics and sources in `state`; None until they are needed."""
    _seen: tuple[object, ...] = ()
    """What `description` was made from: `reads`, and the counters of the topics and sources."""

    @property
    def is_there(self) -> bool:
        return self.state.is_there or self.error is not None

    def take(self, state: GroupState) -> None:
        """Records that were read now."""
        self.state, self.error, self._ids = state, None, None
        now_us = wall_time_us()
        for place, (owner, _) in self.state.owners.items():
            if self.epochs.get(place, (0, 0))[0] != owner.epoch:
                self.epochs[place] = owner.epoch, now_us

    def describe(self, topics: TopicBook, sources: SourceBook, now: float) -> None:
        """Make the description anew if something that it shows has changed."""
        if self._ids is None:
            self._ids = sorted({id for id, _ in self.state.partitions()} | self.state.topics_read().keys())
        ids, by_id = self._ids, topics.by_id
        known = [(id, by_id[id].changes) for id in ids if id in by_id]
        seen = (self.reads, topics.listed, sources.changes, tuple(known))
        is_foreign = len(known) < len(ids) and now >= self.described_at + FOREIGN_S
        if self.description is not None and seen == self._seen and not is_foreign:
            return
        try:
            self.description, self.error = self.handle.described(self.state, topics.listing), None
        except PxrsError as error:
            self.error = error
        self._seen, self.described_at = seen, now


class GroupBook:
    """Used under the observer's lock."""

    def __init__(self, registry: Registry, topics: TopicBook, home: Callable[[], Home | None]) -> None:
        self._registry, self._topics, self._home = registry, topics, home
        self._watch = LateWatch(registry, ROOT)
        self.sources = SourceBook(registry)
        self.by_name: dict[str, WatchedGroup] = {}
        self._list_again = 0.0
        self._is_first = True
        self._is_due = False
        """Some group has changed, and the changes were not all read since: the last try failed."""
        self._due: dict[str, None] = {}
        """The groups among them, in the order in which they were found."""

    def there(self) -> list[tuple[str, WatchedGroup]]:
        """The groups that have members or checkpoints, in the order of their names."""
        return sorted((name, each) for name, each in self.by_name.items() if each.is_there)

    def add_named(self, names: Iterable[str], now: float) -> None:
        """Read the groups of these names that are not known yet: events have named them."""
        for name in names:
            if name not in self.by_name and GROUP_NAME.fullmatch(name) and not self._is_first:
                self._add(name)
                self._read(name, now)

    def refresh(self, now: float) -> None:
        self.sources.refresh()
        self._is_due = self._watch.wait(0) or self._is_due
        if self._is_first:
            self._read_all(now)
            self._is_first = self._is_due = False
        elif self._is_due:
            self._due |= {name: None for name, each in self.by_name.items() if self._has_changed(each, now)}
            if not self._due or now >= self._list_again:
                self._list(now)
            for name in list(self._due):
                self._read(name, now)
                del self._due[name]
            self._is_due = False
        for each in self.by_name.values():
            if each.state.is_there:
                each.describe(self._topics, self.sources, now)

    def find(self, name: str, now: float) -> GroupDescription:
        """Raises UnknownGroup, InvalidGroup, and the error with which the group could not be read."""
        found = self.by_name.get(name)
        if found is None:
            # Anybody may ask for any name: only a group of which there are records gets a watch, and stays.
            if not self._registry.scan(Keys(name).root, limit=1):
                raise UnknownGroup(name)
            self._add(name)
            self._read(name, now)
            found = self.by_name[name]
            found.describe(self._topics, self.sources, now)
        if found.error is not None:
            raise found.error
        if not found.state.is_there or found.description is None:
            raise UnknownGroup(name)
        return found.description

    def close(self) -> None:
        self._watch.close()
        self.sources.close()
        for each in self.by_name.values():
            if each.watch is not None:
                each.watch.close()

    def _has_changed(self, group: WatchedGroup, now: float) -> bool:
        if group.watch is None:
            return now >= group.read_at + UNWATCHED_S
        return group.watch.wait(0)

    def _read_all(self, now: float) -> None:
        """Read every group by two scans: the first tells their names, and the second is made once each group has its
        watch, so that no change after it is missed (R2)."""
        for name in dict.fromkeys(entry.key.split("/")[1] for entry in self._registry.scan(ROOT)):
            if GROUP_NAME.fullmatch(name) and name not in self.by_name:  # an earlier try may have failed midway
                self._add(name)
        by_group: dict[str, list[Entry]] = defaultdict(list)
        for entry in self._registry.scan(ROOT):
            by_group[entry.key.split("/")[1]].append(entry)
        for name in self.by_name:
            self._parse(name, by_group.get(name, ()), now)
        if by_group.keys() - self.by_name.keys():  # created between the two scans
            self._list(now)
        self._list_again = now + LIST_S

    def _list(self, now: float) -> None:
        """Find new groups: skip from the first key of one group to the next group; '0' is the character after '/'."""
        after = None
        while entries := self._registry.scan(ROOT, after, 1):
            name = entries[0].key.split("/")[1]
            after = f"{ROOT}{name}0"
            if name not in self.by_name and GROUP_NAME.fullmatch(name):
                self._add(name)
                self._due[name] = None
                self._read(name, now)
                del self._due[name]
        self._list_again = now + LIST_S

    def _add(self, name: str) -> None:
        handle = GroupHandle(self._registry, name, self._topics, (), self._home, self.sources)
        watched = sum(each.watch is not None for each in self.by_name.values())
        mine = watch(self._registry, Keys(name).root) if watched < WATCHES_MAX else None
        self.by_name[name] = WatchedGroup(handle, mine)

    def _read(self, name: str, now: float) -> None:
        self._parse(name, self._registry.scan(Keys(name).root), now)

    def _parse(self, name: str, entries: Iterable[Entry], now: float) -> None:
        group = self.by_name[name]
        group.reads, group.read_at = group.reads + 1, now
        try:
            group.take(GroupState.of(Keys(name), entries))
        except PxrsError as error:  # a record is damaged
            group.error = error
