"""The journal: every change is a numbered file, and publishing it is one system call.

The problem: several processes change several keys together, any of them may be killed or stopped between any two
system calls, and nobody may wait for a process that is stopped. So there is no lock. A change is written to a scratch
file and synced, then published by `link(2)` as the next number: that call is the commit point, for all keys at once.
`EEXIST` means that another process was first: read what it published, check again, try the next number (R9).

    <root>/origin                                  names the first generation, for ever
    <root>/generations/<number>-<unique>/          a folder of entries
        snapshot                                   the state after some entry; a generation that has one is *live*
        00000000000000000042                       entry 42; its number is the version of what it wrote
    <root>/scratch/  <root>/trash/                 files being prepared, folders being removed

Compaction: the last entry of a generation is a *seal* that names the folder where history goes on. A process that has
read up to the seal just goes on there; whoever sealed then publishes a snapshot in the new folder, for those who open
the registry later, and moves the old folders away. Each step is one call that either wins or finds itself late, and a
folder's name is never used again: a process that slept through a compaction gets `ENOENT`, not a number that was freed.

Durable before acknowledged: the scratch file is synced before the link, the folder after it; whoever follows a seal
syncs the folder that holds it before writing behind it. A failure after the link is an unknown outcome. After a power
loss a file system may have kept an entry and lost the one before it: what lies behind such a hole was never
acknowledged, and is cut off by a seal.

Only `prepared` and `finish_compaction` may be called without the lock that `store.py` holds. A call that is interrupted
in the middle, by an error or by a signal, leaves the state `torn`: it is loaded anew before it is used again.
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
from typing import NamedTuple

from pxrs import disk
from pxrs.errors import OutcomeUnknown, RegistryCorrupt, RegistryUnavailable
from pxrs.registry.file.codec import Seal, decode_entry, decode_snapshot, encode_entry, encode_snapshot
from pxrs.registry.state import Change, State

ENTRIES_MIN = 1024
"""A generation is sealed when it has this many entries, or a quarter of the number of keys if that is more: so
the cost of the snapshot, spread over the commits between two of them, does not grow with the number of keys."""
OPEN_TRIES = 100
SCRATCH_AGE_MAX = 3600.0
CHUNK = 1 << 17
_GENERATION = re.compile(r"\d{10}-[0-9a-f]{32}")


class Generation:
    """An open folder of entries. Its descriptor stays good for a sync after the folder was moved away."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = int(os.path.basename(path).partition("-")[0])
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def entry(self, number: int) -> str:
        return f"{self.path}/{number:020d}"

    def in_place(self) -> bool:
        try:
            os.stat(self.path)
        except FileNotFoundError:
            return False
        return True

    def sync(self) -> None:
        disk.sync_folder(self._descriptor)

    def numbers(self) -> list[int]:
        """The numbers of the entries that are there."""
        return [int(name) for name in os.listdir(self.path) if name.isdigit()]

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            with contextlib.suppress(OSError):
                os.close(self._descriptor)


class Published(NamedTuple):
    """A step that is in the journal for good, once its generation is synced."""

    generation: Generation
    number: int
    changed: list[str]


