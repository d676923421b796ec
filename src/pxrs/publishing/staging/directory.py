"""Staging in files beside the log of a hub in a directory (K5).

    staging/
      feeds/<query>/<batch>-<run>-<incarnation>-<topic id>.json    what a batch reads of a topic, and its fences
      <topic id>/<query>/<batch>/<task>-<random>.frames   rows that a task has staged for the topic (`frames.py`);
                                                          <query> is routed-<query> if the rows name their topics

Each start of a query is a run with an id of its own. A sink reads only the feeds of its own run: what an earlier run
has announced for the same batch may be fenced off since, or may be torn by a power loss.

A task syncs its file, and the driver syncs the folders, before the manifest names the file (`make_durable`): once for
all tasks. The pieces of a file are in the order in which they are to be appended. Files of earlier versions end in
`.arrow`; they are read, and no longer written.

The folder of a query stays between its batches, so that the folders above it are synced only once.

The folder of a topic stays as long as the topic exists: `topics` lists these folders to find the ids of all topics,
also of deleted ones, that rows were staged for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pyarrow as pa

from pxrs import disk
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.staging.contract import StagingStore
from pxrs.publishing.staging.files import NewFile, Staged, query_of_writer
from pxrs.publishing.staging.frames import ARROW_SUFFIX, SUFFIX, FramesWriter, Piece, read_arrow_file, read_frames_file

_logger = logging.getLogger(__name__)

_TOPIC_ID: Final = re.compile(r"[0-9a-f]{32}")
"""The form of a topic's id. A folder with another name does not belong to a topic."""
_ORPHAN_S: Final = 86_400.0
_OLD_FEED_S: Final = 30 * 86_400.0
"""The age at which a feed is removed. It is long, because a batch that is still running would be published without its
checkpoints if its feed were removed."""
_TRIES_MAX: Final = 10
_SYNCED_MAX: Final = 64
"""How many folders of queries `_synced` holds. Each one costs an open descriptor."""


