"""One partition of a topic in a local directory, appended to and read by any number of processes.

    partition-N/
      00000000000000000000.log .index .producers    segments, their sparse indexes, producers' state at their beginning
      published                                     up to where readers may read
      reserved                                      offsets below it may have been given away; with durability "os" only
      lock                                          held while appending; never the data file itself

Invariants:
- Appended, synced, published, acknowledged, in this order (L1). Nothing below the published end is ever changed (L2).
- The lock guards append, roll and recovery. Whoever takes it first cuts off what a writer left that died before it
  published. Each append is synced before the next begins, so at most one append is ever unsynced (L3).
- A segment is synced before the next one has its first frame.

On failure: an append that cannot be written is cut off again and reported. One that cannot be synced leaves a mark for
all processes, because the system may have dropped the very pages and will not say so twice: the next append goes on in
a new segment from the published end, and what lies behind it in the old one is no part of the log. The mark need not
outlive the machine's run: after another one the medium itself is read.
A writer may also die after it made the next segment and before it published that. The next one finishes the roll:
were it to go on in the old segment, the empty one would stand for the offsets that it gets.
The folder of a deleted topic is gone for good, and one of the same name has another: an append looks for it.
After another boot the published end is rebuilt: the last segment is checked frame by frame, cut where the one unsynced
append is torn, and synced. Damage that a later append proves to be older is reported, never cut (F5).

With durability "os" an append is not synced; a segment is, before the next one is made. So a power loss takes of the
last segment whatever the system had not written yet, also what readers have seen and checkpoints count. Its offsets are
never given to other messages: they are reserved on disk in advance, many at a time, and after another boot what is left
of a reservation becomes a gap, which readers pass over (docs/decisions/0008).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs import disk
from pxrs.errors import (
    AppendFailed,
    Closed,
    DamagedFrame,
    LogBusy,
    LogError,
    MisplacedFile,
    SequenceGap,
    UnknownProducer,
    UnknownTopic,
)
from pxrs.log.batch import (
    GAP_ROWS_MAX,
    Header,
    Origin,
    Payload,
    check_payload,
    gap_bytes,
    header_bytes,
    padding,
    read_header,
)
from pxrs.log.index import Index, read_with_checksum, with_checksum, write_beside
from pxrs.log.producers import SILENT_S_MAX, Asked, Producers, dump_producers, load_producers, producers_path
from pxrs.log.published import NAME as PUBLISHED
from pxrs.log.published import Published, PublishedFile
from pxrs.log.reading import Reader, headers_of, pread
from pxrs.log.recovery import Scanned, check_short, scan, whole_behind
from pxrs.log.segment import (
    Sealed,
    begins_an_append_behind,
    frames,
    index_path,
    segment_bases,
    segment_path,
)

LOCK_PAUSE_S_MAX: Final = 0.005
RESERVED: Final = "reserved"
RESERVED_OFFSETS: Final = 1 << 16
_logger = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A batch that waits for its offset. `since` is as in `Asked`."""

    payload: Payload
    origin: Origin
    since: int | None = None


