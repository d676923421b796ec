"""The settings of one schedule, drawn from its seed: sizes of the group, and how often which fault happens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

TTL_S: Final = 10.0
"""The ttl of every lease."""
MEMBERS_MAX: Final = 6
EVENTS: Final = (
    *("leave", "crash", "crash", "crash the leader", "stop", "stop", "stop"),
    *("replace", "jump", "renewals fail", "hang", "reset", "retain", "fail", "fail"),
)
"""The kinds of events, a frequent one several times. `Storm` performs them."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How often things fail: probabilities for each operation, or for each step."""

    slow: float = 0.0
    """An operation takes several steps."""
    unanswered_read: float = 0.0
    """A read is not answered."""
    unavailable: float = 0.0
    """A write is refused, and nothing was done."""
    timeout: float = 0.0
    """The sender of a write stops waiting before the store has applied the write, which may still be applied later."""
    lost_reply: float = 0.0
    """A write is applied, and its sender does not learn that."""
    overtaken: float = 0.0
    """Right before a write, an older write of the same keys is applied: one whose sender stopped waiting, or that of a
    stopped member."""
    event: float = 0.0
    """A member joins, leaves, crashes, stops, ..."""


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The topics that the members of one schedule read, beside the first one."""

    more_partitions: tuple[int, ...] = ()
    """How many partitions each further topic has."""
    sets_differ: bool = False
    """Whether members read different topics: each one, some of them."""

    @classmethod
    def draw(cls, rng: random.Random) -> TopicSettings:
        """rng: a generator of its own, so that the schedules of one topic stay as they are."""
        count = rng.choice((0, 0, 0, 1, 1, 2))
        return cls(tuple(rng.choice((1, 2, 3)) for _ in range(count)), count > 0 and rng.random() < 0.5)

    def draw_read(self, rng: random.Random) -> tuple[int, ...]:
        """Which topics a new member reads, by their places in the list of topics; in any order."""
        everything = range(1 + len(self.more_partitions))
        if not self.more_partitions:
            return tuple(everything)
        return tuple(rng.sample(everything, rng.randint(1, len(everything)) if self.sets_differ else len(everything)))


@dataclass(frozen=True, slots=True)
class Settings:
    """What is fixed for one schedule."""

    partitions: int
    """Of the first topic; `TopicSettings` has those of further ones."""
    handover_s: float
    """After how many seconds the leader fences an owner that does not release."""
    keys_max: int
    """How many keys one commit may name."""
    in_hand_max: int
    """How many messages of a partition a handler has in hand at a time."""
    starts_latest: bool
    """Whether a group without a checkpoint begins at the end of the topic."""
    pace_s: float
    """How much time passes at once, on average."""
    burst_max: int
    """How many steps one member takes in a row."""
    members_max: int
    storm: Rates
    """The rates before the faults end."""
    kinds: tuple[str, ...]
    """The kinds of events that happen in this schedule."""
    counts_anew: bool
    """Each key counts its own versions, from the beginning again when it is created again, as in ZooKeeper."""
    scans_in_two_moments: bool
    """A scan sees each key as it was at one of two moments, as R1 allows."""

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        """Draw all settings. In a fixed order: a seed must always give the same schedule."""
        return cls(
            partitions=rng.choice((1, 2, 3, 4, 5, 6, 8)),
            handover_s=rng.choice((1.0, 5.0, 30.0, 10_000.0)),
            keys_max=rng.choice((2, 3, 5, 64)),
            in_hand_max=rng.choice((1, 3)),
            starts_latest=rng.random() < 0.5,
            pace_s=rng.choice((0.3, 0.6, 1.2)),
            burst_max=rng.choice((1, 4, 12)),
            members_max=rng.choice((3, 3, 4, MEMBERS_MAX)),
            storm=Rates(
                slow=rng.choice((0.0, 0.1, 0.4)),
                unanswered_read=rng.choice((0.0, 0.005, 0.02)),
                unavailable=rng.choice((0.0, 0.02)),
                timeout=rng.choice((0.0, 0.05, 0.25)),
                lost_reply=rng.choice((0.0, 0.05, 0.15)),
                overtaken=rng.choice((0.0, 0.2, 0.5)),
                event=rng.choice((0.015, 0.03, 0.06)),
            ),
            # Not all kinds in every schedule: some defects need many faults of one kind and none of another.
            kinds=("join", "join", *rng.sample(EVENTS, rng.randint(1, len(EVENTS)))),
            counts_anew=rng.random() < 0.3,
            scans_in_two_moments=rng.random() < 0.4,
        )
