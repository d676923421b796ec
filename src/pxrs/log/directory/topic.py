"""One topic of the log in a directory: its partitions, opened as they are used.

Errors of files are translated here: a file that is missing because the topic was deleted, the directory was moved or
the topic was closed raises TopicDeleted, HubMoved or Closed, and not what the missing file looks like.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pxrs import disk
from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    Closed,
    HubMoved,
    InvalidRecord,
    LogError,
    ReadFailed,
    SequenceGap,
    TopicDeleted,
    UnknownProducer,
    UsedAfterFork,
)
from pxrs.log.batch import Batch, check_encoded, place_id
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, RetentionPlan, Tell, TopicLog
from pxrs.log.directory.crew import Crew
from pxrs.log.directory.ends import Ends
from pxrs.log.directory.glance import glance, stored_bytes
from pxrs.log.directory.opened_directory import OpenedDirectory
from pxrs.log.directory.partition import Partition
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import Published
from pxrs.log.directory.retaining import keep_from, oldest_kept
from pxrs.log.directory.settings import TopicSettings
from pxrs.log.directory.tailing import Tailer
from pxrs.log.directory.topic_folder import TopicFolder
from pxrs.log.directory.topic_names import sync_names
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome
from pxrs.log.producers import named
from pxrs.model import Topic
from pxrs.waiting import Callback, Subscription, limit_until, time_limit_at


# Over the limit: it has every operation of a log's topic, and each translates the errors of the files that it uses.
class DirectoryTopic(TopicLog):
    """One topic, its partitions opened as they are used."""

    # Over the limit: one short method for each operation of the contract; the work is done in the modules imported.

    def __init__(self, topic: Topic, folder: Path, timeout: float, place: OpenedDirectory, tailer: Tailer) -> None:
        """place: the directory of the whole log. tailer: the tailer of the whole log."""
        self.name, self.id, self.partitions = topic.name, topic.id, topic.partitions
        self._settings = TopicSettings(topic, folder)
        self.is_name_durable = False
        """Whether this process knows that the topic's link, and the folders that hold it, are on the medium."""
        self._folder = TopicFolder(topic.name, topic.id, folder, place)
        self._timeout, self._place = timeout, place
        self._lock = threading.Lock()
        self._open: dict[int, Partition] = {}
        self._crew = Crew()
        self._ends = Ends(
            tailer, topic.partitions, self.end, lambda number: _watched_path(self._partition(number).folder)
        )
        self._pid = os.getpid()
        self._is_closed = self._is_deleted = False
        _in_use.add(self)

    @property
    def topic(self) -> Topic:  # type: ignore[override]  # another process may change the settings
        return self._settings.topic

    @property
    def keeps_unread(self) -> bool:  # type: ignore[override]
        return self._settings.topic.keeps_unread

    def refresh(self) -> None:
        self._settings.look()

    def adopt(self, topic: Topic) -> None:
        """Take over a description of this topic that was read from its file."""
        self._settings.adopt(topic)

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        found: dict[int, Bounds] = {}
        self._check_usable()
        self._place.check()  # the segments are listed by path; nothing that is open is looked at
        for partition in partitions:
            with self._reading(partition) as opened:
                start = opened.reader.start()  # read before the end, so that the end is not before it
                found[partition] = Bounds(start, opened.published().end)
        self._folder.check()
        return found

    def end(self, partition: int) -> int:
        with self._reading(partition) as opened:
            return opened.published().end

    def ends(self) -> list[int]:
        self._check_usable()
        found = self._ends.look()
        self._folder.check()  # a deletion moves the folder first: the open files may stay for much longer
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
            self._folder.check()
            return found

    def published(self, partition: int) -> Published:
        """What readers may read of a partition's files; for the checker."""
        with self._reading(partition) as opened:
            return opened.published()

    def glance(self) -> list[Bounds]:
        self._check_usable()
        try:
            found = [
                glance(self.partition_folder(number), place_id(self.id, number), is_retained=self.topic.is_retained)
                for number in range(self.partitions)
            ]
        except (OSError, LogError) as error:
            self._check_there(error)
            if isinstance(error, OSError):
                raise _read_error(error, self.name) from error
            raise
        self._folder.check()
        return found

    def stored_bytes(self) -> list[int]:
        self._check_usable()
        try:
            return [stored_bytes(self.partition_folder(number)) for number in range(self.partitions)]
        except OSError as error:
            raise _read_error(error, self.name) from error

    def partition_folder(self, partition: int) -> str:
        return self._folder.of_partition(partition)

    @contextlib.contextmanager
    def _reading(self, partition: int) -> Iterator[Partition]:
        opened = self._partition(partition)
        try:
            yield opened
        except (OSError, LogError, Closed) as error:
            self._check_there(error)
            if isinstance(error, OSError):
                raise _read_error(error, opened.place) from error
            raise

    def _check_there(self, error: BaseException) -> None:
        """Raise TopicDeleted, HubMoved or Closed, if that is the reason of this error.

        A deletion, or closing the topic, takes the files away from under whoever uses them at that moment, in any
        order. What that looks like (missing files, an empty folder, a closed descriptor) says nothing about the log."""
        try:
            self._check_usable()
            self._place.check()  # also if the topic's folder is there: it may be that of a copy
            self._folder.check()
        except (TopicDeleted, HubMoved, Closed) as reason:
            raise reason from error

    def check_writable(self) -> None:
        self._check_usable()
        if (refusal := disk.write_refusal(self.partition_folder(0))) is not None:
            raise disk.log_error(refusal, where=f"{self.name}: ")

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        found: dict[int, Iterator[Outcome]] = {}

        def tell(outcomes: Mapping[int, Sequence[Outcome]]) -> None:
            found.update((number, iter(each)) for number, each in outcomes.items())

        self.append_each(appends, tell)
        return [next(found[append.partition]) for append in appends]

    def append_each(self, appends: Sequence[Append], tell: Tell) -> None:
        by_partition: dict[int, list[Append]] = {}
        for append in appends:
            check_encoded(append.payload)
            self._check_usable(append.partition)
            by_partition.setdefault(append.partition, []).append(append)
        try:
            self._make_name_durable()
        except LogError as error:
            failed = NotStored(self._reason(error))
            tell({number: [failed] * len(batches) for number, batches in by_partition.items()})
            return
        until = limit_until()

        def store(number: int) -> None:
            with time_limit_at(until):
                outcomes = self._append(number, by_partition[number])
            tell({number: outcomes})

        # In parallel, so that the partitions wait for their syncs at the same time.
        self._crew.run([functools.partial(store, number) for number in by_partition])

    def _append(self, number: int, batches: list[Append]) -> list[Outcome]:
        """The outcomes of the batches of one partition; an error is the outcome of all of them."""
        try:
            return self._opened(number).append(batches)
        except (UnknownProducer, SequenceGap) as error:
            return [NotStored(named(error, f"{self.name}/{number}"))] * len(batches)
        except OSError as error:  # of `_opened`, such as too many open files, or a disk without room for a new file
            if disk.denied(error) is not None:
                return [NotStored(self._reason(disk.log_error(error, where=f"{self.name}/{number}: ")))] * len(batches)
            what = f"{disk.explain(error)}; nothing of it is in the log: try again"
            return [NotStored(self._reason(AppendFailed(f"{self.name}/{number}: {what}")))] * len(batches)
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
        except PermissionError as error:
            raise disk.log_error(error, where=f"{self.name}: the topic's name could not be synced: ") from error
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
            # No file that is read here shows a deletion: it moves the folder first, and the watched files in it are
            # removed later.
            self._place.check()
            self._folder.check()
        return found

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        """Watch the published end of each partition, in this process and others: see `Ends.subscribe`."""
        chosen = tuple(partitions)
        self._check_usable()
        for partition in chosen:
            self._partition(partition)
        try:
            return self._ends.subscribe(chosen, callback)
        except OSError as error:
            self._check_there(error)
            if disk.denied(error) is not None:
                raise _read_error(error, self.name) from error
            raise LogError(
                f"{self.name}: the system refused to tell of changes: {disk.explain(error)}; see also `sysctl "
                "fs.inotify.max_user_instances fs.inotify.max_user_watches`"
            ) from error

    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        plan = RetentionPlan({}, [])
        topic = self._settings.look()
        for number in range(self.partitions):
            try:
                with self._reading(number) as partition:
                    if topic.retention_s is not None:
                        partition.seal(oldest_kept(topic.retention_s, now))
                    segments = partition.reader.sealed_segments()
                    keep = keep_from(topic, segments, partition.published().segment_bytes, now)
                    keep = min(keep, (unread or {}).get(number, keep))
                    # Whole segments are removed: the start is the end of the last one of which nothing is kept.
                    dropped = [each.following for each in segments if each.following <= keep]
                    if dropped:
                        plan.starts[number] = dropped[-1]
            except LogError as error:  # a damaged partition keeps no other from being trimmed
                plan.errors.append(error)
        return plan

    def retain(self, now: int, unread: Mapping[int, int] | None = None) -> dict[int, int]:
        """As in `TopicLog`. Where the settings are changed meanwhile, nothing is removed: the next retention does."""
        revision = self._settings.look().revision
        plan = self.plan_retention(now, unread)
        moved = self.trim(plan.starts, revision)
        if plan.errors:
            raise plan.errors[0]
        return moved

    def trim(self, starts: Mapping[int, int], revision: int | None = None) -> dict[int, int]:
        """As in `TopicLog`. revision: see `Partition.drop_before`."""
        moved = {}
        errors: list[LogError] = []
        for number, start in starts.items():
            try:
                with self._reading(number) as partition:
                    if (dropped := partition.drop_before(start, revision)) is not None:
                        moved[number] = dropped
            except LogError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return moved

    def prepare(self, after: Topic) -> None:
        """Before the topic gets these settings: if they are its first retention or take the last one away, see
        `Partition.note_start`."""
        if self.topic.is_retained != after.is_retained:
            for number in range(self.partitions):
                with self._reading(number) as partition:
                    partition.note_start()

    def settle(self, before: Topic) -> None:
        """After the settings were changed from these: see `Partition.settle`."""
        after = self._settings.look()
        if before.durability != after.durability or before.keeps_unread != after.keeps_unread:
            for number in range(self.partitions):
                with self._reading(number) as partition:
                    partition.settle()

    def _partition(self, number: int) -> Partition:
        self._check_usable(number)
        try:
            return self._opened(number)
        except OSError as error:
            if not self._folder.is_there():
                raise self._folder.deleted() from error
            raise disk.log_error(error, self.partition_folder(number), f"{self.name}/{number}: ") from error

    def _opened(self, number: int) -> Partition:
        """The handle of a partition, whose files are opened if they are not yet. Raises OSError."""
        found = self._open.get(number)
        if found is None:
            with self._lock:
                self._check_usable()
                found = self._open.get(number)
                if found is None:
                    found = self._open[number] = Partition(
                        self.partition_folder(number),
                        f"{self.name}/{number}",
                        place_id(self.id, number),
                        self._settings,
                        self._timeout,
                    )
        return found

    def _check_usable(self, partition: int | None = None) -> None:
        """Raise if this process may not use the topic, or not any more; InvalidRecord if there is no such partition."""
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"topic {self.name} was opened before a fork: open it again in the child")
        if self._is_deleted:
            raise self._folder.deleted()
        if self._is_closed:
            raise Closed(f"topic {self.name} was closed")
        if partition is not None and not 0 <= partition < self.partitions:
            raise InvalidRecord(f"{self.name} has partitions 0 to {self.partitions - 1}, and no {partition}")

    def close(self, *, is_deleted: bool = False) -> None:
        with self._lock:
            self._is_closed, self._is_deleted = True, is_deleted
            opened = list(self._open.values())
            self._open.clear()
        for partition in opened:
            partition.close()
        self._ends.close()
        self._crew.close()


def _read_error(error: OSError, place: str) -> LogError:
    """The error of an operation that reads: ReadFailed, which a caller tries again, unless a permission is lacking."""
    if disk.denied(error) is not None:
        return disk.log_error(error, where=f"{place}: ")
    return ReadFailed(f"{place}: {disk.explain(error)}")


def _watched_path(folder: str) -> str:
    """The file that is modified when the end of the partition in this folder moves, for the kernel to watch. That file
    may be missing, if this process may not make it: then the folder that it will be in."""
    path = f"{folder}/{PUBLISHED}"
    return path if os.path.exists(path) else folder


_in_use: weakref.WeakSet[DirectoryTopic] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the files in a forked child: the child would share the lock of an open file, and keep it after the parent
    has died."""
    for topic in list(_in_use):
        for partition in list(topic._open.values()):
            partition.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