class Partition:
    """A handle of this process. Threads share it."""

    def __init__(
        self, folder: str, place: str, place_id: int, *, segment_bytes: int, timeout: float, is_synced: bool = True
    ) -> None:
        """`place` names the partition in messages, `place_id` in files; `is_synced` is the choice of durability."""
        self.folder, self.place, self._place_id = folder, place, place_id
        self._segment_bytes, self._timeout = segment_bytes, timeout
        self._is_synced = is_synced
        self._reserved = 0
        """As this process knows it; another one may have reserved more."""
        self._published = PublishedFile(f"{folder}/{PUBLISHED}", place_id)
        self._appending = threading.Lock()
        try:
            self._lock_file = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except BaseException:
            self._published.close()
            raise
        self._tail = _Tail(-1)
        self._looked_at = -1
        """The last segment of which this process has seen that no published byte is missing."""
        self._short: tuple[Published, Published] | None = None
        """What is published though bytes of it are missing, and what of that can be read."""
        self.reader = Reader(folder, place, place_id, self.published)

    def published(self) -> Published:
        """What may be read; rebuilt first if nothing was published since the machine started, or if not all of it is
        there."""
        published = self._published.read()
        if published is None or not self._published.is_in_place():
            with self._exclusive():
                published = self._current()
        elif published.segment != self._looked_at:  # once for each segment
            if self._is_short(published):
                return self._without_missing(published)
            self._looked_at = published.segment
        return published

    def _without_missing(self, published: Published) -> Published:
        """What may be read although published bytes are missing. Changes nothing on disk: somebody may yet put the
        missing bytes back, and only an append has to know where it goes.

        As it was if the partition is damaged: whoever reads what is missing is told, and the rest stays readable."""
        again = self._published.read()
        if again is None or again != published:  # it was rolled and retained meanwhile
            return self.published()
        if self._short is None or self._short[0] != published:
            readable = published
            try:
                base = self._last_base(published)
                path = segment_path(self.folder, base)
                data = pa.py_buffer(Path(path).read_bytes())
                scanned = scan(data, path, base, self._place_id)
                if scanned.end < published.end:
                    check_short(data, path, base, scanned, published, self._place_id)
                    self._tell_short(path, scanned.end, published.end)
                readable = published._replace(
                    segment=base, segment_bytes=scanned.position, whole_end=min(scanned.end, published.end)
                )
            except DamagedFrame as damage:
                _logger.warning("%s: %s", self.place, damage)
            self._short = published, readable
        return self._short[1]

    def _tell_short(self, path: str, whole_end: int, end: int) -> None:
        _logger.warning(
            "%s: %s ends at offset %d, and messages up to %d were published: it looks like a copy that was made while "
            "the log was appended to; the %d offsets between belong to no message",
            self.place,
            path,
            whole_end,
            end,
            end - whole_end,
        )

    # Appending.

    def append(self, batches: Sequence[Ready]) -> list[int]:
        """Store them in order, together; durable when it returns. The offset of each one's first record."""
        with self._exclusive():
            try:
                return self._append(self._current(), batches)
            except OSError as error:
                raise self._failed(error) from error

    def _append(self, published: Published, batches: Sequence[Ready]) -> list[int]:
        producers = self._tail.producers
        asked = [Asked(ready.origin, ready.payload.rows, ready.since) for ready in batches]
        asked = producers.recall(asked, published.end, self._origins_since, time.time())
        placed = producers.place(asked, published.end)
        new = [(ready, place.offset) for ready, place in zip(batches, placed, strict=True) if place.is_new]
        if new:
            self._write(published, new)
        return [place.offset for place in placed]

    def _origins_since(self, offset: int) -> list[tuple[Origin, int]] | None:
        """Of the batches from this offset on, up to the published end; None if not all can be read. Holds the lock, and
        `_tail` is as published."""
        bases = segment_bases(self.folder)
        first = bisect_right(bases, offset) - 1
        try:
            return None if first < 0 else list(self._origins(bases[first:], offset))
        except DamagedFrame:
            return None

    def _origins(self, bases: list[int], offset: int) -> Iterator[tuple[Origin, int]]:
        for base, following in pairwise(bases):
            sealed = self._sealed(base, following)
            for _, header in sealed.frames_from(sealed.position_of(offset)):
                yield header.origin, header.base_offset
        tail = self._tail
        path, begin = segment_path(self.folder, tail.base), tail.index.position_of(offset)
        for _, header in headers_of(tail.descriptor, path, begin, tail.index.segment_bytes, self._place_id):
            yield header.origin, header.base_offset

    def _sealed(self, base: int, following: int) -> Sealed:
        return Sealed(segment_path(self.folder, base), base, following, self._place_id)

    def _write(self, published: Published, new: list[tuple[Ready, int]]) -> None:
        size = sum(ready.payload.frame_bytes for ready, _ in new)
        if published.segment_bytes and published.segment_bytes + size > self._segment_bytes:
            published = self._roll(published)
        tail = self._tail
        path = segment_path(self.folder, tail.base)
        pieces: list[object] = []
        headers: list[Header] = []
        stored_at = wall_time_us()
        for follows, (ready, offset) in enumerate(new):
            raw = header_bytes(
                ready.payload, offset, ready.origin, place=self._place_id, stored_at=stored_at, follows=follows
            )
            headers.append(read_header(raw, path, 0))
            pieces += [raw, ready.payload.data, padding(ready.payload)]
        if not self._is_synced:
            self._reserve(headers[-1].next_offset)
        try:
            _pwrite_all(tail.descriptor, pieces, published.segment_bytes)
        except OSError as error:
            self._cut(published)
            raise self._failed(error) from error
        try:
            if self._is_synced:
                disk.sync_data(tail.descriptor)
        except OSError as error:
            self._published.write(published, *published[1:4], is_suspect=True)
            raise AppendFailed(
                f"{self.place}: {error.strerror} when it was synced; whether it is kept is not certain until it is "
                "tried again, which stores it once"
            ) from error
        position, now = published.segment_bytes, time.time()
        for header in headers:
            tail.index.note(header, position)
            tail.producers.note(header.origin, header.base_offset, now)
            position += header.frame_bytes
        self._published.write(published, tail.base, position, headers[-1].next_offset)

    def _current(self) -> Published:
        """What is published, with `_tail` as it says. Repairs what a writer that died has left. Holds the lock."""
        published = self._published.read()
        if published is not None and self._is_outdated(published):
            _logger.warning(
                "%s: %s says that the log ends at offset %d, and there is more behind it, as after the restore of an "
                "older copy; the end is found in the last segment",
                self.place,
                self._published.path,
                published.end,
            )
            published = self._recover(is_outdated=True)
        elif published is None or self._is_short(published):
            published = self._recover()
        tail = self._tail
        if tail.base != published.segment:
            tail = self._open_tail(published)
        self._learn(tail, published)
        is_rolling = published.segment_bytes > 0 and os.path.exists(segment_path(self.folder, published.end))
        if published.is_suspect or is_rolling:
            return self._roll(published)
        status = os.fstat(tail.descriptor)
        if not status.st_nlink:
            raise DamagedFrame(segment_path(self.folder, tail.base), 0, "somebody has removed the segment")
        if status.st_size > published.segment_bytes:
            self._cut(published)
        return published

    def _is_short(self, published: Published) -> bool:
        """Whether published bytes are missing: in a copy that was made while the log was appended to, or because
        somebody removed them."""
        path = segment_path(self.folder, published.segment)
        return _size(path) < published.segment_bytes or not os.path.exists(path)

    def _is_outdated(self, published: Published) -> bool:
        """Whether more was appended than one writer can leave that died before it published: then `published` is an
        older copy, or of another partition and too old to name it. Raises MisplacedFile before anything is cut by it.

        Such a writer leaves one append behind the published end of the last segment, or an empty segment that begins
        there. Holds the lock."""
        if published.segment_bytes and _size(segment_path(self.folder, published.end)):
            return True
        if self._tail.base != published.segment:  # once for each segment: it reads the folder
            bases = segment_bases(self.folder)
            if bases and bases[-1] > published.segment and bases[-1] != published.end:
                return True
        path = segment_path(self.folder, published.segment)
        size = _size(path)
        if size <= published.segment_bytes:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            behind = headers_of(descriptor, path, published.segment_bytes, size, self._place_id)
            return any(header.follows == 0 and at > published.segment_bytes for at, header in behind)
        except MisplacedFile:
            raise
        except DamagedFrame:  # torn: what such a writer has left
            return False
        finally:
            os.close(descriptor)

    def _open_tail(self, published: Published) -> _Tail:
        path = segment_path(self.folder, published.segment)
        tail = _Tail(published.segment, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        tail.producers = self._producers_before(published.segment)
        self._tail = tail
        return tail

    def _producers_before(self, base: int) -> Producers:
        """The producers' state at a segment's beginning: as it was written then, or found again in older segments."""
        found = self._load_producers(base)
        if found is not None:
            return found
        bases = segment_bases(self.folder)
        for at in range(bisect_right(bases, base) - 1, -1, -1):
            producers = self._load_producers(bases[at])
            if producers is None and at > 0:
                continue
            # What was dropped before the first segment is as good as forgotten.
            producers = Producers(forgotten=bases[at] - 1) if producers is None else producers
            for older, following in pairwise(bases[at : bisect_right(bases, base)]):
                sealed = self._sealed(older, following)
                producers.note_all((header for _, header in sealed.frames_from(0)), time.time())
            return producers
        return Producers()

    def _load_producers(self, base: int) -> Producers | None:
        """None also if the file belongs elsewhere: like a damaged one it is made up for by the segments."""
        path = producers_path(segment_path(self.folder, base))
        try:
            return load_producers(path, self._place_id, base)
        except MisplacedFile as error:
            _logger.warning("%s; the state is found again in the segments", error)
            return None

    def _learn(self, tail: _Tail, published: Published) -> None:
        """Take in the headers that other processes have appended. Raises DamagedFrame if they do not lead to the
        published end: then the segment or `published` is not the one that belongs here."""
        index, path = tail.index, segment_path(self.folder, tail.base)
        begin, end = index.segment_bytes, published.segment_bytes

        def noted() -> Iterator[Header]:
            expected = index.next_offset if begin else tail.base
            for position, header in headers_of(tail.descriptor, path, begin, end, self._place_id):
                if header.base_offset != expected:
                    raise DamagedFrame(path, position, f"offset {header.base_offset} where {expected} must be")
                index.note(header, position)
                expected = header.next_offset
                yield header

        if begin < end:
            tail.producers.note_all(noted(), time.time())
        found = index.segment_bytes, index.next_offset if end else tail.base
        if found != (end, published.end):
            raise DamagedFrame(
                path,
                end,
                f"its frames end at byte {found[0]:,}, offset {found[1]}, and the published end is {published.end}",
            )

    def _roll(self, published: Published) -> Published:
        """Go on in a new segment, from the published end. The old one is synced up to there."""
        old = self._tail
        old.producers.forget_silent(time.time() - SILENT_S_MAX)
        path = segment_path(self.folder, published.end)
        try:
            if not self._is_synced:
                self._sync_whole(old, published)
            write_beside(index_path(segment_path(self.folder, old.base)), old.index.dump(self._place_id))
            state = dump_producers(old.producers, self._place_id, published.end)
            write_beside(producers_path(path), state, is_durable=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._tail = _Tail(published.end, descriptor)
            if published.end == old.base:  # its first append could not be synced
                os.ftruncate(descriptor, 0)
            elif os.fstat(descriptor).st_size:
                # One that a writer made and that it died before it could publish is empty.
                raise DamagedFrame(path, 0, "a segment with messages lies where the next one is to begin")
            disk.sync_folder(self.folder)
        except OSError as error:
            raise self._failed(error) from error
        self._tail.producers = old.producers
        return self._published.write(published, published.end, 0, published.end)

    def _sync_whole(self, tail: _Tail, published: Published) -> None:
        """Of a segment whose appends were not synced, before it is sealed. If that fails, its pages may be lost and
        called clean: then it is marked, and the next one who comes writes it anew (L3)."""
        if published.is_suspect:
            data = pa.py_buffer(pread(tail.descriptor, published.segment_bytes, 0))
            path = segment_path(self.folder, tail.base)
            for at, header in frames(data, path, 0, data.size, place=self._place_id):
                check_payload(header, memoryview(data)[at : at + header.frame_bytes], path, at)
            write_beside(path, data, is_durable=True)
            disk.sync_folder(self.folder)
            return
        try:
            disk.sync_data(tail.descriptor)
        except OSError:
            self._published.write(published, *published[1:4], is_suspect=True)
            raise

    def _recover(self, *, is_outdated: bool = False) -> Published:
        """After a start of the machine, for the first time, or because what is published is damaged, outdated, or more
        than there is: find the end in the last segment. Holds the lock."""
        # What may be misplaced is read before anything is made or cut.
        known = self._published.whole()
        last = self._published.last()
        # Only a power loss takes what was published, and only where appends are not synced.
        is_lossy = not self._is_synced and not self._published.is_of_this_boot()
        reserved = read_reserved(self.folder, self._place_id) if is_lossy else 0
        base = self._last_base(last)
        path = segment_path(self.folder, base)
        self._tail = _Tail(-1)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            data = pa.py_buffer(pread(descriptor, os.fstat(descriptor).st_size, 0))
            is_suspect = known is not None and known.is_suspect and known.segment == base and not is_outdated
            if known is not None and is_suspect and data.size >= known.segment_bytes:
                # What a failed sync left behind its end is no part of the log, though it can be read.
                return self._published.rebuild(*known[1:4], is_suspect=True)
            scanned = scan(data, path, base, self._place_id)
            if is_lossy:
                return self._recover_lossy(descriptor, data, base, scanned, max(reserved, last.end))
            if scanned.end < last.end:
                check_short(data, path, base, scanned, last, self._place_id)
                self._tell_short(path, scanned.end, last.end)
                return self._go_on_behind(base, scanned.found, scanned.end, last.end)
            if scanned.damage is not None:
                if begins_an_append_behind(data, path, scanned.position, scanned.end, self._place_id):
                    raise scanned.damage
                os.ftruncate(descriptor, scanned.position)
            disk.sync_data(descriptor)
            disk.sync_folder(self.folder)
        finally:
            os.close(descriptor)
        # If there is one of this boot, the damaged one may have been the mark of a failed sync.
        return self._published.rebuild(base, scanned.position, scanned.end, is_suspect=known is not None)

    def _last_base(self, last: Published) -> int:
        """The first offset of the last segment that is there. Raises DamagedFrame if somebody has removed later ones.

        A copy that was made while the log was appended to may lack them too. It differs: the last segment that it has
        was appended to when it was copied, so it has no index, which is made when a segment is sealed."""
        bases = segment_bases(self.folder)
        if not bases and last.end:
            raise DamagedFrame(self.folder, 0, "messages were published, and every segment is missing")
        if not bases:
            return 0
        if last.segment > bases[-1] and os.path.exists(index_path(segment_path(self.folder, bases[-1]))):
            path = segment_path(self.folder, last.segment)
            raise DamagedFrame(path, 0, f"the segment is missing, and messages up to offset {last.end} were published")
        return bases[-1]

    def _recover_lossy(self, descriptor: int, data: pa.Buffer, base: int, scanned: Scanned, until: int) -> Published:
        """After another boot, where appends were not synced: a power loss may have taken any part of the last segment.
        What is whole is kept. The offsets behind it, up to the last that may have been given away, become a gap."""
        path = segment_path(self.folder, base)
        behind, damaged = whole_behind(data, path, scanned, self._place_id, until)
        found = scanned.found + behind
        position = found[-1][0] + found[-1][1].frame_bytes if found else 0
        end = found[-1][1].next_offset if found else base
        for damage in damaged:
            _logger.warning(
                "%s: %s is damaged at byte %d: the messages from offset %d up to %d cannot be read (%s); those behind "
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
                "%s: %s was not whole behind byte %d, offset %d, as after a power loss; the %d bytes there are cut off",
                self.place,
                path,
                position,
                end,
                data.size - position,
            )
            os.ftruncate(descriptor, position)
        if damaged:  # nothing can be appended to it: whoever does reads all headers first
            disk.sync_data(descriptor)
            return self._go_on_behind(base, found, end, until)
        gap = self._gap(end, until)
        _pwrite_all(descriptor, [gap], position)
        disk.sync_data(descriptor)
        disk.sync_folder(self.folder)
        return self._published.rebuild(base, position + len(gap), max(end, until))

    def _go_on_behind(self, base: int, found: list[tuple[int, Header]], end: int, until: int) -> Published:
        """Seal the segment at `base`, of which these frames can be read, and go on in a new one from its `end` on. The
        new one begins with a gap up to `until`. Nothing of the old one is changed: what lies in it behind `end` is no
        part of the log."""
        if found:
            old, index = segment_path(self.folder, base), Index()
            for position, header in found:
                index.note(header, position)
            producers = self._producers_before(base)
            producers.note_all((header for _, header in found), time.time())
            state = dump_producers(producers, self._place_id, end)
            write_beside(producers_path(segment_path(self.folder, end)), state, is_durable=True)
            write_beside(index_path(old), index.dump(self._place_id))
        gap = self._gap(end, until)
        write_beside(segment_path(self.folder, end), gap, is_durable=True)
        disk.sync_folder(self.folder)
        return self._published.rebuild(end, len(gap), max(end, until))

    def _gap(self, end: int, until: int) -> bytes:
        """Frames without messages for the offsets from `end` up to `until`; none if there are none."""
        gaps = b""
        while end < until:
            rows = min(until - end, GAP_ROWS_MAX)
            gaps += gap_bytes(end, rows, place=self._place_id, stored_at=wall_time_us())
            end += rows
        return gaps

    def _reserve(self, end: int) -> None:
        """Before offsets up to this one are given away without a sync: see that no later boot gives them again."""
        if end <= self._reserved:
            return
        reserved = read_reserved(self.folder, self._place_id)
        if end > reserved:
            reserved = end + RESERVED_OFFSETS
            write_beside(f"{self.folder}/{RESERVED}", dump_reserved(reserved, self._place_id), is_durable=True)
        disk.sync_folder(self.folder)  # also of another process's: it may have died before it did so
        self._reserved = reserved

    def _cut(self, published: Published) -> None:
        """Remove what was written behind the published end. If that fails, the next append tries again."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._tail.descriptor, published.segment_bytes)

    def _failed(self, error: OSError) -> LogError:
        advice = "make room, then try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "try again"
        return AppendFailed(f"{self.place}: {error.strerror}; nothing of it is in the log: {advice}")

    # Retention.

    def seal(self, before: int) -> None:
        """If all messages of the last segment are from before this time, go on in a new one: then it can be dropped."""
        if not self.published().segment_bytes:
            return
        with self._exclusive():
            published = self._current()
            if published.segment_bytes and self._tail.index.last_time < before:
                self._roll(published)

    def drop_before(self, keep: int) -> int:
        """Remove the sealed segments that end at or before this offset; the new start. Only unlinks (L2)."""
        with self._exclusive():
            published = self._current()
            bases = segment_bases(self.folder)
            for base, following in pairwise(bases):
                if following > min(keep, published.end):
                    break
                path = segment_path(self.folder, base)
                for file in (path, index_path(path), producers_path(path)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file)
                disk.sync_folder(self.folder)  # in order: a power loss must not leave an older one without the next
            return self.reader.forget_dropped()

    # The lock.

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the partition against other threads and processes, within the bound."""
        with self._appending:  # each thread that has it waits no longer than the bound
            if self._lock_file < 0:
                raise Closed(f"{self.place} was closed")
            try:  # from before the first attempt: an interrupt must not leave it locked, and unlocking twice is no harm
                self._lock(time.monotonic() + self._timeout)
                if not self._published.is_in_place():
                    raise UnknownTopic(self.place.rpartition("/")[0])
                self._check_lock()
                yield
            except (UnknownProducer, SequenceGap):  # refused before anything was done
                raise
            except BaseException:
                # Whatever it was, also an interrupt: what this process believes of the tail is found anew on disk.
                self._tail = _Tail(-1)
                raise
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _lock(self, until: float) -> None:
        pause = 0.00005
        while True:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise LogBusy(
                        f"{self.place}: another process has held the append lock for {self._timeout:g} s; "
                        f"is it stopped? See who has {self.folder}/lock open"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, LOCK_PAUSE_S_MAX)

    def _check_lock(self) -> None:
        """One that was removed and made again would not keep out those who have the other."""
        path, ours = f"{self.folder}/lock", os.fstat(self._lock_file)
        try:
            there = os.stat(path)
        except FileNotFoundError:
            raise DamagedFrame(path, 0, "somebody has removed the lock; open the log again, in every process") from None
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise DamagedFrame(path, 0, "it was removed and made again while the log was open")

    def close(self) -> None:
        """Waits for an append that is under way: closing its files would give its lock to another process."""
        with self._appending:
            self.let_go()
        self.reader.clear()

    def let_go(self) -> None:
        """Close the files, without a lock: for a forked child, where a thread that is not there may hold one."""
        self._published.close()
        descriptor, self._lock_file = self._lock_file, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._tail = _Tail(-1)


def dump_reserved(reserved: int, place: int) -> bytes:
    return with_checksum(f"{reserved} {place:016x}")


def read_reserved(folder: str, place: int) -> int:
    """Every offset that was given away without a sync is smaller. 0 if there was none. Raises DamagedFrame, and
    MisplacedFile if the file belongs to another partition."""
    path = f"{folder}/{RESERVED}"
    try:
        text = read_with_checksum(path)
    except FileNotFoundError:
        return 0
    if text is None:
        raise DamagedFrame(path, 0, "the checksum does not match")
    number, _, written_for = text.partition(" ")
    if written_for and written_for != f"{place:016x}":  # the format before has the number alone
        raise MisplacedFile(
            path, 0, "it was written for another topic or partition; put back the one that belongs here"
        )
    return int(number)


def _size(path: str) -> int:
    """Of a file; 0 if it is missing."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def wall_time_us() -> int:
    """What a frame is stamped with when it is stored: microseconds since 1970."""
    return time.time_ns() // 1000


class _Tail:
    """The segment that is appended to, as this process knows it."""

    def __init__(self, base: int, descriptor: int = -1) -> None:
        self.base, self.descriptor = base, descriptor
        self.index = Index()
        self.producers = Producers()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:  # the module may be gone by then, at the interpreter's end
            close(self.descriptor)


def _pwrite_all(descriptor: int, pieces: list[object], position: int) -> None:
    buffers = [memoryview(piece).cast("B") for piece in pieces if len(memoryview(piece))]  # type: ignore[arg-type]
    while buffers:
        written = os.pwritev(descriptor, buffers[:1000], position)
        position += written
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]
