"""Reads the journal of a storage node when the node starts, and begins a new segment.

Segments are named by the position of their first byte in the journal, so a segment ends where the next one begins.
Bytes of its file after that point are left from a failed write and are ignored. Of sealed segments only the headers are
read; a damaged body is noticed when the entry is read.

A batch is written only after the sync of the batch before it. So only the last batch of the last segment can be torn;
its records are used up to the first incomplete one. It is not known whether the last batch was synced: the process may
have ended after a failed sync, and a later sync of the same file can report success although the kernel has dropped the
pages (L3). So the last batch is written again, to a new file that begins where the batch began.

On a full disk nothing can be written, and `is_read_only` opens the journal as it is. The last batch stays where it is:
it is synced, the pages of the file are dropped from the page cache, and the batch is read again and verified, so that
what the node serves is what the medium has.

A damaged header anywhere else belongs to data that was synced once. It is reported, and the journal is never truncated
there. The lost records may be entries or fences. A node with such a journal must never answer that an entry is missing,
and must not accept adds.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import xxhash

from pxrs import disk
from pxrs.cluster.storage import removed
from pxrs.cluster.storage.format import (
    ALIGNMENT,
    BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    Record,
    body_padding,
    decode,
    encode,
    find_record,
)
from pxrs.errors import DamagedFrame
from pxrs.log.directory.segments.files import pread, pwrite_all, segment_bases, segment_path
from pxrs.log.directory.segments.writing import OpenSegment

_logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 10
"""How many bytes of a segment are read at a time, while its records are shorter than that."""
NEW: Final = ".new"
"""Suffix of the new segment's file name until its content is synced."""

Apply = Callable[[Record], None]


@dataclass(slots=True)
class Opened:
    """A journal that was opened."""

    active: OpenSegment
    """The last segment, to which the journal appends."""
    end: int
    """The position after the last record."""
    bases: list[int]
    """The position of the first byte of each segment, in rising order. The last segment is the active one."""
    gone: removed.Ranges
    """The ranges of positions that the node has removed (`removed`)."""
    damage: list[DamagedFrame] = field(default_factory=list)
    """The places where headers are damaged or segments are missing."""


def open_journal(folder: str, seed: int, apply: Apply, bases: list[int], *, is_read_only: bool = False) -> Opened:
    """Read the journal in this folder, which must exist, and begin a new segment. Raises OSError.

    apply: called with every record, in order. bases: an empty list, to which the bases of the segments are added before
    `apply` is called. is_read_only: write nothing, and begin no segment; there must be one."""
    for name in os.listdir(folder):
        if name.endswith(NEW):
            os.unlink(f"{folder}/{name}")
    damage: list[DamagedFrame] = []
    gone = removed.read(folder)
    if gone is None:
        damage.append(DamagedFrame(f"{folder}/{removed.FILE}", 0, "the checksum of the list does not match"))
    bases += _present(folder, gone or [], damage, is_read_only=is_read_only)
    for base in bases[:-1]:
        end = removed.segment_end(gone or [], bases, base)
        assert end is not None
        for record in _sealed(folder, base, end, seed, damage):
            apply(record)
    tail: list[Record] = []
    begin = gone[-1][1] if gone else 0
    if bases:
        tail, begin = _last(folder, bases[-1], seed, apply, damage)
    for each in damage:
        _logger.error("the journal is damaged, and the node accepts no entries: %s", each)
    if is_read_only:
        active, end = _as_it_is(folder, tail, begin, seed, bases[-1])
    else:
        active, end = _begin_again(folder, tail, begin, seed, bases[-1] if bases else None)
        if not bases or bases[-1] != begin:
            bases.append(begin)
    for record in tail:
        apply(record)
    return Opened(active, end, bases, gone or [], damage)


def _present(folder: str, gone: removed.Ranges, damage: list[DamagedFrame], *, is_read_only: bool) -> list[int]:
    """The bases of the segments that exist. Segments that were recorded as removed and not unlinked yet, because the
    node was killed in between, are unlinked now, unless `is_read_only`."""
    bases = segment_bases(folder)
    stale = [base for base in bases if removed.is_within(gone, base)]
    if is_read_only:
        bases, stale = [base for base in bases if base not in stale], []
    if stale:
        # The node may have been killed before the list of removed segments was durable. If a power loss took the list
        # and left the files unlinked, the next start would report damage.
        removed.write(folder, gone)
    for base in stale:
        os.unlink(segment_path(folder, base))
        bases.remove(base)
    for _, begin in [(0, 0), *gone]:
        # A segment begins where the removed range before it ends, and the first one at 0.
        if bases and begin < bases[-1] and begin not in bases and not removed.is_within(gone, begin):
            damage.append(DamagedFrame(segment_path(folder, begin), 0, "the segment is missing"))
    return bases


def walk(descriptor: int, path: str, base: int, begin: int, end: int, seed: int) -> Iterator[Record]:
    """The headers of the records between two places of a segment. Raises DamagedFrame, whose `position` is the place in
    the file of the first record that is damaged or incomplete."""
    at, piece_bytes = begin, PIECE_BYTES
    while at < end:
        start, wanted = at, min(piece_bytes, end - at)
        piece = memoryview(pread(descriptor, wanted, start))
        if not piece:
            raise DamagedFrame(path, at, f"the file ends {end - at:,} bytes before the segment does")
        is_last = len(piece) < wanted or start + len(piece) >= end
        while at - start < len(piece) and (is_last or at - start + HEADER_BYTES_MAX <= len(piece)):
            record = decode(piece[at - start : at - start + HEADER_BYTES_MAX], at, base, seed, path)
            if at + record.size > end or record.body_bytes > BODY_BYTES_MAX:
                raise DamagedFrame(path, at, "the record is longer than what is left of the segment")
            yield record
            at += record.size
            piece_bytes = PIECE_BYTES if record.size < PIECE_BYTES else HEADER_BYTES_MAX


