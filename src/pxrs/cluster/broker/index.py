"""Pure: which entries a ledger has, and which offsets and times are in each."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Indexed(NamedTuple):
    """What is known of one entry without its bytes."""

    offset: int
    rows: int
    size: int
    last_timestamp: int
    stored_at: int

    @property
    def next_offset(self) -> int:
        return self.offset + self.rows


class LedgerIndex:
    """The entries of one ledger, from entry 0 on. Callers hold a lock, or nobody adds to it any more."""

    def __init__(self) -> None:
        self._offsets, self._rows, self._sizes = array("q"), array("q"), array("q")
        self._times, self._stored = array("q"), array("q")
        self.bytes = 0
        """The bytes of all entries but the first, which holds no message."""

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, entry: Indexed) -> None:
        """The next entry."""
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
        """The first and the last of the entries to read from this offset on, which have about `max_bytes` together."""
        first = self.find(offset)
        return first, self.reach(first, max_bytes)

    def find(self, offset: int) -> int:
        """The number of the entry that holds this offset, which the ledger must have."""
        return bisect_right(self._offsets, offset) - 1

    def reach(self, first: int, max_bytes: int) -> int:
        """The last of the entries from `first` on that have about `max_bytes` together; `first` itself at least."""
        last, size = first, self._sizes[first]
        while last + 1 < len(self) and size + self._sizes[last + 1] <= max_bytes:
            last += 1
            size += self._sizes[last]
        return last

    def not_before(self, timestamp: int) -> Iterator[int]:
        """The numbers of the entries that hold a message of this time or later, in order."""
        return (number for number in range(1, len(self)) if self._times[number] >= timestamp)

    @property
    def stored_at(self) -> int | None:
        """When the last entry with messages was stored; None if there is none."""
        return self._stored[-1] if len(self) > 1 else None
