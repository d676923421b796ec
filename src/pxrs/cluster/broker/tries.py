"""When a partition that could not be opened is tried again. Pure: the time is an argument.

    how long it has not been opened       pause between the beginnings of two tries
    up to QUICK_S, as in a fail-over      RETRY_S
    longer                                doubles, up to RETRY_S_MAX, or UNHEARD_S_MAX if nodes were not heard

A try that took longer than the pause is followed by the next one after RETRY_S: a recovery waits for storage nodes
itself. A change of what the tries depend on, the storage nodes and the decisions of operators, causes a try at once,
and the pauses begin anew. After an error of the registry they begin anew as well: nothing tells that it answers again,
and a call of it that fails takes its time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

RETRY_S: Final = 0.5
RETRY_S_MAX: Final = 10.0
UNHEARD_S_MAX: Final = 2.0
"""The longest pause after a try in which storage nodes were not heard. If a node was alive all the time and could only
not be reached, no change of the registry tells that it can be reached again."""
QUICK_S: Final = 3.0
_NEVER: Final = float("inf")


class Tries:
    """The tries to open one partition. The caller has a lock."""

    def __init__(self) -> None:
        self.count = 0
        self._next = 0.0
        """When the next try may begin (monotonic); infinity during a try."""
        self._since: float | None = None
        """When the first try began after which the pauses have not begun anew."""
        self._pause_s = RETRY_S
        self._began = 0.0
        self._grounds: Hashable = None

    @property
    def is_trying(self) -> bool:
        return self._next == _NEVER

    def may_begin(self, now: float, grounds: Hashable) -> bool:
        """grounds: what the result of a try depends on, as it is now."""
        return not self.is_trying and (now >= self._next or (self.count > 0 and grounds != self._grounds))

    def begin(self, now: float, grounds: Hashable) -> None:
        """A try begins. grounds: as it is now."""
        if grounds != self._grounds or self._since is None:
            self._since, self._pause_s = now, RETRY_S
        self._began, self._grounds, self._next = now, grounds, _NEVER
        self.count += 1

    def failed(self, now: float, pause_s_max: float = RETRY_S_MAX, *, starts_anew: bool = False) -> float:
        """The try has failed. Returns how long to wait before the next one. starts_anew: the pauses begin anew."""
        assert self._since is not None
        if starts_anew:
            self._since = None
            self._pause_s = RETRY_S
        elif now - self._since >= QUICK_S:
            self._pause_s = min(self._pause_s * 2, pause_s_max)
        self._next = max(now + RETRY_S, self._began + self._pause_s)
        return self._next - now

    def wait_s(self, now: float) -> float:
        """How long until the next try may begin; infinity during a try."""
        return self._next - now
