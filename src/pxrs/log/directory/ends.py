"""The ends of a topic's partitions, for a reader that asks again and again while nothing is appended.

Reading one published end takes two system calls and two checksums. A streaming query asks for all of them many times a
second, mostly to learn that nothing has changed. So the ends are kept, and the kernel tells which of the files that
hold them were written since: without a change, a look is one system call, however many partitions there are.

Order: events are taken before the ends are read, so what is published in between is read now, or told the next time.
Where the kernel does not tell (no inotify, or too few watches), every end is read each time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from pxrs.inotify import ATTRIB, DELETE_SELF, MODIFY, Notifier

_logger = logging.getLogger(__name__)
_READS_MAX: Final = 16
"""How often events are taken at one look: more than the kernel keeps. Whoever has more to tell is read whole."""


class Ends:
    """Made at the first look. Threads share it."""

    def __init__(self, partitions: int, end_of: Callable[[int], int], path_of: Callable[[int], str]) -> None:
        """`end_of` reads the end of a partition; when the file or folder that `path_of` names is modified, the end may
        have moved."""
        self._end_of, self._path_of = end_of, path_of
        self._lock = threading.Lock()
        self._ends = [0] * partitions
        self._stale = set(range(partitions))
        """Partitions whose end is to be read."""
        self._notifier: Notifier | None = None
        self._watched: dict[int, int] = {}
        """By the kernel's number of a watch, the partition."""
        self._told: set[int] = set()
        """The partitions that have a watch."""
        self._may_watch = True
        """Whether the kernel is asked to tell of changes; False once that has failed."""
        self._is_closed = False

    def look(self) -> list[int]:
        """The ends of all partitions. Raises what `end_of` raises, and then reads that partition again."""
        with self._lock:
            self._note_changes()
            for number in sorted(self._stale):
                end = self._end_of(number)  # first, because it makes the file that is watched, if it may
                if number not in self._told and self._watch(number):
                    end = self._end_of(number)  # again: it may have moved before the watch was there
                self._ends[number] = end
                if number in self._told:
                    self._stale.discard(number)
            return self._ends.copy()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._notifier is not None:
                self._notifier.close()
                self._notifier = None

    def _note_changes(self) -> None:
        if self._notifier is None or not self._watched:
            return
        try:
            for _ in range(_READS_MAX):
                news = self._notifier.wait(0)
                self._stale.update(self._watched[each] for each in news.changed if each in self._watched)
                if news.overflow:
                    break
                if not news.changed:
                    return
        except BaseException:  # an interrupt: events that were taken are not told again
            self._stale.update(range(len(self._ends)))
            raise
        self._stale.update(range(len(self._ends)))

    def _watch(self, number: int) -> bool:
        """Whether changes of this partition are told from now on."""
        if not self._may_watch or self._is_closed:
            return False
        try:
            if self._notifier is None:
                self._notifier = Notifier()
            watch = self._notifier.add(self._path_of(number), MODIFY | ATTRIB | DELETE_SELF)
        except OSError as error:
            self._may_watch = False
            _logger.warning(
                "every look at the end of a topic reads all partitions, because the system does not tell of changes "
                "(%s); see fs.inotify.max_user_watches and max_user_instances",
                error,
            )
            return False
        if watch is None:
            self._may_watch = False
            return False
        self._watched[watch] = number
        self._told.add(number)
        return True
