"""Being told of changes in folders: inotify through the C library on Linux; elsewhere a look twenty times a second."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import threading
from dataclasses import dataclass, field

MODIFY, ATTRIB, CLOSE_WRITE, CREATE, DELETE = 0x2, 0x4, 0x8, 0x100, 0x200
DELETE_SELF, MOVE_SELF, OVERFLOW = 0x400, 0x800, 0x4000
_EVENT = struct.Struct("iIII")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class News:
    """What happened while waiting."""

    overflow: bool = False
    closed: frozenset[str] = field(default_factory=frozenset)
    """Names of files that a writer has closed, by itself or by dying."""
    changed: frozenset[int] = field(default_factory=frozenset)
    """The watches, as `add` has numbered them, of which anything was told."""


class Notifier:
    """Waits for changes in some folders. One thread waits; any thread may `interrupt` it."""

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

    def add(self, folder: str, mask: int) -> int | None:
        """The number of the watch; None where there is no inotify. Raises FileNotFoundError if the folder is not
        there."""
        if self._inotify < 0:  # pragma: no cover - not Linux
            return None
        return self._check(self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), mask), folder)

    def wait(self, timeout: float | None) -> News:
        if self._inotify < 0:  # pragma: no cover - not Linux
            timeout = _POLL_S if timeout is None else min(timeout, _POLL_S)
        poll = select.poll()
        for descriptor in (self._inotify, self._interrupt_out):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        # Whoever waits longer than a day looks once a day: the system takes no number that large.
        ready = dict(poll.poll(None if timeout is None else min(max(0.0, timeout), 86_400.0) * 1000))
        if self._interrupt_out in ready:
            os.read(self._interrupt_out, 4096)
        return self._read() if self._inotify in ready else News()

    def _read(self) -> News:
        data, position = os.read(self._inotify, 1 << 16), 0
        overflow, closed, changed = False, set(), set()
        while position < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, position)
            begin = position + _EVENT.size
            position = begin + length
            overflow |= bool(mask & OVERFLOW)
            changed.add(watch)
            if mask & CLOSE_WRITE:
                closed.add(os.fsdecode(data[begin:position].rstrip(b"\0")))
        return News(overflow, frozenset(closed), frozenset(changed))

    def interrupt(self) -> None:
        """Make the waiting thread return at once. After `close` it does nothing."""
        with self._guard:
            if self._closed:
                return
            try:
                os.write(self._interrupt_in, b"!")
            except BlockingIOError:  # it has been interrupted thousands of times already
                return

    def close(self) -> None:
        """For the waiting thread, when it is done."""
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
