"""Makes a backup of a hub that is in use.

The schedule, and what would be wrong in another order:

1. Copy the sealed segments, again and again until a pass finds few new ones. They never change, so it does not matter
   when they are copied. This takes long, and what follows is short, so that little is appended meanwhile.
2. Read the published ends. Every message that was acknowledged before the backup began lies before them.
3. Copy the registry, at one moment (`Registry.snapshot`).
4. Copy the staged files that the copied manifests of Spark's queries name. After the log, a driver might have appended
   and removed them, and the rows would be neither staged nor in the copied log. If a file is gone already, its batch
   was published since, so all rows of it lie before the ends that step 5 reads: the copy says that it is published.
5. Read the published ends again, and copy the log up to them, or up to the first frame that belongs to a batch of a
   query, or a piece of `topic copy`, that the copied keys do not know (`partitions.py`). After step 3, because a
   checkpoint is never beyond the published end: no checkpoint in the copy is beyond the copied end of its partition.
   Before it, groups would skip messages.
6. If retention has removed messages since the backup began that a group has not read according to the copied keys,
   begin again at 2: the group has read on since, and its checkpoint is newer then.
7. Write the manifest, when everything that it names is on the medium. Remove what it does not name.

A process that is killed leaves files and the manifest of the last whole backup, whose files are still there. The next
run keeps what was copied. A topic that is created while the backup runs may be in it; one that is deleted is not, and
the backup notes its id, because the copied keys may still name it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import xxhash

from pxrs import disk
from pxrs.backup.keys import (
    Keys,
    batches_of,
    checkpoint_bounds,
    dump_keys,
    keys_at_one_moment,
    manifests_in,
    pieces_of,
)
from pxrs.backup.manifest import BackupManifest, CopiedFile, CopiedTopic
from pxrs.backup.partitions import PartitionCopy
from pxrs.backup.target import Target, refuse_overlap
from pxrs.errors import BackupError, LogNotReadable, TopicDeleted, UnknownTopic
from pxrs.group.readables import is_topic_id
from pxrs.log.contract import DamagedTopic
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.published import Published
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.numbering import TopicPartition
from pxrs.model import Topic
from pxrs.publishing.records import Manifest, parts_of, writer_of
from pxrs.registry.contract import Registry
from pxrs.upkeep.deleted_topics import FOLDER as DELETED

_logger = logging.getLogger(__name__)

PASSES_MAX: Final = 4
"""How many passes over the sealed segments are made before the registry is copied."""
ATTEMPTS_MAX: Final = 5
"""How often steps 2 to 5 are made until no group lacks messages."""
_LOOKS_MAX: Final = 100
_PAUSE_S: Final = 0.02
_GONE: Final = (TopicDeleted, UnknownTopic, FileNotFoundError, NotADirectoryError)
"""What is raised when a topic is deleted while it is copied."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a backup or a restoration is."""

    stage: str
    done_bytes: int
    """Bytes that were copied or verified in this run."""
    total_bytes: int | None = None
    """How many there will be; None if that is not known."""


Tell = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class MadeBackup:
    """A backup that was made."""

    manifest: BackupManifest
    copied_bytes: int
    kept_bytes: int
    """Bytes of files that an earlier run had copied."""


def make_backup(
    directory: Path, hub: str, registry: Registry | None, shown: str, target: Path, version: str, tell: Tell
) -> MadeBackup:
    """Copy the hub in `directory` to the folder `target`.

    hub: the hub's id, empty if it has none. registry: its registry; None if that does not exist yet, so that the hub
    has neither groups nor queues. shown: the registry's address without a password. Raises BackupError, InvalidUrl, and
    what the log and the registry raise."""
    refuse_overlap(directory, target)
    try:
        return _Making(directory, hub, registry, shown, target, version, tell).run()
    except OSError as error:
        raise BackupError(
            f"{directory} could not be backed up to {target}: {disk.explain(error)}. The last whole backup there, if "
            "there is one, is as it was: remove the cause, such as a full disk, and run the backup again"
        ) from error


