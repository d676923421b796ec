"""The directory of a log, and whether it is still the one that was opened."""

from __future__ import annotations

import os
from pathlib import Path

from pxrs import disk
from pxrs.errors import HubMoved


class OpenedDirectory:
    """A path, and the device and inode of the directory that was first found there."""

    def __init__(self, path: Path) -> None:
        """The directory need not exist yet."""
        self.path = path
        self._identity: tuple[int, int] | None = None
        self.check()

    def check(self) -> None:
        """Raise HubMoved if the directory is not at its path any more, or another one is there."""
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            if self._identity is not None:
                raise HubMoved(str(self.path), "the directory was renamed or removed") from None
            return
        except OSError as error:
            raise disk.log_error(error, self.path) from error
        if self._identity is None:
            self._identity = status.st_dev, status.st_ino
        elif self._identity != (status.st_dev, status.st_ino):
            raise HubMoved(str(self.path), "another directory was put in its place")
