"""The journal of a storage node: the records of all ledgers one after the other, in segment files.

Group commit: one thread takes all waiting records, up to a bound, writes them, syncs once, and reports all of them as
written. It writes the next batch only after that sync.

After a failed write or sync, the journal discards that batch and everything that is waiting, because the decision to
accept a waiting record may depend on a record of the failed batch. The end of the journal does not move, and the next
batch goes to a new file that begins there. So no byte of the failed write becomes part of the journal (L3):
`open_journal` reads a segment only up to where the next one begins.

    state     a batch is written and synced    a write or sync fails    before the next batch
    --------  -------------------------------  -----------------------  -----------------------------------
    good      good                             broken                   -
    broken    -                                -                        create a new file; if this succeeds:
                                                                        good; else the batch fails: broken
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

from pxrs import disk
from pxrs.cluster.storage import removed
from pxrs.cluster.storage.format import (
    HEADER_BYTES_MAX,
    HERE,
    Kind,
    Record,
    body_padding,
    decode,
    encode,
    header_bytes,
    record_bytes,
)
from pxrs.cluster.storage.index import Entries
from pxrs.cluster.storage.opening import Opened, parts
from pxrs.cluster.storage.removed import Lost
from pxrs.errors import Closed, DamagedFrame
from pxrs.log.directory.segments.files import pread, segment_path
from pxrs.log.directory.segments.writing import OpenSegment
from pxrs.metrics.instruments import STORAGE_FAILURES, STORAGE_SYNC, STORAGE_WRITTEN
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 256 << 20
BATCH_BYTES_MAX: Final = 16 << 20
BATCH_RECORDS_MAX: Final = 4_000
"""Maximum size of a batch. It also bounds what is written again when the node starts."""
SMALL_BYTES: Final = 16 << 10
"""Bodies up to this length are copied into one buffer, which is written by one system call."""
UNCHECKED: Final = "unchecked"
"""The name of a file that exists from a start in doubt until closed ledgers were compared with the index."""
FILES_MAX: Final = 256
"""Maximum number of sealed segments that are kept open for readers."""

Piece = bytes | memoryview


@dataclass(slots=True, eq=False)
class Write:
    """A request that waits for the next sync."""

    record: Record | None
    """The record to write, without its position. None writes nothing: `done` is called when all earlier writes are
    synced."""
    pieces: Sequence[Piece]
    """The record's body."""
    done: Callable[[Exception | None], None]
    """Called on the journal's thread, without a lock: with None when the record is synced, otherwise with the error."""
    undo: Callable[[], None] | None = None
    """Called under `Journal.lock` if the write failed, before `done`, the last write first. It reverts the decision in
    memory."""
    removes: Entries | None = None
    """For a REMOVED record: the entries that the ledger had."""

    @property
    def size(self) -> int:
        return 0 if self.record is None else record_bytes(self.record.ledger, self.record.body_bytes)


class Owner(Protocol):
    """The node that owns the journal. The journal's thread calls both methods under `Journal.lock`."""

    def written(self, writes: Sequence[Write]) -> None:
        """These writes are synced. Their records have positions now."""

    def failed(self, error: OSError) -> None:
        """The journal could not be written, and all waiting writes were reverted."""