class _Making:
    """One run."""

    def __init__(
        self, directory: Path, hub: str, registry: Registry | None, shown: str, target: Path, version: str, tell: Tell
    ) -> None:
        self._directory, self._hub, self._registry = directory, hub, registry
        self._shown, self._version, self._tell = shown, version, tell
        self._stage = ""
        self._target = Target(target, self._note)
        self._done = 0
        self._known: dict[str, CopiedFile] = {}
        """The files of the last whole backup in the target, by path."""
        self._partitions: dict[TopicPartition, PartitionCopy] = {}
        self._gone: set[str] = set()
        """The ids of topics that were deleted since the backup began, or whose deletion was under way."""

    def run(self) -> MadeBackup:
        begun_at = time.time()
        with self._target.locked():
            self._damaged()  # before anything is copied, in case one of them may not be read
            previous = self._target.previous(self._hub, str(self._directory.absolute()))
            self._known = {} if previous is None else {file.path: file for file in previous.files}
            self._begin("copying sealed segments")
            for _ in range(PASSES_MAX):
                if self._copy_sealed() <= len(self._partitions):
                    break
            for left in reversed(range(ATTEMPTS_MAX)):
                topics, files, keys, moment = self._copy_rest()
                if not (lacking := self._lacking(topics, keys)) or not left:
                    break
            for what in lacking:
                _logger.warning("%s", what)
            manifest = self._manifest(begun_at, topics, files, keys, moment)
            self._target.finish(manifest)
        return MadeBackup(manifest, self._target.copied_bytes, self._target.kept_bytes)

    def _begin(self, stage: str) -> None:
        self._stage = stage
        self._note(0)

    def _note(self, count: int) -> None:
        self._done += count
        self._tell(Progress(self._stage, self._done))

    # The log.

    def _damaged(self) -> list[DamagedTopic]:
        """The topics that are left out because they are damaged. Raises LogNotReadable if there is one that only this
        process may not read."""
        with self._opened() as log:
            found = log.damaged_topics()
        for each in found:
            if isinstance(each.error, LogNotReadable):
                raise each.error
        return found

    @contextlib.contextmanager
    def _opened(self) -> Iterator[DirectoryLog]:
        log = DirectoryLog(self._directory)
        try:
            yield log
        finally:
            log.close()

    def _look(self) -> Iterator[tuple[Topic, dict[int, Published]]]:
        """Each topic and what is published in its partitions. One topic at a time is open."""
        with self._opened() as log:
            topics = log.topics()
        there = {topic.id for topic in topics}
        self._gone |= {topic for topic, _ in self._partitions} - there
        for topic in topics:
            try:
                with self._opened() as log:
                    handle = log.topic(topic.name)
                    assert isinstance(handle, DirectoryTopic)
                    if handle.id != topic.id:
                        raise FileNotFoundError(f"topic {topic.name} was deleted and made again")
                    found = {number: handle.published(number) for number in range(topic.partitions)}
                    if (problem := handle.ends_problem()) is not None:
                        raise BackupError(f"the backup might lack acknowledged messages: {problem}")
            except _GONE:
                self._gone.add(topic.id)
                continue
            for number in found:
                folder = str(self._directory / "logs" / topic.id / "partitions" / f"partition-{number}")
                self._partitions.setdefault((topic.id, number), PartitionCopy(topic, number, folder))
            yield topic, found

    def _copy_sealed(self) -> int:
        """One pass over all sealed segments; returns how many were copied."""
        copied = 0
        for topic, published in self._look():
            with self._unless_deleted(topic.id):
                for number, now in published.items():
                    copied += self._partitions[topic.id, number].copy_sealed(self._target, now, self._known)
        return copied

    @contextlib.contextmanager
    def _unless_deleted(self, topic: str) -> Iterator[None]:
        try:
            yield
        except _GONE:
            if (self._directory / "logs" / topic / "topic.json").exists():
                raise
            self._gone.add(topic)

    def _copy_rest(self) -> tuple[list[CopiedTopic], list[CopiedFile], Keys, str]:
        """Steps 2 to 5."""
        self._begin("reading the ends")
        before = {(topic.id, number): now for topic, found in self._look() for number, now in found.items()}
        self._gone |= self._noted_as_deleted()  # the note may be removed, with the keys, right after they are copied
        self._begin("copying the registry")
        keys, moment = ({}, "no registry") if self._registry is None else keys_at_one_moment(self._registry)
        manifests = manifests_in(keys)
        files = self._copy_staged(manifests, keys)
        self._begin("copying the tails")
        bounds = checkpoint_bounds(keys)
        topics: list[CopiedTopic] = []
        batches: dict[bytes, int] | None = None
        for topic, published in self._look():
            if batches is None:
                batches = batches_of(manifests, {each for each, _ in self._partitions}) | pieces_of(keys)
            with self._unless_deleted(topic.id):
                copied, partitions = [self._copy_description(topic)], []
                for number, now in published.items():
                    copy = self._partitions[topic.id, number]
                    floor = bounds.get((topic.id, number), (0, 0))[1]
                    end = copy.find_end(before.get((topic.id, number)), now, batches, floor)
                    copy.copy_sealed(self._target, now._replace(segment=end.segment), self._known)
                    copy.copy_tail(self._target, end, self._known)
                    partition, of_partition = copy.finish()
                    partitions.append(partition)
                    copied += of_partition
                topics.append(CopiedTopic(topic.id, topic.name, tuple(partitions)))
                files += copied
        return topics, files, keys, moment

    def _copy_description(self, topic: Topic) -> CopiedFile:
        place = f"logs/{topic.id}/topic.json"
        data = (self._directory / place).read_bytes()
        return self._target.write(f"logs/{topic.id}/topic-{xxhash.xxh3_64_hexdigest(data)}.json", place, data)

    def _lacking(self, topics: list[CopiedTopic], keys: Keys) -> list[str]:
        """Which groups have checkpoints before the copied start of a partition: of topics with `keep_unread`; of other
        topics only if retention removed messages while the backup was made, and not long before."""
        bounds, found = checkpoint_bounds(keys), []
        for topic in topics:
            for partition in topic.partitions:
                least, _ = bounds.get((topic.id, partition.number), (partition.start, 0))
                copy = self._partitions[topic.id, partition.number]
                if least < partition.start and (copy.topic.keep_unread or least >= (copy.start or 0)):
                    found.append(
                        f"{topic.name}/{partition.number} begins at offset {partition.start} in the backup, and a "
                        f"group has read up to {least} only: retention has removed what is between"
                    )
        return found

    # Staged files.

    def _copy_staged(self, manifests: dict[str, Manifest], keys: Keys) -> list[CopiedFile]:
        """Copy what the committed manifests have staged. Changes the manifests in `keys` whose batches were published
        since the registry was copied."""
        self._begin("copying staged files")
        files: list[CopiedFile] = []
        for key, manifest in manifests.items():
            if manifest.is_published:
                continue
            try:
                files += self._staged_files(key, manifest)
            except FileNotFoundError as error:
                self._await_published(key, manifest, error)
                keys[key] = manifest.as_published().dump()
        return files

    def _staged_files(self, key: str, manifest: Manifest) -> list[CopiedFile]:
        copied = []
        for part in parts_of(key, manifest):
            if not (self._directory / "logs" / part.topic).is_dir():
                continue  # deleted, or the topic of another hub that shares the registry
            for name in part.files:
                path = f"staging/{part.topic}/{writer_of(key)}/{manifest.batch}/{name}"
                source = self._directory / path
                size = os.stat(source).st_size
                known = self._known.get(path)
                copied.append(
                    self._target.keep(source, path, path, size, known)
                    or self._target.copy(source, path, path, size, known)
                )
        return copied

    def _await_published(self, key: str, manifest: Manifest, error: FileNotFoundError) -> None:
        """A staged file is gone: return once the registry says that its batch was published, or that the manifest is
        gone, with its topic or as that of a finished job. Raises BackupError if it goes on naming the file."""
        assert self._registry is not None
        for _ in range(_LOOKS_MAX):
            entry = self._registry.get(key)
            now = None if entry is None else Manifest.load(entry)
            if now is None or now.is_published or now.batch > manifest.batch:
                return
            if replace(now, parts=[]) != replace(manifest, parts=[]) or now.parts != manifest.parts:
                return  # a topic was deleted, and the manifest lost its part
            time.sleep(_PAUSE_S)
        raise BackupError(
            f"{error.filename} is missing, and the manifest {key} needs it: the batch {manifest.batch} of that query "
            "cannot be published any more; `pxrs check` does not look at staged files: ask who removed it"
        )

    # The manifest.

    def _manifest(
        self, begun_at: float, topics: list[CopiedTopic], files: list[CopiedFile], keys: Keys, moment: str
    ) -> BackupManifest:
        self._begin("writing the manifest")
        backup = uuid.uuid4().hex
        # The keys may hold hashes of tokens and the items of queues: not everybody may read them.
        stored = self._target.write(f"registry/{backup}.jsonl", "", dump_keys(keys), mode=0o600)
        damaged = {each.name: each.error.what for each in self._damaged()}
        return BackupManifest(
            backup,
            self._hub,
            begun_at,
            time.time(),
            str(self._directory.absolute()),
            self._shown,
            moment,
            len(keys),
            self._version,
            tuple(topics),
            (stored, *files),
            tuple(sorted((self._gone | self._noted_as_deleted()) - {topic.id for topic in topics})),
            damaged,
        )

    def _noted_as_deleted(self) -> set[str]:
        """The ids of topics whose deletion is under way (`upkeep.deleted_topics`)."""
        try:
            return {name for name in os.listdir(self._directory / DELETED) if is_topic_id(name)}
        except FileNotFoundError:
            return set()
