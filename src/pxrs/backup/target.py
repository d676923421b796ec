"""The folder of a backup. Files get names that depend on their content's place and length, and are never changed:

    backup.json                                    the manifest of the last whole backup (`manifest.py`)
    backup.lock                                    locked (flock) while a backup is made
    registry/<backup id>.jsonl                     the keys of the registry; readable by the owner alone
    logs/<topic id>/topic-<checksum>.json
    logs/<topic id>/<partition>/<first offset>-<bytes>.log
    logs/<topic id>/<partition>/<first offset>-<checksum>.producers
    staging/<topic id>/<writer>/<batch>/<file>

So the files of the last whole backup stay as they are until the next one has its manifest, and a segment that both have
is copied once. A file is written beside its place, synced and renamed: what has its name is whole, also after an
interruption. It gets the time of the file that it is a copy of, so that a file that was replaced since is copied again.

A finished backup removes what its manifest does not name. So a folder is used only if it is empty, or if `backup.lock`
or the manifest shows that a backup was begun there: the folders of a hub have the same names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import xxhash

from pxrs import disk
from pxrs.backup.manifest import NAME, BackupManifest, CopiedFile
from pxrs.disk import read_with_checksum, replace_file, with_checksum
from pxrs.errors import BackupDamaged, BackupError, BackupIncomplete, InvalidUrl

PIECE_BYTES: Final = 4 << 20
"""How much is copied between two calls of `note`."""
PART: Final = ".part"
"""Ends the name of a file that is being written."""
LOCK: Final = "backup.lock"
_OF_A_HUB: Final = frozenset({"hub.record", "hub.lock", "topics"})
"""What only the directory of a hub has."""
_IN_ANY_FOLDER: Final = frozenset({"lost+found"})
"""What a folder that counts as empty may have: the root of a file system has it."""


def refuse_overlap(directory: Path, folder: Path) -> None:
    """Raise InvalidUrl if the directory of a hub and the folder of a backup are the same, or one is in the other."""
    one, other = directory.resolve(), folder.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise InvalidUrl(f"{folder} and the hub {directory} lie in each other: a backup needs a folder of its own")


def read_manifest(folder: Path) -> BackupManifest:
    """The manifest of a whole backup. Raises BackupIncomplete, BackupDamaged."""
    path = folder / NAME
    try:
        return BackupManifest.load(str(path), read_with_checksum(str(path)))
    except FileNotFoundError:
        what = "was interrupted: run it again" if (folder / "logs").is_dir() else "is elsewhere: correct the path"
        raise BackupIncomplete(f"{folder} has no {NAME}, so it holds no whole backup; a backup {what}") from None
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> BackupError:
    """The error for a file of a backup that cannot be read: BackupDamaged, unless only the permission is lacking."""
    if isinstance(error, PermissionError):
        return BackupError(disk.explain(error, path))
    return BackupDamaged(str(path), disk.explain(error))


def checksum_of(path: Path, note: Callable[[int], None] = lambda count: None) -> str:
    """The checksum of a file. note: called with the bytes that were read since the last call."""
    hashed = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            hashed.update(piece)
            note(len(piece))
    return hashed.hexdigest()


def copy_bytes(source: Path, target: Path, limit: int | None, note: Callable[[int], None], mode: int = 0o644) -> str:
    """Copy the first `limit` bytes of a file, all if that is None, and sync the copy; returns their checksum. Raises
    EOFError if there are fewer."""
    hashed, left = xxhash.xxh3_128(), limit
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with open(source, "rb") as read, open(descriptor, "wb", buffering=0) as written:
        while left is None or left > 0:
            piece = read.read(PIECE_BYTES if left is None else min(PIECE_BYTES, left))
            if not piece:
                break
            hashed.update(piece)
            view = memoryview(piece)
            while view:
                view = view[written.write(view) or 0 :]
            left = None if left is None else left - len(piece)
            note(len(piece))
        disk.sync_data(written.fileno())
    if left:
        raise EOFError(f"{source} ends {left:,} bytes too early")
    return hashed.hexdigest()


class Target:
    """The folder of a backup, locked by the process that makes one."""

    def __init__(self, folder: Path, note: Callable[[int], None]) -> None:
        """note: called with the bytes that were copied since the last call."""
        self.folder = folder
        self._note = note
        self._folders: set[Path] = set()
        """Folders that got files and are not synced yet."""
        self.copied_bytes = self.kept_bytes = 0
        """How many bytes this run has copied, and how many it found in the folder already."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock. Raises BackupError if another process makes a backup here, or if the folder has
        files that no backup has made."""
        disk.make_folders(self.folder)
        self._refuse_other_use()
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupError(f"another process is making a backup in {self.folder}; wait for it") from None
            yield
        finally:
            os.close(descriptor)

    def _refuse_other_use(self) -> None:
        found = set(os.listdir(self.folder))
        if found & _OF_A_HUB:
            raise BackupError(f"{self.folder} is the directory of a hub: give another folder for the backup")
        if not found & {NAME, LOCK} and found - _IN_ANY_FOLDER:
            raise BackupError(f"{self.folder} is not empty and holds no backup: give an empty folder, or a new one")

    def previous(self, hub: str, directory: str) -> BackupManifest | None:
        """The last whole backup in the folder; None if there is none. Raises BackupError if it is of another hub.

        hub: the hub's id; if it has none, which is so for hubs of version 0.1, `directory` tells hubs apart."""
        try:
            found = read_manifest(self.folder)
        except BackupIncomplete:
            return None
        if found.hub != hub or (not hub and found.directory != directory):
            raise BackupError(
                f"{self.folder} holds a backup of another hub, {found.directory}: give an empty folder, or remove it"
            )
        return found

    def keep(self, source: Path, path: str, place: str, size: int, known: CopiedFile | None) -> CopiedFile | None:
        """The file if it is in the folder already, whole and of the same age as the source; None if not.

        known: what the last manifest says about it, so that its checksum need not be computed again."""
        target = self.folder / path
        try:
            status = target.stat()
        except FileNotFoundError:
            return None
        if status.st_size != size or status.st_mtime_ns != source.stat().st_mtime_ns:
            return None
        self.kept_bytes += size
        checksum = checksum_of(target) if known is None else known.checksum
        return CopiedFile(path, place, size, checksum)

    def copy(self, source: Path, path: str, place: str, size: int, known: CopiedFile | None) -> CopiedFile:
        """Copy the first bytes of a file. Raises FileNotFoundError, EOFError.

        known: as in `keep`. If the source has other bytes than the last whole backup has under this path, as after a
               repair, the copy gets another path: the last backup stays whole."""
        target = self._made(path)
        time_ns = source.stat().st_mtime_ns
        part = target.with_name(target.name + PART)
        checksum = copy_bytes(source, part, size, self._note)
        os.utime(part, ns=(time_ns, time_ns))
        if known is not None and known.checksum != checksum:
            path = f"{path}-{checksum}"
            target = self.folder / path
        os.rename(part, target)
        self.copied_bytes += size
        return CopiedFile(path, place, size, checksum)

    def write(self, path: str, place: str, data: bytes, mode: int = 0o644) -> CopiedFile:
        """Write a small file."""
        target = self._made(path)
        replace_file(str(target), data, is_durable=True, mode=mode)
        self.copied_bytes += len(data)
        return CopiedFile(path, place, len(data), xxhash.xxh3_128_hexdigest(data))

    def _made(self, path: str) -> Path:
        target = self.folder / path
        if target.parent not in self._folders:
            disk.make_folders(target.parent)
            self._folders.add(target.parent)
        return target

    def finish(self, manifest: BackupManifest) -> None:
        """Make everything durable, write the manifest, and remove what it does not name."""
        for folder in sorted(self._folders, reverse=True):
            disk.sync_folder(folder)
        replace_file(str(self.folder / NAME), with_checksum(manifest.dump()), is_durable=True)
        disk.sync_folder(self.folder)
        self._remove_others({file.path for file in manifest.files})

    def _remove_others(self, named: set[str]) -> None:
        for part in ("logs", "registry", "staging"):
            for folder, folders, names in os.walk(self.folder / part, topdown=False):
                for name in names:
                    if os.path.relpath(os.path.join(folder, name), self.folder) not in named:
                        os.unlink(os.path.join(folder, name))
                for name in folders:
                    with contextlib.suppress(OSError):  # it holds files of the backup
                        os.rmdir(os.path.join(folder, name))
