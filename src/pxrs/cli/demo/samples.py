"""What the demo saw, and when; and the lines and bars that a chart makes of it. No drawing in here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    """Since the demo began."""
    sent: int
    """In the log."""
    handled: int
    """Checkpointed by the workers."""
    read: int | None
    """Checkpointed by the slowest of Spark's queries; None without Spark."""
    owners: tuple[str | None, ...]
    """By partition; None if nobody has it who is there."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Tenure:
    """An owner has a partition for a while."""

    partition: int
    owner: str
    begin_s: float
    end_s: float


Line = tuple[list[float], list[float]]
"""Times, and what there was."""


def rate(times: Sequence[float], counts: Sequence[float], width_s: float, step_s: float = 0.25) -> Line:
    """How fast a count rises, in each second: the mean over `width_s` around each point of time."""
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
    """Who had what from when to when: from the look that found it so first, to the one that found it otherwise."""
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
    """Between two looks, on the line between them."""
    after = bisect_right(times, at)
    if after == 0:
        return counts[0]
    if after == len(times):
        return counts[-1]
    begin, end = times[after - 1], times[after]
    part = (at - begin) / (end - begin)
    return counts[after - 1] + part * (counts[after] - counts[after - 1])
