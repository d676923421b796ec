"""Times as people give them to options: `2026-01-31T12:00`, `10 minutes ago`, `2h ago`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

FORMS: Final = "a time such as 2026-01-31T12:00 (local time if it has no zone) or '10 minutes ago'"
"""What `moment` understands, for the help of options and for errors."""
_UNITS: Final = {
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_AGO: Final = re.compile(
    r"(\d{1,9}) ?(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?) ago", re.IGNORECASE | re.ASCII
)


_SHORT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")


def since(text: str) -> datetime | timedelta:
    """How long ago, for a text such as 90s, 30m, 1h or 7d; otherwise as `moment`. Raises ValueError."""
    found = _SHORT.fullmatch(text)
    try:
        return moment(text) if found is None else float(found[1]) * _UNITS[found[2]]
    except OverflowError:
        raise ValueError(f"{text!r} is too long ago") from None


def moment(text: str, now: datetime | None = None) -> datetime:
    """The time that the text stands for, with a zone. Raises ValueError.

    now: the time that `ago` counts back from; by default the time of day."""
    found = _AGO.fullmatch(text.strip())
    try:
        if found is not None:
            return (datetime.now(UTC) if now is None else now) - int(found[1]) * _UNITS[found[2][0].lower()]
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {FORMS}") from None
