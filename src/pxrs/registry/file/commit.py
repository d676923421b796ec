"""The journal of an open file registry, as the threads of one handle share it: reads, commits and the end of leases.

`journal.py` holds the keys and `lease.py` decides which leases are over. `SharedJournal` combines the two: it holds the
lock of the journal, and ends a lease that is over before its keys can be read or can refuse a commit.

A process that may read the directory and not write to it cannot end a lease that is over, which takes a write. So it
leaves the keys of such a lease out of what it reads, from when it first met the lease until another process has ended
it.

On failure: a commit that fails before its `link` had no effect; a sync that fails after the `link` is an unknown
outcome. A process that is killed or stopped at any point blocks no other process, and leaves at most files that the
next compaction removes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pxrs import disk
from pxrs.clock import SYSTEM
from pxrs.errors import (
    AccessDenied,
    Conflict,
    InvalidUrl,
    OutcomeUnknown,
    RegistryNotWritable,
    RegistryUnavailable,
    StorageFull,
)
from pxrs.registry.contract import Commit, Entry, Snapshot
from pxrs.registry.file.codec import encode_entry
from pxrs.registry.file.folder import Generation
from pxrs.registry.file.journal import Journal, NotMade, Published
from pxrs.registry.file.lease import is_over
from pxrs.registry.lease import is_id
from pxrs.registry.limit import seconds_left
from pxrs.registry.state import Change, State

log = logging.getLogger(__name__)


class SharedJournal:
    """The keys of `<directory>/<namespace>`, under a lock.

    It holds no reference to the registry: a registry that nobody refers to any more is garbage-collected although the
    watching thread may be using this object."""

    def __init__(
        self,
        directory: Path,
        namespace: str,
        url: str,
        timeout: float,
        wake: Callable[[Iterable[str] | None], None],
    ) -> None:
        """timeout: for how many seconds a commit is tried again while other processes commit first.
        wake:    called with the keys that changed, None if they are not known."""
        self.root = directory / namespace
        self.url, self._timeout, self.wake = url, timeout, wake
        self.lock = threading.Lock()
        """Held while `journal` and `gone` are read or changed, never while a sync is waited for."""
        self.lease_folder = self.root / "leases"
        self._refusal: OSError | None = None
        """Why this process may not write to the directory, as it was found at opening; None if it may write."""
        self._may_end_leases = True
        """False once this process was found not to have the permission to end leases."""
        self.gone: set[str] = set()
        """Leases that are over and that this process may not end: what it reads leaves out their keys."""
        self._opened: Journal | None = None
        """None while the registry does not exist and this process may not create it."""
        with self.os_errors():
            disk.refuse_network_file_system(directory)
            self._refusal = self._find_refusal()
            if self._refusal is None:
                disk.make_folders(self.lease_folder)
                self._opened = Journal(self.root)
            else:
                self._may_end_leases = False
                self.is_made()

    def _find_refusal(self) -> OSError | None:
        """Why this process may not write to the directory; None if the permissions of its folders allow it."""
        for folder in (self.lease_folder, self.root / "generations", self.root / "scratch"):
            while not folder.exists():  # this process will create it
                folder = folder.parent
            if (refusal := disk.write_refusal(folder)) is not None:
                return refusal
        return None

    def is_made(self) -> bool:
        """Whether there is a registry to read. False only in a process that may not create one; another process may
        create it at any time."""
        if self._opened is None:
            with contextlib.suppress(NotMade):
                self._opened = Journal(self.root, may_write=False)
        return self._opened is not None

    @property
    def is_open(self) -> bool:
        """Whether `is_made` has returned True before. Needs no lock and reads no file."""
        return self._opened is not None

    @property
    def journal(self) -> Journal:
        """The journal of the directory. Only after `is_made` has returned True."""
        assert self._opened is not None, "see `is_made`"
        return self._opened

    # Reading.

    def read(self, find: Callable[[State], list[Entry]]) -> list[Entry]:
        """The entries that `find` returns for the newest state. Before it returns, the leases of these entries that are
        over are ended, and everything that was read is synced."""
        while True:
            with self.os_errors():
                with self.lock:
                    if not self.is_made():
                        return []
                    self.catch_up()
                    entries = find(self.journal.state)
                    over = self._over_among(entry.key for entry in entries)
                    number, generation = self.journal.number, self.journal.generation
                if not over:
                    self._settle(number, generation)
                    return entries
            self.end_or_hide(over)

    def snapshot(self) -> Snapshot:
        """The persistent keys after one entry of the journal, all of it synced."""
        with self.os_errors():
            with self.lock:
                if not self.is_made():
                    return Snapshot((), "journal number 0")
                self.catch_up()
                entries = self.journal.state.persistent()
                number, generation = self.journal.number, self.journal.generation
            self._settle(number, generation)
        return Snapshot(entries, f"journal number {number}")

    def _settle(self, number: int, generation: Generation) -> None:
        """Sync the entries up to this number, which other processes may have published and not synced yet: no caller
        may act on a commit that a power loss could undo."""
        if number > self.journal.synced:
            generation.sync()
            self.journal.synced = max(self.journal.synced, number)

    def catch_up(self) -> None:
        """Apply the entries that were published since the last call, and wake the watches of their keys. The caller
        holds `lock`."""
        changed = self.journal.catch_up()
        if self.gone:
            self.gone.intersection_update(self.journal.state.leases)
        if changed is None or changed:
            self.wake(changed)

    # Committing.

    def commit(self, commit: Commit) -> dict[str, int]:
        """The new version of each key written, see `Registry.commit`."""
        self.check_writable()
        change = Change.of(commit)

        def check() -> None:
            """Raise the commit's refusal; `_Over` if ending leases that are over may remove the reason for it."""
            refusal = self.journal.state.refusal(commit.expect, change.lease)
            if isinstance(refusal, Conflict) and (over := self._over_among(refusal.keys)):
                raise _Over(over)
            if refusal is not None:
                raise refusal

        if not commit.changed:
            self._look(check)
            return {}
        number = self.publish(change, check)
        return dict.fromkeys(commit.written, number)

    def publish(self, change: Change, check: Callable[[], None]) -> int:
        """Publish the change once `check`, called with the newest state, does not raise; returns its number."""
        until = time.monotonic() + seconds_left(self._timeout)
        with self.os_errors():
            self._look(check)
            with self.journal.prepared(encode_entry(change, self.journal.synced)) as scratch:
                while (published := self.attempt(scratch, change, check)) is None:
                    if time.monotonic() > until:
                        raise RegistryUnavailable(
                            f"{self.url}: other processes committed first for {self._timeout:g} s; try again"
                        )
            try:
                self._settle(published.number, published.generation)
            except OSError as error:
                raise OutcomeUnknown(f"{self.url}: committed, but possibly not on disk yet: {error}") from error
            finally:
                self.wake(published.changed)
        self._may_end_leases = True  # an earlier refusal was that of another generation's folder
        self._compact_if_due()
        return published.number

    def _look(self, check: Callable[[], None]) -> None:
        """Call `check` with the newest state, and end the leases that are over if it raises `_Over`."""
        while True:
            try:
                with self.os_errors():
                    with self.lock:
                        self.catch_up()
                        check()
                        number, generation = self.journal.number, self.journal.generation
                    return self._settle(number, generation)
            except _Over as over:
                self.end_leases(over.leases)

    def attempt(self, scratch: str, change: Change, check: Callable[[], None]) -> Published | None:
        """Publish the change as the entry right after the state that `check` has seen; None if another process has
        published an entry meanwhile."""
        try:
            with self.lock:
                if self.journal.torn:
                    self.catch_up()
                check()
                published = self.journal.publish(scratch, change)
                if published is None:
                    self.catch_up()
                return published
        except _Over as over:
            self.end_leases(over.leases)
            return None

    def _compact_if_due(self) -> None:
        if not self.journal.compaction_due:
            return
        # The commit has been made, so the caller must not see an error. What this compaction leaves undone, the
        # compaction of a later generation does.
        try:
            with self.lock:
                self.journal.inspect_next()
                self.catch_up()
                if not self.journal.compaction_due or not self.journal.seal():
                    return
                self.catch_up()
                snapshot = self.journal.snapshot()
                leases = set(self.journal.state.leases)
            self.journal.finish_compaction(*snapshot)
            self._sweep_lease_files(leases)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("%s: compaction failed and will be tried again by a later commit: %s", self.url, error)

    def _sweep_lease_files(self, known: set[str]) -> None:
        """Remove the files of leases that never began, because their process died, and end all leases that are over."""
        names = {entry.name for entry in os.scandir(self.lease_folder)}
        for name in names - known:
            if is_id(name) and self.is_over(name):
                self._remove_lease_file(name)
        self.end_leases([lease for lease in known if self.is_over(lease)])

    # Leases that are over.

    def is_over(self, lease: str) -> bool:
        """Whether the lease has expired, or the process that held it has ended."""
        return is_over(self.lease_folder / lease, SYSTEM)

    def _over_among(self, keys: Iterable[str]) -> list[str]:
        """The leases that are over, of those that these keys are bound to."""
        records = self.journal.state.records
        leases = {records[key].lease for key in keys if key in records} - {None}
        return [lease for lease in leases if self.is_over(lease)]

    def end_or_hide(self, leases: Sequence[str]) -> None:
        """For a reader: end the leases, or leave their keys out of what is read if this process may not end them."""
        if not leases:
            return
        if self._may_end_leases:
            try:
                self.end_leases(leases)
                return
            except RegistryNotWritable as error:  # a folder in the directory belongs to another user
                log.warning(
                    "%s: expired leases cannot be ended by this process, so other processes have to: %s",
                    self.url,
                    error,
                )
                self._may_end_leases = False
        with self.lock:
            held = self.journal.state.leases
            self.gone.update(lease for lease in leases if lease in held)
            keys = [key for lease in leases for key in held.get(lease, ())]
        if keys:
            self.wake(keys)

    def end_leases(self, leases: Sequence[str]) -> None:
        """Remove the files of these leases, then write their end into the journal, unless another process has done so.

        In this order: without its file a lease is over, so if this process is killed in between, any other process
        writes the end. The other way round, a process that renews the lease would go on to do so, and would take the
        lease for alive although its keys are gone."""
        if not leases:
            return
        for lease in leases:
            self._remove_lease_file(lease)

        def check() -> None:
            if not any(lease in self.journal.state.leases for lease in leases):
                raise _Ended

        with contextlib.suppress(_Ended):
            self.publish(Change(leases_end=tuple(leases)), check)

    def _remove_lease_file(self, lease: str) -> None:
        try:
            (self.lease_folder / lease).unlink(missing_ok=True)
        except OSError as error:  # the lease ends in the journal all the same; the next compaction removes the file
            log.warning("%s: the file of lease %s was not removed: %s", self.url, lease, error)

    # Errors.

    def check_writable(self) -> None:
        """Raise RegistryNotWritable if this process was found at opening not to have the permission to write."""
        if self._refusal is not None:
            with self.os_errors():
                raise self._refusal

    @contextlib.contextmanager
    def os_errors(self) -> Iterator[None]:
        """Translate an error of the operating system that was raised before a commit took effect."""
        try:
            yield
        except OSError as error:
            where = f"{self.url}: {disk.explain(error)}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"{where}; nothing was written: free disk space, then try again") from error
            if (lacking := disk.denied(error, self.root)) is not None:
                what = f"{self.url}: {lacking.what}"
                raise RegistryNotWritable(lacking.path, what) if lacking.is_write else AccessDenied(what) from error
            if error.errno == errno.ENOTDIR:
                raise InvalidUrl(f"{where}; a file registry needs a directory") from error
            raise RegistryUnavailable(where) from error


class _Over(Exception):
    """Raised by a check that fails because of keys of leases that are over: end these leases and check again."""

    def __init__(self, leases: list[str]) -> None:
        self.leases = leases


class _Ended(Exception):
    """Another process has ended the leases already."""
