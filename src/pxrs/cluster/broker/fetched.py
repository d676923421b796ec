"""A cache of entries that were read from storage nodes, decoded and verified.

Readers of old messages ask for about a megabyte at a time, and an entry may be several megabytes long. Without this
cache the broker would read the whole entry again for each request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from pxrs.cluster.broker.entries import Entry

FETCHED_BYTES_MAX: Final = 64 << 20


class FetchedEntries:
    """Entries of all ledgers, at most `bytes_max` in total; the least recently used ones are dropped. Confirmed entries
    never change, so cached ones stay valid. Threads share it."""

    def __init__(self, bytes_max: int = FETCHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, int], Entry] = OrderedDict()
        """By the ledger's id and the number of the entry, the most recently used last."""
        self.bytes = 0

    def get(self, ledger: str, first: int, max_bytes: int) -> list[Entry]:
        """The consecutive cached entries from `first` on, about `max_bytes`; empty if `first` is not cached."""
        found: list[Entry] = []
        size = 0
        with self._lock:
            while (entry := self._entries.get((ledger, first + len(found)))) is not None:
                size += entry.size
                if found and size > max_bytes:
                    break
                self._entries.move_to_end((ledger, first + len(found)))
                found.append(entry)
        return found

    def add(self, ledger: str, number: int, entry: Entry) -> None:
        with self._lock:
            before = self._entries.pop((ledger, number), None)
            self._entries[ledger, number] = entry
            self.bytes += entry.size - (0 if before is None else before.size)
            while self.bytes > self._bytes_max:
                self.bytes -= self._entries.popitem(last=False)[1].size

    def forget(self, ledger: str) -> None:
        """Drop the entries of a ledger that was removed."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == ledger]:
                self.bytes -= self._entries.pop(key).size
