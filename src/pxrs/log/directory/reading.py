"""Reads a partition: sealed segments through memory maps, the last segment up to the published end, and what can be
read before and behind damage.

Takes no lock of the log. A `Reader` keeps between reads: the list of segments, the maps of a few of them, and an index
of the last segment as far as it was read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs.errors import DamagedFrame, OffsetOutOfRange, OffsetTrimmed
from pxrs.log.batch import HEADER_BYTES, NO_RECORDS, Batch, Header, read_payload
from pxrs.log.directory.index import Index
from pxrs.log.directory.published import Published
from pxrs.log.directory.sealed import Sealed, last_run
from pxrs.log.directory.segments.files import pread, segment_bases, segment_path
from pxrs.log.directory.segments.frames import frames, headers_of
from pxrs.log.directory.start import missing_before, read_start

MAPPED_MAX: Final = 16
TAIL_READ_BYTES: Final = 256 << 10
_NO_OFFSETS: Final = pa.nulls(0, pa.int64())  # `pa.array` of a list would import pandas where that is installed


class Reader:
    """A handle of this process. Threads share it."""

    def __init__(
        self,
        folder: str,
        place: str,
        place_id: int,
        published: Callable[[], Published],
        *,
        is_retained: Callable[[], bool],
    ) -> None:
        """`place` names the partition in messages, `place_id` in files; `published` tells what may be read;
        `is_retained`: whether the topic has a retention setting."""
        self.folder, self.place, self._place_id, self._published = folder, place, place_id, published
        self._is_retained = is_retained
        self._cache = threading.Lock()  # guards the fields below
        self._bases: list[int] = []
        self._mapped: OrderedDict[int, Sealed] = OrderedDict()
        self._last_times: dict[int, int] = {}
        self._seen = _Seen(-1)
        self._met_damage_with: tuple[tuple[int, ...], int] | None = None
        """The segments that were there, and the inode of the damaged file, when `read` last met damage."""

    def start(self) -> int:
        """The first offset that must be there. If the segment that holds it is missing, `read` raises the error."""
        bases = segment_bases(self.folder)
        # List the segments again if there were none: the first append may have come in between.
        if not bases and self._published().end and not (bases := segment_bases(self.folder)):
            raise DamagedFrame(self.folder, 0, "messages were published, but every segment is missing")
        known = self.known_start()
        return known if known is not None else (bases[0] if bases else 0)

    def known_start(self) -> int | None:
        """The first offset by the file `start`; None if it is not known. Call it after the segments are listed, because
        retention writes `start` before it unlinks segments."""
        return read_start(self.folder, self._place_id, is_retained=self._is_retained())

    def read(self, offset: int, max_bytes: int) -> list[Batch]:
        try:
            return self._read(offset, max_bytes)
        except DamagedFrame as damage:
            if not self._was_repaired(damage):
                raise
        return self._read(offset, max_bytes)

    def _was_repaired(self, damage: DamagedFrame) -> bool:
        """Whether the files are others than when damage was last met here: then forget what is known of them. A repair
        makes new segments, which an open reader would not look for (`repair.py`)."""
        with contextlib.suppress(OSError), self._cache:
            bases = segment_bases(self.folder)
            try:
                inode = os.stat(damage.file).st_ino
            except FileNotFoundError:
                inode = 0
            if (seen := (tuple(bases), inode)) != self._met_damage_with:
                self._met_damage_with = seen
                self._bases = bases
                self._mapped.clear()
                self._last_times.clear()
                self._seen = _Seen(-1)
                return True
        return False

    def _read(self, offset: int, max_bytes: int) -> list[Batch]:
        try:
            published = self._published()
        except DamagedFrame:
            # The last segment could not be recovered; the sealed segments before it can still be read (F5).
            bases = segment_bases(self.folder)
            if not bases or offset >= bases[-1]:
                raise
            published = Published(0, bases[-1], 0, bases[-1])
        if offset > published.end:
            raise OffsetOutOfRange(self.place, offset, published.end)
        if offset < 0:
            raise OffsetTrimmed(self.place, offset, self.start())
        batches: list[Batch] = []
        size = 0
        try:
            while offset < published.end and (size < max_bytes or not batches):
                for batch, nbytes in self._read_segment(published, offset):
                    if batch.base_offset != offset:
                        raise DamagedFrame(
                            self.folder, 0, f"found offset {batch.base_offset} where {offset} was expected"
                        )
                    batches.append(batch)
                    size += nbytes
                    offset = batch.next_offset
                    if size >= max_bytes:
                        break
        except DamagedFrame:
            if not batches:  # otherwise the next read raises it
                raise
        return batches

    def _read_segment(
        self, published: Published, offset: int, is_wanted: Callable[[Header], bool] | None = None
    ) -> Iterator[tuple[Batch, int]]:
        """The batches of the segment with this offset, from this offset on, and their sizes. is_wanted: whether to read
        a frame; by default all. The payload of another frame is neither read nor checked."""
        for _ in range(3):  # retention may remove the segment between the two calls
            base = self._base_of(offset, published)
            if base == published.segment:
                try:
                    descriptor = os.open(segment_path(self.folder, base), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    if self.start() <= offset:
                        raise
                    break
                yield from self._read_tail(descriptor, published, offset, is_wanted)
                return
            try:
                sealed = self._sealed(base)
            except FileNotFoundError:
                self._refresh_bases()
                continue
            for position, header in sealed.frames_for(offset):
                if is_wanted is None or is_wanted(header):
                    yield _batch(header, sealed.records(position, header), sealed.data, position, offset)
            return
        raise OffsetTrimmed(self.place, offset, self.start())

    def _read_tail(
        self, descriptor: int, published: Published, offset: int, is_wanted: Callable[[Header], bool] | None
    ) -> Iterator[tuple[Batch, int]]:
        """Read from the last segment, up to the published end. Closes the descriptor."""
        path = segment_path(self.folder, published.segment)
        try:
            position = self._tail_index(descriptor, path, published).position_of(offset)
            data, origin = self._tail_bytes(descriptor, path, published, position)
            end = min(published.segment_bytes, origin + data.size)
            for at, header in frames(data, path, position, end, origin, self._place_id):
                if header.next_offset > offset and (is_wanted is None or is_wanted(header)):
                    records = read_payload(header, data.slice(at - origin, header.frame_bytes), path, at)
                    yield _batch(header, records, data, at - origin, offset)
            if published.whole_end is not None and published.whole_end < published.end:
                yield Batch(max(offset, published.whole_end), NO_RECORDS, _NO_OFFSETS, published.end), HEADER_BYTES
            if end < published.segment_bytes:
                raise DamagedFrame(path, end, f"{published.segment_bytes - end:,} published bytes are missing")
        finally:
            os.close(descriptor)

    def _tail_bytes(self, descriptor: int, path: str, published: Published, position: int) -> tuple[pa.Buffer, int]:
        """The published bytes of the last segment from this position or an earlier one on, and where they begin.

        A few bytes are read into memory. More are mapped, up to the published end and no further: this part of the file
        is never cut (L2), so the map is as safe as that of a sealed segment."""
        is_short = os.fstat(descriptor).st_size < published.segment_bytes
        if is_short or published.segment_bytes - position <= TAIL_READ_BYTES:
            return pa.py_buffer(pread(descriptor, published.segment_bytes - position, position)), position
        with self._cache:
            seen = self._seen
            if seen.base != published.segment or seen.mapped is None or seen.mapped.size < published.segment_bytes:
                mapped = mmap.mmap(descriptor, published.segment_bytes, prot=mmap.PROT_READ)
                if seen.base != published.segment:
                    return pa.py_buffer(mapped), 0
                seen.mapped = pa.py_buffer(mapped)
            return seen.mapped, 0

    def _tail_index(self, descriptor: int, path: str, published: Published) -> Index:
        """Add the headers to the index that were published since the last call."""
        with self._cache:
            if self._seen.base != published.segment:
                self._seen = _Seen(published.segment)
            index = self._seen.index
            try:
                begin, end = index.segment_bytes, published.segment_bytes
                for position, header in headers_of(descriptor, path, begin, end, self._place_id):
                    index.note(header, position)
            except DamagedFrame as damage:
                # A read at that offset raises it; frames before and behind it can still be found.
                if self._seen.searched < published.segment_bytes:
                    self._seen.searched = published.segment_bytes
                    at, expected = damage.position, index.next_offset or published.segment
                    rest = pa.py_buffer(pread(descriptor, published.segment_bytes - at, at))
                    run = last_run(rest, path, at, expected, published.end, at, place=self._place_id)
                    for position, header in run:
                        index.note(header, position)
            return index

    def offset_at(self, timestamp: int) -> int:
        for _ in range(3):
            try:
                return self._offset_at(timestamp)
            except OffsetTrimmed:  # retention has removed the segment
                self._refresh_bases()
        return self._offset_at(timestamp)

    def _offset_at(self, timestamp: int) -> int:
        published = self._published()
        if self._bases[-1:] != [published.segment]:
            self._refresh_bases()
        for base in list(self._bases):
            if base > published.segment:
                break
            # The last times of all segments are kept, a few bytes each, so that a search by time does not map every
            # segment again.
            if base in self._last_times and self._last_times[base] < timestamp:
                continue
            found = self._offset_in(base, timestamp, published)
            if found is not None:
                return found
        return published.end

    def _offset_in(self, base: int, timestamp: int, published: Published) -> int | None:
        begin = base
        if base != published.segment:
            try:
                sealed = self._sealed(base)
            except FileNotFoundError:
                return None
            with self._cache:
                self._last_times[base] = sealed.index.last_time
            if sealed.index.last_time < timestamp:
                return None
            position = sealed.position_at(timestamp)
            begin = next(header.base_offset for _, header in sealed.frames_from(position))
        if begin >= published.end:
            return None
        for batch, _ in self._read_segment(published, begin, lambda header: header.last_timestamp >= timestamp):
            times = batch.records.column("timestamp").cast(pa.int64())
            for row, time_us in enumerate(times.to_pylist()):
                if time_us >= timestamp:
                    return batch.base_offset + row
        return None

    def _base_of(self, offset: int, published: Published) -> int:
        with self._cache:
            if not self._bases or self._bases[-1] < published.segment:
                self._bases = segment_bases(self.folder)
            at = bisect_right(self._bases, offset) - 1
            if at < 0:
                raise self._absent(offset, self._bases[0] if self._bases else published.end)
            return min(self._bases[at], published.segment)

    def _absent(self, offset: int, first: int) -> DamagedFrame | OffsetTrimmed:
        """The error for a read at an offset before `first`, the base of the first segment that is there."""
        start = self.known_start()
        if start is not None and start <= offset:
            return missing_before(self.folder, start, first)
        return OffsetTrimmed(self.place, offset, first if start is None else start)

    def forget_dropped(self) -> int:
        """List the segments again after some were removed. Returns the first offset."""
        with self._cache:
            self._bases = segment_bases(self.folder)
            for known in (self._mapped, self._last_times):
                for base in [base for base in known if base not in self._bases]:
                    del known[base]
            # The last segment is never removed by retention: somebody has removed it, or the topic is deleted.
            if not self._bases:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.folder)
            return self._bases[0]

    def clear(self) -> None:
        with self._cache:
            self._mapped.clear()

    def _refresh_bases(self) -> None:
        with self._cache:
            self._bases = segment_bases(self.folder)

    def _sealed(self, base: int) -> Sealed:
        with self._cache:
            found = self._mapped.get(base)
            if found is not None:
                self._mapped.move_to_end(base)
                return found
            at = bisect_right(self._bases, base)
            path = segment_path(self.folder, base)
            if at == len(self._bases):
                raise DamagedFrame(path, 0, "the next segment is missing")
            found = self._mapped[base] = Sealed(path, base, self._bases[at], self._place_id)
            if len(self._mapped) > MAPPED_MAX:
                self._mapped.popitem(last=False)
            return found

    def sealed_segments(self) -> list[SealedSegment]:
        """The segments that retention may remove: all but the last one. Raises MisplacedFile, because a file of another
        partition must not be removed."""
        published = self._published()
        self._refresh_bases()
        found = []
        for base, following in pairwise(self._bases):
            if base < published.segment:
                with contextlib.suppress(FileNotFoundError):  # another process applies the retention too
                    sealed = self._sealed(base)
                    sealed.check_place()
                    found.append(SealedSegment(base, following, sealed.data.size, sealed.last_stored()))
        return found


class SealedSegment(NamedTuple):
    """The properties of a sealed segment by which retention decides."""

    base: int
    following: int
    """The first offset of the next segment."""
    bytes: int
    last_stored: int
    """When the last frame of the segment was stored."""


class _Seen:
    """The index of the last segment, as far as this reader has read it."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.index = Index()
        self.mapped: pa.Buffer | None = None
        self.searched = 0
        """The position up to which whole frames were searched for behind damage."""


def _batch(header: Header, records: pa.RecordBatch, data: pa.Buffer, at: int, offset: int) -> tuple[Batch, int]:
    """The records of a frame from this offset on, and their size in memory, which is larger than the frame if the frame
    is compressed.

    data, at: the buffer that holds the frame, and where the frame begins in it"""
    if header.is_gap:
        return Batch(max(offset, header.base_offset), records, _NO_OFFSETS, header.next_offset), header.frame_bytes
    size = header.frame_bytes if header.codec == 0 else max(header.frame_bytes, records.nbytes)
    skip = offset - header.base_offset
    if skip > 0:
        return Batch(offset, records.slice(skip)), size
    encoded = data.slice(at + header.header_bytes, header.payload_bytes)
    return Batch(header.base_offset, records, encoded=encoded), size
