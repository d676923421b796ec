"""The ends of a topic's partitions, for readers that ask again and again while nothing is appended.

Reading one published end takes two system calls and two checksums. A streaming query asks for all of them many times a
second, and a reader that waits asks after each change, mostly to learn that nothing has changed. So the ends are kept
here, and the log's `Tailer` notes which of the files that hold them were modified since: without a change, a look is
one system call, however many partitions there are.

Each partition has two counters. The tailer raises `_noted` for each event; a reader remembers, in `_seen`, the value of
`_noted` from before it read the file. An end is current if both are equal. So an event that arrives while the file is
being read causes another read.

Where files cannot be watched (no inotify, or too few watches), every end is read each time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from pxrs.log.directory.tailing import Tailer
from pxrs.waiting import Callback, Subscribers, Subscription

_logger: Final = logging.getLogger(__name__)
_NEVER: Final = -1


class Ends:
    """Threads share it. It reads nothing before it is first asked."""

    def __init__(
        self, tailer: Tailer, partitions: int, end_of: Callable[[int], int], path_of: Callable[[int], str]
    ) -> None:
        """end_of: reads the end of a partition. path_of: names the file or folder that is modified whenever the end of
        a partition moves."""
        self._tailer, self._end_of, self._path_of = tailer, end_of, path_of
        self._ends = [0] * partitions
        self._noted = [0] * partitions
        """How many events the tailer has noted, by partition. Changes under the tailer's lock."""
        self._seen = [_NEVER] * partitions
        """The value of `_noted` before the end in `_ends` was read, by partition. Changes under the partition's
        lock."""
        self._is_watched = [False] * partitions
        self._locks = [threading.Lock() for _ in range(partitions)]
        """One for each partition: a partition that is slow to read, because it is being recovered, keeps no reader of
        another one waiting."""
        self._may_watch = True
        """False once the system has refused a watch. After that, `of` asks for no further watch; `subscribe` still
        does."""
        self._subscribers = Subscribers()

    def look(self) -> list[int]:
        """The ends of all partitions. Raises what `end_of` raises, and reads that partition again the next time."""
        self.refresh()
        return [self.of(number) for number in range(len(self._ends))]

    def refresh(self) -> None:
        """Note all changes that happened before this call. To be called before `of`."""
        self._tailer.take()

    def of(self, number: int) -> int:
        """The end of a partition, as new as the last `refresh`. Raises what `end_of` raises."""
        if self._is_current(number):
            return self._ends[number]
        with self._locks[number]:
            if self._is_current(number):  # another thread has read it while this one waited for the lock
                return self._ends[number]
            noted = self._noted[number]
            end = self._end_of(number)  # before the watch, because this creates the watched file if it may
            if not self._is_watched[number] and self._may_watch and self._try_watch(number):
                noted = self._noted[number]
                end = self._end_of(number)  # read again: the end may have moved before the watch was set
            self._ends[number] = end
            if self._is_watched[number]:
                self._seen[number] = noted
            return end

    def subscribe(self, numbers: Iterable[int], callback: Callback) -> Subscription:
        """Call the callback after each change of an end of these partitions. Raises OSError if the system refuses a
        watch, and what `path_of` raises."""
        chosen = tuple(numbers)
        for number in chosen:
            if not self._is_watched[number]:
                with self._locks[number]:
                    self._watch(number)
        return self._subscribers.add_needing(self._tailer.thread, chosen, callback)

    def close(self) -> None:
        """End the watches and call all callbacks: the topic then raises Closed in the threads that wait."""
        self._tailer.forget(self)
        self._subscribers.wake_all()

    def _is_current(self, number: int) -> bool:
        return self._seen[number] == self._noted[number] and self._is_watched[number]

    def _try_watch(self, number: int) -> bool:
        try:
            self._may_watch = self._watch(number)
        except OSError as error:
            self._may_watch = False
            _logger.warning(
                "every check of a topic's end reads all partitions, because the system cannot report changes (%s); see "
                "fs.inotify.max_user_watches and max_user_instances",
                error,
            )
        return self._is_watched[number]

    def _watch(self, number: int) -> bool:
        """Watch the file of a partition. The caller holds the lock of the partition. False if this system cannot watch
        files."""
        if not self._is_watched[number]:
            # Set first: an event that ends the watch may be noted before `follow` returns, and must not be overwritten.
            self._is_watched[number] = True
            is_followed = False
            try:
                is_followed = self._tailer.follow(self, number, self._path_of(number))
            finally:
                if not is_followed:
                    self._is_watched[number] = False
            self._seen[number] = _NEVER  # ends that were read before the watch was set may be old
            return is_followed
        return True

    # What the tailer calls.

    def note(self, partitions: Iterable[int]) -> None:
        for number in partitions:
            self._noted[number] += 1

    def note_unwatched(self, partition: int) -> None:
        self._noted[partition] += 1
        self._is_watched[partition] = False

    def note_all(self) -> None:
        self.note(range(len(self._noted)))

    def wake(self, partitions: Iterable[int] | None) -> None:
        if partitions is None:
            self._subscribers.wake_all()
        else:
            self._subscribers.wake(partitions)
