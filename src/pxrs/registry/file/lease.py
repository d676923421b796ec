"""Leases as files: each living lease has a file `leases/<id>` that says until when it lives.

A renewal writes a new expiry into the file. The expiry is on `CLOCK_BOOTTIME`, which all processes of the machine
share, so every process judges it exactly. What ends a lease is an entry in the journal, which any process may write
once the lease is over; the file is then removed.

Two kinds of leases:

    kind      taken with                   is over when
    --------  ---------------------------  --------------------------------------------------------------------
    held      `lease(ttl)`                 its expiry has passed, or the process that took it is gone: that process
                                           keeps the file open with an flock, which the kernel drops with the process
    unheld    `lease(ttl, renewed=False)`  its expiry has passed

The flock is never waited for. A holder that is stopped stops renewing, and its lease is over by age.

A renewal counts only if it was *finished* before the previous expiry had come: then whoever reads the file after that
time sees the new expiry. A holder that was stopped in the middle of a renewal finds itself late, and its lease lost.

Several processes may renew one lease, because others attach with its secret. Two renewals at the same time could finish
in the wrong order and leave the earlier of two expiries in the file, though the later one was returned. So a renewal
holds a second lock, on the first byte of the file, while it reads the previous expiry and writes the new one. A process
that is stopped in between keeps others from renewing this one lease, which then is over at its expiry.

The flock belongs to the open file, which a forked child would share and keep alive: the child closes its copy at once.

File format: expiry, boot id, ttl, whether it is held. Version 0.1 wrote the first two only, for held leases. The file
is not synced, because no lease outlives the boot of the machine. A power loss may leave a file that is shorter than
that, or empty: its lease is over, as every lease of an earlier boot is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pxrs.clock import Clock, boot_id
from pxrs.errors import LeaseExpired, RegistryUnavailable

_DATE: Final = struct.Struct("<d36s")
_WHOLE: Final = struct.Struct("<d36sd?")

# A lock of the open file, where the system has it: one of the process would be dropped when any other descriptor of the
# same file is closed.
_SET_OPEN_FILE_LOCK: Final = getattr(fcntl, "F_OFD_SETLK", None)
_LOCK_REQUEST: Final = struct.Struct("hhqqi")

RENEWAL_LOCK_S_MAX: Final = 1.0
"""How long a renewal waits for another one of the same lease."""
_LOCK_PAUSE_S: Final = 0.001


class Record(NamedTuple):
    """What the file of a lease says."""

    expiry: float
    boot: bytes
    ttl: float | None
    """None in a file of version 0.1."""
    is_held: bool


class LeaseFile:
    """The file of one lease, as this process renews it. If it holds the lease it keeps the file open; otherwise it
    opens the file for each renewal, so that unheld leases cost no descriptor."""

    def __init__(self, path: Path, ttl: float, clock: Clock, descriptor: int = -1) -> None:
        """`descriptor`: the open and locked file of a held lease; -1 if this process does not hold the lease."""
        self.ttl = ttl
        self._path, self._clock = path, clock
        self._guard = threading.Lock()
        """Held while the descriptor is used, so that it is not closed during a renewal."""
        self._holds = descriptor >= 0
        self._descriptor = descriptor
        if self._holds:
            _held.add(self)

    @classmethod
    def create(cls, folder: Path, scratch: Path, lease: str, ttl: float, clock: Clock, *, is_held: bool) -> LeaseFile:
        prepared = scratch / lease
        descriptor = os.open(prepared, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        file = cls(folder / lease, ttl, clock, descriptor)
        try:
            # Locked and written before it gets its name: no other process ever sees it otherwise.
            if is_held:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, _WHOLE.pack(clock.now() + ttl, boot_id().encode(), ttl, is_held), 0)
            os.rename(prepared, folder / lease)
        except BaseException:
            file.let_go()
            with contextlib.suppress(OSError):  # swept later
                os.unlink(prepared)
            raise
        if is_held:
            return file
        file.let_go()
        return cls(folder / lease, ttl, clock)

    def renew(self) -> float:
        """Write a new expiry; returns it."""
        with self._opened() as descriptor:
            with _renewal_lock(descriptor, self._path.name, min(self.ttl / 4, RENEWAL_LOCK_S_MAX)):
                previous = _read(descriptor).expiry
                now = self._clock.now()
                if now < previous:
                    expiry = max(previous, now + self.ttl)
                    os.pwrite(descriptor, _DATE.pack(expiry, boot_id().encode()), 0)
            if now >= previous or self._clock.now() >= previous:
                raise LeaseExpired(f"lease {self._path.name} was renewed too late")
            return expiry

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The open file, once it is known to be the one that other processes find: whoever ends a lease removes its
        file, and if the whole directory was replaced, others look at the file of the same name there."""
        if not self._holds:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise LeaseExpired(f"lease {self._path.name} was ended") from None
            try:
                yield descriptor
            finally:
                os.close(descriptor)
            return
        with self._guard:
            if self._descriptor < 0:
                raise LeaseExpired(f"lease {self._path.name} was closed")
            try:
                found = os.stat(self._path)
            except (FileNotFoundError, NotADirectoryError):
                raise LeaseExpired(f"lease {self._path.name} was ended") from None
            if not os.path.samestat(os.fstat(self._descriptor), found):
                raise LeaseExpired(f"{self._path}: the file of the lease was replaced by another one")
            yield self._descriptor

    def remove(self) -> None:
        """Remove the file, then let go of the lock."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        finally:
            # A write that hangs keeps the descriptor: closing it now could hand its number to another file.
            if self._guard.acquire(timeout=1.0):
                try:
                    self.let_go()
                finally:
                    self._guard.release()

    def let_go(self) -> None:
        """Close the file. In a forked child this leaves the parent's lock as it is."""
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(self)
        if descriptor >= 0:
            os.close(descriptor)


