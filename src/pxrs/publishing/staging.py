"""Files that the tasks and the driver of a query share, beside the log of a hub in a directory (K5). No Spark in here.

    staging/
      feeds/<query>/<batch>-<run>-<incarnation>.json      what a batch reads, and the fences under which it does
      <topic id>/<query>/<batch>/<task>-<random>.arrow    rows that a task has made ready for the topic

A feed is how the sink of a query learns what its source has read: both run in processes of their own, and only their
tasks know the query's id. It is written by the tasks that read, before the rows reach the sink. Each start of the query
is a run with an id of its own: a sink takes the feeds of its own run alone, because what an earlier one has announced
of the same batch may be fenced off since, or be torn by a power loss.

A staged file is written once under a name of its own, and synced, with its folder, before the task is over: a manifest
that names it must find it after a power loss. Its batches are in the order in which they are to be appended, each with
its partition in its metadata. What no manifest names is left by tasks that failed or lost a race; it is removed when
the batch is published, also by others and under tasks that repeat it. What is left then is removed after a day.

The folder of a topic stays as long as the topic, and says that it was one of this hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs import disk
from pxrs.errors import BatchRefused
from pxrs.log.batch import SCHEMA, encode
from pxrs.model import Topic
from pxrs.publishing.planning import Span, Spans

CHUNK_ROWS_MAX: Final = 10_000
CHUNK_BYTES_MAX: Final = 8 << 20
BUFFER_BYTES_MAX: Final = 64 << 20
_TOPIC_ID: Final = re.compile(r"[0-9a-f]{32}")
"""As `create_topic` makes them. What has another name is no topic's."""
_PARTITION: Final = b"partition"
_ORPHAN_S: Final = 86_400.0
_OLD_FEED_S: Final = 30 * 86_400.0
"""Long: a batch that is still at work, and has lost its feed, would be published without its checkpoints."""
_TRIES_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class Feed:
    """What a batch of a query reads of a group's topic."""

    group: str
    topic: str
    incarnation: str
    registry: str
    """Names the registry without its password: a sink of another one cannot write these checkpoints."""
    spans: Spans
    fences: dict[int, int]
    """The version of the owner's key of each partition."""
    is_shared: bool
    lease_s: float = 0.0
    """How long the query's lease lives without a renewal: so long the sink waits for a registry that is away."""

    def dump(self) -> str:
        parts = {number: [*span, self.fences[number]] for number, span in self.spans.items()}
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("spans", "fences")}
        return json.dumps({**plain, "partitions": parts})

    @classmethod
    def load(cls, text: str) -> Feed:
        found = json.loads(text)
        parts = {int(number): part for number, part in found.pop("partitions").items()}
        spans = {number: Span(*part[:3]) for number, part in parts.items()}
        return cls(**found, spans=spans, fences={number: part[3] for number, part in parts.items()})


class Staging:
    """The folder `staging` of a hub."""

    def __init__(self, hub: str) -> None:
        self._root = Path(hub, "staging")

    def check_writable(self) -> None:
        """Raise LogNotWritable if this process may not stage anything here."""
        if (refusal := disk.write_refusal(self._root if self._root.exists() else self._root.parent)) is not None:
            raise disk.log_error(refusal)

    # Feeds.

    def announce(self, query: str, batch: int, run: str, feed: Feed) -> None:
        """Say what this batch reads. Every task of it does, with the same words; earlier batches are over."""
        path = self._root / "feeds" / query / f"{batch}-{run}-{feed.incarnation}.json"
        if path.exists():
            return
        # No sync: after a power loss the batch is read again by another run, and announced again.
        beside = path.with_suffix(f".{uuid.uuid4().hex}")
        with _new_file(beside, lambda folder: folder.mkdir(parents=True, exist_ok=True)) as file:
            file.write(feed.dump().encode())
        beside.rename(path)
        self._clear_feeds(query, batch)

    def _clear_feeds(self, query: str, before: int) -> None:
        folder = self._root / "feeds" / query
        with contextlib.suppress(FileNotFoundError):
            for other in os.listdir(folder):
                if int(other.partition("-")[0]) < before:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(folder / other)

    def feeds(self, query: str, batch: int, run: str) -> list[Feed]:
        """What this batch reads, in this run, of each source."""
        feeds = []
        for path in sorted((self._root / "feeds" / query).glob(f"{batch}-{run}-*.json")):
            with contextlib.suppress(FileNotFoundError):  # the batch was published meanwhile, by another one
                feeds.append(Feed.load(path.read_text()))
        return feeds

    # Staged rows.

    def stage(self, topic: Topic, query: str, batch: int, task: int, tables: Iterable[pa.RecordBatch]) -> Staged:
        """Write a task's rows for the topic, durable when it returns. Raises InvalidRecord if the log would.

        If the batch is published meanwhile, the file may be gone: it is named all the same, and who would publish it
        finds the batch published, or misses the file."""
        folder = self._root / topic.id / query / str(batch)
        name = f"{task:05d}-{uuid.uuid4().hex}.arrow"
        rows = 0
        with _new_file(folder / name, disk.make_folders) as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for partition, records in _chunks(topic, task + batch, tables):
                if records.nbytes > 2 * CHUNK_BYTES_MAX:
                    encode(records, topic.codec)  # one that the log refuses must not get into a manifest
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
        """(partition, records) in the order of the files.

        Raises FileNotFoundError if they are gone, BatchRefused if one cannot be read."""
        folder = self._root / topic / query / str(batch)
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

    def secure(self, topic: str, query: str, batch: int, files: Sequence[str]) -> bool:
        """Whether a manifest may name these files: all are there, and will be after a power loss.

        A task syncs its file's name, but not the folders that it finds: who made them may have died before their sync.
        A manifest that names what is gone could never be finished."""
        folder = self._root / topic / query / str(batch)
        try:
            for above in folder.parents[:4] if files else ():
                disk.sync_folder(above)
        except FileNotFoundError:
            return False
        return all((folder / name).exists() for name in files)

    def clear(self, topic: str, query: str, batch: int) -> None:
        """Remove what was staged for this batch and for those before it, whether it was published or not to be."""
        folder = self._root / topic / query
        with contextlib.suppress(FileNotFoundError):
            for other in os.listdir(folder):
                if int(other) <= batch:
                    shutil.rmtree(folder / other, ignore_errors=True)
        _remove_if_empty(folder)  # else the next batch is on its way
        self._clear_feeds(query, batch + 1)

    def sweep(self, topic: str, needed: Mapping[str, int | None]) -> None:
        """Remove what was staged for nothing and not added to for a day, and feeds that nobody has asked for.

        needed: by query, the batch that its manifest names and that is not published; None: it may be any."""
        with contextlib.suppress(FileNotFoundError):
            for query in (self._root / topic).iterdir():
                if needed.get(query.name, -1) is None:
                    continue
                for batch in query.iterdir():
                    if batch.name != str(needed.get(query.name)):
                        _remove_old(batch, _ORPHAN_S)
                _remove_if_empty(query)
        with contextlib.suppress(FileNotFoundError):
            for query in (self._root / "feeds").iterdir():
                _remove_old(query, _OLD_FEED_S)

    def mark(self, topic: str) -> None:
        """Have a folder for the topic, also if nothing is staged for it. If that fails, the batch need not."""
        with contextlib.suppress(OSError):
            (self._root / topic).mkdir(parents=True, exist_ok=True)

    def topics(self) -> list[str]:
        """The ids of the topics that have a folder, whether they are still there or not."""
        with contextlib.suppress(FileNotFoundError):
            return [folder.name for folder in self._root.iterdir() if _TOPIC_ID.fullmatch(folder.name)]
        return []

    def changed_at(self, topic: str) -> float:
        """When something was last staged for the topic, in seconds since 1970."""
        last = 0.0
        for folder, _, files in os.walk(self._root / topic):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                with contextlib.suppress(FileNotFoundError):
                    last = max(last, os.stat(path).st_mtime)
        return last

    def forget_topic(self, topic: str) -> None:
        """Remove everything that was staged for the topic."""
        shutil.rmtree(self._root / topic, ignore_errors=True)


