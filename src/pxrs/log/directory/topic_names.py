"""The names of topics: symbolic links in the folder `topics` that lead to the topics' folders in `logs`.

Making a link claims the name; `symlink` refuses a name that is taken. Moving the link away deletes the topic; then its
folder is removed, by this process or by the next one that creates or deletes a topic.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pxrs import disk
from pxrs.errors import LogBusy

_logger: Final = logging.getLogger(__name__)
_PAUSE_S: Final = 0.005
"""The pause between two tries to take the lock of the folder `topics`."""


class TopicNames:
    """The folders `topics` and `logs` of a log."""

    def __init__(self, root: Path, timeout: float) -> None:
        """timeout: seconds to wait for the lock of the folder `topics`."""
        self.root, self.links, self.folders = root, root / "topics", root / "logs"
        self._timeout = timeout

    def claim(self, name: str, topic_id: str) -> None:
        """Make the link. Raises FileExistsError if the name is taken by a topic whose folder is there."""
        link = self.links / name
        if _is_dangling(link):  # somebody has removed the topic's folder by hand
            with self.locked():
                if _is_dangling(link):
                    os.unlink(link)
        os.symlink(_target(topic_id), link)

    def may_be_claimed(self, name: str, topic_id: str) -> bool:
        """Whether the link of this name points to this topic. True, and logged, if that is not known."""
        path = self.links / name
        try:
            return os.readlink(path) == _target(topic_id)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.EINVAL:  # not a link
                return False
            what = disk.explain(error, path)
            _logger.warning("%s: the files prepared for a new topic are kept, because they may be in use", what)
            return True

    def release(self, name: str) -> str:
        """Move the link of a topic away, which deletes the topic. Returns the name of the folder that the link pointed
        to. Raises FileNotFoundError if another process has deleted the topic."""
        with self.locked():
            link = self.links / name
            target = os.readlink(link)
            os.rename(link, self.links / f".deleted-{uuid.uuid4().hex}")
            return os.path.basename(target)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder `topics`. A process must hold it to remove the link of a topic, so that it
        removes the link that it has read, and not that of a topic which another process has created meanwhile under the
        same name; and to change the settings of a topic. Creating a link needs no lock."""
        descriptor = os.open(self.links, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until = time.monotonic() + self._timeout
            while not _try_lock(descriptor):
                if time.monotonic() > until:
                    raise LogBusy(
                        f"{self.links}: another process has held its lock for {self._timeout:g} s; it may be suspended"
                    )
                time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(descriptor)

    def finish_deletions(self) -> None:
        """Remove the folders of links that were moved away, by this process or by one that died before it could.

        Several processes may do this at once. An error is logged: the topics are deleted all the same, and the next
        process that creates or deletes a topic tries again."""
        try:
            links = list(self.links.glob(".deleted-*"))
            if links:
                # The process that moved a link may not have synced that yet. If a power loss undid it after files of
                # the folder were removed, the topic would be back without its messages.
                disk.sync_folder(self.links)
            for link in links:
                with contextlib.suppress(FileNotFoundError):
                    folder = self.folders / os.path.basename(os.readlink(link))
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(folder, folder.with_name(f".deleted-{folder.name}"))
                    os.unlink(link)
            for gone in self.folders.glob(".deleted-*"):
                shutil.rmtree(gone, onerror=_log_unless_gone)
        except OSError as error:
            _log_left_over(error)


def sync_names(root: Path) -> None:
    """Sync every folder that the name of a topic depends on: `topics`, the directory of the log, the one above it.

    The process that made one of these folders, or the link in `topics`, may have died before it synced the folder
    above, or may not have synced it yet; `disk.make_folders` of another process passes over a folder that exists."""
    disk.sync_folder(root / "topics")
    disk.sync_folder(root)
    try:
        disk.sync_folder(root.parent)
    except PermissionError as error:
        # Syncing needs the permission to read. The process that made `root` has synced the folder above it, unless it
        # died just then.
        _logger.info("%s cannot be synced before the first append: %s", root.parent, disk.explain(error))


def _target(topic_id: str) -> str:
    return os.path.join(os.pardir, "logs", topic_id)


def _is_dangling(link: Path) -> bool:
    return link.is_symlink() and not link.exists()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _log_unless_gone(function: object, path: str, told: Any) -> None:
    """If another process removes the same folder at the same time, names vanish, or appear too late to be listed."""
    error = told[1]
    if not isinstance(error, OSError) or error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
        _log_left_over(error)


def _log_left_over(error: BaseException) -> None:
    what = disk.explain(error) if isinstance(error, OSError) else error
    _logger.warning("files of a deleted topic could not be removed: %s; the next deletion tries again", what)
