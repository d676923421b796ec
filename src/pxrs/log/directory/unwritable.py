"""The published end of a partition for a process that may read its files and not write them.

Such a process does not make `published`, and cannot find the end anew after the machine was started again: recovery
cuts a torn append and syncs before it publishes (`recovery.py`). Until a process with write permission has done that,
it shows only messages that are known to be on disk (L1):

- What `published` says was published in this boot. If one of its two slots is damaged, what the other one says: a slot
  is written after the sync, so an older end is a smaller one, never a wrong one.
- After another boot: what was published before it, where each append is synced (durability "disk"). With durability
  "os" a power loss may have taken any of that.
- All before the last segment: a segment is synced before the next one is made, with either durability.

It never waits for a writer. What it leaves out is logged once for each open partition, and is the `problem` of the end
that it shows: that end is a lower bound then, and the lag of a group is not known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from pxrs.errors import DamagedFrame
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.segments.files import segment_bases, segment_path

_logger = logging.getLogger(__name__)
_LOOKS: Final = 20
_PAUSE_S: Final = 0.001
"""Between two looks at a slot that is not whole: a writer may just be writing it."""


class UnwritablePublished(PublishedFile):
    """The file, open to be read. Threads share it. The file may be missing: the first process that opens the partition
    with write permission makes it, before it makes the first segment."""

    def __init__(self, folder: str, path: str, place: str, place_id: int, *, is_synced: bool) -> None:
        """place, place_id: name the partition in messages and in files. is_synced: the choice of durability."""
        self._folder, self._name, self._place_id, self._is_synced = folder, place, place_id, is_synced
        self._opening = threading.Lock()
        self._is_open = self._is_closed = False
        self._best = NOTHING
        """What was found with the highest end so far. An end that was shown is never taken back."""
        self._damaged: bytes | None = None
        """The content of the file when a slot of it was found damaged, and no writer was at it."""
        self._is_told = False
        """Whether `problem` was logged."""
        self.problem: str | None = None
        """Why there may be messages behind the end that was read last; None if that end is exact."""
        self.path = path
        self._descriptor = -1
        self._open()

    def _open(self) -> bool:
        """False if the file is not there yet."""
        with self._opening:
            if not self._is_open and not self._is_closed:
                try:
                    super().__init__(self.path, self._place_id, os.O_RDONLY)
                except FileNotFoundError:
                    return False
                self._is_open = True
                if self._is_closed:  # by another thread, just now
                    super().close()
            return True

    def is_in_place(self) -> bool:
        """True. Raises DamagedFrame if somebody has removed the file."""
        if self._is_open and not super().is_in_place():
            raise DamagedFrame(self.path, 0, "somebody has removed it; open the log again, in every process")
        return True

    def read(self) -> Published:
        """What may be read. Raises MisplacedFile."""
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
        """After a slot was found that is not whole: give a writer time to finish it. None if it stays as it is."""
        for _ in range(_LOOKS):
            if self._bytes() == self._damaged or not self._parse()[1]:
                return None
            time.sleep(_PAUSE_S)
            if (published := super().read()) is not None:
                return published
        self._damaged = self._bytes()
        return None

    def _known(self) -> tuple[list[int], Published]:
        """The segments, and up to where messages are known to be on disk, although nothing is published, or not all of
        it is whole."""
        bases = segment_bases(self._folder)  # first: what is published meanwhile then only adds to it
        published = NOTHING
        if self._open():
            published = self.whole() or (self.last() if self._is_synced else NOTHING)
        if bases and bases[-1] > published.end:
            published = Published(0, bases[-1], 0, bases[-1])
        return bases, published

    def _hidden(self, bases: list[int], published: Published) -> str | None:
        """Why messages may be left out if only those before this end are shown; logged the first time. None if the
        files hold no more than that."""
        if not bases or published.segment > bases[-1]:
            return None
        shown = published.segment_bytes if published.segment == bases[-1] else 0
        if os.stat(segment_path(self._folder, bases[-1])).st_size <= shown:
            return None
        problem = (
            f"{self._name}: messages from offset {published.end} on are not shown yet. {self.path} does not tell where "
            f"the partition ends, as after a start of the machine; a process that may write to {self._folder} has to "
            "open the topic, and this one may not"
        )
        if not self._is_told:
            self._is_told = True
            _logger.warning("%s", problem)
        return problem

    def close(self) -> None:
        """Takes no lock: in a forked child, a thread that is not there may hold it."""
        self._is_closed = True
        super().close()
