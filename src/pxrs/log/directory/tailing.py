"""One inotify instance and at most one thread for an open log, whatever number of readers wait on it (W6).

Every publication of a partition's end modifies a file, in whichever process it happens; the kernel queues an event for
it before the write returns. `take` reads that queue and passes the events on to the topics (`Followed`). Two kinds of
callers do this:

- Whoever asks for an end calls `take` first. So an end that was published before the question is never missed, though
  the tailer's thread may not have been scheduled yet.
- The tailer's thread, while anyone is subscribed, sleeps until the queue has an event and then calls `take`.

`_lock` is held from the read of the queue until the events are noted in the topics, so that no caller finds the queue
empty while an event of it is noted nowhere. Callbacks are called after `_lock` is released.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, Protocol

from pxrs.inotify import ATTRIB, DELETE_SELF, MODIFY, Notifier
from pxrs.waiting import BackgroundThread

_READS_MAX: Final = 16
"""How often one `take` reads the queue: more than it can hold. If more is left, everything counts as changed."""
_SLEEP_S: Final = 30.0
"""How long the thread sleeps at most, so that it notices that nobody needs it any more."""


class Followed(Protocol):
    """A topic that the tailer tells of changes."""

    def note(self, partitions: Iterable[int]) -> None:
        """Ends of these partitions may have moved. Called under the tailer's lock: must not block."""

    def note_unwatched(self, partition: int) -> None:
        """The kernel has ended the watch of this partition. Called under the tailer's lock."""

    def note_all(self) -> None:
        """Any end may have moved. Called under the tailer's lock."""

    def wake(self, partitions: Iterable[int] | None) -> None:
        """Call the callbacks for these partitions, or all of them. Called without the tailer's lock."""


class Tailer:
    """Made with the log, opened at the first `follow`. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notifier: Notifier | None = None
        self._followed: dict[int, tuple[Followed, int]] = {}
        """By the kernel's number of a watch: the topic and partition that it is for."""
        self._topics: set[Followed] = set()
        self._is_closed = False
        self.thread = BackgroundThread("pxrs-log-tailer", self._step, self._interrupt, self._drop)
        """Needed by subscribers: see `BackgroundThread.need`."""

    def follow(self, topic: Followed, partition: int, path: str) -> bool:
        """Tell the topic when the file, or a file in the folder, of this path is modified. False if this system cannot
        tell. Raises OSError if it could, but has no more inotify instances or watches, or if the path is not there."""
        with self._lock:
            if self._is_closed:
                return False
            if self._notifier is None:
                self._notifier = Notifier()
            self._topics.add(topic)
            watch = self._notifier.add(path, MODIFY | ATTRIB | DELETE_SELF)
            if watch is None:
                return False
            self._followed[watch] = topic, partition
            return True

    def forget(self, topic: Followed) -> None:
        """End the watches of a topic."""
        with self._lock:
            self._topics.discard(topic)
            gone = [watch for watch, (each, _) in self._followed.items() if each is topic]
            for watch in gone:
                del self._followed[watch]
                if self._notifier is not None:
                    self._notifier.remove(watch)

    def take(self) -> None:
        """Note all events that the kernel has queued, and call the callbacks that they concern."""
        if self._notifier is None:
            return
        concerned: dict[Followed, set[int] | None] = {}
        with self._lock:
            if self._notifier is None:
                return
            try:
                is_all = self._read_queue(self._notifier, concerned)
            except BaseException:  # an interrupt, after which events that were read are lost
                self._note_all()
                raise
            if is_all:
                self._note_all()
                concerned = dict.fromkeys(self._topics)
        for topic, partitions in concerned.items():
            topic.wake(partitions)

    def _read_queue(self, notifier: Notifier, concerned: dict[Followed, set[int] | None]) -> bool:
        """Note the events that are queued, and which topics and partitions they concern. True if some were lost, or are
        left: then everything may have changed."""
        if not notifier.has_events:  # pragma: no cover - not Linux
            return True
        for _ in range(_READS_MAX):
            news = notifier.take()
            for watch in news.changed:
                found = self._followed.get(watch)
                if found is not None:
                    topic, partition = found
                    topic.note((partition,))
                    partitions = concerned.setdefault(topic, set())
                    assert partitions is not None
                    partitions.add(partition)
            for watch in news.ended:
                found = self._followed.pop(watch, None)
                if found is not None:
                    found[0].note_unwatched(found[1])
            if news.overflow:
                return True
            if not news.changed:
                return False
        return True

    def _note_all(self) -> None:
        for topic in self._topics:
            topic.note_all()

    def close(self) -> None:
        """Idempotent. The topics, which know that they are closed, must wake the threads that wait."""
        self._is_closed = True
        self.thread.close()

    def _step(self) -> None:
        notifier = self._notifier
        if notifier is None:  # closed, or no topic is followed: whoever needs the thread has followed one before
            return
        notifier.sleep(_SLEEP_S)
        self.take()

    def _interrupt(self) -> None:
        notifier = self._notifier
        if notifier is not None:
            notifier.interrupt()

    def _drop(self) -> None:
        with self._lock:
            notifier, self._notifier = self._notifier, None
            self._followed.clear()
            self._topics.clear()
        if notifier is not None:
            notifier.close()

    def __del__(self) -> None:
        # A log that was dropped without `close`: no thread runs, for a thread would hold a reference to this object.
        if self._notifier is not None:
            self._notifier.close()
