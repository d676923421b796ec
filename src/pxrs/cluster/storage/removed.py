"""Which parts of a journal were removed because nothing in them counted any more.

Without this list, a segment file that somebody deleted or that a file system lost could not be told from one that the
node itself has removed. The list is one file beside the segments; it is replaced, and synced, before a segment file is
unlinked. Ranges that touch are one range, so the list stays short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from pxrs import disk

FILE: Final = "removed"
Ranges = list[tuple[int, int]]
"""Half-open ranges of positions in the journal, in rising order, that do not touch."""


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: Ranges = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def read(folder: str) -> Ranges | None:
    """The ranges that were removed; None if the file is damaged."""
    try:
        text = disk.read_with_checksum(f"{folder}/{FILE}")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        return None
    return None if text is None else [(begin, end) for begin, end in json.loads(text)]


def write(folder: str, ranges: Ranges) -> None:
    """Returns when it is durable. Raises OSError."""
    disk.replace_file(f"{folder}/{FILE}", disk.with_checksum(json.dumps(ranges)), is_durable=True)
    disk.sync_folder(folder)


def is_within(ranges: Ranges, position: int) -> bool:
    return any(begin <= position < end for begin, end in ranges)


def segment_end(ranges: Ranges, bases: list[int], base: int) -> int | None:
    """Where the segment with this base ends: where the next one, or a range that was removed, begins. None if it is the
    last one."""
    following = [each for each in bases if each > base] + [begin for begin, _ in ranges if begin > base]
    return min(following, default=None)
