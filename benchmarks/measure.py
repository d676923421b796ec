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

    def times(self, count: int) -> Figure:
        """The same for work that does `count` things at once."""
        return Figure(self.ratio, self.ours_per_s * count, self.reference_per_s * count)


def compare(ours: Work, reference: Work, *, times: int = 50, rounds: int = 15, before: Work = lambda: None) -> Figure:
    """The medians over the rounds; each round does both, `times` times each, after one of each to warm up.

    before: what comes before each one's turn, and is not measured.
    """

    def seconds(work: Work) -> float:
        before()
        began = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - began

    seconds(ours)
    seconds(reference)
    pairs = [(seconds(ours), seconds(reference)) for _ in range(rounds)]
    ratio = statistics.median(theirs / mine for mine, theirs in pairs)
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Figure(ratio, times / mine, times / theirs)
