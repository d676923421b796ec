"""What a damaged segment is replaced by, so that readers go on behind the damage. Pure: it looks at bytes.

A segment is read up to the offset at which the next one begins. So a damaged segment need not be changed: a new
segment that begins at the first offset that cannot be read takes the place of everything behind that. It consists of
the whole frames of the old one and, for the offsets that are lost, of gaps, which readers pass over (docs/format.md).
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from pxrs.log.batch import GAP_ROWS_MAX, gap_bytes
from pxrs.log.directory.scanning import scan, whole_behind

OFFSET_MAX = (1 << 63) - 1


class Lost(NamedTuple):
    """Offsets whose messages cannot be read any more."""

    offset: int
    next_offset: int
    what: str


class Mended(NamedTuple):
    """The segment that takes the place of what is damaged in another one."""

    base: int
    """Its first offset: where the readable part of the old segment ends."""
    content: bytes
    end: int
    lost: list[Lost]


def mend(
    data: pa.Buffer,
    path: str,
    base: int,
    place: int,
    *,
    end: int | None,
    end_min: int,
    torn: int,
    stored_at: int,
) -> Mended | None:
    """What takes the place of the damage in the segment with this content; None if nothing is damaged. Raises
    MisplacedFile if the segment belongs to another partition or has another one's name.

    data:    the bytes of the segment that were published, or are there.
    end:     the offset at which it must end; None if that is not known: then where its last whole frame ends.
    end_min: if `end` is None, the offset up to which offsets may have been given away.
    torn:    if `end` is None, and bytes behind the last whole frame cannot be read or are missing: how many more
             offsets are left out for them; 0 if they are an append that was never acknowledged."""
    scanned = scan(data, path, base, place)
    if end is not None and scanned.end >= end:
        return None
    behind, damaged = whole_behind(data, path, scanned, place, OFFSET_MAX if end is None else end)
    last = behind[-1][1].next_offset if behind else scanned.end
    until = max(last, end_min) if end is None else end
    at = max((each + header.frame_bytes for each, header in behind), default=scanned.position)
    if end is None and (at < data.size or last < until):
        until += torn
    if not damaged and last == until:
        return None
    lost = [Lost(each.offset, each.next_offset, each.what) for each in damaged]
    if last < until:
        what = scanned.damage.what if scanned.damage is not None and not damaged else "published bytes are missing"
        lost.append(Lost(last, until, what))
    content, offset = bytearray(), scanned.end
    for at, header in behind:
        content += gaps(offset, header.base_offset, place, stored_at)
        content += memoryview(data)[at : at + header.frame_bytes]
        offset = header.next_offset
    content += gaps(offset, until, place, stored_at)
    return Mended(scanned.end, bytes(content), until, lost)


def gaps(offset: int, until: int, place: int, stored_at: int) -> bytes:
    """Frames without messages for these offsets; none if there are none."""
    found = b""
    while offset < until:
        rows = min(until - offset, GAP_ROWS_MAX)
        found += gap_bytes(offset, rows, place=place, stored_at=stored_at)
        offset += rows
    return found
