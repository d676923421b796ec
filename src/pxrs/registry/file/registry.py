"""The registry on a local directory: `FileRegistry`.

`commit.py` reads and commits under the lock of the journal, `lease.py` has the files of leases, `watch.py` the thread
that wakes watches. This file gives them the shape of a `Registry`.

A process that may read the directory and not write to it can get, scan and watch. Every other call raises
RegistryNotWritable before anything is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pxrs.clock import SYSTEM
from pxrs.errors import LeaseExpired, OutcomeUnknown, RegistryUnavailable
from pxrs.registry.contract import Commit, Entry, Limits, Registry, Snapshot
from pxrs.registry.file.commit import SharedJournal
from pxrs.registry.file.lease import FileLease, LeaseFile, is_over, read
from pxrs.registry.file.watch import FileWatcher
from pxrs.registry.lease import Lease, id_of, new_secret, not_attached
from pxrs.registry.state import Change
from pxrs.registry.watch import PrefixWatch

LIMITS = Limits(commit_keys_max=4096, commit_bytes_max=8 << 20, value_bytes_max=1 << 20)


class FileRegistry(Registry):
    """A handle to `<directory>/<namespace>`."""

    limits = LIMITS

    def __init__(self, directory: Path, namespace: str, timeout: float) -> None:
        super().__init__(f"file:{directory}")
        self._timeout = self.timeout_s = timeout
        self._watching_lock = threading.Lock()
        """Held while the watching thread is started or stopped."""
        self._watcher: FileWatcher | None = None
        # `SharedWatches` has no reference to this registry, so neither has the journal, see `SharedJournal`.
        self.shared = SharedJournal(directory, namespace, self.url, timeout, self._watches.wake)
        self.folder = self.shared.root

    def _get(self, key: str) -> Entry | None:
        gone = self.shared.gone
        entries = self.shared.read(lambda state: [entry] if (entry := state.get(key, gone)) else [])
        return entries[0] if entries else None

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        return self.shared.read(lambda state: state.scan(prefix, after, limit, self.shared.gone))

    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        return self.shared.snapshot()

    def _commit(self, commit: Commit) -> dict[str, int]:
        return self.shared.commit(commit)

    # Leases.

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        self.shared.check_writable()
        secret = new_secret()
        lease = id_of(secret)
        with self.shared.os_errors():
            file = LeaseFile.create(
                self.shared.lease_folder, self.shared.journal.scratch, lease, ttl, SYSTEM, is_held=renewed
            )
        try:
            self.shared.publish(Change(lease_begins=lease), lambda: None)
            with self.shared.os_errors():
                deadline = file.renew()
        except (OutcomeUnknown, LeaseExpired) as error:  # without its file the lease is over, if it has begun at all
            file.remove()
            raise RegistryUnavailable(f"{self.url}: no lease could be taken in time: {error}") from error
        except BaseException:
            file.remove()
            raise
        if self._watcher is not None:
            self._watcher.interrupt()  # the new lease may be the next to expire
        return self._grant(file, secret, deadline)

    def _attach(self, secret: str, renewed: bool) -> Lease:
        """The lease stays as it is: held by the process that took it, or unheld."""
        self.shared.check_writable()
        path = self.shared.lease_folder / id_of(secret)
        try:
            with self.shared.os_errors():
                with self.shared.lock:
                    self.shared.catch_up()
                    has_begun = path.name in self.shared.journal.state.leases
                record = read(path)
                if not has_begun or record is None or record.ttl is None or is_over(path, SYSTEM):
                    raise not_attached()
                file = LeaseFile(path, record.ttl, SYSTEM)
                return self._grant(file, secret, file.renew())
        except LeaseExpired:
            raise not_attached() from None

    def _grant(self, file: LeaseFile, secret: str, deadline: float) -> Lease:
        lease = id_of(secret)
        stored = FileLease(file, partial(self.shared.end_leases, [lease]), self.shared.os_errors)
        return Lease(
            lease, file.ttl, deadline, secret=secret, stored=stored, on_closed=self._forget_lease, clock=SYSTEM
        )

    # Watches.

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        with self._watching_lock:
            if self._watcher is None:
                with self.shared.os_errors():
                    self._watcher = FileWatcher(self.shared)
        self._watcher.await_armed(self._timeout)

    def _is_idle(self) -> bool:
        return super()._is_idle() and self._watcher is None

    def _close(self) -> None:
        with self._watching_lock:
            if self._watcher is not None:
                self._watcher.stop(self._timeout)