class Journal:
    """The state of a registry folder, kept up to date by reading what was published."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.generation: Generation  # what `_load` finds
        self.generations = root / "generations"
        self.scratch = root / "scratch"
        self.trash = root / "trash"
        for folder in (self.generations, self.scratch, self.trash):
            disk.make_folders(folder)
        self.state = State()
        self.number = 0
        self.torn = False
        self._begun_at = 0
        self._load()
        self.catch_up()
        self._seal_hole()

    # Reading.

    def catch_up(self) -> list[str] | None:
        """Read what others have published; returns the keys that changed, or None if that is not known."""
        changed: list[str] = []
        known = not self.torn
        if self.torn:
            self._load()
        self.torn = True
        while True:
            step = self._read_entry(self.number + 1)
            if step is None:
                # If the folder is in place after the entry was not there, nothing was missed.
                if self.generation.in_place():
                    self.torn = False
                    return changed if known else None
                self._load()
                known = False
                continue
            self.number += 1
            if isinstance(step, Seal):
                known = self._follow(step) and known
            else:
                changed += self.state.apply(step, self.number)

    def _read_entry(self, number: int) -> Change | Seal | None:
        path = self.generation.entry(number)
        data = _read(path)
        return None if data is None else decode_entry(data, path)

    def _follow(self, seal: Seal) -> bool:
        """Go on in the folder that the seal names; False if that is gone too and all was loaded anew."""
        # What is written behind the seal must not outlive it.
        self.generation.sync()
        try:
            self.generation = Generation(str(self.generations / seal.successor))
        except FileNotFoundError:
            self._load()
            return False
        self._begun_at = self.number
        return True

    def _load(self) -> None:
        """Start from the newest snapshot."""
        for _ in range(OPEN_TRIES):
            folder = self._newest_live() or self._origin()
            data = None if folder is None else _read(f"{folder}/snapshot")
            if folder is None or data is None:
                continue  # it was compacted away while we looked
            state, number = decode_snapshot(data, f"{folder}/snapshot")
            with contextlib.suppress(FileNotFoundError):
                self.generation = Generation(folder)
                self.state, self.number, self._begun_at = state, number, number
                return
        if self._newest_live() is None:
            raise RegistryCorrupt(str(self.root), "no generation with a snapshot is left, so its state is lost")
        raise RegistryUnavailable(f"{self.root}: the newest generation moved away {OPEN_TRIES} times while opening it")

    def _newest_live(self) -> str | None:
        for name in sorted(self._generation_names(), reverse=True):
            folder = f"{self.generations}/{name}"
            if os.path.exists(f"{folder}/snapshot"):
                return folder
        return None

    def _generation_names(self) -> list[str]:
        return [name for name in os.listdir(self.generations) if _GENERATION.fullmatch(name)]

    def _seal_hole(self) -> None:
        """If entries lie behind one that is missing, end the generation where it is missing."""
        for _ in range(OPEN_TRIES):
            if all(number <= self.number + 1 for number in self.generation.numbers()):
                return
            before = self.number
            self.catch_up()
            if self.number == before and self.seal():  # else somebody published the missing one just now
                self.catch_up()

    def _origin(self) -> str | None:
        """The folder of the first generation, made by whoever publishes its name first; None to look again."""
        marker = f"{self.root}/origin"
        if not os.path.exists(marker):
            with self.prepared(self._new_folder(0).encode()) as scratch, contextlib.suppress(FileExistsError):
                os.link(scratch, marker)
        disk.sync_folder(self.root)
        name = _read(marker)
        folder = f"{self.generations}/{(name or b'').decode()}"
        if name is None or not os.path.isdir(folder):
            return None
        # Nobody writes to a generation without a snapshot that no seal names, so its state is still the empty one.
        self._publish_snapshot(folder, encode_snapshot(State(), 0))
        return folder

    # Writing.

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
            with contextlib.suppress(OSError):  # the commit may be done by now; what is left is swept later
                os.unlink(path)

    def publish(self, scratch: str, step: Change | Seal) -> Published | None:
        """Publish a prepared step as the next number; None if another process was first: catch up and try again.

        On success the step is applied, and its generation is to be synced before it is acknowledged.
        """
        generation = self.generation
        self.torn = True
        try:
            os.link(scratch, generation.entry(self.number + 1))
        except (FileExistsError, FileNotFoundError):
            if not os.path.exists(scratch):
                raise RegistryUnavailable(f"{scratch} was removed while it was being committed") from None
            self.torn = False
            return None
        try:
            in_place = generation.in_place()
        except OSError as error:
            raise OutcomeUnknown(f"{generation.path}: published, but then: {error}") from error
        if not in_place:
            # Either others have sealed and moved the folder behind our entry, or the link went into a folder that
            # was being removed. It cannot be told, so it is not guessed.
            raise OutcomeUnknown(f"{generation.path} was compacted in the very moment of the commit")
        changed: list[str] = []
        if isinstance(step, Change):  # a seal is followed by reading it, as all others do
            self.number += 1
            changed = self.state.apply(step, self.number)
        self.torn = False
        return Published(generation, self.number, changed)

    # Compaction.

    @property
    def compaction_due(self) -> bool:
        return self.number - self._begun_at >= max(ENTRIES_MIN, len(self.state.records) // 4)

    def seal(self) -> bool:
        """Let history go on in a new folder, which `catch_up` then finds; False if others were first."""
        step = Seal(self._new_folder(self.generation.number + 1))
        with self.prepared(encode_entry(step)) as scratch:
            sealed = self.publish(scratch, step) is not None
        if not sealed:
            os.rmdir(self.generations / step.successor)
        return sealed

    def snapshot(self) -> tuple[Generation, bytes]:
        """What `finish_compaction` needs: the present generation and state."""
        return self.generation, encode_snapshot(self.state, self.number)

    def finish_compaction(self, generation: Generation, snapshot: bytes) -> None:
        """Make the generation live, then move away all before it. Needs no lock, and may be left undone."""
        self._publish_snapshot(generation.path, snapshot)
        if os.path.exists(f"{generation.path}/snapshot"):
            generation.sync()
            self._discard_before(generation.number)

    def _publish_snapshot(self, folder: str, data: bytes) -> None:
        # Any true state will do, so whoever comes first is right: a second one finds it there, or the folder gone.
        with (
            self.prepared(data) as scratch,
            contextlib.suppress(FileExistsError, FileNotFoundError),
        ):
            os.link(scratch, f"{folder}/snapshot")
            disk.sync_folder(folder)

    def _discard_before(self, number: int) -> None:
        for name in self._generation_names():
            if int(name.partition("-")[0]) < number:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.generations / name, self.trash / name)
        disk.sync_folder(self.generations)
        for name in os.listdir(self.trash):
            shutil.rmtree(self.trash / name, ignore_errors=True)
        self._discard_old_scratch()

    def _discard_old_scratch(self) -> None:
        """Remove what killed processes left. An hour is far beyond any commit; a slower one fails, it does not harm."""
        oldest = time.time() - SCRATCH_AGE_MAX
        for entry in os.scandir(self.scratch):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)

    def _new_folder(self, number: int) -> str:
        """A new, empty generation folder, durable before anyone may name it."""
        name = f"{number:010d}-{uuid.uuid4().hex}"
        os.mkdir(self.generations / name)
        disk.sync_folder(self.generations)
        return name


def _read(path: str) -> bytes | None:
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
