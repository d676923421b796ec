"""Guesses the end of the range that a scan with a limit needs, so that etcd counts few keys.

The problem: etcd counts all keys of a range for each answer, whatever the limit, so the first ten keys of a hundred
thousand cost as much as counting all of them. Which key is the tenth is not known before the scan. So the end of the
range is guessed: the range holds the keys that share their first bytes with a key nearby, as many bytes as were right
for the last scan of that prefix. If the range holds too few keys, the scan goes on with a wider one; if it held too
many, the next scan begins with a narrower one. A wrong guess changes only the cost of a scan, never its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COUNTED_MAX = 1000
"""How many keys a range may hold before the next one is made narrower. Counting this number of keys costs little."""
PREFIXES_MAX = 1000


@dataclass(slots=True)
class _Learned:
    shared: int = 0
    """How many leading bytes beyond the prefix the keys of a range share; 0: all keys of the prefix."""
    head: bytes = b""
    """The first key of the prefix, as last seen."""


class Narrowing:
    """What was learned, by prefix. Threads share it: the worst that a race does is a worse guess."""

    def __init__(self) -> None:
        self._learned: dict[bytes, _Learned] = {}

    def ends(self, prefix: bytes, first: bytes, end: bytes) -> Iterator[bytes]:
        """Ends to try for a scan of the prefix from `first`, each further than the one before; the last is `end`."""
        learned = self._learned.get(prefix, _Learned())
        near = first.rstrip(b"\0") if first > prefix else learned.head
        for length in range(min(len(near), len(prefix) + learned.shared), len(prefix), -1):
            guess = near[: length - 1] + bytes([near[length - 1] + 1])
            if first < guess < end:
                yield guess
        yield end

    def learn(self, prefix: bytes, counted: int, widened: int, head: bytes | None) -> None:
        """A scan's first range held `counted` keys, and had to be widened this number of times. `head`: see
        `_Learned`."""
        if len(self._learned) >= PREFIXES_MAX and prefix not in self._learned:
            self._learned.clear()
        learned = self._learned.setdefault(prefix, _Learned())
        if head is not None:
            learned.head = head
        if counted > COUNTED_MAX:
            learned.shared += 1
        elif widened > 1:  # once is the neighbourhood of a boundary
            learned.shared = max(0, learned.shared - widened + 1)