class Journal:
    """Threads share it. `submit` is called under `lock`, which the owner also holds while it decides what to submit."""

    def __init__(
        self,
        folder: str,
        seed: int,
        opened: Opened,
        owner: Owner,
        lock: threading.Lock,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        is_read_only: bool = False,
        on_synced: Callable[[int], None] = lambda end: None,
    ) -> None:
        """is_read_only: the journal was opened without a new segment, and every record is refused. on_synced: called
        with the new end after each sync, before anything that waits for it is told; it must not raise."""
        self.folder, self._seed, self._owner = folder, seed, owner
        self._segment_bytes, self._is_read_only, self._on_synced = segment_bytes, is_read_only, on_synced
        self.lock = lock
        self._wake = threading.Condition(lock)
        self._waiting: deque[Write] = deque()
        self.bases = opened.bases
        """The position of the first byte of each segment. Changed under `lock`."""
        self.end = opened.end
        """The position after the last synced record. Changed under `lock`."""
        self._removed = opened.gone
        self.lost = opened.lost
        """The damaged ranges, which hold no records. Replaced under `lock`."""
        self._lists = threading.Lock()
        """Held while one of the lists of `removed` is replaced: the scrubber and the collector do that."""
        self._active = opened.active
        self._files: OrderedDict[int, OpenSegment] = OrderedDict()
        """Sealed segments that are open for readers, the most recently used last."""
        self.is_broken = False
        """Whether the last write or sync failed and no new file was created since."""
        self._is_closed = False
        self._thread = start_thread(self._run, "pxrs-storage-journal")

    # Writing.

    def submit(self, write: Write) -> None:
        """Add the write to the waiting ones. The caller holds `lock`. Raises Closed."""
        if self._is_closed:
            raise Closed("the storage node is stopping")
        self._waiting.append(write)
        if len(self._waiting) == 1:
            self._wake.notify()

    def close(self) -> None:
        """Write what is waiting, then end the thread and close the files. Idempotent."""
        with self.lock:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()
        if self.is_broken and not self._is_read_only:
            # Nothing of the failed write may be read by the next start, nor look as if the node had gone on.
            try:
                self._active.cut(self.end - self.bases[-1])
            except OSError as error:
                _logger.warning("cannot truncate a failed write, so the next start is in doubt: %s", error)
        self._active.close()
        self._files.clear()

    def _run(self) -> None:
        while True:
            with self.lock:
                while not self._waiting and not self._is_closed:
                    self._wake.wait()
                if not self._waiting:
                    return
                batch = self._take()
            try:
                self._commit(batch)
            except OSError as error:
                self._fail(batch, error)
            except Exception as error:  # a defect: the thread must survive it, because it answers all requests
                _logger.exception("a batch of the journal failed unexpectedly")
                self._fail(batch, OSError(errno.EIO, f"unexpected error: {error!r}"))
            else:
                _tell(batch, None)

    def _commit(self, batch: Sequence[Write]) -> None:
        """Write and sync a batch, and call `Owner.written`. Raises OSError."""
        began, before = time.monotonic(), self.end
        end = self._write(batch)
        if end > before:
            self._on_synced(end)
        STORAGE_SYNC.of().observe(time.monotonic() - began)
        STORAGE_WRITTEN.of().add(end - before)
        with self.lock:
            self.end = end
            self._owner.written(batch)

    def _take(self) -> list[Write]:
        """Take the next batch from the waiting writes: up to the limits, but at least one write."""
        batch: list[Write] = []
        size = 0
        while self._waiting and len(batch) < BATCH_RECORDS_MAX:
            size += self._waiting[0].size
            if batch and size > BATCH_BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _write(self, batch: Sequence[Write]) -> int:
        """Write and sync a batch, and set the positions of its records. Returns the new end. Raises OSError."""
        # After a failure, a batch without records needs the new file too. Without it, a restart would read the bytes of
        # the failed write as part of the journal, and an entry that was reported missing would exist again.
        if (self._is_read_only or not self.is_broken) and all(write.record is None for write in batch):
            return self.end
        if self._is_read_only:
            raise OSError(errno.ENOSPC, "the disk was full when the node started, so the node is read-only")
        if self.is_broken or self.end - self.bases[-1] >= self._segment_bytes:
            self._begin_segment()
        position, count = self.end, 0
        pieces: list[object] = []
        small: list[Piece] = []
        """Consecutive short pieces, which are joined: writing each of them separately costs more."""
        for write in batch:
            if write.record is None:
                continue
            record = write.record._replace(position=position, follows=count)
            if record.offset == HERE and record.kind is Kind.REMOVED:
                record = record._replace(offset=position)
            small.append(encode(record, position, count, self._seed))
            if record.body_bytes > SMALL_BYTES:
                pieces += (b"".join(small), *write.pieces)
                small.clear()
            else:
                small += write.pieces
            small.append(body_padding(record.body_bytes))
            position += record.size
            count += 1
            write.record = record
        if count:
            pieces.append(b"".join(small))
            self._active.write(pieces, self.end - self.bases[-1])
            self._active.sync()
            if self._active.is_removed:  # a restart would not find what was written
                raise FileNotFoundError(errno.ENOENT, "the segment file was removed while in use; find what removes it")
        return position

    def _begin_segment(self) -> None:
        """Continue in a new file, which begins at the journal's end. Everything before the end was synced (L3)."""
        path = segment_path(self.folder, self.end)
        if self.is_broken and self.end == self.bases[-1]:
            # The current file contains only the failed write. Replace it by a new inode: a later sync of the old one
            # could report success for pages that the kernel has dropped.
            # The file is missing if an earlier attempt has unlinked it and could not create the new one.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        segment = OpenSegment.open(self.folder, self.end, is_created=True)
        disk.sync_folder(self.folder)
        if segment.size:
            segment.close()
            raise OSError(f"{path} is not empty, but the journal ends at its beginning")
        with self.lock:
            if self.end != self.bases[-1]:
                self._keep_open(self.bases[-1], self._active)
                self.bases.append(self.end)
            else:
                self._active.close()
            self._active = segment
            was_broken, self.is_broken = self.is_broken, False
        if was_broken:
            _logger.warning("the journal continues in %s after a failed write", path)
            self._cut_failed_tail()

    def _cut_failed_tail(self) -> None:
        """Truncate the bytes of the failed write from the previous segment, to free space. Nothing reads them."""
        if len(self.bases) > 1:
            with self.lock:
                before, base = self.bases[-2], self.bases[-1]
            try:
                os.truncate(segment_path(self.folder, before), base - before)
            except OSError as error:
                _logger.warning("cannot truncate a failed write; it takes up space in segment %d: %s", before, error)

    def _fail(self, batch: list[Write], error: OSError) -> None:
        STORAGE_FAILURES.of().add()
        _logger.error(
            "the journal could not be written, and %d requests failed: %s",
            len(batch),
            disk.explain(error, self._active.path),
        )
        with self.lock:
            self.is_broken = True
            batch += self._waiting
            self._waiting.clear()
            for write in reversed(batch):
                if write.undo is not None:
                    write.undo()
            self._owner.failed(error)
        _tell(batch, error)

    # Reading.

    def read(self, ledger: str, position: int, size: int) -> tuple[Record, memoryview]:
        """The record at this position, which must be of this ledger, and its body of `size` bytes; both are verified.
        Raises DamagedFrame, OSError."""
        segment, at = self._locate(position)
        length = header_bytes(ledger)
        data = memoryview(pread(segment.descriptor, length + size, at))
        record = decode(data[:HEADER_BYTES_MAX], at, segment.base, self._seed, segment.path)
        body = data[length:]
        if record.ledger != ledger or record.body_bytes != size:
            raise DamagedFrame(segment.path, at, f"the record belongs to {record.ledger}, expected {ledger}")
        if len(body) < size or xxhash.xxh3_64_intdigest(body) != record.checksum:
            raise DamagedFrame(segment.path, at, "the checksum of the record's body does not match")
        return record, body

    def read_part(self, ledger: str, position: int, begin: int, size: int) -> tuple[bytes, str]:
        """A part of the body of a record, not verified, and the path of the file. Raises OSError."""
        segment, at = self._locate(position)
        return pread(segment.descriptor, size, at + header_bytes(ledger) + begin), segment.path

    def records(self, base: int) -> Iterator[Record]:
        """The headers of the records of a sealed segment, without its known damaged ranges. Raises DamagedFrame,
        OSError."""
        with self.lock:
            segment, end, lost = self._file(base), self.segment_end(base), self.lost
        for found in parts(segment.descriptor, segment.path, base, base, end, self._seed, lost):
            if not isinstance(found, Record):
                raise found.error
            yield found

    def segment(self, base: int) -> OpenSegment:
        """A sealed segment. Raises OSError."""
        with self.lock:
            return self._file(base)

    def lose(self, begin: int, end: int) -> None:
        """Record that a range without live records is damaged. Raises OSError."""
        with self._lists:
            self._lose(begin, end)

    def _lose(self, begin: int, end: int) -> None:
        with self.lock:
            if not any(base <= begin < self.segment_end(base) for base in self.bases[:-1]):
                return  # the segment was unlinked meanwhile
            before = next((each for each in self.lost if each.end == begin and not each.is_torn), None)
            lost = sorted({*self.lost, Lost(begin, end, False)} - {before})
            if before is not None:
                lost = sorted({*lost, Lost(before.begin, end, False)} - {Lost(begin, end, False)})
        removed.write_lost(self.folder, lost)
        with self.lock:
            self.lost = lost

    def _locate(self, position: int) -> tuple[OpenSegment, int]:
        with self.lock:
            segment = self._file(self.bases[bisect_right(self.bases, position) - 1])
        return segment, position - segment.base

    def segment_end(self, base: int) -> int:
        """Where a segment ends. The caller holds `lock`."""
        end = removed.segment_end(self._removed, self.bases, base)
        return self.end if end is None else end

    @property
    def is_unchecked(self) -> bool:
        """Whether a start in doubt is not followed by the comparison of closed ledgers yet."""
        return os.path.exists(f"{self.folder}/{UNCHECKED}")

    def keep_unchecked(self) -> None:
        """Raises OSError."""
        disk.replace_file(f"{self.folder}/{UNCHECKED}", b"", is_durable=True)
        disk.sync_folder(self.folder)

    def forget_unchecked(self) -> None:
        """Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/{UNCHECKED}")

    def keep_found(self) -> None:
        """Write down the damaged ranges that a start has found, before anything else that it writes: if it ends before
        `keep_lost`, the next start passes over them. Raises OSError."""
        removed.write_lost(self.folder, self.lost, removed.FOUND)

    def keep_lost(self) -> None:
        """Make the damaged ranges durable that the start has found: later starts pass over them. Called when the doubt
        about them is journaled. Raises OSError."""
        with self._lists:
            removed.write_lost(self.folder, self.lost)
            removed.write(self.folder, self._removed)  # it may have been damaged itself
        removed.forget_found(self.folder)

    def unlink(self, base: int) -> None:
        """Remove a sealed segment without live records. A reader that has it open can finish. Only one thread at a time
        calls this. Raises OSError."""
        with self.lock:
            assert base != self.bases[-1], "the active segment is written to"
            part = base, self.segment_end(base)
        self._remove(part)
        with self.lock:
            self.bases.remove(base)
            self._files.pop(base, None)
        os.unlink(segment_path(self.folder, base))

    def forget_missing(self) -> None:
        """Count damaged ranges that no segment contains, because their file was lost, as removed. Only the thread that
        calls `unlink` calls this. Raises OSError."""
        with self.lock:
            inside = [(base, self.segment_end(base)) for base in self.bases]
        for each in self.lost:
            if not any(begin <= each.begin < end for begin, end in inside):
                self._remove((each.begin, each.end))

    def _remove(self, part: tuple[int, int]) -> None:
        """Record that the node needs nothing of this range. Raises OSError."""
        with self._lists:
            self._drop(part)

    def _drop(self, part: tuple[int, int]) -> None:
        gone = removed.merged([*self._removed, part])
        removed.write(self.folder, gone)  # before the file is unlinked: see `removed`
        left = [each for each in self.lost if not (part[0] <= each.begin and each.end <= part[1])]
        if left != self.lost:
            removed.write_lost(self.folder, left)
        with self.lock:
            self._removed, self.lost = gone, left

    def _file(self, base: int) -> OpenSegment:
        if base == self.bases[-1]:
            return self._active
        found = self._files.get(base)
        if found is None:
            found = OpenSegment.open(self.folder, base)
        self._keep_open(base, found)
        return found

    def _keep_open(self, base: int, segment: OpenSegment) -> None:
        """Segments that are dropped are not closed here: the file is closed when its last reader drops its
        reference."""
        self._files[base] = segment
        self._files.move_to_end(base)
        while len(self._files) > FILES_MAX:
            self._files.popitem(last=False)


def _tell(batch: Sequence[Write], error: Exception | None) -> None:
    for write in batch:
        try:
            write.done(error)
        except Exception:
            _logger.exception("a callback of the journal failed")
