"""Folders that a handle keeps open, so that it notices when their path leads to another folder, or to none."""

from __future__ import annotations

import contextlib
import errno
import os

from pxrs import disk
from pxrs.errors import RegistryReplaced


class Folder:
    """An open folder. Its descriptor stays good for a sync after the folder was moved away."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def in_place(self) -> bool:
        """Whether the folder is still found under its path; False if nothing is.

        Raises RegistryReplaced if another folder is there: pxrs uses no name twice."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not os.path.samestat(found, os.fstat(self._descriptor)):
            raise RegistryReplaced(
                f"{self.path}: this directory was replaced by another one while it was open. Put the original back, or "
                "open the registry again to use the new directory"
            )
        return True

    def sync(self) -> None:
        try:
            disk.sync_folder(self._descriptor)
        except OSError as error:
            # Some read-only file systems, such as a mounted image, have no sync: everything is on the medium already.
            is_read_only = bool(os.fstatvfs(self._descriptor).f_flag & os.ST_RDONLY)
            if not is_read_only or error.errno not in (errno.EINVAL, errno.EROFS):
                raise

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            with contextlib.suppress(OSError):
                os.close(self._descriptor)


class Generation(Folder):
    """A folder of journal entries."""

    def __init__(self, path: str) -> None:
        self.number = int(os.path.basename(path).partition("-")[0])
        super().__init__(path)

    def entry(self, number: int) -> str:
        return f"{self.path}/{number:020d}"

    def has_entry(self, number: int) -> bool:
        """Unlike `os.path.exists`, this raises if the operating system gives an error other than "not there"."""
        try:
            os.stat(self.entry(number))
        except FileNotFoundError:
            return False
        return True

    def numbers(self) -> set[int] | None:
        """The numbers of the entries that are there; None if the folder was moved away."""
        try:
            return {int(name) for name in os.listdir(self.path) if name.isdigit()}
        except FileNotFoundError:
            return None
