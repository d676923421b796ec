"""Computes up to which id all rows are final, although transactions draw ids before they commit."""

from __future__ import annotations

from typing import Final

_PREPARED: Final = "-1/"


class SettledEnd:
    """Computes the settled end. Reads no clock and does no I/O: `observe` is told what the database shows.

    The caller reads the end of the visible ids, and *after that* the transactions that hold a writer's lock on the
    table. A transaction that may still commit a smaller id has drawn it in an INSERT that began earlier, so it held the
    lock by then, and holds it until it ends. Once all these transactions have ended, all ids before that end are final;
    later transactions draw larger ids. Unlike the oldest transaction id, the lock also covers a transaction that has
    drawn an id and has no transaction id yet, and transactions that write to other tables cause no delay.

    A prepared transaction may hold its lock under another id: after a restart of the server, and on old servers from
    the beginning. So once the other transactions have ended, the transactions that are prepared at that moment must end
    too.
    """

    def __init__(self, settle_s: float = 0.0) -> None:
        self.end = 0
        """The settled end: all ids before it are final."""
        self.settle_s = settle_s
        self._next: int | None = None
        self._active: frozenset[str] = frozenset()
        self._prepared: frozenset[str] | None = None
        self._since = 0.0

    @property
    def is_waiting(self) -> bool:
        return self._next is not None

    def observe(self, visible_end: int, holders: frozenset[str], now: float) -> None:
        """Note the end of the visible ids, and which transactions held a writer's lock afterwards. now: in seconds."""
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
