"""The log in a local directory: `logs/<id>/topic.json`, a folder for each partition, and `topics/<name>`, a link to it.

A topic appears whole or not at all: its folder is prepared and synced before the link is made, which claims the name.
From then on the topic stays until it is deleted, even if `create_topic` is interrupted or fails. A process that finds
the link syncs it before its first append, in case the process that made it has not.
Deleting moves the link away, then the folder. No folder is ever used again: who has a deleted topic open finds its
files gone, and can never reach into a later topic of the same name (G7). Processes of one machine share the directory;
network file systems are refused, because their locks are not safe (F8).

A handle remembers the device and inode of the directory that it opened. If the directory is renamed, or another one is
put in its place, every use of the handle raises HubMoved: what it would read and write by path and through open files
would belong to two different hubs. An append needs no further system call for that: its look whether the published end
is still the file that it has open fails then, and only after such a failure the directory is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    Closed,
    HubMoved,
    InvalidRecord,
    InvalidUrl,
    LogError,
    ReadFailed,
    SequenceGap,
    TopicDeleted,
    TopicExists,
    UnknownProducer,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.log.batch import Batch, check_encoded, place_id
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, DamagedTopic, Log, RetentionPlan, TopicLog
from pxrs.log.directory.crew import Crew
from pxrs.log.directory.description import look_up, target_of, write_topic
from pxrs.log.directory.ends import Ends
from pxrs.log.directory.opened_directory import OpenedDirectory
from pxrs.log.directory.partition import Partition
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import Published
from pxrs.log.directory.reading import SealedSegment
from pxrs.log.directory.tailing import Tailer
from pxrs.log.directory.topic_names import TopicNames, sync_names
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome
from pxrs.log.producers import named
from pxrs.log.retention import credible_time
from pxrs.model import TOPIC_NAME, Topic
from pxrs.waiting import Callback, Subscription

_logger: Final = logging.getLogger(__name__)


class DirectoryLog(Log):
    """A handle to a directory. Made by the first `create_topic`; reading an absent one finds no topics."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        disk.require_posix("a log in a directory")
        self._root = path.absolute()
        if self._root.exists() and not self._root.is_dir():
            raise InvalidUrl(f"{path} is a file; a log is kept in a directory")
        disk.refuse_network_file_system(self._root, "a log")
        self.url, self.folder, self.own_registry = str(self._root), self._root, self._root / "registry"
        self._place = OpenedDirectory(self._root)
        self._names = TopicNames(self._root, timeout)
        self._timeout = timeout
        self._tailer = Tailer()
        self._lock = threading.Lock()
        self._open: dict[str, DirectoryTopic] = {}
        self._logged_as_damaged: set[str] = set()
        """Names of the topics that were damaged when all topics were listed last: each was logged when it became so."""
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
            names.finish_deletions()
            folder = names.folders / topic.id
            try:
                folder.mkdir()
            except FileExistsError:
                raise TopicExists(f"there is a topic with the id {topic.id!r} already") from None
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
        created = self._opened(topic)  # by its id: the name may be another topic's by now
        created.is_name_durable = True
        return created

    def _exists(self, name: str) -> TopicExists:
        found = look_up(self._names.links, name)
        if isinstance(found, DamagedTopic):
            return TopicExists(f"there is a topic {name!r} already, and it is damaged: delete it first ({found.error})")
        return TopicExists(f"there is a topic {name!r} already")

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
            found = [look_up(self._names.links, name) for name in names if TOPIC_NAME.fullmatch(name)]
        damaged = {each.name: each for each in found if isinstance(each, DamagedTopic)}
        for name, each in damaged.items():
            if name not in self._logged_as_damaged:
                _logger.warning("topic %s is damaged: %s", name, each.error, extra={"topic": name, "id": each.id})
        self._logged_as_damaged = set(damaged)
        return [each for each in found if each is not None]

    def topic(self, name: str) -> TopicLog:
        self._check_usable()
        with self._os_errors():
            found = look_up(self._names.links, name) if TOPIC_NAME.fullmatch(name) else None
        if found is None:
            raise UnknownTopic(name, [topic.name for topic in self.topics()])
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
            return found

    def delete_topic(self, name: str) -> str:
        self._check_usable()
        with self._os_errors():
            found = look_up(self._names.links, name) if TOPIC_NAME.fullmatch(name) else None
            if found is None:
                raise UnknownTopic(name, [topic.name for topic in self.topics()])
            try:
                identity = self._names.release(name)
            except FileNotFoundError:  # another process was faster
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
        self._names.finish_deletions()
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


