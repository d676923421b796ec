"""The lists of the parts of a journal that hold no records: one of those that the node has removed, because it no
longer needed any record in them, and one of those that were found damaged when the node started.

Without the first list, a segment that was deleted by mistake or lost by the file system could not be distinguished
from one that the node has removed. It is replaced and synced before a segment is unlinked. Adjacent ranges are merged,
so the list stays short.

A damaged range is added to the second list after the doubt about what it held was journaled (C7), so that the next
start does not take it for new damage. The damaged bytes stay in their segment until every entry that the node lacks has
its copies again; then the segment is compacted and unlinked, and the range leaves the list.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from pxrs import disk

FILE: Final = "removed"
LOST: Final = "lost"
FOUND: Final = "found"
"""The damaged ranges that a start has found, until it has written them to LOST. If it ends before that, the next start
reads them here: it could not tell itself which of them are torn, and would take a record with a torn body for an entry,
because of sealed segments it reads the headers only."""
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


class Lost(NamedTuple):
    """A damaged range of positions in the journal, half-open."""

    begin: int
    end: int
    is_torn: bool
    """Whether it may be the rest of a write that a power loss has cut off. If not, the disk or the file system has
    damaged it."""


def read(folder: str) -> Ranges | None:
    """The removed ranges; None if the file is damaged. Raises OSError."""
    found = _read(f"{folder}/{FILE}")
    return None if found is None else [(begin, end) for begin, end in found]


def write(folder: str, ranges: Ranges) -> None:
    """Replace the list durably. Raises OSError."""
    _write(folder, FILE, ranges)


def read_lost(folder: str, name: str = LOST) -> list[Lost] | None:
    """The damaged ranges, in rising order; None if the file is damaged. name: LOST or FOUND. Raises OSError."""
    found = _read(f"{folder}/{name}")
    return None if found is None else [Lost(*each) for each in found]


def write_lost(folder: str, ranges: Iterable[Lost], name: str = LOST) -> None:
    """Replace the list of damaged ranges durably. name: LOST or FOUND. Raises OSError."""
    _write(folder, name, sorted(ranges))


def forget_found(folder: str) -> None:
    """Everything that a start has found is in the list of damaged ranges. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{FOUND}")
        disk.sync_folder(folder)


def _read(path: str) -> list[Any] | None:
    try:
        text = disk.read_with_checksum(path)
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        return None
    except OSError as error:
        if error.errno not in disk.UNREADABLE:
            raise
        return None
    return None if text is None else list(json.loads(text))


def _write(folder: str, name: str, ranges: object) -> None:
    disk.replace_file(f"{folder}/{name}", disk.with_checksum(json.dumps(ranges)), is_durable=True)
    disk.sync_folder(folder)


def is_within(ranges: Ranges, position: int) -> bool:
    return any(begin <= position < end for begin, end in ranges)


def segment_end(ranges: Ranges, bases: list[int], base: int) -> int | None:
    """The position at which the segment with this base ends: where the next segment or a removed range begins. None if
    it is the last segment."""
    following = [each for each in bases if each > base] + [begin for begin, _ in ranges if begin > base]
    return min(following, default=None)
