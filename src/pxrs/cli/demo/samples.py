"""What the demo observed and when, and the lines and bars of the chart as numbers. Nothing is drawn here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    """Seconds since the demo began."""
    sent: int
    """How many messages are in the log."""
    handled: int
    """How many messages the checkpoints of the workers cover."""
    read: int | None
    """How many messages the checkpoints of the slowest query of Spark cover; None without Spark."""
    owners: tuple[str | None, ...]
    """The owner of each partition; None if there is none, or if it is gone."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event to mark in the chart."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Tenure:
    """The time during which a member owned a partition."""

    partition: int
    owner: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """A time to mark in the chart: in the panel of the owners."""

    begin_s: float
    end_s: float
    text: str


Line = tuple[list[float], list[float]]
"""Times, and the value at each time."""


def rate(times: Sequence[float], counts: Sequence[float], width_s: float, step_s: float = 0.25) -> Line:
    """The rate of a count per second: the mean over `width_s` around each time."""
    if len(times) < 2:
        return [], []
    first, last = times[0], times[-1]
    points = [first + step * step_s for step in range(int((last - first) / step_s) + 1)]
    values = []
    for at in points:
        begin, end = at - width_s / 2, at + width_s / 2
        values.append((_count_at(times, counts, end) - _count_at(times, counts, begin)) / width_s)
    return points, values


def tenures(samples: Sequence[Sample]) -> list[Tenure]:
    """Which member owned which partition, from the first sample that shows it to the first one that does not."""
    found: list[Tenure] = []
    since: dict[int, tuple[str, float]] = {}

    def close(partition: int, at_s: float) -> None:
        if partition in since:
            owner, begin_s = since.pop(partition)
            found.append(Tenure(partition, owner, begin_s, at_s))

    for sample in samples:
        for partition, owner in enumerate(sample.owners):
            if partition in since and since[partition][0] == owner:
                continue
            close(partition, sample.at_s)
            if owner is not None:
                since[partition] = owner, sample.at_s
    for partition in list(since):
        close(partition, samples[-1].at_s)
    return sorted(found, key=lambda tenure: (tenure.partition, tenure.begin_s))


def _count_at(times: Sequence[float], counts: Sequence[float], at: float) -> float:
    """The count at a time, interpolated between two samples."""
    after = bisect_right(times, at)
    if after == 0:
        return counts[0]
    if after == len(times):
        return counts[-1]
    begin, end = times[after - 1], times[after]
    part = (at - begin) / (end - begin)
    return counts[after - 1] + part * (counts[after] - counts[after - 1])
