"""One partition of a topic in a local directory, appended to and read by any number of processes.

    partition-N/
      00000000000000000000.log .index .producers    segments, their sparse indexes, producers' state at their beginning
      published                                     the end up to which readers may read
      start                                         the first offset, once retention has removed some
      reserved                                      with durability "os" only: offsets below it may have been given away
      lock                                          held while appending (`append_lock.py`)

`segments/` writes, syncs, rolls and scans the segment files. This module decides which offsets batches get, which of
them are duplicates, when to roll, and what to publish.

Invariants:
- An append is written, synced, published and acknowledged, in this order (L1). Nothing below the published end is ever
  changed (L2).
- The append lock guards append, roll, recovery and retention. A process that takes it first cuts off what a writer left
  behind the published end that died before it published. Each append is synced before the next one is written, so at
  most one append is not synced at any moment (L3).
- A segment is synced before the next one gets its first frame.

On failure:
- An append that cannot be written is cut off again, and raises AppendFailed: it is not in the log.
- An append that cannot be synced or published raises AppendUnknown: it may be in the log after the machine is started
  again. The sync is not repeated, because the system may have dropped the pages and report success the second time.
  Instead `published` is marked suspect for all processes: the next append goes on in a new segment from the published
  end, and what lies behind that end in the old segment is not part of the log. The mark need not outlive the machine's
  run, because after a start the medium itself is read.
- A writer may die after it has made the next segment and before it has published it. The next writer finishes the roll:
  if it went on in the old segment, the empty one would stand for offsets that it does not have.
- The folder of a deleted topic is gone for good; a later topic of the same name has another folder. An append checks
  that `published` and `lock` are still in place, and fails if they are not. `DirectoryTopic` finds out whether the
  topic was deleted.
- After a start of the machine the published end is rebuilt (`recovery.py`): the frames of the last segment are checked,
  a torn append is cut off, and the rest is synced. Damage that a later append proves to be older is reported and never
  cut (F5). The end is rebuilt too if `published` is damaged, older than the segments, or beyond what is there.

With durability "os" an append is not synced; a segment is, before the next one is made. So a power loss takes from the
last segment whatever the system had not written yet, also messages that were read and that checkpoints count. The
offsets of such messages are never given to others: offsets are reserved on disk in advance, many at a time, and after a
start of the machine the rest of the reservation becomes a gap, which readers pass over (docs/decisions/0008).

Every file names the partition by its `place_id`. A file that belongs elsewhere, after a mistake in a restore, raises
MisplacedFile before anything is cut by what it says (docs/decisions/0009).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pxrs import clock, disk
from pxrs.disk import replace_file
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
from pxrs.log.batch import Header, check_payload, header_bytes, padding, read_header
from pxrs.log.contract import Append
from pxrs.log.directory.append_lock import AppendLock
from pxrs.log.directory.index import stored_time
from pxrs.log.directory.producers_file import dump_producers, producers_path
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.reading import Reader
from pxrs.log.directory.recovery import Recovery
from pxrs.log.directory.reserved import Reservation
from pxrs.log.directory.sealed import index_path
from pxrs.log.directory.segments.files import segment_bases, segment_path
from pxrs.log.directory.segments.frames import frames
from pxrs.log.directory.segments.writing import OpenSegment, next_segment
from pxrs.log.directory.settings import TopicSettings
from pxrs.log.directory.start import note_start, write_start
from pxrs.log.directory.tail import Tail
from pxrs.log.directory.unwritable import UnwritablePublished
from pxrs.log.outcomes import Outcome, StoredAt
from pxrs.log.producers import SILENT_S_MAX, Incoming
from pxrs.metrics.instruments import UPKEEP_REMOVED
from pxrs.waiting import limit_until, seconds_left

_logger = logging.getLogger(__name__)


# Over the limit: appending, rolling, removing and recovering share the append lock and what is known of the tail.
class Partition:
    """A handle of this process. Threads share it."""

    def __init__(self, folder: str, place: str, place_id: int, settings: TopicSettings, timeout: float) -> None:
        """`place` names the partition in messages, `place_id` in files; `settings` are those of the topic."""
        self.folder, self.place, self._place_id = folder, place, place_id
        self._settings, self._timeout = settings, timeout
        self._topic = settings.topic
        """The settings in force: read again under the append lock."""
        self._reservation = Reservation(folder, place, place_id)
        self._appending = threading.Lock()
        """Held by the thread of this process that has the append lock, or waits for it."""
        self._refusal: OSError | None = None
        """Why this process may not write to the partition; then it only reads. None if it may."""
        self._published, self._lock = self._open_files()
        self._tail: Tail | None = None
        """The segment that is appended to, as far as this process knows it. None before the first append, and after an
        error, when everything is read again from the files."""
        self._checked_segment = -1
        """The last segment that this process has found to have all its published bytes."""
        self.reader = Reader(folder, place, place_id, self.published, is_retained=lambda: settings.topic.is_retained)
        self._recovery = Recovery(
            folder, place, place_id, self._published, is_synced=self._is_all_synced, known_start=self.reader.known_start
        )

    def _open_files(self) -> tuple[PublishedFile, AppendLock | None]:
        """`published` and the append lock; no lock if this process may only read the partition."""
        path = f"{self.folder}/{PUBLISHED}"
        file: PublishedFile | None = None
        try:
            file = PublishedFile(path, self._place_id)
            return file, AppendLock(self.folder, self.place, self._timeout)
        except BaseException as error:
            if file is not None:
                file.close()
            if not isinstance(error, OSError) or disk.denied(error) is None:
                raise
            self._refusal = error
        return UnwritablePublished(self.folder, path, self.place, self._place_id, is_synced=self._is_all_synced), None

    @property
    def _is_synced(self) -> bool:
        """Whether each append is synced: the choice of durability."""
        return self._topic.durability == "disk"

    def _is_all_synced(self) -> bool:
        """Whether every published message was synced. A partition whose topic had durability "os" before has appends
        that were not, until the next segment begins: then `reserved` is there."""
        return self._is_synced and not self._reservation.is_there

    def end_problem(self) -> str | None:
        """Why the published end is only a lower bound; None if it is exact."""
        if not isinstance(self._published, UnwritablePublished):
            return None
        self.published()
        return self._published.problem

    def published(self) -> Published:
        """The published end. It is rebuilt first if nothing was published since the machine started, or if published
        bytes are missing. A process that may not write cannot rebuild it: see `unwritable.py`."""
        published = self._published.read()
        if published is None or not self._published.is_in_place():
            with self._exclusive():
                published, _ = self._current()
        elif published.segment != self._checked_segment:  # the check is made once for each segment
            first = self._recovery.first_offset()
            if published == NOTHING and not first:
                return published  # the partition has no segment yet; a process that may write makes the first one
            if self._recovery.is_short(published) or published.end < first:
                # The segment may be missing because another process has rolled and removed it meanwhile.
                again = self._published.read()
                return self._recovery.without_missing(published) if again == published else self.published()
            self._checked_segment = published.segment
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

    def _append(self, current: tuple[Published, Tail], batches: Sequence[Append]) -> list[Outcome]:
        published, tail = current
        incoming = [Incoming(each.origin, each.payload.rows, each.since) for each in batches]
        incoming = tail.producers.recall(incoming, published.end, tail.origins_since, time.time())
        placed = tail.producers.place(incoming, published.end)
        new = [(each, place.offset) for each, place in zip(batches, placed, strict=True) if place.is_new]
        if new:
            self._write(published, tail, new)
        return [StoredAt(place.offset, not place.is_new) for place in placed]

    def _write(self, published: Published, tail: Tail, new: list[tuple[Append, int]]) -> None:
        """Write the batches behind the published end, each with its offset; sync and publish them."""
        size = sum(append.payload.frame_bytes for append, _ in new)
        if published.segment_bytes and (
            published.segment_bytes + size > self._topic.segment_bytes or self._is_old(tail, clock.wall_time_us())
        ):
            published, tail = self._roll(published, tail)
        pieces, headers = self._frames(tail, new)
        if not self._is_synced:
            self._reservation.extend(headers[-1].next_offset)
        try:
            tail.segment.write(pieces, published.segment_bytes)
        except OSError as error:
            if not self._cut(published, tail):
                raise self._unknown(error, "written, and what was written could not be cut off again") from error
            raise self._failed(error) from error
        try:
            if self._is_synced:
                tail.segment.sync()
        except OSError as error:
            self._mark_suspect(published, error)
            raise self._unknown(error, "synced") from error
        position = tail.note(headers)
        try:
            self._published.write(published, tail.base, position, headers[-1].next_offset)
        except OSError as error:
            raise self._unknown(error, "published") from error

    def _frames(self, tail: Tail, new: list[tuple[Append, int]]) -> tuple[list[object], list[Header]]:
        """The bytes of the frames, in pieces that are not copied, and their headers."""
        pieces: list[object] = []
        headers: list[Header] = []
        stored_at = clock.wall_time_us()
        for follows, (append, offset) in enumerate(new):
            raw = header_bytes(
                append.payload, offset, append.origin, place=self._place_id, stored_at=stored_at, follows=follows
            )
            headers.append(read_header(raw, tail.segment.path, 0))
            pieces += [raw, append.payload.data, padding(append.payload)]
        return pieces, headers

    def _mark_suspect(self, published: Published, cause: OSError) -> None:
        """After a failed sync: mark `published`, so that the next append of any process goes on in a new segment
        (L3)."""
        try:
            self._published.write(published, *published[1:4], is_suspect=True)
        except OSError as error:
            raise self._unknown(error, f"marked after a sync had failed with {cause.strerror}") from error

    def _is_old(self, tail: Tail, now: int) -> bool:
        """Whether the segment has taken appends for `segment_s`. Without this limit a few messages now and then would
        keep the segment young for ever, and nothing in it would become old enough to be removed. A first frame that was
        stored `segment_s` later than now, by a clock that was ahead, counts as old too."""
        age_s = self._topic.segment_age_s
        return age_s is not None and abs(now - tail.index.first_stored) >= int(age_s * 1_000_000)

    def _current(self) -> tuple[Published, Tail]:
        """The published end, and the tail as far as it is published. Repairs what a writer that died has left. The
        caller holds the append lock."""
        published = self._published.read()
        if published is not None and self._recovery.is_outdated(published):
            _logger.warning(
                "%s: %s says that the log ends at offset %d, and there is more behind it, as after the restore of an "
                "older copy; the end is found in the last segment",
                self.place,
                self._published.path,
                published.end,
            )
            self._tail = None
            published = self._recovery.recover(is_outdated=True)
        elif published is None or self._recovery.is_short(published):
            self._tail = None
            published = self._recovery.recover()
        tail = self._tail
        is_opened = tail is None or tail.base != published.segment
        if tail is None or is_opened:
            tail = self._tail = self._open_tail(published)
        tail.learn(published)
        is_rolling = published.segment_bytes > 0 and os.path.exists(segment_path(self.folder, published.end))
        if published.is_suspect or is_rolling:
            (published, tail), is_opened = self._roll(published, tail), True
        if tail.segment.is_removed:
            raise DamagedFrame(tail.segment.path, 0, "somebody has removed the segment")
        if tail.segment.size > published.segment_bytes:
            self._cut(published, tail)
        if is_opened and published.end < (first := self._recovery.first_offset()):
            published = self._fill(published, tail, first)
        return published, tail

    def _fill(self, published: Published, tail: Tail, first: int) -> Published:
        """Append a gap up to `first`, the first offset that retention has left. `published` is an older copy than
        `start`: the offsets before `first` may have been given to messages that retention has removed."""
        self._recovery.tell_early_end(published.end, first)
        gap = self._recovery.gap(published.end, first)
        if not self._is_synced:
            self._reservation.extend(first)
        tail.segment.write([gap], published.segment_bytes)
        if self._is_synced:  # if that fails, the next append cuts the gap off and writes it again
            tail.segment.sync()
        published = self._published.write(published, tail.base, published.segment_bytes + len(gap), first)
        tail.learn(published)
        return published

    def _open_tail(self, published: Published) -> Tail:
        segment = OpenSegment.open(self.folder, published.segment)
        return Tail(segment, self._place_id, self._recovery.producers_before(published.segment))

    def _roll(self, published: Published, old: Tail) -> tuple[Published, Tail]:
        """Go on in a new segment, from the published end. The old one is synced up to there."""
        old.producers.forget_silent(time.time() - SILENT_S_MAX)
        path = segment_path(self.folder, published.end)
        # True if the first append to the old segment could not be synced: the new one has the same name.
        is_same = published.end == old.base
        is_all_synced = self._is_all_synced()
        try:
            if not is_all_synced:
                self._sync_whole(old, published)
            state = dump_producers(old.producers, self._place_id, published.end)
            replace_file(producers_path(path), state, is_durable=True)
            segment = next_segment(self.folder, published.end, is_emptied=is_same)
            if not is_same:  # only now, because an index says that another segment follows
                replace_file(index_path(old.segment.path), old.index.dump(self._place_id))
        except OSError as error:
            raise self._failed(error) from error
        tail = self._tail = Tail(segment, self._place_id, old.producers)
        published = self._published.write(published, published.end, 0, published.end)
        if self._is_synced and not is_all_synced:
            self._reservation.end()
        return published, tail

    def _sync_whole(self, tail: Tail, published: Published) -> None:
        """Sync a segment whose appends were not synced, before the next one is made. If that fails, the system may have
        lost pages and report success at the next sync: so `published` is marked suspect, and the next append of any
        process writes the whole segment anew into another file (L3)."""
        if published.is_suspect:
            data, path = tail.segment.read(published.segment_bytes), tail.segment.path
            for at, header in frames(data, path, 0, data.size, place=self._place_id):
                check_payload(header, memoryview(data)[at : at + header.frame_bytes], path, at)
            replace_file(path, data, is_durable=True)
            disk.sync_folder(self.folder)
            return
        try:
            tail.segment.sync()
        except OSError:
            self._published.write(published, *published[1:4], is_suspect=True)
            raise

    def _cut(self, published: Published, tail: Tail) -> bool:
        """Remove what was written behind the published end. False if that fails: the next append tries again."""
        try:
            tail.segment.cut(published.segment_bytes)
        except OSError as error:
            _logger.warning("%s: a torn append could not be cut off: %s", self.place, disk.explain(error))
            return False
        return True

    def _failed(self, error: OSError) -> LogError:
        if disk.denied(error) is not None:
            return disk.log_error(error, self.folder, f"{self.place}: ")
        advice = "make room, then try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "try again"
        return AppendFailed(f"{self.place}: {disk.explain(error)}; nothing of it is in the log: {advice}")

    def _unknown(self, error: OSError, when: str) -> AppendUnknown:
        return AppendUnknown(
            f"{self.place}: {error.strerror} when it was {when}; whether it is kept is not certain until it is tried "
            "again, which stores it once"
        )

    # Retention.

    def seal(self, before: int) -> None:
        """If all of the last segment was stored before this time, go on in a new one, so that the last one can be
        dropped."""
        if not self.published().segment_bytes:
            return
        with self._exclusive():
            published, tail = self._current()
            index = tail.index
            stored = stored_time(index.last_stored, tail.segment.descriptor, is_stamped=index.is_stamped)
            if published.segment_bytes and stored < before:
                self._roll(published, tail)

    def drop_before(self, keep: int, revision: int | None = None) -> int | None:
        """Remove the sealed segments that end at or before this offset. Returns the new start. Only unlinks (L2).

        revision: remove nothing, and return None, if the topic has other settings by now than those of this revision,
        by which the offset was chosen."""
        with self._exclusive():
            if revision is not None and self._topic.revision != revision:
                return None
            published, _ = self._current()
            bases = segment_bases(self.folder)
            dropped = [(base, after) for base, after in pairwise(bases) if after <= min(keep, published.end)]
            if dropped:
                # Before the segments are removed: otherwise a reader that comes in between, or after a crash, would
                # report them as missing.
                write_start(self.folder, self._place_id, max(dropped[-1][1], self.reader.known_start() or 0))
            for base, _ in dropped:
                path = segment_path(self.folder, base)
                for file in (path, index_path(path), producers_path(path)):
                    with contextlib.suppress(FileNotFoundError):
                        size = os.stat(file).st_size
                        os.unlink(file)
                        UPKEEP_REMOVED.of(self.place.rpartition("/")[0]).add(size)
                # After each one, so that a power loss cannot bring back an older segment without the one behind it.
                disk.sync_folder(self.folder)
            return self.reader.forget_dropped()

    def note_start(self) -> None:
        """Write the file `start` if it is missing, before the topic gets its first retention setting or loses its last
        one: without the file, the setting tells what a missing first segment means (`start.py`)."""
        with self._exclusive():
            note_start(self.folder, self._place_id)

    def settle(self) -> None:
        """Take the settings of the topic into use, after they were changed. When this returns, no process appends or
        removes anything by the former ones; and if each append is to be synced from now on, all earlier ones are."""
        with self._exclusive():
            published, tail = self._current()
            if self._is_synced and not self._is_all_synced():
                self._roll(published, tail)

    def _take_settings(self) -> None:
        """Under the append lock: use the settings as they are now."""
        topic = self._settings.look()
        if topic is not self._topic:
            self._topic = topic
            self._reservation.forget()

    # The lock.

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the append lock against other threads and processes. Raises LogBusy if it is not free in time."""
        if self._refusal is not None:
            raise disk.log_error(self._refusal, self.folder, f"{self.place}: ")
        # Without a limit by the lock itself: an interrupt could come between a call of `acquire` and a `try`.
        with self._appending if limit_until() == math.inf else self._appending_in_time():
            lock = self._lock
            if lock is None or not lock.is_open:
                raise Closed(f"{self.place} was closed")
            try:  # includes `acquire`: an interrupt must not leave the lock taken, and releasing it twice does no harm
                lock.acquire()
                if not self._published.is_in_place():
                    what = "somebody has removed it; open the log again, in every process"
                    raise DamagedFrame(self._published.path, 0, what)
                lock.check_in_place()
                self._take_settings()
                yield
            except (UnknownProducer, SequenceGap):  # the append was refused before anything was changed
                raise
            except BaseException:
                # After any other error, an interrupt too, what this process knows of the tail may be wrong.
                self._tail = None
                raise
            finally:
                lock.release()

    @contextlib.contextmanager
    def _appending_in_time(self) -> Iterator[None]:
        """Hold `_appending`. Raises LogBusy when the limit of this thread is over (`waiting.time_limit`). Another
        thread holds it while it waits for the append lock, or for a disk that hangs."""
        if not self._appending.acquire(timeout=seconds_left(threading.TIMEOUT_MAX)):
            raise LogBusy(f"{self.place}: another thread of this process has not finished its append: try again")
        try:
            yield
        finally:
            self._appending.release()

    def close(self) -> None:
        """Waits for an append that is under way: closing its files would give its lock to another process."""
        with self._appending:
            self.let_go()
        self.reader.clear()

    def let_go(self) -> None:
        """Close the files without taking `_appending`: for a forked child, where a thread that does not exist may hold
        it."""
        self._published.close()
        if self._lock is not None:
            self._lock.close()
        self._tail = None

    def __del__(self) -> None:
        """A log that was dropped without `close` keeps no descriptors."""
        if hasattr(self, "_lock"):  # otherwise the constructor has failed, and has closed what it had opened
            self.let_go()
