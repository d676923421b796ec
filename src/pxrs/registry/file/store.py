"""The registry on a local directory, for the processes of one machine: no server, no lock that anyone waits for.

`journal.py` holds the keys, `liveness.py` knows who is alive; this is the shell around both: threads, leases, watches,
and the translation of the operating system's errors.

Failure: a commit that fails before its `link` had no effect; a sync that fails after it is an unknown outcome. A
process that is killed or stopped at any point leaves at most a scratch file behind, and blocks nobody.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pxrs import disk
from pxrs.clock import SYSTEM
from pxrs.errors import AccessDenied, Conflict, InvalidUrl, OutcomeUnknown, RegistryUnavailable, StorageFull
from pxrs.registry.contract import Commit, Entry, Limits, Registry
from pxrs.registry.file.codec import encode_entry
from pxrs.registry.file.inotify import CLOSE_WRITE, CREATE, DELETE, MOVE_SELF, Notifier
from pxrs.registry.file.journal import Journal, Published
from pxrs.registry.file.liveness import LeaseFile, expiry_of
from pxrs.registry.lease import Lease
from pxrs.registry.state import Change
from pxrs.registry.watch import Watch

log = logging.getLogger(__name__)

LIMITS = Limits(commit_keys_max=4096, commit_bytes_max=8 << 20, value_bytes_max=1 << 20)
# The kernel tells of a dying process's file before it drops the lock, a moment later; look again a few times.
DEATH_LOOKS_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class FileRegistry(Registry):
    """A handle to `<directory>/<namespace>`."""

    limits = LIMITS

    def __init__(self, directory: Path, namespace: str, timeout: float) -> None:
        super().__init__(f"file:{directory}")
        self._timeout = timeout
        self._lock = threading.Lock()
        self._watching_lock = threading.Lock()
        self._notifier: Notifier | None = None
        self._watcher: threading.Thread | None = None
        root = directory / namespace
        self._lease_folder = root / "leases"
        with self._os_errors():
            if directory.exists() and not directory.is_dir():
                raise InvalidUrl(f"{self.url} is a file; a registry is kept in a directory")
            disk.refuse_network_file_system(directory)
            self._lease_folder.mkdir(parents=True, exist_ok=True)
            disk.sync_folder(directory)
            self._journal = Journal(root)

    def _get(self, key: str) -> Entry | None:
        with self._os_errors(), self._lock:
            self._catch_up()
            record = self._journal.state.records.get(key)
            if record is None:
                return None
            if record.lease is None or not self._is_over(record.lease):
                return Entry(key, record.value, record.version)
        self._end_leases([record.lease])
        return self._get(key)

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        with self._os_errors(), self._lock:
            self._catch_up()
            state = self._journal.state
            entries = state.scan(prefix, after, limit)
            over = self._over_among(entry.key for entry in entries)
            if not over:
                return entries
        self._end_leases(over)
        return self._scan(prefix, after, limit)

    def _commit(self, commit: Commit) -> dict[str, int]:
        change = Change.of(commit)
        number = self._publish(change, lambda: self._refuse(commit, change))
        return dict.fromkeys(commit.written, number)

    def _refuse(self, commit: Commit, change: Change) -> None:
        """Raise what stands against the commit, if it still stands once dead holders are out of the way."""
        refusal = self._journal.state.refusal(commit.expect, change.lease)
        if isinstance(refusal, Conflict):
            over = self._over_among(refusal.keys)
            if over:
                raise _Over(over)
        if refusal is not None:
            raise refusal

    def _publish(self, change: Change, check: Callable[[], None]) -> int:
        """Publish the change as soon as `check`, asked of the newest state, does not raise; returns its number."""
        until = time.monotonic() + self._timeout
        with self._os_errors():
            self._attempt(None, change, check)
            with self._journal.prepared(encode_entry(change)) as scratch:
                while (published := self._attempt(scratch, change, check)) is None:
                    if time.monotonic() > until:
                        raise RegistryUnavailable(f"{self.url}: others were first for {self._timeout:g} s; try again")
            try:
                published.generation.sync()
            except OSError as error:
                raise OutcomeUnknown(f"{self.url}: committed but perhaps not on disk: {error}") from error
            finally:
                self._wake(published.changed)
        self._compact_if_due()
        return published.number

    def _attempt(self, scratch: str | None, change: Change, check: Callable[[], None]) -> Published | None:
        """Check, and publish behind exactly the state that was checked. With no scratch file yet, only check."""
        try:
            with self._lock:
                if scratch is None:
                    self._catch_up()
                check()
                published = None if scratch is None else self._journal.publish(scratch, change)
                if published is None:
                    self._catch_up()
                return published
        except _Over as over:
            self._end_leases(over.leases)
            return None

    def _catch_up(self) -> None:
        changed = self._journal.catch_up()
        if changed is None or changed:
            self._wake(changed)

    def _compact_if_due(self) -> None:
        if not self._journal.compaction_due:
            return
        # The commit is done; a compaction that fails is tried again by a later commit of any process.
        try:
            with self._lock:
                self._catch_up()
                sealed = self._journal.seal() if self._journal.compaction_due else None
            if sealed is not None:
                self._journal.finish_compaction(*sealed)
        except (OSError, RegistryUnavailable, OutcomeUnknown) as error:
            log.warning("%s: compaction was left undone: %s", self.url, error)

    # Leases.

    def _lease(self, ttl: float) -> Lease:
        lease = uuid.uuid4().hex
        with self._os_errors():
            file = LeaseFile(self._lease_folder, self._journal.scratch, lease, ttl, SYSTEM)
        try:
            self._publish(Change(lease_begins=lease), lambda: None)
        except OutcomeUnknown as error:  # without its file the lease is over, whether it has begun or not
            file.remove()
            raise RegistryUnavailable(f"{self.url}: no lease: {error}") from error
        except BaseException:
            file.remove()
            raise
        self._notify()

        def end() -> None:
            try:
                self._end_leases([lease])
            finally:
                file.remove()

        return Lease(lease, ttl, file.expiry, renew=file.renew, end=end, on_gone=self._forget_lease, clock=SYSTEM)

    def _is_over(self, lease: str) -> bool:
        expiry = expiry_of(self._lease_folder / lease)
        return expiry is None or SYSTEM.now() >= expiry

    def _over_among(self, keys: Iterable[str]) -> list[str]:
        """The leases of these keys whose holders are dead or too old."""
        records = self._journal.state.records
        leases = {records[key].lease for key in keys if key in records} - {None}
        return [lease for lease in leases if self._is_over(lease)]

    def _end_leases(self, leases: Iterable[str]) -> None:
        for lease in leases:
            with contextlib.suppress(_Ended):
                self._publish(Change(lease_ends=lease), lambda lease=lease: self._check_begun(lease))  # type: ignore[misc]
            with contextlib.suppress(FileNotFoundError):
                (self._lease_folder / lease).unlink()

    def _check_begun(self, lease: str) -> None:
        if lease not in self._journal.state.leases:
            raise _Ended

    # Watches.

    def _watch(self, watch: Watch) -> None:
        with self._watching_lock:
            if self._watcher is None:
                armed = threading.Event()
                with self._os_errors():
                    self._notifier = Notifier()
                self._watcher = threading.Thread(
                    target=self._watch_loop, args=(self._notifier, armed), name="pxrs-file-watch", daemon=True
                )
                self._watcher.start()
                if not armed.wait(self._timeout):
                    raise RegistryUnavailable(f"{self.url}: the watch could not be set up")

    def _notify(self) -> None:
        """The watcher's timing may have changed: let it look."""
        if self._notifier is not None:
            self._notifier.interrupt()

    def _watch_loop(self, notifier: Notifier, armed: threading.Event) -> None:
        suspects: dict[str, int] = {}
        while not self._closed:
            try:
                pause = self._look(notifier, suspects)
                armed.set()
                news = notifier.wait(pause)
                if news.overflow:
                    self._wake(None)
                suspects.update(dict.fromkeys(news.closed, 0))
            except Exception as error:  # noqa: BLE001 - a watcher must not die silently: it doubts, and tries again
                log.warning("%s: watching failed, will try again: %s", self.url, error)
                self._wake(None)
                time.sleep(0.1)

    def _look(self, notifier: Notifier, suspects: dict[str, int]) -> float | None:
        """Arm, read what is new, end the leases that are over; returns after how long to look again in any case."""
        notifier.add(str(self._lease_folder), CLOSE_WRITE | DELETE)
        while True:
            with self._lock:
                generation = self._journal.generation
            with contextlib.suppress(FileNotFoundError):
                notifier.add(generation.path, CREATE | MOVE_SELF)
            with self._lock:
                self._catch_up()
                if self._journal.generation is generation:
                    leases = list(self._journal.state.leases)
                    break
        expiries = {lease: expiry_of(self._lease_folder / lease) for lease in leases}
        now = SYSTEM.now()
        over = [lease for lease, expiry in expiries.items() if expiry is None or now >= expiry]
        self._end_leases(over)
        pauses = [expiry - now for expiry in expiries.values() if expiry is not None and expiry > now]
        for lease, looks in list(suspects.items()):
            if lease in over or lease not in expiries or looks >= len(DEATH_LOOKS_S):
                del suspects[lease]
            else:
                suspects[lease] += 1
                pauses.append(DEATH_LOOKS_S[looks])
        return min(pauses, default=None)

    def _close(self) -> None:
        with self._watching_lock:
            if self._watcher is not None and self._notifier is not None:
                self._notifier.interrupt()
                self._watcher.join(self._timeout)
                if not self._watcher.is_alive():
                    self._notifier.close()

    @contextlib.contextmanager
    def _os_errors(self) -> Iterator[None]:
        """The operating system's refusals before a commit took effect, as errors of pxrs."""
        try:
            yield
        except OSError as error:
            where = f"{self.url}: {error.filename or 'I/O'}: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"{where}; nothing was written: make room, then try again") from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise AccessDenied(where) from error
            if error.errno == errno.ENOTDIR:
                raise InvalidUrl(f"{where}; a registry is kept in a directory") from error
            raise RegistryUnavailable(where) from error


class _Over(Exception):
    """Leases stand in the way whose holders are gone."""

    def __init__(self, leases: list[str]) -> None:
        self.leases = leases


class _Ended(Exception):
    """Somebody else has ended the lease already."""
