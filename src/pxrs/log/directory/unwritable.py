"""The published end of a partition, for a process that may read its files but not write them.

Such a process cannot create `published`, and cannot rebuild the end after a start of the machine, because recovery cuts
a torn append and syncs the segment (`recovery.py`). Until a process with write permission has done that, this process
shows only messages that are known to be on disk (L1):

- What `published` says was published in this boot. If one of its two slots is damaged, what the other one says: a slot
  is written after the sync, so the other slot may name a smaller end, but never one that is not synced.
- After a start of the machine: what was published before, if each append is synced (durability "disk"). With durability
  "os" a power loss may have taken any of that.
- All segments before the last one: a segment is synced before the next one is made, with either durability.

It never waits for a writer. If messages may be left out, that is logged once for each open partition, and `problem`
says so: the end is then a lower bound, and the lag of a group is not known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from pxrs.errors import DamagedFrame
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.segments.files import segment_bases, segment_path

_logger = logging.getLogger(__name__)
_LOOKS: Final = 20
_PAUSE_S: Final = 0.001
"""The pause before a slot that is not whole is read again: a writer may be writing it at this moment."""


class UnwritablePublished(PublishedFile):
    """The file `published`, open for reading. Threads share it. The file may be missing: the first process that opens
    the partition with write permission creates it before the first segment."""

    def __init__(self, folder: str, path: str, place: str, place_id: int, *, is_synced: Callable[[], bool]) -> None:
        """place, place_id: name the partition in messages and in files. is_synced: whether every published message
        was synced."""
        self._folder, self._name, self._place_id, self._is_synced = folder, place, place_id, is_synced
        self._opening = threading.Lock()
        self._is_open = self._is_closed = False
        self._best = NOTHING
        """The highest end that was shown so far. An end that was shown is never taken back."""
        self._damaged: bytes | None = None
        """The content of the file when `_look_again` last found a slot that stays damaged, so that no writer is writing
        it."""
        self._is_told = False
        """Whether `problem` was logged."""
        self.problem: str | None = None
        """Why there may be messages behind the end that was read last; None if that end is exact."""
        self.path = path
        self._descriptor = -1
        self._open()

    def _open(self) -> bool:
        """Open the file. False if it does not exist yet."""
        with self._opening:
            if not self._is_open and not self._is_closed:
                try:
                    super().__init__(self.path, self._place_id, os.O_RDONLY)
                except FileNotFoundError:
                    return False
                self._is_open = True
                if self._is_closed:  # another thread has closed it
                    super().close()
            return True

    def is_in_place(self) -> bool:
        """Always True. Raises DamagedFrame if somebody has removed the file."""
        if self._is_open and not super().is_in_place():
            raise DamagedFrame(
                self.path, 0, "the file was removed by another program; open the log again in every process"
            )
        return True

    def read(self) -> Published:
        """The end up to which messages may be read. Raises MisplacedFile."""
        published = super().read() if self._open() else None
        if published is None and self._is_open:
            published = self._look_again()
        if published is None:
            bases, known = self._known()
            published = max(known, self._best, key=lambda each: each.end)
            self.problem = self._hidden(bases, published)
        else:
            self.problem = None
        self._best = max(published, self._best, key=lambda each: each.end)
        return published

    def _look_again(self) -> Published | None:
        """Read the file again after a slot was not whole, so that a writer has time to finish it. None if the slot
        stays as it is."""
        for _ in range(_LOOKS):
            if self._bytes() == self._damaged or not self._parse()[1]:
                return None
            time.sleep(_PAUSE_S)
            if (published := super().read()) is not None:
                return published
        self._damaged = self._bytes()
        return None

    def _known(self) -> tuple[list[int], Published]:
        """The segments that are there, and the end up to which messages are known to be on disk, if nothing is
        published since the machine started or a slot is damaged."""
        # Listed before `published` is read: what is published in between can only make the end larger.
        bases = segment_bases(self._folder)
        published = NOTHING
        if self._open():
            published = self.whole() or (self.last() if self._is_synced() else NOTHING)
        if bases and bases[-1] > published.end:
            published = Published(0, bases[-1], 0, bases[-1])
        return bases, published

    def _hidden(self, bases: list[int], published: Published) -> str | None:
        """Why messages may follow this end that are not shown; None if the files hold nothing behind it. Logged the
        first time."""
        if not bases or published.segment > bases[-1]:
            return None
        shown = published.segment_bytes if published.segment == bases[-1] else 0
        if os.stat(segment_path(self._folder, bases[-1])).st_size <= shown:
            return None
        problem = (
            f"{self._name}: messages from offset {published.end} on are not shown yet, because {self.path} does not "
            f"say where the partition ends, as after a reboot. A process that may write to {self._folder} has to open "
            "the topic first; this process may not"
        )
        if not self._is_told:
            self._is_told = True
            _logger.warning("%s", problem)
        return problem

    def close(self) -> None:
        """Takes no lock, because in a forked child the lock may be held by a thread that does not exist there."""
        self._is_closed = True
        super().close()
