"""The log in a local directory: `topics/<name>/topic.json` and a folder for each partition.

A topic appears whole or not at all: its folder is prepared under another name, synced, and renamed. Deleting renames it
away first, so that its name is free at once. Processes of one machine share the directory; network file systems are
refused, because their locks are not safe (F8).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.errors import (
    AppendFailed,
    Closed,
    InvalidRecord,
    InvalidUrl,
    LogError,
    ReadFailed,
    TopicExists,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.inotify import MODIFY, Notifier
from pxrs.log.batch import Batch, encode
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Log, TopicLog
from pxrs.log.partition import Partition, Ready
from pxrs.log.published import NAME as PUBLISHED
from pxrs.log.published import Published
from pxrs.model import TOPIC_NAME, Topic

_META: Final = "topic.json"


class DirectoryLog(Log):
    """A handle to a directory. Made by the first `create_topic`; reading an absent one finds no topics."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        disk.require_posix("a log in a directory")
        self._root = path.absolute()
        if self._root.exists() and not self._root.is_dir():
            raise InvalidUrl(f"{path} is a file; a log is kept in a directory")
        disk.refuse_network_file_system(self._root, "a log")
        self._topics = self._root / "topics"
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[str, DirectoryTopic] = {}
        self._pid = os.getpid()
        self._is_closed = False

    def create_topic(self, topic: Topic) -> TopicLog:
        self._check_usable()
        target = self._topics / topic.name
        if target.exists():
            raise TopicExists(f"there is a topic {topic.name!r} already")
        with self._os_errors():
            disk.make_folders(self._topics)
            prepared = self._topics / f".new-{uuid.uuid4().hex}"
            for partition in range(topic.partitions):
                (prepared / "partitions" / f"partition-{partition}").mkdir(parents=True)
            with open(prepared / _META, "w") as file:
                json.dump(asdict(topic), file, indent=2)
                file.flush()
                disk.sync_data(file.fileno())
            for folder in (prepared / "partitions", prepared):
                disk.sync_folder(folder)
            try:
                os.rename(prepared, target)
            except OSError as error:
                shutil.rmtree(prepared)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise TopicExists(f"there is a topic {topic.name!r} already") from error
                raise
            disk.sync_folder(self._topics)
        return self.topic(topic.name)

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
                found = self._open[name] = DirectoryTopic(topic, self._topics / name, self._timeout)
            return found

    def delete_topic(self, name: str) -> None:
        self.topic(name)
        with self._lock:
            self._open.pop(name).close()
        gone = self._topics / f".deleted-{uuid.uuid4().hex}"
        with self._os_errors():
            try:
                os.rename(self._topics / name, gone)
            except FileNotFoundError:
                raise UnknownTopic(name) from None
            disk.sync_folder(self._topics)
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
        try:
            found = json.loads((self._topics / name / _META).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        known = {field.name for field in fields(Topic)}
        extra = {key: value for key, value in found.items() if key not in known}
        kept = {key: value for key, value in found.items() if key in known}
        return Topic(**{**kept, "extra": {**kept.get("extra", {}), **extra}})

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


class DirectoryTopic(TopicLog):
    """One topic, its partitions opened as they are used."""

    def __init__(self, topic: Topic, folder: Path, timeout: float) -> None:
        self.topic, self.name, self.id, self.partitions = topic, topic.name, topic.id, topic.partitions
        self._folder, self._timeout = folder, timeout
        self._lock = threading.Lock()
        self._open: dict[int, Partition] = {}
        self._pid = os.getpid()
        self._is_closed = False
        _in_use.add(self)

    def start(self, partition: int) -> int:
        with self._reading(partition) as opened:
            return opened.start()

    def end(self, partition: int) -> int:
        with self._reading(partition) as opened:
            return opened.published().end

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        with self._reading(partition) as opened:
            return opened.read(offset, max_bytes)

    def offset_at(self, partition: int, timestamp: int) -> int:
        with self._reading(partition) as opened:
            return opened.offset_at(timestamp)

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
            raise ReadFailed(f"{opened.place}: {error.filename or opened.folder}: {error.strerror}") from error

    def append(self, appends: Sequence[Append]) -> list[int]:
        ready: dict[int, list[Ready]] = {}
        for append in appends:
            payload = encode(append.records, self.topic.codec)
            ready.setdefault(append.partition, []).append(Ready(payload, append.origin))
        partitions = {number: self._partition(number) for number in ready}
        offsets = {number: iter(partitions[number].append(batches)) for number, batches in ready.items()}
        return [next(offsets[append.partition]) for append in appends]

    def wait(self, positions: Mapping[int, int], timeout: float | None = None) -> set[int]:
        """Be told by the kernel of each partition's published end, in this process or another."""
        ready = self._ready(positions)
        if ready or timeout == 0:
            return ready
        until = None if timeout is None else time.monotonic() + timeout
        notifier = Notifier()
        try:
            for partition in positions:
                notifier.add(f"{self._partition(partition).folder}/{PUBLISHED}", MODIFY)
            while not (ready := self._ready(positions)):  # after arming, so that nothing is missed
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                notifier.wait(left)
                self._check_usable()
        finally:
            notifier.close()
        return ready

    def _ready(self, positions: Mapping[int, int]) -> set[int]:
        return {partition for partition, offset in positions.items() if self.end(partition) > offset}

    def retain(self, now: int) -> dict[int, int]:
        moved = {}
        for number in range(self.partitions):
            partition = self._partition(number)
            segments = partition.sealed_segments()
            keep = self._keep_from(segments, partition.published().segment_bytes, now)
            if segments and keep > segments[0][0]:
                moved[number] = partition.drop_before(keep)
        return moved

    def _keep_from(self, segments: list[tuple[int, int, int, int]], tail_bytes: int, now: int) -> int:
        """The first offset to keep: whole segments go, the oldest first, while they are too old or too many bytes."""
        topic = self.topic
        total = tail_bytes + sum(size for _, _, size, _ in segments)
        keep = segments[0][0] if segments else 0
        for _, following, size, last_time in segments:
            is_old = topic.retention_s is not None and last_time < now - topic.retention_s * 1_000_000
            is_much = topic.retention_bytes is not None and total > topic.retention_bytes
            if not is_old and not is_much:
                break
            keep, total = following, total - size
        return keep

    def _partition(self, number: int) -> Partition:
        self._check_usable()
        if not 0 <= number < self.partitions:
            raise InvalidRecord(f"{self.name} has partitions 0 to {self.partitions - 1}, and no {number}")
        found = self._open.get(number)
        if found is None:
            with self._lock:
                found = self._open.get(number)
                if found is None:
                    folder = self.partition_folder(number)
                    try:
                        found = self._open[number] = Partition(
                            folder,
                            f"{self.name}/{number}",
                            segment_bytes=self.topic.segment_bytes,
                            timeout=self._timeout,
                        )
                    except FileNotFoundError:
                        raise UnknownTopic(self.name) from None
                    except OSError as error:
                        raise AppendFailed(f"{folder}: {error.strerror}") from error
        return found

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"topic {self.name} was opened before a fork: open it again in the child")
        if self._is_closed:
            raise Closed(f"topic {self.name} was closed or deleted")

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            for partition in self._open.values():
                partition.close()
            self._open.clear()


_in_use: weakref.WeakSet[DirectoryTopic] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A lock belongs to the open file, which a forked child would share and keep locked after its parent's death."""
    for topic in list(_in_use):
        for partition in list(topic._open.values()):
            partition.close()


os.register_at_fork(after_in_child=_let_go_in_child)
