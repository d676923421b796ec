"""The registry on a local directory: `FileRegistry`, and the thread that wakes its watches.

`journal.py` holds the keys and `lease.py` decides which leases are over. This file combines the two, holds the lock of
the journal, starts the watching thread, and translates the operating system's errors.

A process that may read the directory and not write to it can get, scan and watch. It cannot end a lease that is over,
which takes a write. So it leaves the keys of such a lease out of what it reads, from when it first met the lease until
another process has ended it. Every other call raises RegistryNotWritable before anything is written.

On failure: a commit that fails before its `link` had no effect; a sync that fails after it is an unknown outcome. A
process that is killed or stopped at any point blocks no other process, and leaves at most files that the next
compaction removes.

This file is longer than others because the watching thread, which reads the same fields, is still part of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from pxrs import disk
from pxrs.clock import SYSTEM
from pxrs.errors import (
    AccessDenied,
    Conflict,
    InvalidUrl,
    LeaseExpired,
    OutcomeUnknown,
    RegistryNotWritable,
    RegistryUnavailable,
    StorageFull,
)
from pxrs.inotify import CLOSE_WRITE, CREATE, DELETE, MOVE_SELF, Notifier
from pxrs.registry.contract import Commit, Entry, Limits, Registry
from pxrs.registry.file.codec import encode_entry
from pxrs.registry.file.folder import Generation
from pxrs.registry.file.journal import Journal, NotMade, Published
from pxrs.registry.file.lease import FileLease, LeaseFile, expiry_of, is_over, read
from pxrs.registry.lease import Lease, id_of, new_secret, not_attached
from pxrs.registry.limit import seconds_left
from pxrs.registry.state import Change, State
from pxrs.registry.watch import PrefixWatch

log = logging.getLogger(__name__)
T = TypeVar("T")

LIMITS = Limits(commit_keys_max=4096, commit_bytes_max=8 << 20, value_bytes_max=1 << 20)
# The kernel tells of a dying process's file before it drops the lock, a moment later; look again a few times.
DEATH_LOOKS_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.5, 2.0)
WATCH_RETRY_S = 0.5


class FileRegistry(Registry):
    """A handle to `<directory>/<namespace>`."""

    limits = LIMITS

    def __init__(self, directory: Path, namespace: str, timeout: float) -> None:
        super().__init__(f"file:{directory}")
        self._timeout = self.timeout_s = timeout
        self._lock = threading.Lock()
        self._watching_lock = threading.Lock()
        self._watcher: _Watcher | None = None
        self.folder = self._root = directory / namespace
        self._lease_folder = self._root / "leases"
        self._refusal: OSError | None = None
        """Why this process may not write here, as it was found at opening; None if it may."""
        self._may_end_leases = True
        """False once this process was found not to have the permission for it."""
        self._gone: set[str] = set()
        """Leases that are over and that this process may not end: what it reads leaves out their keys."""
        self._opened: Journal | None = None
        """None while the registry is not there, and this process may not make it."""
        with self._os_errors():
            disk.refuse_network_file_system(directory)
            self._refusal = self._find_refusal()
            if self._refusal is None:
                disk.make_folders(self._lease_folder)
                self._opened = Journal(self._root)
            else:
                self._may_end_leases = False
                self._is_made()

    def _find_refusal(self) -> OSError | None:
        """Why this process may not write here; None if it may, as far as can be told before it does."""
        for folder in (self._lease_folder, self._root / "generations", self._root / "scratch"):
            while not folder.exists():  # then it is to be made
                folder = folder.parent
            if (refusal := disk.write_refusal(folder)) is not None:
                return refusal
        return None

    def _is_made(self) -> bool:
        """Whether there is a registry to read. If not, this process may not make one; another one may, at any time."""
        if self._opened is None:
            with contextlib.suppress(NotMade):
                self._opened = Journal(self._root, may_write=False)
        return self._opened is not None

    @property
    def _journal(self) -> Journal:
        assert self._opened is not None, "see `_is_made`"
        return self._opened

    # Reading.

    def _get(self, key: str) -> Entry | None:
        entries = self._read(lambda state: [entry] if (entry := state.get(key, self._gone)) else [])
        return entries[0] if entries else None

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        return self._read(lambda state: state.scan(prefix, after, limit, self._gone))

    def _read(self, find: Callable[[State], list[Entry]]) -> list[Entry]:
        """What `find` finds in the newest state, once no key of it is bound to a lease that is over, and all is on
        disk."""
        while True:
            with self._os_errors():
                with self._lock:
                    if not self._is_made():
                        return []
                    self._catch_up()
                    entries = find(self._journal.state)
                    over = self._over_among(entry.key for entry in entries)
                    number, generation = self._journal.number, self._journal.generation
                if not over:
                    self._settle(number, generation)
                    return entries
            self._end_or_hide(over)

    def _settle(self, number: int, generation: Generation) -> None:
        """Sync the entries up to this number, which other processes may have published and not synced yet: no caller
        may act on a commit that a power loss could undo."""
        if number > self._journal.synced:
            generation.sync()
            self._journal.synced = max(self._journal.synced, number)

    def _catch_up(self) -> None:
        changed = self._journal.catch_up()
        if self._gone:
            self._gone.intersection_update(self._journal.state.leases)
        if changed is None or changed:
            self._wake(changed)

    # Committing.

    def _commit(self, commit: Commit) -> dict[str, int]:
        self._check_writable()
        change = Change.of(commit)

        def check() -> None:
            """Raise the commit's refusal; `_Over` if ending leases that are over may remove the reason for it."""
            refusal = self._journal.state.refusal(commit.expect, change.lease)
            if isinstance(refusal, Conflict) and (over := self._over_among(refusal.keys)):
                raise _Over(over)
            if refusal is not None:
                raise refusal

        if not commit.changed:
            self._look(check)
            return {}
        number = self._publish(change, check)
        return dict.fromkeys(commit.written, number)

    def _publish(self, change: Change, check: Callable[[], None]) -> int:
        """Publish the change once `check`, called with the newest state, does not raise; returns its number."""
        until = time.monotonic() + seconds_left(self._timeout)
        with self._os_errors():
            self._look(check)
            with self._journal.prepared(encode_entry(change, self._journal.synced)) as scratch:
                while (published := self._attempt(scratch, change, check)) is None:
                    if time.monotonic() > until:
                        raise RegistryUnavailable(
                            f"{self.url}: other processes committed first for {self._timeout:g} s; try again"
                        )
            try:
                self._settle(published.number, published.generation)
            except OSError as error:
                raise OutcomeUnknown(f"{self.url}: committed but perhaps not on disk: {error}") from error
            finally:
                self._wake(published.changed)
        self._may_end_leases = True  # if it was refused before, that was in another generation's folder
        self._compact_if_due()
        return published.number

    def _look(self, check: Callable[[], None]) -> None:
        """Call `check` with the newest state, and end the leases that are over if it raises `_Over`."""
        while True:
            try:
                with self._os_errors():
                    with self._lock:
                        self._catch_up()
                        check()
                        number, generation = self._journal.number, self._journal.generation
                    return self._settle(number, generation)
            except _Over as over:
                self._end_leases(over.leases)

    def _attempt(self, scratch: str, change: Change, check: Callable[[], None]) -> Published | None:
        """Publish the change as the entry right after the state that `check` has seen; None if another process has
        published an entry meanwhile."""
        try:
            with self._lock:
                if self._journal.torn:
                    self._catch_up()
                check()
                published = self._journal.publish(scratch, change)
                if published is None:
                    self._catch_up()
                return published
        except _Over as over:
            self._end_leases(over.leases)
            return None

    def _compact_if_due(self) -> None:
        if not self._journal.compaction_due:
            return
        # The commit has been made, so the caller must not see an error. What this compaction leaves undone, the
        # compaction of a later generation does.
        try:
            with self._lock:
                self._catch_up()
                if not self._journal.compaction_due or not self._journal.seal():
                    return
                self._catch_up()
                snapshot = self._journal.snapshot()
                leases = set(self._journal.state.leases)
            self._journal.finish_compaction(*snapshot)
            self._sweep_lease_files(leases)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("%s: compaction was left undone: %s", self.url, error)

    def _sweep_lease_files(self, known: set[str]) -> None:
        """Remove the files of leases that never began, because their process died, and end all leases that are over."""
        names = {entry.name for entry in os.scandir(self._lease_folder)}
        for name in names - known:
            if self._is_over(name):
                self._remove_lease_file(name)
        self._end_leases([lease for lease in known if self._is_over(lease)])

    # Leases.

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        self._check_writable()
        secret = new_secret()
        lease = id_of(secret)
        with self._os_errors():
            file = LeaseFile.create(self._lease_folder, self._journal.scratch, lease, ttl, SYSTEM, is_held=renewed)
        try:
            self._publish(Change(lease_begins=lease), lambda: None)
            with self._os_errors():
                deadline = file.renew()
        except (OutcomeUnknown, LeaseExpired) as error:  # without its file the lease is over, if it has begun at all
            file.remove()
            raise RegistryUnavailable(f"{self.url}: no lease could be taken in time: {error}") from error
        except BaseException:
            file.remove()
            raise
        self._interrupt_watcher()  # it times the nearest expiry
        return self._grant(file, secret, deadline)

    def _attach(self, secret: str, renewed: bool) -> Lease:
        """The lease stays as it is: held by the process that took it, or unheld."""
        self._check_writable()
        path = self._lease_folder / id_of(secret)
        try:
            with self._os_errors():
                with self._lock:
                    self._catch_up()
                    has_begun = path.name in self._journal.state.leases
                record = read(path)
                if not has_begun or record is None or record.ttl is None or is_over(path, SYSTEM):
                    raise not_attached()
                file = LeaseFile(path, record.ttl, SYSTEM)
                return self._grant(file, secret, file.renew())
        except LeaseExpired:
            raise not_attached() from None

    def _grant(self, file: LeaseFile, secret: str, deadline: float) -> Lease:
        lease = id_of(secret)
        stored = FileLease(file, partial(self._end_leases, [lease]), self._os_errors)
        return Lease(
            lease, file.ttl, deadline, secret=secret, stored=stored, on_closed=self._forget_lease, clock=SYSTEM
        )

    def _is_over(self, lease: str) -> bool:
        return is_over(self._lease_folder / lease, SYSTEM)

    def _over_among(self, keys: Iterable[str]) -> list[str]:
        """The leases that are over, of those that these keys are bound to."""
        records = self._journal.state.records
        leases = {records[key].lease for key in keys if key in records} - {None}
        return [lease for lease in leases if self._is_over(lease)]

    def _end_or_hide(self, leases: Sequence[str]) -> None:
        """For a reader: end the leases, or leave their keys out of what is read if this process may not end them."""
        if not leases:
            return
        if self._may_end_leases:
            try:
                self._end_leases(leases)
                return
            except RegistryNotWritable as error:  # of a part of the directory, such as a folder of another user's
                log.warning("%s: leases that are over are left for other processes to end: %s", self.url, error)
                self._may_end_leases = False
        with self._lock:
            held = self._journal.state.leases
            self._gone.update(lease for lease in leases if lease in held)
            keys = [key for lease in leases for key in held.get(lease, ())]
        if keys:
            self._wake(keys)

    def _end_leases(self, leases: Sequence[str]) -> None:
        if not leases:
            return

        def check() -> None:
            if not any(lease in self._journal.state.leases for lease in leases):
                raise _Ended

        with contextlib.suppress(_Ended):
            self._publish(Change(leases_end=tuple(leases)), check)
        for lease in leases:
            self._remove_lease_file(lease)

    def _remove_lease_file(self, lease: str) -> None:
        try:
            (self._lease_folder / lease).unlink(missing_ok=True)
        except OSError as error:  # the journal has the end of the lease; the next compaction removes the file
            log.warning("%s: the file of lease %s was left: %s", self.url, lease, error)

    # Watches.

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        with self._watching_lock:
            if self._watcher is None:
                with self._os_errors():
                    watcher = _Watcher(self)
                watcher.thread.start()
                self._watcher = watcher
        self._watcher.await_armed(self._timeout)

    def _is_idle(self) -> bool:
        return super()._is_idle() and self._watcher is None

    def _doubt(self) -> None:
        """Wake every watch: changes may have been missed."""
        self._wake(None)

    def _interrupt_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.notifier.interrupt()

    def _close(self) -> None:
        with self._watching_lock:
            if self._watcher is not None:
                self._watcher.stop(self._timeout)

    def _check_writable(self) -> None:
        if self._refusal is not None:
            with self._os_errors():
                raise self._refusal

    @contextlib.contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Translate errors of the operating system, which were raised before a commit took effect."""
        try:
            yield
        except OSError as error:
            where = f"{self.url}: {disk.explain(error)}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"{where}; nothing was written: make room, then try again") from error
            if (lacking := disk.denied(error, self._root)) is not None:
                what = f"{self.url}: {lacking.what}"
                raise RegistryNotWritable(lacking.path, what) if lacking.is_write else AccessDenied(what) from error
            if error.errno == errno.ENOTDIR:
                raise InvalidUrl(f"{where}; a registry is kept in a directory") from error
            raise RegistryUnavailable(where) from error


class _Watcher:
    """The thread that is told of new entries and of dying holders, reads the ones and ends the leases of the others."""

    def __init__(self, registry: FileRegistry) -> None:
        self._registry = weakref.ref(registry)
        """Weak, so that a registry that nobody has any more is collected; its finalizer then stops this thread."""
        self._url = registry.url
        self.notifier = Notifier()
        self.thread = threading.Thread(target=self._run, name="pxrs-file-watch", daemon=True)
        self._armed = threading.Event()
        self._stopped = threading.Event()
        self._trouble: Exception | None = None
        self._was_made = registry._opened is not None
        """Whether there was a registry to watch at the last look; False only if this process may not make one."""
        self._due: dict[str, float] = {}
        """When each lease that is known ends by age, as its file said last."""
        self._suspects: dict[str, int] = {}
        """Leases whose holder may just be dying, and how often each was looked at."""

    def await_armed(self, timeout: float) -> None:
        if not self._armed.wait(timeout):
            raise RegistryUnavailable(f"{self._url}: no watch could be set up: {self._trouble}")

    def stop(self, timeout: float) -> None:
        self._stopped.set()
        self.notifier.interrupt()
        self.thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    pause = self._with_registry(self._look)
                    self._wait(pause)
                    self._trouble = None
                except Exception as error:  # noqa: BLE001 - a watcher must not die silently: it doubts, and tries again
                    if self._trouble is None:
                        log.warning("%s: watching failed, will try again: %s", self._url, error)
                    # Without its frames, which hold the registry.
                    self._trouble = error.with_traceback(None)
                    self._armed.clear()
                    self._with_registry(FileRegistry._doubt)
                    self._stopped.wait(WATCH_RETRY_S)
        finally:
            self.notifier.close()

    def _with_registry(self, step: Callable[[FileRegistry], T]) -> T | None:
        """The registry is held for no longer than this step. None, and the end of the thread, if it is gone."""
        registry = self._registry()
        if registry is not None:
            return step(registry)
        self._stopped.set()
        return None

    def _wait(self, pause: float | None) -> None:
        if self._stopped.is_set():
            return
        news = self.notifier.wait(pause)
        if news.overflow:
            self._with_registry(FileRegistry._doubt)
            self._suspects.update(dict.fromkeys(self._due, 0))
        self._suspects.update(dict.fromkeys(news.closed, 0))

    def _look(self, registry: FileRegistry) -> float | None:
        """Arm, read what is new, end the leases that are over; returns after how long to look again in any case."""
        with registry._lock:
            is_made = registry._is_made()
        if is_made != self._was_made:
            self._was_made = is_made
            registry._doubt()
        if not is_made:
            self._armed.set()
            return WATCH_RETRY_S
        leases = self._arm(registry)
        self._armed.set()
        now = SYSTEM.now()
        self._due = {lease: self._due[lease] for lease in leases if lease in self._due}
        asked = [x for x in leases if x in self._suspects or self._due.get(x, now) <= now]
        over = []
        for lease in asked:
            asked_at = SYSTEM.now()  # before the date is read, see `expiry_of`
            expiry = expiry_of(registry._lease_folder / lease)
            if expiry is None or asked_at >= expiry:
                over.append(lease)
            else:
                self._due[lease] = expiry
        registry._end_or_hide(over)
        pauses = [expiry - SYSTEM.now() for lease, expiry in self._due.items() if lease not in over]
        for lease, looks in list(self._suspects.items()):
            # An unheld lease does not die with a process: its file is closed after each renewal.
            is_unheld = (record := read(registry._lease_folder / lease)) is not None and not record.is_held
            if lease in over or lease not in self._due or looks >= len(DEATH_LOOKS_S) or is_unheld:
                del self._suspects[lease]
            else:
                self._suspects[lease] += 1
                pauses.append(DEATH_LOOKS_S[looks])
        return max(0.0, min(pauses)) if pauses else None

    def _arm(self, registry: FileRegistry) -> list[str]:
        """Be told of all that happens from now on, and read all that happened before; returns the leases."""
        self.notifier.add(str(registry._lease_folder), CLOSE_WRITE | DELETE)
        while True:
            with registry._lock:
                generation = registry._journal.generation
            with contextlib.suppress(FileNotFoundError):
                self.notifier.add(generation.path, CREATE | MOVE_SELF)
            with registry._lock:
                registry._catch_up()
                if registry._journal.generation is generation:
                    return [lease for lease in registry._journal.state.leases if lease not in registry._gone]


class _Over(Exception):
    """Keys of leases that are over make a check fail: end these leases and check again."""

    def __init__(self, leases: list[str]) -> None:
        self.leases = leases


class _Ended(Exception):
    """Another process has ended the leases already."""
