"""How far a table goes: which ids are visible, which of them are final, and which the table has given out."""

from __future__ import annotations

import time
from collections.abc import Callable

from pxrs.sources.sql_table.settled_end import SettledEnd
from pxrs.sources.sql_table.table import Table


class TableEnds:
    """The ends of one table, as the last queries found them. The caller holds the lock of the `SqlTable`."""

    def __init__(self, table: Table, settle_s: float, on_waiting: Callable[[], None]) -> None:
        """on_waiting: called when rows can be seen that are not final, and there were none before: they become final
        without a notification, so that the table must be looked at more often from now on."""
        self._table, self._on_waiting = table, on_waiting
        self.settled = SettledEnd(settle_s)
        self.visible = 0
        """One behind the largest id that could be seen at the last query."""
        self._drawn: int | None = None
        """One behind the last id that the table has given out, as queried since `visible`; None: not queried yet."""

    def look(self) -> None:
        """Query the visible end, and compute the settled end from it."""
        self.look_at_visible()
        if self.visible <= self.settled.end and not self.settled.is_waiting:
            return
        was_waiting = self.settled.is_waiting
        # Query the holders after the visible end, in a statement of its own: `SettledEnd` relies on this order.
        self.settled.observe(self.visible, self._table.holders(), time.monotonic())
        if self.settled.is_waiting and not was_waiting:
            self._on_waiting()

    def look_at_visible(self) -> None:
        """Query the visible end alone."""
        self.visible, self._drawn = self._table.visible_end(), None

    def is_reachable(self, offset: int) -> bool:
        """Whether the table may have given out all ids before this one; their rows may be deleted."""
        if offset <= self.visible:
            return True
        if self._drawn is None:
            drawn = self._table.drawn_end(self.visible)
            self._drawn = self.settled.end if drawn is None else drawn
        return offset <= self._drawn
