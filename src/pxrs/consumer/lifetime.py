"""Whether a consumer may be used: not after `close`, and not in a process that was forked after it was made (R11); and
whether it hands out messages: not after `stop`."""

from __future__ import annotations

import os

from pxrs.errors import Closed, UsedAfterFork


class Lifetime:
    """Whether one consumer is open, closed, or used in a forked child."""

    def __init__(self, topic: str, group: str) -> None:
        self._topic, self._group = topic, group
        self._pid = os.getpid()
        self.is_closed = False
        """Set as soon as `close` is called."""
        self.is_stopped = False
        """Set by `stop`, for good: nothing is handed out any more, and every call that reads ends normally. A plain
        field, so that the handler of a signal can set it without a lock."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the consumer."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise UsedAfterFork in a forked child."""
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the consumer of {self._topic} was created before a fork: create one in the child")

    def check_usable(self) -> None:
        """Raise UsedAfterFork in a forked child, and Closed after `close`."""
        self.check_process()
        if self.is_closed:
            raise Closed(f"the consumer of {self._topic} in group {self._group} was closed")
