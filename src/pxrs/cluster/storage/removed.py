"""The list of the parts of a journal that the node has removed, because it no longer needed any record in them.

Without this list, a segment that was deleted by mistake or lost by the file system could not be distinguished from one
that the node has removed. The list is one file beside the segments. It is replaced and synced before a segment is
unlinked. Adjacent ranges are merged, so the list stays short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from pxrs import disk

FILE: Final = "removed"
Ranges = list[tuple[int, int]]
"""Half-open ranges of positions in the journal, in rising order and not adjacent."""


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: Ranges = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def read(folder: str) -> Ranges | None:
    """The removed ranges; None if the file is damaged."""
    try:
        text = disk.read_with_checksum(f"{folder}/{FILE}")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        return None
    return None if text is None else [(begin, end) for begin, end in json.loads(text)]


def write(folder: str, ranges: Ranges) -> None:
    """Replace the list durably. Raises OSError."""
    disk.replace_file(f"{folder}/{FILE}", disk.with_checksum(json.dumps(ranges)), is_durable=True)
    disk.sync_folder(folder)


def is_within(ranges: Ranges, position: int) -> bool:
    return any(begin <= position < end for begin, end in ranges)


def segment_end(ranges: Ranges, bases: list[int], base: int) -> int | None:
    """The position at which the segment with this base ends: where the next segment or a removed range begins. None if
    it is the last segment."""
    following = [each for each in bases if each > base] + [begin for begin, _ in ranges if begin > base]
    return min(following, default=None)
