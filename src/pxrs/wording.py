"""Parts of what people read: counts with their nouns, times, and text that anybody may have written."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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


def existing(names: Sequence[str]) -> str:
    """The first names that may have been meant, for an error about an unknown one; empty if there are none."""
    return f"existing: {', '.join(names[:10])}" if names else ""


def command(*words: object) -> str:
    """A command of `pxrs` that can be copied into a shell, such as `pxrs group describe billing`."""
    return shlex.join(["pxrs", *map(str, words)])


def decisions(group: str, topic: str, partition: int, place: Sequence[str] = ()) -> str:
    """The commands for a partition that is paused at a message: either lets the group continue.

    place: the options that name the hub on the command line."""
    retry, skip = (command("group", what, group, topic, partition, *place) for what in ("retry", "skip"))
    return f"`{retry}` or `{skip}`"


def paused_advice(group: str, paused: Sequence[tuple[str, int]], place: Sequence[str] = ()) -> str:
    """How a group continues whose partitions, each a topic and a number, are paused. place: as in `decisions`."""
    shown = f"; `{command('group', 'describe', group, *place)}` shows the others" if len(paused) > 1 else ""
    return f"continue with {decisions(group, *paused[0], place)}{shown}"


def time_text(seconds: float | None) -> str:
    """Wall-clock seconds since 1970 as a time in UTC, to the second: 2026-01-31 12:00:00Z; a dash if there is none."""
    time_us = microseconds(seconds)
    if time_us is None:
        return "-"
    text = rfc3339(time_us)
    return f"{time_us}us" if text is None else f"{text[:10]} {text[11:19]}Z"


def microseconds(seconds: float | None) -> int | None:
    """Wall-clock seconds since 1970 as whole microseconds. None for 0, which records of version 0.1 have where no time
    was written down, and for what is no number."""
    if not seconds or not math.isfinite(seconds):
        return None
    time_us = seconds * 1e6
    return round(time_us) if math.isfinite(time_us) else int(seconds) * 1_000_000  # more than a float can hold


def rfc3339(time_us: int) -> str | None:
    """A wall-clock time, in microseconds since 1970, as RFC 3339 writes it in UTC: 2026-01-31T12:00:00.123456Z. None if
    the calendar does not go as far: it has the years 1 to 9999."""
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
