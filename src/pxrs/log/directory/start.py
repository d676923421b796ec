"""The file `start` of a partition: its first offset. It distinguishes segments that retention has removed from segments
that are missing.

Retention writes the file durably before it unlinks segments. Every offset from `start` on must be there. A partition
from which nothing was removed has no such file and begins at 0. Version 0.1 removed segments without writing the file,
so the first offset of a topic with a retention setting is not known without it. In a topic without such a setting,
nothing removes segments.
"""

from __future__ import annotations

import os
from typing import Final

from pxrs import disk
from pxrs.disk import read_with_checksum, replace_file, with_checksum
from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.directory.segments.files import segment_bases, segment_path

NAME: Final = "start"
_ADVICE: Final = "remove it: the first existing segment then becomes the beginning"


def read_start(folder: str, place: int, *, is_retained: bool) -> int | None:
    """The first offset that must be there; None if it is not known. Raises DamagedFrame, and MisplacedFile if the file
    belongs to another partition.

    place: the partition's `place_id`. is_retained: the topic has a retention setting."""
    path = f"{folder}/{NAME}"
    try:
        if not os.access(path, os.F_OK):  # most partitions have none: this costs a third of a failed `open`
            return None if is_retained else 0
        text = read_with_checksum(path)
    except FileNotFoundError:
        return None if is_retained else 0
    if text is None:
        raise DamagedFrame(path, 0, f"the checksum does not match; {_ADVICE}")
    offset, _, written_for = text.partition(" ")
    if written_for != f"{place:016x}":
        raise MisplacedFile(path, 0, f"it was written for another topic or partition; {_ADVICE}")
    return int(offset)


def write_start(folder: str, place: int, offset: int) -> None:
    """Write the file, durably. The caller holds the append lock."""
    replace_file(f"{folder}/{NAME}", with_checksum(f"{offset} {place:016x}"), is_durable=True)
    disk.sync_folder(folder)


def note_start(folder: str, place: int) -> None:
    """Write the file if it is missing: the first segment that is there is the beginning. The caller holds the append
    lock."""
    if read_start(folder, place, is_retained=True) is None:
        bases = segment_bases(folder)
        write_start(folder, place, bases[0] if bases else 0)


def missing_before(folder: str, start: int, first: int) -> DamagedFrame:
    """The error for a partition that must begin at `start` and whose first segment begins at `first`."""
    return DamagedFrame(
        segment_path(folder, start),
        0,
        f"the segment is missing, with the offsets {start} to {first - 1}, which retention has not removed; the first "
        f"existing offset is {first}",
    )
