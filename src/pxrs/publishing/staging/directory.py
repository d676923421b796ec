"""Staging in files beside the log of a hub in a directory (K5).

    staging/
      feeds/<query>/<batch>-<run>-<incarnation>-<topic id>.json    what a batch reads of a topic, and its fences
      <topic id>/<query>/<batch>/<task>-<random>.arrow    rows that a task has staged for the topic

Each start of a query is a run with an id of its own. A sink reads only the feeds of its own run: what an earlier run
has announced for the same batch may be fenced off since, or may be torn by a power loss.

A staged file is synced, with its folder, before `stage` returns. Its record batches are in the order in which they are
to be appended, and the metadata of each one names its partition.

The folder of a topic stays as long as the topic exists: `topics` knows by it which ids were topics of this hub.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from pxrs import disk
from pxrs.errors import BatchRefused
from pxrs.log.batch import SCHEMA
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.staging.contract import Staged, Staging
from pxrs.publishing.staging.rows import pieces_of

_logger = logging.getLogger(__name__)

_TOPIC_ID: Final = re.compile(r"[0-9a-f]{32}")
"""The form of a topic's id. A folder with another name does not belong to a topic."""
_PARTITION: Final = b"partition"
"""The key in the metadata of a staged record batch whose value is the partition."""
_ORPHAN_S: Final = 86_400.0
_OLD_FEED_S: Final = 30 * 86_400.0
"""The age at which a feed is removed. It is long, because a batch that is still running would be published without its
checkpoints if its feed were removed."""
_TRIES_MAX: Final = 10


class DirectoryStaging(Staging):
    """The folder `staging` of a hub's directory."""

    def __init__(self, hub: str) -> None:
        self._root = Path(hub, "staging")

    def check_writable(self) -> None:
        if (refusal := disk.write_refusal(self._root if self._root.exists() else self._root.parent)) is not None:
            raise disk.log_error(refusal)

    # Feeds.

    def announce(self, query: str, batch: int, run: str, feed: Feed) -> None:
        path = self._root / "feeds" / query / f"{batch}-{run}-{feed.incarnation}-{feed.topic}.json"
        if path.exists():
            return
        # Not synced: after a power loss, the next run reads the batch again and announces it again.
        beside = path.with_suffix(f".{uuid.uuid4().hex}")
        with _new_file(beside, lambda folder: folder.mkdir(parents=True, exist_ok=True)) as file:
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
        for path in sorted((self._root / "feeds" / query).glob(f"{batch}-{run}-*.json")):
            with contextlib.suppress(FileNotFoundError):  # another driver has published the batch since
                feeds.append(Feed.load(path.read_text()))
        return feeds

    # Staged rows.

    def stage(self, topic: Topic, query: str, batch: int, task: int, tables: Iterable[pa.RecordBatch]) -> Staged:
        folder = self._folder(topic.id, query, batch)
        name = f"{task:05d}-{uuid.uuid4().hex}.arrow"
        rows = 0
        with _new_file(folder / name, disk.make_folders) as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for partition, records in pieces_of(topic, task + batch, tables):
                writer.write_batch(records, custom_metadata={_PARTITION: str(partition)})
                rows += records.num_rows
        with contextlib.suppress(FileNotFoundError):
            if rows:
                _sync(folder / name)
                disk.sync_folder(folder)
            else:
                os.unlink(folder / name)
        return Staged(name if rows else None, rows)

    def chunks(self, topic: str, query: str, batch: int, files: Iterable[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        folder = self._folder(topic, query, batch)
        for name in files:
            try:
                with pa.memory_map(str(folder / name)) as mapped, pa.ipc.open_file(mapped) as file:
                    for number in range(file.num_record_batches):
                        chunk = file.get_batch_with_custom_metadata(number)
                        yield int(chunk.custom_metadata[_PARTITION]), chunk.batch
            except FileNotFoundError:
                raise
            except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
                raise BatchRefused(f"the staged file {folder / name} cannot be read: {error}") from error

    def make_durable(self, topic: str, query: str, batch: int, files: Sequence[str]) -> bool:
        # A task syncs the folder that its file is in, but not the folders above if they existed already: the process
        # that made those may have died before it synced them.
        folder = self._folder(topic, query, batch)
        try:
            for above in folder.parents[:4] if files else ():
                disk.sync_folder(above)
        except FileNotFoundError:
            return False
        return all((folder / name).exists() for name in files)

    def _folder(self, topic: str, query: str, batch: int) -> Path:
        return self._root / topic / query / str(batch)

    # Removing.

    def clear(self, topic: str, query: str, batch: int) -> None:
        folder = self._root / topic / query
        with contextlib.suppress(FileNotFoundError):
            for other in os.listdir(folder):
                if _is_below(other, batch + 1):
                    shutil.rmtree(folder / other, ignore_errors=True)
        _remove_if_empty(folder)  # it is not empty if tasks of the next batch have begun to stage
        self._clear_feeds(query, batch + 1)

    def sweep(self, topic: str, needed: Mapping[str, int | None], now: float | None = None) -> None:
        now = time.time() if now is None else now
        for query in _folders_in(self._root / topic):
            if needed.get(query.name, -1) is None:
                continue
            for batch in _folders_in(query):
                if batch.name != str(needed.get(query.name)):
                    _remove_old(batch, now - _ORPHAN_S)
            _remove_if_empty(query)
        for query in _folders_in(self._root / "feeds"):
            _remove_old(query, now - _OLD_FEED_S)

    # Topics.

    def keep_topic(self, topic: str) -> None:
        try:
            (self._root / topic).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _logger.warning(
                "what is staged for topic %s may not be removed when the topic is deleted: %s", topic, error
            )

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


def _new_file(path: Path, make_folders: Callable[[Path], None]) -> pa.OSFile:
    """Open a new file, and make its folder. Another process may remove the folder while it is empty, so both steps are
    repeated if that happens."""
    for _ in range(_TRIES_MAX - 1):
        with contextlib.suppress(FileNotFoundError):
            make_folders(path.parent)
            return pa.OSFile(str(path), "wb")
    make_folders(path.parent)
    return pa.OSFile(str(path), "wb")


def _folders_in(folder: Path) -> list[Path]:
    """None if it is gone. Files that somebody else has put there are left alone."""
    with contextlib.suppress(FileNotFoundError):
        return [each for each in folder.iterdir() if each.is_dir()]
    return []


def _is_below(batch: str, limit: int) -> bool:
    """Whether this is the number of a batch, and below the limit. Another name is that of somebody else's file."""
    return batch.isascii() and batch.isdigit() and int(batch) < limit


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.sync_data(descriptor)
    finally:
        os.close(descriptor)


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
