"""A segment that another one follows, mapped and read without a copy, and found around damage.

Nothing is appended to such a segment any more, so that a map of it stays valid until retention unlinks the file (L2).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pyarrow as pa

from pxrs.disk import replace_file
from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.batch import ALIGNMENT, HEADER_BYTES, Header, read_header, read_payload
from pxrs.log.directory.index import Entry, Index, stored_time
from pxrs.log.directory.segments.files import SUFFIX
from pxrs.log.directory.segments.frames import frames, next_frame
from pxrs.log.retention import ANY_TIME

_logger = logging.getLogger(__name__)


class Sealed:
    """A sealed segment, mapped. Threads share it."""

    def __init__(self, path: str, base: int, end_offset: int, place: int) -> None:
        """end_offset: the first offset of the next segment. place: the `place_id` of the partition. Raises
        FileNotFoundError if retention has removed the segment."""
        self.path, self.base, self.end_offset, self._place = path, base, end_offset, place
        self._run: list[tuple[int, Header]] | None = None
        """The frames behind damage, once damage was found; None before."""
        with pa.memory_map(path) as file:
            self.data: pa.Buffer = file.read_buffer()
        self._is_index_checked = False
        """Whether the index was compared with all headers of the segment, or made from them."""
        self.index = self._load_index()

    def check_place(self) -> None:
        """Raises MisplacedFile if its first frame was written for another partition."""
        try:
            read_header(memoryview(self.data)[:HEADER_BYTES], self.path, 0, self._place)
        except MisplacedFile:
            raise
        except DamagedFrame:
            pass  # a read of the frame raises it

    def last_stored(self) -> int:
        """When the last frame of the segment was stored, as far as that is known. Raises FileNotFoundError."""
        try:
            first = read_header(memoryview(self.data)[:HEADER_BYTES], self.path, 0)
            is_stamped = first.place_id is not None
        except DamagedFrame:  # the index may have the time, and the file's own time is no earlier
            is_stamped = False
        return stored_time(self.index.last_stored, self.path, is_stamped=is_stamped)

    def frames_from(self, position: int) -> Iterator[tuple[int, Header]]:
        """The frames from a position on, up to the offset at which the next segment begins. What lies behind that was
        left by a failed sync and is not part of the log (L3)."""
        expected = None if position else self.base
        for at, header in frames(self.data, self.path, position, self.data.size, place=self._place):
            if expected is not None and header.base_offset != expected:
                raise DamagedFrame(self.path, at, f"found offset {header.base_offset} where {expected} was expected")
            yield at, header
            expected = header.next_offset
            if expected >= self.end_offset:
                return
        raise DamagedFrame(
            self.path, self.data.size, f"it ends before offset {self.end_offset}, where the next segment begins"
        )

    def frames_for(self, offset: int) -> Iterator[tuple[int, Header]]:
        """The frames from the one that holds this offset on, also if damage lies before it."""
        entry = self._checked(lambda index: index.entry_of(offset))
        begin, expected = (0, self.base) if entry is None else (entry.position, entry.offset)
        while True:
            try:
                for position, header in self.frames_from(begin):
                    expected = header.next_offset
                    if header.next_offset > offset:
                        yield position, header
                        offset = header.next_offset
                return
            except DamagedFrame as damage:
                run = self._last_run(damage.position, expected)
                if not run or run[0][1].base_offset > offset or run[0][0] <= damage.position:
                    raise
                begin = next(position for position, header in run if header.next_offset > offset)

    def _last_run(self, damaged: int, expected: int) -> list[tuple[int, Header]]:
        if self._run is None or (self._run and self._run[0][0] <= damaged):
            self._run = last_run(self.data, self.path, damaged, expected, self.end_offset, place=self._place)
        return self._run

    def records(self, position: int, header: Header) -> pa.RecordBatch:
        return read_payload(header, self.data.slice(position, header.frame_bytes), self.path, position)

    def position_of(self, offset: int) -> int:
        """The position of a frame from which to search for this offset; not behind it."""
        entry = self._checked(lambda index: index.entry_of(offset))
        return 0 if entry is None else entry.position

    def position_at(self, timestamp: int) -> int:
        """The position from which to search for the first message of this time or later."""
        entry = self._checked(lambda index: index.entry_at(timestamp))
        return 0 if entry is None else entry.position

    def _checked(self, find: Callable[[Index], Entry | None]) -> Entry | None:
        """An entry of the index that names the position of its frame correctly. If an entry does not, either that frame
        is damaged, or the index belongs to another segment and is made again."""
        entry = find(self.index)
        if entry is None or self._is_index_checked or self._leads_to(entry):
            return entry
        true = self._scan()
        known = {(each.offset, each.position) for each in true.entries}
        stored = [each for each in self.index.entries if each.position < true.segment_bytes]
        if any((each.offset, each.position) not in known for each in stored):
            _logger.warning("%s does not match its segment; it is rebuilt", index_path(self.path))
            self._keep(true)
            self.index = true
        self._is_index_checked = True
        return find(self.index)

    def _leads_to(self, entry: Entry) -> bool:
        try:
            view = memoryview(self.data)[entry.position : entry.position + HEADER_BYTES]
            return read_header(view, self.path, entry.position, self._place).base_offset == entry.offset
        except DamagedFrame:
            return False

    def _load_index(self) -> Index:
        path = index_path(self.path)
        try:
            with open(path, "rb") as file:
                index = Index.load(file.read())
        except FileNotFoundError:
            index = None
        if index is not None and index.place_id not in (None, self._place):
            _logger.warning("%s was written for another topic or partition; it is rebuilt", path)
            index = None
        if index is None or not self._fits(index):
            index = self._scan()
            self._is_index_checked = True
            self._keep(index)
        return index

    def _keep(self, index: Index) -> None:
        """Write the index beside the segment, unless it ends at damage."""
        if index.last_time != ANY_TIME:
            with contextlib.suppress(OSError):  # the next reader then makes the index again
                replace_file(index_path(self.path), index.dump(self._place))

    def _scan(self) -> Index:
        index = Index()
        try:
            for position, header in self.frames_from(0):
                index.note(header, position)
        except DamagedFrame:
            # Frames before the damage are indexed. ANY_TIME makes a search by time reach the damage, and keeps
            # retention from removing the segment.
            index.last_time = index.last_stored = ANY_TIME
        return index

    def _fits(self, index: Index) -> bool:
        if not index.entries or not 0 < index.segment_bytes <= self.data.size:
            return False
        # The first entry is not the segment's first offset if its first frame was damaged when the index was made.
        first = index.entries[0]
        return first.offset == self.base if first.position == 0 else self.base < first.offset < self.end_offset


def last_run(
    data: pa.Buffer,
    path: str,
    damaged: int,
    expected: int,
    end_offset: int,
    origin: int = 0,
    *,
    place: int | None = None,
) -> list[tuple[int, Header]]:
    """The frames behind damage that lead without a break to the segment's end; none if there are none.

    A message may hold the copy of a frame. That one would have to lead to the very end too, with offsets behind that of
    the damaged frame.

    damaged, expected: the position and the offset of the frame that cannot be read, in the file whose byte `origin` is
    the buffer's first. end_offset: where the segment must end."""
    view = memoryview(data)
    begin = damaged - origin + ALIGNMENT
    while (begin := next_frame(view, path, begin, data.size, place)) < data.size:
        found: list[tuple[int, Header]] = []
        try:
            for position, header in frames(data, path, begin + origin, origin + data.size, origin, place):
                if header.base_offset != (found[-1][1].next_offset if found else max(header.base_offset, expected + 1)):
                    break
                found.append((position, header))
                begin = position - origin + header.frame_bytes
        except DamagedFrame:
            pass  # more damage: the frames before it are not certain
        if found and begin == data.size and found[-1][1].next_offset == end_offset:
            return found
        begin = max(begin, ALIGNMENT) if found else begin + ALIGNMENT
    return []


def index_path(segment: str) -> str:
    return segment.removesuffix(SUFFIX) + ".index"
