"""Whether a storage node can accept entries: its disk has free space, and the last write of the journal succeeded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from pxrs import disk

_logger = logging.getLogger(__name__)

Probe = Callable[[Callable[[Exception | None], None]], None]
"""Writes a PROBE record to the journal, and calls the function with None when it is synced, or with the error."""


class Room:
    """Threads share it."""

    def __init__(self, folder: str, free_bytes_min: int, probe: Probe) -> None:
        """free_bytes_min: with less free space than this, the node accepts no entries."""
        self._folder, self._free_bytes_min, self._probe = folder, free_bytes_min, probe
        self.problem: str | None = None
        """Why the node accepts no entries; None if it does."""
        self._left = 0
        """How many bytes of entries the node accepts before the next look. Set by `look`, lowered by `take`."""

    @property
    def free_bytes(self) -> int:
        """0 if the disk does not tell."""
        try:
            return self._free_bytes()
        except OSError:
            return 0

    def _free_bytes(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def look(self) -> None:
        """Check the free space and, after a failure, whether the journal can be written again. The registration calls
        this at intervals of `alive_s`."""
        try:
            free = self._free_bytes()
        except OSError as error:
            self._set(f"the disk cannot be used: {disk.explain(error, self._folder)}")
            return
        self._left = free - self._free_bytes_min
        if free < self._free_bytes_min:
            self._set(f"the disk is full: {free:,} bytes are free, {self._free_bytes_min:,} are required")
        elif self.problem is not None:
            self._probe(self._probed)

    def take(self, size: int) -> None:
        """An entry of this length is about to be written. Between two looks the entries must not take the room that is
        reserved: without it, no removal could be recorded, and a disk full of garbage would stay full."""
        self._left -= size
        if self._left < 0 and self.problem is None:
            self._set(f"the disk is full: entries have taken all but {self._free_bytes_min:,} bytes of its space")

    def failed(self, error: OSError) -> None:
        """The journal could not be written."""
        self._set(f"the journal could not be written: {disk.explain(error, self._folder)}")

    def _probed(self, error: Exception | None) -> None:
        if error is None:
            self._set(None)

    def _set(self, why: str | None) -> None:
        before, self.problem = self.problem, why
        if why is not None and before is None:
            _logger.error("the node accepts no entries: %s", why)
        elif why is None and before is not None:
            _logger.warning("the node accepts entries again")
