"""Entries that were read from storage nodes, decoded and checked.

Readers of old messages ask for about a megabyte at a time, and an entry may have several. Without this cache the broker
would read the whole entry again for each of these requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from pxrs.cluster.broker.entries import Entry

FETCHED_BYTES_MAX: Final = 64 << 20


class FetchedEntries:
    """Those of all ledgers, at most `bytes_max`; the ones that were used least recently are dropped. Confirmed entries
    never change, so what is kept stays valid. Threads share it."""

    def __init__(self, bytes_max: int = FETCHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, int], Entry] = OrderedDict()
        """By the ledger's id and the number of the entry. The one that was used last comes last."""
        self.bytes = 0

    def get(self, ledger: str, first: int, max_bytes: int) -> list[Entry]:
        """The entries from `first` on that are kept, about `max_bytes` of them; none if `first` is not kept."""
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
        """The ledger was removed."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == ledger]:
                self.bytes -= self._entries.pop(key).size
