"""Which partitions the messages without a key go to.

A message without a key has no partition of its own, so its sender may choose. The choice has two aims. Messages that
are stored together should go to few partitions, because each partition costs an append and a sync of its own. And in
the long run every partition should get the same number of messages, because each is read by one member of a group at a
time.

So the messages that are stored together are cut into runs of consecutive ones, of at most `run_rows` messages or about
`run_bytes` bytes, unless there are so many messages that every partition gets a run, all of the same length. The runs
go to the partitions that have got the fewest messages without a key from this sender so far. So no partition is ever
more than `run_rows` messages ahead of another one, but for partitions that take no more messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

RUN_ROWS: Final = 1_000
"""How many messages without a key go to one partition before another one is used, if they are stored together."""


class KeylessSpread:
    """The choice of one sender. Not safe for several threads at once: a producer calls it under its lock."""

    __slots__ = ("_first", "_run_bytes", "_run_rows", "_sent")

    def __init__(self, partitions: int, first: int, run_rows: int = RUN_ROWS, run_bytes: int = 1 << 20) -> None:
        """
        first: the partition that is preferred among those that have got equally few. Senders that start at different
               partitions spread their first messages, of which there may be no more.
        """
        self._sent = [0] * partitions
        self._first, self._run_rows, self._run_bytes = first, run_rows, run_bytes

    def fill(self, chosen: pa.Array, size: int, broken: Collection[int] = ()) -> pa.Array:
        """`chosen` has the partition of each message, and null for a message without a key; this fills the nulls.

        size:   bytes of all these messages.
        broken: partitions that take no more messages. They are used only if there are no others.
        """
        rows = chosen.null_count
        if not rows:
            return chosen
        partitions = self._take(rows, size * rows // len(chosen), broken)
        return partitions if rows == len(chosen) else pc.replace_with_mask(chosen, chosen.is_null(), partitions)

    def _take(self, rows: int, size: int, broken: Collection[int]) -> pa.Array:
        count = len(self._sent)
        usable = [number for number in range(count) if number not in broken] or list(range(count))
        runs = min(len(usable), rows, max(-(-rows // self._run_rows), -(-size // self._run_bytes)))
        usable.sort(key=lambda number: (self._sent[number], (number - self._first) % count))
        base, more = divmod(rows, runs)
        parts = []
        # In the order of the partitions, which is the order in which the rows are going to be sorted.
        for place, number in sorted(enumerate(usable[:runs]), key=lambda each: each[1]):
            share = base + (place < more)
            self._sent[number] += share
            parts.append(pa.repeat(pa.scalar(number, pa.int32()), share))
        return parts[0] if runs == 1 else pa.concat_arrays(parts)
