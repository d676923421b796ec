"""Finds the end of a partition in its last segment when the file `published` cannot be used: after a start of the
machine, or if the file is damaged, older than the segments, or names more bytes than there are.

`Partition` calls this under the append lock; only `without_missing`, which changes nothing, is called without it.
`scanning.py` finds which frames are whole; this module decides what to keep, and publishes the end that was found. No
whole frame is ever cut.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from pxrs import clock, disk
from pxrs.disk import replace_file
from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.batch import GAP_ROWS_MAX, Header, gap_bytes
from pxrs.log.directory.index import Index
from pxrs.log.directory.kept_files import keep
from pxrs.log.directory.producers_file import dump_producers, load_producers, producers_path
from pxrs.log.directory.published import Published, PublishedFile
from pxrs.log.directory.reserved import read_reserved
from pxrs.log.directory.scanning import Scanned, check_short, is_later_than, scan, whole_behind
from pxrs.log.directory.sealed import Sealed, index_path
from pxrs.log.directory.segments.files import segment_bases, segment_path
from pxrs.log.directory.segments.frames import headers_of
from pxrs.log.directory.segments.writing import OpenSegment
from pxrs.log.producers import Producers

_logger = logging.getLogger(__name__)


class Recovery:
    """Finds the end of one partition again."""

    def __init__(
        self,
        folder: str,
        place: str,
        place_id: int,
        published: PublishedFile,
        *,
        is_synced: Callable[[], bool],
        known_start: Callable[[], int | None],
    ) -> None:
        """place, place_id: name the partition in messages and in files. is_synced: whether every
        published message was synced.
        known_start: the first offset that retention has left; None if that is not known."""
        self.folder, self.place, self._place_id = folder, place, place_id
        self._published, self._is_synced, self._known_start = published, is_synced, known_start
        self._short: tuple[Published, Published] | None = None
        """A published end of which bytes are missing, and the end that readers are given instead. Kept because finding
        it reads the whole segment."""

    def is_short(self, published: Published) -> bool:
        """Whether published bytes are missing: in a copy that was made while the log was appended to, or because
        somebody removed them."""
        try:
            return os.stat(segment_path(self.folder, published.segment)).st_size < published.segment_bytes
        except FileNotFoundError:
            return True

    def first_offset(self) -> int:
        """The first offset that retention has left; 0 if that is not known. It is never beyond the end."""
        try:
            return self._known_start() or 0
        except DamagedFrame:  # reading the start of the partition raises it
            return 0

    def without_missing(self, published: Published) -> Published:
        """The end for readers if published bytes are missing, or if `published` ends before the first offset that
        retention has left. Changes nothing on disk: an operator may still put the missing bytes back, and only an
        append needs a decision.

        If the partition is damaged, the published end as it is: a reader of the missing part gets DamagedFrame, and the
        rest stays readable."""
        if self._short is None or self._short[0] != published:
            readable = published
            try:
                if self.is_short(published):
                    readable = self._whole_of(published)
            except DamagedFrame as damage:
                _logger.warning("%s: %s", self.place, damage)
            first = self.first_offset()
            if readable.end < first:
                self.tell_early_end(readable.end, first)
                whole_end = readable.end if readable.whole_end is None else readable.whole_end
                readable = readable._replace(end=first, whole_end=whole_end)
            self._short = published, readable
        return self._short[1]

    def _whole_of(self, published: Published) -> Published:
        """The end up to which a partition can be read of which published bytes are missing. Raises DamagedFrame."""
        base = self._last_base(published)
        path = segment_path(self.folder, base)
        data = pa.py_buffer(Path(path).read_bytes())
        scanned = scan(data, path, base, self._place_id)
        if scanned.end < published.end:
            check_short(data, path, base, scanned, published, self._place_id)
            self._tell_short(path, scanned.end, published.end)
        return published._replace(
            segment=base, segment_bytes=scanned.position, whole_end=min(scanned.end, published.end)
        )

    def tell_early_end(self, end: int, first: int) -> None:
        _logger.warning(
            "%s: %s ends at offset %d, but retention has removed everything before %d: it looks like a copy that was "
            "made during appends; the %d offsets in between have no messages",
            self.place,
            self._published.path,
            end,
            first,
            first - end,
        )

    def _tell_short(self, path: str, whole_end: int, end: int) -> None:
        _logger.warning(
            "%s: %s ends at offset %d, but messages up to %d were published: it looks like a copy that was made during "
            "appends; the %d offsets in between have no messages",
            self.place,
            path,
            whole_end,
            end,
            end - whole_end,
        )

    def is_outdated(self, published: Published) -> bool:
        """Whether `published` is an older copy than the segments, or the file of another partition in a format that
        does not name the partition. Raises MisplacedFile before anything is cut because of it.

        A writer that died before it published leaves at most one append behind the published end of the last segment,
        or an empty segment that begins there. If there is more, `published` is older. The caller holds the append lock.
        The folder is not listed, because every append calls this."""
        if published.segment_bytes and _size(segment_path(self.folder, published.end)):
            return True
        path = segment_path(self.folder, published.segment)
        size = _size(path)
        if size <= published.segment_bytes:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        end = published.end
        try:
            for at, header in headers_of(descriptor, path, published.segment_bytes, size, self._place_id):
                if header.follows == 0 and at > published.segment_bytes:
                    return True
                end = header.next_offset
        except MisplacedFile:
            raise
        except DamagedFrame:  # a torn append, which a writer that died has left
            return False
        finally:
            os.close(descriptor)
        # The segment ends with one append behind the published end. If another segment follows, that one was published.
        return os.path.exists(segment_path(self.folder, end))

    def recover(self, *, is_outdated: bool = False) -> Published:
        """Find the end in the last segment, and publish it. The caller holds the append lock."""
        # Files that may be misplaced are read before anything is made or cut.
        known = self._published.whole()
        last = self._published.last()
        # Published messages are lost only by a power loss, and only where appends are not synced.
        is_lossy = not self._is_synced() and not self._published.is_of_this_boot()
        reserved = read_reserved(self.folder, self._place_id) if is_lossy else 0
        segment = OpenSegment.open(self.folder, self._last_base(last), is_created=True)
        try:
            data = segment.read()
            is_suspect = known is not None and known.is_suspect and known.segment == segment.base and not is_outdated
            if known is not None and is_suspect and data.size >= known.segment_bytes:
                # What a failed sync left behind the published end is not part of the log, though it can be read.
                return self._published.rebuild(*known[1:4], is_suspect=True)
            scanned = scan(data, segment.path, segment.base, self._place_id)
            if is_lossy:
                return self._recover_lossy(segment, data, scanned, max(reserved, last.end))
            if scanned.end < last.end:
                check_short(data, segment.path, segment.base, scanned, last, self._place_id)
                self._tell_short(segment.path, scanned.end, last.end)
                return self._go_on_behind(segment.base, scanned.found, scanned.end, last.end)
            segment.keep_whole(data, scanned.scan, is_later_than(scanned.end), self._place_id)
        finally:
            segment.close()
        # If a slot of this boot is whole, the damaged one may have been the mark of a failed sync.
        return self._published.rebuild(segment.base, scanned.position, scanned.end, is_suspect=known is not None)

    def _last_base(self, last: Published) -> int:
        """The first offset of the last segment that is there. Raises DamagedFrame if somebody has removed later ones.

        A copy that was made while the log was appended to may lack later segments too. In such a copy the last segment
        was appended to when it was copied, so it has no index file: an index is written when a segment is sealed."""
        bases = segment_bases(self.folder)
        if not bases and (last.end or self._known_start()):
            raise DamagedFrame(self.folder, 0, "messages were published, but every segment is missing")
        if not bases:
            return 0
        if last.segment > bases[-1] and os.path.exists(index_path(segment_path(self.folder, bases[-1]))):
            path = segment_path(self.folder, last.segment)
            raise DamagedFrame(path, 0, f"the segment is missing, but messages up to offset {last.end} were published")
        return bases[-1]

    def _recover_lossy(self, segment: OpenSegment, data: pa.Buffer, scanned: Scanned, until: int) -> Published:
        """After a start of the machine, where appends were not synced: a power loss may have taken any part of the last
        segment. The whole frames are kept. The offsets behind them, up to the last one that may have been given to a
        message, become a gap."""
        base, path = segment.base, segment.path
        behind, damaged = whole_behind(data, path, scanned, self._place_id, until)
        found = scanned.found + behind
        position = found[-1][0] + found[-1][1].frame_bytes if found else 0
        end = found[-1][1].next_offset if found else base
        for damage in damaged:
            _logger.warning(
                "%s: %s is damaged at byte %d: the messages from offset %d up to %d cannot be read (%s); those after "
                "them are kept",
                self.place,
                path,
                damage.position,
                damage.offset,
                damage.next_offset,
                damage.what,
            )
        if position < data.size:
            _logger.warning(
                "%s: %s was incomplete after byte %d, offset %d, as after a power loss; the %d bytes there are removed",
                self.place,
                path,
                position,
                end,
                data.size - position,
            )
            segment.cut(position)
        if damaged:  # nothing can be appended to the segment any more, because an append reads all its headers first
            segment.sync()
            return self._go_on_behind(base, found, end, until)
        gap = self.gap(end, until)
        segment.write([gap], position)
        segment.sync()
        disk.sync_folder(self.folder)
        return self._published.rebuild(base, position + len(gap), max(end, until))

    def _go_on_behind(self, base: int, found: list[tuple[int, Header]], end: int, until: int) -> Published:
        """Seal the segment at `base`, of which the frames `found` can be read, and make a new one that begins at the
        offset `end` with a gap up to `until`. The old segment is not changed, or is kept under another name: its bytes
        behind `end` are not part of the log."""
        path = segment_path(self.folder, end)
        if found:
            try:
                producers = self.producers_before(base)
            except DamagedFrame as damage:
                _logger.warning(
                    "%s: the state of producers from before offset %d is discarded: %s", self.place, base, damage
                )
                producers = Producers(forgotten=base - 1)
            producers.note_all((header for _, header in found), time.time())
            replace_file(producers_path(path), dump_producers(producers, self._place_id, end), is_durable=True)
        gap = self.gap(end, until)
        if _size(path):  # not even the first frame is whole, and the new segment has the name of the old one
            _logger.warning("%s: a copy of the damaged %s is kept in %s", self.place, path, keep(path, is_copied=True))
        replace_file(path, gap, is_durable=True)
        disk.sync_folder(self.folder)
        if found:
            # Last, because an index says that another segment follows.
            index = Index()
            for position, header in found:
                index.note(header, position)
            replace_file(index_path(segment_path(self.folder, base)), index.dump(self._place_id))
        return self._published.rebuild(end, len(gap), max(end, until))

    def gap(self, end: int, until: int) -> bytes:
        """Frames without messages for the offsets from `end` up to `until`; none if there are none."""
        gaps = b""
        while end < until:
            rows = min(until - end, GAP_ROWS_MAX)
            gaps += gap_bytes(end, rows, place=self._place_id, stored_at=clock.wall_time_us())
            end += rows
        return gaps

    def producers_before(self, base: int) -> Producers:
        """The producers' state at a segment's beginning: as it was written then, or found again in older segments."""
        found = self._load_producers(base)
        if found is not None:
            return found
        bases = segment_bases(self.folder)
        for at in range(bisect_right(bases, base) - 1, -1, -1):
            producers = self._load_producers(bases[at])
            if producers is None and at > 0:
                continue
            # Producers whose batches lie in segments that retention has removed count as forgotten.
            producers = Producers(forgotten=bases[at] - 1) if producers is None else producers
            for older, following in pairwise(bases[at : bisect_right(bases, base)]):
                sealed = Sealed(segment_path(self.folder, older), older, following, self._place_id)
                producers.note_all((header for _, header in sealed.frames_from(0)), time.time())
            return producers
        return Producers()

    def _load_producers(self, base: int) -> Producers | None:
        """The producers' state in the file; None also if the file belongs to another partition: the state is then found
        in the segments, as if the file were damaged."""
        path = producers_path(segment_path(self.folder, base))
        try:
            return load_producers(path, self._place_id, base)
        except MisplacedFile as error:
            _logger.warning("%s; the state is rebuilt from the segments", error)
            return None


def _size(path: str) -> int:
    """The size of a file; 0 if it is missing."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
