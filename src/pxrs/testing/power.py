"""Simulated power loss: record what a run writes and syncs, then build the disks that a loss at any moment could leave.

The model is harsher than most file systems. What was written since the last sync of a file is in blocks of 4 KiB; each
block may have reached the medium as a whole, half, or not at all. A name that was created, moved or removed since the
last sync of its folder may or may not have changed on the medium; a new folder itself is always there. What was synced
is there.

    with recorded(root) as tape: ...do the work, tape.mark(...) what was acknowledged or seen...
    for at in tape.moments():
        tape.restore(at, choose, target)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4096
Choose = Callable[[int], int]
"""Chooses one of this number of possibilities: 0 means that as much as possible is lost, the last one that nothing
is."""


@dataclass
class _File:
    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """(position, bytes), or (size, b"") for a cut."""


@dataclass(frozen=True)
class Event:
    kind: str
    path: str
    other: str = ""
    position: int = 0
    data: bytes = b""
    mark: Any = None


class Tape:
    """What happened under a folder, in order."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.events: list[Event] = []
        self._before = {
            str(path.relative_to(root)): path.read_bytes() for path in Path(root).rglob("*") if path.is_file()
        }
        self._links = {
            str(path.relative_to(root)): os.readlink(path) for path in Path(root).rglob("*") if path.is_symlink()
        }
        self._folders = [
            str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_dir() and not path.is_symlink()
        ]
        self._played: dict[int, tuple[dict[str, _File], list[_Naming], list[str]]] = {}
        """By number of events: the durable names, the changes of names that are not durable, and the folders after
        them. A test asks for many disks of the same moment."""

    def mark(self, value: Any) -> None:
        """Note that something was promised at this moment, to be checked after any later loss."""
        self.events.append(Event("mark", "", mark=value))

    def marks(self, at: int) -> list[Any]:
        return [event.mark for event in self.events[:at] if event.kind == "mark"]

    def note(self, kind: str, path: Any, other: Any = "", position: int = 0, data: bytes = b"") -> None:
        if self._is_inside(path):
            self.events.append(Event(kind, self._name(path), self._name(other) if other else "", position, data))

    def restore(self, at: int, choose: Choose, target: Path) -> None:
        """Write to `target` the disk that a loss after the first `at` events may leave."""
        self.disk(at, choose).write(target)

    def disk(self, at: int, choose: Choose) -> Disk:
        """The disk that a loss after the first `at` events may leave. Many losses leave equal ones."""
        if at not in self._played:
            self._played[at] = self._play_to(at)
        names, waiting, folders = self._played[at]
        durable = dict(names)
        for naming in waiting:  # changes of names that no folder's sync has made durable
            if choose(2):
                naming.apply(durable)
        files = {name: _left(file, choose) for name, file in durable.items()}
        return Disk(
            frozenset({*folders, *map(_parent, self._links), *map(_parent, durable)}),
            frozenset(self._links.items()),
            frozenset(files.items()),
        )

    def _play_to(self, at: int) -> tuple[dict[str, _File], list[_Naming], list[str]]:
        now: dict[str, _File] = {name: _File(data) for name, data in self._before.items()}
        durable = dict(now)
        waiting: list[_Naming] = []
        folders = list(self._folders)
        for event in self.events[:at]:
            if event.kind == "folder":
                folders.append(event.path)
            else:
                _play(event, now, durable, waiting)
        return durable, waiting, folders

    def _is_inside(self, path: Any) -> bool:
        return str(path).startswith(self.root)

    def _name(self, path: Any) -> str:
        return str(Path(str(path)).relative_to(self.root))


@dataclass(frozen=True)
class Disk:
    """What is on a disk, by paths below its root."""

    folders: frozenset[str]
    links: frozenset[tuple[str, str]]
    """Path and destination."""
    files: frozenset[tuple[str, bytes]]
    """Path and content."""

    def digest(self) -> bytes:
        """A digest that is equal only for equal disks."""
        found = hashlib.blake2b(repr((sorted(self.folders), sorted(self.links))).encode())
        for name, content in sorted(self.files):
            found.update(b"\n%d %d\n" % (len(name), len(content)))
            found.update(name.encode())
            found.update(content)
        return found.digest()

    def write(self, target: Path) -> None:
        # As strings: this is done tens of thousands of times.
        for folder in self.folders:
            os.makedirs(f"{target}/{folder}", exist_ok=True)
        for name, destination in self.links:
            os.symlink(destination, f"{target}/{name}")
        for name, content in self.files:
            with open(f"{target}/{name}", "wb") as restored:
                restored.write(content)


@dataclass(frozen=True)
class _Naming:
    """A change of names, which becomes durable with its folder."""

    folder: str
    gone: str = ""
    made: str = ""
    file: _File | None = None

    def apply(self, names: dict[str, _File]) -> None:
        names.pop(self.gone, None)
        if self.file is not None:
            names[self.made] = self.file


