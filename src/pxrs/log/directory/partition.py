"""One partition of a topic in a local directory, appended to and read by any number of processes.

    partition-N/
      00000000000000000000.log .index .producers    segments, their sparse indexes, producers' state at their beginning
      published                                     up to where readers may read
      start                                         the first offset, once retention has removed some
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
The folder of a deleted topic is gone for good, and a later topic of the same name has another one. An append looks
whether its files are still in place, and fails if they are not; `DirectoryTopic` tells a deletion from damage.
After another boot the published end is rebuilt: the last segment is checked frame by frame, cut where the one unsynced
append is torn, and synced. Damage that a later append proves to be older is reported, never cut (F5). So the end is
found too if `published` is damaged, older than the segments, or says more than is there (`recovery.py`).

With durability "os" an append is not synced; a segment is, before the next one is made. So a power loss takes of the
last segment whatever the system had not written yet, also what readers have seen and checkpoints count. Its offsets are
never given to other messages: they are reserved on disk in advance, many at a time, and after another boot what is left
of a reservation becomes a gap, which readers pass over (docs/decisions/0008).

Every file names the partition by its `place_id`. One that belongs elsewhere, after a mistake in a restore, raises
MisplacedFile before anything is cut by what it says (docs/decisions/0009).
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
from typing import Final

import pyarrow as pa

from pxrs import clock, disk
from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    Closed,
    DamagedFrame,
    LogBusy,
    LogError,
    SequenceGap,
    UnknownProducer,
)
from pxrs.log.batch import (
    Header,
    Origin,
    check_payload,
    header_bytes,
    padding,
    read_header,
)
from pxrs.log.contract import Append
from pxrs.log.directory.index import Index, stored_time, write_beside
from pxrs.log.directory.producers_file import dump_producers, producers_path
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.reading import Reader, headers_of, pread
from pxrs.log.directory.recovery import Recovery
from pxrs.log.directory.reserved import RESERVED, RESERVED_OFFSETS, dump_reserved, read_reserved
from pxrs.log.directory.segment import (
    Sealed,
    frames,
    index_path,
    pwrite_all,
    segment_bases,
    segment_path,
)
from pxrs.log.directory.start import write_start
from pxrs.log.directory.unwritable import UnwritablePublished
from pxrs.log.outcomes import Outcome, StoredAt
from pxrs.log.producers import SILENT_S_MAX, Incoming, Producers

LOCK_PAUSE_S_MAX: Final = 0.005
_logger = logging.getLogger(__name__)


class Partition:
    """A handle of this process. Threads share it."""

    def __init__(
        self,
        folder: str,
        place: str,
        place_id: int,
        *,
        segment_bytes: int,
        timeout: float,
        is_synced: bool = True,
        is_retained: bool = False,
        segment_s: float | None = None,
    ) -> None:
        """`place` names the partition in messages, `place_id` in files; `is_synced` is the choice of durability;
        `is_retained`: the topic has a retention setting; `segment_s`: how long a segment takes appends, None for ever.
        """
        self.folder, self.place, self._place_id = folder, place, place_id
        self._segment_bytes, self._timeout = segment_bytes, timeout
        self._segment_us = None if segment_s is None else int(segment_s * 1_000_000)
        self._is_synced = is_synced
        self._reserved = 0
        """As this process knows it; another one may have reserved more."""
        self._appending = threading.Lock()
        self._refusal: OSError | None = None
        """Why this process may not write to the partition: then it is only read."""
        self._published, self._lock_file = self._open_files()
        self._tail = _Tail(-1)
        self._looked_at = -1
        """The last segment of which this process has seen that no published byte is missing."""
        self.reader = Reader(folder, place, place_id, self.published, is_retained=is_retained)
        self._recovery = Recovery(
            folder, place, place_id, self._published, is_synced=is_synced, known_start=self.reader.known_start
        )

    def _open_files(self) -> tuple[PublishedFile, int]:
        """`published` and the descriptor of the append lock; -1 if this process may only read the partition."""
        path = f"{self.folder}/{PUBLISHED}"
        file: PublishedFile | None = None
        try:
            file = PublishedFile(path, self._place_id)
            return file, os.open(f"{self.folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except BaseException as error:
            if file is not None:
                file.close()
            if not isinstance(error, OSError) or disk.denied(error) is None:
                raise
            self._refusal = error
        return UnwritablePublished(self.folder, path, self.place, self._place_id, is_synced=self._is_synced), -1

    def end_problem(self) -> str | None:
        """Why the end that `published` tells is only a lower bound; None if it is exact."""
        if not isinstance(self._published, UnwritablePublished):
            return None
        self.published()
        return self._published.problem

    def published(self) -> Published:
        """What may be read; rebuilt first if nothing was published since the machine started, or if not all of it is
        there. A process that may not write cannot rebuild it: see `unwritable.py`."""
        published = self._published.read()
        if published is None or not self._published.is_in_place():
            with self._exclusive():
                published = self._current()
        elif published.segment != self._looked_at:  # once for each segment
            first = self._recovery.first_offset()
            if published == NOTHING and not first:
                return published  # of a partition without a segment, which only a process that may write makes
            if self._recovery.is_short(published) or published.end < first:
                # Unless it was rolled and retained meanwhile.
                again = self._published.read()
                return self._recovery.without_missing(published) if again == published else self.published()
            self._looked_at = published.segment
        return published

    # Appending.

    def append(self, batches: Sequence[Append]) -> list[Outcome]:
        """Store the batches in their order, together and durably. The outcomes are all StoredAt: whatever keeps the
        batches from being stored is raised, AppendUnknown if they may have been stored."""
        try:
            with self._exclusive():
                return self._append(self._current(), batches)
        except OSError as error:
            raise self._failed(error) from error

    def _append(self, published: Published, batches: Sequence[Append]) -> list[Outcome]:
        producers = self._tail.producers
        incoming = [Incoming(each.origin, each.payload.rows, each.since) for each in batches]
        incoming = producers.recall(incoming, published.end, self._origins_since, time.time())
        placed = producers.place(incoming, published.end)
        new = [(each, place.offset) for each, place in zip(batches, placed, strict=True) if place.is_new]
        if new:
            self._write(published, new)
        return [StoredAt(place.offset, not place.is_new) for place in placed]

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

    def _write(self, published: Published, new: list[tuple[Append, int]]) -> None:
        """Write the batches behind the published end, each with its offset; sync and publish them."""
        size = sum(append.payload.frame_bytes for append, _ in new)
        if published.segment_bytes and (
            published.segment_bytes + size > self._segment_bytes or self._is_tail_old(clock.wall_time_us())
        ):
            published = self._roll(published)
        tail = self._tail
        path = segment_path(self.folder, tail.base)
        pieces: list[object] = []
        headers: list[Header] = []
        stored_at = clock.wall_time_us()
        for follows, (append, offset) in enumerate(new):
            raw = header_bytes(
                append.payload, offset, append.origin, place=self._place_id, stored_at=stored_at, follows=follows
            )
            headers.append(read_header(raw, path, 0))
            pieces += [raw, append.payload.data, padding(append.payload)]
        if not self._is_synced:
            self._reserve(headers[-1].next_offset)
        try:
            pwrite_all(tail.descriptor, pieces, published.segment_bytes)
        except OSError as error:
            if not self._cut(published):
                raise self._unknown(error, "written, and what was written could not be cut off again") from error
            raise self._failed(error) from error
        try:
            if self._is_synced:
                disk.sync_data(tail.descriptor)
        except OSError as error:
            self._mark_suspect(published, error)
            raise self._unknown(error, "synced") from error
        position, now = published.segment_bytes, time.time()
        for header in headers:
            tail.index.note(header, position)
            tail.producers.note(header.origin, header.base_offset, now)
            position += header.frame_bytes
        try:
            self._published.write(published, tail.base, position, headers[-1].next_offset)
        except OSError as error:
            raise self._unknown(error, "published") from error

    def _mark_suspect(self, published: Published, cause: OSError) -> None:
        """After a failed sync: have every process go on in a new segment (L3)."""
        try:
            self._published.write(published, *published[1:4], is_suspect=True)
        except OSError as error:
            raise self._unknown(error, f"marked after a sync had failed with {cause.strerror}") from error

    def _unknown(self, error: OSError, when: str) -> AppendUnknown:
        return AppendUnknown(
            f"{self.place}: {error.strerror} when it was {when}; whether it is kept is not certain until it is tried "
            "again, which stores it once"
        )

    def _is_tail_old(self, now: int) -> bool:
        """Whether the last segment has taken appends for as long as one may: else a trickle of messages would keep it
        young for ever, and nothing in it would ever be old enough to be removed. Also if its first frame was stored
        that much later than now, by a clock that was ahead."""
        return self._segment_us is not None and abs(now - self._tail.index.first_stored) >= self._segment_us

    def _current(self) -> Published:
        """What is published, with `_tail` as it says. Repairs what a writer that died has left. Holds the lock."""
        published = self._published.read()
        if published is not None and self._recovery.is_outdated(published):
            _logger.warning(
                "%s: %s says that the log ends at offset %d, and there is more behind it, as after the restore of an "
                "older copy; the end is found in the last segment",
                self.place,
                self._published.path,
                published.end,
            )
            published = self._recovered(is_outdated=True)
        elif published is None or self._recovery.is_short(published):
            published = self._recovered()
        tail = self._tail
        is_opened = tail.base != published.segment
        if is_opened:
            tail = self._open_tail(published)
        self._learn(tail, published)
        is_rolling = published.segment_bytes > 0 and os.path.exists(segment_path(self.folder, published.end))
        if published.is_suspect or is_rolling:
            published, is_opened = self._roll(published), True
        tail = self._tail
        status = os.fstat(tail.descriptor)
        if not status.st_nlink:
            raise DamagedFrame(segment_path(self.folder, tail.base), 0, "somebody has removed the segment")
        if status.st_size > published.segment_bytes:
            self._cut(published)
        if is_opened and published.end < (first := self._recovery.first_offset()):
            published = self._fill(published, first)
        return published

    def _fill(self, published: Published, first: int) -> Published:
        """Append a gap up to the first offset that retention has left. `published` is an older copy than `start`: an
        offset before it may have been given away already, and nobody would read what gets it."""
        self._recovery.tell_early_end(published.end, first)
        tail = self._tail
        gap = self._recovery.gap(published.end, first)
        if not self._is_synced:
            self._reserve(first)
        pwrite_all(tail.descriptor, [gap], published.segment_bytes)
        if self._is_synced:  # if that fails, the next one who comes cuts the gap off and writes it again
            disk.sync_data(tail.descriptor)
        published = self._published.write(published, tail.base, published.segment_bytes + len(gap), first)
        self._learn(tail, published)
        return published

    def _recovered(self, *, is_outdated: bool = False) -> Published:
        self._tail = _Tail(-1)
        return self._recovery.recover(is_outdated=is_outdated)

    def _open_tail(self, published: Published) -> _Tail:
        path = segment_path(self.folder, published.segment)
        tail = _Tail(published.segment, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        tail.producers = self._recovery.producers_before(published.segment)
        self._tail = tail
        return tail

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
            if published.end != old.base:  # only now: an index says that another segment follows
                write_beside(index_path(segment_path(self.folder, old.base)), old.index.dump(self._place_id))
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

    def _cut(self, published: Published) -> bool:
        """Remove what was written behind the published end. False if that fails: the next append tries again."""
        try:
            os.ftruncate(self._tail.descriptor, published.segment_bytes)
        except OSError as error:
            _logger.warning("%s: a torn append could not be cut off: %s", self.place, disk.explain(error))
            return False
        return True

    def _failed(self, error: OSError) -> LogError:
        advice = "make room, then try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "try again"
        return AppendFailed(f"{self.place}: {disk.explain(error)}; nothing of it is in the log: {advice}")

    # Retention.

    def seal(self, before: int) -> None:
        """If all of the last segment was stored before this time, go on in a new one: then it can be dropped."""
        if not self.published().segment_bytes:
            return
        with self._exclusive():
            published = self._current()
            index = self._tail.index
            stored = stored_time(index.last_stored, self._tail.descriptor, is_stamped=index.is_stamped)
            if published.segment_bytes and stored < before:
                self._roll(published)

    def drop_before(self, keep: int) -> int:
        """Remove the sealed segments that end at or before this offset; the new start. Only unlinks (L2)."""
        with self._exclusive():
            published = self._current()
            bases = segment_bases(self.folder)
            dropped = [(base, after) for base, after in pairwise(bases) if after <= min(keep, published.end)]
            if dropped:
                # First of all: else a crash, or a reader that comes in between, would call the segments missing.
                write_start(self.folder, self._place_id, max(dropped[-1][1], self.reader.known_start() or 0))
            for base, _ in dropped:
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
        if self._refusal is not None:
            raise disk.log_error(self._refusal, self.folder, f"{self.place}: ")
        with self._appending:  # each thread that has it waits no longer than the bound
            if self._lock_file < 0:
                raise Closed(f"{self.place} was closed")
            try:  # from before the first attempt: an interrupt must not leave it locked, and unlocking twice is no harm
                self._lock(time.monotonic() + self._timeout)
                if not self._published.is_in_place():
                    what = "somebody has removed it; open the log again, in every process"
                    raise DamagedFrame(self._published.path, 0, what)
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

    def __del__(self) -> None:
        """A log that was dropped without `close` keeps no descriptors."""
        if hasattr(self, "_lock_file"):  # else the constructor has failed, and closed what it had opened
            self.let_go()


class _Tail:
    """The segment that is appended to, as this process knows it."""

    def __init__(self, base: int, descriptor: int = -1) -> None:
        self.base, self.descriptor = base, descriptor
        self.index = Index()
        self.producers = Producers()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:  # the module may be gone by then, at the interpreter's end
            close(self.descriptor)
