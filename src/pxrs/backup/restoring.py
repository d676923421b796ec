"""Makes a hub of a backup, in an empty directory and an empty registry.

Everything is verified before anything is written: the manifest, and then every byte of every file. Then come, in this
order: `hub.record`, which says that a restoration is under way; the files of the log and what was staged; the keys of
the registry, its id last; the links that give topics their names, all at once; the comparison of the ends with those of
the manifest; and `hub.record` with the id of the new hub. So a process that is killed leaves a directory in which no
topic can be made, no group joined and no queue used: they raise RestoreInterrupted.

The registry need not be of the kind that was copied: the keys and values are the same on every store.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pxrs import clock, disk
from pxrs.backup.keys import load_keys
from pxrs.backup.making import Progress, Tell
from pxrs.backup.manifest import BackupManifest, CopiedPartition, CopiedTopic
from pxrs.backup.rebirth import Reborn, epoch_at, reborn
from pxrs.backup.target import checksum_of, copy_bytes, read_manifest, unreadable
from pxrs.disk import replace_file
from pxrs.errors import BackupDamaged, BackupError, RestoreRefused, ValueTooLarge
from pxrs.hub_record import HubRecord, write_record, write_restoring
from pxrs.log.batch import GAP_ROWS_MAX, gap_bytes, place_id
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.segments.files import segment_path
from pxrs.log.directory.start import write_start
from pxrs.registry.contract import ABSENT, Registry
from pxrs.registry.identity import fingerprint
from pxrs.upkeep.deleted_topics import FOLDER as DELETED

_COMMIT_BYTES_MAX: Final = 256 << 10
_COMMIT_KEYS_MAX: Final = 100
"""How many bytes, and keys, go into one commit, if the store takes so many."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A hub that was made of a backup."""

    manifest: BackupManifest
    hub: str
    keys: int
    """How many keys the new registry has got."""
    groups_left_out: tuple[str, ...]
    """Groups of other hubs, which had shared the registry."""


