"""A cache of the most recently confirmed entries. Most readers read near the end, and need no storage node (P4)."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque

from pxrs.cluster.broker.entries import Entry, Frame


class Recent:
    """The entries of all partitions of a broker, at most `bytes_max` in total. Threads share it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._order: deque[RecentEntries] = deque()
        """The partition of each cached entry, in the order in which the entries were added."""
        self._bytes = 0

    def partition(self) -> RecentEntries:
        return RecentEntries(self)

    def _add(self, kept: RecentEntries, entry: Entry) -> None:
        with self._lock:
            kept.offsets.append(entry.offset)
            kept.entries.append(entry)
            self._order.append(kept)
            self._bytes += entry.size
            while self._bytes > self._bytes_max and self._order:
                self._drop_first(self._order.popleft())

    def _drop_first(self, kept: RecentEntries) -> None:
        if kept.dropped < len(kept.entries):  # otherwise `forget` has dropped the partition's entries
            gone = kept.entries[kept.dropped]
            assert gone is not None
            self._bytes -= gone.size
            kept.entries[kept.dropped] = None
            kept.dropped += 1
            if kept.dropped > 64 and 2 * kept.dropped > len(kept.entries):
                del kept.entries[: kept.dropped], kept.offsets[: kept.dropped]
                kept.dropped = 0

    def _read(self, kept: RecentEntries, offset: int, max_bytes: int) -> list[Frame] | None:
        with self._lock:
            at = bisect_right(kept.offsets, offset) - 1
            if at < kept.dropped:
                return None
            found: list[Frame] = []
            size = 0
            while at < len(kept.entries) and (not found or size < max_bytes):
                entry = kept.entries[at]
                assert entry is not None
                found += entry.frames
                size += entry.size
                at += 1
            return found

    def _entries_from(self, kept: RecentEntries, offset: int) -> list[Entry] | None:
        with self._lock:
            at = bisect_right(kept.offsets, offset) - 1
            if at < kept.dropped or kept.offsets[at] != offset:
                return None
            return [entry for entry in kept.entries[at:] if entry is not None]

    def _forget(self, kept: RecentEntries) -> None:
        with self._lock:
            for entry in kept.entries[kept.dropped :]:
                assert entry is not None
                self._bytes -= entry.size
            kept.entries.clear()
            kept.offsets.clear()
            kept.dropped = 0
            self._order = deque(each for each in self._order if each is not kept)


class RecentEntries:
    """The cached entries of one partition: consecutive entries up to its end."""

    def __init__(self, all_of_them: Recent) -> None:
        self._all = all_of_them
        self.offsets: list[int] = []
        self.entries: list[Entry | None] = []
        self.dropped = 0
        """How many entries at the beginning of both lists were dropped from the cache."""

    def add(self, entry: Entry) -> None:
        """Add the next entry of the partition."""
        self._all._add(self, entry)

    def read(self, offset: int, max_bytes: int) -> list[Frame] | None:
        """The frames from the entry that contains this offset on, about `max_bytes`; None if that entry is not cached.
        The offset must be before the end of the partition."""
        return self._all._read(self, offset, max_bytes)

    def entries_from(self, offset: int) -> list[Entry] | None:
        """All entries from the one that begins at this offset on; None if that entry is not cached."""
        return self._all._entries_from(self, offset)

    def forget(self) -> None:
        self._all._forget(self)
