"""What a process knows of the segment that is appended to: its open file, its index, and its producers.

Other processes append too. So before each append `learn` reads the headers that were published since the last time.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from pxrs.errors import DamagedFrame
from pxrs.log.batch import Header, Origin
from pxrs.log.directory.index import Index
from pxrs.log.directory.published import Published
from pxrs.log.directory.sealed import Sealed
from pxrs.log.directory.segments.files import segment_bases, segment_path
from pxrs.log.directory.segments.frames import headers_of
from pxrs.log.directory.segments.writing import OpenSegment
from pxrs.log.producers import Producers


class Tail:
    """Not thread-safe: used under the append lock."""

    def __init__(self, segment: OpenSegment, place_id: int, producers: Producers) -> None:
        """producers: the state at the beginning of the segment."""
        self.segment, self._place_id, self.producers = segment, place_id, producers
        self.base = segment.base
        self.index = Index()

    def learn(self, published: Published) -> None:
        """Read the headers up to the published end that are not known yet. Raises DamagedFrame if the frames do not
        lead to the published end: then the segment or `published` is not the one that belongs here."""
        index, path = self.index, self.segment.path
        begin, end = index.segment_bytes, published.segment_bytes
        if begin < end:
            self.producers.note_all(self._noted(begin, end), time.time())
        found = index.segment_bytes, index.next_offset if end else self.base
        if found != (end, published.end):
            raise DamagedFrame(
                path,
                end,
                f"its frames end at byte {found[0]:,}, offset {found[1]}, but the published end is {published.end}",
            )

    def _noted(self, begin: int, end: int) -> Iterator[Header]:
        index, path = self.index, self.segment.path
        expected = index.next_offset if begin else self.base
        for position, header in headers_of(self.segment.descriptor, path, begin, end, self._place_id):
            if header.base_offset != expected:
                raise DamagedFrame(path, position, f"found offset {header.base_offset} where {expected} was expected")
            index.note(header, position)
            expected = header.next_offset
            yield header

    def note(self, headers: list[Header]) -> int:
        """Note frames that this process has appended at the end. Returns the position behind them."""
        position, now = self.index.segment_bytes, time.time()
        for header in headers:
            self.index.note(header, position)
            self.producers.note(header.origin, header.base_offset, now)
            position += header.frame_bytes
        return position

    def origins_since(self, offset: int) -> list[tuple[Origin, int]] | None:
        """The origins and offsets of the batches from this offset on, up to what was learnt; None if some of them
        cannot be read any more."""
        bases = segment_bases(self.segment.folder)
        first = bisect_right(bases, offset) - 1
        try:
            return None if first < 0 else list(self._origins(bases[first:], offset))
        except DamagedFrame:
            return None

    def _origins(self, bases: list[int], offset: int) -> Iterator[tuple[Origin, int]]:
        for base, following in pairwise(bases):
            sealed = Sealed(segment_path(self.segment.folder, base), base, following, self._place_id)
            for _, header in sealed.frames_from(sealed.position_of(offset)):
                yield header.origin, header.base_offset
        begin, end = self.index.position_of(offset), self.index.segment_bytes
        for _, header in headers_of(self.segment.descriptor, self.segment.path, begin, end, self._place_id):
            yield header.origin, header.base_offset
