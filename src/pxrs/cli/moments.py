"""Times as people give them to options: `2026-01-31T12:00`, `10 minutes ago`, `2h ago`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from pxrs.cli.amounts import UNITS_S, seconds_of

FORMS: Final = "a time such as 2026-01-31T12:00 (without a zone: this machine's) or '10 minutes ago'"
"""What `moment` understands, for the help of options and for errors."""
_AGO: Final = re.compile(
    r"(\d{1,9}) ?(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?) ago", re.IGNORECASE | re.ASCII
)


def since(text: str) -> datetime | timedelta:
    """How long ago, for a duration with a unit, such as 90s, 30m or 7d; otherwise as `moment`. Raises ValueError."""
    try:
        # Not a number alone: 20260131 is a day.
        return timedelta(seconds=seconds_of(text)) if text[-1:] in UNITS_S else moment(text)
    except OverflowError:
        raise ValueError(f"{text!r} is too long ago") from None


def moment(text: str, now: datetime | None = None) -> datetime:
    """The time that the text stands for, with a zone. Raises ValueError.

    now: the time that `ago` counts back from; by default the time of day."""
    found = _AGO.fullmatch(text.strip())
    try:
        if found is not None:
            ago = timedelta(seconds=int(found[1]) * UNITS_S[found[2][0].lower()])
            return (datetime.now(UTC) if now is None else now) - ago
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {FORMS}") from None
