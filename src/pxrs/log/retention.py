"""The time at which a batch or a segment of a partition was stored, by which retention counts its age."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

NO_TIME: Final = -(1 << 63)
"""The time of a piece that has none: before every other time."""
ANY_TIME: Final = (1 << 63) - 1
"""The time of a damaged piece, which no retention by age removes: after every other time."""


def credible_time(stored: Sequence[int], at: int, now: int) -> int:
    """When the piece number `at` of a partition was stored. stored: the times of all pieces, in the order in which they
    were stored.

    A time later than `now` comes from a clock that was ahead. The piece was stored before those behind it, so the time
    of the next piece that is not later than `now` is used instead. Otherwise the piece, and all behind it, would be
    kept for as long as that clock was ahead. ANY_TIME is no such time: a damaged segment has it, and is kept."""
    return next((time for time in islice(stored, at, None) if time <= now or time == ANY_TIME), stored[at])
