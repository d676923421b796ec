"""The log in a local directory: `logs/<id>/topic.json`, a folder for each partition, and `topics/<name>`, a link to it.

A topic appears whole or not at all: its folder is prepared and synced before the link is made, which claims the name.
Deleting moves the link away, then the folder. No folder is ever used again: who has a deleted topic open finds its
files gone, and can never reach into a later topic of the same name (G7). Processes of one machine share the directory;
network file systems are refused, because their locks are not safe (F8).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import xxhash

from pxrs import disk
from pxrs.errors import (
    AppendFailed,
    Closed,
    DamagedFrame,
    InvalidRecord,
    InvalidUrl,
    LogError,
    MisplacedFile,
    ReadFailed,
    TopicExists,
    UnknownProducer,
    UnknownTopic,
    UsedAfterFork,
    refused_in,
)
from pxrs.inotify import ATTRIB, DELETE_SELF, MODIFY, Notifier
from pxrs.log.batch import Batch, encode, place_id
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Log, TopicLog
from pxrs.log.crew import Crew
from pxrs.log.partition import Partition, Ready
from pxrs.log.published import NAME as PUBLISHED
from pxrs.log.published import Published
from pxrs.log.reading import SealedSegment
from pxrs.model import TOPIC_NAME, Topic

_META: Final = "topic.json"
_CHECKSUM: Final = "checksum"
_RESTING_MAX: Final = 4


class DirectoryLog(Log):
    """A handle to a directory. Made by the first `create_topic`; reading an absent one finds no topics."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        disk.require_posix("a log in a directory")
        self._root = path.absolute()
        if self._root.exists() and not self._root.is_dir():
            raise InvalidUrl(f"{path} is a file; a log is kept in a directory")
        disk.refuse_network_file_system(self._root, "a log")
        self._topics, self._logs = self._root / "topics", self._root / "logs"
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[str, DirectoryTopic] = {}
        self._pid = os.getpid()
        self._is_closed = False

    def create_topic(self, topic: Topic) -> TopicLog:
        self._check_usable()
        target, link = self._topics / topic.name, os.path.join(os.pardir, "logs", topic.id)
        if target.exists():
            raise TopicExists(f"there is a topic {topic.name!r} already")
        with self._os_errors():
            disk.make_folders(self._topics)
            disk.make_folders(self._logs)
            self._finish_deletions()
            folder = self._logs / topic.id
            try:
                folder.mkdir()
            except FileExistsError:
                raise TopicExists(f"there is a topic with the id {topic.id!r} already") from None
            try:
                self._prepare(topic, folder)
                if target.is_symlink() and not target.exists():  # it leads nowhere: somebody has removed the folder
                    self._take_link(target)
                os.symlink(link, target)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    if os.readlink(target) == link:  # an interrupt came right behind it
                        self._take_link(target)
                shutil.rmtree(folder, ignore_errors=True)
                if isinstance(error, FileExistsError):
                    raise TopicExists(f"there is a topic {topic.name!r} already") from error
                raise
            disk.sync_folder(self._topics)
        return self.topic(topic.name)

    def _take_link(self, link: Path) -> Path:
        """Move a link away; one of several who try gets it, and with it the folder that it leads to."""
        taken = self._topics / f".deleted-{uuid.uuid4().hex}"
        os.rename(link, taken)
        return taken

    def _prepare(self, topic: Topic, folder: Path) -> None:
        for partition in range(topic.partitions):
            (folder / "partitions" / f"partition-{partition}").mkdir(parents=True)
        with open(folder / _META, "w") as file:
            described = asdict(topic)
            json.dump({**described, _CHECKSUM: _checksum(described)}, file, indent=2)
            file.flush()
            disk.sync_data(file.fileno())
        for each in (folder / "partitions", folder, self._logs):
            disk.sync_folder(each)

    def topics(self) -> list[Topic]:
        self._check_usable()
        try:
            names = sorted(os.listdir(self._topics))
        except FileNotFoundError:
            return []
        return [topic for name in names if TOPIC_NAME.fullmatch(name) and (topic := self._meta(name)) is not None]

    def topic(self, name: str) -> TopicLog:
        self._check_usable()
        topic = self._meta(name) if TOPIC_NAME.fullmatch(name) else None
        if topic is None:
            raise UnknownTopic(name, [topic.name for topic in self.topics()])
        with self._lock:
            found = self._open.get(name)
            if found is None or found.id != topic.id:
                if found is not None:
                    found.close()
                found = self._open[name] = DirectoryTopic(topic, self._logs / topic.id, self._timeout)
            return found

    def delete_topic(self, name: str) -> None:
        self.topic(name)
        with self._os_errors():
            try:
                link = self._take_link(self._topics / name)
            except FileNotFoundError:
                raise UnknownTopic(name) from None
            identity = os.path.basename(os.readlink(link))
            disk.sync_folder(self._topics)
            self._finish_deletions()
        with self._lock:
            if name in self._open and self._open[name].id == identity:
                self._open.pop(name).close(is_deleted=True)

    def _finish_deletions(self) -> None:
        """Remove what belongs to links that were moved away, by this process or by one that died at it."""
        for link in self._topics.glob(".deleted-*"):
            with contextlib.suppress(FileNotFoundError):
                folder = self._logs / os.path.basename(os.readlink(link))
                with contextlib.suppress(FileNotFoundError):
                    os.rename(folder, folder.with_name(f".deleted-{folder.name}"))
                os.unlink(link)
        for gone in self._logs.glob(".deleted-*"):
            shutil.rmtree(gone, ignore_errors=True)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        with self._lock:
            for topic in self._open.values():
                topic.close()
            self._open.clear()

    def _meta(self, name: str) -> Topic | None:
        folder = self._topics / name
        try:
            if folder.is_symlink():  # followed once: a topic that is made meanwhile under the same name has another one
                folder = self._logs / os.path.basename(os.readlink(folder))
            topic = read_topic(folder / _META)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if topic.name != name or (folder.parent == self._logs and folder.name != topic.id):
            raise MisplacedFile(
                str(folder / _META), 0, f"it describes topic {topic.name}, id {topic.id}, and lies where {name} is"
            )
        return topic

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the log in {self._root} was opened before a fork: open it again in the child")
        if self._is_closed:
            raise Closed(f"the log in {self._root} was closed")

    @contextlib.contextmanager
    def _os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LogError(f"{error.filename or self._root}: {error.strerror}") from error


