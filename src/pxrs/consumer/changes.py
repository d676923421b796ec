"""How a thread that waits for messages learns that it should look again for another reason than new messages.

The problem: a thread that reads looks at the lanes, finds nothing to hand out, and waits for the source. If a partition
is assigned, paused, resumed or sought between the look and the wait, the thread must not sleep through it.

Invariant: whoever changes something that a look depends on changes it first and calls `announce` afterwards. Whoever
waits reads `version` first, looks afterwards, and passes that version to `wait`. So either the look sees the change, or
`wait` sees a newer version and returns at once.

No lock: `version` only rises. Two threads that raise it at the same moment may raise it by one, which is enough,
because both have made their changes before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pxrs.log.contract import Source


class Changes:
    """The changes of one consumer that a waiting thread must notice."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.version = 0
        """Rises with every change."""

    def announce(self) -> None:
        """Let every thread that waits look again. From any thread."""
        self.version += 1
        self._source.wake()

    def note(self) -> None:
        """As `announce`, for a change that only this thread's next wait must notice."""
        self.version += 1

    def wait(
        self,
        positions: Mapping[int, int],
        version: int,
        timeout: float | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        """Wait until a message is there at one of the positions, something has changed, or the time is up.

        positions: by partition, the offset of the next message.
        version:   `version` as it was before the caller looked.
        is_over:   one more reason not to wait; its change is followed by `announce`."""
        self._source.wait(positions, timeout, lambda: self.version != version or (is_over is not None and is_over()))
