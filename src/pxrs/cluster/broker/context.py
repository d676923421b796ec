"""The settings of a broker, and the objects that its parts share."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pxrs.clock import SYSTEM, Clock
from pxrs.cluster.broker.membership import Membership
from pxrs.cluster.broker.reading import LedgerReader, Links
from pxrs.cluster.broker.recent import Recent
from pxrs.cluster.broker.room import Room
from pxrs.cluster.broker.view import View
from pxrs.cluster.placement import (
    LEAST_LOADED,
    Placement,
    choose,
    ensemble,
    placement_named,
    storage_candidates,
)
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.troubles import BadPlacement
from pxrs.errors import InvalidPlacement
from pxrs.events.model import Json
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.limited_log import LimitedLog
from pxrs.registry.contract import Registry

PLACEMENT_S: Final = 120.0
"""For how long a failure of a placement function is reported, unless the function works before. Repairs and openings
call it again within a minute."""

T = TypeVar("T")
_log: Final = LimitedLog(logging.getLogger(__name__), records_max=1)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Settings of a broker. Some of them are options of `pxrs broker`."""

    append_s: float = 10.0
    """How long an append waits for acknowledgements before its outcome is reported as unknown."""
    recovery_s: float = 30.0
    """How long a recovery waits for nodes before it fails and is begun again."""
    recent_bytes: int = 256 << 20
    """The size of the cache of the most recently appended entries."""
    pending_bytes_max: int = 64 << 20
    """Maximum number of unacknowledged bytes of one partition; further appends wait."""
    unconfirmed_bytes_max: int = 128 << 20
    """Maximum number of unacknowledged bytes of all partitions together; further appends wait. At most half of
    `LinkSettings.unanswered_bytes_max` is used: see `room`."""
    openings_max: int = 16
    """Maximum number of partitions that are opened at a time."""
    copies_grace_s: float = 10.0
    """How long a storage node may be away before its copies are created again on other nodes."""
    placement: str = LEAST_LOADED
    """The placement function of topics that are created through this broker (P9): `least loaded`, `round robin`,
    `random`, or the name of an entry point of the group `pxrs.placements`."""
    repairs_max: int = 2
    """Maximum number of ledgers that are repaired at a time."""


class News:
    """Records the events of the broker. The hub's recorder is set later, because the hub is created after the broker's
    parts that use this object; until then events are only logged."""

    def __init__(self) -> None:
        self.recorder: Recorder = LOGGED_ONLY

    def record(self, name: str, /, **fields: Json) -> None:
        """Record an event, without waiting for a disk or a network."""
        self.recorder.record(name, **fields)


class Placements:
    """Which topics' placement functions have failed. The functions may be a user's. Threads share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: dict[str, tuple[float, str]] = {}
        """By topic id: when the function failed last, and how."""

    def call(self, topic: TopicRecord, use: Callable[[Placement], T]) -> T:
        """What `use` returns when it is given the topic's placement function. Raises InvalidPlacement, whatever the
        function raises."""
        try:
            found = use(placement_named(topic.placement))
        except Exception as raised:
            what = f"the placement function {topic.placement!r} failed: {raised!r}"
            error = raised if isinstance(raised, InvalidPlacement) else InvalidPlacement(what)
            with self._lock:
                self._failed[topic.topic.id] = self._clock(), f"{error}"
            _log.log(topic.topic.id, logging.ERROR, "topic %s: %s", topic.topic.name, error, exc_info=raised)
            if error is raised:
                raise
            raise error from raised
        if topic.topic.id in self._failed:
            with self._lock:
                self._failed.pop(topic.topic.id, None)
        return found

    @property
    def failed(self) -> list[BadPlacement]:
        """Of the last PLACEMENT_S."""
        since = self._clock() - PLACEMENT_S
        with self._lock:
            self._failed = {topic: found for topic, found in self._failed.items() if found[0] > since}
            return [BadPlacement(topic, why) for topic, (_, why) in self._failed.items()]


@dataclass(frozen=True, slots=True)
class Broker:
    """The objects that the parts of one broker share. Threads share it."""

    registry: Registry
    view: View
    membership: Membership
    links: Links
    reader: LedgerReader
    recent: Recent
    crew: ThreadPoolExecutor
    """A pool of threads for work that waits for the registry or for storage nodes. Work on it must not wait for other
    work on it."""
    rollers: ThreadPoolExecutor
    """A pool of threads that close full ledgers and begin the next ones. This waits for commits, which run on `crew`:
    on threads of `crew` itself, many of them at once would occupy all threads that they wait for."""
    room: Room
    settings: BrokerSettings = field(default_factory=BrokerSettings)
    clock: Clock = SYSTEM
    news: News = field(default_factory=News)
    turns: itertools.count[int] = field(default_factory=itertools.count)
    """The numbers of placement decisions (`placement.Placement`)."""
    placements: Placements = field(default_factory=Placements)

    def ensemble(self, topic: TopicRecord) -> tuple[str | None, ...]:
        """The node at each position of a new ledger; None where there is none. Raises InvalidPlacement."""
        takers, size = self.view.seen.takers, topic.quorum.ensemble
        return self.placements.call(topic, lambda placement: ensemble(placement, takers, size, next(self.turns)))

    def spares(self, topic: TopicRecord, without: Iterable[str]) -> list[str]:
        """The nodes, except those in `without`, that may replace another node, the best first. Raises
        InvalidPlacement."""
        candidates = storage_candidates(self.view.seen.takers, without)
        return self.placements.call(
            topic, lambda placement: choose(placement, candidates, len(candidates), next(self.turns))
        )
