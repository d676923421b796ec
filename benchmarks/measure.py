"""Two pieces of work measured in turn, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """`ratio` is our speed against the reference's: 1.0 is as fast, 0.5 half as fast."""

    ratio: float
    ours_per_s: float
    reference_per_s: float


def compare(ours: Work, reference: Work, *, times: int = 50, rounds: int = 15) -> Figure:
    """The medians over the rounds; each round does both, `times` times each, after one of each to warm up."""
    _seconds(ours, times)
    _seconds(reference, times)
    pairs = [(_seconds(ours, times), _seconds(reference, times)) for _ in range(rounds)]
    ratio = statistics.median(theirs / mine for mine, theirs in pairs)
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Figure(ratio, times / mine, times / theirs)


def _seconds(work: Work, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - began
