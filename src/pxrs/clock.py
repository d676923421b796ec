"""Time as the project uses it: seconds on a clock that never steps and that counts suspend (R6), and the time of day.

On a clock that stops while the machine is suspended, the deadline of a lease would seem to be ahead after the store has
ended the lease. `CLOCK_BOOTTIME` counts suspended time on Linux, `CLOCK_MONOTONIC` on macOS. All processes of one
machine read the same clock; readings of two machines cannot be compared.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from pxrs import arguments
from pxrs.errors import InvalidArgument
from pxrs.model import microseconds_of

_ADVANCE_S_MAX: Final = 100 * arguments.WAIT_S_MAX
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", None) or getattr(time, "CLOCK_MONOTONIC", None)


class Clock(Protocol):
    """The time for a registry and everything that uses it. Leases, hand-over and progress deadlines,
    commit intervals and the pauses of `Consumer.run` are counted by `now`; delays and backoffs of queues, and the ages
    of stored messages, which outlive a process, by `wall_time_us`."""

    def now(self) -> float:
        """Seconds since some fixed moment."""

    def wall_time_us(self) -> int:
        """Microseconds since 1970, UTC."""

    def wait(self, event: threading.Event, until: float | None, timeout: float | None = None) -> bool:
        """Wait until the event is set (True), or until `now` has reached `until` or `timeout` seconds of the machine's
        time have passed (False); None: without that bound.

        `until` is a moment, not a duration: if the clock moves after the caller has read it and before this call
        begins to wait, the wait still ends at the intended moment."""


class SystemClock:
    """The machine's own clock."""

    def __init__(self) -> None:
        # A function of C without a Python frame, because it is called for every message that is handed out.
        self._now = time.monotonic if _CLOCK_ID is None else functools.partial(time.clock_gettime, _CLOCK_ID)

    @property
    def now(self) -> Callable[[], float]:
        return self._now

    def wall_time_us(self) -> int:
        return wall_time_us()

    def wait(self, event: threading.Event, until: float | None, timeout: float | None = None) -> bool:
        if until is not None:
            left = max(0.0, until - self._now())
            timeout = left if timeout is None else min(left, timeout)
        return event.wait(timeout)


class ManualClock:
    """A clock that only `advance` moves, for tests of what happens over time. Threads share it.

    `advance` moves `now` and `wall_time_us` together. Threads that wait on this clock notice it within POLL_S."""

    POLL_S: Final = 0.005
    """How often a waiting thread reads the clock: it sleeps on the event, which `advance` does not set."""

    def __init__(self, start: float = 1_000.0, wall: datetime | None = None) -> None:
        """start: the first value of `now`. wall: the date at which `wall_time_us` begins, with a time zone; by default
        the machine's present time."""
        if wall is not None and wall.tzinfo is None:
            raise InvalidArgument(f"wall: the time {wall} has no time zone; give one, such as UTC")
        self._now = start
        wall_us = wall_time_us() if wall is None else microseconds_of(wall)
        self._wall_us_at_zero = wall_us - round(start * 1_000_000)
        self._lock = threading.Lock()
        self._readings = 0

    def now(self) -> float:
        return self._now

    def wall_time_us(self) -> int:
        """Each reading is one microsecond later than the one before it, even if the clock was not advanced: items of a
        queue are taken in the order of the times at which they were put."""
        with self._lock:
            self._readings += 1
            return self._wall_us_at_zero + round(self._now * 1_000_000) + self._readings

    def advance(self, seconds: float | timedelta) -> None:
        """Move the clock forward by these seconds. Raises InvalidArgument for a negative number: this clock never goes
        back."""
        passed = arguments.seconds(InvalidArgument, "seconds", seconds, 0, _ADVANCE_S_MAX)
        with self._lock:
            self._now += passed

    def wait(self, event: threading.Event, until: float | None, timeout: float | None = None) -> bool:
        gives_up_at = None if timeout is None else time.monotonic() + timeout
        while not event.is_set():
            pause = self.POLL_S if gives_up_at is None else min(self.POLL_S, gives_up_at - time.monotonic())
            if pause <= 0 or (until is not None and self._now >= until):
                return False
            event.wait(pause)
        return True


SYSTEM = SystemClock()


@functools.cache
def boot_id() -> str:
    """Names this boot of this machine: `SystemClock` readings of two boots must not be compared."""
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if sys.platform == "darwin":  # pragma: no cover - not run here
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    raise OSError(f"no boot id on {sys.platform}")  # pragma: no cover


def wall_time_us() -> int:
    """The time that stored messages are stamped with, and that their age is counted by: microseconds since 1970."""
    return time.time_ns() // 1000
