"""The file `reserved` of a partition with durability "os": every offset below the number in it may have been given to a
message that was not synced (docs/decisions/0008)."""

from __future__ import annotations

from typing import Final

from pxrs.disk import read_with_checksum, with_checksum
from pxrs.errors import DamagedFrame, MisplacedFile

RESERVED: Final = "reserved"
RESERVED_OFFSETS: Final = 1 << 16
"""How many offsets are reserved at a time."""


def dump_reserved(reserved: int, place: int) -> bytes:
    return with_checksum(f"{reserved} {place:016x}")


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
