"""Events of changed files: inotify, called through the C library, on Linux. On other systems there are no events, and
`Notifier.wait` returns every 50 ms, so that the caller reads the files."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import threading
from dataclasses import dataclass, field

MODIFY, ATTRIB, CLOSE_WRITE, CREATE, DELETE = 0x2, 0x4, 0x8, 0x100, 0x200
DELETE_SELF, MOVE_SELF, OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
_EVENT = struct.Struct("iIII")
_POLL_S = 0.05
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class News:
    """The events that one read of the kernel's queue returned."""

    overflow: bool = False
    """The kernel dropped events: anything that is watched may have changed."""
    closed: frozenset[str] = field(default_factory=frozenset)
    """Names of files that were removed from a watched folder, or closed by a process that had them open for writing,
    also because that process ended."""
    changed: frozenset[int] = field(default_factory=frozenset)
    """Numbers of the watches, as `Notifier.add` returned them, that have any event."""
    ended: frozenset[int] = field(default_factory=frozenset)
    """Numbers of the watches that the kernel has removed, because their file is gone. They are in `changed` too."""


class Notifier:
    """An inotify instance. One thread waits on it; any thread may `interrupt` that thread, `add`, or `take`."""

    def __init__(self) -> None:
        self._inotify = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._inotify = self._check(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1")
        try:
            self._interrupt_out, self._interrupt_in = os.pipe()
        except BaseException:
            if self._inotify >= 0:
                os.close(self._inotify)
            raise
        os.set_blocking(self._interrupt_in, False)
        self._guard = threading.Lock()
        self._closed = False

    @property
    def has_events(self) -> bool:
        """False without inotify: `sleep` and `wait` then return every 50 ms, and the caller must read the files."""
        return self._inotify >= 0

    def add(self, folder: str, mask: int) -> int | None:
        """Watch a file or folder; the number of the watch, or None where there is no inotify. Raises FileNotFoundError
        if it is not there."""
        if self._inotify < 0:  # pragma: no cover - not Linux
            return None
        return self._check(self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), mask), folder)

    def remove(self, watch: int) -> None:
        """End a watch. One that the kernel has removed already is no error."""
        if self._inotify >= 0:
            self._libc.inotify_rm_watch(self._inotify, watch)

    def wait(self, timeout: float | None) -> News:
        """Sleep until there are events, `interrupt` is called, or this number of seconds has passed. Returns the
        events."""
        self.sleep(timeout)
        return self.take()

    def sleep(self, timeout: float | None) -> None:
        """As `wait`, without reading the events: `take` returns them. Without inotify, returns after 50 ms at the
        latest."""
        if self._inotify < 0:  # pragma: no cover - not Linux
            timeout = _POLL_S if timeout is None else min(timeout, _POLL_S)
        poll = select.poll()
        for descriptor in (self._inotify, self._interrupt_out):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        # `poll` refuses very large numbers, so a longer wait returns once a day.
        ready = dict(poll.poll(None if timeout is None else min(max(0.0, timeout), 86_400.0) * 1000))
        if self._interrupt_out in ready:
            os.read(self._interrupt_out, 4096)

    def take(self) -> News:
        """The events that are there now, up to 64 KiB of them; never waits."""
        if self._inotify < 0:  # pragma: no cover - not Linux
            return News()
        try:
            data, position = os.read(self._inotify, _READ_BYTES), 0
        except BlockingIOError:
            return News()
        overflow, closed, changed, ended = False, set(), set(), set()
        while position < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, position)
            begin = position + _EVENT.size
            position = begin + length
            overflow |= bool(mask & OVERFLOW)
            changed.add(watch)
            if mask & IGNORED:
                ended.add(watch)
            if mask & (CLOSE_WRITE | DELETE):
                closed.add(os.fsdecode(data[begin:position].rstrip(b"\0")))
        return News(overflow, frozenset(closed), frozenset(changed), frozenset(ended))

    def interrupt(self) -> None:
        """Make the waiting thread return at once. After `close` this does nothing."""
        with self._guard:
            if self._closed:
                return
            try:
                os.write(self._interrupt_in, b"!")
            except BlockingIOError:  # the pipe is full: thousands of interrupts are waiting to be read
                return

    def close(self) -> None:
        """Call it only when no thread waits: the numbers of the closed descriptors may be given to other files."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        for descriptor in (self._inotify, self._interrupt_out, self._interrupt_in):
            if descriptor >= 0:
                os.close(descriptor)

    @staticmethod
    def _check(result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)
        return result