def read_body(descriptor: int, path: str, base: int, record: Record) -> bytes:
    """The body of a record. Raises DamagedFrame if its checksum does not match."""
    if not record.body_bytes:
        return b""
    at = record.position - base
    body = pread(descriptor, record.body_bytes, at + record.header_bytes)
    if len(body) < record.body_bytes:
        raise DamagedFrame(path, at, f"the file ends {record.body_bytes - len(body):,} bytes before the record does")
    if xxhash.xxh3_64_intdigest(body) != record.checksum:
        raise DamagedFrame(path, at, "the checksum of the record's body does not match")
    return body


def _sealed(folder: str, base: int, following: int, seed: int, damage: list[DamagedFrame]) -> Iterator[Record]:
    """The records of a segment other than the last one. Damaged places are added to `damage` and skipped."""
    path, at = segment_path(folder, base), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                yield from walk(descriptor, path, base, at, following - base, seed)
                return
            except DamagedFrame as error:
                damage.append(error)
                found = _next(descriptor, error.position, following - base, base, seed, path)
                if found is None:
                    return
                at = found
    finally:
        os.close(descriptor)


def _last(folder: str, base: int, seed: int, apply: Apply, damage: list[DamagedFrame]) -> tuple[list[Record], int]:
    """Apply the records of the last segment except those of its last batch. Returns the complete records of that batch,
    and its position in the journal."""
    path = segment_path(folder, base)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, at = os.fstat(descriptor).st_size, 0
        batch: list[Record] = []
        begin = base
        while True:
            try:
                for record in walk(descriptor, path, base, at, size, seed):
                    if record.follows == 0:
                        for each in batch:
                            apply(each)
                        batch, begin = [], record.position
                    batch.append(record)
                break
            except DamagedFrame as error:
                found = _next(descriptor, error.position, size, base, seed, path)
                if found is None or not _has_later_batch(descriptor, found, size, base, seed, path):
                    _logger.warning("the last write to the journal is incomplete and ignored: %s", error)
                    break
                damage.append(error)
                at = found
        return _whole(descriptor, path, base, batch), begin
    finally:
        os.close(descriptor)


def _whole(descriptor: int, path: str, base: int, batch: list[Record]) -> list[Record]:
    """The records of the last batch up to the first one whose body is incomplete."""
    for number, record in enumerate(batch):
        try:
            read_body(descriptor, path, base, record)
        except DamagedFrame as error:
            _logger.warning("the last write to the journal is incomplete and ignored: %s", error)
            return batch[:number]
    return batch


def _next(descriptor: int, at: int, size: int, base: int, seed: int, path: str) -> int | None:
    """The place in the file of the next header after a damaged one; None if there is none before `size`."""
    size = min(size, os.fstat(descriptor).st_size)
    begin = (at // ALIGNMENT + 1) * ALIGNMENT
    if begin >= size:
        return None
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        return find_record(view, begin, base, seed, path)


def _has_later_batch(descriptor: int, at: int, size: int, base: int, seed: int, path: str) -> bool:
    """Whether a batch begins at this place or after it."""
    found: int | None = at
    while found is not None:
        try:
            return any(record.follows == 0 for record in walk(descriptor, path, base, found, size, seed))
        except DamagedFrame as error:
            found = _next(descriptor, error.position, size, base, seed, path)
    return False


def _as_it_is(folder: str, tail: list[Record], begin: int, seed: int, last: int) -> tuple[OpenSegment, int]:
    """Make sure that the last batch is on the medium: the headers too, because a fence has no body. Returns its
    segment, and the position after its last record."""
    active, end = OpenSegment.open(folder, last), begin + sum(record.size for record in tail)
    try:
        active.sync()
        os.posix_fadvise(active.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for record in walk(active.descriptor, active.path, last, begin - last, end - last, seed):
            read_body(active.descriptor, active.path, last, record)
    except DamagedFrame as error:
        active.close()
        raise OSError(errno.EIO, f"the last batch was not written to the medium: {error}", active.path) from error
    except BaseException:
        active.close()
        raise
    return active, end


def _begin_again(folder: str, tail: list[Record], begin: int, seed: int, last: int | None) -> tuple[OpenSegment, int]:
    """Write the last batch to a new segment. Returns the segment and the position after its last record.

    begin: the position of the batch in the journal. last: the base of the segment that contains the batch; None if
    there is none."""
    path = segment_path(folder, begin)
    temporary = f"{path}{NEW}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    end = begin
    try:
        if tail:
            assert last is not None
            source_path = segment_path(folder, last)
            source = os.open(source_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for record in tail:
                    body = read_body(source, source_path, last, record)
                    header = encode(record, record.position, record.follows, seed)
                    pwrite_all(descriptor, [header, body, body_padding(len(body))], end - begin)
                    end += record.size
            finally:
                os.close(source)
        disk.sync_data(descriptor)
    except BaseException:
        os.unlink(temporary)  # on a full disk its bytes may be the room that others need
        raise
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    disk.sync_folder(folder)
    if last is not None and last != begin:
        os.truncate(segment_path(folder, last), begin - last)
    return OpenSegment.open(folder, begin), end
