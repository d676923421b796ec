"""The published end of a partition: up to where every reader, in every process, may read (L1).

It moves only after the sync, so that no reader sees what a power loss could undo. It is a small file of two slots that
are written alternately, each with a counter and a checksum; a reader that finds a slot half written reads it again. The
file is never synced. Each slot has the id of the boot (the machine's start) in which it was written; after another
start the file is not used, and the end is rebuilt from the segments. Writing the file also wakes waiting readers: the
kernel notifies them that it was modified.

Each slot names the partition, so that the file of another partition raises MisplacedFile before anything is read or cut
by what it says. Slots of the format before do not; whoever appends compares them with the segment.
"""

from __future__ import annotations

import errno
import os
import struct
import uuid
from typing import Final, NamedTuple

import xxhash

from pxrs.clock import boot_id
from pxrs.errors import DamagedFrame, MisplacedFile

NAME: Final = "published"
_SLOT: Final = struct.Struct("<QQQQBB2xI16s")
_CHECKSUM: Final = struct.Struct("<Q")
_STRIDE: Final = 64
_FORMAT: Final = 2
"""The format of a slot. Slots of the format before have 0 here, and 0 in place of the partition."""
_LOOKS: Final = 5
"""How often a slot that is not whole is read again, because a writer may be writing it."""


class Published(NamedTuple):
    counter: int
    segment: int
    """The base offset of the segment that is appended to."""
    segment_bytes: int
    """How many bytes of it may be read."""
    end: int
    is_suspect: bool = False
    """A sync has failed (L3). The system may have dropped the pages that it could not write, and report success for the
    next sync. The next append must go on in a new segment."""
    whole_end: int | None = None
    """Never in the file. Set if published bytes are missing, as in a copy that was made under load: the offsets from
    this one up to `end` belong to no message, `segment` is the last one that is there, and `segment_bytes` what is
    whole of it. The next append makes a gap of these offsets."""


NOTHING: Final = Published(0, 0, 0, 0)


class PublishedFile:
    """The file, open. One process at a time writes it, under the append lock; any may read it."""

    def __init__(self, path: str, place: int, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        """`place` is the partition's `place_id`; a slot has room for its lower half."""
        self.path = path
        self._place = place & 0xFFFF_FFFF
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        self._boot = uuid.UUID(boot_id()).bytes
        status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)

    def is_in_place(self) -> bool:
        """Whether the file is still there. Raises DamagedFrame if it was removed and created again: other processes may
        write to the new file."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        if (status.st_dev, status.st_ino) != self._identity:
            raise DamagedFrame(self.path, 0, "it was removed and created again while the log was open")
        return True

    def last(self) -> Published:
        """The last published end of any boot. Messages before it were durable, unless the topic's appends are not
        synced. Counters start anew with each boot; ends only grow."""
        slots, _ = self._slots()
        return max((slot for slot, _ in slots), key=lambda slot: (slot.end, slot.segment), default=NOTHING)

    def read(self) -> Published | None:
        """What is published. None if nothing was published since the machine started, or if a slot is damaged: the
        damaged slot may be the newer one, and only recovery, under the append lock, can find the end."""
        for _ in range(_LOOKS):
            slots, damaged = self._parse()
            if not damaged:
                return max(slots, default=None)
        return None

    def rebuild(self, segment: int, segment_bytes: int, end: int, *, is_suspect: bool = False) -> Published:
        """Publish the end that was found in the segments, then clear damaged slots. In this order, because a process
        that dies in between leaves a damaged slot, which has the end rebuilt again, and never an older end. The caller
        holds the append lock."""
        slots, _ = self._parse()
        published = self.write(max(slots, default=None), segment, segment_bytes, end, is_suspect=is_suspect)
        for at in self._parse()[1]:
            os.pwrite(self._descriptor, bytes(_STRIDE), at)
        return published

    def whole(self) -> Published | None:
        """The newer one of the undamaged slots of this boot; None if there is none."""
        return max(self._parse()[0], default=None)

    def is_of_this_boot(self) -> bool:
        """Whether anything was published since the machine started. A damaged slot counts too, if its boot id can be
        read."""
        data = self._bytes()
        return any(data[at : at + _SLOT.size].endswith(self._boot) for at in (0, _STRIDE))

    def has_damaged_slot(self) -> bool:
        """Whether a slot, of any boot, is neither whole nor empty."""
        return bool(self._slots()[1])

    def is_damaged(self) -> bool:
        """Whether a slot of this boot is damaged. One that a power loss has torn is written anew by recovery."""
        slots, damaged = self._parse()
        return (bool(slots) or self.is_of_this_boot()) and bool(damaged) and self.read() is None

    def _bytes(self) -> bytes:
        return os.pread(self._descriptor, 2 * _STRIDE, 0)

    def _parse(self) -> tuple[list[Published], list[int]]:
        """The undamaged slots of this boot, and the positions of slots that are damaged or are being written."""
        slots, damaged = self._slots()
        return [slot for slot, boot in slots if boot == self._boot], damaged

    def _slots(self) -> tuple[list[tuple[Published, bytes]], list[int]]:
        """The whole slots of any boot, each with its boot, and where the damaged ones are. Raises MisplacedFile."""
        data = self._bytes()
        slots, damaged = [], []
        for at in (0, _STRIDE):
            if self._is_whole(slot := data[at : at + _STRIDE]):
                counter, segment, segment_bytes, end, suspect, version, place, boot = _SLOT.unpack_from(slot)
                if version and place != self._place:
                    raise MisplacedFile(
                        self.path,
                        at,
                        "it was written for another topic or partition; put back the one that belongs here, or remove "
                        "it: the end is then taken from the last segment",
                    )
                slots.append((Published(counter, segment, segment_bytes, end, bool(suspect)), boot))
            elif slot.strip(b"\0"):
                damaged.append(at)
        return slots, damaged

    def write(
        self, last: Published | None, segment: int, segment_bytes: int, end: int, *, is_suspect: bool = False
    ) -> Published:
        """Publish an end. `last` is what was published before; its slot is not overwritten."""
        published = Published(1 if last is None else last.counter + 1, segment, segment_bytes, end, is_suspect)
        data = self._slot(published)
        if os.pwrite(self._descriptor, data, published.counter % 2 * _STRIDE) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        return published

    def start_anew(self, published: Published) -> None:
        """Replace both slots, whatever they hold, with one write: by this end, or by nothing if it is NOTHING."""
        data = bytearray(2 * _STRIDE)
        if published != NOTHING:
            data[_STRIDE:] = self._slot(published._replace(counter=1))
        if os.pwrite(self._descriptor, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def _slot(self, published: Published) -> bytes:
        data = _SLOT.pack(*published[:5], _FORMAT, self._place, self._boot)
        return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @staticmethod
    def _is_whole(data: bytes) -> bool:
        if len(data) < _SLOT.size + _CHECKSUM.size:
            return False
        (checksum,) = _CHECKSUM.unpack_from(data, _SLOT.size)
        return bool(xxhash.xxh3_64_intdigest(data[: _SLOT.size]) == checksum)
