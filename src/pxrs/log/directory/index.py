"""A sparse index of a segment: where to begin looking for an offset or a time.

An entry for about every 64 KiB: a frame's first offset, its position in the file, and the latest time seen before it.
The index of a sealed segment is kept in a file beside it, which names the partition. If the file is missing, damaged,
or of another partition, the index is made again from the segment.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from operator import itemgetter
from typing import Final, NamedTuple

import xxhash

from pxrs.log.batch import Header
from pxrs.log.retention import NO_TIME

INTERVAL_BYTES: Final = 64 << 10
_MAGIC: Final = b"PXI3"
_HEAD: Final = struct.Struct("<4sIQqqQ")
_MAGIC_2: Final = b"PXI2"
"""The magic of the format before, which has neither the time of storing nor the partition."""
_HEAD_2: Final = struct.Struct("<4sIQq")
_CHECKSUM: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QQq")


class Entry(NamedTuple):
    offset: int
    position: int
    time: int
    """The latest time of a message before this entry."""


class Index:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last_time = NO_TIME
        """The latest time of any message in the segment."""
        self.last_stored = NO_TIME
        """When the last of its frames was stored: the latest `Header.stored_at`."""
        self.first_stored = NO_TIME
        """When the first of its frames was stored; NO_TIME if that one does not say it (format 1). Not in the file."""
        self.place_id: int | None = None
        """The partition that a loaded index was written for; None if the file is of the format before."""
        self.segment_bytes = 0
        """How many bytes of the segment it covers."""
        self.next_offset: int | None = None
        """The offset behind the last frame that was noted. Not in the file."""

    def note(self, header: Header, position: int) -> None:
        """Add the next frame of the segment. The first frame behind damage gets an entry, because it cannot be reached
        from an earlier entry."""
        is_next = position == self.segment_bytes
        if self.next_offset is None and header.place_id is not None:
            self.first_stored = header.stored_at
        if not self.entries or not is_next or position - self.entries[-1].position >= INTERVAL_BYTES:
            self.entries.append(Entry(header.base_offset, position, self.last_time))
        self.last_time = max(self.last_time, header.last_timestamp)
        self.last_stored = max(self.last_stored, header.stored_at)
        self.segment_bytes, self.next_offset = position + header.frame_bytes, header.next_offset

    @property
    def is_stamped(self) -> bool:
        """Whether all frames have the time at which they were stored: no frame of format 1 follows one of format 2."""
        return self.first_stored != NO_TIME

    def position_of(self, offset: int) -> int:
        """The position of a frame from which to search for this offset; not behind it."""
        found = self.entry_of(offset)
        return 0 if found is None else found.position

    def entry_of(self, offset: int) -> Entry | None:
        at = bisect_right(self.entries, offset, key=itemgetter(0)) - 1
        return self.entries[at] if at >= 0 else None

    def position_at(self, timestamp: int) -> int:
        """The position from which to search for the first message of this time or later."""
        found = self.entry_at(timestamp)
        return 0 if found is None else found.position

    def entry_at(self, timestamp: int) -> Entry | None:
        # No message before an entry is later than the entry's time. So begin at the last entry whose time is earlier.
        return next((entry for entry in reversed(self.entries) if entry.time < timestamp), None)

    def dump(self, place: int) -> bytes:
        """The content of the index file, for the partition with this `place_id`."""
        body = b"".join(_ENTRY.pack(*entry) for entry in self.entries)
        data = _HEAD.pack(_MAGIC, len(self.entries), self.segment_bytes, self.last_time, self.last_stored, place) + body
        return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))

    @classmethod
    def load(cls, data: bytes) -> Index | None:
        """The index of a file; None if the file is damaged."""
        head = _HEAD_2 if data.startswith(_MAGIC_2) else _HEAD
        if len(data) < head.size + _CHECKSUM.size:
            return None
        data, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack(data[-_CHECKSUM.size :])
        if xxhash.xxh3_64_intdigest(data) != checksum:
            return None
        magic, count, segment_bytes, last_time, *rest = head.unpack_from(data)
        body = data[head.size :]
        if magic not in (_MAGIC, _MAGIC_2) or len(body) != count * _ENTRY.size:
            return None
        index = cls()
        index.segment_bytes, index.last_time = segment_bytes, last_time
        index.last_stored, index.place_id = rest or (last_time, None)
        index.entries = [Entry(*fields) for fields in _ENTRY.iter_unpack(body)]
        return index


def stored_time(last_stored: int, segment: int | str, *, is_stamped: bool) -> int:
    """When the last frame of a segment was stored, in microseconds since 1970. Raises FileNotFoundError.

    last_stored: as the index has it. Frames of format 1 do not say when they were stored. The latest time of their
    messages stands for it, which the senders have given and which may lie long ago. So if not all frames are stamped,
    the time at which the file was last written counts too: the later of the two, so that nothing is removed too early.
    segment: its path or descriptor."""
    return last_stored if is_stamped else max(last_stored, os.stat(segment).st_mtime_ns // 1000)
