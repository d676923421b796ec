"""What the parts of one broker share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pxrs.clock import SYSTEM, Clock
from pxrs.cluster.broker.membership import Membership
from pxrs.cluster.broker.reading import LedgerReader, Links
from pxrs.cluster.broker.recent import Recent
from pxrs.cluster.broker.room import Room
from pxrs.cluster.broker.view import View
from pxrs.cluster.placement import LEAST_LOADED, choose, ensemble, placement_named, storage_candidates
from pxrs.cluster.records import TopicRecord
from pxrs.events.model import Json
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.registry.contract import Registry


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What an operator can set; `pxrs broker` has an option for each."""

    append_s: float = 10.0
    """How long an append waits for its acknowledgements before its outcome is reported as unknown."""
    recovery_s: float = 30.0
    """How long a recovery waits for nodes before it is begun again."""
    recent_bytes: int = 256 << 20
    """How much of what was appended last is kept in memory for readers."""
    pending_bytes_max: int = 64 << 20
    """How many bytes of one partition may wait for acknowledgements; further appends wait."""
    unconfirmed_bytes_max: int = 128 << 20
    """How many bytes of all partitions together may wait for acknowledgements; further appends wait. At most half of
    `LinkSettings.unanswered_bytes_max` is used: see `room`."""
    openings_max: int = 16
    """How many partitions are opened at a time."""
    copies_grace_s: float = 10.0
    """How long a node may be away before its copies are made anew on others."""
    placement: str = LEAST_LOADED
    """Which function chooses the storage nodes of topics that are created through this broker (P9): `least loaded`,
    `round robin`, `random`, or the name of an entry point of the group `pxrs.placements`."""
    repairs_max: int = 2
    """How many ledgers get copies at a time."""


class News:
    """Records events of the broker. The hub that stores them is made after the broker's parts, which are given this."""

    def __init__(self) -> None:
        self.recorder: Recorder = LOGGED_ONLY

    def record(self, name: str, /, **fields: Json) -> None:
        """Never blocks on a disk or a network."""
        self.recorder.record(name, **fields)


@dataclass(frozen=True, slots=True)
class Broker:
    """What the parts of one broker share. Threads share it."""

    registry: Registry
    view: View
    membership: Membership
    links: Links
    reader: LedgerReader
    recent: Recent
    crew: ThreadPoolExecutor
    """For work that waits for the registry or for nodes, and for nothing else that a thread of the crew must do."""
    rollers: ThreadPoolExecutor
    """For ledgers that are closed and followed by the next one. This waits for commits, which the crew makes: on
    threads of the crew, many of them at once would wait for threads that they hold themselves."""
    room: Room
    settings: BrokerSettings = field(default_factory=BrokerSettings)
    clock: Clock = SYSTEM
    news: News = field(default_factory=News)
    turns: itertools.count[int] = field(default_factory=itertools.count)

    def ensemble(self, topic: TopicRecord) -> tuple[str | None, ...]:
        """The nodes of a new ledger; None where there is none."""
        placement = placement_named(topic.placement)
        return ensemble(placement, self.view.seen.takers, topic.quorum.ensemble, next(self.turns))

    def spares(self, topic: TopicRecord, without: Iterable[str]) -> list[str]:
        """The nodes that may take the place of another, the best first."""
        candidates = storage_candidates(self.view.seen.takers, without)
        return choose(placement_named(topic.placement), candidates, len(candidates), next(self.turns))
