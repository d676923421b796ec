"""When a piece of a partition (a batch, a segment) was stored, as retention counts its age."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

NO_TIME: Final = -(1 << 63)
"""Before every time: of a piece that has none."""
ANY_TIME: Final = (1 << 63) - 1
"""After every time: of a damaged piece, which no retention by age removes."""


def credible_time(stored: Sequence[int], at: int, now: int) -> int:
    """When the piece number `at` of a partition was stored, of pieces that were stored in this order at these times.

    A time later than `now` was given by a clock that was ahead. The piece was stored before those behind it, so the
    time of the next one that is not later than `now` stands for it. Else it would keep itself and all behind it from
    being removed for as long as that clock was ahead. ANY_TIME is no such time: a damaged segment has it, and stays."""
    return next((time for time in islice(stored, at, None) if time <= now or time == ANY_TIME), stored[at])
