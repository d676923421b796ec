"""Files that a repair replaces or removes: they stay beside their place, under another name."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.disk import replace_file

_KEPT: Final = "damaged"
"""In the name under which a file is kept."""

Signature = tuple[int, int, int]
"""Inode, time of the last modification and size of a file: they tell whether it was written since a plan was made."""


def signature(file: str) -> Signature | None:
    """None if there is no such file."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def keep(file: str, *, is_copied: bool = False) -> str:
    """Give a file another name, or copy it durably; returns the name of what is kept. The caller holds the append lock,
    so that no other repair chooses the same name."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{file}.{_KEPT}-{stamp}" + (f"-{number}" if number else "") for number in count())
    kept = next(name for name in names if not os.path.exists(name))
    if is_copied:  # the name must not be missing for a moment: readers use it
        replace_file(kept, Path(file).read_bytes(), is_durable=True)
        disk.sync_folder(os.path.dirname(file))
    else:
        os.rename(file, kept)
    return kept
