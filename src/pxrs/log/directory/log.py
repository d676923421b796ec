"""The log in a local directory: `logs/<id>/topic.json`, a folder for each partition, and `topics/<name>`, a link to it.

A topic appears whole or not at all: its folder is prepared and synced before the link is made, which claims the name.
From then on the topic stays until it is deleted, even if `create_topic` is interrupted or fails. A process that finds
the link syncs it before its first append, in case the process that made it has not.

Deleting moves the link away, then the folder. No folder is ever used again: a process that has a deleted topic open
finds its files gone, and cannot read or write a later topic of the same name (G7).

Processes of one machine share the directory. Network file systems are refused, because their locks are not safe (F8).

A handle remembers the device and inode of the directory that it opened. If the directory is renamed, or another one is
put in its place, every use of the handle raises HubMoved: what it would read and write by path and through open files
would belong to two different hubs. An append needs no further system call for that: it checks anyway whether the file
`published` is still the one that it has open, and checks the directory only if that is not so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.errors import (
    Closed,
    InvalidUrl,
    LogError,
    LogNotReadable,
    TopicExists,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.log.contract import DamagedTopic, Log, TopicLog
from pxrs.log.directory.description import META, Descriptions, look_up, write_topic
from pxrs.log.directory.opened_directory import OpenedDirectory
from pxrs.log.directory.tailing import Tailer
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.directory.topic_names import TopicNames, sync_names
from pxrs.model import STORED_TOPIC_NAME, Topic, is_internal

_logger: Final = logging.getLogger(__name__)


class DirectoryLog(Log):
    """A handle to a directory. Made by the first `create_topic`; reading an absent one finds no topics."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        disk.require_posix("a log in a directory")
        self._root = path.absolute()
        if self._root.exists() and not self._root.is_dir():
            raise InvalidUrl(f"{path} is a file; give a directory")
        disk.refuse_network_file_system(self._root, "a log")
        self.url, self.folder, self.own_registry = str(self._root), self._root, self._root / "registry"
        self._place = OpenedDirectory(self._root)
        self._names = TopicNames(self._root, timeout)
        self._descriptions = Descriptions()
        self._timeout = timeout
        self._tailer = Tailer()
        self._lock = threading.Lock()
        self._open: dict[str, DirectoryTopic] = {}
        self._logged_as_damaged: set[str] = set()
        """The names of the topics that were damaged when all topics were last listed. Each was logged when it first
        appeared here."""
        self._pid = os.getpid()
        self._is_closed = False

    def check_place(self) -> None:
        self._place.check()

    def create_topic(self, topic: Topic) -> TopicLog:
        self._check_usable()
        names = self._names
        with self._os_errors():
            if (names.links / topic.name).exists():
                raise self._exists(topic.name)
            disk.make_folders(names.links)
            disk.make_folders(names.folders)
            self.finish_deletions()
            folder = names.folders / topic.id
            try:
                folder.mkdir()
            except FileExistsError:
                raise TopicExists(f"a topic with the id {topic.id!r} already exists") from None
            try:
                self._prepare(topic, folder)
                names.claim(topic.name, topic.id)
            except BaseException as error:
                if not names.may_be_claimed(topic.name, topic.id):
                    shutil.rmtree(folder, ignore_errors=True)
                # Otherwise an interrupt was raised as `symlink` returned. The topic is whole and other processes may
                # have stored messages in it already, so it stays.
                if isinstance(error, FileExistsError):
                    raise self._exists(topic.name) from error
                raise
            sync_names(self._root)
        created = self._opened(topic)  # by its id: the name may belong to another topic by now
        created.is_name_durable = True
        return created

    def _unknown(self, name: str) -> UnknownTopic:
        error = UnknownTopic(name, [topic.name for topic in self.topics() if not is_internal(topic.name)])
        if not self._root.exists():
            error.add_note(f"the directory {self._root} does not exist: check the path; create_topic creates it")
        return error

    def _exists(self, name: str) -> TopicExists:
        found = self._look_up(name)
        if isinstance(found, DamagedTopic) and isinstance(found.error, LogNotReadable):
            return TopicExists(f"topic {name!r} already exists, and this process may not read it: {found.error}")
        if isinstance(found, DamagedTopic):
            return TopicExists(f"topic {name!r} already exists, but is damaged: delete it first ({found.error})")
        return TopicExists(f"topic {name!r} already exists")

    def _prepare(self, topic: Topic, folder: Path) -> None:
        for partition in range(topic.partitions):
            (folder / "partitions" / f"partition-{partition}").mkdir(parents=True)
        write_topic(folder, topic)
        for each in (folder / "partitions", folder, self._names.folders):
            disk.sync_folder(each)

    def topics(self) -> list[Topic]:
        return [found for found in self._look_up_all() if isinstance(found, Topic)]

    def damaged_topics(self) -> list[DamagedTopic]:
        return [found for found in self._look_up_all() if isinstance(found, DamagedTopic)]

    def _look_up_all(self) -> list[Topic | DamagedTopic]:
        self._check_usable()
        with self._os_errors():
            try:
                names = sorted(os.listdir(self._names.links))
            except FileNotFoundError:
                return []
            found = [self._look_up(name) for name in names if STORED_TOPIC_NAME.fullmatch(name)]
        self._descriptions.keep_only({each.id or "" for each in found if each is not None})
        damaged = {each.name: each for each in found if isinstance(each, DamagedTopic)}
        for name, each in damaged.items():
            if name not in self._logged_as_damaged:
                state = "not readable" if isinstance(each.error, LogNotReadable) else "damaged"
                _logger.warning("topic %s is %s: %s", name, state, each.error, extra={"topic": name, "id": each.id})
        self._logged_as_damaged = set(damaged)
        return [each for each in found if each is not None]

    def _look_up(self, name: str) -> Topic | DamagedTopic | None:
        return look_up(self._names.links, name, self._descriptions)

    def topic(self, name: str) -> TopicLog:
        return self._topic(name)

    def _topic(self, name: str) -> DirectoryTopic:
        self._check_usable()
        with self._os_errors():
            found = self._look_up(name) if STORED_TOPIC_NAME.fullmatch(name) else None
        if found is None:
            raise self._unknown(name)
        if isinstance(found, DamagedTopic):
            raise found.error
        return self._opened(found)

    def _opened(self, topic: Topic) -> DirectoryTopic:
        with self._lock:
            found = self._open.get(topic.name)
            if found is None or found.id != topic.id:
                if found is not None:
                    found.close(is_deleted=True)
                found = self._open[topic.name] = DirectoryTopic(
                    topic, self._names.folders / topic.id, self._timeout, self._place, self._tailer
                )
            found.adopt(topic)
            return found

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicLog:
        """As in `Log`. Safe at any kill: `topic.json` is replaced as a whole, and what has to be true of the files
        under the new settings is made true before, or is done by the next append (decision 0060)."""
        self._topic(name)  # raises UnknownTopic, also if there is no folder `topics` to lock
        with self._os_errors():
            with self._names.locked():
                opened = self._topic(name)
                before = opened.topic
                after = before.altered(changes)
                if after == before:
                    return opened
                opened.prepare(after)
                folder = self._names.folders / before.id
                for left in folder.glob(f"{META}.*.tmp"):  # of a process that was killed here; the lock is held
                    left.unlink(missing_ok=True)
                write_topic(folder, after)
                disk.sync_folder(folder)
            opened.settle(before)
        return opened

    def delete_topic(self, name: str) -> str:
        self._check_usable()
        with self._os_errors():
            found = self._look_up(name) if STORED_TOPIC_NAME.fullmatch(name) else None
            if found is None:
                raise self._unknown(name)
            try:
                identity = self._names.release(name)
            except FileNotFoundError:  # another process has done it
                raise UnknownTopic(name) from None
        with self._lock:
            if name in self._open and self._open[name].id == identity:
                self._open.pop(name).close(is_deleted=True)
        try:
            disk.sync_folder(self._names.links)
        except OSError as error:
            raise LogError(
                f"topic {name} is deleted, but a power loss may bring it back: {disk.explain(error)}"
            ) from error
        self.finish_deletions()
        return identity

    def finish_deletions(self) -> None:
        self._names.finish_deletions()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        with self._lock:
            for topic in self._open.values():
                topic.close()
            self._open.clear()
        self._tailer.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the log in {self._root} was opened before a fork: open it again in the child")
        if self._is_closed:
            raise Closed(f"the log in {self._root} was closed")
        self._place.check()

    @contextlib.contextmanager
    def _os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk.log_error(error, self._root, f"{self._root}: ") from error
