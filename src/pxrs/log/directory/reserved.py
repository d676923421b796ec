"""The file `reserved` of a partition with durability "os": every offset below the number in it may have been given to a
message that was not synced (docs/decisions/0008)."""

from __future__ import annotations

import logging
import os
from typing import Final

from pxrs import disk
from pxrs.disk import read_with_checksum, replace_file, with_checksum
from pxrs.errors import DamagedFrame, MisplacedFile

_logger: Final = logging.getLogger(__name__)
RESERVED: Final = "reserved"
RESERVED_OFFSETS: Final = 1 << 16
"""How many offsets are reserved at a time."""


def dump_reserved(reserved: int, place: int) -> bytes:
    return with_checksum(f"{reserved} {place:016x}")


def is_reserved(folder: str) -> bool:
    """Whether offsets were ever reserved, so that messages may have been stored without a sync."""
    return os.path.exists(f"{folder}/{RESERVED}")


def read_reserved(folder: str, place: int) -> int:
    """The first offset that was never reserved; 0 if none was. Raises DamagedFrame, and MisplacedFile if the file
    belongs to another partition."""
    path = f"{folder}/{RESERVED}"
    try:
        text = read_with_checksum(path)
    except FileNotFoundError:
        return 0
    if text is None:
        raise DamagedFrame(path, 0, "the checksum does not match")
    number, _, written_for = text.partition(" ")
    if written_for and written_for != f"{place:016x}":  # the format before has no `place`
        raise MisplacedFile(
            path, 0, "it was written for another topic or partition; put back the one that belongs here"
        )
    return int(number)


class Reservation:
    """The reservation of one partition, as this process knows it. Callers hold the partition's append lock."""

    def __init__(self, folder: str, place: str, place_id: int) -> None:
        """place, place_id: name the partition in messages and in files."""
        self._folder, self._place, self._place_id = folder, place, place_id
        self._until = 0
        """Offsets below this one are reserved, as far as this process knows; another one may have reserved more."""

    @property
    def is_there(self) -> bool:
        return is_reserved(self._folder)

    def forget(self) -> None:
        """Read the file again before the next append: another process may have removed it."""
        self._until = 0

    def extend(self, end: int) -> None:
        """Before offsets below `end` are given to messages without a sync: record on disk that they are, so that no
        process gives them to other messages after a start of the machine."""
        if end <= self._until:
            return
        reserved = read_reserved(self._folder, self._place_id)
        if end > reserved:
            reserved = end + RESERVED_OFFSETS
            replace_file(f"{self._folder}/{RESERVED}", dump_reserved(reserved, self._place_id), is_durable=True)
        # Also if another process has written the file: it may have died before it synced the folder.
        disk.sync_folder(self._folder)
        self._until = reserved

    def end(self) -> None:
        """Remove the file. Every append was synced by now, and every later one will be, so that no offset can be lost
        any more (decision 0060). If this fails, the next segment tries again; until then a power loss costs a gap in
        the offsets."""
        self.forget()
        try:
            os.unlink(f"{self._folder}/{RESERVED}")
            disk.sync_folder(self._folder)
        except OSError as error:
            _logger.warning(
                "%s: the file `reserved` could not be removed: %s; the next segment tries again",
                self._place,
                disk.explain(error),
            )
