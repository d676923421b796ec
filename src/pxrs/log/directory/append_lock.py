"""The lock of a partition that a process holds while it appends, rolls, recovers or removes segments.

It is an flock(2) on the file `lock`, never on a data file, so that readers need no lock, and the lock of a process that
dies is free. A process that is stopped keeps the lock: others wait for it up to a limit, and then raise LogBusy.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Final

from pxrs.errors import DamagedFrame, LogBusy
from pxrs.waiting import seconds_left

PAUSE_S_MIN: Final = 0.00005
PAUSE_S_MAX: Final = 0.005
"""The pause between two tries doubles from the first of these to the second."""


class AppendLock:
    """The open lock file of one partition. Not thread-safe: the partition's threads take a lock of their own first."""

    def __init__(self, folder: str, place: str, timeout: float) -> None:
        """place: names the partition in messages. timeout: seconds that `acquire` waits. Raises OSError."""
        self.path, self._place, self._timeout = f"{folder}/lock", place, timeout
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def acquire(self) -> None:
        """Take the lock. Raises LogBusy after the timeout, or when the limit of this thread is over
        (`waiting.time_limit`)."""
        began = time.monotonic()
        until = began + seconds_left(self._timeout)
        pause = PAUSE_S_MIN
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if (now := time.monotonic()) >= until:
                    raise LogBusy(
                        f"{self._place}: another process has held the append lock for {now - began:.3g} s; it may be "
                        f"suspended: see which process has {self.path} open"
                    ) from None
                time.sleep(min(pause, until - now))
                pause = min(2 * pause, PAUSE_S_MAX)

    def release(self) -> None:
        """Release the lock, even if it is not held: an interrupt may come before or after `acquire` has taken it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def check_in_place(self) -> None:
        """Raise DamagedFrame if the file was removed, or removed and made again: processes that have the other file
        open would not be kept out."""
        ours = os.fstat(self._descriptor)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            what = "the lock file was removed; open the log again in every process"
            raise DamagedFrame(self.path, 0, what) from None
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise DamagedFrame(self.path, 0, "it was removed and created again while the log was open")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
