"""Whether the holder of a lease is alive: a kernel lock for crashes, a heartbeat for hangs.

Each lease has a file that its holder keeps open, locked and dated. The kernel drops the lock with the process, so
a killed holder is noticed at once; a stopped one stops dating its file and expires by age. The lock is never waited
for and guards nothing: what ends a lease is an entry in the journal, and anyone may write it.

The date is on `CLOCK_BOOTTIME`, which all processes of the machine share, so ages are exact. A renewal counts only if
it was *finished* before the previous date had come: then whoever reads the file after that date sees the new one. A
holder that was stopped in the middle of renewing finds itself late, and out.

The lock belongs to the open file, which a forked child would share and keep alive: the child closes its copy at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
from pathlib import Path

from pxrs.clock import Clock, boot_id
from pxrs.errors import LeaseExpired

_DATE = struct.Struct("<d36s")


class LeaseFile:
    """The holder's side."""

    def __init__(self, folder: Path, scratch: Path, lease: str, ttl: float, clock: Clock) -> None:
        self._path = folder / lease
        self._ttl, self._clock = ttl, clock
        self._guard = threading.Lock()
        """Held while the descriptor is used, so that it is not closed under a renewal."""
        prepared = scratch / lease
        self._descriptor = os.open(prepared, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        _held.add(self)
        try:
            # Locked and dated before it gets its name: nobody ever sees it otherwise.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._expiry = clock.now() + ttl
            self._date(self._expiry)
            os.rename(prepared, self._path)
        except BaseException:
            self.let_go()
            with contextlib.suppress(OSError):  # swept later
                os.unlink(prepared)
            raise

    def renew(self) -> float:
        """Date the file anew; returns the new expiry."""
        self._check_in_place()
        expiry = self._clock.now() + self._ttl
        self._date(expiry)
        previous, self._expiry = self._expiry, expiry
        if self._clock.now() >= previous:
            raise LeaseExpired(f"lease {self._path.name} was renewed too late")
        return expiry

    def _check_in_place(self) -> None:
        """Raise LeaseExpired if others do not find this file: whoever ends a lease removes its file, and if the whole
        directory was replaced, others look at the file of the same name there."""
        with self._guard:
            if self._descriptor < 0:
                raise LeaseExpired(f"lease {self._path.name} was let go")
            held = os.fstat(self._descriptor)
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            raise LeaseExpired(f"lease {self._path.name} was ended") from None
        if not os.path.samestat(held, found):
            raise LeaseExpired(f"{self._path}: the file of the lease was replaced by another one")

    def _date(self, expiry: float) -> None:
        date = _DATE.pack(expiry, boot_id().encode())
        with self._guard:
            if self._descriptor < 0:
                raise LeaseExpired(f"lease {self._path.name} was let go")
            os.pwrite(self._descriptor, date, 0)

    def remove(self) -> None:
        """Unname the file, then let go of the lock."""
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


def expiry_of(path: str | os.PathLike[str]) -> float | None:
    """When the lease of this file ends by age, on the machine's clock; None if its holder is dead already.

    Compare it with a time taken *before* this call: with a later one, an observer that was stopped in between would
    hold an old date against it, and end a lease that was renewed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A shared lock: two who ask at once must not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        expiry, boot = _DATE.unpack(os.pread(descriptor, _DATE.size, 0))
        return float(expiry) if boot == boot_id().encode() else None
    finally:
        os.close(descriptor)
    return None


_held: weakref.WeakSet[LeaseFile] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for file in list(_held):
        file.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
