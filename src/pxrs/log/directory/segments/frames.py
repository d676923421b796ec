"""Walking over the frames of a segment by their headers. Payloads are neither read nor checked here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from pxrs.errors import DamagedFrame
from pxrs.log.batch import ALIGNMENT, HEADER_BYTES, HEADER_BYTES_MIN, MAGIC, Header, read_header
from pxrs.log.directory.segments.files import pread

PIECE_BYTES: Final = 64 << 10
"""How much of a file `headers_of` reads at a time."""
_MAGIC: Final = re.compile(re.escape(MAGIC))


def frames(
    data: pa.Buffer, path: str, begin: int, end: int, origin: int = 0, place: int | None = None
) -> Iterator[tuple[int, Header]]:
    """The position and header of each frame from `begin` up to `end`.

    begin, end, and the positions: in the file. origin: the position in the file of the buffer's first byte.
    Raises DamagedFrame, and MisplacedFile at a frame that names another place than `place`, unless that is None."""
    view = memoryview(data)
    position = begin
    while position < end:
        header = read_header(view[position - origin : position - origin + HEADER_BYTES], path, position, place)
        if position + header.frame_bytes > end:
            raise DamagedFrame(path, position, "the frame is longer than the segment")
        yield position, header
        position += header.frame_bytes


def headers_of(
    descriptor: int, path: str, position: int, end: int, place: int | None = None
) -> Iterator[tuple[int, Header]]:
    """The position and header of each frame from `position` up to `end`, read from the file PIECE_BYTES at a time, or
    header by header where frames are longer than that.

    Raises DamagedFrame, and MisplacedFile at a frame that names another place than `place`, unless that is None."""
    piece_bytes = PIECE_BYTES
    while position < end:
        begin = position
        piece = memoryview(pread(descriptor, min(piece_bytes, end - begin), begin))
        # A header of format 1 is shorter than HEADER_BYTES, and may be all that is left before `end`.
        needed = HEADER_BYTES if begin + len(piece) < end else HEADER_BYTES_MIN
        while position < end and position - begin + needed <= len(piece):
            header = read_header(piece[position - begin : position - begin + HEADER_BYTES], path, position, place)
            yield position, header
            position += header.frame_bytes
            piece_bytes = PIECE_BYTES if header.frame_bytes < PIECE_BYTES else HEADER_BYTES
        if position == begin:
            raise DamagedFrame(path, position, "the published part of the file has no whole header here")


def next_frame(view: memoryview, path: str, begin: int, limit: int, place: int | None = None) -> int:
    """The position of the next whole header from `begin` on that names `place`; `limit` if there is none."""
    for found in _MAGIC.finditer(view, begin, limit):
        position = found.start()
        if position % ALIGNMENT == 0 and position + HEADER_BYTES_MIN <= limit:
            try:
                read_header(view[position : min(position + HEADER_BYTES, limit)], path, position, place)
            except DamagedFrame:
                continue
            return position
    return limit
