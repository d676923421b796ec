"""Which frames of a segment are whole, and whether what follows them is a torn append or damage.

Looks at bytes and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from pxrs.errors import DamagedFrame
from pxrs.log.batch import (
    ALIGNMENT,
    HEADER_BYTES,
    HEADER_BYTES_MIN,
    MAGIC,
    Header,
    check_payload,
    read_header,
    read_payload,
)
from pxrs.log.directory.segments.frames import frames

FrameCheck = Callable[[int, Header], None]
"""Given the position and the header of the next frame, raises DamagedFrame if that frame cannot be there: it does not
continue the frames before it, say."""


class Scan(NamedTuple):
    """The whole frames at the beginning of a segment."""

    found: list[tuple[int, Header]]
    """The position and header of each."""
    position: int
    """Where the last of them ends."""
    damage: DamagedFrame | None
    """Why the bytes behind them are no whole frame; None if there are none."""


def scan(data: pa.Buffer, path: str, check: FrameCheck | None = None, place: int | None = None) -> Scan:
    """The frames of a segment up to the first that is not whole, each checked with its payload."""
    found: list[tuple[int, Header]] = []
    position = 0
    try:
        for at, header in whole_frames(data, path, 0, check, place):
            found.append((at, header))
            position = at + header.frame_bytes
    except DamagedFrame as damage:
        return Scan(found, position, damage)
    return Scan(found, position, None)


def whole_frames(
    data: pa.Buffer, path: str, begin: int, check: FrameCheck | None = None, place: int | None = None
) -> Iterator[tuple[int, Header]]:
    """The frames from `begin` on, each checked with its payload and by `check`. Raises DamagedFrame at the first that
    is not whole, and MisplacedFile at one that names another place than `place`, unless that is None."""
    view = memoryview(data)
    for at, header in frames(data, path, begin, data.size, place=place):
        if check is not None:
            check(at, header)
        check_payload(header, view[at : at + header.frame_bytes], path, at)
        yield at, header


def has_later_append(
    data: pa.Buffer, path: str, position: int, is_later: Callable[[Header], bool], place: int | None = None
) -> bool:
    """Whether a whole frame that begins an append lies behind `position`. Each append is synced before the next one is
    written, so then `position` was synced, and what is wrong there is damage and no torn append.

    is_later: whether a frame can have been written after `position`. A message may contain the copy of a frame; one
    that is not later proves nothing."""
    view = memoryview(data)
    for at in range(-(-(position + 1) // ALIGNMENT) * ALIGNMENT, data.size - HEADER_BYTES_MIN + 1, ALIGNMENT):
        if bytes(view[at : at + 4]) != MAGIC:
            continue
        try:
            header = read_header(view[at : at + HEADER_BYTES], path, at, place)
            read_payload(header, data.slice(at, min(header.frame_bytes, data.size - at)), path, at)
        except DamagedFrame:
            continue
        if header.follows == 0 and is_later(header):
            return True
    return False
