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

    @property
    def free_bytes(self) -> int:
        """Raises OSError."""
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def look(self) -> None:
        """Check the free space and, after a failure, whether the journal can be written again. The registration calls
        this at intervals of `alive_s`."""
        try:
            free = self.free_bytes
        except OSError as error:
            self._set(f"the disk cannot be used: {disk.explain(error, self._folder)}")
            return
        if free < self._free_bytes_min:
            self._set(f"the disk is full: {free:,} bytes are free, {self._free_bytes_min:,} are required")
        elif self.problem is not None:
            self._probe(self._probed)

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