def verify(source: Path, tell: Tell) -> BackupManifest:
    """Check that the folder holds a whole backup, every byte of it. Raises BackupIncomplete, BackupDamaged."""
    manifest, done = read_manifest(source), 0
    for file in manifest.files:
        path = source / file.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise unreadable(path, error) from error
        if size != file.bytes:
            raise BackupDamaged(str(path), f"it has {size:,} bytes, and the manifest says {file.bytes:,}")
    for file in manifest.files:
        path = source / file.path
        tell(Progress("verifying the backup", done, manifest.bytes))
        try:
            found = checksum_of(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if found != file.checksum:
            raise BackupDamaged(str(path), "its checksum is not the one in the manifest")
        done += file.bytes
    return manifest


def refuse_used(directory: Path) -> None:
    """Raise RestoreRefused unless the directory is empty or missing."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RestoreRefused(f"{directory} is not empty: a backup is restored into a new directory")


def restore(
    source: Path, manifest: BackupManifest, directory: Path, registry: Registry, shown: str, tell: Tell
) -> Restored:
    """Make the hub of a backup that was verified.

    registry: where the keys go. It is empty; one in the directory was made after `refuse_used`. shown: its address
    without a password. Raises RestoreRefused and BackupError."""
    if registry.scan("", limit=1):
        raise RestoreRefused(f"the registry {shown} is not empty: give another one, or another namespace of it")
    hub = uuid.uuid4().hex
    place = f"{socket.gethostname()}:{directory} (hub {hub[:8]})"
    stored = source / manifest.registry_file.path
    epoch_min = epoch_at(clock.wall_time_us() / 1e6)
    new = reborn(load_keys(str(stored), stored.read_bytes()), manifest.hub, hub, place, epoch_min)
    _check_values(new.keys, registry)
    try:
        return _write(source, manifest, directory, registry, HubRecord(hub, address=shown), new, tell)
    except OSError as error:
        raise BackupError(
            f"{source} could not be restored to {directory}: {disk.explain(error)}. {directory} and the registry "
            f"{shown} are not whole: remove what is there, and the cause, such as a full disk, before you try again"
        ) from error
    except BaseException as error:
        error.add_note(f"{directory} and the registry {shown} are not whole: remove what is there before you try again")
        raise


def _write(
    source: Path,
    manifest: BackupManifest,
    directory: Path,
    registry: Registry,
    record: HubRecord,
    new: Reborn,
    tell: Tell,
) -> Restored:
    """record: that of the new hub, without the id of the registry, which is made here."""
    disk.make_folders(directory)
    write_restoring(directory, record.address)
    _copy_files(source, manifest, directory, tell)
    for topic in manifest.topics:
        for partition in topic.partitions:
            _complete(directory, topic, partition)
    _note_deleted(directory, manifest)
    tell(Progress("writing the registry", manifest.bytes, manifest.bytes))
    for commit in _commits(new.keys, registry):
        registry.commit(dict.fromkeys(commit, ABSENT), commit)
    record = replace(record, registry=fingerprint(registry))
    _link(directory, manifest)
    _compare_ends(directory, manifest)
    write_record(directory, record)
    return Restored(manifest, record.hub, len(new.keys), new.left_out)


def _check_values(keys: Mapping[str, bytes], registry: Registry) -> None:
    """Raise ValueTooLarge before anything is written: stores differ in how large a value may be."""
    for key, value in keys.items():
        if len(value) > registry.limits.value_bytes_max:
            raise ValueTooLarge(
                f"{key} has {len(value):,} bytes, and {registry.limits.value_bytes_max:,} is the most that "
                f"{registry.url} takes: restore the backup to another kind of registry"
            )


def _copy_files(source: Path, manifest: BackupManifest, directory: Path, tell: Tell) -> None:
    done, folders = 0, {directory}

    def note(count: int) -> None:
        nonlocal done
        done += count
        tell(Progress("copying files", done, manifest.bytes))

    for file in manifest.files:
        if not file.place:
            continue
        target = directory / file.place
        if target.parent not in folders:
            disk.make_folders(target.parent)
            folders.add(target.parent)
        if copy_bytes(source / file.path, target, file.bytes, note) != file.checksum:
            raise BackupDamaged(str(source / file.path), "it has changed since it was verified")
    for folder in sorted(folders, reverse=True):
        disk.sync_folder(folder)


def _complete(directory: Path, topic: CopiedTopic, partition: CopiedPartition) -> None:
    """Write the files of a partition that are not copied: `start`, and the gap of messages that the copied hub lacked
    itself."""
    folder = directory / "logs" / topic.id / "partitions" / f"partition-{partition.number}"
    disk.make_folders(folder)
    identity = place_id(topic.id, partition.number)
    if partition.has_start_file:
        write_start(str(folder), identity, partition.start)
    if partition.whole_end < partition.end:
        gap, offset = b"", partition.whole_end
        while offset < partition.end:
            rows = min(partition.end - offset, GAP_ROWS_MAX)
            gap += gap_bytes(offset, rows, place=identity, stored_at=clock.wall_time_us())
            offset += rows
        replace_file(segment_path(str(folder), partition.whole_end), gap, is_durable=True)
    disk.sync_folder(folder)


def _note_deleted(directory: Path, manifest: BackupManifest) -> None:
    if manifest.deleted:
        disk.make_folders(directory / DELETED)
        for topic in manifest.deleted:
            (directory / DELETED / topic).touch()
        disk.sync_folder(directory / DELETED)


def _commits(keys: Mapping[str, bytes], registry: Registry) -> Iterator[dict[str, bytes]]:
    """The keys in groups that the store takes in one commit each."""
    limits = registry.limits
    bytes_max = min(_COMMIT_BYTES_MAX, limits.commit_bytes_max)
    commit: dict[str, bytes] = {}
    size = 0
    for key, value in keys.items():
        added = 2 * len(key) + len(value)
        if commit and (len(commit) == min(limits.commit_keys_max, _COMMIT_KEYS_MAX) or size + added > bytes_max):
            yield commit
            commit, size = {}, 0
        commit[key] = value
        size += added
    if commit:
        yield commit


def _link(directory: Path, manifest: BackupManifest) -> None:
    """Give all topics their names in one step: a hub with some of its topics looks like a whole one."""
    links = directory / "topics.restoring"
    disk.make_folders(links)
    for topic in manifest.topics:
        os.symlink(os.path.join(os.pardir, "logs", topic.id), links / topic.name)
    disk.sync_folder(links)
    os.rename(links, directory / "topics")
    disk.sync_folder(directory)


def _compare_ends(directory: Path, manifest: BackupManifest) -> None:
    """Open every partition, which finds and publishes its end."""
    for topic in manifest.topics:
        log = DirectoryLog(directory)
        try:
            bounds = log.topic(topic.name).bounds(range(len(topic.partitions)))
        finally:
            log.close()
        for partition in topic.partitions:
            found = bounds[partition.number]
            if (found.start, found.end) != (partition.start, partition.end):
                raise BackupError(
                    f"{topic.name}/{partition.number} was restored from offset {found.start} to {found.end}, and the "
                    f"backup has {partition.start} to {partition.end}: run `pxrs check {directory}`"
                )
