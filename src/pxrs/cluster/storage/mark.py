"""The mark of a storage node (C9): up to which position its journal was synced, in memory that a process outlives and a
machine does not.

After the death of the process, the next start on the same machine compares the journal with the mark, and knows whether
the disk has everything that was acknowledged. After a reboot, on another machine or if the file is gone, there is no
mark, and the start is in doubt.

The file is written by one system call, with a checksum, so that a process that is killed leaves the old or the new
content. It holds the boot id of the machine, so that a mark in a folder that survives reboots by mistake is not
believed. Other users of the machine can make files in the same folder: a file that belongs to another user, or is a
link, is not used.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from pathlib import Path
from typing import Final

import xxhash

from pxrs.cluster.storage.core import Mark

_logger = logging.getLogger(__name__)

FOLDERS: Final = (Path("/dev/shm"), Path("/run"))
"""Folders in memory, on Linux. The first one in which this process may make files is used."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAGIC: Final = b"PXSMARK1"
_CONTENT: Final = struct.Struct("<8s36s32s32sq")
_CHECKSUM: Final = struct.Struct("<Q")
_SIZE: Final = _CONTENT.size + _CHECKSUM.size
_UNWRITTEN: Final = (
    "the mark file %s cannot be written. After a crash, the next start cannot prove that the journal is complete and "
    "will be in doubt (docs/cluster.md, Damage and doubt): correct the cause and restart the node: %s"
)


def default_folder() -> Path | None:
    """The folder for marks of this machine; None if it has none, so that every start after a crash is in doubt."""
    return next((folder for folder in FOLDERS if os.access(folder, os.W_OK | os.X_OK)), None)


def boot_id() -> bytes | None:
    try:
        return BOOT_ID.read_bytes().strip()[:36]
    except OSError:
        return None


class MarkFile:
    """The mark of one node. Used by one thread at a time."""

    def __init__(self, folder: Path, node: str) -> None:
        self.path = folder / f"pxrs-storage-{node}.mark"
        self._boot = boot_id()
        self._starts: tuple[str, ...] = ()
        self._descriptor = -1

    def read(self) -> Mark | None:
        """What the last process of the node has left; None if there is nothing that can be believed."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.warning(
                "the mark file %s cannot be read, so it proves nothing about the journal: %s", self.path, error
            )
            return None
        try:
            data = os.pread(descriptor, _SIZE + 1, 0) if self._is_own(descriptor) else b""
        except OSError as error:
            _logger.warning(
                "the mark file %s cannot be read, so it proves nothing about the journal: %s", self.path, error
            )
            return None
        finally:
            os.close(descriptor)
        if len(data) != _SIZE or _CHECKSUM.unpack_from(data, _CONTENT.size)[0] != _digest(data[: _CONTENT.size]):
            return None
        magic, boot, *starts, end = _CONTENT.unpack_from(data)
        if magic != _MAGIC or self._boot is None or boot.rstrip(b"\0") != self._boot:
            return None
        return Mark(tuple(each.rstrip(b"\0").decode() for each in starts if each.rstrip(b"\0")), end)

    def _is_own(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()

    def begin(self, starts: tuple[str, ...], end: int) -> None:
        """Write the mark for a process. starts: as in `Mark`, at most two. If that fails, there is no mark."""
        self.remove()
        if self._boot is None:
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            _logger.warning(_UNWRITTEN, self.path, error)
            return
        self._starts = starts
        self.move(end)

    def move(self, end: int) -> None:
        """The journal is synced up to this position."""
        if self._descriptor < 0:
            return
        first, second = (*(each.encode() for each in self._starts), b"", b"")[:2]
        content = _CONTENT.pack(_MAGIC, self._boot or b"", first, second, end)
        try:
            if os.pwrite(self._descriptor, content + _CHECKSUM.pack(_digest(content)), 0) == _SIZE:
                return
            why = "it was written only in part"
        except OSError as error:
            why = str(error)
        _logger.warning(_UNWRITTEN, self.path, why)
        self.remove()

    def remove(self) -> None:
        """Leave no mark. Idempotent."""
        self.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:  # it belongs to another user, or is a directory: it is not believed either
            _logger.warning("the mark file %s cannot be removed; remove it by hand: %s", self.path, error)

    def close(self) -> None:
        """Leave the mark as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
