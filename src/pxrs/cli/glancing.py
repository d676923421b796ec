"""All topics and groups of a hub, for commands that look at every one of them again and again: `pxrs metrics` and `pxrs
top`.

An open partition of a directory takes up to three descriptors, and a hub may have ten thousand partitions. So each
topic is looked at with `TopicLog.glance`, which keeps no file open. After a start of the machine, and until some
process opens the topic, what is seen so may be behind the last message. If a group has read further, the topic is
opened here, which finds the end, and closed again: one topic at a time. The records of all groups are read by one scan,
in pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, Final

from pxrs.address import open_log
from pxrs.errors import DamagedFrame, HubMoved, LogError, LogNotReadable, NoDirectory, UnknownTopic
from pxrs.group.records import GROUP_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from pxrs.group.snapshot import GroupState
    from pxrs.log.contract import Bounds, DamagedTopic, Log, TopicLog
    from pxrs.log.numbering import TopicPartition
    from pxrs.model import Topic
    from pxrs.registry.contract import Entry, Registry

GROUP_PAGE: Final = 1_000
"""How many keys of groups are read in one call."""


def group_entries(registry: Registry) -> Iterator[tuple[str, list[Entry]]]:
    """The names of all groups of which there is a record, in order, and their records."""
    for name, entries in groupby(_entries(registry), lambda entry: entry.key.split("/")[1]):
        if GROUP_NAME.fullmatch(name):
            yield name, list(entries)


def _entries(registry: Registry) -> Iterator[Entry]:
    after: str | None = None
    while page := registry.scan("groups/", after, GROUP_PAGE):
        yield from page
        if len(page) < GROUP_PAGE:
            return
        after = page[-1].key


class Reached:
    """The highest checkpoint of any group in each partition."""

    def __init__(self, groups: Iterable[GroupState]) -> None:
        self._offsets: dict[TopicPartition, int] = {}
        for state in groups:
            for place, (checkpoint, _) in state.checkpoints.items():
                self._offsets[place] = max(checkpoint.offset, self._offsets.get(place, 0))

    def is_beyond(self, topic_id: str, found: list[Bounds]) -> bool:
        """Whether a group has read further than the end of a partition that was found."""
        return any(self._offsets.get((topic_id, number), 0) > each.end for number, each in enumerate(found))


def bounds_of(log: TopicLog, folder: Path | None, reached: Reached) -> list[Bounds]:
    """The start and the end of each partition. folder: the directory of the hub, None if it is in none of this host.
    Call it after the checkpoints were read. Raises LogError."""
    found = log.glance()
    if folder is None or not reached.is_beyond(log.id, found):
        return found
    with closing(open_log(folder)) as opened:
        again = opened.topic(log.name)
        return found if again.id != log.id else list(again.bounds(range(again.partitions)).values())


class SeenTopic:
    """A topic with the offsets that were found: what the description of a group needs of it."""

    has_gaps = False

    def __init__(self, log: TopicLog) -> None:
        self._log = log
        self.name, self.id, self.partitions, self.keeps_unread = log.name, log.id, log.partitions, log.keeps_unread
        self.found: list[Bounds] = []
        self.error: LogError | None = None
        """Why the offsets are not known."""

    def bounds(self, partitions: Iterable[int]) -> Mapping[int, Bounds]:
        if self.error is not None:
            raise self.error
        return {number: self.found[number] for number in partitions}

    def offset_at(self, partition: int, timestamp: int) -> int:
        return self._log.offset_at(partition, timestamp)


def _look(log: Log, name: str, reached: Reached) -> SeenTopic:
    topic = log.topic(name)
    seen = SeenTopic(topic)
    try:
        seen.found = bounds_of(topic, log.folder, reached)
    except (HubMoved, UnknownTopic):
        raise
    except LogError as error:
        seen.error = error
    return seen


class SeenTopics:
    """All topics of a log as they were at one look; the `Topics` that descriptions of groups are made with."""

    def __init__(self, log: Log, reached: Reached) -> None:
        self.by_name: dict[str, SeenTopic] = {}
        try:
            self._topics, self._damaged = log.topics(), log.damaged_topics()
        except NoDirectory:  # the hub was opened by its registry alone
            self._topics, self._damaged = [], []
        for topic in self._topics:
            try:
                self.by_name[topic.name] = _look(log, topic.name, reached)
            except (UnknownTopic, DamagedFrame, LogNotReadable):
                continue  # deleted, damaged or made unreadable since it was listed

    def topics(self) -> list[Topic]:
        return self._topics

    def damaged_topics(self) -> list[DamagedTopic]:
        return self._damaged

    def topic(self, name: str) -> SeenTopic:
        """Raises UnknownTopic."""
        found = self.by_name.get(name)
        if found is None:
            raise UnknownTopic(name, [])
        return found