class DirectoryTopic(TopicLog):
    """One topic, its partitions opened as they are used."""

    def __init__(self, topic: Topic, folder: Path, timeout: float, place: OpenedDirectory, tailer: Tailer) -> None:
        """place: the directory of the whole log. tailer: that of the whole log, which tells of changes."""
        self.topic, self.name, self.id, self.partitions = topic, topic.name, topic.id, topic.partitions
        self.keeps_unread = topic.keeps_unread
        self.is_name_durable = False
        """Whether this process knows that the topic's link, and the folders that hold it, are on the medium."""
        self._folder, self._timeout, self._place = folder, timeout, place
        self._lock = threading.Lock()
        self._open: dict[int, Partition] = {}
        self._crew = Crew()
        self._ends = Ends(tailer, topic.partitions, self.end, self._watched_path)
        self._pid = os.getpid()
        self._is_closed = self._is_deleted = False
        _in_use.add(self)

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        found: dict[int, Bounds] = {}
        self._check_usable()
        self._place.check()  # the segments are listed by path; nothing that is open is looked at
        for partition in partitions:
            with self._reading(partition) as opened:
                start = opened.reader.start()  # before the end, which never lies before it then
                found[partition] = Bounds(start, opened.published().end)
        self._check_listed()
        return found

    def end(self, partition: int) -> int:
        with self._reading(partition) as opened:
            return opened.published().end

    def ends(self) -> list[int]:
        self._check_usable()
        found = self._ends.look()
        self._check_listed()  # a deletion moves the folder away first: its files may tell of that much later
        return found

    def ends_problem(self) -> str | None:
        for number in range(self.partitions):
            with self._reading(number) as opened:
                if (problem := opened.end_problem()) is not None:
                    return problem
        return None

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        with self._reading(partition) as opened:
            return opened.reader.read(offset, max_bytes)

    def offset_at(self, partition: int, timestamp: int) -> int:
        with self._reading(partition) as opened:
            found = opened.reader.offset_at(timestamp)
            self._check_listed()
            return found

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
        except (OSError, LogError, Closed) as error:
            self._check_there(error)
            if isinstance(error, OSError):
                raise ReadFailed(f"{opened.place}: {disk.explain(error)}") from error
            raise

    def _check_there(self, error: BaseException) -> None:
        """Raise TopicDeleted, HubMoved or Closed, if that is the reason of this error.

        A deletion, or closing the topic, takes the files away from under whoever uses them at that moment, in any
        order. What that looks like (missing files, an empty folder, a closed descriptor) says nothing about the log."""
        try:
            self._check_usable()
            self._place.check()  # also if the topic's folder is there: it may be that of a copy
            if not self._is_there():
                raise self._deleted()
        except (TopicDeleted, HubMoved, Closed) as reason:
            raise reason from error

    def _check_listed(self) -> None:
        """After an answer that comes from a list of the segments: a deletion meanwhile may have made it too short."""
        if not self._is_there():
            raise self._deleted()

    def _is_there(self) -> bool:
        """False once the topic is deleted; its folder is moved away in one step. Raises HubMoved."""
        try:
            os.stat(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            self._place.check()
            return False
        except OSError:
            return True  # it cannot be told: then the error at hand is the better one to raise
        return True

    def _deleted(self) -> TopicDeleted:
        try:
            target = target_of(self._folder.parent.parent / "topics" / self.name)
        except OSError:  # what is certain is that it was deleted
            target = None
        return TopicDeleted(self.name, self.id, target not in (None, self.id))

    def check_writable(self) -> None:
        self._check_usable()
        if (refusal := disk.write_refusal(self.partition_folder(0))) is not None:
            raise disk.log_error(refusal, where=f"{self.name}: ")

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        by_partition: dict[int, list[Append]] = {}
        for append in appends:
            check_encoded(append.payload)
            by_partition.setdefault(append.partition, []).append(append)
        partitions = {number: self._partition(number) for number in by_partition}
        try:
            self._make_name_durable()
        except AppendFailed as error:
            return [NotStored(self._reason(error))] * len(appends)

        def store(number: int) -> Iterator[Outcome]:
            return iter(self._append(partitions[number], by_partition[number]))

        # In parallel, so that the partitions wait for their syncs at the same time.
        stored = self._crew.run([functools.partial(store, number) for number in by_partition])
        outcomes = dict(zip(by_partition, stored, strict=True))
        return [next(outcomes[append.partition]) for append in appends]

    def _append(self, partition: Partition, batches: list[Append]) -> list[Outcome]:
        """The outcomes of the batches of one partition; an error is the outcome of all of them."""
        try:
            return partition.append(batches)
        except (UnknownProducer, SequenceGap) as error:
            return [NotStored(named(error, partition.place))] * len(batches)
        except AppendUnknown as error:
            return [MaybeStored(self._reason(error))] * len(batches)
        except (LogError, Closed) as error:
            return [NotStored(self._reason(error))] * len(batches)
        except Exception as error:  # noqa: BLE001 - a defect: it must not hide the outcomes of other partitions
            return [MaybeStored(error)] * len(batches)

    def _reason(self, error: LogError | Closed) -> Exception:
        """TopicDeleted, HubMoved or Closed, if that is the reason of this error; otherwise the error itself."""
        try:
            self._check_there(error)
        except (TopicDeleted, HubMoved, Closed) as reason:
            return reason
        return error

    def _make_name_durable(self) -> None:
        """Before the first append of this process, sync the folders that hold the topic's link.

        A power loss could otherwise take the link, and with it the messages that were acknowledged here."""
        if self.is_name_durable:
            return
        try:
            sync_names(self._place.path)
        except OSError as error:
            raise AppendFailed(f"{self.name}: the topic's name could not be synced: {disk.explain(error)}") from error
        self.is_name_durable = True

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        self._check_usable()
        for partition in positions:
            self._partition(partition)
        self._ends.refresh()
        found = []
        for partition, offset in positions.items():
            try:
                is_readable = self._ends.of(partition) != offset
            except LogError:  # `read` raises it too, or reads what is whole before the damage
                is_readable = True
            if is_readable:
                found.append(partition)
        if not found:
            # Nothing is read now that would notice it. A deletion moves the folder first: the files in it, which are
            # what the kernel tells of, go later.
            self._place.check()
            self._check_listed()
        return found

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        """The kernel tells of each partition's published end, whether it moves in this process or another."""
        chosen = tuple(partitions)
        self._check_usable()
        for partition in chosen:
            self._partition(partition)
        try:
            return self._ends.subscribe(chosen, callback)
        except OSError as error:
            self._check_there(error)
            raise LogError(
                f"{self.name}: the system refused to tell of changes: {disk.explain(error)}; see also `sysctl "
                "fs.inotify.max_user_instances fs.inotify.max_user_watches`"
            ) from error

    def wake(self) -> None:
        self._ends.wake_all()

    def _watched_path(self, partition: int) -> str:
        """The file that is modified when the partition's published end moves, for the kernel to watch. That file may be
        missing, if this process may not make it: then the folder that it will be in."""
        folder = self._partition(partition).folder
        path = f"{folder}/{PUBLISHED}"
        return path if os.path.exists(path) else folder

    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        plan = RetentionPlan({}, [])
        for number in range(self.partitions):
            try:
                with self._reading(number) as partition:
                    if self.topic.retention_s is not None:
                        partition.seal(self._oldest(now))
                    segments = partition.reader.sealed_segments()
                    keep = self._keep_from(segments, partition.published().segment_bytes, now)
                    keep = min(keep, (unread or {}).get(number, keep))
                    # Whole segments go: the start is the end of the last one of which nothing is kept.
                    dropped = [each.following for each in segments if each.following <= keep]
                    if dropped:
                        plan.starts[number] = dropped[-1]
            except LogError as error:  # a damaged partition keeps no other from being trimmed
                plan.errors.append(error)
        return plan

    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        moved = {}
        errors: list[LogError] = []
        for number, start in starts.items():
            try:
                with self._reading(number) as partition:
                    moved[number] = partition.drop_before(start)
            except LogError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return moved

    def _keep_from(self, segments: list[SealedSegment], tail_bytes: int, now: int) -> int:
        """The first offset to keep: whole segments go, the oldest first, while they are too old or too many bytes."""
        topic = self.topic
        total = tail_bytes + sum(segment.bytes for segment in segments)
        keep = segments[0].base if segments else 0
        stored = [segment.last_stored for segment in segments]
        for at, segment in enumerate(segments):
            is_old = topic.retention_s is not None and credible_time(stored, at, now) < self._oldest(now)
            is_much = topic.retention_bytes is not None and total > topic.retention_bytes
            if not is_old and not is_much:
                break
            keep, total = segment.following, total - segment.bytes
        return keep

    def _oldest(self, now: int) -> int:
        """What was stored before this time may go."""
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
                            is_retained=self.topic.is_retained,
                            segment_s=self.topic.segment_age_s,
                        )
                    except OSError as error:
                        if not self._is_there():
                            raise self._deleted() from error
                        raise disk.log_error(error, folder, f"{self.name}/{number}: ") from error
        return found

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"topic {self.name} was opened before a fork: open it again in the child")
        if self._is_deleted:
            raise self._deleted()
        if self._is_closed:
            raise Closed(f"topic {self.name} was closed")

    def close(self, *, is_deleted: bool = False) -> None:
        with self._lock:
            self._is_closed, self._is_deleted = True, is_deleted
            opened = list(self._open.values())
            self._open.clear()
        for partition in opened:
            partition.close()
        self._ends.close()
        self._crew.close()


_in_use: weakref.WeakSet[DirectoryTopic] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A lock belongs to the open file, which a forked child would share and keep locked after its parent's death."""
    for topic in list(_in_use):
        for partition in list(topic._open.values()):
            partition.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
