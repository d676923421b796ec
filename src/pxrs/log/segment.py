"""Segments: files of frames, named by their first offset.

`frames` walks headers; nothing of a payload is touched until it is read. A segment that is sealed (another one follows)
is mapped and read without a copy. So is the one that is appended to, but only up to its published end: what lies behind
that may be cut, and a map of it would kill the reader (L2).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from pxrs.errors import DamagedFrame
from pxrs.log.batch import ALIGNMENT, HEADER_BYTES, MAGIC, Header, read_header, read_payload
from pxrs.log.index import ANY_TIME, Index, write_beside

SUFFIX: Final = ".log"


def segment_path(folder: str, base: int) -> str:
    return f"{folder}/{base:020d}{SUFFIX}"


def segment_bases(folder: str) -> list[int]:
    """The first offsets of the segments that are there, in order."""
    names = (name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX))
    return sorted(int(name) for name in names if len(name) == 20 and name.isdigit())


def frames(data: pa.Buffer, path: str, begin: int, end: int, origin: int = 0) -> Iterator[tuple[int, Header]]:
    """The frames from `begin` up to `end`, positions in the file whose byte `origin` is the buffer's first."""
    view = memoryview(data)
    position = begin
    while position < end:
        header = read_header(view[position - origin : position - origin + HEADER_BYTES], path, position)
        if position + header.frame_bytes > end:
            raise DamagedFrame(path, position, "the frame is longer than the segment")
        yield position, header
        position += header.frame_bytes


def next_frame(view: memoryview, path: str, begin: int, limit: int) -> int:
    """Where the next whole header is, behind damage; the limit if there is none."""
    for position in range(begin // ALIGNMENT * ALIGNMENT, limit - HEADER_BYTES + 1, ALIGNMENT):
        if bytes(view[position : position + 4]) != MAGIC:
            continue
        try:
            read_header(view[position : position + HEADER_BYTES], path, position)
        except DamagedFrame:
            continue
        return position
    return limit


class Sealed:
    """A sealed segment, mapped."""

    def __init__(self, path: str, base: int, end_offset: int) -> None:
        """`end_offset` is the first offset of the next segment. Raises FileNotFoundError if retention was faster."""
        self.path, self.base, self.end_offset = path, base, end_offset
        with pa.memory_map(path) as file:
            self.data: pa.Buffer = file.read_buffer()
        self.index = self._load_index()

    def frames_from(self, position: int) -> Iterator[tuple[int, Header]]:
        """Those before the next segment: what a failed sync left behind it is not part of the log (L3)."""
        expected = None if position else self.base
        for at, header in frames(self.data, self.path, position, self.data.size):
            if expected is not None and header.base_offset != expected:
                raise DamagedFrame(self.path, at, f"offset {header.base_offset} where {expected} must be")
            yield at, header
            expected = header.next_offset
            if expected >= self.end_offset:
                return
        raise DamagedFrame(self.path, self.data.size, f"it ends before offset {self.end_offset}, where the next begins")

    def frames_for(self, offset: int) -> Iterator[tuple[int, Header]]:
        """From the one that has this offset on. What lies behind damage is found too."""
        begin = self.index.position_of(offset)
        while True:
            try:
                for position, header in self.frames_from(begin):
                    if header.next_offset > offset:
                        yield position, header
                        offset = header.next_offset
                return
            except DamagedFrame as damage:
                self.index = self._scan()
                begin = self.index.position_of(offset)
                if begin <= damage.position:
                    raise

    def records(self, position: int, header: Header) -> pa.RecordBatch:
        return read_payload(header, self.data.slice(position, header.frame_bytes), self.path, position)

    def _load_index(self) -> Index:
        path = index_path(self.path)
        try:
            with open(path, "rb") as file:
                index = Index.load(file.read())
        except FileNotFoundError:
            index = None
        if index is None or not self._fits(index):
            index = self._scan()
            if index.last_time != ANY_TIME:
                with contextlib.suppress(OSError):  # it saves the next reader the work, no more
                    write_beside(path, index.dump())
        return index

    def _scan(self) -> Index:
        index = Index()
        try:
            for position, header in self.frames_from(0):
                index.note(header, position)
        except DamagedFrame as damage:
            # What is around the damage can be found; who reads on meets it, who looks for a time too, and no retention
            # takes it for old.
            note_behind(index, self.data, self.path, damage.position, self.end_offset)
        return index

    def _fits(self, index: Index) -> bool:
        return (
            0 < index.segment_bytes <= self.data.size and bool(index.entries) and index.entries[0].offset == self.base
        )


def note_behind(index: Index, data: pa.Buffer, path: str, damaged: int, end_offset: int, origin: int = 0) -> None:
    """Take in what can be read behind a damaged frame: frames that lead without a break to where the segment must end.
    A message may hold the copy of a frame, which leads nowhere.

    damaged: its position in the file whose byte `origin` is the buffer's first."""
    view = memoryview(data)
    index.last_time = ANY_TIME  # what was damaged may have had any
    position = next_frame(view, path, damaged - origin + ALIGNMENT, data.size)
    while position < data.size:
        found = _chain(data, path, position + origin, end_offset, origin)
        for at, header in found:
            index.note(header, at)
        if found:
            return
        position = next_frame(view, path, position + ALIGNMENT, data.size)


def _chain(data: pa.Buffer, path: str, begin: int, end_offset: int, origin: int) -> list[tuple[int, Header]]:
    """The frames from here on, if they follow each other and end at this offset; else none."""
    found: list[tuple[int, Header]] = []
    try:
        for position, header in frames(data, path, begin, origin + data.size, origin):
            if found and header.base_offset != found[-1][1].next_offset:
                return []
            found.append((position, header))
            if header.next_offset >= end_offset:
                return found if header.next_offset == end_offset else []
    except DamagedFrame:
        pass
    return []


def index_path(segment: str) -> str:
    return segment.removesuffix(SUFFIX) + ".index"


def begins_an_append_behind(data: pa.Buffer, path: str, position: int, end: int) -> bool:
    """Whether a whole frame that begins an append lies behind `position`: then what is before it was synced.

    end: the offset at `position`. A message may hold a copy of a frame; one of an older offset proves nothing."""
    view = memoryview(data)
    for at in range(-(-(position + 1) // ALIGNMENT) * ALIGNMENT, data.size - HEADER_BYTES + 1, ALIGNMENT):
        if bytes(view[at : at + 4]) != MAGIC:
            continue
        try:
            header = read_header(view[at : at + HEADER_BYTES], path, at)
            read_payload(header, data.slice(at, min(header.frame_bytes, data.size - at)), path, at)
        except DamagedFrame:
            continue
        if header.follows == 0 and header.base_offset > end:
            return True
    return False
