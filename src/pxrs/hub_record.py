"""The hub's own record in its directory: its id, and the registry that it belongs to.

    hub.record    one line of JSON with its checksum: {"hub": ID, "registry": ID, "address": SHOWN}
    hub.lock      held while the record is written, and while retention removes what the registry has allowed

Retention of a topic with `keep_unread` asks the groups of a registry what they have read. Asked of another registry
than the one in which the groups are, it would remove messages that nobody has read. So the hub's directory says which
registry that is, by the id that the registry keeps in itself, and a process with another one is refused.

Who writes it:
- the first `create_topic` of a new directory: the hub's id, and no registry yet, so that no server is needed;
- the first `create_topic` of a topic that keeps what is unread, in a directory that has a record: the registry too;
- the first member of a group that joins, and the first driver that publishes a batch: both, also in a directory of
  version 0.1, which has no record;
- `pxrs registry adopt`: whatever was there before.

The file is replaced as a whole and synced, so a crash leaves the old record or the new one. A record that is damaged is
an error for whoever needs it, until an operator has run `pxrs registry adopt`.
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
from pxrs.errors import DamagedFrame, LogBusy

NAME: Final = "hub.record"
LOCK: Final = "hub.lock"
TIMEOUT_S: Final = 10.0
_PAUSE_S_MAX: Final = 0.05


@dataclass(frozen=True, slots=True)
class HubRecord:
    hub: str
    """The hub's id, for good."""
    registry: str = ""
    """The id of the registry that the hub belongs to, as `registry.identity.fingerprint` gives it; empty if it is not
    known yet."""
    address: str = ""
    """The registry's address as it is shown, without a password."""


class HubRecordFile:
    """The record of one directory. Threads share it; what it has read is read again when the file has changed."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT_S) -> None:
        self.folder, self.timeout = folder, timeout
        self._path = str(folder / NAME)
        self._read: tuple[tuple[int, int, int, int], HubRecord] | None = None
        """The record as it was read last, and the device, inode, time and size that its file had then."""

    def read(self) -> HubRecord | None:
        """None if there is none. Raises DamagedFrame."""
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
        """Give a new hub its id. A directory that has topics and no record is one of version 0.1, and left as it is."""
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
        """Make the hub belong to this registry, unless it belongs to one. The record as it is then."""
        with self.locked():
            record = self.read()
            if record is None or not record.registry:
                hub = uuid.uuid4().hex if record is None else record.hub
                record = self._write(HubRecord(hub, registry, address))
            return record

    def adopt(self, registry: str, address: str) -> tuple[HubRecord | None, HubRecord]:
        """Make the hub belong to this registry. The record as it was, None if there was none or it was damaged, and as
        it is now. Waits for a retention that is removing something."""
        with self.locked():
            try:
                before = self.read()
            except DamagedFrame:  # what it said is lost; the caller finds the groups of this hub by their topics
                before = None
            after = HubRecord(uuid.uuid4().hex) if before is None else before
            return before, self._write(replace(after, registry=registry, address=address))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock against other threads and processes. Raises LogBusy when the time is up."""
        import fcntl  # not on every system, and a hub in memory needs none

        path = self.folder / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk.log_error(error, path) from error
        try:
            self._wait(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), str(path))
            yield
        finally:
            # Not by closing alone: a child that was forked meanwhile has the same open file, and would keep the lock.
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
                        f"another process has held {path} for {self.timeout:g} s; is it stopped? See who has it open"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S_MAX)

    def _write(self, record: HubRecord) -> HubRecord:
        try:
            replace_file(self._path, with_checksum(json.dumps(asdict(record))), is_durable=True)
            disk.sync_folder(self.folder)
        except OSError as error:
            raise disk.log_error(error, self._path) from error
        return record


def _parse(path: str, text: str | None) -> HubRecord:
    try:
        found = json.loads(text or "")
        return HubRecord(**{name: str(found[name]) for name in HubRecord.__dataclass_fields__ if name in found})
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFrame(
            path,
            0,
            "it is no hub's record, so which registry the hub belongs to is not known; say it with "
            f"`pxrs registry adopt --at {os.path.dirname(path)} --registry URL`",
        ) from error
