"""The record in a hub's directory: the id of the hub, and the registry that the hub belongs to.

    hub.record    one line of JSON with its checksum: {"hub": ID, "registry": ID, "address": SHOWN}
                  {"restoring": ADDRESS}, while a backup is being restored into the directory (`backup.restoring`)
    hub.lock      held while the record is written, and while retention removes what the registry has allowed

Retention of a topic with `keep_unread` asks a registry what its groups have read. If it asked another registry than the
one that has the groups, it would remove messages that nobody has read. So the directory records which registry has the
groups, by the id that the registry keeps in itself, and a process with another registry is refused.

Who writes the record:
- the first `create_topic` in a new directory: the hub's id, and no registry yet, so that no server is needed;
- the first `create_topic` of a topic with `keep_unread`, in a directory that has a record: the registry too;
- the first member of a group that joins, and the first Spark driver that publishes a batch: both, also in a directory
  of version 0.1, which has no record;
- `pxrs registry adopt`: both, whatever the record said before.

The file is replaced as a whole and synced, so a crash leaves the old record or the new one. A damaged record raises
DamagedFrame for every call that needs it, until an operator runs `pxrs registry adopt`. The record of a restoration
that was interrupted raises RestoreInterrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.disk import read_with_checksum, replace_file, with_checksum
from pxrs.errors import DamagedFrame, LogBusy, RestoreInterrupted

NAME: Final = "hub.record"
LOCK: Final = "hub.lock"
TIMEOUT_S: Final = 10.0
_PAUSE_S_MAX: Final = 0.05


@dataclass(frozen=True, slots=True)
class HubRecord:
    hub: str
    """The id of the hub. It never changes."""
    registry: str = ""
    """The id of the registry that the hub belongs to, as `registry.identity.fingerprint` gives it; empty if it is not
    known yet."""
    address: str = ""
    """The registry's address as it is shown, without a password."""


class HubRecordFile:
    """The record of one directory. Threads share it. `read` reads the file again only if it has changed."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT_S) -> None:
        self.folder, self.timeout = folder, timeout
        self._path = str(folder / NAME)
        self._read: tuple[tuple[int, int, int, int], HubRecord] | None = None
        """The record as it was read last, and the device, inode, time and size that its file had then."""

    def read(self) -> HubRecord | None:
        """The record; None if the directory has none. Raises DamagedFrame, RestoreInterrupted."""
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise disk.log_error(error, self._path) from error
        identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
        known = self._read
        if known is not None and known[0] == identity:
            return known[1]
        try:
            record = _parse(self._path, read_with_checksum(self._path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk.log_error(error, self._path) from error
        # If the file was replaced between the two calls, the older identity makes the next call read it again.
        self._read = identity, record
        return record

    def check_writable(self) -> None:
        """Raise LogNotWritable if this process may not write the record."""
        if (refusal := disk.write_refusal(self.folder)) is not None:
            raise disk.log_error(refusal)

    def begin(self) -> None:
        """Write the record of a new hub, with a new id. A directory that has topics and no record was made by version
        0.1 and stays without one."""
        if self.read() is None and not self._has_topics():
            with self.locked():
                if self.read() is None and not self._has_topics():
                    self._write(HubRecord(uuid.uuid4().hex))

    def _has_topics(self) -> bool:
        try:
            return any(not name.startswith(".") for name in os.listdir(self.folder / "topics"))
        except FileNotFoundError:
            return False

    def claim(self, registry: str, address: str) -> HubRecord:
        """Record this registry, unless the record names a registry already. Returns the record as it is then."""
        with self.locked():
            record = self.read()
            if record is None or not record.registry:
                hub = uuid.uuid4().hex if record is None else record.hub
                record = self._write(HubRecord(hub, registry, address))
            return record

    def adopt(self, registry: str, address: str) -> tuple[HubRecord | None, HubRecord]:
        """Record this registry, whatever the record named before. Returns the record as it was, None if there was none
        or it was damaged, and as it is now. Waits while a retention holds the lock."""
        with self.locked():
            try:
                before = self.read()
            except DamagedFrame:  # its content is lost; the caller finds the hub's groups by the ids of their topics
                before = None
            after = HubRecord(uuid.uuid4().hex) if before is None else before
            return before, self._write(replace(after, registry=registry, address=address))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock file against other threads and processes. Raises LogBusy if it is not free in time."""
        import fcntl  # not available on every system, and a hub in memory needs no lock

        path = self.folder / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk.log_error(error, path) from error
        try:
            self._wait(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), str(path))
            yield
        finally:
            # Closing the file would not suffice: a child that was forked meanwhile has the same open file, and would
            # keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _wait(self, lock: Callable[[], None], path: str) -> None:
        until, pause = time.monotonic() + self.timeout, 0.001
        while True:
            try:
                lock()
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise LogBusy(
                        f"another process has held {path} for {self.timeout:g} s; it may be suspended: see which "
                        "process has it open"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S_MAX)

    def _write(self, record: HubRecord) -> HubRecord:
        try:
            write_record(self.folder, record)
        except OSError as error:
            raise disk.log_error(error, self._path) from error
        return record


def write_record(folder: Path, record: HubRecord) -> None:
    """Replace the record, durably."""
    _replace(folder, asdict(record))


def write_restoring(folder: Path, address: str) -> None:
    """Record, durably, that a backup is being restored into the directory. address: of the registry, as it is shown."""
    _replace(folder, {"restoring": address})


def _replace(folder: Path, content: dict[str, str]) -> None:
    replace_file(str(folder / NAME), with_checksum(json.dumps(content)), is_durable=True)
    disk.sync_folder(folder)


def _parse(path: str, text: str | None) -> HubRecord:
    try:
        found = json.loads(text or "")
        if "restoring" in found:
            raise RestoreInterrupted(os.path.dirname(path), str(found["restoring"]))
        return HubRecord(**{name: str(found[name]) for name in HubRecord.__dataclass_fields__ if name in found})
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFrame(
            path,
            0,
            "it is not the record of a hub, so the registry of the hub is not known; record it with "
            f"`pxrs registry adopt --at {os.path.dirname(path)} --registry URL`",
        ) from error
