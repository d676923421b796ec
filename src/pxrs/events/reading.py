"""Reads events from an internal topic, oldest first, and follows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from pxrs.errors import InvalidArgument, OffsetTrimmed, UnknownTopic
from pxrs.events.model import Event
from pxrs.events.names import ADOPTED_REGISTRY
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.contract import Log, TopicLog
from pxrs.model import microseconds_of

WAIT_S: Final = 0.5
"""How often a reader that follows looks whether the topic was created, or the hub closed."""

Since = float | timedelta | datetime | None
"""From when on: a time with a time zone, or how long ago, in seconds or as a timedelta."""


class Wanted(NamedTuple):
    """Which events are read."""

    group: str | None = None
    topic: str | None = None
    since_us: int | None = None
    """Events of that time or later, in microseconds since 1970; None: all."""

    def takes(self, event: Event) -> bool:
        fields = event.fields
        if self.since_us is not None and event.at < self.since_us:
            return False
        if event.name == ADOPTED_REGISTRY:  # concerns all groups and topics
            return True
        if self.group is not None and fields.get("group") != self.group:
            return False
        return self.topic is None or self.topic in (fields.get("topic"), *_names(fields.get("topics")))


def _names(topics: object) -> tuple[object, ...]:
    return tuple(topics) if isinstance(topics, list) else ()


def since_us(since: Since, now_us: int) -> int | None:
    """The time that `since` stands for, in microseconds since 1970. Raises InvalidArgument."""
    if since is None:
        return None
    if isinstance(since, datetime):
        if since.tzinfo is None:
            raise InvalidArgument(f"since is {since!r}: give a time with a time zone")
        return microseconds_of(since)
    seconds = since.total_seconds() if isinstance(since, timedelta) else since
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e11:
        raise InvalidArgument(f"since is {since!r}: give a time, or an age in seconds or as a timedelta")
    return now_us - int(seconds * 1e6)


def read(log: Log, name: str, wanted: Wanted, check: Callable[[], None], *, follow: bool) -> Iterator[Event]:
    """The events of the internal topic of this name, oldest first. With `follow` it waits for further ones.

    check: raises if the hub was closed; called while it waits."""
    while (topic := _open(log, name, check, follow=follow)) is not None:
        try:
            yield from _read(topic, wanted, check, follow=follow)
            return
        except UnknownTopic:  # somebody has deleted it; the next event makes another one
            if not follow:
                return


def _read(topic: TopicLog, wanted: Wanted, check: Callable[[], None], *, follow: bool) -> Iterator[Event]:
    positions = {number: _first(topic, number, wanted.since_us) for number in range(topic.partitions)}
    while True:
        before = dict(positions)
        found = [event for number in before for event in _take(topic, number, positions)]
        found.sort(key=lambda event: event.at)  # stable: events of the same time stay as they were stored
        yield from filter(wanted.takes, found)
        if positions != before:
            continue
        if not follow:
            return
        while not wait_for_messages(topic, positions, WAIT_S):
            check()


def _open(log: Log, name: str, check: Callable[[], None], *, follow: bool) -> TopicLog | None:
    while True:
        check()
        try:
            return log.topic(name)
        except UnknownTopic:  # nothing was recorded yet
            if not follow:
                return None
        time.sleep(WAIT_S)


def _first(topic: TopicLog, partition: int, since: int | None) -> int:
    return topic.start(partition) if since is None else topic.offset_at(partition, since)


def _take(topic: TopicLog, partition: int, positions: dict[int, int]) -> list[Event]:
    """The next events of a partition; its position is moved behind them."""
    try:
        batches = topic.read(partition, positions[partition])
    except OffsetTrimmed as error:  # retention has removed some
        positions[partition] = error.first_offset
        batches = topic.read(partition, error.first_offset)
    found = []
    for batch in batches:
        positions[partition] = batch.next_offset
        events = map(Event.load, batch.records.column("value").to_pylist())
        found += [event for event in events if event is not None]
    return found
