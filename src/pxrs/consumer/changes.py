"""How a thread that waits for messages learns that it should look again for another reason than new messages.

The problem: a thread that reads looks at the lanes, finds nothing to hand out, and waits for the source. If a partition
is assigned, resumed or sought between the look and the wait, the thread must not sleep through it.

Invariant: whoever changes something that a look depends on changes it first and calls `announce` afterwards. Whoever
waits takes `next_change` first, looks afterwards, and gives it to `Source.fetch` as `cancel`. So either the look sees
the change, or the wait ends at once.

`_lock` guards the exchange of the `Cancel` only; no other lock is taken while it is held.
"""

from __future__ import annotations

import threading

from pxrs.waiting import Cancel


class Changes:
    """The changes of one consumer that a waiting thread must notice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = Cancel()

    @property
    def next_change(self) -> Cancel:
        """Is set by the next call of `announce`."""
        return self._next

    def announce(self) -> None:
        """Let every thread that waits look again. From any thread."""
        # Under the lock: if two threads exchanged the same `Cancel`, a thread could wait for one that nobody sets.
        with self._lock:
            changed, self._next = self._next, Cancel()
        changed.set()