class Staged(NamedTuple):
    """What a task has made ready. No file if it had no rows."""

    name: str | None
    rows: int


def _new_file(path: Path, make_folders: Callable[[Path], None]) -> pa.OSFile:
    """A new file, with its folder; which others may remove until there is something in it."""
    for _ in range(_TRIES_MAX - 1):
        with contextlib.suppress(FileNotFoundError):
            make_folders(path.parent)
            return pa.OSFile(str(path), "wb")
    make_folders(path.parent)
    return pa.OSFile(str(path), "wb")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.sync_data(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(folder: Path, age_s: float) -> None:
    """Remove a folder of files if nothing in it is younger. What comes into it meanwhile stays."""
    before = time.time() - age_s
    with contextlib.suppress(FileNotFoundError):
        files = list(folder.iterdir())
        if max(each.stat().st_mtime for each in (folder, *files)) < before:
            for each in files:
                each.unlink()
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _chunks(topic: Topic, turn: int, tables: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each partition in their order, in pieces of a good size; what waits to grow is bounded.

    turn: differs between the tasks of a batch and between the batches of a task, so that each of them begins with
          another partition if its rows have no keys."""
    # Only tasks that write need these, and each stream that reads waits for its imports.
    from pxrs.producer.hashing import hash_named
    from pxrs.producer.keyless import KeylessSpread
    from pxrs.producer.tables import MESSAGE_BYTES_MAX, read_table, slices, split_table

    hash_of = hash_named(topic.partitioner)
    keyless = KeylessSpread(topic.partitions, turn % topic.partitions)
    waiting: dict[int, list[pa.RecordBatch]] = {}
    size = 0
    for table in tables:
        rows = read_table(table, topic.partitions, MESSAGE_BYTES_MAX)
        for piece in slices(rows, CHUNK_ROWS_MAX, CHUNK_BYTES_MAX):
            for partition, records in split_table(piece, hash_of, topic.partitions, keyless.fill):
                before = sum(part.nbytes for part in waiting.get(partition, ()))
                if before and before + records.nbytes > CHUNK_BYTES_MAX:
                    size -= before
                    yield partition, _joined(waiting.pop(partition))
                waiting.setdefault(partition, []).append(records)
                size += records.nbytes
                parts = waiting[partition]
                is_full = sum(part.num_rows for part in parts) >= CHUNK_ROWS_MAX // 2
                if is_full or sum(part.nbytes for part in parts) >= CHUNK_BYTES_MAX // 2:
                    size -= sum(part.nbytes for part in parts)
                    yield partition, _joined(waiting.pop(partition))
        while size > BUFFER_BYTES_MAX:
            largest = max(waiting, key=lambda partition: sum(part.nbytes for part in waiting[partition]))
            size -= sum(part.nbytes for part in waiting[largest])
            yield largest, _joined(waiting.pop(largest))
    for partition in sorted(waiting):
        yield partition, _joined(waiting[partition])


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
