"""The folders and files of a file registry, and the calls that make, find and remove them.

    <root>/origin                                  names the first generation, for ever
    <root>/generations/<number>-<unique>/          a folder of entries
        snapshot                                   the state after some entry; a generation that has one is *live*
        00000000000000000042                       entry 42; its number is the version of what it wrote
    <root>/scratch/  <root>/trash/                 files being prepared, folders being removed
    <root>/leases/<id>                             see `lease.py`

Nothing here needs a lock. Each call either takes effect as a whole or finds that another process was first, and the
name of a folder is never used again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.registry.file.codec import encode_snapshot
from pxrs.registry.file.folder import Generation
from pxrs.registry.state import State

ORIGIN: Final = "origin"
SCRATCH_AGE_MAX: Final = 3600.0
"""In seconds: a file in `scratch` that is older was left by a killed process, and is removed."""
CHUNK: Final = 1 << 17
_GENERATION: Final = re.compile(r"\d{10}-[0-9a-f]{32}")


class Layout:
    """The folders below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.generations = root / "generations"
        self.scratch = root / "scratch"
        self.trash = root / "trash"

    def make_folders(self) -> None:
        for folder in (self.generations, self.scratch, self.trash):
            disk.make_folders(folder)

    def origin(self) -> bytes | None:
        """The content of the file `origin`, which identifies the registry; None if there is none."""
        return read_file(f"{self.root}/{ORIGIN}")

    def make_origin(self) -> str | None:
        """The folder of the first generation. The process that publishes its name creates it. None: call again."""
        marker = f"{self.root}/{ORIGIN}"
        if not os.path.exists(marker):
            with self.prepared(self.new_folder(0).encode()) as scratch, contextlib.suppress(FileExistsError):
                os.link(scratch, marker)
        disk.sync_folder(self.root)
        name = read_file(marker)
        folder = f"{self.generations}/{(name or b'').decode()}"
        if name is None or not is_there(folder):
            return None
        # No process writes to a generation that has no snapshot and that no seal names, so its state is still empty.
        self.publish_snapshot(folder, encode_snapshot(State(), 0))
        return folder

    def generation_names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.generations) if _GENERATION.fullmatch(name)]
        except FileNotFoundError:
            return []

    def newest_live(self) -> str | None:
        """The path of the newest generation that has a snapshot."""
        for name in sorted(self.generation_names(), reverse=True):
            folder = f"{self.generations}/{name}"
            if is_there(f"{folder}/snapshot"):
                return folder
        return None

    def entry_after(self, generation: Generation) -> str | None:
        """The first entry, or snapshot, in a generation after this one; None if there is none."""
        for name in sorted(self.generation_names()):
            if int(name.partition("-")[0]) > generation.number:
                with contextlib.suppress(FileNotFoundError):  # moved away
                    for entry in sorted(os.listdir(self.generations / name)):
                        return f"{self.generations}/{name}/{entry}"
        return None

    def new_folder(self, number: int) -> str:
        """A new, empty generation folder, synced before its name is published."""
        name = f"{number:010d}-{uuid.uuid4().hex}"
        os.mkdir(self.generations / name)
        disk.sync_folder(self.generations)
        return name

    @contextlib.contextmanager
    def prepared(self, data: bytes) -> Iterator[str]:
        """A synced scratch file with this content, ready to be linked; removed at the end."""
        path = f"{self.scratch}/{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                disk.sync_data(descriptor)
            finally:
                os.close(descriptor)
            yield path
        finally:
            with contextlib.suppress(OSError):  # the commit may have succeeded; a later compaction removes the file
                os.unlink(path)

    def publish_snapshot(self, folder: str, data: bytes) -> None:
        """Make the generation live. If another process has published a snapshot there, or has moved the folder away,
        nothing is done: a snapshot of any state that the generation has had will do."""
        with (
            self.prepared(data) as scratch,
            contextlib.suppress(FileExistsError, FileNotFoundError),
        ):
            os.link(scratch, f"{folder}/snapshot")
            disk.sync_folder(folder)

    def discard_before(self, number: int) -> None:
        """Move the generations before this one away, then delete them."""
        for name in self.generation_names():
            if int(name.partition("-")[0]) < number:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.generations / name, self.trash / name)
        disk.sync_folder(self.generations)
        for name in os.listdir(self.trash):
            shutil.rmtree(self.trash / name, ignore_errors=True)
        self._discard_old_scratch()

    def _discard_old_scratch(self) -> None:
        """Remove files that killed processes left. A commit takes far less than an hour; a slower one fails."""
        oldest = time.time() - SCRATCH_AGE_MAX
        for entry in os.scandir(self.scratch):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)


def is_there(path: str) -> bool:
    """Unlike `os.path.exists`, this raises if the operating system gives an error other than "not there"."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_file(path: str) -> bytes | None:
    """The file's bytes, or None if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    try:
        pieces = [os.read(descriptor, CHUNK)]
        while len(pieces[-1]) == CHUNK:
            pieces.append(os.read(descriptor, CHUNK))
        return b"".join(pieces)
    finally:
        os.close(descriptor)