class _OpenFolder:
    """The descriptor of a folder, closed with the last reference to this object."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `os.close` is a default argument because this module may be gone when the interpreter ends.
        if hasattr(self, "descriptor"):
            close(self.descriptor)


class DirectoryFile(NewFile):
    """A staged file in a folder that is made with it, and made again if another process removes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _new_file(path)
        self._writer = FramesWriter(self._file)

    def add(self, piece: Piece) -> None:
        self._writer.add(*piece)

    def finish(self) -> Staged:
        self._writer.finish()
        self._file.close()
        with contextlib.suppress(FileNotFoundError):  # another driver has published the batch, and removed the folder
            _sync(self._path)
        return Staged(self._path.name, self._writer.rows)

    def discard(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class DirectoryStaging(StagingStore):
    """The folder `staging` of a hub's directory."""

    def __init__(self, hub: str) -> None:
        self._root = Path(hub, "staging")
        self._synced: dict[str, _OpenFolder] = {}
        """By path: the folders of queries whose entries are durable, with all folders above. See `_sync_above`."""
        self._lock = threading.Lock()
        """Guards changes of `_synced`: a server's threads share this object."""

    def __reduce__(self) -> tuple[type[DirectoryStaging], tuple[str]]:
        return DirectoryStaging, (str(self._root.parent),)

    def check_writable(self) -> None:
        if (refusal := disk.write_refusal(self._root if self._root.exists() else self._root.parent)) is not None:
            raise disk.log_error(refusal)

    # Feeds.

    def announce(self, query: str, batch: int, run: str, feed: Feed) -> None:
        path = self._root / "feeds" / query / f"{batch}-{_as_name(run)}-{feed.incarnation}-{feed.topic}.json"
        if path.exists():
            return
        # Not synced: after a power loss, the next run reads the batch again and announces it again.
        beside = path.with_suffix(f".{uuid.uuid4().hex}")
        with _new_file(beside) as file:
            file.write(feed.dump().encode())
        beside.rename(path)
        self._clear_feeds(query, batch)

    def _clear_feeds(self, query: str, before: int) -> None:
        folder = self._root / "feeds" / query
        with contextlib.suppress(FileNotFoundError):
            for other in os.listdir(folder):
                if _is_below(other.partition("-")[0], before):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(folder / other)

    def feeds(self, query: str, batch: int, run: str) -> list[Feed]:
        feeds = []
        for path in sorted((self._root / "feeds" / query).glob(f"{batch}-{_as_name(run)}-*.json")):
            with contextlib.suppress(FileNotFoundError):  # another driver has published the batch since
                feeds.append(Feed.load(path.read_text()))
        return feeds

    # Staged rows.

    def create(self, topic: Topic, query: str, batch: int, task: int) -> DirectoryFile:
        return DirectoryFile(self._folder(topic.id, query, batch) / f"{task:05d}-{uuid.uuid4().hex}{SUFFIX}")

    def pieces(self, topic: Topic, query: str, batch: int, files: Iterable[str]) -> Iterator[Piece]:
        folder = self._folder(topic.id, query, batch)
        for name in files:
            path = str(folder / name)
            yield from read_arrow_file(path, topic.codec) if name.endswith(ARROW_SUFFIX) else read_frames_file(path)

    def make_durable(self, topic: str, query: str, batch: int, files: Sequence[str]) -> bool:
        if not files:
            return True
        folder = self._folder(topic, query, batch)
        try:
            # From the top down: a folder whose own entry is not durable may be lost with all that is in it.
            self._sync_above(folder.parent)
            disk.sync_folder(folder.parent)
            disk.sync_folder(folder)
        except FileNotFoundError:
            return False
        return all((folder / name).exists() for name in files)

    def _sync_above(self, folder: Path) -> None:
        """Make the entry of a query's folder durable, and those of the folders above it, unless this object has done so
        for this very folder: not for one that was removed and made again since."""
        path = str(folder)
        found = self._synced.get(path)
        if found is not None and os.path.samestat(os.stat(folder), os.fstat(found.descriptor)):
            return
        # Opened before the folders above are synced. While it is open, no other folder gets its inode.
        opened = _OpenFolder(path)
        for above in reversed(folder.parents[:3]):
            disk.sync_folder(above)
        with self._lock:
            self._synced.pop(path, None)
            self._synced[path] = opened
            if len(self._synced) > _SYNCED_MAX:
                del self._synced[next(iter(self._synced))]

    def _folder(self, topic: str, query: str, batch: int) -> Path:
        return self._root / topic / query / str(batch)

    # Removing.

    def remove(self, topic: str, query: str, batch: int, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder(topic, query, batch) / file)

    def clear(self, topic: str, query: str, batch: int) -> None:
        folder = self._root / topic / query
        with contextlib.suppress(FileNotFoundError):
            for other in os.listdir(folder):
                if _is_below(other, batch + 1):
                    shutil.rmtree(folder / other, ignore_errors=True)
        self._clear_feeds(query_of_writer(query), batch + 1)

    def forget_query(self, topic: str, query: str) -> None:
        _remove_if_empty(self._root / topic / query)

    def sweep(self, topic: str, needed: Mapping[str, int | None], now: float | None = None) -> None:
        now = time.time() if now is None else now
        for query in _folders_in(self._root / topic):
            if needed.get(query.name, -1) is None:
                continue
            is_old = _changed_at(query) < now - _ORPHAN_S  # before anything is removed from it
            for batch in _folders_in(query):
                if batch.name != str(needed.get(query.name)):
                    _remove_old(batch, now - _ORPHAN_S)
            if is_old:
                _remove_if_empty(query)
        for query in _folders_in(self._root / "feeds"):
            _remove_old(query, now - _OLD_FEED_S)

    # Topics.

    def keep_topic(self, topic: str) -> None:
        try:
            (self._root / topic).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _logger.warning("files staged for topic %s may remain after the topic is deleted: %s", topic, error)

    def topics(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [folder.name for folder in self._root.iterdir() if _TOPIC_ID.fullmatch(folder.name)]
        return []

    def changed_at(self, topic: str) -> float:
        last = 0.0
        for folder, _, files in os.walk(self._root / topic):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                with contextlib.suppress(FileNotFoundError):
                    last = max(last, os.stat(path).st_mtime)
        return last

    def forget_topic(self, topic: str) -> None:
        shutil.rmtree(self._root / topic, ignore_errors=True)


def _new_file(path: Path) -> pa.OSFile:
    """Open a new file, and make its folder. Another process may remove the folder while it is empty, so both steps are
    repeated if that happens."""
    for _ in range(_TRIES_MAX - 1):
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return pa.OSFile(str(path), "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return pa.OSFile(str(path), "wb")


def _folders_in(folder: Path) -> list[Path]:
    """None if it is gone. Files that somebody else has put there are left alone."""
    with contextlib.suppress(FileNotFoundError):
        return [each for each in folder.iterdir() if each.is_dir()]
    return []


def _as_name(run: str) -> str:
    """A part of a file's name that stands for this run. The id of a run may be a text of the user's own."""
    return quote(run, safe="")


def _is_below(batch: str, limit: int) -> bool:
    """Whether this is the number of a batch, and below the limit. Another name is that of somebody else's file."""
    return batch.isascii() and batch.isdigit() and int(batch) < limit


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.sync_data(descriptor)
    finally:
        os.close(descriptor)


def _changed_at(path: Path) -> float:
    """When the file or folder was last changed, in seconds since 1970; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _remove_old(folder: Path, before: float) -> None:
    """Remove a folder of files if nothing in it was written since `before`, in seconds since 1970. A file that is added
    meanwhile stays, with its folder."""
    with contextlib.suppress(FileNotFoundError):
        files = list(folder.iterdir())
        if max(each.stat().st_mtime for each in (folder, *files)) < before:
            for each in files:
                each.unlink()
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