def _play(event: Event, now: dict[str, _File], durable: dict[str, _File], waiting: list[_Naming]) -> None:
    naming = None
    if event.kind == "create":
        naming = _Naming(_parent(event.path), made=event.path, file=_File())
    elif event.kind == "link":
        naming = _Naming(_parent(event.other), made=event.other, file=now[event.path])
    elif event.kind == "rename":
        naming = _Naming(_parent(event.path), event.path, event.other, now.get(event.path))
    elif event.kind == "unlink":
        naming = _Naming(_parent(event.path), event.path)
    elif event.kind in ("write", "cut"):
        now[event.path].pending.append((event.position, event.data))
    elif event.kind == "sync" and event.path in now:
        file = now[event.path]
        file.durable, file.pending = _applied(file.durable, file.pending), []
    elif event.kind == "sync folder":
        for done in [naming for naming in waiting if naming.folder == event.path]:
            done.apply(durable)
            waiting.remove(done)
    if naming is not None:
        naming.apply(now)
        waiting.append(naming)


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "."


def _applied(data: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    result = bytearray(data)
    for position, piece in writes:
        if not piece:
            del result[position:]
            continue
        if len(result) < position:
            result += bytes(position - len(result))
        result[position : position + len(piece)] = piece
    return bytes(result)


def _left(file: _File, choose: Choose) -> bytes:
    """What a loss leaves of a file: its durable bytes, and of each unsynced block nothing, half or all."""
    left: list[tuple[int, bytes]] = []
    for position, piece in file.pending:
        if not piece:
            if choose(2):
                left.append((position, piece))
            continue
        begin = 0
        while begin < len(piece):
            size = min(BLOCK_BYTES - (position + begin) % BLOCK_BYTES, len(piece) - begin)
            fate = choose(3)
            kept = piece[begin : begin + (0, size // 2, size)[fate]]
            if kept:
                left.append((position + begin, kept))
            begin += size
    return _applied(file.durable, left)


# Over the limit: each function of `os` that is replaced has a function here, and all of them share the two dicts.
@contextmanager
def recorded(root: Path) -> Iterator[Tape]:
    """Record this process's calls under `root` while the block runs. It changes `os` for all threads."""
    tape = Tape(str(root))
    paths: dict[int, str] = {}
    wrapped = ("open", "close", "write", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync", "rename", "replace")
    original = {name: getattr(os, name) for name in (*wrapped, "unlink", "link", "mkdir")}

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.path.exists(path)
        descriptor: int = original["open"](path, flags, *rest, **named)
        paths[descriptor] = str(path)
        if is_new:
            tape.note("create", path)
        elif flags & os.O_TRUNC:
            tape.note("cut", path)
        return descriptor

    def close(descriptor: int) -> None:
        paths.pop(descriptor, None)
        original["close"](descriptor)

    def pwritev(descriptor: int, buffers: Any, position: int, *rest: Any) -> int:
        count: int = original["pwritev"](descriptor, buffers, position, *rest)
        tape.note("write", paths.get(descriptor, ""), position=position, data=b"".join(map(bytes, buffers))[:count])
        return count

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        count: int = original["pwrite"](descriptor, data, position)
        tape.note("write", paths.get(descriptor, ""), position=position, data=bytes(data)[:count])
        return count

    def write(descriptor: int, data: Any) -> int:
        position = os.lseek(descriptor, 0, os.SEEK_CUR) if descriptor in paths else 0
        count: int = original["write"](descriptor, data)
        tape.note("write", paths.get(descriptor, ""), position=position, data=bytes(data)[:count])
        return count

    def ftruncate(descriptor: int, size: int) -> None:
        original["ftruncate"](descriptor, size)
        tape.note("cut", paths.get(descriptor, ""), position=size)

    def sync(name: str) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            original[name](descriptor)
            path = paths.get(descriptor, "")
            tape.note("sync folder" if os.path.isdir(path) else "sync", path)

        return call

    def move(name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **named: Any) -> None:
            original[name](source, target, **named)
            tape.note("rename", source, target)

        return call

    def link(source: Any, target: Any, **named: Any) -> None:
        original["link"](source, target, **named)
        tape.note("link", source, target)

    def mkdir(path: Any, *rest: Any, **named: Any) -> None:
        original["mkdir"](path, *rest, **named)
        tape.note("folder", path)

    def unlink(path: Any, **named: Any) -> None:
        original["unlink"](path, **named)
        tape.note("unlink", path)

    replaced = {"open": open_, "close": close, "pwritev": pwritev, "pwrite": pwrite, "write": write, "unlink": unlink}
    replaced |= {"ftruncate": ftruncate, "fsync": sync("fsync"), "fdatasync": sync("fdatasync")}
    replaced |= {"rename": move("rename"), "replace": move("replace"), "link": link, "mkdir": mkdir}
    for name, function in replaced.items():
        setattr(os, name, function)
    try:
        yield tape
    finally:
        for name, function in original.items():
            setattr(os, name, function)
