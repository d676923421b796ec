"""Pure: for how long nothing happened, from the moments at which something did."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Pause(NamedTuple):
    """The longest time without an event of a partition."""

    partition: int
    seconds: float


def longest(moments: Mapping[int, Sequence[float]], begin: float, end: float) -> Pause:
    """The longest time between two consecutive events of one partition, or between its last event and `end`, that ends
    after `begin` and begins before `end`. moments: of each partition, in order."""
    return max((Pause(partition, _longest(found, begin, end)) for partition, found in moments.items()), key=_seconds)


def _seconds(pause: Pause) -> float:
    return pause.seconds


def _longest(moments: Sequence[float], begin: float, end: float) -> float:
    first = bisect_right(moments, begin)
    before = moments[first - 1] if first else begin
    among = [before, *moments[first : bisect_right(moments, end)]]
    after = bisect_right(moments, end)
    among.append(moments[after] if after < len(moments) else end)
    return max(later - earlier for earlier, later in pairwise(among))
