"""A partition's offsets and size, read from its files without keeping any of them open.

An open partition holds two or three descriptors and an entry in the kernel's list of watched files. A page or a command
that shows thousands of partitions would run out of both, so it reads the small files of each partition and closes them
again. Nothing is recovered here: after a start of the machine, and until some process opens the partition, the end is
the last one that was published before; it may be a lower bound then.
"""

from __future__ import annotations

import os

from pxrs.log.contract import Bounds
from pxrs.log.directory.published import NAME, PublishedFile
from pxrs.log.directory.segments.files import segment_bases
from pxrs.log.directory.start import read_start


def glance(folder: str, place: int, *, is_retained: bool) -> Bounds:
    """The start and the end of the partition in this folder. Raises OSError, DamagedFrame, MisplacedFile.

    place: the partition's `place_id`. is_retained: the topic has a retention setting."""
    start = read_start(folder, place, is_retained=is_retained)
    if start is None:
        bases = segment_bases(folder)
        start = bases[0] if bases else 0
    try:
        file = PublishedFile(f"{folder}/{NAME}", place, os.O_RDONLY)
    except FileNotFoundError:  # nothing was ever appended
        return Bounds(start, start)
    try:
        published = file.read() or file.last()
    finally:
        file.close()
    return Bounds(start, max(start, published.end))


def stored_bytes(folder: str) -> int:
    """The size of the partition's segments. 0 if the folder is missing."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".log"))
    except FileNotFoundError:  # the topic was deleted, or retention has removed a segment meanwhile
        return 0
