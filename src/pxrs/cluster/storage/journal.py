"""The journal of a storage node: the records of all ledgers one behind the other, in segment files.

Group commit: one thread takes all records that wait, up to a bound, writes them, syncs once, and reports all of them as
written. The next batch is written only after that sync.

After a write or a sync that failed, nothing of that batch counts, and nothing that waited behind it: whether those
records were accepted may depend on records before them. The journal's end stays where it was, and the next batch goes
into a new file that begins there, so that nothing of the failed write is ever part of the journal (L3). `open_journal`
reads a segment up to where the next one begins.

    state     a batch is written and synced    a write or sync fails    before the next batch
    --------  -------------------------------  -----------------------  -----------------------------------
    good      good                             broken                   -
    broken    -                                -                        a new file could be made: good;
                                                                        else that batch fails too: broken
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
from pxrs.cluster.storage.opening import Opened, walk
from pxrs.errors import Closed, DamagedFrame
from pxrs.log.directory.segments.files import pread, segment_path
from pxrs.log.directory.segments.writing import OpenSegment
from pxrs.metrics.instruments import STORAGE_FAILURES, STORAGE_SYNC, STORAGE_WRITTEN
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 256 << 20
BATCH_BYTES_MAX: Final = 16 << 20
BATCH_RECORDS_MAX: Final = 4_000
"""How much is written before a sync: it is also what is written again when the node starts."""
SMALL_BYTES: Final = 16 << 10
"""Bodies up to this length are copied, so that many of them are written by one buffer."""
FILES_MAX: Final = 256
"""How many sealed segments are kept open for readers."""

Piece = bytes | memoryview


@dataclass(slots=True, eq=False)
class Write:
    """Something that waits for the next sync."""

    record: Record | None
    """What is written, without its position; None if nothing is: `done` is called once all before it is synced."""
    pieces: Sequence[Piece]
    """The record's body."""
    done: Callable[[Exception | None], None]
    """Called on the journal's thread, without a lock: None once it is synced, otherwise why nothing of it counts."""
    undo: Callable[[], None] | None = None
    """Called under `Journal.lock` if nothing of it counts, before `done`, the last write first: takes back what was
    decided in memory."""
    removes: Entries | None = None
    """With a REMOVED record: the entries that the ledger had."""

    @property
    def size(self) -> int:
        return 0 if self.record is None else record_bytes(self.record.ledger, self.record.body_bytes)


