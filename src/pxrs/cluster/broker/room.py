"""Back-pressure: how many bytes of entries the partitions of a broker together may have that are not confirmed.

Every storage node may get a copy of every entry, and a link fails its node if more bytes than `unanswered_bytes_max`
are unanswered. Each partition bounds its own entries (`pending_bytes_max`), but the sum over many partitions could
exceed what a link allows. `Room` bounds the sum, well below a link's limit. So a link reaches its limit only if its
node is far behind the acknowledgements of the others.

A partition may send another entry while it has fewer unconfirmed bytes than are left of the room. So n partitions whose
entries are not confirmed get 1/(n + 1) of the room each, and the last such part stays free for the others. The entry
that is sent may be longer than what is left: the bound is exceeded by one entry at most.

The room's lock is taken under locks of partitions, and nothing is locked under it. A thread that waits for room holds
no lock of a partition.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Room:
    """Threads share it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.used = 0
        """Unconfirmed bytes of all partitions."""
        self.waiting = 0
        """How many threads are in `wait`."""
        self._changed = threading.Condition(threading.Lock())

    def take(self, own: int, size: int) -> bool:
        """Count these bytes as used, and return True; or False if the partition must wait. own: its unconfirmed
        bytes."""
        with self._changed:
            if not self._has_room(own):
                return False
            self.used += size
            return True

    def _has_room(self, own: int) -> bool:
        return own < self._bytes_max - self.used

    def add(self, size: int) -> None:
        """Count these bytes as used, even if they are too many."""
        with self._changed:
            self.used += size

    def give_back(self, size: int) -> None:
        """These bytes are confirmed, or will never be."""
        with self._changed:
            self.used -= size
            if self.waiting:
                self._changed.notify_all()

    def wait(self, own: Callable[[], int], until: float) -> bool:
        """Wait until `take` may succeed; False if it was not in time. own: the partition's unconfirmed bytes, called
        without a lock of the partition; `give_back` follows each decrease. until: on the monotonic clock."""
        with self._changed:
            self.waiting += 1
            try:
                left_s = until - time.monotonic()
                return left_s > 0 and self._changed.wait_for(lambda: self._has_room(own()), left_s)
            finally:
                self.waiting -= 1