def read_topic(path: Path) -> Topic:
    """A topic as it is described in its folder. Raises DamagedFrame."""
    try:
        found = json.loads(path.read_bytes())
        checksum = found.pop(_CHECKSUM, None)
        if checksum != _checksum(found):
            raise DamagedFrame(str(path), 0, f"the checksum {checksum!r} does not match")
        known = {field.name for field in fields(Topic)}
        extra = {key: value for key, value in found.items() if key not in known}
        kept = {key: value for key, value in found.items() if key in known}
        return Topic(**{**kept, "extra": {**kept.get("extra", {}), **extra}})
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFrame(str(path), 0, f"it is no topic's description: {error}") from error


def _checksum(described: dict[str, Any]) -> str:
    """Of what a topic's file says, however it is laid out."""
    return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())


class DirectoryTopic(TopicLog):
    """One topic, its partitions opened as they are used."""

    def __init__(self, topic: Topic, folder: Path, timeout: float) -> None:
        self.topic, self.name, self.id, self.partitions = topic, topic.name, topic.id, topic.partitions
        self._folder, self._timeout = folder, timeout
        self._lock = threading.Lock()
        self._open: dict[int, Partition] = {}
        self._crew = Crew()
        self._resting: list[_Waiter] = []
        self._waiting: set[_Waiter] = set()
        self._pid = os.getpid()
        self._is_closed = self._is_deleted = False
        _in_use.add(self)

    def start(self, partition: int) -> int:
        with self._reading(partition) as opened:
            return opened.reader.start()

    def end(self, partition: int) -> int:
        with self._reading(partition) as opened:
            return opened.published().end

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        with self._reading(partition) as opened:
            return opened.reader.read(offset, max_bytes)

    def offset_at(self, partition: int, timestamp: int) -> int:
        with self._reading(partition) as opened:
            return opened.reader.offset_at(timestamp)

    def published(self, partition: int) -> Published:
        """What readers may read of a partition's files; for the checker."""
        with self._reading(partition) as opened:
            return opened.published()

    def partition_folder(self, partition: int) -> str:
        return str(self._folder / "partitions" / f"partition-{partition}")

    @contextlib.contextmanager
    def _reading(self, partition: int) -> Iterator[Partition]:
        opened = self._partition(partition)
        try:
            yield opened
        except OSError as error:
            self._check_usable()  # closing takes the files away from under a reader
            if not self._folder.exists():
                raise UnknownTopic(self.name) from error
            raise ReadFailed(f"{opened.place}: {error.filename or opened.folder}: {error.strerror}") from error

    def append(self, appends: Sequence[Append]) -> list[int]:
        ready: dict[int, list[Ready]] = {}
        for append in appends:
            payload = encode(append.records, self.topic.codec)
            ready.setdefault(append.partition, []).append(Ready(payload, append.origin, append.since))
        partitions = {number: self._partition(number) for number in ready}
        refused: dict[int, UnknownProducer] = {}

        def store(number: int) -> list[int]:
            try:
                return partitions[number].append(ready[number])
            except UnknownProducer as error:
                refused[number] = error
                return []

        try:
            stored = self._crew.run([functools.partial(store, number) for number in ready])
        except LogError as error:
            error.refused = refused_in(refused)
            if isinstance(error, AppendFailed) and not self._folder.exists():
                raise UnknownTopic(self.name) from error
            raise
        if refused:
            raise UnknownProducer.of(self.name, refused)
        offsets = {number: iter(places) for number, places in zip(ready, stored, strict=True)}
        return [next(offsets[append.partition]) for append in appends]

    def wait(
        self,
        positions: Mapping[int, int],
        timeout: float | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> set[int]:
        """Be told by the kernel of each partition's published end, in this process or another."""
        ready = self._ready(positions)
        if ready or timeout == 0:
            return ready
        until = None if timeout is None else time.monotonic() + timeout
        with self._waiter() as waiter:
            for partition in positions:
                waiter.watch(partition, f"{self._partition(partition).folder}/{PUBLISHED}")
            while not (ready := self._ready(positions)):  # after arming, so that nothing is missed
                left = None if until is None else until - time.monotonic()
                if (left is not None and left <= 0) or (is_over is not None and is_over()):
                    break
                waiter.notifier.wait(left)
                self._check_usable()
        return ready

    def wake(self) -> None:
        with self._lock:
            for waiter in self._waiting:
                waiter.notifier.interrupt()

    @contextlib.contextmanager
    def _waiter(self) -> Iterator[_Waiter]:
        """Kept for the next one who waits: closing what the kernel tells through can take it many milliseconds."""
        with self._lock:
            self._check_usable()
            waiter = self._resting.pop() if self._resting else None
            if waiter is not None:
                self._waiting.add(waiter)
        if waiter is None:
            try:
                waiter = _Waiter()
            except OSError as error:
                raise LogError(
                    f"{self.name}: too many wait at once ({error.strerror}); see fs.inotify.max_user_instances"
                ) from error
            with self._lock:
                self._waiting.add(waiter)
        try:
            yield waiter
        except OSError as error:
            self._check_usable()
            if not self._folder.exists():
                raise UnknownTopic(self.name) from error
            raise LogError(f"{self.name}: cannot wait: {error.filename}: {error.strerror}") from error
        finally:
            with self._lock:
                self._waiting.discard(waiter)
                is_kept = not self._is_closed and len(self._resting) < _RESTING_MAX
                if is_kept:
                    self._resting.append(waiter)
            if not is_kept:
                waiter.notifier.close()

    def _ready(self, positions: Mapping[int, int]) -> set[int]:
        return {partition for partition, offset in positions.items() if self.end(partition) > offset}

    def retain(self, now: int, unread: Mapping[int, int] | None = None) -> dict[int, int]:
        moved = {}
        errors: list[LogError] = []
        for number in range(self.partitions):
            try:
                with self._reading(number) as partition:
                    if self.topic.retention_s is not None:
                        partition.seal(self._oldest(now))
                    segments = partition.reader.sealed_segments()
                    keep = self._keep_from(segments, partition.published().segment_bytes, now)
                    keep = min(keep, (unread or {}).get(number, keep))
                    if segments and keep > segments[0].base:
                        moved[number] = partition.drop_before(keep)
            except LogError as error:  # one that is damaged keeps no other from being trimmed
                errors.append(error)
        if errors:
            raise errors[0]
        return moved

    def _keep_from(self, segments: list[SealedSegment], tail_bytes: int, now: int) -> int:
        """The first offset to keep: whole segments go, the oldest first, while they are too old or too many bytes."""
        topic = self.topic
        total = tail_bytes + sum(segment.bytes for segment in segments)
        keep = segments[0].base if segments else 0
        for segment in segments:
            is_old = topic.retention_s is not None and segment.last_time < self._oldest(now)
            is_much = topic.retention_bytes is not None and total > topic.retention_bytes
            if not is_old and not is_much:
                break
            keep, total = segment.following, total - segment.bytes
        return keep

    def _oldest(self, now: int) -> int:
        """The time before which messages may go."""
        assert self.topic.retention_s is not None
        return now - int(self.topic.retention_s * 1_000_000)

    def _partition(self, number: int) -> Partition:
        self._check_usable()
        if not 0 <= number < self.partitions:
            raise InvalidRecord(f"{self.name} has partitions 0 to {self.partitions - 1}, and no {number}")
        found = self._open.get(number)
        if found is None:
            with self._lock:
                self._check_usable()
                found = self._open.get(number)
                if found is None:
                    folder = self.partition_folder(number)
                    try:
                        found = self._open[number] = Partition(
                            folder,
                            f"{self.name}/{number}",
                            place_id(self.id, number),
                            segment_bytes=self.topic.segment_bytes,
                            timeout=self._timeout,
                            is_synced=self.topic.durability == "disk",
                        )
                    except FileNotFoundError:
                        raise UnknownTopic(self.name) from None
                    except OSError as error:
                        raise LogError(f"{folder}: {error.strerror}") from error
        return found

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"topic {self.name} was opened before a fork: open it again in the child")
        if self._is_deleted:
            raise UnknownTopic(self.name)
        if self._is_closed:
            raise Closed(f"topic {self.name} was closed")

    def close(self, *, is_deleted: bool = False) -> None:
        with self._lock:
            self._is_closed, self._is_deleted = True, is_deleted
            opened = list(self._open.values())
            self._open.clear()
            for waiter in self._waiting:
                waiter.notifier.interrupt()
            for waiter in self._resting:
                waiter.notifier.close()
            self._resting.clear()
        for partition in opened:
            partition.close()
        self._crew.close()


class _Waiter:
    """A notifier, and the partitions that it has been told to watch."""

    def __init__(self) -> None:
        self.notifier = Notifier()
        self._watched: set[int] = set()

    def watch(self, partition: int, path: str) -> None:
        if partition not in self._watched:
            self.notifier.add(path, MODIFY | ATTRIB | DELETE_SELF)
            self._watched.add(partition)


_in_use: weakref.WeakSet[DirectoryTopic] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A lock belongs to the open file, which a forked child would share and keep locked after its parent's death."""
    for topic in list(_in_use):
        for partition in list(topic._open.values()):
            partition.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
