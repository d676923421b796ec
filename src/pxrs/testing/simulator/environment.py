"""What the members of a simulated group share: the clock, the store, the faults of the network, and the checker.

A member, retention and an administrator all send their requests through `Environment.apply`, and take every random
decision from `Environment.rng`. So one seed decides the whole schedule.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Keys, ReadTopic
from pxrs.log.numbering import TopicPartition
from pxrs.registry.steps import Operation, Write
from pxrs.testing.simulator.ghost import Ghost
from pxrs.testing.simulator.settings import Settings, TopicSettings
from pxrs.testing.simulator.store import Request, SimulatedStore

TOPIC_NAMES: Final = ("orders", "returns", "refunds")
Alter = Callable[[Operation, Any, SimulatedStore], Operation]
"""Given an operation, the member that sends it and the store, returns the operation that is sent instead."""


class Environment:
    """The state of one schedule that is not of one member."""

    def __init__(
        self,
        seed: int,
        *,
        protocol: type[MemberProtocol] = MemberProtocol,
        alter: Alter | None = None,
        incarnation_of: Callable[[str, int], str] | None = None,
        counts_anew: bool | None = None,
        trace: int = 0,
    ) -> None:
        """The arguments after `seed` are those of `Defects`.

        trace: how many of the last events are kept in `events`."""
        self.seed = seed
        self.rng = random.Random(seed)
        self.settings = Settings.draw(self.rng)
        self.protocol = protocol
        self._alter, self._incarnation_of = alter, incarnation_of
        self.now = 0.0
        """The time of the store, in seconds. The clock of a member may be ahead of it."""
        self.steps = 0
        """How many steps the schedule has taken."""
        self.rates = self.settings.storm
        """How often which fault happens now."""
        self.store = SimulatedStore(
            self.rng,
            counts_anew=self.settings.counts_anew if counts_anew is None else counts_anew,
            scans_in_two_moments=self.settings.scans_in_two_moments,
        )
        self.keys = Keys("g")
        self.ghost = Ghost(self.keys, self.store)
        self.store.on_accepted = self.ghost.accepted
        # A generator of its own, so that the schedules in which all members have the same assignor stay as they are.
        self._assignor_rng = random.Random(f"{seed} assignors")
        self._assignors = self._assignor_rng.choice((("sticky",), ("sticky",), ("sticky", "range")))
        # A generator of its own too, so that drawing topics does not change the schedules of seeds with one topic.
        self._topics_rng = random.Random(f"{seed} topics")
        self.topic_settings = TopicSettings.draw(self._topics_rng)
        self.topics: list[ReadTopic] = [
            ReadTopic("", name, partitions)
            for name, partitions in zip(
                TOPIC_NAMES, (self.settings.partitions, *self.topic_settings.more_partitions), strict=False
            )
        ]
        """The topics that members read now. A topic that is created anew keeps its place and gets another id."""
        self.late: list[Request] = []
        """Writes whose sender has stopped waiting, and which the store may still apply."""
        self.before_write: Callable[[Request, Write], None] = lambda request, write: None
        """Called right before a write is applied, if `Rates.overtaken` says so."""
        self._serial = 0
        self._is_tracing = trace > 0
        self.events: deque[str] = deque(maxlen=trace or 1)
        """The last events, as `note` has recorded them."""

    def note(self, *what: object) -> None:
        """Record an event, if a trace was asked for."""
        if self._is_tracing:
            self.events.append(f"{self.steps:5d} {self.now:8.2f}s  {' '.join(map(str, what))}")

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def incarnation_of(self, name: str, serial: int) -> str:
        """The incarnation of a member that joins."""
        return f"{name}-{serial}" if self._incarnation_of is None else self._incarnation_of(name, serial)

    def assignor_of(self) -> str:
        """The assignor that a member is started with. If members differ, some are refused until they are given another
        one."""
        return self._assignor_rng.choice(self._assignors)

    def topics_of_new_member(self) -> tuple[int, ...]:
        """The topics that a new member reads: indexes into `topics`."""
        return self.topic_settings.draw_read(self._topics_rng)

    def places(self) -> list[TopicPartition]:
        """All partitions of the topics that exist now."""
        return [(topic.id, number) for topic in self.topics for number in range(topic.partitions)]

    def any_place(self) -> TopicPartition:
        """A partition of one of the topics, drawn at random."""
        places = self.places()
        return places[self.rng.randrange(len(places))]

    def altered(self, operation: Operation, member: object) -> Operation:
        """The operation as it is sent: changed if a test has given a defect that changes it."""
        return operation if self._alter is None else self._alter(operation, member, self.store)

    def strikes(self, rate: float) -> bool:
        """Whether a fault of this rate happens now."""
        return rate > 0.0 and self.rng.random() < rate

    def apply(self, request: Request) -> None:
        """Have the store apply the request; an older write of the same keys may be applied right before."""
        if isinstance(request.operation, Write) and self.strikes(self.rates.overtaken):
            self.before_write(request, request.operation)
        self.store.apply(request)
        self.note(
            request.incarnation, request.operation, "->", type(request.error).__name__ if request.error else "done"
        )

    def append(self) -> None:
        """A producer appends a few messages to some partition."""
        place = self.any_place()
        self.ghost.end[place] += self.rng.randint(1, 3)

    def apply_late(self) -> None:
        """Take one of the late writes; it is applied now, or never. Mostly the last one: the expectations of an older
        write hardly ever hold any more."""
        if self.late:
            request = self.late.pop(self.rng.randrange(len(self.late)) if self.rng.random() < 0.3 else -1)
            if self.rng.random() < 0.8:
                self.note("late:")
                self.apply(request)
