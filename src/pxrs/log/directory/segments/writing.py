"""The last segment file of a sequence, open for appending.

The caller holds the append lock of the folder, and knows the end: the position behind the last byte that was synced.
Several processes may append in turn, so nothing about the end is kept here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Self

import pyarrow as pa

from pxrs import disk
from pxrs.errors import DamagedFrame
from pxrs.log.batch import Header
from pxrs.log.directory.segments.files import pread, pwrite_all, segment_path
from pxrs.log.directory.segments.scanning import Scan, has_later_append


class OpenSegment:
    """A segment file and its descriptor. Not thread-safe. Closed by `close`, or with its last reference."""

    def __init__(self, folder: str, base: int, descriptor: int) -> None:
        self.folder, self.base, self.descriptor = folder, base, descriptor
        self.path = segment_path(folder, base)

    @classmethod
    def open(cls, folder: str, base: int, *, is_created: bool = False) -> Self:
        """Open a segment file. is_created: create the file if it is missing; otherwise a missing file raises
        FileNotFoundError."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_created else 0)
        return cls(folder, base, os.open(segment_path(folder, base), flags, 0o644))

    @property
    def size(self) -> int:
        """The bytes of the file, with those behind the end that a writer may have left."""
        return os.fstat(self.descriptor).st_size

    @property
    def is_removed(self) -> bool:
        """Whether the file was removed, so that no other process would see what is written to it."""
        return not os.fstat(self.descriptor).st_nlink

    def read(self, size: int | None = None) -> pa.Buffer:
        """The first `size` bytes; the whole file if that is None."""
        return pa.py_buffer(pread(self.descriptor, self.size if size is None else size, 0))

    def write(self, pieces: list[object], position: int) -> None:
        """Write the pieces at the end, without a sync. After an OSError, `cut` what was written."""
        pwrite_all(self.descriptor, pieces, position)

    def sync(self) -> None:
        """Return when all that was written is on the medium. After an OSError, what was not synced before may be lost,
        and the system may report a later sync as successful: go on in another segment (L3)."""
        disk.sync_data(self.descriptor)

    def cut(self, position: int) -> None:
        """Remove what lies behind the end. Never call it with less than was synced: readers map those bytes (L2)."""
        os.ftruncate(self.descriptor, position)

    def keep_whole(self, data: pa.Buffer, scan: Scan, is_later: Callable[[Header], bool], place: int | None) -> None:
        """After a crash: cut off a torn append, and sync the rest. Raises `scan.damage`, and cuts nothing, if a later
        append proves that the place was synced (`has_later_append`).

        data: the content of the file. scan: what was found in it."""
        if scan.damage is not None:
            if has_later_append(data, self.path, scan.position, is_later, place):
                raise scan.damage
            self.cut(scan.position)
        self.sync()
        disk.sync_folder(self.folder)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `os.close` is a default argument because this module may be gone when the interpreter ends.
        if self.descriptor >= 0:
            close(self.descriptor)


def next_segment(folder: str, base: int, *, is_emptied: bool = False) -> OpenSegment:
    """Go on in another file, which is durable when this returns. The caller has synced the last one (L3).

    A writer that died may have made the file and written nothing into it; then it is used. If it has content, that
    raises DamagedFrame, or is removed if `is_emptied`: the first append to a segment could not be synced, and the next
    one begins again at the same base."""
    segment = OpenSegment.open(folder, base, is_created=True)
    if is_emptied:
        segment.cut(0)
    elif segment.size:
        raise DamagedFrame(segment.path, 0, "a segment with messages exists where the next one must begin")
    disk.sync_folder(folder)
    return segment
