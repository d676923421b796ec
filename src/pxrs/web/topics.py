"""The topics of a hub as they were last looked at: their settings, their offsets, and how fast they grow.

Looking costs a few system calls for each partition, or a call to the server for each topic. So the list of topics is
read at most every `LIST_S`, and one look takes at most about `LOOK_S`: topics that have changed lately, and those that
somebody asked for, come first; the others take turns. The first look takes as long as it needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pxrs.errors import LogError, NoDirectory, PxrsError, ReadFailed, UnknownTopic
from pxrs.group.readables import Listing
from pxrs.log.contract import Bounds, DamagedTopic, Log, TopicLog
from pxrs.model import Topic

LIST_S: Final = 2.0
LOOK_S: Final = 0.05
RATE_S: Final = 10.0
"""Rates are averages over this time, or over the time since the last look if that is longer."""
WARM_S: Final = 15.0
"""For how long after a change, or after somebody asked for it, a topic is looked at each time."""


class Glanced:
    """A topic with the offsets of the last look: what the description of a group needs of a topic."""

    has_gaps = False

    def __init__(self, log: TopicLog) -> None:
        self.log, self.topic = log, log.topic
        self.name, self.id, self.partitions = log.name, log.id, log.partitions
        self.keeps_unread = log.keeps_unread
        self.found: tuple[Bounds, ...] | None = None
        """The bounds of all partitions; None before the first look, and if that failed."""
        self.error: PxrsError | None = None
        """Why the last look failed."""
        self.changes = 0
        """Rises whenever `found` or `error` changes."""
        self.messages: int | None = None
        """How many messages `found` has in all."""
        self.samples: deque[tuple[float, tuple[Bounds, ...]]] = deque()
        """The time (`time.monotonic`) and the bounds of the looks within `RATE_S`, and of the last one before."""
        self.warm_until = 0.0

    def bounds(self, partitions: Iterable[int]) -> Mapping[int, Bounds]:
        """As of the last look. Raises the error of that."""
        if self.found is None:
            raise self.error or ReadFailed(f"{self.name} has not been read yet")
        return {number: self.found[number] for number in partitions}

    def offset_at(self, partition: int, timestamp: int) -> int:
        return self.log.offset_at(partition, timestamp)

    def look(self, now: float) -> None:
        try:
            found, error = tuple(self.log.glance()), None
        except PxrsError as failure:
            found, error = None, failure
        if found == self.found:
            found = self.found  # the same object as in the sample before, so that `rates` sees at once that it is
        if found is not self.found or str(error) != str(self.error):
            if self.changes:
                self.warm_until = now + WARM_S
            self.changes += 1
            self.messages = None if found is None else sum(each.end - each.start for each in found)
        self.found, self.error = found, error
        if found is not None:
            self.samples.append((now, found))
            while len(self.samples) > 2 and self.samples[1][0] < now - RATE_S:
                self.samples.popleft()

    def rates(self) -> list[float] | None:
        """Messages a second of each partition; None before the second look."""
        if len(self.samples) < 2:
            return None
        (began, before), (now, after) = self.samples[0], self.samples[-1]
        if before is after:
            return [0.0] * self.partitions
        span = max(now - began, 1e-9)
        return [max(0.0, (new.end - old.end) / span) for old, new in zip(before, after, strict=True)]


@dataclass(slots=True)
class TopicBook:
    """Used under the observer's lock. It is the `Topics` that descriptions of groups are made with."""

    log: Log
    by_name: dict[str, Glanced] = field(default_factory=dict)
    by_id: dict[str, Glanced] = field(default_factory=dict)
    damaged: list[DamagedTopic] = field(default_factory=list)
    listed: int = 0
    """Rises whenever a topic was created or deleted, or became damaged."""
    listing: Listing = field(default_factory=lambda: Listing({}, {}))
    """`by_name` and `damaged` by id."""
    _list: list[Topic] = field(default_factory=list)
    _list_again: float = 0.0
    _cursor: int = 0
    _is_first: bool = True

    def refresh(self, now: float) -> None:
        if now >= self._list_again:
            began = time.monotonic()
            self._read_list()
            self._list_again = now + max(LIST_S, 20 * (time.monotonic() - began))
        until = float("inf") if self._is_first else time.monotonic() + LOOK_S
        self._is_first = False
        everything = list(self.by_name.values())
        warm = [each for each in everything if each.warm_until > now or not each.changes]
        for each in warm:
            each.look(now)
        done = set(map(id, warm))
        for _ in range(len(everything)):
            if time.monotonic() >= until:
                break
            self._cursor = (self._cursor + 1) % len(everything)
            if id(each := everything[self._cursor]) not in done:
                each.look(now)

    def _read_list(self) -> None:
        try:
            found, damaged = self.log.topics(), list(self.log.damaged_topics())
        except NoDirectory:
            found, damaged = [], []
        is_same = _identities(found, damaged) == _identities(self._list, self.damaged)
        self.damaged = damaged
        if is_same:
            if found != self._list:  # a setting was altered
                self._list = found
                for topic in found:
                    self.by_name[topic.name].topic = topic
            return
        self.listed += 1
        kept: dict[str, Glanced] = {}
        for topic in found:
            known = self.by_name.get(topic.name)
            if known is not None and known.id == topic.id:
                known.topic = topic
                kept[topic.name] = known
                continue
            try:
                kept[topic.name] = Glanced(self.log.topic(topic.name))
            except (UnknownTopic, LogError):  # deleted or damaged meanwhile: the next list has it so
                continue
        self.by_name, self.by_id = kept, {each.id: each for each in kept.values()}
        self._list = [each.topic for each in kept.values()]
        self.listing = Listing.of(self)

    def ask_for(self, name: str, now: float) -> Glanced:
        """The topic, looked at now and for a while at every refresh. Raises UnknownTopic."""
        found = self.by_name.get(name)
        if found is None:
            self._list_again = 0.0
            self.refresh(now)
            found = self.by_name.get(name)
        if found is None:
            raise UnknownTopic(name, list(self.by_name)[:20])
        found.warm_until = now + WARM_S
        return found

    # The protocol `pxrs.group.readables.Topics`.

    def topics(self) -> Sequence[Topic]:
        return self._list

    def damaged_topics(self) -> Sequence[DamagedTopic]:
        return self.damaged

    def topic(self, name: str) -> Glanced:
        """Raises UnknownTopic."""
        found = self.by_name.get(name)
        if found is None:
            raise UnknownTopic(name, [])
        return found


def _identities(topics: Iterable[Topic], damaged: Iterable[DamagedTopic]) -> list[tuple[str, str | None]]:
    return [*((each.name, each.id) for each in topics), *((each.name, each.id) for each in damaged)]
