"""Names of segment files, and reads and writes that are not cut short."""

from __future__ import annotations

import os
from typing import Final

SUFFIX: Final = ".log"
_BUFFERS_MAX: Final = 1_000
"""How many buffers one call of pwritev may take: the system's limit is 1,024."""


def segment_path(folder: str, base: int) -> str:
    return f"{folder}/{base:020d}{SUFFIX}"


def segment_bases(folder: str) -> list[int]:
    """The bases of the segment files that are in the folder, in rising order."""
    names = (name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX))
    return sorted(int(name) for name in names if len(name) == 20 and name.isdigit())


def pread(descriptor: int, size: int, position: int) -> bytes:
    """`size` bytes of the file from `position` on; fewer only where the file ends."""
    data = os.pread(descriptor, size, position)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


def pwrite_all(descriptor: int, pieces: list[object], position: int) -> None:
    """Write the pieces one behind the other. Raises OSError; a part of them may then be written."""
    buffers = [memoryview(piece).cast("B") for piece in pieces if len(memoryview(piece))]  # type: ignore[arg-type]
    while buffers:
        written = os.pwritev(descriptor, buffers[:_BUFFERS_MAX], position)
        position += written
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]
