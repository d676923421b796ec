"""Which ids are final, though ids are given out before the commit."""

from __future__ import annotations

from typing import Final

_PREPARED: Final = "-1/"


class Settling:
    """Which ids are final, by who was writing when they were seen. No I/O, no clock.

    Told the end of what is visible, and *after* that who holds a writer's lock on the table, it knows: whoever may
    still commit a smaller id drew it before, within an INSERT, so that he held the lock by then and holds it until he
    is done. When those have gone, everything below that end is final; later writers draw larger ids. Unlike the
    oldest transaction id this also covers a writer who has drawn an id and has no transaction id yet, and writers of
    other tables hold nothing up.

    A prepared transaction may keep its lock under another name: after a restart of the server, and on old ones at once.
    So when the others are gone, the prepared ones of that moment are waited for.
    """

    def __init__(self, settle_s: float = 0.0) -> None:
        self.end = 0
        """Ids below it are final."""
        self.settle_s = settle_s
        self._next: int | None = None
        self._active: frozenset[str] = frozenset()
        self._prepared: frozenset[str] | None = None
        self._since = 0.0

    @property
    def is_waiting(self) -> bool:
        return self._next is not None

    def observe(self, visible_end: int, holders: frozenset[str], now: float) -> None:
        """What was visible, and who held a writer's lock afterwards, at this time in seconds."""
        prepared = frozenset(holder for holder in holders if holder.startswith(_PREPARED))
        if self._next is not None and self._is_over(holders, prepared, now):
            self.end, self._next = self._next, None
        if self._next is None and visible_end > self.end:
            self._next, self._active, self._prepared, self._since = visible_end, holders - prepared, None, now
            if self._is_over(holders, prepared, now):
                self.end, self._next = visible_end, None

    def _is_over(self, holders: frozenset[str], prepared: frozenset[str], now: float) -> bool:
        self._active &= holders
        if self._active:
            return False
        self._prepared = prepared if self._prepared is None else self._prepared & prepared
        return not self._prepared and now - self._since >= self.settle_s