class FileLease:
    """One lease of a file registry, see `registry.lease.StoredLease`."""

    def __init__(
        self,
        file: LeaseFile,
        end: Callable[[], None],
        os_errors: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """`end` writes the end of the lease into the journal; `os_errors` translates errors of the system."""
        self._file, self._end, self._os_errors = file, end, os_errors

    def renew(self) -> float:
        with self._os_errors():
            return self._file.renew()

    def end(self) -> None:
        try:
            self._end()
        finally:
            self._file.remove()

    def let_go(self) -> None:
        self._file.let_go()


def expiry_of(path: str | os.PathLike[str]) -> float | None:
    """When the lease of this file ends by age, on the machine's clock; None if it is over already: the process that
    holds it is gone, or the machine was started anew.

    Compare it with a time taken *before* this call: with a later one, an observer that was stopped in between would
    hold an old expiry against it, and end a lease that was renewed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _read(descriptor).is_held:
            with contextlib.suppress(BlockingIOError):
                # A shared lock: two processes that ask at the same time must not take each other for the holder.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
        record = _read(descriptor)
        return record.expiry if record.boot == boot_id().encode() else None
    finally:
        os.close(descriptor)


def is_over(path: str | os.PathLike[str], clock: Clock) -> bool:
    """Whether the lease of this file is over: its expiry has passed, its holder is gone, or there is no file."""
    now = clock.now()  # before the file is read, see `expiry_of`
    expiry = expiry_of(path)
    return expiry is None or now >= expiry


def read(path: str | os.PathLike[str]) -> Record | None:
    """What the file of a lease says; None if there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Record:
    data = os.pread(descriptor, _WHOLE.size, 0)
    if len(data) < _DATE.size:  # no process writes so few bytes: a power loss has cut the file off
        return Record(float("-inf"), b"", None, False)
    if len(data) < _WHOLE.size:
        expiry, boot = _DATE.unpack_from(data)
        return Record(expiry, boot, None, True)
    return Record(*_WHOLE.unpack(data))


@contextlib.contextmanager
def _renewal_lock(descriptor: int, lease: str, wait_s: float) -> Iterator[None]:
    """Keep other renewals of the lease out, in any process."""
    until = time.monotonic() + wait_s
    while not _set_lock(descriptor, fcntl.F_WRLCK, fcntl.LOCK_EX):
        if time.monotonic() >= until:
            raise RegistryUnavailable(f"lease {lease}: another renewal of it has been running for {wait_s:g} s")
        time.sleep(_LOCK_PAUSE_S)
    try:
        yield
    finally:
        _set_lock(descriptor, fcntl.F_UNLCK, fcntl.LOCK_UN)


def _set_lock(descriptor: int, kind: int, portable_kind: int) -> bool:
    """False if another one has the lock."""
    try:
        if _SET_OPEN_FILE_LOCK is not None:
            fcntl.fcntl(descriptor, _SET_OPEN_FILE_LOCK, _LOCK_REQUEST.pack(kind, os.SEEK_SET, 0, 1, 0))
        else:  # pragma: no cover - not on Linux
            fcntl.lockf(descriptor, portable_kind | fcntl.LOCK_NB, 1)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


_held: weakref.WeakSet[LeaseFile] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for file in list(_held):
        file.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
