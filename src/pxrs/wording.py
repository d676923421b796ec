"""Parts of what people read: counts with their nouns, times, and text that anybody may have written."""

from __future__ import annotations

import re
from typing import Final

from pxrs.clock import microseconds, rfc3339

# Control characters other than the tab, line and paragraph separators, and the characters that change the direction of
# writing. Each of them could move a terminal's cursor, ring its bell, set a colour, or disguise a line.
_UNSAFE: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text on one line, with characters that a terminal would act upon escaped as Python writes them: a bell is
    \\x07."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count and what was counted: "1 message", "2,000 messages". plural: by default the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def time_text(seconds: float | None) -> str:
    """Wall-clock seconds since 1970 as a time in UTC, to the second: 2026-01-31 12:00:00Z; a dash if there is none."""
    time_us = microseconds(seconds)
    if time_us is None:
        return "-"
    text = rfc3339(time_us)
    return f"{time_us}us" if text is None else f"{text[:10]} {text[11:19]}Z"
