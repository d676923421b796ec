"""Time as the project uses it: seconds on a clock that never steps and that counts suspend (R6).

A lease's deadline on a clock that stops while a laptop sleeps would still look good after the store
has given the lease away. `CLOCK_BOOTTIME` counts sleep on Linux; on macOS `CLOCK_MONOTONIC` does.
It is the same clock in every process of one machine, and says nothing about another machine.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", None) or getattr(time, "CLOCK_MONOTONIC", None)


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment."""

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Wait until the event is set (True) or the time has passed (False)."""


class SystemClock:
    """The machine's own clock."""

    def __init__(self) -> None:
        # A call of C code alone: every message that is handed out asks.
        self._now = time.monotonic if _CLOCK_ID is None else functools.partial(time.clock_gettime, _CLOCK_ID)

    @property
    def now(self) -> Callable[[], float]:
        return self._now

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        return event.wait(timeout)


class ManualClock:
    """A clock that moves when told to, for tests of what happens over time."""

    def __init__(self, start: float = 1_000.0) -> None:
        self._now = start
        self._moved = threading.Condition()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        until = None if timeout is None else self._now + timeout
        with self._moved:
            while not event.is_set():
                if until is not None and self._now >= until:
                    return False
                # The event is set by code that knows nothing of this clock, so look at it now and then.
                self._moved.wait(0.005)
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


def microseconds(seconds: float | None) -> int | None:
    """Wall-clock seconds since 1970 as whole microseconds. None for 0, which records of version 0.1 have where no time
    was written down, and for what is no number."""
    return round(seconds * 1e6) if seconds and math.isfinite(seconds) else None


def rfc3339(time_us: int) -> str | None:
    """A wall-clock time, in microseconds since 1970, as RFC 3339 writes it in UTC: 2026-01-31T12:00:00.123456Z. None if
    the calendar does not go as far: it has the years 1 to 9999."""
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
