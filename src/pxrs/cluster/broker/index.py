"""Pure: the index of a ledger's entries by offset and time."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Indexed(NamedTuple):
    """The description of one entry in the index."""

    offset: int
    rows: int
    size: int
    last_timestamp: int
    stored_at: int

    @property
    def next_offset(self) -> int:
        return self.offset + self.rows


class LedgerIndex:
    """The entries of one ledger, from entry 0 on. Callers hold a lock while entries are still added."""

    def __init__(self) -> None:
        self._offsets, self._rows, self._sizes = array("q"), array("q"), array("q")
        self._times, self._stored = array("q"), array("q")
        self.bytes = 0
        """The total length of all entries except entry 0, which contains no messages."""

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, entry: Indexed) -> None:
        """Add the next entry."""
        if len(self):
            self.bytes += entry.size
        self._offsets.append(entry.offset)
        self._rows.append(entry.rows)
        self._sizes.append(entry.size)
        self._times.append(entry.last_timestamp)
        self._stored.append(entry.stored_at)

    def at(self, number: int) -> Indexed:
        return Indexed(
            self._offsets[number], self._rows[number], self._sizes[number], self._times[number], self._stored[number]
        )

    def span(self, offset: int, max_bytes: int) -> tuple[int, int]:
        """The first and the last entry to read from this offset on, for about `max_bytes` in total."""
        first = self.find(offset)
        return first, self.reach(first, max_bytes)

    def find(self, offset: int) -> int:
        """The number of the entry that contains this offset, which must be in the ledger."""
        return bisect_right(self._offsets, offset) - 1

    def reach(self, first: int, max_bytes: int) -> int:
        """The last entry such that the entries from `first` to it have at most `max_bytes` in total; at least
        `first`."""
        last, size = first, self._sizes[first]
        while last + 1 < len(self) and size + self._sizes[last + 1] <= max_bytes:
            last += 1
            size += self._sizes[last]
        return last

    def not_before(self, timestamp: int) -> Iterator[int]:
        """The numbers of the entries with a message of this time or later, in order."""
        return (number for number in range(1, len(self)) if self._times[number] >= timestamp)

    @property
    def stored_at(self) -> int | None:
        """When the last entry with messages was stored; None if there is none."""
        return self._stored[-1] if len(self) > 1 else None