class Owner(Protocol):
    """The node whose journal this is. Both are called on the journal's thread, under `Journal.lock`."""

    def written(self, writes: Sequence[Write]) -> None:
        """These are synced. Their records have positions now."""

    def failed(self, error: OSError) -> None:
        """The journal could not be written, and everything that waited was taken back."""


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
    ) -> None:
        self.folder, self._seed, self._owner = folder, seed, owner
        self._segment_bytes = segment_bytes
        self.lock = lock
        self._wake = threading.Condition(lock)
        self._waiting: deque[Write] = deque()
        self.bases = opened.bases
        """The position of the first byte of each segment. Changed under `lock`."""
        self.end = opened.end
        """The position behind the last record that was synced. Changed under `lock`."""
        self._removed = opened.gone
        self._active = opened.active
        self._files: OrderedDict[int, OpenSegment] = OrderedDict()
        """Sealed segments that are open for readers; the one that was used last comes last."""
        self.is_broken = False
        """Whether the last write or sync has failed, and no new file was made since."""
        self._is_closed = False
        self._thread = start_thread(self._run, "pxrs-storage-journal")

    # Writing.

    def submit(self, write: Write) -> None:
        """Let the write be part of the next batch. The caller holds `lock`. Raises Closed."""
        if self._is_closed:
            raise Closed("the storage node is stopping")
        self._waiting.append(write)
        if len(self._waiting) == 1:
            self._wake.notify()

    def close(self) -> None:
        """Write what waits, then end the thread and close the files. Idempotent."""
        with self.lock:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()
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
            except Exception as error:  # a defect; without this thread nothing would ever be answered again
                _logger.exception("a batch of the journal failed unexpectedly")
                self._fail(batch, OSError(errno.EIO, f"unexpected: {error!r}"))
            else:
                _tell(batch, None)

    def _commit(self, batch: Sequence[Write]) -> None:
        """Write and sync a batch, and let the owner know. Raises OSError."""
        began, before = time.monotonic(), self.end
        end = self._write(batch)
        STORAGE_SYNC.of().observe(time.monotonic() - began)
        STORAGE_WRITTEN.of().add(end - before)
        with self.lock:
            self.end = end
            self._owner.written(batch)

    def _take(self) -> list[Write]:
        """The next batch; at least one write, and one of any size."""
        batch: list[Write] = []
        size = 0
        while self._waiting and len(batch) < BATCH_RECORDS_MAX:
            size += self._waiting[0].size
            if batch and size > BATCH_BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _write(self, batch: Sequence[Write]) -> int:
        """Write and sync a batch, and set the positions of its records; the end behind them. Raises OSError."""
        # After a failure also an answer without a record needs the new file: what the failed write left in the old one
        # would be part of the journal again if the process ended now, and an entry that was told to be missing be back.
        if not self.is_broken and all(write.record is None for write in batch):
            return self.end
        if self.is_broken or self.end - self.bases[-1] >= self._segment_bytes:
            self._begin_segment()
        position, count = self.end, 0
        pieces: list[object] = []
        small: list[Piece] = []
        """Short pieces behind each other, which are written as one: a call of the system for each costs more."""
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
                raise FileNotFoundError(errno.ENOENT, "the segment file was removed while the node runs")
        return position

    def _begin_segment(self) -> None:
        """Go on in a new file, which begins at the journal's end. Everything before the end was synced (L3)."""
        path = segment_path(self.folder, self.end)
        if self.is_broken and self.end == self.bases[-1]:
            # Nothing in the file counts. A file with another inode takes its place: a later sync of the old one may
            # report success for pages that the kernel has dropped.
            # It is missing if an earlier attempt has unlinked it and could not make the new one.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        segment = OpenSegment.open(self.folder, self.end, is_created=True)
        disk.sync_folder(self.folder)
        if segment.size:
            segment.close()
            raise OSError(f"{path} has content already, and is to begin at the journal's end")
        with self.lock:
            if self.end != self.bases[-1]:
                self._keep_open(self.bases[-1], self._active)
                self.bases.append(self.end)
            else:
                self._active.close()
            self._active = segment
            was_broken, self.is_broken = self.is_broken, False
        if was_broken:
            _logger.warning("the journal goes on in %s after a failed write", path)
            self._cut_failed_tail()

    def _cut_failed_tail(self) -> None:
        """Free the room that the failed write takes in the segment before this one. Nothing reads those bytes."""
        if len(self.bases) > 1:
            with self.lock:
                before, base = self.bases[-2], self.bases[-1]
            try:
                os.truncate(segment_path(self.folder, before), base - before)
            except OSError as error:
                _logger.warning("the rest of a failed write stays in the segment at %d: %s", before, error)

    def _fail(self, batch: list[Write], error: OSError) -> None:
        STORAGE_FAILURES.of().add()
        _logger.error(
            "the journal could not be written, and %d records are refused: %s",
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
        """The record of an entry that was written at this position, and its body of this length, both checked. Raises
        DamagedFrame, OSError."""
        segment, at = self._locate(position)
        length = header_bytes(ledger)
        data = memoryview(pread(segment.descriptor, length + size, at))
        record = decode(data[:HEADER_BYTES_MAX], at, segment.base, self._seed, segment.path)
        body = data[length:]
        if record.ledger != ledger or record.body_bytes != size:
            raise DamagedFrame(segment.path, at, f"the record is of {record.ledger}, and {ledger} is expected")
        if len(body) < size or xxhash.xxh3_64_intdigest(body) != record.checksum:
            raise DamagedFrame(segment.path, at, "the checksum of the record's body does not match")
        return record, body

    def read_part(self, ledger: str, position: int, begin: int, size: int) -> tuple[bytes, str]:
        """A part of the body of a record, unchecked, and the path of the file. Raises OSError."""
        segment, at = self._locate(position)
        return pread(segment.descriptor, size, at + header_bytes(ledger) + begin), segment.path

    def records(self, base: int) -> Iterator[Record]:
        """The records of a sealed segment, by their headers. Raises DamagedFrame, OSError."""
        with self.lock:
            segment, end = self._file(base), self.segment_end(base)
        yield from walk(segment.descriptor, segment.path, base, 0, end - base, self._seed)

    def _locate(self, position: int) -> tuple[OpenSegment, int]:
        with self.lock:
            segment = self._file(self.bases[bisect_right(self.bases, position) - 1])
        return segment, position - segment.base

    def segment_end(self, base: int) -> int:
        """Where a segment ends. The caller holds `lock`."""
        end = removed.segment_end(self._removed, self.bases, base)
        return self.end if end is None else end

    def unlink(self, base: int) -> None:
        """Remove a sealed segment that holds nothing that counts. A reader that has it open can finish. Only one thread
        calls it. Raises OSError."""
        with self.lock:
            assert base != self.bases[-1], "the active segment is written to"
            gone = removed.merged([*self._removed, (base, self.segment_end(base))])
        removed.write(self.folder, gone)  # before the file is unlinked: see `removed`
        with self.lock:
            self._removed = gone
            self.bases.remove(base)
            self._files.pop(base, None)
        os.unlink(segment_path(self.folder, base))

    def _file(self, base: int) -> OpenSegment:
        if base == self.bases[-1]:
            return self._active
        found = self._files.get(base)
        if found is None:
            found = OpenSegment.open(self.folder, base)
        self._keep_open(base, found)
        return found

    def _keep_open(self, base: int, segment: OpenSegment) -> None:
        """Without a call of `close` for those that are dropped: the last reader of one closes it by its reference."""
        self._files[base] = segment
        self._files.move_to_end(base)
        while len(self._files) > FILES_MAX:
            self._files.popitem(last=False)


def _tell(batch: Sequence[Write], error: Exception | None) -> None:
    for write in batch:
        try:
            write.done(error)
        except Exception:
            _logger.exception("an answer of the storage node was lost")
