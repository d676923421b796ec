"""Reads the journal of a storage node when the node starts, and begins a new segment.

Segments are named by the position of their first byte in the journal, so a segment ends where the next one begins.
Bytes of its file after that point are left from a failed write and are ignored. Of sealed segments only the headers are
read; a damaged body is noticed when the entry is read.

A batch is written only after the sync of the batch before it. So a write that was cut off can only be in the last batch
of the last segment. Whether a record that is damaged or missing there was synced, and perhaps acknowledged, does not
follow from the journal. `proof` is the position up to which everything was synced, if that is known (C9):

    proof    damage                        the start is   what is done with the damage
    -------  ----------------------------  -------------  ----------------------------------------------------------
    known    none before it                proven         it is the rest of a write that was cut off, and is removed
    known    before it, or the journal is  in doubt       the damaged bytes stay where they are, and so does every
             shorter                                      whole record, also behind them
    unknown  any, or none                  in doubt       the same

The caller has to journal the doubt (`NodeCore.begin_doubt`), and then records the damaged ranges (`removed.LOST`), so
that later starts pass over them. A range is "torn" if it is in the last batch and no proof covers it: a power loss
leaves such ranges on a sound disk. Any other range is rot, and so is a page that the disk cannot read. A start that
ends before that leaves the ranges in `removed.FOUND`: the next one passes over them too, and is in doubt again.

It is not known whether the last batch was synced: the process may have ended after a failed sync, and a later sync of
the same file can report success although the kernel has dropped the pages (L3). So the last batch is written again, to
a new file that begins where the batch began. If the last batch is damaged and the start is in doubt, it stays as it is:
the file is synced, its pages are dropped from the page cache, the batch is read again, and the journal continues in a
new file behind the last byte. On a full disk, where nothing can be written (`is_read_only`), a whole batch stays as it
is too.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from pxrs import disk
from pxrs.cluster.storage import removed
from pxrs.cluster.storage.format import ALIGNMENT, BODY_BYTES_MAX, HEADER_BYTES_MAX, Record, decode, find_record
from pxrs.cluster.storage.removed import Lost
from pxrs.errors import DamagedFrame
from pxrs.log.directory.segments.files import pread, pwrite_all, segment_bases, segment_path
from pxrs.log.directory.segments.writing import OpenSegment

_logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 10
"""How many bytes of a segment are read at a time, while its records are shorter than that."""
COPY_BYTES: Final = 4 << 20
"""How many bytes of the last batch are copied at a time, and how many are searched for the next record."""
SEARCH_BYTES_MIN: Final = -(-HEADER_BYTES_MAX // ALIGNMENT) * ALIGNMENT
"""How much of a piece is searched again with the next one: a header may be cut off at its end."""
PAGE_BYTES: Final = 4_096
"""The unit in which a part of a file is read that the disk cannot read as a whole."""
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
    lost: list[Lost]
    """The ranges that hold no records because they are damaged: those that earlier starts have recorded, and those that
    this one has found."""
    is_proven: bool
    """Whether everything that was acknowledged is there, apart from ranges that earlier starts have recorded."""
    unreadable: list[Record]
    """The records of the last batch that were synced once, and whose bodies cannot be read."""


class Damaged(NamedTuple):
    """A damaged range of positions, which no earlier start has recorded."""

    error: DamagedFrame
    begin: int
    end: int

    @property
    def is_unreadable(self) -> bool:
        """Whether the disk has answered with an error, which no power loss causes."""
        return isinstance(self.error.__cause__, OSError)


def open_journal(
    folder: str,
    seed: int,
    apply: Apply,
    bases: list[int],
    proof: int | None = None,
    *,
    is_stop: bool = False,
    is_read_only: bool = False,
) -> Opened:
    """Read the journal in this folder, which must exist, and begin a new segment. Raises OSError.

    apply: called with every record, in order. bases: an empty list, to which the bases of the segments are added before
    `apply` is called. proof: see the module's docstring. is_stop: whether the proof is that of a stop in order, after
    which nothing is appended. If there is more, the registry that has the proof is an older copy. is_read_only: write
    nothing, and begin no segment; there must be one."""
    for name in os.listdir(folder):
        if name.endswith(NEW):
            os.unlink(f"{folder}/{name}")
    gone, lost, unlisted, found = _lists(folder)
    bases += _present(folder, gone, is_read_only=is_read_only)
    _drop_unused(folder, bases, lost, is_read_only=is_read_only)
    found += _missing(folder, gone, lost, bases)
    for base in bases[:-1]:
        end = removed.segment_end(gone, bases, base)
        assert end is not None
        for each in _segment(folder, base, end, seed, lost):
            if isinstance(each, Record):
                apply(each)
            else:
                found.append(each)
    if not bases:
        active, begin = _begin_again(folder, 0, 0, None, gone[-1][1] if gone else 0)
        bases.append(begin)
        return Opened(active, begin, bases, gone, lost, not (found or gone or proof or unlisted), [])
    last = _LastSegment(folder, bases[-1], seed, lost, apply, found)
    is_proven = last.proves(proof, is_stop=is_stop) and not (found or unlisted)
    torn: list[Damaged] = []
    if is_proven or not last.damaged(proof):
        if is_read_only:
            active, end = last.as_it_is(proof)
        else:
            tail = last.upto_damage(proof)
            end = tail[-1].position + tail[-1].size if tail else last.begin
            active, begin = _begin_again(folder, last.begin, end, bases[-1], last.begin)
            if bases[-1] != begin:
                bases.append(begin)
            for record in tail:
                apply(record)
    else:
        active, end, damaged = last.sealed(proof, is_read_only=is_read_only)
        torn = [each for each in damaged if (proof is None or each.begin >= proof) and not each.is_unreadable]
        found += [each for each in damaged if each not in torn]
        if bases[-1] != active.base:
            bases.append(active.base)
    known_end = max([end, *(each for _, each in gone), *(each.end for each in lost)])
    if known_end > end and not is_read_only:
        # The end of the journal is lost. Positions that a list names would be passed over by the next start.
        active = OpenSegment.open(folder, known_end, is_created=True)
        disk.sync_folder(folder)
        bases.append(known_end)
        end = known_end
    for each in [*found, *torn]:
        _logger.error("the journal is damaged: %s", each.error)
    lost = [
        *lost,
        *(Lost(each.begin, each.end, False) for each in found if each.end),
        *(Lost(each.begin, each.end, True) for each in torn),
    ]
    return Opened(active, end, bases, gone, sorted(lost), is_proven, last.unreadable(proof))


def _lists(folder: str) -> tuple[removed.Ranges, list[Lost], bool, list[Damaged]]:
    """The removed ranges; the damaged ones; whether some of these are not listed for good, because a start ended before
    that; and the lists that are damaged. Raises OSError."""
    gone, lost = removed.read(folder), removed.read_lost(folder)
    found = [
        Damaged(DamagedFrame(f"{folder}/{name}", 0, "the checksum of the list does not match"), 0, 0)
        for name, known in ((removed.FILE, gone), (removed.LOST, lost))
        if known is None
    ]
    listed = lost or []
    unlisted = [
        each
        for each in removed.read_lost(folder, removed.FOUND) or []
        if each not in listed and not removed.is_within(gone or [], each.begin)
    ]
    return gone or [], sorted([*listed, *unlisted]), bool(unlisted), found


def _present(folder: str, gone: removed.Ranges, *, is_read_only: bool) -> list[int]:
    """The bases of the segments that exist. Segments that were recorded as removed and not unlinked yet, because the
    node was killed in between, are unlinked now, unless `is_read_only`."""
    bases = segment_bases(folder)
    stale = [base for base in bases if removed.is_within(gone, base)]
    if is_read_only:
        return [base for base in bases if base not in stale]
    if stale:
        # The node may have been killed before the list of removed segments was durable. If a power loss took the list
        # and left the files unlinked, the next start would report damage.
        removed.write(folder, gone)
    for base in stale:
        os.unlink(segment_path(folder, base))
        bases.remove(base)
    return bases


def _drop_unused(folder: str, bases: list[int], lost: Sequence[Lost], *, is_read_only: bool) -> None:
    """If the last start ended before it had recorded what it found damaged, it has left an empty segment behind the
    last byte of the one before. Without the empty one, this start finds the same as that one did."""
    if len(bases) < 2 or any(each.end == bases[-1] for each in lost):
        return
    path, before = segment_path(folder, bases[-1]), os.stat(segment_path(folder, bases[-2])).st_size
    if os.stat(path).st_size == 0 and bases[-2] + -(-before // ALIGNMENT) * ALIGNMENT == bases[-1]:
        del bases[-1]
        if not is_read_only:
            os.unlink(path)
            disk.sync_folder(folder)


def _missing(folder: str, gone: removed.Ranges, lost: Sequence[Lost], bases: list[int]) -> Iterator[Damaged]:
    """The segments that are missing where a removed range ends, or at 0. A file that is missing elsewhere is noticed
    when the segment before it is read."""
    for _, begin in [(0, 0), *gone]:
        following = [base for base in bases if base >= begin]
        if following and following[0] != begin and not removed.is_within(gone, begin):
            end = min([following[0], *(each for each, _ in gone if each > begin)])
            if not any(each.begin <= begin and end <= each.end for each in lost):
                yield Damaged(DamagedFrame(segment_path(folder, begin), 0, "the segment is missing"), begin, end)


def walk(descriptor: int, path: str, base: int, begin: int, end: int, seed: int) -> Iterator[Record]:
    """The headers of the records between two places of a segment. Raises DamagedFrame, whose `position` is the place in
    the file of the first record that is damaged or incomplete, or that the disk cannot read."""
    at, piece_bytes = begin, PIECE_BYTES
    while at < end:
        start, wanted = at, min(piece_bytes, end - at)
        data, unread = _readable(descriptor, wanted, start)
        if unread is not None and not data:
            raise DamagedFrame(path, at, f"the disk cannot read it: {unread}") from unread
        piece = memoryview(data)
        if not piece:
            raise DamagedFrame(path, at, f"the file ends {end - at:,} bytes before the segment does")
        is_last = len(piece) < wanted or start + len(piece) >= end
        while at - start < len(piece) and (is_last or at - start + HEADER_BYTES_MAX <= len(piece)):
            try:
                record = decode(piece[at - start : at - start + HEADER_BYTES_MAX], at, base, seed, path)
            except DamagedFrame as error:
                if len(piece) - (at - start) < HEADER_BYTES_MAX:  # the rest of it may be what cannot be read
                    raise error from unread
                raise
            if at + record.size > end or record.body_bytes > BODY_BYTES_MAX:
                raise DamagedFrame(path, at, "the record is longer than the rest of the segment")
            yield record
            at += record.size
            piece_bytes = PIECE_BYTES if record.size < PIECE_BYTES else HEADER_BYTES_MAX


def _readable(descriptor: int, size: int, at: int) -> tuple[bytes, OSError | None]:
    """The bytes of a file from a place on, up to the first page that the disk cannot read, and the error of that."""
    data = b""
    for each in _pages(descriptor, size, at):
        if isinstance(each, OSError):
            return data, each
        data += each
    return data, None


def read_or_zeros(descriptor: int, size: int, at: int) -> bytes:
    """The bytes of a file from a place on, with zeros for the pages that the disk cannot read. No record begins with
    zeros, and no checksum matches a page of them."""
    data = bytearray()
    for each in _pages(descriptor, size, at):
        data += bytes(min(_page_end(at + len(data)), at + size) - at - len(data)) if isinstance(each, OSError) else each
    return bytes(data)


def _pages(descriptor: int, size: int, at: int) -> Iterator[bytes | OSError]:
    """The bytes of a file from a place on: in one piece, or page by page if the disk cannot read all of them. For each
    page that it cannot read, the error; other errors are raised."""
    try:
        yield pread(descriptor, size, at)
        return
    except OSError as error:
        if error.errno not in disk.UNREADABLE:
            raise
    end = at + size
    while at < end:
        try:
            data = pread(descriptor, min(_page_end(at), end) - at, at)
        except OSError as error:
            if error.errno not in disk.UNREADABLE:
                raise
            yield error
        else:
            if not data:
                return
            yield data
        at = _page_end(at)


def _page_end(at: int) -> int:
    return (at // PAGE_BYTES + 1) * PAGE_BYTES


def read_body(descriptor: int, path: str, base: int, record: Record) -> bytes:
    """The body of a record. Raises DamagedFrame if it cannot be read, or its checksum does not match."""
    if not record.body_bytes:
        return b""
    at = record.position - base
    try:
        body = pread(descriptor, record.body_bytes, at + record.header_bytes)
    except OSError as error:
        if error.errno not in disk.UNREADABLE:
            raise
        raise DamagedFrame(path, at, f"the disk cannot read it: {error}") from error
    if len(body) < record.body_bytes:
        raise DamagedFrame(path, at, f"the file ends {record.body_bytes - len(body):,} bytes before the record does")
    if xxhash.xxh3_64_intdigest(body) != record.checksum:
        raise DamagedFrame(path, at, "the checksum of the record's body does not match")
    return body


def _next(descriptor: int, at: int, size: int, base: int, seed: int, path: str) -> int | None:
    """The place in the file of the next header after a damaged one; None if there is none before `size`."""
    size = min(size, os.fstat(descriptor).st_size)
    begin = (at // ALIGNMENT + 1) * ALIGNMENT
    while begin < size:
        piece = memoryview(read_or_zeros(descriptor, min(COPY_BYTES, size - begin), begin))
        found = find_record(piece, 0, base + begin, seed, path)
        if found is not None:
            return begin + found
        if len(piece) < COPY_BYTES:
            break
        begin += COPY_BYTES - SEARCH_BYTES_MIN
    return None


def _segment(folder: str, base: int, end: int, seed: int, lost: Sequence[Lost]) -> Iterator[Record | Damaged]:
    path = segment_path(folder, base)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from parts(descriptor, path, base, base, end, seed, lost)
    finally:
        os.close(descriptor)


def parts(
    descriptor: int, path: str, base: int, begin: int, end: int, seed: int, lost: Sequence[Lost]
) -> Iterator[Record | Damaged]:
    """The records of a segment between two positions of the journal, and its damaged ranges, in order. The ranges in
    `lost` are passed over."""
    at = begin
    while at < end:
        inside = next((each for each in lost if each.begin <= at < each.end), None)
        if inside is not None:
            at = inside.end
            continue
        limit = min([end, *(each.begin for each in lost if each.begin > at)])
        try:
            yield from walk(descriptor, path, base, at - base, limit - base, seed)
            at = limit
        except DamagedFrame as error:
            following = _next(descriptor, error.position, limit - base, base, seed, path)
            begin, at = base + error.position, limit if following is None else base + following
            yield Damaged(error, begin, at)


class _LastSegment:
    """The last segment of the journal. Its records before the last batch are applied at once."""

    def __init__(
        self, folder: str, base: int, seed: int, lost: Sequence[Lost], apply: Apply, found: list[Damaged]
    ) -> None:
        """found: damage before the last batch is added to it."""
        self.folder, self.base, self._seed, self._lost, self._apply = folder, base, seed, lost, apply
        self._path = segment_path(folder, base)
        self._file = OpenSegment.open(folder, base)
        self._end = base + self._file.size
        self.begin = base
        """The position at which the last batch begins."""
        self._batch: list[Record | Damaged] = []
        for each in self._parts(base):
            if isinstance(each, Record) and each.follows == 0:
                # Everything before this record was synced.
                for before in self._batch:
                    if isinstance(before, Record):
                        apply(before)
                    else:
                        found.append(before)
                self._batch, self.begin = [], each.position
            self._batch.append(each)
        self._unreadable = self._without_body()

    def _parts(self, begin: int) -> Iterator[Record | Damaged]:
        return parts(self._file.descriptor, self._path, self.base, begin, self._end, self._seed, self._lost)

    def unreadable(self, proof: int | None) -> list[Record]:
        """The records of the last batch before `proof` whose body cannot be read."""
        batch = [each for each in self._batch if isinstance(each, Record)]
        return [each for each in batch if each.position < (proof or 0) and each.position in self._unreadable]

    def _without_body(self) -> dict[int, Damaged]:
        """By position: the records of the last batch whose body is damaged or incomplete."""
        found = {}
        for each in self._batch:
            if isinstance(each, Record):
                try:
                    read_body(self._file.descriptor, self._path, self.base, each)
                except DamagedFrame as error:
                    found[each.position] = Damaged(error, each.position, each.position + each.size)
        return found

    def proves(self, proof: int | None, *, is_stop: bool) -> bool:
        """Whether the headers of all records before `proof` are there, and nothing that contradicts it."""
        if proof is None or (is_stop and self._end > proof):
            return False
        first = next((each.begin for each in self._batch if isinstance(each, Damaged)), self._end)
        return proof <= first

    def damaged(self, proof: int | None) -> list[Damaged]:
        """The damaged ranges of the last batch. A record before `proof` whose body cannot be read is none of them: it
        is known that the node had this entry, and a read is answered with an error."""
        found = []
        for each in self._batch:
            if isinstance(each, Damaged):
                found.append(each)
            elif (bad := self._unreadable.get(each.position)) is not None and each.position >= (proof or 0):
                found.append(bad)
        return found

    def upto_damage(self, proof: int | None) -> list[Record]:
        """The records of the last batch before the first damaged range."""
        damaged = self.damaged(proof)
        end = damaged[0].begin if damaged else self._end
        if damaged:
            _logger.warning("the last write to the journal was incomplete and is removed: %s", damaged[0].error)
        return [each for each in self._batch if isinstance(each, Record) and each.position < end]

    def as_it_is(self, proof: int | None) -> tuple[OpenSegment, int]:
        """Apply the last batch, after it was found on the medium: also the headers, because a fence has no body.
        Returns its segment, and the position after its last record. Raises OSError."""
        tail = self.upto_damage(proof)
        self._drop_cache()
        again = {each for each in self._parts(self.begin) if isinstance(each, Record)}
        for record in tail:
            try:
                if record not in again:
                    raise DamagedFrame(self._path, record.position - self.base, "the record is missing")
                if record.position not in self._unreadable:
                    read_body(self._file.descriptor, self._path, self.base, record)
            except DamagedFrame as error:
                why = f"the last batch was not written to the medium: {error}"
                raise OSError(errno.EIO, why, self._path) from error
            self._apply(record)
        return self._file, tail[-1].position + tail[-1].size if tail else self.begin

    def sealed(self, proof: int | None, *, is_read_only: bool) -> tuple[OpenSegment, int, list[Damaged]]:
        """Apply what the medium has of the last batch, and leave the file as it is. Returns the segment to which the
        journal appends, its end, and the damaged ranges. Raises OSError."""
        self._drop_cache()
        self._batch = list(self._parts(self.begin))
        self._unreadable = self._without_body()
        damaged = self.damaged(proof)
        for each in self._batch:
            if isinstance(each, Record) and not any(bad.begin == each.position for bad in damaged):
                self._apply(each)
        if is_read_only:
            return self._file, -(-self._end // ALIGNMENT) * ALIGNMENT, damaged
        end = -(-self._end // ALIGNMENT) * ALIGNMENT
        if damaged and damaged[-1].end == self._end:
            damaged[-1] = damaged[-1]._replace(end=end)
        segment = OpenSegment.open(self.folder, end, is_created=True)
        disk.sync_folder(self.folder)
        return segment, end, damaged

    def _drop_cache(self) -> None:
        self._file.sync()
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _begin_again(folder: str, begin: int, end: int, last: int | None, base: int) -> tuple[OpenSegment, int]:
    """Write the records between two positions, which are the last batch, to a new segment. Returns the segment, and its
    base.

    last: the base of the segment that contains the batch; None if there is none. base: of the new segment: `begin`, if
    there is a batch."""
    path = segment_path(folder, base)
    temporary = f"{path}{NEW}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if end > begin:
            assert last is not None
            source = os.open(segment_path(folder, last), os.O_RDONLY | os.O_CLOEXEC)
            try:
                for at in range(begin, end, COPY_BYTES):
                    piece = read_or_zeros(source, min(COPY_BYTES, end - at), at - last)
                    pwrite_all(descriptor, [piece], at - begin)
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
    return OpenSegment.open(folder, base), base
